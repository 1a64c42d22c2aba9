"""A draft that learns for a minute from how a target verifies. Not here: what it is good for (record.py)."""
import copy
import random
import time

import torch

from lab.distil import packed


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
