"""Random networks of real shapes."""
import torch

from model import Config, Transformer

SHAPES = {      # V, C, F, layers, H, G, D
    'small': (1024, 128, 256, 4, 8, 2, 32),
    'smaller': (1024, 64, 128, 2, 4, 2, 16),
    'llama-3.1-8b': (128256, 4096, 14336, 32, 32, 8, 128),
    'llama-3.2-1b': (128256, 2048, 8192, 16, 32, 8, 64)}


def config_of(shape, capacity):
    """The Config of a shape."""
    return Config('llama', *SHAPES[shape], capacity)


def counting_model(config, device, dtype):
    """A random network whose greedy text counts up, so that a draft that is right can be pretended.

    The head is the embedding moved by one row, and what the layers add is small beside the embedding: the
    next token is the last one plus 1, by a wide margin, whatever a pass rounds.
    """
    with torch.device('meta'):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for name, weight in model.named_parameters():
        spread = 0.0002 if name.endswith(('o_proj.weight', 'down_proj.weight')) else 0.02
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, spread)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(50)
    model.lm_head.weight.copy_(embedding.roll(1, 0))
    model.set_context(config.max_position_embeddings)
    return model
