"""Baselines and ablations of CM-ASD: a lenient rule, other ends of a block, other readings of the paper."""
import math
from dataclasses import dataclass

from lab import read_bytes
from verify import METHODS, CmAsd, Exact, knob, probs


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
        row = score.table[i]
        return min(1.0, row.p / (self.lenience * row.q))


METHODS['lenient'] = Lenient


# ------------------------------------------------------------------------------ other ends of a block
# Exact decoding. Each ends the blocks of another method, too: class HedgePayoff(Payoff, Hedge).

@dataclass
class Confident(Exact):
    """Exact decoding in which a block ends after a token that the draft gives less than `limit`, 0.4.

    Source: Hugging Face transformers, ConfidenceCriteria with the default settings.
    """
    gamma: int = knob(20, 'tokens of the longest block', 0)
    limit = 0.4

    def signals(self, token, logits):
        return super().signals(token, logits) | dict(own=float(logits.softmax(-1)[:, token]))

    def keep_drafting(self, session, signals):
        return signals[-1]['own'] >= self.limit


@dataclass
class Product(Exact):
    """Exact decoding that drafts on while the product of the draft's largest probabilities is above `limit`.

    It estimates whether all of the block is still right: one doubt is enough, which a mean would hide. Ours.
    """
    gamma: int = knob(40, 'tokens of the longest block', 0)
    limit = 0.5

    def signals(self, token, logits):
        return super().signals(token, logits) | dict(largest=float(logits.softmax(-1).amax(-1)))

    def keep_drafting(self, session, signals):
        return math.prod(noted['largest'] for noted in signals) > self.limit

    def explain(self, cycle, word):
        largest = ', '.join(f'{noted["largest"]:.2f}' for noted in cycle.signals)
        why = f"the draft's largest probabilities: {largest}" if largest else ''
        return '; '.join(filter(None, [why, super().explain(cycle, word)]))


@dataclass
class Payoff(Product):
    """Exact decoding that drafts on while another token should bring more tokens a second than the text has.

    That maximises tokens over time where cycles renew each other, and has nothing to tune. The chance that a
    token is kept is learned by its largest probability m, in ten bins; each begins as if WORTH tokens had
    been kept with chance m. Time is counted in target passes by weight bytes, never by a clock. Ours.
    """
    cost: float = knob(None, 'of a draft pass, in target passes; None: by the bytes of their weights', 0)
    WORTH = 2

    def __post_init__(self):
        super().__post_init__()
        self.judged = [0] * 10              # draft tokens of each bin
        self.kept = [0] * 10                # those that were kept
        self.tokens = self.cycles = self.drafted = 0    # committed; passes of the target, of the draft

    def propose(self, session):
        draft = super().propose(session)
        self.cycles += 1
        self.drafted += len(draft.tokens)
        return draft

    def chance_kept(self, largest):
        """The chance that a token is kept, given that all before it are."""
        i = bin_of(largest)
        return (self.kept[i] + self.WORTH * largest) / (self.judged[i] + self.WORTH)

    def keep_drafting(self, session, signals):
        if self.cost is None:
            self.cost = draft_cost(session)
        all_kept = expected = 1.0           # the chance that all of the block is kept; tokens of the cycle
        for noted in signals:
            all_kept *= self.chance_kept(noted['largest'])
            expected += all_kept
        time = self.cycles + 1 + self.cost * (self.drafted + len(signals))
        rate = (self.tokens + expected) / time          # with this block as expected
        another = (sum(self.kept) + 1) / (sum(self.judged) + 1)     # its probability is unknown
        return all_kept * another > rate * self.cost

    def learn(self, cycle):
        super().learn(cycle)
        self.tokens += len(cycle.tokens)
        for row in cycle.judged:
            if 'largest' in row.signals:                # a token that was looked up teaches nothing
                i = bin_of(row.signals['largest'])
                self.judged[i] += 1
                self.kept[i] += row.kept


def bin_of(largest):
    """In which of ten bins, 0 to 9, the largest probability of a step is."""
    return min(9, int(10 * largest))


def draft_cost(session):
    """The weight bytes of a draft pass over those of a target pass; without a draft model slim drafts."""
    target = session.target.model
    drafter = session.drafter and session.drafter.model
    read = read_bytes(drafter, drafter.full) if drafter else read_bytes(target, session.slim_path)
    return read / read_bytes(target, target.full)


METHODS.update({'hf-confidence': Confident, 'product': Product, 'payoff': Payoff})


# ---------------------------------------------------- other readings of the paper's threshold

@dataclass
class CmAsdProb(CmAsd):
    """CM-ASD that compares tau with p(x) itself: where p is flat, its likeliest token fails, too. LOSSY."""

    def chance(self, score, i):
        p = probs(score.logits[i])
        return float(p[score.block.tokens[i]] >= self.threshold(score, i))

    def recovery_distribution(self, p, q):
        return p


@dataclass
class CmAsdSpecDec(CmAsdProb):
    """CM-ASD with SpecDec's rule: among the target's top_beta tokens and within tolerance of the best. LOSSY.

    The tolerance, in nats, takes tau's place: only the block length adapts. Source: Xia et al. 2023.
    """
    top_beta: int = knob(5, 'rank that a token needs', 1)
    tolerance: float = knob(3.0, 'how far below the likeliest a token may be, nats', 0, math.inf)

    def threshold(self, score, i):
        return math.exp(-self.tolerance)

    def chance(self, score, i):
        logits = score.logits[i]
        own = logits[score.block.tokens[i]]
        better = int((logits > own).sum())
        gap = float(logits.max() - own)                 # nats
        return float(better < self.top_beta and gap <= self.tolerance)


METHODS.update({'cmasd-prob': CmAsdProb, 'cmasd-specdec': CmAsdSpecDec})
