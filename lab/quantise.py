"""Rounding of linear layers to 4 bits, for the noisier drafts of ECSV.

The values are those of 4-bit NormalFloat, stored in the original type: they show what the rounding does to a
text, not how fast it could be.
"""
from statistics import NormalDist

import torch
from torch.nn import functional


def quantiles(n, edge=0.9677083):
    """n points above 0 up to 1: scaled normal quantiles from `edge` down, the median left out."""
    points = [NormalDist().inv_cdf(edge + (0.5 - edge) * i / n) for i in range(n)]
    return [point / points[0] for point in points]


# 8 levels above zero, 7 below, and zero itself. Source: Dettmers et al. 2023 (QLoRA), section 3, NF4.
CODEBOOK = sorted([-point for point in quantiles(7)] + [0.0] + quantiles(8))


def quantise(weight, group=64):
    """The weight [..., in], each group of 64 along `in` rounded to 16 levels times its largest magnitude.

    No group spans two rows, so a fused matrix gets the values that its parts would get alone.
    """
    width = weight.shape[-1]
    padded = functional.pad(weight.float(), (0, -width % group))
    groups = padded.unflatten(-1, (-1, group))                          # [..., groups, group]
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)        # [..., groups, 1]
    levels = torch.tensor(CODEBOOK)                                     # [16]
    borders = (levels[1:] + levels[:-1]) / 2                            # [15]
    nearest = torch.bucketize(groups / scale, borders)
    values = (levels[nearest] * scale).flatten(-2)
    return values[..., :width].to(weight).contiguous()


def linear(name, tensor):
    """True if this tensor is rounded: the projections of attention, of feed-forwards and of experts."""
    return '_proj' in name and tensor.ndim > 1
