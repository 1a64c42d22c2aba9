"""What the two charts show, as dicts and tuples: the formula of speed, the front of speed and agreement.

Speeds are over plain decoding, by the clock.
"""
from typing import NamedTuple

import numpy

from lab.best.claims import over_plain
from lab.best.record import lossless
from lab.judge import Records, interval

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
    timed = {}
    for name in runs.names:
        if name.startswith('sd '):
            timed[int(name.removeprefix('sd '))] = float(over_plain(runs, name)(texts))
    alpha = float(runs.share('accepted', 'judged', 'sd 3', texts))
    return dict(c=costs.of_pass('draft/full', 1), v=v, alpha=alpha, timed=timed)


# ------------------------------------------------------------------------------------------------ the front

class Point(NamedTuple):
    """A setting of a method."""
    name: str
    kind: str           # one of charts.KINDS
    lossless: bool
    agreement: float    # the share of its tokens that the target would have written behind the same text
    speed: float        # over plain decoding, by the clock
    low: float          # its interval over the texts
    high: float


def front_points(pair):
    """The Points of all settings that were run on the same texts."""
    runs = Records('best', pair).runs('compositions')
    texts = numpy.arange(runs.size)
    found = []
    for name in runs.names:
        if name == 'ar' or not name.startswith('ar'):
            figure = over_plain(runs, name)
            agreement = float(runs.agreement(name, texts))
            found.append(Point(name, kind_of(name), bool(lossless([name])), agreement, float(figure(texts)),
                               *interval(texts, figure)))
    return found


def kind_of(name):
    """The kind of a setting of lab.best; `ratio` is CM-ASD's rule with one tau, as lenient as a cascade."""
    first = name.split()[0].rstrip(',').split('-')[0]
    kinds = dict(ar='plain', sd='sd', via='via', cmasd='cmasd', ratio='cmasd', cascade='cmasd', ecsv='ecsv',
                 specguard='specguard')
    return kinds.get(first, 'adaptive')


def front(points):
    """The Points that no other beats: none has their agreement, or more, at a higher speed.

    The most agreeing first; of equals the first. What is lossless agrees wholly, up to rounding.
    """
    found = []
    for point in sorted(points, key=lambda point: (-(point.lossless or point.agreement), -point.speed)):
        if not found or point.speed > found[-1].speed:
            found.append(point)
    return found


def both_pairs():
    """{name of a pair: its Points} of the embedded pair and the real one."""
    return {'embedded pair': front_points('embedded'), 'Qwen2.5-Coder 1.5B with 0.5B': front_points(REAL)}


def fronts(pairs):
    """{name of a pair: the Points of its front, as dicts}: what the picture says of both_pairs."""
    found = {}
    for pair, points in pairs.items():
        found[pair] = [point._asdict() for point in front(points)]
    return found
