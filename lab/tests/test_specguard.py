"""SpecGuard's baselines, how steps are graded, its records, its gates."""
import pytest

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import judge, tasks
from lab.measure import EMBEDDED, LAB, read_list
from lab.specguard import claims
from lab.tests.helpers import RANGES, bytes_tokenizer, law_gap, letters
from lab.toys import network, plain, session, write
from verify import METHODS, SpecGuard, most_central

PROMPT = [3, 2]


def step_session(checker=None):
    """A Session of a random pair whose texts have lines."""
    return session(network(0, 12), network(1, 12), PROMPT, 40, text=letters,
                   calibration=dict(signals=RANGES, checker=checker))


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


@pytest.mark.parametrize('rate, gap', [(0.0, 0), (0.5, 0.05), (1.0, 0.1)])
def test_law_of_random_gate(rate, gap):
    """Every draw enumerated: at rate 0 the target's law; the further from it, the more the draft writes."""
    method = METHODS['random-gate'](k=1, rate=rate, max_step=2)
    found = law_gap(method, horizon=2, text=letters)
    assert found > gap if rate else found < 1e-9


def test_step_checker_by_hand():
    """A right line, a right text; then a wrong line, a line cut short, and a wrong answer."""
    row = next(tasks.rows('math', 3))
    check = tasks.step_checker(row, bytes_tokenizer(), 0)
    first = '\n'.join(row['solution'].split('\n')[:2])
    for text, right in ((first + '\n', True), (row['solution'], True), ('\n1 + 1 = 3\n', False),
                        (first, False), (row['solution'] + '0', False)):
        assert check(bytes_tokenizer().encode(text).ids) is right


def test_a_row_of_graded_steps():
    """It has a value for each line of the solution, and the L of SpecGuard's own score of the first step."""
    prompt, *_ = claims.training_prompts(EMBEDDED, 1)
    (row,) = claims.step_row(EMBEDDED, prompt)
    s = claims.started(EMBEDDED, 'specguard', prompt)
    lines = [s.text(ids).strip() for ids in claims.solution_steps(EMBEDDED, prompt, s)]
    assert lines == prompt.row['solution'].strip().split('\n') and len(lines) <= claims.MOST_STEPS
    columns = row.keys() - prompt.name.keys()
    assert 'G6' in columns and {len(row[name]) for name in columns} == {len(lines)}
    method = SpecGuard()
    logp, _ = zip(*method.score(s, method.propose(s)))
    assert row['L'][0] == min(logp)


@pytest.mark.parametrize('name', ['embedded', 'embedded+mid'])
def test_lists_have_the_calibrated_gates(name):
    """The gate that the stored training steps give is a setting of the lists in which it is judged."""
    rows = judge.Pair('specguard', name).rows('gate')
    for file, gamma in (('gates', 4), ('clock', 8)):
        assert claims.calibrated(rows, gamma) in read_list(LAB / f'specguard/{file}.txt').about['settings']


def test_specguard_most_central_by_hand():
    """Steps are alike by the pairs of tokens that they share; ties go to the surer, then to the first."""
    assert most_central([[3, 2, 1], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], [0, -9, -9, -9]) == 1
    assert most_central([[4], [5], [5]], [0, -9, -9]) == 1
    assert most_central([[1], [2], [3]], [-2, -1, -1]) == 1
    assert most_central([[7, 7]], [0]) == 0
