"""lab/measure.py and lab/judge.py: rows that are stored, figures by hand, verdicts, pages."""
import math
import random
import re

import numpy
import pytest
import torch

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import judge, measure, read_bytes, tasks
from lab.judge import CLOCK, Claim, Costs, Runs, replayed
from lab.measure import EMBEDDED, Pair, named, run_row, sd, token_row
from lab.tests.helpers import case, program as run, refused, stored, tiny
from lab.toys import fresh
from model import load, write_calibration
from specmini import ready

TEXTS = numpy.arange(4)
FAST, USUAL, SLOW = (10, 0, 1.0), (10, 0, 2.0), (10, 0, 4.0)        # tokens, wrong, seconds


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """A Pair of tiny checkpoints with three prompts in two families."""
    home = tmp_path_factory.mktemp('measured')
    file = stored(home / 'prompts.jsonl', dict(prompt='hello', category='greet', answer='7'), [
        dict(prompt='and so on', category='greet'), dict(prompt='once more', category='tell')])
    target, draft = tiny(home / 'tiny-large', 0, dict(num_hidden_layers=4)), tiny(home / 'tiny-small', 1)
    write_calibration(target, 'mask', dict(skip=[2, 3, 4]))
    return Pair(str(target), str(draft), (str(file),), max_new=12, longest=50, dtype='fp32')


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A laboratory without results."""
    for module in (measure, judge):
        monkeypatch.setattr(module, 'LAB', tmp_path)
    return tmp_path


def runs_of(**settings):
    """Runs of four texts, two families; settings: {name: [(tokens, wrong, seconds) a text]}."""
    rows = []
    for i in range(4):
        runs = {name: dict(zip(('tokens', 'wrong', 'seconds'), counts[i]), passes={})
                for name, counts in settings.items() if counts[i]}
        rows.append(dict(family='ab'[i // 2], place=i % 2, runs=runs))
    return Runs(rows)


def tuned(names, rival='rival', agreement=0.0):
    return lambda runs: judge.tuned_over(runs, names, [rival], CLOCK, agreement)


ERRING = dict(lossy=[(10, 2, 1.0)] * 4, exact=[USUAL] * 4)
HALVES = dict(even=[FAST, SLOW] * 2, odd=[SLOW, FAST] * 2, rival=[USUAL] * 4)


@pytest.mark.parametrize('settings, figure, wanted', [
    case('ratio-of-sums', dict(mine=[FAST] * 3 + [USUAL], rival=[USUAL] * 4),
         lambda runs: judge.over(runs, 'mine', 'rival', CLOCK), (40 / 5) / (40 / 8)),
    case('judged-where-it-was-not-chosen', HALVES, tuned(['even', 'odd']), 0.5),
    case('chosen-on-the-other-half', HALVES,
         lambda runs: lambda texts: tuned(['even', 'odd'])(runs)(texts[:1]), 0.5),
    case('agrees-as-far-as-asked', ERRING, tuned(['lossy', 'exact'], 'exact', 0.9), 1),
    case('asked-for-less', ERRING, tuned(['lossy', 'exact'], 'exact', 0.8), 2),
    *[case(f'tie{noise}', dict(first=[FAST, USUAL] * 2, second=[(10, 0, 1 + noise), SLOW] * 2,
                               rival=[USUAL] * 4), tuned(['first', 'second']), 2 ** 0.5)
      for noise in (-1e-13, 1e-13)]])
def test_speeds_by_hand(settings, figure, wanted):
    """Of all texts together; a tie, which the last bits of a sum would settle, goes to the first setting."""
    assert figure(runs_of(**settings))(TEXTS) == pytest.approx(wanted)


def test_gap_ratio_and_area_by_hand():
    """Of area scores 3 and 1 are true, 2 and 1 false: of four pairs 2 are in order and one is a tie."""
    assert runs_of(mine=[FAST, None] * 2, rival=[USUAL] * 4).having('mine', 'rival').tolist() == [0, 2]
    assert judge.gap([1, None, 3, 5])(TEXTS) == pytest.approx(3)
    assert math.isnan(judge.gap([None, 1])(numpy.array([0])))
    assert judge.ratio([1, 2, 3, 4], [2, 2, 2, 2])(TEXTS) == pytest.approx(10 / 8)
    figure = judge.area([[3, 2], [1, 1]], [[1, 0], [1, 0]])
    assert figure(numpy.arange(2)) == pytest.approx((2 + 0.5) / 4)
    assert math.isnan(judge.area([[1, 2]], [[1, 1]])(numpy.array([0])))


def test_costs_of_passes(monkeypatch):
    """Timed lengths as they are, longer ones in proportion; then at another cost of a draft pass."""
    monkeypatch.setattr(judge, 'SLOPE', 0.1)
    curves = {'target/full': [0, 2.0, 3.0, 4.0], 'draft/full': [0, 1.0], 'target/slim': [0, 1.0, 2.0]}
    measured, given = Costs(curves), Costs(curves).at(0.05)
    for costs, steps in (
            (measured, {('target/full', 2): 1.5, ('target/full', 6): 4, ('target/sparse', 3): 2,
                        ('target/slim', 3): 2 * (4 / 3) / 2, ('draft/grounded', 3): 1}),
            (given, {('draft/full', 1): 0.05, ('draft/full', 3): 0.06, ('target/full', 5): 1.4,
                     ('target/slim', 1): 0.5})):
        assert {one: costs.of_pass(*one) for one in steps} == pytest.approx(steps)
    run = dict(passes={'target/full': {'1': 3, '2': 2}, 'draft/full': {'1': 4}})
    assert measured.steps_of(run) == pytest.approx(3 * 1 + 2 * 1.5 + 4 * 0.5)
    assert given.steps_of(dict(passes={'target/slim': {'5': 2}}, slim=0.25)) == pytest.approx(2 * 0.25 * 1.4)
    assert measured.steps_of(dict(steps=7.0)) is None


def test_sd_is_replayed_from_where_its_guesses_are_right():
    """By hand; and as the real run on a text of the embedded pair."""
    assert replayed([1, 1, 0, 1, 1], 2)['passes'] == {'draft/full': {1: 4}, 'target/full': {3: 2}}
    prompt, = EMBEDDED.texts(['math'], 1)
    real = run_row(dict(sd=sd(4)), EMBEDDED, prompt)['runs']['sd']['passes']
    again = replayed(token_row(EMBEDDED, prompt)['hit'], 4)['passes']
    found, wanted = ((passes['target/full'], passes['draft/full'].total()) for passes in (again, real))
    assert found == wanted


def test_counted_runs_at_another_cost(home):
    """Drafts of 8 kept tokens, by hand; beside them plain decoding, and sd of every length."""
    measure.write_rows(measure.file_of('', 'a', 'costs'), {}, [
        {'target/full': [0.0, 1.0], 'target/slim': [0.0, 0.5], 'draft/full': [0.0, 0.4]}])
    cmasd = dict(tokens=90, wrong=1, right=None, passes={'target/full': {9: 10}, 'draft/full': {1: 80}})
    row = dict(family='qa', place=0, tokens=90, hit=[1, 0] * 45, runs={'cmasd 8': cmasd})
    measure.write_rows(measure.file_of('best', 'a', 'counts'), {}, [row])
    for cost, passes in ((0.05, 1 + 8 * 0.016 + 8 * 0.05), (None, 9 + 8 * 0.4)):        # as measured
        runs = judge.Records('cmasd', 'a').counted(cost)
        paces = runs.pace(['cmasd 8', 'ar', 'sd 1'], runs.every, judge.MODELLED)
        assert paces == pytest.approx([9 / passes, 1, 2 / ((1.016 if cost else 2) + (cost or 0.4))])


@pytest.mark.parametrize('values, line, verdict', [
    ([2.0, 2.1] * 10, 1.5, 'HOLDS'), ([2.0, 2.1] * 10, 2.5, 'FAILS'), ([2.0, 2.1] * 10, 2.05, 'UNDECIDED'),
    ([3.0] * 20, 3.0, 'HOLDS'), ([1.0, 3.0], 2.0, 'UNDECIDED'), ([1.0, 3.0], 1.0, 'HOLDS')])
def test_verdict(values, line, verdict):
    """The whole interval has to be on one side; below twelve texts the range of single texts."""
    finding = judge.judge(Claim('', 'ours', '', line, numpy.arange(len(values)), judge.gap(values)))
    assert finding.verdict == verdict
    if len(values) < judge.FEW:
        assert (finding.low, finding.high) == (min(values), max(values))
        assert f'n {len(values)}' in finding.cell


def shuffled(row):
    """The row with its confidences in another order, so that they tell nothing."""
    random.Random(0).shuffle(row['signals'])


def as_other(key, mine, other):
    """A change of a row: what some settings did is what another one did."""
    def change(row):
        row[key] |= {name: row[key][other] for name in mine}
    return change


SEEDS = 'default, seed 0', 'default, seed 1', 'default, seed 2'
LATEST = as_other('runs', ['keys 25 %'], 'latest keys 25 %')


@pytest.mark.parametrize('paper, text, change', [
    case('coin', 'specguard', 'right answers over a coin', as_other('runs', SEEDS, 'random-gate')),
    case('latest-keys', 'sparse', 'long: same choice less the latest keys', LATEST),
    case('latest-keys-answers', 'sparse', 'look-up: right answers less the latest keys', LATEST),
    case('no-weights', 'ecsv', 'weights: length over a vote without',
         as_other('votes', ['ecsv'], 'unweighted'), slow=True),
    case('shuffled-confidence', 'cmasd', 'AUROC of C for acceptance, all tokens', shuffled, slow=True)])
def test_a_gate_that_knows_nothing_does_not_hold(paper, text, change):
    """Negative controls, on the stored rows: a coin judges, the latest keys are chosen, and so on."""
    records, module = judge.Records(paper, 'embedded'), judge.claims_of(paper)
    for record in records.values():
        for row in record.rows:
            try:
                change(row)
            except KeyError:                            # a row of another record
                pass
    texts, figure, kind = next(found for name, *found in module.figures(records) if name == text)
    finding = judge.judge(Claim(text, *module.CLAIMS[text], texts, figure, kind))
    assert finding.verdict == 'FAILS', finding


@pytest.mark.slow
def test_interval_covers():
    """Of 200 samples of 30 normal numbers about 95 % of the intervals hold the true mean."""
    held = 0
    for sample in numpy.random.default_rng(0).normal(size=(200, 30)):
        finding = judge.judge(Claim('', 'ours', '', 0, numpy.arange(30), judge.gap(sample)))
        held += finding.low <= 0 <= finding.high
    assert 180 <= held <= 198


def test_run_row(pair):
    """Counts of real runs: a lossless setting agrees, lossy counts are those of a fresh dense pass."""
    prompt, *_ = pair.texts((), 1)
    settings = dict(ar=named('ar'), sd=sd(3), draft=named('ratio', gamma=3, tau=0.1),
                    hot=named('sd', temperature=1.0, seed=3))
    runs = run_row(settings, pair, prompt)['runs']
    n = runs['ar']['tokens']
    assert runs['ar']['passes'] == {'target/full': {1: n}} and runs['ar']['right'] == 0
    assert list(runs) == list(settings) and n == runs['sd']['tokens'] > 4
    assert runs['ar']['wrong'] == runs['sd']['wrong'] == 0
    assert runs['sd']['nats'] == pytest.approx(runs['ar']['nats'])
    assert sum(runs['sd']['passes']['target/full'].values()) == runs['sd']['cycles']
    assert n <= runs['sd']['accepted'] + runs['sd']['cycles']
    assert runs['draft']['wrong'] > 0 and runs['hot']['nats'] > runs['ar']['nats']


def test_a_costly_target_writes_the_same_text():
    """Bit for bit, although a pass reads five times the weights of all layers."""
    ids = EMBEDDED.encode('Tom has 9 pens. Tom loses 5.')
    plain, costly = [ready(EMBEDDED.target, 'cpu', 'fp32')[0] for _ in range(2)]
    measure.make_costly(costly, 4)
    assert torch.equal(fresh(plain, ids), fresh(costly, ids))
    head = plain.lm_head.weight.numel() * 4
    assert read_bytes(costly, costly.full) - head > 4.9 * (read_bytes(plain, plain.full) - head)


def test_token_row(pair):
    """Against full passes without a cache."""
    prompt, *_ = pair.texts((), 1)
    row = token_row(pair, prompt)
    ids = list(prompt.ids)
    models = [load(folder)[0] for folder in pair.folders]
    for hit in row['hit']:
        first, guess = (int(fresh(model, ids, 1)[0].argmax()) for model in models)
        assert hit == (guess == first)
        ids.append(first)
    assert len(row['hit']) == len(row['signals']) == row['tokens'] > 4


def test_the_lab_grades_its_own_rows():
    """By the task's grader, others by their answer; a story not at all. Facts may be in any order."""
    own = next(tasks.rows('math', 0))
    assert measure.graded(own, own['solution']) == 1 and measure.graded(own, str(own['answer'])) == 0
    row = dict(task='summary', answer='Mia sells pens by the river.')
    assert measure.graded(row, 'By the river, that is: by the river sells pens') == 1
    assert measure.graded(row, 'Mia sells cups by the river.') == 0
    assert not tasks.is_own(row | dict(answer='A man.'))
    assert measure.graded(dict(task='elsewhere', answer='7'), 'it is 7') == 1
    assert measure.graded(next(tasks.rows('story', 0)), 'text') is None


def test_rows_are_stored_as_they_are_measured(tmp_path):
    """Whoever interrupts keeps them, and the earlier record; floats have five digits, JSON has no nan."""
    where = tmp_path / 'results' / 'rows.jsonl'
    earlier = dict(n=2), [dict(item=1)]
    measure.write_rows(where, *earlier)
    with pytest.raises(ZeroDivisionError):
        measure.write_rows(where, dict(n=3), (dict(item={1: 2 / item}, none=math.nan) for item in (3, 0)))
    rows = [dict(item={'1': 0.66667}, none=None)]
    assert measure.read_stored(where) == earlier
    assert measure.read_stored(measure.begun(where)) == (dict(n=3), rows)
    measure.write_rows(where, dict(n=3), [], measure.whole_lines(where, dict(n=3)))
    assert measure.read_stored(where) == (dict(n=3), rows) and not measure.begun(where).exists()


def test_a_run_goes_on_after_whole_rows_of_its_head(tmp_path):
    where = tmp_path / 'rows.jsonl'
    measure.write_rows(where, dict(n=3, date='1'), [dict(item=0), dict(item=1)])
    where.write_text(where.read_text()[:-3])            # the last row is broken off
    there = measure.whole_lines(where, dict(n=3, date='2'))
    part = measure.begun(where)
    stored = (dict(item=len(part.read_text().splitlines())) for _ in there[1:])     # on the disk by then
    measure.write_rows(where, dict(n=3, date='2'), stored, there)
    assert measure.read_stored(where) == (dict(n=3, date='1'), [dict(item=0), dict(item=2)])
    assert measure.whole_lines(where, dict(n=4, date='1')) == []


def test_flags_of_a_pair(pair, monkeypatch, capsys):
    """Without files the embedded target is measured, with another draft at most."""
    asked = []
    monkeypatch.setattr(measure, 'measure', lambda *args: asked.append(args))
    mid = str(EMBEDDED.target).replace('target', 'mid')
    assert run(capsys, 'via', 'costs', '--draft', mid, main=measure.main)[0] == 0
    assert [(paper, of.name, n) for paper, of, n, *_ in asked] == [
        ('via', 'embedded+mid', 20), ('costs', 'embedded+mid', 1)]
    run(capsys, 'via', '--target', pair.target, '--draft', pair.draft, '--prompts', *pair.prompts,
        '--max-new', 12, '--longest', 50, '--dtype', 'fp32', '--n', 3, main=measure.main)
    assert asked[-1] == ('via', pair, 3, None, False)
    refused(capsys, '--prompts', 'via', '--max-new', 12, main=measure.main)


@pytest.mark.slow
@pytest.mark.parametrize('paper', [paper for paper in measure.PAPERS if paper != 'specguard'])
def test_a_foreign_pair(paper, pair, home, monkeypatch):
    """Any pair is measured, and two texts of it are judged without a warning; heads say on what."""
    monkeypatch.setattr(measure, 'MOST_POSITIONS', 4)
    measure.measure('costs', pair, 1)
    measure.measure(paper, pair, 2)
    assert judge.findings_of(paper) or paper == 'sparse'        # which measures longer contexts
    for where in home.glob(f'{paper}/results/*/*.jsonl'):
        head = measure.read_stored(where).head
        assert head['skip'] == [2, 3, 4] and head['models'].keys() == {'tiny-large', 'tiny-small'}
        assert head['cpu'] and head['threads'] and head['by'] in ('clock', 'counts') and 'commit' in head


@pytest.mark.slow
@pytest.mark.filterwarnings('error')
def test_pages_say_what_the_rows_say():
    """The committed pages are what --report writes from the stored rows; each interval has its figure."""
    for paper in judge.PAPERS:
        claims = judge.claims_of(paper).CLAIMS
        assert 0 < len(claims) <= 12
        quotes = re.findall('"(.*?)"', ' '.join(whose for whose, *_ in claims.values()))
        assert all(len(quote.split()) <= 12 for quote in quotes), paper
        for by_pair in judge.findings_of(paper).values():
            assert all(finding.low <= finding.figure <= finding.high for finding in by_pair.values())
    for where, text in judge.pages(judge.PAPERS).items():
        assert where.read_text() == text
