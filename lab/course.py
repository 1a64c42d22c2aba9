"""Checks an answer to an exercise of course.md: `python -m lab.course NUMBER FILE`.

An answer is a Python file. What it says is compared with what the real loop does on tables of a few tokens,
where every draw is enumerated. A test that an answer brings along has to pass, and to fail as soon as what it
tests is broken. Exit status: 0 right, 1 wrong, 2 if there is nothing to check.
"""
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch

from lab.toys import Table, WrongResidual, enumerate_law, exact_law, network, session, variation, write
from model import KVCache, require_that
from specmini import Engine, exit_status, statistics
from verify import METHODS, Cycle, Exact, Score, decode, probs, read_prompt, residual

P = 0.5, 0.2, 0.2, 0.1      # the four tokens of exercises 1 and 2: the target's distribution
Q = 0.2, 0.5, 0.1, 0.2      # and the draft's
PROMPT = 'One evening Mia the fox went to the market with a map.'


class NotYet(Exception):
    """Why an answer is not right; the message is for whoever wrote it."""


def claim(holds, message):
    """NotYet with this message unless it holds."""
    if not holds:
        raise NotYet(message)


# ----------------------------------------------------------------------------- what the real loop does

class Same(Table):
    """A Table with the same distribution after every prefix."""

    def __init__(self, p):
        super().__init__(0, len(p))
        self.logits_of_all = torch.tensor(p, dtype=torch.float64).log()

    def row(self, prefix):
        return self.logits_of_all


def cycle_of(p, q, gamma, method=Exact):
    """(tokens of a cycle in expectation, its passes {reader/path: how many}) at distributions p and q."""
    passes = {}

    def run(s, method):
        read_prompt(s)
        cycle = next(decode(s, method))
        passes.update((name, count) for name, (count, *_) in cycle.passes.items())
        return cycle.tokens, None
    law = enumerate_law(Same(p), Same(q), method(gamma), gamma + 1, run=run, temperature=1.0)
    tokens = sum(len(text) * chance for text, chance in law.items())
    return tokens, passes


def first_token(target, draft, method, **settings):
    """The law [V] of the first token that the method writes, a list."""
    law = enumerate_law(target, draft, method, 2, **settings)
    found = [0.0] * target.vocab
    for (first, *_), chance in law.items():
        found[first] += chance
    return found


def close(found, wanted, within=1e-6):
    """Whether a number is there and near enough."""
    return isinstance(found, int | float) and abs(found - wanted) <= within


# --------------------------------------------------------------------------- what an answer consists of

def part(answer, name):
    """What the answer defines under this name; NotYet if it does not."""
    claim(name in answer, f'your file defines no {name}')
    return answer[name]


def entered(name, line):
    """The class that the answer's last line has put into METHODS."""
    claim(name in METHODS, f'{name} is not registered: end your file with {line}')
    return METHODS[name]


def error_line(error, path):
    """An exception in a line; before it the latest line of the file at path that it passed through."""
    what = f'{type(error).__name__}: {error}'           # of a SyntaxError the text has the line
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f'{path}, line {lines[-1]}: {what}' if lines else f'{path}: {what}'


def failure(test):
    """What a test fails with, an exception, or None if it passes."""
    try:
        test()
    except Exception as error:                          # whatever it is, pytest would call it a failure
        return error
    return None


def check_test(answer, name, mistakes):
    """NotYet unless the answer's test of this name passes, and fails under each mistake {what: patch}."""
    test = part(answer, name)
    error = failure(test)
    if error:
        raise NotYet(f'your {name} fails on your own code: {error_line(error, answer["__file__"])}')
    for what, mistake in mistakes.items():
        with mistake:
            error = failure(test)
        claim(error is not None, f'your {name} still passes if {what}: so it cannot tell')


# ---------------------------------------------------------------------------------------- the exercises

def check_1(answer):
    """The chance that a guess is kept, and the tokens of a cycle."""
    keep = part(answer, 'keep')
    tokens_a_cycle = part(answer, 'tokens_a_cycle')
    both, _ = cycle_of(P, Q, 1)                         # tokens of a cycle with one guess: 1 + keep
    claim(close(keep, both - 1), f'keep is {keep}: over all draws sd keeps this guess with another chance')
    for p, q in ((0.7, 0.4), (0.9, 0.6), (0.5, 0.5)):
        share = 1 - abs(p - q)
        for gamma in (1, 3):
            wanted, _ = cycle_of((p, 1 - p), (q, 1 - q), gamma)
            found = tokens_a_cycle(share, gamma)
            claim(close(found, wanted), f'tokens_a_cycle({share:g}, {gamma}) is {found}; '
                  f'sd writes {wanted:.4f}')
    _, cycles = Engine(max_new=60, temperature=1.0).generate(PROMPT, Exact(4))
    found = statistics(cycles)
    rate = found['acceptance_rate']
    print(f'a real run kept {rate:.0%} of its guesses, four a cycle: you predict '
          f'{tokens_a_cycle(rate, 4):.2f} tokens a cycle, it wrote {found["block_efficiency"]:.2f}')


def check_2(answer):
    """The law of sd that replaces a rejected guess by a sample of p."""
    broken = part(answer, 'Broken')
    off = part(answer, 'off')
    claim(not broken(1).lossless, 'Broken still promises to be lossless')
    law = first_token(Same(P), Same(Q), broken(1), temperature=1.0)
    kept = [min(p, q) for p, q in zip(P, Q)]
    for found, p, taken in zip(law, P, kept):
        wanted = taken + (1 - sum(kept)) * p
        claim(close(found, wanted), f'Broken writes a token with {found:.3f} where min(p, q) + (1 - keep) p '
              f'is {wanted:.3f}: override recovery_distribution, and only that')
    distance = sum(abs(found - p) for found, p in zip(law, P)) / 2
    claim(close(off, distance, 0.005), f'off is {off}: Broken writes a law that is at another distance')
    print('the law of your Broken, and p: ' + ', '.join(f'{found:.2f} ({p})' for found, p in zip(law, P)))


def check_3(answer):
    """Speed over plain decoding, and the best block length."""
    speed = part(answer, 'speed')
    best_gamma = part(answer, 'best_gamma')
    for p, q, cost in ((0.7, 0.4, 0.1), (0.9, 0.5, 0.5)):
        keep = 1 - abs(p - q)
        for gamma in (1, 3):
            tokens, passes = cycle_of((p, 1 - p), (q, 1 - q), gamma)
            wanted = tokens / (passes['target/full'] + cost * passes['draft/full'])
            found = speed(keep, gamma, cost)
            claim(close(found, wanted), f'speed({keep:.1f}, {gamma}, {cost}) is {found}; by the passes that '
                  f'sd took ({passes}) it is {wanted:.4f}')
    for keep in (0.3, 0.6, 0.8, 0.95):
        for cost in (0.02, 0.1, 0.3, 0.7):
            speeds = [speed(keep, gamma, cost) for gamma in range(17)]
            wanted = speeds.index(max(speeds))
            found = best_gamma(keep, cost)
            claim(found == wanted, f'best_gamma({keep}, {cost}) is {found}; of 0 to 16 it is {wanted}')


TRUSTED = KVCache.valid_prefix


def trusts_any_writer(cache, line, path):
    """KVCache.valid_prefix that does not ask who wrote a position."""
    n = min(len(cache.ids), len(line))
    while cache.ids[:n] != line[:n]:
        n -= 1
    return n


def check_4(answer):
    """What goes wrong where a cache trusts too much."""
    any_id = patch.object(KVCache, 'valid_prefix',
                          lambda cache, line, path: TRUSTED(cache, cache.ids[:len(line)], path))
    with any_id:
        law = enumerate_law(Table(1, 2), Table(2, 2), Exact(2), 4, temperature=1.0)
    notices = variation(law, exact_law(Table(1, 2), 4, temperature=1.0)) > 1e-9
    guessed = part(answer, 'sd_notices')
    claim(guessed is notices, f"sd_notices is {guessed}; enumerated, the law of sd's texts says otherwise")
    check_test(answer, 'test_ids', {'ids are not compared': any_id})
    any_writer = patch.object(KVCache, 'valid_prefix', trusts_any_writer)
    check_test(answer, 'test_writers', {'nobody asks who wrote a position': any_writer})


def told_only(kind, good):
    """A method of this kind that learns from blocks that were kept whole alone, or only from the others."""
    learn = kind.learn

    def half_deaf(self, cycle):
        if (cycle.accepted == len(cycle.drafted)) == good:
            learn(self, cycle)
    return patch.object(kind, 'learn', half_deaf)


def check_5(answer):
    """Blocks that double and halve."""
    kind = entered('doubling', 'METHODS.update(doubling=Doubling)')
    claim(kind(2).lossless, 'its rule is that of sd: it may promise to be lossless')
    s = session(Table(1, 2), Table(2, 2), [0], 40)
    method = kind(2)
    wanted = 2
    for whole in (True, True, True, True, False, False, False, False, False, None, True):
        n = len(method.propose(s).tokens)
        claim(n == wanted, f'a block of {n} where one of {wanted} is due')
        if whole is None:                               # no room is left to draft
            drafted, labels = [], ['target']
        else:
            drafted = [0] * n
            labels = ['draft'] * n + ['bonus'] if whole else ['draft'] * (n - 1) + ['target']
            wanted = min(16, 2 * n) if whole else max(1, n // 2)
        method.learn(Cycle(drafted, [], [0] * len(labels), labels, {}, 0.0))
    wrong_residual = patch.object(Exact, 'recovery_distribution', WrongResidual.recovery_distribution)
    check_test(answer, 'test_doubling', {'no block is ever doubled': told_only(kind, False),
                                         'the residual is wrong': wrong_residual,
                                         'no block is ever halved': told_only(kind, True)})


def check_6(answer):
    """A rule that keeps what is among the target's k likeliest."""
    kind = entered('likeliest', 'METHODS.update(likeliest=Likeliest)')
    for k in (1, 2, 4):
        claim(not kind(k=k).lossless, f'at k={k} it promises to be lossless; above temperature 0 it is not')
    target, draft = Table(1), Table(2)
    logits = target.row((0,))
    q = probs(draft.row((0,)))
    for k in (1, 2, 3):
        inside = logits >= logits.topk(k).values[-1]
        for temperature in (1.0, 0.0):
            p, kept = probs(logits, temperature), q * inside
            wanted = kept + (1 - kept.sum()) * residual(p, q)       # the law [V] of its first token
            method = kind(gamma=1, draft_temperature=1.0, k=k)
            found = first_token(target, draft, method, temperature=temperature)
            gap = float((torch.tensor(found, dtype=wanted.dtype) - wanted).abs().sum()) / 2
            claim(gap < 1e-9, f'k={k}, temperature {temperature}: its first token is {gap:.3f} away from '
                  'the law of the rule (k likeliest by the raw logits, the rest replaced as in sd)')
    anything = patch.object(kind, 'chance', lambda self, score, i: 1.0)
    check_test(answer, 'test_likeliest', {'every guess is kept': anything})


def check_7(answer):
    """A path of the target's first layers, and the method that drafts on it."""
    kind = entered('early', 'METHODS.update(early=Early)')
    claim(kind(2).lossless, 'it drafts, and sd verifies: it may promise to be lossless')
    s = session(network(0, num_hidden_layers=4), None, [1, 2, 3], 20)
    write(s, kind(2, depth=0.5))
    paths = {path.name: set(path.skip) for path, *_ in s.target.log}
    shallow = {4, 5, 6, 7}
    claim(shallow in paths.values(), f'of 4 layers depth=0.5 leaves out sublayers {sorted(shallow)}; '
          f'yours: {paths}')

    def lazy(self, session, draft):
        return Score(session, draft, session.target.model.full.without([1]))
    check_test(answer, 'test_early', {'the early path verifies, too': patch.object(kind, 'score', lazy)})


EXERCISES = dict(enumerate([check_1, check_2, check_3, check_4, check_5, check_6, check_7], 1))


# ------------------------------------------------------------------------------------- the command line

def check(number, text, path='answer'):
    """None if this answer, the text of a Python file, is right, else why not."""
    answer = dict(__name__='answer', __file__=path)
    with patch.dict(METHODS):                           # what it registers ends with the check
        try:
            exec(compile(text, path, 'exec'), answer)
            EXERCISES[number](answer)
        except NotYet as error:
            return str(error)
        except Exception as error:                      # of the answer's own code
            return error_line(error, path)
    return None


def run(argv):
    """The exit status of `lab.course NUMBER FILE`."""
    require_that(len(argv) == 2, 'expected NUMBER FILE, say 1 answer.py; the exercises are in lab/course.md')
    number, path = argv
    require_that(number in map(str, EXERCISES), f'exercise {number}: expected 1 to {len(EXERCISES)}')
    reason = check(int(number), Path(path).read_text(encoding='utf-8', errors='replace'), path)
    print(f'exercise {number}: not yet: {reason}' if reason else f'exercise {number}: right')
    return int(reason is not None)


def main(argv=None):
    return exit_status('lab.course', lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == '__main__':
    sys.exit(main())
