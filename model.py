"""The network: a checkpoint's Config, the Transformer, the Path of a pass, the KVCache, the Reader, load.

Not here: sampling and verification (verify.py), the arithmetic of a layer (kernels.py).

B rows, T new tokens, S cache capacity, L layers, H query heads, G key/value heads, D head size, C width,
F feed-forward width, E experts, V vocabulary.
"""
import copy
import functools
import json
import os
import shutil
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path as File

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

import kernels

CHUNK = 2048    # positions of a long prompt fed in one pass, so that the mask stays small
PAD = 16        # compiled passes of up to this many positions are padded to a power of two: few graphs
KINDS = 'llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'
NEEDED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
          'max_position_embeddings')
MIXTURE = 'num_experts', 'num_experts_per_tok', 'moe_intermediate_size'     # what qwen3_moe needs as well
EXTRA = dict(   # names read beside those of Config's fields
    num_experts=int, decoder_sparse_step=int, sliding_window=int, rope_theta=float, attention_bias=bool,
    use_sliding_window=bool, layer_types=list, mlp_only_layers=list)
EXPECTED = {int: 'an integer, 1 to 1e10', float: 'above 0, to 1e10', bool: 'true or false', list: 'a list'}


def expect(holds, message):
    """ValueError with this message, one line, unless it holds."""
    if not holds:
        raise ValueError(message)


@dataclass(frozen=True)
class Config:
    """The numbers that shape a network, under the names that config.json gives them."""
    model_type: str
    vocab_size: int                 # rows of the embedding; V, the tokenizer's length, may be smaller
    hidden_size: int                # C
    intermediate_size: int          # F
    num_hidden_layers: int          # L
    num_attention_heads: int        # H
    num_key_value_heads: int        # G
    head_dim: int                   # D
    max_position_embeddings: int    # context, tokens
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False           # an RMSNorm on each head's query and key (Qwen3)
    rope: dict = field(default_factory=lambda: dict(rope_type='default', rope_theta=10000.0))
    experts: tuple = ()             # per layer: E where the feed-forward is a mixture, else 0; (): nowhere
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def mixtures(self):
        """For each layer its number of experts, 0 where the feed-forward is dense."""
        return self.experts or (0,) * self.num_hidden_layers


def read_config(folder):
    """The Config of a Hugging Face folder, as transformers 4 writes it (rope_scaling) or 5 (rope_parameters).

    ValueError for what this network does not compute, and for values that are none.
    """
    where = File(folder) / 'config.json'
    raw = read_json(where)
    raw.setdefault('num_experts', raw.get('num_local_experts'))         # transformers 5's name
    refuse(raw, where)
    get, kind, heads = raw.get, raw['model_type'], raw['num_attention_heads']
    bias, E = bool(get('attention_bias')) and kind not in ('mistral', 'qwen2'), get('num_experts')
    dense, every = get('mlp_only_layers') or [], get('decoder_sparse_step') or 1
    experts = (0 if i in dense or (i + 1) % every else E for i in range(raw['num_hidden_layers']))
    usual = dict(num_key_value_heads=heads, head_dim=raw['hidden_size'] // heads)
    given = {f.name: raw[f.name] for f in fields(Config) if get(f.name) is not None}
    return Config(**usual | given | dict(
        rope=read_rope(raw, where), qkv_bias=bias or kind == 'qwen2', o_bias=bias,
        mlp_bias=bool(get('mlp_bias')) and kind == 'llama', qk_norm=kind.startswith('qwen3'),
        experts=tuple(experts) if kind == 'qwen3_moe' else ()))


def refuse(raw, where):
    """ValueError for a value of the wrong type, and for what this network would silently leave out."""
    kind, get = raw.get('model_type'), raw.get
    expect(kind in KINDS, f'{where}: model_type {kind!r} is not one of {", ".join(KINDS)}')
    types = {f.name: f.type for f in fields(Config) if f.type in EXPECTED} | EXTRA
    for name, wanted in types.items():
        value, needed = get(name), name in NEEDED or kind == 'qwen3_moe' and name in MIXTURE
        good = value is None and not needed or wanted in (bool, list) and type(value) is wanted
        good = good or wanted in (int, float) and type(value) in (int, wanted) and 0 < value <= 1e10
        expect(good, f'{where}: {name} is {value!r}, expected {EXPECTED[wanted]}')
    window = get('sliding_window', 4096 if kind == 'mistral' else None)
    used = window and (kind == 'mistral' or kind != 'llama' and get('use_sliding_window'))
    short, kinds = used and window < raw['max_position_embeddings'], get('layer_types') or []
    expect(not short and 'sliding_attention' not in kinds,
           f'{where}: a sliding window of {window} is switched on; only full attention is here')
    act, H, G = get('hidden_act', 'silu'), raw['num_attention_heads'], get('num_key_value_heads') or 1
    D, (E, k, _) = get('head_dim') or raw['hidden_size'] // H, map(get, MIXTURE)
    expect(act == 'silu', f'{where}: hidden_act {act!r} is not supported, only silu')
    expect(not get('quantization_config'), f'{where}: quantised (quantization_config); use plain weights')
    expect(H % G == 0, f'{where}: {H} query heads cannot share {G} key heads')
    expect(D > 0 and D % 2 == 0, f'{where}: head_dim is {D}; positions turn its channels in pairs')
    expect(kind != 'qwen3_moe' or k <= E, f'{where}: num_experts_per_tok is {k}, of {E} experts')


def read_rope(raw, where):
    """The rotary settings, under transformers 5's names, defaults filled in."""
    given = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
    flat = isinstance(given, dict) and not any(isinstance(v, dict) for v in given.values())
    expect(flat, f'{where}: rotary settings {given!r}: expected one flat object for all layers')
    given = {k: v for k, v in given.items() if v is not None}
    kind = given.get('rope_type', given.get('type', 'default'))
    needs = dict(default='', linear='factor', yarn='factor', llama3='factor low_freq_factor high_freq_factor')
    expect(kind in needs, f'{where}: rope type {kind!r} is not one of {", ".join(needs)}')
    part = given.get('partial_rotary_factor', raw.get('partial_rotary_factor') or 1.0)
    expect(part == 1.0, f'{where}: partial_rotary_factor is not supported; every channel is rotated here')
    usual = dict(rope_theta=raw.get('rope_theta') or 10000.0,
                 original_max_position_embeddings=raw['max_position_embeddings'])
    rope = usual | given | dict(rope_type=kind)
    there = [x for x in 'beta_fast beta_slow attention_factor mscale mscale_all_dim'.split() if rope.get(x)]
    for name in ['rope_theta', 'original_max_position_embeddings', *needs[kind].split(), *there]:
        low = 1 if name == 'rope_theta' else 0
        good = type(rope.get(name)) in (int, float) and rope[name] > low
        expect(good, f'{where}: rope type {kind} needs {name} above {low}, found {rope.get(name)!r}')
    return rope


def read_json(path):
    """The object in a JSON file; ValueError in one line if there is none."""
    try:
        found = json.loads(File(path).read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise ValueError(f'{path}: no such file; expected a Hugging Face folder with config.json') from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f'{path}: cannot be read as JSON ({error})') from None
    expect(isinstance(found, dict), f'{path}: holds a {type(found).__name__}, expected a JSON object')
    return found


class Part(nn.Module):
    """nn.Module without hooks, its submodules plain attributes: calls are half of a small network's time."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value                 # found at once, not by nn.Module's search

    def __call__(self, *args):
        return self.forward(*args)


class Linear(nn.Linear):
    """A matrix product; for one position of a compiled pass a sum that inductor fuses with its neighbours."""

    def __call__(self, x):
        weight, bias = self._parameters['weight'], self._parameters['bias']
        if x.numel() > x.shape[-1] or not torch.compiler.is_compiling():
            return F.linear(x, weight, bias)
        y = (x[..., None, :] * weight).sum(-1)
        return y if bias is None else y + bias


class RMSNorm(nn.RMSNorm):
    def __call__(self, x):
        return torch.rms_norm(x, self.normalized_shape, self._parameters['weight'], self.eps)


class Attention(Part):
    def __init__(self, config):
        super().__init__()
        C, H, G = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.D = D = config.head_dim
        self.q_proj = Linear(C, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, G * D, bias=config.qkv_bias)
        self.v_proj = Linear(C, G * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, C, bias=config.o_bias)
        norm = lambda: RMSNorm(D, config.rms_norm_eps) if config.qk_norm else lambda x: x
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x, attend, view, store, carry):
        """x [B, T, C] -> ([B, T, C], carry). store: this layer's (keys, values) in the cache, or None."""
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.D)).transpose(1, 2)          # [B, H, T, D]
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.D)).transpose(1, 2)          # [B, G, T, D]
        v = self.v_proj(x).view(B, T, -1, self.D).transpose(1, 2)                       # [B, G, T, D]
        q, k = kernels.rotate(q, view.cos, view.sin), kernels.rotate(k, view.cos, view.sin)
        if store is not None:
            k = store[0].index_copy_(2, view.positions, k)[:, :, :view.span]            # [B, G, span, D]
            v = store[1].index_copy_(2, view.positions, v)[:, :, :view.span]
        out, carry = attend(q, k, v, view.mask, carry)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1)), carry


class MLP(Part):
    def __init__(self, C, F, bias=False):
        super().__init__()
        self.gate_proj = Linear(C, F, bias=bias)
        self.up_proj = Linear(C, F, bias=bias)
        self.down_proj = Linear(F, C, bias=bias)


class MoE(Part):
    def __init__(self, config, E):
        super().__init__()
        self.top_k, self.renormalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, E, bias=False)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(E))
        self.stacks = []

    def stack(self):
        """Puts gate, up and down of all experts into one tensor [E, rows, columns] each, for compiled passes.

        The experts' own weights become its views: nothing is held twice, names and checkpoints stay.
        """
        for name in () if self.stacks else ('gate_proj', 'up_proj', 'down_proj'):
            own = [getattr(expert, name).weight for expert in self.experts]
            self.stacks.append(torch.stack([weight.data for weight in own]))
            for weight, view in zip(own, self.stacks[-1]):
                weight.data = view


class Block(Part):
    def __init__(self, config, E):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config, E) if E else MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x, attend, ffn, view, store, carry):
        """x [B, T, C] -> ([B, T, C], carry). A sublayer whose function is None is passed by."""
        if attend is not None:
            y, carry = self.self_attn(self.input_layernorm(x), attend, view, store, carry)
            x = x + y
        if ffn is not None:
            y, carry = ffn(self.post_attention_layernorm(x), self.mlp, carry)
            x = x + y
        return x, carry


@dataclass(frozen=True)
class Path:
    """How one pass is computed: each layer's attend and ffn function, None where that sublayer is skipped.

    writes: the name under which the cache remembers what this path wrote. A path that runs every sublayer
    densely writes 'full', whatever else it observes on the way.
    """
    name: str
    attends: tuple      # [L]
    ffns: tuple         # [L]
    writes: str = 'full'
    block: int = None   # keys to a block mean; 0: its layers need no means; None: they are handed nothing
    carry: object = None    # what the first layer is handed; a path that observes puts what it sees there

    def slim(self, skip, name='slim'):
        """This path without the sublayers in skip: 2i is layer i's attention, 2i + 1 its feed-forward."""
        keep = lambda fs, odd: tuple(None if 2 * i + odd in skip else f for i, f in enumerate(fs))
        writes = f'{self.writes} without {sorted(skip)}' if skip else self.writes
        return Path(name, keep(self.attends, 0), keep(self.ffns, 1), writes, self.block)

    @functools.cache
    def sparse(self, attend, heads, channels, experts):
        """This path thinned out: for each layer what sparse kernels are told as `how`, None to stay dense."""
        thin = {f: [functools.partial(g, how=how) if how else f for how in hows] for f, g, hows in (
            (kernels.attend, attend, heads), (kernels.swiglu, kernels.sparse_swiglu, channels),
            (kernels.mix, kernels.sparse_mix, experts))}
        swap = lambda fs: tuple(f and thin[f][i] for i, f in enumerate(fs))
        attends, ffns = swap(self.attends), swap(self.ffns)
        if (attends, ffns) == (self.attends, self.ffns):
            return self
        name = 'sparse' if self.name == 'full' else f'sparse {self.name}'
        block = next((how[2].block for how in heads if how), 0)
        return Path(name, attends, ffns, self.writes.replace('full', 'sparse'), block)

    def grounded(self, where, n, **carry):
        """This path, observed by kernels.grounded in n of the layers that it runs (in all if fewer), once."""
        run = [i for i, f in enumerate(self.attends) if f]
        n = len(run) if where == 'all' else min(n, len(run))
        begin = dict(first=0, middle=(len(run) - n) // 2, last=len(run) - n, all=0)[where]
        seen = run[begin:begin + n]
        attends = tuple(kernels.grounded if i in seen else f for i, f in enumerate(self.attends))
        return replace(self, name='grounded', attends=attends, block=None, carry=dict(shades=None, **carry))

    def trusts(self, writer):
        """Whether this path may build on what `writer` wrote: the full path, itself, or itself unskipped."""
        return writer in ('full', self.writes, self.writes.split(' without')[0])


@dataclass(frozen=True)
class View:
    """What every layer of one pass shares: where its tokens stand and what they may see."""
    positions: torch.Tensor     # [T] absolute
    cos: torch.Tensor           # [T, D]
    sin: torch.Tensor           # [T, D]
    mask: torch.Tensor          # [T, span], 0 where a query may look and -inf elsewhere; made once a pass
    span: int                   # keys in view


class Transformer(Part):
    """A Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE network; parameter names are the checkpoint's."""

    def __init__(self, config):
        super().__init__()
        self.config, self.vocab, self.words = config, config.vocab_size, {}     # of the tokenizer: see load
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Block(config, E) for E in config.mixtures),
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        ffns = tuple(kernels.mix if E else kernels.swiglu for E in config.mixtures)
        block = 0 if any(config.mixtures) else None     # a compiled mixture is told what is padding
        self.full = Path('full', (kernels.attend,) * len(ffns), ffns, block=block)  # every sublayer, densely
        self.set_context(min(2048, config.max_position_embeddings))

    def set_context(self, length):
        """Rotary tables for `length` positions, in the weights' dtype and device."""
        cos, sin = kernels.rope_table(self.config.rope, self.config.head_dim, length)
        self.register_buffer('cos', cos.to(self.lm_head.weight), persistent=False)     # [S, D]
        self.register_buffer('sin', sin.to(self.lm_head.weight), persistent=False)

    def forward(self, ids, positions, path, stores=None, span=None, carry=None):
        """ids [B, T] at absolute positions [T] -> hidden states [B, T, C] after the last norm.

        stores: the cache's (keys, values) per layer, written in place; span: how many keys are in view.
        Without a cache the tokens see each other alone (training). carry: what the first layer is handed.
        """
        span = ids.shape[1] if stores is None else span
        hidden = torch.arange(span, device=ids.device) > positions[:, None]             # [T, span]
        mask = torch.zeros_like(hidden, dtype=self.cos.dtype).masked_fill(hidden, -torch.inf)
        view = View(positions, self.cos[positions], self.sin[positions], mask, span)
        x = self.model.embed_tokens(ids)
        for i, layer in enumerate(self.model.layers):
            x, carry = layer(x, path.attends[i], path.ffns[i], view, stores and stores[i], carry)
        return self.model.norm(x)

    def logits(self, hidden):
        """hidden [B, T, C] -> logits [B, T, V], cut to the tokenizer's length (checkpoints pad the head)."""
        return F.linear(hidden, self.lm_head.weight[:self.vocab])

    def read_bytes(self, path):
        """Weight bytes that a pass on this path streams: the kept sublayers, the last norm and the head.

        A mixture is counted whole; how many of its experts a pass really reads depends on the tokens.
        """
        size = lambda module: sum(p.numel() * p.element_size() for p in module.parameters())
        total = size(self.model.norm) + self.lm_head.weight[:self.vocab].nbytes
        for layer, attend, ffn in zip(self.model.layers, path.attends, path.ffns):
            total += size(layer.input_layernorm) + size(layer.self_attn) if attend else 0
            total += size(layer.post_attention_layernorm) + size(layer.mlp) if ffn else 0
        return total


class KVCache:
    """Keys and values of all layers, and for every position the token id and the path that wrote it.

    A position is trusted only if both are right; nothing else is tracked: no rollback to get wrong.
    Positions past the recorded ones are scratch.
    """

    def __init__(self, config, capacity, like, rows=1):
        shape = rows, config.num_key_value_heads, capacity, config.head_dim             # [B, G, S, D]
        L = config.num_hidden_layers
        self.stores = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(L)]
        self.ids, self.writers, self.length = [], [], 0     # length: positions in use, recorded or not
        self.block, self.means, self.averaged = 0, None, 0  # averaged: positions whose means are right

    def trusted(self, line, path):
        """How many leading positions of the token ids in `line` this path need not read again."""
        n = min(len(self.ids), len(line))
        if self.ids[:n] != line[:n]:
            n = next(i for i in range(n) if self.ids[i] != line[i])
        if self.writers[:n] == ['full'] * n:
            return n
        return next((i for i in range(n) if not path.trusts(self.writers[i])), n)

    def record(self, line, start, path):
        """Positions start.. hold `line`, written by this path; what stood behind is forgotten."""
        self.ids[start:] = line[start:]
        self.writers[start:] = [path.writes] * (len(line) - start)
        self.length, self.averaged = len(line), min(self.averaged, start)

    def average(self, block, n):
        """[L] mean keys [B, G, S / block, D] of the cache's blocks, right for the first n / block."""
        if block != self.block:
            self.block, self.averaged = block, 0
            self.means = [k.new_zeros(*k.shape[:2], k.shape[2] // block, k.shape[3]) for k, _ in self.stores]
        a, b = self.averaged // block, n // block
        for (keys, _), means in zip(self.stores if a < b else (), self.means):
            means[:, :, a:b] = keys[:, :, a * block:b * block].unflatten(2, (b - a, block)).mean(3)
        self.averaged = n
        return self.means

    def fork(self, config, rows, extra):
        """`rows` equal rows with room for `extra` more positions; only the positions in use are copied."""
        n, twin = self.length, KVCache(config, self.length + extra, self.stores[0][0], rows)
        for mine, theirs in zip(self.stores, twin.stores):
            for a, b in zip(mine, theirs):
                b[:, :, :n] = a[:, :, :n]
        twin.ids, twin.writers, twin.length = self.ids[:n], self.writers[:n], n
        return twin


class Reader:
    """A network and its cache: it feeds what the cache does not hold yet and logs every pass."""

    def __init__(self, model, capacity, compiled=False):
        """capacity: the longest text in tokens, prompt included; compiled: short passes by inductor."""
        if capacity + PAD > model.cos.shape[0]:
            model.set_context(capacity + PAD)
        self.model, self.capacity = model, capacity + PAD
        self.cache = KVCache(model.config, self.capacity, model.lm_head.weight)
        self.log = []                                   # (path name, positions, begin, end) of each pass
        self.paths = {}                                 # path name -> Path, of every path read on so far
        self.compiled = compile_forward(model) if compiled else None

    def read(self, tokens, draft, path, last):
        """Logits [last, V] of the last positions of tokens + draft (lists of ids), read on this path.

        Feeds from the first position that the path does not trust, and at least `last` positions.
        """
        line = tokens + draft
        assert len(line) <= self.capacity, f'{len(line)} tokens in a cache for {self.capacity}'
        start = min(self.cache.trusted(line, path), len(line) - last)
        self.cache.record(line[:start], start, path)        # an interrupted pass leaves nothing trusted
        ids, logits = torch.tensor([line[start:]], device=self.model.cos.device), []
        for begin in range(start, len(line), CHUNK):
            end = min(begin + CHUNK, len(line))
            wanted = min(end - begin, max(0, last - (len(line) - end)))
            logits.append(self.feed(ids[:, begin - start:end - start], begin, path, wanted))
        self.cache.record(line, start, path)
        return torch.cat(logits, 1)[0] if last else None

    def append(self, ids, path):
        """Logits [B, V] after one more token a row; ids [B]. The caller records them later: no sync."""
        logits = self.feed(ids[:, None], self.cache.length, path, 1)
        self.cache.length += 1
        return logits[:, 0]

    @torch.inference_mode()
    def feed(self, ids, start, path, last):
        """One pass over ids [B, T] at positions start.. -> logits [B, last, V]; counted and timed."""
        T, span, forward, pad = ids.shape[1], start + ids.shape[1], self.model, 0
        if self.compiled and T <= PAD and path.carry is None:    # what is observed differs every time
            pad, span, forward = (1 << (T - 1).bit_length()) - T, self.capacity, self.compiled
        begin = self.now()
        positions = torch.arange(start, start + T + pad, device=ids.device)
        at = lambda n: torch.tensor(n, device=ids.device)
        carry = path.carry if path.block is None else dict(
            start=at(start), real=at(T), means=path.block and self.cache.average(path.block, start))
        x = forward(F.pad(ids, (0, pad)) if pad else ids, positions, path, self.cache.stores, span, carry)
        logits = self.model.logits(x[:, T - last:T])
        self.log.append((path.name, T * len(ids), begin, self.now()))
        self.paths[path.name] = path
        return logits

    def fork(self, rows, extra):
        """A reader of the same network and log over `rows` copies of this cache, `extra` positions longer."""
        twin = copy.copy(self)
        twin.cache, twin.compiled = self.cache.fork(self.model.config, rows, extra), None
        twin.capacity = twin.cache.stores[0][0].shape[2]
        return twin

    def now(self):
        """A moment: seconds on a CPU, an event on CUDA (where a pass has not ended when its call returns)."""
        if self.model.cos.device.type != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self):
        """{path name: [passes, positions, seconds]} since the last call; on CUDA it waits for their end."""
        spent = {}
        for name, positions, begin, end in self.log:
            if not isinstance(end, float):
                end.synchronize()
                begin, end = 0.0, begin.elapsed_time(end) / 1000
            row = spent.setdefault(name, [0, 0, 0.0])
            row[:] = row[0] + 1, row[1] + positions, row[2] + end - begin
        self.log.clear()
        return spent


def compile_forward(model):
    """The network's forward through torch.compile, one graph for each padded length and path."""
    cpu = model.cos.device.type == 'cpu'
    expect(not cpu or shutil.which(os.environ.get('CXX', 'g++')), '--compile needs g++, or what CXX names')
    torch._dynamo.config.recompile_limit = 64           # graphs of all lengths, paths and models together
    for mixture in [part for part in model.modules() if isinstance(part, MoE)]:
        mixture.stack()
    options = dict(cpp_wrapper=cpu)                     # without it a quarter of a pass is Python
    return torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)


def load(folder, device='cpu', dtype=torch.float32):
    """(Transformer, Tokenizer, end-of-sequence ids) of a Hugging Face folder with safetensors weights.

    The network is laid out on the meta device, then each tensor goes from the memory-mapped file to
    the device in the wanted dtype, one after the other. ValueError in one line for whatever does not fit.
    """
    folder = File(folder)
    config, tokenizer = read_config(folder), read_tokenizer(folder)
    with torch.device('meta'):
        model = Transformer(config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    weights = {name: nn.Parameter(tensor, requires_grad=False) for file in weight_files(folder)
               for name, tensor in read_weights(file, wanted, device, dtype)}
    absent = wanted.keys() - weights.keys()
    expect(not absent, f'{folder}: {min(absent, default=0)} is missing, {len(absent)} in all: fetch it again')
    weights.setdefault('lm_head.weight', weights['model.embed_tokens.weight'])      # where it is tied
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval().set_context(min(2048, config.max_position_embeddings))
    model.words = {i: text for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    model.vocab = max(model.words) + 1
    expect(model.vocab <= config.vocab_size,
           f'{folder}: tokenizer of {model.vocab} entries, embedding of {config.vocab_size}')
    return model, tokenizer, read_eos(folder)


def same_vocabulary(target, other, whose):
    """ValueError naming the first token (lowest id) that two loaded networks do not share by text and id."""
    a, b = target.words, other.words
    differ = next((i for i in sorted(a.keys() | b.keys()) if a.get(i) != b.get(i)), None)
    expect(differ is None, f'{whose}: token {differ} is {b.get(differ)!r} there and {a.get(differ)!r} in the '
           'target; they must share their vocabulary')


def weight_files(folder):
    """The safetensors files of a folder: the shards that the index names, or the single file."""
    index, names = folder / 'model.safetensors.index.json', {'model.safetensors'}
    if index.exists():
        shards = read_json(index).get('weight_map')
        good = isinstance(shards, dict) and {*map(type, shards.values())} == {str}
        expect(good, f'{index}: weight_map is not an object of tensor names and files')
        names = set(shards.values())
    pickles = [file.name for end in ('bin', 'pt', 'pth') for file in folder.glob(f'*.{end}')]
    hint = f'{pickles[0]} is a pickle, which can run code when opened; convert it' if pickles else (
        'fetch model.safetensors, or all the shards that model.safetensors.index.json names')
    files = [folder / name for name in sorted(names)]
    for file in files:
        expect(file.exists(), f'{file}: no such file; {hint}')
    return files


def read_weights(file, wanted, device, dtype):
    """Yields (name, tensor) of one file, on the device; checks names, shapes, finiteness."""
    try:
        with safe_open(file, 'pt') as opened:
            names = list(opened.keys())
        for name in names:
            if name.endswith('rotary_emb.inv_freq') or name == 'lm_head.weight' and name not in wanted:
                continue                                # a table we compute; a copy of the tied embedding
            expect(name in wanted, f'{file}: tensor {name} has no place in the network of config.json')
            with safe_open(file, 'pt') as opened:     # opened anew: pages already copied are let go
                shape = tuple(opened.get_slice(name).get_shape())
                expect(shape == wanted[name], f'{file}: {name} has shape {shape}, expected {wanted[name]}')
                tensor = opened.get_tensor(name).to(device, dtype, copy=True)
            good = all(x.isfinite() for x in tensor.aminmax())
            expect(good, f'{file}: tensor {name} holds NaN or infinity in {dtype}; damaged?')
            yield name, tensor
    except (SafetensorError, OSError) as error:
        raise ValueError(f'{file}: not a complete safetensors file ({error}); fetch it again') from None


def read_tokenizer(folder):
    path = folder / 'tokenizer.json'
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:                          # the library raises bare Exception
        raise ValueError(f'{path}: no such file, or not a tokenizer ({error})') from None
    tokenizer.no_truncation()                           # a file may carry both; neither is asked for here
    tokenizer.no_padding()
    return tokenizer


def read_eos(folder):
    """The end-of-sequence ids, of config.json and of generation_config.json together."""
    files = [folder / name for name in ('config.json', 'generation_config.json')]
    given = [read_json(file).get('eos_token_id') for file in files if file.exists()]
    found = [i for ids in given for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    good = all(isinstance(i, int) for i in found)
    expect(good, f'{folder}: eos_token_id is {found!r}, expected a token id or a list of them')
    return frozenset(found)
