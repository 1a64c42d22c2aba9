"""The page of a traced run, `python specmini.py --prompt TEXT --trace run.html`: a file that opens from disk.

The template is page.html; what it is given is the JSON trace itself. What a session notes for it: traced.py.
`python -m lab.page` writes the screenshots beside this file.
"""
import json
from pathlib import Path as File
from string import Template

from lab.page.traced import Traced
from specmini import report, trace_lines

__all__ = ['Page', 'Traced', 'write_page']
TEMPLATE = File(__file__).parent / 'page.html'


def write_page(file, engine, texts, step):
    """Writes the page of these specmini.Texts; step: seconds of a step of plain decoding, or None."""
    page = Page(file, engine)
    page.step = step
    for text in texts:
        page.add(text.prompt, report(engine, text), trace_lines(text, engine.tokenizer))
    page.conclude()


class Page:
    """Collects the texts of a run, or of a comparison, and writes the page at its end."""

    def __init__(self, file, engine):
        """file: open for writing."""
        self.file = file
        self.engine = engine
        self.texts = []         # a dict each: the ids of its prompt, and a lane for each method
        self.step = None        # seconds of a step of plain decoding, where that was timed

    def add(self, prompt, found, lines):
        """Another text, or the same by another method. found: its report; lines: its cycles as dicts."""
        if not lines:                                   # interrupted before its first token
            return
        if not self.texts or found['method'] in self.methods(self.texts[-1]):
            self.texts.append(dict(prompt=prompt, lanes=[]))
        lane = {key: found[key] for key in ('method', 'lossless', 'knobs', 'stats', 'seed', 'finish')}
        self.texts[-1]['lanes'].append(lane | dict(cycles=lines))

    def methods(self, text):
        return [lane['method'] for lane in text['lanes']]

    def conclude(self):
        """Writes the page."""
        engine = self.engine
        weights = engine.weights()
        whole = weights['target/full']
        shares = {path: weight / whole for path, weight in weights.items()}
        run = dict(
            texts=self.texts,
            words=self.words(),
            shares=shares,
            step=self.step and 1000 * self.step,
            temperature=engine.temperature,
            models={role: File(getattr(engine, role)).name for role in engine.models},
            layers=engine.models['target'].config.num_hidden_layers)
        template = Template(TEMPLATE.read_text(encoding='utf-8'))
        self.file.write(template.substitute(trace=as_script(run)))
        self.file.flush()

    def words(self):
        """{id: its text} of every token that the page may show."""
        tokens = set()
        for text in self.texts:
            tokens.update(text['prompt'])
            for lane in text['lanes']:
                for cycle in lane['cycles']:
                    tokens.update(tokens_in(cycle))
        found = {}
        for token in sorted(tokens):
            found[token] = self.engine.tokenizer.decode([token], skip_special_tokens=False)
        return found


def tokens_in(cycle):
    """Every id that a cycle of the trace names."""
    found = cycle['drafted'] + cycle['tokens']
    for row in cycle['judged']:
        found.append(row['token'])
    for place in cycle.get('places', []):
        found += place['ids']
    for line in cycle.get('branches', []) + cycle.get('candidates', []):
        found += line
    return found


def as_script(run):
    """JSON that may stand in a script element: in ASCII, and no `<` that might end it or open another."""
    return json.dumps(run, separators=(',', ':')).replace('<', '\\u003c')
