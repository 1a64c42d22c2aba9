"""Baselines of SpecGuard: other gates on a step, and a target that has candidates, too. All are LOSSY.

The gates ask `session.checker`, a function from ids to whether their last step is right, which the lab sets.
"""
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from model import require_that
from verify import METHODS, Exact, SpecGuard, decode, knob, require_knob, step_score, tokens_of


def continued_checker(session, right):
    """Function from ids to the grade of the answer to which the target comes, going on greedily from there.

    session: has read its prompt; right: function from an answer to its grade. So a wrong step that the target
    would mend is right. A text on the way of an earlier continuation has its grade, and costs nothing.
    Source: Wang et al. 2024 (Math-Shepherd), the hard estimate, with one greedy continuation.
    """
    room = session.begin + session.tokens_left
    ways = []                               # (where a continuation began, all its ids, its grade)

    def check(ids):
        for start, way, verdict in ways:
            if start <= len(ids) and way[:len(ids)] == ids:
                return verdict
        going = replace(session, tokens=ids, tokens_left=room - len(ids))
        going.ended = len(ids) > session.begin and ids[-1] in session.eos
        way = ids + tokens_of(decode(going, Exact(draft_temperature=0)))
        verdict = right(session.text(way[session.begin:]))
        ways.append((len(ids), way, verdict))
        return verdict
    return check


def step_right(session, draft):
    """1.0 if the session's checker finds this step right, else 0.0; ValueError where the task has none."""
    checker = getattr(session, 'checker', None)
    require_that(checker, 'this gate grades steps: it needs a task with a step checker, '
                 'as python -m lab.measure specguard has it')
    return float(checker(session.tokens + draft.tokens))


@dataclass
class Unseen(SpecGuard):
    """Steps whose signals are not read. LOSSY."""

    def score(self, session, draft):
        return [(None, None)] * len(draft.tokens)


@dataclass
class RewardGuided(Unseen):
    """RSD: a reward model judges steps, here a task's checker (lab.measure specguard runs it). LOSSY.

    A reward model as large as the draft is charged: the draft's log has a pass over the step.
    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = knob(1, 'candidates of the draft', 1, 256)
    tau: float = knob(0.7, 'reward that a step needs')

    def judge(self, session, draft, seen):
        now = session.draft.now()
        session.draft.log.append(('reward', len(draft.tokens), now, now))
        return step_right(session, draft)


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin, so it shows what a gate of this rate is worth without any signal. LOSSY."""
    rate: float = knob(0.5, 'chance that a step stays', 0, 1)

    def judge(self, session, draft, seen):
        return float(session.flip(self.rate))


@dataclass
class OracleGate(Unseen):
    """The upper bound of any gate: a task's checker judges steps (lab.measure specguard runs it). LOSSY."""

    def judge(self, session, draft, seen):
        return step_right(session, draft)


@dataclass
class BothSignals(SpecGuard):
    """SpecGuard whose score is the lower signal, so both have to reach tau; beta has no effect. LOSSY."""

    def judge(self, session, draft, seen):
        super().judge(session, draft, seen)             # notes the ranges
        return min(step_score(seen, self.ranges, beta) for beta in (1, 0))


@dataclass
class TargetCandidates(SpecGuard):
    """SpecGuard whose target, too, writes several candidates of a step; the most central is taken. LOSSY."""
    target_k: int = knob(16, 'candidates of the target where it writes', 1, 256)
    target_temperature: float = knob(None, "of these if they are several; None: the run's", 0)
    target_top_p: float = knob(None, "top-p of these; None: the run's", 1e-9, 1)

    def __post_init__(self):
        super().__post_init__()
        require_knob(self.target_k == 1 or not self.gamma, 'target_k', self.target_k, '1 with gamma above 0')

    @property
    def lossless(self):
        return self.tau == inf and self.target_k == 1

    def write(self, session):
        if self.target_k == 1:
            return super().write(session)
        # samples at temperature 0 would all be alike
        to_probs = partial(session.probs, temperature=self.target_temperature, top_p=self.target_top_p)
        steps = self.write_steps(session, session.target, session.target_path(), to_probs, self.target_k)
        return self.choose(steps).tokens


METHODS.update({'rsd': RewardGuided, 'random-gate': RandomGate, 'oracle-gate': OracleGate,
                'specguard-and': BothSignals, 'specguard-target-k': TargetCandidates})
