"""lab/others.py beside transformers on tiny checkpoints; llama.cpp is left out."""
import json

import pytest

from lab import others
from lab.tests.helpers import program, stored, tiny


def test_others(monkeypatch, tmp_path, capsys):
    """A row a run; the table has the ratios of the stored rows."""
    pytest.importorskip('transformers')
    monkeypatch.setattr(others, 'LAB', tmp_path)
    prompts = stored(tmp_path / 'prompts.jsonl', dict(prompt='hello'), [dict(prompt='and so on')])
    flags = '--target', tiny(tmp_path / 'a', 0), '--draft', tiny(tmp_path / 'b', 1), '--prompts', prompts
    status, out, err = program(capsys, *flags, '--n', 2, '--max-new', 12, '--gamma', 2, main=others.main)
    assert status == 0, err
    head, *rows = map(json.loads, (tmp_path / 'results/a+b/others.jsonl').read_text().splitlines())
    assert list(head['rivals']) == ['transformers']
    assert [row['place'] for row in rows] == [0] * 4 + [1] * 4
    rates = {}
    for row in rows:
        rates.setdefault(row['setting'], []).append(row['rate'])
    assert sorted(name.split()[0] for name in rates) == ['ours', 'ours', 'transformers', 'transformers']
    for theirs in [name for name in rates if 'ours' not in name]:
        ratios = [a / b for a, b in zip(rates['ours ' + theirs[-1]], rates[theirs])]
        shown = f'{sum(ratios) / 2:.2f} | {min(ratios):.2f} to {max(ratios):.2f}'
        assert f'| {theirs} | {shown} |' in out
