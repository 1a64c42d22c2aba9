"""The network: a checkpoint's Config, the Transformer, the Path of a pass, the KVCache, the Reader, load.

Not here: sampling and verification (verify.py), the arithmetic of a layer (kernels.py).

B rows, T new tokens, S cache capacity, L layers, H query heads, G key/value heads, D head size, C width,
F feed-forward width, E experts, V vocabulary.
"""
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path as File

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import distributed, nn
from torch.nn import functional

import kernels

CHUNK = 2048    # positions of a long prompt fed in one pass, so that the mask stays small
PAD = 16        # compiled passes of up to this many positions are padded to a power of two: few graphs
SPAN = 1024     # keys in view of a compiled pass, at least; beyond, the next power of two
ROWS = 4        # of a product with a packed matrix, at least: fewer are padded, since 3 took longer than 4
KINDS = 'llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'
NEEDED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
          'max_position_embeddings')
MIXTURE = 'num_experts', 'num_experts_per_tok', 'moe_intermediate_size'     # what qwen3_moe needs as well
EXTRA = dict(   # names read beside those of Config's fields
    num_experts=int, decoder_sparse_step=int, sliding_window=int, rope_theta=float, attention_bias=bool,
    use_sliding_window=bool, layer_types=list, mlp_only_layers=list)
EXPECTED = {int: 'an integer, 1 to 1e10', float: 'above 0, to 1e10', bool: 'true or false', list: 'a list'}
ORIGINAL = 'original_max_position_embeddings'
ROPE_NEEDS = dict(      # rope type: the settings that it cannot do without
    default=(), linear=('factor',), yarn=('factor', ORIGINAL),
    llama3=('factor', 'low_freq_factor', 'high_freq_factor', ORIGINAL))
ROPE_OPTIONS = 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim'     # yarn's, each absent where it is 0
ROPE_LEAST = {'rope_theta': 1.001, ORIGINAL: 2, 'factor': 1}   # of the others 0.001
MOST_JSON = 2 ** 28         # bytes of a file of JSON
MANY = 10_000   # layers, or experts of a layer: a config of more is no model
FOREIGN_SECONDS = 10        # that foreign code has: a chat template to render, a tokenizer to encode;
FOREIGN_BYTES = 2 ** 28     # the memory that it may add
PACE = 20_000       # characters of a text for which it has another second,
HELD = 2000         # and bytes for each of them
STORED = dict(F32='fp32', F16='fp16', BF16='bf16', F64='fp64')      # dtypes of weights that are read


def expect(holds, message):
    """ValueError with this message, one line, unless it holds."""
    if not holds:
        raise ValueError(message)


# ------------------------------------------------------------------------------------- files of a folder
# A checkpoint is foreign: nothing outside of its folder is opened, and nothing in it that never ends.

def plain_file(folder, name, most=math.inf):
    """The path of a file of a checkpoint's folder, which need not be there; ValueError for another.

    That is a name that leads elsewhere, a link out of the folder or to nothing, a directory, pipe or device,
    or a file of more bytes than `most`. A snapshot of Hugging Face's cache links to the `blobs` beside the
    snapshots: these are its own.
    """
    folder = File(folder)
    good = type(name) is str and name == File(name).name
    expect(good, f'{folder}: {name!r} is not the name of a file in that folder')
    where = folder / name
    if not os.path.lexists(where):
        return where
    home = folder.resolve()
    homes = [home]
    if home.parent.name == 'snapshots':
        homes.append((home.parent.parent / 'blobs').resolve())
    try:
        found = where.resolve()
    except (OSError, RuntimeError) as error:            # a link to itself
        raise ValueError(f'{where}: cannot be followed ({error})') from None
    own = any(found.is_relative_to(place) for place in homes)
    expect(own, f'{where}: links to {found}, outside of its folder; copy the file there')
    expect(found.exists(), f'{where}: links to {found}, which is not there; fetch it again')
    expect(found.is_file(), f'{where}: a directory, a pipe or a device; expected a file')
    size = found.stat().st_size
    expect(size <= most, f'{where}: {size} bytes, expected {most} at most; damaged?')
    return where


@contextlib.contextmanager
def whole(where):
    """A path to write a file (or folder) to, which then becomes `where`: whole or not at all.

    It lies in a new folder beside it, so no link that a checkpoint brought is followed, and of two writers
    the later one wins. A kill leaves that folder behind.
    """
    where = File(where)
    with tempfile.TemporaryDirectory(prefix='.unfinished-', dir=where.parent) as folder:
        growing = File(folder) / where.name
        yield growing
        os.replace(growing, where)


@contextlib.contextmanager
def alone(folder):
    """Lets in one process at a time, where the file system has locks for folders; others wait."""
    place = os.open(folder, os.O_RDONLY)
    try:
        lock(place)
        yield
    finally:
        os.close(place)                                 # which unlocks it, as does a kill


def lock(file, wait=True):
    """Whether an open file (or its descriptor) is ours until it is closed; wait: until it is.

    Where the system, or the file system, has no locks it is taken to be ours.
    """
    try:
        import fcntl                                    # here: Windows has none
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def read_json(path):
    """The object in a JSON file of a checkpoint's folder; ValueError in one line if there is none."""
    path = plain_file(File(path).parent, File(path).name, MOST_JSON)
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise ValueError(f'{path}: no such file; expected a Hugging Face folder with config.json') from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f'{path}: cannot be read as JSON ({error})') from None
    expect(isinstance(found, dict), f'{path}: holds a {type(found).__name__}, expected a JSON object')
    return found


def limited(function, length=0):
    """(what it returns, why not) of a function that runs foreign code on a text of so many characters.

    It is called in a fork of this process that has some time and memory: neither a signal nor an exception
    ends what is compiled (the tokenizers library is Rust). Where a system cannot fork, or a process may not
    (a worker of a Pool), it is called here, without limits.
    """
    if 'fork' not in multiprocessing.get_all_start_methods() or multiprocessing.current_process().daemon:
        return tried(function)
    fork = multiprocessing.get_context('fork')
    receiver, sender = fork.Pipe(duplex=False)

    def bounded():
        limit_memory(FOREIGN_BYTES + HELD * length)
        return function()

    def work():
        signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C ends the process that waits, and so this one
        with hushed():
            sender.send(tried(bounded))
    process = fork.Process(target=work, daemon=True)
    seconds = FOREIGN_SECONDS + length / PACE
    found = None, f'no end after {seconds:.1f} s'
    process.start()
    try:
        sender.close()                                  # so that its death is seen here
        if receiver.poll(seconds):
            found = receiver.recv()
    except (EOFError, OSError):
        found = None, 'its process died: too much memory?'
    finally:
        process.kill()
        process.join()
    return found


def tried(function):
    """(what it returns, '') or (None, what it raised): foreign code may raise anything."""
    try:
        return function(), ''
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f'{type(error).__name__}: {error}'


@contextlib.contextmanager
def hushed():
    """Nothing is written to stderr meanwhile: Rust tells there of a panic, which is an exception as well."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(2)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def limit_memory(more):
    """Lets this process take so many bytes more than it has, where the system can tell how much that is."""
    sizes = File('/proc/self/statm')
    if sizes.exists():
        import resource
        pages = int(sizes.read_text().split()[0])
        most = pages * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


# ------------------------------------------------------------------------------------------- config.json

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
    refuse_types(raw, where)
    refuse_window(raw, where)
    refuse_shapes(raw, where)
    kind = raw['model_type']
    heads = raw['num_attention_heads']
    settings = dict(num_key_value_heads=heads, head_dim=raw['hidden_size'] // heads)    # where not given
    for option in fields(Config):
        if raw.get(option.name) is not None:
            settings[option.name] = raw[option.name]
    bias = bool(raw.get('attention_bias')) and kind not in ('mistral', 'qwen2')
    settings.update(
        rope=read_rope(raw, where), qkv_bias=bias or kind == 'qwen2', o_bias=bias,
        mlp_bias=bool(raw.get('mlp_bias')) and kind == 'llama', qk_norm=kind.startswith('qwen3'),
        experts=read_experts(raw) if kind == 'qwen3_moe' else ())
    return Config(**settings)


def read_experts(raw):
    """For each layer of a mixture its number of experts, 0 where the feed-forward is dense."""
    dense = raw.get('mlp_only_layers') or []
    every = raw.get('decoder_sparse_step') or 1
    experts = []
    for i in range(raw['num_hidden_layers']):
        mixed = i not in dense and (i + 1) % every == 0
        experts.append(raw['num_experts'] if mixed else 0)
    return tuple(experts)


def refuse_types(raw, where):
    """ValueError for a model type that is not here and for the first value of a wrong type or size."""
    kind = raw.get('model_type')
    expect(kind in KINDS, f'{where}: model_type {kind!r} is not one of {", ".join(KINDS)}')
    types = {option.name: option.type for option in fields(Config) if option.type in EXPECTED}
    types.update(EXTRA)
    needed = NEEDED + MIXTURE if kind == 'qwen3_moe' else NEEDED
    for name, wanted in types.items():
        value = raw.get(name)
        if value is None:
            good = name not in needed
        elif wanted in (bool, list):
            good = type(value) is wanted
        else:
            good = type(value) in (int, wanted) and 0 < value <= 1e10
        expect(good, f'{where}: {name} is {value!r}, expected {EXPECTED[wanted]}')
    for name in ('num_hidden_layers', 'num_experts'):
        count = raw.get(name) or 1
        expect(count <= MANY, f'{where}: {name} is {count}, expected {MANY} at most')


def refuse_window(raw, where):
    """ValueError where attention would be over a sliding window: this network would silently see more."""
    kind = raw['model_type']
    if kind == 'mistral':
        window = raw.get('sliding_window', 4096)        # on unless it is switched off
    else:
        used = kind != 'llama' and raw.get('use_sliding_window')
        window = raw.get('sliding_window') if used else None
    short = window and window < raw['max_position_embeddings']
    sliding = 'sliding_attention' in (raw.get('layer_types') or [])
    expect(not short and not sliding,
           f'{where}: a sliding window of {raw.get("sliding_window", window)} is switched on; '
           'only full attention is here')


def refuse_shapes(raw, where):
    """ValueError for what this network would silently leave out, and for sizes that do not fit together."""
    heads = raw['num_attention_heads']
    groups = raw.get('num_key_value_heads') or 1
    size = raw.get('head_dim') or raw['hidden_size'] // heads
    act = raw.get('hidden_act', 'silu')
    expect(act == 'silu', f'{where}: hidden_act {act!r} is not supported, only silu')
    expect(not raw.get('quantization_config'),
           f'{where}: quantised (quantization_config); use plain weights')
    expect(heads % groups == 0, f'{where}: {heads} query heads cannot share {groups} key heads')
    expect(size > 0 and size % 2 == 0,
           f'{where}: head_dim is {size}; positions turn its channels in pairs')
    if raw['model_type'] == 'qwen3_moe':
        chosen = raw['num_experts_per_tok']
        expect(chosen <= raw['num_experts'],
               f'{where}: num_experts_per_tok is {chosen}, of {raw["num_experts"]} experts')


def read_rope(raw, where):
    """The rotary settings, under transformers 5's names, defaults filled in."""
    given = raw.get('rope_scaling') or raw.get('rope_parameters') or {}      # as transformers looks
    flat = isinstance(given, dict) and not any(isinstance(value, dict) for value in given.values())
    expect(flat, f'{where}: rotary settings {given!r}: expected one flat object for all layers')
    kind = given.get('rope_type', given.get('type', 'default'))
    known = type(kind) is str and kind in ROPE_NEEDS
    expect(known, f'{where}: rope type {kind!r} is not one of {", ".join(ROPE_NEEDS)}')
    part = given.get('partial_rotary_factor', raw.get('partial_rotary_factor') or 1.0)
    expect(part == 1.0, f'{where}: partial_rotary_factor is not supported; every channel is rotated here')
    rope = dict(rope_theta=raw.get('rope_theta') or 10000.0)
    rope[ORIGINAL] = raw['max_position_embeddings']
    rope.update(given, rope_type=kind)
    if raw.get(ORIGINAL) is not None:
        rope[ORIGINAL] = raw[ORIGINAL]                  # beside them, it goes before theirs
    needed = ['rope_theta', *ROPE_NEEDS[kind]]
    if kind == 'yarn':
        needed += [name for name in ROPE_OPTIONS if rope.get(name)]
        if rope.get('attention_factor') is not None:    # 0 is not absent
            needed.append('attention_factor')
        truncate = rope.get('truncate', True)
        expect(type(truncate) is bool, f'{where}: truncate is {truncate!r}, expected {EXPECTED[bool]}')
    for name in needed:
        least = ROPE_LEAST.get(name, 0.001)
        good = type(rope.get(name)) in (int, float) and least <= rope[name] <= 1e10
        expect(good, f'{where}: rope type {kind} needs {name} from {least} to 1e10, found {rope.get(name)!r}')
    refuse_order(rope, where)
    return rope


def refuse_order(rope, where):
    """ValueError for rotary settings whose fast end is the slow one; in yarn the two may be one."""
    ends = dict(llama3=('low_freq_factor', 'high_freq_factor'), yarn=('beta_slow', 'beta_fast'))
    usual = dict(beta_slow=1, beta_fast=32)
    if rope['rope_type'] in ends:
        slow, fast = ends[rope['rope_type']]
        low = rope.get(slow) or usual[slow]
        high = rope.get(fast) or usual[fast]
        good = low < high or low == high and rope['rope_type'] == 'yarn'
        expect(good, f'{where}: {slow} is {low!r} and {fast} {high!r}; the second must be larger')


# ------------------------------------------------------------------------------------------- the network

class Part(nn.Module):
    """nn.Module without hooks, its submodules plain attributes: calls are half of a small network's time."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value                 # found at once, not by nn.Module's search

    def __call__(self, *args):
        return self.forward(*args)


class Linear(nn.Linear):
    """A matrix product, x [..., in] -> [..., out]."""

    def __call__(self, x):
        return product(x, self._parameters['weight'], self._parameters['bias'])

    def pack(self):
        """Lays the weight out anew, as oneDNN reads it fastest; numbers stay, single rows can't be had."""
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def unpack(self):
        """The weight as it was, if it is packed: its rows can be read again, for good."""
        if self.weight.is_mkldnn:
            self.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)


def product(x, weight, bias):
    """x [..., in] -> [..., out]; for one position of a compiled pass a sum that inductor fuses with more."""
    if weight.is_mkldnn:
        return packed_product(x, weight, bias)
    if torch.compiler.is_compiling() and x.numel() == x.shape[-1]:
        y = (x[..., None, :] * weight).sum(-1)
        return y if bias is None else y + bias
    return functional.linear(x, weight, bias)


def packed_product(x, weight, bias):
    """`product` with a packed weight."""
    rows = x.flatten(0, -2)                                                 # [n, in]
    n = len(rows)
    if n < ROWS:
        rows = functional.pad(rows, (0, 0, 0, ROWS - n))
    y = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, 'none', [], '')
    return y[:n].view(*x.shape[:-1], -1)


class Joint:
    """Linear layers that read the same x, their outputs side by side: once joined, by one product.

    Their own weights become views of the joint one, so nothing is held twice, and names and checkpoints stay.
    """

    def __init__(self, *parts):
        self.parts = parts
        self.weight = None
        self.bias = None

    def __call__(self, x):
        if self.weight is None:                         # in training, or packed
            return torch.cat([part(x) for part in self.parts], -1)
        return product(x, self.weight, self.bias)

    def join(self):
        if self.weight is not None:
            return
        self.weight = joined([part.weight for part in self.parts])
        if self.parts[0].bias is not None:
            self.bias = joined([part.bias for part in self.parts])

    def pack(self):
        self.weight = None
        for part in self.parts:
            part.pack()


def joined(weights):
    """One tensor of the rows of all these weights, which become its views."""
    whole = torch.cat(weights)
    begin = 0
    for weight in weights:
        end = begin + len(weight)
        weight.data = whole[begin:end]
        begin = end
    return whole


class RMSNorm(nn.RMSNorm):
    def __call__(self, x):
        return torch.rms_norm(x, self.normalized_shape, self._parameters['weight'], self.eps)


class Attention(Part):
    def __init__(self, config):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.sizes = H, G, D
        self.q_proj = Linear(C, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, G * D, bias=config.qkv_bias)
        self.v_proj = Linear(C, G * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, C, bias=config.o_bias)
        self.qkv = Joint(self.q_proj, self.k_proj, self.v_proj)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm = RMSNorm(D, config.rms_norm_eps)
            self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(self, x, attend, view, store, carry):
        """x [B, T, C] -> ([B, T, C], carry). store: this layer's (keys, values) in the cache, or None."""
        B, T, _ = x.shape
        H, G, D = self.sizes
        heads = self.qkv(x).view(B, T, H + 2 * G, D).transpose(1, 2)        # [B, H + 2 G, T, D]
        qk = heads[:, :H + G]
        v = heads[:, H + G:]                                                # [B, G, T, D]
        if self.normed:
            qk = torch.cat([self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])], 1)
        qk = kernels.rotate(qk, view.cos, view.sin)
        q = qk[:, :H]                                                       # [B, H, T, D]
        k = qk[:, H:]                                                       # [B, G, T, D]
        if store is not None:
            keys, values = store
            k = keys.index_copy_(2, view.positions, k)[:, :, :view.span]    # [B, G, span, D]
            v = values.index_copy_(2, view.positions, v)[:, :, :view.span]
        out, carry = attend(q, k, v, view.mask, carry)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1)), carry


class MLP(Part):
    def __init__(self, C, F, bias=False):
        super().__init__()
        self.gate_proj = Linear(C, F, bias=bias)
        self.up_proj = Linear(C, F, bias=bias)
        self.down_proj = Linear(F, C, bias=bias)
        self.gate_up = Joint(self.gate_proj, self.up_proj)

    def join(self):
        self.gate_up.join()


class MoE(Part):
    def __init__(self, config, E):
        super().__init__()
        C, F = config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.gate = Linear(C, E, bias=False)
        self.experts = nn.ModuleList(MLP(C, F) for _ in range(E))
        self.stacks = None

    def join(self):
        """Puts the matrices of all experts into two tensors: gate and up [E, 2F, C], down [E, C, F].

        The experts' own weights become their views: nothing is held twice, names and checkpoints stay.
        """
        if self.stacks:
            return
        gate_ups = []
        downs = []
        for expert in self.experts:
            expert.join()
            gate_ups.append(expert.gate_up.weight)
            downs.append(expert.down_proj.weight)
        self.stacks = torch.stack(gate_ups), torch.stack(downs)
        for expert, gate_up, down in zip(self.experts, *self.stacks):
            F = len(expert.gate_proj.weight)
            expert.gate_up.weight = gate_up
            expert.gate_proj.weight.data = gate_up[:F]
            expert.up_proj.weight.data = gate_up[F:]
            expert.down_proj.weight.data = down


class Block(Part):
    parted = False          # whether each rank has a part of it, see part_of

    def __init__(self, config, E):
        super().__init__()
        C, F = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.mlp = MoE(config, E) if E else MLP(C, F, config.mlp_bias)

    def forward(self, x, attend, ffn, view, store, carry):
        """x [B, T, C] -> ([B, T, C], carry). A sublayer whose function is None is passed by."""
        if attend is not None:
            y, carry = self.self_attn(self.input_layernorm(x), attend, view, store, carry)
            x = x + self.whole(y)
        if ffn is not None:
            y, carry = ffn(self.post_attention_layernorm(x), self.mlp, carry)
            x = x + self.whole(y)
        return x, carry

    def whole(self, y):
        """A sublayer's output: the sum over the ranks, where each has computed a part of it."""
        if self.parted:
            distributed.all_reduce(y)
        return y


# ------------------------------------------------------------------------------------- how a pass is computed

def writer(sparse, skip):
    """The name under which the cache remembers who wrote a position: what was left out, and nothing else."""
    name = 'sparse' if sparse else 'full'
    return f'{name} without {sorted(skip)}' if skip else name


@dataclass(frozen=True)
class Path:
    """How one pass is computed: each layer's attend and ffn function, None where that sublayer is skipped.

    A path that runs every sublayer densely writes as 'full', whatever else it observes on the way.
    """
    name: str
    attends: tuple      # [L]
    ffns: tuple         # [L]
    skip: frozenset = frozenset()   # sublayers left out: 2i is layer i's attention, 2i + 1 its feed-forward
    sparse: bool = False            # whether a sublayer that runs leaves something out
    informed: bool = False          # whether its layers are told where the pass begins and what is padding
    block: int = 0                  # keys to a block mean, for an informed path whose layers ask for means
    carry: object = None            # what the first layer is handed; a path that observes puts it in here

    @functools.cached_property
    def writes(self):
        """The name under which the cache remembers what this path wrote."""
        return writer(self.sparse, self.skip)

    @functools.cached_property
    def trusts(self):
        """The writers on whose keys this path may build: the full path, itself, and itself unskipped."""
        return frozenset(['full', self.writes, writer(self.sparse, ())])

    def without(self, skip, name='slim'):
        """This path without the sublayers in skip: 2i is layer i's attention, 2i + 1 its feed-forward."""
        skip = self.skip.union(skip)
        attends = tuple(None if 2 * i in skip else f for i, f in enumerate(self.attends))
        ffns = tuple(None if 2 * i + 1 in skip else f for i, f in enumerate(self.ffns))
        return replace(self, name=name, attends=attends, ffns=ffns, skip=skip, carry=None)

    @functools.cache
    def thinned(self, attend, heads, channels, experts):
        """This path made sparse; it stays dense where nothing is said, and skipped where it skips.

        attend: the sparse attention. heads, channels, experts [L]: what it, sparse_swiglu and sparse_mix are
        told as `how` in each layer, None to keep the dense form. Cached, so that a compiled pass finds its
        graph again.
        """
        attends = list(self.attends)
        ffns = list(self.ffns)
        for i, how in enumerate(heads):
            if attends[i] and how:
                attends[i] = functools.partial(attend, how=how)
            if ffns[i] is kernels.swiglu and channels[i]:
                ffns[i] = functools.partial(kernels.sparse_swiglu, how=channels[i])
            if ffns[i] is kernels.mix and experts[i]:
                ffns[i] = functools.partial(kernels.sparse_mix, how=experts[i])
        if attends == list(self.attends) and ffns == list(self.ffns):
            return self
        block = 0
        for how in heads:
            if how:
                _, _, rule = how
                block = rule.block                      # one for all layers
        name = 'sparse' if self.name == 'full' else f'sparse {self.name}'
        return replace(self, name=name, attends=tuple(attends), ffns=tuple(ffns), sparse=True, informed=True,
                       block=block)

    def grounded(self, where, n, **carry):
        """This path, observed by kernels.grounded in n of the layers that it runs (in all if fewer), once.

        where: the first, the middle, the last n, or all.
        """
        run = [i for i, attend in enumerate(self.attends) if attend]
        n = len(run) if where == 'all' else min(n, len(run))
        begins = dict(first=0, middle=(len(run) - n) // 2, last=len(run) - n, all=0)
        seen = run[begins[where]:][:n]
        attends = tuple(kernels.grounded if i in seen else f for i, f in enumerate(self.attends))
        seen_here = dict(shades=None, **carry)
        return replace(self, name='grounded', attends=attends, informed=False, carry=seen_here)


@dataclass(frozen=True)
class View:
    """What every layer of one pass shares: where its tokens stand and what they may see."""
    positions: torch.Tensor     # [T] absolute
    cos: torch.Tensor           # [T, D]
    sin: torch.Tensor           # [T, D]
    mask: torch.Tensor | None   # as kernels.attend takes it; made once a pass
    span: int                   # keys in view


class Transformer(Part):
    """A Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE network; parameter names are the checkpoint's."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vocab = config.vocab_size      # V; load lowers it to the tokenizer's length
        self.words = {}                     # id -> text, of the tokenizer: see load
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Block(config, E) for E in config.mixtures),
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        attends = (kernels.attend,) * config.num_hidden_layers
        ffns = tuple(kernels.mix if E else kernels.swiglu for E in config.mixtures)
        mixed = any(config.mixtures)        # a compiled mixture is told what is padding
        self.full = Path('full', attends, ffns, informed=mixed)         # every sublayer, densely
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
        if stores is None:
            span = ids.shape[1]
        view = View(positions, self.cos[positions], self.sin[positions], self.mask(positions, span), span)
        x = self.model.embed_tokens(ids)                                                # [B, T, C]
        for i, layer in enumerate(self.model.layers):
            store = None if stores is None else stores[i]
            x, carry = layer(x, path.attends[i], path.ffns[i], view, store, carry)
        return self.model.norm(x)

    def mask(self, positions, span):
        """[T, span], 0 where a query may look and -inf elsewhere; None where kernels.attend needs none.

        A compiled pass has more keys in view than are written, an eager one exactly those that it may see.
        """
        T = len(positions)
        if torch.compiler.is_compiling():
            later = torch.arange(span, device=positions.device) > positions[:, None]        # [T, span]
            return torch.zeros_like(later, dtype=self.cos.dtype).masked_fill(later, -torch.inf)
        flash = self.cos.is_cuda and self.cos.dtype != torch.float32
        if T == 1 or T == span or flash:
            return None
        return kernels.causal_mask(T, span, self.cos)

    def logits(self, hidden):
        """hidden [B, T, C] -> logits [B, T, V], cut to the tokenizer's length (checkpoints pad the head)."""
        return kernels.head(hidden, self.lm_head.weight, self.vocab)

    def join(self):
        """Makes one matrix of those that read the same: fewer, larger products. The dtype must be final."""
        for layer in self.model.layers:
            layer.self_attn.qkv.join()
            layer.mlp.join()

    def pack(self):
        """Packs the big matrices of a joined network, but for experts and the head, where oneDNN is there.

        For a CPU and fp32: five positions of a 135M shape then cost 1.2 times one, else 1.6.
        """
        if not torch.backends.mkldnn.is_available():
            return
        for layer in self.model.layers:
            attention = layer.self_attn
            parts = [attention.qkv, attention.o_proj]
            if isinstance(layer.mlp, MLP):
                parts += [layer.mlp.gate_up, layer.mlp.down_proj]
            for part in parts:
                plain = part.weight is not None and not part.weight.is_mkldnn
                if plain and part.weight.numel() >= kernels.BIG:
                    part.pack()

    def unpack(self):
        """Undoes pack; what is not joined is joined."""
        for part in self.modules():
            if isinstance(part, Linear):
                part.unpack()
        self.join()

    def read_bytes(self, path):
        """Weight bytes that a pass on this path streams: the kept sublayers, the last norm and the head.

        A mixture is counted whole; how many of its experts a pass really reads depends on the tokens.
        """
        total = parameter_bytes(self.model.norm) + self.lm_head.weight[:self.vocab].nbytes
        for layer, attend, ffn in zip(self.model.layers, path.attends, path.ffns):
            if attend:
                total += parameter_bytes(layer.input_layernorm) + parameter_bytes(layer.self_attn)
            if ffn:
                total += parameter_bytes(layer.post_attention_layernorm) + parameter_bytes(layer.mlp)
        return total


def parameter_bytes(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


# ------------------------------------------------------------------------------------- host and device
# A GPU computes while Python prepares what comes next, until Python asks it for a number and waits. Methods
# ask by `fetch`: once or twice a cycle, or once a token where what was drawn decides whether to go on.

def remote(x):
    """Whether the host would have to wait for the numbers of this tensor."""
    return x.device.type != 'cpu'


def send(ids, device):
    """A tensor of ids, a list or a list of lists, on the device; the host need not wait for the copy.

    torch.tensor(ids, device=...) makes it wait, and so does a list as an index of a tensor there.
    """
    return torch.tensor(ids, dtype=torch.long).to(device, non_blocking=True)


def fetch(*tensors):
    """The same tensors on the CPU, all in one transfer, as doubles: ids, flags and floats survive that."""
    if not remote(tensors[0]):
        return tensors
    flat = torch.cat([x.flatten().double() for x in tensors]).cpu()
    here = []
    for x, numbers in zip(tensors, flat.split([x.numel() for x in tensors])):
        here.append(numbers.view(x.shape).to(x.dtype))
    return here


# -------------------------------------------------------------------------------------- caches and readers

class KVCache:
    """Keys and values of all layers, and for every position the token id and the path that wrote it.

    A position is trusted only if both are right; nothing else is tracked: no rollback to get wrong.
    Positions past the recorded ones are scratch.
    """

    def __init__(self, config, capacity, like, rows=1):
        """like: a tensor of the dtype and device; rows: B."""
        shape = rows, config.num_key_value_heads, capacity, config.head_dim             # [B, G, S, D]
        self.stores = []                        # of each layer (keys, values)
        for _ in range(config.num_hidden_layers):
            self.stores.append((like.new_zeros(shape), like.new_zeros(shape)))
        self.ids = []                           # of each recorded position its token,
        self.writers = []                       # and who wrote it: Path.writes
        self.length = 0                         # positions in use, recorded or not
        self.block = 0                          # keys to a block mean
        self.means = None                       # of each layer the mean keys of the blocks
        self.averaged = 0                       # positions whose means are right

    def trusted(self, line, path):
        """How many leading positions of the token ids in `line` this path need not read again."""
        n = min(len(self.ids), len(line))
        if self.ids[:n] != line[:n]:
            n = next(i for i in range(n) if self.ids[i] != line[i])
        if not path.trusts.issuperset(self.writers[:n]):
            n = next(i for i in range(n) if self.writers[i] not in path.trusts)
        return n

    def record(self, line, start, path):
        """Positions start.. hold `line`, written by this path; what stood behind is forgotten.

        The ids go first and come last: interrupted, it trusts too little, and never a wrong writer.
        """
        del self.ids[start:]
        self.writers[start:] = [path.writes] * (len(line) - start)
        self.length = len(line)
        self.averaged = min(self.averaged, start)
        self.ids += line[start:]

    def average(self, block, n):
        """[L] mean keys [B, G, S / block, D] of the cache's blocks, right for the first n / block."""
        if block != self.block:
            self.block = 0                      # until all is ready: it may be interrupted
            self.averaged = 0
            self.means = []
            for keys, _ in self.stores:
                B, G, S, D = keys.shape
                self.means.append(keys.new_zeros(B, G, S // block, D))
            self.block = block
        first = self.averaged // block
        end = n // block
        if first < end:
            for (keys, _), means in zip(self.stores, self.means):
                new = keys[:, :, first * block:end * block].unflatten(2, (end - first, block))
                means[:, :, first:end] = new.mean(3)                        # [B, G, new blocks, D]
        self.averaged = n
        return self.means

    def copy_of(self, other):
        """Becomes another cache, of one row, in each row; only the positions in use are copied."""
        n = other.length
        for mine, theirs in zip(self.stores, other.stores):
            for store, source in zip(mine, theirs):     # keys, then values
                store[:, :, :n] = source[:, :, :n]
        self.ids = other.ids[:n]
        self.writers = other.writers[:n]
        self.length = n
        self.averaged = 0


class Reader:
    """A network and its cache: it feeds what the cache does not hold yet and logs every pass."""

    def __init__(self, model, capacity, compiled=False):
        """capacity: the longest text in tokens, prompt included; compiled: short passes by inductor."""
        self.model = model
        self.capacity = capacity + PAD
        if self.capacity > model.cos.shape[0]:
            model.set_context(self.capacity)
        self.log = []                                   # (path name, positions, begin, end) of each pass
        self.texts = 0                                  # that it has forgotten, see forget
        self.paths = {}                                 # path name -> Path, of every path read on so far
        self.compiled = compile_forward(model) if compiled else None
        self.cache = self.new_cache(1)
        self.forks = {}                                 # rows -> KVCache, see fork

    def new_cache(self, rows):
        cache = KVCache(self.model.config, self.capacity, self.model.lm_head.weight, rows)
        if self.compiled:
            mark_static(itertools.chain(*cache.stores))
        return cache

    def read(self, text, guesses, path, last):
        """Logits [last, V] of the last positions of text + guesses (lists of ids), read on this path.

        Feeds from the first position that the path does not trust, and at least `last` positions.
        """
        line = text + guesses
        assert len(line) <= self.capacity, f'{len(line)} tokens in a cache for {self.capacity}'
        start = min(self.cache.trusted(line, path), len(line) - last)
        self.cache.record(line[:start], start, path)        # an interrupted pass leaves nothing trusted
        ids = send([line[start:]], self.model.cos.device)
        logits = []
        for begin in range(start, len(line), CHUNK):
            end = min(begin + CHUNK, len(line))
            wanted = max(0, end - max(begin, len(line) - last))         # of this chunk's rows
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
        B, T = ids.shape
        forward = self.model
        span = start + T
        pad = 0
        if self.compiled and T <= PAD and path.carry is None:   # what is observed differs every time
            forward = self.compiled
            pad = (1 << (T - 1).bit_length()) - T
            span = self.span(span + pad)
            ids = functional.pad(ids, (0, pad))         # also by 0: graphs tell such tensors from others
        begin = self.now()
        positions = torch.arange(start, start + T + pad, device=ids.device)
        carry = self.told(start, T, path) if path.informed else path.carry
        hidden = forward(ids, positions, path, self.cache.stores, span, carry)          # [B, T + pad, C]
        logits = self.model.logits(hidden[:, T - last:T])
        self.log.append((path.name, B * T, begin, self.now()))
        self.paths[path.name] = path
        return logits

    def span(self, length):
        """Keys in view of a compiled pass up to this length: few numbers, since each has its own graphs."""
        power = 1 << (length - 1).bit_length()
        return min(self.capacity, max(SPAN, power))

    def told(self, start, T, path):
        """What an informed path's layers are told of a pass over T tokens, in tensors: it may be compiled."""
        device = self.model.cos.device
        means = self.cache.average(path.block, start) if path.block else []
        if self.compiled:
            mark_static(means)
        return dict(start=torch.full((), start, device=device), real=torch.full((), T, device=device),
                    means=means)

    def fork(self, rows):
        """A reader of the same network and log over `rows` copies of this cache.

        There is one for each number of rows, so that compiled passes find their graphs again: the next fork
        of as many rows takes this one's place. Its memory, that of a whole cache a row, stays until the end.
        """
        if rows not in self.forks:
            self.forks[rows] = self.new_cache(rows)
        twin = copy.copy(self)
        twin.cache = self.forks[rows]
        twin.cache.copy_of(self.cache)
        twin.forks = {}
        return twin

    def forget(self):
        """Trusts no position and no pass of an earlier text any more."""
        self.cache.record([], 0, self.model.full)
        self.log.clear()
        self.texts += 1

    def now(self):
        """A moment: seconds on a CPU, an event on CUDA (where a pass has not ended when its call returns)."""
        if self.model.cos.device.type != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spent(self, mark=0):
        """{path name: [passes, positions, seconds]} of the log from place `mark` on; on CUDA it waits."""
        found = {}
        passes = self.log[mark:]
        if passes and self.model.cos.device.type == 'cuda':
            *_, last = passes[-1]
            last.synchronize()                          # those before it have ended too
        for name, positions, begin, end in passes:
            row = found.setdefault(name, [0, 0, 0.0])
            row[0] += 1
            row[1] += positions
            row[2] += seconds_between(begin, end)
        return found


def seconds_between(begin, end):
    """Seconds from one of Reader.now's moments to a later one, both of them over."""
    if isinstance(end, float):
        return end - begin
    return begin.elapsed_time(end) / 1000


def mark_static(tensors):
    """Tells CUDA graphs that these stay where they are: else passes that write to them are left out."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def compile_forward(model):
    """The network's forward through torch.compile, one graph for each padded length and path."""
    cpu = model.cos.device.type == 'cpu'
    expect(not cpu or shutil.which(os.environ.get('CXX', 'g++')), '--compile needs g++, or what CXX names')
    torch._dynamo.config.recompile_limit = 256          # graphs of all lengths, spans, paths and models
    model.unpack()                                      # inductor reads plain weights, experts in stacks
    options = dict(cpp_wrapper=True)                    # without it a quarter of a pass is Python
    if not cpu:
        options = {'triton.cudagraphs': True, 'coordinate_descent_tuning': True}
    return torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)


# ---------------------------------------------------------------------------------- a model on several ranks
# torchrun starts N processes, the ranks, which run the same program with the same seeds. Of each layer of the
# target a rank has an N-th part, by rows where it reads, by columns where it writes; the rest, and the draft,
# it has whole. Two sums over the ranks a layer make them agree. By hand, since DTensor's parallelize_module
# goes by hooks, which Part does without.

CUT = dict(q_proj=0, k_proj=0, v_proj=0, gate_proj=0, up_proj=0, o_proj=1, down_proj=1)     # rows; columns
PARTED = 'num_attention_heads', 'num_key_value_heads', 'intermediate_size', 'moe_intermediate_size'


def ranks():
    """(the number of this rank, how many there are): (0, 1) unless torchrun has started several."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def part_of(config, count):
    """The Config of one rank's part of a network; ValueError where it does not divide.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """
    sizes = {}
    for name in PARTED:
        size = getattr(config, name)
        expect(size % count == 0, f'{name} is {size}, which {count} processes cannot share; start fewer')
        sizes[name] = size // count
    return replace(config, **sizes)


def own_part(kept, name, rank, count):
    """A rank's part of an open tensor of a file (no more than that is read), whole where all have it."""
    _, part, kind = f'.{name}'.rsplit('.', 2)
    if count == 1 or part not in CUT:
        return kept[:]
    if kind == 'bias' and CUT[part] == 1:
        return kept[:] if rank == 0 else torch.zeros(kept.get_shape())      # it is added once
    size = kept.get_shape()[CUT[part]] // count
    rows = slice(rank * size, (rank + 1) * size)
    return kept[rows] if CUT[part] == 0 else kept[:, rows]


# ------------------------------------------------------------------------------------- loading a checkpoint

def load(folder, device='cpu', dtype=torch.float32, parted=False, tokenizer=None):
    """(Transformer, Tokenizer, end-of-sequence ids) of a Hugging Face folder with safetensors weights.

    parted: this rank's part of the Transformer, where there are several ranks. tokenizer: the folder's, where
    it has been read already.

    The network is laid out on the meta device, then each tensor goes from the memory-mapped file to
    the device in the wanted dtype, one after the other. ValueError in one line for whatever does not fit.
    """
    folder = File(folder)
    config = read_config(folder)
    files = weight_files(folder)
    refuse_sizes(config, files, folder)
    tokenizer = tokenizer or read_tokenizer(folder)
    torch.backends.cuda.enable_cudnn_sdp(False)         # it plans anew for every length of a text
    rank, count = ranks() if parted else (0, 1)
    try:
        with torch.device('meta'):
            model = Transformer(config)
    except RuntimeError as error:                       # a matrix of more bytes than can be counted
        raise ValueError(f'{folder}: config.json asks for a network beyond all bounds ({error})') from None
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if count > 1:
        with torch.device('meta'):
            model = Transformer(part_of(config, count))
        for layer in model.model.layers:
            layer.parted = True
    weights = {}
    for file in files:
        for name, tensor in read_weights(file, wanted, rank, count):
            tensor = tensor.to(device, dtype, copy=True)
            least, greatest = tensor.aminmax()
            good = least.isfinite() and greatest.isfinite()
            expect(good, f'{file}: tensor {name} holds NaN or infinity in {dtype}; damaged?')
            expect(name not in weights, f'{file}: tensor {name} stands in another file too; which is right?')
            weights[name] = nn.Parameter(tensor, requires_grad=False)
    absent = sorted(wanted.keys() - weights.keys())
    first = absent[0] if absent else ''
    expect(not absent, f'{folder}: {first} is missing, {len(absent)} in all: fetch it again')
    weights.setdefault('lm_head.weight', weights['model.embed_tokens.weight'])      # where it is tied
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval()
    model.join()
    model.set_context(min(2048, config.max_position_embeddings))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    model.words = {i: text for text, i in vocabulary.items()}
    model.vocab = max(model.words) + 1
    expect(model.vocab <= config.vocab_size,
           f'{folder}: tokenizer of {model.vocab} entries, embedding of {config.vocab_size}')
    return model, tokenizer, read_eos(folder)


def same_vocabulary(target, other, whose):
    """ValueError naming the first token (lowest id) that two loaded networks do not share by text and id."""
    for i in sorted(target.words.keys() | other.words.keys()):
        theirs, ours = other.words.get(i), target.words.get(i)
        expect(theirs == ours, f'{whose}: token {i} is {theirs!r} there and {ours!r} in the target; '
               'they must share their vocabulary')


def weight_files(folder):
    """The safetensors files of a folder: the shards that the index names, or the single file."""
    index = plain_file(folder, 'model.safetensors.index.json')
    names = {'model.safetensors'}
    if index.exists():
        shards = read_json(index).get('weight_map')
        good = isinstance(shards, dict) and shards and all(type(name) is str for name in shards.values())
        expect(good, f'{index}: weight_map is not an object of tensor names and files')
        names = set(shards.values())
    pickles = [*folder.glob('*.bin'), *folder.glob('*.pt'), *folder.glob('*.pth')]
    hint = 'fetch model.safetensors, or all the shards that model.safetensors.index.json names'
    if pickles:
        hint = f'{pickles[0].name} is a pickle, which can run code when opened; convert it'
    files = [plain_file(folder, name) for name in sorted(names)]
    for file in files:
        expect(file.exists(), f'{file}: no such file; {hint}')
    return files


def refuse_sizes(config, files, folder):
    """ValueError for more layers or experts than these files have tensors: they would take hours."""
    tensors = 0
    for file in files:
        with opened(file) as weights:
            tensors += len(weights.keys())
    parts = max(config.num_hidden_layers, sum(config.mixtures))
    expect(parts <= tensors, f'{folder}: {parts} layers or experts in config.json, {tensors} tensors in all')


@contextlib.contextmanager
def opened(file):
    """A safetensors file, open; ValueError in one line if it is none, or not all of one."""
    try:
        with safe_open(file, 'pt') as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise ValueError(f'{file}: not a complete safetensors file ({error}); fetch it again') from None


def read_weights(file, wanted, rank, count):
    """Yields (name, tensor, this rank's part) of one file; checks names, shapes and how they are stored."""
    with opened(file) as held:
        names = list(held.keys())
        kinds = {held.get_slice(name).get_dtype() for name in names}
    if 'F64' in kinds:
        print(f'{file}: fp64 weights are rounded', file=sys.stderr)
    for name in names:
        copy_of_tied = name == 'lm_head.weight' and name not in wanted
        if copy_of_tied or name.endswith('rotary_emb.inv_freq'):            # a table that we compute
            continue
        expect(name in wanted, f'{file}: tensor {name} has no place in the network of config.json')
        with opened(file) as held:              # opened anew: pages already copied are let go
            kept = held.get_slice(name)
            shape = tuple(kept.get_shape())
            stored = kept.get_dtype()
            expect(shape == wanted[name], f'{file}: {name} has shape {shape}, expected {wanted[name]}')
            expect(stored in STORED, f'{file}: {name} is stored as {stored}; use weights in '
                   f'{", ".join(STORED.values())}')
            yield name, own_part(kept, name, rank, count)


def read_tokenizer(folder):
    """The Tokenizer of a folder, which neither cuts nor pads; ValueError if there is none."""
    path = plain_file(folder, 'tokenizer.json', MOST_JSON)
    try:
        with hushed():
            tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:
        raise_own(error)
        raise ValueError(f'{path}: no such file, or not a tokenizer ({error})') from None
    tokenizer.no_truncation()                           # a file may carry both; neither is asked for here
    tokenizer.no_padding()
    if getattr(tokenizer.model, 'dropout', None):
        tokenizer.model.dropout = None                  # of merges, in training: ids would be drawn
    if tokenizer.decoder:
        refuse_growth(json.loads(tokenizer.decoder.__getstate__()), path)
    return tokenizer


def refuse_growth(decoder, path):
    """ValueError for a decoder, an object of JSON, that may write without end: it runs at every token."""
    for part in decoder.get('decoders', []):
        refuse_growth(part, path)
    if decoder['type'] == 'Replace':
        pattern = decoder['pattern']
        content = decoder['content']
        good = len(content) <= len(pattern.get('String', ''))
        expect(good, f'{path}: its decoder replaces {pattern} by {content!r}; expected a text, by none that '
               'is longer')


def encode(tokenizer, texts, special=True):
    """The ids of each text; special: with what the tokenizer puts around one. ValueError where it fails.

    Its regular expressions may take for ever, and what it replaces may grow without end: see limited. One
    fork serves all texts: 10 ms, and more where much memory is held, so encode before weights are loaded.
    """
    def encoded():
        return [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
    length = sum(map(len, texts))
    found, fault = limited(encoded, length)
    expect(found is not None, f'the tokenizer cannot encode a text of {length} characters ({fault})')
    return found


def raise_own(error):
    """Raises what is not the tokenizers library's: that is Rust, its panics are no Exception."""
    if isinstance(error, (KeyboardInterrupt, MemoryError)):
        raise error


def read_eos(folder):
    """The end-of-sequence ids, of config.json and of generation_config.json together."""
    found = []
    for name in ('config.json', 'generation_config.json'):
        if os.path.lexists(folder / name):
            ids = read_json(folder / name).get('eos_token_id')
            found += ids if isinstance(ids, list) else [ids]
    found = [i for i in found if i is not None]
    good = all(isinstance(i, int) for i in found)
    expect(good, f'{folder}: eos_token_id is {found!r}, expected a token id or a list of them')
    return frozenset(found)


# ------------------------------------------------------------- calibration.json, beside a target's weights
# What train_mask.py measured on a target, bound to its weights: {"target": fingerprint, section: {...}, ...}.
# A section of a pair names the draft's fingerprint under "draft". The sections:
# mask: "skip", the sublayers left out, "nested" masks for more stages, "cost", and to resume the search by,
#       "settings" and "tried" {mask: cost}; there is no draft in it
# signals: the 1st and the 99th percentile of each signal of SpecGuard, of draft and target
# sparse: "anchors", layers in the order in which they choose blocks; of each layer "channels" and "experts",
#         tables of evenly spaced quantiles

FLAGS = dict(mask='', signals='--signals ', sparse='--anchors ')    # of train_mask.py, by section


def fingerprint(folder):
    """16 hex digits that name a model: of its config.json and of 256 samples of each weight file.

    Whole files of 16 GB would take half a minute; retraining changes every sample.
    """
    digest = hashlib.sha256((File(folder) / 'config.json').read_bytes())
    for file in weight_files(File(folder)):
        size = file.stat().st_size
        with open(file, 'rb') as opened:
            for i in range(256):
                opened.seek(i * size // 256)
                digest.update(opened.read(4096))
    return digest.hexdigest()[:16]


def read_calibration(target, draft=None, sections=()):
    """{section: dict} of a target folder; ValueError if one of these sections is absent, broken or of others.

    draft: the draft model's folder, or None where there is none.
    """
    if not sections:
        return {}
    where = File(target) / 'calibration.json'
    found = read_json(where) if os.path.lexists(where) else {}
    layers = read_config(target).num_hidden_layers
    own = found.get('target')
    expect(not found or own == fingerprint(target),
           f'{where}: measured on another target, {own}; make it with python train_mask.py --target {target}')
    for name in sections:
        section = found.get(name)
        mend = f'make it with python train_mask.py {FLAGS.get(name, "")}--target {target}'
        expect(isinstance(section, dict), f'{where}: no section {name!r}, which the method needs; {mend}')
        pair = section.get('draft')
        expect(draft or not pair,
               f'{where}: {name!r} is of a pair, there is no draft model; give --draft DIR')
        expect(not pair or pair == fingerprint(draft),
               f'{where}: {name!r} was measured with another draft, {pair}; {mend}')
        fault = FAULTS[name](section, layers)
        expect(not fault, f'{where}: {fault}; {mend}')
    return found


def measured_sections(target):
    """The names of the sections that a target folder's calibration.json holds; none of another's weights."""
    where = File(target) / 'calibration.json'
    found = read_json(where) if os.path.lexists(where) else {}
    return set(found) if found.get('target') == fingerprint(target) else set()


def write_calibration(target, name, section, draft=None):
    """Puts one section into the target's calibration.json; those of the same target stay, others go."""
    where = File(target) / 'calibration.json'
    own = fingerprint(target)
    if draft:
        section = dict(section, draft=fingerprint(draft))
    with alone(target):                                 # another process may be adding a section of its own
        old = read_json(where) if os.path.lexists(where) else {}
        found = old if old.get('target') == own else dict(target=own)
        found[name] = section
        text = json.dumps(found, indent=1)
        text = re.sub(r'\[[^][{}"]*\]', one_line, text)      # lists of numbers on one line each
        with whole(where) as growing:
            growing.write_text(text + '\n', encoding='utf-8')


def one_line(match):
    return ' '.join(match[0].split())


def is_numbers(x):
    """Whether x is a list of numbers, at least one, none of them beyond what a knob may be."""
    return isinstance(x, list) and x != [] and all(type(y) in (int, float) and abs(y) <= 1e9 for y in x)


def is_mask(x, layers):
    """Whether x is a list of sublayers of so many layers, not of all of them."""
    every = set(range(2 * layers))
    return isinstance(x, list) and all(type(y) is int for y in x) and set(x) < every


def mask_fault(section, layers):
    """What does not fit a target of so many layers, or '': so for each section."""
    skip = section.get('skip')
    nested = section.get('nested', [])
    good = is_mask(skip, layers) and isinstance(nested, list) and all(is_mask(x, layers) for x in nested)
    return '' if good else (f'mask skips {skip!r}, nested {nested!r}; '
                            f'expected some, not all, of sublayers 0..{2 * layers - 1}')


def signals_fault(section, layers):
    for name in ('draft_logp', 'draft_grounding', 'target_logp', 'target_grounding'):
        ends = section.get(name)
        if not is_numbers(ends) or len(ends) != 2 or ends[0] > ends[1]:
            return f'{name} is {ends!r}, expected two numbers, the smaller first'
    return ''


def sparse_fault(section, layers):
    anchors = section.get('anchors')
    channels = section.get('channels')
    experts = section.get('experts')
    good = is_numbers(anchors) and set(anchors) <= set(range(layers))
    good = good and isinstance(channels, list) and len(channels) == layers and all(map(is_numbers, channels))
    good = good and isinstance(experts, list) and len(experts) == layers
    if good:
        for tables in experts:                          # of each layer, a table for each number of experts
            good = good and isinstance(tables, list) and all(map(is_numbers, tables))
    return '' if good else f'anchors, channels or experts do not fit {layers} layers'


FAULTS = dict(mask=mask_fault, signals=signals_fault, sparse=sparse_fault)
