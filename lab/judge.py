"""Judges what lab/measure.py stored: `python -m lab.judge via` prints verdicts, `--report` writes all pages.

A paper's module `claims` has SOURCE, the text that the method is known from; CLAIMS, the claims as words;
`figures(records)`, which yields what becomes of them on a pair; `sweeps(pairs)`, tables without verdicts,
each (titles of columns, rows of cells).
A Claim HOLDS if its whole 95 % interval over texts reaches its line, FAILS if none of it does, and is else
UNDECIDED.
"""
import argparse
import functools
import importlib
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

try:
    import numpy
    import scipy.stats
except ImportError as missing:
    sys.exit(f'lab.judge: {missing.name} is not installed: pip install -r requirements-test.txt')

from lab.measure import LAB, PAPERS, file_of, read_stored
from model import new_file, require_that

FEW = 12                # below so many texts the range of single texts stands in place of an interval
MANY = 30               # below so many the interval is as much wider as Student's t is than the normal
RESAMPLES = 500
CLOCK, MODELLED = 'clock', 'modelled'       # kinds of speed; a page says which beside the figure
UNITS = {CLOCK: 'seconds', MODELLED: 'steps'}       # figure of a run that a kind of speed counts
EMBEDDED = 'embedded'
SLOPE = 0.016           # what a further position adds to a pass, of the pass: about that of a card
USUAL = 'sd 3'          # whose answers are plain decoding's, on lab/best's record of them
LONGEST = 512           # positions of the longest pass whose cost is given
GAMMAS = range(1, 17)   # of sd, whose passes follow from where the draft's guesses are right
PLAIN, BEST_SD = 'plain decoding', '`sd`, greedy drafts, the fastest gamma'
BEGIN, END = '<!-- begin: written by `python -m lab.judge --report` -->', '<!-- end -->'


# ---------------------------------------------------------------------------------------------- claims

@dataclass(frozen=True)
class Claim:
    """A sentence of somebody as a figure of stored rows that has to reach a line."""
    text: str           # the same words on every pair: pairs are columns of one row
    whose: str          # ours, or the source's with its own words, twelve at most
    rival: str          # what the figure compares with, and how that was tuned; '' where there is none
    line: float         # the claim says that the figure is at least this
    texts: object       # numbers of the texts that are resampled
    figure: Callable    # function of such numbers -> float; nan where a resample has no such figure
    kind: str = ''      # of a speed: CLOCK or MODELLED


@dataclass(frozen=True)
class Finding:
    """A judged Claim."""
    claim: Claim
    figure: float
    low: float          # 95 % interval; below FEW texts the lowest and the highest of single texts
    high: float

    @property
    def verdict(self):
        if self.low >= self.claim.line:
            return 'HOLDS'
        return 'FAILS' if self.high < self.claim.line else 'UNDECIDED'

    @property
    def cell(self):
        """The cell of a page: verdict, figure, kind of speed, interval or range, number of texts."""
        n = len(self.claim.texts)
        words = [self.verdict, number(self.figure), self.claim.kind]
        interval = f'{"range " * (n < FEW)}{number(self.low)} to {number(self.high)}'
        return f'{" ".join(filter(None, words))} ({interval}, n {n})'


def judge(claim):
    """The Finding of a Claim."""
    texts = numpy.asarray(claim.texts)
    return Finding(claim, float(claim.figure(texts)), *interval(texts, claim.figure))


def interval(texts, figure):
    """(low, high): 95 % by the bias-corrected and accelerated bootstrap over the texts.

    Percentiles of the resamples that have the figure, where that is not defined. Below MANY texts wider by
    Student's t; below FEW the lowest and the highest of single texts. Source: Efron 1987 (BCa), as
    scipy.stats.bootstrap computes it.
    """
    if len(texts) < FEW:
        singles = [float(figure(texts[i:i + 1])) for i in range(len(texts))]
        there = [x for x in singles if math.isfinite(x)] or [math.nan]
        return min(there), max(there)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')                 # of a degenerate distribution: handled below
        found = scipy.stats.bootstrap((texts,), figure, n_resamples=RESAMPLES, vectorized=False,
                                      method='BCa', rng=numpy.random.default_rng(0))
    low, high = found.confidence_interval
    if len(texts) < MANY:
        wider = scipy.stats.t.ppf(0.975, len(texts) - 1) / scipy.stats.norm.ppf(0.975)
        middle = figure(texts)
        low, high = middle - wider * (middle - low), middle + wider * (high - middle)
    if not (math.isfinite(low) and math.isfinite(high)):
        there = found.bootstrap_distribution[numpy.isfinite(found.bootstrap_distribution)]
        low, high = numpy.quantile(there, [0.025, 0.975]) if len(there) else (math.nan, math.nan)
    return float(low), float(high)


# ----------------------------------------------------------------------------------------- settings on texts

class Costs:
    """Times of passes, in plain decoding's steps."""

    def __init__(self, row):
        self.curves = row               # {reader/path: [0, seconds of a pass over 1, 2, ... positions]}
        self.step = row['target/full'][1]

    def at(self, cost):
        """Costs as if a draft pass took `cost` of a target pass, a slim one its share; see SLOPE."""
        slim = self.curves['target/slim'][1] / self.step
        bases = {'target/full': 1.0, 'target/slim': slim, 'draft/full': cost}
        return Costs({path: [0.0] + [base * (1 + SLOPE * n) for n in range(LONGEST)]
                      for path, base in bases.items()})

    def of_pass(self, path, positions):
        """Steps that a pass takes; a path that was not timed costs what its reader's full path does.

        Beyond the longest that was timed, passes grow as the target's do, and those in proportion.
        """
        reader, _, name = path.partition('/')
        full = self.curves['target/full']
        curve = self.curves.get(path) or self.curves[f'{reader}/slim' if 'slim' in name else f'{reader}/full']
        timed = min(positions, len(curve) - 1)
        longest = min(positions, len(full) - 1)
        return curve[timed] * full[longest] / full[timed] * positions / longest / self.step

    def steps_of(self, run):
        """Steps that the passes of a run take; None where its passes were not stored.

        A run may be stored with the share `slim` of the weights that its own slim path reads.
        """
        if 'passes' not in run:
            return None
        total = 0.0
        for path, counts in run['passes'].items():
            share = 1.0
            if 'slim' in run and path == 'target/slim':
                path, share = 'target/full', run['slim']
            for positions, passes in counts.items():
                total += share * passes * self.of_pass(path, int(positions))
        return total


class Runs:
    """Rows of `lab.measure.run_row` as arrays [R texts, S settings]; nan where a setting did not run."""

    def __init__(self, rows, costs=None):
        """rows: dicts with `family`, `place` and `runs`; costs: a Costs, for figure `steps`."""
        self.names = list(dict.fromkeys(name for row in rows for name in row['runs']))
        self.number = {name: i for i, name in enumerate(self.names)}
        self.families = numpy.array([row['family'] for row in rows])
        self.places = numpy.array([row['place'] for row in rows])
        self.size = len(rows)
        self.every = numpy.arange(self.size)
        stored = {key for row in rows for run in row['runs'].values() for key in run}
        self.sums = {key: self.array(rows, lambda run, key=key: run.get(key)) for key in stored - {'passes'}}
        if 'passes' in stored:                          # full passes of the target
            self.sums['full'] = self.array(
                rows, lambda run: sum(run['passes'].get('target/full', {}).values()))
        if costs:
            self.sums['steps'] = self.array(rows, costs.steps_of)

    def array(self, rows, figure_of):
        """[R, S] of a function of a run."""
        found = numpy.full((self.size, len(self.names)), math.nan)
        for i, row in enumerate(rows):
            for name, run in row['runs'].items():
                value = figure_of(run)
                found[i, self.number[name]] = math.nan if value is None else value
        return found

    def having(self, *names, figure='tokens'):
        """Numbers of the texts on which all of these settings have the figure."""
        return numpy.flatnonzero(numpy.isfinite(self.sums[figure][:, self.columns(names)]).all(1))

    def starting(self, *words):
        """The settings whose names start with one of these words."""
        return [name for name in self.names if name.startswith(words)]

    def columns(self, names):
        """The columns of one setting or of a list of them."""
        return self.number[names] if isinstance(names, str) else [self.number[name] for name in names]

    def total(self, figure, names, texts):
        """The sum of a figure over these texts, of one setting or an array [S] of several."""
        return self.sums[figure][:, self.columns(names)][texts].sum(0)

    def share(self, figure, of, names, texts):
        """The sum of one figure over the sum of another; nan where that is 0."""
        with numpy.errstate(invalid='ignore', divide='ignore'):
            return self.total(figure, names, texts) / self.total(of, names, texts)

    def pace(self, names, texts, kind):
        """Tokens a second (CLOCK) or a step (MODELLED)."""
        return self.share('tokens', UNITS[kind], names, texts)

    def agreement(self, names, texts):
        """The share of the tokens that the target would have written after the same text."""
        return 1 - self.share('wrong', 'tokens', names, texts)


# -------------------------------------------------------------------------------- figures: functions of texts

def over(runs, name, rivals, kind, what='tokens'):
    """The figure: a setting's tokens (or `what`) a unit over its rival's, of the same texts.

    kind: CLOCK or MODELLED, or a count such as `cycles`. rivals: a setting, or several runs of one, which are
    added up.
    """
    unit = UNITS.get(kind, kind)
    rivals = [rivals] if isinstance(rivals, str) else rivals

    def figure(texts):
        whats, units = (runs.total(count, rivals, texts).sum() for count in (what, unit))
        rival = whats / units if units else math.nan
        return runs.share(what, unit, name, texts) / rival if rival else math.nan
    return figure


def tuned_over(runs, names, rivals, kind, agreement=0.0):
    """The figure: the fastest of some settings over the fastest of others.

    Both are chosen on the texts of even places and judged on those of odd ones, and the other way round; the
    geometric mean, in which each half counts as often as its texts. agreement: see fastest.
    """
    odd = runs.places % 2 == 1

    def figure(texts):
        total = 0.0
        for half in (odd, ~odd):
            judged_on, chosen_on = texts[half[texts]], texts[~half[texts]]
            if not len(chosen_on):                      # a resample without any: all texts of that half
                chosen_on = numpy.flatnonzero(~half)
            if len(judged_on):
                mine, rival = (runs.pace(fastest(runs, some, chosen_on, kind, agreement), judged_on, kind)
                               for some in (names, rivals))
                total += len(judged_on) * math.log(mine / rival)
        return math.exp(total / len(texts))
    return figure


def fastest(runs, names, texts, kind, agreement):
    """The fastest setting on these texts of those that agree so often; if none does, the most agreeing one.

    Scores are rounded, because the last bit of a matrix product, which differs between CPUs, would settle a
    tie.
    """
    agrees = runs.agreement(names, texts)
    score = numpy.where(agrees >= agreement, runs.pace(names, texts, kind), agrees - 1)
    return names[numpy.nan_to_num(score, nan=-1).round(9).argmax()]


def gap(values):
    """The figure: the mean of a value a text, as of a difference between two settings; nan is left out."""
    values = numpy.array(values, float)                 # None becomes nan
    there = numpy.isfinite(values)
    return ratio(numpy.where(there, values, 0), there)


def ratio(parts, wholes):
    """The figure: the sum of one value a text over the sum of another."""
    parts, wholes = numpy.asarray(parts, float), numpy.asarray(wholes, float)

    def figure(texts):
        whole = wholes[texts].sum()
        return parts[texts].sum() / whole if whole else math.nan
    return figure


def area(scores, labels, kinds=None):
    """The figure: the chance that a true one scores above a false one, ties half (AUROC).

    scores, labels: a list for each text. kinds: another, if only those of one kind are compared; each pair
    counts the same. nan where there is no pair.
    """
    labels = [numpy.asarray(row, bool) for row in labels]
    kinds = kinds or [[''] * len(row) for row in labels]

    def figure(texts):
        score, true, kind = (numpy.concatenate([of[i] for i in texts]) for of in (scores, labels, kinds))
        won = pairs = 0
        for one in numpy.unique(kind):
            right = true[kind == one]
            trues = right.sum()
            ranks = scipy.stats.rankdata(score[kind == one])
            won += ranks[right].sum() - trues * (trues + 1) / 2         # Mann and Whitney's U
            pairs += trues * (len(right) - trues)
        return float(won / pairs) if pairs else math.nan
    return figure


# ------------------------------------------------------------------------------------------------ the records

class Records(dict):
    """{name: Stored} of a paper on one pair, and what it needs to judge them."""

    def __init__(self, paper, pair):
        files = sorted((LAB / paper / 'results' / pair).glob('*.jsonl'))
        super().__init__({where.stem: read_stored(where) for where in files})
        self.pair = pair

    @functools.cached_property
    def costs(self):
        """The Costs of the pair's passes, one record for all papers; None where they were not measured."""
        where = file_of('', self.pair, 'costs')
        return Costs(read_stored(where).rows[0]) if where.exists() else None

    def runs(self, name):
        """The Runs of a record of settings on texts."""
        return Runs(self[name].rows, self.costs)

    def runs_if(self, name):
        """The Runs of a record, or None where the pair has none."""
        return self.runs(name) if name in self else None

    @functools.cached_property
    def best(self):
        """The Runs of lab/best that verdicts on speeds rest on, by the clock; None where there are none."""
        return Records('best', self.pair).runs_if('compositions')

    def counted(self, cost=None):
        """The Runs of lab/best's record `counts`, with plain decoding and sd; None without that.

        cost: see Costs.at; without it passes cost what was measured.
        """
        stored = Records('best', self.pair)
        if 'counts' not in stored:
            return None
        rows = []
        for row in stored['counts'].rows:
            runs = dict(row['runs'], ar=run_of(row['tokens'], {'target/full': {1: row['tokens']}}))
            runs |= {f'sd {gamma}': replayed(row['hit'], gamma) for gamma in GAMMAS}
            rows.append(row | dict(runs=runs))
        return Runs(rows, stored.costs.at(cost) if cost else stored.costs)

    def speeds(self, settings):
        """Yields (text, texts, figure, kind) of {text: (setting, how its rivals begin)} on `best`."""
        runs = self.best
        for text, (name, rivals) in settings.items() if runs else ():
            if name in runs.names:
                rivals = runs.starting(rivals)
                tuned = rivals != runs.starting('ar')           # which are runs of one setting
                figure = tuned_over(runs, [name], rivals, CLOCK) if tuned else over(runs, name, rivals, CLOCK)
                yield text, runs.every, figure, CLOCK


def answers(records, text, setting, plain=USUAL):
    """Yields (text, texts, figure, kind) of a setting's right answers less those of plain decoding.

    Of the paper's own record of answers, where `plain` is that, or of lab/best's, where USUAL is.
    """
    stored = records.get('answers') or Records('best', records.pair).get('answers')
    rival = plain if 'answers' in records else USUAL
    rows = [row for row in stored.rows if row.get(setting) is not None] if stored else []
    won = [row[setting] - row[rival] for row in rows]
    if won:
        yield text, numpy.arange(len(won)), gap(won), ''


def run_of(tokens, passes):
    """A run of a lossless setting, from its passes {reader/path: {positions: passes}}."""
    cycles = sum(passes['target/full'].values())
    return dict(tokens=tokens, wrong=0, cycles=cycles, accepted=tokens - cycles, passes=passes)


def replayed(hits, gamma):
    """The run of sd with greedy drafts of gamma tokens along a text.

    hits: of each token whether it is the draft's first choice; a guess is kept where all before it are right.
    The last block drafts a token more than a run that ends at its length, not at an end token.
    """
    drafts, targets = Counter(), Counter()
    place = 0
    while place < len(hits):
        n = min(gamma, len(hits) - place)
        kept = 0
        while kept < n and hits[place + kept]:
            kept += 1
        place += kept + 1
        drafts[1] += n
        targets[n + 1] += 1
    return run_of(len(hits), {'draft/full': drafts, 'target/full': targets})


def measured_pairs(paper, beside=()):
    """{pair: Records} of a paper, and of the pairs of others beside it, embedded first."""
    files = [where for one in (paper, *beside) for where in (LAB / one / 'results').glob('*/*.jsonl')]
    names = {where.parent.name for where in files}
    names = sorted(names, key=lambda name: (not name.startswith(EMBEDDED), name))
    return {name: Records(paper, name) for name in names}


def claims_of(paper):
    """A paper's module `claims`."""
    return importlib.import_module(f'lab.{paper}.claims')


def findings_of(paper):
    """{claim's text: {pair: Finding}} of a paper on all its pairs."""
    module, found = claims_of(paper), {}
    for pair, records in measured_pairs(paper, ['best']).items():       # whose speeds all have
        for text, texts, figure, kind in module.figures(records):
            claim = Claim(text, *module.CLAIMS[text], texts, figure, kind)
            found.setdefault(text, {})[pair] = judge(claim)
    return found


# ------------------------------------------------------------------------------------------------------ pages

def number(x):
    """A figure with two digits after the point, three where it is near 1."""
    if not math.isfinite(x):
        return '-'
    return f'{x:.3f}' if 0.9 <= x < 1.1 else f'{x:.2f}'


def table_lines(head, rows):
    """Lines of a Markdown table."""
    lines = []
    for cells in (head, ['---'] * len(head), *rows):
        cells = ['-' if x in (None, '') else number(x) if isinstance(x, float) else str(x) for x in cells]
        lines.append(f'| {" | ".join(cells)} |')
    return [*lines, '']


def short(pair):
    """A pair's name for a narrow column: `qwen` of `qwen-1.5b+0.5b`, `mid` of `embedded+mid`, `qwenx5`."""
    costly = re.search(r'x\d+(?=\+)', pair)
    return pair.removeprefix(f'{EMBEDDED}+').split('-')[0] + (costly[0] if costly else '')


def cells_of(by_pair):
    """[cell of the embedded pairs, cell of the real ones] of {pair: Finding}."""
    cells = {True: [], False: []}
    for pair, finding in by_pair.items():
        who = '' if pair == EMBEDDED else f'{short(pair)}: '
        cells[pair.startswith(EMBEDDED)].append(who + finding.cell)
    return ['; '.join(cells[embedded]) for embedded in (True, False)]


CLAIM_HEAD = 'claim', 'whose', 'rival', 'at least', 'embedded pair', 'real models'


def claim_rows(findings):
    """Rows with the columns CLAIM_HEAD of {claim's text: {pair: Finding}}, a quote once."""
    quoted = ''
    for text, by_pair in findings.items():
        claim = next(iter(by_pair.values())).claim
        whose = 'as above' if claim.whose == quoted != 'ours' else claim.whose
        quoted = claim.whose
        yield text, whose, claim.rival, f'{claim.line:g}', *cells_of(by_pair)


def page_lines(paper):
    """Lines of a paper's page: the source, the verdicts, tables without verdicts."""
    module = claims_of(paper)
    lines = [f'Source of the method: {module.SOURCE}.',
             '[How claims are judged, what records were measured on](../README.md#measure-then-judge).', '']
    tables = [(CLAIM_HEAD, claim_rows(findings_of(paper))), *module.sweeps(measured_pairs(paper))]
    for head, rows in tables:
        rows = list(rows)
        lines += table_lines(head, rows) if rows else []
    return lines


RECORD_HEAD = 'pair', 'weights', 'slim skips', 'machine', 'dtype', 'by', 'commit, date', 'records (rows)'


def ranges(numbers):
    """`8-11, 14` of 8, 9, 10, 11, 14."""
    first = [n for n in numbers if n - 1 not in numbers]
    last = [n for n in numbers if n + 1 not in numbers]
    return ', '.join(f'{a}-{b}' if a < b else f'{a}' for a, b in zip(first, last))


def record_lines():
    """Lines of the table of all records: what their heads say, those of which it is the same in one row.

    `?` stands where a head does not say.
    """
    rows = {}
    for where in sorted(LAB.glob('**/results/*/*.jsonl')):
        head, stored = read_stored(where)
        paper, pair = where.relative_to(LAB).parts[0].replace('results', ''), where.parent.name
        weights = ''.join(f'{name} {found[:6]}; ' for name, found in head['models'].items())
        cpu = f'{head["cpu"]}, {head["threads"]}' if 'cpu' in head else '?'
        cpu = cpu if head.get('device', 'cpu') == 'cpu' else f'{head["device"]}; {cpu}'
        skip = ranges(head['skip'] or []) if 'skip' in head else '?'
        same = (pair, weights + head['made'], skip, cpu, head.get('dtype', '?'), head['by'],
                f'{head["commit"]}, {head["date"]}')
        rows.setdefault(same, []).append(f'{paper} {where.stem} ({len(stored)})'.strip())
    return table_lines(RECORD_HEAD, [(*said, ', '.join(records)) for said, records in sorted(rows.items())])


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


def main():
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog='python -m lab.judge', description=__doc__.split('\n')[0])
    parser.add_argument('papers', nargs='*', metavar='PAPER', help=f'of {", ".join(PAPERS)} (default: all)')
    parser.add_argument('--report', action='store_true', help='write the pages')
    args = parser.parse_args()
    unknown = [paper for paper in args.papers if paper not in PAPERS]
    if unknown:
        parser.error(f'found {", ".join(unknown)}, expected some of {", ".join(PAPERS)}')
    papers = args.papers or PAPERS
    if args.report:
        for where, text in pages(papers).items():
            with new_file(where) as file:
                file.write(text)
            print(where)
        return 0
    for paper in papers:
        findings = findings_of(paper)
        print(f'\n{paper}', *table_lines(CLAIM_HEAD, claim_rows(findings)), sep='\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
