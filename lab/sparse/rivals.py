"""Beside sparse verification: other selections of blocks, other feed-forwards, a ledger of what a pass read.

Every selection is an entry of verify.SELECT, a knob of the method: `--method sparse --set select=quest`.
Other feed-forwards are the method `sparse-forms`; a cache of kept keys is `kept`, as a drafter `kept-draft`.
"""
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

import kernels
from model import expect
from verify import METHODS, SELECT, Exact, Sparse, chain_on, in_range, one_of


# ------------------------------------------------------------------------------------------ other selections
# Scores [B, G, N] of N blocks for G key heads; q [B, H, D] is the query that asks, k [B, G, S, D] and
# means [B, G, N, D] the cached keys and their means by block.

@torch.compiler.assume_constant_result      # a generator cannot be traced
def lots(*shape):
    """Random numbers, the same for the same shape."""
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.rand(shape, generator=generator)


def random_scores(q, k, means, block):
    """Control: blocks by lot, the same for texts of equal length (compiled, for caches of equal capacity)."""
    return lots(*means.shape[:3]).to(means)


def recent_scores(q, k, means, block):
    """Control: sinks and the latest blocks, whatever was asked. Source: Xiao et al. 2024 (StreamingLLM)."""
    later_is_better = torch.arange(means.shape[2], device=means.device)
    return later_is_better.expand(means.shape[:3]).to(means)


def oracle_scores(q, k, means, block, start):
    """Control: the attention mass that the query really gives each block, mean over a group's heads.

    start: cached tokens; what lies behind in a compiled pass's cache has no mass.
    """
    keys = k[:, :, :means.shape[2] * block]
    queries = q.unflatten(1, (k.shape[1], -1))                                          # [B, G, H/G, D]
    scores = queries @ keys.mT * q.shape[-1] ** -0.5                                    # [B, G, H/G, S]
    behind = torch.arange(scores.shape[-1], device=q.device) >= start // block * block
    mass = scores.masked_fill(behind, -torch.inf).softmax(-1).mean(2)                   # [B, G, S]
    return mass.unflatten(-1, (-1, block)).sum(-1)


def oracle_attend(q, k, v, mask, carry, how):
    """kernels.sparse_attend whose scores are told where the cached tokens end."""
    layer, anchor, rule = how
    scores = partial(oracle_scores, start=carry['start'])
    how = layer, anchor, rule._replace(scores=scores)
    return kernels.sparse_attend(q, k, v, mask, carry, how)


def quest_scores(q, k, means, block):
    """Control: the most that keys within a block's extremes could score. Source: Tang et al. 2024 (Quest)."""
    blocks = k[:, :, :means.shape[2] * block].unflatten(2, (-1, block))                 # [B, G, N, block, D]
    query = q.unflatten(1, (k.shape[1], -1)).mean(2)                                    # [B, G, D]
    query = query[:, :, None]
    highest, lowest = blocks.amax(3), blocks.amin(3)
    return torch.maximum(query * highest, query * lowest).sum(-1)


def quest_attend(q, k, v, mask, carry, how):
    """Quest leaves the first two layers dense, where attention is spread widely."""
    layer, _, _ = how
    if layer < 2:
        return kernels.attend(q, k, v, mask, carry)
    return kernels.sparse_attend(q, k, v, mask, carry, how)


# ------------------------------------------------------------- selections that differ in size, or row by row

def attend_masked(q, k, v, seen):
    """Attention of q [B, H, T, D] over all of k, v [B, G, S, D]; seen [B, G, T, S] is 0 or -inf."""
    group = q.shape[1] // k.shape[1]
    each_head = seen.repeat_interleave(group, 1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=each_head, enable_gqa=True)


def no_padding(T, carry):
    """[T] bool: which positions of a pass are tokens; a compiled pass has padding behind them."""
    real = carry['real']
    return torch.arange(T, device=real.device) < real


def scores_by_row(q, k, means, carry, rule):
    """Scores [B, G, T, N] of the blocks by every row of the pass; padding scores as the root (row 0) does.

    Sinks and locals are infinitely good, blocks that are not whole yet infinitely bad.
    """
    blocks = torch.arange(means.shape[2], device=q.device)
    whole = carry['start'] // rule.block
    rows = []
    for query in q.unbind(2):
        rows.append(kernels.mean_scores(query, k, means, rule.block))
    scores = torch.stack(rows, 2)
    is_token = no_padding(q.shape[2], carry)
    scores = torch.where(is_token[:, None], scores, scores[:, :, :1])
    always = (blocks < rule.sinks) | (blocks >= whole - rule.locals)
    scores = scores.masked_fill(always, torch.inf)
    return scores.masked_fill(blocks >= whole, -torch.inf)


def attend_chosen(q, k, v, mask, carry, how):
    """The form of kernels.sparse_attend for choices that differ in size or by row: all keys, under a mask.

    The rule's `scores` is here the pick: a function from scores [B, G, T, N], the largest number of blocks
    and the number for the tokens that are there (0-dim) to what is read, bool [B, G, T, N].
    """
    layer, anchor, rule = how
    room = k.shape[2] - q.shape[2]              # cached tokens; in a compiled pass, the most there can be
    count = int(kernels.kept_blocks(room, rule))
    n_blocks = room // rule.block
    if count >= n_blocks:                                               # nothing to leave out
        return kernels.attend(q, k, v, mask, carry)
    if anchor or 'chosen_mask' not in carry:
        scores = scores_by_row(q, k, carry['means'][layer][:, :, :n_blocks], carry, rule)
        fewer = kernels.kept_blocks(carry['start'].double(), rule)
        unfinished = torch.arange(n_blocks, device=q.device) >= carry['start'] // rule.block
        chosen_mask = rule.scores(scores, count, fewer) | unfinished
        carry = carry | dict(chosen_mask=chosen_mask, block=rule.block)
    keys = carry['chosen_mask'].repeat_interleave(rule.block, -1)       # [B, G, T, keys in whole blocks]
    keys = functional.pad(keys, (0, k.shape[2] - keys.shape[-1]), value=True)
    mask = kernels.full_mask(mask, q, k)
    seen = mask.expand(*keys.shape).masked_fill(~keys, -torch.inf)
    return attend_masked(q, k, v, seen), carry


def best(scores, count, fewer):
    """bool like scores: the `fewer` best (a tensor, at most count) of the last axis."""
    ranks = torch.arange(count, device=scores.device)
    is_kept = (ranks < fewer).expand(*scores.shape[:-1], -1)
    nothing = torch.zeros_like(scores, dtype=torch.bool)
    return nothing.scatter(-1, scores.topk(count).indices, is_kept)


def joint(scores, count, fewer):
    """One budget over all pairs of head and block, by the root's row: a head may keep more than another."""
    root = scores[:, :, 0]                                              # [B, G, N]
    G = root.shape[1]
    chosen_mask = best(root.flatten(1), count * G, fewer * G).view_as(root)
    return chosen_mask[:, :, None].expand_as(scores)


def union(scores, count, fewer):
    """What any row of the pass would choose, for all rows: each row has its own choice, and more is read.

    What it is beside one choice by the root is what the union costs. No guess should be judged so: the later
    ones have a say in what the earlier ones are judged by.
    """
    by_any_row = best(scores, count, fewer).any(2, keepdim=True)
    return by_any_row.expand_as(scores)


SELECT.update(
    random=(kernels.sparse_attend, random_scores),
    recent=(kernels.sparse_attend, recent_scores),
    oracle=(oracle_attend, oracle_scores),
    quest=(quest_attend, quest_scores),
    token=(attend_chosen, best),
    joint=(attend_chosen, joint),
    union=(attend_chosen, union),
)


# ---------------------------------------------------------------------------------------- other feed-forwards
# how: (threshold, per token; share of the F channels, the largest, that the whole pass reads).

def literal_swiglu(x, mlp, carry, how):
    """The feed-forward as the paper writes it: |silu(gate) up| below the threshold; only `down` is spared."""
    threshold, _ = how
    hidden = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    hidden = hidden.masked_fill(hidden.abs() < threshold, 0)
    rows_read = 2 * hidden.shape[-1]                                    # gate and up, both whole
    return mlp.down_proj(hidden), carry | dict(channels=hidden, gate=rows_read, spared=1)


def union_swiglu(x, mlp, carry, how):
    """Every token through all channels that any token of the pass, padding aside, would keep.

    What it is beside the method is what the union costs. No guess should be judged so: the later ones have a
    say in what the earlier ones are judged by.
    """
    threshold, _ = how
    hidden = functional.silu(mlp.gate_proj(x))
    is_token = no_padding(x.shape[1], carry)
    wanted = (hidden.abs() >= threshold) & is_token[:, None]
    by_any_token = wanted.flatten(0, -2).any(0)                         # [F]
    hidden = hidden * by_any_token
    out = mlp.down_proj(hidden * mlp.up_proj(x))
    return out, carry | dict(channels=hidden)


def loudest_swiglu(x, mlp, carry, how):
    """kernels.sparse_swiglu whose shared channels are the largest in any token, not in the root.

    What it is beside the method is what a choice by the root costs. No guess should be judged so: see union.
    """
    _, share = how
    hidden = functional.silu(mlp.gate_proj(x))
    is_token = no_padding(x.shape[1], carry)
    tokens = hidden * is_token[:, None]
    loudest = tokens.abs().amax(1, keepdim=True)                        # [B, 1, F]
    chosen = kernels.root_channels(loudest, share)
    return kernels.chosen_swiglu(x, hidden, mlp, chosen), carry | dict(channels=hidden, chosen=chosen)


def guessed_swiglu(x, mlp, carry, how):
    """The root's channels guessed from a quarter of the gate's columns, those where the root's x is largest.

    Then the gate too is read at the chosen channels alone: 0.48 of the weights at a share of 0.4, not 0.6.
    After SparQ (Ribar et al. 2024), which guesses keys so; its first step, for channels.
    """
    _, share = how
    gate = mlp.gate_proj
    gate.unpack()
    root = x[:, :1]                                                     # [B, 1, C]
    sizes = root.abs().amax((0, 1))                                     # [C]
    columns = sizes.topk(x.shape[-1] // 4).indices.sort().values
    guess = functional.silu(root[..., columns] @ gate.weight[:, columns].T)         # [B, 1, F]
    chosen = kernels.root_channels(guess, share)
    hidden = torch.zeros(*x.shape[:2], guess.shape[-1], dtype=x.dtype, device=x.device)
    hidden[..., chosen] = functional.silu(functional.linear(x, gate.weight[chosen]))
    rows_read = guess.shape[-1] // 4 + len(chosen)                      # in whole rows of the gate
    carry = carry | dict(channels=hidden, chosen=chosen, gate=rows_read)
    return kernels.chosen_swiglu(x, hidden, mlp, chosen), carry


FORMS = dict(literal=literal_swiglu, union=union_swiglu, loudest=loudest_swiglu, guessed=guessed_swiglu)


@dataclass
class SparseForms(Sparse):
    """Sparse verification with another feed-forward, see lab/sparse/rivals.py: one of its forms. LOSSY."""
    form: str = one_of('literal', FORMS)

    def view(self, path, session):
        path = super().view(path, session)
        ffns = []
        for ffn in path.ffns:
            if isinstance(ffn, partial) and ffn.func is kernels.sparse_swiglu:
                ffn = partial(FORMS[self.form], **ffn.keywords)
            ffns.append(ffn)
        return replace(path, ffns=tuple(ffns))


# --------------------------------------------------------------------------------------- a cache of kept keys

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
        expect(SELECT[self.select][0] is kernels.sparse_attend, f'select={self.select} does not choose once')
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


METHODS.update({'sparse-forms': SparseForms, 'kept': Kept, 'kept-draft': KeptDraft})


# ------------------------------------------------------------------------------------- what a pass has read

def ledger(log, model, cached):
    """What a watched pass over `cached` tokens chose, a dict for each layer that ran.

    Its keys: see read_keys, and read_channels or read_experts. passes.work makes bytes and FLOPs of it.
    """
    config = model.config
    rows = {}
    before = None
    for sublayer, carry in log:
        layer, is_ffn = divmod(sublayer, 2)
        row = rows.setdefault(layer, {})
        handed_on = carry or {}
        chosen_here = handed_on if carry is not before else {}  # a dense sublayer hands on what it was handed
        before = carry
        if not is_ffn:
            row.update(read_keys(handed_on, chosen_here, cached))
        elif not config.mixtures[layer]:
            row.update(read_channels(chosen_here, config.intermediate_size))
        else:
            row.update(read_experts(chosen_here))
    return list(rows.values())


def read_keys(handed_on, chosen_here, cached):
    """What a layer's attention read of the cached keys, in keys of one key head.

    keys: that any row reads (mean over key heads); seen: that one row sees (mean); run: that the code
    multiplies for each row, hidden ones included; means: blocks that one row scored, 0 where the layer did
    not choose itself; asked: rows that scored.
    """
    row = dict(keys=cached, seen=cached, run=cached, means=0, asked=1)
    block = handed_on.get('block', 1)
    if 'blocks' in handed_on:
        count = handed_on['blocks'].shape[-1]
        row['keys'] = min(cached, count * block + cached % block)
        row['seen'] = row['keys']
        row['run'] = count * block + block - 1                          # the partial block's room is filled
    elif 'chosen_mask' in handed_on:                                    # [B, G, T, N], by row
        chosen_mask = handed_on['chosen_mask']
        row['keys'] = cached - block * mean_count(~chosen_mask.any(2))
        row['seen'] = cached - block * mean_count(~chosen_mask)
        row['asked'] = chosen_mask.shape[2]
    if 'blocks' in chosen_here or 'chosen_mask' in chosen_here:
        row['means'] = cached // block
    return row


def mean_count(flags):
    """How many are true along the last axis, mean over the others."""
    return float(flags.sum(-1).float().mean())


def read_channels(chosen_here, F):
    """What a dense layer's feed-forward read of its F channels.

    channels: of a token, mean; union: of all tokens, of which `spared` matrices are read (2: up and down);
    width: that the code multiplies, zeros included; gate: rows of weights that are read whatever is chosen.
    """
    if 'channels' not in chosen_here:
        return dict(channels=F, union=F, width=F, gate=F, spared=2)
    active = chosen_here['channels'] != 0
    if 'chosen' in chosen_here:
        active = active[..., chosen_here['chosen']]
    active = active.flatten(0, -2)                                      # [tokens, channels]
    return dict(
        channels=mean_count(active),
        union=int(active.any(0).sum()),
        width=active.shape[-1],
        gate=chosen_here.get('gate', F),
        spared=chosen_here.get('spared', 2),
    )


def read_experts(chosen_here):
    """experts: that a token was sent through, mean; distinct: of all tokens. {} where nobody noted them."""
    if 'experts' not in chosen_here:
        return {}
    experts = chosen_here['experts']                                    # [tokens, k], -1 where skipped
    distinct = set(experts.flatten().tolist()) - {-1}
    return dict(experts=mean_count(experts >= 0), distinct=len(distinct))
