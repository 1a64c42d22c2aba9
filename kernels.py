"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

Every attend has one signature, every dense feed-forward another, every mixture a third, so that a Path
(model.py) names one for each layer and the layers need not know which. `carry` is whatever one layer hands to
the next; these dense forms pass it on.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward
width, E experts.
"""
import math

import torch
import torch.nn.functional as F


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
    scale = growth(1)
    if 'attention_factor' in rope:
        scale = rope['attention_factor']
    elif rope.get('mscale') and rope.get('mscale_all_dim'):
        scale = growth(rope['mscale']) / growth(rope['mscale_all_dim'])
    return inv * (1 - ramp) + inv / factor * ramp, scale


def rotate(x, cos, sin):
    """x [B, H, T, D] turned by its positions' angles; cos, sin [T, D], the first half of sin negated.

    Half-split pairs (i, i + D/2), as in Hugging Face checkpoints: a roll by D/2 brings the partners together.
    Source: Su et al. 2021 (RoFormer), eq. 34.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(q, k, v, mask, carry):
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] -> ([B, H, T, D], carry).

    mask [T, S] is 0 where a query may look, else -inf. Query head h reads key head h // (H / G).
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries).
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), carry


def swiglu(x, gate, up, down, carry):
    """x [B, T, C] -> ([B, T, C], carry) through F channels: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, eq. 6.
    """
    return down(F.silu(gate(x)) * up(x)), carry


def mix(x, router, experts, top_k, renormalise, carry):
    """x [B, T, C] -> ([B, T, C], carry): each token through its top_k of the E experts, by router weight.

    The softmax runs over all E experts before the choice (Qwen's order; Mixtral's is the reverse).
    renormalise: the chosen weights are scaled to sum to 1. Source: Shazeer et al. 2017, eq. 2-5.
    """
    flat = x.reshape(-1, x.shape[-1])                                       # [N, C]
    scores = router(flat)                                                   # [N, E]
    weights, chosen = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).topk(top_k)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for e in chosen.unique().tolist():                                      # the others are not read
        token, slot = (chosen == e).nonzero(as_tuple=True)
        expert = experts[e]
        y, carry = swiglu(flat[token], expert.gate_proj, expert.up_proj, expert.down_proj, carry)
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out.view_as(x), carry
