"""lab/notebook.ipynb: the README's lines from Python, run without Jupyter."""
import json
import re

from lab.tests.helpers import HOME


def test_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells are the README's lines, and print what is stored below them; the last draws a picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('MPLBACKEND', 'agg')
    notebook = json.loads((HOME / 'lab/notebook.ipynb').read_text(encoding='utf-8'))
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    names = {}
    for cell in cells:
        exec(''.join(cell['source']), names)
        stored = [''.join(one['text']) for one in cell['outputs'] if one['output_type'] == 'stream']
        assert capsys.readouterr().out == ''.join(stored)
    assert (tmp_path / 'kept.png').stat().st_size > 1000
    readme = (HOME / 'README.md').read_text(encoding='utf-8')
    shown, = [code for code in re.findall(r'^```python\n(.*?)^```', readme, re.S | re.M)
              if code.startswith('# ten.py,')]
    lines = [line for cell in cells for line in ''.join(cell['source']).splitlines() if line.strip()]
    assert lines == [line for line in shown.splitlines()[1:] if line.strip()]
