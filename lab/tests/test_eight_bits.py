"""A draft in 8 bits: its products, when it is the default, how much of it is kept."""
from functools import partial

import pytest
import torch

import kernels
import specmini
from lab.tests.helpers import program, refused, refuses
from model import Linear
from verify import Exact

FOX = 'One evening Mia the fox went to the market with a map.'


def product(rows, bias=True):
    """(what Int8 computes of these rows [N, 512], what fp64 does)."""
    torch.manual_seed(0)
    linear = Linear(512, 300, bias=bias).requires_grad_(False)
    linear.weight.mul_(torch.logspace(-3, 3, 300)[:, None])             # each row has its own scale
    return kernels.Int8(linear)(rows), torch.nn.functional.linear(
        rows.double(), linear.weight.double(), linear.bias.double() if bias else None)


@pytest.mark.parametrize('sizes', [[1], [1] * 5, [1e4, 1, 1e-4], [1e-30, 1]])
def test_products_are_two_percent_from_fp64(sizes):
    rows = torch.randn(len(sizes), 512) * torch.tensor(sizes)[:, None]
    ours, exact = product(rows, bias=False)
    assert ((ours - exact).norm(dim=1) <= 0.02 * exact.norm(dim=1)).all()


def test_sums_of_the_largest_products_fit():
    """Without VNNI two products of whole bytes, 127 * 255 each, would be cut to 32767."""
    linear = Linear(512, 300, bias=False).requires_grad_(False)
    linear.weight.fill_(3)
    rows = torch.ones(1, 512)
    rows[0, :2] = -1                                    # so that both signs are held
    assert torch.allclose(kernels.Int8(linear)(rows), torch.tensor(3 * 508.), rtol=0.02)


def test_odd_rows():
    """Zeros stay zeros, but for the bias; a row of NaN is NaN, for the check of logits to find."""
    rows = torch.zeros(2, 512)
    rows[1, 7] = torch.nan
    ours, exact = product(rows)
    assert torch.allclose(ours[0], exact[0].float()) and ours[1].isnan().all()


def test_a_draft_that_is_the_target_in_8_bits(monkeypatch):
    """It guesses nearly all, and the target itself stays as it is: the text is that of plain decoding."""
    monkeypatch.setattr(kernels, 'BIG', 1)
    engine = specmini.Engine(draft='self', max_new=40)
    assert isinstance(engine.models['draft'].lm_head, kernels.Int8)
    text, cycles = engine.generate(FOX, Exact(3))
    judged = [row.kept for cycle in cycles for row in cycle.judged]
    assert text == engine.generate(FOX, 'ar')[0] and sum(judged) > 0.9 * len(judged) > 9


def test_bits_by_default_and_asked_for(monkeypatch, capsys):
    """8 where the CPU has AVX2 and the draft runs in fp32; elsewhere a line says what is lacking."""
    asked = []
    real = kernels.pack
    monkeypatch.setattr(kernels, 'pack', lambda network, bits=16: asked.append(bits) or real(network, bits))
    for there, settings, bits in (
            (True, {}, [16, 8]), (True, dict(draft_bits=16), [16, 16]), (True, dict(draft='self'), [16, 8]),
            (True, dict(draft='self', draft_bits=16), [16, 16]),
            (True, dict(dtype='bf16'), []), (False, {}, [16, 16]), (False, dict(draft_bits=16), [16, 16])):
        monkeypatch.setattr(kernels, 'has_half', lambda there=there: there)
        asked.clear()
        specmini.Engine(**settings)
        assert asked == bits, (there, settings)
    for flags in (['--draft', 'self'], ['--draft-bits', 8]):
        refused(capsys, 'need an x86 CPU with AVX2', '--prompt', 'x', *flags)
    refused(capsys, 'draft_bits is 4; expected a whole number 8, 16', '--prompt', 'x', '--draft-bits', 4)
    monkeypatch.setattr(kernels, 'has_half', lambda: True)
    refuses('dtype fp32', partial(specmini.Engine, draft='self', dtype='bf16'))
    assert program(capsys, '--prompt', FOX, '--draft', 'self', '--max-new', 4)[0] == 0
