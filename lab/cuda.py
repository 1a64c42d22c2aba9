"""A ladder for half an hour of one graphics card: `python -m lab.bench cuda --rung N`, or all six in turn.

Each rung is a table, meant to take less than ten minutes there. A line that fails says so, the others go on.
`--device cpu` runs the same with small shapes. All but the last are of an 8B shape with random weights:

1. plain decoding, eager and compiled, and where five steps of it spend their time
2. forms of one operation: matrix products, attention, the draw
3. plain decoding in bursts, and with a CUDA graph recorded by hand (lab/forms.py)
4. sparse passes over long contexts
5. speculative decoding, with a draft that costs nothing and with one of a 1B shape
6. logits beside transformers', and the methods end to end
"""
import functools
import statistics
from collections import Counter
from typing import NamedTuple

import torch

from kernels import attend, attend_grouped, causal_mask
from lab import shapes
from lab.forms import Burst, ByHand, flex_form, sample_in_groups
from lab.measure import MODELS, held_out_rows, moment
from lab.speed import quiet_transformers
from model import Reader, load
from specmini import DTYPES, Engine
from verify import (METHODS, Autoregressive, Draft, Exact, Session, Sparse, decode, draft_model, no_draft,
                    sample, shared_length, tokens_of)

KINDS = dict(target='llama', draft='qwen3', moe='qwen3_moe')      # of the embedded models
NAMES = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse'
SLACK = 2           # our rounding errors may be so many times theirs: the order of sums differs
TIES = 8            # likewise of two logits, in units of the larger one's last digit
GAMMA = 4
STEPS = 5           # of plain decoding that are watched
KERNELS = 12        # that are named, those that take longest first
REPEATS = 20        # of one operation, timed together


class Sizes(NamedTuple):
    target: str         # of shapes.SHAPES, whose weights are random
    draft: str
    sparse: str         # the target of sparse passes, and how many of its layers
    layers: int
    tokens: int         # written by each method
    long: int           # written by the random target, behind
    prompt: int         # so many
    contexts: tuple     # keys of attention; the last two also of sparse passes


ON_CUDA = Sizes('llama-3.1-8b', 'llama-3.2-1b', 'llama-3.1-8b', 8, 64, 256, 512, (1024, 8192, 32768))
ON_CPU = Sizes('embedded', 'embedded', 'small', 2, 12, 64, 32, (1024, 16384))


class Result(NamedTuple):
    said: str
    good: bool = True


# -------------------------------------------------------------------------- networks beside transformers'

@torch.inference_mode()
def parity(name, dtype, device):
    """Our logits and transformers', each against the same weights computed in fp32: errors of rounding.

    What rounding does to transformers is what it may do to us, SLACK times; a wrong position, norm or mask
    moves logits tens of times as far. We read a prompt, then five positions, one at a time, three. name: of
    an embedded model.
    """
    network = functools.partial(quiet_transformers().AutoModelForCausalLM.from_pretrained,
                                experts_implementation='eager')     # others want widths of 8
    model, tokenizer, _ = load(MODELS / name, device, DTYPES[dtype])
    row, = held_out_rows('math', 1, seed=7)
    line = tokenizer.encode(row['prompt'] + row['solution']).ids
    ids = torch.tensor([line])
    exact = network(MODELS / name, dtype=torch.float32)(ids).logits[0]
    theirs = network(MODELS / name, dtype=DTYPES[dtype]).to(device)(ids.to(device)).logits[0]
    error = rms(theirs, exact)
    reader = Reader(model, len(line))
    rows = []
    n = len(line)
    for begin, end in ((0, n - 10), (n - 10, n - 5), (n - 5, n - 4), (n - 4, n - 3), (n - 3, n)):
        rows.append(reader.read(line[:end], [], model.full, end - begin))
    own = rms(torch.cat(rows), exact)
    size = rms(exact, 0)
    return Result(f'error {own / size:.2%} of the logits, transformers {error / size:.2%}',
                  own <= SLACK * error)


def rms(found, wanted):
    """The root mean square of a difference, as a float; the wanted one is on the CPU."""
    return float((found.cpu().float() - wanted).square().mean().sqrt())


# --------------------------------------------------------------------------------------------- the methods

@functools.cache
def embedded_engine(sizes, device, dtype, compiled):
    """(an Engine of the embedded pair, the ids of its prompt)."""
    engine = Engine(MODELS / 'target', MODELS / 'draft', max_new=sizes.tokens, device=device, dtype=dtype,
                    compile=compiled)
    row, = held_out_rows('math', 1, seed=7)
    ids = engine.tokenizer.encode(row['prompt']).ids
    engine.open([ids])
    return engine, ids


def end_to_end(engine_and_ids, name):
    """A method writes greedily and at temperature 0.8; where it is lossless, plain decoding's text.

    A greedy text may part from it where the target's two best logits are a near tie, see TIES.
    """
    engine, ids = engine_and_ids()
    texts = []
    for method, temperature in ((name, 0.0), (name, 0.8), ('ar', 0.0)):
        engine.temperature = temperature
        texts.append(tokens_of(engine.write(ids, METHODS[method]())))
    tokens, sampled, wanted = texts
    said = f'{len(tokens)} tokens, {len(sampled)} sampled'
    if not tokens or not sampled or not engine.lossless(METHODS[name]()):
        return Result(f'{said}; lossy', bool(tokens and sampled))
    if tokens == wanted:
        return Result(f'{said}; text of `ar`')
    same = shared_length(tokens, wanted)
    reader = engine.readers['target']
    logits = reader.read(ids + wanted[:same], [], reader.model.full, 1)[0]
    gap = float(logits.max() - logits[tokens[same]])
    tie = TIES * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return Result(f'{said}; parts from `ar` at token {same}, logit gap {gap:.2g}, a tie up to {tie:.2g}',
                  gap <= tie)


# ------------------------------------------------------------------------------------ a large random target

@functools.cache
def counting_network(shape, capacity, device, dtype):
    """A random network whose greedy text counts up, so that a draft that is right can be pretended.

    The head is the embedding moved by one row, and what the layers add is small beside the embedding: the
    next token is the last one plus 1, by a wide margin, whatever a pass rounds.
    """
    model = shapes.random_model(shapes.config_of(shape, None, capacity + 64), device, dtype)
    for key, weight in model.named_parameters():
        if key.endswith(('o_proj.weight', 'down_proj.weight')):
            weight.mul_(0.01)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(50)
    model.lm_head.weight.copy_(embedding.roll(1, 0))
    return model


def dialled(right, session, plan):
    """A Draft of the counting network's own text; right: of each position whether its token is right.

    Where there is a draft model it drafts as many tokens, for the time that this takes.
    """
    if session.draft:
        draft_model(session, plan)
    V = session.target.model.vocab
    tokens = []
    token = session.tokens[-1]
    begin = len(session.tokens)
    for good in right[begin:begin + plan.n]:
        token = (token + (1 if good else 2)) % V
        tokens.append(token)
    return Draft.points(tokens, session.target.model)


# --------------------------------------------------------------------------------- forms of one operation

def in_turn(forms):
    """Microseconds of each of the forms {name: function}, taken in turn, and times the first one."""
    runs = [functools.partial(repeated, form) for form in forms.values()]
    times = [1e6 * seconds / REPEATS for seconds in shapes.seconds_of(runs)]
    return beside(forms, times, 'us')


def beside(names, times, unit):
    """The Result of several times; in brackets how many times as fast as the first."""
    return Result('; '.join(f'{name} {t:.4g} {unit} ({times[0] / t:.2f})' for name, t in zip(names, times)))


def repeated(form):
    for _ in range(REPEATS):
        form()


def multiply_and_sum(x, weight):
    return (x[:, None] * weight).sum(-1)


def product_forms(rows, wide, out, device, dtype):
    x = torch.randn(rows, wide, device=device, dtype=dtype)
    weight = torch.randn(out, wide, device=device, dtype=dtype)
    fused = torch.compile(multiply_and_sum, dynamic=False)
    forms = dict(library=lambda: torch.nn.functional.linear(x, weight), fused=lambda: fused(x, weight))
    return in_turn(forms)


def attention_forms(config, T, S, device, dtype):
    q, k, v = (torch.randn(1, heads, length, config.head_dim, device=device, dtype=dtype)
               for heads, length in ((config.num_attention_heads, T), (config.num_key_value_heads, S),
                                     (config.num_key_value_heads, S)))
    mask = causal_mask(T, S, q)
    forms = dict(flash=lambda: attend(q, k, v, None, None), masked=lambda: attend_grouped(q, k, v, mask))
    for block in (16, 32, 64, 128):
        forms[f'flex {block}'] = functools.partial(flex_form(q, k, block), q, k, v)
    return in_turn(forms)


def draw_forms(rows, V, device):
    p = torch.randn(rows, V, device=device).softmax(-1)

    def in_groups():
        uniform = torch.rand(rows, 1, dtype=torch.float64).to(device, non_blocking=True)     # as sample does
        return sample_in_groups(p, uniform)
    return in_turn(dict(one_sum=lambda: sample(p), in_groups=in_groups))


def sparse_forms(sizes, context, compiled, device, dtype):
    """A verifying pass over GAMMA + 1 positions behind a random cache, dense and sparse by some anchors.

    Through some of the layers: a compiled pass takes seconds a layer to compile.
    """
    config = shapes.config_of(sizes.sparse, sizes.layers, context + 64)
    model = shapes.random_model(config, device, dtype)
    reader = shapes.random_cache(model, context, compiled)
    L = model.config.num_hidden_layers
    session = Session(reader, None, None, [], 0, calibration=dict(sparse=dict(anchors=list(range(L)))))
    paths = dict(dense=model.full)
    for anchors in (4, 2, 1):
        method = Sparse(moe_skip=0, block=64, anchors=anchors)
        paths[f'{anchors} anchors'] = method.sparse_path(model.full, session)
    ids = torch.arange(GAMMA + 1, device=device)[None]
    runs = [functools.partial(reader.feed, ids, context, path, GAMMA + 1) for path in paths.values()]
    times = [1000 * seconds for seconds in shapes.seconds_of(runs)]
    return beside(paths, times, 'ms')


# ------------------------------------------------------------------------------------------------ the ladder

class Ladder:
    """The random target, its readers, and six rungs: what each times or checks, as functions of a Result."""

    def __init__(self, sizes, device, dtype):
        self.sizes = sizes
        self.device = device
        self.dtype = dtype
        self.config = shapes.config_of(sizes.target, None, 1)
        self.capacity = sizes.prompt + sizes.long
        self.readers = {}       # (shape, form): a Reader of a network that counts up
        self.plain = {}         # form: tokens a second of plain decoding

    def reader(self, shape, form):
        """The Reader of a network of this shape, its cache empty; form: eager, compiled, or by_hand."""
        if (shape, form) not in self.readers:
            model = counting_network(shape, self.capacity, self.device, DTYPES[self.dtype])
            self.readers[shape, form] = Reader(model, self.capacity, form == 'compiled')
            if form == 'by_hand':
                self.readers[shape, form].compiled = ByHand(model)
        self.readers[shape, form].forget()
        return self.readers[shape, form]

    def session(self, form, source=no_draft, drafting=False):
        """A Session behind a prompt that counts up; drafting: whether a draft model reads along."""
        draft = self.reader(self.sizes.draft, form) if drafting else None
        prompt = list(range(self.sizes.prompt))
        session = Session(self.reader(self.sizes.target, form), draft, source, prompt, self.sizes.long,
                          generator=torch.Generator().manual_seed(0))
        session.read_prompt()
        return session

    def timed(self, form, method, *drafts):
        """(Cycles, tokens a second) of a text, the second of two because the first warms up; see session."""
        for _ in range(2):
            session = self.session(form, *drafts)
            begin = moment()
            cycles = list(decode(session, method))
            seconds = moment() - begin
        wanted = [(self.sizes.prompt + i) % self.config.vocab_size for i in range(self.sizes.long)]
        assert tokens_of(cycles) == wanted, 'the random target does not count up: no draft can be dialled'
        return cycles, self.sizes.long / seconds

    def ar(self, form, method):
        """Plain decoding: tokens a second, and bytes of weights that it reads a second."""
        _, speed = self.timed(form, method)
        self.plain.setdefault(form, speed)
        model = self.reader(self.sizes.target, form).model
        size = model.read_bytes(model.full)
        return Result(f'{speed:.1f} tokens/s, {speed * size / 1e9:.0f} GB/s of weights, '
                      f'{speed / self.plain[form]:.2f} times the first of its form')

    def sd(self, form, chance, drafting=False):
        """Speculative decoding with a draft that is right so often; drafting: it takes a draft's passes."""
        if form not in self.plain:
            self.ar(form, Autoregressive())
        lots = torch.rand(self.capacity, generator=torch.Generator().manual_seed(0))
        source = functools.partial(dialled, (lots < chance).tolist())
        cycles, speed = self.timed(form, Exact(GAMMA), source, drafting)
        kept = statistics.fmean(verdict['kept'] for cycle in cycles for verdict in cycle.judged)
        return Result(f'acceptance {kept:.2f}, {speed:.1f} tokens/s, '
                      f'{speed / self.plain[form]:.2f} times `ar`', abs(kept - chance) < 0.2)

    def watched(self, form):
        """Where STEPS steps of plain decoding spend their time, by kernel; on a CPU by operation."""
        text = decode(self.session(form), Autoregressive())
        for _ in range(STEPS):                          # warms up
            next(text)
        with torch.profiler.profile() as seen:
            begin = moment()                            # not before, because the profiler takes long to begin
            for _ in range(STEPS):
                next(text)
            milliseconds = (moment() - begin) * 1000 / STEPS
        taken, calls = Counter(), Counter()
        kind = self.device.upper()
        for event in seen.events():
            if event.device_type.name == kind:
                own = event.self_cpu_time_total if kind == 'CPU' else event.device_time_total
                taken[event.name] += own / 1000 / STEPS
                calls[event.name] += 1
        graphs = torch._dynamo.utils.counters
        lines = []
        for name, ms in taken.most_common(KERNELS):
            lines.append(f'{name[:60]} {calls[name] / STEPS:.0f} times, {ms:.3f} ms')
        return Result(f'{milliseconds:.2f} ms a step, busy {taken.total() / milliseconds:.0%}; '
                      f'graphs {graphs["stats"]["unique_graphs"]}, left out by CUDA graphs '
                      f'{graphs["inductor"]["cudagraph_skips"]}; a step: {"; ".join(lines)}')

    def plain_decoding(self):
        for form in ('eager', 'compiled'):
            yield f'`ar`, {form}', functools.partial(self.ar, form, Autoregressive())
            yield f'{STEPS} steps, {form}', functools.partial(self.watched, form)

    def operations(self):
        C, F, V = self.config.hidden_size, self.config.intermediate_size, self.config.vocab_size
        tensors = self.device, DTYPES[self.dtype]
        for wide, out in ((C, C), (C, 2 * F), (F, C), (C, V)):
            for rows in (1, GAMMA + 1, 8):
                yield (f'{rows} x {wide} by {wide} x {out}',
                       functools.partial(product_forms, rows, wide, out, *tensors))
        for S in self.sizes.contexts:
            for T in (1, GAMMA + 1):
                yield (f'attention of {T} over {S}',
                       functools.partial(attention_forms, self.config, T, S, *tensors))
        for rows in (1, GAMMA + 1):
            yield f'{rows} draws of {V}', functools.partial(draw_forms, rows, V, self.device)

    def by_hand(self):
        for form in ('eager', 'compiled', 'by_hand'):
            yield f'`ar`, {form}', functools.partial(self.ar, form, Autoregressive())
            yield f'`ar` in bursts, {form}', functools.partial(self.ar, form, Burst())
            yield f'`sd`, dialled 0.8, {form}', functools.partial(self.sd, form, 0.8)

    def sparse_passes(self):
        for context in self.sizes.contexts[-2:]:
            for compiled in (False, True):
                how = '--compile' if compiled else 'eager'
                yield (f'{GAMMA + 1} positions behind {context}, {self.sizes.layers} layers, {how}',
                       functools.partial(sparse_forms, self.sizes, context, compiled, self.device,
                                         DTYPES[self.dtype]))

    def drafts(self):
        for form in ('eager', 'compiled'):
            for chance in (0.6, 0.8, 1.0):              # that a pretended draft token is right
                for drafting in (False, True):
                    yield (f'`sd`, dialled {chance}, {form}{", and a draft" if drafting else ""}',
                           functools.partial(self.sd, form, chance, drafting))

    def parity(self):
        for name, kind in KINDS.items():
            for few in ('bf16', 'fp16'):
                yield f'logits of {kind}, {few}', functools.partial(parity, name, few, self.device)
        for compiled in (False, True):
            how = ' --compile' if compiled else ''
            for name in NAMES[:2] if compiled and self.device == 'cpu' else NAMES:
                pair = functools.partial(embedded_engine, self.sizes, self.device, self.dtype, compiled)
                yield f'`{name}{how}`', functools.partial(end_to_end, pair, name)


RUNGS = 'plain_decoding', 'operations', 'by_hand', 'sparse_passes', 'drafts', 'parity'


def run_all(device, dtype, rung=None):
    """Prints a table a rung, a line a check; returns the exit status: 1 if one of them failed."""
    name = torch.cuda.get_device_name() if device == 'cuda' else 'CPU'
    print(f'{name}, {dtype}, torch {torch.__version__}', flush=True)
    torch._dynamo.config.recompile_limit = 256          # a graph for each shape
    failures = 0
    ladder = Ladder(ON_CUDA if device == 'cuda' else ON_CPU, device, dtype)
    for number in [rung] if rung else range(1, len(RUNGS) + 1):
        lines = RUNGS[number - 1]
        print(f'\n| {number}. {lines.replace("_", " ")} | found | |\n|---|---|---|', flush=True)
        for what, check in getattr(ladder, lines)():
            found = checked(check)
            failures += not found.good
            print(f'| {what} | {found.said} | {"ok" if found.good else "FAILED"} |', flush=True)
    return int(failures > 0)


def checked(check):
    """The Result of a check; of a failure its first words, because the other lines are still wanted."""
    try:
        return check()
    except Exception as error:
        said = ' '.join(str(error).split())[:200].replace('|', '/')
        return Result(f'{type(error).__name__}: {said}', False)
