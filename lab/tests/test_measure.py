"""lab/measure.py and lab/judge.py: rows that are stored, figures by hand, verdicts, pages."""
import importlib
import json
import math
from dataclasses import replace

import numpy
import pytest
import torch

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import bench, judge, measure, tasks, train
from lab.judge import CLOCK, Claim, Costs, Runs
from lab.measure import Pair, Record, named, run_row, sd, token_row
from lab.tests.helpers import json_lines, program as run, refused, subprogram, tiny
from lab.best.claims import replayed
from lab.toys import fresh
from model import load, write_calibration

TEXTS = numpy.arange(4)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """A Pair of tiny checkpoints with three prompts in two families."""
    home = tmp_path_factory.mktemp('measured')
    rows = [dict(prompt='hello', category='greet', answer='7'), dict(prompt='and so on', category='greet'),
            dict(prompt='once more', category='tell')]
    file = home / 'prompts.jsonl'
    file.write_text(json_lines(rows))
    target, draft = tiny(home / 'tiny-large', 0, dict(num_hidden_layers=4)), tiny(home / 'tiny-small', 1)
    write_calibration(target, 'mask', dict(skip=[2, 3, 4], nested=[[2, 3, 4, 5], [2, 3], [2]]))
    return Pair(str(target), str(draft), (str(file),), max_new=12, longest=50)


def runs_of(**settings):
    """Runs of four texts, two families; settings: {name: [(tokens, wrong, seconds) a text]}."""
    rows = []
    for i in range(4):
        runs = {}
        for name, counts in settings.items():
            if counts[i]:
                tokens, wrong, seconds = counts[i]
                runs[name] = dict(tokens=tokens, wrong=wrong, seconds=seconds, passes={})
        rows.append(dict(family='ab'[i // 2], place=i % 2, runs=runs))
    return Runs(rows)


# ------------------------------------------------------------------------------------------------ the figures

def test_over_is_a_ratio_of_sums():
    """Tokens a second of all texts together, not the mean of ratios."""
    runs = runs_of(mine=[(10, 0, 1.0)] * 3 + [(10, 0, 2.0)], rival=[(10, 0, 2.0)] * 4)
    assert judge.over(runs, 'mine', 'rival', CLOCK)(TEXTS) == pytest.approx((40 / 5) / (40 / 8))
    assert judge.over(runs, 'mine', 'rival', CLOCK)(TEXTS[3:]) == pytest.approx(1.0)


def test_a_missing_setting_leaves_its_texts_out():
    runs = runs_of(mine=[(10, 0, 1.0), None, (10, 0, 1.0), None], rival=[(10, 0, 2.0)] * 4)
    assert runs.having('mine', 'rival').tolist() == [0, 2]


def test_a_tuned_setting_is_not_judged_where_it_was_chosen():
    """Of two settings each is fast on one half; chosen there, it is judged on the half where it is slow."""
    fast, slow = (10, 0, 1.0), (10, 0, 4.0)
    runs = runs_of(even=[fast, slow, fast, slow], odd=[slow, fast, slow, fast], rival=[(10, 0, 2.0)] * 4)
    figure = judge.tuned_over(runs, ['even', 'odd'], ['rival'], CLOCK)
    assert figure(TEXTS) == pytest.approx(0.5)
    assert figure(TEXTS[:1]) == pytest.approx(0.5)      # one text: chosen on the other half of its family


def test_a_tuned_setting_agrees_as_far_as_is_asked():
    runs = runs_of(lossy=[(10, 2, 1.0)] * 4, exact=[(10, 0, 2.0)] * 4)
    assert judge.tuned_over(runs, ['lossy', 'exact'], ['exact'], CLOCK, 0.9)(TEXTS) == pytest.approx(1)
    assert judge.tuned_over(runs, ['lossy', 'exact'], ['exact'], CLOCK, 0.8)(TEXTS) == pytest.approx(2)


def test_a_tie_goes_to_the_first_setting_on_every_cpu():
    """Scores that differ in the last bits of a sum are equal: which is chosen must not depend on them."""
    for noise in (-1e-13, 1e-13):
        second = [(10, 0, 1.0 + noise), (10, 0, 4.0)] * 2
        runs = runs_of(first=[(10, 0, 1.0), (10, 0, 2.0)] * 2, second=second, rival=[(10, 0, 2.0)] * 4)
        figure = judge.tuned_over(runs, ['first', 'second'], ['rival'], CLOCK)
        assert figure(TEXTS) == pytest.approx((1 * 2) ** 0.5)


def test_rivals_are_compared_at_equal_agreement():
    """Between a rival at 100 % with pace 4 and one at 80 % with pace 8, it has pace 6 at 90 %."""
    runs = runs_of(mine=[(10, 1, 1.0)] * 4, strict=[(8, 0, 2.0)] * 4, loose=[(10, 2, 1.25)] * 4)
    figure = judge.at_equal(runs, 'mine', ['strict', 'loose'], CLOCK)
    assert figure(TEXTS) == pytest.approx(10 / 6)


def test_gap_and_ratio_by_hand():
    assert judge.gap([1, None, 3, 5])(TEXTS) == pytest.approx(3)
    assert math.isnan(judge.gap([None, 1])(numpy.array([0])))
    assert judge.ratio([1, 2, 3, 4], [2, 2, 2, 2])(TEXTS) == pytest.approx(10 / 8)


def test_area_counts_pairs():
    """Scores 3 and 1 are true, 2 and 1 false: of four pairs 2 are in order and one is a tie."""
    figure = judge.area([[3, 2], [1, 1]], [[1, 0], [1, 0]])
    assert figure(numpy.arange(2)) == pytest.approx((2 + 0.5) / 4)
    assert math.isnan(judge.area([[1, 2]], [[1, 1]])(numpy.array([0])))


def test_costs_of_passes():
    """Timed lengths as they are, longer ones in proportion; slim by its own curve, or its reader's full."""
    costs = Costs({'target/full': [0, 2.0, 3.0, 4.0], 'draft/full': [0, 1.0], 'target/slim': [0, 1.0, 2.0]})
    assert costs.of_pass('target/full', 2) == pytest.approx(1.5)
    assert costs.of_pass('target/full', 6) == pytest.approx(4.0)
    assert costs.of_pass('target/sparse', 3) == pytest.approx(2.0)
    assert costs.of_pass('target/slim', 3) == pytest.approx(2 * (4 / 3) / 2)
    assert costs.of_pass('draft/grounded', 3) == pytest.approx(1.0)
    run = dict(passes={'target/full': {'1': 3, '2': 2}, 'draft/full': {'1': 4}})
    assert costs.steps_of(run) == pytest.approx(3 * 1 + 2 * 1.5 + 4 * 0.5)
    assert costs.steps_of(dict(steps=7.0)) == 7


def test_costs_at_another_draft():
    """A draft pass as is asked, each further position its share, slim its share of a target pass."""
    measured = Costs({'target/full': [0, 2.0], 'draft/full': [0, 1.0], 'target/slim': [0, 1.0]})
    costs = measured.at(0.05, 0.1)
    assert costs.of_pass('draft/full', 1) == pytest.approx(0.05)
    assert costs.of_pass('draft/full', 3) == pytest.approx(0.06)
    assert costs.of_pass('target/full', 5) == pytest.approx(1.4)
    assert costs.of_pass('target/slim', 1) == pytest.approx(0.5)
    run = dict(passes={'target/slim': {'5': 2}}, slim=0.25)
    assert costs.steps_of(run) == pytest.approx(2 * 0.25 * 1.4)
    assert costs.steps_of(dict(steps=7.0)) is None      # of the measured costs, not of these


def test_sd_is_replayed_from_where_its_guesses_are_right():
    """By hand; and as the real run on a text of the embedded pair."""
    passes = replayed([1, 1, 0, 1, 1], 2)['passes']
    assert passes == {'draft/full': {1: 4}, 'target/full': {3: 2}}
    prompt, = measure.EMBEDDED.texts(['math'], 1)
    real = measure.run_row(dict(sd=measure.sd(4)), measure.EMBEDDED, prompt)['runs']['sd']
    again = replayed(measure.token_row(measure.EMBEDDED, prompt)['hit'], 4)
    assert again['passes']['target/full'] == real['passes']['target/full']
    assert again['passes']['draft/full'].total() == real['passes']['draft/full'].total()


def test_each_cost_has_its_own_verdicts(tmp_path, monkeypatch):
    """Drafts of 8 kept tokens are four times plain decoding where a draft pass is cheap, not where dear."""
    monkeypatch.setattr(measure, 'LAB', tmp_path)
    monkeypatch.setattr(judge, 'LAB', tmp_path)
    measure.write_rows(measure.file_of(None, 'a', 'costs'), {}, [0], lambda _: {
        'target/full': [0.0, 1.0], 'target/slim': [0.0, 0.5], 'draft/full': [0.0, 0.4]})
    cmasd = dict(tokens=90, wrong=1, right=None, passes={'target/full': {9: 10}, 'draft/full': {1: 80}})
    row = dict(family='qa', tokens=90, hit=[1, 0] * 45, runs={'cmasd 8': cmasd})
    measure.write_rows(measure.file_of('best', 'a', 'counts'), {}, range(12), lambda i: row | dict(place=i))
    ar = dict(cmasd, passes={'target/full': {1: 90}})
    plain = dict(runs=dict(ar=ar, cmasd=cmasd, strict=cmasd))
    measure.write_rows(measure.file_of('cmasd', 'a', 'relaxed'), {}, range(12),
                       lambda i: row | plain | dict(place=i))
    found = {}
    for cost in (0.05, 0.4):
        findings = judge.findings_of('cmasd', cost)
        found[cost] = findings['default (lossy) over plain decoding']['a']
    assert found[0.05].verdict == 'HOLDS' and found[0.4].verdict == 'FAILS'
    assert found[0.05].figure == pytest.approx(9 / (1 + 8 * 0.016 + 8 * 0.05))


# ------------------------------------------------------------------------------------------------ verdicts

@pytest.mark.parametrize('values, line, verdict', [
    ([2.0, 2.1] * 10, 1.5, 'HOLDS'), ([2.0, 2.1] * 10, 2.5, 'FAILS'), ([2.0, 2.1] * 10, 2.05, 'UNDECIDED'),
    ([3.0] * 20, 3.0, 'HOLDS'), ([1.0, 3.0], 2.0, 'UNDECIDED'), ([1.0, 3.0], 1.0, 'HOLDS')])
def test_verdict(values, line, verdict):
    """The whole interval has to be on one side; below twelve texts the range of single texts."""
    claim = Claim('', 'ours', line, numpy.arange(len(values)), judge.gap(values))
    finding = judge.judge(claim)
    assert finding.verdict == verdict
    if len(values) < judge.FEW:
        assert (finding.low, finding.high) == (min(values), max(values))
        assert f'n {len(values)}' in finding.cell


@pytest.mark.slow
def test_interval_covers():
    """Of 200 samples of 30 normal numbers about 95 % of the intervals hold the true mean."""
    generator = numpy.random.default_rng(0)
    held = 0
    for _ in range(200):
        claim = Claim('', 'ours', 0, numpy.arange(30), judge.gap(generator.normal(size=30)))
        finding = judge.judge(claim)
        held += finding.low <= 0 <= finding.high
    assert 180 <= held <= 198


# --------------------------------------------------------------------------------------------------- rows

def test_run_row(pair):
    """Counts of real runs: a lossless setting agrees, lossy counts are those of a fresh dense pass."""
    prompt = pair.texts((), 1)[0]
    settings = dict(ar=named('ar'), sd=sd(3), draft=named('cascade-tokenv3', gamma=3, lam=0.9),
                    hot=named('sd', temperature=1.0, seed=3))
    runs = run_row(settings, pair, prompt)['runs']
    n = runs['ar']['tokens']
    assert runs['ar']['passes'] == {'target/full': {1: n}} and runs['ar']['right'] == 0
    assert list(runs) == list(settings) and n > 4
    for name in ('ar', 'sd'):
        assert (runs[name]['tokens'], runs[name]['wrong']) == (n, 0)
        assert runs[name]['nats'] == pytest.approx(runs['ar']['nats'])
    assert sum(runs['sd']['passes']['target/full'].values()) == runs['sd']['cycles']
    assert n <= runs['sd']['accepted'] + runs['sd']['cycles']
    assert runs['draft']['wrong'] > 0 and runs['hot']['nats'] > runs['ar']['nats']


def test_token_row(pair):
    """hit, largest and ratio against full passes without a cache."""
    prompt = pair.texts((), 1)[0]
    row = token_row(pair, prompt)
    ids = list(prompt.ids)
    target, draft = (load(folder)[0] for folder in pair.folders)
    for i in range(row['tokens']):
        p, q = (fresh(model, ids, 1)[0] for model in (target, draft))
        guess = int(q.argmax())
        assert row['hit'][i] == (guess == int(p.argmax()))
        ids.append(int(p.argmax()))


def test_rows_are_kept_and_gone_on_with(tmp_path, pair):
    """A line that was broken off goes, whole ones stay; another head begins anew."""
    where = tmp_path / 'results' / 'rows.jsonl'
    head = pair.head('rows', 2)
    seen = []

    def row_of(item):
        seen.append(item)
        return dict(item=item)
    measure.write_rows(where, head, [0, 1, 2], row_of)
    where.write_text(where.read_text()[:-3])
    measure.write_rows(where, head, [0, 1, 2], row_of, resume=True)
    assert seen == [0, 1, 2, 2]
    assert [row['item'] for row in measure.read_stored(where).rows] == [0, 1, 2]
    measure.write_rows(where, head | dict(n=3), [0], row_of, resume=True)
    assert len(measure.read_stored(where).rows) == 1


def test_names_of_pairs(pair):
    assert measure.EMBEDDED.name == 'embedded' and pair.name == 'tiny-large+small'
    assert replace(pair, draft='').name == 'tiny-large'


def test_numbers_of_a_row():
    """Five digits, and no NaN, which JSON does not have."""
    row = json.loads(measure.as_line(dict(a=1 / 3, b=math.nan, c=[torch.pi], d={1: 2})))
    assert row == dict(a=0.33333, b=None, c=[3.1416], d={'1': 2})


def program():
    """The measuring program, as it is started."""
    return measure.exit_status('lab.measure', lambda: measure.run(measure.parse()))


@pytest.mark.parametrize('flags, main', [
    ('best --max-new 0', program), ('best --longest 0', program), ('best --n 1', program),
    ('speed --threads 0', bench.main), ('speed --rounds -1', bench.main), ('speed --n 0', bench.main),
    ('draft --minutes 0', train.main), ('math --n -1', tasks.main)])
def test_numbers_that_are_too_small_are_refused(flags, main, capsys):
    status, out, err = run(capsys, *flags.split(), main=main)
    assert status == 2 and 'more expected' in err and not out


@pytest.mark.parametrize('flags', [('--target', 'x'), ('--prompts', 'x')])
def test_half_a_pair_is_refused(flags, capsys):
    refused(capsys, '--target', 'best', *flags, main=program)


@pytest.mark.slow
@pytest.mark.parametrize('paper', measure.PAPERS)
def test_a_foreign_pair(paper, pair, tmp_path, monkeypatch):
    """Each paper measures any pair, and judges two texts of it without a warning."""
    monkeypatch.setattr(measure, 'LAB', tmp_path)
    monkeypatch.setattr(judge, 'LAB', tmp_path)
    measure.write_rows(measure.file_of(None, pair.name, 'costs'), {}, [0], lambda _: {
        'target/full': [0.0, 1.0, 1.1], 'target/slim': [0.0, 0.6, 0.7], 'draft/full': [0.0, 0.2]})
    measure.measure(paper, pair, 2)
    for by_pair in judge.findings_of(paper).values():
        for finding in by_pair.values():
            assert finding.verdict in ('HOLDS', 'FAILS', 'UNDECIDED')


# -------------------------------------------------------------------------------------------------- pages

@pytest.mark.slow
@pytest.mark.filterwarnings('error')
def test_pages_say_what_the_rows_say():
    """The committed pages are what --report writes from the stored rows; each interval has its figure."""
    texts = {where: where.read_text() for where in
             [judge.LAB / 'README.md', *(judge.LAB / paper / 'README.md' for paper in judge.PAPERS)]}
    found = {paper: judge.findings_of(paper) for paper in judge.PAPERS}
    for paper, findings in found.items():
        assert 0 < len(findings) <= 12
        for by_pair in findings.values():
            assert all(finding.low <= finding.figure <= finding.high for finding in by_pair.values())
        page = texts[judge.LAB / paper / 'README.md']
        assert judge.between_markers(page, judge.page_lines(paper, findings)) == page
    board = texts[judge.LAB / 'README.md']
    assert judge.between_markers(board, judge.scoreboard(found)) == board


@pytest.mark.parametrize('paper', measure.PAPERS)
def test_records_are_named_as_they_are_stored(paper):
    """Each stored file is of a record that the paper still measures, or its head says that none does."""
    records = importlib.import_module(f'lab.{paper}.record').RECORDS
    assert all(isinstance(record, Record) for record in records.values())
    for where in (measure.LAB / paper / 'results').glob('*/*.jsonl'):
        assert where.stem in records or 'final' in measure.read_stored(where).head, where


@pytest.mark.slow
def test_judging_is_a_program():
    status, out, err = subprogram('-m', 'lab.judge', 'best')
    assert status == 0 and 'over tuned sd' in out, err

