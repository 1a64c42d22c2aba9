"""SpecGuard's records of single steps: whether drafted ones are right, and their signals."""
import itertools

import numpy

from lab import tasks
from lab.judge import area
from lab.measure import Prompt, Record, started
from model import encode
from verify import SpecGuard

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
MOST_STEPS = 6          # steps of a solution, evenly spaced, in whose place the draft writes another
LAYERS = 1, 2, 3, 6     # the last layers of the draft over which the rollout goes
ONLY = "the lab's tasks, because their steps are graded one by one"


def training_prompts(pair, n):
    """The first n Prompts of each task in the training split, on which gates are tuned."""
    found = []
    for task in TASKS:
        rows = itertools.islice(tasks.rows(task, 0, 'train'), n)
        found += [Prompt(task, place, row, pair.encode(row['prompt'])) for place, row in enumerate(rows)]
    return found


def solution_steps(pair, prompt, session):
    """The steps (lists of ids) of a prompt's solution."""
    ids = encode(pair.tokenizer, prompt.row['solution'], special=False)
    steps = [[]]
    for token in ids[:pair.max_new]:
        steps[-1].append(token)
        if SpecGuard().has_ended(session, steps[-1]):
            steps.append([])
    return [step for step in steps if session.text(step).strip()]


def step_row(pair, prompt):
    """Columns with a value for each step that the draft writes after some steps of a solution.

    The step is the most central of four. right, first: whether it, and the first of the four, is right; L;
    G1, G2, ...: G by a rollout over so many layers; scaled_L, scaled_G: as SpecGuard adds them.
    """
    session = started(pair, 'specguard', prompt)
    right = tasks.step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    steps = solution_steps(pair, prompt, session)
    columns = {}
    for place in sorted({i * len(steps) // MOST_STEPS for i in range(MOST_STEPS)}):
        session.tokens = prompt.ids + sum(steps[:place], [])
        session.tokens_left = pair.max_new - (len(session.tokens) - len(prompt.ids))
        draft = SpecGuard().propose(session)
        scores = {n: SpecGuard(n_roll=n).score(session, draft) for n in LAYERS}
        seen = SpecGuard().verdict(session, draft, scores[3]).signals
        step = dict(kind=kind_of(session.text(draft.tokens)), right=int(right(session.tokens + draft.tokens)),
                    first=int(right(session.tokens + seen['candidates'][0])))
        step |= {name: seen[name] for name in ('L', 'scaled_L', 'scaled_G')}
        step |= {f'G{n}': min(G for _, G in pairs) for n, pairs in scores.items()}
        for name, value in step.items():
            columns.setdefault(name, []).append(value)
    return [prompt.name | columns]


def kind_of(text):
    """The kind of a step by its own text: `work` has an equation; a `look-up` is the row of a table."""
    if text.strip().startswith('|'):
        return 'look-up'
    if 'answer' in text.lower():
        return 'answer'
    return 'work' if '=' in text else 'words'


def told(rows, signal):
    """A function of texts: the AUROC of a signal among steps of one family and kind, weighted by their pairs.

    Over all kinds together it would tell kinds apart, because look-ups are both the best grounded steps and
    the most often wrong (Simpson's paradox). both: L + G, scaled.
    """
    rows = [row | dict(both=numpy.add(row['scaled_L'], row['scaled_G'])) for row in rows]
    kinds = [[f'{row["family"]} {kind}' for kind in row['kind']] for row in rows]
    return area([row[signal] for row in rows], [row['right'] for row in rows], kinds)


RECORDS = dict(
    gate=Record(training_prompts, step_row, 100, only=ONLY),
    drafted=Record(lambda pair, n: pair.texts(TASKS, n), step_row, 50, only=ONLY))
