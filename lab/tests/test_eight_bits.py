"""A draft in 8 bits: its products, when it is the default, and that no text depends on it."""
from functools import partial

import pytest
import torch
from scipy.stats import chisquare

import kernels
import specmini
from lab.tests.helpers import EMBEDDED, program, refused, refuses
from lab.toys import network, session
from model import Linear
from verify import Exact, draft_model

FOX = 'One evening Mia the fox went to the market with a map.'
needs_vnni = pytest.mark.skipif(not kernels.has_int8(), reason='without VNNI sums of bytes saturate')


@pytest.fixture
def eight(monkeypatch):
    """Every matrix counts as big, and this CPU as one with VNNI: without it sums saturate, a worse draft."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    monkeypatch.setattr(kernels, 'has_int8', lambda: True)


def product(rows, bias=True):
    """(what Int8 computes of these rows [N, 512], what fp64 does)."""
    torch.manual_seed(0)
    linear = Linear(512, 300, bias=bias).requires_grad_(False)
    linear.weight.mul_(torch.logspace(-3, 3, 300)[:, None])             # each row has its own scale
    return kernels.Int8(linear)(rows), torch.nn.functional.linear(
        rows.double(), linear.weight.double(), linear.bias.double() if bias else None)


@needs_vnni
@pytest.mark.parametrize('sizes', [[1], [1] * 5, [1e4, 1, 1e-4], [1e-30, 1]])
def test_products_are_two_percent_from_fp64(sizes):
    """Of rows of any size beside each other."""
    rows = torch.randn(len(sizes), 512) * torch.tensor(sizes)[:, None]
    ours, exact = product(rows, bias=False)
    assert ((ours - exact).norm(dim=1) <= 0.02 * exact.norm(dim=1)).all()


def test_odd_rows():
    """Zeros stay zeros, but for the bias; a row of NaN is NaN, for the check of logits to find."""
    rows = torch.zeros(2, 512)
    rows[1, 7] = torch.nan
    ours, exact = product(rows)
    assert torch.allclose(ours[0], exact[0].float()) and ours[1].isnan().all()


def test_a_draft_is_judged_by_the_q_that_it_was_drawn_from(eight):
    """A thousand first tokens against Draft.q: what 8 bits round is in both."""
    target, draft = network(0, dtype=torch.float32), network(1, dtype=torch.float32)
    kernels.pack(draft, 8)
    assert isinstance(draft.lm_head, kernels.Int8)
    counts = torch.zeros(11)
    for seed in range(1000):
        s = session(target, draft, [1, 2, 3], 8, seed=seed, temperature=1.0)
        made = draft_model(s, 2, Exact())
        counts[made.tokens[0]] += 1
    expected = made.q[0] / made.q[0].sum() * 1000
    assert chisquare(counts, expected).pvalue > 1e-3
    assert chisquare(counts.flip(0), expected).pvalue < 1e-3            # of others it says so


@pytest.mark.parametrize('draft', [str(EMBEDDED / 'draft'), 'self'])
def test_texts_are_those_of_plain_decoding(draft, eight):
    """By every method that says so; the target's own copy in 8 bits guesses nearly all."""
    engine = specmini.Engine(draft=draft, max_new=40)
    assert isinstance(engine.models['draft'].lm_head, kernels.Int8)
    assert not any(isinstance(part, kernels.Int8) for part in engine.models['target'].modules())
    wanted, _ = engine.generate(FOX, 'ar')
    for setting in ('sd gamma=3', 'ecsv', 'cmasd tau_base=1', 'via escalate=1.1', 'specguard tau=inf'):
        (method,) = specmini.make_methods([setting]).values()
        text, cycles = engine.generate(FOX, method)
        assert text == wanted and any(cycle.drafted for cycle in cycles), setting
        if (draft, setting) == ('self', 'sd gamma=3'):
            judged = [row.kept for cycle in cycles for row in cycle.judged]
            assert sum(judged) > 0.9 * len(judged)


def test_bits_by_default_and_asked_for(monkeypatch, capsys):
    """8 where the CPU has VNNI and the draft runs in fp32; elsewhere a line says what is lacking."""
    asked = []
    real = kernels.pack
    monkeypatch.setattr(kernels, 'pack', lambda network, bits=16: asked.append(bits) or real(network, bits))
    for there, settings, bits in (
            (True, {}, [16, 8]), (True, dict(draft_bits=16), [16, 16]), (True, dict(draft='self'), [16, 8]),
            (True, dict(dtype='bf16'), []), (False, {}, [16, 16]), (False, dict(draft_bits=16), [16, 16])):
        monkeypatch.setattr(kernels, 'has_int8', lambda there=there: there)
        asked.clear()
        specmini.Engine(**settings)
        assert asked == bits, (there, settings)
    for flags in (['--draft', 'self'], ['--draft-bits', 8]):
        refused(capsys, 'need a CPU with VNNI', '--prompt', 'x', *flags)
    refused(capsys, 'draft_bits is 4; expected a whole number 8, 16', '--prompt', 'x', '--draft-bits', 4)
    monkeypatch.setattr(kernels, 'has_int8', lambda: True)
    refuses('dtype fp32', partial(specmini.Engine, draft='self', dtype='bf16'))
    assert program(capsys, '--prompt', FOX, '--draft', 'self', '--max-new', 4)[0] == 0
