"""lab/page: what a session notes for the page, and what a browser shows of it."""
import json
import shutil
from types import SimpleNamespace

import pytest

import lab.page
import specmini
import verify
from lab import times
from lab.tests.helpers import refused

STORY = ['--prompt', 'Last winter Tom the crow went to the forest with a basket.', '--max-new', '28']
SPARSE = 'sparse dense_below=8 block=4 locals=1'    # it leaves blocks out at once
FLAGS = [*STORY, '--temperature', '1', '--seed', '5', '--compare', 'sd', 'cmasd', 'ecsv', 'via',
         'specguard tau=0.9', SPARSE]


def run_of(file):
    """The JSON in a page, up to the first tag that would end it."""
    return json.loads(file.read_text(encoding='utf-8').split('id="trace">')[1].split('</script>')[0])


@pytest.fixture(scope='module')
def viewed(tmp_path_factory):
    """The page of one prompt by plain decoding and all methods, and its lanes by their names."""
    file = tmp_path_factory.mktemp('page') / 'run.html'
    lab.page.run([*FLAGS, str(file)])
    lanes = {lane['method']: lane for lane in run_of(file)['texts'][0]['lanes']}
    return SimpleNamespace(file=file, run=run_of(file), lanes=lanes)


def judged_places(lane):
    """(verdict, what was noted of its position) of every judged token."""
    for cycle in lane['cycles']:
        yield from zip(cycle['judged'], cycle['places'])


def test_notes_change_no_text(viewed):
    """Noting draws nothing and writes to no cache: the texts are those of sessions that note nothing."""
    args = specmini.parse(FLAGS)
    engine, _, (ids,) = specmini.set_up(args)
    for name, method in args.methods.items():
        traced = [token for cycle in viewed.lanes[name]['cycles'] for token in cycle['tokens']]
        assert traced == verify.tokens_of(engine.write(ids, method)), name


@pytest.mark.parametrize('name', ['sd', 'cmasd', 'ecsv', SPARSE])
def test_noted_place_holds_its_verdict(viewed, name):
    """p and q of the guess, the coin, the residual by hand; of the eight likeliest tokens, and those used."""
    pairs = list(judged_places(viewed.lanes[name]))
    assert len(pairs) == viewed.lanes[name]['stats']['judged'] > 10
    for row, place in pairs:
        i = place['ids'].index(row['token'])
        assert (place['p'][i], place['q'][i]) == pytest.approx((row['p'], row['q']), abs=1e-5)
        assert 8 <= len(place['ids']) == len(set(place['ids'])) <= 10
        certain = place['coin'] is None
        assert row['chance'] in (0, 1) if certain else (place['coin'] <= row['chance']) == row['kept']
        assert ('residual' in place) == (not row['kept'])
        for p, q, rest in zip(place['p'], place['q'], place.get('residual', [])):
            assert rest == pytest.approx(max(p - q, 0) / (1 - place['overlap']), abs=1e-3)


def test_notes_of_via(viewed):
    """The lag grows by what slim commits and ends with a full pass; s(x) / max s is the verdict's ratio."""
    assert all(cycle['lag'] == 0 for cycle in viewed.lanes['sd']['cycles'])
    lags = [0]
    for cycle in viewed.lanes['via']['cycles']:
        lags.append(0 if 'target/full' in cycle['passes'] else lags[-1] + len(cycle['tokens']))
        assert cycle['lag'] == lags[-1]
    assert max(lags) > 5
    for row, place in judged_places(viewed.lanes['via']):
        if row['p'] is None:
            s = place['s'][place['ids'].index(row['token'])]
            assert s / max(place['s']) == pytest.approx(row['ratio'], abs=1e-3)


@pytest.mark.parametrize('main, flags, named', [
    (lab.page.main, '', 'run.html'), (lab.page.main, '--prompt a no/such/run.html', 'no/such/run.html'),
    (lab.page.main, '--list run.html', '--list'), (lab.page.main, '--prompt a --gama 2 run.html', '--gama'),
    (times.main, '--prompt a --show', '--show')])
def test_bad_input_is_refused_in_a_line(main, flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, named, *flags.split(), main=main)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    """A headless Chromium with an empty profile; without one its tests are skipped."""
    webdriver = pytest.importorskip('selenium.webdriver')
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    driver = shutil.which('chromedriver')
    if not (chromium and driver):
        pytest.skip('no browser here: apt-get install chromium chromium-driver')
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp('profile')
    for flag in ('headless=new', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run',
                 'disable-background-networking', 'disable-component-update', 'disable-sync',
                 'disable-dev-shm-usage', 'hide-scrollbars', f'user-data-dir={profile}'):
        options.add_argument(f'--{flag}')
    options.set_capability('goog:loggingPrefs', dict(browser='ALL'))
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as opened:
        yield opened


def visit(browser, file):
    """Opens a page from disk, a thousand pixels wide."""
    metrics = dict(width=1000, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    browser.get(file.as_uri())


def choose(browser, what, value):
    """Sets a list or slider of the page, as a reader does."""
    browser.execute_script('const one = document.getElementById(arguments[0]); one.value = arguments[1];'
                           'for (const name of ["input", "change"]) one.dispatchEvent(new Event(name));',
                           what, value)


WALK = '''
return events().map((at, i) => {
  move(i);
  const all = (what, one) => Array.from(document.querySelectorAll(what), one);
  const values = {};
  for (const node of document.querySelectorAll('#picture .coin, #picture .chance, #view [data-value]')) {
    const name = node.getAttribute('class').split(' ')[0];
    (values[name] = values[name] || []).push(Number(node.dataset.value));
  }
  const bars = all('#picture [data-token]', bar => [
    bar.getAttribute('class').slice(4), Number(bar.dataset.token), Number(bar.dataset.value)]);
  return [at, bars, values, all('.vote', cell => Number(cell.dataset.weight))];
});
'''


@pytest.mark.slow
def test_page_shows_the_numbers_of_its_trace(browser, viewed):
    """Every bar, chance, coin, vote, lag, score, ratio and confidence, at every token of every lane."""
    visit(browser, viewed.file)
    for number, (name, lane) in enumerate(viewed.lanes.items()):
        choose(browser, 'choose-lane', number)
        cycles = lane['cycles']
        walked = browser.execute_script(WALK)
        written = [at['token'] for at, *_ in walked if at['kind'] != 'rejected']
        assert written == [token for cycle in cycles for token in cycle['tokens']]
        rejected = [row['token'] for cycle in cycles for row in cycle['judged'] if not row['kept']]
        assert [at['token'] for at, *_ in walked if at['kind'] == 'rejected'] == rejected
        rows = [one['judged'] for one in cycles]
        noted = dict(confidence=[C for one in cycles for C in one.get('confidence', [])])
        if name == 'via':
            noted |= dict(ratio=[row['ratio'] for row in sum(rows, [])], lag=[one['lag'] for one in cycles])
        if name.startswith('specguard'):
            noted |= dict(score=[judged[0]['score'] for judged in rows])
        for at, bars, values, weights in walked:
            cycle, row = cycles[at['cycle']], at['row']
            place = dict(enumerate(cycle.get('places', []))).get(at['place'], {})
            assert sorted(bars) == sorted([letter, *bar] for letter in 'pqs' if letter in place
                                          for bar in zip(place['ids'], place[letter]))
            assert {key: values.get(key, []) for key in noted} == noted
            assert weights == [weight for line in cycle.get('weights', []) for weight in line]
            if name.startswith('specguard'):
                assert [row['token'] for row in cycle['judged']] == cycle['drafted']
                assert values['bar'] == [cycle['judged'][0][key] for key in ('scaled_L', 'scaled_G')]
            elif row:
                assert (values['chance'], values.get('coin', [None])) == ([row['chance']], [place['coin']])
    assert browser.get_log('browser') == []


HOSTILE = ['</script><script>window.hacked = 1</script>', '<img src=x onerror="window.hacked = 1">',
           '"\'&<!--', '\ud800', '\u2028\u2029', '$trace ${trace} $$', '', '\x00\x1b[31m', '\u202eabc',
           '\\u003c\n']


def test_page_keeps_hostile_text_text(browser, tmp_path):
    """Whatever a model or a prompt says is in the page letter by letter, and nothing of it runs."""
    tokenizer = SimpleNamespace(decode=lambda ids, **how: ''.join(HOSTILE[i] for i in ids))
    engine = SimpleNamespace(tokenizer=tokenizer, temperature=1.0, models=['target'], seed=0,
                             target='a</script>b', lossless=lambda method: True)
    ids = list(range(len(HOSTILE)))
    cycle = verify.Cycle([], [], ids, ['target'] * len(ids), {'target/full': [1, 1]}, 0.01)
    session = SimpleNamespace(tokens=ids, begin=len(ids), notes=[{}])
    text = specmini.Text(engine, {}, 0, 0, 'sd', verify.Exact(), session, [cycle])
    with open(tmp_path / 'run.html', 'w', encoding='utf-8') as file:
        lab.page.write_page(file, [text], {'target/full': 1}, 0.01)
    visit(browser, tmp_path / 'run.html')
    shown = browser.execute_script('''
        return [window.hacked === undefined, document.scripts.length, document.images.length,
                Array.from(document.querySelectorAll('#strip .prompt'),
                           token => Array.from(token.textContent, letter => letter.codePointAt(0)))];''')
    assert shown == [True, 2, 0, [[ord(letter) for letter in word] for word in HOSTILE]]
    assert browser.get_log('browser') == []
