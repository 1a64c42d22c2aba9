"""The papers' claims: `python -m lab.claims ecsv` measures and stores, `--report` judges what is stored.

`--report ecsv` writes the tables of lab/ecsv/README.md anew, in seconds; `--report` alone those of all
papers, and the scoreboard of lab/README.md. What is measured is in lab/*/record.py, how it is judged in
lab/*/claims.py.
"""
import argparse
import importlib
import sys

import torch

from lab.common import LAB, between_markers, claim_lines, header, judge, read_stored, store, table_lines

PAPERS = dict(cmasd=100, ecsv=100, via=100, specguard=500, sparse=100)      # prompts of each task, by default


def part(paper, name):
    """A paper's module `record` or `claims`."""
    return importlib.import_module(f'lab.{paper}.{name}')


def measure(paper, n):
    """Measures and stores every record of a paper; n: prompts of each task."""
    for name, (models, rows_of) in part(paper, 'record').RECORDS.items():
        store(paper, name, header(name, n, models), rows_of(n))


def stored_records(paper):
    """{name: Stored} of all that was measured for a paper."""
    return {name: read_stored(paper, name) for name in part(paper, 'record').RECORDS}


def report(paper):
    """Judges a paper by its stored rows and writes its page; returns its Findings."""
    stored, module = stored_records(paper), part(paper, 'claims')
    findings = [judge(claim) for claim in module.claims(stored)]
    lines = claim_lines(findings)
    for table in module.tables(stored):
        lines += table_lines(*table)
    write_page(LAB / paper / 'README.md', [*measured_lines(stored), '', *lines])
    return findings


def measured_lines(stored):
    """Lines on when, on what and how much was measured."""
    for name, (head, rows) in stored.items():
        models = ', '.join(f'{model} {digits[:6]}' for model, digits in head['models'].items())
        yield (f'* `{name}`: {len(rows)} rows, n = {head["n"]}, {head["date"]}, {head["device"]}, '
               f'torch {head["versions"]["torch"]}; {models}')


def write_page(where, lines):
    page = between_markers(where.read_text(encoding='utf-8'), lines)
    where.write_text(page, encoding='utf-8')


def scoreboard(papers):
    """Lines of a table of all claims of {paper: Findings}."""
    rows = []
    for paper, findings in papers.items():
        dates = sorted({record.head['date'] for record in stored_records(paper).values()})
        for f in findings:
            rows.append((f'[{paper}]({paper}/README.md)', f.claim.text, f.verdict, f.figure, dates[-1]))
    return table_lines(('paper', 'claim', 'verdict', 'figure', 'date'), rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('papers', nargs='*', choices=[*PAPERS, []], help='default, with --report: all')
    parser.add_argument('--n', type=int, help='prompts of each task (100; 500 for specguard)')
    parser.add_argument('--report', action='store_true', help='judge what is stored instead of measuring')
    args = parser.parse_args()
    torch.set_num_threads(1)                            # as small models run; times are the processor's own
    try:
        if args.report:
            found = {paper: report(paper) for paper in args.papers or PAPERS}
            if not args.papers:
                write_page(LAB / 'README.md', scoreboard(found))
            print(*scoreboard(found), sep='\n')
        for paper in [] if args.report else args.papers:
            measure(paper, args.n or PAPERS[paper])
    except ValueError as error:
        parser.exit(2, f'{error}\n')


if __name__ == '__main__':
    sys.exit(main())
