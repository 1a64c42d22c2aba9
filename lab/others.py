"""Others beside ours: `python -m lab.others --target DIR --draft DIR --prompts FILE` times greedy texts.

By `ar` and `sd`; by transformers, plain and assisted; by llama.cpp, if --llama names a build of it and GGUF
files. All write on a CPU after the same prompts, which are not timed, as many tokens (llama.cpp up to a block
more), ends ignored (by llama.cpp: forbidden). One program is held at a time, because two copies of a large
model would not fit; ours runs first and last. A row a run, in tokens/s, goes to
lab/results/PAIR/others.jsonl, and a table to the terminal.

A setting is named by its program and the length of its blocks, 0 for plain decoding; one of llama.cpp by the
file of its draft, too. `stop` is transformers' default: a block also ends where the draft is unsure.
"""
import argparse
import gc
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path as File

import pandas
import torch

from lab import at_least
from lab.judge import markdown
from lab.measure import LAB, Pair, cached_engine, moment, network, pair_of, read_stored, write_rows
from model import find_folder, naming, read_tokenizer, require_that
from specmini import Engine, add_flags, exit_status, take_threads
from verify import Autoregressive, Exact, tokens_of

# ---------------------------------------- programs: {setting: function of a prompt (ids), n tokens to write}

def ours(pair, args):
    """Each function returns tokens/s."""
    engine = Engine(pair.target, pair.draft, ignore_eos=True, dtype=pair.dtype, device='cpu')
    return {f'ours {gamma}': partial(by_ours, engine, gamma) for gamma in (0, *args.gamma)}


def by_ours(engine, gamma, ids, n):
    engine.max_new = n
    engine.open([ids])
    cycles = engine.write(ids, Exact(gamma, draft_temperature=0) if gamma else Autoregressive())
    return len(tokens_of(cycles)) / sum(cycle.seconds for cycle in cycles)


def transformers(pair, args):
    """Networks in bf16 that ignore ends; `stop` has transformers' defaults for drafts."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    made = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
            for folder in pair.folders]
    made[0].generation_config = GenerationConfig(pad_token_id=0)
    constant = dict(num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0)
    kinds = {'0': None, 'stop': GenerationConfig(pad_token_id=0)}
    for gamma in args.gamma:
        kinds[str(gamma)] = GenerationConfig(pad_token_id=0, num_assistant_tokens=gamma, **constant)
    return {f'transformers {name}': partial(by_transformers, *made, drafts) for name, drafts in kinds.items()}


@torch.inference_mode()
def by_transformers(target, draft, drafts, ids, n):
    """Time begins after its first step, which reads the prompt. drafts: a GenerationConfig; None: plain."""
    marks = []

    def mark(line, scores, **_):
        marks.append((line.shape[1], moment()))
        return False                                    # it goes on

    prompt = torch.tensor([ids], device=target.device)
    if drafts:
        draft.generation_config = drafts
    target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n,
                    stopping_criteria=[mark], assistant_model=draft if drafts else None)
    (first, begin), *_, (last, end) = marks
    return (last - first) / (end - begin)


def llama(pair, args):
    """A process for each run."""
    folder, target, *drafts = args.llama
    tokenizer = read_tokenizer(find_folder(pair.target))
    kinds = {'llama.cpp 0': (0, None)}
    kinds |= {f'llama.cpp {gamma} {draft.stem}': (gamma, draft) for gamma in args.gamma for draft in drafts}
    return {name: partial(by_llama, folder, tokenizer, target, *kind) for name, kind in kinds.items()}


def by_llama(folder, tokenizer, target, gamma, draft, ids, n):
    """Plain decoding is of random tokens after as many: it takes as long, and llama-bench chooses none."""
    usual = '-m', target, '-t', torch.get_num_threads(), '-n'
    if not gamma:
        return float(found(r'"avg_ts": ([\d.]+)', folder / 'llama-bench', *usual, n, '-d', len(ids) - 1,
                           '-p', 0, '-r', 1, '-o', 'json'))
    return float(found(
        rf'encoded +{len(ids)} tokens(?s:.*)decoded .* speed: +([\d.]+)', folder / 'llama-speculative-simple',
        *usual, n - 1, '-c', len(ids) + n + 2 * gamma, '-md', draft, '--spec-type', 'draft-simple',
        '--spec-draft-n-max', gamma, '--temp', 0, '--ignore-eos', '--no-escape', '--override-kv',
        'tokenizer.ggml.add_bos_token=bool:false', '-p', tokenizer.decode(ids, skip_special_tokens=False)))


def found(pattern, *command):
    """What the pattern's group is in what a command prints; BadInput where it prints something else."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, errors='replace')
    match = re.search(pattern, printed := done.stdout + done.stderr)
    require_that(match, f'{command[0]}: expected {pattern}, its output ends with {printed[-200:]!r}')
    return match[1]


# ------------------------------------------------------------------------------------------------ the program

def measured(pair, args, prompts):
    """Yields the rows of each text by each program in turn."""
    programs = [ours, transformers] + [llama] * bool(args.llama) + [ours]
    for turn, load in enumerate(programs):
        runs = load(pair, args)
        for write in runs.values():
            write(prompts[0].ids, pair.max_new)         # what is done for the first time takes longer
        for prompt in prompts:
            order = random.Random(f'{turn} {prompt.name}').sample(list(runs), len(runs))
            yield [prompt.name | dict(turn=turn, setting=name, rate=runs[name](prompt.ids, pair.max_new))
                   for name in order]
        del runs, write
        gc.collect()                                    # networks hold themselves in circles


def table(rows):
    """A frame, a row a setting: its speed over its own plain decoding, and speeds of ours over it.

    Each cell is the median over texts, and the lowest to the highest; ours is the mean of both turns.
    """
    frame = pandas.DataFrame(rows)
    rates = frame.groupby(['family', 'place', 'setting']).rate.mean().unstack()
    best = rates.filter(regex='ours [^0]').sum().idxmax()

    def ratio(a, b):
        ratios = rates[a] / rates[b]
        return f'{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})'
    return pandas.DataFrame([{
        'setting': name, 'over its own plain decoding': ratio(name, name.split()[0] + ' 0'),
        '`ar` over it': ratio('ours 0', name), f'`sd gamma={best.split()[1]}` over it': ratio(best, name)}
        for name in frame.setting.unique()])


def run():
    parser = argparse.ArgumentParser(prog='python -m lab.others', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('--n', type=at_least(1), default=2, help='prompts of each family (2)')
    add('--prompts', metavar='FILE', nargs='+', required=True, help='JSON lines')
    add('--gamma', type=at_least(1), nargs='+', default=[2, 4, 6], help='lengths of the blocks (2 4 6)')
    add('--llama', metavar=('DIR', 'FILE'), nargs='+', type=File, default=[],
        help='a build of llama.cpp; GGUF files of the target, then of drafts')
    add_flags(parser, Pair)
    args = parser.parse_args()
    require_that(len(args.llama) != 1 and all(map(File.exists, args.llama)),
                 f'--llama {" ".join(map(str, args.llama))}: expected a folder, then files that are there')
    with naming('pip install it', ImportError):
        rivals = dict(transformers=metadata.version('transformers'))
    for name in ('llama-bench', 'llama-speculative-simple') if args.llama else ():
        rivals['llama.cpp'] = found('version: (.*)', args.llama[0] / name, '--version')
    pair = pair_of(args)
    two_steps = pair.max_new > max(20, *args.gamma) + 1     # transformers' default is 20
    require_that(pair.device == 'cpu' and pair.draft and two_steps,
                 'expected --device cpu, --draft DIR and --max-new above 21 and gamma + 1')
    take_threads(network(pair.target, pair.device, pair.dtype, 16)[0])
    prompts = pair.texts((), args.n)
    cached_engine.cache_clear()                         # each program makes its own
    network.cache_clear()
    gc.collect()
    where = LAB / 'results' / pair.name / 'others.jsonl'
    head = replace(pair, ignore_eos=True).head(
        n=args.n, rivals=rivals, theirs=['bf16', *(path.name for path in args.llama[1:])])
    write_rows(where, head, measured(pair, args, prompts))
    print(*markdown(table(read_stored(where).rows)), sep='\n')


main = partial(exit_status, 'lab.others', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
