"""Judges what lab/measure.py stored: `python -m lab.judge via` prints verdicts, `--report` writes all pages.

Rows are read as pandas frames. A paper's module `claims` has SOURCE, the text that the method is known from;
CLAIMS {text: (whose, rival, line)}; `figures(pair)`, which yields (text, Estimate) of what a Pair's records
allow; `tables(pairs)`, frames without verdicts.
"""
import argparse
import functools
import importlib
import math
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path as File
from statistics import median

try:
    import numpy
    import pandas
    import scipy.stats
except ImportError as missing:
    sys.exit(f'lab.judge: {missing.name} is not installed: pip install -r requirements-test.txt')

from lab.measure import LAB, PAPERS, read_stored
from model import MALFORMED, naming, new_file, require_that
from specmini import exit_status

FEW = 12                # below so many texts the range of single texts stands in place of an interval
RESAMPLES = 999
EMBEDDED = 'embedded'
PLAIN, BEST_SD = 'plain decoding', '`sd` at its best gamma'
BEGIN, END = '<!-- begin: written by `python -m lab.judge --report` -->', '<!-- end -->'


# ----------------------------------------------------------------------------------------------- estimates

@dataclass(frozen=True)
class Estimate:
    """A figure of texts, with 95 % of its resamples; below FEW texts the range of single ones."""
    figure: float
    low: float
    high: float
    n: int
    of: str = 'texts'           # of what there are n
    unit: str = ''              # `clock` of a speed, else ''
    ceiling: float = math.inf   # what the figure would be if every guess were kept
    blind: str = ''             # why there is no verdict, as words
    by: str = ''                # by what, if a claim has several figures

    def verdict(self, line):
        """HOLDS if the whole interval reaches the line, FAILS if none of it does."""
        if self.blind or math.isnan(self.figure):
            return f'NO VERDICT ({self.blind or "no such figure"})'
        if self.low >= line:
            return 'HOLDS'
        if self.ceiling < line:
            return 'OUT OF REACH HERE'
        return 'FAILS' if self.high < line else 'UNDECIDED'

    @property
    def interval(self):
        return f'{"range " * (self.n < FEW)}{number(self.low)} to {number(self.high)}'

    @property
    def spread(self):
        return f'{number(self.figure)} ({self.interval})'

    def __str__(self):
        most = f'at most {number(self.ceiling)}, ' * math.isfinite(self.ceiling)
        words = [number(self.figure), self.unit, f'({self.interval}, {most}n {self.n} {self.of})']
        return ' '.join(filter(None, words))


def estimate(figure, n, of='texts', method='BCa', singles=None, **more):
    """The Estimate of a function of numbers of texts [..., k] -> [...]; n: how many texts there are.

    singles: returns the figures of single texts, if they are no values of that function.
    Source: Efron 1987 (BCa), as scipy.stats.bootstrap computes it; percentiles where that is not defined.
    """
    texts = numpy.arange(n)
    with warnings.catch_warnings(), numpy.errstate(all='ignore'):
        warnings.simplefilter('ignore')                 # of a degenerate distribution
        if n < FEW:
            singles = singles() if singles else [figure(texts[i:i + 1]) for i in range(n)] or [math.nan]
            low, high = numpy.nanmin(singles), numpy.nanmax(singles)
        else:
            def on(sample, axis=-1):
                found = figure(numpy.moveaxis(sample, axis, -1).astype(int))
                return found.astype(float).round(9)     # alike on all CPUs
            found = scipy.stats.bootstrap((texts,), on, n_resamples=RESAMPLES, vectorized=True, batch=100,
                                          method=method, rng=numpy.random.default_rng(0))
            low, high = found.confidence_interval
            if not (math.isfinite(low) and math.isfinite(high)):
                low, high = numpy.nanquantile(found.bootstrap_distribution, [0.025, 0.975])
        return Estimate(float(figure(texts)), float(low), float(high), n, of, **more)


def mean(values, **more):
    """The Estimate of the mean of a value a text; None and nan are left out."""
    values = numpy.array(values, float)
    values = values[numpy.isfinite(values)]
    return estimate(lambda texts: values[texts].mean(-1), len(values), **more)


def share(parts, wholes, **more):
    """The Estimate of the sum of one value a text over the sum of another."""
    parts, wholes = numpy.asarray(parts, float), numpy.asarray(wholes, float)
    return estimate(lambda texts: parts[texts].sum(-1) / wholes[texts].sum(-1), len(parts), **more)


def area(scores, labels, kinds=None):
    """A function of texts: the chance that a true one scores above a false one, ties half (AUROC).

    scores, labels: a list for each text. kinds: another, if only those of one kind are compared; each pair
    counts the same. nan where there is no pair.
    """
    labels = [numpy.asarray(row, bool) for row in labels]
    kinds = kinds or [[''] * len(row) for row in labels]

    def one(texts):
        score, true, kind = (numpy.concatenate([of[i] for i in texts]) for of in (scores, labels, kinds))
        won = pairs = 0
        for each in numpy.unique(kind):
            right = true[kind == each]
            trues = right.sum()
            ranks = scipy.stats.rankdata(score[kind == each])
            won += ranks[right].sum() - trues * (trues + 1) / 2         # Mann and Whitney's U
            pairs += trues * (len(right) - trues)
        return float(won / pairs) if pairs else math.nan
    return lambda texts: numpy.apply_along_axis(one, -1, texts)


# ------------------------------------------------------------------------------------------------------ rows

class Pair:
    """What a paper stored of one pair of models."""

    def __init__(self, paper, name):
        self.paper, self.name = paper, name

    def has(self, record, paper=None):
        return self.file(record, paper).exists()

    def file(self, record, paper=None):
        return LAB / (self.paper if paper is None else paper) / 'results' / self.name / f'{record}.jsonl'

    def rows(self, record, paper=None):
        """The stored rows of a record; [] where there are none."""
        return stored(self.file(record, paper)).rows if self.has(record, paper) else []

    def frame(self, record, paper=None):
        """A frame of a list's rows, see `framed`; None where the pair has none."""
        return framed(self.file(record, paper)) if self.has(record, paper) else None

    @property
    def clock(self):
        """The frame of runs by the clock: of the paper's own list, else of lab/best's; or None."""
        return self.frame('clock') if self.has('clock') else self.frame('clock', 'best')

    @functools.cached_property
    def costs(self):
        """(seconds of passes over 0, 1, 2, ... positions by path, in plain decoding's steps) or None."""
        rows = self.rows('costs', '')
        step = rows[0]['target/full'][1] if rows else None
        return {path: [x / step for x in times] for path, times in rows[0].items()} if rows else None

    def ceiling(self, gamma, draft='draft/full', judge='target/full'):
        """Times plain decoding, if all of gamma guesses were always kept."""
        if not self.costs:
            return math.inf
        cycle = gamma * self.costs[draft][1] + at(self.costs[judge], gamma + 1)
        return (gamma + 1) / cycle


def at(curve, n):
    """A pass over n positions; beyond the longest that was timed in proportion."""
    longest = len(curve) - 1
    return curve[n] if n <= longest else curve[longest] * n / longest


@functools.cache
def stored(where):
    return read_stored(File(where))


@functools.cache
def framed(where):
    """A frame of a list's rows, a row a run.

    Beside what lab.measure stores: text, its family and place; second, the median of its turns; agreed, its
    tokens that the target would have chosen; full and positions, the target's passes and what they read;
    drafted, judged, kept: sums over cycles; unkept: cycles of which nothing is kept. Settings keep their
    order, and so do texts.
    """
    frame = pandas.DataFrame(stored(where).rows)
    frame['text'] = frame.family + ' ' + frame.place.astype(str)
    if 'cycles' not in frame:                           # of a text that is given
        return frame
    frame['second'] = frame.seconds.map(median)
    frame['agreed'] = frame.tokens - frame.wrong
    target = [{int(n): k for n, k in row.get('target/full', {}).items()} for row in frame.passes]
    frame['full'] = [sum(row.values()) for row in target]
    frame['positions'] = [sum(n * k for n, k in row.items()) for row in target]
    for i, name in enumerate(('drafted', 'judged', 'kept')):
        frame[name] = [sum(int(key.split()[i]) * k for key, k in row.items()) for row in frame.cycles]
    frame['unkept'] = [sum(k for key, k in row.items() if key.endswith(' 0')) for row in frame.cycles]
    frame['cycles'] = [sum(row.values()) for row in frame.cycles]
    return frame


def settings(frame, *starts):
    """The settings of a frame that are, or begin with, one of these words."""
    return [one for one in frame.setting.unique()
            if any(one == start or one.startswith(start + ' ') for start in starts)]


def plain_sd(frame):
    """The settings of `sd` by the draft model as it is by default: no look-ups, no other draft or bits."""
    return [name for name in settings(frame, 'sd') if not re.search('lookup|draft=|draft_bits', name)]


def knob(setting, name, default=math.nan):
    """The number that a setting gives a knob."""
    found = re.search(rf'(?<= ){name}=(\S+)', setting)
    return float(found[1]) if found else default


def array(frame, column, names=None):
    """[texts, settings] of a column; nan where a setting did not run."""
    table = frame.pivot(index='text', columns='setting', values=column)
    return table.loc[frame.text.unique(), list(names or frame.setting.unique())].to_numpy(float)


def without(values, counts):
    """Sums of values [texts, k] over resampled texts, once without each text and all of its copies.

    counts [..., texts]: how often a resample has each text; returns [..., texts, k].
    """
    return (counts @ values)[..., None, :] - counts[..., None] * values


def held_out(parts, figure, n, method='percentile', **more):
    """The Estimate of a figure of settings that are chosen on all texts but one and judged on that one.

    parts: a function of counts of texts [..., n] that yields numbers of each text [..., n], by what is chosen
    on the others; figure: a function of their sums over all texts.
    """
    def on(texts):
        counts = (texts[..., None] == numpy.arange(n)).sum(-2)
        return figure(*((counts * part).sum(-1) for part in parts(counts)))
    return estimate(on, n, method=method, singles=lambda: figure(*parts(numpy.ones(n))), **more)


def fastest(frame, names, unit='second', what='tokens', least=0.0):
    """A function of counts of texts [..., n] -> which setting is the fastest on the other texts, [..., n].

    It makes the most tokens (or `what`) a second (or `unit`) of the settings whose agreement is `least`, or
    as high as any's. Rounded, because the last bit, which differs between CPUs, would settle a tie.
    """
    made, took, tokens, agreed = (array(frame, column, names) for column in (what, unit, 'tokens', 'agreed'))

    def best(counts):
        pace = (without(made, counts) / without(took, counts)).round(9)
        if least:
            agrees = (without(agreed, counts) / without(tokens, counts)).round(9)
            pace[agrees < numpy.minimum(least, agrees.max(-1, keepdims=True))] = -1
        return pace.argmax(-1)
    return best


def over(frame, mine, rivals, unit='second', what='tokens', least=0.0, **more):
    """The Estimate of the fastest of some settings over the fastest of others, see `fastest`, `held_out`."""
    mine, rivals = ([names] if isinstance(names, str) else names for names in (mine, rivals))
    sides = [(fastest(frame, names, unit, what, least), array(frame, what, names), array(frame, unit, names))
             for names in (mine, rivals)]
    n = frame.text.nunique()

    def parts(counts):
        for best, *columns in sides:
            chosen = best(counts)
            yield from (column[numpy.arange(n), chosen] for column in columns)
    return held_out(parts, lambda made, took, rival_made, rival_took: made / took / (rival_made / rival_took),
                    n, 'BCa' if len(mine) == len(rivals) == 1 else 'percentile',
                    unit='clock' if unit == 'second' else '', **more)


def over_best_sd(frame, mine):
    """The Estimate of the fastest of some settings over tuned `sd`; one setting is not tuned."""
    return over(frame, mine, plain_sd(frame), blind='only `sd` is tuned' * (len(mine) == 1))


def winner(frame, names):
    """The name of the setting that is the fastest on all texts."""
    total = frame.groupby('setting')[['tokens', 'second']].sum()
    return (total.tokens / total.second)[names].idxmax()


def gap(frame, mine, rival, **more):
    """The Estimate of right answers of one setting less another's, a text."""
    values = array(frame, 'right', [mine, rival])
    return mean(values[:, 0] - values[:, 1], **more)


def pairs_of(paper):
    """[Pair] of a paper, embedded first; speeds are lab/best's."""
    files = [where for one in (paper, 'best') for where in (LAB / one / 'results').glob('*/*')]
    names = sorted({where.parent.name for where in files})
    return [Pair(paper, name) for name in sorted(names, key=lambda name: not name.startswith(EMBEDDED))]


# ---------------------------------------------------------------------------------------------------- tables

def number(x):
    """A figure with two digits after the point, three where it is near 1; '' for nan."""
    if isinstance(x, str) or x is None:
        return x or ''
    return '' if not math.isfinite(x) else f'{x:.3f}' if 0.9 <= x < 1.1 else f'{x:.2f}'


def overview(frame, plain='ar', **columns):
    """A frame without verdicts, a row a setting.

    Times plain decoding by the clock, with its interval; tokens a full pass, draft tokens kept a cycle, the
    share of drafted ones that were not, agreement, right answers; further columns: functions of a setting.
    """
    lines = []
    for name in frame.setting.unique():
        mine = frame[frame.setting == name]
        total = mine[['tokens', 'full', 'kept', 'cycles', 'agreed', 'drafted']].sum()
        line = dict(setting=f'`{name}`')
        found = over(frame, name, plain)
        line['over plain'] = found.spread * (not math.isnan(found.figure))
        line['tokens a full pass'] = total.tokens / total.full if total.full else math.nan
        line['kept a cycle'] = total.kept / total.cycles
        line['dropped'] = 1 - total.kept / total.drafted if total.drafted else math.nan
        line['agreement'] = f'{total.agreed / total.tokens:.1%}' if mine.agreed.notna().all() else ''
        right = mine.right.dropna()
        line['right'] = f'{right.mean():.1%}' if len(right) else ''
        lines.append(line | {column: of(name) for column, of in columns.items()})
    return pandas.DataFrame(lines)


def grid(names, of, row, column):
    """A frame of a function of settings: a row for each value of one knob, a column for each of another."""
    cells = {}
    for name in names:
        cells.setdefault(f'{knob(name, row):g}', {})[f'{column}={knob(name, column):g}'] = of(name)
    return pandas.DataFrame([{row: value} | line for value, line in cells.items()])


def markdown(frame):
    """Lines of a Markdown table, without columns that are empty throughout."""
    text = frame.map(number).replace('', math.nan).dropna(axis=1, how='all').fillna('')
    lines = text.to_markdown(index=False, disable_numparse=True).splitlines()
    return [re.sub(r':?-{3,}', '---', re.sub(' {2,}', ' ', line)) for line in lines] + ['']


# ------------------------------------------------------------------------------------------------------ pages

def claims_of(paper):
    """A paper's module `claims`."""
    return importlib.import_module(f'lab.{paper}.claims')


def verdicts(paper):
    """A frame: each claim, whose it is, its rival and line, a column a pair."""
    module = claims_of(paper)
    lines = {text: {'claim': text, 'whose': whose, 'rival': rival, 'at least': f'{line:g}'}
             for text, (whose, rival, line) in module.CLAIMS.items()}
    for pair in pairs_of(paper):
        for text, made in module.figures(pair):
            cell = f'{made.by}{made.verdict(module.CLAIMS[text][2])} {made}'
            earlier = lines[text].get(pair.name)
            lines[text][pair.name] = f'{earlier}; {cell}' if earlier else cell
    return pandas.DataFrame(lines.values())


def page_lines(paper):
    """Lines of a paper's page: the source, the verdicts, tables without verdicts."""
    module = claims_of(paper)
    lines = [f'Source of the method: {module.SOURCE}.',
             "[How claims are judged, what records were measured on, why the deep target's are upper bounds]"
             '(../README.md#measure-then-judge).', '',
             *markdown(verdicts(paper))]
    for title, frame in module.tables(pairs_of(paper)):
        lines += [f'**{title}**', '', *markdown(frame)]
    return lines


def record_lines():
    """Lines of the table of all records: what their heads say, those of which it is the same in one row."""
    rows = {}
    for where in sorted(LAB.glob('**/results/*/*.jsonl')):
        head, found = stored(where)
        paper = where.relative_to(LAB).parts[0].replace('results', '')
        weights = ''.join(f'{name} {digits[:6]}; ' for name, digits in head['models'].items())
        machine = head.get('card') or f'{head.get("cpu", "?")}, {head.get("threads", "?")}'
        same = (where.parent.name, weights + head['made'], machine, head['dtype'],
                f'{head["commit"]}, {head["date"]}')
        rows.setdefault(same, []).append(f'{paper} {where.stem} ({len(found)})'.strip())
    head = 'pair', 'weights', 'machine, threads', 'dtype', 'commit, date', 'records (rows)'
    lines = [dict(zip(head, (*said, ', '.join(records)))) for said, records in sorted(rows.items())]
    return markdown(pandas.DataFrame(lines))


def pages(papers):
    """{file: its text} of the pages of these papers, and of the laboratory's own.

    What stands between a page's two markers is written anew; ValueError if it does not have both.
    """
    texts = {}
    for paper, lines in {**{paper: page_lines(paper) for paper in papers}, '': record_lines()}.items():
        where = LAB / paper / 'README.md'
        before, begin, rest = where.read_text(encoding='utf-8').partition(BEGIN)
        _, end, after = rest.partition(END)
        require_that(begin and end, f'{where} lacks the lines {BEGIN} and {END}')
        texts[where] = '\n'.join([before + begin, '', *lines]) + end + after
    return texts


def run():
    """Prints or writes what the flags ask for."""
    parser = argparse.ArgumentParser(prog='python -m lab.judge', description=__doc__.split('\n')[0])
    parser.add_argument('papers', nargs='*', metavar='PAPER',
                        help=f'of {", ".join(PAPERS)} (default: all), or a file of rows: its settings')
    parser.add_argument('--report', action='store_true', help='write the pages')
    args = parser.parse_args()
    files = [one for one in args.papers if one.endswith('.jsonl')]
    unknown = [paper for paper in args.papers if paper not in PAPERS and paper not in files]
    require_that(not unknown,
                 f'found {", ".join(unknown)}, expected some of {", ".join(PAPERS)}, or a .jsonl')
    for file in files:
        head, _ = stored(file)
        with naming(file, MALFORMED, '; expected runs of lab.measure, each once'):
            require_that('setting' not in head, 'its first line is no head')
            frame = framed(file)
            print(*markdown(overview(frame, frame.setting[0])), sep='\n')
    papers = [paper for paper in args.papers if paper in PAPERS] or ([] if files else PAPERS)
    if args.report:
        for where, text in pages(papers).items():
            with new_file(where) as file:
                file.write(text)
            print(where)
        return
    for paper in papers:
        print(f'\n{paper}', *markdown(verdicts(paper)), sep='\n')


main = functools.partial(exit_status, 'lab.judge', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
