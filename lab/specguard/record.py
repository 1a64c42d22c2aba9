"""What is measured for SpecGuard: `python -m lab.measure specguard`; lab/specguard/claims.py judges it."""
import functools
import itertools
import random
import re
from pathlib import Path as File

import torch

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.measure import EMBEDDED, SEED, Record, cached_engine, named, on_prompts, prepared, run_row, sd
from model import encode, read_calibration
from train_mask import signal_ranges
from verify import Exact, SpecGuard, readers_of, token_logps

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
HARD = 'math-hard',             # its target is right less often
GAMMAS = 4, 8, 12               # of plain sd
LAYERS = 1, 2, 3, 6             # last ones of the rollout; all where there are fewer
SEEDS = 3                       # runs of the default preset, each with other draws
SWEPT = 15                      # prompts of each task that the sweeps are run on
KEPT = 'tokens', 'wrong', 'accepted', 'right', 'passes'         # figures of a run that are stored
MOST_STEPS = 6                  # steps of an answer, evenly spaced, after which the draft writes another
CALIBRATED = 20                 # training prompts of each task whose signals are measured, if none are stored
GATES = dict(draft=dict(beta=1.0, tau=0.95), mid=dict(beta=0.75, tau=0.3))      # of drafts, from graded steps
PAPER = dict(k=16, draft_top_p=0.8, beta=0.3, tau=0.7, target_k=16, target_temperature=0.7, target_top_p=0.8)
LAB = "the lab's tasks, because their steps are graded one by one"


def step_checker(row, tokenizer, begin):
    """Function from ids to whether their last line is right and whole; begin: where the answer begins."""
    def right(ids):
        text = tokenizer.decode(ids[begin:])
        last = text.strip().split('\n')[-1]
        if 'Answer:' not in row['solution'] or last.startswith('Answer:'):
            return bool(tasks.grade(row, text))
        return text.endswith('\n') and tasks.steps_right(row, text)[-1:] == [True]
    return right


def started(pair, ids):
    """A Session that has read a prompt (ids)."""
    engine = prepared(pair, sd(4))
    engine.open([ids])
    return engine.start(ids, Exact())


@functools.cache
def signals_of(pair, n_roll=3):
    """The section `signals` of a pair: of calibration.json, or measured as train_mask.py --signals does."""
    stored = read_calibration(pair.target, pair.draft)
    if 'signals' in stored and n_roll == 3:
        return stored['signals']
    method = SpecGuard(n_roll=n_roll)
    steps = []
    for task in TASKS:
        for row in itertools.islice(tasks.rows(task, 0, 'train'), CALIBRATED):
            session = started(pair, pair.encode(row['prompt']))
            while session.tokens_left and not session.ended:
                draft = method.propose(session)
                steps.append(list(map(min, zip(*method.score(session, draft)))))
                session.commit(method.write(session))
    logp, grounding = signal_ranges(steps)
    return dict(draft_logp=logp, draft_grounding=grounding)


def armed(pair, prompt, n_roll=3):
    """The pair's Engine, with the pair's scales of so many layers and the step checker of a prompt."""
    checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    engine = cached_engine(pair)
    engine.calibration = dict(signals=signals_of(pair, n_roll), checker=checker)
    return engine


def run_items(families, pair, n):
    """[(prompt, rate of the coin)]; the rate: the share of its task's steps that the default preset keeps."""
    items = []
    for task in families:
        prompts = pair.texts([task], n)
        kept = []
        for prompt in prompts:
            engine = armed(pair, prompt)
            engine.open([prompt.ids])
            kept += [cycle.judged[0].kept for cycle in engine.write(prompt.ids, SpecGuard())]
        items += [(prompt, sum(kept) / len(kept)) for prompt in prompts]
    return items


def run_row_of(pair, item):
    """{setting: run} of one prompt: of the contest, and of the first prompts of each task the sweeps."""
    prompt, rate = item
    armed(pair, prompt)
    settings = contest(pair, rate) | (sweeps() if prompt.place < SWEPT else {})
    row = run_row(settings, pair, prompt)
    return row | dict(runs=figures(row['runs'], KEPT))


def figures(runs, keys):
    """{setting: run} with these figures alone."""
    return {name: {key: run[key] for key in keys} for name, run in runs.items()}


def hard_row(pair, item):
    """{setting: run} of a HARD prompt: the contest, two gates, rollouts of LAYERS on their own scales."""
    prompt, rate = item
    gates = {'and': named('specguard-and'), 'oracle-gate': named('oracle-gate')}
    runs = {}
    for n_roll in [3] if pair == EMBEDDED else LAYERS:          # its draft has two layers
        armed(pair, prompt, n_roll)
        settings = {f'n_roll {n_roll}': named('specguard', n_roll=n_roll)}
        if n_roll == 3:
            settings = contest(pair, rate, GAMMAS[:1]) | gates
        runs |= run_row(settings, pair, prompt)['runs']
    return prompt.name | dict(runs=figures(runs, ('tokens', 'accepted', 'right')))


def contest(pair, rate, gammas=GAMMAS):
    """{name: Setting} that claims compare; rate: of the coin."""
    found = {f'sd {gamma}': sd(gamma) for gamma in gammas}
    found |= {f'default, seed {seed}': named('specguard', seed=seed) for seed in range(SEEDS)}
    return found | {
        'calibrated': named('specguard', **GATES.get(File(pair.draft).name, {}), gamma=4),
        'rsd': named('rsd', gamma=4), 'random-gate': named('random-gate', rate=rate)}


def sweeps():
    """{name: Setting} of the notes' sweeps and ablations, one knob of the default changed in each."""
    found = {f'k {k}': named('specguard', k=k) for k in (1, 2, 8)}
    for knob, values in dict(tau=(0.1, 0.3, 0.7, 0.9), beta=(0.0, 0.3, 0.7, 1.0)).items():
        found |= {f'{knob} {value:g}': named('specguard', **{knob: value}) for value in values}
    for target_k in (1, 16):
        found[f'target_k {target_k}'] = named('specguard-target-k', k=1, tau=torch.inf, target_k=target_k,
                                              temperature=0.7)
    return found | {
        'as the paper': named('specguard-target-k', **PAPER),
        'oracle-gate': named('oracle-gate'), 'and': named('specguard-and')}


def weakest(session, who, ids, n_roll=3):
    """[L, 1 - G] of a step (ids) by one model's last n_roll layers, as SpecGuard sees them."""
    reader = readers_of(session)[who]
    path = reader.model.full.grounded(n_roll, len(session.tokens), 0.01)
    rows = reader.read(session.tokens + ids, path, len(ids) + 1)
    grounding = path.carry['rollout'][0].sum(-1)
    return [float(token_logps(rows[:-1], ids).min()), 1 - float(grounding.min())]


def reference_steps(pair, prompt, session):
    """The steps (lists of ids) of a prompt's reference, without what marks GSM8K's calculator."""
    text = prompt.row.get('solution') or str(prompt.row.get('answer', ''))
    (ids,) = encode(pair.tokenizer, [re.sub('<<.*?>>', '', text)], special=False)
    method = SpecGuard(delimiter=r'\n' if pair.is_embedded else 'sentence')
    steps = [[]]
    for token in ids[:pair.max_new]:
        steps[-1].append(token)
        if method.has_ended(session, steps[-1]):
            steps.append([])
    return [step for step in steps if session.text(step).strip()]


def drafted_row(pair, prompt):
    """Columns, a value for each step that the draft writes after a reference's, the most central of four.

    kind; right; first: whether the first of the four is right; draft: [L, 1 - G]; layers: 1 - G by LAYERS.
    """
    session = started(pair, prompt.ids)
    right = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    steps = reference_steps(pair, prompt, session)
    row = dict(kind=[], right=[], first=[], draft=[], layers=[])
    for place in sorted({i * len(steps) // MOST_STEPS for i in range(MOST_STEPS)}):
        session.tokens = prompt.ids + sum(steps[:place], [])
        session.tokens_left = pair.max_new - (len(session.tokens) - len(prompt.ids))
        found = SpecGuard().propose(session)
        ids = found.tokens
        row['kind'].append(kind_of(session.text(ids)))
        row['right'].append(int(right(session.tokens + ids)))
        row['first'].append(int(right(session.tokens + found.signals[0]['candidates'][0])))
        row['draft'].append(weakest(session, 'draft', ids))
        row['layers'].append([weakest(session, 'draft', ids, n_roll)[1] for n_roll in LAYERS])
    return prompt.name | row


def kind_of(text):
    """The kind of a step by its own text: `work` has an equation; a `look-up` is the row of a table."""
    if text.strip().startswith('|'):
        return 'look-up'
    if 'answer' in text.lower():
        return 'answer'
    return 'work' if '=' in text else 'words'


def altered_row(pair, prompt):
    """By both models [[L, 1 - G] of an altered step, of the step itself], of the steps of a reference."""
    session = started(pair, prompt.ids)
    row = dict(draft=[], target=[])
    for i, step in enumerate(reference_steps(pair, prompt, session)):
        changed = with_altered_digit(session.text(step), f'{SEED} {prompt.family} {prompt.place} {i}')
        if changed:
            (altered,) = encode(pair.tokenizer, [changed], special=False)
            for who in ('draft', 'target'):
                row[who].append([weakest(session, who, ids) for ids in (altered, step)])
        session.tokens = session.tokens + step
    return prompt.name | row


def with_altered_digit(step, seed):
    """The step with one digit changed by the seed, but for a list's numbers; None where there is none."""
    numbers = [found for found in re.finditer(r'(?m)^\s*\d+[.)]\s|(\d+)', step) if found[1]]
    if not numbers:
        return None
    draw = random.Random(seed)
    number = draw.choice(numbers)
    at = draw.randrange(number.start(), number.end())
    digit = draw.choice([digit for digit in '123456789' if digit != step[at]])
    return step[:at] + digit + step[at + 1:]


RECORDS = dict(
    runs=Record(functools.partial(run_items, TASKS), run_row_of, only=LAB),
    hard=Record(functools.partial(run_items, HARD), hard_row, only=LAB),
    drafted=on_prompts(TASKS, drafted_row, only=LAB),
    altered=on_prompts(TASKS, altered_row))
