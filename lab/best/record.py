"""Compositions of all that is here, run on the same texts: `python -m lab.measure best` stores them.

Every method once, each with the same gamma where it has one; plain sd with four.
"""
import functools
from dataclasses import dataclass

import lab.baselines                                    # noqa: F401, enters them in METHODS
from lab.cmasd.baselines import Payoff
from lab.ecsv.baselines import Hedge
from lab import read_bytes
from lab.measure import Record, Setting, named, network, run_row, sd, token_row
from lab.via.baselines import sublayers
from model import read_calibration
from verify import Exact, knob, prompt_lookup, lookup_then_draft

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
GAMMAS = 3, (2, 3, 4, 5)            # of all methods but plain sd; of plain sd
EMBEDDED_GAMMAS = 8, (4, 6, 8, 12)  # where a draft pass is cheap
LOSSY = 'ratio', 'cmasd', 'via', 'cascade', 'specguard', 'lenient'      # settings, by their first word
LOOK_UP = 'look up, else'           # a setting: the look-up comes first, the draft model where it has nothing
COSTS = 0.02, 0.05, 0.1, 0.2, 0.36  # of a draft pass, in target passes, that payoff is told
LENGTHS = 2, 4, 8, 12               # of blocks whose passes are counted
BLOCKS = 4, 8, 12                   # layers in a row that slim leaves out, after the first sixth of all


def lossless(names):
    """Those of the settings that write the target's text."""
    return [name for name in names if not name.startswith(LOSSY) or name == 'cmasd, strict']


@dataclass
class Ratio(Exact):
    """Keeps a draft token from p(x) / max p = tau on: CM-ASD's rule with one tau, for any proposer. LOSSY."""
    tau: float = knob(0.5, 'ratio from which a draft token stays', 0, 1)

    def chance(self, score, i):
        return float(score.table[i].ratio >= self.tau)


@dataclass
class HedgePayoff(Payoff, Hedge):
    """`hedge` whose blocks end as those of `payoff`."""


@dataclass
class RatioPayoff(Payoff, Ratio):
    """`ratio` whose blocks end as those of `payoff`. LOSSY."""


def every_method(gamma, gammas, layers, calibration):
    """{name: Setting} of what the target is calibrated for; gammas: of plain sd, gamma: of the others."""
    settings = {name: named('ar') for name in ('ar', 'ar, again', 'ar, third')}
    for length in gammas:
        settings[f'sd {length}'] = sd(length)
    settings |= {
        f'look up {gamma}': sd(gamma, prompt_lookup),
        f'{LOOK_UP} {gamma}': sd(gamma, lookup_then_draft),
        'payoff': named('payoff'),
        'product': named('product'),
        'cmasd': named('cmasd'),
        'cmasd, tau 0.5': named('cmasd', tau_base=0.5, gamma_tau=0.0),
        'cmasd, strict': named('cmasd', tau_base=1.0),
        f'ratio 0.5, {gamma}': Setting(functools.partial(Ratio, gamma)),
        'cascade': named('cascade', gamma=gamma),
        'ecsv-prefix': named('ecsv-prefix', gamma=gamma, branches=3),
        'ecsv-lite': named('ecsv', gamma=gamma, branches=3, a_self=0),
        f'hedge {gamma}': named('hedge', gamma=gamma)}
    if 'mask' in calibration:
        settings['via'] = named('via', gamma=gamma)
    for count in BLOCKS:
        if layers // 6 + count < layers:
            settings[f'via, without {count}'] = via_without(count, layers, gamma)
    for k in 1, 4:
        if 'signals' in calibration:
            settings[f'specguard 4, k = {k}'] = named('specguard', k=k, gamma=4, delimiter='sentence')
    return settings


NOT_ELSEWHERE = 'ar, third', 'sd 5', 'cmasd, tau 0.5', 'cascade', 'via, without 12'


def via_without(count, layers, gamma):
    """The Setting of via without the layers left_out."""
    return named('via-layers', gamma=gamma, layers=' '.join(map(str, left_out(count, layers))))


def left_out(count, layers):
    """So many layers in a row, after the first sixth of all."""
    return range(layers // 6, layers // 6 + count)


COMPOSITIONS = {        # Settings of payoff with a second idea, and with a third
    f'{LOOK_UP} payoff': Setting(Payoff, lookup_then_draft),
    'hedge, payoff': Setting(HedgePayoff),
    f'{LOOK_UP} hedge, payoff': Setting(HedgePayoff, lookup_then_draft),
    'ratio 0.5, payoff': Setting(RatioPayoff),
    f'ratio 0.5, {LOOK_UP} payoff': Setting(RatioPayoff, lookup_then_draft)}


def methods_of(pair):
    """every_method for the models of a pair."""
    model, _, _ = network(pair.target, pair.device, pair.dtype)
    gamma, gammas = EMBEDDED_GAMMAS if pair.is_embedded else GAMMAS
    calibration = read_calibration(pair.target, pair.draft)
    settings = every_method(gamma, gammas, model.config.num_hidden_layers, calibration)
    if not pair.is_embedded:                            # a text takes ten seconds there
        settings = {name: setting for name, setting in settings.items() if name not in NOT_ELSEWHERE}
    return settings


def composition_row(pair, prompt):
    """The runs of every method; of the embedded pair, of the compositions too."""
    more = COMPOSITIONS if pair.is_embedded else {}
    return run_row(methods_of(pair) | more, pair, prompt)


def sampled_row(pair, prompt):
    """The runs at temperature 0.8 of the methods that are lossless, and of two that are not."""
    gamma, gammas = EMBEDDED_GAMMAS if pair.is_embedded else GAMMAS
    settings = methods_of(pair) | dict(lenient=named('lenient', gamma=gamma))
    for length in gammas:
        settings[f'sd {length}'] = named('sd', gamma=length)        # its drafts are sampled too
    settings = {name: setting._replace(temperature=0.8) for name, setting in settings.items()
                if lossless([name]) or name in ('via', 'lenient')}
    return run_row(settings, pair, prompt)


def counted_settings(layers):
    """{name: Setting} of methods at several lengths but sd, of which counted_row tells every length."""
    settings = {'product': named('product')}
    for cost in COSTS:
        settings[f'payoff, c {cost:g}'] = named('payoff', cost=cost)
    for length in LENGTHS:
        settings[f'cmasd {length}'] = named('cmasd', gamma=length)
        settings[f'ratio 0.5, {length}'] = Setting(functools.partial(Ratio, length))
    for length in LENGTHS[:-1]:
        settings[f'via, without 4, {length}'] = via_without(4, layers, length)
        settings[f'ecsv-lite {length}'] = named('ecsv', gamma=length, a_self=0)
    return settings


def counted_row(pair, prompt):
    """The runs of counted_settings, and of the target's own text where the draft's first choice is its token.

    Without seconds, so a busy machine may record it. slim: the share of the weights that a slim pass reads.
    """
    model, _, _ = network(pair.target, pair.device, pair.dtype)
    layers = model.config.num_hidden_layers
    slim = model.full.without(sublayers(left_out(4, layers)))
    row = run_row(counted_settings(layers), pair, prompt)
    for name, run in row['runs'].items():
        del run['seconds']
        if name.startswith('via'):
            run['slim'] = read_bytes(model, slim) / read_bytes(model, model.full)
    tokens = token_row(pair, prompt)
    return row | dict(tokens=tokens['tokens'], hit=tokens['hit'])


def in_turn(pair, n):
    """The prompts of all families in turn, so that what is interrupted has some of each."""
    return sorted(pair.texts(FAMILIES, n), key=lambda prompt: prompt.place)


RECORDS = dict(compositions=Record(in_turn, composition_row), sampled=Record(in_turn, sampled_row),
               counts=Record(in_turn, counted_row))
