"""Steps that are graded: by the tasks' own graders, or by where the target goes on from them."""
import copy

from lab import tasks
from lab.measure import prepared, sd
from specmini import grade
from verify import Exact, decode, tokens_of

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


class ContinuedChecker:
    """A checker for any graded prompt: whether the target, going on greedily, comes to the answer.

    So a wrong step that the target would mend counts as right. A text on the way of an earlier continuation
    has the verdict of that one, and costs nothing.
    Source: Wang et al. 2024 (Math-Shepherd), the hard estimate, with one greedy continuation.
    """

    def __init__(self, session, right):
        """session: one that has read its prompt; right: function from a whole answer to its grade."""
        self.session = copy.copy(session)
        self.right = right
        self.ways = []                  # of each continuation (where it began, all ids, verdict)

    def __call__(self, ids):
        for begin, way, verdict in self.ways:
            if begin <= len(ids) and way[:len(ids)] == ids:
                return verdict
        begin = len(self.session.tokens)
        session = copy.copy(self.session)
        session.tokens = list(ids)
        session.tokens_left -= len(ids) - begin
        session.ended = len(ids) > begin and ids[-1] in session.eos
        way = ids + tokens_of(decode(session, Exact(draft_temperature=0)))
        verdict = bool(self.right(session.text(way[begin:])))
        self.ways.append((len(ids), way, verdict))
        return verdict


def graded_session(pair, prompt):
    """A Session that has read a Prompt, with a step checker if its row can be graded."""
    engine = prepared(pair, sd(4))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, Exact())
    session.checker = None
    if pair.is_embedded:
        session.checker = step_checker(prompt.row, pair.tokenizer, len(prompt.ids))
    elif grade(prompt.row, '') is not None:
        session.checker = ContinuedChecker(session, lambda text: grade(prompt.row, text))
    return session


def steps_end(pair):
    """The delimiter of SpecGuard that a pair's texts are measured with."""
    return r'\n' if pair.is_embedded else 'sentence'
