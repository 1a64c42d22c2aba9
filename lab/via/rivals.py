"""What VIA-SD is compared with: cascades, more stages, other models in the middle, other gates; its formulas.

p is the target's distribution, q the draft's, s the slim verifier's. V vocabulary, n draft tokens of a block.
"""
from dataclasses import dataclass
from functools import cached_property

import torch

from model import expect
from verify import METHODS, Draft, Exact, Score, ViaSd, in_range, overlap, require, residual, violation


# -------------------------------------------------------------------------------------- speculative cascades

class Blended(Score):
    """A Score of the law pi that a deferral rule makes of q and p; its last row, past the draft, is p."""

    def __init__(self, session, draft, path, defer):
        """defer: function (q, p of the raw logits, q, p that are sampled from; all [n, V]) -> pi [n, V]."""
        super().__init__(session, draft, path)
        self.defer = defer

    @cached_property
    def p(self):
        p = self.session.probs(self.logits)                                             # [n + 1, V]
        draft = self.draft
        if draft.logits is None:                        # looked up: the draft has nothing but its q
            raw_q = draft.q.to(p.dtype)
        else:
            raw_q = draft.logits.to(p.dtype).softmax(-1)
        raw_p = self.logits[:-1].to(p.dtype).softmax(-1)
        pi = self.defer(raw_q, raw_p, draft.q.to(p.dtype), p[:-1])
        return torch.cat([pi, p[-1:]])


@dataclass
class Cascade(Exact):
    """Speculative cascade by Chow's rule: where the draft is sure (max q >= 1 - lam), its own law. LOSSY.

    Exact speculative decoding towards pi: all rules cost the passes of sd and only accept more. Confidence is
    that of the raw logits. Source: Narasimhan et al. 2024 (Faster Cascades), SpecCascade [Chow].
    """
    lam: float = in_range(0.3, 0, 1)            # how much doubt is forgiven

    @property
    def lossless(self):
        return False

    def score(self, session, draft):
        return Blended(session, draft, self.path(session), self.defer)

    def defer(self, q, p, own, target):
        """pi [n, V]; q, p: of the raw logits, which decide; own, target: what is sampled from."""
        certain = q.amax(-1, keepdim=True) >= 1 - self.lam
        return torch.where(certain, own, target)


@dataclass
class CascadeOpt(Cascade):
    """Speculative cascade by the optimal rule: the draft's law where max q >= max p - lam TV(p, q). LOSSY.

    Source: Narasimhan et al. 2024, SpecCascade [OPT].
    """
    def defer(self, q, p, own, target):
        variation = 1 - overlap(p, q)[:, None]                                          # [n, 1]
        needed = p.amax(-1, keepdim=True) - self.lam * variation
        return torch.where(q.amax(-1, keepdim=True) >= needed, own, target)


@dataclass
class CascadeTokenV3(Cascade):
    """Speculative cascade by token: q on A = {v: p(v) >= (1 - lam) max p}, what q has elsewhere by p. LOSSY.

    At temperature 0 this is lenient verification: a draft token stays from that ratio on.
    Source: Narasimhan et al. 2024, SpecCascade [Token], third rule.
    """
    def defer(self, q, p, own, target):
        accepted = p >= (1 - self.lam) * p.amax(-1, keepdim=True)
        inside = own * accepted
        outside = 1 - inside.sum(-1, keepdim=True)
        return inside + outside * target


# ------------------------------------------------------------------------------------ other stages than slim

@dataclass
class Tiered(ViaSd):
    """VIA-SD with 2 to 5 stages: draft, up to three slim paths of nested masks, target. LOSSY above 2.

    Each slim path runs more layers than the one before; 2 stages are exact speculative decoding.
    """
    tiers: int = in_range(4, 2, 5)

    @property
    def lossless(self):
        if self.tiers == 2:
            return self.control.causal
        return super().lossless

    def stages(self, session, draft, score):
        nested = session.calibration['mask'].get('nested', [])
        most = len(nested) + 2
        require(self.tiers <= most, 'tiers', self.tiers, f'at most {most}: calibration.json has '
                f'{len(nested)} nested masks; train_mask.py seeks three where a mask skips 4 units or more')
        scores = []
        for i, skip in enumerate(nested[:self.tiers - 2], 1):
            path = session.target.model.full.without(skip, f'slim{i}')
            scores.append(Score(session, draft, session.view(path), replacement=self.slim_replacement))
        return scores + [score]


@dataclass
class ViaMid(ViaSd):
    """VIA-SD with a model of its own in the middle (--mid DIR): other weights, another cache. LOSSY.

    The control for the slim path, and with a bigger drafter the upscaled one.
    """

    def sections(self, config):
        return set()

    def slim_score(self, session, draft):
        expect(session.mid, 'the method needs a model in the middle: give --mid DIR')
        return Score(session, draft, session.mid.model.full, session.mid, self.slim_replacement)


# ------------------------------------------------------------------------------------ other gates (ablations)

@dataclass
class ViaTwoLevel(ViaSd):
    """VIA-SD without its saving: slim verifies the draft exactly, the target what slim made of it. Exact.

    Every cycle makes a full pass. What the target judges is slim's block, and so are `drafted` and `judged`.
    """

    @property
    def lossless(self):
        return self.control.causal

    def propose(self, session):
        """What slim, as an exact verifier, made of the draft: a sample of s, with s as its distribution."""
        draft = super().propose(session)
        verifier = self.slim_score(session, draft)
        tokens, labels, _ = Exact.accept(self, session, draft, verifier)
        labels = [label if label == 'draft' else 'slim' for label in labels]
        return Draft(tokens, verifier.p[:len(tokens)], labels=labels)

    def slim_replacement(self, s, q):
        return residual(s, q)

    def accept(self, session, draft, score):
        return Exact.accept(self, session, draft, score)


@dataclass
class ViaLossySd(ViaSd):
    """VIA-SD whose slim verifies as lossy speculative decoding does, with min(1, s / (keep q)). LOSSY.

    A token that slim rejects is replaced by norm(max(s / beta - q, 0)); keep is 1 - alpha. Below `escalate`
    the target decides as ever. Source: Narasimhan et al. 2024 (Faster Cascades), lossy speculative decoding.
    """
    beta: float = in_range(1.0, 1e-6)                   # below 1 the residual is nearer to s itself

    def __post_init__(self):
        Exact.__post_init__(self)                       # keep, the lenience, may be below escalate
        require(1e-6 <= self.keep <= 1, 'keep', self.keep, '1e-06 to 1')
        require(self.beta >= self.keep, 'beta', self.beta, f'keep, {self.keep}, to inf')

    def slim_chance(self, score, i):
        s, q = score.pq[i]
        return min(1.0, s / (self.keep * q))

    def slim_replacement(self, s, q):
        rest = residual(s / self.beta, q)
        return rest / rest.sum(-1, keepdim=True)        # where nothing is left over it is s / beta


@dataclass
class ViaOneMinusAlpha(ViaSd):
    """VIA-SD with its gate as published: both thresholds are 1 - alpha, of escalate and of keep. LOSSY.

    At the published 0.5 and 0.3 no ratio is left for slim to rewrite: a token is kept or escalated.
    Source: VIA-SD (2026), algorithm 1, as its public reimplementations read it.
    """

    def __post_init__(self):
        Exact.__post_init__(self)                       # keep may be below escalate: they are alphas here
        require(self.keep >= 0, 'keep', self.keep, '0 to inf')

    @property
    def bounds(self):
        return 1 - self.escalate, 1 - self.keep


# ----------------------------------------------------------------------------------------------- the formulas

def stage_gain(q, s, p, alpha=0.5, beta=0.5):
    """Delta [...] in nats, R(p|q) - R(s|q) - R(p|s): above 0, the way from q to p by s is the shorter one.

    q, s, p: log-probabilities [..., V]. It knows nothing of what a pass costs.
    Source: VIA-SD (2026), Delta_KL^{alpha,beta}.
    """
    direct = violation(p, q, alpha, beta)
    to_stage = violation(s, q, alpha, beta)
    from_stage = violation(p, s, alpha, beta)
    return direct - to_stage - from_stage


def blended_law(q, s, p, early, late):
    """The law [..., V] of text whose share early went from q to s and late on to p. Source: VIA-SD (2026)."""
    drafted = (1 - early) * q + early * s
    return (1 - late) * drafted + late * p


METHODS.update({'cascade': Cascade, 'cascade-opt': CascadeOpt, 'cascade-tokenv3': CascadeTokenV3,
                'via-tiers': Tiered, 'via-mid': ViaMid, 'via-two-level': ViaTwoLevel,
                'via-lossy-sd': ViaLossySd, 'via-one-minus-alpha': ViaOneMinusAlpha})
