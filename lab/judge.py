"""Judges what lab/measure.py stored: `python -m lab.judge via` prints verdicts, `--report` writes all pages.

`--cost 0.05` judges speeds by the stored counts of passes, as if a draft pass took 0.05 of a target pass.

A paper's module `claims` has `claims(records)`, which yields Claims, and `sweeps(pairs)`, a table of figures
without verdicts. A Claim HOLDS if its whole 95 % interval over texts reaches its line, FAILS if none of the
interval does, and is else UNDECIDED.
"""
import argparse
import functools
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

try:
    import numpy
    import scipy.stats
except ImportError as missing:
    sys.exit(f'lab.judge: {missing.name} is not installed: pip install -r requirements-test.txt')

from lab import at_least
from lab.measure import LAB, PAPERS, file_of, read_stored
from model import require_that

FEW = 12                # below so many texts the range of single texts stands in place of an interval
MANY = 30               # below so many the interval is as much wider as Student's t is than the normal
CHOSEN_ON = 4           # texts that a setting is chosen on, at least
RESAMPLES = 500
CLOCK, MODELLED = 'clock', 'modelled'       # kinds of speed; a page says which beside the figure
UNITS = {CLOCK: 'seconds', MODELLED: 'steps'}       # figure of a run that a kind of speed counts
EMBEDDED = 'embedded'
PAPERS_COST = 0.05      # of a draft pass, in target passes: about that of the papers' pairs
POSITION = 0.016        # what each further position adds to a pass, of the pass
LONGEST = 512           # positions of the longest pass whose cost is given
BEGIN, END = '<!-- begin: written by `python -m lab.judge --report` -->', '<!-- end -->'


# ---------------------------------------------------------------------------------------------- claims

@dataclass(frozen=True)
class Claim:
    """A sentence of somebody as a figure of stored rows that has to reach a line."""
    text: str           # the same words on every pair: pairs are columns of one row
    whose: str          # paper, notes (on the paper) or ours; with the paper's own figure, if it has one
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
        """The cell of a page: verdict, figure, kind of speed, interval, and n where there are few texts."""
        n = len(self.claim.texts)
        few = f'n {n}: ' if n < FEW else ''
        kind = f' {self.claim.kind}' if self.claim.kind else ''
        return f'{self.verdict} {number(self.figure)}{kind} ({few}{number(self.low)} to {number(self.high)})'


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

    def __init__(self, row, given=None):
        self.curves = row               # {reader/path: [0, seconds of a pass over 1, 2, ... positions]}
        self.step = row['target/full'][1]
        self.given = given              # the cost of a draft pass, where it was not measured

    def at(self, cost, position):
        """Costs as if a draft pass took `cost` of a target pass, a slim one its share; see POSITION."""
        slim = self.curves['target/slim'][1] / self.step
        bases = {'target/full': 1.0, 'target/slim': slim, 'draft/full': cost, 'mid/full': 1.0}
        return Costs({path: [0.0] + [base * (1 + position * n) for n in range(LONGEST)]
                      for path, base in bases.items()}, cost)

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
        """Steps that the passes of a run take; those that it was stored with, if its passes were not.

        A run may be stored with the share `slim` of the weights that its own slim path reads.
        """
        if 'passes' not in run:
            return None if self.given else run.get('steps')
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
        stored = {key for row in rows for run in row['runs'].values() for key in run}
        self.sums = {key: self.array(rows, lambda run, key=key: run.get(key)) for key in stored - {'passes'}}
        if 'passes' in stored:                          # full passes of the target
            self.sums['full'] = self.array(
                rows, lambda run: sum(run['passes'].get('target/full', {}).values()))
        if costs:
            self.sums['steps'] = self.array(rows, costs.steps_of)
            if costs.given:
                self.sums.pop('seconds', None)

    @property
    def kind(self):
        """CLOCK where the runs were timed, else MODELLED."""
        return CLOCK if 'seconds' in self.sums else MODELLED

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

def over(runs, name, rival, kind):
    """The figure: a setting's tokens a unit of time over its rival's, of the same texts."""
    return lambda texts: runs.pace(name, texts, kind) / runs.pace(rival, texts, kind)


def tuned_over(runs, names, baselines, kind, agreement=0.0, rival_agreement=0.0):
    """The figure: the fastest of some settings over the fastest of others.

    Both are chosen on one half of each family's texts (even or odd places) and judged on the other half, both
    ways round; the geometric mean, in which each half counts as often as its texts. Where a half of a family
    has less than CHOSEN_ON texts, all families are one.
    """
    odd = runs.places % 2 == 1
    families = [runs.families == family for family in dict.fromkeys(runs.families)]
    halves = numpy.array([family & half for family in families for half in (~odd, odd)])        # [H, R]
    if halves.sum(1).min() < CHOSEN_ON:
        halves = numpy.array([~odd, odd])

    def figure(texts):
        weights = numpy.bincount(texts, minlength=runs.size) * halves
        there = weights.any(1)
        # where a resample has nothing to choose on, all texts of that half stand in
        chosen_on = numpy.where(there[:, None], weights, halves)
        counts = [numpy.nan_to_num(runs.sums[count]) for count in ('tokens', UNITS[kind], 'wrong')]
        mine, theirs = ([count[:, runs.columns(some)] for count in counts] for some in (names, baselines))
        with numpy.errstate(invalid='ignore', divide='ignore'):
            ratios = (chosen_pace(mine, agreement, weights, chosen_on)
                      / chosen_pace(theirs, rival_agreement, weights, chosen_on))
            return math.exp(numpy.average(numpy.log(ratios)[there], weights=weights.sum(1)[there]))
    return figure


def chosen_pace(counts, agreement, weights, chosen_on):
    """[H] the pace on each half of the setting that is the fastest on the other half of its family.

    counts: tokens, time, wrong [R, S]; weights, chosen_on [H, R]: how often each text is in a half. If no
    setting agrees so far, the most agreeing one is chosen. Scores are rounded, because the last bit of a
    matrix product, which differs between CPUs, would settle a tie.
    """
    tokens, time, wrong = (chosen_on @ count for count in counts)                               # [H, S]
    score, agrees = tokens / time, 1 - wrong / tokens
    if agreement:
        score = numpy.where(agrees >= agreement, score, agrees - 1)
    half = numpy.arange(len(weights))
    chosen = score[half ^ 1].round(9).argmax(1)                 # halves of a family are neighbours
    return ((weights @ counts[0]) / (weights @ counts[1]))[half, chosen]


def at_equal(runs, name, baselines, kind):
    """The figure: a setting's speed over a method's, interpolated to where that agrees as often."""
    def figure(texts):
        points = [(runs.agreement(rival, texts), runs.pace(rival, texts, kind)) for rival in baselines]
        agreements, paces = zip(*sorted(points))
        rival = numpy.interp(runs.agreement(name, texts), agreements, paces)
        return runs.pace(name, texts, kind) / rival
    return figure


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


def area(scores, labels):
    """The figure: the chance that a true one scores above a false one, ties half.

    scores, labels: a list for each text. nan where either kind is absent. The pairs of all texts are counted
    once, because a resample is then a few sums.
    """
    scores = [numpy.asarray(row, float) for row in scores]
    labels = [numpy.asarray(row, bool) for row in labels]
    size = len(scores)
    bad = numpy.concatenate([row[~true] for row, true in zip(scores, labels)])
    owner = numpy.repeat(numpy.arange(size), [(~true).sum() for true in labels])
    won = numpy.zeros((size, size))         # pairs of a true one of one text and a false one of another
    for i, (row, true) in enumerate(zip(scores, labels)):
        good = numpy.sort(row[true])
        lower = numpy.searchsorted(good, bad, 'left') + numpy.searchsorted(good, bad, 'right')
        won[i] = numpy.bincount(owner, len(good) - lower / 2, minlength=size)
    trues = numpy.array([true.sum() for true in labels])
    falses = numpy.bincount(owner, minlength=size)

    def figure(texts):
        weights = numpy.bincount(texts, minlength=size)
        pairs = (weights @ trues) * (weights @ falses)
        return weights @ won @ weights / pairs if pairs else math.nan
    return figure


# ------------------------------------------------------------------------------------------------ the records

class Records(dict):
    """{name: Stored} of a paper on one pair, and what it needs to judge them."""

    def __init__(self, paper, pair, cost=None, position=POSITION):
        """cost, position: see Costs.at; without them passes cost what was measured."""
        files = sorted((LAB / paper / 'results' / pair).glob('*.jsonl'))
        super().__init__({where.stem: read_stored(where) for where in files})
        self.pair, self.cost, self.position = pair, cost, position

    @functools.cached_property
    def costs(self):
        """The Costs of the pair's passes, one record for all papers; None where they were not measured."""
        where = file_of('', self.pair, 'costs')
        costs = Costs(read_stored(where).rows[0]) if where.exists() else None
        return costs.at(self.cost, self.position) if costs and self.cost else costs

    def runs(self, name):
        """The Runs of a record of settings on texts."""
        return Runs(self[name].rows, self.costs)

    def runs_if(self, name):
        """The Runs of a record, or None where the pair has none."""
        return self.runs(name) if name in self else None


def measured_pairs(paper, *how):
    """{pair: Records} of a paper, the embedded pair first; how: see Records."""
    names = {where.parent.name for where in (LAB / paper / 'results').glob('*/*.jsonl')}
    names = sorted(names, key=lambda name: (not name.startswith(EMBEDDED), name))
    return {name: Records(paper, name, *how) for name in names}


def claims_of(paper):
    """A paper's module `claims`."""
    return importlib.import_module(f'lab.{paper}.claims')


def findings_of(paper, cost=None, position=POSITION):
    """{claim's text: {pair: Finding}} of a paper on all its pairs; at a cost, of speeds alone."""
    best = claims_of('best')
    found = {}
    for pair, records in measured_pairs(paper, cost, position).items():
        for claim in claims_of(paper).claims(records):
            if cost is None:
                claim = best.by_clock(claim, pair)
            else:
                claim = best.by_counts(claim, pair, cost, position)
                if claim.kind != MODELLED or not math.isfinite(claim.figure(numpy.asarray(claim.texts))):
                    continue
            found.setdefault(claim.text, {})[pair] = judge(claim)
    return found


# ------------------------------------------------------------------------------------------------------ pages

class PageTable(NamedTuple):
    """A table of a page."""
    head: tuple         # titles of the columns
    rows: list          # of cells: texts and numbers


def number(x):
    """A figure with two digits after the point, three where it is near 1."""
    if not math.isfinite(x):
        return '-'
    return f'{x:.3f}' if 0.9 <= x < 1.1 else f'{x:.2f}'


def table_lines(head, rows):
    """Lines of a Markdown table."""
    lines = []
    for cells in (head, ['---'] * len(head), *rows):
        cells = ['-' if x is None else number(x) if isinstance(x, float) else str(x) for x in cells]
        lines.append(f'| {" | ".join(cells)} |')
    return [*lines, '']


def short(pair):
    """A pair's name for a narrow column: `qwen` of `qwen-1.5b+0.5b`, `mid` of `embedded+mid`."""
    return pair.removeprefix(f'{EMBEDDED}+').split('-')[0]


def claim_rows(findings, cheap):
    """Rows with the columns CLAIM_HEAD of {claim's text: {pair: Finding}}.

    cheap: the same at PAPERS_COST; of a real pair, or of the embedded one where it alone has counts.
    """
    for text, by_pair in findings.items():
        claim = next(iter(by_pair.values())).claim
        own, real = cells_of(by_pair)
        own_cheap, real_cheap = cells_of(cheap.get(text, {}))
        yield text, claim.whose, f'{claim.line:g}', own, real, real_cheap or own_cheap


def cells_of(by_pair):
    """(cell of the embedded pairs, cell of the real ones) of {pair: Finding}; None for none."""
    cells = {True: [], False: []}
    for pair, finding in by_pair.items():
        who = '' if pair == EMBEDDED else f'{short(pair)}: '
        cells[pair.startswith(EMBEDDED)].append(who + finding.cell)
    return ['; '.join(cells[embedded]) or None for embedded in (True, False)]


CLAIM_HEAD = 'claim', 'whose', 'at least', 'embedded pair', 'real models', f'at c = {PAPERS_COST:g}'


def page_lines(paper, findings, cheap):
    """Lines of a paper's page: what was measured, the verdicts, tables without verdicts; see claim_rows."""
    pairs = measured_pairs(paper)
    lines = []
    for pair, records in pairs.items():
        dates = sorted({stored.head.get('date', '') for stored in records.values()})
        n = max(len(stored.rows) for stored in records.values())
        lines.append(f'* {pair}: {len(records)} records of up to {n} rows, {" and ".join(dates)}')
    lines += ['* words and kinds of speed: [how claims are judged](../README.md#measure-then-judge)', '']
    lines += table_lines(CLAIM_HEAD, claim_rows(findings, cheap))
    tables = claims_of(paper).sweeps(pairs)
    for head, rows in tables if isinstance(tables, list) else [tables]:
        lines += table_lines(head, rows)
    return lines


def pages(found):
    """{file: its text} of the pages of {paper: (findings, cheap)}; of all papers with the scoreboard.

    What stands between a page's two markers is written anew; ValueError if it does not have both.
    """
    lines = {paper: page_lines(paper, *both) for paper, both in found.items()}
    if found.keys() == PAPERS.keys():
        rows = [(f'[{paper}]({paper}/README.md)', *row)
                for paper, both in found.items() for row in claim_rows(*both)]
        lines[''] = table_lines(('paper', *CLAIM_HEAD), rows)
    texts = {}
    for paper, those in lines.items():
        where = LAB / paper / 'README.md'
        before, begin, rest = where.read_text(encoding='utf-8').partition(BEGIN)
        _, end, after = rest.partition(END)
        require_that(begin and end, f'{where} lacks the lines {BEGIN} and {END}')
        texts[where] = '\n'.join([before + begin, '', *those]) + end + after
    return texts


def main():
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog='python -m lab.judge', description=__doc__.split('\n')[0])
    parser.add_argument('papers', nargs='*', metavar='PAPER', help=f'of {", ".join(PAPERS)} (default: all)')
    parser.add_argument('--report', action='store_true', help='write the pages')
    parser.add_argument('--cost', type=at_least(0.001, float), metavar='C',
                        help='judge speeds as if a draft pass took C target passes, by counts of passes')
    parser.add_argument('--verify', type=at_least(0, float), default=POSITION, metavar='V',
                        help=f'with --cost: what each further position adds to a pass (default: {POSITION})')
    args = parser.parse_args()
    unknown = [paper for paper in args.papers if paper not in PAPERS]
    if unknown:
        parser.error(f'found {", ".join(unknown)}, expected some of {", ".join(PAPERS)}')
    found = {}
    for paper in args.papers or PAPERS:
        findings = findings_of(paper, args.cost, args.verify)
        rows = [row[:-1] for row in claim_rows(findings, {})]
        print(f'\n{paper}', *table_lines(CLAIM_HEAD[:-1], rows), sep='\n')
        if args.report and args.cost is None:
            found[paper] = findings, findings_of(paper, PAPERS_COST)
    for where, text in pages(found).items():
        where.write_text(text, encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main())
