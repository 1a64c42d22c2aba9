"""p5: all of it in one file: two caches, and the rule of CM-ASD, one of the five methods. LOSSY.

New since p4: if the draft is sure, a good guess is enough. A guess x is kept with the chance
min(1, p(x) / (tau q(x))); tau falls as the draft's confidence grows, here its largest q. With tau = 1 this
is p3's rule, and exact. Source: Sen et al. 2025; whole in verify.CmAsd.

What verify.py adds to this file: texts that end, temperature, top-k and top-p; paths that skip layers or
keys; a record of each decision; and a loop that all methods share.
"""
import torch

from model import load
from specmini import EMBEDDED

PROMPT = 'One evening Mia the fox went to the market with a map.'
N = 80                      # tokens to write
LONGEST = 10                # guesses of a block at most
SURE = 0.4                  # drafting goes on while the largest q is at least this
BASE, SLOPE = 0.3, 0.5      # tau is 0.3 if the draft is certain, 0.8 if it knows nothing


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

    def probs(self, ids, n):
        """The distributions [n, V] of the tokens after the last n of these ids, by one pass."""
        start = min(self.length, len(ids) - n)
        new = torch.tensor([ids[start:]])                                               # [1, T]
        positions = torch.arange(start, len(ids))
        # the pass writes its own keys into the stores, and sees the first len(ids) of them
        hidden = self.model(new, positions, self.model.full, self.stores, len(ids))     # [1, T, C]
        self.length = len(ids)
        self.passes += 1
        return self.model.logits(hidden[0, -n:]).softmax(-1)


def draw(p):
    """A token, by its chance; p [V]."""
    return int(torch.multinomial(p, 1))


def propose(draft, ids):
    """(guesses, the distributions q [V] that they were drawn from); ends after one that is not sure."""
    guesses, qs = [], []
    while len(guesses) < LONGEST:
        q = draft.probs(ids + guesses, 1)[0]
        qs.append(q)
        guesses.append(draw(q))
        if q.max() < SURE:
            break
    return guesses, qs


def accept(guesses, qs, ps):
    """The tokens of a cycle; ps [n + 1, V]: the target's distributions at each guess and after the last."""
    for i, (x, q, p) in enumerate(zip(guesses, qs, ps)):
        tau = min(1.0, BASE + SLOPE * (1 - float(q.max())))
        if not torch.rand(()) < p[x] / (tau * q[x]):
            rest = (p - q).clamp(min=0)
            return guesses[:i] + [draw(rest / rest.sum())]
    return guesses + [draw(ps[-1])]


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target, and of the draft)."""
    ids = list(ids)
    end = len(ids) + n
    target, draft = [Cached(model, end + LONGEST) for model in (target, draft)]
    while len(ids) < end:
        guesses, qs = propose(draft, ids)                       # propose
        ps = target.probs(ids + guesses, len(guesses) + 1)      # score: one pass for all guesses
        ids += accept(guesses, qs, ps)                          # accept, commit
    return ids[:end], target.passes, draft.passes


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target, tokenizer, _ = load(EMBEDDED / 'target')
    draft, _, _ = load(EMBEDDED / 'draft')
    with torch.inference_mode():
        ids, passes, drafted = generate(target, draft, tokenizer.encode(PROMPT).ids, N)
    print(tokenizer.decode(ids))
    print(f'{N} tokens, {passes} target passes, {drafted} draft passes: '
          f'{N / passes:.2f} tokens a target pass')


if __name__ == '__main__':
    main()
