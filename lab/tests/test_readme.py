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
    printed, _ = capsys.readouterr()
    if file:
        (folder / file).write_text(printed, encoding='utf-8')
    return printed


def assert_shown(lines, printed):
    """Each shown line is printed, in this order; `...` stands for any number, `# ` begins our remarks."""
    remark = re.compile(r'\s+# .*|\s+$')
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
    """What a page shows below `$ command` is what that command prints today."""
    command, *lines = block[2:].splitlines()
    for step in command.split(' && '):
        printed = run_command(step, tmp_path, monkeypatch, capsys)
    assert_shown(lines, printed.splitlines())


def steps(line):
    """The commands of a line of a bash block, without those that install, test or set variables."""
    found = [step for step in line.split(' && ') if shlex.split(step, comments=True)]
    return [step for step in found if not step.startswith(('pip ', 'TARGET=')) and 'pytest' not in step]


COMMANDS = [case(f'{page}-{i}', page, block, slow=page == 'README.md')
            for page in PAGES for i, block in enumerate(fences(page, 'bash'))]


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('page, block', COMMANDS)
def test_commands_run(page, block, tmp_path, capsys, monkeypatch):
    """Every command of the README runs as it stands.

    Those marked as needing more, and the lab's, which measure for minutes, name a program and its flags.
    """
    mine, = [code for code in fences('README.md', 'python') if code.startswith('# mine.py')]
    (tmp_path / 'mine.py').write_text(mine)
    monkeypatch.setitem(verify.METHODS, 'mine', verify.Exact)       # what mine.py enters goes afterwards
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
    """Files and headings of the repository that a page links to are there."""
    here = HOME / page
    text = re.sub(r'^```.*?^```|`[^`\n]*`', '', text_of(page), flags=re.S | re.M)
    for link in re.findall(r'\]\(([^)\s]+)\)', text):
        if link.startswith('http'):
            continue
        file, _, heading = link.partition('#')
        there = here.parent / file if file else here
        assert there.exists(), link
        assert not heading or heading in anchors(there), link


def test_no_page_is_a_wall():
    """The README has 190 lines at most, the lab's 270, other pages 180; all of 130 columns."""
    for page in [*PAGES, 'lab/LOG.md']:
        lines = text_of(page).splitlines()
        assert len(lines) <= {'README.md': 190, 'lab/README.md': 270}.get(page, 180), page
        narrow = [line for line in lines if not line.startswith(('|', '![', '<img', '$ python '))]
        assert all(len(line) <= 130 for line in narrow), page


REAL, COSTLY, CLAIMS = '**qwen-1.5b+0.5b: 12 texts**', '**qwen-1.5bx5+0.5b: 12 texts**', '| claim |'
TIED = [                # words of the README, the page with their figures, its table, how its row begins
    ('1.23 (1.07 to 1.38)', 'best', REAL, '`sd gamma=3` '),
    ('2.03 (1.75 to 2.29)', 'best', COSTLY, '`sd gamma=4` '),
    ('1.37 (1.20 to 1.53)', 'best', REAL, '`sd gamma=3 lookup'),
    ('1.94 (1.67 to 2.27)', 'best', COSTLY, '`sd gamma=4 lookup'),
    ('1.34 (1.26 to 1.45)', 'best', REAL, '`payoff'),
    ('1.98 (1.74 to 2.30)', 'best', COSTLY, '`payoff'),
    ('1.29 (1.05 to 1.48)', 'best', REAL, '`cmasd'),
    ('2.21 (1.80 to 2.59)', 'best', COSTLY, '`cmasd'),
    ('| 96.7 %,', 'best', REAL, '`cmasd'),
    (', 96.2 % |', 'best', COSTLY, '`cmasd'),
    ('1.19 (1.10 to 1.35)', 'best', REAL, '`via '),
    ('1.66 (1.50 to 1.87)', 'best', COSTLY, '`via '),
    ('| 87.1 %,', 'best', REAL, '`via '),
    (', 89.1 % |', 'best', COSTLY, '`via '),
    ('1.06 (0.93 to 1.17)', 'best', REAL, '`ecsv'),
    ('1.75 (1.49 to 2.01)', 'best', COSTLY, '`ecsv'),
    ('1.10 (0.75 to 1.36)', 'best', REAL, '`specguard'),
    ('3.20 (1.83 to 4.93)', 'best', COSTLY, '`specguard'),
    ('| 87.8 %,', 'best', REAL, '`specguard'),
    (', 84.7 % |', 'best', COSTLY, '`specguard'),
    ('reach here: at most 1.90, 3.35 | 1.29, 2.21 | 12', 'cmasd', CLAIMS, 'best setting: speed over plain'),
    ('AUROC | yes | 0.94 | 22', 'cmasd', CLAIMS, 'AUROC of C for'),
    ('(embedded pair) | undecided | 0.99 | 60', 'ecsv', CLAIMS, 'ecsv-lite: length over sd'),
    ('(embedded pair) | undecided | 2 tasks | 60', 'ecsv', CLAIMS, 'ecsv: tasks with'),
    ('out of reach here at 0.35, no at 0.08 | 1.28, 1.66 | 12', 'via', CLAIMS, 'speed over plain'),
    ('harder problems) | undecided | -2 points | 50', 'specguard', CLAIMS, 'math-hard: right'),
    ('(SmolLM2) | no | 1.25 | 24', 'sparse', CLAIMS, 'one pass after 8k keys'),
    ('the text) | no | 0.68 lost | 50', 'sparse', CLAIMS, 'look-ups, rho 0.25: right')]
SAID = {'| no |': 'FAILS', '| yes |': 'HOLDS', '| undecided |': 'UNDECIDED', 'reach here': 'OUT OF REACH'}


def decimals(text):
    return re.findall(r'(?<![\w.])-?\d+\.\d+(?![\w.]*[A-Za-z])', text)


def test_figures_of_the_readme_are_stored():
    """Each figure of sections 4 and 6 but costs and claims stands, rounded, in a row; so does its verdict."""
    text = text_of('README.md')
    text = ''.join(text.partition(f'## {n}. ')[2].partition('\n## ')[0] for n in (4, 6))
    for words, page, table, begins in TIED:
        rows = text_of(f'lab/{page}/README.md').partition(table)[2].split('\n| ')
        row = next(line for line in rows if line.startswith(begins))
        assert words in text, words
        for figure in {*decimals(words)} - {'0.35', '0.08'}:
            half = 0.5 * 0.1 ** len(figure.partition('.')[2]) + 1e-9
            assert any(abs(abs(float(one)) - float(figure)) <= half for one in decimals(row)), words
        assert all(word not in words or verdict in row for word, verdict in SAID.items()), words
    tied = decimals(' '.join(words for words, *_ in TIED))
    assert {*decimals(text)} - {*tied} - {'0.35', '0.08', '1.05'} == {'1.15', '2.5', '3.6'}     # claims


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


@pytest.mark.parametrize('name, longest', [('p3', 'GAMMA'), ('p4', 'LONGEST'), ('p5', 'LONGEST')])
def test_law_of_steps(name, longest, monkeypatch):
    """p3 and p4 have the target's law whatever the draft is, p5 has not: every outcome of every draw."""
    step = importlib.import_module(f'lab.steps.{name}')
    monkeypatch.setattr(step, longest, 1)
    target, draft = Table(1, 3), Table(2, 3)

    def run(s, method):
        with monkeypatch.context() as patch:
            patch.setattr(torch, 'rand', lambda *_: Coin(s.draw))
            patch.setattr(torch, 'multinomial', lambda p, _: s.draw(p))
            ids, *_ = step.generate(target, draft, [0], 2)
        return ids[1:], None
    gap = variation(enumerate_law(target, draft, None, 2, run=run), exact_law(target, 2, temperature=1.0))
    assert gap > 0.01 if name == 'p5' else gap < 1e-9
