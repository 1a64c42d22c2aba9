"""What VIA-SD is compared with: speculative cascades, another model in the middle, other layers to skip.

p is the target's distribution, q the draft's, s the slim verifier's. V vocabulary, n draft tokens of a block.
"""
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from lab.toys import overlap
from model import knob, require_that
from verify import METHODS, Exact, Score, ViaSd


@dataclass
class Blended(Score):
    """A Score whose p is the distribution that a deferral rule makes of q and p; its last row stays p.

    defer: function (q, p of the raw logits, q, p that are sampled from; all [n, V]) -> [n, V].
    """
    defer: Callable = None

    @cached_property
    def p(self):
        p = self.session.probs(self.logits)                                             # [n + 1, V]
        own = self.block.q.to(p.dtype)
        raw_q = own                                     # looked up: the draft has nothing but its q
        if self.block.logits is not None:
            raw_q = self.block.logits.to(p.dtype).softmax(-1)
        raw_p = self.logits[:-1].to(p.dtype).softmax(-1)
        return torch.cat([self.defer(raw_q, raw_p, own, p[:-1]), p[-1:]])


@dataclass
class Cascade(Exact):
    """Speculative cascade by Chow's rule: q itself where the draft is sure (max q >= 1 - lam). LOSSY.

    All cascades decode exactly towards a blend of q and p: they cost the passes of sd and accept more tokens.
    Source: Narasimhan et al. 2024 (Faster Cascades), SpecCascade [Chow].
    """
    lam: float = knob(0.3, 'how much doubt is forgiven', 0, 1)

    def score(self, session, draft):
        return Blended(session, draft, session.target_path(), defer=self.defer)

    def defer(self, q, p, own, target):
        """The blend [n, V]; q, p: of the raw logits, which decide; own, target: what is sampled from."""
        certain = q.amax(-1, keepdim=True) >= 1 - self.lam
        return torch.where(certain, own, target)


@dataclass
class CascadeOpt(Cascade):
    """Speculative cascade by the optimal rule: q itself where max q >= max p - lam TV(p, q). LOSSY.

    Source: Narasimhan et al. 2024, SpecCascade [OPT].
    """
    def defer(self, q, p, own, target):
        variation = 1 - overlap(p, q)[:, None]                                          # [n, 1]
        needed = p.amax(-1, keepdim=True) - self.lam * variation
        return torch.where(q.amax(-1, keepdim=True) >= needed, own, target)


@dataclass
class CascadeTokenV3(Cascade):
    """Speculative cascade by token: q on A = {v: p(v) >= (1 - lam) max p}, what q has elsewhere by p. LOSSY.

    At temperature 0 this is lenient sd: a draft token stays from that ratio on.
    Source: Narasimhan et al. 2024, SpecCascade [Token], third rule.
    """
    def defer(self, q, p, own, target):
        accepted = p >= (1 - self.lam) * p.amax(-1, keepdim=True)
        inside = own * accepted
        outside = 1 - inside.sum(-1, keepdim=True)
        return inside + outside * target


@dataclass
class ViaMid(ViaSd):
    """VIA-SD with a model of its own in the middle: other weights, another cache. LOSSY.

    With a bigger draft model it is the paper's upscaled drafter. It needs a `session.mid`, the model's
    Reader, so it is no method of the program: lab/via/record.py and the tests alone run it.
    """
    def slim_score(self, session, draft):
        middle = copy.copy(session)
        middle.target = session.mid
        return Score(middle, draft, session.mid.model.full, lambda s, q: s)


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


def sublayers(layers):
    """The sublayers of these layers: 2i is the attention of layer i, 2i + 1 its feed-forward."""
    return tuple(unit for i in layers for unit in (2 * i, 2 * i + 1))


METHODS.update({'cascade': Cascade, 'cascade-opt': CascadeOpt, 'cascade-tokenv3': CascadeTokenV3,
                'via-layers': ViaLayers})
