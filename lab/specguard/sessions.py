"""What SpecGuard is measured with: engines of a pair, short prompts, sessions whose steps are graded."""
from lab import tasks
from lab.common import MODELS, SEED, embedded
from lab.specguard.rivals import OracleGate
from specmini import Engine
from verify import Autoregressive, Exact, decode

TASKS = 'math', 'table', 'code'     # those whose solutions are lines of work
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


def oracle_steps(engine, row, who):
    """[(lowest log-probability, lowest grounding, right)] of the draft's steps, each behind right ones.

    who: draft or target, whose signals.
    """
    method = OracleGate(signals=who)
    session = graded_session(engine, row, method)
    found = []
    for cycle in decode(session, method):
        logp = min(verdict['logp'] for verdict in cycle.judged)
        grounding = min(verdict['grounding'] for verdict in cycle.judged)
        found.append((logp, grounding, cycle.judged[0]['kept']))
    return found
