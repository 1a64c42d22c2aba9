"""Beside sparse verification: other choices of blocks, and a cache of kept keys, which is ours.

`sparse-recent` reads the latest blocks, `sparse-quest` those of the highest bounds. `kept-draft` is exact
`sd` that drafts with the target itself over keys that are chosen now and then.
"""
from dataclasses import dataclass, replace
from functools import partial

import torch

import kernels
from verify import METHODS, Exact, Sparse, draft_model, knob


def recent_scores(query, k, means):
    """Control: sinks and the latest blocks, whatever the query. Source: Xiao et al. 2024 (StreamingLLM).

    means [B, G, N, D]: mean keys of N blocks -> scores [B, G, N].
    """
    later_is_better = torch.arange(means.shape[2], device=means.device)
    return later_is_better.expand(means.shape[:3]).to(means)


@dataclass
class SparseRecent(Sparse):
    """Sparse verification that reads the latest blocks, the control of any choice. LOSSY."""
    scores = staticmethod(recent_scores)


def quest_scores(query, k, means):
    """[B, G, N]: the highest score that a key within a block's bounds could have. Source: Tang et al. 2024.

    The query [B, H, D] is averaged in its group, as for mean keys. Quest also leaves two layers dense.
    """
    keys = k.unflatten(2, (means.shape[2], -1))                             # [B, G, N, block, D]
    query = query.unflatten(1, (k.shape[1], 1, -1)).mean(3)                 # [B, G, 1, D]
    return torch.maximum(query * keys.amin(3), query * keys.amax(3)).sum(-1)


@dataclass
class SparseQuest(Sparse):
    """Sparse verification that scores a block by the bounds of its keys, not by their mean. LOSSY."""
    scores = staticmethod(quest_scores)


class KeptKeys:
    """The keys and values that a pass chose of a cache, side by side, and room behind them for later ones.

    All keys from position `base` on are read. Every pass copies those from the cache, because another path
    may have written them anew. Keys keep the rotation of their own positions.
    """

    def __init__(self, session, path):
        """path: of session.target, before it is made sparse."""
        self.session, self.path = session, path
        self.ids = session.tokens
        self.tokens_left = session.target.capacity
        self.base = 0
        self.stores = {}                # layer: [keys, values], each [B, G, kept + room behind the base, D]

    def serves(self, session, path):
        """True if a whole pass over this text chose them."""
        layers = sum(attend is not None for attend in path.attends)
        return (session is self.session and path is self.path
                and len(self.stores) == layers          # an interrupted pass has chosen in some layers only
                and session.tokens[:self.base] == self.ids[:self.base])

    def attend(self, q, k, v, mask, carry, how):
        """The form of kernels.sparse_attend over kept keys; the first pass of a layer chooses them."""
        layer, _, rule = how
        if layer not in self.stores:
            carry = self.choose(q, k, carry, how)
            self.stores[layer] = [self.gather(cached, carry['blocks'], rule.block) for cached in (k, v)]
        keys, values = self.stores[layer]
        behind = k.shape[2] - self.base                 # the partial block, what came since, the pass's own
        kept = keys.shape[2] - (self.tokens_left - self.base)
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
        scores = kernels.mean_scores(q[:, :, 0], k, carry['means'][layer][:, :, :whole])
        blocks = kernels.choose(scores, carry['start'], count, rule)
        return carry | dict(blocks=blocks.sort().values, block=rule.block)

    def gather(self, cached, blocks, block):
        """These blocks [B, G, count] of cached keys or values [B, G, S, D], and room behind them."""
        B, G, _, D = cached.shape
        rows = torch.arange(B, device=cached.device)[:, None, None]
        heads = torch.arange(G, device=cached.device)[:, None]
        whole = cached[:, :, :self.base].unflatten(2, (self.base // block, block))
        kept = whole[rows, heads, blocks].flatten(2, 3)                     # [B, G, count block, D]
        tokens_left = cached.new_empty(B, G, self.tokens_left - self.base, D)
        return torch.cat([kept, tokens_left], 2)


@dataclass
class KeptDraft(Sparse):
    """Exact speculative decoding whose draft is the target itself over kept keys: no second model. Ours.

    Keys are chosen and copied once in `every` cycles, from what dense passes wrote; what is drafted is
    written anew by the verifying one. After Draft & Verify (Zhang et al. 2023), which skips layers; as in
    TriForce (Sun et al. 2024), keys go.
    """
    rho: float = knob(0.1, 'share of the cached tokens beyond dense_below that is read', 0, 1)
    every: int = knob(4, 'cycles from one choice of keys to the next', 1)
    lossless = True
    propose = Exact.propose             # the target verifies densely
    explain = Exact.explain
    keys = None                         # the KeptKeys of the text, or None
    cycle = chosen = length = 0         # cycles so far; the one in which keys were chosen; tokens of the text

    def anchor_layers(self, calibration, layers):
        """By default all layers choose, because they seldom do."""
        return list(range(layers)) if self.anchors is None else super().anchor_layers(calibration, layers)

    def sparse_path(self, path, session):
        thin = super().sparse_path(path, session)
        if not thin.block:                              # attention is dense
            return thin
        if len(session.tokens) != self.length:          # a new cycle
            self.cycle += 1
            self.length = len(session.tokens)
        old = self.cycle - self.chosen >= self.every
        fresh = self.keys is None or old or not self.keys.serves(session, path)
        if fresh:
            self.keys = KeptKeys(session, path)
            self.chosen = self.cycle
        attends = tuple(attend and partial(self.keys.attend, how=attend.keywords['how'])
                        for attend in thin.attends)
        # compiled passes have all of a cache in view: a path with a carry of its own is never compiled
        return replace(thin, attends=attends, carry={})

    def guess(self, session, n):
        path = self.sparse_path(session.target.model.full, session)
        path = replace(path, name='choosing' if self.chosen == self.cycle else 'kept')
        return draft_model(session, self.plan(session, n), session.target, path)


METHODS.update({'sparse-recent': SparseRecent, 'sparse-quest': SparseQuest, 'kept-draft': KeptDraft})
