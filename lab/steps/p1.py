"""p1: plain decoding with a cache. A step reads one token, because keys and values of the others are kept.

New since p0: the Reader of model.py. It is given the whole text each time, compares it with what its cache
holds, and feeds the network what is missing.
"""
from lab.steps.p0 import demo
from model import Reader


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target)."""
    ids = list(ids)
    reader = Reader(target, len(ids) + n)
    for _ in range(n):
        logits = reader.read(ids, target.full, 1)           # [1, V], after the last id
        ids.append(int(logits[0].argmax()))
    return ids, len(reader.log)


if __name__ == '__main__':
    demo(generate)
