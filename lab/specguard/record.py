"""What SpecGuard's claims rest on, measured: recorded steps, whole runs, times, stories.

A wrong step is never mended on the tasks with steps, so a text is right if all of its steps are. Accuracy and
share of target steps follow from recorded steps, for any gate, selector or threshold, without another run.
`python -m lab.specguard.record` draws what each token of one step leans on.
"""
import functools
import math
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import NamedTuple

import torch
from tqdm import tqdm

import kernels
from lab import tasks
from lab.common import MODELS, embedded, held_out_rows
from lab.specguard.calibrate import find_signals
from lab.specguard.rivals import (Beam, BestOfN, Majority, OracleGate, PooledStep, ProcessBestOfN, RandomGate,
                                  RewardGuided, SpecReason, Unseen, sureness)
from lab.specguard.sessions import TASKS, engine_for, graded_session, short_rows
from model import Reader, expect, read_calibration
from verify import (Autoregressive, Exact, Session, SpecGuard, decode, most_central, token_logps, tokens_of,
                    write_steps)

FULL = 100          # problems of each task that are run end to end by what a claim compares
PART = 40           # and by what is only shown
WITH_MID = 200      # problems of each task whose steps are recorded with `mid` as draft
RUN_WITH_MID = 60   # and that are run end to end
SEEDS = 3           # runs at the default preset, each with other draws of the draft
TIMED = 10          # problems of each task whose first step is timed
TURNS = 5           # how often; the least time counts
STORIES = 40
CANDIDATES = {'1': 1, '2': 2, '4': 4, '8': 8, 'common': 4}      # selectors, and how many they choose from
REWARD_BYTES = 4_000_000            # what a pass of a reward model reads: 1 M parameters in fp32
DRAFT_ONLY = Unseen(k=1, draft_temperature=0.0, tau=-math.inf)  # its own text, as greedy as the target's


# ------------------------------------------------------------------------------------- what a pair brings

@functools.cache
def signals_of_pair(draft):
    """The section `signals` of the target with a draft of lab/models: scales, beta and tau.

    calibration.json has that of `draft`; that of `mid` is measured here, as train_mask.py --signals would.
    """
    if draft == 'draft':
        return read_calibration(MODELS / 'target', MODELS / 'draft', ['signals'])['signals']
    return find_signals(MODELS / 'target', MODELS / draft, rows=60, seed=0, accuracy=0.95)


def gate_rows(n):
    """Rows, one a draft: its name, and the section `signals` of the pair."""
    for draft in ('draft', 'mid'):
        yield dict(signals_of_pair(draft), draft=draft)         # its name, not its fingerprint


def weight_rows(n):
    """Rows: the bytes of weights that one pass of a model reads."""
    for name in ('target', 'draft', 'mid'):
        model, _, _ = embedded(name)
        yield dict(model=name, bytes=model.read_bytes(model.full))


# --------------------------------------------------------------------------------- the signals of a step

class Rollout(NamedTuple):
    """What grounding is measured by."""
    who: str                    # whose attention, draft or target
    layers: str                 # which of its layers: first, middle, last, all
    n: int                      # how many
    sparsify: float = 0.01      # attention weights below it are dropped
    residual: float = 0.0       # the identity's share of a layer
    row: str = 'own'            # a token's own row, or `predicting`: the one before, which predicts it
    first: bool = True          # False: without the prompt's first token


ROLLOUTS = {        # the first is what SpecGuard's defaults look at
    'draft last 3': Rollout('draft', 'last', 3),
    'draft last 1': Rollout('draft', 'last', 1),
    'sparsify 0': Rollout('draft', 'last', 3, sparsify=0.0),
    'sparsify 0.05': Rollout('draft', 'last', 3, sparsify=0.05),
    'residual 0.5': Rollout('draft', 'last', 3, residual=0.5),
    'predicting row': Rollout('draft', 'last', 3, row='predicting'),
    'without the first': Rollout('draft', 'last', 3, first=False),
    'target last 1': Rollout('target', 'last', 1),
    'target last 2': Rollout('target', 'last', 2),
    'target last 3': Rollout('target', 'last', 3),
    'target last 6': Rollout('target', 'last', 6),
    'target first 3': Rollout('target', 'first', 3),
    'target middle 3': Rollout('target', 'middle', 3),
    'target all': Rollout('target', 'all', 3),
    'target without the first': Rollout('target', 'last', 3, first=False)}

FEW_ROLLOUTS = ('draft last 3', 'draft last 1', 'without the first', 'target last 1', 'target last 3',
                'target without the first')     # those recorded with `mid`


def observe(session, who, step, rollouts):
    """(lowest log-probability of a step's ids, {rollout: lowest grounding}) by one model, in one pass.

    who: draft or target. Log-probabilities in nats at temperature 1, grounding 0..1.
    """
    reader = getattr(session, who)
    full = reader.model.full
    mine = {name: ROLLOUTS[name] for name in rollouts if ROLLOUTS[name].who == who}
    cuts = {rollout.sparsify for rollout in mine.values()}
    T = len(step)
    layers = []                             # of each layer: {sparsify: attention weights [1, T, S]}

    def watch(q, k, v, mask, carry):
        rows = kernels.full_mask(mask, q, k)[-T:]
        layers.append({cut: kernels.attention_rows(q[:, :, -T:], k, rows, cut) for cut in cuts})
        return kernels.attend(q, k, v, mask, carry)
    path = replace(full, name='observed', attends=(watch,) * len(full.attends))
    logits = reader.read(session.tokens, step, path, T + 1)[:-1]
    lowest = float(token_logps(logits, step).min())
    return lowest, {name: lowest_grounding(full, layers, rollout) for name, rollout in mine.items()}


def lowest_grounding(full, layers, rollout):
    """The least share of a step's tokens on the text before it, 0..1; layers: see observe."""
    attends = full.grounded(rollout.layers, rollout.n).attends
    shades = None
    for weights, attend in zip(layers, attends):
        if attend is kernels.grounded:
            rows = weights[rollout.sparsify]
            if not rollout.first:
                rows = without_first(rows)
            shades = kernels.shade(rows, shades, rollout.residual)
    shares = shades[0].sum(-1).tolist()
    if rollout.row == 'predicting':
        shares = [1.0] + shares[:-1]        # the row that predicts the first token is of the text before
    return min(shares)


def without_first(weights):
    """Attention rows [B, T, S] without the first token, the rest scaled up to sum to 1.

    Much attention goes to the first token for want of anything better (a sink): that is no grounding.
    Source: Xiao et al. 2023 (attention sinks).
    """
    rest = weights.clone()
    rest[..., 0] = 0
    return rest / rest.sum(-1, keepdim=True).clamp(min=1e-9)


def whole_rollout(model, line, layers, sparsify, residual):
    """[N, N], the rollout of a text (ids) as the paper has it: whole matrices of these layers, multiplied.

    Made head by head and row by row: the oracle of kernels.shade, and the only way to the grounding in a part
    of the earlier tokens.
    """
    seen = []                               # of each layer: attention [N, N], the mean over its heads

    def watch(q, k, v, mask, carry):
        share = q.shape[1] // k.shape[1]    # query heads to a key head
        total = torch.zeros(len(line), len(line), dtype=q.dtype)
        for head, queries in enumerate(q[0]):
            keys = k[0, head // share]
            scores = queries @ keys.T / queries.shape[-1] ** 0.5
            weights = (scores + kernels.causal_mask(*scores.shape, scores)).softmax(-1)
            for row in weights:
                drop_small(row, sparsify)
            total += weights
        seen.append(total.double() / q.shape[1])
        return kernels.attend(q, k, v, mask, carry)
    path = replace(model.full, attends=(watch,) * len(model.full.attends))
    Reader(model, len(line)).read(line, [], path, 1)
    product = torch.eye(len(line), dtype=torch.float64)
    for i in layers:
        product = (1 - residual) * seen[i] @ product + residual * product
    return product


def drop_small(row, least):
    """Zeroes a row's weights below `least` and scales the rest to sum 1, in place; one of only such stays."""
    large = row >= least
    if large.any():
        row *= large / row[large].sum()


# --------------------------------------------------------------------------------------- record: `steps`

def step_rows(n, draft='draft', rollouts=tuple(ROLLOUTS)):
    """Rows, one a problem, see problem_row; each step stands behind the reference's own earlier ones."""
    expect(n >= 2, f'--n {n}: expected 2 or more; a fifth of the problems sets scales, the rest is judged')
    for task in TASKS:
        rows = short_rows(task, n)
        engine = engine_for(rows, draft=MODELS / draft)
        for row in tqdm(rows, desc=f'steps, {task}', file=sys.stderr, disable=None):
            steps = record_problem(engine, row, rollouts)
            yield problem_row(task, steps)


def mid_step_rows(n):
    """The same with `mid` as draft, of fewer problems, under fewer rollouts."""
    return step_rows(min(n, WITH_MID), 'mid', FEW_ROLLOUTS)


def record_problem(engine, row, rollouts=tuple(ROLLOUTS)):
    """[record_step] of the steps of one problem."""
    session = graded_session(engine, row, Exact())
    prompt = session.tokens
    earlier = ''
    steps = []
    for line in row['solution'].lstrip('\n').split('\n'):
        session.tokens = prompt + engine.tokenizer.encode(earlier, add_special_tokens=False).ids
        steps.append(record_step(session, rollouts))
        earlier = (earlier or '\n') + line + '\n'
    return steps


def record_step(session, rollouts=tuple(ROLLOUTS), k=8):
    """One step, written by the draft k times side by side and by the target once, as a dict.

    candidates: those that a selector chooses, each once, with what candidate_of says. picks: the index of the
    chosen one by selector. passes: of the draft, by how many are written side by side, until the longest is
    over. own: tokens and right of the target's step. same: with how many of its tokens a candidate begins,
    which the draft then need not read again.
    """
    method = SpecGuard(k=k, tau=math.inf)
    drafts = write_steps(session, method, session.draft, k)
    picks = {}
    passes = {}
    chosen = []                             # ids of each candidate
    for selector, i in chosen_candidates(drafts).items():
        if drafts[i].tokens not in chosen:
            chosen.append(drafts[i].tokens)
        picks[selector] = chosen.index(drafts[i].tokens)
        count = CANDIDATES[selector]
        passes[str(count)] = max(len(draft.tokens) for draft in drafts[:count])
    candidates = [candidate_of(session, ids, rollouts) for ids in chosen]
    own = write_steps(session, method, session.target, 1)[0].tokens
    for ids, candidate in zip(chosen, candidates):
        candidate['same'] = len(os.path.commonprefix([ids, own]))
    right = session.checker(session.tokens + own)
    return dict(candidates=candidates, picks=picks, passes=passes, own=dict(tokens=len(own), right=right))


def chosen_candidates(drafts):
    """{selector: index of the Draft that it chooses}: the most central of the first n, or the commonest."""
    steps = [draft.tokens for draft in drafts]
    logps = [sureness(draft) for draft in drafts]
    found = {}
    for selector, count in CANDIDATES.items():
        if selector == 'common':
            (commonest, _), = Counter(map(tuple, steps[:count])).most_common(1)
            found[selector] = steps.index(list(commonest))
        else:
            found[selector] = most_central(steps[:count], logps[:count])
    return found


def candidate_of(session, ids, rollouts):
    """What is recorded of a candidate: its text, length, whether it is right, and its weakest signals.

    logp: by model, nats. ungrounded: by rollout, 1 - G, since G is often so near 1 that the digits of a
    stored number would not tell two of them apart.
    """
    draft_logp, by_draft = observe(session, 'draft', ids, rollouts)
    target_logp, by_target = observe(session, 'target', ids, rollouts)
    ungrounded = {name: 1 - grounding for name, grounding in (by_draft | by_target).items()}
    return dict(text=session.text(ids), tokens=len(ids), right=session.checker(session.tokens + ids),
                logp=dict(draft=draft_logp, target=target_logp), ungrounded=ungrounded)


def problem_row(task, steps):
    """The stored row of a problem: column by column, for names that are not repeated at each step.

    candidates, logp and ungrounded have a value a candidate, of all steps in turn; picks (an index into
    those), passes and own have a value a step.
    """
    row = dict(task=task, picks={}, passes={}, own={}, candidates={}, logp={}, ungrounded={})

    def add(part, values):
        for name, value in values.items():
            row[part].setdefault(name, []).append(value)
    count = 0
    for step in steps:
        add('picks', {selector: count + i for selector, i in step['picks'].items()})
        add('passes', step['passes'])
        add('own', step['own'])
        for candidate in step['candidates']:
            add('candidates', {name: candidate[name] for name in ('text', 'tokens', 'right', 'same')})
            add('logp', candidate['logp'])
            add('ungrounded', candidate['ungrounded'])
        count += len(step['candidates'])
    return row


# ---------------------------------------------------------------------------------------- record: `runs`

class Run(NamedTuple):
    """What is stored of one text, written by one method."""
    right: bool                 # the answer
    steps: int                  # in the text; 1 where the task's are not graded one by one
    sound: int                  # those that are right
    cycles: int
    wrote: int                  # cycles in which the target wrote
    scored: int                 # cycles with a score
    clipped: int                # of these: a signal lay outside the calibrated scale
    tokens: int
    seconds: float              # the processor's own
    read: int                   # bytes of weights, summed over passes
    compute: int                # the same times positions: what counts where arithmetic takes the time


class CountedChecker:
    """A step checker that counts how often it is asked."""

    def __init__(self, check):
        self.check = check
        self.calls = 0

    def __call__(self, ids):
        self.calls += 1
        return self.check(ids)


def run_rows(n):
    """Rows, one a problem: {method: Run}, the tasks in turn; PART problems of each are run by all methods."""
    return contest_rows(rows_in_turn(min(n, FULL)), 'draft')


def mid_run_rows(n):
    """The same with `mid` as draft, by what a claim compares."""
    return contest_rows(rows_in_turn(min(n, RUN_WITH_MID)), 'mid')


def rows_in_turn(n):
    """n rows of each task, the tasks in turn."""
    rows = []
    for together in zip(*[short_rows(task, n) for task in TASKS]):
        rows += together
    return rows


def contest_rows(rows, draft):
    contest = run_contest(engine_for(rows, draft=MODELS / draft), rows, draft)
    for i, row in enumerate(rows):
        found = {name: runs[i] for name, runs in contest.items() if i < len(runs)}
        yield dict(task=row['task'], runs=found)


def run_contest(engine, rows, draft):
    """{method: [Run of each row]}: of those that are only shown the first rows alone.

    With `mid` those do not run, nor does the target alone: its texts are the same.
    """
    chosen = signals_of_pair(draft)
    runs = {'sd': run_method(engine, 'sd', Exact(), rows)}
    for seed in range(SEEDS):
        name = f'notes, seed {seed}'
        runs[name] = run_method(engine, name, SpecGuard(), rows, seed)
    runs['random-gate'] = run_coin(engine, rows, runs)
    for name, method in compared_methods(chosen).items():
        runs[name] = run_method(engine, name, method, rows)
    if draft == 'draft':
        alone = SpecGuard(preset='paper', k=1, tau=math.inf)
        runs['paper, target alone'] = run_method(engine, 'paper, target alone', alone, rows)
        for name, method in shown_methods().items():
            runs[name] = run_method(engine, name, method, rows[:len(TASKS) * PART])
    return runs


def compared_methods(chosen):
    """{name: method}, of those beside `sd` and the default preset that are run on all rows.

    chosen: has beta and tau of the calibrated gate. `with sd`: the target writes with the draft's help.
    """
    gate = dict(beta=chosen['beta'], tau=chosen['tau'])
    return {
        'notes, with sd': SpecGuard(regenerate='sd'),
        'calibrated': SpecGuard(**gate),
        'calibrated, with sd': SpecGuard(regenerate='sd', **gate),
        'paper': SpecGuard(preset='paper'),
        'oracle-gate': OracleGate(),
        'oracle-gate, with sd': OracleGate(regenerate='sd'),
        'rsd': RewardGuided(),
        'rsd, with sd': RewardGuided(regenerate='sd')}


def shown_methods():
    """{name: method} that no claim compares."""
    return {
        'k = 1': SpecGuard(k=1), 'greedy': SpecGuard(preset='greedy'),
        'paper, one of the target': SpecGuard(preset='paper', target_k=1),
        'LPBV only': SpecGuard(beta=1.0), 'ABGV only': SpecGuard(beta=0.0),
        'target signals': SpecGuard(signals='target'), 'selector only': Unseen(tau=-math.inf),
        'draft only': DRAFT_ONLY, 'ar': Autoregressive(), 'specreason': SpecReason(), 'majority': Majority(),
        'best-of-n': BestOfN(), 'process-best-of-n': ProcessBestOfN(), 'beam': Beam(),
        'specguard-pooled': PooledStep()}


def run_coin(engine, rows, runs):
    """[Run] of a gate by coin that keeps as many steps of each task as SpecGuard does over all its seeds."""
    found = [None] * len(rows)
    for task in TASKS:
        places = [i for i, row in enumerate(rows) if row['task'] == task]
        seen = []
        for seed in range(SEEDS):
            mine = runs[f'notes, seed {seed}']
            seen += [mine[i] for i in places]
        cycles = sum(run.cycles for run in seen)
        kept = cycles - sum(run.wrote for run in seen)
        coin = RandomGate(rate=kept / cycles)
        mine = run_method(engine, f'random-gate, {task}', coin, [rows[i] for i in places])
        for i, run in zip(places, mine):
            found[i] = run
    return found


def run_method(engine, name, method, rows, seed=0):
    """[Run] of a method on rows; seed: another one draws anew on every row."""
    runs = []
    for i, row in enumerate(tqdm(rows, desc=name, file=sys.stderr, disable=None)):
        text = write_text(engine, row, method, seed * len(rows) + i)
        runs.append(run_of(engine, row, method, text))
    return runs


class Written(NamedTuple):
    """A text that a method wrote."""
    session: Session
    cycles: list                # [Cycle]
    seconds: float              # the processor's own


def write_text(engine, row, method, seed):
    """The Written text of a row; its session's checker is a CountedChecker."""
    session = graded_session(engine, row, method, seed)
    session.calibration = dict(signals=signals_of_pair(File(engine.draft).name))
    session.checker = CountedChecker(session.checker)
    begin = time.process_time()
    cycles = list(decode(session, replace(method)))        # a method serves one text
    return Written(session, cycles, time.process_time() - begin)


def run_of(engine, row, method, text):
    """The Run of a Written text."""
    cycles = text.cycles
    written = tokens_of(cycles)
    answer = engine.tokenizer.decode(written)
    right = bool(tasks.grade(row, answer))
    steps = tasks.steps_right(row, answer) if 'Answer:' in row['solution'] else [right]
    verdicts = [cycle.judged[0] for cycle in cycles if cycle.judged]
    scored = [verdict for verdict in verdicts if verdict.get('grounding') is not None]
    read, compute = spent_bytes(engine, method, text)
    return Run(right=right, steps=len(steps), sound=sum(steps), cycles=len(cycles),
               wrote=sum(cycle.labels[0] == 'target' for cycle in cycles), scored=len(scored),
               clipped=sum(verdict['clipped'] for verdict in scored), tokens=len(written),
               seconds=text.seconds, read=read, compute=compute)


def spent_bytes(engine, method, text):
    """(weight bytes read, weight bytes times positions) of a Written text.

    Both count the reward model of rsd and process-best-of-n: a pass for each step that it marks, over as many
    positions in all as the draft wrote.
    """
    sizes = {role: reader.model.read_bytes(reader.model.full) for role, reader in engine.readers.items()}
    marked = isinstance(method, (RewardGuided, ProcessBestOfN))
    read = REWARD_BYTES * text.session.checker.calls if marked else 0
    compute = 0
    for cycle in text.cycles:
        for path, (passes, positions, _) in cycle.passes.items():
            size = sizes[path.split('/')[0]]
            read += size * passes
            compute += size * positions
            if marked and path == 'draft/full':
                compute += REWARD_BYTES * positions
    return read, compute


# ---------------------------------------------------------------------------------------- record: `clock`

@contextmanager
def timed(seconds, part):
    """Enters in the dict how long the processor took for the block under it."""
    begin = time.process_time()
    yield
    seconds[part] = time.process_time() - begin


def timed_step(session, method):
    """({part: seconds}, ids of the draft's step, of the target's): each part of one step, done once."""
    reader = session.draft
    seconds = {}
    with timed(seconds, 'draft'):
        found = write_steps(session, method, reader, method.k)
    with timed(seconds, 'selection'):
        draft = method.choose(session, found)
    T = len(draft.tokens)
    with timed(seconds, 'reading again'):
        reader.read(session.tokens, draft.tokens, reader.model.full, T)
    with timed(seconds, 'with rollout'):
        seen = method.score(session, draft)
    with timed(seconds, 'scoring'):
        method.judge(session, draft, seen)
    with timed(seconds, 'target'):
        own = method.write(session)
    with timed(seconds, 'target pass'):
        session.target.read(session.tokens, draft.tokens, session.target.model.full, T + 1)
    return seconds, draft.tokens, own


def clock_rows(n):
    """Rows, of each preset one a problem: seconds of the parts of its first step; both steps' tokens."""
    rows = rows_in_turn(min(n, TIMED))
    engine = engine_for(rows)
    for preset in ('notes', 'paper'):
        for row in tqdm(rows, desc=f'clock, {preset}', file=sys.stderr, disable=None):
            found = least_seconds(engine, row, SpecGuard(preset=preset))
            yield dict(task=row['task'], preset=preset, **found)


def least_seconds(engine, row, method):
    """dict(seconds, the least of TURNS by part; drafted, own: tokens of the last turn's steps)."""
    session = graded_session(engine, row, method)
    session.calibration = dict(signals=signals_of_pair('draft'))
    least = {}
    for _ in range(TURNS):
        seconds, drafted, own = timed_step(session, method)
        for part, x in seconds.items():
            least[part] = min(x, least.get(part, math.inf))
    return dict(seconds=least, drafted=len(drafted), own=len(own))


# -------------------------------------------------------------------------------------- record: `stories`

class Story(NamedTuple):
    """What is stored of one story, written by one method."""
    cycles: int                 # steps
    wrote: int                  # those of the target
    cut: int                    # those that end in the middle of a sentence
    tokens: int
    nats: float                 # minus the target's log-probability of the text


def story_rows(n):
    """Rows, one a story: {method: Story}. The negative control: a text without steps."""
    rows = held_out_rows('story', min(n, STORIES))
    engine = engine_for(rows)
    methods = dict(target=SpecGuard(tau=math.inf), notes=SpecGuard(), draft=DRAFT_ONLY)
    found = {name: write_stories(engine, rows, method) for name, method in methods.items()}
    cycles = sum(story.cycles for story in found['notes'])
    kept = cycles - sum(story.wrote for story in found['notes'])
    found['random-gate'] = write_stories(engine, rows, RandomGate(rate=kept / cycles))
    for i in range(len(rows)):
        yield {name: stories[i] for name, stories in found.items()}


def write_stories(engine, rows, method):
    """[Story] of a method on rows."""
    target = engine.readers['target']
    found = []
    for i, row in enumerate(rows):
        cycles = write_text(engine, row, method, i).cycles
        ids = engine.tokenizer.encode(row['prompt']).ids
        written = tokens_of(cycles)
        logits = target.read(ids + written[:-1], [], target.model.full, len(written))
        nats = -float(token_logps(logits, written).double().sum())
        wrote = sum(cycle.labels[0] == 'target' for cycle in cycles)
        cut = sum(in_mid_sentence(engine.tokenizer.decode(cycle.tokens)) for cycle in cycles)
        found.append(Story(len(cycles), wrote, cut, len(written), nats))
    return found


def in_mid_sentence(text):
    text = text.strip()
    return bool(text) and text[-1] not in '.!?"'


PAIR = 'target', 'draft'
MID = 'target', 'mid'
RECORDS = dict(
    steps=(PAIR, step_rows), steps_mid=(MID, mid_step_rows), runs=(PAIR, run_rows),
    runs_mid=(MID, mid_run_rows), weights=((*PAIR, 'mid'), weight_rows), gates=((*PAIR, 'mid'), gate_rows),
    clock=(PAIR, clock_rows), stories=(PAIR, story_rows))


# ---------------------------------------------------------------------------------------- a step, drawn

def draw_step(session, draft, tokenizer):
    """Lines: each token of a step, its log-probability and grounding, and the old tokens it leans on most.

    The true rows of the rollout, from whole matrices: the rows of kernels.shade have their sums alone.
    """
    begin = len(session.tokens)
    model = session.draft.model
    last = range(model.config.num_hidden_layers)[-3:]
    line = session.tokens + draft.tokens
    rollout = whole_rollout(model, line, last, sparsify=0.01, residual=0.0)[begin:, :begin]         # [T, P]

    def word(token):
        return repr(tokenizer.decode([token]))[1:-1]
    logps = token_logps(draft.logits, draft.tokens)
    for token, logp, row in zip(draft.tokens, logps, rollout):
        leans = []
        for j in row.topk(4).indices.tolist():
            leans.append(f'{word(session.tokens[j])} {float(row[j]):.2f}')
        yield f'{word(token):>8} {float(logp):7.2f} {float(row.sum()):5.2f}   {", ".join(leans)}'


def main():
    """Prints the first step that SpecGuard's draft writes for a held-out problem, and what it leaned on."""
    row = held_out_rows('math', 1)[0]
    engine = engine_for([row])
    session = graded_session(engine, row, SpecGuard())
    draft = SpecGuard().propose(session)
    print(row['prompt'], *draw_step(session, draft, engine.tokenizer), sep='\n')


if __name__ == '__main__':
    main()
