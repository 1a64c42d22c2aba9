"""The README and the lab's pages: what they show is printed, their commands exist, their links and sizes."""
import importlib
import importlib.util
import re
import runpy
import shlex
import sys

import numpy
import pytest
import torch

import specmini
import verify
from lab.best.claims import at_any_length, counted
from lab.best.record import COSTS
from lab.judge import CLOCK, MODELLED, POSITION, Records, over, tuned_over
from lab.tests.helpers import HOME, Coin
from lab.toys import Table, enumerate_law, exact_law, overlap, variation

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
    assert_shown(lines, run_command(command, tmp_path, monkeypatch, capsys).splitlines())


def steps(line):
    """The commands of a line of a bash block, without those that install, test or set variables."""
    found = [step for step in line.split(' && ') if shlex.split(step, comments=True)]
    return [step for step in found if not step.startswith(('pip ', 'TARGET=')) and 'pytest' not in step]


BLOCKS = fences('README.md', 'bash')
LINES = {line: None for page in PAGES[1:] for block in fences(page, 'bash') for line in block.splitlines()}


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('block', BLOCKS, ids=map(str, range(len(BLOCKS))))
def test_commands_run(block, tmp_path, capsys, monkeypatch):
    """Every command of the README runs as it stands; those marked as needing more name flags that exist."""
    for line in block.splitlines():
        for step in steps(line):
            if any(mark in line for mark in NOT_HERE):
                assert_flags_exist(step, monkeypatch, capsys)
            else:
                run_command(step, tmp_path, monkeypatch, capsys)


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
@pytest.mark.parametrize('line', LINES)
def test_commands_of_the_lab_exist(line, monkeypatch, capsys):
    """What the lab's pages say to run is there, with these flags; it measures for minutes, and is not run."""
    for step in steps(line):
        assert_flags_exist(step, monkeypatch, capsys)


def assert_flags_exist(command, monkeypatch, capsys):
    """Each --flag behind the program of a command is in that program's help."""
    words = shlex.split(command, comments=True)
    first = next(i for i, word in enumerate(words) if word.endswith('.py') or word.startswith('lab.'))
    program, *rest = words[first:]
    assert importlib.util.find_spec(program.removesuffix('.py')), program
    flags = [word for word in rest if word.startswith('--')]
    if flags:
        help_of = shlex.join(['python', program, '--help'])
        printed = run_command(help_of, HOME, monkeypatch, capsys)
        assert all(re.search(rf'{flag}\b', printed) for flag in flags), command


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r'^#+ (.*)', page.read_text(encoding='utf-8'), re.M)
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', [*PAGES, 'lab/course.md', 'lab/models/README.md', 'lab/page/README.md'])
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


@pytest.mark.parametrize('page', PAGES)
def test_a_page_is_no_wall(page):
    """The README has 300 lines of 120 columns and 22 KB at most, other pages 150 of 130 and 14 KB.

    The scoreboard, a line for each claim of all papers, is not counted.
    """
    lines, columns, size = (300, 120, 22_000) if page == 'README.md' else (150, 130, 14_000)
    text = text_of(page)
    if page == 'lab/README.md':
        text = text.partition('<!-- begin')[0]
    assert text.count('\n') <= lines and len(text.encode()) <= size
    wide = () if page == 'README.md' else ('|', '![')
    assert all(len(line) <= columns for line in text.splitlines() if not line.startswith(wide))


REAL = 'qwen-1.5b+0.5b'
BEST = f'{REAL} | '
INT4 = f'{REAL}, both drafts | int4: '
SHOWN = [               # words of the README, the page whose rows have their figures, how these rows begin
    ('1.71 (1.58 to 1.82)', 'best', INT4 + 'sd 2'), ('1.80 (1.48 to 2.07)', 'best', INT4 + 'look up, else 5'),
    ('1.54; 1.59 | 1.50; 1.38', 'best', BEST + 'sd 2', BEST + 'payoff'),
    ('1.64; summaries 1.90 | 1.26', 'best', BEST + 'look up, else 3'),
    ('1.34; summaries 1.84 | 1.31', 'best', BEST + 'look up 3'),
    ('1.53; 1.93', 'best', BEST + 'cmasd |', INT4 + 'cmasd'),
    ('`payoff` 1.04 (0.94 to 1.13)', 'cmasd', 'payoff over'),
    ('(AUROC 0.94)', 'cmasd', 'AUROC of C for'), ('1.00 of tuned', 'cmasd', 'default over'),
    ('0.90 of `sd`', 'via', 'over `sd`'), ('in a row 0.96', 'via', 'without 4 or 8'),
    ('(AUROC 0.87, 0.97)', 'specguard', 'AUROC of L'), ('decoding: 0.92', 'best', BEST + 'specguard, k = 1'),
    ('1.25 times', 'sparse', 'one pass behind'), ('a text 1.03', 'sparse', 'long: end to end'),
    ('4.3 of plain decoding, or 1.37 (1.21 to 1.59)', 'cmasd', 'default (lossy)', 'default over'),
    ('1.20 (1.10 to 1.30) of `sd`', 'cmasd', 'payoff over'),
    ('2.5 of plain decoding holds (3.3)', 'via', 'over plain'), ('1.5 of `sd` (1.05)', 'via', 'over `sd`'),
    ('1.09 (1.06 to 1.13) of `sd`', 'ecsv', 'the best of four'),
    ('vote 0.92', 'ecsv', 'ecsv-lite over sd with a greedy'),
    ('SpecGuard has 0.73', 'specguard', 'speed over best'), ('layers 1.8', 'specguard', 'speed over best')]


def decimals(text):
    return re.findall(r'(?<![\w.-])\d+\.\d+(?![\w.]*[A-Za-z])', text)


def test_figures_of_the_readme_are_stored():
    """Each figure of sections 9 and 10 stands, rounded, in the row of a page that is made from stored rows.

    Four that no page shows are computed. The temperature, costs of a draft and 2.2, which is of an earlier
    record (SPEED.md), are left out.
    """
    text = ' '.join(text_of('README.md').partition('## 9. ')[2].partition('## 11. ')[0].split())
    for words, page, *begins in SHOWN:
        _, _, rows = text_of(f'lab/{page}/README.md').partition('<!-- begin')
        rows = [line for line in rows.split('\n| ') if line.startswith(tuple(begins))]
        assert len(rows) >= len(begins) and words in text, words
        stored = decimals(' '.join(rows)) + [row.split(' | ')[2] for row in rows]       # its line
        for figure in decimals(words):
            digits = len(figure.partition('.')[2])
            assert any(f'{float(one):.{digits}f}' == figure for one in stored if one[0].isdigit()), words
    runs, counts = Records('best', REAL).runs('compositions'), counted(REAL, 0.05, POSITION)
    timed = [over(runs, name, 'sd 3', CLOCK)(range(runs.size)) for name in ('look up, else 3', 'hedge 3')]
    judged = [tuned_over(counts, at_any_length(counts.names, name, 0.05), ['ar'], MODELLED)(numpy.arange(24))
              for name in ('ratio 0.5', 'payoff')]
    computed = [('look-up first {:.2f}, `hedge` {:.2f}', timed), ('constant threshold: {:.2f}', judged[:1]),
                ('`payoff` has {:.1f}', judged[1:])]
    words = [form.format(*figures) for form, figures in computed]
    assert all(one in text for one in words), words
    tied = decimals(' '.join([*words, *(words for words, *_ in SHOWN)]))
    assert {*decimals(text)} - {*tied} <= {'0.8', '0.24', '0.14', '2.2', '0.1', *map(str, COSTS)}


def test_readme_from_python(capsys, monkeypatch):
    """The lines that the README shows run as they stand, and print a text, its cycles and a figure."""
    shown, = [block for block in fences('README.md', 'python') if block.startswith('from specmini')]
    monkeypatch.chdir(HOME)
    names = {}
    exec(shown, names)
    printed = capsys.readouterr().out
    assert names['text'] in printed
    assert names['engine'].tokenizer.decode(verify.tokens_of(names['cycles'])) == names['text']
    assert float(printed.splitlines()[-1]) > 1


def test_worked_example_adds_up():
    """The README's table of four words is the rule that `verify` computes, and its last column is p."""
    rows = re.findall(r'^\| (mat|rug|sofa|dog) \|(.*)\|$', text_of('README.md'), re.M)
    columns = torch.tensor([[float(cell) for cell in cells.split('|')] for _, cells in rows]).T
    q, p, kept, chance, more, rest, replaced, together = columns
    assert torch.allclose(kept, torch.minimum(p, q))
    assert torch.allclose(chance, (p / q).clamp(max=1), atol=0.005)
    assert torch.allclose(more, p - kept, atol=1e-6)
    assert torch.allclose(rest, verify.residual(p, q), atol=1e-6)
    assert torch.allclose(replaced, (1 - overlap(p, q)) * rest, atol=1e-6)
    assert torch.allclose(together, kept + replaced) and torch.allclose(together, p)
    assert torch.equal(verify.residual(p, p), p)        # where nothing is left: p, and not 0 / 0


# ----------------------------------------------------------------------------------------- lab/steps

@pytest.mark.parametrize('step', range(6))
def test_steps_run(step, capsys):
    """The greedy ones write one text; from p2 on in fewer passes than tokens."""
    sys.modules.pop(f'lab.steps.p{step}', None)         # else runpy warns
    runpy.run_module(f'lab.steps.p{step}', run_name='__main__')
    text, counts = capsys.readouterr().out.rsplit('\n', 2)[:2]
    passes = int(re.search(r'(\d+) target passes', counts)[1])
    assert passes == 80 if step < 2 else passes < 40
    if step < 3:
        assert 'Mia met Eva the fox there.' in text


@pytest.mark.parametrize('proposer, rule, lossless',
                         [('p3', 'p3', True), ('p4', 'p3', True), ('p4', 'p5', False)])
def test_law_of_steps(proposer, rule, lossless, monkeypatch):
    """p3 and p4 have the target's law whatever the draft is, p5 has not: every outcome of every draw."""
    monkeypatch.setattr('lab.steps.p3.GAMMA', 1)
    monkeypatch.setattr('lab.steps.p4.LONGEST', 1)
    target, draft = Table(1, 3), Table(2, 3)
    p3, proposer, rule = [importlib.import_module(f'lab.steps.{name}') for name in ('p3', proposer, rule)]

    def run(s, method):
        with monkeypatch.context() as patch:
            patch.setattr(torch, 'rand', lambda *_: Coin(s.draw))
            patch.setattr(torch, 'multinomial', lambda p, _: s.draw(p))
            ids, _ = p3.generate(target, draft, [0], 2, proposer.propose, rule.accept)
        return ids[1:], None
    gap = variation(enumerate_law(target, draft, None, 2, run=run), exact_law(target, 2, temperature=1.0))
    assert gap < 1e-9 if lossless else gap > 0.01
