"""Oracles, laws and limits. Each test says what would break it; those that can fail by chance say how often.

transformers is the oracle for networks, exact enumeration for laws, plain decoding for greedy text, a fresh
cache for caches.
"""
import argparse
import copy
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path as File
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import torch as safetensors
from tokenizers import Tokenizer, decoders, models, processors

import kernels
import lab.rivals
import specmini
import train_mask
import verify
from lab import bench, claims, compare, quantise, replay, stages, tasks, train
from lab.calibration import read_calibration, write_calibration
from lab.distil import distil, packed
from lab.passes import sparsity, work
from lab.steps import (DRAFTS, USUAL, average_precision, choose_gate, gate_curve, judged, outcomes,
                       print_curve, record_step, roc_area, signal_ranges, step_checker, whole_rollout)
from lab.toys import (SIZES, DropsUnverified, JudgedByQ, Table, WrongResidual, byte_network, bytes_tokenizer,
                      checkpoint, enumerate_law, exact_law, fresh, law_by_cycles, network, plain, seeded,
                      session, variation, write)
from model import Reader, load
from verify import METHODS, Draft, Exact, Session, lookup, overlap, probs, residual, rollout, silence

HERE = File(__file__).parent
EMBEDDED = HERE / 'lab/models'
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)        # the networks here are tiny


# ------------------------------------------------------------------------ what the tests are made with

MIXED = dict(experts=(6, 0, 6, 0), num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=4)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """The flags of a run on two random checkpoints."""
    home = tmp_path_factory.mktemp('pair')
    target, draft = (checkpoint(home / str(i), byte_network(i)) for i in range(2))
    return '--target', target, '--draft', draft, '--prompt', 'hello', '--max-new', 20


def trusted(reader, tokens):
    """How many of these tokens the reader's full path trusts; asserts that their keys are a fresh cache's."""
    n, other = reader.cache.trusted(tokens, reader.model.full), Reader(reader.model, len(tokens))
    other.read(tokens, [], reader.model.full, 1)
    for (mine, _), (theirs, _) in zip(reader.cache.stores, other.cache.stores):
        assert torch.allclose(mine[:, :, :n], theirs[:, :, :n], 0, 1e-9)
    return n


def program(capsys, *flags):
    """(exit status, stdout, stderr) of one run in this process."""
    status = specmini.main([str(f) for f in flags])
    out = capsys.readouterr()
    return status, out.out, out.err


def refused(capsys, words, *flags):
    """Asserts that a run ends with status 2, these words in one line on stderr, and no text."""
    status, out, err = program(capsys, *flags)
    assert status == 2 and words in err and err.count('\n') == 1 and not out, (flags, err)


def reported(capsys, *flags):
    """The JSON object of the last prompt of a run."""
    return json.loads(program(capsys, *flags, '--json')[1].splitlines()[-1])


def interrupt(monkeypatch, where, name, n):
    """Ctrl-C at the end of the n-th call of where.name; returns the list of what its calls give."""
    real, given = getattr(where, name), []

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


@pytest.mark.parametrize('kind, changes', [
    ('Llama', {}),
    ('Llama', dict(tie_word_embeddings=True, num_key_value_heads=4) | rope('linear', factor=4.0)),
    ('Llama', dict(attention_bias=True, mlp_bias=True, rms_norm_eps=0.1) | rope('default', 500.0)),
    ('Llama', dict(head_dim=16) | rope('llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=32)),
    ('Mistral', dict(sliding_window=None)), ('Mistral', dict(sliding_window=64)),   # off; as long as the text
    ('Qwen2', {}), ('Qwen2', rope('yarn', factor=4.0, original_max_position_embeddings=16)),
    ('Qwen3', dict(head_dim=16)), ('Qwen3', dict(head_dim=24, attention_bias=True)),
    ('Qwen3', rope('yarn', factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2,
                   truncate=False, beta_fast=16, beta_slow=2)),
    ('Qwen3Moe', MOE), ('Qwen3Moe', MOE | dict(norm_topk_prob=True)),
    ('Qwen3Moe', MOE | dict(decoder_sparse_step=2)), ('Qwen3Moe', MOE | dict(mlp_only_layers=[1]))])
def test_parity(kind, changes, tmp_path):
    """Our logits are transformers', from its config of today and of version 4; one pass is token by token."""
    torch.manual_seed(len(str(changes)))
    config, file = getattr(transformers, f'{kind}Config')(**BASE | changes), tmp_path / 'config.json'
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in theirs.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0 if 'norm' in name else 0.0, 0.3)
    theirs.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('*.safetensors'))) > 2
    words = models.WordLevel({f't{i}': i for i in range(64)}, unk_token='t0')
    Tokenizer(words).save(str(tmp_path / 'tokenizer.json'))
    ids = torch.randint(0, 64, (40,)).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert wanted.std() > 0.5                       # the test could not fail on logits that are all alike
    assert (fresh(load(tmp_path)[0], ids) - wanted).abs().max() < 1e-4
    raw = json.loads(file.read_text())              # rope_theta, rope_scaling, torch_dtype: transformers 4's
    new = raw.pop('rope_parameters')
    raw |= dict(rope_theta=new.pop('rope_theta'), torch_dtype=raw.pop('dtype'))
    raw['rope_scaling'] = new | dict(type=new['rope_type']) if new['rope_type'] != 'default' else None
    file.write_text(json.dumps(raw))
    assert (fresh(load(tmp_path)[0], ids) - wanted).abs().max() < 1e-4
    exact, *_ = load(tmp_path, dtype=torch.float64)
    reader = Reader(exact, 40)
    each = torch.stack([reader.read(ids[:i + 1], [], exact.full, 1)[0] for i in range(40)])
    assert (each - fresh(exact, ids)).abs().max() < 1e-9
    assert (fresh(load(tmp_path, dtype=torch.bfloat16)[0], ids) - wanted).std() < 0.1 * wanted.std()


def weights(change):
    """A function of the bytes of a safetensors file that puts change(name, tensor) in each tensor's place."""
    return lambda old: safetensors.save({k: change(k, v) for k, v in safetensors.load(old).items()})


@pytest.mark.parametrize('change, words', [
    *((dict([item]), '{} is {!r}'.format(*item)) for item in dict(
        hidden_size=None, num_attention_heads=0, max_position_embeddings='64', rms_norm_eps='1e-6',
        tie_word_embeddings='no', layer_types='full', vocab_size=10 ** 18, head_dim=5).items()),
    (dict(model_type='gpt2'), "model_type 'gpt2'"), (dict(hidden_act='gelu'), "hidden_act 'gelu'"),
    (dict(eos_token_id='</s>'), "eos_token_id is ['</s>']"),
    (dict(quantization_config=dict(bits=4)), 'quantised'),
    (dict(num_key_value_heads=3), '4 query heads cannot share 3 key heads'),
    (dict(model_type='qwen3_moe', num_experts=2, num_experts_per_tok=3, moe_intermediate_size=4), ' 3, of 2'),
    (dict(model_type='mistral', sliding_window=32), 'sliding window of 32'),
    (dict(model_type='qwen2', sliding_window=32, use_sliding_window=True), 'sliding window of 32'),
    (dict(model_type='qwen3', sliding_window=32, use_sliding_window=False), 'k_norm.weight is missing'),
    (dict(num_hidden_layers=3), 'layers.2.input_layernorm.weight is missing'),
    (dict(num_hidden_layers=1), 'layers.1.input_layernorm.weight has no place'),
    (dict(intermediate_size=25), 'has shape (16, 24), expected (16, 25)'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor'),
    (dict(rope_scaling='linear'), "rotary settings 'linear'"),
    (dict(rope_scaling=dict(rope_type='longrope', factor=2.0)), "rope type 'longrope'"),
    (dict(rope_scaling=dict(rope_type='llama3', factor=2.0)), 'needs low_freq_factor'),
    (dict(rope_parameters=dict(full_attention=dict(rope_type='yarn'))), 'one flat object'),
    (dict(rope_theta=1, rope_scaling=dict(rope_type='yarn', factor=2)), 'needs rope_theta above 1, found 1'),
    *((dict(rope_scaling=dict(rope_type='yarn', factor=2) | {name: 'x'}), f"{name} above 0, found 'x'")
      for name in ('beta_fast', 'attention_factor', 'mscale')),
    (('model.safetensors', lambda old: old[:-100]), 'not a complete safetensors file'),
    (('model.safetensors', weights(lambda k, v: v * math.nan if 'head' in k else v)), 'lm_head.weight holds'),
    (('model.safetensors', weights(lambda k, v: v * 1e38 if 'down' in k else v)), 'NaN or infinity after 1'),
    (('model.safetensors', 'pytorch_model.bin'), 'pytorch_model.bin is a pickle'),
    (('tokenizer.json', 'away.json'), 'tokenizer.json: no such file'),
    (('tokenizer.json', lambda old: b'{}'), 'not a tokenizer'),
    (('tokenizer.json', lambda old: bytes_tokenizer(['x2']).to_str().encode()), '258 entries, embedding of'),
    (('config.json', lambda old: b'{"model_type": '), 'cannot be read as JSON')])
def test_refused_checkpoints(change, words, tmp_path, capsys):
    """Status 2 and one line: for what config.json has that we lack or is no value, and for broken files."""
    folder = checkpoint(tmp_path, **change if isinstance(change, dict) else {})
    file, broken = change if isinstance(change, tuple) else ('config.json', bytes)
    if callable(broken):
        (folder / file).write_bytes(broken((folder / file).read_bytes()))
    else:
        (folder / file).rename(folder / broken)
    refused(capsys, words, '--target', folder, '--prompt', 'x')


def test_vocabularies(tmp_path, capsys):
    """Rows beyond the tokenizer's length reach no distribution; two tokenizers must agree token by token."""
    build = lambda V, *x: checkpoint(tmp_path / f'{V}{x}', byte_network(0, V), bytes_tokenizer(x))
    a, b, x, y = build(300), build(280), build(258, 'here'), build(258, 'there')
    assert fresh(load(a)[0], [1, 2]).shape == (2, 257)
    assert program(capsys, '--target', a, '--draft', b, '--prompt', 'x', '--max-new', 8)[0] == 0
    refused(capsys, "257 is 'there' there and 'here' in", '--target', x, '--draft', y, '--prompt', 'x')


def test_hostile_reads(monkeypatch):
    """Whatever was read before, full's logits are one pass's; what full or the same mask has read is kept."""
    monkeypatch.setattr('model.CHUNK', 3)
    model, rng, old, slims = network(num_hidden_layers=3), random.Random(1), [], 0
    reader, line, paths = Reader(model, 40), [1], [model.full] * 2 + [model.full.slim({2, i}) for i in (3, 4)]
    for _ in range(300):
        line = (line[:rng.randint(1, len(line))] + rng.choices(range(11), k=rng.randrange(8)))[:40]
        if rng.random() < 0.3:
            line[rng.randrange(len(line))] = rng.randrange(11)
        path, last, cut = rng.choice(paths), rng.randint(1, min(4, len(line))), rng.randrange(len(line))
        known = [x == y and who in (model.full, path) for x, (y, who) in zip(line, old)]
        fed = max(last, len(line) - [*known, False].index(False))
        got = reader.read(line[:cut], line[cut:], path, last)
        assert got.shape == (last, 11) and reader.take()[path.name][1] == fed
        slims += path is not model.full and fed < len(line)
        old = old[:len(line) - fed] + [(x, path) for x in line[-fed:]]
        if path is model.full:
            whole = model.logits(model(torch.tensor([line]), torch.arange(len(line)), path))[0, -last:]
            assert (got - whole).abs().max() < 1e-9
    assert slims > 50


def test_fork():
    """A fork's rows part from a shared past and equal texts read alone; only positions in use are copied."""
    model = network()
    reader = Reader(model, 50)
    reader.read([1, 2, 3], [], model.full, 1)
    reader.cache.stores[0][0][:, :, 3:] = 7.0
    keys = (twin := reader.fork(3, 2)).cache.stores[0][0]
    assert keys.shape[0] == 3 and keys.shape[2] == 5 and (keys[:, :, 3:] == 0).all()
    got = [twin.append(torch.tensor(ids), model.full) for ids in ([4, 5, 6], [7, 8, 9])][1]
    for row, x, y in zip(got, (4, 5, 6), (7, 8, 9)):
        assert (row - fresh(model, [1, 2, 3, x, y], 1)[0]).abs().max() < 1e-9
    assert reader.cache.ids == [1, 2, 3] and len(reader.log) == 3           # parent untouched, ledger shared


MIXED_TWO = MIXED | dict(num_hidden_layers=2, experts=(6, 0), norm_topk_prob=True)


@pytest.mark.parametrize('sizes, name, more', [
    ({}, None, {}), (MIXED_TWO, None, {}), (MIXED_TWO, 'sparse', {}), ({}, 'sparse', dict(select='random')),
    ({}, 'sparse', dict(select='recent')), ({}, 'sparse', dict(select='oracle', query_from='last')),
    (MIXED_TWO, 'sparse-forms', dict(form='literal', select='token')),
    (MIXED_TWO, 'sparse-forms', dict(form='union', select='joint')),
    (MIXED_TWO, 'sparse-forms', dict(form='guessed', select='union')),
    (MIXED_TWO, 'sparse-forms', dict(form='static', select='quest', query_from='mean'))])
def test_graphs(sizes, name, more, monkeypatch):
    """One graph per padded length, whatever the position (the backend only counts); padding is harmless."""
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    counter, real, model = CompileCounter(), torch.compile, network(**sizes)
    monkeypatch.setattr(torch, 'compile', lambda f, options, **how: real(f, backend=counter, **how))
    knobs = dict(dense_below=2, block=1, rho=0.3, ffn_threshold=0.1, ffn_share=0.5, moe_quantile=1.0)
    path = thin(model, name, **knobs | more) if name else model.full
    reader, exact = Reader(model, 40, compiled=True), Reader(model, 40)
    for store in itertools.chain(*reader.cache.stores):
        store.normal_(0, 50)
    for n, last in ((17, 1), (18, 1), (21, 3), (22, 3), (25, 1), (30, 1)):      # feeds 17, 1, 3, 3, 3, 5
        got, wanted = (r.read(LINE[:n], [], path, last) for r in (reader, exact))
        assert (got - wanted).abs().max() < 1e-9 or 'random' in more.values()    # other lots in other caches
    assert counter.frame_count == 3                                             # 1, 4 and 8 positions


# ------------------------------------------------------------- verify.py: the maths, laws, greedy identity

def test_maths():
    """Temperature, top-k and top-p are transformers' warpers; the limits are one-hot; fp32 at least."""
    from transformers.generation import logits_process as theirs
    z = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    for t, k, p in itertools.product((0.5, 1.3), (0, 5), (1.0, 0.8, 0.3)):
        w = theirs.TemperatureLogitsWarper(t)(None, z)
        w = theirs.TopKLogitsWarper(k)(None, w) if k else w
        w = theirs.TopPLogitsWarper(p)(None, w) if p < 1 else w
        assert torch.allclose(probs(z, t, k, p), w.softmax(-1), atol=1e-12)
    assert torch.equal(probs(z, 0), torch.nn.functional.one_hot(z.argmax(-1), 30).double())
    assert torch.allclose(probs(z, 1, top_p=1e-9), probs(z, 0))             # the likeliest is always kept
    assert probs(z.bfloat16(), 0.7).dtype == torch.float32
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    assert torch.isclose(overlap(p, q), torch.tensor(0.5))
    assert torch.equal(residual(p, p), p)                                   # nothing is left: p, not 0 / 0


LINES = dict(text=lambda ids: ''.join('a\nbc'[i % 4] for i in ids),       # every fourth id ends a step
             calibration=dict(signals=dict(draft_logp=[-4, 0], draft_grounding=[0, 1],
                                           target_logp=[-4, 0], target_grounding=[0, 1])))
MASK = dict(calibration=dict(mask=dict(skip=[1], nested=[])), vocab=3, horizon=2)
EOS, COINS, SHORT = dict(eos=frozenset([3])), dict(vocab=2, horizon=4), dict(horizon=2)
GREEDY = dict(draft_temperature=0.0)            # of candidates that are thrown away: nothing to enumerate
OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=0)
TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)
FLAT = COINS | dict(draft=Table(2, 2, 0.45))                               # so unsure that probe cuts blocks
ALWAYS, NEVER = dict(keep=2.0, escalate=1.5), dict(keep=1.0, escalate=0.0, max_lag=99)     # via escalates
via, cmasd, ecsv, SpecGuard = (METHODS[name] for name in ('via', 'cmasd', 'ecsv', 'specguard'))


@pytest.mark.parametrize('method, settings', [
    (METHODS['ar'](), {}), (Exact(1), {}), (Exact(2), {}), (Exact(2), EOS), (Exact(2), dict(source=lookup)),
    (Exact(2), dict(source=silence)), (Exact(2), dict(temperature=0.7, top_k=3, top_p=0.9)),
    (Exact(2, draft_temperature=0.5), {}), (Exact(2, draft_temperature=0), {}),
    (DropsUnverified(2), SHORT), (WrongResidual(2), SHORT),
    *((Exact(2, controller=c), {}) for c in ('lagged', 'hf-confidence', 'hf-roc')),
    (METHODS['lenient'](2, lenience=1), {}), (METHODS['lenient'](2, lenience=0.5), {}),
    (METHODS['typical'](1, epsilon=1, delta=math.inf), {}), (METHODS['typical'](2), {}),    # keeps nothing
    (cmasd(k_max=2, alpha=2, accept_='strict'), {}), (cmasd(k_max=2, alpha=2, tau_base=1), {}),
    (cmasd(k_max=2), {}), (cmasd(k_max=3, alpha=2, accept_='strict', controller='probe'), COINS),
    (METHODS['sparse'](2, **OFF), {}), (ecsv(**TWO | dict(branches=3)), {}), (JudgedByQ(**TWO), SHORT),
    (METHODS['ecsv-lite'](**TWO, align='prefix', granularity='branch'), {}),
    (METHODS['ecsv-soft'](**TWO, granularity='window'), {}),
    (METHODS['ecsv-spot'](**TWO, spots=2, policy='entropy'), {}),
    (METHODS['ecsv-spot'](**TWO, spots=2, policy='agree_entropy', budget=2), {}),
    (METHODS['mean-argmax'](**TWO), {}), (METHODS['oracle-top1'](**TWO), {}),
    *((METHODS[f'sd-{x}'](**TWO, budget=b), {}) for x in ('multi', 'tree') for b in (None, 4)),
    *((METHODS[name](**TWO, controller='probe'), FLAT) for name in ('ecsv', 'oracle-top1', 'sd-multi')),
    (METHODS['cmasd-dropout'](k_max=2, alpha=2, accept_='strict'), {}),
    (via(2, gate='two_level_exact'), MASK | dict(vocab=2, horizon=3)), (via(2, gate='two_level_exact'), MASK),
    (via(2), MASK), (via(2, **ALWAYS), MASK), (METHODS['via-tiers'](2, tiers=2), MASK),
    (via(2, gate='lossy_sd'), MASK), (via(2, gate='one_minus_alpha'), MASK),
    (Exact(2), MASK | dict(draft=None)),                    # --draft self
    (SpecGuard(tau=math.inf, **GREEDY), LINES), (SpecGuard(tau=math.inf, **GREEDY), LINES | EOS),
    (SpecGuard(1, tau=math.inf, regenerate='sd', **GREEDY), LINES), (SpecGuard(k=1, tau=0.5), LINES | SHORT),
    (SpecGuard(tau=math.inf, target_k=2, **GREEDY), LINES | SHORT)])
def test_law(method, settings):
    """Every draw enumerated: what calls itself lossless has the target's law, LOSSY or wrong has not."""
    settings = dict(vocab=4, horizon=3, temperature=1.0) | settings
    vocab, horizon = settings.pop('vocab'), settings.pop('horizon')
    target, draft = Table(1, vocab), settings.pop('draft', Table(2, vocab))
    run = law_by_cycles if isinstance(method, ecsv) else enumerate_law
    own = {k: x for k, x in settings.items() if k in ('temperature', 'top_k', 'top_p', 'eos')}
    gap = variation(run(target, draft, method, horizon, **settings), exact_law(target, horizon, **own))
    assert gap < 1e-9 if method.lossless else gap > 0.01
    probing, cut = replace(method, controller='probe'), type(method).lossless is ecsv.lossless  # point masses
    assert isinstance(method, SpecGuard) or probing.lossless == cut         # samples may not be cut: biased


def test_other_laws():
    """lossy_sd's law is min(q, s / l) + residual, a cascade's its own pi, specguard's at -inf the draft's."""
    target, draft, method = Table(1, 3), Table(2, 3), via(2, gate='lossy_sd', keep=0.6, escalate=0.0)
    mask = dict(calibration=MASK['calibration'], temperature=1.0)
    mixed = lambda p, q, l: (kept := torch.minimum(q, p / l)) + (1 - kept.sum()) * residual(p, q)
    for text, chance in enumerate_law(target, draft, method, 2, **mask).items():
        for i, x in enumerate(text):                # slim wrote all that it reads, from the root on
            s, q = probs(target.row(tuple(y + 0.5 for y in (0, *text[:i])))), probs(draft.row((0, *text[:i])))
            chance /= float(mixed(s, q, 0.6)[x])
        assert abs(chance - 1) < 1e-9
    target, draft = Table(1), Table(2)
    q, p = probs(draft.row((0,))), probs(target.row((0,)))
    inside, apart = q * (p >= 0.4 * p.max()), 1 - overlap(p, q)
    for name, knobs, pi in (('cascade', dict(lam=0.3), q if q.max() >= 0.7 else p),
                            ('cascade-opt', dict(lam=0.3), q if q.max() >= p.max() - 0.3 * apart else p),
                            ('cascade-tokenv3', dict(lam=0.6), inside + (1 - inside.sum()) * p),
                            *(('lenient', dict(lenience=l), mixed(p, q, l)) for l in (0.8, 0.5, 0.2))):
        law = enumerate_law(target, draft, METHODS[name](1, **knobs), 2, temperature=1.0)
        for text, chance in law.items():
            after = probs(target.row((0, text[0])))                         # what follows is the target's
            assert chance == pytest.approx(float(pi[text[0]] * after[text[1]]))
    for l, known in {0.8: 0.107, 0.5: 0.167, 0.2: 0.209}.items():           # as the README says
        assert float((mixed(p, q, l) - p).abs().sum() / 2) == pytest.approx(known, abs=5e-4)
    law = lambda **knobs: enumerate_law(target, draft, SpecGuard(**knobs), 2, temperature=1.0, **LINES)
    drafts = exact_law(draft, 2, temperature=0.7)
    assert variation(law(k=1, tau=-math.inf), drafts) < 1e-9
    assert min(variation(law(k=2, tau=-math.inf), drafts), variation(law(k=1, tau=0.5), drafts)) > 0.01


@pytest.mark.parametrize('method, right', [
    (Exact(2), True), (PROBED := cmasd(k_max=3, alpha=2, accept_='strict'), True),
    (WrongResidual(2), False), (replace(PROBED, controller='probe'), False)])
def test_chi_square(method, right):
    """The first two of 5 tokens, drawn by the real generator, follow the law; so should 9,999 of 10,000
    seeds, all four cases together (Bonferroni). Cells that expect fewer than 5 are pooled."""
    law, n = exact_law(Table(2, 5), 2, temperature=1.0), 2000 if right else 1200
    s, seen, wanted = session(Table(2, 5), Table(7, 5), [0], 4, temperature=1.0), Counter(), Counter()
    cell = lambda text: text if n * law[text] >= 5 else 'rare'
    for text, p in law.items():
        wanted[cell(text)] += n * p
    for _ in range(n):
        s.tokens, s.room, cycles = [0], 4, specmini.decode(s, replace(method))
        while len(s.tokens) < 3:
            next(cycles)
        seen[cell(tuple(s.tokens[1:3]))] += 1
    x = sum((seen[cell] - wanted[cell]) ** 2 / wanted[cell] for cell in wanted)
    chance = torch.special.gammaincc(*torch.tensor([(len(wanted) - 1) / 2, x / 2]).double())
    assert len(wanted) > 10 and (chance > 1e-4 / 4) == right


def test_greedy_identity():
    """sd's text is plain decoding's, in fp64, wherever it ends; its caches hold what fresh ones would."""
    rng, inside = random.Random(5), 0
    targets, drafts = [network(s) for s in range(4)], [network(s) for s in range(10, 14)]
    for case in range(250):
        target, prompt = rng.choice(targets), rng.choices(range(11), k=rng.choice([1, 2, 5, 9, 50, 63]))
        draft = target if case % 3 == 0 else rng.choice(drafts)
        method = Exact(rng.choice([1, 2, 3, 4, 8]), draft_temperature=rng.choice([None, 0, 1.0]))
        room, source = min(rng.randint(1, 20), 64 - len(prompt)), rng.choice([rollout, rollout, lookup])
        wanted = plain(target, prompt, room)
        eos = frozenset([rng.choice(wanted)] if case % 4 else [])
        end = next((i + 1 for i, x in enumerate(wanted) if x in eos), room)
        s = session(target, draft, prompt, room, source, case, eos=eos)
        tokens, cycles = write(s, method)
        assert tokens == wanted[:end] and s.ended == bool(eos), (case, method, prompt)
        assert all(sum(j['kept'] for j in c.judged) == c.accepted for c in cycles)      # none behind the end
        inside += bool(eos) and 0 < cycles[-1].accepted == len(cycles[-1].tokens) < len(cycles[-1].drafted)
        for reader in (s.target, s.draft) if source is rollout else (s.target,):
            assert trusted(reader, s.tokens) >= len(s.tokens) - 3           # the last cycle may draft nothing
    assert inside > 10


def test_a_draft_that_is_the_target():
    """accepts everything, with one target pass a cycle; the prompt is not counted."""
    target = network(3)
    for temperature in (0.0, 1.0):
        _, cycles = write(session(target, target, [1, 2, 3], 30, temperature=temperature), Exact(4))
        assert all(c.passes['target/full'][:2] == [1, 5] for c in cycles)
        # the root, then three drafted; in the next cycle the unread fourth and the bonus first
        assert [c.passes['draft/full'][:2] for c in cycles[:2]] == [[4, 4], [4, 5]]
        s = specmini.statistics(cycles, 0.0, {'target/full': 10, 'draft/full': 5})
        assert (s['cycles'], s['acceptance_rate'], s['rejection_rate']) == (6, 1, 0)
        assert (s['block_efficiency'], s['work']) == (5, 6 + 24 / 2)
        assert s['labels'] == dict(draft=24, bonus=6) and s['drafted'] == s['judged'] == s['accepted'] == 24


def test_caches_after_each_cycle():
    """After any commit both caches are as fresh ones, but for the tokens that the next pass reads."""
    s = session(network(0), network(1), [1, 2, 3], 30, temperature=1.0)
    s.read_prompt()
    assert all(trusted(r, s.tokens) >= len(s.tokens) - 2 for _ in specmini.decode(s, Exact(4))
               for r in (s.target, s.draft))


def test_lookup():
    make = lambda tokens: lookup(session(network(), None, tokens, 9, lookup), Exact(), 3)
    assert make([1, 2, 3, 4, 5, 9, 1, 2, 3]).tokens == [4, 5, 9]
    assert make([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3]).tokens == [4, 0, 2]      # three tokens in common beat two
    assert make([1, 2, 3, 1, 2, 4, 1, 2]).tokens == [4, 1, 2]               # the latest occurrence
    assert make([1, 2, 3]).tokens == [] and make([1]).tokens == []
    assert torch.equal(make([1, 2, 3, 1, 2]).q.argmax(-1), torch.tensor([3, 1, 2]))


# ------------------------------------------------------------------------ CM-ASD

def test_confidence_window_threshold():
    """The signals, window and threshold by hand; a block ends behind the token that fills its window."""
    z = torch.randn(50, 9, generator=seeded(), dtype=torch.float64)
    read, top = lambda z: torch.tensor(verify.signals(z), dtype=torch.float64), z.topk(2).values
    found = read(z)
    assert torch.allclose(found[:, 1], torch.tanh((top[:, 0] - top[:, 1]) / 2))
    assert torch.allclose(found[:, 0], 1 + (z.softmax(-1) * z.log_softmax(-1)).sum(-1) / math.log(9))
    assert (read(z * 1.1) > found).all() and (found >= 0).all() and (found <= 1).all()
    assert verify.signals(torch.zeros(1, 9)) == [pytest.approx([0, 0, 0], abs=1e-6)]
    assert verify.signals(torch.eye(9)[:1] * 1e4) == [pytest.approx([1, 1, 1])]
    m = cmasd(k_min=2, k_max=10, alpha=0.9, tau_base=0.2, gamma_tau=2.0)
    assert m.confidence(z) == pytest.approx(found.mean(-1).tolist())
    assert replace(m, lam_margin=0, lam_softmax=0).confidence(z) == pytest.approx(found[:, 0].tolist())
    assert [m.window(c) for c in (0, 0.1, 0.5, 1)] == [2, 2, 4, 9] and cmasd().window(1) == 10
    with pytest.raises(ValueError, match='weights overflow'):
        m.window(math.nan)
    score = type('Score', (), dict(draft=Draft([], None, notes=[dict(confidence=c) for c in (1, 0.75, 0)])))
    assert [m.threshold(score, i) for i in range(3)] == pytest.approx([0.2, 0.7, 1.0])
    assert replace(m, tau_base=0.0).threshold(score, 0) == 0.01
    m, model = cmasd(k_max=8, alpha=1.5, tau_base=1.0), network(0, vocab=30)
    _, cycles = write(session(model, model, [1], 60, temperature=1.0), m)   # every token is kept
    for c in cycles[:-2]:                                                   # the room cuts the last
        sure = [j['confidence'] for j in c.judged]
        full = [i >= m.window(sum(sure[:i]) / i) for i in range(1, len(c.drafted) + 1)]
        assert full.index(True) == len(full) - 1
    assert len({len(c.drafted) for c in cycles[:-2]}) > 2
    exact, same = (write(session(model, network(1, vocab=30), [1], 40, temperature=1.0), method)
                   for method in (Exact(4), cmasd(4, controller='fixed', tau_base=1.0, gamma_tau=0)))
    assert exact[0] == same[0] and [c.labels for c in exact[1]] == [c.labels for c in same[1]]


@pytest.mark.parametrize('controller', verify.CONTROLLERS)
def test_controllers(controller):
    """Greedy text is plain decoding's with every controller, on sd, cmasd and ecsv; blocks vary in length."""
    target, drafts = network(0), [network(0), network(1)]
    wanted = plain(target, [1, 2], 40)
    for method, source in ((Exact(3), rollout), (cmasd(3, tau_base=1.0), rollout), (Exact(3), lookup),
                           (ecsv(3), rollout)):
        method, lengths = replace(method, controller=controller), set()
        for draft in drafts:
            tokens, cycles = write(session(target, draft, [1, 2], 40, source), method)
            assert tokens == wanted, method
            left = itertools.accumulate((len(c.tokens) for c in cycles), int.__sub__, initial=40)
            lengths |= {len(c.drafted) for c, room in zip(cycles, left) if len(c.drafted) < room - 1}
        assert source is lookup or (len(lengths) == 1) == (controller == 'fixed'), lengths
    s = slim_session()                                  # with this gate via's text is the target's too
    method = via(3, controller=controller, gate='two_level_exact')
    assert write(s, method)[0] == plain(s.target.model, [1, 2, 3], 24)


def test_controllers_by_hand():
    """The published rules: +2 / -1, the ROC's limit, the moving average; the oracle stops at an error."""
    rule = lambda name: verify.CONTROLLERS[name](Exact(3))
    logits = torch.zeros(4, 9)
    logits[:, 5] = torch.tensor([4.0, 3.0, 2.0, -1.0])
    draft = Draft([5] * 4, logits.softmax(-1), logits)
    h, roc, average = map(rule, ('hf-heuristic', 'hf-roc', 'moving-average'))
    assert [h.learn(draft, k) or h.size for k in (4, 4, 3, 0, 0, 0, 0, 0, 0)] == [5, 7, 6, 5, 4, 3, 2, 1, 1]
    assert (roc.learn(draft, 3) or roc.limit) == 0.4                        # not before six are judged
    assert (roc.learn(draft, 3) or roc.limit) == pytest.approx(float(draft.q[2, 5]))    # fpr and fnr 0 there
    for kept, wanted in ((4, (0.5, 0.601)), (0, (0.25, 0.602)), (4, (0.625, 0.603))):
        average.learn(draft, kept)
        assert (average.rate, average.limit) == pytest.approx(wanted)
    loop = rule('closed-loop')
    assert (loop.learn(draft, 3) or loop.rule.alpha, loop.rate) == (0.875, 0.875)
    assert (loop.learn(draft, 0) or loop.rule.window(1.0)) == 4             # alpha 0.4375, of 10
    average.rate = 1.0
    assert (average.learn(draft, 4) or average.limit) == pytest.approx(0.602)
    _, cycles = write(session(network(0), network(1), [1], 40), Exact(controller='oracle'))
    assert all(not any(j['kept'] for j in c.judged[len(c.drafted) - 1:]) for c in cycles[:-1])


def test_confidence_by_dropout():
    """In 0..1, the same for a seed; rows that agree are sure; its passes count; tau = 1 gives plain text."""
    make = lambda **knobs: METHODS['cmasd-dropout'](k_max=6, alpha=2, **knobs)
    run = lambda method, seed=3, t=1.0: write(session(network(0), network(1), [1, 2], 30, seed=seed,
                                                      temperature=t), method)
    runs = [run(make(rows=5, drop=0.3), seed) for seed in (3, 3, 4)]
    said = [[j for c in cycles for j in c.judged] for _, cycles in runs]
    sure = [j['confidence'] for j in said[0]]
    assert said[0] == said[1] != said[2] and 0 <= min(sure) < 0.9 < max(sure) <= 1
    for c in runs[0][1]:
        assert c.passes.get('draft/full dropout', [0, 0])[1] == 5 * len(c.drafted)
        assert all(j['threshold'] == min(1, 0.3 + 0.5 * (1 - j['confidence'])) for j in c.judged)
    for j in (j for c in run(make(drop=0.0))[1] for j in c.judged):         # whole networks
        assert j['confidence'] == pytest.approx(1) and j['mean'] == pytest.approx(j['q'])
    method, draft = make(rows=3), Draft([5, 6], None)
    method.samples = lambda *_: torch.tensor([[0.9, 0.2], [0.0, 0.2], [0.0, 0.2]])     # the extremes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cmasd, 'propose', lambda *_: draft)
        assert [row['confidence'] for row in method.propose(None).notes] == pytest.approx([0, 1], abs=1e-6)
    assert make(tau_base=1).lossless and not make().lossless
    assert run(make(tau_base=1), t=0.0)[0] == plain(network(0), [1, 2], 30)
    s = slim_session()
    s.draft = None                                      # the target's slim path drafts, and is thinned
    assert write(s, make(tau_base=1))[0] == plain(network(0, num_hidden_layers=4), [1, 2, 3], 24)


def test_rules_by_hand():
    """A tie with the best is kept below tau = 1; Medusa's two numbers, 0.09 and 0.3, are easily swapped."""
    draft = Draft([0, 1, 2, 3], torch.ones(4, 4), notes=[dict(confidence=1.0)] * 4)
    score = verify.Score(session(network(), None, [1], 2), draft, None)
    score.logits = torch.tensor([[3.0, 3.0 + math.log(0.6), 3.0, 0.0]] * 5, dtype=torch.float64)
    for method, knobs, wanted in (
            ('cmasd', dict(tau_base=0.59), [1, 1, 1, 0]), ('cmasd', dict(tau_base=0.61), [1, 0, 1, 0]),
            ('cmasd', dict(tau_base=1.0), [1, 0, 0, 0]),
            ('cmasd-prob', dict(tau_base=0.37), [1, 0, 1, 0]),              # p is 0.38, 0.23, 0.38, 0.02
            ('cmasd-typical', dict(tau_base=0.3, delta=1.0), [1, 0, 1, 0]),
            ('cmasd-specdec', dict(tolerance=0.6), [1, 1, 1, 0]),
            ('cmasd-specdec', dict(tolerance=9.0, top_beta=2), [1, 0, 1, 0])):
        assert [METHODS[method](**knobs).kept(score, i) for i in range(4)] == wanted
    score.p, score.pq = torch.tensor([[0.2, 0.8]]), [(0.2, 1.0)]            # exp(-H) is 0.6063
    for epsilon, delta, limit in ((0.09, 0.3, 0.09), (0.3, 0.09, 0.05457), (0.3, 0.3, 0.18190)):
        method = METHODS['typical'](epsilon=epsilon, delta=delta)
        assert method.threshold(score, 0) == pytest.approx(limit, abs=1e-4) and method.kept(score, 0) == 1
    assert METHODS['typical']().threshold(score, 0) == pytest.approx(0.09)


def cycle(drafted, *kept, added=1, chance=1.0, passes=()):
    """A Cycle: tokens drafted, the verdicts of those judged, tokens added behind the kept; took a second."""
    rows = [dict(kept=k, chance=chance, p=float(chance == 1.0), q=1.0) for k in kept]
    labels = ['draft'] * sum(kept) + ['target'] * added
    return verify.Cycle([0] * drafted, rows, [0] * len(labels), labels, dict(passes), 1.0)


def test_remarks_by_hand():
    """Each failure signature is said when there, none when all goes well; break-even takes each length."""
    said = lambda *cycles: compare.remarks(cmasd(), None, cycles, [])
    assert said() == said(cycle(4, True, True, True, True)) == []
    assert [text[:23] for text in said(cycle(2, True, False))] == ['100% of the cycles were']
    assert [text[:23] for text in said(cycle(1, True, chance=0.9))] == ['90.0% of the judged tok']
    assert said(cycle(1, True, added=1), cycle(8, False)) == [              # (1 - 0.5^5.5) / 0.5 expected
        'no gain over a fixed window: 1.96 tokens a cycle would be expected from gamma=4.5 at this '
        'acceptance rate, 1.50 were seen']
    cycles = [cycle(n, True, False, passes={'target/full': (1, 2, 1.0)}) for n in (1, 3)]
    said = compare.break_even(cycles, 1.0)                      # (1.5 + 1.875) / 2; the mean of 2 gives 1.75
    assert 'gives 1.69 a cycle for the time of 1.00 decoding passes: 1.69 times' in said
    cycles[0].tokens += [0]                                     # more than one: counted, not predicted
    assert 'gives 2.50 a cycle' in compare.break_even(cycles, 1.0)

    def said(tokens=2, length=40, right=(True, None), **knobs):
        reports = [dict(prompt_tokens=length, tokens=[0], right=x) for x in right]
        sparse, cycles = METHODS['sparse'](dense_below=40, **knobs), [cycle(0, added=tokens)]
        found = compare.remarks(Exact(), sparse, cycles, reports)
        assert found == compare.remarks(sparse, sparse, cycles, reports)    # by either name, and once
        return [text[8:30] for text in found]
    assert said() == said(right=(True, False)) == said(length=39, rho=1.0) == []
    assert said(tokens=1) == ['only 1.00 tokens a cyc']
    assert said(length=39) == ['2 texts stayed below d']
    assert said(right=(False, False, True)) == ['2 graded texts are wro']
    assert len(said(1, 39, (False,))) == 3 and compare.remarks(Exact(), None, [], []) == []


# ------------------------------------------------------------------------ ECSV

@pytest.mark.parametrize('R, L, policy, align, bonus', [
    (1, None, 'disagreement', 'positional', False), (2, 4, 'entropy', 'prefix', True),
    (4, 6, 'agree_entropy', 'positional', True), (3, 3, 'entropy', 'positional', False),
    (0, 9, 'disagreement', 'prefix', True), (1, 2, 'entropy', 'positional', True)])
def test_spots_keep_the_budget_and_the_text(R, L, policy, align, bonus):
    """Plain decoding's text; target positions stay in the budget; what a check has read is not paid twice."""
    target, twice, saved = network(0), 0, 0
    method = METHODS['ecsv-spot'](4, draft_temperature=1.5, spots=R, budget=L, policy=policy, align=align,
                                  bonus_check=bonus)
    for draft, prompt in itertools.product((network(0), network(1)), ([1, 2], [3])):
        tokens, cycles = write(session(target, draft, prompt, 40, seed=1), method)
        assert tokens == plain(target, prompt, 40)
        for c in cycles:
            passes, positions, _ = c.passes['target/full']
            assert positions <= (L or len(c.drafted) + 1)
            twice, saved = twice + (passes == 2), saved + (passes == 2 and positions == len(c.drafted) + 1)
    assert (saved or not R) and (twice or not R and not (bonus and L))


def test_fusion():
    """Votes, prefix alignment, ties by hand; the order of branches changes nothing; ends of the knobs."""
    def ballot(tokens):                                 # the branches share random logits at each position
        z = torch.randn(1, len(tokens[0]), 6, generator=seeded(), dtype=torch.float64)
        return verify.Ballot.of(torch.tensor(tokens), z.expand(len(tokens), -1, -1), 4)
    same, votes = METHODS['vote-unif'](), ballot([[0, 1, 2], [0, 2, 3], [3, 2, 2]])
    assert same.fuse(votes) == [0, 2, 2]
    tie = ballot([[0, 1], [0, 2], [3, 2]])                                  # by prefix 1 to 1: mean q decides
    q = dict(zip(tie.names[1], tie.q[0][1]))
    assert same.fuse(tie) == [0, 2] and replace(same, align='prefix').fuse(tie) == [0, max((1, 2), key=q.get)]
    tie = ballot([[1], [2]])
    for best in (1, 2):                                                 # the verifier's logit, where asked
        tie.verifier[0] = [9.0 if x == best else 0.0 for x in tie.names[0]]
        assert same.fuse(tie) == [best]
    for seed in range(20):
        rows = torch.randint(0, 6, (4, 3), generator=seeded(seed)).tolist()
        votes, back = ballot(rows), ballot(rows[::-1])
        for m in (ecsv(), METHODS['ecsv-soft'](align='prefix'), ecsv(granularity='window')):
            assert m.fuse(votes) == m.fuse(back)
        assert ecsv(gamma_r=0).fuse(votes) == same.fuse(votes)
        assert ecsv().fuse(ballot(rows[:1])) == rows[0]                     # one branch is its own vote
        best = [names[q.index(max(q))] for names, q in zip(votes.names, votes.q[0])]   # the branches share q
        assert METHODS['mean-argmax']().fuse(votes) == best


def test_reliability_by_hand():
    """Each sign, its means, where a check goes, its margin: turned round, the text would stay lossless."""
    votes = verify.Ballot([[5, 1], [5, 2], [4, 3]], [[0.0, 0.5], [0.2, 0.5], [0.4, 0.9]],
                          [[-1.0, -3.0], [-2.0, -3.0], [0.0, -4.0]], [[5, 5, 4], [1, 2, 3]], None,
                          [[0.0, 0.0] for _ in range(3)], {})
    alone = lambda **knobs: [[math.log(w) for w in row] for row in ecsv(
        **dict(a_entropy=0, a_agree=0, a_self=0) | knobs).weights(votes)]
    near = lambda *rows: [pytest.approx(row, abs=1e-9) for row in rows]
    assert alone(a_entropy=2) == near([0, -1], [-0.4, -1], [-0.8, -1.8])
    assert alone(a_agree=1) == near([0.5, 0], [0.5, 0], [0, 0])             # of the other two
    assert alone(a_self=0.5, gamma_r=2) == near([-1, -3], [-2, -3], [0, -4])
    assert alone(a_self=1, granularity='branch') == near([-2, -2], [-2.5, -2.5], [-2, -2])
    assert alone(a_self=1, granularity='window', window=2) == near([-1, -2], [-2, -2.5], [0, -2])
    assert alone(a_self=1, granularity='window', window=1) == alone(a_self=1)
    for policy in ('disagreement', 'entropy', 'agree_entropy'):
        asked = [votes.doubtful(policy, R, reach) for R, reach in ((1, 2), (2, 2), (2, 1), (0, 2))]
        assert asked == [[1], [0, 1], [0], []]
    votes.entropy, votes.tokens = [[0.9, 0.1]] * 3, [[5, 1], [5, 1], [5, 2]]
    assert [votes.doubtful(policy, 1, 2) for policy in ('disagreement', 'entropy', 'agree_entropy')] == [
        [1], [0], [0]] and votes.doubtful('disagreement', 2, 2) == [1]      # where all agree there is none
    votes.tokens, rows = [[5, 1], [5, 2], [4, 3]], torch.tensor([[0.0, 0, 0, 0, 3, 1], [0.0, 7, 2, 6, 9, 0]])
    votes.ask(rows, [1])
    assert votes.verifier == {1: [7, 2, 6]} and votes.margins == [[0, -2], [0, -7], [0, -3]]
    votes.ask(rows, [0])                                # the target's favourite: its lead over the second
    assert [row[0] for row in votes.margins] == [-2, -2, 2] and alone(a_spot=1)[2] == near([2, -3])[0]


def test_branches(tmp_path):
    """B = 1 proposes what sd's draft samples; of two drafts the second has half, its passes are counted."""
    make = lambda: session(network(0), network(1), [1, 2], 30, temperature=1.0, seed=3)
    one = ecsv(4, branches=1, draft_temperature=1.0, draft_top_p=1.0)
    assert one.propose(make()).tokens == rollout(make(), Exact(4), 4).tokens
    target, draft, other = map(byte_network, (0, 1, 5))
    target, *_ = load(checkpoint(tmp_path / 'target', target))
    two = lambda name, *how, **changes: write(session(target, draft, [1, 2], 20), METHODS['ecsv-two'](
        3, second=str(checkpoint(tmp_path / name, *how, **changes))))
    tokens, cycles = two('other', other)
    assert tokens == plain(target, [1, 2], 20) and cycles[0].passes['draft/full'][0] == 6
    with pytest.raises(ValueError, match="token 256 is '<x>' there and '<eos>' in the target"):
        two('words', other, Tokenizer.from_str(bytes_tokenizer().to_str().replace('<eos>', '<x>')))
    with pytest.raises(ValueError, match='expected a context of 22 tokens, not of 16'):
        two('short', other, max_position_embeddings=16)


def test_synthetic_channel():
    """With independent noise the MAP vote meets its closed form, calibrated ECSV is it, no weights do worse;
    with correlated branches nothing is gained. 5,000 symbols: 0.03 is 5 standard errors of a rate of 0.8."""
    rates, V, n, rng = [0.1, 0.5, 0.55, 0.55, 0.6], 4, 5_000, seeded()
    wrong = torch.rand(5, n, generator=rng) < torch.tensor(rates)[:, None]
    seen, flat = torch.where(wrong, torch.randint(1, V, (5, n), generator=rng), 0), torch.zeros(5, n, V)
    right = lambda method, votes: method.fuse(votes).count(0) / n           # the truth is always 0
    method = METHODS['ecsv-map'](branches=5, errors=','.join(map(str, rates)))
    votes, method.vocab = verify.Ballot.of(seen, flat, 0), V
    like = lambda y, truth: math.prod(1 - e if a == truth else e / (V - 1) for a, e in zip(y, rates))
    best = sum(max(like(y, t) for t in range(V)) / V for y in itertools.product(range(V), repeat=5))
    assert right(method, votes) == pytest.approx(best, abs=0.03)
    votes.own = [[math.log(w)] * n for w in lab.rivals.map_weights(rates, V)]           # w = exp(r)
    assert ecsv(a_entropy=0, a_agree=0, a_self=1).fuse(votes) == method.fuse(votes)
    assert right(METHODS['vote-unif'](), votes) + 0.03 < right(method, votes)
    equal = torch.where(torch.rand(5, n, generator=rng) < 0.3, torch.randint(1, V, (5, n), generator=rng), 0)
    majority = sum(math.comb(5, k) * 0.7 ** k * 0.3 ** (5 - k) for k in range(3, 6))    # of right votes
    vote = lambda seen: right(METHODS['vote-unif'](), verify.Ballot.of(seen, flat, 0))
    assert vote(equal) > majority - 0.03 > vote(equal[:1].expand(5, n))      # no bound where all err alike
    alike = verify.Ballot.of(seen[:1].expand(5, n), flat, 0)
    assert right(ecsv(), alike) == pytest.approx(1 - wrong[0].double().mean().item())


# ------------------------------------------------------------------------ VIA-SD and train_mask.py

def test_calibration_file(tmp_path, capsys):
    """What is written is read again by section; what is of other models, or no mask, is refused in a line."""
    a, b = (checkpoint(tmp_path / str(i), byte_network(i)) for i in range(2))
    flags = '--target', a, '--draft', b, '--prompt', 'x', '--method', 'via', '--max-new', 9
    refused(capsys, 'no section', *flags)
    signals = {f'{who}_{x}': [-2.5, 0.5] for who in ('draft', 'target') for x in ('logp', 'grounding')}
    write_calibration(a, 'signals', signals, draft=b)
    write_calibration(a, 'mask', dict(skip=[1, 2]))
    found = read_calibration(a, b, ['mask', 'signals'])
    assert (found['mask']['skip'], found['signals']['draft_logp']) == ([1, 2], [-2.5, 0.5])
    for more in ('', '--draft lookup', '--draft self', '--draft self --method sd --check'):
        status, _, err = program(capsys, *flags, *more.split())
        said = [words in err for words in ('middle stage: ', 'equal to plain')]
        assert status == 0 and said == [not more, 'check' in more]
    for nested, most in ({}, 2), (dict(nested=[[1, 2]]), 3):
        write_calibration(a, 'mask', dict(skip=[1, 2]) | nested)
        refused(capsys, f'expected at most {most}', *flags, '--method', 'via-tiers', '--set', 'tiers=5')

    def wrong(words, folder, draft, need):
        with pytest.raises(ValueError, match=re.escape(words)):
            read_calibration(folder, draft, [need])
    wrong("no section 'anchors', which the method needs; make it with", a, b, 'anchors')
    wrong('with another draft', a, a, 'signals')
    wrong('there is no draft model', a, None, 'signals')
    for ends in ([1.0], [1.0, 0.0], 'wide', None):
        write_calibration(a, 'signals', signals | dict(draft_logp=ends), draft=b)
        wrong(f'draft_logp is {ends!r}, expected two numbers', a, b, 'signals')
    (b / 'calibration.json').write_text((a / 'calibration.json').read_text())
    wrong('measured on another target', b, None, 'mask')
    for mask in (*(dict(skip=x) for x in ([0, 1, 2, 3], [4], [-1], [1.0], ['1'], [[1]], 'all', None)),
                 dict(skip=[1], nested=None), dict(skip=[1], nested=[[99]])):
        write_calibration(a, 'mask', mask)
        wrong('expected some, not all, of sublayers 0..3', a, None, 'mask')
    tables = dict(anchors=[1, 0], channels=[[0.1], [0.2, 0.3]], experts=[[], [[0.5]]])
    for broken in (dict(anchors=[2]), dict(anchors=[]), dict(channels=[[], [0.1]]), dict(channels=[[0.1]]),
                   dict(experts=None), dict(experts=[[], [0.5]])):
        write_calibration(a, 'sparse', tables | broken)
        wrong('do not fit 2 layers; make it with python train_mask.py --anchors', a, None, 'sparse')
    write_calibration(a, 'sparse', tables)
    assert read_calibration(a, None, ['sparse'])['sparse'] == tables
    write_calibration(b, 'mask', dict(skip=[1]))                            # another model: nothing stays
    wrong("no section 'signals'", b, a, 'signals')


def slim_session(seed=0, room=24, skip=(2, 3, 4), **settings):
    mask = dict(skip=list(skip), nested=[[2, 3, 4, 5], [2, 3], [2]])
    return session(network(seed, num_hidden_layers=4), network(seed + 10), [1, 2, 3], room,
                   calibration=dict(mask=mask), **settings)


@pytest.mark.parametrize('name, who, knobs', [
    ('via', 'draft', dict(keep=0.0, escalate=0.0)), ('via', 'draft', dict(keep=0.0, escalate=0.0, max_lag=0)),
    ('via', 'slim', NEVER), ('via', 'slim', NEVER | dict(slim_bonus=True)),
    ('via', 'slim', NEVER | dict(gate='lossy_sd')), ('via', 'all layers', dict(keep=1.0)),
    ('via', 'target', ALWAYS), ('via', 'target', ALWAYS | dict(after_escalation='gate', max_lag=0)),
    ('via', 'target', dict(gate='two_level_exact')), ('via-mid', 'target', dict(keep=1.0)),
    ('via-tiers', 'target', dict(tiers=2)), ('via-tiers', 'target', ALWAYS | dict(tiers=5))])
@pytest.mark.parametrize('gamma', [1, 5])
def test_limits_of_via(name, who, knobs, gamma):
    """At the ends of its knobs via writes the draft's, slim's or the target's greedy text, and no other."""
    for seed in range(2):
        s, alone = slim_session(seed, skip=() if who == 'all layers' else (2, 3, 4)), slim_session(seed)
        s.mid = Reader(s.target.model, 64) if name == 'via-mid' else None   # slim that is never wrong
        alone.read_prompt()
        alone.draft = None                                                  # slim drafts for itself
        draft, target = (plain(reader.model, [1, 2, 3], 24) for reader in (s.draft, s.target))
        slim, (got, cycles) = rollout(alone, Exact(), 24).tokens, write(s, METHODS[name](gamma, **knobs))
        assert draft != slim != target != draft and got == dict(draft=draft, slim=slim).get(who, target)
        if knobs.get('max_lag') == 99:
            assert not any('target/full' in c.passes for c in cycles)       # nothing escalated: no full pass


@pytest.mark.parametrize('name, knobs', [
    ('via', dict(escalate=0.01, max_lag=3)), ('via', dict(gate='lossy_sd', escalate=0.1)),
    ('via', dict(after_escalation='gate')), ('via', dict(gate='one_minus_alpha', after_escalation='gate')),
    ('via', dict(keep=0.9, escalate=0.2, slim_bonus=True)), ('via-tiers', dict(tiers=5))])
def test_via_ledger_and_caches(name, knobs):
    """A full pass only to escalate or at the lag's limit; what full trusts equals a fresh prefill."""
    seen, spent, over, lag, method = Counter(), Counter(), 0, 0, METHODS[name](4, **knobs)
    s = slim_session(3, 40, temperature=1.0)
    s.read_prompt()
    for c in specmini.decode(s, method):
        asked, late, up = any(j['by'] == 'target' for j in c.judged), lag > method.max_lag, False
        assert c.passes.get('target/full', [0, 0])[:2] == [
            late + asked, lag * (late or asked) + asked * (len(c.drafted) + 1)]     # the lag is paid for
        assert len(c.judged) == min(c.accepted + 1, len(c.drafted))                 # one region each
        assert name != 'via' or c.passes['target/slim'][:2] == [1, len(c.drafted) + 1]
        for j in c.judged:
            up = j['ratio'] < method.bounds[0] or up and method.after_escalation == 'full'
            assert (j['by'] == 'target') == up
            assert up or method.gate == 'lossy_sd' or j['chance'] == (j['ratio'] >= method.bounds[1])
            seen[j['by'], j['kept']] += 1
        spent.update(c.passes.keys())
        over += late
        lag = max(0, len(s.tokens) - 1 - trusted(s.target, s.tokens))
    assert (over > 0) == (method.max_lag == 3) and seen['target', True] and seen['target', False]
    assert seen['slim', True] and bool(seen['slim', False]) == (method.gate != 'one_minus_alpha')
    assert name == 'via' or spent['target/slim1'] > spent['target/slim2'] > spent['target/slim3'] > 0


@pytest.mark.parametrize('unit, useless, objective', [
    ('layer', {4, 5, 8, 9}, 'violation'), ('layer', {4, 5, 8, 9}, 'argmax'),
    ('sublayer', {3, 4, 9, 10, 13}, 'violation')])
def test_the_search_finds_planted_sublayers(unit, useless, objective, tmp_path, capsys):
    """Sublayers whose output weights are zero add nothing: the search finds exactly those, resumed or not."""
    model, text = byte_network(3, num_hidden_layers=8), tmp_path / 'text'
    for j in useless:
        layer = model.model.layers[j // 2]
        (layer.mlp.down_proj if j % 2 else layer.self_attn.o_proj).weight.zero_()
    folder = checkpoint(tmp_path / 'm', model, num_hidden_layers=8, max_position_embeddings=512)
    text.write_text('To be, or not to be, that is the question. ' * 9)
    flags = (f'--target {folder} --text {text} --unit {unit} --objective {objective} --windows 2 '
             f'--patience 999 --skip {(len(useless) + 0.1) / 16}')
    run = lambda more: train_mask.main(f'{flags} {more}'.split())
    a, b, c = (run(more) or read_calibration(folder, needs=['mask'])['mask'] for more in (
        '--evaluations 90', '--evaluations 30', '--evaluations 90 --resume'))
    assert set(a['skip']) == useless and a['cost'] < 1e-9 < min(a['evenly'], a['random'])
    assert len(b['tried']) <= 30 and list(c['tried'].items()) == list(a['tried'].items())   # as uninterrupted
    assert [run('--resume --seed 1'), run('--skip 0.9')] == [2, 2]
    assert re.search('give this one the same\n.*free .*layers; expected 1 to', capsys.readouterr().err)


def test_search_against_all_masks_and_chance(monkeypatch):
    """It meets the best of all 70 masks of 4 of 8 units, beats chance on 16; what ends it keeps the best."""
    weights, pairs = torch.rand(16, generator=(g := seeded())), 0.2 * torch.rand(16, 16, generator=g)
    cost = lambda z: float((weights[list(z)].sum() + pairs[list(z)][:, list(z)].sum()).exp())

    def best(m, k, period, seed):
        tried, flags = {}, f'--patience 999 --period {period} --seed {seed}'
        train_mask.search(cost, m, k, train_mask.parse(flags.split()), tried)
        return min(tried.values())
    optimum = min(map(cost, itertools.combinations(range(8), 4)))
    assert max(best(8, 4, '2', i) for i in range(3)) <= 1.05 * optimum
    assert sum(best(16, 7, '2', i) for i in range(3)) < 0.9 * sum(best(16, 7, '0', i) for i in range(3))
    train_mask.search(lambda z: len(idle), 8, 4, train_mask.parse(['--patience', '5']), idle := {})
    assert len(idle) == 6 and train_mask.parse([]).patience < train_mask.parse([]).evaluations
    model, *_ = load(EMBEDDED / 'target')
    # costs of 11 masks that are not searched, of 10 that are, then of nested ones; each takes a minute
    for last, minutes, tried, nested in ((22, 60, 10, 1), (15, 60, 3, 3), (99, 7, 7, 1), (99, 12, 10, 2)):
        windows = SimpleNamespace(cost=lambda skip, objective: float(sum(skip)))
        costs = interrupt(monkeypatch, windows, 'cost', last)
        monkeypatch.setattr(train_mask, 'time', SimpleNamespace(perf_counter=lambda: 60.0 * len(costs)))
        flags = f'--evaluations 10 --minutes {minutes}'.split()
        found = train_mask.find_mask(model, windows, train_mask.parse(flags), {})
        assert (len(found['tried']), len(found['nested'])) == (tried, nested)
        assert found['nested'][0] == found['skip'] and len(costs) - 11 <= min(minutes, 11 + 6 + 8)


def test_violation_by_hand():
    """R is 0 for equal laws, at 1/2, 1/2 within a factor of 2, never below; Delta is 0 for no new stage."""
    q, p = torch.randn(2, 50, 6, generator=seeded()).double().log_softmax(-1)
    assert (verify.violation(p, p) == 0).all() and (verify.violation(p, q) >= 0).all()
    a, b = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.4, 0.6]).log()
    strict = 1.1 * math.log(1.75)                                           # (0.7 + 0.4) log(0.7 / 0.4)
    assert verify.violation(b, a) == 0 and float(verify.violation(b, a, 0, 1)) == pytest.approx(strict)
    assert max(lab.rivals.stage_gain(q, s, p).abs().max() for s in (q, p)) < 1e-12
    assert torch.allclose(lab.rivals.blend(a, b, q[0, :2], 0.25, 0.5), 0.375 * a + 0.125 * b + 0.5 * q[0, :2])


def test_replayed_gates_are_the_real_ones():
    """A recorded block tells a gate's tokens, passes and errors; a higher one keeps no more, asks no less."""
    outcomes, moved = set(), Counter()
    for seed in range(12):
        s = slim_session(seed, skip=(2, 3))
        near, full = copy.copy(s.target.model), s.target.model.full
        near.full = full.slim({7})                                          # a draft that is often right
        s.draft = Reader(near, 64)
        s.read_prompt()
        draft = rollout(s, Exact(), 5)
        seen, p = stages.look(s, draft, dict(slim=s.slim, mid=Reader(s.target.model, 64)))
        block, score = stages.Block(p, 9, seen), verify.Score(s, draft, full)
        assert max(seen['slim'].gains['TV']) < 1e-12 > max(seen['mid'].apart['TV'])     # TV is a metric
        assert max(abs(x) for gains in seen['mid'].gains.values() for x in gains) < 1e-9

        def gate(keep, escalate):
            tokens, labels, judged = METHODS['via'](5, keep=keep, escalate=escalate).accept(s, draft, score)
            return tokens, labels.count('draft'), any(j['by'] == 'target' for j in judged)
        for keep, escalate in ((0.0, 0.0), (0.5, 0.3), (0.9, 0.1), (1.0, 0.0), (2.0, 2.0)):
            tokens, _, asked = gate(keep, escalate)
            mine = verify.Score(s, Draft.points(tokens, s.target.model), full).logits[:-1].argmax(-1).tolist()
            real = len(tokens), int(asked), sum(a != b for a, b in zip(tokens, mine))
            assert stages.replay(block, 'slim', keep, escalate) == real
            outcomes.add(real)
        kept = [gate(a, 0.0)[1] for a in (0.0, 0.3, 0.6, 0.9, 1.0)]
        asked = [gate(2.0, b)[2] for b in (0.0, 0.3, 0.9, 2.0)]
        assert kept == sorted(kept, reverse=True) and asked == sorted(asked)
        moved.update(kept=kept[0] > kept[-1], asked=asked[0] < asked[-2])
        assert stages.lenient(block, 1)[0] == len(Exact().accept(s, draft, score)[0])
    assert min(moved.values()) and len(outcomes) > 12
    assert max(n for n, *_ in outcomes) == 6 and max(w for *_, w in outcomes) > 1


# ------------------------------------------------------------------------ SpecGuard

@pytest.mark.parametrize('layers, n, chosen', [
    ('last', 1, [4]), ('last', 3, [2, 3, 4]), ('last', 9, range(5)), ('first', 3, [0, 1, 2]),
    ('middle', 2, [1, 2]), ('all', 1, range(5))])
@pytest.mark.parametrize('sparsify, residual', [(0, 0), (0.04, 0), (0.3, 0.5), (1, 0)])
def test_rollout(layers, n, chosen, sparsify, residual):
    """Tokens are grounded as by the product of whole matrices; but not in a strict subset of old tokens."""
    model, line, begin = network(num_hidden_layers=5), torch.arange(20).remainder(11).tolist(), 4
    path = model.full.grounded(layers, n, begin=begin, sparsify=sparsify, residual=residual)
    reader = Reader(model, 64)
    logits = reader.read(line[:begin], line[begin:], path, 16)
    mine, whole = path.carry['shades'][0], whole_rollout(model, line, chosen, sparsify, residual)[begin:]
    assert mine.shape == (16, begin) and (mine.sum(-1) - whole[:, :begin].sum(-1)).abs().max() < 1e-9
    assert mine.sum(-1).std() > 0.01 and mine.sum(-1).max() < 1 + 1e-9
    assert (len(chosen) == 1) == bool((mine[:, 1:3].sum(-1) - whole[:, 1:3].sum(-1)).abs().max() < 1e-9)
    assert (logits - fresh(model, line, 16)).abs().max() < 1e-12 and trusted(reader, line) == 20


def guarded(seed=0, **knobs):
    """(tokens, cycles) of specguard on a random pair; settings of the Session may be among the knobs."""
    fields = LINES | {k: knobs.pop(k) for k in list(knobs) if k in Session.__dataclass_fields__}
    return write(session(network(0, 12), network(1, 12), [3, 2], 30, seed=seed, **fields), SpecGuard(**knobs))


@pytest.mark.parametrize('who', ['draft', 'target'])
@pytest.mark.parametrize('tau', [-math.inf, 0.5, math.inf])
def test_specguard_greedy(tau, who):
    """Equal candidates: nothing to select. tau = inf: the target's text, -inf: the draft's, whose log p is of
    each token itself (a shift by one would show). What a step costs."""
    runs = [guarded(tau=tau, k=k, regenerate=how, signals=who, **GREEDY) for k, how in ((1, 'ar'), (4, 'sd'))]
    (text, cycles), (same, others) = runs
    assert text == same and [c.labels for c in cycles] == [c.labels for c in others]
    assert tau == 0.5 or text == plain(network(int(tau < 0), 12), [3, 2], 30)
    if tau < 0:
        rows = fresh(network(int(who == 'draft'), 12), [3, 2] + text)[1:-1]
        logp = [j['logp'] for c in cycles for j in c.judged]
        assert logp == pytest.approx(verify.loglikes(rows, text).tolist())
        s = session(network(0, 12), network(1, 12), [3, 2], 30, **LINES)
        assert write(s, claims.DRAFT)[0] == text            # the claims' "draft only"
    for c in cycles:
        T, wrote = len(c.drafted), c.labels[0] == 'target'
        assert c.passes['draft/full'][0] == T
        assert c.passes[f'{who}/grounded'][:2] == [1, T + (who == 'target')]
        assert c.passes.get('target/full', [0])[0] == wrote * len(c.tokens)
        assert len(c.passes) == 2 + wrote


@pytest.mark.parametrize('tau', [-math.inf, 0.5, math.inf])
def test_steps_end(tau):
    """At the delimiter, at the end of sequence inside a step, at max_step; without any newline, too."""
    for seed in range(2):
        line, cycles = guarded(seed, tau=tau, temperature=1.0)
        for text in (LINES['text'](c.tokens) for c in cycles[:-1]):
            assert '\n' in text.lstrip() and '\n' not in text[:-1].lstrip()
        for eos in {*line[::5]}:
            cut, cycles = guarded(seed, tau=tau, temperature=1.0, eos=frozenset([eos]))
            assert eos not in cut[:-1] and (len(cut) == 30 or cut[-1] == eos)
            assert all(c.accepted == sum(j['kept'] for j in c.judged) for c in cycles)
    endless = guarded(tau=tau, max_step=7, text=lambda ids: 'x' * len(ids))[1]
    assert [len(c.tokens) for c in endless] == [7] * 4 + [2]


def test_signals_clipped():
    """Steps outside the percentiles, remarked above 20 %; presets; a draft whose attention is not there."""
    for low, stale in ((-99, False), (-1, True)):
        ends = dict(signals=dict(draft_logp=[low, 0], draft_grounding=[0, 1]))
        cycles = guarded(tau=0.5, calibration=ends, max_step=6)[1]
        outside = [min(j['logp'] for j in c.judged) < low for c in cycles]
        assert [c.judged[0]['clipped'] for c in cycles] == outside
        text, = compare.remarks(SpecGuard(), None, cycles, [])
        assert ('above 20 %' in text) == (sum(outside) > len(cycles) / 5) == stale
    knobs = 'k', 'draft_temperature', 'draft_top_p', 'beta', 'tau', 'target_k'
    for preset, *values in (('notes', 4, 0.7, 1, 0.5, 0.5, 1), ('paper', 16, 0.7, 0.8, 0.3, 0.7, 16),
                            ('greedy', 1, 0, 1, 0.5, 0.5, 1)):
        assert [getattr(SpecGuard(preset=preset), knob) for knob in knobs] == values
    assert SpecGuard(preset='paper', k=2).k == 2
    blind = network(1, 12)
    blind.full = blind.full.slim({0, 2})
    with pytest.raises(ValueError, match='the attention of the draft cannot be read'):
        write(session(network(0, 12), blind, [3, 2], 9, **LINES), SpecGuard())


@pytest.mark.parametrize('combine', ['weighted', 'and'])
def test_target_writes_more_as_tau_rises(combine):
    """On frozen scores the steps that the target writes never become fewer; each score is the formula's."""
    s, wrote = session(network(0, 12), network(1, 12), [3, 2], 12, **LINES), []
    draft = Draft([4, 5], torch.full((2, 12), 1 / 12))
    for tau in (-math.inf, 0.2, 0.3, 0.47, 0.49, 0.51, 0.53, 1.01, math.inf):
        wrote.append(0)
        for i in range(20):
            seen = [(-0.1, 0.8), (-0.2 * i, 0.04 * i + 0.1)]
            verdict = SpecGuard(tau=tau, combine=combine, beta=0.3).accept(s, draft, seen)[2][0]
            L, G = 1 - max(0.2 * i, 0.1) / 4, min(0.8, 0.04 * i + 0.1)
            wanted = 0.3 * L + 0.7 * G if combine == 'weighted' else min(L, G)
            assert abs(tau) == math.inf or verdict['score'] == pytest.approx(wanted, abs=1e-6)
            wrote[-1] += not verdict['kept']
    assert wrote == sorted(wrote) and (wrote[0], wrote[-1]) == (0, 20) and len(set(wrote)) > 3


def test_rivals_of_specguard():
    """The oracle gate keeps what the checker likes, the coin its rate, votes the commonest last line."""
    even, pair = lambda ids: ids[-1] % 2 == 0, (network(0, 12), network(1, 12))
    start = lambda checker=even: session(*pair, [3, 2], 40, checker=checker, **LINES)
    run = lambda name, **knobs: write(start(), METHODS[name](**knobs))[1]
    for name in ('oracle-gate', 'rsd'):
        assert all(c.judged[0]['kept'] == even(c.drafted) for c in run(name))
    wrote = [{c.labels[0] for c in run('random-gate', rate=rate, max_step=4)} for rate in (0, 0.5, 1)]
    assert wrote == [{'target'}, {'target', 'draft'}, {'draft'}]        # one seed in 500 would miss one
    for name in ('specreason', 'specguard-first', 'specguard-random', 'specguard-pooled'):
        assert sum(len(c.tokens) for c in run(name)) == 40
    assert [len(run(name)) for name in ('majority', 'best-of-n')] == [1, 1]
    step = lambda *ids: Draft([*ids], torch.eye(12)[:len(ids)], torch.eye(12)[:len(ids)])
    a, b, c = step(0, 1, 2), step(3, 1, 0), step(5, 1, 2)               # token 3 ends a line
    assert METHODS['majority']().choose(start(), [a, b, c]) is a
    assert METHODS['specguard-common']().choose(start(), [a, b, c, b]) is b
    means = {0: (1.0, 0.0), 3: (1.0, 1.0), 5: (0.0, 1.0)}       # by first token: the second lies in between
    pooled = type('', (METHODS['specguard-pooled'],), dict(embed=lambda *a: torch.tensor(means[a[2][0]])))()
    assert pooled.choose(start(), [a, b, c]) is b and pooled.choose(start(), [a]) is a
    a, b, c = step(4, 5, 6, 5), step(0, 9), step(4, 9, 6, 8)    # of row i the likeliest token is i
    assert METHODS['best-of-n']().choose(start(), [a, b, c]) is b
    wanted = start(checker=lambda ids: ids[2:] != [4, 5])       # steps end behind 5 and 9: the first is wrong
    assert METHODS['process-best-of-n']().choose(wanted, [a, c]) is c


@pytest.mark.parametrize('seed, eos', [(1, {4}), (4, {0}), (7, {})])
def test_beam_finds_the_likeliest_text(seed, eos):
    """Wide enough, it finds the text of highest mean log-probability (not sum) of all; k = 1 is greedy."""
    draft, eos = network(seed, 5), frozenset(eos)
    all_of = itertools.product(range(5), repeat=3)
    texts = {next((t[:i] for i in (1, 2) if t[i - 1] in eos), t) for t in all_of}
    law = lambda t: fresh(draft, [3, 2, *t], len(t) + 1).log_softmax(-1)
    run = lambda k, room: write(session(network(0, 5), draft, [3, 2], room, **LINES | dict(eos=eos)),
                                METHODS['beam'](k=k))[0]
    assert tuple(run(125, 3)) == max(texts, key=lambda t: law(t)[range(len(t)), t].mean())
    assert run(1, 20) == plain(draft, [3, 2], 20, eos=eos)


def test_figures_by_hand(capsys):
    """Selection; what a record says (share right, writers, tokens, passes); ranks, gates, checks, curves."""
    assert verify.central([[3, 2, 1], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], [0, -9, -9, -9]) == 1    # in order
    assert verify.central([[4], [5], [5]], [0, -9, -9]) == 1                # ties: the surer, then the first
    assert verify.central([[1], [2], [3]], [-2, -1, -1]) == 1 and verify.central([[7, 7]], [0]) == 0
    step = lambda L, G, right, n, longest: {
        4: dict(signals={DRAFTS: (L, G)}, right=right, tokens=[0] * n, passes=longest)}
    own = lambda right, n: dict(right=right, tokens=[1] * n)
    problem = [(step(-1.0, 0.9, True, 5, 6), own(True, 7)), (step(-3.0, 0.2, False, 6, 9), own(True, 8))]
    scales = {DRAFTS: ([[-4, 0], [0, 1]], [[-4, -2, 0], [0.1, 0.5, 1.0]])}
    scores = [row[0] for row in judged([problem], scales)]
    assert scores == pytest.approx([(0.75 + 0.9) / 2, (0.25 + 0.2) / 2])
    ranks = judged([problem], scales, USUAL | dict(scale='rank'))
    assert [row[0] for row in ranks] == pytest.approx([2 / 3, 1 / 3])
    assert tuple(outcomes([problem], scales)[0]) == (1, 0.5, 13, 17, 8, 65, 13)
    assert tuple(outcomes([problem], scales, rate=0.5)[0]) == (0.5, 0.5, 13, 17, 7.5, 68, 8.75)
    assert roc_area([1, 2, 2, 3], [0, 0, 1, 1]) == 0.875 and math.isnan(roc_area([1], [1]))
    assert average_precision([3, 2, 1], [1, 0, 1]) == pytest.approx(5 / 6)
    steps = [(-i / 10, 0.5, i < 6) for i in range(11)]                      # L alone tells right from wrong
    curve = gate_curve(steps, signal_ranges([s[:2] for s in steps]))
    assert choose_gate(curve, 1.0).items() >= dict(right=1, target=1 - 6 / 11).items()
    assert choose_gate(curve, None, 0.2)['target'] == pytest.approx(2 / 11)
    curve = gate_curve([(-i, 0.5, i in (0, 2)) for i in range(40)], [[-39, 0], [0, 1]])
    best = choose_gate(curve, 1.0)
    assert best['right'] < 1 and 1 - best['target'] >= 0.05 and max(c['right'] for c in curve) == 1
    print_curve(curve, best, argparse.Namespace(accuracy=1.0, share=None))
    assert f'the nearest, {best["right"]:.1%}, is chosen' in capsys.readouterr().out
    row, tokenizer = next(tasks.rows('math', 3)), bytes_tokenizer()
    check, first = step_checker(row, tokenizer, 0), '\n'.join(row['solution'].split('\n')[:2])
    texts = first + '\n', row['solution'], '\n1 + 1 = 3\n', first, row['solution'] + '0'    # cut short; wrong
    assert [check(tokenizer.encode(text).ids) for text in texts] == [True, True, False, False, False]
    sure, hits = torch.tensor([0.95, 0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, True, False, False])
    assert claims.auroc(sure, hits) == pytest.approx(5.5 / 6)
    curve, error = claims.reliability(sure, hits, bins=2)
    assert [n for *_, n in curve] == [1, 4] and [a for _, a, _ in curve] == [0, 0.75]
    assert error == pytest.approx((0.1 + 4 * abs(0.7125 - 0.75)) / 5)
    marks = [dict(confidence=c, p=p, q=q, kept=True) for c, p, q in zip(               # kept is no hit
        sure.tolist(), (0.9, 0.5, 1.0, 0.2, 0.0), (0.8, 0.5, 1.0, 0.3, 1.0))]
    lines = [json.dumps(dict(judged=marks[:2])), json.dumps(dict(judged=marks[2:]))]
    curve, area, error = claims.trace_reliability(lines)
    assert [a for _, a, _ in curve] == [0, 0.5, 1] and area == pytest.approx(5.5 / 6)
    assert error == pytest.approx((0.1 + 0 + 2 * 0.075) / 5)
    with pytest.raises(ValueError, match='no C'):
        claims.trace_reliability([json.dumps(dict(judged=[dict(p=1, q=1)]))])
    row = dict(sd={4: [30, 10, 40, 50, 10]}, vote={2: [20, 20, 40, 44, 20], 3: [24, 16, 40, 64, 16]})
    kept, cycles, tokens, positions, _ = claims.at_budget([row, row], 'vote', ('sd', 4))
    assert (positions / tokens, kept / cycles) == pytest.approx((50 / 40, (0.7 * 20 + 0.3 * 24) / 18.8))


@pytest.mark.parametrize('k', [1, 4])
@pytest.mark.parametrize('who', ['draft', 'target'])
def test_outcomes_are_those_of_a_run(who, k):
    """Passes and positions expected of a record are the engine's ledger; its signals are specguard's."""
    rollout, scales = DRAFTS._replace(who=who), ([[-4, 0], [0, 1]], None)
    for tau in (-9, 0.5, 9):
        cycles, problem = guarded(k=k, tau=tau, signals=who, temperature=1.0, max_step=6)[1], []
        for c in cycles:
            lows = tuple(min(j[name] for j in c.judged) for name in ('logp', 'grounding'))
            step = dict(tokens=c.drafted, right=True, signals={rollout: lows})
            step['passes'] = c.passes['draft/full'][0]
            problem.append(({k: step}, dict(tokens=c.tokens, right=True)))
        spent = [sum(row[i] for c in cycles for path, row in c.passes.items() if path.startswith(role))
                 for i in (0, 1) for role in ('draft', 'target')]
        found = outcomes([problem], {rollout: scales}, USUAL | dict(pick=k, rollout=rollout, tau=tau))[0]
        assert found[2:] == pytest.approx((30, *spent))
    s = session(network(0, 12), network(1, 12), [3, 2], 30, checker=lambda ids: True, **LINES)
    found, own = record_step(s, k=4)
    tokens = found[k]['tokens']
    draft = Draft(tokens, None, fresh(s.draft.model, s.tokens + tokens)[1:-1])
    seen = SpecGuard(signals=who).score(s, draft)
    assert found[k]['signals'][rollout] == pytest.approx([min(x) for x in zip(*seen)])
    assert own['tokens'] == guarded(tau=math.inf)[1][0].tokens
    assert found[1]['passes'] == len(found[1]['tokens']) <= found[4]['passes']


def test_signals_from_the_command_line(capsys, tmp_path, monkeypatch):
    """--signals writes what specguard asks for, the gate chosen on rows of its own; else one line says so."""
    splits, rows = set(), tasks.rows
    monkeypatch.setattr(tasks, 'rows', lambda task, *where: splits.add(where) or rows(task, *where))
    for name in ('target', 'draft'):
        shutil.copytree(EMBEDDED / name, tmp_path / name, ignore=lambda *_: ['calibration.json'])
    pair = '--target', str(tmp_path / 'target'), '--draft', str(tmp_path / 'draft')
    run = *pair, '--method', 'specguard', '--prompt', 'Tom has 9 pens. Tom loses 5. How many pens are left?'
    refused(capsys, 'train_mask.py --signals', *run)
    assert train_mask.main(['--signals', '--rows', '1', '--share', '0.5', *pair]) == 0
    assert '<- chosen' in capsys.readouterr().out and splits == {(0, 'train'), (100, 'held-out')}
    assert re.search(r'steps, \d+% kept', program(capsys, *run)[2])
    assert 'check: equal to plain' in program(capsys, *run, '--set', 'tau=inf', '--check')[2]
    assert train_mask.main(['--signals', *pair, '--share', '2']) == 2
    assert '--share 2' in capsys.readouterr().err


# ------------------------------------------------------------------------ sparse verification

SMALL = dict(dense_below=8, block=4, locals=1)      # for texts of 64 tokens
LINE = [i % 11 for i in range(50)]
LEARNED = dict(experts=[[[0.0, 0.2], [0.0, 0.5]]] * 4, channels=[[0.0, 0.4]] * 4, anchors=[0, 2, 1, 3])


def thin(model, name='sparse', **knobs):
    """The target's full path as a session of these knobs reads it."""
    s = session(model, None, [0], 1, sparse=METHODS[name](**SMALL | knobs))
    s.calibration = dict(sparse=LEARNED)
    return s.view(model.full)


def queries(start, T, capacity, block):
    """q [2, 4, T, 6], k and v [2, 2, capacity, 6], the mask and the carry of a pass at `start`."""
    g = seeded(1)
    q, k, v = (torch.randn(n, 2, h, 6, generator=g, dtype=torch.float64).permute(1, 2, 0, 3).contiguous()
               for h, n in ((4, T), (2, capacity), (2, capacity)))
    hidden = torch.arange(capacity) > start + torch.arange(T)[:, None]
    means = k[:, :, :capacity // block * block].unflatten(2, (-1, block)).mean(3)
    carry = dict(start=torch.tensor(start), real=torch.tensor(T), means=[means])
    return q, k, v, torch.zeros(T, capacity, dtype=torch.float64).masked_fill(hidden, -torch.inf), carry


@pytest.mark.parametrize('block', [1, 4, 7])
@pytest.mark.parametrize('start, T', [(40, 1), (43, 5), (30, 3), (9, 6), (kernels.MANY, kernels.FEW)])
def test_gathered_attention_is_masked_attention(block, start, T):
    """Gathered blocks give what all keys give under a mask, also in a compiled pass (all the cache seen)."""
    how = 0, True, thin(network(), rho=0.3, block=block).attends[0].keywords['how'][2]
    q, k, v, mask, carry = queries(start, T, start + T, block)
    got, carry = kernels.sparse_attend(q, k, v, mask, carry, how)
    _, *wide = queries(start, T, room := start + 50, block)
    for mine, theirs in zip(wide, (k, v)):
        mine[:, :, :start + T] = theirs
    wide[3]['means'] = [wide[0][:, :, :room // block * block].unflatten(2, (-1, block)).mean(3)]
    assert (kernels.sparse_attend(q, *wide, how)[0] - got).abs().max() < 1e-12
    whole, kept = start // block, max(math.ceil((8 + (start - 8) * 0.3 // 1) / block), 2)
    masks, dense = mask.expand(2, 2, T, -1).clone(), kernels.attend(q, k, v, mask, None)[0]
    assert (dense - lab.rivals.attend_masked(q, k, v, masks)).abs().max() < 1e-12   # grouped rows too
    if whole <= kept:
        assert 'blocks' not in carry and torch.equal(got, dense)
        return
    chosen = carry['blocks']
    assert chosen.shape == (2, 2, kept) and (chosen < whole).all()
    assert ((chosen == 0).any(-1) & (chosen == whole - 1).any(-1)).all()    # the sink and the local block
    hidden = torch.ones(2, 2, whole, dtype=torch.bool).scatter(2, chosen, False)
    assert (hidden.sum(-1) == whole - kept).all()                           # no block is chosen twice
    masks[..., :whole * block].masked_fill_(hidden.repeat_interleave(block, 2)[:, :, None], -torch.inf)
    assert (got - lab.rivals.attend_masked(q, k, v, masks)).abs().max() < 1e-12
    assert (got - dense).abs().max() > 1e-3


def test_budget():
    """N = ceil(floor((L - L0) rho + L0) / block), by hand; it never falls as the text or rho grows."""
    base = thin(network(), rho=0.25, dense_below=128, block=16).attends[0].keywords['how'][2]
    lengths = 128, 129, 131, 132, 512, torch.tensor(512.0)
    assert [kernels.budget(n, base) for n in lengths] == [8, 8, 8, 9, 14, 14]
    table = torch.tensor([[kernels.budget(n, base._replace(rho=rho / 100)) for rho in range(0, 101, 5)]
                          for n in range(128, 900, 37)])
    assert (table.diff(dim=0) >= 0).all() and (table.diff(dim=1) >= 0).all()


def sparse_logits(model, draft, **knobs):
    """(logits of the root and the draft on the sparse path, reader, path); the rest was read densely."""
    reader, path = Reader(model, 64), thin(model, **OFF | knobs)
    reader.read(LINE[:-1], [], model.full, 0)
    return reader.read(LINE, draft, path, len(draft) + 1), reader, path


def test_what_is_off_is_dense():
    """Each knob at its end gives dense logits; each of them moved changes them, so the test could fail."""
    model = network(**MIXED)
    dense = Reader(model, 64).read(LINE, [1, 2, 3], model.full, 4)
    assert thin(model, **OFF) is model.full
    for knobs in (dict(rho=0.2, dense_below=60), dict(rho=0.999), dict(ffn_threshold=1e-300),
                  dict(moe_skip=2, moe_quantile=0.0), dict(rho=0.0, sinks=60),
                  dict(rho=0.999, ffn_threshold=1e-300, moe_skip=2, moe_quantile=0.0)):
        got, reader, path = sparse_logits(model, [1, 2, 3], **knobs)
        assert (got - dense).abs().max() < 1e-9 and path.name == reader.cache.writers[-1] == 'sparse'
    for knobs in (dict(rho=0.0), dict(ffn_threshold=0.3), dict(ffn_share=0.5), dict(ffn_quantile=1.0),
                  dict(moe_skip=1, moe_quantile=1.0)):
        assert (sparse_logits(model, [1, 2, 3], **knobs)[0] - dense).abs().max() > 1e-3


def test_one_choice_a_pass():
    """Drafts change no logits before them; a layer reads its anchor's blocks (if skipped, the next's)."""
    model = network(num_hidden_layers=4)
    a, b = (sparse_logits(model, draft, rho=0.1)[0] for draft in ([1, 2, 3], [1, 2, 9]))
    assert torch.equal(a[:3], b[:3]) and not torch.equal(a[3], b[3])
    for anchors, skip, same in ((2, {}, [(0, 1), (2, 3)]), (1, {}, [(0, 3)]), (2, {0, 1}, [(2, 3)])):
        _, reader, path = sparse_logits(model, [1], rho=0.1, anchors=anchors)
        log, path = [], path.slim(skip) if skip else path
        reader.read(LINE, [1, 2], lab.rivals.watched(path, log), 3)
        chosen = {i // 2: c['blocks'].sort().values for i, c in log}
        assert all(torch.equal(chosen[i], chosen[j]) for i, j in same) and len(log) == 8 - len(skip)
        assert anchors == 1 or not torch.equal(chosen[1], chosen[2])
        assert lab.rivals.ledger(log, model, 49)[-1]['keys'] == 3 * 4 + 49 % 4   # floor(8 + 41 rho)


def test_sparse_channels_and_experts():
    """The chosen channels and experts against a loop over tokens; padding has no say in a shared choice."""
    torch.manual_seed(0)
    model, x = network(**MIXED), torch.randn(1, 5, 16, dtype=torch.float64)
    moe, mlp = model.model.layers[0].mlp, model.model.layers[1].mlp
    x[:, 4] *= 10                                                           # padding
    silu, up, dense = torch.nn.functional.silu, mlp.up_proj(x), kernels.swiglu(x, mlp, None)[0]
    largest = lambda h: h[0, :4].abs().amax(0).topk(6).indices.sort().values            # of the real tokens
    through = lambda h, rows: mlp.down_proj(torch.zeros_like(h).index_copy_(-1, rows, (h * up)[..., rows]))
    gate = silu(mlp.gate_proj(x))
    h = torch.where(gate.abs() < 0.1, 0, gate)
    got, carry = kernels.sparse_swiglu(x, mlp, dict(real=torch.tensor(4)), (0.1, 0.25))
    assert torch.equal(carry['chosen'], largest(h))
    assert (got - through(h, largest(h))).abs().max() < 1e-12
    assert lab.rivals.literal_swiglu(x, mlp, carry, (0.1, 1))[1].items() >= dict(gate=48, spared=1).items()
    for f in (lab.rivals.literal_swiglu, lab.rivals.union_swiglu):          # off: dense; on: not, nor as gate
        assert (f(x, mlp, carry, (0.0, 1))[0] - dense).abs().max() < 1e-12
        assert (f(x, mlp, carry, (0.1, 1))[0] - mlp.down_proj(h * up)).abs().max() > 1e-6
    wide = x[0, :4].abs().amax(0).topk(4).indices
    rows = largest(silu(x[..., wide] @ mlp.gate_proj.weight[:, wide].T))
    got, guess = lab.rivals.guessed_swiglu(x, mlp, carry, (0.0, 0.25))
    assert torch.equal(guess['chosen'].sort().values, rows) and guess['gate'] == 24 // 4 + 6
    assert (got - through(gate, rows)).abs().max() < 1e-12
    assert (lab.rivals.static_mix(x, moe, carry, (0, 0))[1]['experts'] >= 0).sum(-1).tolist() == [1] * 5
    for moe.renormalise, betas in itertools.product((True, False), ((0.2,), (0.25, 0.6), (0.0, 0.9))):
        got, carry = kernels.sparse_mix(x, moe, carry, betas)
        for t in range(5):
            p, e = moe.gate(x[0, t]).softmax(-1).topk(3)
            m = max(m for m in range(len(betas) + 1) if m == 0 or p[3 - m:].sum() / p.sum() < betas[m - 1])
            p, e = p[:3 - m], e[:3 - m]
            p = p / p.sum() if moe.renormalise else p
            y = sum(w * kernels.swiglu(x[0, t], moe.experts[i], None)[0] for w, i in zip(p, e))
            assert (got[0, t] - y).abs().max() < 1e-12 and (carry['experts'][t] >= 0).sum() == 3 - m


def test_stacked_experts(tmp_path):
    """Stacked for compiled passes, experts are held once, under their names, and only those used are read."""
    model, x = network(**MIXED), torch.randn(1, 5, 16, dtype=torch.float64, generator=seeded())
    moe, before = model.model.layers[0].mlp, network(**MIXED).state_dict()
    weights, chosen = kernels.route(x[0], moe)
    weights[:, 1:] = 0
    assert kernels.blend(x, moe, weights * math.nan, chosen, None).isnan().all()    # a broken router shows
    wanted = kernels.blend(x, moe, weights, chosen, None)
    moe.stack()
    assert {p.untyped_storage().data_ptr() for e in moe.experts for p in e.parameters()} == {
        stack.data_ptr() for stack in moe.stacks}
    assert sum(s.untyped_storage().nbytes() for s in moe.stacks) == 6 * 3 * 8 * 16 * 8       # E 3 F C fp64
    safetensors.save_file(model.state_dict(), tmp_path / 'stacked')
    for found in (model.state_dict(), safetensors.load_file(tmp_path / 'stacked')):
        assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in found)
    for e in (unread := {*range(6)} - {*chosen[:3, 0].tolist()}):
        for p in moe.experts[e].parameters():
            p.fill_(math.nan)
    got = kernels.blend_pairs(x, moe, weights, chosen, torch.tensor(3))     # two are padding
    assert (got - wanted)[:, :3].abs().max() < 1e-12 and got.isfinite().all() and unread


def test_ledger_by_hand():
    """What four layers chose for 3 positions after 21 tokens; its bytes and its FLOPs, counted by hand."""
    model = network(**MIXED)
    channels, experts = torch.zeros(1, 3, 24), torch.tensor([[0, 1, -1], [1, 2, -1], [5, 1, 4]])
    channels[0, 0, :2] = channels[0, 1, 1:3] = 1.0
    blocks, kept = torch.zeros(1, 2, 3, dtype=int), torch.ones(1, 2, 3, 5, dtype=bool)
    kept[0, :, 0, 1:3] = kept[0, 1, 1:, 2] = False                          # block 2 of head 1: nobody's
    a = dict(blocks=blocks, block=4)
    b, c, d, e = a | dict(experts=experts), a | dict(channels=channels), a | dict(experts=experts[:2]), dict(
        kept=kept, block=4, channels=channels)
    log = [*enumerate((a, b, b, c, c, d, e, e))]
    own, reused = (dict(keys=13, seen=13, means=n, asked=1) for n in (5, 0))
    assert lab.rivals.ledger(log, model, 21) == [
        own | dict(experts=pytest.approx(7 / 3), distinct=5),
        reused | dict(channels=pytest.approx(4 / 3), union=3, gate=24, spared=2),
        reused | dict(experts=2, distinct=3),
        dict(keys=19, seen=17, means=5, asked=3) | dict(channels=24, union=24, gate=24, spared=2)]
    done = work(model, lab.rivals.ledger(log, model, 21), 3)     # 2 heads of 4, of 2 queries each
    assert done['attention'] == (8 * 8 * (2 * (13 * 3 + 19) + 2 * 5),
                                 2 * 8 * (2 * (13 * 3 + 17) * 2 * 3 + 5 + 5 * 3))
    assert done['ffn'] == (8 * 16 * (3 * 8 * (5 + 3) + 24 + 2 * 3 + 3 * 24),
                           pytest.approx(2 * 3 * 16 * (3 * 8 * (7 / 3 + 2) + 24 + 2 * 4 / 3 + 3 * 24)))
    literal = lab.rivals.read_channels(dict(channels=channels, gate=48, spared=1), 24)
    assert work(model, [own | literal], 3)['ffn'][0] == 8 * 16 * (48 + 3)    # only `down` is spared


@pytest.mark.parametrize('refresh', [0, 1, 3])
def test_sparse_text(refresh):
    """A refresh leaves nothing sparse in the cache; refreshed in every cycle the text is plain decoding's."""
    target, draft, prompt = network(0), network(1), LINE[:24]
    s = session(target, draft, prompt, 30, sparse=METHODS['sparse'](**SMALL, rho=0.0, refresh_every=refresh))
    s.read_prompt()
    for i, cycle in enumerate(specmini.decode(s, Exact(3)), 1):
        dense = bool(refresh and i % refresh == 0)
        assert ('target/full' if dense else 'target/sparse') in cycle.passes
        assert ('sparse' in s.target.cache.writers) != dense
    assert (s.tokens[24:] == plain(target, prompt, 30)) == (refresh == 1)


def test_sparse_controls():
    """Each control keeps what it says, at the method's own budget; none holds more mass than the oracle."""
    exact = queries(61, 5, 66, 4)
    q, k, _, mask, carry = exact
    carry['means'] *= 3                                                     # Quest leaves two layers dense
    blocks = thin(network(), rho=0.1).attends[0].keywords['how'][2]
    weights = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 6 ** -0.5 + mask).softmax(-1).mean(2)[..., :60]
    mass, kept = weights.unflatten(-1, (15, 4)).sum(-1)[:, :, 0], {}        # [B, G, N] of the root
    for name, (attend, scores) in verify.SELECT.items():
        got, carry = attend(*exact, (2, True, blocks._replace(scores=scores)))
        one = torch.zeros(2, 2, 1, 15, dtype=torch.bool)
        kept[name] = carry['kept'] if 'kept' in carry else one.scatter(-1, carry['blocks'][:, :, None], True)
        assert (got - kernels.attend(*exact[:4], None)[0]).abs().max() > 1e-3
        assert (kept[name].sum(-1) == 4).all() or name in ('joint', 'union')
    assert 'blocks' not in verify.SELECT['quest'][0](*exact, (1, True, blocks))[1]
    share = {name: (mass * kept[name][:, :, 0]).sum(-1) for name in kept if name not in ('joint', 'union')}
    assert all((share['oracle'] >= share[name] - 1e-9).all() for name in share)
    assert (kept['joint'][:, :, 0].sum((1, 2)) == 8).all()
    assert kept['recent'][0, 0, 0].nonzero()[:, 0].tolist() == [0, 12, 13, 14]
    assert (kept['union'][:, :, 0] == kept['token'].any(2)).all()
    assert (kept['token'][:, :, 0] == kept['head'][:, :, 0]).all()
    assert not (kept['token'] == kept['head']).all()
    for name in ('head', 'token', 'union'):     # the ledger counts what any row reads, the partial block too
        attend, scores = verify.SELECT[name]
        log = [(0, attend(*exact, (2, True, blocks._replace(scores=scores)))[1])]
        assert lab.rivals.ledger(log, network(), 61)[0]['keys'] == 1 + 4 * kept[
            'union' if name == 'token' else name][:, :, 0].sum(-1).float().mean()


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    """The flags of a run on a qwen3_moe checkpoint that has dense layers too, and all calibrations."""
    home, ends = tmp_path_factory.mktemp('mixed'), dict.fromkeys(
        ('draft_logp', 'draft_grounding', 'target_logp', 'target_grounding'), [0.0, 1.0])
    raw = {k: v for k, v in MIXED.items() if k != 'experts'} | dict(num_experts=6, mlp_only_layers=[1, 3])
    target = checkpoint(home / 'moe', byte_network(qk_norm=True, **MIXED), model_type='qwen3_moe', **raw)
    draft = checkpoint(home / 'draft', byte_network(1))
    write_calibration(target, 'mask', dict(skip=[2, 3], nested=[[2, 3], [2]]))
    write_calibration(target, 'signals', ends, draft)
    write_calibration(target, 'sparse', LEARNED)
    return '--target', target, '--draft', draft, '--prompt', 'hello', '--ignore-eos', '--max-new', 20


@pytest.mark.parametrize('parts, method', [
    ('attn', 'sd'), ('ffn', 'sd'), ('moe', 'sd'), *(('attn,ffn,moe', method) for method in (
        'lenient', 'via --set escalate=1.1 keep=1.1', 'via-tiers --set tiers=2', 'via-tiers', 'ecsv',
        'ecsv-spot', 'cmasd --set accept=strict', 'specguard --set tau=inf target_k=1'))])
def test_sparse_under_every_method(parts, method, mixed, capsys):
    """Off, --sparse leaves a method its text and promise; on, all target passes are sparse, all is LOSSY."""
    run = lambda *more: reported(capsys, *mixed, '--method', *method.split(), *more)
    on = dict(attn='rho=0 dense_below=4 block=1', ffn='ffn_threshold=0.3', moe='moe_quantile=1')
    knobs = ' '.join(on[part] for part in parts.split(','))
    dense, off, thin = run(), run('--sparse', parts, '--set', 'rho=1', 'ffn_threshold=0', 'moe_skip=0'), run(
        '--sparse', parts, '--set', *knobs.split())
    assert (off['tokens'], off['lossless']) == (dense['tokens'], dense['lossless'])
    assert dense['lossless'] == (method not in ('lenient', 'via-tiers'))
    whole = thin['stats']['passes'].get('target/sparse')
    assert thin['tokens'] != dense['tokens'] and not thin['lossless']
    assert thin['stats']['block_efficiency'] == (whole and 20 / whole)
    assert all('sparse' in path for path in thin['stats']['passes'] if path.startswith('target'))


def test_anchors():
    """What train_mask.py --anchors measures is what a session reads back: layers by difference, quantiles."""
    found = sparsity(network(**MIXED), [LINE, LINE[::-1]], dense_below=8, block=4)
    order = sorted(range(1, 4), key=lambda i: found['jaccard'][i - 1])
    assert found['anchors'] == [0, *order] and all(0 < x < 1 for x in found['jaccard'])
    assert [*map(len, found['experts'])] == [2, 0, 2, 0] and [*map(len, found['channels'])] == [1, 21, 1, 21]
    one, two = found['experts'][0]
    assert one == sorted(one) and len(one) == 21 and 0 < one[0] and one[-1] <= 1 / 3 and two[-1] <= 2 / 3
    with pytest.raises(ValueError, match='too short for blocks'):
        sparsity(network(), [[1] * 12])


def test_prompt_of_the_claims():
    """A setting reads as if it were the only one; without one, or dense every cycle, the reading is dense."""
    p = claims.Prompt(claims.contexts('math', 1)[0], {})
    first, dense = p.read(claims.BOTH), p.read({})
    assert dense['kl'] == 0 and dense['alike'] == dense['bytes'] == dense['flops'] == 1
    assert p.read(claims.BOTH | dict(refresh_every=1))['kl'] < 1e-6 < first['kl'] == p.read(claims.BOTH)['kl']
    assert first['flops'] < 1 and first['bytes'] < 1 and first['union'] < 0.41
    assert p.read(claims.BOTH, fresh=True)['kl'] != first['kl']


def test_lessons():
    """The laws of a lesson stand where its solution's tokens are guessed; a student comes closer to them."""
    model, prompts = network(), (LINE[:3], LINE[5:29], LINE[9:14])
    law = lambda model, line: Reader(model, 64).read(line, [], model.full, 4).log_softmax(-1)
    of = lambda model: [(p, [1, 2, 3, 4], law(model, p + [1, 2, 3])) for p in prompts]
    batches = itertools.islice(packed(of(model), 24, random.Random(0)), 6)
    for ids, at, laws in batches:
        hidden = model(ids, torch.arange(ids.shape[1]), model.full)
        assert (model.logits(hidden[at]).log_softmax(-1) - laws).abs().max() < 1e-9
    student, wanted = distil(model, of(network(1)), 0.5), [laws for *_, laws in of(network(1))]
    far = [sum((b.exp() * (b - a)).sum() for (*_, a), b in zip(of(m), wanted)) for m in (model, student)]
    assert far[1] < 0.9 * far[0]


# ------------------------------------------------------------------------ specmini.py: the program

@pytest.mark.parametrize('method, temperature', [('ar', 1), ('sd', 0), ('sd', 1), ('cmasd', 1)])
def test_json_trace_and_text(method, temperature, pair, capsys, tmp_path):
    """The JSON object, the trace and the streamed text are one run's; what must hold among their figures."""
    flags = *pair, '--method', method, '--temperature', temperature, '--seed', 3, '--trace', tmp_path / 't'
    text, trace = program(capsys, *flags)[1], (tmp_path / 't').read_text().splitlines()
    cycles, r = [json.loads(line) for line in trace], reported(capsys, *flags)
    judged, s, n = [j for c in cycles for j in c['judged']], r['stats'], len(r['tokens'])
    assert list(r) == 'text tokens prompt_tokens method lossless knobs seed device dtype finish stats'.split()
    assert list(s) == (
        'cycles passes positions drafted judged accepted acceptance_rate rejection_rate block_efficiency '
        'labels seconds prompt_seconds tokens_per_second work compute').split()
    known = [r[key] for key in ('method', 'seed', 'dtype', 'prompt_tokens', 'device', 'text')]
    assert known == [method, 3, 'fp32', 5, specmini.pick_device('auto'), text[:-1]]
    assert sum((c['tokens'] for c in cycles), []) == r['tokens'] and sum(s['labels'].values()) == n
    assert sum(c['passes']['target/full']['passes'] for c in cycles) == s['passes']['target/full']
    assert all(0 <= j['p'] <= 1 and 0 < j['q'] <= 1 for j in judged)
    assert method != 'sd' or all(j['chance'] == min(1, j['p'] / j['q']) for j in judged)
    ended = r['tokens'][-1] == 256
    assert r['finish'] == ('eos' if ended else 'length') and (ended or n == 20)
    if method == 'cmasd':
        assert all(j['confidence'] <= 1 and 0.01 <= j['threshold'] <= 1 for j in judged)
        assert len(claims.trace_reliability(trace)[0]) > 1
    assert s['accepted'] <= s['judged'] <= s['drafted'] and s['labels'].get('draft', 0) == s['accepted']
    assert s['block_efficiency'] == n / s['passes']['target/full']
    assert s['tokens_per_second'] == pytest.approx(n / s['seconds'])
    if method == 'ar':
        assert r['knobs'] == {} and set(s['passes']) == {'target/full'}
        assert s['acceptance_rate'] is None and s['work'] == s['compute'] == s['cycles']
    else:
        assert s['acceptance_rate'] + s['rejection_rate'] == pytest.approx(1)
        assert s['positions']['target/full'] == s['drafted'] + s['cycles']
        assert method == 'cmasd' or r['knobs']['gamma'] == 4


def test_streaming(capsys):
    """Pieces are whole characters, even where a decoder rewrites bytes; nothing is printed twice."""
    def printed(ids):
        printer, pieces = compare.Printer(tokenizer, False, False), []
        for i in ids:
            printer.add(verify.Cycle([], [], [i], ['target'], {}, 0.0))
            pieces.append(capsys.readouterr().out)
        printer.finish(tokenizer.decode(ids))
        return [*pieces, capsys.readouterr().out]
    tokenizer, text = bytes_tokenizer(), 'na\u00efve \u2192 \U0001f600!'
    ids = tokenizer.encode(text).ids + tokenizer.encode('\u20ac').ids[:2]        # half a character at the end
    assert len(ids) == len(text.encode()) + 2
    *pieces, last = printed(ids)
    assert ''.join(pieces) == text and not any('\ufffd' in piece for piece in pieces) and last[0] == '\ufffd'
    words = ['<unk>', *(f'<0x{i:02X}>' for i in range(256)), '\u2581a', '\u2581b']
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    parts = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]     # as Llama 2's
    tokenizer.decoder = decoders.Sequence(parts)
    assert ''.join(printed([1 + 0x41, 1 + 0xe2])) == 'A\ufffd\ufffd\n'     # A is rewritten
    for seed in range(20):
        ids = torch.randint(1, len(words), (12,), generator=seeded(seed)).tolist()
        assert ''.join(printed(ids))[-3:-1] == tokenizer.decode(ids)[-2:]


def test_what_is_shown(pair, capsys, monkeypatch):
    """Colours only where asked for; --show; --list; remarks come last; Ctrl-C prints the figures so far."""
    bare, painted = (program(capsys, *pair, *more)[1] for more in ((), ('--color', 'always')))
    assert '\033[' not in bare and '\033[3' in painted and re.sub(r'\033\[[\d;]*m', '', painted) == bare
    shown = program(capsys, *pair, '--show')[1].split('\n')[:-1]
    assert re.fullmatch(r' +1  \d/4  .+', shown[0]) and any('[-' in line for line in shown)
    listed = program(capsys, '--list')[1]
    assert all(name in listed for name in METHODS) and 'lenience=0.5' in listed
    count = lambda method, sparse, cycles, reports: [f'{len(cycles)} cycles', f'{len(reports)} texts']
    monkeypatch.setattr(compare, 'remarks', count)
    err = program(capsys, *pair)[2].splitlines()
    assert 'break-even' in err[-3] and err[-2:] == [f'{len(shown)} cycles', '1 texts']
    interrupt(monkeypatch, verify.Exact, 'accept', 3)
    status, out, err = program(capsys, *pair)
    assert status == 130 and 'sd (lossless)' in err and out
    interrupt(monkeypatch, verify.Exact, 'accept', 3)
    status, out, _ = program(capsys, *pair, '--json')
    assert status == 130 and json.loads(out)['finish'] == 'interrupted'


def test_check_and_compare(pair, capsys, monkeypatch):
    """--check names the first difference, where there is one; --compare marks each method as what it is."""
    status, out, _ = program(capsys, *pair, '--compare', 'sd,lenient', '--set', 'lenience=0.1', 'gamma=2')
    rows = [line.split() for line in out.splitlines()]
    assert status == 0 and [r[0] for r in rows] == ['method', 'ar', 'sd', 'lenient', 'sd:', 'lenient:']
    assert rows[1][2] == '1.00' and rows[1][6:8] == ['1.000', '1.00'] and rows[2][-2] == '100.0%'
    assert 2 < float(rows[2][7]) <= 3 * float(rows[2][6])                   # positions, passes a token
    assert [r[-1] for r in rows[1:4]] == ['lossless', 'lossless', 'LOSSY']
    said = program(capsys, *pair, '--compare', 'sd', '--sparse', 'ffn')[1]
    assert 'LOSSY' in said and 'sd: sparse: only 1.' in said
    run = lambda *how: program(capsys, *pair, '--ignore-eos', '--check', *how)[2]
    assert 'check: equal to plain decoding for all 20 tokens.' in run()
    assert 'check: equal' in run('--method', 'typical', '--set', 'epsilon=0')   # p is one-hot: it is exact
    monkeypatch.setattr(METHODS['typical'], 'kept', lambda self, score, i: 1.0)
    assert re.search(r"check: differs from plain decoding at token \d+: .+ instead of .+; logit gap \d",
                     run('--method', 'typical'))


def test_what_the_middle_stages_cost():
    """Stages of 0.2, 0.3, 0.1 s beside full (or decoding) passes of 1 s pay below 0.4 of these a cycle."""
    slims = {f'target/slim{i + 1}': (1, 4, x) for i, x in enumerate((0.2, 0.3, 0.1))}
    draft, full = {'draft/full': (4, 4, 0.1)}, lambda n: {'target/full': (n, 9 * n, 1.0 * n)} if n else {}
    said = lambda method, one, *passes: compare.stage_remarks(
        method, [cycle(1, True, added=0, passes=draft | some) for some in passes], one)
    paid = '0.33 full passes besides; it pays where these are fewer than 0.40, so here it paid.'
    for needed, one, words in (((0, 1, 0), 9, paid), ((0, 2, 0), 9, 'here it did not pay.'),
                               ((0, 1, 1), 9, 'here it did not pay.'), ((0,), 0.7, 'spends 0.86 of a full'),
                               ((0,), 0.5, 'here it did not pay.')):
        assert words in said(via(), one, *(slims | full(n) for n in needed))[0]
    assert 'never needed' in said(via(), 1.0, full(1))[0] and said(Exact(), 1.0, full(1)) == []
    assert 'a slim pass 0.20 of' in compare.break_even([cycle(1, True, passes=slims)], 1.0)


def test_prompts_and_grading(pair, capsys, tmp_path, monkeypatch):
    """Rows have prompt, question or turns and are graded one by one; --compare has a table for each task."""
    flags = *pair[:4], '--max-new', 3, '--prompts', (file := tmp_path / 'p.jsonl')
    refused(capsys, 'give --prompt', *pair[:4])
    refused(capsys, 'p.jsonl: cannot be read', *flags)

    def run(rows, *more):
        file.write_text('\n\n'.join(map(json.dumps, rows)))
        status, out, err = program(capsys, *flags, *more)
        return status, out.splitlines(), err
    rows = [dict(question='a', task='x'), dict(turns=['b', 'c'], task='y'), dict(prompt='a', task='x')]
    found = [json.loads(line) for line in run(rows, '--json')[1]]
    assert [r['prompt_tokens'] for r in found] == [1, 1, 1]
    assert not any('right' in r for r in found)                             # nothing to grade: no verdict
    rows[0]['answer'], rows[1]['answer'] = found[0]['text'], found[1]['text'] + 'no'
    status, lines, err = run(rows, '--json')
    assert [json.loads(line).get('right') for line in lines] == [True, False, None]
    assert status == 0 and 'right: 1 of 2 graded texts (50.0%)' in err
    lines = [line.split() for line in run(rows, '--compare', 'sd')[1]]
    assert [line[:3:2] for line in lines if line[0][:-1] in 'xy'] == [['x,', 'prompts'], ['y,', 'prompts']]
    assert [line[3] for line in lines if line[0] in ('ar', 'sd')] == ['100.0%', '100.0%', '0.0%', '0.0%']
    interrupt(monkeypatch, specmini.Engine, 'write', 6)         # sd in row 1: both have warmed up
    status, lines, _ = run(rows, '--compare', 'sd')                         # what is finished, for all alike
    assert status == 130 and [line.split()[0] for line in lines] == 'x, method ar sd sd:'.split()
    for text, words in (('{"prompt": "a"}\n{"x": 1}', 'line 2: expected'), ('nonsense', 'line 1: not a JSON'),
                        ('', 'no rows'), ('{"prompt": ""}', 'prompt 1 is empty'), ('[1]', 'line 1: expected'),
                        ('{"turns": []}', 'line 1: expected')):
        file.write_text(text)
        refused(capsys, words, *flags)


def test_chat(capsys, tmp_path):
    """The checkpoint's own template, from either file, sandboxed; special tokens are not added twice."""
    folder, tokenizer = checkpoint(tmp_path), bytes_tokenizer()
    settings = lambda name, **raw: (folder / f'{name}.json').write_text(json.dumps(raw))
    flags = '--target', folder, '--draft', 'none', '--prompt', 'hi', '--max-new', 2
    refused(capsys, 'has no chat_template.jinja', *flags, '--chat')
    template = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
                "{% if add_generation_prompt %}!{% endif %}")
    settings('tokenizer_config', chat_template=template, bos_token=dict(content='^'))
    assert reported(capsys, *flags, '--chat')['prompt_tokens'] == len('^user:hi!')
    special = dict(single='<eos> $A', special_tokens=[('<eos>', 256)])
    tokenizer.post_processor = processors.TemplateProcessing(**special)
    tokenizer.save(str(folder / 'tokenizer.json'))
    chat, bare = (reported(capsys, *flags, *more) for more in (['--chat'], []))
    assert (chat['prompt_tokens'], bare['prompt_tokens']) == (len('^user:hi!'), len('^hi'))
    first, _ = bare['tokens']
    settings('generation_config', eos_token_id=[1, first])
    ended = reported(capsys, *flags)
    assert (ended['tokens'], ended['finish'], load(folder)[2]) == ([first], 'eos', {1, first, 256})
    for templates, words in (([dict(name='default', template='{{ 1 }}')], ''), (['x'], 'has no chat_temp')):
        settings('tokenizer_config', chat_template=templates)
        assert words in program(capsys, *flags, '--chat')[2]
    for bad in ("{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", '{% for %}', '{{ 1 / 0 }}'):
        (folder / 'chat_template.jinja').write_text(bad)
        refused(capsys, '--chat', *flags, '--chat')


@pytest.mark.parametrize('flags, words', [
    *((flag, flag) for flag in (
        '--nonsense', '--threads 0', '--max-new 0', '--top-p 0', '--top-k -2', '--temperature -1',
        '--temperature nan', '--seed -1')),
    *((f'--method {method} --set {knob}', f'knob {knob.replace("=", " is ")}') for method, knob in (
        ('sd', 'gamma=-1'), ('sd', 'controller=magic'), ('lenient', 'lenience=0'), ('typical', 'epsilon=nan'),
        ('cmasd', 'alpha=-1'), ('cmasd', 'k_min=20'), ('ecsv', 'branches=65'), ('ecsv-spot', 'budget=1'),
        ('via', 'keep=0.2'), ('specguard', 'k=0'), ('specguard', 'tau=nan'), ('specguard', 'preset=best'),
        ('sparse', 'rho=2'), ('sparse', 'block=0'), ('sparse', 'select=best'))),
    ('--prompts y', 'give --prompt'), ('--prompt', 'expected one argument'), ('--max-new many', '--max-new'),
    ('--prompt=', 'prompt 1 is empty'), ('--prompt \udcff', 'prompt 1 is not valid UTF-8'),
    pytest.param('--device cuda', 'has none', marks=pytest.mark.skipif(torch.cuda.is_available(), reason='')),
    ('--target nowhere', 'nowhere/config.json: no'), ('--trace no/such/folder', 'no/such/folder'),
    ('--device tpu', '--device'), ('--compare sd --json', '--compare takes none'),
    ('--method magic', "['magic'] is unknown; there are ar"), ('--compare sd,magic', "['magic']"),
    ('--check --temperature 1', 'texts agree only'), ('--gamma -1', 'knob gamma is -1'),
    ('--set nothing', 'sd: gamma=4, draft_temp'), ('--set lenience=1', 'sd: gamma=4'),
    ('--method ar --set lenience=1', '(ar: none)'), ('--set gamma=four', "'four' is not a value"),
    ('--set controller=oracle --temperature 1', 'knob controller is'), ('--set anchors=1', 'with a knob of'),
    ('--method cmasd --draft lookup', 'give --draft D'), ('--method ecsv --draft lookup', 'give --draft D'),
    ('--method majority --draft lookup', 'need a draft'), ('--method via-mid', 'give --mid DIR'),
    ('--method ecsv-two', 'knob second'), ('--method ecsv --set depth=9999', 'a block of 9999'),
    ('--method specguard --set preset=paper regenerate=sd', 'target_k is 16; expected 1 (regenerate=sd)'),
    ('--method specguard --set delimiter=', 'delimiter is empty'), ('--sparse x', 'expected some of'),
    ('--sparse moe', 'no layer of that kind'), ('--sparse ffn --set rho=2', 'knob rho'),
    (f'--target {EMBEDDED}/draft --sparse attn --set anchors=1', 'no section'),
    ('--target= --draft= --mid= --method= --sparse= --trace= --compare=',
     '--target, --draft, --mid, --method, --sparse, --trace, --compare: found an empty text')])
def test_bad_flags(flags, words, capsys):
    refused(capsys, words, '--prompt', 'x', *flags.split())


def test_short_contexts(pair, capsys, tmp_path):
    """What the shortest context cuts off is said; a prompt that fills it is refused."""
    short = checkpoint(tmp_path, max_position_embeddings=16)
    for draft, prompt, who, room in ((pair[3], 'x' * 63, '64 tokens (of the target)', 1),
                                     (short, 'hello', '16 tokens (of the draft)', 11)):
        flags = *pair[:2], '--draft', draft, '--prompt', prompt, '--max-new', 60, '--ignore-eos', '--json'
        status, out, err = program(capsys, *flags)
        assert status == 0 and len(json.loads(out)['tokens']) == room
        assert f'1 of 1 texts ended before --max-new 60: the context of {who} was full' in err
    refused(capsys, 'has 64 tokens; expected at least 1, and fewer than the context of 64',
            *pair[:4], '--prompt', 'x' * 64)


@pytest.mark.parametrize('name', METHODS)
def test_every_method_runs_on_the_embedded_models(name, capsys):
    """From the command line, sampling: JSON that is valid, and figures that add up."""
    draft = EMBEDDED / 'draft'
    more = {'via-mid': ['--mid', draft], 'ecsv-two': ['--set', f'second={draft}']}.get(name, [])
    status, out, err = program(capsys, '--prompt', 'Tom has 12 pens. Tom loses 5. How many has Tom?',
                               '--method', name, '--max-new', '16', '--temperature', '0.8', '--json', *more)
    if name in ('rsd', 'oracle-gate', 'process-best-of-n'):
        assert status == 2 and 'step checker' in err
        return
    report = json.loads(out, parse_constant=lambda word: pytest.fail(f'{word} is no JSON'))
    assert status == 0 and sum(report['stats']['labels'].values()) == len(report['tokens']) <= 16


# ------------------------------------------------------------------------ lab: tasks, claims, embedded models

@pytest.mark.parametrize('task', tasks.TASKS)
def test_tasks(task):
    """Seeded; the splits share no text; the grader accepts the reference, not silence or another's."""
    take = lambda split, seed=1, n=100: list(itertools.islice(tasks.rows(task, seed, split), n))
    held, train = take('held-out'), take('train')
    assert held == take('held-out') != take('held-out', 2)
    assert not {r['prompt'] + r['solution'] for r in held} & {r['prompt'] + r['solution'] for r in train}
    grades = [(tasks.grade(a, a['solution']), tasks.grade(a, ''), tasks.grade(a, b['solution']))
              for a, b in zip(held, held[1:])]
    if task == 'story':
        assert set(grades) == {(None, None, None)}
        return
    assert all(mine and not silent for mine, silent, _ in grades) and sum(other for *_, other in grades) < 10
    for r in held if 'Answer:' in held[0]['solution'] else []:
        assert int(r['answer']) <= 999 and all(tasks.steps_right(r, r['solution']))
        steps = tasks.STEP.findall(r['solution'])
        assert all(max(int(a), int(b), int(c)) <= 999 and (op in '+-' or min(int(a), int(b)) <= 9)
                   for a, op, b, c in steps)
        assert len(steps) in {'math': range(2, 5), 'math-hard': range(5, 9)}.get(task, range(1, 3))
        first = r['solution'].split('\n')[1]
        assert tasks.steps_right(r, r['solution'].replace(first, first + '1', 1))[0] is False
        assert tasks.steps_right(r, 'so it is\n' + r['solution'])[0] is False


def test_graders():
    """Published values of BLEU (the example in NLTK's manual), ROUGE-L (Lin 2004); foreign rows; bad code."""
    text = 'It is a guide to action which ensures that the military always obeys the commands of the party'
    references = ['It is a guide to action that ensures that the military will forever heed Party commands',
                  'It is the guiding principle which guarantees the military forces always being under the '
                  'command of the Party',
                  'It is the practical guide for the army always to heed the directions of the party']
    assert tasks.bleu([references], [text]) == pytest.approx(0.5045666840058485)
    assert tasks.bleu([['a b c d e']], ['a b c d']) == pytest.approx(math.exp(1 - 5 / 4))
    assert tasks.rouge_l('police killed the gunman', 'police kill the gunman') == 0.75
    assert tasks.rouge_l('police killed the gunman', 'the gunman kill police') == 0.5
    row = next(tasks.rows('summary', 7))
    facts = tasks.SUMMARY.fullmatch(row['answer']).groups()
    found = [tasks.facts_found(row, ' '.join(facts[:k])) for k in range(4)]
    assert found == pytest.approx([0, 1 / 3, 2 / 3, 1]) and tasks.facts_found(row, row['solution']) == 1
    gsm = dict(question='?', answer='He pays 600+634\n#### 1,234')
    assert tasks.grade(gsm, 'so 5, then 1,234.') and not tasks.grade(gsm, '1234 is not 7')
    assert tasks.grade(dict(answer=20), 'a range of 10-20') and tasks.grade(dict(answer=-3), '4 - 7 = -3')
    for row, text in ((dict(answer='Paris, France'), ' Paris, France\n'), (dict(answer=7), 'it is 7'),
                      (dict(task='math', answer=7), 'Answer: 7'), (dict(task='summary', answer='x'), 'x')):
        assert tasks.grade(row, text) and not tasks.grade(row, 'y')
    assert tasks.grade(dict(turns=['?']), 'x') is None
    assert tasks.outputs('\ndef f(a, b): return max(a, b) % 5') == [2, 3, 0, 2]
    for bad in ('__import__("os")', 'a.real', '9 ** 9 ** 9', 'z', 'a(', 'xs[9]', '[a]', 'xs * 3', 'a' * 201):
        assert tasks.outputs(f'def f(a, xs): return {bad}') is None


def test_the_grammar_knows_its_entropy(monkeypatch):
    """The chances exp(-nats) of all stories that can follow a prompt sum to 1 (a few rare are not seen)."""
    for name, few in dict(NAMES=['A', 'B'], ANIMALS=['x'], PLACES=['y', 'v'], THINGS=['z'], WHEN=['w'],
                          LOST=['l', 'm'], FOUND=['f', 'at {place}'], END=['e'],
                          SEARCH=['{a} ran.', '{thing2}.', '{b} sat.', 'So.', 'No.']).items():
        monkeypatch.setattr(tasks, name, few)
    rng, found = random.Random(0), {}
    for _ in range(30_000):
        row = tasks.story(rng)
        found.setdefault(row['prompt'], {})[row['solution']] = row['nats']
    masses = [sum(math.exp(-nats) for nats in found[prompt].values()) for prompt in found]
    assert len(masses) == 4 and all(0.95 < mass < 1 + 1e-9 for mass in masses)


@pytest.mark.parametrize('task, method', [
    ('story', Exact(4)), ('table', verify.CmAsd()), ('table', verify.CmAsd(accept_='strict', alpha=2)),
    ('math', verify.CmAsd(7, tau_base=0.05, gamma_tau=0, controller='fixed'))])
def test_replays_are_runs(task, method):
    """A replay is the real run, cycle by cycle, whatever other rules have seen; so are the sums of a vote."""
    ids = replay.prompts(task, 2)[1][1]
    record = replay.Branches(ids)
    for rule in (verify.CmAsd(tau_base=0.01), method):
        cycles, run = replay.written(replay.begin(ids), ids, rule), record.replay(rule)
        assert list(run.text) == compare.tokens_of(cycles)
        assert list(zip(run.kept, run.drafted)) == [(c.accepted, len(c.drafted)) for c in cycles]
    for key in ('lite', 'ecsv', 'prefix'):
        assert record.sums(key)[3] == record.checked(replace(replay.VOTES[key]), 3)
    x, y = replay.lessons(record)                       # each token of the text is decided once
    assert x.shape == (4, *y.shape) == (4, 4, len(record.line)) and y.double().mean() > 0.5
    found = claims.real_run(replay.begin(ids), ids, Exact(4), 0.0, 0)
    nats = fresh(replay.network('target')[0], ids + record.line[:-1], len(record.line)).log_softmax(-1)
    assert sum(found[8:]) == found[1] and sum(k * n for k, n in enumerate(found[8:])) == found[0]
    assert found[6] == pytest.approx(-float(nats[range(len(nats)), record.line].sum()), rel=1e-4)


def test_fitted_weights():
    """The fit finds the weights that made the votes, none below 0; a penalty shrinks them. 40,000 votes: 0.15
    is 4 standard errors. Figures of agreement and of errors in common by hand."""
    rng, truth = seeded(), torch.tensor([0.5, 1.0, 0.0, 2.0])
    x = torch.randn(4, 4, 10_000, generator=rng)
    odds = torch.tensordot(torch.tensor([0.5, 1.0, -0.7, 2.0]), x, 1) - 0.3
    y = torch.rand(odds.shape, generator=rng) < odds.sigmoid()
    a = replay.fit_weights([(x[..., :5000], y[..., :5000]), (x[..., 5000:], y[..., 5000:])], 0.0)
    assert (a[:4] > 0).tolist() == [True, True, False, True] and (a[:4] / a[3] * 2 - truth).abs().max() < 0.15
    assert (replay.fit_weights([(x, y)], 0.1)[[0, 1, 3]] < a[[0, 1, 3]]).all()
    assert replay.loss_of(a, x, y) < replay.loss_of(a * 0.5, x, y) and replay.loss_of(a, x, y) < math.log(2)
    assert claims.chrf('abcd', 'abcd') == 1 and claims.chrf('abcd', 'xyzu') == 0
    assert claims.chrf('ab', 'ac', 2) == pytest.approx(0.25)                # one letter of two, no pair
    wrong = torch.tensor([[1.0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]])
    assert claims.correlation(wrong) == pytest.approx((1 + 0 + 0) / 3)


def test_quantise(tmp_path, monkeypatch):
    """A quantised copy loads; a group of 64 keeps 16 levels times its scale; embeddings stay."""
    assert len(set(quantise.CODEBOOK)) == 16 and {-1, 0, 1} <= set(quantise.CODEBOOK)
    w = torch.randn(6, 128, generator=seeded())
    coarse = quantise.quantise(w)
    groups = coarse.reshape(-1, 64) / w.reshape(-1, 64).abs().amax(1, keepdim=True)
    assert (groups[..., None] - torch.tensor(quantise.CODEBOOK)).abs().amin(-1).max() < 1e-6
    assert 0.05 < ((coarse - w).norm() / w.norm()) < 0.12
    monkeypatch.setattr(sys, 'argv', ['quantise', str(checkpoint(tmp_path / 'a')), str(tmp_path / 'b')])
    quantise.main()
    a, b = (load(tmp_path / name)[0].state_dict() for name in 'ab')
    assert {k for k in a if not torch.equal(a[k], b[k])} == {k for k in a if k.endswith('_proj.weight')}


def test_training_data(monkeypatch, capsys):
    """Training tells every fact; the tokenizer round-trips; rows are printed; calibrations are in date."""
    told = {(r['answer'], t) for r in itertools.islice(tasks.rows('qa', 0, 'train'), 20_000)
            for t in tasks.TOWNS if t in r['prompt']}
    assert told >= {(value, town) for (_, town), value in tasks.FACTS.items()}
    tokenizer = Tokenizer.from_file(str(EMBEDDED / 'target/tokenizer.json'))
    for text in ('Mia has 270 pens.\n9 * 51 = 459', '  two  spaces\t\n\n', 'caf\u00e9 \u2192 \U0001f600',
                 ''.join(map(chr, range(1, 300)))):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= 1024
    assert not [t for t in tokenizer.get_vocab() if len(re.findall(r'\d', t)) > 1]
    monkeypatch.setattr(sys, 'argv', 'tasks math --n 3 --seed 7'.split())
    tasks.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 and set(rows[0]) >= {'task', 'prompt', 'answer'}
    read_calibration(EMBEDDED / 'target', EMBEDDED / 'draft', ['mask', 'signals', 'sparse'])
    read_calibration(EMBEDDED / 'moe', needs=['sparse'])


def test_heirs_start_as_their_parents(monkeypatch, tmp_path):
    """up as the draft, mid as layers of the target, moe's feed-forwards (its router even) as the target's."""
    monkeypatch.setattr(train, 'HOME', tmp_path)
    (target, tokenizer, _), (draft, *_) = (load(EMBEDDED / name) for name in ('target', 'draft'))
    up, mid = (train.build(name, tokenizer) for name in ('up', 'mid'))
    train.inherit(up, dict(draft.named_parameters()), train.HEIRS['up'][1])
    train.inherit(mid, dict(target.named_parameters()), train.HEIRS['mid'][1])
    assert (fresh(up, [5, 6, 7], 3) - fresh(draft, [5, 6, 7], 3)).abs().max() < 1e-4
    assert torch.equal(mid.model.layers[3].mlp.up_proj.weight, target.model.layers[7].mlp.up_proj.weight)
    moe, x = train.build('moe', tokenizer), torch.randn(1, 50, target.config.hidden_size)
    train.split(moe, dict(target.named_parameters()))
    for one, eight in zip(target.model.layers, moe.model.layers):
        eight.mlp.gate.weight.data *= 1e-4
        whole, parts = kernels.swiglu(x, one.mlp, None)[0], kernels.mix(x, eight.mlp, None)[0]
        assert (whole - parts).abs().max() < 1e-3 * whole.abs().max()


def test_training_and_its_figures(monkeypatch, tmp_path, capsys):
    """A tiny network trains, is interrupted, goes on, is saved, graded and calibrated, with its mixture."""
    clock, accuracy = itertools.count(0, 25), train.accuracy            # a step takes 50 seconds
    tiny = SIZES | dict(model_type='qwen3', max_position_embeddings=2048)
    for name, value in dict(HOME=tmp_path, SHAPES=dict(draft=tiny, target=tiny), CURRICULUM=(
            (1, [('math', {}, 1)]),), accuracy=lambda model, tokenizer, n=1: accuracy(model, tokenizer, 1),
            time=SimpleNamespace(time=lambda: next(clock))).items():
        monkeypatch.setattr(train, name, value)
    few = {name: tasks.TASKS[name] for name in ('math', 'translate', 'story')}
    monkeypatch.setattr(tasks, 'TASKS', few | dict(summary=partial(tasks.summary, high=2)))
    (tmp_path / 'target').mkdir()
    shutil.copy(EMBEDDED / 'target/tokenizer.json', tmp_path / 'target')
    losses = interrupt(monkeypatch, train, 'step', 12)
    with pytest.raises(KeyboardInterrupt):
        train.train('draft', 20, 256, 0, 'cpu')
    done = torch.load(tmp_path / 'draft/checkpoint.pt')['done']
    train.train('draft', 20, 256, 0, 'cpu')
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 6 < done < 12 and said['steps'] == done + len(losses) - 12 > 18
    assert said['held_out'].keys() == tasks.TASKS.keys() and not list(tmp_path.glob('draft/*.pt'))
    assert sum(losses[-5:]) < sum(losses[:5])

    for name in ('target', 'moe'):
        shutil.copytree(tmp_path / 'draft', tmp_path / name, dirs_exist_ok=True)
    monkeypatch.setattr(bench, 'HOME', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['bench', 'quality', '--n', '1'])
    bench.main()
    lines = {line.split('`')[1]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines.keys() == tasks.TASKS.keys() and all('1 of 1 |' in line for line in lines.values())
    for task, words in dict(math='.0% |', translate='BLEU 0', summary='facts ', story='grammar ').items():
        assert lines[task].count(words) >= 3                    # target, draft, moe

    asked = []
    monkeypatch.setattr(train_mask, 'main', lambda flags: asked.append(flags) or 0)
    monkeypatch.setattr(sys, 'argv', ['train', 'recalibrate'])
    assert train.main() == 0
    assert asked == [[], ['--signals'], ['--anchors'], ['--anchors', '--target', str(tmp_path / 'moe')]]


def test_claims_are_findings(monkeypatch, capsys):
    """The claims on mixtures, from the command line, on tiny random networks: figures and verdicts."""
    tiny = lambda seed, **sizes: (network(seed, 257, torch.float32, **sizes), bytes_tokenizer(), {256})
    mixture = dict(experts=(8, 8), num_experts_per_tok=4, moe_intermediate_size=8)
    monkeypatch.setattr(claims, 'embedded', dict(target=tiny(0), draft=tiny(1), moe=tiny(2, **mixture)).get)
    monkeypatch.setitem(claims.CLAIMS, 'sparse', claims.mixture_claims)
    monkeypatch.setattr(sys, 'argv', 'claims sparse --n 1'.split())
    claims.main()
    rows = [line.split(' | ') for line in capsys.readouterr().out.splitlines() if line.startswith('| MoE')]
    assert len(rows) == 11
    for _, figure, interval, line, verdict, _ in rows:          # one prompt: all resamples are alike
        apart = float(figure) - float(line)
        assert interval == f'{figure} to {figure}'
        assert verdict == ('HOLDS' if apart > 0 else 'FAILS') or abs(apart) < 1e-3


def test_transformers_loads_the_embedded_models():
    """With the same ids, end of sequence and logits; the draft has at most an eighth of 8 M parameters."""
    text, sizes = 'Mia has 27 pens. Mia buys 9 more.', []
    for folder in (EMBEDDED / 'target', EMBEDDED / 'draft', EMBEDDED / 'moe'):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer, (ours, mine, eos) = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
        ids = tokenizer(text)['input_ids']
        assert ids == mine.encode(text).ids and eos == {tokenizer.eos_token_id}
        with torch.no_grad():
            assert (theirs(torch.tensor([ids])).logits[0] - fresh(ours, ids)).abs().max() < 1e-3
        sizes.append(sum(p.numel() for p in ours.parameters()))
    assert 8 * sizes[1] <= sizes[0] <= 8e6 and sizes[2] <= 8e6


def test_embedded_pair_is_lossless():
    """sd writes plain decoding's text on held-out rows, fp32; it may differ where the top-2 gap is < 1e-4."""
    (target, tokenizer, eos), (draft, *_) = (load(EMBEDDED / name) for name in ('target', 'draft'))
    for task, seed in itertools.product(tasks.TASKS, range(2)):
        ids = tokenizer.encode(next(tasks.rows(task, seed))['prompt']).ids
        wanted = plain(target, ids, 80, eos=eos)
        got, _ = write(session(target, draft, ids, 80, eos=eos), Exact(4))
        same = os.path.commonprefix([got, wanted])
        top = fresh(target, ids + same, 1)[0].topk(2).values
        assert got == wanted or top[0] - top[1] < 1e-4


def test_readme_commands():
    """The two commands that the README promises are there, and CI runs the second."""
    readme, ci = (HERE / 'README.md').read_text(), (HERE / '.ci/run').read_text()
    tests = 'pip install -r requirements.txt -r requirements-test.txt && python -m pytest -q'
    assert 'pip install -r requirements.txt && python specmini.py --prompt' in readme
    assert tests in readme and 'python -m pytest -q' in ci
