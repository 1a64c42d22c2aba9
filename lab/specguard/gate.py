"""The beta and tau that SpecGuard should have: `python -m lab.specguard.gate`, from graded training steps.

`python -m lab.measure specguard --only gate` (with --draft of another pair) grades and stores the steps.
"""
import itertools
import math

import numpy
import pandas
from scipy.stats import binomtest

from lab.judge import markdown, pairs_of

BETAS = 0.5, 0.3, 0.7, 0.0, 1.0     # of equally good gates the first is chosen
TAUS = [i / 20 for i in range(22)]
ACCURACY = 0.95                     # share of its kept steps that a gate has right at least


def gates(rows):
    """A frame of gates on rows of graded steps: beta, tau, share rejected, share of the kept that is right.

    surely: the lower end of that share's 95 % interval, because the luckiest of many gates looks too good.
    Source: Wilson 1927.
    """
    columns = 'right', 'scaled_L', 'scaled_G'
    right, L, G = (numpy.concatenate([row[name] for row in rows]) for name in columns)
    found = []
    for beta, tau in itertools.product(BETAS, TAUS):
        kept = right[beta * L + (1 - beta) * G >= tau]
        n, good = len(kept), int(kept.sum())
        surely = binomtest(good, n).proportion_ci(method='wilson').low if n else 0.0
        found.append(dict(beta=beta, tau=tau, rejected=1 - n / len(right), right=good / n if n else math.nan,
                          surely=surely))
    return pandas.DataFrame(found)


def best_gate(found):
    """The row of the gate that surely has ACCURACY and rejects the fewest steps; if none has, the surest."""
    lacks = (ACCURACY - found.surely).clip(lower=0)
    return found.assign(lacks=lacks).sort_values(['lacks', 'rejected'], kind='stable').iloc[0]


def calibrated(rows, gamma=4):
    """The setting of the best gate of these steps; gamma: where the target writes."""
    gate = best_gate(gates(rows))
    return f'specguard beta={gate.beta:g} tau={gate.tau:g} gamma={gamma}'


def main():
    """Prints the best gate of each beta, for each pair."""
    for pair in pairs_of('specguard'):
        if pair.has('gate'):
            rows = pair.rows('gate')
            best = [best_gate(part) for _, part in gates(rows).groupby('beta')]
            print(pair.name, *markdown(pandas.DataFrame(best)), calibrated(rows), '', sep='\n')


if __name__ == '__main__':
    main()
