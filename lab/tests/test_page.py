"""lab/page: what a trace notes for the page, and what the page shows of it in a browser."""
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest

import specmini
import verify
from lab.page import write_page
from lab.page.browser import open_browser, visit
from lab.tests.helpers import EMBEDDED, interrupt, program, tiny_pair
from lab.toys import byte_network
from verify import METHODS

TOM = 'Last winter Tom the crow went to the forest with a basket.'
VIEWED = dict(ar={}, sd={}, cmasd={}, ecsv={}, via={}, specguard=dict(tau=0.9),
              sparse=dict(dense_below=8, block=4, locals=1))        # blocks are left out of short texts, too


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """The flags of a run on two random checkpoints."""
    return tiny_pair(tmp_path_factory.mktemp('pair'))


def run_of(file):
    """The JSON in a page, up to the first tag that would end it."""
    text = file.read_text(encoding='utf-8')
    return json.loads(text.split('id="trace">')[1].split('</script>')[0])


@pytest.fixture(scope='module')
def viewed(tmp_path_factory):
    """The page of one prompt by plain decoding and all methods, and its lanes by their names."""
    engine = specmini.Engine(EMBEDDED / 'target', EMBEDDED / 'draft', max_new=28, temperature=1.0, seed=5)
    ids = engine.tokenizer.encode(TOM).ids
    engine.open([ids])
    methods = {name: METHODS[name](**knobs) for name, knobs in VIEWED.items()}
    file = tmp_path_factory.mktemp('page') / 'run.html'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specmini, 'ROUNDS', 1)
        specmini.compare(engine, [(dict(prompt=TOM), 0, ids)], methods, str(file))
    run = run_of(file)
    return SimpleNamespace(file=file, run=run, engine=engine, ids=ids, methods=methods,
                           lanes={lane['method']: lane for lane in run['texts'][0]['lanes']})


def judged_places(lane):
    """(verdict, what was noted of its position) of every judged token."""
    for cycle in lane['cycles']:
        yield from zip(cycle['judged'], cycle.get('places', []))


# ------------------------------------------------------------------------------------------ what is noted

def test_notes_change_no_text(viewed):
    """Noting draws nothing and writes to no cache: the texts are those of sessions that note nothing."""
    viewed.engine.session = verify.Session
    for name, method in viewed.methods.items():
        written = verify.tokens_of(viewed.engine.write(viewed.ids, method))
        traced = [token for cycle in viewed.lanes[name]['cycles'] for token in cycle['tokens']]
        assert traced == written, name


@pytest.mark.parametrize('name', ['sd', 'cmasd', 'ecsv', 'sparse'])
def test_noted_place_holds_its_verdict(viewed, name):
    """p and q of the guess, the coin, the residual by hand; of the eight likeliest tokens, and those used."""
    pairs = list(judged_places(viewed.lanes[name]))
    assert len(pairs) == viewed.lanes[name]['stats']['judged'] > 10
    for row, place in pairs:
        i = place['ids'].index(row['token'])
        assert place['p'][i] == pytest.approx(row['p'], abs=1e-5)
        assert place['q'][i] == pytest.approx(row['q'], abs=1e-5)
        assert 8 <= len(place['ids']) == len(set(place['ids'])) <= 10
        if place['coin'] is None:
            assert row['chance'] in (0, 1)
        else:
            assert (place['coin'] <= row['chance']) == row['kept']
        assert ('residual' in place) == (not row['kept'])
        if not row['kept']:
            for p, q, rest in zip(place['p'], place['q'], place['residual']):
                assert rest == pytest.approx(max(p - q, 0) / (1 - place['overlap']), abs=1e-3)


def test_noted_windows_are_cmasds_rule(viewed):
    """floor(mean confidence so far k_max) within k_min and k_max; the block closes where it is reached."""
    for cycle in viewed.lanes['cmasd']['cycles']:
        confidence = cycle.get('confidence', [])
        assert len(confidence) == len(cycle['drafted'])
        for i, window in enumerate(cycle.get('window', []), 1):
            assert window == min(10, max(1, math.floor(10 * sum(confidence[:i]) / i)))
            assert i < window or i == len(confidence)


def test_noted_votes_elect_the_block(viewed):
    """At each position the token with the most weight behind it is the one that the target judged."""
    cycles = [cycle for cycle in viewed.lanes['ecsv']['cycles'] if 'branches' in cycle]
    assert any(len(set(column)) > 1 for cycle in cycles for column in zip(*cycle['branches']))
    for cycle in cycles:
        votes = zip(*cycle['branches']), zip(*cycle['weights']), cycle['drafted']
        for tokens, weights, elected in zip(*votes):
            behind = Counter()
            for token, weight in zip(tokens, weights):
                behind[token] += weight
            assert behind[elected] == pytest.approx(max(behind.values()), abs=1e-4)


def test_notes_of_via(viewed):
    """The lag grows by what slim commits and ends with a full pass; s(x) / max s is the verdict's ratio."""
    assert all(cycle['lag'] == 0 for cycle in viewed.lanes['sd']['cycles'])
    lag, lags = 0, []
    for cycle in viewed.lanes['via']['cycles']:
        lag = 0 if 'target/full' in cycle['passes'] else lag + len(cycle['tokens'])
        lags.append(lag)
    assert [cycle['lag'] for cycle in viewed.lanes['via']['cycles']] == lags and max(lags) > 5
    checked = 0
    for row, place in judged_places(viewed.lanes['via']):
        s = place['s'][place['ids'].index(row['token'])] if row['p'] is None else 0
        if s > 0.01:
            assert s / max(place['s']) == pytest.approx(row['ratio'], abs=1e-3)
            checked += 1
    assert checked > 10


def test_page_holds_the_json_trace(pair, tmp_path, capsys):
    """The same run traced to JSON lines and to a page: the same cycles except for what the clock said."""
    for name in ('run.jsonl', 'run.html'):
        assert program(capsys, *pair, '--temperature', 1, '--trace', tmp_path / name)[0] == 0
    traces = [[json.loads(line) for line in (tmp_path / 'run.jsonl').read_text().splitlines()],
              run_of(tmp_path / 'run.html')['texts'][0]['lanes'][0]['cycles']]
    for cycle in [*traces[0], *traces[1]]:
        for timed in (cycle, *cycle['passes'].values()):
            del timed['ms']
    assert traces[0] == traces[1]
    assert all(cycle['places'] for cycle in traces[0])


@pytest.mark.parametrize('cycle', [1, 2])
def test_page_of_an_interrupted_run(cycle, pair, tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second cycle: the page shows the first; in the first: it has no text."""
    interrupt(monkeypatch, verify.Session, 'commit', cycle)
    assert program(capsys, *pair, '--trace', tmp_path / 'run.html')[0] == 130
    texts = run_of(tmp_path / 'run.html')['texts']
    assert [len(text['lanes'][0]['cycles']) for text in texts] == [1] * (cycle - 1)


# ------------------------------------------------------------------------------------------- in a browser

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    """A headless Chromium with an empty profile; without one its tests are skipped."""
    pytest.importorskip('selenium')
    try:
        opened = open_browser(tmp_path_factory.mktemp('profile'))
    except ValueError as error:
        pytest.skip(str(error))
    yield opened
    opened.quit()


def choose(browser, what, value):
    """Sets a list or slider of the page, as a reader does."""
    browser.execute_script('const one = document.getElementById(arguments[0]); one.value = arguments[1];'
                           'for (const name of ["input", "change"]) one.dispatchEvent(new Event(name));',
                           what, value)


WALK = '''
const found = [];
for (let i = arguments[0]; i <= Number(document.getElementById('scrubber').max); i += 3) {
  move(i);
  const bars = [];
  for (const bar of document.querySelectorAll('#picture [data-token]')) {
    bars.push([bar.getAttribute('class').slice(4), Number(bar.dataset.token), Number(bar.dataset.value)]);
  }
  const values = {};
  for (const node of document.querySelectorAll('#picture .coin, #picture .chance, #view [data-value]')) {
    const name = node.getAttribute('class').split(' ')[0];
    (values[name] = values[name] || []).push(Number(node.dataset.value));
  }
  const weights = Array.from(document.querySelectorAll('.vote'), cell => Number(cell.dataset.weight));
  found.push({bars: bars, values: values, weights: weights, read: document.querySelectorAll('.read').length});
}
return found;
'''


def steps_of(lane):
    """(cycle, place, verdict or None) of each token that a page of this lane can stand at."""
    found = []
    for cycle in lane['cycles']:
        written = 0
        rejected = False
        for place, row in enumerate(cycle['judged']):
            rejected = not row['kept']
            if rejected or written < len(cycle['tokens']):
                found.append((cycle, place, row))
                written += row['kept']
        for _ in cycle['tokens'][written:]:
            found.append((cycle, len(cycle['judged']) - rejected, None))
    return found


@pytest.mark.slow
def test_page_shows_the_numbers_of_its_trace(browser, viewed):
    """Every bar, chance, coin, vote, lag, score, ratio and confidence, at every third token of every lane."""
    visit(browser, viewed.file)
    for number, (name, lane) in enumerate(viewed.lanes.items()):
        choose(browser, 'choose-lane', number)
        cycles = lane['cycles']
        seen = browser.execute_script(WALK, number % 3)
        expected = steps_of(lane)[number % 3::3]
        assert len(seen) == len(expected) > 7
        for at, (cycle, place, row) in zip(seen, expected):
            places = cycle.get('places', [])
            noted = places[place] if place < len(places) else dict(ids=[])
            bars = []
            for letter in 'pqs':
                bars += [[letter, *bar] for bar in zip(noted['ids'], noted.get(letter, []))]
            assert sorted(at['bars']) == sorted(bars)
            values = at['values']
            if row and 'score' not in row:
                assert values['chance'] == [row['chance']]
                assert values.get('coin', [None]) == [noted['coin']]
            assert at['weights'] == [weight for line in cycle.get('weights', []) for weight in line]
            assert values.get('confidence', []) == [c for one in cycles for c in one.get('confidence', [])]
            if name == 'via':
                assert values['ratio'] == [row['ratio'] for one in cycles for row in one['judged']]
                assert values['lag'] == [one['lag'] for one in cycles]
            if name == 'specguard':
                assert values['score'] == [one['judged'][0]['score'] for one in cycles]
                assert values['grounding'] == [row['grounding'] for row in cycle['judged']]
            assert (at['read'] > 0) == ('blocks' in cycle)
    assert browser.get_log('browser') == []


@pytest.mark.slow
def test_page_is_walked_by_keys_and_by_touch(browser, viewed):
    from selenium.webdriver import ActionChains, Keys
    visit(browser, viewed.file)
    choose(browser, 'choose-lane', 1)
    n, cycles = len(steps_of(viewed.lanes['sd'])), len(viewed.lanes['sd']['cycles'])

    def press(*keys):
        """(token, cycle) of the place where these keys lead."""
        ActionChains(browser).send_keys(*keys).perform()
        words = browser.find_element('id', 'where').text.replace(',', '').split()
        return int(words[1]), int(words[-1])
    browser.execute_script('document.getElementById("strip").focus()')
    assert press(Keys.HOME) == (1, 1)
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)[0] == 3
    assert press(Keys.END) == press(Keys.ARROW_RIGHT) == (n, cycles)
    assert press(Keys.ARROW_UP)[1] == cycles - 1
    assert press(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_DOWN)[1] == 3
    browser.find_element('id', 'event-7').click()
    assert press()[0] == 8 and browser.get_log('browser') == []


@pytest.mark.slow
def test_page_reckons_the_clock(browser, viewed):
    """A lane's time by hand: first by the clock, then in work with other costs of passes."""
    visit(browser, viewed.file)
    choose(browser, 'choose-lane', 1)
    share, passes = viewed.run['shares']['draft/full'], viewed.lanes['sd']['stats']['passes']

    def times():
        found = [browser.find_element('css selector', f'.speed[data-name={name}]') for name in ('sd', 'ar')]
        return [float(one.get_attribute('data-time')) for one in found]
    plain = len(viewed.lanes['ar']['cycles'])
    spent = sum(cycle['ms'] for cycle in viewed.lanes['sd']['cycles'])
    assert times()[0] * viewed.run['step'] == pytest.approx(spent, rel=1e-3)
    choose(browser, 'unit', 'work')
    assert times() == pytest.approx([passes['draft/full'] * share + passes['target/full'], plain])
    choose(browser, 'draft-cost', 0.5)
    choose(browser, 'verify-cost', 2)
    assert times() == pytest.approx([passes['draft/full'] * 0.5 + passes['target/full'] * 2, plain])


HOSTILE = ['</script><script>window.hacked = 1</script>', '<img src=x onerror="window.hacked = 1">',
           '"\'&<!--', '\ud800', '\u2028\u2029', '$trace ${trace} $$', '', '\x00\x1b[31m', '\u202eabc',
           '\\u003c\n']


def test_page_keeps_hostile_text_text(browser, tmp_path, monkeypatch):
    """Whatever a model or a prompt says is in the page letter by letter, and nothing of it runs."""
    words = dict(enumerate(HOSTILE))
    tokenizer = SimpleNamespace(decode=lambda ids, **how: ''.join(words[i] for i in ids))
    engine = SimpleNamespace(tokenizer=tokenizer, weights=lambda: {'target/full': 1}, temperature=1.0,
                             models=dict(target=byte_network(0)), target='a</script>b')
    ids = list(words)
    report = dict(method='sd', lossless=True, knobs={}, seed=0, finish='length',
                  stats=dict(labels=dict(target=len(ids)), cycles=1, passes={'target/full': 1},
                             acceptance_rate=None, tokens_per_second=1.0, acceptance_by_place=[]))
    cycle = verify.Cycle([], [], ids, ['target'] * len(ids), {'target/full': [1, 1, 0.01]}, 0.01)
    with open(tmp_path / 'run.html', 'w', encoding='utf-8') as file:
        monkeypatch.setattr('lab.page.report', lambda engine, text: report)
        write_page(file, engine, [specmini.Text({}, 0, ids, 'sd', None, [cycle])], None)
    visit(browser, tmp_path / 'run.html')
    shown = browser.execute_script('''
        return [window.hacked === undefined, document.scripts.length, document.images.length,
                Array.from(document.querySelectorAll('#strip .prompt'),
                           token => Array.from(token.textContent, letter => letter.codePointAt(0)))];''')
    assert shown == [True, 2, 0, [[ord(letter) for letter in word] for word in HOSTILE]]
    assert browser.get_log('browser') == []


def test_page_fits_a_phone(browser, viewed):
    """At 360 pixels nothing is wider than the page, whatever the method; and every picture has a name."""
    visit(browser, viewed.file, 360)
    for number in range(len(viewed.lanes)):
        choose(browser, 'choose-lane', number)
        assert 300 < browser.execute_script('return document.documentElement.scrollWidth') <= 360
    unnamed = browser.execute_script('return document.querySelectorAll("svg:not([aria-label])").length')
    assert unnamed == 0 and browser.get_log('browser') == []
