"""A cache: whatever is done to it, in any order, and wherever Ctrl-C comes."""
import itertools
import random
import sys
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import stateful
from hypothesis import strategies as some

import verify
from lab.baselines import DraftVerify
from lab.tests.helpers import LEARNED, LINE, MIXED_TWO, SMALL, case, full_session
from lab.toys import apart, fresh, network, session
from model import KVCache, Reader
from verify import (Autoregressive, EcsvSpot, Exact, Sparse, SpecGuard, ViaSd, decode, draft_model,
                    read_prompt, sample_branches)

CACHE_CODE = {KVCache.record.__code__.co_filename}
BOOKS = {'read', 'record', 'average'}                   # functions that keep a cache's books,
PASSES = BOOKS | {'append', 'feed', 'fork', 'pass_info', 'copy_of', 'forward'}       # those that fill it too,
DECODING = PASSES - {'forward'} | {verify.__file__}     # and the loop with its verbs, all of one file


def interrupted(n, function, places):
    """(what the function returns, whether Ctrl-C came): ahead of the n-th line of these places; 0: never."""
    if n < 1:
        return function(), False
    left = n

    def trace(frame, event, arg):
        nonlocal left
        code = frame.f_code
        named = code.co_filename in CACHE_CODE and code.co_name in places
        if not named and code.co_filename not in places:
            return None
        left -= event == 'line'
        if left < 1:
            left = inf
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


READS_FROM = {      # by the design: a path may read the keys that these paths have written
    'full': {'full'}, 'slim': {'full', 'slim'}, 'other slim': {'full', 'other slim'},
    'sparse': {'full', 'sparse'}, 'sparse slim': {'full', 'sparse', 'sparse slim'}}
IDS = some.lists(some.integers(0, 10), max_size=6)
PATHS = some.sampled_from(sorted(READS_FROM))
MOMENTS = some.integers(-100, 100)          # lines; from 1 on, something is interrupted there


class CacheMachine(stateful.RuleBasedStateMachine):
    """Everything that is done to a cache, in any order: its logits are a fresh one's, or it was interrupted.

    `held` models it: of each position the token, the path that wrote it, and where that pass began.
    The model knows READS_FROM, and nothing of how the cache keeps its books.
    """
    network = network(**MIXED_TWO)

    def __init__(self):
        super().__init__()
        model = self.network
        slim = model.full.without({1})
        choices = Sparse(dense_below=2, block=2, locals=1, ffn_quantile=1.0, moe_quantile=1.0)
        learned = {name: tables[:2] for name, tables in LEARNED.items()}         # of two layers
        s = session(model, None, [0], 1, sparse=choices, calibration=dict(sparse=learned))
        self.paths = {'full': model.full, 'slim': slim, 'other slim': model.full.without({2}),
                      'sparse': s.target_path(), 'sparse slim': s.target_path(slim)}
        self.reader = Reader(model, 40)
        self.line = [1]
        self.places = PASSES    # where moments are counted
        self.held = []

    def after_read(self, name, last):
        """(models of the cache before, in and after a read of the line; the position where it begins)."""
        valid = 0
        for token, (known, writer, _) in zip(self.line, self.held):
            if token != known or writer not in READS_FROM[name]:
                break
            valid += 1
        start = min(valid, len(self.line) - last)
        cut = self.held[:start]
        return [self.held, cut, cut + [(token, name, start) for token in self.line[start:]]], start

    def attempt(self, moment, models, function):
        """What the function returns, or None if interrupted. `held` becomes the model that fits."""
        passes = len(self.reader.log)
        result, self.broken = interrupted(moment, function, self.places)
        believed = list(zip(self.reader.cache.ids, self.reader.cache.writers))
        fitting = [held for held in models if believed == [
            (token, self.paths[name].written_as) for token, name, _ in held]]
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

    def right_after(self, rows, held, name, ids):
        """Asserts that these are the logits of a rollout after what is held."""
        reader = self.fresh_reader(held)
        begin = held[-1][2]
        last = torch.tensor([[token for token, *_ in held[begin:]]])
        wanted = [reader.feed(last, begin, self.paths[name], 1)]
        for position, token in enumerate(ids[:-1], len(held)):
            wanted.append(reader.feed(torch.tensor([[token]]), position, self.paths[name], 1))
        assert apart(rows, torch.cat(wanted, 1)[0]) < 1e-9

    @stateful.rule(cut=some.integers(0, 30), more=IDS, name=PATHS, last=some.integers(0, 4), moment=MOMENTS)
    def read(self, cut, more, name, last, moment):
        """The text becomes a shorter or a longer one and is read on any path."""
        self.line = (self.line[:max(1, len(self.line) - cut)] + more)[:30]
        line, path = self.line, self.paths[name]
        last = min(last, len(line))
        models, start = self.after_read(name, last)
        logits = self.attempt(moment, models, lambda: self.reader.read(line, path, last))
        if logits is not None:
            other = self.fresh_reader(self.held[:start])
            wanted = other.feed(torch.tensor([line[start:]]), start, path, last)
            assert apart(logits, wanted[0]) < 1e-9
            assert name != 'full' or apart(logits, fresh(self.reader.model, line, last)) < 1e-9

    @stateful.rule(name=PATHS, rows=some.lists(some.lists(some.integers(0, 10), min_size=3, max_size=3),
                                               min_size=1, max_size=3), moment=MOMENTS)
    def draft(self, name, rows, moment):
        """One rollout is recorded in the cache, but for its last token; several go to a fork."""
        path = self.paths[name]
        columns = [torch.tensor(column) for column in zip(*rows)]
        s = SimpleNamespace(tokens=self.line, eos=frozenset(), draw=lambda q: columns.pop(0),
                            probs=lambda logits, *_: logits.softmax(-1))
        models, _ = self.after_read(name, 1)
        read = models[-1]
        if len(rows) == 1:
            models.append(read + [(token, name, len(self.line) + i) for i, token in enumerate(rows[0][:-1])])
            found = self.attempt(moment, models, lambda: draft_model(s, 3, Exact(), self.reader, path))
            every = [found.logits] if found else []
        else:
            found = self.attempt(
                moment, models, lambda: sample_branches(s, self.reader, path, len(rows), 3, s.probs))
            every = found.logits if found else []
        for ids, logits in zip(rows, every):
            self.right_after(logits, read, name, ids)

    @stateful.rule()
    def forget(self):
        self.reader.forget()
        self.held = []


@pytest.mark.slow
def test_whatever_is_done_to_a_cache():
    """30 lives of up to 20 events each. To search longer, raise max_examples and set derandomize=False."""
    lives = hypothesis.settings(
        derandomize=True, database=None, deadline=None, max_examples=30, stateful_step_count=20,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate])
    stateful.run_state_machine_as_test(CacheMachine, settings=lives)


@pytest.mark.parametrize('event', [
    case('read', lambda life, n: life.read(0, [1, 2], 'slim', 5, n)),
    case('draft', lambda life, n: life.draft('sparse', [[1, 2, 3]], n), slow=True)])
def test_a_cache_that_is_interrupted_anywhere(event):
    """Ctrl-C comes before each line in turn that keeps its books; what is read next is right all the same."""
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


@pytest.mark.parametrize('method, settings', [      # methods whose greedy text depends on no draw
    case('ar', Autoregressive(), {}),
    case('sd-eos', Exact(3), dict(eos=frozenset([8]))),
    case('draft-verify', DraftVerify(3), dict(drafter=None)),
    case('ecsv-spot', EcsvSpot(3, draft_temperature=0.0, by='entropy', budget=3), {}),
    case('via', ViaSd(3, max_lag=3), {}),
    case('specguard', SpecGuard(2, k=1, draft_temperature=0.0, tau=0.72, max_step=4), {}),
    case('sparse', Exact(3), dict(sparse=Sparse(**SMALL, rho=0.2)))])
def test_a_text_that_is_broken_off_anywhere_goes_on(method, settings):
    """Wherever Ctrl-C comes, and however often, the text is the same."""
    whole = full_session(12, **settings)
    read_prompt(whole)
    list(decode(whole, replace(method)))
    s = full_session(12, **settings)
    read_prompt(s)
    own = replace(method)
    rng = random.Random(1)
    breaks = 0
    while s.tokens_left and not s.ended:
        moment = rng.randint(1, 300 + 100 * breaks)             # later and later: a cycle has to fit in
        _, broken = interrupted(moment, lambda: list(decode(s, own)), DECODING)
        breaks += broken
    assert s.tokens == whole.tokens and s.tokens_left == whole.tokens_left and s.ended == whole.ended
    assert breaks > 3
