"""Beside CM-ASD: two other relaxed rules, length controllers, and other readings of its threshold.

They stand on the same seams as the methods of verify.py and are entered in METHODS and CONTROLLERS.
"""
import math
import statistics
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

import kernels
from model import fetch, send
from verify import CONTROLLERS, METHODS, CmAsd, Exact, Controller, Online, in_range, probs, require


# -------------------------------------------------------------------------------------- other relaxed rules

@dataclass
class Lenient(Exact):
    """Speculative decoding that keeps a draft token with min(1, p / (lenience q)); 1 is exact, less is LOSSY.

    The replacement is drawn from the exact residual. Source: Leviathan et al. 2023, appendix A.5.
    """
    lenience: float = in_range(0.5, 1e-6, 1)

    @property
    def lossless(self):
        return super().lossless and self.lenience == 1

    def chance(self, score, i):
        p, q = score.pq[i]
        return min(1.0, p / (self.lenience * q))


def typical_limit(p, delta):
    """Medusa's threshold for a flat distribution, delta exp(-H(p)), as a float; p [V]."""
    entropy = torch.special.entr(p).sum()               # nats
    return delta * float((-entropy).exp())


@dataclass
class Typical(Exact):
    """Keeps a draft token that the target finds typical: p(x) > min(epsilon, delta exp(-H(p))). LOSSY.

    A rejected token is replaced by a fresh sample of p. With epsilon 1 and delta inf nothing is kept: plain
    decoding. The defaults are those of Medusa's evaluation; its functions' own defaults have the two numbers
    swapped. Source: Cai et al. 2024 (Medusa), section 2.3.1.
    """
    epsilon: float = in_range(0.09, 0, 1)       # hard threshold, a probability
    delta: float = in_range(0.3, 0, math.inf)   # scales the threshold that falls with entropy

    @property
    def lossless(self):
        return super().lossless and self.epsilon == 1 and self.delta == math.inf

    def threshold(self, score, i):
        return min(self.epsilon, typical_limit(score.p[i], self.delta))

    def chance(self, score, i):
        p, _ = score.pq[i]
        return float(p > self.threshold(score, i))

    def replacement(self, p, q):
        return p


METHODS.update(lenient=Lenient, typical=Typical)


# ---------------------------------------------------------------------------------------- length controllers

class Lagged(Controller):
    """CM-ASD's window from the mean confidence of the block before; the first block is the longest."""

    def __init__(self, gamma, window):
        super().__init__(gamma, window)
        self.size = window.k_max            # of the next block, tokens

    def length(self, session):
        return self.size

    def learn(self, draft, cycle):
        if draft.tokens and draft.logits is not None:
            confidence = statistics.fmean(self.window.confidence(draft.logits))
            self.size = self.window.length(confidence)


class ClosedLoop(Online):
    """CM-ASD's window, its alpha times a moving average of the blocks' acceptance rates.

    The paper speaks of a feedback-controlled loop and gives no feedback: this is ours.
    """

    def __init__(self, gamma, window):
        super().__init__(gamma, window)
        self.rate = 1.0                     # the moving average
        self.alpha = window.alpha           # at a rate of 1

    def learn(self, draft, cycle):
        if draft.tokens:
            self.rate = 0.5 * self.rate + 0.5 * cycle.accepted / len(draft.tokens)
            self.window = replace(self.window, alpha=self.alpha * self.rate)


class Probe(Online):
    """CM-ASD read literally: drafts k_max, averages over all of them, then drops what exceeds the window.

    Biased when sampling: whether a token stays hangs on tokens that are dropped.
    """
    causal = False

    def more(self, session, tokens, logits, notes):
        return True

    def trim(self, draft):
        if draft.logits is None:
            return draft
        confidence = statistics.fmean(self.window.confidence(draft.logits))
        n = self.window.length(confidence)
        known = None if draft.known is None else draft.known[:n + 1]
        notes = None if draft.notes is None else draft.notes[:n]
        return replace(draft, tokens=draft.tokens[:n], q=draft.q[:n], logits=draft.logits[:n], known=known,
                       notes=notes)


class Confident(Controller):
    """At most 20 tokens; stops behind one that the draft gives less than `limit`, 0.4.

    Source: Hugging Face transformers, ConfidenceCriteria with the default settings.
    """
    limit = 0.4
    most = 20

    def length(self, session):
        return self.most

    def look(self, tokens, logits, note):
        q = logits[-1].softmax(-1)                                                      # [rows, V]
        own = q.gather(-1, tokens[-1][..., None])
        note['own'] = float(own.mean())

    def goes_on(self, session, notes):
        return notes[-1]['own'] >= self.limit


class Heuristic(Controller):
    """Starts at gamma; 2 more after a block that was kept whole, else 1 less, but 1 at least.

    Source: Hugging Face transformers, num_assistant_tokens_schedule 'heuristic'.
    """

    def learn(self, draft, cycle):
        if not draft.tokens:
            return
        if cycle.accepted == len(draft.tokens):
            self.gamma += 2
        else:
            self.gamma = max(1, self.gamma - 1)


class Product(Controller):
    """Drafts on while the product of the draft's largest probabilities over the block stays above `limit`.

    It estimates whether all of the block is still right: one doubt is enough, which a mean would drown. Ours.
    """
    limit = 0.5
    most = 40

    def length(self, session):
        return self.most

    def look(self, tokens, logits, note):
        q = logits[-1].softmax(-1)                                                      # [rows, V]
        note['largest'] = float(q.amax(-1).mean())

    def goes_on(self, session, notes):
        return math.prod(note['largest'] for note in notes) > self.limit


class Payoff(Product):
    """Drafts on while another token is expected to bring more tokens a second than the text has so far.

    That is what maximises tokens over time where cycles renew each other, and it has no knob to tune. The
    chance that a token is kept is learned by its largest probability m, in ten bins; each begins as if WORTH
    tokens had said m. Time is counted in target passes by weight bytes, never by a clock. Ours.
    """
    cost = None             # of a draft pass, in target passes; None: by the bytes of their weights
    WORTH = 2

    def __init__(self, gamma, window):
        super().__init__(gamma, window)
        self.kept = [0] * 10                # tokens of each bin that were kept
        self.judged = [0] * 10              # of so many
        self.tokens = 0                     # committed so far
        self.time = 0.0                     # and their passes

    def length(self, session):
        if self.cost is None:
            reader = session.draft or session.target
            path = reader.model.full if session.draft else session.slim_path
            whole = session.target.model
            self.cost = reader.model.read_bytes(path) / whole.read_bytes(whole.full)
        return super().length(session)

    def chance(self, note):
        """The chance that a token is kept, given that all before it are."""
        i = bin_of(note)
        return (self.kept[i] + self.WORTH * note['largest']) / (self.judged[i] + self.WORTH)

    def goes_on(self, session, notes):
        note = notes[-1]
        before = notes[-2] if len(notes) > 1 else dict(all_kept=1.0, expected=1.0)
        note['all_kept'] = before['all_kept'] * self.chance(note)       # the chance that all of the block is
        note['expected'] = before['expected'] + note['all_kept']        # tokens of the cycle
        time = self.time + 1 + self.cost * len(notes)
        rate = (self.tokens + note['expected']) / time      # this block as expected is a part of the text
        another = (sum(self.kept) + 1) / (sum(self.judged) + 1)     # of its probability nothing is known yet
        return note['all_kept'] * another > rate * self.cost

    def learn(self, draft, cycle):
        self.tokens += len(cycle.tokens)
        self.time += 1 + self.cost * len(draft.tokens)
        for note, judged in zip(draft.notes or [], cycle.judged):
            if 'largest' in note:           # whoever has other notes, or judges steps, teaches nothing
                self.judged[bin_of(note)] += 1
                self.kept[bin_of(note)] += judged['kept']


def bin_of(note):
    """In which of ten bins, 0 to 9, the largest probability of a step is."""
    return min(9, int(10 * note['largest']))


class Roc(Confident):
    """Confident, its limit fitted to what was judged so far: the one with the least fpr + 3 fnr on the ROC.

    Source: Hugging Face transformers, AssistedCandidateGenerator (there the curve is scikit-learn's).
    """

    enough = 5              # judged tokens, above which the limit is fitted

    def __init__(self, gamma, window):
        super().__init__(gamma, window)
        self.good = []                      # q of every judged token that was kept
        self.bad = []                       # q of every one that was not

    def learn(self, draft, cycle):
        if not draft.tokens or draft.logits is None:
            return
        if len(draft.logits) != len(draft.tokens):      # who tries several tokens at a place teaches nothing
            return
        kept = cycle.accepted
        ids = send(draft.tokens, draft.logits.device)
        q = draft.logits.softmax(-1).gather(-1, ids[:, None])[:, 0].tolist()
        self.good += q[:kept]
        self.bad += q[kept:kept + 1]        # what is behind the first rejection was not judged
        judged = len(self.good) + len(self.bad)
        if judged > self.enough and self.good and self.bad:
            good = sorted(self.good)
            bad = sorted(self.bad)
            limits = sorted({*good, *bad}, reverse=True)                # of equals the highest
            self.limit = min(limits, key=lambda limit: error(limit, good, bad))


def error(limit, good, bad):
    """fpr + 3 fnr of this limit on the q of good and bad tokens, both ascending."""
    passed = len(bad) - bisect_left(bad, limit)
    missed = bisect_left(good, limit)
    return passed / len(bad) + 3 * missed / len(good)


class MovingAverage(Confident):
    """Confident, its limit steered so that the moving average of the acceptance rate comes to 0.9.

    The limit does not fall after a block of full length. Source: Zhang et al. 2023 (Draft & Verify), adaptive
    draft exiting, with the constants of its public code.
    """
    limit = 0.6
    most = 8
    pace = 0.1                              # of its steps
    rate = 0.0                              # the moving average

    def learn(self, draft, cycle):
        n = len(draft.tokens)
        if n == 0:
            return
        self.rate = 0.5 * self.rate + 0.5 * cycle.accepted / n
        if self.rate < 0.9:
            step = 0.01
        elif n == self.most:
            step = 0.0
        else:
            step = -0.01
        self.limit = min(1.0, max(0.0, self.limit + self.pace * step))


class Oracle(Controller):
    """Knows the target's greedy text and drafts until the first wrong token; its passes are not counted."""
    text = []                               # the target's, as far as the room leads, prompt first
    begin = 0                               # where this block begins in it

    def length(self, session):
        require(session.temperature == 0, 'controller', 'oracle', 'another one above temperature 0')
        self.begin = len(session.tokens)
        whole = len(self.text) == self.begin + session.room
        if not whole or self.text[:self.begin] != session.tokens:
            self.look_ahead(session)
        return session.room

    def look_ahead(self, session):
        """Writes the target's greedy text behind the session's, on a copy of its cache."""
        reader = session.target.fork(1)
        reader.log = []
        self.text = list(session.tokens)
        for _ in range(session.room):
            logits = reader.read(self.text, [], reader.model.full, 1)[0]
            self.text.append(int(logits.argmax()))

    def more(self, session, tokens, logits, notes):
        place = self.begin + len(tokens) - 1
        return int(tokens[-1][0]) == self.text[place]


CONTROLLERS.update({
    'lagged': Lagged, 'closed-loop': ClosedLoop, 'probe': Probe, 'hf-confidence': Confident,
    'hf-heuristic': Heuristic, 'hf-roc': Roc, 'moving-average': MovingAverage, 'product': Product,
    'payoff': Payoff, 'oracle': Oracle})


# -------------------------------------------------------------- other readings of CM-ASD's threshold

@dataclass
class CmAsdProb(CmAsd):
    """CM-ASD that compares tau with p(x) itself: where the target is flat even its favourite fails. LOSSY."""

    @property
    def lossless(self):
        return False

    def chance(self, score, i):
        p = probs(score.logits[i])
        token = score.draft.tokens[i]
        return float(p[token] >= self.threshold(score, i))

    def replacement(self, p, q):
        return p


@dataclass
class CmAsdSpecDec(CmAsdProb):
    """CM-ASD with SpecDec's rule: among the target's top_beta tokens and within tolerance of the best. LOSSY.

    The tolerance, in nats, takes tau's place: only the block length adapts. Source: Xia et al. 2023.
    """
    top_beta: int = in_range(5, 1)
    tolerance: float = in_range(3.0, 0, math.inf)           # nats

    def threshold(self, score, i):
        return math.exp(-self.tolerance)

    def chance(self, score, i):
        logits = score.logits[i]
        own = logits[score.draft.tokens[i]]
        better = int((logits > own).sum())
        behind = float(logits.max() - own)              # nats
        return float(better < self.top_beta and behind <= self.tolerance)


@dataclass
class CmAsdTypical(CmAsdProb):
    """CM-ASD with a typical threshold: p(x) > min(tau, delta exp(-H(p))), at temperature 1. LOSSY."""
    delta: float = in_range(0.3, 0, math.inf)

    def chance(self, score, i):
        p = probs(score.logits[i])
        token = score.draft.tokens[i]
        limit = min(self.threshold(score, i), typical_limit(p, self.delta))
        return float(p[token] > limit)


# ------------------------------------------------------------------------------- richer uncertainty: dropout

def thinned_swiglu(x, mlp, carry, how):
    """The feed-forward with each row's channels dropped by lot, the same at all its positions; x [B, T, C].

    how: (share dropped, generator). A row is one network sampled; what is left is scaled up to the same mean.
    """
    share, generator = how
    channels = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)                                # [B, T, F]
    lots = torch.rand(channels[:, :1].shape, generator=generator)               # on the host, as all chance
    left = (lots >= share).to(channels, non_blocking=True)
    return mlp.down_proj(channels * left / (1 - share)), carry


def thinned_path(path, share, generator):
    """The Path with thinned feed-forwards; those that it leaves out stay out."""
    ffns = [partial(thinned_swiglu, how=(share, generator)) if ffn is kernels.swiglu else ffn
            for ffn in path.ffns]
    return replace(path, name=f'{path.name} dropout', ffns=tuple(ffns))


@dataclass
class CmAsdDropout(CmAsd):
    """CM-ASD whose tau hangs on how much thinned copies of the draft differ about each token. LOSSY.

    The block is drafted as usual, and C of one pass closes it. Then `rows` copies of the draft, each without
    other channels, read it once more: C = 1 - sd / mean of their q(x), over the most that this can be. The
    text before the block is not read so; and a draft that was trained without dropout, as the embedded one,
    does not give samples of a posterior. Source: Gal & Ghahramani 2016; Sen et al. 2025 leave it open.
    """
    rows: int = in_range(8, 2, 256)             # samples; each reads one position for every draft token
    drop: float = in_range(0.1, 0, 0.99)        # share of the channels of every feed-forward

    def propose(self, session):
        draft = super().propose(session)
        if draft.tokens:
            q = self.samples(session, draft.tokens)                                     # [rows, n]
            spread = q.std(0, correction=0)
            average = q.mean(0).clamp(min=1e-30)
            most = (self.rows - 1) ** 0.5               # of spread / average: all samples but one give 0
            confidences = (1 - spread / average / most).clamp(0, 1)
            draft.notes = []
            confidences, average = fetch(confidences, average)
            for confidence, mean in zip(confidences.tolist(), average.tolist()):
                draft.notes.append(dict(confidence=confidence, mean=mean))
        return draft

    def samples(self, session, tokens):
        """q(x) [rows, n] at temperature 1 of the tokens that were just drafted."""
        reader = session.draft or session.target
        path = reader.model.full if session.draft else session.slim_path
        dense = kernels.swiglu in path.ffns
        require(dense, 'drop', self.drop, 'a draft with a feed-forward that is no mixture of experts')
        thin = thinned_path(path, self.drop, session.generator)
        line = send([session.tokens[-1:] + tokens[:-1]], reader.model.cos.device)
        begin = len(session.tokens) - 1
        twin = reader.fork(self.rows)
        twin.compiled = None                            # each pass draws other channels
        logits = twin.feed(line.expand(self.rows, -1), begin, thin, len(tokens))        # [rows, n, V]
        ids = send(tokens, logits.device).expand(self.rows, -1)
        return probs(logits).gather(-1, ids[..., None])[..., 0]


METHODS.update({'cmasd-prob': CmAsdProb, 'cmasd-specdec': CmAsdSpecDec, 'cmasd-typical': CmAsdTypical,
                'cmasd-dropout': CmAsdDropout})
