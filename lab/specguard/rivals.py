"""Baselines and ablations of SpecGuard: other gates on a step, and the paper's selector. All of them are LOSSY."""
from dataclasses import dataclass

import torch

from model import expect, send
from verify import METHODS, SpecGuard, Stepwise, in_range


def step_right(session, draft):
    """1.0 if the session's checker finds this step right, else 0.0; ValueError where the task has none."""
    expect(session.checker is not None,
           'this gate grades steps: it needs a task with a step checker (python -m lab.measure specguard)')
    return float(session.checker(session.tokens + draft.tokens))


@dataclass
class Unseen(Stepwise):
    """Steps whose signals are not read. LOSSY."""

    def score(self, session, draft):
        return [(None, None)] * len(draft.tokens)


@dataclass
class RewardGuided(Unseen):
    """RSD: keeps a step that a reward model gives tau or more, here the task's own step checker. LOSSY.

    A reward model as large as the draft is charged: the draft's log has a pass over the step.
    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = 1
    tau: float = 0.7                        # reward that a step needs

    def judge(self, session, draft, seen):
        now = session.draft.now()
        session.draft.log.append(('reward', len(draft.tokens), now, now))
        return step_right(session, draft), False


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin, so it shows what a gate of this rate is worth without any signal. LOSSY."""
    rate: float = in_range(0.5, 0, 1)           # chance that a step stays

    def judge(self, session, draft, seen):
        return float(session.flip(self.rate)), False


@dataclass
class OracleGate(SpecGuard):
    """Keeps a step if and only if the task's checker finds it right: the upper bound of any gate. LOSSY.

    It reads the signals all the same, because `train_mask.py --signals` calibrates on its trace.
    """

    def sections(self, config):
        return set()

    def judge(self, session, draft, seen):
        return step_right(session, draft), False


@dataclass
class PooledStep(SpecGuard):
    """SpecGuard that compares candidates by the mean of the draft's last hidden states, as its paper. LOSSY.

    The embedding costs a pass of the draft with the candidates as rows, because `write_steps` keeps no hidden
    states.
    """

    def choose(self, session, found):
        means = self.embed(session, [draft.tokens for draft in found])                      # [k, C]
        unit = torch.nn.functional.normalize(means.double(), dim=-1)
        cosines = (unit @ unit.T).round(decimals=9)         # rounded, so that of equal candidates the first wins
        return found[int(cosines.exp().sum(-1).argmax())]

    def embed(self, session, steps):
        """The mean hidden state [k, C] of each step (a list of ids) behind the text that the cache holds."""
        reader = session.draft
        begin = len(session.tokens)
        longest = max(map(len, steps))
        rows = [ids + [0] * (longest - len(ids)) for ids in steps]          # a step does not see its padding
        line = send(rows, reader.model.cos.device)
        twin = reader.fork(len(steps))
        positions = torch.arange(begin, begin + longest, device=line.device)
        start = reader.now()
        hidden = reader.model(line, positions, reader.model.full, twin.cache.stores, begin + longest)
        reader.log.append(('full', line.numel(), start, reader.now()))
        return torch.stack([states[:len(ids)].mean(0) for states, ids in zip(hidden, steps)])


METHODS.update({'rsd': RewardGuided, 'random-gate': RandomGate, 'oracle-gate': OracleGate,
                'specguard-pooled': PooledStep})
