"""SpecGuard's claims, judged by what lab/specguard/record.py stored."""
import numpy

from lab.judge import (CLOCK, FEW, MODELLED, Claim, PageTable, area, gap, interval, number, over, ratio,
                       tuned_over)
from lab.specguard.record import GAMMAS, SEEDS
from train_mask import signal_ranges
from verify import step_score

GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
EXACT = [f'sd {gamma}' for gamma in GAMMAS]
USUAL = 'sd 4'
DEFAULT = [f'default, seed {seed}' for seed in range(SEEDS)]
SWEPT = {               # setting: points of right answers, speed over sd in the notes on the paper
    'default, seed 0': '+3.6, 1.11', 'calibrated': '', 'as the paper': '', 'rsd': '+1.5', 'oracle-gate': '',
    'and': '', 'k 1': 'as sd', 'k 2': '+0.5', 'k 8': '+2.2',
    'tau 0.1': '+0.8, 1.15', 'tau 0.3': '+2.1, 1.14', 'tau 0.7': '+3.8, 1.08', 'tau 0.9': '+4.2, 1.02',
    'beta 0': '+2.8, 1.10', 'beta 0.3': '+3.2, 1.11', 'beta 0.7': '+3.1, 1.10', 'beta 1': '+2.2, 1.08'}


def claims(records):
    """The Claims of one pair's Records."""
    if 'runs' in records:
        yield from run_claims(records.runs('runs'))
    if 'drafted' in records:
        rows = [row for row in records['drafted'].rows if row['right']]
        if rows:
            yield from step_claims(rows)
    if 'overhead' in records:
        rows = records['overhead'].rows
        texts = numpy.arange(len(rows))
        yield Claim('a step of the target over judging a step', 'notes: 10 to 20', 10, texts,
                    ratio([row['writing'] for row in rows], [row['judging'] for row in rows]), CLOCK)
    if 'altered' in records:
        rows = records['altered'].rows
        own = of_sources(rows, own=True)
        texts = own if len(own) >= FEW else of_sources(rows)
        yield Claim('altered digit is less grounded (draft), paired', 'ours', TELLS, texts,
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
    yield Claim('right answers, target_k 16 over 1, T 0.7', 'paper', GAIN, runs.having('target_k 16'),
                gap(gain(runs, ['target_k 16'], 'target_k 1')))


def step_claims(rows):
    """How well the signals of a drafted step tell whether it is right; what the selector brings."""
    texts = numpy.arange(len(rows))
    steps = [(L, 1 - ungrounded) for row in rows for L, ungrounded in row['draft']]
    ranges = signal_ranges(steps)
    score = [step_score([step], ranges, 0.5) for step in steps]
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


def of_sources(rows, own=None):
    """Numbers of the rows with a step; own: of the models' own answers, or of references; None: of all."""
    return numpy.array([i for i, row in enumerate(rows) if row['draft']
                        and own in (None, row['source'] != 'reference')], int)


def weaker(rows, who, signal):
    """The figure: the share of pairs in which the altered step has the lower L (0) or G (1), ties half."""
    won = []
    for row in rows:
        gaps = [altered[signal] - own[signal] for altered, own in row[who]]
        won.append(sum(0.5 + (0.5 if signal else -0.5) * numpy.sign(gaps)) if gaps else 0.0)
    return ratio(won, [len(row[who]) for row in rows])


def sweeps(pairs):
    """The notes' sweeps and ablations by pair; how often an altered digit has the weaker signal."""
    runs = {pair: records.runs('runs') for pair, records in pairs.items() if 'runs' in records}
    rows = []
    for name, notes in SWEPT.items():
        rows.append((name, notes, *[run_cell(runs[pair], name) if pair in runs else '' for pair in pairs]))
    for source, own in (('own answers', True), ('references', False)):
        for who in ('draft', 'target'):
            cells = [altered_cell(records, who, own) for records in pairs.values()]
            rows.append((f'altered, {source}, {who}', '', *cells))
    return PageTable(('setting', 'notes', *pairs), rows)


def run_cell(runs, name):
    """Points of right answers over exact decoding; share of tokens by the target; modelled speed over it."""
    texts = runs.having(*SWEPT)                         # the same for all settings
    points = 100 * gap(gain(runs, [name], USUAL))(texts)
    speed = number(over(runs, name, USUAL, MODELLED)(texts))
    return f'{points:+.0f}, {1 - runs.share("accepted", "tokens", name, texts):.0%}, {speed}'


def altered_cell(records, who, own):
    """Share of pairs in which the altered step has the lower G, and the lower L."""
    rows = records['altered'].rows if 'altered' in records else []
    texts = of_sources(rows, own)
    if not len(texts):
        return ''
    figure = weaker(rows, who, 1)
    sure = f'L {weaker(rows, who, 0)(texts):.2f}, n {len(texts)}'
    if len(texts) < FEW:
        return f'G {figure(texts):.2f}, {sure}'
    low, high = interval(texts, figure)
    return f'G {figure(texts):.2f} ({low:.2f} to {high:.2f}), {sure}'
