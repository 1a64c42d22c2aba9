"""The section `signals` of a target's calibration.json: scales of both signals, and a gate chosen on them.

`python train_mask.py --signals` runs find_signals.
"""
import itertools
import math
import sys

import torch
from tqdm import tqdm

from lab import tasks
from lab.pairs import Pair, check
from lab.specguard.rivals import OracleGate
from lab.specguard.sessions import TASKS, engine_for, graded_session, prompt_session, signals_along, steps_end
from specmini import pick_device
from verify import SpecGuard, step_score

LEAST = 0.05        # share of the steps that a gate must keep: how right the surest few are says little
BETAS = 0.5, 0.25, 0.75, 0.0, 1.0                   # of equally good ones the first is chosen
TAUS = [i / 20 for i in range(22)]
MISSED = 0.025      # the chance that a share is lower than its lower bound: that of an interval of 95 %


def percentile(values, share):
    """The value below which this share of them lies; one of them, none in between."""
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]


def signal_ranges(pairs):
    """[[1st, 99th percentile] of L, the same of G], from the (L, G) of many steps."""
    return [[percentile(signal, 0.01), percentile(signal, 0.99)] for signal in zip(*pairs)]


def least_share(right, n):
    """The lower bound (95 %, two-sided) of a share of which `right` of n were seen; 0 of nothing.

    It is the share at which so many or more would be seen with a chance of MISSED: a bisection.
    Source: Clopper & Pearson 1934.
    """
    if not right:
        return 0.0
    low = 0.0
    high = right / n
    while high - low > 1e-6:
        share = (low + high) / 2
        if chance_of_more(right, n, share) < MISSED:
            low = share
        else:
            high = share
    return low


def chance_of_more(right, n, share):
    """The chance that `right` or more of n come true, each with the chance `share`, 0 < share < 1."""
    ways = math.lgamma(n + 1) - math.lgamma(right + 1) - math.lgamma(n - right + 1)
    chance = math.exp(ways + right * math.log(share) + (n - right) * math.log1p(-share))
    total = 0.0
    for i in range(right, n + 1):
        total += chance
        chance *= (n - i) / (i + 1) * share / (1 - share)
    return total


def gate_curve(steps, ranges):
    """[dict(beta, tau, target, right, sure)]: shares of the steps that the target writes, of the kept right.

    sure: the lower bound of the latter. steps: [(L, G, right)]; ranges: of signal_ranges.
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
            sure = least_share(sum(kept), len(kept))
            curve.append(dict(beta=beta, tau=tau, target=1 - len(kept) / len(steps), right=accuracy,
                              sure=sure))
    return curve


def choose_gate(curve, accuracy, share=None):
    """The fewest target steps with surely so many of the kept right; or with at most a `share`, the most.

    Surely: by the lower bound, since of many gates that were tried on few steps the luckiest looks too good.
    Gates that keep less than LEAST do not count; if none of the others is so accurate, the nearest is chosen.
    """
    counted = [gate for gate in curve if gate['target'] <= 1 - LEAST]
    if share is not None:
        allowed = [gate for gate in counted if gate['target'] <= share]
        return max(allowed, key=lambda gate: (gate['right'], gate['target']))
    good = [gate for gate in counted if gate['sure'] >= accuracy]
    if good:
        return min(good, key=lambda gate: (gate['target'], -gate['right']))
    return max(counted, key=lambda gate: (gate['sure'], -gate['target']))


def print_curve(curve, best, accuracy, share=None, more=''):
    """Prints a line of each tau, what was chosen, and where that is not what was asked for.

    more: knobs that a run with this choice takes besides.
    """
    for gate in curve:
        if gate['beta'] != best['beta']:
            continue
        others = f'{gate["right"]:6.1%} of the others are right, surely {gate["sure"]:6.1%}'
        if gate['target'] == 1:
            others = 'there are no others'
        mark = ' <- chosen' if gate is best else ''
        print(f'beta {gate["beta"]:g} tau {gate["tau"]:.2f}: the target writes {gate["target"]:4.0%} '
              f'of the steps, {others}{mark}')
    if share is None and best['sure'] < accuracy:
        print(f'no gate that keeps {LEAST:.0%} of the steps surely has {accuracy:.1%} of them right; '
              f'the nearest, {best["sure"]:.1%}, is chosen')
    print(f'a run with this choice: --method specguard --set beta={best["beta"]:g} tau={best["tau"]:g}{more}')


def task_rows(split, seed, n):
    """n rows of each task with steps."""
    found = []
    for task in TASKS:
        found += itertools.islice(tasks.rows(task, seed, split), n)
    return found


def pair_for(target, draft, prompts, chat):
    """The Pair that is calibrated, on the device and in the numbers that a run takes by itself."""
    device = pick_device('auto')
    if prompts is None:
        return Pair(str(target), str(draft), device=device)
    dtype = 'bf16' if device == 'cuda' else 'fp32'
    pair = Pair(str(target), str(draft), (prompts,), chat, 256, 1024, device, dtype)
    check(pair, 1)
    return pair


def find_signals(pair, rows, seed, accuracy, share=None):
    """The section: percentiles of both models' signals; beta and tau, where steps can be graded.

    pair: a Pair; rows: of each task or family. beta and tau are chosen for this share of kept steps that are
    surely right, or for this largest `share` of target steps.
    """
    seen, judged = lab_steps(pair, rows, seed) if pair.is_embedded else prompt_steps(pair, rows)
    section = {}
    ranges = {}
    for who, found in seen.items():
        ranges[who] = signal_ranges([(logp, grounding) for logp, grounding, _ in found])
        section[f'{who}_logp'], section[f'{who}_grounding'] = ranges[who]
    if not judged:
        print('no row whose answer the target finds: the scales alone are measured, no beta and tau')
        return section
    curve = gate_curve(judged, ranges['draft'])
    best = choose_gate(curve, accuracy, share)
    print_curve(curve, best, accuracy, share, '' if pair.is_embedded else f' delimiter={steps_end(pair)}')
    return section | dict(beta=best['beta'], tau=best['tau'], steps=len(judged))


def lab_steps(pair, n, seed):
    """({model: its signals of steps}, [(L, G, right)] of the draft's that choose a gate), see signals_along.

    The scales are of the lab's training rows, the gate of held-out ones (of another seed than the claims').
    Each step stands behind right ones: the oracle gate keeps what is right.
    """
    train = task_rows('train', seed, n)
    held_out = task_rows('held-out', seed + 100, n)
    engine = engine_for(train + held_out, pair.target, pair.draft, pair.device)

    def steps(rows, who, said):
        found = []
        for row in tqdm(rows, desc=f'{who}, {said}', file=sys.stderr, disable=None):
            method = OracleGate(signals=who)
            found += signals_along(graded_session(engine, row, method), method)
        return found
    seen = {who: steps(train, who, 'train') for who in ('target', 'draft')}
    return seen, steps(held_out, 'draft', 'held-out')


def prompt_steps(pair, n):
    """The same of the first n prompts of each family, which set scales and gate: a scale knows no verdicts.

    The target writes every step, so that the draft's proposals stand behind its own. Where it finds the
    answer an oracle gate runs instead, whose checker has the target go on from each step that it is asked of.
    """
    seen = dict(target=[], draft=[])
    judged = []
    delimiter = steps_end(pair)
    for prompt in tqdm(pair.texts((), n), desc='prompts', file=sys.stderr, disable=None):
        for who, found in seen.items():
            session = prompt_session(pair, prompt)
            session.generator = torch.Generator().manual_seed(prompt.place)
            graded = who == 'draft' and session.checker and session.checker(prompt.ids)
            method = SpecGuard(signals=who, tau=math.inf, delimiter=delimiter)
            if graded:
                method = OracleGate(signals=who, delimiter=delimiter)
            steps = signals_along(session, method)
            found += steps
            judged += steps if graded else []
    return seen, judged
