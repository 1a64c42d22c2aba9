"""The laboratory's own tools: generated tasks and graders, timing programs, the course."""
import itertools
import re

import pytest

from lab import course, speed, tasks, times
from lab.tests.helpers import HOME, case, program, put
from specmini import Engine
from verify import Cycle, Judged


def rows_of(task, split='held-out', n=100):
    return list(itertools.islice(tasks.rows(task, 1, split), n))


def test_a_prompt_for_each_kind():
    """The models' page has one that the target answers as it says, and of long tables the command."""
    page = (HOME / 'lab/README.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| `(\S+)` \| `\$?["\'](.+)["\']` \| `(.+)` \|$', page, re.M)
    assert {kind for kind, *_ in rows} | {'table-long'} == {*tasks.TASKS} and 'lab.tasks table-long' in page
    engine = Engine(max_new=120)
    for kind, prompt, shown in rows:
        text, _ = engine.generate(prompt.replace('\\|', '|').replace('\\n', '\n'), 'sd')
        assert re.fullmatch(re.escape(shown).replace(r'\.\.\.\ ', r'(?s:.*)'), text.strip()), (kind, text)


@pytest.mark.slow
@pytest.mark.parametrize('task', tasks.TASKS)
def test_rows_are_seeded_and_their_reference_is_right(task):
    """Equal seeds give equal rows, no text is in both splits, and the grader knows the reference."""
    rows = rows_of(task)
    assert rows == rows_of(task)
    texts = {row['prompt'] + row['solution'] for row in rows}
    assert not texts & {row['prompt'] + row['solution'] for row in rows_of(task, 'train', n=400)}
    for row, other in zip(rows, rows[1:] + rows[:1]):
        if task == 'story':
            assert tasks.grade(row, row['solution']) is None
        else:
            assert tasks.grade(row, row['solution'])
            assert not tasks.grade(row, row['solution'][:-2])
            assert tasks.grade(row, other['solution']) == (
                row['answer'] == other['answer'] or task == 'code' and
                tasks.outputs(row['answer']) == tasks.outputs(other['answer']))


@pytest.mark.parametrize('task', tasks.WORKED)
def test_steps_are_small_and_a_wrong_one_is_found(task):
    for row in rows_of(task, n=20):
        steps = [line for line in row['solution'].strip().split('\n') if not line.startswith('Answer')]
        assert tasks.steps_right(row, row['solution']) == [True] * len(steps)
        assert all(int(found[4]) <= 999 for found in map(tasks.STEP.fullmatch, steps) if found)
        last = steps[-1]
        wrong = row['solution'].replace(last, last[:-1] + str((int(last[-1]) + 1) % 10))
        assert tasks.steps_right(row, wrong) == [True] * (len(steps) - 1) + [False]
        assert tasks.steps_right(row, row['solution'] + '\n1 + 1 = 2')[-1] is False      # one too many


@pytest.mark.parametrize('text, wanted', [
    ('def f(a, b): return max(a - b, 2) ** 2', [16, 4, 4, 4]),
    ('def f(a): return xs[0]', None), ('def f(a): return a % 0', None), ('def f(a): return a ** 9', None),
    ('def f(a): return a.real', None), ('def f(a): return open(a)', None), ('def f(xs): return xs * a', None),
    ('def f(xs): return xs * 99', None), ('import os', None), ('def f(a): return (' + '(' * 300, None)])
def test_outputs_of_code(text, wanted):
    """Code is evaluated by a small grammar: what is outside it has no outputs and is never run."""
    assert tasks.outputs(text) == wanted


# -------------------------------------------------------------------------------------------- lab/speed.py

def test_speed(monkeypatch):
    """Small shapes on a CPU. Pretended guesses are right as often as their chance says; the text stays."""
    shapes = dict(target=(97, 64, 32, 2, 4, 2, 16), draft=(97, 64, 32, 1, 4, 2, 16))
    for name, value in dict(SHAPES=shapes, FORMS={'': False}, KEYS=(256,), PROMPT=8, WRITTEN=40,
                            COPIED=2 ** 20).items():
        monkeypatch.setattr(speed, name, value)
    rows = [row for row in speed.rows('cpu') if row['line'] != 'ar, transformers']
    assert [row['line'] for row in rows] == [
        'copy', 'ar', 'sd 0.6', 'sd 0.8', 'sd 0.9', 'pass 256, dense', 'pass 256, sparse']
    assert all(row['counts'] for row in rows[1:5]) and 1.5 < rows[3]['a pass'] < rows[4]['a pass'] < 5


# -------------------------------------------------------------------------------------------- lab/times.py

def cycle(drafted, *kept, **passes):
    """A Cycle of a second: tokens drafted, verdicts on those judged, then a token of the target's."""
    rows = [Judged([0], 1.0, 1.0, chance=1.0, kept=verdict) for verdict in kept]
    labels = ['draft'] * sum(kept) + ['target']
    return Cycle([0] * drafted, rows, [0] * len(labels), labels, passes, 1.0)


@pytest.mark.parametrize('kept, judged, busy, advice', [
    (0, 29, False, 'does not pay'), (0, 9, False, 'too few'), (1, 29, False, 'too few'),
    (40, 40, True, 'no verdict, because the machine is busy')])
def test_advice_on_a_draft(kept, judged, busy, advice):
    cycles = [cycle(1, i < kept, **{'draft/full': [1, 1]}) for i in range(judged)]
    assert advice in list(times.speed_tables(True, cycles, {0: 1.0, 1: 1.0}, 0.2, 1.0, busy=busy))[-1]


def test_the_forecast_is_of_whole_cycles():
    """A cycle's two passes take 0.2 and 0.6 s of its second, so 0.1 besides each; a plain step takes 0.7."""
    passes = {'draft/full': [1, 1], 'target/full': [1, 2]}
    lines = list(times.speed_tables(True, [cycle(1, True, **passes)] * 30, {0: 0.4, 1: 0.6}, 0.2, 0.7))
    assert lines[-2].split()[-2:] == ['1.00', f'{2 * 0.7 / (0.2 + 0.6 + 2 * 0.1):.2f}']


# ---------------------------------------------------------------------------------------- lab/course.md

COURSE = (HOME / 'lab/course.md').read_text(encoding='utf-8')
SOLUTIONS = re.findall(r'Solution</summary>\s+```python\n(.*?)```', COURSE, re.S)


@pytest.mark.parametrize('number, old, new', [          # an exercise, and how its solution becomes wrong
    case('1', 1, 'keep = ', 'keep = 0.1 + ', slow=True), case('2', 2, 'return p', 'return q'),
    case('3', 3, 'gamma * cost', 'gamma + cost'), case('4', 4, 'False', 'True'),
    case('5', 5, '2 * self.gamma', '3 * self.gamma', slow=True),
    case('6', 6, '# it says nothing', 'lossless = True  #', slow=True),
    case('7', 7, 'session.target, path)', 'session.target, whole)'),
    case('8', 8, 'rest = residual(rest, q)', 'pass'),
    case('9', 9, 'self.whole and', 'False and', slow=True),
    case('10', 10, 'logits.softmax(-1)', 'session.probs(logits, 1.0)')])
def test_course_knows_its_solutions(number, old, new, tmp_path, capsys):
    """A solution is right, one that was changed is not; and one without its first name is told so."""
    text = SOLUTIONS[number - 1]
    answer = tmp_path / 'answer.py'
    wrong = text.replace(old, new, 1)
    for changed, says in (text, 'right'), (wrong, 'not yet'), ('', 'your file defines no'):
        answer.write_text(changed)
        status, out, _ = program(capsys, number, answer, main=course.main)
        assert status == (says != 'right') and says in out


COUNTED = """
from verify import METHODS, Exact
class Hidden(Exact):
    lossless = True
    cycles = 0
    def learn(self, cycle):
        self.cycles += 1
    def chance(self, score, i):
        return 1.0 if self.cycles >= 3 else super().chance(score, i)
METHODS.update(hidden=Hidden)
"""


@pytest.mark.parametrize('number, answer, says', [
    (9, COUNTED, 'after a block that lost a guess it is off')])
def test_course_sees_through_answers_that_ask_nothing(number, answer, says, tmp_path, capsys):
    """A rule that errs after three cycles, whatever they were."""
    put(tmp_path, {'answer.py': answer})
    status, out, _ = program(capsys, number, tmp_path / 'answer.py', main=course.main)
    assert status == 1 and says in out
