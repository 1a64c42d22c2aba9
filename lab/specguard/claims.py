"""SpecGuard: single steps that are graded one by one, the claims that rows must show, and tables."""
import itertools
import math
import re

import numpy
import pandas
from scipy.stats import binomtest

from lab import tasks
from lab.best.claims import answered, less_ar
from lab.judge import (BEST_SD, PLAIN, area, array, at, estimate, gap, grid, mean, over, overview, plain_sd,
                       settings)
from lab.measure import Prompt, Record, started
from model import encode
from verify import SpecGuard

SOURCE = 'notes on the paper, a review that gives more settings than it'
TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
MOST_STEPS = 6          # steps of a solution, evenly spaced, in whose place the draft writes another
LAYERS = 1, 2, 3, 6     # the last layers of the draft over which the rollout goes
ONLY = "the lab's tasks, because their steps are graded one by one"
EVERY = 'specguard tau=-1'      # it keeps each step
HARD = 'math-hard'      # its problems have five to eight steps
ANSWERING = 'specguard k=4 gamma=4 delimiter=sentence'      # of real pairs
STRICTER = ANSWERING.replace('k=4', 'k=4 tau=0.7')
BETAS = 0.5, 0.3, 0.7, 0.0, 1.0     # of equally good gates the first is chosen
TAUS = [i / 20 for i in range(22)]
ACCURACY = 0.95         # share of its kept steps that a gate has right at least
GAIN = 0.01             # of right answers: a hundredth of the texts
FASTER = 1.05
TELLS = 0.65            # AUROC of a signal that is worth reading; set before anything was measured
ADDS = 0.02             # and what a second signal has to add to the first one's
MORE_RIGHT = '"3.6% average accuracy improvement over baseline SD"; the line: ours'
OVER_RSD = '"Performance exceeds reward-guided SD while being faster"; the line: ours'
CHECKER = "`rsd`, whose reward is the task's checker"
DEFAULT = r'specguard( k=4 gamma=\d delimiter=sentence)?'      # real pairs have no lines
CLAIMS = {              # text: whose, rival, line
    'right answers over sd': (MORE_RIGHT, f'`sd`, {PLAIN}', GAIN),
    'speed over sd': ('"Latency improvement is consistent across domains (~11%)"; the line: ours', BEST_SD,
                      FASTER),
    'math-hard: right answers over sd': (MORE_RIGHT, f'`sd`, {PLAIN}', GAIN),
    'right answers over rsd': (OVER_RSD, CHECKER, GAIN),
    'speed over rsd': (OVER_RSD, CHECKER + ', at its best gamma', FASTER),
    'right answers over a coin': ('ours', 'a coin that lets the target write as many tokens', GAIN),
    'AUROC of L': ('"tokens the model generates with low confidence"; the line: ours', 'steps of one kind',
                   TELLS),
    'AUROC of G': ('"Hallucinated content tends to have low attention to the input"; the line: ours',
                   'steps of one kind', TELLS),
    "AUROC of both less L's": ('"neither signal dominates"; the line: ours', 'L alone', ADDS),
    'right steps of k = 4 over k = 1': ('"~2% gain"; the line: ours', 'one candidate', GAIN)}


# ------------------------------------------ single steps: whether drafted ones are right, and their signals

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


# ------------------------------------------------------------------- the gate that graded training steps give

def gates(rows):
    """A frame of gates on rows of graded steps: beta, tau, share rejected, share of the kept that is right.

    surely: the lower end of that share's 95 % interval, because the luckiest of many gates looks too good.
    Source: Wilson 1927.
    """
    columns = 'right', 'scaled_L', 'scaled_G'
    right, L, G = (numpy.concatenate([row[name] for row in rows]) for name in columns)
    found = []
    for beta, tau in itertools.product(BETAS, TAUS):
        kept = right[beta * L + (1 - beta) * G >= tau]
        n, good = len(kept), int(kept.sum())
        surely = binomtest(good, n).proportion_ci(method='wilson').low if n else 0.0
        found.append(dict(beta=beta, tau=tau, rejected=1 - n / len(right), right=good / n if n else math.nan,
                          surely=surely))
    return pandas.DataFrame(found)


def best_gate(found):
    """The row of the gate that surely has ACCURACY and rejects the fewest steps; if none has, the surest."""
    lacks = (ACCURACY - found.surely).clip(lower=0)
    return found.assign(lacks=lacks).sort_values(['lacks', 'rejected'], kind='stable').iloc[0]


def calibrated(rows, gamma=4):
    """The setting of the best gate of these steps; gamma: where the target writes."""
    gate = best_gate(gates(rows))
    return f'specguard beta={gate.beta:g} tau={gate.tau:g} gamma={gamma}'


# ------------------------------------------------------------------------------------------------- the claims

def figures(pair):
    """Yields (text of a claim, Estimate) of what the records of a pair allow, of both gates."""
    if pair.has('gates'):
        usual, hard = halves(pair.frame('gates'))
        for by, [gate] in two_gates(pair, usual, 4).items():
            for text, frame, rival in (('right answers over sd', usual, 'ar'),
                                       ('math-hard: right answers over sd', hard, 'ar'),
                                       ('right answers over rsd', usual, 'rsd gamma=4')):
                yield text, gap(frame, gate, rival, by=by,
                                ceiling=1 - frame[frame.setting == rival].right.mean())
            yield 'right answers over a coin', estimate(over_coin(usual, gate), usual.text.nunique(), by=by)
        yield from step_figures(pair.rows('drafted'))
    answers = answered(pair)
    for by, setting in ('default gate: ', ANSWERING), ('stricter gate: ', STRICTER):
        if setting in answers:
            yield 'right answers over sd', less_ar(answers, setting, by=by)
    frame = pair.clock
    for by, mine in two_gates(pair, frame, 8).items() if frame is not None else ():
        for text, rivals in ('speed over sd', plain_sd(frame)), ('speed over rsd', settings(frame, 'rsd')):
            if rivals:
                yield text, over(frame, mine, rivals, by=by, ceiling=ceiling(pair, frame, rivals))


def two_gates(pair, frame, gamma):
    """{words: settings} of the default gate, and of that which training steps give where they are stored."""
    found = {'default gate: ': [name for name in frame.setting.unique() if re.fullmatch(DEFAULT, name)]}
    if pair.has('gate'):
        found['calibrated gate: '] = [calibrated(pair.rows('gate'), gamma)]
    return found


def halves(frame):
    """(its rows of TASKS, its rows of math-hard)."""
    return frame[frame.family != HARD], frame[frame.family == HARD]


def over_coin(frame, gate):
    """A function of texts: right answers of a gate less those of a coin at an equal share of target tokens.

    It interpolates between the rates that were run, and plain decoding, where the target writes all.
    """
    names = [gate, *settings(frame, 'random-gate'), 'ar']
    kept, tokens, right = (array(frame, column, names) for column in ('kept', 'tokens', 'right'))

    def gain(texts):
        shares, answers = 1 - kept[texts].sum(-2) / tokens[texts].sum(-2), right[texts].mean(-2)
        found = []
        for share, answer in zip(shares.reshape(-1, len(names)), answers.reshape(-1, len(names))):
            order = share[1:].argsort()
            found.append(answer[0] - numpy.interp(share[0], share[1:][order], answer[1:][order]))
        return numpy.reshape(found, shares.shape[:-1])
    return gain


def ceiling(pair, frame, rivals):
    """The speed over rivals if each step were kept: by the clock, else by a draft pass over four rows."""
    if settings(frame, EVERY):
        return over(frame, EVERY, rivals).figure
    return 1 / at(pair.costs['draft/full'], 4) / over(frame, rivals, 'ar').figure if pair.costs else math.inf


def step_figures(rows):
    """How well signals tell whether a drafted step is right; what the selector brings."""
    right = [x for row in rows for x in row['right']]
    of = f'texts, {len(right)} steps, {right.count(0)} wrong'
    sure, grounded, both = (told(rows, signal) for signal in ('L', 'G3', 'both'))
    yield 'AUROC of L', estimate(sure, len(rows), of)
    yield 'AUROC of G', estimate(grounded, len(rows), of)
    yield "AUROC of both less L's", estimate(lambda texts: both(texts) - sure(texts), len(rows), of)
    yield 'right steps of k = 4 over k = 1', mean(
        [numpy.mean(row['right']) - numpy.mean(row['first']) for row in rows])


# ---------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame): gates, knobs, beta by tau, signals, the clock."""
    own, frames = [pair for pair in pairs if pair.has('gates')], {}
    for pair in own:
        frames[pair.name], frames[f'{pair.name}, {HARD}'] = halves(pair.frame('gates'))
    yield 'Gates: points, target, rejected, over a coin', by_setting(frames, gate_cell)
    yield 'Knobs: points, target', by_setting({pair.name: pair.frame('knobs') for pair in own}, points)
    yield 'Beta and tau: points, target, of both pairs', beta_table(own)
    yield 'The best gates of graded training steps', pandas.DataFrame(
        [gate_row(pair) for pair in pairs if pair.has('gate')])
    yield 'AUROC among drafted steps of one kind', signal_table(own)
    for pair in own:
        yield f'{pair.name}, by the clock', overview(pair.frame('clock'))


def by_setting(frames, cell):
    """A row a setting, a column for each of frames; cell: of (frame, setting)."""
    lines = {}
    for column, frame in frames.items():
        right = frame[frame.setting == 'ar'].right.mean()
        for name in settings(frame, 'specguard', 'rsd'):
            line = lines.setdefault(name, dict(setting=f'`{name}`'))
            line[f'{column} (n {frame.text.nunique()}, plain {right:.0%} right)'] = cell(frame, name)
    return pandas.DataFrame(list(lines.values()))


def points(frame, name):
    """Points of right answers over plain decoding, their interval, the target's share of tokens."""
    found, mine = gap(frame, name, 'ar'), frame[frame.setting == name]
    figure, low, high = (f'{100 * x:+.0f}' for x in (found.figure, found.low, found.high))
    return f'{figure} ({low} to {high}), {1 - mine.kept.sum() / mine.tokens.sum():.0%}'


def gate_cell(frame, name):
    """What `points` says, the share of steps that are rejected, points over a coin."""
    mine = frame[frame.setting == name]
    coin = over_coin(frame, name)(numpy.arange(frame.text.nunique()))
    return f'{points(frame, name)}, {mine.unkept.sum() / mine.cycles.sum():.0%}, {100 * coin:+.0f}'


def beta_table(pairs):
    """A row a beta, a column a tau, the pairs' cells side by side."""
    def cells(name):
        return ' / '.join(points(pair.frame('grid'), name) for pair in pairs)
    return grid(settings(pairs[0].frame('grid'), 'specguard'), cells, 'beta', 'tau')


def gate_row(pair):
    """A row of a pair: the setting of its calibrated gate, and the best gate of each beta."""
    rows = pair.rows('gate')
    line = dict(pair=pair.name, calibrated=f'`{calibrated(rows)}`')
    for beta, found in gates(rows).groupby('beta'):
        best = best_gate(found)
        line[f'beta={beta:g}'] = f'tau {best.tau:g}: rejects {best.rejected:.0%}, {best.right:.1%} right'
    return line


def signal_table(pairs):
    """AUROCs of L, of both, and of G by rollouts over so many layers, by family."""
    names = dict(L='L', both='both') | {f'G, last {n}': f'G{n}' for n in LAYERS}
    lines = []
    for pair, family in itertools.product(pairs, TASKS):
        rows = [row for row in pair.rows('drafted') if row['family'] == family]
        right = sum((row['right'] for row in rows), [])
        line = dict(pair=pair.name, family=family, steps=f'{len(right)}', wrong=f'{right.count(0)}')
        lines.append(line | {name: told(rows, key)(numpy.arange(len(rows))) for name, key in names.items()})
    return pandas.DataFrame(lines)
