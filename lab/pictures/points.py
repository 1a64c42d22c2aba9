"""What the two charts show, as dicts and tuples: the formula of speed, the front of speed and agreement.

Speeds are over plain decoding. Modelled ones count the time of each pass by its number of positions
(lab/results/*/costs.jsonl), measured ones are the clock's.
"""
from typing import NamedTuple

import numpy

from lab.judge import CLOCK, MODELLED, Records

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
    """The costs of the real pair's passes (c, v), its acceptance rate alpha, and its points.

    replayed: {gamma: speed} of CM-ASD's texts with their real verdicts; timed: the runs of lab/best by the
    clock, over plain steps that were timed alone.
    """
    records = Records('cmasd', pair)
    costs = records.costs
    hits = numpy.concatenate([row['hit'] for row in records['tokens'].rows])
    v = [0.0] + [costs.of_pass('target/full', n) for n in range(1, LONGEST + 2)]
    return dict(c=costs.of_pass('draft/full', 1), v=v, alpha=float(hits.mean()),
                replayed=speeds_of_sd(records.runs('relaxed'), MODELLED),
                timed=speeds_of_sd(Records('best', pair).runs('compositions'), CLOCK, costs.step))


def speeds_of_sd(runs, kind, step=1.0):
    """{gamma: speed} of plain sd in these runs; step: seconds of plain decoding's, where they are timed."""
    texts = numpy.arange(runs.size)
    found = {}
    for name in runs.names:
        if name.startswith('sd '):
            found[int(name.removeprefix('sd '))] = float(runs.pace(name, texts, kind)) * step
    return found


# ------------------------------------------------------------------------------------------------ the front

class Point(NamedTuple):
    """A setting of a method."""
    name: str
    kind: str           # sd, adaptive (lossless compositions), cmasd, via or plain
    lossless: bool
    agreement: float    # the share of its tokens that the target would have written behind the same text
    modelled: float     # speed over plain decoding
    measured: float     # the same by the clock


def front_points(pair):
    """The Points of all compositions that were run on the same texts."""
    records = Records('best', pair)
    runs = records.runs('compositions')
    texts = numpy.arange(runs.size)
    plain = 1 / records.costs.step                      # tokens a second; on the real pair nobody ran it
    if 'ar' in runs.names:
        plain = runs.pace('ar', texts, CLOCK)
    found = []
    for name in runs.names:
        kind = kind_of(name)
        lossless = kind not in ('cmasd', 'via')
        found.append(Point(name, kind, lossless, float(runs.agreement(name, texts)),
                           float(runs.pace(name, texts, MODELLED)),
                           float(runs.pace(name, texts, CLOCK) / plain)))
    return found


def kind_of(name):
    """The kind of a setting of lab.best; `ratio` is CM-ASD's rule with one tau."""
    first = name.split()[0]
    kinds = dict(ar='plain', sd='sd', via='via', cmasd='cmasd', ratio='cmasd')
    return kinds.get(first, 'adaptive')


def front(points):
    """The Points that no other beats: none has their agreement, or more, at a higher modelled speed.

    The most agreeing first; of equals the first.
    """
    found = []
    for point in sorted(points, key=lambda point: (-point.agreement, -point.modelled, not point.lossless)):
        if not found or point.modelled > found[-1].modelled:
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
