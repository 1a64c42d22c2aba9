"""What is measured for CM-ASD: `python -m lab.measure cmasd` stores it, lab/cmasd/claims.py judges it.

Of another pair than the embedded there are fewer relaxed rules, because each writes a text of its own.
"""
import itertools
from functools import partial

import lab.cmasd.baselines                              # noqa: F401, enters the baselines in METHODS
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
    settings['cmasd-specdec, fixed 8'] = named('cmasd-specdec', gamma=8, k_min=8)
    return settings | {name: named(name) for name in ('cmasd-prob', 'cmasd-specdec')}


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
