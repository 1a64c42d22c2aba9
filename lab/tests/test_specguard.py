"""SpecGuard's baselines, how steps are graded, its records, its claims by hand."""
import pytest

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import judge, tasks
from lab.specguard import claims
from lab.tests.helpers import RANGES, bytes_tokenizer, law_gap
from lab.toys import network, plain, session, write
from verify import METHODS, SpecGuard, most_central

PROMPT = [3, 2]
LINES = dict(text=lambda ids: ''.join('\n' if i in (1, 5) else 'abcdefghijkl'[i] for i in ids),
             calibration=dict(signals=RANGES))


def step_session(tokens_left=40, checker=None, **settings):
    """A Session of a random pair whose texts have lines."""
    s = session(network(0, 12), network(1, 12), PROMPT, tokens_left, **LINES | settings)
    s.calibration = s.calibration | dict(checker=checker)
    return s


def test_a_gate_by_checker():
    """It keeps what the checker likes, and pays for a reward; of nothing the target's text is left."""
    _, cycles = write(step_session(checker=lambda ids: sum(ids) % 3 == 0), METHODS['rsd'](max_step=4))
    text, verdicts = PROMPT, []
    for cycle in cycles:
        verdicts.append(sum(text + cycle.drafted) % 3 == 0)
        assert cycle.judged[0].kept == verdicts[-1] and 'draft/reward' in cycle.passes
        text = text + cycle.tokens
    assert set(verdicts) == {True, False}
    tokens, _ = write(step_session(checker=lambda ids: False), METHODS['rsd']())
    assert tokens == plain(network(0, 12), PROMPT, 40)
    with pytest.raises(ValueError):
        write(step_session(), METHODS['rsd']())


@pytest.mark.parametrize('rate, gap', [(0.0, 0), (0.5, 0.05), (1.0, 0.1)])
def test_law_of_random_gate(rate, gap):
    """Every draw enumerated: at rate 0 the target's law; the further from it, the more the draft writes."""
    method = METHODS['random-gate'](k=1, rate=rate, max_step=2)
    found = law_gap(method, horizon=2, text=LINES['text'])
    assert found > gap if rate else found < 1e-9


def test_step_checker_by_hand():
    """A right line, a right text; then a wrong line, a line cut short, and a wrong answer."""
    row = next(tasks.rows('math', 3))
    check = claims.step_checker(row, bytes_tokenizer(), 0)
    first = '\n'.join(row['solution'].split('\n')[:2])
    for text, right in ((first + '\n', True), (row['solution'], True), ('\n1 + 1 = 3\n', False),
                        (first, False), (row['solution'] + '0', False)):
        assert check(bytes_tokenizer().encode(text).ids) is right


def test_recorded_signals_are_those_of_a_run():
    """The weakest tokens that SpecGuard's own score sees."""
    s = step_session()
    draft = SpecGuard(k=1, max_step=6).propose(s)
    logp, grounding = zip(*SpecGuard().score(s, draft))
    assert claims.weakest(s, draft.tokens) == pytest.approx([min(logp), 1 - min(grounding)])


def test_claims_by_hand():
    """Signals within kinds, paired digits, right answers of tiny rows."""
    rows = [dict(family='math', kind=['work', 'work', 'look-up'], right=[1, 0, 1], first=[0, 0, 1],
                  draft=[[-1.0, 0.5], [-3.0, 0.5], [-9.0, 0.0]])] * 2
    found = [figure(texts) for _, texts, figure, _ in claims.step_figures(rows)]
    assert found == pytest.approx([1, 0.5, 0, 1 / 3])       # look-ups have no wrong one: they do not count
    right = {'sd 4': dict(right=1), 'default, seed 0': dict(right=0), 'default, seed 1': dict(right=1)}
    runs = judge.Runs([dict(family='math', place=0, runs=right)])
    assert claims.gain(runs, ['default, seed 0', 'default, seed 1'], 'sd 4').tolist() == [-0.5]


def test_specguard_most_central_by_hand():
    """Steps are alike by the pairs of tokens that they share; ties go to the surer, then to the first."""
    assert most_central([[3, 2, 1], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], [0, -9, -9, -9]) == 1
    assert most_central([[4], [5], [5]], [0, -9, -9]) == 1
    assert most_central([[1], [2], [3]], [-2, -1, -1]) == 1
    assert most_central([[7, 7]], [0]) == 0
