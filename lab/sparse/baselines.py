"""Beside sparse verification: other choices of blocks.

`sparse-recent` reads the latest blocks, `sparse-quest` those of the highest bounds.
"""
from dataclasses import dataclass

import torch

from verify import METHODS, Sparse


def recent_scores(query, k, means):
    """Control: sinks and the latest blocks, whatever the query. Source: Xiao et al. 2024 (StreamingLLM).

    means [B, G, N, D]: mean keys of N blocks -> scores [B, G, N].
    """
    later_is_better = torch.arange(means.shape[2], device=means.device)
    return later_is_better.expand(means.shape[:3]).to(means)


@dataclass
class SparseRecent(Sparse):
    """Sparse verification that reads the latest blocks, the control of any choice. LOSSY."""
    scores = staticmethod(recent_scores)


def quest_scores(query, k, means):
    """[B, G, N]: the highest score that a key within a block's bounds could have. Source: Tang et al. 2024.

    The query [B, H, D] is averaged in its group, as for mean keys. Quest also leaves two layers dense.
    """
    keys = k.unflatten(2, (means.shape[2], -1))                             # [B, G, N, block, D]
    query = query.unflatten(1, (k.shape[1], 1, -1)).mean(3)                 # [B, G, 1, D]
    return torch.maximum(query * keys.amin(3), query * keys.amax(3)).sum(-1)


@dataclass
class SparseQuest(Sparse):
    """Sparse verification that scores a block by the bounds of its keys, not by their mean. LOSSY."""
    scores = staticmethod(quest_scores)


METHODS.update({'sparse-recent': SparseRecent, 'sparse-quest': SparseQuest})
