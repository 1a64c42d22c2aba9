"""Random networks of real shapes."""
import torch

from model import Config, Transformer

SHAPES = {      # layers, C, F, H, G, D, V, (experts, chosen, F of one)
    'small': (4, 128, 256, 8, 2, 32, 1024, ()),
    'smaller': (2, 64, 128, 4, 2, 16, 1024, ()),
    'llama-3.1-8b': (32, 4096, 14336, 32, 8, 128, 128256, ()),
    'llama-3.2-1b': (16, 2048, 8192, 32, 8, 64, 128256, ()),
    'qwen3-30b-a3b': (48, 2048, 6144, 32, 4, 128, 151936, (128, 8, 768))}


def config_of(shape, layers, capacity):
    """The Config of a shape; layers: how many instead of the shape's, or None."""
    L, C, F, H, G, D, V, mixture = SHAPES[shape]
    L = layers or L
    if not mixture:
        return Config('llama', V, C, F, L, H, G, D, capacity)
    E, chosen, width = mixture
    return Config('qwen3', V, C, F, L, H, G, D, capacity, experts=(E,) * L, num_experts_per_tok=chosen,
                  moe_intermediate_size=width)


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
