"""CM-ASD: what `python -m lab.measure cmasd` stores, and the claims that it must show."""
import itertools
from functools import partial

import numpy

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab.judge import BEST_SD, MODELLED, PLAIN, answers, area, number, over, tuned_over
from lab.measure import Record, answer_row, named, run_row, sd, token_row

SOURCE = 'notes on the paper, which themselves quote its tables'
FAMILIES = 'math', 'table', 'story', 'translate', 'summary'
ANSWERED = 'math', 'translate', 'summary'       # those with right answers that are compared
SIGNALS = 'entropy', 'margin', 'softmax'
GAINS = 0.1, 0.5, 1.0, 2.0                      # gamma_tau and k_max, our gamma, as the notes sweep them
LONGEST = 5, 10, 15, 25
ALPHAS = 0.5, 1.0, 2.0
TAUS = 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95       # constant thresholds
GAMMAS = range(1, 17)                           # of plain sd
SWEPT = 12                                      # prompts of each family that many settings write


def length_settings(pair):
    """{name: Setting} of exact rules that differ in the length of their blocks."""
    settings = {f'sd {gamma}': sd(gamma) for gamma in GAMMAS}
    for alpha, k_max in itertools.product(ALPHAS, LONGEST):
        name = f'window, alpha {alpha:g}, k_max {k_max}'
        settings[name] = named('cmasd', alpha=alpha, gamma=k_max, tau_base=1)
    return settings | {name: named(name) for name in ('product', 'hf-confidence', 'payoff')}


def relaxed_settings(pair):
    """{name: Setting} of relaxed rules: the default, constant thresholds, the notes' sweep; plain sd."""
    settings = dict(ar=named('ar'), cmasd=named('cmasd'), strict=named('cmasd', tau_base=1))
    settings |= {f'sd {gamma}': sd(gamma) for gamma in (4, 6, 8, 10, 12)}
    settings |= {f'tau {tau}': named('cmasd', tau_base=tau, gamma_tau=0) for tau in TAUS}
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


def on_some(settings):
    """The Record of settings on the first prompts of each family."""
    return Record(lambda pair, n: pair.texts(FAMILIES, min(n, SWEPT)), partial(run_row, settings))


RECORDS = dict(
    tokens=Record(lambda pair, n: pair.texts(FAMILIES, n), token_row),
    lengths=on_some(length_settings),
    relaxed=on_some(relaxed_settings),
    signals=on_some(signal_settings),
    # ten times as many texts, because answers that are lost are rare
    answers=Record(lambda pair, n: pair.texts(ANSWERED, 10 * n),
                   partial(answer_row, dict(ar=named('ar'), cmasd=named('cmasd')))))


# ------------------------------------------------------------------------------------------ what it must show

SURE = 0.9              # C from which a token is trivially right
BETTER = 1.02           # a line for "faster": smaller differences are not seen by the clock
BLOCK = 8               # tokens of the longest blocks whose accepted tokens are compared
CLAIMS = {              # text: whose, rival, line
    'default (lossy): speed over plain': (
        'notes: "4-5× decoding speedup on translation/summarization"', PLAIN, 4),
    'default (lossy): speed over sd': ('ours', BEST_SD, BETTER),
    'product: speed over sd': ('ours', BEST_SD, BETTER),
    'payoff: speed over sd': ('ours', BEST_SD, BETTER),
    "default: its tokens that are the target's choice": (
        'notes: "Over 87% output alignment with original model behavior maintained"', '', 0.87),
    'default: accepted tokens a cycle': (
        'notes: "4.27 accepted tokens per iteration vs. 2.91 for baseline SpecDec"',
        f'`sd`; the longest block of both is {BLOCK}', 1.47),
    'the window (exact), tuned: speed over sd': (
        'notes: "reduces rollback frequency and improves throughput"', BEST_SD, BETTER),
    'adaptive threshold: speed over a constant one': (
        'notes: "maintains output fidelity while improving acceptance rates"',
        'constant tau, the fastest that agrees as often', BETTER),
    'AUROC of C for acceptance, all tokens': (
        'notes: "confidence measures correlate with actual verification success rates"', '', 0.75),
    'mean of three signals: speed over one alone': (
        'notes: "more robust uncertainty signals than any single measure alone"',
        'the fastest of three, both at 99 % agreement', BETTER),
    'default: right answers won or lost, a text': (
        'notes: "maintaining or improving BLEU/ROUGE scores"', 'plain decoding', -0.01)}
SPEEDS = {              # text: setting, rival
    'default (lossy): speed over plain': ('cmasd', 'ar'), 'default (lossy): speed over sd': ('cmasd', 'sd '),
    'product: speed over sd': ('product', 'sd '), 'payoff: speed over sd': ('payoff', 'sd ')}
SHOWN = {               # rows of the table of settings: name, settings of one knob
    'default': ['cmasd'], 'strict: tau_base 1': ['strict'], 'sd 4, 10': ['sd 4', 'sd 10'],
    'hf-confidence': ['hf-confidence'], 'payoff': ['payoff']}
SHOWN |= {f'gamma_tau {gain}; k_max 5, 10, 15, 25': [f'gamma_tau {gain}, k_max {k_max}' for k_max in LONGEST]
          for gain in GAINS}
for rule in 'gamma_tau 0.5', 'strict':
    of_each = [f'{source}, {rule}' for source in ('mean', *SIGNALS)]
    SHOWN[f'{rule}; C of all, of entropy, margin, softmax'] = of_each


def figures(records):
    """Yields (text of a claim, its texts, its figure, its kind) of what the records of a pair allow."""
    yield from records.speeds(SPEEDS)
    best, counted = records.best, records.counted()
    if best:
        yield ("default: its tokens that are the target's choice", best.every,
               partial(best.agreement, 'cmasd'), '')
    if counted:
        longer = over(counted, f'cmasd {BLOCK}', f'sd {BLOCK}', 'cycles', 'accepted')
        yield 'default: accepted tokens a cycle', counted.every, longer, ''
    if 'lengths' in records:
        runs = records.runs('lengths')
        figure = tuned_over(runs, runs.starting('window'), runs.starting('sd '), MODELLED)
        yield 'the window (exact), tuned: speed over sd', runs.every, figure, MODELLED
    if 'relaxed' in records:
        runs = records.runs('relaxed')
        constant = [*runs.starting('tau '), 'strict']
        figure = tuned_over(runs, ['cmasd'], constant, MODELLED, runs.agreement('cmasd', runs.every))
        yield 'adaptive threshold: speed over a constant one', runs.every, figure, MODELLED
    if 'tokens' in records:
        rows = records['tokens'].rows
        yield 'AUROC of C for acceptance, all tokens', numpy.arange(len(rows)), confidence_area(rows), ''
    if 'signals' in records:
        runs = records.runs('signals')
        alone = runs.starting(*[f'{signal}, gamma_tau' for signal in SIGNALS])
        figure = tuned_over(runs, runs.starting('mean, gamma_tau'), alone, MODELLED, 0.99)
        yield 'mean of three signals: speed over one alone', runs.every, figure, MODELLED
    yield from answers(records, 'default: right answers won or lost, a text', 'cmasd', 'ar')


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
            rows += [(pair, *row) for row in confidence_rows(records['tokens'].rows)]
        for name in ('relaxed', 'signals', 'lengths'):
            if name in records:
                rows += [(pair, *row) for row in setting_rows(records.runs(name))]
    head = 'pair', 'setting', 'tokens a step, modelled', 'agreement', 'accepted a cycle', 'dropped'
    return [(head, rows)]


def confidence_rows(rows):
    """Rows: the AUROC where C is in doubt; the share of kept tokens in five equal bins of C."""
    yield f'AUROC of C below {SURE}', confidence_area(rows, SURE)(numpy.arange(len(rows))), None, None, None
    sure = numpy.concatenate([numpy.mean(row['signals'], 1) for row in rows])
    kept = numpy.concatenate([numpy.array(row['hit'], bool) for row in rows])
    bins = numpy.minimum(4, (5 * sure).astype(int))
    shares = ', '.join(f'{kept[bins == i].mean():.2f}' if (bins == i).any() else '-' for i in range(5))
    yield 'kept, by C in five bins from 0 to 1', shares, None, None, None


def setting_rows(runs):
    """Rows of SHOWN, a figure for each setting; then of the sweep tuned on `translate`, used on `summary`."""
    texts = runs.every
    for text, names in SHOWN.items():
        if {*names} <= {*runs.names} and 'drafted' in runs.sums:
            columns = (runs.pace(names, texts, MODELLED), runs.agreement(names, texts),
                       runs.share('accepted', 'cycles', names, texts),
                       1 - runs.share('accepted', 'drafted', names, texts))
            yield text, *[', '.join(map(number, column)) for column in columns]
    swept = runs.starting('gamma_tau ')
    if swept:
        there, here = (numpy.flatnonzero(runs.families == family) for family in ('translate', 'summary'))
        moved = swept[runs.pace(swept, there, MODELLED).argmax()]
        bests = [runs.pace(names, here, MODELLED).max() for names in (swept, runs.starting('sd '))]
        shares = ', '.join(number(runs.pace(moved, here, MODELLED) / best) for best in bests)
        yield ('tuned on translate, used on summary: speed over its own best there, over the best sd',
               shares, None, None, None)
