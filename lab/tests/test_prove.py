"""lab.prove: its figures are those of the law tests, and no verdict contradicts a method."""
from unittest.mock import patch

import pytest
import torch

import lab.baselines    # noqa: F401, enters the baselines in METHODS
from lab import prove
from lab.tests.helpers import case, program, put, refused
from lab.toys import Table, WrongBonus, WrongResidual, WrongThird, enumerate_law, exact_law, variation
from model import BadInput
from verify import METHODS, Exact, residual


def liar(kind=Exact, **parts):
    """A method that promises the target's distribution, and has another or none."""
    return type('Liar', (kind,), dict(lossless=True, **parts))


@pytest.fixture
def short_proofs(monkeypatch):
    """Proofs of two tokens at most, so that every method has one in no time."""
    for name, value in dict(SIZES=((2, 1, True), (2, 2, True)), MOST=80).items():
        monkeypatch.setattr(prove, name, value)


@pytest.mark.slow
def test_prove_judges_or_refuses_every_method(short_proofs):
    unproven = set()
    for name, kind in METHODS.items():
        try:
            proof = prove.prove(name, kind(), temperature=1.0, top_k=0, top_p=1.0)
            assert proof.status == 0 and (proof.gap < 1e-9) >= proof.promised, name
        except BadInput as error:
            assert name in str(error)
            unproven.add(name)
    assert unproven == {'rsd'}                          # it grades steps


@pytest.mark.parametrize('rule, status', [
    case('lossless', Exact, 0), case('lossy', METHODS['lenient'], 0), case('wrong', liar(WrongResidual), 1)])
def test_prove_prints_distributions(rule, status, capsys, monkeypatch):
    """A false promise gives status 1."""
    monkeypatch.setattr(prove, 'SIZES', ((4, 2, True),))
    monkeypatch.setitem(METHODS, 'told', rule)
    found, out, _ = program(capsys, 'told', '--set', 'gamma=1', '--top-k', 4, main=prove.main)
    assert found == status
    wanted, drafted = [exact_law(Table(seed), 2, temperature=1.0) for seed in (1, 2)]
    law = enumerate_law(Table(1), Table(2), rule(1), 2, temperature=1.0)
    gap = variation(law, wanted)
    assert gap < 1e-9 if rule is Exact else f'{gap:.3g}' in out
    text = max(wanted, key=wanted.get)
    shown, = [line.split() for line in out.splitlines() if line.startswith('{} {} '.format(*text))]
    assert [shown[i] for i in (2, 3, 5)] == [f'{of[text]:.5f}' for of in (law, wanted, drafted)]


@pytest.mark.parametrize('rule, status, said', [
    case('sound', Exact, 0, 'followed: blocks of up to 4 guesses, kept and cut at each place', slow=True),
    case('third-guess', liar(WrongThird), 1, '\nWRONG: ', slow=True),
    case('bonus', liar(WrongBonus), 1, '\nWRONG: ', slow=True),
    case('shares', liar(METHODS['ecsv'], recovery_distribution=lambda _, p, q: (residual(p, q) ** 2)
                        / (residual(p, q) ** 2).sum()), 1, '\nWRONG: ', slow=True),
    case('coin', liar(chance=lambda *_: float(torch.rand(1) < 0.5)), 2, 'through session.draw'),
    case('generator', liar(chance=lambda _, s, i: float(torch.rand(1, generator=s.session.generator))), 2,
         'through session.draw'),
    *[case(f'chance-{value}', liar(chance=lambda *_, value=value: value), 2, f'{value}; expected 0 to 1')
      for value in (1.5, -0.1, float('nan'))],
    *[case(said, liar(accept=lambda *args, change=change: change(*Exact.accept(*args))), 2, said)
      for said, change in {'a label for each': lambda ids, labels, rows: (ids, labels[1:], rows),
                           '0 tokens': lambda *_: ([], [], []),
                           'judged <= drafted': lambda ids, labels, rows: (ids, labels, 2 * rows)}.items()]])
def test_prove_finds_what_is_wrong(rule, status, said, capsys, monkeypatch):
    monkeypatch.setitem(METHODS, 'mine', rule)
    found, out, err = program(capsys, 'mine', main=prove.main)
    assert (found, err.count('\n')) == (status, status // 2) and said in out + err


def test_prove_of_a_greedy_text_and_of_ones_own(short_proofs, tmp_path, capsys):
    _, out, _ = program(capsys, 'sd', '--temperature', 0, '--tokens', 2, main=prove.main)
    assert 'up to 1 guess, kept' in out and 'nothing to prove at temperature 0' in out
    put(tmp_path, {'a.py': "from verify import METHODS, Exact\n"
                           "METHODS['a'] = type('A', (Exact,), dict(chance=lambda *_: 1))"})
    with patch.dict(METHODS):                           # it is forgotten after the test
        status, out, _ = program(capsys, 'a', '--import', tmp_path / 'a.py', main=prove.main)
    assert (status, out.splitlines()[-1][:6]) == (0, 'LOSSY:')


@pytest.mark.parametrize('named, flags', [
    ('nope', 'nope'), ('temperature is -1', 'sd --temperature -1'), ('rsd', 'rsd'),
    ('--prompt', 'sd --prompt x'), ('gamma', 'ar --set gamma=2'), ('80', 'specguard --set k=9'),
    ('sparse', 'sparse --set ffn_quantile=0.5')])
def test_prove_refuses_in_one_line(named, flags, short_proofs, capsys):
    refused(capsys, named, *flags.split(), main=prove.main)
