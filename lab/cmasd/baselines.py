"""Baselines and ablations of CM-ASD: a lenient rule, length controllers, other readings of the paper."""
import math
from dataclasses import dataclass

from verify import CONTROLLERS, METHODS, CmAsd, Controller, Exact, knob, probs


# ------------------------------------------------------------------------------------------- a lenient rule

@dataclass
class Lenient(Exact):
    """Speculative decoding that keeps a draft token with min(1, p / (lenience q)); 1 is exact, less is LOSSY.

    The replacement is drawn from the exact residual. Source: Leviathan et al. 2023, appendix A.5.
    """
    lenience: float = knob(0.5, 'what p(x) / q(x) is divided by; 1: exact', 1e-6, 1)

    @property
    def lossless(self):
        return self.lenience == 1

    def chance(self, score, i):
        token = score.table[i]
        return min(1.0, token.p / (self.lenience * token.q))


METHODS.update(lenient=Lenient)


# ---------------------------------------------------------------------------------------- length controllers

class Confident(Controller):
    """At most 20 tokens; stops after one that the draft gives less than `limit`, 0.4.

    Source: Hugging Face transformers, ConfidenceCriteria with the default settings.
    """
    limit = 0.4
    most = 20
    takes_gamma = False

    def max_tokens(self, session):
        return self.most

    def signals(self, tokens, logits):
        q = logits.softmax(-1)                                                          # [rows, V]
        return dict(own=float(q.gather(-1, tokens[:, None]).mean()))

    def keep_drafting(self, session, signals):
        return signals[-1]['own'] >= self.limit


class Product(Confident):
    """Drafts on while the product of the draft's largest probabilities over the block stays above `limit`.

    It estimates whether all of the block is still right: one doubt is enough, which a mean would drown. Ours.
    """
    limit = 0.5
    most = 40

    def signals(self, tokens, logits):
        return dict(largest=float(logits.softmax(-1).amax(-1).mean()))

    def keep_drafting(self, session, signals):
        return math.prod(said['largest'] for said in signals) > self.limit

    def explain(self, cycle):
        largest = ', '.join(f'{said["largest"]:.2f}' for said in cycle.signals)
        return f"the draft's largest probabilities: {largest}" if largest else ''


class Payoff(Product):
    """Drafts on while another token is expected to bring more tokens a second than the text has so far.

    That is what maximises tokens over time where cycles renew each other, and it has no knob to tune. The
    chance that a token is kept is learned by its largest probability m, in ten bins; each begins as if WORTH
    tokens had said m. Time is counted in target passes by weight bytes, never by a clock. Ours.
    """
    cost = None             # of a draft pass, in target passes; None: by the bytes of their weights
    WORTH = 2

    def __init__(self, method):
        super().__init__(method)
        self.kept = [0] * 10                # tokens of each bin that were kept
        self.judged = [0] * 10              # of so many
        self.tokens = 0                     # committed so far
        self.time = 0.0                     # and their passes

    def max_tokens(self, session):
        if self.cost is None:
            reader = session.draft or session.target
            path = reader.model.full if session.draft else session.slim_path
            target = session.target.model
            self.cost = reader.model.read_bytes(path) / target.read_bytes(target.full)
        return super().max_tokens(session)

    def chance(self, largest):
        """The chance that a token is kept, given that all before it are."""
        i = bin_of(largest)
        return (self.kept[i] + self.WORTH * largest) / (self.judged[i] + self.WORTH)

    def keep_drafting(self, session, signals):
        all_kept = expected = 1.0           # the chance that all of the block is kept; tokens of the cycle
        for said in signals:
            all_kept *= self.chance(said['largest'])
            expected += all_kept
        time = self.time + 1 + self.cost * len(signals)
        rate = (self.tokens + expected) / time          # with this block as expected
        another = (sum(self.kept) + 1) / (sum(self.judged) + 1)     # its probability is unknown
        return all_kept * another > rate * self.cost

    def learn(self, cycle):
        self.tokens += len(cycle.tokens)
        self.time += 1 + self.cost * len(cycle.drafted)
        for judged in cycle.judged:
            largest = judged.signals.get('largest')     # methods with other signals teach nothing
            if largest is not None:
                self.judged[bin_of(largest)] += 1
                self.kept[bin_of(largest)] += judged.kept


def bin_of(largest):
    """In which of ten bins, 0 to 9, the largest probability of a step is."""
    return min(9, int(10 * largest))


CONTROLLERS.update({'hf-confidence': Confident, 'product': Product,
                    'payoff': Payoff})


# ---------------------------------------------------- other readings of the paper's threshold

@dataclass
class CmAsdProb(CmAsd):
    """CM-ASD that compares tau with p(x) itself: where p is flat, its likeliest token fails, too. LOSSY."""

    @property
    def lossless(self):
        return False

    def chance(self, score, i):
        p = probs(score.logits[i])
        token = score.draft.tokens[i]
        return float(p[token] >= self.threshold(score, i))

    def recovery_distribution(self, p, q):
        return p


@dataclass
class CmAsdSpecDec(CmAsdProb):
    """CM-ASD with SpecDec's rule: among the target's top_beta tokens and within tolerance of the best. LOSSY.

    The tolerance, in nats, takes tau's place: only the block length adapts. Source: Xia et al. 2023.
    """
    top_beta: int = knob(5, 'rank that a token needs', 1)
    tolerance: float = knob(3.0, 'how far a token may be behind the likeliest, nats', 0, math.inf)

    def threshold(self, score, i):
        return math.exp(-self.tolerance)

    def chance(self, score, i):
        logits = score.logits[i]
        own = logits[score.draft.tokens[i]]
        better = int((logits > own).sum())
        behind = float(logits.max() - own)              # nats
        return float(better < self.top_beta and behind <= self.tolerance)


METHODS.update({'cmasd-prob': CmAsdProb, 'cmasd-specdec': CmAsdSpecDec})
