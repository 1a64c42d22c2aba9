"""ECSV: the laws of its baselines, and its claims computed by hand."""
import numpy
import pandas
import pytest

from lab import prove
from lab.baselines import OracleTop1, SdMulti
from lab.ecsv import claims
from lab.judge import Pair
from lab.measure import EMBEDDED, run_row
from lab.tests.helpers import case

TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)


@pytest.mark.parametrize('kind', [case('best', OracleTop1), case('multi', SdMulti)])
def test_law_of_read_branches(kind):
    method = kind(**TWO)
    assert method.lossless and prove.Proof('best', method, range(4)).gap < prove.SAME


LITE = 'ecsv gamma={} branches={} draft_temperature=0.3 a_self=0'
RUNS = {                # setting: kept, passes, positions, seconds of a text of 20 tokens
    'sd gamma=2 draft_temperature=0': (10, 10, 24, 2.0),
    'sd gamma=4 draft_temperature=0': (12, 6, 30, 1.0),             # the fastest: 1.5 positions a token
    'sd gamma=5 draft_temperature=0': (99, 1, 30, 0.1),             # no depth of the votes
    LITE.format(2, 2): (10, 10, 20, 9.0), LITE.format(4, 2): (14, 6, 40, 9.0),
    LITE.format(2, 8): (18, 2, 32, 9.0), LITE.format(4, 8): (18, 2, 44, 9.0)}   # they read more at any depth


def frame(**changed):
    """A frame of RUNS on a text of each of two tasks; changed: the runs of the second one, by place."""
    rows = []
    for task in 'story', 'qa':
        for i, (name, run) in enumerate(RUNS.items()):
            run = changed.get(f'run_{i}', run) if task == 'qa' else run
            rows.append(dict(zip(('kept', 'full', 'positions', 'second'), run), setting=name, family=task,
                             text=f'{task} 0', tokens=20, cycles=run[1] / (1 + ('ecsv' in name)), agreed=20,
                             nats=20.0))
    return pandas.DataFrame(rows)


def test_gain_by_hand():
    """At 1.5 positions the vote is half of each depth: 12 tokens in 8 passes, 1.5, where sd keeps 2."""
    both, one = numpy.arange(2), frame()
    assert claims.sd_lines(one) == {'sd draft_temperature=0': list(RUNS)[:2]}
    votes, sd = claims.vote_lines(one), claims.sd_lines(one)
    assert claims.gain(one, votes, sd, sd)(both) == pytest.approx(1.5 / 2)
    assert claims.gain(one, votes, sd, sd, per='cycles')(both) == pytest.approx(3 / 2)
    eight = claims.lines_of(one, 'ecsv', branches=8)
    assert numpy.isnan(claims.gain(one, eight, sd, sd)(both))
    assert claims.over_greedy(one, next(iter(votes.values()))) == '1.000, 1.17; 0.75'
    deep = {'': [LITE.format(2, 2)]}                    # reads fewer positions at its deepest: as it is
    assert claims.gain(one, deep, sd, sd)(both) == pytest.approx(1 / 2)


def test_settings_are_chosen_on_the_texts_that_tuning_sees():
    """In the second task sd is the fastest at depth 2, and there the vote of eight branches reads few."""
    other = frame(run_0=(10, 10, 24, 0.5), run_5=(18, 2, 20, 9.0))
    sd, first, second = claims.sd_lines(other), numpy.array([0]), numpy.array([1])
    of = claims.gain(other, claims.vote_lines(other), sd, sd)
    assert of(first) == pytest.approx(0.75)
    assert of(second) == pytest.approx(9 / 1)           # 18 / 2 over 10 / 10, at 1.2 positions
    assert of(second, first) == pytest.approx(0.75)     # as it was tuned for the first
    assert claims.tasks_longer(other)(first) == 0 and claims.tasks_longer(other)(second) == 1


@pytest.mark.slow
def test_measured_rows():
    """sd-multi reads another branch where one fails, the best of four reads each; all write one text."""
    prompt = EMBEDDED.texts(('translate',), 1)[0]
    rows = [run_row(EMBEDDED, f'{method} gamma=4 branches=4 draft_temperature=0.8', prompt)
            for method in ('ecsv', 'sd-multi', 'oracle-top1')]
    passes = [sum(row['passes']['target/full'].values()) / sum(row['cycles'].values()) for row in rows]
    assert passes[0] == 1 < passes[1] < passes[2] and len({row['tokens'] for row in rows}) == 1
    assert not any(row['wrong'] for row in rows)


def test_the_stored_rows_have_all_claims():
    votes = claims.frame_of(Pair('ecsv', 'embedded'), 'votes')
    oracle = votes[votes.setting.str.startswith('oracle')]
    assert (oracle.full == oracle.cycles).all() and (oracle.positions == oracle.drafted + oracle.cycles).all()
    assert not votes.wrong.any() and set(votes.groupby('text').tokens.nunique()) == {1}     # exact: one text
    assert len(claims.CLAIMS) == 9
    assert {text for text, _ in claims.figures(Pair('ecsv', 'embedded'))} == set(claims.CLAIMS)
