"""What compositions of all that is here are compared by: `python -m lab.claims best` stores it.

Real runs at temperature 0, each with what it wrote, how many of its tokens the target would not have written
behind the same text, and its passes by their number of positions: what a pass takes can be put in later.
On another pair than the embedded there are fewer settings, since each writes a text of its own.
"""
import functools
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import lab.rivals                                       # noqa: F401, enters them in METHODS and CONTROLLERS
from lab.best.claims import FAMILIES, LOOKED_UP, SD
from lab.ecsv.rivals import Hedge
from lab.pairs import Record
from lab.replay import clock, pass_costs
from model import read_calibration
from verify import METHODS, CmAsd, Exact, chain, in_range, lookup, tokens_of

GAMMAS = 1, 2, 3, 4, 5, 6, 8, 10, 12
SOME_GAMMAS = 4, 6, 8, 12           # of lookups and of relaxed rules
TAUS = 0.3, 0.5, 0.7, 0.8, 0.9
CONTROLLED = 'online', 'hf-confidence', 'product', 'payoff'


# ---------------------------------------------------------------------------------------------- compositions

def looked_up_first(session, plan):
    """A Draft that is looked up in the text, or where nothing is found the draft model's."""
    draft = lookup(session, plan)
    return draft if draft.tokens else chain(session, plan)


@dataclass
class Ratio(Exact):
    """Keeps a draft token from p(x) / max p = tau on: CM-ASD's rule with one tau, for any source. LOSSY."""
    tau: float = in_range(0.5, 0, 1)

    @property
    def lossless(self):
        return False

    def chance(self, score, i):
        return float(score.ratios[i] >= self.tau)


class Setting(NamedTuple):
    """How a text is written."""
    method: functools.partial       # of a Method's class with its knobs: a method serves one text
    source: object = None           # where drafts come from; None: the session's own, the draft model


def every_setting():
    """{name: Setting} of all compositions that are run on the embedded pair."""
    found = {'plain': fixed(0), 'cmasd': Setting(CmAsd), 'via': Setting(METHODS['via'])}
    for gamma in GAMMAS:
        found[f'{SD} {gamma}'] = fixed(gamma)
        found[f'{LOOKED_UP} {gamma}'] = fixed(gamma, looked_up_first)
    for gamma in SOME_GAMMAS:
        found[f'lookup {gamma}'] = fixed(gamma, lookup)
        found[f'hedge {gamma}'] = Setting(functools.partial(Hedge, gamma))
    for name in CONTROLLED:
        for kind, method in (('', Exact), ('hedge, ', Hedge)):
            setting = functools.partial(method, controller=name)
            found[f'{kind}{name}'] = Setting(setting)
            found[f'{LOOKED_UP} {kind}{name}'] = Setting(setting, looked_up_first)
    for tau in TAUS:
        for name in CONTROLLED:
            setting = functools.partial(Ratio, controller=name, tau=tau)
            found[f'ratio {tau}, {name}'] = Setting(setting)
            found[f'ratio {tau}, {LOOKED_UP} {name}'] = Setting(setting, looked_up_first)
        for gamma in SOME_GAMMAS:
            found[f'ratio {tau}, {gamma}'] = Setting(functools.partial(Ratio, gamma, tau=tau))
    return found


def fixed(gamma, source=None):
    """The Setting of exact decoding with blocks of gamma."""
    return Setting(functools.partial(Exact, gamma), source)


FEW = (f'{SD} 2', f'{SD} 3', f'{SD} 4', f'{LOOKED_UP} 3', 'payoff', 'hedge, payoff',
       f'{LOOKED_UP} hedge, payoff', 'ratio 0.8, payoff', 'ratio 0.5, payoff')       # of another pair


def settings(pair):
    """{name: Setting} of the compositions that are run on a pair."""
    found = every_setting()
    return found if pair.is_embedded else {name: found[name] for name in FEW}


# ---------------------------------------------------------------------------------------------------- records

def prompts_of(pair, n):
    return pair.texts(FAMILIES, n)


def one_row(pair, n):
    """[n]: the single item of `costs`."""
    return [n]


def cost_row(pair, _):
    """What passes take: seconds of the draft's and of the target's by positions; slim: over the target's.

    lossless: the names of the settings that write the target's text.
    """
    draft, target = pass_costs(pair)
    model = pair.network('target')[0]
    skip = read_calibration(pair.target, None, ['mask'])['mask']['skip']
    slim = model.read_bytes(model.full.without(skip)) / model.read_bytes(model.full)
    lossless = [name for name, setting in settings(pair).items() if setting.method().lossless]
    return dict(draft=draft, target=target, slim=slim, lossless=lossless)


def composition_row(pair, prompt):
    """{setting: its counts} of a text, one after the other; seconds: of one run, see lab.replay.clock."""
    session = pair.session(prompt.ids)
    session.calibration = read_calibration(pair.target, None, ['mask'])
    usual = session.source
    runs = {}
    for name, setting in settings(pair).items():
        session.source = setting.source or usual
        method = setting.method()
        begin = clock(session.target)
        cycles = pair.written(session, prompt.ids, method)
        seconds = clock(session.target) - begin
        written = tokens_of(cycles)
        wrong = 0 if method.lossless else wrong_tokens(session, prompt.ids, written)
        runs[name] = dict(tokens=len(written), wrong=wrong, seconds=seconds, passes=passes_of(cycles))
    return prompt.name | dict(runs=runs)


def wrong_tokens(session, ids, written):
    """How many of the tokens written behind these ids are not the target's favourite behind the same text."""
    reader = session.target
    logits = reader.read(ids, written[:-1], reader.model.full, len(written))
    return sum(pick != token for pick, token in zip(logits.argmax(-1).tolist(), written))


def passes_of(cycles):
    """{reader/path: {positions: passes of so many}} of all cycles.

    Of several in a cycle the first has what the others leave, who read a position each: so a draft is
    written, which first catches up with the text.
    """
    found = {}
    for cycle in cycles:
        for path, (n, positions, _) in cycle.passes.items():
            counts = found.setdefault(path, Counter())
            counts[positions - n + 1] += 1
            if n > 1:
                counts[1] += n - 1
    return found


RECORDS = dict(
    costs=Record(one_row, cost_row, calibrated=True),
    compositions=Record(prompts_of, composition_row, calibrated=True))
