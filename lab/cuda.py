"""All that wants a graphics card, in one command and one table: `python -m lab.bench cuda`.

Networks beside transformers', every method end to end, graphs compiled anew, an 8B shape at full size,
sparse passes over long contexts. A check that fails is a line of the table, and the others go on.
`--device cpu` runs the same list with small shapes and compiles less. On an H100 all was run but five of the
seven methods that it compiles.
"""
import functools
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path as File
from typing import NamedTuple

import torch

import lab.rivals                                       # noqa: F401, enters the baselines in METHODS
from lab.common import MODELS, held_out_rows
from lab.sparse import passes
from lab.speed import moment, quiet_transformers
from model import PAD, Reader, load
from specmini import DTYPES, Engine
from verify import METHODS, Autoregressive, Draft, Exact, Session, decode, silence, tokens_of

KINDS = dict(llama='Llama', mistral='Mistral', qwen2='Qwen2', qwen3='Qwen3', qwen3_moe='Qwen3Moe')
KNOBS = {'ecsv-two': dict(second=str(MODELS / 'up'))}   # of methods that do not run without
SLACK = 2           # our rounding errors may be so many times theirs: the order of sums differs
GAMMA = 4
DIALS = 0.6, 0.8, 0.9, 1.0      # chances that a pretended draft token is right


class Sizes(NamedTuple):
    """How large the list is."""
    target: str         # of passes.SHAPES, whose weights are random
    draft: str          # likewise: what its passes would cost is timed apart
    tokens: int         # written by each method
    long: int           # written by the random target
    prompt: int         # its prompt's tokens
    contexts: tuple     # of sparse passes
    compiled: tuple     # methods that are compiled


PAPERS = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse'
ON_CUDA = Sizes('llama-3.1-8b', 'llama-3.2-1b', 64, 256, 512, (8192, 16384, 32768), PAPERS)
ON_CPU = Sizes('embedded', 'embedded-draft', 12, 64, 32, (512, 1024), ('ar', 'sd'))


class Result(NamedTuple):
    """What a check has found."""
    said: str
    good: bool = True


# -------------------------------------------------------------------------- networks beside transformers'

def random_network(kind):
    """transformers' network of this model type, small, fp32, with weights so large that each part shows."""
    transformers = quiet_transformers()
    shape = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
                 tie_word_embeddings=False)
    if kind == 'mistral':
        shape.update(sliding_window=None)
    if kind == 'qwen3_moe':
        shape.update(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    config = getattr(transformers, f'{KINDS[kind]}Config')(**shape)
    torch.manual_seed(0)
    network = getattr(transformers, f'{KINDS[kind]}ForCausalLM')(config)
    for key, weight in network.named_parameters():
        if weight.ndim > 1:
            router = key.endswith('mlp.gate.weight')    # sure of itself: a near tie is no error of ours
            torch.nn.init.normal_(weight, std=1.0 if router else 0.08)
    return network.eval()


@torch.inference_mode()
def parity(kind, dtype, device):
    """Our logits and transformers', each against the same weights computed in fp32: errors of rounding.

    Root mean squares over all positions. What rounding does to transformers is what it may do to us, SLACK
    times; a wrong position, norm or mask moves logits tens of times as far. We read a prompt, then five
    positions, then one at a time, then three.
    """
    transformers = quiet_transformers()
    network = random_network(kind).to(DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        tokenizer = (MODELS / 'target' / 'tokenizer.json').read_text()
        (File(folder) / 'tokenizer.json').write_text(tokenizer)
        model, _, _ = load(folder, device, DTYPES[dtype])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    line = torch.randint(0, 1000, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([line])
    exact = network.float()(ids).logits[0]
    error = rms(theirs.to(device)(ids.to(device)).logits[0], exact)
    reader = Reader(model, len(line))
    rows = []
    for begin, end in ((0, 30), (30, 35), (35, 36), (36, 37), (37, 40)):
        rows.append(reader.read(line[:end], [], model.full, end - begin))
    own = rms(torch.cat(rows), exact)
    size = rms(exact, torch.zeros_like(exact))
    return Result(f'error {own / size:.2%} of the logits, transformers {error / size:.2%}',
                  own <= SLACK * error)


def rms(found, wanted):
    """The root mean square of a difference, as a float; the wanted one is on the CPU."""
    return float((found.cpu().float() - wanted).square().mean().sqrt())


# --------------------------------------------------------------------------------- every method, end to end

def prompts_for(engine):
    """Three prompts (ids), the second the longest and the third in between."""
    rows = held_out_rows('math', 12, seed=7)
    ranked = sorted((engine.tokenizer.encode(row['prompt']).ids for row in rows), key=len)
    return ranked[0], ranked[-1], ranked[len(ranked) // 2]


def method_of(name):
    return METHODS[name](**KNOBS.get(name, {}))


def written(engine, ids, name, temperature=0.0):
    """The Cycles of a text; a checker that finds all steps right stands in for the tasks' own."""
    engine.temperature = temperature
    method = method_of(name)
    session = engine.start(ids, method)
    session.checker = all_right
    return list(decode(session, method))


def all_right(ids):
    return True


def end_to_end(engine, name):
    """A method writes greedily and at temperature 0.8; where it is lossless, plain decoding's text.

    A greedy text may part from it where the target's two best logits are nearer than rounding moves them:
    twice what a pass over all positions at once differs by from passes over one.
    """
    ids, *_ = prompts_for(engine)
    tokens = tokens_of(written(engine, ids, name))
    sampled = tokens_of(written(engine, ids, name, 0.8))
    said = f'{len(tokens)} tokens, {len(sampled)} sampled'
    if not tokens or not sampled:
        return Result(said, False)
    if not engine.lossless(method_of(name)):
        return Result(f'{said}; lossy')
    wanted = tokens_of(written(engine, ids, 'ar'))
    if tokens == wanted:
        return Result(f'{said}; text of `ar`')
    same = len(os.path.commonprefix([tokens, wanted]))
    gap, noise = gap_and_noise(engine, ids + wanted, len(ids) + same)
    return Result(f'{said}; parts from `ar` at token {same}, logit gap {gap:.2g}, noise {noise:.2g}',
                  gap <= 2 * noise)


def gap_and_noise(engine, line, place):
    """(how much better the target's best logit before a place is than its second, what rounding moves)."""
    reader = engine.readers['target']
    reader.forget()
    full = reader.model.full
    at_once = reader.read(line[:place], [], full, min(place, 32)).float()
    one_by_one = []
    for end in range(place - len(at_once) + 1, place + 1):
        one_by_one.append(reader.read(line[:end], [], full, 1).float())
    noise = (torch.cat(one_by_one) - at_once).abs().max()
    best, second = one_by_one[-1][0].topk(2).values.tolist()
    return best - second, float(noise)


def graphs():
    """How many graphs torch.compile has made so far."""
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def lengths(engine):
    """{(role, path, padded length)} of the passes in the readers' logs: what may want a graph of its own."""
    found = set()
    for role, reader in engine.readers.items():
        for name, positions, *_ in reader.log:
            if positions <= PAD:                        # longer ones are not compiled
                found.add((role, name, 1 << (positions - 1).bit_length()))
    return found


def compiled_end_to_end(engine, name):
    """end_to_end by compiled passes, then a third text: it may compile only for lengths not seen before."""
    torch._dynamo.reset()                               # the limit on graphs is for all methods together
    short, long, between = prompts_for(engine)
    begin = time.perf_counter()
    before = graphs()
    found = end_to_end(engine, name)
    seen = set()
    for ids in (short, long):
        written(engine, ids, name)
        seen |= lengths(engine)
    warm = graphs()
    seconds = time.perf_counter() - begin
    written(engine, between, name)
    new = graphs() - warm
    unseen = len(lengths(engine) - seen)
    said = f'{found.said}; {warm - before} graphs in {seconds:.0f} s, then {new} for {unseen} new lengths'
    return Result(said, found.good and new <= unseen)


# ------------------------------------------------------------------------------------ a large random target

class Counting:
    """A random network whose greedy text counts up, so that a draft that is right can be pretended.

    The head is the embedding moved by one row, and what the layers add is small beside the embedding: the
    next token is the last one plus 1, by a wide margin, whatever a pass rounds.
    """

    def __init__(self, shape, capacity, device, dtype):
        self.device = device
        self.model = passes.random_model(passes.config_of(shape, None, capacity), device, dtype)
        for key, weight in self.model.named_parameters():
            if key.endswith(('o_proj.weight', 'down_proj.weight')):
                weight.mul_(0.01)
        embedding = self.model.model.embed_tokens.weight
        embedding.mul_(50)
        self.model.lm_head.weight.copy_(embedding.roll(1, 0))
        passes.lay_by_channel(self.model)
        self.readers = {}               # compiled or not -> Reader

    def session(self, sizes, source, compiled):
        """A Session that has read a prompt."""
        if compiled not in self.readers:
            self.readers[compiled] = Reader(self.model, sizes.prompt + sizes.long, compiled)
        reader = self.readers[compiled]
        reader.forget()
        generator = torch.Generator().manual_seed(0)            # the host's, on any device
        session = Session(reader, None, source, list(range(sizes.prompt)), sizes.long, generator=generator)
        session.read_prompt()
        return session


class Dialled:
    """Where drafts come from if each token is right with a given chance: the counting network's own text."""

    def __init__(self, chance, positions):
        lots = torch.rand(positions, generator=torch.Generator().manual_seed(0))
        self.right = (lots < chance).tolist()           # of each position of a text

    def __call__(self, session, plan):
        V = session.target.model.vocab
        tokens = []
        token = session.tokens[-1]
        begin = len(session.tokens)
        for right in self.right[begin:begin + plan.n]:
            token = (token + (1 if right else 2)) % V
            tokens.append(token)
        return Draft.points(tokens, session.target.model)


def run_large(card, source, method, compiled):
    """(Cycles, seconds) of a text by the large network, the second of two; the first warms up."""
    for _ in range(2):
        session = card.large.session(card.sizes, source, compiled)
        begin = moment(card.device)
        cycles = list(decode(session, method))
        seconds = moment(card.device) - begin
    first = card.sizes.prompt
    wanted = [(first + i) % card.large.model.vocab for i in range(card.sizes.long)]
    assert tokens_of(cycles) == wanted, 'the random target does not count up: no draft can be dialled'
    return cycles, seconds


def large_ar(card, compiled):
    """Plain decoding of the large target: tokens a second, and bytes a second over those of a copy."""
    _, seconds = run_large(card, silence, Autoregressive(), compiled)
    card.plain[compiled] = card.sizes.long / seconds
    model = card.large.model
    config = model.config
    middle = card.sizes.prompt + card.sizes.long / 2    # keys that a pass sees, on average
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * middle
    size = model.read_bytes(model.full) + keys * DTYPES[card.dtype].itemsize
    bandwidth, _ = card.peak
    share = size * card.plain[compiled] / bandwidth
    return Result(f'{card.plain[compiled]:.1f} tokens/s, {share:.0%} of the bandwidth')


def large_sd(card, chance, compiled):
    """Speculative decoding of the large target with a pretended draft that is right so often.

    Its drafts cost nothing. Beside it, computed: the speed if each draft token took a pass of a network of
    the draft's shape, whose time is measured apart.
    """
    source = Dialled(chance, card.sizes.prompt + card.sizes.long)
    cycles, seconds = run_large(card, source, Exact(GAMMA), compiled)
    judged = [token['kept'] for cycle in cycles for token in cycle.judged]
    drafting = sum(len(cycle.drafted) for cycle in cycles) * card.draft_seconds(compiled)
    free = card.sizes.long / seconds
    whole = card.sizes.long / (seconds + drafting)
    said = (f'acceptance {statistics.fmean(judged):.2f}, {card.sizes.long / len(cycles):.2f} tokens a pass; '
            f'drafts free {free:.1f} tokens/s')
    if compiled in card.plain:
        said += (f', {free / card.plain[compiled]:.2f} times `ar`; with passes of {card.sizes.draft} '
                 f'{whole / card.plain[compiled]:.2f} times')
    off = 3 * math.sqrt(chance * (1 - chance) / len(judged))        # three deviations
    return Result(said, abs(statistics.fmean(judged) - chance) <= off)


def long_pass(card, context):
    """A verifying pass over GAMMA + 1 positions behind a long context, dense and sparse."""
    reader = passes.random_cache(card.large.model, context)
    ids = torch.arange(GAMMA + 1, device=card.device)[None]
    paths = passes.forms(card.large.model)
    runs = []
    for path in paths.values():
        runs.append(functools.partial(reader.feed, ids, context, path, GAMMA + 1))
    dense, *others = passes.seconds_of(runs, 5, card.device)
    said = [f'dense {dense * 1e3:.1f} ms']
    for name, seconds in zip(list(paths)[1:], others):
        said.append(f'{name} {dense / seconds:.2f} times as fast')
    return Result(', '.join(said))


# --------------------------------------------------------------------------------------------------- the list

@dataclass
class Card:
    """The device of a run, and what its checks share, made when it is first asked for."""
    device: str
    dtype: str
    sizes: Sizes

    def __post_init__(self):
        self.plain = {}         # compiled or not -> tokens a second of `ar` on the large target
        self.drafting = {}      # likewise -> see draft_seconds

    def engine_for(self, compiled):
        engine = Engine(MODELS / 'target', MODELS / 'draft', mid=MODELS / 'mid', max_new=self.sizes.tokens,
                        device=self.device, dtype=self.dtype, compile=compiled, threads=1)
        engine.open(prompts_for(engine))
        return engine

    @functools.cached_property
    def eager(self):
        return self.engine_for(False)

    @functools.cached_property
    def compiled(self):
        return self.engine_for(True)

    @functools.cached_property
    def large(self):
        capacity = max(*self.sizes.contexts, self.sizes.prompt + self.sizes.long) + 64
        return Counting(self.sizes.target, capacity, self.device, DTYPES[self.dtype])

    @functools.cached_property
    def peak(self):
        """(bytes a second, FLOPs a second), measured."""
        return passes.machine(self.device, DTYPES[self.dtype])

    def draft_seconds(self, compiled):
        """Seconds of a pass over one position of a random network of the draft's shape."""
        if compiled not in self.drafting:
            tokens = list(range(self.sizes.prompt))
            config = passes.config_of(self.sizes.draft, None, self.sizes.prompt + 64)
            model = passes.random_model(config, self.device, DTYPES[self.dtype])
            reader = Reader(model, self.sizes.prompt, compiled)
            run = functools.partial(reader.read, tokens, [], model.full, 1)     # the last token, anew
            run()
            self.drafting[compiled], = passes.seconds_of([run], 9, self.device)
        return self.drafting[compiled]


def bandwidth(card):
    """What the device copies and multiplies a second: what other figures are shares of."""
    size, flops = card.peak
    return Result(f'{size / 1e9:.0f} GB/s, {flops / 1e12:.2f} TFLOP/s')


def eager(card, name):
    return end_to_end(card.eager, name)


def compiled(card, name):
    return compiled_end_to_end(card.compiled, name)


def checks(card):
    """Yields (what is checked, a function without arguments that returns its Result)."""
    target = card.sizes.target
    yield f'memory and products, {card.dtype}', functools.partial(bandwidth, card)
    for kind in KINDS:
        for dtype in ('bf16', 'fp16'):
            yield f'logits of {kind}, {dtype}', functools.partial(parity, kind, dtype, card.device)
    for name in METHODS:
        yield f'`{name}`', functools.partial(eager, card, name)
    for name in card.sizes.compiled:
        yield f'`{name} --compile`', functools.partial(compiled, card, name)
    for how in (False, True):
        words = ' --compile' if how else ''
        yield f'{target} `ar{words}`', functools.partial(large_ar, card, how)
        for chance in DIALS:
            yield f'{target} `sd{words}`, dialled {chance}', functools.partial(large_sd, card, chance, how)
    for context in card.sizes.contexts:
        yield f'{target}, pass at {context}', functools.partial(long_pass, card, context)


def run_all(device, dtype):
    """Prints the table, a line a check; returns the exit status: 1 if one of them failed."""
    card = Card(device, dtype, ON_CUDA if device == 'cuda' else ON_CPU)
    name = torch.cuda.get_device_name() if device == 'cuda' else 'CPU'
    print(f'{name}, {dtype}, torch {torch.__version__}\n\n| check | found | |\n|---|---|---|', flush=True)
    failures = 0
    for what, check in checks(card):
        try:
            found = check()
        except Exception as error:                      # whatever it is, the other checks are still wanted
            said = ' '.join(str(error).split())[:200].replace('|', '/')
            found = Result(f'{type(error).__name__}: {said}', False)
        failures += not found.good
        print(f'| {what} | {found.said} | {"ok" if found.good else "FAILED"} |', flush=True)
    return int(failures > 0)
