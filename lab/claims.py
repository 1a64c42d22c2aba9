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

PAPERS = dict(cmasd=100, ecsv=50, via=100, specguard=300, sparse=50)        # prompts of each task, by default


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


def findings_of(paper):
    """The Findings of a paper, by its stored rows."""
    return [judge(claim) for claim in part(paper, 'claims').claims(stored_records(paper))]


def page_of(paper, findings):
    """The text of a paper's page, with what was measured, its claims and its tables between the markers."""
    stored = stored_records(paper)
    lines = [*measured_lines(stored), '', *claim_lines(findings)]
    for table in part(paper, 'claims').tables(stored):
        lines += table_lines(*table)
    return between_markers(page_file(paper).read_text(encoding='utf-8'), lines)


def page_file(paper):
    return LAB / paper / 'README.md'


def measured_lines(stored):
    """Lines on when, on what and how much was measured."""
    for name, (head, rows) in stored.items():
        models = ', '.join(f'{model} {digits[:6]}' for model, digits in head['models'].items())
        yield (f'* `{name}`: {len(rows)} rows, n = {head["n"]}, {head["date"]}, {head["device"]}, '
               f'torch {head["versions"]["torch"]}; {models}')


def scoreboard(papers):
    """Lines of a table of all claims of {paper: Findings}."""
    rows = []
    for paper, findings in papers.items():
        heads = [record.head for record in stored_records(paper).values()]
        date = max(head['date'] for head in heads)
        models = ', '.join(dict.fromkeys(model for head in heads for model in head['models']))
        for f in findings:
            rows.append((f'[{paper}]({paper}/README.md)', f.claim.text, f.verdict, f.figure, date, models))
    return table_lines(('paper', 'claim', 'verdict', 'figure', 'date', 'models'), rows)


def report(papers):
    """Judges these papers, writes their pages, prints their claims; all of them: the scoreboard, too."""
    found = {paper: findings_of(paper) for paper in papers}
    for paper, findings in found.items():
        page_file(paper).write_text(page_of(paper, findings), encoding='utf-8')
    if found.keys() == PAPERS.keys():
        where = LAB / 'README.md'
        page = between_markers(where.read_text(encoding='utf-8'), scoreboard(found))
        where.write_text(page, encoding='utf-8')
    print(*scoreboard(found), sep='\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('papers', nargs='*', metavar='PAPER',
                        help=f'of {", ".join(PAPERS)}; with --report, none is all')
    parser.add_argument('--n', type=int,
                        help='prompts of each task (100; 50 for ecsv and sparse, 300 for specguard)')
    parser.add_argument('--report', action='store_true', help='judge what is stored instead of measuring')
    args = parser.parse_args()
    unknown = [paper for paper in args.papers if paper not in PAPERS]
    if unknown or not (args.papers or args.report):
        parser.error(f'found {unknown or "no paper"}, expected some of {", ".join(PAPERS)}')
    if args.n is not None and args.n < 2:
        parser.error(f'--n {args.n}: expected 2 or more')
    torch.set_num_threads(1)                            # as small models run; times are the processor's own
    try:
        if args.report:
            report(args.papers or list(PAPERS))
        for paper in [] if args.report else args.papers:
            measure(paper, args.n or PAPERS[paper])
    except ValueError as error:
        parser.exit(2, f'{error}\n')


if __name__ == '__main__':
    sys.exit(main())
