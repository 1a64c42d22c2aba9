"""VIA-SD's baselines: their distributions and limits; a record measured anew; its claims by hand."""
import numpy
import pytest

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab.judge import Records, Runs
from lab.measure import EMBEDDED
from lab.toys import Table, enumerate_law, slim_session, write
from lab.via import claims
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


def test_layers_that_slim_skips():
    """Layers named one by one are the calibrated mask's text, others another one, none the mask itself."""
    knobs = dict(keep=1.0, escalate=0.0, max_lag=99)
    texts = {}
    for layers in ('', '1 2', '0 3'):
        s = slim_session(skip=(2, 3, 4, 5))
        texts[layers], _ = write(s, METHODS['via-layers'](5, layers=layers, **knobs))
    assert texts[''] == texts['1 2'] != texts['0 3']


def test_worth_row_is_the_stored_one():
    """A row that is measured anew; a slim that is the draft or the target makes no way shorter."""
    stored = next(row for row in Records('via', 'embedded')['worth'].rows if row['family'] == 'table')
    row = claims.worth_row(EMBEDDED, claims.texts(EMBEDDED, 1)[1])
    assert row.pop('family') == stored.pop('family') and row['draft_right'] < row['slim_right']
    assert row == pytest.approx(stored, rel=1e-3)
    p, q = (probs(Table(seed).row((0,))).log()[None] for seed in (2, 4))
    assert float(claims.shortcut(p, q, p, 0, 1)) == float(claims.shortcut(p, q, q, 0, 1)) == 0


def test_claims_by_hand():
    """Two texts: speeds, rejections; who errs oftener than via is left out; slim beside the draft."""
    def runs(**counts):             # of two texts that went alike; {name: (wrong, steps, draft tokens kept)}
        found = {name: dict(tokens=10, judged=10, wrong=wrong, steps=steps, accepted=kept)
                 for name, (wrong, steps, kept) in counts.items()}
        return Runs([dict(family='qa', place=place, runs=found) for place in range(2)])
    usual = runs(plain=(0, 10, 0), sd=(0, 5, 6), via=(0, 4, 8))
    tuned = runs(**{claims.DEFAULT: (1, 5, 0), 'via 5, 0 0': (3, 1, 0), 'sd 5': (0, 8, 0),
                    'cascade 5, 0.1': (1, 4, 0), 'cascade 5, 0.3': (2, 2, 0)})
    found = [*claims.speed_claims(usual), claims.spared_claim(usual, 'sd'), claims.equal_claim(tuned),
             *claims.worth_claims([dict(positions=4, slim_right=3, draft_right=1, delta=0.5)] * 2)]
    figures = [claim.figure(numpy.arange(2)) for claim in found]
    assert figures == pytest.approx([2.5, 1.25, 0.5, 0.8, 0.5, 0.125])


def test_slims_first_choice_is_not_in_doubt():
    """At escalate 1 a draft of slim's own first choices, whose ratio is 1, is never handed to the target."""
    s = slim_session(proposer=lambda s, n, method: draft_model(s, n, method, s.target, s.slim_path))
    _, cycles = write(s, METHODS['via'](3, keep=1.0, escalate=1.0, max_lag=99))
    verdicts = [verdict for cycle in cycles for verdict in cycle.judged]
    assert verdicts and all(verdict.kept and verdict.signals['by'] == 'slim' for verdict in verdicts)
