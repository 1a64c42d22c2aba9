"""lab/others.py beside transformers on tiny checkpoints; llama.cpp is left out."""
import json

import pytest

from lab import others
from lab.tests.helpers import program, refused, stored, tiny

THEIRS = ['transformers 0', 'transformers 2', 'transformers stop']


def test_others(monkeypatch, tmp_path, capsys):
    """Ours first and last; the table has a line for each of theirs."""
    pytest.importorskip('transformers')
    monkeypatch.setattr(others, 'LAB', tmp_path)
    prompts = stored(tmp_path / 'prompts.jsonl', dict(prompt='hello'), [dict(prompt='and so on')])
    flags = '--target', tiny(tmp_path / 'a', 0), '--draft', tiny(tmp_path / 'b', 1), '--prompts', prompts
    status, out, err = program(capsys, *flags, '--n', 2, '--max-new', 24, '--gamma', 2, main=others.main)
    assert status == 0, err
    refused(capsys, 'no.gguf', *flags, '--gguf', 'no.gguf', 'no.gguf', main=others.main)
    head, *rows = map(json.loads, (tmp_path / 'results/a+b/others.jsonl').read_text().splitlines())
    assert list(head['rivals']) == ['transformers']
    assert [row['turn'] for row in rows] == [0] * 4 + [1] * 6 + [2] * 4
    rates = {}
    for row in rows:
        rates.setdefault(row['setting'], {}).setdefault(row['place'], []).append(row['rate'])
    assert sorted(rates) == ['ours 0', 'ours 2', *THEIRS]
    assert all(len(both) == 1 + ('ours' in name) for name, texts in rates.items() for both in texts.values())
    assert all(f'\n| {name} | ' in out for name in THEIRS)
