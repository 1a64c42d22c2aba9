"""The papers' claims: `python -m lab.claims ecsv` measures and stores, `--report` judges what is stored.

With --target, --draft and --prompts it measures on any other pair and any prompts, graded where their rows
have an answer, and stores under the pair's name; --resume goes on from what an interrupted run has stored.
Started by `torchrun --nproc-per-node N -m lab.claims ...`, N processes share the rows of each record.
`--report ecsv` writes the tables of lab/ecsv/README.md anew, in seconds; `--report` alone those of all
papers, and the scoreboard of lab/README.md. What is measured is in lab/*/record.py, how it is judged in
lab/*/claims.py.
"""
import argparse
import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path as File

from lab.common import (LAB, MODELS, between_markers, claim_lines, file_of, grow, header, judge,
                        measured_pairs, read_stored, same_record, store, table_lines)
from lab.files import write_text
from lab.pairs import EMBEDDED, Pair, Record, check, digest_of
from model import expect, fingerprint, ranks
from specmini import DTYPES, HERE, exit_status, join_ranks, pick_device, take_threads

PAPERS = dict(cmasd=100, ecsv=50, via=100, specguard=300, sparse=50, best=12)   # prompts of each task
HEADLINES = (       # (paper, claim): those of the README's summary
    ('cmasd', 'F2 strict speed over the best fixed window of each task, alpha and k_max tuned; their mean'),
    ('cmasd', 'F1 AUROC of C of tokens below 0.9: the line for real models'),
    ('cmasd', 'payoff over the best fixed window of each task; mean'),
    ('ecsv', 'any selection: the best of four branches over sd with a greedy draft'),
    ('ecsv', 'the prefix vote over sd with a greedy draft'),
    ('via', 'modelled speed of via over lenient sd at as many wrong tokens'),
    ('via', 'measured speed of sd, --draft self, over plain decoding'),
    ('specguard', 'Altered numbers, draft: AUROC of grounding without the first token, within kinds of '
                  'steps'),
    ('sparse', 'Long, 75 %, 8k tokens: same first choice as dense'),
    ('sparse', 'Long, 75 %, 8k tokens: speed of a pass over a dense one'),
    ('sparse', 'Kept keys, 8k tokens: modelled speed of drafting over plain decoding'),
    ('best', 'the fastest composition at 100% agreement over tuned sd, modelled'))
ELSEWHERE = 20      # likewise, of any other pair: each takes minutes
OTHERS = dict(draft='', max_new=256, longest=1024, device='auto')       # what such a pair has by default


def part(paper, name):
    """A paper's module `record` or `claims`."""
    return importlib.import_module(f'lab.{paper}.{name}')


def measure(paper, pair, n, resume=False):
    """Measures and stores every record of a paper that the pair can have; n: prompts of each family."""
    for name, record in part(paper, 'record').RECORDS.items():
        if isinstance(record, Record) and record.drafts and not pair.draft:
            print(f'{paper} {name}: left out, it needs a draft model (--draft DIR)', file=sys.stderr)
        elif isinstance(record, Record):
            row_of = functools.partial(record.row, pair)
            head = head_of(record, name, pair, n)
            grow(file_of(paper, name, pair.name), head, record.items(pair, n), row_of, resume)
        elif pair.is_embedded:
            measure_in_lab(paper, name, record, n, resume)
        else:
            print(f'{paper} {name}: left out, it needs {record.needs}', file=sys.stderr)


def measure_in_lab(paper, name, record, n, resume):
    """Measures and stores a LabRecord, in the first process: it has no items to share."""
    rank, _ = ranks()
    if rank > 0:
        return
    head = header(name, n, record.models)
    if resume and same_record(file_of(paper, name), head):
        print(f'{file_of(paper, name)}: measured already', file=sys.stderr)
    else:
        store(paper, name, head, record.rows(n))


def head_of(record, name, pair, n):
    """The head of a Record of this name on a pair."""
    head = pair.head(name, n)
    calibration = File(pair.target) / 'calibration.json'
    if pair.is_embedded:
        for model in record.lab_models:
            head['models'].setdefault(model, fingerprint(MODELS / model))
    elif record.calibrated and calibration.exists():
        head['calibration'] = digest_of(calibration)
    return head


def stored_records(paper, pair=''):
    """{name: Stored} of a paper: of all its records on the embedded pair, of any other of what there is."""
    found = {}
    for name in part(paper, 'record').RECORDS:
        if not pair or file_of(paper, name, pair).exists():
            found[name] = read_stored(paper, name, pair)
    return found


def findings_of(paper, pair=''):
    """The Findings of a paper on a pair, by its stored rows."""
    return [judge(claim) for claim in part(paper, 'claims').claims(stored_records(paper, pair))]


def page_of(paper, findings):
    """The text of a paper's page, with what was measured, its claims and its tables between the markers.

    findings: {pair's name: its Findings}.
    """
    lines = []
    for pair, found in findings.items():
        stored = stored_records(paper, pair)
        if pair:
            lines += [f'## {pair}', '']
        lines += [*measured_lines(stored), '', *claim_lines(found)]
        for table in part(paper, 'claims').tables(stored):
            lines += table_lines(*table)
    return between_markers(page_file(paper).read_text(encoding='utf-8'), lines)


def all_findings(paper):
    """{pair's name: Findings} of all pairs that the paper was measured on; '' is the embedded one."""
    return {pair: findings_of(paper, pair) for pair in ('', *measured_pairs(paper))}


def page_file(paper):
    return LAB / paper / 'README.md'


def measured_lines(stored):
    """Lines on when, on what and how much was measured."""
    for name, (head, rows) in stored.items():
        models = ', '.join(f'{model} {digits[:6]}' for model, digits in head['models'].items())
        prompts = ''
        if 'prompts' in head:
            files = ', '.join(head['prompts'])
            prompts = f', {head["dtype"]}; {files}, at most {head["max_new"]} tokens'
        yield (f'* `{name}`: {len(rows)} rows, n = {head["n"]}, {head["date"]}, {head["device"]}, '
               f'torch {head["versions"]["torch"]}{prompts}; {models}')


def scoreboard(papers):
    """Lines of a table of all claims of {paper: see all_findings}: what each pair says of them."""
    pairs = list(dict.fromkeys(pair for findings in papers.values() for pair in findings))
    rows = []
    for paper, findings in papers.items():
        said = {}                                       # {claim: {pair: verdict and figure}}
        for pair, found in findings.items():
            for f in found:
                said.setdefault(f.claim.text, {})[pair] = f'{f.verdict} {f.figure:.3f}'
        for text, cells in said.items():
            rows.append((f'[{paper}]({paper}/README.md)', text, *(cells.get(pair, '-') for pair in pairs)))
    return table_lines(('paper', 'claim', *(pair or 'embedded pair' for pair in pairs)), rows)


def summary(papers):
    """Lines of the README's table: what the embedded pair says of HEADLINES, and what a real one."""
    rows = []
    for paper, text in HEADLINES:
        cells = {'': '-'}
        line = ''
        for pair, findings in papers[paper].items():
            for f in findings:
                if f.claim.text == text:
                    line = f'{f.claim.line:g}'
                    short = f' ({pair.split("-")[0]})' if pair else ''      # Qwen2.5, SmolLM2
                    cells[pair] = f'{f.verdict} {f.figure:.2f}, {f.low:.2f} to {f.high:.2f}{short}'
        embedded, *real = cells.values()
        rows.append((paper, text, line, embedded, '; '.join(real) or '-'))
    return table_lines(('paper', 'claim', 'at least', 'embedded pair', 'real models'), rows)


def report(papers):
    """Judges these papers, writes their pages, prints their claims; all of them: the summaries, too."""
    found = {paper: all_findings(paper) for paper in papers}
    for paper, findings in found.items():
        write_text(page_file(paper), page_of(paper, findings))
    if found.keys() == PAPERS.keys():
        for where, lines in ((LAB / 'README.md', scoreboard(found)), (HERE / 'README.md', summary(found))):
            write_text(where, between_markers(where.read_text(encoding='utf-8'), lines))
    print(*scoreboard(found), sep='\n')


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('papers', nargs='*', metavar='PAPER', help=f'of {", ".join(PAPERS)}; with --report, none is all')
    add('--n', type=int, help='prompts of each task or family (100; 50 for ecsv and sparse, 300 for '
                              f'specguard, 12 for best; {ELSEWHERE} of any other pair)')
    add('--report', action='store_true', help='judge what is stored instead of measuring')
    add('--resume', action='store_true', help='leave alone what is measured; go on from what was broken off')
    other = parser.add_argument_group('another pair')
    add = other.add_argument
    add('--target', metavar='DIR', help='a Hugging Face folder')
    add('--draft', metavar='DIR', help='likewise, of the same vocabulary (default: none)')
    add('--prompts', metavar='FILE', nargs='+', help='JSON lines with a prompt, question or turns')
    add('--chat', action='store_true', help="put prompts into the target's chat template")
    add('--max-new', type=int, help='tokens that a text has at most (default: 256)')
    add('--longest', type=int, help='tokens of a prompt; longer ones are passed over (default: 1024)')
    add('--device', choices=('auto', 'cpu', 'cuda'), help='default: auto')
    add('--dtype', choices=DTYPES, help='bf16 where fp32 does not fit (default: fp32)')
    args = parser.parse_args()
    unknown = [paper for paper in args.papers if paper not in PAPERS]
    if unknown or not (args.papers or args.report):
        parser.error(f'found {unknown or "no paper"}, expected some of {", ".join(PAPERS)}')
    if args.n is not None and args.n < 2:
        parser.error(f'--n {args.n}: expected 2 or more')
    return args


def pair_of(args):
    """The Pair that the flags ask for; ValueError in one line where it is no pair."""
    given = {}
    for name in ('target', 'draft', 'prompts', 'chat', 'max_new', 'longest', 'device', 'dtype'):
        value = getattr(args, name)
        if value not in (None, False):
            given[name] = value
    if not given:
        return EMBEDDED
    expect(args.target and args.prompts, 'another pair takes --target DIR and --prompts FILE, both')
    pair = Pair(**OTHERS | given)
    pair = replace(pair, prompts=tuple(pair.prompts), device=pick_device(pair.device))
    check(pair, 2)                                      # one text has no interval
    return pair


def main():
    """Runs the program; returns its exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    args = parse()
    return exit_status('lab.claims', lambda: run(args))


def run(args):
    """Measures, or judges what is stored; returns the exit status."""
    if args.report:
        report(args.papers or list(PAPERS))
        return 0
    join_ranks(pick_device(args.device or 'auto') if args.target else 'cpu', 'gloo')
    try:
        pair = pair_of(args)
        take_threads(pair.network('target')[0])         # of one, times are the processor's own
        for paper in args.papers:
            measure(paper, pair, args.n or (PAPERS[paper] if pair.is_embedded else ELSEWHERE), args.resume)
    except KeyboardInterrupt:
        print('interrupted: the same command with --resume goes on', file=sys.stderr)
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
