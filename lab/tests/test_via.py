"""VIA-SD's baselines: their distributions, limits and judges; a record measured anew."""
import pytest

import lab.baselines
from lab.judge import Pair
from lab.measure import EMBEDDED
from lab.tests.helpers import law_gap, refuses
from lab.toys import Table, enumerate_law, network, plain, slim_session, write
from lab.via import claims
from model import Reader
from verify import METHODS, draft_model, probs


def test_law_of_the_cascade():
    """The first of two tokens follows q where q is sure, else p; the second the target's p.

    The law has to differ between two lam, else the condition would not be tested.
    """
    target, draft = Table(2), Table(4)
    p, q = (probs(table.row((0,))) for table in (target, draft))
    blends = set()
    for lam in (0.3, 0.7):
        wanted = q if q.max() >= 1 - lam else p
        blends.add(tuple(wanted.tolist()))
        method = METHODS['cascade'](1, lam=lam)
        assert not method.lossless
        for (first, second), chance in enumerate_law(target, draft, method, 2, temperature=1.0).items():
            after = probs(target.row((0, first)))
            assert chance == pytest.approx(float(wanted[first] * after[second]))
    assert len(blends) > 1


@pytest.mark.parametrize('temperature, gap', [(0.0, 0), (0.8, 1e-9)])
def test_slim_drafts_and_is_drafted_for(temperature, gap):
    """Every draw of the inner and outer blocks enumerated; slim reads fewer times than it drafts."""
    method = METHODS['cascade-drafting'](3, inner=2)
    slim = dict(mask=dict(skip=[1]))
    assert method.lossless and law_gap(method, temperature=temperature, calibration=slim) <= gap
    s = slim_session(skip=(2, 3, 4, 5))
    tokens, cycles = write(s, method)
    assert tokens == plain(s.target.model, s.tokens[:s.begin], len(tokens))
    assert any(cycle.passes['target/slim'][0] < len(cycle.drafted) for cycle in cycles if cycle.drafted)


def test_layers_that_slim_skips():
    """Layers named one by one are the calibrated mask's text, others another one, none the mask itself."""
    knobs = dict(keep=1.0, escalate=0.0, max_lag=99)
    texts = {}
    for layers in ('', '1 2', '0 3'):
        s = slim_session(skip=(2, 3, 4, 5))
        texts[layers], _ = write(s, METHODS['via-layers'](5, layers=layers, **knobs))
    assert texts[''] == texts['1 2'] != texts['0 3']


def test_a_row_of_judges():
    """What is stored is measured again."""
    stored = next(row for row in Pair('via', 'embedded').rows('judges') if row['family'] == 'table')
    assert claims.judges_rows(EMBEDDED, EMBEDDED.texts(('table',), 1)[0]) == [stored]


def test_a_judge_of_its_own(monkeypatch):
    """One with the target's weights writes the target's text, another does not; its passes are counted."""
    texts = {}
    for seed in (0, 1):
        judge = Reader(network(seed, num_hidden_layers=4), 64)
        monkeypatch.setattr(lab.baselines, 'judge_reader', lambda *_, judge=judge: judge)
        method = METHODS['via-model'](3, keep=1.0, escalate=0.0, max_lag=99, judge='a folder')
        s = slim_session()
        texts[seed], cycles = write(s, method)
        assert all(cycle.passes['target/judge'][0] == 1 for cycle in cycles if cycle.drafted)
    assert texts[0] == plain(network(0, num_hidden_layers=4), [1, 2, 3], 24) != texts[1]
    strange = Reader(network(0, vocab=5), 64)
    monkeypatch.setattr(lab.baselines, 'judge_reader', lambda *_: strange)
    refuses('another vocabulary', write, slim_session(), method)


def test_slims_first_choice_is_not_in_doubt():
    """At escalate 1 a draft of slim's own first choices, whose ratio is 1, is never handed to the target."""
    s = slim_session(proposer=lambda s, n, method: draft_model(s, n, method, s.target, s.slim_path))
    _, cycles = write(s, METHODS['via'](3, keep=1.0, escalate=1.0, max_lag=99))
    verdicts = [verdict for cycle in cycles for verdict in cycle.judged]
    assert verdicts and all(verdict.kept and verdict.signals['by'] == 'slim' for verdict in verdicts)
