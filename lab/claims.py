"""The papers' claims as experiments: `python -m lab.claims cmasd ecsv` prints the table of each method.

One function per claim; each returns a Finding. A claim HOLDS if the whole bootstrap interval of its figure
lies on the claimed side of its line, FAILS if the whole interval lies on the other, and is else UNDECIDED.
"""
import argparse
import itertools
import random
from dataclasses import dataclass

from lab import tasks


@dataclass
class Finding:
    """One row of a claims table."""
    claim: str          # what is claimed, with its number in the paper's list
    figure: float       # what was measured
    low: float          # bootstrap 95 % interval
    high: float
    line: float         # the claim says that the figure is at least this
    note: str = ''      # units, n, and one sentence why where it fails

    @property
    def verdict(self):
        return 'HOLDS' if self.low >= self.line else 'FAILS' if self.high < self.line else 'UNDECIDED'


def mean(values):
    return sum(values) / len(values)


def bootstrap(rows, figure, n=1000, seed=0):
    """(figure of the rows, low, high): the 95 % interval over n resamples of the rows, with replacement."""
    rng = random.Random(seed)
    found = sorted(figure(rng.choices(rows, k=len(rows))) for _ in range(n))
    return figure(rows), found[int(0.025 * n)], found[int(0.975 * n) - 1]


def held_out(task, n, seed=11, **knobs):
    """n held-out rows of a task."""
    return list(itertools.islice(tasks.rows(task, seed, **knobs), n))


# ---------------------------------------------------------------------------------------------------- CM-ASD


# ------------------------------------------------------------------------------------------------------ ECSV


# ---------------------------------------------------------------------------------------------------- VIA-SD


# ------------------------------------------------------------------------------------------------- SpecGuard


# --------------------------------------------------------------------------------------- sparse verification


# ------------------------------------------------------------------------------------------------ the tables

CLAIMS = dict(      # method: function from n, the number of prompts of each task, to its Findings
)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('methods', nargs='+', choices=CLAIMS)
    parser.add_argument('--n', type=int, default=100, help='prompts of each task')
    args = parser.parse_args()
    for name in args.methods:
        print(f'| {name} | figure | 95 % | line | verdict | |\n|---|--:|--:|--:|---|---|', flush=True)
        for f in CLAIMS[name](args.n):
            print(f'| {f.claim} | {f.figure:.3f} | {f.low:.3f} to {f.high:.3f} | {f.line:g} | {f.verdict} | '
                  f'{f.note} |', flush=True)


if __name__ == '__main__':
    main()
