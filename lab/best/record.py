"""Compositions of all that is here, run on the same texts: `python -m lab.measure best` stores them.

On another pair than the embedded there are fewer settings, because each writes a text of its own.
"""
import functools
from dataclasses import dataclass

import lab.cmasd.baselines                              # enters controllers
import lab.ecsv.baselines                               # noqa: F401, enters hedge
from lab.measure import Setting, named, on_prompts, run_row, sd
from verify import Exact, knob, prompt_lookup, lookup_then_draft

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
GAMMAS = 1, 2, 3, 4, 5, 6, 8, 10, 12
SOME_GAMMAS = 4, 6, 8, 12           # of look-ups, hedges and relaxed rules
TAUS = 0.3, 0.5, 0.8
CONTROLLERS = 'hf-confidence', 'product', 'payoff'
LOOK_UP = 'look up, else'           # a setting: the look-up comes first, the draft model where it has nothing
FEW = ('sd 2', 'sd 3', 'sd 4', f'{LOOK_UP} 3', 'payoff', 'hedge, payoff', f'{LOOK_UP} hedge, payoff',
       'ratio 0.8, payoff', 'ratio 0.5, payoff')        # of another pair


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


def composition_row(pair, prompt):
    """The runs of every setting, or of FEW on another pair."""
    found = every_setting()
    return run_row(found if pair.is_embedded else {name: found[name] for name in FEW}, pair, prompt)


RECORDS = dict(compositions=on_prompts(FAMILIES, composition_row))
