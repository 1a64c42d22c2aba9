"""CM-ASD's claims, judged by what lab/cmasd/record.py stored."""
import numpy

from lab.cmasd.record import ANSWERED, GAINS, LIMITS, LONGEST, SIGNALS
from lab.judge import CLOCK, MODELLED, Claim, PageTable, Records, area, at_equal, gap, over, tuned_over

SURE = 0.9              # C from which a token is trivially right
BETTER = 1.02           # a line for "faster": smaller differences are not seen by the clock


def claims(records):
    """The Claims of one pair's Records."""
    if 'relaxed' in records:
        yield from relaxed_claims(records.runs('relaxed'))
    if 'lengths' in records:
        yield from length_claims(records.runs('lengths'))
    for paper, name in (('cmasd', 'lengths'), ('best', 'compositions')):
        runs = Records(paper, records.pair).runs_if(name)
        if runs and runs.kind == CLOCK:                 # the first of these records that was timed
            yield Claim('payoff over the best fixed gamma', 'ours', BETTER, numpy.arange(runs.size),
                        tuned_over(runs, ['payoff'], runs.starting('sd '), runs.kind), runs.kind)
            break
    if 'tokens' in records:
        yield from confidence_claims(records['tokens'].rows)
    yield from answer_claims(records)


def relaxed_claims(runs):
    """The default (ours: the paper gives no values) against plain decoding and exact sd; its threshold."""
    texts = runs.having('cmasd', 'ar')
    yield Claim('default (lossy) over plain decoding', 'paper: 4 to 5', 4, texts,
                over(runs, 'cmasd', 'ar', runs.kind), runs.kind)
    yield Claim('default over tuned exact sd', 'ours', BETTER, texts,
                tuned_over(runs, ['cmasd'], runs.starting('sd '), runs.kind), runs.kind)
    if numpy.isfinite(runs.sums['wrong'][:, runs.number['cmasd']]).all():
        yield Claim('its tokens that are the target\'s choice', 'paper: 0.87', 0.87, texts,
                    lambda texts: runs.agreement('cmasd', texts))
        taus = [*runs.starting('tau '), 'strict']
        yield Claim('adaptive over constant tau, equal agreement', 'paper', BETTER, texts,
                    at_equal(runs, 'cmasd', taus, runs.kind), runs.kind)


def length_claims(runs):
    """Lengths of blocks under the exact rule, against fixed ones tuned for each family."""
    texts = numpy.arange(runs.size)
    windows = runs.starting('window')
    sides = dict(tuned=('tuned window over the best fixed gamma', windows),
                 default=('default window over the best fixed gamma', ['window, alpha 1, k_max 10']),
                 product=('product over the best fixed gamma', [f'product, limit {LIMITS[1]:g}']))
    for side, (text, names) in sides.items():
        yield Claim(text, 'ours' if side == 'product' else 'paper', BETTER, texts,
                    tuned_over(runs, names, runs.starting('sd '), runs.kind), runs.kind)


def confidence_claims(rows):
    """How well C tells the tokens that the strict rule keeps."""
    texts = numpy.arange(len(rows))
    sure = [numpy.mean(row['signals'], 1) for row in rows]
    hits = [numpy.array(row['hit'], bool) for row in rows]
    doubtful = [c < SURE for c in sure]
    everywhere = area(sure, hits)
    below = area([c[d] for c, d in zip(sure, doubtful)], [h[d] for h, d in zip(hits, doubtful)])
    single = [area([numpy.array(row['signals'])[:, i] for row in rows], hits) for i in range(len(SIGNALS))]
    yield Claim('AUROC of C for acceptance, all tokens', 'paper', 0.75, texts, everywhere)
    yield Claim(f'AUROC of C below {SURE}', 'ours', 0.75, texts, below)
    yield Claim('AUROC of C less its best single signal\'s', 'paper', 0.01, texts,
                lambda texts: everywhere(texts) - max(figure(texts) for figure in single))


def answer_claims(records):
    """Right answers of the default less plain decoding's: of many texts of math, or of the relaxed runs."""
    if 'answers' in records:
        pairs = [(row['cmasd'], row['ar']) for row in records['answers'].rows]
    elif 'relaxed' in records:
        pairs = [(row['runs']['cmasd']['right'], row['runs']['ar']['right'])
                 for row in records['relaxed'].rows]
    else:
        return
    lost = [mine - plain for mine, plain in pairs if None not in (mine, plain)]
    if lost:
        yield Claim('right answers won or lost, a text', 'paper', -0.01, numpy.arange(len(lost)), gap(lost))


def sweeps(pairs):
    """The notes' sweep, own cost, 4 bits, by speed, agreement, accepted tokens; what signals tell."""
    rows = []
    for pair, records in pairs.items():
        if 'own_cost' in records:
            shares = [row['token']['online'] / row['target_pass'] for row in records['own_cost'].rows]
            rows.append((pair, 'confidence of a token, in target passes', f'{numpy.median(shares):.4f}'))
        if 'tokens' in records:
            rows += confidence_rows(pair, records['tokens'].rows)
        for family in ANSWERED if 'answers' in records else ():
            graded = [row for row in records['answers'].rows if row['family'] == family]
            right = [f'{100 * numpy.mean([row[name] for row in graded]):.1f}' for name in ('cmasd', 'ar')]
            rows.append((pair, f'right answers, {family}: cmasd, ar, %', ', '.join(right)))
    records = pairs['embedded']
    runs = records.runs('relaxed')
    texts = numpy.arange(runs.size)
    settings = [f'gamma_tau {gain}, k_max {k_max}' for gain in GAINS for k_max in LONGEST]
    for name in ('cmasd', 'strict', 'sd 4', *settings, '4-bit draft', '4-bit target', 'cmasd-prob',
                 'cmasd-specdec', 'cmasd-specdec, fixed 8'):
        rows.append(('embedded', name, runs.pace(name, texts, MODELLED), f'{runs.agreement(name, texts):.1%}',
                     runs.share('accepted', 'cycles', name, texts)))
    rows = [row + (None,) * (5 - len(row)) for row in rows]
    head = 'pair', 'setting', 'tokens a plain step, modelled', 'agreement', 'accepted a cycle'
    return PageTable(head, rows)


def confidence_rows(pair, rows):
    """Rows: the AUROC of each signal alone; the share of kept tokens in five equal bins of C."""
    hits = [numpy.array(row['hit'], bool) for row in rows]
    texts = numpy.arange(len(rows))
    for i, signal in enumerate(SIGNALS):
        alone = area([numpy.array(row['signals'])[:, i] for row in rows], hits)
        yield pair, f'AUROC of the {signal} alone', alone(texts)
    sure = numpy.concatenate([numpy.mean(row['signals'], 1) for row in rows])
    kept = numpy.concatenate(hits)
    bins = numpy.minimum(4, (5 * sure).astype(int))
    shares = ', '.join(f'{kept[bins == i].mean():.2f}' if (bins == i).any() else '-' for i in range(5))
    yield pair, 'kept, by C in five bins from 0 to 1', shares
