"""Checks an answer to an exercise of course.md: `python -m lab.course NUMBER FILE`.

What an answer says is compared with what the real loop does on tables of a few tokens, where every draw is
enumerated. A test that it brings along has to pass, and to fail as soon as what it tests is broken. Exit
status: 0 right, 1 not yet, 2 if there is nothing to check; an error of the answer's own has its traceback.
"""
import inspect
import runpy
import sys
from functools import partial
from unittest.mock import patch

import torch

from lab.prove import SAME, gap, next_cycle
from lab.shipped import RawQ, ReplacedByP
from lab.toys import Table, apart, enumerate_law, exact_law, fresh, network, session, variation, write
from model import KVCache, require_that, shared_length
from specmini import exit_status
from verify import METHODS, Cycle, Exact, Score, Session, decode, probs, read_prompt, residual

P = 0.5, 0.2, 0.2, 0.1      # the four tokens of exercises 1 and 2: the target's distribution
Q = 0.2, 0.5, 0.1, 0.2      # and the draft's


def same(*p):
    """A Table with this distribution after every prefix."""
    table = Table(0, len(p))
    table.row = lambda prefix: torch.tensor(p, dtype=torch.float64).log()
    return table


def sd_tokens(keep, gamma):
    """The tokens in expectation of a cycle of sd that keeps guesses with this chance."""
    target, draft = same(1 - keep / 2, keep / 2), same(keep / 2, 1 - keep / 2)     # sum of min(p, q) is keep
    one_cycle = partial(write, most=1)
    law = enumerate_law(target, draft, Exact(gamma), gamma + 1, run=one_cycle, temperature=1.0)
    return sum(len(text) * chance for text, chance in law.items())


def first_token(target, draft, method, temperature=1.0):
    """The law [V] of the first token that the method writes."""
    found = torch.zeros(target.vocab, dtype=torch.float64)
    for (first, *_), chance in enumerate_law(target, draft, method, 2, temperature=temperature).items():
        found[first] += chance
    return found


def check_test(test, what, *mistake):
    """AssertionError unless the test passes, and fails under a mistake (arguments of patch.object)."""
    test()
    try:
        with patch.object(*mistake):
            test()
    except Exception:                                   # whatever it is, pytest would call it a failure
        return
    raise AssertionError(f'your {test.__name__} still passes if {what}: so it cannot tell')


def entered(name):
    """The class of a method that the answer enters."""
    assert name in METHODS, f'your file does not enter {name} in METHODS'
    return METHODS[name]


# -------------------------------------------------- the exercises; their arguments are what an answer defines

def check_1(keep, tokens_a_cycle):
    """The chance that a guess is kept, and the tokens of a cycle."""
    assert abs(keep - sum(map(min, P, Q))) < 1e-6, f'keep is {keep}: sd has another chance'
    for chance, gamma in ((0.7, 1), (0.7, 3), (1.0, 3)):
        found, wanted = tokens_a_cycle(chance, gamma), sd_tokens(chance, gamma)
        assert abs(found - wanted) < 1e-6, f'tokens_a_cycle({chance}, {gamma}) is {found}, not {wanted:.4f}'


def check_2(Broken, off):
    """The law of sd that replaces a rejected guess by a sample of p."""
    assert not Broken(1).lossless, 'Broken still promises to be lossless'
    p, q = torch.tensor(P).double(), torch.tensor(Q).double()
    law = first_token(same(*P), same(*Q), Broken(1))
    wanted = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * p
    assert torch.allclose(law, wanted), f'Broken writes {law.tolist()}: override recovery_distribution alone'
    distance = (law - p).abs().sum() / 2
    assert abs(off - distance) < 0.005, f'off is {off}: the law of Broken is at another distance'


def check_3(speed, best_gamma):
    """Speed over plain decoding, and the best block length."""
    for keep, gamma, cost in ((0.7, 1, 0.1), (0.7, 3, 0.1), (0.6, 3, 0.5)):
        found, wanted = speed(keep, gamma, cost), sd_tokens(keep, gamma) / (1 + gamma * cost)
        assert abs(found - wanted) < 1e-6, f'speed({keep}, {gamma}, {cost}) is {found}, not {wanted:.4f}'
    for keep, cost in ((0.3, 0.7), (0.6, 0.3), (0.8, 0.1), (0.95, 0.02)):
        found, wanted = best_gamma(keep, cost), max(range(17), key=lambda gamma: speed(keep, gamma, cost))
        assert found == wanted, f'best_gamma({keep}, {cost}) is {found}; of 0 to 16 it is {wanted}'


def check_4(sd_notices, test_ids, test_writers):
    """What goes wrong where a cache trusts too much."""
    trusted = KVCache.valid_prefix
    any_id = lambda cache, line, path: trusted(cache, cache.ids[:len(line)], path)
    any_writer = lambda cache, line, path: shared_length(line, cache.ids)
    with patch.object(KVCache, 'valid_prefix', any_id):
        law = enumerate_law(Table(1, 2), Table(2, 2), Exact(2), 4, temperature=1.0)
    notices = variation(law, exact_law(Table(1, 2), 4, temperature=1.0)) > 1e-9
    assert sd_notices is notices, f"sd_notices is {sd_notices}; the law of sd's texts says otherwise"
    check_test(test_ids, 'ids are not compared', KVCache, 'valid_prefix', any_id)
    check_test(test_writers, 'nobody asks who wrote a position', KVCache, 'valid_prefix', any_writer)


def check_5(test_doubling):
    """Blocks that double and halve."""
    kind = entered('doubling')
    assert kind(2).lossless, 'its rule is that of sd: it may promise to be lossless'
    s, method = session(Table(1, 2), Table(2, 2), [0], 40), kind(2)
    for drafted, accepted, due in ((2, 2, 4), (4, 4, 8), (8, 8, 16), (16, 16, 16), (16, 15, 8), (8, 7, 4),
                                   (4, 3, 2), (2, 1, 1), (1, 0, 1), (0, 0, 1), (1, 1, 2)):
        labels = ['draft'] * accepted + ['bonus' if 0 < accepted == drafted else 'target']
        method.learn(Cycle([0] * drafted, [], [0] * len(labels), labels, {}, 0.0))
        n = len(method.propose(s).tokens)
        assert n == due, f'after {accepted} of {drafted} were kept: a block of {n} where one of {due} is due'
    learn = kind.learn
    deaf = lambda self, cycle: cycle.accepted < len(cycle.drafted) or learn(self, cycle)
    check_test(test_doubling, 'no block is ever halved', kind, 'learn', deaf)
    check_test(test_doubling, 'the residual is wrong', Exact, 'recovery_distribution',
               ReplacedByP.recovery_distribution)


def check_6(test_likeliest):
    """A rule that keeps what is among the target's k likeliest."""
    kind = entered('likeliest')
    target, draft = Table(1), Table(2)
    logits, q = target.row((0,)), probs(draft.row((0,)))
    for k in (1, 2, 3):
        assert not kind(k=k).lossless, f'at k={k} it promises to be lossless; above temperature 0 it is not'
        for temperature in (1.0, 0.0):
            p, kept = probs(logits, temperature), q * (logits >= logits.topk(k).values[-1])
            wanted = (kept + (1 - kept.sum()) * residual(p, q)).double()        # the law of its first token
            found = first_token(target, draft, kind(gamma=1, draft_temperature=1.0, k=k), temperature)
            assert torch.allclose(found, wanted), (
                f'k={k}, temperature {temperature}: its first token has the law {found.tolist()}, not '
                f'{wanted.tolist()} (k likeliest by raw logits, the rest as in sd)')
    check_test(test_likeliest, 'every guess is kept', kind, 'chance', lambda *_: 1.0)


def check_7(test_early):
    """A path of the target's first layers, and the method that drafts on it."""
    kind = entered('early')
    assert kind(2).lossless, 'it drafts, and sd verifies: it may say lossless = True'
    s = session(network(0, num_hidden_layers=4), None, [1, 2, 3], 20)
    write(s, kind(2, depth=0.5))
    skips = [set(path.skip) for path, _ in s.target.log]
    assert {4, 5, 6, 7} in skips, f'of 4 layers depth=0.5 leaves out sublayers 4 to 7; yours: {skips}'
    lazy = lambda self, session, draft: Score(session, draft, session.target.model.full.without([1]))
    check_test(test_early, 'the early path verifies, too', kind, 'score', lazy)


def check_8(test_two):
    """Two guesses for one position, judged by one pass over a tree."""
    kind = entered('two')
    assert kind().lossless, 'it may promise to be lossless: say so, because accept is overridden'
    target, draft = Table(1), Table(2)
    p, q = (probs(model.row((0,))).double() for model in (target, draft))
    rejected = 1 - torch.minimum(p, q).sum()
    rejected *= 1 - torch.minimum(residual(p, q), q).sum()
    one_cycle = partial(write, most=1)
    texts = enumerate_law(target, draft, kind(), 4, run=one_cycle, temperature=1.0)
    found = sum(chance for text, chance in texts.items() if len(text) == 1)
    assert abs(found - rejected) < 1e-6, (
        f'both guesses are rejected with the chance {found:.4f}, not {rejected:.4f}: a cycle then writes '
        'one token, else two; the second guess is kept with min(1, p2(x) / q(x)), p2 the residual')
    s = session(target, draft, [0], 9, temperature=1.0)
    _, cycles = write(s, kind())
    passes = [cycle.passes.get('target/full', [0])[0] for cycle in cycles]
    assert set(passes) == {1}, f'the target passes of its cycles are {passes}; one tree is one pass'
    cached = s.target.read(s.tokens, s.target.model.full, 1)
    assert apart(cached, fresh(target, s.tokens, 1)) < 1e-9, 'the cache does not hold the text that it wrote'
    check_test(test_two, 'every guess is kept', Session, 'flip', lambda *_: True)


def check_9(Hidden):
    """A rule that is wrong only after a block that was kept whole."""
    kind = entered('hidden')
    assert kind().lossless, 'it has to promise what it does not keep: lossless = True'
    law = enumerate_law(Table(1, 2), Table(2, 2), kind(2), 3, temperature=1.0)
    first = variation(law, exact_law(Table(1, 2), 3, temperature=1.0))
    assert first < 1e-9, f'its first blocks are wrong already: texts of three tokens are {first:.3g} off'
    off = dict(lost=0.0, whole=0.0)                     # by what the block before was
    for seed in range(12):
        s, method = session(Table(1, 2), Table(2, 2), [0], 30, seed=seed, temperature=1.0), kind(2)
        read_prompt(s)
        before = 'lost'                                 # there is none: it has to be exact, too
        for _ in range(6):
            off[before] = max(off[before], gap(next_cycle(s, method, 3)[0], s))
            cycle = next(decode(s, method))
            before = 'whole' if 0 < len(cycle.drafted) == cycle.accepted else 'lost'
    assert off['lost'] < 1e-9, f'after a block that lost a guess it is off by {off["lost"]:.3g}, not exact'
    assert off['whole'] > SAME, 'after a block that was kept whole it is exact: there it has to err'


def check_10(Mended):
    """A mend of RawQ that keeps its q."""
    assert issubclass(Mended, RawQ) and Mended.guess is RawQ.guess, 'Mended has to take q as RawQ does'
    changed = {'propose', 'chance', 'recovery_distribution', 'score', 'accept'} & vars(Mended).keys()
    assert not changed, f'it changes {changed}: leave the rule as it is, and change how guesses are drawn'
    for sampling in dict(temperature=0.7), dict(temperature=1.0, top_k=2), dict(temperature=1.5, top_p=0.8):
        law = enumerate_law(Table(1), Table(2), Mended(2), 3, **sampling)
        off = variation(law, exact_law(Table(1), 3, **sampling))
        assert off < SAME, f'with {sampling} its texts are off by {off:.3g}: guesses are not drawn from q'


CHECKS = {f.__name__.split('_')[1]: f for f in (
    check_1, check_2, check_3, check_4, check_5, check_6, check_7, check_8, check_9, check_10)}


def run():
    """The exit status; what the answer enters in METHODS is forgotten."""
    argv = sys.argv[1:]
    require_that(__debug__, 'its checks are asserts, which -O leaves out; run it without')
    require_that(len(argv) == 2 and argv[0] in CHECKS,
                 f'found {argv}; expected NUMBER FILE, say 1 answer.py; lab/course.md has exercises 1 to 10')
    number, path = argv
    names = inspect.signature(CHECKS[number]).parameters
    reason = None
    with patch.dict(METHODS):
        answer = runpy.run_path(path)
        try:
            for name in names:
                assert name in answer, f'your file defines no {name}'
            CHECKS[number](*[answer[name] for name in names])
        except AssertionError as error:
            reason = str(error) or 'your test fails on your own code'
    print(f'exercise {number}:', f'not yet: {reason}' if reason else 'right')
    return int(reason is not None)


main = partial(exit_status, 'lab.course', run)

if __name__ == '__main__':
    sys.exit(main())
