"""Checks an answer to an exercise of course.md: `python -m lab.course NUMBER FILE`.

What an answer says is compared with what the real loop does on tables of a few tokens, where every draw is
enumerated. A test that it brings along has to pass, and to fail as soon as what it tests is broken. Exit
status: 0 right, 1 not yet, 2 if there is nothing to check; an error of the answer's own has its traceback.
"""
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch

from lab.toys import Table, WrongResidual, enumerate_law, exact_law, network, session, variation, write
from model import KVCache, require_that
from specmini import Engine, exit_status, statistics
from verify import METHODS, Cycle, Exact, Score, probs, residual

P = 0.5, 0.2, 0.2, 0.1      # the four tokens of exercises 1 and 2: the target's distribution
Q = 0.2, 0.5, 0.1, 0.2      # and the draft's
PROMPT = 'One evening Mia the fox went to the market with a map.'


def claim(holds, message):
    """AssertionError, for whoever wrote the answer, unless it holds."""
    if not holds:
        raise AssertionError(message)


# ---------------------------------------------------------------------------------- what the real loop does

class Same(Table):
    """A Table with the same distribution after every prefix."""

    def __init__(self, p):
        super().__init__(0, len(p))
        self.logits_of_all = torch.tensor(p, dtype=torch.float64).log()

    def row(self, prefix):
        return self.logits_of_all


def sd_cycle(keep, gamma):
    """(tokens in expectation, passes {reader/path: row}) of a cycle that keeps guesses with this chance."""
    passes = {}

    def run(s, method):
        tokens, cycles = write(s, method, most=1)
        passes.update(cycles[0].passes)
        return tokens, cycles
    target = Same((1 - keep / 2, keep / 2))             # the sum of min(p, q) is keep
    draft = Same((keep / 2, 1 - keep / 2))
    law = enumerate_law(target, draft, Exact(gamma), gamma + 1, run=run, temperature=1.0)
    return sum(len(text) * chance for text, chance in law.items()), passes


def first_token(target, draft, method, **settings):
    """The law [V] of the first token that the method writes."""
    found = torch.zeros(target.vocab, dtype=torch.float64)
    for (first, *_), chance in enumerate_law(target, draft, method, 2, **settings).items():
        found[first] += chance
    return found


def check_test(test, mistakes):
    """AssertionError unless the answer's test passes, and fails under each mistake {what: patch}."""
    name = test.__name__
    try:
        test()
    except AssertionError as error:
        claim(False, f'your {name} fails on your own code: {error}')
    for what, mistake in mistakes.items():
        try:
            with mistake:
                test()
        except Exception:                               # whatever it is, pytest would call it a failure
            continue
        claim(False, f'your {name} still passes if {what}: so it cannot tell')


# ------------------------------------------------------------------------------ the exercises

def check_1(answer):
    """The chance that a guess is kept, and the tokens of a cycle."""
    wanted = sum(map(min, P, Q))
    claim(abs(answer.keep - wanted) < 1e-6, f'keep is {answer.keep}: sd has another chance')
    for keep, gamma in ((0.7, 1), (0.7, 3), (1.0, 3)):
        found = answer.tokens_a_cycle(keep, gamma)
        wanted, _ = sd_cycle(keep, gamma)
        claim(abs(found - wanted) < 1e-6,
              f'tokens_a_cycle({keep}, {gamma}) is {found}; sd writes {wanted:.4f}')
    stats = statistics(Engine(max_new=60, temperature=1.0).generate(PROMPT, Exact(4))[1])
    rate = stats['acceptance_rate']
    print(f'a real run kept {rate:.0%} of its guesses, four a cycle: you predict '
          f'{answer.tokens_a_cycle(rate, 4):.2f} tokens a cycle, it wrote {stats["block_efficiency"]:.2f}')


def check_2(answer):
    """The law of sd that replaces a rejected guess by a sample of p."""
    claim(not answer.Broken(1).lossless, 'Broken still promises to be lossless')
    p, q = torch.tensor(P).double(), torch.tensor(Q).double()
    law = first_token(Same(P), Same(Q), answer.Broken(1), temperature=1.0)
    wanted = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * p
    claim(torch.allclose(law, wanted), f'Broken writes {law.tolist()}; min(p, q) + (1 - keep) p is '
          f'{wanted.tolist()}: override recovery_distribution, and only that')
    off = (law - p).abs().sum() / 2
    claim(abs(answer.off - off) < 0.005, f'off is {answer.off}: the law of Broken is at another distance')


def check_3(answer):
    """Speed over plain decoding, and the best block length."""
    for keep, gamma, cost in ((0.7, 1, 0.1), (0.7, 3, 0.1), (0.6, 3, 0.5)):
        tokens, passes = sd_cycle(keep, gamma)
        wanted = tokens / (passes['target/full'][0] + cost * passes['draft/full'][0])
        found = answer.speed(keep, gamma, cost)
        claim(abs(found - wanted) < 1e-6, f'speed({keep}, {gamma}, {cost}) is {found}; by the passes that sd '
              f'took ({passes}) it is {wanted:.4f}')
    for keep, cost in ((0.3, 0.7), (0.6, 0.3), (0.8, 0.1), (0.95, 0.02)):
        wanted = max(range(17), key=lambda gamma: answer.speed(keep, gamma, cost))
        found = answer.best_gamma(keep, cost)
        claim(found == wanted, f'best_gamma({keep}, {cost}) is {found}; of 0 to 16 it is {wanted}')


def check_4(answer):
    """What goes wrong where a cache trusts too much."""
    trusted = KVCache.valid_prefix

    def any_id(cache, line, path):
        return trusted(cache, cache.ids[:len(line)], path)

    def any_writer(cache, line, path):
        n = min(len(cache.ids), len(line))
        return next((i for i in range(n) if cache.ids[i] != line[i]), n)
    with patch.object(KVCache, 'valid_prefix', any_id):
        law = enumerate_law(Table(1, 2), Table(2, 2), Exact(2), 4, temperature=1.0)
    notices = variation(law, exact_law(Table(1, 2), 4, temperature=1.0)) > 1e-9
    claim(answer.sd_notices is notices,
          f"sd_notices is {answer.sd_notices}; the law of sd's texts says otherwise")
    check_test(answer.test_ids, {'ids are not compared': patch.object(KVCache, 'valid_prefix', any_id)})
    check_test(answer.test_writers,
               {'nobody asks who wrote a position': patch.object(KVCache, 'valid_prefix', any_writer)})


def check_5(answer):
    """Blocks that double and halve."""
    kind = METHODS['doubling']
    claim(kind(2).lossless, 'its rule is that of sd: it may promise to be lossless')
    s, method, due = session(Table(1, 2), Table(2, 2), [0], 40), kind(2), 2
    for whole in (True, True, True, True, False, False, False, False, False, None, True):
        n = len(method.propose(s).tokens)
        claim(n == due, f'a block of {n} where one of {due} is due')
        drafted, labels = [0] * n, ['draft'] * n + ['bonus']
        if whole is None:                               # no room is left to draft
            drafted, labels = [], ['target']
        elif not whole:
            labels = ['draft'] * (n - 1) + ['target']
        due = due if whole is None else min(16, 2 * n) if whole else max(1, n // 2)
        method.learn(Cycle(drafted, [], [0] * len(labels), labels, {}, 0.0))
    learn = kind.learn

    def deaf_to(good):
        """A `learn` that does not hear of blocks that were kept whole, or only of these."""
        return patch.object(kind, 'learn', lambda self, cycle: (
            None if (cycle.accepted == len(cycle.drafted)) == good else learn(self, cycle)))
    wrong = patch.object(Exact, 'recovery_distribution', WrongResidual.recovery_distribution)
    check_test(answer.test_doubling,
               {'no block is ever doubled': deaf_to(True), 'no block is ever halved': deaf_to(False),
                'the residual is wrong': wrong})


def check_6(answer):
    """A rule that keeps what is among the target's k likeliest."""
    kind = METHODS['likeliest']
    target, draft = Table(1), Table(2)
    logits, q = target.row((0,)), probs(draft.row((0,)))
    for k in (1, 2, 3):
        claim(not kind(k=k).lossless, f'at k={k} it promises to be lossless; above temperature 0 it is not')
        for temperature in (1.0, 0.0):
            p, kept = probs(logits, temperature), q * (logits >= logits.topk(k).values[-1])
            wanted = kept + (1 - kept.sum()) * residual(p, q)           # the law [V] of its first token
            method = kind(gamma=1, draft_temperature=1.0, k=k)
            found = first_token(target, draft, method, temperature=temperature)
            claim(torch.allclose(found, wanted.double()),
                  f'k={k}, temperature {temperature}: its first token has the law {found.tolist()}, not '
                  f'{wanted.tolist()} (k likeliest by raw logits, the rest as in sd)')
    check_test(answer.test_likeliest,
               {'every guess is kept': patch.object(kind, 'chance', lambda self, score, i: 1.0)})


def check_7(answer):
    """A path of the target's first layers, and the method that drafts on it."""
    kind = METHODS['early']
    claim(kind(2).lossless, 'it drafts, and sd verifies: it may promise to be lossless')
    s = session(network(0, num_hidden_layers=4), None, [1, 2, 3], 20)
    write(s, kind(2, depth=0.5))
    skips = [set(path.skip) for path, _ in s.target.log]
    claim({4, 5, 6, 7} in skips, f'of 4 layers depth=0.5 leaves out sublayers 4 to 7; yours: {skips}')

    def lazy(self, session, draft):
        return Score(session, draft, session.target.model.full.without([1]))
    check_test(answer.test_early, {'the early path verifies, too': patch.object(kind, 'score', lazy)})


EXERCISES = {           # number: the check, the names that an answer defines, the method that it enters
    '1': (check_1, 'keep tokens_a_cycle', ''), '2': (check_2, 'Broken off', ''),
    '3': (check_3, 'speed best_gamma', ''), '4': (check_4, 'sd_notices test_ids test_writers', ''),
    '5': (check_5, 'test_doubling', 'doubling'), '6': (check_6, 'test_likeliest', 'likeliest'),
    '7': (check_7, 'test_early', 'early')}


def check(number, path):
    """None if the answer in this file is right, else why not; what it enters in METHODS is forgotten."""
    work, names, method = EXERCISES[number]
    with patch.dict(METHODS):
        answer = runpy.run_path(path)
        try:
            for name in names.split():
                claim(name in answer, f'your file defines no {name}')
            claim(not method or method in METHODS, f'your file does not enter {method} in METHODS')
            work(SimpleNamespace(**answer))
        except AssertionError as error:
            return str(error)
    return None


def run(argv):
    """The exit status of `lab.course NUMBER FILE`."""
    require_that(len(argv) == 2 and argv[0] in EXERCISES,
                 f'found {argv}; expected NUMBER FILE, say 1 answer.py; lab/course.md has exercises 1 to 7')
    reason = check(*argv)
    print(f'exercise {argv[0]}: ' + (f'not yet: {reason}' if reason else 'right'))
    return int(reason is not None)


def main():
    return exit_status('lab.course', lambda: run(sys.argv[1:]))


if __name__ == '__main__':
    sys.exit(main())
