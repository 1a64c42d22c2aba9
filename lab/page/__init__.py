"""The page of a traced run, `python specmini.py --prompt TEXT --trace run.html`: a file that opens from disk.

The template is page.html; what it is given is the JSON trace itself. What a session notes for it: traced.py.
`python -m lab.page` writes the screenshots beside this file.
"""
import itertools
import json
from pathlib import Path as File
from string import Template

from lab.page.traced import Traced
from specmini import report, trace_lines

__all__ = ['Traced', 'add_lane', 'write_page', 'write_run']
TEMPLATE = File(__file__).parent / 'page.html'


def write_page(file, engine, texts, step):
    """Writes the page of these specmini.Texts; step: seconds of a step of plain decoding, or None."""
    shown = []
    for text in texts:
        add_lane(shown, text.prompt, report(engine, text), trace_lines(text, engine.tokenizer))
    write_run(file, engine, shown, step)


def add_lane(shown, prompt, found, lines):
    """Adds another text, or the same by another method. found: its report; lines: its cycles as dicts.

    shown: a dict for each text, the ids of its prompt and a lane for each method.
    """
    if not lines:                                       # interrupted before its first token
        return
    if not shown or any(lane['method'] == found['method'] for lane in shown[-1]['lanes']):
        shown.append(dict(prompt=prompt, lanes=[]))
    lane = {key: found[key] for key in ('method', 'lossless', 'knobs', 'stats', 'seed', 'finish')}
    shown[-1]['lanes'].append(lane | dict(cycles=lines))


def write_run(file, engine, shown, step=None):
    """Writes the page of what `add_lane` has collected."""
    weights = engine.weights()
    run = dict(
        texts=shown,
        words=words_of(shown, engine.tokenizer),
        shares={path: weight / weights['target/full'] for path, weight in weights.items()},
        step=step and 1000 * step,
        temperature=engine.temperature,
        models={role: File(getattr(engine, role)).name for role in engine.models},
        layers=engine.models['target'].config.num_hidden_layers)
    template = Template(TEMPLATE.read_text(encoding='utf-8'))
    # in a script element: in ASCII, and no `<` that might end it or open another
    trace = json.dumps(run, separators=(',', ':')).replace('<', '\\u003c')
    file.write(template.substitute(trace=trace))


def words_of(shown, tokenizer):
    """{id: its text} of every token that the page may show."""
    tokens = set()
    for text in shown:
        tokens.update(text['prompt'])
        for cycle in itertools.chain(*(lane['cycles'] for lane in text['lanes'])):
            tokens.update(cycle['drafted'], cycle['tokens'], [row['token'] for row in cycle['judged']])
            places = [place['ids'] for place in cycle.get('places', [])]
            tokens.update(*places, *cycle.get('branches', []), *cycle.get('candidates', []))
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokens)}
