"""VIA-SD's baselines: their distributions and limits; a record measured anew; its claims by hand."""
from dataclasses import replace

import pytest

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab.judge import Claim, Costs, Records, judge
from lab.measure import EMBEDDED, Stored
from lab.toys import Table, enumerate_law, slim_session, write
from lab.via import claims
from verify import METHODS, Session, draft_model, probs


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


def test_layers_that_slim_skips():
    """Layers named one by one are the calibrated mask's text, others another one, none the mask itself."""
    knobs = dict(keep=1.0, escalate=0.0, max_lag=99)
    texts = {}
    for layers in ('', '1 2', '0 3'):
        s = slim_session(skip=(2, 3, 4, 5))
        texts[layers], _ = write(s, METHODS['via-layers'](5, layers=layers, **knobs))
    assert texts[''] == texts['1 2'] != texts['0 3']


@pytest.mark.slow
def test_a_judge_is_worth_what_it_adds(monkeypatch):
    """Controls of the claim about slim: one that is the draft does not hold, one that is the target does."""
    stored = next(row for row in Records('via', 'embedded')['judges'].rows if row['family'] == 'table')
    prompts = EMBEDDED.texts(('table',), 14)
    assert claims.judges_row(EMBEDDED, prompts[0]) == stored and stored['draft_right'] < stored['slim_right']
    text = "slim's agreement with the target, less the draft's"

    def verdict(rows):
        return judge(Claim(text, *claims.CLAIMS[text], *claims.better_judge(rows))).verdict
    alone = replace(EMBEDDED, draft='self')             # which drafts with its slim path
    assert verdict([claims.judges_row(alone, prompt) for prompt in prompts]) == 'FAILS'
    monkeypatch.setattr(Session, 'slim_path', property(lambda session: session.target.model.full))
    rows = [claims.judges_row(EMBEDDED, prompt) for prompt in prompts]
    assert all(row['slim_right'] == row['positions'] for row in rows) and verdict(rows) == 'HOLDS'


def test_claims_by_hand():
    """Two texts: whoever errs oftener than via is left out; slim beside the draft."""
    counts = {claims.DEFAULT: (1, 5), 'via 5, 0 0': (3, 1), 'sd 5': (0, 8), 'cascade 5, 0.1': (1, 4),
              'cascade 5, 0.3': (2, 2)}
    found = {name: dict(tokens=10, wrong=wrong, passes={'target/full': {1: steps}})
             for name, (wrong, steps) in counts.items()}
    records = Records('via', 'of no pair')
    records.costs = Costs({'target/full': [0, 1]})
    records['tuned'] = Stored({}, [dict(family='qa', place=place, runs=found) for place in range(2)])
    records['judges'] = Stored({}, [dict(positions=4, slim_right=3, draft_right=1)] * 2)
    figures = [figure(texts) for _, texts, figure, _ in claims.figures(records)]
    assert figures == pytest.approx([0.8, 0.5])


def test_slims_first_choice_is_not_in_doubt():
    """At escalate 1 a draft of slim's own first choices, whose ratio is 1, is never handed to the target."""
    s = slim_session(proposer=lambda s, n, method: draft_model(s, n, method, s.target, s.slim_path))
    _, cycles = write(s, METHODS['via'](3, keep=1.0, escalate=1.0, max_lag=99))
    verdicts = [verdict for cycle in cycles for verdict in cycle.judged]
    assert verdicts and all(verdict.kept and verdict.signals['by'] == 'slim' for verdict in verdicts)
