"""p2: draft and verify. The draft guesses a block; one pass of the target says how much of it was right.

New since p1: fewer target passes for the same text. A pass over five tokens takes hardly longer than a pass
over one: on a big model because both read all weights once, here because Python takes most of the time.
A rejected guess needs no clean-up: the token in its place is the last of the text, which is always read.
"""
from lab.steps.p0 import demo
from lab.steps.p1 import Cached

GAMMA = 4       # tokens of a block


def propose(draft, ids):
    """GAMMA guesses after the ids, the draft's favourite each time; draft: a Cached model."""
    guesses = []
    for _ in range(GAMMA):
        logits = draft.logits(ids + guesses, 1)
        guesses.append(int(logits[0].argmax()))
    return guesses


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target, and of the draft)."""
    ids = list(ids)
    end = len(ids) + n
    target, draft = [Cached(model, end + GAMMA) for model in (target, draft)]
    while len(ids) < end:
        guesses = propose(draft, ids)
        logits = target.logits(ids + guesses, GAMMA + 1)
        picks = logits.argmax(-1).tolist()          # what the target would have written at each position
        kept = 0
        while kept < GAMMA and guesses[kept] == picks[kept]:
            kept += 1
        ids += guesses[:kept] + [picks[kept]]       # its own token ends the cycle: a correction, or a bonus
    return ids[:end], target.passes, draft.passes


if __name__ == '__main__':
    demo(generate)
