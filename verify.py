"""How proposed tokens are verified: maths, nouns, the loop, exact speculative decoding, the five methods.

propose -> score -> accept -> commit is one cycle, and `decode` is the loop. A method is a dataclass whose
fields are its knobs; it overrides only what differs. To read one method, read up to the drafts, and its
section. Not here: the network (model.py), the baselines that the methods are compared with
(lab/*/baselines.py).

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
from dataclasses import dataclass, field, fields, replace
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

    A CPU sorts HEAD tokens first: four rows of 150,000 tokens take 14 ms instead of 76.
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
    so there is one generator and the host does not wait. A one-hot p draws nothing on a CPU (4 % of a greedy
    text's time).
    """
    if not on_gpu(p) and p.count_nonzero().item() == p.shape[:-1].numel():
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
    """Guessed tokens and the distributions they were drawn from (one-hot if they were not drawn)."""
    tokens: list                            # [n] ids
    q: torch.Tensor                         # [n, V]
    logits: torch.Tensor = None             # [n, V] raw, for rules that look at confidence
    known: torch.Tensor = None              # [m, V] target logits of the first m positions, if computed
    signals: list = None                    # [n] dicts: what proposer and controller say of each token
    options: list = None                    # ids of each of the candidates that it was chosen from

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, and the exact rule keeps x with chance p(x)."""
        ids = to_device(tokens, model.device)[:, None]                                      # [n, 1]
        q = torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0)
        return cls(tokens, q)


@dataclass
class Judged:
    """A draft token x and what was decided on it: the fields that a trace prints, and signal values."""
    token: int
    p: float                # p(x), as the run samples; None where the target was not asked
    q: float                # q(x) of the draft
    ratio: float = None     # p(x) / max p at temperature 1
    threshold: float = None         # what the rule compares with; None where it has no threshold
    chance: float = None            # that x is kept
    kept: bool = None
    signals: dict = field(default_factory=dict)     # of Draft.signals
    of_step = False         # True if a whole step has one verdict, which all its tokens share


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

        Of n + 1 positions: the root (the last committed token, not read yet) and the draft. `known` has the
        first m rows, so the pass reads n + 1 - m, and before them what the cache does not hold for this path.
        """
        known = self.draft.known
        unread = len(self.draft.tokens) + 1 - (0 if known is None else len(known))
        if unread == 0:
            return known
        rows = self.reader.read(self.session.tokens + self.draft.tokens, self.path, unread)
        return rows if known is None else torch.cat([known, rows])

    @cached_property
    def p(self):
        """[n + 1, V], as the run samples."""
        return self.session.probs(self.logits)

    @cached_property
    def table(self):
        """A Judged for each of the n draft tokens x, not decided yet; all numbers come in one transfer."""
        p = self.p
        q = self.draft.q.to(p.dtype)
        z = self.logits.to(p.dtype)
        ids = to_device(self.draft.tokens, p.device)[:, None]                               # [n, 1]
        highest = z.amax(-1, keepdim=True)                                              # [n + 1, 1]
        ratios = (z[:-1].gather(1, ids) - highest[:-1]).exp()
        numbers = torch.cat([p[:-1].gather(1, ids), q.gather(1, ids), ratios], 1)       # [n, 3]
        numbers, highest = to_host(numbers, highest)
        check_finite(highest, 'target', len(self.session.tokens))
        signals = self.draft.signals or [{} for _ in self.draft.tokens]
        rows = zip(self.draft.tokens, numbers.tolist(), signals)
        return [Judged(token, *row, signals=said) for token, row, said in rows]

    def next_token(self, i):
        """Draws the id that ends a cycle at position i: recovered for draft token i, or the bonus."""
        p = self.p[i]
        if i < len(self.table):
            p = self.recovery_distribution(p, self.draft.q[i].to(p))
        (token,) = to_host(self.session.draw(p))
        return int(token)


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it."""
    drafted: list           # ids
    judged: list            # a Judged for each draft token that was looked at
    tokens: list            # ids committed
    labels: list            # who wrote them: draft, slim, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions, seconds]
    seconds: float
    signals: list = field(default_factory=list)     # Draft.signals, of all that was drafted
    notes: dict = field(default_factory=dict)   # see Session.observe: what a trace asks for besides

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the next token."""
        return self.labels.count('draft')

    @property
    def verdicts(self):
        """The Judged that were decided one by one: of each draft token, or the first of a whole step."""
        return self.judged[:1] if self.judged and self.judged[0].of_step else self.judged

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
    """The tokens up to the first end of sequence, including it; drops the tokens after it."""
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
            reader.read(self.tokens[:-1], reader.model.full, 0)
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

    def observe(self, method, draft, score, cycle):
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
        score = method.score(session, draft)                    # a Score is lazy: it has not read yet
        tokens, labels, judged = method.accept(session, draft, score)
        tokens = session.commit(tokens)
        cycle = Cycle(draft.tokens, judged, tokens, labels[:len(tokens)], session.spent(mark),
                      time.perf_counter() - begin, draft.signals or [])
        session.observe(method, draft, score, cycle)
        method.learn(cycle)
        yield cycle


# --------------------------------------------------------------------------------------- methods and knobs

def knob(default, meaning, lowest=-inf, highest=1e9, words=()):
    """A field that users set: a number in a range, or one of these words. What None does, `meaning` says."""
    return field(default=default, metadata=dict(meaning=meaning, lowest=lowest, highest=highest, words=words))


METHODS = {}            # name: class, entered where it stands


class Method:
    """What decode calls in turn; a method object serves one text. Its fields are its knobs."""
    lossless = False        # whether the text follows the target's distribution exactly, at these knobs

    def propose(self, session: Session) -> Draft:
        """The Draft of this cycle; it may be empty."""

    def score(self, session: Session, draft: Draft) -> Score:
        """What the draft is judged by; a method that judges steps may return something else."""

    def accept(self, session: Session, draft: Draft, score: Score) -> tuple:
        """(ids to commit, who wrote each, a Judged for each draft token that was looked at)."""

    def learn(self, cycle: Cycle):
        """Called with each finished cycle."""

    def explain(self, cycle: Cycle, word: Callable):
        """What decided the latest cycle, as a line; '' if there is no more to say. word: id -> its text."""
        return ''


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


METHODS['ar'] = Autoregressive


# ------------------------------------------------------------------------- how long a block may become

CONTROLLERS = {}        # name: class, entered where it stands


class Controller:
    """Ends a block: here after gamma tokens. It stops before the next is sampled, so the text stays exact."""
    takes_gamma = True          # whether the method's gamma says how long blocks are, at least the first

    def __init__(self, method):
        """method: the one whose blocks it ends, for its knobs."""
        self.gamma = method.gamma

    def max_tokens(self, session: Session):
        """The most tokens that the next block may have."""
        return self.gamma

    def signals(self, tokens, logits):
        """A dict for keep_drafting and the trace, of a step's tokens [rows] and raw logits [rows, V]."""
        return {}

    def keep_drafting(self, session: Session, signals: list):
        """Whether to draft another token, by the signals of the block alone."""
        return True

    def learn(self, cycle: Cycle):
        """Called with each finished cycle."""

    def explain(self, cycle: Cycle):
        """Why the block ended, as words; '' where it was after gamma tokens."""
        return ''


CONTROLLERS['fixed'] = Controller


# ------------------------------------------------------------------------------ exact speculative decoding

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

    def __init_subclass__(cls):
        """A subclass (say of yours) that changes the rule and does not say when it is lossless is lossy."""
        rule = {'chance', 'recovery_distribution', 'score', 'accept'}
        if rule & vars(cls).keys() and 'lossless' not in vars(cls):
            cls.lossless = False

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
            row.threshold = self.threshold(score, i)
            row.chance = self.chance(score, i)
            row.kept = session.flip(row.chance)
            judged.append(row)
            if not row.kept:
                return draft.tokens[:i] + [score.next_token(i)], ['draft'] * i + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        return draft.tokens + [score.next_token(n)], ['draft'] * n + ['bonus' if n else 'target'], judged

    def learn(self, cycle):
        self.control.learn(cycle)

    def explain(self, cycle, word):
        return self.control.explain(cycle)


METHODS['sd'] = Exact


# ------------------------------------------------------------------------------- where drafts come from

class Plan(NamedTuple):
    """How a block is drafted."""
    n: int                  # tokens at most
    to_probs: Callable      # function from raw logits [..., V] to the distribution that is sampled
    control: 'Controller' = None    # may end it earlier


class Branches(NamedTuple):
    """Continuations of one text, sampled side by side."""
    tokens: torch.Tensor    # [B, n]
    q: torch.Tensor         # [B, n, V]
    logits: torch.Tensor    # [B, n, V] raw
    signals: list           # [n] dicts: what the controller said of each step
    ends: dict              # branch: how many of its tokens count, where it ended early

    def lines(self, session: Session, who='draft'):
        """The ids of each branch, up to its end: one transfer. who: the model that wrote them."""
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
    return Draft(ids, branches.q[0, :n], branches.logits[0, :n], signals=branches.signals[:n])


def sample_branches(session: Session, reader: Reader, path: Path, rows: int, plan: Plan, is_ended=None):
    """Continuations of the text, `rows` of them, until the plan or all of them end.

    is_ended: function of a branch's ids; by default at an end of sequence. That is not checked on a GPU,
    which would wait for each token; `lines` cuts later. A single branch is written in the reader's own cache.
    """
    logits = [reader.read(session.tokens, path, 1).expand(rows, -1)]        # of each step [rows, V]
    twin = reader.fork(rows) if rows > 1 else reader
    control = plan.control
    q = []
    tokens = []
    signals = []
    ends = {}
    check_ends = is_ended or not on_gpu(logits[0])
    is_ended = is_ended or (lambda ids: ids[-1] in session.eos)
    while True:
        q.append(plan.to_probs(logits[-1]))
        tokens.append(session.draw(q[-1]))
        signals.append(control.signals(tokens[-1], logits[-1]) if control else {})
        if len(tokens) == plan.n or control and not control.keep_drafting(session, signals):
            break
        if check_ends:
            for row, ids in enumerate(torch.stack(tokens, 1).tolist()):
                if row not in ends and is_ended(ids):
                    ends[row] = len(ids)
        if len(ends) == rows:
            break
        logits.append(twin.append(tokens[-1], path))
    return Branches(torch.stack(tokens, 1), torch.stack(q, 1), torch.stack(logits, 1), signals, ends)


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


# --------------------------------------------------------------- CM-ASD: confidence-modulated drafting
# The surer the draft, the longer the block and the lower the threshold. Of each token, by the raw logits,
#     C = mean of 1 - H(q) / log V, tanh((z1 - z2) / 2), q1 - q2        (weighted: lam_...)
#     block length = floor(alpha mean(C) k_max), within k_min to k_max
#     tau = tau_base + gamma_tau (1 - C), within 0.01 to 1
# A token is kept if p(x) / max p >= tau at temperature 0, else with the chance min(1, p / (tau q)).
# Overrides threshold and chance; its controller `online` ends the block.
# Source: Sen et al. 2025 (arXiv 2508.15371), window and threshold; Xia et al. 2023 (SpecDec), the ratio.

SURE = 0.95     # confidence from which --show is silent on a token


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
        self.knobs = method if isinstance(method, CmAsd) else CmAsd()

    def max_tokens(self, session):
        return self.knobs.k_max

    def signals(self, tokens, logits):
        return dict(confidence=fmean(confidence(logits, self.knobs)))       # over all rows

    def keep_drafting(self, session, signals):
        sure = fmean(said['confidence'] for said in signals)
        return len(signals) < block_length(sure, self.knobs)

    def explain(self, cycle):
        if not cycle.signals:
            return ''
        sure = fmean(said['confidence'] for said in cycle.signals)
        return f'mean C {sure:.2f} allows {block_length(sure, self.knobs)} tokens'


CONTROLLERS['online'] = Online


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

    The paper does not say which quantity tau bounds. Ours is p / max p, or p / q in samples, so tau_base = 1
    is exact at any temperature. The window (the length of a block) averages C over the block so far, not over
    the next k positions as the paper's, so no token is dropped unverified.
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
        if draft.tokens and 'confidence' not in draft.signals[0]:       # another controller
            for said, sure in zip(draft.signals, confidence(draft.logits, self)):
                said['confidence'] = sure
        return draft

    def threshold(self, score, i):
        """tau of draft token i: the surer the draft, the more is forgiven."""
        tau = self.tau_base + self.gamma_tau * (1 - score.draft.signals[i]['confidence'])
        return min(1.0, max(0.01, tau))

    def chance(self, score, i):
        tau = self.threshold(score, i)
        token = score.table[i]
        if score.session.temperature:
            return min(1.0, token.p / (tau * token.q))
        matched = tau < 1 or token.p > 0                # at tau = 1 a tie is not enough: p of it is 0
        return float(token.ratio >= tau and matched)

    def explain(self, cycle, word):
        said = []
        for token in cycle.judged:
            C = token.signals['confidence']
            if C < SURE or not token.kept:
                said.append(f'{word(token.token)} {C:.2f} {token.threshold:.2f} {token.ratio:.2f}')
        doubts = f'C, tau, p/max p: {", ".join(said)}' if said else f'every C at least {SURE}'
        return f'{doubts}; {super().explain(cycle, word)}' if cycle.judged else ''


METHODS['cmasd'] = CmAsd


# ------------------------------------------------------------- ECSV: reliability-weighted voting of branches
# B branches are sampled side by side, and each position elects a token by a vote of weighted branches:
#     r = -a_entropy H(q) / log V + a_agree (share of other branches with this token) + a_self log q(x)
#     w = exp(gamma_r r);  score of token t = sum over branches of w (1[t is the branch's] + soft q(t))
# The fused block is a point mass, q = 1: the exact rule then samples from p and compares.
# ecsv overrides guess. ecsv-spot adds a second vote, after the target has been asked at some positions.
# Source: "Error-Correcting Speculative Decoding via Branch Voting", a model-written proposal
# (github.com/keithballinger/dialectica, 2025) without code.

SOFT_CANDIDATES = 4     # beside the branches' own tokens, where branches vote with whole distributions


@dataclass
class Ballot:
    """What B branches of n tokens say of K candidates a position; at temperature 1, on the CPU, in fp64."""
    tokens: torch.Tensor                    # [B, n] ids
    entropy: torch.Tensor                   # [B, n] H(q) over log V, so 0..1
    logq: torch.Tensor                      # [B, n] of the branch's own token, nats
    candidates: torch.Tensor                # [n, K] ids: the branches' tokens, then the likeliest
    q: torch.Tensor                         # [B, n, K] q of the candidates
    tie_break: list     # [n][K] the higher wins if sums of votes are equal: sum of q, or the target's logit

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
        q = q.double()
        return cls(tokens, entropy.double(), logq.double(), candidates, q, sums_of(q))

    def votes(self):
        """[B, n] how many branches have this branch's token at this position, itself included."""
        return (self.tokens[:, None] == self.tokens).sum(1)

    def elect(self, scores):
        """The tokens [n] with the highest sums of scores [B, n, K]; last ties go to the lowest id.

        In plain Python, which is faster on so few numbers.
        """
        elected = []
        for ids, totals, tie_break in zip(self.candidates.tolist(), sums_of(scores), self.tie_break):
            ranks = list(zip(totals, tie_break, [-token for token in ids]))
            elected.append(ids[ranks.index(max(ranks))])
        return elected


def sums_of(table):
    """[n][K] sums over the branches of a table [B, n, K], by size, so that their order does not matter."""
    return table.sort(0).values.sum(0).tolist()


@dataclass
class Ecsv(Exact):
    """ECSV: several drafted branches vote, weighted by their reliability; the elected block is verified.

    Unlike the proposal: the entropy is over log V. Weights are of positions, one of its two forms. Nothing
    else is scaled, because an offset cancels in a vote, and the weight sets the scale.
    """
    draft_temperature: float = knob(0.8, 'of the branches (the proposal states no values)', 0)
    draft_top_p: float = knob(0.95, 'top-p of the branches', 1e-9, 1)
    branches: int = knob(4, 'branches B that vote; to be tried: 2, 4, 8', 1, 64)
    a_entropy: float = knob(0.5, 'weight of the entropy over log V in r, subtracted', 0)
    a_agree: float = knob(1.0, 'weight of the agreement with other branches in r', 0)
    a_self: float = knob(0.5, "weight of the branch's own log q in r", 0)
    gamma_r: float = knob(1.0, 'w = exp(gamma_r r); 0: every vote counts the same', 0)
    soft: float = knob(0.0, 'weight of a vote by the whole q', 0)

    def guess(self, session, n):
        """The fused Draft: branches and their vote."""
        branches = self.draft_branches(session, n)
        self.ballot = Ballot.of(branches.tokens, branches.logits, self.soft > 0)
        check_finite(self.ballot.entropy, 'draft', len(session.tokens))
        fused, known = self.vote(session)
        draft = Draft.points(fused, session.target.model)
        draft.known = known
        draft.logits = branches.logits.mean(0)[:len(fused)]
        columns = zip(self.ballot.tokens.T.tolist(), self.weights(self.ballot).T.tolist())
        draft.signals = [dict(branches=ids, weights=weights) for ids, weights in columns][:len(fused)]
        return draft

    def draft_branches(self, session, n):
        """The Branches that vote."""
        need_draft_model(session, 'branches')
        reader = session.draft
        return sample_branches(session, reader, reader.model.full, self.branches, self.plan(session, n))

    def vote(self, session):
        """(the fused tokens up to an end of sequence, the target's rows that are known of them or None)."""
        return cut_at_eos(self.fuse(self.ballot), session.eos), None

    def fuse(self, ballot):
        """The elected tokens [n]."""
        voted = ballot.tokens[..., None] == ballot.candidates                       # [B, n, K]
        return ballot.elect(self.weights(ballot)[..., None] * (voted + self.soft * ballot.q))

    def weights(self, ballot):
        """w [B, n], above 0."""
        return (self.gamma_r * self.reliability(ballot)).clamp(-20, 20).exp()

    def reliability(self, ballot):
        """r [B, n]."""
        others = max(1, len(ballot.tokens) - 1)
        agreement = (ballot.votes().double() - 1) / others                          # with the other branches
        return self.a_agree * agreement - self.a_entropy * ballot.entropy + self.a_self * ballot.logq

    def explain(self, cycle, word):
        said = []
        for place, seen in enumerate(cycle.signals, 1):
            sums = Counter()
            for token, weight in zip(seen['branches'], seen['weights']):
                sums[token] += weight
            if len(sums) > 1:
                votes = [f'{word(token)} {weight:.3g} ({seen["branches"].count(token)})'
                         for token, weight in sums.most_common()]
                said.append(f'{place}: {", ".join(votes)}')
        agreed = 'all branches agree' if cycle.signals else ''
        return 'votes at ' + '; '.join(said) if said else agreed


METHODS['ecsv'] = Ecsv


@dataclass
class EcsvSpot(Ecsv):
    """ECSV-spot: the target checks some positions of the fused block, and the branches vote again.

    The pass that checks a position reads all positions before it, too. Its rows stay valid until the two
    votes differ. Check and block read at most `budget` positions, so the block may be cut. If a cycle reads
    fewer, the next may check one position more; nothing accumulates, and a mismatch leaves none, because its
    pass has read the block. If all branches agree at a checked position, the target's favourite is elected.
    Unlike the proposal: the margin is to the best other token. Ties there go to the target's logit.
    """
    spots: int = knob(2, 'positions checked with the target before the second vote', 1)
    by: str = knob('disagreement', 'which: of most disagreement, or of most entropy, also where all agree',
                   words=('disagreement', 'entropy'))
    a_spot: float = knob(1.0, "weight of the target's logit margin in r, where it was asked", 0)
    budget: int = knob(None, 'target positions a cycle at most; None: those of the block', 2)
    is_left = False         # whether the last cycle left some of its budget
    margins = 0.0           # [B, n] the target's logit of a branch's token less its best other token's
    unanimous = {}          # position where all branches agree: the target's favourite, if it was asked

    def guess(self, session, n):
        draft = super().guess(session, min(n, self.budget - 1) if self.budget else n)
        for seen, place in zip(draft.signals, range(n)):
            if place in self.checked:
                seen['checked'] = self.checked[place]
        return draft

    def vote(self, session):
        ballot = self.ballot
        self.margins = 0.0
        self.unanimous = {}
        fused, known = super().vote(session)
        budget = self.budget or ballot.tokens.shape[1] + 1
        used = len(fused) + 1
        chosen = self.doubtful(ballot, self.spots + self.is_left, min(len(fused), budget - 1))
        self.checked = {place: fused[place] for place in chosen}
        if chosen:
            checked = fused[:chosen[-1]]
            known = Score(session, Draft(checked, None), session.target_path()).logits     # [m, V]
            self.ask(ballot, known, chosen)
            check_finite(self.margins, 'target', len(session.tokens))
            fused, _ = super().vote(session)
            same = shared_length(checked, fused)
            fused = fused[:budget - len(known) + same]
            used = len(known) + len(fused) - same
            known = known[:same + 1]
        self.is_left = used < budget
        return fused, known

    def doubtful(self, ballot, count, reach):
        """At most `count` positions below `reach` where branches disagree most, or doubt most; ascending."""
        doubt = ballot.entropy.mean(0)                                              # [n]
        if self.by == 'disagreement':
            doubt = 1 - ballot.votes().double().amax(0) / len(ballot.tokens)
        ranked, order = doubt[:reach].sort(descending=True, stable=True)
        return sorted(order[ranked > 0][:count].tolist())

    def ask(self, ballot, rows, chosen):
        """Notes what the target's logits [m, V] say of the candidates at the chosen positions."""
        rows = rows.double().cpu()
        self.margins = torch.zeros(ballot.tokens.shape, dtype=torch.float64)
        for j in chosen:
            (best, second), (favourite, _) = rows[j].topk(2)
            tokens = ballot.tokens[:, j]                                            # [B]
            rival = torch.where(tokens == favourite, second, best)
            self.margins[:, j] = rows[j][tokens] - rival
            ballot.tie_break[j] = rows[j][ballot.candidates[j]].tolist()
            if (tokens == tokens[0]).all():
                self.unanimous[j] = int(favourite)

    def fuse(self, ballot):
        elected = super().fuse(ballot)
        for j, favourite in self.unanimous.items():
            elected[j] = favourite
        return elected

    def reliability(self, ballot):
        return super().reliability(ballot) + self.a_spot * self.margins

    def explain(self, cycle, word):
        said = [super().explain(cycle, word)]
        for place, (token, seen) in enumerate(zip(cycle.drafted, cycle.signals), 1):
            if 'checked' in seen:
                turned = f'turned from {word(seen["checked"])}' if seen['checked'] != token else 'stays'
                said.append(f'checked {place}: {turned}')
        return '; '.join(said)


METHODS['ecsv-spot'] = EcsvSpot


# ----------------------------------------------------------------------- VIA-SD: a slim verifier in between
# Slim (s), the target without some sublayers, judges first. With r = s(y) / max s of a draft token y:
#     r >= keep: slim keeps y
#     escalate <= r < keep: slim draws a token of its own; the cycle ends there, unless it is y again
#     r < escalate: the target decides, and judges the rest of the block, too, because its pass is paid.
# In that pass, or once slim is more than max_lag tokens ahead, the target reads what slim kept, and
# overwrites slim's keys in their shared cache.
# Overrides accept.
# Source: VIA-SD (2026); its p, q', q are our q, s, p, its alpha_1 and alpha_2 keep and escalate.

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
class ViaJudged(Judged):
    by: str = 'slim'        # or target: who decided; p is known of the target alone, the ratio is slim's


@dataclass
class ViaSd(Exact):
    """VIA-SD: slim, the target without some sublayers, judges first; the target below `escalate`. LOSSY.

    Gates are the paper's alphas; at 1 - alpha, as in Algorithm 1, slim would rewrite nothing. A block that
    slim kept ends with slim's own next token (the paper is silent).
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
            reader.read(committed, score.path, 0)           # slim is too far ahead
        slim = self.slim_score(session, draft)
        judge = slim                            # the target, from the first token on that slim doubts
        judged = []
        for i, token in enumerate(draft.tokens):
            seen = slim.table[i]
            row = ViaJudged(token, None, seen.q, seen.ratio, signals=seen.signals)
            judged.append(row)
            if row.ratio < self.escalate:
                judge = score
            if judge is slim:
                row.threshold = self.keep
                row.chance = float(row.ratio >= self.keep)
            else:
                row.by = 'target'
                row.p = score.table[i].p
                row.chance = self.chance(score, i)
            chosen = token if session.flip(row.chance) else judge.next_token(i)
            row.kept = chosen == token          # slim may draw the same token again
            if not row.kept:
                return draft.tokens[:i] + [chosen], ['draft'] * i + [row.by], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        if judge is slim and not self.slim_bonus:
            return draft.tokens, ['draft'] * n, judged
        label = 'slim' if judge is slim else 'bonus'
        return draft.tokens + [judge.next_token(n)], ['draft'] * n + [label], judged

    def explain(self, cycle, word):
        said = {}
        for token in cycle.judged:
            verdict = f'{token.by} {"keeps" if token.kept else "rewrites"}'
            said.setdefault(verdict, []).append(f'{word(token.token)} {token.ratio:.2f}')
        verdicts = [f'{verdict} {", ".join(tokens)}' for verdict, tokens in said.items()]
        return f's/max s: {"; ".join(verdicts)}' if said else ''


METHODS['via'] = ViaSd


# ------------------------------------------------------------------------ SpecGuard: whole steps verified
# The draft writes k candidates of a whole step, and the one that is most like the others is judged by
#     score = beta L + (1 - beta) G,   L = min over its tokens of log q(y_t), at temperature 1
#                                      G = min of attention rollout's share on the text before the step
# both on a calibrated scale of 0..1. If score < tau, the target writes the step.
# It judges no single tokens, so it is no subclass of Exact: propose, score and accept are its own.
# Source: Purohit, Narayanam & Pal 2026 (SpecGuard, "From Tokens to Steps", arXiv 2604.15244).

STEP_ENDS = dict(   # kinds of steps: (pattern of a word and an end, tokens at most)
    line=(r'\w.*\n', 64), paragraph=(r'(?s)\w.*\n[ \t]*\n', 128),
    sentence=(r'\w.*(\n|((?<!\d)\.|[!?])["\')\]*]*\s*\Z)', 64))      # 3. may go on as 3.5: no end


@dataclass
class StepJudged(Judged):
    """A step, and each token of it: score, threshold, chance and kept are the step's."""
    score: float = None     # None where it was not asked for
    logp: float = None
    grounding: float = None
    of_step = True


@dataclass
class SpecGuard(Method):
    """SpecGuard: steps are judged by the draft's confidence and grounding; the target rewrites some. LOSSY.

    The draft writes k steps; the most central one needs a score of tau: beta L + (1 - beta) G of its weakest
    tokens, L their log-probability, G their attention to the text before: a strong one makes up for a weak.
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
    ranges = None           # of L and G, once a step was judged by them

    def __post_init__(self):
        check_knobs(self)
        require_knob(self.delimiter, 'delimiter', 'empty', r'what ends a step, say \n')
        self.pattern, self.most = STEP_ENDS.get(self.delimiter, (None, 48))

    @property
    def lossless(self):
        return self.tau == inf

    def longest(self, session):
        """The most tokens that a step may have here."""
        return min(self.max_step or self.most, session.tokens_left)

    def is_ended(self, session, ids):
        """Whether ids, after the committed text, are a whole step; leading blanks belong to it.

        A step has its delimiter after something that is not blank. A kind of step ends after a word, so a
        line of brackets alone is no step.
        """
        text = session.text(ids)
        if ids[-1] in session.eos:
            return True
        if self.pattern:
            return re.search(self.pattern, text) is not None
        return self.delimiter.replace(r'\n', '\n') in text.lstrip()

    def propose(self, session):
        need_draft_model(session, 'steps')
        to_probs = partial(session.probs, temperature=self.draft_temperature, top_p=self.draft_top_p)
        path = session.draft.model.full
        return self.choose(self.write_steps(session, session.draft, path, to_probs, self.k))

    def write_steps(self, session, reader, path, to_probs, k):
        """k Drafts of one step each, sampled by `reader`. to_probs: as Plan has it."""
        plan = Plan(self.longest(session), to_probs)
        branches = sample_branches(session, reader, path, k, plan, partial(self.is_ended, session))
        lines = branches.lines(session, 'draft' if reader is session.draft else 'target')
        if k == 1:
            reader.cache.record(session.tokens + lines[0][:-1], len(session.tokens), path)
        rows = zip(lines, branches.q, branches.logits)
        return [Draft(ids, q[:len(ids)], logits[:len(ids)]) for ids, q, logits in rows]

    def choose(self, drafts):
        """The Draft that the others are most like; its options are the ids of all."""
        texts = [draft.tokens for draft in drafts]
        logps = [token_logps(draft.logits, draft.tokens).mean() for draft in drafts]
        (logps,) = to_host(torch.stack(logps))
        number = most_central(texts, logps.tolist())
        chosen = drafts[number]
        chosen.options = texts
        chosen.signals = [dict(candidate=number + 1)] * len(chosen.tokens)
        return chosen

    def score(self, session, draft):
        """Each token's signals (log-probability, grounding), from one pass that fills the draft's cache."""
        reader = session.draft
        path = reader.model.full.grounded(self.n_roll, len(session.tokens), self.sparsify)
        rows = reader.read(session.tokens + draft.tokens, path, len(draft.tokens))
        rows = torch.cat([draft.logits[:1], rows[:-1]])     # row t predicts token t
        logp = token_logps(rows, draft.tokens)
        grounding = path.carry['rollout'][0].sum(-1)        # [T]
        (seen,) = to_host(torch.stack([logp, grounding.to(logp)], 1))
        return seen.tolist()

    def judge(self, session, draft, seen):
        """The score of the step; seen: as score has it."""
        signals = session.calibration['signals']
        self.ranges = signals['draft_logp'], signals['draft_grounding']
        return step_score(seen, self.ranges, self.beta)

    def verdict(self, session, draft, seen):
        """The StepJudged of the step, without a token; at tau -inf or inf its score is not computed."""
        score = None if abs(self.tau) == inf else self.judge(session, draft, seen)
        kept = self.tau < 0 if score is None else score >= self.tau
        return StepJudged(None, None, None, None, self.tau, float(kept), kept, score=score)

    def accept(self, session, draft, seen):
        """(tokens, labels, judged), one verdict for the step."""
        step = self.verdict(session, draft, seen)
        judged = []
        ids = to_device(draft.tokens, draft.q.device)[:, None]                          # [T, 1]
        (each_q,) = to_host(draft.q.gather(1, ids)[:, 0])
        for token, q, (logp, grounding) in zip(draft.tokens, each_q.tolist(), seen):
            judged.append(replace(step, token=token, q=q, logp=logp, grounding=grounding))
        tokens = draft.tokens if step.kept else self.write(session)
        return tokens, ['draft' if step.kept else 'target'] * len(tokens), judged

    def explain(self, cycle, word):
        step = cycle.judged[0]
        said = 'kept' if step.kept else 'the target writes it'
        if step.score is not None:
            said = f'{step.score:.2f} {">=" if step.kept else "<"} {step.threshold:g}, {said}'
        if self.ranges:
            seen = [(token.logp, token.grounding) for token in cycle.judged]
            L, G = map(min, zip(*seen))
            scaled_L, scaled_G = (step_score(seen, self.ranges, beta) for beta in (1, 0))
            said = f'L {L:.2f} ({scaled_L:.2f}), G {G:.2f} ({scaled_G:.2f}): {said}'
        return f'candidate {cycle.signals[0]["candidate"]} of {self.k}; {said}'

    def write(self, session):
        """The ids of the step as the target writes it, from the same committed text."""
        if not self.gamma:
            (step,) = self.write_steps(session, session.target, session.target_path(), session.probs, 1)
            return step.tokens
        written = []
        for cycle in decode(copy.copy(session), Exact(self.gamma)):
            for token in cycle.tokens:
                written.append(token)
                if len(written) == self.longest(session) or self.is_ended(session, written):
                    return written              # at the latest by `longest`; drops the rest of the block


def most_central(steps, logps):
    """Index of the step (a list of ids) likest the others, by F1 of token pairs.

    Ties go to the higher logp, then to the lower index.

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


METHODS['specguard'] = SpecGuard


# ---------------------------------------------------------------------------------- sparse verification
# The target's pass is made cheaper: some layers (anchors) choose blocks of keys by the root's query, and the
# layers after them reuse the choice; a token's weakest experts, and weak channels, are left out. It reads
#     dense_below + rho (cached - dense_below) of the cached keys, in whole blocks, and sinks and locals.
# Overrides propose, which makes the session's path sparse.
# Source: "Accelerate speculative decoding with sparse computation in verification" (2025). The paper's
# "first draft token" is our root.

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

    As a Session's `sparse` it serves any method that drafts. Dense with rho=1 moe_skip=0 ffn_quantile=0.
    Not as in the paper: mean keys score the blocks, which have 16 tokens (64 to 256 there); L0 is 128 (2048).
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
        session.sparse = self           # for every pass of the target after the prompt
        self.cached = len(session.tokens) - 1
        return super().propose(session)

    def explain(self, cycle, word):
        left_out = self.left_out(self.cached)
        if not left_out:
            return 'all keys are read'
        return f'{self.cached - left_out} of {self.cached} cached keys are read in each layer'

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
            channels = tuple(at_quantile(table, self.ffn_quantile) for table in tables)
        if (self.moe_skip or self.ffn_quantile) and any(mixtures):
            experts = []
            for E, tables in zip(mixtures, session.calibration['sparse']['experts'], strict=True):
                betas = tuple(at_quantile(table, self.moe_quantile) for table in tables[:self.moe_skip])
                experts.append(betas if E else None)
        return path.sparsified(heads, channels, tuple(experts))

    def left_out(self, cached):
        """How many of the cached keys a layer does not read."""
        kept = int(kernels.kept_blocks(cached, self.blocks))
        return max(0, cached // self.block - kept) * self.block

    def anchor_layers(self, calibration, layers):
        """The layers that choose blocks; the layers after one reuse its choice.

        By default half of the layers, in the calibrated order, or every second layer without one.
        """
        count = self.anchors
        if count is None and 'sparse' in calibration:
            count = -(-layers // 2)                     # rounded up
        return sorted(calibration['sparse']['anchors'][:count]) if count else list(range(0, layers, 2))


def at_quantile(table, share):
    """The entry of a table of evenly spaced quantiles, 0 to 1, that is nearest to this share."""
    return table[round(share * (len(table) - 1))]


METHODS['sparse'] = Sparse


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
