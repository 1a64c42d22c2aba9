"""The section `signals` of a target's calibration.json: scales of both signals, and a gate chosen on them.

`python train_mask.py --signals` runs find_signals.
"""
import itertools
import sys

from tqdm import tqdm

from lab import tasks
from lab.specguard.record import TASKS, engine_for, oracle_steps
from verify import step_score

LEAST = 0.05        # share of the steps that a gate must keep: how right the surest few are says little
BETAS = 0.5, 0.25, 0.75, 0.0, 1.0                   # of equally good ones the first is chosen
TAUS = [i / 20 for i in range(22)]


def percentile(values, share):
    """The value below which this share of them lies; one of them, none in between."""
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]


def signal_ranges(pairs):
    """[[1st, 99th percentile] of L, the same of G], from the (L, G) of many steps."""
    return [[percentile(signal, 0.01), percentile(signal, 0.99)] for signal in zip(*pairs)]


def gate_curve(steps, ranges):
    """[dict(beta, tau, target, right)]: the share of steps that the target writes, that of the kept right.

    steps: [(L, G, right)]; ranges: of signal_ranges.
    """
    curve = []
    for beta in BETAS:
        scored = []
        for L, G, right in steps:
            score, _ = step_score([(L, G)], ranges, beta, 'weighted')
            scored.append((score, right))
        for tau in TAUS:
            kept = [right for score, right in scored if score >= tau]
            accuracy = sum(kept) / len(kept) if kept else 1.0
            curve.append(dict(beta=beta, tau=tau, target=1 - len(kept) / len(steps), right=accuracy))
    return curve


def choose_gate(curve, accuracy, share=None):
    """The fewest target steps with so many of the kept right; or with at most a `share`, the most right.

    Gates that keep less than LEAST do not count; if none of the others is so accurate, the nearest is chosen.
    """
    counted = [gate for gate in curve if gate['target'] <= 1 - LEAST]
    if share is not None:
        allowed = [gate for gate in counted if gate['target'] <= share]
        return max(allowed, key=lambda gate: (gate['right'], gate['target']))
    good = [gate for gate in counted if gate['right'] >= accuracy]
    if good:
        return min(good, key=lambda gate: (gate['target'], -gate['right']))
    return max(counted, key=lambda gate: (gate['right'], -gate['target']))


def print_curve(curve, best, accuracy, share=None):
    """Prints a line of each tau, what was chosen, and where that is not what was asked for."""
    for gate in curve:
        if gate['beta'] != best['beta']:
            continue
        others = f'{gate["right"]:6.1%} of the others are right'
        if gate['target'] == 1:
            others = 'there are no others'
        mark = ' <- chosen' if gate is best else ''
        print(f'beta {gate["beta"]:g} tau {gate["tau"]:.2f}: the target writes {gate["target"]:4.0%} '
              f'of the steps, {others}{mark}')
    if share is None and best['right'] < accuracy:
        print(f'no gate that keeps {LEAST:.0%} of the steps has {accuracy:.1%} of them right; '
              f'the nearest, {best["right"]:.1%}, is chosen')
    print(f'a run with this choice: --method specguard --set beta={best["beta"]:g} tau={best["tau"]:g}')


def task_rows(split, seed, n):
    """n rows of each task with steps."""
    found = []
    for task in TASKS:
        found += itertools.islice(tasks.rows(task, seed, split), n)
    return found


def find_signals(target, draft, rows, seed, accuracy, share=None):
    """The section: percentiles of both models' signals, beta and tau.

    target, draft: folders; rows: of each task. The percentiles are of steps on the lab's training rows. beta
    and tau are chosen on held-out rows (of another seed than the claims'): for this share of kept steps that
    are right, or for this largest `share` of target steps. Each step stands behind right ones: the oracle
    gate keeps what is right.
    """
    train = task_rows('train', seed, rows)
    held_out = task_rows('held-out', seed + 100, rows)
    engine = engine_for(train + held_out, target, draft)

    def steps(rows, who, said):
        found = []
        for row in tqdm(rows, desc=f'{who}, {said}', file=sys.stderr, disable=None):
            found += oracle_steps(engine, row, who)
        return found
    section = {}
    ranges = {}
    for who in ('target', 'draft'):
        seen = steps(train, who, 'train')
        ranges[who] = signal_ranges([(logp, grounding) for logp, grounding, _ in seen])
        section[f'{who}_logp'], section[f'{who}_grounding'] = ranges[who]
    seen = steps(held_out, 'draft', 'held-out')
    curve = gate_curve(seen, ranges['draft'])
    best = choose_gate(curve, accuracy, share)
    print_curve(curve, best, accuracy, share)
    return section | dict(beta=best['beta'], tau=best['tau'], steps=len(seen))
