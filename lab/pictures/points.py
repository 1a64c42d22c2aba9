"""What the charts show, as dicts: the formula, speed by the cost of a draft.

Speeds are over plain decoding, by the clock; over the cost of a draft by counts of passes.
"""
import numpy

from lab.best.claims import COSTS, at_any_length, counted, lossless, over_plain
from lab.judge import MODELLED, POSITION, Records

REAL = 'qwen-1.5b+0.5b'     # the pair of real models
LONGEST = 12                # block that the formula is drawn for


# ---------------------------------------------------------------------------------------------- the formula

def speedup(alpha, gamma, c, v):
    """The speed of blocks of gamma over plain decoding, if each guess is kept with chance alpha.

    c: the cost of a draft pass, v[n]: of a target pass over n positions, both in plain steps. The sum is
    (1 - alpha^(gamma + 1)) / (1 - alpha), tokens a cycle.
    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, where v is 1.
    """
    tokens = sum(alpha ** i for i in range(gamma + 1))
    return tokens / (gamma * c + v[gamma + 1])


def real_speeds(pair):
    """What the timed texts of the real pair took and kept.

    c, v: costs of its passes; alpha: the share of the draft tokens that `sd 3` kept; timed: {gamma: speed}.
    """
    costs = Records('cmasd', pair).costs
    v = [0.0] + [costs.of_pass('target/full', n) for n in range(1, LONGEST + 2)]
    runs = Records('best', pair).runs('compositions')
    texts = numpy.arange(runs.size)
    timed = {int(name.removeprefix('sd ')): float(over_plain(runs, name)(texts))
             for name in runs.names if name.startswith('sd ')}
    alpha = float(runs.share('accepted', 'judged', 'sd 3', texts))
    return dict(c=costs.of_pass('draft/full', 1), v=v, alpha=alpha, timed=timed)


# ---------------------------------------------------------------------------------- the cost of a draft pass

CHEAPEST, DEAREST, STEPS = 0.02, 0.5, 41        # costs that are drawn, evenly spaced in their logarithms
DRAWN = 'sd', 'payoff', 'cmasd', 'via, without 4', 'ecsv-lite'


def speeds_by_cost(pair):
    """{method: dict(agreement, line, clock)} of a pair with counted runs.

    line: [(c, speed)] at the method's best length for each cost c of a draft pass; clock: the same where it
    was timed. agreement: the lowest of them; None: it is lossless.
    """
    costs = numpy.geomspace(CHEAPEST, DEAREST, STEPS)
    found = {}
    for method in DRAWN:
        line, agreements = [], []
        for c in COSTS if method == 'payoff' else numpy.union1d(COSTS, costs):
            runs, names = runs_at(pair, method, c)
            texts = numpy.arange(runs.size)
            paces = runs.pace(names, texts, MODELLED)
            line.append((float(c), float(paces.max())))
            agreements.append(float(runs.agreement(names[paces.argmax()], texts)))
        agreement = None if lossless([method]) else min(agreements)
        found[method] = dict(agreement=agreement, line=line, clock=clocked(pair, method))
    return found


def runs_at(pair, method, c):
    """(Runs at this cost of a draft pass, the method's settings)."""
    runs = counted(pair, c, POSITION)
    return runs, runs.starting('sd ') if method == 'sd' else at_any_length(runs.names, method, c)


def clocked(pair, method):
    """[(cost of a draft pass, speed)] of a method's fastest timed setting, if it has one."""
    records = Records('best', pair)
    runs = records.runs('compositions')
    texts = numpy.arange(runs.size)
    speeds = [float(over_plain(runs, name)(texts)) for name in runs.names if name.startswith(method)]
    return [(records.costs.of_pass('draft/full', 1), max(speeds))] if speeds else []
