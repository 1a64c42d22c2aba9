"""Claims on any pair's own answers, judged by what answers.py stored: altered numbers, drafted steps, runs.

Their lines were set before anything was measured: grounding, sink dropped, is worth something if its AUROC
within kinds of steps is at least 0.65, or if it adds 0.02 to that of the log-probability alone.
"""
import itertools
from typing import NamedTuple

import numpy

from lab.common import Claim, PageTable, mean, roc_area
from lab.specguard.calibrate import signal_ranges
from lab.specguard.steps import ROLLOUTS
from verify import step_score

ABOVE_0 = 1e-9      # the line of a claim that says `above 0`
TELLS = 0.65        # AUROC of a signal that is worth reading
ADDS = 0.02         # and how much it is to add to the other signal's
NO_SINK = dict(draft='without the first', target='target without the first')    # rollouts
GROUNDED = ('A wrong step looks back at the text as much as a right one: where attention goes says little of '
            'what is made of it')
WEAKER = 'Confidence tells wrong steps better, and half of the score is the weaker signal'
ALIKE = 'Candidates of one model err alike: the one most like the others may share their error'


# ----------------------------------------------------------------------------------------------- figures

def area_within(signal, right, groups):
    """The mean AUROC among steps of one group, weighted by its pairs of a right and a wrong one.

    Look-ups are both the best grounded steps and the most often wrong: over all kinds of steps together an
    AUROC tells kinds apart, not right from wrong (Simpson's paradox).
    """
    areas = 0.0
    count = 0
    for group in numpy.unique(groups):
        equal = groups == group
        good = right[equal].sum()
        pairs = good * (equal.sum() - good)
        if pairs:
            areas += pairs * roc_area(signal[equal], right[equal])
            count += pairs
    return float(areas / count) if count else numpy.nan


def advantage(problems):
    """By how much the score's AUROC within kinds beats that of confidence alone; problems: see columns."""
    if not problems:
        return numpy.nan
    score, L, _, right, kind = numpy.concatenate(problems).T
    return area_within(score, right, kind) - area_within(L, right, kind)


def grounding_area(problems):
    """Grounding's own AUROC within kinds of steps; problems: see columns."""
    _, _, G, right, kind = numpy.concatenate(problems).T
    return area_within(G, right, kind)


class Seen(NamedTuple):
    """A step with all of its signals."""
    logp: dict                      # by model, lowest, nats
    ungrounded: dict                # by rollout, 1 - lowest grounding
    right: bool                     # or not altered
    kind: str                       # family, kind


def seen_at(row, i, right, kind):
    """The Seen at place i of the columns of a row."""
    logp = {who: column[i] for who, column in row['logp'].items()}
    ungrounded = {rollout: column[i] for rollout, column in row['ungrounded'].items()}
    return Seen(logp, ungrounded, right, f'{row["family"]}, {kind}')


def altered_steps(row):
    """[Seen] of a row of the record `altered`; to be right is not to be altered."""
    return [seen_at(row, i, not altered, row['kind'][i]) for i, altered in enumerate(row['altered'])]


def drafted_steps(row):
    """[Seen] of a row of the record `continued`: the draft's first candidate of each step."""
    found = []
    for i in row['picks'].get('1', []):
        kind = kind_of_step(row['candidates']['text'][i])
        found.append(seen_at(row, i, row['candidates']['right'][i], kind))
    return found


def kind_of_step(text):
    """What a step is, by its own text: `work` has an equation; a `look-up` is the row of a table."""
    if text.strip().startswith('|'):
        return 'look-up'
    if 'answer' in text.lower():
        return 'answer'
    return 'work' if '=' in text else 'words'


class Answers(NamedTuple):
    """The steps of a record."""
    name: str
    problems: list                  # of lists of Seen, none empty

    @property
    def steps(self):
        return [*itertools.chain(*self.problems)]

    @property
    def kinds(self):
        return sorted({step.kind for step in self.steps})

    @property
    def rollouts(self):
        return [*self.problems[0][0].ungrounded]


def answers_of(stored):
    """[Answers] of the records that are there and have a step."""
    found = []
    for record, name, steps in (('altered', 'Altered numbers', altered_steps),
                                ('continued', 'Drafted steps', drafted_steps)):
        rows = stored[record].rows if record in stored else []
        problems = [problem for problem in map(steps, rows) if problem]
        if problems:
            found.append(Answers(name, problems))
    return found


def columns(seen, rollout):
    """[steps, 5] of each text: score, L, G, whether right, number of its kind.

    Scales are of all steps, right or not; beta is 0.5.
    """
    kinds = seen.kinds
    ranges = signal_ranges([signals_of(step, rollout) for step in seen.steps])
    arrays = []
    for problem in seen.problems:
        rows = []
        for step in problem:
            signals = signals_of(step, rollout)
            score, _ = step_score([signals], ranges, 0.5, 'weighted')
            rows.append((score, *signals, step.right, kinds.index(step.kind)))
        arrays.append(numpy.array(rows, dtype=float))
    return arrays


def signals_of(step, rollout):
    """(L, G) of the model whose attention the rollout is of."""
    return step.logp[ROLLOUTS[rollout].who], 1 - step.ungrounded[rollout]


# -------------------------------------------------------------------------------------------- the claims

def answer_claims(stored):
    """Grounding, sink dropped, alone and beside confidence; the selector and target_k at T = 0.7."""
    found = []
    for seen in answers_of(stored):
        found += signal_claims(seen)
    if 'continued' in stored:
        found += selector_claims(stored['continued'].rows)
    if 'sampled' in stored:
        found += sampled_claims(stored['sampled'].rows)
    return found


def signal_claims(seen):
    for who, rollout in NO_SINK.items():
        if rollout not in seen.rollouts:                # no draft model
            continue
        rows = columns(seen, rollout)
        _, L, G, right, kind = numpy.concatenate(rows).T
        wrong = int((1 - right).sum())
        sure = area_within(L, right, kind)
        note = f'n = {len(rows)} texts, {len(L)} steps, {wrong} wrong or altered; L alone: {sure:.3f}'
        yield Claim(f'{seen.name}, {who}: AUROC of grounding without the first token, within kinds of steps',
                    'paper', TELLS, rows, grounding_area, note=note, why=GROUNDED)
        yield Claim(f'{seen.name}, {who}: AUROC of both signals over that of L, within kinds of steps',
                    'paper', ADDS, rows, advantage, note=note, why=WEAKER)


def selector_claims(rows):
    gains = []
    for row in rows:
        if row['picks']:
            gains.append(share_right(row, '4') - share_right(row, '1'))
    if gains:
        yield Claim('Drafted steps: right ones of the most central of 4 over the first, above 0', 'notes',
                    ABOVE_0, gains, mean, note=f'n = {len(gains)} texts', why=ALIKE)


def share_right(row, selector):
    """The share of the steps of a row of `continued` that are right, of those that a selector chooses."""
    return mean(row['candidates']['right'][i] for i in row['picks'][selector])


CONTESTS = [        # (what, name of the one, of the other), of answers.sampled_methods
    ('Selector at T = 0.7, the draft writes all: right answers of k = 4 over k = 1',
     'draft alone, k = 4', 'draft alone'),
    ('Selector at T = 0.7, the target writes half of the steps: right answers of k = 4 over k = 1',
     'coin, k = 4', 'coin'),
    ("Target's candidates at T = 0.7, it writes half of the steps: right answers of 16 over 1",
     'coin, target_k = 16', 'coin'),
    ("Target's candidates at T = 0.7, it writes all: right answers of 16 over 1",
     'target alone, target_k = 16', 'ar')]


def sampled_claims(rows):
    for text, mine, other in CONTESTS if rows else []:
        gains = [row['runs'][mine]['right'] - row['runs'][other]['right'] for row in rows]
        note = (f'n = {len(rows)}; {target_share(rows, mine):.2f} and {target_share(rows, other):.2f} of the '
                'steps by the target')
        yield Claim(f'{text}, above 0', 'notes', ABOVE_0, gains, mean, note=note, why=ALIKE)


def target_share(rows, name):
    """The share of a method's cycles (steps) that the target wrote."""
    return average(rows, name, 'wrote') / average(rows, name, 'cycles')


def average(rows, name, field):
    """The mean over the rows of `sampled` of what is stored of a method's text."""
    return mean(row['runs'][name][field] for row in rows)


# -------------------------------------------------------------------------------------------- the tables

def answer_tables(stored):
    found = []
    signals = [*itertools.chain(*map(signal_cells, answers_of(stored)))]
    if signals:
        head = 'steps', 'kind', 'signal', 'n', 'wrong or altered', 'mean', 'AUROC'
        found.append(PageTable(head, signals))
    if 'sampled' in stored and stored['sampled'].rows:
        head = 'at T = 0.7', 'n', 'right', 'target steps', 'tokens a text', 's a text'
        found.append(PageTable(head, [*sampled_cells(stored['sampled'].rows)]))
    return found


def signal_cells(seen):
    """The AUROC of each signal within kinds of steps; of L, and G without the first token, in each kind."""
    kinds = numpy.array([step.kind for step in seen.steps])
    right = numpy.array([float(step.right) for step in seen.steps])
    for name, values in signals_by_name(seen):
        told_apart = name.startswith('L') or 'without' in name
        for kind in (*seen.kinds, None) if told_apart else (None,):
            mine = kinds == kind if kind else kinds == kinds
            area = area_within(values[mine], right[mine], kinds[mine])
            yield (seen.name, kind or 'within kinds', name, int(mine.sum()), int((1 - right[mine]).sum()),
                   float(values[mine].mean()), '-' if area != area else area)


def signals_by_name(seen):
    """(name, array [steps]) of each signal."""
    for who in seen.steps[0].logp:
        yield f'L of the {who}', numpy.array([step.logp[who] for step in seen.steps])
    for rollout in seen.rollouts:
        yield f'G, {rollout}', numpy.array([1 - step.ungrounded[rollout] for step in seen.steps])


def sampled_cells(rows):
    for name in rows[0]['runs']:
        share = '-' if name in ('ar', 'sd') else target_share(rows, name)
        yield (name, len(rows), average(rows, name, 'right'), share, average(rows, name, 'tokens'),
               average(rows, name, 'seconds'))
