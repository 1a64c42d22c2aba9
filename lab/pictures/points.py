"""What the two charts show, as dicts and tuples: the formula of speed, the front of speed and agreement.

Speeds are over plain decoding. Modelled ones put in for each pass what lab/best/results/costs.jsonl says that
it takes by its number of positions, whichever record counted the passes; measured ones are the clock's.
"""
from typing import NamedTuple

from lab.best.claims import SD, Costs, runs_of
from lab.common import read_stored

REAL = 'Qwen2.5-Coder-1.5B-Instruct with Qwen2.5-Coder-0.5B-Instruct'      # the pair of real models
QUESTIONS = 'gsm8k'         # the family that all records of the real pair have: the one its front is of
LONGEST = 12                # block that the formula is drawn for
BRANCHES = 4                # of ecsv, rows of one draft pass
LENIENT_STEP = 12           # of a hundred thresholds of lenient sd that were replayed, one of so many


def records(paper, names, pair):
    """{name: Stored} of these records of a paper."""
    return {name: read_stored(paper, name, pair) for name in names}


# ---------------------------------------------------------------------------------------------- the formula

def speedup(alpha, gamma, c, v):
    """How often plain decoding's speed blocks of gamma have, each guess kept with chance alpha.

    c: what a draft pass takes, v[n]: a target pass over n positions, both in plain steps. The sum is
    (1 - alpha^(gamma + 1)) / (1 - alpha), tokens a cycle.
    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, where v is 1.
    """
    tokens = sum(alpha ** i for i in range(gamma + 1))
    return tokens / (gamma * c + v[gamma + 1])


def real_speeds(pair):
    """What the real pair's passes take (c, v), the share alpha of guesses that it keeps, and its points.

    replayed, timed: {gamma: speed}. Replayed are all texts of ECSV's record, with their real verdicts; timed
    are the runs of lab.best, over plain steps that were timed alone.
    """
    costs = costs_of(pair)
    rows = read_stored('ecsv', 'hedged', pair).rows
    sums = sums_by_depth(rows, 'sd', ('kept', 'failures', 'cycles', 'drafts'))
    tokens = sum(row['tokens'] for row in rows)
    replayed = {}
    kept = judged = 0
    for gamma, (accepted, failures, cycles, drafts) in sums.items():
        steps = drafts * costs.readers['draft'] + cycles * costs.of_positions(gamma + 1)
        replayed[gamma] = tokens / steps
        kept += accepted
        judged += accepted + failures
    v = [0.0]
    for n in range(1, LONGEST + 2):
        v.append(costs.of_positions(n))
    return dict(c=costs.readers['draft'], v=v, alpha=kept / judged, replayed=replayed, timed=timed_sd(pair))


def costs_of(pair):
    """The Costs of passes on a pair, in plain steps."""
    return Costs(read_stored('best', 'costs', pair).rows[0])


def sums_by_depth(rows, name, figures):
    """{depth: sums of these figures over all rows} of one vote of ECSV's records."""
    found = {}
    for i, depth in enumerate(rows[0]['votes'][name]['depths']):
        found[depth] = [0] * len(figures)
        for row in rows:
            for place, figure in enumerate(figures):
                found[depth][place] += row['votes'][name][figure][i]
    return found


def timed_sd(pair):
    """{gamma: speed by the clock} of plain sd in the runs of lab.best."""
    found = {}
    for point in compositions(pair, None):
        if point.kind == 'sd':
            found[int(point.name.removeprefix(SD))] = point.measured
    return found


# ------------------------------------------------------------------------------------------------ the front

class Point(NamedTuple):
    """A setting of a method."""
    name: str
    kind: str           # sd, adaptive (lossless compositions), ecsv, cmasd, via, lenient or plain
    lossless: bool
    agreement: float    # the share of its tokens that the target would have written behind the same text
    modelled: float     # speed over plain decoding
    measured: float     # likewise by the clock; None where nobody timed it


def front_points(pair):
    """All Points of a pair: lab.best's compositions, replayed thresholds of via and lenient sd, votes."""
    family = QUESTIONS if pair else None
    return compositions(pair, family) + thresholds(pair) + votes(pair, family)


def compositions(pair, family):
    """Points of the real runs of lab.best; family: of its texts alone, or None for all."""
    stored = records('best', ('costs', 'compositions'), pair)
    runs = runs_of(stored)
    texts = [i for i in range(runs.size) if family in (None, runs.families[i])]
    modelled = runs.pace(texts)
    measured = runs.pace(texts, 'seconds')
    plain = 1 / costs_of(pair).step                     # tokens a second; of real models nobody ran it
    if 'plain' in runs.names:
        plain = measured[runs.names.index('plain')]
    agreement = runs.agreement(texts)
    found = []
    for i, name in enumerate(runs.names):
        lossless = bool(runs.lossless[i])
        found.append(Point(name, kind_of(name, lossless), lossless, float(agreement[i]), float(modelled[i]),
                           float(measured[i] / plain)))
    return found


def kind_of(name, lossless):
    """The kind of a setting of lab.best; `ratio` is CM-ASD's rule with one tau."""
    first = name.split()[0]
    if first in ('plain', 'sd', 'via'):
        return first
    return 'adaptive' if lossless else 'cmasd'


def thresholds(pair):
    """Points of via at its thresholds, and of lenient sd, whose blocks of one gamma were replayed."""
    stored = records('via', ('settings', 'replays'), pair)
    rows = stored['replays'].rows
    settings = stored['settings'].rows[0]
    costs = costs_of(pair)
    cycles = sum(row['cycles'] for row in rows)
    drafting = sum(row['places'] for row in rows) * costs.readers['draft']
    full = costs.of_positions(settings['gamma'] + 1)    # of the lag that via's passes catch up with, nothing
    found = []
    for i, (keep, escalate) in enumerate(settings['pairs']):
        passes = sum(row['via']['passes'][i] for row in rows)
        steps = drafting + (cycles * costs.readers['slim'] + passes) * full
        point = replayed(f'via, keep {keep:g}, escalate {escalate:g}', rows, 'via', i, steps)
        found.append(point._replace(lossless=escalate > 1))
    if 'lenient' in rows[0]:
        for i in range(0, len(rows[0]['lenient']['tokens']), LENIENT_STEP):
            name = f'lenient sd {settings["gamma"]}, lam {1 - (i + 1) / 100:.2f}'
            found.append(replayed(name, rows, 'lenient', i, drafting + cycles * full))
    return found


def replayed(name, rows, kind, i, steps):
    """The Point of the i-th threshold of a kind, which took so many plain steps in all rows."""
    tokens = wrong = 0
    for row in rows:
        tokens += row[kind]['tokens'][i]
        wrong += row[kind]['wrong'][i]
    return Point(name, kind, False, 1 - wrong / tokens, tokens / steps, None)


def votes(pair, family):
    """Points of ecsv at each depth. A draft pass over its branches is taken to cost as one over positions."""
    rows = [row for row in read_stored('ecsv', 'votes', pair).rows if family in (None, row['family'])]
    costs = costs_of(pair)
    drafting = costs.readers['draft'] * costs.of_positions(BRANCHES)
    tokens = sum(row['tokens'] for row in rows)
    found = []
    for depth, (cycles,) in sums_by_depth(rows, 'ecsv', ('cycles',)).items():
        steps = cycles * (depth * drafting + costs.of_positions(depth + 1))
        found.append(Point(f'ecsv {depth}', 'ecsv', True, 1.0, tokens / steps, None))
    return found


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
    return {'embedded pair': front_points(''), 'Qwen2.5-Coder 1.5B with 0.5B': front_points(REAL)}


def fronts(pairs):
    """{name of a pair: the Points of its front, as dicts}: what the picture says of both_pairs."""
    found = {}
    for pair, points in pairs.items():
        found[pair] = [point._asdict() for point in front(points)]
    return found
