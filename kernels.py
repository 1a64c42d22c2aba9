"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

Every attend has one signature, every feed-forward and mixture another, so that a Path (model.py) can name
one for each layer. `carry` is whatever one layer hands to the next; these dense forms pass it on.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward
width, E experts.
"""
import math

import torch
import torch.nn.functional as F

FEW, MANY = 8, 1024     # so few queries over so many keys: those of one key head are the rows of one product,
                        # on a CPU up to 1.7 times as fast, since a key is read once and not H / G times


def rope_table(rope, D, length):
    """cos, sin [length, D] in fp64, from a Config's rope; the first half of sin is negated (see rotate).

    Source: Chen et al. 2023 (linear); Peng et al. 2023 (yarn); Dubey et al. 2024 (llama3, by wavelength).
    """
    inv = rope['rope_theta'] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)       # [D/2]
    scale = 1.0
    if rope['rope_type'] == 'linear':
        inv = inv / rope['factor']
    elif rope['rope_type'] == 'llama3':
        turns = rope['original_max_position_embeddings'] * inv / (2 * math.pi)  # turns in the old context
        low, high = rope['low_freq_factor'], rope['high_freq_factor']
        keep = ((turns - low) / (high - low)).clamp(0, 1)                       # 1: fast, kept; 0: stretched
        inv = keep * inv + (1 - keep) * inv / rope['factor']
    elif rope['rope_type'] == 'yarn':
        inv, scale = yarn(rope, D, inv)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inv)                 # [S, D/2]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def yarn(rope, D, inv):
    """Yarn's frequencies [D/2] and its factor on cos and sin: fast channels stay, slow ones are stretched."""
    old, factor = rope['original_max_position_embeddings'], rope['factor']
    channel = lambda turns: (D * math.log(old / (turns * 2 * math.pi))      # which makes so many turns in old
                             / (2 * math.log(rope['rope_theta'])))
    low, high = channel(rope.get('beta_fast') or 32), channel(rope.get('beta_slow') or 1)
    if rope.get('truncate', True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = ((torch.arange(D // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    growth = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    both = rope.get('mscale') and rope.get('mscale_all_dim')
    scale = growth(rope['mscale']) / growth(rope['mscale_all_dim']) if both else growth(1)
    return inv * (1 - ramp) + inv / factor * ramp, rope.get('attention_factor') or scale


def rotate(x, cos, sin):
    """x [B, H, T, D] turned by its positions' angles; cos, sin [T, D], the first half of sin negated.

    Half-split pairs (i, i + D/2), as in Hugging Face checkpoints: a roll by D/2 brings the partners together.
    Source: Su et al. 2021 (RoFormer), eq. 34.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(q, k, v, mask, carry):
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] -> ([B, H, T, D], carry).

    mask [T, S] is 0 where a query may look, else -inf: the causal one where T = S, whatever is given. Query
    head h reads key head h // (H / G).
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries).
    """
    if (T := q.shape[2]) == k.shape[2]:         # a whole text: what is masked need not be computed at all
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), carry
    if T > FEW or k.shape[2] < MANY:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), carry
    rows, seen = q.reshape(*k.shape[:2], -1, q.shape[3]), mask.repeat(q.shape[1] // k.shape[1], 1)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=seen).reshape(q.shape), carry


def swiglu(x, mlp, carry):
    """x [B, T, C] -> ([B, T, C], carry) through F channels: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, eq. 6.
    """
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), carry


def route(flat, moe):
    """(weights [N, k], chosen [N, k]): each token's likeliest experts, likeliest first, not yet renormalised.

    The softmax runs over all E experts before the choice (Qwen's order; Mixtral's is the reverse).
    Source: Shazeer et al. 2017, eq. 2-5.
    """
    scores = moe.gate(flat)                                                 # [N, E]
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).topk(moe.top_k)


def blend(x, moe, weights, chosen, carry):
    """x [B, T, C] -> [B, T, C]: each token through its experts, chosen [B T, k], by weight; 0 is not run."""
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if torch.compiler.is_compiling():
        return blend_pairs(x, moe, weights, chosen, carry['real'])
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))          # [B T, C]
    for e in chosen[weights != 0].unique().tolist():    # the others are not read; a NaN is, and shows
        token, slot = ((chosen == e) & (weights != 0)).nonzero(as_tuple=True)
        y, _ = swiglu(flat[token], moe.experts[e], None)
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out.view_as(x)


def blend_pairs(x, moe, weights, chosen, real):
    """`blend` in constant sizes: every pair of token and slot multiplies its own expert's weights.

    Their rows are picked inside a sum, which inductor reads in place, without a copy. Padding and slots of
    weight 0 read a single row over and over, of an expert that the first token reads anyway.
    """
    T, k = x.shape[1], chosen.shape[1]
    weights, chosen = weights.view(-1, T, k, 1).to(x.dtype), chosen.view(-1, T, k, 1)
    used = (weights > 0) & (torch.arange(T, device=x.device) < real)[:, None, None]
    expert = torch.where(used, chosen, chosen[0, 0, 0])                     # [B, T, k, 1]

    def terms(x, stack):            # of [B, T, 1 or k, C] with its experts' rows of [E, F, C]; never stored
        rows = expert * stack.shape[1] + torch.arange(stack.shape[1], device=x.device) * used
        return x[..., None, :] * stack.flatten(0, 1)[rows]                  # [B, T, k, F, C]
    gate, up, down = moe.stacks
    h = F.silu(terms(x[:, :, None], gate).sum(-1)) * terms(x[:, :, None], up).sum(-1)
    return terms(h * weights, down).sum((2, 4))


def mix(x, moe, carry):
    """x [B, T, C] -> ([B, T, C], carry): each token through its top_k of the E experts, by router weight."""
    return blend(x, moe, *route(x.flatten(0, 1), moe), carry), carry


# ------------------------------------------------------------- sparse forms (what is left out: verify.Sparse)
# Their carry is a dict: start (cached tokens), real (tokens of the pass that are no padding), means (of each
# layer's blocks of keys) and the latest choice. Source, unless said: "Accelerate speculative decoding with
# sparse computation in verification" (2025).

def budget(length, rule):
    """Blocks to keep of `length` cached tokens: all up to dense_below, then a share rho of the rest.

    length: an int, or a float64 tensor; a result past the blocks there are means all of them.
    """
    tokens = (length - rule.dense_below) * rule.rho // 1 + rule.dense_below
    return -(-tokens // rule.block)


def mean_scores(q, k, means, block):
    """[B, G, N]: q [B, H, D], averaged over the query heads of a group, times the mean key of each block.

    k [B, G, S, D], means [B, G, N, D]; only ranks matter, so there is no scale.
    """
    return (means @ q.unflatten(1, (k.shape[1], -1)).mean(2)[..., None])[..., 0]


def choose(scores, start, count, rule):
    """[B, G, count] blocks, best first: sinks and locals before all others, then by score [B, G, N].

    start: 0-dim. Whole blocks alone are chosen; if they are fewer than `count`, those behind are no choice.
    """
    blocks, whole = torch.arange(scores.shape[-1], device=scores.device), start // rule.block
    always = (blocks < rule.sinks) | (blocks >= whole - rule.locals)
    return scores.masked_fill(always, torch.inf).masked_fill(blocks >= whole, -torch.inf).topk(count).indices


def sparse_attend(q, k, v, mask, carry, how):
    """`attend` over the kept blocks of cached keys, the partial block behind them and the pass's own tokens.

    how: (layer, whether it is an anchor, verify.Blocks). An anchor chooses, each key head its own, by the
    query that the rule names (root: the first, in a lag the oldest unread token's); others reuse the choice.
    """
    layer, anchor, rule = how
    old = k.shape[2] - q.shape[2]               # cached tokens; in a compiled pass, the most there can be
    whole, count = old // rule.block, max(int(budget(old, rule)), rule.sinks + rule.locals)
    if count >= whole:                                                      # nothing to leave out
        return attend(q, k, v, mask, carry)
    if anchor or 'blocks' not in carry:
        at, real = torch.arange(q.shape[2], device=q.device), carry['real']
        rows = dict(root=at < 1, last=at == real - 1, mean=at < real)[rule.query_from]
        query = (rows / rows.sum()).to(q) @ q                               # [B, H, D]; none from padding
        scores = rule.scores(query, k, carry['means'][layer][:, :, :whole], rule.block)
        blocks = choose(scores, carry['start'], count, rule)
        carry = carry | dict(blocks=blocks, block=rule.block,
                             reads=kept_keys(blocks, k.shape[2], mask, carry['start'], rule))
    return attend_kept(q, k, v, *carry['reads']), carry


def kept_keys(blocks, S, mask, start, rule):
    """(places [B, G, K], mask [T, K]) of the keys in these blocks and of all from the partial block on.

    K is one number for every `start` (a compiled pass's S is the whole cache); the mask hides what is spare.
    """
    block, T = rule.block, mask.shape[0]
    width = min(block - 1 + T, S)                                           # of the window at the end
    window = (start // block * block).clamp(max=S - width) + torch.arange(width, device=mask.device)
    seen = mask.index_select(1, window).masked_fill(window < start // block * block, -torch.inf)
    ranks = torch.arange(blocks.shape[-1], device=mask.device)
    least = budget(start.double(), rule).clamp(min=rule.sinks + rule.locals)
    alive = (ranks < least) & (ranks < start // block)
    bias = mask.new_zeros(len(ranks)).masked_fill(~alive, -torch.inf).repeat_interleave(block).expand(T, -1)
    places = (blocks[..., None] * block + torch.arange(block, device=mask.device)).flatten(2)
    return torch.cat([places, window.expand(*places.shape[:2], -1)], 2), torch.cat([bias, seen], 1)


def attend_kept(q, k, v, places, mask):
    """[B, H, T, D]: attention over the keys at these places alone.

    One key head at a time: its kept keys are copied together and read again while the CPU's cache holds them,
    so memory is read once and only where needed. Keys stay turned by their old positions.
    """
    D, mask, out = q.shape[3], mask.repeat(q.shape[1] // k.shape[1], 1), []             # [(H/G) T, K]
    queries = q.reshape(-1, len(mask), D) * D ** -0.5                                   # [B G, (H/G) T, D]
    for rows, keys, values, kept in zip(queries, k.flatten(0, 1), v.flatten(0, 1), places.flatten(0, 1)):
        weights = torch.addmm(mask, rows, keys.index_select(0, kept).t()).softmax(-1)
        out.append(weights @ values.index_select(0, kept))
    return torch.stack(out).view(q.shape)


def sparse_swiglu(x, mlp, carry, how):
    """`swiglu` through fewer channels: those whose |silu(gate)| is below a threshold add nothing.

    how: (threshold, per token; share of the F channels, the largest, that the whole pass reads). The gate is
    read in full, `up` and `down` where a channel was chosen. Source: Lee et al. 2024 (CATS), eq. 4-5.
    """
    threshold, share = how
    h = F.silu(mlp.gate_proj(x))                                            # [B, T, F]
    h = h.masked_fill(h.abs() < threshold, 0)
    carry = carry | dict(channels=h)
    if share == 1:
        return mlp.down_proj(h * mlp.up_proj(x)), carry
    size = h.abs().masked_fill((torch.arange(x.shape[1], device=x.device) >= carry['real'])[:, None], 0)
    chosen = size.amax((0, 1)).topk(max(1, round(share * h.shape[-1])), sorted=False).indices.sort().values
    return chosen_swiglu(x, h, mlp, chosen), carry | dict(chosen=chosen)


def chosen_swiglu(x, h, mlp, chosen, step=128):
    """down(h * up(x)) over the chosen channels alone, `step` at a time so that their copies stay cached.

    Fast where `chosen` ascends and down's weight lies channel by channel in memory (as in lab/passes.py).
    """
    up, down = mlp.up_proj, mlp.down_proj
    out = x.new_zeros(x.shape) if down.bias is None else down.bias
    for some in chosen.split(step):
        u = F.linear(x, up.weight.index_select(0, some), None if up.bias is None else up.bias[some])
        out = out + (u * h.index_select(-1, some)) @ down.weight.t().index_select(0, some)
    return out


def sparse_mix(x, moe, carry, how):
    """`mix` without a token's m lowest experts, m the largest whose share of the weight is below beta_m.

    how: beta_1, beta_2, ...; 0 never skips. Source: also Lu et al. 2024 (the case of 2 experts).
    """
    weights, chosen = route(x.flatten(0, 1), moe)
    lowest = weights.flip(-1).cumsum(-1)[:, :len(how)] / weights.sum(-1, keepdim=True)      # [N, m]
    skip = ((lowest < lowest.new_tensor(how)) * torch.arange(1, len(how) + 1, device=x.device)).amax(-1)
    weights = weights.masked_fill(torch.arange(moe.top_k, device=x.device) >= moe.top_k - skip[:, None], 0)
    carry = carry | dict(experts=torch.where(weights > 0, chosen, -1), lowest=lowest)
    return blend(x, moe, weights, chosen, carry), carry


def attention_rows(q, k, mask, sparsify):
    """Weights [B, T, S] that attention gives the keys, averaged over the query heads.

    Per head, weights below `sparsify` are dropped and the rest scaled to sum to 1; a row that would be empty
    (flat over > 1 / sparsify keys) stays whole. Two arrays [B, H, T, S] at its peak. Source: SpecGuard 2026.
    """
    rows = q.reshape(*k.shape[:2], -1, q.shape[3]) * q.shape[3] ** -0.5     # [B, G, (H/G) T, D]
    weights = (rows @ k.mT).view(*q.shape[:3], -1).add_(mask)               # [B, H, T, S]
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).softmax(-1)
    cut = sparsify * (weights.amax(-1, keepdim=True) >= sparsify)
    weights.masked_fill_(weights < cut, 0)
    return weights.div_(weights.sum(-1, keepdim=True)).mean(1)


def shade(weights, below, residual):
    """One layer of attention rollout -> [B, T, P]: how far each of T new tokens leans on each of P old ones.

    weights [B, T, P + T]; below: the same shades one layer further down, None at the lowest. Old tokens count
    as their own source: a row's sum over the prefix is the full product's (see README), its spread is not.
    Source: Abnar & Zuidema 2020, eq. 1; the identity's share is `residual` (theirs 0.5, SpecGuard's none).
    """
    T = weights.shape[1]
    old, new = weights[..., :-T], weights[..., -T:]
    if below is None:
        return (1 - residual) * old
    return (1 - residual) * (old + new @ below) + residual * below


def grounded(q, k, v, mask, carry):
    """`attend`, observed: carry['shades'] [B, T, P] rolls on for the positions from carry['begin'] on.

    Only those rows are made. carry: dict of begin, sparsify, residual, shades (None at first).
    """
    new = k.shape[2] - carry['begin']
    weights = attention_rows(q[:, :, -new:], k, mask[-new:], carry['sparsify'])
    carry['shades'] = shade(weights, carry['shades'], carry['residual'])
    return attend(q, k, v, mask, carry)
