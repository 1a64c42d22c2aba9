"""SpecGuard's claims, judged by what lab/specguard/record.py stored."""
import numpy

from lab.judge import (CLOCK, MODELLED, Claim, PageTable, area, gap, interval, number, over, ratio,
                       tuned_over)
from lab.specguard.record import GAMMAS, LAYERS, SEEDS
from train_mask import signal_ranges
from verify import scaled

GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
EXACT = [f'sd {gamma}' for gamma in GAMMAS]
USUAL = 'sd 4'
DEFAULT = [f'default, seed {seed}' for seed in range(SEEDS)]
SWEPT = {               # setting: points of right answers, speed over sd in the notes on the paper
    'default, seed 0': '+3.6, 1.11', 'calibrated': '', 'as the paper': '', 'rsd': '+1.5', 'oracle-gate': '',
    'and': '', 'target_k 1': '', 'target_k 16': '', 'k 1': 'as sd', 'k 2': '+0.5', 'k 8': '+2.2',
    'tau 0.1': '+0.8, 1.15', 'tau 0.3': '+2.1, 1.14', 'tau 0.7': '+3.8, 1.08', 'tau 0.9': '+4.2, 1.02',
    'beta 0': '+2.8, 1.10', 'beta 0.3': '+3.2, 1.11', 'beta 0.7': '+3.1, 1.10', 'beta 1': '+2.2, 1.08'}
HARD = {                # settings on math-hard, their points in the notes; n_roll: less those of 3
    'default, seed 0': '+3.6', 'calibrated': '', 'rsd': '+1.5', 'oracle-gate': '', 'random-gate': '',
    'and': '', 'n_roll 1': '-1.2', 'n_roll 2': '-0.5', 'n_roll 6': '+0.1'}


def claims(records):
    """The Claims of one pair's Records."""
    if 'runs' in records:
        yield from run_claims(records.runs('runs'))
    if 'hard' in records:
        runs = records.runs('hard')
        yield Claim('math-hard: right answers over sd', 'paper: +0.036', GAIN, numpy.arange(runs.size),
                    gap(gain(runs, DEFAULT, USUAL)))
    if 'drafted' in records:
        yield from step_claims(with_steps(records['drafted'], 'right'))
    if 'overhead' in records:                           # measured no more
        rows = records['overhead'].rows
        texts = numpy.arange(len(rows))
        yield Claim('a step of the target over judging a step', 'notes: 10 to 20', 10, texts,
                    ratio([row['writing'] for row in rows], [row['judging'] for row in rows]), CLOCK)
    if 'altered' in records:
        rows = with_steps(records['altered'], 'draft')
        yield Claim('altered digit is less grounded (draft), paired', 'ours', TELLS, numpy.arange(len(rows)),
                    weaker(rows, 'draft', 1))


def gain(runs, names, other):
    """[R] right answers of these settings, on average, less another's."""
    right = runs.sums['right']
    return right[:, runs.columns(names)].mean(1) - right[:, runs.number[other]]


def run_claims(runs):
    """Right answers and speed of texts that were written end to end."""
    texts = runs.having(*DEFAULT, USUAL)
    yield Claim('right answers over sd, default gate', 'paper: +0.036', GAIN, texts,
                gap(gain(runs, DEFAULT, USUAL)))
    yield Claim('right answers over rsd, default gate', 'notes: +0.03', GAIN, texts,
                gap(gain(runs, DEFAULT, 'rsd')))
    yield Claim('speed over best sd, calibrated', 'paper: 1.12', FASTER, texts,
                tuned_over(runs, ['calibrated'], EXACT, MODELLED), MODELLED)
    yield Claim('speed over rsd, calibrated', 'paper: faster', FASTER, texts,
                over(runs, 'calibrated', 'rsd', MODELLED), MODELLED)
    yield Claim('right answers over a coin of equal rate', 'ours', GAIN, texts,
                gap(gain(runs, DEFAULT, 'random-gate')))


def with_steps(record, key):
    """The rows of a Record that have steps."""
    return [row for row in record.rows if row.get(key)]


def step_claims(rows):
    """How well the signals of a drafted step tell whether it is right; what the selector brings."""
    texts = numpy.arange(len(rows))
    steps = [(L, 1 - ungrounded) for row in rows for L, ungrounded in row['draft']]
    ranges = signal_ranges(steps)
    score = [(scaled(L, ranges[0]) + scaled(G, ranges[1])) / 2 for L, G in steps]
    sure, grounded, both = (within(rows, signal) for signal in (*zip(*steps), score))
    yield Claim('AUROC of L, drafted steps of one kind', 'ours', TELLS, texts, sure)
    yield Claim('AUROC of G, drafted steps of one kind', 'ours', TELLS, texts, grounded)
    yield Claim("AUROC of both less L's", 'paper', ADDS, texts, lambda texts: both(texts) - sure(texts))
    gains = [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows]
    yield Claim('right steps of k = 4 over k = 1', 'notes: +0.02', GAIN, texts, gap(gains))


def within(rows, signal):
    """The figure: the AUROC of a signal [steps] among those of one family and kind, weighted by their pairs.

    Over all kinds together it would tell kinds apart, because look-ups are both the best grounded steps and
    the most often wrong (Simpson's paradox).
    """
    owner = numpy.repeat(numpy.arange(len(rows)), [len(row['right']) for row in rows])
    right = numpy.concatenate([row['right'] for row in rows]).astype(bool)
    kinds = numpy.array([f'{row["family"]}, {kind}' for row in rows for kind in row['kind']])
    parts = []                      # of each kind: figure, place of each text in it or -1, right, wrong steps
    for kind in numpy.unique(kinds):
        texts = numpy.unique(owner[kinds == kind])      # only these, because area compares all with all
        places = numpy.full(len(rows), -1)
        places[texts] = numpy.arange(len(texts))
        chosen = [(owner == text) & (kinds == kind) for text in texts]
        figure = area([numpy.array(signal)[mine] for mine in chosen], [right[mine] for mine in chosen])
        trues = numpy.array([right[mine].sum() for mine in chosen])
        parts.append((figure, places, trues, numpy.array([mine.sum() for mine in chosen]) - trues))

    def mean(texts):
        weighted, pairs = 0.0, 0
        for figure, places, trues, falses in parts:
            there = places[texts][places[texts] >= 0]
            weight = trues[there].sum() * falses[there].sum()
            weighted += weight * figure(there) if weight else 0
            pairs += weight
        return weighted / pairs if pairs else numpy.nan
    return mean


def weaker(rows, who, signal):
    """The figure: the share of pairs in which the altered step has the lower L (0) or G (1), ties half."""
    won = []
    for row in rows:
        gaps = [altered[signal] - own[signal] for altered, own in row[who]]
        won.append(sum(0.5 + (0.5 if signal else -0.5) * numpy.sign(gaps)))
    return ratio(won, [len(row[who]) for row in rows])


def sweeps(pairs):
    """The notes' sweeps and ablations by pair, then of math-hard; AUROC by layers; altered digits."""
    rows = []
    for record, words, swept in (('runs', '', SWEPT), ('hard', 'math-hard: ', HARD)):
        runs = [records.runs_if(record) for records in pairs.values()]
        rows.append((f'{words}{USUAL}', '', *[right_cell(one) for one in runs]))
        rows += [(words + name, notes, *[run_cell(one, name, swept) for one in runs])
                 for name, notes in swept.items()]
    for i, n_roll in enumerate(LAYERS):
        cells = [layer_cell(records, i) for records in pairs.values()]
        rows.append((f'AUROC of G, n_roll {n_roll}', '', *cells))
    for who in ('draft', 'target'):
        cells = [altered_cell(records, who) for records in pairs.values()]
        rows.append((f'altered digit, {who}', '', *cells))
    return PageTable(('setting', 'notes', *pairs), rows)


def right_cell(runs):
    """The share of texts that exact decoding has right."""
    return f'{runs.sums["right"][:, runs.number[USUAL]].mean():.0%} right, n {runs.size}' if runs else ''


def run_cell(runs, name, swept):
    """Points of right answers over exact decoding; share of tokens by the target; modelled speed over it.

    Without passes there is no speed, and the points have their interval.
    """
    if not runs or name not in runs.number:
        return ''
    texts = runs.having(*[name for name in swept if name in runs.number])       # the same for all settings
    points = gap(100 * gain(runs, [name], USUAL))
    target = f'{1 - runs.share("accepted", "tokens", name, texts):.0%}'
    if 'full' not in runs.sums:
        return f'{with_interval(texts, points, "+.1f")}, {target}'
    return f'{points(texts):+.0f}, {target}, {number(over(runs, name, USUAL, MODELLED)(texts))}'


def layer_cell(records, i):
    """The AUROC within kinds of the draft's G over the last LAYERS[i]."""
    rows = with_steps(records['drafted'], 'layers') if 'drafted' in records else []
    grounded = [1 - layers[i] for row in rows for layers in row['layers']]
    return with_interval(numpy.arange(len(rows)), within(rows, grounded), '.2f') if rows else ''


def altered_cell(records, who):
    """Share of pairs in which the altered step has the lower G, and the lower L."""
    if 'altered' not in records:
        return ''
    rows = with_steps(records['altered'], who)
    texts = numpy.arange(len(rows))
    sure = weaker(rows, who, 0)(texts)
    return f'G {with_interval(texts, weaker(rows, who, 1), ".2f")}, L {sure:.2f}, n {len(rows)}'


def with_interval(texts, figure, digits):
    """A figure with its interval."""
    low, high = interval(texts, figure)
    return f'{figure(texts):{digits}} ({low:{digits}} to {high:{digits}})'
