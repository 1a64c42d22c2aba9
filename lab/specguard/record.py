"""What is measured for SpecGuard: `python -m lab.measure specguard`; lab/specguard/claims.py judges it."""
import functools
import random
import re
import time
from dataclasses import replace

import torch

import kernels
import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.measure import SEED, Record, cached_engine, named, on_prompts, prepared, run_row, sd
from lab.specguard.baselines import Unseen
from lab.specguard.gate import continued_checker, find_gate
from model import encode, read_calibration
from specmini import grade
from train_mask import Settings, calibration_rows
from verify import Exact, Session, SpecGuard, token_logps, tokens_of

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
GAMMAS = 4, 8, 12               # of plain sd
SEEDS = 3                       # runs of the default preset, each with other draws
SWEPT = 15                      # prompts of each task that the sweeps are run on
KEPT = 'tokens', 'wrong', 'accepted', 'right', 'passes'         # figures of a run that are stored
MOST_STEPS = 6                  # steps of an answer, evenly spaced, after which the draft writes another
ALTERED = 40                    # prompts of each family whose steps are altered
WRITERS = dict(target=Exact(draft_temperature=0), draft=Unseen(k=1, draft_temperature=0, tau=-torch.inf))
SOURCES = *WRITERS, 'reference'         # who wrote an answer whose steps are altered
CALIBRATED = 60                 # prompts whose signals are measured, where another draft has none
TURNS = 5                       # how often a step is timed; the least time counts
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


def graded_session(pair, prompt):
    """A Session that has read a Prompt, with a step checker if its row can be graded."""
    engine = prepared(pair, sd(4))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, Exact())
    session.checker = None
    if pair.is_embedded:
        session.checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    elif grade(prompt.row, '') is not None:
        session.checker = continued_checker(session, lambda text: grade(prompt.row, text))
    return session


def steps_end(pair):
    """The delimiter of SpecGuard that a pair's texts are measured with."""
    return r'\n' if pair.is_embedded else 'sentence'


@functools.cache
def signals_of(pair):
    """The section `signals` of a pair with its gate, from calibration.json, or measured."""
    stored = read_calibration(pair.target, pair.draft).get('signals')
    if stored and 'tau' in stored:
        return stored
    rows = [row for row in calibration_rows(Settings()) if row['task'] in TASKS][:CALIBRATED]
    prompts = [pair.encode(row['prompt']) for row in rows]
    return find_gate(pair.engine(), rows, prompts, SpecGuard(tau=torch.inf))


def armed(pair, prompt):
    """The pair's Engine, with the pair's scales and the step checker of a prompt."""
    engine = cached_engine(pair, 'auto')
    engine.calibration = dict(signals=signals_of(pair))

    def checked(**settings):
        session = Session(**settings)
        session.checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
        return session
    engine.session = checked
    return engine


def run_items(pair, n):
    """[(prompt, rate of the coin)]; the rate: the share of its task's steps that the default preset keeps."""
    items = []
    for task in TASKS:
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
    settings = contest(signals_of(pair), rate) | (sweeps() if prompt.place < SWEPT else {})
    row = run_row(settings, pair, prompt)
    row['runs'] = {name: {key: run[key] for key in KEPT} for name, run in row['runs'].items()}
    return row


def contest(gate, rate):
    """{name: Setting} that claims compare; gate: has the calibrated beta and tau; rate: of the coin."""
    found = {f'sd {gamma}': sd(gamma) for gamma in GAMMAS}
    found |= {f'default, seed {seed}': named('specguard', seed=seed) for seed in range(SEEDS)}
    return found | {
        'calibrated': named('specguard', beta=gate['beta'], tau=gate['tau'], gamma=4),
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
        'oracle-gate': named('oracle-gate')}


def sinkless(q, k, v, mask, carry):
    """kernels.grounded without the prompt's first token, an attention sink. Source: Xiao et al. 2023."""
    T = k.shape[2] - carry['begin']
    weights = kernels.attention_rows(q[:, :, -T:], k, kernels.full_mask(mask, q, k)[-T:], carry['sparsify'])
    weights[..., 0] = 0
    weights /= weights.sum(-1, keepdim=True).clamp(min=1e-9)
    carry['rollout'] = kernels.rollout_layer(weights, carry['rollout'])
    return kernels.attend(q, k, v, mask, carry)


def weakest(session, who, ids, sink=True):
    """[L, 1 - G] of a step (ids) by one model's last three layers; sink: whether the first token counts."""
    reader = session.readers()[who]
    path = reader.model.full.grounded(3, len(session.tokens), 0.01)
    if not sink:
        attends = [sinkless if attend is kernels.grounded else attend for attend in path.attends]
        path = replace(path, attends=tuple(attends))
    rows = reader.read(session.tokens + ids, path, len(ids) + 1)
    grounding = path.carry['rollout'][0].sum(-1)
    return [float(token_logps(rows[:-1], ids).min()), 1 - float(grounding.min())]


def right_steps(pair, prompt, source, session):
    """The steps (lists of ids) of a right answer of one of SOURCES; [] where that one has none."""
    if source == 'reference':
        text = prompt.row.get('solution') or str(prompt.row.get('answer', ''))
        (ids,) = encode(pair.tokenizer, [re.sub('<<.*?>>', '', text)], special=False)   # GSM8K's calculator
    else:
        ids = tokens_of(prepared(pair, sd(4)).write(prompt.ids, WRITERS[source]))
        if grade(prompt.row, session.text(ids)) in (False, 0):
            return []
    method = SpecGuard(delimiter=steps_end(pair))
    steps = [[]]
    for token in ids[:pair.max_new]:
        steps[-1].append(token)
        if method.is_ended(session, steps[-1]):
            steps.append([])
    return [step for step in steps if session.text(step).strip()]       # an end of sequence is no step


def drafted_row(pair, prompt):
    """Columns, a value for each step that the draft writes after right ones, the most central of four.

    kind; right; first: whether the first of the four is right; draft: [L, 1 - G]. The steps before are the
    reference's on the lab's tasks, else the target's own.
    """
    session = graded_session(pair, prompt)
    method = SpecGuard(delimiter=steps_end(pair))
    steps = []
    if session.checker:                                 # a row without an answer has no right steps
        steps = right_steps(pair, prompt, 'reference' if pair.is_embedded else 'target', session)
    row = dict(kind=[], right=[], first=[], draft=[])
    for place in sorted({i * len(steps) // MOST_STEPS for i in range(MOST_STEPS)} if steps else []):
        session.tokens = prompt.ids + sum(steps[:place], [])
        session.tokens_left = pair.max_new - (len(session.tokens) - len(prompt.ids))
        found = method.propose(session)
        ids = found.tokens
        row['kind'].append(kind_of(session.text(ids)))
        row['right'].append(int(session.checker(session.tokens + ids)))
        row['first'].append(int(session.checker(session.tokens + (found.options or [ids])[0])))
        row['draft'].append(weakest(session, 'draft', ids))
    return prompt.name | row


def kind_of(text):
    """The kind of a step by its own text: `work` has an equation; a `look-up` is the row of a table."""
    if text.strip().startswith('|'):
        return 'look-up'
    if 'answer' in text.lower():
        return 'answer'
    return 'work' if '=' in text else 'words'


def altered_row(pair, item):
    """By both models [[L, 1 - G] of an altered step, of the step itself], sink dropped, of a right answer."""
    prompt, source = item
    session = graded_session(pair, prompt)
    row = dict(source=source, draft=[], target=[])
    for i, step in enumerate(right_steps(pair, prompt, source, session)):
        changed = with_altered_digit(session.text(step), f'{SEED} {prompt.family} {prompt.place} {i}')
        if changed:
            (altered,) = encode(pair.tokenizer, [changed], special=False)
            for who in ('draft', 'target'):
                row[who].append([weakest(session, who, ids, sink=False) for ids in (altered, step)])
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


def overhead_row(pair, prompt):
    """Seconds to judge a text's first step (selection, second reading, score), and to write the target's."""
    session = graded_session(pair, prompt)
    session.calibration = dict(signals=signals_of(pair))
    method = SpecGuard()
    judging, writing = [], []
    for _ in range(TURNS):
        path = session.draft.model.full
        found = method.write_steps(session, session.draft, path, session.probs, method.k)
        begin = time.perf_counter()
        draft = method.choose(found)
        method.judge(session, draft, method.score(session, draft))
        middle = time.perf_counter()
        method.write(session)
        judging.append(middle - begin)
        writing.append(time.perf_counter() - middle)
    return prompt.name | dict(judging=min(judging), writing=min(writing))


RECORDS = dict(
    runs=Record(run_items, run_row_of, only=LAB),
    drafted=on_prompts(TASKS, drafted_row),
    altered=Record(lambda pair, n: [(prompt, source) for prompt in pair.texts(TASKS, min(n, ALTERED))
                                    for source in SOURCES], altered_row),
    overhead=on_prompts(TASKS, overhead_row, only=LAB))
