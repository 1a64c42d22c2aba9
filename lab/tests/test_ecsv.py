"""ECSV: the laws of its baselines, what they read, the length of its claims by hand."""
import numpy
import pytest

from lab import prove
from lab.baselines import OracleTop1, SdMulti
from lab.ecsv import claims
from lab.measure import EMBEDDED, run_row
from lab.tests.helpers import case

TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)


@pytest.mark.parametrize('kind', [case('best', OracleTop1), case('multi', SdMulti)])
def test_law_of_read_branches(kind):
    method = kind(**TWO)
    assert method.lossless and prove.Proof('best', method, range(4)).gap < prove.SAME


@pytest.mark.slow
def test_measured_rows():
    """sd-multi reads another branch where one fails, the best of four reads each; all write one text."""
    prompt = EMBEDDED.texts(('translate',), 1)[0]
    rows = [run_row(EMBEDDED, f'{method} gamma=4 branches=4 draft_temperature=0.8', prompt)
            for method in ('ecsv', 'sd-multi', 'oracle-top1')]
    passes = [sum(row['passes']['target/full'].values()) / sum(row['cycles'].values()) for row in rows]
    assert passes[0] == 1 < passes[1] < passes[2] and len({row['tokens'] for row in rows}) == 1
    assert not any(row['wrong'] for row in rows)


def test_length_by_hand():
    """At 25 of 20 to 40 positions a quarter of deeper blocks; nan below all depths, the deepest above."""
    depths = numpy.array([[8.0, 16.0], [4.0, 2.0], [20.0, 40.0]])       # kept, passes, positions
    lines = numpy.stack([depths, depths[:, ::-1], depths, depths])
    found = claims.length(lines, numpy.array([25, 25, 19, 99]))
    assert found[:2].tolist() == pytest.approx([10 / 3.5] * 2) and numpy.isnan(found[2]) and found[3] == 8
    assert claims.longer(numpy.array(25.0), *depths.ravel(), *depths[:, :1].repeat(2, 1).ravel()) == (
        pytest.approx(10 / 3.5 / 2))
