"""Others beside ours: `python -m lab.others --target DIR --draft DIR --prompts FILE` times greedy texts.

By `ar` and `sd`; by transformers, plain and assisted; by llama.cpp, if --gguf names copies of the models. All
write on a CPU after the same prompts, which are not timed, as many tokens, ends ignored, in turn. A row a
run, in tokens/s, goes to lab/results/PAIR/others.jsonl, and ratios to the terminal. A setting is named
`WHO GAMMA`, gamma 0 for plain decoding.
"""
import argparse
import random
import sys
from functools import partial
from importlib import metadata
from statistics import median

import torch

from lab import at_least
from lab.measure import LAB, Pair, moment, network, pair_of, read_stored, write_rows
from model import naming, require_that
from specmini import DTYPES, Engine, add_flags, exit_status, take_threads
from verify import Autoregressive, Exact, tokens_of


# ------------------------------------------------- who writes n tokens after a prompt (ids), in tokens/s

def ours(engine, gamma, ids, n):
    engine.max_new = n
    engine.open([ids])
    cycles = engine.write(ids, Exact(gamma, draft_temperature=0) if gamma else Autoregressive())
    return len(tokens_of(cycles)) / sum(cycle.seconds for cycle in cycles)


@torch.inference_mode()
def by_transformers(target, draft, gamma, ids, n):
    """Its first step reads the prompt; time begins when that step ends, and tokens are counted from there."""
    marks = []

    def mark(line, scores, **_):
        marks.append((line.shape[1], moment()))
        return False                                    # it goes on

    prompt = torch.tensor([ids], device=target.device)
    draft.generation_config.num_assistant_tokens = gamma
    target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n,
                    stopping_criteria=[mark], assistant_model=draft if gamma else None)
    (first, begin), *_, (last, end) = marks
    return (last - first) / (end - begin)


def load_transformers(folder, dtype):
    """A network that ignores ends, and as a draft writes as many tokens as it is asked for."""
    import transformers
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    made.generation_config = transformers.GenerationConfig(
        pad_token_id=0, num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0)
    return made


def by_llama(server, ids, n):
    """Its time begins after the first token. It forbids ends, where the others write them and go on."""
    times = server.handle_completions(dict(
        prompt=ids, n_predict=n, temperature=0, samplers=['top_k'], top_k=1, ignore_eos=True,
        cache_prompt=False))['timings']
    return 1000 * (times['predicted_n'] - 1) / times['predicted_ms']


def load_llama(pair, target, draft, gamma):
    """A server of llama.cpp in this process; target, draft: GGUF files."""
    import xllamacpp
    params = xllamacpp.CommonParams()
    drafts = params.speculative.draft
    params.model.path, params.verbosity, params.fit_params = target, 0, False
    params.n_ctx = pair.longest + pair.max_new + 32
    for threads in params.cpuparams, params.cpuparams_batch, drafts.cpuparams, drafts.cpuparams_batch:
        threads.n_threads = torch.get_num_threads()
    if gamma:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafts.mparams.path, drafts.n_max, drafts.n_min, drafts.p_min = draft, gamma, 0, 0.0
    return xllamacpp.Server(params)


def run():
    parser = argparse.ArgumentParser(prog='python -m lab.others', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('--n', type=at_least(1), default=2, help='prompts of each family (2)')
    add('--prompts', metavar='FILE', nargs='+', required=True, help='JSON lines')
    add('--gamma', type=at_least(1), nargs='+', default=[3, 5], help='lengths of the blocks (3 5)')
    add('--theirs', choices=DTYPES, default='bf16', help='in which transformers computes (bf16)')
    add('--gguf', metavar=('TARGET', 'DRAFT'), nargs=2, help='files of the two models for llama.cpp')
    add_flags(parser, Pair)
    args = parser.parse_args()
    with naming('pip install it', ImportError):
        rivals = {name: metadata.version(name) for name in ['transformers'] + ['xllamacpp'] * bool(args.gguf)}
    pair = pair_of(args)
    two_steps = pair.max_new > max(args.gamma) + 1
    require_that(pair.device == 'cpu' and pair.draft and two_steps,
                 'expected --device cpu, --draft DIR and --max-new above gamma + 1')
    take_threads(network(pair.target, pair.device, pair.dtype)[0])
    engine = Engine(pair.target, pair.draft, ignore_eos=True, dtype=pair.dtype, device='cpu')
    theirs = [load_transformers(folder, args.theirs) for folder in pair.folders]
    runs = {}
    for gamma in 0, *args.gamma:
        runs[f'ours {gamma}'] = partial(ours, engine, gamma)
        runs[f'transformers in {args.theirs} {gamma}'] = partial(by_transformers, *theirs, gamma)
        if args.gguf:
            runs[f'llama.cpp {gamma}'] = partial(by_llama, load_llama(pair, *args.gguf, gamma))
    prompts = pair.texts((), args.n)
    for write in runs.values():
        write(prompts[0].ids[:8], pair.max_new)         # what is done for the first time takes longer
    where = LAB / 'results' / pair.name / 'others.jsonl'
    write_rows(where, pair.head(n=args.n, rivals=rivals), (
        [prompt.name | dict(setting=name, rate=runs[name](prompt.ids, pair.max_new))
         for name in random.Random(prompt.place).sample(list(runs), len(runs))] for prompt in prompts))
    rates = {}
    for row in read_stored(where).rows:
        rates.setdefault(row['setting'], []).append(row['rate'])
    print('| tokens/s over those of | median | lowest to highest |\n|---|--:|--:|')
    for name, theirs in rates.items():
        ratios = [a / b for a, b in zip(rates['ours ' + name.split()[-1]], theirs)]
        if not name.startswith('ours'):                 # `ar` beside plain decoding, `sd` beside the others
            print(f'| {name} | {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |')


main = partial(exit_status, 'lab.others', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
