"""Random networks of real shapes, and forms of one computation timed in turn."""
import statistics

import torch

from lab.measure import moment
from model import Config, Reader, Transformer

SHAPES = {      # layers, C, F, H, G, D, V, (experts, chosen, F of one)
    'embedded': (10, 128, 336, 4, 2, 32, 1024, ()),
    'small': (2, 1024, 2048, 32, 8, 64, 1024, ()),      # at 8k attention is more than half of the time
    'llama-3.1-8b': (32, 4096, 14336, 32, 8, 128, 128256, ()),
    'llama-3.2-1b': (16, 2048, 8192, 32, 8, 64, 128256, ()),
    'qwen3-30b-a3b': (48, 2048, 6144, 32, 4, 128, 151936, (128, 8, 768))}
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


def random_cache(model, length, compiled):
    """A Reader whose cache holds `length` random positions, written by the full path."""
    reader = Reader(model, length, compiled)
    for store in reader.cache.stores:
        store.normal_()
    reader.cache.record([1] * length, 0, model.full)
    return reader


def seconds_of(runs):
    """[seconds] of each of the runs (functions), taken in turn RUNS times after one warm-up: medians."""
    taken = [[] for _ in runs]
    for _ in range(RUNS + 1):
        for run, times in zip(runs, taken):
            begin = moment()
            run()
            times.append(moment() - begin)
    return [statistics.median(times[1:]) for times in taken]
