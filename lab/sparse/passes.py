"""One verifying pass, dense against sparse, over a random cache: `python -m lab.bench pass`.

Times are CPU time of the process, so that others on the core do not count; on CUDA they are of the wall. The
forms take turns, and the median is shown; `times` is against the dense one.
"""
import statistics
import time
from functools import partial

import torch

from model import Config, Reader, Transformer, compile_forward
from specmini import DTYPES
from verify import Session, Sparse

SHAPES = {      # layers, C, F, H, G, D, V, (experts, chosen, F of one)
    'embedded': (10, 128, 336, 4, 2, 32, 1024, ()),
    'small': (2, 1024, 2048, 32, 8, 64, 1024, ()),      # at 8k attention is more than half of the time
    'llama-3.1-8b': (32, 4096, 14336, 32, 8, 128, 128256, ()),
    'llama-3.2-1b': (16, 2048, 8192, 32, 8, 64, 128256, ()),
    'small-moe': (2, 512, 1024, 8, 4, 64, 1024, (32, 4, 256)),
    'qwen3-30b-a3b': (48, 2048, 6144, 32, 4, 128, 151936, (128, 8, 768))}
KNOBS = dict(attn=dict(rho=0.25), ffn=dict(ffn_quantile=0.6), moe=dict(moe_skip=3, moe_quantile=1.0))
OFF = dict(rho=1.0, moe_skip=1, moe_quantile=0.0, dense_below=0, block=64)
RUNS = 9                # of which the median counts


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
    return model


def random_cache(model, length):
    """A Reader whose cache holds `length` random positions, written by the full path."""
    reader = Reader(model, length)
    for store in reader.cache.stores:
        store.normal_()
    reader.cache.record([1] * length, 0, model.full)
    return reader


def forms(model):
    """{name: Path}: the dense one, then every combination of the parts that this model can leave out.

    A dense mixture is a sparse one that skips nothing, so that the experts it reads are counted alike.
    """
    L = model.config.num_hidden_layers
    measured = dict(experts=[[[0.0, 1.0]] * 3] * L, channels=[[1e-3] * 2] * L)
    session = Session(Reader(model, 8), None, None, [], 0, calibration=dict(sparse=measured))
    second = 'moe' if any(model.config.mixtures) else 'ffn'
    found = {}
    for parts in ((), ('attn',), (second,), ('attn', second)):
        knobs = dict(OFF)
        for part in parts:
            knobs |= KNOBS[part]
        found['+'.join(parts) or 'dense'] = Sparse(**knobs).view(model.full, session)
    return found


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


# -------------------------------------------------------------------------------------------------- the table

def print_forms(args):
    """Prints a line for each form, context and number of positions; args: the flags of lab.bench."""
    dtype = DTYPES[args.dtype]
    model = random_model(config_of(args.shape, args.layers, max(args.contexts) + 16), args.device, dtype)
    how = 'compiled' if args.compile else 'eager'
    print(f'{args.shape}, {model.config.num_hidden_layers} layers, {dtype}, {how}')
    print('context  T  form            ms   times')
    for context in args.contexts:
        reader = random_cache(model, context)
        reader.compiled = compile_forward(model) if args.compile else None
        paths = forms(model)
        for T in args.positions:
            ids = torch.arange(T, device=args.device)[None]
            runs = [partial(reader.feed, ids, context, path, T) for path in paths.values()]
            times = seconds_of(runs, RUNS, args.device)
            for name, seconds in zip(paths, times):
                faster = times[0] / seconds
                print(f'{context:7} {T:2}  {name:10} {seconds * 1e3:7.2f} {faster:7.2f}', flush=True)
