"""Baselines and ablations of CM-ASD: a lenient rule, length controllers, other readings of its threshold."""
import math
import statistics
from dataclasses import dataclass, replace

from verify import CONTROLLERS, METHODS, CmAsd, Controller, Exact, Online, in_range, probs


# ------------------------------------------------------------------------------------------- a lenient rule

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


METHODS.update(lenient=Lenient)


# ---------------------------------------------------------------------------------------- length controllers

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


CONTROLLERS.update({'closed-loop': ClosedLoop, 'probe': Probe, 'hf-confidence': Confident,
                    'product': Product, 'payoff': Payoff})


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


METHODS.update({'cmasd-prob': CmAsdProb, 'cmasd-specdec': CmAsdSpecDec})
