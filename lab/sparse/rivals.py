"""Beside sparse verification: the latest keys as a control, and a cache of kept keys, which is ours.

`--method sparse --set select=recent` reads the latest blocks. `kept` verifies over keys that are chosen now
and then; `kept-draft` is exact `sd` that drafts with the target itself over such keys.
"""
from dataclasses import dataclass, replace
from functools import partial

import torch

import kernels
from verify import METHODS, SELECT, Exact, Sparse, chain_on, in_range


def recent_scores(q, k, means, block):
    """Control: sinks and the latest blocks, whatever the query. Source: Xiao et al. 2024 (StreamingLLM).

    means [B, G, N, D]: mean keys of N blocks -> scores [B, G, N].
    """
    later_is_better = torch.arange(means.shape[2], device=means.device)
    return later_is_better.expand(means.shape[:3]).to(means)


SELECT['recent'] = kernels.sparse_attend, recent_scores


class KeptKeys:
    """The keys and values that a pass chose of a cache, side by side, and room behind them for later ones.

    From position `base` on all are read. Those are copied from the cache in every pass, since they may have
    been written anew, by whoever is trusted. Keys stay turned by their own positions.
    """

    def __init__(self, session, path):
        """path: the one that is thinned out, of session.target."""
        self.session = session
        self.path = path
        self.ids = session.tokens
        self.cycle = session.cycles
        self.room = session.target.capacity
        self.base = 0
        self.stores = {}                # layer: [keys, values], each [B, G, kept + room behind the base, D]

    def serves(self, session, path, every):
        """Whether a pass may read them: a whole pass over this text chose them, under `every` cycles ago."""
        same = session is self.session and path is self.path
        age = session.cycles - self.cycle
        layers = sum(attend is not None for attend in path.attends)
        whole = len(self.stores) == layers              # an interrupted pass has chosen in some of them
        unchanged = session.tokens[:self.base] == self.ids[:self.base]
        return same and 0 <= age < every and whole and unchanged

    def attend(self, q, k, v, mask, carry, how):
        """kernels.sparse_attend over what was kept; the first pass chooses it."""
        layer, _, rule = how
        if layer not in self.stores:
            carry = self.choose(q, k, carry, how)
            self.stores[layer] = [self.gather(cached, carry['blocks'], rule.block) for cached in (k, v)]
        keys, values = self.stores[layer]
        behind = k.shape[2] - self.base                 # the partial block, what came since, the pass's own
        kept = keys.shape[2] - (self.room - self.base)
        S = kept + behind
        keys[:, :, kept:S] = k[:, :, self.base:]
        values[:, :, kept:S] = v[:, :, self.base:]
        if mask is not None:
            mask = mask[:, -S:]                         # only of the pass's own keys are some hidden
        out, _ = kernels.attend(q, keys[:, :, :S], values[:, :, :S], mask, carry)
        return out, carry

    def choose(self, q, k, carry, how):
        """The carry with the blocks [B, G, count] that this layer keeps, ascending; all if they are few."""
        layer, anchor, rule = how
        cached = k.shape[2] - q.shape[2]
        whole = cached // rule.block
        self.base = whole * rule.block
        if not anchor and 'blocks' in carry:
            return carry
        count = min(whole, int(kernels.kept_blocks(cached, rule)))
        query = kernels.choosing_query(q, carry['real'], rule.query_from)
        scores = rule.scores(query, k, carry['means'][layer][:, :, :whole], rule.block)
        blocks = kernels.choose(scores, carry['start'], count, rule)
        return carry | dict(blocks=blocks.sort().values, block=rule.block)

    def gather(self, cached, blocks, block):
        """These blocks [B, G, count] of cached keys or values [B, G, S, D], and room behind them."""
        B, G, _, D = cached.shape
        rows = torch.arange(B, device=cached.device)[:, None, None]
        heads = torch.arange(G, device=cached.device)[:, None]
        whole = cached[:, :, :self.base].unflatten(2, (self.base // block, block))
        kept = whole[rows, heads, blocks].flatten(2, 3)                     # [B, G, count block, D]
        room = cached.new_empty(B, G, self.room - self.base, D)
        return torch.cat([kept, room], 2)


@dataclass
class Kept(Sparse):
    """Sparse verification that chooses and copies keys once in some cycles, for dense attention. LOSSY.

    What a later token would look up elsewhere it does not find until the next choice. Ours.
    """
    every: int = in_range(4, 1)         # cycles from one choice to the next
    keys = None                         # the KeptKeys of the text, or None

    def anchor_layers(self, measured, layers):
        """By default all layers choose: they seldom do."""
        return list(range(layers)) if self.anchors is None else super().anchor_layers(measured, layers)

    def view(self, path, session):
        thin = super().view(path, session)
        if not thin.block:                              # attention is dense
            return thin
        fresh = self.keys is None or not self.keys.serves(session, path, self.every)
        if fresh:
            self.keys = KeptKeys(session, path)
        attends = []
        for attend in thin.attends:
            how = attend and attend.keywords['how']
            attends.append(attend and partial(self.keys.attend, how=how))
        # compiled passes have all of a cache in view: a path with a carry of its own is never compiled
        return replace(thin, attends=tuple(attends), informed=fresh, carry={})


@dataclass
class KeptDraft(Kept):
    """Exact speculative decoding whose draft is the target itself over kept keys: no second model.

    Keys are chosen from what dense passes wrote, and what is drafted is written anew by the verifying one.
    After Draft & Verify (Zhang et al. 2023), which skips layers; as in TriForce (Sun et al. 2024), keys go.
    """
    rho: float = 0.1

    @property
    def lossless(self):
        return self.control.causal

    def path(self, session):
        return Exact.path(self, session)

    def guess(self, session, n):
        path = self.view(session.target.model.full, session)
        path = replace(path, name='choosing' if path.informed else 'kept')
        return chain_on(session, self.plan(session, n), session.target, path)


METHODS.update({'kept': Kept, 'kept-draft': KeptDraft})
