"""What the papers' claims share: rows that are stored, claims judged by them, intervals, pages.

Measuring and judging are two programs. A record writes rows of plain numbers, a row a text
(lab/*/record.py); a claim is a function of stored rows (lab/*/claims.py); `python -m lab.claims` runs either.
"""
import datetime
import functools
import itertools
import json
import math
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as File
from typing import NamedTuple

import torch

from lab import tasks
from lab.quantise import linear, quantise
from model import expect, fingerprint, load

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
        for key, weight in loaded[0].named_parameters():
            if linear(key, weight):
                weight.copy_(quantise(weight))
    return loaded


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
    """The first line of a stored record: what was measured, on what, when. models: names in lab/models."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    fingerprints = {model: fingerprint(MODELS / model) for model in models}
    return dict(record=name, n=n, seed=SEED, models=fingerprints, versions=versions,
                device='cpu',                           # where embedded() puts them
                date=datetime.date.today().isoformat())


def store(paper, name, head, rows):
    """Writes lab/<paper>/results/<name>.jsonl as the rows come: the header, then a row a line."""
    where = LAB / paper / 'results' / f'{name}.jsonl'
    where.parent.mkdir(parents=True, exist_ok=True)
    growing = where.with_suffix('.new')
    with open(growing, 'w', encoding='utf-8') as file:
        for row in itertools.chain([head], rows):
            file.write(json.dumps(for_json(row), separators=(',', ':')) + '\n')
    os.replace(growing, where)                          # whole or not at all, if interrupted


class Stored(NamedTuple):
    """A record as it was stored."""
    head: dict          # see header
    rows: list          # a dict a text


def read_stored(paper, name):
    """The Stored record; ValueError if nobody has measured it yet."""
    where = LAB / paper / 'results' / f'{name}.jsonl'
    expect(where.exists(), f'{where}: not measured yet; python -m lab.claims {paper} does')
    head, *rows = map(json.loads, where.read_text(encoding='utf-8').splitlines())
    return Stored(head, rows)


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
        return value, value, value

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


def table_lines(head, rows):
    """Lines of a Markdown table; numbers with three digits."""
    def line(cells):
        texts = [f'{cell:.3f}' if isinstance(cell, float) else str(cell) for cell in cells]
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
