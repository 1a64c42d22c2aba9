"""Others beside ours: `python -m lab.others --target DIR --draft DIR --prompts FILE` times greedy texts.

By `ar` and `sd`; by transformers, plain and assisted; by llama.cpp, if --gguf names copies of the models. All
write on a CPU after the same prompts, which are not timed, as many tokens, ends ignored. One program is held
at a time, because two copies of a large model would not fit; ours runs first and last. A row a run, in
tokens/s, goes to lab/results/PAIR/others.jsonl, and a table to the terminal.

A setting is named by its program and the length of its blocks, 0 for plain decoding. `stop`: a block ends
where the draft is unsure, too. That of transformers is its default, length and all.
"""
import argparse
import gc
import random
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
from model import naming, require_that
from specmini import Engine, add_flags, exit_status, take_threads
from verify import Autoregressive, Exact, tokens_of

UNSURE = 0.75           # p_min of `stop`: llama.cpp's default until it became 0
THEIR_BLOCK = 20        # tokens that transformers drafts at most by default


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
    """Its first step reads the prompt; time begins when that step ends, and tokens are counted from there.

    drafts: the draft's GenerationConfig; None: plain decoding.
    """
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
    """A server for each setting, in this process."""
    kinds = {'0': (0, 0.0)}
    for gamma in args.gamma:
        kinds |= {str(gamma): (gamma, 0.0), f'{gamma} stop': (gamma, UNSURE)}
    return {f'llama.cpp {name}': partial(by_llama, load_llama(pair, *args.gguf, *kind))
            for name, kind in kinds.items()}


def load_llama(pair, target, draft, gamma, p_min):
    """A server; target, draft: GGUF files, whose pages in memory all servers share."""
    import xllamacpp
    params = xllamacpp.CommonParams()
    drafts = params.speculative.draft
    params.model.path, params.verbosity, params.fit_params = target, 0, False
    params.n_ctx = pair.longest + pair.max_new + 32
    for threads in params.cpuparams, params.cpuparams_batch, drafts.cpuparams, drafts.cpuparams_batch:
        threads.n_threads = torch.get_num_threads()
    if gamma:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafts.mparams.path, drafts.n_max, drafts.n_min, drafts.p_min = draft, gamma, 0, p_min
    return xllamacpp.Server(params)


def by_llama(server, ids, n):
    """Its time begins after the first token. It forbids ends, where the others write them and go on."""
    times = server.handle_completions(dict(
        prompt=ids, n_predict=n, temperature=0, samplers=['top_k'], top_k=1, ignore_eos=True,
        cache_prompt=False))['timings']
    return 1000 * (times['predicted_n'] - 1) / times['predicted_ms']


# ------------------------------------------------------------------------------------------------ the program

def measured(pair, args, prompts):
    """Yields the rows of each text by each program in turn."""
    programs = [ours, transformers] + [llama] * bool(args.gguf) + [ours]
    for turn, load in enumerate(programs):
        runs = load(pair, args)
        for write in runs.values():
            write(prompts[0].ids[:8], pair.max_new)     # what is done for the first time takes longer
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
    mine = [name for name in rates if name.startswith('ours') and name != 'ours 0']
    best = rates[mine].sum().idxmax()

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
    add('--gamma', type=at_least(1), nargs='+', default=[3, 5], help='lengths of the blocks (3 5)')
    add('--gguf', metavar=('TARGET', 'DRAFT'), nargs=2, help='files of the two models for llama.cpp')
    add_flags(parser, Pair)
    args = parser.parse_args()
    for file in args.gguf or ():
        require_that(File(file).is_file(), f'--gguf {file}: there is no such file')
    with naming('pip install it', ImportError):
        rivals = {name: metadata.version(name) for name in ['transformers'] + ['xllamacpp'] * bool(args.gguf)}
    pair = pair_of(args)
    two_steps = pair.max_new > max(THEIR_BLOCK, *args.gamma) + 1
    require_that(pair.device == 'cpu' and pair.draft and two_steps,
                 f'expected --device cpu, --draft DIR and --max-new above {THEIR_BLOCK + 1} and gamma + 1')
    take_threads(network(pair.target, pair.device, pair.dtype)[0])
    prompts = pair.texts((), args.n)
    cached_engine.cache_clear()                         # each program makes its own
    network.cache_clear()
    gc.collect()
    where = LAB / 'results' / pair.name / 'others.jsonl'
    head = replace(pair, ignore_eos=True).head(n=args.n, rivals=rivals, theirs='bf16')
    write_rows(where, head, measured(pair, args, prompts))
    print(*markdown(table(read_stored(where).rows)), sep='\n')


main = partial(exit_status, 'lab.others', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
