"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

Every attend has one signature, every dense feed-forward another, every mixture a third, so that a Path
(model.py) names one for each layer and the layers need not know which. `carry` is whatever one layer hands to
the next; these dense forms pass it on.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward
width, E experts.
"""
import torch
import torch.nn.functional as F


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
