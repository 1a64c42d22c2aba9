"""Compositions of all that is here, run on the same texts: `python -m lab.measure best` stores them.

On another pair than the embedded it is every method once, each with a gamma of 3 where it has one.
"""
import functools
from dataclasses import dataclass

import lab.baselines                                    # noqa: F401, enters them in METHODS
from lab.measure import Record, Setting, named, network, run_row, sd
from model import read_calibration
from verify import Exact, knob, prompt_lookup, lookup_then_draft

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
GAMMAS = 1, 2, 3, 4, 5, 6, 8, 10, 12
SOME_GAMMAS = 4, 6, 8, 12           # of look-ups, hedges and relaxed rules
TAUS = 0.3, 0.5, 0.8
CONTROLLERS = 'hf-confidence', 'product', 'payoff'
LOOK_UP = 'look up, else'           # a setting: the look-up comes first, the draft model where it has nothing
BLOCKS = 4, 8, 12                   # layers in a row that slim leaves out, behind the first sixth of all


@dataclass
class Ratio(Exact):
    """Keeps a draft token from p(x) / max p = tau on: CM-ASD's rule with one tau, for any proposer. LOSSY."""
    tau: float = knob(0.5, 'ratio from which a draft token stays', 0, 1)

    @property
    def lossless(self):
        return False

    def chance(self, score, i):
        _, _, ratio = score.table[i]
        return float(ratio >= self.tau)


def every_setting():
    """{name: Setting} of the compositions that are run on the embedded pair."""
    found = dict(ar=named('ar'), cmasd=named('cmasd'), via=named('via'))
    for gamma in GAMMAS:
        found[f'sd {gamma}'] = sd(gamma)
        found[f'{LOOK_UP} {gamma}'] = sd(gamma, lookup_then_draft)
    for gamma in SOME_GAMMAS:
        found[f'lookup {gamma}'] = sd(gamma, prompt_lookup)
        found[f'hedge {gamma}'] = named('hedge', gamma=gamma)
        for tau in TAUS:
            found[f'ratio {tau}, {gamma}'] = Setting(functools.partial(Ratio, gamma, tau=tau))
    for name in CONTROLLERS:
        for kind, method in (('', 'sd'), ('hedge, ', 'hedge')):
            found[f'{kind}{name}'] = named(method, controller=name)
            found[f'{LOOK_UP} {kind}{name}'] = named(method, controller=name, proposer=lookup_then_draft)
        for tau in TAUS:
            method = functools.partial(Ratio, controller=name, tau=tau)
            found[f'ratio {tau}, {name}'] = Setting(method)
            found[f'ratio {tau}, {LOOK_UP} {name}'] = Setting(method, lookup_then_draft)
    return found


def every_method(layers, calibration):
    """{name: Setting} of each method that the target is calibrated for; plain decoding three times."""
    found = {name: named('ar') for name in ('ar', 'ar, again', 'ar, third')}
    for gamma in 2, 3, 4, 5:
        found[f'sd {gamma}'] = sd(gamma)
    found |= {
        'look up 3': sd(3, prompt_lookup),
        f'{LOOK_UP} 3': sd(3, lookup_then_draft),
        'payoff': named('sd', controller='payoff'),
        'product': named('sd', controller='product'),
        'cmasd': named('cmasd'),
        'cmasd, tau 0.5': named('cmasd', tau_base=0.5, gamma_tau=0.0),
        'cmasd, strict': named('cmasd', tau_base=1.0),
        'ratio 0.5, 3': Setting(functools.partial(Ratio, 3)),
        'cascade': named('cascade', gamma=3),
        'ecsv-prefix': named('ecsv-prefix', gamma=3, branches=3),
        'ecsv-lite': named('ecsv', gamma=3, branches=3, a_self=0),
        'hedge 3': named('hedge', gamma=3)}
    if 'mask' in calibration:
        found['via'] = named('via', gamma=3)
    for count in BLOCKS:
        skipped = range(layers // 6, layers // 6 + count)
        if skipped.stop < layers:
            found[f'via, without {count}'] = named('via-layers', gamma=3, layers=' '.join(map(str, skipped)))
    for k in 1, 4:
        if 'signals' in calibration:
            found[f'specguard, k = {k}'] = named('specguard', k=k, delimiter='sentence')
    return found


def composition_row(pair, prompt):
    """The runs of every setting; of another pair, of every method."""
    if pair.is_embedded:
        return run_row(every_setting(), pair, prompt)
    model, _, _ = network(pair.target, pair.device, pair.dtype)
    calibration = read_calibration(pair.target, pair.draft)
    return run_row(every_method(model.config.num_hidden_layers, calibration), pair, prompt)


def in_turn(pair, n):
    """The prompts of all families in turn, so that what is interrupted has some of each."""
    return sorted(pair.texts(FAMILIES, n), key=lambda prompt: prompt.place)


RECORDS = dict(compositions=Record(in_turn, composition_row))
