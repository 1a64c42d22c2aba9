"""model.py and kernels.py: forms of one computation, --compile, memory, what a device is asked.

An equal result by another form is the oracle here: packed by plain matrices, gathered by a loop, a compiled
pass by an eager one. Parity with transformers and the cache's state machine: test_specmini.py.
"""
import math
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import kernels
import specmini
import verify
from kernels import Half, Packed, pack
from lab import read_bytes
from lab.tests.helpers import (LINE, MIXED, MIXED_TWO, RANGES, byte_network, case, letters, needs_half,
                               refuses, thin, tiny)
from lab.toys import apart, fresh, network, seeded, session
from model import Compiled, Linear, Reader, load
from verify import METHODS, decode, probs, read_prompt, readers_of, tokens_of


# ------------------------------------------------------------------------------------------ packed, gathered

def test_packed_matrices_compute_what_plain_ones_do(tmp_path, monkeypatch):
    """At one to five positions; packing again changes nothing.

    Without oneDNN an fp32 matrix stays as it is, and so does every matrix of a run in 16 bits.
    """
    model = byte_network(qkv_bias=True)
    wanted = fresh(model, LINE)
    monkeypatch.setattr('kernels.BIG', 1)
    pack(model)
    pack(model)
    assert model.model.layers[0].self_attn.qkv_proj.weight.is_mkldnn
    reader = Reader(model, 50)
    for end, last in ((20, 20), (21, 1), (23, 2), (26, 3), (30, 4), (35, 5)):
        assert apart(reader.read(LINE[:end], model.full, last), wanted[end - last:end]) < 1e-4
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    for dtype in specmini.DTYPES:
        without, _, _ = specmini.ready(tiny(tmp_path), 'cpu', dtype)
        assert type(without.lm_head) is Linear


def test_top_p_looks_at_the_likeliest_first(monkeypatch):
    """The same distribution, whether a few tokens have the mass (temperature 0.2) or nearly all (5)."""
    logits = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    wanted = [probs(logits, temperature, top_p=0.9) for temperature in (0.2, 5)]
    monkeypatch.setattr(verify, 'HEAD', 8)
    for temperature, whole in zip((0.2, 5), wanted):
        assert apart(probs(logits, temperature, top_p=0.9), whole) < 1e-12


def large_or_tiny(name, tensor):
    """One matrix has an entry that fp16 has not, one is so small that fp16 would round it."""
    factor = 1e7 if 'o_proj' in name else 1e-5 if 'down_proj' in name else 1
    return (factor * tensor).bfloat16()


@needs_half
@pytest.mark.parametrize('form, plain', [
    case('fp16', lambda name, tensor: tensor.half(), []),
    case('large-or-tiny', large_or_tiny, ['o_proj', 'down_proj']),
    case('a-part-has-32', lambda name, tensor: tensor if 'k_proj' in name else tensor.bfloat16(),
         ['qkv_proj'])])
def test_matrices_in_16_bits_are_multiplied_in_fp32(form, plain, tmp_path, monkeypatch):
    """In pieces, with biases, a tied head; `plain` are those that fp16 cannot hold. As fp32 computes it."""
    monkeypatch.setattr('kernels.BIG', 64)
    monkeypatch.setattr('kernels.PIECE', 100)
    sizes = dict(qkv_bias=True, o_bias=True, tie_word_embeddings=True)
    folder = tiny(tmp_path, sizes=sizes, attention_bias=True, weights=lambda stored: {
        name: form(name, tensor) for name, tensor in stored.items() if name != 'lm_head.weight'})
    exact, _, _ = load(folder)
    model, _, _ = specmini.ready(folder, 'cpu', 'auto')
    kinds = {name.split('.')[-1]: type(part) for name, part in model.named_modules() if '_proj' in name}
    assert kinds == {name: Packed if name in plain else Half for name in kinds} and len(kinds) == 4
    assert type(model.lm_head) is Half and model.model.embed_tokens.weight.element_size() == 2
    wanted, found = fresh(exact, LINE), fresh(model, LINE)
    assert found.dtype == torch.float32 and apart(found, wanted) < 1e-5 * float(wanted.abs().max())
    assert read_bytes(model, model.full) < read_bytes(exact, exact.full)
    plain_model, _, _ = specmini.ready(folder, 'cpu', 'fp32')
    assert not any(isinstance(part, Half) for part in plain_model.modules())
    monkeypatch.setattr('kernels.has_half', lambda: False)          # a CPU without that product
    without, _, _ = specmini.ready(folder, 'cpu', 'auto')
    assert not any(isinstance(part, Half) for part in without.modules())
    assert apart(fresh(without, LINE), wanted) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize('renormalise, threshold', [(True, 0), (False, 0), (True, 0.3)])
def test_sparse_experts_gathered(renormalise, threshold):
    """What few tokens on CUDA, or a compiled pass, compute is what a loop over experts gives.

    Neither reads an expert that nobody chose: NaN in its weights would show.
    """
    moe = network(**MIXED).model.layers[0].mlp          # six experts
    moe.renormalise = renormalise
    x = torch.randn(5, 16, dtype=torch.float64, generator=seeded())
    weights, chosen = kernels.route(x, moe)
    weights[2, 1:] = 0
    wanted = kernels.combine_experts(x, moe, weights, chosen, threshold)
    assert (apart(kernels.combine_experts(x, moe, weights, chosen), wanted) > 1e-3) == (threshold > 0)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    assert apart(kernels.gathered_experts(x, moe, weights, chosen, threshold), wanted) < 1e-12
    moe.renormalise = False
    weights[:, 1:] = 0
    wanted = kernels.combine_experts(x, moe, weights, chosen)
    unread = list(set(range(6)) - set(chosen[:, 0].tolist()))
    assert unread
    moe.gate_up_proj[unread] = moe.down_proj[unread] = math.nan
    for combine in (kernels.gathered_experts, kernels.combine_experts):
        assert apart(combine(x, moe, weights, chosen), wanted) < 1e-12


def test_a_long_text_is_read_in_chunks(monkeypatch):
    """Logits of the last positions come from the chunks that hold them, and from no other."""
    model = network()
    wanted = fresh(model, LINE)
    monkeypatch.setattr('model.CHUNK', 8)
    for last in (0, 1, 5, 8, 19, 50):
        reader = Reader(model, 50)
        got = reader.read(LINE, model.full, last)
        assert got is None if last == 0 else apart(got, wanted[50 - last:]) < 1e-9
        assert [positions for _, positions in reader.log] == [8] * 6 + [2]


# ------------------------------------------------------------------------------------- an Engine from Python

def test_an_engine_leaves_the_process_as_it_is(tmp_path, monkeypatch):
    """Programs alone set threads, and a card's kernels. Weights and cache have the dtype asked for."""
    calls = []
    monkeypatch.setattr(torch, 'set_num_threads', calls.append)
    monkeypatch.setattr(torch.backends.cuda, 'enable_cudnn_sdp', calls.append)
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    engine = specmini.Engine(target=tiny(tmp_path / 'target'), draft=tiny(tmp_path / 'draft', 1), max_new=8,
                             dtype='bf16', ignore_eos=True)
    engine.open([LINE])
    store = engine.readers['target'].cache.stores[0]
    assert store.dtype == engine.models['target'].lm_head.weight.dtype == torch.bfloat16
    assert len(tokens_of(engine.write(LINE, 'sd'))) == 8 and not calls
    specmini.take_threads(engine.models['target'])
    assert calls == [False, 1]


# -------------------------------------------------------------------------------------------------- --compile

@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs of layers that are compiled; no code is made of them; a replay computes again."""
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    counter = CompileCounter()
    compile_by = torch.compile

    def count_alone(function, options, **how):
        return compile_by(function, backend=counter, **how)

    def record(self, *inputs):
        hidden = self.model(*inputs)
        return *inputs[:2], SimpleNamespace(replay=lambda: hidden.copy_(self.model(*inputs))), hidden
    monkeypatch.setattr(torch, 'compile', count_alone)
    monkeypatch.setattr(Compiled, 'record', record)
    return counter


READS = (17, 1), (18, 1), (21, 3), (22, 3), (25, 1), (30, 1)            # feeds 17, 1, 3, 3, 3, 5
SPANS = [(length, 1) for length in (3, 5, 8, 9, 12, 16, 20, 24)]        # feeds 3, 2, 3, 1, 3, 4, 4, 4


@pytest.mark.parametrize('sizes, sparse, span, reads, graphs', [
    case('dense', {}, False, None, READS, 3, slow=True),            # passes of 1, 4 and 8 positions
    case('sparse-mixture', MIXED_TWO, True, None, READS, 3 * 2, slow=True),
    case('spans', {}, False, 8, SPANS, 5)])             # of 4 positions at 8, 16 and 32 keys, of 2, of 1
def test_graphs(sizes, sparse, span, reads, graphs, counter, monkeypatch):
    """A pass for each padded length, whatever the position, a graph for each kind of layer.

    It has a power of two of keys in view, or the whole cache.
    """
    if span:
        monkeypatch.setattr('model.SPAN', span)
        monkeypatch.setattr('model.EVEN', span)
    model = network(**sizes)
    path = model.full
    if sparse:
        path = thin(model, dense_below=2, block=1, rho=0.3, ffn_quantile=1.0, moe_quantile=1.0)
    compiled = Reader(model, 24 if span else 40, compiled=True)         # 16 more for padding
    exact = Reader(model, 40)
    for store in compiled.cache.stores:
        store.normal_(0, 50)                            # what a padded pass must not look at
    for length, last in reads:
        got = compiled.read(LINE[:length], path, last)
        assert apart(got, exact.read(LINE[:length], path, last)) < 1e-9
    assert counter.frame_count == graphs


# ------------------------------------------------------------------------------------- what a device is asked

FAR = torch.device('meta')      # the device that these tests pretend


class Far(torch.Tensor):
    """A tensor that says it is on FAR, as does all that is computed of it; it is on the CPU."""
    device = FAR


class Waits(TorchFunctionMode):
    """Counts what makes the host wait: numbers fetched from FAR, and copies to it that block.

    It sees Python's calls alone, not what a kernel does within.
    """
    FETCHES = 'item', 'tolist', 'cpu', 'numpy', '__bool__', '__int__', '__float__', '__index__', 'nonzero'
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.__name__
        is_far = isinstance(args[0], Far) if args else False
        to_far = kwargs.get('device') == FAR or name == 'to' and FAR in args[1:]
        to_cpu = name == 'cpu' or name == 'to' and 'cpu' in map(str, args[1:])
        if is_far and name in ('__getitem__', '__setitem__'):       # an index of the host's is copied there
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.count += any(isinstance(part, list) or isinstance(part, torch.Tensor) and part.ndim
                              and not isinstance(part, Far) for part in parts)
        elif is_far:
            self.count += name in self.FETCHES or to_cpu
        if to_far:
            copies = name in ('to', 'tensor', 'as_tensor', 'new_tensor')
            self.count += copies and not is_far and not kwargs.get('non_blocking')
            kwargs.pop('device', None)
            args = ['cpu' if arg == FAR else arg for arg in args] if name == 'to' else args
        kind = Far if to_far else torch.Tensor if to_cpu else None
        result = func(*args, **kwargs)
        return result.as_subclass(kind) if kind else result


def far_session(**settings):
    """A Session of a random pair whose passes are computed on FAR."""
    pair = [network(0, num_hidden_layers=4), network(1)]
    for model in pair:
        model.set_context(128)                          # enough, so that a Reader computes no others
        model.cos = model.cos.as_subclass(Far)
    s = session(*pair, [1, 2, 3], 15, text=letters,
                calibration=dict(mask=dict(skip=[3, 5]), signals=RANGES), **settings)
    read_prompt(s)
    return s


@pytest.mark.parametrize('temperature', [0.0, 0.8])
@pytest.mark.parametrize('name, knobs, most', [
    ('ar', {}, lambda cycle: 1),
    ('sd', {}, lambda cycle: 3),            # the drafted ids, all that the rule reads, the next token
    ('ecsv', {}, lambda cycle: 3),
    ('cmasd', {}, lambda cycle: 3 + len(cycle.drafted)),            # also the confidence in each token
    ('via', {}, lambda cycle: 3 + cycle.passes.get('target/full', [0])[0]),
    ('specguard', dict(max_step=6), lambda cycle: 2 + sum(n for n, *_ in cycle.passes.values()))])
def test_waits_of_a_cycle(name, knobs, most, temperature):
    with Waits() as waits:
        s = far_session(temperature=temperature)
        before = waits.count
        for cycle in decode(s, METHODS[name](**knobs)):
            allowed = most(cycle) if cycle.drafted else 1 + (name != 'ar')  # the last is not drafted
            assert waits.count - before == allowed
            before = waits.count
    assert s.tokens_left == 0 and all(type(token) is int for token in s.tokens)


@pytest.mark.parametrize('name, broken', [
    ('ar', 'target'), ('sd', 'draft'), ('sd', 'target'), ('ecsv', 'draft'), ('ecsv', 'target'),
    ('specguard', 'draft'), ('specguard', 'target')])
def test_a_device_is_not_believed_blindly(name, broken):
    """Logits that overflowed there are found in what is fetched: none of the cycle is committed."""
    knobs = dict(tau=math.inf) if name == 'specguard' else {}
    with Waits():
        s = far_session(temperature=1.0)
        readers_of(s)[broken].model.lm_head.weight[3] = math.inf
        refuses(broken, next, decode(s, METHODS[name](**knobs)))
    assert len(s.tokens) == 3
