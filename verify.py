"""How proposed tokens are verified: the maths, the nouns, and exact speculative decoding with its verbs.

propose -> score -> accept -> commit is one cycle; specmini.decode runs the loop. A method is a dataclass
whose fields are its knobs and which overrides only the verbs it changes. Baselines are in lab/rivals.py.

p is the target's distribution and q the draft's, everywhere; both are what is really sampled from, after
temperature, top-k and top-p. Temperature 0 is a one-hot distribution, so no rule has a greedy branch.
V vocabulary, n draft tokens of a block.
"""
from dataclasses import dataclass, field
from functools import cached_property

import torch


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

    @classmethod
    def points(cls, tokens, model):
        """Tokens that were looked up or chosen: q is one-hot, the exact rule becomes sample-and-match."""
        ids = torch.tensor(tokens, dtype=torch.long, device=model.cos.device)[:, None]
        return cls(tokens, torch.zeros(len(tokens), model.vocab, device=ids.device).scatter_(1, ids, 1.0))


class Score:
    """The target's view of a draft: p [n + 1, V]. Lazy: the pass happens when a rule first looks."""

    def __init__(self, session, draft, path):
        self.session, self.draft, self.path = session, draft, path

    @cached_property
    def logits(self):
        """[n + 1, V] raw: row i judges draft token i, the last row gives the bonus token.

        The pass reads n + 1 positions: the root (the last committed token, in no cache yet) and the draft.
        """
        s, n = self.session, len(self.draft.tokens)
        return finite(s.target.read(s.tokens, self.draft.tokens, self.path, n + 1), 'target', len(s.tokens))

    @cached_property
    def p(self):
        return self.session.probs(self.logits)

    @cached_property
    def pq(self):
        """[(p(x), q(x))] of each draft token x, as floats: one transfer for the whole block."""
        ids = torch.tensor(self.draft.tokens, device=self.p.device)[:, None]
        both = torch.stack([self.p[:-1].gather(1, ids), self.draft.q.to(self.p.dtype).gather(1, ids)])
        return list(zip(*both[..., 0].tolist()))


@dataclass
class Cycle:
    """What one cycle did. The trace is the list of these; every figure and picture is computed from it."""
    drafted: list           # ids
    judged: list            # of each draft token that was looked at: token, p, q, threshold, chance, kept
    tokens: list            # ids committed
    labels: list            # who wrote each: draft, target (after a rejection, or alone), bonus
    passes: dict            # reader/path -> [passes, positions, seconds]
    seconds: float

    @property
    def accepted(self):
        """Draft tokens kept, 0..n, without the extra token."""
        return self.labels.count('draft')


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
    checker: object = None                  # a task's step checker; a method that needs one refuses without
    calibration: dict = field(default_factory=dict)     # sections of calibration.json, see read_calibration
    ended: bool = field(default=False, init=False)
    prompt_seconds: float = field(default=0.0, init=False)

    def read_prompt(self):
        """Reads all of the prompt but its last token into every cache, counted apart as prompt_seconds."""
        for reader in filter(None, (self.target, self.draft)):
            reader.read(self.tokens[:-1], [], reader.model.full, 0)
        self.prompt_seconds = sum(seconds for *_, seconds in self.take().values())

    def probs(self, logits, temperature=None):
        return probs(logits, self.temperature if temperature is None else temperature, self.top_k, self.top_p)

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
        end = next((i for i, x in enumerate(tokens) if x in self.eos), None)
        tokens, self.ended = tokens if end is None else tokens[:end + 1], end is not None
        self.tokens = self.tokens + tokens
        self.room -= len(tokens)
        return tokens

    def take(self):
        """{reader/path: [passes, positions, seconds]} since the last call."""
        readers = [('target', self.target), ('draft', self.draft)]
        return {f'{role}/{path}': row for role, r in readers if r for path, row in r.take().items()}


# ------------------------------------------------------------------------------------ where drafts come from

def rollout(session, method, n):
    """At most n tokens from the draft model, one after the other; the method's `more` may stop it early."""
    if n < 1:
        return silence(session, method, n)
    reader, path = session.draft, session.draft.model.full
    tokens, q, logits = [], [], [reader.read(session.tokens, [], path, 1)[0]]
    while True:
        q.append(session.probs(logits[-1], method.draft_temperature))
        tokens.append(session.draw(q[-1]))
        if len(tokens) == n or not method.more(session, tokens, logits):
            break
        logits.append(reader.append(tokens[-1][None], path)[0])
    ids = torch.stack(tokens).tolist()      # the only sync with the device
    reader.cache.record(session.tokens + ids[:-1], len(session.tokens), path)
    return Draft(ids, torch.stack(q), finite(torch.stack(logits), 'draft', len(session.tokens)))


def lookup(session, method, n):
    """What followed the last earlier occurrence of the text's last 3 tokens, else 2. Source: Saxena 2023."""
    text = torch.tensor(session.tokens)
    for size in (3, 2):
        if n > 0 and len(text) > size:
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
    if not logits.amax().isfinite():
        raise ValueError(f'the {who} computed NaN or infinity after {length} tokens: its weights overflow')
    return logits


# ---------------------------------------------------------------------------------------------- the methods

def require(holds, knob, found, expected):
    """ValueError in one line unless the knob's value is in its range."""
    if not holds:
        raise ValueError(f'knob {knob} is {found}; expected {expected}')


@dataclass
class Exact:
    """Exact speculative decoding: whatever the draft, the text follows the target's law.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    gamma: int = 4                          # draft tokens a cycle
    draft_temperature: float = None         # of the draft model; None: the run's, 0: greedy drafting
    needs = ()                              # sections of calibration.json; no knob

    def __post_init__(self):
        """ValueError where a knob is out of range. Methods with knobs of their own add theirs."""
        require(self.gamma >= 0, 'gamma', self.gamma, 'a whole number, 0 or more')
        t = self.draft_temperature
        require(t is None or 0 <= t < float('inf'), 'draft_temperature', t, '0 or more')

    @property
    def lossless(self):
        """Whether the committed text follows the target's law exactly at these knobs."""
        return True

    def remarks(self, cycles, reports):
        """Plain sentences for the end of a run, from its trace and the JSON objects of its texts."""
        return []

    def propose(self, session):
        """The Draft; one token of room is left for the token that every cycle adds."""
        return session.source(session, self, min(self.gamma, session.room - 1))

    def more(self, session, tokens, logits):
        """Whether to draft another token. May look at all that is in the block: it will be verified."""
        return True

    def path(self, session):
        """The path on which the target verifies."""
        return session.target.model.full

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
        judged = []
        for i, token in enumerate(draft.tokens):
            (p, q), limit, chance = score.pq[i], self.threshold(score, i), self.kept(score, i)
            kept = session.flip(chance)
            judged.append(dict(token=token, p=p, q=q, threshold=limit, chance=chance, kept=kept))
            if not kept:
                other = int(session.draw(self.settle(score, i)))
                return draft.tokens[:i] + [other], ['draft'] * i + ['target'], judged
            if token in session.eos:
                return draft.tokens[:i + 1], ['draft'] * (i + 1), judged
        n, extra = len(draft.tokens), int(session.draw(score.p[-1]))
        return draft.tokens + [extra], ['draft'] * n + ['bonus' if n else 'target'], judged


@dataclass
class Autoregressive(Exact):
    """Plain decoding with the target, one token a pass: speculative decoding with nothing drafted."""
    gamma: int = 0

    def propose(self, session):
        return silence(session, self, 0)


# --------------------------------------------------------------------- CM-ASD: confidence-modulated drafting


# -------------------------------------------------------------- ECSV: reliability-weighted voting of branches


# ------------------------------------------------------------------------- VIA-SD: a slim verifier in between


# ---------------------------------------------------------------------------- SpecGuard: whole steps verified


# ------------------------------------------------------------------------------------- sparse verification


METHODS = dict(
    ar=Autoregressive,
    sd=Exact,
)
