"""The page of a traced run, `python -m lab.page --prompt TEXT run.html`: a file that opens from disk.

The template is page.html; it is given the trace as JSON. What is noted for it: traced.py.
"""
import sys
from functools import partial
from pathlib import Path as File

from lab.page.traced import TracedEngine, note
from lab.times import acceptance_by_place, parse_run, plain_step, weights_of
from model import check_writable, knobs_of, new_file, require_that
from specmini import exit_status, json_line, statistics, write_texts

TEMPLATE = File(__file__).parent / 'page.html'


def run(argv):
    """Writes the page of a run: specmini's flags, then the name of the file."""
    flags, where = argv[:-1], (argv or [''])[-1]
    require_that(where.endswith('.html'), "expected specmini's flags, then the page: --prompt TEXT run.html")
    args = parse_run(flags)
    check_writable(where)
    texts, weights = [], {}
    for text in write_texts(args, TracedEngine, show=note):
        texts.append(text)
        weights |= weights_of(text.session)
    with new_file(where) as file:
        write_page(file, texts, weights, plain_step(text.session))


main = partial(exit_status, 'lab.page', lambda: run(sys.argv[1:]))          # returns the exit status


def write_page(file, texts, weights, step):
    """Writes the page of these specmini.Texts.

    weights: {reader/path: bytes that a pass reads}; step: seconds of a step of plain decoding.
    """
    engine = texts[0].engine
    shown = {}                                          # number of a prompt: its ids and lanes
    for text in texts:
        prompt = text.session.tokens[:text.session.begin]
        shown.setdefault(text.number, dict(prompt=prompt, lanes=[]))['lanes'].append(lane(text))
    run = dict(
        texts=list(shown.values()),
        words=words_of(shown.values(), engine.tokenizer),
        shares={path: weight / weights['target/full'] for path, weight in weights.items()},
        step=1000 * step,
        temperature=engine.temperature,
        models={role: File(getattr(engine, role)).name for role in engine.models})
    # in a script element: in ASCII, and no `<` that might end it or open another
    trace = json_line(run).replace('<', '\\u003c')
    file.write(TEMPLATE.read_text(encoding='utf-8').replace('TRACE', trace, 1))


def lane(text):
    """The dict of one text by one method."""
    stats = statistics(text.cycles) | dict(acceptance_by_place=acceptance_by_place(text.cycles))
    return dict(method=text.name, lossless=text.engine.lossless(text.method), stats=stats,
                knobs={knob: getattr(text.method, knob) for knob in knobs_of(type(text.method))},
                seed=text.engine.seed + text.number, cycles=list(map(line, text.cycles, text.session.notes)))


def line(cycle, notes):
    """The dict of a Cycle: each draft token has a row with its verdict, or that of its whole step."""
    judged = []
    for verdict in cycle.judged:
        row = vars(verdict) | verdict.signals
        row = {name: value for name, value in row.items() if not isinstance(value, (list, dict))}
        judged += [dict(token=token) | row for token in verdict.tokens]
    ms = notes.pop('pass_ms', {})                       # {reader/path: milliseconds of its passes}
    passes = {path: dict(passes=n, positions=positions, ms=round(ms.get(path, 0.0), 3))
              for path, (n, positions) in cycle.passes.items()}
    return dict(drafted=cycle.drafted, judged=judged, tokens=cycle.tokens, labels=cycle.labels, passes=passes,
                ms=round(1000 * cycle.seconds, 3)) | notes


def words_of(shown, tokenizer):
    """{id: its text} of every token that the page may show."""
    tokens = set()
    for text in shown:
        tokens.update(text['prompt'])
        for cycle in [cycle for lane in text['lanes'] for cycle in lane['cycles']]:
            tokens.update(cycle['drafted'], cycle['tokens'], *cycle.get('branches', []),
                          *[place['ids'] for place in cycle.get('places', [])], *cycle.get('candidates', []))
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokens)}
