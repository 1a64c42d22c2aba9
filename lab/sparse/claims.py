"""How the claims about sparse verification are judged, from stored rows alone (record.py writes them).

F1 to F6 are the paper's claims in the form in which they could fail; the others are what reviews of it ask
next, and our own controls. A setting's name says what it leaves out: see settings.py.
"""
import math
from operator import itemgetter

from lab.common import Claim, PageTable, mean
from lab.sparse.settings import (BOTH, BY_ROOT, CHANNELS, GRID, HARD, KEPT_DRAFTER, KEPT_SHARES, LONG, MEDIUM,
                                 MIXTURE, SEEDS, SWEEPS)

WORDS = dict(       # key of a setting in a stored row: column of a table
    flops='FLOPs', run='run', bytes='bytes', seconds='seconds', keys='keys', channels='channels',
    union='union', kl='KL', alike='same choice')
SPANS = ((LONG, 512), (512, 1024), (1024, 2048))        # tokens of a prompt: from, below
EVERY_SECOND = 'attn 75 %, every second layer chooses'
LENGTH_WORDS = dict(dense='dense', calibrated='75 %', second='75 %, every second layer chooses',
                    recent='75 %, the latest keys', random='75 %, by lot', quest='75 %, Quest',
                    oracle='75 %, oracle', tenth='90 %, every second layer chooses')

# why a claim may fail, where several share the reason
MEAN_HIDES = 'A block is scored by its mean key, which hides the one key in it that is looked for'
SEES_LESS = 'A target that sees less guesses otherwise than the draft, which sees all'
ALREADY_FAR = 'Where one part has changed what the model says, leaving out another changes little more'
OTHER_LAYERS = 'How large channels are, and which layers look elsewhere than the one before, differs by task'
NO_EYE = 'The median has no eye on quality: it makes half of the tokens skip, whatever they lose'
MEANT = 'An expert is left out also where the router gave it almost as much as another'
DRAFT_COSTS = 'A drafting pass still reads all weights, and beside them the keys are little'
CALLS = 'In a small model a pass waits for its calls, and little for what they copy'
LOOKS_UP = 'A small model looks up much of what it writes, in keys that are not among the quarter it reads'

CONTROLS = {        # selection: (line of F4, why it may fail)
    'recent': (0.02, MEAN_HIDES),
    'random': (0.02, MEAN_HIDES),
    'quest': (0.0, 'A single key sets the extremes of its block, and hardly moves the mean'),
    'oracle': (0.0, 'The oracle sees how much attention each block would really get'),
    'joint': (0.0, 'A budget that all heads share goes to those that look things up'),
}
QUERIES = {         # who asks, otherwise than by default: why it may be the better
    'query last': 'The last row speaks for a pass as well as the first: neither knows what others seek',
    'query mean': 'A mean of all rows speaks for each of them, where the root speaks for itself; but so '
                  'guesses have a say in their own judgement',
}
OTHER_ANCHORS = {   # the layers that choose, otherwise than by calibration: why they may be the better
    'second': 'The layers differ from those before them by nearly as much each, so that the order is mostly '
              'chance, and it leaves long runs of layers that reuse an old choice',
    'random': 'The least similar layers stand side by side more often than drawn ones do',
}
OF_THE_FILE = ('They are measured on texts of all tasks, in larger blocks, and stand in a row: a layer far '
               'behind them reuses what was chosen long before')
ANCHOR_WORDS = dict(second='every second layer', random='random layers')


# ------------------------------------------------------------------------------ figures of rows with settings

def value(row, setting, key):
    """What a stored row says of one setting."""
    return row['settings'][setting][key]


def average(rows, setting, key):
    return mean(value(row, setting, key) for row in rows)


def mean_of(number):
    """The figure: the mean over rows of a function of a row."""
    def figure(rows):
        return mean(map(number, rows))
    return figure


def difference(setting, other, key):
    """The figure: mean over rows of one setting's number less another's."""
    def less(row):
        return value(row, setting, key) - value(row, other, key)
    return mean_of(less)


def quotient(setting, other, key):
    """The figure: mean over rows of one setting's number over another's."""
    def over(row):
        return value(row, setting, key) / value(row, other, key)
    return mean_of(over)


def excess(hybrid, first, second):
    """The figure: mean over rows of a hybrid's KL less the sum of its two parts' KL."""
    def more(row):
        return value(row, hybrid, 'kl') - value(row, first, 'kl') - value(row, second, 'kl')
    return mean_of(more)


def perplexity_ratio(rows, setting):
    """Sparse over dense, from mean nats a token."""
    return math.exp(mean(value(row, setting, 'nll') - row['nll'] for row in rows))


# ----------------------------------------------------------------------------------------------------- claims

def claims(stored):
    """Every Claim of this paper, from {record name: Stored}, of those records that are there."""
    rows = {name: record.rows for name, record in stored.items()}
    found = []
    if 'math' in rows:
        found += lab_claims(rows)
    return found + long_claims(rows.get('lengths', [])) + kept_key_claims(rows.get('kept', []))


def lab_claims(rows):
    """Every Claim of what is measured on the lab's tasks, from {record name: rows}."""
    found = [profile_claim(rows['math'] + rows['table'])]
    found += reduction_claims(rows['table'], rows['story'])
    found += length_claims(rows['table'])
    found.append(overlap_claim(rows['table']))
    found += selection_claims(rows['table'])
    found += query_claims(rows['table'])
    found += anchor_claims(rows['anchors'], 'blocks of 4')
    found += anchor_claims(rows['usual'], 'the default blocks and L0')
    found += channel_claims(rows)
    found.append(reasoning_claim(rows['math'], rows['story']))
    found.append(hybrid_claim(rows['math'] + rows['table'] + rows['story']))
    for task in ('math', 'table'):
        found.append(stress_claim(task, rows[task]))
    found += elsewhere_claims(rows['elsewhere'])
    found.append(drift_claim(rows['drift']))
    found += mixture_claims(rows['mixture'])
    found += distilled_claims(rows['distilled'])
    return found


def profile_claim(rows):
    return Claim("Profile: verification's share of the seconds of `sd`", 'paper', 0.5, rows,
                 mean_of(itemgetter('verifying')), note='math and tables, gamma 4',
                 why='The draft makes a pass for each token, the target one a cycle; in small models a pass '
                     'costs its calls, whatever its size')


def reduction_claims(tables, stories):
    """F1: the largest reduction of FLOPs among settings that keep tables right and stories likely.

    By the FLOPs that are needed, which an ideal kernel would do, and by those that the code executes.
    """
    found = []
    for key, words in dict(flops='that are needed', run='that the code executes').items():
        found.append(reduction_claim(tables, stories, key, words))
    return found


def reduction_claim(tables, stories, key, words):
    """key: of the FLOPs in a stored row; words: which these are."""
    keep_stories = [name for name in GRID if perplexity_ratio(stories, name) <= 1.02]
    far = [row for row in tables if row['tokens'] >= 512] or tables

    def largest_reduction(rows):
        best = 1.0
        for name in keep_stories:
            lost = average(rows, 'dense', 'right') - average(rows, name, 'right')
            if lost <= 0.01:
                best = max(best, 1 / average(rows, name, key))
        return best
    text = f'F1: fewer FLOPs {words}, at 512 tokens or more, right within 1 pp, stories within 2 %'
    right = average(tables, 'dense', 'right')
    return Claim(text, 'paper', 2, far, largest_reduction,
                 note=f'times, n = {len(far)}, of all tables {right:.0%} right dense',
                 why='At these lengths a pass is mostly weights; keys could be spared more freely, were they '
                     'not what a table is looked up in')


def tables_note(tables):
    return f'tables of {LONG} tokens or more, n = {len(tables)}'


def length_claims(tables):
    """F2: block efficiency stays."""
    found = []
    for name in (MEDIUM, HARD):
        found.append(Claim(f'F2: tokens a cycle at {name} over dense', 'paper', 0.95, tables,
                           quotient(name, 'dense', 'tokens_a_cycle'), note=tables_note(tables),
                           why=SEES_LESS))
    return found


def overlap_claim(tables):
    """F3: one choice serves all rows of a pass."""
    def overlap(row):
        return value(row, 'token 75 %', 'overlap')
    text = "F3: overlap of the root's blocks with each later row's own, upper layers"
    return Claim(text, 'paper', 0.8, tables, mean_of(overlap), note=f'75 %, {tables_note(tables)}',
                 why='Each row is about to write another token, and looks for it elsewhere')


def selection_claims(tables):
    """F4: the mean-key score chooses better than controls do."""
    note = (f'75 %, {average(tables, MEDIUM, "right"):.0%} right, '
            f'dense {average(tables, "dense", "right"):.0%}')
    found = []
    for other, (line, why) in CONTROLS.items():
        found.append(Claim(f'F4: tables right, mean-key blocks less {other} blocks', 'ours', line, tables,
                           difference(MEDIUM, f'{other} 75 %', 'right'), note=note, why=why))
    return found


def query_claims(tables):
    """Who asks."""
    found = []
    for other, why in QUERIES.items():
        text = f"KL at 75 %, {other} less the root's query"
        more = difference(f'attn 75 %, {other}', MEDIUM, 'kl')
        found.append(Claim(text, 'ours', 0.0, tables, more, note=f'nats, {tables_note(tables)}',
                           why=why))
    return found


def anchor_claims(rows, blocks):
    """Which layers choose: the calibrated ones lose less than as many others; blocks: of which these are."""
    found = []
    for task in dict.fromkeys(row['task'] for row in rows):
        some = [row for row in rows if row['task'] == task]
        where = f'{task}, {blocks}'
        for other, why in OTHER_ANCHORS.items():
            text = f'KL at 75 % of {where}: {ANCHOR_WORDS[other]} less calibrated anchors'
            note = f'nats, mean of {SEEDS} calibrations on the task, n = {len(some)}'
            found.append(Claim(text, 'paper', 0.0, some, anchors_gain(other), note=note, why=why))
        text = f'KL at 75 % of {where}: every second layer less the anchors of calibration.json'
        note = f'nats, n = {len(some)}'
        found.append(Claim(text, 'ours', 0.0, some, file_gain, note=note, why=OF_THE_FILE))
    return found


def file_gain(rows):
    """The mean over rows of the KL with every second layer less that with the calibration file's anchors."""
    return mean(row['second'] - row['file'] for row in rows)


def anchors_gain(other):
    """The figure: mean over rows of the KL with other anchors less that with calibrated ones."""
    def more(row):
        return row[other] - mean(row['calibrated'])
    return mean_of(more)


def channel_claims(rows):
    """One choice of channels serves all rows of a pass."""
    found = []
    for task in ('math', 'table', 'story'):
        text = f"Channels: same first choice of {task} by the root's channels less by each token's own"
        found.append(Claim(text, 'ours', -0.01, rows[task], difference(BY_ROOT, CHANNELS, 'alike'),
                           note=f'60 %, n = {len(rows[task])}',
                           why='Which channels are large differs from token to token'))
    return found


def reasoning_claim(maths, stories):
    """F6: reasoning suffers most; the i-th prompt of math beside the i-th story."""
    shares = f'{average(maths, "attn 90 %", "keys"):.0%} and {average(stories, "attn 90 %", "keys"):.0%}'
    pairs = []
    for math_row, story_row in zip(maths, stories):
        pairs.append(dict(math=value(math_row, 'attn 90 %', 'kl'), story=value(story_row, 'attn 90 %', 'kl')))

    def more(row):
        return row['math'] - row['story']
    return Claim('F6: KL of math less KL of stories at 90 %', 'paper', 0.0, pairs, mean_of(more),
                 note=f'nats, {shares} of the keys are read, n = {len(pairs)}',
                 why='A story calls its people and things by name again and again, and looks them up as math '
                     'does its numbers')


def hybrid_claim(rows):
    return Claim('A hybrid is worse than its parts: its KL less the sum of theirs', 'paper', 0.0, rows,
                 excess(BOTH, MEDIUM, CHANNELS), note=f'nats, n = {len(rows)}', why=ALREADY_FAR)


def stress_claim(task, rows):
    """The notes' third check: the most aggressive hybrid on reasoning."""
    return Claim(f'Stress: {task} right at {HARD} less dense', 'notes', -0.01, rows,
                 difference(HARD, 'dense', 'right'),
                 note=f'dense {average(rows, "dense", "right"):.0%}, n = {len(rows)}',
                 why='An answer hangs on every number and cell on its way: one that is not seen spoils it')


def elsewhere_claims(rows):
    """F5: anchors and thresholds that were measured on one task and are used on another."""
    def loss(key):
        def less(row):
            return row['story'][key] - row['table'][key]
        return mean_of(less)
    note = f'{SEEDS} calibrations in turn, n = {len(rows)}'
    found = []
    for key, words in dict(right='tables right', alike='same first choice as dense').items():
        text = f'F5: {words}, anchors and thresholds of stories less those of tables'
        found.append(Claim(text, 'notes', -0.01, rows, loss(key), note=note, why=OTHER_LAYERS))
    return found


def drift_claim(rows):
    """What it costs that sparse passes build on what sparse passes wrote: against a dense cache each time."""
    def more(row):
        return row['own'] - row['fresh']
    own = mean(map(itemgetter('own'), rows))
    fresh = mean(map(itemgetter('fresh'), rows))
    return Claim('Drift: KL on a cache that sparse passes wrote less KL on a dense one', 'ours', 0.0, rows,
                 mean_of(more), note=f'nats, {BOTH}, stories; {own:.3f} and {fresh:.3f}, n = {len(rows)}',
                 why='What one sparse pass wrote may suit the next one better than what a dense one did')


def mixture_claims(rows):
    """Experts: the median rule, a stricter one, m dropped whatever they weigh, for m = 1, 2, 3; a hybrid."""
    def kept_perplexity(name):
        def over(row):
            return math.exp(row['nll'] - value(row, name, 'nll'))
        return mean_of(over)
    found = []
    for name in MIXTURE:
        whose = 'paper' if 'median rule' in name else 'ours'
        work = f'FLOPs {average(rows, name, "flops"):.2f}, bytes {average(rows, name, "bytes"):.2f} of dense'
        found.append(Claim(f'MoE, {name}: perplexity over sparse', whose, 0.98, rows, kept_perplexity(name),
                           note=f'{work}, n = {len(rows)}', why=mixture_reason(name)))
    more = excess('attn 75 %, experts, 1', 'attn 75 %', 'experts, 1, median rule')
    found.append(Claim('MoE: the hybrid is worse than its parts: its KL less the sum of theirs', 'paper', 0.0,
                       rows, more, note=f'nats, n = {len(rows)}', why=ALREADY_FAR))
    found.append(mixture_length_claim(rows))
    return found


def mixture_reason(name):
    """Why a setting of settings.MIXTURE may cost perplexity."""
    if 'attn' in name:
        return LOOKS_UP
    if 'always' in name:
        return MEANT
    if 'median rule' in name:
        return NO_EYE
    return 'Even an expert of little weight may hold what a token needs'


def mixture_length_claim(rows):
    def gain(key):
        def less(row):
            return row['written']['hybrid'][key] - row['written']['whole'][key]
        return mean_of(less)
    whole = mean(row['written']['whole']['tokens_a_cycle'] for row in rows)
    right = gain('right')(rows)
    return Claim('MoE: tokens a cycle, hybrid less dense', 'paper', -0.1, rows, gain('tokens_a_cycle'),
                 note=f'{whole:.2f} dense, math right {right:+.0%}, n = {len(rows)}', why=SEES_LESS)


def distilled_claims(rows):
    """The notes' first open question: does a draft that learned from the sparse target's laws accept more?"""
    def gain(other):
        def less(row):
            return row['sparse'] - row[other]
        return mean_of(less)
    drafts = ('given', 'dense', 'sparse')
    means = ', '.join(f'{name} {mean(row[name] for row in rows):.2f}' for name in drafts)
    reasons = dict(
        given='A minute with few texts may take from a draft as much as it adds',
        dense='What a pass leaves out depends on where its cycle began, which a draft cannot foretell')
    found = []
    for other, why in reasons.items():
        text = f'Draft distilled from the sparse view: tokens a cycle, less those of the {other} one'
        found.append(Claim(text, 'notes', 0.0, rows, gain(other),
                           note=f'{HARD}, math and tables; {means}, n = {len(rows)}, learned from '
                                f'as many texts', why=why))
    return found


# ---------------------------------------------------------------------------------------------- long contexts
# A quarter of the keys is what LENGTHS reads as `calibrated`, with the method's other defaults.

def long_claims(rows):
    """Claims about long contexts, of any pair: what is kept and how fast it is, then how it is chosen."""
    found = []
    for length in sorted({row['length'] for row in rows}):
        some = [row for row in rows if row['length'] == length]
        found += kept_claims(f'{round(length / 1000)}k tokens', some)
        found.append(speed_claim(f'{round(length / 1000)}k tokens', some))
    if rows:
        found += choice_claims(rows)
    return found


def graded_rows(rows):
    """Those of whose settings some have written a text that could be graded."""
    return [row for row in rows if 'right' in row['settings']['calibrated']]


def kept_claims(where, rows):
    """What a quarter of the keys keeps; where: in contexts of what length."""
    keys = average(rows, 'calibrated', 'keys')
    note = f'{keys:.0%} of the keys are read, n = {len(rows)}'

    def alike(row):
        return value(row, 'calibrated', 'alike')

    def less_kl(row):
        return -value(row, 'calibrated', 'kl')
    found = [
        Claim(f'Long, 75 %, {where}: same first choice as dense', 'paper', 0.95, rows, mean_of(alike),
              note=note, why=LOOKS_UP),
        Claim(f'Long, 75 %, {where}: minus the KL to dense', 'paper', -0.05, rows, mean_of(less_kl),
              note=f'nats, {note}', why=LOOKS_UP)]
    graded = graded_rows(rows)
    dense = average(graded, 'dense', 'right')
    if dense > 0:                                       # else nothing can be lost
        found.append(Claim(f'Long, 75 %, {where}: right less dense', 'paper', -0.01, graded,
                           difference('calibrated', 'dense', 'right'),
                           note=f'dense {dense:.0%}, n = {len(graded)}', why=LOOKS_UP))
    return found


def speed(rows, setting='calibrated'):
    """Of a pass, times the dense one's."""
    return 1 / average(rows, setting, 'seconds')


def speed_claim(where, rows):
    """Whether a pass with a quarter of the keys is faster as it is written; the ceiling is in the note."""
    by_flops = 1 / average(rows, 'calibrated', 'flops')
    by_bytes = 1 / average(rows, 'calibrated', 'bytes')
    return Claim(f'Long, 75 %, {where}: speed of a pass over a dense one', 'paper', 1.0, rows, speed,
                 note=f'the FLOPs that are needed would allow {by_flops:.2f}, the bytes {by_bytes:.2f}, '
                      f'n = {len(rows)}',
                 why='Choosing and copying keys takes calls of its own, and a pass waits more for calls than '
                     'for keys')


def choice_claims(rows):
    """F4 and the anchors, on long contexts of all lengths: what the method's blocks have over others."""
    note = f'nats, 75 %, all lengths, n = {len(rows)}'
    found = []
    for other, (_, why) in CONTROLS.items():
        if other in rows[0]['settings']:
            found.append(Claim(f'F4, long: KL of {other} blocks less that of mean-key blocks', 'ours', 0.0,
                               rows, difference(other, 'calibrated', 'kl'), note=note, why=why))
    found += right_claims(graded_rows(rows))
    found.append(Claim('Long: KL, every second layer less calibrated anchors', 'paper', 0.0, rows,
                       difference('second', 'calibrated', 'kl'), note=note, why=OTHER_ANCHORS['second']))
    return found


def right_claims(rows):
    """F4 by the answers of long contexts, which some settings wrote; none where dense is never right."""
    dense = average(rows, 'dense', 'right')
    found = []
    for other, (line, why) in CONTROLS.items():
        if dense > 0 and 'right' in rows[0]['settings'].get(other, {}):
            right = average(rows, 'calibrated', 'right')
            found.append(Claim(f'F4, long: right, mean-key blocks less {other} blocks', 'ours', line, rows,
                               difference('calibrated', other, 'right'),
                               note=f'75 %, {right:.0%} right, dense {dense:.0%}, n = {len(rows)}', why=why))
    return found


# -------------------------------------------------------------------------------------- a cache of kept keys

def by_length(rows):
    """Yields (words, rows) of the long contexts of each length."""
    for length in sorted({row['length'] for row in rows}):
        yield f'{round(length / 1000)}k tokens', [row for row in rows if row['length'] == length]


def dense_seconds(row, positions):
    """Of a dense pass; of even positions, which nobody measured, the mean of their neighbours."""
    if positions % 2:
        return row['seconds'][f'dense, {positions}']
    return (dense_seconds(row, positions - 1) + dense_seconds(row, positions + 1)) / 2


def drafting_speed(row, name, gamma):
    """How fast a drafter writes, times plain decoding: counted passes by the seconds measured for each."""
    run = row['written'][name][gamma]
    seconds = row['seconds']
    total = 0.0
    for positions, passes in run['target'].items():
        total += passes * dense_seconds(row, int(positions))
    if name == 'self':
        total += run['drafts'] * seconds['slim, 1']
    elif name != 'lookup':
        share, _ = name.split(',')
        total += run['choices'] * seconds[f'choosing {share}, 1']
        total += (run['drafts'] - run['choices']) * seconds[f'kept {share}, 1']
    return run['tokens'] * seconds['dense, 1'] / total


def best_speed(rows, name):
    """Mean over rows, with the better gamma of those that a drafter was run with."""
    gammas = rows[0]['written'][name]
    return max(mean(drafting_speed(row, name, gamma) for row in rows) for gamma in gammas)


def kept_key_claims(rows):
    """Every Claim about kept keys, from rows of the record of that name: drafter, then verifier."""
    found = []
    for where, some in by_length(rows):
        if some[0]['length'] > 3000:                    # below it attention is little of a pass
            found += kept_draft_claims(where, some)
    for where, some in by_length(rows):
        found += kept_verify_claims(where, some)
    for family in dict.fromkeys(row['family'] for row in rows):
        found.append(kept_age_claim(family, [row for row in rows if row['family'] == family]))
    return found


def kept_draft_claims(where, rows):
    """The target as its own drafter over kept keys, beside plain decoding and what else needs no model."""
    def over(other):
        def figure(rows):
            return best_speed(rows, KEPT_DRAFTER) / best_speed(rows, other)
        return figure

    def over_plain(rows):
        return best_speed(rows, KEPT_DRAFTER)
    others = {'plain decoding': (1.1, over_plain)}
    if 'self' in rows[0]['written']:
        others['--draft self'] = 1.05, over('self')
    others['lookup'] = 1.0, over('lookup')
    found = []
    for name, (line, figure) in others.items():
        text = f'Kept keys, {where}: modelled speed of drafting over {name}'
        found.append(Claim(text, 'ours', line, rows, figure, why=DRAFT_COSTS,
                           note=f'{KEPT_DRAFTER}, each with the better gamma of 2 and 4, n = {len(rows)}'))
    return found


def kept_verify_claims(where, rows):
    """Kept keys in the place of keys that are chosen in each pass."""
    def alike(row):
        return row['read']['25%, R = 4']['alike']

    def speed_of_pass(row):
        seconds = row['seconds']
        mixed = (3 * seconds['kept 25%, 5'] + seconds['choosing 25%, 5']) / 4
        return seconds['sparse 25%, 5'] / mixed
    note = f'25 %, R = 4, n = {len(rows)}'
    over_dense = mean(row['seconds']['dense, 5'] / row['seconds']['kept 25%, 5'] for row in rows)
    return [
        Claim(f'Kept keys, {where}: same first choice as dense', 'ours', 0.95, rows, mean_of(alike),
              note=note, why=LOOKS_UP),
        Claim(f'Kept keys, {where}: speed of a verifying pass over one that chooses', 'ours', 1.3, rows,
              mean_of(speed_of_pass), note=f'{note}; over a dense one {over_dense:.2f}', why=CALLS)]


def kept_age_claim(family, rows):
    """What it costs to choose seldom: much where texts look things up, little elsewhere."""
    def kl(rows, every):
        return mean(row['read'][f'10%, R = {every}']['kl'] for row in rows)

    def growth(rows):
        return kl(rows, 16) / kl(rows, 1)

    def lack_of_growth(rows):
        return kl(rows, 1) / kl(rows, 16)
    note = f'10 %, {kl(rows, 1):.3f} and {kl(rows, 16):.3f} nats, n = {len(rows)}'
    if family == 'table':
        return Claim('Kept keys, look-ups (table): KL at R = 16 over that at R = 1', 'ours', 1.2, rows,
                     growth, note=note, why='An answer is over before what it looks up has changed')
    return Claim(f'Kept keys, {family}: KL at R = 1 over that at R = 16', 'ours', 0.8, rows,
                 lack_of_growth, note=note, why=LOOKS_UP)


# ----------------------------------------------------------------------------------------------------- tables

def tables(stored):
    """The tables of the records that are there."""
    found = []
    if 'math' in stored:
        found += lab_tables(stored)
    if 'lengths' in stored and stored['lengths'].rows:
        found += [lengths_table(stored['lengths'].rows), speeds_table(stored['lengths'].rows)]
    if 'kept' in stored:
        found += [kept_table(stored['kept'].rows), drafting_table(stored['kept'].rows),
                  kept_seconds_table(stored['kept'].rows)]
    if 'halving' in stored:
        found.append(halving_table(stored['halving'].rows[0]))
    return found


def lab_tables(stored):
    """What every setting costs and keeps, by knob, by layers that choose, by length; where reasoning ends."""
    found = []
    for task in ('math', 'table', 'story'):
        found.append(settings_table(task, stored[task].rows))
    for knob in SWEEPS:
        found.append(sweep_table(knob, stored['sweeps'].rows))
    for task in ('table', 'math'):
        found.append(anchors_table(task, f'{task}, blocks of 4', stored['anchors'].rows))
    found.append(anchors_table('table', 'table, the default blocks and L0', stored['usual'].rows))
    found.append(spans_table(stored['table'].rows))
    found.append(stress_table(stored['math'].rows))
    return found


def sweep_table(knob, rows):
    """A quarter of the keys, one knob at several values."""
    head = (f'tables at 75 %, {knob}, n = {len(rows)}', 'FLOPs', 'bytes', 'keys', 'KL', 'same choice',
            'right', 'tokens a cycle')
    lines = []
    for name in ('dense', *SWEEPS[knob]):
        line = [name]
        for key in ('flops', 'bytes', 'keys', 'kl', 'alike', 'right', 'tokens_a_cycle'):
            line.append(average(rows, name, key))
        lines.append(line)
    return PageTable(head, lines)


def anchors_table(task, title, rows):
    """The KL by the layers that choose: of each calibration, of the file, of every second and random ones."""
    rows = [row for row in rows if row['task'] == task]
    lines = []
    for seed, layers in enumerate(rows[0]['layers']):
        kl = mean(row['calibrated'][seed] for row in rows)
        lines.append([f'calibrated on {task}, seed {seed}', ' '.join(map(str, sorted(layers))), kl])
    names = dict(file='as calibration.json has them', second='every second', random='layer 0 and random ones')
    for key, name in names.items():
        lines.append([name, '', mean(row[key] for row in rows)])
    return PageTable((f'layers that choose, {title}, n = {len(rows)}', 'layers', 'KL'), lines)


def settings_table(task, rows):
    """A line a setting, means over the prompts; FLOPs, bytes and seconds are over those of dense passes."""
    head = [f'{task}, n = {len(rows)}', *WORDS.values(), 'perplexity']
    graded = 'verifying' in rows[0]
    if graded:
        head += ['right', 'same text', 'tokens a cycle']
    lines = []
    for name in rows[0]['settings']:
        line = [name]
        for key in WORDS:
            line.append(average(rows, name, key))
        line.append(perplexity_ratio(rows, name))
        if graded:
            for key in ('right', 'same', 'tokens_a_cycle'):
                line.append(average(rows, name, key))
        lines.append(line)
    return PageTable(tuple(head), lines)


def spans_table(rows):
    """Tables by the length of their prompts."""
    head = ('tables of', 'n', 'setting', 'FLOPs', 'bytes', 'KL', 'right', 'dense right')
    lines = []
    for least, below in SPANS:
        group = [row for row in rows if least <= row['tokens'] < below]
        if not group:
            continue
        for name in (MEDIUM, EVERY_SECOND, HARD):
            line = [f'{least} to {below} tokens', len(group), name]
            for key in ('flops', 'bytes', 'kl', 'right'):
                line.append(average(group, name, key))
            line.append(average(group, 'dense', 'right'))
            lines.append(line)
    return PageTable(head, lines)


def contexts_of(rows):
    """Yields (title, rows) of the long contexts of each family and length."""
    groups = {}
    for row in rows:
        groups.setdefault((row.get('family', 'several tables'), row['length']), []).append(row)
    for (family, _), group in groups.items():
        tokens = round(mean(row['tokens'] for row in group))
        yield f'{family}, {tokens} tokens', group


def lengths_table(rows):
    """What the settings keep of long contexts."""
    keys = ('keys', 'flops', 'bytes', 'kl', 'alike', 'right', 'tokens_a_cycle')
    head = ('long contexts', 'n', 'setting', 'keys', 'FLOPs', 'bytes', 'KL', 'same choice', 'right',
            'tokens a cycle')
    lines = []
    for title, group in contexts_of(rows):
        for name, first in group[0]['settings'].items():
            line = [title, len(group), LENGTH_WORDS[name]]
            for key in keys:
                line.append(average(group, name, key) if key in first else '-')
            lines.append(line)
    return PageTable(head, lines)


def speeds_table(rows):
    """How fast passes over long contexts are, and how fast their FLOPs and bytes would let them be."""
    head = ('a pass over 5 positions behind', 'dense, ms', 'setting', 'times as fast', 'by the FLOPs needed',
            'by the FLOPs executed', 'by the bytes')
    lines = []
    for title, group in contexts_of(rows):
        dense = '-'
        if 'seconds' in group[0]:
            dense = 1000 * mean(row['seconds'] for row in group)
        for name in ('calibrated', 'second', 'tenth'):
            line = [title, dense, LENGTH_WORDS[name], speed(group, name)]
            for key in ('flops', 'run', 'bytes'):
                line.append(1 / average(group, name, key))
            lines.append(line)
    return PageTable(head, lines)


def kept_table(rows):
    """What kept keys keep as verifier, by how seldom they are chosen."""
    lines = []
    for title, group in contexts_of(rows):
        for name in group[0]['read']:
            kl = mean(row['read'][name]['kl'] for row in group)
            alike = mean(row['read'][name]['alike'] for row in group)
            lines.append([title, len(group), name, kl, alike])
    return PageTable(('kept keys as verifier', 'n', 'setting', 'KL', 'same choice'), lines)


def drafting_table(rows):
    """What drafters without a model of their own take, by setting and gamma."""
    head = ('drafting without a draft model', 'n', 'drafter', 'gamma', 'tokens a cycle', 'kept, 1st', '2nd',
            '3rd', '4th', 'modelled speed')
    lines = []
    for title, group in contexts_of(rows):
        for name, runs in group[0]['written'].items():
            for gamma in runs:
                runs_here = [row['written'][name][gamma] for row in group]
                per_cycle = total_of(runs_here, 'tokens') / total_of(runs_here, 'cycles')
                places = [kept_share(runs_here, place) for place in range(4)]
                speed = mean(drafting_speed(row, name, gamma) for row in group)
                lines.append([title, len(group), name, gamma, per_cycle, *places, speed])
    return PageTable(head, lines)


def total_of(runs, key):
    return sum(run[key] for run in runs)


def kept_share(runs, place):
    """The share of the draft tokens judged at this place of a block that was kept; nan if none was judged."""
    judged = sum(run['judged'][place] for run in runs if place < len(run['judged']))
    kept = sum(run['kept'][place] for run in runs if place < len(run['kept']))
    return kept / judged if judged else math.nan


def kept_seconds_table(rows):
    """What passes over kept keys take beside others."""
    names = ['dense', 'slim']
    for share in KEPT_SHARES:
        names += [f'kept {share:.0%}', f'choosing {share:.0%}', f'sparse {share:.0%}']
    lines = []
    for title, group in contexts_of(rows):
        for name in names:
            cells = []
            for n in (1, 5):
                cells.append(1000 * mean(row['seconds'].get(f'{name}, {n}', math.nan) for row in group))
            lines.append([title, len(group), name, *cells])
    return PageTable(('processor time of a pass', 'n', 'keys', '1 position, ms', '5 positions, ms'), lines)


def halving_table(row):
    what = 'attention as --method sparse, every second layer choosing, halves of a pass over 5 positions'
    lines = [['FLOPs', row['flops']], ['bytes', row['bytes']]]
    return PageTable((what, 'from so many cached tokens on'), lines)


def stress_table(rows, most=5):
    """The first line in which the two texts differ, of some prompts that are right only dense."""
    broken = [row['stress'] for row in rows if row['stress']]
    lines = []
    for pair in broken[:most]:
        lines.append([line or '(its end)' for line in pair])
    return PageTable(('stress: the first line that differs, dense', HARD), lines)
