"""What SpecGuard's claims rest on, measured: recorded steps, whole runs, times, stories.

A wrong step is never mended on the tasks with steps, so a text is right if all of its steps are. Accuracy and
share of target steps follow from recorded steps, for any gate, selector or threshold, without another run.
`python -m lab.specguard.record` draws what each token of one step leans on.
"""
import functools
import math
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import NamedTuple

from tqdm import tqdm

from lab import tasks
from lab.common import MODELS, embedded, held_out_rows
from lab.specguard.calibrate import find_signals
from lab.pairs import LabRecord, Pair, Record
from lab.specguard import answers
from lab.specguard.rivals import (Beam, BestOfN, Majority, OracleGate, PooledStep, ProcessBestOfN, RandomGate,
                                  RewardGuided, SpecReason, Unseen)
from lab.specguard.sessions import TASKS, engine_for, graded_session, short_rows
from lab.specguard.steps import FEW_ROLLOUTS, ROLLOUTS, problem_row, record_step, whole_rollout
from model import expect, read_calibration
from specmini import pick_device
from verify import Autoregressive, Exact, Session, SpecGuard, decode, token_logps, tokens_of, write_steps

FULL = 100          # problems of each task that are run end to end by what a claim compares
PART = 40           # and by what is only shown
WITH_MID = 200      # problems of each task whose steps are recorded with `mid` as draft
RUN_WITH_MID = 60   # and that are run end to end
SEEDS = 3           # runs at the default preset, each with other draws of the draft
TIMED = 10          # problems of each task whose first step is timed
TURNS = 5           # how often; the least time counts
STORIES = 40
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
    pair = Pair(draft=str(MODELS / draft), device=pick_device('auto'))
    return find_signals(pair, rows=60, seed=0, accuracy=0.95)


def gate_rows(n):
    """Rows, one a draft: its name, and the section `signals` of the pair."""
    for draft in ('draft', 'mid'):
        yield dict(signals_of_pair(draft), draft=draft)         # its name, not its fingerprint


def weight_rows(n):
    """Rows: the bytes of weights that one pass of a model reads."""
    for name in ('target', 'draft', 'mid'):
        model, _, _ = embedded(name)
        yield dict(model=name, bytes=model.read_bytes(model.full))


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
ALL = 'target', 'draft', 'mid'
GRADED = "the lab's tasks: their steps are graded one by one"
RECORDS = dict(
    steps=LabRecord(PAIR, step_rows, GRADED), steps_mid=LabRecord(MID, mid_step_rows, GRADED),
    runs=LabRecord(PAIR, run_rows, GRADED), runs_mid=LabRecord(MID, mid_run_rows, GRADED),
    weights=LabRecord(ALL, weight_rows, "the lab's three models"),
    gates=LabRecord(ALL, gate_rows, GRADED), clock=LabRecord(PAIR, clock_rows, GRADED),
    stories=LabRecord(PAIR, story_rows, "the lab's stories"),
    altered=Record(answers.altered_items, answers.altered_row, drafts=False),
    continued=Record(answers.continued_items, answers.continued_row),
    tiered=Record(answers.tiered_items, answers.tiered_row, calibrated=True),
    sampled=Record(answers.sampled_items, answers.sampled_row))


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
