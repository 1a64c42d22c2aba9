"""SpecGuard's claims and tables, judged by what record.py stored.

Recorded steps are replayed here: what a gate would have kept, at any setting, follows from the signals of the
candidates. A fifth of the problems of each task sets scales and thresholds, the rest is judged.
"""
import itertools
import math
from bisect import bisect
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy
import scipy.stats

from lab.common import Claim, PageTable, interval, mean, roc_area
from lab.specguard.calibrate import choose_gate, gate_curve, signal_ranges
from lab.specguard.record import CANDIDATES, ROLLOUTS, SEEDS, TASKS, Run, Story
from verify import step_score

ABOVE_0 = 1e-9      # the line of a claim that says `above 0`

# why a claim may fail, where several share the reason
GROUNDED = ('A wrong step looks back at the text as much as a right one: where attention goes says little of '
            'what is made of it')
OUTVOTED = 'Half of the score is grounding, which can outvote the confidence that tells wrong steps'
DRAFT_PASS = ('Reading the step again is a whole pass of the draft, and in small models a pass costs its '
              'calls rather than its weights')


@dataclass(frozen=True)
class Setting:
    """SpecGuard's knobs, as far as recorded steps can be judged by them; the defaults are preset `notes`."""
    pick: str = '4'                 # which candidate, of record.CANDIDATES
    rollout: str = 'draft last 3'   # whose signals and which grounding, of record.ROLLOUTS
    beta: float = 0.5
    tau: float = 0.5
    combine: str = 'weighted'
    scale: str = 'range'            # rank: a signal is worth the share of other steps' that are lower


USUAL = Setting()


class Ablation(NamedTuple):
    """A line of the notes' tables, and how our setting differs from the default."""
    table: str
    setting: str
    points: str                     # of accuracy, in the notes
    speed: str                      # in the notes
    change: dict


NOTES = [
    Ablation('components (MATH, GSM8K)', 'LPBV only', '+1.7, +1.2', 'latency 0.95', dict(beta=1.0)),
    Ablation('components (MATH, GSM8K)', 'ABGV only', '+2.1, +1.9', 'latency 0.96', dict(beta=0.0)),
    Ablation('components (MATH, GSM8K)', 'both', '+4.7, +3.6', 'latency 0.89', {}),
    Ablation('k', '1', 'as sd', '-', dict(pick='1')),
    Ablation('k', '2', '+0.5', '-', dict(pick='2')),
    Ablation('k', '4', '+2.0', '-', dict(pick='4')),
    Ablation('k', '8', '+2.2', '2 x computation', dict(pick='8')),
    Ablation('tau', '0.9', '+4.2', '1.02', dict(tau=0.9)),
    Ablation('tau', '0.7', '+3.8', '1.08', dict(tau=0.7)),
    Ablation('tau', '0.5', '+3.6', '1.11', dict(tau=0.5)),
    Ablation('tau', '0.3', '+2.1', '1.14', dict(tau=0.3)),
    Ablation('tau', '0.1', '+0.8', '1.15', dict(tau=0.1)),
    Ablation('beta', '0.0', '+2.8', '1.10', dict(beta=0.0)),
    Ablation('beta', '0.3', '+3.2', '1.11', dict(beta=0.3)),
    Ablation('beta', '0.5', '+3.6', '1.11', dict(beta=0.5)),
    Ablation('beta', '0.7', '+3.1', '1.10', dict(beta=0.7)),
    Ablation('beta', '1.0', '+2.2', '1.08', dict(beta=1.0)),
    Ablation('layers, of the target', 'last 1', '-1.2', '-', dict(rollout='target last 1')),
    Ablation('layers, of the target', 'last 2', '-0.5', '-', dict(rollout='target last 2')),
    Ablation('layers, of the target', 'last 3', 'their default', '-', dict(rollout='target last 3')),
    Ablation('layers, of the target', 'last 6', '+0.1', '3 x memory', dict(rollout='target last 6')),
    Ablation('layers, of the target', 'first 3', '-', '-', dict(rollout='target first 3')),
    Ablation('layers, of the target', 'middle 3', '-', '-', dict(rollout='target middle 3')),
    Ablation('layers, of the target', 'all', '-', '-', dict(rollout='target all')),
    Ablation('layers, of the draft', 'last 1', '-', '-', dict(rollout='draft last 1')),
    Ablation('rollout', 'sparsify 0.0', '-', '-', dict(rollout='sparsify 0')),
    Ablation('rollout', 'sparsify 0.05', '-', '-', dict(rollout='sparsify 0.05')),
    Ablation('rollout', 'residual 0.5', '-', '-', dict(rollout='residual 0.5')),
    Ablation('rollout', 'row predicting', '-', '-', dict(rollout='predicting row')),
    Ablation('selector', 'the commonest of 4', '-', '-', dict(pick='common')),
    Ablation('combine', 'and', '-', '-', dict(combine='and')),
    Ablation('scale', 'rank', '-', '-', dict(scale='rank'))]


# ------------------------------------------------------------------------------- recorded steps, judged again

class Scale(NamedTuple):
    """What a rollout's signals are compared with, from the problems that are not judged."""
    ranges: list                    # [1st, 99th percentile] of L and of G
    ranked: list                    # all L and all G, sorted


class Judged(NamedTuple):
    """The chosen candidate of a step."""
    score: float
    L: float                        # lowest log-probability, nats
    G: float                        # lowest grounding, 0..1
    right: bool
    tokens: int


def signals_of(problem, i, rollout):
    """(L, G) of candidate i of a problem."""
    logp = problem['logp'][ROLLOUTS[rollout].who]
    return logp[i], 1 - problem['ungrounded'][rollout][i]


def scales_of(problems):
    """{rollout: Scale}, of the most central of four candidates of each step."""
    found = {}
    for rollout in problems[0]['ungrounded']:
        pairs = []
        for problem in problems:
            pairs += [signals_of(problem, i, rollout) for i in problem['picks'][USUAL.pick]]
        found[rollout] = Scale(signal_ranges(pairs), [sorted(signal) for signal in zip(*pairs)])
    return found


def score_of(signals, scale, setting):
    """The score of a step, 0..1, from its (L, G)."""
    ranges = scale.ranges
    if setting.scale == 'rank':
        signals = [bisect(ranked, x) / len(ranked) for ranked, x in zip(scale.ranked, signals)]
        ranges = [(0, 1), (0, 1)]
    score, _ = step_score([signals], ranges, setting.beta, setting.combine)
    return score


def judged(problem, scales, setting=USUAL):
    """[Judged] of a problem's steps."""
    right = problem['candidates']['right']
    tokens = problem['candidates']['tokens']
    found = []
    for i in problem['picks'][setting.pick]:
        signals = signals_of(problem, i, setting.rollout)
        score = score_of(signals, scales[setting.rollout], setting)
        found.append(Judged(score, *signals, right[i], tokens[i]))
    return found


def judged_steps(problems, scales, setting=USUAL):
    """[Judged] of all steps of all these problems."""
    steps = []
    for problem in problems:
        steps += judged(problem, scales, setting)
    return steps


@dataclass
class Outcome:
    """What is expected of a text that is written at some setting."""
    right: float = 1.0              # the chance that all of its steps are
    wrote: float = 0.0              # share of steps that the target writes
    tokens: float = 0.0
    drafts: float = 0.0             # passes of the draft
    targets: float = 0.0            # passes of the target
    drafted: float = 0.0            # positions of the draft's: k in a pass with k candidates
    verified: float = 0.0           # positions of the target's


def outcome(problem, scales, setting=USUAL, rate=None):
    """The Outcome of a recorded problem; rate: of a gate by coin, in place of the scores.

    The model that gives the signals looks back at a step in one pass more. What the other model wrote a model
    reads later: the draft in its next pass, the target only if it writes again.
    """
    k = CANDIDATES[setting.pick]
    draft_looks = ROLLOUTS[setting.rollout].who == 'draft'
    target_looks = not draft_looks
    cached = draft_looks or k == 1          # whether the draft's cache has the step that was chosen
    behind = 1.0                            # positions that the draft has not read, the root included
    unread = 0.0                            # of the draft's tokens, those that the target has not read
    keeps = []
    found = Outcome()
    for at, step in enumerate(judged(problem, scales, setting)):
        keep = float(step.score >= setting.tau) if rate is None else rate
        anew = 1 - keep                     # the chance that the target writes the step
        own_tokens = problem['own']['tokens'][at]
        passes = problem['passes'][str(k)][at]
        found.right *= keep * step.right + anew * problem['own']['right'][at]
        found.tokens += keep * step.tokens + anew * own_tokens
        found.drafts += passes + draft_looks
        found.targets += anew * own_tokens + target_looks
        found.drafted += behind + k * (passes - 1) + draft_looks * step.tokens
        found.verified += anew * (own_tokens + unread) + target_looks * (step.tokens + 1)
        same = problem['candidates']['same'][problem['picks'][setting.pick][at]] if cached else 0
        behind = 1 + anew * max(0, own_tokens - 1 - same)
        if not cached:
            behind += keep * (step.tokens - 1)
        unread = keep * (unread + step.tokens) if draft_looks else 0.0
        keeps.append(keep)
    found.wrote = 1 - sum(keeps) / len(keeps)
    return found


def outcomes(problems, scales, setting=USUAL, rate=None):
    """[Outcome] of each problem."""
    return [outcome(problem, scales, setting, rate) for problem in problems]


class Steps(NamedTuple):
    """The recorded problems by task, in two parts, and what the first part sets."""
    tune: dict
    test: dict
    scales: dict                    # by rollout


def split(problems):
    """The Steps of all recorded problems: the first fifth of each task tunes."""
    tune = {}
    test = {}
    together = []                           # those that tune, of all tasks
    for task in TASKS:
        mine = of_task(problems, task)
        first = max(1, len(mine) // 5)
        tune[task] = mine[:first]
        test[task] = mine[first:]
        together += tune[task]
    return Steps(tune, test, scales_of(together))


def of_task(rows, task):
    return [row for row in rows if row['task'] == task]


# ------------------------------------------------------------------------------------------- runs, end to end

def run(row, name):
    """The Run of a stored row by one method."""
    return Run(*row['runs'][name])


def runs_of(rows, name):
    """[Run] of a method on the rows that it was run on."""
    return [run(row, name) for row in rows if name in row['runs']]


class Pair(NamedTuple):
    """Two values of one problem that are compared."""
    task: str
    mine: float
    other: float


def seeds_beside(rows, field, name):
    """[Pair]: the default preset's mean over its seeds, and another method's value."""
    found = []
    for row in rows:
        seeds = [getattr(run(row, f'notes, seed {seed}'), field) for seed in range(SEEDS)]
        found.append(Pair(row['task'], mean(seeds), getattr(run(row, name), field)))
    return found


def gain(pairs):
    """By how much the first values exceed the second, on average."""
    return mean(pair.mine - pair.other for pair in pairs)


def saved(pairs):
    """The share of the second values' sum that the first save."""
    return 1 - total(pairs, 'mine') / total(pairs, 'other')


def total(items, field):
    return sum(getattr(item, field) for item in items)


def average(items, field):
    return total(items, field) / len(items) if items else math.nan


# ------------------------------------------------------------------------------------------------- the claims

def claims(stored):
    """F1 to F5 (grounds to reject what the method claims), the selector, rsd, the overhead, stories."""
    steps = split(stored['steps'].rows)
    rows = stored['runs'].rows
    return [*grounding_claims(steps), *coin_claims(steps, rows), *contest_claims(rows), benefit_claim(steps),
            *overhead_claims(stored['clock'].rows), story_claim(stored['stories'].rows)]


def columns(problem, scales):
    """[steps, 3] of a problem: score, L, whether right."""
    return numpy.array([(step.score, step.L, step.right) for step in judged(problem, scales)])


def advantage(problems):
    """By how much the score's AUROC beats that of confidence alone; problems: see columns."""
    if not problems:
        return math.nan
    score, L, right = numpy.concatenate(problems).T
    return roc_area(score, right) - roc_area(L, right)


def grounding_claims(steps):
    """F1, a claim a task."""
    for task, problems in steps.test.items():
        rows = [columns(problem, steps.scales) for problem in problems]
        yield Claim(f'F1 {task}: AUROC of the score over that of L', 'paper', 0.02, rows, advantage,
                    note=f'n = {len(rows)} problems, {sum(map(len, rows))} steps', why=GROUNDED)


def coin_claims(steps, rows):
    """F2, on recorded steps and end to end: each task beside a coin of the gate's own rate there; pooled."""
    recorded = []
    for task, problems in steps.test.items():
        seen = judged_steps(problems, steps.scales)
        rate = mean(step.score >= USUAL.tau for step in seen)
        by_score = outcomes(problems, steps.scales)
        by_coin = outcomes(problems, steps.scales, rate=rate)
        for mine, other in zip(by_score, by_coin):
            recorded.append(Pair(task, mine.right, other.right))
    end_to_end = seeds_beside(rows, 'right', 'random-gate')
    for name, pairs in (('on the record', recorded), ('end to end', end_to_end)):
        for task in (*TASKS, 'all'):
            some = pairs if task == 'all' else [pair for pair in pairs if pair.task == task]
            text = f'F2 {task}: right answers over a coin of equal rate in each task, {name}'
            yield Claim(text, 'ours', 0.01, some, gain, note=f'n = {len(some)}', why=OUTVOTED)


def contest_claims(rows):
    """F3, F4 and the notes' claims on texts written end to end."""
    note = f'n = {len(rows)}, mean of {SEEDS} seeds'

    def beside(field, name):
        return seeds_beside(rows, field, name)
    yield Claim('F3: right answers over exact decoding, above 0', 'paper', ABOVE_0, beside('right', 'sd'),
                gain, note=note,
                why="Exact decoding writes what the target would; a step that is kept is the draft's, and "
                    'one wrong step that passes the gate spoils the answer')
    yield Claim('Selector: right answers over k = 1, above 0 (notes: +0.020)', 'notes', ABOVE_0,
                beside('right', 'k = 1'), gain, note=note,
                why='Candidates of one draft err alike: the one most like the others may share their error')
    yield Claim('Notes: right answers over rsd (+0.024 to +0.035)', 'notes', ABOVE_0, beside('right', 'rsd'),
                gain, note=note,
                why="The rival's reward is the task's own checker, which knows what is right; the draft's "
                    'signals can but guess')
    yield Claim('F4: read saved over rsd (notes: 11 %)', 'notes', 0.05, beside('read', 'rsd'), saved,
                note=f'modelled: weights read, memory-bound; {note}',
                why='The draft reads each step once more, and the target writes it anew where the gate takes '
                    'a right one for wrong')
    yield Claim('F4: compute saved over rsd (notes: 11 %)', 'notes', 0.05, beside('compute', 'rsd'), saved,
                note=f'modelled: positions, compute-bound; {note}',
                why='Every candidate costs positions, also those that are not chosen; rsd writes one')


def benefit_claim(steps):
    """F5: grounding is to help more where cells are looked up."""
    both = []
    for task in ('math', 'table'):
        both += [(task, columns(problem, steps.scales)) for problem in steps.test[task]]

    def difference(rows):
        arrays = dict(math=[], table=[])
        for task, problem in rows:
            arrays[task].append(problem)
        return advantage(arrays['table']) - advantage(arrays['math'])
    return Claim('F5: gain of F1 on table less that on math, above 0', 'notes', ABOVE_0, both, difference,
                 note=f'n = {len(both)}',
                 why='To look a cell up is to copy, right or wrong: the less is worked out, the less '
                     'grounding tells')


def overhead(part, clock):
    """The target's seconds for a part over those of selection, the pass with rollout and scoring."""
    extra = 0.0
    target = 0.0
    for row in clock:
        seconds = row['seconds']
        extra += seconds['selection'] + seconds['with rollout'] + seconds['scoring']
        target += seconds[part]
    return target / extra


def overhead_claims(clock):
    note = f'measured, n = {len(clock)} steps (notes: 5-10 % of a target pass)'
    for part, name in (('target pass', 'one target pass'), ('target', 'a step of the target')):
        text = f'Overhead: {name} takes 10 times as long as selection, rollout pass and scoring'
        yield Claim(text, 'notes', 10, clock, partial(overhead, part), note=note, why=DRAFT_PASS)


def nats_over_target(rows):
    """The target's nats a token of what the default preset wrote, less those of the target's own text."""
    def nats_a_token(name):
        stories = stories_by(rows, name)
        return total(stories, 'nats') / total(stories, 'tokens')
    return nats_a_token('notes') - nats_a_token('target')


def story_claim(rows):
    """The negative control: the notes admit that texts without steps degrade."""
    text = "Stories, without steps: the target's nats a token, less those of its own text, above 0"
    return Claim(text, 'notes', ABOVE_0, rows, nats_over_target, note=f'n = {len(rows)}',
                 why='A small draft may run into common phrases, which the target finds likelier than its '
                     'own text')


# ------------------------------------------------------------------------------------------------- the tables

def tables(stored):
    steps = split(stored['steps'].rows)
    rows = stored['runs'].rows
    sizes = {row['model']: row['bytes'] for row in stored['weights'].rows}
    signals = ('task', 'steps', 'right', 'of the target', 'signal', 'AUROC', 'AUROC at equal length',
               'AUPRC of wrong', 'rank correlation with length')
    ablations = ('table', 'setting', 'notes: points', 'notes: speed', *TASKS, 'target steps',
                 'modelled speed / sd, memory-bound', 'compute-bound')
    transfer = 'chosen on', 'beta', 'tau', 'kept steps right', 'used on', 'right', 'target steps'
    contest = ('method', 'n', *TASKS, 'points over sd (95 %)', 'steps right', 'target steps', 'steps clipped',
               's a text', 'read / sd', 'computed / sd')
    costs = ('part of a step', 'notes, ms a token', 'ms a step', 'over the target alone',
             'modelled, the same')
    stories = 'stories', 'target steps', 'tokens a step', 'cut in mid-sentence', "target's nats a token"
    limits = 'limit', 'steps', 'L', 'G'
    return [
        PageTable(signals, [*signal_cells(steps)]),
        PageTable(ablations, [*ablation_cells(steps, sizes, rows)]),
        PageTable(transfer, [*transfer_cells(steps)]),
        PageTable(contest, [*contest_cells(rows)]),
        PageTable(costs, [*cost_cells(stored['clock'].rows, sizes, rows)]),
        PageTable(stories, [*story_cells(stored['stories'].rows)]),
        PageTable(limits, [*limit_cells(steps)])]


def signal_cells(steps):
    """How well each signal tells right steps from wrong ones, also among steps of equal length."""
    for task, problems in steps.test.items():
        seen = judged_steps(problems, steps.scales)
        score, L, G, right, tokens = numpy.array(seen, dtype=float).T
        own = []                            # whether each step of the target's is right
        for problem in problems:
            own += problem['own']['right']
        for name, signal in (('score', score), ('L', L), ('G', G)):
            yield (task, len(seen), float(right.mean()), mean(own), name, roc_area(signal, right),
                   area_at_equal_length(signal, right, tokens), average_precision(-signal, 1 - right),
                   rank_correlation(signal, tokens))


def area_at_equal_length(signal, right, tokens):
    """The mean AUROC among steps of one length, weighted by its pairs of a right and a wrong one."""
    areas = 0.0
    count = 0
    for length in numpy.unique(tokens):
        equal = tokens == length
        good = right[equal].sum()
        pairs = good * (equal.sum() - good)
        if pairs:
            areas += pairs * roc_area(signal[equal], right[equal])
            count += pairs
    return float(areas / count) if count else math.nan


def average_precision(scores, labels):
    """Mean precision: of those scored as high as a true one, the share that is true, on average."""
    ranked = sorted(zip(scores, labels), reverse=True)
    seen = 0
    hits = 0
    precisions = 0.0
    for _, tied in itertools.groupby(ranked, key=lambda pair: pair[0]):
        true = [label for _, label in tied]
        seen += len(true)
        hits += sum(true)
        precisions += sum(true) * hits / seen
    return float(precisions / hits) if hits else math.nan


def rank_correlation(a, b):
    """Spearman's; nan where one side does not vary."""
    if len({*a}) < 2 or len({*b}) < 2:
        return math.nan
    return float(scipy.stats.spearmanr(a, b).statistic)


def ablation_cells(steps, sizes, rows):
    """The notes' tables beside the record's: points over exact decoding, target steps, speeds.

    sizes: weight bytes of a pass by model. The speed is modelled as if memory-bound, by the bytes read, and
    as if compute-bound, by those times positions; that of exact decoding is by its runs' bytes a token.
    """
    base = {}
    for task, problems in steps.test.items():
        base[task] = average(outcomes(problems, steps.scales, replace(USUAL, tau=math.inf)), 'right')
    exact_read = exact_bytes(rows, 'read')
    exact_compute = exact_bytes(rows, 'compute')
    for table, setting, accuracy, speed, change in NOTES:
        changed = replace(USUAL, **change)
        texts = []
        gains = []
        sd_read = sd_compute = 0.0
        for task, problems in steps.test.items():
            found = outcomes(problems, steps.scales, changed)
            texts += found
            gains.append(f'{100 * (average(found, "right") - base[task]):+.1f}')
            sd_read += exact_read[task] * total(found, 'tokens')
            sd_compute += exact_compute[task] * total(found, 'tokens')
        read = total(texts, 'drafts') * sizes['draft'] + total(texts, 'targets') * sizes['target']
        compute = total(texts, 'drafted') * sizes['draft'] + total(texts, 'verified') * sizes['target']
        yield (table, setting, accuracy, speed, *gains, average(texts, 'wrote'), sd_read / read,
               sd_compute / compute)


def exact_bytes(rows, field):
    """{task: bytes, `read` or `compute`, of exact speculative decoding for a token}."""
    found = {}
    for task in TASKS:
        mine = runs_of(of_task(rows, task), 'sd')
        found[task] = share(mine, field, 'tokens')
    return found


def transfer_cells(steps):
    """What beta and tau chosen on one task (kept steps 95 % right, or nearest to it) are worth on another."""
    for source, problems in steps.tune.items():
        seen = [(step.L, step.G, step.right) for step in judged_steps(problems, steps.scales)]
        best = choose_gate(gate_curve(seen, steps.scales[USUAL.rollout].ranges), 0.95)
        setting = replace(USUAL, beta=best['beta'], tau=best['tau'])
        for task, others in steps.test.items():
            found = outcomes(others, steps.scales, setting)
            yield (source, best['beta'], best['tau'], best['right'], task, average(found, 'right'),
                   average(found, 'wrote'))


def contest_cells(rows):
    """Right by task, all beside exact decoding's, shares of steps, seconds a text, costs over sd's.

    Of the steps: those right of all that were written, those of the target, those with a signal clipped.
    """
    for name in rows[0]['runs']:
        some = [row for row in rows if name in row['runs']]
        mine = runs_of(some, name)
        exact = runs_of(some, 'sd')
        by_task = [average(runs_of(of_task(some, task), name), 'right') for task in TASKS]
        pairs = [Pair('', 100 * text.right, 100 * other.right) for text, other in zip(mine, exact)]
        figure, low, high = interval(pairs, gain)
        wrote = share(mine, 'wrote', 'cycles') if name not in ('ar', 'sd') else '-'
        yield (name, len(some), *by_task, f'{figure:+.1f} ({low:+.1f} to {high:+.1f})',
               share(mine, 'sound', 'steps'), wrote, share(mine, 'clipped', 'scored'),
               average(mine, 'seconds'), total(mine, 'read') / total(exact, 'read'),
               total(mine, 'compute') / total(exact, 'compute'))


def share(runs, part, whole):
    """One field's sum over runs in another's; - where there is nothing."""
    count = total(runs, whole)
    return total(runs, part) / count if count else '-'


def cost_cells(clock, sizes, rows):
    """A step's parts: the notes' ms a token, our ms; measured and modelled over the target's own step."""
    wrote = share(runs_of(rows, 'notes, seed 0'), 'wrote', 'cycles')
    ms = {part: 1000 * mean(row['seconds'][part] for row in clock) for part in clock[0]['seconds']}
    drafted = mean(row['drafted'] for row in clock)
    draft_pass = sizes['draft']
    target_step = mean(row['own'] for row in clock) * sizes['target']           # bytes
    rollout = ms['with rollout'] - ms['reading again']
    its_share = f'target, where it writes ({wrote:.0%} of steps)'
    parts = [Part('draft, k candidates side by side', '8', ms['draft'], drafted * draft_pass),
             Part('selection', '0.3', ms['selection'], 0.0),
             Part('the draft reads the step again', '-', ms['reading again'], draft_pass),
             Part('rollout on top of it', '0.4', rollout, 0.0),
             Part('scoring', '0.2', ms['scoring'], 0.0),
             Part(its_share, '-', wrote * ms['target'], wrote * target_step)]
    parts += [Part('all of it', '1.5', total(parts, 'ms'), total(parts, 'read')),
              Part('the target alone', '5.0', ms['target'], target_step),
              Part('one target pass', '0.5', ms['target pass'], sizes['target'])]
    for part in parts:
        yield part.name, part.notes, part.ms, part.ms / ms['target'], part.read / target_step


class Part(NamedTuple):
    """What a part of a step costs."""
    name: str
    notes: str                      # ms a token, in the notes
    ms: float                       # a step, measured
    read: float                     # bytes of weights, modelled


def stories_by(rows, name):
    """[Story] of a method."""
    return [Story(*row[name]) for row in rows]


def story_cells(rows):
    """The negative control: texts without steps. nats: of the target, a token of what was written."""
    for name in rows[0]:
        stories = stories_by(rows, name)
        yield (name, share(stories, 'wrote', 'cycles'), share(stories, 'tokens', 'cycles'),
               share(stories, 'cut', 'cycles'), share(stories, 'nats', 'tokens'))


def limit_cells(steps):
    """What the notes admit, seen in recorded steps: copies are grounded, wrong steps can be sure."""
    looked_up = []                          # G of each such step
    others = []
    wrong = []                              # (L, G, text)
    for problem in itertools.chain(*steps.test.values()):
        for i in problem['picks'][USUAL.pick]:
            L, G = signals_of(problem, i, USUAL.rollout)
            text = problem['candidates']['text'][i].strip()
            group = looked_up if text.startswith('|') else others
            group.append(G)
            if not problem['candidates']['right'][i]:
                wrong.append((L, G, text))
    yield 'cells looked up, on average', f'{len(looked_up)} steps', '-', mean(looked_up)
    yield 'anything else, on average', f'{len(others)} steps', '-', mean(others)
    for at, name in ((0, 'L'), (1, 'G')):
        if wrong:
            L, G, text = max(wrong, key=lambda step: step[at])
            yield f'highest {name} of {len(wrong)} wrong steps', quoted(text), L, G


def quoted(text):
    """A text as it stands in a cell of a table, where a bar would end the cell."""
    return f'`{text.strip()}`'.replace('|', r'\|')
