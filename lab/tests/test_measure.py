"""lab/measure.py and lab/judge.py: rows that are stored, figures by hand, verdicts, pages."""
import math
from dataclasses import replace
from unittest.mock import Mock

import numpy
import pandas
import pytest
import torch
from safetensors import SafetensorError

import verify
from lab import deepen, judge, measure, tasks
from lab.best.claims import less_ar
from lab.judge import Estimate
from lab.measure import EMBEDDED, Pair, run_row, text_rows
from lab.tests.helpers import case, program as run, refused, refuses, stored, tiny
from lab.toys import fresh
from model import load, write_calibration


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """Two tiny models of one vocabulary, three prompts in two families, and a mask."""
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


def frame_of(tmp_path, **settings):
    """The frame of some texts, two a family; settings: {name: [(tokens, wrong, seconds) a text]}."""
    rows = []
    for name, counts in settings.items():
        for i, (tokens, wrong, seconds) in enumerate(counts):
            rows.append(dict(family='ab'[i // 2], place=i % 2, setting=name, tokens=tokens, wrong=wrong,
                             seconds=[seconds, 9.0, seconds / 2], passes={'target/full': {'1': 2, '3': 4}},
                             cycles={'4 3 2': 2, '1 1 0': 1}, right=None))
    where = tmp_path / 'rows.jsonl'
    measure.write_rows(where, {}, [rows])
    return judge.framed(where)


# ------------------------------------------------------------------------------------------ figures by hand

def test_a_frame_by_hand(tmp_path):
    """The median of turns, sums over passes and cycles."""
    row = frame_of(tmp_path, mine=[(10, 3, 4.0)] * 2).iloc[0]
    assert (row.text, row.second, row.agreed, row.full, row.positions) == ('a 0', 4.0, 7, 6, 14)
    assert (row.cycles, row.drafted, row.judged, row.kept) == (3, 9, 7, 4)


def timed(*seconds, wrong=(0, 0, 0)):
    """Three texts of ten tokens."""
    return [*zip([10] * 3, wrong, seconds)]


EARLY, LATE, RIVAL = timed(1.0, 1.0, 4.0), timed(2.0, 2.0, 1.0), timed(2.0, 2.0, 2.0)
SIDES = dict(early=EARLY, late=LATE, rival=RIVAL)
LOSSY = dict(hasty=timed(0.5, 0.5, 0.5, wrong=(5, 5, 5)), lossy=timed(1.0, 1.0, 1.0, wrong=(3, 0, 0)),
             rival=RIVAL)
NEAR = dict(near=timed(1.0, 9.0, 1.5), far=timed(2.0, 9.0, 1.0), rival=RIVAL)


@pytest.mark.parametrize('settings, mine, rivals, least, texts, wanted', [
    # Without text 0 or 1 late is faster (3 s, early 5), without text 2 early (2 s, late 4): 2 + 2 + 4 s.
    case('the-choice-flips', SIDES, ['early', 'late'], ['rival'], 0, [0, 1, 2], 6 / 8),
    case('of-the-rival-too', SIDES, ['rival'], ['early', 'late'], 0, [0, 1, 2], 8 / 6),
    # Without both copies of text 0 near is slower on text 2; with one copy left it would be faster.
    case('copies-go-together', NEAR, ['near', 'far'], ['rival'], 0, [0, 0, 2], 6 / (2 + 2 + 1.5)),
    # Lossy agrees in 20 of 20 tokens without text 0, in 17 of 20 without another: 1 + 2 + 2 s.
    case('agreement-of-the-others', LOSSY, ['lossy', 'rival'], ['rival'], 0.9, [0, 1, 2], 6 / 5),
    case('none-agrees-so-far', {**LOSSY, 'lossy': timed(1.0, 1.0, 1.0, wrong=(3, 3, 3))}, ['hasty', 'lossy'],
         ['rival'], 0.9, [0, 1, 2], 6 / 3),
    case('nothing-to-choose', NEAR, ['near'], ['rival'], 0, [0, 0, 2], 6 / (1 + 1 + 1.5))])
def test_held_out_by_hand(settings, mine, rivals, least, texts, wanted, tmp_path, monkeypatch):
    """A setting is chosen on the other texts and judged on the one that is left out, with all its copies."""
    frame = frame_of(tmp_path, **settings)
    if texts == [0, 1, 2]:
        assert judge.over(frame, mine, rivals, least=least).figure == pytest.approx(wanted)
    monkeypatch.setattr(judge, 'estimate', lambda figure, *args, **more: figure)
    figure = judge.over(frame, mine, rivals, least=least)
    assert figure(numpy.array([texts, texts])).tolist() == pytest.approx([wanted] * 2)     # many resamples


def test_the_range_of_a_choice(tmp_path):
    """That of few texts is held out, too: late 2 s, 2 s, early 4 s; rival 2 s."""
    found = judge.over(frame_of(tmp_path, **SIDES), ['early', 'late'], 'rival')
    assert (found.low, found.high) == (0.5, 1.0)


def test_tuned_sd_asks_the_draft_model_as_it_is(tmp_path):
    names = [f'sd gamma=2{more}' for more in (
        '', ' draft_temperature=0', ' lookup=true', ' draft=self', ' draft=lookup', ' draft_bits=16')]
    assert judge.plain_sd(frame_of(tmp_path, **dict.fromkeys(names, RIVAL))) == names[:2]


def test_mean_share_and_area_by_hand():
    """Of area scores 3 and 1 are true, 2 and 1 false: of four pairs 2 are in order and one is a tie."""
    assert judge.mean([1, None, 3, 5]).figure == pytest.approx(3) and judge.mean([1, None]).n == 1
    assert judge.share([1, 2, 3, 4], [2, 2, 2, 2]).figure == pytest.approx(10 / 8)
    figure = judge.area([[3, 2], [1, 1]], [[1, 0], [1, 0]])
    assert figure(numpy.arange(2)) == pytest.approx((2 + 0.5) / 4)
    assert math.isnan(judge.area([[1, 2]], [[1, 1]])(numpy.array([0])))


def test_ceiling_by_hand(home):
    """Eight guesses always kept, at the times of passes; longer ones than were timed in proportion."""
    measure.write_rows(home / 'results/a/costs.jsonl', {}, [[
        {'target/full': [0.0, 2.0, 2.4, 3.0], 'target/slim': [0.0, 1.0, 1.2, 1.5], 'draft/full': [0, 0.5]}]])
    pair = judge.Pair('cmasd', 'a')
    assert pair.ceiling(8) == pytest.approx(9 / (8 * 0.25 + 1.5 * 9 / 3))
    assert pair.ceiling(2, judge='target/slim') == pytest.approx(3 / (2 * 0.25 + 0.75))
    assert judge.Pair('cmasd', 'b').ceiling(8) == math.inf


@pytest.mark.parametrize('values, line, verdict', [
    ([2.0, 2.1] * 10, 1.5, 'HOLDS'), ([2.0, 2.1] * 10, 2.5, 'FAILS'), ([2.0, 2.1] * 10, 2.05, 'UNDECIDED'),
    ([3.0] * 20, 3.0, 'HOLDS'), ([1.0, 3.0], 2.0, 'UNDECIDED'), ([1.0, 3.0], 1.0, 'HOLDS')])
def test_verdict(values, line, verdict):
    """The whole interval has to be on one side; below twelve texts the range of single texts."""
    found = judge.mean(values)
    assert found.verdict(line) == verdict
    if len(values) < judge.FEW:
        assert (found.low, found.high) == (min(values), max(values)) and 'range' in str(found)


def test_no_verdict_where_there_can_be_none():
    """A line above the ceiling is out of reach; a blind test tells nothing, even if it holds."""
    assert Estimate(1.3, 1.2, 1.4, 12, ceiling=1.8).verdict(4) == 'OUT OF REACH HERE'
    assert str(Estimate(1.3, 1.2, 1.4, 12, ceiling=1.8)) == '1.30 (1.20 to 1.40, at most 1.80, n 12 texts)'
    assert Estimate(1.3, 1.2, 1.4, 12, ceiling=4.5).verdict(4) == 'FAILS'
    assert Estimate(1.3, 1.2, 1.4, 12, blind='why').verdict(1) == 'NO VERDICT (why)'


def test_answers_are_judged_once_the_draft_alone_is_worse():
    """Of twenty questions nineteen were answered, one wrongly; the draft alone answers five or all."""
    table = pandas.DataFrame({'ar': [1] * 20, 'mine': [0] + [1] * 18 + [math.nan]})
    for alone, verdict in ([1] * 5 + [0] * 15, 'UNDECIDED'), ([1] * 20, 'NO VERDICT'):
        found = less_ar(table.assign(**{'the draft alone': alone}), 'mine')
        assert found.n == 19 and found.figure == pytest.approx(-1 / 19)
        assert found.verdict(-0.01).startswith(verdict)


# --------------------------------------------------------------------------------------------------- the rows

def test_run_row(pair):
    """Counts of real runs: a lossless setting agrees, lossy counts are those of a fresh dense pass."""
    prompt, *_ = pair.texts((), 1)
    plain, sd, lossy, hot = (run_row(pair, setting, prompt) for setting in (
        'ar', 'sd gamma=3', 'ratio gamma=3 tau=0.1', 'sd temperature=1.0 seed=3'))
    n = plain['tokens']
    assert plain['passes'] == {'target/full': {1: n}} and plain['cycles'] == {'0 0 0': n}
    assert plain['right'] == 0 and n == sd['tokens'] > 4 and plain['end'] == ('length' if n == 12 else 'eos')
    assert plain['wrong'] == sd['wrong'] == 0 and sd['nats'] == pytest.approx(plain['nats'])
    kept = sum(int(key.split()[2]) * times for key, times in sd['cycles'].items())
    cycles = sum(sd['cycles'].values())
    assert sum(sd['passes']['target/full'].values()) == cycles and n <= kept + cycles
    assert lossy['wrong'] > 0 and hot['nats'] > plain['nats']


def test_a_setting_may_say_where_drafts_come_from(pair):
    prompt, *_ = pair.texts((), 1)
    for words, proposer in ('lookup=true', verify.lookup_then_draft), ('gamma=2', verify.draft_model):
        assert measure.prepared(pair, f'sd {words}')[0].proposer is proposer        # of one Engine
    paths = [run_row(pair, f'sd gamma=2 {words}'.strip(), prompt)['passes'].keys()
             for words in ('', 'draft=lookup', 'lookup=true')]
    assert [path for found in paths for path in found if not path.startswith('target/full')] == [
        'draft/full', 'draft/full']


def test_settings_share_a_prompt_but_no_block_means(pair):
    """The prompt of a text stays in the cache; each sparse setting averages its keys anew, as a run does."""
    prompt, *_ = pair.texts((), 1)
    measure.run_once(pair, 'ar', prompt)
    reader = measure.cached_engine(pair, pair.draft, None).readers['target']
    reader.cache.averaged = 3
    reader.forget()
    assert reader.cache.averaged == 0 and reader.cache.ids[:len(prompt.ids)] == prompt.ids


def test_plain_decoding_runs_beside_the_others(pair, monkeypatch):
    """At the beginning, the middle and the end of each turn; a turn has its own order."""
    asked = []

    def note(pair, setting, prompt):
        asked.append(setting)
        return dict(seconds=[0])
    monkeypatch.setattr(measure, 'run_row', note)
    monkeypatch.setattr(measure, 'run_once', lambda *args: (note(*args), 0, 0, 1, 0))
    prompt, *_ = pair.texts((), 1)
    names = ['ar', *(f'sd gamma={n}' for n in range(1, 7))]
    rows = text_rows(names, 2, pair, prompt)
    assert len(asked) == 18 and [i for i, name in enumerate(asked) if name == 'ar'] == [0, 4, 8, 9, 13, 17]
    assert asked[:9] != asked[9:] and sorted(asked[:9]) == sorted(asked[9:])
    assert [len(row['seconds']) for row in rows] == [6] + [2] * 6


@pytest.mark.parametrize('text, says', [
    ('families: math\n\nar', 'two settings'), ('familie: math\n\nar\nsd', 'familie'),
    ('families: maths\n\nar\nsd', 'maths'), ('n: 2\n\nar\nsd\nsd', 'each once'), ('ar\nsd', 'a head'),
    ('n: 0\n\nar\nsd', 'n, turns'), ('turns: few\n\nar\nsd', 'n, turns'), ('n: 2\n\nar\nds', 'ds'),
    ('n: 2\n\nar\nsd gama=3', 'gama'), ('n: 2\n\nar\nsd lookup=yes', 'lookup'),
    ('n: 2\nn: 3\n\nar\nsd', 'each once'), ('n: 2\n\nar\nsd gamma=4\nsd\t gamma=4', 'each once'),
    ('n: 2\n\nar\nsd lookup=true draft=lookup', 'a draft model'),
    ('n: 2\n\nar\nsd seed=1 seed=2', 'once each'), ('n: 2\n\nar\nsd temperature=-1', 'temperature')])
def test_a_list_that_is_none(text, says, tmp_path, capsys):
    (tmp_path / 'mine.txt').write_text(text)
    refused(capsys, says, tmp_path / 'mine.txt', main=measure.main)


RUNS = 'expected runs of lab.measure, each once'


@pytest.mark.parametrize('change, says', [
    (lambda lines: [], RUNS), (lambda lines: lines[:1], RUNS), (lambda lines: lines[1:], 'no head'),
    (lambda lines: [*lines, '{"setting": "sd"}'], RUNS), (lambda lines: [*lines, lines[1]], RUNS),
    (lambda lines: ['ar'], 'Expecting value'), (lambda lines: [*lines, '{"fam'], 'Unterminated')])
def test_rows_that_are_none(change, says, tmp_path, capsys):
    frame_of(tmp_path, ar=[(10, 0, 2.0)] * 4)
    where = tmp_path / 'broken.jsonl'
    where.write_text('\n'.join(change((tmp_path / 'rows.jsonl').read_text().splitlines())))
    assert str(where) in refused(capsys, says, where, main=judge.main)


def test_a_deepened_checkpoint_writes_the_same_text(tmp_path, capsys):
    """Through our own loader: as many times as many layers, and logits equal to the last bit."""
    folder = tiny(tmp_path / 'one', 0, dict(num_hidden_layers=3))
    assert run(capsys, folder, tmp_path / 'deep', 4, main=deepen.main)[0] == 0
    refused(capsys, 'deep exists', folder, tmp_path / 'deep', 4, main=deepen.main)
    (tmp_path / 'cut').mkdir()
    (tmp_path / 'cut/config.json').write_bytes((folder / 'config.json').read_bytes())
    (tmp_path / 'cut/model.safetensors').write_bytes((folder / 'model.safetensors').read_bytes()[:99])
    refused(capsys, 'cut', tmp_path / 'cut', tmp_path / 'none', 4, main=deepen.main)
    with pytest.MonkeyPatch.context() as full:
        full.setattr(deepen, 'save_file', Mock(side_effect=SafetensorError('No space left')))
        line = refused(capsys, 'No space left', folder, tmp_path / 'none', 4, main=deepen.main)
        assert str(folder) not in line
    assert not [*tmp_path.glob('*none*')]               # so the same command can be given again
    one, deep = load(folder)[0], load(tmp_path / 'deep')[0]
    assert len(deep.model.layers) == 12
    ids = [5, 9, 2, 7, 7, 1]
    assert torch.equal(fresh(one, ids), fresh(deep, ids))


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
    measure.write_rows(where, earlier[0], [earlier[1]])
    with pytest.raises(ZeroDivisionError):
        measure.write_rows(where, dict(n=3), ([dict(item={1: 2 / item}, none=math.nan)] for item in (3, 0)))
    rows = [dict(item={'1': 0.66667}, none=None)]
    assert measure.read_stored(where) == earlier
    assert measure.read_stored(measure.begun(where)) == (dict(n=3), rows)
    measure.write_rows(where, dict(n=3), [], measure.whole_lines(where, dict(n=3)))
    assert measure.read_stored(where) == (dict(n=3), rows) and not measure.begun(where).exists()


def test_two_runs_of_one_record(tmp_path):
    """The second is told that the first is at work; a record that is a link stays one."""
    where, far = tmp_path / 'rows.jsonl', tmp_path / 'far.jsonl'
    where.symlink_to(far)

    def texts():
        yield [dict(item=1)]
        refuses('another program writes it', measure.write_rows, where, dict(n=2), [[dict(item=7)]])
        record = measure.Record(lambda pair, n: [1], None)
        refuses('another program writes it', measure.measure, record, where, measure.EMBEDDED, 1, True)
        yield [dict(item=2)]
    measure.write_rows(where, dict(n=2), texts())
    assert where.is_symlink() and measure.read_stored(far) == (dict(n=2), [dict(item=1), dict(item=2)])
    assert {file.name for file in tmp_path.iterdir()} == {'rows.jsonl', 'far.jsonl'}


def test_a_run_goes_on_after_whole_texts_of_its_head(pair, tmp_path):
    """A text whose rows are not all there is measured again; a record of another head is begun anew."""
    where = tmp_path / 'rows.jsonl'
    def rows(pair, i):
        return [dict(family='a', place=i, i=i), dict(family='a', place=i, i=-i)]
    record = measure.Record(lambda pair, n: range(n), rows)
    measure.measure(record, where, pair, 3)
    lines = where.read_text().splitlines(keepends=True)
    where.write_text(''.join(lines[:4]) + lines[4][:3])                 # in the middle of the second text
    done = []
    again = record._replace(rows=lambda pair, i: done.append(i) or rows(pair, i))
    measure.measure(again, where, pair, 3, resume=True)
    assert done == [1, 2] and [row['i'] for row in measure.read_stored(where).rows] == [0, 0, 1, -1, 2, -2]
    assert measure.whole_lines(where, dict(n=4)) == []
    measure.begun(where).write_text(''.join(lines[:3]))                 # of a run that was cut
    measure.measure(record, where, pair, 2, resume=True)
    assert (tmp_path / 'rows.jsonl.other').read_text() == ''.join(lines[:3])
    where.write_text(''.join([*lines[:2], 'broken\n']))
    refuses('rows.jsonl', measure.whole_lines, where, dict(n=3))


def test_flags_of_a_pair(pair, monkeypatch, capsys, tmp_path):
    """Without files the embedded target is measured, with another draft; rows stand beside their list."""
    asked = []
    monkeypatch.setattr(measure, 'measure', lambda record, *args: asked.append(args))
    mid = str(EMBEDDED.target).replace('target', 'mid')
    assert run(capsys, 'costs', '--draft', mid, main=measure.main)[0] == 0
    assert asked[-1][0].relative_to(measure.LAB).as_posix() == 'results/embedded+mid/costs.jsonl'
    (tmp_path / 'mine.real.txt').write_text('# ours\n\nfamilies: math\n\nar\nsd gamma=3\n')
    run(capsys, tmp_path / 'mine.real.txt', '--target', pair.target, '--draft', pair.draft,
        '--prompts', *pair.prompts, '--max-new', 12, '--longest', 50, '--dtype', 'fp32', '--n', 3,
        main=measure.main)
    assert asked[-1] == (tmp_path / 'results/tiny-large+small/mine.jsonl', pair, 3, False)
    refused(capsys, 'is for another pair', measure.LAB / 'best/clock.real.txt', main=measure.main)
    assert measure.records_of('best').keys() == {'block', 'clock', 'sampled'}   # not those of other pairs
    for file in measure.LAB.glob('*/*.txt'):
        measure.read_list(file)                         # refuses a setting that there is not
    refused(capsys, '--prompts', 'costs', '--max-new', 12, main=measure.main)
    assert replace(pair, target='deep', draft='draft').name == 'deep+draft'


@pytest.mark.slow
def test_a_foreign_pair(pair, home, capsys, monkeypatch):
    """A list of any pair is measured, and its settings are shown; the head says on what."""
    monkeypatch.setattr(measure, 'COSTED', 4)
    where = home / 'mine.jsonl'
    (home / 'mine.txt').write_text('turns: 2\n\nar\nsd gamma=2\nvia gamma=2\n')
    measure.measure(measure.read_list(home / 'mine.txt'), where, pair, 2)
    head, rows = measure.read_stored(where)
    assert head['skip'] == [2, 3, 4] and head['models'].keys() == {'tiny-large', 'tiny-small'}
    assert head['cpu'] and head['threads'] and 'commit' in head and len(rows) == 9
    assert list(head['prompts']) == ['prompts.jsonl'] and len(head['prompts']['prompts.jsonl']) == 16
    assert run(capsys, where, main=judge.main)[0] == 0
    measure.measure(measure.COSTS, home / 'costs.jsonl', pair, 1)
    assert {len(times) for times in measure.read_stored(home / 'costs.jsonl').rows[0].values()} == {5, 9}


@pytest.mark.slow
@pytest.mark.filterwarnings('error')
def test_pages_say_what_the_rows_say():
    """The committed pages are what --report writes from the stored rows; ten claims a paper at most."""
    for paper in judge.PAPERS:
        found = judge.claims_of(paper).CLAIMS
        assert 0 < len(found) <= 10
        for pair in judge.pairs_of(paper):
            for _, made in judge.claims_of(paper).figures(pair):
                assert made.low <= made.figure <= made.high
    for where, text in judge.pages(judge.PAPERS).items():
        assert where.read_text() == text
