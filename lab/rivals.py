"""Baselines and controls, written on the methods' own seam and entered in the same METHODS."""
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import torch
import torch.nn.functional as F

import kernels
from verify import METHODS, SELECT, Exact, Score, Sparse, ViaSd, overlap, require


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
        full = session.target.model.full
        paths = [session.view(full.slim(set(skip), f'slim{i + 1}')) for i, skip in enumerate(masks)]
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

def random_scores(q, k, means, block):
    """Control: blocks by lot, the same for texts of equal length."""
    lot = torch.Generator().manual_seed(means.shape[2])
    return torch.rand(means.shape[:3], generator=lot).to(means)


def recent_scores(q, k, means, block):
    """Control: sinks and the latest blocks, whatever was asked. Source: Xiao et al. 2024 (StreamingLLM)."""
    return torch.arange(means.shape[2], device=means.device).expand(means.shape[:3]).to(means)


def oracle_scores(q, k, means, block):
    """Control: the attention mass that the query really gives each block, mean over a group's heads."""
    blocks = k[:, :, :means.shape[2] * block]
    z = q.unflatten(1, (k.shape[1], -1)) @ blocks.mT * q.shape[-1] ** -0.5              # [B, G, H/G, S]
    return z.softmax(-1).mean(2).unflatten(-1, (-1, block)).sum(-1)


def quest_scores(q, k, means, block):
    """Control: the most that keys within a block's extremes could score. Source: Tang et al. 2024 (Quest)."""
    blocks = k[:, :, :means.shape[2] * block].unflatten(2, (-1, block))                 # [B, G, N, block, D]
    root = q.unflatten(1, (k.shape[1], -1)).mean(2)[:, :, None]
    return torch.maximum(root * blocks.amax(3), root * blocks.amin(3)).sum(-1)


def attend_masked(q, k, v, seen):
    """Attention of q [B, H, T, D] over all of k, v [B, G, S, D]; seen [B, G, T, S] is 0 or -inf."""
    each = seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=each, enable_gqa=True)


def attend_chosen(q, k, v, mask, carry, how, pick):
    """The form of sparse_attend for choices that differ in size or by row: all keys, under a mask; eager.

    pick: function from scores [B, G, T, N] and the number of blocks to what is kept, bool of that shape.
    """
    layer, anchor, rule = how
    old = k.shape[2] - q.shape[2]
    whole, count = old // rule.block, max(int(kernels.budget(old, rule)), rule.sinks + rule.locals)
    if count >= whole:
        return kernels.attend(q, k, v, mask, carry)
    if anchor or 'kept' not in carry:
        means = carry['means'][layer][:, :, :whole]
        scores = torch.stack([rule.scores(row, k, means, rule.block) for row in q.unbind(2)], 2)
        blocks = torch.arange(whole, device=q.device)
        always = (blocks < rule.sinks) | (blocks >= whole - rule.locals)
        carry = carry | dict(kept=pick(scores.masked_fill(always, torch.inf), count))
    kept = carry['kept'].repeat_interleave(rule.block, -1)
    kept = F.pad(kept, (0, k.shape[2] - whole * rule.block), value=True)
    return attend_masked(q, k, v, mask.expand(*kept.shape).masked_fill(~kept, -torch.inf)), carry


def best(scores, count):
    """bool like scores: the `count` best of the last axis."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)


def joint(scores, count):
    """One budget over all pairs of head and block, by the root's row: a head may keep more than another."""
    root = scores[:, :, 0]
    return best(root.flatten(1), count * root.shape[1]).view_as(root)[:, :, None].expand_as(scores)


def union(scores, count):
    """What any row of the pass would choose, for all rows: exact for each, and more is read."""
    return best(scores, count).any(2, keepdim=True).expand_as(scores)


SELECT.update(
    random=(kernels.sparse_attend, random_scores), recent=(kernels.sparse_attend, recent_scores),
    oracle=(kernels.sparse_attend, oracle_scores), quest=(kernels.sparse_attend, quest_scores),
    token=(partial(attend_chosen, pick=best), kernels.mean_scores),
    joint=(partial(attend_chosen, pick=joint), kernels.mean_scores),
    union=(partial(attend_chosen, pick=union), kernels.mean_scores))


def literal_swiglu(x, gate, up, down, carry, how):
    """The feed-forward as the paper writes it: |silu(gate) up| below the threshold; only `down` is spared."""
    h = F.silu(gate(x)) * up(x)
    h = h.masked_fill(h.abs() < how[0], 0)
    return down(h), carry | dict(channels=h)


def union_swiglu(x, gate, up, down, carry, how):
    """Every token through all channels that any token of the pass would keep."""
    h = F.silu(gate(x))
    h = h * (h.abs() >= how[0]).flatten(0, -2).any(0)
    return down(h * up(x)), carry | dict(channels=h)


def static_mix(x, moe, carry, how):
    """Every token without its len(how) lowest experts, whatever they weigh."""
    return kernels.sparse_mix(x, moe, carry, (2.0,) * len(how))


@dataclass
class SparseForms(Sparse):
    """Sparse verification with another feed-forward: literal, union or static (see lab/rivals.py). LOSSY."""
    form: str = 'literal'

    def view(self, path, session):
        path = super().view(path, session)
        mine = dict(literal=literal_swiglu, union=union_swiglu), dict(static=static_mix)
        other = {kernels.sparse_swiglu: mine[0].get(self.form), kernels.sparse_mix: mine[1].get(self.form)}
        known = lambda f: isinstance(f, partial) and other[f.func]
        swap = lambda f: partial(known(f), **f.keywords) if known(f) else f
        return replace(path, ffns=tuple(map(swap, path.ffns)))


def watched(path, log):
    """The same path, which appends (sublayer, carry) to the log after every sublayer: what a pass chose."""
    def watch(f, i):
        def run(*args):
            y, carry = f(*args)
            log.append((i, carry))
            return y, carry
        return f and run
    both = lambda fs, odd: tuple(watch(f, 2 * i + odd) for i, f in enumerate(fs))
    return replace(path, attends=both(path.attends, 0), ffns=both(path.ffns, 1))


def ledger(log, model, cached):
    """What a watched pass read, a dict for each layer that ran: keys (cached, per key head), channels (of a
    token, mean), union (of all its tokens), read (by the product); for mixtures experts, distinct.
    """
    c, rows = model.config, {}
    for i, carry in log:
        row, carry = rows.setdefault(i // 2, {}), carry or {}
        if i % 2 == 0:
            row['keys'] = cached
            if 'blocks' in carry:
                block = carry['block']
                row['keys'] = min(cached, carry['blocks'].shape[-1] * block + cached % block)
        elif c.mixtures[i // 2] and 'experts' in carry:
            chosen = carry['experts']
            row.update(experts=float((chosen >= 0).sum(-1).float().mean()),
                       distinct=len(set(chosen.flatten().tolist()) - {-1}))
        elif not c.mixtures[i // 2]:
            F = c.intermediate_size
            read = carry.get('chosen', slice(None))
            active = (carry['channels'][..., read] != 0).flatten(0, -2) if 'channels' in carry else None
            row.update(channels=F if active is None else float(active.sum(-1).float().mean()),
                       union=F if active is None else int(active.any(0).sum()),
                       read=len(read) if 'chosen' in carry else F)
    return list(rows.values())


METHODS.update({'sparse-forms': SparseForms})
