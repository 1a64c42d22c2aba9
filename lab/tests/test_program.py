"""The program: its flags, what it prints, traces and grades, what it says of costs, and how it ends."""
import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

import lab.baselines    # noqa: F401, enters the baselines in METHODS
import specmini
import train_mask
import verify
from lab import prove, times
from lab.tests.helpers import (EMBEDDED, HOME, LEARNED, RANGES, case, interrupt, json_lines, program, put,
                               refused, refuses, reported, subprogram, tiny, tiny_pair)
from lab.toys import Table, WrongResidual, enumerate_law, exact_law, fresh, variation
from model import Reader, encode, load, write_calibration
from verify import METHODS, Exact


@pytest.fixture(autouse=True)
def one_round_of_timing(monkeypatch):
    """The passes at the end of a run are timed once, because no test reads their seconds."""
    monkeypatch.setattr('lab.times.TIMING', 0.0)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """The flags of a run on two random checkpoints."""
    return tiny_pair(tmp_path_factory.mktemp('pair'))


# ------------------------------------------------------------------------------------- flags that do not fit

@pytest.mark.parametrize('flags, named', [
    ('--nonsense', '--nonsense'), ('--max-new 0', '--max-new'), ('--max-new many', '--max-new'),
    ('--top-p 0', '--top-p'), ('--top-k -2', '--top-k'), ('--temperature -1', '--temperature'),
    ('--temperature nan', '--temperature'), ('--seed -1', '--seed'),
    ('--prompt', '--prompt'), ('--prompt=', 'prompt 1'), ('--prompt \udcff', 'UTF-8'),
    ('--target nowhere', 'nowhere: no such folder'), ('--trace no/such/folder', '--trace no/such/folder'),
    ('--device tpu', '--device'), ('--compare sd --json', '--json'),
    ('--compare sd --trace x.jsonl', '--trace'), ('--method magic', 'magic'),
    ('--compare sd,magic', 'magic'), ('--check --temperature 1', '--check'), ('--gamma -1', 'gamma'),
    ('--set nothing', '--set nothing'), ('--set lenience=1', '--set lenience=1'),
    ('--set gamma=four', 'gamma is four'), ('--method hedge --set sides=2', 'see --list hedge'),
    ('--set keep=0.4', 'but of via'), ('--set gamma=3 gamma=4', 'gamma=3 gamma=4'),
    ('--method ar --gamma 3', 'gamma=3'), ('--method ar --sparse', '--sparse'), ('--method ecvs', 'ecsv?'),
    ('--list payof', 'payoff?'), ('--compare sd --times', '--times'),
    ('--gamma 2 --method cmasd', 'k_max'), ('--gamma 3 --set gamma=5', 'gamma=3 gamma=5'),
    ('--set gamma=2 controller=online', 'controller=fixed'),
    ('--method cmasd --sparse --gamma 4', 'k_max'), ('--compare cmasd --gamma 2', 'k_max'),
    ('--draft nothing', 'no such folder'), ('--prompt x --prompts y', '--prompts'),
    ('--prompts lab', 'a folder'), ('--prompts absent.jsonl', 'absent.jsonl'),
    ('--prompts /dev/zero', '--prompts /dev/zero'),
    ('--trace lab', 'is a folder'), ('--method via --set slim_bonus=2', 'slim_bonus is 2'),
    ('--target MODELS/target --draft self --method via', 'its own drafts'),
    ('--method cmasd --draft lookup', '--draft'), ('--method ecsv --draft lookup', '--draft'),
    ('--method specguard --draft none', '--draft'), ('--lookup --draft self', '--lookup'),
    ('--lookup --method cmasd', '--lookup'), ('--lookup --method ecsv', '--lookup'),
    ('--lookup --method specguard', '--lookup'), ('--list magic', 'magic'),
    ('--method specguard --set delimiter=', 'delimiter'), ('--sparse x', 'x'),
    ('--sparse --set rho=2', 'rho'), ('--sparse --method sparse', '--sparse'),
    ('--target MODELS/draft --sparse --set ffn_quantile=0.5', 'python train_mask.py --anchors --target'),
    ('--target MODELS/draft --draft MODELS/draft --method via', 'python train_mask.py --target'),
    ('--target= --draft= --method= --trace=', '--target, --draft, --method, --trace')])
def test_flags_that_do_not_fit(flags, named, capsys):
    prompt = () if '--prompts' in flags else ('--prompt', 'x')
    words = [word.replace('MODELS', str(EMBEDDED)) for word in flags.split()]   # a path may have a space
    refused(capsys, named, *prompt, *words)


@pytest.mark.parametrize('method, knob', [
    ('sd', 'gamma=-1'), ('sd', 'controller=magic'), ('lenient', 'lenience=0'),
    ('cmasd-specdec', 'tolerance=nan'), ('cmasd', 'alpha=-1'), ('cmasd', 'k_min=20'),
    ('cmasd', 'lam_entropy=0 lam_margin=0 lam_softmax=0'),
    ('ecsv', 'branches=65'), ('via', 'keep=0.2'),
    ('specguard', 'k=0'), ('specguard', 'tau=nan'), ('specguard-target-k', 'target_k=2 gamma=1'),
    ('sparse', 'rho=2'), ('sparse', 'block=0')])
def test_knobs_out_of_range(method, knob, capsys):
    name, value = knob.split()[0].split('=')
    refused(capsys, f'{name} is {value}', '--prompt', 'x', '--method', method, '--set', *knob.split())


@pytest.mark.parametrize('kind, knobs, named', [
    ('sd', dict(gamma='4'), 'gamma'), ('sd', dict(gamma=None), 'gamma'), ('sd', dict(gamma=True), 'gamma'),
    ('ecsv', dict(branches=2.5), 'a whole number'), ('via', dict(slim_bonus=1), 'true or false'),
    ('cmasd', dict(alpha='1'), 'a number'), ('specguard', dict(delimiter=7), 'a text'),
    ('specguard', dict(max_step=2.0), 'max_step')])
def test_knobs_of_another_type(kind, knobs, named):
    """Also where a knob is set from Python; a whole number is a number, and None what it is by default."""
    refuses(named, partial(METHODS[kind], **knobs))
    assert METHODS['via'](keep=1).keep == 1 and METHODS['sd'](draft_temperature=None)


@pytest.mark.parametrize('setting', [dict(temperature='4'), dict(seed=4.0), dict(max_new=True)], ids=str)
def test_settings_of_another_type(setting):
    refuses(f'--{next(iter(setting)).replace("_", "-")}', partial(specmini.Engine, 'nowhere', **setting))


def test_gamma_goes_to_the_methods_whose_blocks_it_ends():
    args = specmini.parse('--prompt x --compare sd,cmasd,via --gamma 2'.split())
    assert [args.methods[name].gamma for name in ('sd', 'cmasd', 'via')] == [2, 4, 2]
    args = specmini.parse(['--prompt', 'x', '--compare', ' sd, via,'])
    assert list(args.methods) == ['ar', 'sd', 'via']
    assert not specmini.parse('--prompt x --method ar --lookup'.split()).lookup


def test_a_folder_that_cannot_be_written_is_told_before_the_work(pair, tmp_path, capsys, monkeypatch):
    """Permissions do not bind root, who may run this test."""
    monkeypatch.setattr('os.access', lambda folder, mode: False)
    refused(capsys, 'no permission', '--prompt', 'x', '--trace', tmp_path / 'x.jsonl')
    refused(capsys, 'no permission', '--target', pair[1], main=lambda: train_mask.main())


def test_closed_streams_and_poor_terminals(pair, capsys, monkeypatch):
    """What is written to a closed stream is discarded; what ASCII does not have is a question mark."""
    poor = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    for stream in (poor, None):
        monkeypatch.setattr(sys, 'stdout', stream)
        monkeypatch.setattr(sys, 'stderr', stream)
        assert specmini.main([*map(str, pair[:5]), 'h\u00e9', '--max-new', '3', '--show']) == 0
    assert b'[-?-]' in poor.detach().getvalue()


def test_list_names_every_method_and_its_knobs(capsys):
    """The papers' first, baselines by `all`; of one method its knobs with default, range and meaning."""
    papers = [line.split()[0] for line in program(capsys, '--list')[1].splitlines() if line[0] == ' ']
    assert {'cmasd', 'ecsv', 'via', 'specguard', 'sparse'} <= {*papers[:papers.index('sd')]}
    assert 'lenient' not in papers
    every = [line.split()[0] for line in program(capsys, '--list', 'all')[1].splitlines() if line[0] == ' ']
    assert sorted(every) == sorted([*METHODS, *verify.CONTROLLERS])
    assert 'tokens a second' in program(capsys, '--list', 'payoff')[1]
    for name, kind in METHODS.items():
        _, listed, _ = program(capsys, '--list', name)
        lines = [line.split() for line in listed.splitlines() if re.match('  [a-z]', line)]
        assert {words[0] for words in lines} >= verify.knobs_of(kind).keys(), name
    _, listed, _ = program(capsys, '--list', 'ecsv')
    line, = [line for line in listed.splitlines() if line.startswith('  branches ')]
    assert line.split()[1:5] == ['4', '1', 'to', '64'] and 'vote' in line


# ------------------------------------------------------------------------------------- JSON, trace and text

@pytest.fixture(params=['ar-1', 'sd-1', 'cmasd-1'])
def one_run(request, pair, tmp_path, capsys):
    """A run of this method at this temperature: its text, its trace and, of a second run, its JSON."""
    method, temperature = request.param.split('-')
    file = tmp_path / 'trace.jsonl'
    flags = [*pair, '--method', method, '--temperature', temperature, '--seed', 3, '--trace', file]
    status, text, _ = program(capsys, *flags)
    assert status == 0
    cycles = [json.loads(line) for line in file.read_text().splitlines()]
    judged = [token for cycle in cycles for token in cycle['judged']]
    return SimpleNamespace(method=method, text=text, cycles=cycles, judged=judged,
                           report=reported(capsys, *flags))


def test_json_trace_and_text_are_one_run(one_run):
    """They agree on tokens, passes and labels, and the JSON names the run and why the text ended."""
    report, stats = one_run.report, one_run.report['stats']
    assert report['text'] == one_run.text[:-1]
    assert [token for cycle in one_run.cycles for token in cycle['tokens']] == report['tokens']
    labels = [label for cycle in one_run.cycles for label in cycle['labels']]
    assert stats['labels'] == {label: labels.count(label) for label in labels}
    passes = [cycle['passes']['target/full']['passes'] for cycle in one_run.cycles]
    assert sum(passes) == stats['passes']['target/full']
    assert (report['method'], report['seed'], report['prompt_tokens']) == (one_run.method, 3, len('hello'))
    ended = report['tokens'][-1] == 256
    assert report['finish'] == ('eos' if ended else 'length') and (ended or len(report['tokens']) == 20)


def test_figures_fit_together(one_run):
    """Tokens by label, accepted among judged among drafted; the chance of each judged token."""
    stats, method = one_run.report['stats'], one_run.method
    n = len(one_run.report['tokens'])
    assert sum(stats['labels'].values()) == n
    assert stats['labels'].get('draft', 0) == stats['accepted'] <= stats['judged'] <= stats['drafted']
    assert stats['drafted_share'] == stats['accepted'] / n
    kept = [sum(column) for column in zip(*stats['acceptance_by_place'])]
    assert kept == ([] if method == 'ar' else [stats['accepted'], stats['judged']])
    assert stats['block_efficiency'] == n / stats['passes']['target/full']
    assert stats['tokens_per_second'] == pytest.approx(n / stats['seconds'])
    assert stats['positions']['target/full'] == stats['drafted'] + stats['cycles']
    assert len(one_run.judged) == stats['judged']
    if method == 'ar':
        assert stats['acceptance_rate'] is None and stats['work'] == stats['cycles'] == n
        return
    for token in one_run.judged:
        if method == 'sd':
            assert token['chance'] == min(1, token['p'] / token['q'])
        else:
            assert token['confidence'] <= 1 and 0.01 <= token['threshold'] <= 1


def test_a_trace_is_complete_or_absent(pair, tmp_path, capsys, monkeypatch):
    """While the run goes on it is not there; a run that breaks off with an error leaves none."""
    trace, prompts = tmp_path / 'trace.jsonl', tmp_path / 'prompts.jsonl'
    prompts.write_text(json_lines([dict(prompt='a'), dict(prompt='b')]))
    flags = *pair[:4], '--prompts', prompts, '--max-new', 9, '--trace', trace, '--json'
    real = specmini.report

    def report(engine, text):
        assert not trace.exists()
        if text.row['prompt'] == 'b':
            raise ValueError('enough')
        return real(engine, text)
    with monkeypatch.context() as patch:
        patch.setattr(specmini, 'report', report)
        status, _, err = program(capsys, *flags)
    assert status == 2 and err.endswith(': enough\n')
    assert [file.name for file in tmp_path.iterdir()] == ['prompts.jsonl']
    interrupt(monkeypatch, specmini, 'report', 99)
    assert program(capsys, *flags)[0] == 0
    assert {json.loads(line)['prompt'] for line in trace.read_text().splitlines()} == {0, 1}


def test_an_interrupt_while_passes_are_timed_leaves_the_trace(pair, tmp_path, capsys, monkeypatch):
    interrupt(monkeypatch, specmini, 'plain_step', 1)
    status, _, _ = program(capsys, *pair, '--trace', tmp_path / 'run.jsonl')
    assert status == 0 and (tmp_path / 'run.jsonl').read_text().count('\n') > 3


# ------------------------------------------------------------------------------------ streaming, how it ends

def pieces_printed(capsys, tokenizer, ids):
    """What a Printer prints at each of these tokens, and at the end of the text."""
    printer = specmini.Printer(tokenizer, False)
    pieces = []
    for token in ids:
        printer.add(verify.Cycle([], [], [token], ['target'], {}, 0.0), None)
        pieces.append(capsys.readouterr().out)
    printer.finish()
    return [*pieces, capsys.readouterr().out]


def test_streaming_where_a_decoder_rewrites_bytes(capsys):
    """A broken byte makes Llama 2's decoder take back the A before it: that stays, the rest follows."""
    words = ['<unk>', *[f'<0x{byte:02X}>' for byte in range(256)]]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert ''.join(pieces_printed(capsys, tokenizer, [1 + 0x41, 1 + 0xe2])) == 'A\ufffd\ufffd\n'


def test_streamed_pieces_make_the_text(pair):
    """Settings are of one text alone; what ends within a character is in the last piece."""
    engine = specmini.Engine(str(pair[1]), str(pair[3]), max_new=5)
    halves = 0
    for n in range(1, 16):
        pieces, cycles = zip(*engine.stream('hello', 'sd', max_new=n, temperature=1.0, seed=n))
        ids = verify.tokens_of(cycles)
        assert ''.join(pieces) == engine.tokenizer.decode(ids) and len(ids) <= n
        halves += pieces[-1].endswith('\ufffd')
    assert halves and engine.max_new == 5
    ids = engine.tokenizer.encode('hello').ids
    assert engine.generate(ids, 'sd')[0] == engine.generate('hello', Exact())[0]
    refuses('magic', lambda: engine.generate('x', 'sd', magic=1))


def test_interrupted_text_has_its_figures(pair, capsys, monkeypatch):
    """Ctrl-C gives status 130 and all the same what there is."""
    with monkeypatch.context() as patch:
        interrupt(patch, Exact, 'accept', 3)
        status, out, err = program(capsys, *pair)
        assert (status, bool(out)) == (130, True) and 'sd (lossless)' in err
    interrupt(monkeypatch, Exact, 'accept', 3)
    status, out, _ = program(capsys, *pair, '--json')
    assert status == 130 and json.loads(out)['finish'] == 'interrupted'


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no device here is full')
def test_a_full_disk_is_told_in_one_line(pair, capsys, monkeypatch):
    """Of the trace, and where not even the line can be written."""
    flags = *pair[:6], '--max-new', '2'
    status, _, err = program(capsys, *flags, '--json', '--trace', '/dev/full')
    assert status == 2 and 'Errno 28' in err.splitlines()[-1]
    full = open('/dev/full', 'w', buffering=1)
    monkeypatch.setattr(sys, 'stderr', full)
    assert specmini.main([str(flag) for flag in flags]) == 2
    with contextlib.suppress(OSError):
        full.close()


def test_a_reader_that_has_gone_ends_a_run_in_silence(pair, monkeypatch):
    """Say `| head`."""
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError
    monkeypatch.setattr(sys, 'stdout', Gone())
    assert specmini.main([str(flag) for flag in pair]) == 0


# ------------------------------------------------------------------------------------------ check and compare

def check_line(pair, capsys, *flags):
    """What --check says of 20 tokens."""
    status, _, err = program(capsys, *pair, '--ignore-eos', '--check', *flags)
    line, = [line for line in err.splitlines() if line.startswith('check:')]
    assert status == 0
    return line


def test_check_names_the_first_difference(pair, capsys, monkeypatch):
    """Exact text is equal, lenient is at temperature 0; if all is accepted, place and tokens are named."""
    equal = check_line(pair, capsys)
    assert '20' in equal
    assert check_line(pair, capsys, '--method', 'lenient') == equal
    exact = METHODS['lenient'].chance

    def lax(self, score, i):
        return 1.0 if len(score.session.tokens) > 8 else exact(self, score, i)     # some way into the text
    monkeypatch.setattr(METHODS['lenient'], 'chance', lax)
    said = check_line(pair, capsys, '--method', 'lenient')
    flags = *pair, '--ignore-eos', '--method'
    texts = [reported(capsys, *flags, name)['tokens'] for name in ('lenient', 'ar')]
    place = next(i for i in range(20) if texts[0][i] != texts[1][i])
    assert place > 0
    found, wanted = (text[place] for text in texts)
    model, tokenizer, _ = load(pair[1])
    (ids,) = encode(tokenizer, ['hello'])
    logits = Reader(model, 40).read(ids + texts[1][:place], model.full, 1)[0]
    gap = float(logits[wanted] - logits[found])
    for figure in (f' {place}:', f'({found})', f'({wanted})', f' {gap:.2g}.'):
        assert figure in said


def test_compare_is_a_table_of_methods(pair, capsys):
    """A line a method, each marked as what it is; plain decoding is the unit."""
    flags = '--compare', 'sd,lenient', '--set', 'lenience=0.1', 'gamma=2'
    status, out, _ = program(capsys, *pair, *flags)
    head, ar, sd, lenient, *_ = [line.split() for line in out.splitlines()]
    assert status == 0 and [line[0] for line in (ar, sd, lenient)] == ['ar', 'sd', 'lenient']
    assert (ar[-1], sd[-1], lenient[-1]) == ('lossless', 'lossless', 'LOSSY')
    assert (ar[2], ar[-5], sd[-4]) == ('1.00', '1.00', '100.0%')        # speed, positions, agreement
    assert 2 < float(sd[-5]) * float(sd[-6]) <= 3       # positions and tokens of a cycle; gamma is 2
    assert sd[-3] == '-' and lenient[-3].endswith('%')                  # the audit, of lossy texts
    assert 'right' not in out and max(map(len, out.splitlines())) <= 110
    _, out, _ = program(capsys, *pair, '--compare', 'sd', '--sparse')
    assert out.splitlines()[2].endswith('LOSSY')


def test_figures_do_not_depend_on_later_runs():
    """Weights of paths that an earlier text was read on are still known; a method may be named."""
    engine = specmini.Engine(EMBEDDED / 'target', EMBEDDED / 'draft', max_new=12)
    first, cycles = engine.generate('One evening Mia', METHODS['via']())
    figures = engine.statistics(cycles)
    second, _ = engine.generate('One evening Mia', 'sd')
    assert engine.statistics(cycles) == figures and 'target/slim' in figures['passes']
    assert second == engine.generate('One evening Mia', Exact())[0]
    for wrong in 'magic', Exact, 7:
        refuses('method', engine.generate, 'One evening Mia', wrong)


def numbers_in(sentence):
    return [float(number) for number in re.findall(r'\d+(?:\.\d+)?', sentence)]


def test_times_are_two_tables_and_the_gamma_that_pays(pair, capsys):
    """A column for each length that was timed; `sd` alone has a prediction, where enough was judged."""
    _, _, err = program(capsys, *pair, '--max-new', 40, '--ignore-eos', '--times')
    _, head, passes, shares, counts, speeds, last, *_, memory = err.splitlines()
    assert head.split()[3:] == [str(n) for n in times.BLOCKS]
    assert len(passes) == len(speeds)
    kept, judged = shares.split()[4:], counts.split()[4:]
    assert len(kept) == len(judged) >= 1 and kept[0].endswith('%')
    assert last.startswith('break-even: a draft pass takes ')
    assert 0.1 < numbers_in(memory)[-1] < 9
    few = program(capsys, *pair, '--max-new', 5, '--times')[2]
    assert 'too few' in few and 'cut at --max-new 5' in few
    for flags in '--method ar', '--method specguard --set tau=inf':
        _, _, err = program(capsys, *pair, *flags.split(), '--max-new', 9, '--times')
        assert 'n draft tokens' not in err and 'peak memory' in err


@pytest.mark.parametrize('flags, said', [
    ('ar', 'ar (lossless): N tokens, N a second; N target passes'),
    ('sd', 'sd (lossless): N tokens, N a second, N times plain decoding; N % of the guesses kept, N target'),
    ('cmasd', 'N times plain decoding; N % of the guesses kept, N target passes\n'
     'LOSSY: the target itself would have written N % of these tokens'),
    ('sparse --temperature 1', 'would have written N % of these tokens (of its own samples N %)'),
    ('specguard --set k=1', ', N times plain decoding; N of N steps kept, N target pass')])
def test_a_run_ends_with_a_line(flags, said, able, capsys):
    """And a second one on the audit of a lossy text; N: any number."""
    words = '--target', able[0], '--draft', able[1], '--prompt', 'ab 1\n', '--max-new', 20, '--ignore-eos'
    assert said in re.sub(r'\d+(\.\d+)?', 'N', program(capsys, *words, '--method', *flags.split())[2])


# ---------------------------------------------------------------------------- the audit of lossy texts

@pytest.mark.parametrize('flags', [
    case('via', '--method via --set escalate=0.1'), case('via-sampled', '--method via --temperature 1'),
    case('sparse', '--method sparse --set rho=0 dense_below=4 block=2 locals=1')])
def test_audit_is_what_a_fresh_target_says(flags, able, capsys, monkeypatch):
    """p and log p of each token that was written, in parts, at no cost to the passes; lossless: none."""
    target, draft = able
    flags = '--target', target, '--draft', draft, '--prompt', 'ab 1\n', '--max-new', 20, *flags.split()
    plain = reported(capsys, *flags)
    monkeypatch.setattr(specmini, 'AUDITED', 3)
    found = reported(capsys, *flags)
    assert found['stats']['passes'] == plain['stats']['passes']
    model, tokenizer, _ = load(target)
    (ids,) = encode(tokenizer, ['ab 1\n'])
    tokens, stats = found['tokens'], found['stats']
    rows = fresh(model, ids + tokens[:-1], len(tokens))
    temperature = 1.0 if 'sampled' in str(flags) or '--temperature' in flags else 0.0
    p = verify.probs(rows, temperature).gather(1, torch.tensor(tokens)[:, None])
    assert stats['audited'] == 1
    assert stats['audited_wrong'] == pytest.approx(float(1 - p.mean()), abs=1e-4)
    assert stats['audited_logp'] == pytest.approx(float(verify.token_logps(rows, tokens).mean()), abs=1e-4)
    everything = verify.probs(rows, temperature)
    assert stats['audited_expected'] == pytest.approx(float(1 - everything.square().sum(1).mean()), abs=1e-4)
    said = f'(of its own samples {100 - 100 * stats["audited_expected"]:.3g} %)'
    assert (said in program(capsys, *flags)[2]) == (temperature > 0)
    for key in ('audited_wrong', 'audited_logp'):
        assert plain['stats'][key] == pytest.approx(stats[key], abs=1e-4)
    assert reported(capsys, *flags[:8], '--method', 'sd')['stats']['audited'] is None


# ------------------------------------------------------------------------------------ prompts and grading

TASKS = [dict(question='a', task='x'), dict(turns=['b', 'c'], task='y'), dict(prompt='a', task='x')]


@pytest.fixture
def run_rows(pair, capsys, tmp_path):
    """A function from rows of a file of prompts, and flags, to (status, lines of stdout, stderr)."""
    file = tmp_path / 'p.jsonl'

    def run(rows, *flags):
        file.write_text('\ufeff\n' + json_lines(rows) + '\n')           # a mark, empty lines
        status, out, err = program(capsys, *pair[:4], '--max-new', 3, '--prompts', file, *flags)
        return status, out.splitlines(), err
    return run


@pytest.fixture
def answered(run_rows):
    """Rows of two tasks: the target writes the first one's answer, not the second's; the third has none."""
    _, lines, _ = run_rows(TASKS, '--json')
    first, second, _ = [json.loads(line)['text'] for line in lines]
    return [TASKS[0] | dict(answer=first), TASKS[1] | dict(answer=second + 'no'), TASKS[2]]


def test_rows_have_prompt_question_or_turns(run_rows):
    """In this order; of turns the first is used; a row without an answer gets no verdict."""
    row = dict(turns=['ccc', 'd'], question='bb', prompt='a')
    rows = [row, dict(turns=row['turns'], question='bb'), dict(turns=row['turns'])]
    _, lines, _ = run_rows(rows, '--json')
    reports = [json.loads(line) for line in lines]
    assert [report['prompt_tokens'] for report in reports] == [1, 2, 3]
    assert not any('right' in report for report in reports)


@pytest.mark.parametrize('row, text', [
    (dict(question='?', answer='He pays 600+634\n#### 1,234'), 'so 5, then 1,234.'),        # as GSM8K's
    (dict(answer=20), 'a range of 10-20'), (dict(answer=-3), '4 - 7 = -3'),
    (dict(answer='Paris, France'), ' Paris, France\n'), (dict(task='math', answer=7), 'Answer: 7'),
    (dict(task='qa', answer=7), 'A: 7')])
def test_grades(row, text):
    """By the last number where the answer is one, else by the whole text."""
    assert specmini.grade(row, text)
    assert not specmini.grade(dict(task='code', answer=7), 'y')
    assert not specmini.grade(row, 'y') and not specmini.grade(row, '1234 is not 7000')


def test_rows_are_graded_one_by_one(run_rows, answered):
    status, lines, err = run_rows(answered, '--json')
    grades = [json.loads(line).get('right') for line in lines]
    assert (status, grades) == (0, [True, False, None])
    assert numbers_in(err.splitlines()[-1]) == [1, 2, 50]


def test_compare_has_a_table_for_each_task(run_rows, answered, monkeypatch):
    """With its share of right texts; interrupted, of the texts that all methods have finished."""
    status, lines, _ = run_rows(answered, '--compare', 'sd')
    right = [line.split()[5] for line in lines if line.startswith(('ar ', 'sd '))]
    assert (status, right) == (0, ['100.0%', '100.0%', '0.0%', '0.0%'])
    interrupt(monkeypatch, specmini, 'write_text', 4)       # sd's of the second row
    monkeypatch.setattr(specmini, 'ROUNDS', 1)
    status, lines, _ = run_rows(answered, '--compare', 'sd')
    right = [line.split()[5] for line in lines if line.startswith(('ar ', 'sd '))]
    assert (status, right) == (130, ['100.0%', '100.0%'])


@pytest.mark.parametrize('content, named', [
    case('no-row', '', '--prompts'), case('no-json', 'x', 'line 1'), case('no-object', '[1]', 'line 1'),
    case('no-prompt', '{"prompt": "a"}\n{"x": 1}', 'line 2'), case('no-turn', '{"turns": []}', 'line 1'),
    case('no-text', '{"prompt": 7}', 'line 1'), case('empty', '{"prompt": ""}', 'prompt 1'),
    case('half-a-character', '{"prompt": "\\ud800"}', 'UTF-8'), case('deep', '[' * 99999, 'line 1'),
    case('a-long-number', '1' * 5000, 'line 1'), case('no-utf-8', b'\xff\xfe', '--prompts')])
def test_bad_prompt_files(content, named, pair, capsys, tmp_path):
    file = tmp_path / 'p.jsonl'
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(capsys, named, *pair[:4], '--prompts', file)


# ------------------------------------------------------------------------------------ contexts, every method

@pytest.mark.parametrize('prompt, max_new, length, whose', [
    case('of-the-target', 63, 60, 1, 'target'), case('of-the-draft', 5, 60, 11, 'draft'),
    case('just-fits', 54, 10, 10, None)])
def test_a_context_that_is_full_ends_a_text(prompt, max_new, length, whose, pair, capsys, tmp_path):
    """A line says whose context was full."""
    short = ['--draft', tiny(tmp_path, max_position_embeddings=16)] if whose == 'draft' else []
    flags = '--prompt', 'x' * prompt, '--max-new', max_new, '--ignore-eos', '--json'
    status, out, err = program(capsys, *pair[:4], *short, *flags)
    assert (status, len(json.loads(out)['tokens'])) == (0, length)
    told = [line for line in err.splitlines() if 'cut at the context' in line]
    assert [whose] * len(told) == [name for name in ('target', 'draft') if any(name in line for line in told)]
    assert bool(told) == bool(whose)


def test_a_prompt_is_there_and_leaves_room(pair, capsys):
    refused(capsys, '--prompt', *pair[:4])
    refused(capsys, '64', *pair[:4], '--prompt', 'x' * 64)


def test_each_text_pays_for_its_prompt():
    """A prompt that was read for an earlier text is read again: its seconds are not those of a cache."""
    engine = specmini.Engine(EMBEDDED / 'target', EMBEDDED / 'draft')
    ids = engine.tokenizer.encode('One evening Mia the fox').ids
    engine.open([ids])
    for _ in range(2):
        for reader in engine.readers.values():
            reader.log.clear()                          # what is found was read for this text
        for reader in engine.start(ids, Exact()).readers().values():
            (passes, positions, _), = reader.spent().values()
            assert (passes, positions) == (1, len(ids) - 1)


@pytest.fixture(scope='module')
def able(tmp_path_factory):
    """The folders of a tiny pair with all sections of calibration.json."""
    home = tmp_path_factory.mktemp('able')
    target = tiny(home / 'target', 0, dict(num_hidden_layers=4))
    draft = tiny(home / 'draft', 1)
    write_calibration(target, 'mask', dict(skip=[2, 3]))
    write_calibration(target, 'signals', RANGES, draft)
    write_calibration(target, 'sparse', LEARNED | dict(experts=[[]] * 4))
    return target, draft


GRADES_STEPS = 'rsd', 'oracle-gate'        # methods that need a task with a step checker


QUICK = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse', *GRADES_STEPS


@pytest.mark.parametrize('name', [case(name, name, slow=name not in QUICK) for name in METHODS])
def test_every_method_runs(name, able, capsys):
    """Sampling: valid JSON, figures that add up, and --show; or a line says what it needs."""
    target, draft = able
    flags = ['--target', target, '--draft', draft, '--prompt', 'ab 1\n', '--method', name, '--max-new', 16,
             '--temperature', 0.8]
    if name in GRADES_STEPS:
        refused(capsys, 'lab', *flags)
        return
    status, out, err = program(capsys, *flags, '--json')
    assert status == 0, err
    report = json.loads(out, parse_constant=lambda word: pytest.fail(f'{word} is no JSON'))
    n = len(report['tokens'])
    assert 1 <= n <= 16 and sum(report['stats']['labels'].values()) == n
    assert report['lossless'] == METHODS[name]().lossless
    assert program(capsys, *flags, '--show')[0] == 0


@pytest.mark.parametrize('knobs, told', [
    ('dense_below=128', True), ('dense_below=2 block=2 locals=1', False), ('rho=1', False)])
def test_sparse_passes_that_leave_nothing_out_are_told(knobs, told, able, capsys):
    flags = '--target', able[0], '--prompt', 'aabaab', '--max-new', 20, '--method', 'sparse', '--set'
    assert ('left nothing out' in program(capsys, *flags, *knobs.split())[2]) == told


@pytest.mark.parametrize('flags', ['--method sparse', '--sparse'])
def test_a_slim_draft_of_sparse_passes_reads_each_token_once(flags, able, capsys):
    """What sparse passes wrote serves the slim path, which is sparse, too: no answer is read again."""
    flags = '--target', able[0], '--prompt', 'aabaab', '--max-new', 40, '--draft', 'self', *flags.split()
    stats = reported(capsys, *flags, '--ignore-eos', '--set', 'rho=0.1', 'dense_below=2', 'block=2')['stats']
    drafted = sum(n for path, n in stats['positions'].items() if 'slim' in path)
    assert drafted <= stats['drafted'] + stats['cycles']
    assert stats['positions']['target/sparse'] <= stats['drafted'] + stats['cycles']


@pytest.mark.parametrize('draft', ['lookup', 'self', 'none', 'first'])
def test_sd_has_other_drafts(draft, able, capsys):
    """Its greedy text is plain decoding's; --lookup looks up first, and asks the draft model else."""
    flags = '--target', able[0], '--prompt', 'aabaab', '--max-new', 20
    other = ('--draft', able[1], '--lookup') if draft == 'first' else ('--draft', draft)
    drafted = reported(capsys, *flags, *other)
    assert drafted['tokens'] == reported(capsys, *flags, '--method', 'ar')['tokens']
    assert (drafted['stats']['drafted'] > 0) == (draft != 'none')


ODD = ['nan', 'inf', '-inf', '-1', '0', '1', '3', '0.5', '1e400', '99999999999', '1' * 5000, '', 'x', 'true',
       'None', '\udcff', '1e-320']


@pytest.mark.slow
def test_odd_knobs(able):
    """Every method at odd values of any knobs writes three tokens, or a ValueError says why not."""
    target, draft = able
    engine = specmini.Engine(target=target, draft=draft, max_new=3)
    engine.open([[97, 98, 10, 103]])
    rng = random.Random(1)
    outcomes = []
    for _ in range(500):
        name = rng.choice(sorted(METHODS))
        knobs = sorted(verify.knobs_of(METHODS[name]))
        chosen = rng.sample(knobs, min(len(knobs), rng.randrange(3)))
        engine.temperature = rng.choice([0.0, 1.0])
        try:
            words = [f'{knob}={rng.choice(ODD)}' for knob in chosen]
            engine.write([97, 98, 10, 103], specmini.make_method(name, words, [name]))
            outcomes.append('runs')
        except ValueError as error:
            assert type(error) is ValueError and str(error), (name, words)
            outcomes.append('refused')
    assert 100 < outcomes.count('runs') < 400


# ------------------------------------------------------------------------------------------------ lab.prove

class Liar(WrongResidual):
    """Promises the target's distribution, and has another."""
    lossless = True


@pytest.fixture
def short_proofs(monkeypatch):
    """Proofs of two tokens at most, so that every method has one in no time."""
    monkeypatch.setattr(prove, 'SIZES', ((2, 1), (2, 2)))
    monkeypatch.setattr(prove, 'LONGER', ((2, 2),))
    monkeypatch.setattr(prove, 'MOST', 80)


@pytest.mark.slow
def test_prove_judges_or_refuses_every_method(short_proofs):
    """No verdict contradicts what a method says of itself."""
    unproven = set()
    for name, kind in METHODS.items():
        try:
            proof = prove.prove(name, kind(), temperature=1.0, top_k=0, top_p=1.0)
        except ValueError as error:
            assert name in str(error)
            unproven.add(name)
            continue
        assert proof.status == 0
        assert (proof.gap < 1e-9) >= proof.promised, name
    assert unproven <= set(GRADES_STEPS)


@pytest.mark.slow
def test_prove_of_a_controller_that_learns(short_proofs, capsys):
    status, out, _ = program(capsys, 'sd', '--set', 'controller=payoff', main=prove.main)
    assert (status, 'lossless' in out) == (0, True)


@pytest.mark.parametrize('rule, status', [
    case('lossless', Exact, 0), case('lossy', METHODS['lenient'], 0), case('wrong', Liar, 1)])
def test_prove_prints_distributions(rule, status, capsys, monkeypatch):
    """The figures are those of the law tests; a false promise gives status 1."""
    monkeypatch.setattr(prove, 'SIZES', ((4, 2),))
    monkeypatch.setitem(METHODS, 'told', rule)
    found, out, _ = program(capsys, 'told', '--set', 'gamma=1', '--top-k', 4, main=prove.main)
    assert found == status
    wanted, drafted = [exact_law(Table(seed), 2, temperature=1.0) for seed in (1, 2)]
    law = enumerate_law(Table(1), Table(2), rule(1), 2, temperature=1.0)
    gap = variation(law, wanted)
    assert (gap < 1e-9) == (rule is Exact) and (gap < 1e-9 or f'{gap:.3g}' in out)
    text = max(wanted, key=wanted.get)
    shown = next(line for line in out.splitlines() if line.startswith(' '.join(map(str, text)) + ' '))
    figures = [f'{of[text]:.5f}' for of in (law, wanted, drafted)]
    assert [shown.split()[i] for i in (2, 3, 5)] == figures


@pytest.mark.parametrize('named, flags', [
    ('nope', ['nope']), ('--temperature', ['sd', '--temperature', -1]), ('rsd', ['rsd']),
    ('--prompt', ['sd', '--prompt', 'x']), ('--set lenience=1', ['sd', '--set', 'lenience=1']),
    ('gamma', ['ar', '--set', 'gamma=2']), ('controller', ['sd', '--set', 'controller=oracle']),
    ('80', ['specguard', '--set', 'k=9']), ('sparse', ['sparse', '--set', 'ffn_quantile=0.5'])], ids=str)
def test_prove_refuses_in_one_line(named, flags, short_proofs, capsys):
    refused(capsys, named, *flags, main=prove.main)


MINE = """from verify import CONTROLLERS, METHODS, Controller, Exact
CONTROLLERS['mine'] = type('Mine', (Controller,), {})
METHODS['keeps'] = type('Keeps', (Exact,), dict(chance=lambda *_: 1.0))"""


def test_methods_and_controllers_of_ones_own(short_proofs, tmp_path, capsys):
    """A rule that is changed is LOSSY and audited. A controller that does not say otherwise takes gamma."""
    put(tmp_path, {'mine.py': MINE, 'bad.py': 'x = 1\ny = nothing'})
    mine = '--import', tmp_path / 'mine.py'
    with patch.dict(METHODS), patch.dict(verify.CONTROLLERS):
        status, out, err = program(capsys, *tiny_pair(tmp_path), *mine, '--method', 'keeps')
        assert status == 0 and 'keeps (LOSSY)' in err and 'the target itself would have' in err
        args = specmini.parse(['--prompt', 'x', '--set', 'controller=mine', 'gamma=2'])
        assert args.methods['sd'].gamma == 2
        proven, *_ = program(capsys, 'sd', *mine, '--set', 'controller=mine', 'gamma=1', main=prove.main)
        assert proven == 0
    refused(capsys, 'No such file', '--import', tmp_path / 'none.py', '--list')
    refused(capsys, "bad.py, line 2: NameError: name 'nothing'", '--import', tmp_path / 'bad.py', '--list')
    refused(capsys, 'but of ecsv-spot', '--method', 'ecsv', '--set', 'spots=2', '--prompt', 'x')
    for name in ('online', 'payoff', 'hf-confidence'):
        refused(capsys, 'gamma', 'sd', '--set', f'controller={name}', 'gamma=2', main=prove.main)


# ------------------------------------------------------------------------------- the five source files, alone

ONE_BY_ONE = '''
import json, sys, specmini
for flags in json.loads(sys.argv[1]):
    print('status', specmini.main(flags))
'''


@pytest.mark.slow
def test_the_source_files_stand_alone(able, tmp_path):
    """Without the laboratory: every paper's method; the flags that need the laboratory are refused."""
    for name in ('kernels.py', 'model.py', 'verify.py', 'specmini.py', 'train_mask.py'):
        shutil.copy(HOME / name, tmp_path)
    target, draft = map(str, able)
    papers = 'via', 'cmasd', 'ecsv', 'sparse', 'specguard'
    runs = [['--compare', ','.join(papers), '--target', target, '--draft', draft, '--max-new', '12',
             '--prompt', 'hello'],
            ['--prompt', 'hello'], ['--prompt', 'hello', '--trace', 'run.html'],
            ['--prompt', 'hello', '--times']]
    _, out, err = subprogram('-c', ONE_BY_ONE, json.dumps(runs), folder=tmp_path, PYTHONPATH='')
    assert re.findall(r'^status (\d)', out, re.MULTILINE) == ['0', '2', '2', '2'], err
    assert all(f'\n{name} ' in out for name in papers)
    for line, named in zip(err.splitlines()[-3:], ('--target', '--trace run.html', '--times')):
        assert named in line
