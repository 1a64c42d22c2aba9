"""How proposed tokens are verified: maths, nouns, the loop, exact speculative decoding, the five methods.

propose -> score -> accept -> commit is one cycle, and `decode` is the loop. A method is a dataclass whose
fields are its knobs; it overrides only what it changes. Not here: the network (model.py), the baselines that
the methods are compared with (lab/*/baselines.py).

p is the target's distribution and q the draft's; both are what is really sampled from, after temperature,
top-k and top-p. Temperature 0 gives a one-hot distribution, so the exact rule needs no greedy branch.
V vocabulary, n draft tokens of a block, T tokens of a text, B branches, K candidates of a position.
"""
import copy
import math
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
from model import Path, Reader, on_gpu, require_that, shared_length, to_device, to_host


HEAD = 1024     # likeliest tokens among which top-p is looked for first


# --------------------------------------------------------------------------------------------- the maths

def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """logits [..., V] -> the distribution to sample from [..., V], in fp32 at least.

    top_k 0 keeps all; top_p keeps the likeliest tokens up to and including the one that reaches this mass.
    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature < 1e-6:                                      # a division would overflow
        best = z.argmax(-1, keepdim=True)
        return torch.zeros_like(z).scatter_(-1, best, 1.0)
    z = (z - z.amax(-1, keepdim=True)) / temperature            # the largest is 0: nothing overflows
    if 0 < top_k < z.shape[-1]:
        lowest = z.topk(top_k).values[..., -1:]
        z = z.masked_fill(z < lowest, -torch.inf)
    p = z.softmax(-1)
    if top_p < 1:
        ranked, order = sort_head(p, top_p)
        dropped = ranked.cumsum(-1) - ranked >= top_p           # the mass before this token already suffices
        p = torch.zeros_like(p).scatter(-1, order, ranked.masked_fill(dropped, 0))
        p = p / p.sum(-1, keepdim=True)
    return p


def sort_head(p, mass):
    """(chances, ids) of the likeliest tokens of p [..., V], in order, enough to have this mass together.

    A CPU sorts HEAD tokens first: to sort a large vocabulary takes as long as a pass of a draft.
    """
    if not on_gpu(p):
        head = p.topk(min(HEAD, p.shape[-1]))
        if (head.values.cumsum(-1)[..., -1] >= mass).all():
            return head
    return p.sort(-1, descending=True)


def sample(p, generator=None):
    """One index for each row of p [..., V] -> [...], never one of chance 0; p need not sum to 1.

    Looks a uniform number up in the cumulative sums. These are integers, because a float sum depends on the
    order of addition and could give a token of probability 0. The number is drawn on the host for any device,
    so there is one generator and the host does not wait. A one-hot p draws nothing on a CPU.
    """
    if not on_gpu(p) and p.count_nonzero() == p.shape[:-1].numel():
        return p.argmax(-1)
    sums = (p * 2.0 ** 52).cumsum(-1, dtype=torch.long)
    uniform = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)    # below 1
    place = (uniform.to(p.device, non_blocking=True) * sums[..., -1:]).long()           # 0 .. total - 1
    drawn = torch.searchsorted(sums, place, right=True)
    return drawn.clamp(max=p.shape[-1] - 1).squeeze(-1)         # V where p is NaN: check_finite tells


def residual(p, q):
    """What the target has left once min(p, q) is taken: norm(max(p - q, 0)) [..., V], or p if all is taken.

    Source: Leviathan et al. 2023, algorithm 1 (p').
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def token_logps(logits, tokens):
    """log p of each token [T] in nats, of the full vocabulary at temperature 1; logits [T, V]."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ids = to_device(tokens, logits.device)[:, None]                                     # [T, 1]
    return logits.log_softmax(-1, dtype).gather(1, ids)[:, 0]


def check_finite(numbers, who, length):
    """ValueError for NaN or infinity among the largest logits, which would give silent wrong tokens."""
    require_that(math.isfinite(numbers.sum()),
                 f'the {who} computed NaN or infinity after {length} tokens: its weights overflow')


# --------------------------------------------------------------------------------------------- the nouns

@dataclass
class Draft:
    """Guessed tokens and the very distributions they were drawn from (one-hot if they were not drawn)."""
    tokens: list                            # [n] ids
    q: torch.Tensor                         # [n, V]
    logits: torch.Tensor = None             # [n, V] raw, for rules that look at confidence
    known: torch.Tensor = None              # [m, V] first target logits, which ECSV's check has read
    notes: list = None                      # [n] dicts: what proposer and controller say of each token
    options: list = None                    # ids of each of the candidates that it was chosen from

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, and the exact rule keeps x with chance p(x)."""
        ids = to_device(tokens, model.cos.device)[:, None]                                  # [n, 1]
        q = torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0)
        return cls(tokens, q)


class Judged(NamedTuple):
    """What a verifier says of one draft token x."""
    p: float                # p(x), as the run samples
    q: float                # q(x), likewise of the draft
    ratio: float            # p(x) / max p at temperature 1


class Score:
    """A verifier's view of a draft, p [n + 1, V]: **its pass runs when a rule first looks**, or never.

    That is how VIA-SD spares the target: no rule looks at the target's Score where slim decides all.
    """

    def __init__(self, session: 'Session', draft: Draft, path: Path, recovery_distribution=residual):
        """recovery_distribution: function (p, q) -> what a rejected token is replaced from, see Exact."""
        self.session, self.draft, self.path = session, draft, path
        self.recovery_distribution = recovery_distribution
        self.reader = session.target

    @cached_property
    def logits(self):
        """[n + 1, V] raw: row i judges draft token i, the last row gives the bonus token.

        Of n + 1 positions: the root (the last committed token, not read yet) and the draft. The pass reads
        those that are not known, and before them what the cache does not hold for this path.
        """
        known = self.draft.known
        unread = len(self.draft.tokens) + 1 - (0 if known is None else len(known))
        if unread == 0:
            return known
        rows = self.reader.read(self.session.tokens, self.draft.tokens, self.path, unread)
        return rows if known is None else torch.cat([known, rows])

    @cached_property
    def p(self):
        """[n + 1, V], as the run samples."""
        return self.session.probs(self.logits)

    @cached_property
    def table(self):
        """A Judged (p(x), q(x), p(x) / max p) for each of the n draft tokens x, in one transfer.

        The ratio is of the raw logits: at temperature 1 in any run.
        """
        p = self.p
        q = self.draft.q.to(p.dtype)
        z = self.logits.to(p.dtype)
        ids = to_device(self.draft.tokens, p.device)[:, None]                               # [n, 1]
        highest = z.amax(-1, keepdim=True)                                              # [n + 1, 1]
        ratios = (z[:-1].gather(1, ids) - highest[:-1]).exp()
        table = torch.cat([p[:-1].gather(1, ids), q.gather(1, ids), ratios], 1)         # [n, 3]
        if on_gpu(p):                       # draws a next token for each position: no second transfer
            endings = torch.cat([self.recovery_distribution(p[:-1], q), p[-1:]])        # [n + 1, V]
            table, drawn, highest = to_host(table, self.session.draw(endings), highest)
            self.drawn = drawn.tolist()
        check_finite(highest, 'target', len(self.session.tokens))
        return [Judged(*row) for row in table.tolist()]

    def next_token(self, i):
        """The id that ends a cycle at position i: the recovered token for draft token i, or the bonus.

        A CPU draws it now; a device has drawn one for each position already.
        """
        n = len(self.table)
        if on_gpu(self.p):
            return self.drawn[i]
        p = self.p[i]
        return int(self.session.draw(self.recovery_distribution(p, self.draft.q[i]) if i < n else p))


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it."""
    drafted: list           # ids
    judged: list            # of each draft token that was looked at: token, p, q, threshold, chance, kept
    tokens: list            # ids committed
    labels: list            # who wrote them: draft, slim, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions, seconds]
    seconds: float
    notes: dict = field(default_factory=dict)   # see Session.note: what a trace asks for besides

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the next token."""
        return self.labels.count('draft')

    def __str__(self):
        wrote = ', '.join(f'{token} ({label})' for token, label in zip(self.tokens, self.labels))
        passes = ', '.join(f'{n} of {path}' for path, (n, _, _) in self.passes.items())
        return f'{self.accepted} of {len(self.drafted)} drafted tokens kept; wrote {wrote}; passes: {passes}'


def tokens_of(cycles):
    """The ids that the Cycles of one text committed."""
    return [token for cycle in cycles for token in cycle.tokens]


def whole_passes(passes):
    """The target's share of a {reader/path: number}: through all its layers, full or sparse, not slim."""
    return passes.get('target/full', 0) + passes.get('target/sparse', 0)


def cut_at_eos(tokens, eos):
    """The tokens up to the first end of sequence, including it: nothing behind it is ever kept."""
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[:i + 1]
    return tokens


@dataclass
class Session:
    """One text while it is written: its readers, its tokens, how it is sampled (always through draw)."""
    target: Reader
    draft: Reader | None
    proposer: Callable                      # where drafts come from: function (session, Plan) -> Draft
    tokens: list                            # ids, prompt first
    tokens_left: int                        # tokens that may still be committed
    eos: frozenset = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator = None
    text: Callable = None                   # function from ids to text, for methods that work by lines
    calibration: dict = field(default_factory=dict)     # sections of calibration.json, see model.py
    sparse: 'Sparse' = None                 # makes the target's passes sparse, or None
    ended: bool = field(default=False, init=False)
    prompt_seconds: float = field(default=0.0, init=False)

    def __post_init__(self):
        self.begin = len(self.tokens)       # where the text that is written begins

    @cached_property
    def slim_path(self):
        """The target's path without the sublayers that its calibrated mask skips."""
        return self.target.model.full.without(self.calibration['mask']['skip'])

    def readers(self):
        """{role: Reader} of the models that are there."""
        every = dict(target=self.target, draft=self.draft)
        return {role: reader for role, reader in every.items() if reader}

    def read_prompt(self):
        """Reads all of the prompt but its last token into every cache, counted apart as prompt_seconds."""
        mark = self.mark()
        for reader in self.readers().values():
            reader.read(self.tokens[:-1], [], reader.model.full, 0)
        self.prompt_seconds = sum(seconds for *_, seconds in self.spent(mark).values())

    def target_path(self, path=None):
        """The path on which the target verifies: the full or another one, sparse if that was asked for."""
        path = path or self.target.model.full
        return self.sparse.sparse_path(path, self) if self.sparse else path

    def probs(self, logits, temperature=None, top_p=None):
        """The distribution [..., V] that this run, or these settings of a draft, sample from."""
        temperature = self.temperature if temperature is None else temperature
        top_p = self.top_p if top_p is None else top_p
        return probs(logits, temperature, self.top_k, top_p)

    def draw(self, p):
        """A sample from each row of p [..., V] -> [...]."""
        return sample(p, self.generator)

    def flip(self, chance):
        """True with this chance; certain outcomes draw nothing. The coin is drawn on the host."""
        if not 0 < chance < 1:
            return chance >= 1
        return bool(self.draw(torch.tensor([1 - chance, chance], dtype=torch.float64)))

    def commit(self, tokens):
        """Writes tokens, cut at the first end of sequence and at tokens_left; returns them."""
        tokens = cut_at_eos(tokens[:self.tokens_left], self.eos)
        ended = bool(tokens) and tokens[-1] in self.eos
        # in one statement, so an interrupt leaves all of it or nothing
        left = self.tokens_left - len(tokens)
        self.tokens, self.tokens_left, self.ended = self.tokens + tokens, left, ended
        return tokens

    def note(self, method, draft, score, cycle):
        """Called after each cycle with all that it used; lab.page.Traced fills cycle.notes."""

    def mark(self):
        """{role: passes so far} of the readers' logs."""
        return {role: len(reader.log) for role, reader in self.readers().items()}

    def spent(self, mark):
        """{reader/path: [passes, positions, seconds]} since the mark."""
        totals = {}
        for role, reader in self.readers().items():
            for path, row in reader.spent(mark[role]).items():
                totals[f'{role}/{path}'] = row
        return totals


# ---------------------------------------------------------------------------------------------- the loop

def decode(session: Session, method: 'Method'):
    """Yields one Cycle after the other until no tokens are left or the text ends; their list is the trace.

    A method may call it on a copy of the session; each cycle counts its own passes only. After an interrupt
    it can be called again with the same session and method: session.tokens is the text.
    """
    while session.tokens_left and not session.ended:
        begin = time.perf_counter()
        mark = session.mark()
        draft = method.propose(session)
        score = method.score(session, draft)                    # a Score is lazy: no target pass yet
        tokens, labels, judged = method.accept(session, draft, score)
        tokens = session.commit(tokens)
        cycle = Cycle(draft.tokens, judged, tokens, labels[:len(tokens)], session.spent(mark),
                      time.perf_counter() - begin)
        session.note(method, draft, score, cycle)
        method.learn(cycle)
        yield cycle


# -------------------------------------------------------------------------------------- the base of methods

def knob(default, meaning, lowest=-inf, highest=1e9, words=()):
    """A field that users set: a number in a range, or one of these words. What None does, `meaning` says."""
    return field(default=default, metadata=dict(meaning=meaning, lowest=lowest, highest=highest, words=words))


class Method:
    """What decode calls in turn; a method object serves one text. Its fields are its knobs."""
    lossless = False        # whether the text follows the target's distribution exactly, at these knobs

    def propose(self, session: Session) -> Draft:
        """The Draft of this cycle; it may be empty."""

    def score(self, session: Session, draft: Draft) -> Score:
        """What the draft is judged by; a method that judges steps may return something else."""

    def accept(self, session: Session, draft: Draft, score: Score) -> tuple:
        """(ids to commit, who wrote each, a dict for each draft token that was judged)."""

    def learn(self, cycle: Cycle):
        """Called with each finished cycle."""


@dataclass
class Autoregressive(Method):
    """Plain decoding with the target, one token a pass: nothing is drafted, so nothing is judged."""
    lossless = True

    def propose(self, session):
        return Draft([], None)

    def score(self, session, draft):
        return Score(session, draft, session.target.model.full)

    def accept(self, session, draft, score):
        token, highest = to_host(session.draw(score.p), score.logits.amax())
        check_finite(highest, 'target', len(session.tokens))
        return token.tolist(), ['target'], []


CONTROLLERS = {}        # name: class; filled where they stand


@dataclass
class Exact(Method):
    """Exact speculative decoding: whatever the draft, the text follows the target's distribution.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    gamma: int = knob(4, 'draft tokens a cycle, where the controller is fixed', 0)
    draft_temperature: float = knob(None, "of the draft model; None: the run's, 0: greedy drafting", 0)
    controller: str = knob('fixed', 'what ends a block; fixed: after gamma tokens', words=CONTROLLERS)
    draft_top_p = None      # the run's; no knob here, Ecsv makes it one
    lossless = True
    reserved = 1            # of tokens_left, kept free for the token after the block

    def __post_init__(self):
        """ValueError for a knob out of range; methods whose knobs depend on each other check that too."""
        check_knobs(self)
        self.control = CONTROLLERS[self.controller](self)

    def propose(self, session: Session):
        """The Draft of this cycle, as long as the controller and tokens_left allow."""
        n = min(self.control.max_tokens(session), session.tokens_left - self.reserved)
        return self.guess(session, n) if n > 0 else no_draft(session)

    def guess(self, session: Session, n: int):
        """A Draft of at most n tokens, n above 0."""
        return session.proposer(session, self.plan(session, n))

    def plan(self, session, n):
        """How a block of at most n tokens is drafted."""
        to_probs = partial(session.probs, temperature=self.draft_temperature, top_p=self.draft_top_p)
        return Plan(n, to_probs, self.control)

    def score(self, session, draft):
        return Score(session, draft, session.target_path(), self.recovery_distribution)

    def chance(self, score: Score, i: int):
        """The chance that draft token i is kept: min(1, p(x) / q(x))."""
        token = score.table[i]
        return min(1.0, token.p / token.q)

    def threshold(self, score: Score, i: int):
        """What the rule compares draft token i with, for the trace; None where it has no threshold."""
        return None

    def recovery_distribution(self, p, q):
        """The distribution [..., V] of the recovered token; p, q [..., V]: of its position."""
        return residual(p, q)

    def accept(self, session: Session, draft: Draft, score: Score):
        """(tokens, labels, judged) of this cycle, left to right up to a rejection or the end of sequence."""
        judged = []
        for i, token in enumerate(draft.tokens):
            row = score.table[i]
            chance = self.chance(score, i)
            kept = session.flip(chance)
            note = draft.notes[i] if draft.notes else {}
            judged.append(dict(token=token, p=row.p, q=row.q, threshold=self.threshold(score, i),
                               chance=chance, kept=kept, **note))
            if not kept:
                return draft.tokens[:i] + [score.next_token(i)], ['draft'] * i + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        return draft.tokens + [score.next_token(n)], ['draft'] * n + ['bonus' if n else 'target'], judged

    def learn(self, cycle):
        self.control.learn(cycle)


# ------------------------------------------------------------------------------- where drafts come from

class Plan(NamedTuple):
    """How a block is drafted."""
    n: int                  # tokens at most
    to_probs: Callable      # function from raw logits [..., V] to the distribution that is sampled
    control: 'Controller'   # ends it earlier


class Branches(NamedTuple):
    """Continuations of one text, sampled side by side."""
    tokens: torch.Tensor    # [B, n]
    q: torch.Tensor         # [B, n, V]
    logits: torch.Tensor    # [B, n, V] raw
    notes: list             # [n] dicts: what the controller said of each step
    ends: dict              # branch: how many of its tokens count, where it ended early

    def lines(self, session: Session, who='draft'):
        """The ids of each branch, up to its end: one transfer. who: wrote them."""
        tokens, highest = to_host(self.tokens, self.logits.amax())
        check_finite(highest, who, len(session.tokens))
        lines = [ids[:self.ends.get(row)] for row, ids in enumerate(tokens.tolist())]
        return [cut_at_eos(ids, session.eos) for ids in lines]


def draft_model(session: Session, plan: Plan, reader: Reader = None, path: Path = None):
    """A Draft from the draft model, or this reader on this path, one token after the other.

    Without a draft model the target drafts for itself on its slim path (Zhang et al. 2023, Draft & Verify).
    """
    reader = reader or session.draft or session.target
    path = path or (reader.model.full if session.draft else session.target_path(session.slim_path))
    branches = sample_branches(session, reader, path, 1, plan)
    (ids,) = branches.lines(session)
    n = len(ids)
    # the last token was not fed: the next read feeds it
    reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
    return Draft(ids, branches.q[0, :n], branches.logits[0, :n], notes=branches.notes[:n])


def sample_branches(session: Session, reader: Reader, path: Path, rows: int, plan: Plan, is_ended=None):
    """Branches behind the text, `rows` of them, until the plan or all of them end.

    is_ended: function of a branch's ids; by default at an end of sequence, which is not looked for on a
    device. A single branch is written in the reader's own cache.
    """
    logits = [reader.read(session.tokens, [], path, 1).expand(rows, -1)]        # of each step [rows, V]
    twin = reader.fork(rows) if rows > 1 else reader
    q = []
    tokens = []
    notes = []
    ends = {}
    check_ends = is_ended or not on_gpu(logits[0])
    is_ended = is_ended or (lambda ids: ids[-1] in session.eos)
    while True:
        q.append(plan.to_probs(logits[-1]))
        tokens.append(session.draw(q[-1]))
        notes.append(plan.control.note(tokens[-1], logits[-1]))
        if len(tokens) == plan.n or not plan.control.keep_drafting(session, notes):
            break
        if check_ends:
            for row, ids in enumerate(torch.stack(tokens, 1).tolist()):
                if row not in ends and is_ended(ids):
                    ends[row] = len(ids)
        if len(ends) == rows:
            break
        logits.append(twin.append(tokens[-1], path))
    return Branches(torch.stack(tokens, 1), torch.stack(q, 1), torch.stack(logits, 1), notes, ends)


def prompt_lookup(session: Session, plan: Plan):
    """What followed the last earlier occurrence of the text's last 3 tokens, else 2. Source: Saxena 2023."""
    text = torch.tensor(session.tokens)
    for size in (3, 2):
        if len(text) > size:
            windows = text[:-1].unfold(0, size, 1)                              # [positions, size]
            matches = (windows == text[-size:]).all(1).nonzero()
            if len(matches):
                begin = int(matches[-1]) + size
                return Draft.points(session.tokens[begin:begin + plan.n], session.target.model)
    return no_draft(session)


def lookup_then_draft(session: Session, plan: Plan):
    """A Draft that is looked up in the text, or the draft model's where nothing is found."""
    draft = prompt_lookup(session, plan)
    return draft if draft.tokens else draft_model(session, plan)


def no_draft(session: Session, plan=None):
    """No draft at all: the cycle is one step of plain decoding."""
    return Draft.points([], session.target.model)


def need_draft_model(session, what):
    """ValueError where drafts are looked up: this method needs distributions of a draft model."""
    require_that(session.draft and session.proposer is draft_model,
                 f'{what} come from a draft model: give --draft DIR, without --lookup')


# ------------------------------------------------------------------------- how long a block may become

class Controller:
    """Ends a block: here after gamma tokens. It stops before the next is sampled, so the text stays exact."""
    takes_gamma = True          # whether the method's gamma says how long blocks are, at least the first

    def __init__(self, method):
        """method: the one whose blocks it ends, for its knobs."""
        self.gamma = method.gamma

    def max_tokens(self, session: Session):
        """The most tokens that the next block may have."""
        return self.gamma

    def note(self, tokens, logits):
        """A dict for keep_drafting and the trace, of a step's tokens [rows] and raw logits [rows, V]."""
        return {}

    def keep_drafting(self, session: Session, notes: list):
        """Whether to draft another token, by the notes on the block alone."""
        return True

    def learn(self, cycle: Cycle):
        """Called with each finished cycle."""


CONTROLLERS.update(fixed=Controller)        # online is CM-ASD's; lab/cmasd/baselines.py has more


# --------------------------------------------------------------- CM-ASD: confidence-modulated drafting

def confidence_signals(logits):
    """Three signs of confidence in 0..1, a tuple for each row of raw logits [n, V] at temperature 1.

    1 - H / log V; tanh(logit margin / 2), which is (q1 - q2) / (q1 + q2); q1 - q2. In plain Python once V is
    reduced, because a tensor operation on a few numbers costs as much as one on a thousand.
    Source: Sen et al. 2025 (CM-ASD) name the three; how the first two are scaled to 0..1 is ours.
    """
    logq = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    negentropy = (logq.exp() * logq).sum(-1, keepdim=True)                              # [n, 1] nats
    (numbers,) = to_host(torch.cat([negentropy, logq.topk(2).values], -1))
    signals = []
    for nats, first, second in numbers.tolist():
        certainty = min(1.0, max(0.0, 1 + nats / math.log(logits.shape[-1])))
        margin = math.tanh((first - second) / 2)
        signals.append((certainty, margin, math.exp(first) - math.exp(second)))
    return signals


class Online(Controller):
    """CM-ASD's window, for any method: a block ends at the length that its mean confidence allows."""
    takes_gamma = False

    def __init__(self, method):
        super().__init__(method)
        self.knobs = method if isinstance(method, CmAsd) else CmAsd     # the class has the defaults

    def max_tokens(self, session):
        return self.knobs.k_max

    def note(self, tokens, logits):
        return dict(confidence=fmean(confidence(logits, self.knobs)))       # over all rows

    def keep_drafting(self, session, notes):
        sure = fmean(note['confidence'] for note in notes)
        return len(notes) < block_length(sure, self.knobs)


CONTROLLERS.update(online=Online)


def confidence(logits, knobs):
    """C in 0..1 of each row of raw logits [n, V]: the signals' mean, weighted by a CmAsd's knobs."""
    weights = knobs.lam_entropy, knobs.lam_margin, knobs.lam_softmax
    found = []
    for signals in confidence_signals(logits):
        found.append(sum(weight / sum(weights) * signal for weight, signal in zip(weights, signals)))
    return found


def block_length(confidence, knobs):
    """The block length that a mean confidence allows, by a CmAsd's knobs; ValueError if it is NaN."""
    require_that(not math.isnan(confidence), 'the draft computed NaN or infinity: its weights overflow')
    return min(knobs.k_max, max(knobs.k_min, math.floor(knobs.alpha * confidence * knobs.k_max)))


@dataclass
class CmAsd(Exact):
    """CM-ASD: the draft's confidence C sets how much is drafted and how strictly it is judged. LOSSY.

    The paper does not say which quantity its threshold tau bounds. We take p(x) / max p >= tau on raw logits
    at temperature 0, and at higher ones the chance min(1, p / (tau q)); tau_base = 1 is exact in both. The
    window (the length of a block) averages C over the block so far, so no token is dropped unverified.
    Source: Sen et al. 2025 (arXiv 2508.15371), window and threshold; Xia et al. 2023 (SpecDec), the ratio.
    """
    controller: str = knob('online', 'what ends a block; online: the window of confidence', words=CONTROLLERS)
    k_min: int = knob(1, 'tokens of the shortest block (the paper states no values)', 1)
    k_max: int = knob(10, 'tokens of the longest block (the paper states no values)', 1)
    alpha: float = knob(1.0, 'block length over confidence', 0)
    lam_entropy: float = knob(1.0, 'weight of the entropy in C; the three are scaled to sum 1', 0)
    lam_margin: float = knob(1.0, 'weight of the logit margin in C', 0)
    lam_softmax: float = knob(1.0, 'weight of the margin of q in C', 0)
    tau_base: float = knob(0.3, 'threshold where C = 1; 1: exact', 0)
    gamma_tau: float = knob(0.5, 'what is added to it where C = 0 (the paper states no values)', 0)

    def __post_init__(self):
        super().__post_init__()
        require_knob(self.k_min <= self.k_max, 'k_min', self.k_min, f'1 to k_max, {self.k_max}')
        weights = self.lam_entropy + self.lam_margin + self.lam_softmax
        require_knob(weights > 0, 'lam_entropy', 0.0, 'above 0 where the other two are 0')

    @property
    def lossless(self):
        return self.tau_base >= 1

    def propose(self, session):
        need_draft_model(session, "cmasd's confidences")
        draft = super().propose(session)
        if draft.tokens and 'confidence' not in draft.notes[0]:         # another controller
            for note, sure in zip(draft.notes, confidence(draft.logits, self)):
                note['confidence'] = sure
        return draft

    def threshold(self, score, i):
        """tau of draft token i: the surer the draft, the more is forgiven."""
        tau = self.tau_base + self.gamma_tau * (1 - score.draft.notes[i]['confidence'])
        return min(1.0, max(0.01, tau))

    def chance(self, score, i):
        tau = self.threshold(score, i)
        token = score.table[i]
        if score.session.temperature:
            return min(1.0, token.p / (tau * token.q))
        matched = tau < 1 or token.p > 0                # tau = 1: the argmax itself, not a tie
        return float(token.ratio >= tau and matched)


# ------------------------------------------------------------- ECSV: reliability-weighted voting of branches

SOFT_CANDIDATES = 4     # beside the branches' own tokens, where branches vote with whole distributions


@dataclass
class Ballot:
    """What B branches of n tokens say of K candidates a position; at temperature 1, on the CPU, in fp64."""
    tokens: torch.Tensor                    # [B, n] ids
    entropy: torch.Tensor                   # [B, n] H(q) over log V, so 0..1
    logq: torch.Tensor                      # [B, n] of the branch's own token, nats
    candidates: torch.Tensor                # [n, K] ids: the branches' tokens, then the likeliest
    q: torch.Tensor                         # [B, n, K] q of the candidates
    margins: torch.Tensor                   # [B, n] the target's logit less its best other token's; else 0
    verifier: dict = field(default_factory=dict)    # position: the target's logits [K], where it was asked

    @classmethod
    def of(cls, tokens, logits, soft):
        """From tokens [B, n] and raw logits [B, n, V]; soft: whether there are other candidates."""
        B, n, V = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        q = logits.softmax(-1, dtype)
        logq = logits.log_softmax(-1, dtype)
        entropy = -(q * logq).sum(-1) / math.log(V)                                 # [B, n]
        candidates = tokens.T                                                       # [n, B]
        if soft:
            top = q.sum(0).topk(min(SOFT_CANDIDATES, V)).indices                    # [n, M]
            candidates = torch.cat([candidates, top], -1)
        q = q.gather(-1, candidates.expand(B, n, -1))                               # [B, n, K]
        logq = logq.gather(-1, tokens[..., None])[..., 0]                           # [B, n]
        tokens, entropy, logq, candidates, q = to_host(tokens, entropy, logq, candidates, q)
        margins = torch.zeros(B, n, dtype=torch.float64)
        return cls(tokens, entropy.double(), logq.double(), candidates, q.double(), margins)

    def votes(self):
        """[B, n] how many branches have this branch's token at this position, itself included."""
        return (self.tokens[:, None] == self.tokens).sum(1)

    def doubtful(self, count, reach):
        """At most `count` positions below `reach` where the branches disagree most, ascending."""
        doubt = 1 - self.votes().double().amax(0) / len(self.tokens)                # [n]
        ranked, order = doubt[:reach].sort(descending=True, stable=True)
        return sorted(order[ranked > 0][:count].tolist())

    def ask(self, rows, chosen):
        """Notes what the target's logits [m, V] say of the candidates at the chosen positions."""
        rows = rows.double().cpu()
        for j in chosen:
            (best, second), (favourite, _) = rows[j].topk(2)
            tokens = self.tokens[:, j]                                              # [B]
            rival = torch.where(tokens == favourite, second, best)
            self.margins[:, j] = rows[j][tokens] - rival
            self.verifier[j] = rows[j][self.candidates[j]].tolist()

    def elect(self, scores):
        """The tokens [n] with the highest sums of scores [B, n, K].

        Ties go to the verifier's logit where it was asked, else to mean q, then to the lowest id. The sums
        are exact and in plain Python, which is faster on so few numbers: the order of branches has no say.
        """
        totals = sums_of(scores)
        tie_breaks = sums_of(self.q)
        elected = []
        for j, ids in enumerate(self.candidates.tolist()):
            tie_break = self.verifier.get(j, tie_breaks[j])
            ranks = list(zip(totals[j], tie_break, [-token for token in ids]))
            elected.append(ids[ranks.index(max(ranks))])
        return elected


def sums_of(table):
    """[n][K] exact sums over the branches of a table [B, n, K]."""
    return [[math.fsum(numbers) for numbers in zip(*rows)] for rows in zip(*table.tolist())]


@dataclass
class Ecsv(Exact):
    """ECSV: several drafted branches vote, weighted by their reliability; the elected block is verified.

    A fused token has a point mass as q: the exact rule is sample-and-match, the text the target's. Positions
    behind a mismatch are wasted. With `spots`, the target checks positions before a second vote: positions of
    the check + positions that it leaves to be read <= budget. What a cycle leaves of the budget pays for one
    more check in the next. Of the features the entropy is over log V, the margin is to the best other token;
    nothing else is scaled, because an offset cancels in a vote, and the weight sets the scale.
    Source: "Error-Correcting Speculative Decoding via Branch Voting", a model-written proposal
    (github.com/keithballinger/dialectica, 2025) without code.
    """
    draft_temperature: float = knob(0.8, 'of the branches (the proposal states no values)', 0)
    draft_top_p: float = knob(0.95, 'top-p of the branches', 1e-9, 1)
    branches: int = knob(4, 'branches B that vote; to be tried: 2, 4, 8', 1, 64)
    a_entropy: float = knob(0.5, 'weight of the entropy over log V in r, subtracted', 0)
    a_agree: float = knob(1.0, 'weight of the agreement with other branches in r', 0)
    a_self: float = knob(0.5, "weight of the branch's own log q in r", 0)
    a_spot: float = knob(0.0, "weight of the target's logit margin in r, where it was asked", 0)
    gamma_r: float = knob(1.0, 'w = exp(gamma_r r); 0: every vote counts the same', 0)
    soft: float = knob(0.0, 'weight of a vote by the whole q', 0)
    spots: int = knob(0, 'positions checked with the target before the final vote', 0)
    budget: int = knob(None, 'target positions a cycle at most; None: those of the block', 2)

    def __post_init__(self):
        self.unused = 0                     # of the last cycle's budget
        super().__post_init__()

    def guess(self, session, n):
        """The fused Draft: branches, a vote, perhaps a check of some positions and a second vote."""
        if self.budget:
            n = min(n, self.budget - 1)
        texts = self.texts(session, n)
        ballot = Ballot.of(texts.tokens, texts.logits, self.soft > 0)
        check_finite(ballot.entropy, 'draft', len(session.tokens))
        fused = cut_at_eos(self.fuse(ballot), session.eos)
        budget = self.budget or texts.tokens.shape[1] + 1
        spots = self.spots
        if spots and self.budget and self.unused > 0:
            spots += 1
        chosen = ballot.doubtful(spots, min(len(fused), budget - 1))
        known = None
        used = len(fused) + 1
        if chosen:
            fused, known, used = self.recheck(session, ballot, fused, chosen, budget)
        self.unused = budget - used
        self.ballot = ballot                # for a trace of the votes
        draft = Draft.points(fused, session.target.model)
        draft.known = known
        draft.logits = texts.logits.mean(0)[:len(fused)]
        draft.notes = [dict(branches=column) for column in ballot.tokens.T.tolist()]
        return draft

    def recheck(self, session, ballot, fused, chosen, budget):
        """(the block [n] of a second vote, the target's rows that stay right, the positions that both take).

        To verify position j, a pass reads all positions before it: the check reads up to the last chosen one.
        Its rows stay right as far as the second vote elects the same tokens as the first. What is elected
        behind them is read later, and cut so that len(rows) + len(elected) - same <= budget.
        """
        checked = fused[:chosen[-1]]
        rows = Score(session, Draft(checked, None), session.target_path()).logits      # [m, V]
        ballot.ask(rows, chosen)
        check_finite(ballot.margins, 'target', len(session.tokens))
        elected = cut_at_eos(self.fuse(ballot), session.eos)
        same = shared_length(checked, elected)
        elected = elected[:budget - len(rows) + same]
        return elected, rows[:same + 1], len(rows) + len(elected) - same

    def texts(self, session, n):
        """The Branches that vote."""
        need_draft_model(session, 'branches')
        reader = session.draft
        return sample_branches(session, reader, reader.model.full, self.branches, self.plan(session, n))

    def weights(self, ballot):
        """w [B, n], above 0: exp(gamma_r r) of r = -a H + a agreement + a log q(own) + a margin."""
        others = max(1, len(ballot.tokens) - 1)
        agreement = (ballot.votes().double() - 1) / others                          # with the other branches
        r = (self.a_agree * agreement - self.a_entropy * ballot.entropy
             + self.a_self * ballot.logq + self.a_spot * ballot.margins)             # [B, n]
        return (self.gamma_r * r).clamp(-20, 20).exp()

    def fuse(self, ballot):
        """The fused tokens [n]."""
        voted = ballot.tokens[..., None] == ballot.candidates                       # [B, n, K]
        return ballot.elect(self.weights(ballot)[..., None] * (voted + self.soft * ballot.q))


# ----------------------------------------------------------------------- VIA-SD: a slim verifier in between

def violation(b, a, alpha=0.5, beta=0.5):
    """R(b|a) [...] in nats: how far drafting from a breaks what lossy verification by b forgives.

    a, b: log-probabilities [..., V] of the raw logits. The first term counts tokens that b accepts too
    rarely, the second tokens that its residual lacks. alpha 0, beta 1: exact; 1/2, 1/2: forgives a factor 2.
    Source: VIA-SD (2026), R_KL^{alpha,beta}, as its public reimplementations write it.
    """
    d = a - b
    refused = a.exp() * (d + math.log1p(-alpha)).clamp(min=0)
    starved = b.exp() * (d + math.log(beta)).clamp(min=0)
    return (refused + starved).sum(-1)


@dataclass
class ViaSd(Exact):
    """VIA-SD: slim, the target without some sublayers, judges first; the target what slim doubts. LOSSY.

    With r = s(y) / max s of a draft token y, s being slim's distribution:
    * r >= keep: slim keeps y;
    * escalate <= r < keep: slim writes a token of its own in its place, and the cycle ends;
    * r < escalate: the target decides, and judges the rest of the block, too, because its pass is paid.
    In that pass, or once slim is more than max_lag tokens ahead, the target reads what slim kept, and
    overwrites slim's keys in their shared cache. A block that slim kept ends with slim's own next token (the
    paper is silent): at temperature 0 it would pass.
    Source: VIA-SD (2026); its p, q', q are our q, s, p, its alpha_1 and alpha_2 keep and escalate.
    """
    gamma: int = knob(5, 'draft tokens a cycle', 0)
    keep: float = knob(0.5, 'r from which a draft token stays', 0)
    escalate: float = knob(0.3, 'r below which the target decides; above 1 it always does', 0)
    max_lag: int = knob(32, 'tokens that slim may build on before the target has read them', 0)
    slim_bonus: bool = knob(True, "whether a block that slim kept ends with slim's next token")
    reserved = 0            # a block may use all tokens left: one that the cycle adds is then cut

    def __post_init__(self):
        super().__post_init__()
        require_knob(self.escalate <= self.keep, 'keep', self.keep, f'escalate, {self.escalate}, to inf')

    @property
    def lossless(self):
        return self.escalate > 1

    def propose(self, session):
        own = session.proposer is draft_model and not session.draft
        require_that(not own, 'slim would judge its own drafts: give --draft DIR, or another method')
        return super().propose(session)

    def slim_score(self, session, draft):
        """The Score of the middle stage, whose own distribution is drawn from after a rejection."""
        return Score(session, draft, session.target_path(session.slim_path), lambda s, q: s)

    def accept(self, session, draft, score):
        if not draft.tokens:
            return super().accept(session, draft, score)
        committed = session.tokens[:-1]
        reader = session.target
        if len(committed) - reader.cache.valid_prefix(committed, score.path) > self.max_lag:
            reader.read(committed, [], score.path, 0)           # slim is too far ahead
        slim = judge = self.slim_score(session, draft)
        judged = []
        for i, token in enumerate(draft.tokens):
            ratio = slim.table[i].ratio
            if ratio < self.escalate:
                judge = score
            note = draft.notes[i] if draft.notes else {}
            row = dict(token=token, p=None, q=slim.table[i].q, ratio=ratio, threshold=self.keep, by='slim',
                       chance=float(ratio >= self.keep), **note)
            if judge is score:
                row |= dict(p=score.table[i].p, threshold=None, by='target', chance=self.chance(score, i))
            chosen = token if session.flip(row['chance']) else judge.next_token(i)
            judged.append(row | dict(kept=chosen == token))     # slim may draw the same token again
            if chosen != token:
                return draft.tokens[:i] + [chosen], ['draft'] * i + [row['by']], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        if judge is slim and not self.slim_bonus:
            return draft.tokens, ['draft'] * n, judged
        label = 'slim' if judge is slim else 'bonus'
        return draft.tokens + [judge.next_token(n)], ['draft'] * n + [label], judged


# ------------------------------------------------------------------------ SpecGuard: whole steps verified

STEP_ENDS = dict(   # kinds of steps: (pattern of a word and an end, tokens at most)
    line=(r'\w.*\n', 64), paragraph=(r'(?s)\w.*\n[ \t]*\n', 128),
    sentence=(r'\w.*(\n|((?<!\d)\.|[!?])["\')\]*]*\s*\Z)', 64))      # 3. may go on as 3.5: no end


@dataclass
class SpecGuard(Method):
    """SpecGuard: steps are judged by the draft's confidence and grounding; the target rewrites some. LOSSY.

    The draft writes k steps, the most central one is judged: score = beta L + (1 - beta) G by its weakest
    tokens. L = min log q(y_t) at temperature 1, G = min of attention rollout's share on the text before the
    step, both on a calibrated scale of 0..1. Below tau the target writes the step.
    Source: Purohit, Narayanam & Pal 2026 (SpecGuard, "From Tokens to Steps", arXiv 2604.15244).
    """
    gamma: int = knob(0, 'draft tokens a cycle where the target writes; 0: it writes alone', 0)
    k: int = knob(4, 'candidates of the draft', 1, 256)
    draft_temperature: float = knob(0.7, "of the candidates, whatever the run's", 0)
    draft_top_p: float = knob(1.0, 'top-p of the candidates', 1e-9, 1)
    beta: float = knob(0.5, 'weight of confidence; grounding has the rest', 0, 1)
    tau: float = knob(0.5, 'score that a step needs; inf: the target writes all steps', -inf, inf)
    delimiter: str = knob(r'\n', f'text that ends a step, or one of {", ".join(STEP_ENDS)}')
    max_step: int = knob(None, 'tokens of a step; None: 48, or as its kind has it', 1, 999)
    n_roll: int = knob(3, 'last layers of the rollout', 1, 999)
    sparsify: float = knob(0.01, 'attention weights below this are dropped', 0, 1)
    target_k: int = knob(1, 'candidates of the target where it writes', 1, 256)
    target_temperature: float = knob(None, "of these if they are several; None: the run's", 0)
    target_top_p: float = knob(None, "top-p of these; None: the run's", 1e-9, 1)

    def __post_init__(self):
        check_knobs(self)
        require_knob(self.delimiter, 'delimiter', 'empty', r'what ends a step, say \n')
        require_knob(self.target_k == 1 or not self.gamma, 'target_k', self.target_k, '1 with gamma above 0')

    @property
    def lossless(self):
        return self.tau == inf and self.target_k == 1

    def longest(self, session):
        """The most tokens that a step may have here."""
        _, most = STEP_ENDS.get(self.delimiter, (None, 48))
        return min(self.max_step or most, session.tokens_left)

    def is_ended(self, session, ids):
        """Whether ids, behind the committed text, are a whole step; leading blanks belong to it.

        A step has its delimiter behind something that is not blank. A kind of step ends behind a word, so a
        line of brackets alone is no step.
        """
        text = session.text(ids)
        pattern, _ = STEP_ENDS.get(self.delimiter, (None, 48))
        if ids[-1] in session.eos:
            return True
        if pattern:
            return re.search(pattern, text) is not None
        return self.delimiter.replace(r'\n', '\n') in text.lstrip()

    def propose(self, session):
        need_draft_model(session, 'steps')
        to_probs = partial(session.probs, temperature=self.draft_temperature, top_p=self.draft_top_p)
        path = session.draft.model.full
        return self.choose(self.write_steps(session, session.draft, path, to_probs, self.k))

    def write_steps(self, session, reader, path, to_probs, k):
        """k Drafts of one step each, sampled by `reader`. to_probs: as Plan has it."""
        plan = Plan(self.longest(session), to_probs, Controller(self))
        branches = sample_branches(session, reader, path, k, plan, partial(self.is_ended, session))
        lines = branches.lines(session, 'draft' if reader is session.draft else 'target')
        if k == 1:
            reader.cache.record(session.tokens + lines[0][:-1], len(session.tokens), path)
        rows = zip(lines, branches.q, branches.logits)
        return [Draft(ids, q[:len(ids)], logits[:len(ids)]) for ids, q, logits in rows]

    def choose(self, drafts):
        """The Draft that the others are most like; its options are the ids of all."""
        if len(drafts) == 1:
            return drafts[0]
        texts = [draft.tokens for draft in drafts]
        logps = [token_logps(draft.logits, draft.tokens).mean() for draft in drafts]
        (logps,) = to_host(torch.stack(logps))
        chosen = drafts[most_central(texts, logps.tolist())]
        chosen.options = texts
        return chosen

    def score(self, session, draft):
        """Each token's signals (log-probability, grounding), from one pass that fills the draft's cache."""
        reader = session.draft
        path = reader.model.full.grounded(self.n_roll, len(session.tokens), self.sparsify)
        rows = reader.read(session.tokens, draft.tokens, path, len(draft.tokens))
        rows = torch.cat([draft.logits[:1], rows[:-1]])     # row t predicts token t
        logp = token_logps(rows, draft.tokens)
        grounding = path.carry['rollout'][0].sum(-1)        # [T]
        (seen,) = to_host(torch.stack([logp, grounding.to(logp)], 1))
        return seen.tolist()

    def judge(self, session, draft, seen):
        """The score of the step; seen: as score has it."""
        signals = session.calibration['signals']
        return step_score(seen, (signals['draft_logp'], signals['draft_grounding']), self.beta)

    def accept(self, session, draft, seen):
        """(tokens, labels, judged), one verdict for the step."""
        score = threshold = None
        kept = self.tau < 0                             # at -inf or inf the score is not needed
        if abs(self.tau) < inf:
            score = self.judge(session, draft, seen)
            threshold = self.tau
            kept = score >= threshold
        judged = []
        ids = to_device(draft.tokens, draft.q.device)[:, None]                          # [T, 1]
        (each_q,) = to_host(draft.q.gather(1, ids)[:, 0])
        for token, q, (logp, grounding) in zip(draft.tokens, each_q.tolist(), seen):
            judged.append(dict(token=token, p=None, q=q, threshold=threshold, chance=float(kept), kept=kept,
                               score=score, logp=logp, grounding=grounding))
        tokens = draft.tokens if kept else self.write(session)
        return tokens, ['draft' if kept else 'target'] * len(tokens), judged

    def write(self, session):
        """The ids of the step as the target writes it, from the same committed text."""
        if not self.gamma:
            to_probs = session.probs
            if self.target_k > 1:                       # samples at temperature 0 would all be alike
                to_probs = partial(to_probs, temperature=self.target_temperature, top_p=self.target_top_p)
            path = session.target_path()
            steps = self.write_steps(session, session.target, path, to_probs, self.target_k)
            return self.choose(steps).tokens
        written = []
        for cycle in decode(copy.copy(session), Exact(self.gamma)):
            for token in cycle.tokens:
                written.append(token)
                if len(written) == self.longest(session) or self.is_ended(session, written):
                    return written              # the rest of the block is dropped unseen


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


def step_score(seen, ranges, beta):
    """The score 0..1 of a step by its weakest tokens.

    seen [T]: (log-probability, grounding) of each token; ranges: (low, high) of either, which become 0 and 1.
    """
    unit = []
    for values, (low, high) in zip(zip(*seen), ranges):
        scaled = (min(values) - low) / max(high - low, 1e-6)
        unit.append(min(1.0, max(0.0, scaled)))
    confidence, grounding = unit
    return beta * confidence + (1 - beta) * grounding


# ---------------------------------------------------------------------------------- sparse verification

class Blocks(NamedTuple):
    """What sparse attention needs: knobs of Sparse."""
    rho: float
    dense_below: int
    block: int
    sinks: int
    locals: int
    scores: Callable = kernels.mean_scores      # function (query, keys, mean keys) -> scores of the blocks


@dataclass
class Sparse(Exact):
    """Sparse verification: the verifying pass leaves out blocks of keys, channels and experts. LOSSY.

    Set as a Session's `sparse`, it does so under any method that drafts. Dense with rho=1 moe_skip=0,
    as long as ffn_quantile is 0.
    Source: "Accelerate speculative decoding with sparse computation in verification" (2025). The
    paper's "first draft token" is our root; the notes on it state the experts' condition the wrong way round.
    """
    rho: float = knob(0.25, 'share of the cached tokens beyond dense_below that is read', 0, 1)
    dense_below: int = knob(128, 'cached tokens L0 up to which attention is dense', 0)
    block: int = knob(16, 'tokens of a block', 1)
    sinks: int = knob(1, 'first blocks, always read, besides the budget', 0)
    locals: int = knob(2, 'last whole blocks, always read, too', 0)
    anchors: int = knob(None, 'layers that choose blocks; 0: every second one, None: half, as calibrated', 0)
    ffn_quantile: float = knob(0.0, "share of channels left out by calibrated thresholds; experts' too", 0, 1)
    moe_skip: int = knob(1, 'experts that a token may skip, at most', 0)
    moe_quantile: float = knob(0.5, 'beta, of the calibrated shares of the lowest experts', 0, 1)
    scores = staticmethod(kernels.mean_scores)          # by which layers choose blocks

    @property
    def lossless(self):
        return self.rho == 1 and not self.ffn_quantile and not self.moe_skip

    @property
    def blocks(self):
        return Blocks(self.rho, self.dense_below, self.block, self.sinks, self.locals, self.scores)

    def propose(self, session):
        session.sparse = self           # for every pass of the target that drafts or verifies
        return super().propose(session)

    def sparse_path(self, path, session):
        """The path without what the knobs leave out."""
        mixtures = session.target.model.config.mixtures
        layers = len(mixtures)
        heads = channels = experts = (None,) * layers
        if self.rho < 1:
            anchors = self.anchor_layers(session.calibration, layers)
            heads = tuple((i, i in anchors, self.blocks) for i in range(layers))
        if self.ffn_quantile:
            tables = session.calibration['sparse']['channels']
            there = len(tables) == layers and all(len(table) > 1 for table in tables)
            require_knob(there, 'ffn_quantile', self.ffn_quantile, '0: calibration.json has no thresholds of '
                         'experts; train_mask.py --anchors measures them')
            channels = tuple(at_quantile(table, self.ffn_quantile) for table in tables)
        if (self.moe_skip or self.ffn_quantile) and any(mixtures):
            experts = []
            for E, tables in zip(mixtures, session.calibration['sparse']['experts'], strict=True):
                betas = tuple(at_quantile(table, self.moe_quantile) for table in tables[:self.moe_skip])
                experts.append(betas if E else None)
        return path.sparsified(heads, channels, tuple(experts))

    def skips_nothing(self, length, mixtures):
        """Whether passes over a text of this length leave nothing out; mixtures: see Config."""
        keys = kernels.kept_blocks(length, self.blocks) < length // self.block
        return not (keys or self.ffn_quantile or self.moe_skip and any(mixtures))

    def anchor_layers(self, calibration, layers):
        """The layers that choose blocks; the layers behind one reuse its choice.

        By default half of the layers, in the calibrated order, or every second layer without one.
        """
        count = self.anchors
        if count is None and 'sparse' in calibration:
            count = -(-layers // 2)                     # rounded up
        return sorted(calibration['sparse']['anchors'][:count]) if count else list(range(0, layers, 2))


def at_quantile(table, share):
    """The entry of a table of evenly spaced quantiles, 0 to 1, that is nearest to this share."""
    return table[round(share * (len(table) - 1))]


METHODS = dict(ar=Autoregressive, sd=Exact, cmasd=CmAsd, ecsv=Ecsv, via=ViaSd, specguard=SpecGuard,
               sparse=Sparse)


# ---------------------------------------------------------------------------------- knobs: names and ranges

def knobs_of(kind):
    """{knob: dataclass field} of a method's class; plain decoding has none."""
    return {option.name: option for option in fields(kind)}


def has_knob(name, knob, settings=()):
    """Whether a method has this knob, and `gamma` a meaning for the controller that --set asks for."""
    knobs = knobs_of(METHODS[name])
    if knob == 'gamma' and 'controller' in knobs:
        asked = dict(item.split('=', 1) for item in settings if '=' in item)
        controller = asked.get('controller', knobs['controller'].default)
        return CONTROLLERS.get(controller, Controller).takes_gamma
    return knob in knobs


def require_knob(holds, name, found, expected):
    """ValueError in one line unless the knob's value is in its range."""
    require_that(holds, f'knob {name} is {found or repr(found)}; expected {expected}')


def knob_range(option):
    """The values that a knob may have, in words; '' where any text or number will do."""
    allowed = option.metadata
    if allowed.get('words'):
        return ', '.join(allowed['words'])
    if option.type not in (int, float) or not allowed or allowed['lowest'] == -inf:
        return ''
    end = 'or more' if allowed['highest'] == 1e9 else f'to {allowed["highest"]:g}'
    return f'{allowed["lowest"]:g} {end}'


TYPES = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text'}


def check_knobs(method):
    """ValueError for the first knob that is out of its range or of another type."""
    for name, option in knobs_of(type(method)).items():
        value, allowed = getattr(method, name), option.metadata
        fits = type(value) in (option.type, int if option.type is float else option.type)
        fits = fits or option.type not in TYPES         # of a method with fields of other types
        if value is None:
            fits = option.default is None
        elif allowed.get('words'):
            fits = value in allowed['words']
        elif fits and allowed and option.type in (int, float):
            fits = allowed['lowest'] <= value <= allowed['highest']
        require_knob(fits, name, value, f'{TYPES.get(option.type, option.type)} {knob_range(option)}'.strip())
