"""p1: plain decoding with a cache. A pass reads one token, because keys and values of the others are kept.

New since p0: in each layer a token looks at the keys and values of the tokens before it, and these never
change. So they are written down once, at their position, and a pass reads only what is not written yet.
"""
import torch

from lab.steps.p0 import demo


class Cached:
    """A model and its cache. It is given the whole text each time, and reads what the cache lacks."""

    def __init__(self, model, size):
        """size: tokens of the longest text."""
        config = model.config
        shape = 1, 2 * config.num_key_value_heads, size, config.head_dim
        self.model = model
        self.stores = [torch.zeros(shape, dtype=model.dtype)    # of a layer: keys, then values
                       for _ in range(config.num_hidden_layers)]
        self.length = 0         # tokens whose keys and values are in the stores
        self.passes = 0

    def logits(self, ids, n):
        """Logits [n, V] after each of the last n of these ids, by one pass.

        The last n are always read. So where one replaces a rejected guess, its keys overwrite that one's.
        """
        start = min(self.length, len(ids) - n)
        new = torch.tensor([ids[start:]])                                               # [1, T]
        positions = torch.arange(start, len(ids))
        # the pass writes its own keys into the stores, and sees the first len(ids) of them
        hidden = self.model(new, positions, self.model.full, self.stores, len(ids))     # [1, T, C]
        self.length = len(ids)
        self.passes += 1
        return self.model.logits(hidden[0, -n:])


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target, and of the draft)."""
    ids = list(ids)
    target = Cached(target, len(ids) + n)
    for _ in range(n):
        logits = target.logits(ids, 1)                      # [1, V], after the last id
        ids.append(int(logits[0].argmax()))
    return ids, target.passes, 0


if __name__ == '__main__':
    demo(generate)
