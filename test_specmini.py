"""Oracles, laws and limits. Each test says what would break it; those that can fail by chance say how often.

transformers is the oracle for networks, exact enumeration for laws, plain decoding for greedy text, a fresh
cache for caches. Ids begin with the method: `pytest -k "law and cmasd"` selects the laws of CM-ASD. What
takes more than about a second is marked slow: `pytest -m "not slow"` leaves it out.
"""
import contextlib
import copy
import importlib.util
import faulthandler
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
import xml.etree.ElementTree
from collections import Counter
from dataclasses import astuple, fields, replace
from functools import cache, partial
from pathlib import Path as File
from types import SimpleNamespace

import hypothesis
import numpy
import pytest
import scipy.stats
import torch
import transformers
from hypothesis import settings, stateful
from hypothesis import strategies as some
from safetensors import torch as safetensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.overrides import TorchFunctionMode

import kernels
import lab.rivals       # noqa: F401, enters the baselines in METHODS
import specmini
import train_mask
import verify
from lab import (bench, common, course, cuda, endurance, files, pairs, prove, quantise, replay, speed, tasks,
                 train)
from lab import tree as lab_tree
from lab import distil as lab_distil
from lab import claims as lab_claims
from lab.cmasd import claims as cmasd_claims
from lab.cmasd import record as cmasd_record
from lab.common import embedded, roc_area
from lab.distil import Blank, Lesson, agreed, cycles_over, divergence, packed
from lab.ecsv import claims as ecsv_claims
from lab.ecsv import record as ecsv_record
from lab.ecsv.rivals import EcsvSoft, EcsvSpot, MeanArgmax, TwoDrafts, VoteUnif
from lab.pairs import EMBEDDED as EMBEDDED_PAIR
from lab.pairs import Pair, Record
from lab.pictures import cycles as picture_cycles
from lab.pictures import points as picture_points
from lab.page import Page, Traced
from lab.page.browser import open_browser, visit
from lab.page.traced import rollout_rows
from lab.sparse import claims as sparse_claims
from lab.sparse import lengths as sparse_lengths
from lab.sparse import record as sparse_record
from lab.sparse import rivals as sparse_rivals
from lab.sparse import settings as sparse_settings
from lab.sparse.distil import distil
from lab.sparse import passes as sparse_passes
from lab.sparse.passes import as_run, cost, work
from lab.specguard import answer_claims, answers
from lab.specguard import claims as specguard_claims
from lab.specguard import record as specguard_record
from lab.specguard import steps as specguard_steps
from lab.specguard import tier_claims
from lab.specguard.calibrate import choose_gate, gate_curve, least_share, print_curve, signal_ranges
from lab.specguard.claims import USUAL, Scale, area_within, average_precision, outcome, split
from lab.specguard.steps import Rollout, problem_row, record_step, whole_rollout
from lab.specguard.rivals import slim_lowest
from lab.specguard.sessions import TASKS, ContinuedChecker, engine_for, step_checker
from lab.toys import (SIZES, DropsUnverified, JudgedByQ, Table, WrongResidual, byte_network, bytes_tokenizer,
                      checkpoint, enumerate_law, exact_law, fresh, law_by_cycles, network, plain, seeded,
                      session, variation, write)
from lab.tree import Tree
from lab.via import claims as via_claims
from lab.best import claims as best_claims
from lab.best import record as best_record
from lab.via import record as via_record
from lab.via import rivals as via_rivals
from model import (KVCache, Reader, encode, fetch, limit_memory, limited, load, own_part, part_of,
                   read_calibration, read_config, read_tokenizer, send, write_calibration)
from train_mask import Choices, sparsity, watched
from verify import (METHODS, Ballot, CmAsd, Draft, Ecsv, Exact, Plan, chain, chain_on, decode, lookup,
                    most_central, overlap, probs, residual, sample_branches, silence, token_logps, tokens_of,
                    write_steps)

HERE = File(__file__).parent
EMBEDDED = HERE / 'lab/models'
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)        # the networks here are tiny


# ------------------------------------------------------------------------ what the tests are made with

MIXED = dict(experts=(6, 0, 6, 0), num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=4)
LINE = [i % 11 for i in range(50)]                  # a text of ids for networks of 11 tokens
SMALL = dict(dense_below=8, block=4, locals=1)      # knobs of sparse for texts of 64 tokens
LEARNED = dict(experts=[[[0.0, 0.2], [0.0, 0.5]]] * 4, channels=[[0.0, 0.4]] * 4, anchors=[0, 2, 1, 3])
RANGES = dict(draft_logp=[-4, 0], draft_grounding=[0, 1], target_logp=[-4, 0], target_grounding=[0, 1])

via = METHODS['via']
cmasd = METHODS['cmasd']
ecsv = METHODS['ecsv']
SpecGuard = METHODS['specguard']


def case(name, *values, slow=False):
    """One case of a parametrized test, under this id; slow: it takes more than about a second."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*values, id=name, marks=marks)


def letters(ids):
    """A text for ids in which every fourth id ends a step."""
    return ''.join('a\nbc'[i % 4] for i in ids)


LINES = dict(text=letters, calibration=dict(signals=RANGES))        # what a session of specguard needs


@pytest.fixture(scope='session', autouse=True)
def own_texts(tmp_path_factory):
    """What targets of the tests write is not remembered in the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, 'LAB', tmp_path_factory.mktemp('lab'))
        yield


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """The flags of a run on two random checkpoints."""
    home = tmp_path_factory.mktemp('pair')
    target = checkpoint(home / 'target', byte_network(0))
    draft = checkpoint(home / 'draft', byte_network(1))
    return '--target', target, '--draft', draft, '--prompt', 'hello', '--max-new', 20


def slim_session(seed=0, room=24, skip=(2, 3, 4), **settings):
    """A session of a random pair whose target of four layers has a calibrated mask."""
    mask = dict(skip=list(skip), nested=[[2, 3, 4, 5], [2, 3], [2]])
    target = network(seed, num_hidden_layers=4)
    draft = network(seed + 10)
    return session(target, draft, [1, 2, 3], room, calibration=dict(mask=mask), **settings)


def thin(model, name='sparse', **knobs):
    """The target's full path as a session of these knobs reads it."""
    method = METHODS[name](**SMALL | knobs)
    s = session(model, None, [0], 1, sparse=method, calibration=dict(sparse=LEARNED))
    return s.view(model.full)


def apart(a, b):
    """The largest difference between two tensors of one shape."""
    assert a.shape == b.shape
    return (a - b).abs().amax()


def trusted(reader, tokens):
    """How many of these tokens the reader's full path trusts; asserts that they are a fresh cache's."""
    full = reader.model.full
    count = reader.cache.trusted(tokens, full)
    other = Reader(reader.model, len(tokens))
    other.read(tokens, [], full, 1)
    for mine, theirs in zip(reader.cache.stores, other.cache.stores):
        for held, wanted in zip(mine, theirs):                  # keys, then values
            assert torch.allclose(held[:, :, :count], wanted[:, :, :count], rtol=0, atol=1e-9)
    return count


def program(capsys, *flags):
    """(exit status, stdout, stderr) of one run in this process."""
    status = specmini.main([str(flag) for flag in flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, words, *flags):
    """Asserts that a run ends with status 2, these words in one line on stderr, and no text."""
    status, out, err = program(capsys, *flags)
    assert status == 2, (flags, out, err)
    assert words in err and err.count('\n') == 1, (flags, err)
    assert not out


def reported(capsys, *flags):
    """The JSON object of the last prompt of a run."""
    status, out, err = program(capsys, *flags, '--json')
    return json.loads(out.splitlines()[-1])


def interrupt(monkeypatch, where, name, n):
    """Ctrl-C at the end of the n-th call of where.name; returns the list of what its calls give."""
    real = getattr(where, name)
    given = []

    def call(*args):
        given.append(real(*args))
        if len(given) == n:
            raise KeyboardInterrupt
        return given[-1]
    monkeypatch.setattr(where, name, call)
    return given


# ------------------------------------------------------------- model.py: parity, refusals, the cache

BASE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None,
            eos_token_id=1)
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)


def rope(kind, theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LLAMA3 = rope('llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = rope('yarn', factor=4.0, original_max_position_embeddings=16)
YARN_KNOBS = rope('yarn', factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2,
                  truncate=False, beta_fast=16, beta_slow=2)
NETWORKS = [
    case('llama', ('Llama', {})),
    case('llama-tied-linear-rope',
         ('Llama', dict(tie_word_embeddings=True, num_key_value_heads=4, **rope('linear', factor=4.0)))),
    case('llama-biases',
         ('Llama', dict(attention_bias=True, mlp_bias=True, rms_norm_eps=0.1, **rope('default', 500.0)))),
    case('llama-llama3-rope', ('Llama', dict(head_dim=16, **LLAMA3))),
    case('mistral', ('Mistral', dict(sliding_window=None))),
    case('mistral-window-as-long-as-the-text', ('Mistral', dict(sliding_window=64))),
    case('qwen2', ('Qwen2', {})),
    case('qwen2-yarn', ('Qwen2', YARN)),
    case('qwen3', ('Qwen3', dict(head_dim=16))),
    case('qwen3-biases', ('Qwen3', dict(head_dim=24, attention_bias=True))),
    case('qwen3-yarn-knobs', ('Qwen3', YARN_KNOBS)),
    case('qwen3moe', ('Qwen3Moe', MOE)),
    case('qwen3moe-renormalised', ('Qwen3Moe', dict(norm_topk_prob=True, **MOE))),
    case('qwen3moe-every-second-layer', ('Qwen3Moe', dict(decoder_sparse_step=2, **MOE))),
    case('qwen3moe-a-dense-layer', ('Qwen3Moe', dict(mlp_only_layers=[1], **MOE)))]


@pytest.fixture(scope='module', params=NETWORKS)
def oracle(request, tmp_path_factory):
    """A random network of transformers: its folder, 40 ids, and the logits [40, V] that it has for them."""
    kind, changes = request.param
    torch.manual_seed(len(str(changes)))
    settings = getattr(transformers, f'{kind}Config')(**BASE | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    for name, weight in theirs.named_parameters():
        if weight.ndim == 1:                        # norms and biases: transformers leaves them at 1 and 0
            torch.nn.init.normal_(weight, 1.0 if 'norm' in name else 0.0, 0.3)
    folder = tmp_path_factory.mktemp('oracle')
    theirs.save_pretrained(folder, max_shard_size='20KB')
    words = {f't{i}': i for i in range(64)}
    Tokenizer(models.WordLevel(words, unk_token='t0')).save(str(folder / 'tokenizer.json'))
    ids = torch.randint(0, 64, (40,)).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert wanted.std() > 0.5                       # no test could fail on logits that are all alike
    return SimpleNamespace(folder=folder, ids=ids, wanted=wanted)


def as_version_4(raw):
    """The object of a config.json as transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype."""
    raw = dict(raw)
    settings = raw.pop('rope_parameters')
    raw['rope_theta'] = settings.pop('rope_theta')
    raw['rope_scaling'] = None
    if settings['rope_type'] != 'default':
        raw['rope_scaling'] = settings | dict(type=settings['rope_type'])
    raw['torch_dtype'] = raw.pop('dtype')
    return raw


def test_parity(oracle):
    """Our logits are transformers', from several shards."""
    assert len(list(oracle.folder.glob('*.safetensors'))) > 2
    model, _, _ = load(oracle.folder)
    assert apart(fresh(model, oracle.ids), oracle.wanted) < 1e-4


@pytest.mark.slow
def test_parity_from_a_version_4_config(oracle, tmp_path):
    folder = tmp_path / 'old'
    shutil.copytree(oracle.folder, folder)
    file = folder / 'config.json'
    file.write_text(json.dumps(as_version_4(json.loads(file.read_text()))))
    model, _, _ = load(folder)
    assert apart(fresh(model, oracle.ids), oracle.wanted) < 1e-4


@pytest.mark.slow
def test_parity_token_by_token(oracle):
    """One pass over a text gives what as many passes over a token each give."""
    model, _, _ = load(oracle.folder, dtype=torch.float64)
    reader = Reader(model, 40)
    rows = []
    for end in range(1, 41):
        logits = reader.read(oracle.ids[:end], [], model.full, 1)
        rows.append(logits[0])
    assert apart(torch.stack(rows), fresh(model, oracle.ids)) < 1e-9


def test_parity_in_bf16(oracle):
    """Rounding moves the logits by less than a tenth of their spread."""
    model, _, _ = load(oracle.folder, dtype=torch.bfloat16)
    error = fresh(model, oracle.ids) - oracle.wanted
    assert error.std() < 0.1 * oracle.wanted.std()


# joint and packed matrices

def test_parity_packed(oracle, monkeypatch):
    """Packed matrices give transformers' logits too, at one to five positions; unpacked, they are back."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    model, _, _ = load(oracle.folder)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.pack()
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.is_mkldnn and attention.qkv.weight is None
    reader = Reader(model, 40)
    for end, last in ((20, 20), (21, 1), (23, 2), (26, 3), (30, 4), (35, 5), (40, 5)):
        got = reader.read(oracle.ids[:end], [], model.full, last)
        assert apart(got, oracle.wanted[end - last:end]) < 1e-4
    model.unpack()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), name
    assert apart(fresh(model, oracle.ids), oracle.wanted) < 1e-4


def test_packing_again_or_in_vain(oracle, monkeypatch):
    """A packed network stays as it is; where there is no oneDNN nothing is packed."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    model, _, _ = load(oracle.folder)
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    model.pack()
    assert not any(weight.is_mkldnn for weight in model.parameters())
    monkeypatch.undo()
    monkeypatch.setattr(kernels, 'BIG', 1)
    model.pack()
    model.pack()
    assert apart(fresh(model, oracle.ids), oracle.wanted) < 1e-4


def test_joint_matrices_are_held_once(oracle):
    """Of a loaded network the memory is that of its parameters, under the checkpoint's names."""
    model, _, _ = load(oracle.folder)
    held = {}
    for part in model.modules():
        for joint in (getattr(part, 'qkv', None), getattr(part, 'gate_up', None)):
            if joint is not None:
                held[joint.weight.untyped_storage().data_ptr()] = joint.weight.untyped_storage().nbytes()
    sizes = {}
    for weight in model.parameters():
        storage = weight.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    assert held and held.keys() <= sizes.keys()
    assert sum(sizes.values()) == sum(weight.nbytes for weight in model.parameters())
    stored = set()
    for file in oracle.folder.glob('*.safetensors'):
        stored |= safetensors.load_file(file).keys()
    assert stored == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize('shape', [dict(), dict(qkv_bias=True, mlp_bias=True), dict(qk_norm=True), MIXED])
def test_joint_matrices_compute_what_single_ones_do(shape):
    model = network(**shape)
    wanted = fresh(model, LINE)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.join()
    assert apart(fresh(model, LINE), wanted) < 1e-12
    for name, weight in model.named_parameters():       # each is still its own
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize('n', range(1, 12))
def test_head_either_way_round(n, monkeypatch):
    """Few positions by a big matrix are multiplied the other way round."""
    x = torch.randn(1, n, 16, dtype=torch.float64, generator=seeded())
    weight = torch.randn(13, 16, dtype=torch.float64, generator=seeded(1))
    wanted = x @ weight[:11].T
    assert apart(kernels.head(x, weight, 11), wanted) < 1e-12
    monkeypatch.setattr(kernels, 'BIG', 1)
    assert apart(kernels.head(x, weight, 11), wanted) < 1e-12


@pytest.mark.parametrize('T, S', [(1, 9), (3, 9), (9, 9), (1, 1030), (3, 1030)])
def test_attention_without_a_mask_is_causal(T, S):
    """The T queries are of the last T keys, in every form that attention takes."""
    q = torch.randn(2, 4, T, 8, dtype=torch.float64, generator=seeded())
    k = torch.randn(2, 2, S, 8, dtype=torch.float64, generator=seeded(1))
    v = torch.randn(2, 2, S, 8, dtype=torch.float64, generator=seeded(2))
    hidden = torch.arange(S) > torch.arange(S - T, S)[:, None]
    scores = q @ k.repeat_interleave(2, 1).mT / 8 ** 0.5
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    wanted = weights @ v.repeat_interleave(2, 1)
    mask = kernels.causal_mask(T, S, q)
    assert torch.equal(mask == 0, ~hidden)
    for given in (None, mask):
        out, _ = kernels.attend(q, k, v, given, None)
        assert apart(out, wanted) < 1e-12
    assert apart(kernels.attend_grouped(q, k, v, mask), wanted) < 1e-12


# refusals

@pytest.mark.parametrize('name, value', [
    ('hidden_size', None),
    ('num_attention_heads', 0),
    ('max_position_embeddings', '64'),
    ('rms_norm_eps', '1e-6'),
    ('tie_word_embeddings', 'no'),
    ('layer_types', 'full'),
    ('vocab_size', 10 ** 18),
    ('head_dim', 5)])
def test_refused_checkpoint_value(name, value, tmp_path, capsys):
    """A setting of config.json that is no value: status 2 and one line that names both."""
    folder = checkpoint(tmp_path, **{name: value})
    refused(capsys, f'{name} is {value!r}', '--target', folder, '--prompt', 'x')


def scaled(kind, **settings):
    """The rotary settings of a config.json of transformers 4."""
    return dict(rope_scaling=dict(rope_type=kind, factor=2, **settings))


YARN_BY_LAYER = dict(rope_parameters=dict(full_attention=dict(rope_type='yarn')))


@pytest.mark.parametrize('words, changes', [
    case('model-type', "model_type 'gpt2'", dict(model_type='gpt2')),
    case('activation', "hidden_act 'gelu'", dict(hidden_act='gelu')),
    case('eos-text', "eos_token_id is ['</s>']", dict(eos_token_id='</s>')),
    case('quantised', 'quantised', dict(quantization_config=dict(bits=4))),
    case('heads-do-not-divide', '4 query heads cannot share 3 key heads', dict(num_key_value_heads=3)),
    case('more-experts-than-there-are', ' 3, of 2',
         dict(model_type='qwen3_moe', num_experts=2, num_experts_per_tok=3, moe_intermediate_size=4)),
    case('mistral-window', 'sliding window of 32', dict(model_type='mistral', sliding_window=32)),
    case('qwen2-window', 'sliding window of 32',
         dict(model_type='qwen2', sliding_window=32, use_sliding_window=True)),
    case('qwen3-without-its-norms', 'k_norm.weight is missing',     # its window is off: no reason
         dict(model_type='qwen3', sliding_window=32, use_sliding_window=False)),
    case('weights-missing', 'layers.2.input_layernorm.weight is missing', dict(num_hidden_layers=3)),
    case('weights-spare', 'layers.1.input_layernorm.weight has no place', dict(num_hidden_layers=1)),
    case('weights-shape', 'has shape (16, 24), expected (16, 25)', dict(intermediate_size=25)),
    case('rope-partial', 'partial_rotary_factor', dict(partial_rotary_factor=0.5)),
    case('rope-text', "rotary settings 'linear'", dict(rope_scaling='linear')),
    case('rope-type', "rope type 'longrope'", scaled('longrope')),
    case('rope-llama3-bare', 'needs low_freq_factor', scaled('llama3')),
    case('rope-by-layer', 'one flat object', YARN_BY_LAYER),
    case('rope-theta', 'needs rope_theta from 1.001 to 1e10, found 1', scaled('yarn') | dict(rope_theta=1)),
    case('rope-beta-fast', "beta_fast from 0.001 to 1e10, found 'x'", scaled('yarn', beta_fast='x')),
    case('rope-attention', "attention_factor from 0.001 to 1e10, found 'x'",
         scaled('yarn', attention_factor='x')),
    case('rope-mscale', "mscale from 0.001 to 1e10, found 'x'", scaled('yarn', mscale='x')),
    case('rope-too-big', 'original_max_position_embeddings from 2 to 1e10, found 1000',
         scaled('yarn', original_max_position_embeddings=10 ** 400)),
    case('rope-shrinks', 'factor from 1 to 1e10, found 1e-30',
         dict(rope_scaling=dict(type='linear', factor=1e-30))),
    case('rope-ends-swapped', 'beta_slow is 40 and beta_fast 32', scaled('yarn', beta_slow=40)),
    case('rope-llama3-ends', 'low_freq_factor is 4 and high_freq_factor 1',
         scaled('llama3', low_freq_factor=4, high_freq_factor=1)),
    case('rope-type-list', "rope type ['yarn']", scaled(['yarn'])),
    case('sizes-absurd', 'a network beyond all bounds', dict(vocab_size=10 ** 10, hidden_size=10 ** 10)),
    case('layers-absurd', 'num_hidden_layers is 1000000000, expected', dict(num_hidden_layers=10 ** 9)),
    case('layers-beyond-the-files', '9999 layers or experts', dict(num_hidden_layers=9999))])
def test_refused_checkpoint_config(words, changes, tmp_path, capsys):
    """Status 2 and one line for what config.json asks for and we lack, and where the weights are others."""
    folder = checkpoint(tmp_path, **changes)
    refused(capsys, words, '--target', folder, '--prompt', 'x')


def multiply(folder, part, factor):
    """Multiplies every tensor of a checkpoint whose name has this part."""
    file = folder / 'model.safetensors'
    tensors = safetensors.load(file.read_bytes())
    for name in tensors:
        if part in name:
            tensors[name] = tensors[name] * factor
    file.write_bytes(safetensors.save(tensors))


def truncated_weights(folder):
    file = folder / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])


def nan_in_the_head(folder):
    multiply(folder, 'head', math.nan)


def overflowing_weights(folder):
    multiply(folder, 'down', 1e38)


def only_a_pickle(folder):
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def no_tokenizer(folder):
    (folder / 'tokenizer.json').unlink()


def empty_tokenizer(folder):
    (folder / 'tokenizer.json').write_text('{}')


def tokenizer_beyond_the_embedding(folder):
    bytes_tokenizer(['x2']).save(str(folder / 'tokenizer.json'))


def half_a_config(folder):
    (folder / 'config.json').write_text('{"model_type": ')


def index_of(folder, name, *shards):
    """Puts the weights into the folder under another name, and an index that names these shards."""
    (folder / 'model.safetensors').rename(folder / name)
    weight_map = {f'tensor {i}': shard for i, shard in enumerate(shards)}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(dict(weight_map=weight_map)))


def shard_outside(folder):
    index_of(folder, folder.parent / 'outside.safetensors', '../outside.safetensors')


def shard_by_its_whole_path(folder):
    index_of(folder, 'one.safetensors', f'/proc/self/cwd/{folder}/one.safetensors')


def link_out(folder):
    elsewhere = folder.parent / 'elsewhere'
    elsewhere.mkdir()
    (folder / 'model.safetensors').rename(elsewhere / 'model.safetensors')
    (folder / 'model.safetensors').symlink_to(elsewhere / 'model.safetensors')


def one_tensor_twice(folder):
    shutil.copy(folder / 'model.safetensors', folder / 'two.safetensors')
    index_of(folder, 'one.safetensors', 'one.safetensors', 'two.safetensors')


def whole_numbers(folder):
    retyped(folder, torch.int8)


def complex_weights(folder):
    retyped(folder, torch.complex64)


def retyped(folder, dtype):
    """Stores every tensor of a checkpoint in this dtype."""
    file = folder / 'model.safetensors'
    tensors = safetensors.load(file.read_bytes())
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(dtype)
    file.write_bytes(safetensors.save(tensors))


def pipe_for_a_config(folder):
    (folder / 'config.json').unlink()
    os.mkfifo(folder / 'config.json')


def pipe_for_a_tokenizer(folder):
    (folder / 'tokenizer.json').unlink()
    os.mkfifo(folder / 'tokenizer.json')


def device_for_weights(folder):
    (folder / 'model.safetensors').unlink()
    (folder / 'model.safetensors').symlink_to('/dev/zero')


def directory_for_weights(folder):
    (folder / 'model.safetensors').unlink()
    (folder / 'model.safetensors').mkdir()


def link_to_itself(folder):
    (folder / 'model.safetensors').unlink()
    (folder / 'model.safetensors').symlink_to('model.safetensors')


def generation_linked_to_nothing(folder):
    (folder / 'generation_config.json').symlink_to('nothing.json')


def endless_config(folder):
    os.truncate(folder / 'config.json', 2 ** 40)        # it takes no room: nothing is behind the text


def endless_tokenizer(folder):
    os.truncate(folder / 'tokenizer.json', 2 ** 40)


@pytest.mark.parametrize('spoil, words', [
    (endless_config, 'config.json: 1099511627776 bytes, expected 268435456 at most'),
    (endless_tokenizer, 'tokenizer.json: 1099511627776 bytes, expected 268435456 at most'),
    (truncated_weights, 'not a complete safetensors file'),
    (nan_in_the_head, 'lm_head.weight holds'),
    (overflowing_weights, 'NaN or infinity after 1'),
    (only_a_pickle, 'pytorch_model.bin is a pickle'),
    (no_tokenizer, 'tokenizer.json: no such file'),
    (empty_tokenizer, 'not a tokenizer'),
    (tokenizer_beyond_the_embedding, '258 entries, embedding of'),
    (half_a_config, 'cannot be read as JSON'),
    (shard_outside, "'../outside.safetensors' is not the name of a file in that folder"),
    (shard_by_its_whole_path, 'is not the name of a file in that folder'),
    (link_out, 'outside of its folder'),
    (one_tensor_twice, 'stands in another file too'),
    (whole_numbers, 'is stored as I8; use weights in fp32, fp16, bf16, fp64'),
    (complex_weights, 'is stored as C64'),
    (pipe_for_a_config, 'config.json: a directory, a pipe or a device'),
    (pipe_for_a_tokenizer, 'tokenizer.json: a directory, a pipe or a device'),
    (device_for_weights, 'outside of its folder'),
    (directory_for_weights, 'model.safetensors: a directory, a pipe or a device'),
    (link_to_itself, 'cannot be followed'),
    (generation_linked_to_nothing, 'which is not there')])
def test_refused_checkpoint_files(spoil, words, tmp_path, capsys):
    """Status 2 and one line for files that are broken, missing or of two minds."""
    folder = checkpoint(tmp_path)
    spoil(folder)
    refused(capsys, words, '--target', folder, '--prompt', 'x')


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path):
    """Its files are links to the blobs beside the snapshots, which are outside of the folder, and its own."""
    blobs = tmp_path / 'blobs'
    snapshot = tmp_path / 'snapshots' / 'main'
    snapshot.mkdir(parents=True)
    checkpoint(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    model, _, _ = load(snapshot)
    assert model.vocab == 257


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_other_precisions_are_read(dtype, tmp_path, capsys):
    folder = checkpoint(tmp_path)
    retyped(folder, dtype)
    model, _, _ = load(folder)
    assert model.lm_head.weight.dtype == torch.float32
    assert ('fp64 weights are rounded' in capsys.readouterr().err) == (dtype == torch.float64)


def test_rows_beyond_the_tokenizer(tmp_path, capsys):
    """Embeddings are padded, by different amounts: the spare rows reach no distribution."""
    target = checkpoint(tmp_path / 'target', byte_network(0, vocab=300))
    draft = checkpoint(tmp_path / 'draft', byte_network(0, vocab=280))
    model, _, _ = load(target)
    assert fresh(model, [1, 2]).shape == (2, 257)
    flags = '--target', target, '--draft', draft, '--prompt', 'x'
    status, _, _ = program(capsys, *flags, '--max-new', 8)
    assert status == 0


def test_vocabularies_must_agree(tmp_path, capsys):
    """Two tokenizers of one length are compared token by token."""
    model = byte_network(0, vocab=258)
    target = checkpoint(tmp_path / 'target', model, bytes_tokenizer(['here']))
    draft = checkpoint(tmp_path / 'draft', model, bytes_tokenizer(['there']))
    flags = '--target', target, '--draft', draft, '--prompt', 'x'
    refused(capsys, "257 is 'there' there and 'here' in", *flags)


def still_good(line, held, path, full):
    """How many leading tokens of the line a cache need not read again; held: its (token, who wrote it)."""
    count = 0
    for token, (known, writer) in zip(line, held):
        if token != known or writer not in (full, path):
            break
        count += 1
    return count


@pytest.mark.slow
def test_hostile_reads(monkeypatch):
    """Whatever was read before, full's logits are one pass's; what full or the same mask has read is kept."""
    monkeypatch.setattr('model.CHUNK', 3)
    rng = random.Random(1)
    model = network(num_hidden_layers=3)
    full = model.full
    paths = [full, full, full.without({2, 3}), full.without({2, 4})]
    reader = Reader(model, 40)
    line = [1]
    held = []           # of every position in the cache: (token, the path that wrote it)
    reused = 0          # slim passes that did not read the whole line
    for _ in range(300):
        line = line[:rng.randint(1, len(line))]
        line = line + rng.choices(range(11), k=rng.randrange(8))
        line = line[:40]
        if rng.random() < 0.3:
            line[rng.randrange(len(line))] = rng.randrange(11)
        path = rng.choice(paths)
        last = rng.randint(1, min(4, len(line)))
        cut = rng.randrange(len(line))
        fed = max(last, len(line) - still_good(line, held, path, full))
        reader.log.clear()
        logits = reader.read(line[:cut], line[cut:], path, last)
        assert logits.shape == (last, 11)
        assert {name for name, *_ in reader.log} == {path.name}
        assert sum(positions for _, positions, *_ in reader.log) == fed
        start = len(line) - fed
        held = held[:start] + [(token, path) for token in line[start:]]
        if path is full:
            hidden = model(torch.tensor([line]), torch.arange(len(line)), full)
            in_one_pass = model.logits(hidden)[0, -last:]
            assert apart(logits, in_one_pass) < 1e-9
        elif fed < len(line):
            reused += 1
    assert reused > 50


def test_fork():
    """A fork's rows part from a shared past and equal texts read alone; only positions in use are copied."""
    model = network()
    reader = Reader(model, 50)
    reader.read([1, 2, 3], [], model.full, 1)
    keys, _ = reader.cache.stores[0]
    keys[:, :, 3:] = 7.0                                        # scratch behind what is in use
    twin = reader.fork(3)
    copied, _ = twin.cache.stores[0]
    assert copied.shape[0] == 3
    assert (copied[:, :, 3:] == 0).all()
    twin.append(torch.tensor([4, 5, 6]), model.full)
    logits = twin.append(torch.tensor([7, 8, 9]), model.full)
    for i in range(3):
        by_itself = fresh(model, [1, 2, 3, 4 + i, 7 + i], 1)
        assert apart(logits[i], by_itself[0]) < 1e-9
    assert reader.cache.ids == [1, 2, 3]                        # the parent is untouched,
    assert len(reader.log) == 3                                 # the ledger shared


def test_fork_again():
    """The next fork of as many rows is of the text as it is then, in the same memory: block means too."""
    model = network()
    path = thin(model, block=1, dense_below=2, rho=0.3)
    reader = Reader(model, 50)
    reader.read(LINE[:20], [], path, 1)
    first = reader.fork(2)
    first.feed(torch.tensor([LINE[20:23]] * 2), 20, path, 1)
    other = [7 * i % 11 for i in range(31)]
    reader.read(other[:30], [], path, 1)
    again = reader.fork(2)
    assert again.cache is first.cache and again.cache.ids == other[:30]
    alone = Reader(model, 50)
    alone.read(other[:30], [], path, 1)
    wanted = alone.read(other, [], path, 1)
    assert apart(again.append(torch.tensor([other[30]] * 2), path)[0], wanted[0]) < 1e-9


MIXED_TWO = MIXED | dict(num_hidden_layers=2, experts=(6, 0), norm_topk_prob=True)


def graph(name, sizes, method=None, **knobs):
    """A case of test_graphs: compiling takes about a second."""
    return case(name, sizes, method, knobs, slow=True)


def graph_counter(monkeypatch):
    """The counter of the graphs that are compiled from here on; nothing is generated for them."""
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    counter = CompileCounter()
    compile_by = torch.compile

    def count_alone(function, options, **how):
        return compile_by(function, backend=counter, **how)
    monkeypatch.setattr(torch, 'compile', count_alone)
    return counter


@pytest.mark.slow
def test_graphs_of_spans(monkeypatch):
    """A compiled pass has a power of two of keys in view, or the whole cache; each has a graph."""
    monkeypatch.setattr('model.SPAN', 8)
    counter = graph_counter(monkeypatch)
    model = network()
    compiled = Reader(model, 24, compiled=True)         # 16 more for padding: 40
    assert [compiled.span(n) for n in (1, 8, 9, 16, 17, 32, 33, 40)] == [8, 8, 16, 16, 32, 32, 40, 40]
    for length in (3, 5, 8, 9, 12, 16, 20, 24):
        got = compiled.read(LINE[:length], [], model.full, 1)
        assert apart(got, fresh(model, LINE[:length], 1)) < 1e-9
    assert counter.frame_count == 5         # feeds 3, 2, 3, 1, 3, 4, 4, 4: of 4 at 8, 16 and 32, of 2, of 1


@pytest.mark.parametrize('sizes, name, knobs', [
    graph('full', {}),
    graph('full-mixture', MIXED_TWO),
    graph('sparse-mixture', MIXED_TWO, 'sparse'),
    graph('sparse-random', {}, 'sparse', select='random'),
    graph('sparse-recent', {}, 'sparse', select='recent'),
    graph('sparse-oracle', {}, 'sparse', select='oracle', query_from='last'),
    graph('sparse-forms-literal', MIXED_TWO, 'sparse-forms', form='literal', select='token'),
    graph('sparse-forms-union', MIXED_TWO, 'sparse-forms', form='union', select='joint'),
    graph('sparse-forms-guessed', MIXED_TWO, 'sparse-forms', form='guessed', select='union'),
    graph('sparse-forms-quest', MIXED_TWO, 'sparse-forms', form='union', select='quest', query_from='mean')])
def test_graphs(sizes, name, knobs, monkeypatch):
    """One graph per padded length, whatever the position (the backend only counts); padding is harmless."""
    counter = graph_counter(monkeypatch)
    model = network(**sizes)
    path = model.full
    if name:
        usual = dict(dense_below=2, block=1, rho=0.3, ffn_threshold=0.1, ffn_share=0.5, moe_quantile=1.0)
        path = thin(model, name, **usual | knobs)
    compiled = Reader(model, 40, compiled=True)
    exact = Reader(model, 40)
    for store in itertools.chain(*compiled.cache.stores):
        store.normal_(0, 50)                        # what a padded pass must not look at
    reads = (17, 1), (18, 1), (21, 3), (22, 3), (25, 1), (30, 1)        # feeds 17, 1, 3, 3, 3, 5
    for length, last in reads:
        got = compiled.read(LINE[:length], [], path, last)
        wanted = exact.read(LINE[:length], [], path, last)
        if knobs.get('select') != 'random':         # which draws other lots in another cache
            assert apart(got, wanted) < 1e-9
    assert counter.frame_count == 3                 # 1, 4 and 8 positions


# whatever is done to a cache, and wherever it is interrupted

FILES = {KVCache.record.__code__.co_filename, Tree.keep.__code__.co_filename}
BOOKS = {'read', 'record', 'average', 'keep'}           # functions that keep a cache's books,
PASSES = BOOKS | {'append', 'feed', 'fork', 'told', 'copy_of', 'forward'}       # those that fill it too,
DECODING = PASSES - {'forward'} | {verify.__file__}         # and the loop with its verbs, all of one file


def interrupted(n, function, places):
    """(what the function gives, whether Ctrl-C came before): ahead of the n-th line of these; 0: never."""
    if n < 1:
        return function(), False
    left = n

    def trace(frame, event, arg):
        nonlocal left
        code = frame.f_code
        named = code.co_filename in FILES and code.co_name in places
        if not named and code.co_filename not in places:
            return None
        left -= event == 'line'
        if left < 1:
            left = math.inf
            raise KeyboardInterrupt
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(), False
    except KeyboardInterrupt:
        return None, True
    finally:
        sys.settrace(before)


BUILDS_ON = {       # by the design: whose keys a path may read
    'full': {'full'}, 'slim': {'full', 'slim'}, 'other slim': {'full', 'other slim'},
    'sparse': {'full', 'sparse'}, 'sparse slim': {'full', 'sparse', 'sparse slim'}}
SPARSE_CHOICES = dict(dense_below=2, block=2, locals=1, ffn_threshold=0.05, moe_quantile=1.0)
MACHINE_IDS = some.lists(some.integers(0, 10), max_size=6)
MACHINE_PATHS = some.sampled_from(sorted(BUILDS_ON))
MOMENTS = some.integers(-100, 100)          # lines; from 1 on something is interrupted there


@cache
def hostile_network():
    return network(**MIXED_TWO)


class CacheMachine(stateful.RuleBasedStateMachine):
    """A cache under everything that is done to one: its logits are a fresh one's, or it was interrupted.

    `held` is a model of what it holds. It knows of the design what BUILDS_ON says, and nothing of how the
    cache keeps its books.
    """

    def __init__(self):
        super().__init__()
        model = hostile_network()
        slim = model.full.without({1})
        s = session(model, None, [0], 1, sparse=METHODS['sparse'](**SPARSE_CHOICES),
                    calibration=dict(sparse=LEARNED))
        self.paths = {'full': model.full, 'slim': slim, 'other slim': model.full.without({2}),
                      'sparse': s.view(model.full), 'sparse slim': s.view(slim)}
        self.reader = Reader(model, 40)
        self.line = [1]
        self.places = PASSES    # where moments are counted
        self.held = []          # of each recorded position: token, name of the path, where its pass began

    def move(self, cut, more):
        """The text becomes a shorter one, or a longer."""
        kept = self.line[:max(1, len(self.line) - cut)]
        self.line = (kept + more)[:30]

    def good(self, line, name):
        """How many leading tokens of the line this path need not read again."""
        count = 0
        for token, (known, writer, _) in zip(line, self.held):
            if token != known or writer not in BUILDS_ON[name]:
                break
            count += 1
        return count

    def after_read(self, line, name, last):
        """(models before, in and after a read of the line; the position where the read begins)."""
        start = min(self.good(line, name), len(line) - last)
        cut = self.held[:start]
        return [self.held, cut, cut + [(token, name, start) for token in line[start:]]], start

    def attempt(self, moment, models, function):
        """What the function gives, or None: interrupted. `held` becomes the one of the models that fits."""
        passes = len(self.reader.log)
        result, self.broken = interrupted(moment, function, self.places)
        cache = self.reader.cache
        believed = list(zip(cache.ids, cache.writers))
        fitting = []
        for held in models:
            if believed == [(token, self.paths[name].writes) for token, name, _ in held]:
                fitting.append(held)
        assert fitting, f'{believed} is none of {models}'
        self.held = fitting[-1] if len(self.reader.log) > passes else fitting[0]
        assert self.broken or self.held == models[-1]
        return result

    def fresh_reader(self, held):
        """A reader that has read nothing but these positions, each by the path that wrote it."""
        reader = Reader(self.reader.model, 40)
        ids = torch.tensor([[token for token, *_ in held]])
        end = 0
        for (name, begin), group in itertools.groupby(held, lambda row: row[1:]):
            end += len(list(group))
            reader.feed(ids[:, begin:end], begin, self.paths[name], 0)
        return reader

    def right(self, rows, reader, line, begin, path):
        """Asserts that these are the logits of the line from its position `begin` on, read in one pass."""
        wanted = reader.feed(torch.tensor([line[begin:]]), begin, path, len(rows))
        assert apart(rows, wanted[0]) < 1e-9

    def right_behind(self, rows, held, name, ids):
        """Likewise of a rollout behind the text that is held: a row for its end, and one for each token."""
        reader = self.fresh_reader(held)
        begin = held[-1][2]
        last = torch.tensor([[token for token, *_ in held[begin:]]])
        wanted = [reader.feed(last, begin, self.paths[name], 1)]
        for place, token in enumerate(ids[:-1], len(held)):
            wanted.append(reader.feed(torch.tensor([[token]]), place, self.paths[name], 1))
        assert apart(rows, torch.cat(wanted, 1)[0]) < 1e-9

    @stateful.rule(cut=some.integers(0, 30), more=MACHINE_IDS, name=MACHINE_PATHS,
                   last=some.integers(0, 4), moment=MOMENTS)
    def read(self, cut, more, name, last, moment):
        self.move(cut, more)
        line, path = self.line, self.paths[name]
        last = min(last, len(line))
        models, start = self.after_read(line, name, last)
        half = len(line) // 2
        logits = self.attempt(moment, models, lambda: self.reader.read(line[:half], line[half:], path, last))
        if logits is not None:
            self.right(logits, self.fresh_reader(self.held[:start]), line, start, path)
            if name == 'full':
                assert apart(logits, fresh(self.reader.model, line, last)) < 1e-9

    @stateful.rule(n=some.integers(1, 4), moment=MOMENTS)
    def observe(self, n, moment):
        """A step read by a path with a carry: it writes as full, and observes what a fresh reader does."""
        n = min(n, len(self.line) - 1)
        if n == 0:
            return
        begin = len(self.line) - n
        path, again = [self.reader.model.full.grounded('last', 2, begin=begin, sparsify=0.01, residual=0.2)
                       for _ in range(2)]
        models, _ = self.after_read(self.line, 'full', n)
        logits = self.attempt(moment, models, lambda: self.reader.read(self.line, [], path, n))
        if logits is not None:
            whole = Reader(self.reader.model, 40).read(self.line, [], again, n)
            assert apart(logits, whole) < 1e-9
            assert apart(path.carry['shades'], again.carry['shades']) < 1e-9

    def plan(self, name, tokens):
        """(a stand-in for a session, a Plan) that draw these ids: a list for each row."""
        columns = [torch.tensor(column) for column in zip(*tokens)]
        s = SimpleNamespace(tokens=self.line, eos=frozenset(), draw=lambda q: columns.pop(0))
        return s, Plan(len(columns), partial(torch.softmax, dim=-1), lambda tokens, logits, notes: True)

    @stateful.rule(name=MACHINE_PATHS, ids=MACHINE_IDS.filter(len), moment=MOMENTS)
    def draft(self, name, ids, moment):
        """A rollout in the cache itself, which is recorded but for its last token."""
        path = self.paths[name]
        models, _ = self.after_read(self.line, name, 1)
        grown = models[-1] + [(token, name, len(self.line) + i) for i, token in enumerate(ids[:-1])]
        s, plan = self.plan(name, [ids])
        found = self.attempt(moment, [*models, grown], lambda: chain_on(s, plan, self.reader, path))
        if found:
            self.right_behind(found.logits, models[-1], name, ids)

    @stateful.rule(name=MACHINE_PATHS, rows=some.lists(
        some.lists(some.integers(0, 10), min_size=3, max_size=3), min_size=2, max_size=3),
        moment=MOMENTS)
    def branch(self, name, rows, moment):
        """Rollouts in a fork, side by side: the cache itself holds the text alone."""
        path = self.paths[name]
        models, _ = self.after_read(self.line, name, 1)
        s, plan = self.plan(name, rows)
        found = self.attempt(
            moment, models, lambda: sample_branches(s, self.reader, path, len(rows), plan))
        if found:
            for ids, logits in zip(rows, found.logits):
                self.right_behind(logits, models[-1], name, ids)

    @stateful.rule(name=some.sampled_from(['full', 'slim']), guesses=MACHINE_IDS,
                   draws=some.lists(some.integers(0, 99), min_size=7, max_size=7),
                   moment=MOMENTS, later=MOMENTS)
    def tree(self, name, guesses, draws, moment, later):
        """A tree of guesses, of which one branch is kept."""
        text, path = self.line, self.paths[name]
        parents = [draw % (i + 1) for i, draw in enumerate(draws[:len(guesses)])]
        branches = [[]]                         # of each node the way to it
        for node, parent in enumerate(parents, 1):
            branches.append(branches[parent] + [node])
        tree = Tree(self.reader, text, guesses, parents)
        models, _ = self.after_read(text[:-1], name, 0)
        rows = self.attempt(moment, models, lambda: tree.read(path))
        if rows is None:
            return
        begin = len(text) - 1
        reader = self.fresh_reader(self.held)
        for branch in branches:
            line = text + [guesses[node - 1] for node in branch]
            self.right(rows[[0, *branch]], reader, line, begin, path)
        chosen = branches[draws[-1] % len(branches)]
        self.line = text + [guesses[node - 1] for node in chosen]
        kept = self.held + [(token, name, begin) for token in self.line[begin:]]
        self.attempt(later, [self.held, kept], lambda: tree.keep(chosen))

    @stateful.rule()
    def forget(self):
        self.reader.forget()
        self.held = []


LIVES = hypothesis.settings(derandomize=True, database=None, deadline=None, max_examples=30,
                            stateful_step_count=20, suppress_health_check=list(hypothesis.HealthCheck),
                            phases=[hypothesis.Phase.generate])     # told as found: shrinking takes minutes


def test_whatever_is_done_to_a_cache():
    """30 lives of up to 20 events each. By hand, more: set max_examples, and derandomize=False."""
    stateful.run_state_machine_as_test(CacheMachine, settings=LIVES)


@pytest.mark.parametrize('event', [
    case('read', lambda life, n: life.read(0, [1, 2], 'slim', 5, n)),
    case('draft', lambda life, n: life.draft('sparse', [1, 2, 3], n)),
    case('tree', lambda life, n: life.tree('slim', [1, 2, 3], [0, 1, 0, 0, 0, 0, 2], 0, n))])
def test_a_cache_that_is_interrupted_anywhere(event):
    """Before each line in turn that keeps its books; what is read next is right all the same."""
    n = 0
    broken = True
    while broken:
        n += 1
        life = CacheMachine()
        life.places = BOOKS
        life.read(0, LINE[:12], 'full', 1, 0)
        life.read(2, [9], 'other slim', 1, 0)
        event(life, n)
        broken = life.broken
        life.read(0, [], 'sparse' if n % 2 else 'full', 1, 0)
    assert n > 10


# ------------------------------------------------------------- verify.py: the maths

@pytest.mark.parametrize('temperature', [0.5, 1.3])
@pytest.mark.parametrize('top_k', [0, 5])
@pytest.mark.parametrize('top_p', [1.0, 0.8, 0.3])
def test_probs_are_transformers(temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, as transformers' warpers do it."""
    from transformers.generation import logits_process as theirs
    logits = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    warped = theirs.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = theirs.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = theirs.TopPLogitsWarper(top_p)(None, warped)
    assert apart(probs(logits, temperature, top_k, top_p), warped.softmax(-1)) < 1e-12


def test_probs_at_the_limits():
    """Temperature 0 is one-hot; so is top-p near 0, for the likeliest is always kept; fp32 at least."""
    logits = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    greedy = torch.nn.functional.one_hot(logits.argmax(-1), 30).double()
    assert torch.equal(probs(logits, 0), greedy)
    assert torch.allclose(probs(logits, 1, top_p=1e-9), greedy)
    assert probs(logits.bfloat16(), 0.7).dtype == torch.float32


def fixed(found, *args, **kwargs):
    """What a patched function returns, whatever it is asked."""
    return found


@pytest.mark.parametrize('p', [
    case('first-and-last', [0.0, 0.3, 0.0, 0.7, 0.0]),
    case('one-hot', [0.0, 0.0, 1.0]),
    case('less-than-1', [0.0, 0.1, 0.0, 0.2, 0.0]),
    case('more-than-1', [0.0, 0.9, 0.0, 0.9, 0.0]),
    case('one-is-tiny', [0.0, 1e-15, 0.0, 1.0, 0.0])])
def test_sample_at_its_ends(p, monkeypatch):
    """The smallest uniform number draws the first token that has a chance, the largest the last."""
    p = torch.tensor(p, dtype=torch.float64)
    possible = p.nonzero()[:, 0].tolist()
    for uniform, wanted in ((0.0, possible[0]), (1 - 2 ** -53, possible[-1])):
        uniform = torch.tensor([uniform], dtype=torch.float64)
        monkeypatch.setattr(torch, 'rand', partial(fixed, uniform))
        assert int(verify.sample(p)) == wanted


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_sample_by_count(dtype):
    """Each row follows its own law; so should 9,999 of 10,000 seeds."""
    n = 4000
    p = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4], [0.0, 0.0, 0.5, 0.25, 0.25]], dtype=dtype)
    drawn = verify.sample(p.expand(n, 2, 5), seeded())
    for row, law in zip(drawn.T, p):
        observed = torch.bincount(row, minlength=5)
        assert not observed[law == 0].any()
        expected = {i: n * float(x) for i, x in enumerate(law) if x > 0}
        assert upper_tail(observed.tolist(), expected) > 1e-4 / 4


def test_overlap_and_residual():
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.tensor([0.2, 0.3, 0.5])
    assert torch.isclose(overlap(p, q), torch.tensor(0.5))
    assert torch.allclose(residual(p, q), torch.tensor([0.6, 0.4, 0.0]))
    assert torch.equal(residual(p, p), p)           # nothing is left: p, not 0 / 0


# ------------------------------------------------------------- verify.py: laws

SKIP = dict(mask=dict(skip=[1], nested=[]))             # of a table: its feed-forward
MASK = dict(calibration=SKIP, vocab=3, horizon=2)
EOS = dict(eos=frozenset([3]))
COINS = dict(vocab=2, horizon=4)
SHORT = dict(horizon=2)
GREEDY = dict(draft_temperature=0.0)                    # candidates that are thrown away need no enumeration
OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=0)      # sparse that leaves nothing out
TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)
FLAT = COINS | dict(draft=Table(2, 2, 0.45))            # so unsure that probe cuts blocks
ALWAYS = dict(keep=2.0, escalate=1.5)                   # via escalates every token,
NEVER = dict(keep=1.0, escalate=0.0, max_lag=99)        # and none


def two_level(gamma, **knobs):
    """via whose slim verifier and target both judge exactly."""
    return METHODS['via-two-level'](gamma, **knobs)


def lossy_sd(gamma, **knobs):
    """via whose slim verifier is an exact rule with a lenience."""
    return METHODS['via-lossy-sd'](gamma, **knobs)


def one_minus_alpha(gamma, **knobs):
    """via with its two thresholds as published."""
    return METHODS['via-one-minus-alpha'](gamma, **knobs)


def strict(k_max, **knobs):
    """cmasd that judges exactly."""
    return cmasd(k_max=k_max, alpha=2, accept_='strict', **knobs)


def spot(**knobs):
    return METHODS['ecsv-spot'](**TWO, spots=2, **knobs)


def law(name, method, slow=False, **settings):
    """A case of the law tests: its id, which begins with the method's name, and how its text is drawn."""
    return case(name, method, settings, slow=slow)


lenient = METHODS['lenient']
typical = METHODS['typical']
sparse = METHODS['sparse']
oracle_top1 = METHODS['oracle-top1']
sd_multi = METHODS['sd-multi']
sd_tree = METHODS['sd-tree']
hedge = METHODS['hedge']
kept = METHODS['kept']
kept_draft = METHODS['kept-draft']

LAWS = [
    law('ar', METHODS['ar']()),
    law('sd-gamma-1', Exact(1)),
    law('sd', Exact(2), slow=True),
    law('sd-eos', Exact(2), slow=True, **EOS),
    law('sd-lookup', Exact(2), source=lookup),
    law('sd-silence', Exact(2), source=silence),
    law('sd-settings', Exact(2), temperature=0.7, top_k=3, top_p=0.9),
    law('sd-cool-draft', Exact(2, draft_temperature=0.5), slow=True),
    law('sd-greedy-draft', Exact(2, draft_temperature=0)),
    law('sd-draft-self', Exact(2), draft=None, **MASK),
    law('sd-wrong-drops-unverified', DropsUnverified(2), **SHORT),
    law('sd-wrong-residual', WrongResidual(2), **SHORT),
    law('lenient-lenience-1', lenient(2, lenience=1), slow=True),
    law('lenient', lenient(2, lenience=0.5), slow=True),
    law('typical-keeps-nothing', typical(1, epsilon=1, delta=math.inf), slow=True),
    law('typical', typical(2), slow=True),
    law('typical-short', typical(2), **SHORT),
    law('cmasd-strict', strict(2)),
    law('cmasd-tau-1', cmasd(k_max=2, alpha=2, tau_base=1)),
    law('cmasd', cmasd(k_max=2)),
    law('cmasd-probe', strict(3, controller='probe'), slow=True, **COINS),
    law('cmasd-dropout', METHODS['cmasd-dropout'](k_max=2, alpha=2, accept_='strict'), slow=True),
    law('sparse-off', sparse(2, **OFF), slow=True),
    law('sparse-off-short', sparse(2, **OFF), **SHORT),
    law('kept-draft', kept_draft(2), vocab=3, horizon=2),
    law('kept', kept(2, rho=0.0), draft=None, source=silence, **SHORT),
    law('ecsv', ecsv(**TWO | dict(branches=3)), slow=True),
    law('ecsv-short', ecsv(**TWO), **SHORT),
    law('ecsv-wrong-judged-by-q', JudgedByQ(**TWO), **SHORT),
    law('ecsv-lite', METHODS['ecsv-lite'](**TWO, align='prefix', granularity='branch'), slow=True),
    law('ecsv-soft', METHODS['ecsv-soft'](**TWO, granularity='window'), slow=True),
    law('ecsv-spot', spot(policy='entropy'), slow=True),
    law('ecsv-spot-budget', spot(policy='agree_entropy', budget=2), slow=True),
    law('ecsv-mean-argmax', METHODS['mean-argmax'](**TWO), slow=True),
    law('ecsv-oracle-top1', oracle_top1(**TWO), slow=True),
    law('ecsv-sd-multi', sd_multi(**TWO), slow=True),
    law('ecsv-sd-multi-budget', sd_multi(**TWO, budget=4), slow=True),
    law('ecsv-sd-tree', sd_tree(**TWO), slow=True),
    law('ecsv-sd-tree-budget', sd_tree(**TWO, budget=4), slow=True),
    law('ecsv-eos', ecsv(**TWO), slow=True, **EOS),
    law('ecsv-sd-tree-eos', sd_tree(**TWO), slow=True, **EOS),
    law('hedge', hedge(2, side=2, least=0), vocab=2),
    law('hedge-greedy-draft', hedge(2, side=2, least=0.05, draft_temperature=0), vocab=3),
    law('hedge-eos', hedge(1, side=2, least=0), **EOS, **SHORT),
    law('hedge-settings', hedge(1, least=0), temperature=0.7, top_k=3, top_p=0.9, **SHORT),
    law('hedge-draft-self', hedge(1, side=2, least=0), draft=None, **MASK),
    law('ecsv-probe', ecsv(**TWO, controller='probe'), slow=True, **FLAT),
    law('ecsv-oracle-top1-probe', oracle_top1(**TWO, controller='probe'), slow=True, **FLAT),
    law('ecsv-sd-multi-probe', sd_multi(**TWO, controller='probe'), slow=True, **FLAT),
    law('via-two-level-coins', two_level(2), slow=True, calibration=SKIP, vocab=2, horizon=3),
    law('via-two-level', two_level(2), slow=True, **MASK),
    law('via-two-level-short', two_level(2), calibration=SKIP, vocab=2, horizon=2),
    law('via', via(2), **MASK),
    law('via-always', via(2, **ALWAYS), **MASK),
    law('via-most-wrong-0', via(1, most_wrong=0.0), **MASK),
    law('via-tiers', METHODS['via-tiers'](2, tiers=2), **MASK),
    law('via-lossy-sd', lossy_sd(2), **MASK),
    law('via-one-minus-alpha', one_minus_alpha(2), **MASK),
    law('specguard-tau-inf', SpecGuard(tau=math.inf, **GREEDY), **LINES),
    law('specguard-tau-inf-eos', SpecGuard(tau=math.inf, **GREEDY), **LINES, **EOS),
    law('specguard-regenerate-sd', SpecGuard(1, tau=math.inf, regenerate='sd', **GREEDY), slow=True, **LINES),
    law('specguard', SpecGuard(k=1, tau=0.5), slow=True, **LINES, **SHORT),
    law('specguard-most-wrong-0', SpecGuard(tau=-math.inf, most_wrong=0.0, **GREEDY), **LINES, **SHORT),
    law('specguard-target-k', SpecGuard(tau=math.inf, target_k=2, **GREEDY), slow=True, **LINES, **SHORT)]


@pytest.mark.parametrize('method, settings', LAWS)
def test_law(method, settings):
    """Every draw enumerated: what calls itself lossless has the target's law, LOSSY or wrong has not.

    `-k "law and cmasd"` selects the laws of CM-ASD, for whom ids begin with `cmasd`; likewise of any method.
    """
    settings = dict(vocab=4, horizon=3, temperature=1.0) | settings
    vocab = settings.pop('vocab')
    horizon = settings.pop('horizon')
    target = Table(1, vocab)
    draft = settings.pop('draft', Table(2, vocab))
    enumerated = law_by_cycles if isinstance(method, ecsv) else enumerate_law
    law = enumerated(target, draft, method, horizon, **settings)
    sampling = {}                                       # the settings that the target's own law depends on
    for name in ('temperature', 'top_k', 'top_p', 'eos'):
        if name in settings:
            sampling[name] = settings[name]
    gap = variation(law, exact_law(target, horizon, **sampling))
    if method.lossless:
        assert gap < 1e-9
    else:
        assert gap > 0.01


@pytest.mark.parametrize('method, horizon, settings', [
    case('ar', METHODS['ar'](), 3, {}),
    case('sd', Exact(2), 3, {}),
    case('sd-eos', Exact(3), 4, dict(eos=frozenset([1]))),
    case('sd-wrong-residual', WrongResidual(2), 3, {}),
    case('ecsv-sd-multi', sd_multi(**TWO), 3, {}),
    case('hedge', hedge(2, side=2, least=0, draft_temperature=0), 3, {}),
    case('ecsv-checked', METHODS['ecsv-checked'](**TWO), 3, {}),
    case('via', via(2), 2, dict(calibration=SKIP)),
    case('via-always', via(2, **ALWAYS), 2, dict(calibration=SKIP)),
    case('via-two-level', two_level(1), 2, dict(calibration=SKIP))])
def test_law_as_a_device_draws(method, horizon, settings, monkeypatch):
    """There a cycle's last token is drawn for every place before any is judged, and no end is looked for."""
    target = Table(1, 2)
    draft = Table(2, 2)
    monkeypatch.setattr(verify, 'remote', lambda x: True)
    law = enumerate_law(target, draft, method, horizon, temperature=1.0, **settings)
    eos = settings.get('eos', frozenset())
    gap = variation(law, exact_law(target, horizon, temperature=1.0, eos=eos))
    if method.lossless:
        assert gap < 1e-9
    else:
        assert gap > 0.01


def shifted(read, axis=0):
    """A method that reads, but gives what it has read one row too late: a mistake that equal rows hide."""
    def call(*args):
        rows = read(*args)
        return rows if rows is None else rows.roll(1, axis)
    return call


def shift_rows(patch):
    """The target judges each token by the row before, in a line and in a tree."""
    patch.setattr(verify.Session, 'read', shifted(verify.Session.read))
    patch.setattr(Tree, 'read', shifted(Tree.read))


def shift_branches(patch):
    """Each branch is said to have been drawn from the q of the one before."""
    def call(*args):
        found = sample_branches(*args)
        return found._replace(q=found.q.roll(1, 0))
    patch.setattr('lab.ecsv.rivals.sample_branches', call)
    patch.setattr(verify, 'sample_branches', call)


OFF_BY_ONE = [
    case('sd', Exact(2), shift_rows, {}),
    case('cmasd', strict(2), shift_rows, {}),
    case('ecsv', ecsv(**TWO), shift_rows, {}),
    case('ecsv-spot', spot(policy='entropy'), shift_rows, {}),
    case('ecsv-checked', METHODS['ecsv-checked'](**TWO), shift_rows, {}),
    case('ecsv-oracle-top1', oracle_top1(**TWO), shift_rows, {}),
    case('ecsv-sd-multi', sd_multi(**TWO), shift_rows, {}),
    case('ecsv-sd-multi-q', sd_multi(**TWO | dict(draft_top_p=1.0)), shift_branches, {}),
    case('ecsv-sd-tree', sd_tree(**TWO), shift_rows, {}),
    case('ecsv-sd-tree-q', sd_tree(**TWO | dict(draft_top_p=1.0)), shift_branches, {}),
    case('hedge', hedge(2, side=2, least=0), shift_rows, {}),
    case('via-two-level', two_level(1), shift_rows, dict(calibration=SKIP)),
    case('specguard', SpecGuard(2, tau=math.inf, regenerate='sd', **GREEDY), shift_rows, LINES)]


@pytest.mark.parametrize('method, shift, settings', OFF_BY_ONE)
def test_law_shows_what_is_off_by_one(method, shift, settings, monkeypatch):
    """A table's rows differ at every place: a method that looked at the next one, or at the next branch's,
    would miss the law by far."""
    enumerated = law_by_cycles if isinstance(method, ecsv) else enumerate_law
    target, draft = Table(1, 2), Table(2, 2)
    wanted = exact_law(target, 3, temperature=1.0)
    assert variation(enumerated(target, draft, method, 3, temperature=1.0, **settings), wanted) < 1e-9
    shift(monkeypatch)
    assert variation(enumerated(target, draft, method, 3, temperature=1.0, **settings), wanted) > 0.01


def step_law(target, draft, method):
    """The law of one step of three tokens, by hand: who is chosen of k candidates, and whether it stays."""
    cool = exact_law(draft, 3, temperature=method.draft_temperature)
    own = exact_law(target, 3, temperature=1.0)
    judge = target if method.signals == 'target' else draft
    low, high = RANGES[f'{method.signals}_logp']

    def logps(model, step):
        rows = [model.row((0, *step[:i])).log_softmax(-1) for i in range(3)]
        return [float(row[token]) for row, token in zip(rows, step)]
    law = Counter()
    for steps in itertools.product(cool, repeat=method.k):
        chance = math.prod(cool[step] for step in steps)
        means = [sum(logps(draft, step)) for step in steps]
        step = steps[most_central(list(map(list, steps)), means)]
        if (min(logps(judge, step)) - low) / (high - low) >= method.tau:
            law[step] += chance
            continue
        for other, share in own.items():
            law[other] += chance * share
    return law


@pytest.mark.parametrize('signals, tau', [('draft', 0.6), ('target', 0.4)])
@pytest.mark.parametrize('k', [1, 2])
def test_law_of_steps_that_specguard_judges(signals, tau, k, monkeypatch):
    """Candidates are compared, and judged, by the rows of their own places; by those before it shows."""
    target, draft = Table(1, 2), Table(2, 2, 0.7)
    method = SpecGuard(k=k, beta=1.0, tau=tau, signals=signals, target_k=1, max_step=3)
    settings = LINES | dict(text=lambda ids: 'a' * len(ids), temperature=1.0)
    wanted = step_law(target, draft, method)
    assert variation(wanted, exact_law(target, 3, temperature=1.0)) > 0.01
    assert variation(enumerate_law(target, draft, method, 3, **settings), wanted) < 1e-9
    monkeypatch.setattr(verify, 'token_logps', lambda rows, ids: token_logps(rows.roll(1, 0), ids))
    assert variation(enumerate_law(target, draft, method, 3, **settings), wanted) > 0.01


WITH_CONTROLLER = [one for one in LAWS if isinstance(one.values[0], Exact)]      # not ar, nor specguard
OF_POINT_MASSES = ecsv, METHODS['mean-argmax'], oracle_top1
OF_SAMPLES = sd_multi, sd_tree, JudgedByQ


@pytest.mark.parametrize('method, settings', WITH_CONTROLLER)
def test_law_is_not_promised_under_probe(method, settings):
    """probe drops tokens that it has looked at: samples may not be, that is biased; point masses may."""
    probing = replace(method, controller='probe')
    points = isinstance(method, OF_POINT_MASSES) and not isinstance(method, OF_SAMPLES)
    assert probing.lossless == points


def lossy_law(p, q, lenience, beta=1.0):
    """The law [V] of a token of q that p judges with a lenience: min(q, p / lenience) + residual."""
    kept = torch.minimum(q, p / lenience)
    rest = (p / beta - q).clamp(min=0)
    return kept + (1 - kept.sum()) * rest / rest.sum()


@pytest.mark.parametrize('beta', [1.0, 0.6, 1.2])
def test_law_of_via_lossy_sd(beta):
    """slim judges, the target never: min(q, s / keep) + norm((s / beta - q)+), token by token."""
    target = Table(1, 3)
    draft = Table(2, 3)
    method = lossy_sd(2, keep=0.6, escalate=0.0, beta=beta)
    law = enumerate_law(target, draft, method, 2, temperature=1.0, calibration=SKIP)
    for text, chance in law.items():
        wanted = 1.0
        for i, token in enumerate(text):
            before = (0, *text[:i])
            by_slim = tuple(x + 0.5 for x in before)    # slim wrote all that it reads, from the root on
            s = probs(target.row(by_slim))
            q = probs(draft.row(before))
            wanted *= float(lossy_law(s, q, 0.6, beta)[token])
        assert abs(chance / wanted - 1) < 1e-9


def test_law_of_via_slim_bonus():
    """The token behind a block that slim kept follows slim's law; without it, the draft's next block."""
    target = Table(1, 3)
    draft = Table(2, 3)
    for bonus in (True, False):
        method = via(1, keep=0.0, escalate=0.0, slim_bonus=bonus)
        law = enumerate_law(target, draft, method, 2, temperature=1.0, calibration=SKIP)
        for (first, second), chance in law.items():
            begin = probs(draft.row((0,)))
            behind = probs(draft.row((0, first)))
            if bonus:
                behind = probs(target.row((0.5, first + 0.5)))          # slim read both
            assert chance == pytest.approx(float(begin[first] * behind[second]))


def test_via_lossy_sd_refuses_a_beta_below_keep():
    with pytest.raises(ValueError, match='knob beta is 0.5; expected keep'):
        lossy_sd(2, keep=0.6, beta=0.5)


def first_laws():
    """(p, q) [V] of the first token, of the tables that the next tests use."""
    root = (0,)
    p = probs(Table(1).row(root))
    q = probs(Table(2).row(root))
    return p, q


def assert_first_token(method, wanted):
    """Asserts that the first of two tokens follows the law wanted [V], and the second the target's."""
    target = Table(1)
    law = enumerate_law(target, Table(2), method, 2, temperature=1.0)
    for (first, second), chance in law.items():
        after = probs(target.row((0, first)))
        assert chance == pytest.approx(float(wanted[first] * after[second]))


def cascade_law(p, q):
    """The draft's law where its likeliest token is likely enough."""
    return q if q.max() >= 1 - 0.3 else p


def cascade_opt_law(p, q):
    """The draft's law where it is as sure as the target, but for what the two laws differ by."""
    apart = 1 - overlap(p, q)
    return q if q.max() >= p.max() - 0.3 * apart else p


def cascade_tokenv3_law(p, q):
    """The draft's tokens that the target finds likely enough; for the others the target writes."""
    inside = q * (p >= (1 - 0.6) * p.max())
    return inside + (1 - inside.sum()) * p


@pytest.mark.parametrize('name, lam, law', [
    case('via-cascade', 'cascade', 0.3, cascade_law),
    case('via-cascade-opt', 'cascade-opt', 0.3, cascade_opt_law),
    case('via-cascade-tokenv3', 'cascade-tokenv3', 0.6, cascade_tokenv3_law)])
def test_law_of_cascades(name, lam, law):
    """A cascade writes by a law of its own, made of p and q."""
    p, q = first_laws()
    assert_first_token(METHODS[name](1, lam=lam), law(p, q))


@pytest.mark.parametrize('lenience, distance', [
    (0.8, 0.107),
    (0.5, 0.167),
    (0.2, 0.209)])
def test_law_of_lenient(lenience, distance):
    """min(q, p / lenience) + residual; its distance from the target's law is what lab/README.md says."""
    p, q = first_laws()
    wanted = lossy_law(p, q, lenience)
    assert_first_token(METHODS['lenient'](1, lenience=lenience), wanted)
    away = (wanted - p).abs().sum() / 2
    assert float(away) == pytest.approx(distance, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize('knobs, follows', [
    case('specguard-keeps-all', dict(k=1, tau=-math.inf), True),
    case('specguard-keeps-the-most-central', dict(k=2, tau=-math.inf), False),
    case('specguard-keeps-some', dict(k=1, tau=0.5), False)])
def test_law_of_the_draft(knobs, follows):
    """One candidate that always stays is the draft's law; a choice among two, or a judgement, is not."""
    draft = Table(2)
    law = enumerate_law(Table(1), draft, SpecGuard(**knobs), 2, temperature=1.0, **LINES)
    gap = variation(law, exact_law(draft, 2, temperature=0.7))
    assert gap < 1e-9 if follows else gap > 0.01


def pooled(law, n):
    """(the cell of each text, what each cell is expected to hold of n); cells below 5 are one, 'rare'."""
    cells = {}
    expected = Counter()
    for text, chance in law.items():
        cells[text] = text if n * chance >= 5 else 'rare'
        expected[cells[text]] += n * chance
    return cells, expected


def upper_tail(observed, expected):
    """The chance of a chi-square at least as large as that of these counts."""
    statistic = 0.0
    for cell, n in expected.items():
        statistic += (observed[cell] - n) ** 2 / n
    halves = torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


@pytest.mark.slow
@pytest.mark.parametrize('method, right, n', [
    case('sd', Exact(2), True, 2000),
    case('cmasd', strict(3), True, 2000),
    case('sd-wrong-residual', WrongResidual(2), False, 1200),
    case('cmasd-wrong-probe', strict(3, controller='probe'), False, 1200)])
def test_law_by_chi_square(method, right, n):
    """The first two of 5 tokens, drawn by the real generator, follow the law; so should 9,999 of 10,000
    seeds, all four cases together (Bonferroni). Cells that expect fewer than 5 are pooled."""
    target = Table(2, 5)
    draft = Table(7, 5)
    cells, expected = pooled(exact_law(target, 2, temperature=1.0), n)
    assert len(expected) > 10
    s = session(target, draft, [0], 4, temperature=1.0)
    observed = Counter()
    for _ in range(n):
        s.tokens = [0]
        s.room = 4
        cycles = decode(s, replace(method))             # a method serves one text
        while len(s.tokens) < 3:
            next(cycles)
        observed[cells[tuple(s.tokens[1:3])]] += 1
    assert (upper_tail(observed, expected) > 1e-4 / 4) == right


# ------------------------------------------------------------- verify.py: greedy identity, caches

def random_text(rng, number, targets, drafts):
    """(Session, method, the tokens that plain decoding writes) of a greedy text, each at random."""
    target = rng.choice(targets)
    length = rng.choice([1, 2, 5, 9, 50, 63])
    prompt = rng.choices(range(11), k=length)
    draft = target if number % 3 == 0 else rng.choice(drafts)
    gamma = rng.choice([1, 2, 3, 4, 8])
    method = Exact(gamma, draft_temperature=rng.choice([None, 0, 1.0]))
    room = min(rng.randint(1, 20), 64 - len(prompt))
    source = rng.choice([chain, chain, lookup])
    wanted = plain(target, prompt, room)
    eos = frozenset()
    if number % 4:
        eos = frozenset([rng.choice(wanted)])
        first = next(i for i, token in enumerate(wanted) if token in eos)
        wanted = wanted[:first + 1]
    s = session(target, draft, prompt, room, source, number, eos=eos)
    return s, method, wanted


@pytest.mark.parametrize('texts', [
    case('40-texts', 40),
    case('250-texts', 250, slow=True)])
def test_greedy_identity(texts):
    """sd's text is plain decoding's, in fp64, wherever it ends; its caches hold what fresh ones would."""
    rng = random.Random(5)
    targets = [network(seed) for seed in range(4)]
    drafts = [network(seed) for seed in range(10, 14)]
    ended = 0           # texts that end on a token that was accepted: nothing is drafted behind it
    for number in range(texts):
        s, method, wanted = random_text(rng, number, targets, drafts)
        tokens, cycles = write(s, method)
        assert tokens == wanted, (number, method)
        assert s.ended == bool(s.eos)
        for cycle in cycles:
            kept = sum(row['kept'] for row in cycle.judged)
            assert kept == cycle.accepted               # none is judged behind the end
        last = cycles[-1]
        if s.eos and 0 < last.accepted == len(last.tokens):
            ended += 1
        readers = [s.target]
        if s.source is chain:
            readers.append(s.draft)
            for cycle in cycles:
                assert not s.eos.intersection(cycle.drafted[:-1])
        for reader in readers:
            assert trusted(reader, s.tokens) >= len(s.tokens) - 3           # the last cycle may draft nothing
    assert ended > texts / 25


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_draft_that_is_the_target(temperature):
    """accepts everything, with one target pass a cycle; the prompt is not counted."""
    target = network(3)
    s = session(target, target, [1, 2, 3], 30, temperature=temperature)
    _, cycles = write(s, Exact(4))
    for cycle in cycles:
        assert cycle.passes['target/full'][:2] == [1, 5]
    # the root, then three drafted; in the next cycle the unread fourth and the bonus first
    assert cycles[0].passes['draft/full'][:2] == [4, 4]
    assert cycles[1].passes['draft/full'][:2] == [4, 5]
    found = specmini.statistics(cycles, 0.0, {'target/full': 10, 'draft/full': 5})
    assert found['cycles'] == 6
    assert found['acceptance_rate'] == 1 and found['rejection_rate'] == 0
    assert found['block_efficiency'] == 5
    assert found['work'] == 6 + 24 / 2
    assert found['labels'] == dict(draft=24, bonus=6)
    assert found['drafted'] == found['judged'] == found['accepted'] == 24


def test_caches_after_each_cycle():
    """After any commit both caches are as fresh ones, but for the tokens that the next pass reads."""
    s = session(network(0), network(1), [1, 2, 3], 30, temperature=1.0)
    s.read_prompt()
    for _ in decode(s, Exact(4)):
        for reader in (s.target, s.draft):
            assert trusted(reader, s.tokens) >= len(s.tokens) - 2


LOOPED = [      # methods whose greedy text hangs on no draw
    case('ar', METHODS['ar'](), {}),
    case('sd-eos', Exact(3), dict(eos=frozenset([8]))),
    case('sd-draft-self', Exact(3), dict(draft=None)),
    case('sd-payoff', Exact(4, controller='payoff'), {}),
    case('ecsv-spot', METHODS['ecsv-spot'](gamma=3, budget=3), {}),
    case('ecsv-sd-tree', METHODS['sd-tree'](gamma=3), {}),
    case('hedge', METHODS['hedge'](3, side=2, least=0.05), {}),
    case('via', via(3, max_lag=3), {}),
    case('via-most-wrong', via(3, most_wrong=0.2), {}),
    case('specguard', SpecGuard(2, k=1, draft_temperature=0.0, tau=0.72, max_step=4, regenerate='sd'), {}),
    case('sparse', Exact(3), dict(sparse=METHODS['sparse'](**SMALL, rho=0.2, refresh_every=3))),
    case('kept-draft', METHODS['kept-draft'](3, **SMALL, rho=0.2), {})]


def looped_session(settings):
    """A session on a prompt that is long enough for keys to be left out."""
    s = slim_session(3, 12, text=letters)
    s.calibration |= dict(signals=RANGES, sparse=LEARNED)
    s.tokens = s.tokens + LINE[:20]
    s.target = Reader(s.target.model, 64)
    s.draft = Reader(s.draft.model, 64)
    s = replace(s, **settings)
    s.read_prompt()
    return s


@pytest.mark.parametrize('method, settings', LOOPED)
def test_a_text_that_is_broken_off_anywhere_goes_on(method, settings):
    """Wherever Ctrl-C comes, and however often: the same text, of which the target has said as much."""
    whole = looped_session(settings)
    list(decode(whole, replace(method)))
    s = looped_session(settings)
    own = replace(method)
    told = []
    rng = random.Random(1)
    breaks = 0
    while s.room and not s.ended:
        moment = rng.randint(1, 300 + 100 * breaks)             # later and later: a cycle has to fit in
        _, broken = interrupted(moment, lambda: told.extend(decode(s, own)), DECODING)
        breaks += broken
    assert s.tokens == whole.tokens and s.room == whole.room and s.ended == whole.ended
    assert len(verify.tokens_of(told)) <= len(s.tokens) - s.begin and breaks > 3
    heard = [sorted(logp for _, logp in one.heard) for one in (s, whole)]
    assert heard[0] == pytest.approx(heard[1])


class Breaking(Table):
    """A Table whose passes share a count; at 0 one breaks off, when the cache has been written."""

    def __call__(self, *args):
        logits = super().__call__(*args)
        self.left[0] -= 1
        if self.left[0] == 0:
            raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('method, horizon', [
    case('sd', Exact(2), 3),
    case('sd-heuristic', Exact(1, controller='hf-heuristic'), 4),
    case('hedge', METHODS['hedge'](2, least=0, draft_temperature=0.0), 3),
    case('ecsv', ecsv(gamma=1, branches=2), 2)])
def test_law_of_a_text_that_was_broken_off(method, horizon, n):
    """Every draw enumerated, those of the cycle that was broken off in its n-th pass too."""
    target, draft = Breaking(1, 2), Breaking(2, 2)
    target.left = draft.left = [0]
    broken = 0

    def run(s, method):
        nonlocal broken
        target.left[0] = n
        own = replace(method)
        s.read_prompt()
        while s.room:
            with contextlib.suppress(KeyboardInterrupt):
                list(decode(s, own))
        broken += target.left[0] <= 0
        return s.tokens[1:], None
    law = enumerate_law(target, draft, method, horizon, run=run, temperature=1.0)
    assert variation(law, exact_law(target, horizon, temperature=1.0)) < 1e-9 and broken


@pytest.mark.parametrize('method', [
    case('ar', METHODS['ar']()), case('sd', Exact(3)), case('hedge', METHODS['hedge'](3, side=2, least=0)),
    case('ecsv-sd-tree', METHODS['sd-tree'](gamma=3))])
def test_texts_that_take_turns_in_one_cache(method):
    """Each is what it is alone, and no token that the target has judged is heard of again."""
    target, draft = network(0), network(1)
    prompts = [1, 2, 3], [1, 2, 5, 7]
    first, second = [session(target, draft, prompt, 12, temperature=1.0) for prompt in prompts]
    second.target, second.draft = first.target, first.draft
    turns = [decode(first, replace(method)), decode(second, replace(method))]
    while turns:
        turns = [turn for turn in turns if next(turn, None)]
    for s, prompt in zip((first, second), prompts):
        alone = session(target, draft, prompt, 12, temperature=1.0)
        write(alone, method)
        assert s.tokens == alone.tokens and s.heard == []


def test_an_engine_goes_on_with_its_latest_text_alone(pair):
    """Its caches are that text's; what a lossy method writes hangs on who wrote them."""
    engine = specmini.Engine(target=str(pair[1]), draft=str(pair[3]), max_new=9)
    engine.open([[1, 2, 3], [4, 5]])
    method = Exact(2)
    first = engine.start([1, 2, 3], method)
    begun = decode(first, method)
    next(begun)
    latest = engine.start([4, 5], method)
    with pytest.raises(ValueError, match='another text was begun'):
        next(begun)
    assert len(verify.tokens_of(decode(latest, Exact(2)))) == 9


@pytest.mark.parametrize('method', [
    case('cmasd-oracle', Exact(3, controller='oracle')),
    case('sd-heuristic', Exact(3, controller='hf-heuristic')),
    case('ecsv-two', TwoDrafts(gamma=3, second='given')),
    case('ecsv-checked', METHODS['ecsv-checked'](gamma=3)),
    case('kept-draft', METHODS['kept-draft'](3, **SMALL, rho=0.2))])
def test_a_method_that_has_served_a_shorter_text(method, monkeypatch):
    """It is to serve one text; whatever it remembers of another, the greedy text is right, and counted."""
    target, draft = network(0), network(1)
    monkeypatch.setattr('lab.ecsv.rivals.second_draft', partial(fixed, draft))
    own = replace(method)
    for prompt, room in (([1, 2, 3], 6), ([1, 2, 3], 12), ([5, 2], 40)):
        s = session(target, draft, prompt, room)
        s.read_prompt()
        cycles = list(decode(s, own))
        assert verify.tokens_of(cycles) == plain(target, prompt, room)
        if 'target/choosing' not in cycles[0].passes:
            assert cycles[0].passes['draft/full'][0] > 0


def test_commit_cuts_at_the_end_of_sequence():
    """Whatever a method commits: what stands behind the first end of sequence is dropped."""
    s = session(network(), None, [1], 9, eos=frozenset([3]))
    assert s.commit([5, 6]) == [5, 6]
    assert s.room == 7 and not s.ended
    assert s.commit([7, 3, 8, 3]) == [7, 3]
    assert s.tokens == [1, 5, 6, 7, 3]
    assert s.room == 5 and s.ended


def test_commit_cuts_at_the_room():
    """An end of sequence that no longer fits does not end the text."""
    s = session(network(), None, [1], 2, eos=frozenset([3]))
    assert s.commit([5, 6, 3]) == [5, 6]
    assert s.room == 0 and not s.ended


@pytest.mark.parametrize('eos, length', [((2, 3), 1), ((4,), 2), ((2, 8), 3), ((2, 5), 4)])
def test_drafting_stops_where_all_branches_have_ended(eos, length, monkeypatch):
    """Each in its own place; whatever controls the length."""
    steps = iter([[2, 3], [4, 4], [5, 8], [6, 7]])
    model = network(0)
    s = session(model, model, [1], 9, eos=frozenset(eos))
    monkeypatch.setattr(s, 'draw', lambda p: torch.tensor(next(steps)))
    found = sample_branches(s, s.draft, model.full, 2, Exact().plan(s, 4))
    assert found.tokens.shape[1] == length


@pytest.mark.parametrize('text, found', [
    case('three-in-common', '123459123', '459'),
    case('three-beat-two', '12340235123', '402'),
    case('the-latest-of-two', '12312412', '412'),
    case('never-seen', '123', ''),
    case('too-short', '1', '')])
def test_lookup(text, found):
    """What followed the last occurrence of the text's last three tokens, else of its last two (digits)."""
    ids = [int(digit) for digit in text]
    s = session(network(), None, ids, 9, lookup)
    draft = lookup(s, Plan(3, None, None))
    assert ''.join(map(str, draft.tokens)) == found


def test_lookup_drafts_point_masses():
    s = session(network(), None, [1, 2, 3, 1, 2], 9, lookup)
    draft = lookup(s, Plan(3, None, None))
    wanted = torch.nn.functional.one_hot(torch.tensor([3, 1, 2]), 11)
    assert torch.equal(draft.q, wanted.to(draft.q))


# ------------------------------------------------------------- verify.py: what a device is asked

FAR = torch.device('meta')      # the device that the next tests pretend


class Far(torch.Tensor):
    """A tensor that says it is on FAR, as does all that is computed of it; it is on the CPU."""
    device = FAR


class Waits(TorchFunctionMode):
    """Counts what makes the host wait: numbers fetched from FAR, and copies to it that block.

    Python's calls alone are seen: not what a kernel does within.
    """
    FETCHES = 'item', 'tolist', 'cpu', 'numpy', '__bool__', '__int__', '__float__', '__index__', 'nonzero'

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.__name__
        is_far = isinstance(args[0], Far) if args else False
        to_far = kwargs.get('device') == FAR or name == 'to' and FAR in args[1:]
        to_cpu = name == 'cpu' or name == 'to' and 'cpu' in map(str, args[1:])
        if is_far and (name in self.FETCHES or to_cpu):
            self.count += 1
        if is_far and name in ('__getitem__', '__setitem__'):
            self.count += on_the_host(args[1])
        if to_far and name in ('to', 'tensor', 'as_tensor', 'new_tensor'):
            self.count += not is_far and not kwargs.get('non_blocking')
        if to_far:
            kwargs.pop('device', None)
            args = ['cpu' if arg == FAR else arg for arg in args] if name == 'to' else args
        result = func(*args, **kwargs)
        if to_far:
            return result.as_subclass(Far)
        return result.as_subclass(torch.Tensor) if to_cpu else result


def on_the_host(index):
    """Whether an index of a tensor on FAR holds a list or a tensor of the host's, which is copied then."""
    for part in index if isinstance(index, tuple) else (index,):
        here = isinstance(part, torch.Tensor) and part.ndim and not isinstance(part, Far)
        if here or isinstance(part, (list, range)):
            return True
    return False


@pytest.mark.parametrize('wait', [
    case('item', lambda x: x[0].item()),
    case('float', lambda x: float(x[0])),
    case('comparison', lambda x: bool(x[0] > x[1])),
    case('tolist', lambda x: x.softmax(-1).tolist()),
    case('list-as-index', lambda x: x[[0, 2]]),
    case('range-as-index', lambda x: x[range(2)]),
    case('tensor-as-index', lambda x: x[torch.tensor([0, 2])]),
    case('blocking-copy', lambda x: torch.tensor([1, 2], device=x.device)),
    case('copy-by-to', lambda x: torch.tensor([1, 2]).to(x.device)),
    case('fetch', lambda x: fetch(x, x > 1)[1].tolist())])
def test_a_wait_is_counted(wait):
    """Once; what stays on the device, and ids that are sent there, are none."""
    x = torch.rand(3).as_subclass(Far)
    with Waits() as waits:
        ids = send([0, 2], x.device)
        assert isinstance(x[ids] + torch.arange(2, device=x.device), Far)
        assert waits.count == 0
        wait(x)
    assert waits.count == 1


def test_fetch_keeps_what_it_carries():
    """Ids, flags and floats come back as they are, in their shapes; on a CPU nothing is copied."""
    ids = torch.tensor([[2 ** 40 + 1], [3]])
    flags = torch.tensor([True, False])
    carried = [ids, flags, torch.rand(2, 1, 3), torch.tensor(0.1)]
    with Waits():
        found = fetch(*[x.as_subclass(Far) for x in carried])
    for x, here in zip(carried, found):
        assert type(here) is torch.Tensor
        assert here.dtype == x.dtype
        assert torch.equal(here, x)
    assert all(x is here for x, here in zip(carried, fetch(*carried)))


def far_session(draft=None, **settings):
    """A Session of a random pair, or of this draft, whose passes are computed on FAR."""
    pair = [network(0, num_hidden_layers=4), draft or network(1)]
    for model in pair:
        model.cos = model.cos.as_subclass(Far)
    measured = dict(mask=dict(skip=[3, 5]), signals=RANGES)
    s = session(*pair, [1, 2, 3], 30, text=letters, calibration=measured, **settings)
    s.read_prompt()
    return s


def one(cycle):
    """The token."""
    return 1


def two(cycle):
    """The drafted ids, then everything that the rule looks at."""
    return 2


def two_and_one_a_token(cycle):
    """And the confidence in each drafted token."""
    return 2 + len(cycle.drafted)


def one_a_stage(cycle):
    """The drafted ids, slim's verdict, the target's where it has one, and what it says of slim's tokens."""
    return 2 + cycle.passes.get('target/full', [0])[0] + (len(cycle.heard) > 0)


def one_a_pass_and_two(cycle):
    """The token of each row, whose text says whether its step is over; the central one, and q of it."""
    return 2 + sum(passes for passes, _, _ in cycle.passes.values())


@pytest.mark.parametrize('temperature', [0.0, 0.8])
@pytest.mark.parametrize('name, knobs, most', [
    ('ar', {}, one),
    ('sd', {}, two),
    ('ecsv', {}, two),
    ('cmasd', {}, two_and_one_a_token),
    ('via', {}, one_a_stage),
    ('specguard', dict(max_step=6), one_a_pass_and_two)])
def test_waits_of_a_cycle(name, knobs, most, temperature):
    """So often, and no oftener, does the host wait for a device in any cycle."""
    with Waits() as waits:
        s = far_session(temperature=temperature)
        before = waits.count
        for cycle in decode(s, METHODS[name](**knobs)):
            allowed = most(cycle) if cycle.drafted else 1           # the room's last token is not drafted
            assert waits.count - before == allowed
            before = waits.count
    assert s.room == 0


@pytest.mark.parametrize('name, broken', [
    ('ar', 'target'), ('sd', 'draft'), ('sd', 'target'), ('ecsv', 'draft'), ('ecsv', 'target'),
    ('sd-multi', 'draft'), ('sd-multi', 'target'), ('specguard', 'draft'), ('specguard', 'target')])
def test_a_device_is_not_believed_blindly(name, broken):
    """Logits that overflowed there are found in what is fetched: nothing of them is committed."""
    knobs = dict(tau=math.inf) if name == 'specguard' else {}
    with Waits():
        s = far_session(temperature=1.0)
        s.readers()[broken].model.lm_head.weight[3] = math.inf
        with pytest.raises(ValueError, match=f'the {broken} computed NaN or infinity after 3 tokens'):
            next(decode(s, METHODS[name](**knobs)))
    assert len(s.tokens) == 3


@pytest.mark.parametrize('name', ['sd', 'ecsv', 'ar'])
@pytest.mark.parametrize('ends', [False, True])
def test_a_device_writes_the_greedy_text(name, ends):
    """What was drafted behind an end of sequence, where nobody looked, is cut; the draft is the target."""
    wanted = plain(network(0, num_hidden_layers=4), [1, 2, 3], 30)
    eos = frozenset(wanted[12:13]) if ends else frozenset()
    if ends:
        wanted = wanted[:wanted.index(wanted[12]) + 1]
    with Waits():
        s = far_session(network(0, num_hidden_layers=4), eos=eos)
        tokens, cycles = write(s, METHODS[name]())
    assert tokens == wanted
    for cycle in cycles:
        assert not eos.intersection(cycle.drafted[:-1])


# ------------------------------------------------------------------------ CM-ASD: signals, window, threshold

def random_logits():
    """[50, 9]"""
    return torch.randn(50, 9, generator=seeded(), dtype=torch.float64)


def signals_of(logits):
    """The three signals of each row, [n, 3]."""
    return torch.tensor(verify.confidence_signals(logits), dtype=torch.float64)


def test_cmasd_signals_by_formula():
    """Entropy's share and the logit margin of the paper, written out; the third is q1 - q2."""
    logits = random_logits()
    q = logits.softmax(-1)
    entropy = -(q * q.log()).sum(-1)
    best = logits.topk(2).values
    likeliest = q.topk(2).values
    found = signals_of(logits)
    assert torch.allclose(found[:, 0], 1 - entropy / math.log(9))
    assert torch.allclose(found[:, 1], torch.tanh((best[:, 0] - best[:, 1]) / 2))
    assert torch.allclose(found[:, 2], likeliest[:, 0] - likeliest[:, 1])


def test_cmasd_signals_grow_with_sharpness_within_0_to_1():
    logits = random_logits()
    found = signals_of(logits)
    assert (signals_of(logits * 1.1) > found).all()
    assert (found >= 0).all()
    assert (found <= 1).all()
    flat = torch.zeros(1, 9)
    sharp = torch.eye(9)[:1] * 1e4
    assert verify.confidence_signals(flat) == [pytest.approx([0, 0, 0], abs=1e-6)]
    assert verify.confidence_signals(sharp) == [pytest.approx([1, 1, 1])]


def test_cmasd_confidence_is_the_weighted_mean():
    logits = random_logits()
    found = signals_of(logits)
    entropy_alone = CmAsd(lam_margin=0, lam_softmax=0)
    assert CmAsd().confidence_window.confidence(logits) == pytest.approx(found.mean(-1).tolist())
    assert entropy_alone.confidence_window.confidence(logits) == pytest.approx(found[:, 0].tolist())
    uneven = CmAsd(lam_entropy=2, lam_margin=1, lam_softmax=1)
    wanted = found @ torch.tensor([0.5, 0.25, 0.25]).double()
    assert uneven.confidence_window.confidence(logits) == pytest.approx(wanted.tolist())


def test_cmasd_window_by_hand():
    """floor(alpha C k_max), within k_min and k_max; what is not a number is refused, not rounded."""
    window = CmAsd(k_min=2, k_max=10, alpha=0.9).confidence_window
    lengths = [window.length(confidence) for confidence in (0, 0.1, 0.5, 1)]
    assert lengths == [2, 2, 4, 9]
    assert CmAsd().confidence_window.length(1) == 10
    with pytest.raises(ValueError, match='weights overflow'):
        window.length(math.nan)


def test_cmasd_threshold_by_hand():
    """tau_base + gamma_tau (1 - C), clipped to 0.01..1."""
    class ScoreOfThree:
        draft = Draft([], None, notes=[dict(confidence=1), dict(confidence=0.75), dict(confidence=0)])

    method = CmAsd(tau_base=0.2, gamma_tau=2.0)
    found = [method.threshold(ScoreOfThree, i) for i in range(3)]
    assert found == pytest.approx([0.2, 0.7, 1.0])
    assert CmAsd(tau_base=0.0, gamma_tau=2.0).threshold(ScoreOfThree, 0) == 0.01


def test_cmasd_block_ends_behind_the_token_that_fills_its_window():
    """The window is that of the mean confidence of the block so far: no token is dropped unverified."""
    method = CmAsd(k_max=8, alpha=1.5, tau_base=1.0)
    model = network(0, vocab=30)                        # it drafts for itself: every token is kept
    _, cycles = write(session(model, model, [1], 60, temperature=1.0), method)
    lengths = set()
    for cycle in cycles[:-2]:                           # the room cuts the last ones
        sure = [judged['confidence'] for judged in cycle.judged]
        for i in range(1, len(sure) + 1):
            is_full = i >= method.confidence_window.length(sum(sure[:i]) / i)
            assert is_full == (i == len(cycle.drafted))
        lengths.add(len(cycle.drafted))
    assert len(lengths) > 2


@pytest.mark.slow
def test_cmasd_with_a_fixed_window_and_tau_1_is_sd():
    """Token by token, with the same random numbers."""
    target = network(0, vocab=30)
    draft = network(1, vocab=30)
    found = []
    for method in (Exact(4), CmAsd(4, controller='fixed', tau_base=1.0, gamma_tau=0)):
        s = session(target, draft, [1], 40, temperature=1.0)
        tokens, cycles = write(s, method)
        labels = [cycle.labels for cycle in cycles]
        found.append((tokens, labels))
    exact, same = found
    assert exact == same


# ------------------------------------------------------------------------ length controllers

def uncut_lengths(cycles, room):
    """The lengths of the blocks that the end of the room did not cut."""
    lengths = set()
    for cycle in cycles:
        if len(cycle.drafted) < room - 1:
            lengths.add(len(cycle.drafted))
        room -= len(cycle.tokens)
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize('controller', verify.CONTROLLERS)
@pytest.mark.parametrize('name', ['sd', 'cmasd', 'ecsv'])
def test_cmasd_controllers_write_the_greedy_text(name, controller):
    """Plain decoding's text with every controller; blocks vary in length, but for the fixed controller's."""
    knobs = dict(tau_base=1.0) if name == 'cmasd' else {}
    method = METHODS[name](3, controller=controller, **knobs)
    target = network(0)
    wanted = plain(target, [1, 2], 40)
    lengths = set()
    for draft in (target, network(1)):
        tokens, cycles = write(session(target, draft, [1, 2], 40), method)
        assert tokens == wanted
        lengths |= uncut_lengths(cycles, 40)
    if controller != 'payoff':              # to which a draft as dear as the target pays hardly ever
        assert (len(lengths) == 1) == (controller == 'fixed'), lengths


@pytest.mark.slow
@pytest.mark.parametrize('controller', verify.CONTROLLERS)
def test_cmasd_controllers_where_nothing_has_a_confidence(controller):
    """A block that was looked up has no logits: every controller still gives plain decoding's text."""
    target = network(0)
    tokens, _ = write(session(target, network(1), [1, 2], 40, lookup), Exact(3, controller=controller))
    assert tokens == plain(target, [1, 2], 40)


@pytest.mark.slow
@pytest.mark.parametrize('controller', verify.CONTROLLERS)
def test_cmasd_controllers_with_via(controller):
    """With this gate via's text is the target's too."""
    s = slim_session()
    method = METHODS['via-two-level'](3, controller=controller)
    assert write(s, method)[0] == plain(s.target.model, [1, 2, 3], 24)


def learner(name):
    """A controller of sd with gamma 3."""
    return verify.CONTROLLERS[name](3, verify.Window())


def kept_of_block(kept):
    """A finished cycle that kept so many draft tokens."""
    return verify.Cycle([5] * 4, [], [5] * kept, ['draft'] * kept, {}, 0.0)


def four_tokens():
    """A Draft of four tokens, each of them less likely than the one before."""
    logits = torch.zeros(4, 9)
    logits[:, 5] = torch.tensor([4.0, 3.0, 2.0, -1.0])
    return Draft([5] * 4, logits.softmax(-1), logits)


def test_cmasd_rivals_heuristic_by_hand():
    """Two more after a block that was kept whole, else one less, never none."""
    controller = learner('hf-heuristic')
    draft = four_tokens()
    sizes = []
    for kept in (4, 4, 3, 0, 0, 0, 0, 0, 0):
        controller.learn(draft, kept_of_block(kept))
        sizes.append(controller.length(None))
    assert sizes == [5, 7, 6, 5, 4, 3, 2, 1, 1]


def test_cmasd_rivals_roc_by_hand():
    """The limit at which no good token is stopped and no bad one passes, once more than five are judged."""
    controller = learner('hf-roc')
    draft = four_tokens()
    controller.learn(draft, kept_of_block(3))
    assert controller.limit == 0.4
    controller.learn(draft, kept_of_block(3))
    assert controller.limit == pytest.approx(float(draft.q[2, 5]))


def test_cmasd_rivals_moving_average_by_hand():
    """Its limit rises until the rate is 0.9; above that it falls, but not after a block of full length."""
    controller = learner('moving-average')
    draft = four_tokens()
    for kept, rate, limit in ((4, 0.5, 0.601), (0, 0.25, 0.602), (4, 0.625, 0.603)):
        controller.learn(draft, kept_of_block(kept))
        assert (controller.rate, controller.limit) == pytest.approx((rate, limit))
    controller.rate = 1.0
    controller.learn(draft, kept_of_block(4))
    assert controller.limit == pytest.approx(0.602)
    controller.most = 4
    controller.learn(draft, kept_of_block(4))
    assert controller.limit == pytest.approx(0.602)


def test_cmasd_rivals_closed_loop_by_hand():
    """alpha times a moving average of the acceptance rates 3/4 and 0."""
    controller = learner('closed-loop')
    draft = four_tokens()
    controller.learn(draft, kept_of_block(3))
    assert controller.window.alpha == controller.rate == 0.875
    controller.learn(draft, kept_of_block(0))
    assert controller.window.length(1.0) == 4             # alpha 0.4375, of 10


def noted(*largest):
    """The notes on a block of tokens with these largest probabilities."""
    return [dict(largest=q) for q in largest]


def test_cmasd_rivals_product_by_hand():
    """One doubt stops a block that a mean would let run on; several small ones do, too."""
    controller = learner('product')
    asked = [noted(0.9, 0.9), noted(*[0.9] * 6), noted(*[0.9] * 7), noted(*[1.0] * 9, 0.45)]
    assert [controller.goes_on(None, notes) for notes in asked] == [True, True, False, False]
    note = {}
    logits = torch.tensor([0.2, 0.7, 0.1]).log()[None]
    controller.look([torch.tensor([0])], [logits], note)
    assert note['largest'] == pytest.approx(0.7)        # whatever was drawn


def test_cmasd_rivals_payoff_by_hand():
    """A token is drafted if the chance that it is kept exceeds its cost at the rate so far."""
    controller = learner('payoff')
    controller.cost = 0.5
    assert controller.goes_on(None, noted(0.9))         # 0.9 > 0.5 (1 + 0.9) / 1.5
    notes = noted(0.9, 0.6)
    assert controller.goes_on(None, notes[:1])
    assert not controller.goes_on(None, notes)          # 0.54 < 0.5 (1 + 0.9 + 0.54) / 2
    drafted = [5, 5, 5]
    judged = [dict(kept=True), dict(kept=False)]        # what is behind the first miss says nothing
    cycle = verify.Cycle(drafted, judged, [5, 6], ['draft', 'target'], {}, 0.0)
    controller.learn(Draft(drafted, None, notes=noted(0.95, 0.75, 0.75)), cycle)
    assert (controller.tokens, controller.time) == (2, 2.5)
    assert controller.chance(dict(largest=0.75)) == pytest.approx((0 + 2 * 0.75) / 3)
    assert controller.chance(dict(largest=0.95)) == pytest.approx((1 + 2 * 0.95) / 3)
    # 0.9 is now worth 2.8 / 3, the next token is kept in (1 + 1) / (2 + 1); the rate is 2 + 1 + 2.8 / 3
    for price, wanted in ((0.6, True), (0.7, False)):
        controller.cost = price
        assert controller.goes_on(None, noted(0.9)) == wanted


def test_cmasd_rivals_payoff_counts_weight_bytes():
    """Without a draft model it is the share of the target's weights that the slim path reads."""
    target, draft = network(0), network(1, num_hidden_layers=1)
    for one, share in ((draft, draft.read_bytes(draft.full)), (None, None)):
        s = session(target, one, [1, 2], 20, calibration=SKIP)
        method = Exact(controller='payoff')
        method.control.length(s)
        share = share or target.read_bytes(s.slim_path)
        assert method.control.cost == share / target.read_bytes(target.full) < 1


def note_decisions(decisions, tokens, cycles, most):
    """Notes of each token of a block, where there was room for another, whether there was another.

    decisions: {(text before the block, its tokens so far): what was decided}. most: tokens of a block.
    """
    place = 0
    for cycle in cycles:
        room = len(tokens) - place - 1
        for i in range(1, min(len(cycle.drafted) + 1, room, most)):
            known = str((tokens[:place], cycle.drafted[:i]))
            decisions.setdefault(known, set()).add(i < len(cycle.drafted))
        place += len(cycle.tokens)


def control(name, draft, minds, method=None, **constants):
    """A case of the next test: a controller, the draft's Table, and how it decides.

    minds: 'one', 'by the block', or 'by the past' where it learns. constants: of its class, so that the five
    tokens of a toy can move it.
    """
    return case(f'sd-{name}', name, Table(draft, 2), minds, method or Exact(2), constants)


WINDOWED = cmasd(k_max=3, accept_='strict')
CONTROLLED = [
    control('fixed', 2, 'one'),
    control('online', 2, 'by the block', WINDOWED),
    control('lagged', 2, 'by the past', WINDOWED),
    control('closed-loop', 6, 'by the past', strict(3)),
    control('probe', 2, 'by the past', strict(3)),          # in truth by tokens that it drops
    control('hf-confidence', 2, 'by the block', limit=0.5),
    control('hf-heuristic', 2, 'by the past', Exact(1)),
    control('hf-roc', 2, 'by the past', limit=0.5, enough=1),
    control('moving-average', 6, 'by the past', limit=0.5, pace=20),
    control('product', 2, 'by the block', limit=0.7),
    control('payoff', 2, 'by the past', cost=0.5),
    control('oracle', 2, 'by the block')]


@pytest.mark.parametrize('name, draft, minds, method, constants', CONTROLLED)
def test_law_of_controllers(name, draft, minds, method, constants, monkeypatch):
    """Every draw enumerated: the target's law, though a block goes on here and ends there; probe misses it.

    One that never changes its mind fails: its law is that of a fixed length. One that learns has to decide
    differently behind the same tokens. `-k "law and controllers"` selects all, `-k "law and lagged"` one.
    """
    for constant, value in constants.items():
        monkeypatch.setattr(verify.CONTROLLERS[name], constant, value)
    temperature = 0.0 if name == 'oracle' else 1.0          # it knows a greedy text only
    horizon = 4 if name == 'probe' else 5                   # which drafts three tokens every time
    method = replace(method, controller=name)
    most = 2 if name == 'fixed' else getattr(method, 'k_max', 99)       # tokens of a block, whoever decides
    decisions = {}

    def run(s, method):
        tokens, cycles = write(s, method)
        note_decisions(decisions, tokens, cycles, most)
        return tokens, cycles
    target = Table(1, 2)
    law = enumerate_law(target, draft, method, horizon, run=run, temperature=temperature)
    gap = variation(law, exact_law(target, horizon, temperature=temperature))
    assert gap < 1e-9 if method.lossless else gap > 0.01
    assert method.lossless == (name != 'probe')
    kinds = set().union(*decisions.values())
    changed = any(len(both) > 1 for both in decisions.values())
    assert kinds == ({True} if minds == 'one' else {True, False})
    assert changed == (minds == 'by the past')


def test_law_of_controllers_has_them_all():
    assert {one.values[0] for one in CONTROLLED} == set(verify.CONTROLLERS)


def test_cmasd_rivals_oracle_stops_at_the_first_error():
    _, cycles = write(session(network(0), network(1), [1], 40), Exact(controller='oracle'))
    for cycle in cycles[:-1]:
        verdicts = [judged['kept'] for judged in cycle.judged]
        assert all(verdicts[:-1])
        assert len(verdicts) < len(cycle.drafted) or not verdicts[-1]


# ------------------------------------------------------------------------ confidence by dropout

def thinned(**knobs):
    return METHODS['cmasd-dropout'](k_max=6, alpha=2, **knobs)


def written_by(method, seed=3, temperature=1.0):
    """(tokens, cycles) of a random pair."""
    return write(session(network(0), network(1), [1, 2], 30, seed=seed, temperature=temperature), method)


def all_judged(cycles):
    return [judged for cycle in cycles for judged in cycle.judged]


@pytest.mark.slow
def test_cmasd_dropout_confidence_is_in_0_to_1_and_its_seeds_own():
    method = thinned(rows=5, drop=0.3)
    judged = []
    for seed in (3, 3, 4):
        _, cycles = written_by(method, seed)
        judged.append(all_judged(cycles))
    first, again, other = judged
    assert first == again
    assert first != other
    sure = [row['confidence'] for row in first]
    assert 0 <= min(sure) < 0.9 < max(sure) <= 1


def test_cmasd_dropout_sets_tau_and_its_passes_count():
    """Each of the rows reads one position a draft token, and the ledger says so."""
    _, cycles = written_by(thinned(rows=5, drop=0.3))
    for cycle in cycles:
        _, positions, *_ = cycle.passes.get('draft/full dropout', [0, 0])
        assert positions == 5 * len(cycle.drafted)
        for judged in cycle.judged:
            assert judged['threshold'] == min(1, 0.3 + 0.5 * (1 - judged['confidence']))


def test_cmasd_dropout_of_nothing_is_sure_of_q():
    """Whole networks agree: their spread is 0, their mean q."""
    _, cycles = written_by(thinned(drop=0.0))
    for judged in all_judged(cycles):
        assert judged['confidence'] == pytest.approx(1)
        assert judged['mean'] == pytest.approx(judged['q'])


def test_cmasd_dropout_reaches_both_ends(monkeypatch):
    """0 where one sample alone gives the token a chance, 1 where all give it the same."""
    def two_tokens(method, session):
        return Draft([5, 6], None)

    def samples(session, tokens):
        return torch.tensor([[0.9, 0.2], [0.0, 0.2], [0.0, 0.2]])
    monkeypatch.setattr(CmAsd, 'propose', two_tokens)
    method = thinned(rows=3)
    method.samples = samples
    first, second = method.propose(None).notes
    assert first['confidence'] == pytest.approx(0, abs=1e-6)
    assert second['confidence'] == pytest.approx(1)


@pytest.mark.slow
def test_cmasd_dropout_is_exact_at_tau_1():
    assert thinned(tau_base=1).lossless
    assert not thinned().lossless
    tokens, _ = written_by(thinned(tau_base=1), temperature=0.0)
    assert tokens == plain(network(0), [1, 2], 30)


@pytest.mark.slow
def test_cmasd_dropout_of_the_slim_path():
    """Without a draft model the target's slim path drafts, and is thinned."""
    s = replace(slim_session(), draft=None)
    tokens, cycles = write(s, thinned(tau_base=1))
    assert tokens == plain(network(0, num_hidden_layers=4), [1, 2, 3], 24)
    assert any('target/slim dropout' in cycle.passes for cycle in cycles)


# ------------------------------------------------------------------------ rules of acceptance

def score_of_four():
    """A Score of four draft tokens of full confidence; p of each is 0.38, 0.23, 0.38 and 0.02, max p 0.38."""
    draft = Draft([0, 1, 2, 3], torch.ones(4, 4), notes=[dict(confidence=1.0)] * 4)
    score = verify.Score(session(network(), None, [1], 2), draft, None)
    row = [3.0, 3.0 + math.log(0.6), 3.0, 0.0]
    score.logits = torch.tensor([row] * 5, dtype=torch.float64)
    return score


@pytest.mark.parametrize('name, knobs, wanted', [
    ('cmasd', dict(tau_base=0.59), [1, 1, 1, 0]),
    ('cmasd', dict(tau_base=0.61), [1, 0, 1, 0]),
    ('cmasd', dict(tau_base=1.0), [1, 0, 0, 0]),
    ('cmasd-prob', dict(tau_base=0.37), [1, 0, 1, 0]),
    ('cmasd-typical', dict(tau_base=0.3, delta=1.0), [1, 0, 1, 0]),
    ('cmasd-specdec', dict(tolerance=0.6), [1, 1, 1, 0]),
    ('cmasd-specdec', dict(tolerance=9.0, top_beta=2), [1, 0, 1, 0])])
def test_cmasd_rules_by_hand(name, knobs, wanted):
    """A tie with the best is kept below tau = 1, where only the match is."""
    method = METHODS[name](**knobs)
    score = score_of_four()
    verdicts = [method.chance(score, i) for i in range(4)]
    assert verdicts == wanted


@pytest.mark.parametrize('epsilon, delta, limit', [
    (0.09, 0.3, 0.09), (0.3, 0.09, 0.05457), (0.3, 0.3, 0.18190)])
def test_cmasd_rivals_typical_by_hand(epsilon, delta, limit):
    """Medusa's two numbers, 0.09 and 0.3, are easily swapped; exp(-H) is 0.6063 here."""
    score = score_of_four()
    score.p = torch.tensor([[0.2, 0.8]])
    score.pq = [(0.2, 1.0)]
    method = METHODS['typical'](epsilon=epsilon, delta=delta)
    assert method.threshold(score, 0) == pytest.approx(limit, abs=1e-4)
    assert method.chance(score, 0) == 1
    assert METHODS['typical']().threshold(score, 0) == pytest.approx(0.09)


# ------------------------------------------------------------------------ CM-ASD: what the claims rest on

SURE = torch.tensor([0.95, 0.9, 0.5, 0.5, 0.1]).numpy()
HITS = torch.tensor([True, True, True, False, False]).numpy()


def test_cmasd_area_by_hand():
    """Of six pairs five are in order, one is a tie; without a miss there is no area."""
    owner = torch.zeros(5, dtype=torch.long).numpy()
    once = torch.ones(1).numpy()
    ranking = cmasd_claims.Ranking(SURE, HITS, owner, 1)
    assert ranking.area(once) == pytest.approx(5.5 / 6)
    all_good = cmasd_claims.Ranking(SURE, HITS | True, owner, 1)
    assert math.isnan(all_good.area(once))


def test_cmasd_area_of_resampled_texts():
    """With weights it is the area of texts that are there so often."""
    generator = seeded()
    scores = torch.randint(8, (60,), generator=generator) / 8               # with ties
    hits = torch.rand(60, generator=generator) < 0.7
    owner = torch.randint(4, (60,), generator=generator)
    weights = torch.tensor([2, 0, 1, 3])
    ranking = cmasd_claims.Ranking(scores.numpy(), hits.numpy(), owner.numpy(), 4)
    times = weights[owner]
    all_scores = scores.repeat_interleave(times)
    all_hits = hits.repeat_interleave(times)
    wanted = roc_area(all_scores, all_hits)
    assert ranking.area(weights.numpy()) == pytest.approx(wanted)


def test_cmasd_reliability_by_hand():
    curve, error = cmasd_claims.reliability(SURE, HITS, bins=2)
    assert [count for _, _, count in curve] == [1, 4]
    assert [rate for _, rate, _ in curve] == [0, 0.75]
    assert error == pytest.approx((0.1 + 4 * abs(0.7125 - 0.75)) / 5)


def test_cmasd_between_by_hand():
    """Linear between two points, beyond them the nearest."""
    points = [(0.9, 4.0), (1.0, 2.0), (0.8, 8.0)]
    found = [cmasd_claims.between(points, aim) for aim in (0.5, 0.85, 0.9, 0.95, 1.0)]
    assert found == pytest.approx([8, 6, 4, 3, 2])


def replayed_texts(price=0.0):
    """Two texts of 30 tokens: `fixed 3`, `fixed 5` and `online`, which is as `fixed 4` would be."""
    strict = {'fixed 3': [24, 8, 24, 12.0], 'fixed 5': [26, 6, 30, 13.0], 'online 1.0 10': [25, 7, 27, 12.0]}
    default = [25, 7, 27, 12.0, 27, 30, 1, 1.0, 1.0, 1]
    rules = dict(strict=list(strict), runs=['default'], windowed=['tau 0.5, fixed 3'])
    row = dict(family='math', tokens=30, right=1, strict=list(strict.values()), runs=[default],
               windowed=[[24, 8, 24, 30, 1.0]], hits='01',
               signals=dict(entropy=[0.5, 0.95], margin=[0.5, 0.95], softmax=[0.5, 0.95]))
    return cmasd_claims.Texts([row, row], rules, price)


def test_cmasd_confidences_have_a_price():
    """A rule that looks at a token's confidence pays for it in steps; a fixed window does not."""
    for price, wanted in ((0.0, 1.0), (0.1, 12.0 / (12.0 + 2.7))):
        texts = replayed_texts(price)
        assert texts.best('fixed') == 'fixed 3'
        assert texts.best_pace('online') / texts.best_pace('fixed') == pytest.approx(wanted)
        assert texts.pace(texts.runs['default']) == pytest.approx(texts.best_pace('online'))
        assert cmasd_claims.beside_best_fixed(texts) == pytest.approx(wanted)


def test_cmasd_windows_are_compared_at_equal_positions():
    """The default reads 34 / 30 positions a token; between 32 (3 kept a cycle) and 36 (26 / 6) lies 34."""
    wanted = (25 / 7) / ((3 + 26 / 6) / 2)
    assert cmasd_claims.over_fixed(replayed_texts()) == pytest.approx(wanted)


def test_cmasd_area_below_a_sure_confidence():
    """Only tokens of C below 0.9 are ranked: here all of them are wrong, so that there is no area."""
    texts = replayed_texts()
    assert texts.area('C') == 1
    assert math.isnan(texts.area('unsure'))


def test_cmasd_blocks_along_a_text_by_hand():
    """Blocks of 2 and 1 tokens judged end at the misses; weights count a text twice."""
    hits = torch.tensor([True, False, False, True, True, True, True]).numpy()
    assert cmasd_claims.strict_blocks(hits, 3) == [(2, 1), (1, 0), (3, 3)]
    assert cmasd_claims.strict_blocks(hits, 2) == [(2, 1), (1, 0), (2, 2), (1, 1)]
    texts = replayed_texts()                            # two texts, a miss and a hit each
    once = cmasd_claims.accepted_by_place(texts, 2)
    assert once == [(4, 2), (0, 0)]
    assert cmasd_claims.accepted_by_place(texts.drawn([0, 0, 1]), 2)[0] == (6, 3)


def test_cmasd_claims_of_records_that_are_there():
    """No record, no claim; one record gives its own claims, of families that its rows name."""
    assert cmasd_claims.claims({}) == cmasd_claims.tables({}) == []
    rows = [dict(family='sums', fixed=1.0, online=0.5), dict(family='news', fixed=1.0, online=2.0)]
    claim, = cmasd_claims.claims(dict(paired=common.Stored({}, rows)))
    assert claim.figure(claim.rows) == pytest.approx((2 + 0.5) / 2)


def test_cmasd_adaptive_thresholds_where_texts_differ():
    """Only the family and threshold whose alignment is in 0.6 to 0.95 count: 5 a cycle over 4 of a tau."""
    adaptive = [50, 10, 50, 20.0, 50, 60, 1, 0.8, 1.0, 1]
    constant = [40, 10, 40, 20.0, 40, 50, 1, 0.8, 1.0, 1]
    same = [50, 10, 50, 20.0, 50, 60, 1, 1.0, 1.0, 1]
    fewer = [20, 10, 40, 20.0, 40, 50, 1, 0.8, 1.0, 1]
    rules = dict(strict=[], runs=['gamma_tau 0.5 k_max 10', 'tau 0.5'], windowed=[])
    row = dict(family='far', tokens=2, right=1, strict=[], runs=[adaptive, constant], windowed=[], hits='01',
               signals=dict(entropy=[0.5, 0.95], margin=[0.5, 0.95], softmax=[0.5, 0.95]))
    texts = cmasd_claims.Texts([row, row | dict(family='near', runs=[same, fewer])], rules, 0.0)
    chosen = cmasd_claims.adaptive_apart(texts)
    assert chosen == [('far', 'gamma_tau 0.5 k_max 10')]
    assert cmasd_claims.mean_threshold(chosen, texts) == pytest.approx(5 / 4)


def test_cmasd_evenness_is_of_single_texts():
    """Two texts of 2 and 4 kept a cycle, swapped by the second seed: their means alone would not differ."""
    sums = dict.fromkeys(cmasd_claims.WARM_SUMS, [1, 1])
    rows = [dict(default=sums | dict(kept=kept)) for kept in ([2, 4], [4, 2])]
    sampled = cmasd_claims.Sampled(rows, 0.0)
    assert sampled.evenness([0, 1]) == pytest.approx(1 - 2 ** 0.5 / 3)


def test_cmasd_rules_that_look():
    """Confidence is asked for by a window that follows it, or by a threshold that does."""
    rules = cmasd_record.rules_of(EMBEDDED_PAIR)
    for name in ('default', 'tau 0.5', 'cmasd-prob'):
        assert cmasd_record.looks(rules['runs'][name])
    looking = [name for name, method in rules['windowed'].items() if cmasd_record.looks(method)]
    assert looking == ['adaptive tau, fixed 7']
    assert not cmasd_record.looks(Exact(5))


def test_cmasd_controllers_pay_for_themselves():
    """The least of the rounds: 2 steps a draft token and 1 a cycle; the oracle knows and pays nothing."""
    rounds = [dict(token=dict(online=0.2), cycle=dict(online=0.5), target_pass=0.1),
              dict(token=dict(online=0.3), cycle=dict(online=0.1), target_pass=0.4)]
    costs = cmasd_claims.Costs(rounds)
    run = dict(tokens=30, drafted=4, cycles=3, steps=9.0)
    rows = [dict(online=run, oracle=run)]
    assert costs.pace(rows, 'online') == pytest.approx(30 / (9 + 8 + 3))
    assert costs.pace(rows, 'oracle') == pytest.approx(30 / 9)


def row_of_lengths(family, tokens, **rules):
    """A stored row of product: {rule: {draft tokens of a block: cycles}}."""
    rules = {name.replace('_', ' '): [0, blocks] for name, blocks in rules.items()}
    return dict(family=family, tokens=tokens, bytes=0.5, rules=rules)


def test_cmasd_lengths_by_hand():
    """The best window is each task's own; passes cost what is stored, the longest in proportion."""
    passes = dict(draft=1.0, target=[0.0, 2.0, 4.0])
    rows = [row_of_lengths('math', 12, fixed_1={'1': 6}, fixed_2={'2': 3}, product_0={'1': 2, '3': 2},
                           oracle={'3': 2}),
            row_of_lengths('prose', 9, fixed_1={'1': 3}, fixed_2={'2': 9}, product_0={'1': 3, '0': 1},
                           oracle={'1': 2})]
    lengths = cmasd_claims.Lengths(rows, passes, dict(product=0.5))
    assert lengths.steps['fixed 1'].tolist() == [6 * 5 / 2, 3 * 5 / 2]
    assert lengths.steps['fixed 2'].tolist() == [3 * 8 / 2, 9 * 8 / 2]              # 2 + 4 * 3 / 2 each
    assert lengths.steps['product 0'].tolist() == [(2 * 5 + 2 * 11) / 2 + 0.5 * 8, (3 * 5 + 2) / 2 + 0.5 * 3]
    assert lengths.over('product', 'fixed', [0]) == pytest.approx(12 / 20)
    assert lengths.over('product 0', 'fixed', [0, 1]) == pytest.approx((12 / 20 + 7.5 / 10) / 2)
    assert lengths.over('fixed', 'fixed 2', [1]) == pytest.approx(36 / 7.5)
    assert lengths.share('product', [1]) == pytest.approx((7.5 / 10 - 1) / (7.5 / 5 - 1))
    found = list(cmasd_claims.length_table(lengths, 'here').rows)
    assert [row[0] for row in found] == ['product 0', 'oracle']


@pytest.mark.slow
def test_cmasd_foreseeing_is_the_oracle():
    """Of each text the blocks that the controller drafts, which looks ahead with passes of its own."""
    prompt = EMBEDDED_PAIR.texts(['summary'], 2)[1]
    replayed = replay.Replay(EMBEDDED_PAIR, prompt.ids)
    found = cmasd_record.foreseeing(replayed, replayed.text)
    cycles = EMBEDDED_PAIR.written(EMBEDDED_PAIR.session(prompt.ids), prompt.ids, Exact(controller='oracle'))
    assert found.drafted == [len(cycle.drafted) for cycle in cycles]
    assert found.kept == [cycle.accepted for cycle in cycles]


def test_cmasd_replayed_blocks_have_the_notes_of_real_ones():
    """Nobody looks at a block's last token where the length was fixed before: it has no note."""
    prompt = EMBEDDED_PAIR.texts(['summary'], 2)[1]
    block, notes = replay.Replay(EMBEDDED_PAIR, prompt.ids).block((), Exact(2), 9)
    real = next(verify.decode(EMBEDDED_PAIR.session(prompt.ids), Exact(2, controller='fixed')))
    assert [guess.token for guess in block] == real.drafted
    assert notes[0]['largest'] == block[0].largest == notes[0]['own'] and notes[1] == {}


@pytest.mark.slow
def test_cmasd_own_costs_of_every_controller():
    """All but the oracle, which is a bound, have a cost of a token and of a cycle."""
    row = cmasd_record.own_cost_row(EMBEDDED_PAIR, 0)
    names = set(verify.CONTROLLERS) - {'oracle'}
    assert set(row['token']) == set(row['cycle']) == names
    assert row['token']['online'] > row['token']['fixed'] >= 0


def test_cmasd_chrf_by_hand():
    """Of 'abc' and 'abd' two of three letters and one of two pairs are shared, no longer run."""
    assert cmasd_record.chrf('abc', 'abd') == pytest.approx((2 / 3 + 1 / 2) / 6)
    assert cmasd_record.chrf('ab', 'ab') == 1


@pytest.mark.slow
@pytest.mark.parametrize('task, method', [
    ('story', Exact(4)),
    ('table', CmAsd()),
    ('table', CmAsd(accept_='strict', alpha=2)),
    ('story', Exact(4, controller='payoff')),
    ('translate', Exact(controller='product')),
    ('math', CmAsd(7, tau_base=0.05, gamma_tau=0, controller='fixed'))])
def test_cmasd_replays_are_runs(task, method):
    """A replay is the real run, cycle by cycle, whatever other rules have seen."""
    prompt = EMBEDDED_PAIR.texts([task], 2)[1]
    found = replay.Replay(EMBEDDED_PAIR, prompt.ids)
    for rule in (CmAsd(tau_base=0.01), method):
        check_replay(EMBEDDED_PAIR, found, prompt.ids, rule)


def check_replay(pair, found, ids, rule):
    """Asserts that a rule's run in a Replay is the real one, cycle by cycle; returns it."""
    cycles = pair.written(pair.session(ids), ids, replace(rule))        # what it learns is of one text
    run = found.run(replace(rule))
    assert list(run.text) == verify.tokens_of(cycles)
    assert run.kept == [cycle.accepted for cycle in cycles]
    assert run.drafted == [len(cycle.drafted) for cycle in cycles]
    return run


LENIENT = CmAsd(4, tau_base=0.01, gamma_tau=0, controller='fixed')


@pytest.fixture
def tiny_pair(tmp_path):
    """A Pair of random networks that agree on some tokens; its texts end in the room or by <eos>."""
    rows = [dict(question=f'What is {i} and {i}?', answer=str(2 * i)) for i in range(3)]
    (tmp_path / 'sums.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    target = byte_network(1)
    draft = byte_network(1)
    generator = seeded()
    for weight in draft.parameters():
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    folders = [checkpoint(tmp_path / 'target', target), checkpoint(tmp_path / 'draft', draft)]
    return Pair(*map(str, folders), (str(tmp_path / 'sums.jsonl'),), max_new=20, longest=40)


def test_cmasd_replays_on_another_pair_take_few_passes(tiny_pair):
    """A pass of each model says all of plain decoding's text: only what is drafted beside it takes others."""
    prompt = tiny_pair.texts((), 1)[0]
    found = replay.Replay(tiny_pair, prompt.ids)
    session = found.session
    before = {role: len(reader.log) for role, reader in session.readers().items()}
    assert before['draft'] == 2                         # the prompt's and the text's
    wrong = 0
    for i in range(len(found.text)):
        place = found.place(found.text[:i])
        assert place.pick == found.text[i]
        wrong += place.token != place.pick
    assert 0 < wrong < len(found.text)
    assert {role: len(reader.log) for role, reader in session.readers().items()} == before
    for rule in (Exact(1), Exact(4), CmAsd(accept_='strict'), LENIENT):
        run = check_replay(tiny_pair, found, prompt.ids, rule)
        if rule.lossless:
            assert run.text == found.text
            assert len(session.target.log) == before['target']
    assert run.text != found.text
    assert len(session.target.log) > before['target']


@pytest.mark.slow
def test_cmasd_dropout_rows_are_of_the_replayed_text():
    """Its strict run writes the replayed text, and judges each place as the replay does."""
    prompt = EMBEDDED_PAIR.texts(['table'], 1)[0]
    found = replay.Replay(EMBEDDED_PAIR, prompt.ids)
    row = cmasd_record.dropout_row(EMBEDDED_PAIR, prompt)
    assert row['tokens'] == len(found.text)
    hits = []
    for i in row['places']:
        place = found.place(found.text[:i])
        hits.append(place.token == place.pick)
    assert row['kept'] == cmasd_record.bits(hits)
    usual, more = row['positions']
    assert 0 < usual < more


def test_cmasd_drawing():
    """The drawn cycle of the page: C, tau and p / max p stand below each drafted token."""
    tokenizer = embedded('target')[1]
    ids = tokenizer.encode('One evening Mia the fox went to the market with a map.').ids
    lines = cmasd_record.confident_cycle(EMBEDDED_PAIR.session(ids), str)
    drawn = {}
    for line in lines:
        name = line[:12].rstrip()
        drawn[name] = line[12:].split()
    assert list(drawn) == ['drafted', 'C', 'tau', 'p / max p', 'the best', '', 'committed']
    drafted = drawn['drafted']
    for name in ('C', 'tau', 'p / max p', ''):
        assert len(drawn[name]) == len(drafted)
    assert set(drawn['']) == {'kept'}
    assert drawn['the best'][:len(drafted)] != drafted  # kept, though the target prefers another
    assert drawn['committed'][:len(drafted)] == drafted


# ------------------------------------------------------------------------ ECSV

@pytest.mark.slow
@pytest.mark.parametrize('R, L, policy, align, bonus', [
    (1, None, 'disagreement', 'positional', False),
    (2, 4, 'entropy', 'prefix', True),
    (4, 6, 'agree_entropy', 'positional', True),
    (3, 3, 'entropy', 'positional', False),
    (0, 9, 'disagreement', 'prefix', True),
    (1, 2, 'entropy', 'positional', True)])
def test_ecsv_spot_checks_keep_the_budget_and_the_text(R, L, policy, align, bonus):
    """Plain decoding's text; target positions stay in the budget; what a check has read is not paid twice."""
    target = network(0)
    method = EcsvSpot(4, draft_temperature=1.5, spots=R, budget=L, policy=policy, align=align,
                      bonus_check=bonus)
    checks = 0
    saved = 0           # checks that cost no position
    drafts = network(0), network(1)
    for draft, prompt in itertools.product(drafts, ([1, 2], [3])):
        opened = session(target, draft, prompt, 40, seed=1)
        tokens, cycles = write(opened, method)
        assert tokens == plain(target, prompt, 40)
        for cycle in cycles:
            passes, positions, _ = cycle.passes['target/full']
            whole_block = len(cycle.drafted) + 1
            assert positions <= (L or whole_block)
            if passes == 2:
                checks += 1
                saved += positions == whole_block
    if R:
        assert saved
    if R or (bonus and L):
        assert checks


class Scripted(Ecsv):
    """ECSV of four tokens whose branches are given, one a row; they share random logits."""

    def __init__(self, lines, **knobs):
        super().__init__(4, a_entropy=0, a_self=0, **knobs)
        self.lines = torch.tensor(lines)

    def texts(self, session, n):
        logits = torch.randn(1, 4, session.target.model.vocab, generator=seeded()).expand(3, -1, -1)
        return verify.Branches(self.lines, logits.softmax(-1), logits, [])


STOPS = [[1, 3, 2, 2], [1, 3, 5, 2], [1, 4, 2, 6]]          # 3: the end, to two of three
GOES_ON = [[1, 4, 2, 2], [1, 4, 5, 2], [1, 3, 2, 6]]


def proposed(lines, eos=(), **knobs):
    """The tokens that a vote of these branches proposes; their target would rather write 4 than 3 there."""
    target = network(0)
    opened = session(target, target, [1], 9, eos=frozenset(eos))
    draft = Scripted(lines, **knobs).propose(opened)
    assert len(draft.logits) == len(draft.tokens)
    return draft.tokens


class ScriptedCheck(Scripted, METHODS['ecsv-checked']):
    """ecsv-checked of given branches, which asks at the last place where they disagree most."""


def test_ecsv_check_that_verifies_by_hand():
    """What the target says up to the checked place stands; only branches that begin so vote behind it."""
    target = network(0)
    a, b, c, d = plain(target, [2], 4)
    no = next(x for x in range(11) if x not in (a, b, c, d))
    for lines, block, certain in (
            ([[a, b, no, d], [a, b, no, d], [a, b, c, no]], [a, b, c, no], 3),      # one has the target's
            ([[a, b, no, d], [a, b, no, d], [a, b, a, no]], [a, b, c], 3),          # none has it
            ([[a, no, c, d], [a, no, c, d], [a, b, c, d]], [a, b, c, d], 2)):       # likewise
        s = session(target, target, [2], 9)
        method = ScriptedCheck(lines)
        assert method.propose(s).tokens == block
        assert len(method.certain) == certain
        s = session(target, target, [2], 9)
        cycle = next(verify.decode(s, ScriptedCheck(lines)))
        kept = os.path.commonprefix([block, [a, b, c, d]])
        assert cycle.tokens[:len(kept)] == kept
        passes, positions, _ = cycle.passes['target/full']
        assert (passes, positions) == ((1, certain) if len(block) == certain else (2, len(block) + 1))
        assert cycle.labels[certain - 1] == 'target' and set(cycle.labels[:certain - 1]) == {'draft'}


@pytest.mark.parametrize('eos, wanted', [
    ((), {'corrected', 'as voted', 'ended'}),
    ((1,), {'as voted', 'ended'})])
def test_law_of_a_check_that_verifies(eos, wanted):
    """The target's law where checks correct a vote that goes on behind it, and where they end the cycle."""
    seen = set()

    def run(s, method):
        tokens, cycles = write(s, method)
        for cycle in cycles:
            seen.add('corrected' if 'target' in cycle.labels[:-1] else 'as voted')
            if len(cycle.drafted) == len(cycle.tokens) == cycle.passes['target/full'][1]:
                seen.add('ended')                       # no position was read behind it
        return tokens, cycles
    target = Table(1, 2)
    settings = dict(temperature=1.0, eos=frozenset(eos))
    method = METHODS['ecsv-checked'](gamma=3, branches=2, draft_temperature=1.0, draft_top_p=1.0)
    law = enumerate_law(target, Table(2, 2), method, 3, run=run, **settings)
    assert method.lossless and variation(law, exact_law(target, 3, **settings)) < 1e-9
    assert seen == wanted
    assert not replace(method, controller='probe').lossless             # which may drop what is certain


def test_ecsv_check_that_verifies_is_counted_by_hand():
    """Passes and positions of both readers; a draft pass costs its share of the bytes of a target pass."""
    passes = {'target/full': [2, 5, 0.0], 'draft/full': [4, 8, 0.0]}
    cycle = verify.Cycle([5, 6, 7], [], [5, 6, 7], ['draft', 'target', 'draft'], passes, 0.0)
    last = verify.Cycle([], [], [8], ['target'], {'target/full': [1, 1, 0.0]}, 0.0)
    counts = ecsv_record.check_counts([cycle, last])
    assert counts == dict(kept=2, cycles=2, tokens=4, positions=6, passes=3, drafts=4, drafted=8)
    table = ecsv_record.by_depth({2: counts | dict(tokens=1), 4: counts})
    other = ecsv_record.by_depth({4: counts | dict(passes=4, positions=8)})
    votes = {ecsv_claims.CHECKED: table, **dict.fromkeys(ecsv_claims.CHECKED_OVER, other)}
    rows = [dict(family='story', bytes=0.25, votes=votes)] * 2
    assert ecsv_claims.tokens_a_pass(rows, ecsv_claims.CHECKED, 4) == pytest.approx(4 / (3 + 0.25 * 4))
    found = [claim.figure(claim.rows) for claim in ecsv_claims.checked_claims(
        [row | dict(votes=votes | {ecsv_claims.CHECKED: ecsv_record.by_depth({4: counts})}) for row in rows])]
    assert found == pytest.approx([8 / 6, 5 / 4] * 3)


def test_ecsv_block_ends_where_an_end_is_elected():
    """What branches wrote behind it would be read for nothing."""
    assert proposed(STOPS, eos=[3]) == [1, 3]
    assert proposed(GOES_ON, eos=[3]) == [1, 4, 2, 2]
    assert proposed(STOPS) == [1, 3, 2, 2]


def test_ecsv_second_vote_ends_blocks_too():
    """A check may take an elected end back, and the whole block is there again; or may elect one."""
    check = dict(spots=1, a_spot=4)
    assert proposed(STOPS, eos=[3], **check) == [1, 4, 2, 2]
    assert proposed(STOPS, eos=[4], **check) == [1, 4]
    assert proposed(GOES_ON, eos=[3], **check) == [1, 4, 2, 2]


def ballot(tokens):
    """A Ballot of branches (lists of ids below 6) that share random logits at each position."""
    B = len(tokens)
    n = len(tokens[0])
    logits = torch.randn(1, n, 6, generator=seeded(), dtype=torch.float64)
    return Ballot.of(torch.tensor(tokens), logits.expand(B, -1, -1), 4)


def random_tokens(seed):
    """Four branches of three tokens, all below 6."""
    return torch.randint(0, 6, (4, 3), generator=seeded(seed)).tolist()


def likeliest(votes, j, among=range(6)):
    """Which of these ids has the highest q of the first branch at position j."""
    names = votes.names[j].tolist()
    chances = votes.q[0, j].tolist()
    q = dict(zip(names, chances))
    return max((x for x in names if x in among), key=q.get)


def test_ecsv_vote_by_hand():
    """The token of most branches wins at each position."""
    votes = ballot([
        [0, 1, 2],
        [0, 2, 3],
        [3, 2, 2]])
    assert VoteUnif().fuse(votes) == [0, 2, 2]


def test_ecsv_prefix_alignment_by_hand():
    """By prefix, a branch that has left the fused text has no vote: 1 to 1 there, and mean q decides."""
    votes = ballot([[0, 1], [0, 2], [3, 2]])
    assert VoteUnif().fuse(votes) == [0, 2]
    by_prefix = VoteUnif(align='prefix')
    assert by_prefix.fuse(votes) == [0, likeliest(votes, 1, among=(1, 2))]


@pytest.mark.parametrize('best', [1, 2])
def test_ecsv_ties_go_to_the_verifier(best):
    """Where the target was asked, its logit decides a tie."""
    votes = ballot([[1], [2]])
    votes.verifier[0] = 9.0 * (votes.names[0] == best)
    assert VoteUnif().fuse(votes) == [best]


@pytest.mark.parametrize('method', [
    Ecsv(),
    EcsvSoft(align='prefix'),
    Ecsv(granularity='window')])
def test_ecsv_order_of_branches_changes_nothing(method):
    for seed in range(20):
        rows = random_tokens(seed)
        fused = method.fuse(ballot(rows))
        rows.reverse()
        assert method.fuse(ballot(rows)) == fused


def test_ecsv_ends_of_the_knobs():
    """Without reliability it is the unweighted vote; one branch is its own vote."""
    for seed in range(20):
        rows = random_tokens(seed)
        votes = ballot(rows)
        assert Ecsv(gamma_r=0).fuse(votes) == VoteUnif().fuse(votes)
        alone = ballot(rows[:1])
        assert Ecsv().fuse(alone) == rows[0]


def test_ecsv_mean_argmax_takes_the_likeliest():
    for seed in range(20):
        votes = ballot(random_tokens(seed))
        for j, token in enumerate(MeanArgmax().fuse(votes)):
            assert token == likeliest(votes, j)         # the branches share q


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def hand_ballot():
    """A Ballot of three branches of two tokens, made by hand."""
    return Ballot(
        tokens=torch.tensor([[5, 1], [5, 2], [4, 3]]),
        entropy=doubles([[0.0, 0.5], [0.2, 0.5], [0.4, 0.9]]),
        own=doubles([[-1.0, -3.0], [-2.0, -3.0], [0.0, -4.0]]),
        names=torch.tensor([[5, 5, 4], [1, 2, 3]]),
        q=None,
        margins=doubles([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def reliability(votes, **knobs):
    """[B][n] what gamma_r r is with these knobs alone."""
    nothing = dict(a_entropy=0, a_agree=0, a_self=0)
    method = Ecsv(**nothing | knobs)
    return method.weights(votes).log().tolist()


@pytest.mark.parametrize('knobs, expected', [
    (dict(a_entropy=2),
     [[0, -1], [-0.4, -1], [-0.8, -1.8]]),
    (dict(a_agree=1),                                   # with the other two
     [[0.5, 0], [0.5, 0], [0, 0]]),
    (dict(a_self=0.5, gamma_r=2),
     [[-1, -3], [-2, -3], [0, -4]]),
    (dict(a_self=1, granularity='branch'),
     [[-2, -2], [-2.5, -2.5], [-2, -2]]),
    (dict(a_self=1, granularity='window', window=2),
     [[-1, -2], [-2, -2.5], [0, -2]])])
def test_ecsv_reliability_by_hand(knobs, expected):
    """Each sign and its means: turned round, the text would stay lossless, and nobody would see it."""
    for found, row in zip(reliability(hand_ballot(), **knobs), expected):
        assert found == pytest.approx(row, abs=1e-9)


def test_ecsv_window_of_one_is_the_position():
    votes = hand_ballot()
    by_window = reliability(votes, a_self=1, granularity='window', window=1)
    assert by_window == reliability(votes, a_self=1)


@pytest.mark.parametrize('policy', ['disagreement', 'entropy', 'agree_entropy'])
@pytest.mark.parametrize('R, reach, expected', [
    (1, 2, [1]),
    (2, 2, [0, 1]),
    (2, 1, [0]),
    (0, 2, [])])
def test_ecsv_spot_check_goes_where_doubt_is(policy, R, reach, expected):
    """Position 1 is doubted more by every policy; `reach` bounds how far a check may go."""
    assert hand_ballot().doubtful(policy, R, reach) == expected


@pytest.mark.parametrize('policy, expected', [
    ('disagreement', [1]),
    ('entropy', [0]),
    ('agree_entropy', [0])])
def test_ecsv_spot_check_policies_differ(policy, expected):
    """All agree at position 0, unsurely; at position 1 they disagree, surely."""
    tokens = torch.tensor([[5, 1], [5, 1], [5, 2]])
    votes = replace(hand_ballot(), entropy=doubles([[0.9, 0.1]] * 3), tokens=tokens)
    assert votes.doubtful(policy, 1, 2) == expected
    assert votes.doubtful('disagreement', 2, 2) == [1]          # where all agree there is none


def test_ecsv_spot_margins_by_hand():
    """A margin is the token's logit minus the best other's: of the target's favourite, its lead."""
    votes = hand_ballot()
    rows = torch.tensor([
        [0.0, 0, 0, 0, 3, 1],
        [0.0, 7, 2, 6, 9, 0]])
    votes.ask(rows, [1])
    assert list(votes.verifier) == [1]
    assert votes.verifier[1].tolist() == [7, 2, 6]
    assert votes.margins[:, 0].tolist() == [0, 0, 0]
    assert votes.margins[:, 1].tolist() == [-2, -7, -3]
    votes.ask(rows, [0])
    assert votes.margins[:, 0].tolist() == [-2, -2, 2]
    last = reliability(votes, a_spot=1)[2]
    assert last == pytest.approx([2, -3], abs=1e-9)


def test_ecsv_of_one_branch_proposes_what_sd_samples():
    def begin():
        target = network(0)
        draft = network(1)
        return session(target, draft, [1, 2], 30, temperature=1.0, seed=3)
    one = Ecsv(4, branches=1, draft_temperature=1.0, draft_top_p=1.0)
    sampled = Exact(4).guess(begin(), 4)
    assert one.propose(begin()).tokens == sampled.tokens


def two_drafts(folder, tokenizer=None, **changes):
    """(target, tokens, cycles) of ecsv-two, whose second draft is written to folder/second."""
    checkpoint(folder / 'target', byte_network(0))
    target, *_ = load(folder / 'target')
    second = checkpoint(folder / 'second', byte_network(5), tokenizer, **changes)
    opened = session(target, byte_network(1), [1, 2], 20)
    tokens, cycles = write(opened, TwoDrafts(3, second=str(second)))
    return target, tokens, cycles


def test_ecsv_two_drafts_share_the_branches(tmp_path):
    """The text is the target's; the second draft's passes are counted with the first's."""
    target, tokens, cycles = two_drafts(tmp_path)
    assert tokens == plain(target, [1, 2], 20)
    assert cycles[0].passes['draft/full'][0] == 6
    assert len(cycles[0].judged[0]['branches']) == 4


def test_ecsv_two_drafts_must_share_their_words(tmp_path):
    words = bytes_tokenizer().to_str()
    tokenizer = Tokenizer.from_str(words.replace('<eos>', '<x>'))
    with pytest.raises(ValueError, match="token 256 is '<x>' there and '<eos>' in the target"):
        two_drafts(tmp_path, tokenizer)


def test_ecsv_two_drafts_must_hold_the_text(tmp_path):
    with pytest.raises(ValueError, match='expected a context of 22 tokens, not of 16'):
        two_drafts(tmp_path, max_position_embeddings=16)


# Votes on a synthetic channel: the truth is always symbol 0, branch b errs at the rate e_b, evenly over the
# others. 5,000 symbols: 0.03 is 5 standard errors of a rate of 0.8.

RATES = [0.1, 0.5, 0.55, 0.55, 0.6]
KINDS = 4               # of symbols
SYMBOLS = 5_000         # sent


def received(rates):
    """[B, n] what branches with these independent error rates say."""
    rng = seeded()
    chances = torch.tensor(rates)[:, None]
    wrong = torch.rand(len(rates), SYMBOLS, generator=rng) < chances
    errors = torch.randint(1, KINDS, wrong.shape, generator=rng)
    return torch.where(wrong, errors, 0)


def channel_ballot(seen):
    """The Ballot of branches whose q says nothing."""
    logits = torch.zeros(*seen.shape, KINDS)
    return Ballot.of(seen, logits, 0)


def share_right(fused):
    return fused.count(0) / len(fused)


def likelihood(symbols, truth):
    """The chance that the branches say these symbols."""
    chance = 1.0
    for e, symbol in zip(RATES, symbols):
        chance *= 1 - e if symbol == truth else e / (KINDS - 1)
    return chance


def calibrated_vote(seen):
    """ECSV's fused symbols with w = exp(r) = log((1 - e)(V - 1) / e), the MAP weights."""
    own = []
    for e in RATES:
        weight = math.log((1 - e) * (KINDS - 1) / e)
        own.append([math.log(weight)] * SYMBOLS)
    votes = replace(channel_ballot(seen), own=doubles(own))
    return Ecsv(a_entropy=0, a_agree=0, a_self=1).fuse(votes)


@pytest.mark.slow
def test_ecsv_with_map_weights_is_map_decoding():
    """With independent noise the calibrated vote is the likeliest symbol each time, right as often as can be.

    Without weights it is right less often.
    """
    seen = received(RATES)
    decided = {}                # MAP decoding of all that the branches can say
    best = 0.0                  # how often it is right
    for said in itertools.product(range(KINDS), repeat=5):
        chances = [likelihood(said, truth) for truth in range(KINDS)]
        decided[said] = chances.index(max(chances))
        best += max(chances) / KINDS
    fused = calibrated_vote(seen)
    for said, symbol in zip(seen.T.tolist(), fused):
        assert symbol == decided[tuple(said)]
    assert share_right(fused) == pytest.approx(best, abs=0.03)
    unweighted = VoteUnif().fuse(channel_ballot(seen))
    assert share_right(unweighted) + 0.03 < share_right(fused)


@pytest.mark.slow
def test_ecsv_majority_bound_needs_independence():
    """Five branches that err at 0.3: a majority of right votes is a bound, none where all err alike."""
    equal = received([0.3] * 5)
    majority = 0.0
    for k in range(3, 6):
        majority += math.comb(5, k) * 0.7 ** k * 0.3 ** (5 - k)
    apart = VoteUnif().fuse(channel_ballot(equal))
    copies = equal[:1].expand(5, -1)
    alike = VoteUnif().fuse(channel_ballot(copies))
    assert share_right(apart) > majority - 0.03 > share_right(alike)


def test_ecsv_gains_nothing_from_branches_that_are_alike():
    one = received(RATES)[:1]
    copies = one.expand(5, -1)
    fused = Ecsv().fuse(channel_ballot(copies))
    assert fused == one[0].tolist()


# ------------------------------------------------------------------------ what ECSV's claims rest on

def second_of(task):
    """The ids of a task's second prompt."""
    return EMBEDDED_PAIR.texts((task,), 2)[1].ids

@pytest.mark.slow
@pytest.mark.parametrize('task, depth, heat', [
    ('story', 3, 0.8), ('table', 3, 0.8), ('math', 3, 0.8), ('qa', 8, 2.0), ('summary', 8, 2.0)])
def test_ecsv_sums_of_a_vote_are_those_of_real_cycles(task, depth, heat):
    """What is looked up for a vote is what cycles with the same branches do, up to a block's elected end."""
    ids = second_of(task)
    record = ecsv_record.BranchReplay(EMBEDDED_PAIR, ids, Ecsv(branches=8, draft_temperature=heat))
    for key in ('lite', 'ecsv', 'prefix'):
        looked_up = record.voted(key, depth)
        real = record.checked(replace(ecsv_record.VOTES[key]), depth)
        assert real == looked_up | dict(passes=looked_up['cycles'])


@pytest.mark.slow
@pytest.mark.parametrize('task', ['qa', 'math'])
@pytest.mark.parametrize('kind', [ecsv_record.BranchReplay, ecsv_record.Foreseen])
def test_ecsv_replays_of_greedy_branches_are_runs(task, kind, monkeypatch):
    """Where all branches are the greedy draft, what is looked up for sd and votes is what decoding does."""
    ids = second_of(task)
    monkeypatch.setattr(ecsv_record, 'PLACES', 5)               # so that a text takes several samplings
    record = kind(EMBEDDED_PAIR, ids)
    record.drafter = Ecsv(draft_temperature=0)
    if kind is ecsv_record.Foreseen:
        record.foresee()
    for depth in (2, 8):
        methods = {'sd greedy': Exact(depth), 'ecsv': Ecsv(depth, draft_temperature=0)}
        for key, method in methods.items():
            opened = EMBEDDED_PAIR.session(ids)
            counts = ecsv_record.run_counts(opened, ids, EMBEDDED_PAIR.written(opened, ids, method))
            for name, number in record.voted(key, depth).items():
                assert counts[name] == number


def test_ecsv_tree_reads_as_a_pass_a_branch():
    """Each row's logits are those of a fresh reader of the text up to its place and the row's own tokens."""
    model = network(3)
    line = [5, 1, 4, 2, 3, 6]
    reader = Reader(model, 20)
    reader.read(line, [], model.full, 0)
    ends = [6, 2, 2, 4]
    tree = ecsv_record.Tree(reader, torch.tensor(ends))
    steps = [[1, 2, 3, 4], [4, 4, 2, 1], [3, 1, 1, 5]]
    for n, ids in enumerate(steps, 1):
        rows = tree.append(torch.tensor(ids))
        for row, end in enumerate(ends):
            own = [step[row] for step in steps[:n]]
            alone = fresh(model, line[:end] + own, 1)
            assert torch.allclose(rows[row], alone[0], atol=1e-5)


# ---------------------------------------------------------- lab/tree.py, and hedge

FORKED = [0, 1, 2, 1, 4, 0, 6]          # parents: 1 2 3 in a row, 4 5 behind 1, 6 7 behind the text
GUESSES = [3, 1, 4, 7, 2, 9, 5]         # of nodes 1 to 7


def line_to(node):
    """The guesses from the text to a node of FORKED, and itself."""
    found = []
    while node:
        found.insert(0, GUESSES[node - 1])
        node = FORKED[node - 1]
    return found


@pytest.mark.parametrize('text, known', [(6, 5), (6, 2), (1, 0)])
@pytest.mark.parametrize('sizes', [{}, dict(qk_norm=True), MIXED_TWO])
def test_a_tree_is_read_as_a_pass_a_branch(sizes, text, known):
    """In fp32 each node has the logits of a plain pass over its own line, whatever the cache holds."""
    model = network(3, dtype=torch.float32, **sizes)
    reader = Reader(model, 40)
    reader.read(LINE[:known], [], model.full, 0)
    rows = Tree(reader, LINE[:text], GUESSES, FORKED).read(model.full)
    for node in range(len(GUESSES) + 1):
        wanted = fresh(model, LINE[:text] + line_to(node), 1)[0]
        assert apart(rows[node], wanted) < 1e-4 * wanted.abs().amax()


@pytest.mark.parametrize('branch', [[1, 2, 3], [1, 4, 5], [6], []])
def test_the_branch_that_is_kept_is_trusted(branch):
    """As a fresh cache would be; of another branch no position is, and the next pass is right."""
    reader = Reader(network(3), 40)
    text = LINE[:6]
    tree = Tree(reader, text, GUESSES, FORKED)
    tree.read(reader.model.full)
    tree.keep(branch)
    line = text + line_to(branch[-1] if branch else 0)
    assert trusted(reader, line + [8]) == len(line)
    other = text + [3, 7] if 2 in branch else text + [3, 1]
    assert trusted(reader, other) == len(os.path.commonprefix([line, other]))
    assert apart(reader.read(line, [8], reader.model.full, 1), fresh(reader.model, line + [8], 1)) < 1e-9


def test_a_broken_tree_leaves_nothing_trusted(monkeypatch):
    """An interrupt in the pass, or while a branch moves to its place over another that was trusted there."""
    reader = Reader(network(3), 40)
    text = LINE[:6]
    reader.read(text, [3, 7, 2], reader.model.full, 1)
    tree = Tree(reader, text, GUESSES, FORKED)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, lab_tree.kernels, 'attend_grouped', 2)
        tree.read(reader.model.full)
    assert trusted(reader, text + [3, 7, 2]) == 5
    tree.read(reader.model.full)
    tree.keep([1, 2, 3])
    assert trusted(reader, text + [3, 1, 4]) == 9
    tree.fresh[1] = None                    # of the second layer: the first one has been copied
    with pytest.raises(TypeError):
        tree.keep([1, 4, 5])
    assert trusted(reader, text + [3, 1, 4]) == trusted(reader, text + [3, 7, 2]) == 5


def mended(cycles):
    """The Cycles in which a side branch was taken."""
    found = []
    for cycle in cycles:
        if any(verdict.get('second') and verdict['kept'] for verdict in cycle.judged):
            found.append(cycle)
    return found


@pytest.mark.parametrize('temperature, horizon', [(0.0, 40), (1.0, 3)])
def test_hedge_takes_side_branches_to_their_end(temperature, horizon):
    """Every draw enumerated: the target's law, in texts whose side branches were taken, and kept whole."""
    target = Table(1, 3)
    draft = Table(4, 3)
    seen = []

    def run(s, method):
        tokens, cycles = write(s, method)
        seen.extend(mended(cycles))
        return tokens, cycles
    method = hedge(2, side=2, least=0.05, draft_temperature=0)
    law = enumerate_law(target, draft, method, horizon, run=run, temperature=temperature)
    assert variation(law, exact_law(target, horizon, temperature=temperature)) < 1e-9
    ends = Counter(tuple(cycle.labels) for cycle in seen)
    for labels in ('draft', 'draft', 'bonus'), ('draft', 'target'), ('draft', 'bonus'):
        assert ends[labels] > 0, ends


def test_hedge_leaves_the_cache_right():
    """After any cycle the target lacks the last token alone, also where a side branch was moved; greedy."""
    target = network(0, 5)
    s = session(target, network(1, 5), [1, 2, 3], 24)
    s.read_prompt()
    cycles = []
    for cycle in decode(s, hedge(3, side=3, least=0)):
        assert trusted(s.target, s.tokens) == len(s.tokens) - 1
        cycles.append(cycle)
    assert verify.tokens_of(cycles) == plain(target, [1, 2, 3], 24)
    assert len(mended(cycles)) > 2


def test_hedge_tells_its_controller_of_the_trunk(monkeypatch):
    """Not of side branches, which have no place among the trunk's logits."""
    told = []
    monkeypatch.setattr(verify.FixedLength, 'learn', lambda _, *given: told.append(given))
    target = network(0, 5)
    s = session(target, network(1, 5), [1, 2, 3], 24)
    _, cycles = write(s, hedge(3, side=3, least=0))
    assert len(mended(cycles)) > 2
    for (draft, cycle), whole in zip(told, cycles):
        assert len(draft.tokens) == len(draft.q) and cycle.accepted <= len(draft.tokens)
        assert whole.drafted[:cycle.accepted] == draft.tokens[:cycle.accepted]
        assert [row['token'] for row in cycle.judged] == draft.tokens[:len(cycle.judged)]
        assert not any('second' in row for row in cycle.judged)


def test_sd_tree_takes_one_pass():
    """However often a cycle goes over to another branch; what it keeps is trusted, and right."""
    s = session(network(0, 5), network(1, 5), [1, 2, 3], 40, temperature=1.0)
    s.read_prompt()
    switched = 0
    for cycle in decode(s, sd_tree(3, branches=3, draft_temperature=1.0, draft_top_p=1.0)):
        passes, positions, _ = cycle.passes['target/full']
        assert passes == 1 and positions <= 1 + 3 * 3
        assert trusted(s.target, s.tokens) == len(s.tokens) - 1
        kept = [verdict['kept'] for verdict in cycle.judged]
        switched += (False, True) in itertools.pairwise(kept)
    assert switched > 2


def test_hedge_doubts_by_hand():
    """The chance that a block breaks at a place: all right before it, and this one wrong."""
    confidence = [0.9, 0.5, 0.8, 0.0]       # breaks at 0.1, 0.45, 0.09, 0.36
    assert hedge(least=0.099).doubtful(confidence) == [0, 1, 3]
    assert hedge(least=0.4).doubtful(confidence) == [1]
    assert hedge(least=1).doubtful(confidence) == []
    assert ecsv_record.Lowest().doubtful(confidence) == [3]
    assert ecsv_record.Lowest(below=0.5).doubtful([0.9, 0.5]) == []


def test_hedge_refuses_what_is_sparse():
    """sd-tree goes its branches one by one there."""
    def sparse_session():
        return session(network(0), network(1), [1, 2, 3], 9, sparse=METHODS['sparse'](**SMALL, rho=0.0))

    with pytest.raises(ValueError, match='read densely: leave out --sparse'):
        write(sparse_session(), hedge(least=0))
    tokens, _ = write(sparse_session(), sd_tree(2))
    assert len(tokens) == 9


def test_hedge_replays_are_runs():
    """What is read off greedy blocks behind every place is what decoding does."""
    pair = replace(EMBEDDED_PAIR, max_new=40)
    ids = second_of('summary')
    opened = pair.session(ids)
    line = pair.greedy_text(ids)
    record = ecsv_record.HedgeReplay(pair, ids, line, (6,))
    for key, mends in (('sd', False), ('lowest, side 1', True), ('side 4', True)):
        method = replace(ecsv_record.HEDGES[key], gamma=6)
        found = ecsv_record.hedge_counts(pair.written(opened, ids, method))
        assert found == record.run(method, 6)
        assert bool(found['mended']) == mends, found


def foreseen(favourites, line, eos, room=40):
    """A Foreseen of this text whose draft has these favourites behind each place of it."""
    record = object.__new__(ecsv_record.Foreseen)
    record.session = SimpleNamespace(eos=eos)
    record.line = line
    record.favourites = favourites
    record.room = room
    record.outcomes = {}
    record.longest = 8
    return record


def test_ecsv_greedy_drafts_foreseen_by_hand():
    """What sd drafts greedily: right as far as favourites are the text's; then unknown, or over at an end."""
    record = foreseen([1, 2, 9, 4, 0], [1, 2, 3, 4, 0], {0})
    assert record.outcome('sd greedy', 0, 8) == (48, 2)        # 9 is wrong, what is behind it unknown
    assert record.outcome('sd greedy', 3, 8) == (2, 2)         # to the text's end
    record = foreseen([1, 0, 3, 4, 0], [1, 2, 3, 4, 0], {0})
    assert record.outcome('sd greedy', 0, 8) == (2, 1)         # an end drafted too early
    record = foreseen([1, 2, 3], [1, 2, 3], {0}, room=3)
    assert record.voted('sd greedy', 8) == dict(kept=2, cycles=1, positions=3)


def test_ecsv_replayed_branches_end_where_all_texts_end():
    """As sampling does: with the first two of these three branches that is earlier than with all."""
    ids = second_of('qa')
    record = ecsv_record.BranchReplay(EMBEDDED_PAIR, ids)
    end, = record.session.eos
    tokens = torch.tensor([[5, end, 7, 8], [5, 6, end, 8], [5, 6, 7, 8]])
    record.drawn[0] = tokens, torch.zeros(3, 4, 9)
    for count, n in (1, 2), (2, 3), (3, 4):
        found, logits = record.branches(0, count)
        assert found.tolist() == tokens[:count, :n].tolist()
        assert logits.shape == (count, n, 9)
    assert record.branches(0, 3, 2)[0].shape == (3, 2)


def test_ecsv_lessons_decide_each_token_once():
    ids = second_of('math')
    record = ecsv_record.BranchReplay(EMBEDDED_PAIR, ids)
    signs, right = ecsv_record.lessons(record)
    assert signs.shape == (4, 4, len(record.line))
    assert right.shape == (4, len(record.line))
    assert right.double().mean() > 0.5


def test_ecsv_counts_of_a_real_run():
    """Cycles by how much they kept; the nats of the text as a reader without a cache has them."""
    ids = second_of('math')
    opened = EMBEDDED_PAIR.session(ids)
    cycles = EMBEDDED_PAIR.written(opened, ids, Exact(4))
    counts = ecsv_record.run_counts(opened, ids, cycles)
    assert sum(counts['by_kept']) == counts['cycles'] == len(cycles)
    kept = 0
    for k, n in enumerate(counts['by_kept']):
        kept += k * n
    assert counts['kept'] == kept
    text = opened.tokens[len(ids):]
    assert counts['tokens'] == len(text)
    target, *_ = embedded('target')
    logits = fresh(target, opened.tokens[:-1], len(text))
    logp = logits.log_softmax(-1)
    nats = -float(logp[range(len(text)), text].sum())
    assert counts['nats'] == pytest.approx(nats, rel=1e-4)


MADE_BY = torch.tensor([0.5, 1.0, -0.7, 2.0, -0.3])         # weights of the signs, and a bias


def made_lesson(n=10_000):
    """A Lesson of 4 branches whose tokens are right with the odds that MADE_BY gives."""
    rng = seeded()
    signs = torch.randn(4, 4, n, generator=rng)
    r = torch.tensordot(MADE_BY[:4], signs, 1) + MADE_BY[4]
    coins = torch.rand(r.shape, generator=rng)
    return ecsv_record.Lesson(signs, coins < r.sigmoid())


def cut(lesson, n):
    """Two Lessons: the first n tokens, and the rest."""
    signs, right = lesson
    first = ecsv_record.Lesson(signs[..., :n], right[..., :n])
    rest = ecsv_record.Lesson(signs[..., n:], right[..., n:])
    return [first, rest]


@pytest.mark.slow
def test_ecsv_fit_finds_the_weights():
    """Those that made the votes, none below 0; a penalty shrinks them.

    40,000 votes: 0.15 is 4 standard errors. Only the proportions are known: the sign whose weight may not go
    below 0 is noise to the fit, which shrinks all of them.
    """
    halves = cut(made_lesson(), 5000)
    found = ecsv_record.fit_weights(halves, 0.0)
    assert found[2] == 0
    expected = MADE_BY.clamp(min=0)
    for i in (0, 1, 3):
        assert found[i] > 0
        assert abs(found[i] / found[3] * 2 - expected[i]) < 0.15
    shrunk = ecsv_record.fit_weights(halves, 0.1)
    for i in (0, 1, 3):
        assert shrunk[i] < found[i]


@pytest.mark.slow
def test_ecsv_fit_has_the_least_loss():
    lesson = made_lesson()
    found = ecsv_record.fit_weights([lesson], 0.0)
    loss = ecsv_record.loss_of(found, lesson)
    assert loss < ecsv_record.loss_of(found * 0.5, lesson)
    assert loss < math.log(2)                                   # that of a coin


def test_ecsv_rows_of_lessons_add_up():
    """Losses and correlations of stored rows are those of all their tokens together."""
    weights = MADE_BY.double()
    whole = made_lesson(100)
    rows = [ecsv_record.errors(part, dict(fit=weights)) for part in cut(whole, 30)]
    loss = float(ecsv_record.loss_of(weights, whole))
    assert ecsv_claims.loss(rows, 'fit') == pytest.approx(loss)
    wrong = ~whole.right
    table = torch.corrcoef(wrong.double())
    others = float(table.sum()) - 4                             # without the diagonal
    assert ecsv_claims.independence(rows) == pytest.approx(1 - others / 12)
    all_wrong = sum(row['all_wrong'] for row in rows)
    assert all_wrong == int(wrong.all(0).sum())


def test_ecsv_correlation_by_hand():
    """Two branches that err together, and a third that errs independently of both."""
    wrong = torch.tensor([
        [1.0, 0, 1, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 0]])
    together = (wrong @ wrong.T).numpy()
    assert ecsv_claims.correlation(together, 4) == pytest.approx((1 + 0 + 0) / 3)


def by_depth(**depths):
    """A stored vote: of each depth, as d2, d3, ..., (kept, cycles, positions)."""
    table = dict(depths=[], kept=[], cycles=[], positions=[])
    for name, (kept, cycles, positions) in depths.items():
        table['depths'].append(int(name[1:]))
        table['kept'].append(kept)
        table['cycles'].append(cycles)
        table['positions'].append(positions)
    return table


def stored_text(family='story', **votes):
    """A stored row of a text of 40 tokens: sd at depth 4, another vote at depths 2 and 3 unless said."""
    votes = votes or dict(vote=by_depth(d2=(20, 20, 44), d3=(24, 16, 64)))
    return dict(family=family, place=0, tokens=40, votes=dict(sd=by_depth(d4=(30, 10, 50)), **votes))


BUDGET = ecsv_claims.Budget('sd', dict(story=4, math=4))


def test_ecsv_at_equal_budget_by_hand():
    """A vote's two depths are mixed until both spend what sd does, 50 positions for 40 tokens."""
    texts = ecsv_claims.Texts([stored_text(), stored_text()])
    assert texts.at_depth('sd', 4, texts.places).spent == 50 / 40
    sums = texts.at_budget('vote', BUDGET, texts.places)
    assert sums.spent == pytest.approx(50 / 40)
    assert sums.length == pytest.approx((0.7 * 20 + 0.3 * 24) / 18.8)
    assert sums.yielded == pytest.approx(40 / 18.8)             # a cycle of a vote is a pass


def test_ecsv_checks_are_passes():
    """What is kept is counted by target passes, where a row says how many; by cycles beside it."""
    checked = by_depth(d2=(20, 20, 50)) | dict(passes=[25])
    texts = ecsv_claims.Texts([stored_text(spot=checked)])
    sums = texts.at_budget('spot', BUDGET, texts.places)
    assert (sums.block, sums.length) == pytest.approx((20 / 20, 20 / 25))


def test_ecsv_budget_that_no_mix_meets_by_hand():
    """Then it is the depth that exceeds it least, which the claim on the budget shows."""
    texts = ecsv_claims.Texts([stored_text(vote=by_depth(d2=(24, 16, 64), d3=(20, 20, 60)))])
    assert texts.at_budget('vote', BUDGET, texts.places).spent == pytest.approx(60 / 40)
    met = ecsv_claims.within(texts.places, texts, ['sd'], BUDGET)
    assert met == pytest.approx(1)
    missed = ecsv_claims.within(texts.places, texts, ['sd', 'vote'], BUDGET)
    assert missed == pytest.approx(1 - 10 / 50)


def test_ecsv_best_mix_where_deeper_is_cheaper():
    """Positions do not grow with depth: the first two depths around the budget are not the best two."""
    vote = by_depth(d1=(15, 25, 49), d2=(18, 22, 56), d3=(20, 20, 49), d4=(28, 12, 60))
    texts = ecsv_claims.Texts([stored_text(vote=vote)])
    sums = texts.at_budget('vote', BUDGET, texts.places)
    assert sums.length == pytest.approx((10 / 11 * 20 + 1 / 11 * 28) / (10 / 11 * 20 + 1 / 11 * 12))


def best_pair(depths, most):
    """The longest mean block of all mixes of two depths, in hundredths, of at most so many positions."""
    best = 0.0
    for one, other in itertools.product(depths, repeat=2):
        for k in range(101):
            kept, cycles, positions = [(100 - k) * x + k * y for x, y in zip(one, other)]
            if positions <= 100 * most:
                best = max(best, kept / cycles)
    return best


def test_ecsv_best_mix_is_the_best_of_all():
    """None of all mixes in hundredths is better; it is within the budget, and hardly better than the best."""
    rng = random.Random(0)
    for _ in range(20):
        depths = []
        for _ in range(5):
            cycles = rng.randint(8, 30)
            depths.append((40 - cycles, cycles, rng.randint(40, 60)))
        depths.append((20, 20, 44))
        vote = by_depth(**{f'd{depth}': sums for depth, sums in enumerate(depths, 1)})
        texts = ecsv_claims.Texts([stored_text(vote=vote)])
        sums = texts.at_budget('vote', BUDGET, texts.places)
        assert sums.spent <= 50 / 40 + 1e-9
        best = best_pair(depths, 50)
        assert best - 1e-9 <= sums.length < 1.03 * best


def test_ecsv_tasks_have_their_own_budgets():
    """Each task's best mix at its own budget, added up; a task without texts adds nothing."""
    other = stored_text('math', vote=by_depth(d2=(10, 30, 50), d3=(24, 16, 49)))
    other['votes']['sd'] = by_depth(d4=(30, 10, 60))
    texts = ecsv_claims.Texts([stored_text(), other])
    both = texts.at_budget('vote', BUDGET, texts.places)
    kept = 0.0
    for place, family in enumerate(['story', 'math']):
        alone = texts.of(family).at_budget('vote', BUDGET, [0])
        kept += alone.kept
        with numpy.errstate(invalid='ignore'):          # 0 over 0
            assert texts.at_budget('vote', BUDGET, [place])[:5] == pytest.approx(alone[:5])
    assert both.kept == pytest.approx(kept)


def test_ecsv_tuned_sd_is_the_fastest_by_hand():
    """Fewest seconds for the same text win: of cycles, and of what was really drafted in them."""
    greedy = by_depth(d1=(18, 20, 40), d2=(24, 14, 42))
    texts = ecsv_claims.Texts([dict(family='story', place=0, tokens=38, votes={'sd greedy': greedy})])
    assert ecsv_claims.tuned(texts, ecsv_claims.PassCost(1.0, 0.1)).depths == dict(story=2)
    assert ecsv_claims.tuned(texts, ecsv_claims.PassCost(1.0, 1.0)).depths == dict(story=1)
    line = [dict(depth=depth, seconds=2 + 0.5 * depth) for depth in range(1, 9)]
    cost = ecsv_claims.pass_cost(dict(passes=common.Stored({}, line)))
    assert cost == pytest.approx((2, 0.5))


# ------------------------------------------------------------------------ calibration.json

SIGNALS = dict.fromkeys(['draft_logp', 'draft_grounding', 'target_logp', 'target_grounding'], [-2.5, 0.5])
SPARSE = dict(anchors=[1, 0], channels=[[0.1], [0.2, 0.3]], experts=[[], [[0.5]]])


@pytest.fixture
def folders(tmp_path):
    """Folders of two random checkpoints of two layers."""
    target = checkpoint(tmp_path / 'target', byte_network(0))
    draft = checkpoint(tmp_path / 'draft', byte_network(1))
    return target, draft


def unreadable(words, folder, draft, section):
    """Asserts that this section is refused in these words."""
    with pytest.raises(ValueError, match=re.escape(words)):
        read_calibration(folder, draft, [section])


def test_calibration_is_read_as_written(folders):
    """Sections are written one by one and read by name."""
    target, draft = folders
    write_calibration(target, 'signals', SIGNALS, draft=draft)
    write_calibration(target, 'mask', dict(skip=[1, 2]))
    write_calibration(target, 'sparse', SPARSE)
    found = read_calibration(target, draft, ['mask', 'signals', 'sparse'])
    assert found['mask']['skip'] == [1, 2]
    assert found['signals']['draft_logp'] == [-2.5, 0.5]
    assert found['sparse'] == SPARSE
    assert read_calibration(target, None, ['sparse'])['sparse'] == SPARSE


def test_calibration_that_is_absent_or_foreign(folders):
    """A section is refused where it is absent, of another draft or of another target."""
    target, draft = folders
    write_calibration(target, 'signals', SIGNALS, draft=draft)
    write_calibration(target, 'mask', dict(skip=[1, 2]))
    unreadable("no section 'anchors', which the method needs; make it with", target, draft, 'anchors')
    unreadable('with another draft', target, target, 'signals')
    unreadable('there is no draft model', target, None, 'signals')
    copied = (target / 'calibration.json').read_text()
    (draft / 'calibration.json').write_text(copied)
    unreadable('measured on another target', draft, None, 'mask')


def test_calibration_of_another_target_is_dropped(folders):
    """What is written beside a target keeps only that target's sections."""
    target, draft = folders
    write_calibration(target, 'signals', SIGNALS, draft=draft)
    copied = (target / 'calibration.json').read_text()
    (draft / 'calibration.json').write_text(copied)
    write_calibration(draft, 'mask', dict(skip=[1]))
    unreadable("no section 'signals'", draft, target, 'signals')


@pytest.mark.parametrize('ends', [[1.0], [1.0, 0.0], 'wide', None])
def test_calibration_of_broken_signals(folders, ends):
    """A signal's range is two numbers, the smaller first."""
    target, draft = folders
    write_calibration(target, 'signals', SIGNALS | dict(draft_logp=ends), draft=draft)
    unreadable(f'draft_logp is {ends!r}, expected two numbers', target, draft, 'signals')


@pytest.mark.parametrize('skip', [[0, 1, 2, 3], [4], [-1], [1.0], ['1'], [[1]], 'all', None])
def test_calibration_of_broken_mask(folders, skip):
    """A mask leaves out some sublayers of the model's, not all."""
    target, _ = folders
    write_calibration(target, 'mask', dict(skip=skip))
    unreadable('expected some, not all, of sublayers 0..3', target, None, 'mask')


@pytest.mark.parametrize('nested', [None, [[99]]])
def test_calibration_of_broken_nested_masks(folders, nested):
    target, _ = folders
    write_calibration(target, 'mask', dict(skip=[1], nested=nested))
    unreadable('expected some, not all, of sublayers 0..3', target, None, 'mask')


@pytest.mark.parametrize('broken', [
    dict(anchors=[2]), dict(anchors=[]), dict(channels=[[], [0.1]]), dict(channels=[[0.1]]),
    dict(experts=None), dict(experts=[[], [0.5]])])
def test_calibration_of_broken_sparse(folders, broken):
    """What --anchors measured has to fit the layers."""
    target, _ = folders
    write_calibration(target, 'sparse', SPARSE | broken)
    said = 'do not fit 2 layers; make it with python train_mask.py --anchors'
    unreadable(said, target, None, 'sparse')


def flags_of_via(folders):
    """A short run of via on two checkpoints."""
    target, draft = folders
    return '--target', target, '--draft', draft, '--prompt', 'x', '--method', 'via', '--max-new', 9


def test_via_refuses_a_run_without_a_mask(folders, capsys):
    refused(capsys, 'no section', *flags_of_via(folders))


@pytest.mark.slow
@pytest.mark.parametrize('more, break_even', [
    ('', True), ('--draft lookup', False), ('--draft self', False),
    ('--draft self --method sd --check', False)])
def test_via_runs_with_any_draft(folders, capsys, more, break_even):
    """Only a run with a draft model says what a middle stage costs; with itself as draft sd is exact."""
    target, draft = folders
    write_calibration(target, 'mask', dict(skip=[1, 2]))
    write_calibration(target, 'signals', SIGNALS, draft=draft)
    status, _, err = program(capsys, *flags_of_via(folders), *more.split())
    assert status == 0
    assert ('middle stage: ' in err) == break_even
    assert ('equal to plain' in err) == ('--check' in more)


@pytest.mark.parametrize('nested, most', [({}, 2), (dict(nested=[[1, 2]]), 3)])
def test_via_tiers_needs_nested_masks(folders, capsys, nested, most):
    """There are as many stages as nested masks, and two."""
    target, _ = folders
    write_calibration(target, 'mask', dict(skip=[1, 2]) | nested)
    flags = *flags_of_via(folders), '--method', 'via-tiers', '--set', 'tiers=5'
    refused(capsys, f'expected at most {most}', *flags)


# ------------------------------------------------------------------------ VIA-SD

SLIM_PROMPT = [1, 2, 3]
ESCALATES = dict(keep=2.0, escalate=1.5)                # in every cycle
NEVER_ESCALATES = dict(keep=1.0, escalate=0.0, max_lag=99)
KEEPS_ALL = dict(keep=0.0, escalate=0.0, slim_bonus=False)


def slim_text(seed):
    """What the target's slim path writes by itself."""
    s = slim_session(seed)
    s.read_prompt()
    s.draft = None                                      # slim drafts for itself
    return Exact().guess(s, 24).tokens


def check_via_limit(s, seed, name, who, **knobs):
    """Asserts that this method writes this one's greedy text, and that the three texts differ; its Cycles."""
    slim = slim_text(seed)
    draft = plain(s.draft.model, SLIM_PROMPT, 24)
    target = plain(s.target.model, SLIM_PROMPT, 24)
    assert draft != slim != target != draft
    wanted = dict(draft=draft, slim=slim, target=target)
    tokens, cycles = write(s, METHODS[name](**knobs))
    assert tokens == wanted[who]
    return cycles


@pytest.mark.slow
@pytest.mark.parametrize('name, who, knobs', [
    ('via', 'draft', KEEPS_ALL),
    ('via', 'draft', KEEPS_ALL | dict(max_lag=0)),
    ('via', 'target', ESCALATES),
    ('via', 'target', ESCALATES | dict(after_escalation='gate', max_lag=0)),
    ('via-two-level', 'target', {}),
    ('via-tiers', 'target', dict(tiers=2)),
    ('via-tiers', 'target', ESCALATES | dict(tiers=5))])
@pytest.mark.parametrize('gamma', [1, 5])
def test_via_limits(name, who, knobs, gamma):
    """At the ends of its knobs via writes the draft's or the target's greedy text, and no other."""
    for seed in range(2):
        check_via_limit(slim_session(seed), seed, name, who, gamma=gamma, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize('name, knobs', [
    ('via', {}), ('via', dict(slim_bonus=False)), ('via-lossy-sd', {}), ('via-lossy-sd', dict(beta=2.0))])
@pytest.mark.parametrize('gamma', [1, 5])
def test_via_that_never_escalates(name, knobs, gamma):
    """It writes slim's greedy text without a full pass, slim's own token behind each block that it kept."""
    for seed in range(2):
        s = slim_session(seed)
        settings = NEVER_ESCALATES | knobs
        cycles = check_via_limit(s, seed, name, 'slim', gamma=gamma, **settings)
        for c in cycles:
            assert 'target/full' not in c.passes
        for c in cycles[:-1]:                           # the last may have no room
            bonus = c.accepted == len(c.drafted) and settings.get('slim_bonus', True)
            assert len(c.tokens) == c.accepted + (bonus or c.accepted < len(c.drafted))
            assert not bonus or c.labels[-1] == 'slim'


@pytest.mark.slow
@pytest.mark.parametrize('gamma', [1, 5])
def test_via_with_a_slim_that_is_never_wrong(gamma):
    """Where slim is the target, with no layer skipped or as another model, via's text is the target's."""
    for seed in range(2):
        s = slim_session(seed, skip=())
        check_via_limit(s, seed, 'via', 'target', gamma=gamma, keep=1.0)
        s = slim_session(seed)
        s = replace(s, mid=Reader(s.target.model, 64))
        check_via_limit(s, seed, 'via-mid', 'target', gamma=gamma, keep=1.0)


def check_judged(method, judged):
    """Asserts that the target judged what its gate handed it; a row a draft token."""
    escalated = False
    for row in judged:
        if row['ratio'] < method.bounds[0]:
            escalated = True
        elif method.after_escalation == 'gate':
            escalated = False
        assert (row['by'] == 'target') == escalated
        if not escalated and not isinstance(method, METHODS['via-lossy-sd']):
            assert row['chance'] == (row['ratio'] >= method.bounds[1])


@pytest.mark.slow
@pytest.mark.parametrize('name, knobs', [
    ('via', dict(escalate=0.01, max_lag=3)), ('via-lossy-sd', dict(escalate=0.1)),
    ('via', dict(after_escalation='gate')), ('via-one-minus-alpha', dict(after_escalation='gate')),
    ('via', dict(keep=0.9, escalate=0.2, slim_bonus=False)), ('via-tiers', dict(tiers=5))])
def test_via_ledger_and_caches(name, knobs):
    """A full pass only to escalate or at the lag's limit; what full trusts equals a fresh prefill."""
    method = METHODS[name](4, **knobs)
    s = slim_session(3, 40, temperature=1.0)
    s.read_prompt()
    judged, paths = Counter(), Counter()
    reads_of_lag = lag = 0
    for c in decode(s, method):
        asked = any(row['by'] == 'target' for row in c.judged)
        late = lag > method.max_lag
        positions = lag * (late or asked)               # the lag is paid for
        if asked:
            positions += len(c.drafted) + 1
        full = c.passes.get('target/full', [0, 0])
        assert full[:2] == [late + asked, positions]
        assert len(c.judged) == min(c.accepted + 1, len(c.drafted))     # each token by one stage
        if name != 'via-tiers':
            assert c.passes['target/slim'][:2] == [1, len(c.drafted) + 1]
        check_judged(method, c.judged)
        judged.update((row['by'], row['kept']) for row in c.judged)
        paths.update(c.passes.keys())
        reads_of_lag += late
        lag = max(0, len(s.tokens) - 1 - trusted(s.target, s.tokens))
    assert (reads_of_lag > 0) == (method.max_lag == 3)
    assert judged['target', True] and judged['target', False] and judged['slim', True]
    rewritten = judged['slim', False]                   # published, the gate leaves slim nothing to rewrite
    assert (rewritten > 0) == (name != 'via-one-minus-alpha')
    if name == 'via-tiers':
        assert paths['target/slim1'] > paths['target/slim2'] > paths['target/slim3'] > 0


def test_audit_leaves_out_what_the_target_wrote_several_of():
    """Of target_k candidates none is in its cache: it reads its own step later, and is no judge of that."""
    s = step_session(0, 24)
    cycles = list(decode(s, SpecGuard(k=1, tau=math.inf, target_k=3, target_temperature=1.0, max_step=4)))
    assert len(cycles) > 2 and {label for c in cycles for label in c.labels} == {'target'}
    assert s.heard == []


def heard_by_hand(s, cycles):
    """[(p(x), log p(x))] of each token x that the target did not judge itself and has read by now, sorted."""
    begin = len(s.tokens) - len(verify.tokens_of(cycles))
    read = trusted(s.target, s.tokens)
    logits = fresh(s.target.model, s.tokens)
    found = []
    for c in cycles:
        for i, (token, label) in enumerate(zip(c.tokens, c.labels)):
            asked = label in ('target', 'bonus') or i < len(c.judged) and c.judged[i]['p'] is not None
            if not asked and begin + i <= read:
                row = logits[begin + i - 1]
                found.append([float(s.probs(row)[token]), float(row.log_softmax(-1)[token])])
        begin += len(c.tokens)
    return sorted(found)


AUDITED = [
    case('via', via(4, max_lag=3), {}), case('via-sampled', via(4), dict(temperature=1.0)),
    case('via-gate', via(4, after_escalation='gate'), dict(temperature=1.0)),
    case('via-tiers', METHODS['via-tiers'](4, tiers=5, escalate=0.1), {}),
    case('specguard', SpecGuard(k=1, tau=0.72, max_step=4), {}),
    case('specguard-sd', SpecGuard(2, k=1, tau=0.72, max_step=4, regenerate='sd'), {}),
    case('specguard-by-target', SpecGuard(k=1, tau=0.3, max_step=4, signals='target'), {})]


def audited_run(method, settings):
    """(session, Cycles) of a method that commits without the target."""
    s = slim_session(3, 40, text=letters, **settings)
    s.calibration |= dict(signals=RANGES)
    _, cycles = write(s, method)
    return s, cycles


@pytest.mark.parametrize('method, settings', AUDITED)
def test_audit_is_what_a_fresh_target_says(method, settings, monkeypatch):
    """Each token that another judged is heard of once; without it a run differs in the head's rows alone."""
    rows = []
    head = verify.kernels.head

    def counted(hidden, *weights):
        rows.append(hidden.shape[1])
        return head(hidden, *weights)
    monkeypatch.setattr(verify.kernels, 'head', counted)
    s, cycles = audited_run(method, settings)
    with_audit = sum(rows)
    heard = sorted(pair for c in cycles for pair in c.heard)
    wanted = heard_by_hand(s, cycles)
    assert len(wanted) > 3 and min(p for p, _ in wanted) < 0.5
    assert torch.tensor(heard).allclose(torch.tensor(wanted))

    monkeypatch.setattr(verify.Session, 'read', lambda s, reader, *what: reader.read(*what))
    rows.clear()
    _, others = audited_run(method, settings)
    for c, other in zip(cycles, others, strict=True):
        assert c.tokens == other.tokens and not other.heard
        for path, (passes, positions, _) in c.passes.items():
            assert other.passes[path][:2] == [passes, positions]
    in_time = getattr(method, 'signals', '') == 'target'        # no step is read late then
    assert (with_audit > sum(rows)) != in_time


def test_audit_of_sparse_passes_is_in_their_refreshes():
    """There the target reads densely what thinned-out passes have judged: all of it since the last one."""
    thinned = METHODS['sparse'](**SMALL, rho=0.0, refresh_every=3)
    s = session(network(0), network(1), [1, 2, 3], 40, sparse=thinned)
    tokens, cycles = write(s, Exact(2))
    logits = fresh(s.target.model, s.tokens)[2:-1]
    passed = 0                              # tokens before this cycle
    wrong = 0
    for i, c in enumerate(cycles, 1):
        unheard = sum(len(other.tokens) for other in cycles[max(0, i - 3):i - 1])
        places = range(passed - unheard, passed) if i % 3 == 0 else []
        right = [float(logits[place].argmax() == tokens[place]) for place in places]
        assert [p for p, _ in c.heard] == right
        wrong += right.count(0.0)
        passed += len(c.tokens)
    assert wrong > 0


def test_audit_is_of_what_was_written():
    """Not of the prompt, were it read late; what the target has just said counts before it is fetched."""
    s = slim_session(3)
    next(decode(s, Exact(2)))                           # nobody has read the prompt before
    assert s.heard == []
    s = slim_session(3)
    s.read_prompt()
    s.begin = 1                                         # as if two of its tokens had been written
    assert s.may_err(0.5)
    s.said.append(torch.tensor([[0.0, -9.0]]))
    assert not s.may_err(0.5)


def test_via_bound_is_kept():
    """Of N tokens at most most_wrong (N + 1) + max_lag + gamma are not the target's, where more would be."""
    gates = dict(keep=0.0, escalate=0.0, max_lag=2, slim_bonus=False)
    found = {}
    for bound in (1.0, 0.3):
        s = slim_session(3, 55)
        tokens, cycles = write(s, via(2, most_wrong=bound, **gates))
        logits = fresh(s.target.model, s.tokens)[2:-1]
        found[bound] = int((logits.argmax(-1) != torch.tensor(tokens)).sum())
    judges = ['target' if c.judged and c.judged[0]['by'] == 'target' else 'slim' for c in cycles]
    assert len(list(itertools.groupby(judges))) > 3     # slim is trusted again, and again not
    assert found[0.3] <= 0.3 * 56 + 2 + 2 < found[1.0]


def test_specguard_target_takes_over_at_the_bound():
    """It writes steps that the gate would keep while the share of wrong tokens is above most_wrong."""
    wrote = {}
    for bound in (1.0, 0.3):
        s = step_session(0, 40)
        gate = SpecGuard(k=1, tau=0.3, max_step=4, signals='target', most_wrong=bound)
        _, cycles = write(s, gate)
        assert all(c.judged[0]['score'] >= 0.3 for c in cycles)
        wrote[bound] = [c.labels[0] for c in cycles]
    assert set(wrote[1.0]) == {'draft'}
    assert len(list(itertools.groupby(wrote[0.3]))) > 3         # it keeps steps again, and again not


def test_via_violation_by_hand():
    """R is 0 for equal laws and, at 1/2, 1/2, within a factor of 2; it is never below 0."""
    q, p = torch.randn(2, 50, 6, generator=seeded()).double().log_softmax(-1)
    assert (verify.violation(p, p) == 0).all()
    assert (verify.violation(p, q) >= 0).all()
    a = torch.tensor([0.7, 0.3]).log()
    b = torch.tensor([0.4, 0.6]).log()
    assert verify.violation(b, a) == 0
    strict = 1.1 * math.log(1.75)                       # (0.7 + 0.4) log(0.7 / 0.4)
    assert float(verify.violation(b, a, 0, 1)) == pytest.approx(strict)


def test_via_stage_gain_and_blended_law():
    """Delta is 0 for a stage that is the draft or the target; pi is a weighted mean."""
    q, p = torch.randn(2, 50, 6, generator=seeded()).double().log_softmax(-1)
    for s in (q, p):
        assert via_rivals.stage_gain(q, s, p).abs().max() < 1e-12
    a = torch.tensor([0.7, 0.3])
    b = torch.tensor([0.4, 0.6])
    c = torch.tensor([0.1, 0.9])
    mixed = via_rivals.blended_law(a, b, c, 0.25, 0.5)
    assert torch.allclose(mixed, 0.375 * a + 0.125 * b + 0.5 * c)


# ------------------------------------------------------------------------ VIA-SD: the search for a mask

def search_for_via(cost, units, skipped, end=math.inf, **settings):
    """{mask: cost} of the masks that train_mask.py tries; settings: of train_mask.Settings."""
    tried = {}
    settings = train_mask.Settings(**settings)
    masks = train_mask.proposals(units, skipped, settings, tried)
    train_mask.search(cost, masks, settings, tried, end)
    return tried


def mask_for_via(model, windows, **settings):
    """The section `mask` that train_mask.py finds; settings: of train_mask.Settings."""
    return train_mask.find_mask(model, windows, train_mask.Settings(**settings), {})


def planted(useless):
    """A network of eight layers whose sublayers in `useless` add nothing: their output weights are 0."""
    model = byte_network(3, num_hidden_layers=8)
    for j in useless:
        layer = model.model.layers[j // 2]
        output = layer.mlp.down_proj if j % 2 else layer.self_attn.o_proj
        output.weight.zero_()
    return model


@pytest.mark.slow
@pytest.mark.parametrize('unit, useless, objective', [
    ('layer', {4, 5, 8, 9}, 'violation'), ('layer', {4, 5, 8, 9}, 'argmax'),
    ('sublayer', {3, 4, 9, 10, 13}, 'violation')])
def test_via_search_finds_planted_sublayers(unit, useless, objective, tmp_path, capsys):
    """Sublayers that add nothing are found, all and no other, in one search or a resumed one."""
    text = tmp_path / 'text'
    text.write_text('To be, or not to be, that is the question. ' * 9)
    folder = checkpoint(tmp_path / 'm', planted(useless), num_hidden_layers=8, max_position_embeddings=512)
    flags = (f'--target {folder} --text {text} --unit {unit} --objective {objective} --windows 2 '
             f'--patience 999 --skip {(len(useless) + 0.1) / 16}')

    def run(more):
        return train_mask.main(f'{flags} {more}'.split())

    def found(more):
        assert run(more) == 0
        return read_calibration(folder, sections=['mask'])['mask']
    whole = found('--evaluations 90')
    assert set(whole['skip']) == useless
    assert whole['cost'] < 1e-9 < min(whole['plain']['evenly']['cost'], whole['plain']['contiguous']['cost'])
    assert len(found('--evaluations 30')['tried']) <= 30
    resumed = found('--evaluations 90 --resume')
    assert list(resumed['tried'].items()) == list(whole['tried'].items())       # as if uninterrupted
    assert run('--resume --seed 1') == 2
    assert 'give this one the same\n' in capsys.readouterr().err
    assert run('--skip 0.9') == 2
    assert re.search('free .*layers; expected 1 to', capsys.readouterr().err)


def random_cost(units=16):
    """A function of a mask: exp of a random weight for each unit and each pair of units in it."""
    generator = seeded()
    weights = torch.rand(units, generator=generator)
    pairs = 0.2 * torch.rand(units, units, generator=generator)

    def cost(mask):
        rows = list(mask)
        inside = pairs[rows][:, rows]
        total = weights[rows].sum() + inside.sum()
        return float(total.exp())
    return cost


def best_for_via(cost, units, skipped, period, seed):
    """The least cost that a search with this seed reaches; period 0: without Bayes."""
    tried = search_for_via(cost, units, skipped, patience=999, period=period, seed=seed)
    return min(tried.values())


@pytest.mark.slow
def test_via_search_against_all_masks():
    """It comes within 5 % of the best of all 70 masks of 4 of 8 units."""
    cost = random_cost()
    optimum = min(map(cost, itertools.combinations(range(8), 4)))
    for seed in range(3):
        assert best_for_via(cost, 8, 4, 2, seed) <= 1.05 * optimum


@pytest.mark.slow
def test_via_search_against_chance():
    """With Bayes it finds what costs a tenth less than without, on 16 units; three seeds together."""
    cost = random_cost()
    bayesian = sum(best_for_via(cost, 16, 7, 2, seed) for seed in range(3))
    by_chance = sum(best_for_via(cost, 16, 7, 0, seed) for seed in range(3))
    assert bayesian < 0.9 * by_chance


def test_via_search_begins_with_masks_that_need_none(monkeypatch):
    """Evenly spaced units, every contiguous block, others; an ended search goes on where it stood."""
    model = byte_network(3, num_hidden_layers=8)
    windows = SimpleNamespace(cost=lambda skip, objective: float(sum((j - 5) ** 2 for j in skip)))
    whole = mask_for_via(model, windows, evaluations=7)
    assert list(whole['tried'])[:5] == ['1 3 5', '0 1 2', '1 2 3', '2 3 4', '3 4 5']
    assert whole['plain']['evenly'] == dict(skip=[4, 5, 8, 9, 12, 13], cost=139.0)
    assert whole['plain']['contiguous'] == dict(skip=[2, 3, 4, 5, 6, 7], cost=19.0)
    tried = {(1, 3, 5): 999.0}
    resumed = train_mask.find_mask(model, windows, train_mask.Settings(evaluations=7), tried)
    assert list(resumed['tried']) == list(whole['tried']) and len(tried) == 7
    assert tried[1, 3, 5] == 999.0                      # what was tried is not tried again
    interrupt(monkeypatch, windows, 'cost', 1)
    with pytest.raises(ValueError, match='no mask was tried'):
        mask_for_via(model, windows)


def test_calibration_texts_of_prompts(tmp_path, capsys):
    """A text is a prompt, in the template, and what the target itself writes behind it."""
    folder = checkpoint(tmp_path / 'm', byte_network(0, num_hidden_layers=4), num_hidden_layers=4)
    (folder / 'chat_template.jinja').write_text('user:{{ messages[0].content }}!')
    rows = tmp_path / 'rows.jsonl'
    rows.write_text('{"prompt": "To be"}\n{"question": "or not"}\n')
    flags = f'--target {folder} --prompts {rows} --windows 2 --window 8 --evaluations 2 --skip 0.5 '

    def run(more):
        return train_mask.main((flags + more).split())
    settings = train_mask.settings_of(train_mask.parse((flags + '--chat').split()))
    model, texts = train_mask.load_with_texts(folder, settings)
    for text, prompt in zip(texts, ('user:To be!', 'user:or not!')):
        ids = bytes_tokenizer().encode(prompt).ids
        written, _ = write(session(model, None, ids, 8), verify.Autoregressive())
        assert text == ids + written
    assert run('--chat') == 0
    assert read_calibration(folder, sections=['mask'])['mask']['settings']['chat']
    capsys.readouterr()
    assert run('--resume') == 2                         # without the template the texts are others
    assert run('--windows 3') == 2
    assert run('--window 600') == 2
    assert run('--text x') == 2
    refusals = capsys.readouterr().err
    for words in ('give this one the same', '2 prompts; give 3, or --windows fewer', 'prompt 1 has 5 tokens',
                  'give one'):
        assert words in refusals
    assert refusals.count('\n') == 4


def test_via_search_ends_without_progress():
    """Patience counts the masks since the best one; by default it is less than the budget."""
    counted = itertools.count()

    def rising(mask):
        return next(counted)
    assert len(search_for_via(rising, 8, 4, patience=5)) == 6
    defaults = train_mask.Settings()
    assert defaults.patience < defaults.evaluations


@pytest.mark.slow
@pytest.mark.parametrize('last, minutes, tried, nested', [
    (11, 60, 10, 1), (4, 60, 3, 3), (99, 7, 7, 1), (99, 12, 10, 2)])
def test_via_search_that_is_ended_keeps_the_best(last, minutes, tried, nested, monkeypatch):
    """Ctrl-C at a `last` evaluation, or the end of the minutes, ends a search; what it has found counts.

    10 masks are tried, then 3 for each of the nested ones. Each takes a minute.
    """
    model, *_ = load(EMBEDDED / 'target')

    def cost(skip, objective):
        return float(sum(skip))
    windows = SimpleNamespace(cost=cost)
    costs = interrupt(monkeypatch, windows, 'cost', last)

    def clock():
        return 60.0 * len(costs)
    monkeypatch.setattr(train_mask, 'time', SimpleNamespace(perf_counter=clock))
    found = mask_for_via(model, windows, evaluations=10, minutes=minutes)
    assert (len(found['tried']), len(found['nested'])) == (tried, nested)
    assert found['nested'][0] == found['skip']
    assert len(costs) <= min(minutes, 10 + 3 + 3)


# ------------------------------------------------------------------------ VIA-SD: what is measured

def near_block(seed):
    """(Session, draft of five tokens, recorded Block, the target's Score) of a draft that is often right."""
    s = slim_session(seed, skip=(2, 3))
    near = copy.copy(s.target.model)
    near.full = near.full.without({7})
    s.draft = Reader(near, 64)
    s.read_prompt()
    draft = Exact().guess(s, 5)
    mid = Reader(s.target.model, 64)
    seen, score = via_record.look(s, draft, dict(slim=s.slim_path, mid=mid))
    block = via_record.Block(score.ratios, via_record.trust_of(score), 9, False, seen)
    return s, draft, block, score


def via_cycle(s, draft, score, keep, escalate):
    """(tokens, draft tokens kept, whether the target was asked) of a real cycle on a draft."""
    method = METHODS['via'](5, keep=keep, escalate=escalate)
    tokens, labels, judged = method.accept(s, draft, score)
    asked = any(row['by'] == 'target' for row in judged)
    return tokens, labels.count('draft'), asked


def wrong_tokens(s, tokens):
    """How many of these tokens the target would not have written."""
    model = s.target.model
    score = verify.Score(s, Draft.points(tokens, model), model.full)
    own = score.logits[:-1].argmax(-1)
    return int((own != torch.tensor(tokens)).sum())


VIA_THRESHOLDS = (0.0, 0.0), (0.5, 0.3), (0.9, 0.1), (1.0, 0.0), (2.0, 2.0)


@pytest.mark.slow
def test_via_replayed_gates_are_the_real_ones():
    """A recorded block tells how many tokens a gate commits, keeps, gets wrong, and whether it asks."""
    outcomes = set()
    for seed in range(12):
        s, draft, block, score = near_block(seed)
        for keep, escalate in VIA_THRESHOLDS:
            tokens, kept, asked = via_cycle(s, draft, score, keep, escalate)
            real = len(tokens), int(asked), wrong_tokens(s, tokens), kept
            assert via_record.replay(block, 'slim', keep, escalate) == real
            outcomes.add(real)
        sd, _, _ = Exact().accept(s, draft, score)
        assert via_record.exact(block).tokens == len(sd)
    assert len(outcomes) > 12                           # else the above proves little
    assert max(real[0] for real in outcomes if not real[1]) == 6        # with slim's own token
    assert max(real[2] for real in outcomes) > 1


@pytest.mark.slow
def test_via_replayed_cascades_are_the_real_ones():
    """A recorded block tells what each cascade commits at any lam; a shorter block is its beginning."""
    outcomes = set()
    for seed in range(12):
        s, draft, block, _ = near_block(seed)
        short = replace(draft, tokens=draft.tokens[:3], q=draft.q[:3], logits=draft.logits[:3])
        for rule, lam in itertools.product(via_claims.CASCADES, (0.02, 0.3, 0.6, 0.95)):
            method = METHODS[rule](5, lam=lam)
            for guess in (draft, short):
                tokens, labels, _ = method.accept(s, guess, method.score(s, guess))
                real = len(tokens), 1, wrong_tokens(s, tokens), labels.count('draft')
                recorded = block.shortened(len(guess.tokens))
                assert via_record.cascade(recorded, rule, 1 - lam) == real
                outcomes.add((rule, *real))
    assert len(outcomes) > 12


def test_via_a_shorter_block_is_judged_as_one():
    """Cut to three draft tokens a block keeps slim's verdict on what follows them."""
    for seed in range(12):
        s, draft, block, score = near_block(seed)
        short = replace(draft, tokens=draft.tokens[:3], q=draft.q[:3], logits=draft.logits[:3])
        score = verify.Score(s, short, s.target.model.full)
        tokens, kept, _ = via_cycle(s, short, score, 0.0, 0.0)
        real = len(tokens), 0, wrong_tokens(s, tokens), kept
        assert via_record.replay(block.shortened(3), 'slim', 0.0, 0.0) == real


@pytest.mark.slow
def test_via_gates_are_monotone():
    """A higher `keep` keeps no more; a higher `escalate` asks the target no less often."""
    fewer = oftener = False
    for seed in range(12):
        s, draft, _, score = near_block(seed)
        kept, asked = [], []
        for keep in (0.0, 0.3, 0.6, 0.9, 1.0):
            _, accepted, _ = via_cycle(s, draft, score, keep, 0.0)
            kept.append(accepted)
        for escalate in (0.0, 0.3, 0.9, 2.0):
            _, _, escalated = via_cycle(s, draft, score, 2.0, escalate)
            asked.append(escalated)
        assert kept == sorted(kept, reverse=True)
        assert asked == sorted(asked)
        if kept[0] > kept[-1]:
            fewer = True
        if asked[0] < asked[-2]:
            oftener = True
    assert fewer and oftener


def test_via_distances_of_a_block():
    """By total variation no stage shortens the way (it is a metric); a stage that is the target adds none."""
    for seed in range(12):
        _, _, block, _ = near_block(seed)
        slim, mid = block.stages['slim'], block.stages['mid']
        assert max(slim.gains['TV']) < 1e-12
        assert max(mid.apart['TV']) < 1e-12
        for gains in mid.gains.values():
            assert max(map(abs, gains)) < 1e-9


def hand_block(ratios, same, p, room=9, over=False):
    """A Block with these ratios of slim and of the target, which also are what cascades trust."""
    n = len(p)
    apart = dict(TV=n * [0.25], R=n * [0.5])
    gains = dict(KL=n * [0.1], R=n * [0.0], strict=n * [-0.2], TV=n * [-0.1])
    seen = via_record.Seen(ratios, same, apart, gains)
    return via_record.Block(p, dict(cascade=p), room, over, dict(slim=seen))


def test_via_text_sums_by_hand(monkeypatch):
    """A lag beyond the limit is one full pass more; a text holds no more tokens than it has room for."""
    monkeypatch.setattr(via_record, 'MAX_LAG', 3)
    kept = hand_block([1.0, 1.0], [True, True, False], [1.0, 0.6])
    asks = hand_block([1.0, 0.1], [True, True, True], [1.0, 1.0], room=2)

    def rule(block):
        return via_record.replay(block, 'slim', 0.5, 0.3)

    def sums(*blocks):
        found = via_record.text_sums(blocks, rule)
        return found['tokens'], found['wrong'], found['passes']
    # of the three tokens of a block the second and slim's own are wrong
    assert sums(kept, kept) == (6, 4, 0)
    # 6 tokens unread are too many; then the lag begins anew
    assert sums(kept, kept, kept) == (9, 6, 1)
    assert sums(kept, kept, kept, kept) == (12, 8, 1)
    assert sums(kept, asks) == (5, 2, 1)
    # an escalation reads the lag too: what follows builds on nothing unread
    assert sums(kept, asks, kept, kept) == (11, 6, 1)
    # behind the end of a text, or of the room, there is no further token, and none that is wrong
    ends = hand_block([1.0, 1.0], [True, True, False], [1.0, 1.0], over=True)
    full = hand_block([1.0, 1.0], [True, True, False], [1.0, 1.0], room=2)
    assert sums(ends) == (2, 0, 0)
    assert sums(full) == (2, 0, 0)
    found = via_record.text_sums([ends, asks], via_record.exact)
    assert found == dict(tokens=4, wrong=0, passes=2, kept=4, judged=4)
    found = via_record.text_sums([kept], via_record.exact)
    assert found == dict(tokens=2, wrong=0, passes=1, kept=1, judged=2)


def test_via_gates_and_distances_by_hand():
    """The counts of gates and sums of distances that a text is stored with."""
    ratios = [1.0, 0.4, 0.4, 0.1]
    p = [1.0, 0.7, 1.0, 0.2]
    block = hand_block(ratios, [False, True, False, True, True], p)
    counts = dict(early=2, late=1, draft_right=2, slim_right=2, chosen_right=3)
    assert via_record.gates([block]) == counts
    found = via_record.distances([block, block])
    assert found['places'] == 8
    assert found['apart'] == dict(TV=dict(slim=2.0), R=dict(slim=4.0))
    assert found['gains'] == pytest.approx(dict(KL=0.8, R=0.0, strict=-1.6, TV=-0.8))
    assert found['above'] == dict(KL=8, R=0, strict=0, TV=0)


def gamma_row(gamma, cycles, via, cascades):
    """A row of `gammas` with these sums; drafting is free. via: (tokens, wrong, passes) of three pairs."""
    columns = {}
    for name, values in zip(('tokens', 'wrong', 'passes'), zip(*via)):
        columns[name] = values
    forgiving = dict(tokens=[cascades[0]] * 40 + [200] * 60, wrong=[cascades[1]] * 40 + [0] * 60)
    rules = dict.fromkeys(via_claims.CASCADES, forgiving)
    return dict(gamma=gamma, cycles=cycles, drafted=gamma * cycles, sd=200, via=columns, cascades=rules)


def test_via_choice_by_hand():
    """The fastest knobs of each rule that is hardly ever wrong; rivals no more often than via."""
    pairs = [[0.1, 0.0], [0.3, 0.0], [0.5, 0.3]]
    settings = dict(pairs=pairs, costs=dict(slim=0.5), draft_cost=0.0)
    rows = [gamma_row(3, 80, [(240, 30, 0), (240, 2, 0), (230, 1, 10)], (240, 2)),
            gamma_row(5, 50, [(210, 30, 0), (210, 1, 0), (205, 2, 4)], (210, 5))]
    choice = via_claims.choose(rows, settings)
    assert choice['via, tuned'] == dict(gamma=5, keep=0.3, escalate=0.0)        # 8.4 tokens a full pass
    assert choice[via_claims.ASKING] == dict(gamma=5, keep=0.5, escalate=0.3)
    assert choice['sd, tuned'] == dict(gamma=5)
    for rule in via_claims.CASCADES:                    # 5 wrong of 210 are too many: from 1 - lam = 0.41 on
        assert choice[f'{rule}, tuned'] == dict(gamma=5, lam=pytest.approx(0.59))
    found = via_claims.options(rows, settings)
    assert found['via'][5].pace == 205 / (25 + 4)
    assert found['via'][5].wrong == 2 / 205


def test_via_cascades_at_equal_agreement():
    """Between two lam a cascade's figure is interpolated at via's agreement; sd is lam 0."""
    speeds = [2.0, 2.2, 2.6, 2.0, 9.0]                  # of sd and of the four lam
    shares = [1.0, 0.9, 0.7, 0.5, 0.4]
    names = ['sd', *(via_claims.at('cascade', lam) for lam in via_claims.LAMS['cascade'])]
    runs = [dict(via=SimpleNamespace(alike=0.8))]
    for name, share in zip(names, shares):
        runs[0][name] = SimpleNamespace(alike=share)

    def figure(runs, name):
        return speeds[names.index(name)]
    assert via_claims.at_agreement(runs, 'cascade', figure) == pytest.approx(2.4)
    runs[0]['via'].alike = 0.95
    assert via_claims.at_agreement(runs, 'cascade', figure) == pytest.approx(2.1)


def test_via_rivals_that_wrote_some_texts():
    """Figures stand under the names of who wrote a text; a column of None alone is stored as None."""
    first = {name: [1, 3] for name in via_claims.Run._fields} | dict(who=[0, 2], right=None)
    second = {name: [4] for name in via_claims.Run._fields} | dict(who=[1])
    stored = dict(settings=SimpleNamespace(rows=[dict(rivals=['a', 'b', 'c'])]),
                  runs=SimpleNamespace(rows=[first, second]))
    found = via_claims.runs_of(stored)
    assert [list(run) for run in found] == [['a', 'c'], ['b']]
    assert found[0]['c'].tokens == 3 and found[0]['c'].right is None
    assert found[1]['b'].right == 4
    assert via_claims.having(found, 'a', 'c') == found[:1]
    assert via_claims.having(found, 'a', 'b') == []
    some = via_record.Rival(Exact, [], texts='odd')
    few = via_record.Rival(Exact, [], texts='few')
    assert [turn for turn in range(11) if via_record.writes(some, turn)] == [1, 3, 5, 7, 9]
    assert [turn for turn in range(11) if via_record.writes(few, turn)] == [0, 5, 10]


def test_via_texts_that_resolve_a_point():
    """A difference in one text of ten, up as often as down: n = 0.1 (1.96 / 0.01)^2."""
    right = SimpleNamespace(right=1)
    wrong = SimpleNamespace(right=0)
    texts = [dict(ar=right, via=wrong), dict(ar=wrong, via=right)] + [dict(ar=right, via=right)] * 18
    assert via_claims.texts_needed(texts) == '2 texts differ, so that one point takes 3842 texts'


def test_via_likeness():
    """The share of equal places, of the longer text's."""
    assert via_record.likeness([1, 2, 3], [1, 2, 3]) == 1
    assert via_record.likeness([1, 2, 3], [1, 5, 3, 4]) == 0.5


def test_via_lenient_sd_is_compared_at_as_many_wrong_tokens():
    """Of lenient sd the fastest that is no oftener wrong; records that are not there have no claims."""
    settings = dict(pairs=[[0.5, 0.3]], costs=dict(slim=0.5), draft_cost=0.1)
    row = dict(cycles=2, places=10, gates=dict(late=2), via=dict(tokens=[12], wrong=[1], passes=[1]),
               lenient=dict(tokens=[10, 11, 14], wrong=[0, 0, 3]))
    stored = dict(settings=common.Stored({}, [settings]), replays=common.Stored({}, [row, row]))
    claim, = via_claims.lenient_replays(stored)
    assert claim.figure(claim.rows) == pytest.approx(12 / 11)       # 1 + 1 + 1 full passes, and 1 + 2
    assert '20.0% of the draft tokens go to the target' in claim.note
    assert via_claims.claims({}) == via_claims.tables({}) == []
    assert via_claims.claims(dict(unseen=common.Stored({}, []))) == []


def test_engine_of_a_pair_takes_what_the_pair_has_loaded(tmp_path):
    """No network is held twice."""
    folders = [str(checkpoint(tmp_path / name, byte_network(seed))) for seed, name in enumerate('ab')]
    rows = tmp_path / 'rows.jsonl'
    rows.write_text('{"prompt": "a"}\n')
    pair = Pair(*folders, prompts=(str(rows),), max_new=8)
    engine = pair.engine(pair.texts((), 1))
    for role, model in engine.models.items():
        assert model is pair.network(role)[0]


def test_via_search_is_judged_on_texts_that_it_has_not_seen(tmp_path, monkeypatch):
    """By R a token; its rival is the block that is best on these texts, or the evenly spaced layers."""
    rows = [dict(scored=10, found=1.0, evenly=9.0, blocks=[1.0, 3.0]),
            dict(scored=30, found=2.0, evenly=9.0, blocks=[4.0, 3.0])]
    claim, = via_claims.unseen_claims(dict(unseen=common.Stored({}, rows)))
    assert claim.figure(rows) == pytest.approx(1 - 1.75 / 3)
    file = tmp_path / 'rows.jsonl'
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n{"prompt": "d"}\n')
    asked = train_mask.Settings(prompts=str(file), windows=2).asked()
    prompts = [SimpleNamespace(row=dict(prompt=letter)) for letter in 'abcd']
    monkeypatch.setattr(via_record, 'read_calibration', lambda *args: dict(mask=dict(settings=asked)))
    monkeypatch.setattr(via_record, 'prompts_of', lambda pair, n: prompts)
    left = via_record.unseen_prompts(SimpleNamespace(target=''), 4)
    assert [prompt.row['prompt'] for prompt in left] == ['b', 'd']


# ------------------------------------------------------------------------ SpecGuard

STEP_PROMPT = [3, 2]
ROOM = 30                               # tokens
ENDS = [-math.inf, 0.5, math.inf]       # the draft writes everything; some of it; the target does
EITHER = ['draft', 'target']              # whose signals


def step_session(seed=0, room=ROOM, **settings):
    """A Session on a random pair whose texts have steps."""
    target = network(0, 12)
    draft = network(1, 12)
    return session(target, draft, STEP_PROMPT, room, seed=seed, **LINES | settings)


def guarded(method, seed=0, **settings):
    """(tokens, cycles) of 30 tokens by a method on a random pair; settings: of the Session."""
    return write(step_session(seed, **settings), method)


def greedy(tau, who, k=1, **knobs):
    """SpecGuard whose candidates are all alike."""
    return SpecGuard(tau=tau, k=k, signals=who, draft_temperature=0.0, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize('layers, n, chosen', [
    ('last', 1, [4]),
    ('last', 3, [2, 3, 4]),
    ('last', 9, [0, 1, 2, 3, 4]),
    ('first', 3, [0, 1, 2]),
    ('middle', 2, [1, 2]),
    ('all', 1, [0, 1, 2, 3, 4])])
@pytest.mark.parametrize('sparsify, residual', [(0, 0), (0.04, 0), (0.3, 0.5), (1, 0)])
def test_specguard_rollout_is_the_product_of_whole_matrices(layers, n, chosen, sparsify, residual):
    """In each token's sum over all old tokens; but not over a strict subset of them."""
    model = network(num_hidden_layers=5)
    line = torch.arange(20).remainder(11).tolist()
    begin = 4
    path = model.full.grounded(layers, n, begin=begin, sparsify=sparsify, residual=residual)
    Reader(model, 64).read(line[:begin], line[begin:], path, 16)
    mine = path.carry['shades'][0]
    whole = whole_rollout(model, line, chosen, sparsify, residual)[begin:]
    assert mine.shape == (16, begin)
    grounding = mine.sum(-1)
    assert largest_gap(grounding, whole[:, :begin].sum(-1)) < 1e-9
    assert grounding.std() > 0.01
    assert grounding.max() < 1 + 1e-9
    subset_gap = largest_gap(mine[:, 1:3].sum(-1), whole[:, 1:3].sum(-1))
    only_layer = len(chosen) == 1
    assert (subset_gap < 1e-9) == only_layer


def largest_gap(a, b):
    return float((a - b).abs().max())


def test_specguard_rollout_without_the_first_token():
    """The recursion over the new rows is the product of whole matrices whose first column is gone."""
    begin = 3
    whole = []
    for seed in (0, 1):
        weights = torch.rand(7, 7, generator=seeded(seed), dtype=torch.float64).tril()
        weights[:, 0] += 3                              # a sink
        whole.append(weights / weights.sum(-1, keepdim=True))
    layers = [{0.01: weights[None, begin:]} for weights in whole]
    full = network(1).full
    rollout = Rollout('draft', 'last', 2)
    with_it = specguard_steps.lowest_grounding(full, layers, rollout)
    without = specguard_steps.lowest_grounding(full, layers, rollout._replace(first=False))
    lower, upper = [specguard_steps.without_first(weights[None])[0] for weights in whole]
    assert lower[1].tolist() == [0, 1] + [0] * 5        # only itself is left to it
    product = upper @ lower
    assert without == pytest.approx(product[begin:, :begin].sum(-1).min().item())
    assert with_it > without + 0.1


def test_specguard_picture_has_the_rows_of_the_whole_rollout():
    """Those of kernels.shade have their sums alone: drawn, they would blame the wrong tokens."""
    single = torch.float32                              # as the embedded models are
    s = session(network(0, 12, single), network(1, 12, single), [3, 2, 5, 1, 4, 8], ROOM, **LINES)
    draft, = write_steps(s, SpecGuard(k=1, max_step=6), s.draft, 1)
    drawn = specguard_record.draw_step(s, draft, SimpleNamespace(decode=str))
    path = s.draft.model.full.grounded('last', 3, begin=6, sparsify=0.01, residual=0.0)
    s.draft.read(s.tokens, draft.tokens, path, len(draft.tokens))
    whole = whole_rollout(s.draft.model, s.tokens + draft.tokens, [0, 1], 0.01, 0.0)[6:, :6]
    same_spread = 0
    for line, row, shade in zip(drawn, whole, path.carry['shades'][0], strict=True):
        shown = [float(lean.split()[-1]) for lean in line.split('   ')[-1].split(', ')]
        assert shown == pytest.approx(row.sort(descending=True).values[:4].tolist(), abs=0.006)
        same_spread += largest_gap(row, shade) < 0.01
    assert same_spread < len(draft.tokens)


@pytest.mark.parametrize('layers, n', [('last', 3), ('all', 1)])
@pytest.mark.parametrize('sparsify, residual', [(0, 0), (0.3, 0.5)])
def test_specguard_observed_pass_is_an_ordinary_one(layers, n, sparsify, residual):
    """Its logits are a fresh pass's, and the cache may trust what it wrote."""
    model = network(num_hidden_layers=5)
    line = torch.arange(20).remainder(11).tolist()
    path = model.full.grounded(layers, n, begin=4, sparsify=sparsify, residual=residual)
    reader = Reader(model, 64)
    logits = reader.read(line[:4], line[4:], path, 16)
    assert largest_gap(logits, fresh(model, line, 16)) < 1e-12
    assert trusted(reader, line) == 20


@pytest.mark.slow
@pytest.mark.parametrize('who', EITHER)
@pytest.mark.parametrize('tau', ENDS)
def test_specguard_equal_candidates_leave_nothing_to_select(tau, who):
    """Greedy candidates are one candidate; nor does it matter whether the draft helps the target to write."""
    text, cycles = guarded(greedy(tau, who))
    same, others = guarded(greedy(tau, who, k=4, regenerate='sd'))
    assert text == same
    assert [c.labels for c in cycles] == [c.labels for c in others]


@pytest.mark.slow
@pytest.mark.parametrize('who', EITHER)
@pytest.mark.parametrize('tau, writer', [(-math.inf, 1), (math.inf, 0)])
def test_specguard_ends_of_tau_are_the_texts_of_one_model(tau, writer, who):
    text, _ = guarded(greedy(tau, who))
    assert text == plain(network(writer, 12), STEP_PROMPT, ROOM)


def test_specguard_draft_only_is_the_drafts_greedy_text():
    text, _ = guarded(specguard_record.DRAFT_ONLY)
    assert text == plain(network(1, 12), STEP_PROMPT, ROOM)


@pytest.mark.parametrize('who, seed', [('draft', 1), ('target', 0)])
def test_specguard_log_probabilities_are_of_each_token_itself(who, seed):
    """A shift by one would show. All tokens are the draft's here."""
    text, cycles = guarded(greedy(-math.inf, who))
    logits = fresh(network(seed, 12), STEP_PROMPT + text)[1:-1]
    found = []
    for cycle in cycles:
        found += [verdict['logp'] for verdict in cycle.judged]
    assert found == pytest.approx(token_logps(logits, text).tolist())


@pytest.mark.slow
@pytest.mark.parametrize('who', EITHER)
@pytest.mark.parametrize('tau', ENDS)
def test_specguard_passes_of_a_step(tau, who):
    """A draft pass a token, one observed pass, and a target pass a token only where the target writes."""
    _, cycles = guarded(greedy(tau, who))
    for cycle in cycles:
        T = len(cycle.drafted)
        wrote = cycle.labels[0] == 'target'
        root = who == 'target'                  # which the target has not read before
        assert cycle.passes['draft/full'][0] == T
        assert cycle.passes[f'{who}/grounded'][:2] == [1, T + root]
        written, *_ = cycle.passes.get('target/full', [0])
        assert written == wrote * len(cycle.tokens)
        assert len(cycle.passes) == 2 + wrote


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('tau', ENDS)
def test_specguard_steps_end_at_the_delimiter(tau, seed):
    _, cycles = guarded(SpecGuard(tau=tau), seed, temperature=1.0)
    for cycle in cycles[:-1]:                   # the last may be cut by the room
        text = LINES['text'](cycle.tokens).lstrip()
        before = LINES['text'](cycle.tokens)[:-1].lstrip()
        assert '\n' in text and '\n' not in before


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('tau', ENDS)
def test_specguard_text_ends_inside_a_step(tau, seed):
    """At the end of sequence, whichever token that is; what counts as kept is what was kept."""
    line, _ = guarded(SpecGuard(tau=tau), seed, temperature=1.0)
    for eos in {*line[::5]}:
        cut, cycles = guarded(SpecGuard(tau=tau), seed, temperature=1.0, eos=frozenset([eos]))
        assert eos not in cut[:-1]
        assert len(cut) == 30 or cut[-1] == eos
        for cycle in cycles:
            assert cycle.accepted == sum(verdict['kept'] for verdict in cycle.judged)


@pytest.mark.parametrize('kind, steps', [
    ('line', ['## Sum\n', '\\[\n 3.5 + 4 = 7.5\n', '\\]\nSo it is 7.5. Hence 8!\n', '1. Add. Done']),
    ('sentence', ['## Sum\n', '\\[\n 3.5 + 4 = 7.5\n', '\\]\nSo it is 7.5. Hence 8!', '\n1. Add.', ' Done']),
    ('paragraph', ['## Sum\n\\[\n 3.5 + 4 = 7.5\n\\]\nSo it is 7.5. Hence 8!\n1. Add. Done']),
    ('7.5', ['## Sum\n\\[\n 3.5 + 4 = 7.5', '\n\\]\nSo it is 7.5', '. Hence 8!\n1. Add. Done'])])
def test_specguard_kinds_of_steps_by_hand(kind, steps):
    """Letter by letter: brackets alone are no step, neither a decimal point nor an item's number ends one."""
    s = step_session(room=99, text=lambda ids: ''.join(map(chr, ids)))
    found = answers.steps_of(s, [*map(ord, ''.join(steps))], kind)
    assert [s.text(step) for step in found] == steps


def test_specguard_paragraph_is_longer_than_a_line():
    assert SpecGuard(delimiter='paragraph').most() == 128
    assert SpecGuard(delimiter='paragraph', max_step=7).most() == 7
    assert SpecGuard().most() == 48


@pytest.mark.parametrize('tau', ENDS)
def test_specguard_max_step_ends_a_text_without_newlines(tau):
    def no_newlines(ids):
        return 'x' * len(ids)
    _, cycles = guarded(SpecGuard(tau=tau, max_step=7), text=no_newlines)
    assert [len(cycle.tokens) for cycle in cycles] == [7, 7, 7, 7, 2]


@pytest.mark.parametrize('low, stale', [(-99, False), (-1, True)])
def test_specguard_signals_outside_the_percentiles_are_told(low, stale):
    """Step by step, and in the run's remark, which calls the calibration stale above 20 %."""
    ends = dict(signals=dict(draft_logp=[low, 0], draft_grounding=[0, 1]))
    _, cycles = guarded(SpecGuard(tau=0.5, max_step=6), calibration=ends)
    outside = []
    for cycle in cycles:
        outside.append(min(verdict['logp'] for verdict in cycle.judged) < low)
        assert cycle.judged[0]['clipped'] == outside[-1]
    text, = specmini.remarks(SpecGuard(), None, cycles, [])
    assert (sum(outside) > len(cycles) / 5) == stale
    assert ('above 20 %' in text) == stale


@pytest.mark.parametrize('preset, values', [
    ('notes', dict(k=4, draft_temperature=0.7, draft_top_p=1, beta=0.5, tau=0.5, target_k=1,
                   target_temperature=None, target_top_p=None)),
    ('paper', dict(k=16, draft_temperature=0.7, draft_top_p=0.8, beta=0.3, tau=0.7, target_k=16,
                   target_temperature=0.7, target_top_p=0.8)),
    ('greedy', dict(k=1, draft_temperature=0, draft_top_p=1, beta=0.5, tau=0.5, target_k=1))])
def test_specguard_presets(preset, values):
    """What a preset sets; a knob that is given is not overridden."""
    method = SpecGuard(preset=preset)
    for knob, value in values.items():
        assert getattr(method, knob) == value
    assert SpecGuard(preset=preset, k=2).k == 2


def test_specguard_target_candidates_have_their_own_temperature():
    """At temperature 0 the run's own would all be alike; a single one is written as the run samples."""
    s = step_session()
    method = SpecGuard(preset='paper', draft_temperature=2.0, draft_top_p=1.0)
    several = write_steps(s, method, s.target, 16)
    assert len({tuple(draft.tokens) for draft in several}) > 1
    for draft in several:
        assert largest_gap(draft.q, probs(draft.logits, 0.7, 0, 0.8)) == 0
    alone, = write_steps(s, method, s.target, 1)
    assert alone.tokens == plain(network(0, 12), STEP_PROMPT, len(alone.tokens))
    assert SpecGuard(preset='paper', tau=math.inf, target_k=1).lossless
    assert not SpecGuard(preset='paper', tau=math.inf).lossless


def test_specguard_needs_an_attention_that_it_can_read():
    blind = network(1, 12)
    blind.full = blind.full.without({0, 2})        # both layers without attention
    s = session(network(0, 12), blind, STEP_PROMPT, 9, **LINES)
    with pytest.raises(ValueError, match='the attention of the draft cannot be read'):
        write(s, SpecGuard())


def frozen_verdicts(tau, **knobs):
    """[(L, G, verdict)] of 20 steps with given signals; the scales are [-4, 0] and [0, 1]."""
    s = step_session(room=12)
    method = SpecGuard(tau=tau, **knobs)
    draft = Draft([4, 5], torch.full((2, 12), 1 / 12))
    found = []
    for i in range(20):
        logp = -0.2 * i                     # of the step's second token
        grounding = 0.04 * i + 0.1
        seen = [(-0.1, 0.8), (logp, grounding)]
        _, _, verdicts = method.accept(s, draft, seen)
        L = 1 + min(logp, -0.1) / 4
        G = min(0.8, grounding)
        found.append((L, G, verdicts[0]))
    return found


def test_specguard_score_by_hand():
    """0.3 of the weakest confidence and 0.7 of the weakest grounding; with `and` the weaker of the two."""
    for L, G, verdict in frozen_verdicts(0.5, beta=0.3):
        assert verdict['score'] == pytest.approx(0.3 * L + 0.7 * G, abs=1e-6)
    for L, G, verdict in frozen_verdicts(0.5, beta=0.3, combine='and'):
        assert verdict['score'] == pytest.approx(min(L, G), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('combine', ['weighted', 'and'])
def test_specguard_target_writes_more_as_tau_rises(combine):
    """On frozen scores the steps that the target writes never become fewer: none at -inf, all at inf."""
    rising = [-math.inf, 0.2, 0.3, 0.47, 0.49, 0.51, 0.53, 1.01, math.inf]
    wrote = []
    for tau in rising:
        verdicts = frozen_verdicts(tau, combine=combine, beta=0.3)
        wrote.append(sum(not verdict['kept'] for _, _, verdict in verdicts))
    assert wrote == sorted(wrote)
    assert wrote[0] == 0
    assert wrote[-1] == 20
    assert len(set(wrote)) > 3


# ------------------------------------------------------------------------ SpecGuard's rivals

def likes(ids):
    """A step checker to which some steps are right: where 3 divides the sum of all ids."""
    return sum(ids) % 3 == 0


def rival_cycles(name, **knobs):
    method = METHODS[name](**knobs)
    _, cycles = write(step_session(room=40, checker=likes), method)
    return cycles


def one_hot_draft(*ids):
    """A Draft of these ids; row i of its logits likes token i best."""
    logits = torch.eye(12)[:len(ids)]
    return Draft([*ids], logits, logits)


@pytest.mark.parametrize('name', ['oracle-gate', 'rsd'])
def test_specguard_rivals_by_checker_keep_what_it_likes(name):
    """Of both kinds there is one; what is behind the prompt is the text so far and the step."""
    text = STEP_PROMPT
    liked = []
    for cycle in rival_cycles(name, max_step=4):
        liked.append(likes(text + cycle.drafted))
        assert cycle.judged[0]['kept'] == liked[-1]
        text = text + cycle.tokens
    assert {*liked} == {True, False}


def tiered(**knobs):
    """Cycles of a text by specguard-tiers, on a pair with a mask."""
    s = slim_session(3, 40, text=letters)
    s.calibration |= dict(signals=RANGES | dict(target_logp=[-9, 0]))
    return s, *write(s, METHODS['specguard-tiers'](k=1, max_step=4, **knobs))


def test_specguard_tiers_ask_slim_only_where_the_draft_doubts():
    """A pass of slim a doubted step; the target writes what slim doubts, too."""
    s, tokens, cycles = tiered(tau=0.72, tau_slim=0.6)
    verdicts = Counter()
    for c in cycles:
        asked = 'target/slim' in c.passes
        signals = [(row['logp'], row['grounding']) for row in c.judged]
        ranges = RANGES['draft_logp'], RANGES['draft_grounding']
        own, _ = verify.step_score(signals, ranges, 0.5, 'weighted')
        kept = c.judged[0]['kept']
        assert asked == (own < 0.72) and (asked or kept)
        assert not asked or c.passes['target/slim'][0] == 1
        assert ('target/full' in c.passes) != kept
        verdicts[asked, kept] += 1
    assert verdicts.keys() == {(False, True), (True, True), (True, False)}


def test_specguard_tiers_slim_score_by_hand():
    """The least log-probability of a step's tokens by slim, on top of a prompt that the full path read."""
    s = slim_session(3)
    s.read_prompt()
    full = s.target.model.full
    least = {}
    for name, path in dict(slim=full.without([2, 3, 4]), full=full).items():
        reader = Reader(s.target.model, 9)
        reader.read(s.tokens[:-1], [], full, 0)
        rows = reader.read(s.tokens, [4, 5, 6], path, 4).log_softmax(-1)
        least[name] = min(float(row[token]) for row, token in zip(rows, [4, 5, 6]))
    assert slim_lowest(s, [4, 5, 6]) == pytest.approx(least['slim']) != pytest.approx(least['full'])


def test_specguard_tiers_that_always_doubt_are_exact():
    """Above 1 no step reaches either threshold, and the target writes its own greedy text."""
    s, tokens, cycles = tiered(tau=1.5, tau_slim=1.5)
    assert METHODS['specguard-tiers'](tau=1.5, tau_slim=1.5).lossless
    assert tokens == plain(s.target.model, SLIM_PROMPT, 40)
    assert all('target/slim' in c.passes for c in cycles)


def test_specguard_tiers_by_hand():
    """Of a replayed gate: right answers, work in target passes, share of the target's steps."""
    step = tier_claims.Tiered(logp=-1, ungrounded=0.5, slim=-3, target=-5, written=8, own=7, right=0,
                              own_right=1)
    sure = step._replace(logp=0, ungrounded=0, right=1)
    costs = dict(draft=0.25, slim=0.5)
    board = tier_claims.Board([([sure, step], costs)], [(-1, 0), (0, 1)])
    assert board.score.tolist() == [1, 0.25]

    def judged(name, first, second):
        return board.judged(tier_claims.Gate(name, first, second)).tolist()[0]
    drafted = 2 * 8 * 0.25
    assert judged('one gate', 0.2, math.inf) == [0, drafted + 0.5, 0]
    assert judged('one gate', 0.5, math.inf) == [1, drafted + 0.5 + 7, 0.5]
    assert judged('three tiers', 0.5, -4) == [0, drafted + 0.5 + 0.5, 0]
    assert judged('three tiers', 0.5, -2) == [1, drafted + 0.5 + 0.5 + 7, 0.5]
    assert judged('the target in place of slim', 0.5, -4) == [1, drafted + 0.5 + 1 + 7, 0.5]
    assert judged('signals=target', math.inf, -6) == [0, drafted + 2, 0]
    assert board.alone() == 14


@pytest.mark.slow
@pytest.mark.parametrize('rate, writers', [
    (0, {'target'}),
    (0.5, {'target', 'draft'}),
    (1, {'draft'})])
def test_specguard_random_gate_keeps_its_rate(rate, writers):
    """One seed in 500 would miss one of the two at 0.5."""
    cycles = rival_cycles('random-gate', rate=rate, max_step=4)
    assert {cycle.labels[0] for cycle in cycles} == writers


@pytest.mark.parametrize('name', ['specreason', 'specguard-pooled'])
def test_specguard_rivals_write_the_whole_text(name):
    cycles = rival_cycles(name)
    assert sum(len(cycle.tokens) for cycle in cycles) == 40


@pytest.mark.slow
@pytest.mark.parametrize('name', ['majority', 'best-of-n'])
def test_specguard_rivals_of_whole_texts_take_one_cycle(name):
    assert len(rival_cycles(name)) == 1


def test_specguard_specreason_mark_by_hand():
    """9 times the geometric mean of the target's probabilities, here 1/2 and 1/8."""
    seen = [(math.log(0.5), None), (math.log(0.125), None)]
    mark, clipped = METHODS['specreason']().judge(None, None, seen)
    assert mark == pytest.approx(9 * 0.25)
    assert not clipped


def test_specguard_majority_takes_the_commonest_last_line():
    """Ids 1 and 5 end a line: the first text and the last end in the same one."""
    first = one_hot_draft(0, 1, 2)
    other = one_hot_draft(3, 1, 0)
    last = one_hot_draft(5, 1, 2)
    majority = METHODS['majority']()
    assert majority.choose(step_session(), [first, other, last]) is first
    assert majority.choose(step_session(), [other, last, first]) is last


def test_specguard_best_of_n_takes_the_surest():
    """By mean, not by sum: token i is the likeliest at place i."""
    none = one_hot_draft(4, 5, 6, 5)
    half = one_hot_draft(0, 9)
    quarter = one_hot_draft(4, 9, 2, 8)
    assert METHODS['best-of-n']().choose(step_session(), [none, half, quarter]) is half


def test_specguard_process_best_of_n_takes_a_text_without_a_wrong_step():
    """Steps end behind 5 and 9: the first text begins with a wrong one. Without that both are as good."""
    def dislikes_4_5(ids):
        return ids[2:] != [4, 5]

    def likes_all(ids):
        return True
    wrong = one_hot_draft(4, 5, 6, 5)
    right = one_hot_draft(4, 9, 6, 8)
    method = METHODS['process-best-of-n']()
    assert method.choose(step_session(checker=dislikes_4_5), [wrong, right]) is right
    assert method.choose(step_session(checker=likes_all), [wrong, right]) is wrong


def test_specguard_pooled_takes_the_embedding_in_the_middle():
    means = {0: (1.0, 0.0), 3: (1.0, 1.0), 5: (0.0, 1.0)}       # by first token

    class Pooled(METHODS['specguard-pooled']):
        def embed(self, session, steps):
            return torch.tensor([means[ids[0]] for ids in steps])
    left = one_hot_draft(0, 1, 2)
    middle = one_hot_draft(3, 1, 0)
    right = one_hot_draft(5, 1, 2)
    assert Pooled().choose(None, [left, middle, right]) is middle
    assert Pooled().choose(None, [left]) is left


def test_specguard_pooled_embeds_what_the_cache_does_not_hold_yet():
    """The mean hidden states are those of fresh passes; the price is one pass over the candidates' rows."""
    s = step_session()
    s.read_prompt()
    s.draft.read(s.tokens, [], s.draft.model.full, 1)
    mark = len(s.draft.log)
    steps = [[4, 5, 6], [7, 8], [9]]
    found = METHODS['specguard-pooled']().embed(s, steps)
    assert s.draft.spent(mark)['full'][:2] == [1, 9]
    for mine, ids in zip(found, steps):
        line = torch.tensor([STEP_PROMPT + ids])
        hidden = s.draft.model(line, torch.arange(line.shape[1]), s.draft.model.full)[0, -len(ids):]
        assert largest_gap(mine, hidden.mean(0)) < 1e-12
    assert s.draft.cache.ids == STEP_PROMPT


LIKELY_ENDS = [(1, frozenset([4])), (4, frozenset([0])), (7, frozenset())]      # (seed, ends of sequence)


def all_texts(length, vocabulary, eos):
    """Every text of this length, cut behind its first end of sequence."""
    texts = set()
    for line in itertools.product(range(vocabulary), repeat=length):
        end = 1
        while end < length and line[end - 1] not in eos:
            end += 1
        texts.add(line[:end])
    return texts


@pytest.mark.slow
@pytest.mark.parametrize('seed, eos', LIKELY_ENDS)
def test_specguard_beam_finds_the_likeliest_text(seed, eos):
    """Wide enough, it finds the text of highest mean log-probability (not sum) of all."""
    draft = network(seed, 5)

    def mean_logp(text):
        logits = fresh(draft, STEP_PROMPT + list(text), len(text) + 1)
        return float(token_logps(logits[:-1], list(text)).mean())
    s = session(network(0, 5), draft, STEP_PROMPT, 3, eos=eos, **LINES)
    found, _ = write(s, METHODS['beam'](k=125))
    assert tuple(found) == max(all_texts(3, 5, eos), key=mean_logp)


@pytest.mark.parametrize('seed, eos', LIKELY_ENDS)
def test_specguard_beam_of_one_is_greedy(seed, eos):
    draft = network(seed, 5)
    s = session(network(0, 5), draft, STEP_PROMPT, 20, eos=eos, **LINES)
    found, _ = write(s, METHODS['beam'](k=1))
    assert found == plain(draft, STEP_PROMPT, 20, eos=eos)


# ------------------------------------------------------------------------ SpecGuard: records and gates

def test_specguard_most_central_by_hand():
    """By the pairs of tokens that steps share, in order; of tied ones the surer, then the first."""
    steps = [[3, 2, 1], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]
    assert most_central(steps, [0, -9, -9, -9]) == 1
    assert most_central([[4], [5], [5]], [0, -9, -9]) == 1
    assert most_central([[1], [2], [3]], [-2, -1, -1]) == 1
    assert most_central([[7, 7]], [0]) == 0


def test_specguard_commonest_candidate_by_hand():
    """Letter by letter, of the first four; the most central among the first n."""
    a = one_hot_draft(0, 1, 2)
    b = one_hot_draft(3, 1, 0)
    c = one_hot_draft(5, 1, 2)
    found = specguard_steps.chosen_candidates([a, b, c, b, a, a, a, a])
    assert found == {'1': 0, '2': 0, '4': 1, '8': 0, 'common': 1}


def stored_step(L, G, right, tokens, longest, own):
    """A record_step whose one candidate has these signals; own: (tokens, right) of the target's step."""
    own_tokens, own_right = own
    ungrounded = {'draft last 3': 1 - G}
    candidate = dict(text='', tokens=tokens, right=right, same=0, logp=dict(draft=L), ungrounded=ungrounded)
    target = dict(tokens=own_tokens, right=own_right)
    return dict(candidates=[candidate], picks={'4': 0}, passes={'4': longest}, own=target)


def stored_problem():
    """A problem of two steps, the first right, the second of the draft wrong, and its scales."""
    first = stored_step(-1.0, 0.9, True, 5, 6, own=(7, True))
    second = stored_step(-3.0, 0.2, False, 6, 9, own=(8, True))
    ranges = [[-4, 0], [0, 1]]
    ranked = [[-4, -2, 0], [0.1, 0.5, 1.0]]
    return problem_row('math', [first, second]), {'draft last 3': Scale(ranges, ranked)}


def test_specguard_recorded_scores_by_hand():
    first, second = specguard_claims.judged(*stored_problem())
    work = specguard_claims.kind_of('')
    assert first == pytest.approx(((0.75 + 0.9) / 2, -1.0, 0.9, True, 5, work))
    assert second == pytest.approx(((0.25 + 0.2) / 2, -3.0, 0.2, False, 6, work))


def test_specguard_ranked_scores_by_hand():
    """The share of other steps' signals that are lower."""
    first, second = specguard_claims.judged(*stored_problem(), replace(USUAL, scale='rank'))
    assert first.score == pytest.approx(2 / 3)
    assert second.score == pytest.approx(1 / 3)


def test_specguard_outcome_by_hand():
    """Right, share of target steps, tokens, passes and positions of both models."""
    by_score = outcome(*stored_problem())
    by_coin = outcome(*stored_problem(), rate=0.5)
    assert astuple(by_score) == (1, 0.5, 13, 17, 8, 65, 13)
    assert astuple(by_coin) == (0.5, 0.5, 13, 17, 7.5, 68, 8.75)


def test_specguard_a_fifth_of_each_task_tunes():
    problem, _ = stored_problem()
    problems = []
    for task in TASKS:
        problems += [problem | dict(task=task)] * 10
    steps = split(problems)
    for task in TASKS:
        assert len(steps.tune[task]) == 2
        assert len(steps.test[task]) == 8
        assert {problem['task'] for problem in steps.test[task]} == {task}
    ranked, _ = steps.scales['draft last 3'].ranked
    assert ranked == [-3.0] * 6 + [-1.0] * 6


def test_specguard_ranking_figures_by_hand():
    assert roc_area([1, 2, 2, 3], [0, 0, 1, 1]) == 0.875
    assert math.isnan(roc_area([1], [1]))
    assert average_precision([3, 2, 1], [1, 0, 1]) == pytest.approx(5 / 6)
    together = average_precision([2, 2, 1], [1, 0, 1])
    assert together == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_specguard_area_within_groups_by_hand():
    """Two pairs of length 5, one of them in order, and one of length 6 that is; of length 7 none is wrong."""
    signal = numpy.array([1.0, 2.0, 3.0, 9.0, 0.0, 4.0])
    right = numpy.array([0, 1, 0, 1, 0, 1])
    length = numpy.array([5, 5, 5, 6, 6, 7])
    area = area_within(signal, right, length)
    assert area == pytest.approx((2 * 0.5 + 1) / 3)
    alone = length == 7
    assert math.isnan(area_within(signal[alone], right[alone], length[alone]))


def test_specguard_signal_that_tells_kinds_alone_tells_nothing_within_them():
    """Simpson's paradox: look-ups are the most grounded steps and the most often wrong."""
    problem, scales = stored_problem()
    problem['candidates']['text'] = ['| cost of pens 7', '1 + 1 = 2']
    look_up, work = specguard_claims.judged(problem, scales)
    assert look_up.kind != work.kind
    rows = []
    for kind, G, wrong in ((look_up.kind, 0.9, 3), (work.kind, 0.1, 1)):
        rows += [(0.0, 0.0, G, i >= wrong, kind) for i in range(4)]
    rows = numpy.array(rows, dtype=float)
    assert roc_area(rows[:, 2], rows[:, 3]) == 0.25
    assert specguard_claims.grounding_area([rows[:5], rows[5:]]) == 0.5


def test_specguard_gate_at_a_share_of_target_steps_by_hand():
    """Two of four steps are the target's: the lowest, and by a coin one of two equal ones; of two texts."""
    kept = specguard_claims.kept_at(numpy.array([2.0, 1.0, 3.0, 2.0]), 0.5)
    assert kept.tolist() == [0.5, 0, 1, 0.5]
    problem, scales = stored_problem()
    board = specguard_claims.board_of([problem, problem], scales)
    found = {gate: specguard_claims.right_at(board, gate, 0.5).tolist() for gate in board.scores}
    assert found == dict(both=[1, 1], L=[1, 1], G=[1, 1], coin=[0.5, 0.5], oracle=[1, 1])
    assert specguard_claims.right_at(board, 'L', 0).tolist() == [0, 0]
    assert specguard_claims.right_at(board, 'oracle', 0.25).tolist() == [0.5, 0.5]
    problem['own']['right'] = [False, True]
    worse = specguard_claims.board_of([problem], scales)
    assert specguard_claims.right_at(worse, 'L', 1).tolist() == [0]


def test_specguard_lower_bound_is_clopper_pearsons():
    for right, n in ((0, 5), (1, 1), (9, 9), (19, 20), (250, 260), (3, 200)):
        exact = scipy.stats.binomtest(right, n).proportion_ci(method='exact').low
        assert least_share(right, n) == pytest.approx(exact, abs=1e-5)
    assert least_share(0, 0) == 0


def test_specguard_gate_is_chosen_by_what_is_sure():
    """Few kept steps that were all right by luck do not make a gate."""
    lucky = dict(target=0.2, right=0.96, sure=0.93)
    sure = dict(target=0.4, right=0.955, sure=0.951)
    assert choose_gate([lucky, sure], 0.95) is sure
    assert choose_gate([lucky, sure], 0.99) is sure
    few = gate_curve([(0.0, 0.5, True)] * 20 + [(-1.0, 0.5, False)] * 20, [[-1, 0], [0, 1]])
    for gate in few:
        kept = round(40 * (1 - gate['target']))
        assert gate['sure'] == least_share(round(gate['right'] * kept), kept)


def test_specguard_chosen_gate_by_hand():
    """Confidence alone tells right from wrong: by accuracy the fewest target steps, by share most right."""
    steps = [(-i / 10, 0.5, i < 6) for i in range(11)]
    ranges = signal_ranges([(L, G) for L, G, _ in steps])
    curve = gate_curve(steps, ranges)
    best = choose_gate(curve, 1.0)
    assert best['right'] == 1
    assert best['target'] == 1 - 6 / 11
    assert choose_gate(curve, None, 0.2)['target'] == pytest.approx(2 / 11)


def test_specguard_gate_that_keeps_next_to_nothing_is_not_chosen(capsys):
    """One step in 40 is too few; the nearest gate is taken, and the curve's last lines say so."""
    steps = [(-i, 0.5, i in (0, 2)) for i in range(40)]
    curve = gate_curve(steps, [[-39, 0], [0, 1]])
    best = choose_gate(curve, 1.0)
    assert max(gate['right'] for gate in curve) == 1
    assert best['right'] < 1
    assert 1 - best['target'] >= 0.05
    print_curve(curve, best, 1.0)
    out = capsys.readouterr().out
    assert f'the nearest, {best["sure"]:.1%}, is chosen' in out
    assert out.count('<- chosen') == 1


def test_specguard_step_checker_by_hand():
    """A right line, a right text; then a wrong line, a line cut short, and a wrong answer."""
    row = next(tasks.rows('math', 3))
    tokenizer = bytes_tokenizer()
    check = step_checker(row, tokenizer, 0)
    first = '\n'.join(row['solution'].split('\n')[:2])
    good = [first + '\n', row['solution']]
    bad = ['\n1 + 1 = 3\n', first, row['solution'] + '0']
    for text in good:
        assert check(tokenizer.encode(text).ids) is True
    for text in bad:
        assert check(tokenizer.encode(text).ids) is False


def continued_checker(right):
    """A ContinuedChecker of a random pair, and what it graded: a list of texts that grows."""
    asked = []

    def grade(text):
        asked.append(text)
        return right(text)
    return ContinuedChecker(step_session(room=12, text=spaced), grade), asked


def spaced(ids):
    return ' '.join(map(str, ids))


def test_specguard_continued_checker_grades_the_targets_own_continuation():
    """Behind any text; the whole is as long as a text may be; one that has ended is graded as it is."""
    check, asked = continued_checker(lambda text: text.startswith('3'))
    for step, verdict in (([3, 5, 4], True), ([5], False)):
        text, _ = write(session(network(0, 12), None, STEP_PROMPT + step, 12 - len(step)), METHODS['ar']())
        assert check(STEP_PROMPT + step) is verdict
        assert asked[-1] == spaced(step + text)
    check.session.eos = frozenset([7])
    check(STEP_PROMPT + [3, 7])
    assert asked[-1] == '3 7'


def test_specguard_continued_checker_asks_nothing_twice():
    """A text on the target's own way has that way's verdict; a shorter one, or one beside it, has its own."""
    check, asked = continued_checker(lambda text: 1)
    check(STEP_PROMPT + [3, 5])
    way = STEP_PROMPT + [*map(int, asked[0].split())]
    for end in range(len(STEP_PROMPT) + 2, len(way) + 1):
        assert check(way[:end])
    assert len(asked) == 1
    check(STEP_PROMPT + [3])
    check(way[:-1] + [way[-1] ^ 1])
    assert len(asked) == 3


def test_specguard_altered_number_by_hand():
    """One digit of one number, never of an item's; the kind says whether the text before has the number."""
    step = '3. So 12 + 5'
    kinds = {}
    for seed in range(60):
        changed, kind = answers.with_altered_number(step, 'has 112 and 5 pens', seed)
        assert answers.with_altered_number(step, 'has 112 and 5 pens', seed) == (changed, kind)
        apart = [i for i, letter in enumerate(step) if letter != changed[i]]
        assert len(changed) == len(step) and len(apart) == 1 and changed[apart[0]] in '123456789'
        kinds.setdefault(apart[0], set()).add(kind)
    assert kinds == {6: {'new'}, 7: {'new'}, 11: {'copied'}}
    assert answers.with_altered_number('1. So it is.', '', 0) == (None, None)


@pytest.mark.parametrize('text, kind', [
    ('\n| cost of ropes = 8\n', 'look-up'), ('So the answer is 5 = 5.', 'answer'), ('3 + 4 = 7', 'work'),
    ('So', 'words')])
def test_specguard_kinds_of_drafted_steps_by_hand(text, kind):
    assert answer_claims.kind_of_step(text) == kind


def test_specguard_altered_numbers_claim_by_hand():
    """Within a kind of one family; in both kinds here the altered step of each text is less grounded."""
    def row(family, grounding):
        ungrounded = {'without the first': [1 - share for share in grounding]}
        return dict(family=family, altered=[1, 0], kind=['new', 'new'], logp=dict(draft=[-1.0, -1.0]),
                    ungrounded=ungrounded)
    rows = [row('a', (0.8, 0.9)), row('a', (0.8, 0.9)), row('b', (0.1, 0.2)), row('b', (0.3, 0.2))]
    grounding, both = answer_claims.answer_claims(dict(altered=SimpleNamespace(rows=rows)))
    assert grounding.figure(grounding.rows) == pytest.approx((4 + 2) / 8)
    assert both.figure(both.rows) == pytest.approx(0.25)
    assert 'L alone: 0.500' in both.note


def problem_of_run(cycles, k, who):
    """The stored problem that a run of SpecGuard is, and its rollout's name."""
    rollout = f'{who} last 3'
    steps = []
    for cycle in cycles:
        logp = min(verdict['logp'] for verdict in cycle.judged)
        grounding = min(verdict['grounding'] for verdict in cycle.judged)
        same = len(os.path.commonprefix([cycle.drafted, cycle.tokens]))
        passes, *_ = cycle.passes['draft/full']
        candidate = dict(text='', tokens=len(cycle.drafted), right=True, same=same)
        candidate['logp'] = {who: logp}
        candidate['ungrounded'] = {rollout: 1 - grounding}
        own = dict(tokens=len(cycle.tokens), right=True)
        steps.append(dict(candidates=[candidate], picks={str(k): 0}, passes={str(k): passes}, own=own))
    return problem_row('math', steps), rollout


def spent(cycles, role, column):
    """The sum over a trace of one column (0: passes, 1: positions) of a model's ledger."""
    total = 0
    for cycle in cycles:
        for path, row in cycle.passes.items():
            total += row[column] if path.startswith(role) else 0
    return total


@pytest.mark.slow
@pytest.mark.parametrize('k', [1, 4])
@pytest.mark.parametrize('who', EITHER)
@pytest.mark.parametrize('tau', [-9, 0.5, 9])
def test_specguard_outcomes_are_those_of_a_run(who, k, tau):
    """Tokens, passes and positions expected of a record are the engine's ledger."""
    method = SpecGuard(k=k, tau=tau, signals=who, max_step=6)
    _, cycles = guarded(method, temperature=1.0)
    problem, rollout = problem_of_run(cycles, k, who)
    setting = replace(USUAL, pick=str(k), rollout=rollout, tau=tau)
    scale = Scale([[-4, 0], [0, 1]], None)                  # that of LINES
    found = outcome(problem, {rollout: scale}, setting)
    assert found.tokens == pytest.approx(30)
    assert found.drafts == pytest.approx(spent(cycles, 'draft', 0))
    assert found.targets == pytest.approx(spent(cycles, 'target', 0))
    assert found.drafted == pytest.approx(spent(cycles, 'draft', 1))
    assert found.verified == pytest.approx(spent(cycles, 'target', 1))


@pytest.mark.parametrize('who', EITHER)
def test_specguard_recorded_signals_are_those_of_a_run(who):
    """The candidate that is recorded is the selector's, with the signals that SpecGuard would judge it by."""
    found = record_step(step_session(checker=likes), k=4)
    s = step_session()                      # draws the same candidates
    method = SpecGuard(k=4, signals=who)
    drafts = write_steps(s, method, s.draft, 4)
    chosen = method.choose(s, drafts)
    candidate = found['candidates'][found['picks']['4']]
    logp, grounding = zip(*method.score(s, chosen))
    assert candidate['tokens'] == len(chosen.tokens)
    assert candidate['right'] == likes(STEP_PROMPT + chosen.tokens)
    assert candidate['text'] == LINES['text'](chosen.tokens)
    assert candidate['logp'][who] == pytest.approx(min(logp))
    assert 1 - candidate['ungrounded'][f'{who} last 3'] == pytest.approx(min(grounding))
    assert found['passes']['1'] == len(drafts[0].tokens)
    assert found['passes']['4'] == max(len(draft.tokens) for draft in drafts)


def test_specguard_recorded_step_of_the_target():
    """It is what the target alone writes; `same` counts the tokens that a candidate shares with it."""
    found = record_step(step_session(checker=likes), k=4)
    _, cycles = guarded(SpecGuard(tau=math.inf))
    own = cycles[0].tokens
    assert found['own'] == dict(tokens=len(own), right=likes(STEP_PROMPT + own))
    s = step_session()
    drafts = write_steps(s, SpecGuard(k=4), s.draft, 4)
    candidate = found['candidates'][found['picks']['1']]
    assert candidate['same'] == len(os.path.commonprefix([drafts[0].tokens, own]))


def test_specguard_problem_row_numbers_candidates_through():
    """Picks of later steps count on behind the earlier ones' candidates."""
    step = stored_step(-1.0, 0.9, True, 5, 6, own=(7, True))
    two = step | dict(candidates=step['candidates'] * 2, picks={'4': 1})
    row = problem_row('code', [two, step, two])
    assert row['task'] == 'code'
    assert row['picks'] == {'4': [1, 2, 4]}
    assert row['candidates']['tokens'] == [5] * 5
    assert row['own']['tokens'] == [7] * 3


# ------------------------------------------------------------------------ SpecGuard: calibration, end to end

@pytest.mark.slow
def test_specguard_signals_from_the_command_line(capsys, tmp_path, monkeypatch):
    """--signals writes what specguard asks for, the gate chosen on rows of its own; else one line says so."""
    splits = set()
    real_rows = tasks.rows

    def rows(task, *where):
        splits.add(where)
        return real_rows(task, *where)
    monkeypatch.setattr(tasks, 'rows', rows)
    for name in ('target', 'draft'):
        shutil.copytree(EMBEDDED / name, tmp_path / name, ignore=lambda *_: ['calibration.json'])
    pair = '--target', str(tmp_path / 'target'), '--draft', str(tmp_path / 'draft')
    run = *pair, '--method', 'specguard', '--prompt', 'Tom has 9 pens. Tom loses 5. How many pens are left?'
    refused(capsys, 'train_mask.py --signals', *run)
    assert train_mask.main(['--signals', '--rows', '1', '--share', '0.5', *pair]) == 0
    assert '<- chosen' in capsys.readouterr().out
    assert splits == {(0, 'train'), (100, 'held-out')}
    assert re.search(r'steps, \d+% kept', program(capsys, *run)[2])
    assert 'check: equal to plain' in program(capsys, *run, '--set', 'tau=inf', '--check')[2]


@pytest.mark.slow
@pytest.mark.parametrize('graded', [True, False])
def test_specguard_signals_of_prompts(graded, tmp_path, capsys):
    """Of a random pair: its own greedy text is the answer, or there is none and one line says so."""
    target = str(checkpoint(tmp_path / 'target', byte_network(0), max_position_embeddings=512))
    draft = str(checkpoint(tmp_path / 'draft', byte_network(1), max_position_embeddings=512))
    pair = '--target', target, '--draft', draft
    row = dict(prompt='hello')
    if graded:
        engine = specmini.Engine(target, max_new=256)
        row['answer'], _ = engine.generate('hello', METHODS['ar']())
    file = tmp_path / 'rows.jsonl'
    file.write_text(json.dumps(row))
    assert train_mask.main(['--signals', '--share', '1', '--prompts', str(file), *pair]) == 0
    out = capsys.readouterr().out
    section = json.loads((File(target) / 'calibration.json').read_text())['signals']
    assert {'target_logp', 'target_grounding', 'draft_logp', 'draft_grounding'} <= section.keys()
    assert ('the scales alone' in out) is not graded
    assert ('delimiter=sentence' in out) is graded
    assert ('tau' in section) is graded
    run = *pair, '--prompt', 'hello', '--method', 'specguard', '--set', 'delimiter=sentence'
    assert re.search(r'steps, \d+% kept', program(capsys, *run)[2])


def test_specguard_signals_refuses_a_share_above_one(capsys):
    assert train_mask.main(['--signals', '--share', '2']) == 2
    assert '--share 2' in capsys.readouterr().err


@pytest.mark.slow
def test_specguard_story_is_counted_by_hand():
    """What is counted of a story: its cycles, the target's, and the nats that plain scoring gives."""
    row = next(tasks.rows('story', 11))
    engine = engine_for([row])
    story, = specguard_record.write_stories(engine, [row], specguard_record.DRAFT_ONLY)
    cycles = specguard_record.write_text(engine, row, specguard_record.DRAFT_ONLY, 0).cycles
    written = []
    for cycle in cycles:
        written += cycle.tokens
    line = engine.tokenizer.encode(row['prompt']).ids + written
    logits = fresh(engine.models['target'], line, len(written) + 1)
    nats = -float(token_logps(logits[:-1], written).sum())
    assert story.cycles == len(cycles)
    assert story.wrote == 0
    assert story.tokens == len(written)
    assert story.nats == pytest.approx(nats, rel=1e-4)


def test_specguard_story_claim_by_hand():
    """The target's nats a token of what the preset wrote less those of its own text, over all stories."""
    def row(notes, target):
        found = {}
        for name, (tokens, nats) in dict(notes=notes, target=target).items():
            found[name] = specguard_record.Story(3, 1, 0, tokens, nats)
        return found
    claim = specguard_claims.story_claim([row((10, 30.0), (10, 5.0)), row((30, 10.0), (10, 5.0))])
    assert claim.figure(claim.rows) == 40 / 40 - 10 / 20
    alike = [row((10, 5.0), (10, 5.0))]
    assert claim.figure(alike) < claim.line


@pytest.mark.parametrize('text, cut', [
    ('He went', True),
    ('He went. ', False),
    ('"Yes!"', False),
    ('  ', False)])
def test_specguard_mid_sentence_by_hand(text, cut):
    assert specguard_record.in_mid_sentence(text) == cut


@pytest.mark.slow
@pytest.mark.parametrize('name, marked', [
    ('rsd', True),
    ('oracle-gate', False),
    ('random-gate', False)])
def test_specguard_reward_model_is_paid_for(name, marked):
    """Bytes by hand from the trace; rsd pays a pass of 4 MB a step, over as many positions as the draft's."""
    method = METHODS[name]()
    row = next(tasks.rows('math', 11))
    engine = engine_for([row])
    text = specguard_record.write_text(engine, row, method, 0)
    read, compute = specguard_record.spent_bytes(engine, method, text)
    for role in EITHER:
        model = engine.models[role]
        size = model.read_bytes(model.full)
        read -= size * spent(text.cycles, role, 0)
        compute -= size * spent(text.cycles, role, 1)
    assert read == marked * 4_000_000 * len(text.cycles)
    assert compute == marked * 4_000_000 * spent(text.cycles, 'draft/full', 1)


@pytest.mark.slow
def test_specguard_record_of_a_problem(monkeypatch):
    """Each step stands behind the reference's earlier ones; what is stored has a value for each step."""
    row = next(tasks.rows('math', 11))
    engine = engine_for([row])
    texts = []
    real_step = specguard_record.record_step

    def recorded(s, rollouts):
        texts.append(engine.tokenizer.decode(s.tokens))
        return real_step(s, rollouts)
    monkeypatch.setattr(specguard_record, 'record_step', recorded)
    stored = problem_row('math', specguard_record.record_problem(engine, row))
    lines = row['solution'].lstrip('\n').split('\n')
    assert len(texts) == len(lines)
    for i, text in enumerate(texts):
        earlier = '\n'.join(['', *lines[:i], '']) if i else ''
        assert text == row['prompt'] + earlier
    assert {*stored['picks']} == {*specguard_steps.CANDIDATES}
    assert len(stored['picks']['4']) == len(lines)
    assert {*stored['ungrounded']} == {*specguard_steps.ROLLOUTS}


def test_specguard_claims_cannot_be_measured_on_one_problem():
    with pytest.raises(ValueError, match='expected 2 or more'):
        next(specguard_record.step_rows(1))


# ------------------------------------------------------------------------ sparse verification

def rule_of(**knobs):
    """The verify.Blocks that kernels are handed on a path with these knobs."""
    _, _, rule = thin(network(), **knobs).attends[0].keywords['how']
    return rule


def block_means(keys, block):
    """[B, G, N, D]: the mean key of each whole block of keys [B, G, S, D]."""
    count = keys.shape[2] // block
    return keys[:, :, :count * block].unflatten(2, (count, block)).mean(3)


def pass_inputs(start, T, capacity, block):
    """q [2, 4, T, 6], k and v [2, 2, capacity, 6], mask and carry of a pass of T tokens at `start`."""
    generator = seeded(1)

    def draw(length, heads):
        drawn = torch.randn(length, 2, heads, 6, generator=generator, dtype=torch.float64)
        return drawn.permute(1, 2, 0, 3).contiguous()
    q = draw(T, 4)
    k = draw(capacity, 2)
    v = draw(capacity, 2)
    positions = start + torch.arange(T)
    hidden = torch.arange(capacity) > positions[:, None]
    mask = torch.zeros(T, capacity, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    carry = dict(
        start=torch.tensor(start),
        real=torch.tensor(T),
        means=[block_means(k, block)],
    )
    return q, k, v, mask, carry


LONG_START = kernels.MANY       # from here on a few queries are the rows of one product for each key head
STARTS = [(40, 1), (43, 5), (30, 3), (9, 6), (LONG_START, kernels.FEW)]
each_block = pytest.mark.parametrize('block', [1, 4, 7])
each_start = pytest.mark.parametrize('start, T', STARTS)


@each_block
@each_start
def test_sparse_attention_gathered_is_masked(block, start, T):
    """Gathered blocks give what all keys give under a mask that hides the others."""
    how = 0, True, rule_of(rho=0.3, block=block)
    q, k, v, mask, carry = pass_inputs(start, T, start + T, block)
    dense, _ = kernels.attend(q, k, v, mask, None)
    got, carry = kernels.sparse_attend(q, k, v, mask, carry, how)
    budget = 8 + (start - 8) * 0.3 // 1                                     # tokens; dense_below is 8
    kept = math.ceil(budget / block) + 2                                    # and a sink and a local
    whole = start // block
    if whole <= kept:
        assert 'blocks' not in carry and torch.equal(got, dense)
        return
    chosen = carry['blocks']
    assert chosen.shape == (2, 2, kept) and (chosen < whole).all()
    assert (chosen == 0).any(-1).all()                                      # the sink
    assert (chosen == whole - 1).any(-1).all()                              # the local block
    hidden = torch.ones(2, 2, whole, dtype=torch.bool).scatter(2, chosen, False)
    assert (hidden.sum(-1) == whole - kept).all()                           # no block is chosen twice
    masks = mask.expand(2, 2, T, -1).clone()
    hidden_keys = hidden.repeat_interleave(block, 2)[:, :, None]
    masks[..., :whole * block].masked_fill_(hidden_keys, -torch.inf)
    assert apart(got, sparse_rivals.attend_masked(q, k, v, masks)) < 1e-12
    assert apart(got, dense) > 1e-3


@each_block
@each_start
def test_sparse_attention_in_a_larger_cache(block, start, T):
    """A compiled pass sees all of the cache, also what lies behind the text: the output is the same."""
    how = 0, True, rule_of(rho=0.3, block=block)
    q, k, v, mask, carry = pass_inputs(start, T, start + T, block)
    _, wide_k, wide_v, wide_mask, wide_carry = pass_inputs(start, T, start + 50, block)
    wide_k[:, :, :start + T] = k
    wide_v[:, :, :start + T] = v
    wide_carry['means'] = [block_means(wide_k, block)]
    exact, _ = kernels.sparse_attend(q, k, v, mask, carry, how)
    wide, _ = kernels.sparse_attend(q, wide_k, wide_v, wide_mask, wide_carry, how)
    assert apart(wide, exact) < 1e-12


@each_start
def test_sparse_control_of_masks_is_dense_attention(start, T):
    """What other tests compare with, attention under a mask for each head, is the dense one if none hides."""
    q, k, v, mask, _ = pass_inputs(start, T, start + T, 4)
    dense, _ = kernels.attend(q, k, v, mask, None)
    masks = mask.expand(2, 2, T, -1)
    assert apart(dense, sparse_rivals.attend_masked(q, k, v, masks)) < 1e-12


def test_sparse_budget_by_hand():
    """N = ceil(floor((L - L0) rho + L0) / block)."""
    rule = rule_of(rho=0.25, dense_below=128, block=16)
    wanted = {128: 8, 129: 8, 131: 8, 132: 9, 512: 14}
    for length, blocks in wanted.items():
        assert kernels.budget(length, rule) == blocks
        assert kernels.kept_blocks(length, rule) == blocks + 2              # and a sink and a local
    assert kernels.budget(torch.tensor(512.0), rule) == 14


def test_sparse_budget_never_falls():
    """As the text or rho grows, as much or more is read."""
    rule = rule_of(rho=0.25, dense_below=128, block=16)
    rows = []
    for length in range(128, 900, 37):
        shares = [rule._replace(rho=percent / 100) for percent in range(0, 101, 5)]
        rows.append([kernels.budget(length, share) for share in shares])
    table = torch.tensor(rows)
    assert (table.diff(dim=0) >= 0).all()
    assert (table.diff(dim=1) >= 0).all()


# what is off, what is chosen once

def sparse_logits(model, draft, **knobs):
    """(logits of the root and the draft on the sparse path, reader, path); the rest was read densely."""
    reader = Reader(model, 64)
    path = thin(model, **OFF | knobs)
    reader.read(LINE[:-1], [], model.full, 0)
    return reader.read(LINE, draft, path, len(draft) + 1), reader, path


def test_sparse_path_with_all_off_is_the_full_path():
    model = network(**MIXED)
    assert thin(model, **OFF) is model.full


@pytest.mark.parametrize('knobs', [
    dict(rho=0.2, dense_below=60),
    dict(rho=0.999),
    dict(ffn_threshold=1e-300),
    dict(moe_skip=2, moe_quantile=0.0),
    dict(rho=0.0, sinks=60),
    dict(rho=0.999, ffn_threshold=1e-300, moe_skip=2, moe_quantile=0.0),
])
def test_sparse_knob_at_its_end_is_dense(knobs):
    """The sparse kernels run and leave nothing out: dense logits, and the cache remembers who wrote them."""
    model = network(**MIXED)
    dense = Reader(model, 64).read(LINE, [1, 2, 3], model.full, 4)
    got, reader, path = sparse_logits(model, [1, 2, 3], **knobs)
    assert apart(got, dense) < 1e-9
    assert path.name == reader.cache.writers[-1] == 'sparse'


@pytest.mark.parametrize('knobs', [
    dict(rho=0.0),
    dict(ffn_threshold=0.3),
    dict(ffn_share=0.5),
    dict(ffn_quantile=1.0),
    dict(moe_skip=1, moe_quantile=1.0),
])
def test_sparse_knob_that_is_moved_changes_logits(knobs):
    """Else the test above could not fail."""
    model = network(**MIXED)
    dense = Reader(model, 64).read(LINE, [1, 2, 3], model.full, 4)
    got, _, _ = sparse_logits(model, [1, 2, 3], **knobs)
    assert apart(got, dense) > 1e-3


ALL_CHOICES = dict(rho=0.1, ffn_share=0.5, ffn_threshold=0.05, moe_skip=1, moe_quantile=1.0)
FORMS_OF_THE_ROOT = [
    ('sparse', {}),
    ('sparse-forms', dict(form='guessed', select='token')),
    ('sparse-forms', dict(form='literal', select='joint')),
]
FORMS_OF_ALL = [
    ('sparse-forms', dict(form='union', rho=1.0, ffn_threshold=0.5)),
    ('sparse-forms', dict(form='loudest', rho=1.0)),
    ('sparse', dict(select='union')),
]


def spread_by_last_guess(compiled, name, knobs):
    """[4]: how far logits of the root and of each of three guesses are apart, over all last guesses."""
    model = network(**MIXED)
    path = thin(model, name, **ALL_CHOICES | knobs)
    reader = Reader(model, 64, compiled)
    found = []
    for last in range(11):
        reader.read(LINE[:-1], [], model.full, 0)
        found.append(reader.read(LINE, [1, 2, last], path, 4))
    highest = torch.stack(found).amax(0)
    lowest = torch.stack(found).amin(0)
    return (highest - lowest).amax(-1)


@pytest.mark.parametrize('name, knobs', FORMS_OF_THE_ROOT)
def test_sparse_draft_changes_no_logits_before_it(name, knobs):
    """A guess has no say in what it and those before it are judged by."""
    spread = spread_by_last_guess(False, name, knobs)
    assert (spread[:3] < 1e-12).all() and spread[3] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('name, knobs', FORMS_OF_THE_ROOT)
def test_sparse_draft_changes_no_logits_before_it_compiled(name, knobs, monkeypatch):
    torch._dynamo.reset()
    compile_by = torch.compile

    def traced(function, options, **how):
        return compile_by(function, backend='eager', **how)
    monkeypatch.setattr(torch, 'compile', traced)
    spread = spread_by_last_guess(True, name, knobs)
    assert (spread[:3] < 1e-12).all() and spread[3] > 1e-3


@pytest.mark.parametrize('name, knobs', FORMS_OF_ALL)
def test_sparse_controls_let_a_draft_change_logits_before_it(name, knobs):
    """Their docstrings say so; without them the test above would prove little."""
    assert (spread_by_last_guess(False, name, knobs)[:3] > 1e-6).any()


@pytest.mark.parametrize('anchors, skip, equal', [
    (2, set(), [(0, 1), (2, 3)]),
    (1, set(), [(0, 3)]),
    (2, {0, 1}, [(2, 3)]),
])
def test_sparse_layer_reads_its_anchors_blocks(anchors, skip, equal):
    """equal: layers with the same blocks, in pairs. The anchors are 0 and 2; the first may be skipped."""
    model = network(num_hidden_layers=4)
    _, reader, path = sparse_logits(model, [1], rho=0.1, anchors=anchors)
    if skip:
        path = path.without(skip)
    log = []
    reader.read(LINE, [1, 2], watched(path, log), 3)
    assert len(log) == 8 - len(skip)
    chosen = {}
    for sublayer, carry in log:
        chosen[sublayer // 2] = carry['blocks'].sort().values
    for layer, anchor in equal:
        assert torch.equal(chosen[layer], chosen[anchor])
    if anchors == 2:
        assert not torch.equal(chosen[1], chosen[2])
    last = sparse_rivals.ledger(log, model, 49)[-1]
    assert last['keys'] == 5 * 4 + 49 % 4           # 3 blocks, floor(8 + 41 rho) tokens, a sink and a local


# feed-forwards

def ffn_inputs():
    """(network, x [1, 5, 16]) whose last token is padding, ten times as large as the others."""
    torch.manual_seed(0)
    model = network(**MIXED)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    x[:, 4] *= 10
    return model, x


def largest(rows):
    """The 6 channels of rows [n, F] that are largest in any of them, ascending."""
    return rows.abs().amax(0).topk(6).indices.sort().values


def through(hidden, channels, x, mlp):
    """down(hidden up(x)) over these channels alone."""
    products = hidden * mlp.up_proj(x)
    kept = torch.zeros_like(hidden).index_copy_(-1, channels, products[..., channels])
    return mlp.down_proj(kept)


LAST_IS_PADDING = dict(real=torch.tensor(4))        # the carry: of 5 tokens the last is padding


def test_sparse_channels_of_a_pass():
    """The root's largest channels, for all tokens; what is below the threshold adds nothing."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    gate = torch.nn.functional.silu(mlp.gate_proj(x))
    hidden = torch.where(gate.abs() < 0.1, 0, gate)
    got, carry = kernels.sparse_swiglu(x, mlp, LAST_IS_PADDING, (0.1, 0.25))
    channels = largest(hidden[0, :1])
    assert not torch.equal(channels, largest(hidden[0, :4]))
    assert torch.equal(carry['chosen'], channels)
    assert apart(got, through(hidden, channels, x, mlp)) < 1e-12


def test_sparse_channels_of_a_batch():
    """One choice for all rows, by the larger of their roots."""
    _, x = ffn_inputs()
    h = x.reshape(5, 1, 16)[:2]                                             # two rows of one token
    assert torch.equal(kernels.root_channels(h, 6 / 16), largest(h[:, 0]))


def test_sparse_forms_on_and_off():
    """A form without a threshold is dense; with one it is neither dense nor the method's own form."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    dense, _ = kernels.swiglu(x, mlp, None)
    gate = torch.nn.functional.silu(mlp.gate_proj(x))
    hidden = torch.where(gate.abs() < 0.1, 0, gate)
    own = mlp.down_proj(hidden * mlp.up_proj(x))
    for form in (sparse_rivals.literal_swiglu, sparse_rivals.union_swiglu):
        off, _ = form(x, mlp, LAST_IS_PADDING, (0.0, 1))
        on, _ = form(x, mlp, LAST_IS_PADDING, (0.1, 1))
        assert apart(off, dense) < 1e-12
        assert apart(on, own) > 1e-6


def test_sparse_union_form_keeps_what_any_token_keeps():
    """All tokens go through the channels that one of them keeps; padding, which keeps more, has no say."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    gate = torch.nn.functional.silu(mlp.gate_proj(x))
    is_large = gate[0].abs() >= 1.0                                         # [5, F]
    kept = is_large[:4].any(0)
    assert not torch.equal(kept, is_large.any(0))
    wanted = mlp.down_proj(gate * kept * mlp.up_proj(x))
    got, _ = sparse_rivals.union_swiglu(x, mlp, LAST_IS_PADDING, (1.0, 1))
    assert apart(got, wanted) < 1e-12


def test_sparse_literal_form_drops_small_products():
    """|silu(gate) up| below the threshold counts as 0, token by token."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    products = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    wanted = mlp.down_proj(torch.where(products.abs() < 0.5, 0, products))
    got, _ = sparse_rivals.literal_swiglu(x, mlp, LAST_IS_PADDING, (0.5, 1))
    assert apart(got, wanted) < 1e-12


def test_sparse_literal_form_reads_gate_and_up():
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    _, carry = sparse_rivals.literal_swiglu(x, mlp, LAST_IS_PADDING, (0.1, 1))
    assert carry['gate'] == 48 and carry['spared'] == 1


def test_sparse_channels_guessed():
    """By the root, from the 4 columns of the gate where it is largest; then only these channels are read."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    silu = torch.nn.functional.silu
    columns = x[0, 0].abs().topk(4).indices
    channels = largest(silu(x[0, :1, columns] @ mlp.gate_proj.weight[:, columns].T))
    got, carry = sparse_rivals.guessed_swiglu(x, mlp, LAST_IS_PADDING, (0.0, 0.25))
    assert torch.equal(carry['chosen'].sort().values, channels)
    assert carry['gate'] == 24 // 4 + 6
    assert apart(got, through(silu(mlp.gate_proj(x)), channels, x, mlp)) < 1e-12


def test_sparse_channels_loudest():
    """Those that are largest in any token; padding, which is larger, has no say."""
    model, x = ffn_inputs()
    mlp = model.model.layers[1].mlp
    hidden = torch.nn.functional.silu(mlp.gate_proj(x))
    channels = largest(hidden[0, :4])
    assert not torch.equal(channels, largest(hidden[0]))
    got, carry = sparse_rivals.loudest_swiglu(x, mlp, LAST_IS_PADDING, (0.0, 0.25))
    assert torch.equal(carry['chosen'], channels)
    assert apart(got, through(hidden, channels, x, mlp)) < 1e-12


@pytest.mark.parametrize('form', ['literal', 'union', 'loudest', 'guessed'])
def test_sparse_forms_are_on_the_path(form):
    """The knob `form` puts its function in the place of the method's, in dense layers and in no mixture."""
    path = thin(network(**MIXED), 'sparse-forms', form=form, ffn_share=0.5)
    functions = [ffn.func for ffn in path.ffns]
    wanted = sparse_rivals.FORMS[form]
    assert functions == [kernels.sparse_mix, wanted, kernels.sparse_mix, wanted]


@pytest.mark.parametrize('renormalise', [True, False])
@pytest.mark.parametrize('betas', [(0.2,), (0.25, 0.6), (0.0, 0.9)])
def test_sparse_experts_by_a_loop_over_tokens(betas, renormalise):
    """Each token without its m lowest experts, m the most whose share of the weight is below beta_m."""
    model, x = ffn_inputs()
    moe = model.model.layers[0].mlp
    moe.renormalise = renormalise
    got, carry = kernels.sparse_mix(x, moe, LAST_IS_PADDING, betas)
    for t in range(5):
        p, experts = moe.gate(x[0, t]).softmax(-1).topk(3)
        skipped = 0
        for m, beta in enumerate(betas, 1):
            if p[3 - m:].sum() / p.sum() < beta:
                skipped = m
        p = p[:3 - skipped]
        if renormalise:
            p = p / p.sum()
        wanted = 0
        for weight, expert in zip(p, experts):
            y, _ = kernels.swiglu(x[0, t], moe.experts[expert], None)
            wanted = wanted + weight * y
        assert apart(got[0, t], wanted) < 1e-12
        assert (carry['experts'][t] >= 0).sum() == 3 - skipped


# experts, stacked for compiled passes

def stacked_inputs():
    """(network, its first mixture, x [1, 5, 16], router weights, only the likeliest's not 0, chosen)."""
    model = network(**MIXED)
    moe = model.model.layers[0].mlp
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=seeded())
    weights, chosen = kernels.route(x[0], moe)
    weights[:, 1:] = 0
    return model, moe, x, weights, chosen


def test_sparse_blend_shows_a_broken_router():
    _, moe, x, weights, chosen = stacked_inputs()
    assert kernels.blend(x, moe, weights * math.nan, chosen, None).isnan().all()


def test_sparse_experts_stacked_are_held_once():
    """All weights of the experts are views of the two stacks, which hold nothing else."""
    _, moe, *_ = stacked_inputs()
    moe.join()
    held = set()
    for expert in moe.experts:
        for weight in expert.parameters():
            held.add(weight.untyped_storage().data_ptr())
    assert held == {stack.data_ptr() for stack in moe.stacks}
    size = sum(stack.untyped_storage().nbytes() for stack in moe.stacks)
    assert size == 6 * 3 * 8 * 16 * 8                                       # E 3 F C fp64


def test_sparse_experts_stacked_keep_their_names(tmp_path):
    """In the state dict and in a file."""
    before = network(**MIXED).state_dict()
    model, moe, *_ = stacked_inputs()
    moe.join()
    safetensors.save_file(model.state_dict(), tmp_path / 'stacked')
    for found in (model.state_dict(), safetensors.load_file(tmp_path / 'stacked')):
        assert found.keys() == before.keys()
        for name in found:
            assert torch.equal(found[name], before[name])


def test_sparse_experts_stacked_read_only_those_used():
    """The others' weights are NaN, which would show; two of the five tokens are padding."""
    _, moe, x, weights, chosen = stacked_inputs()
    wanted = kernels.blend(x, moe, weights, chosen, None)
    moe.join()
    unread = set(range(6)) - set(chosen[:3, 0].tolist())
    assert unread
    for expert in unread:
        for weight in moe.experts[expert].parameters():
            weight.fill_(math.nan)
    got = kernels.blend_pairs(x, moe, weights, chosen, torch.tensor(3))
    assert apart(got[:, :3], wanted[:, :3]) < 1e-12
    assert got.isfinite().all()


@pytest.mark.parametrize('renormalise', [True, False])
def test_sparse_experts_gathered(renormalise):
    """What CUDA does for few tokens is what a loop over experts gives."""
    _, moe, x, *_ = stacked_inputs()
    weights, chosen = kernels.route(x[0], moe)
    weights[2, 1:] = 0
    moe.renormalise = renormalise
    wanted = kernels.blend(x, moe, weights, chosen, None)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    moe.join()
    assert apart(kernels.blend_gathered(x, moe, weights, chosen), wanted) < 1e-12


def test_sparse_keys_gathered():
    """What CUDA does with the kept keys of all heads is what a loop over heads gives."""
    q = torch.randn(2, 4, 3, 8, dtype=torch.float64, generator=seeded())
    k = torch.randn(2, 2, 40, 8, dtype=torch.float64, generator=seeded(1))
    v = torch.randn(2, 2, 40, 8, dtype=torch.float64, generator=seeded(2))
    places = torch.rand(2, 2, 40, generator=seeded(3)).topk(12).indices
    mask = torch.randn(3, 12, dtype=torch.float64, generator=seeded(4))
    wanted = kernels.attend_kept(q, k, v, places, mask)
    assert apart(kernels.attend_gathered(q, k, v, places, mask), wanted) < 1e-12


def test_sparse_channels_of_a_packed_network(monkeypatch):
    """A sparse feed-forward reads single rows: it unpacks what it reads, and computes the same."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    model = byte_network()
    path = thin(model, ffn_share=0.5)
    line = list(range(40))
    wanted = Reader(model, 40).read(line, [], path, 5)
    model.join()
    model.pack()
    assert model.model.layers[0].mlp.up_proj.weight.is_mkldnn
    assert apart(Reader(model, 40).read(line, [], path, 5), wanted) < 1e-4
    assert not model.model.layers[0].mlp.up_proj.weight.is_mkldnn
    assert model.model.layers[0].mlp.gate_proj.weight.is_mkldnn             # which is read in full


# the ledger

def ledger_inputs():
    """(network, log) of four layers, mixtures first and third: 3 positions after 21 tokens, blocks of 4.

    Layers 0 and 1 choose 3 blocks of each key head, layer 2 reuses them, layer 3 chooses row by row.
    """
    channels = torch.zeros(1, 3, 24)
    channels[0, 0, :2] = 1.0
    channels[0, 1, 1:3] = 1.0                                               # 2, 2 and 0 of 24, 3 in all
    experts = torch.tensor([[0, 1, -1], [1, 2, -1], [5, 1, 4]])
    kept = torch.ones(1, 2, 3, 5, dtype=bool)
    kept[0, :, 0, 1:3] = False
    kept[0, 1, 1:, 2] = False                                               # block 2 of head 1: nobody's
    by_head = dict(blocks=torch.zeros(1, 2, 3, dtype=int), block=4)
    first = by_head | dict(experts=experts)
    second = by_head | dict(channels=channels)
    third = by_head | dict(experts=experts[:2])
    by_row = dict(chosen_mask=kept, block=4, channels=channels)
    # each sublayer's carry: the very object it was handed where the sublayer chose nothing
    carries = [by_head, first, first, second, second, third, by_row, by_row]
    return network(**MIXED), list(enumerate(carries))


# 3 blocks and the partial one, a key of which there is, 3 can be; 5 whole blocks were scored
OWN = dict(keys=13, seen=13, run=15, means=5, asked=1)
REUSED = OWN | dict(means=0)


def test_sparse_ledger_by_hand():
    model, log = ledger_inputs()
    assert sparse_rivals.ledger(log, model, 21) == [
        OWN | dict(experts=pytest.approx(7 / 3), distinct=5),
        REUSED | dict(channels=pytest.approx(4 / 3), union=3, width=24, gate=24, spared=2),
        REUSED | dict(experts=2, distinct=3),
        dict(keys=19, seen=17, run=21, means=5, asked=3, channels=24, union=24, width=24, gate=24, spared=2)]


def test_sparse_work_by_hand():
    """Bytes and FLOPs of that ledger; numbers of 8 bytes, 2 key heads of size 4, 2 query heads to each."""
    model, log = ledger_inputs()
    done = work(model, sparse_rivals.ledger(log, model, 21), 3)
    keys = 2 * (13 * 3 + 19) + 2 * 5                    # keys and values, then block means
    products = 2 * (13 * 3 + 17) * 2 * 3 + 5 + 5 * 3
    assert done['attention'] == (8 * 8 * keys, 2 * 8 * products)
    weights = 3 * 8 * (5 + 3) + 24 + 2 * 3 + 3 * 24     # experts, then layers 1 and 3
    of_a_token = 3 * 8 * (7 / 3 + 2) + 24 + 2 * 4 / 3 + 3 * 24
    assert done['ffn'] == (8 * 16 * weights, pytest.approx(2 * 3 * 16 * of_a_token))


def test_sparse_work_that_the_code_runs():
    """Kept blocks and a full partial one, all keys where rows differ; all channels unless some are chosen."""
    model, log = ledger_inputs()
    rows = sparse_rivals.ledger(log, model, 21)
    products = 2 * (15 * 3 + 21) * 2 * 3 + 5 + 5 * 3
    weights = 3 * 8 * (7 / 3 + 2) + 2 * 3 * 24
    run = work(model, as_run(rows), 3)
    assert run['attention'][1] == 2 * 8 * products
    assert run['ffn'][1] == pytest.approx(2 * 3 * 16 * weights)
    assert cost(model, rows, 3).run == sum(flops for _, flops in run.values())


def test_sparse_work_of_shared_channels():
    """Of channels that a pass shares, all are read and run, and no others."""
    chosen = dict(channels=torch.ones(1, 3, 24), chosen=torch.arange(6))
    row = OWN | sparse_rivals.read_channels(chosen, 24)
    assert row['channels'] == row['union'] == row['width'] == 6


def test_sparse_work_of_the_literal_form():
    """Only `down` is spared, and our code does not even spare that."""
    model, log = ledger_inputs()
    channels = log[3][1]['channels']
    row = OWN | sparse_rivals.read_channels(dict(channels=channels, gate=48, spared=1), 24)
    assert work(model, [row], 3)['ffn'][0] == 8 * 16 * (48 + 3)
    assert work(model, as_run([row]), 3)['ffn'][1] == 2 * 3 * 16 * 3 * 24


# texts

@pytest.mark.slow
@pytest.mark.parametrize('refresh', [0, 1, 3])
def test_sparse_text_refreshed(refresh):
    """A refresh leaves nothing sparse in the cache; refreshed in every cycle the text is plain decoding's."""
    target = network(0)
    prompt = LINE[:24]
    method = METHODS['sparse'](**SMALL, rho=0.0, refresh_every=refresh)
    s = session(target, network(1), prompt, 30, sparse=method)
    s.read_prompt()
    for i, cycle in enumerate(decode(s, Exact(3)), 1):
        is_dense = bool(refresh) and i % refresh == 0
        assert ('target/full' if is_dense else 'target/sparse') in cycle.passes
        assert ('sparse' in s.target.cache.writers) != is_dense
    assert (s.tokens[24:] == plain(target, prompt, 30)) == (refresh == 1)


# a cache of kept keys

KEEP = SMALL | dict(rho=0.1, moe_skip=0, anchors=0)


def kept_reads(name, blocks, **knobs):
    """(logits of passes over these [[ids]] behind LINE, a cycle each, the method): nobody decodes."""
    method = METHODS[name](**KEEP | knobs)
    model = network(0, num_hidden_layers=3)
    s = session(model, None, LINE, 30, silence, sparse=method)
    s.read_prompt()
    logits = []
    for ids in blocks:
        logits.append(s.target.read(s.tokens, ids, s.view(model.full), len(ids) + 1))
        s.commit(ids)
    return torch.cat(logits), method


def test_kept_keys_chosen_in_every_cycle_are_the_sparse_ones():
    """Copied side by side they are what sparse attention reads in place; chosen seldom they are not."""
    blocks = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]]
    wanted, _ = kept_reads('sparse', blocks)
    often, _ = kept_reads('kept', blocks, every=1)
    seldom, _ = kept_reads('kept', blocks, every=3)
    assert apart(often, wanted) < 1e-9
    assert apart(seldom[:4], wanted[:4]) < 1e-9 and apart(seldom[4:9], wanted[4:9]) > 1e-3


def test_kept_keys_that_are_timed_while_they_are_chosen():
    """A pass named so chooses in every round, though text and cycle stay; another reads what is kept."""
    s = session(network(0), None, LINE, 40, silence)
    prompt = SimpleNamespace(start=lambda _: s, ids=s.tokens)
    method = kept(**KEEP)
    chosen = []
    for name in ('choosing 10%', 'choosing 10%', 'kept 10%'):
        sparse_record.pass_seconds(prompt, name, method, 1)
        chosen.append(method.keys)
    assert chosen[0] is not chosen[1] and chosen[1] is chosen[2]
    assert len(chosen[1].stores) == s.target.model.config.num_hidden_layers


@pytest.mark.parametrize('T', [1, 4])
def test_kept_keys_are_read_with_all_that_came_since(T):
    """A later pass reads the chosen blocks and every key behind them, as under a mask that hides others."""
    how = 0, True, rule_of(rho=0.3, block=4)
    s = session(network(0), None, LINE[:1], 40, silence)
    s.target.capacity = 64
    keys = sparse_rivals.KeptKeys(s, s.target.model.full)
    q, k, v, mask, carry = pass_inputs(41, 3, 44, 4)
    _, chosen = keys.attend(q, k, v, mask, carry, how)
    wide_q, wide_k, wide_v, wide_mask, _ = pass_inputs(49, T, 49 + T, 4)
    wide_k[:, :, :40], wide_v[:, :, :40] = k[:, :, :40], v[:, :, :40]       # written anew: 40 and later
    got, _ = keys.attend(wide_q, wide_k, wide_v, wide_mask, {}, how)
    hidden = torch.ones(2, 2, 10, dtype=torch.bool).scatter(2, chosen['blocks'], False)
    assert 0 < hidden.sum(-1).min() == hidden.sum(-1).max() < 10
    masks = wide_mask.expand(2, 2, T, -1).clone()
    masks[..., :40].masked_fill_(hidden.repeat_interleave(4, 2)[:, :, None], -torch.inf)
    assert apart(got, sparse_rivals.attend_masked(wide_q, wide_k, wide_v, masks)) < 1e-12


def kept_drafting(prompt=tuple(LINE), room=14, temperature=0.0, **knobs):
    """(tokens, cycles, session, what plain decoding writes) of the target drafting for itself."""
    target = network(0, num_hidden_layers=3)
    s = session(target, None, prompt, room, temperature=temperature)
    tokens, cycles = write(s, kept_draft(**KEEP | knobs))
    return tokens, cycles, s, plain(target, prompt, room)


@pytest.mark.parametrize('knobs', [dict(dense_below=60), dict(rho=0.999), dict(sinks=60)])
def test_kept_draft_of_all_keys_is_the_target(knobs):
    """With everything kept its logits are dense and every guess is right."""
    tokens, cycles, s, wanted = kept_drafting(every=3, **knobs)
    assert tokens == wanted
    assert all(cycle.accepted == len(cycle.drafted) for cycle in cycles)
    assert {'target/choosing', 'target/kept'} <= {path for cycle in cycles for path in cycle.passes}
    model = s.target.model
    method = kept_draft(**KEEP | knobs)
    path = method.view(model.full, s)
    assert apart(s.target.read(s.tokens, [1, 2, 3], path, 3), fresh(model, s.tokens + [1, 2, 3], 3)) < 1e-9


@pytest.mark.parametrize('every', [1, 2, 99])
def test_kept_draft_writes_the_greedy_text(every):
    """Wrong guesses and all: chosen in every cycle, now and then, or once. Nothing it wrote stays trusted."""
    tokens, cycles, s, wanted = kept_drafting(every=every)
    assert tokens == wanted and len(cycles) > 3
    assert sum(cycle.accepted < len(cycle.drafted) for cycle in cycles) > 1
    choosing = ['target/choosing' in cycle.passes for cycle in cycles if cycle.drafted]
    assert choosing == [i % every == 0 for i in range(len(choosing))]
    model = s.target.model
    method = kept_draft(**KEEP)
    method.propose(replace(s, room=9))
    line = s.tokens + [0]
    assert s.target.cache.writers[len(s.tokens) - 1] == 'sparse'
    assert s.target.cache.trusted(line, model.full) == len(s.tokens) - 1


def test_kept_draft_law():
    """Every draw enumerated, on a network: where keys are kept over cycles the law is still the target's."""
    target = network(3, 2)
    prompt = tuple(i % 2 for i in range(21))
    reused = rejected = 0

    def run(s, method):
        nonlocal reused, rejected
        tokens, cycles = write(s, method)
        reused += 'target/kept' in cycles[1].passes
        rejected += cycles[0].accepted < len(cycles[0].drafted)
        return tokens, None
    method = kept_draft(1, **KEEP, every=2)
    law = enumerate_law(target, None, method, 4, prompt, run, temperature=1.0)
    wanted = Counter()
    for text in itertools.product(range(2), repeat=4):
        rows = probs(fresh(target, [*prompt, *text[:3]], 4))
        wanted[text] = float(rows.gather(1, torch.tensor(text)[:, None]).prod())
    assert variation(law, wanted) < 1e-9 and reused > 5 and rejected > 5


def test_kept_keys_of_an_interrupted_pass_are_not_read(monkeypatch):
    """Nor those of another text, of another path, or too old ones."""
    model = network(0, num_hidden_layers=3)
    s = session(model, None, LINE, 30, silence)
    s.read_prompt()
    method = kept(**KEEP, every=2)
    path = method.view(model.full, s)
    first = method.keys
    with monkeypatch.context() as broken:
        broken.setattr(model.model.layers[2], 'forward', None)
        with pytest.raises(TypeError):
            s.target.read(s.tokens, [], path, 1)
    assert len(first.stores) == 2 and s.target.cache.trusted(s.tokens, model.full) == len(LINE) - 1
    path = method.view(model.full, s)
    assert method.keys is not first
    s.target.read(s.tokens, [], path, 1)
    keys = method.keys
    assert keys.serves(s, model.full, 2) and not keys.serves(replace(s), model.full, 2)
    assert not keys.serves(s, model.full.without([1]), 2)
    s.cycles += 1
    assert keys.serves(s, model.full, 2)
    s.tokens = [*s.tokens, 1]
    assert keys.serves(s, model.full, 2)
    s.tokens = [5, *s.tokens[1:]]
    assert not keys.serves(s, model.full, 2)
    s.tokens = LINE
    s.cycles += 1
    assert not keys.serves(s, model.full, 2)


# other selections

def root_inputs():
    """The inputs of a pass of 5 rows after 61 tokens, in blocks of 4, and the means of three layers."""
    q, k, v, mask, carry = pass_inputs(61, 5, 66, 4)
    means, = carry['means']
    return q, k, v, mask, carry | dict(means=[means, means, means])


def attend_selected(name, layer=2):
    """(output, carry) of an anchor layer with this selection, at rho = 0.1."""
    attend, scores = verify.SELECT[name]
    rule = rule_of(rho=0.1)._replace(scores=scores)
    return attend(*root_inputs(), (layer, True, rule))


def rows_keep(name):
    """[2, 2, 5, 15] bool: the blocks that each row keeps; [2, 2, 1, 15] where all rows keep the same."""
    _, carry = attend_selected(name)
    if 'chosen_mask' in carry:
        return carry['chosen_mask']
    nothing = torch.zeros(2, 2, 1, 15, dtype=torch.bool)
    return nothing.scatter(-1, carry['blocks'][:, :, None], True)


def root_keeps(name):
    """[2, 2, 15] bool: the blocks that the first row keeps."""
    return rows_keep(name)[:, :, 0]


@pytest.mark.parametrize('name', sorted(verify.SELECT))
def test_sparse_selection_is_not_dense(name):
    q, k, v, mask, _ = root_inputs()
    dense, _ = kernels.attend(q, k, v, mask, None)
    got, _ = attend_selected(name)
    assert apart(got, dense) > 1e-3


@pytest.mark.parametrize('name', sorted(verify.SELECT.keys() - {'joint', 'union'}))
def test_sparse_selection_keeps_its_budget(name):
    """Six blocks of each row and key head: four, floor(8 + 53 rho) tokens, a sink and a local."""
    assert (rows_keep(name).sum(-1) == 6).all()


def test_sparse_quest_leaves_two_layers_dense():
    _, carry = attend_selected('quest', layer=1)
    assert 'blocks' not in carry


def test_sparse_oracle_holds_the_most_mass():
    """No selection of as many blocks holds more of what the root's query attends to."""
    q, k, _, mask, _ = root_inputs()
    scores = q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 6 ** -0.5 + mask
    weights = scores.softmax(-1).mean(2)[..., :60]                          # of a group's heads
    mass = weights.unflatten(-1, (15, 4)).sum(-1)[:, :, 0]                  # [B, G, N] of the root
    most = (mass * root_keeps('oracle')).sum(-1)
    for name in verify.SELECT.keys() - {'joint', 'union'}:
        held = (mass * root_keeps(name)).sum(-1)
        assert (most >= held - 1e-9).all()


def test_sparse_joint_shares_one_budget():
    """12 blocks of the two key heads together."""
    assert (root_keeps('joint').sum((1, 2)) == 12).all()


def test_sparse_recent_keeps_sink_and_latest():
    kept = root_keeps('recent')[0, 0].nonzero()[:, 0]
    assert kept.tolist() == [0, 10, 11, 12, 13, 14]


def test_sparse_choices_by_row():
    """Each row has its own; the first row's is the method's; their union is what `union` keeps."""
    by_row = rows_keep('token')
    assert torch.equal(root_keeps('union'), by_row.any(2))
    assert torch.equal(root_keeps('token'), root_keeps('head'))
    assert not (by_row == rows_keep('head')).all()


@pytest.mark.parametrize('name, read', [('head', 'head'), ('token', 'union'), ('union', 'union')])
def test_sparse_ledger_counts_what_any_row_reads(name, read):
    """Whole blocks of 4 and the partial one of one key; by row, the union of the rows' choices."""
    _, carry = attend_selected(name)
    row, = sparse_rivals.ledger([(0, carry)], network(), 61)
    blocks = root_keeps(read).sum(-1).float().mean()
    assert row['keys'] == 1 + 4 * blocks


# under other methods

@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    """The flags of a run on a qwen3_moe checkpoint that has dense layers too, and all calibrations."""
    home = tmp_path_factory.mktemp('mixed')
    raw = dict(MIXED, num_experts=6, mlp_only_layers=[1, 3])
    del raw['experts']
    target = checkpoint(home / 'moe', byte_network(qk_norm=True, **MIXED), model_type='qwen3_moe', **raw)
    draft = checkpoint(home / 'draft', byte_network(1))
    ends = {}
    for name in ('draft_logp', 'draft_grounding', 'target_logp', 'target_grounding'):
        ends[name] = [0.0, 1.0]
    write_calibration(target, 'mask', dict(skip=[2, 3], nested=[[2, 3], [2]]))
    write_calibration(target, 'signals', ends, draft)
    write_calibration(target, 'sparse', LEARNED)
    return '--target', target, '--draft', draft, '--prompt', 'hello', '--ignore-eos', '--max-new', 20


SWITCHED_OFF = ('rho=1', 'ffn_threshold=0', 'moe_skip=0')
SWITCHED_ON = dict(attn=('rho=0', 'dense_below=4', 'block=1'), ffn=('ffn_threshold=0.3',),
                   moe=('moe_quantile=1',))
ALL_PARTS = 'attn,ffn,moe'
UNDER = [
    ('attn', 'sd'),
    ('ffn', 'sd'),
    ('moe', 'sd'),
    (ALL_PARTS, 'lenient'),
    (ALL_PARTS, 'via --set escalate=1.1 keep=1.1'),
    (ALL_PARTS, 'via-tiers --set tiers=2'),
    (ALL_PARTS, 'via-tiers'),
    (ALL_PARTS, 'ecsv'),
    (ALL_PARTS, 'ecsv-spot'),
    (ALL_PARTS, 'cmasd --set accept=strict'),
    (ALL_PARTS, 'specguard --set tau=inf target_k=1'),
]


@pytest.mark.slow
@pytest.mark.parametrize('parts, method', UNDER)
def test_sparse_under_a_method_switched_off(parts, method, mixed, capsys):
    """--sparse with every knob off leaves a method its text and its promise."""
    flags = (*mixed, '--method', *method.split())
    dense = reported(capsys, *flags)
    off = reported(capsys, *flags, '--sparse', parts, '--set', *SWITCHED_OFF)
    assert off['tokens'] == dense['tokens']
    assert off['lossless'] == dense['lossless'] == (method not in ('lenient', 'via-tiers'))


@pytest.mark.slow
@pytest.mark.parametrize('parts, method', UNDER)
def test_sparse_under_a_method_switched_on(parts, method, mixed, capsys):
    """All target passes are sparse and counted as whole ones, the text is another, and it says LOSSY."""
    flags = (*mixed, '--method', *method.split())
    knobs = []
    for part in parts.split(','):
        knobs += SWITCHED_ON[part]
    dense = reported(capsys, *flags)
    thinned = reported(capsys, *flags, '--sparse', parts, '--set', *knobs)
    passes = thinned['stats']['passes']
    assert thinned['tokens'] != dense['tokens'] and not thinned['lossless']
    whole = passes.get('target/sparse')
    assert thinned['stats']['block_efficiency'] == (whole and 20 / whole)
    for path in passes:
        assert 'sparse' in path or not path.startswith('target')


# what is measured

def test_sparse_calibration():
    """What train_mask.py --anchors measures is what a session reads back: layers by difference, quantiles."""
    found = sparsity(network(**MIXED), [LINE, LINE[::-1]], dense_below=8, block=4)
    order = sorted(range(1, 4), key=lambda layer: found['jaccard'][layer - 1])
    assert found['anchors'] == [0, *order]
    assert all(0 < likeness < 1 for likeness in found['jaccard'])
    assert list(map(len, found['experts'])) == [2, 0, 2, 0]                 # m = 1, 2; none in a dense layer
    assert list(map(len, found['channels'])) == [1, 21, 1, 21]
    one, two = found['experts'][0]
    assert one == sorted(one) and len(one) == 21
    assert 0 < one[0] and one[-1] <= 1 / 3
    assert two[-1] <= 2 / 3


def test_sparse_likeness_by_hand():
    """Jaccard: the blocks that both layers chose over those that either did, mean over key heads."""
    first = dict(blocks=torch.tensor([[[0, 1, 2], [4, 5, 6]]]), channels=torch.ones(1, 5, 24))
    second = dict(blocks=torch.tensor([[[1, 2, 3], [6, 5, 4]]]), channels=torch.ones(1, 5, 24))
    choices = Choices([0, 0])
    choices.add(list(enumerate([first, first, second, second])))
    assert choices.likeness() == [(2 / 4 + 3 / 3) / 2]


def test_sparse_calibration_needs_long_texts():
    with pytest.raises(ValueError, match='too short for blocks'):
        sparsity(network(), [[1] * 12])


@pytest.fixture(scope='module')
def sparse_prompt():
    """A prompt of math that the embedded target has read densely."""
    known = read_calibration(EMBEDDED / 'target', sections=['sparse'])['sparse']
    return sparse_record.lab_prompt(sparse_record.contexts('math', 1)[0], known)


BOTH_PARTS = sparse_settings.GRID[sparse_settings.BOTH]


def test_sparse_prompt_without_a_setting_is_dense(sparse_prompt):
    dense = sparse_prompt.read({})
    assert dense['kl'] == 0 and dense['alike'] == dense['bytes'] == dense['flops'] == 1


def test_sparse_prompt_reads_less(sparse_prompt):
    """And a setting reads as if it were the only one."""
    first = sparse_prompt.read(BOTH_PARTS)
    sparse_prompt.read({})
    assert first['kl'] == sparse_prompt.read(BOTH_PARTS)['kl'] > 1e-6
    assert first['flops'] < first['run'] < 1 and first['bytes'] < 1
    assert first['keys'] < 1 and first['channels'] < first['union'] < 1
    by_root = sparse_prompt.read(sparse_settings.GRID[sparse_settings.BY_ROOT])
    assert by_root['flops'] == by_root['run'] < 1 and by_root['union'] < 0.41


def test_sparse_prompt_refreshed_every_cycle_is_dense(sparse_prompt):
    assert sparse_prompt.read(BOTH_PARTS | dict(refresh_every=1))['kl'] < 1e-6


def test_sparse_prompt_on_a_fresh_cache_differs(sparse_prompt):
    assert sparse_prompt.read(BOTH_PARTS, fresh=True)['kl'] != sparse_prompt.read(BOTH_PARTS)['kl']


def lessons_of(model):
    """Three lessons of unequal length: what the model says of [1, 2, 3, 4] behind different prompts."""
    found = []
    for prompt in (LINE[:3], LINE[5:29], LINE[9:14]):
        logits = Reader(model, 64).read(prompt + [1, 2, 3], [], model.full, 4)
        found.append(Lesson(prompt, [1, 2, 3, 4], logits.log_softmax(-1)))
    return found


def test_sparse_lessons_stand_where_tokens_are_guessed():
    """A batch's laws are those of the places it marks, whatever its rows' lengths."""
    model = network()
    batches = packed(lessons_of(model), 24, random.Random(0))
    for _ in range(6):
        ids, at, laws = next(batches)
        hidden = model(ids, torch.arange(ids.shape[1]), model.full)
        guesses = model.logits(hidden[at]).log_softmax(-1)
        assert apart(guesses, laws) < 1e-9


def distance(model, lessons):
    """KL in nats from the lessons' laws to what the model says there, summed."""
    total = 0.0
    for mine, theirs in zip(lessons_of(model), lessons):
        chances = theirs.said.exp()
        total += float((chances * (theirs.said - mine.said)).sum())
    return total


@pytest.mark.slow
def test_sparse_student_comes_closer():
    draft = network()
    lessons = lessons_of(network(1))
    student = distil(draft, lessons, 0.5)
    assert distance(student, lessons) < 0.9 * distance(draft, lessons)


# how it is judged

@pytest.fixture
def mixture_stored(monkeypatch, tmp_path):
    """The record `mixture` of one prompt on tiny random networks, stored in a temporary folder, read back."""
    networks = dict(
        target=byte_network(0),
        draft=byte_network(1),
        moe=byte_network(2, experts=(8, 8), num_experts_per_tok=4, moe_intermediate_size=8),
    )

    def tiny(name):
        return networks[name], bytes_tokenizer(), {256}
    monkeypatch.setattr(sparse_record, 'embedded', tiny)
    monkeypatch.setattr(common, 'LAB', tmp_path)
    models, rows_of, _ = sparse_record.RECORDS['mixture']
    common.store('sparse', 'mixture', common.header('mixture', 1, models), rows_of(1))
    return common.read_stored('sparse', 'mixture')


@pytest.mark.slow
def test_sparse_claims_on_mixtures_are_judged(mixture_stored):
    """From rows on the disk to verdicts. One prompt: there is no interval, and all is undecided."""
    assert mixture_stored.head['n'] == 1
    row, = mixture_stored.rows
    found = [common.judge(claim) for claim in sparse_claims.mixture_claims([row])]
    assert len(found) == 11
    first = row['settings']['experts, 1, median rule']
    assert found[0].figure == math.exp(row['nll'] - first['nll'])
    for finding in found:
        assert math.isnan(finding.low) and math.isnan(finding.high) and not math.isnan(finding.figure)
        assert finding.verdict == 'UNDECIDED'
    lines = common.claim_lines(found)
    assert sum(line.startswith('| MoE') for line in lines) == 11


def test_sparse_mixture_reasons_by_name():
    """The reason fits what a setting leaves out; keys weigh more than experts."""
    reasons = [sparse_claims.mixture_reason(name) for name in sparse_settings.MIXTURE]
    assert reasons[:6] == [sparse_claims.NO_EYE, sparse_claims.MEANT] * 3
    assert 'little weight' in reasons[6]
    assert reasons[7:] == [sparse_claims.LOOKS_UP] * 2


def test_sparse_halving_is_the_first_length(monkeypatch):
    """The fewest tokens, in steps of 64, at which the pass with fewer keys costs half as much.

    Of 832 tokens 128 and a quarter of the rest, 304, are 19 blocks of 16; with sink and locals 22, 352 keys.
    """
    def cost(model, rows, T):
        keys = sum(row['keys'] for row in rows)
        return SimpleNamespace(bytes=1000 + keys, flops=100 + keys)
    monkeypatch.setattr(sparse_record, 'cost', cost)
    model = network(num_hidden_layers=1)
    assert sparse_record.halving_length(model, 'flops') == 832          # 932 and 452; not 868 and 436
    assert sparse_record.halving_length(model, 'bytes') == 2624         # 3624 and 1800; not 3560 and 1784


def setting(kl, nll, right, flops):
    """What a stored row says of one setting, of whose FLOPs the code executes twice as many."""
    return dict(kl=kl, nll=nll, right=right, flops=flops, run=2 * flops)


def test_sparse_reduction_by_hand():
    """F1: the most FLOPs spared by a setting that keeps tables right and stories likely; each can forbid."""
    def row(hard_nll, medium_right):
        settings = {name: setting(0.0, 1.0, 1.0, 1.0) for name in sparse_settings.GRID}
        settings['ffn 60 %'] = setting(0.0, 1.01, 1.0, 0.8)
        settings[sparse_settings.MEDIUM] = setting(0.0, 1.0, medium_right, 0.5)
        settings[sparse_settings.HARD] = setting(0.0, hard_nll, 1.0, 0.25)
        return dict(tokens=600, nll=1.0, settings=settings)

    def reduction(*case):
        rows = [row(*case)]
        needed, run = sparse_claims.reduction_claims(rows, rows)
        assert common.judge(run).figure == max(1, common.judge(needed).figure / 2)
        return common.judge(needed).figure
    assert reduction(1.0, 1.0) == 1 / 0.25
    assert reduction(2.0, 1.0) == 1 / 0.5                   # the hardest makes stories unlikely
    assert reduction(2.0, 0.0) == 1 / 0.8                   # and the medium one tables wrong


def test_sparse_anchors_are_judged_by_the_mean_of_their_calibrations():
    """Two calibrations of 0.2 and 0.4 nats beside 0.5 of every second layer and 0.1 of random ones."""
    row = dict(layers=[[0, 1], [0, 2]], file=0.3, second=0.5, random=0.1, calibrated=[0.2, 0.4])
    rows = [row | dict(task='table'), row | dict(task='math')]
    figures = [common.judge(claim).figure for claim in sparse_claims.anchor_claims(rows, '')]
    assert figures == pytest.approx([0.2, -0.2, 0.2] * 2)           # the file's are at 0.3


def test_sparse_calibrations_take_turns(monkeypatch):
    """Prompt i is read with calibration i % SEEDS."""
    def seed_of(model, task, seed):
        return seed
    monkeypatch.setattr(sparse_record, 'calibrated', seed_of)
    pairs = list(sparse_record.in_turn(None, 'math', 'abcdefg'))
    assert pairs == list(zip('abcdefg', [0, 1, 2, 3, 4, 0, 1]))


@pytest.mark.parametrize('is_first', [True, False])
def test_sparse_long_prompt_has_one_answer(is_first):
    """Other tables fill it up to its length; what is asked stands in one line of it, first or last."""
    row = next(tasks.rows('table', 11))
    table, question = row['prompt'].rsplit('\n', 1)
    text = sparse_lengths.long_prompt(row, tasks.rows('table', 12), 1500, is_first)
    assert text.startswith(table) == is_first and text.endswith(f'{table}\n{question}') != is_first
    assert text.endswith(question)
    lines = text.split('\n')
    assert sum(line.startswith('| bags:') for line in lines) == 1
    assert sum(line.startswith('| books:') for line in lines) == 1
    assert sum(line.startswith('| cups:') for line in lines) > 1
    longest = len(common.embedded('target')[1].encode(text).ids)
    assert 800 < longest <= 1500


@pytest.fixture(scope='module')
def sums_pair(tmp_path_factory):
    """A Pair of a tiny random target alone; its prompts are of two families, graded sums and plain news."""
    home = tmp_path_factory.mktemp('sums')
    model = byte_network(max_position_embeddings=2048)
    target = checkpoint(home / 'target', model, max_position_embeddings=2048)
    rows = []
    for i in range(60):
        rows.append(dict(question=f'{i} and {i}?', answer=f'{i} + {i} = {2 * i} #### {2 * i}', task='sums'))
        rows.append(dict(prompt=f'Article {i} tells of {i * i} foxes and of nothing else.', category='news'))
    (home / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return Pair(str(target), '', (str(home / 'rows.jsonl'),), max_new=24)


@pytest.mark.parametrize('place', [0, 1])
def test_sparse_joined_rows_leave_the_last_one_open(sums_pair, place):
    """Worked rows fill the context, but for the answer; those of the calibration are not there."""
    row, ids = sparse_lengths.joined(sums_pair, 'sums', 512, place)
    *worked, last = sums_pair.text(ids).split(sparse_lengths.NEXT)
    assert last == f'{row["prompt"]}\nAnswer:' and row['answer'] not in sums_pair.text(ids)
    assert 512 - 24 - 60 < len(ids) <= 512 - 24
    assert worked and all('####' in text for text in worked)
    spare = sums_pair.text(sparse_lengths.calibration_ids(sums_pair, 'sums'))
    for i in range(54, 60):
        assert f'{i} + {i}' in spare and f'{i} and {i}' not in sums_pair.text(ids)


def test_sparse_joined_rows_of_places_differ(sums_pair):
    contexts = [sparse_lengths.joined(sums_pair, 'sums', 512, place) for place in (0, 1, 0)]
    assert contexts[0] == contexts[2] != contexts[1]


def test_sparse_joined_text_is_cut_where_it_is_full(sums_pair):
    row, ids = sparse_lengths.joined(sums_pair, 'news', 512, 0)
    assert row == {} and len(ids) == 512 - 24 and sums_pair.text(ids).startswith('Article ')
    assert sums_pair.grade(row, 'a text') is None


def test_sparse_long_contexts_are_those_that_fit(sums_pair):
    """No longer than what the target reads, and than what the rows have: 54 of news, 55 bytes or so each."""
    found = sparse_record.length_items(sums_pair, 2)
    assert [item[1:] for item in found] == [(2048, 0), (2048, 1)] * 2
    assert [item.family for item in found] == ['sums'] * 2 + ['news'] * 2
    assert not sparse_lengths.can_fill(sums_pair, 'sums', 2049)
    assert sparse_lengths.filling(sums_pair.tokenizer, ['abc', 'de', 'f'], 4) == (['abc', 'de'], 5)


@pytest.mark.parametrize('family', ['sums', 'news'])
def test_sparse_long_row_of_any_pair(sums_pair, family, monkeypatch):
    """Each setting reads what the dense target wrote, as it must: dense agrees. Only sums are graded."""
    monkeypatch.setattr(sparse_lengths, 'CALIBRATED', 280)
    monkeypatch.setattr(sparse_record, 'OWN', 10)
    row = sparse_record.joined_row(sums_pair, sparse_record.LongContext(family, 512, 0))
    read = row['settings']
    assert list(read) == list(sparse_settings.LENGTHS)
    assert row['read'] == 10 and read['dense']['alike'] == 1 and read['dense']['kl'] == 0
    assert read['calibrated']['keys'] == read['random']['keys'] < 0.7
    assert read['random']['kl'] > 0 and read['calibrated']['bytes'] < 1
    graded = [name for name in read if 'right' in read[name]]
    assert graded == (['dense', *sparse_settings.WRITTEN] if family == 'sums' else [])


def test_sparse_stretched_network_is_another():
    """Beyond what a network learned a copy reads, whose slow frequencies are stretched; within, it itself."""
    model = network(max_position_embeddings=32)
    assert sparse_lengths.stretched(model, 32) is model
    longer = sparse_lengths.stretched(model, 64)
    assert longer.cos.shape[0] >= 64 and longer.config.rope['factor'] == 2
    assert model.config.max_position_embeddings == 32
    there = model.cos.shape[0]
    assert not torch.equal(longer.cos[:there], model.cos)


def long_row(length, seconds, dense):
    """A stored row of a long context: dense is right or not, and sparse, as fast as said, never."""
    usual = dict(kl=0.0, alike=1.0, keys=1.0, flops=1.0, run=1.0, bytes=1.0, seconds=1.0, right=dense,
                 tokens_a_cycle=2.0)
    thin = usual | dict(kl=0.1, alike=0.9, keys=0.25, flops=0.5, bytes=0.8, seconds=seconds, right=0)
    recent = thin | dict(kl=0.4, right=1)
    settings = dict(dense=usual, calibrated=thin, second=thin | dict(kl=0.3), recent=recent, tenth=thin)
    return dict(length=length, tokens=length - 50, settings=settings)


def test_sparse_long_claims_by_hand():
    """Speed is the dense seconds over the sparse; where dense is never right nothing can be lost."""
    rows = [long_row(2048, 2.0, 1), long_row(8192, 0.5, 0)]
    found = {claim.text: common.judge(claim) for claim in sparse_claims.long_claims(rows)}
    slow, fast = [found[f'Long, 75 %, {k}k tokens: speed of a pass over a dense one'] for k in (2, 8)]
    assert slow.figure == 0.5 and fast.figure == 2
    assert 'would allow 2.00, the bytes 1.25' in fast.remark
    assert found['Long, 75 %, 2k tokens: right less dense'].figure == -1
    assert 'Long, 75 %, 8k tokens: right less dense' not in found
    assert found['Long, 75 %, 2k tokens: minus the KL to dense'].figure == -0.1
    assert found['F4, long: KL of recent blocks less that of mean-key blocks'].figure == pytest.approx(0.3)
    assert found['F4, long: right, mean-key blocks less recent blocks'].figure == -1
    assert found['Long: KL, every second layer less calibrated anchors'].figure == pytest.approx(0.2)
    never_right = sparse_claims.long_claims(rows[1:])
    assert len(never_right) == 5 and not any('right' in claim.text for claim in never_right)


def test_sparse_claims_of_no_rows():
    """Nothing is claimed of records that are absent, or empty since no context could be filled."""
    assert sparse_claims.claims({}) == sparse_claims.tables({}) == []
    empty = dict(lengths=common.Stored({}, []))
    assert sparse_claims.claims(empty) == sparse_claims.tables(empty) == []


@pytest.mark.parametrize('line, verdict', [(-0.6, 'HOLDS'), (-0.4, 'FAILS')])
def test_sparse_stress_is_a_difference(line, verdict):
    """Half of the texts are right only dense."""
    rows = []
    for hard in (1.0, 0.0):
        settings = {'dense': dict(right=1.0), sparse_settings.HARD: dict(right=hard)}
        rows.append(dict(settings=settings))
    claim = sparse_claims.stress_claim('math', rows)
    assert common.judge(replace(claim, line=line, sampled=False)).verdict == verdict


# ---------------------------------------------------------- specmini.py: a run's JSON and trace

REPORT = 'text tokens prompt_tokens method lossless knobs seed device dtype finish stats'.split()
FIGURES = ('cycles passes positions drafted judged accepted acceptance_rate rejection_rate '
           'acceptance_by_place drafted_share block_efficiency labels seconds prompt_seconds '
           'tokens_per_second work compute audited audited_wrong audited_logp').split()


def standard_output(*flags):
    """What one run in this process prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = specmini.main([str(flag) for flag in flags])
    assert status == 0
    return out.getvalue()


@pytest.fixture(scope='module', params=['ar-1', 'sd-0', 'sd-1', 'cmasd-1'])
def one_run(request, pair, tmp_path_factory):
    """What a run of this method at this temperature streams, traces and, in a second run, reports."""
    method, temperature = request.param.split('-')
    file = tmp_path_factory.mktemp('run') / 'trace.jsonl'
    flags = [*pair, '--method', method, '--temperature', temperature, '--seed', 3, '--trace', file]
    text = standard_output(*flags)
    lines = file.read_text().splitlines()
    cycles = [json.loads(line) for line in lines]
    judged = [token for cycle in cycles for token in cycle['judged']]
    report = json.loads(standard_output(*flags, '--json'))
    return SimpleNamespace(method=method, text=text, lines=lines, cycles=cycles, judged=judged,
                           report=report)


def test_json_trace_and_text_are_one_run(one_run):
    """The JSON object, the trace and the streamed text are one run's."""
    report = one_run.report
    assert list(report) == REPORT
    assert list(report['stats']) == FIGURES
    assert report['text'] == one_run.text[:-1]
    traced = []
    passes = 0
    labels = Counter()
    for cycle in one_run.cycles:
        traced += cycle['tokens']
        passes += cycle['passes']['target/full']['passes']
        labels.update(cycle['labels'])
    assert traced == report['tokens']
    assert passes == report['stats']['passes']['target/full']
    assert labels == report['stats']['labels']


def test_json_names_the_run(one_run):
    """Method, seed, dtype, device, prompt and why the text ended: at the end token or at --max-new."""
    report = one_run.report
    assert report['method'] == one_run.method
    assert report['seed'] == 3
    assert report['device'] == specmini.pick_device('auto')
    assert report['dtype'] == ('bf16' if report['device'] == 'cuda' else 'fp32')
    assert report['prompt_tokens'] == len('hello')
    if report['tokens'][-1] == 256:
        assert report['finish'] == 'eos'
    else:
        assert report['finish'] == 'length'
        assert len(report['tokens']) == 20


def test_figures_fit_together(one_run):
    """Tokens by label, accepted among judged among drafted, tokens a pass and a second."""
    stats = one_run.report['stats']
    n = len(one_run.report['tokens'])
    assert sum(stats['labels'].values()) == n
    assert stats['labels'].get('draft', 0) == stats['accepted']
    assert stats['accepted'] <= stats['judged'] <= stats['drafted']
    assert stats['drafted_share'] == stats['accepted'] / n
    kept = sum(kept for kept, _ in stats['acceptance_by_place'])
    judged = sum(judged for _, judged in stats['acceptance_by_place'])
    assert (kept, judged) == (stats['accepted'], stats['judged'])
    assert stats['block_efficiency'] == n / stats['passes']['target/full']
    assert stats['tokens_per_second'] == pytest.approx(n / stats['seconds'])


@pytest.mark.parametrize('one_run', ['ar-1'], indirect=True)
def test_figures_of_plain_decoding(one_run):
    """No knobs, no draft: a pass a token, and rates that have no denominator are null."""
    stats = one_run.report['stats']
    assert one_run.report['knobs'] == {}
    assert set(stats['passes']) == {'target/full'}
    assert stats['acceptance_rate'] is None
    assert stats['work'] == stats['compute'] == stats['cycles']


@pytest.mark.parametrize('one_run', ['sd-0', 'sd-1', 'cmasd-1'], indirect=True)
def test_figures_of_drafting(one_run):
    """A target pass reads every draft token and one more; each judged token was drawn from q."""
    stats = one_run.report['stats']
    assert stats['acceptance_rate'] + stats['rejection_rate'] == pytest.approx(1)
    assert stats['positions']['target/full'] == stats['drafted'] + stats['cycles']
    assert len(one_run.judged) == stats['judged'] > 0
    for token in one_run.judged:
        assert 0 <= token['p'] <= 1
        assert 0 < token['q'] <= 1


@pytest.mark.parametrize('one_run', ['sd-0', 'sd-1'], indirect=True)
def test_trace_of_sd_has_the_exact_chance(one_run):
    assert one_run.report['knobs']['gamma'] == 4
    for token in one_run.judged:
        assert token['chance'] == min(1, token['p'] / token['q'])


@pytest.mark.parametrize('one_run', ['cmasd-1'], indirect=True)
def test_trace_of_cmasd_has_confidence_and_threshold(one_run):
    for token in one_run.judged:
        assert token['confidence'] <= 1
        assert 0.01 <= token['threshold'] <= 1


# ---------------------------------------------------------- lab/page: a trace as a page

TOM = 'Last winter Tom the crow went to the forest with a basket.'
VIEWED = dict(ar={}, sd={}, cmasd={}, ecsv={}, via={}, specguard=dict(tau=0.9),
              sparse=dict(dense_below=8, block=4, locals=1))        # blocks are left out of short texts, too


def run_of(file):
    """What a page was given: the JSON in it, up to the first tag that would end it."""
    text = File(file).read_text(encoding='utf-8')
    return json.loads(text.split('id="trace">')[1].split('</script>')[0])


@pytest.fixture(scope='module')
def viewed(tmp_path_factory):
    """The page of one prompt by plain decoding and all methods, and its lanes by their names."""
    engine = specmini.Engine(EMBEDDED / 'target', EMBEDDED / 'draft', max_new=28, temperature=1.0, seed=5)
    ids = engine.tokenizer.encode(TOM).ids
    engine.open([ids])
    methods = {name: METHODS[name](**knobs) for name, knobs in VIEWED.items()}
    file = tmp_path_factory.mktemp('page') / 'run.html'
    with specmini.open_trace(str(file), engine) as page:
        specmini.trace_comparison(engine, [dict(prompt=TOM)], [ids], methods, page)
    run = run_of(file)
    lanes = {lane['method']: lane for lane in run['texts'][0]['lanes']}
    return SimpleNamespace(file=file, run=run, lanes=lanes, engine=engine, ids=ids, methods=methods)


def judged_places(lane):
    """(verdict, what was noted of its place) of every judged token."""
    for cycle in lane['cycles']:
        for row, place in zip(cycle['judged'], cycle.get('places', [])):
            yield row, place


def test_trace_page_changes_no_text(viewed):
    """Noting draws nothing and writes to no cache: the texts are those of sessions that note nothing."""
    viewed.engine.session = verify.Session
    for name, method in viewed.methods.items():
        written = verify.tokens_of(viewed.engine.write(viewed.ids, method))
        traced = [token for cycle in viewed.lanes[name]['cycles'] for token in cycle['tokens']]
        assert traced == written, name


@pytest.mark.parametrize('name', ['sd', 'cmasd', 'ecsv', 'sparse'])
def test_noted_place_holds_its_verdict(viewed, name):
    """p and q of the guess, both halves of the coin, the residual by hand; eight tokens, and those used."""
    pairs = list(judged_places(viewed.lanes[name]))
    assert len(pairs) == viewed.lanes[name]['stats']['judged'] > 10
    for row, place in pairs:
        i = place['ids'].index(row['token'])
        assert place['p'][i] == pytest.approx(row['p'], abs=1e-5)
        assert place['q'][i] == pytest.approx(row['q'], abs=1e-5)
        assert 8 <= len(place['ids']) == len(set(place['ids'])) <= 10
        if place['coin'] is None:
            assert row['chance'] in (0, 1)
        else:
            assert (place['coin'] <= row['chance']) == row['kept']
        assert ('residual' in place) == (not row['kept'])
        if not row['kept']:
            for p, q, rest in zip(place['p'], place['q'], place['residual']):
                assert rest == pytest.approx(max(p - q, 0) / (1 - place['overlap']), abs=1e-3)


def test_noted_overlap_is_that_of_whole_laws():
    """Of a vocabulary of eight all is noted: the overlap is the sum of min(p, q) that is there."""
    pair = [network(seed, 8) for seed in (0, 1)]
    s = Traced(**vars_of(session(*pair, [1, 2, 3], 24, temperature=1.0)))
    _, cycles = write(s, Exact())
    places = [place for cycle in cycles for place in cycle.notes['places'] if 'q' in place]
    assert len(places) > 10
    for place in places:
        both = sum(min(p, q) for p, q in zip(place['p'], place['q']))
        assert place['overlap'] == pytest.approx(both, abs=1e-4)


def vars_of(s):
    """The arguments that a Session was made with."""
    return {option.name: getattr(s, option.name) for option in fields(s) if option.init}


def test_noted_windows_are_cmasds_rule(viewed):
    """floor(mean confidence so far k_max) within k_min and k_max; the block closes where it is reached."""
    for cycle in viewed.lanes['cmasd']['cycles']:
        confidence = cycle.get('confidence', [])
        assert len(confidence) == len(cycle['drafted'])
        for i, window in enumerate(cycle.get('window', []), 1):
            mean = sum(confidence[:i]) / i
            assert window == min(10, max(1, math.floor(10 * mean)))
            assert (i < window) or i == len(confidence)


def test_noted_votes_elect_the_block(viewed):
    """At each place the token with the most weight behind it is the one that was put to the target."""
    cycles = [cycle for cycle in viewed.lanes['ecsv']['cycles'] if 'branches' in cycle]
    assert any(len(set(column)) > 1 for cycle in cycles for column in zip(*cycle['branches']))
    for cycle in cycles:
        votes = zip(*cycle['branches']), zip(*cycle['weights']), cycle['drafted']
        for tokens, weights, elected in zip(*votes):
            behind = Counter()
            for token, weight in zip(tokens, weights):
                behind[token] += weight
            assert behind[elected] == pytest.approx(max(behind.values()), abs=1e-4)


def test_noted_lag_is_what_the_target_has_not_read(viewed):
    """It grows by what slim commits and ends with a whole pass; where the target reads each block it is 0."""
    assert all(cycle['lag'] == 0 for cycle in viewed.lanes['sd']['cycles'])
    lag = 0
    lags = []
    for cycle in viewed.lanes['via']['cycles']:
        lag = 0 if 'target/full' in cycle['passes'] else lag + len(cycle['tokens'])
        lags.append(lag)
    assert [cycle['lag'] for cycle in viewed.lanes['via']['cycles']] == lags
    assert max(lags) > 5


def test_noted_laws_of_slim_fit_its_ratios(viewed):
    """s(x) / max s of the noted law is the ratio that the verdict was by."""
    checked = 0
    for row, place in judged_places(viewed.lanes['via']):
        if row['p'] is None and place['s'][place['ids'].index(row['token'])] > 0.01:
            ratio = place['s'][place['ids'].index(row['token'])] / max(place['s'])
            assert ratio == pytest.approx(row['ratio'], abs=1e-3)
            checked += 1
    assert checked > 10


def test_noted_candidates_and_grounding(viewed):
    """k candidates, the judged among them; a token leans on as much as its grounding says, and no more."""
    steps = viewed.lanes['specguard']['cycles']
    assert any(not cycle['judged'][0]['kept'] for cycle in steps)
    for cycle in steps:
        assert len(cycle['candidates']) == 4 and cycle['drafted'] in cycle['candidates']
        assert len(cycle['grounded']) == len(cycle['judged'])
        for row, leans in zip(cycle['judged'], cycle['grounded']):
            total = sum(share for _, share in leans)
            assert total <= row['grounding'] + 1e-3
            assert len(leans) == 24 or total > row['grounding'] - 0.3


def test_noted_rollout_rows_are_the_whole_product(monkeypatch):
    """Each row is that of the oracle, also of a text that is fed in chunks."""
    model = network(0, num_hidden_layers=4)
    for residual_share, layers in ((0.0, 'last'), (0.5, 'middle')):
        method = SpecGuard(n_roll=2, layers=layers, residual=residual_share)
        chosen = [2, 3] if layers == 'last' else [1, 2]
        wanted = whole_rollout(model, LINE, chosen, 0.01, residual_share)
        with monkeypatch.context() as patch:
            patch.setattr('model.CHUNK', 16)
            found = rollout_rows(model, LINE, method)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_noted_blocks_are_those_that_were_read(viewed):
    """Each key head has the budget's count, with sink and locals; a layer that reuses names who chose."""
    noted = [cycle['blocks'] for cycle in viewed.lanes['sparse']['cycles'] if 'blocks' in cycle]
    method = viewed.methods['sparse']
    assert noted
    for blocks in noted:
        whole = blocks['cached'] // 4
        rule = verify.Blocks(method.rho, 8, 4, method.sinks, 1, 'root', None)
        latest = None
        for layer, choice in enumerate(blocks['layers']):
            if isinstance(choice, list):
                latest = layer
                for head in choice:
                    assert len(set(head)) == kernels.kept_blocks(blocks['cached'], rule) < whole
                    assert {0, whole - 1} <= set(head)
            else:
                assert choice == latest


def test_trace_page_holds_the_json_trace(pair, tmp_path, monkeypatch):
    """The same run traced to JSON lines and to a page: the same cycles but for what the clock said."""
    monkeypatch.setattr(specmini, 'TIMING', 0.0)
    traces = []
    for name in ('run.jsonl', 'run.html'):
        standard_output(*pair, '--temperature', 1, '--seed', 3, '--trace', tmp_path / name)
    lines = (tmp_path / 'run.jsonl').read_text().splitlines()
    traces.append([json.loads(line) for line in lines])
    traces.append(run_of(tmp_path / 'run.html')['texts'][0]['lanes'][0]['cycles'])
    for cycles in traces:
        for cycle in cycles:
            del cycle['ms']
            for row in cycle['passes'].values():
                del row['ms']
    assert traces[0] == traces[1]
    assert all(cycle['places'] for cycle in traces[0])


@pytest.mark.parametrize('cycle', [1, 2])
def test_trace_page_of_an_interrupted_run(cycle, pair, tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second cycle: the page shows the first; in the first: it has no text."""
    interrupt(monkeypatch, verify.Session, 'commit', cycle)
    assert specmini.main([*map(str, pair), '--trace', str(tmp_path / 'run.html')]) == 130
    texts = run_of(tmp_path / 'run.html')['texts']
    assert [len(text['lanes'][0]['cycles']) for text in texts] == [1] * (cycle - 1)


def test_trace_page_of_256_tokens_has_at_most_400_kb(tmp_path):
    """Of a random pair that is mostly rejected, so that nearly every token has a place of its own."""
    target = checkpoint(tmp_path / 'target', byte_network(0), max_position_embeddings=512)
    draft = checkpoint(tmp_path / 'draft', byte_network(1), max_position_embeddings=512)
    engine = specmini.Engine(target, draft, max_new=256, temperature=1.0, ignore_eos=True)
    ids = engine.tokenizer.encode('hello').ids
    engine.open([ids])
    file = tmp_path / 'run.html'
    specmini.note_cycles(engine)
    with specmini.open_trace(str(file), engine) as page:
        for name in ('ar', 'sd'):
            own = METHODS[name]()
            s = engine.start(ids, own)
            cycles = list(decode(s, own))
            found = specmini.report(engine, name, own, s, {}, cycles)
            lines = [specmini.trace_line(0, i, cycle, engine.tokenizer) for i, cycle in enumerate(cycles)]
            page.add(ids, found, lines)
            assert len(found['tokens']) == 256
    assert file.stat().st_size <= 400_000


# ---------------------------------------------------------- lab/page, in a browser

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    """A headless Chromium with an empty profile; without one its tests are skipped."""
    pytest.importorskip('selenium')
    try:
        opened = open_browser(tmp_path_factory.mktemp('profile'))
    except ValueError as error:
        pytest.skip(str(error))
    yield opened
    opened.quit()


def look_into(browser, number):
    """Chooses a lane of a comparison."""
    browser.execute_script('const list = document.getElementById("choose-lane"); list.value = arguments[0];'
                           'list.dispatchEvent(new Event("change"));', number)


WALK = '''
const found = [];
for (let i = arguments[0]; i <= Number(document.getElementById('scrubber').max); i += 3) {
  move(i);
  const bars = [];
  for (const bar of document.querySelectorAll('#picture [data-token]')) {
    bars.push([bar.getAttribute('class').slice(4), Number(bar.dataset.token), Number(bar.dataset.value)]);
  }
  const values = {};
  for (const node of document.querySelectorAll('#picture .coin, #picture .chance, #view [data-value]')) {
    const name = node.getAttribute('class').split(' ')[0];
    (values[name] = values[name] || []).push(Number(node.dataset.value));
  }
  const weights = Array.from(document.querySelectorAll('.vote'), cell => Number(cell.dataset.weight));
  found.push({bars: bars, values: values, weights: weights, read: document.querySelectorAll('.read').length,
              steps: document.getElementById('steps').textContent});
}
return found;
'''


def steps_of(lane):
    """(cycle, place, verdict or None) of each token that a page of this lane can stand at."""
    found = []
    for cycle in lane['cycles']:
        written = 0
        rejected = False
        for place, row in enumerate(cycle['judged']):
            rejected = not row['kept']
            if rejected or written < len(cycle['tokens']):
                found.append((cycle, place, row))
                written += row['kept']
        for _ in cycle['tokens'][written:]:
            found.append((cycle, len(cycle['judged']) - rejected, None))
    return found


@pytest.mark.slow
def test_trace_page_shows_the_numbers_of_its_trace(browser, viewed):
    """Every bar, chance, coin, vote, lag, score, ratio and confidence, at every third token of every lane."""
    visit(browser, viewed.file)
    for number, (name, lane) in enumerate(viewed.lanes.items()):
        look_into(browser, number)
        cycles = lane['cycles']
        seen = browser.execute_script(WALK, number % 3)
        expected = steps_of(lane)[number % 3::3]
        assert len(seen) == len(expected) > 7
        for at, (cycle, place, row) in zip(seen, expected):
            places = cycle.get('places', [])
            laws = places[place] if place < len(places) else dict(ids=[])
            bars = []
            for law in 'pqs':
                bars += [[law, *bar] for bar in zip(laws['ids'], laws.get(law, []))]
            assert sorted(at['bars']) == sorted(bars)
            values = at['values']
            if row and 'score' not in row:
                assert values['chance'] == [row['chance']]
                assert values.get('coin', [None]) == [laws['coin']]
                if row['p'] and row['p'] > 1e-4:
                    assert f'p = {row["p"]:.4f}' in at['steps']
            assert at['weights'] == [weight for line in cycle.get('weights', []) for weight in line]
            shown = values.get('confidence', [])
            assert shown == [each for one in cycles for each in one.get('confidence', [])]
            if name == 'via':
                ratios = [row['ratio'] for one in cycles for row in one['judged']]
                assert values['ratio'] == ratios
                assert values['lag'] == [one['lag'] for one in cycles]
            if name == 'specguard':
                assert values['score'] == [one['judged'][0]['score'] for one in cycles]
                assert values['grounding'] == [row['grounding'] for row in cycle['judged']]
            assert (at['read'] > 0) == ('blocks' in cycle)
        stats = lane['stats']
        for figure, value in (('tokens', sum(stats['labels'].values())), ('cycles', stats['cycles'])):
            assert browser.find_element('id', f'number-{figure}').text == str(value)
    assert browser.get_log('browser') == []


def test_trace_page_is_walked_by_keys_and_by_touch(browser, viewed):
    from selenium.webdriver import ActionChains, Keys
    visit(browser, viewed.file)
    look_into(browser, 1)
    expected = steps_of(viewed.lanes['sd'])
    cycles = viewed.lanes['sd']['cycles']

    def press(*keys):
        ActionChains(browser).send_keys(*keys).perform()
        return browser.find_element('id', 'where').text

    strip = browser.find_element('id', 'strip')
    browser.execute_script('arguments[0].focus()', strip)
    n = len(expected)
    assert press(Keys.HOME) == f'token 1 of {n}, cycle 1'
    right, left = Keys.ARROW_RIGHT, Keys.ARROW_LEFT
    assert press(right, right, right, left).startswith('token 3 of')
    assert press(Keys.END) == f'token {n} of {n}, cycle {len(cycles)}'
    assert press(Keys.ARROW_RIGHT).startswith(f'token {n} of')
    assert press(Keys.ARROW_UP).endswith(f'cycle {len(cycles) - 1}')
    assert press(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_DOWN).endswith('cycle 3')
    here = browser.find_element('class name', 'here').get_attribute('id')
    assert strip.get_attribute('aria-activedescendant') == here
    browser.find_element('id', 'event-7').click()
    assert browser.find_element('id', 'where').text.startswith('token 8 of')
    browser.execute_script('document.activeElement.blur()')
    focused = []
    for _ in range(8):
        press(Keys.TAB)
        focused.append(browser.switch_to.active_element.get_attribute('id'))
    for wanted in ('strip', 'scrubber', 'unit', 'draft-cost'):
        assert wanted in focused
    assert browser.get_log('browser') == []


def test_trace_page_reckons_the_clock(browser, viewed):
    """A lane's time by hand: in work, with another cost of draft and of verifying passes, in milliseconds."""
    visit(browser, viewed.file)
    look_into(browser, 1)
    lane = viewed.lanes['sd']
    share = viewed.run['shares']['draft/full']

    def time_of(name='sd'):
        found = browser.find_element('css selector', f'.speed[data-name={name}]')
        return float(found.get_attribute('data-time'))

    def slide(role, value):
        browser.execute_script('const slider = document.getElementById(arguments[0] + "-cost");'
                               'slider.value = arguments[1];'
                               'slider.dispatchEvent(new Event("input"));', role, value)

    passes = lane['stats']['passes']
    assert time_of() == pytest.approx(passes['draft/full'] * share + passes['target/full'])
    assert time_of('ar') == pytest.approx(len(viewed.lanes['ar']['cycles']))
    slide('draft', 0.5)
    slide('verify', 2)
    assert time_of() == pytest.approx(passes['draft/full'] * 0.5 + passes['target/full'] * 2)
    assert time_of('ar') == pytest.approx(len(viewed.lanes['ar']['cycles']))
    browser.execute_script('const list = document.getElementById("unit"); list.value = "ms";'
                           'list.dispatchEvent(new Event("change"));')
    spent = sum(cycle['ms'] for cycle in lane['cycles'])
    assert time_of() * viewed.run['step'] == pytest.approx(spent, rel=1e-3)


HOSTILE = ['</script><script>window.hacked = 1</script>', '<img src=x onerror="window.hacked = 1">',
           '"\'&<!--', '\ud800', '\u2028\u2029', '$trace ${trace} $$', '', '\x00\x1b[31m', '\u202eabc',
           '\\u003c\n']


def test_trace_page_keeps_hostile_text_text(browser, tmp_path):
    """Whatever a model or a prompt says is in the page letter by letter, and nothing of it runs."""
    words = dict(enumerate(HOSTILE))
    tokenizer = SimpleNamespace(decode=lambda ids, **how: ''.join(words[i] for i in ids))
    target = byte_network(0)
    engine = SimpleNamespace(tokenizer=tokenizer, weights=lambda: {'target/full': 1}, temperature=1.0,
                             models=dict(target=target), target='a</script>b')
    ids = list(words)
    report = dict(method='sd', lossless=True, knobs={}, seed=0, finish='length',
                  stats=dict(labels=dict(target=len(ids)), cycles=1, passes={'target/full': 1},
                             acceptance_rate=None, tokens_per_second=1.0, acceptance_by_place=[]))
    cycle = verify.Cycle([], [], ids, ['target'] * len(ids), {'target/full': [1, 1, 0.01]}, 0.01)
    with open(tmp_path / 'run.html', 'w', encoding='utf-8') as file:
        page = Page(file, engine)
        page.add(ids, report, [specmini.trace_line(0, 0, cycle, tokenizer)])
        page.conclude()
    visit(browser, tmp_path / 'run.html')
    shown = browser.execute_script('''
        return [window.hacked === undefined, document.scripts.length, document.images.length,
                Array.from(document.querySelectorAll('#strip .prompt'),
                           token => Array.from(token.textContent, letter => letter.codePointAt(0)))];''')
    codes = [[ord(letter) for letter in word] for word in HOSTILE]
    assert shown == [True, 2, 0, codes]
    assert browser.get_log('browser') == []


def test_trace_page_fits_a_phone(browser, viewed):
    """At 360 pixels nothing is wider than the page, whatever the method; and what is drawn has a name."""
    visit(browser, viewed.file, 360)
    for number in range(len(viewed.lanes)):
        look_into(browser, number)
        assert 300 < browser.execute_script('return document.documentElement.scrollWidth') <= 360
    unnamed = browser.execute_script('return document.querySelectorAll("svg:not([aria-label])").length')
    assert unnamed == 0
    assert browser.get_log('browser') == []

# ---------------------------------------------------------- specmini.py: streaming, what is shown

def pieces_printed(capsys, tokenizer, ids):
    """What a Printer prints at each of these tokens, and at the end of the text."""
    printer = specmini.Printer(tokenizer, False, False)
    pieces = []
    for token in ids:
        printer.add(verify.Cycle([], [], [token], ['target'], {}, 0.0))
        pieces.append(capsys.readouterr().out)
    printer.finish(tokenizer.decode(ids))
    return [*pieces, capsys.readouterr().out]


def byte_fallback_tokenizer():
    """(tokenizer, its number of words): 256 bytes and two words, decoded as Llama 2's."""
    words = ['<unk>']
    words += [f'<0x{byte:02X}>' for byte in range(256)]
    words += ['\u2581a', '\u2581b']
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer, len(words)


def test_streaming_prints_whole_characters(capsys):
    """No piece holds half a character; one that never becomes whole is printed at the end."""
    tokenizer = bytes_tokenizer()
    text = 'na\u00efve \u2192 \U0001f600!'
    half = tokenizer.encode('\u20ac').ids[:2]
    ids = tokenizer.encode(text).ids + half
    assert len(ids) == len(text.encode()) + len(half)
    *pieces, last = pieces_printed(capsys, tokenizer, ids)
    assert ''.join(pieces) == text
    for piece in pieces:
        assert '\ufffd' not in piece
    assert last[0] == '\ufffd'


def test_streaming_where_a_decoder_rewrites_bytes(capsys):
    """A broken byte makes this decoder take back the A before it: what is printed stays, the rest follows."""
    tokenizer, _ = byte_fallback_tokenizer()
    pieces = pieces_printed(capsys, tokenizer, [1 + 0x41, 1 + 0xe2])
    assert ''.join(pieces) == 'A\ufffd\ufffd\n'


@pytest.mark.parametrize('seed', range(20))
def test_streaming_ends_as_the_text_does(seed, capsys):
    tokenizer, n = byte_fallback_tokenizer()
    ids = torch.randint(1, n, (12,), generator=seeded(seed)).tolist()
    printed = ''.join(pieces_printed(capsys, tokenizer, ids))
    assert printed[-3:-1] == tokenizer.decode(ids)[-2:]


def test_colours_only_where_asked_for(pair, capsys):
    _, bare, _ = program(capsys, *pair)
    _, painted, _ = program(capsys, *pair, '--color', 'always')
    assert '\033[' not in bare
    assert '\033[3' in painted
    assert re.sub(r'\033\[[\d;]*m', '', painted) == bare


def test_show_draws_a_line_a_cycle(pair, capsys):
    _, out, _ = program(capsys, *pair, '--show')
    *lines, _ = out.split('\n')                         # not by splitlines: random texts have other breaks
    assert re.fullmatch(r' +1  \d/4  .+', lines[0])
    assert '[-' in out
    assert len(lines) == reported(capsys, *pair)['stats']['cycles']


def test_list_names_every_method_and_its_knobs(capsys):
    _, listed, _ = program(capsys, '--list')
    for name in METHODS:
        assert name in listed
    assert 'lenience=0.5' in listed


def test_remarks_come_last(pair, capsys, monkeypatch):
    """They are given all cycles and the report of every text."""
    def count(method, sparse, cycles, reports):
        return [f'{len(cycles)} cycles', f'{len(reports)} texts']

    cycles = reported(capsys, *pair)['stats']['cycles']
    monkeypatch.setattr(specmini, 'remarks', count)
    _, _, err = program(capsys, *pair)
    *before, first, last = err.splitlines()
    assert 'break-even' in ''.join(before)
    assert (first, last) == (f'{cycles} cycles', '1 texts')


def test_interrupted_text_has_its_figures(pair, capsys, monkeypatch):
    interrupt(monkeypatch, verify.Exact, 'accept', 3)
    status, out, err = program(capsys, *pair)
    assert status == 130
    assert out
    assert 'sd (lossless)' in err


def test_interrupted_json_says_so(pair, capsys, monkeypatch):
    interrupt(monkeypatch, verify.Exact, 'accept', 3)
    status, out, _ = program(capsys, *pair, '--json')
    assert status == 130
    assert json.loads(out)['finish'] == 'interrupted'


# ---------------------------------------------------------- specmini.py: --check and --compare

def test_compare_is_a_table_of_methods(pair, capsys):
    """A line a method, each marked as what it is, then a sentence or more on each that drafts."""
    flags = '--compare', 'sd,lenient', '--set', 'lenience=0.1', 'gamma=2'
    status, out, _ = program(capsys, *pair, *flags)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    starts = [line[0] for line in lines]
    assert starts[:9] == ['method', 'ar', 'sd', 'lenient', 'x', 'n', 'full', 'sd:', 'of']
    assert starts[-1] == 'lenient:' and starts[-3] == 'sd:'
    _, ar, sd, lenient, *_ = lines
    assert (ar[-1], sd[-1], lenient[-1]) == ('lossless', 'lossless', 'LOSSY')
    speedup, positions = ar[2], ar[-4]
    assert (speedup, positions) == ('1.00', '1.00')
    like_ar = sd[-3]
    assert like_ar == '100.0%'
    efficiency, positions = float(sd[-5]), float(sd[-4])        # of a token; gamma is 2
    assert 2 < positions * efficiency <= 3


@pytest.mark.parametrize('share, told', [('0.5', True), ('1', False)])
def test_compare_tells_that_channels_were_unpacked(share, told, pair, monkeypatch, capsys):
    """Sparse channels read single rows, so that dense passes of the run are slower too; of a CPU alone."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    flags = '--device', 'cpu', '--compare', 'sparse', '--set', f'ffn_share={share}', 'rho=1'
    status, out, _ = program(capsys, *pair, *flags)
    assert status == 0
    assert ('were unpacked' in out) == told


def test_compare_takes_three_rounds_in_turn(pair, capsys, monkeypatch):
    """Every method once, then all again; the first time only warms up."""
    real = specmini.Engine.write
    called = []

    def write(self, ids, method, row=0):
        called.append(type(method).__name__)
        return real(self, ids, method, row)

    monkeypatch.setattr(specmini.Engine, 'write', write)
    _, out, _ = program(capsys, *pair, '--compare', 'sd')
    assert called == ['Autoregressive', 'Exact'] * 4
    assert 'the median of 3 rounds' in out


def timed(tokens, *seconds):
    """What a method measured that wrote so many tokens in this time, round by round."""
    return specmini.Measured('x', None, [], [], dict(labels=dict(draft=tokens)), seconds)


def test_speedup_is_within_a_round():
    """The median, least and most of ratios; a machine half as fast in one round changes none of them."""
    plain = timed(10, 1.0, 2.0, 1.0)
    assert specmini.speedup(timed(10, 0.5, 1.0, 0.5), plain) == (2, 2, 2)
    assert specmini.speedup(timed(20, 4.0, 1.0, 1.0), plain) == (2, 0.5, 4)


def test_interrupted_round_is_not_timed():
    """Of two texts the second lacks its second round: the first round is what was timed."""
    texts = []
    for seconds in ([1.0, 5.0], [2.0]):
        trace = [cycle(0)]
        texts.append(specmini.Compared(dict(prompt='a'), [97], dict(ar=trace), dict(ar=seconds)))
    engine = specmini.Engine(EMBEDDED / 'target', 'none')
    engine.open([[97]])
    found = specmini.measure(engine, 'ar', verify.Autoregressive(), texts)
    assert found.seconds == [3.0]


def test_compare_marks_sparse_verifying_as_lossy(pair, capsys):
    _, out, _ = program(capsys, *pair, '--compare', 'sd', '--sparse', 'ffn', '--set', 'ffn_share=0.3')
    assert 'LOSSY' in out
    assert 'sd: sparse: only 1.' in out


def test_compare_says_that_sparse_leaves_nothing_out(pair, capsys):
    """--sparse ffn alone: no knob of the feed-forward leaves something out by default."""
    _, out, _ = program(capsys, *pair, '--compare', 'sd', '--sparse', 'ffn')
    assert 'LOSSY' not in out
    assert 'sd: sparse: its knobs leave nothing out' in out


@pytest.mark.parametrize('flags, said', [
    (('sparse',), '0, 1 choose blocks (by calibration.json)'),
    (('sparse', '--set', 'anchors=1'), '1 choose blocks (by calibration.json)'),
    (('sparse', '--set', 'anchors=0'), '0, 2 choose blocks (every second one)'),
    (('sd', '--sparse', 'attn'), '0, 1 choose blocks (by calibration.json)')])
def test_sparse_layers_that_choose_are_calibrated(flags, said, tmp_path, capsys):
    """By default half of the layers, by calibration.json, if it has them; else every second. It is said."""
    target = checkpoint(tmp_path / 'target', byte_network(0, num_hidden_layers=4), num_hidden_layers=4)
    draft = checkpoint(tmp_path / 'draft', byte_network(1))
    run = '--target', target, '--draft', draft, '--prompt', 'hello', '--max-new', 4, '--method', *flags
    if 'anchors=1' not in flags:                        # which asks for a calibration
        _, _, err = program(capsys, *run)
        assert 'sparse: of 4 layers 0, 2 choose blocks (every second one)' in err
    write_calibration(target, 'sparse', LEARNED | dict(anchors=[1, 0, 2, 3]))
    _, _, err = program(capsys, *run)
    assert f'sparse: of 4 layers {said}' in err


def test_sparse_calibration_of_other_weights_is_passed_over(tmp_path, capsys):
    """What was measured on another target chooses no layers: every second one does, and the run says so."""
    target = checkpoint(tmp_path / 'target', byte_network(0, num_hidden_layers=4), num_hidden_layers=4)
    write_calibration(target, 'sparse', LEARNED | dict(anchors=[1, 0, 2, 3]))
    checkpoint(target, byte_network(1, num_hidden_layers=4), num_hidden_layers=4)
    _, _, err = program(capsys, '--target', target, '--prompt', 'hello', '--max-new', 4, '--method', 'sparse')
    assert 'choose blocks (every second one)' in err


def check_said(pair, capsys, *flags):
    """What --check says on stderr, of 20 tokens."""
    _, _, err = program(capsys, *pair, '--ignore-eos', '--check', *flags)
    return err


def test_check_finds_lossless_text_equal(pair, capsys):
    assert 'check: equal to plain decoding for all 20 tokens.' in check_said(pair, capsys)


def test_check_finds_typical_equal_at_epsilon_0(pair, capsys):
    """p is one-hot at temperature 0, so a typical token is the likeliest one."""
    said = check_said(pair, capsys, '--method', 'typical', '--set', 'epsilon=0')
    assert 'check: equal' in said


def test_check_names_the_first_difference(pair, capsys, monkeypatch):
    def always(self, score, i):
        return 1.0

    monkeypatch.setattr(METHODS['typical'], 'chance', always)
    said = check_said(pair, capsys, '--method', 'typical')
    wanted = r'check: differs from plain decoding at token \d+: .+ instead of .+; logit gap \d'
    assert re.search(wanted, said)


# ---------------------------------------------------------- specmini.py: remarks, by hand

def cycle(drafted, *kept, added=1, chance=1.0, passes=()):
    """A Cycle: tokens drafted, the verdicts of those judged, tokens added behind the kept; took a second."""
    p = float(chance == 1.0)
    rows = [dict(token=0, kept=verdict, chance=chance, p=p, q=1.0) for verdict in kept]
    labels = ['draft'] * sum(kept) + ['target'] * added
    return verify.Cycle([0] * drafted, rows, [0] * len(labels), labels, dict(passes), 1.0)


def cmasd_remarks(*cycles):
    return specmini.remarks(METHODS['cmasd'](), None, cycles, [])


def test_cmasd_is_not_remarked_on_when_all_goes_well():
    assert cmasd_remarks() == []
    assert cmasd_remarks(cycle(4, True, True, True, True)) == []


def test_cmasd_remark_on_cycles_rolled_back():
    said, = cmasd_remarks(cycle(2, True, False))
    assert said.startswith('100% of the cycles were')


def test_cmasd_remark_on_tokens_kept_against_exactness():
    said, = cmasd_remarks(cycle(1, True, chance=0.9))
    assert said.startswith('90.0% of the judged tok')


def test_cmasd_remark_on_a_window_that_gains_nothing():
    """4.5 tokens drafted a cycle, half accepted: a fixed window would give (1 - 0.5^5.5) / 0.5 = 1.96."""
    said = cmasd_remarks(cycle(1, True, added=1), cycle(8, False))
    assert said == ['no gain over a fixed window: 1.96 tokens a cycle would be expected from gamma=4.5 at '
                    'this acceptance rate, 1.50 were seen']


# ---------------------------------------------------------- specmini.py: what pays, by hand

STEP = [verify.Cycle([], [], [0], ['target'], {'target/full': (1, 1, 0.9)}, 1.0)]   # of plain decoding: 1 s


def block(n, *kept, draft=0.25, target=1.0, beside=0.125):
    """A Cycle that drafted n tokens; seconds of a pass of either model, and beside each."""
    found = cycle(n, *kept, passes={'draft/full': (n, n, n * draft), 'target/full': (1, n + 1, target)})
    found.seconds = n * draft + target + (n + 1) * beside
    return found


def measured(*cycles, method=None, length=1000):
    """The Measured of sd, whose one text has these cycles and, it says, this length."""
    return specmini.Measured('sd', method or Exact(), [list(cycles)], [dict(tokens=[0] * length)])


def test_acceptance_by_place_is_of_those_that_were_reached():
    """Three blocks: one kept whole, one rejected at its second place, one at its first."""
    cycles = [cycle(2, True, True), cycle(2, True, False), cycle(2, False), cycle(0)]
    assert specmini.acceptance_by_place(cycles) == [[2, 3], [1, 2]]


def test_acceptance_by_place_of_several_tries_at_a_place():
    """sd-multi rejects a branch's first token, keeps the next one's; its second token fails."""
    assert specmini.acceptance_by_place([cycle(3, False, True, False)]) == [[1, 2], [0, 1]]


def test_steps_have_no_places():
    """All tokens of a step have its verdict: there is no acceptance by place."""
    step = cycle(3, False, False, False)
    for verdict in step.judged:
        verdict['score'] = 0.1
    assert specmini.acceptance_by_place([step]) == []


def test_chances_of_places_with_few_verdicts_are_pooled():
    """From 30 verdicts on a place has its own; fewer, or none, the share of the last 200 or more."""
    places = [[300, 300], [120, 150], [40, 40], [6, 10]]
    assert specmini.chances_of(places, 6) == [1, 0.8, 1] + [166 / 200] * 3
    assert specmini.chances_of([[36, 40], [0, 36]], 3) == [0.9, 0, 36 / 76]
    assert specmini.chances_of([[290, 300], [0, 290]], 3) == [29 / 30, 0, 0]


def test_expected_cycles_far_from_the_end():
    """1 + c0 + c0 c1 tokens a cycle."""
    cycles = specmini.expected(40_000, 2, [0.5, 0.25], [1, 1, 1])
    assert 40_000 / cycles[-1] == pytest.approx(1 + 0.5 + 0.125, rel=1e-4)


def test_expected_costs_by_enumeration():
    """Of a text of three tokens in blocks of two: every way through it, by its chance."""
    chances = {0: {1: 1.0}, 1: {1: 0.5, 2: 0.5}, 2: {1: 0.5, 2: 0.5 * 0.75, 3: 0.5 * 0.25}}
    costs = 10, 11, 13

    def walk(left):
        n = min(2, left)
        rest = 0.0
        for tokens, chance in chances[n].items():
            if tokens < left:
                rest += chance * walk(left - tokens)
        return costs[n] + rest
    found = specmini.expected(3, 2, [0.5, 0.25], [10, 11, 13])
    assert found == [0, walk(1), walk(2), walk(3)]


def test_costs_of_a_cycle():
    """Three draft passes of 0.25 s, 0.125 beside each pass; what was not timed is as the next longer one."""
    costs = specmini.costs_of([block(2, True), block(3, True)], {0: 1.0, 1: 3.0, 3: 2.0})
    assert costs == pytest.approx([1.125, 3.5, 2.875, 3.25])


def test_one_slow_pass_changes_no_cost():
    slow = block(2, True, target=50.0)
    assert specmini.costs_of([block(2, True)] * 2 + [slow], {0: 1.0})[0] == pytest.approx(1.125)
    assert specmini.pass_seconds([block(2, True)] * 2 + [slow])['target'] == 1.0


def test_forecast_by_hand():
    """Everything is kept: three tokens a cycle of 2 drafted for 1.9 s; of none drafted one for 1.1."""
    costs = [1.1, 1.5, 1.9]
    found = specmini.forecast([[40, 40], [40, 40]], costs, [300, 30], STEP, [0, 2])
    assert found == {0: pytest.approx((1, 1 / 1.1)), 2: pytest.approx((3, 3 / 1.9))}
    assert specmini.forecast([], costs, [300], STEP, [0, 2]) == {}


def test_forecast_of_few_tokens_stays_within_the_places_seen():
    costs = [1.0] * 4
    assert list(specmini.forecast([[20, 20], [9, 9]], costs, [30], STEP, [0, 1, 2, 3])) == [0, 1, 2]
    assert list(specmini.forecast([[20, 20], [9, 10]], costs, [30], STEP, [0, 1, 2, 3])) == [0, 1, 2, 3]


@pytest.mark.parametrize('method, passes, found', [
    case('sd', Exact(), {}, True),
    case('cmasd-fixed', METHODS['cmasd'](controller='fixed'), {}, True),
    case('a-window', METHODS['cmasd'](), {}, False),
    case('middle-stages', METHODS['via'](), {}, False),
    case('steps', SpecGuard(), {}, False),
    case('a-check-first', Exact(), {'target/full': (2, 5, 1.0)}, False),
    case('a-lag', Exact(), {'target/full': (1, 9, 1.0)}, False),
    case('a-sparse-pass', Exact(), {'target/full': (0, 0, 0), 'target/sparse': (1, 3, 1.0)}, False)])
def test_forecasts_are_of_blocks_alone(method, passes, found):
    """gamma tokens and one target pass over them: whoever decodes otherwise gets no advice on gamma."""
    one = block(2, True)
    one.passes |= passes
    assert specmini.drafts_blocks(method, [block(2, True), one]) == found


def test_a_target_that_drafts_for_itself_drafts_blocks():
    one = cycle(2, True, passes={'target/slim': (2, 2, 0.5), 'target/full': (1, 3, 1.0)})
    assert specmini.drafts_blocks(Exact(), [one])


def test_break_even_takes_the_forecast_of_its_gamma():
    one = measured(block(4, True))
    forecast = {4: specmini.Forecast(2.5, 1.25), 9: specmini.Forecast(5.0, 2.0)}
    said = specmini.break_even(one, STEP, forecast)
    assert 'a draft pass 0.25, a verifying pass 1.00, what is beside each 0.12;' in said
    assert said.endswith('gamma 4 gives 2.50 tokens a cycle, 1.25 times plain decoding predicted.')
    said = specmini.break_even(one, STEP, forecast, seen=0.75)
    assert said.endswith('predicted, 0.75 seen, not worth it here.')


def test_break_even_without_a_forecast():
    """Two tokens in 1.5 steps."""
    said = specmini.break_even(measured(block(1, True)), STEP, {})
    assert said.endswith('; 2.00 tokens a cycle in the time of 1.50, 1.33 times plain decoding.')
    said = specmini.break_even(measured(block(1, True)), STEP, {}, seen=0.8)
    assert said.endswith('in the time of 2.50, 0.80 times plain decoding, not worth it here.')


def test_break_even_of_nothing_drafted():
    assert 'nothing was drafted' in specmini.break_even(measured(cycle(0)), STEP, {})


def best_gamma(speeds, judged=40):
    """The advice where a block of n draft tokens has this speed; two places were judged, 39 of 40 kept."""
    cycles = [cycle(2, True, True)] * (judged - 1) + [cycle(2, True, False)]
    forecast = {n: specmini.Forecast(2.0, speed) for n, speed in speeds.items()}
    return specmini.best_gamma(measured(*cycles), forecast)


def test_best_gamma_by_hand():
    """The highest, or a shorter one within 2 % of it; what is assumed of places beyond those seen is said."""
    said = best_gamma({0: 1.0, 1: 1.2, 2: 1.5, 5: 1.4})
    assert said == 'best gamma by the same reckoning: 2, 1.50 times plain decoding predicted.'
    assert '2, 1.50 times' in best_gamma({0: 1.0, 2: 1.5, 5: 1.52})
    said = best_gamma({0: 1.0, 2: 1.5, 5: 1.6})
    assert '5, 1.60 times' in said
    assert said.endswith('; from place 3 on taken to be kept as the last 80 judged, 99%.')


def test_best_gamma_may_be_none():
    assert 'none, up to 5 drafting does not pay' in best_gamma({0: 1.0, 2: 0.9, 5: 0.8})
    assert 'none, up to 5 drafting does not pay' in best_gamma({0: 0.7, 2: 0.9, 5: 0.8})
    assert 'none' in best_gamma({0: 1.05, 2: 1.04, 5: 0.8})


def test_best_gamma_needs_verdicts():
    said = best_gamma({0: 1.0, 2: 1.5}, judged=10)
    assert said == 'best gamma: 20 judged draft tokens are too few to tell.'


def test_places_table_by_hand():
    """A column for each length that was timed; a cliff at the second place is seen."""
    one = measured(cycle(2, True, False))
    forecasts = dict(sd={0: specmini.Forecast(1, 0.9), 2: specmini.Forecast(2, 1.2)})
    head, times, shares, counts, speeds = specmini.places_table(
        [one], dict(full={0: 0.002, 1: 0.04, 2: 0.5}), forecasts)
    assert head.split()[3:] == ['0', '1', '2']
    assert times == 'full pass over n + 1, ms  2.00  40.0   500'
    assert shares.split() == ['sd:', 'kept', 'at', 'place', 'n', '100%', '0%']
    assert counts.split()[-3:] == ['judged', '1', '1'] and len(counts) == len(times)
    assert speeds == '  times ar at gamma n     0.90        1.20'
    assert list(specmini.places_table([measured(cycle(0))], dict(full={0: 0.002}), forecasts)) == []


class Passes:
    """A target's reader whose passes over n positions take n seconds each, the first time a hundred."""

    def __init__(self, compiled=None):
        self.log = []
        self.compiled = compiled

    def read(self, text, guesses, path, last):
        first = last not in self.log
        self.log.append(last)
        self.seconds = 100.0 if first else float(last)

    def spent(self, mark):
        return {'full': [1, 1, self.seconds]}


def timed_passes(limit, monkeypatch):
    """(the curve of four lengths, how often each was read) where the passes may take so many seconds."""
    reader = Passes()
    clock = itertools.count()
    monkeypatch.setattr(specmini, 'TIMING', limit)
    monkeypatch.setattr(specmini.time, 'perf_counter', lambda: float(next(clock)))
    session = SimpleNamespace(target=reader, tokens=LINE)
    curve = specmini.time_passes(session, SimpleNamespace(name='full'), [0, 1, 4, 7])
    assert reader.log[:4] == [1, 2, 5, 8]                       # in turn
    return curve, reader.log.count(5)


@pytest.mark.parametrize('limit, times', [(1.5, 2), (2.5, 3), (100.0, 10)])
def test_passes_are_timed_within_a_limit(limit, times, monkeypatch):
    """At most nine times behind one that warms up and is not counted."""
    curve, count = timed_passes(limit, monkeypatch)
    assert curve == {0: 1, 1: 2, 4: 5, 7: 8}
    assert count == times


def test_slow_passes_are_timed_once(monkeypatch):
    """Where the first round takes all the time that there is, it counts."""
    assert timed_passes(0.0, monkeypatch) == ({0: 100, 1: 100, 4: 100, 7: 100}, 1)


@pytest.mark.parametrize('longest, text, compiled, blocks', [
    case('beyond-the-longest', 6, 50, None, [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 16]),
    case('a-long-one', 20, 50, None, [*range(17), 20]),
    case('a-short-text', 6, 8, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    case('compiled', 6, 50, True, [0, 6])])
def test_lengths_that_are_timed(longest, text, compiled, blocks, monkeypatch):
    """All up to the longest block and some beyond, within the text; compiled only those that were seen."""
    monkeypatch.setattr(specmini, 'TIMING', 0.0)
    session = SimpleNamespace(target=Passes(compiled), tokens=[0] * text)
    session.target.model = SimpleNamespace(full=SimpleNamespace(name='full'))
    session.view = lambda path: path
    curves = specmini.time_paths(session, [measured(cycle(longest)), measured(cycle(3), method=SpecGuard())])
    assert sorted(curves['full']) == blocks


def test_plain_steps_write_the_last_tokens_anew():
    """Five of them, or all but one; whatever ended the text, and without leaving the session changed."""
    for length in (9, 3):
        s = session(network(0), network(1), LINE[:length], 0, eos=frozenset(range(11)))
        steps = specmini.plain_steps(s)
        assert len(steps) == min(5, length - 1)
        for step in steps:
            assert step.passes == {'target/full': [1, 1, step.passes['target/full'][2]]}
        assert s.tokens == LINE[:length]


def chance_remarks(*kept, has_draft=True):
    """The warning where every other token of the text is one that the draft always guesses."""
    cycles = []
    for i, verdict in enumerate(kept):
        one = cycle(1, verdict)
        one.tokens = [i % 2] * len(one.tokens)
        cycles.append(one)
    return specmini.chance_remarks(SimpleNamespace(has_draft=has_draft), cycles)


def test_acceptance_at_chance_is_warned_of():
    """Half of the places would match; 16 of 40 kept are not more than that, nor is none."""
    said, = chance_remarks(*[True, False, False, False, False] * 8)
    assert 'of 40 draft tokens 8 were kept' in said
    assert len(chance_remarks(*[False] * 40)) == 1


def test_acceptance_above_chance_is_not_warned_of():
    """Nor is one of few tokens, of most tokens, or of a lookup."""
    assert chance_remarks(*[False] * 29) == []
    assert chance_remarks(*[False] * 40, has_draft=False) == []
    assert chance_remarks(*[True, True, False] * 20) == []
    cycles = []
    for i in range(100):                                # 10 kept; by chance 1, at most 3
        one = cycle(1, i % 10 == 0)
        one.judged[0]['token'] = i
        one.tokens = [i]
        cycles.append(one)
    engine = SimpleNamespace(has_draft=True)
    assert specmini.chance_remarks(engine, cycles) == []
    for one in cycles[30:]:
        one.judged[0]['kept'] = False
    assert len(specmini.chance_remarks(engine, cycles)) == 1


def test_an_unrelated_draft_is_warned_of(pair, capsys):
    """A random target and a random draft, from end to end; not where the draft is the target itself."""
    _, target, *_ = pair
    _, _, err = program(capsys, *pair, '--max-new', 60, '--ignore-eos')
    assert 'warning: acceptance is at chance' in err
    _, _, err = program(capsys, *pair, '--max-new', 59, '--ignore-eos', '--draft', target)
    assert 'warning' not in err


def cut_said(*lengths, max_new=4, ends=()):
    """What is said of texts of these lengths behind 3 tokens, those in `ends` ended; the context is 9."""
    engine = SimpleNamespace(max_new=max_new, context=9, shortest='target', eos={1}, ignore_eos=False)
    reports = [dict(prompt_tokens=3, tokens=[0] * (n - 1) + [int(n in ends)]) for n in lengths]
    return list(specmini.cut_short(engine, reports))


def test_texts_cut_at_max_new_are_counted():
    assert cut_said(4, 4, 2, 4, 3) == ['3 of 5 texts (60%) were cut at --max-new 4']
    assert cut_said(4, 2, ends={4}) == []                    # it ended in time
    assert cut_said(6, 5, max_new=6)[0] == '1 of 2 texts (50%) were cut at --max-new 6'
    assert 'ended before --max-new 8' in cut_said(6, 5, max_new=8)[0]


def sparse_remarks(tokens=2, length=40, right=(True, None), **knobs):
    """How the remarks on sparse verifying begin; length: of each prompt, in tokens; right: the grades."""
    reports = [dict(prompt_tokens=length, tokens=[0], right=grade) for grade in right]
    sparse = METHODS['sparse'](dense_below=40, **knobs)
    cycles = [cycle(0, added=tokens)]
    found = specmini.remarks(Exact(), sparse, cycles, reports)
    as_method = specmini.remarks(sparse, sparse, cycles, reports)
    assert found == as_method                           # by either name, and only once
    for text in found:
        assert text.startswith('sparse: ')
    return [text[8:30] for text in found]


def test_sparse_is_not_remarked_on_when_all_goes_well():
    assert sparse_remarks() == []
    assert sparse_remarks(right=(True, False)) == []
    assert sparse_remarks(length=39, rho=1.0) == []
    assert specmini.remarks(Exact(), None, [], []) == []


def test_sparse_remarks_by_hand():
    assert sparse_remarks(tokens=1) == ['only 1.00 tokens a cyc']
    assert sparse_remarks(length=39) == ['2 texts stayed below d']
    assert sparse_remarks(right=(False, False, True)) == ['2 graded texts are wro']
    assert len(sparse_remarks(tokens=1, length=39, right=(False,))) == 3
    assert sparse_remarks(tokens=1, rho=1.0, moe_skip=0) == ['its knobs leave nothin']


# ---------------------------------------------------------- specmini.py: what middle stages cost

STAGES = {'target/slim1': (1, 4, 0.2), 'target/slim2': (1, 4, 0.3), 'target/slim3': (1, 4, 0.1)}


def stage_remarks(method, full_passes, decode_seconds=9.0, stages=STAGES):
    """The remarks where each cycle spends 0.6 s on stages and has so many full passes of 1 s."""
    cycles = []
    for n in full_passes:
        passes = {'draft/full': (4, 4, 0.1)} | stages
        if n:
            passes['target/full'] = (n, 9 * n, 1.0 * n)
        cycles.append(cycle(1, True, added=0, passes=passes))
    return specmini.stage_remarks(method, cycles, decode_seconds)


@pytest.mark.parametrize('full_passes, words', [
    ((0, 1, 0), '0.33 full passes besides. As published it pays where the sum is below 1; 0%'),
    ((0, 1, 0), 'here below 1.00: it paid.'),
    ((0, 2, 0), 'it did not pay.'),
    ((0, 1, 1), 'it did not pay.')],
    ids=['one pass in three', 'one in three pays', 'two in one cycle', 'two in two cycles'])
def test_via_stages_pay_below_so_many_full_passes(full_passes, words):
    said, = stage_remarks(METHODS['via'](), full_passes)
    assert words in said


@pytest.mark.parametrize('decode_seconds, words', [
    (0.7, 'spends 0.86 of a full'),
    (0.5, 'it did not pay.')], ids=['costs less', 'costs more'])
def test_via_stages_without_a_full_pass(decode_seconds, words):
    """A decoding pass stands for the full one; stages that cost more than it never pay."""
    said, = stage_remarks(METHODS['via'](), (0,), decode_seconds)
    assert words in said


def test_via_stages_without_their_bonus_pay_less_often():
    """Each cycle commits one token where sd would commit two: (1 + 0.1) / 2 - 0.1."""
    said, = stage_remarks(METHODS['via'](slim_bonus=False), (0, 1, 0))
    assert '100% of the cycles have no extra token, so here below 0.45: it did not pay.' in said
    assert specmini.stage_limit(0.2, 4, 0) == pytest.approx(1)


def test_via_stages_that_were_never_needed():
    said, = stage_remarks(METHODS['via'](), (1,), stages={})
    assert 'never needed' in said


def heard_cycle(p, heard=()):
    """A Cycle of two kept tokens, judged with this p, in which the target said `heard`."""
    rows = [dict(token=1, p=p, q=0.5, kept=True)] * 2
    return verify.Cycle([1, 1], rows, [1, 1], ['draft'] * 2, {}, 1.0, list(heard))


def test_audit_figures_by_hand():
    """Of four tokens three were heard of later, one of them wrong; a run says so, or that none was."""
    cycles = [heard_cycle(None), heard_cycle(None, [(1.0, -0.5), (0.0, -5.0), (1.0, -0.5)])]
    assert specmini.audit(cycles) == dict(audited=0.75, audited_wrong=1 / 3, audited_logp=-2)
    (line,) = specmini.audit_remarks(cycles)
    assert '75% of the tokens' in line and '33.3%' in line and '-2.00' in line
    (line,) = specmini.audit_remarks(cycles[:1])
    assert 'has read none' in line
    judged = [heard_cycle(0.5)]
    assert specmini.audit_remarks(judged) == []
    assert specmini.audit(judged) == dict(audited=0, audited_wrong=None, audited_logp=None)


def test_stages_are_remarked_on_for_via_alone():
    assert stage_remarks(Exact(), (1,), stages={}) == []
    assert stage_remarks(Exact(), (0, 1, 0)) == []


def test_break_even_tells_via_stages_apart():
    one = specmini.Measured('via', METHODS['via'](), [[cycle(1, True, passes=STAGES)]], [])
    assert 'a slim pass 0.20,' in specmini.break_even(one, [cycle(0)], {})


# ---------------------------------------------------------- specmini.py: prompts and grading

@pytest.fixture
def run_file(pair, capsys, tmp_path):
    """A function from the text of a file of prompts, and flags, to (status, lines of stdout, stderr)."""
    file = tmp_path / 'p.jsonl'

    def run(text, *flags):
        file.write_text(text)
        status, out, err = program(capsys, *pair[:4], '--max-new', 3, '--prompts', file, *flags)
        return status, out.splitlines(), err
    return run


def json_lines(rows):
    """The text of a file of these rows, an empty line between them."""
    return '\n\n'.join(json.dumps(row) for row in rows)


def rows_of_two_tasks():
    return [dict(question='a', task='x'), dict(turns=['b', 'c'], task='y'), dict(prompt='a', task='x')]


@pytest.fixture
def answered(run_file):
    """Rows of two tasks: the target writes the first one's answer, not the second's; the third has none."""
    rows = rows_of_two_tasks()
    _, lines, _ = run_file(json_lines(rows), '--json')
    texts = [json.loads(line)['text'] for line in lines]
    rows[0]['answer'] = texts[0]
    rows[1]['answer'] = texts[1] + 'no'
    return json_lines(rows)


def test_prompts_are_asked_for(pair, capsys, tmp_path):
    refused(capsys, 'give --prompt', *pair[:4])
    refused(capsys, 'p.jsonl: cannot be read', *pair[:4], '--prompts', tmp_path / 'p.jsonl')


def test_rows_have_prompt_question_or_turns(run_file):
    """Of turns the first is used; a row without an answer gets no verdict."""
    _, lines, _ = run_file(json_lines(rows_of_two_tasks()), '--json')
    assert len(lines) == 3
    for line in lines:
        report = json.loads(line)
        assert report['prompt_tokens'] == 1
        assert 'right' not in report


def test_prompt_goes_before_question_and_turns(run_file):
    row = dict(turns=['ccc'], question='bb', prompt='a')
    _, lines, _ = run_file(json_lines([row]), '--json')
    assert json.loads(lines[0])['prompt_tokens'] == 1
    del row['prompt']
    _, lines, _ = run_file(json_lines([row]), '--json')
    assert json.loads(lines[0])['prompt_tokens'] == 2


def test_rows_are_graded_one_by_one(run_file, answered):
    status, lines, err = run_file(answered, '--json')
    grades = [json.loads(line).get('right') for line in lines]
    assert status == 0
    assert grades == [True, False, None]
    assert 'right: 1 of 2 graded texts (50.0%)' in err


def test_compare_has_a_table_for_each_task(run_file, answered):
    status, lines, _ = run_file(answered, '--compare', 'sd')
    assert status == 0
    titles = [line for line in lines if line.endswith(' prompts')]
    assert titles == ['x, 2 prompts', 'y, 1 prompts']
    right = [line.split()[5] for line in lines if line.startswith(('ar ', 'sd '))]
    assert right == ['100.0%', '100.0%', '0.0%', '0.0%']


def test_interrupted_compare_tables_what_all_have_finished(run_file, answered, monkeypatch):
    """Ctrl-C in the sixth text: sd's of the second row, as both methods have written one to warm up."""
    interrupt(monkeypatch, specmini.Engine, 'write', 6)
    status, lines, _ = run_file(answered, '--compare', 'sd')
    assert status == 130
    starts = [line.split()[0] for line in lines]
    assert starts[:5] == ['x,', 'method', 'ar', 'sd', 'x']
    assert 'sd:' in starts and 'y,' not in starts


BAD_FILES = {           # what is wrong: the file's text, the words of the refusal
    'no row': ('', 'no rows'),
    'no JSON': ('nonsense', 'line 1: not a JSON'),
    'no object': ('[1]', 'line 1: expected'),
    'no prompt in line 2': ('{"prompt": "a"}\n{"x": 1}', 'line 2: expected'),
    'no turn': ('{"turns": []}', 'line 1: expected'),
    'an empty prompt': ('{"prompt": ""}', 'prompt 1 is empty')}


def test_a_file_of_prompts_that_never_ends(pair, capsys, monkeypatch):
    monkeypatch.setattr(specmini, 'MOST_TEXT', 1000)
    refused(capsys, 'more than 1000 characters', *pair[:4], '--prompts', '/dev/zero')


@pytest.mark.parametrize('name', ['stdout', 'stderr'])
def test_a_closed_standard_stream_is_no_defect(name, pair, capsys, monkeypatch):
    """And what belongs on one stream does not go to the other."""
    monkeypatch.setattr(sys, name, None)
    assert specmini.main([*map(str, pair[:4]), '--prompt', 'a', '--max-new', '2']) == 0
    getattr(sys, name).close()
    assert 'tokens/s' not in capsys.readouterr().out


def test_a_tokenizer_that_names_ids_beyond_the_embedding(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    tokenizer = bytes_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 999)])
    tokenizer.save(str(folder / 'tokenizer.json'))
    refused(capsys, 'prompt 1 has token 999, but the last one is 256', '--target', folder, '--prompt', 'x')


def test_a_tokenizer_that_fails_at_run_time(tmp_path, capsys):
    """Its model has no token for what it does not know: the library raises a bare Exception."""
    folder = checkpoint(tmp_path)
    words = {f'w{i}': i for i in range(257)}
    Tokenizer(models.WordLevel(words, unk_token='absent')).save(str(folder / 'tokenizer.json'))
    refused(capsys, 'the tokenizer cannot encode a text of 1 characters', '--target', folder, '--prompt', 'x')


def replaced(pattern, content):
    return dict(type='Replace', pattern=pattern, content=content)


SLOW = dict(type='Split', pattern=dict(Regex='a*a*$'), behavior='Isolated', invert=False)
PANICKING = dict(type='Split', pattern=dict(Regex='(a|a)*$'), behavior='Isolated', invert=False)
TORN = dict(type='BPE', vocab=dict(a=0, b=1, ab=2), merges=['a b'], continuing_subword_prefix='###')
GROWING = dict(type='Sequence', normalizers=[replaced(dict(String='a'), 'a' * 100)] * 9)


@pytest.mark.parametrize('changes, words', [
    case('slow', dict(pre_tokenizer=SLOW), 'no end after 0.4 s'),
    case('panicking', dict(pre_tokenizer=PANICKING), 'retry-limit-in-match'),
    case('growing', dict(normalizer=GROWING), 'its process died'),
    case('panicking-at-once', dict(model=TORN), 'no such file, or not a tokenizer'),
    case('padded', dict(decoder=replaced(dict(Regex='.'), 'a')), "its decoder replaces {'Regex': '.'}"),
    case('longer', dict(decoder=replaced(dict(String='a'), 'aa')), "its decoder replaces {'String': 'a'}")])
def test_a_tokenizer_has_limits(changes, words, tmp_path, capfd, monkeypatch):
    """It is foreign code: some time, some memory, and no words of its own on stderr."""
    text = 'a' * 40 + 'b'
    if 'no end' in words:
        monkeypatch.setattr('model.FOREIGN_SECONDS', 0.3)
        text = 'a' * 2000 + 'b'                         # each place takes less than Onig's own limit
    monkeypatch.setattr('model.FOREIGN_BYTES', 2 ** 24)
    folder = checkpoint(tmp_path)
    change_tokenizer(folder, **changes)
    faulthandler.disable()                              # pytest's would print how the fork died
    try:
        refused(capfd, words, '--target', folder, '--prompt', text)
    finally:
        faulthandler.enable(sys.__stderr__)


def change_tokenizer(folder, **changes):
    file = folder / 'tokenizer.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def told_by_a_fork(work, daemon=False):
    """What work() returns in a fork of this process; None where it fails or has not ended in 20 s."""
    fork = multiprocessing.get_context('fork')
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(work()), daemon=daemon)
    process.start()
    sender.close()
    with contextlib.suppress(EOFError):
        if receiver.poll(20):
            found = receiver.recv()
            process.join()
            return found
    process.kill()
    return None


def test_limited_in_a_process_that_may_not_fork():
    """A worker of a multiprocessing.Pool is a daemon."""
    assert told_by_a_fork(lambda: limited(lambda: 7), daemon=True) == (7, '')


def test_limited_below_a_limit_of_memory(monkeypatch):
    """What ulimit -v has set is not raised; what goes wrong there is told like the rest."""
    def below():
        limit_memory(2 ** 26)
        return limited(lambda: 7)
    assert told_by_a_fork(below) == (7, '')

    def fails(more):
        raise OSError('no limits')
    monkeypatch.setattr('model.limit_memory', fails)
    assert limited(lambda: 7) == (None, 'OSError: no limits')


@pytest.mark.parametrize('forks', [True, False])
def test_limited_and_ctrl_c(forks, monkeypatch):
    """It goes to the process that waits, and leaves no fork behind."""
    def stop(*args):
        raise KeyboardInterrupt
    if forks:
        assert limited(lambda: os.kill(os.getpid(), signal.SIGINT) or 7) == (7, '')
        monkeypatch.setattr(multiprocessing.connection.Connection, 'poll', stop)
    else:
        monkeypatch.setattr(multiprocessing, 'get_all_start_methods', list)
    with pytest.raises(KeyboardInterrupt):
        limited(lambda: time.sleep(9) if forks else stop())
    assert not multiprocessing.active_children()


def test_an_engine_reads_the_tokenizer_of_its_own_target(pair, tmp_path):
    """A copy with another target has that one's."""
    engine = specmini.Engine(pair[1], 'none', read_before=read_tokenizer(File(pair[1])))
    other = checkpoint(tmp_path)
    change_tokenizer(other, added_tokens=[])
    copy = replace(engine, target=other)
    assert copy.tokenizer.to_str() == read_tokenizer(other).to_str() != engine.tokenizer.to_str()


@pytest.mark.parametrize('parted, threads', [(True, 3), (False, 1)])
def test_small_targets_take_one_thread_in_each_process(parted, threads, monkeypatch):
    """Of a parted one all parts count."""
    taken = []
    monkeypatch.setattr(torch, 'set_num_threads', taken.append)
    monkeypatch.setattr(specmini, 'ranks', lambda: (0, 2))
    monkeypatch.setattr(specmini, 'CORES', 6)
    model = byte_network(0)
    monkeypatch.setattr(specmini, 'SMALL', 1 + sum(p.numel() for p in model.parameters()))
    specmini.take_threads(model, parted=parted)
    assert taken == [threads]


def test_rows_are_dealt_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'fcntl', None)     # as on Windows
    assert specmini.deal(tmp_path / 'name', 'run', 'ab', str.upper) == ['A', 'B']


def test_a_tokenizer_draws_nothing(tmp_path):
    """Merges left out by chance are for training: a text has one list of ids."""
    folder = checkpoint(tmp_path)
    words = {letter: i for i, letter in enumerate('ab')} | dict(ab=2)
    merging = dict(type='BPE', dropout=0.5, vocab=words, merges=['a b'])
    change_tokenizer(folder, model=merging, added_tokens=[])
    found = encode(read_tokenizer(folder), ['ab'] * 20)
    assert found == [[2]] * 20


def test_a_run_encodes_before_it_loads_weights(pair, monkeypatch, capsys):
    """A fork takes the longer the more memory is held: 40 ms a GB."""
    interrupt(monkeypatch, specmini, 'encode', 1)
    loaded = interrupt(monkeypatch, specmini, 'load', 1)
    status, _, _ = program(capsys, *pair)
    assert status == 130
    assert loaded == []


@pytest.mark.parametrize('text, words', BAD_FILES.values(), ids=list(BAD_FILES))
def test_bad_prompt_files(text, words, pair, capsys, tmp_path):
    file = tmp_path / 'p.jsonl'
    file.write_text(text)
    refused(capsys, words, *pair[:4], '--prompts', file)


# ---------------------------------------------------------- specmini.py: chat templates

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}!{% endif %}")


@pytest.fixture
def talker(tmp_path):
    """The folder of a checkpoint without a chat template."""
    return checkpoint(tmp_path)


def talk(folder, *flags):
    """The flags of a run of two tokens on this checkpoint, with `hi` for a prompt."""
    return '--target', folder, '--draft', 'none', '--prompt', 'hi', '--max-new', 2, *flags


def write_settings(folder, name, **settings):
    (folder / f'{name}.json').write_text(json.dumps(settings))


def begin_with_a_special_token(folder):
    """Writes a tokenizer that puts <eos> before every text."""
    tokenizer = bytes_tokenizer()
    post = processors.TemplateProcessing(single='<eos> $A', special_tokens=[('<eos>', 256)])
    tokenizer.post_processor = post
    tokenizer.save(str(folder / 'tokenizer.json'))


LOOP = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'


@pytest.mark.parametrize('template, words', [
    (LOOP, 'no end after 0.3 s'), ("{{ 'a' * 10 ** 10 }}", 'MemoryError')])
def test_chat_templates_have_limits(template, words, talker, capsys, monkeypatch):
    """A template is foreign code: it gets a process of its own, some time and some memory."""
    monkeypatch.setattr('model.FOREIGN_SECONDS', 0.3)
    write_settings(talker, 'tokenizer_config', chat_template=template)
    refused(capsys, words, *talk(talker, '--chat'))


def test_chat_needs_a_template(talker, capsys):
    refused(capsys, 'has no chat_template.jinja', *talk(talker, '--chat'))


def test_chat_takes_the_template_of_the_settings(talker, capsys):
    write_settings(talker, 'tokenizer_config', chat_template=TEMPLATE, bos_token=dict(content='^'))
    report = reported(capsys, *talk(talker, '--chat'))
    assert report['prompt_tokens'] == len('^user:hi!')


def test_chat_takes_the_template_of_its_own_file(talker, capsys):
    """Before the one in the settings, if there are both."""
    write_settings(talker, 'tokenizer_config', chat_template=TEMPLATE)
    (talker / 'chat_template.jinja').write_text("<{{ messages[0]['content'] }}>")
    report = reported(capsys, *talk(talker, '--chat'))
    assert report['prompt_tokens'] == len('<hi>')


def test_chat_does_not_add_special_tokens_twice(talker, capsys):
    """A bare prompt gets the tokenizer's; a template writes its own."""
    begin_with_a_special_token(talker)
    write_settings(talker, 'tokenizer_config', chat_template=TEMPLATE, bos_token=dict(content='^'))
    chat = reported(capsys, *talk(talker, '--chat'))
    bare = reported(capsys, *talk(talker))
    assert chat['prompt_tokens'] == len('^user:hi!')
    assert bare['prompt_tokens'] == len('^hi')


def test_generation_config_ends_a_text(talker, capsys):
    """Its end tokens are added to those of config.json."""
    first, _ = reported(capsys, *talk(talker))['tokens']
    write_settings(talker, 'generation_config', eos_token_id=[1, first])
    ended = reported(capsys, *talk(talker))
    assert ended['tokens'] == [first]
    assert ended['finish'] == 'eos'
    _, _, ends = load(talker)
    assert ends == {1, first, 256}


def test_chat_takes_the_default_of_several_templates(talker, capsys):
    several = [dict(name='other', template='{{ 12 }}'), dict(name='default', template='{{ 1 }}')]
    write_settings(talker, 'tokenizer_config', chat_template=several)
    report = reported(capsys, *talk(talker, '--chat'))
    assert report['prompt_tokens'] == len('1')


def test_chat_refuses_a_list_without_templates(talker, capsys):
    write_settings(talker, 'tokenizer_config', chat_template=['x'])
    refused(capsys, 'has no chat_template', *talk(talker, '--chat'))


BAD_TEMPLATES = dict(raises="{{ raise_exception('no') }}", leaves_the_sandbox="{{ ''.__class__.__mro__ }}",
                     does_not_parse='{% for %}', divides_by_zero='{{ 1 / 0 }}')


@pytest.mark.parametrize('template', BAD_TEMPLATES.values(), ids=list(BAD_TEMPLATES))
def test_chat_refuses_a_template_that(template, talker, capsys):
    (talker / 'chat_template.jinja').write_text(template)
    refused(capsys, '--chat: the template of', *talk(talker, '--chat'))


# ---------------------------------------------------------- specmini.py: flags that do not fit

BAD_FLAGS = {
    '--nonsense': '--nonsense', '--threads 0': '--threads 0', '--max-new 0': '--max-new 0',
    '--top-p 0': '--top-p 0', '--top-k -2': '--top-k -2', '--temperature -1': '--temperature -1',
    '--temperature nan': '--temperature nan', '--seed -1': '--seed -1',
    '--prompts y': 'give --prompt', '--prompt': 'expected one argument', '--max-new many': '--max-new',
    '--prompt=': 'prompt 1 is empty', '--prompt \udcff': 'prompt 1 is not valid UTF-8',
    '--target nowhere': 'nowhere/config.json: no',
    '--trace no/such/folder': '--trace no/such/folder: there is no folder no/such',
    '--device tpu': '--device', '--compare sd --json': '--compare takes none',
    '--compare sd --trace x.jsonl': '--trace only of a page',
    '--method magic': "['magic'] is unknown; there are ar", '--compare sd,magic': "['magic']",
    '--check --temperature 1': 'texts agree only', '--gamma -1': 'knob gamma is -1',
    '--set nothing': 'sd: gamma=4, draft_temp', '--set lenience=1': 'sd: gamma=4',
    '--method ar --set lenience=1': '(ar: none)', '--set gamma=four': "'four' is not a value",
    '--set controller=oracle --temperature 1': 'knob controller is', '--set anchors=1': 'with a knob of',
    '--method cmasd --draft lookup': 'give --draft D', '--method ecsv --draft lookup': 'give --draft D',
    '--method majority --draft lookup': 'need a draft', '--method via-mid': 'give --mid DIR',
    '--method ecsv-two': 'knob second', '--method ecsv --set depth=9999': 'a block of 9999',
    '--method specguard --set preset=paper regenerate=sd': 'target_k is 16; expected 1 (regenerate=sd)',
    '--method specguard --set delimiter=': 'delimiter is empty', '--sparse x': 'expected some of',
    '--method specguard --set target_temperature=-1': 'knob target_temperature is -1',
    '--split x': 'one text cannot be split',
    '--sparse moe': 'no layer of that kind', '--sparse ffn --set rho=2': 'knob rho',
    f'--target {EMBEDDED}/draft --sparse attn --set anchors=1': 'no section',
    '--target= --draft= --mid= --method= --sparse= --trace= --compare=':
        '--target, --draft, --mid, --method, --sparse, --trace, --compare: found an empty text'}
BAD_KNOBS = [
    ('sd', 'gamma=-1'), ('sd', 'controller=magic'), ('lenient', 'lenience=0'), ('typical', 'epsilon=nan'),
    ('cmasd', 'alpha=-1'), ('cmasd', 'k_min=20'), ('ecsv', 'branches=65'), ('ecsv-spot', 'budget=1'),
    ('via', 'keep=0.2'), ('specguard', 'k=0'), ('specguard', 'tau=nan'), ('specguard', 'preset=best'),
    ('sparse', 'rho=2'), ('sparse', 'block=0'), ('sparse', 'select=best')]


def without_folder(flags):
    return flags.replace(str(EMBEDDED), 'lab/models')


@pytest.mark.parametrize('flags', BAD_FLAGS, ids=without_folder)
def test_bad_flags(flags, capsys):
    refused(capsys, BAD_FLAGS[flags], '--prompt', 'x', *flags.split())


@pytest.mark.parametrize('method, knob', BAD_KNOBS)
def test_bad_knobs(method, knob, capsys):
    """A value out of range is named as it was found: knob gamma is -1."""
    name, value = knob.split('=')
    refused(capsys, f'knob {name} is {value}', '--prompt', 'x', '--method', method, '--set', knob)


def test_each_text_pays_for_its_prompt():
    """A prompt that was read for an earlier text is read again: its seconds are not those of a cache."""
    engine = specmini.Engine(EMBEDDED / 'target', EMBEDDED / 'draft')
    ids = engine.tokenizer.encode('One evening Mia the fox').ids
    engine.open([ids])
    for _ in range(2):
        for reader in engine.readers.values():
            reader.log.clear()                          # so that what is found was read for this text
        session = engine.start(ids, Exact())
        for reader in session.readers().values():
            [(passes, positions, _)] = reader.spent().values()
            assert (passes, positions) == (1, len(ids) - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
@pytest.mark.slow
def test_two_processes_that_share_a_target_write_its_text(capsys):
    """Started by torchrun, each with half of the heads and channels; the first one tells."""
    flags = ['--method', 'via', '--sparse', 'attn,ffn', '--temperature', '1', '--max-new', '24', '--json',
             '--prompt', 'A story about a fox.']
    _, alone, _ = program(capsys, *flags)
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', 'specmini.py']
    found = subprocess.run([*torchrun, *flags], capture_output=True, text=True,
                           timeout=100, cwd=specmini.HERE, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert found.returncode == 0, found.stderr
    (line,) = found.stdout.splitlines()
    assert json.loads(line)['text'] == json.loads(alone)['text']


# ---------------------------------------------------------- specmini.py: rows dealt to several processes

def member(rank, settings, folder, function):
    """Runs the function as one process of a group, its output kept in files of the folder."""
    os.environ.update(settings, RANK=str(rank))
    sys.stdout = sys.__stdout__ = open(folder / f'out{rank}', 'w', buffering=1)
    sys.stderr = sys.__stderr__ = open(folder / f'err{rank}', 'w', buffering=1)
    sys.exit(function(rank))


def together(folder, function, count=2):
    """[(exit status, stdout, stderr)] of function(rank) in forks of this process that are a group.

    As torchrun starts them, but for its seconds and for its ending all where one has died.
    """
    with socket.socket() as free:
        free.bind(('localhost', 0))
        port = free.getsockname()[1]
    settings = dict(TORCHELASTIC_RUN_ID='test', WORLD_SIZE=str(count), MASTER_ADDR='localhost',
                    MASTER_PORT=str(port))
    fork = multiprocessing.get_context('fork')
    processes = []
    for rank in range(count):
        processes.append(fork.Process(target=member, args=(rank, settings, folder, function)))
        processes[-1].start()
    found = []
    for rank, process in enumerate(processes):
        process.join(30)
        process.kill()                                  # where it hangs
        process.join()
        texts = [(folder / f'{name}{rank}').read_text() for name in ('out', 'err')]
        found.append((process.exitcode, *texts))
    return found


def split_flags(pair, folder, *flags):
    """Flags of a run over six rows, two of them equal, that four processes or one can do."""
    file = folder / 'rows.jsonl'
    rows = [dict(prompt=text, answer='1') for text in ('hello', 'x 1', 'hello', 'y', 'z 1 2', 'abc')]
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return [*map(str, pair[:4]), '--prompts', str(file), '--max-new', '12', '--temperature', '1',
            '--ignore-eos', '--json', *map(str, flags)]


def without_times(lines):
    """The JSON objects of these lines without what a clock said."""
    found = [json.loads(line) for line in lines.splitlines()]
    for one in found:
        for key in ('seconds', 'prompt_seconds', 'tokens_per_second'):
            one.get('stats', {}).pop(key, None)
        one.pop('ms', None)
        for path in one.get('passes', {}).values():
            path.pop('ms')
    return found


def ending(err):
    """The lines on all texts of a run, of which none hangs on its times."""
    return [line for line in err.splitlines() if 'texts' in line or 'kept at' in line]


def test_rows_dealt_to_processes_are_those_of_one(pair, capsys, tmp_path):
    """Texts, figures, trace and the lines at the end, in the same order; nothing is kept behind them."""
    sparse = '--sparse', 'ffn', '--set', 'ffn_share=0.5', 'gamma=2'         # no part of a target can do this
    flags = split_flags(pair, tmp_path, *sparse, '--trace')
    status, out, err = program(capsys, *flags, tmp_path / 'trace')
    assert status == 0 and 'graded texts' in err
    whole = without_times(out)
    split = [*flags, str(tmp_path / 'parts'), '--split', str(tmp_path / 'name')]
    (first, told, said), (second, *silence) = together(tmp_path, lambda rank: specmini.main(split))
    assert (first, second, silence) == (0, 0, ['', ''])
    assert without_times(told) == whole and ending(said) == ending(err)
    traces = [without_times((tmp_path / name).read_text()) for name in ('trace', 'parts')]
    assert traces[0] == traces[1]
    assert not list(tmp_path.glob('name*'))


KILLED = """
import os, signal, sys, specmini
wrote = specmini.report

def report(engine, name, method, session, row, cycles):
    if row['prompt'] == 'y':
        os.kill(os.getpid(), signal.SIGKILL)
    return wrote(engine, name, method, session, row, cycles)
specmini.report = report
sys.exit(specmini.main())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
@pytest.mark.slow
def test_torchrun_ends_where_a_process_is_killed_and_another_goes_on(pair, capsys, tmp_path):
    """The second of two dies at its second row; one process can do what two began. Nothing is told twice."""
    flags = [*split_flags(pair, tmp_path), '--split', str(tmp_path / 'name')]
    (tmp_path / 'killed.py').write_text(KILLED)
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2']
    found = subprocess.run([*torchrun, tmp_path / 'killed.py', *flags], capture_output=True, text=True,
                           timeout=100, env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(HERE)))
    assert found.returncode == 1 and not found.stdout
    assert re.search(r'exitcode *: -9', found.stderr)
    status, out, err = program(capsys, *flags)
    assert status == 0 and re.search(r'name.part\*: [1-4] of 6 rows are there', err)
    assert without_times(out) == without_times(program(capsys, *flags)[1])


@pytest.mark.slow
def test_a_killed_process_ends_its_group_and_the_next_goes_on(pair, capsys, tmp_path):
    """Where no torchrun ends it, too: the other one says why. The rows that it had are not written again."""
    flags = split_flags(pair, tmp_path)
    split = [*flags, '--split', str(tmp_path / 'name')]
    wrote = specmini.report
    asked = tmp_path / 'asked'

    def run(rank, kill):
        def report(engine, name, method, session, row, cycles):
            if kill and row['prompt'] == 'y':           # of the second process, its second row
                os.kill(os.getpid(), signal.SIGKILL)
            with open(asked, 'a') as file:
                file.write(f'{session.generator.initial_seed()}\n')
            return wrote(engine, name, method, session, row, cycles)
        specmini.report = report
        return specmini.main(split)
    (first, told, said), (second, *_) = together(tmp_path, lambda rank: run(rank, True))
    assert (first, told, second) == (2, '', -signal.SIGKILL)
    assert said == 'specmini: another process has ended; the same command goes on\n'
    assert sorted(asked.read_text().split()) == ['0', '1', '2', '4']
    (first, told, said), (second, *_) = together(tmp_path, lambda rank: run(rank, False))
    assert (first, second) == (0, 0) and 'name.part*: 4 of 6 rows are there' in said
    assert sorted(asked.read_text().split()) == ['0', '1', '2', '3', '4', '5']
    assert without_times(told) == without_times(program(capsys, *flags)[1])


@pytest.mark.slow
def test_processes_that_share_a_target_end_where_one_is_killed(pair, tmp_path):
    """No torchrun is needed for that: the other one's sum has nobody to add to."""
    flags = split_flags(pair, tmp_path)
    wrote = specmini.report

    def run(rank):
        def report(engine, name, method, session, row, cycles):
            if rank == 1 and row['prompt'] == 'y':
                os.kill(os.getpid(), signal.SIGKILL)
            return wrote(engine, name, method, session, row, cycles)
        specmini.report = report
        return specmini.main(flags)
    (first, told, said), (second, *_) = together(tmp_path, run)
    assert (first, second) == (2, -signal.SIGKILL)
    assert 3 <= told.count('\n') <= 4 and said.startswith('specmini: ') and said.count('\n') == 1


@pytest.mark.parametrize('error, status, words', [
    (ValueError('bad input'), 2, 'specmini: bad input\n'), (KeyError('x'), 1, "KeyError: 'x'\n")])
def test_what_fails_in_one_process_is_told(error, status, words, pair, tmp_path):
    """Bad input as its own line, a defect as one; the group has an end in both processes."""
    flags = split_flags(pair, tmp_path, '--split', tmp_path / 'name')

    def report(*args):
        raise error

    def run(rank):
        if rank == 1:
            specmini.report = report
        try:
            return specmini.main(flags)
        finally:
            print(specmini.distributed.is_initialized(), file=sys.__stdout__)
    (first, told, said), (second, also, fault) = together(tmp_path, run)
    assert first == 2 and 'another process has ended' in said
    assert second == status and fault.endswith(words)
    assert told == also == 'False\n'


def test_items_are_dealt_evenly_and_once(tmp_path):
    """What is left of seven after two is dealt anew, told in the items' order; resume=False begins anew."""
    name = tmp_path / 'name'

    def row_of(item):
        return [item, os.environ.get('RANK')]

    def run(rank):
        specmini.join_ranks('cpu', 'gloo')
        rows = specmini.deal(name, 'run', 'abcdefg', row_of)
        again = specmini.deal(name, 'other', 'abc', row_of, resume=False)
        print(json.dumps([rows, again]))
        specmini.leave_ranks()
    with pytest.raises(KeyError):
        specmini.deal(name, 'run', 'abcdefg', lambda item: dict(a=['a', None], b=['b', None])[item])
    (status, told, _), (second, silent, _) = together(tmp_path, run)
    assert (status, second, silent) == (0, 0, '')
    rows, again = json.loads(told)
    assert rows == [['a', None], ['b', None], *([item, '01'[i % 2]] for i, item in enumerate('cdefg'))]
    assert again == [['a', '0'], ['b', '1'], ['c', '0']]


def test_kept_rows_that_are_no_rows(tmp_path):
    """Half a line is written anew; another run's are not mixed with ours, and no foreign file is touched."""
    name = tmp_path / 'name'
    part = tmp_path / 'name.part0'
    assert specmini.deal(name, 'run', 'ab', str.upper) == ['A', 'B']
    whole = part.read_text()
    asked = []

    def row_of(item):
        asked.append(item)
        return item.upper()
    for cut in range(1, len('["0123456789abcdef", 1, "B"]\n')):
        part.write_text(whole[:-cut])
        assert specmini.deal(name, 'run', 'ab', row_of) == ['A', 'B']
    assert asked == ['b'] * (cut - 1)                   # without its last sign, the end of line, it is whole
    foreign = b'PK\x03\xff of somebody else'
    for content in (part.read_bytes(), foreign):
        part.write_bytes(content)
        with pytest.raises(ValueError, match='name.part0 is not of this run'):
            specmini.deal(name, 'another run', 'ab', str.upper)
        assert part.read_bytes() == content
    (tmp_path / 'name.partial').write_text('mine')
    specmini.drop_kept(name)
    assert [file.name for file in tmp_path.iterdir()] == ['name.partial']


def test_rows_hang_on_what_the_run_is(pair, capsys, tmp_path, monkeypatch):
    """Interrupted, then with another seed, method, prompt or setting: refused, and nothing is written."""
    split = '--split', str(tmp_path / 'name')
    flags = split_flags(pair, tmp_path, *split)
    rows = tmp_path / 'rows.jsonl'
    calls = interrupt(monkeypatch, specmini, 'report', 3)
    status, out, err = program(capsys, *flags)
    assert (status, out, err, len(calls)) == (130, '', 'interrupted: the same command goes on\n', 3)
    for more in (['--seed', 1], ['--method', 'lenient'], ['--gamma', 3], ['--top-p', 0.9],
                 ['--draft', 'none'], ['--trace', tmp_path / 'trace']):
        refused(capsys, 'name.part0 is not of this run', *flags, *more)
    kept = rows.read_text()
    rows.write_text(kept.replace('abc', 'abd'))
    refused(capsys, 'name.part0 is not of this run', *flags)
    rows.write_text(kept)
    assert program(capsys, *flags)[0] == 0


@pytest.mark.parametrize('words, flags', [
    case('page', 'a page is of one process', ['--split', 'y', '--trace', 'z.html']),
    case('no-home', '--split nodir/n: there is no folder nodir', ['--split', 'nodir/n']),
    case('trace-no-home', '--trace nodir/t.jsonl: there is no folder nodir', ['--trace', 'nodir/t.jsonl']),
    case('folder', '--split y/: a folder; expected the name', ['--split', 'y/'])])
def test_split_and_trace_are_refused_before_anything_is_read(words, flags, capsys):
    refused(capsys, words, '--prompts', 'x', *flags)


def test_check_with_split(pair, capsys, tmp_path):
    flags = split_flags(pair, tmp_path, '--split', tmp_path / 'name', '--temperature', 0, '--check')
    status, _, err = program(capsys, *flags)
    assert status == 0 and err.count('check: equal to plain decoding for all 12 tokens.\n') == 6


class SafeSlice:
    """A tensor as safetensors opens it: its shape can be asked for, and its parts."""

    def __init__(self, whole):
        self.whole = whole

    def get_shape(self):
        return list(self.whole.shape)

    def __getitem__(self, part):
        return self.whole[part]


def test_parts_of_a_network_add_up():
    """Of each cut weight the parts side by side; a bias of what is summed is in the first part alone."""
    config = network().config
    with pytest.raises(ValueError, match='3 processes cannot share'):
        part_of(config, 3)
    for name, shape in (('q_proj.weight', (4, 6)), ('down_proj.weight', (4, 6)), ('k_proj.bias', (4,)),
                        ('o_proj.bias', (4,)), ('input_layernorm.weight', (4,))):
        whole = torch.rand(shape)
        held = SafeSlice(whole)
        parts = [own_part(held, f'layers.0.{name}', rank, 2) for rank in range(2)]
        if name.startswith('input'):
            assert all(part.equal(whole) for part in parts)
        elif name == 'o_proj.bias':
            assert sum(parts).equal(whole) and parts[0].equal(whole)
        else:
            assert torch.cat(parts, 1 if name.startswith('down') else 0).equal(whole)


def test_calibration_is_not_written_through_a_link(tmp_path):
    """A checkpoint may bring a link of the name that a growing file has."""
    folder = checkpoint(tmp_path / 'a')
    victim = tmp_path / 'victim'
    victim.write_text('mine')
    (folder / 'calibration.new').symlink_to(victim)
    write_calibration(folder, 'mask', dict(skip=[1], nested=[]))
    assert victim.read_text() == 'mine'
    assert read_calibration(folder, None, ['mask'])['mask']['skip'] == [1]


def test_what_a_part_of_a_target_cannot_do(pair):
    for flags, words in ((['--compile'], '--compile'),
                         (['--trace', 'x.html'], 'x.html: a page times passes'),
                         (['--method', 'specguard', '--set', 'signals=target'], 'signals=target'),
                         (['--method', 'sparse', '--set', 'ffn_share=0.5'], 'ffn_share=0.5')):
        args = specmini.parse([*map(str, pair[:4]), '--prompt', 'a', *flags])
        with pytest.raises(ValueError, match=words):
            specmini.refuse_parted(args)


def test_cuda_is_refused_where_there_is_none(capsys):
    refused(capsys, 'has none', '--prompt', 'x', '--device', 'cuda')


# ---------------------------------------------------------- specmini.py: contexts, every method

def run_past_the_context(capsys, target, draft, prompt, max_new=60):
    """(ids written, stderr) of a run that asks for so many tokens."""
    pair = '--target', target, '--draft', draft
    flags = '--prompt', prompt, '--max-new', max_new, '--ignore-eos', '--json'
    status, out, err = program(capsys, *pair, *flags)
    assert status == 0
    return json.loads(out)['tokens'], err


def test_the_context_of_the_target_cuts_texts_short(pair, capsys):
    _, target, _, draft, *_ = pair
    tokens, err = run_past_the_context(capsys, target, draft, 'x' * 63)
    assert len(tokens) == 1
    wanted = '1 of 1 texts ended before --max-new 60: the context of 64 tokens (of the target) was full'
    assert wanted in err


def test_the_context_of_the_draft_cuts_texts_short(pair, capsys, tmp_path):
    short = checkpoint(tmp_path, max_position_embeddings=16)
    tokens, err = run_past_the_context(capsys, pair[1], short, 'hello')
    assert len(tokens) == 16 - len('hello')
    wanted = '1 of 1 texts ended before --max-new 60: the context of 16 tokens (of the draft) was full'
    assert wanted in err


def test_a_text_that_just_fits_is_not_cut_short(pair, capsys):
    _, target, _, draft, *_ = pair
    tokens, err = run_past_the_context(capsys, target, draft, 'x' * 54, max_new=10)
    assert len(tokens) == 10
    assert 'ended before' not in err


def test_a_prompt_that_fills_the_context_is_refused(pair, capsys):
    words = 'has 64 tokens; expected at least 1, and fewer than the context of 64'
    refused(capsys, words, *pair[:4], '--prompt', 'x' * 64)


QUICK = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'via-mid', 'specguard', 'sparse'       # one of each kind
CHECKED = 'rsd', 'oracle-gate', 'process-best-of-n'                                # they need a step checker


def runnable_methods():
    """A parameter for each method that the command line can run; all but a few of them slow."""
    names = [name for name in METHODS if name not in CHECKED]
    params = []
    for name in names:
        marks = [] if name in QUICK else [pytest.mark.slow]
        params.append(pytest.param(name, marks=marks, id=name))
    return params


def sample_sixteen(name, capsys):
    """(status, stdout, stderr) of sampling 16 tokens with this method on the embedded models."""
    draft = EMBEDDED / 'draft'
    flags = ['--method', name, '--max-new', 16, '--temperature', 0.8, '--json']
    if name == 'via-mid':
        flags += ['--mid', draft]
    if name == 'ecsv-two':
        flags += ['--set', f'second={draft}']
    return program(capsys, '--prompt', 'Tom has 12 pens. Tom loses 5. How many has Tom?', *flags)


@pytest.mark.parametrize('name', runnable_methods())
def test_every_method_runs_on_the_embedded_models(name, capsys):
    """From the command line, sampling: JSON that is valid, and figures that add up."""
    def refuse(word):
        pytest.fail(f'{word} is no JSON')

    status, out, _ = sample_sixteen(name, capsys)
    assert status == 0
    report = json.loads(out, parse_constant=refuse)
    n = len(report['tokens'])
    assert n <= 16
    assert sum(report['stats']['labels'].values()) == n


@pytest.mark.parametrize('name', CHECKED)
def test_methods_that_need_a_step_checker_say_so(name, capsys):
    status, _, err = sample_sixteen(name, capsys)
    assert status == 2
    assert 'step checker' in err


# ---------------------------------------------------------- lab/tasks.py: rows and graders

# How many steps the solutions of a task have; those of the other tasks have none.
STEPS = {'math': range(2, 5), 'math-hard': range(5, 9), 'table': range(1, 3), 'table-long': range(1, 3)}


def rows_of(task, split='held-out', seed=1, n=100):
    """The first n rows of a task."""
    return list(itertools.islice(tasks.rows(task, seed, split), n))


@cache
def rows_once(task):
    """rows_of(task), made once."""
    return rows_of(task)


@pytest.mark.slow
@pytest.mark.parametrize('task', tasks.TASKS)
def test_rows_are_seeded(task):
    held_out = rows_of(task)
    assert held_out == rows_of(task)
    assert held_out != rows_of(task, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize('task', tasks.TASKS)
def test_splits_share_no_text(task):
    held_out = {row['prompt'] + row['solution'] for row in rows_once(task)}
    train = {row['prompt'] + row['solution'] for row in rows_of(task, 'train')}
    assert not held_out & train


@pytest.mark.slow
@pytest.mark.parametrize('task', [task for task in tasks.TASKS if task != 'story'])
def test_the_grader_knows_the_reference(task):
    """It accepts the reference, not silence; of 99 rows fewer than 10 take their neighbour's solution."""
    rows = rows_once(task)
    others = 0
    for row, other in zip(rows, rows[1:]):
        assert tasks.grade(row, row['solution'])
        assert not tasks.grade(row, '')
        others += tasks.grade(row, other['solution'])
    assert others < 10


def test_a_story_is_not_graded():
    rows = rows_once('story')
    for row, other in zip(rows, rows[1:]):
        assert tasks.grade(row, row['solution']) is None
        assert tasks.grade(row, '') is None
        assert tasks.grade(row, other['solution']) is None


@pytest.mark.parametrize('task', STEPS)
def test_steps_are_small_and_right(task):
    """All numbers up to 999, one factor or the divisor a single digit; as many steps as the task says."""
    for row in rows_once(task):
        assert int(row['answer']) <= 999
        assert all(tasks.steps_right(row, row['solution']))
        steps = tasks.STEP.findall(row['solution'])
        assert len(steps) in STEPS[task]
        for a, operation, b, result in steps:
            assert max(int(a), int(b), int(result)) <= 999
            if operation in '*/':
                assert min(int(a), int(b)) <= 9


@pytest.mark.parametrize('task', STEPS)
def test_a_wrong_step_is_found(task):
    """A wrong result, and a line that is no step."""
    for row in rows_once(task):
        solution = row['solution']
        first = solution.split('\n')[1]
        wrong = solution.replace(first, first + '1', 1)
        assert tasks.steps_right(row, wrong)[0] is False
        assert tasks.steps_right(row, 'so it is\n' + solution)[0] is False


def test_bleu_has_published_values():
    """The example in NLTK's manual, and the brevity penalty alone."""
    text = 'It is a guide to action which ensures that the military always obeys the commands of the party'
    references = [
        'It is a guide to action that ensures that the military will forever heed Party commands',
        'It is the guiding principle which guarantees the military forces always being under the command of '
        'the Party',
        'It is the practical guide for the army always to heed the directions of the party']
    assert tasks.bleu([references], [text]) == pytest.approx(0.5045666840058485)
    assert tasks.bleu([['a b c d e']], ['a b c d']) == pytest.approx(math.exp(1 - 5 / 4))


def test_rouge_l_has_published_values():
    """Lin 2004, section 3.1."""
    assert tasks.rouge_l('police killed the gunman', 'police kill the gunman') == 0.75
    assert tasks.rouge_l('police killed the gunman', 'the gunman kill police') == 0.5


def test_facts_of_a_summary():
    row = next(tasks.rows('summary', 7))
    facts = tasks.SUMMARY.fullmatch(row['answer']).groups()
    assert len(facts) == 3
    for k in range(4):
        text = ' '.join(facts[:k])
        assert tasks.facts_found(row, text) == pytest.approx(k / 3)
    assert tasks.facts_found(row, row['solution']) == 1


GRADED = [              # a row, a text that is right for it
    (dict(question='?', answer='He pays 600+634\n#### 1,234'), 'so 5, then 1,234.'),        # as GSM8K's
    (dict(answer=20), 'a range of 10-20'), (dict(answer=-3), '4 - 7 = -3'),
    (dict(answer='Paris, France'), ' Paris, France\n'), (dict(answer=7), 'it is 7'),
    (dict(task='math', answer=7), 'Answer: 7'), (dict(task='summary', answer='x'), 'x')]


@pytest.mark.parametrize('row, text', GRADED, ids=[text.strip() for _, text in GRADED])
def test_grades_of_foreign_rows(row, text):
    """By the last number where the answer is one, else by the whole text."""
    assert specmini.grade(row, text)
    assert not specmini.grade(row, 'y')
    assert not specmini.grade(row, '1234 is not 7000')


def test_a_row_without_an_answer_is_not_graded():
    assert specmini.grade(dict(turns=['?']), 'x') is None


def test_outputs_of_code():
    assert tasks.outputs('\ndef f(a, b): return max(a, b) % 5') == [2, 3, 0, 2]


BAD_CODE = ('__import__("os")', 'a.real', '9 ** 9 ** 9', 'z', 'a(', 'xs[9]', '[a]', 'xs * 3', 'a' * 201)


@pytest.mark.parametrize('code', BAD_CODE, ids=[code[:20] for code in BAD_CODE])
def test_bad_code_is_not_run(code):
    assert tasks.outputs(f'def f(a, xs): return {code}') is None


FEW_WORDS = dict(
    NAMES=['A', 'B'], ANIMALS=['x'], PLACES=['y', 'v'], THINGS=['z'], WHEN=['w'], LOST=['l', 'm'],
    FOUND=['f', 'at {place}'], END=['e'], SEARCH=['{a} ran.', '{thing2}.', '{b} sat.', 'So.', 'No.'])


@pytest.mark.slow
def test_the_grammar_knows_its_entropy(monkeypatch):
    """The chances exp(-nats) of all stories that can follow a prompt sum to 1 (a few rare are not seen)."""
    for name, few in FEW_WORDS.items():
        monkeypatch.setattr(tasks, name, few)
    rng = random.Random(0)
    chances = {}                                        # prompt -> {story: its chance}
    for _ in range(30_000):
        row = tasks.story(rng)
        stories = chances.setdefault(row['prompt'], {})
        stories[row['solution']] = math.exp(-row['nats'])
    assert len(chances) == 4
    for stories in chances.values():
        assert 0.95 < sum(stories.values()) < 1 + 1e-9


def test_tasks_prints_rows(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', 'tasks math --n 3 --seed 7'.split())
    tasks.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert set(row) >= {'task', 'prompt', 'answer'}


# ---------------------------------------------------------- lab/quantise.py: 4 bits

def test_the_codebook_has_sixteen_levels():
    assert len(set(quantise.CODEBOOK)) == 16
    assert {-1, 0, 1} <= set(quantise.CODEBOOK)


def test_quantised_weights_are_levels_times_a_scale():
    """The scale is a group's largest magnitude; groups of 64 along a row; the error is small, but there."""
    w = torch.randn(6, 128, generator=seeded())
    coarse = quantise.quantise(w)
    scale = w.reshape(-1, 64).abs().amax(1, keepdim=True)
    groups = coarse.reshape(-1, 64) / scale
    distances = groups[..., None] - torch.tensor(quantise.CODEBOOK)
    assert distances.abs().amin(-1).max() < 1e-6
    error = (coarse - w).norm() / w.norm()
    assert 0.05 < error < 0.12


def test_a_quantised_copy_loads(monkeypatch, tmp_path):
    """Its projections are other weights, all else (embeddings, norms) the same."""
    source = checkpoint(tmp_path / 'a')
    monkeypatch.setattr(sys, 'argv', ['quantise', str(source), str(tmp_path / 'b')])
    quantise.main()
    before = load(source)[0].state_dict()
    after = load(tmp_path / 'b')[0].state_dict()
    for key, weight in before.items():
        changed = not torch.equal(weight, after[key])
        assert changed == key.endswith('_proj.weight'), key


# ---------------------------------------------------------- the embedded models' data

@pytest.mark.slow
def test_training_tells_every_fact():
    told = set()
    for row in itertools.islice(tasks.rows('qa', 0, 'train'), 20_000):
        for town in tasks.TOWNS:
            if town in row['prompt']:
                told.add((row['answer'], town))
    for (_, town), value in tasks.FACTS.items():
        assert (value, town) in told


TEXTS = {'digits': 'Mia has 270 pens.\n9 * 51 = 459', 'spaces': '  two  spaces\t\n\n',
         'beyond ASCII': 'caf\u00e9 \u2192 \U0001f600',
         'characters 1 to 299': ''.join(map(chr, range(1, 300)))}


@pytest.fixture(scope='module')
def embedded_tokenizer():
    return Tokenizer.from_file(str(EMBEDDED / 'target/tokenizer.json'))


@pytest.mark.parametrize('text', TEXTS.values(), ids=list(TEXTS))
def test_the_tokenizer_returns_the_text(text, embedded_tokenizer):
    ids = embedded_tokenizer.encode(text).ids
    assert embedded_tokenizer.decode(ids) == text


def test_every_digit_is_a_token(embedded_tokenizer):
    vocabulary = embedded_tokenizer.get_vocab()
    assert embedded_tokenizer.get_vocab_size() <= 1024
    for token in vocabulary:
        assert len(re.findall(r'\d', token)) <= 1, token


def test_calibrations_are_of_these_weights():
    """read_calibration refuses one whose models have changed since."""
    read_calibration(EMBEDDED / 'target', EMBEDDED / 'draft', ['mask', 'signals', 'sparse'])
    read_calibration(EMBEDDED / 'moe', sections=['sparse'])


# ---------------------------------------------------------- lab/train.py: heirs

@pytest.fixture(scope='module')
def parents():
    """(target, draft, their tokenizer): the embedded ones."""
    target, tokenizer, _ = load(EMBEDDED / 'target')
    draft, _, _ = load(EMBEDDED / 'draft')
    return target, draft, tokenizer


@pytest.fixture
def training_home(monkeypatch, tmp_path):
    """The folder that training and grading use for lab/models."""
    monkeypatch.setattr(train, 'HOME', tmp_path)
    monkeypatch.setattr(bench, 'HOME', tmp_path)
    return tmp_path


def test_up_starts_as_the_draft(parents, training_home):
    _, draft, tokenizer = parents
    up = train.build('up', tokenizer)
    _, layers = train.HEIRS['up']
    train.inherit(up, dict(draft.named_parameters()), layers)
    difference = fresh(up, [5, 6, 7], 3) - fresh(draft, [5, 6, 7], 3)
    assert difference.abs().max() < 1e-4


def test_mid_starts_as_layers_of_the_target(parents, training_home):
    target, _, tokenizer = parents
    mid = train.build('mid', tokenizer)
    _, layers = train.HEIRS['mid']
    train.inherit(mid, dict(target.named_parameters()), layers)
    mine = mid.model.layers[3].mlp.up_proj.weight
    theirs = target.model.layers[7].mlp.up_proj.weight
    assert torch.equal(mine, theirs)


def test_moe_starts_as_the_feed_forwards_of_the_target(parents, training_home):
    """Where its router is even, which small weights make it."""
    target, _, tokenizer = parents
    moe = train.build('moe', tokenizer)
    train.split(moe, dict(target.named_parameters()))
    x = torch.randn(1, 50, target.config.hidden_size, generator=seeded())
    for one, eight in zip(target.model.layers, moe.model.layers):
        eight.mlp.gate.weight.data *= 1e-4
        whole, _ = kernels.swiglu(x, one.mlp, None)
        parts, _ = kernels.mix(x, eight.mlp, None)
        assert (whole - parts).abs().max() < 1e-3 * whole.abs().max()


# ---------------------------------------------------------- lab/distil.py

def test_distil_writes_rows_together_as_each_alone():
    """Greedily, prompts of unequal lengths; a text may end early, of which another must not know."""
    target = network(3)
    prompts = [LINE[:3], LINE[4:13], LINE[2:8], LINE[:3]]
    ends = {5}
    blanks = [Blank(ids, len(ids) + 12) for ids in prompts]
    lessons = lab_distil.write(target, blanks, ends, 0, 0)
    lengths = set()
    for ids, lesson in zip(prompts, lessons):
        wanted = plain(target, ids, 12, eos=ends)
        assert (lesson.prompt, lesson.solution) == (ids, wanted)
        line = ids + wanted
        assert apart(target.logits(lesson.said), fresh(target, line[:-1], len(wanted))) < 1e-9
        lengths.add(len(wanted))
    assert min(lengths) < max(lengths) == 12


def test_distil_slope_is_that_of_the_divergence(monkeypatch):
    """By hand, a few places at a time, as by autograd, all at once."""
    monkeypatch.setattr(lab_distil, 'PLACES', 3)
    student = network(0)
    target = network(1)
    guesses = torch.randn(7, 16, dtype=torch.float64, generator=seeded(), requires_grad=True)
    said = torch.randn(7, 16, dtype=torch.float64, generator=seeded(1))
    laws = target.logits(said).log_softmax(-1)
    mine = student.logits(guesses).log_softmax(-1)
    loss = torch.nn.functional.kl_div(mine, laws, log_target=True, reduction='sum')
    loss.backward()
    nats, slope = divergence(student, target, guesses.detach(), said)
    assert nats == pytest.approx(loss.item(), rel=1e-5)         # the target's logits are rounded to fp32
    assert apart(slope, guesses.grad) < 1e-5


@pytest.mark.parametrize('gamma', [1, 4])
def test_distil_cycles_are_those_of_a_run(gamma):
    """What is told of held-out texts, teacher-forced, is what greedy decoding does with this draft."""
    target = network(3)
    draft = network(3)
    draft.lm_head.weight.data += 0.3 * torch.randn(11, 16, dtype=torch.float64, generator=seeded(2))
    s = session(target, draft, LINE[:5], 40)
    tokens, cycles = write(s, Exact(gamma=gamma))
    said = hidden_states(target, LINE[:5] + tokens)[4:-1]
    places = agreed(draft, target, Lesson(LINE[:5], tokens, said))
    assert 0.2 < sum(places) / 40 < 0.95
    assert cycles_over(places, gamma) == len(cycles)


def hidden_states(model, line):
    """[n, C] after the last norm, of a text without a cache."""
    return model(torch.tensor([line]), torch.arange(len(line)), model.full)[0]


@pytest.fixture
def without_a_draft(tmp_path, monkeypatch):
    """(run, flags): run(flags) runs lab.distil on these and more; a random target of four layers."""
    monkeypatch.setattr(lab_distil, 'HELD', 2)
    target = checkpoint(tmp_path / 'target', byte_network(num_hidden_layers=4), num_hidden_layers=4)
    (target / 'calibration.json').write_text('{}')
    rows = [json.dumps(dict(prompt='ab' * n)) for n in range(1, 6)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(rows))
    usual = dict(target=target, prompts=tmp_path / 'rows.jsonl', out=tmp_path / 'out', minutes=0.02,
                 longest=40, max_new=12, device='cpu')

    def run(**changes):
        flags = ['distil']
        for name, value in (usual | changes).items():
            flags += [f'--{name.replace("_", "-")}', str(value)]
        monkeypatch.setattr(sys, 'argv', flags)
        return lab_distil.main()
    return run, tmp_path


@pytest.mark.slow
def test_distil_makes_a_draft_and_goes_on(without_a_draft, monkeypatch, capsys):
    """Interrupted, it goes on with the same texts; what it saves is the target's but for what learned."""
    run, home = without_a_draft
    monkeypatch.setattr(lab_distil, 'STORE', 0)
    steps = interrupt(monkeypatch, lab_distil, 'step', 3)
    assert run() == 130
    texts = {file.name: file.stat().st_mtime_ns for file in (home / 'out/run').glob('*0*.pt')}
    assert torch.load(home / 'out/run/checkpoint.pt')['done'] == 2
    assert run() == 0
    for name, changed in texts.items():
        assert (home / 'out/run' / name).stat().st_mtime_ns == changed
    assert torch.load(home / 'out/run/checkpoint.pt')['done'] == len(steps) - 1 > 3
    assert min(steps[-3:]) < steps[0]
    draft, _, eos = load(home / 'out')
    target, _, _ = load(home / 'target')
    assert draft.config.num_hidden_layers == 2 and eos == {256}
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    mine, theirs = draft.model.layers[1], target.model.layers[3]
    assert not torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert not (home / 'out/calibration.json').exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / 'out')
    with torch.no_grad():
        assert apart(theirs(torch.tensor([LINE])).logits[0], fresh(draft, LINE)) < 1e-4
    out = capsys.readouterr().out
    assert 'layers [0, 3] of 4' in out
    assert len((home / 'out/held_out.jsonl').read_text().splitlines()) == 2


def test_distil_refuses_in_one_line(without_a_draft, capsys):
    run, home = without_a_draft
    (home / 'few.jsonl').write_text('{"prompt": "a"}')
    cases = {'--layers 4: expected 2 to 3': dict(layers=4), '--max-new: 140 tokens': dict(max_new=100),
             '1 prompts of 40 tokens': dict(prompts=home / 'few.jsonl'),
             'there already': dict(out=home / 'target'), '--minutes 0.0': dict(minutes=0)}
    for words, changes in cases.items():
        assert run(**changes) == 2
        err = capsys.readouterr().err
        assert words in err and err.count('\n') == 1, err


@pytest.mark.parametrize('kept', [[0, 3], [0, 1, 3]])
def test_distil_students_layers_are_the_targets(kept, tmp_path):
    """Of a mixture with dense layers, too; and what is saved is read as the same network."""
    shape = dict(num_hidden_layers=4, num_experts_per_tok=3, moe_intermediate_size=8)
    target = byte_network(experts=(6, 0, 0, 6), qk_norm=True, **shape)
    shape['num_experts'] = 6
    folder = checkpoint(tmp_path / 'target', target, model_type='qwen3_moe', mlp_only_layers=[1, 2], **shape)
    student = lab_distil.student_of(target, kept)
    for mine, layer in zip(student.model.layers, kept):
        for weight, theirs in zip(mine.parameters(), target.model.layers[layer].parameters()):
            assert torch.equal(weight, theirs)
    lab_distil.save(student, kept, Pair(str(folder)), tmp_path)
    saved, _, _ = load(tmp_path)
    assert apart(fresh(saved, LINE), fresh(student, LINE)) < 1e-5


# ---------------------------------------------------------- lab/train.py and lab/bench.py: training

@pytest.fixture
def tiny_training(monkeypatch, training_home):
    """The folder in which tiny networks train on word problems; each look at the clock takes 25 s of it.

    Graded on four tasks, a row of each.
    """
    clock = itertools.count(0, 25)
    accuracy = train.accuracy
    shape = SIZES | dict(model_type='qwen3', max_position_embeddings=2048)

    def tick():
        return next(clock)

    def accuracy_of_one_row(model, tokenizer, n=1):
        return accuracy(model, tokenizer, 1)

    monkeypatch.setattr(train, 'SHAPES', dict(draft=shape, target=shape))
    monkeypatch.setattr(train, 'CURRICULUM', ((1, [('math', {}, 1)]),))
    monkeypatch.setattr(train, 'accuracy', accuracy_of_one_row)
    monkeypatch.setattr(train, 'time', SimpleNamespace(time=tick))
    few = {name: tasks.TASKS[name] for name in ('math', 'translate', 'story')}
    few['summary'] = partial(tasks.summary, high=2)
    monkeypatch.setattr(tasks, 'TASKS', few)
    (training_home / 'target').mkdir()
    shutil.copy(EMBEDDED / 'target/tokenizer.json', training_home / 'target')
    return training_home


@pytest.mark.slow
def test_training_goes_on_where_it_was_interrupted(tiny_training, monkeypatch, capsys):
    """From its checkpoint, to the end; it learns; the model is saved, graded on every task, and loads."""
    losses = interrupt(monkeypatch, train, 'step', 12)
    with pytest.raises(KeyboardInterrupt):
        train.train('draft', 20, 256, 0, 'cpu')
    done = torch.load(tiny_training / 'draft/checkpoint.pt')['done']
    assert 6 < done < 12
    train.train('draft', 20, 256, 0, 'cpu')
    last = capsys.readouterr().out.splitlines()[-1]
    said = json.loads(last)
    assert said['steps'] == done + len(losses) - 12 > 18
    assert said['held_out'].keys() == tasks.TASKS.keys()
    assert sum(losses[-5:]) < sum(losses[:5])
    assert not list(tiny_training.glob('draft/*.pt'))
    load(tiny_training / 'draft')


@pytest.mark.slow
def test_quality_grades_each_model_by_its_tasks(tiny_training, monkeypatch, capsys):
    """A column a model: target, draft, moe. These have learned nothing, so what they write is wrong."""
    tokenizer = Tokenizer.from_file(str(tiny_training / 'target/tokenizer.json'))
    train.save(train.build('draft', tokenizer), tokenizer, 'draft')
    for name in ('target', 'moe'):
        shutil.copytree(tiny_training / 'draft', tiny_training / name, dirs_exist_ok=True)
    monkeypatch.setattr(sys, 'argv', ['bench', 'quality', '--n', '1'])
    bench.main()
    _, _, *lines = capsys.readouterr().out.splitlines()
    found = {line.split('`')[1]: line for line in lines}
    assert found.keys() == tasks.TASKS.keys()
    for line in lines:
        assert '1 of 1 |' in line                       # sd writes what ar does
    assert found['math'].count('.0% |') >= 3
    assert found['translate'].count('BLEU 0') >= 3
    assert found['summary'].count('facts ') >= 3
    assert found['story'].count('grammar ') >= 3


# ---------------------------------------------------------- lab/speed.py and lab/cuda.py

def run_bench(monkeypatch, capsys, *flags):
    """(exit status, stdout) of `python -m lab.bench flags`."""
    monkeypatch.setattr(sys, 'argv', ['bench', *flags])
    status = bench.main()
    return status, capsys.readouterr().out


def calls(*pairs):
    """A round of Calls from pairs (tokens, seconds)."""
    return [speed.Call(*pair) for pair in pairs]


def test_speed_ratios_by_hand():
    """Within a prompt and a round; slow prompts weigh no more than quick ones; all: the prompts of both."""
    mine = [calls((10, 1.0), (10, 100.0)), calls((10, 2.0), (10, 100.0))]
    theirs = [calls((10, 4.0), (10, 100.0)), calls((10, 4.0), (10, 50.0))]
    found = speed.ratios(mine, theirs)
    assert found == pytest.approx([2.0, 1.0])                   # roots of 4 x 1 and of 2 x 0.5
    assert speed.spread([2.0, 1.0, 4.0], 1) == '2.0 (1.0 to 4.0)'
    assert speed.rates(mine) == pytest.approx([20 / 101, 20 / 102])
    both = speed.together(dict(a=dict(ar=mine), b=dict(ar=theirs)))
    assert both['all']['ar'] == [mine[0] + theirs[0], mine[1] + theirs[1]]


def test_speed_takes_turns():
    """Each prompt is written by all before the next one, every second round in reverse order."""
    asked = []

    def contestant(name):
        def write(ids):
            asked.append((name, ids))
            return ids * 3
        return SimpleNamespace(write=write)
    timings = speed.timed(dict(a=contestant('a'), b=contestant('b')), [[1], [2, 2]], 2, 'cpu')
    first = [('a', [1]), ('b', [1]), ('a', [2, 2]), ('b', [2, 2])]
    second = [('b', [1]), ('a', [1]), ('b', [2, 2]), ('a', [2, 2])]
    assert asked == first + second
    for rounds in timings.values():
        assert [[call.tokens for call in some] for some in rounds] == [[3, 6], [3, 6]]


@pytest.mark.slow
def test_speed_times_the_same_texts(tmp_path, monkeypatch, capsys):
    """Of two folders: all write the text of `ar`; each ratio is there; a single folder is refused."""
    (tmp_path / 'few.jsonl').write_text('{"prompt": "Tom has 12 pens. Tom buys 3 boxes"}\n')
    pair = f'{EMBEDDED / "target"},{EMBEDDED / "draft"}'
    rest = '--length', '8', '--rounds', '2', '--prompts', str(tmp_path / 'few.jsonl'), '--device', 'cpu'
    status, out = run_bench(monkeypatch, capsys, 'speed', '--pair', pair, *rest)
    assert status == 0
    speeds, ratios = out.split('\n\n')[1:]
    assert speeds.count('| 1 of 1 |') == 4                      # two of ours, two of theirs
    assert re.search(r'specmini sd \|.*\| \d+\.\d% \|', speeds)
    for line in ratios.strip().splitlines()[2:]:
        middle, low, high = map(float, re.findall(r'\d+\.\d\d', line))
        assert 0 < low <= middle <= high
    assert ratios.count('\n') == 2 + 4
    status, _ = run_bench(monkeypatch, capsys, 'speed', '--pair', 'one', *rest)
    assert status == 2


def test_memory_is_what_is_held(tmp_path):
    """Parameters as in the file, an embedding that is the head once; the cache's numbers as a cache has."""
    for tied in (True, False):
        model = byte_network(tie_word_embeddings=tied, num_hidden_layers=3)
        weights, cache = bench.held_numbers(model.config)
        assert weights == sum(weight.numel() for weight in model.parameters())
        stores = KVCache(model.config, 10, model.cos).stores
        assert 10 * cache == sum(keys.numel() + values.numel() for keys, values in stores)
    line = bench.memory_line('mine', model.config, ['1', '2'])
    assert line.count('|') == 9 and line.endswith('| 1 | 2 |')


@pytest.mark.slow
def test_memory_peak_is_in_bytes(tmp_path):
    """A process with a tiny network holds torch, which is some hundred MB, and not more than a few GB."""
    folder = checkpoint(tmp_path / 'small', max_position_embeddings=2048)
    assert 1e8 < bench.peak_of_run(str(folder), 'bf16') < 4e9


def test_cuda_parity_can_fail(monkeypatch):
    """Rotary tables that are a position off are far outside what rounding does; as they are, within it."""
    assert cuda.parity('qwen3', 'bf16', 'cpu').good

    def load_shifted(folder, device, dtype):
        model, tokenizer, eos = load(folder, device, dtype)
        length = torch.arange(len(model.cos))
        model.cos[:] = model.cos[(length * 0.9).long()]
        model.sin[:] = model.sin[(length * 0.9).long()]
        return model, tokenizer, eos
    monkeypatch.setattr(cuda, 'load', load_shifted)
    assert not cuda.parity('qwen3', 'bf16', 'cpu').good


def test_a_failed_check_is_a_line(monkeypatch, capsys):
    """The others go on, and the exit status says so."""
    def broken():
        raise RuntimeError('no such\nkernel | here')
    three = [('a', broken), ('b', lambda: cuda.Result('far off', False)), ('c', lambda: cuda.Result('fine'))]
    monkeypatch.setattr(cuda, 'checks', lambda card: three)
    assert cuda.run_all('cpu', 'fp32') == 1
    *_, a, b, c = capsys.readouterr().out.splitlines()
    assert a == '| a | RuntimeError: no such kernel / here | FAILED |'
    assert b == '| b | far off | FAILED |'
    assert c == '| c | fine | ok |'
    monkeypatch.setattr(cuda, 'checks', lambda card: three[2:])
    assert cuda.run_all('cpu', 'fp32') == 0


def test_another_text_is_told_with_its_gap(monkeypatch):
    """A lossless method whose text parts from plain decoding's where nothing is near a tie has failed."""
    engine = cuda.Card('cpu', 'fp32', cuda.ON_CPU).eager
    assert cuda.end_to_end(engine, 'sd').good
    engine.source = lambda session, plan: Draft.points([5] * plan.n, session.target.model)
    assert cuda.end_to_end(engine, 'sd').good                   # whatever is drafted
    monkeypatch.setattr(Exact, 'chance', lambda self, score, i: 1.0)
    found = cuda.end_to_end(engine, 'sd')
    assert not found.good and 'parts from `ar` at token' in found.said


def traced_alone(monkeypatch):
    """torch.compile traces, and compiles nothing: that takes a minute a graph."""
    compile_by = torch.compile

    def trace(function, **how):
        how.pop('options', None)
        return compile_by(function, backend='eager', **how)
    monkeypatch.setattr(torch, 'compile', trace)


@pytest.mark.slow
def test_a_graph_compiled_anew_is_told(monkeypatch):
    """The third text needs no new graph; if one more is counted, for no new length, the check fails."""
    traced_alone(monkeypatch)
    engine = cuda.Card('cpu', 'fp32', cuda.ON_CPU._replace(tokens=6)).compiled
    assert cuda.compiled_end_to_end(engine, 'ar').good
    monkeypatch.setattr(cuda, 'graphs', itertools.count().__next__)     # one more at every look
    found = cuda.compiled_end_to_end(engine, 'ar')
    assert not found.good and 'then 1 for 0 new lengths' in found.said


@pytest.mark.slow
def test_cuda_list_on_a_cpu(monkeypatch, capsys):
    """Every check passes with small shapes, and each method is there."""
    traced_alone(monkeypatch)
    monkeypatch.setattr(cuda, 'ON_CPU', cuda.ON_CPU._replace(tokens=4, contexts=(256,), long=12, prompt=16))
    status, out = run_bench(monkeypatch, capsys, 'cuda', '--device', 'cpu')
    failed = [line for line in out.splitlines() if line.endswith('FAILED |')]
    assert status == 0 and not failed, failed
    for name in METHODS:
        assert f'\n| `{name}` | ' in out
    assert out.count('dialled') == 2 * len(cuda.DIALS)


def test_pass_takes_device_and_dtype(monkeypatch, capsys):
    """The table says in which dtype it was measured."""
    monkeypatch.setattr(sparse_passes, 'machine', lambda device, dtype: (1e9, 1e9))
    flags = '--shape', 'embedded', '--layers', '1', '--contexts', '64', '--device', 'cpu', '--dtype', 'bf16'
    status, out = run_bench(monkeypatch, capsys, 'pass', *flags)
    assert status == 0 and out.startswith('embedded, 1 layers, torch.bfloat16, eager')


def test_second_draft_has_the_dtype_of_the_target():
    target, _, _ = load(EMBEDDED / 'target', dtype=torch.bfloat16)
    s = session(target, target, [5, 6, 7], 8)
    reader = TwoDrafts(second=str(EMBEDDED / 'up')).reader_for(s, len(s.tokens) + s.room)
    assert reader.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize('device, dtype', [('cpu', torch.float32), ('cuda', torch.bfloat16)])
def test_train_mask_loads_as_a_run_does(device, dtype, monkeypatch):
    """fp32 on a CPU; on CUDA bf16, in which alone a large model fits."""
    asked = []
    model = byte_network()
    model.join()

    def note(*settings):
        asked.append(settings)
        return model, None, None
    monkeypatch.setattr(train_mask, 'pick_device', lambda name: device)
    monkeypatch.setattr(train_mask, 'load', note)
    monkeypatch.setattr(train_mask, 'calibration_texts', lambda tokenizer, settings: [])
    train_mask.load_with_texts('folder', train_mask.Settings())
    assert asked == [('folder', device, dtype)]


def test_recalibrate_measures_the_pair_and_its_mixture(training_home, monkeypatch):
    moe = training_home / 'moe'
    moe.mkdir()
    (training_home / 'target').mkdir()
    (moe / 'model.safetensors').touch()
    asked = []
    for kind in ('mask', 'signals', 'anchors'):
        def note(asked_for, *others, kind=kind):
            folder = getattr(asked_for, 'target', asked_for)        # flags, or the folder
            asked.append((kind, File(folder).name))
        monkeypatch.setattr(train_mask, f'measure_{kind}', note)
    monkeypatch.setattr(sys, 'argv', ['train', 'recalibrate'])
    train.main()
    assert asked == [('mask', 'target'), ('signals', 'target'), ('anchors', 'target'), ('anchors', 'moe')]


# ---------------------------------------------------------- a proof as a command, the algorithm in the README

class Liar(WrongResidual):
    """Promises the law that it has not."""
    lossless = True


@pytest.fixture
def short_proofs(monkeypatch):
    """Proofs of two tokens at most, so that every method has one in no time."""
    monkeypatch.setattr(prove, 'SIZES', ((2, 1), (2, 2)))
    monkeypatch.setattr(prove, 'LONGER', ((2, 2),))
    monkeypatch.setattr(prove, 'MOST', 80)


@pytest.mark.slow
def test_prove_judges_or_refuses_every_method(short_proofs):
    """No verdict contradicts what a method says of itself; those without one say why."""
    refused_for = {}
    for name, kind in METHODS.items():
        try:
            proof = prove.prove(name, kind(), temperature=1.0, top_k=0, top_p=1.0)
        except ValueError as error:
            refused_for[name] = str(error)
            continue
        assert proof.status == 0
        assert (proof.gap < 1e-9) >= proof.promised, name
    few = {name for name, why in refused_for.items() if 'ways to draw' in why}
    assert few == {'majority', 'best-of-n'}             # of eight whole texts; not in proofs of usual length
    assert refused_for.keys() - few == {'ecsv-two', 'rsd', 'oracle-gate', 'process-best-of-n'}


@pytest.mark.parametrize('rule, status, words', [
    case('lossless', Exact, 0, 'lossless: 16 texts of 2 tokens agree to '),
    case('lossy', lenient, 0, 'LOSSY: 16 texts of 2 tokens have total variation '),
    case('liar', Liar, 1, 'WRONG: told calls itself lossless at these knobs, and is not: 16 texts')])
def test_prove_prints_laws_and_what_they_come_to(rule, status, words, capsys, monkeypatch):
    """The figures are those of the law tests."""
    monkeypatch.setattr(prove, 'SIZES', ((4, 2),))
    monkeypatch.setitem(METHODS, 'told', rule)
    found, out, _ = program(capsys, '--prove', 'told', '--gamma', 1, '--top-k', 4)
    assert found == status
    *_, total, sentence = lines = out.splitlines()
    assert sentence.startswith(words)
    target = Table(1)
    wanted = exact_law(target, 2, temperature=1.0)
    law = enumerate_law(target, Table(2), rule(1), 2, temperature=1.0)
    drafted = exact_law(Table(2), 2, temperature=1.0)
    gap = variation(law, wanted)
    assert f'told {gap:.3g}, draft alone {variation(drafted, wanted):.3g}' in total or gap < 1e-9
    text = max(wanted, key=wanted.get)
    shown = next(line for line in lines if line.startswith(' '.join(map(str, text)) + ' ')).split()
    assert shown[2:4] == [f'{law[text]:.5f}', f'{wanted[text]:.5f}'] and shown[5] == f'{drafted[text]:.5f}'
    if status or rule is lenient:
        assert f'has {law[text]:.5f} instead of {wanted[text]:.5f}' in sentence


@pytest.mark.parametrize('name', ['lagged', 'closed-loop', 'hf-heuristic', 'hf-roc', 'moving-average',
                                  'payoff'])
def test_prove_has_controllers_that_learned(name):
    """What a controller has learned before a proof makes it draft other blocks in it."""
    target = Table(1, 2, weight=2.0)
    draft = Table(2, 2, prove.UNSURE)
    method = Exact(4, controller=name)
    settings = dict(temperature=1.0)
    control = prove.taught(method, target, draft, 4, settings)
    after = prove.blocks(control, method, target, draft, 4, settings)
    assert after != prove.blocks(method.control, method, target, draft, 4, settings)


@pytest.mark.parametrize('words, flags', [
    case('unknown', '--prove nope: there are ar, sd', ['nope']),
    case('another-flag', 'leave out --max-new, --prompt', ['sd', '--prompt', 'x', '--max-new', 3]),
    case('range', '--temperature -1.0: expected', ['sd', '--temperature', -1]),
    case('knob', '--set lenience=1: expected knob=value', ['sd', '--set', 'lenience=1']),
    case('gamma', '--gamma 2: no knob of ar', ['ar', '--gamma', 2]),
    case('oracle', '--prove sd: knob controller is oracle', ['sd', '--set', 'controller=oracle']),
    case('checker', '--prove rsd: this control grades steps', ['rsd']),
    case('calibration', "these knobs need ['sparse'] of", ['sparse', '--set', 'ffn_quantile=0.5']),
    case('ways', '--prove specguard: more than 80 ways to draw 1 token', ['specguard', '--set', 'k=9'])])
def test_prove_refuses_in_one_line(words, flags, short_proofs, capsys):
    refused(capsys, words, '--prove', *flags)


def test_prove_needs_the_lab(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(specmini, 'HERE', tmp_path)
    refused(capsys, '--prove needs the tables of the laboratory', '--prove', 'sd')


class Coin:
    """A uniform number that is not known yet: to compare it is to draw."""

    def __init__(self, draw):
        self.draw = draw

    def __lt__(self, chance):
        chance = min(1.0, float(chance))
        return bool(self.draw(torch.tensor([1 - chance, chance], dtype=torch.float64)))


@pytest.fixture
def shown_algorithm(capsys):
    """What the README's block of speculative sampling defines, once it has run as it stands."""
    readme = (HERE / 'README.md').read_text(encoding='utf-8')
    found = re.search(r'```python\n(# speculative\.py\n.*?)```', readme, re.DOTALL)
    if not found:
        pytest.skip('README.md has no block that begins with # speculative.py')
    names = {}
    exec(compile(found[1], 'README.md', 'exec'), names)
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == 21 and printed[0] == 0
    return names['speculative']


@pytest.mark.parametrize('gamma, vocab, horizon', [(1, 3, 2), (2, 2, 3)])
def test_readme_algorithm_is_exact(gamma, vocab, horizon, shown_algorithm, monkeypatch):
    """Every draw of the README's own block enumerated: texts and cycles have the law of Exact's."""
    tables = Table(1, vocab), Table(2, vocab)
    passes = Counter()

    def rows(ids, table):
        passes[table] += 1
        return torch.stack([table.row(tuple(ids[:i + 1].tolist())) for i in range(len(ids))])

    def run(s, method):
        passes.clear()
        monkeypatch.setattr(torch, 'rand', lambda *_: Coin(s.draw))
        monkeypatch.setattr(torch, 'multinomial', lambda p, _: s.draw(p))
        text = shown_algorithm(*[partial(rows, table=table) for table in tables], [0], gamma, horizon)
        monkeypatch.undo()
        by_target, by_draft = [passes[table] for table in tables]
        assert by_draft == gamma * by_target
        return text[1:] + [by_target], None

    def run_exact(s, method):
        tokens, cycles = write(s, method)
        return tokens + [len(cycles)], None
    law = enumerate_law(*tables, Exact(gamma), horizon, run=run)
    exact = enumerate_law(*tables, Exact(gamma), horizon, run=run_exact, temperature=1.0)
    assert variation(law, exact) < 1e-9


# ---------------------------------------------------------- what the README promises

def test_readme_commands():
    """The two commands that the README promises are there, and CI runs the second."""
    readme = (HERE / 'README.md').read_text()
    ci = (HERE / '.ci/run').read_text()
    run = 'pip install -r requirements.txt && python specmini.py --prompt'
    tests = 'pip install -r requirements.txt -r requirements-test.txt && python -m pytest -q'
    assert run in readme
    assert tests in readme
    assert 'python -m pytest -q' in ci


# ------------------------------------------------------------- what the README and the pages show

PAGES = ('README.md', 'lab/README.md', *(f'lab/{paper}/README.md' for paper in lab_claims.PAPERS))
NOT_HERE = '# (card)', '# (download)', '# (minutes)'       # what a page marks commands with that no test runs


def fences(page, *kinds):
    """The texts of a page's fenced blocks of these kinds, such as bash."""
    text = (HERE / page).read_text(encoding='utf-8')
    return [body for kind, body in re.findall(r'^```(\w+)\n(.*?)^```', text, re.S | re.M) if kind in kinds]


def shown_runs(page):
    """[(command, lines that it is shown to print)]: blocks of a page that begin with `$ command`."""
    found = []
    for body in fences(page, 'text'):
        if body.startswith('$ '):
            command, *lines = body[2:].splitlines()
            found.append((command, lines))
    return found


def run_command(command, folder, monkeypatch, capsys):
    """Runs `python ... [> FILE]`, as it stands on a page, in this process and this folder; what it prints."""
    program, *flags = shlex.split(command, comments=True)
    assert program == 'python', command
    *flags, file = flags if '>' in flags else (*flags, None)
    if file:
        flags.remove('>')
    if flags[0] == '-m':
        del flags[0]
    module = flags[0].removesuffix('.py')
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'argv', flags)
    monkeypatch.setattr(specmini, 'TIMING', 0.0)        # one round, where seconds are not looked at
    monkeypatch.setattr(specmini, 'ROUNDS', 1)
    try:
        if module == 'specmini':
            sys.exit(specmini.main())
        runpy.run_module(module, run_name='__main__')
    except SystemExit as end:
        assert not end.code, (command, capsys.readouterr().err)
    printed, _ = capsys.readouterr()
    if file:
        (folder / file).write_text(printed, encoding='utf-8')
    return printed


def assert_shown(lines, printed):
    """Each shown line is printed, in this order; `...` stands for any number, `# ` begins our remarks."""
    remark = re.compile(r'\s+# .*|\s+$')
    left = [remark.sub('', line) for line in printed]
    skipping = False
    for line in lines:
        line = remark.sub('', line)
        if line.strip() == '...':
            skipping = True
            continue
        place = left.index(line) if skipping and line in left else 0
        assert left and left[place] == line, f'shown {line!r}, printed {left[:3]}'
        del left[:place + 1]
        skipping = False
    assert skipping or not left, f'not shown: {left}'


ALL_SHOWN = [(page, *run) for page in PAGES for run in shown_runs(page)]


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('page, command, lines', ALL_SHOWN, ids=map(str, range(len(ALL_SHOWN))))
def test_shown_output_is_printed(page, command, lines, tmp_path, capsys, monkeypatch):
    """What a page shows below `$ command` is what that command prints today."""
    assert lines
    assert_shown(lines, run_command(command, tmp_path, monkeypatch, capsys).splitlines())


def test_shown_output_can_differ():
    """The comparison sees a changed line, a missing one and one too many."""
    assert_shown(['a', '...', 'c   # a remark'], ['a', 'b', 'b', 'c'])
    assert_shown(['a', '...'], ['a', 'b'])
    for shown, printed in ('a', 'b'), ('ab', 'a'), ('a', 'ab'), (['...', 'c'], 'ab'):
        with pytest.raises(AssertionError):
            assert_shown(list(shown), list(printed))


README_BLOCKS = fences('README.md', 'bash')
LAB_COMMANDS = [line for page in PAGES[1:] for block in fences(page, 'bash') for line in block.splitlines()]


def steps(line):
    """The commands of a line of a bash block, without those that install or download."""
    found = [step for step in line.split(' && ') if shlex.split(step, comments=True)]
    return [step for step in found if not step.startswith(('pip ', 'hf ')) and 'pytest' not in step]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*found in sys.modules')        # by a test that was here before
@pytest.mark.parametrize('block', README_BLOCKS, ids=map(str, range(len(README_BLOCKS))))
def test_commands_run(block, tmp_path, capsys, monkeypatch):
    """Every command of the README runs as it stands; those marked as needing more name flags that exist."""
    for line in block.splitlines():
        for step in steps(line):
            if any(mark in line for mark in NOT_HERE):
                assert_flags_exist(step, monkeypatch, capsys)
            else:
                run_command(step, tmp_path, monkeypatch, capsys)


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('line', dict.fromkeys(LAB_COMMANDS))
def test_commands_of_the_lab_exist(line, monkeypatch, capsys):
    """What the lab's pages say to run is there, with these flags; it measures for minutes, and is not run."""
    for step in steps(line):
        assert_flags_exist(step, monkeypatch, capsys)


def assert_flags_exist(command, monkeypatch, capsys):
    """Each --flag behind the program of a command is in that program's help."""
    words = shlex.split(command, comments=True)
    programs = [word for word in words if word.endswith('.py') or word.startswith('lab.')]
    own = words[words.index(programs[0]):]
    flags = [word for word in own if word.startswith('--')]
    if not flags:
        assert importlib.util.find_spec(own[0].removesuffix('.py')), own[0]
        return
    before = own[:own.index(flags[0])]
    printed = run_command(shlex.join(['python', *before, '--help']), HERE, monkeypatch, capsys)
    for flag in flags:
        assert re.search(rf'{flag}\b', printed), f'{flag} is no flag of {programs[0]}'


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r'^#+ (.*)', page.read_text(encoding='utf-8'), re.M)
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', [*PAGES, 'lab/course.md', 'lab/models/README.md'])
def test_links_lead_somewhere(page):
    """Files and headings of the repository that a page links to are there."""
    here = HERE / page
    text = re.sub(r'^```.*?^```|`[^`\n]*`', '', here.read_text(encoding='utf-8'), flags=re.S | re.M)
    for link in re.findall(r'\]\(([^)\s]+)\)', text):
        if link.startswith('http'):
            continue
        file, _, heading = link.partition('#')
        there = here.parent / file if file else here
        assert there.exists(), link
        assert not heading or heading in anchors(there), link


def test_readme_can_be_read():
    """It is no wall: as many lines and bytes as one reads at a sitting."""
    readme = (HERE / 'README.md').read_bytes()
    assert readme.count(b'\n') <= 350
    assert len(readme) <= 25_000


def test_worked_example_adds_up():
    """The README's table of four words is the rule that `verify` computes, and its last column is p."""
    readme = (HERE / 'README.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| (mat|rug|sofa|dog) \|(.*)\|$', readme, re.M)
    columns = torch.tensor([[float(cell) for cell in cells.split('|')] for _, cells in rows]).T
    q, p, kept, chance, more, rest, replaced, together = columns
    assert torch.allclose(kept, torch.minimum(p, q))
    assert torch.allclose(chance, (p / q).clamp(max=1), atol=0.005)
    assert torch.allclose(more, p - kept, atol=1e-6)
    assert torch.allclose(rest, verify.residual(p, q), atol=1e-6)
    assert torch.allclose(replaced, (1 - verify.overlap(p, q)) * rest, atol=1e-6)
    assert torch.allclose(together, kept + replaced)
    assert torch.allclose(together, p)


# ------------------------------------------------------------- the README, the lab's pages

def test_readme_from_python(capsys, monkeypatch):
    """The lines that the README shows run as they stand, and print a text, its cycles and a figure."""
    shown, = [body for body in fences('README.md', 'python') if body.startswith('from specmini')]
    assert shown.count('\n') <= 10
    monkeypatch.chdir(HERE)
    names = {}
    exec(shown, names)
    printed = capsys.readouterr().out
    assert names['text'] in printed
    tokens = verify.tokens_of(names['cycles'])
    assert names['engine'].tokenizer.decode(tokens) == names['text']
    assert float(printed.splitlines()[-1]) > 1


# ------------------------------------------------------------- lab/course.md: its exercises

COURSE = (HERE / 'lab/course.md').read_text()
SOLUTIONS = dict(enumerate(re.findall(r'Solution</summary>\n\n```python\n(.*?)```', COURSE, re.S), 1))


@pytest.mark.parametrize('number', range(1, 8))
def test_course_solutions_are_right(number, tmp_path, capsys):
    """As the page has them; nothing that they register is left."""
    answer = tmp_path / 'answer.py'
    answer.write_text(SOLUTIONS[number])
    before = METHODS.keys() | verify.CONTROLLERS.keys()
    assert len(SOLUTIONS) == len(course.EXERCISES) == 7
    assert course.main([str(number), str(answer)]) == 0
    assert f'exercise {number}: right\n' in capsys.readouterr().out
    assert METHODS.keys() | verify.CONTROLLERS.keys() == before


TO_FIVE = {'method, 6': 'method, 5', 'law(target, 6': 'law(target, 5'}     # tokens: quicker


@pytest.mark.parametrize('number, edits, reason', [
    case('1-keep', 1, {'keep = 0.2': 'keep = 0.3'}, 'keep is 0.7'),
    case('1-no-extra-token', 1, {'range(gamma + 1)': 'range(1, gamma + 1)'}, 'tokens_a_cycle'),
    case('2-nothing-broken', 2, {'return p': 'return super().replacement(p, q)'}, 'Broken writes a token'),
    case('2-promises', 2, {'lossless = False': 'pass'}, 'still promises'),
    case('2-not-halved', 2, {' / 2 ': ' '}, 'off is 0.24'),
    case('3-a-pass-too-many', 3, {'1 + gamma * cost': '1 + (gamma + 1) * cost'}, 'by the passes'),
    case('3-always-drafts', 3, {'range(17)': 'range(1, 17)'}, 'best_gamma(0.3, 0.3) is 1'),
    case('4-prediction', 4, {'sd_notices = False': 'sd_notices = True'}, 'sd_notices is True'),
    case('4-as-in-sd', 4, {'1, 2, 6, 7': '1, 2, 6'}, 'test_ids still passes'),
    case('4-same-path', 4, {'4], [], slim': '4], [], model.full'}, 'test_writers still passes'),
    case('4-fails', 4, {'model.full, 1)  ': 'slim, 1)'}, 'test_ids fails on your own code: answer, line'),
    case('5-no-room', 5, {'if not draft.tokens:': 'if False:'}, 'a block of 2 where one of 1 is due'),
    case('5-to-nothing', 5, {'max(1,': 'max(0,'}, 'a block of 0 where one of 1'),
    case('5-not-entered', 5, {'CONTROLLERS.update(doubling=Doubling)': ''}, 'is not registered'),
    case('5-drops-what-it-drew', 5, {'def learn': 'causal = False\n\n    def learn'}, 'not lossless'),
    case('5-short-horizon', 5, {'method, 6, run=run': 'method, 3, run=run'}, 'fails on your own code'),
    case('5-never-doubled', 5,
         TO_FIVE | {'Exact(1, c': 'Exact(2, c', '[:4] == (1, 2, 1, 1)': '[:2] == (2, 1)'},
         'passes if no block is ever doubled'),
    case('5-never-halved', 5, TO_FIVE | {'[:4] == (1, 2, 1, 1)': '[:2] == (1, 2)'},
         'passes if no block is ever halved'),
    case('5-no-law', 5, TO_FIVE | {'[:4] == (1, 2, 1, 1)': '[:2] == (1, 2)', '< 1e-9': '< 1'},
         'the residual is wrong'),
    case('6-promises', 6, {'return False': 'return self.k == 1'}, 'at k=1 it promises'),
    case('6-one-hot', 6, {'score.logits[i]': 'score.p[i]'}, 'temperature 0.0'),
    case('6-any-draft', 6, {'texts[0] == wanted !=': 'wanted !='}, 'passes if every guess is kept'),
    case('7-whole', 7, {'range(first, sublayers)': '()'}, 'leaves out sublayers'),
    case('7-promises-nothing', 7, {'def guess': 'lossless = False\n\n    def guess'}, 'may promise'),
    case('7-nothing-drafted', 7, {'method, 3,': 'method, 1,'}, 'fails on your own code'),
    case('7-no-law', 7, {' and variation': ' or variation'}, 'the early path verifies, too')])
def test_course_wrong_answers_are_refused(number, edits, reason):
    """Each says why; those of tests pass on the right code, and notice nothing."""
    answer = SOLUTIONS[number]
    for right, wrong in edits.items():
        assert right in answer
        answer = answer.replace(right, wrong)
    assert reason in course.check(number, answer)


def test_course_law_test_of_a_method(monkeypatch):
    """The line that the page adds to LAWS passes, and is the one that its -k selects."""
    monkeypatch.delitem(METHODS, 'early', raising=False)        # puts back that there is none
    exec(SOLUTIONS[7], {})
    line, = re.findall(r"    (law\('early'.*), *\n", COURSE)
    one = eval(line)
    assert one.id == 'early' and '-k "test_law and early"' in COURSE
    test_law(*one.values)


@pytest.mark.parametrize('wrong', [course.trusts_any_id, course.trusts_any_writer])
def test_course_names_tests_that_find_a_wrong_cache(wrong, monkeypatch):
    """The page's -k runs two; each way to trust too much fails one of them at least."""
    assert '-k "caches_after_each_cycle or tiers_ask_slim_only"' in COURSE
    monkeypatch.setattr(KVCache, 'trusted', wrong)
    with pytest.raises(AssertionError):
        test_caches_after_each_cycle()
        test_specguard_tiers_ask_slim_only_where_the_draft_doubts()


@pytest.mark.parametrize('number, text, status, said', [
    case('no-exercise', '8', None, 2, 'exercise 8: expected 1 to 7'),
    case('no-number', 'one', None, 2, 'expected NUMBER FILE'),
    case('no-file', '1', None, 2, 'expected a Python file'),
    case('not-python', '1', 'keep = = 1\n', 1, 'line 1: SyntaxError'),
    case('nothing-in-it', '1', '', 1, 'your file defines no keep'),
    case('no-number-in-it', '1', "keep = 'most'\ntokens_a_cycle = max\n", 1, 'keep is most'),
    case('breaks-off', '1', 'keep = 0.6\ndef tokens_a_cycle(keep, gamma):\n    1 / 0\n', 1, 'line 3: Zero')])
def test_course_says_what_is_wrong_with_a_file(number, text, status, said, tmp_path, capsys):
    path = tmp_path / 'answer.py'
    if text is not None:
        path.write_text(text)
    assert course.main([number, str(path)]) == status
    found = capsys.readouterr()
    assert said in found.out + found.err


# ---------------------------------------------------------- lab/best: compositions

def test_best_counts_every_pass_and_position():
    """A real cycle drafts a token a pass behind what it catches up with, and verifies them in one."""
    (prompt, *_) = best_record.prompts_of(pairs.EMBEDDED, 1)
    session = pairs.EMBEDDED.session(prompt.ids)
    cycles = pairs.EMBEDDED.written(session, prompt.ids, Exact(4))
    counts = best_record.passes_of(cycles)
    for path in ('draft/full', 'target/full'):
        passes = sum(cycle.passes[path][0] for cycle in cycles)
        positions = sum(cycle.passes[path][1] for cycle in cycles)
        assert counts[path].total() == passes
        assert sum(n * count for n, count in counts[path].items()) == positions
    costs = best_claims.Costs(dict(draft=1.0, target=[0.0, 4.0, 5.0], slim=0.5, lossless=[]))
    run = dict(passes={'draft/full': {'1': 8}, 'target/full': {'2': 2}, 'target/slim': {'1': 2}})
    assert costs.run(run) == 8 * 0.25 + 2 * 1.25 + 2 * 0.5
    assert costs.of_positions(4) == 2 * 1.25                    # longer than any that was measured


def test_best_counts_what_the_target_would_not_have_written():
    """Nothing of its own greedy text; and each token that is another's favourite."""
    (prompt, *_) = best_record.prompts_of(pairs.EMBEDDED, 1)
    session = pairs.EMBEDDED.session(prompt.ids)
    own = pairs.EMBEDDED.own_text(prompt.ids)
    assert best_record.wrong_tokens(session, prompt.ids, own) == 0
    assert best_record.wrong_tokens(session, prompt.ids, own[:-1] + [own[-1] + 1]) == 1
    exact = pairs.EMBEDDED.written(session, prompt.ids, best_record.Ratio(tau=1))
    assert verify.tokens_of(exact) == own


def compositions(paces, places=4):
    """Stored records of texts of one family: paces, {setting: [tokens in 10 steps of each text]}."""
    rows = []
    for place in range(places):
        runs = {}
        for name, tokens in paces.items():
            passes = {'target/full': {'1': 10}}
            runs[name] = dict(tokens=tokens[place], wrong=int('loose' in name), seconds=1.0, passes=passes)
        rows.append(dict(family='x', place=place, runs=runs))
    costs = dict(draft=1.0, target=[0.0, 1.0], slim=1.0, lossless=[name for name in paces if name != 'loose'])
    return {'costs': common.Stored({}, [costs]), 'compositions': common.Stored({}, rows)}


def test_best_pays_for_its_choice():
    """What is best on one half by luck is judged on the other, where it is no gain."""
    lucky = {'sd 4': [10, 10, 10, 10], 'even': [50, 10, 50, 10], 'odd': [10, 50, 10, 50]}
    runs = best_claims.runs_of(compositions(lucky))
    assert runs.speed(1.0, 'steps', range(4)) == 1.0
    sound = best_claims.runs_of(compositions(lucky | {'good': [20, 60, 20, 60], 'sd 2': [9, 9, 9, 9]}))
    assert sound.speed(1.0, 'steps', range(4)) == pytest.approx(math.sqrt(1.0 * 2.0))


def test_best_asks_for_agreement():
    """One wrong token in 50 is allowed at 95 % and not at 99; a text without another half tells nothing."""
    runs = best_claims.runs_of(compositions({'sd 4': [10] * 4, 'loose': [50] * 4}))
    assert runs.speed(0.95, 'steps', range(4)) == pytest.approx(5.0)
    assert runs.speed(0.99, 'steps', range(4)) == 1.0
    assert math.isnan(runs.speed(0.95, 'steps', [0, 2]))


@pytest.mark.slow
@pytest.mark.parametrize('paper', lab_claims.PAPERS)
def test_committed_page_is_of_the_committed_rows(paper):
    """Figures, verdicts and tables of a page are what its stored rows give today."""
    page = lab_claims.page_of(paper, lab_claims.all_findings(paper))
    assert page == lab_claims.page_file(paper).read_text(encoding='utf-8')


def test_scoreboard_has_each_paper():
    """lab/README.md has every verdict that a page has, in its claim's line; README.md none but these."""
    score = (HERE / 'lab/README.md').read_text(encoding='utf-8')
    judged = r'^\| (.*?) \| (?:paper|notes|ours) \| (\S+) \| .* \| (HOLDS|FAILS|UNDECIDED) \|'
    for paper in lab_claims.PAPERS:
        page = lab_claims.page_file(paper).read_text(encoding='utf-8')
        found = re.findall(judged, page, re.M)
        assert found
        for claim, number, verdict in found:
            line, = re.findall(rf'^\| \[{paper}\][^|]*\| {re.escape(claim)} \|.*', score, re.M)
            assert f'| {verdict} {number} |' in line
        listed = re.findall(rf'^\| \[{paper}\].*', score, re.M)
        assert sum(len(re.findall('HOLDS|FAILS|UNDECIDED', line)) for line in listed) == len(found)
    readme = (HERE / 'README.md').read_text(encoding='utf-8')
    for paper, claim in lab_claims.HEADLINES:
        line, = re.findall(rf'^\| {paper} \| {re.escape(claim)} \|.*', readme, re.M)
        listed, = re.findall(rf'^\| \[{paper}\][^|]*\| {re.escape(claim)} \|.*', score, re.M)
        verdicts = re.findall('HOLDS|FAILS|UNDECIDED', line)
        assert verdicts and verdicts == re.findall('HOLDS|FAILS|UNDECIDED', listed)


def test_interval_by_hand():
    """Rows that are alike have an interval without width; a mean's holds it, about as wide as theory says."""
    rows = [dict(x=float(i % 2)) for i in range(400)]

    def mean_x(some):
        return common.mean(row['x'] for row in some)
    figure, low, high = common.interval(rows, mean_x)
    assert figure == 0.5
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.2)
    assert common.interval(rows[::2], mean_x) == (0, 0, 0)


@pytest.mark.parametrize('low, high, verdict', [
    (1.0, 2.0, 'HOLDS'), (0.5, 0.9, 'FAILS'), (0.9, 1.0, 'UNDECIDED'), (math.nan, math.nan, 'UNDECIDED')])
def test_verdicts(low, high, verdict):
    """The claim says: at least 1."""
    claim = common.Claim('', '', 1.0, [], None, why='because.', note='n = 3.')
    found = common.Finding(claim, 0.9, low, high)
    assert found.verdict == verdict
    assert found.remark == ('n = 3. Presumably: because.' if verdict == 'FAILS' else 'n = 3')


def test_stored_rows_are_read_as_written(monkeypatch, tmp_path):
    """Floats to five digits, nan as None; nobody measured is said in a line."""
    monkeypatch.setattr(common, 'LAB', tmp_path)
    rows = [dict(a=1.23456789, b=[math.nan, 2], c={3: True})]
    common.store('paper', 'rows', common.header('rows', 7, ['draft']), iter(rows))
    stored = common.read_stored('paper', 'rows')
    assert stored.rows == [dict(a=1.2346, b=[None, 2], c={'3': True})]
    assert stored.head['n'] == 7 and len(stored.head['models']['draft']) == 16
    with pytest.raises(ValueError, match='not measured yet; python -m lab.claims paper does'):
        common.read_stored('paper', 'others')


# ------------------------------------------------------------- claims on a pair of somebody else's

FOREIGN_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}<s>"


def foreign_checkpoint(folder, seed, layers):
    """A folder as transformers saves it: a random qwen2 network, a tokenizer of words, a chat template."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2)
    theirs = transformers.Qwen2ForCausalLM(config)
    for weight in theirs.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(folder)
    words = ['<unk>', '<s>', '<e>', '\n', '.', *map(str, range(40))]
    words += [f'w{i}' for i in range(96 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(' ', 'removed'), pre_tokenizers.Split('\n', 'isolated')])
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'chat_template.jinja').write_text(FOREIGN_TEMPLATE)


@pytest.fixture(scope='module')
def foreign(tmp_path_factory):
    """The flags of `lab.claims` for a pair that knows nothing of the lab, and its prompts; it has a mask."""
    home = tmp_path_factory.mktemp('foreign')
    for name, seed, layers in (('big', 0, 5), ('small', 1, 2)):
        foreign_checkpoint(home / name, seed, layers)
    rows = []
    for i in range(30):
        rows.append(dict(question=f'w1 {i} w2 {i + 3} w4 w5 . w6 w7 .', answer=f'w1 {i} w2 .\n#### {i + 3}'))
        rows.append(dict(category='prose', turns=[f'w{i} w9 w10 w11 . w12']))
    prompts = home / 'rows.jsonl'
    prompts.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    with contextlib.redirect_stdout(io.StringIO()):
        found = train_mask.main(['--target', str(home / 'big'), '--prompts', str(prompts), '--chat',
                                 '--windows', '2', '--window', '8', '--evaluations', '3'])
    assert found == 0
    return SimpleNamespace(
        flags=['--target', str(home / 'big'), '--prompts', str(prompts), '--chat', '--max-new', '16',
               '--device', 'cpu', '--n', '2'],
        draft=['--draft', str(home / 'small')])


def run_claims(monkeypatch, *flags):
    """The exit status of lab.claims with these flags."""
    monkeypatch.setattr(sys, 'argv', ['lab.claims', *flags])
    return lab_claims.main()


@pytest.mark.slow
def test_processes_share_a_recording(foreign, monkeypatch, tmp_path):
    """The file is that of one process, whoever measured its rows; what the lab alone can do is told once."""
    def row(pair, prompt):
        return dict(prompt.name, text=pair.own_text(prompt.ids), process=os.environ.get('RANK'))
    def items(pair, n):                                 # each twice, for both processes at the same time
        return [prompt for prompt in pair.texts((), n) for _ in range(2)]
    records = dict(texts=Record(items, row, drafts=False),
                   other=lab_claims.part('ecsv', 'record').RECORDS['fits'])
    monkeypatch.setattr(lab_claims, 'part', lambda paper, name: SimpleNamespace(RECORDS=records))
    stored = []
    for kind in ('one', 'two'):
        for module in (common, lab_claims, pairs):
            monkeypatch.setattr(module, 'LAB', tmp_path / kind)
        if kind == 'one':
            assert run_claims(monkeypatch, 'ecsv', *foreign.flags) == 0
        else:
            found = together(tmp_path, lambda rank: run_claims(monkeypatch, 'ecsv', *foreign.flags))
            (first, _, said), *others = found
            assert first == 0 and 'ecsv other: left out' in said and others == [(0, '', '')]
        stored.append(common.read_stored('ecsv', 'texts', 'big'))
    (head, alone), (same, shared) = stored
    assert head == same and [row.pop('process') for row in shared] == ['0', '1'] * 4
    assert [row.pop('process') for row in alone] == [None] * 8 and alone == shared
    assert len(list((tmp_path / 'two' / 'ecsv' / 'results' / 'big').iterdir())) == 1


def test_a_text_that_two_processes_remember_at_once(foreign, monkeypatch, tmp_path):
    """The other one writes it whole between our writing and our naming."""
    monkeypatch.setattr(pairs, 'LAB', tmp_path)
    pair = Pair(target=foreign.flags[1], draft='', prompts=(foreign.flags[3],), max_new=4)
    replace_file = os.replace
    others = []

    def replace_late(new, file):
        monkeypatch.setattr(os, 'replace', replace_file)
        others.extend(together(tmp_path, lambda rank: print(pair.own_text([5, 6])), 1))
        replace_file(new, file)
    monkeypatch.setattr(os, 'replace', replace_late)
    text = pair.own_text([5, 6])
    assert others == [(0, f'{text}\n', '')] and pair.own_text([5, 6]) == text


def test_a_record_of_the_lab_is_the_first_process_s(monkeypatch, tmp_path):
    monkeypatch.setattr(common, 'LAB', tmp_path)

    def rows(n):
        print('measured')
        yield dict(n=n)

    def run(rank):
        specmini.join_ranks('cpu', 'gloo')
        sys.stdout = sys.__stdout__                     # who measures is seen
        lab_claims.measure_in_lab('paper', 'rows', pairs.LabRecord(('draft',), rows, ''), 3, False)
        specmini.leave_ranks()
    assert together(tmp_path, run) == [(0, 'measured\n', ''), (0, '', '')]
    assert common.read_stored('paper', 'rows').rows == [dict(n=3)]


@pytest.mark.slow
@pytest.mark.parametrize('paper, drafts', [*((paper, True) for paper in lab_claims.PAPERS), ('via', False)])
def test_claims_on_a_foreign_pair(paper, drafts, foreign, monkeypatch, tmp_path, capsys):
    """All that any pair can have is measured, stored by its name, not anew with --resume, and judged."""
    pair = 'big with small' if drafts else 'big'
    flags = foreign.flags + foreign.draft * drafts
    shutil.copytree(common.LAB / paper, tmp_path / paper)
    for module in (common, lab_claims, pairs):
        monkeypatch.setattr(module, 'LAB', tmp_path)
    monkeypatch.setattr(sparse_record, 'LENGTHS_ELSEWHERE', (256,))
    assert run_claims(monkeypatch, paper, *flags) == 0
    said = capsys.readouterr().err
    for name, record in lab_claims.part(paper, 'record').RECORDS.items():
        there = common.file_of(paper, name, pair).exists()
        assert there == (isinstance(record, Record) and (drafts or not record.drafts))
        assert there != (f'{paper} {name}: left out, it needs' in said)
    stored = lab_claims.stored_records(paper, pair)
    assert stored and all(record.rows for record in stored.values())
    assert run_claims(monkeypatch, paper, *flags, '--resume') == 0
    assert capsys.readouterr().err.count('measured already') == len(stored)
    assert pair in common.measured_pairs(paper)
    findings = lab_claims.findings_of(paper, pair)
    page = lab_claims.page_of(paper, {pair: findings})
    assert findings and f'\n## {pair}\n' in page and findings[0].claim.text in page


def test_a_record_grows_and_goes_on(tmp_path, capsys):
    """Rows are there as soon as they are measured; half a line is none; another head begins anew."""
    where = tmp_path / 'rows.jsonl'
    head = dict(record='rows', n=3)

    def broken_off(item):
        if item == 2:
            raise KeyboardInterrupt
        return dict(x=item)
    with pytest.raises(KeyboardInterrupt):
        common.grow(where, head, [0, 1, 2], broken_off)
    part = where.with_suffix('.part0')
    _, *lines = part.read_text().splitlines()
    assert [json.loads(line)[1:] for line in lines] == [[0, dict(x=0)], [1, dict(x=1)]]
    part.write_text(part.read_text()[:-4])                      # a kill in the middle of a line
    asked = []

    def row_of(item):
        asked.append(item)
        return dict(x=item)
    common.grow(where, head, [0, 1, 2], row_of, resume=True)
    assert asked == [1, 2] and not part.exists()
    first, *rows = map(json.loads, where.read_text().splitlines())
    assert rows == [dict(x=0), dict(x=1), dict(x=2)]
    assert first.items() > head.items() and first['date']
    common.grow(where, head, [0, 1, 2], row_of, resume=True)
    assert asked == [1, 2] and 'measured already' in capsys.readouterr().err
    common.grow(where, head | dict(n=2), [0, 1], row_of, resume=True)
    assert asked == [1, 2, 0, 1]


# ------------------------------------------------------------- files, whole or not at all

def in_a_fork(work):
    """The id of a forked process that does this over and over, counting from 1; it has begun."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(sender, b'.')
        for i in itertools.count(1):
            work(i)
    os.read(receiver, 1)
    os.close(receiver)
    os.close(sender)
    return process


def killed(works, seconds):
    """Lets processes of their own do each of these works, and kills them after so many seconds."""
    processes = [in_a_fork(work) for work in works]
    time.sleep(seconds)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def written_files(folder):
    """{what is written: (function that writes its i-th version, function that reads what is there)}."""
    many = range(3000)

    def calibrate(i):
        write_calibration(folder, 'mask', dict(cost=[i for _ in many]))

    def calibrated():
        return json.loads((folder / 'calibration.json').read_text())['mask']['cost']

    def store(i):
        common.store('paper', 'rows', {}, [dict(i=i) for _ in many])
    return dict(
        calibration=(calibrate, calibrated),
        state=(lambda i: files.save_state(folder / 'state', torch.full((9000,), i)),
               lambda: torch.load(folder / 'state').tolist()),
        weights=(lambda i: files.save_weights(folder / 'weights', dict(a=torch.full((9000,), i))),
                 lambda: safetensors.load_file(folder / 'weights')['a'].tolist()),
        record=(store, lambda: [row['i'] for row in common.read_stored('paper', 'rows').rows]))


@pytest.mark.parametrize('kind', ['calibration', 'state', 'weights', 'record'])
def test_a_kill_leaves_files_whole(kind, tmp_path, monkeypatch):
    """One writer or two at once, killed somewhere: what is there is one version, all of it."""
    monkeypatch.setattr(common, 'LAB', tmp_path)
    write, read = written_files(checkpoint(tmp_path))[kind]
    write(0)
    length = len(read())
    for n in range(4):
        killed([write] * (1 + n % 2), random.Random(n).uniform(0.01, 0.04))
        found = read()
        assert len(found) == length and len(set(found)) == 1


def test_two_processes_put_in_their_sections(tmp_path):
    """Neither takes back what the other has written meanwhile."""
    folder = checkpoint(tmp_path)

    def put_in(section):
        for i in range(15):
            write_calibration(folder, section, dict(last=i))
    processes = [multiprocessing.get_context('fork').Process(target=put_in, args=[name]) for name in 'ab']
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = json.loads((folder / 'calibration.json').read_text())
    assert found['a']['last'] == found['b']['last'] == 14


def test_two_processes_do_not_measure_one_record(tmp_path):
    """The second is refused while the first is at it, and the first one's rows stay."""
    where = tmp_path / 'rows.jsonl'

    def row_of(item):
        with pytest.raises(ValueError, match='another process has this file'):
            common.grow(where, dict(n=2), [0, 1], lambda item: dict(x=-1))
        return dict(x=item)
    common.grow(where, dict(n=2), [0, 1], row_of)
    rows = [json.loads(line) for line in where.read_text().splitlines()[1:]]
    assert rows == [dict(x=0), dict(x=1)]


@contextlib.contextmanager
def small_files():
    """No file can grow beyond 4 KB: what a full disk does, but for the error's number."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize('kind', ['calibration', 'state', 'weights', 'record'])
def test_a_full_disk_is_an_error_of_the_system(kind, tmp_path, monkeypatch):
    """OSError, which every program tells in one line; nothing half-written stays."""
    monkeypatch.setattr(common, 'LAB', tmp_path)
    folder = checkpoint(tmp_path / 'a')
    write, _ = written_files(folder)[kind]
    with small_files(), pytest.raises(OSError):
        write(10 ** 6)
    assert not list(tmp_path.rglob('.unfinished-*')) and len(list(folder.iterdir())) == 3


def test_a_trace_is_whole_or_absent(pair, tmp_path, capsys, monkeypatch):
    """While the run goes on it is not there; broken off by an error, it has the texts before that."""
    trace = tmp_path / 'trace.jsonl'
    prompts = tmp_path / 'prompts.jsonl'
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    real = specmini.report

    def report(engine, name, method, session, row, cycles):
        assert not trace.exists()
        if row['prompt'] == 'b':
            raise ValueError('enough')
        return real(engine, name, method, session, row, cycles)
    monkeypatch.setattr(specmini, 'report', report)
    status, _, err = program(capsys, *pair[:4], '--prompts', prompts, '--max-new', 9, '--trace', trace)
    assert status == 2 and err.endswith('specmini: enough\n')
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert rows and {row['prompt'] for row in rows} == {0}
    assert {file.name for file in tmp_path.iterdir()} == {'trace.jsonl', 'prompts.jsonl'}


@pytest.mark.parametrize('name', ['run.jsonl', 'run.html'])
def test_a_refused_run_leaves_an_older_trace(name, pair, tmp_path, capsys):
    trace = tmp_path / name
    trace.write_text('good')
    refused(capsys, 'grades steps', *pair[:4], '--prompt', 'x', '--method', 'rsd', '--trace', trace)
    assert trace.read_text() == 'good' and len(list(tmp_path.iterdir())) == 1


def test_a_run_keeps_no_notes_of_texts_that_are_traced(pair, tmp_path, monkeypatch, capsys):
    told = []
    tell = specmini.Teller.tell

    def watching(teller, *args):
        told.append([cycle.notes != {} for cycle in teller.cycles])
        tell(teller, *args)
        told.append([cycle.notes != {} for cycle in teller.traces[-1]])
    monkeypatch.setattr(specmini.Teller, 'tell', watching)
    assert program(capsys, *pair[:6], '--max-new', 4, '--trace', tmp_path / 'run.jsonl')[0] == 0
    before, after = told
    assert before and all(before) and not any(after)


def test_measured_pairs_are_no_unfinished_ones(tmp_path, monkeypatch):
    """A killed writer leaves its folder, and the rows in it."""
    monkeypatch.setattr(common, 'LAB', tmp_path)
    for name in ('big', '.unfinished-x'):
        home = tmp_path / 'paper' / 'results' / name
        home.mkdir(parents=True)
        (home / 'texts.jsonl').touch()
    assert common.measured_pairs('paper') == ['big']


def test_a_trace_goes_to_devices_and_links_as_they_are(pair, tmp_path, capsys):
    real = tmp_path / 'real'
    link = tmp_path / 'link'
    link.symlink_to(real)
    for where in (link, os.devnull):
        assert program(capsys, *pair[:6], '--max-new', 2, '--trace', where)[0] == 0
    assert link.is_symlink() and real.read_text().count('\n') >= 1
    assert not File(os.devnull).is_file()


def test_a_full_disk_is_told_in_one_line(pair, capsys):
    _, _, err = program(capsys, *pair[:6], '--max-new', 2, '--json', '--trace', '/dev/full')
    assert err.splitlines()[-1] == 'specmini: [Errno 28] No space left on device'


def test_where_nobody_listens(pair, monkeypatch):
    """A closed stderr is not mixed into the text; a full one ends the run, without a traceback."""
    flags = [*map(str, pair[:6]), '--max-new', '2']
    said = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', said)
        patch.setattr(sys, 'stderr', None)
        assert specmini.main(flags) == 0
        sys.stderr.close()
    assert 'tokens/s' not in said.getvalue()
    full = open('/dev/full', 'w', buffering=1)
    monkeypatch.setattr(sys, 'stderr', full)
    assert specmini.main(flags) == 2
    with contextlib.suppress(OSError):
        full.close()


# ------------------------------------------------------------- lab/endurance.py: long runs

TO_REPEAT = [case(name, name, slow=name not in QUICK) for name in METHODS]


@pytest.fixture(scope='module')
def embedded_for_all():
    """(an Engine that every method can use, ids of two prompts)."""
    return endurance.embedded_engine(12, endurance.mixed_prompts(2))


@pytest.mark.parametrize('name', TO_REPEAT)
def test_the_same_seed_writes_the_same_text(name, embedded_for_all):
    """Also after another text: nothing of that is left over."""
    engine, (first, second) = embedded_for_all
    wanted = tokens_of(cuda.written(engine, first, name, 0.8))
    cuda.written(engine, second, name, 0.8)
    assert tokens_of(cuda.written(engine, first, name, 0.8)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sd', 'ecsv', 'via 0.0', 'hedge'])
def test_a_long_text_is_plain_decoding_s(name):
    """200 tokens past the end of sequence: each is what plain decoding writes there, but for near ties."""
    engine, (ids,) = endurance.embedded_engine(200, endurance.mixed_prompts(1), ignore_eos=True)
    method = dict(endurance.exact_methods())[name]
    tokens = tokens_of(engine.write(ids, method))
    assert len(tokens) == 200
    assert max(endurance.departures(engine, ids, tokens), default=0) < endurance.TIE


def test_departures_are_counted_one_by_one(embedded_for_all):
    """Behind a wrong token the rest is judged as plain decoding goes on from it."""
    engine, (ids, _) = embedded_for_all
    engine.temperature = 0.0
    own = tokens_of(engine.write(ids, METHODS['ar']()))
    assert endurance.departures(engine, ids, own) == []
    wrong = (own[4] + 1) % 1024
    rest = tokens_of(engine.write(ids + own[:4] + [wrong], METHODS['ar']()))[:5]
    gap, = endurance.departures(engine, ids, own[:4] + [wrong] + rest)
    assert gap > endurance.TIE


@pytest.mark.slow
def test_memory_that_grows_is_seen(monkeypatch, capsys):
    """A method that keeps 2,000 tensors a text; one that keeps nothing."""
    kept = []
    real = endurance.written

    def leaking(engine, ids, name):
        if name == 'sd':
            kept.extend(torch.zeros(2000, 1))
        return real(engine, ids, 'ar')
    monkeypatch.setattr(endurance, 'METHODS', dict(ar=1, sd=1))
    monkeypatch.setattr(endurance, 'written', leaking)
    monkeypatch.setattr(endurance, 'EARLY', 2)
    assert endurance.endurance(6) == 1
    ar, sd = capsys.readouterr().out.splitlines()[2:]
    assert ar.endswith('ok |') and sd.endswith('GROWS |')


@pytest.mark.parametrize('flags, said', [
    (['--target', 'nowhere'], 'both'),
    (['--chat'], 'both'),
    (['--max-new', '20'], 'both'),
    (['--target', 'absent', '--prompts', str(HERE / 'README.md')], 'README.md line 1'),
    (['--target', str(EMBEDDED / 'target'), '--prompts', 'nowhere.jsonl'], 'nowhere.jsonl')])
def test_claims_refuse_what_is_no_pair(flags, said, monkeypatch, capsys):
    refused_by_claims(flags, said, monkeypatch, capsys)


def test_claims_refuse_a_single_prompt(tmp_path, monkeypatch, capsys):
    file = tmp_path / 'one.jsonl'
    file.write_text('{"prompt": "Mia has 2 pens."}')
    flags = ['--target', str(EMBEDDED / 'target'), '--prompts', str(file)]
    refused_by_claims(flags, 'expected 2', monkeypatch, capsys)


def refused_by_claims(flags, said, monkeypatch, capsys):
    """lab.claims refuses these flags in one line that says so."""
    assert run_claims(monkeypatch, 'cmasd', *flags) == 2
    line = capsys.readouterr().err
    assert said in line and line.count('\n') == 1


# ------------------------------------------------------------- the embedded models

@pytest.mark.slow
@pytest.mark.parametrize('name', ['target', 'draft', 'moe'])
def test_transformers_loads_the_embedded_models(name):
    """With the same ids, end of sequence and logits."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED / name, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED / name)
    ours, tokenizer, eos = load(EMBEDDED / name)
    text = 'Mia has 27 pens. Mia buys 9 more.'
    ids = their_tokenizer(text)['input_ids']
    assert ids == tokenizer.encode(text).ids
    assert eos == {their_tokenizer.eos_token_id}
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert apart(fresh(ours, ids), wanted) < 1e-3


def parameters(name):
    """The number of parameters of an embedded model."""
    model, _, _ = load(EMBEDDED / name)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.slow
def test_sizes_of_the_embedded_models():
    """8 M parameters at most; the draft has at most an eighth of its target's."""
    target = parameters('target')
    assert target <= 8e6 and parameters('moe') <= 8e6
    assert 8 * parameters('draft') <= target


EACH_TASK = [case(name, name, slow=name != 'qa') for name in tasks.TASKS]


@pytest.mark.parametrize('task', EACH_TASK)
def test_embedded_pair_is_lossless(task):
    """sd writes plain decoding's text on held-out rows, fp32; it may differ where the top-2 gap is < 1e-4."""
    target, tokenizer, eos = load(EMBEDDED / 'target')
    draft, _, _ = load(EMBEDDED / 'draft')
    for seed in range(2):
        row = next(tasks.rows(task, seed))
        ids = tokenizer.encode(row['prompt']).ids
        wanted = plain(target, ids, 80, eos=eos)
        s = session(target, draft, ids, 80, eos=eos)
        got, _ = write(s, Exact(4))
        if got != wanted:
            same = os.path.commonprefix([got, wanted])
            logits = fresh(target, ids + same, 1)[0]
            best, second = logits.topk(2).values
            assert best - second < 1e-4


# ------------------------------------------------------------- generated input: it runs, or is refused

# HYPOTHESIS_PROFILE=many python -m pytest -n 0 -rP -k cases_of: ten times as many cases, others each time.
settings.register_profile('few', max_examples=100, derandomize=True, deadline=20_000, database=None)
settings.register_profile('many', max_examples=1000, deadline=20_000, database=None)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'few'))


def each_case(kind, strategy, check, share=1):
    """Runs check(case) on generated cases, and prints how many of them had each outcome that it returns.

    share: how many times the profile's number they are. Of each two outcomes there must be one in fifty.
    """
    n = share * settings().max_examples
    outcomes = Counter()

    @settings(max_examples=n)
    @hypothesis.given(strategy)
    def run(case):
        outcomes[check(case)] += 1
    run()
    print(f'{kind}: {outcomes.total()} cases, {dict(outcomes)}')
    assert outcomes.total() >= n
    assert len(outcomes) == 2 and min(outcomes.values()) * 50 > n, outcomes


def outcome_of(function, *args):
    """'runs', or 'refused' for a ValueError that says something; whatever else is raised is a finding."""
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        try:
            function(*args)
        except ValueError as error:
            assert str(error).strip() and type(error) is ValueError, repr(error)
            return 'refused'
    return 'runs'


ODD = some.sampled_from([None, True, 0, -1, 0.5, 2 ** 31, 2 ** 63, 10 ** 400, 1e-320, 1e308, math.nan,
                         math.inf, 'x', '', [], [1], {}, '../x'])


def mostly(strategy, times=12, odd=ODD):
    """One of the strategy, but an odd value once in so many times."""
    return some.integers(1, times).flatmap(lambda i: odd if i == times else strategy)


def numbers(least, greatest):
    """Whole and broken numbers of this range, small ones as often as large ones."""
    def broken(x):
        return min(max(math.exp(x), least), greatest)

    def whole(x):
        return math.ceil(broken(x))
    logs = some.floats(math.log(least), math.log(greatest))
    return logs.map(broken) | logs.map(whole)


ORIGINAL = 'original_max_position_embeddings'
ZERO = ODD | some.just(0)        # which some options take for absent
ROTARY = some.fixed_dictionaries(
    dict(rope_type=some.sampled_from(['default', 'linear', 'llama3', 'yarn', 'yarn']),
         factor=mostly(numbers(1, 100), 30), low_freq_factor=mostly(numbers(0.01, 10), 30),
         high_freq_factor=mostly(numbers(0.1, 100), 30)),
    optional=dict(
        beta_fast=mostly(numbers(0.01, 100), 20, ZERO), beta_slow=mostly(numbers(0.01, 10), 20, ZERO),
        mscale=mostly(numbers(0.01, 10), 20, ZERO), mscale_all_dim=mostly(numbers(0.01, 10), 20, ZERO),
        attention_factor=mostly(numbers(0.01, 10), 4, ZERO), truncate=mostly(some.booleans(), 30),
        rope_theta=mostly(numbers(1.01, 1e9), 30), original_max_position_embeddings=numbers(2, 1e6)))
AROUND = some.fixed_dictionaries(       # what stands in the config beside them
    dict(max_position_embeddings=some.integers(2, 10 ** 6), head_dim=some.sampled_from([2, 4, 64, 128])),
    optional=dict(rope_theta=numbers(2, 1e6), original_max_position_embeddings=numbers(2, 1e6)))
PLACES = some.sampled_from([['rope_scaling'], ['rope_parameters'], ['rope_scaling', 'rope_parameters']])


def rotary_config(words, around, places, name_of_type):
    """The object of a config.json with these settings where transformers 4 or 5 has them, or both."""
    raw = dict(model_type='llama', hidden_size=16, num_attention_heads=4, vocab_size=64, intermediate_size=24,
               num_hidden_layers=2) | around
    words = dict(words)
    words[name_of_type] = words.pop('rope_type')
    for place in places:
        raw[place] = words
        words = dict(rope_type='linear', factor=3.0)            # the second one is not looked at
    return raw


TYPE_NAMES = some.sampled_from(['rope_type', 'type'])
ROTARY_CONFIGS = some.builds(rotary_config, ROTARY, AROUND, PLACES, TYPE_NAMES)


def makes_sense(raw):
    """Whether each number that the rope type asks for is one, in its range, and the slow end is slower."""
    words = raw.get('rope_scaling') or raw['rope_parameters']
    if {} in words.values():
        return False                                    # settings by layer
    kind = words.get('rope_type') or words['type']
    seen = dict(rope_theta=raw.get('rope_theta', 10000.0),
                original_max_position_embeddings=raw['max_position_embeddings']) | words
    if ORIGINAL in raw:
        seen[ORIGINAL] = raw[ORIGINAL]
    least = dict(rope_theta=1.001)
    if kind != 'default':
        least['factor'] = 1
    if kind in ('llama3', 'yarn'):
        least[ORIGINAL] = 2
    if kind == 'llama3':
        least |= dict(low_freq_factor=0.001, high_freq_factor=0.001)
    if kind == 'yarn':
        for name in ('beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim'):
            if words.get(name):
                least[name] = 0.001
        if words.get('attention_factor') is not None:
            least['attention_factor'] = 0.001
    for name, lowest in least.items():
        if type(seen.get(name)) not in (int, float) or not lowest <= seen[name] <= 1e10:
            return False
    if kind == 'llama3':
        return seen['low_freq_factor'] < seen['high_freq_factor']
    if kind == 'yarn':
        ordered = (seen.get('beta_slow') or 1) <= (seen.get('beta_fast') or 32)
        return ordered and type(seen.get('truncate', True)) is bool
    return True


def rotary_of_transformers(raw):
    """(frequencies [D/2], factor on cos and sin) by transformers' formulas, in double precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'float', torch.float64)
        patch.setattr(torch, 'float32', torch.float64)
        config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    return theirs.inv_freq, theirs.attention_scaling


@pytest.mark.slow
def test_rotary_cases_of_configs(tmp_path):
    """Rotary settings give transformers' frequencies and factor, or make no sense and are refused."""
    def check(raw):
        (tmp_path / 'config.json').write_text(json.dumps(raw))
        found = outcome_of(read_config, tmp_path)
        assert (found == 'runs') == makes_sense(raw)
        if found == 'runs':
            config = read_config(tmp_path)
            D = config.head_dim
            frequencies, factor = rotary_of_transformers(raw)
            cos, sin = kernels.rope_table(config.rope, D, 2)
            assert torch.allclose(cos[0], torch.tensor(factor, dtype=cos.dtype), rtol=1e-6, atol=0)
            ours = torch.atan2(-sin[1, :D // 2], cos[1, :D // 2])       # the angles of position 1
            assert torch.allclose(ours, frequencies, rtol=1e-6, atol=0)
        return found
    each_case('rotary settings', ROTARY_CONFIGS, check, share=3)


LITTLE = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
              num_key_value_heads=1, head_dim=4, max_position_embeddings=32)


@pytest.fixture(scope='module')
def little(tmp_path_factory):
    """The folder of a checkpoint of one layer, which loads fast; a case changes a file and puts it back."""
    return checkpoint(tmp_path_factory.mktemp('little') / 'target', byte_network(2, **LITTLE), **LITTLE)


@contextlib.contextmanager
def put(folder, **files):
    """Some files of the folder as given, bytes or what JSON is made of, for a while; underscores are dots."""
    before = {}
    for name, content in files.items():
        file = folder / name.replace('_', '.')
        before[file] = file.read_bytes() if file.exists() else None
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    try:
        yield
    finally:
        for file, content in before.items():
            file.unlink()
            if content is not None:
                file.write_bytes(content)


def run_folder(folder):
    """Writes three tokens with what is in the folder."""
    engine = specmini.Engine(target=folder, draft='none', max_new=3)
    engine.open([[97, 98]])
    engine.write([97, 98], Exact())


def changed(raw, changes):
    """A copy of a nested object of JSON with other values at some places, by number; None: left out."""
    raw = copy.deepcopy(raw)
    for number, value in changes:
        places = list(places_of(raw))
        holder, key = places[number % len(places)]
        if value is ABSENT:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(value)          # lest a list be put into itself
    return raw


ABSENT = object()


def places_of(raw):
    """(dict or list, key or index) of everything in a nested object of JSON."""
    entries = raw.items() if isinstance(raw, dict) else enumerate(raw)
    for key, value in list(entries):
        yield raw, key
        if isinstance(value, (dict, list)):
            yield from places_of(value)


def some_of(values):
    """Up to three (name, value) of a dict of some."""
    def value_of(name):
        return some.tuples(some.just(name), values[name])
    return some.lists(some.sampled_from(sorted(values)).flatmap(value_of), max_size=3)


CHANGES = some.lists(some.tuples(some.integers(0, 10 ** 6), ODD | some.just(ABSENT)), max_size=2)

CONFIGS = some_of(dict(
    model_type=some.sampled_from(['llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe', 'gpt2']),
    rms_norm_eps=mostly(numbers(1e-9, 1e3)), max_position_embeddings=mostly(some.integers(1, 10 ** 10)),
    rope_theta=mostly(numbers(1.01, 1e9)), tie_word_embeddings=mostly(some.booleans()),
    eos_token_id=mostly(some.integers(-2, 300) | some.lists(some.integers(-2, 300))),
    attention_bias=mostly(some.booleans()), mlp_bias=mostly(some.booleans()),
    num_hidden_layers=mostly(some.integers(1, 2)), num_key_value_heads=mostly(some.integers(1, 4)),
    hidden_size=mostly(some.sampled_from([4, 8, 9])), vocab_size=mostly(some.integers(250, 260)),
    head_dim=mostly(some.sampled_from([4, 4, 8])), sliding_window=mostly(some.integers(1, 5000)),
    use_sliding_window=mostly(some.booleans()), layer_types=mostly(some.just(['full_attention'])),
    num_experts=mostly(some.integers(1, 9)), num_experts_per_tok=mostly(some.integers(1, 9)),
    moe_intermediate_size=mostly(some.integers(1, 9)), decoder_sparse_step=mostly(some.integers(1, 3)),
    mlp_only_layers=mostly(some.lists(some.integers(0, 3))), torch_dtype=mostly(some.just('float16')),
    quantization_config=ODD, rope_scaling=mostly(ROTARY), architectures=ODD, hidden_act=ODD))


@pytest.mark.slow
def test_cases_of_configs(little):
    """A config that names other numbers than the weights have, or none at all, is refused before anything."""
    raw = json.loads((little / 'config.json').read_text())

    def check(changes):
        with put(little, config_json=raw | dict(changes)):
            return outcome_of(run_folder, little)
    each_case('configs', CONFIGS, check, share=3)


WEIGHT_FILES = some_of(dict(
    values=CHANGES, length=some.integers(0, 2 ** 64 - 1) | some.integers(0, 3000), cut=some.integers(0, 3000),
    header=some.tuples(some.floats(0, 1), some.binary(min_size=1, max_size=4)),
    data=some.tuples(some.floats(0, 1), some.binary(min_size=1, max_size=8)), pad=some.integers(0, 9),
    dtype=some.sampled_from(['F64', 'F16', 'I32', 'U8', 'C64', 'X']), metadata=ODD | some.just(dict(a='b')),
    shape=some.sampled_from([[2, 4], [1, 8], [8, 1], [0], [16], [], [2 ** 63, 2]]),
    behind=some.binary(min_size=1, max_size=9), again=some.just('"model.norm.weight": {}, ')))


def overwritten(content, place, noise):
    """Bytes with others at a place from 0 to 1."""
    begin = int(place * len(content))
    return content[:begin] + noise + content[begin + len(noise):]


def weights_file(content, changes):
    """The bytes of a safetensors file with these changes; content: those of a good one."""
    size = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8:8 + size])
    data = content[8 + size:]
    case = dict(changes)
    header['model.norm.weight']['dtype'] = case.get('dtype', 'F32')
    header['model.norm.weight']['shape'] = case.get('shape', [8])
    if 'metadata' in case:
        header['__metadata__'] = case['metadata']
    text = json.dumps(changed(header, case.get('values', [])))
    text = text.replace('{', '{' + case.get('again', ''), 1).encode() + b' ' * case.get('pad', 0)
    text = overwritten(text, *case.get('header', (0, b'')))
    data = overwritten(data, *case.get('data', (0, b''))) + case.get('behind', b'')
    whole = case.get('length', len(text)).to_bytes(8, 'little') + text + data
    return whole[:len(whole) - case.get('cut', 0)]


@pytest.mark.slow
def test_cases_of_weight_files(little):
    content = (little / 'model.safetensors').read_bytes()

    def check(changes):
        with put(little, model_safetensors=weights_file(content, changes)):
            return outcome_of(run_folder, little)
    each_case('weight files', WEIGHT_FILES, check, share=3)


ELSEWHERE = some.sampled_from([         # each would do, but leads out of the folder or is no name of a file
    '../outside.safetensors', 'linked', 'folder/one.safetensors', './one.safetensors', 'one.safetensors/'])
NOTHING = ODD | some.sampled_from([
    'itself', 'folder', 'pipe', '.', '..', '/dev/zero', 'config.json', 'absent', 'one.safetensors\0',
    '\udcff'])
INDICES = some.tuples(
    mostly(some.just('one.safetensors'), 2, ELSEWHERE),
    mostly(some.just('two.safetensors'), 6, NOTHING),
    mostly(some.just(None), 20), mostly(some.just('weight_map'), 20))


@pytest.fixture
def sharded(little, tmp_path):
    """The checkpoint in two shards, beside a file that would fit as well; nothing outside may be opened."""
    folder = tmp_path / 'sharded'
    shutil.copytree(little, folder)
    (folder / 'model.safetensors').unlink()
    tensors = safetensors.load((little / 'model.safetensors').read_bytes())
    first = tensors.pop('model.norm.weight')
    (folder / 'one.safetensors').write_bytes(safetensors.save({'model.norm.weight': first}))
    (folder / 'two.safetensors').write_bytes(safetensors.save(tensors))
    shutil.copy(folder / 'one.safetensors', tmp_path / 'outside.safetensors')
    (folder / 'linked').symlink_to('../outside.safetensors')
    (folder / 'itself').symlink_to('itself')
    (folder / 'folder').mkdir()
    shutil.copy(folder / 'one.safetensors', folder / 'folder')
    os.mkfifo(folder / 'pipe')
    return folder


@pytest.mark.slow
def test_cases_of_shard_indices(sharded):
    """What runs has named both shards, and nothing that is elsewhere or no file."""
    def check(case):
        one, two, odd, name = case
        shards = dict(a=one, b=two) if odd is None else odd
        with put(sharded, model_safetensors_index_json={str(name): shards}):
            found = outcome_of(run_folder, sharded)
        assert found == 'refused' or {one, two} == {'one.safetensors', 'two.safetensors'}
        return found
    each_case('shard indices', INDICES, check, share=2)


def part(kind, **settings):
    """A part of a tokenizer.json, most of its settings as they should be."""
    return some.fixed_dictionaries(dict(type=some.just(kind)) | settings)


LETTERS = mostly(some.text('ab \u2581\u20ac<.', max_size=3))
PATTERNS = mostly(some.one_of(
    some.fixed_dictionaries(dict(String=LETTERS)),
    some.fixed_dictionaries(dict(Regex=mostly(some.sampled_from(
        ['.', '', 'a*', '(', '(a|a)*$', r'\s+', r'(?i:\w)+', '(?=b)', r'\p{L}', '(.*a){9}$']))))))
REPLACE = part('Replace', pattern=PATTERNS, content=LETTERS)
TRUTH = mostly(some.booleans())
TOKENIZER_PARTS = dict(
    normalizer=mostly(REPLACE, 2, some.one_of(
        part('NFKC'), part('Lowercase'), part('StripAccents'), part('Nmt'),
        part('Strip', strip_left=TRUTH, strip_right=TRUTH), part('Prepend', prepend=LETTERS),
        part('Precompiled', precompiled_charsmap=mostly(some.sampled_from(['', 'AAAA', 'gAEAAA==']))))),
    pre_tokenizer=some.one_of(
        part('Split', pattern=PATTERNS, invert=TRUTH,
             behavior=mostly(some.sampled_from(['Removed', 'Isolated', 'MergedWithNext', 'Contiguous']))),
        part('ByteLevel', add_prefix_space=TRUTH, trim_offsets=TRUTH, use_regex=TRUTH),
        part('Metaspace', replacement=LETTERS, prepend_scheme=some.just('always'), split=TRUTH),
        part('Digits', individual_digits=TRUTH), part('Punctuation', behavior=some.just('Isolated')),
        part('FixedLength', length=mostly(some.integers(0, 9))), part('UnicodeScripts')),
    post_processor=some.one_of(
        part('ByteLevel', add_prefix_space=TRUTH, trim_offsets=TRUTH, use_regex=TRUTH),
        part('TemplateProcessing', special_tokens=some.just({}),
             single=mostly(some.just([dict(Sequence=dict(id='A', type_id=0))])), pair=some.just([])),
        part('BertProcessing', sep=some.just(['a', 5]), cls=mostly(some.just(['b', 999])))),
    decoder=some.one_of(
        REPLACE, part('ByteFallback'), part('Fuse'), part('BPEDecoder', suffix=LETTERS),
        part('Strip', content=LETTERS, start=mostly(some.integers(0, 9)), stop=mostly(some.integers(0, 9))),
        part('WordPiece', prefix=LETTERS, cleanup=TRUTH),
        part('CTC', pad_token=LETTERS, word_delimiter_token=LETTERS, cleanup=TRUTH),
        part('Metaspace', replacement=LETTERS, prepend_scheme=some.just('always'), split=TRUTH)),
    truncation=ODD | some.fixed_dictionaries(dict(
        direction=some.just('Right'), max_length=some.integers(0, 3), strategy=some.just('LongestFirst'),
        stride=some.integers(0, 5))),
    padding=ODD | some.fixed_dictionaries(dict(
        strategy=some.just(dict(Fixed=10 ** 12)), direction=some.just('Right'), pad_to_multiple_of=ODD,
        pad_id=some.just(0), pad_type_id=some.just(0), pad_token=some.just('x'))))
TOKENIZER_MODELS = dict(
    dropout=mostly(some.floats(0, 1)), unk_token=LETTERS, continuing_subword_prefix=LETTERS,
    end_of_word_suffix=LETTERS, fuse_unk=TRUTH, byte_fallback=TRUTH, ignore_merges=TRUTH,
    merges=mostly(some.lists(some.sampled_from(['a b', ['a', 'b'], 'ab', 'a b c']), max_size=3)),
    type=some.sampled_from(['BPE', 'WordLevel', 'WordPiece', 'Unigram']))
TOKENIZERS = some.tuples(some_of(TOKENIZER_PARTS), some_of(TOKENIZER_MODELS),
                         mostly(some.just([]), 9, CHANGES))


@pytest.mark.slow
def test_cases_of_tokenizers(little, capfd, monkeypatch):
    """Whatever a tokenizer.json holds, a text is written with it, or one line says why not."""
    monkeypatch.setattr('model.FOREIGN_SECONDS', 1)
    raw = json.loads((little / 'tokenizer.json').read_text())
    engine = specmini.Engine(target=little, draft='none', max_new=3)

    def run():
        engine.tokenizer = read_tokenizer(little)
        text, cycles = engine.generate('aab b\u20ac' + 'a' * 20 + 'b', Exact())
        for cycle in cycles:
            specmini.trace_line({}, 0, cycle, engine.tokenizer)

    def check(case):
        parts, settings_of_model, changes = case
        tree = raw | dict(parts)
        tree['model'] = raw['model'] | dict(settings_of_model)
        with put(little, tokenizer_json=changed(tree, changes)):
            found = outcome_of(run)
        assert not capfd.readouterr().err
        return found
    each_case('tokenizers', TOKENIZERS, check, share=2)


def lines_of(rows):
    """The bytes of a file of these rows; a text is a line as it stands."""
    lines = [row if type(row) is str else json.dumps(row) for row in rows]
    return '\n'.join(lines).encode('utf-8', 'surrogatepass')


TEXTS = mostly(some.text(min_size=1, max_size=9), 9, ODD | some.just('\ud800'))
GOOD_ROWS = some.fixed_dictionaries(dict(prompt=TEXTS), optional=dict(answer=TEXTS | ODD))
ODD_ROWS = ODD | some.sampled_from(['', '[' * 9999, '{"prompt": "a', '1' * 5000]) | some.fixed_dictionaries(
    {}, optional=dict(question=TEXTS, turns=mostly(some.lists(TEXTS, max_size=2)), task=TEXTS, answer=TEXTS))
ROWS = some.lists(GOOD_ROWS, max_size=2) | some.lists(GOOD_ROWS | ODD_ROWS, max_size=3)
PROMPT_FILES = some.tuples(some.sampled_from([b'', b'\xef\xbb\xbf']),
                           ROWS.map(lines_of) | some.binary(max_size=20))


@pytest.mark.slow
def test_cases_of_prompt_files(little, tmp_path):
    """A file of prompts is read, run and graded, or a line says which row is wrong."""
    engine = specmini.Engine(target=little, draft='none', max_new=2)
    file = tmp_path / 'prompts.jsonl'

    def run():
        for row in specmini.read_rows(None, file):
            ids = engine.tokenizer.encode(row['prompt']).ids            # without a fork, for speed
            engine.open([ids])
            cycles = engine.write(ids, Exact())
            specmini.grade(row, engine.tokenizer.decode(specmini.tokens_of(cycles)))

    def check(case):
        mark, content = case
        file.write_bytes(mark + content)
        return outcome_of(run)
    each_case('prompt files', PROMPT_FILES, check, share=3)


@pytest.fixture(scope='module')
def able(little, tmp_path_factory):
    """An Engine for every method: three little models, and all sections of calibration.json."""
    target = tmp_path_factory.mktemp('able') / 'target'
    shutil.copytree(little, target)
    draft = checkpoint(target.parent / 'draft', byte_network(3, **LITTLE), **LITTLE)
    for name, section in MEASURED.items():
        write_calibration(target, name, section, draft if name == 'signals' else None)
    engine = specmini.Engine(target=target, draft=draft, mid=draft, max_new=3)
    engine.open([[97, 98, 99, 100, 101, 102, 10, 103]])
    return engine


MEASURED = dict(mask=dict(skip=[1], nested=[[1], [0]]), signals=RANGES,
                sparse=dict(anchors=[0], channels=[[0.0, 0.1, 0.4]], experts=[[]]))
CALIBRATED = dict(          # the method that uses each of them
    mask=via(), signals=SpecGuard(max_step=2, k=2),
    sparse=METHODS['sparse'](rho=0.5, dense_below=2, block=1, locals=0, anchors=1, ffn_quantile=0.5))
VALUES_OF_SECTIONS = some_of(dict(
    skip=mostly(some.lists(some.integers(-1, 2), max_size=2)),
    nested=mostly(some.lists(some.lists(some.integers(0, 1), max_size=1), max_size=3)),
    draft_logp=mostly(some.lists(numbers(0.001, 1e12), max_size=3)), draft_grounding=ODD,
    anchors=mostly(some.lists(some.integers(0, 1), max_size=2)),
    channels=mostly(some.lists(some.lists(numbers(0.001, 1e12), max_size=3), max_size=2)), experts=ODD))
CALIBRATIONS = some.tuples(some.sampled_from(sorted(MEASURED)), VALUES_OF_SECTIONS, CHANGES)


def write_by(engine, method):
    """Three tokens by this method, with what it takes of calibration.json read anew."""
    engine.read_sections = set()
    engine.__dict__.pop('measured_sections', None)
    engine.write([97, 98, 99, 100, 101, 102, 10, 103], method)


@pytest.mark.slow
def test_cases_of_calibrations(able):
    raw = json.loads((able.target / 'calibration.json').read_text())

    def check(case):
        name, values, changes = case
        tree = raw | {name: raw[name] | dict(values)}
        with put(able.target, calibration_json=changed(tree, changes)):
            return outcome_of(write_by, able, CALIBRATED[name])
    each_case('calibrations', CALIBRATIONS, check, share=2)


ODD_WORDS = some.sampled_from([
    'nan', 'inf', '-inf', '-1', '0', '1', '0.5', '1e400', '99999999999', '1' * 5000, '', 'x', 'true', 'None',
    '\udcff', '1e-320'])
USUAL_WORDS = {int: some.integers(0, 9).map(str), float: numbers(0.001, 2).map(str),
               bool: some.sampled_from(['true', 'false']), str: ODD_WORDS}


@cache
def settings_of(name):
    """(a method, up to three of its knobs and their values, a temperature)."""
    ranges = verify.ranges_of(METHODS[name])
    values = {}
    for knob, option in verify.knobs_of(METHODS[name]).items():
        words = ranges.get(option.name, {}).get('words')
        usual = some.sampled_from(sorted(words)) if words else USUAL_WORDS[option.type]
        values[knob] = mostly(usual, odd=ODD_WORDS)
    chosen = some_of(values) if values else some.just([])
    return some.tuples(some.just(name), chosen, some.sampled_from([0.0, 1.0]))


SETTINGS = some.sampled_from(sorted(METHODS)).flatmap(settings_of)


@pytest.mark.slow
def test_cases_of_knobs(able):
    """Every method at any knobs writes three tokens, or one line says which knob is out of range."""
    def run(name, chosen):
        words = [f'{knob}={value}' for knob, value in chosen]
        write_by(able, specmini.make_method(name, words, [name]))

    def check(case):
        name, chosen, able.temperature = case
        return outcome_of(run, name, chosen)
    each_case('knobs', SETTINGS, check, share=3)


# ------------------------------------------------------------- the five source files, alone

SOURCES = 'kernels.py', 'model.py', 'verify.py', 'specmini.py', 'train_mask.py'
PAPERS = 'via', 'cmasd', 'ecsv', 'sparse', 'specguard'


def copy_of_the_product(folder):
    """Puts the source files into an empty folder, and a random pair with its calibrations beside them."""
    for name in SOURCES:
        shutil.copy(HERE / name, folder)
    target = checkpoint(folder / 'target', byte_network(0, num_hidden_layers=4), num_hidden_layers=4)
    draft = checkpoint(folder / 'draft', byte_network(1))
    write_calibration(target, 'mask', dict(skip=[2, 3], nested=[[2, 3], [2]]))
    write_calibration(target, 'signals', RANGES, draft)
    (target / 'chat_template.jinja').write_text('user:{{ messages[0].content }}!')
    (folder / 'rows.jsonl').write_text('{"prompt": "ab"}\n{"question": "cd"}\n')
    (folder / 'text.txt').write_text('the cat sat on the mat, and ' * 9)


def alone(folder, *command):
    """(exit status, stdout, stderr) of `python command` in this folder; no other path to import from."""
    environment = dict(os.environ)
    environment.pop('PYTHONPATH', None)
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()      # not text=True: \r stays


ONE_BY_ONE = '''
import contextlib, io, json, sys
import specmini
assert 'torch._dynamo' not in sys.modules
for flags in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = specmini.main(flags)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
'''


def runs_alone(folder, runs):
    """(exit status, stdout, stderr) of each of these runs, lists of flags, in one process in this folder.

    To import the product must not import the compiler, which takes two seconds.
    """
    status, out, err = alone(folder, '-c', ONE_BY_ONE, json.dumps(runs))
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_the_product_stands_alone(tmp_path):
    """The five source files run without the laboratory: every method, and every flag that shows something."""
    copy_of_the_product(tmp_path)
    runs = [['--list'], ['--prompt', 'hello'], ['--prompt', 'hello', '--trace', 'run.html']]
    for flags, draft, prompt in (
            ('--method cmasd --show --trace trace.jsonl', 'draft', '--prompt hello'),
            ('--method ecsv --check', 'draft', '--prompt hello'),
            ('--method via --json', 'self', '--prompt hello'),
            ('--method sparse --chat --json', 'draft', '--prompt hello'),
            ('--method specguard --json', 'draft', '--prompts rows.jsonl'),
            ('--compare ' + ','.join(PAPERS), 'draft', '--prompt hello')):
        pair = f'--target target --draft {draft} --max-new 12 --ignore-eos'
        runs.append(f'{flags} {pair} {prompt}'.split())
    listed, no_model, no_page, *rest = runs_alone(tmp_path, runs)
    for status, _, err in rest:
        assert status == 0, err
    cmasd, ecsv, via, sparse, specguard, table = rest

    status, out, err = listed
    names = [line.split()[0] for line in out.splitlines()]
    assert status == 0 and {'ar', 'sd', *PAPERS} <= set(names), err

    trace = (tmp_path / 'trace.jsonl').read_text().splitlines()
    assert cmasd[1].count('\n') == len(trace) > 1                   # a line a cycle
    assert sum(len(json.loads(line)['tokens']) for line in trace) == 12
    assert 'check: equal to plain' in ecsv[2]
    assert len(json.loads(via[1])['tokens']) == 12
    assert json.loads(sparse[1])['prompt_tokens'] == len('user:hello!')
    first, second = specguard[1].splitlines()
    assert json.loads(first)['prompt_tokens'] == 2
    assert json.loads(second)['method'] == 'specguard'
    for name in PAPERS:
        assert f'\n{name} ' in table[1]

    status, out, err = alone(tmp_path, 'train_mask.py', '--target', 'target', '--text', 'text.txt',
                             '--windows', '2', '--window', '8', '--evaluations', '2')
    assert status == 0 and out.startswith('skips ['), err
    found = read_calibration(tmp_path / 'target', sections=['mask'])
    assert len(found['mask']['tried']) == 2                         # it was measured, not copied by us

    status, out, err = no_model
    assert status == 2 and not out
    assert err.count('\n') == 1 and '--target' in err, err          # no model is here: the line says so

    status, out, err = no_page
    assert status == 2 and not out
    assert err.count('\n') == 1 and '--trace run.html: pages are made by lab/' in err, err

# ---------------------------------------------------------- lab/pictures

DESCRIBED = '{http://purl.org/dc/elements/1.1/}description'


def picture(name):
    """(what a committed picture says that it shows, its texts) of lab/pictures."""
    file = specmini.HERE / 'lab' / 'pictures' / f'{name}.svg'
    assert file.stat().st_size < 60_000
    tree = xml.etree.ElementTree.parse(file)
    shown, = tree.iter(DESCRIBED)
    texts = [text.text for text in tree.iter('{http://www.w3.org/2000/svg}text')]
    return json.loads(shown.text), texts


def assert_alike(found, stored):
    """Equal but for floats, which may differ by a hundredth; found: as JSON has it."""
    assert type(found) is type(stored)
    if isinstance(found, dict):
        assert found.keys() == stored.keys()
        for key, value in found.items():
            assert_alike(value, stored[key])
    elif isinstance(found, list):
        assert len(found) == len(stored)
        for one, other in zip(found, stored):
            assert_alike(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(stored, abs=0.01)
    else:
        assert found == stored


def as_json(value):
    return json.loads(json.dumps(common.for_json(value)))


@pytest.mark.parametrize('name', picture_cycles.CYCLES)
def test_pictures_show_real_cycles(name):
    """What a method's committed picture shows is what the method does today: `python -m lab.pictures`."""
    shown, texts = picture(name)
    assert_alike(as_json(picture_cycles.CYCLES[name]()), shown)
    written = dict(cmasd='drafted', ecsv='elected')
    if name in written:
        assert set(shown[written[name]]) <= set(texts)
    for step in shown.get('steps', ()):
        assert {step['text'], f'{step["score"]:.2f}'} <= set(texts)
    for cycle in shown.get('cycles', ()):
        assert {*cycle['drafted'], f'r = {cycle["ratio"][-1]:.2f}'} <= set(texts)
    for layer in range(len(shown.get('read', ()))):
        assert f'layer {layer}' in texts


def test_pictures_cycles_have_what_they_are_to_show():
    """Forgiven where the draft doubts, parted branches, all three regions of via, steps kept and mended."""
    confident, _ = picture('cmasd')
    doubt = min(confident['confidence'])
    place = confident['confidence'].index(doubt)
    assert confident['threshold'][place] == max(confident['threshold'])
    assert confident['kept'][place] and confident['drafted'][place] != confident['favourite'][place]
    assert confident['window'][-1] <= len(confident['drafted']) < confident['most']
    voted, _ = picture('ecsv')
    assert len(picture_cycles.beginnings(voted['branches'])) > 2 * len(voted['elected'])
    doubted, _ = picture('via')
    rewritten, escalated = (cycle['ratio'][-1] for cycle in doubted['cycles'])
    assert escalated < doubted['escalate'] <= rewritten < doubted['keep'] <= doubted['cycles'][0]['ratio'][0]
    assert 'target/full' not in doubted['cycles'][0]['read']
    guarded, _ = picture('specguard')
    for step in guarded['steps']:
        assert step['kept'] == (step['score'] >= guarded['tau'])
        assert step['score'] == pytest.approx((step['confidence'] + step['grounding']) / 2, abs=1e-4)
    same = [step['text'] == step['committed'] for step in guarded['steps'] if not step['kept']]
    assert set(same) == {True, False}                   # one that the target only repeats, one that it mends
    thinned, _ = picture('sparse')
    for layer, heads in enumerate(thinned['read']):
        assert (heads != thinned['read'][layer - 1]) == (layer in thinned['anchors'])


@pytest.mark.parametrize('alpha, gamma, c', [(0.5, 1, 0.05), (0.8, 4, 0.35), (0.9, 12, 0.43), (1.0, 3, 0.1)])
def test_picture_formula_is_the_forecast_of_a_long_text(alpha, gamma, c):
    """The formula of the picture, and what specmini.expected adds up token by token."""
    v = [0.0] + [1 + n / 40 for n in range(gamma + 1)]
    costs = [n * c + v[n + 1] for n in range(gamma + 1)]
    length = 3000
    steps = specmini.expected(length, gamma, [alpha] * gamma, costs)[length]
    assert picture_points.speedup(alpha, gamma, c, v) == pytest.approx(length / steps, rel=2e-3)


def test_picture_of_the_formula_has_the_stored_points():
    """The real pair's points: its verdicts at the stored costs, near the formula; its runs as timed."""
    shown, texts = picture('speedup')
    assert_alike(as_json(picture_points.real_speeds(picture_points.REAL)), shown)
    for gamma, replayed in shown['replayed'].items():
        formula = picture_points.speedup(shown['alpha'], int(gamma), shown['c'], shown['v'])
        assert replayed == pytest.approx(formula, rel=0.05)     # where texts end, and alpha is no constant
    (costs,) = common.read_stored('best', 'costs', picture_points.REAL).rows
    rows = common.read_stored('best', 'compositions', picture_points.REAL).rows
    runs = [row['runs']['sd 3'] for row in rows]
    step = costs['target'][1]                                   # seconds of a plain one
    tokens = sum(run['tokens'] for run in runs)
    seconds = sum(run['seconds'] for run in runs)
    assert shown['timed']['3'] == pytest.approx(tokens * step / seconds, rel=1e-3)
    assert f'{shown["alpha"]:.2f}' in texts


def test_picture_front_is_undominated():
    """No setting beats one of the front; whatever is not of it is beaten, or equalled, by one that is."""
    shown, texts = picture('front')
    for pair, points in picture_points.both_pairs().items():
        best = picture_points.front(points)
        assert_alike(as_json([point._asdict() for point in best]), shown[pair])
        for point in points:
            rivals = [other for other in points if other.agreement >= point.agreement]
            if point in best:
                assert point.modelled == max(other.modelled for other in rivals)
            else:
                assert any(other in best and other.modelled >= point.modelled for other in rivals)
        for i, point in enumerate(best, 1):
            assert any(text.startswith(f'{i}  {point.name}: {point.modelled:.2f}') for text in texts)
        assert f'{len(points)} settings; hollow: lossy' in texts


def test_picture_front_counts_as_the_pages_do():
    """What via's record replays with thresholds above 1 errs nowhere; runs are as on lab.best's page."""
    runs = best_claims.runs_of(picture_points.records('best', ('costs', 'compositions'), ''))
    pace = dict(zip(runs.names, runs.pace(list(range(runs.size)))))
    points = {point.name: point for point in picture_points.front_points('')}
    assert points['sd 4'].modelled == pytest.approx(pace['sd 4']) and points['plain'].measured == 1
    exact = points['via, keep 2, escalate 2']
    assert exact.lossless and exact.agreement == 1
    costs = picture_points.costs_of('')
    rows = common.read_stored('via', 'replays').rows
    cycles, places, tokens = (sum(row[key] for row in rows) for key in ('cycles', 'places', 'sd'))
    steps = places * costs.readers['draft'] + cycles * (1 + costs.readers['slim']) * costs.of_positions(6)
    assert exact.modelled == pytest.approx(tokens / steps)
    assert points['ecsv 1'].modelled < points['sd 1'].modelled      # whose draft passes are of one row
