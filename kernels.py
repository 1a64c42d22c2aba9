"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

Every attend has one signature, and so has every feed-forward and mixture, so that a Path (model.py) can name
one for each layer. `carry` is whatever one layer hands to the next. The dense forms hand it on as it is, the
sparse ones add what they chose.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward
width, E experts. N and K are explained where they occur.
"""
import functools
import math

import torch
from torch.nn import functional

# On a CPU so few queries over so many keys are grouped: the queries of one key head become the rows of one
# product. That is up to 1.7 times as fast, since a key is read once and not H / G times.
FEW = 8         # queries, of a pass that verifies a block or writes a token
MANY = 1024     # keys
CHANNELS = 128  # of a sparse feed-forward, of which the weights are copied together
BIG = 2 ** 18   # elements of a matrix that does not stay in a CPU's nearer caches


# ------------------------------------------------------------------------------------------ rotary positions

def rope_table(rope, D, length):
    """(cos, sin) [length, D] in fp64, from a Config's rope; the first half of sin is negated (see rotate).

    Source: Chen et al. 2023 (linear); Peng et al. 2023 (yarn); Dubey et al. 2024 (llama3, by wavelength).
    """
    channels = torch.arange(0, D, 2, dtype=torch.float64)                   # [D/2]
    exponents = -channels / D
    frequencies = rope['rope_theta'] ** exponents                           # [D/2], radians a position
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
    cos = torch.cat([cos, cos], -1)
    sin = torch.cat([-sin, sin], -1)
    return cos, sin


def llama3(rope, frequencies):
    """Llama 3's frequencies [D/2]: fast channels stay, slow ones are stretched, those between are blended.

    A channel is fast or slow by the turns that it makes in the context of the original training.
    """
    low = rope['low_freq_factor']
    high = rope['high_freq_factor']
    turns = rope['original_max_position_embeddings'] * frequencies / (2 * math.pi)
    share = (turns - low) / (high - low)
    keep = share.clamp(0, 1)                                                # 1: kept, 0: stretched
    return keep * frequencies + (1 - keep) * frequencies / rope['factor']


def yarn(rope, D, frequencies):
    """Yarn's frequencies [D/2] and its factor on cos and sin. Fast channels stay, slow ones are stretched."""
    most_turns = rope.get('beta_fast') or 32
    least_turns = rope.get('beta_slow') or 1
    first = yarn_channel(rope, D, most_turns)
    last = yarn_channel(rope, D, least_turns)
    if rope.get('truncate', True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, D - 1)
    width = last - first or 0.001       # below 0 where all channels are slow, or fast: as transformers has it
    channels = torch.arange(D // 2, dtype=torch.float64)
    ramp = (channels - first) / width
    stretch = ramp.clamp(0, 1)                                              # 0: kept, 1: stretched
    slow = frequencies / rope['factor']
    blended = frequencies * (1 - stretch) + slow * stretch
    return blended, yarn_scale(rope)


def yarn_channel(rope, D, turns):
    """The channel, a fraction, that makes so many turns in the context of the original training."""
    angle = turns * 2 * math.pi                         # radians in that context
    slowness = rope['original_max_position_embeddings'] / angle             # positions a radian
    return D * math.log(slowness) / (2 * math.log(rope['rope_theta']))


def yarn_scale(rope):
    """Yarn's factor on cos and sin: what the config names, or what the stretching calls for."""
    named = rope.get('attention_factor')
    if named:
        return named
    factor = rope['factor']
    own = rope.get('mscale')
    other = rope.get('mscale_all_dim')
    if own and other:
        return yarn_growth(own, factor) / yarn_growth(other, factor)
    return yarn_growth(1, factor)


def yarn_growth(mscale, factor):
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1


def rotate(x, cos, sin):
    """x [B, H, T, D] turned by its positions' angles; cos, sin [T, D], the first half of sin negated.

    Channels i and i + D/2 are a pair, as in Hugging Face checkpoints: a roll by D/2 brings partners together.
    Source: Su et al. 2021 (RoFormer), eq. 34.
    """
    D = x.shape[-1]
    partners = x.roll(D // 2, -1)
    return torch.addcmul(x * cos, partners, sin)        # x cos + partners sin


# -------------------------------------------------------------------------------------------- dense sublayers

def attend(q, k, v, mask, carry):
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] -> ([B, H, T, D], carry).

    mask [T, S] is 0 where a query may look, else -inf. Where it is None, or T = S, attention is causal: the T
    queries are of the last T keys. Query head h reads key head h // (H / G).
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries).
    """
    T = q.shape[2]
    S = k.shape[2]
    if T == S:                                          # a whole text: what is masked is not even computed
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    elif mask is None and T > 1:                        # on CUDA: flash attention takes no mask
        causal = lower_right(T, S)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
    elif q.is_cuda or T <= FEW and S >= MANY:           # of those with a mask CUDA's fast one takes no groups
        out = attend_grouped(q, k, v, mask)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out, carry


@functools.lru_cache(maxsize=1)                         # one for all layers of a pass
def lower_right(T, S):
    """The causal mask of the last T of S positions, as flash attention knows it without reading one."""
    from torch.nn.attention.bias import causal_lower_right      # here, since it takes two seconds
    return causal_lower_right(T, S)


def attend_grouped(q, k, v, mask):
    """[B, H, T, D]: `attend` with the queries that read one key head as rows of one product."""
    rows = group_queries(q, k)                                              # [B, G, (H/G) T, D]
    if mask is not None:
        mask = mask.repeat(q.shape[1] // k.shape[1], 1)                     # [(H/G) T, S]
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.reshape(q.shape)


def causal_mask(T, S, like):
    """[T, S], 0 where one of the last T of S positions may look, else -inf; like: for dtype and device."""
    hidden = torch.full((T, S), -torch.inf, dtype=like.dtype, device=like.device)
    return hidden.triu_(S - T + 1)


def full_mask(mask, q, k):
    """The mask [T, S], written out where it is None: for those who add it themselves."""
    return causal_mask(q.shape[2], k.shape[2], q) if mask is None else mask


def group_queries(q, k):
    """q [B, H, T, D] as [B, G, (H/G) T, D]: the queries that read one key head of k [B, G, S, D] together."""
    B, H, T, D = q.shape
    G = k.shape[1]
    return q.reshape(B, G, H // G * T, D)


def swiglu(x, mlp, carry):
    """x [B, T, C] -> ([B, T, C], carry) through F channels: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, eq. 6.
    """
    both = mlp.gate_up(x)
    gate, up = both.chunk(2, -1)                                            # [B, T, F] each
    h = functional.silu(gate) * up
    return mlp.down_proj(h), carry


def head(x, weight, vocab):
    """Logits [..., vocab] of x [..., C] by the first `vocab` rows of weight [at least that many, C].

    Few positions by a big matrix on a CPU: an even number of them, and the product the other way round, took
    a third to a half of the time there.
    """
    weight = weight[:vocab]
    n = x.shape[:-1].numel()                            # positions
    if x.is_cuda or n > FEW or weight.numel() < BIG:
        return functional.linear(x, weight)
    rows = x.reshape(n, x.shape[-1])
    rows = functional.pad(rows, (0, 0, 0, n % 2))                           # [n or n + 1, C]
    columns = weight @ rows.t()                                             # [vocab, n or n + 1]
    logits = columns[:, :n].t()
    return logits.reshape(*x.shape[:-1], vocab)


def mix(x, moe, carry):
    """x [B, T, C] -> ([B, T, C], carry): each token through its top_k of the E experts, by router weight."""
    weights, chosen = route(x.flatten(0, 1), moe)
    return blend(x, moe, weights, chosen, carry), carry


def route(flat, moe):
    """(weights [N, k], chosen [N, k]): the k likeliest experts of N tokens, likeliest first, flat [N, C].

    The weights are not yet renormalised. The softmax runs over all E experts before the choice (Qwen's order;
    Mixtral's is the reverse).
    Source: Shazeer et al. 2017, eq. 2-5.
    """
    scores = moe.gate(flat)                                                 # [N, E]
    precise = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.to(precise).softmax(-1)
    return shares.topk(moe.top_k)


def blend(x, moe, weights, chosen, carry):
    """x [B, T, C] -> [B, T, C]: each token through its experts, chosen [B T, k], by their weights [B T, k].

    An expert of weight 0 is not run, but for few tokens on CUDA, where nobody looks.
    """
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if torch.compiler.is_compiling():
        return blend_pairs(x, moe, weights, chosen, carry['real'])
    if x.is_cuda and len(chosen) <= FEW:
        return blend_gathered(x, moe, weights, chosen)
    flat = x.flatten(0, 1)                                                  # [B T, C]
    out = torch.zeros_like(flat)
    used = weights != 0                                 # a NaN counts: it is read, and shows
    for expert in chosen[used].unique().tolist():
        mine = (chosen == expert) & used
        token, slot = mine.nonzero(as_tuple=True)                           # [n] each, of n tokens
        y, _ = swiglu(flat[token], moe.experts[expert], None)
        weight = weights[token, slot, None].to(y.dtype)                     # [n, 1]
        out.index_add_(0, token, y * weight)
    return out.view_as(x)


def blend_gathered(x, moe, weights, chosen):
    """`blend` of few tokens without a look at what was chosen, for which a GPU's host would have to wait.

    A copy of each pair's expert is made: for more tokens than a few that takes longer.
    """
    gate_ups, downs = moe.stacks                                            # [E, 2F, C], [E, C, F]
    N, k = chosen.shape
    experts = chosen.flatten()                                              # [N k]
    tokens = x.flatten(0, 1)
    tokens = tokens.repeat_interleave(k, 0)                                 # [N k, C]
    both = gate_ups[experts] @ tokens[..., None]
    gate, up = both.chunk(2, 1)                                             # [N k, F, 1] each
    h = functional.silu(gate) * up
    out = downs[experts] @ h                                                # [N k, C, 1]
    out = out.view(N, k, -1)
    weights = weights.to(out.dtype)
    out = out * weights[..., None]
    return out.sum(1).view_as(x)


def blend_pairs(x, moe, weights, chosen, real):
    """`blend` in constant sizes: every pair of token and slot multiplies its own expert's weights.

    real: tokens of the pass that are no padding. Padding and slots of weight 0 read a single row over and
    over, of an expert that the first token reads anyway.
    """
    T = x.shape[1]
    k = chosen.shape[1]
    chosen = chosen.view(-1, T, k, 1)                                       # [B, T, k, 1]
    weights = weights.view(-1, T, k, 1)                                     # [B, T, k, 1]
    weights = weights.to(x.dtype)
    token = torch.arange(T, device=x.device)
    there = (token < real)[:, None, None]                                   # [T, 1, 1]
    used = (weights > 0) & there
    spare = chosen[0, 0, 0]                             # read anyway, so unused pairs cost nothing
    expert = torch.where(used, chosen, spare)                               # [B, T, k, 1]

    gate_ups, downs = moe.stacks                                            # [E, 2F, C], [E, C, F]
    tokens = x[:, :, None]                                                  # [B, T, 1, C]
    both = pair_terms(tokens, gate_ups, expert, used).sum(-1)               # [B, T, k, 2F]
    gate, up = both.chunk(2, -1)
    h = functional.silu(gate) * up
    terms = pair_terms(h * weights, downs, expert, used)                    # [B, T, k, C, F]
    return terms.sum((2, 4))


def pair_terms(x, stack, expert, used):
    """[B, T, k, rows, columns]: the terms of x [B, T, 1 or k, columns] times each pair's own expert's matrix.

    stack [E, rows, columns]; expert, used [B, T, k, 1]. The caller sums over the columns: inside a sum
    inductor reads the picked rows in place, without a copy, and stores nothing of this size.
    """
    size = stack.shape[1]
    row = torch.arange(size, device=x.device) * used                        # [B, T, k, rows], 0 if unused
    picked = expert * size + row
    weights = stack.flatten(0, 1)[picked]                                   # [B, T, k, rows, columns]
    return x[..., None, :] * weights


# ------------------------------------------------------------------------------------------- sparse attention
# What is left out is decided by verify.Sparse. The carry of the sparse forms is a dict: start (cached tokens,
# 0-dim), real (tokens of the pass that are no padding, 0-dim), means (for each layer, of its blocks of keys)
# and the latest choice. A compiled pass has the whole cache in view and one graph for every start: all sizes
# are those of the fullest cache, and what is spare is masked.
# Source, unless said: "Accelerate speculative decoding with sparse computation in verification" (2025).

def budget(length, rule):
    """Blocks to keep of `length` cached tokens: all up to dense_below, then a share rho of the rest.

    length: an int, or a float64 tensor. A result above the number of blocks there means all of them.
    """
    beyond = (length - rule.dense_below) * rule.rho // 1                    # tokens, rounded down
    tokens = rule.dense_below + beyond
    return -(-tokens // rule.block)                                         # rounded up


def kept_blocks(length, rule):
    """Blocks that are read of `length` cached tokens: the budget, and besides it the sinks and locals."""
    return budget(length, rule) + rule.sinks + rule.locals


def mean_scores(q, k, means, block):
    """Scores [B, G, N] of N blocks: q [B, H, D], averaged in its group, times the mean key of each block.

    k [B, G, S, D], means [B, G, N, D]. Only ranks matter, so there is no scale.
    """
    G = k.shape[1]
    queries = q.unflatten(1, (G, -1))                                       # [B, G, H/G, D]
    query = queries.mean(2)                                                 # [B, G, D]
    scores = means @ query[..., None]                                       # [B, G, N, 1]
    return scores[..., 0]


def choose(scores, start, count, rule):
    """[B, G, count] blocks, best first: sinks and locals before all others, then by score [B, G, N].

    start: 0-dim. Only whole blocks are choices: if fewer than `count` are there, the last entries are none.
    """
    N = scores.shape[-1]
    blocks = torch.arange(N, device=scores.device)
    whole = start // rule.block                         # of the N; what is behind is not cached
    first = blocks < rule.sinks
    latest = blocks >= whole - rule.locals
    scores = scores.masked_fill(first | latest, torch.inf)
    scores = scores.masked_fill(blocks >= whole, -torch.inf)
    return scores.topk(count).indices


def sparse_attend(q, k, v, mask, carry, how):
    """`attend` over the kept blocks of cached keys, the partial block behind them and the pass's own tokens.

    how: (layer, whether it is an anchor, verify.Blocks). An anchor chooses blocks, each key head its own;
    the other layers reuse its choice.
    """
    layer, anchor, rule = how
    S = k.shape[2]
    cached = S - q.shape[2]                             # in a compiled pass, the most there can be
    whole = cached // rule.block
    count = int(kept_blocks(cached, rule))
    if count >= whole:                                  # nothing to leave out
        return attend(q, k, v, mask, carry)
    if anchor or 'blocks' not in carry:
        start = carry['start']
        mask = full_mask(mask, q, k)
        query = choosing_query(q, carry['real'], rule.query_from)           # [B, H, D]
        means = carry['means'][layer][:, :, :whole]                         # [B, G, whole, D]
        scores = rule.scores(query, k, means, rule.block)                   # [B, G, whole]
        blocks = choose(scores, start, count, rule)                         # [B, G, count]
        reads = kept_keys(blocks, S, mask, start, rule)
        choice = dict(blocks=blocks, block=rule.block, reads=reads)
        carry = carry | choice
    places, seen = carry['reads']
    out = attend_kept(q, k, v, places, seen)
    return out, carry


def choosing_query(q, real, query_from):
    """[B, H, D]: the query that chooses for the whole pass, from q [B, H, T, D]; padding has no say.

    root: the first (where the target lags behind, the oldest unread token's); last; or the mean of all.
    """
    T = q.shape[2]
    places = torch.arange(T, device=q.device)
    if query_from == 'root':
        asked = places < 1
    elif query_from == 'last':
        asked = places == real - 1
    else:
        asked = places < real
    weights = asked / asked.sum()                                           # [T], they sum to 1
    return weights.to(q) @ q


def kept_keys(blocks, S, mask, start, rule):
    """(places [B, G, K], mask [T, K]) of the keys in these blocks and of all from the partial block on.

    K is one number for every `start` (a compiled pass's S is the whole cache); the mask hides what is spare.
    """
    B, G = blocks.shape[:2]
    inside, inside_mask = block_keys(blocks, mask, start, rule)
    behind, behind_mask = last_keys(S, mask, start, rule.block)
    behind = behind.expand(B, G, -1)
    places = torch.cat([inside, behind], 2)
    masks = torch.cat([inside_mask, behind_mask], 1)
    return places, masks


def block_keys(blocks, mask, start, rule):
    """(places [B, G, count block], mask [T, count block]) of the keys in blocks [B, G, count].

    `count` is what the fullest cache keeps; blocks past what is kept at this `start` are masked.
    """
    block = rule.block
    T = mask.shape[0]
    ranks = torch.arange(blocks.shape[-1], device=mask.device)
    whole = start // block
    fewer = kept_blocks(start.double(), rule)
    alive = (ranks < fewer) & (ranks < whole)                               # [count]
    seen = mask.new_zeros(len(ranks))
    seen = seen.masked_fill(~alive, -torch.inf)
    seen = seen.repeat_interleave(block).expand(T, -1)                      # [T, count block]
    offsets = torch.arange(block, device=mask.device)
    places = blocks[..., None] * block + offsets                            # [B, G, count, block]
    return places.flatten(2), seen


def last_keys(S, mask, start, block):
    """(places [n], mask [T, n]) of the last n = block - 1 + T keys: the partial block and the pass's own T.

    Where the partial block is shorter than it can be, or S is near, some of them are masked.
    """
    T = mask.shape[0]
    n = min(block - 1 + T, S)
    edge = start // block * block                       # the whole blocks end, the partial one begins
    first = edge.clamp(max=S - n)
    places = first + torch.arange(n, device=mask.device)
    seen = mask.index_select(1, places)                                     # [T, n]
    seen = seen.masked_fill(places < edge, -torch.inf)  # in a whole block: not to be read twice
    return places, seen


def attend_kept(q, k, v, places, mask):
    """[B, H, T, D]: attention over the keys at these places [B, G, K] alone; mask [T, K].

    One key head at a time: its kept keys are copied together and read again while the CPU's cache holds them,
    so memory is read once and only where needed. Keys stay turned by their old positions. On CUDA, where each
    of these products is too small to launch by itself, all heads' keys are copied together.
    """
    if q.is_cuda:
        return attend_gathered(q, k, v, places, mask)
    D = q.shape[3]
    group = q.shape[1] // k.shape[1]                                        # H / G
    mask = mask.repeat(group, 1)                                            # [(H/G) T, K]
    queries = group_queries(q, k) * D ** -0.5                               # [B, G, (H/G) T, D]
    queries = queries.flatten(0, 1)                                         # [B G, (H/G) T, D]
    keys = k.flatten(0, 1)                                                  # [B G, S, D]
    values = v.flatten(0, 1)                                                # [B G, S, D]
    places = places.flatten(0, 1)                                           # [B G, K]
    outs = []
    for query, key, value, kept in zip(queries, keys, values, places):
        weights = torch.addmm(mask, query, key.index_select(0, kept).t())   # [(H/G) T, K]
        weights = weights.softmax(-1)
        outs.append(weights @ value.index_select(0, kept))                  # [(H/G) T, D]
    return torch.stack(outs).view(q.shape)


def attend_gathered(q, k, v, places, mask):
    """`attend_kept` in one gather and one attention over all heads."""
    rows = places[..., None].expand(-1, -1, -1, q.shape[3])                 # [B, G, K, D]
    return attend_grouped(q, k.gather(2, rows), v.gather(2, rows), mask)


# ------------------------------------------------------------------------------ sparse channels and experts

def sparse_swiglu(x, mlp, carry, how):
    """`swiglu` through fewer channels: those whose |silu(gate)| is below a threshold add nothing.

    how: (threshold, per token; share of the F channels that the whole pass reads, see root_channels). The
    gate is read in full, `up` and `down` where a channel was chosen. A threshold spares no time here: what is
    below it is multiplied, as a zero.
    Source: Lee et al. 2024 (CATS), eq. 4-5.
    """
    threshold, share = how
    h = functional.silu(mlp.gate_proj(x))                                   # [B, T, F]
    h = h.masked_fill(h.abs() < threshold, 0)
    carry = carry | dict(channels=h)
    if share == 1:
        h = h * mlp.up_proj(x)
        return mlp.down_proj(h), carry
    chosen = root_channels(h, share)
    carry = carry | dict(chosen=chosen)
    return chosen_swiglu(x, h, mlp, chosen), carry


def root_channels(h, share):
    """The `share` of the F channels of h [B, T, F] that are largest in the root, ascending.

    The root is the first row of a pass, as in choosing_query. The guesses behind it have no say: what a guess
    is judged by must not depend on it. The rows of a batch share one choice, of any row's root.
    """
    sizes = h[:, 0].abs().amax(0)                                           # [F]
    count = max(1, round(share * len(sizes)))
    largest = sizes.topk(count, sorted=False).indices
    return largest.sort().values


def chosen_swiglu(x, h, mlp, chosen):
    """[B, T, C]: down(h * up(x)) over the chosen channels alone; x [B, T, C], h [B, T, F].

    On a CPU some channels at a time, so that the copies of their weights stay in its cache. Fast where
    `chosen` ascends and down's weight lies channel by channel in memory (as `lab.bench pass` lays it).
    """
    step = len(chosen) if x.is_cuda else CHANNELS
    up = mlp.up_proj
    down = mlp.down_proj
    up.unpack()
    down.unpack()
    columns = down.weight.t()                                               # [F, C]
    out = x.new_zeros(x.shape) if down.bias is None else down.bias
    for some in chosen.split(step):
        bias = None if up.bias is None else up.bias[some]
        part = functional.linear(x, up.weight.index_select(0, some), bias)  # [B, T, step]
        part = part * h.index_select(-1, some)
        out = out + part @ columns.index_select(0, some)
    return out


def sparse_mix(x, moe, carry, how):
    """`mix` without a token's m lowest experts, m the largest whose share of the weight is below beta_m.

    how: beta_1, beta_2, ...; 0 never skips. Source: also Lu et al. 2024 (the case of 2 experts).
    """
    weights, chosen = route(x.flatten(0, 1), moe)                           # [N, k] each, N = B T
    most = len(how)
    sums = weights.flip(-1).cumsum(-1)                                      # [N, k], of the lowest m = 1 to k
    lowest = sums[:, :most] / weights.sum(-1, keepdim=True)                 # [N, most], their share
    skip = torch.zeros_like(chosen[:, 0])                                   # [N], the largest such m or 0
    for m, beta in enumerate(how, 1):
        skip = torch.where(lowest[:, m - 1] < beta, m, skip)
    ranks = torch.arange(moe.top_k, device=x.device)
    left = moe.top_k - skip[:, None]                                        # [N, 1]
    weights = weights.masked_fill(ranks >= left, 0)
    experts = torch.where(weights > 0, chosen, -1)
    carry = carry | dict(experts=experts, lowest=lowest)
    return blend(x, moe, weights, chosen, carry), carry


# -------------------------------------------------------------------------------------------------- grounding

def attention_rows(q, k, mask, sparsify):
    """Weights [B, T, S] that attention gives the keys, averaged over the query heads.

    Per head, weights below `sparsify` are dropped and the rest scaled to sum to 1; a row that would be empty
    (flat over > 1 / sparsify keys) stays whole. Works in place: two arrays [B, H, T, S] at its peak.
    Source: SpecGuard 2026.
    """
    B, H, T, D = q.shape
    S = k.shape[2]
    rows = group_queries(q, k) * D ** -0.5                                  # [B, G, (H/G) T, D]
    weights = rows @ k.mT                                                   # [B, G, (H/G) T, S]
    weights = weights.view(B, H, T, S).add_(mask)
    precise = torch.promote_types(weights.dtype, torch.float32)
    weights = weights.to(precise).softmax(-1)
    largest = weights.amax(-1, keepdim=True)                                # [B, H, T, 1]
    cut = sparsify * (largest >= sparsify)
    weights.masked_fill_(weights < cut, 0)
    weights.div_(weights.sum(-1, keepdim=True))
    return weights.mean(1)


def shade(weights, below, residual):
    """One layer of attention rollout -> [B, T, P]: how far each of T new tokens leans on each of P old ones.

    weights [B, T, P + T]; below: the same shades one layer further down, None at the lowest. Old tokens count
    as their own source: a row's sum over the prefix is the full product's, its spread is not (why:
    lab/specguard/README.md).
    Source: Abnar & Zuidema 2020, eq. 1; the identity's share is `residual` (theirs 0.5, SpecGuard's none).
    """
    T = weights.shape[1]
    old = weights[..., :-T]                                                 # [B, T, P]
    new = weights[..., -T:]                                                 # [B, T, T]
    if below is None:
        return (1 - residual) * old
    return (1 - residual) * (old + new @ below) + residual * below


def grounded(q, k, v, mask, carry):
    """`attend`, observed: carry['shades'] [B, T, P] rolls on for the T positions from carry['begin'] on.

    Only those rows of weights are made. carry: a dict of begin, sparsify, residual, shades (None at first),
    changed in place.
    """
    T = k.shape[2] - carry['begin']
    queries = q[:, :, -T:]                                                  # [B, H, T, D]
    rows = full_mask(mask, q, k)[-T:]                                       # [T, S]
    weights = attention_rows(queries, k, rows, carry['sparsify'])           # [B, T, S]
    carry['shades'] = shade(weights, carry['shades'], carry['residual'])
    return attend(q, k, v, mask, carry)
