"""SpecGuard's claims, judged by what lab/specguard/record.py stored."""
import numpy

from lab.judge import CLOCK, FEW, MODELLED, Claim, PageTable, area, gap, interval, number, over, ratio, tuned_over
from lab.specguard.calibrate import signal_ranges
from lab.specguard.record import GAMMAS, SEEDS
from verify import step_score

GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured, ours
ADDS = 0.02             # and what a second signal has to add to the first one's, likewise

EXACT = [f'sd {gamma}' for gamma in GAMMAS]
USUAL = 'sd 4'
DEFAULT = [f'default, seed {seed}' for seed in range(SEEDS)]
GATE = ['calibrated', 'calibrated + sd']                # with the target alone, with the draft's help
REWARDED = ['rsd', 'rsd + sd']
SWEPT = [               # setting, points of right answers and speed over sd in the notes on the paper
    ('default, seed 0', '+3.6, 1.11'), ('preset=paper', ''), ('calibrated', ''), ('calibrated + sd', ''),
    ('rsd', '+1.5'), ('oracle-gate', ''), ('k 1', 'as sd'), ('k 2', '+0.5'), ('k 8', '+2.2'),
    ('specguard-pooled', ''), ('draft, last 1', ''), ('target, last 1', '-1.2'), ('target, last 3', '0'),
    ('target, last 6', '+0.1'), ('tau 0.1', '+0.8, 1.15'), ('tau 0.7', '+3.8, 1.08'),
    ('tau 0.9', '+4.2, 1.02'), ('beta 0', '+2.8, 1.10'), ('beta 0.7', '+3.1, 1.10'),
    ('beta 1', '+2.2, 1.08'), ('and', '')]


def claims(records):
    """The Claims of one pair's Records."""
    if 'runs' in records:
        yield from run_claims(records.runs('runs'))
    if 'drafted' in records:
        yield from step_claims([row for row in records['drafted'].rows if row['right']])
    if 'overhead' in records:
        yield overhead_claim(records['overhead'].rows)
    if 'altered' in records:
        yield altered_claim(records['altered'].rows)


def gain(runs, names, other):
    """[R] right answers of these settings, on average, less another's."""
    right = runs.sums['right']
    return right[:, runs.columns(names)].mean(1) - right[:, runs.number[other]]


def run_claims(runs):
    """Right answers and speed of texts that were written end to end."""
    texts = runs.having(*DEFAULT, USUAL)
    for text, whose, other, headline in (
            ('right answers over exact sd, default gate', 'paper: +0.036', USUAL, True),
            ('right answers over rsd, default gate', 'paper: +0.024 to 0.035', 'rsd', False),
            ('right answers over a coin of equal rate', 'ours', 'random-gate', False)):
        yield Claim(text, whose, GAIN, texts, gap(gain(runs, DEFAULT, other)), headline=headline)
    if 'steps' in runs.sums:
        yield Claim('speed over tuned exact sd, calibrated gate', 'paper: 1.12', FASTER, texts,
                    tuned_over(runs, GATE, EXACT, MODELLED), MODELLED, headline=True)
        yield Claim('speed over rsd, both tuned, calibrated gate', 'paper: faster', FASTER, texts,
                    tuned_over(runs, GATE, REWARDED, MODELLED), MODELLED)
    texts = runs.having('target_k 16', 'target_k 1')
    yield Claim('right answers of target_k 16 over 1, T = 0.7', 'paper', GAIN, texts,
                gap(gain(runs, ['target_k 16'], 'target_k 1')))


def step_claims(rows):
    """How well the signals of a drafted step tell whether it is right; what the selector brings."""
    texts = numpy.arange(len(rows))
    sure, grounded, both = (within(rows, scores) for scores in signals(rows, 'draft'))
    yield Claim('AUROC of L, drafted steps of one kind', 'ours', TELLS, texts, sure)
    yield Claim('AUROC of G, drafted steps of one kind', 'ours', TELLS, texts, grounded, headline=True)
    yield Claim("AUROC of both less L's", 'paper', ADDS, texts, lambda texts: both(texts) - sure(texts))
    gains = [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows]
    yield Claim('right steps of k = 4 over k = 1', 'paper: +0.02', GAIN, texts, gap(gains))


def signals(rows, who):
    """Lists of arrays [steps], an array for each row: L, G, and the score with beta = 0.5."""
    sure = [numpy.array(row['logp'][who]) for row in rows]
    grounded = [1 - numpy.array(row['ungrounded'][who]) for row in rows]
    ranges = signal_ranges(list(zip(numpy.concatenate(sure), numpy.concatenate(grounded))))
    scores = []
    for steps in zip(sure, grounded):
        scores.append(numpy.array([step_score([step], ranges, 0.5, 'weighted')[0] for step in zip(*steps)]))
    return sure, grounded, scores


def within(rows, scores):
    """The figure: the AUROC of right steps among those of one kind and family, weighted by their pairs.

    Over all kinds together it would tell kinds apart, because look-ups are both the best grounded steps and
    the most often wrong (Simpson's paradox).
    """
    kinds = [[(row['family'], kind) for kind in row['kind']] for row in rows]
    parts = []                                          # of each kind: figure, right and wrong steps [R]
    for kind in sorted(set().union(*kinds)):
        mine = [numpy.array([other == kind for other in row]) for row in kinds]
        right = [numpy.array(row['right'])[chosen] for row, chosen in zip(rows, mine)]
        figure = area([theirs[chosen] for theirs, chosen in zip(scores, mine)], right)
        trues = numpy.array([row.sum() for row in right])
        parts.append((figure, trues, numpy.array([len(row) for row in right]) - trues))

    def mean(texts):
        weights = [trues[texts].sum() * falses[texts].sum() for _, trues, falses in parts]
        areas = [figure(texts) if weight else 0 for weight, (figure, _, _) in zip(weights, parts)]
        return numpy.dot(weights, areas) / sum(weights) if any(weights) else numpy.nan
    return mean


def overhead_claim(rows):
    """A step of the target over what it takes to select and score a step of the draft."""
    extra = [row['seconds']['selection'] + row['seconds']['scoring'] for row in rows]
    wrote = [row['seconds']['target step'] for row in rows]
    return Claim("a step of the target over selecting, scoring one", 'notes: 10 to 20', 10,
                 numpy.arange(len(rows)), ratio(wrote, extra), CLOCK)


def altered_claim(rows):
    """The models' own answers where a pair has enough of them, else also the references."""
    own = of_sources(rows, own=True)
    texts = own if len(own) >= FEW else of_sources(rows)
    return Claim('an altered digit is less grounded (draft), paired', 'ours', TELLS, texts,
                 ratio(*lower(rows, 'ungrounded', 'draft')))


def of_sources(rows, own=None):
    """Numbers of the rows with a step; own: of the models' own answers, or of references; None: of all."""
    return numpy.array([i for i, row in enumerate(rows) if row['logp']['draft']
                        and own in (None, row['source'] != 'reference')], int)


def lower(rows, signal, who):
    """([R] pairs in which the altered step has the worse signal, ties half; [R] pairs)."""
    sign = 1 if signal == 'ungrounded' else -1
    won = []
    for row in rows:
        gaps = [sign * (altered - own) for altered, own in row[signal][who]]
        won.append(sum(0.5 + 0.5 * numpy.sign(gaps)) if gaps else 0.0)
    return won, [len(row[signal][who]) for row in rows]


# ------------------------------------------------------------------------------------------------ no verdicts

def sweeps(pairs):
    """The paper's sweeps and ablations by pair; how often an altered digit has the worse signal, by source."""
    rows = []
    runs = {pair: records.runs('runs') for pair, records in pairs.items() if 'runs' in records}
    for name, notes in SWEPT:
        rows.append((name, notes, *[run_cell(runs[pair], name) if pair in runs else '' for pair in pairs]))
    for source, own in (('own answers', True), ('references', False)):
        for who in ('draft', 'target'):
            cells = [altered_cell(records, who, own) for records in pairs.values()]
            rows.append((f'altered, {source}, {who}', '', *cells))
    return PageTable(('setting', 'notes', *pairs), rows)


def run_cell(runs, name):
    """Points of right answers over exact decoding; share of tokens by the target; modelled speed."""
    texts = runs.having(name, USUAL)
    points = 100 * gap(gain(runs, [name], USUAL))(texts)
    speed = over(runs, name, USUAL, MODELLED)(texts) if 'steps' in runs.sums else numpy.nan
    return f'{points:+.0f}, {1 - runs.share("accepted", "tokens", name, texts):.0%}, {number(speed)}'


def altered_cell(records, who, own):
    """Share of pairs in which the altered step has the lower G, and the lower L."""
    rows = records['altered'].rows if 'altered' in records else []
    texts = of_sources(rows, own)
    if not len(texts):
        return ''
    figure = ratio(*lower(rows, 'ungrounded', who))
    low, high = interval(texts, figure) if len(texts) >= FEW else (numpy.nan, numpy.nan)
    sure = ratio(*lower(rows, 'logp', who))(texts)
    return f'G {figure(texts):.3f} ({low:.3f} to {high:.3f}), L {sure:.3f}, n {len(texts)}'
