"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

The attention functions that a Path (model.py) names for its layers share one signature, and so do its
feed-forward functions. `carry` is what a layer hands to the next one. Dense functions pass it on
unchanged; sparse functions add what they chose.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward
width, E experts. Other letters are explained where they occur.
"""
import functools
import math

import torch
from torch.nn import functional

# On a CPU, attention of few queries over many keys is grouped: the queries of one key head become the
# rows of one product. This is up to 1.7 times as fast, because each key is read once and not H / G times.
FEW = 8         # queries of a pass that verifies a block or writes a token
MANY = 1024     # keys


# ------------------------------------------------------------------------------------------ rotary positions

def rope_table(rope, D, length):
    """(cos, sin) [length, D] in fp64, from a Config's rope; the first half of sin is negated (see rotate).

    Source: Chen et al. 2023 (linear); Peng et al. 2023 (yarn); Dubey et al. 2024 (llama3, by wavelength).
    """
    channels = torch.arange(0, D, 2, dtype=torch.float64)                   # [D/2]
    frequencies = rope['rope_theta'] ** (-channels / D)                     # [D/2], radians per position
    scale = 1.0
    if rope['rope_type'] == 'linear':
        frequencies = frequencies / rope['factor']
    elif rope['rope_type'] == 'llama3':
        frequencies = llama3(rope, frequencies)
    elif rope['rope_type'] == 'yarn':
        frequencies, scale = yarn(rope, D, frequencies)
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)                            # [length, D/2]
    cos = angles.cos() * scale
    sin = angles.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def llama3(rope, frequencies):
    """Llama 3's frequencies [D/2]: fast channels stay, slow ones are stretched, those between are blended.

    A channel is fast or slow by its number of turns within the context of the original training.
    """
    low = rope['low_freq_factor']
    high = rope['high_freq_factor']
    turns = rope['original_max_position_embeddings'] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)                       # 1: kept, 0: stretched
    return keep * frequencies + (1 - keep) * frequencies / rope['factor']


def yarn(rope, D, frequencies):
    """Yarn's frequencies [D/2] and its factor on cos and sin. Fast channels stay, slow ones are stretched."""
    original = rope['original_max_position_embeddings']

    def channel(turns):
        """The channel, a fraction, that makes this number of turns within the original context."""
        slowness = original / (turns * 2 * math.pi)                         # positions per radian
        return D * math.log(slowness) / (2 * math.log(rope['rope_theta']))
    first = max(math.floor(channel(rope['beta_fast'])), 0)
    last = min(math.ceil(channel(rope['beta_slow'])), D - 1)
    width = (last - first) or 0.001     # below 0 where all channels are slow, or fast: as transformers has it
    channels = torch.arange(D // 2, dtype=torch.float64)
    stretch = ((channels - first) / width).clamp(0, 1)                      # 0: kept, 1: stretched
    blended = frequencies * (1 - stretch) + frequencies / rope['factor'] * stretch
    scale = rope.get('attention_factor') or 0.1 * math.log(rope['factor']) + 1
    return blended, scale


def rotate_(x, cos, sin):
    """Rotates x [B, H, T, D] in place by its positions' angles; cos and sin [T, D] as rope_table has them.

    Channels i and i + D/2 are a pair, as in Hugging Face checkpoints; a roll by D/2 brings partners together.
    Source: Su et al. 2021 (RoFormer), eq. 34.
    """
    partners = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(partners, sin)                 # x cos + partners sin


# -------------------------------------------------------------------------------------------- dense sublayers

def attend(q, k, v, mask, carry):
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] -> ([B, H, T, D], carry).

    mask [T, S] is 0 where a query may look, else -inf. Where it is None, or T = S, attention is causal: the T
    queries belong to the last T keys. Query head h reads key head h // (H / G).
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries).
    """
    T = q.shape[2]
    S = k.shape[2]
    if T == S:                                          # a whole text: masked products are not computed
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    elif mask is None and T > 1:                        # on CUDA: flash attention takes no mask
        causal = lower_right(T, S)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
    elif q.is_cuda or (T <= FEW and S >= MANY):         # CUDA's fast kernel with a mask takes no groups
        out = attend_grouped(q, k, v, mask)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out, carry


@functools.lru_cache(maxsize=1)                         # one for all layers of a pass
def lower_right(T, S):
    """The causal mask of the last T of S positions, as flash attention knows it without reading one."""
    from torch.nn.attention.bias import causal_lower_right      # here, because the import takes two seconds
    return causal_lower_right(T, S)


def attend_grouped(q, k, v, mask):
    """[B, H, T, D]: `attend` with the queries that read one key head as rows of one product."""
    if mask is not None:
        mask = mask.repeat(q.shape[1] // k.shape[1], 1)                     # [(H/G) T, S]
    out = functional.scaled_dot_product_attention(group_queries(q, k), k, v, attn_mask=mask)
    return out.reshape(q.shape)


def group_queries(q, k):
    """q [B, H, T, D] as [B, G, (H/G) T, D]: the queries that read one key head of k [B, G, S, D] together."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def causal_mask(T, S, like):
    """[T, S], 0 where one of the last T of S positions may look, else -inf; like: for dtype and device."""
    hidden = torch.full((T, S), -torch.inf, dtype=like.dtype, device=like.device)
    return hidden.triu_(S - T + 1)


def full_mask(mask, q, k):
    """The mask [T, S], made where it is None, for functions that add it themselves."""
    return causal_mask(q.shape[2], k.shape[2], q) if mask is None else mask


def feed_forward(x, mlp, carry):
    """x [N, C] -> ([N, C], carry) through a model.MLP or a model.MoE, all of it."""
    return mlp(x), carry


def route(x, moe):
    """(weights [N, k], chosen [N, k]): the k likeliest experts of N tokens, likeliest first, x [N, C].

    The weights are not renormalised yet. The softmax runs over all E experts before the choice (Qwen's order;
    Mixtral's is the reverse).
    Source: Shazeer et al. 2017, eq. 2-5.
    """
    scores = moe.gate(x)                                                    # [N, E]
    precise = torch.promote_types(scores.dtype, torch.float32)
    return scores.to(precise).softmax(-1).topk(moe.top_k)


def combine_experts(x, moe, weights, chosen, threshold=0):
    """x [N, C] -> [N, C]: each token through its experts, chosen [N, k], by their weights [N, k].

    threshold: see kept_channels; 0 leaves no channel out. A loop over the experts does not run those of
    weight 0. For few tokens on a GPU, and when compiled, the experts' matrices are gathered instead, because
    a loop would wait for the host at every layer.
    """
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if torch.compiler.is_compiling() or x.is_cuda and len(x) <= FEW:
        return gathered_experts(x, moe, weights, chosen, threshold)
    out = torch.zeros_like(x)
    used = weights != 0                                 # true for a NaN, which must not be hidden
    for expert in chosen[used].unique().tolist():
        token, slot = ((chosen == expert) & used).nonzero(as_tuple=True)    # [n] each, of n tokens
        gate, up = functional.linear(x[token], moe.gate_up_proj[expert]).chunk(2, -1)
        y = functional.linear(kept_channels(gate, threshold) * up, moe.down_proj[expert])
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out


def gathered_experts(x, moe, weights, chosen, threshold=0):
    """[N, C] of few tokens x [N, C] by one gather; slots of weight 0 read an expert that others read."""
    chosen = torch.where(weights > 0, chosen, chosen[0, 0])                 # [N, k]
    both = moe.gate_up_proj[chosen] @ x[:, None, :, None]                   # [N, k, 2F, 1]
    gate, up = both.chunk(2, 2)
    out = moe.down_proj[chosen] @ (kept_channels(gate, threshold) * up)     # [N, k, C, 1]
    return (out[..., 0] * weights[..., None].to(out.dtype)).sum(1)


def kept_channels(gate, threshold):
    """silu(gate), and 0 in channels where its size is below the threshold.

    Source: Lee et al. 2024 (CATS), eq. 4-5.
    """
    h = functional.silu(gate)
    return h.masked_fill(h.abs() < threshold, 0) if threshold else h


# ------------------------------------------------------------------------------------------- sparse attention
# verify.Sparse decides which parts are skipped. The carry of sparse functions is a dict: start (number of
# cached tokens, 0-dim), means (mean keys of each layer's blocks) and the latest choice. A compiled pass has
# the whole cache in view and one graph for every start, so all sizes are those of the fullest cache, and the
# mask hides positions that are not written yet.
# Source, unless said: "Accelerate speculative decoding with sparse computation in verification" (2025).

def kept_blocks(length, rule):
    """Blocks that are read of `length` cached tokens: sinks, locals and a budget besides.

    The budget is all tokens up to dense_below, then a share rho of the rest. length: an int, or a float64
    tensor. A result above the number of blocks means all of them.
    """
    budget = rule.dense_below + (length - rule.dense_below) * rule.rho // 1             # tokens
    return -(-budget // rule.block) + rule.sinks + rule.locals              # rounded up


def mean_scores(query, k, means):
    """Scores [B, G, N] of N blocks: query [B, H, D], averaged in its group, times each block's mean key.

    k [B, G, S, D], the blocks' keys; means [B, G, N, D]. Only ranks matter, so there is no scale.
    """
    query = query.unflatten(1, (k.shape[1], -1)).mean(2)                    # [B, G, D]
    return (means @ query[..., None])[..., 0]


def choose(scores, start, count, rule):
    """[B, G, count] blocks, best first: sinks and locals before all others, then by score [B, G, N].

    start: 0-dim. Only whole blocks can be chosen: if there are fewer than `count`, the last entries are
    invalid and the caller masks them.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    whole = start // rule.block                         # whole blocks in the cache
    first = blocks < rule.sinks
    latest = blocks >= whole - rule.locals
    scores = scores.masked_fill(first | latest, torch.inf)
    scores = scores.masked_fill(blocks >= whole, -torch.inf)
    return scores.topk(count).indices


def sparse_attend(q, k, v, mask, carry, how):
    """`attend` over the kept blocks of cached keys, the partial block behind them and the pass's own tokens.

    how: (layer, whether it is an anchor, verify.Blocks). An anchor chooses blocks by the root's query, each
    key head its own; the other layers reuse its choice.
    """
    layer, anchor, rule = how
    S = k.shape[2]
    cached = S - q.shape[2]                             # in a compiled pass, the most there can be
    whole = cached // rule.block
    count = int(kept_blocks(cached, rule))
    if count >= whole:                                  # nothing to leave out
        return attend(q, k, v, mask, carry)
    if anchor or 'blocks' not in carry:
        mask = full_mask(mask, q, k)
        means = carry['means'][layer][:, :, :whole]                         # [B, G, whole, D]
        scores = rule.scores(q[:, :, 0], k[:, :, :whole * rule.block], means)           # [B, G, whole]
        blocks = choose(scores, carry['start'], count, rule)                # [B, G, count]
        reads = kept_keys(blocks, S, mask, carry['start'], rule)
        carry = carry | dict(blocks=blocks, block=rule.block, reads=reads)
    positions, key_mask = carry['reads']
    return attend_kept(q, k, v, positions, key_mask), carry


def kept_keys(blocks, S, mask, start, rule):
    """(positions [B, G, K], mask [T, K]) of the keys in blocks [B, G, count] and of all behind whole blocks.

    K is one number for every `start`, because a compiled pass's S is the whole cache. Masked are blocks
    beyond those that this `start` keeps, and keys before the partial block, which blocks may have.
    """
    B, G, count = blocks.shape
    whole = start // rule.block
    edge = whole * rule.block                           # whole blocks end here, the partial one begins
    ranks = torch.arange(count, device=mask.device)
    unused = (ranks >= kept_blocks(start.double(), rule)) | (ranks >= whole)            # [count]
    inside = blocks[..., None] * rule.block + torch.arange(rule.block, device=mask.device)
    n = min(rule.block - 1 + mask.shape[0], S)          # the longest partial block and the pass's T
    behind = edge.clamp(max=S - n) + torch.arange(n, device=mask.device)                # [n]
    positions = torch.cat([inside.flatten(2), behind.expand(B, G, -1)], 2)
    hidden = torch.cat([unused.repeat_interleave(rule.block), behind < edge])           # [K]
    read = mask.index_select(1, behind)                                                 # [T, n]
    read = torch.cat([read.new_zeros(len(read), len(hidden) - n), read], 1)             # [T, K]
    return positions, read.masked_fill(hidden, -torch.inf)


def attend_kept(q, k, v, positions, mask):
    """[B, H, T, D]: attention over the keys at these positions [B, G, K] alone; mask [T, K].

    On a CPU one key head at a time: its kept keys are copied together and stay in the nearer caches. On CUDA,
    where each of these products is too small to launch by itself, all heads' keys are copied together.
    Keys keep the rotation of their own positions.
    """
    if q.is_cuda:
        rows = positions[..., None].expand(-1, -1, -1, q.shape[3])          # [B, G, K, D]
        return attend_grouped(q, k.gather(2, rows), v.gather(2, rows), mask)
    mask = mask.repeat(q.shape[1] // k.shape[1], 1)                         # [(H/G) T, K]
    queries = group_queries(q, k) * q.shape[3] ** -0.5                      # [B, G, (H/G) T, D]
    outs = []
    heads = zip(queries.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), positions.flatten(0, 1))
    for query, key, value, kept in heads:
        weights = torch.addmm(mask, query, key.index_select(0, kept).t()).softmax(-1)   # [(H/G) T, K]
        outs.append(weights @ value.index_select(0, kept))                  # [(H/G) T, D]
    return torch.stack(outs).view(q.shape)


# ------------------------------------------------------------------------------ sparse channels and experts

def sparse_swiglu(x, mlp, carry, threshold):
    """`MLP.forward` without the channels whose |silu(gate)| is below the threshold, for each token.

    It saves no time here, because all weights are still read: it shows what leaving channels out does.
    """
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)                             # [N, F] each
    h = kept_channels(gate, threshold)
    return mlp.down_proj(h * up), carry | dict(channels=h)


def sparse_moe_forward(x, moe, carry, betas, threshold):
    """`MoE.forward` that skips a token's m lowest experts, for the largest m whose share is below beta_m.

    betas: beta_1, beta_2, ...; 0 never skips. threshold: of the channels of those that are left.
    Source: also Lu et al. 2024 (the case of 2 experts).
    """
    weights, chosen = route(x, moe)                                         # [N, k] each
    sums = weights.flip(-1).cumsum(-1)                                      # [N, k], of the lowest m = 1 to k
    lowest = sums[:, :len(betas)] / weights.sum(-1, keepdim=True)           # [N, len(betas)], their share
    skip = torch.zeros_like(chosen[:, 0])                                   # [N], the largest such m or 0
    for m, beta in enumerate(betas, 1):
        skip = torch.where(lowest[:, m - 1] < beta, m, skip)
    ranks = torch.arange(moe.top_k, device=x.device)
    weights = weights.masked_fill(ranks >= moe.top_k - skip[:, None], 0)
    return combine_experts(x, moe, weights, chosen, threshold), carry | dict(lowest=lowest)


# -------------------------------------------------------------------------------------------------- grounding

def attention_rows(q, k, mask, sparsify):
    """Weights [B, T, S] that attention gives the keys, averaged over the query heads.

    Per head, weights below `sparsify` are dropped and the rest scaled to sum to 1; a row that would be empty
    (flat over more than 1 / sparsify keys) stays whole. Its peak memory is two arrays [B, H, T, S].
    Source: SpecGuard 2026.
    """
    B, H, T, D = q.shape
    weights = (group_queries(q, k) * D ** -0.5) @ k.mT                      # [B, G, (H/G) T, S]
    weights = weights.view(B, H, T, -1).add_(mask)
    precise = torch.promote_types(weights.dtype, torch.float32)
    weights = weights.to(precise).softmax(-1)
    cut = sparsify * (weights.amax(-1, keepdim=True) >= sparsify)           # [B, H, T, 1]
    weights.masked_fill_(weights < cut, 0)
    weights.div_(weights.sum(-1, keepdim=True))
    return weights.mean(1)


def rollout_layer(weights, below):
    """One layer of attention rollout -> [B, T, P]: how much each of T tokens rests on each of the P before.

    weights [B, T, P + T]; below: the rollout up to the layer below, None at the lowest. Old tokens count as
    their own source: a row's sum over the prefix is the full product's, its spread is not (why:
    lab/specguard/README.md).
    Source: Abnar & Zuidema 2020, eq. 1, without the identity's share, as SpecGuard has it.
    """
    T = weights.shape[1]
    old = weights[..., :-T]                                                 # [B, T, P]
    return old if below is None else old + weights[..., -T:] @ below


def grounded(q, k, v, mask, carry):
    """`attend`, observed: carry['rollout'] [B, T, P] is that of the T positions from carry['begin'] on.

    Only those rows of weights are made. carry: a dict of begin, sparsify, rollout (None at first), changed in
    place.
    """
    T = k.shape[2] - carry['begin']
    rows = full_mask(mask, q, k)[-T:]                                       # [T, S]
    weights = attention_rows(q[:, :, -T:], k, rows, carry['sparsify'])      # [B, T, S]
    carry['rollout'] = rollout_layer(weights, carry['rollout'])
    return attend(q, k, v, mask, carry)
