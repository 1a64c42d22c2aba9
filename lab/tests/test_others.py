"""lab/others.py beside transformers on tiny checkpoints, and scripts that print what llama.cpp does."""
import json

import pytest

from lab import others
from lab.tests.helpers import bytes_tokenizer, program, refused, refuses, stored, tiny

THEIRS = ['llama.cpp 0', 'llama.cpp 2 d', 'transformers 0', 'transformers 2', 'transformers stop']
SCRIPT = '''#!/bin/sh
[ "$1" != --version ] || { echo 'version: 7 (abc)' >&2; exit; }
while [ $# -gt 1 ]; do
    case $1 in -d) depth=$2;; --spec-draft-n-max) gamma=$2;; esac
    shift
done
'''
PROGRAMS = {
    'llama-bench': '''echo '[ { "avg_ns": 6124520, "avg_ts": '$depth'.5, "stddev_ts": 0.0 } ]'\n''',
    'llama-speculative-simple': '''exec >&2
echo "0.18.978.574 I encoded   ${#1} tokens in    2.268 seconds, speed:   12.348 t/s"
echo "0.18.978.608 I decoded   20 tokens in    9.152 seconds, speed:    $gamma.185 t/s"
echo "0.18.978.654 I n_draft   = $gamma"
'''}


@pytest.fixture
def build(tmp_path):
    """A folder of the two scripts: their speeds are the depth and a half, and gamma with .185."""
    folder = tmp_path / 'build'
    folder.mkdir()
    for name, prints in PROGRAMS.items():
        (folder / name).write_text(SCRIPT + prints)
        (folder / name).chmod(0o700)
    return folder


def test_others(monkeypatch, tmp_path, capsys, build):
    """Ours first and last; the table has a line for each of theirs."""
    pytest.importorskip('transformers')
    monkeypatch.setattr(others, 'LAB', tmp_path)
    prompts = stored(tmp_path / 'prompts.jsonl', dict(prompt='hello'), [dict(prompt='and so on')])
    flags = '--target', tiny(tmp_path / 'a', 0), '--draft', tiny(tmp_path / 'b', 1), '--prompts', prompts
    files = [stored(tmp_path / name, {}, []) for name in ('t.gguf', 'd.gguf')]
    run = *flags, '--n', 2, '--max-new', 24, '--gamma', 2, '--llama', build, *files
    status, out, err = program(capsys, *run, main=others.main)
    assert status == 0, err
    head, *rows = map(json.loads, (tmp_path / 'results/a+b/others.jsonl').read_text().splitlines())
    assert list(head['rivals']) == ['transformers', 'llama.cpp'] and head['rivals']['llama.cpp'] == '7 (abc)'
    assert head['theirs'] == ['bf16', 't.gguf', 'd.gguf']
    assert [row['turn'] for row in rows] == [0] * 4 + [1] * 6 + [2] * 4 + [3] * 4
    rates = {}
    for row in rows:
        rates.setdefault(row['setting'], {}).setdefault(row['place'], []).append(row['rate'])
    assert sorted(rates) == [*THEIRS[:2], 'ours 0', 'ours 2', *THEIRS[2:]]
    assert all(len(both) == 1 + ('ours' in name) for name, texts in rates.items() for both in texts.values())
    assert rates['llama.cpp 0'] == {0: [4.5], 1: [8.5]} and rates['llama.cpp 2 d'] == {0: [2.185], 1: [2.185]}
    assert all(f'\n| {name} | ' in out for name in THEIRS)
    one = others.by_llama, build, bytes_tokenizer(), 't.gguf', 2, 'd.gguf'
    refuses('expected encoded +2 tokens', *one, [1, 256], 8)            # <eos> is five letters for the script
    refused(capsys, 'no.gguf', *flags, '--llama', build, 'no.gguf', main=others.main)
    (build / 'llama-bench').write_text('#!/bin/sh\necho what?')
    refused(capsys, "expected version: (.*), its output ends with 'what?", *run, main=others.main)
    (build / 'llama-bench').unlink()
    refused(capsys, "No such file or directory: '", *run, main=others.main)
