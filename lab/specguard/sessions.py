"""What SpecGuard is measured with: engines of a pair, short prompts, sessions whose steps are graded."""
import copy
import functools

from lab import tasks
from lab.common import MODELS, SEED, embedded
from specmini import Engine
from verify import Autoregressive, Exact, decode, tokens_of

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
GREEDY = Exact(draft_temperature=0)
CHAT_STEPS = 'sentence'             # what ends a step of real answers, of verify.STEP_ENDS
SHORT = 200         # tokens of a prompt at most: tables go on to 1,700, nearly half are shorter


def engine_for(rows, target=MODELS / 'target', draft=MODELS / 'draft', device='cpu'):
    """An Engine of the two models with caches for these rows' prompts; on the CPU, as stored headers say."""
    engine = Engine(target=target, draft=draft, max_new=160, device=device)
    engine.open([engine.tokenizer.encode(row['prompt']).ids for row in rows])
    return engine


def short_rows(task, n):
    """n held-out rows of a task whose prompt has at most SHORT tokens."""
    _, tokenizer, _ = embedded('target')
    found = []
    for row in tasks.rows(task, SEED):
        if len(found) == n:
            return found
        if len(tokenizer.encode(row['prompt']).ids) <= SHORT:
            found.append(row)


def step_checker(row, tokenizer, begin):
    """A Session.checker: function from ids to whether their last step is right, by the task's own graders.

    begin: where the answer begins in the ids. A line of work that is cut short is wrong.
    """
    def right(ids):
        text = tokenizer.decode(ids[begin:])
        last = text.strip().split('\n')[-1]
        if 'Answer:' not in row['solution'] or last.startswith('Answer:'):
            return bool(tasks.grade(row, text))
        return text.endswith('\n') and tasks.steps_right(row, text)[-1:] == [True]
    return right


def graded_session(engine, row, method, seed=0):
    """A Session that has read a row's prompt, with the row's step checker."""
    ids = engine.tokenizer.encode(row['prompt']).ids
    plain = isinstance(method, Autoregressive)          # no draft reads along; others bring their calibration
    session = engine.start(ids, Autoregressive() if plain else Exact(), seed)
    session.checker = step_checker(row, engine.tokenizer, len(ids))
    return session


class ContinuedChecker:
    """A Session.checker for any graded prompt: whether the target, going on greedily, comes to the answer.

    A wrong step that the target would mend is right to it. A text on the way of an earlier continuation has
    that one's verdict, and costs nothing.
    Source: Wang et al. 2024 (Math-Shepherd), the hard estimate, of one greedy continuation, not of samples.
    """

    def __init__(self, session, right):
        """session: one that has read its prompt; right: function from a whole answer to its grade, 0 or 1."""
        self.session = copy.copy(session)
        self.session.temperature = 0.0
        self.right = right
        self.ways = []                  # of each continuation (where it began, all ids, verdict)

    def __call__(self, ids):
        for begin, way, verdict in self.ways:
            if begin <= len(ids) and way[:len(ids)] == ids:
                return verdict
        way = self.continued(ids)
        answer = way[len(self.session.tokens):]
        verdict = bool(self.right(self.session.text(answer)))
        self.ways.append((len(ids), way, verdict))
        return verdict

    def continued(self, ids):
        """All ids of the text that the target makes of these, as long as a text from the prompt may be."""
        written = len(ids) - len(self.session.tokens)
        session = copy.copy(self.session)
        session.tokens = list(ids)
        session.room -= written
        session.ended = written > 0 and ids[-1] in session.eos
        return ids + tokens_of(decode(session, GREEDY))


def steps_end(pair):
    """The delimiter of SpecGuard that a pair's texts are measured with."""
    return r'\n' if pair.is_embedded else CHAT_STEPS


def prompt_session(pair, prompt):
    """A Session of a pair that has read a Prompt, with a ContinuedChecker if its row can be graded."""
    session = pair.session(prompt.ids)
    session.text = pair.text
    if pair.grade(prompt.row, '') is not None:
        session.checker = ContinuedChecker(session, functools.partial(pair.grade, prompt.row))
    return session


def signals_along(session, method):
    """[(lowest log-probability, lowest grounding, kept)] of each step that the method's draft proposes.

    Of OracleGate each stands behind right ones, and is kept if it is right.
    """
    found = []
    for cycle in decode(session, method):
        logp = min(verdict['logp'] for verdict in cycle.judged)
        grounding = min(verdict['grounding'] for verdict in cycle.judged)
        found.append((logp, grounding, cycle.judged[0]['kept']))
    return found
