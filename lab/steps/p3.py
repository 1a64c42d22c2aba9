"""p3: sampling. What is drawn follows the target's distribution exactly, whatever the draft is.

New since p2: temperature 1. A guess x is kept with the chance min(1, p(x) / q(x)). One that is not is drawn
again from what q gave too rarely, max(p - q, 0). Source: Leviathan et al. 2023, algorithm 1.
"""
import torch

from lab.steps.p0 import demo
from lab.steps.p1 import Cached

GAMMA = 4
ROOM = 16       # tokens of the longest block of any step; those of p4 and p5 have 10


def draw(p):
    """A token, by its chance; p [V]."""
    return int(torch.multinomial(p, 1))


def propose(draft, ids):
    """(GAMMA guesses, the distributions q [V] that they were drawn from)."""
    guesses, qs = [], []
    for _ in range(GAMMA):
        q = draft.logits(ids + guesses, 1)[0].softmax(-1)
        qs.append(q)
        guesses.append(draw(q))
    return guesses, qs


def accept(guesses, qs, ps):
    """The tokens of a cycle; ps [n + 1, V]: the target's distributions."""
    for i, (x, q, p) in enumerate(zip(guesses, qs, ps)):
        if not torch.rand(()) < p[x] / q[x]:
            rest = (p - q).clamp(min=0)
            return guesses[:i] + [draw(rest / rest.sum())]
    return guesses + [draw(ps[-1])]


def generate(target, draft, ids, n, propose=propose, accept=accept):
    """(the ids and n more, passes of the target, and of the draft)."""
    ids = list(ids)
    end = len(ids) + n
    target, draft = [Cached(model, end + ROOM) for model in (target, draft)]
    while len(ids) < end:
        guesses, qs = propose(draft, ids)
        ps = target.logits(ids + guesses, len(guesses) + 1).softmax(-1)
        ids += accept(guesses, qs, ps)
    return ids[:end], target.passes, draft.passes


if __name__ == '__main__':
    demo(generate)
