"""The page of a traced run, `python specmini.py --prompt TEXT --trace run.html`: a file that opens from disk.

The template is page.html; what it is given is the JSON trace itself. What a session notes for it: traced.py.
`python -m lab.page` writes the screenshots beside this file.
"""
import json
from pathlib import Path as File
from string import Template

from lab.page.traced import Traced                      # noqa: F401, for the program
from specmini import report, trace_lines

TEMPLATE = File(__file__).parent / 'page.html'


def write_page(file, engine, texts, step):
    """Writes the page of these specmini.Texts; step: seconds of a step of plain decoding, or None."""
    shown = lanes_of(engine, texts)
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


def lanes_of(engine, texts):
    """A dict for each prompt, its ids and a lane for each method; the same method again begins another."""
    shown = []
    for text in texts:
        lines = trace_lines(text, engine.tokenizer)
        if not lines:                                   # interrupted before its first token
            continue
        found = report(engine, text)
        if not shown or any(lane['method'] == found['method'] for lane in shown[-1]['lanes']):
            shown.append(dict(prompt=text.prompt, lanes=[]))
        lane = {key: found[key] for key in ('method', 'lossless', 'knobs', 'stats', 'seed', 'finish')}
        shown[-1]['lanes'].append(lane | dict(cycles=lines))
    return shown


def words_of(shown, tokenizer):
    """{id: its text} of every token that the page may show."""
    tokens = set()
    for text in shown:
        tokens.update(text['prompt'])
        for lane in text['lanes']:
            for cycle in lane['cycles']:
                tokens.update(cycle['drafted'], cycle['tokens'], [row['token'] for row in cycle['judged']])
                places = [place['ids'] for place in cycle.get('places', [])]
                tokens.update(*places, *cycle.get('branches', []), *cycle.get('candidates', []))
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokens)}
