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
        program = program.replace('lab.parallel', 'specmini.py')        # its flags are the same
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


def test_no_page_is_a_wall():
    """The README has 222 lines, other pages 150, the scoreboard apart; all of 130 columns."""
    for page in PAGES:
        lines = text_of(page).partition('## The scoreboard')[0].splitlines()
        assert len(lines) <= (222 if page == 'README.md' else 150), page
        narrow = [line for line in lines if not line.startswith(('|', '![', '<img', '$ python '))]
        assert all(len(line) <= 130 for line in narrow), page


REAL = 'qwen-1.5b+0.5b | '
TIED = [                # words of the README, the page whose rows have their figures, how these rows begin
    ('1.23 (1.08 to 1.36); 1.31', 'best/README', REAL + 'sd 3 ', REAL + 'payoff'),
    ('1.25; mathematics 1.49', 'best/README', REAL + 'look up, else 3'),
    ('1.18; summaries 1.46', 'best/README', REAL + 'look up 3'),
    ('1.87 (1.73 to 2.00)', 'best/README', 'embedded | payoff'),
    ('1.29 (1.15 to 1.39)', 'SPEED', "`sd`, gamma 5, over llama.cpp's speculative"),
    ('2.95 (2.68 to 3.25)', 'SPEED', '`sd`, gamma 3, over the same; over its assisted'),
    ('0.74 (0.67 to 0.87)', 'SPEED', "`ar` over llama.cpp's plain"),
    ('1.73 to 2.21', 'SPEED', "`sd` over transformers' assisted generation (same draft"),
    ('1.10; 0.91 (cheap 4.30; 1.37)', 'cmasd/README', 'default (lossy)', 'default over tuned'),
    ('AUROC 0.94 (0.92 to 0.95) | yes', 'cmasd/README', 'AUROC of C for'),
    ('1.05 to 1.15 | sampled 1.18 (1.13 to 1.26); greedy 0.86', 'ecsv/README', 'length: ecsv-lite over a'),
    ('2.5 to 3; 1.50 to 1.69 | 1.12; 0.93 (cheap 3.28; 1.05)', 'via/README', 'over plain', 'over `sd`'),
    ('0.036 | better -0.04; on harder tasks -0.10 | no', 'specguard/README', 'right answers over sd',
     'math-hard: right'),
    ('1.12 | embedded 0.68; better, cheap 1.82', 'specguard/README', 'speed over best sd'),
    ('1.82 (1.03 to 2.42), 77.4 %', 'best/README', REAL + 'specguard 4, k = 1'),
    ('SmolLM2 1.25 (1.16 to 1.34); again 1.19 | no', 'sparse/README', 'one pass after', '16 bits: one'),
    ('embedded -0.68 (-0.80 to -0.52) | no', 'sparse/README', 'look-up: right less dense')]


def decimals(text):
    return re.findall(r'(?<![\w.])-?\d+\.\d+(?![\w.]*[A-Za-z])', text)


def test_figures_of_the_readme_are_stored():
    """Each figure of sections 4 and 6 stands, rounded, in a row that they name, and so does its verdict.

    The costs of a draft pass that they are at are left out.
    """
    text = text_of('README.md')
    text = ''.join(text.partition(f'## {n}. ')[2].partition('\n## ')[0] for n in (4, 6))
    for words, page, *begins in TIED:
        rows = text_of(f'lab/{page}.md').split('\n| ')
        rows = [line for line in rows if line.startswith(tuple(begins))]
        assert len(rows) >= len(begins) and words in text, words
        stored = decimals(' '.join(rows))
        for figure in decimals(words):
            digits = len(figure.partition('.')[2])
            assert any(f'{float(one):.{digits}f}' == figure for one in stored), words
        verdicts = ' '.join(rows)
        assert not words.endswith('| no') or 'FAILS' in verdicts and 'HOLDS' not in verdicts, words
        assert not words.endswith('| yes') or 'HOLDS' in verdicts and 'FAILS' not in verdicts, words
    assert {*decimals(text)} - {*decimals(' '.join(words for words, *_ in TIED))} == {'0.32', '0.05'}


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
    assert torch.allclose(replaced, (1 - kept.sum()) * rest, atol=1e-6)
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
