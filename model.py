"""The network and how it is run: Transformer, Path, KVCache, Reader. Then loading checkpoints.

Not here: sampling and verification (verify.py), the arithmetic of a layer (kernels.py).

B rows, T new tokens, S cache capacity, L layers, H query heads, G key/value heads, D head size, C width,
F feed-forward width, E experts, V vocabulary.
"""
import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from math import inf
from pathlib import Path as File
from typing import get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.nn import functional

import kernels

CHUNK = 2048    # positions of a long prompt that one pass reads, so that the mask stays small
PAD = 16        # compiled passes of up to this many positions are padded to a power of two: few graphs
SPAN = 1024     # keys in view of a compiled pass, at least; beyond, the next power of two
EVEN = 128      # a cache's positions are a multiple of it: a card's kernels read keys in such blocks


# ------------------------------------------------------------------------------------------- the network

@dataclass(frozen=True)
class Config:
    """The numbers that shape a network, where config.json has them under its names; see read_config."""
    model_type: str
    vocab_size: int                 # rows of the embedding; V, the tokenizer's length, may be smaller
    hidden_size: int                # C
    intermediate_size: int          # F
    num_hidden_layers: int = field(metadata=dict(highest=1000))         # L
    num_attention_heads: int        # H
    num_key_value_heads: int        # G
    head_dim: int                   # D
    max_position_embeddings: int    # context, tokens
    sliding_window: int = None      # tokens, where layers have one: then the context ends there
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False           # an RMSNorm on each head's query and key (Qwen3)
    rope: dict = field(default_factory=lambda: dict(rope_type='default', rope_theta=10000.0))
    num_experts: int = field(default=0, metadata=dict(highest=10_000))  # E; 0: no mixture
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False


class Part(nn.Module):
    """nn.Module without hooks, submodules as plain attributes: a small network is twice as fast."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value                 # found without nn.Module's search

    def __call__(self, *args):
        return self.forward(*args)


class Linear(nn.Linear):
    """A matrix product, x [..., in] -> [..., out]."""

    def __call__(self, x):
        weight = self._parameters['weight']
        bias = self._parameters['bias']
        if torch.compiler.is_compiling() and x.numel() == x.shape[-1]:      # inductor fuses it with the rest
            y = (x[..., None, :] * weight).sum(-1)
            return y if bias is None else y + bias
        return functional.linear(x, weight, bias)


class Attention(Part):
    def __init__(self, config):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.sizes = H, G, D
        self.qkv_proj = Linear(C, (H + 2 * G) * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, C, bias=config.o_bias)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm = nn.RMSNorm(D, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(D, config.rms_norm_eps)

    def forward(self, x, attend, context, store, carry):
        """x [N, C], N = B T -> ([N, C], what it adds to the carry, see kernels.py).

        store: this layer's keys and values in the cache, or None.
        """
        T = len(context.positions)
        H, G, D = self.sizes
        heads = self.qkv_proj(x).view(-1, T, H + 2 * G, D).transpose(1, 2)  # [B, H + 2 G, T, D]
        if self.normed:
            q, k, v = torch.split_with_sizes(heads, (H, G, G), 1)
            heads = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        kernels.rotate_(heads[:, :H + G], context.cos, context.sin)
        q = heads[:, :H]                                                    # [B, H, T, D]
        kv = heads[:, H:]                                                   # keys, then values
        if store is not None:
            kv = store.index_copy_(2, context.positions, kv)[:, :, :context.kv_len]     # [B, 2 G, kv_len, D]
        k, v = kv.chunk(2, 1)                                               # [B, G, kv_len, D] each
        out, added = attend(q, k, v, context.mask, carry)                   # [B, H, T, D]
        return self.o_proj(out.transpose(1, 2).reshape(-1, H * D)), added


class MLP(Part):
    def __init__(self, C, F, bias):
        super().__init__()
        self.gate_up_proj = Linear(C, 2 * F, bias=bias)
        self.down_proj = Linear(F, C, bias=bias)

    def forward(self, x):
        """x [N, C] -> [N, C] through F channels: down(silu(gate(x)) * up(x)). Source: Shazeer 2020, eq. 6."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)                        # [N, F] each
        return self.down_proj(functional.silu(gate) * up)


class MoE(Part):
    def __init__(self, config):
        super().__init__()
        C, F, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.gate = Linear(C, E, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, F))

    def forward(self, x):
        """x [N, C] -> [N, C]: each token through its top_k of the E experts, by router weight."""
        weights, chosen = kernels.route(x, self)                            # [N, k] each
        return kernels.combine_experts(x, self, weights, chosen)


class Block(Part):
    def __init__(self, config):
        super().__init__()
        C, F = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(C, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(C, config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_experts else MLP(C, F, config.mlp_bias)

    def forward(self, x, attend, ffn, context, store, carry):
        """x [N, C], N = B T -> ([N, C], what it adds to the carry). A function None skips a sublayer."""
        added = {}
        if attend is not None:
            y, added = self.self_attn(self.input_layernorm(x), attend, context, store, carry)
            x = x + self.all_reduce(y)
        if ffn is not None:
            y = ffn(self.post_attention_layernorm(x), self.mlp)
            x = x + self.all_reduce(y)
        return x, added

    def all_reduce(self, y):
        """A sublayer's output; their sum if each process has a part of the layer, see lab/parallel.py."""
        return y


@dataclass(frozen=True)
class PassContext:
    """What all layers of one pass share: the positions of its tokens and what they may see."""
    positions: torch.Tensor     # [T] absolute
    cos: torch.Tensor           # [T, D]
    sin: torch.Tensor           # [T, D]
    mask: torch.Tensor | None   # as kernels.attend takes it
    kv_len: int                 # keys in view


class Transformer(Part):
    """A Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE network."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vocab = config.vocab_size      # V; load lowers it to the tokenizer's length
        self.token_texts = {}               # id -> text, of the tokenizer: see load
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            norm=nn.RMSNorm(config.hidden_size, config.rms_norm_eps)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        L = config.num_hidden_layers
        self.full = Path('full', (kernels.attend,) * L, (kernels.feed_forward,) * L)    # all of it, densely
        self.set_context(min(2048, config.max_position_embeddings))

    @property
    def device(self):
        return self.cos.device

    @property
    def dtype(self):
        return self.cos.dtype

    def tie(self):
        """Makes the head the embedding, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def set_context(self, length):
        """Computes rotary tables for `length` positions, in the weights' dtype and device."""
        cos, sin = kernels.rope_table(self.config.rope, self.config.head_dim, length)
        self.register_buffer('cos', cos.to(self.model.norm.weight), persistent=False)      # [S, D]
        self.register_buffer('sin', sin.to(self.model.norm.weight), persistent=False)

    compiled = False                            # Compiled sets both
    run_layer = staticmethod(Block.forward)

    def forward(self, ids, positions, path, stores=None, kv_len=None, means=None, carry=None):
        """ids [B, T] at absolute positions [T] -> hidden states [B, T, C] after the last norm.

        stores: the cache's keys and values per layer, written in place; kv_len: how many keys are in view;
        means: of each layer the mean keys of blocks, for sparse paths; carry: a dict that takes what layers
        add (kernels.py). Without a cache the tokens see each other alone (training).
        """
        kv_len = kv_len or ids.shape[1]
        mask = self.mask(positions, kv_len)
        context = PassContext(positions, self.cos[positions], self.sin[positions], mask, kv_len)
        x = self.model.embed_tokens(ids.flatten()).to(self.dtype)                       # [B T, C]
        carry = {} if carry is None else carry
        carry['start'] = positions[0]
        for i, layer in enumerate(self.model.layers):
            store = None if stores is None else stores[i]
            here = carry | dict(means=means[i]) if means else carry
            x, added = self.run_layer(layer, x, path.attends[i], path.ffns[i], context, store, here)
            carry.update(added)
        return self.model.norm(x).view(*ids.shape, -1)

    def mask(self, positions, kv_len):
        """[T, kv_len], 0 where a query may look and -inf elsewhere; None where kernels.attend needs none.

        A compiled pass has more keys in view than are written, an eager one exactly those that it may see.
        """
        T = len(positions)
        if self.compiled:
            later = torch.arange(kv_len, device=positions.device) > positions[:, None]      # [T, kv_len]
            return torch.zeros_like(later, dtype=self.dtype).masked_fill(later, -torch.inf)
        flash = self.cos.is_cuda and self.dtype != torch.float32
        if T == 1 or T == kv_len or flash:
            return None
        return kernels.causal_mask(T, kv_len, self.cos)

    def logits(self, hidden):
        """hidden [..., C] -> logits [..., V], cut to the tokenizer's length (checkpoints pad the head)."""
        rows = self.lm_head(hidden.flatten(0, -2))                                      # [N, at least V]
        return rows[:, :self.vocab].unflatten(0, hidden.shape[:-1])


# ------------------------------------------------------------------------------------- how a pass is computed

@dataclass(frozen=True)
class Path:
    """How one pass is computed: each layer's attend and ffn function, None where that sublayer is skipped.

    A path that runs every sublayer densely writes the same keys as the full path, also if it observes them.
    """
    name: str
    attends: tuple      # [L]
    ffns: tuple         # [L]
    skip: frozenset = frozenset()   # sublayers left out: 2i is layer i's attention, 2i + 1 its feed-forward
    sparse: bool = False            # whether a sublayer that runs leaves something out
    block: int = 0                  # keys of a block, where layers choose blocks by mean keys
    observes: bool = False          # whether layers note what they attend to, in Reader.carry

    @functools.cached_property
    def written_as(self):
        """The name of this path as a writer of cache positions: what it leaves out."""
        name = 'sparse' if self.sparse else 'full'
        return f'{name} without {sorted(self.skip)}' if self.skip else name

    @functools.cached_property
    def reads_from(self):
        """The writers whose keys this path may build on: the full path, itself, and itself with no skips."""
        return frozenset(['full', self.written_as, replace(self, skip=()).written_as])

    def without(self, skip, name='slim'):
        """This path without more sublayers, numbered as in `skip`."""
        skip = self.skip.union(skip)
        attends = tuple(None if 2 * i in skip else f for i, f in enumerate(self.attends))
        ffns = tuple(None if 2 * i + 1 in skip else f for i, f in enumerate(self.ffns))
        return replace(self, name=name, attends=attends, ffns=ffns, skip=skip)

    def sparsified(self, attends, ffns, block):
        """This path with these functions, of which some leave something out; itself if none does."""
        if (attends, ffns) == (self.attends, self.ffns):
            return self
        name = 'sparse' if self.name == 'full' else f'sparse {self.name}'
        return replace(self, name=name, attends=attends, ffns=ffns, sparse=True, block=block)

    def grounded(self, n, begin, sparsify):
        """This path, observed by kernels.grounded in the last n layers that it runs."""
        observe = functools.partial(kernels.grounded, begin=begin, sparsify=sparsify)
        last = [i for i, attend in enumerate(self.attends) if attend][-n:]
        attends = tuple(observe if i in last else f for i, f in enumerate(self.attends))
        return replace(self, name='grounded', attends=attends, observes=True)


# ------------------------------------------------------------------------------------- host and device
# A GPU computes while Python prepares what comes next, until Python asks for a number and waits. Methods ask
# by to_host: once or twice a cycle, or once a token where what was drawn decides whether to go on.

def on_gpu(x):
    """True if the host would have to wait for the numbers of this tensor."""
    return x.device.type != 'cpu'


def to_device(ids, device):
    """A tensor of ids, a list or a list of lists, on the device, by a copy that the host does not wait for.

    torch.tensor(ids, device=...) makes it wait, and so does a list as an index of a tensor there.
    """
    return torch.tensor(ids, dtype=torch.long).to(device, non_blocking=True)


def to_host(*tensors):
    """The same tensors on the CPU, in one transfer of doubles, which hold ids, flags and floats exactly."""
    if not on_gpu(tensors[0]):
        return tensors
    flat = torch.cat([x.flatten().double() for x in tensors]).cpu()
    parts = flat.split([x.numel() for x in tensors])
    return [numbers.view(x.shape).to(x.dtype) for x, numbers in zip(tensors, parts)]


# -------------------------------------------------------------------------------------- caches and readers

def shared_length(tokens, others):
    """How many ids two lists share from their beginning on."""
    n = min(len(tokens), len(others))
    if tokens[:n] == others[:n]:
        return n
    return next(i for i in range(n) if tokens[i] != others[i])


class KVCache:
    """Keys and values of all layers, and for every position the token id and the path that wrote it.

    A position is valid only if both are right. Nothing else is tracked, so there is no rollback to get wrong.
    Positions after the recorded ones are scratch.
    """

    def __init__(self, config, capacity, like, rows=1):
        """like: a tensor of the dtype and device; rows: B."""
        shape = rows, 2 * config.num_key_value_heads, capacity, config.head_dim
        # of each layer [B, 2 G, S, D]: its keys, then its values
        self.stores = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.ids = []                           # token of each recorded position
        self.writers = []                       # Path.written_as of each, at least as many as ids
        self.length = 0                         # positions in use, recorded or not
        self.block = 0                          # keys per block mean
        self.means = None                       # of each layer the mean keys of the blocks
        self.averaged = 0                       # positions whose means are right

    def valid_prefix(self, line, path):
        """How many leading positions of the token ids in `line` this path need not read again."""
        n = shared_length(self.ids, line)
        if path.reads_from.issuperset(self.writers[:n]):
            return n
        return next(i for i, writer in enumerate(self.writers) if writer not in path.reads_from)

    def record(self, line, start, path):
        """Positions start.. hold line[start:], written by this path; positions after them are forgotten.

        The ids are removed first and added last, so an interrupt can only shorten the valid prefix.
        """
        del self.ids[start:]
        self.writers[start:] = [path.written_as] * (len(line) - start)
        self.length = len(line)
        self.averaged = min(self.averaged, start)
        self.ids += line[start:]

    def average(self, block, n):
        """[L] mean keys [B, G, S / block, D] of the cache's blocks, right for the first n / block."""
        if block != self.block:
            self.averaged = 0
            B, both, S, D = self.stores[0].shape
            self.means = [store.new_zeros(B, both // 2, S // block, D) for store in self.stores]
            self.block = block                  # last, because this may be interrupted
        first = self.averaged // block
        end = n // block
        if first < end:
            for store, means in zip(self.stores, self.means):
                keys = store[:, :means.shape[1], first * block:end * block]
                means[:, :, first:end] = keys.unflatten(2, (-1, block)).mean(3)     # [B, G, new blocks, D]
        self.averaged = n
        return self.means

    def copy_of(self, other):
        """Becomes another cache, of one row, in each row; only the positions in use are copied."""
        n = other.length
        for mine, theirs in zip(self.stores, other.stores):
            mine[:, :, :n] = theirs[:, :, :n]
        self.ids = list(other.ids)
        self.writers = list(other.writers)
        self.length = n
        self.averaged = 0


class Reader:
    """A network and its cache: it feeds what the cache does not hold yet and logs every pass."""

    def __init__(self, model, capacity, compiled=False):
        """capacity: the longest text in tokens, prompt included; compiled: short passes by inductor."""
        self.model = model
        self.capacity = -(-(capacity + PAD) // EVEN) * EVEN
        if self.capacity > model.cos.shape[0]:
            model.set_context(self.capacity)
        self.log = []                                   # (Path, positions) of each pass
        self.carry = {}                                 # of the latest pass, what its layers have added
        self.compiled = Compiled(model) if compiled else None
        self.cache = KVCache(model.config, self.capacity, model.cos)
        self.forks = {}                                 # rows -> KVCache, see fork

    def read(self, ids, path, last):
        """Logits [last, V] of the last positions of these ids (a list), read on this path.

        Feeds from the first position that is not valid for the path, and at least `last` positions.
        """
        n = len(ids)
        assert n <= self.capacity, f'{n} tokens in a cache for {self.capacity}'
        start = min(self.cache.valid_prefix(ids, path), n - last)
        self.cache.record(ids[:start], start, path)         # an interrupted pass leaves nothing valid
        unread = to_device([ids[start:]], self.model.device)
        logits = []
        for begin in range(start, n, CHUNK):
            end = min(begin + CHUNK, n)
            rows = max(0, end - max(begin, n - last))       # of this chunk among the last `last`
            logits.append(self.feed(unread[:, begin - start:end - start], begin, path, rows))
        self.cache.record(ids, start, path)
        if not last:
            return None
        return torch.cat([rows for rows in logits if rows is not None], 1)[0]

    def append(self, ids, path):
        """Logits [B, V] after one more token a row; ids [B]. The caller records the tokens later."""
        logits = self.feed(ids[:, None], self.cache.length, path, 1)
        self.cache.length += 1
        return logits[:, 0]

    @torch.inference_mode()
    def feed(self, ids, start, path, last):
        """One pass over ids [B, T] at positions start.. -> logits [B, last, V]; it is logged."""
        B, T = ids.shape
        forward = self.model
        kv_len = start + T
        pad = 0
        if self.compiled and T <= PAD and not path.observes:    # such a path serves one pass
            forward = self.compiled
            pad = (1 << (T - 1).bit_length()) - T
            power = 1 << (kv_len + pad - 1).bit_length()
            kv_len = min(self.capacity, max(SPAN, power))   # few numbers, because each needs a graph
            ids = functional.pad(ids, (0, pad))
        positions = torch.arange(start, start + T + pad, device=ids.device)
        means = self.cache.average(path.block, start) if path.block else None
        self.carry = {}
        with torch.autocast('cuda' if on_gpu(ids) else 'cpu', enabled=False):   # which a notebook may be in
            hidden = forward(ids, positions, path, self.cache.stores, kv_len, means, self.carry)
            logits = self.model.logits(hidden[:, T - last:T]) if last else None
        self.log.append((path, B * T))
        return logits

    def fork(self, rows):
        """A reader of the same network and log over `rows` copies of this cache.

        Caches are kept for each number of rows, because a new one would recompile: the next fork of as many
        rows replaces this one.
        """
        if rows not in self.forks:
            self.forks[rows] = KVCache(self.model.config, self.capacity, self.model.cos, rows)
        twin = copy.copy(self)
        twin.cache = self.forks[rows]
        twin.cache.copy_of(self.cache)
        return twin

    def forget(self):
        """Forgets every position and pass of an earlier text."""
        self.cache.record([], 0, self.model.full)
        self.log.clear()


# You may stop here: what follows makes the same network faster, and loads it.
# -------------------------------------------------------------------------------------------- compiled

class Compiled:
    """A network whose short passes a card computes without waiting for Python; called like a Transformer.

    Layers are compiled, those of one kind once. Then a pass is recorded as a CUDA graph, for each path and
    length and number of keys in view: replayed, it reads and writes the memory that it was recorded with.
    """

    def __init__(self, model):
        limits = torch._dynamo.config               # of graphs, for all paths, lengths and models; as in 2.6
        limits.cache_size_limit = limits.accumulated_cache_size_limit = 4096
        self.model = copy.copy(model)
        self.model.compiled = True
        self.model.run_layer = torch.compile(Block.forward, fullgraph=True, dynamic=False,
                                             options=dict(coordinate_descent_tuning=True))
        self.passes = {}        # kind of pass: its ids and positions, its graph, its hidden states

    def __call__(self, ids, positions, path, stores, kv_len, means, carry):
        memory = self.model.cos, stores[0], *(means or [])              # which a graph is bound to
        kind = path, ids.shape, kv_len, *[tensor.data_ptr() for tensor in memory]
        if kind not in self.passes:
            if sys.stderr.isatty():
                print(f'compiling a {path.name} pass over {ids.shape[1]} positions', file=sys.stderr)
            self.passes[kind] = self.record(ids.clone(), positions.clone(), path, stores, kv_len, means)
        own_ids, own_positions, graph, hidden = self.passes[kind]
        own_ids.copy_(ids)
        own_positions.copy_(positions)
        graph.replay()
        return hidden           # until the next pass of this kind

    def record(self, *inputs):
        """(ids, positions, a CUDA graph of the pass over them, its hidden states)."""
        self.model(*inputs)                             # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = self.model(*inputs)
        return *inputs[:2], graph, hidden


# ------------------------------------------------------------------------------------- checkpoints
# One form of a Hugging Face folder is read: what save_pretrained of transformers writes, of five types of
# models. Any other form is refused; require_form names the command that converts it. What this network would
# compute otherwise than transformers is refused, too. Every fault is a ValueError that names the folder.

CONVERT = '; `python -m lab.convert FOLDER NEW` makes a folder that loads, if transformers can read this one'
STORED = dict(          # what weights may be stored as, by safetensors' names
    F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16, F64=torch.float64)
FUSED = dict(           # parameters that hold several tensors of a checkpoint, one after the other
    qkv_proj=('q_proj', 'k_proj', 'v_proj'), gate_up_proj=('gate_proj', 'up_proj'))


def load(folder, device='cpu', dtype=torch.float32, shard=None):
    """(Transformer, Tokenizer, end-of-sequence ids) of a Hugging Face folder, or of a repository's name.

    dtype None: fp32, in which big matrices keep the 16 bits of their files where this CPU can multiply them
    so, see kernels.pack. shard: what one process of several holds, see lab/parallel.py.
    """
    folder = find_folder(folder)
    with naming(folder):
        for name in ('config.json', 'tokenizer.json'):
            require_form((folder / name).exists(), f'there is no {name}')
        config = read_config(folder)
        tokenizer = read_tokenizer(folder)
        tensors = find_tensors(folder)
        if config.tie_word_embeddings and 'lm_head.weight' in tensors:      # it counts, as in transformers
            config = replace(config, tie_word_embeddings=False)
        with naming('config.json', (RuntimeError, ArithmeticError)), torch.device('meta'):     # e.g. overflow
            model = Transformer(shard.config(config) if shard else config)
        model = model.requires_grad_(False).to(dtype or torch.float32)
        names = checkpoint_views(model).keys()
        missing, unknown = names - tensors.keys(), tensors.keys() - names
        first = min(missing | unknown, default=None)
        require_form(not first, f'{len(missing)} tensors are missing, {len(unknown)} unknown, first {first}')
        if dtype is None and kernels.has_half():
            keep_16_bits(model, tensors)
        model.to_empty(device=device)
        model.tie()
        fill(model, tensors, shard)
        model.set_context(min(2048, config.max_position_embeddings))
        model.token_texts = {i: text for text, i in tokenizer.get_vocab(with_added_tokens=True).items()
                             if i < config.vocab_size}      # the network cannot read or write the others
        model.vocab = max(model.token_texts, default=0) + 1
        require_that(model.vocab > 1, f'tokenizer of {model.vocab} entries; expected 2 or more')
        return model, tokenizer, read_eos(folder)


def fill(model, tensors, shard=None):
    """Copies a checkpoint's tensors into the network; ValueError for a wrong shape, NaN or infinity."""
    for name, view in kernels.bar(checkpoint_views(model).items(), 'loading'):
        file, dtype = tensors[name]
        require_form(dtype, f'{name} is stored in another type than fp32, fp16 or bf16')
        with safe_open(file, 'pt') as weights:          # one at a time, so that copied pages are let go
            stored = weights.get_slice(name)
            tensor = shard.part(name, stored) if shard else stored[:]
        require_that(tensor.shape == view.shape,
                     f'{name} has the shape {list(tensor.shape)}; expected {list(view.shape)}')
        view.copy_(tensor)
        require_that(all(end.isfinite() for end in view.aminmax()),
                     f'{name} holds NaN or infinity in {view.dtype}; the widest range has --dtype fp32')


def keep_16_bits(model, tensors):
    """Gives big matrices, except experts, the dtype of their files if all of their parts have the same 16."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and weight.numel() >= kernels.BIG:
            dtypes = {tensors[part][-1] for part in parts_of(name)}
            if dtypes in ({torch.float16}, {torch.bfloat16}):
                weight.data = weight.data.to(dtypes.pop())


def find_tensors(folder):
    """{name: (file, dtype)} of the tensors of a folder, without rotary tables."""
    tensors = {}
    for file in weight_files(folder):
        with naming(file.name), safe_open(file, 'pt') as weights:
            for name in weights.keys():
                require_that(name not in tensors, f'{name} is in another file, too')
                if not name.endswith('inv_freq'):       # a rotary table, which we compute
                    tensors[name] = file, STORED.get(weights.get_slice(name).get_dtype())
    return tensors


def weight_files(folder):
    """The safetensors files of a folder: the whole one if it is there, else all shards."""
    whole = folder / 'model.safetensors'
    shards = sorted(folder.glob('model-*.safetensors'))
    require_form(whole.exists() or shards, 'there is no model.safetensors')
    return [whole] if whole.exists() else shards


def parts_of(name):
    """The names in a checkpoint of what a parameter of this name holds."""
    *home, fused, kind = name.split('.')
    return ['.'.join([*home, part, kind]) for part in FUSED.get(fused, (fused,))]


def checkpoint_views(model):
    """{name in a checkpoint: a parameter of the network, or its part}; experts are single matrices there."""
    H, G, D = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    views = {}
    for name, weight in model.named_parameters():
        tensors = {name: weight}
        if weight.ndim == 3:                            # a stack of experts: gates, then ups [E, 2 F, C]
            home, part = name.rsplit('.', 1)
            tensors = {f'{home}.experts.{e}.{part}.weight': expert for e, expert in enumerate(weight)}
        for one, tensor in tensors.items():
            parts = parts_of(one)
            rows = [H * D, G * D, G * D] if '.qkv_proj.' in one else len(tensor) // len(parts)
            views |= zip(parts, tensor.split(rows))
    return views


# ------------------------------------------------------------------------------------- config.json

ORIGINAL = 'original_max_position_embeddings'
ONLY = dict(            # settings that may have these values alone; None: absent, or null
    model_type=('llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'), hidden_act=(None, 'silu'),
    is_causal=(None, True), quantization=(None,), decoder_sparse_step=(None, 1), mlp_only_layers=(None, []),
    partial_rotary_factor=(None, 1), mscale=(None, 0), mscale_all_dim=(None, 0), truncate=(None, True),
    rope_type=('default', 'linear', 'yarn', 'llama3'))
SCALING = dict(         # the numbers that a rope_type needs beside rope_theta
    default=[], linear=['factor'], yarn=['factor', ORIGINAL],
    llama3=['factor', ORIGINAL, 'low_freq_factor', 'high_freq_factor'])


def read_config(folder):
    """The Config of a folder, as transformers 4 writes it (rope_scaling) or 5 (rope_parameters)."""
    raw = read_json(folder / 'config.json')
    with naming('config.json'), naming('a setting', LACKING, CONVERT):
        rope = read_rope(raw)
        for name, allowed in ONLY.items():
            value = rope.get(name, raw.get(name))
            require_that(value in allowed, f'{name} {value!r} is not supported, only {allowed}')
        require_form(not raw.get('quantization_config'), 'the weights are quantised')
        for name in ['rope_theta', *SCALING[rope['rope_type']]]:
            require_form(type(rope.get(name)) in (int, float) and 0 < rope[name] < 1e100,
                         f'{name} of the rotary settings is {rope.get(name)!r}; expected a number above 0')
        kind = raw['model_type']
        given = {name: raw[name] for name in knobs_of(Config) if raw.get(name) is not None}
        if kind != 'qwen3':
            given.setdefault('head_dim', raw['hidden_size'] // max(raw['num_attention_heads'], 1))
        context = raw['max_position_embeddings']
        if rope['rope_type'] in ('linear', 'yarn'):     # llama3's context is the extended one
            context = max(context, int(rope['factor'] * rope.get(ORIGINAL, context)))
        windowed = kind == 'mistral' or raw.get('use_sliding_window') and kind != 'llama'
        window = raw.get('sliding_window', 4096) if windowed else None      # absent: as transformers has it
        E = raw.get('num_local_experts') or raw['num_experts'] if kind == 'qwen3_moe' else 0
        bias = bool(raw.get('attention_bias')) and kind not in ('mistral', 'qwen2')
        config = Config(**given | dict(
            rope=rope, max_position_embeddings=min(context, window or context), sliding_window=window,
            qk_norm=kind.startswith('qwen3'), qkv_bias=bias or kind == 'qwen2', o_bias=bias,
            mlp_bias=bool(raw.get('mlp_bias')) and kind == 'llama', num_experts=E))
        check_fields(config)
        require_that(not E or 0 < config.num_experts_per_tok <= E, 'num_experts_per_tok: expected 1 or more '
                     f'of the {E} experts')
        return config


def read_rope(raw):
    """The rotary settings, under transformers 5's names."""
    given = raw.get('rope_scaling') or raw.get('rope_parameters') or {}         # as transformers looks
    kind = given.get('rope_type') or given['type'] if given else 'default'
    require_form(ORIGINAL not in raw, f'{ORIGINAL} is not among the rotary settings')
    return {'rope_theta': raw.get('rope_theta', 10000.0)} | given | {'rope_type': kind}


# ------------------------------------------------------------------------------------- tokenizer

def read_tokenizer(folder):
    """The Tokenizer of a folder, which neither cuts nor pads nor draws."""
    with naming('tokenizer.json', BaseException):       # tokenizers is Rust: a panic is no Exception
        tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    tokenizer.no_truncation()                           # a file may ask for both
    tokenizer.no_padding()
    with contextlib.suppress(AttributeError):
        tokenizer.model.dropout = None                  # of merges, in training: ids would be random
    settings = read_json(folder / 'tokenizer_config.json', {})
    require_that(not settings.get('split_special_tokens'), 'split_special_tokens is not supported')
    with naming('tokens beside tokenizer.json', MALFORMED):
        by_id = settings.get('added_tokens_decoder', {})
        tokenizer.add_tokens([AddedToken(**by_id[i]) for i in sorted(by_id, key=int)])
        there = tokenizer.get_added_tokens_decoder()
        listed = {text_of(token): int(i) for i, token in by_id.items()}
        listed = listed or read_json(folder / 'added_tokens.json', {})
        wrong = listed.items() - {(token.content, i) for i, token in there.items()}
        named, extra = special_tokens(folder)
        wrong |= {*named.values(), *extra} - {token.content for token in there.values() if token.special}
        require_form(not wrong, f'{min(map(str, wrong), default="")} is not there, or not as a special token')
    return tokenizer


def special_tokens(folder):
    """({name: text}, [text]) of the special tokens that a folder names: bos_token, ..., and extra ones."""
    settings = read_json(folder / 'tokenizer_config.json', {})
    if 'added_tokens_decoder' not in settings:          # else the file of that name is not read
        settings |= read_json(folder / 'special_tokens_map.json', {})
    extra = settings.get('extra_special_tokens') or settings.get('additional_special_tokens') or []
    named = {name: text_of(token) for name, token in settings.items()
             if name.endswith('_token') and token and isinstance(token, (str, dict))}   # not add_bos_token
    return named, [text_of(token) for token in extra]


def text_of(token):
    """The text of a token, which is stored alone or with its flags."""
    return token['content'] if isinstance(token, dict) else token


def encode(tokenizer, text, special=True):
    """The ids of a text; special: with what the tokenizer adds around one."""
    with naming('the tokenizer cannot encode a prompt', BaseException):
        return tokenizer.encode(text, add_special_tokens=special).ids


class TextStream:
    """The text that follows a prompt (ids), in pieces that never hold half a character."""

    def __init__(self, tokenizer, prompt):
        self.tokenizer = tokenizer
        self.ids = list(prompt)         # then the latest; alone, an id may lose its leading space
        self.shown = len(self.ids)      # of them, those whose text was returned

    def add(self, token):
        """The piece of text that this token completes."""
        self.ids.append(token)
        before = self.tokenizer.decode(self.ids[:self.shown])
        text = self.tokenizer.decode(self.ids)
        if not text.startswith(before):
            before = before.rstrip('\ufffd')            # of a prompt that ends within a character
        piece = text[len(before):]
        if not piece or piece.endswith('\ufffd'):
            return ''
        self.ids = self.ids[self.shown:]
        self.shown = len(self.ids)
        return piece


def chat(folder, messages, **settings):
    """The messages, [{role, content}, ...], in the checkpoint's own chat template; a text: the user's one.

    settings: what the template knows beside them, as enable_thinking of Qwen3's.
    """
    folder = find_folder(folder)
    messages = messages if isinstance(messages, list) else [dict(role='user', content=messages)]
    with naming(f'--chat: the template of {folder}', Exception):        # whatever the template raises
        template = jinja_world(folder).from_string(read_template(folder))
        messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
        require_that(all(isinstance(one.get('content', ''), str) for one in messages),
                     'expected a text as the content of each message')
        usual = dict(tools=None, documents=None, add_generation_prompt=True)
        return template.render(usual | settings | dict(messages=messages))


def read_template(folder):
    """The text of a folder's chat template."""
    file = folder / 'chat_template.jinja'
    template = read_json(folder / 'tokenizer_config.json', {}).get('chat_template')
    template = file.read_text(encoding='utf-8') if file.exists() else template
    require_that(template, 'there is none')
    require_form(isinstance(template, str), 'there are several')
    # a tag that marks an assistant's text, which is rendered as it is
    return re.sub(r'({%[-+]?\s*)(end)?generation\b', r'\1\2with', template)


def jinja_world(folder):
    """What transformers gives to templates, in jinja's immutable sandbox: tags, functions, special tokens."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment    # it comes with torch
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                          extensions=['jinja2.ext.loopcontrols'])
    world.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
    world.globals.update(raise_exception=functools.partial(require_that, False),
                         strftime_now=lambda format: datetime.now().strftime(format))
    named, _ = special_tokens(folder)
    world.globals.update(named)
    return world


def read_eos(folder):
    """The end-of-sequence ids: of generation_config.json where it names one, else of config.json."""
    named = [read_json(folder / name, {}).get('eos_token_id')
             for name in ('generation_config.json', 'config.json')]
    eos = next((ids for ids in named if ids is not None), [])
    eos = eos if isinstance(eos, list) else [eos]
    require_that(all(type(i) is int for i in eos), f'eos_token_id is {eos}; expected token ids')
    return frozenset(eos)


def same_vocabulary(target, other, whose):
    """ValueError naming the first token (lowest id) that two loaded networks do not share by text and id."""
    for i in sorted(target.token_texts.keys() | other.token_texts.keys()):
        theirs, ours = other.token_texts.get(i), target.token_texts.get(i)
        require_that(theirs == ours, f'{whose}: another vocabulary: token {i} is {theirs!r}, not {ours!r}')


# ------------------------------------------------------------- calibration.json, beside a target's weights
# What train_mask.py measured on a target: {"target": fingerprint, section: {...}, ...}. A section of a pair
# names the draft's fingerprint under "draft".

MEASURE = dict(         # the command that measures a section
    mask='python train_mask.py', sparse='python train_mask.py --anchors',
    signals='python train_mask.py --signals')


QUANTILES = 21          # 0 to 1 in steps of 0.05, of every table of the section 'sparse'


class Calibration(dict):
    """{section: dict} of a target; a section that is absent is told with the command that measures it."""
    models = ''             # flags of train_mask.py that name them

    def __missing__(self, name):
        raise BadInput(f'calibration.json has no section {name!r} of these models; make it with '
                       f'{MEASURE[name]} {self.models}')


def sections_of(target):
    """{section: dict} that calibration.json has of a target's present weights."""
    stored = read_json(find_folder(target) / 'calibration.json', {})
    return stored if stored.pop('target', None) == fingerprint(target) else {}


def has_form(value, lengths, most=1e9):
    """Whether it is lists of lists of these lengths (None: of any) of numbers of this size at most."""
    if not lengths:
        return type(value) in (int, float) and abs(value) <= most       # NaN is not
    return (isinstance(value, list) and lengths[0] in (None, len(value))
            and all(has_form(one, lengths[1:], most) for one in value))


def check_form(name, section, L):
    """BadInput for a section that train_mask.py does not write so for a target of L layers."""
    forms = dict(
        mask=dict(skip=([None], 2 * L - 1)), signals=dict(draft_logp=([2],), draft_grounding=([2],)),
        sparse=dict(anchors=([L], L - 1), channels=([L, QUANTILES],), experts=([L, None, QUANTILES],)))
    for key, form in forms.get(name, {}).items():
        require_that(has_form(section.get(key), *form), f'{name}: {key} is {str(section.get(key))[:40]}')


def read_calibration(target, draft=None):
    """The Calibration of a target folder; what was measured on other weights, or another draft, is absent."""
    drafts = None, draft and fingerprint(draft)
    folder = find_folder(target)
    with naming(f'{folder}: delete its calibration.json, and measure anew by train_mask.py', MALFORMED):
        calibration = Calibration({name: section for name, section in sections_of(target).items()
                                   if section.get('draft') in drafts})
        for name, section in calibration.items():
            check_form(name, section, read_config(folder).num_hidden_layers)
    calibration.models = f'--target {target}' + (f' --draft {draft}' if draft else '')
    return calibration


def write_calibration(target, name, section):
    """Puts one section into the target's calibration.json; those of the same weights stay, others go."""
    folder = find_folder(target)
    with locked(folder / 'config.json'), new_file(folder / 'calibration.json') as file:
        json.dump({'target': fingerprint(target)} | sections_of(target) | {name: section}, file)


def fingerprint(folder):
    """16 hex digits that name a model: of its config.json and of 256 samples of each weight file.

    Whole files of 16 GB would take half a minute; retraining changes every sample.
    """
    folder = find_folder(folder)
    digest = hashlib.sha256((folder / 'config.json').read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        with open(file, 'rb') as weights:
            for i in range(256):
                weights.seek(i * size // 256)
                digest.update(weights.read(4096))
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------- files of a folder

class BadInput(ValueError):
    """What a user can mend: a flag, a folder, a prompt. Programs print it in one line."""


FAULTS = ValueError, OSError, SafetensorError           # of a file that cannot be read
LACKING = TypeError, KeyError, AttributeError           # of a file that holds less, or something else
MALFORMED = *FAULTS, *LACKING


def require_that(holds, message):
    """BadInput with this message, one line, unless it holds."""
    if not holds:
        raise BadInput(message)


def require_form(holds, message):
    """The same for a folder of another form: the line ends with the command that converts it."""
    require_that(holds, message + CONVERT)


@contextlib.contextmanager
def naming(where, faults=FAULTS, then=''):
    """Errors of these types become a BadInput that names this file or folder; others are our own defects.

    then: what the line ends with.
    """
    try:
        yield
    except faults as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = '' if isinstance(error, (ValueError, OSError)) else f'{type(error).__name__}: '
        raise BadInput(f'{where}: {what}{error}'.rstrip(': ') + then) from None


def find_folder(name):
    """The folder of this name, or a snapshot of the Hugging Face repository owner/name, fetched if needed."""
    require_form(not File(name).is_file(), f'{name} is a file; expected a folder')
    return File(name) if File(name).is_dir() else snapshot(str(name))


@functools.cache
def snapshot(name):
    from huggingface_hub import errors, snapshot_download, try_to_load_from_cache    # slow; with tokenizers
    with naming(f'{name}: no such folder, and as a repository of the hub', Exception):
        try:
            return File(snapshot_download(name, allow_patterns=['*.json', 'model*.safetensors', '*.jinja'],
                                          ignore_patterns=['*/*']))
        except errors.LocalEntryNotFoundError:          # offline: the cache may have all that is needed
            config = try_to_load_from_cache(name, 'config.json')
            if not isinstance(config, str):
                raise
            return File(config).parent


@contextlib.contextmanager
def locked(where, wait=True):
    """Holds the file system's lock of this file, which a killed process lets go; there is none on Windows.

    wait: until another process lets it go; else BadInput if one holds it.
    """
    with open(where) as file:
        with contextlib.suppress(ImportError), naming(f'{where}: another program writes it', BlockingIOError):
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def new_file(where):
    """A text file to write, which takes the place of `where` when it is whole; until then that is kept.

    What a writer that was killed left beside it is taken away after an hour.
    """
    home = File(os.path.realpath(where))                # of a link: what it leads to
    kept = os.path.isfile(where) or not os.path.exists(where)       # and no pipe or device
    fresh = File(tempfile.mktemp('.new', f'.{home.name}.', home.parent)) if kept else where
    for left in home.parent.glob(f'.{home.name}.*.new') if kept else ():
        if time.time() - left.stat().st_mtime > 3600:
            left.unlink()
    if os.path.isfile(where):
        open(where, 'a').close()                        # fails if it is read-only
    try:
        with open(fresh, 'w', encoding='utf-8') as file:
            yield file
        if os.path.isfile(where):
            shutil.copymode(home, fresh)
        if kept:
            fresh.replace(home)
    finally:
        if kept:
            fresh.unlink(missing_ok=True)


def check_writable(where):
    """BadInput, before the work, where new_file could not write this file."""
    with contextlib.suppress(EOFError), naming(f'{where} cannot be written'), new_file(where):
        raise EOFError                                  # so that nothing is replaced


def read_json(path, absent=None):
    """The object in a JSON file; absent: what an optional file counts as where it is not there."""
    if absent is not None and not path.exists():
        return absent
    with naming(path.name, (*FAULTS, RecursionError)):
        content = json.loads(path.read_text(encoding='utf-8'))
        require_that(isinstance(content, dict), f'holds {str(content)[:40]}; expected a JSON object')
        return content


# ------------------------------------------------------------------------------------- options
# The knobs of a method, the settings of an Engine and of a measurement are fields of a dataclass.

TYPES = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text'}


def knob(default, meaning, lowest=-inf, highest=1e9, words=()):
    """A field that users set: a number in a range, or one of these words. `meaning` says what None does."""
    return field(default=default, metadata=dict(meaning=meaning, lowest=lowest, highest=highest, words=words))


@functools.cache
def knobs_of(kind):
    """{name: field} of a dataclass, of a method its knobs; types that are written as texts are resolved.

    A number that says no more than its type is a size of a network: 1 or more, a float 0 or more.
    """
    types = get_type_hints(kind)
    for option in fields(kind):
        kinds = {*get_args(types[option.name])} - {type(None)}      # of int | None
        optional = len(kinds) == 1 and type(None) in get_args(types[option.name])
        option.type = kinds.pop() if optional else types[option.name]
        lowest = 0 if option.default == 0 or option.type is float else 1
        option.metadata = dict(meaning='', lowest=lowest, highest=1e10, words=()) | option.metadata
    return {option.name: option for option in fields(kind) if option.init}


def knob_range(option):
    """The values that a field may have, in words; '' if any of its type will do."""
    lowest, highest = option.metadata['lowest'], option.metadata['highest']
    if option.type not in (int, float) or lowest == -inf:
        return ', '.join(map(str, option.metadata['words']))
    return f'{lowest:g} or more' if highest >= 1e9 else f'{lowest:g} to {highest:g}'


def as_number(value):
    """The value, a number of numpy or of a tensor as Python's."""
    return value.item() if getattr(value, 'ndim', None) == 0 else value


def check_fields(made):
    """BadInput for the first field of a dataclass of another type than it says, or out of its range."""
    for name, option in knobs_of(type(made)).items():
        value = vars(made)[name] = as_number(getattr(made, name))
        kind, allowed = option.type, option.metadata
        if kind not in TYPES or value is None and option.default is None:
            continue
        fits = type(value) in (kind, int if kind is float else kind)
        fits = fits and value in (allowed['words'] or [value])
        if fits and kind in (int, float):
            fits = allowed['lowest'] <= value <= allowed['highest']
        expected = f'{TYPES[kind]} {knob_range(option)}'.rstrip()
        if type(value) in (int, float) and value > allowed['highest'] >= 1e9:
            expected += f', {allowed["highest"]:g} at most'
        require_that(fits, f'{name} is {value!r}; expected {expected}')
