"""Baselines and ablations of every method, entered in METHODS: `--import lab/baselines.py` loads them."""
import copy
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from lab import read_bytes
from model import Reader, knob, require_that
from specmini import ready
from verify import (METHODS, Draft, Ecsv, Exact, Judged, Score, Sparse, SpecGuard, ViaSd, decode, draft_model,
                    need_draft_model)


@dataclass
class Ratio(Exact):
    """Keeps a draft token from p(x) / max p = tau on: CM-ASD's rule with one tau, for any proposer. LOSSY."""
    tau: float = knob(0.5, 'ratio from which a draft token stays', 0, 1)

    def chance(self, score, i):
        return float(score.table[i].ratio >= self.tau)


def slim_draft(session, n, method):
    """A Draft of at most n tokens by slim, the target without some layers."""
    return draft_model(session, n, method, session.target, session.target_path(session.slim_path))


@dataclass
class DraftVerify(Exact):
    """Drafts by slim, the target without some layers, which the target verifies exactly.

    Source: Zhang et al. 2023 (Draft & Verify).
    """
    lossless = True

    def guess(self, session, n):
        return slim_draft(session, n, self)


@dataclass
class Block(Exact):
    """Block verification: how many guesses stay is decided for the block as a whole. Exact.

    At any temperature above 0 as many guesses stay as by `sd`, or more.
    Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
    """
    lossless = True

    def accept(self, session, draft, score):
        rows, n = score.table, len(draft.tokens)
        may_stay = [1.0]                                # the chance that the first 0, 1, ... guesses may stay
        for row in rows:
            row.chance = min(1.0, may_stay[-1] * row.p / row.q)
            may_stay.append(row.chance)
        kept = n
        while kept and not session.flip(self.chance_to_end(score, kept, may_stay[kept])):
            kept -= 1
        for i, row in enumerate(rows):
            row.kept = i < kept
        tokens, labels, judged = draft.tokens[:kept], ['draft'] * kept, rows[:kept + 1]
        if kept and tokens[-1] in session.eos:
            return tokens, labels, judged
        if kept == n:
            return tokens + [score.next_token(n)], labels + ['bonus' if n else 'target'], judged
        rest = self.unmet(score, kept, may_stay[kept])
        return tokens + [int(session.draw(rest / rest.sum()))], labels + ['target'], judged

    def chance_to_end(self, score, i, may_stay):
        """The chance that exactly the first i guesses stay, given that no more of them do."""
        if i == len(score.table):
            return may_stay
        unmet = float(self.unmet(score, i, may_stay).sum())
        return unmet / (unmet + (1 - may_stay)) if unmet else 0.0

    def unmet(self, score, i, may_stay):
        """What the target has left at position i [V], once the guesses before it stay with this chance."""
        return (may_stay * score.p[i] - score.block.q[i].to(score.p)).clamp(min=0)


@dataclass
class CascadeDrafting(Exact):
    """Drafts by slim, which writes its tokens by speculative decoding with the draft model. Exact.

    Source: Chen et al. 2024 (arXiv 2312.11462), the vertical cascade.
    """
    inner: int = knob(4, 'draft tokens of a block that slim judges', 1)
    lossless = True

    def guess(self, session, n):
        need_draft_model(session, "cascade-drafting's inner blocks")
        inner = copy.copy(session)
        inner.tokens_left = n
        tokens, p, logits = [], [], []
        for cycle in decode(inner, BySlim(self.inner, self.draft_temperature)):
            tokens += cycle.tokens
            p.append(cycle.score.p[:len(cycle.tokens)])
            logits.append(cycle.score.logits[:len(cycle.tokens)])
        return Draft(tokens, torch.cat(p), torch.cat(logits))


class BySlim(Exact):
    """Exact decoding of what slim would write."""
    lossless = False

    def score(self, session, draft):
        return Score(session, draft, session.target_path(session.slim_path))


# ------------------------------------------------------------------------------ other ends of a block
# Each ends the blocks of another method, too, as RatioPayoff shows.

@dataclass
class Confident(Exact):
    """Exact decoding in which a block ends after a token that the draft gives less than `limit`.

    Source: Hugging Face transformers, ConfidenceCriteria with the default settings.
    """
    gamma: int = knob(20, 'tokens of the longest block', 0)
    limit = 0.4

    def signals(self, token, logits):
        return super().signals(token, logits) | dict(own=float(logits.softmax(-1)[:, token]))

    def keep_drafting(self, session, signals):
        return signals[-1]['own'] >= self.limit


@dataclass
class Product(Exact):
    """Exact decoding that drafts on while the product of the draft's largest probabilities is above `limit`.

    One doubt is enough to end a block, which a mean would hide. Ours.
    """
    gamma: int = knob(40, 'tokens of the longest block', 0)
    limit = 0.5

    def signals(self, token, logits):
        return super().signals(token, logits) | dict(largest=float(logits.softmax(-1).amax(-1)))

    def keep_drafting(self, session, signals):
        return math.prod(noted['largest'] for noted in signals) > self.limit


@dataclass
class Payoff(Product):
    """Exact decoding that drafts on while another token should bring more tokens a second than the text has.

    The chance that a token is kept is learned by its largest probability m, in ten bins; each begins as if
    WORTH tokens had been kept with chance m. Time is counted in target passes, never by a clock. Ours.
    """
    cost: float = knob(None, 'of a draft pass, in target passes; None: by the bytes of their weights', 0)
    WORTH = 2

    def __post_init__(self):
        super().__post_init__()
        self.judged, self.kept = [0] * 10, [0] * 10     # draft tokens of each bin, those that were kept
        self.tokens = self.cycles = self.drafted = 0    # committed; passes of the target, of the draft

    def chance_kept(self, largest):
        """The chance that a token is kept, given that all before it are."""
        i = bin_of(largest)
        return (self.kept[i] + self.WORTH * largest) / (self.judged[i] + self.WORTH)

    def keep_drafting(self, session, signals):
        if self.cost is None:
            self.cost = draft_cost(session)
        all_kept = expected = 1.0           # the chance that all of the block is kept; tokens of the cycle
        for noted in signals:
            all_kept *= self.chance_kept(noted['largest'])
            expected += all_kept
        time = self.cycles + 1 + self.cost * (self.drafted + len(signals))
        rate = (self.tokens + expected) / time          # with this block as expected
        another = (sum(self.kept) + 1) / (sum(self.judged) + 1)     # its probability is unknown
        return all_kept * another > rate * self.cost

    def learn(self, cycle):
        super().learn(cycle)
        self.tokens += len(cycle.tokens)
        self.cycles += 1
        self.drafted += len(cycle.drafted)
        for row in cycle.judged:
            if 'largest' in row.signals:                # a token that was looked up teaches nothing
                i = bin_of(row.signals['largest'])
                self.judged[i] += 1
                self.kept[i] += row.kept


@dataclass
class RatioPayoff(Payoff, Ratio):
    """`ratio` whose blocks end as those of `payoff`. LOSSY."""


def bin_of(largest):
    """The bin, 0 to 9, of a largest probability."""
    return min(9, int(10 * largest))


def draft_cost(session):
    """The weight bytes of a draft pass over those of a target pass; without a draft model slim drafts."""
    target = session.target.model
    drafter = session.drafter and session.drafter.model
    read = read_bytes(drafter, drafter.full) if drafter else read_bytes(target, session.slim_path)
    return read / read_bytes(target, target.full)


# ----------------------------------------------------------------------------------------------------- ECSV

@dataclass
class OracleTop1(Ecsv):
    """Oracle-Top1: the target reads every branch, and the one expected to be kept longest is proposed.

    An upper bound for any choice between the branches; all its target passes are counted.
    """
    lossless = True

    def guess(self, session, n):
        best, most = None, -1.0                     # tokens that are expected to be kept
        branches = self.draft_branches(session, n)
        for tokens, logits in zip(branches.lines(session), branches.logits):
            draft = replace(Draft.points(tokens, session.target.model), logits=logits[:len(tokens)])
            score = super().score(session, draft)
            expected = float(torch.tensor([row.p for row in score.table]).double().cumprod(0).sum())
            if expected > most:
                best, most = draft, expected
                self.best_score = score
            if self.is_enough(score):
                break
        return best

    def is_enough(self, score):
        """Whether the target reads no further branch."""
        return False

    def score(self, session, draft):
        """Where branches were drafted, that of the pass which has read the proposed one."""
        return self.best_score if draft.tokens else super().score(session, draft)


@dataclass
class SdMulti(OracleTop1):
    """SD-multi: the target reads one branch after another, until one is its own first choice throughout.

    If none is, the one expected to be kept longest is proposed. The chosen branch is verified as a point
    mass. The proposal says no more than "accept-first-that-passes (no fusion)".
    """
    branches: int = knob(2, 'branches that the target reads at most', 1, 64)

    def is_enough(self, score):
        tokens = score.block.tokens
        return score.logits[:len(tokens)].argmax(-1).tolist() == tokens


# --------------------------------------------------------------------------------------------------- VIA-SD

@dataclass
class Blended(Score):
    """A Score whose p is q itself where the draft is sure by its raw logits; its last row stays p."""
    lam: float = 0.0

    @cached_property
    def p(self):
        p = self.session.probs(self.logits)                                             # [n + 1, V]
        q = raw = self.block.q.to(p.dtype)              # [n, V]; looked up: there are no logits
        if self.block.logits is not None:
            raw = self.block.logits.to(p.dtype).softmax(-1)
        certain = raw.amax(-1, keepdim=True) >= 1 - self.lam
        return torch.cat([torch.where(certain, q, p[:-1]), p[-1:]])


@dataclass
class Cascade(Exact):
    """Speculative cascade by Chow's rule: q itself where the draft is sure (max q >= 1 - lam). LOSSY.

    Source: Narasimhan et al. 2024 (Faster Cascades), SpecCascade [Chow].
    """
    lam: float = knob(0.3, 'how much doubt is forgiven', 0, 1)

    def score(self, session, draft):
        return Blended(session, draft, session.target_path(), lam=self.lam)


@dataclass
class ViaLayers(ViaSd):
    """VIA-SD whose slim skips other layers than the mask found: the control for the search. LOSSY."""
    layers: str = knob('', "that slim skips, as '3 4 5'; none: the calibrated mask")

    def __post_init__(self):
        super().__post_init__()
        require_that(not self.layers.strip(' 0123456789'), f'layers is {self.layers!r}; expected numbers')

    def slim_score(self, session, draft):
        if not self.layers:
            return super().slim_score(session, draft)
        skip = sublayers(map(int, self.layers.split()))
        path = session.target_path(session.target.model.full.without(skip))
        return Score(session, draft, path, lambda s, q: s)


@dataclass
class ViaModel(ViaSd):
    """VIA-SD whose middle judge is a model of its own, as the paper's independent verifier. LOSSY."""
    judge: str = knob('', 'its folder, the vocabulary the same; none: slim')

    def slim_score(self, session, draft):
        if not self.judge:
            return super().slim_score(session, draft)
        reader = judge_reader(self.judge, session.target.model.device.type)
        require_that(reader.model.vocab == session.target.model.vocab, f'{self.judge} has another vocabulary')
        reader.log = session.target.log                 # so that its passes are counted, as `target/judge`
        path = replace(reader.model.full, name='judge')
        return Score(replace(session, target=reader), draft, path, lambda s, q: s)


@cache
def judge_reader(folder, device):
    """The Reader of a judge for all texts: its cache knows itself what a text may build on."""
    model, _, _ = ready(folder, device, 'auto')
    return Reader(model, model.config.max_position_embeddings)


def sublayers(layers):
    """The sublayers of these layers: 2i is the attention of layer i, 2i + 1 its feed-forward."""
    return tuple(unit for i in layers for unit in (2 * i, 2 * i + 1))


# ------------------------------------------------------------------------------------ SpecGuard, and sparse

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
    """RSD: a reward model judges steps, here a task's checker, at the cost of a draft pass. LOSSY.

    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = knob(1, 'candidates of the draft', 1, 256)
    tau: float = knob(0.7, 'reward that a step needs')

    def reward(self, session, draft):
        reader = session.drafter
        path = replace(reader.model.full, name='reward')
        reader.read(session.tokens + draft.tokens, path, len(draft.tokens))
        checker = session.calibration.get('checker')    # from ids to whether their last step is right
        require_that(checker, 'rsd needs a task with a step checker, as python -m lab.measure specguard has')
        return float(checker(session.tokens + draft.tokens))


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin: what a gate of this rate is worth without any signal. LOSSY."""
    rate: float = knob(0.5, 'chance that a step stays', 0, 1)

    def reward(self, session, draft):
        return float(session.flip(self.rate))


@dataclass
class SparseRecent(Sparse):
    """Sparse verification of sinks and the latest blocks, a control. LOSSY.

    Source: Xiao et al. 2024 (StreamingLLM).
    """
    @staticmethod
    def scores(query, k, means):
        """Scores [B, G, N] of N blocks, later ones higher; means [B, G, N, D]: their mean keys."""
        return torch.arange(means.shape[2], device=means.device).expand(means.shape[:3]).to(means)


@dataclass
class SparseRandom(Sparse):
    """Sparse verification of blocks that are as good as drawn by lot, a control. LOSSY."""
    @staticmethod
    def scores(query, k, means):
        """Scores [B, G, N] of N blocks: the sine of large numbers, which tells nothing of what is sought.

        They are of the mean keys [B, G, N, D] and the query, so layers, heads and passes choose differently
        and a run can be repeated.
        """
        return (1e3 * (means.sum(-1) + query.sum((1, 2))[:, None, None])).sin()


METHODS.update({
    'ratio': Ratio, 'draft-verify': DraftVerify, 'block': Block,
    'cascade-drafting': CascadeDrafting, 'hf-confidence': Confident, 'product': Product, 'payoff': Payoff,
    'ratio-payoff': RatioPayoff, 'oracle-top1': OracleTop1, 'sd-multi': SdMulti, 'cascade': Cascade,
    'via-layers': ViaLayers, 'via-model': ViaModel, 'rsd': RewardGuided,
    'random-gate': RandomGate, 'sparse-recent': SparseRecent, 'sparse-random': SparseRandom})
