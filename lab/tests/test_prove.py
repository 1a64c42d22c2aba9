"""lab.prove: what walks find, what they say of it, and that no verdict contradicts a method."""
import random
import shlex
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

import lab.baselines    # noqa: F401, enters the baselines in METHODS
from lab import prove
from lab.tests.helpers import case, program, put, refused
from lab.shipped import ReplacedByP
from lab.toys import Table, enumerate_law, exact_law, session, variation, write
from model import BadInput, Path
from verify import METHODS, Exact, Judged, is_greedy, read_prompt


def liar(kind=Exact, **parts):
    """A method that promises the target's distribution, and has another or none."""
    return dataclass(type('Liar', (kind,), dict(lossless=True) | parts))


class AfterWhole(Exact):
    """Keeps the first guess after a block that was kept whole, and errs nowhere else."""
    whole = False

    def learn(self, cycle):
        self.whole = 0 < len(cycle.drafted) == cycle.accepted

    def chance(self, score, i):
        return 1.0 if self.whole and i == 0 else super().chance(score, i)


def only(holds):
    """The rule that keeps every guess where holds(session, i), and is exact elsewhere."""
    def chance(self, score, i):
        return 1.0 if holds(score.session, i) else Exact.chance(self, score, i)
    return liar(chance=chance)


def softened(self, session, n):
    draft = Exact.guess(self, session, n)
    if draft.logits is None:                            # it was looked up
        draft.q = draft.q / 2 + 0.5 / draft.q.shape[1]
    return draft


def shortened(self, session):
    session.tokens_left = min(session.tokens_left, 6)
    return Exact.propose(self, session)


def endless(self, session):
    session.eos = frozenset() if len(session.tokens) > session.begin + 5 else session.eos
    return Exact.propose(self, session)


def late_steps(self, session, draft, pairs):
    tokens, labels, judged = METHODS['specguard'].accept(self, session, draft, pairs)
    return (draft.tokens, ['draft'] * len(draft.tokens), judged) if len(session.tokens) > 10 else (
        tokens, labels, judged)


WRONG = dict(
    after_whole=liar(AfterWhole), greedy=only(lambda s, i: is_greedy(s.temperature)),
    late=only(lambda s, i: len(s.tokens) > s.begin + 12),
    far=only(lambda s, i: s.tokens_left > 15), fifth=only(lambda s, i: i == 4), ends=only(lambda s, i: s.eos),
    sparse=only(lambda s, i: s.sparse), no_draft_model=only(lambda s, i: s.drafter is None),
    cut=only(lambda s, i: s.top_p < 1), warm=only(lambda s, i: s.temperature > 1),
    vocabulary=only(lambda s, i: s.target.model.vocab > 10),
    fp32=only(lambda s, i: s.target.model.dtype == torch.float32), looked_up=liar(guess=softened),
    # conditions of every real run
    many_words=only(lambda s, i: s.target.model.vocab > 100), prompt=only(lambda s, i: s.begin > 8),
    long=only(lambda s, i: len(s.tokens) > 60), cold=only(lambda s, i: 0 < s.temperature < 0.7),
    top_k=only(lambda s, i: s.top_k > 2), two_ends=only(lambda s, i: len(s.eos) > 1),
    calibrated=only(lambda s, i: 'sparse' in s.calibration),
    bf16=only(lambda s, i: s.target.model.dtype == torch.bfloat16))


@pytest.mark.parametrize('wrong, status', [
    *[case(name, wrong, [1]) for name, wrong in WRONG.items()],
    case('shortened', liar(propose=shortened), [2]), case('endless', liar(propose=endless), [2]),
    case('steps', liar(METHODS['specguard'], accept=late_steps), [1]),
    case('coin', liar(chance=lambda *_: float(torch.rand(1) < 0.5)), [1, 2]),
    case('own', liar(chance=lambda _, score, i: float(
        torch.rand(1, generator=score.session.generator))), [2])])
def test_what_is_wrong_in_some_states_alone_is_found(wrong, status, capsys, monkeypatch):
    """In a line, which a single walk repeats."""
    monkeypatch.setitem(METHODS, 'mine', wrong)
    knob = 'tau=inf' if issubclass(wrong, METHODS['specguard']) else 'gamma=4'
    flags = f'mine {knob}', '--seed', 6
    found, out, err = program(capsys, *flags, main=prove.main)
    assert found in status and ('\nWRONG: ' in out or 'lab.prove: mine ' in err), out + err
    if status == [1]:
        number = out.split('--walk ')[1].split()[0]
        _, again, _ = program(capsys, *flags, '--walk', number, main=prove.main)
        assert [line for line in again.splitlines() if not line.startswith('not walked')] == [
            line for line in out.splitlines() if not line.startswith('not walked')]


class Pipelined(Exact):
    """Right: what it draws last in one cycle it writes in the next."""
    lossless, held = True, None

    def accept(self, session, draft, score):
        if self.held is not None:
            token, self.held = self.held, None
            return [token], ['target'], []
        tokens, labels, judged = super().accept(session, draft, score)
        if len(tokens) > 1:
            self.held = tokens.pop()
        return tokens, labels[:len(tokens)], judged


def test_a_right_method_whose_cycles_differ_is_not_called_wrong(capsys, monkeypatch):
    monkeypatch.setitem(METHODS, 'mine', Pipelined)
    status, out, _ = program(capsys, 'mine', '--walks', 6, main=prove.main)
    assert status == 3 and 'NOT PROVED: a cycle is not exact by itself' in out


def test_a_walk_that_begins_with_other_knobs_finds_a_cache_that_is_trusted_too_far():
    """With these knobs slim decides nothing, so no walk of theirs leaves slim's keys behind."""
    trusting = property(lambda path: frozenset(['full', 'full without [1]']))
    with patch.object(Path, 'reads_from', trusting):
        proof = prove.Proof('via', METHODS['via'](escalate=1.1), range(50))
    assert proof.sentence().startswith('WRONG') and 'after_other_knobs True' in proof.where


def test_what_a_class_keeps_of_another_text_is_found():
    class Shared(Exact):
        lossless, texts = True, []

        def __post_init__(self):
            super().__post_init__()
            self.texts.append(self)

        def chance(self, score, i):
            first = self.texts[0] is self
            return super().chance(score, i) if first else 1.0
    proof = prove.Proof('shared', Shared(), range(9))
    assert proof.sentence().startswith('WRONG')


@pytest.mark.parametrize('number', [lambda x: torch.tensor(x), lambda x: x if 0 < x < 1 else bool(x)])
def test_a_chance_may_be_a_tensor_or_a_bool(number):
    kind = liar(chance=lambda self, score, i: number(Exact.chance(self, score, i)))
    assert prove.Proof('mine', kind(), range(6)).sentence().startswith('lossless')


@pytest.mark.parametrize('seed', range(3))
def test_block_verification_keeps_more_than_sd(seed):
    """Of blocks of three: the tokens of a cycle, expected over each outcome of each draw."""
    def tokens(method):
        texts = enumerate_law(Table(seed, 3), Table(seed + 9, 3), method, 4, temperature=1.0,
                              run=lambda s, own: write(s, own, most=1))
        return sum(len(text) * chance for text, chance in texts.items())
    assert tokens(METHODS['block'](3)) > tokens(Exact(3)) + 0.001


@pytest.mark.slow
def test_every_method_is_judged_or_refused():
    refusing = set()
    for name, kind in METHODS.items():
        try:
            proof = prove.Proof(name, kind(), range(1))
            assert proof.gap < prove.SAME or not kind().lossless, name
        except BadInput as error:
            assert name in str(error)
            refusing.add(name)
    assert refusing == {'rsd'}                          # it grades steps


@pytest.mark.parametrize('rule', [Exact, ReplacedByP])
def test_a_gap_is_the_total_variation_of_whole_texts(rule):
    """Of equal length, which the tree of next tokens spares; the shown law is that of the first ones."""
    for seed in range(6):
        r = random.Random(seed)
        eos = frozenset([2]) if seed % 2 else frozenset()
        s = session(Table(seed, 3), Table(seed + 9, 3), [1, 2], 9, seed=seed, temperature=1.0, eos=eos)
        read_prompt(s)
        left = r.randint(2, 4)
        law, lost, _, _ = prove.next_cycle(s, rule(3), left)
        rest = dict(eos=eos, prompt=s.tokens, temperature=1.0)
        wanted = exact_law(s.target.model, left, **rest)
        texts = Counter()
        for tokens, chance in law.items():
            texts.update(exact_law(s.target.model, left, tokens, chance, **rest))
        assert lost == 0 and prove.gap(law, s) == pytest.approx(variation(texts, wanted), abs=1e-12)


@pytest.mark.parametrize('kind, flags, status, said', [
    case('right', Exact, '--walks 7', 0, 'lossless in all '),
    case('lossy', METHODS['ratio'], '', 0, 'LOSSY: off by '),
    case('unpromised', type('Own', (Exact,), dict(guess=Exact.guess)), '--walks 5', 0, 'no difference '),
    case('never-met', Exact, '--walks 4 --temperature 1', 0, 'never met: '),
    case('greedy', Exact, '--temperature 0 --walks 9', 0, 'greedy'),
    case('unasked', liar(accept=lambda self, session, draft, score: (
        [score.next_token(len(draft.tokens))] if not draft.tokens else [int(session.draw(score.p[0]))],
        ['target'], []), chance=lambda *_: 1.0), '--walks 5', 3, 'NOT PROVED: no state asks its chance.')])
def test_what_is_said(kind, flags, status, said, capsys, monkeypatch):
    monkeypatch.setitem(METHODS, 'mine', kind)
    found, out, err = program(capsys, 'mine', *flags.split(), main=prove.main)
    assert found == status and said in out, out + err
    shown = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert ('LOSSY' in out) == any(line[-1] != '0' for line in shown)
    assert sum(float(line[-2]) for line in shown) <= 1.00001 and len(shown) <= prove.ROWS


def test_too_many_ways_are_no_proof(capsys, monkeypatch):
    """A rule that burns coins could hide what it does with its later guesses."""
    def chance(self, score, i):
        for _ in range(8):
            score.session.flip(0.5)
        return 1.0 if i else Exact.chance(self, score, i)
    monkeypatch.setitem(METHODS, 'burns', liar(chance=chance))
    _, out, _ = program(capsys, 'burns', '--walks', 4, '--temperature', 1, main=prove.main)
    assert 'WRONG' in out or 'NOT PROVED: blocks of ' in out


@pytest.mark.parametrize('said, changed', [
    ('a label for each', dict(accept=lambda *args: (lambda ids, labels, rows: (ids, labels[1:], rows))(
        *Exact.accept(*args)))),
    ('0 tokens', dict(accept=lambda *_: ([], [], []))),
    ('judged <= drafted', dict(accept=lambda self, session, draft, score: (
        [int(session.draw(score.p[0]))], ['target'], [Judged([1])] * 9))),
    ('random numbers of torch or Python', dict(chance=lambda *_: float(torch.rand(()) < 2))),
    ('memory cannot be copied', dict(learn=lambda self, cycle: vars(self).update(kept=(x for x in 'a')))),
    *[(f'{value}; expected 0 to 1', dict(chance=lambda *_, value=value: value))
      for value in (1.5, -0.1, float('nan'))]])
def test_what_contradicts_itself_is_refused(said, changed, capsys, monkeypatch):
    monkeypatch.setitem(METHODS, 'mine', liar(**changed))
    assert '(walk ' in refused(capsys, said, 'mine', main=prove.main)


def test_an_error_of_ones_own_is_told_with_its_walk(tmp_path, capsys):
    put(tmp_path, {'a.py': "from verify import METHODS, Exact\n"
                           "METHODS['a'] = type('A', (Exact,), dict(chance=lambda *_: 1 / 0))"})
    with patch.dict(METHODS), pytest.raises(ZeroDivisionError) as error:
        program(capsys, 'a', '--import', tmp_path / 'a.py', main=prove.main)
    assert error.value.__notes__[0].startswith('walk ')


def test_drafts_that_a_method_refuses_are_named(capsys):
    with patch.dict(METHODS, mine=METHODS['cmasd']):
        _, out, _ = program(capsys, 'mine tau_base=1', '--walks', 12, main=prove.main)
    assert 'not walked with drafts by look-up, else draft: ' in out and 'never met: a look-up' in out


def test_short_blocks_are_walked_longer():
    """In blocks of five and of ten, besides those of the knob."""
    proof = prove.Proof('sd', Exact(2), range(24))
    assert {block[0] for block in proof.met if isinstance(block, tuple)} >= {1, 2, 5, 10}


@pytest.mark.parametrize('named, flags', [
    ('nope', 'nope'), ('temperature: -1', 'sd --temperature -1'), ('rsd', 'rsd'), ('gamma', '"ar gamma=2"'),
    ('walks: 0', 'sd --walks 0')])
def test_prove_refuses_in_one_line(named, flags, capsys):
    refused(capsys, named, *shlex.split(flags), main=prove.main)
