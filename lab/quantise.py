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
from safetensors.torch import load_file
from torch.nn import functional

from lab.files import save_weights
from model import expect, whole
from specmini import exit_status


def quantiles(n, edge=0.9677083):
    """n points above 0 up to 1: scaled normal quantiles from `edge` down, the median left out."""
    points = [NormalDist().inv_cdf(edge + (0.5 - edge) * i / n) for i in range(n)]
    return [point / points[0] for point in points]


# 8 levels above zero, 7 below, and zero itself. Source: Dettmers et al. 2023 (QLoRA), section 3, NF4.
CODEBOOK = sorted([-point for point in quantiles(7)] + [0.0] + quantiles(8))


def quantise(weight, group=64):
    """The weight [out, in], each group of 64 along `in` rounded to 16 levels times its largest magnitude."""
    rows, width = weight.shape
    padded = functional.pad(weight.float(), (0, -width % group))
    groups = padded.reshape(rows, -1, group)                            # [out, groups, group]
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)        # [out, groups, 1]
    levels = torch.tensor(CODEBOOK)                                     # [16]
    borders = (levels[1:] + levels[:-1]) / 2                            # [15]
    nearest = torch.bucketize(groups / scale, borders)
    values = (levels[nearest] * scale).reshape(rows, -1)
    return values[:, :width].to(weight).contiguous()


def linear(name, tensor):
    """Whether this tensor is quantised: the projections of attention and feed-forward."""
    return name.endswith('_proj.weight') and tensor.ndim == 2


def write_copy(source, to):
    """Writes the folder `to`, which must not be there yet: `source` with its linear layers rounded.

    Both are paths.
    """
    files = sorted(source.glob('*.safetensors'))
    expect(files, f'{source}: no safetensors files')
    expect(not to.exists(), f'{to} is there already')
    to.parent.mkdir(parents=True, exist_ok=True)
    with whole(to) as copy:
        copy.mkdir()
        for file in sorted(source.glob('*.json')) + sorted(source.glob('*.jinja')):
            shutil.copy(file, copy)
        for file in files:
            weights = {}
            for name, weight in load_file(file).items():
                weights[name] = quantise(weight) if linear(name, weight) else weight
            save_weights(copy / file.name, weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('source', type=File)
    parser.add_argument('to', type=File)
    args = parser.parse_args()
    return exit_status('lab.quantise', lambda: write_copy(args.source, args.to))


if __name__ == '__main__':
    sys.exit(main())
