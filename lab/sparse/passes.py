"""One verifying pass, dense against sparse, on a random model of a given shape: `python -m lab.bench pass`.

Times are CPU time of the process: the time of the pass where one thread computes and others share the core.
The forms are run in turn, the median is shown; `times` is against the dense one. MB and MFLOP are counted
from what the pass chose (see work), `run` MFLOP from what the eager code multiplies (see as_run). The
ceilings are the speed-ups that they alone would allow, and (`parts`) that the FLOPs would if those of each
part of the pass took as long as they do in the dense one, run eagerly.
"""
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lab.sparse.rivals import ledger
from model import Config, MLP, Reader, Transformer, compile_forward
from specmini import DTYPES
from train_mask import watched
from verify import Session, Sparse

SHAPES = {      # layers, C, F, H, G, D, V, (experts, chosen, F of one)
    'embedded': (10, 128, 336, 4, 2, 32, 1024, ()),
    'embedded-draft': (4, 64, 168, 2, 1, 32, 1024, ()),
    'small': (2, 1024, 2048, 32, 8, 64, 1024, ()),      # at 8k attention is more than half of the time
    'llama-3.1-8b': (32, 4096, 14336, 32, 8, 128, 128256, ()),
    'llama-3.2-1b': (16, 2048, 8192, 32, 8, 64, 128256, ()),
    'small-moe': (2, 512, 1024, 8, 4, 64, 1024, (32, 4, 256)),
    'qwen3-30b-a3b': (48, 2048, 6144, 32, 4, 128, 151936, (128, 8, 768))}
KNOBS = dict(attn=dict(rho=0.25), ffn=dict(ffn_share=0.4), moe=dict(moe_skip=3, moe_quantile=1.0))
OFF = dict(rho=1.0, moe_skip=1, moe_quantile=0.0, dense_below=0, block=64)
RUNS = 9                # of which the median is shown


# ---------------------------------------------------------------------------------- the models and the passes

def config_of(shape, layers, capacity):
    """The Config of a shape; layers: how many instead of the shape's, or None."""
    L, C, F, H, G, D, V, mixture = SHAPES[shape]
    L = layers or L
    if not mixture:
        return Config('llama', V, C, F, L, H, G, D, capacity)
    E, chosen, width = mixture
    return Config('qwen3', V, C, F, L, H, G, D, capacity, experts=(E,) * L, num_experts_per_tok=chosen,
                  moe_intermediate_size=width)


def random_model(config, device, dtype):
    """A Transformer with random weights, made on the device."""
    with torch.device('meta'):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for weight in model.parameters():
        mean = 1.0 if weight.ndim == 1 else 0.0
        torch.nn.init.normal_(weight, mean, 0.02)
    model.set_context(config.max_position_embeddings)
    model.join()
    return model


def lay_by_channel(model):
    """Lays each `down` channel by channel in memory, where sparse channels are read fastest: equal values."""
    for layer in model.model.layers:
        if isinstance(layer.mlp, MLP):
            down = layer.mlp.down_proj.weight
            down.data = down.data.t().contiguous().t()


def random_cache(model, length):
    """A Reader whose cache holds `length` random positions, written by the full path."""
    reader = Reader(model, length)
    for keys, values in reader.cache.stores:
        keys.normal_()
        values.normal_()
    reader.cache.record([1] * length, 0, model.full)
    return reader


def forms(model):
    """{name: Path}: the dense one, then every combination of the parts that this model can leave out.

    A dense mixture is a sparse one that skips nothing, so that the experts it reads are counted alike.
    """
    betas = [[[0.0, 1.0]] * 3] * model.config.num_hidden_layers
    session = Session(Reader(model, 8), None, None, [], 0, calibration=dict(sparse=dict(experts=betas)))
    second = 'moe' if any(model.config.mixtures) else 'ffn'
    found = dict(dense=Sparse(**OFF).view(model.full, session))
    for parts in (['attn'], [second], ['attn', second]):
        knobs = dict(OFF)
        for part in parts:
            knobs.update(KNOBS[part])
        found['+'.join(parts)] = Sparse(**knobs).view(model.full, session)
    return found


def choices(path, reader, T):
    """The ledger of one pass over T positions after the cached ones; the cache is left as it was."""
    log = []
    cached = reader.cache.length
    reader.read(reader.cache.ids, list(range(T)), watched(path, log), T)
    reader.cache.record(reader.cache.ids[:cached], cached, reader.model.full)
    return ledger(log, reader.model, cached)


# ----------------------------------------------------------------------------------- bytes, FLOPs and seconds

def attention_work(config, row, T):
    """(numbers of the cache that a layer reads, products that T positions make of them); row: of a ledger.

    The products of queries, keys and values, and the scores of blocks by their means.
    """
    heads = config.num_key_value_heads * config.head_dim                # numbers of one key of every key head
    group = config.num_attention_heads // config.num_key_value_heads
    keys = heads * (2 * row['keys'] + row['means'])
    products = heads * (2 * row['seen'] * group * T + row['means'] * row['asked'])
    return keys, products


def ffn_work(config, row):
    """(weights that a layer's feed-forward reads for a pass, products that one token makes with them)."""
    if 'experts' in row:
        expert = 3 * config.moe_intermediate_size * config.hidden_size
        return row['distinct'] * expert, row['experts'] * expert
    weights = config.hidden_size * (row['gate'] + row['spared'] * row['union'])
    products = config.hidden_size * (row['gate'] + row['spared'] * row['channels'])
    return weights, products


def rest_work(config, layers):
    """Weights of the projections of so many layers and of the head; a token makes a product with each."""
    heads = config.num_key_value_heads * config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    return config.hidden_size * (config.vocab_size + layers * 2 * (group + 1) * heads)


def work(model, rows, T):
    """{part: (bytes, FLOPs)} that a pass over T positions with this ledger has to read and to do.

    Bytes count what any position needs, once; FLOPs what each needs. attention is its products and the
    scores of blocks by their means; the projections and the head are the rest.
    """
    config = model.config
    keys = key_products = weights = weight_products = 0
    for row in rows:
        read, done = attention_work(config, row, T)
        keys += read
        key_products += done
        read, done = ffn_work(config, row)
        weights += read
        weight_products += done
    rest = rest_work(config, len(rows))
    size = model.cos.element_size()                                     # bytes of a number
    return dict(attention=(size * keys, 2 * key_products),
                ffn=(size * weights, 2 * T * weight_products),
                rest=(size * rest, 2 * T * rest))


def as_run(rows):
    """The ledger with the keys and channels that the code multiplies in the place of those that are needed.

    An ideal kernel leaves out all that is not needed. Ours multiplies zeros where each token has channels of
    its own, and hidden keys where each row has keys of its own.
    """
    found = []
    for row in rows:
        row = row | dict(seen=row['run'])
        if 'width' in row:
            row['channels'] = row['width']
        found.append(row)
    return found


class Cost(NamedTuple):
    """What a whole pass has to read and to do."""
    bytes: float
    flops: float        # that each position needs
    run: float          # FLOPs that the code executes, eagerly


def cost(model, rows, T):
    """The Cost of a pass over T positions with this ledger."""
    size, flops = totals(work(model, rows, T))
    _, run = totals(work(model, as_run(rows), T))
    return Cost(size, flops, run)


def totals(found):
    """(bytes, FLOPs) of all parts of a pass; found: from work."""
    sizes, flops = zip(*found.values())
    return sum(sizes), sum(flops)


def clock(device):
    """A moment in seconds: of the process's CPU time, or on CUDA of the wall."""
    if device == 'cuda':
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds_of(runs, count, device):
    """[seconds] of each of the runs (functions), taken in turn `count` times after one warm-up: medians."""
    taken = [[] for _ in runs]
    for _ in range(count + 1):
        for run, times in zip(runs, taken):
            begin = clock(device)
            run()
            times.append(clock(device) - begin)
    return [statistics.median(times[1:]) for times in taken]


class Stopwatch:
    """Sums the seconds that functions take, by part of a pass."""

    def __init__(self, device):
        self.device = device
        self.spent = dict(attention=0.0, ffn=0.0)

    def timed(self, function, part):
        """The function, its seconds added to that part."""
        def run(*args):
            begin = clock(self.device)
            out = function(*args)
            self.spent[part] += clock(self.device) - begin
            return out
        return run

    def path(self, full):
        """The dense path, timed."""
        attends = tuple(self.timed(f, 'attention') for f in full.attends)
        ffns = tuple(self.timed(f, 'ffn') for f in full.ffns)
        return replace(full, attends=attends, ffns=ffns)


def profile(reader, ids, count, device):
    """{part: seconds} of a dense pass over ids [1, T] after the cached tokens, medians of `count` passes."""
    spent = dict(attention=[], ffn=[])
    whole = []
    for _ in range(count):
        watch = Stopwatch(device)
        path = watch.path(reader.model.full)
        begin = clock(device)
        reader.feed(ids, reader.cache.length, path, ids.shape[1])
        whole.append(clock(device) - begin)
        for part, seconds in watch.spent.items():
            spent[part].append(seconds)
    found = {part: statistics.median(times) for part, times in spent.items()}
    found['rest'] = statistics.median(whole) - found['attention'] - found['ffn']
    return found


def machine(device, dtype):
    """(bytes a second, FLOPs a second), measured: 256 MB summed, on CUDA 1 GB copied; a product of squares.

    Sizes are such that a GPU works for hundreds of microseconds, of which a launch is a few.
    """
    on_gpu = device == 'cuda'
    side = 8192 if on_gpu else 2048
    size = 2 ** 30 if on_gpu else 2 ** 28
    numbers = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
    square = torch.randn(side, side, device=device).to(dtype)
    move = partial(torch.empty_like(numbers).copy_, numbers) if on_gpu else numbers.sum
    moved = 2 * size if on_gpu else size                # a copy reads and writes
    seconds, product = seconds_of([move, partial(torch.matmul, square, square)], 5, device)
    return moved / seconds, 2 * side ** 3 / product


# -------------------------------------------------------------------------------------------------- the table

def print_forms(args):
    """Prints a line for each form, context and number of positions; args: the flags of lab.bench."""
    dtype = DTYPES[args.dtype]
    model = random_model(config_of(args.shape, args.layers, max(args.contexts) + 16), args.device, dtype)
    lay_by_channel(model)
    peak = machine(args.device, dtype)
    bandwidth, flops = peak
    how = 'compiled' if args.compile else 'eager'
    layers = model.config.num_hidden_layers
    print(f'{args.shape}, {layers} layers, {dtype}, {how}: {bandwidth / 1e9:.1f} GB/s and '
          f'{flops / 1e9:.0f} GFLOP/s measured')
    print('context  T  form            ms   times    run     MB  MFLOP  of GB/s  ceiling: bytes FLOPs parts')
    for context in args.contexts:
        reader = random_cache(model, context)
        forward = compile_forward(model) if args.compile else None
        for T in args.positions:
            print_passes(reader, T, forward, peak)


def print_passes(reader, T, forward, peak):
    """The table's lines of one context; forward: compiled, or None; peak: see machine."""
    model = reader.model
    device = model.cos.device.type
    ids = torch.arange(T, device=device)[None]
    start = reader.cache.length
    paths = forms(model)
    reader.compiled = None          # a compiled pass can neither be watched nor taken apart
    works = []
    executed = []
    for path in paths.values():
        rows = choices(path, reader, T)
        works.append(work(model, rows, T))
        executed.append(cost(model, rows, T).run)
    parts = profile(reader, ids, RUNS, device)
    where = f'{start:7} {T:2}'
    print_profile(where, parts, works[0], peak)
    reader.compiled = forward
    runs = [partial(reader.feed, ids, start, path, T) for path in paths.values()]
    times = seconds_of(runs, RUNS, device)
    for name, found, run, seconds in zip(paths, works, executed, times):
        times_faster = times[0] / seconds
        begin = f'{where}  {name:14} {seconds * 1e3:7.2f} {times_faster:6.2f} {run / 1e6:6.0f}'
        print_form(begin, seconds, found, works[0], parts, peak)


def print_profile(where, parts, dense, peak):
    """How near each part of the dense pass comes to what the machine can do."""
    bandwidth, most_flops = peak
    for part, seconds in parts.items():
        size, flops = dense[part]
        of_bytes = size / seconds / bandwidth
        of_flops = flops / seconds / most_flops
        print(f'{where}  {part:14} {seconds * 1e3:7.2f} of the dense pass, eager: '
              f'{of_bytes:.0%} of the bytes a second, {of_flops:.0%} of the FLOPs')


def print_form(begin, seconds, found, dense, parts, peak):
    """A form's line: what it reads and does, how fast, and the three ceilings; found, dense: from work."""
    size, flops = totals(found)
    dense_size, dense_flops = totals(dense)
    least = 0.0                         # seconds, if every part ran at the dense pass's speed
    for part, taken in parts.items():
        least += taken * found[part][1] / dense[part][1]
    bandwidth, _ = peak
    by_bytes = dense_size / size
    by_flops = dense_flops / flops
    by_parts = sum(parts.values()) / least
    print(f'{begin} {size / 1e6:6.1f} {flops / 1e6:6.0f} {size / seconds / bandwidth:10.0%} '
          f'{by_bytes:15.2f} {by_flops:5.2f} {by_parts:5.2f}', flush=True)


# ------------------------------------------------------------------------------------------------ the drawing

def draw_blocks(target, tokenizer, row, calibration, **knobs):
    """Lines: the blocks that one pass at the end of a row's prompt reads, for each key head of an anchor."""
    ids = tokenizer.encode(row['prompt']).ids
    draft = tokenizer.encode(row['solution']).ids[:4]
    reader = Reader(target, len(ids) + 5)
    session = Session(reader, None, None, ids, 5, calibration=calibration)
    path = Sparse(**knobs).view(target.full, session)
    cached = len(ids) - 1
    reader.read(ids[:-1], [], target.full, 0)
    log = []
    reader.read(ids, draft, watched(path, log), 5)
    yield f'{cached} cached tokens; # a block that is read, . one that is not, + the partial one'
    for sublayer, carry in log[::2]:                    # attention
        _, chooses, _ = path.attends[sublayer // 2].keywords['how']
        if not chooses:
            continue
        for head, chosen in enumerate(carry['blocks'][0].tolist()):
            shown = ''
            for block in range(cached // carry['block']):
                shown += '#' if block in chosen else '.'
            yield f'layer {sublayer // 2:2}  head {head}  {shown}+'
