"""Functions on tensors: rotary positions, attention, feed-forward, mixture of experts. No class, no state.

Every attend has one signature and every ffn another, so that a Path (model.py) can name one for each layer and the network
never branches. `carry` is whatever one layer wants to hand to the next; these dense forms pass it through.

B rows, T new tokens, S keys in view, H query heads, G key/value heads, D head size, C width, F feed-forward width, E experts.
"""
import torch
import torch.nn.functional as F


def rotate(x, cos, sin):
    """x [B, H, T, D] turned by its positions' angles; cos, sin [T, D], the first half of sin negated.

    Half-split pairs (i, i + D/2) as in every Hugging Face checkpoint, so the partner of each element is a roll by D/2 away.
    Source: Su et al. 2021 (RoFormer), eq. 34.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(q, k, v, mask, carry):
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] -> ([B, H, T, D], carry); mask [T, S] is True where a query may look.

    Query head h reads key head h // (H / G). A mask of None means that every query sees every key.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), carry


def swiglu(x, gate, up, down, carry):
    """x [B, T, C] -> ([B, T, C], carry) through F channels: down(silu(gate(x)) * up(x)). Source: Shazeer 2020, eq. 6."""
    return down(F.silu(gate(x)) * up(x)), carry


def mix(x, router, experts, top_k, renormalise, carry):
    """x [B, T, C] -> ([B, T, C], carry): each token through its top_k of the E experts, weighted by the router.

    The softmax runs over all E experts before the choice (Qwen's order; Mixtral's is the reverse), in fp32 at least.
    renormalise: the chosen weights are scaled to sum to 1. Source: Shazeer et al. 2017, eq. 2-5.
    """
    flat = x.reshape(-1, x.shape[-1])                                           # [N, C]
    scores = router(flat)                                                       # [N, E]
    weights, chosen = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).topk(top_k)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for e in chosen.unique().tolist():                                          # experts nobody chose are not read
        token, slot = (chosen == e).nonzero(as_tuple=True)
        y, carry = swiglu(flat[token], experts[e].gate_proj, experts[e].up_proj, experts[e].down_proj, carry)
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out.view_as(x), carry
