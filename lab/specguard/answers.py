"""What is recorded of any pair's answers: steps with an altered number, drafted steps, runs at T = 0.7.

Nothing here takes a grammar or a reference's steps: a step ends as verify.STEP_ENDS says (on the lab's tasks
with its line), and what is right is for the target to say, see sessions.ContinuedChecker. GSM8K's prompts on
an H100 with a target of 28 layers and a draft of 24: some 4, 12 and 15 s a prompt of the three records.
"""
import random
import re
from dataclasses import replace

import torch

from lab.common import SEED
from lab.specguard.rivals import RandomGate, Unseen, slim_lowest
from lab.specguard.sessions import TASKS, prompt_session, steps_end
from lab.specguard.steps import FEW_ROLLOUTS, observe, problem_row, record_step
from model import encode, measured_sections, read_calibration
from verify import Autoregressive, Exact, SpecGuard, tokens_of, write_steps

ALTERED = 40        # prompts of each family whose steps are altered
PART = 20           # and that two of the other records take
TIERED = 60         # and that the steps before three tiers are of
MOST_STEPS = 6      # steps of a text, evenly spaced, behind which the draft writes another
FEW_STEPS = 3       # those of another pair before three tiers
DRAFTED = 'draft last 3'                    # of steps.ROLLOUTS: SpecGuard's own
TEMPERATURE = 0.7   # of the runs
SELECTORS = '1', '4'                        # of steps.CANDIDATES


def graded(pair, n, most=PART):
    """At most n prompts, and `most`, of each family that can be graded."""
    return [prompt for prompt in pair.texts(TASKS, min(n, most)) if pair.grade(prompt.row, '') is not None]


def steps_of(session, ids, delimiter):
    """The steps of a text behind the session's prompt: lists of ids."""
    method = SpecGuard(delimiter=delimiter)
    steps = [[]]
    for token in ids:
        steps[-1].append(token)
        if method.over(session, steps[-1]):
            steps.append([])
    return [step for step in steps if step]


# --------------------------------------------------------------------------------------- record: `altered`

def altered_items(pair, n):
    return pair.texts(TASKS, min(n, ALTERED))


def altered_row(pair, prompt):
    """The steps of a right answer that have a number, each behind a copy with one altered, column by column.

    logp: by model, nats; ungrounded: by rollout, 1 - G, as steps.candidate_of has them. kind: whether the
    number that was altered is `copied` from the text before the step or `new`. source: who wrote the answer.
    """
    session = prompt_session(pair, prompt)
    answer, source = right_answer(pair, prompt)
    row = prompt.name | dict(source=source, altered=[], kind=[], tokens=[], logp={}, ungrounded={})

    def add(step, is_altered, kind):
        row['altered'].append(is_altered)
        row['kind'].append(kind)
        row['tokens'].append(len(step))
        for who in pair.roles:
            logp, grounded = observe(session, who, step, FEW_ROLLOUTS)
            row['logp'].setdefault(who, []).append(logp)
            for name, grounding in grounded.items():
                row['ungrounded'].setdefault(name, []).append(1 - grounding)
    before = prompt.row['prompt']
    for i, step in enumerate(steps_of(session, encoded(pair, answer)[:pair.max_new], steps_end(pair))):
        text = pair.text(step)
        changed, kind = with_altered_number(text, before, f'{SEED} {prompt.family} {prompt.place} {i}')
        if changed:
            add(encoded(pair, changed), 1, kind)
            add(encoded(pair, text), 0, kind)
        session.tokens = session.tokens + step
        before += text
    return row


def encoded(pair, text):
    (ids,) = encode(pair.tokenizer, [text], special=False)
    return ids


def right_answer(pair, prompt):
    """(text, who wrote it): the target's own greedy answer, or the row's where the target's is wrong."""
    text = pair.text(pair.own_text(prompt.ids))
    if pair.grade(prompt.row, text) != 0:               # None: nobody can say, and it is its own
        return text, 'target'
    reference = prompt.row.get('solution') or str(prompt.row['answer'])
    return re.sub('<<.*?>>', '', reference), 'reference'        # GSM8K's notes for a calculator


def with_altered_number(step, before, seed):
    """(the step with one digit of one of its numbers changed, kind), or (None, None) if it has no number.

    kind: `copied` if the number stands in the text before, else `new`. The number of a list's item does not
    count. Which number, which digit and what instead is drawn: the same for the same seed.
    """
    numbers = [found for found in re.finditer(r'(?m)^\s*\d+[.)]\s|(\d+)', step) if found[1]]
    if not numbers:
        return None, None
    draw = random.Random(seed)
    number = draw.choice(numbers)
    at = draw.randrange(number.start(), number.end())
    digit = draw.choice([digit for digit in '123456789' if digit != step[at]])
    copied = re.search(rf'(?<!\d){number[1]}(?!\d)', before)
    return step[:at] + digit + step[at + 1:], 'copied' if copied else 'new'


def places_of(pair, session, most):
    """The ids before each of at most so many steps, evenly spaced, of the target's answer, if it is right."""
    prompt = session.tokens
    if not session.checker(prompt):
        return []
    _, way, _ = session.checker.ways[0]
    own = steps_of(session, way[len(prompt):], steps_end(pair))
    own = [step for step in own if pair.text(step).strip()]             # an end of sequence is no step
    places = sorted({i * len(own) // most for i in range(most)})
    return [sum(own[:place], []) for place in places]


# --------------------------------------------------------------------------------------- record: `continued`

def continued_items(pair, n):
    return graded(pair, n)


def continued_row(pair, prompt):
    """Steps that the draft writes behind the target's own earlier ones, see steps.problem_row.

    Of MOST_STEPS places of the target's greedy answer, if that is right; else no steps. A drafted step is
    right if the target, going on from it, comes to the answer all the same.
    """
    session = prompt_session(pair, prompt)
    session.generator = torch.Generator().manual_seed(prompt.place)
    steps = []
    for earlier in places_of(pair, session, MOST_STEPS):
        session.tokens = prompt.ids + earlier
        session.room = pair.max_new - len(earlier)
        steps.append(record_step(session, FEW_ROLLOUTS, 4, SELECTORS, steps_end(pair)))
    return prompt.name | problem_row(prompt.family, steps)


# ------------------------------------------------------------------------------------------ record: `tiered`

def tiered_items(pair, n):
    """Prompts, or none where the target has no mask and so no slim path."""
    return graded(pair, n, TIERED) if 'mask' in measured_sections(pair.target) else []


def tiered_row(pair, prompt):
    """Steps as in `continued`, each with what every tier says of it; costs: of a pass, in target passes."""
    session = prompt_session(pair, prompt)
    session.calibration = read_calibration(pair.target, None, ['mask'])
    session.generator = torch.Generator().manual_seed(prompt.place)
    full = session.target.model.read_bytes(session.target.model.full)
    costs = dict(draft=session.draft.model.read_bytes(session.draft.model.full) / full,
                 slim=session.target.model.read_bytes(session.slim_path) / full)
    row = dict(costs=costs, steps=[])
    for earlier in places_of(pair, session, MOST_STEPS if pair.is_embedded else FEW_STEPS):
        session.tokens = prompt.ids + earlier
        session.room = pair.max_new - len(earlier)
        row['steps'].append(tiered_step(session, SpecGuard(delimiter=steps_end(pair))))
    return prompt.name | row


def tiered_step(session, method):
    """What `tiered` stores of a step: the fields of tier_claims.Tiered, in their order."""
    mark = session.mark()
    ids = method.propose(session).tokens
    written, _, _ = session.spent(mark)['draft/full']
    logp, grounded = observe(session, 'draft', ids, [DRAFTED])
    slim = slim_lowest(session, ids)
    target, _ = observe(session, 'target', ids, [])
    own = write_steps(session, method, session.target, 1)[0].tokens
    return [logp, 1 - grounded[DRAFTED], slim, target, written, len(own),
            session.checker(session.tokens + ids), session.checker(session.tokens + own)]


# ----------------------------------------------------------------------------------------- record: `sampled`

def sampled_items(pair, n):
    return graded(pair, n)


def sampled_row(pair, prompt):
    """{method: what is stored of its text} at TEMPERATURE, by each of sampled_methods."""
    session = prompt_session(pair, prompt)
    runs = {}
    for name, method in sampled_methods(steps_end(pair)).items():
        cycles = pair.written(session, prompt.ids, replace(method), TEMPERATURE, prompt.place)
        written = tokens_of(cycles)
        wrote = sum(cycle.labels[0] == 'target' for cycle in cycles)
        runs[name] = dict(right=pair.grade(prompt.row, pair.text(written)), cycles=len(cycles), wrote=wrote,
                          tokens=len(written), seconds=sum(cycle.seconds for cycle in cycles))
    return prompt.name | dict(runs=runs)


def sampled_methods(delimiter):
    """{name: method}. A coin gives the target half of the steps, whatever they are: equal target shares."""
    draft_alone = Unseen(k=1, tau=-torch.inf, delimiter=delimiter)
    coin = RandomGate(k=1, rate=0.5, delimiter=delimiter)
    return {
        'ar': Autoregressive(), 'sd': Exact(),
        'draft alone': draft_alone,
        'draft alone, k = 4': replace(draft_alone, k=4),
        'coin': coin,
        'coin, k = 4': replace(coin, k=4),
        'coin, target_k = 16': replace(coin, target_k=16),
        'target alone, target_k = 16': replace(draft_alone, tau=torch.inf, target_k=16)}
