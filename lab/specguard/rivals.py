"""Rivals of SpecGuard: other gates, votes of the draft alone, another selector; they enter METHODS.

All of them are LOSSY. Three ask a task's step checker, which only the lab's own sessions have.
"""
import math
from collections import Counter
from dataclasses import dataclass

import torch

from model import expect, fetch, send
from verify import METHODS, Draft, SpecGuard, Stepwise, finite, in_range, require, token_logps


def step_right(session, draft):
    """1.0 if the session's checker finds this step right, else 0.0; ValueError where the task has none."""
    expect(session.checker is not None,
           'this control grades steps: it needs a task with a step checker (python -m lab.claims specguard)')
    return float(session.checker(session.tokens + draft.tokens))


def sureness(draft):
    """The mean log-probability of a draft's tokens, nats."""
    return float(token_logps(draft.logits, draft.tokens).mean())


# --------------------------------------------------------------------------------- other gates on a step

@dataclass
class Unseen(Stepwise):
    """Steps whose signals nobody looks at."""

    def score(self, session, draft):
        return [(None, None)] * len(draft.tokens)


@dataclass
class RewardGuided(Unseen):
    """RSD: a step stays if a reward model gives it tau or more, here the task's own step checker. LOSSY.

    The checker costs nothing in this run; record.py charges a pass of a 1 M-parameter model for each step.
    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = 1
    tau: float = 0.7                        # reward that a step needs

    def judge(self, session, draft, seen):
        return step_right(session, draft), False


@dataclass
class SpecReason(Stepwise):
    """The target reads each step and gives it 0 to 9; 7 keeps it. LOSSY.

    Theirs is asked for the digit in a prompt, which takes a model that follows instructions; here it is 9
    times the geometric mean of the target's own probabilities. Source: Pan et al. 2025 (SpecReason).
    """
    k: int = 1
    tau: float = 7.0                        # mark that a step needs, 0..9

    def score(self, session, draft):
        path = session.view(session.target.model.full)
        logits = session.read(session.target, session.tokens, draft.tokens, path, len(draft.tokens) + 1)
        (logps,) = fetch(token_logps(logits[:-1], draft.tokens))
        return [(logp, None) for logp in logps.tolist()]

    def judge(self, session, draft, seen):
        total = sum(logp for logp, _ in seen)
        return 9 * math.exp(total / len(seen)), False


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin: what a gate of this rate is worth that knows nothing. LOSSY."""
    rate: float = in_range(0.5, 0, 1)           # chance that a step stays

    def judge(self, session, draft, seen):
        return float(session.flip(self.rate)), False


@dataclass
class OracleGate(SpecGuard):
    """Keeps a step if and only if the task's checker finds it right: the most that any gate can do. LOSSY.

    It reads the signals all the same: its trace is what `train_mask.py --signals` calibrates on.
    """

    def sections(self, config):
        return set()

    def judge(self, session, draft, seen):
        return step_right(session, draft), False


@dataclass
class Tiers(SpecGuard):
    """A gate in three tiers: where the draft doubts, the slim target reads the step, then the target writes.

    A step stays from tau on by the draft's own score, or from tau_slim on by slim's weakest token, on the
    scale of the target's log-probabilities. LOSSY; scores are 0 to 1: thresholds above 1 are exact. Ours.
    """
    tau_slim: float = in_range(0.5, -math.inf, math.inf)    # score that a step needs which the draft doubts

    @property
    def lossless(self):
        return super().lossless or min(self.tau, self.tau_slim) > 1 and self.target_k == 1

    def sections(self, config):
        return {'signals', 'mask'}

    def judge(self, session, draft, seen):
        """The score is tau or more where either tier keeps the step."""
        score, clipped = super().judge(session, draft, seen)
        if score >= self.tau:
            return score, clipped
        lowest = slim_lowest(session, draft.tokens)
        low, high = session.calibration['signals']['target_logp']
        scaled = (lowest - low) / max(high - low, 1e-6)
        return max(score, self.tau + min(1.0, max(0.0, scaled)) - self.tau_slim), clipped


def slim_lowest(session, ids):
    """The least log-probability, nats, of a step's tokens (ids) by the slim target, in one pass of it."""
    rows = session.target.read(session.tokens, ids, session.view(session.slim_path), len(ids) + 1)
    return float(token_logps(rows[:-1], ids).min())


# ------------------------------------------------------------------------ whole texts of the draft alone

@dataclass
class Majority(Unseen):
    """The draft alone writes k whole texts; the commonest last line wins, of those the first text. LOSSY.

    Source: Wang et al. 2023 (self-consistency), section 2.
    """
    k: int = 8
    tau: float = -math.inf                  # the target writes nothing; inf: it writes all

    def __post_init__(self):
        super().__post_init__()
        require(math.isinf(self.tau), 'tau', self.tau, '-inf or inf: there is no score to compare')

    def longest(self, session):
        """A `step` is a whole text."""
        return session.room

    def over(self, session, ids):
        return len(ids) >= session.room or ids[-1] in session.eos

    def choose(self, session, found):
        endings = [session.text(draft.tokens).strip().split('\n')[-1] for draft in found]
        (commonest, _), = Counter(endings).most_common(1)
        return found[endings.index(commonest)]


@dataclass
class BestOfN(Majority):
    """The draft alone writes k whole texts; the one with the highest mean log-probability wins. LOSSY."""

    def choose(self, session, found):
        return max(found, key=sureness)


@dataclass
class ProcessBestOfN(BestOfN):
    """Best of n by steps: a text that the task's checker finds right throughout wins, then the surer. LOSSY.

    With marks of 0 and 1 the product of the marks of all steps is that. Source: Lightman et al. 2023.
    """

    def choose(self, session, found):
        def merit(draft):
            return self.sound(session, draft.tokens), sureness(draft)
        return max(found, key=merit)

    def step_over(self, session, ids):
        """Whether ids are a whole step of a text."""
        return len(ids) >= self.most() or ids[-1] in session.eos or self.delimited(session, ids)

    def sound(self, session, tokens):
        """Whether each step of the text is right."""
        begin = 0
        for end in range(1, len(tokens) + 1):
            if end == len(tokens) or self.step_over(session, tokens[begin:end]):
                begin = end
                if not step_right(session, Draft(tokens[:end], None)):
                    return False
        return True


@dataclass
class Beam(Majority):
    """The draft alone, by beam search: of all ways to go on, the k likeliest texts stay. LOSSY.

    Of k texts that have ended, the one with the highest mean log-probability wins. Nothing is drawn.
    """

    def propose(self, session):
        expect(session.draft is not None, 'the beam is of the draft model: give --draft DIR')
        begin = len(session.tokens)
        full = session.draft.model.full
        logits = session.draft.read(session.tokens, [], full, 1)                            # [1, V]
        twin = session.draft.fork(self.k)
        texts = [[]]
        sums = [0.0]                        # log-probability of each text so far
        ended = []                          # (mean log-probability, ids) of each text that is over
        while texts and len(ended) < self.k:
            live = []
            for total, row, token in self.likeliest(session, logits, sums):
                text = texts[row] + [token]
                if self.over(session, text):
                    ended.append((total / len(text), text))
                else:
                    live.append((total, row, text))
            texts = [text for _, _, text in live]
            sums = [total for total, _, _ in live]
            logits = self.advance(twin, begin, texts, [row for _, row, _ in live])
        _, winner = max(ended)
        return Draft.points(winner, session.draft.model)

    def likeliest(self, session, logits, sums):
        """The k best (log-probability of the text, its row, next token), best first; logits [rows, V]."""
        sums = torch.tensor(sums, dtype=logits.dtype).to(logits.device, non_blocking=True)
        totals = sums[:, None] + logits.log_softmax(-1)                                     # [rows, V]
        best, places = totals.flatten().topk(min(self.k, totals.numel()))
        vocabulary = totals.shape[1]
        best, places = fetch(best, places)
        finite(best, 'draft', len(session.tokens))
        for total, place in zip(best.tolist(), places.tolist()):
            row, token = divmod(place, vocabulary)
            yield total, row, token

    def advance(self, twin, begin, texts, rows):
        """Logits [texts, V] behind the texts; text i goes on from the cache's row rows[i].

        begin: the position where the texts begin; the cache before it is alike in all rows.
        """
        idle = [0] * (self.k - len(texts))                  # rows that are over idle along
        places = send(rows + idle, twin.model.cos.device)
        for keys, values in twin.cache.stores:
            for store in (keys, values):
                store[:, :, begin:] = store[places][:, :, begin:]
        last = [text[-1] for text in texts]
        ids = send(last + idle, twin.model.cos.device)
        return twin.append(ids, twin.model.full)[:len(texts)]


# -------------------------------------------------------------------------------------- another selector

@dataclass
class PooledStep(SpecGuard):
    """SpecGuard that compares candidates by the mean of the draft's last hidden states, as its paper. LOSSY.

    The row softmax of the cosines has the smallest diagonal where the sum of exp(cosine) is largest. The
    embedding costs a pass of the draft with the candidates as rows: `write_steps` keeps no hidden states.
    """

    def choose(self, session, found):
        means = self.embed(session, [draft.tokens for draft in found])                      # [k, C]
        unit = torch.nn.functional.normalize(means.double(), dim=-1)
        cosines = (unit @ unit.T).round(decimals=9)         # equal candidates are to tie: the first wins
        return found[int(cosines.exp().sum(-1).argmax())]

    def embed(self, session, steps):
        """The mean hidden state [k, C] of each step (a list of ids) behind the text that the cache holds."""
        reader = session.draft
        begin = len(session.tokens)
        longest = max(map(len, steps))
        rows = [ids + [0] * (longest - len(ids)) for ids in steps]          # what is behind a step is unseen
        line = send(rows, reader.model.cos.device)
        twin = reader.fork(len(steps))
        positions = torch.arange(begin, begin + longest, device=line.device)
        start = reader.now()
        hidden = reader.model(line, positions, reader.model.full, twin.cache.stores, begin + longest)
        reader.log.append(('full', line.numel(), start, reader.now()))
        return torch.stack([states[:len(ids)].mean(0) for states, ids in zip(hidden, steps)])


METHODS.update({
    'rsd': RewardGuided, 'specreason': SpecReason, 'random-gate': RandomGate, 'oracle-gate': OracleGate,
    'majority': Majority, 'best-of-n': BestOfN, 'process-best-of-n': ProcessBestOfN, 'beam': Beam,
    'specguard-pooled': PooledStep, 'specguard-tiers': Tiers})
