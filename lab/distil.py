"""A draft that learns for a minute from how a target verifies. Not here: what it is good for (claims.py)."""
import copy
import random
import time

import torch


def packed(lessons, tokens, rng):
    """Endless (ids [B, T], at [B, T] bool, laws [n, V]), lessons of like length together, about `tokens` ids.

    at: the n places from which the target's laws guess; what stands behind a row's end is never looked at.
    """
    while True:
        pool, groups = sorted(lessons, key=lambda x: len(x[0]) + len(x[1])), []
        while pool:
            n = max(1, tokens // (len(pool[-1][0]) + len(pool[-1][1])))
            pool, group = pool[:-n], pool[-n:]
            groups.append(group)
        for group in rng.sample(groups, len(groups)):
            lines = [prompt + solution for prompt, solution, _ in group]
            ids = torch.zeros(len(group), max(map(len, lines)), dtype=torch.long)
            at = torch.zeros_like(ids, dtype=torch.bool)
            for b, (line, (prompt, _, _)) in enumerate(zip(lines, group)):
                ids[b, :len(line)] = torch.tensor(line)
                at[b, len(prompt) - 1:len(line) - 1] = True
            yield ids, at, torch.cat([laws for *_, laws in group])


def distil(draft, lessons, seconds, rate=1e-3, seed=0):
    """A copy of the draft after so many seconds of lessons: (prompt ids, solution ids, log laws [n, V]).

    Loss: KL from the target's laws at temperature 1 to the draft's. Source: Hinton et al. 2015; Zhou et al.
    2024 (DistillSpec).
    """
    student, begin = copy.deepcopy(draft).requires_grad_(True), time.process_time()
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0)
    for ids, at, laws in packed(lessons, 4096, random.Random(seed)):
        spent = (time.process_time() - begin) / seconds
        if spent >= 1:
            return student.requires_grad_(False)
        optimizer.param_groups[0]['lr'] = rate * (1 - spent)
        hidden = student(ids, torch.arange(ids.shape[1]), student.full)
        guesses = student.logits(hidden[at]).log_softmax(-1)
        loss = torch.nn.functional.kl_div(guesses, laws, log_target=True, reduction='batchmean')
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
