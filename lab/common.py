"""What the papers' claims share: rows that are stored, claims judged by them, intervals, pages.

Measuring and judging are two programs. A record writes rows of plain numbers, a row a text
(lab/*/record.py); a claim is a function of stored rows (lab/*/claims.py); `python -m lab.claims` runs either.
What is measured on which models: lab/pairs.py.
"""
import datetime
import functools
import itertools
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as File
from typing import NamedTuple

import torch

from lab import tasks
from lab.quantise import linear, quantise
from model import expect, fingerprint, load, whole
from specmini import deal, drop_kept

SEED = 11           # of the held-out rows that claims are measured on
LAB = File(__file__).parent
MODELS = LAB / 'models'
BEGIN, END = '<!-- begin: written by `python -m lab.claims --report` -->', '<!-- end -->'
DIGITS = 5          # significant digits of a stored number


# -------------------------------------------------------------------------------------- models and rows

@functools.cache
def embedded(name, rounded=False):
    """(Transformer, tokenizer, end ids) of an embedded model; rounded: its linear layers to 4 bits."""
    loaded = load(MODELS / name)
    if rounded:
        round_to_4_bits(loaded[0])
    return loaded


def round_to_4_bits(model):
    """Rounds the network's linear layers, in place."""
    for key, weight in model.named_parameters():
        if linear(key, weight):
            weight.copy_(quantise(weight))


def is_there(name):
    """Whether lab/models has this model."""
    return (MODELS / name / 'config.json').exists()


def held_out_rows(task, n, seed=SEED, **knobs):
    """n held-out rows of a task."""
    return list(itertools.islice(tasks.rows(task, seed, **knobs), n))


# ----------------------------------------------------------------------------------------- stored rows

def for_json(value):
    """The value with its floats cut to DIGITS significant digits; nan becomes None, which JSON has."""
    if isinstance(value, dict):
        return {str(key): for_json(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(x) for x in value]
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    return value


def header(name, n, models):
    """The first line of a record on models of the lab (names), without what `dated` adds."""
    fingerprints = {model: fingerprint(MODELS / model) for model in models}
    return dict(record=name, n=n, seed=SEED, models=fingerprints, device='cpu')     # as embedded() has it


def dated(head):
    """The head with the versions and the date of today."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    return head | dict(versions=versions, date=datetime.date.today().isoformat())


def file_of(paper, name, pair=''):
    """Where a record is stored; pair: the name of a lab.pairs.Pair."""
    return LAB / paper / 'results' / pair / f'{name}.jsonl'


def as_line(row):
    return json.dumps(for_json(row), separators=(',', ':')) + '\n'


def store(paper, name, head, rows):
    """Writes a record of the embedded models as the rows come: the header, then a row a line."""
    write_record(file_of(paper, name), head, rows)


def write_record(where, head, rows):
    """Writes the header, then a row a line; whole or not at all, if interrupted."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with whole(where) as growing, open(growing, 'w', encoding='utf-8') as file:
        for row in itertools.chain([dated(head)], rows):
            file.write(as_line(row))


def grow(where, head, items, row_of, resume=False):
    """Writes a record to the file `where`, a row for each item, in their order; processes share the work.

    What an interrupted one has measured is kept beside it, see specmini.deal; resume: go on from there, and
    leave a finished one alone, where it has this head.
    """
    if resume and same_record(where, head):
        print(f'{where}: measured already', file=sys.stderr)
        return
    where.parent.mkdir(parents=True, exist_ok=True)
    name = where.with_suffix('')
    rows = deal(name, as_line(head), items, row_of, resume)
    if rows is not None:                                # the first process has them all
        write_record(where, head, rows)
        drop_kept(name)


def same_record(where, head):
    """Whether a file begins with this head, whatever its date and versions."""
    if not where.exists():
        return False
    first, *_ = where.read_text(encoding='utf-8').split('\n')
    return for_json(head).items() <= json.loads(first).items()


class Stored(NamedTuple):
    """A record as it was stored."""
    head: dict          # see dated
    rows: list          # a dict a text


def read_stored(paper, name, pair=''):
    """The Stored record; ValueError if nobody has measured it yet."""
    where = file_of(paper, name, pair)
    expect(where.exists(), f'{where}: not measured yet; python -m lab.claims {paper} does')
    head, *rows = map(json.loads, where.read_text(encoding='utf-8').splitlines())
    return Stored(head, rows)


def measured_pairs(paper):
    """The names of the pairs that a paper has results of, beside the embedded one."""
    home = LAB / paper / 'results'
    folders = [where.parent for where in home.glob('*/*.jsonl')]
    names = {folder.name for folder in folders}
    return sorted(name for name in names if not name.startswith('.'))       # a kill leaves .unfinished-*


# -------------------------------------------------------------------------------------- claims, judged

@dataclass(frozen=True)
class Claim:
    """What somebody claims, as a figure of stored rows that has to reach a line."""
    text: str           # what is claimed, with its number in the paper's list
    whose: str          # paper, notes (reviews of it) or ours
    line: float         # the claim says that the figure is at least this
    rows: list          # stored rows, what is resampled: a dict a text
    figure: Callable    # function of such a list -> float; nan where a resample has no such figure
    why: str = ''       # why it may fail, one sentence: printed only where it does
    note: str = ''      # units, what n counts
    sampled: bool = True    # False: a figure without an interval, since nothing of it was sampled


@dataclass(frozen=True)
class Finding:
    """A judged Claim: HOLDS if the whole interval reaches the line, FAILS if none does, else UNDECIDED."""
    claim: Claim
    figure: float
    low: float          # 95 % interval
    high: float

    @property
    def verdict(self):
        if self.low >= self.claim.line:
            return 'HOLDS'
        return 'FAILS' if self.high < self.claim.line else 'UNDECIDED'

    @property
    def remark(self):
        failed = self.claim.why and self.verdict == 'FAILS'
        parts = [self.claim.note.rstrip('. '), f'Presumably: {self.claim.why}' if failed else '']
        return '. '.join(part for part in parts if part)


def interval(rows, figure, resamples=500, seed=0):
    """(figure of the rows, low, high): 95 % by the bias-corrected and accelerated bootstrap over the rows.

    Where that is not defined (all resamples alike, or some without the figure) by percentiles of the others.
    Source: Efron 1987 (BCa), as scipy.stats.bootstrap computes it.
    """
    import numpy                        # here: what calibrates and records needs neither of them
    import scipy.stats

    value = float(figure(rows))
    if len(rows) < 2:
        return value, math.nan, math.nan                # one text says nothing of others

    def of_places(places):
        return figure([rows[i] for i in places])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')                 # of a degenerate distribution: handled below
        found = scipy.stats.bootstrap(
            (numpy.arange(len(rows)),), of_places, n_resamples=resamples, vectorized=False, method='BCa',
            rng=numpy.random.default_rng(seed))
    low, high = found.confidence_interval
    if not (math.isfinite(low) and math.isfinite(high)):
        there = found.bootstrap_distribution[numpy.isfinite(found.bootstrap_distribution)]
        low, high = numpy.quantile(there, [0.025, 0.975]) if len(there) else (math.nan, math.nan)
    return value, float(low), float(high)


def judge(claim):
    """The Finding of a Claim."""
    if claim.sampled:
        return Finding(claim, *interval(claim.rows, claim.figure))
    value = float(claim.figure(claim.rows))
    return Finding(claim, value, value, value)


def mean(values):
    """The mean of an iterable; nan of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def roc_area(scores, labels):
    """The chance that a true one scores above a false one, ties half; nan where either kind is absent."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    labels = torch.as_tensor(labels, dtype=torch.bool)
    good = scores[labels].contiguous()
    bad = scores[~labels].sort().values
    if not len(good) or not len(bad):
        return math.nan
    below = torch.searchsorted(bad, good)
    not_above = torch.searchsorted(bad, good, right=True)
    return float((below + not_above).double().mean()) / 2 / len(bad)


# ----------------------------------------------------------------------------------------------- pages

class PageTable(NamedTuple):
    """A table of a page, beside the claims."""
    head: tuple         # titles of the columns
    rows: list          # of cells: texts and numbers


def cell_text(cell):
    """A cell of a table; numbers with three digits, '-' where there is none."""
    if isinstance(cell, float):
        return f'{cell:.3f}' if math.isfinite(cell) else '-'
    return str(cell)


def table_lines(head, rows):
    """Lines of a Markdown table; numbers with three digits."""
    def line(cells):
        texts = [cell_text(cell) for cell in cells]
        return f'| {" | ".join(texts)} |'
    return [line(head), line(['---'] * len(head)), *map(line, rows), '']


def claim_lines(findings):
    """Lines of the table of a paper's claims."""
    rows = []
    for f in findings:
        between = f'{f.low:.3f} to {f.high:.3f}'
        line = f'{f.claim.line:g}'
        rows.append((f.claim.text, f.claim.whose, f.figure, between, line, f.verdict, f.remark))
    return table_lines(('claim', 'whose', 'figure', '95 %', 'line', 'verdict', ''), rows)


def between_markers(text, lines):
    """The page's text with these lines between its two markers; ValueError if it does not have both."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    expect(begin and end, f'the page lacks the lines {BEGIN} and {END}')
    return '\n'.join([before + begin, '', *lines]) + end + after
