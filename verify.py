"""How proposed tokens are verified: the maths, the nouns, and exact speculative decoding with its verbs.

propose -> score -> accept -> commit is one cycle; specmini.decode runs the loop. A method is a dataclass
whose fields are its knobs and which overrides only the verbs it changes. Baselines are in lab/rivals.py.

p is the target's distribution and q the draft's, everywhere; both are what is really sampled from, after
temperature, top-k and top-p. Temperature 0 is a one-hot distribution, so no rule has a greedy branch.
V vocabulary, n draft tokens of a block.
"""
import copy
import math
import operator
import os
import statistics
from collections import Counter, namedtuple
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf

import torch

import kernels
from model import expect


# ------------------------------------------------------------------------------------------------ the maths

def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """logits [..., V] -> the distribution to sample from [..., V], in fp32 at least.

    top_k 0 keeps all; top_p keeps the likeliest tokens up to and including the one that reaches this mass.
    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
    z = (z - z.amax(-1, keepdim=True)) / temperature            # the largest is 0: nothing overflows
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k).values[..., -1:], -torch.inf)
    p = z.softmax(-1)
    if top_p < 1:
        ranked, order = p.sort(-1, descending=True)
        late = ranked.cumsum(-1) - ranked >= top_p              # the mass before this token already suffices
        late[..., 0] = False
        p = p.masked_fill(late.scatter(-1, order, late), 0)
        p = p / p.sum(-1, keepdim=True)
    return p


def sample(p, generator=None):
    """One index for each row of p [..., V] -> [...], by a race of exponential clocks: no device sync."""
    clocks = torch.empty_like(p).exponential_(generator=generator)
    return (p / clocks.clamp_(min=torch.finfo(p.dtype).tiny)).argmax(-1)    # a clock of 0: 0 / 0 would win


def residual(p, q):
    """What the target still has to give once min(p, q) is taken: norm(max(p - q, 0)) [V], or p if all is.

    Source: Leviathan et al. 2023, algorithm 1 (p').
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def overlap(p, q):
    """The chance that p keeps a sample of q: sum of min(p, q). Source: Leviathan et al. 2023, cor. 3.6."""
    return torch.minimum(p, q).sum(-1)


# ------------------------------------------------------------------------------------------------ the nouns

@dataclass
class Draft:
    """Guessed tokens and the very distributions they were drawn from (a point mass if they were not)."""
    tokens: list                            # [n] ids
    q: torch.Tensor                         # [n, V]
    logits: torch.Tensor = None             # [n, V] raw, for rules that look at confidence
    labels: list = None                     # [n] who wrote each, where it was not the draft alone
    known: torch.Tensor = None              # [m, V] the first rows of Score.logits, where already read
    notes: list = None                      # [n] what the proposer has to say of each token, for the trace

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, the exact rule becomes sample-and-match."""
        ids = torch.tensor(tokens, dtype=torch.long, device=model.cos.device)[:, None]
        return cls(tokens, torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0))


class Score:
    """A verifier's view of a draft: p [n + 1, V]. Lazy: the pass happens when a rule first looks."""

    def __init__(self, session, draft, path, reader=None):
        """reader: the target's unless given."""
        self.session, self.draft, self.path, self.reader = session, draft, path, reader or session.target

    @cached_property
    def logits(self):
        """[n + 1, V] raw: row i judges draft token i, the last row gives the bonus token.

        The pass reads n + 1 positions: the root (the last committed token, in no cache yet) and the draft.
        """
        s, tokens, known = self.session, self.draft.tokens, self.draft.known
        rest = len(tokens) + 1 - (0 if known is None else len(known))
        if not rest:
            return known
        rows = finite(self.reader.read(s.tokens, tokens, self.path, rest), 'target', len(s.tokens))
        return rows if known is None else torch.cat([known, rows])

    @cached_property
    def p(self):
        return self.session.probs(self.logits)

    @cached_property
    def pq(self):
        """[(p(x), q(x))] of each draft token x, as floats: one transfer for the whole block."""
        places = range(len(self.draft.tokens)), self.draft.tokens
        return list(zip(*torch.stack([self.p[places], self.draft.q.to(self.p.dtype)[places]]).tolist()))

    @cached_property
    def ratios(self):
        """p(x) / max p of each draft token x, as floats, of the raw logits: at temperature 1 in any run."""
        z = self.logits[:-1]
        return (z[range(len(z)), self.draft.tokens] - z.amax(-1)).exp().tolist()


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it."""
    drafted: list           # ids
    judged: list            # of each draft token that was looked at: token, p, q, threshold, chance, kept
    tokens: list            # ids committed
    labels: list            # who wrote each: draft, slim, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions, seconds]
    seconds: float

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the extra token."""
        return self.labels.count('draft')


def whole_passes(passes):
    """How many of the passes were the target's through all its layers: full, observed or sparse, not slim."""
    return passes['target/full'] + passes['target/grounded'] + passes['target/sparse']


@dataclass
class Session:
    """One text in the making: who reads, what is committed, how it is sampled (always through draw)."""
    target: object                          # Reader
    draft: object                           # Reader, or None
    source: object                          # function (session, method, n) -> Draft
    tokens: list                            # ids, prompt first
    room: int                               # tokens that may still be committed
    eos: frozenset = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator = None
    text: object = None                     # function from ids to text, for methods that work by lines
    checker: object = None                  # a task's step checker; a method that needs one refuses without
    calibration: dict = field(default_factory=dict)     # sections, see lab/calibration.py
    mid: object = None                      # Reader of a third model between the two, or None
    sparse: object = None                   # Sparse, which thins out the target's passes, or None
    cycles: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    prompt_seconds: float = field(default=0.0, init=False)

    @cached_property
    def slim(self):
        """The target's path without the sublayers that its calibrated mask skips."""
        return self.target.model.full.slim(set(self.calibration['mask']['skip']))

    def read_prompt(self):
        """Reads all of the prompt but its last token into every cache, counted apart as prompt_seconds."""
        for reader in filter(None, (self.target, self.draft, self.mid)):
            reader.read(self.tokens[:-1], [], reader.model.full, 0)
        self.prompt_seconds = sum(seconds for *_, seconds in self.take().values())

    def view(self, path):
        """The target's path as this session reads it in this cycle: sparse if it was asked for."""
        return self.sparse.view(path, self) if self.sparse else path

    def probs(self, logits, temperature=None, top_p=None):
        t = self.temperature if temperature is None else temperature
        return probs(logits, t, self.top_k, self.top_p if top_p is None else top_p)

    def draw(self, p):
        """A sample from each row of p [..., V] -> [...]."""
        return sample(p, self.generator)

    def flip(self, chance):
        """True with this chance; certain outcomes draw nothing."""
        if not 0 < chance < 1:
            return chance >= 1
        coin = torch.tensor([1 - chance, chance], dtype=torch.float64, device=self.target.model.cos.device)
        return bool(self.draw(coin))

    def commit(self, tokens):
        """Writes tokens, cut at the first end of sequence and at the room left; returns them."""
        tokens = tokens[:self.room]
        end = next((i for i, x in enumerate(tokens, 1) if x in self.eos), None)
        tokens, self.ended = tokens[:end], end is not None
        self.tokens = self.tokens + tokens
        self.room -= len(tokens)
        self.cycles += 1
        return tokens

    def take(self):
        """{reader/path: [passes, positions, seconds]} since the last call."""
        readers = [('target', self.target), ('draft', self.draft), ('mid', self.mid)]
        return {f'{role}/{path}': row for role, r in readers if r for path, row in r.take().items()}


# ------------------------------------------------------------------------------------ where drafts come from

def rollout(session, method, n):
    """At most n tokens from the draft model, one after the other; the method's `more` may stop it early.

    Without a draft model the target drafts for itself on its slim path (Zhang et al. 2023, Draft & Verify).
    """
    reader = session.draft or session.target
    path = reader.model.full if session.draft else session.slim
    tokens, q, logits = branch(session, method, n, reader, path, 1)
    ids = tokens[0].tolist()
    # the last token was not fed: if all are kept, the next read starts one token before the extra one
    reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
    return Draft(ids, q[0], logits[0])


def branch(session, method, n, reader, path, rows):
    """(tokens [rows, n], distributions and raw logits [rows, n, V]) behind the text, sampled side by side.

    The method's `more` may stop all rows earlier. A single row is written in the reader's own cache.
    """
    logits, tokens, q = [reader.read(session.tokens, [], path, 1).expand(rows, -1)], [], []
    twin = reader.fork(rows, n) if rows > 1 else reader
    while True:
        q.append(session.probs(logits[-1], method.draft_temperature, method.draft_top_p))
        tokens.append(session.draw(q[-1]))
        if len(tokens) == n or not method.more(session, tokens, logits):
            break
        logits.append(twin.append(tokens[-1], path))
    logits = finite(torch.stack(logits, 1), 'draft', len(session.tokens))   # the first sync with the device
    return torch.stack(tokens, 1), torch.stack(q, 1), logits


def lookup(session, method, n):
    """What followed the last earlier occurrence of the text's last 3 tokens, else 2. Source: Saxena 2023."""
    text = torch.tensor(session.tokens)
    for size in (3, 2):
        if len(text) > size:
            found = (text[:-1].unfold(0, size, 1) == text[-size:]).all(1).nonzero()
            if len(found):
                begin = int(found[-1]) + size
                return Draft.points(session.tokens[begin:begin + n], session.target.model)
    return silence(session, method, n)


def silence(session, method, n):
    """No draft at all: the cycle is one step of plain decoding."""
    return Draft.points([], session.target.model)


def finite(logits, who, length):
    """The logits [n, V]; ValueError if they hold NaN or infinity, which would become silent wrong tokens."""
    good = logits.amax().isfinite()
    expect(good, f'the {who} computed NaN or infinity after {length} tokens: its weights overflow')
    return logits


# ---------------------------------------------------------------------------------------------- the methods

def knob(default, *allowed):
    """A dataclass field with its range: a table of words, words beside the default, or least and greatest."""
    if isinstance(allowed[0], dict):
        allowed, = allowed
    elif isinstance(default, str):
        allowed = default, *allowed
    return field(default=default, metadata=dict(allowed=allowed))


def require(holds, knob, found, expected):
    """ValueError in one line unless the knob's value is in its range."""
    expect(holds, f'knob {knob.rstrip("_")} is {found or repr(found)}; expected {expected}')


def check_knobs(method):
    """ValueError for a knob out of its range; a subclass that gives another default keeps the range."""
    declared = {f.name: f for c in reversed(type(method).__mro__[:-1]) for f in fields(c) if f.metadata}
    for name, f in declared.items():
        value, allowed = getattr(method, name), f.metadata['allowed']
        if isinstance([*allowed][0], str):
            good, expected = value in allowed, f'one of {", ".join(allowed)}'
        else:
            low, high = (*allowed, 2 ** 31)[:2]
            good, expected = value is not None and low <= value <= high, f'{low} to {high}'
        unset = value is None and getattr(type(method), name) is None
        require(good or unset, name, value, expected)


def knobs_of(kind):
    """{knob: dataclass field} of a method's class; plain decoding has none. accept_ is the knob accept."""
    return {} if kind is Autoregressive else {f.name.rstrip('_'): f for f in fields(kind)}


class Fixed:
    """The length controller of a method: gamma tokens a cycle. Others override length, more or block.

    causal: what it drops is dropped before it is sampled, so that the law is untouched.
    """
    causal = True
    sure = ()                               # confidence of the block's first tokens, where it was looked at

    def __init__(self, method):
        self.method = method

    def length(self, session):
        """The most tokens that the next block may have."""
        return self.method.gamma

    def more(self, session, tokens, logits):
        """Whether to draft another token. May look at all that is in the block: it will be verified."""
        return True

    def block(self, session, spare=1):
        """The Draft of a cycle; spare: tokens of room that it leaves for those that the cycle adds."""
        n, context = self.length(session), session.target.model.config.max_position_embeddings
        expect(n < context, f'a block of {n} draft tokens in a context of {context}: draft fewer')
        n = min(n, session.room - spare)
        return self.method.draft(session, n) if n > 0 else silence(session, self.method, 0)


CONTROLLERS = dict(fixed=Fixed)             # Online is CM-ASD's; lab/rivals.py has more


@dataclass
class Exact:
    """Exact speculative decoding: whatever the draft, the text follows the target's law.

    A method object serves one text: what it remembers from cycle to cycle begins with it.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    gamma: int = knob(4, 0)                 # draft tokens a cycle
    draft_temperature: float = None         # of the draft model; None: the run's, 0: greedy drafting
    draft_top_p = None                      # likewise; a knob where a paper has it
    controller: str = knob('fixed', CONTROLLERS)    # what decides a block's length; fixed: gamma
    needs = ()                              # sections of calibration.json, see lab/calibration.py; no knob

    def __post_init__(self):
        """ValueError for a knob out of range; methods whose knobs hang together check that too."""
        check_knobs(self)
        t = self.draft_temperature
        require(t in (None, 0) or 1e-6 <= t < inf, 'draft_temperature', t, '0, or 1e-6 or more')
        self.control = CONTROLLERS[self.controller](self)

    @property
    def lossless(self):
        """Whether the committed text follows the target's law exactly at these knobs."""
        return self.control.causal

    def propose(self, session):
        """The Draft of this cycle."""
        return self.control.block(session)

    def draft(self, session, n):
        """A Draft of at most n tokens, n above 0."""
        return session.source(session, self, n)

    def more(self, session, tokens, logits):
        """Whether to draft another token; tokens [rows] and raw logits [rows, V] of each step so far."""
        return self.control.more(session, tokens, logits)

    def path(self, session):
        """The path on which the target verifies."""
        return session.view(session.target.model.full)

    def score(self, session, draft):
        return Score(session, draft, self.path(session))

    def kept(self, score, i):
        """The chance that draft token i is kept: min(1, p(x) / q(x))."""
        p, q = score.pq[i]
        return min(1.0, p / q)

    def threshold(self, score, i):
        """What the rule compares draft token i with, for the trace; None where it has no threshold."""
        return None

    def settle(self, score, i):
        """The distribution [V] of the token that replaces draft token i."""
        return residual(score.p[i], score.draft.q[i])

    def accept(self, session, draft, score):
        """(tokens, labels, judged) of this cycle, left to right up to a rejection or the end of sequence."""
        judged, wrote = [], draft.labels or ['draft'] * len(draft.tokens)
        for i, token in enumerate(draft.tokens):
            (p, q), limit, chance = score.pq[i], self.threshold(score, i), self.kept(score, i)
            kept = session.flip(chance)
            judged.append(dict(token=token, p=p, q=q, threshold=limit, chance=chance, kept=kept,
                               **(draft.notes[i] if draft.notes else {})))
            if not kept:
                other = int(session.draw(self.settle(score, i)))
                return draft.tokens[:i] + [other], wrote[:i] + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], wrote[:i + 1], judged
        extra = int(session.draw(score.p[-1]))
        return draft.tokens + [extra], wrote + ['bonus' if wrote else 'target'], judged


@dataclass
class Autoregressive(Exact):
    """Plain decoding with the target, one token a pass: speculative decoding with nothing drafted."""
    gamma: int = 0


# --------------------------------------------------------------------- CM-ASD: confidence-modulated drafting

def uncertainty(logits):
    """(q, log q [..., V], minus q's entropy [...] in nats) of raw logits at temperature 1, fp32 at least."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    q, logq = logits.softmax(-1, kind), logits.log_softmax(-1, kind)
    return q, logq, (q * logq).sum(-1)


def signals(logits):
    """Three signs of confidence in 0..1, a tuple for each row of raw logits [n, V] at temperature 1.

    1 - H / log V; tanh(logit margin / 2), which is (q1 - q2) / (q1 + q2); q1 - q2. In plain Python as soon as
    V is gone: an operation on a few numbers costs as much as one on a thousand.
    Source: Sen et al. 2025 (CM-ASD) name the three; the first two normalisers are ours.
    """
    (_, logq, sure), most = uncertainty(logits), math.log(logits.shape[-1])
    return [(min(1.0, max(0.0, 1 + x / most)), math.tanh((a - b) / 2), math.exp(a) - math.exp(b))
            for x, (a, b) in zip(sure.tolist(), logq.topk(2).values.tolist())]


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
    alpha: float = knob(1.0, 0)             # block length over confidence
    lam_entropy: float = knob(1.0, 0)       # weights of the signals in C, normalised to sum 1
    lam_margin: float = knob(1.0, 0)
    lam_softmax: float = knob(1.0, 0)
    tau_base: float = knob(0.3, 0)          # threshold where C = 1
    gamma_tau: float = knob(0.5, 0)         # what is added where C = 0; the paper sweeps 0.1, 0.5, 1, 2
    accept_: str = knob(None, 'ratio', 'lenience', 'strict')  # None: by temperature. Knob: accept

    def __post_init__(self):
        super().__post_init__()
        require(1 <= self.k_min <= self.k_max, 'k_min', self.k_min, f'1 to k_max, {self.k_max}')
        lam = self.lam_entropy, self.lam_margin, self.lam_softmax
        require(sum(lam) > 0, 'lam_entropy', 0.0, 'above 0 where the other two are 0')
        self.lam = [x / sum(lam) for x in lam]

    @property
    def lossless(self):
        exact = self.accept_ == 'strict' or self.tau_base >= 1 and self.accept_ != 'ratio'
        return self.control.causal and exact

    def confidence(self, logits):
        """C in 0..1 of each row of raw logits [n, V], the weighted mean of its signals."""
        return [sum(map(operator.mul, self.lam, row)) for row in signals(logits)]

    def window(self, confidence):
        """The block length that a mean confidence allows; ValueError if it is NaN."""
        expect(confidence == confidence, 'the draft computed NaN or infinity: its weights overflow')
        return min(self.k_max, max(self.k_min, math.floor(self.alpha * confidence * self.k_max)))

    def propose(self, session):
        drawn = session.source not in (lookup, silence)
        expect(drawn, 'cmasd takes its confidence from a draft model: give --draft DIR')
        draft = super().propose(session)
        sure = list(self.control.sure)
        if len(sure) < len(draft.tokens):
            sure += self.confidence(draft.logits[len(sure):])
        draft.notes = [dict(confidence=c) for c in sure]
        return draft

    def threshold(self, score, i):
        tau = self.tau_base + self.gamma_tau * (1 - score.draft.notes[i]['confidence'])
        return 1.0 if self.accept_ == 'strict' else min(1.0, max(0.01, tau))

    def kept(self, score, i):
        tau, (p, q) = self.threshold(score, i), score.pq[i]
        if (self.accept_ or ('lenience' if score.session.temperature else 'ratio')) != 'ratio':
            return min(1.0, p / (tau * q))
        return float(score.ratios[i] >= tau and (tau < 1 or p > 0))     # a tie is no match: tau = 1 is exact


class Online(Fixed):
    """CM-ASD's controller, for any method: the token that fills its window, or ends the text, is the last."""

    def __init__(self, method):
        self.method, self.rule = method, method if isinstance(method, CmAsd) else CmAsd()

    def length(self, session):
        return self.rule.k_max

    def block(self, session, spare=1):
        self.sure = []
        return super().block(session, spare)

    def more(self, session, tokens, logits):
        self.sure.append(statistics.fmean(self.rule.confidence(logits[-1])))
        ended = all(x in session.eos for x in tokens[-1].tolist())
        return not ended and len(tokens) < self.rule.window(sum(self.sure) / len(self.sure))


CONTROLLERS.update(online=Online)


# -------------------------------------------------------------- ECSV: reliability-weighted voting of branches

@dataclass
class Ballot:
    """What B branches of n tokens say of K candidates a position; probabilities at temperature 1."""
    tokens: list                            # [B][n] ids
    entropy: list                           # [B][n] H(q) / log V, in 0..1: no calibration is needed
    own: list                               # [B][n] log q of the branch's own token, nats
    names: list                             # [n][K] candidate ids: the branches' tokens, then the M likeliest
    q: list                                 # [B][n][K] q of the candidates
    margins: list                           # [B][n] the target's logit margin where it was asked (c), else 0
    verifier: dict                          # position: the target's logits of its candidates, where asked

    @classmethod
    def of(cls, tokens, logits, top_m):
        """From tokens [B, n] and raw logits [B, n, V]."""
        (B, n, V), (q, logq, sure) = logits.shape, uncertainty(logits)
        names = tokens.T
        if top_m:
            names = torch.cat([names, q.sum(0).topk(min(top_m, V)).indices], -1)                # [n, K]
        votes, own = q.gather(-1, names.expand(B, n, -1)), logq.gather(-1, tokens[..., None])[..., 0]
        margins = [[0.0] * n for _ in range(B)]
        return cls(*(x.tolist() for x in (tokens, sure / -math.log(V), own, names, votes)), margins, {})

    def shares(self):
        """[B][n] the share of all branches that have this branch's token at this position."""
        columns = list(zip(*self.tokens))
        return [[column.count(x) / len(column) for x, column in zip(row, columns)] for row in self.tokens]

    def doubtful(self, policy, R, reach):
        """At most R positions below `reach` that most deserve a check, ascending."""
        top, unsure = list(map(max, zip(*self.shares()))), list(map(statistics.fmean, zip(*self.entropy)))
        doubt = dict(disagreement=[1 - x for x in top], entropy=unsure,
                     agree_entropy=list(map(operator.mul, top, unsure)))[policy]
        return sorted(sorted((j for j in range(reach) if doubt[j] > 0), key=lambda j: -doubt[j])[:R])

    def ask(self, rows, chosen):
        """Notes what the target's logits [m, V] say of the candidates at the chosen positions."""
        for j in chosen:
            (best, second), (top, _) = (x.tolist() for x in rows[j].topk(2))
            self.verifier[j] = rows[j][self.names[j]].tolist()
            for row, own, z in zip(self.margins, self.tokens, self.verifier[j]):
                row[j] = z - (second if own[j] == top else best)

    def elect(self, scores, prefix, ask):
        """The tokens [n] with the highest sums of scores [B][n][K]; prefix: who left the text has no vote.

        Ties go to the verifier's logit where it was asked (and `ask`), else to mean q, then to the lowest id.
        """
        elected, total = [], lambda table, j, voters: map(math.fsum, zip(*(table[b][j] for b in voters)))
        for j, names in enumerate(self.names):
            voters = [b for b, own in enumerate(self.tokens) if not prefix or own[:j] == elected]
            voters = voters or range(len(self.tokens))  # where no branch agrees any more, all vote
            asked = self.verifier.get(j) if ask else None
            ranked = zip(total(scores, j, voters), asked or total(self.q, j, voters), (-x for x in names))
            elected.append(-max(ranked)[-1])
        return elected


@dataclass
class Ecsv(Exact):
    """ECSV: several drafted branches are fused by a reliability-weighted vote; the fused block is verified.

    A fused token carries its point mass as q: the exact rule is sample-and-match, the text the target's. An
    early mismatch has no refund, the pass has read the rest; what a short block leaves is banked for a check.
    Source: ECSV (a proposal, not published): reliability model, fusion rule, budget control.
    """
    draft_temperature: float = knob(0.8, 0)  # the proposal states no values, all here are ours
    draft_top_p: float = knob(0.95, 1e-9, 1)
    branches: int = knob(4, 1, 64)          # B; to be tried: 2, 4, 8
    depth: int = None                       # tokens a branch, k; None: gamma
    a_entropy: float = knob(0.5, 0)         # weights of the features in r
    a_agree: float = knob(1.0, 0)
    a_self: float = knob(0.5, 0)
    a_spot: float = knob(0.0, 0)
    gamma_r: float = knob(1.0, 0)           # w = exp(gamma_r r); 0: every vote counts the same
    soft: float = knob(0.0, 0)              # lambda, weight of the soft vote
    top_m: int = knob(4, 0)                 # candidates beside the branches' tokens, for the soft vote alone
    spots: int = knob(0, 0)                 # R, positions checked with the target before the final vote
    policy: str = knob('disagreement', 'entropy', 'agree_entropy')  # where; the last: agreed, yet unsure
    granularity: str = knob('position', 'branch', 'window')  # r of it, or its mean; the window trails
    window: int = knob(2, 1)                # positions
    align: str = knob('positional', 'prefix')  # prefix (ours): a branch votes while it agrees with the fused
    tie_break: str = knob('verifier', 'draft')  # its logit where asked, else mean q; draft: mean q
    budget: int = None                      # target positions a cycle at most; None: those of the block alone
    bonus_check: bool = False               # one check more where the last cycle left some budget
    lossless = True                         # whatever chose its point masses or cut the block; no knob

    def __post_init__(self):
        self.gamma, self.banked = self.gamma if self.depth is None else self.depth, 0
        super().__post_init__()
        require(self.budget is None or self.budget >= 2, 'budget', self.budget, '2 positions or more')

    def draft(self, session, n):
        n = min(n, (self.budget or inf) - 1)
        tokens, _, logits = self.texts(session, n)
        ballot = Ballot.of(tokens, logits, self.top_m if self.soft else 0)
        n, fused, known, m, same = len(ballot.names), self.fuse(ballot), None, 0, -1   # `more` may cut n
        cap, R = self.budget or n + 1, self.spots + (self.bonus_check and self.banked > 0)
        if chosen := ballot.doubtful(self.policy, R, min(n, cap - 1)):
            # verifying position j takes all before it: a check costs a pass over that many positions
            rows, before = Score(session, Draft(fused[:chosen[-1]], None), self.path(session)).logits, fused
            ballot.ask(rows, chosen)
            fused, m = self.fuse(ballot), len(rows)
            same = len(os.path.commonprefix([before[:m - 1], fused]))
            # m of the cap are spent, `same` of them need not be read again; row i has read what is before i
            fused, known = fused[:cap - m + same], rows[:same + 1]
        self.banked = cap - m - (len(fused) - same)
        return replace(Draft.points(fused, session.target.model), known=known,
                       logits=logits.mean(0)[:len(fused)],      # the branches' mean, for length controllers
                       notes=[dict(branches=column) for column in zip(*ballot.tokens)])

    def texts(self, session, n):
        """(tokens [B, n], distributions and raw logits [B, n, V]) of the branches."""
        expect(session.draft, 'branches are sampled from a draft model: give --draft DIR')
        return branch(session, self, n, session.draft, session.draft.model.full, self.branches)

    def weights(self, ballot):
        """w [B][n], above 0: exp(gamma_r r) of r = -a H + a agreement + a log q(own) + a margin."""
        B, signs = len(ballot.tokens), (ballot.shares(), ballot.entropy, ballot.own, ballot.margins)
        agreement = lambda share: (share * B - 1) / max(1, B - 1)           # with the other branches
        r = [[self.a_agree * agreement(share) - self.a_entropy * unsure + self.a_self * own
              + self.a_spot * margin for share, unsure, own, margin in zip(*rows)] for rows in zip(*signs)]
        if self.granularity == 'branch':
            r = [[statistics.fmean(row)] * len(row) for row in r]
        elif self.granularity == 'window':
            ends = range(1, len(ballot.names) + 1)
            r = [[statistics.fmean(row[max(0, j - self.window):j]) for j in ends] for row in r]
        return [[math.exp(min(20.0, max(-20.0, self.gamma_r * x))) for x in row] for row in r]

    def scores(self, ballot):
        """[B][n][K] what each branch gives to each candidate."""
        return [[[w * ((x == own) + self.soft * q) for x, q in zip(*candidates)]
                 for w, own, *candidates in zip(*row, ballot.names, laws)]
                for *row, laws in zip(self.weights(ballot), ballot.tokens, ballot.q)]

    def fuse(self, ballot):
        """The fused tokens [n]."""
        return ballot.elect(self.scores(ballot), self.align == 'prefix', self.tie_break == 'verifier')


# ------------------------------------------------------------------------- VIA-SD: a slim verifier in between

def violation(b, a, alpha=0.5, beta=0.5):
    """R(b|a) [...] in nats: how far drafting from a breaks what lossy verification by b forgives.

    a, b: log-probabilities [..., V] of the raw logits. The first term is what b accepts too rarely, the
    second what its residual lacks. At alpha 0, beta 1 nothing is forgiven; at 1/2, 1/2 a factor of 2 is.
    Source: VIA-SD (2026), R_KL^{alpha,beta}, as its public reimplementations write it.
    """
    d = a - b
    starved = b.exp() * (d + math.log(beta)).clamp(min=0)
    return (a.exp() * (d + math.log1p(-alpha)).clamp(min=0) + starved).sum(-1)


@dataclass
class ViaSd(Exact):
    """The target with sublayers skipped (slim, s) judges first, the full target what slim doubts. LOSSY.

    By r = s(y) / max s a draft token y is kept, rewritten by slim or (r < escalate) decided by the target,
    which reads lag and block only then, over what slim wrote to the cache that they share.
    Source: VIA-SD (2026); its p, q', q are our q, s, p, its alpha_1 and alpha_2 keep and escalate.
    """
    gamma: int = 5
    keep: float = 0.5                       # r from which a draft token stays; for lossy_sd the lenience
    escalate: float = knob(0.3, 0)          # r below which the target decides; above 1 it always does
    gate: str = knob('ratio', 'one_minus_alpha', 'lossy_sd', 'two_level_exact')  # the second as published
    max_lag: int = knob(32, 0)              # tokens that slim may build on before the target has read them
    after_escalation: str = knob('full', 'gate')  # full: the pass is paid, the target judges the rest too
    slim_bonus: bool = False                # one more token, from slim, after a block that it kept
    needs = ('mask',)

    def __post_init__(self):
        super().__post_init__()
        low = dict(ratio=self.escalate, lossy_sd=1e-6).get(self.gate, 0)
        require(low <= self.keep, 'keep', self.keep, f'{low} to inf')

    @property
    def lossless(self):
        return self.control.causal and (self.gate == 'two_level_exact' or self.bounds[0] > 1)

    @property
    def bounds(self):
        """(r below which a token is escalated, r from which it is kept). Published: both from 1 - alpha."""
        low, high = self.escalate, self.keep
        return (1 - low, 1 - high) if self.gate == 'one_minus_alpha' else (low, high)

    def propose(self, session):
        """The Draft; for two_level_exact what slim, as an exact verifier, made of it: a sample of s."""
        draft = self.control.block(session, spare=0)    # a kept block adds no token
        if self.gate != 'two_level_exact':
            return draft
        tokens, labels, _ = super().accept(session, draft, slim := self.slim(session, draft))
        return Draft(tokens, slim.p[:len(tokens)], labels=[x if x == 'draft' else 'slim' for x in labels])

    def slim(self, session, draft):
        return Score(session, draft, session.view(session.slim))

    def stages(self, session, draft, score):
        """The Scores that may judge, cheapest first; the last is the target's. A long lag is read first."""
        line, reader = session.tokens[:-1], session.target
        if len(line) - reader.cache.trusted(line, score.path) > self.max_lag:
            reader.read(line, [], score.path, 0)
        return [self.slim(session, draft), score]

    def judge(self, session, score, i, r, exact):
        """(the token at place i, its row of the trace) by one stage; r: slim's ratio; exact: the target's."""
        y, (p, q) = score.draft.tokens[i], score.pq[i]
        chance, other = float(r >= self.bounds[1]), score.p[i]
        if exact or self.gate == 'lossy_sd':
            chance, other = min(1.0, p / (q if exact else self.keep * q)), self.settle(score, i)
        z = y if session.flip(chance) else int(session.draw(other))
        by, p, limit = ('target', p, None) if exact else ('slim', None, self.bounds[1])
        return z, dict(token=y, p=p, q=q, ratio=r, threshold=limit, chance=chance, kept=z == y, by=by)

    def accept(self, session, draft, score):
        if self.gate == 'two_level_exact' or not draft.tokens:
            return super().accept(session, draft, score)
        stages, judged, t, top = self.stages(session, draft, score), [], 0, 0
        last, n = len(stages) - 1, len(draft.tokens)
        for i, y in enumerate(draft.tokens):
            begin = t if self.after_escalation == 'full' else 0
            t = next(t for t in range(begin, last + 1) if t == last or stages[t].ratios[i] >= self.bounds[0])
            z, row = self.judge(session, stages[t], i, stages[min(t, last - 1)].ratios[i], t == last)
            judged, top = judged + [row], max(top, t)
            if z != y or y in session.eos:
                return draft.tokens[:i] + [z], ['draft'] * i + ['draft' if z == y else row['by']], judged
        extra = [int(session.draw(stages[top].p[-1]))] if top == last or self.slim_bonus else []
        return draft.tokens + extra, ['draft'] * n + ['bonus' if top == last else 'slim'][:len(extra)], judged


# ---------------------------------------------------------------------------- SpecGuard: whole steps verified

PRESETS = dict(     # of knobs that are None: as the notes have them, as others report the paper's, and greedy
    notes=dict(k=4, draft_temperature=0.7, draft_top_p=1.0, beta=0.5, tau=0.5, target_k=1),
    paper=dict(k=16, draft_temperature=0.7, draft_top_p=0.8, beta=0.3, tau=0.7, target_k=16),
    greedy=dict(k=1, draft_temperature=0.0, draft_top_p=1.0, beta=0.5, tau=0.5, target_k=1))


def write_steps(session, method, reader, k):
    """k Drafts of one step each, sampled by `reader` as rows of one batch (a single row in its own cache).

    The target samples as the run does, the draft model at the method's settings. A row that is over idles.
    """
    n, who, path = len(session.tokens), 'draft', reader.model.full
    own = method.draft_temperature, method.draft_top_p
    if reader is session.target:
        who, path, own = 'target', session.view(path), ()
    logits = reader.read(session.tokens, [], path, 1).expand(k, -1)                     # [k, V]
    twin = reader if k == 1 else reader.fork(k, session.room)
    steps, rows, live = [], [[] for _ in range(k)], list(range(k))
    while live:
        steps.append(logits)
        for i, x in zip(live, session.draw(session.probs(logits[live], *own)).tolist()):
            rows[i].append(x)
        live = [i for i in live if not method.over(session, rows[i])]
        if live:
            logits = twin.append(torch.tensor([ids[-1] for ids in rows], device=logits.device), path)
    if k == 1:
        reader.cache.record(session.tokens + rows[0][:-1], n, path)
    each = zip(rows, finite(torch.stack(steps, 1), who, n))                             # [k, T, V]
    return [Draft(ids, session.probs(raw[:len(ids)], *own), raw[:len(ids)]) for ids, raw in each]


def loglikes(logits, tokens):
    """log p of each token [T] in nats, of the full vocabulary at temperature 1; logits [T, V]."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, kind)[range(len(tokens)), tokens]


def central(steps, sure):
    """Index of the step (a list of ids) likest the others, by F1 of token pairs; ties: the surer, first."""
    pairs = [Counter(zip([None] + ids, ids)) for ids in steps]
    sums = [sum(2 * (a & b).total() / (a.total() + b.total()) for b in pairs) for a in pairs]   # 1 for itself
    return max(range(len(steps)), key=lambda i: (round(sums[i], 9), sure[i], -i))


def ensemble(seen, ranges, beta, combine):
    """(score 0..1, whether a signal was clipped) of a step; seen [T]: (log-probability, grounding)."""
    raw = [(min(x) - low) / max(high - low, 1e-6) for x, (low, high) in zip(zip(*seen), ranges)]
    L, G = unit = [min(1.0, max(0.0, x)) for x in raw]
    return min(unit) if combine == 'and' else beta * L + (1 - beta) * G, raw != unit


@dataclass
class Stepwise(Exact):
    """A cycle is a step: the draft writes k, one is chosen and judged; below tau the target writes it anew.

    Subclasses score and judge. LOSSY but where the target writes everything.
    """
    k: int = knob(None, 1, 256)             # candidates; None, here and below: the preset's
    draft_temperature: float = None         # of the candidates, whatever the run's
    draft_top_p: float = knob(None, 1e-9, 1)
    tau: float = knob(None, -inf, inf)      # score that a step needs; inf: the target writes them all
    target_k: int = knob(None, 1, 256)      # candidates of the target where it writes
    delimiter: str = r'\n'                  # ends a step; the paper's is \n\n, a blank line
    max_step: int = knob(48, 1, 999)        # tokens
    regenerate: str = knob('ar', 'sd')      # sd: the target writes with the draft's help, gamma a cycle
    preset: str = knob('notes', PRESETS)    # of the knobs that are None

    def __post_init__(self):
        for knob, value in PRESETS.get(self.preset, {}).items():
            if getattr(self, knob, value) is None:
                setattr(self, knob, value)
        super().__post_init__()
        require(self.delimiter, 'delimiter', 'empty', r'what ends a step, say \n')
        require(self.target_k == 1 or self.regenerate == 'ar', 'target_k', self.target_k, '1 (regenerate=sd)')

    @property
    def lossless(self):
        return self.tau == inf and self.target_k == 1

    def over(self, session, ids):
        """Whether ids, behind the committed text, are a whole step; blanks ahead of it belong to it."""
        return (len(ids) >= min(self.max_step, session.room) or ids[-1] in session.eos
                or self.delimiter.replace(r'\n', '\n') in session.text(ids).lstrip())

    def propose(self, session):
        expect(session.draft and session.text, 'steps need a draft model and a tokenizer: give --draft DIR')
        return self.choose(session, write_steps(session, self, session.draft, self.k))

    def choose(self, session, found):
        """The Draft among `found` that the others are most like."""
        sure = [float(loglikes(d.logits, d.tokens).mean()) for d in found]
        return found[central([d.tokens for d in found], sure)]

    def accept(self, session, draft, seen):
        """(tokens, labels, judged), one verdict for the step; seen: each token's (logp, grounding)."""
        score, clipped = self.judge(session, draft, seen) if abs(self.tau) < inf else (None, False)
        kept, limit = (self.tau < 0, None) if score is None else (score >= self.tau, self.tau)
        q = draft.q[range(len(seen)), draft.tokens].tolist()
        judged = [dict(token=token, p=None, q=q, threshold=limit, chance=float(kept), kept=kept, score=score,
                       clipped=clipped, logp=logp, grounding=grounding)
                  for token, q, (logp, grounding) in zip(draft.tokens, q, seen)]
        tokens = draft.tokens if kept else self.write(session)
        return tokens, ['draft' if kept else 'target'] * len(tokens), judged

    def write(self, session):
        """The ids of the step as the target writes it, from the same committed text."""
        if self.regenerate == 'ar':
            return self.choose(session, write_steps(session, self, session.target, self.target_k)).tokens
        inner, exact, tokens = copy.copy(session), Exact(self.gamma), []
        while True:
            draft = exact.propose(inner)
            for token in inner.commit(exact.accept(inner, draft, exact.score(inner, draft))[0]):
                tokens.append(token)
                if self.over(session, tokens):          # what a block holds behind it is dropped unseen
                    return tokens


@dataclass
class SpecGuard(Stepwise):
    """Judges whole steps by the draft's own grounding and confidence; the target writes what fails. LOSSY.

    score = beta L + (1 - beta) G of the most central of k steps, by its weakest tokens: L = min log q(y_t),
    G = min of attention rollout's share on the text before the step, both on a calibrated scale of 0..1.
    Source: Purohit, Narayanam & Pal 2026 (SpecGuard, "From Tokens to Steps", arXiv 2604.15244).
    """
    beta: float = knob(None, 0, 1)          # confidence's weight; grounding has the rest
    n_roll: int = knob(3, 1, 999)           # layers of the rollout
    layers: str = knob('last', 'first', 'middle', 'all')  # which
    sparsify: float = knob(0.01, 0, 1)      # attention weights below this are dropped
    residual: float = knob(0.0, 0, 1)       # the identity's share of a layer (Abnar & Zuidema: 0.5)
    combine: str = knob('weighted', 'and')  # and: both signals must reach tau
    signals: str = knob('draft', 'target')  # whose; the target's cost a target pass a step
    needs = ('signals',)

    def score(self, session, draft):
        """Each token's signals, from one pass that fills the cache (the target reads the root too)."""
        own, reader, n = self.signals == 'draft', getattr(session, self.signals), len(draft.tokens)
        path = reader.model.full.grounded(self.layers, self.n_roll, begin=len(session.tokens),
                                          sparsify=self.sparsify, residual=self.residual)
        rows = reader.read(session.tokens, draft.tokens, path, n if own else n + 1)
        expect(path.carry['shades'] is not None, f'the attention of the {self.signals} cannot be read')
        logp = loglikes(torch.cat([draft.logits[:own], rows])[:-1], draft.tokens)   # row t predicts token t
        return torch.stack([logp, path.carry['shades'][0].sum(-1).to(logp)], 1).tolist()

    def judge(self, session, draft, seen):
        """(score, whether a signal was clipped)."""
        ranges = [session.calibration['signals'][f'{self.signals}_{name}'] for name in ('logp', 'grounding')]
        return ensemble(seen, ranges, self.beta, self.combine)


# ------------------------------------------------------------------------------------- sparse verification

Blocks = namedtuple('Blocks', 'rho dense_below block sinks locals query_from scores')    # knobs of Sparse
SELECT = dict(head=(kernels.sparse_attend, kernels.mean_scores))        # name: (attend, scores of blocks)


@dataclass
class Sparse(Exact):
    """Exact speculative decoding whose verifying pass leaves out blocks of keys, channels and experts. LOSSY.

    Set as a Session's `sparse`, it thins out any other method. Off: rho=1 ffn_threshold=0 moe_skip=0.
    Source: "Accelerate speculative decoding with sparse computation in verification" (2025). Its "first draft
    token" is our root; its summary has the experts' condition reversed.
    """
    rho: float = knob(0.25, 0, 1)           # share of the cached tokens beyond dense_below that are read
    dense_below: int = knob(128, 0)         # L0, cached tokens: up to here attention is dense
    block: int = knob(16, 1)                # tokens
    sinks: int = knob(1, 0)                 # first blocks, always read; they count towards the budget
    locals: int = knob(2, 0)                # last whole blocks, likewise; the partial one behind is free
    select: str = knob('head', SELECT)      # each key head its own blocks; lab/rivals.py has others
    query_from: str = knob('root', 'last', 'mean')  # whose query scores them for the pass
    anchors: int = knob(0, 0)               # layers that choose, by calibration; 0: every second one
    ffn_threshold: float = knob(0.05, 0)    # a token skips channels whose |silu(gate)| is below
    ffn_quantile: float = knob(0.0, 0, 1)   # instead, each layer's calibrated threshold for this share
    ffn_share: float = knob(1.0, 0, 1)      # share of the channels, chosen once for a pass, that is read
    moe_skip: int = knob(1, 0)              # experts that a token may skip, at most
    moe_quantile: float = knob(0.5, 0, 1)   # beta, of the calibrated shares of the lowest experts
    refresh_every: int = knob(0, 0)         # cycles from one dense pass to the next; 0: none

    @property
    def lossless(self):
        skipped = self.ffn_threshold or self.ffn_quantile or self.moe_skip
        return self.control.causal and self.rho == self.ffn_share == 1 and not skipped

    def path(self, session):
        return self.view(session.target.model.full, session)

    def view(self, path, session):
        """The path without what the knobs leave out; in every refresh_every-th cycle the path itself."""
        if self.refresh_every and (session.cycles + 1) % self.refresh_every == 0:
            return path
        found, mixtures = session.calibration.get('sparse', {}), session.target.model.config.mixtures
        layers, at = range(len(mixtures)), lambda table, q: table[round(q * (len(table) - 1))]
        attend, scores = SELECT[self.select]
        blocks = Blocks(*(getattr(self, knob) for knob in Blocks._fields[:-1]), scores)
        anchors = found['anchors'][:self.anchors] if self.anchors else layers[::2]
        heads = tuple((i, i in anchors, blocks) if self.rho < 1 else None for i in layers)
        cuts = [at(found['channels'][i], self.ffn_quantile) if self.ffn_quantile else self.ffn_threshold
                for i in layers]
        channels = tuple((cut, self.ffn_share) if cut or self.ffn_share < 1 else None for cut in cuts)
        betas = (None,) * len(layers)
        if self.moe_skip and any(mixtures):
            require('experts' in found, 'moe_skip', self.moe_skip, '0, or betas: run train_mask.py --anchors')
            betas = tuple(tuple(at(shares, self.moe_quantile) for shares in layer[:self.moe_skip])
                          for layer in found['experts'])
        return path.sparse(attend, heads, channels, betas)


METHODS = dict(ar=Autoregressive, sd=Exact, via=ViaSd, cmasd=CmAsd, ecsv=Ecsv, sparse=Sparse,
               specguard=SpecGuard)
