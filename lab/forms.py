"""Other forms of what a pass computes, which `lab.bench cuda` checks and times on a card. Not run on one yet.

A form that pays there takes its place in the source files.
"""
import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from kernels import group_queries, kept_blocks, mean_scores
from model import Block, PassContext
from verify import Autoregressive, sample_branches

BURST = 8           # tokens that plain decoding writes before the host looks at one
WIDE = 128          # keys of a block where all are read; query rows of one, more than a pass has


class Burst(Autoregressive):
    """Plain decoding that fetches BURST tokens at a time: a card does not wait for the host in between."""

    def accept(self, session, draft, score):
        reader = session.target
        path = reader.model.full
        n = min(BURST, session.tokens_left)
        (ids,) = sample_branches(session, reader, path, 1, n, session.probs).lines(session, 'target')
        reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
        return ids, ['target'] * len(ids), []


# ------------------------------------------------------------------- attention over a list of blocks of keys
# In place of a layer's attend. The carry is a dict: start (cached tokens, 0-dim), and what an anchor lists.

def attend_blocks(q, k, v, count, order, start, block):
    """[B, H, T, D]: causal attention over the first `count` [B, G, 1] blocks of `order` [B, G, 1, N].

    All are listed as partial blocks: the decoding kernel splits those evenly, full ones by all keys in view.
    """
    T = q.shape[2]
    rows = group_queries(q, k)                                              # [B, G, (H/G) T, D]

    def may_look(b, head, row, column):
        return column <= start + row % T
    ranks = order.argsort(-1)                                               # [B, G, 1, N]

    def is_listed(b, head, row, column):                # flex attention without a kernel looks at no lists
        return ranks[b, head, 0, column // block] < count[b, head, 0]
    seen = may_look if q.is_cuda else and_masks(may_look, is_listed)
    mask = BlockMask.from_kv_blocks(count.int().contiguous(), order.int().contiguous(), mask_mod=seen,
                                    BLOCK_SIZE=(WIDE, block), seq_lengths=(rows.shape[2], k.shape[2]),
                                    compute_q_blocks=False)
    return flex_attention(rows, k, v, block_mask=mask).reshape(q.shape)


def flex_dense(q, k, v, mask, carry):
    """kernels.attend over the blocks that are written, however many are in view."""
    B, G, S = k.shape[:3]
    order = torch.arange(-(-S // WIDE), device=k.device).expand(B, G, 1, -1)
    count = ((carry['start'] + q.shape[2] - 1) // WIDE + 1).expand(B, G, 1)
    return attend_blocks(q, k, v, count, order, carry['start'], WIDE), carry


def flex_sparse(q, k, v, mask, carry, anchor, rule):
    """kernels.sparse_attend without copies of keys and masks; anchor: whether this layer lists the blocks."""
    if anchor:
        carry = carry | dict(listed=list_blocks(q, k, carry['start'], rule))
    return attend_blocks(q, k, v, *carry['listed'], carry['start'], rule.block), carry


def list_blocks(q, k, start, rule):
    """(count [B, G, 1], order [B, G, 1, N]): blocks of own tokens, sinks, locals, then by the root's score.

    The means are made anew: an anchor reads all keys, but no layer has launches that keep a cache of them.
    """
    means = k.unflatten(2, (-1, rule.block)).mean(3)                        # [B, G, N, D]
    whole = start // rule.block                         # blocks before the first that holds own tokens
    last = (start + q.shape[2] - 1) // rule.block
    blocks = torch.arange(means.shape[2], device=k.device)
    always = (blocks < rule.sinks) | (blocks >= whole - rule.locals)
    scores = mean_scores(q[:, :, 0], k, means).masked_fill(always, torch.inf)
    order = scores.masked_fill(blocks > last, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    kept = kept_blocks(start.double(), rule).long().clamp(max=whole)
    return (last - whole + 1 + kept).expand(order.shape[:2])[..., None], order[:, :, None]


def sparse_layers(layers, anchors, rule):
    """flex_sparse of each layer, two functions to compile; anchors: how many list blocks, evenly spaced."""
    lists, follows = (functools.partial(flex_sparse, anchor=anchor, rule=rule) for anchor in (True, False))
    return [follows if i % -(-layers // anchors) else lists for i in range(layers)]


# --------------------------------------------------------------------------------------------- graphs by hand

def compiled(function, on_card):
    """By inductor, tuned. Without a card it is only traced, which shows what the compiler would refuse."""
    how = dict(options=dict(coordinate_descent_tuning=True)) if on_card else dict(backend='eager')
    return torch.compile(function, fullgraph=True, dynamic=False, **how)


def recorded(run, on_card):
    """A function that does what `run` does by one CUDA graph, and returns the same tensors at each call."""
    if not on_card:
        return run
    run()                                               # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()

    def replay():
        graph.replay()
        return made
    return replay


class ByHand:
    """A model's forward with compiled Blocks, recorded as one CUDA graph for each (path, T, keys in view)."""

    def __init__(self, model, attends=None):
        """attends: of each layer, in place of the path's; see flex_dense, sparse_layers."""
        self.model, self.attends = model, attends
        self.block = compiled(Block.forward, model.cos.is_cuda)
        self.graphs = {}

    def __call__(self, ids, positions, path, stores, kv_len, carry):
        key = path, ids.shape, kv_len, stores[0].data_ptr()
        if key not in self.graphs:
            inputs = ids.clone(), positions.clone()
            run = functools.partial(self.forward, *inputs, path, stores, kv_len)
            self.graphs[key] = inputs, recorded(run, ids.is_cuda)
        inputs, run = self.graphs[key]
        for held, given in zip(inputs, (ids, positions)):
            held.copy_(given)
        return run()

    def forward(self, ids, positions, path, stores, kv_len):
        """Hidden states [B, T, C]; keys after the positions are masked, as in any compiled pass."""
        model = self.model
        later = torch.arange(kv_len, device=ids.device) > positions[:, None]                # [T, kv_len]
        mask = torch.zeros_like(later, dtype=model.dtype).masked_fill(later, -torch.inf)
        context = PassContext(positions, model.cos[positions], model.sin[positions], mask, kv_len)
        carry = dict(start=positions[0]) if self.attends else None
        x = model.model.embed_tokens(ids.flatten())                                         # [B T, C]
        attends = self.attends or path.attends
        for layer, attend, ffn, store in zip(model.model.layers, attends, path.ffns, stores):
            x, carry = self.block(layer, x, attend, ffn, context, store, carry)
        return model.model.norm(x).view(*ids.shape, -1)
