"""The README's figures, each made by one command.

`python -m lab.bench quality` grades the embedded models on held-out rows. `speed` times the embedded pair, a
random one of 0.1 B parameters or any two folders against transformers (lab/speed.py). `pass` times one
verifying pass, dense and sparse (lab/sparse/passes.py), and `blocks` draws what it reads. `memory` says what
fits where. `cuda` runs all that wants a graphics card and prints one table (lab/cuda.py). `endurance`,
`long`, `seeds` and `rounding` are of long runs: memory, 2,000 tokens, the same seed again, fewer bits
(lab/endurance.py).
"""
import argparse
import math as maths
import os
import statistics
import subprocess
import sys
from pathlib import Path as File

import torch
from torch.nn import functional
from tqdm import tqdm

from lab import cuda, endurance, tasks
from lab.common import held_out_rows
from lab.sparse import passes
from lab.speed import speed
from model import Transformer, expect, load, read_calibration, read_config, read_tokenizer
from specmini import DTYPES, HERE, Engine, exit_status, pick_device
from verify import Autoregressive, Exact, tokens_of

HOME = File(__file__).parent / 'models'


def prompts_of(rows, tokenizer):
    """The prompts of rows as lists of ids."""
    return [tokenizer.encode(row['prompt']).ids for row in rows]


def written(engine, ids, method):
    """(text, cycles) that an engine writes after a prompt."""
    cycles = engine.write(ids, method)
    return engine.tokenizer.decode(tokens_of(cycles)), cycles


# ------------------------------------------------------------------------------------------------- quality

def quality(n, device, dtype):
    """Prints a table, a row a task: n held-out rows, greedy. What each model gets right; sd with gamma 4."""
    names = [name for name in ('target', 'draft', 'mid', 'moe') if (HOME / name / 'config.json').exists()]
    engines = {}
    for name in names:
        draft = HOME / 'draft' if name == 'target' else 'none'
        engines[name] = Engine(target=HOME / name, draft=draft, max_new=200, device=device, dtype=dtype)
    print('| task |', ' | '.join(names), '| acceptance | block efficiency | `sd` = `ar` |')
    print('|---|' + '--:|' * (len(names) + 3), flush=True)
    for task in tasks.TASKS:
        cells = quality_cells(task, held_out_rows(task, n, seed=7), engines)
        print('|', ' | '.join([f'`{task}`', *cells]), '|', flush=True)


def quality_cells(task, rows, engines):
    """The texts of one row of the table: a figure for each engine, then sd's three."""
    target = engines['target']
    prompts = prompts_of(rows, target.tokenizer)
    for engine in engines.values():
        engine.open(prompts)
    texts = {name: [] for name in engines}
    sd_cycles = []
    same = 0
    for ids in tqdm(prompts, desc=task, file=sys.stderr):
        for name, engine in engines.items():
            text, _ = written(engine, ids, Autoregressive())
            texts[name].append(text)
        text, cycles = written(target, ids, Exact())
        same += text == texts['target'][-1]
        sd_cycles += cycles
    stats = target.statistics(sd_cycles)
    cells = [figure(task, rows, texts[name], engine) for name, engine in engines.items()]
    acceptance = f'{stats["acceptance_rate"]:.1%}'
    return cells + [acceptance, f'{stats["block_efficiency"]:.2f}', f'{same} of {len(rows)}']


def figure(task, rows, texts, engine):
    """How good the texts of one model are, as words: the share right, BLEU, ROUGE-L, facts found; a
    story's perplexity."""
    if task == 'story':
        return perplexity(rows, engine)
    right = [tasks.grade(row, text) for row, text in zip(rows, texts)]
    figures = [f'{sum(right) / len(rows):.1%}']
    if task == 'translate':
        references = [[row['answer']] for row in rows]
        stripped = [text.strip() for text in texts]
        figures.append(f'BLEU {tasks.bleu(references, stripped):.2f}')
    if task == 'summary':
        rouge = statistics.fmean(tasks.rouge_l(row['answer'], text) for row, text in zip(rows, texts))
        facts = statistics.fmean(map(tasks.facts_found, rows, texts))
        figures += [f'ROUGE-L {rouge:.2f}', f'facts {facts:.1%}']
    return ', '.join(figures)


def perplexity(rows, engine):
    """A model's perplexity per token of the rows' stories over that of the grammar which made them."""
    reader = engine.readers['target']
    nats = 0.0
    grammar = 0.0
    count = 0
    for row in rows:
        prompt = engine.tokenizer.encode(row['prompt']).ids
        story = engine.tokenizer.encode(row['solution']).ids
        logits = reader.read(prompt + story[:-1], [], reader.model.full, len(story))
        wanted = torch.tensor(story, device=logits.device)
        loss = functional.cross_entropy(logits.float(), wanted, reduction='sum')
        nats += loss.item()
        grammar += row['nats']
        count += len(story)
    mine = maths.exp(nats / count)
    best = maths.exp(grammar / count)
    return f'{mine:.2f} (grammar {best:.2f}, +{mine / best - 1:.0%})'


# ------------------------------------------------------------------------------------------------- memory

COMPUTED = 'llama-3.1-8b', 'qwen3-30b-a3b'      # of passes.SHAPES
PAGE = 1000             # tokens
WRITTEN = 16            # of them, by the run whose memory is measured


def memory(folders):
    """Prints a table of bytes, of these folders and of COMPUTED, in fp32 and bf16.

    Of a folder also what a run of PAGE tokens on the CPU really held: the whole process, at its peak.
    """
    print(f'| model | parameters | weights, fp32 | bf16 | cache of {PAGE:,} tokens, fp32 | bf16 '
          '| peak of a run, fp32 | bf16 |')
    print('|---|' + '--:|' * 7, flush=True)
    for name in COMPUTED:
        print(memory_line(name, passes.config_of(name, None, PAGE), ['-', '-']), flush=True)
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
    flags = ['--target', folder, '--draft', 'none', '--dtype', dtype, '--device', 'cpu', '--threads', '1',
             '--max-new', str(WRITTEN), '--prompt', prompt]
    run = subprocess.Popen([sys.executable, HERE / 'specmini.py', *flags], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(run.pid, 0)
    expect(status == 0, f'specmini.py on {folder} in {dtype} failed, for the reason above')
    return 1024 * used.ru_maxrss                        # which Linux counts in KiB


# ----------------------------------------------------------------------------------------- command line

def blocks():
    """Prints which blocks one verifying pass reads of a table of 400 to 450 tokens."""
    target, tokenizer, _ = load(HOME / 'target')
    for row in tasks.rows('table', 7):
        if 400 < len(tokenizer.encode(row['prompt']).ids) < 450:
            break
    calibration = read_calibration(HOME / 'target', sections=['sparse'])
    for line in passes.draw_blocks(target, tokenizer, row, calibration, block=8):
        print(line)


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('what', choices=('quality', 'speed', 'pass', 'blocks', 'memory', 'cuda', 'endurance', 'long',
                                 'seeds', 'rounding'))
    add('--n', type=int, help='held-out rows of each task (300 for quality, 10 for speed), or prompts (300 '
        'for endurance, 10 for rounding)')
    add('--length', type=int, help='tokens to write at most (120; 2000 for long)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto', help='auto: fp32, on CUDA bf16')
    add('--threads', type=int, default=1)
    add('--compile', action='store_true')
    of_speed = parser.add_argument_group('speed')
    of_speed.add_argument('--pair', default='embedded', help='embedded, random, or two folders DIR,DIR; '
                          'of memory: folders, of rounding: one')
    of_speed.add_argument('--prompts', metavar='FILE.jsonl', help='its first n rows instead of held-out ones')
    of_speed.add_argument('--rounds', type=int, default=3, help='in which each prompt is written once')
    of_speed.add_argument('--gamma', type=int, default=4)
    of_pass = parser.add_argument_group('pass')
    of_pass.add_argument('--shape', choices=passes.SHAPES, default='small', help='the random model')
    of_pass.add_argument('--layers', type=int, help='fewer than the shape has')
    of_pass.add_argument('--contexts', type=int, nargs='+', default=[512, 2048, 8192])
    of_pass.add_argument('--positions', type=int, nargs='+', default=[6], help='1 to 16 new ones')
    return parser.parse_args()


def main():
    """Runs the command; returns its exit status: 0, 1 where a step of `cuda` failed, 2 for bad input."""
    args = parse()
    return exit_status('lab.bench', lambda: run(args))


def run(args):
    if args.what == 'cuda' and args.device == 'auto':
        args.device = 'cuda'                            # refused where there is none
    args.device = pick_device(args.device)
    if args.dtype == 'auto':
        args.dtype = 'bf16' if args.device == 'cuda' else 'fp32'
    torch.set_num_threads(args.threads)
    args.length = args.length or (2000 if args.what == 'long' else 120)
    if args.what == 'quality':
        quality(args.n or 300, args.device, args.dtype)
    elif args.what == 'blocks':
        blocks()
    elif args.what == 'pass':
        passes.print_forms(args)
    elif args.what == 'memory':
        memory([] if args.pair == 'embedded' else args.pair.split(','))
    elif args.what == 'speed':
        speed(args)
    elif args.what == 'endurance':
        return endurance.endurance(args.n or 300)
    elif args.what == 'long':
        return endurance.long_texts(args.length)
    elif args.what == 'seeds':
        return endurance.seeds(args.length, args.compile)
    elif args.what == 'rounding':
        folder = HOME / 'target' if args.pair == 'embedded' else args.pair
        endurance.rounding(folder, args.prompts, args.n or 10, args.length)
    else:
        return cuda.run_all(args.device, args.dtype)
    return 0


if __name__ == '__main__':
    sys.exit(main())
