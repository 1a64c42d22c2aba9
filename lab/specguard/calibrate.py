"""The section `signals` of a target's calibration.json: scales of both signals, and a gate chosen on them.

`python train_mask.py --signals` runs find_signals.
"""
import copy
import itertools
import math
import sys

import torch
from tqdm import tqdm

from lab import tasks
from lab.measure import Pair, Prompt, network, prepared, sd
from lab.specguard.rivals import OracleGate
from model import expect
from specmini import grade, pick_device
from verify import Exact, SpecGuard, decode, step_score, tokens_of

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
LEAST = 0.05        # share of the steps that a gate must keep: how right the surest few are says little
BETAS = 0.5, 0.25, 0.75, 0.0, 1.0                   # of equally good ones the first is chosen
TAUS = [i / 20 for i in range(22)]
MISSED = 0.025      # the chance that a share is below its lower bound, because the interval is of 95 %


def step_checker(row, tokenizer, begin):
    """A Session.checker by the task's own graders: function from ids to whether their last step is right.

    begin: where the answer begins in the ids. A line of work that is cut short is wrong.
    """
    def right(ids):
        text = tokenizer.decode(ids[begin:])
        last = text.strip().split('\n')[-1]
        if 'Answer:' not in row['solution'] or last.startswith('Answer:'):
            return bool(tasks.grade(row, text))
        return text.endswith('\n') and tasks.steps_right(row, text)[-1:] == [True]
    return right


class ContinuedChecker:
    """A Session.checker for any graded prompt: whether the target, going on greedily, comes to the answer.

    So a wrong step that the target would mend counts as right. A text on the way of an earlier continuation
    has the verdict of that one, and costs nothing.
    Source: Wang et al. 2024 (Math-Shepherd), the hard estimate, with one greedy continuation.
    """

    def __init__(self, session, right):
        """session: one that has read its prompt; right: function from a whole answer to its grade."""
        self.session = copy.copy(session)
        self.right = right
        self.ways = []                  # of each continuation (where it began, all ids, verdict)

    def __call__(self, ids):
        for begin, way, verdict in self.ways:
            if begin <= len(ids) and way[:len(ids)] == ids:
                return verdict
        begin = len(self.session.tokens)
        session = copy.copy(self.session)
        session.tokens = list(ids)
        session.room -= len(ids) - begin
        session.ended = len(ids) > begin and ids[-1] in session.eos
        way = ids + tokens_of(decode(session, Exact(draft_temperature=0)))
        verdict = bool(self.right(session.text(way[begin:])))
        self.ways.append((len(ids), way, verdict))
        return verdict


def graded_session(pair, prompt):
    """A Session that has read a Prompt, with a step checker if its row can be graded."""
    engine = prepared(pair, sd(4))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, Exact())
    if pair.is_embedded:
        session.checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    elif grade(prompt.row, '') is not None:
        session.checker = ContinuedChecker(session, lambda text: grade(prompt.row, text))
    return session


def steps_end(pair):
    """The delimiter of SpecGuard that a pair's texts are measured with."""
    return r'\n' if pair.is_embedded else 'sentence'


def signal_ranges(steps):
    """[[1st, 99th percentile] of L, the same of G] of steps (L, G, ...)."""
    found = []
    for values in list(zip(*steps))[:2]:
        ranked = sorted(values)
        found.append([ranked[round(share * (len(ranked) - 1))] for share in (0.01, 0.99)])
    return found


def least_share(right, n):
    """The lower bound (95 %, two-sided) of a share of which `right` of n were seen; 0 of nothing.

    At this share so many or more would be seen with a chance of MISSED; found by bisection.
    Source: Clopper & Pearson 1934.
    """
    low, high = 0.0, right / n if n else 0.0
    i = torch.arange(right, n + 1, dtype=torch.float64)
    ways = math.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(n - i + 1)
    while high - low > 1e-6:
        share = (low + high) / 2
        chance = (ways + i * math.log(share) + (n - i) * math.log1p(-share)).exp().sum()
        low, high = (share, high) if chance < MISSED else (low, share)
    return low


def gate_curve(steps, ranges):
    """[dict(beta, tau, target, right, sure)]: shares of the steps that the target writes, of the kept right.

    sure: the lower bound of the latter. steps: [(L, G, right)]; ranges: of signal_ranges.
    """
    curve = []
    for beta in BETAS:
        scores = [step_score([(L, G)], ranges, beta, 'weighted')[0] for L, G, _ in steps]
        for tau in TAUS:
            kept = [right for score, (*_, right) in zip(scores, steps) if score >= tau]
            shares = dict(target=1 - len(kept) / len(steps), right=sum(kept) / len(kept) if kept else 1.0)
            curve.append(dict(beta=beta, tau=tau, sure=least_share(sum(kept), len(kept)), **shares))
    return curve


def choose_gate(curve, accuracy, share=None):
    """The fewest target steps with surely so many of the kept right; or with at most a `share`, the most.

    Surely means by the lower bound, because of many gates tried on few steps the luckiest looks too good.
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
    """Prints a line of each tau, the choice, and where it misses the accuracy; more: knobs of a run."""
    for gate in curve:
        if gate['beta'] == best['beta']:
            mark = ' <- chosen' if gate is best else ''
            print('beta {beta:g} tau {tau:.2f}: the target writes {target:4.0%} of the steps, {right:6.1%} '
                  'of the others are right, surely {sure:6.1%}'.format(**gate) + mark)
    if share is None and best['sure'] < accuracy:
        print(f'no gate that keeps {LEAST:.0%} of the steps surely has {accuracy:.1%} of them right; '
              f'the nearest, {best["sure"]:.1%}, is chosen')
    print(f'a run with this choice: --method specguard --set beta={best["beta"]:g} tau={best["tau"]:g}{more}')


class CalibratedPair(Pair):
    """A Pair as train_mask.py asks for its networks."""

    def network(self, role):
        """(Transformer, tokenizer, end ids) of target or draft."""
        return network(getattr(self, role), self.device, self.dtype)


def pair_for(target, draft, prompts, chat):
    """The Pair that is calibrated, on the device and in the numbers that a run takes by itself."""
    device = pick_device('auto')
    if prompts is None:
        return CalibratedPair(str(target), str(draft), device=device)
    pair = CalibratedPair(str(target), str(draft), (prompts,), chat, 256, 1024, device,
                          'bf16' if device == 'cuda' else 'fp32')
    expect(pair.texts((), 1), f'--prompts {prompts}: found no prompt of {pair.longest} tokens at most')
    return pair


def find_signals(pair, rows, seed, accuracy, share=None):
    """The section: percentiles of both models' signals; beta and tau, where steps can be graded.

    pair: a Pair; rows: of each task or family. beta and tau are chosen for this share of kept steps that are
    surely right, or for this largest `share` of target steps. Of the lab's tasks the scales are of training
    rows, the gate of held-out ones of another seed.
    """
    section = {}
    prompts = calibration_prompts(pair, rows, seed, 'train')
    for who in ('target', 'draft'):
        steps = signals_along(pair, prompts, who)
        ranges = signal_ranges(steps)
        section[f'{who}_logp'], section[f'{who}_grounding'] = ranges
    if pair.is_embedded:
        steps = signals_along(pair, calibration_prompts(pair, rows, seed + 100, 'held-out'), 'draft')
    graded = [step for step in steps if step[-1] is not None]
    if not graded:
        print('no row whose answer the target finds: the scales alone are measured, no beta and tau')
        return section
    curve = gate_curve(graded, ranges)
    best = choose_gate(curve, accuracy, share)
    print_curve(curve, best, accuracy, share, '' if pair.is_embedded else f' delimiter={steps_end(pair)}')
    return section | dict(beta=best['beta'], tau=best['tau'], steps=len(graded))


def calibration_prompts(pair, n, *where):
    """The first n Prompts of each family of a file, or of the lab's tasks; where: their seed and split."""
    if not pair.is_embedded:
        return pair.texts((), n)
    found = []
    for task in TASKS:
        rows = itertools.islice(tasks.rows(task, *where), n)
        found += [Prompt(task, i, row, pair.encode(row['prompt'])) for i, row in enumerate(rows)]
    return found


def signals_along(pair, prompts, who):
    """[(L, G, right)] of the steps that the draft proposes behind right ones; right is None if not graded.

    who: whose signals. Where no step is graded the target writes all of them. Of another pair only the
    draft's are graded, because each grade costs a continuation.
    """
    found = []
    for prompt in tqdm(prompts, desc=f'signals of the {who}', file=sys.stderr, disable=None):
        session = graded_session(pair, prompt)
        graded = pair.is_embedded or who == 'draft' and session.checker and session.checker(prompt.ids)
        method = SpecGuard(signals=who, tau=math.inf, delimiter=steps_end(pair))
        if graded:
            method = OracleGate(signals=who, delimiter=steps_end(pair))
        for cycle in decode(session, method):
            weakest = [min(verdict[signal] for verdict in cycle.judged) for signal in ('logp', 'grounding')]
            found.append((*weakest, cycle.judged[0]['kept'] if graded else None))
    return found
