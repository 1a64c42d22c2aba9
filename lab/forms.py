"""Other forms of what a pass computes, for the ladder (lab/cuda.py) to time on a card. Not run on a card yet.

Each gives what the form in the source files gives (lab/tests/test_network.py). One that pays takes its place.
"""
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels import group_queries
from model import Block, PassContext
from verify import Autoregressive, Controller, Exact, Plan, sample_branches

BURST = 8           # tokens that plain decoding writes before the host looks at one
GROUP = 512         # neighbours in the vocabulary whose chances are summed first


class Burst(Autoregressive):
    """Plain decoding that fetches BURST tokens at a time: a card does not wait for the host in between."""

    def accept(self, session, draft, score):
        reader = session.target
        path = reader.model.full
        plan = Plan(min(BURST, session.tokens_left), session.probs, Controller(Exact()))
        (ids,) = sample_branches(session, reader, path, 1, plan).lines(session, 'target')
        reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
        return ids, ['target'] * len(ids), []


def sample_in_groups(p, uniform):
    """The indices [...] that verify.sample gives for p [..., V] and these numbers [..., 1] below 1.

    Sums over groups first, then within one: a running sum over a whole row goes to one part of a card.
    """
    V = p.shape[-1]
    weights = functional.pad((p * 2.0 ** 52).long(), (0, -V % GROUP)).unflatten(-1, (-1, GROUP))
    sizes = weights.sum(-1)                                                 # [..., groups]
    sums = sizes.cumsum(-1)
    place = (uniform * sums[..., -1:]).long()                               # [..., 1]
    group = torch.searchsorted(sums, place, right=True)
    place = place - (sums - sizes).gather(-1, group)
    inside = weights.take_along_dim(group[..., None], -2).squeeze(-2).cumsum(-1)
    return (group * GROUP + torch.searchsorted(inside, place, right=True)).squeeze(-1)


def flex_form(q, k, block):
    """Function (q, k, v) -> [B, H, T, D]: kernels.attend through flex_attention, whose keys come in blocks.

    The queries of one key head are rows of one, as its decoding kernel wants them. Sparse attention would
    name fewer blocks. q [B, H, T, D], k [B, G, S, D]: for their shapes; S is a multiple of block.
    """
    G, S = k.shape[1:3]
    T = q.shape[2]
    rows = q.shape[1] // G * T
    blocks = torch.arange(S // block, dtype=torch.int32, device=q.device)
    blocks = blocks.expand(1, G, 1, -1).contiguous()                        # [1, G, 1, S / block]
    count = torch.full((1, G, 1), S // block, dtype=torch.int32, device=q.device)
    mask = BlockMask.from_kv_blocks(
        count, blocks, BLOCK_SIZE=(128, block), seq_lengths=(rows, S),
        mask_mod=lambda b, head, row, column: column <= S - T + row % T)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(group_queries(q, k), k, v, block_mask=mask).reshape(q.shape)


class ByHand:
    """A model's forward with compiled Blocks, recorded as one CUDA graph for each (path, T, keys in view).

    For paths without a carry. Without CUDA nothing is recorded: the Blocks run one by one.
    """

    def __init__(self, model):
        self.model = model
        self.block = torch.compile(Block.forward, fullgraph=True, dynamic=False,
                                   options=dict(coordinate_descent_tuning=True))
        self.graphs = {}

    def __call__(self, ids, positions, path, stores, kv_len, carry):
        if not ids.is_cuda:
            return self.forward(ids, positions, path, stores, kv_len)
        key = path, ids.shape, kv_len, stores[0].data_ptr()
        if key not in self.graphs:
            inputs = ids.clone(), positions.clone()
            self.forward(*inputs, path, stores, kv_len)                     # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                hidden = self.forward(*inputs, path, stores, kv_len)
            self.graphs[key] = graph, inputs, hidden
        graph, inputs, hidden = self.graphs[key]
        inputs[0].copy_(ids)
        inputs[1].copy_(positions)
        graph.replay()
        return hidden

    def forward(self, ids, positions, path, stores, kv_len):
        """Hidden states [B, T, C]; keys behind the positions are masked, as in any compiled pass."""
        model = self.model
        later = torch.arange(kv_len, device=ids.device) > positions[:, None]                # [T, kv_len]
        mask = torch.zeros_like(later, dtype=model.cos.dtype).masked_fill(later, -torch.inf)
        context = PassContext(positions, model.cos[positions], model.sin[positions], mask, kv_len)
        x = model.model.embed_tokens(ids.flatten())                                         # [B T, C]
        for layer, attend, ffn, store in zip(model.model.layers, path.attends, path.ffns, stores):
            x, _ = self.block(layer, x, attend, ffn, context, store, None)
        return model.model.norm(x).view(*ids.shape, -1)
