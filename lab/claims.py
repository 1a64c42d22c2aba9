"""The papers' claims as experiments: `python -m lab.claims cmasd ecsv` prints the table of each method.

One function per claim; each returns a Finding. A claim HOLDS if the whole bootstrap interval of its figure
lies on the claimed side of its line, FAILS if the whole interval lies on the other, and is else UNDECIDED.
"""
import argparse
import copy
import functools
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from pathlib import Path as File

import torch
from tqdm import tqdm

import kernels
import specmini
import train_mask
from lab import bench, rivals, stages, tasks            # noqa: F401, rivals enter METHODS
from lab.calibration import read_calibration
from lab.compare import tokens_of
from lab.distil import distil
from lab.passes import cost, sparsity
from lab.prompts import calibration_texts
from lab.quantise import write_copy
from lab.replay import (DEPTHS, SIGNS, VOTES, Branches, Record, begin, costs, fit_weights, lessons, loss_of,
                        network, prompts, seconds, written)
from lab.rivals import EcsvSpot, Unseen, blend, ledger, watched
from lab.steps import (DRAFTS, ROLLOUTS, USUAL, Rollout, average_precision, choose_gate, gate_curve, judged,
                       observe, outcomes, record, roc_area, signal_ranges, start)
from model import Reader, expect, load
from verify import (CONTROLLERS, METHODS, Ballot, CmAsd, Draft, Ecsv, Exact, Session, Sparse, SpecGuard,
                    loglikes, rollout, write_steps)

HOME = File(__file__).parent / 'models'


@dataclass
class Finding:
    """One row of a claims table."""
    claim: str          # what is claimed, with its number in the paper's list
    figure: float       # what was measured
    low: float          # bootstrap 95 % interval
    high: float
    line: float         # the claim says that the figure is at least this
    note: str = ''      # units, n
    why: str = ''       # one sentence that is said only where it fails

    @property
    def verdict(self):
        return 'HOLDS' if self.low >= self.line else 'FAILS' if self.high < self.line else 'UNDECIDED'

    @property
    def remark(self):
        why = f'Presumably: {self.why}' if self.why and self.verdict == 'FAILS' else ''
        return '. '.join(filter(None, (self.note.rstrip('. '), why)))


def median(values):
    return sorted(values)[len(values) // 2]


def mean(values):
    return sum(values) / len(values)


def bootstrap(rows, figure, n=1000, seed=0):
    """(figure of the rows, low, high): the 95 % interval over n resamples of the rows, with replacement.

    Resamples that have no such figure (nan: of two kinds one is absent) are left out.
    """
    rng = random.Random(seed)
    found = (figure(rng.choices(rows, k=len(rows))) for _ in range(n))
    found = sorted(x for x in found if not math.isnan(x)) or [nan]
    return figure(rows), found[int(0.025 * len(found))], found[max(0, int(0.975 * len(found)) - 1)]


def held_out(task, n, seed=11, **knobs):
    """n held-out rows of a task."""
    return list(itertools.islice(tasks.rows(task, seed, **knobs), n))


# ---------------------------------------------------------------------------------------------------- CM-ASD

FAMILIES = 'math table story translate summary'.split()
TAUS = 0.05, 0.15, 0.3, 0.5, 0.75, 0.95     # constant thresholds to compare with; the first is SpecDec's
MORE = 1.005                                # a line for "better": a tie is none
ONES = 'entropy', 'margin', 'softmax'
WINDOWS = [('fixed', k) for k in range(1, 16)]
SWEPT = [('online', alpha, k) for alpha in (0.5, 1.0, 2.0) for k in (5, 10, 15, 25)]
ALONE = [('alone', name) for name in ONES]
RULES = {           # what is replayed: strict ones, with which every text is the target's, then relaxed ones
    **{key: Exact(key[1]) for key in WINDOWS},
    **{key: CmAsd(alpha=key[1], k_max=key[2], accept_='strict') for key in SWEPT},
    **{key: CmAsd(accept_='strict', **{f'lam_{x}': float(x == key[1]) for x in ONES}) for key in ALONE},
    'default': CmAsd(), 'adaptive tau, fixed 7': CmAsd(7, controller='fixed'),
    **{f'gamma_tau {g}': CmAsd(gamma_tau=g) for g in (0.1, 0.5, 1.0, 2.0)},
    **{f'k_max {k}': CmAsd(k_max=k) for k in (5, 10, 15, 25)},
    **{f'{name} alone': CmAsd(**{f'lam_{x}': float(x == name) for x in ONES}) for name in ONES},
    **{name: METHODS[name]() for name in ('cmasd-prob', 'cmasd-specdec', 'cmasd-typical')},
    **{f'tau {t}': CmAsd(tau_base=t, gamma_tau=0) for t in TAUS},
    **{f'tau {t}, fixed 7': CmAsd(7, tau_base=t, gamma_tau=0, controller='fixed') for t in TAUS}}


def auroc(sure, hits):
    """The chance that an accepted token is surer than a rejected one; 1/2 where one kind is absent."""
    area = roc_area(sure, hits)
    return area if area == area else 0.5


def reliability(sure, hits, bins=10):
    """([(mean confidence, acceptance rate, tokens) of each bin in use], expected calibration error).

    sure [n] in 0..1, hits [n] bool: whether the strict rule keeps the token.
    """
    place = (sure * bins).long().clamp(max=bins - 1)
    curve = [(float(sure[m].mean()), float(hits[m].double().mean()), int(m.sum()))
             for b in range(bins) if (m := place == b).any()]
    return curve, sum(n * abs(c - a) for c, a, n in curve) / max(1, len(sure))


def trace_reliability(lines):
    """(reliability curve, AUROC, expected calibration error) of C, from the lines of a trace file of cmasd.

    A hit is p >= q, a match at temperature 0: what the strict rule keeps for sure, whatever the run's kept.
    """
    judged = [j for line in lines for j in json.loads(line)['judged']]
    sound = judged and all('confidence' in j for j in judged)
    expect(sound, 'the trace has no C: write it with --method cmasd --trace FILE')
    sure = torch.tensor([j['confidence'] for j in judged])
    hits = torch.tensor([j['p'] >= j['q'] for j in judged])
    curve, error = reliability(sure, hits)
    return curve, auroc(sure, hits), error


def chrf(text, reference, order=6):
    """Mean F1 of the character n-grams of two texts, n = 1 to 6. Source: Popović 2015 (chrF), with beta 1."""
    if text == reference:
        return 1.0
    grams = lambda s, n: Counter(s[i:i + n] for i in range(len(s) - n + 1))
    pairs = [(grams(text, n), grams(reference, n)) for n in range(1, order + 1)]
    return mean([2 * (a & b).total() / max(1, a.total() + b.total()) for a, b in pairs])


def replayed_row(family, row, ids, rules=RULES, rounded=''):
    """Of one prompt: {rule: dict of sums of its run}, and the signals and hits of the target's own text."""
    record, runs = Record(ids, rounded), {}
    decode = lambda ids: network('target')[1].decode(list(ids))
    for key, method in rules.items():
        run = record.replay(method)
        same, text = sum(a == b for a, b in zip(run.text, record.text)), decode(run.text)
        runs[key] = dict(alike=same / max(len(run.text), len(record.text)),
                         chrf=chrf(text, decode(record.text)), kept=sum(run.kept), cycles=len(run.kept),
                         tokens=len(run.text), rolled=sum(a < b for a, b in zip(run.kept, run.drafted)),
                         seconds=seconds(run.drafted), right=tasks.grade(row, text))
    places = [record.place(record.text[:i]) for i in range(len(record.text))]
    return dict(family=family, runs=runs, signals=torch.tensor([x.signals for x in places]),
                hits=torch.tensor([x.token == x.pick for x in places]),
                right=tasks.grade(row, decode(record.text)))


def total(rows, key, *names):
    """Sums of a rule's figures over the rows, in order of the names."""
    return [sum(r['runs'][key][name] for r in rows) for name in names]


def pace(rows, key):
    """Modelled tokens a second of a rule over plain decoding's."""
    tokens, time = total(rows, key, 'tokens', 'seconds')
    return tokens * costs()[1][1] / time


def per_cycle(rows, key):
    """Draft tokens kept a cycle."""
    kept, cycles = total(rows, key, 'kept', 'cycles')
    return kept / cycles


def alike(rows, key):
    return total(rows, key, 'alike')[0] / len(rows)


def at_equal(rows, keys, aim):
    """Draft tokens kept a cycle at alignment `aim`, linear between the runs `keys`, the nearest beyond."""
    points = sorted((alike(rows, key), per_cycle(rows, key)) for key in keys)
    for (a, x), (b, y) in zip(points, points[1:]):
        if a <= aim <= b and a < b:
            return x + (y - x) * (aim - a) / (b - a)
    return points[0][1] if aim < points[0][0] else points[-1][1]


def over_constant(rows, key, more=''):
    """Kept a cycle of a rule over that of a constant tau that is tuned to the same alignment."""
    return per_cycle(rows, key) / at_equal(rows, [f'tau {t}{more}' for t in TAUS], alike(rows, key))


def of(rows, *families):
    return [r for r in rows if r['family'] in families]


def pooled(rows):
    """(signals [n, 3], whether the draft's token is the target's [n]) of all tokens."""
    return torch.cat([r['signals'] for r in rows]), torch.cat([r['hits'] for r in rows])


def area(rows, which=None):
    """AUROC of C, or of one of its signals."""
    sure, hits = pooled(rows)
    return auroc(sure.mean(-1) if which is None else sure[:, which], hits)


def beside_best_fixed(rows):
    """Mean over the families of the tuned controller's pace over the best fixed window's."""
    return mean([max(pace(r, k) for k in SWEPT) / max(pace(r, k) for k in WINDOWS)
                 for f in FAMILIES if (r := of(rows, f))])


def transferred(rows, source, to):
    """The share of the best strict gain on one family that the knobs tuned on another give; 0: no gain."""
    theirs, ours = of(rows, source), of(rows, to)
    if not theirs or not ours:                          # a resample without one of them
        return 1.0
    best = max(SWEPT, key=lambda k: pace(theirs, k))
    gain = max(pace(ours, k) for k in SWEPT) - 1
    return (pace(ours, best) - 1) / gain if gain > 0 else 0.0


def won(rows, key='default'):
    """Right answers of a rule minus plain decoding's, as a share of the graded rows."""
    return mean([r['runs'][key]['right'] - r['right'] for r in rows if r['right'] is not None] or [0])


def rolled_back(rows, key):
    """The share of cycles in which a draft token was rejected."""
    rolled, cycles = total(rows, key, 'rolled', 'cycles')
    return rolled / cycles


ALIKE = 'The signals are functions of one q and rank its tokens alike'
CMASD = [       # claim, line, its figure of replayed rows, why where it fails
    ('C1 speed over plain decoding, modelled from pass costs', 4.0, lambda r: pace(r, 'default'),
     "A draft pass costs more beside a target pass than the paper's drafter of two parallel layers"),
    ('C2 draft tokens kept a cycle, over a strict fixed window of 7', 4.27 / 2.91,
     lambda r: per_cycle(r, 'default') / per_cycle(r, ('fixed', 7)),
     'Most blocks of the fixed window are kept whole already, which leaves less to gain'),
    ('C3, F4 alignment with the greedy text', 0.87, lambda r: alike(r, 'default'),
     'One token that the target would not write turns all that follows'),
    ('F1 AUROC of C for strict acceptance', 0.65, area,
     'The draft is sure where it is wrong: C sees its doubt, not its ignorance'),
    ('C4, F1 AUROC of C minus that of the best single signal', 0.001,
     lambda r: area(r) - max(area(r, i) for i in range(3)), ALIKE),
    ('C4 strict speed with C over the best single signal', MORE,
     lambda r: pace(r, ('online', 1.0, 10)) / max(pace(r, a) for a in ALONE),
     f'{ALIKE}; what differs is their size, which alpha sets as well'),
    ('F2 strict speed over the best fixed window of each family, alpha and k_max tuned', 1.02,
     beside_best_fixed, "A window tuned to the family is near most blocks' best length"),
    ('F3 kept a cycle over a constant tau of equal alignment', MORE, lambda r: over_constant(r, 'default'),
     'Tokens of low C fail a constant threshold too: a higher one for them turns few verdicts'),
    ('F3 the same with a fixed window of 7 on both sides: the threshold alone', MORE,
     lambda r: over_constant(r, 'adaptive tau, fixed 7', ', fixed 7'),
     'Tokens of low C fail a constant threshold too: a higher one for them turns few verdicts'),
    ('F5 over a fixed window of 7 and a constant tau of equal alignment', 1.2,
     lambda r: over_constant(r, 'default', ', fixed 7'),
     'Only blocks that a window of 7 cuts off gain, and C closes others too early'),
    ('C5, F6 share of the strict gain on math kept when tuned on story', 0.95,
     lambda r: transferred(r, 'story', 'math'), 'The best alpha and k_max of the two families differ'),
    ('C5 share of the strict gain on summary kept when tuned on translate', 0.95,
     lambda r: transferred(r, 'translate', 'summary'),
     'The best alpha and k_max of the two families differ')]


def cmasd(n):
    """CM-ASD's claims: C the paper's own, F what would refute them. Prompts of up to 300 tokens."""
    texts = {f: prompts(f, n) for f in FAMILIES}
    rows = [replayed_row(f, *pair) for f in texts for pair in tqdm(texts[f], desc=f'cmasd {f}')]
    for claim, line, figure, why in CMASD:
        yield Finding(claim, *bootstrap(rows, figure, 200), line, f'n = {len(rows)}', why)
    yield Finding('F4 right answers lost or won on math', *bootstrap(of(rows, 'math'), won, 200), -0.02,
                  f'n = {n}', "A token kept against the target's choice may be what the answer hangs on")
    yield from steadiness(rows, texts)
    yield from thinned(rows, texts)
    sure, hits = pooled(rows)
    curve, error = reliability(sure.mean(-1), hits)
    show([f'mean C (expected calibration error {error:.3f})', 'kept by the strict rule', 'tokens'], curve)
    show(['rule', 'alignment', 'n-gram F1', 'kept a cycle', 'cycles rolled back', 'x plain, modelled',
          'right won'],
         [(key, alike(rows, key), total(rows, key, 'chrf')[0] / len(rows), per_cycle(rows, key),
           rolled_back(rows, key), pace(rows, key), won(rows, key)) for key in RULES if isinstance(key, str)])
    show(['family', 'strict: best fixed', 'best online', 'default: kept a cycle', 'alignment', 'x plain'],
         [(f, max(pace(r, k) for k in WINDOWS), max(pace(r, k) for k in SWEPT), per_cycle(r, 'default'),
           alike(r, 'default'), pace(r, 'default')) for f in FAMILIES if (r := of(rows, f))])
    show(['controller, strict', 'kept a cycle', 'positions a token', 'x plain, modelled',
          'measured, with what the oracle looks up'],
         controllers(n))


def controllers(n):
    """(name, kept a cycle, target positions a token, modelled and measured speed over plain decoding) of
    every length controller in real strict runs on an eighth of n, in turn on each text.
    """
    traces = {name: [] for name in ('plain', *CONTROLLERS)}
    for ids in (ids for f in FAMILIES for _, ids in prompts(f, max(1, n // 8))):
        s = begin(ids)
        for name, trace in traces.items():
            plain = name == 'plain'
            trace += written(s, ids, Exact(0) if plain else CmAsd(7, accept_='strict', controller=name))
    speed = lambda trace: len(tokens_of(trace)) / sum(c.seconds for c in trace)
    plain = speed(traces.pop('plain'))
    for name, trace in traces.items():
        drafted, tokens = [len(c.drafted) for c in trace], len(tokens_of(trace))
        yield (name, mean([c.accepted for c in trace]), (sum(drafted) + len(trace)) / tokens,
               costs()[1][1] * tokens / seconds(drafted), speed(trace) / plain)


def steadiness(rows, texts):
    """Findings on 4-bit models, on seeds at temperature 1, and on the cost of the confidence itself.

    rows: the replayed ones of texts, {family: [(row, prompt ids)]}, in order.
    """
    some = [(f, *pair) for f in texts for pair in texts[f]]
    count = lambda cycles: (sum(c.accepted for c in cycles), len(cycles))
    ratio = lambda pairs: sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    sampled = [[count(written(begin(ids), ids, CmAsd(), 1.0, seed)) for seed in range(3)] for *_, ids in some]

    def even(rows):
        each = [ratio(column) for column in zip(*rows)]
        return 1 - torch.tensor(each).std().item() / mean(each)
    yield Finding('C5 1 - relative spread of kept a cycle over 3 seeds, temperature 1',
                  *bootstrap(sampled, even, 200), 0.95, f'n = {len(some)}',
                  'Short texts: what is sampled early decides how easy the rest is')
    two = {key: RULES[key] for key in (('online', 1.0, 10), 'default')}
    for role in ('draft', 'target'):
        pairs = list(zip(rows, [replayed_row(*x, two, role) for x in tqdm(some, desc=f'4-bit {role}')]))
        for key, name in zip(two, ('strict ', '')):
            change = lambda pairs: per_cycle([b for _, b in pairs], key) / per_cycle(
                [a for a, _ in pairs], key)
            yield Finding(f'{name}kept a cycle with a 4-bit {role} over the plain one',
                          *bootstrap(pairs, change, 200), 0.95, f'n = {len(some)}',
                          'Rounding one of the two moves its favourites away from the other\'s')
    z, rule = torch.randn(4, 1, network('target')[0].vocab), CmAsd()
    times = own_cost(lambda: [rule.confidence(row) for row in z])
    yield Finding('1 - cost of the confidences of a block of 4 over a target pass',
                  *bootstrap(times, lambda t: 1 - median(t), 200), 0.95, 'time; n = 50',
                  'Five tensor operations a token are a price that does not shrink with the target')


READ = ('C of one pass', *ONES, 'C of cmasd-dropout: spread of its q(x) over their mean', 'their spread',
        'their mean')


def thinned_row(row, ids):
    """(what one pass and what dropout say of each judged token, in the order of READ, and its verdict [N, 8];
    positions by path) of a strict run of cmasd-dropout, whose text is therefore that of the replayed row.
    """
    found, positions, i = [], Counter(tokens=len(row['hits'])), 0
    for cycle in written(begin(ids), ids, METHODS['cmasd-dropout'](accept_='strict')):
        for k, j in enumerate(cycle.judged):
            ones, c, m = row['signals'][i + k].tolist(), j['confidence'], j['mean']
            found.append([mean(ones), *ones, c, (c - 1) * m, m, j['kept']])
        i += len(cycle.tokens)
        positions.update({path: T for path, (_, T, _) in cycle.passes.items()})
    return torch.tensor(found).view(-1, len(READ) + 1), positions


def thinned(rows, texts):
    """A Finding and a table on the confidence by dropout; rows and texts: as in steadiness."""
    prompts = [ids for f in texts for _, ids in texts[f]]
    found = [thinned_row(*pair) for pair in zip(tqdm(rows, desc='dropout'), prompts)]
    spent = sum((positions for _, positions in found), Counter())
    per = {path: spent[f'draft/full{path}'] / spent['tokens'] for path in ('', ' dropout')}

    def known(found, i):
        x = torch.cat([x for x, _ in found])
        return auroc(x[:, i], x[:, -1].bool())
    yield Finding('C by dropout: its AUROC for strict acceptance minus that of the entropy of one pass',
                  *bootstrap(found, lambda found: known(found, 4) - known(found, 1), 200), 0.001,
                  f'the draft reads {per[" dropout"]:.2f} positions a token more, {per[""]:.2f} as usual; '
                  f'n = {len(found)}', 'The draft was trained without dropout: no channel spares another')
    show(['AUROC for strict acceptance, of judged tokens', 'figure', 'low', 'high'],
         [(name, *bootstrap(found, partial(known, i=i), 200)) for i, name in enumerate(READ)])


def own_cost(work):
    """The processor's seconds for some work over those for a target pass of one position, 50 times."""
    s, line, times = begin([1] * 100), [1] * 100, []
    for i in range(50):
        s.draft.read(line, [], s.draft.model.full, 1)
        marks = [time.process_time()]
        for step in (work, lambda: s.target.read(line, [], s.target.model.full, 1)):
            step()
            marks.append(time.process_time())
        times.append((marks[1] - marks[0]) / (marks[2] - marks[1]))
    return times


# ------------------------------------------------------------------------------------------------------ ECSV

LAWS = 'lite', 'ecsv', 'soft'           # votes whose law of the first token is measured
SPOTS = {'spot': dict(), 'spot, R = 2': dict(spots=2), 'spot, R = 4': dict(spots=4),
         'spot, entropy': dict(policy='entropy'), 'spot, agree_entropy': dict(policy='agree_entropy'),
         'spot, ties by mean q': dict(tie_break='draft'), 'spot, bonus check': dict(bonus_check=True),
         'spot alone': dict(a_entropy=0, a_agree=0, a_self=0)}


def voted_row(family, ids, keys, **how):
    """Of one prompt at temperature 0: {vote: its sums by depth}, the laws of the first token, the family."""
    record = Branches(ids, **how)
    row = {key: record.sums(key) for key in keys}
    laws = {key: record.aligned(key) for key in ('q', *LAWS)} if len(keys) > 4 else {}
    return row | dict(family=family, aligned=laws)


def summed(rows, key, k):
    """[kept, cycles, tokens, target positions, target passes, ...] of a vote at depth k."""
    return [sum(column) for column in zip(*(r[key][k] for r in rows))]


def at_depth(rows, key, k):
    """Draft tokens kept a cycle by a vote at depth k."""
    kept, cycles, *_ = summed(rows, key, k)
    return kept / cycles


def at_budget(rows, key, base):
    """The sums of a mix of two depths whose target positions a token are those of base, (vote, depth).

    One depth for a share of the texts, the next for the rest; that alone of the nearest where none fits.
    """
    _, _, tokens, positions, *_ = summed(rows, *base)
    aim, sums = positions / tokens, [summed(rows, key, k) for k in sorted(rows[0][key])]
    excess = [x[3] - aim * x[2] for x in sums]
    for a, b, x, y in zip(excess, excess[1:], sums, sums[1:]):
        if a <= 0 <= b and a < b:
            return [(b * u - a * v) / (b - a) for u, v in zip(x, y)]
    return sums[min(range(len(sums)), key=lambda i: abs(excess[i]))]


def tuned(rows):
    """(vote, depth) of the fastest speculative decoding with one branch, by modelled time."""
    return max(((key, k) for key in ('sd greedy', 'sd sampled') for k in DEPTHS),
               key=lambda pair: 1 / summed(rows, *pair)[1] / seconds([pair[1]]))


def gain(rows, key, other, base):
    """Draft tokens kept a cycle over another vote's, both at the target positions a token of base."""
    a, b = (at_budget(rows, name, base) for name in (key, other))
    return a[0] / a[1] / (b[0] / b[1])


def within(rows, keys, base):
    """(1 - the largest difference of the keys' positions a token from those of base) three times."""
    per = lambda x: x[3] / x[2]
    aim = per(summed(rows, *base))
    return single(1 - max(abs(per(at_budget(rows, key, base)) / aim - 1) for key in keys))


def law(rows, key, i):
    """Mean of a law's nats (0) or of how often its favourite is the target's (1)."""
    return mean([r['aligned'][key][i] for r in rows])


def datasets(rows, base):
    """On how many families both the length and the target's cross-entropy improve over tuned sd."""
    return sum(gain(mine, 'ecsv', base[0], base) > 1 and law(mine, 'ecsv', 0) < law(mine, 'q', 0)
               for f in FAMILIES if (mine := of(rows, f)))


NOISY_ARGMAX = 'At their first token all branches share one q: their vote is a noisy estimate of its argmax'
ECSV = [        # claim, line, its figure of rows at the budget of base, why where it fails
    ('E1 ecsv-lite over sd with a sampled draft', 1.05, lambda r, base: gain(r, 'lite', 'sd sampled', base),
     'Branches of one draft share its errors'),
    ('E1, F4 ecsv-lite over sd with a greedy draft', 1.05, lambda r, base: gain(r, 'lite', 'sd greedy', base),
     NOISY_ARGMAX),
    ('F4 the best of ecsv, lite, soft over sd with a greedy draft', MORE,
     lambda r, base: max(gain(r, key, 'sd greedy', base) for key in LAWS), NOISY_ARGMAX),
    ('F4 ecsv over the argmax of mean q', MORE, lambda r, base: gain(r, 'ecsv', 'mean-argmax', base),
     'A vote of samples estimates the argmax of mean q, which that control takes directly'),
    ('N1 families where length and aligned cross-entropy improve over tuned sd', 2, datasets,
     "A few samples are a coarser law than the q that they come from, and tuned sd takes q's favourite"),
    ('N2 ecsv over the unweighted vote', MORE, lambda r, base: gain(r, 'ecsv', 'vote-unif', base),
     'Branches that share their q are equally reliable, so that the weights seldom turn a majority'),
    ('F6 positional over prefix alignment', MORE, lambda r, base: gain(r, 'ecsv', 'prefix', base),
     'Once branches have parted, a positional vote counts tokens that were written behind other words')]


def ecsv(n):
    """ECSV's claims: E the proposal's expectations, N its falsification criteria, F ours.

    All at the target positions a token of tuned sd, by mixing two depths, unless said. Prompts of up to 300
    tokens.
    """
    families = FAMILIES[:3]
    texts = {f: [ids for _, ids in prompts(f, n)] for f in families}
    taught = {f: [lessons(Branches(ids, branches=4)) for _, ids in prompts(f, max(4, n // 4), SEED)]
              for f in tqdm(families, desc='lessons')}
    votes = VOTES | {key: Ecsv(**weights(a)) for key, a in fits(taught).items()}
    rows = [voted_row(f, ids, ('sd greedy', *votes, 'oracle-top1'), votes=votes) for f in families
            for ids in tqdm(texts[f], desc=f'ecsv {f}')]
    base = tuned(rows)
    note = f'kept a cycle at the positions a token of {base[0]}, gamma {base[1]}; n = {len(rows)}'
    yield Finding('budget: 1 - the largest difference in positions a token', *within(
        rows, ('sd sampled', *votes), base), 0.99, note, 'No mix of two depths of 1 to 8 meets the budget')
    for claim, line, figure, why in ECSV:
        yield Finding(claim, *bootstrap(rows, partial(figure, base=base), 200), line, note, why)
    yield Finding('N3 ecsv-lite with B = 2 over sd with a sampled draft', *bootstrap(
        rows, lambda r: gain(r, 'lite, B = 2', 'sd sampled', ('sd sampled', 4)), 200), MORE,
        f'kept a cycle at the positions a token of sd sampled, gamma 4; n = {len(rows)}',
        'Two branches that disagree have no majority')
    yield Finding('of what the best of four branches would keep, ecsv keeps', *bootstrap(
        rows, lambda r: at_depth(r, 'ecsv', 4) / at_depth(r, 'oracle-top1', 4), 200), 0.9,
        f'both at depth 4, without a budget; n = {len(rows)}', 'The one branch that is right has one vote')
    yield from noisy(texts, rows, base, max(2, n // 2))
    yield from spotted(texts, rows, base, weights(fit_weights(sum(taught.values(), []))))
    yield from learned(taught, rows, base)
    yield from sampling(max(2, n // 3))              # a text costs most there
    at = lambda r, key: (x := at_budget(r, key, base))[0] / x[1]
    show(['at equal positions a token', 'kept a cycle', *families, 'nats of the target (q: its own)',
          "the target's favourite first"],
         [(key, at(rows, key), *(at(of(rows, f), key) for f in families),
           *(law(rows, key, i) if key in LAWS else '' for i in (0, 1))) for key in ('sd greedy', *votes)]
         + [('q', *[''] * (1 + len(families)), *(law(rows, 'q', i) for i in (0, 1)))])
    show(['ecsv-lite over greedy sd, same depth', *(f'k = {k}' for k in (2, 4, 8))],
         [(f'B = {B}', *(at_depth(rows, key, k) / at_depth(rows, 'sd greedy', k) for k in (2, 4, 8)))
          for B, key in ((2, 'lite, B = 2'), (4, 'lite'), (8, 'lite, B = 8'))])


SEED = 12                               # of the prompts that weights are fitted to, half of them
FITS = {        # votes with fitted weights: families, prompts of each (None: half of the lessons), L2
    'fitted': (FAMILIES[:3], None, 1e-3), 'fitted to 2 of math': (['math'], 2, 0.0),
    'fitted to 2 of math, L2': (['math'], 2, 1e-3), 'fitted to 2 of story': (['story'], 2, 0.0)}


def weights(a):
    """The knobs of fitted weights [5]."""
    return dict(zip(SIGNS, a.tolist()))


def blind(taught, families, n, begin=0):
    """n of these families' lessons each (None: half of them) from `begin` on, without the target's margin."""
    mask, take = torch.tensor([1.0, 1, 1, 0])[:, None, None], n or len(taught['math']) // 2
    return [(x * mask, y) for f in families for x, y in taught[f][begin:begin + take]]


def fits(taught):
    """{vote: fitted weights [5]}; no vote of these asks the target first."""
    return {key: fit_weights(blind(taught, families, n), l2) for key, (families, n, l2) in FITS.items()}


def joined(pairs):
    return [torch.cat(column, -1) for column in zip(*pairs)]


def learned(taught, rows, base):
    """Findings and a table on fitted weights, and on branches' errors: the second half of the lessons and the
    rows are of prompts that no weight has seen.
    """
    half, found = len(taught['math']) // 2, fits(taught)
    unseen = blind(taught, FAMILIES[:3], None, half)
    seen = {key: blind(taught, families, n) for key, (families, n, _) in FITS.items()}
    for key, line, why in (
            ('fitted', MORE, 'Branches of one draft have much the same r: new weights turn few votes'),
            ('fitted to 2 of math', 1.0, 'What is peculiar to two texts was taken for a rule')):
        yield Finding(f'weights {key}, over the default ones', *bootstrap(
            rows, lambda r: gain(r, key, 'ecsv', base), 200), line,
            f'kept a cycle at equal positions a token; n = {len(rows)}, unseen', why)
        a = found[key]
        yield Finding(f'no overfitting, weights {key}: log loss where fitted over that on unseen prompts',
                      *bootstrap(unseen, lambda u: float(loss_of(a, *joined(seen[key])) / loss_of(
                          a, *joined(u))), 200), 0.9, f'n = {len(unseen)} unseen, of three tasks',
                      'Few votes on one task tell little of what a wrong token looks like on another')
    wrong = [(~y).double() for pairs in taught.values() for _, y in pairs]
    e = torch.cat(wrong, -1)
    yield Finding("1 - correlation of two branches' errors, of tokens that a vote decides", *bootstrap(
        wrong, lambda wrong: 1 - correlation(torch.cat(wrong, -1)), 200), 0.95,
        f'a branch errs at {e.mean():.1%} of them, all four at {e.prod(0).mean():.2%}, independent ones '
        f'would at {e.mean() ** 4:.3%}; n = {len(wrong)}', 'They share the draft, and at first its very law')
    area = lambda a, x, y: auroc(torch.tensordot(a[:-1], x.double(), 1).flatten(), y.flatten())
    usual = torch.tensor([getattr(Ecsv(), sign) for sign in SIGNS] + [0.0]).double()
    show(['weights', *SIGNS[:3], 'log loss where fitted', 'unseen', 'AUROC where fitted', 'unseen',
          'kept a cycle over default weights'],
         [('default', *usual[:3].tolist(), '', '', '', area(usual, *joined(unseen)), 1.0)] +
         [(key, *a[:3].tolist(), *(float(loss_of(a, *joined(x))) for x in (seen[key], unseen)),
           *(area(a, *joined(x)) for x in (seen[key], unseen)), gain(rows, key, 'ecsv', base))
          for key, a in found.items()])


def correlation(wrong):
    """The mean correlation of the rows of wrong [B, N], each 0 or 1."""
    B, table = len(wrong), torch.corrcoef(wrong)
    return float((table.nansum() - B) / (B * B - B))


def noisy(texts, rows, base, n):
    """E3: what noise in draft or target does to the gain over sd with an equally noisy sampled draft."""
    some = [(f, ids) for f in texts for ids in texts[f][:n]]
    rows = [row for f in texts for row in of(rows, f)[:n]]
    each, keys = lambda rows: gain(rows, 'ecsv', 'sd sampled', base), ('sd greedy', 'sd sampled', 'ecsv')
    for name, how in (('a 4-bit draft', dict(rounded='draft')), ('a 4-bit target', dict(rounded='target')),
                      ('draft temperature 1.2', dict(draft_temperature=1.2)), ('another seed', dict(seed=1))):
        noise = [voted_row(f, ids, keys, branches=4, **how) for f, ids in tqdm(some, desc=name)]
        more = lambda pairs: each([b for _, b in pairs]) - each([a for a, _ in pairs])
        note = f'n = {len(some)}; over greedy sd {gain(noise, "ecsv", "sd greedy", base):.3f}'
        if name == 'another seed':                      # what chance alone does
            yield Finding('minus the change of the same gain by another seed', *bootstrap(
                list(zip(rows, noise)), lambda pairs: -abs(more(pairs)), 200), -0.02, note,
                'Chance alone changes the gain by more than that: read the rows above with it in mind')
        else:
            yield Finding(f'E3 gain over equally noisy sampled sd grows with {name}', *bootstrap(
                list(zip(rows, noise)), more, 200), 0.0, f'difference of ratios, {note}',
                'All branches come from one draft and go wrong together')


def spotted(texts, rows, base, fitted):
    """E2, F5: what asking the target before the vote is worth, by positions and by passes; then a table.

    A check keeps more than the vote alone, hence the depths. fitted: knobs of weights.
    """
    depths, found, spots = DEPTHS[5:], [], SPOTS | {'spot, fitted weights': fitted}
    for f in texts:
        some = max(2, len(texts[f]) // 4)               # of the texts, for the variants
        for i, (ids, row) in enumerate(zip(tqdm(texts[f], desc=f'spots {f}'), of(rows, f))):
            record = Branches(ids, branches=4)
            found.append(row | {key: {k: record.checked(EcsvSpot(**knobs), k) for k in depths}
                                for key, knobs in spots.items() if key == 'spot' or i < some})
    calls = lambda rows, key: (x := at_budget(rows, key, base))[2] / x[4]
    note = f'at equal positions a token, n = {len(found)}'
    for claim, line, figure, why in [
            ('E2 ecsv-spot over ecsv', 1.02, lambda r: gain(r, 'spot', 'ecsv', base),
             'A check that turns the vote has read positions that are read again'),
            ('E2, F4 ecsv-spot over sd with a greedy draft', MORE,
             lambda r: gain(r, 'spot', 'sd greedy', base),
             'One checked position does not make up for a first token that is a noisy argmax'),
            ('F5 ecsv-spot over tuned sd by tokens a target pass', 1.0,
             lambda r: calls(r, 'spot') / calls(r, base[0]), 'A check is a target pass of its own')]:
        yield Finding(claim, *bootstrap(found, figure, 200), line, note, why)
    yield Finding('budget of spot checks: 1 - the largest difference in positions a token',
                  *within(found, ('ecsv', 'spot'), base), 0.99, note, f'No mix of two of {depths} meets it')
    k, per = max(base[1], depths[0]), lambda r, key, k: (x := summed(r, key, k))[3] / x[2]
    drifted = ', '.join(f'{key} {per(found, key, k):.3f}' for key in ('sd sampled', 'ecsv', 'spot'))
    yield Finding('budget drift: 1 - what ecsv-spot spends more at the depth of tuned sd', *bootstrap(
        found, lambda r: 2 - per(r, 'spot', k) / per(r, *base), 200), 0.99,
        f'depth {k}; positions a token: {base[0]} {per(found, *base):.3f}, {drifted}; n = {len(found)}',
        'A cap of positions a cycle is none a token: where less is kept, a token costs more')
    z, tokens = torch.randn(4, 4, network('target')[0].vocab), torch.arange(16).view(4, 4)
    yield Finding('1 - cost of the vote of four branches of four over a target pass', *bootstrap(
        own_cost(lambda: Ecsv().fuse(Ballot.of(tokens, z, 0))), lambda t: 1 - median(t), 200), 0.95,
        'time; n = 50', 'Some fifteen tensor operations beside the three hundred of so small a target')
    few = [row for row in found if spots.keys() <= row.keys()]
    sums = [(key, at_budget(few, key, base)) for key in ('sd greedy', 'ecsv', *spots)]
    show([f'real cycles, n = {len(few)}', 'kept a cycle', 'tokens a target pass', 'positions a token'],
         [(key, x[0] / x[1], x[2] / x[4], x[3] / x[2]) for key, x in sums])


def real_run(session, ids, method, temperature, seed):
    """The sums of a real run, as summed has them; then its measured seconds, the target's nats of its text,
    how many draft tokens were judged, and in how many cycles 0, 1, ... DEPTHS[-1] were kept.
    """
    cycles = written(session, ids, method, temperature, seed)
    passes, positions = (sum(c.passes['target/full'][i] for c in cycles) for i in (0, 1))
    tokens, kept = tokens_of(cycles), [c.accepted for c in cycles]
    rows = session.target.read(ids + tokens[:-1], [], session.target.model.full, len(tokens))
    return [sum(kept), len(cycles), len(tokens), positions, passes, sum(c.seconds for c in cycles),
            -float(loglikes(rows, tokens).sum()), sum(len(c.judged) for c in cycles),
            *(kept.count(k) for k in (0, *DEPTHS))]


def sampling(n):
    """What needs real runs: the vote above temperature 0, several branches verified in turn, a second draft;
    and greedy ones for the answers.
    """
    with tempfile.TemporaryDirectory() as home:
        rounded, mid = File(home) / 'draft', HOME / 'mid'
        write_copy(HOME / 'draft', rounded)
        two = lambda folder: partial(METHODS['ecsv-two'], second=str(folder))
        methods = {name: METHODS[name] for name in ('ecsv', 'sd-multi', 'sd-tree')}
        methods['ecsv, 4-bit second draft'] = two(rounded)
        if (mid / 'config.json').exists():
            methods['ecsv, mid as second draft'] = two(mid)
        for T in (0.0, 1.0):
            yield from at_temperature(T, methods, n)
    won, decode = [], network('target')[1].decode
    for row, ids in (pair for f in FAMILIES[:2] for pair in prompts(f, n)):
        texts = [decode(tokens_of(written(begin(ids), ids, METHODS[name]()))) for name in ('ecsv-lite', 'ar')]
        won.append(tasks.grade(row, texts[0]) - tasks.grade(row, texts[1]))
    yield Finding('E4 share of right answers more than plain decoding, math and table', *bootstrap(
        won, mean, 200), 0.01, f'n = {len(won)}', 'ECSV is lossless: the text is the same')


def at_temperature(T, methods, n):
    """Findings and a table of real runs beside sd with gamma 4, in turn on each text."""
    rows, base, depths = [], ('sd', 4), range(3, 6)
    for family in FAMILIES[:3]:
        for seed, (_, ids) in enumerate(tqdm(prompts(family, n), desc=f'temperature {T:g}, {family}')):
            s = begin(ids)
            rows.append(dict(sd={4: real_run(s, ids, Exact(4), T, seed)}) | {
                name: {k: real_run(s, ids, kind(k), T, seed) for k in depths}
                for name, kind in methods.items()})
    each = {name: at_budget(rows, name, base) for name in ('sd', *methods)}
    for name in methods:
        other, why = 'sd', NOISY_ARGMAX + ', and above temperature 0 a match is rarer than min(p, q)'
        if name in ('sd-multi', 'sd-tree'):
            why = 'The positions of another pass would have paid for a longer branch'
        elif name != 'ecsv':
            other, why = 'ecsv', 'What the second draft gets right the first gets right too'
        apart = within(rows, (name, other), base)[0]
        yield Finding(f'{name}, over {other} at equal positions a token, temperature {T:g}', *bootstrap(
            rows, lambda r: gain(r, name, other, base), 200), MORE,
            f'kept a cycle; positions within {1 - apart:.1%}; n = {len(rows)}', why)
    pace = lambda x: x[2] / x[5]
    show([f'real runs, temperature {T:g}', 'kept a cycle', 'tokens a target pass', 'positions a token',
          'tokens a second over sd, measured', "the target's perplexity of the text"],
         [(name, x[0] / x[1], x[2] / x[4], x[3] / x[2], pace(x) / pace(each['sd']), math.exp(x[6] / x[2]))
          for name, x in each.items()])
    lines = []
    for name in each:
        four, rates = summed(rows, name, 4), sorted(r[name][4][0] / max(1, r[name][4][7]) for r in rows)
        lines.append((name, *(x / four[1] for x in four[8:13]), rates[len(rates) // 10], median(rates),
                      rates[-1 - len(rates) // 10]))
    show([f'depth 4, temperature {T:g}: share of cycles that keep', *map(str, range(5)),
          'acceptance rate of a text: 10 %', '50 %', '90 %'], lines)


# ---------------------------------------------------------------------------------------------------- VIA-SD

VIA = dict(math={}, table=dict(high=20, columns=(1, 4)), code={}, story={}, qa={}, translate={}, summary={})
PAIRS = [(k / 10, e / 10) for k in (1, 3, 5, 7, 8, 9, 10) for e in (0, 1, 3, 5, 6, 8, 9) if e <= k]
RIVALS = dict(ar=METHODS['ar']) | {name: partial(METHODS[name], stages.GAMMA) for name in (
    'sd', 'cascade', 'cascade-opt', 'cascade-tokenv3', 'via', 'via-tiers')}
RIVALS |= {'via, two-level exact': partial(METHODS['via'], stages.GAMMA, gate='two_level_exact'),
           'via, draft alone': partial(METHODS['via'], stages.GAMMA, keep=0.0, escalate=0.0)}
SELF, *TUNED = 'sd, draft self', 'via, tuned', 'sd, lenient'     # slim drafts; see via_tuned for the others
CONTROLS = 'via, random masks', 'via, evenly spaced', 'via-mid', 'via-up'   # the second table's, beside via
THIRD = dict(       # models for the middle: what they are, the notes' memory and speed beside slim
    mid=('a model of its own', 1.38 / 1.04, 2.32 / 2.08), up=('an upscaled drafter', MORE, MORE))
FREE = range(2, 18, 2)      # attention sublayers of the free layers: the first and the last always run


def skipping(units):
    """The sublayers of these free layers, as a mask."""
    return tuple(j for u in sorted(units) for j in (FREE[u], FREE[u] + 1))


def evenly(k):
    """The mask of k free layers, evenly spaced."""
    return skipping(int((i + 0.5) * len(FREE) / k) for i in range(k))


def single(x):
    """A figure without an interval: nothing of it was sampled."""
    return x, x, x


def over(runs, a, b, by, per='tokens'):
    """The first rival's speed over the second's, tokens for each second or full pass's cost (`work`)."""
    column = lambda name, key: sum(r[name][key] if key != 'tokens' else len(r[name][key]) for r in runs)
    return column(a, per) / column(a, by) / (column(b, per) / column(b, by))


def rejected(runs, name):
    """The share of judged draft tokens that were rejected."""
    return 1 - sum(r[name]['accepted'] for r in runs) / sum(r[name]['judged'] for r in runs)


def right_texts(runs, name):
    """The share of graded texts that are right."""
    return mean([r[name]['right'] for r in runs if r[name]['right'] is not None] or [nan])


def like_plain(runs, name):
    """The mean share of places with plain decoding's token."""
    return mean([sum(x == y for x, y in zip(a, b)) / max(len(a), len(b))
                 for a, b in ((r[name]['tokens'], r['ar']['tokens']) for r in runs)])


def via_rivals(mask, chance, third, pair, least):
    """What stages.contest takes; chance: random masks; third: {role: Reader}; pair, least: see via_tuned."""
    via, lenient = METHODS['via'], METHODS['cascade-tokenv3']               # greedy, the latter is lenient sd
    rivals = {name: (make, [mask], {}) for name, make in RIVALS.items()}
    rivals |= {CONTROLS[0]: (via, chance, {}), CONTROLS[1]: (via, [evenly(len(mask) // 2)], {})}
    rivals |= {f'via-{role}': (METHODS['via-mid'], [mask], dict(mid=x)) for role, x in third.items()}
    return rivals | {
        SELF: (RIVALS['sd'], [mask], dict(draft=None)),
        TUNED[0]: (partial(via, stages.GAMMA, keep=pair[0], escalate=pair[1]), [mask], {}),
        TUNED[1]: (partial(lenient, stages.GAMMA, lam=1 - least), [mask], {})}


def per_token(runs, name, *paths):
    """'calls, positions' a token of the rival's passes whose path names one of these."""
    count = lambda key: sum(n for r in runs for path, n in r[name][key].items()
                            if any(x in path for x in paths))
    tokens = sum(len(r[name]['tokens']) for r in runs)
    return f'{count("passes") / tokens:.2f}, {count("positions") / tokens:.2f}'


def via_tables(engine, runs, rivals):
    """The notes' two tables: of methods, by task; of what each costs, wherever its middle stage is from."""
    names, n = [*runs[0]], len(runs) // len(VIA)
    parts = {task: runs[i * n:(i + 1) * n] for i, task in enumerate(VIA)}
    show(['rejection rate, modelled speed over ar, right', *parts, 'measured speed'],
         [[name, *(f'{rejected(x, name):.2f}, {over(x, name, "ar", "work"):.2f}, '
                   f'{right_texts(x, name):.2f}'.replace(', nan', '') for x in parts.values()),
           over(runs, name, 'ar', 'seconds')] for name in names if name not in ('ar', *CONTROLS)])
    peak = lambda others: stages.memory(*filter(None, (engine.readers | others).values()))
    show(['method', 'peak memory: weights and caches, over those of sd', 'modelled speed over ar',
          'the same, compute-bound', 'measured', 'rejection rate', 'right', 'tokens as ar',
          'draft calls, positions a token', 'slim or middle', 'target'],
         [[name, peak(rivals[name][2]) / peak({}),
           *(over(runs, name, 'ar', by) for by in ('work', 'compute', 'seconds')), rejected(runs, name),
           right_texts(runs, name), like_plain(runs, name),
           *(per_token(runs, name, *x) for x in (['draft/'], ['slim', 'mid/'], ['target/full']))]
          for name in names if name != 'ar'])


def via_runs(runs):
    """The claims of the notes' tables, on real runs."""
    found = lambda claim, line, figure, *said: Finding(claim, *bootstrap(runs, figure, 200), line, *said)
    cascades = [name for name in RIVALS if name.startswith('cascade')]
    yield found('rejection rate of sd minus that of via', 0.10,
                lambda x: rejected(x, 'sd') - rejected(x, 'via'), 'a lenient gate rejects less by definition')
    yield found('rejection rate of the best cascade minus that of via', 0.10,
                lambda x: min(rejected(x, name) for name in cascades) - rejected(x, 'via'))
    for by, words in (('seconds', 'measured'), ('work', 'modelled')):
        yield found(f'{words} speed of via over plain decoding', 2.5, lambda x: over(x, 'via', 'ar', by))
        yield found(f'{words} speed of via over sd', 1.10, lambda x: over(x, 'via', 'sd', by))
        yield found(f'{words} speed of via over the fastest cascade', 1.10,
                    lambda x: min(over(x, 'via', name, by) for name in cascades))
    yield found('modelled speed of via over sd, compute-bound: a pass costs its positions', MORE,
                lambda x: over(x, 'via', 'sd', 'compute'), 'target calls, positions a token: '
                f'{per_token(runs, "via", "target/full")}; of sd {per_token(runs, "sd", "target/full")}',
                'what slim kept the target reads later all the same, as the lag')
    graded = [r for r in runs if r['ar']['right'] is not None]
    lost = lambda a, b: lambda x: mean([r[a]['right'] - r[b]['right'] for r in x])
    yield Finding('share of right texts, via minus plain decoding', *bootstrap(
        graded, lost('via', 'ar'), 200), -0.01, f'{right_texts(runs, "ar"):.3f} of {len(graded)} right; '
                  f'{like_plain(runs, "via"):.1%} of tokens as plain decoding\'s')
    speeds = [over(runs, name, 'ar', 'work') for name in ('sd', 'via', 'via-tiers')]
    yield found('modelled speed of 3 stages over the better of 2 and 4', 1.0,
                lambda x: min(over(x, 'via', name, 'work') for name in ('sd', 'via-tiers')),
                '2, 3, 4 stages of nested masks: ' + ', '.join(f'{x:.2f}' for x in speeds))
    yield found('modelled speed with the mask found over random masks', 2.32 / 1.62,
                lambda x: over(x, 'via', 'via, random masks', 'work'))
    yield Finding('share of right texts, mask found minus random masks', *bootstrap(
        graded, lost('via', 'via, random masks'), 200), 0.32 - 0.29)
    yield found('F2 modelled speed with the mask found over evenly spaced layers', MORE,
                lambda x: over(x, 'via', 'via, evenly spaced', 'work'))


def via_equal(runs, pair, least):
    """F1 end to end: via at the thresholds that via_tuned found on even texts, run on odd ones."""
    runs = runs[1::2]
    note = f'keep {pair[0]}, escalate {pair[1]}, lenient from {least}; right ' + ', '.join(
        f'{name}: {right_texts(runs, name):.3f}' for name in ('sd', *TUNED))
    for by, words in (('seconds', 'measured'), ('work', 'modelled')):
        yield Finding(f'F1 {words} speed of tuned via over the better of sd and lenient sd', *bootstrap(
            runs, lambda x: min(over(x, TUNED[0], name, by) for name in ('sd', TUNED[1])), 200), 1.05,
            note if by == 'seconds' else 'over each: ' + ', '.join(
                f'{over(runs, TUNED[0], name, by):.3f}' for name in ('sd', TUNED[1])))
    yield Finding("F1 share of tokens as plain decoding's, tuned via minus lenient sd", *bootstrap(
        runs, lambda x: like_plain(x, TUNED[0]) - like_plain(x, TUNED[1]), 200), -0.01,
        ', '.join(f'{name}: {like_plain(runs, name):.3f}' for name in TUNED))


def via_thirds(engine, runs, third, r):
    """F3: the slim path against models of their own in the middle; r: the Record with all of them."""
    pair = [engine.readers[role] for role in ('target', 'draft')]
    for role, (words, most, speed) in THIRD.items():
        if role not in third:
            print(f'no lab/models/{role}: the rows with {words} in the middle are left out '
                  f'(python -m lab.train {role})\n', flush=True)
            continue
        name, memory = f'via-{role}', stages.memory(*pair, third[role]) / stages.memory(*pair)
        yield Finding(f'memory with {words} over that with slim', *single(memory), most,
                      'weights and caches over those of sd; slim shares both with the target: 1.00')
        near = min(('slim', 'slim5'), key=lambda x: abs(r.cost[x] - r.cost[role]))      # of like cost
        for far in ('TV', 'R'):
            apart = lambda x, name: mean([d for b in itertools.chain(*x) for d in b.stages[name].apart[far]])
            yield Finding(f'F3 {far} to the target, {words} minus slim', *bootstrap(
                r.rows, lambda x: apart(x, role) - apart(x, near), 200), 1e-9,
                f'{apart(r.rows, role):.4f}, {apart(r.rows, near):.4f}; a pass reads {r.cost[role]:.2f}, '
                f'{r.cost[near]:.2f} of the target')
        yield Finding(f'modelled speed of via over the same with {words}', *bootstrap(
            runs, lambda x: over(x, 'via', name, 'work'), 200), speed,
            f'right {right_texts(runs, "via"):.3f} and {right_texts(runs, name):.3f}')


def via_search(windows, found, section, saved):
    """F2: the mask that train_mask.py found against all masks, even spacing and a search without Bayes.

    section: of the calibration file; saved: seconds that via saves on a text over sd.
    """
    k = len(found) // 2
    every = {skipping(z): windows.cost(skipping(z)) for z in itertools.combinations(range(len(FREE)), k)}
    cost, least = every[found], min(every.values())
    yield Finding('F2 cost of evenly spaced over the mask found', *single(every[evenly(k)] / cost), 1.0,
                  f'R a token; random masks on average {mean(list(every.values())) / cost:.2f}')
    match = min(every, key=lambda z: windows.cost(z, 'argmax'))
    yield Finding("F2 cost of the mask that SWIFT's objective finds over the mask found",
                  *single(every[match] / cost), 1.0, 'R a token; likeliest tokens alike: ' + ', '.join(
                      f'{1 - windows.cost(mask, "argmax"):.1%}' for mask in (match, found)))
    yield Finding(f'F2 cost of the best of all {len(every)} masks over the mask found', *single(least / cost),
                  1 / 1.05, 'within 5 % of the optimum')
    typical = {}                                        # the texts go through the tasks in turn
    for i, task in enumerate(tasks.TASKS):
        own = train_mask.Windows(windows.model, windows.texts[i::len(tasks.TASKS)], windows.W)
        typical[task] = sorted(map(own.cost, every))[len(every) // 2] / max(own.cost(found), 1e-9)
    yield Finding('one mask for all: cost of the median mask over the one found, worst task',
                  *single(min(typical.values())), 1,
                  ', '.join(f'{task} {x:.2g}' for task, x in typical.items()))
    spent, pays = section['seconds'], 'never'
    if saved > 0:
        pays = f'after {spent / saved:,.0f} texts'
    yield Finding("the search's cost: the notes' 18 minutes over its own", *single(18 * 60 / spent), 1,
                  f'{spent} s for {len(section["tried"])} masks, earned back {pays} ({saved:.4f} s a text)')
    few, results = train_mask.Windows(windows.model, windows.texts[:7], windows.W), []
    cost = functools.cache(lambda z: few.cost([j + FREE[0] for j in z]))
    for seed in range(5):
        results.append([])
        for period in ('2', '0'):
            tried, flags = {}, ['--period', period, '--seed', str(seed), '--patience', '999']
            train_mask.search(cost, 2 * len(FREE), len(FREE), train_mask.parse(flags), tried)
            results[-1].append(min(tried.values()))
    gain = lambda rows: mean([b for _, b in rows]) / mean([a for a, _ in rows])
    yield Finding('F2 cost by random search over Bayesian, 60 evaluations', *bootstrap(results, gain), 1.0,
                  f'{len(FREE)} of {2 * len(FREE)} sublayers, 5 seeds')


def best_masks(windows):
    """{layers skipped: the mask of least R among 20 tried}, for the sweep of skip ratios."""
    sweep = {}
    for k in range(1, len(FREE) + 1):
        train_mask.search(lambda z: windows.cost(skipping(z)), len(FREE), k,
                          train_mask.parse(['--evaluations', '20']), tried := {})
        sweep[k] = skipping(min(tried, key=tried.get))
    return sweep


def random_masks(k, n=20):
    """n different masks of k layers, by lot."""
    g, masks = torch.Generator().manual_seed(0), {}
    while len(masks) < n:
        masks[train_mask.propose(masks, len(FREE), k, g, False)] = 0.0
    return [skipping(z) for z in masks]


def via_tuned(r):
    """({(keep, escalate): rows of via}, {ratio: rows of lenient sd}, the pairs of at most 1 % wrong tokens on
    even texts, the fastest of these there, the lowest ratio that is wrong no oftener), all replayed.
    """
    swept = {pair: r.sums('slim', *pair) for pair in [*PAIRS, (2.0, 2.0)]}      # the last: the target's text
    mild = {t / 100: r.sums(None, t / 100) for t in range(1, 101)}
    amiss = lambda rows: stages.wrong(rows[::2])
    fair = [pair for pair, rows in swept.items() if amiss(rows) <= 0.01]
    pair = max(fair, key=lambda x: stages.pace(swept[x][::2]))
    return swept, mild, fair, pair, min(t for t, rows in mild.items() if amiss(rows) <= amiss(swept[pair]))


def via_thresholds(r, swept, mild, fair, pair, least):
    """The sweep of thresholds; F1, F5: what via_tuned chose on even texts, replayed on odd ones."""
    even, odd, pace, wrong = slice(0, None, 2), slice(1, None, 2), stages.pace, stages.wrong
    sd = mild[1.0]
    late = sorted({e for _, e in PAIRS})
    show(['keep', *(f'escalate {e}' for e in late)],
         [[k, *(f'{pace(swept[k, e]) / pace(sd):.2f} ({wrong(swept[k, e]):.1%})' if (k, e) in swept else ''
                for e in late)] for k in sorted({k for k, _ in PAIRS})])
    three = [swept[pair] for pair in ((0.5, 0.3), (0.8, 0.6), (0.3, 0.1))]
    leads = lambda x: pace([a for a, _, _ in x]) / max(pace([b[i] for _, *b in x]) for i in (0, 1))
    yield Finding('modelled speed at 0.5, 0.3 over 0.8, 0.6 (conservative) and 0.3, 0.1 (aggressive)',
                  *bootstrap([*zip(*three)], leads, 200), 1.0, 'over sd (wrong tokens): ' + ', '.join(
                      f'{pace(x) / pace(sd):.3f} ({wrong(x):.2%})' for x in three))
    yield Finding('F1 replayed speed over the better of sd and lenient sd at equal wrong tokens', *bootstrap(
        [*zip(swept[pair][odd], sd[odd], mild[least][odd])], leads, 200), 1.05,
        f'keep {pair[0]}, escalate {pair[1]}: {wrong(swept[pair][odd]):.2%} wrong; lenient from {least}: '
        f'{wrong(mild[least][odd]):.2%}')
    asked = lambda x: stages.ratio(x, 3, 4)
    pair = min(fair, key=lambda x: asked(swept[x][even]))
    yield Finding('F5 break-even minus full passes a cycle', *bootstrap(
        swept[pair][odd], lambda x: 1 - r.cost['slim'] - asked(x), 200), 1e-9,
        f'keep {pair[0]}, escalate {pair[1]}; a slim pass costs {r.cost["slim"]:.2f}')


def via_geometry(r):
    """The notes' argument: by TV no stage shortens the way from q to p, by KL one can. Does it then pay?"""
    gains = lambda x, name: [d for b in itertools.chain(*x) for d in b.stages['slim'].gains[name]]
    above = lambda name: mean([d > 1e-6 for d in gains(r.rows, name)])
    for name, words in (('KL', 'KL'), ('R', 'R, alpha = beta = 1/2'), ('strict', 'R, alpha 0, beta 1')):
        yield Finding(f'mean Delta by {words}', *bootstrap(r.rows, lambda x: mean(gains(x, name)), 200), 1e-9,
                      f'nats; above 0 at {above(name):.1%} of places, by TV at {above("TV"):.1%}')
    names, paces = ('KL', 'R', 'strict', 'TV'), lambda done: [tokens / cost for tokens, cost, *_ in done]
    paid = [v > w for v, w in zip(paces(r.sums('slim', 0.5, 0.3)), paces(r.sums(None, 1.0)))]
    texts = [(*(mean(gains([blocks], name)) for name in names), float(p)) for blocks, p in zip(r.rows, paid)]

    def area(x, i):
        x = torch.tensor(x)
        return auroc(x[:, i], x[:, -1] > 0)
    others = ', '.join(f'{name} {area(texts, i):.2f}' for i, name in enumerate(names) if i)
    yield Finding('AUROC of Delta by KL for the texts where slim pays', *bootstrap(
        texts, lambda x: area(x, 0), 200), 0.65, f'it pays in {mean(paid):.1%}, modelled; by {others}')


def via_blend(r, keep=0.5, escalate=0.3):
    """The blended law pi: delta 1 and 2, the shares that the gates hand on, and what pi then foretells."""
    texts = [torch.tensor([place for b in blocks for place in zip(
        b.stages['slim'].ratios, [p == 1 for p in b.p], b.stages['slim'].same)]) for blocks in r.rows]

    def deltas(x):
        ratios = torch.cat(x)[:, 0]
        late = float((ratios < escalate).float().mean())
        return float(((ratios >= escalate) & (ratios < keep)).float().mean()) / max(1 - late, 1e-9), late

    def selected(x):
        """How much oftener the token is the target's own than under pi, whose hand-over is blind."""
        ratios, q, s = torch.cat(x).T
        hits = torch.where(ratios < escalate, 1.0, torch.where(ratios < keep, s, q))
        return float(hits.mean() - blend(q.mean(), s.mean(), torch.tensor(1.0), *deltas(x)))
    early, late = deltas(texts)
    yield Finding('hand-over: the early share (to slim) minus the late one (to the target)', *bootstrap(
        texts, lambda x: deltas(x)[0] - deltas(x)[1], 200), 1e-9,
        f'delta 1 {early:.3f}, delta 2 {late:.3f}; the notes have the first much larger')
    yield Finding("share of the target's own tokens minus that under the blended law pi", *bootstrap(
        texts, selected, 200), 1e-9, 'above 0, the gates hand on where it is needed')


def via_masks(r, sweep, chance, n):
    """F4: is there a best skip ratio inside? F6: does Delta foretell which of 20 masks is fast?

    r: the Record of every mask, by the mask; n: its texts a task.
    """
    pace, done = stages.pace, {mask: r.sums(mask, 0.5, 0.3) for mask in r.stages}
    rows = [*zip(*(done[m] for m in sweep.values()))]
    speeds = lambda x: [pace(column) for column in zip(*x)]
    inside = lambda x: max(speeds(x)[1:-1]) / max(speeds(x)[0], speeds(x)[-1])
    yield Finding('F4 modelled speed of the best inner skip ratio over the ends', *bootstrap(
        rows, inside, 200), MORE, 'layers skipped: tokens a full pass (wrong): ' + ', '.join(
                      f'{k}: {pace(done[m]):.2f} ({stages.wrong(done[m]):.1%})' for k, m in sweep.items()))
    blocks = list(itertools.chain(*r.rows))
    for form, words in (('R', '(0.5, 0.5)'), ('strict', '(0, 1)')):
        pairs = [(mean([d for b in blocks for d in b.stages[m].gains[form]]), pace(done[m])) for m in chance]
        yield Finding(f'F6 rank correlation of Delta{words} and modelled speed', *bootstrap(
            pairs, spearman, 200), 0.3, f'{len(pairs)} random masks; {sum(d > 0 for d, _ in pairs)} above 0')
    part = lambda m, i: pace(done[m][i * n:(i + 1) * n])
    own = {task: part(next(iter(done)), i) / max(part(m, i) for m in chance) for i, task in enumerate(VIA)}
    yield Finding("one mask for all: modelled speed over the fastest of 20 masks for a task, worst task",
                  *single(min(own.values())), 0.95, ', '.join(f'{task} {x:.2f}' for task, x in own.items()))


def spearman(pairs):
    """The correlation of the ranks of pairs [(a, b)]; 0 where one side does not vary."""
    a, b = (torch.tensor([sorted(x).index(v) for v in x]).double() for x in zip(*pairs))
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-12))


def via_gap(engine, texts, mask):
    """The gap between draft and target: what slim adds to sd with drafters of several sizes."""
    models, table, gains = engine.models, [], {}
    less = copy.copy(models['draft'])
    less.full = less.full.slim({2 * len(less.full.ffns) - 1})
    drafters = {'the draft without its last feed-forward': less, 'the draft': models['draft']}
    drafters |= {f'lab/models/{role}': network(role)[0] for role in ('up', 'mid') if there(role)}
    for name, drafter in drafters.items():
        r = stages.Record(engine, texts, dict(slim=mask), drafter)
        sd, via = r.sums(None, 1.0), r.sums('slim', 0.5, 0.3)
        gains[name] = list(zip(via, sd))
        table.append([name, r.draft / stages.GAMMA, stages.ratio(sd, 0, 4), stages.pace(sd), stages.pace(via),
                      stages.pace(via) / stages.pace(sd), stages.wrong(via)])
    show('drafter,size of the target,sd: tokens a cycle,tokens a pass,via: the same,over sd,wrong'.split(','),
         table)
    gain = lambda x: stages.pace([a for a, _ in x]) / stages.pace([b for _, b in x])
    wide = lambda x: gain([a for a, _ in x]) / gain([b for _, b in x])
    small, *_, large = [*gains][1:] if len(gains) > 2 else gains        # the first was not trained as it is
    yield Finding(f'gain of via over sd with {small} over that with {large}', *bootstrap(
        list(zip(gains[small], gains[large])), wide, 200), MORE, 'modelled; the notes: wide gaps gain most')


def there(role):
    """Whether lab/models has this model."""
    return (HOME / role / 'config.json').exists()


def via(n):
    """VIA-SD: METHODS 5.7 F1 to F6 and the paper's tables, greedy, n texts a task; tables of VIA's size."""
    flags = ['--prompt', '-', '--compare', 'via,via-tiers', '--gamma', str(stages.GAMMA)]
    engine = specmini.Engine(specmini.parse(flags))
    rows = [row for task, knobs in VIA.items() for row in held_out(task, n, **knobs)]
    prompts = [engine.tokenizer.encode(row['prompt']).ids for row in rows]
    engine.open(prompts)
    print(f'n = {n} texts of each of {", ".join(VIA)}, greedy; tables of at most {VIA["table"]["high"]} rows '
          f'and {VIA["table"]["columns"][1]} columns, {max(map(len, prompts))} tokens a prompt at most. '
          '"Modelled": a pass costs the weight bytes that it reads, nothing else does.\n', flush=True)
    section = engine.calibration['mask']
    mask, chance = tuple(section['skip']), random_masks(len(section['skip']) // 2)
    capacity = engine.readers['target'].capacity
    third = {role: Reader(network(role)[0], capacity) for role in THIRD if there(role)}
    texts = [(ids, tokens_of(engine.write(ids, 'sd')[1])) for ids in tqdm(prompts, disable=None)]   # as ar's
    windows = train_mask.Windows(engine.models['target'], calibration_texts(
        engine.tokenizer, train_mask.parse([])), 32)
    sweep, some = best_masks(windows), max(1, n // 5)
    few = [text for i, text in enumerate(texts) if i % n < some]
    r = stages.Record(engine, texts, dict(slim=mask, slim5=sweep[5]) | third)
    every = stages.Record(engine, few, {m: m for m in dict.fromkeys([mask, *sweep.values(), *chance])})
    *swept, pair, least = via_tuned(r)
    rivals = via_rivals(mask, chance, third, pair, least)
    runs = stages.contest(engine, rows, prompts, rivals)
    via_tables(engine, runs, rivals)
    yield from via_runs(runs)
    yield from via_equal(runs, pair, least)
    yield from via_thirds(engine, runs, third, r)
    saved = mean([r['sd']['seconds'] - r['via']['seconds'] for r in runs])
    yield from via_search(windows, mask, section, saved)
    yield from via_thresholds(r, *swept, pair, least)
    yield from via_masks(every, sweep, chance, some)
    yield from via_geometry(r)
    yield from via_blend(r)
    yield from via_gap(engine, few, mask)


# ------------------------------------------------------------------------------------------------- SpecGuard

SHORT = 200         # tokens of a prompt at most: tables go on to 1,700, nearly half are shorter
SEEDS = 3           # runs of `notes`, each with other draws of the draft
FULL, PART = 200, 50            # problems of each task that are run end to end: what is judged, what is shown
DRAFT = Unseen(k=1, draft_temperature=0.0, tau=-inf)      # the draft's own text, as greedy as the target's
NOTES = [           # the notes' tables: table, setting, their accuracy (points), their speed, our change
    ('components (MATH, GSM8K)', 'LPBV only', '+1.7, +1.2', 'latency 0.95', dict(beta=1.0)),
    ('components (MATH, GSM8K)', 'ABGV only', '+2.1, +1.9', 'latency 0.96', dict(beta=0.0)),
    ('components (MATH, GSM8K)', 'both', '+4.7, +3.6', 'latency 0.89', {}),
    *(('k', k, gain, speed, dict(pick=k)) for k, gain, speed in (
        (1, 'as sd', '-'), (2, '+0.5', '-'), (4, '+2.0', '-'), (8, '+2.2', '2 x computation'))),
    *(('tau', str(tau), gain, speed, dict(tau=tau)) for tau, gain, speed in (
        (0.9, '+4.2', '1.02'), (0.7, '+3.8', '1.08'), (0.5, '+3.6', '1.11'), (0.3, '+2.1', '1.14'),
        (0.1, '+0.8', '1.15'))),
    *(('beta', str(beta), gain, speed, dict(beta=beta)) for beta, gain, speed in (
        (0.0, '+2.8', '1.10'), (0.3, '+3.2', '1.11'), (0.5, '+3.6', '1.11'), (0.7, '+3.1', '1.10'),
        (1.0, '+2.2', '1.08'))),
    *(('layers, of the target', f'last {n}', gain, speed, dict(rollout=Rollout('target', 'last', n)))
      for n, gain, speed in ((1, '-1.2', '-'), (2, '-0.5', '-'), (3, 'their default', '-'),
                             (6, '+0.1', '3 x memory'))),
    *(('layers, of the target', where, '-', '-', dict(rollout=Rollout('target', where.split()[0], 3)))
      for where in ('first 3', 'middle 3', 'all')),
    ('layers, of the draft', 'last 1', '-', '-', dict(rollout=DRAFTS._replace(n=1))),
    *(('rollout', f'{name} {value}', '-', '-', dict(rollout=DRAFTS._replace(**{name: value})))
      for name, value in (('sparsify', 0.0), ('sparsify', 0.05), ('residual', 0.5), ('row', 'predicting'))),
    ('selector', 'the commonest of 4', '-', '-', dict(pick='common')),
    ('combine', 'and', '-', '-', dict(combine='and')), ('scale', 'rank', '-', '-', dict(scale='rank'))]


def show(head, rows):
    """Prints a table; numbers with three digits."""
    text = lambda x: f'{x:.3f}' if isinstance(x, float) else str(x)
    line = lambda cells: print('|', ' | '.join(map(text, cells)), '|')
    line(head)
    line(['---'] * len(head))
    for cells in rows:
        line(cells)
    print(flush=True)


def short_rows(tokenizer, task, n):
    """n held-out rows whose prompt has at most SHORT tokens."""
    rows = tasks.rows(task, 11)
    return list(itertools.islice((r for r in rows if len(tokenizer.encode(r['prompt']).ids) <= SHORT), n))


def step_signals(test, scales):
    """How well each signal tells right steps from wrong ones, also among steps of equal length."""
    for task, problems in test.items():
        rows = judged(problems, scales)
        right, length = [r[3] for r in rows], [r[4] for r in rows]
        target = mean([own['right'] for p in problems for _, own in p])
        for i, name in enumerate(('score', 'L', 'G')):
            equal = {}
            for r in rows:
                equal.setdefault(r[4], []).append((r[i], r[3]))
            mixed = [g for g in equal.values() if len({y for _, y in g}) == 2]
            pairs = [(sum(y for _, y in g) * sum(not y for _, y in g), roc_area(*zip(*g))) for g in mixed]
            matched = sum(w * a for w, a in pairs) / sum(w for w, _ in pairs) if pairs else nan
            scores = [r[i] for r in rows]
            yield (task, len(rows), mean(right), target, name, roc_area(scores, right), matched,
                   average_precision([-x for x in scores], [not y for y in right]),
                   spearman(list(zip(scores, length))))


def step_ablations(test, scales, sizes, exact):
    """The notes' tables beside the record's: points of accuracy over exact decoding, target steps, speeds.

    sizes: weight bytes of a pass by model; exact: by task, those that exact decoding reads for a token, and
    that times positions: by the one the speed is modelled if memory-bound, by the other if compute-bound.
    """
    points = lambda rows: 100 * mean([r.right for r in rows])
    base = {task: points(outcomes(p, scales, USUAL | dict(tau=inf))) for task, p in test.items()}
    for table, setting, accuracy, speed, change in NOTES:
        got = {task: outcomes(p, scales, USUAL | change) for task, p in test.items()}
        every = [(t, r) for t, rows in got.items() for r in rows]
        read = sum(r.drafts * sizes['draft'] + r.targets * sizes['target'] for _, r in every)
        computed = sum(r.drafted * sizes['draft'] + r.verified * sizes['target'] for _, r in every)
        yield (table, setting, accuracy, speed, *(f'{points(got[t]) - base[t]:+.1f}' for t in got),
               mean([r.wrote for _, r in every]), sum(exact[t][0] * r.tokens for t, r in every) / read,
               sum(exact[t][1] * r.tokens for t, r in every) / computed)


def step_transfer(tune, test, scales):
    """What beta and tau chosen on one task (kept steps 95 % right, or nearest to it) are worth on another."""
    for source, problems in tune.items():
        curve = gate_curve([r[1:4] for r in judged(problems, scales)], scales[DRAFTS][0])
        best = choose_gate(curve, 0.95)
        for task, others in test.items():
            rows = outcomes(others, scales, USUAL | best)
            yield (source, best['beta'], best['tau'], best['right'], task, mean([r.right for r in rows]),
                   mean([r.wrote for r in rows]))


def step_run(engine, name, method, rows, seed=0):
    """One dict a row: task, right, each step right, cycles, weight bytes read and bytes times positions.

    Both count the reward model of rsd and process-best-of-n: a pass of 1 M parameters in fp32 for each step,
    over all that the draft wrote.
    """
    out, size = [], {role: r.model.read_bytes(r.model.full) for role, r in engine.readers.items()}
    for i, row in enumerate(tqdm(rows, desc=name, file=sys.stderr, disable=None)):
        ids, checks = engine.tokenizer.encode(row['prompt']).ids, []
        session = start(engine, row, ids, 'ar' if name == 'ar' else 'sd', i + seed * len(rows))
        session.calibration = read_calibration(HOME / 'target', HOME / 'draft', ['signals'])
        check = session.checker
        session.checker = lambda ids: checks.append(1) or check(ids)
        cycles = list(specmini.decode(session, method))
        spent = [(size[path.split('/')[0]], *x[:2]) for c in cycles for path, x in c.passes.items()]
        if name in ('rsd', 'process-best-of-n'):
            spent.append((4_000_000, len(checks), sum(c.passes['draft/full'][1] for c in cycles)))
        text = engine.tokenizer.decode(session.tokens[len(ids):])
        right = bool(tasks.grade(row, text))
        steps = tasks.steps_right(row, text) if 'Answer:' in row['solution'] else [right]
        out.append(dict(task=row['task'], right=right, steps=steps, cycles=cycles,
                        read=sum(w * n for w, n, _ in spent), compute=sum(w * T for w, _, T in spent)))
    return out


def step_coin(engine, rows, runs):
    """The run of a gate by coin that keeps, task by task, as many steps as `notes` does."""
    found = {}
    for task in dict.fromkeys(row['task'] for row in rows):
        steps = [c for seed in range(SEEDS) for r in runs[f'notes, seed {seed}'] if r['task'] == task
                 for c in r['cycles']]
        coin = METHODS['random-gate'](rate=mean([c.labels[0] == 'draft' for c in steps]))
        some = [row for row in rows if row['task'] == task]
        found[task] = iter(step_run(engine, f'random-gate, {task}', coin, some))
    return [next(found[row['task']]) for row in rows]


def step_contest(engine, rows):
    """{name: run}: presets, gates and rivals end to end, on rows of the tasks in turn.

    What is no preset, no gate, not rsd and not k = 1 has the first PART rows of each task alone.
    """
    sg = METHODS['specguard']
    chosen = read_calibration(HOME / 'target', HOME / 'draft', ['signals'])['signals']
    runs = {'sd': step_run(engine, 'sd', Exact(), rows)}
    for seed in range(SEEDS):
        runs[f'notes, seed {seed}'] = step_run(engine, f'notes, seed {seed}', sg(), rows, seed)
    runs['random-gate'] = step_coin(engine, rows, runs)
    gates = {
        'paper': sg(preset='paper'), 'greedy': sg(preset='greedy'), 'k = 1': sg(k=1),
        'oracle-gate': METHODS['oracle-gate'](), 'rsd': METHODS['rsd']()}
    shown = {
        'LPBV only': sg(beta=1.0), 'ABGV only': sg(beta=0.0),
        'calibrated': sg(beta=chosen['beta'], tau=chosen['tau']), 'target signals': sg(signals='target'),
        'selector only': Unseen(tau=-inf), 'draft only': DRAFT, 'ar': METHODS['ar'](),
        **{name: METHODS[name]() for name in
           ('specreason', 'majority', 'best-of-n', 'process-best-of-n', 'beam', 'specguard-pooled')}}
    runs |= {name: step_run(engine, name, method, rows) for name, method in gates.items()}
    return runs | {name: step_run(engine, name, method, rows[:3 * PART]) for name, method in shown.items()}


def step_contest_table(runs, names):
    """Right by task, all beside exact decoding's, shares of steps, seconds a text, costs over sd's.

    Of the steps: those right of all that were written, those of the target, those with a signal clipped.
    """
    over = lambda pairs: 100 * mean([a['right'] - b['right'] for a, b in pairs])
    for name, rs in runs.items():
        cycles = [c for r in rs for c in r['cycles']]
        wrote = '-' if name in ('ar', 'sd') else mean([c.labels[0] == 'target' for c in cycles])
        scored = [j['clipped'] for c in cycles for j in c.judged[:1] if j.get('grounding') is not None]
        gain, low, high = bootstrap(list(zip(rs, runs['sd'])), over, 500)
        ratio = lambda key: sum(r[key] for r in rs) / sum(r[key] for r in runs['sd'][:len(rs)])
        yield (name, len(rs), *(mean([r['right'] for r in rs if r['task'] == t]) for t in names),
               f'{gain:+.1f} ({low:+.1f} to {high:+.1f})', mean(sum((r['steps'] for r in rs), [])), wrote,
               mean(scored) if scored else '-', sum(c.seconds for c in cycles) / len(rs), ratio('read'),
               ratio('compute'))


PARTS = 'draft', 'selection', 'reading again', 'with rollout', 'scoring', 'target', 'target pass'


def step_parts(session):
    """({part: seconds}, tokens of the draft's step, of the target's): each part of one step done once."""
    method, moment = SpecGuard(), time.perf_counter
    times = [moment()]
    found = write_steps(session, method, session.draft, method.k)
    times.append(moment())
    draft, reader = method.choose(session, found), session.draft
    times.append(moment())
    reader.read(session.tokens, draft.tokens, reader.model.full, T := len(draft.tokens))
    times.append(moment())
    seen = method.score(session, draft)
    times.append(moment())
    method.judge(session, draft, seen)
    times.append(moment())
    own = method.write(session)
    times.append(moment())
    session.target.read(session.tokens, draft.tokens, session.target.model.full, T + 1)
    times.append(moment())
    return dict(zip(PARTS, (b - a for a, b in zip(times, times[1:])))), T, len(own)


def step_clock(engine, rows):
    """[step_parts of the first step of a row, the least of 5 turns, its last sizes, cached tokens]."""
    out = []
    for row in rows:
        ids = engine.tokenizer.encode(row['prompt']).ids
        session = start(engine, row, ids)
        session.calibration = read_calibration(HOME / 'target', HOME / 'draft', ['signals'])
        turns = [step_parts(session) for _ in range(5)]
        out.append(({part: min(t[0][part] for t in turns) for part in PARTS}, *turns[-1][1:], len(ids)))
    return out


def overhead(part, clock):
    """The target's seconds for a part over those of selection, the pass with rollout and scoring."""
    extra = sum(parts[x] for parts, *_ in clock for x in ('selection', 'with rollout', 'scoring'))
    return sum(parts[part] for parts, *_ in clock) / extra


def step_costs(clock, sizes, wrote):
    """A step's parts: the notes' ms a token, measured ms; measured and modelled over the target's own step.

    sizes: weight bytes of a pass by model; wrote: share of steps that the target writes.
    """
    ms = {part: 1000 * mean([parts[part] for parts, *_ in clock]) for part in PARTS}
    T, N = (mean([row[i] for row in clock]) for i in (1, 2))
    D, P = sizes['draft'], sizes['target']
    rows = [('draft, k candidates side by side', '8', ms['draft'], T * D),
            ('selection', '0.3', ms['selection'], 0.0),
            ('the draft reads the step again', '-', ms['reading again'], D),
            ('rollout on top of it', '0.4', ms['with rollout'] - ms['reading again'], 0.0),
            ('scoring', '0.2', ms['scoring'], 0.0),
            (f'target, where it writes ({wrote:.0%} of steps)', '-', wrote * ms['target'], wrote * N * P)]
    rows.append(('all of it', '1.5', sum(r[2] for r in rows), sum(r[3] for r in rows)))
    rows += [('the target alone', '5.0', ms['target'], N * P),
             ('one target pass', '0.5', ms['target pass'], P)]
    return [(part, notes, x, x / ms['target'], w / (N * P)) for part, notes, x, w in rows]


def held(work):
    """The most bytes that the tensors which some work on the CPU makes take at once."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        work()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return max(itertools.accumulate(event.self_cpu_memory_usage for event in events))


def step_memory(engine, clock):
    """MB that the rollout of one layer takes at its peak; the rows are thrown away before the next layer."""
    def mb(H, G, D, T, S):
        q, k, below = torch.randn(1, H, T, D), torch.randn(1, G, S, D), torch.zeros(1, T, S - T)
        mask = torch.zeros(T, S).masked_fill(torch.arange(S) > S - T + torch.arange(T)[:, None], -inf)
        return held(lambda: kernels.shade(kernels.attention_rows(q, k, mask, 0.01), below, 0.0)) / 2 ** 20
    c, (_, T, _, S) = engine.models['draft'].config, max(clock, key=lambda row: row[1] * (row[1] + row[3]))
    own = mb(c.num_attention_heads, c.num_key_value_heads, c.head_dim, T, S + T)
    return [('the largest of the steps timed', own),
            ('a step of 48 tokens behind 4,096 in a 7 B draft (32 heads)', mb(32, 32, 128, 48, 4144)),
            ('notes: last 3 layers, weights below 0.01 dropped', '50-100'),
            ('whole matrices of its last 3 layers, one array each', 3 * 32 * 4096 ** 2 * 4 / 2 ** 20)]


def advantage(judged_problems):
    """By how much the score's AUROC beats that of confidence alone."""
    rows = sum(judged_problems, [])
    right = [r[3] for r in rows]
    return roc_area([r[0] for r in rows], right) - roc_area([r[1] for r in rows], right)


def paired(runs, key, name):
    """[(task, `notes`' mean over the seeds, another run's)] of each row end to end."""
    seeds = [runs[f'notes, seed {seed}'] for seed in range(SEEDS)]
    return [(other['task'], mean([r[key] for r in rs]), other[key])
            for *rs, other in zip(*seeds, runs[name])]


def step_beside_coin(test, scales, runs):
    """F2 on the record and end to end: each task beside a coin of the gate's own rate there; pooled."""
    over, found = lambda pairs: mean([a - b for _, a, b in pairs]), []
    for task, problems in test.items():
        rate = mean([score >= USUAL['tau'] for score, *_ in judged(problems, scales)])
        both = zip(outcomes(problems, scales), outcomes(problems, scales, rate=rate))
        found += [(task, a.right, b.right) for a, b in both]
    for name, pairs in (('on the record', found), ('end to end', paired(runs, 'right', 'random-gate'))):
        for task in (*test, 'all'):
            some = [pair for pair in pairs if task in (pair[0], 'all')]
            yield Finding(f'F2 {task}: right answers over a coin of equal rate in each task, {name}',
                          *bootstrap(some, over), 0.01, f'n = {len(some)}')


def step_findings(test, scales, runs, clock):
    """F1 to F5: grounding beside confidence, the gate beside a coin and beside sd, its price, its place."""
    rows = {task: [judged([p], scales) for p in problems] for task, problems in test.items()}
    for task in rows:
        found = bootstrap(rows[task], advantage)
        yield Finding(f'F1 {task}: AUROC of the score over that of L', *found, 0.02,
                      f'n = {len(rows[task])} problems, {sum(map(len, rows[task]))} steps')
    yield from step_beside_coin(test, scales, runs)
    over = lambda pairs: mean([a - b for a, b in pairs])
    note = f'n = {len(runs["sd"])}, mean of {SEEDS} seeds'
    beside = lambda key, name: [(a, b) for _, a, b in paired(runs, key, name)]
    for claim, name in (('F3: right answers over exact decoding, above 0', 'sd'),
                        ('Selector: right answers over k = 1, above 0 (notes: +0.020)', 'k = 1'),
                        ('Notes: right answers over rsd (+0.024 to +0.035)', 'rsd')):
        yield Finding(claim, *bootstrap(beside('right', name), over), 1e-9, note)
    saved = lambda pairs: 1 - sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    for key, kind in (('read', 'weights read, memory-bound'), ('compute', 'positions, compute-bound')):
        found = bootstrap(beside(key, 'rsd'), saved)
        yield Finding(f'F4: {key} saved over rsd (notes: 11 %)', *found, 0.05, f'modelled: {kind}; {note}')
    both = [(task, r) for task in ('math', 'table') for r in rows[task]]
    part = lambda pairs, task: advantage([r for t, r in pairs if t == task])
    found = bootstrap(both, lambda pairs: part(pairs, 'table') - part(pairs, 'math'))
    yield Finding('F5: gain of F1 on table less that on math, above 0', *found, 1e-9, f'n = {len(both)}')
    for part, name in (('target pass', 'one target pass'), ('target', 'a step of the target')):
        yield Finding(f'Overhead: {name} takes 10 times as long as selection, rollout pass and scoring',
                      *bootstrap(clock, partial(overhead, part)), 10,
                      f'measured, n = {len(clock)} steps (notes: 5-10 % of a target pass)')


def step_stories(engine, rows):
    """The negative control: texts without steps. nats: of the target, a token of what was written."""
    target, decode = engine.readers['target'], engine.tokenizer.decode
    methods = dict(target=SpecGuard(tau=inf), notes=SpecGuard(), draft=DRAFT)
    runs = {name: step_run(engine, f'story, {name}', method, rows) for name, method in methods.items()}
    rate = mean([c.labels[0] == 'draft' for r in runs['notes'] for c in r['cycles']])
    runs['random-gate'] = step_run(engine, 'story, random-gate', METHODS['random-gate'](rate=rate), rows)
    for name, rs in runs.items():
        cycles, nats = [c for r in rs for c in r['cycles']], []
        for row, r in zip(rows, rs):
            ids, text = engine.tokenizer.encode(row['prompt']).ids, tokens_of(r['cycles'])
            logits = target.read(ids + text[:-1], [], target.model.full, len(text))
            nats += (-loglikes(logits, text)).tolist()
        cut = mean([decode(c.tokens).strip()[-1:] not in '.!?"' for c in cycles])
        yield (name, mean([c.labels[0] == 'target' for c in cycles]), mean([len(c.tokens) for c in cycles]),
               cut, mean(nats))


def step_limits(engine, test, stories):
    """Prints what the notes admit: copies are grounded, wrong steps can be sure, a story has no steps."""
    row = held_out('math', 1)[0]
    ids = engine.tokenizer.encode(row['prompt']).ids
    session, copy = start(engine, row, ids), ids[:12]
    logits = session.draft.read(ids, copy, session.draft.model.full, len(copy) + 1)[:-1]
    low, ground = observe(session, 'draft', Draft(copy, logits.softmax(-1), logits))[DRAFTS]
    print(f'a copy of the prompt, {engine.tokenizer.decode(copy)!r}: L {low:.2f}, G {ground:.2f}')
    chosen = [found[4] for p in test.values() for steps in p for found, _ in steps]
    looks = [engine.tokenizer.decode(c['tokens']).strip().startswith('|') for c in chosen]
    for name, kind in (('a cell looked up', True), ('anything else', False)):
        found = [c['signals'][DRAFTS][1] for c, look in zip(chosen, looks) if look == kind]
        print(f'{name}, {len(found)} steps: G {mean(found or [nan]):.2f} on average')
    wrong = [c for c in chosen if not c['right']]
    for i, name in enumerate(('L', 'G')):
        worst = max(wrong, key=lambda c: c['signals'][DRAFTS][i], default=None)
        if worst:
            text, seen = engine.tokenizer.decode(worst['tokens']), worst['signals'][DRAFTS]
            print(f'highest {name} of {len(wrong)} wrong steps: {text!r}, L {seen[0]:.2f}, G {seen[1]:.2f}')
    session = start(engine, stories[0], engine.tokenizer.encode(stories[0]['prompt']).ids)
    step = engine.tokenizer.decode(SpecGuard().propose(session).tokens)
    print(f'no step structure, a step of a story: {step!r}')


def specguard(n):
    """SpecGuard's claims F1 to F5, then its tables: n problems of each task recorded, FULL run end to end.

    A fifth of the record sets scales and thresholds, the rest is judged. Prompts have SHORT tokens at most.
    """
    names = 'math', 'table', 'code'
    engine = bench.engine_for(HOME / 'target', HOME / 'draft', max_new=160)
    rows = {task: short_rows(engine.tokenizer, task, n) for task in names}
    stories, full = held_out('story', min(n, 40)), min(n, FULL)
    engine.open([engine.tokenizer.encode(r['prompt']).ids for r in sum(rows.values(), []) + stories])
    whole, first = {task: record(engine, rows[task]) for task in names}, max(1, n // 5)
    tune, test = ({t: p[cut] for t, p in whole.items()} for cut in (slice(first), slice(first, n)))
    seen = [found[4]['signals'] for problems in tune.values() for p in problems for found, _ in p]
    scales = {r: (signal_ranges([s[r] for s in seen]), [sorted(xs) for xs in zip(*(s[r] for s in seen))])
              for r in ROLLOUTS}
    runs = step_contest(engine, [r for some in zip(*rows.values()) for r in some][:3 * full])
    clock = step_clock(engine, [r for task in names for r in rows[task][:20]])
    yield from step_findings(test, scales, runs, clock)
    sizes = {role: r.model.read_bytes(r.model.full) for role, r in engine.readers.items()}
    exact = {t: [sum(r[key] for r in rs) / sum(len(c.tokens) for r in rs for c in r['cycles'])
                 for key in ('read', 'compute')]
             for t in names if (rs := [r for r in runs['sd'] if r['task'] == t])}
    cycles = [c for r in runs['notes, seed 0'] for c in r['cycles']]
    print(f'\nn = {n} problems of each task, {n - first} of them judged, {full} run end to end; prompts of '
          f'at most {SHORT} tokens.\n')
    show(('task', 'steps', 'right', 'of the target', 'signal', 'AUROC', 'AUROC at equal length',
          'AUPRC of wrong', 'rank correlation with length'), step_signals(test, scales))
    show(('table', 'setting', 'notes: points', 'notes: speed', *names, 'target steps',
          'modelled speed / sd, memory-bound', 'compute-bound'), step_ablations(test, scales, sizes, exact))
    show('chosen on,beta,tau,kept steps right,used on,right,target steps'.split(','),
         step_transfer(tune, test, scales))
    show(('method', 'n', *names, 'points over sd (95 %)', 'steps right', 'target steps', 'steps clipped',
          's a text', 'read / sd', 'computed / sd'), step_contest_table(runs, names))
    show(('part of a step', 'notes, ms a token', 'ms a step', 'over the target alone', 'modelled, the same'),
         step_costs(clock, sizes, mean([c.labels[0] == 'target' for c in cycles])))
    show(('attention rows', 'MB'), step_memory(engine, clock))
    show(('stories', 'target steps', 'tokens a step', 'cut in mid-sentence', "target's nats a token"),
         step_stories(engine, stories))
    print('```text')
    step_limits(engine, test, stories)
    print('```')


# --------------------------------------------------------------------------------------- sparse verification

OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=0, dense_below=16, block=4)    # small: the texts are short
LONG = 256          # tokens of a table's prompt, at least
HARD = 'attn 90 %, ffn 60 %'
GRID = {            # settings of a verifying pass, by name
    'dense': {}, 'attn 50 %': dict(rho=0.5), 'attn 75 %': dict(rho=0.25), 'attn 90 %': dict(rho=0.1),
    'attn 75 %, every layer chooses': dict(rho=0.25, anchors=99), 'ffn 60 %': dict(ffn_share=0.4),
    'ffn 60 % of a token': dict(ffn_quantile=0.6), 'attn 75 %, ffn 60 %': dict(rho=0.25, ffn_share=0.4),
    HARD: dict(rho=0.1, ffn_share=0.4), 'as --method sparse': {knob: getattr(Sparse, knob) for knob in OFF},
    **{f'ffn, {form} form': dict(ffn_quantile=0.6, form=form) for form in ('literal', 'union')}}
SELECTIONS = {f'{select} 75 %': dict(rho=0.25, select=select)
            for select in ('recent', 'random', 'oracle', 'quest', 'joint', 'token', 'union')}
SELECTIONS |= {f'attn 75 %, query {who}': dict(rho=0.25, query_from=who) for who in ('last', 'mean')}
SELECTIONS |= {'attn 75 %, calibrated anchors': dict(rho=0.25, anchors=5),  # as many as every second layer
               'ffn 60 %, guessed': dict(ffn_share=0.4, form='guessed')}
SIZES = {f'blocks of {block}': dict(dense_below=128, rho=0.25, block=block, locals=1)     # at one fixed L0
         for block in (8, 16, 32, 64, 128, 256)}
BOTH = GRID['attn 75 %, ffn 60 %']
REFRESH = {f'attn 75 %, ffn 60 %, dense every {k} cycles': BOTH | dict(refresh_every=k) for k in (8, 4, 2)}


def contexts(task, n, split='held-out'):
    """n (row, prompt ids, solution ids) as the models know them; tables of LONG tokens or more.

    Other tasks' prompts are short. Filled up with solved rows they are unlike what the models learned: dense,
    the target then guesses worse than sparse, where it sees less of the filling.
    """
    tokenizer, found, source = embedded('target')[1], [], tasks.rows(task, 11, split)
    while len(found) < n:
        row = next(source)
        ids = tokenizer.encode(row['prompt']).ids
        if task != 'table' or len(ids) >= LONG:
            found.append((row, ids, tokenizer.encode(row['solution']).ids))
    return found


@functools.cache
def embedded(name):
    return load(HOME / name)


class Prompt:
    """A prompt that was read densely, once: what settings of Sparse make of its solution, and write on.

    context: (row, ids of its prompt, of its solution); found: the calibration (passes.sparsity); plain: the
    knobs with which nothing is left out.
    """

    def __init__(self, context, found, model='target', draft=None, plain=None):
        (target, _, eos), draft = embedded(model), draft or embedded('draft')[0]
        self.row, self.ids, self.solution = context
        self.room = len(self.solution) + 12
        readers = (Reader(network, len(self.ids) + self.room) for network in (target, draft))
        self.session = Session(*readers, rollout, list(self.ids), self.room, eos,
                               calibration=dict(sparse=found))
        self.session.read_prompt()
        self.dense = self.passes(plain)

    def start(self, knobs):
        """The session behind its prompt again, sparse with these knobs; none: dense."""
        s, form = self.session, rivals.SparseForms if 'form' in (knobs or {}) else Sparse
        s.tokens, s.room, s.ended, s.cycles = list(self.ids), self.room, False, 0
        s.sparse = form(**OFF | knobs) if knobs else None
        s.target.cache.record(self.ids[:-1], len(self.ids) - 1, s.target.model.full)
        return s

    def passes(self, knobs, fresh=False):
        """(log-probabilities [n, V] of a solution of n tokens, [dict of what a pass took]), 5 tokens a pass.

        As in decoding, on what the passes wrote themselves; fresh: each on a dense cache instead.
        """
        s, line, laws, seen = self.start(knobs), self.ids + self.solution, [], []
        full = s.target.model.full
        for n in range(len(self.ids), len(line), 5):
            if fresh:
                s.target.read(line[:n - 1], [], full, 0)
            log, width, path = [], len(line[n - 1:n + 4]), s.view(full)
            s.take()
            laws.append(s.target.read(line[:n], line[n:n + 4], watched(path, log), width))
            (_, positions, seconds), = s.take().values()
            rows = ledger(log, s.target.model, n - 1)
            size, work = cost(s.target.model, rows, positions)
            seen.append(dict(bytes=size, flops=work, seconds=seconds, rows=rows, overlap=overlaps(log)))
            s.cycles += 1
        return torch.cat(laws)[:len(self.solution)].log_softmax(-1), seen

    def read(self, knobs, fresh=False):
        """What a sparse reading of the solution is beside a dense one, means over its tokens.

        kl in nats, dense to sparse; alike, the first choice; nll of both; bytes, flops and seconds over the
        dense passes'; channels and union, of a token and of a pass, as shares; overlap (see overlaps).
        """
        (laws, ours), (dense, theirs) = self.passes(knobs, fresh), self.dense
        at, width = torch.tensor(self.solution)[:, None], self.session.target.model.config.intermediate_size
        spent = {key: sum(p[key] for p in ours) / sum(p[key] for p in theirs)
                 for key in ('bytes', 'flops', 'seconds')}
        share = {key: mean([row.get(key, width) for p in ours for row in p['rows']]) / width
                 for key in ('channels', 'union')}
        return spent | share | dict(
            kl=float((dense.exp() * (dense - laws)).sum(-1).mean()), long=len(self.ids),
            alike=float((dense.argmax(-1) == laws.argmax(-1)).float().mean()),
            nll=[-float(x.gather(1, at).mean()) for x in (dense, laws)],
            overlap=mean([x for p in ours for x in p['overlap']] or [nan]))

    def write(self, knobs):
        """The greedy text of `sd`, gamma 4: is it right, tokens a cycle, verification's share of the time."""
        s = self.start(knobs)
        s.take()
        cycles = list(specmini.decode(s, Exact()))
        tokens, text = s.tokens[len(self.ids):], embedded('target')[1].decode(s.tokens[len(self.ids):])
        spent = [sum(row[2] for c in cycles for path, row in c.passes.items() if path.startswith(who))
                 for who in ('target', '')]
        return dict(right=float(bool(tasks.grade(self.row, text))), tokens=tokens, text=text,
                    tau=mean([len(c.tokens) for c in cycles]), verifying=spent[0] / spent[1])


def overlaps(log):
    """Of the blocks that the later rows of a pass would choose, the root's share, in each upper layer."""
    kept = [(i, carry['kept'][0].float()) for i, carry in log if i % 2 == 0 and 'kept' in (carry or {})]
    return [float((x[:, :1] * x[:, 1:]).sum() / x[:, 1:].sum()) for i, x in kept
            if i >= max(i for i, _ in log) / 2 and x.shape[1] > 1]


def calibrated(model, task):
    """The sparse section of a calibration on four training rows of the task."""
    rows = contexts(task, 4, split='train')
    return sparsity(model, [ids + sol for _, ids, sol in rows], dense_below=16, block=4)


def measured(task, n, settings, found):
    """[{setting: what it reads and writes}] of n prompts; stories, which nobody can grade, are only read."""
    rows = []
    for row in tqdm(contexts(task, n), desc=task, file=sys.stderr, disable=None):
        p = Prompt(row, found)
        rows.append({name: p.read(knobs) | (p.write(knobs) if task != 'story' else {})
                     for name, knobs in settings.items()} | dict(row=row[0]))
    return rows


def column(rows, name, key):
    return [row[name][key] for row in rows]


def beside(rows, name, other, key):
    """Rows for the bootstrap of a mean difference over the same prompts."""
    return [a - b for a, b in zip(column(rows, name, key), column(rows, other, key))]


def sparse_claims(n):
    """Tables of all settings, then the Findings F1 to F6 and what the notes ask next; n prompts a task."""
    found = {task: calibrated(embedded('target')[0], task) for task in ('table', 'story')}
    data = dict(math=measured('math', n, GRID, found['table']),
                table=measured('table', n, GRID | SELECTIONS | SIZES, found['table']),
                story=measured('story', n, GRID | REFRESH, found['table']))
    sparse_tables(data)
    yield Finding("Profile: verification's share of the seconds of `sd`", *bootstrap(
        [r for task in ('math', 'table') for r in column(data[task], 'dense', 'verifying')], mean), 0.5,
        'math and tables, gamma 4')
    yield from sparse_findings(data, n)
    yield from elsewhere(found, n)
    yield from drift(n, found['table'])
    yield from mixture_claims(n)


def sparse_findings(data, n):
    """F1 to F4, F6, the hybrid against its parts, and the stress of reasoning."""
    table, note = data['table'], f'tables of {LONG} tokens or more, n = {n}'
    right = lambda name: mean(column(table, name, 'right'))

    def reduction(rows):
        """The largest reduction of FLOPs among settings that keep tables right and stories likely."""
        keeps = [1.0]
        for name in GRID:
            more = mean([b - a for a, b in column(data['story'], name, 'nll')])
            if mean(beside(rows, name, 'dense', 'right')) >= -0.01 and math.exp(more) <= 1.02:
                keeps.append(1 / mean(column(rows, name, 'flops')))
        return max(keeps)
    far = [row for row in table if row['dense']['long'] >= 512] or table
    yield Finding('F1: fewer FLOPs a pass at 512 tokens or more, right within 1 pp, stories within 2 %',
                  *bootstrap(far, reduction), 2, f'times, n = {len(far)}, dense {right("dense"):.0%} right')
    for name in ('attn 75 %', HARD):
        per = [a / b for a, b in zip(column(table, name, 'tau'), column(table, 'dense', 'tau'))]
        yield Finding(f'F2: tokens a cycle at {name} over dense', *bootstrap(per, mean), 0.95, note)
    yield Finding("F3: overlap of the root's blocks with each later row's own, upper layers",
                  *bootstrap(column(table, 'token 75 %', 'overlap'), mean), 0.8, f'75 %, {note}')
    for other, line in (('recent', 0.02), ('random', 0.02), ('quest', 0.0), ('oracle', 0.0), ('joint', 0.0)):
        yield Finding(f'F4: tables right, mean-key blocks less {other} blocks', *bootstrap(
            beside(table, 'attn 75 %', f'{other} 75 %', 'right'), mean), line,
            f'75 %, {right("attn 75 %"):.0%} right, dense {right("dense"):.0%}')
    for other in ('query last', 'query mean', 'calibrated anchors'):
        yield Finding(f"KL at 75 %, {other} less the root's query and every second layer", *bootstrap(
            beside(table, f'attn 75 %, {other}', 'attn 75 %', 'kl'), mean), 0.0, f'nats, {note}')
    more = [a - b for a, b in zip(*(column(data[task], 'attn 90 %', 'kl') for task in ('math', 'story')))]
    yield Finding('F6: KL of math less KL of stories at 90 %', *bootstrap(more, mean), 0.0, f'nats, n = {n}')
    apart = [row['attn 75 %, ffn 60 %']['kl'] - row['attn 75 %']['kl'] - row['ffn 60 %']['kl']
             for task in data for row in data[task]]
    yield Finding('A hybrid is worse than its parts: its KL less the sum of theirs',
                  *bootstrap(apart, mean), 0.0, f'nats, n = {len(apart)}')
    for task in ('math', 'table'):
        yield Finding(f'Stress: {task} right at {HARD} less dense', *bootstrap(
            beside(data[task], HARD, 'dense', 'right'), mean), -0.01,
            f'dense {mean(column(data[task], "dense", "right")):.0%}, n = {n}')


def elsewhere(found, n):
    """F5: anchors and thresholds that were measured on one task and are used on another."""
    knobs = dict(rho=0.25, anchors=-(-len(found['table']['anchors']) // 2), ffn_quantile=0.6)
    of = {}
    for task in found:
        prompts = (Prompt(row, found[task]) for row in contexts('table', n))
        of[task] = [p.write(knobs) | p.read(knobs) for p in prompts]
    first, second = (found[task]['anchors'][:knobs['anchors']] for task in ('story', 'table'))
    for key, words in (('right', 'tables right'), ('alike', 'same first choice as dense')):
        apart = [a[key] - b[key] for a, b in zip(of['story'], of['table'])]
        yield Finding(f'F5: {words}, anchors and thresholds of stories less those of tables',
                      *bootstrap(apart, mean), -0.01, f'anchors {first} and {second}, n = {n}')


def drift(n, found):
    """What it costs that sparse passes build on what sparse passes wrote: against a dense cache each time."""
    own, fresh = [], []
    for row in tqdm(contexts('story', n), desc='drift', file=sys.stderr, disable=None):
        p = Prompt(row, found)
        own.append(p.read(BOTH)['kl'])
        fresh.append(p.read(BOTH, fresh=True)['kl'])
    yield Finding('Drift: KL on a cache that sparse passes wrote less KL on a dense one', *bootstrap(
        [a - b for a, b in zip(own, fresh)], mean), 0.0,
        f'nats, attn 75 %, ffn 60 %, stories; {mean(own):.3f} and {mean(fresh):.3f}, n = {n}')


def sparse_tables(data):
    """Prints what every setting costs and keeps, tables by length, and where reasoning breaks."""
    for task, rows in data.items():
        lines, written = [], task != 'story'
        for name in (name for name in rows[0] if name != 'row'):
            of = lambda key: mean(column(rows, name, key))
            same = mean([row[name]['tokens'] == row['dense']['tokens'] for row in rows]) if written else nan
            ratio = math.exp(mean([b - a for a, b in column(rows, name, 'nll')]))
            lines.append([name, *map(of, ('flops', 'bytes', 'seconds', 'channels', 'union', 'kl', 'alike')),
                          ratio, *([of('right'), same, of('tau')] if written else [])])
        head = 'FLOPs,bytes,seconds,channels,union,KL,same choice,perplexity,right,same text,tokens a cycle'
        show([f'{task}, n = {len(rows)}', *head.split(',')[:len(lines[0]) - 1]], lines)
    keys, groups = ('flops', 'bytes', 'kl', 'right'), ((LONG, 512), (512, 1024), (1024, 2048))
    groups = {f'{a} to {b} tokens': [row for row in data['table'] if a <= row['dense']['long'] < b]
              for a, b in groups}
    show(['tables of', 'n', 'setting', 'FLOPs', 'bytes', 'KL', 'right', 'dense right'], [
        [group, len(rows), name, *(mean(column(rows, name, key)) for key in keys),
         mean(column(rows, 'dense', 'right'))]
        for group, rows in groups.items() if rows for name in ('attn 75 %', HARD)])
    model = embedded('target')[0]
    for i, words in ((1, 'FLOPs'), (0, 'bytes')):
        print(f'attn 75 % alone (blocks of 16) halves the {words} of a pass over 5 positions of the embedded '
              f'target from {halved(model, i)} cached tokens on.\n')
    broken = [[row[name]['text'].split('\n') for name in ('dense', HARD)] for row in data['math']
              if row['dense']['right'] > row[HARD]['right']]
    show(['stress: the first line that differs, dense', HARD], [
        next(pair for pair in itertools.zip_longest(*both) if pair[0] != pair[1]) for both in broken[:5]])


def halved(model, i):
    """The fewest cached tokens at which leaving out 75 % of the keys halves a pass's bytes (0), FLOPs (1).

    Blocks of 16, which every second layer scores.
    """
    L, width = model.config.num_hidden_layers, model.config.intermediate_size
    ffn = dict(channels=width, union=width, gate=width, spared=2, asked=1)
    of = lambda keys, means: cost(model, [ffn | dict(keys=keys, seen=keys, means=means * (layer % 2))
                                          for layer in range(L)], 5)[i]
    return next(keys for keys in itertools.count(64, 64) if of(keys, 0) >= 2 * of(keys / 4, keys / 16))


def mixture_claims(n):
    """Experts: the median rule, a stricter one, m dropped whatever they weigh, for m = 1, 2, 3; a hybrid."""
    if not (HOME / 'moe' / 'config.json').exists():
        print('No MoE model in lab/models: the claims about experts were not tried.\n')
        return
    found = calibrated(embedded('moe')[0], 'math')
    found['experts'] = [[[0.0, *shares, 2.0] for shares in layer] for layer in found['experts']]
    skip = lambda m, q, **knobs: dict(moe_skip=m, moe_quantile=q, **knobs)
    settings = {f'experts, {m}, {words}': skip(m, q) for m in (1, 2, 3)
                for words, q in (('median rule', 1 / 2), ('always', 1.0))}
    settings |= {'experts, 1, lowest tenth': skip(1, 3 / 22),                # of 23 quantiles, see above
                 'attn 75 %': skip(1, 0.0, rho=0.25), 'attn 75 %, experts, 1': skip(1, 0.5, rho=0.25)}
    rows = []
    for row in tqdm(contexts('math', n), desc='moe', file=sys.stderr, disable=None):
        p = Prompt(row, found, 'moe', plain=skip(1, 0.0))
        rows.append({name: p.read(knobs) for name, knobs in settings.items()} | {
            'written': [p.write(skip(1, 0.0)), p.write(settings['attn 75 %, experts, 1'])]})
    for name in settings:
        ratio = [math.exp(a - b) for a, b in column(rows, name, 'nll')]
        yield Finding(f'MoE, {name}: perplexity over sparse', *bootstrap(ratio, mean), 0.98,
                      f'FLOPs {mean(column(rows, name, "flops")):.2f}, bytes '
                      f'{mean(column(rows, name, "bytes")):.2f} of dense, n = {n}')
    both, *parts = 'attn 75 %, experts, 1', 'attn 75 %', 'experts, 1, median rule'
    apart = [row[both]['kl'] - sum(row[part]['kl'] for part in parts) for row in rows]
    yield Finding('MoE: the hybrid is worse than its parts: its KL less the sum of theirs',
                  *bootstrap(apart, mean), 0.0, f'nats, n = {n}')
    tau, right = ([b[key] - a[key] for a, b in (row['written'] for row in rows)] for key in ('tau', 'right'))
    yield Finding('MoE: tokens a cycle, hybrid less dense', *bootstrap(tau, mean), -0.1,
                  f'{mean([row["written"][0]["tau"] for row in rows]):.2f} dense, math right '
                  f'{mean(right):+.0%}, n = {n}')


def sparse_draft(n):
    """The notes' first open question: does a draft that learned from the sparse target's laws accept more?

    Two copies of the draft learn for a minute each from 2 n texts, one from dense laws, one from sparse ones.
    """
    lessons, tested = dict(dense=[], sparse=[]), [c for task in ('math', 'table') for c in contexts(task, n)]
    for task in ('math', 'table'):
        for row in tqdm(contexts(task, n, 'train'), desc=f'{task} lessons', file=sys.stderr, disable=None):
            p = Prompt(row, {})
            for name, laws in (('dense', p.dense[0]), ('sparse', p.passes(GRID[HARD])[0])):
                lessons[name].append((*row[1:], laws))
    drafts = dict(given=embedded('draft')[0]) | {name: distil(embedded('draft')[0], lessons[name], 60)
                                                 for name in lessons}
    tau = {name: [Prompt(row, {}, draft=draft).write(GRID[HARD])['tau'] for row in tested]
           for name, draft in drafts.items()}
    means = ', '.join(f'{name} {mean(tau[name]):.2f}' for name in tau)
    for other in ('given', 'dense'):
        yield Finding(f'Draft distilled from the sparse view: tokens a cycle, less those of the {other} one',
                      *bootstrap([a - b for a, b in zip(tau['sparse'], tau[other])], mean), 0.0,
                      f'{HARD}, math and tables; {means}, n = {2 * n}')


# ------------------------------------------------------------------------------------------------ the tables

CLAIMS = dict(      # method: function from n, the number of prompts of each task, to its Findings
    cmasd=cmasd,
    ecsv=ecsv,
    via=via,
    sparse=sparse_claims,
    **{'sparse-draft': sparse_draft},
    specguard=specguard,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('methods', nargs='+', choices=CLAIMS)
    parser.add_argument('--n', type=int, help='prompts of each task (100; 500 for specguard)')
    args = parser.parse_args()
    least = 2 if 'specguard' in args.methods else 1     # which tunes on a fifth and judges the rest
    if args.n is not None and args.n < least:
        parser.error(f'--n {args.n}: expected {least} or more')
    torch.set_num_threads(1)                            # as small models run; times are the processor's own
    for name in args.methods:
        found = list(CLAIMS[name](args.n or (500 if name == 'specguard' else 100)))
        # tables are printed on the way, this one after them
        print(f'| {name} | figure | 95 % | line | verdict | |\n|---|--:|--:|--:|---|---|')
        for f in found:
            print(f'| {f.claim} | {f.figure:.3f} | {f.low:.3f} to {f.high:.3f} | {f.line:g} | {f.verdict} | '
                  f'{f.remark} |')
        print(flush=True)


if __name__ == '__main__':
    main()
