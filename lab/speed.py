"""Tokens a second of our engine and of transformers on the same weights: `python -m lab.bench speed`.

Every contestant writes a prompt before the next prompt comes, in several rounds, every second one in reverse
order: a noisy machine is noisy for all. Calls are timed whole, the prompt included; device, dtype, threads
and end tokens are the same for all, and all are greedy. A ratio is taken within a prompt and a round, and a
round's is the geometric mean over its prompts; shown are the median over rounds, and the lowest to the
highest round. gpt-fast is no package that installs beside this torch: its scheme (a static cache, a compiled
pass of one token) is here as transformers has it, under --compile.
"""
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path as File
from typing import NamedTuple

import torch
from tqdm import tqdm

from lab.common import MODELS, held_out_rows
from model import expect
from specmini import DTYPES, Engine, read_rows
from verify import Autoregressive, Exact, tokens_of

RATIOS = [('specmini ar', 'transformers generate'), ('specmini ar --compile', 'transformers generate'),
          ('specmini ar --compile', 'transformers static'), ('specmini sd', 'transformers assisted'),
          ('specmini sd', 'specmini ar'), ('specmini sd --compile', 'specmini ar --compile'),
          ('transformers assisted', 'transformers generate')]       # what is printed, where there are both
TASKS = 'math', 'table'         # of the lab, whose held-out rows are the prompts unless others are given


class Call(NamedTuple):
    """One text, timed."""
    tokens: int             # written
    seconds: float

    @property
    def rate(self):
        return self.tokens / self.seconds


def quiet_transformers():
    """The package, without its bars and notices."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# ------------------------------------------------------------------------------------ weights and prompts

def folders_of(pair, folder):
    """[target's folder, draft's]; pair: embedded, random (made in `folder`), or two folders DIR,DIR."""
    if pair == 'embedded':
        return [MODELS / 'target', MODELS / 'draft']
    if pair == 'random':
        return random_pair(folder)
    homes = pair.split(',')
    expect(len(homes) == 2, f'--pair {pair}: expected embedded, random, or two folders DIR,DIR')
    return homes


def random_pair(folder):
    """Saves a random llama of 0.1 B parameters and, as its draft, its first 2 layers; returns both folders.

    Nothing was learned, and the draft is nearly always wrong: what speculation costs where it does not help.
    """
    transformers = quiet_transformers()
    torch.manual_seed(0)
    tokenizer = (MODELS / 'target' / 'tokenizer.json').read_text()
    vocabulary = json.loads(tokenizer)['model']['vocab']
    shape = dict(hidden_size=768, rms_norm_eps=1e-6, intermediate_size=2304, num_attention_heads=12,
                 num_key_value_heads=4, head_dim=64, vocab_size=len(vocabulary), bos_token_id=None,
                 eos_token_id=None, max_position_embeddings=2048, tie_word_embeddings=False)
    weights = None
    homes = []
    for name, layers in (('target', 15), ('draft', 2)):
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **shape))
        if weights is None:
            randomise(network)
            weights = network.state_dict()
        network.load_state_dict({key: weights[key] for key in network.state_dict()})
        network.save_pretrained(folder / name)
        (folder / name / 'tokenizer.json').write_text(tokenizer)
        homes.append(folder / name)
    return homes


def randomise(network):
    """Random matrices, smaller in what the layers add; norms stay as they are."""
    for key, weight in network.named_parameters():
        if weight.ndim == 2:
            small = key.endswith(('o_proj.weight', 'down_proj.weight'))
            torch.nn.init.normal_(weight, std=0.02 if small else 0.05)


def prompts_of(file, n, tokenizer):
    """{name: prompts as lists of ids}: the first n rows of a file, or where it is None n of each of TASKS."""
    if file is None:
        rows = {task: held_out_rows(task, n, seed=7) for task in TASKS}
    else:
        rows = {File(file).stem: read_rows(None, file)[:n]}
    found = {}
    for name, some in rows.items():
        found[name] = [tokenizer.encode(row['prompt']).ids for row in some]
    return found


# ------------------------------------------------------------------------------------------- contestants

class Ours:
    """Our engine with one method."""

    def __init__(self, engine, method):
        self.engine = engine
        self.method = method
        self.cycles = []                # of all texts

    def write(self, ids):
        """The ids that follow a prompt's."""
        cycles = self.engine.write(ids, self.method)
        self.cycles += cycles
        return tokens_of(cycles)

    def drafting(self):
        """(acceptance rate, tokens a target pass) as words."""
        stats = self.engine.statistics(self.cycles)
        acceptance = stats['acceptance_rate']
        return '-' if acceptance is None else f'{acceptance:.1%}', f'{stats["block_efficiency"]:.2f}'


class Theirs:
    """A network of transformers, alone or with an assistant, which may be None."""

    def __init__(self, network, settings, assistant=None):
        self.network = network
        self.settings = settings
        self.assistant = assistant

    @torch.inference_mode()
    def write(self, ids):
        """The ids that follow a prompt's."""
        line = torch.tensor([ids], device=self.network.device)
        whole = self.network.generate(line, attention_mask=torch.ones_like(line),
                                      generation_config=self.settings, assistant_model=self.assistant)
        return whole[0, len(ids):].tolist()

    def drafting(self):
        """Nothing: generate does not say."""
        return '-', '-'


def our_contestants(engine, gamma, suffix=''):
    """{name: Ours} of plain and of speculative decoding."""
    return {f'specmini ar{suffix}': Ours(engine, Autoregressive()),
            f'specmini sd{suffix}': Ours(engine, Exact(gamma))}


def their_contestants(homes, engine, gamma, compiled):
    """{name: Theirs} with the engine's device, dtype, end tokens and length."""
    transformers = quiet_transformers()
    target, draft = (load_theirs(home, engine) for home in homes)
    # fixed length: no schedule, no confidence stop
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = 'constant'
    draft.generation_config.assistant_confidence_threshold = 0.0
    usual = dict(do_sample=False, max_new_tokens=engine.max_new, pad_token_id=0,
                 eos_token_id=sorted(engine.eos) or None)
    plain = transformers.GenerationConfig(**usual)
    found = {'transformers generate': Theirs(target, plain),
             'transformers assisted': Theirs(target, plain, draft)}
    if compiled:
        how = transformers.CompileConfig(fullgraph=True)
        how._compile_all_devices = True                 # by itself it compiles on accelerators alone
        static = transformers.GenerationConfig(cache_implementation='static', compile_config=how, **usual)
        found['transformers static'] = Theirs(target, static)
    return found


def load_theirs(home, engine):
    """transformers' network of a folder, with the engine's device and dtype."""
    transformers = quiet_transformers()
    network = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=DTYPES[engine.dtype])
    return network.to(engine.device).eval()


# ------------------------------------------------------------------------------------------------- timing

def moment(device):
    """Wall time in seconds; on CUDA only when all that was asked for is done."""
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(contestants, prompts, rounds, device):
    """{name: [round][prompt] of Calls} of contestants that have written all these prompts before."""
    found = {name: [] for name in contestants}
    for i in tqdm(range(rounds), file=sys.stderr, desc='rounds'):
        names = list(contestants)
        if i % 2:
            names.reverse()
        for calls in found.values():
            calls.append([])
        for ids in prompts:
            for name in names:
                begin = moment(device)
                tokens = contestants[name].write(ids)
                seconds = moment(device) - begin
                found[name][i].append(Call(len(tokens), seconds))
    return found


def warmed(contestants, prompts, texts):
    """Adds to texts[name] what each contestant writes after each prompt; passes are compiled on the way."""
    for ids in tqdm(prompts, file=sys.stderr, desc='warming up'):
        for name, contestant in contestants.items():
            texts[name].append(contestant.write(ids))


# --------------------------------------------------------------------------------------------- what is shown

def spread(values, digits):
    """Their median, and the lowest and the highest, as words."""
    middle = statistics.median(values)
    return f'{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


def rates(rounds):
    """Tokens a second of each round; rounds: lists of Calls."""
    found = []
    for calls in rounds:
        tokens = sum(call.tokens for call in calls)
        found.append(tokens / sum(call.seconds for call in calls))
    return found


def ratios(mine, theirs):
    """How many times as fast, of each round: the geometric mean over prompts; given rounds of Calls."""
    found = []
    for my_calls, their_calls in zip(mine, theirs):
        pairs = [a.rate / b.rate for a, b in zip(my_calls, their_calls)]
        found.append(statistics.geometric_mean(pairs))
    return found


def together(timings):
    """timings[group][name] with one more group, of the prompts of all, if there are several."""
    if len(timings) == 1:
        return timings
    every = {}
    for name in next(iter(timings.values())):
        rounds = zip(*(group[name] for group in timings.values()))
        every[name] = [sum(calls, []) for calls in rounds]
    return timings | dict(all=every)


def speeds_of(timings, contestants, texts):
    """Lines of a table, a row a contestant: tokens a second in each group; its texts; its drafts."""
    yield f'| tokens/s | {" | ".join(timings)} | text as `ar` | acceptance | tokens a target pass |'
    yield '|---|' + '--:|' * (len(timings) + 3)
    for name, contestant in contestants.items():
        cells = [spread(rates(group[name]), 0) for group in timings.values()]
        same = sum(mine == plain for mine, plain in zip(texts[name], texts['specmini ar']))
        cells += [f'{same} of {len(texts[name])}', *contestant.drafting()]
        yield f'| {name} | {" | ".join(cells)} |'


def ratios_of(timings):
    """Lines of a table, a row for each of the RATIOS that there is."""
    names = next(iter(timings.values()))
    yield f'| ratio | {" | ".join(timings)} |'
    yield '|---|' + '--:|' * len(timings)
    for name, other in RATIOS:
        if name in names and other in names:
            cells = [spread(ratios(group[name], group[other]), 2) for group in timings.values()]
            yield f'| {name} / {other} | {" | ".join(cells)} |'


def speed(args):
    """Prints tokens a second and the ratios that the README quotes; args: the flags of lab.bench."""
    with tempfile.TemporaryDirectory() as folder:
        compare(folders_of(args.pair, File(folder)), args)


def compare(homes, args):
    """speed for these folders, the target's and the draft's."""
    transformers = quiet_transformers()
    settings = dict(max_new=args.length, threads=args.threads, device=args.device, dtype=args.dtype)
    engine = Engine(*homes, **settings)
    engines = [engine]
    contestants = our_contestants(engine, args.gamma)
    if args.compile:
        engines.append(Engine(*homes, compile=True, **settings))
        contestants |= our_contestants(engines[1], args.gamma, ' --compile')
    contestants |= their_contestants(homes, engine, args.gamma, args.compile)
    prompts = prompts_of(args.prompts, args.n or 10, engine.tokenizer)
    timings = {}
    texts = {name: [] for name in contestants}
    for group, some in prompts.items():
        for each in engines:
            each.open(some)
        warmed(contestants, some, texts)
        timings[group] = timed(contestants, some, args.rounds, engine.device)
    timings = together(timings)
    counts = ' + '.join(f'{len(some)} {group}' for group, some in prompts.items())
    print(f'{args.pair} pair, {engine.device}, {engine.dtype}, {torch.get_num_threads()} threads, gamma '
          f'{args.gamma}, {args.length} tokens at most; {counts} prompts, {args.rounds} rounds; torch '
          f'{torch.__version__}, transformers {transformers.__version__}\n')
    print('\n'.join([*speeds_of(timings, contestants, texts), '', *ratios_of(timings)]))
