"""SpecGuard's claims and tables, judged by what record.py stored, with either of two drafts.

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
from lab.specguard.answer_claims import (ABOVE_0, ALIKE, GROUNDED, WEAKER, advantage, answer_claims,
                                         answer_tables, area_within, grounding_area)
from lab.specguard.calibrate import choose_gate, gate_curve, signal_ranges
from lab.specguard.record import SEEDS, Run, Story
from lab.specguard.sessions import TASKS
from lab.specguard.steps import CANDIDATES, ROLLOUTS
from lab.specguard.tier_claims import tier_claims, tier_tables
from verify import step_score

DEFAULT = [f'notes, seed {seed}' for seed in range(SEEDS)]      # the runs at the default preset
KINDS = 'look-up', 'work', 'answer'                             # of steps; work: arithmetic, or a function
SHARES = [i / 10 for i in range(11)]                            # of the steps, that the target writes
ENOUGH = 10         # wrong steps among them, for an AUROC to say anything
SURER = 0.75        # confident steps: this share of them, by L

# why a claim may fail, where several share the reason
COPIED = 'To look a cell up is to copy, right or wrong: the less is worked out, the less grounding tells'
OUTVOTED = 'Half of the score is grounding, which can outvote the confidence that tells wrong steps'
OWN_STEP = ("Exact decoding writes what the target would; a step that is kept is the draft's, and one wrong "
            'step that passes the gate spoils the answer')
READ_AGAIN = ('The draft reads each step once more, and the target writes it anew where the gate takes a '
              'right one for wrong')
SIDE_BY_SIDE = 'Every candidate costs positions, also those that are not chosen; the rival writes one'
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
    kind: int                       # of KINDS


def kind_of(text):
    """Which of KINDS a step is, by its own text."""
    text = text.strip()
    if text.startswith('|'):
        return KINDS.index('look-up')
    return KINDS.index('answer' if text.startswith('Answer') else 'work')


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
        kind = kind_of(problem['candidates']['text'][i])
        found.append(Judged(score, *signals, right[i], tokens[i], kind))
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
    """Those of one task; rows: dicts or Pairs."""
    return [row for row in rows if (row.task if isinstance(row, Pair) else row['task']) == task]


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


def beside(rows, field, mine, other):
    """[Pair] of a field of Run: the mean over the runs of these names, and that of another name."""
    found = []
    for row in rows:
        values = [getattr(run(row, name), field) for name in mine]
        found.append(Pair(row['task'], mean(values), getattr(run(row, other), field)))
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


# ------------------------------------------------------------------- gates at equal shares of target steps

class Board(NamedTuple):
    """Recorded steps of many problems in one row, for gates that are compared at equal target shares."""
    scores: dict                    # by gate: array [steps], higher is kept rather
    right: numpy.ndarray            # [steps] the chosen candidate
    own: numpy.ndarray              # [steps] the target's step
    begins: list                    # where each problem's steps begin


def board_of(problems, scales, setting=USUAL):
    """The Board: gates by both signals and by either, a coin, and an oracle that knows the right steps."""
    steps = []
    own = []
    begins = []
    for problem in problems:
        begins.append(len(steps))
        steps += judged(problem, scales, setting)
        own += problem['own']['right']
    score, L, G, right, *_ = numpy.array(steps, dtype=float).T
    scores = dict(both=score, L=L, G=G, coin=0 * score, oracle=right)
    return Board(scores, right, numpy.array(own, dtype=float), begins)


def kept_at(scores, share):
    """[steps] the chance that each is kept where the target writes this share of them, the lowest first.

    Among equal scores a coin decides.
    """
    written = share * len(scores)
    limit = numpy.sort(scores)[min(int(written), len(scores) - 1)]
    below = (scores < limit).sum()
    tied = scores == limit
    kept = (scores > limit).astype(float)
    kept[tied] = 1 - (written - below) / tied.sum()
    return kept


def right_at(board, gate, share):
    """[problems] the chance that a text is right where the target writes this share of all steps."""
    kept = kept_at(board.scores[gate], share)
    chances = kept * board.right + (1 - kept) * board.own
    return numpy.multiply.reduceat(chances, board.begins)


def right_between(board, gate):
    """[problems] the mean of right_at over the target shares between 0 and 1."""
    return numpy.mean([right_at(board, gate, share) for share in SHARES[1:-1]], axis=0)


def pairs_of(mine, other):
    """[Pair] of two arrays."""
    return [Pair('', float(a), float(b)) for a, b in zip(mine, other)]


# ------------------------------------------------------------------------------------------------- the claims

class Evidence(NamedTuple):
    """What was measured with one draft."""
    draft: str
    steps: Steps
    runs: list                      # rows of texts written end to end


def by_draft(stored):
    """[Evidence] with each draft."""
    return [Evidence('draft', split(stored['steps'].rows), stored['runs'].rows),
            Evidence('mid', split(stored['steps_mid'].rows), stored['runs_mid'].rows)]


def claims(stored):
    """What is claimed of the lab's tasks, where they were recorded, and of any pair's own answers."""
    found = lab_claims(stored) if 'steps' in stored else []
    return [*found, *answer_claims(stored), *tier_claims(stored)]


def lab_claims(stored):
    """F1 to F5 (grounds to reject what the method claims), gates, the selector, overhead, stories."""
    found = []
    for seen in by_draft(stored):
        found += [*grounding_claims(seen), benefit_claim(seen), *coin_claims(seen), *gate_claims(seen),
                  *accuracy_claims(seen), *cost_claims(seen)]
    return [*found, alone_claim(stored['runs'].rows), *overhead_claims(stored['clock'].rows),
            story_claim(stored['stories'].rows)]


def columns(problem, scales, setting=USUAL):
    """[steps, 5] of a problem: score, L, G, whether right, kind."""
    rows = []
    for step in judged(problem, scales, setting):
        rows.append((step.score, step.L, step.G, step.right, step.kind))
    return numpy.array(rows, dtype=float)


def grounding_claims(seen):
    """Grounding alone, and F1, a claim a task."""
    for task, problems in seen.steps.test.items():
        rows = [columns(problem, seen.steps.scales) for problem in problems]
        _, L, _, right, kind = numpy.concatenate(rows).T
        room = 1 - area_within(L, right, kind)
        wrong = int((1 - right).sum())
        note = f'n = {len(rows)} problems, {len(L)} steps, {wrong} wrong; L leaves a room of {room:.3f}'
        yield Claim(f'Grounding alone, {task}, {seen.draft}: AUROC within kinds of steps', 'paper', 0.5, rows,
                    grounding_area, note=note, why=GROUNDED)
        if room >= 0.02:                    # else no score could reach the line: the table has to do
            yield Claim(f'F1 {task}, {seen.draft}: AUROC of the score over that of L, within kinds of steps',
                        'paper', 0.02, rows, advantage, note=note, why=WEAKER)


def benefit_claim(seen):
    """F5: grounding is to help where cells are looked up, and more than elsewhere."""
    both = []
    for task in ('math', 'table'):
        both += [(task, columns(problem, seen.steps.scales)) for problem in seen.steps.test[task]]

    def surplus(rows):
        arrays = dict(math=[], table=[])
        for task, problem in rows:
            arrays[task].append(problem)
        gained = advantage(arrays['table'])             # at the most: a smaller loss is no benefit
        return min(gained, gained - advantage(arrays['math']))
    gains = {task: advantage([array for kind, array in both if kind == task]) for task in ('math', 'table')}
    note = f'n = {len(both)}; gains: table {gains["table"]:+.3f}, math {gains["math"]:+.3f}'
    text = f'F5 {seen.draft}: gain of F1 on table, less that on math where this is a gain, above 0'
    return Claim(text, 'notes', ABOVE_0, both, surplus, note=note, why=COPIED)


def coin_claims(seen):
    """F2, on recorded steps and end to end: each task beside a coin of the gate's own rate there; pooled."""
    recorded = []
    for task, problems in seen.steps.test.items():
        steps = judged_steps(problems, seen.steps.scales)
        rate = mean(step.score >= USUAL.tau for step in steps)
        by_score = outcomes(problems, seen.steps.scales)
        by_coin = outcomes(problems, seen.steps.scales, rate=rate)
        for mine, other in zip(by_score, by_coin):
            recorded.append(Pair(task, mine.right, other.right))
    end_to_end = beside(seen.runs, 'right', DEFAULT, 'random-gate')
    for name, pairs in (('on the record', recorded), ('end to end', end_to_end)):
        for task in (*TASKS, 'all'):
            some = pairs if task == 'all' else of_task(pairs, task)
            text = f'F2 {task}, {seen.draft}: right answers over a coin of equal rate in each task, {name}'
            yield Claim(text, 'ours', 0.01, some, gain, note=f'n = {len(some)}', why=OUTVOTED)


def gate_claims(seen):
    """What both signals, grounding alone and the selector are worth at equal shares of target steps."""
    problems = [*itertools.chain(*seen.steps.test.values())]
    four = board_of(problems, seen.steps.scales)
    one = board_of(problems, seen.steps.scales, replace(USUAL, pick='1'))
    note = f'n = {len(problems)}, all tasks under one threshold'
    over_all = f'mean over target shares 0.1 to 0.9; {note}'
    both = right_between(four, 'both')
    yield Claim(f'Gate, {seen.draft}: right answers by both signals over L alone, above 0', 'paper', ABOVE_0,
                pairs_of(both, right_between(four, 'L')), gain, note=over_all, why=OUTVOTED)
    yield Claim(f'Gate, {seen.draft}: right answers by G alone over a coin, above 0', 'paper', ABOVE_0,
                pairs_of(right_between(four, 'G'), right_between(four, 'coin')), gain, note=over_all,
                why=COPIED)
    text = f'Selector, {seen.draft}: right answers of k = 4 over k = 1 (notes: +0.020)'
    yield Claim(f'{text}, at equal target shares, above 0', 'notes', ABOVE_0,
                pairs_of(both, right_between(one, 'both')), gain, note=over_all, why=ALIKE)
    share = float((four.scores['both'] < USUAL.tau).mean())
    yield Claim(f"{text}, at the default preset's target share, above 0", 'notes', ABOVE_0,
                pairs_of(right_at(four, 'both', share), right_at(one, 'both', share)), gain,
                note=f'target share {share:.3f}; {note}', why=ALIKE)


def accuracy_claims(seen):
    """F3 and the like: right answers of texts that were written end to end."""
    note = f'n = {len(seen.runs)}'
    contests = ((DEFAULT, f'the default preset (mean of {SEEDS} seeds)'), (['paper'], 'preset=paper'),
                (['calibrated'], 'the calibrated gate'))
    for mine, name in contests:
        yield Claim(f'F3 {seen.draft}: right answers of {name} over exact decoding, above 0', 'paper',
                    ABOVE_0, beside(seen.runs, 'right', mine, 'sd'), gain, note=note, why=OWN_STEP)
    yield Claim(f'Notes, {seen.draft}: right answers of the default preset over rsd (+0.024 to +0.035)',
                'notes', ABOVE_0, beside(seen.runs, 'right', DEFAULT, 'rsd'), gain,
                note=f'{note}, mean of {SEEDS} seeds',
                why="The rival's reward is the task's own checker, which knows what is right; the draft's "
                    'signals can but guess')


def alone_claim(rows):
    """What the paper's gain is to come from mainly: the target chooses among candidates of its own, too."""
    return Claim('Target alone: right answers of the most central of 16 steps at T = 0.7 over exact decoding '
                 'at 0, above 0', 'paper', ABOVE_0, beside(rows, 'right', ['paper, target alone'], 'sd'),
                 gain, note=f'n = {len(rows)}', why=ALIKE)


def cost_claims(seen):
    """F4: costs beside those of rsd, with a target that writes alone, with the draft's help; beside sd's.

    A gate that keeps wrong steps is cheap: each note says by how many points the answers differ.
    """
    helped = "over rsd, both with the draft's help (notes: 11 %)"
    contests = (
        (DEFAULT, 'rsd', f'F4 {seen.draft}', f'the default preset over rsd, {SEEDS} seeds (notes: 11 %)'),
        (['notes, with sd'], 'rsd, with sd', f'F4 {seen.draft}', f'the default preset {helped}'),
        (['calibrated, with sd'], 'rsd, with sd', f'F4 {seen.draft}', f'the calibrated gate {helped}'),
        (['calibrated, with sd'], 'sd', f'Cost {seen.draft}',
         "the calibrated gate with the draft's help over sd (notes: 11 %)"))
    for mine, other, label, name in contests:
        points = 100 * gain(beside(seen.runs, 'right', mine, other))
        note = f'modelled, n = {len(seen.runs)}; right answers: {points:+.1f} points'
        yield Claim(f'{label}: read saved by {name}', 'notes', 0.05, beside(seen.runs, 'read', mine, other),
                    saved, note=f'weights read, memory-bound, {note}', why=READ_AGAIN)
        yield Claim(f'{label}: compute saved by {name}', 'notes', 0.05,
                    beside(seen.runs, 'compute', mine, other), saved,
                    note=f'positions, compute-bound, {note}', why=SIDE_BY_SIDE)


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
    for preset in ('notes', 'paper'):
        rows = of_preset(clock, preset)
        note = f'measured, n = {len(rows)} steps (notes: 5-10 % of a target pass)'
        for part, name in (('target pass', 'one target pass'), ('target', 'a step of the target')):
            yield Claim(f'Overhead, {preset}: {name} takes 10 times as long as selection, rollout pass and '
                        'scoring', 'notes', 10, rows, partial(overhead, part), note=note, why=DRAFT_PASS)


def of_preset(clock, preset):
    return [row for row in clock if row['preset'] == preset]


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
    """Those of the lab's tasks, where they were recorded, and those of any pair's own answers."""
    found = lab_tables(stored) if 'steps' in stored else []
    return [*found, *answer_tables(stored), *tier_tables(stored)]


def lab_tables(stored):
    sizes = {row['model']: row['bytes'] for row in stored['weights'].rows}
    signals = ('draft', 'task', 'signal', 'AUROC, all kinds together', 'within kinds',
               'within, of the confident', 'at equal length', 'AUPRC of wrong',
               'rank correlation with length')
    kinds = ('draft', 'task', 'kind of step', 'steps', 'right', 'wrong among the confident', 'mean G',
             'AUROC: score', 'L', 'G')
    curve = 'right at target share', 'task', 'gate', *[f'{share:g}' for share in SHARES]
    ablations = ('draft', 'table', 'setting', 'notes: points', 'notes: speed', *TASKS, 'target steps',
                 'modelled speed / sd, memory-bound', 'compute-bound')
    transfer = ('draft', 'chosen on', 'beta', 'tau', 'kept steps right', 'surely', 'used on', 'right',
                'target steps')
    contest = ('draft', 'method', 'n', *TASKS, 'points over sd (95 %)', 'steps right', 'target steps',
               'steps clipped', 's a text', 'read / sd', 'computed / sd')
    gates = 'calibrated with', 'beta', 'tau', 'percentiles of L', 'of G', 'steps that chose'
    costs = ('preset', 'part of a step', 'notes, ms a token', 'ms a step', 'over the target alone',
             'modelled, the same')
    stories = 'stories', 'target steps', 'tokens a step', 'cut in mid-sentence', "target's nats a token"
    limits = 'draft', 'limit', 'steps', 'L', 'G'
    both = by_draft(stored)
    clock = stored['clock'].rows
    runs = stored['runs'].rows
    return [
        PageTable(kinds, together(kind_cells, both)),
        PageTable(signals, together(signal_cells, both)),
        PageTable(curve, together(curve_cells, both)),
        PageTable(contest, together(contest_cells, both)),
        PageTable(gates, [*gate_cells(stored['gates'].rows)]),
        PageTable(transfer, together(transfer_cells, both)),
        PageTable(ablations, together(partial(ablation_cells, sizes=sizes), both)),
        PageTable(costs, [*cost_cells(of_preset(clock, 'notes'), sizes, runs_of(runs, DEFAULT[0])),
                          *cost_cells(of_preset(clock, 'paper'), sizes, runs_of(runs, 'paper'))]),
        PageTable(stories, [*story_cells(stored['stories'].rows)]),
        PageTable(limits, together(limit_cells, both))]


def together(cells, both):
    """The rows that `cells` yields of each Evidence, behind the name of its draft; - for nan."""
    rows = []
    for seen in both:
        for row in cells(seen):
            shown = ['-' if cell != cell else cell for cell in row]
            rows.append((seen.draft, *shown))
    return rows


def surest(L):
    """Which of the steps are confident: the share SURER of them with the highest L [steps]."""
    return L >= numpy.quantile(L, 1 - SURER)


def kind_cells(seen):
    """Right steps, grounding and the AUROC of each signal, of each kind of step and of all together."""
    for task, problems in seen.steps.test.items():
        rows = numpy.concatenate([columns(problem, seen.steps.scales) for problem in problems])
        confident = surest(rows[:, 1])
        kinds = rows[:, 4]
        for kind in (*numpy.unique(kinds), None):
            chosen = kinds == kind if kind is not None else kinds == kinds
            score, L, G, right, _ = rows[chosen].T
            wrong = int((1 - right)[confident[chosen]].sum())
            name = 'all' if kind is None else KINDS[int(kind)]
            yield (task, name, len(right), float(right.mean()), wrong, float(G.mean()),
                   roc_area(score, right), roc_area(L, right), roc_area(G, right))


SIGNALS = [         # (name, what it is of columns, by which rollout)
    ('score', 0, 'draft last 3'), ('L', 1, 'draft last 3'), ('G', 2, 'draft last 3'),
    ('G without the first token', 2, 'without the first'),
    ("L of the target", 1, 'target last 3'), ("G of the target", 2, 'target last 3'),
    ("G of the target without the first token", 2, 'target without the first')]


def signal_cells(seen):
    """How well each signal tells right steps from wrong ones: within kinds, among confident ones, ..."""
    for task, problems in seen.steps.test.items():
        steps = judged_steps(problems, seen.steps.scales)
        tokens = numpy.array([step.tokens for step in steps])
        confident = surest(numpy.array([step.L for step in steps]))
        for name, column, rollout in SIGNALS:
            setting = replace(USUAL, rollout=rollout)
            rows = numpy.concatenate([columns(problem, seen.steps.scales, setting) for problem in problems])
            signal, right, kind = rows[:, column], rows[:, 3], rows[:, 4]
            sure = math.nan
            if (right[confident] == 0).sum() >= ENOUGH:
                sure = area_within(signal[confident], right[confident], kind[confident])
            yield (task, name, roc_area(signal, right), area_within(signal, right, kind), sure,
                   area_within(signal, right, tokens), average_precision(-signal, 1 - right),
                   rank_correlation(signal, tokens))


def curve_cells(seen):
    """Right answers of each gate by the share of steps that the target writes."""
    every = [*itertools.chain(*seen.steps.test.values())]
    for task, problems in (*seen.steps.test.items(), ('all', every)):
        board = board_of(problems, seen.steps.scales)
        for gate in board.scores:
            yield task, gate, *[float(right_at(board, gate, share).mean()) for share in SHARES]


def gate_cells(rows):
    """The calibrated gate of each pair."""
    for row in rows:
        ends = [' to '.join(f'{x:.3g}' for x in row[f'draft_{signal}']) for signal in ('logp', 'grounding')]
        yield row['draft'], row['beta'], row['tau'], *ends, row['steps']


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


def ablation_cells(seen, sizes):
    """The notes' tables beside the record's: points over exact decoding, target steps, speeds.

    sizes: weight bytes of a pass by model. The speed is modelled as if memory-bound, by the bytes read, and
    as if compute-bound, by those times positions; that of exact decoding is by its runs' bytes a token.
    """
    base = {}
    for task, problems in seen.steps.test.items():
        base[task] = average(outcomes(problems, seen.steps.scales, replace(USUAL, tau=math.inf)), 'right')
    exact_read = exact_bytes(seen.runs, 'read')
    exact_compute = exact_bytes(seen.runs, 'compute')
    for table, setting, accuracy, speed, change in NOTES:
        changed = replace(USUAL, **change)
        if changed.rollout not in seen.steps.scales:        # not recorded with this draft
            continue
        texts = []
        gains = []
        sd_read = sd_compute = 0.0
        for task, problems in seen.steps.test.items():
            found = outcomes(problems, seen.steps.scales, changed)
            texts += found
            gains.append(f'{100 * (average(found, "right") - base[task]):+.1f}')
            sd_read += exact_read[task] * total(found, 'tokens')
            sd_compute += exact_compute[task] * total(found, 'tokens')
        read = total(texts, 'drafts') * sizes[seen.draft] + total(texts, 'targets') * sizes['target']
        compute = total(texts, 'drafted') * sizes[seen.draft] + total(texts, 'verified') * sizes['target']
        yield (table, setting, accuracy, speed, *gains, average(texts, 'wrote'), sd_read / read,
               sd_compute / compute)


def exact_bytes(rows, field):
    """{task: bytes, `read` or `compute`, of exact speculative decoding for a token}."""
    found = {}
    for task in TASKS:
        mine = runs_of(of_task(rows, task), 'sd')
        found[task] = share(mine, field, 'tokens')
    return found


def transfer_cells(seen):
    """What beta and tau chosen on one task (kept steps surely 95 % right, or nearest) do on another."""
    scales = seen.steps.scales
    for source, problems in seen.steps.tune.items():
        tuned = [(step.L, step.G, step.right) for step in judged_steps(problems, scales)]
        best = choose_gate(gate_curve(tuned, scales[USUAL.rollout].ranges), 0.95)
        setting = replace(USUAL, beta=best['beta'], tau=best['tau'])
        for task, others in seen.steps.test.items():
            found = outcomes(others, scales, setting)
            yield (source, best['beta'], best['tau'], best['right'], best['sure'], task,
                   average(found, 'right'), average(found, 'wrote'))


def contest_cells(seen):
    """Right by task, all beside exact decoding's, shares of steps, seconds a text, costs over sd's.

    Of the steps: those right of all that were written, those of the target, those with a signal clipped.
    """
    for name in seen.runs[0]['runs']:
        some = [row for row in seen.runs if name in row['runs']]
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


def cost_cells(clock, sizes, runs):
    """A step's parts at one preset: the notes' ms a token, our ms; measured and modelled over the target's.

    Modelled by the weights read: side by side, the target's candidates cost as much as one.
    """
    preset = clock[0]['preset']
    wrote = share(runs, 'wrote', 'cycles')
    ms = {part: 1000 * mean(row['seconds'][part] for row in clock) for part in clock[0]['seconds']}
    drafted = mean(row['drafted'] for row in clock)
    draft_pass = sizes['draft']
    target_step = mean(row['own'] for row in clock) * sizes['target']           # bytes
    rollout = ms['with rollout'] - ms['reading again']
    its_share = f'the target, where it writes ({wrote:.0%} of steps)'
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
        yield preset, part.name, part.notes, part.ms, part.ms / ms['target'], part.read / target_step


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


def limit_cells(seen):
    """What the notes admit, seen in recorded steps: copies are grounded, wrong steps can be sure."""
    looked_up = []                          # G of each such step
    others = []
    wrong = []                              # (L, G, text)
    for problem in itertools.chain(*seen.steps.test.values()):
        for i in problem['picks'][USUAL.pick]:
            L, G = signals_of(problem, i, USUAL.rollout)
            text = problem['candidates']['text'][i].strip()
            group = looked_up if kind_of(text) == KINDS.index('look-up') else others
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
