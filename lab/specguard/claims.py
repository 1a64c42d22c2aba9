"""SpecGuard: the claims that its rows must show, and tables of its settings."""
import itertools
import math
import re

import numpy
import pandas

from lab.best.claims import answered, less_ar
from lab.judge import BEST_SD, PLAIN, array, at, estimate, gap, grid, mean, over, overview, plain_sd, settings
from lab.specguard.gate import best_gate, calibrated, gates
from lab.specguard.steps import LAYERS, RECORDS, TASKS, told    # noqa: F401, lab.measure reads RECORDS

SOURCE = 'notes on the paper, a review that gives more settings than it'
EVERY = 'specguard tau=-1'      # it keeps each step
HARD = 'math-hard'      # its problems have five to eight steps
ANSWERING = 'specguard k=4 gamma=4 delimiter=sentence'      # of real pairs
STRICTER = ANSWERING.replace('k=4', 'k=4 tau=0.7')
GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
MORE_RIGHT = '"3.6% average accuracy improvement over baseline SD"; the line: ours'
OVER_RSD = '"Performance exceeds reward-guided SD while being faster"; the line: ours'
CHECKER = "`rsd`, whose reward is the task's checker"
DEFAULT = r'specguard( k=4 gamma=\d delimiter=sentence)?'      # real pairs have no lines
CLAIMS = {              # text: whose, rival, line
    'right answers over sd': (MORE_RIGHT, f'`sd`, {PLAIN}', GAIN),
    'speed over sd': ('"Latency improvement is consistent across domains (~11%)"; the line: ours', BEST_SD,
                      FASTER),
    'math-hard: right answers over sd': (MORE_RIGHT, f'`sd`, {PLAIN}', GAIN),
    'right answers over rsd': (OVER_RSD, CHECKER, GAIN),
    'speed over rsd': (OVER_RSD, CHECKER + ', at its best gamma', FASTER),
    'right answers over a coin': ('ours', 'a coin that lets the target write as many tokens', GAIN),
    'AUROC of L': ('"tokens the model generates with low confidence"; the line: ours', 'steps of one kind',
                   TELLS),
    'AUROC of G': ('"Hallucinated content tends to have low attention to the input"; the line: ours',
                   'steps of one kind', TELLS),
    "AUROC of both less L's": ('"neither signal dominates"; the line: ours', 'L alone', ADDS),
    'right steps of k = 4 over k = 1': ('"~2% gain"; the line: ours', 'one candidate', GAIN)}


def figures(pair):
    """Yields (text of a claim, Estimate) of what the records of a pair allow, of both gates."""
    if pair.has('gates'):
        usual, hard = halves(pair.frame('gates'))
        for by, [gate] in two_gates(pair, usual, 4).items():
            for text, frame, rival in (('right answers over sd', usual, 'ar'),
                                       ('math-hard: right answers over sd', hard, 'ar'),
                                       ('right answers over rsd', usual, 'rsd gamma=4')):
                yield text, gap(frame, gate, rival, by=by,
                                ceiling=1 - frame[frame.setting == rival].right.mean())
            yield 'right answers over a coin', estimate(over_coin(usual, gate), usual.text.nunique(), by=by)
        yield 'right answers over a coin', estimate(over_coin(usual, 'either-weak'), usual.text.nunique(),
                                                    by='`either-weak`: ')
        yield from step_figures(pair.rows('drafted'))
    answers = answered(pair)
    for by, setting in ('default gate: ', ANSWERING), ('stricter gate: ', STRICTER):
        if setting in answers:
            yield 'right answers over sd', less_ar(answers, setting, by=by)
    frame = pair.clock
    for by, mine in two_gates(pair, frame, 8).items() if frame is not None else ():
        for text, rivals in ('speed over sd', plain_sd(frame)), ('speed over rsd', settings(frame, 'rsd')):
            if rivals:
                yield text, over(frame, mine, rivals, by=by, ceiling=ceiling(pair, frame, rivals))


def two_gates(pair, frame, gamma):
    """{words: settings} of the default gate, and of that which training steps give where they are stored."""
    found = {'default gate: ': [name for name in frame.setting.unique() if re.fullmatch(DEFAULT, name)]}
    if pair.has('gate'):
        found['calibrated gate: '] = [calibrated(pair.rows('gate'), gamma)]
    return found


def halves(frame):
    """(its rows of TASKS, its rows of math-hard)."""
    return frame[frame.family != HARD], frame[frame.family == HARD]


def over_coin(frame, gate):
    """A function of texts: right answers of a gate less those of a coin at an equal share of target tokens.

    It interpolates between the rates that were run, and plain decoding, where the target writes all.
    """
    names = [gate, *settings(frame, 'random-gate'), 'ar']
    kept, tokens, right = (array(frame, column, names) for column in ('kept', 'tokens', 'right'))

    def gain(texts):
        shares, answers = 1 - kept[texts].sum(-2) / tokens[texts].sum(-2), right[texts].mean(-2)
        found = []
        for share, answer in zip(shares.reshape(-1, len(names)), answers.reshape(-1, len(names))):
            order = share[1:].argsort()
            found.append(answer[0] - numpy.interp(share[0], share[1:][order], answer[1:][order]))
        return numpy.reshape(found, shares.shape[:-1])
    return gain


def ceiling(pair, frame, rivals):
    """The speed over rivals if each step were kept: by the clock, else by a draft pass over four rows."""
    if settings(frame, EVERY):
        return over(frame, EVERY, rivals).figure
    return 1 / at(pair.costs['draft/full'], 4) / over(frame, rivals, 'ar').figure if pair.costs else math.inf


def step_figures(rows):
    """How well signals tell whether a drafted step is right; what the selector brings."""
    right = [x for row in rows for x in row['right']]
    of = f'texts, {len(right)} steps, {right.count(0)} wrong'
    sure, grounded, both = (told(rows, signal) for signal in ('L', 'G3', 'both'))
    yield 'AUROC of L', estimate(sure, len(rows), of)
    yield 'AUROC of G', estimate(grounded, len(rows), of)
    yield "AUROC of both less L's", estimate(lambda texts: both(texts) - sure(texts), len(rows), of)
    yield 'right steps of k = 4 over k = 1', mean(
        [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows])


# ---------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame): gates, knobs, beta by tau, signals, the clock."""
    own, frames = [pair for pair in pairs if pair.has('gates')], {}
    for pair in own:
        frames[pair.name], frames[f'{pair.name}, {HARD}'] = halves(pair.frame('gates'))
    yield 'Gates: points, target, rejected, over a coin', by_setting(frames, gate_cell)
    yield 'Knobs: points, target', by_setting({pair.name: pair.frame('knobs') for pair in own}, points)
    yield 'Beta and tau: points, target, of both pairs; gates tuned on training steps', beta_table(own)
    yield 'AUROC among drafted steps of one kind', signal_table(own)
    for pair in own:
        yield f'{pair.name}, by the clock', overview(pair.frame('clock'))


def by_setting(frames, cell):
    """A row a setting, a column for each of frames; cell: of (frame, setting)."""
    lines = {}
    for column, frame in frames.items():
        right = frame[frame.setting == 'ar'].right.mean()
        for name in settings(frame, 'specguard', 'either-weak', 'rsd'):
            line = lines.setdefault(name, dict(setting=f'`{name}`'))
            line[f'{column} (n {frame.text.nunique()}, plain {right:.0%} right)'] = cell(frame, name)
    return pandas.DataFrame(list(lines.values()))


def points(frame, name):
    """Points of right answers over plain decoding, their interval, the target's share of tokens."""
    found, mine = gap(frame, name, 'ar'), frame[frame.setting == name]
    figure, low, high = (f'{100 * x:+.0f}' for x in (found.figure, found.low, found.high))
    return f'{figure} ({low} to {high}), {1 - mine.kept.sum() / mine.tokens.sum():.0%}'


def gate_cell(frame, name):
    """What `points` says, the share of steps that are rejected, points over a coin."""
    mine = frame[frame.setting == name]
    coin = over_coin(frame, name)(numpy.arange(frame.text.nunique()))
    return f'{points(frame, name)}, {mine.unkept.sum() / mine.cycles.sum():.0%}, {100 * coin:+.0f}'


def beta_table(pairs):
    """A row a beta, a column a tau, the pairs' cells side by side; then the best gate of training steps."""
    def cells(name):
        return ' / '.join(points(pair.frame('grid'), name) for pair in pairs)
    table = grid(settings(pairs[0].frame('grid'), 'specguard'), cells, 'beta', 'tau')
    for pair in pairs:
        found = gates(pair.rows('gate'))
        best = [best_gate(found[found.beta == float(beta)]) for beta in table.beta]
        table[f'tuned, {pair.name}'] = [
            f'tau {one.tau:g}: rejects {one.rejected:.0%}, {one.right:.1%} right' for one in best]
    return table


def signal_table(pairs):
    """AUROCs of L, of both, and of G by rollouts over so many layers, by family."""
    names = dict(L='L', both='both') | {f'G, last {n}': f'G{n}' for n in LAYERS}
    lines = []
    for pair, family in itertools.product(pairs, TASKS):
        rows = [row for row in pair.rows('drafted') if row['family'] == family]
        right = sum((row['right'] for row in rows), [])
        line = dict(pair=pair.name, family=family, steps=f'{len(right)}', wrong=f'{right.count(0)}')
        lines.append(line | {name: told(rows, key)(numpy.arange(len(rows))) for name, key in names.items()})
    return pandas.DataFrame(lines)
