"""What a gate in three tiers is worth: recorded steps, judged again by gates of one tier and of two.

A text is right if all of its recorded steps are. Thresholds are chosen on every second problem, from
quantiles of the scores there, and judged on the others; those of rivals on these others themselves. Work is
weights read, in passes of the target.
"""
import itertools
import math
from typing import NamedTuple

import numpy

from lab.common import Claim, PageTable
from lab.specguard.calibrate import signal_ranges
from verify import step_score

BUDGETS = 0.3, 0.4, 0.5, 0.6, 0.7      # work, as a share of that of the target alone
LEVELS = 0.9, 0.95, 0.98                    # right answers, likewise
QUANTILES = 201, 41                         # thresholds that are tried of a signal: alone, with another's
LINE = 1.05                                 # less work
ONE, TIERS, ASKED, CONTROL = 'one gate', 'three tiers', 'signals=target', 'the target in place of slim'
RIVALS = ONE, ASKED, CONTROL
NEAR = 'The target reads a step in one pass, hardly dearer than slim, and knows what it would write itself'


class Tiered(NamedTuple):
    """A drafted step, as it was stored."""
    logp: float                 # the draft's lowest, nats
    ungrounded: float           # 1 - lowest grounding of the draft's
    slim: float                 # lowest log-probability by the slim target,
    target: float               # and by the target
    written: int                # passes in which the draft wrote it
    own: int                    # tokens, and passes, of the step that the target writes instead
    right: bool
    own_right: bool


class Gate(NamedTuple):
    """A way to judge steps; a threshold of -inf keeps, of inf doubts."""
    name: str
    first: float                # least score of the draft's that keeps a step
    second: float               # least log-probability by whoever is asked where the draft doubts


class Board:
    """The steps of several problems, as arrays [steps]."""

    def __init__(self, problems, ranges):
        """problems: [([Tiered], costs)]; ranges: the scales of the draft's two signals."""
        steps = []
        self.begins = []                    # where each problem's steps begin
        for found, _ in problems:
            self.begins.append(len(steps))
            steps += found
        _, self.costs = problems[0]
        self.score = numpy.array([score(step, ranges) for step in steps])
        columns = numpy.array(steps, dtype=float).T
        self.steps = Tiered(*columns)

    def judged(self, gate):
        """[problems, 3] of each problem by a gate: right or not, work, share of its steps by the target."""
        steps = self.steps
        by_slim = gate.name == TIERS
        work = steps.written * self.costs['draft']
        kept = numpy.zeros(len(work), dtype=bool)
        if gate.name != ASKED:                          # the draft reads its step once more
            work = work + self.costs['draft']
            kept = self.score >= gate.first
        if gate.name != ONE:
            asked = ~kept
            work = work + asked * (self.costs['slim'] if by_slim else 1)
            kept = kept | ((steps.slim if by_slim else steps.target) >= gate.second)
        work = work + ~kept * steps.own
        right = numpy.where(kept, steps.right, steps.own_right)
        whole = numpy.minimum.reduceat(right, self.begins)
        counts = numpy.add.reduceat(numpy.ones(len(work)), self.begins)
        wrote = numpy.add.reduceat(~kept * 1.0, self.begins) / counts
        return numpy.stack([whole, numpy.add.reduceat(work, self.begins), wrote], 1)

    def alone(self):
        """The work of the target alone, mean over the problems."""
        return self.steps.own.sum() / len(self.begins)

    def gates(self, name):
        """[Gate] of this name at all thresholds that are tried."""
        def thresholds(signal):
            count = QUANTILES[name in (TIERS, CONTROL)]
            return [*numpy.quantile(signal, numpy.linspace(0, 1, count)), math.inf]
        firsts = [math.inf] if name == ASKED else thresholds(self.score)
        by_whom = self.steps.slim if name == TIERS else self.steps.target
        seconds = [math.inf] if name == ONE else thresholds(by_whom)
        return [Gate(name, *pair) for pair in itertools.product(firsts, seconds)]

    def tried(self, name):
        """[(right answers, work, mean over the problems, Gate)] of the gates of this name."""
        found = []
        for gate in self.gates(name):
            right, work, _ = self.judged(gate).mean(0)
            found.append((right, work, gate))
        return found


def score(step, ranges):
    """SpecGuard's score of a step by its draft, 0 to 1."""
    found, _ = step_score([(step.logp, 1 - step.ungrounded)], ranges, 0.5, 'weighted')
    return found


def scales(problems):
    """The scales of the draft's two signals."""
    pairs = []
    for steps, _ in problems:
        pairs += [(step.logp, 1 - step.ungrounded) for step in steps]
    return signal_ranges(pairs)


def problems_of(stored):
    """[([Tiered], costs)] of the problems that have steps; costs of a draft pass and of a slim one."""
    found = []
    for row in stored['tiered'].rows:
        steps = [Tiered(*step) for step in row['steps']]
        if steps:
            found.append((steps, row['costs']))
    return found


class Contest(NamedTuple):
    """Three tiers, chosen on some problems and judged on others; rivals, chosen on these others themselves.

    {(name, budget or level asked for): [problems, 3], see Board.judged}. A rival has the most right answers
    for no more work than three tiers really did, or the least work for no fewer right answers.
    """
    at_work: dict
    at_right: dict
    tuned: int                  # problems
    alone: float                # work of the target alone on the others


def contest_of(problems):
    """The Contest of problems, or None where there are too few."""
    tune, test = problems[::2], problems[1::2]
    if len(test) < 2:
        return None
    ranges = scales(tune)
    seen, unseen = Board(tune, ranges), Board(test, ranges)
    found = Contest({}, {}, len(tune), unseen.alone())
    tried = seen.tried(TIERS)
    hindsight = {rival: unseen.tried(rival) for rival in RIVALS}
    for budget in BUDGETS:
        outcomes = unseen.judged(rightest(tried, budget * seen.alone()))
        found.at_work[TIERS, budget] = outcomes
        for rival, known in hindsight.items():
            found.at_work[rival, budget] = unseen.judged(rightest(known, outcomes[:, 1].mean()))
    for level in LEVELS:
        outcomes = unseen.judged(cheapest(tried, level))
        found.at_right[TIERS, level] = outcomes
        for rival, known in hindsight.items():
            found.at_right[rival, level] = unseen.judged(cheapest(known, outcomes[:, 0].mean()))
    return found


def rightest(tried, most):
    """The Gate with most right answers of those of so much work at most; if there is none, the cheapest."""
    fair = [one for one in tried if one[1] <= most]
    if not fair:
        return min(tried, key=lambda one: one[1])[-1]
    return max(fair, key=lambda one: (one[0], -one[1]))[-1]


def cheapest(tried, least):
    """The Gate of least work of those with so many right answers; where there is none, the rightest."""
    fair = [one for one in tried if one[0] >= least]
    if not fair:
        return max(tried, key=lambda one: one[0])[-1]
    return min(fair, key=lambda one: one[1])[-1]


def tier_claims(stored):
    """Three tiers against each rival at equal work, and at equal right answers."""
    if 'tiered' not in stored:
        return []
    contest = contest_of(problems_of(stored))
    if contest is None:
        return []
    found = []
    for rival in RIVALS:
        found += claims_against(contest, rival)
    return found


def claims_against(contest, rival):
    equal_work = side_by_side(contest.at_work, rival, BUDGETS)
    equal_right = side_by_side(contest.at_right, rival, LEVELS)

    def gain(rows):
        mine, theirs = numpy.mean(rows, 0)[:, 0]
        return mine - theirs

    def saved(rows):
        mine, theirs = numpy.mean(rows, 0)[:, 1]
        return theirs / mine
    works = numpy.mean(equal_work, 0)[:, 1] / contest.alone
    rights = numpy.mean(equal_right, 0)[:, 0]
    n = f'n = {len(equal_work)}; thresholds from {contest.tuned} others, the rival\'s with hindsight'
    return [
        Claim(f'Tiers: right answers over {rival} at equal work', 'ours', 0.0, equal_work, gain,
              note=f'really {works[0]:.3f}, {works[1]:.3f} of the work of the target alone; {n}', why=NEAR),
        Claim(f'Tiers: work of {rival} over theirs at equal right answers', 'ours', LINE, equal_right, saved,
              note=f'really {rights[0]:.3f}, {rights[1]:.3f} right; {n}', why=NEAR)]


def side_by_side(outcomes, rival, keys):
    """[problems] of [2, 3]: what Board.judged says of three tiers and of the rival, means over the keys."""
    both = []
    for name in (TIERS, rival):
        both.append(numpy.mean([outcomes[name, key] for key in keys], 0))                   # [problems, 3]
    return [*numpy.stack(both, 1)]


def tier_tables(stored):
    """[a table of all gates at each budget and level], where there are enough problems."""
    contest = contest_of(problems_of(stored)) if 'tiered' in stored else None
    if contest is None:
        return []
    lines = []
    for asked, outcomes in (('work at most', contest.at_work), ('right at least', contest.at_right)):
        for (name, key), found in outcomes.items():
            right, work, wrote = map(float, found.mean(0))
            lines.append((f'{asked} {key:g}', name, right, wrote, work / contest.alone))
    lines.sort(key=lambda line: line[0])                # gates beside each other
    head = 'three tiers: asked for', 'gate', 'right', 'steps by the target', 'work of the target alone'
    return [PageTable(head, lines)]
