"""Figures of speed and memory, each made by one command; SPEED.md shows them.

`python -m lab.bench speed` times the embedded pair or any two folders against transformers (lab/speed.py).
`memory` says what fits where. `cuda` is for ten minutes of a graphics card (lab/cuda.py).
"""
import argparse
import os
import subprocess
import sys
from pathlib import Path as File

import torch

from lab import at_least, cuda, shapes
from lab.speed import speed
from model import Transformer, require_that, read_config, read_tokenizer
from specmini import DTYPES, HERE, exit_status, pick_device

COMPUTED = 'llama-3.1-8b', 'qwen3-30b-a3b'      # of shapes.SHAPES
PAGE, WRITTEN = 1000, 16        # tokens of the run whose memory is measured; of them written


# ------------------------------------------------------------------------------------------------- memory

def memory(folders):
    """Prints a table of bytes, of these folders and of COMPUTED, in fp32 and bf16.

    Of a folder also the peak of a run of PAGE tokens on the CPU, the whole process counted.
    """
    print(f'| model | parameters | weights, fp32 | bf16 | cache of {PAGE:,} tokens, fp32 | bf16 '
          '| peak of a run, fp32 | bf16 |')
    print('|---|' + '--:|' * 7, flush=True)
    for name in COMPUTED:
        print(memory_line(name, shapes.config_of(name, None, PAGE), ['-', '-']), flush=True)
    for folder in folders:
        peaks = [in_bytes(peak_of_run(folder, dtype)) for dtype in ('fp32', 'bf16')]
        print(memory_line(File(folder).name, read_config(folder), peaks), flush=True)


def memory_line(name, config, peaks):
    """A line of the table; peaks: two texts, of fp32 and of bf16."""
    weights, cache = held_numbers(config)
    sizes = [in_bytes(size * numbers) for numbers in (weights, PAGE * cache) for size in (4, 2)]
    return '| ' + ' | '.join([name, f'{weights / 1e9:.2f} B', *sizes, *peaks]) + ' |'


def held_numbers(config):
    """(parameters of a network, numbers that its cache holds for each token)."""
    with torch.device('meta'):
        model = Transformer(config)
    weights = sum(weight.numel() for weight in model.parameters())
    return weights, 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def in_bytes(n):
    return f'{n / 1e9:.2f} GB'


def peak_of_run(folder, dtype):
    """The most bytes that a process of specmini.py on the CPU held at once, for a text of PAGE tokens."""
    tokenizer = read_tokenizer(File(folder))
    ids = tokenizer.encode((HERE / 'README.md').read_text(encoding='utf-8')).ids
    prompt = tokenizer.decode(ids[:PAGE - WRITTEN])
    flags = ['--target', folder, '--draft', 'none', '--dtype', dtype, '--device', 'cpu',
             '--max-new', str(WRITTEN), '--prompt', prompt]
    run = subprocess.Popen([sys.executable, HERE / 'specmini.py', *flags], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(run.pid, 0)
    require_that(status == 0, f'specmini.py on {folder} in {dtype} failed, for the reason above')
    return 1024 * used.ru_maxrss                        # which Linux counts in KiB


# ----------------------------------------------------------------------------------------- command line

def parse():
    parser = argparse.ArgumentParser(prog='python -m lab.bench', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('what', choices=('speed', 'memory', 'cuda'))
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto', help='auto: fp32, on CUDA bf16')
    add('--threads', type=at_least(1), default=1)
    add('--compile', action='store_true')
    add('--pair', metavar='DIR,DIR', help='target and draft (default: the embedded pair); of memory: folders')
    of_speed = parser.add_argument_group('speed')
    of_speed.add_argument('--n', type=at_least(1), default=10, help='held-out rows of each task (10)')
    of_speed.add_argument('--prompts', metavar='FILE.jsonl', help='its first n rows instead')
    of_speed.add_argument('--length', type=at_least(1), default=120, help='tokens to write at most (120)')
    of_speed.add_argument('--rounds', type=at_least(1), default=3, help='that are timed, behind one more (3)')
    of_speed.add_argument('--gamma', type=at_least(0), default=4)
    of_speed.add_argument('--draft-dtype', choices=('auto', 'int4'), default='auto',
                          help='int4: `sd` also with its draft in 4 bits')
    of_cuda = parser.add_argument_group('cuda')
    of_cuda.add_argument('--minutes', type=at_least(0, float), default=9, help='that it may take (9)')
    of_cuda.add_argument('--out', metavar='FILE', default='rows.jsonl', help='of rows (rows.jsonl)')
    return parser.parse_args()


def run(args):
    """Runs the command; returns 1 where a check of `cuda` failed, else 0."""
    if args.what == 'cuda' and args.device == 'auto':
        args.device = 'cuda'                            # refused where there is none
    args.device = pick_device(args.device)
    if args.dtype == 'auto':
        args.dtype = 'bf16' if args.device == 'cuda' else 'fp32'
    torch.set_num_threads(args.threads)
    os.environ['OMP_NUM_THREADS'] = str(args.threads)   # which an Engine respects
    if args.what == 'cuda':
        return cuda.run_all(args.device, args.dtype, args.minutes, File(args.out))
    if args.what == 'speed':
        speed(args)
    else:
        memory(args.pair.split(',') if args.pair else [])
    return 0


def main():
    """Runs the program; returns its exit status: 0, 1 where a check of `cuda` failed, 2 for bad input."""
    args = parse()
    return exit_status('lab.bench', lambda: run(args))


if __name__ == '__main__':
    sys.exit(main())
