"""Baselines and controls, written on the methods' own seam and entered in the same METHODS."""
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch

from verify import METHODS, Exact, Score, ViaSd, overlap, require


@dataclass
class Lenient(Exact):
    """Speculative decoding that keeps a draft token with min(1, p / (lenience q)); 1 is exact, less is LOSSY.

    The replacement is drawn from the exact residual. Source: Leviathan et al. 2023, appendix A.5.
    """
    lenience: float = 0.5                   # in (0, 1]

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.lenience <= 1, 'lenience', self.lenience, 'above 0, at most 1 (exact)')

    @property
    def lossless(self):
        return self.lenience == 1

    def kept(self, score, i):
        p, q = score.pq[i]
        return min(1.0, p / (self.lenience * q))


@dataclass
class Typical(Exact):
    """Keeps a draft token that the target finds typical: p(x) > min(epsilon, delta exp(-H(p))). LOSSY.

    A rejected token is replaced by a fresh sample of p. With epsilon 1 and delta inf nothing is kept: plain
    decoding. The defaults are those of Medusa's evaluation; its functions' own defaults have the two numbers
    swapped. Source: Cai et al. 2024 (Medusa), section 2.3.1.
    """
    epsilon: float = 0.09                   # hard threshold, a probability
    delta: float = 0.3                      # scales the threshold that falls with entropy

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.epsilon <= 1, 'epsilon', self.epsilon, 'between 0 and 1')
        require(self.delta >= 0, 'delta', self.delta, '0 or more (inf is a value)')

    @property
    def lossless(self):
        return self.epsilon == 1 and self.delta == inf

    def threshold(self, score, i):
        p = score.p[i]
        return min(self.epsilon, self.delta * float(torch.special.entr(p).sum().neg().exp()))

    def kept(self, score, i):
        return float(score.pq[i][0] > self.threshold(score, i))

    def settle(self, score, i):
        return score.p[i]


METHODS.update(lenient=Lenient, typical=Typical)


# --------------------------------------------------------------- beside CM-ASD: controllers, acceptance rules


# --------------------------------------------------------------------------- beside ECSV: votes and branches


# --------------------------------------------------------------------- beside VIA-SD: cascades, tiers, self

class Blended(Score):
    """A Score of the law pi that a deferral rule makes of q and p; its last row, past the draft, is p."""

    def __init__(self, session, draft, path, defer):
        """defer: function (q, p of the raw logits [n, V], warped q, p [n, V]) -> pi [n, V]."""
        super().__init__(session, draft, path)
        self.defer = defer

    @cached_property
    def p(self):
        p, d = self.session.probs(self.logits), self.draft
        raw = d.q if d.logits is None else d.logits.to(p.dtype).softmax(-1)
        pi = self.defer(raw.to(p.dtype), self.logits[:-1].to(p.dtype).softmax(-1), d.q.to(p.dtype), p[:-1])
        return torch.cat([pi, p[-1:]])


@dataclass
class Cascade(Exact):
    """Speculative cascade by Chow's rule: where the draft is sure (max q >= 1 - lam), its own law. LOSSY.

    Exact speculative decoding towards pi: all rules cost the passes of sd and only accept more. Confidence is
    that of the raw logits. Source: Narasimhan et al. 2024 (Faster Cascades), SpecCascade [Chow].
    """
    lam: float = 0.3                        # in 0..1: how much doubt is forgiven

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.lam <= 1, 'lam', self.lam, 'between 0 and 1')

    @property
    def lossless(self):
        return False

    def score(self, session, draft):
        return Blended(session, draft, self.path(session), self.defer)

    def defer(self, q, p, own, target):
        return torch.where(q.amax(-1, keepdim=True) >= 1 - self.lam, own, target)


@dataclass
class CascadeOpt(Cascade):
    """Speculative cascade by the optimal rule: the draft's law where max q >= max p - lam TV(p, q). LOSSY.

    Source: Narasimhan et al. 2024, SpecCascade [OPT].
    """
    def defer(self, q, p, own, target):
        top = lambda x: x.amax(-1, keepdim=True)
        return torch.where(top(q) >= top(p) - self.lam * (1 - overlap(p, q)[:, None]), own, target)


@dataclass
class CascadeTokenV3(Cascade):
    """Speculative cascade by token: q on A = {v: p(v) >= (1 - lam) max p}, what q has elsewhere by p. LOSSY.

    At temperature 0 this is lenient verification: a draft token stays from that ratio on.
    Source: Narasimhan et al. 2024, SpecCascade [Token], third rule.
    """
    def defer(self, q, p, own, target):
        inside = own * (p >= (1 - self.lam) * p.amax(-1, keepdim=True))
        return inside + (1 - inside.sum(-1, keepdim=True)) * target


@dataclass
class Tiered(ViaSd):
    """VIA-SD with 2 to 5 stages: draft, up to three slim paths of nested masks, target. LOSSY above 2.

    Each slim path runs more layers than the one before; 2 stages are exact speculative decoding.
    """
    tiers: int = 4
    middle = 'target/slim1'

    def __post_init__(self):
        super().__post_init__()
        require(self.tiers in range(2, 6), 'tiers', self.tiers, '2 to 5')

    @property
    def lossless(self):
        return self.tiers == 2 and self.gate != 'two_level_exact' or super().lossless

    def stages(self, session, draft, score):
        masks = session.calibration['mask']['nested'][:self.tiers - 2]
        paths = [session.target.model.full.slim(set(skip), f'slim{i + 1}') for i, skip in enumerate(masks)]
        first = super().stages(session, draft, score)
        return [Score(session, draft, path) for path in paths] + first[1:]


@dataclass
class ViaMid(ViaSd):
    """VIA-SD with an independent model in the middle (--mid DIR): other weights, a cache of its own. LOSSY.

    The control for the slim path, and with a bigger drafter the upscaled one.
    """
    needs, middle = (), 'mid/full'

    def slim(self, session, draft):
        if session.mid is None:
            raise ValueError('the method needs a model in the middle: give --mid DIR')
        return Score(session, draft, session.mid.model.full, session.mid)


METHODS.update({'cascade': Cascade, 'cascade-opt': CascadeOpt, 'cascade-tokenv3': CascadeTokenV3,
                'via-tiers': Tiered, 'via-mid': ViaMid})


# ------------------------------------------------------------------- beside SpecGuard: gates, rewards, votes


# --------------------------------------------------------------- beside sparse verification: other selections
