"""p2: draft and verify. The draft guesses a block; one pass of the target says how much of it was right.

New since p1: fewer target passes for the same text. A pass over five tokens takes hardly longer than a pass
over one: on a big model because both read all weights once, here because both call as many functions.
"""
from lab.steps.p0 import demo
from model import Reader

GAMMA = 4       # tokens of a block


def propose(draft, ids):
    """GAMMA guesses after the ids, the draft's favourite each time; draft: a Reader."""
    guesses = []
    for _ in range(GAMMA):
        logits = draft.read(ids + guesses, draft.model.full, 1)
        guesses.append(int(logits[0].argmax()))
    return guesses


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target)."""
    ids = list(ids)
    end = len(ids) + n
    target, draft = [Reader(model, end + GAMMA) for model in (target, draft)]
    while len(ids) < end:
        guesses = propose(draft, ids)
        logits = target.read(ids + guesses, target.model.full, GAMMA + 1)
        picks = logits.argmax(-1).tolist()          # what the target would have written at each place
        kept = 0
        while kept < GAMMA and guesses[kept] == picks[kept]:
            kept += 1
        ids += guesses[:kept] + [picks[kept]]       # its own token ends the cycle: a correction, or a bonus
    return ids[:end], len(target.log)


if __name__ == '__main__':
    demo(generate)
