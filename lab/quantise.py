"""A copy of a model folder with its linear layers rounded to 4 bits: `python -m lab.quantise FROM TO`.

Fake quantisation: the values are those of 4-bit NormalFloat, stored in the original type, so that the copy
loads like any checkpoint and shows what the rounding does to a text, not how fast it could be.
"""
import argparse
import shutil
import sys
from pathlib import Path as File
from statistics import NormalDist

import torch
from safetensors.torch import load_file, save_file


def quantiles(n, edge=0.9677083):
    """n points above 0 up to 1: scaled normal quantiles from `edge` down, the median left out."""
    z = [NormalDist().inv_cdf(edge + (0.5 - edge) * i / n) for i in range(n)]
    return [x / z[0] for x in z]


# 8 levels above zero, 7 below, and zero itself. Source: Dettmers et al. 2023 (QLoRA), section 3, NF4.
CODEBOOK = sorted([-x for x in quantiles(7)] + [0.0] + quantiles(8))


def quantise(weight, group=64):
    """The weight [out, in], each group of 64 along `in` rounded to 16 levels times its largest magnitude."""
    rows, width = weight.shape
    flat = torch.nn.functional.pad(weight.float(), (0, -width % group)).reshape(rows, -1, group)
    scale = flat.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    levels = torch.tensor(CODEBOOK)
    nearest = torch.bucketize(flat / scale, (levels[1:] + levels[:-1]) / 2)
    return (levels[nearest] * scale).reshape(rows, -1)[:, :width].to(weight).contiguous()


def linear(name, tensor):
    """Whether this tensor is quantised: the projections of attention and feed-forward."""
    return name.endswith('_proj.weight') and tensor.ndim == 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('source', type=File)
    parser.add_argument('to', type=File)
    args = parser.parse_args()
    files = sorted(args.source.glob('*.safetensors'))
    if not files or args.to.exists():
        parser.exit(2, f'{args.to} is there already\n' if files else f'{args.source}: no safetensors files\n')
    args.to.mkdir(parents=True)
    for file in sorted(args.source.glob('*.json')) + sorted(args.source.glob('*.jinja')):
        shutil.copy(file, args.to)
    for file in files:
        weights = {k: quantise(w) if linear(k, w) else w for k, w in load_file(file).items()}
        save_file(weights, args.to / file.name, metadata=dict(format='pt'))


if __name__ == '__main__':
    sys.exit(main())
