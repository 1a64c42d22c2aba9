"""Tokens a second of our engine and of transformers on the same weights: `python -m lab.bench speed`.

Every contestant writes a prompt before the next prompt comes. Every second round is in reverse order, because
a noisy machine is then noisy for all. Calls are timed with their prompts. A round's ratio is the geometric
mean over its prompts; shown are the median over rounds, and the lowest to the highest round.
"""
import functools
import statistics
import sys
from pathlib import Path as File

import torch
from tqdm import tqdm

from lab.measure import MODELS, held_out_rows, moment
from model import require_that
from specmini import Engine, read_rows
from verify import Autoregressive, Exact, tokens_of

RATIOS = [('specmini ar', 'transformers generate'), ('specmini ar --compile', 'transformers generate'),
          ('specmini ar --compile', 'transformers static'), ('specmini sd', 'transformers assisted'),
          ('specmini sd', 'specmini ar'), ('specmini sd --compile', 'specmini ar --compile')]
TASKS = 'math', 'table'         # of the lab, whose held-out rows are the prompts unless others are given


def quiet_transformers():
    """The package, without its bars and notices."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def prompts_of(file, n, tokenizer):
    """{name: prompts as lists of ids}: the first n rows of a file, or where it is None n of each of TASKS."""
    if file is None:
        rows = {task: held_out_rows(task, n, seed=7) for task in TASKS}
    else:
        rows = {File(file).stem: read_rows(None, file)[:n]}
    return {name: [tokenizer.encode(row['prompt']).ids for row in some] for name, some in rows.items()}


# ------------------------------------------------------------------------------------------- contestants

def written(engine, method, ids):
    """The ids that our engine writes after a prompt's."""
    return tokens_of(engine.write(ids, method))


@torch.inference_mode()
def generated(network, settings, assistant, ids):
    """The ids that a network of transformers writes after a prompt's; assistant: another one, or None."""
    line = torch.tensor([ids], device=network.device)
    text = network.generate(line, attention_mask=torch.ones_like(line), generation_config=settings,
                            assistant_model=assistant)
    return text[0, len(ids):].tolist()


def our_contestants(engine, gamma, suffix=''):
    """{name: function ids -> ids} of plain and of speculative decoding."""
    return {f'specmini ar{suffix}': functools.partial(written, engine, Autoregressive()),
            f'specmini sd{suffix}': functools.partial(written, engine, Exact(gamma))}


def their_contestants(homes, engine, gamma, compiled):
    """{name: function ids -> ids} with the engine's device, dtype, end tokens and length.

    transformers' static cache with a compiled pass of one token is gpt-fast's scheme.
    """
    transformers = quiet_transformers()
    of, ours = transformers.AutoModelForCausalLM.from_pretrained, engine.models['target']
    target, draft = (of(home, dtype=ours.dtype).to(ours.device).eval() for home in homes)
    # fixed length: no schedule, no confidence stop
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = 'constant'
    draft.generation_config.assistant_confidence_threshold = 0.0
    usual = dict(do_sample=False, max_new_tokens=engine.max_new, pad_token_id=0,
                 eos_token_id=sorted(engine.eos) or None)
    plain = transformers.GenerationConfig(**usual)
    found = {'transformers generate': functools.partial(generated, target, plain, None),
             'transformers assisted': functools.partial(generated, target, plain, draft)}
    if compiled:
        how = transformers.CompileConfig(fullgraph=True)
        how._compile_all_devices = True                 # by itself it compiles on accelerators alone
        static = transformers.GenerationConfig(cache_implementation='static', compile_config=how, **usual)
        found['transformers static'] = functools.partial(generated, target, static, None)
    return found


# ------------------------------------------------------------------------------------------------- timing

def timed(contestants, prompts, rounds, texts):
    """{name: [round][prompt] of (tokens, seconds)}; adds what each contestant writes to texts[name].

    A round before them warms up: it compiles and is not timed.
    """
    found = {name: [] for name in contestants}
    for i in tqdm(range(rounds + 1), file=sys.stderr, desc='rounds'):
        names = list(contestants)
        if i % 2:
            names.reverse()
        for calls in found.values():
            calls.append([])
        for ids in prompts:
            for name in names:
                begin = moment()
                tokens = contestants[name](ids)
                found[name][i].append((len(tokens), moment() - begin))
                if i == 0:
                    texts[name].append(tokens)
    return {name: calls[1:] for name, calls in found.items()}


# --------------------------------------------------------------------------------------------- what is shown

def spread(values, digits):
    """Their median, and the lowest and the highest, as words."""
    middle = statistics.median(values)
    return f'{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


def rates(rounds):
    """Tokens a second of each round; rounds: lists of (tokens, seconds)."""
    found = []
    for calls in rounds:
        tokens, seconds = map(sum, zip(*calls))
        found.append(tokens / seconds)
    return found


def ratios(mine, theirs):
    """How many times as fast, of each round: the geometric mean over prompts; given rounds as for rates."""
    found = []
    for my_calls, their_calls in zip(mine, theirs):
        pairs = zip(rates([[call] for call in my_calls]), rates([[call] for call in their_calls]))
        found.append(statistics.geometric_mean(a / b for a, b in pairs))
    return found


def speeds_of(timings, texts):
    """Lines of a table, a row a contestant: tokens a second in each group; how many texts are those of ar."""
    yield f'| tokens/s | {" | ".join(timings)} | text as `ar` |'
    yield '|---|' + '--:|' * (len(timings) + 1)
    for name in texts:
        cells = [spread(rates(group[name]), 0) for group in timings.values()]
        same = sum(mine == plain for mine, plain in zip(texts[name], texts['specmini ar']))
        yield f'| {name} | {" | ".join(cells)} | {same} of {len(texts[name])} |'


def ratios_of(timings):
    """Lines of a table, a row for each of the RATIOS that there is."""
    names, *_ = timings.values()
    yield f'| ratio | {" | ".join(timings)} |'
    yield '|---|' + '--:|' * len(timings)
    for name, other in RATIOS:
        if name in names and other in names:
            cells = [spread(ratios(group[name], group[other]), 2) for group in timings.values()]
            yield f'| {name} / {other} | {" | ".join(cells)} |'


def speed(args):
    """Prints tokens a second and their ratios; args: the flags of lab.bench."""
    homes = args.pair.split(',') if args.pair else [MODELS / 'target', MODELS / 'draft']
    require_that(len(homes) == 2, f'--pair {args.pair}: expected two folders DIR,DIR')
    transformers = quiet_transformers()
    settings = dict(max_new=args.length, device=args.device, dtype=args.dtype)
    engines = [Engine(*homes, **settings)]
    contestants = our_contestants(engines[0], args.gamma)
    if args.compile:
        engines.append(Engine(*homes, compile=True, **settings))
        contestants |= our_contestants(engines[1], args.gamma, ' --compile')
    contestants |= their_contestants(homes, engines[0], args.gamma, args.compile)
    prompts = prompts_of(args.prompts, args.n, engines[0].tokenizer)
    timings = {}
    texts = {name: [] for name in contestants}
    for group, some in prompts.items():
        for engine in engines:
            engine.open(some)
        timings[group] = timed(contestants, some, args.rounds, texts)
    counts = ' + '.join(f'{len(some)} {group}' for group, some in prompts.items())
    print(f'{args.pair or "embedded pair"}, {engines[0].device}, {args.dtype}, {torch.get_num_threads()} '
          f'threads, gamma {args.gamma}, {args.length} tokens at most; {counts} prompts, {args.rounds} '
          f'rounds; torch {torch.__version__}, transformers {transformers.__version__}\n')
    print('\n'.join([*speeds_of(timings, texts), '', *ratios_of(timings)]))
