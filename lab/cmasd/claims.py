"""CM-ASD: what `python -m lab.measure cmasd` stores, and the claims that it must show.

Of another pair than the embedded there are fewer relaxed rules, because each writes a text of its own.
"""
import itertools
from functools import partial

import numpy

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab.judge import (CLOCK, MODELLED, Claim, PageTable, Records, Runs, area, at_equal, gap, number, over,
                       tuned_over)
from lab.measure import Record, answer_row, named, on_prompts, run_row, sd, token_row

FAMILIES = 'math', 'table', 'story', 'translate', 'summary'
ANSWERED = 'math', 'translate', 'summary'       # those with right answers that are compared
SIGNALS = 'entropy', 'margin', 'softmax'
GAINS = 0.1, 0.5, 1.0, 2.0                      # gamma_tau and k_max, our gamma, as the notes sweep them
LONGEST = 5, 10, 15, 25
ALPHAS = 0.5, 1.0, 2.0
TAUS = 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95       # constant thresholds
GAMMAS = range(1, 17)                           # of plain sd


def length_settings(pair):
    """{name: Setting} of exact rules that differ in the length of their blocks."""
    settings = {f'sd {gamma}': sd(gamma) for gamma in (GAMMAS if pair.is_embedded else GAMMAS[:12])}
    for alpha, k_max in itertools.product(ALPHAS, LONGEST if pair.is_embedded else LONGEST[:2]):
        name = f'window, alpha {alpha:g}, k_max {k_max}'
        settings[name] = named('cmasd', alpha=alpha, gamma=k_max, tau_base=1)
    settings['product, limit 0.5'] = named('product')
    return settings | {name: named(name) for name in ('hf-confidence', 'payoff')}


def relaxed_settings(pair):
    """{name: Setting} of relaxed rules: the default, constant thresholds, the notes' sweep, other rules."""
    settings = dict(ar=named('ar'), cmasd=named('cmasd'), strict=named('cmasd', tau_base=1))
    for gamma in ((4, 6, 8, 10, 12) if pair.is_embedded else GAMMAS[:12]):
        settings[f'sd {gamma}'] = sd(gamma)
    for tau in TAUS if pair.is_embedded else TAUS[::2]:
        settings[f'tau {tau}'] = named('cmasd', tau_base=tau, gamma_tau=0)
    if not pair.is_embedded:
        return settings
    for gain, k_max in itertools.product(GAINS, LONGEST):
        settings[f'gamma_tau {gain}, k_max {k_max}'] = named('cmasd', gamma_tau=gain, gamma=k_max)
    return settings


def signal_settings(pair):
    """{name: Setting} of C by the mean of its signals and by each alone: relaxed rules, and the exact one."""
    settings = {}
    for source in ('mean', *SIGNALS):
        weights = {f'lam_{signal}': float(source in ('mean', signal)) for signal in SIGNALS}
        for gain in GAINS[:3]:                          # the fast ones of the sweep
            settings[f'{source}, gamma_tau {gain}'] = named('cmasd', gamma_tau=gain, **weights)
        settings[f'{source}, strict'] = named('cmasd', tau_base=1, **weights)
    return settings


RECORDS = dict(
    tokens=on_prompts(FAMILIES, token_row),
    lengths=on_prompts(FAMILIES, partial(run_row, length_settings)),
    relaxed=on_prompts(FAMILIES, partial(run_row, relaxed_settings)),
    signals=on_prompts(FAMILIES, partial(run_row, signal_settings)),
    # ten times as many texts, because answers that are lost are rare
    answers=Record(lambda pair, n: pair.texts(ANSWERED, 10 * n),
                   partial(answer_row, dict(ar=named('ar'), cmasd=named('cmasd')))))


# ------------------------------------------------------------------------------------------ what it must show

SURE = 0.9              # C from which a token is trivially right
BETTER = 1.02           # a line for "faster": smaller differences are not seen by the clock
SHOWN = ('cmasd', 'strict', 'cmasd, strict', 'sd 4', 'sd 10', '4-bit draft', '4-bit target', 'cmasd-prob',
         'cmasd-specdec', 'cmasd-specdec, fixed 8', 'hf-confidence', 'payoff')


def claims(records):
    """The Claims of one pair's Records."""
    if 'relaxed' in records:
        yield from relaxed_claims(records.runs('relaxed'))
    best = Records('best', records.pair).runs_if('compositions')
    if best:
        yield Claim('its tokens that are the target\'s choice', 'paper: 0.87', 0.87, numpy.arange(best.size),
                    lambda texts: best.agreement('cmasd', texts))
    if 'lengths' in records:
        yield from length_claims(records.runs('lengths'))
    for runs in records.runs_if('lengths'), best:
        if runs and runs.kind == CLOCK:                 # the first of these records that was timed
            yield Claim('payoff over the best fixed gamma', 'ours', BETTER, numpy.arange(runs.size),
                        tuned_over(runs, ['payoff'], runs.starting('sd '), runs.kind), runs.kind)
            break
    if 'tokens' in records:
        rows = records['tokens'].rows
        yield Claim('AUROC of C for acceptance, all tokens', 'paper', 0.75, numpy.arange(len(rows)),
                    confidence_area(rows))
    if 'signals' in records:
        yield signal_claim(records.runs('signals'))
    if 'answers' in records:
        lost = [row['cmasd'] - row['ar'] for row in records['answers'].rows if None not in row.values()]
        if lost:
            yield Claim('right answers won or lost, a text', 'paper', -0.01, range(len(lost)), gap(lost))


def relaxed_claims(runs):
    """The default (ours: the paper gives no values) against plain decoding and exact sd; its threshold."""
    texts = runs.having('cmasd', 'ar')
    yield Claim('default (lossy) over plain decoding', 'paper: 4 to 5', 4, texts,
                over(runs, 'cmasd', 'ar', runs.kind), runs.kind)
    yield Claim('default over tuned exact sd', 'ours', BETTER, texts,
                tuned_over(runs, ['cmasd'], runs.starting('sd '), runs.kind), runs.kind)
    if 'sd 10' in runs.names:                           # as long as the default's longest block
        def figure(texts):
            mine, rival = runs.share('accepted', 'cycles', ['cmasd', 'sd 10'], texts)
            return mine / rival if rival else numpy.nan
        yield Claim('accepted tokens a cycle over sd 10', 'paper: 4.27 / 2.91', 1.47, texts, figure)
    if numpy.isfinite(runs.sums['wrong'][:, runs.number['cmasd']]).all():
        taus = [*runs.starting('tau '), 'strict']
        yield Claim('adaptive over constant tau, equal agreement', 'paper', BETTER, texts,
                    at_equal(runs, 'cmasd', taus, runs.kind), runs.kind)


def length_claims(runs):
    """Lengths of blocks under the exact rule, against fixed ones tuned for each family."""
    for text, whose, names in (
            ('tuned window over the best fixed gamma', 'paper', runs.starting('window')),
            ('default window over the best fixed gamma', 'paper', ['window, alpha 1, k_max 10']),
            ('product over the best fixed gamma', 'ours', ['product, limit 0.5'])):
        figure = tuned_over(runs, names, runs.starting('sd '), runs.kind)
        yield Claim(text, whose, BETTER, range(runs.size), figure, runs.kind)


def signal_claim(runs):
    """C by the mean of its signals against the best one alone, each at its best gamma_tau."""
    alone = runs.starting(*[f'{signal}, gamma_tau' for signal in SIGNALS])
    figure = tuned_over(runs, runs.starting('mean, gamma_tau'), alone, MODELLED, 0.99, 0.99)
    return Claim('mean of signals over the best alone, 99% agreement', 'paper', BETTER, range(runs.size),
                 figure, MODELLED)


def confidence_area(rows, below=2):
    """The figure: the AUROC for acceptance of C, of the tokens whose C is below a limit."""
    sure = [numpy.mean(row['signals'], 1) for row in rows]
    hits = [numpy.array(row['hit'], bool) for row in rows]
    return area([c[c < below] for c in sure], [hit[c < below] for c, hit in zip(sure, hits)])


def sweeps(pairs):
    """How well C tells; settings by speed, agreement, accepted and dropped tokens."""
    rows = []
    for pair, records in pairs.items():
        if 'tokens' in records:
            told = confidence_rows(f'{pair}, tokens', records['tokens'].rows)
            rows += [(*row, None, None, None) for row in told]
        rows += setting_rows(pair, records)
    head = 'pair, record', 'setting', 'tokens a step, modelled', 'agreement', 'accepted a cycle', 'dropped'
    return PageTable(head, rows)


def confidence_rows(place, rows):
    """Rows: the AUROC where C is in doubt; the share of kept tokens in five equal bins of C."""
    yield place, f'AUROC of C below {SURE}', confidence_area(rows, SURE)(numpy.arange(len(rows)))
    sure = numpy.concatenate([numpy.mean(row['signals'], 1) for row in rows])
    kept = numpy.concatenate([numpy.array(row['hit'], bool) for row in rows])
    bins = numpy.minimum(4, (5 * sure).astype(int))
    shares = ', '.join(f'{kept[bins == i].mean():.2f}' if (bins == i).any() else '-' for i in range(5))
    yield place, 'kept, by C in five bins from 0 to 1', shares


def setting_rows(pair, records):
    """Rows of settings, once each with all columns; settings of one knob share a row, a figure each."""
    swept = {name: [name] for name in SHOWN}
    for rule in 'gamma_tau 0.5', 'strict':
        names = [f'{source}, {rule}' for source in ('mean', *SIGNALS)]
        swept[f'{rule}; C of all, of {", ".join(SIGNALS)}'] = names
    for gain in GAINS:
        names = [f'gamma_tau {gain}, k_max {k_max}' for k_max in LONGEST]
        swept[f'gamma_tau {gain}; k_max {", ".join(map(str, LONGEST))}'] = names
    stored = records if pair == 'embedded' else {**Records('best', pair), **records}
    for name in [name for name in ('relaxed', 'signals', 'compositions', 'lengths') if name in stored]:
        runs = Runs(stored[name].rows, records.costs)
        runs.sums['drafted'] = runs.array(stored[name].rows, drafted)
        texts = numpy.arange(runs.size)
        for text, names in [item for item in swept.items() if {*item[1]} <= {*runs.names}]:
            if numpy.isfinite(runs.total('drafted', names, texts)).all():
                del swept[text]
            columns = (runs.pace(names, texts, MODELLED), runs.agreement(names, texts),
                       runs.share('accepted', 'cycles', names, texts),
                       1 - runs.share('accepted', 'drafted', names, texts))
            yield f'{pair}, {name}', text, *[', '.join(map(number, column)) for column in columns]


def drafted(run):
    """Tokens that a run drafted: each target pass reads a block and the token before it; None if not kept."""
    passes = run.get('passes', {}).get('target/full')
    return passes and sum((int(positions) - 1) * passes[positions] for positions in passes)
