"""How the claims about sparse verification are judged, from stored rows alone (record.py writes them).

F1 to F6 are the paper's claims in the form in which they could fail; the others are what reviews of it ask
next, and our own controls. A setting's name says what it leaves out: see settings.py.
"""
import math
from operator import itemgetter

from lab.common import Claim, Table, mean
from lab.sparse.settings import BOTH, GRID, HARD, LONG, MEDIUM, MIXTURE

WORDS = dict(       # key of a setting in a stored row: column of a table
    flops='FLOPs', bytes='bytes', seconds='seconds', channels='channels', union='union', kl='KL',
    alike='same choice')
LENGTHS = ((LONG, 512), (512, 1024), (1024, 2048))      # tokens of a prompt: from, below
CONTROLS = dict(recent=0.02, random=0.02, quest=0.0, oracle=0.0, joint=0.0)     # selection: line of F4


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
    """Every Claim of this paper, from {record name: Stored}."""
    rows = {name: record.rows for name, record in stored.items()}
    found = [profile_claim(rows['math'] + rows['table'])]
    found.append(reduction_claim(rows['table'], rows['story']))
    found += length_claims(rows['table'])
    found.append(overlap_claim(rows['table']))
    found += selection_claims(rows['table'])
    found += query_claims(rows['table'])
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
                 mean_of(itemgetter('verifying')), note='math and tables, gamma 4')


def reduction_claim(tables, stories):
    """F1: the largest reduction of FLOPs among settings that keep tables right and stories likely."""
    keep_stories = [name for name in GRID if perplexity_ratio(stories, name) <= 1.02]
    far = [row for row in tables if row['tokens'] >= 512] or tables

    def largest_reduction(rows):
        best = 1.0
        for name in keep_stories:
            lost = average(rows, 'dense', 'right') - average(rows, name, 'right')
            if lost <= 0.01:
                best = max(best, 1 / average(rows, name, 'flops'))
        return best
    text = 'F1: fewer FLOPs a pass at 512 tokens or more, right within 1 pp, stories within 2 %'
    right = average(tables, 'dense', 'right')
    return Claim(text, 'paper', 2, far, largest_reduction,
                 note=f'times, n = {len(far)}, of all tables {right:.0%} right dense')


def tables_note(tables):
    return f'tables of {LONG} tokens or more, n = {len(tables)}'


def length_claims(tables):
    """F2: block efficiency stays."""
    found = []
    for name in (MEDIUM, HARD):
        found.append(Claim(f'F2: tokens a cycle at {name} over dense', 'paper', 0.95, tables,
                           quotient(name, 'dense', 'tau'), note=tables_note(tables)))
    return found


def overlap_claim(tables):
    """F3: one choice serves all rows of a pass."""
    def overlap(row):
        return value(row, 'token 75 %', 'overlap')
    text = "F3: overlap of the root's blocks with each later row's own, upper layers"
    return Claim(text, 'paper', 0.8, tables, mean_of(overlap), note=f'75 %, {tables_note(tables)}')


def selection_claims(tables):
    """F4: the mean-key score chooses better than controls do."""
    note = (f'75 %, {average(tables, MEDIUM, "right"):.0%} right, '
            f'dense {average(tables, "dense", "right"):.0%}')
    found = []
    for other, line in CONTROLS.items():
        found.append(Claim(f'F4: tables right, mean-key blocks less {other} blocks', 'ours', line, tables,
                           difference(MEDIUM, f'{other} 75 %', 'right'), note=note))
    return found


def query_claims(tables):
    """Who asks, and which layers choose."""
    found = []
    for other in ('query last', 'query mean', 'calibrated anchors'):
        text = f"KL at 75 %, {other} less the root's query and every second layer"
        more = difference(f'attn 75 %, {other}', MEDIUM, 'kl')
        found.append(Claim(text, 'ours', 0.0, tables, more, note=f'nats, {tables_note(tables)}'))
    return found


def reasoning_claim(maths, stories):
    """F6: reasoning suffers most; the i-th prompt of math beside the i-th story."""
    pairs = []
    for math_row, story_row in zip(maths, stories):
        pairs.append(dict(math=value(math_row, 'attn 90 %', 'kl'), story=value(story_row, 'attn 90 %', 'kl')))

    def more(row):
        return row['math'] - row['story']
    return Claim('F6: KL of math less KL of stories at 90 %', 'paper', 0.0, pairs, mean_of(more),
                 note=f'nats, n = {len(pairs)}')


def hybrid_claim(rows):
    return Claim('A hybrid is worse than its parts: its KL less the sum of theirs', 'paper', 0.0, rows,
                 excess(BOTH, MEDIUM, 'ffn 60 %'), note=f'nats, n = {len(rows)}')


def stress_claim(task, rows):
    """The notes' third check: the most aggressive hybrid on reasoning."""
    return Claim(f'Stress: {task} right at {HARD} less dense', 'notes', -0.01, rows,
                 difference(HARD, 'dense', 'right'),
                 note=f'dense {average(rows, "dense", "right"):.0%}, n = {len(rows)}')


def elsewhere_claims(rows):
    """F5: anchors and thresholds that were measured on one task and are used on another."""
    def loss(key):
        def less(row):
            return row['story'][key] - row['table'][key]
        return mean_of(less)
    anchors = f'anchors {rows[0]["story"]["anchors"]} and {rows[0]["table"]["anchors"]}, n = {len(rows)}'
    found = []
    for key, words in dict(right='tables right', alike='same first choice as dense').items():
        text = f'F5: {words}, anchors and thresholds of stories less those of tables'
        found.append(Claim(text, 'notes', -0.01, rows, loss(key), note=anchors))
    return found


def drift_claim(rows):
    """What it costs that sparse passes build on what sparse passes wrote: against a dense cache each time."""
    def more(row):
        return row['own'] - row['fresh']
    own = mean(map(itemgetter('own'), rows))
    fresh = mean(map(itemgetter('fresh'), rows))
    return Claim('Drift: KL on a cache that sparse passes wrote less KL on a dense one', 'ours', 0.0, rows,
                 mean_of(more), note=f'nats, {BOTH}, stories; {own:.3f} and {fresh:.3f}, n = {len(rows)}')


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
                           note=f'{work}, n = {len(rows)}'))
    more = excess('attn 75 %, experts, 1', 'attn 75 %', 'experts, 1, median rule')
    found.append(Claim('MoE: the hybrid is worse than its parts: its KL less the sum of theirs', 'paper', 0.0,
                       rows, more, note=f'nats, n = {len(rows)}'))
    found.append(mixture_length_claim(rows))
    return found


def mixture_length_claim(rows):
    def gain(key):
        def less(row):
            return row['written']['hybrid'][key] - row['written']['whole'][key]
        return mean_of(less)
    whole = mean(row['written']['whole']['tau'] for row in rows)
    right = gain('right')(rows)
    return Claim('MoE: tokens a cycle, hybrid less dense', 'paper', -0.1, rows, gain('tau'),
                 note=f'{whole:.2f} dense, math right {right:+.0%}, n = {len(rows)}')


def distilled_claims(rows):
    """The notes' first open question: does a draft that learned from the sparse target's laws accept more?"""
    def gain(other):
        def less(row):
            return row['sparse'] - row[other]
        return mean_of(less)
    drafts = ('given', 'dense', 'sparse')
    means = ', '.join(f'{name} {mean(row[name] for row in rows):.2f}' for name in drafts)
    found = []
    for other in ('given', 'dense'):
        text = f'Draft distilled from the sparse view: tokens a cycle, less those of the {other} one'
        found.append(Claim(text, 'notes', 0.0, rows, gain(other),
                           note=f'{HARD}, math and tables; {means}, n = {len(rows)}'))
    return found


# ----------------------------------------------------------------------------------------------------- tables

def tables(stored):
    """What every setting costs and keeps, tables by length, the break-even, and where reasoning breaks."""
    found = []
    for task in ('math', 'table', 'story'):
        found.append(settings_table(task, stored[task].rows))
    found.append(lengths_table(stored['table'].rows))
    found.append(halving_table(stored['halving'].rows[0]))
    found.append(stress_table(stored['math'].rows))
    return found


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
            for key in ('right', 'same', 'tau'):
                line.append(average(rows, name, key))
        lines.append(line)
    return Table(tuple(head), lines)


def lengths_table(rows):
    """Tables by the length of their prompts."""
    head = ('tables of', 'n', 'setting', 'FLOPs', 'bytes', 'KL', 'right', 'dense right')
    lines = []
    for least, below in LENGTHS:
        group = [row for row in rows if least <= row['tokens'] < below]
        for name in (MEDIUM, HARD) if group else ():
            line = [f'{least} to {below} tokens', len(group), name]
            for key in ('flops', 'bytes', 'kl', 'right'):
                line.append(average(group, name, key))
            line.append(average(group, 'dense', 'right'))
            lines.append(line)
    return Table(head, lines)


def halving_table(row):
    what = 'attn 75 % alone halves, in a pass over 5 positions with blocks of 16'
    return Table((what, 'from so many cached tokens on'), [['FLOPs', row['flops']], ['bytes', row['bytes']]])


def stress_table(rows, most=5):
    """The first line in which the two texts differ, of some prompts that are right only dense."""
    broken = [row['stress'] for row in rows if row['stress']]
    lines = []
    for pair in broken[:most]:
        lines.append([line or '(its end)' for line in pair])
    return Table(('stress: the first line that differs, dense', HARD), lines)
