"""A draft that learns for a minute from how a target verifies. Not here: what it is good for (record.py)."""
import copy
import random
import time
from typing import NamedTuple

import torch


class Lesson(NamedTuple):
    """A text and what a target says of its solution."""
    prompt: list                # ids
    solution: list              # ids
    laws: torch.Tensor          # [n, V] log-probabilities of each solution token's place

    @property
    def length(self):
        return len(self.prompt) + len(self.solution)


def grouped(lessons, tokens):
    """Lessons of like length together, in lists of about `tokens` ids each, padding included."""
    pool = sorted(lessons, key=lambda lesson: lesson.length)
    groups = []
    while pool:
        count = max(1, tokens // pool[-1].length)
        groups.append(pool[-count:])
        pool = pool[:-count]
    return groups


def batch(group):
    """(ids [B, T], at [B, T] bool, laws [n, V]) of some lessons.

    at: the n places from which the target's laws guess; what stands behind a row's end is never looked at.
    """
    longest = max(lesson.length for lesson in group)
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    at = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, lesson in enumerate(group):
        ids[row, :lesson.length] = torch.tensor(lesson.prompt + lesson.solution)
        at[row, len(lesson.prompt) - 1:lesson.length - 1] = True
    return ids, at, torch.cat([lesson.laws for lesson in group])


def packed(lessons, tokens, rng):
    """Endless batches (see batch) of about `tokens` ids, all lessons once before any comes again."""
    groups = grouped(lessons, tokens)
    while True:
        for group in rng.sample(groups, len(groups)):
            yield batch(group)


def distil(draft, lessons, seconds, rate=1e-3, seed=0):
    """A copy of the draft after so many seconds of CPU time with the lessons.

    Loss: KL from the target's laws at temperature 1 to the draft's. Source: Hinton et al. 2015; Zhou et al.
    2024 (DistillSpec).
    """
    student = copy.deepcopy(draft).requires_grad_(True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0)
    begin = time.process_time()
    for ids, at, laws in packed(lessons, 4096, random.Random(seed)):
        spent = (time.process_time() - begin) / seconds         # 0..1
        if spent >= 1:
            return student.requires_grad_(False)
        optimizer.param_groups[0]['lr'] = rate * (1 - spent)
        hidden = student(ids, torch.arange(ids.shape[1]), student.full)
        guesses = student.logits(hidden[at]).log_softmax(-1)
        loss = torch.nn.functional.kl_div(guesses, laws, log_target=True, reduction='batchmean')
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
