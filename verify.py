"""How proposed tokens are verified: maths, nouns, the loop, exact speculative decoding, the five methods.

propose -> score -> accept -> commit is one cycle, and `decode` is the loop. A method is a dataclass whose
fields are its knobs; it overrides only what differs. To read one method, read down to `need_draft_model`,
then the method's own section. Not here: the network (model.py), the baselines that the methods are compared
with (lab/baselines.py).

p is the target's distribution and q the draft's; both are what is really sampled from, after temperature,
top-k and top-p. Temperature 0 gives a one-hot distribution, so the exact rule needs no greedy branch.
V vocabulary, n draft tokens of a block, T tokens of a text, B branches, K candidates of a position.
"""
import copy
import math
import re
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import inf
from statistics import fmean
from typing import NamedTuple

import torch

import kernels
from model import (Path, Reader, check_fields, knob, on_gpu, require_that, shared_length, to_device,
                   to_host)


# --------------------------------------------------------------------------------------------- the maths

def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """logits [..., V] -> the distribution to sample from [..., V], in fp32 at least.

    top_k 0 keeps all; top_p keeps the likeliest tokens up to and including the one that reaches this mass.
    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p).
    """
    z = kernels.precise(logits)
    if is_greedy(temperature):
        return torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
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


def is_greedy(temperature):
    """True where tokens are not sampled: below this, a division by the temperature would overflow."""
    return temperature < 1e-6


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
    return drawn.clamp(max=p.shape[-1] - 1).squeeze(-1)         # NaN gives V; check_finite then refuses it


def residual(p, q):
    """What the target has left once min(p, q) is taken: norm(max(p - q, 0)) [..., V], or p if all is taken.

    Source: Leviathan et al. 2023, algorithm 1 (p').
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


# --------------------------------------------------------------------------------------------- the nouns

@dataclass
class Draft:
    """Guessed tokens and the distributions they were drawn from (one-hot if they were not drawn)."""
    tokens: list                            # [n] ids
    q: torch.Tensor                         # [n, V]; None for drafts that are not judged by it
    logits: torch.Tensor = None             # [n, V] raw, for rules that look at confidence
    signals: list = None                    # [n] dicts: what the method notes of each token, for the trace

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, and the exact rule keeps x with chance p(x)."""
        ids = to_device(tokens, model.device)[:, None]                                      # [n, 1]
        q = torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0)
        return cls(tokens, q)


@dataclass
class Judged:
    """One verdict, on a draft token x or on a whole step, and what it was decided by."""
    tokens: list            # [x], or the ids of the step
    p: float = None         # p(x) at the run's temperature, top-k and top-p; None: the target was not asked
    q: float = None         # q(x) of the draft
    ratio: float = None     # p(x) / max p at temperature 1
    threshold: float = None         # what the rule compares with; None where it has no threshold
    chance: float = None            # that x is kept
    kept: bool = None
    signals: dict = field(default_factory=dict)     # of Draft.signals, and what the method adds


@dataclass
class Score:
    """A verifier's view of a draft, p [n + 1, V]: **its pass runs when a rule first looks**, or never.

    That is how VIA-SD spares the target: no rule looks at the target's Score where slim decides all.
    """
    session: 'Session'
    block: Draft
    path: Path
    recovery_distribution: Callable = residual      # function (p, q) -> of what replaces a rejected token

    @cached_property
    def logits(self):
        """[n + 1, V] raw: row i judges draft token i, the last row gives the bonus token.

        Reads n + 1 positions: the root (the last committed token, not read yet) and the draft. Before them it
        reads what the cache lacks for this path.
        """
        line = self.session.tokens + self.block.tokens
        return self.session.target.read(line, self.path, len(self.block.tokens) + 1)

    @cached_property
    def p(self):
        """[n + 1, V], at the run's temperature, top-k and top-p."""
        return self.session.probs(self.logits)

    @cached_property
    def table(self):
        """A Judged for each of the n draft tokens x, not decided yet; all numbers come in one transfer."""
        p = self.p
        q = self.block.q.to(p.dtype)
        z = self.logits.to(p.dtype)
        ids = to_device(self.block.tokens, p.device)[:, None]                               # [n, 1]
        highest = z.amax(-1, keepdim=True)                                              # [n + 1, 1]
        ratios = (z[:-1].gather(1, ids) - highest[:-1]).exp()
        numbers = torch.cat([p[:-1].gather(1, ids), q.gather(1, ids), ratios], 1)       # [n, 3]
        numbers, highest = to_host(numbers, highest)
        check_finite(highest, 'slim target' if self.path.skip else 'target', self.session)
        signals = self.block.signals or [{}] * len(self.block.tokens)
        rows = zip(self.block.tokens, numbers.tolist(), signals)
        return [Judged([token], p=p, q=q, ratio=ratio, signals=dict(noted))
                for token, (p, q, ratio), noted in rows]

    def next_token(self, i):
        """Draws the id that ends a cycle at position i: recovered for draft token i, or the bonus."""
        p = self.p[i]
        if i < len(self.table):
            p = self.recovery_distribution(p, self.block.q[i].to(p))
        token, mass = to_host(self.session.draw(p), p.sum())
        rule = getattr(self.recovery_distribution, '__qualname__', 'the rule')
        require_that(0 < mass < inf, f'{rule}: a mass of {mass:g} in the place of guess {i + 1} after '
                     f'{len(self.session.tokens)} tokens; does it divide 0 by 0, or leave nothing?')
        return int(token)


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it.

    Until the next cycle begins, `score` is the target's Score: score.p [n + 1, V], score.block.q [n, V]. It
    is None if the target's pass did not run. It is no part of a trace.
    """
    drafted: list           # ids
    judged: list            # a Judged for each draft token that was looked at
    tokens: list            # ids committed
    labels: list            # who wrote them: draft, slim, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions]
    seconds: float
    signals: list = field(default_factory=list)     # Draft.signals, of all that was drafted
    score = None            # no field, so asdict leaves it out

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the next token."""
        return self.labels.count('draft')


def tokens_of(cycles):
    """The ids that the Cycles of one text committed."""
    return [token for cycle in cycles for token in cycle.tokens]


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
    drafter: Reader                         # of the draft model, or None
    proposer: Callable                      # where drafts come from: function (session, n, method) -> Draft
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

    def __post_init__(self):
        self.begin = len(self.tokens)       # where the text that is written begins

    @property
    def room(self):
        """Tokens that may still be committed and that the draft model's context has room for."""
        context = self.drafter.model.config.max_position_embeddings if self.drafter else inf
        return min(self.tokens_left, context - len(self.tokens))

    @property
    def ended(self):
        """True if an end of sequence was written."""
        return len(self.tokens) > self.begin and self.tokens[-1] in self.eos

    @cached_property
    def slim_path(self):
        """The target's path without the sublayers that its calibrated mask skips."""
        return self.target.model.full.without(self.calibration['mask']['skip'])

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
        # in one statement, so an interrupt leaves both or neither
        self.tokens, self.tokens_left = self.tokens + tokens, self.tokens_left - len(tokens)
        return tokens


# ---------------------------------------------------------------------------------------------- the loop

def decode(session: Session, method: 'Method'):
    """Yields one Cycle after the other until no tokens are left or the text ends; their list is the trace.

    A method may call it on a copy of the session; each cycle counts its own passes only. After an interrupt
    it can be called again with the same session and method: session.tokens is the text. Where the draft
    model's context ends, the target writes on alone.
    """
    while session.tokens_left and not session.ended:
        begin = time.perf_counter()
        marks = {role: len(reader.log) for role, reader in readers_of(session).items()}
        if session.room <= 0:
            method = Autoregressive()
        draft = method.propose(session)
        score = method.score(session, draft)                    # a Score is lazy: it has not read yet
        tokens, labels, judged = method.accept(session, draft, score)
        require_that(len(labels) >= len(tokens) > 0, f'accept returned {len(tokens)} tokens and {len(labels)}'
                     ' labels; expected one or more, and a label for each')
        tokens = session.commit(tokens)
        cycle = Cycle(draft.tokens, judged, tokens, labels[:len(tokens)],
                      passes_since(session, marks), time.perf_counter() - begin,
                      draft.signals or [])
        if isinstance(score, Score) and 'logits' in vars(score):        # its pass has run
            cycle.score = score
        method.learn(cycle)
        yield cycle
        cycle.score = None                                      # or a long text would hold every p


# ------------------------------------------------------------------------------------------------ methods

METHODS = {}            # name: class, entered where it stands


@dataclass
class Method:
    """What decode calls in turn. Its fields are its knobs.

    A method object serves one text, and may keep what it notes of it: an Engine makes a copy for each.
    lab/prove.py holds `lossless` in the states that random walks reach, and in no others.
    """
    lossless = False        # whether the text follows the target's distribution exactly, at these knobs

    def propose(self, session: Session):
        """The Draft of this cycle; it may be empty."""

    def score(self, session: Session, draft: Draft):
        """What the draft is judged by; a method that judges steps may return something else."""

    def accept(self, session: Session, draft: Draft, score: Score):
        """(ids to commit, who wrote each, a Judged for each draft token that was looked at)."""

    def learn(self, cycle):
        """Called with each finished cycle."""

    def explain(self, cycle, word):
        """What decided the latest cycle, as a line, or nothing. word: ids -> their text."""
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
        check_finite(highest, 'target', session)
        return token.tolist(), ['target'], []


METHODS['ar'] = Autoregressive


# ------------------------------------------------------------------------------ exact speculative decoding

@dataclass
class Exact(Method):
    """Exact speculative decoding: whatever the draft, the text follows the target's distribution.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    gamma: int = knob(4, 'draft tokens a cycle', 0)
    draft_temperature: float = knob(None, "of the draft model; None: the run's, 0: greedy drafting", 0)
    lossless = True
    reserved = 1            # policy: tokens of tokens_left that a block leaves free, here for the next token

    def __init_subclass__(cls):
        """A subclass that changes the rule or the draft, or has two bases, is lossy unless it says otherwise.

        draft_probs, signals and keep_drafting are free: they decide on a token before it is drawn.
        """
        rule = {'propose', 'guess', 'score', 'chance', 'threshold', 'recovery_distribution', 'accept'}
        changed = rule & vars(cls).keys() or len(cls.__bases__) > 1
        if changed and 'lossless' not in vars(cls):
            cls.lossless = False

    def __post_init__(self):
        """BadInput for a knob out of range; methods whose knobs depend on each other check that too."""
        check_fields(self)

    def propose(self, session):
        """The Draft of this cycle, of at most gamma tokens."""
        n = min(self.gamma, session.room - self.reserved)
        return self.guess(session, n) if n > 0 else no_draft(session)

    def guess(self, session, n):
        """A Draft of at most n tokens, n above 0."""
        return session.proposer(session, n, self)

    def draft_probs(self, session, logits):
        """The distribution [..., V] that draft tokens are sampled from."""
        return session.probs(logits, self.draft_temperature)

    def signals(self, token, logits):
        """A dict for keep_drafting and the trace, of one draft token [1] and its raw logits [1, V]."""
        return {}

    def keep_drafting(self, session, signals):
        """Whether to draft another token, by the signals of the block: decided before it is sampled."""
        return True

    def score(self, session, draft):
        return Score(session, draft, session.target_path(), self.recovery_distribution)

    def chance(self, score, i):
        """The chance that draft token i is kept: min(1, p(x) / q(x))."""
        row = score.table[i]
        return min(1.0, row.p / row.q)

    def recovery_distribution(self, p, q):
        """The distribution [..., V] of the recovered token; p, q [..., V]: of its position."""
        return residual(p, q)

    def accept(self, session, draft, score):
        """(tokens, labels, judged) of this cycle, left to right up to a rejection or the end of sequence."""
        judged = []
        for i, (token, row) in enumerate(zip(draft.tokens, score.table)):
            row.chance = self.chance(score, i)
            row.kept = session.flip(row.chance)
            judged.append(row)
            if not row.kept:
                return draft.tokens[:i] + [score.next_token(i)], ['draft'] * i + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        return draft.tokens + [score.next_token(n)], ['draft'] * n + ['bonus' if n else 'target'], judged


METHODS['sd'] = Exact


# ------------------------------------------------------------------------------- where drafts come from

def draft_model(session, n, method, reader=None, path=None):
    """A Draft of at most n tokens from the draft model, or from this reader on this path."""
    reader = reader or session.drafter
    path = path or reader.model.full
    logits = reader.read(session.tokens, path, 1)               # [1, V]
    rows = []
    signals = []
    while True:
        q = method.draft_probs(session, logits)
        token = session.draw(q)                                 # [1]
        rows.append((token, q, logits))
        signals.append(method.signals(token, logits))
        if len(rows) == n or not method.keep_drafting(session, signals):
            break
        if not on_gpu(token) and token.item() in session.eos:   # a GPU would have to wait for it
            break
        logits = reader.append(token, path)
    tokens, q, logits = map(torch.cat, zip(*rows))              # [n], [n, V], [n, V]
    ids, highest = to_host(tokens, logits.amax())
    check_finite(highest, 'draft', session)
    ids = cut_at_eos(ids.tolist(), session.eos)
    # append records nothing, because on a GPU the host did not know the ids; the last token was not fed
    reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
    n = len(ids)
    return Draft(ids, q[:n], logits[:n], signals=signals[:n])


def prompt_lookup(session, n, method=None):
    """What followed the last earlier occurrence of the text's last 3 tokens, else 2. Source: Saxena 2023."""
    text = session.tokens
    for size in (3, 2):
        for begin in range(len(text) - size - 1, -1, -1):
            if text[begin:begin + size] == text[-size:]:
                found = text[begin + size:begin + size + n]
                return Draft.points(found, session.target.model)
    return no_draft(session)


def lookup_then_draft(session, n, method):
    """A Draft that is looked up in the text, or the draft model's where nothing is found."""
    draft = prompt_lookup(session, n)
    return draft if draft.tokens else draft_model(session, n, method)


def no_draft(session, n=0, method=None):
    """No draft at all: the cycle is one step of plain decoding."""
    return Draft.points([], session.target.model)


def need_draft_model(session, what):
    """ValueError where drafts are looked up: this method needs distributions of a draft model."""
    require_that(session.drafter and session.proposer is draft_model,
                 f'{what} come from a draft model: give --draft DIR, without --lookup')


# --------------------------------------------------------------- CM-ASD: confidence-modulated drafting
# The surer the draft, the longer the block and the lower the threshold. Of each token, by the raw logits,
#     C = mean of 1 - H(q) / log V, tanh((z1 - z2) / 2), q1 - q2        (weighted: lam_...)
#     block length = floor(alpha mean(C) k_max), within k_min to k_max
#     tau = tau_base + gamma_tau (1 - C), within 0.01 to 1
# A token is kept if p(x) / max p >= tau at temperature 0, else with the chance min(1, p / (tau q)).
# Overrides chance, signals and keep_drafting.
# Source: Sen et al. 2025 (arXiv 2508.15371), window and threshold; Xia et al. 2023 (SpecDec), the ratio.

SURE = 0.95     # confidence from which --show is silent on a token


def confidence_signals(logits):
    """Three signs of confidence in 0..1, of one row of raw logits [1, V] at temperature 1.

    1 - H / log V; tanh(logit margin / 2), which is (q1 - q2) / (q1 + q2); q1 - q2. In plain Python once V is
    reduced, because a tensor operation on a few numbers costs as much as one on a thousand.
    Source: Sen et al. 2025 (CM-ASD) name the three; how the first two are scaled to 0..1 is ours.
    """
    logq = kernels.precise(logits).log_softmax(-1)
    negentropy = (logq.exp() * logq).sum(-1, keepdim=True)                              # [1, 1] nats
    nats, first, second = torch.cat([negentropy, logq.topk(2).values], -1)[0].tolist()
    certainty = min(1.0, max(0.0, 1 + nats / math.log(logits.shape[-1])))
    margin = math.tanh((first - second) / 2)
    return certainty, margin, math.exp(first) - math.exp(second)


@dataclass
class CmAsd(Exact):
    """CM-ASD: the draft's confidence C sets how much is drafted and how strictly it is judged. LOSSY.

    The paper does not say which quantity tau bounds. Ours is p / max p, or p / q in samples, so tau_base = 1
    is exact at any temperature. The window (the length of a block) averages C over the block so far, not over
    the next k positions as the paper's, so no token is dropped unverified.
    """
    gamma: int = knob(10, 'tokens of the longest block, k_max (the paper states no values)', 1)
    k_min: int = knob(1, 'tokens of the shortest block (the paper states no values)', 1)
    alpha: float = knob(1.0, 'block length over confidence', 0)
    lam_entropy: float = knob(1.0, 'weight of the entropy in C; the three are scaled to sum 1', 0)
    lam_margin: float = knob(1.0, 'weight of the logit margin in C', 0)
    lam_softmax: float = knob(1.0, 'weight of the margin of q in C', 0)
    tau_base: float = knob(0.3, 'threshold where C = 1; 1: exact', 0)
    gamma_tau: float = knob(0.5, 'what is added to it where C = 0 (the paper states no values)', 0)

    def __post_init__(self):
        super().__post_init__()
        weights = self.lam_entropy, self.lam_margin, self.lam_softmax
        require_that(sum(weights) > 0, 'lam_entropy, lam_margin, lam_softmax: expected one above 0')
        self.weights = [weight / sum(weights) for weight in weights]

    @property
    def lossless(self):
        return self.tau_base >= 1

    def propose(self, session):
        need_draft_model(session, "cmasd's confidences")
        return super().propose(session)

    def signals(self, token, logits):
        parts = zip(self.weights, confidence_signals(logits))
        return dict(confidence=sum(weight * signal for weight, signal in parts))

    def keep_drafting(self, session, signals):
        return len(signals) < self.window(signals)

    def window(self, signals):
        """The block length that the mean confidence so far allows; ValueError if it is NaN."""
        C = fmean(noted['confidence'] for noted in signals)
        require_that(not math.isnan(C), f'the draft computed NaN or infinity: {OVERFLOW}')
        return min(self.gamma, max(self.k_min, math.floor(self.alpha * C * self.gamma)))

    def threshold(self, C):
        """tau of a draft token of confidence C: the surer the draft, the more is forgiven."""
        return min(1.0, max(0.01, self.tau_base + self.gamma_tau * (1 - C)))

    def chance(self, score, i):
        row = score.table[i]
        tau = row.threshold = self.threshold(row.signals['confidence'])
        if not is_greedy(score.session.temperature):
            return min(1.0, row.p / (tau * row.q))
        matched = tau < 1 or row.p > 0          # of two equally likely tokens only one is the target's choice
        return float(row.ratio >= tau and matched)

    def explain(self, cycle, word):
        if not cycle.judged:
            return ''
        doubts = []
        for row in cycle.judged:
            C = row.signals['confidence']
            if C < SURE or not row.kept:
                doubts.append(f'{word(row.tokens)} {C:.2f} {self.threshold(C):.2f} {row.ratio:.2f}')
        why = f'C, tau, p/max p: {", ".join(doubts)}' if doubts else f'every C at least {SURE}'
        C = fmean(noted['confidence'] for noted in cycle.signals)
        return f'{why}; mean C {C:.2f} allows {self.window(cycle.signals)} tokens'


METHODS['cmasd'] = CmAsd


# ------------------------------------------------------------- branches: several continuations of a text

class Branches(NamedTuple):
    """Continuations of one text, sampled side by side."""
    tokens: torch.Tensor    # [B, n]
    logits: torch.Tensor    # [B, n, V] raw
    ends: dict              # branch: how many of its tokens count, where it ended early

    def lines(self, session):
        """The ids of each branch, up to its end: one transfer."""
        tokens, highest = to_host(self.tokens, self.logits.amax())
        check_finite(highest, 'draft', session)
        return [cut_at_eos(ids[:self.ends.get(row)], session.eos) for row, ids in enumerate(tokens.tolist())]


def sample_branches(session, reader, path, rows, n, to_probs, has_ended=None):
    """Continuations of the text, `rows` of them, of n tokens, or until all of them have ended.

    to_probs: function from raw logits [rows, V] to the distributions that are sampled. has_ended: function of
    a branch's ids; by default of an end of sequence. That is not checked on a GPU, which would have to wait
    for each token; `lines` cuts later. A single branch is written in the reader's own cache.
    """
    logits = reader.read(session.tokens, path, 1).expand(rows, -1)          # [rows, V]
    twin = reader.fork(rows) if rows > 1 else reader
    steps = []
    lines = [[] for _ in range(rows)]                   # ids of each branch, where they are looked at
    ends = {}
    while True:
        tokens = session.draw(to_probs(logits))                             # [rows]
        steps.append((tokens, logits))
        if has_ended or not on_gpu(tokens):
            for row, token in enumerate(tokens.tolist()):
                lines[row].append(token)
                if row not in ends and (has_ended(lines[row]) if has_ended else token in session.eos):
                    ends[row] = len(steps)
        if len(steps) == n or len(ends) == rows:
            break
        logits = twin.append(tokens, path)
    return Branches(*(torch.stack(column, 1) for column in zip(*steps)), ends)


# ------------------------------------------------------------- ECSV: reliability-weighted voting of branches
# B branches are sampled side by side, and each position elects a token by a vote of weighted branches:
#     r = -a_entropy H(q) / log V + a_agree (share of other branches with this token) + a_self log q(x)
#     w = exp(gamma_r r);  score of token t = sum over branches of w (1[t is the branch's] + soft q(t))
# Branches vote by position, also after they have parted: the vote of a branch at position 3 counts even if it
# lost at 2. The fused block is a point mass, q = 1: the exact rule then samples from p and compares.
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
    tie_break: list     # [n][K] the higher wins where scores are equal: the sum of q, or the target's logit

    @classmethod
    def of(cls, tokens, logits, soft):
        """From tokens [B, n] and raw logits [B, n, V]; soft: whether there are other candidates."""
        B, n, V = logits.shape
        logq = kernels.precise(logits).log_softmax(-1)
        q = logq.exp()
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

    def agreeing(self):
        """[B, n] how many branches have this branch's token at this position, itself included."""
        return (self.tokens[:, None] == self.tokens).sum(1)

    def tally(self, weights, soft):
        """[n] dicts {candidate: its score}, the elected one first; weights [B, n], soft: as in Ecsv.

        Equal scores go by tie_break, then to the lower id. In plain Python, faster on so few numbers.
        """
        voted = self.tokens[..., None] == self.candidates                           # [B, n, K]
        scores = sums_of(weights[..., None] * (voted + soft * self.q))
        tallies = []
        for ids, totals, tie_break in zip(self.candidates.tolist(), scores, self.tie_break):
            ranked = sorted(zip(totals, tie_break, [-token for token in ids]), reverse=True)
            tallies.append({-negative: total for total, _, negative in ranked})
        return tallies


def sums_of(table):
    """[n][K] sums over the branches of a table [B, n, K].

    Sorted first, because a float sum depends on its order: renumbered branches elect the same token.
    """
    return table.sort(0).values.sum(0).tolist()


@dataclass
class Ecsv(Exact):
    """ECSV: several drafted branches vote, weighted by their reliability; the elected block is verified.

    Unlike the proposal, the entropy is divided by log V. Each position of a branch has a weight of its own;
    the proposal also has one weight a branch.
    """
    draft_temperature: float = knob(0.8, 'of the branches (the proposal states no values)', 0)
    draft_top_p: float = knob(0.95, 'top-p of the branches', 1e-9, 1)
    branches: int = knob(4, 'branches B that vote; to be tried: 2, 4, 8', 1, 64)
    a_entropy: float = knob(0.5, 'weight of the entropy over log V in r, subtracted', 0)
    a_agree: float = knob(1.0, 'weight of the agreement with other branches in r', 0)
    a_self: float = knob(0.5, "weight of the branch's own log q in r", 0)
    gamma_r: float = knob(1.0, 'w = exp(gamma_r r); 0: every vote counts the same', 0)
    soft: float = knob(0.0, 'weight of a vote by the whole q', 0)
    lossless = True         # q is the point mass that was proposed

    def guess(self, session, n):
        """The fused Draft: branches and their vote."""
        branches = self.draft_branches(session, n)
        self.ballot = Ballot.of(branches.tokens, branches.logits, self.soft > 0)
        check_finite(self.ballot.entropy, 'draft', session)
        draft = Draft.points(self.vote(session), session.target.model)
        columns = zip(draft.tokens, self.ballot.tokens.T.tolist(), self.weights.T.tolist(), self.tallies)
        draft.signals = [dict(branches=tokens, weights=weights, scores=scores)
                         for _, tokens, weights, scores in columns]
        return draft

    def draft_branches(self, session, n):
        """The Branches that vote."""
        need_draft_model(session, 'branches')
        reader = session.drafter
        to_probs = partial(self.draft_probs, session)
        return sample_branches(session, reader, reader.model.full, self.branches, n, to_probs)

    def draft_probs(self, session, logits):
        return session.probs(logits, self.draft_temperature, self.draft_top_p)

    def vote(self, session):
        """The fused tokens, up to an end of sequence."""
        self.weights = (self.gamma_r * self.reliability(self.ballot)).clamp(-20, 20).exp()      # w [B, n]
        self.tallies = self.ballot.tally(self.weights, self.soft)
        return cut_at_eos(self.elected(self.tallies), session.eos)

    def elected(self, tallies):
        """The tokens [n] with the highest scores."""
        return [next(iter(scores)) for scores in tallies]

    def reliability(self, ballot):
        """r [B, n]."""
        others = max(1, len(ballot.tokens) - 1)
        agreement = (ballot.agreeing().double() - 1) / others                       # with the other branches
        return self.a_agree * agreement - self.a_entropy * ballot.entropy + self.a_self * ballot.logq

    def explain(self, cycle, word):
        disputes = []
        for place, noted in enumerate(cycle.signals, 1):
            counts = Counter(noted['branches'])
            if len(counts) > 1:
                votes = [f'{word([token])} {score:.3g} ({counts[token]})'
                         for token, score in noted['scores'].items() if token in counts]
                disputes.append(f'{place}: {", ".join(votes)}')
        agreed = 'all branches agree' if cycle.signals else ''
        return 'votes at ' + '; '.join(disputes) if disputes else agreed


METHODS['ecsv'] = Ecsv


@dataclass
class EcsvSpot(Ecsv):
    """ECSV-spot: the target checks some positions of the fused block, and the branches vote again.

    The pass that checks a position reads all positions before it, too. Its rows stay valid up to the first
    position at which the two votes differ. Check and block read at most `budget` positions, so the block may
    be cut. If a cycle reads fewer, the next may check one position more; more than one is never saved up.
    If all branches agree at a checked position, the target's first choice is elected. Unlike the proposal,
    the margin is to the best other token, and equal scores at a checked position go by the target's logit.
    """
    spots: int = knob(2, 'positions checked with the target before the second vote', 1)
    by: str = knob('disagreement', 'which: of most disagreement, or of most entropy, also where all agree',
                   words=('disagreement', 'entropy'))
    a_spot: float = knob(1.0, "weight of the target's logit margin in r, where it was asked", 0)
    budget: int = knob(None, 'target positions a cycle at most; None: those of the block', 2)
    lossless = True         # the rows of its score are the target's own, though read in two passes
    is_left = False         # state: whether the last cycle read fewer positions than its budget

    def guess(self, session, n):
        draft = super().guess(session, min(n, self.budget - 1) if self.budget else n)
        for place in self.checked.keys() & range(len(draft.tokens)):
            draft.signals[place]['checked'] = self.checked[place]
        return draft

    def vote(self, session):
        ballot = self.ballot
        self.margins = 0.0      # [B, n] the target's logit of a branch's token minus its best other token's
        self.unanimous = {}     # checked position where all branches agree: the target's first choice
        self.known = None       # [m, V] the target's logits of the first m positions, where it was asked
        fused = super().vote(session)
        budget = self.budget or ballot.tokens.shape[1] + 1
        used = len(fused) + 1
        chosen = self.doubtful(ballot, self.spots + self.is_left, min(len(fused), budget - 1))
        self.checked = {place: fused[place] for place in chosen}
        if chosen:
            checked = fused[:chosen[-1]]
            known = Score(session, Draft(checked, None), session.target_path()).logits     # [m, V]
            self.ask(ballot, known, chosen)
            check_finite(self.margins, 'target', session)
            fused = super().vote(session)
            same = shared_length(checked, fused)
            fused = fused[:budget - len(known) + same]
            used = len(known) + len(fused) - same
            self.known = known[:same + 1]
        self.is_left = used < budget
        return fused

    def score(self, session, draft):
        """The Score of the block; rows that the check has read are not read again."""
        score = super().score(session, draft)
        if draft.tokens and self.known is not None:
            unread = len(draft.tokens) + 1 - len(self.known)
            score.logits = self.known
            if unread:
                rows = session.target.read(session.tokens + draft.tokens, score.path, unread)
                score.logits = torch.cat([self.known, rows])
        return score

    def doubtful(self, ballot, count, reach):
        """At most `count` positions below `reach` where branches disagree most, or doubt most; ascending."""
        doubt = ballot.entropy.mean(0)                                              # [n]
        if self.by == 'disagreement':
            doubt = 1 - ballot.agreeing().double().amax(0) / len(ballot.tokens)
        ranked, order = doubt[:reach].sort(descending=True, stable=True)
        return sorted(order[ranked > 0][:count].tolist())

    def ask(self, ballot, rows, chosen):
        """Notes what the target's logits [m, V] say of the candidates at the chosen positions."""
        rows = rows.double().cpu()
        self.margins = torch.zeros(ballot.tokens.shape, dtype=torch.float64)
        for j in chosen:
            (best, second), (first_choice, _) = rows[j].topk(2)
            tokens = ballot.tokens[:, j]                                            # [B]
            rival = torch.where(tokens == first_choice, second, best)
            self.margins[:, j] = rows[j][tokens] - rival
            ballot.tie_break[j] = rows[j][ballot.candidates[j]].tolist()
            if (tokens == tokens[0]).all():
                self.unanimous[j] = int(first_choice)

    def elected(self, tallies):
        tokens = super().elected(tallies)
        for j, first_choice in self.unanimous.items():
            tokens[j] = first_choice
        return tokens

    def reliability(self, ballot):
        return super().reliability(ballot) + self.a_spot * self.margins

    def explain(self, cycle, word):
        parts = [super().explain(cycle, word)]
        for place, (token, noted) in enumerate(zip(cycle.drafted, cycle.signals), 1):
            if 'checked' in noted:
                before = noted['checked']
                turned = 'stays' if before == token else f'turned from {word([before])}'
                parts.append(f'checked {place}: {turned}')
        return '; '.join(parts)


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

@dataclass
class ViaSd(Exact):
    """VIA-SD: slim, the target without some sublayers, judges first; the target below `escalate`. LOSSY.

    keep and escalate are the alphas of the paper's text. (Its Algorithm 1 compares with 1 - alpha; then slim
    would never rewrite a token.) After a block that slim kept whole, slim adds a token of its own, on which
    the paper says nothing.
    """
    gamma: int = knob(5, 'draft tokens a cycle', 0)
    keep: float = knob(0.5, 'r from which a draft token stays', 0)
    escalate: float = knob(0.3, 'r below which the target decides; above 1 it always does', 0)
    max_lag: int = knob(32, 'tokens that slim may build on before the target has read them', 0)
    slim_bonus: bool = knob(True, "whether a block that slim kept ends with slim's next token")
    reserved = 0            # a block may use all tokens left; the token after it is then cut

    @property
    def lossless(self):
        return self.escalate > 1

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
        self.slim = slim = self.slim_score(session, draft)
        judge = slim                            # the target, from the first token on that slim doubts
        judged = []
        for i, (token, row) in enumerate(zip(draft.tokens, slim.table)):
            judged.append(row)                  # its ratio is slim's; its p is the target's, if it was asked
            if row.ratio < self.escalate:
                judge = score
            by = row.signals['by'] = 'slim' if judge is slim else 'target'
            if judge is slim:
                row.p = None
                row.threshold = self.keep
                row.chance = float(row.ratio >= self.keep)
            else:
                row.p = score.table[i].p
                row.chance = self.chance(score, i)
            chosen = token if session.flip(row.chance) else judge.next_token(i)
            row.kept = chosen == token          # slim may draw the same token again
            if not row.kept:
                return draft.tokens[:i] + [chosen], ['draft'] * i + [by], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n = len(draft.tokens)
        if judge is slim and not self.slim_bonus:
            return draft.tokens, ['draft'] * n, judged
        label = 'slim' if judge is slim else 'bonus'
        return draft.tokens + [judge.next_token(n)], ['draft'] * n + [label], judged

    def explain(self, cycle, word):
        words = {}
        for row in cycle.judged:
            verdict = f'{row.signals["by"]} {"keeps" if row.kept else "rewrites"}'
            words.setdefault(verdict, []).append(f'{word(row.tokens)} {row.ratio:.2f}')
        verdicts = [f'{verdict} {", ".join(tokens)}' for verdict, tokens in words.items()]
        return f's/max s: {"; ".join(verdicts)}' if verdicts else ''


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
    sentence=(r'\w.*(\n|((?<!\d)\.|[!?])["\')\]*]*\s*\Z)', 64))      # "3." may go on as "3.5", so no end


@dataclass
class SpecGuard(Method):
    """SpecGuard: steps are judged by the draft's confidence and grounding; the target rewrites some. LOSSY.

    The draft writes k steps; the most central one needs a score of tau: beta L + (1 - beta) G of its weakest
    tokens. L is their log-probability, G their attention to the text before. The score is a sum, so a high G
    can make up for a low L.
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

    def __post_init__(self):
        check_fields(self)
        after_text = r'(?s)(?=\S).*' + re.escape(self.delimiter.replace(r'\n', '\n'))
        self.pattern, self.most = STEP_ENDS.get(self.delimiter, (after_text, 48))

    @property
    def lossless(self):
        return self.tau == inf

    def longest(self, session):
        """The most tokens that a step may have here."""
        return min(self.max_step or self.most, session.room)

    def has_ended(self, session, ids):
        """True if ids, after the committed text, are a whole step; leading blanks belong to it.

        A step has its delimiter after something that is not blank. A kind of step ends after a word, so a
        line of brackets alone is no step.
        """
        return ids[-1] in session.eos or re.search(self.pattern, session.text(ids)) is not None

    def propose(self, session):
        """The Draft of a step, of k sampled ones the most central; its signals have the ids of all."""
        need_draft_model(session, 'steps')
        to_probs = partial(session.probs, temperature=self.draft_temperature, top_p=self.draft_top_p)
        ends = partial(self.has_ended, session)
        reader = session.drafter
        path = reader.model.full
        branches = sample_branches(session, reader, path, self.k, self.longest(session), to_probs, ends)
        steps = branches.lines(session)
        if self.k == 1:                                 # its keys are in the reader's own cache
            reader.cache.record(session.tokens + steps[0][:-1], len(session.tokens), path)
        logps = [token_logps(logits[:len(ids)], ids).mean() for ids, logits in zip(steps, branches.logits)]
        number = most_central(steps, torch.stack(logps).tolist())
        ids = steps[number]
        signals = [dict(candidate=number + 1, candidates=steps)] * len(ids)
        return Draft(ids, None, branches.logits[number, :len(ids)], signals)

    def score(self, session, draft):
        """[log-probability, grounding] of each token, from one pass of the draft; None if tau is infinite."""
        if abs(self.tau) == inf:
            return None
        reader = session.drafter
        path = reader.model.full.grounded(self.n_roll, len(session.tokens), self.sparsify)
        rows = reader.read(session.tokens + draft.tokens, path, len(draft.tokens))
        rows = torch.cat([draft.logits[:1], rows[:-1]])     # row t predicts token t
        logp = token_logps(rows, draft.tokens)
        grounding = reader.carry['rollout'][0].sum(-1)      # [T]
        return torch.stack([logp, grounding.to(logp)], 1).tolist()

    def verdict(self, session, draft, pairs):
        """The Judged of the step by its weakest tokens; pairs: as score has them."""
        signals = dict(draft.signals[0])
        kept = self.tau < 0
        if pairs:
            ranges = session.calibration['signals']
            L, G = map(min, zip(*pairs))
            scaled_L, scaled_G = scaled(L, ranges['draft_logp']), scaled(G, ranges['draft_grounding'])
            score = self.beta * scaled_L + (1 - self.beta) * scaled_G
            signals |= dict(L=L, G=G, scaled_L=scaled_L, scaled_G=scaled_G, score=score)
            kept = score >= self.tau
        return Judged(draft.tokens, threshold=self.tau, chance=float(kept), kept=kept, signals=signals)

    def accept(self, session, draft, pairs):
        """(tokens, labels, judged), one verdict for the step."""
        step = self.verdict(session, draft, pairs)
        tokens = draft.tokens if step.kept else self.write(session)
        return tokens, ['draft' if step.kept else 'target'] * len(tokens), [step]

    def explain(self, cycle, word):
        if not cycle.judged:
            return ''
        (step,) = cycle.judged
        why = 'kept' if step.kept else 'the target writes it'
        signals = step.signals
        if 'score' in signals:
            sign = '>=' if step.kept else '<'
            why = ('L {L:.2f} ({scaled_L:.2f}), G {G:.2f} ({scaled_G:.2f}): {score:.2f}'.format(**signals) +
                   f' {sign} {step.threshold:g}, {why}')
        return f'candidate {signals["candidate"]} of {self.k}; {why}'

    def write(self, session):
        """The ids of the step as the target writes it, from the same committed text."""
        written = []
        for cycle in decode(copy.copy(session), Exact(self.gamma)):
            for token in cycle.tokens:
                written.append(token)
                if len(written) == self.longest(session) or self.has_ended(session, written):
                    return written              # at the latest by `longest`; drops the rest of the block


def token_logps(logits, tokens):
    """log p of each token [T] in nats, of the full vocabulary at temperature 1; logits [T, V]."""
    ids = to_device(tokens, logits.device)[:, None]                                     # [T, 1]
    return kernels.precise(logits).log_softmax(-1).gather(1, ids)[:, 0]


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


def scaled(value, ends):
    """The value on a scale of 0..1 between two ends, a calibrated range."""
    low, high = ends
    return min(1.0, max(0.0, (value - low) / max(high - low, 1e-6)))


METHODS['specguard'] = SpecGuard


# ---------------------------------------------------------------------------------- sparse verification
# The target's pass is made cheaper: some layers (anchors) choose blocks of keys by the root's query, and the
# layers after them reuse the choice; a token's weakest experts, and weak channels, are left out. It reads
#     dense_below + rho (cached - dense_below) of the cached keys, in whole blocks, and sinks and locals.
# Overrides propose, which makes the session's path sparse.
# Source: "Accelerate speculative decoding with sparse computation in verification" (2025). The paper's
# "first draft token" is our root.

Blocks = namedtuple('Blocks', 'rho dense_below block sinks locals scores')      # knobs of sparse attention
layer_function = cache(partial)     # one object for equal knobs, so equal Paths compare equal: see Compiled


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
    scores = staticmethod(kernels.mean_scores)      # function (query, keys, mean keys) -> scores of blocks

    @property
    def lossless(self):
        return self.rho == 1 and not self.ffn_quantile and not self.moe_skip

    def propose(self, session):
        session.sparse = self           # for every pass of the target after the prompt
        self.cached = len(session.tokens) - 1
        return super().propose(session)

    def explain(self, cycle, word):
        if 'target/sparse' not in cycle.passes:
            return ''
        kept = min(self.cached // self.block, int(kernels.kept_blocks(self.cached, self)))
        keys = kept * self.block + self.cached % self.block     # kept blocks, the partial one after the last
        return f'{keys} of {self.cached} cached keys are read in each layer'

    def sparse_path(self, path, session):
        """The path without what the knobs leave out; sublayers that it skips stay skipped."""
        E = session.target.model.config.num_experts
        anchors = self.anchor_layers(session.calibration, len(path.ffns))
        rule = Blocks(*(getattr(self, name) for name in Blocks._fields))
        attends = []
        ffns = []
        for i, (attend, ffn) in enumerate(zip(path.attends, path.ffns)):
            if attend and self.rho < 1:
                attend = layer_function(kernels.sparse_attend, anchor=i in anchors, rule=rule)
            threshold = 0
            if self.ffn_quantile:
                threshold = at_quantile(session.calibration['sparse']['channels'][i], self.ffn_quantile)
            if ffn and E and (self.moe_skip or self.ffn_quantile):
                tables = session.calibration['sparse']['experts'][i][:self.moe_skip]
                betas = tuple(at_quantile(table, self.moe_quantile) for table in tables)
                ffn = layer_function(kernels.sparse_moe_forward, betas=betas, threshold=threshold)
            elif ffn and threshold:
                ffn = layer_function(kernels.sparse_swiglu, threshold=threshold)
            attends.append(attend)
            ffns.append(ffn)
        return path.sparsified(tuple(attends), tuple(ffns), self.block if self.rho < 1 else 0)

    def anchor_layers(self, calibration, layers):
        """The layers that choose blocks; the layers after one reuse its choice.

        By default half of the layers, in the calibrated order, or every second layer without one.
        """
        count = self.anchors
        if count is None and 'sparse' in calibration:
            count = -(-layers // 2)                     # rounded up
        if count:
            return sorted(calibration['sparse']['anchors'][:count])
        return list(range(0, layers, 2))


def at_quantile(table, share):
    """The entry of a table of evenly spaced quantiles, 0 to 1, that is nearest to this share."""
    return table[round(share * (len(table) - 1))]


METHODS['sparse'] = Sparse


# ------------------------------------------------------------------------------------------------ plumbing

HEAD = 1024     # likeliest tokens among which top-p is looked for first
OVERFLOW = 'in 16 bits try --dtype fp32; else weights overflow'


def sort_head(p, mass):
    """(chances, ids) of the likeliest tokens of p [..., V], in order, enough to have this mass together.

    A CPU sorts HEAD tokens first: four rows of 150,000 tokens take 14 ms instead of 76.
    """
    if not on_gpu(p):
        head = p.topk(min(HEAD, p.shape[-1]))
        if (head.values.cumsum(-1)[..., -1] >= mass).all():
            return head
    return p.sort(-1, descending=True)


def check_finite(numbers, who, session):
    """ValueError for NaN or infinity among the largest logits, which would give silent wrong tokens."""
    require_that(math.isfinite(numbers.sum()),
                 f'the {who} computed NaN or infinity after {len(session.tokens)} tokens: {OVERFLOW}')


def readers_of(session):
    """{role: Reader} of the models that are there."""
    readers = dict(target=session.target, draft=session.drafter)
    return {role: reader for role, reader in readers.items() if reader}


def passes_since(session, marks):
    """{reader/path: [passes, positions]} since these marks, {role: passes so far}."""
    totals = {}
    for role, reader in readers_of(session).items():
        for path, positions in reader.log[marks[role]:]:
            total = totals.setdefault(f'{role}/{path.name}', [0, 0])
            total[0] += 1
            total[1] += positions
    return totals


def read_prompt(session):
    """Reads all of the prompt but its last token into every cache, before the time of a text begins."""
    readers = readers_of(session)
    if session.room <= 0:
        readers.pop('draft', None)                      # it is not asked
    for reader in readers.values():
        reader.read(session.tokens[:-1], reader.model.full, 0)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def whole_passes(passes):
    """The passes of {reader/path: number} that went through all of the target's layers, full or sparse."""
    return passes.get('target/full', 0) + passes.get('target/sparse', 0)
