"""Baselines and controls, written on the methods' own seam and entered in the same METHODS."""
from dataclasses import dataclass
from math import inf

import torch

from verify import METHODS, Exact, require


@dataclass
class Lenient(Exact):
    """Speculative decoding that keeps a draft token with min(1, p / (lenience q)); 1 is exact, less is LOSSY.

    The replacement is drawn from the exact residual. Source: Leviathan et al. 2023, appendix A.5.
    """
    lenience: float = 0.5                   # in (0, 1]

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.lenience <= 1, 'lenience', self.lenience, 'above 0, at most 1 (exact)')

    @property
    def lossless(self):
        return self.lenience == 1

    def kept(self, score, i):
        p, q = score.pq[i]
        return min(1.0, p / (self.lenience * q))


@dataclass
class Typical(Exact):
    """Keeps a draft token that the target finds typical: p(x) > min(epsilon, delta exp(-H(p))). LOSSY.

    A rejected token is replaced by a fresh sample of p. With epsilon 1 and delta inf nothing is kept: plain
    decoding. The defaults are those of Medusa's evaluation; its functions' own defaults have the two numbers
    swapped. Source: Cai et al. 2024 (Medusa), section 2.3.1.
    """
    epsilon: float = 0.09                   # hard threshold, a probability
    delta: float = 0.3                      # scales the threshold that falls with entropy

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.epsilon <= 1, 'epsilon', self.epsilon, 'between 0 and 1')
        require(self.delta >= 0, 'delta', self.delta, '0 or more (inf is a value)')

    @property
    def lossless(self):
        return self.epsilon == 1 and self.delta == inf

    def threshold(self, score, i):
        p = score.p[i]
        return min(self.epsilon, self.delta * float(torch.special.entr(p).sum().neg().exp()))

    def kept(self, score, i):
        return float(score.pq[i][0] > self.threshold(score, i))

    def settle(self, score, i):
        return score.p[i]


METHODS.update(lenient=Lenient, typical=Typical)


# --------------------------------------------------------------- beside CM-ASD: controllers, acceptance rules


# --------------------------------------------------------------------------- beside ECSV: votes and branches


# --------------------------------------------------------------------- beside VIA-SD: cascades, tiers, self


# ------------------------------------------------------------------- beside SpecGuard: gates, rewards, votes


# --------------------------------------------------------------- beside sparse verification: other selections
