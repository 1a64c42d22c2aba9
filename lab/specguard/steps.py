"""Steps that are graded: by the tasks' own graders, or by where the target goes on from them."""
from lab import tasks
from lab.measure import prepared, sd
from lab.specguard.gate import continued_checker
from specmini import grade
from verify import Exact

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work


def step_checker(row, tokenizer, begin):
    """A checker by the task's own graders: function from ids to whether their last step is right.

    begin: where the answer begins in the ids. A line of work that is cut short is wrong.
    """
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
