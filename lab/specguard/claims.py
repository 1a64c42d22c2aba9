"""SpecGuard: what `python -m lab.measure specguard` stores, and the claims that it must show."""
import functools
import itertools
import re
from pathlib import Path as File

import numpy

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.judge import MODELLED, answers, area, gap, interval, number, over, tuned_over
from lab.measure import Record, cached_engine, named, on_prompts, prepared, run_row, sd
from model import encode, read_calibration
from train_mask import signal_ranges
from verify import METHODS, Exact, SpecGuard, scaled, token_logps

SOURCE = 'notes on the paper, a review that gives more settings than it'
TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
HARD = 'math-hard',             # its target is right less often
GAMMAS = 4, 8, 12               # of plain sd
SEEDS = 3                       # runs of the default preset, each with other draws
SWEPT = 15                      # prompts of each task that the sweeps are run on
KEPT = 'tokens', 'wrong', 'accepted', 'right', 'passes'         # figures of a run that are stored
MOST_STEPS = 6                  # steps of an answer, evenly spaced, after which the draft writes another
CALIBRATED = 20                 # training prompts of each task whose signals are measured, if none are stored
GATES = dict(draft=dict(beta=1.0, tau=0.95), mid=dict(beta=0.75, tau=0.3))      # of drafts, from graded steps
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
def signals_of(pair):
    """The section `signals` of a pair: of calibration.json, or measured as train_mask.py --signals does."""
    stored = read_calibration(pair.target, pair.draft)
    if 'signals' in stored:
        return stored['signals']
    method = SpecGuard()
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


def armed(pair, prompt):
    """The pair's Engine, with the pair's scales and the step checker of a prompt."""
    checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    engine = cached_engine(pair)
    engine.calibration = dict(signals=signals_of(pair), checker=checker)
    return engine


def run_items(families, pair, n):
    """[(prompt, rate of the coin)]: the target writes about as much of a task as by the default gate.

    It is not the gate's own, because the steps that a gate rejects are longer than others.
    """
    items = []
    for task in families:
        prompts = pair.texts([task], n)
        wanted = share_of_target(pair, prompts, 'specguard')
        found = share_of_target(pair, prompts, 'random-gate', rate=1 - wanted)
        rate = 1 - wanted * wanted / found if found else 1.0
        items += [(prompt, max(0.0, rate)) for prompt in prompts]
    return items


def share_of_target(pair, prompts, name, **knobs):
    """The share of the tokens after these prompts that the target writes."""
    cycles = []
    for prompt in prompts:
        engine = armed(pair, prompt)
        engine.open([prompt.ids])
        cycles += engine.write(prompt.ids, METHODS[name](**knobs))
    return 1 - sum(cycle.accepted for cycle in cycles) / sum(len(cycle.tokens) for cycle in cycles)


def run_row_of(pair, item):
    """{setting: run} of one prompt: of the contest, and of the first prompts of TASKS the sweeps."""
    prompt, rate = item
    armed(pair, prompt)
    swept = prompt.place < SWEPT and prompt.family in TASKS
    row = run_row(contest(pair, rate) | (swept_settings() if swept else {}), pair, prompt)
    runs = {name: {key: run[key] for key in KEPT} for name, run in row['runs'].items()}
    return row | dict(runs=runs)


def contest(pair, rate):
    """{name: Setting} that claims compare; rate: of the coin."""
    found = {f'sd {gamma}': sd(gamma) for gamma in GAMMAS}
    found |= {f'default, seed {seed}': named('specguard', seed=seed) for seed in range(SEEDS)}
    return found | {
        'calibrated': named('specguard', **GATES.get(File(pair.draft).name, {}), gamma=4),
        'rsd': named('rsd', gamma=4), 'random-gate': named('random-gate', rate=rate)}


def swept_settings():
    """{name: Setting} of the notes' sweeps and ablations, one knob of the default changed in each."""
    found = {f'k {k}': named('specguard', k=k) for k in (1, 8)}
    for knob, values in dict(tau=(0.1, 0.7, 0.9), beta=(0.0, 1.0)).items():
        found |= {f'{knob} {value:g}': named('specguard', **{knob: value}) for value in values}
    return found


def weakest(session, ids):
    """[L, 1 - G] of a step (ids) by the draft, as SpecGuard sees them."""
    reader = session.drafter
    path = reader.model.full.grounded(3, len(session.tokens), 0.01)
    rows = reader.read(session.tokens + ids, path, len(ids) + 1)
    grounding = reader.carry['rollout'][0].sum(-1)
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

    kind; right; first: whether the first of the four is right; draft: [L, 1 - G].
    """
    session = started(pair, prompt.ids)
    right = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    steps = reference_steps(pair, prompt, session)
    row = dict(kind=[], right=[], first=[], draft=[])
    for place in sorted({i * len(steps) // MOST_STEPS for i in range(MOST_STEPS)}):
        session.tokens = prompt.ids + sum(steps[:place], [])
        session.tokens_left = pair.max_new - (len(session.tokens) - len(prompt.ids))
        found = SpecGuard().propose(session)
        ids = found.tokens
        row['kind'].append(kind_of(session.text(ids)))
        row['right'].append(int(right(session.tokens + ids)))
        row['first'].append(int(right(session.tokens + found.signals[0]['candidates'][0])))
        row['draft'].append(weakest(session, ids))
    return prompt.name | row


def kind_of(text):
    """The kind of a step by its own text: `work` has an equation; a `look-up` is the row of a table."""
    if text.strip().startswith('|'):
        return 'look-up'
    if 'answer' in text.lower():
        return 'answer'
    return 'work' if '=' in text else 'words'


RECORDS = dict(
    runs=Record(functools.partial(run_items, TASKS), run_row_of, only=LAB),
    hard=Record(functools.partial(run_items, HARD), run_row_of, only=LAB),
    drafted=on_prompts(TASKS, drafted_row, only=LAB))


# ------------------------------------------------------------------------------------------ what it must show

GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
EXACT = [f'sd {gamma}' for gamma in GAMMAS]
USUAL = 'sd 4'
DEFAULT = [f'default, seed {seed}' for seed in range(SEEDS)]
MORE_RIGHT = 'notes: "3.6% average accuracy improvement over baseline SD"'
OVER_RSD = 'notes: "Performance exceeds reward-guided SD while being faster"'
CLAIMS = {              # text: whose, rival, line
    'right answers over sd': (MORE_RIGHT, '`sd`', GAIN),
    'calibrated gate: right answers over sd': (MORE_RIGHT, '`sd`', GAIN),
    'math-hard: right answers over sd': (MORE_RIGHT, '`sd`', GAIN),
    'right answers over rsd': (OVER_RSD, "`rsd`: the task's checker", GAIN),
    'right answers over a coin': ('ours', 'a coin that leaves the target as many tokens or more', GAIN),
    'calibrated gate: speed over sd': (
        'notes: "Latency improvement is consistent across domains (~11%)"', '`sd`, gamma 4, 8 or 12', FASTER),
    'calibrated gate: speed over rsd': (OVER_RSD, "`rsd`: the task's checker", FASTER),
    'AUROC of L, drafted steps of one kind': (
        'notes: "Erroneous or hallucinated steps often involve tokens ... low confidence"', '', TELLS),
    'AUROC of G, drafted steps of one kind': (
        'notes: "Hallucinated content tends to have low attention to the input"', '', TELLS),
    "AUROC of both less L's": (
        'notes: "Equal weighting works best; neither signal dominates"', 'L alone', ADDS),
    'right steps of k = 4 over k = 1': ('notes: "k=4: Best trade-off (... ~2% gain)"', 'one candidate', GAIN)}
SHOWN = {               # setting: points of right answers, speed over sd in the notes on the paper
    'default, seed 0': '+3.6, 1.11', 'calibrated': '', 'rsd': '+1.5', 'random-gate': '', 'k 1': 'as sd',
    'k 8': '+2.2', 'tau 0.1': '+0.8, 1.15', 'tau 0.7': '+3.8, 1.08', 'tau 0.9': '+4.2, 1.02',
    'beta 0': '+2.8, 1.10', 'beta 1': '+2.2, 1.08'}
SHOWN_HARD = 'default, seed 0', 'calibrated', 'rsd', 'random-gate'      # on math-hard


def figures(records):
    """Yields (text of a claim, its texts, its figure, its kind) of what the records of a pair allow."""
    if 'runs' in records:
        runs = records.runs('runs')
        for text, names, rival in (('right answers over sd', DEFAULT, USUAL),
                                   ('calibrated gate: right answers over sd', ['calibrated'], USUAL),
                                   ('right answers over rsd', DEFAULT, 'rsd'),
                                   ('right answers over a coin', DEFAULT, 'random-gate')):
            yield text, runs.every, gap(gain(runs, names, rival)), ''
        figure = tuned_over(runs, ['calibrated'], EXACT, MODELLED)
        yield 'calibrated gate: speed over sd', runs.every, figure, MODELLED
        figure = over(runs, 'calibrated', 'rsd', MODELLED)
        yield 'calibrated gate: speed over rsd', runs.every, figure, MODELLED
    yield from answers(records, 'right answers over sd', 'specguard')
    if 'hard' in records:
        runs = records.runs('hard')
        yield 'math-hard: right answers over sd', runs.every, gap(gain(runs, DEFAULT, USUAL)), ''
    if 'drafted' in records:
        yield from step_figures(with_steps(records['drafted'], 'right'))


def gain(runs, names, other):
    """[R] right answers of these settings, on average, less another's."""
    right = runs.sums['right']
    return right[:, runs.columns(names)].mean(1) - right[:, runs.number[other]]


def with_steps(record, key):
    """The rows of a Record that have steps."""
    return [row for row in record.rows if row.get(key)]


def step_figures(rows):
    """How well the signals of a drafted step tell whether it is right; what the selector brings."""
    texts = numpy.arange(len(rows))
    sure, grounded, both = (told(rows, signal) for signal in signals_in(rows))
    yield 'AUROC of L, drafted steps of one kind', texts, sure, ''
    yield 'AUROC of G, drafted steps of one kind', texts, grounded, ''
    yield "AUROC of both less L's", texts, lambda texts: both(texts) - sure(texts), ''
    gains = [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows]
    yield 'right steps of k = 4 over k = 1', texts, gap(gains), ''


def signals_in(rows):
    """Three lists with a list of steps for each row: L, G, and their mean as SpecGuard scales them."""
    steps = [[(L, 1 - ungrounded) for L, ungrounded in row['draft']] for row in rows]
    ranges = signal_ranges([step for row in steps for step in row])
    return [[[L for L, _ in row] for row in steps], [[G for _, G in row] for row in steps],
            [[scaled(L, ranges[0]) + scaled(G, ranges[1]) for L, G in row] for row in steps]]


def told(rows, signal):
    """The figure: the AUROC of a signal among the steps of one family and kind, weighted by their pairs.

    Over all kinds together it would tell kinds apart, because look-ups are both the best grounded steps and
    the most often wrong (Simpson's paradox).
    """
    kinds = [[f'{row["family"]} {kind}' for kind in row['kind']] for row in rows]
    return area(signal, [row['right'] for row in rows], kinds)


def sweeps(pairs):
    """The notes' sweeps and ablations by pair, then of math-hard; signals by family."""
    rows = []
    for record, words, names in (('runs', '', SHOWN), ('hard', 'math-hard: ', SHOWN_HARD)):
        runs = [records.runs_if(record) for records in pairs.values()]
        rows.append((f'{words}{USUAL}', '', *[right_cell(one) for one in runs]))
        rows += [(words + name, SHOWN[name], *[run_cell(one, name) for one in runs]) for name in names]
    for family in TASKS:
        cells = [told_cell(records, family) for records in pairs.values()]
        rows.append((f'AUROC of L, G: {family}', '', *cells))
    return [(('setting', 'notes', *pairs), rows)]


def right_cell(runs):
    """The share of texts that exact decoding has right."""
    return f'{runs.sums["right"][:, runs.number[USUAL]].mean():.0%} right, n {runs.size}' if runs else ''


def run_cell(runs, name):
    """Points of right answers over exact decoding, with their interval; share of tokens by the target.

    Where passes are stored also the modelled speed over exact decoding.
    """
    if not runs or name not in runs.number:
        return ''
    texts = runs.having(name)
    points = with_interval(texts, gap(100 * gain(runs, [name], USUAL)), '+.0f')
    cell = f'{points}, {1 - runs.share("accepted", "tokens", name, texts):.0%}'
    return f'{cell}, {number(over(runs, name, USUAL, MODELLED)(texts))}' if 'full' in runs.sums else cell


def told_cell(records, family):
    """The AUROCs of L and G among the drafted steps of one family."""
    if 'drafted' not in records:
        return ''
    rows = [row for row in with_steps(records['drafted'], 'right') if row['family'] == family]
    sure, grounded, _ = (told(rows, signal)(numpy.arange(len(rows))) for signal in signals_in(rows))
    return f'{sure:.2f}, {grounded:.2f}'


def with_interval(texts, figure, digits):
    """A figure with its interval."""
    low, high = interval(texts, figure)
    return f'{figure(texts):{digits}} ({low:{digits}} to {high:{digits}})'
