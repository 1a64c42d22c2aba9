"""The README and the lab's pages: what they show is printed, their commands, links and figures."""
import importlib
import importlib.util
import re
import runpy
import shlex
import sys

import pytest
import torch

import specmini
import verify
from lab.tests.helpers import HOME, Coin, case
from lab.toys import Table, enumerate_law, exact_law, variation

PAPERS = 'cmasd', 'ecsv', 'via', 'specguard', 'sparse', 'best'
PAGES = 'README.md', 'lab/README.md', 'lab/SPEED.md', *(f'lab/{paper}/README.md' for paper in PAPERS)
NOT_HERE = '# (card)', '# (download)', '# (minutes)'       # what a page marks commands with that no test runs


def text_of(page):
    return (HOME / page).read_text(encoding='utf-8')


def fences(page, kind):
    """The texts of a page's fenced blocks of this kind, such as bash."""
    return re.findall(rf'^```{kind}\n(.*?)^```', text_of(page), re.S | re.M)


def run_command(command, folder, monkeypatch, capsys):
    """What `python ... [> FILE]`, as it stands on a page, prints in this folder."""
    program, *flags = shlex.split(command, comments=True)
    assert program == 'python', command
    *flags, file = flags if '>' in flags else (*flags, None)
    if file:
        flags.remove('>')
    if flags[0] == '-m':
        del flags[0]
    module = flags[0].removesuffix('.py')
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'argv', flags)
    monkeypatch.setattr('lab.times.TIMING', 0.0)        # one round, where seconds are not looked at
    monkeypatch.setattr(specmini, 'ROUNDS', 1)
    try:
        if module == 'specmini':
            sys.exit(specmini.main())
        runpy.run_module(module, run_name='__main__')
    except SystemExit as end:
        assert not end.code, (command, capsys.readouterr().err)
    printed, table = capsys.readouterr()
    if file:
        (folder / file).write_text(printed, encoding='utf-8')
    return printed + table                              # a run's table goes to stderr


def assert_shown(lines, printed):
    """Each shown line is printed, in this order; `...` stands for any number, `# ` begins our remarks.

    Of a table's row the speeds are not compared.
    """
    remark = re.compile(r'\s+# .*|(?<=%)\s+\d+\.\d(\s+[\d.]+ \(.*\))?(?=\s+(lossless|LOSSY))|\s+$')
    left = [remark.sub('', line) for line in printed]
    skipping = False
    for line in lines:
        line = remark.sub('', line)
        if line.strip() == '...':
            skipping = True
            continue
        place = left.index(line) if skipping and line in left else 0
        assert left and left[place] == line, f'shown {line!r}, printed {left[:3]}'
        del left[:place + 1]
        skipping = False
    assert skipping or not left, f'not shown: {left}'


SHOWN = [(page, block) for page in PAGES for block in fences(page, 'text') if block.startswith('$ ')]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('page, block', SHOWN, ids=map(str, range(len(SHOWN))))
def test_shown_output_is_printed(page, block, tmp_path, capsys, monkeypatch):
    mine(tmp_path, monkeypatch)
    command, *lines = block[2:].splitlines()
    for step in command.split(' && '):
        printed = run_command(step, tmp_path, monkeypatch, capsys)
    assert_shown(lines, printed.splitlines())


def steps(line):
    """The commands of a line of a bash block, without those that fetch, install, test or set variables."""
    found = [step for step in line.split(' && ') if shlex.split(step, comments=True)]
    return [step for step in found
            if not step.startswith(('git clone', 'cd ', 'pip ', 'TARGET=')) and 'pytest' not in step]


def mine(folder, monkeypatch):
    """Writes the README's mine.py there; the method that it enters goes afterwards."""
    code, = [code for code in fences('README.md', 'python') if code.startswith('# mine.py')]
    (folder / 'mine.py').write_text(code)
    monkeypatch.setitem(verify.METHODS, 'mine', verify.Exact)


COMMANDS = [case(f'{page}-{i}', page, block, slow=page == 'README.md')
            for page in PAGES for i, block in enumerate(fences(page, 'bash'))]


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('page, block', COMMANDS)
def test_commands_run(page, block, tmp_path, capsys, monkeypatch):
    """Every command of the README runs as it stands.

    Those marked as needing more, and the lab's, which measure for minutes, name a program and its flags.
    """
    mine(tmp_path, monkeypatch)
    for line in block.splitlines():
        for step in steps(line):
            if page != 'README.md' or any(mark in line for mark in NOT_HERE):
                assert_flags_exist(step, monkeypatch, capsys)
            else:
                run_command(step, tmp_path, monkeypatch, capsys)


def assert_flags_exist(command, monkeypatch, capsys):
    """Each --flag after the program of a command is in that program's help."""
    words = shlex.split(command, comments=True)
    first = next(i for i, word in enumerate(words) if word.endswith('.py') or word.startswith('lab.'))
    program, *rest = words[first:]
    assert importlib.util.find_spec(program.removesuffix('.py')), program
    flags = [word for word in rest if word.startswith('--')]
    if flags:
        program = re.sub('lab.(parallel|page)', 'specmini.py', program)         # their flags are the same
        help_of = shlex.join(['python', program, '--help'])
        printed = run_command(help_of, HOME, monkeypatch, capsys)
        assert all(re.search(rf'{flag}\b', printed) for flag in flags), command


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r'^#+ (.*)', page.read_text(encoding='utf-8'), re.M)
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', [*PAGES, 'lab/course.md'])
def test_links_lead_somewhere(page):
    here = HOME / page
    text = re.sub(r'^```.*?^```|`[^`\n]*`', '', text_of(page), flags=re.S | re.M)
    for link in re.findall(r'\]\(([^)\s]+)\)', text):
        if link.startswith('http'):
            continue
        file, _, heading = link.partition('#')
        there = here.parent / file if file else here
        assert there.exists(), link
        assert not heading or heading in anchors(there), link


REAL, DEEP, CLAIMS = '**qwen-1.5b+0.5b: 12 texts**', '**qwen-1.5bx5+0.5b: 12 texts**', '| claim |'
ROWS = [                # of the README's table of speeds: how the rows of best/README.md begin
    '`sd gamma={}` ', '`sd gamma={} lookup', '`payoff`', '`cmasd gamma={}` ',
    '`ecsv gamma={} branches=2 draft_temperature=0.5`', '`via gamma={}`',
    '`specguard k=4 gamma={} delimiter=sentence`']
TIED = [                # other words of it, the page with their figures, its table, how its row begins
    ('1.28 times as fast', 'best', REAL, '`sd gamma=3` '),
    ('0.85 (a question) to 1.49 (summaries)', 'best', REAL, '`sd gamma=3` '),
    ('it is 1.39 at the same gamma', 'best', REAL.replace(':', ', AVX-512 and VNNI:'), '`sd gamma=3` '),
    ('1.20 on the CPU: 1.05 (a question) to 1.30 (summaries)', 'best', REAL, '`sd gamma=4 draft=self` '),
    ('`sd` has 1.24', 'best', CLAIMS, '`sd` at its best gamma'),
    ('`cmasd` 1.45', 'cmasd', CLAIMS, 'best setting: speed over plain'),
    ('deep target 2.10', 'best', CLAIMS, '`sd` at its best gamma'),
    ('and 2.06', 'cmasd', CLAIMS, 'best setting: speed over plain')]
SAID = {'no': 'FAILS', 'yes': 'HOLDS', 'undecided': 'UNDECIDED', 'out of reach': 'OUT OF REACH'}
PAIRS = 'embedded', 'qwen-1.5b+0.5b', 'qwen-1.5bx5+0.5b'        # the columns of section 6
FOUND = [               # of its rows: the page, how the row there begins, what precedes the verdict
    ('cmasd', 'best setting: speed over plain', ''), ('cmasd', 'best setting: speed over `sd`', ''),
    ('cmasd', 'AUROC of C', 'all tokens: '), ('cmasd', 'AUROC of C', 'where C < 0.9: '),
    ('cmasd', 'default: right answers', ''), ('ecsv', 'ecsv-lite: length over sd', ''),
    ('via', 'speed over plain', ''), ('via', 'right answers won or lost', ''),
    ('specguard', 'right answers over sd', 'default gate: '),
    ('specguard', 'speed over sd', 'default gate: '),
    ('specguard', 'right answers over sd', 'calibrated gate: '),
    ('specguard', 'speed over sd', 'calibrated gate: '),
    ('sparse', 'one pass after 8k keys', ''), ('sparse', 'look-ups, rho 0.25: right', '')]


def decimals(text):
    return re.findall(r'(?<![\w.])-?\d+\.\d+(?![\w.]*[A-Za-z])', text)


def assert_rounds(words, row):
    """Each decimal number of these words is, rounded, one of the row."""
    for figure in decimals(words):
        half = 0.5 * 0.1 ** len(figure.partition('.')[2]) + 1e-9
        assert any(abs(abs(float(one)) - abs(float(figure))) <= half for one in decimals(row)), (words, row)


def row_of(page, table, begins):
    """(the header, the row that begins so) of a page's table."""
    header, *rows = ''.join(text_of(f'lab/{page}/README.md').partition(table)[1:]).split('\n| ')
    return header, next(line for line in rows if line.startswith(begins))


def test_figures_of_the_readme_are_stored():
    """Each figure of section 4 but costs and knobs stands, rounded, in a row."""
    text = text_of('README.md')
    section = text.partition('## 4. ')[2].partition('\n## ')[0]
    section = re.sub(r'^```.*?^```', '', section, flags=re.S | re.M)
    table = re.findall(r'^\| `--.*` \| (.*) \| (.*) \|$', section, re.M)
    for begins, cells in zip(ROWS, table, strict=True):
        for pair, cell in zip((REAL, DEEP), cells):
            figures, _, gamma = cell.partition(', `--gamma ')
            assert_rounds(figures, row_of('best', pair, begins.format(gamma.strip('`')))[1])
    for words, *place in TIED:
        assert words in ' '.join(text.split()), words
        assert_rounds(words, row_of(*place)[1])
    left = {*decimals(re.sub(r'^\|.*', '', section, flags=re.M))}
    costs, tied = {'0.31', '0.07'}, {'1.24', '1.45', '2.10', '2.06'}
    of_speed = {'0.84', '0.93', '0.74', '1.12'}
    assert left == costs | tied | of_speed | {'1.02'}   # our threshold


def test_verdicts_of_the_readme_are_stored():
    """Each cell of section 6 says what the cell of its claim and pair says."""
    lines = text_of('README.md').partition('## 6. ')[2].partition('\n## ')[0].splitlines()
    rows = [line.strip('|').split('|') for line in lines if line.startswith('| ')][1:]
    for (page, begins, part), (_, _, *cells) in zip(FOUND, rows, strict=True):
        header, row = row_of(page, CLAIMS, begins)
        for pair, cell in zip(PAIRS, cells):
            if not cell.strip():
                continue
            column = 'smollm2-135m' if 'SmolLM2' in cell else pair
            stored = row.split('|')[header.split('|').index(f' {column} ') - 1]
            stored = stored[stored.index(part):].removeprefix(part)
            said, figure = cell.split(':')
            assert stored.lstrip().startswith(SAID[said.strip().partition(' (')[0]]), (begins, pair, cell)
            whole = re.search(r'-?(\d+)( points| of 100)', figure)
            figure = f'{int(whole[1]) / 100}' if whole else figure
            assert_rounds(said + figure, stored)


def test_worked_example_adds_up():
    """The README's table of four words is the rule that `verify` computes, and its last column is p."""
    rows = re.findall(r'^\| (mat|rug|sofa|dog) \|(.*)\|$', text_of('README.md'), re.M)
    columns = torch.tensor([[float(cell) for cell in cells.split('|')] for _, cells in rows]).T
    q, p, chance, kept, rest, replaced, together = columns
    assert torch.allclose(kept, torch.minimum(p, q))
    assert torch.allclose(chance, (p / q).clamp(max=1), atol=0.005)
    assert torch.allclose(rest, verify.residual(p, q), atol=1e-6)
    assert torch.allclose(replaced, (1 - kept.sum()) * rest, atol=1e-6)
    assert torch.allclose(together, kept + replaced) and torch.allclose(together, p)
    assert torch.equal(verify.residual(p, p), p)        # where nothing is left: p, and not 0 / 0


@pytest.mark.parametrize('step', range(6))
def test_steps_run(step, capsys):
    """The greedy ones write one text; from p2 on in fewer passes than tokens."""
    sys.modules.pop(f'lab.steps.p{step}', None)         # else runpy warns
    runpy.run_module(f'lab.steps.p{step}', run_name='__main__')
    text, counts = capsys.readouterr().out.rsplit('\n', 2)[:2]
    passes = int(re.search(r'(\d+) target passes', counts)[1])
    assert passes == 80 if step < 2 else passes < 40
    assert ', 0 draft passes' in counts if step < 2 else int(re.search(r'(\d+) draft', counts)[1]) > passes
    if step < 3:
        assert 'Mia met Eva the fox there.' in text


@pytest.mark.parametrize('name, longest', [('p3', 'p3.GAMMA'), ('p4', 'p4.LONGEST'), ('p5', 'p4.LONGEST')])
def test_law_of_steps(name, longest, monkeypatch):
    """p3 and p4 have the target's law whatever the draft is, p5 has not: every outcome of every draw."""
    step = importlib.import_module(f'lab.steps.{name}')
    monkeypatch.setattr(f'lab.steps.{longest}', 1)
    target, draft = Table(1, 3), Table(2, 3)

    def run(s, method):
        with monkeypatch.context() as patch:
            patch.setattr(torch, 'rand', lambda *_: Coin(s.draw))
            patch.setattr(torch, 'multinomial', lambda p, _: s.draw(p))
            ids, *_ = step.generate(target, draft, [0], 2)
        return ids[1:], None
    gap = variation(enumerate_law(target, draft, None, 2, run=run), exact_law(target, 2, temperature=1.0))
    assert gap > 0.01 if name == 'p5' else gap < 1e-9
