"""Others beside ours: `python -m lab.others --target DIR --draft DIR --prompts FILE` times greedy texts.

By `ar` and `sd`; by transformers, plain and assisted; by llama.cpp, if --gguf names copies of the models. All
write on a CPU after the same prompts, which are not timed, as many tokens, ends ignored, in turn. A row a
prompt goes to lab/results/PAIR/others.jsonl. A setting is named `WHO GAMMA`, gamma 0 for plain decoding.
"""
import argparse
import itertools
import os
import random
import sys
from functools import partial
from importlib import metadata
from statistics import median

import torch

from lab import at_least
from lab.measure import ELSEWHERE, Pair, file_of, moment, network, pair_of, read_stored, write_rows
from model import naming, require_that
from specmini import DTYPES, add_flags, exit_status, take_threads
from verify import Autoregressive, Exact, decode, tokens_of

RIVALS = 'transformers', 'xllamacpp'        # packages; the second has llama.cpp


# --------------- who writes n tokens after a prompt (ids): how many of them are timed, and how long they took

def ours(engine, gamma, ids, n):
    method = Exact(gamma, draft_temperature=0) if gamma else Autoregressive()
    engine.max_new = n
    engine.open([ids])
    session = engine.start(ids, method)
    begin = moment()
    tokens = tokens_of(decode(session, method))
    return dict(tokens=len(tokens), seconds=moment() - begin)


@torch.inference_mode()
def by_transformers(target, draft, gamma, ids, n):
    """Its first step reads the prompt; time begins when that step ends, and tokens are counted from there."""
    marks = []

    def mark(line, scores, **_):
        marks.append((line.shape[1], moment()))
        return False                                    # it goes on

    prompt = torch.tensor([ids])
    draft.generation_config.num_assistant_tokens = gamma
    target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n,
                    stopping_criteria=[mark], assistant_model=draft if gamma else None)
    (first, begin), *_, (last, end) = marks
    return dict(tokens=last - first, seconds=end - begin)


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
    return dict(tokens=times['predicted_n'] - 1, seconds=times['predicted_ms'] / 1000)


def load_llama(pair, target, draft='', gamma=0):
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


# ----------------------------------------------------------------------------------------- rows and the table

def row_of(runs, n, prompt):
    """The row of a prompt, whose order of the settings is its own."""
    order = random.Random(f'{prompt.family} {prompt.place}').sample(list(runs), len(runs))
    made = {name: runs[name](prompt.ids, n) for name in order}
    return prompt.name | dict(runs={name: made[name] for name in runs})


def table(rows):
    """Its lines: tokens/s of ours over those of each rival with the same gamma, `ar` where that is 0."""
    yield '| tokens/s over those of | median | lowest to highest |\n|---|--:|--:|'
    for name in rows[0]['runs']:
        own = 'ours ' + name.split()[-1]
        pairs = [(row['runs'][own], row['runs'][name]) for row in rows]
        ratios = [a['tokens'] / a['seconds'] / (b['tokens'] / b['seconds']) for a, b in pairs]
        if name != own:
            yield f'| {name} | {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |'


def run():
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(prog='python -m lab.others', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('--n', type=at_least(1), default=ELSEWHERE, help=f'prompts of each family ({ELSEWHERE})')
    add('--prompts', metavar='FILE', nargs='+', default=(), help='JSON lines; none: of the embedded pair')
    add('--gamma', type=at_least(1), nargs='+', default=[3, 5], help='lengths of the blocks (3 5)')
    add('--gguf', metavar='FILE', nargs='+', default=(), help='the target, then drafts, for llama.cpp')
    add_flags(parser, Pair)
    args = parser.parse_args()
    with naming('pip install it', ImportError):
        rivals = {name: metadata.version(name) for name in RIVALS[:2 if args.gguf else 1]}
    pair = pair_of(args)
    few = max(args.gamma) + 2                           # tokens of a text that takes every rival two steps
    there = all(map(os.path.isfile, args.gguf))
    require_that(pair.device == 'cpu' and pair.draft and pair.max_new >= few and there,
                 f'expected --device cpu, --draft DIR, --max-new {few} or more, and files after --gguf')
    take_threads(network(pair.target, pair.device, pair.dtype)[0])
    prompts = pair.texts(('math',), args.n)
    short = prompts[0].ids[:8]
    engine = pair.engine()
    engine.eos = frozenset()

    def seconds(dtype):
        target = load_transformers(pair.target, dtype)
        return by_transformers(target, target, 0, short, few)['seconds']

    dtype = min('bf16', 'fp32', key=seconds)
    theirs = [load_transformers(folder, dtype) for folder in pair.folders]
    runs = {}
    for gamma in 0, *args.gamma:
        runs[f'ours {gamma}'] = partial(ours, engine, gamma)
        runs[f'transformers in {dtype} {gamma}'] = partial(by_transformers, *theirs, gamma)
    if args.gguf:
        target, *drafts = args.gguf
        runs['llama.cpp 0'] = partial(by_llama, load_llama(pair, target))
        for draft, gamma in itertools.product(drafts, args.gamma):
            server = load_llama(pair, target, draft, gamma)
            runs[f'llama.cpp, {os.path.basename(draft)} {gamma}'] = partial(by_llama, server)
    else:
        print('llama.cpp is left out: it needs --gguf TARGET.gguf DRAFT.gguf ...', file=sys.stderr)
    for write in runs.values():
        write(short, few)                               # what is done for the first time takes longer
    where = file_of('', pair.name, 'others')
    head = pair.head('others', args.n, 'clock') | dict(rivals=rivals)
    write_rows(where, head, (row_of(runs, pair.max_new, prompt) for prompt in prompts))
    print(*table(read_stored(where).rows), sep='\n')


def main():
    """Runs the program; returns its exit status."""
    return exit_status('lab.others', run)


if __name__ == '__main__':
    sys.exit(main())
