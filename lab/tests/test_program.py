"""The program: its flags, what it prints, traces and grades, methods of one's own, and how it ends."""
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import lab.baselines    # noqa: F401, enters the baselines in METHODS
import specmini
import verify
from lab.tests.helpers import (EMBEDDED, HOME, LEARNED, RANGES, case, interrupt, json_lines,
                               program, put, refused, refuses, reported, subprogram, template_of, tiny,
                               tiny_pair)
from lab.toys import fresh
from model import BadInput, encode, fingerprint, knobs_of, load, write_calibration
from verify import METHODS, Exact

OWN = """from __future__ import annotations
from dataclasses import dataclass
from model import knob
from verify import METHODS, Exact
Kind = {kind}
@dataclass
class Own(Exact):
    often: Kind = knob({default!r}, 'how often', 1)
METHODS[{name!r}] = Own"""
FAILS = """from verify import METHODS, Exact
METHODS['fails'] = type('Fails', (Exact,), dict({}=lambda *_: {}))"""
NONE = "from verify import METHODS, Exact\nMETHODS['x'] = 3"
BARE = OWN.format(name='keeps', kind='int', default=1).replace('@dataclass\n', '')
ALONE = """import sys, specmini
assert specmini.main(['--prompt', 'hello']) == 2
sys.exit(specmini.main(sys.argv[1:]))"""


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """The flags of a run on two random checkpoints, the target with all sections of calibration.json."""
    flags = tiny_pair(tmp_path_factory.mktemp('pair'))
    target = tiny(flags[1], 0, dict(num_hidden_layers=4))
    sections = dict(mask=dict(skip=[2, 3]), signals=RANGES, sparse=LEARNED | dict(experts=[[]] * 4))
    for name, section in sections.items():
        write_calibration(target, name, section)
    return flags


def table_in(printed):
    """{method: {head: cell}} of the table that a run printed; under '' whether the text is lossless."""
    head, *lines = re.search(r'^ *method .*\n(?:.* (?:lossless|LOSSY)\n)+', printed, re.M)[0].splitlines()
    heads = [*re.finditer(r'\S+( \S+)*', head)][1:]                     # columns end where their heads end
    rows = {}
    for name, line in [(line.split('  ')[0], line) for line in lines]:
        ends = [line.index(name) + len(name), *(head.end() for head in heads), None]
        cells = [line[a:b].strip() for a, b in zip(ends, ends[1:])]
        rows[name] = dict(zip([head[0] for head in heads] + [''], cells))
    return rows


@pytest.mark.parametrize('flags, named', [
    ('--max-new 0', 'max_new is 0; expected a whole number 1 or more'), ('--max-new many', '--max-new'),
    ('--top-p 0', 'top_p is 0.0; expected a number 1e-09 to 1'), ('--temperature nan', 'temperature is nan'),
    ('--device tpu', "device is 'tpu'; expected a text auto, cpu, cuda"), ('--prompt', '--prompt'),
    ('--prompt=', 'prompt 1'), ('--prompt \udcff', 'a prompt'), ('--prompt x --prompts y', '--prompts'),
    ('--prompts lab', '--prompts lab'), ('--prompts absent.jsonl', 'absent.jsonl'),
    ('--target no/such', 'no/such: no such folder'), ('--promt x', 'did you mean --prompt?'),
    ('--frob', 'expected one of --chat, '), ('--method magic', 'expected one of ar, '),
    ('--import no.py', 'no.py'), ('--import lab', '--import lab'), ('--sparse x', 'x'),
    ('--prompt --- --prompt x', '--prompt="-..."'), ('--method "sd temperature=1"', '--temperature'),
    ('--set keep=0.7', '--method "via keep=0.7"'), ('--temp 1', 'did you mean --temperature?'),
    ('--top-k 2147483648', 'top_k is 2147483648; expected a whole number 0 or more, 1e+09 at most'),
    ('--list payof', 'did you mean payoff?'), ('--method "sd gama=3"', 'did you mean gamma?'),
    ('--method ar --gamma 3', '--gamma: ar has no such knob'),
    ('--method "via slim_bonus=' + '[' * 99999 + '"', 'slim_bonus is'), ('--method "sd x"', 'sd x: expected'),
    ('--method "sd gamma=3 gamma=4"', 'gamma=3 gamma=4'), ('--compare ""', 'method '),
    ('--compare sd gamma=2', 'gamma=2: expected settings in quotes'),
    ('--gamma x', "gamma is 'x'; expected a whole number 0 or more"),
    ('--method "cmasd lam_entropy=0 lam_margin=0 lam_softmax=0"', 'lam_entropy'),
    ('--method "ecsv branches=65"', 'branches is 65'), ('--sparse rho=2', 'rho is 2.0'),
    ('--method "ecsv-spot by=chance"', "by is 'chance'; expected a text disagreement, entropy"),
    ('--method "via slim_bonus=2"', 'expected true or false'),
    ('--method "specguard tau=nan"', 'tau is nan'),
    *[(f'--method {name} {source}', '--draft DIR, without --lookup')
      for name in ('cmasd', 'ecsv', 'specguard') for source in ('--draft none', '--lookup')],
    ('--target MODELS/draft --sparse ffn_quantile=0.5', 'python train_mask.py --anchors --target'),
    ('--target MODELS/draft --draft MODELS/draft --method via', 'python train_mask.py --target')])
def test_flags_that_do_not_fit(flags, named, capsys):
    prompt = () if '--prompts' in flags and '--prompt x' not in flags else ('--prompt', 'x')
    words = [word.replace('MODELS', str(EMBEDDED)) for word in shlex.split(flags)]  # a path may have a space
    refused(capsys, named, *prompt, *words)


def test_list_names_every_method_and_its_knobs(capsys):
    assert [line.split()[0] for line in program(capsys, '--list')[1].splitlines()] == [*METHODS]
    for name, kind in METHODS.items():
        _, listed, _ = program(capsys, '--list', name)
        assert re.findall('^  ([a-z]\\w*) ', listed, re.MULTILINE) == [*knobs_of(kind)], name
        assert ('Lossless by default' in listed) == kind().lossless
    assert re.search('^  branches +4 +1 to 64 .*vote', program(capsys, '--list', 'ecsv')[1], re.MULTILINE)


@pytest.mark.parametrize('method', ['ar', 'sd', 'cmasd'])
def test_json_and_text_are_one_run(method, pair, capsys):
    """They agree on tokens, passes, labels and verdicts; the JSON names the run and why the text ended."""
    flags = *pair, '--method', method, '--temperature', 1, '--seed', 3
    status, text, _ = program(capsys, *flags)
    report = reported(capsys, *flags, '--show')
    cycles = report.pop('cycles')
    assert report.keys() == reported(capsys, *flags).keys()
    stats, tokens, n = report['stats'], report['tokens'], len(report['tokens'])
    assert (status, report['text']) == (0, text[:-1])
    assert (report['method'], report['seed'], report['prompt_tokens']) == (method, 3, len('hello'))
    assert (report['finish'], n) == (('eos', n) if tokens[-1] == 256 else ('length', 20))
    assert [token for cycle in cycles for token in cycle['tokens']] == tokens
    labels = Counter(label for cycle in cycles for label in cycle['labels'])
    passes = sum(cycle['passes']['target/full'][0] for cycle in cycles)
    assert (stats['labels'], stats['passes']['target/full'], labels.total()) == (labels, passes, n)
    assert stats['positions']['target/full'] == stats['drafted'] + stats['cycles']
    assert stats['block_efficiency'] == n / passes
    assert stats['tokens_per_second'] == pytest.approx(n / stats['seconds'])
    judged = [row for cycle in cycles for row in cycle['judged']]
    kept = sum(row['kept'] for row in judged)
    assert kept == labels['draft'] == stats['accepted'] <= len(judged) == stats['judged'] <= stats['drafted']
    assert stats['acceptance_rate'] == (kept / len(judged) if judged else None)
    if method == 'sd':
        assert all(row['chance'] == min(1, row['p'] / row['q']) for row in judged)


def test_half_a_character_is_held_back():
    """Until the rest of it comes; where a text ends within a character, these bytes are not shown."""
    words = ['<unk>', *[f'<0x{byte:02X}>' for byte in range(256)], 'C']
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    cut = [1 + byte for byte in 'A\u20ac\u20ac'.encode()[:6]]
    for ids, pieces in (cut, ['A', '', '', '\u20ac', '', '']), ([0x42, 0xE3, 257], ['A', '', '\ufffdC']):
        assert [*map(specmini.TextStream(tokenizer, [1]).add, ids)] == pieces
    line = [1 + byte for byte in 'a\u3400\u3401\u3402C'.encode()]      # any four of its ids cut a character
    assert ''.join(map(specmini.TextStream(tokenizer, line[:7]).add, line[7:])) == '\u3402C'


@pytest.mark.parametrize('decoder', [decoders.Metaspace(), decoders.Sequence(
    [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])])
def test_the_space_after_the_prompt_stays(decoder, tmp_path, capsys):
    """Of a decoder that drops a text's first space: in what is printed, in the JSON, and from Python."""
    tokenizer = Tokenizer(models.WordLevel({f'\u2581{word}': i for i, word in enumerate('abcdefgh')}))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoder
    folder = tiny(tmp_path, tokenizer=tokenizer, vocab=8, eos_token_id=None)
    flags = '--target', folder, '--prompt', 'a b', '--max-new', 5
    found = reported(capsys, *flags)
    text = ''.join(f' {"abcdefgh"[token]}' for token in found['tokens'])
    generated, _ = specmini.Engine(folder, max_new=5).generate('a b', 'sd')
    assert [found['text'], program(capsys, *flags)[1], generated] == [text, text + '\n', text]
    tokenizer.add_special_tokens(['<s>'])               # it is not shown, and takes no space with it
    assert [*map(specmini.TextStream(tokenizer, [0]).add, (1, 8, 2))] == [' b', '', ' c']


def test_streamed_pieces_make_the_text(pair):
    """Settings are of one text alone; the bytes of a character that is cut are in no piece."""
    engine = specmini.Engine(pair[1], pair[3], max_new=5)
    halves = 0
    for n in range(1, 16):
        pieces, cycles = zip(*engine.stream('hello', 'sd', max_new=n, temperature=1.0, seed=n))
        ids = verify.tokens_of(cycles)
        whole = engine.tokenizer.decode(ids)
        assert ''.join(pieces) == whole.rstrip('\ufffd') and len(ids) <= n
        halves += whole.endswith('\ufffd')
    assert halves and engine.max_new == 5
    ids = engine.tokenizer.encode('hello').ids
    assert engine.generate(ids, 'sd')[0] == engine.generate('hello', Exact())[0]
    refuses('magic', lambda: engine.generate('x', 'sd', magic=1))
    refuses('max_new is 0', lambda: engine.generate('x', 'sd', max_new=0))
    for wrong in 'magic', int, 7:
        refuses('method', engine.generate, 'x', wrong)


def test_marks_stay_beside_the_colours(pair, capsys, monkeypatch):
    """With NO_COLOR or on a dumb terminal there are marks alone. What ASCII lacks is a question mark."""
    flags = *pair, '--ignore-eos', '--show', '--temperature', 1
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, 'isatty', lambda: True)
        terminal.setenv('NO_COLOR', '1')
        terminal.setenv('TERM', 'xterm')
        _, plain, _ = program(capsys, *flags)
        terminal.delenv('NO_COLOR')
        _, colored, _ = program(capsys, *flags)
        terminal.setenv('TERM', 'dumb')
        assert program(capsys, *flags)[1] == plain
    assert '\033' not in plain and re.sub(r'\033\[[\d;]+m', '', colored) == plain
    for marked in r'9;2m\[-.+?-\]', r'31m\[\+.+?\+\]', r'2m\(.+?\)':
        assert re.search(rf'\033\[{marked}\033\[0m', colored), marked
    poor = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'stdout', poor)
    assert specmini.main([*map(str, pair[:5]), 'h\u00e9', '--max-new', '3', '--show']) == 0
    assert b'[-?-]' in poor.detach().getvalue()


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no device here is full')
def test_streams_that_take_no_more(pair, capsys, monkeypatch):
    """A full disk is told in one line; a reader that has gone (`| head`) ends in silence."""
    flags = [*map(str, pair[:6]), '--max-new', '2']
    reads, writes = os.pipe()
    os.close(reads)
    for stream, status in (open('/dev/full', 'w'), 2), (os.fdopen(writes, 'w'), 0), (None, 0):
        monkeypatch.setattr(sys, 'stdout', stream)
        assert specmini.main(flags) == status
        sys.stdout.close()                              # as at exit: what could not be written is forgotten
    assert capsys.readouterr().err.count('No space') == 1


def test_a_comparison_names_the_first_difference(pair, capsys, monkeypatch):
    """Position and the gap of the logits, of a lossless greedy text that is not that of ar."""
    flags = *pair, '--ignore-eos', '--compare', 'sd', 'cmasd tau_base=0 gamma_tau=0'
    assert 'not the tokens of ar' not in program(capsys, *flags)[1]
    monkeypatch.setattr(METHODS['cmasd'], 'lossless', True)           # which it is not
    told = program(capsys, *flags)[1]
    found = reported(capsys, *flags[:-3], '--method', flags[-1])['tokens']
    wanted = reported(capsys, *flags[:-3], '--method', 'ar')['tokens']
    i = next(i for i in range(20) if found[i] != wanted[i])
    model, tokenizer, _ = load(pair[1])
    logits = fresh(model, tokenizer.encode('hello').ids + wanted[:i], 1)[0]
    gap = f'{float(logits[wanted[i]] - logits[found[i]]):.2g}'
    assert i and f'not the tokens of ar, first another at token {i}, where the logit of ar is {gap} ' in told
    assert 'not the tokens of ar' not in program(capsys, *flags, '--temperature', 1)[1]


def test_compare_takes_settings(pair, capsys):
    """A method's name and knobs, named as written; --gamma is for those that do not name it."""
    made = specmini.parse(['--prompt', 'x', '--compare', 'sd gamma=8', 'via', 'via keep=0.7  gamma=3',
                           ' specguard delimiter=. tau=0.5 ', '--gamma', '2']).methods
    assert list(made) == ['ar', 'sd gamma=8', 'via', 'via keep=0.7  gamma=3', 'specguard delimiter=. tau=0.5']
    _, sd, via, own, steps = made.values()
    assert (sd.gamma, via.gamma, via.keep, own.gamma, own.keep) == (8, 2, 0.5, 3, 0.7)
    assert (steps.delimiter, steps.tau, steps.gamma) == ('.', 0.5, 2)
    layers = specmini.make_methods(['via-layers layers=3 4 5 keep=0.9'])['via-layers layers=3 4 5 keep=0.9']
    assert (layers.layers, layers.keep) == ('3 4 5', 0.9)
    status, out, _ = program(capsys, *pair, '--ignore-eos', '--compare', 'sd gamma=1', 'sd gamma=6', 'ar')
    rows = table_in(out)
    assert status == 0 and list(rows) == ['ar', 'sd gamma=1', 'sd gamma=6']
    assert reported(capsys, *pair, '--method', 'sd gamma=1')['method'] == 'sd gamma=1'


@pytest.mark.parametrize('flags, told', [
    ('--gamma 0', 'sd: nothing was drafted (gamma 0'), ('--max-new 1', 'sd: nothing was drafted (gamma 4'),
    ('--draft none', '--draft none'), ('', ''), ('--method ar', ''),
    ('--prompts TOOLS', 'the tools of rows are not used'),
    ('--target WINDOW', 'the context is the sliding window of 40 tokens'),
    ('--target PENALTY', 'generation_config.json: repetition_penalty, stop_strings, new_one')])
def test_notes(flags, told, pair, tmp_path, capsys):
    """Below the table of a run stands what it does not tell."""
    asked = dict(repetition_penalty=1.1, min_length=0, suppress_tokens=[], temperature=0.7, num_beams=1,
                 stop_strings=['x'], forced_eos_token_id=None, watermarking_config={}, new_one=3)
    penalty = tiny(tmp_path / 'home', files={'generation_config.json': asked})
    put(tmp_path, {'rows.jsonl': json_lines([dict(prompt='hello', tools=[dict(name='f')])])})
    window = tiny(tmp_path / 'window', model_type='mistral', sliding_window=40)
    for word, file in dict(TOOLS=tmp_path / 'rows.jsonl', PENALTY=penalty, WINDOW=window).items():
        flags = flags.replace(word, str(file))
    usual = pair if '--prompts' not in flags else [*pair[:4], *pair[6:]]
    status, _, err = program(capsys, *usual, '--ignore-eos', *flags.split())
    notes = err.partition('lossless\n')[2]
    assert status == 0 and told in notes and bool(told) == bool(notes), err


@pytest.mark.parametrize('setting', [
    case('via', 'via escalate=0.1'), case('sparse', 'sparse rho=0 dense_below=4 block=2 locals=1')])
def test_audit_is_what_a_fresh_target_says(setting, pair, capsys, monkeypatch):
    """p of each token, in parts, at no cost to the passes; lossless and sampled texts have none."""
    flags = *pair, '--ignore-eos', '--method', setting
    unparted = reported(capsys, *flags)
    monkeypatch.setattr(specmini, 'AUDITED', 3)
    found = reported(capsys, *flags)
    model, tokenizer, _ = load(pair[1])
    tokens = found['tokens']
    rows = fresh(model, tokenizer.encode('hello').ids + tokens[:-1], len(tokens))
    wrong = [token != best for token, best in zip(tokens, rows.argmax(1).tolist())]
    for stats in found['stats'], unparted['stats']:
        assert stats['audited_wrong'] == pytest.approx(sum(wrong) / len(wrong)) and any(wrong)
        assert stats['passes'] == found['stats']['passes']
    for more in ((), ('--method', 'via', '--temperature', 1)):
        assert reported(capsys, *pair, *more)['stats']['audited_wrong'] is None


@pytest.fixture
def answered(pair, tmp_path, capsys):
    """Flags of a run on three rows: the target writes the first one's answer, not the second's."""
    file = tmp_path / 'p.jsonl'
    turns = dict(turns=['ccc', 'd'])
    rows = [turns | dict(question='bb', prompt='a'), turns | dict(question='bb'), turns]
    file.write_text('\ufeff\n' + json_lines(rows) + '\n')               # a mark, empty lines
    flags = *pair[:4], '--prompts', file, '--max-new', 3, '--ignore-eos'
    found = [json.loads(line) for line in program(capsys, *flags, '--json')[1].splitlines()]
    assert [report['prompt_tokens'] for report in found] == [1, 2, 3]   # of prompt, else question, else turns
    rows[0]['answer'], rows[1]['answer'] = found[0]['text'], found[1]['text'] + 'no'
    file.write_text(json_lines(rows))
    return flags


@pytest.mark.parametrize('answer, text', [
    ('He pays 600+634\n#### 1,234', 'so 5, then 1,234.'), (20, 'a range of 10-20'), (-3, '4 - 7 = -3'),
    ('Paris, France', ' Paris, France\n'), (7, 'Answer: 7')])
def test_grades(answer, text):
    """By the last number where the answer is one (GSM8K's is after ####), else by the whole text."""
    grades = [specmini.grade(dict(answer=answer), written) for written in (text, 'y', '1234 is not 7000')]
    assert grades == [True, False, False]


def test_answers_are_graded(answered, capsys, monkeypatch):
    """Where they are; a run that is interrupted has its figures of what there is."""
    status, out, _ = program(capsys, *answered, '--compare', 'sd')
    assert (status, [row['right'] for row in table_in(out).values()]) == (0, ['50.0%', '50.0%'])
    _, out, err = program(capsys, *answered, '--compare', 'sd', '--json')
    assert len([*map(json.loads, out.splitlines())]) == 18 and len(table_in(err)) == 2
    interrupt(monkeypatch, Exact, 'accept', 8)                          # three of each row
    status, out, err = program(capsys, *answered, '--draft', 'none', '--json', '--show')
    found = [json.loads(line) for line in out.splitlines()]
    assert [report.get('right') for report in found] == [True, False, None]
    assert [report['finish'] for report in found] == ['length', 'length', 'interrupted']
    assert [len(report['cycles']) for report in found] == [3, 3, 1]
    assert (status, table_in(err)['sd']['tokens'], table_in(err)['sd']['right']) == (130, '7', '50.0%')


@pytest.mark.parametrize('where, name, n, flags', [
    (specmini, 'load', 1, ''), (specmini, 'read_prompt', 1, ''), (Exact, 'accept', 1, ''),
    (specmini, 'read_prompt', 2, ''), (specmini, 'report', 2, ''),
    (specmini, 'audit', 2, '--method cmasd')])
def test_an_interrupt(where, name, n, flags, answered, capsys, monkeypatch):
    """Before the first token nothing is written; while or after the second text, the first one is whole."""
    interrupt(monkeypatch, where, name, n)
    status, out, err = program(capsys, *answered, '--json', *flags.split())
    assert (status, 'method' in err) == (130, n == 2)
    if n == 2:
        assert json.loads(out.splitlines()[0])['finish'] == 'length' and len(table_in(err)) == 1


def test_messages_go_through_the_chat_template(pair, tmp_path, capsys):
    """Of rows and from Python; a text does with --chat. A row may have settings of the template."""
    template = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}{{ tools }}'
    folder = tiny(tmp_path / 'chat', files={'tokenizer_config.json': dict(chat_template=template)})
    messages = [dict(role='system', content='s'), dict(role='user', content='hi')]
    told = dict(messages=messages, tools=[{}], chat_template_kwargs=dict(mood='!'))
    put(tmp_path, {'p.jsonl': json_lines([dict(prompt='hi'), dict(messages=messages), told])})
    flags = '--target', folder, '--draft', 'none', '--prompts', tmp_path / 'p.jsonl', '--max-new', 1, '--json'
    lengths = [len(text) for text in ('<user>hiNone', '<system>s<user>hiNone', '<system>s<user>hi!None')]
    for more, first in ((), 2), (('--chat',), lengths[0]):
        found = [json.loads(line) for line in program(capsys, *flags, *more)[1].splitlines()]
        assert [report['prompt_tokens'] for report in found] == [first, *lengths[1:]]
    engine = specmini.Engine(folder, 'none', max_new=4)
    ids = encode(engine.tokenizer, '<system>s<user>hiNone')
    assert engine.ids_of(messages) == ids and engine.generate(messages)[0] == engine.generate(ids)[0]
    put(tmp_path, {'p.jsonl': json_lines([dict(prompt='hi'), told | dict(chat_template_kwargs=7)])})
    refused(capsys, 'prompt 2', *flags)


def test_rows_as_data_sets_have_them(pair, tmp_path, capsys):
    """An empty prompt, of which the tokenizer makes a token; messages as JSON in a text; null."""
    files = {'chat_template.jinja': '{{ messages[0].content }}'}
    folder = tiny(tmp_path / 'chat', tokenizer=template_of('<eos>', 256), files=files)
    rows = [dict(prompt=''), dict(prompt=None, messages=json.dumps([dict(role='user', content='hi')]))]
    put(tmp_path, {'p.jsonl': json_lines(rows)})
    flags = '--target', folder, '--draft', 'none', '--max-new', 1, '--json'
    _, out, err = program(capsys, *flags, '--prompts', tmp_path / 'p.jsonl')
    assert [json.loads(line)['prompt_tokens'] for line in out.splitlines()] == [1, 2], err
    assert reported(capsys, *flags, '--prompt', '')['prompt_tokens'] == 1
    parts = dict(role='user', content=[dict(type='text', text='hi')])
    for wrong, told in (dict(messages='hi'), 'line 2'), (dict(messages=[parts]), 'prompt 2: --chat'):
        put(tmp_path, {'p.jsonl': json_lines([dict(prompt='fine'), wrong])})
        refused(capsys, told, *flags, '--prompts', tmp_path / 'p.jsonl')


def test_numbers_of_numpy_and_a_cast_around(pair):
    """Of a sweep, as settings, knobs and ids; the autocast of a notebook does not reach a pass."""
    import numpy
    engine = specmini.Engine(pair[1], pair[3], max_new=numpy.int64(6), temperature=numpy.float32(0.5))
    ids = [int(i) for i in b'hello']
    wanted, _ = engine.generate(ids, Exact(2), seed=3)
    found, _ = engine.generate(list(numpy.array(ids)), Exact(numpy.int64(2)), seed=numpy.array(3))
    assert type(engine.temperature) is float and found == wanted
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert engine.generate(ids, Exact(2), seed=3)[0] == wanted


def test_started_through_a_link_and_without_stderr(tmp_path):
    """The models are beside the file itself; two prompts make a bar, which a closed stderr cannot take."""
    (tmp_path / 'run.py').symlink_to(HOME / 'specmini.py')
    put(tmp_path, {'p.jsonl': json_lines([dict(prompt='One evening')] * 2)})
    command = f'{sys.executable} run.py --prompts p.jsonl --max-new 3 2>&-'
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count('\n') == 2


@pytest.mark.parametrize('mass', [torch.nan, 0, torch.inf])
def test_a_replacement_of_no_mass_is_told(mass, pair, monkeypatch):
    """By its rule and position, where 0 / 0 would have written the last id."""
    monkeypatch.setattr(Exact, 'chance', lambda *_: 0.0)
    monkeypatch.setattr(Exact, 'recovery_distribution', lambda self, p, q: torch.full_like(p, mass))
    engine = specmini.Engine(pair[1], pair[3], max_new=4)
    refuses(f'a mass of {mass} in the place of guess 1 after 5 tokens', engine.generate, 'hello', Exact(2))


@pytest.mark.parametrize('ids', [
    None, 7, b'One', [], [-1], [257], [1.0], [True], ['1'], [[1]], torch.tensor([1])], ids=repr)
def test_ids_that_are_none(ids, pair):
    """From Python; a list of ids of the target's vocabulary is a prompt."""
    engine = specmini.Engine(pair[1], pair[3], max_new=1)
    refuses('prompt 1', engine.generate, ids, 'sd')
    assert engine.generate([0, 256], 'sd')[1]


@pytest.mark.parametrize('texts, kept', [(1, 0), (2 + 1, 0), (2 + 4, 1), (2 + 6 + 3, 4)])
def test_an_interrupted_comparison_keeps_what_is_finished(texts, kept, answered, capsys, monkeypatch):
    """Ctrl-C after so many texts: two that warm up, then two of each row, in three rounds; `kept` pairs."""
    real, found = specmini.table, []
    monkeypatch.setattr(specmini, 'table', lambda texts: found.extend(texts) or real(texts))
    interrupt(monkeypatch, verify.Method, 'learn', 3 * texts)           # plain decoding takes three cycles
    status, out, _ = program(capsys, *answered, '--compare', 'sd', '--draft', 'none')
    assert (status, bool(out)) == (130, bool(kept))
    assert Counter(text.name for text in found) == Counter(dict(ar=kept, sd=kept))


@pytest.mark.parametrize('content, named', [
    case('no-row', '', '--prompts'), case('no-json', 'x', 'line 1: expected one JSON object a line'),
    *[case(f'no-object-{odd[:4]}', '{"prompt": "a"}\n' + odd, 'line 2: expected one JSON object a line')
      for odd in ('[1]', '"a text"', 'null', '7', '[\n{"prompt": "a"}]', '{"prompt":\n"a"}')],
    case('no-prompt', '{"prompt": "a"}\n{"x": 1}', 'line 2'), case('no-turn', '{"turns": []}', 'line 1'),
    case('no-text', '{"prompt": 7}', 'line 1'), case('empty', '{"turns": [""]}', 'prompt 1'),
    case('half-a-character', '{"prompt": "a"}\n\n{"prompt": "\\ud800"}', 'prompt 2'),
    case('deep', '[' * 99999, 'line 1'),
    case('no-role', '{"messages": ["x"]}', 'messages'), case('no-list', '{"messages": 3}', 'messages'),
    case('a-long-number', '1' * 5000, 'line 1'), case('no-utf-8', b'\xff\xfe', '--prompts')])
def test_bad_prompt_files(content, named, pair, capsys, tmp_path):
    file = tmp_path / 'p.jsonl'
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(capsys, named, *pair[:4], '--prompts', file)


def test_prompts_of_standard_input(pair, capsys):
    read, write = os.pipe()
    os.write(write, b'{"prompt": "hello"}\n{"prompt": "you"}\n')
    os.close(write)
    before = os.dup(0)
    try:
        os.dup2(read, 0)
        _, out, err = program(capsys, *pair[:4], '--prompts', '-', '--max-new', 2, '--json')
    finally:
        os.dup2(before, 0)
    assert [json.loads(line)['prompt_tokens'] for line in out.splitlines()] == [5, 3], err


def test_memory_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(specmini, 'read_rows', Mock(side_effect=MemoryError))
    refused(capsys, 'not enough memory', '--prompt', 'x')


@pytest.mark.parametrize('prompt, max_new, length', [('y' * 63, 60, 1), ('x' * 54, 10, 10)])
def test_a_context_that_is_full_ends_a_text(prompt, max_new, length, pair, capsys):
    """The target's; a line says that the text was cut, if it was (after x it ends)."""
    flags = *pair[:4], '--prompt', prompt, '--max-new', max_new
    assert len(reported(capsys, *flags, '--ignore-eos')['tokens']) == length
    assert ('1 of 1 texts cut at --max-new' in program(capsys, *flags)[2]) == ('y' in prompt)
    assert reported(capsys, *flags)['finish'] == ('length' if 'y' in prompt else 'eos')
    refused(capsys, 'the target takes 1 to 63', *pair[:4], '--prompt', 'x' * 64)


@pytest.mark.parametrize('prompt', ['y' * 5, 'y' * 16])
@pytest.mark.parametrize('method', ['sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse'])
def test_where_the_drafts_context_ends_the_target_writes_on(prompt, method, pair, capsys, tmp_path):
    """As long a text as without a draft, by a lossless method the same; the draft reads up to there."""
    draft = tiny(tmp_path / 'draft', 1, max_position_embeddings=16)
    target = shutil.copytree(pair[1], tmp_path / 'target')
    write_calibration(target, 'signals', RANGES | dict(draft=fingerprint(draft)))
    flags = '--target', target, '--draft', draft, '--prompt', prompt, '--max-new', 20, '--ignore-eos'
    told = 'the target wrote on alone'
    assert told in program(capsys, *flags, '--method', method, '--show')[2]
    written = reported(capsys, *flags, '--method', method)
    plain = reported(capsys, *flags, '--method', 'ar')
    assert len(written['tokens']) == 20 and (written['tokens'] == plain['tokens'] or not written['lossless'])
    assert told not in program(capsys, *flags, '--method', 'ar')[2]
    engine = specmini.Engine(target, draft, max_new=20, ignore_eos=True)
    ids = engine.tokenizer.encode(prompt).ids
    engine.open([ids])
    engine.write(ids, method)
    assert len(engine.readers['draft'].cache.ids) <= 16


def test_each_text_pays_for_its_prompt():
    """A prompt that was read for an earlier text is read again: its seconds are not those of a cache."""
    engine = specmini.Engine()
    ids = engine.tokenizer.encode('One evening Mia the fox').ids
    engine.open([ids])
    for reader in verify.readers_of(engine.start(ids, Exact())).values():
        reader.log.clear()                              # what is found was read for the second text
    passes = verify.passes_since(engine.start(ids, Exact()), dict(target=0, draft=0))
    assert passes == {'target/full': [1, len(ids) - 1], 'draft/full': [1, len(ids) - 1]}


@pytest.mark.parametrize('name', [case(name, name, slow=name not in (
    'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse', 'rsd')) for name in METHODS])
def test_every_method_runs(name, pair, capsys):
    """Sampling: valid JSON, figures that add up, and --show; or a line says what it needs."""
    flags = *pair[:4], '--prompt', 'ab 1\n', '--method', name, '--max-new', 16, '--temperature', 0.8
    if name == 'rsd':
        refused(capsys, 'a task with a step checker', *flags)
        return
    status, out, err = program(capsys, *flags, '--json')
    assert status == 0, err
    report = json.loads(out, parse_constant=lambda word: pytest.fail(f'{word} is no JSON'))
    assert 1 <= len(report['tokens']) == sum(report['stats']['labels'].values()) <= 16
    assert report['lossless'] == METHODS[name]().lossless
    assert program(capsys, *flags, '--show')[0] == 0


def test_sd_has_other_drafts(pair, capsys):
    """--lookup looks up first, and asks the draft model else. What they write: test_specmini.py."""
    for flags, passes in (
            (('--draft', 'lookup'), {'target/full'}), (('--draft', 'none', '--lookup'), {'target/full'}),
            (('--method', 'draft-verify'), {'target/full', 'target/slim'}),
            ((*pair[2:4], '--lookup'), {'target/full', 'draft/full'})):
        stats = reported(capsys, *pair[:2], *flags, '--prompt', 'aabaab', '--max-new', 20)['stats']
        assert stats['drafted'] and stats['passes'].keys() == passes


def test_settings_of_an_engine(pair, monkeypatch):
    """A setting that is none is told in a line; True is the usual Sparse, and sd the usual method."""
    target, draft = pair[1], pair[3]
    for name, wrong in ('target', 4.0), ('target', None), ('draft', 4.0), ('sparse', 'attn'), ('sparse', 7):
        settings = dict(target=target, draft=draft) | {name: wrong}
        refuses(name, partial(specmini.Engine, **settings))
    assert specmini.Engine(target, draft, sparse=True).sparse == METHODS['sparse']()
    assert specmini.Engine(target, draft, sparse=False).sparse is None
    monkeypatch.chdir(HOME)
    assert specmini.Engine('lab/models/target').draft == str(EMBEDDED / 'draft')
    engine = specmini.Engine(target, draft, max_new=8)
    (text, cycles), (same, _) = engine.generate('hello'), engine.generate('hello', 'sd')
    assert text == same and any(cycle.drafted for cycle in cycles)


def test_a_table_counts_slims_passes_apart(pair, capsys):
    stats = reported(capsys, *pair, '--method', 'via')['stats']['passes']
    row = table_in(program(capsys, *pair, '--method', 'via')[2])['via']
    assert stats['target/slim'] == int(row['slim']) > 0 and stats.get('target/full', 0) == int(row['passes'])
    assert 'slim' not in table_in(program(capsys, *pair)[2])['sd']


def test_a_text_keeps_its_knobs_and_no_vocabulary(pair, tmp_path, capsys, monkeypatch):
    """A subclass of cmasd that judges otherwise explains itself; what methods noted of a text is let go."""
    class Half(METHODS['cmasd']):
        def chance(self, score, i):
            return float(score.table[i].ratio >= 0.5)
    monkeypatch.setitem(METHODS, 'half', Half)
    assert 'C, tau, p/max p' in program(capsys, *pair, '--method', 'half', '--show')[1]
    args = specmini.parse([*map(str, pair), '--compare', 'via', 'ecsv-spot'])
    texts = list(specmini.write_texts(args))
    assert [text.name for text in texts] == ['ar', 'via', 'ecsv-spot']
    for text in texts:
        assert {*vars(text.method)} <= {*knobs_of(type(text.method))}


def test_knobs_of_ones_own(pair, tmp_path, capsys):
    """They are checked; files of one name are several modules, and a knob's type is looked up in its own."""
    files = []
    for name, kind, default in ('one', 'int | None', None), ('two', 'str', 'a'), ('three', 'list[int]', None):
        (tmp_path / name).mkdir()
        put(tmp_path / name, {'m.py': OWN.format(name=name, kind=kind, default=default)})
        files.append(tmp_path / name / 'm.py')
    with patch.dict(METHODS):
        flags = *pair, '--import', files[0], '--import', *files[1:], '--method'
        assert reported(capsys, *flags, 'one often=5')['knobs']['often'] == 5           # entered from now on
        assert reported(capsys, *pair, '--method', 'one')['knobs']['often'] is None
        assert reported(capsys, *pair, '--method', 'two often=5')['knobs']['often'] == '5'
        for wrong, named in ('0', 'often is 0; expected a whole number 1 or more'), ('1.5', "often is '1.5'"):
            refused(capsys, named, *pair, '--method', f'one often={wrong}')
        refused(capsys, 'list[int] is set from Python', *pair, '--method', 'three often=5')


def test_a_syntax_error_of_ones_own(pair, tmp_path, capsys):
    """A line with its file and line, also if that is imported by the file."""
    put(tmp_path, {'own.py': 'x = 1\nif x\n    y', 'other.py': 'import runpy\nrunpy.run_path({!r})'.format(
        str(tmp_path / 'own.py'))})
    for name, content in ('wide.py', 'x = 1'.encode('utf-16')), ('nul.py', b'x = 1\0'):
        put(tmp_path, {name: content})
        refused(capsys, f'{name}, line', *pair, '--import', tmp_path / name)
    for name in ('own.py', 'other.py'):
        line = refused(capsys, "own.py, line 2: expected ':'", *pair, '--import', tmp_path / name)
        assert str(tmp_path / name) in line


@pytest.mark.parametrize('flag', ['--method', '--list'])
@pytest.mark.parametrize('file, name, told', [
    (NONE, 'x', "method 'x' is 3; expected a class of Method"),
    (BARE, 'keeps', 'has knobs; expected @dataclass before its class')])
def test_what_is_no_method(file, name, told, flag, pair, tmp_path, capsys):
    put(tmp_path, {'own.py': file})
    with patch.dict(METHODS):
        refused(capsys, told, *pair, '--import', tmp_path / 'own.py', flag, name)
        assert f'\n  {name} ' in program(capsys, '--list')[1]


@pytest.mark.parametrize('content, ours', [
    ('x = 1\ny = nothing', False), (FAILS.format('chance', "int('no number')"), False),
    (FAILS.format('guess', '[].index(1)'), False), (FAILS.format('accept', '[1, 2]'), True),
    (FAILS.format('accept', '7'), True), ("x = 1\nopen('no/such')", False),
    (FAILS.format('propose', "open('no/such')"), False)])
def test_errors_of_ones_own_keep_their_traceback(content, ours, pair, tmp_path, capsys):
    """It ends in their line, or in ours that takes what they return."""
    put(tmp_path, {'fails.py': content})
    with patch.dict(METHODS), pytest.raises((NameError, ValueError, TypeError, OSError)) as error:
        program(capsys, *pair, '--import', tmp_path / 'fails.py', '--method', 'fails')
    last = error.traceback[-1]
    assert not isinstance(error.value, BadInput)
    assert ours or (last.path, last.lineno + 1) == (tmp_path / 'fails.py', 2)


@pytest.mark.slow
def test_the_source_files_stand_alone(pair, tmp_path):
    """Without the laboratory: every paper's method. The embedded models are refused by name."""
    for name in ('kernels.py', 'model.py', 'verify.py', 'specmini.py', 'train_mask.py'):
        shutil.copy(HOME / name, tmp_path)
    papers = 'via', 'cmasd', 'ecsv', 'sparse', 'specguard'
    status, out, err = subprogram('-c', ALONE, *pair[:4], '--prompt', 'hello', '--compare', *papers,
                                  folder=tmp_path, PYTHONPATH='')
    assert status == 0 and {*papers} < {*table_in(out)}, err
    assert 'lab/models/target: no such folder' in err
