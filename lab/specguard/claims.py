"""SpecGuard: what `python -m lab.measure specguard` stores, and the claims that it must show."""
import functools
import itertools
import random
import re
from pathlib import Path as File

import numpy

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.judge import (CLOCK, MODELLED, Claim, PageTable, area, gap, interval, number, over, ratio,
                       tuned_over)
from lab.measure import SEED, Record, cached_engine, named, on_prompts, prepared, run_row, sd
from model import encode, read_calibration
from train_mask import signal_ranges
from verify import Exact, SpecGuard, readers_of, scaled, token_logps

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
    settings = contest(pair, rate) | (swept_settings() if prompt.place < SWEPT else {})
    row = run_row(settings, pair, prompt)
    return row | dict(runs=figures(row['runs'], KEPT))


def figures(runs, keys):
    """{setting: run} with these figures alone."""
    return {name: {key: run[key] for key in keys} for name, run in runs.items()}


def hard_row(pair, item):
    """{setting: run} of a HARD prompt: the contest."""
    prompt, rate = item
    armed(pair, prompt)
    row = run_row(contest(pair, rate, GAMMAS[:1]), pair, prompt)
    return row | dict(runs=figures(row['runs'], ('tokens', 'accepted', 'right')))


def contest(pair, rate, gammas=GAMMAS):
    """{name: Setting} that claims compare; rate: of the coin."""
    found = {f'sd {gamma}': sd(gamma) for gamma in gammas}
    found |= {f'default, seed {seed}': named('specguard', seed=seed) for seed in range(SEEDS)}
    return found | {
        'calibrated': named('specguard', **GATES.get(File(pair.draft).name, {}), gamma=4),
        'rsd': named('rsd', gamma=4), 'random-gate': named('random-gate', rate=rate)}


def swept_settings():
    """{name: Setting} of the notes' sweeps and ablations, one knob of the default changed in each."""
    found = {f'k {k}': named('specguard', k=k) for k in (1, 2, 8)}
    for knob, values in dict(tau=(0.1, 0.3, 0.7, 0.9), beta=(0.0, 0.3, 0.7, 1.0)).items():
        found |= {f'{knob} {value:g}': named('specguard', **{knob: value}) for value in values}
    return found

def weakest(session, who, ids):
    """[L, 1 - G] of a step (ids) by one model, as SpecGuard sees them."""
    reader = readers_of(session)[who]
    path = reader.model.full.grounded(3, len(session.tokens), 0.01)
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
        row['draft'].append(weakest(session, 'draft', ids))
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


# ------------------------------------------------------------------------------------------ what it must show

GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
EXACT = [f'sd {gamma}' for gamma in GAMMAS]
USUAL = 'sd 4'
DEFAULT = [f'default, seed {seed}' for seed in range(SEEDS)]
SHOWN = {               # setting: points of right answers, speed over sd in the notes on the paper
    'default, seed 0': '+3.6, 1.11', 'calibrated': '', 'as the paper': '', 'rsd': '+1.5', 'oracle-gate': '',
    'and': '', 'target_k 1': '', 'target_k 16': '', 'k 1': 'as sd', 'k 2': '+0.5', 'k 8': '+2.2',
    'tau 0.1': '+0.8, 1.15', 'tau 0.3': '+2.1, 1.14', 'tau 0.7': '+3.8, 1.08', 'tau 0.9': '+4.2, 1.02',
    'beta 0': '+2.8, 1.10', 'beta 0.3': '+3.2, 1.11', 'beta 0.7': '+3.1, 1.10', 'beta 1': '+2.2, 1.08'}
SHOWN_HARD = {          # settings on math-hard, their points in the notes; n_roll: less those of 3
    'default, seed 0': '+3.6', 'calibrated': '', 'rsd': '+1.5', 'oracle-gate': '', 'random-gate': '',
    'and': '', 'n_roll 1': '-1.2', 'n_roll 2': '-0.5', 'n_roll 6': '+0.1'}


def claims(records):
    """The Claims of one pair's Records."""
    if 'runs' in records:
        yield from run_claims(records.runs('runs'))
    if 'hard' in records:
        runs = records.runs('hard')
        yield Claim('math-hard: right answers over sd', 'paper: +0.036', GAIN, numpy.arange(runs.size),
                    gap(gain(runs, DEFAULT, USUAL)))
    if 'drafted' in records:
        yield from step_claims(with_steps(records['drafted'], 'right'))
    if 'overhead' in records:                           # measured no more
        rows = records['overhead'].rows
        texts = numpy.arange(len(rows))
        yield Claim('a step of the target over judging a step', 'notes: 10 to 20', 10, texts,
                    ratio([row['writing'] for row in rows], [row['judging'] for row in rows]), CLOCK)
    if 'altered' in records:
        rows = with_steps(records['altered'], 'draft')
        yield Claim('altered digit is less grounded (draft), paired', 'ours', TELLS, numpy.arange(len(rows)),
                    weaker(rows, 'draft', 1))


def gain(runs, names, other):
    """[R] right answers of these settings, on average, less another's."""
    right = runs.sums['right']
    return right[:, runs.columns(names)].mean(1) - right[:, runs.number[other]]


def run_claims(runs):
    """Right answers and speed of texts that were written end to end."""
    texts = runs.having(*DEFAULT, USUAL)
    yield Claim('right answers over sd, default gate', 'paper: +0.036', GAIN, texts,
                gap(gain(runs, DEFAULT, USUAL)))
    yield Claim('right answers over rsd, default gate', 'notes: +0.03', GAIN, texts,
                gap(gain(runs, DEFAULT, 'rsd')))
    yield Claim('speed over best sd, calibrated', 'paper: 1.12', FASTER, texts,
                tuned_over(runs, ['calibrated'], EXACT, MODELLED), MODELLED)
    yield Claim('speed over rsd, calibrated', 'paper: faster', FASTER, texts,
                over(runs, 'calibrated', 'rsd', MODELLED), MODELLED)
    yield Claim('right answers over a coin of equal rate', 'ours', GAIN, texts,
                gap(gain(runs, DEFAULT, 'random-gate')))


def with_steps(record, key):
    """The rows of a Record that have steps."""
    return [row for row in record.rows if row.get(key)]


def step_claims(rows):
    """How well the signals of a drafted step tell whether it is right; what the selector brings."""
    texts = numpy.arange(len(rows))
    steps = [(L, 1 - ungrounded) for row in rows for L, ungrounded in row['draft']]
    ranges = signal_ranges(steps)
    score = [(scaled(L, ranges[0]) + scaled(G, ranges[1])) / 2 for L, G in steps]
    sure, grounded, both = (within(rows, signal) for signal in (*zip(*steps), score))
    yield Claim('AUROC of L, drafted steps of one kind', 'ours', TELLS, texts, sure)
    yield Claim('AUROC of G, drafted steps of one kind', 'ours', TELLS, texts, grounded)
    yield Claim("AUROC of both less L's", 'paper', ADDS, texts, lambda texts: both(texts) - sure(texts))
    gains = [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows]
    yield Claim('right steps of k = 4 over k = 1', 'notes: +0.02', GAIN, texts, gap(gains))


def within(rows, signal):
    """The figure: the AUROC of a signal [steps] among those of one family and kind, weighted by their pairs.

    Over all kinds together it would tell kinds apart, because look-ups are both the best grounded steps and
    the most often wrong (Simpson's paradox).
    """
    owner = numpy.repeat(numpy.arange(len(rows)), [len(row['right']) for row in rows])
    right = numpy.concatenate([row['right'] for row in rows]).astype(bool)
    kinds = numpy.array([f'{row["family"]}, {kind}' for row in rows for kind in row['kind']])
    parts = []                      # of each kind: figure, place of each text in it or -1, right, wrong steps
    for kind in numpy.unique(kinds):
        texts = numpy.unique(owner[kinds == kind])      # only these, because area compares all with all
        places = numpy.full(len(rows), -1)
        places[texts] = numpy.arange(len(texts))
        chosen = [(owner == text) & (kinds == kind) for text in texts]
        figure = area([numpy.array(signal)[mine] for mine in chosen], [right[mine] for mine in chosen])
        trues = numpy.array([right[mine].sum() for mine in chosen])
        parts.append((figure, places, trues, numpy.array([mine.sum() for mine in chosen]) - trues))

    def mean(texts):
        weighted, pairs = 0.0, 0
        for figure, places, trues, falses in parts:
            there = places[texts][places[texts] >= 0]
            weight = trues[there].sum() * falses[there].sum()
            weighted += weight * figure(there) if weight else 0
            pairs += weight
        return weighted / pairs if pairs else numpy.nan
    return mean


def weaker(rows, who, signal):
    """The figure: the share of pairs in which the altered step has the lower L (0) or G (1), ties half."""
    won = []
    for row in rows:
        gaps = [altered[signal] - own[signal] for altered, own in row[who]]
        won.append(sum(0.5 + (0.5 if signal else -0.5) * numpy.sign(gaps)))
    return ratio(won, [len(row[who]) for row in rows])


def sweeps(pairs):
    """The notes' sweeps and ablations by pair, then of math-hard; altered digits."""
    rows = []
    for record, words, swept in (('runs', '', SHOWN), ('hard', 'math-hard: ', SHOWN_HARD)):
        runs = [records.runs_if(record) for records in pairs.values()]
        rows.append((f'{words}{USUAL}', '', *[right_cell(one) for one in runs]))
        rows += [(words + name, notes, *[run_cell(one, name, swept) for one in runs])
                 for name, notes in swept.items()]
    for who in ('draft', 'target'):
        cells = [altered_cell(records, who) for records in pairs.values()]
        rows.append((f'altered digit, {who}', '', *cells))
    return PageTable(('setting', 'notes', *pairs), rows)


def right_cell(runs):
    """The share of texts that exact decoding has right."""
    return f'{runs.sums["right"][:, runs.number[USUAL]].mean():.0%} right, n {runs.size}' if runs else ''


def run_cell(runs, name, swept):
    """Points of right answers over exact decoding; share of tokens by the target; modelled speed over it.

    Without passes there is no speed, and the points have their interval.
    """
    if not runs or name not in runs.number:
        return ''
    texts = runs.having(*[name for name in swept if name in runs.number])       # the same for all settings
    points = gap(100 * gain(runs, [name], USUAL))
    target = f'{1 - runs.share("accepted", "tokens", name, texts):.0%}'
    if 'full' not in runs.sums:
        return f'{with_interval(texts, points, "+.1f")}, {target}'
    return f'{points(texts):+.0f}, {target}, {number(over(runs, name, USUAL, MODELLED)(texts))}'


def altered_cell(records, who):
    """Share of pairs in which the altered step has the lower G, and the lower L."""
    if 'altered' not in records:
        return ''
    rows = with_steps(records['altered'], who)
    texts = numpy.arange(len(rows))
    sure = weaker(rows, who, 0)(texts)
    return f'G {with_interval(texts, weaker(rows, who, 1), ".2f")}, L {sure:.2f}, n {len(rows)}'


def with_interval(texts, figure, digits):
    """A figure with its interval."""
    low, high = interval(texts, figure)
    return f'{figure(texts):{digits}} ({low:{digits}} to {high:{digits}})'
