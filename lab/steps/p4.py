"""p4: a block ends early, after a guess that the draft is not sure of: what follows is often lost.

New since p3: `propose` stops early. The text stays exact, because what was drawn is never dropped
unverified. In verify.py `CmAsd.keep_drafting` is such a rule.
"""
import functools

from lab.steps.p0 import demo
from lab.steps.p3 import draw, generate as generate_exactly

LONGEST = 10    # tokens of a block at most
SURE = 0.4      # drafting goes on while the largest q is at least this


def propose(draft, ids):
    """(up to LONGEST guesses, the distributions q [V] that they were drawn from)."""
    guesses, qs = [], []
    while len(guesses) < LONGEST:
        q = draft.logits(ids + guesses, 1)[0].softmax(-1)
        qs.append(q)
        guesses.append(draw(q))
        if q.max() < SURE:
            break
    return guesses, qs


generate = functools.partial(generate_exactly, propose=propose)     # by p3's rule

if __name__ == '__main__':
    demo(generate)
