"""Figures of speed, each made by one command; SPEED.md shows them.

`python -m lab.bench speed` times the embedded pair or any two folders against transformers (lab/speed.py).
`cuda` is for ten minutes of a graphics card (lab/cuda.py).
"""
import argparse
import sys
from pathlib import Path as File

import torch

from lab import at_least, cuda
from lab.speed import speed
from model import require_that
from specmini import DTYPES, exit_status


def parse():
    parser = argparse.ArgumentParser(prog='python -m lab.bench', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('what', choices=('speed', 'cuda'))
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto', help='auto: as in specmini.py')
    add('--threads', type=at_least(1), default=1)
    add('--compile', action='store_true')
    of_speed = parser.add_argument_group('speed')
    of_speed.add_argument('--pair', metavar='DIR,DIR', help='target and draft (default: the embedded pair)')
    of_speed.add_argument('--n', type=at_least(1), default=10, help='held-out rows of each task (10)')
    of_speed.add_argument('--prompts', metavar='FILE.jsonl', help='its first n rows instead')
    of_speed.add_argument('--length', type=at_least(1), default=120, help='tokens to write at most (120)')
    of_speed.add_argument('--rounds', type=at_least(1), default=3, help='that are timed, after one more (3)')
    of_speed.add_argument('--gamma', type=at_least(0), default=4)
    of_cuda = parser.add_argument_group('cuda')
    of_cuda.add_argument('--minutes', type=at_least(0, float), default=9, help='that it may take (9)')
    of_cuda.add_argument('--out', metavar='FILE', default='rows.jsonl', help='of rows (rows.jsonl)')
    return parser.parse_args()


def run(args):
    """Runs the command; returns 1 where a check of `cuda` failed."""
    torch.set_num_threads(args.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)         # as specmini.take_threads does
    if args.what == 'speed':
        return speed(args)
    device = 'cpu' if args.device == 'cpu' else 'cuda'
    require_that(device == 'cpu' or torch.cuda.is_available(), 'there is no CUDA device; give --device cpu')
    dtype = args.dtype if args.dtype != 'auto' else 'bf16' if device == 'cuda' else 'fp32'
    return cuda.run_all(device, dtype, args.minutes, File(args.out))


def main():
    args = parse()
    return exit_status('lab.bench', lambda: run(args))


if __name__ == '__main__':
    sys.exit(main())
