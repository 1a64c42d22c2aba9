"""How proposed tokens are verified: maths, nouns, the loop, exact speculative decoding, the five methods.

propose -> score -> accept -> commit is one cycle, and `decode` is the loop. A method is a dataclass whose
fields are its knobs, and overrides only the verbs that it changes. Not here: the network (model.py), the
baselines that the methods are compared with (lab/*/rivals.py).

p is the target's distribution and q the draft's, everywhere; both are what is really sampled from, after
temperature, top-k and top-p. Temperature 0 is a one-hot distribution, so no rule has a greedy branch.
V vocabulary, n draft tokens of a block, B branches, K candidates of a position.
"""
import copy
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from math import inf
from statistics import fmean
from typing import NamedTuple

import torch

import kernels
from model import Path, Reader, expect, fetch, remote, send


# --------------------------------------------------------------------------------------------- the maths

def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """logits [..., V] -> the distribution to sample from [..., V], in fp32 at least.

    top_k 0 keeps all; top_p keeps the likeliest tokens up to and including the one that reaches this mass.
    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        best = z.argmax(-1, keepdim=True)
        return torch.zeros_like(z).scatter_(-1, best, 1.0)
    z = (z - z.amax(-1, keepdim=True)) / temperature            # the largest is 0: nothing overflows
    if 0 < top_k < z.shape[-1]:
        least = z.topk(top_k).values[..., -1:]
        z = z.masked_fill(z < least, -torch.inf)
    p = z.softmax(-1)
    if top_p < 1:
        ranked, order = p.sort(-1, descending=True)
        dropped = ranked.cumsum(-1) - ranked >= top_p           # the mass before this token already suffices
        p = p.masked_fill(dropped.scatter(-1, order, dropped), 0)
        p = p / p.sum(-1, keepdim=True)
    return p


def sample(p, generator=None):
    """One index for each row of p [..., V] -> [...], never one of chance 0; p need not sum to 1.

    A uniform number is looked up in the sums so far. They are whole, of shares of 2^-52: a device adds in an
    order of its own, and sums that are rounded might leave a gap at a token of chance 0. The number is the
    host's, whatever the device: there is one generator, and nobody waits.
    """
    sums = (p * 2.0 ** 52).cumsum(-1, dtype=torch.long)
    uniform = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)    # below 1
    place = (uniform.to(p.device, non_blocking=True) * sums[..., -1:]).long()           # 0 .. total - 1
    found = torch.searchsorted(sums, place, right=True)
    return found.clamp(max=p.shape[-1] - 1).squeeze(-1)         # V where p is NaN, which `finite` refuses


def residual(p, q):
    """What the target has left once min(p, q) is taken: norm(max(p - q, 0)) [..., V], or p if all is taken.

    Source: Leviathan et al. 2023, algorithm 1 (p').
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def overlap(p, q):
    """The chance that p keeps a sample of q: sum of min(p, q). Source: Leviathan et al. 2023, cor. 3.6."""
    return torch.minimum(p, q).sum(-1)


def token_logps(logits, tokens):
    """log p of each token [T] in nats, of the full vocabulary at temperature 1; logits [T, V]."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ids = send(tokens, logits.device)[:, None]                                          # [T, 1]
    return logits.log_softmax(-1, dtype).gather(1, ids)[:, 0]


def finite(logits, who, length):
    """The logits, of any shape; ValueError for NaN or infinity, which would become silent wrong tokens.

    On a device it does not look: the highest comes here later, fetched with what else is needed.
    """
    good = remote(logits) or logits.amax().isfinite()
    expect(good, f'the {who} computed NaN or infinity after {length} tokens: its weights overflow')
    return logits


# --------------------------------------------------------------------------------------------- the nouns

@dataclass
class Draft:
    """Guessed tokens and the very distributions they were drawn from (a point mass if they were not)."""
    tokens: list                            # [n] ids
    q: torch.Tensor                         # [n, V]
    logits: torch.Tensor = None             # [n, V] raw, for rules that look at confidence
    labels: list = None                     # [n] who wrote each, where it was not the draft alone
    known: torch.Tensor = None              # [m, V] the first rows of Score.logits, where already read
    notes: list = None                      # [n] dicts: what proposer and controller say of each token
    options: list = None                    # ids of each of the candidates that it was chosen from

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, the exact rule becomes sample-and-match."""
        ids = send(tokens, model.cos.device)[:, None]                                       # [n, 1]
        q = torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0)
        return cls(tokens, q)


class Score:
    """A verifier's view of a draft, p [n + 1, V]: **its pass runs when a rule first looks**, or never.

    That is how VIA-SD spares the target: a cycle in which no rule looks at the target's Score has no full
    pass, and neither has a step that SpecGuard keeps.
    """

    def __init__(self, session: 'Session', draft: Draft, path: Path, reader: Reader = None,
                 replacement: Callable = residual):
        """reader: the target's unless given; replacement: see Exact.replacement."""
        self.session = session
        self.draft = draft
        self.path = path
        self.reader = reader or session.target
        self.replacement = replacement

    @cached_property
    def logits(self):
        """[n + 1, V] raw: row i judges draft token i, the last row gives the bonus token.

        The pass reads n + 1 positions: the root (the last committed token, in no cache yet) and the draft.
        """
        known = self.draft.known
        unread = len(self.draft.tokens) + 1
        if known is not None:
            unread -= len(known)
            if unread == 0:
                return known
        session = self.session
        rows = session.read(self.reader, session.tokens, self.draft.tokens, self.path, unread)
        rows = self.finite(rows)
        return rows if known is None else torch.cat([known, rows])

    def finite(self, logits):
        who = 'target' if self.reader is self.session.target else 'middle model'
        return finite(logits, who, len(self.session.tokens))

    @cached_property
    def p(self):
        """[n + 1, V], as the run samples."""
        return self.session.probs(self.logits)

    @cached_property
    def fetched(self):
        """([n] rows (p(x), q(x), p(x) / max p), a row for each draft token x; what `extra` needs)."""
        p = self.p
        q = self.draft.q.to(p.dtype)
        z = self.logits.to(p.dtype)
        ids = send(self.draft.tokens, p.device)[:, None]                                # [n, 1]
        highest = z.amax(-1, keepdim=True)                                              # [n + 1, 1]
        ratios = (z[:-1].gather(1, ids) - highest[:-1]).exp()
        table = torch.cat([p[:-1].gather(1, ids), q.gather(1, ids), ratios], 1)         # [n, 3]
        if not remote(p):
            return table.tolist(), None
        endings = torch.cat([self.replacement(p[:-1], q), p[-1:]])                      # [n + 1, V]
        table, drawn, highest = fetch(table, self.session.draw(endings), highest)
        self.finite(highest)
        return table.tolist(), drawn.tolist()

    @cached_property
    def pq(self):
        """[[p(x), q(x)]] of each draft token x, as floats."""
        table, _ = self.fetched
        return [row[:2] for row in table]

    @cached_property
    def ratios(self):
        """p(x) / max p of each draft token x, as floats, of the raw logits: at temperature 1 in any run."""
        table, _ = self.fetched
        return [ratio for _, _, ratio in table]

    def extra(self, i):
        """The id that ends a cycle at place i: instead of draft token i, or (i = n) behind them all.

        A CPU draws it now. A device has drawn one for each place, of which the cycle uses one at most: they
        came in the one transfer of `fetched`.
        """
        if remote(self.p):
            _, drawn = self.fetched
            return drawn[i]
        law = self.p[i]
        if i < len(self.draft.tokens):
            law = self.replacement(law, self.draft.q[i])
        return int(self.session.draw(law))


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it."""
    drafted: list           # ids
    judged: list            # of each draft token that was looked at: token, p, q, threshold, chance, kept
    tokens: list            # ids committed
    labels: list            # who wrote them: draft, slim, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions, seconds]
    seconds: float
    heard: list = field(default_factory=list)   # see Session.heard: what was added in this cycle
    notes: dict = field(default_factory=dict)   # see Session.note: what a trace asks for besides

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the extra token."""
        return self.labels.count('draft')


def tokens_of(cycles):
    """The ids that the Cycles of one text committed."""
    return [token for cycle in cycles for token in cycle.tokens]


def whole_passes(passes):
    """How many of the passes were the target's through all its layers: full, observed or sparse, not slim."""
    return passes.get('target/full', 0) + passes.get('target/grounded', 0) + passes.get('target/sparse', 0)


def until_end(tokens, eos):
    """The tokens up to the first end of sequence, it included: nothing behind it is ever kept."""
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[:i + 1]
    return tokens


@dataclass
class Session:
    """One text in the making: who reads, what is committed, how it is sampled (always through draw).

    It is made with all of its readers: one that is assigned later counts as begun on another text.
    """
    target: Reader
    draft: Reader | None
    source: Callable                        # where drafts come from: function (session, Plan) -> Draft
    tokens: list                            # ids, prompt first
    room: int                               # tokens that may still be committed
    eos: frozenset = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator = None
    text: Callable = None                   # function from ids to text, for methods that work by lines
    checker: Callable = None                # a task's step checker; a method that needs one refuses without
    calibration: dict = field(default_factory=dict)     # sections of calibration.json, see model.py
    mid: Reader | None = None               # a third model between the two
    sparse: 'Sparse' = None                 # which thins out the target's passes, or None
    cycles: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    prompt_seconds: float = field(default=0.0, init=False)
    heard: list = field(default_factory=list, init=False)   # see hear; a copy of the session adds to it, too
    said: list = field(default_factory=list, init=False)    # tensors that are to be heard, likewise
    block: torch.Tensor = field(default=None, init=False)   # the target's logits of root and block
    own: set = field(default_factory=set, init=False)       # places of the steps that the target wrote

    def __post_init__(self):
        self.begin = len(self.tokens)       # where the text that is written begins
        self.settled = self.begin           # places before it the target has judged, or was heard on
        self.texts = self.texts_begun()

    @cached_property
    def slim_path(self):
        """The target's path without the sublayers that its calibrated mask skips."""
        return self.target.model.full.without(self.calibration['mask']['skip'])

    def texts_begun(self):
        """How many texts the readers have begun: of an earlier text they know nothing more."""
        return [reader.texts for reader in self.readers().values()]

    def readers(self):
        """{role: Reader} of the models that are there."""
        every = dict(target=self.target, draft=self.draft, mid=self.mid)
        return {role: reader for role, reader in every.items() if reader}

    def read_prompt(self):
        """Reads all of the prompt but its last token into every cache, counted apart as prompt_seconds."""
        mark = self.mark()
        for reader in self.readers().values():
            reader.read(self.tokens[:-1], [], reader.model.full, 0)
        self.prompt_seconds = sum(seconds for *_, seconds in self.spent(mark).values())

    def read(self, reader, text, guesses, path, last):
        """Logits [last, V] of the last positions of text + guesses by one of the readers, see Reader.read.

        text: the committed text, or all but its last token. What was committed without the target, and is now
        read by all of its layers, it judges on the way: more rows of logits, but no position more.
        """
        if reader is not self.target or path.writes != 'full':
            return reader.read(text, guesses, path, last)
        start = max(self.begin - 1, reader.cache.trusted(text, path))
        unsettled = range(max(start + 1, self.settled), len(self.tokens))
        late = [place for place in unsettled if place not in self.own]
        wanted = len(text) - start + len(guesses) if late else last
        rows = reader.read(text, guesses, path, wanted)
        if late:                                        # row i tells the token at start + 1 + i
            before = send([place - start - 1 for place in late], rows.device)
            self.hear(rows[before], [self.tokens[place] for place in late])
        self.settled = len(self.tokens)
        if last == 0:
            return None
        self.block = rows[-len(guesses) - 1:]
        return rows[wanted - last:]

    def hear(self, rows, tokens):
        """Notes [p(x), log p(x)] of each committed token x by the target's logits [T, V] of their places.

        p is what the run samples from, log p raw, in nats. Of tokens alone that others committed.
        """
        ids = send(tokens, rows.device)[:, None]                                            # [T, 1]
        chances = self.probs(rows).gather(1, ids)[:, 0]
        self.said.append(torch.stack([chances, token_logps(rows, tokens)], 1))

    def hear_block(self, tokens, labels, judged):
        """Likewise of the tokens of this cycle that the target has read, though another judged them."""
        rows = self.block
        read = self.target.cache.trusted(self.tokens, self.target.model.full)
        self.settled = max(self.settled, min(read + 1, len(self.tokens)))
        places = []
        for i, (row, label) in enumerate(zip(judged, labels)):
            if row['p'] is None and label not in ('target', 'bonus'):
                places.append(i)
        if places and rows is not None:
            self.hear(rows[send(places, rows.device)], [tokens[i] for i in places])
        self.fetch_said()

    def fetch_said(self):
        """Puts what was said into `heard`: once a cycle, since a device has to be waited for."""
        if self.said:
            (table,) = fetch(torch.cat(self.said))
            self.heard += table.tolist()
            self.said.clear()

    def may_err(self, most_wrong):
        """Whether one more token that the target would not have written leaves their share at most_wrong.

        Of the tokens that it has read or written; above temperature 0 each counts 1 - p(x), its own none.
        """
        if most_wrong == 1:
            return True
        self.fetch_said()
        wrong = sum(1 - p for p, _ in self.heard)
        known = self.settled - self.begin
        return wrong + 1 <= most_wrong * (known + 1)

    def view(self, path):
        """The target's path as this session reads it in this cycle: sparse if it was asked for."""
        return self.sparse.view(path, self) if self.sparse else path

    def probs(self, logits, temperature=None, top_p=None):
        """The distribution [..., V] that this run, or these settings of a draft, sample from."""
        temperature = self.temperature if temperature is None else temperature
        top_p = self.top_p if top_p is None else top_p
        return probs(logits, temperature, self.top_k, top_p)

    def draw(self, p):
        """A sample from each row of p [..., V] -> [...]."""
        return sample(p, self.generator)

    def flip(self, chance):
        """True with this chance; certain outcomes draw nothing. The coin is the host's: nobody waits."""
        if not 0 < chance < 1:
            return chance >= 1
        coin = torch.tensor([1 - chance, chance], dtype=torch.float64)
        return bool(self.draw(coin))

    def commit(self, tokens):
        """Writes tokens, cut at the first end of sequence and at the room left; returns them."""
        tokens = until_end(tokens[:self.room], self.eos)
        ended = bool(tokens) and tokens[-1] in self.eos
        longer = self.tokens + tokens
        left = self.room - len(tokens)
        self.tokens, self.room, self.ended = longer, left, ended        # all of it, or nothing if interrupted
        self.cycles += 1
        return tokens

    def note(self, method, draft, score, cycle):
        """Is told each finished cycle and what it was made of; lab.page.Traced fills cycle.notes from it."""

    def mark(self):
        """Where the readers' logs stand now: {role: passes so far}."""
        return {role: len(reader.log) for role, reader in self.readers().items()}

    def spent(self, mark):
        """{reader/path: [passes, positions, seconds]} since the mark."""
        found = {}
        for role, reader in self.readers().items():
            for path, row in reader.spent(mark[role]).items():
                found[f'{role}/{path}'] = row
        return found


# ---------------------------------------------------------------------------------------------- the loop

def decode(session: Session, method: 'Method'):
    """Yields one Cycle after the other until the room is used or the text ends; their list is the trace.

    May run inside a method's verb, on a copy of the session: a cycle's passes are those since its own mark.
    Broken off anywhere, it may be begun again with the same session and method: session.tokens is the text.
    """
    while session.room and not session.ended:
        expect(session.texts == session.texts_begun(),
               'another text was begun on this engine, whose caches it has: finish a text before the next')
        begin = time.perf_counter()
        session.block = None                                    # of a cycle that was broken off
        mark = session.mark()
        heard = len(session.heard)
        draft = method.propose(session)
        score = method.score(session, draft)                    # a Score is lazy: no target pass yet
        tokens, labels, judged = method.accept(session, draft, score)
        tokens = session.commit(tokens)
        labels = labels[:len(tokens)]
        session.hear_block(tokens, labels, judged)
        passes = session.spent(mark)
        cycle = Cycle(draft.tokens, judged, tokens, labels, passes, time.perf_counter() - begin,
                      session.heard[heard:])
        session.note(method, draft, score, cycle)
        method.learn(draft, cycle)
        yield cycle


# --------------------------------------------------------------------------------------- what a method is

def in_range(default, least, greatest=2 ** 31):
    """A knob that is a number of this range; a default of None stands for what its comment says."""
    return field(default=default, metadata=dict(least=least, greatest=greatest))


def one_of(default, words):
    """A knob that is one of these words; a table of words may still grow."""
    return field(default=default, metadata=dict(words=words))


class Method:
    """Three verbs, which decode calls in turn; a method object serves one text.

    A subclass is a dataclass: its fields are its knobs, each with unit, default and range.
    """
    lossless = False        # whether the committed text follows the target's law exactly, at these knobs

    def sections(self, config):
        """The sections of calibration.json that it needs of a target with this Config."""
        return set()

    def helpful(self, config):
        """The sections that it can do without, but uses where they are there."""
        return set()

    def propose(self, session: Session) -> Draft:
        """The Draft of this cycle; it may be empty."""

    def score(self, session: Session, draft: Draft) -> Score:
        """What the draft is judged by; a method that judges steps may return something else."""

    def accept(self, session: Session, draft: Draft, score: Score) -> tuple:
        """(ids to commit, who wrote each, a dict for each draft token that was judged)."""

    def learn(self, draft: Draft, cycle: Cycle):
        """Is told each finished cycle."""


@dataclass
class Autoregressive(Method):
    """Plain decoding with the target, one token a pass: nothing is drafted, so nothing is judged."""
    lossless = True

    def propose(self, session):
        return silence(session)

    def score(self, session, draft):
        return Score(session, draft, session.view(session.target.model.full))

    def accept(self, session, draft, score):
        return [score.extra(0)], ['target'], []


CONTROLLERS = {}        # name: class; filled where they stand


@dataclass
class Exact(Method):
    """Exact speculative decoding: whatever the draft, the text follows the target's law.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    gamma: int = in_range(4, 0)             # draft tokens a cycle
    draft_temperature: float = None         # of the draft model; None: the run's, 0: greedy drafting
    draft_top_p = None                      # likewise; a knob where a paper has it
    controller: str = one_of('fixed', CONTROLLERS)      # what decides a block's length; fixed: gamma
    spare = 1               # tokens of room that a block leaves, for those that the cycle adds to it

    def __post_init__(self):
        """ValueError for a knob out of range; methods whose knobs hang together check that too."""
        check_knobs(self)
        check_temperature('draft_temperature', self.draft_temperature)
        self.control = CONTROLLERS[self.controller](self.gamma, self.confidence_window)

    @property
    def lossless(self):
        return self.control.causal

    @cached_property
    def confidence_window(self):
        """CM-ASD's, for controllers that look at one."""
        return Window()

    def propose(self, session: Session):
        """The Draft of this cycle, as long as the controller and the room allow."""
        n = self.control.length(session)
        context = session.target.model.config.max_position_embeddings
        expect(n < context, f'a block of {n} draft tokens in a context of {context}: draft fewer')
        n = min(n, session.room - self.spare)
        return self.control.trim(self.guess(session, n)) if n > 0 else silence(session)

    def guess(self, session: Session, n: int):
        """A Draft of at most n tokens, n above 0."""
        return session.source(session, self.plan(session, n))

    def plan(self, session, n):
        """How a block of at most n tokens is drafted."""
        law = partial(session.probs, temperature=self.draft_temperature, top_p=self.draft_top_p)
        return Plan(n, law, partial(self.control.more, session))

    def path(self, session):
        """The path on which the target verifies."""
        return session.view(session.target.model.full)

    def score(self, session, draft):
        return Score(session, draft, self.path(session), replacement=self.replacement)

    def chance(self, score: Score, i: int):
        """The chance that draft token i is kept: min(1, p(x) / q(x))."""
        p, q = score.pq[i]
        return min(1.0, p / q)

    def threshold(self, score: Score, i: int):
        """What the rule compares draft token i with, for the trace; None where it has no threshold."""
        return None

    def replacement(self, p, q):
        """What is drawn from [..., V] in the place of a rejected draft token; p, q [..., V]: of its place."""
        return residual(p, q)

    def accept(self, session: Session, draft: Draft, score: Score):
        """(tokens, labels, judged) of this cycle, left to right up to a rejection or the end of sequence."""
        wrote = draft.labels or ['draft'] * len(draft.tokens)
        judged = []
        for i, token in enumerate(draft.tokens):
            p, q = score.pq[i]
            chance = self.chance(score, i)
            kept = session.flip(chance)
            note = draft.notes[i] if draft.notes else {}
            judged.append(dict(token=token, p=p, q=q, threshold=self.threshold(score, i), chance=chance,
                               kept=kept, **note))
            if not kept:
                return draft.tokens[:i] + [score.extra(i)], wrote[:i] + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], wrote[:i + 1], judged
        bonus = score.extra(len(draft.tokens))
        return draft.tokens + [bonus], wrote + ['bonus' if wrote else 'target'], judged

    def learn(self, draft, cycle):
        self.control.learn(draft, cycle)


# ------------------------------------------------------------------------------- where drafts come from

class Plan(NamedTuple):
    """How a block is drafted."""
    n: int              # tokens at most
    law: Callable       # function from raw logits [..., V] to the distribution that is sampled
    more: Callable      # function (tokens [rows], raw logits [rows, V] of each step so far, notes) -> bool


class Branches(NamedTuple):
    """Continuations of one text, sampled side by side."""
    tokens: torch.Tensor    # [B, n]
    q: torch.Tensor         # [B, n, V]
    logits: torch.Tensor    # [B, n, V] raw
    notes: list             # [n] dicts: what the controller said of each step

    def lines(self, session: 'Session'):
        """The ids of each branch, up to its end of sequence: one transfer."""
        tokens, highest = fetch(self.tokens, self.logits.amax())
        finite(highest, 'draft', len(session.tokens))
        return [until_end(line, session.eos) for line in tokens.tolist()]


def chain(session: Session, plan: Plan):
    """A Draft from the draft model, one token after the other.

    Without a draft model the target drafts for itself on its slim path (Zhang et al. 2023, Draft & Verify).
    """
    reader = session.draft or session.target
    path = reader.model.full if session.draft else session.slim_path
    return chain_on(session, plan, reader, path)


def chain_on(session: Session, plan: Plan, reader: Reader, path: Path):
    """A Draft from this reader on this path, one token after the other."""
    found = sample_branches(session, reader, path, 1, plan)
    (ids,) = found.lines(session)
    n = len(ids)
    # the last token was not fed: if all are kept, the next read starts one token before the extra one
    reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
    return Draft(ids, found.q[0, :n], found.logits[0, :n], notes=found.notes[:n])


def sample_branches(session: Session, reader: Reader, path: Path, rows: int, plan: Plan):
    """Branches behind the text, `rows` of them, until the plan or all their texts end.

    On a device nobody looks for an end of sequence meanwhile: whoever takes a branch cuts it there. A single
    row is written in the reader's own cache.
    """
    logits = [reader.read(session.tokens, [], path, 1).expand(rows, -1)]        # of each step [rows, V]
    twin = reader.fork(rows) if rows > 1 else reader
    q = []
    tokens = []
    notes = []
    over = set()                            # rows whose text has ended
    while True:
        q.append(plan.law(logits[-1]))
        tokens.append(session.draw(q[-1]))
        notes.append({})
        if len(tokens) == plan.n or not plan.more(tokens, logits, notes):
            break
        if not remote(tokens[-1]):
            for row, token in enumerate(tokens[-1].tolist()):
                if token in session.eos:
                    over.add(row)
        if len(over) == rows:                           # behind an end of sequence nothing is ever kept
            break
        logits.append(twin.append(tokens[-1], path))
    return Branches(torch.stack(tokens, 1), torch.stack(q, 1), torch.stack(logits, 1), notes)


def lookup(session: Session, plan: Plan):
    """What followed the last earlier occurrence of the text's last 3 tokens, else 2. Source: Saxena 2023."""
    text = torch.tensor(session.tokens)
    for size in (3, 2):
        if len(text) > size:
            windows = text[:-1].unfold(0, size, 1)                              # [places, size]
            found = (windows == text[-size:]).all(1).nonzero()
            if len(found):
                begin = int(found[-1]) + size
                return Draft.points(session.tokens[begin:begin + plan.n], session.target.model)
    return silence(session)


def silence(session: Session, plan=None):
    """No draft at all: the cycle is one step of plain decoding."""
    return Draft.points([], session.target.model)


# ------------------------------------------------------------------------- how long a block may become

class Controller:
    """Decides how long a block becomes: here gamma tokens, others override what they decide otherwise.

    causal: what it drops is dropped before it is sampled, so that the law is untouched.
    """
    causal = True

    def __init__(self, gamma, window):
        self.gamma = gamma
        self.window = window

    def length(self, session: Session):
        """The most tokens that the next block may have."""
        return self.gamma

    def more(self, session, tokens, logits, notes):
        """Whether to draft another token. May look at all that is in the block: it will be verified.

        tokens [rows], raw logits [rows, V]: lists of those of each step so far; notes: a dict for each step,
        the last of which it may fill, for whoever else asks and for the trace.
        """
        self.look(tokens, logits, notes[-1])
        return self.goes_on(session, notes)

    def look(self, tokens, logits, note):
        """Notes what goes_on will ask about the latest step."""

    def goes_on(self, session, notes):
        """Whether to draft another token, by the notes on the block alone: so can it be replayed."""
        return True

    def trim(self, draft):
        """The Draft that is verified: all of it, for whoever is causal."""
        return draft

    def learn(self, draft, cycle):
        """Is told each finished cycle."""


class FixedLength(Controller):
    """gamma tokens a cycle, whatever happens."""


CONTROLLERS.update(fixed=FixedLength)       # online is CM-ASD's; lab/cmasd/rivals.py has more


# --------------------------------------------------------------- CM-ASD: confidence-modulated drafting

def confidence_signals(logits):
    """Three signs of confidence in 0..1, a tuple for each row of raw logits [n, V] at temperature 1.

    1 - H / log V; tanh(logit margin / 2), which is (q1 - q2) / (q1 + q2); q1 - q2. In plain Python as soon as
    V is gone: an operation on a few numbers costs as much as one on a thousand.
    Source: Sen et al. 2025 (CM-ASD) name the three; the first two normalisers are ours.
    """
    logq = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    negentropy = (logq.exp() * logq).sum(-1, keepdim=True)                              # [n, 1] nats
    (numbers,) = fetch(torch.cat([negentropy, logq.topk(2).values], -1))
    most = math.log(logits.shape[-1])
    found = []
    for nats, first, second in numbers.tolist():
        certainty = min(1.0, max(0.0, 1 + nats / most))
        margin = math.tanh((first - second) / 2)
        found.append((certainty, margin, math.exp(first) - math.exp(second)))
    return found


@dataclass(frozen=True)
class Window:
    """CM-ASD's confidence C and the block length that it allows; what the fields are: see CmAsd."""
    k_min: int = 1
    k_max: int = 10
    alpha: float = 1.0
    lam: tuple = (1.0, 1.0, 1.0)

    def confidence(self, logits):
        """C in 0..1 of each row of raw logits [n, V]."""
        return [self.mean(signals) for signals in confidence_signals(logits)]

    def mean(self, signals):
        """C of one token's three signals, their mean by weight."""
        total = sum(self.lam)
        return sum(weight / total * signal for weight, signal in zip(self.lam, signals))

    def length(self, confidence):
        """The block length that a mean confidence allows; ValueError if it is NaN."""
        expect(not math.isnan(confidence), 'the draft computed NaN or infinity: its weights overflow')
        return min(self.k_max, max(self.k_min, math.floor(self.alpha * confidence * self.k_max)))


class Online(Controller):
    """CM-ASD's controller, for any method: the token that fills its window is the last."""

    def length(self, session):
        return self.window.k_max

    def look(self, tokens, logits, note):
        note['confidence'] = fmean(self.window.confidence(logits[-1]))       # of all rows

    def goes_on(self, session, notes):
        mean = sum(note['confidence'] for note in notes) / len(notes)
        return len(notes) < self.window.length(mean)


CONTROLLERS.update(online=Online)


@dataclass
class CmAsd(Exact):
    """CM-ASD: the draft's confidence C sets how much is drafted and how strictly it is judged. LOSSY.

    The paper does not say what its threshold tau is compared with. We take p(x) / max p >= tau on raw logits
    at temperature 0, a lenience of tau above it: tau = 1 is exact in both. The window averages C over the
    block so far, so that no token is dropped unverified.
    Source: Sen et al. 2025 (arXiv 2508.15371), window and threshold; Xia et al. 2023 (SpecDec), the ratio.
    """
    controller: str = 'online'
    k_min: int = 1                          # shortest block; the paper states no values, all here are ours
    k_max: int = 10                         # longest block; the paper sweeps 5, 10, 15, 25
    alpha: float = in_range(1.0, 0)         # block length over confidence
    lam_entropy: float = in_range(1.0, 0)   # weights of the signals in C, normalised to sum 1
    lam_margin: float = in_range(1.0, 0)
    lam_softmax: float = in_range(1.0, 0)
    tau_base: float = in_range(0.3, 0)      # threshold where C = 1
    gamma_tau: float = in_range(0.5, 0)     # what is added where C = 0; the paper sweeps 0.1, 0.5, 1, 2
    accept_: str = one_of(None, ('ratio', 'lenience', 'strict'))    # None: by temperature. Knob: accept

    def __post_init__(self):
        super().__post_init__()
        require(1 <= self.k_min <= self.k_max, 'k_min', self.k_min, f'1 to k_max, {self.k_max}')
        require(sum(self.confidence_window.lam) > 0, 'lam_entropy', 0.0, 'above 0 where the other two are 0')

    @cached_property
    def confidence_window(self):
        lam = self.lam_entropy, self.lam_margin, self.lam_softmax
        return Window(self.k_min, self.k_max, self.alpha, lam)

    @property
    def lossless(self):
        exact = self.accept_ == 'strict' or self.tau_base >= 1 and self.accept_ != 'ratio'
        return self.control.causal and exact

    def propose(self, session):
        drawn = session.source not in (lookup, silence)
        expect(drawn, 'cmasd takes its confidence from a draft model: give --draft DIR')
        draft = super().propose(session)
        if draft.tokens:                                # the controller need not have looked at all of them
            unseen = [i for i, note in enumerate(draft.notes) if 'confidence' not in note]
            if unseen:
                confidences = self.confidence_window.confidence(draft.logits)
                for i in unseen:
                    draft.notes[i]['confidence'] = confidences[i]
        return draft

    def threshold(self, score, i):
        """tau of draft token i: the surer the draft, the more is forgiven."""
        if self.accept_ == 'strict':
            return 1.0
        tau = self.tau_base + self.gamma_tau * (1 - score.draft.notes[i]['confidence'])
        return min(1.0, max(0.01, tau))

    def chance(self, score, i):
        tau = self.threshold(score, i)
        p, q = score.pq[i]
        rule = self.accept_ or ('lenience' if score.session.temperature else 'ratio')
        if rule != 'ratio':
            return min(1.0, p / (tau * q))
        matched = tau < 1 or p > 0                      # a tie is no match: tau = 1 is exact
        return float(score.ratios[i] >= tau and matched)


# ------------------------------------------------------------- ECSV: reliability-weighted voting of branches

@dataclass
class Ballot:
    """What B branches of n tokens say of K candidates a position; at temperature 1, on the CPU, in fp64."""
    tokens: torch.Tensor                    # [B, n] ids
    entropy: torch.Tensor                   # [B, n] H(q) / log V, in 0..1: no calibration is needed
    own: torch.Tensor                       # [B, n] log q of the branch's own token, nats
    names: torch.Tensor                     # [n, K] candidate ids: the branches' tokens, then the M likeliest
    q: torch.Tensor                         # [B, n, K] q of the candidates
    margins: torch.Tensor                   # [B, n] the target's logit margin where it was asked, else 0
    verifier: dict = field(default_factory=dict)    # position: the target's logits [K], where it was asked

    @classmethod
    def of(cls, tokens, logits, top_m):
        """From tokens [B, n] and raw logits [B, n, V]; top_m: candidates beside the branches' own tokens."""
        B, n, V = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        q = logits.softmax(-1, dtype)
        logq = logits.log_softmax(-1, dtype)
        entropy = -(q * logq).sum(-1) / math.log(V)                                 # [B, n]
        names = tokens.T                                                            # [n, B]
        if top_m:
            likeliest = q.sum(0).topk(min(top_m, V)).indices                        # [n, M]
            names = torch.cat([names, likeliest], -1)
        votes = q.gather(-1, names.expand(B, n, -1))                                # [B, n, K]
        own = logq.gather(-1, tokens[..., None])[..., 0]                            # [B, n]
        tokens, entropy, own, names, votes = fetch(tokens, entropy, own, names, votes)
        margins = torch.zeros(B, n, dtype=torch.float64)
        return cls(tokens, entropy.double(), own.double(), names, votes.double(), margins)

    def votes(self):
        """[B, n] how many branches have this branch's token at this position, itself included."""
        return (self.tokens[:, None] == self.tokens).sum(1)

    def doubtful(self, policy, count, reach):
        """At most `count` positions below `reach` that most deserve a check, ascending."""
        top = self.votes().double().amax(0) / len(self.tokens)      # [n] share of the majority
        unsure = self.entropy.mean(0)                               # [n]
        if policy == 'disagreement':
            doubt = 1 - top
        elif policy == 'entropy':
            doubt = unsure
        else:                                                       # agreed, and yet unsure
            doubt = top * unsure
        most, order = doubt[:reach].sort(descending=True, stable=True)
        return sorted(order[most > 0][:count].tolist())

    def ask(self, rows, chosen):
        """Notes what the target's logits [m, V] say of the candidates at the chosen positions."""
        rows = rows.double().cpu()
        for j in chosen:
            (best, second), (favourite, _) = rows[j].topk(2)
            tokens = self.tokens[:, j]                                              # [B]
            rival = torch.where(tokens == favourite, second, best)
            self.margins[:, j] = rows[j][tokens] - rival
            self.verifier[j] = rows[j][self.names[j]]

    def elect(self, scores, prefix, ask):
        """The tokens [n] with the highest sums of scores [B, n, K]; prefix: who left the text has no vote.

        Ties go to the verifier's logit where it was asked (and `ask`), else to mean q, then to the lowest id.
        """
        scores = scores.tolist()
        q = self.q.tolist()
        elected = []
        for j, names in enumerate(self.names.tolist()):
            voters = self.voters(elected if prefix else [])
            total = summed(scores, j, voters)
            tie_break = summed(q, j, voters)
            if ask and j in self.verifier:
                tie_break = self.verifier[j].tolist()
            ranks = list(zip(total, tie_break, [-name for name in names]))
            elected.append(names[ranks.index(max(ranks))])
        return elected

    def voters(self, elected):
        """The branches that begin with these tokens; where none does any more, all of them."""
        agreeing = []
        for b, own in enumerate(self.tokens[:, :len(elected)].tolist()):
            if own == elected:
                agreeing.append(b)
        return agreeing or list(range(len(self.tokens)))


def summed(table, j, voters):
    """Sums [K] of the voters' numbers at position j of a table [B][n][K].

    In plain Python, which is faster on so few numbers, and exact: the order of the branches changes nothing.
    """
    rows = [table[b][j] for b in voters]
    return [math.fsum(column) for column in zip(*rows)]


@dataclass
class Ecsv(Exact):
    """ECSV: several drafted branches are fused by a reliability-weighted vote; the fused block is verified.

    A fused token carries its point mass as q: the exact rule is sample-and-match, the text the target's. An
    early mismatch has no refund, the pass has read the rest; what a short block leaves is banked for a check.
    The features are raw: in a vote a feature's mean cancels and its scale is a weight, so that to standardise
    them is to choose other weights. Source: "Error-Correcting Speculative Decoding via Branch Voting", a
    model-written proposal (github.com/keithballinger/dialectica, 2025) without code.
    """
    draft_temperature: float = in_range(0.8, 0)  # the proposal states no values, all here are ours
    draft_top_p: float = in_range(0.95, 1e-9, 1)
    branches: int = in_range(4, 1, 64)      # B; to be tried: 2, 4, 8
    depth: int = None                       # tokens a branch, k; None: gamma
    a_entropy: float = in_range(0.5, 0)     # weights of the features in r
    a_agree: float = in_range(1.0, 0)
    a_self: float = in_range(0.5, 0)
    a_spot: float = in_range(0.0, 0)
    gamma_r: float = in_range(1.0, 0)       # w = exp(gamma_r r); 0: every vote counts the same
    soft: float = in_range(0.0, 0)          # lambda, weight of the soft vote
    top_m: int = in_range(4, 0)             # candidates beside the branches' tokens, for soft votes alone
    spots: int = in_range(0, 0)             # R, positions checked with the target before the final vote
    policy: str = one_of('disagreement', ('disagreement', 'entropy', 'agree_entropy'))  # where to check
    granularity: str = one_of('position', ('position', 'branch', 'window'))     # r of it, or its mean
    window: int = in_range(2, 1)            # positions that a trailing window averages
    align: str = one_of('positional', ('positional', 'prefix'))     # prefix (ours): votes while it agrees
    tie_break: str = one_of('verifier', ('verifier', 'draft'))      # its logit where it was asked; mean q
    budget: int = None                      # target positions a cycle at most; None: those of the block
    bonus_check: bool = False               # one check more where the last cycle left some budget
    lossless = True                         # whatever chose its point masses or cut the block; no knob

    def __post_init__(self):
        if self.depth is not None:
            self.gamma = self.depth
        self.banked = 0                     # target positions that the last cycle left
        super().__post_init__()
        require(self.budget is None or self.budget >= 2, 'budget', self.budget, '2 positions or more')

    def guess(self, session, n):
        """The fused Draft: branches, a vote, perhaps a check of some positions and a second vote."""
        if self.budget:
            n = min(n, self.budget - 1)
        texts = self.texts(session, n)
        ballot = Ballot.of(texts.tokens, texts.logits, self.top_m if self.soft else 0)
        finite(ballot.entropy, 'draft', len(session.tokens))
        fused = until_end(self.fuse(ballot), session.eos)
        drafted = texts.tokens.shape[1]     # perhaps fewer than n: the controller may close a block
        cap = self.budget or drafted + 1
        checks = self.spots + int(self.bonus_check and self.banked > 0)
        chosen = ballot.doubtful(self.policy, checks, min(len(fused), cap - 1))
        known = None
        spent = len(fused) + 1
        if chosen:
            fused, known, spent = self.recheck(session, ballot, fused, chosen, cap)
        self.banked = cap - spent
        self.ballot = ballot                # kept for who notes the votes
        draft = Draft.points(fused, session.target.model)
        draft.known = known
        draft.logits = texts.logits.mean(0)[:len(fused)]        # the branches' mean, for length controllers
        draft.notes = [dict(branches=column) for column in ballot.tokens.T.tolist()]
        return draft

    def recheck(self, session, ballot, fused, chosen, cap):
        """(the block [n] of a second vote, the target's rows that stay right, the positions that both take).

        Verifying position j takes what is before it: the check is a pass over all that precedes the last
        chosen one. Its rows stay right as far as the second vote elects what the first did.
        """
        begun = fused[:chosen[-1]]
        rows = Score(session, Draft(begun, None), self.path(session)).logits        # [m, V]
        ballot.ask(rows, chosen)
        finite(ballot.margins, 'target', len(session.tokens))
        elected = until_end(self.fuse(ballot), session.eos)
        same = len(os.path.commonprefix([begun, elected]))
        asked = len(rows)                               # positions of the check
        elected = elected[:same + cap - asked]          # those behind `same` are to be read, within the cap
        unread = len(elected) - same
        return elected, rows[:same + 1], asked + unread

    def texts(self, session, n):
        """The Branches that vote."""
        expect(session.draft, 'branches are sampled from a draft model: give --draft DIR')
        reader = session.draft
        return sample_branches(session, reader, reader.model.full, self.branches, self.plan(session, n))

    def weights(self, ballot):
        """w [B, n], above 0: exp(gamma_r r) of r = -a H + a agreement + a log q(own) + a margin."""
        others = max(1, len(ballot.tokens) - 1)
        agreement = (ballot.votes().double() - 1) / others                          # with the other branches
        r = (self.a_agree * agreement - self.a_entropy * ballot.entropy
             + self.a_self * ballot.own + self.a_spot * ballot.margins)             # [B, n]
        if self.granularity == 'branch':
            r = r.mean(1, keepdim=True).expand_as(r)
        elif self.granularity == 'window':
            r = trailing_mean(r, self.window)
        return (self.gamma_r * r).clamp(-20, 20).exp()

    def scores(self, ballot):
        """[B, n, K] what each branch gives to each candidate."""
        own = ballot.tokens[..., None] == ballot.names                              # [B, n, K]
        return self.weights(ballot)[..., None] * (own + self.soft * ballot.q)

    def fuse(self, ballot):
        """The fused tokens [n]."""
        return ballot.elect(self.scores(ballot), self.align == 'prefix', self.tie_break == 'verifier')


def trailing_mean(r, size):
    """[B, n]: each position of r [B, n] averaged with those before it, `size` in all."""
    columns = []
    for end in range(1, r.shape[1] + 1):
        columns.append(r[:, max(0, end - size):end].mean(1))
    return torch.stack(columns, 1)


# ----------------------------------------------------------------------- VIA-SD: a slim verifier in between

def violation(b, a, alpha=0.5, beta=0.5):
    """R(b|a) [...] in nats: how far drafting from a breaks what lossy verification by b forgives.

    a, b: log-probabilities [..., V] of the raw logits. The first term is what b accepts too rarely, the
    second what its residual lacks. At alpha 0, beta 1 nothing is forgiven; at 1/2, 1/2 a factor of 2 is.
    Source: VIA-SD (2026), R_KL^{alpha,beta}, as its public reimplementations write it.
    """
    d = a - b
    refused = a.exp() * (d + math.log1p(-alpha)).clamp(min=0)
    starved = b.exp() * (d + math.log(beta)).clamp(min=0)
    return (refused + starved).sum(-1)


@dataclass
class ViaSd(Exact):
    """The target with sublayers skipped (slim, s) judges first, the full target what slim doubts. LOSSY.

    By r = s(y) / max s a draft token y is kept, rewritten by slim or (r < escalate) decided by the target,
    which reads lag and block only then, over what slim wrote to the cache that they share. A block that slim
    kept ends with slim's own next token (the paper is silent), which at temperature 0 would pass its gate.
    With most_wrong (ours) slim judges a block only where one wrong token more would leave their share, of all
    that the target has read or written, at most that. Of a greedy text of N tokens the target would then have
    written all but most_wrong (N + 1) + max_lag + gamma: those slim keeps before the target reads them.
    Source: VIA-SD (2026); its p, q', q are our q, s, p, its alpha_1 and alpha_2 keep and escalate.
    """
    gamma: int = 5
    keep: float = 0.5                       # r from which a draft token stays
    escalate: float = in_range(0.3, 0)      # r below which the target decides; above 1 it always does
    max_lag: int = in_range(32, 0)          # tokens that slim may build on before the target has read them
    after_escalation: str = one_of('full', ('full', 'gate'))  # full: the pass is paid, it judges the rest too
    slim_bonus: bool = True                 # one more token, slim's own, after a block that it kept
    most_wrong: float = in_range(1.0, 0, 1)     # share of wrong tokens where the target takes over; 0: exact
    spare = 0                               # a block may fill the room: a token that it adds is then cut

    def __post_init__(self):
        super().__post_init__()
        require(self.escalate <= self.keep, 'keep', self.keep, f'{self.escalate} to inf')

    @property
    def lossless(self):
        low, _ = self.bounds
        return self.control.causal and (low > 1 or self.most_wrong == 0)

    @property
    def bounds(self):
        """(r below which a token is escalated, r from which it is kept)."""
        return self.escalate, self.keep

    def sections(self, config):
        return {'mask'}

    def slim_score(self, session, draft):
        """The Score of the middle stage."""
        return Score(session, draft, session.view(session.slim_path), replacement=self.slim_replacement)

    def read_lag(self, session, path):
        """Lets the target read, on this path, what slim has kept without it, if that is too much."""
        committed = session.tokens[:-1]
        lag = len(committed) - session.target.cache.trusted(committed, path)
        if lag > self.max_lag:
            session.read(session.target, committed, [], path, 0)

    def stages(self, session, draft, score):
        """The Scores that may judge, cheapest first; the last is the target's."""
        return [self.slim_score(session, draft), score]

    def accept(self, session, draft, score):
        if not draft.tokens:
            return super().accept(session, draft, score)
        self.read_lag(session, score.path)
        stages = [score]
        if session.may_err(self.most_wrong):
            stages = self.stages(session, draft, score)
        last = len(stages) - 1
        stage = highest = 0
        judged = []
        for i, token in enumerate(draft.tokens):
            if self.after_escalation == 'gate':
                stage = 0                               # each token begins with the cheapest
            while stage < last and stages[stage].ratios[i] < self.bounds[0]:
                stage += 1                              # in doubt: ask the next
            highest = max(highest, stage)
            if stage == last:
                doubted = stages[max(0, last - 1)].ratios[i]
                chosen, row = self.judge_by_target(session, score, i, doubted)
            else:
                chosen, row = self.judge_by_slim(session, stages[stage], i)
            judged.append(row)
            if chosen != token:
                return draft.tokens[:i] + [chosen], ['draft'] * i + [row['by']], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        labels = ['draft'] * len(draft.tokens)
        if highest < last and not self.slim_bonus:
            return draft.tokens, labels, judged
        extra = stages[highest].extra(len(draft.tokens))
        return draft.tokens + [extra], labels + ['bonus' if highest == last else 'slim'], judged

    def judge_by_target(self, session, score, i, ratio):
        """(the token at place i, its row of the trace) as in exact decoding; ratio: what slim doubted."""
        p, q = score.pq[i]
        chance = self.chance(score, i)
        token = score.draft.tokens[i]
        chosen = token if session.flip(chance) else score.extra(i)
        return chosen, dict(token=token, p=p, q=q, ratio=ratio, threshold=None, chance=chance,
                            kept=chosen == token, by='target')

    def judge_by_slim(self, session, score, i):
        """(the token at place i, its row of the trace): kept from r = keep on, else a token of slim's own."""
        chance = self.slim_chance(score, i)
        token = score.draft.tokens[i]
        chosen = token if session.flip(chance) else score.extra(i)
        return chosen, dict(token=token, p=None, q=score.pq[i][1], ratio=score.ratios[i], chance=chance,
                            threshold=self.bounds[1], kept=chosen == token, by='slim')

    def slim_chance(self, score, i):
        """The chance that slim keeps draft token i."""
        return float(score.ratios[i] >= self.bounds[1])

    def slim_replacement(self, s, q):
        """What slim draws from [..., V] in the place of a draft token; s, q [..., V]: of its place."""
        return s


# ------------------------------------------------------------------------ SpecGuard: whole steps verified

PRESETS = dict(     # of knobs that are None: as the notes have them, as others report the paper's, and greedy
    notes=dict(k=4, draft_temperature=0.7, draft_top_p=1.0, beta=0.5, tau=0.5, target_k=1),
    paper=dict(k=16, draft_temperature=0.7, draft_top_p=0.8, beta=0.3, tau=0.7, target_k=16,
               target_temperature=0.7, target_top_p=0.8),
    greedy=dict(k=1, draft_temperature=0.0, draft_top_p=1.0, beta=0.5, tau=0.5, target_k=1))
STEP_ENDS = dict(   # kinds of steps: (what the text has to match, a word and an end; tokens it may have)
    line=(r'\w.*\n', 64), paragraph=(r'(?s)\w.*\n[ \t]*\n', 128),
    sentence=(r'\w.*(\n|((?<!\d)\.|[!?])["\')\]*]*\s*\Z)', 64))      # 3. may go on as 3.5: no end


def write_steps(session: Session, method: 'Stepwise', reader: Reader, k: int):
    """k Drafts of one step each, sampled by `reader` as rows of one batch (a single row in its own cache).

    The draft model samples at the method's settings. So does the target where it writes several, which would
    be alike at temperature 0; a single step it writes as the run does. A row that is over idles.
    """
    path = reader.model.full
    law = partial(session.probs, temperature=method.draft_temperature, top_p=method.draft_top_p)
    who = 'draft'
    if reader is session.target:
        path = session.view(path)
        law = session.probs
        if k > 1:
            law = partial(session.probs, temperature=method.target_temperature, top_p=method.target_top_p)
        who = 'target'
    logits = session.read(reader, session.tokens, [], path, 1).expand(k, -1)            # [k, V]
    twin = reader.fork(k) if k > 1 else reader
    steps = []                              # logits [k, V] of each place
    texts = [[] for _ in range(k)]          # ids of each row
    live = list(range(k))
    latest = send([0] * k, logits.device)   # the token to feed of each row
    while live:
        steps.append(logits)
        alive = send(live, logits.device)
        latest[alive] = session.draw(law(logits[alive]))
        tokens, highest = fetch(latest, logits.amax())  # their text says whether a step is over
        finite(highest, who, len(session.tokens))
        for i in live:
            texts[i].append(int(tokens[i]))
        live = [i for i in live if not method.over(session, texts[i])]
        if live:
            logits = twin.append(latest, path)
    if k == 1:
        reader.cache.record(session.tokens + texts[0][:-1], len(session.tokens), path)
    drafts = []
    for ids, raw in zip(texts, torch.stack(steps, 1)):                                  # [k, T, V]
        drafts.append(Draft(ids, law(raw[:len(ids)]), raw[:len(ids)]))
    return drafts


def most_central(steps, logps):
    """Index of the step (a list of ids) likest the others, by F1 of token pairs; ties: the surer, first.

    logps: mean log-probability of each step, nats.
    """
    pairs = [Counter(zip([None] + ids, ids)) for ids in steps]
    ranks = []
    for mine, logp in zip(pairs, logps):
        likeness = 0.0                                  # 1 of it is the step's own
        for other in pairs:
            likeness += 2 * (mine & other).total() / (mine.total() + other.total())
        ranks.append((round(likeness, 9), logp))
    return ranks.index(max(ranks))                      # the first of equals


def step_score(seen, ranges, beta, combine):
    """(score 0..1, whether a signal was clipped) of a step by its weakest tokens.

    seen [T]: (log-probability, grounding) of each token; ranges: (low, high) of either, which become 0 and 1.
    """
    unit = []
    clipped = False
    for values, (low, high) in zip(zip(*seen), ranges):
        scaled = (min(values) - low) / max(high - low, 1e-6)
        inside = min(1.0, max(0.0, scaled))
        clipped = clipped or inside != scaled
        unit.append(inside)
    if combine == 'and':
        return min(unit), clipped
    confidence, grounding = unit
    return beta * confidence + (1 - beta) * grounding, clipped


@dataclass
class Stepwise(Method):
    """A cycle is a step: the draft writes k, one is chosen and judged; below tau the target writes it anew.

    Subclasses score and judge. LOSSY but where the target writes everything. With most_wrong (ours) it writes
    a step, too, where one wrong token more might bring their share above that, as in ViaSd; but of steps that
    it never comes to read, as where all are kept, nothing is promised.
    """
    gamma: int = in_range(4, 0)             # draft tokens a cycle under regenerate=sd
    k: int = in_range(None, 1, 256)         # candidates; None, here and below: the preset's
    draft_temperature: float = None         # of the candidates, whatever the run's
    draft_top_p: float = in_range(None, 1e-9, 1)
    tau: float = in_range(None, -inf, inf)  # score that a step needs; inf: the target writes them all
    most_wrong: float = in_range(1.0, 0, 1)     # share of wrong tokens where the target takes over; 0: exact
    target_k: int = in_range(None, 1, 256)  # candidates of the target where it writes
    target_temperature: float = None        # of these if they are several; None, here and below: the run's
    target_top_p: float = in_range(None, 1e-9, 1)
    delimiter: str = r'\n'                  # ends a step: a text (the paper's is \n\n), or one of STEP_ENDS
    max_step: int = in_range(None, 1, 999)  # tokens; None: as STEP_ENDS has it, 48 for a text
    regenerate: str = one_of('ar', ('ar', 'sd'))    # sd: the target writes with the draft's help
    preset: str = one_of('notes', PRESETS)  # of the knobs that are None

    def __post_init__(self):
        for name, value in PRESETS.get(self.preset, {}).items():
            if getattr(self, name, value) is None:
                setattr(self, name, value)
        check_knobs(self)
        check_temperature('draft_temperature', self.draft_temperature)
        check_temperature('target_temperature', self.target_temperature)
        require(self.delimiter, 'delimiter', 'empty', r'what ends a step, say \n')
        alone = self.target_k == 1 or self.regenerate == 'ar'
        require(alone, 'target_k', self.target_k, '1 (regenerate=sd)')

    @property
    def lossless(self):
        return (self.tau == inf or self.most_wrong == 0) and self.target_k == 1

    def most(self):
        """The most tokens that a step may have."""
        if self.max_step is not None:
            return self.max_step
        _, tokens = STEP_ENDS.get(self.delimiter, (None, 48))
        return tokens

    def longest(self, session):
        """The most tokens that a step may have here."""
        return min(self.most(), session.room)

    def over(self, session, ids):
        """Whether ids, behind the committed text, are a whole step; blanks ahead of it belong to it."""
        return len(ids) >= self.longest(session) or ids[-1] in session.eos or self.delimited(session, ids)

    def delimited(self, session, ids):
        """Whether the text of these ids has the delimiter behind something that is no blank.

        Of STEP_ENDS: behind a word, so that a line of brackets alone is no step. Each token is asked anew:
        what is written behind an end can take nothing back.
        """
        text = session.text(ids)
        if self.delimiter in STEP_ENDS:
            end, _ = STEP_ENDS[self.delimiter]
            return re.search(end, text) is not None
        return self.delimiter.replace(r'\n', '\n') in text.lstrip()

    def propose(self, session):
        expect(session.draft and session.text, 'steps need a draft model and a tokenizer: give --draft DIR')
        found = write_steps(session, self, session.draft, self.k)
        draft = self.choose(session, found)
        draft.options = [one.tokens for one in found]
        return draft

    def choose(self, session, found):
        """The Draft among `found` that the others are most like."""
        if len(found) == 1:
            return found[0]
        logps = [token_logps(draft.logits, draft.tokens).mean() for draft in found]
        (logps,) = fetch(torch.stack(logps))
        return found[most_central([draft.tokens for draft in found], logps.tolist())]

    def judge(self, session, draft, seen):
        """(score, whether a signal was clipped) of the step; seen: as accept has it."""

    def accept(self, session, draft, seen):
        """(tokens, labels, judged), one verdict for the step; seen: each token's (logp, grounding)."""
        score, clipped, threshold = None, False, None
        kept = self.tau < 0                             # at -inf or inf nobody looks at the score
        if abs(self.tau) < inf:
            score, clipped = self.judge(session, draft, seen)
            threshold = self.tau
            kept = score >= threshold
        kept = kept and session.may_err(self.most_wrong)
        judged = []
        ids = send(draft.tokens, draft.q.device)[:, None]                                   # [T, 1]
        (each_q,) = fetch(draft.q.gather(1, ids)[:, 0])
        for token, q, (logp, grounding) in zip(draft.tokens, each_q.tolist(), seen):
            judged.append(dict(token=token, p=None, q=q, threshold=threshold, chance=float(kept), kept=kept,
                               score=score, clipped=clipped, logp=logp, grounding=grounding))
        if kept:
            return draft.tokens, ['draft'] * len(draft.tokens), judged
        tokens = self.write(session)
        if session.sparse is None:                      # of several candidates none is in its cache
            end = len(session.tokens) + len(tokens)
            session.own.update(range(len(session.tokens), end))
        return tokens, ['target'] * len(tokens), judged

    def write(self, session):
        """The ids of the step as the target writes it, from the same committed text."""
        if self.regenerate == 'ar':
            return self.choose(session, write_steps(session, self, session.target, self.target_k)).tokens
        written = []
        for cycle in decode(copy.copy(session), Exact(self.gamma)):
            for token in cycle.tokens:
                written.append(token)
                if self.over(session, written):         # what a block holds behind it is dropped unseen
                    return written


@dataclass
class SpecGuard(Stepwise):
    """Judges whole steps by the draft's own grounding and confidence; the target writes what fails. LOSSY.

    score = beta L + (1 - beta) G of the most central of k steps, by its weakest tokens: L = min log q(y_t),
    G = min of attention rollout's share on the text before the step, both on a calibrated scale of 0..1.
    Source: Purohit, Narayanam & Pal 2026 (SpecGuard, "From Tokens to Steps", arXiv 2604.15244).
    """
    beta: float = in_range(None, 0, 1)      # confidence's weight; grounding has the rest
    n_roll: int = in_range(3, 1, 999)       # layers of the rollout
    layers: str = one_of('last', ('last', 'first', 'middle', 'all'))    # which
    sparsify: float = in_range(0.01, 0, 1)  # attention weights below this are dropped
    residual: float = in_range(0.0, 0, 1)   # the identity's share of a layer (Abnar & Zuidema: 0.5)
    combine: str = one_of('weighted', ('weighted', 'and'))      # and: both signals must reach tau
    signals: str = one_of('draft', ('draft', 'target'))     # whose; the target's cost a target pass a step

    def sections(self, config):
        return {'signals'}

    def score(self, session, draft):
        """Each token's signals, from one pass that fills the cache (the target reads the root too)."""
        reader = session.readers()[self.signals]
        path = reader.model.full.grounded(self.layers, self.n_roll, begin=len(session.tokens),
                                          sparsify=self.sparsify, residual=self.residual)
        n = len(draft.tokens)
        if self.signals == 'draft':                     # the root's row is known: the step was drawn from it
            rows = reader.read(session.tokens, draft.tokens, path, n)
            rows = torch.cat([draft.logits[:1], rows])
        else:
            rows = session.read(reader, session.tokens, draft.tokens, path, n + 1)
        expect(path.carry['shades'] is not None, f'the attention of the {self.signals} cannot be read')
        logp = token_logps(rows[:-1], draft.tokens)     # row t predicts token t
        grounding = path.carry['shades'][0].sum(-1)     # [T]
        (seen,) = fetch(torch.stack([logp, grounding.to(logp)], 1))
        return seen.tolist()

    def judge(self, session, draft, seen):
        found = session.calibration['signals']
        ranges = found[f'{self.signals}_logp'], found[f'{self.signals}_grounding']
        return step_score(seen, ranges, self.beta, self.combine)


# ---------------------------------------------------------------------------------- sparse verification

class Blocks(NamedTuple):
    """What sparse attention is told; the knobs of Sparse, and the function that scores blocks."""
    rho: float
    dense_below: int
    block: int
    sinks: int
    locals: int
    query_from: str
    scores: Callable


SELECT = dict(head=(kernels.sparse_attend, kernels.mean_scores))        # name: (attend, scores of blocks)


@dataclass
class Sparse(Exact):
    """Exact speculative decoding whose verifying pass leaves out blocks of keys, channels and experts. LOSSY.

    Set as a Session's `sparse`, it thins out any other method. Off: rho=1 moe_skip=0.
    Source: "Accelerate speculative decoding with sparse computation in verification" (2025). Its "first draft
    token" is our root; its summary has the experts' condition reversed.
    """
    rho: float = in_range(0.25, 0, 1)       # share of the cached tokens beyond dense_below that are read
    dense_below: int = in_range(128, 0)     # L0, cached tokens: up to here attention is dense
    block: int = in_range(16, 1)            # tokens
    sinks: int = in_range(1, 0)             # first blocks, always read, besides the budget
    locals: int = in_range(2, 0)            # last whole blocks, likewise; the partial one behind is free
    select: str = one_of('head', SELECT)    # each key head its own blocks
    query_from: str = one_of('root', ('root', 'last', 'mean'))  # whose query scores them for the pass
    anchors: int = in_range(None, 0)        # layers that choose, 0: every second one; see anchor_layers
    ffn_threshold: float = in_range(0.0, 0)     # a token skips channels whose |silu(gate)| is below
    ffn_quantile: float = in_range(0.0, 0, 1)   # instead, each layer's calibrated threshold for this share
    ffn_share: float = in_range(1.0, 0, 1)  # share of the channels, by the root for a pass, that is read
    moe_skip: int = in_range(1, 0)          # experts that a token may skip, at most
    moe_quantile: float = in_range(0.5, 0, 1)   # beta, of the calibrated shares of the lowest experts
    refresh_every: int = in_range(0, 0)     # cycles from one dense pass to the next; 0: none

    @property
    def lossless(self):
        skipped = self.ffn_threshold or self.ffn_quantile or self.moe_skip
        return self.control.causal and self.rho == self.ffn_share == 1 and not skipped

    def sections(self, config):
        learned = self.anchors or self.ffn_quantile or self.moe_skip and any(config.mixtures)
        return {'sparse'} if learned else set()

    def helpful(self, config):
        return {'sparse'} if self.anchors is None and self.rho < 1 else set()

    def path(self, session):
        return self.view(session.target.model.full, session)

    def view(self, path, session):
        """The path without what the knobs leave out; in every refresh_every-th cycle the path itself."""
        if self.refresh_every and (session.cycles + 1) % self.refresh_every == 0:
            return path
        mixtures = session.target.model.config.mixtures
        measured = session.calibration.get('sparse', {})
        attend, scores = SELECT[self.select]
        heads = self.attention_rules(measured, len(mixtures), scores)
        channels = self.channel_rules(measured, len(mixtures))
        experts = self.expert_rules(measured, mixtures)
        return path.thinned(attend, heads, channels, experts)

    def attention_rules(self, measured, layers, scores):
        """For each layer (its number, whether it chooses blocks, Blocks), or None where all keys are read."""
        if self.rho == 1:
            return (None,) * layers
        blocks = Blocks(self.rho, self.dense_below, self.block, self.sinks, self.locals, self.query_from,
                        scores)
        anchors = self.anchor_layers(measured, layers)
        return tuple((i, i in anchors, blocks) for i in range(layers))

    def anchor_layers(self, measured, layers):
        """The layers that choose blocks; those behind one reuse its choice. measured: section sparse, or {}.

        By default half of the layers, in the order that the calibration found; where there is none, every
        second layer. What a run took is in its last lines.
        """
        count = self.anchors
        if count is None and 'anchors' in measured:
            count = -(-layers // 2)                     # rounded up
        return sorted(measured['anchors'][:count]) if count else list(range(0, layers, 2))

    def channel_rules(self, measured, layers):
        """For each layer (threshold of a token's channels, share that the pass reads), or None for all."""
        rules = []
        for i in range(layers):
            threshold = self.ffn_threshold
            if self.ffn_quantile:
                threshold = at_quantile(measured['channels'][i], self.ffn_quantile)
            sparse = threshold or self.ffn_share < 1
            rules.append((threshold, self.ffn_share) if sparse else None)
        return tuple(rules)

    def expert_rules(self, measured, mixtures):
        """For each layer beta_1, beta_2, ... below which a token's lowest experts are skipped, or None."""
        if not self.moe_skip or not any(mixtures):
            return (None,) * len(mixtures)
        there = 'experts' in measured
        require(there, 'moe_skip', self.moe_skip, '0, or betas: run train_mask.py --anchors')
        rules = []
        for tables in measured['experts']:
            rules.append(tuple(at_quantile(table, self.moe_quantile) for table in tables[:self.moe_skip]))
        return tuple(rules)


def at_quantile(table, share):
    """The entry of a table of evenly spaced quantiles, 0 to 1, that is nearest to this share."""
    return table[round(share * (len(table) - 1))]


METHODS = dict(ar=Autoregressive, sd=Exact, cmasd=CmAsd, ecsv=Ecsv, via=ViaSd, specguard=SpecGuard,
               sparse=Sparse)


# ---------------------------------------------------------------------------------- knobs: names and ranges

def knobs_of(kind):
    """{knob: dataclass field} of a method's class; plain decoding has none. accept_ is the knob accept."""
    return {option.name.rstrip('_'): option for option in fields(kind)}


def require(holds, name, found, expected):
    """ValueError in one line unless the knob's value is in its range."""
    expect(holds, f'knob {name.rstrip("_")} is {found or repr(found)}; expected {expected}')


def check_temperature(name, value):
    good = value in (None, 0) or 1e-6 <= value < inf
    require(good, name, value, '0, or 1e-6 or more')


def ranges_of(kind):
    """{field: its range} of a method's class; a subclass that gives another default keeps the range."""
    found = {}
    for base in reversed(kind.__mro__):
        for name, option in getattr(base, '__dataclass_fields__', {}).items():
            if option.metadata:
                found[name] = option.metadata
    return found


def check_knobs(method):
    """ValueError for the first knob that is out of its range."""
    for name, allowed in ranges_of(type(method)).items():
        value = getattr(method, name)
        if value is None and getattr(type(method), name) is None:
            continue                                    # not set
        if 'words' in allowed:
            good = value in allowed['words']
            expected = f'one of {", ".join(allowed["words"])}'
        else:
            least, greatest = allowed['least'], allowed['greatest']
            good = value is not None and least <= value <= greatest
            expected = f'{least} to {greatest}'
        require(good, name, value, expected)
