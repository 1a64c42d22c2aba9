"""A pass over a small tree of tokens: branches that share a text's cache are verified at once, as one row.

Nothing of it is in model.py. A Path names every layer's attention, so one that knows the tree is a Path like
any other; nodes are given their depths as positions, and no store.

H query heads, G key/value heads, D head size, V vocabulary; T nodes: the text's last token, and the guesses.
"""
import functools
from dataclasses import replace

import torch

import kernels
from model import require_that, to_device


class Tree:
    """Guesses after a Reader's text that branch: read in one pass, of which one branch is then kept.

    A node is rotated by its depth and sees the text and its own ancestors alone. Its keys and values stay
    outside the cache until `keep`, so that an interrupted cycle leaves no wrong position there that counts as
    valid. That takes a copy of the text's keys a pass, which is fast enough for a lab.
    Source: Miao et al. 2024 (SpecInfer), tree attention.
    """

    def __init__(self, reader, text, guesses, parents):
        """guesses [T - 1] ids, nodes 1 to T - 1; parents: the node before each; 0: the text's last token."""
        self.reader = reader
        self.text = text
        self.nodes = text[-1:] + guesses                        # [T] ids
        self.fresh = {}                                         # layer: its (keys, values) [1, G, T, D]
        depths = [len(text) - 1]                                # [T]
        sees = torch.eye(len(self.nodes), dtype=torch.bool)     # [T, T]
        for node, parent in enumerate(parents, 1):
            depths.append(depths[parent] + 1)
            sees[node] |= sees[parent]
        model = reader.model
        self.depths = to_device(depths, model.device)
        known = torch.ones(len(self.nodes), len(text) - 1, dtype=torch.bool)
        hidden = ~torch.cat([known, sees], 1)                                   # [T, text and nodes]
        mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, -torch.inf)
        self.mask = mask.to(model.device, non_blocking=True)

    @torch.inference_mode()
    def read(self, path):
        """Logits [T, V] after each node, read on this path: one pass in the ledger, never a compiled one."""
        require_that(not path.sparse, 'a tree of guesses is read densely: leave out --sparse')
        reader = self.reader
        reader.read(self.text[:-1], path, 0)                # no pass, where all is valid
        self.path = path
        attends = []
        for i, attend in enumerate(path.attends):
            attends.append(attend and functools.partial(self.attend, i))
        ids = to_device([self.nodes], reader.model.device)
        hidden = reader.model(ids, self.depths, replace(path, attends=tuple(attends)))
        logits = reader.model.logits(hidden)[0]
        reader.log.append((path, len(self.nodes)))
        return logits

    def attend(self, layer, q, k, v, mask, carry):
        """kernels.attend over the cached text and the nodes, by the tree's mask."""
        self.fresh[layer] = k, v
        known = len(self.text) - 1
        keys, values = self.reader.cache.stores[layer].chunk(2, 1)
        keys = torch.cat([keys[:, :, :known], k], 2)
        values = torch.cat([values[:, :, :known], v], 2)
        return kernels.attend_grouped(q, keys, values, self.mask), {}

    @torch.inference_mode()
    def keep(self, branch):
        """The cache holds the text and these nodes after it: each the child of the one before, from node 0.

        They were computed where they now stand, by the path that read the tree.
        """
        cache = self.reader.cache
        begin = len(self.text) - 1
        line = self.text + [self.nodes[node] for node in branch]
        cache.record(line[:begin], begin, self.path)            # an interrupted copy leaves nothing valid
        chosen = to_device([0, *branch], self.depths.device)
        for layer, (k, v) in self.fresh.items():
            cache.stores[layer][:, :, begin:len(line)] = torch.cat([k, v], 1)[:, :, chosen]
        cache.record(line, begin, self.path)
