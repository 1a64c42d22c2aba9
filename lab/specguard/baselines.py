"""Baselines of SpecGuard: other gates on a step, and a target that has candidates, too. All are LOSSY.

Gates that grade steps ask `session.calibration['checker']`, a function from ids to whether their last step is
right, which `python -m lab.measure specguard` puts there.
"""
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from model import knob, require_that
from verify import METHODS, Judged, SpecGuard


def step_right(session, draft):
    """1.0 if the session's checker finds this step right, else 0.0; BadInput where the task has none."""
    checker = session.calibration.get('checker')
    require_that(checker, 'this gate grades steps: it needs a task with a step checker, '
                 'as python -m lab.measure specguard has it')
    return float(checker(session.tokens + draft.tokens))


@dataclass
class Unseen(SpecGuard):
    """A gate whose `reward` of a step has to reach tau; the signals are not read. LOSSY."""

    def score(self, session, draft):
        return None

    def verdict(self, session, draft, pairs):
        reward = self.reward(session, draft)
        kept = reward >= self.tau
        return Judged(draft.tokens, threshold=self.tau, chance=float(kept), kept=kept,
                      signals=draft.signals[0] | dict(reward=reward))


@dataclass
class RewardGuided(Unseen):
    """RSD: a reward model judges steps, here a task's checker (lab.measure specguard runs it). LOSSY.

    A reward model as large as the draft is charged: the draft's log has a pass over the step.
    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = knob(1, 'candidates of the draft', 1, 256)
    tau: float = knob(0.7, 'reward that a step needs')

    def reward(self, session, draft):
        reader = session.drafter
        reader.log.append((replace(reader.model.full, name='reward'), len(draft.tokens)))
        return step_right(session, draft)


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin, so it shows what a gate of this rate is worth without any signal. LOSSY."""
    rate: float = knob(0.5, 'chance that a step stays', 0, 1)

    def reward(self, session, draft):
        return float(session.flip(self.rate))


@dataclass
class OracleGate(Unseen):
    """The upper bound of any gate: a task's checker judges steps (lab.measure specguard runs it). LOSSY."""

    def reward(self, session, draft):
        return step_right(session, draft)


@dataclass
class BothSignals(SpecGuard):
    """SpecGuard whose score is the lower signal, so both have to reach tau; beta has no effect. LOSSY."""

    def verdict(self, session, draft, pairs):
        step = super().verdict(session, draft, pairs)
        if pairs:
            score = min(step.signals['scaled_L'], step.signals['scaled_G'])
            step.signals['score'] = score
            step.kept = score >= self.tau
            step.chance = float(step.kept)
        return step


@dataclass
class TargetCandidates(SpecGuard):
    """SpecGuard whose target, too, writes several candidates of a step; the most central is taken. LOSSY."""
    target_k: int = knob(16, 'candidates of the target where it writes', 1, 256)
    target_temperature: float = knob(None, "of these if they are several; None: the run's", 0)
    target_top_p: float = knob(None, "top-p of these; None: the run's", 1e-9, 1)

    def __post_init__(self):
        super().__post_init__()
        require_that(self.target_k == 1 or not self.gamma,
                     f'target_k is {self.target_k}; expected 1 with gamma above 0')

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
