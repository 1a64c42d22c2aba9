"""p5: the rule of CM-ASD, one of the five methods: if the draft is sure, a good guess is enough. LOSSY.

New since p4: a guess x is kept with the chance min(1, p(x) / (tau q(x))). tau falls as the draft's confidence
grows, here its largest q. With tau = 1 this is p3's rule, and exact. Source: Sen et al. 2025; whole in
verify.CmAsd.

What verify.py adds to these steps: texts that end, temperature, top-k and top-p; paths that skip layers or
keys; a record of each decision; and a loop that all methods share.
"""
import functools

import torch

from lab.steps.p0 import demo
from lab.steps.p3 import draw, generate as generate_by
from lab.steps.p4 import propose

BASE, SLOPE = 0.3, 0.5      # tau is 0.3 if the draft is certain, 0.8 if it knows nothing


def accept(guesses, qs, ps):
    """The tokens of a cycle; ps [n + 1, V]: the target's distributions at each guess and after the last."""
    for i, (x, q, p) in enumerate(zip(guesses, qs, ps)):
        tau = min(1.0, BASE + SLOPE * (1 - float(q.max())))
        if not torch.rand(()) < p[x] / (tau * q[x]):
            rest = (p - q).clamp(min=0)
            return guesses[:i] + [draw(rest / rest.sum())]
    return guesses + [draw(ps[-1])]


generate = functools.partial(generate_by, propose=propose, accept=accept)       # propose is p4's

if __name__ == '__main__':
    demo(generate)
