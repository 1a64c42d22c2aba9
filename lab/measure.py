"""Records what the papers' claims rest on: `python -m lab.measure via` stores rows that lab/judge.py judges.

Each paper has a module `claims` with RECORDS {name: Record}. A record is a file of JSON lines: a header
(models, versions, device, date), then one row for each item. With --target, --draft and --prompts the same
records are made of any other pair; --resume goes on from the rows that an interrupted run has stored.
"""
import argparse
import datetime
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path as File
from typing import NamedTuple

import torch

from lab import at_least, tasks
from model import encode, fingerprint, require_that
from specmini import DTYPES, Engine, chat, exit_status, grade, read_rows, ready, take_threads
from verify import (METHODS, Exact, confidence_signals, decode, draft_model, prompt_lookup, token_logps,
                    tokens_of)

SEED = 11               # of the held-out rows that are measured on
LAB = File(__file__).parent
MODELS = LAB / 'models'
PAPERS = dict(cmasd=100, ecsv=50, via=20, specguard=50, sparse=50, best=8)      # prompts of each task
ELSEWHERE = 12          # prompts of each family, of any other pair
DIGITS = 5              # significant digits of a stored number
ROUNDS = 80             # in which the cost of every pass is measured once
FEW_ROUNDS = 7          # the same, of a pair whose passes take a tenth of a second
MOST_POSITIONS = 32     # the longest pass whose cost is measured
MOST_ROWS = 6           # the most draft rows whose pass is measured
OTHERS = dict(draft='', max_new=256, longest=1024, device='auto', dtype='auto')     # of another pair


# ------------------------------------------------------------------------------------------------- the models

@functools.cache
def network(folder, device, dtype):
    """(Transformer, tokenizer, end ids) of a folder, held once."""
    return ready(folder, device, dtype)


def embedded(name):
    """(Transformer, tokenizer, end ids) of a model in lab/models."""
    return network(str(MODELS / name), 'cpu', 'fp32')


def held_out_rows(task, n, seed=SEED, **knobs):
    """n held-out rows of a task."""
    return list(itertools.islice(tasks.rows(task, seed, **knobs), n))


class SharingEngine(Engine):
    """An Engine that takes networks which are loaded already, so that none is held twice."""

    def network(self, folder):
        return network(folder, self.device, self.dtype)

    def reopen(self, ids):
        """As open([ids]), but a prompt that the caches hold already is not read again."""
        reader = self.readers.get('target')
        if reader is None or reader.cache.ids[:len(ids) - 1] != ids[:-1] or len(ids) < 2:
            self.open([ids])
            for reader in self.readers.values():
                reader.forget = functools.partial(keep_prompt, reader, ids[:-1])


def keep_prompt(reader, prompt):
    """As Reader.forget, but the cache keeps a prompt that it holds."""
    path = reader.model.full
    n = min(len(prompt), reader.cache.valid_prefix(prompt, path))
    reader.cache.record(prompt[:n], n, path)
    reader.log.clear()


# --------------------------------------------------------------------------------------------- pairs, prompts

class Prompt(NamedTuple):
    """A prompt that is measured on."""
    family: str         # its task, or the category that its file names
    place: int          # 0, 1, ... among the prompts of this family
    row: dict           # of the task or file, its text under `prompt`
    ids: list

    @property
    def name(self):
        """The keys with which a stored row begins: they tell which text it is of."""
        return dict(family=self.family, place=self.place)


@dataclass(frozen=True)
class Pair:
    """Two models, how they run, and their prompts; without arguments the embedded pair."""
    target: str = str(MODELS / 'target')
    draft: str = str(MODELS / 'draft')          # '': none, drafts are looked up in the text
    prompts: tuple = ()         # files of JSON lines; none: held-out rows of the lab's tasks
    chat: bool = False          # whether a prompt is put into the target's chat template
    max_new: int = 160          # tokens that a text has at most
    longest: int = 300          # tokens of a prompt; longer ones are passed over
    device: str = 'cpu'
    dtype: str = 'fp32'

    @property
    def is_embedded(self):
        return not self.prompts

    @property
    def name(self):
        """The folder of its results: `embedded`, or of the models' names, as `qwen-1.5b+0.5b`."""
        names = [File(folder).resolve().name for folder in self.folders]
        if self.is_embedded:
            return 'embedded' if self == EMBEDDED else 'embedded+' + names[-1]
        shared = os.path.commonprefix(names) if len(names) > 1 else ''
        return shared + '+'.join(name[len(shared):] for name in names).replace(' ', '-')

    @property
    def folders(self):
        return [folder for folder in (self.target, self.draft) if folder]

    @property
    def tokenizer(self):
        return network(self.target, self.device, self.dtype)[1]

    def engine(self, kind=SharingEngine):
        """An Engine of the pair, of this class."""
        return kind(self.target, self.draft or 'lookup', max_new=self.max_new, device=self.device,
                    dtype=self.dtype)

    def texts(self, usual, n, seed=SEED):
        """The first n Prompts of each family that have `longest` tokens or fewer.

        usual: the embedded pair's families, tasks of the lab.
        """
        if self.is_embedded:
            rows = {family: tasks.rows(family, seed) for family in usual}
        else:
            rows = rows_by_family(self.prompts)
        found = []
        for family, theirs in rows.items():
            encoded = ((row, self.encode(row['prompt'])) for row in theirs)
            short = itertools.islice(((row, ids) for row, ids in encoded if len(ids) <= self.longest), n)
            found += [Prompt(family, place, row, ids) for place, (row, ids) in enumerate(short)]
        return found

    def encode(self, text):
        """The ids of a prompt, in the chat template where that is wanted."""
        if self.chat:
            text = chat(self.target, text)
        (ids,) = encode(self.tokenizer, [text], not self.chat)
        return ids

    def head(self, record, n):
        """The first line of a record: what is measured, and on what."""
        models = {File(folder).resolve().name: fingerprint(folder) for folder in self.folders}
        head = dict(record=record, n=n, seed=SEED, models=models, device=self.device, dtype=self.dtype)
        if not self.is_embedded:
            files = {}
            for file in self.prompts:
                files[File(file).name] = hashlib.sha256(File(file).read_bytes()).hexdigest()[:16]
            head |= dict(prompts=files, chat=self.chat, max_new=self.max_new, longest=self.longest)
        return head


EMBEDDED = Pair()


@functools.cache
def rows_by_family(files):
    """{family: rows} of files; a row's family is its `category` or `task`, else the file's name."""
    found = {}
    for file in files:
        for row in read_rows(None, file):
            family = row.get('category') or row.get('task') or File(file).stem
            found.setdefault(str(family), []).append(row)
    return found


# ----------------------------------------------------------------------------------------- settings on texts

class Setting(NamedTuple):
    """One way to write a text."""
    method: Callable            # makes a Method: a method serves one text
    proposer: Callable = None   # where drafts come from; None: the pair's own
    temperature: float = 0.0
    seed: int = 0


def named(method, **knobs):
    """A Setting of a method by its name; settings of Setting itself are taken out of the knobs."""
    own = {key: knobs.pop(key) for key in Setting._fields if key in knobs}
    return Setting(functools.partial(METHODS[method], **knobs), **own)


def sd(gamma, proposer=None, **settings):
    """The Setting of exact speculative decoding with greedy drafts of gamma tokens."""
    return Setting(functools.partial(Exact, gamma, draft_temperature=0), proposer, **settings)


def run_row(settings, pair, prompt):
    """A row {family, place, runs: {name: counts}} of one prompt; settings: {name: Setting}, or of a pair.

    Settings are run in turn, in another order for each text, because the same setting took 8 % longer at
    another place of a fixed order.
    """
    settings = settings(pair) if callable(settings) else settings
    runs = dict.fromkeys(settings)
    order = random.Random(f'{prompt.family} {prompt.place}').sample(list(settings), len(settings))
    for name in order:
        setting = settings[name]
        engine = prepared(pair, setting)
        engine.reopen(prompt.ids)
        method = setting.method()
        runs[name] = counts_of(engine, engine.start(prompt.ids, method), method, prompt.row)
    return prompt.name | dict(runs=runs)


def answer_row(settings, pair, prompt):
    """Whether each setting's answer is right; None where the prompt has no answer."""
    runs = run_row(settings, pair, prompt)['runs']
    return prompt.name | {name: run['right'] for name, run in runs.items()}


@functools.cache
def cached_engine(pair):
    return pair.engine()


def prepared(pair, setting):
    """An Engine of the pair that writes as the setting says."""
    engine = cached_engine(pair)
    engine.proposer = setting.proposer or (draft_model if pair.draft else prompt_lookup)
    engine.temperature = setting.temperature
    engine.seed = setting.seed
    return engine


def counts_of(engine, session, method, row):
    """What one method does with one text: the counts of a run.

    tokens written; judged and accepted draft tokens; cycles; wrong: tokens that are not the target's
    first choice after the same text; nats: -log p of the text by the target; right: 1, 0, or None where the
    row has no answer; seconds by the clock, without the prompt; passes {reader/path: {positions: passes}}.
    """
    marks = {role: len(reader.log) for role, reader in engine.readers.items()}
    begin = moment()
    cycles = list(decode(session, method))
    seconds = moment() - begin
    passes = {}                                         # positions count all rows
    for role, reader in engine.readers.items():
        for path, positions in reader.log[marks[role]:]:
            passes.setdefault(f'{role}/{path.name}', Counter())[positions] += 1
    judged = [verdict for cycle in cycles for verdict in cycle.judged]
    wrong, nats = audited(session)
    right = graded(row, engine.tokenizer.decode(tokens_of(cycles)))
    return dict(tokens=len(session.tokens) - session.begin, judged=sum(len(one.tokens) for one in judged),
                accepted=sum(len(one.tokens) for one in judged if one.kept), cycles=len(cycles), wrong=wrong,
                nats=nats, right=right, seconds=seconds, passes=passes)


def graded(row, text):
    """1 or 0: whether the text is right for its row; None where nothing tells. The lab grades its own."""
    right = tasks.grade(row, text) if tasks.is_own(row) else grade(row, text)
    return None if right is None else int(right)


def moment():
    """Seconds by the clock; on CUDA when all is done that was asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def audited(session):
    """(tokens that are not the target's first choice after the same text, -log p of all): a dense pass."""
    written = session.tokens[session.begin:]
    logits = session.target.read(session.tokens[:-1], session.target.model.full, len(written)).float()
    wrong = sum(pick != token for pick, token in zip(logits.argmax(-1).tolist(), written))
    return wrong, -float(token_logps(logits, written).sum())


# ------------------------------------------------------------------------------------- the target's own text

def token_row(pair, prompt):
    """A row of columns, one value for each token of the target's own greedy text.

    hit: whether the draft's first choice is that token; signals: CM-ASD's three confidences [T, 3].
    """
    engine = prepared(pair, sd(8, prompt_lookup))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, Exact())
    written = tokens_of(decode(session, Exact(8)))
    draft = session.drafter
    q = draft.read(session.tokens[:-1], draft.model.full, len(written)).float()                  # [T, V] raw
    hits = [int(guess == token) for guess, token in zip(q.argmax(-1).tolist(), written)]
    return prompt.name | dict(tokens=len(written), hit=hits,
                              signals=[list(confidence_signals(row[None])) for row in q])


# ---------------------------------------------------------------------------------------------- pass costs

def cost_row(pair):
    """{reader/path: [0, seconds of a pass over 1, 2, ... positions]}: of draft, target and slim passes.

    The draft's are over that many rows of one position. Medians over rounds through all sizes, because a
    busy moment then spoils one round of each size and not all rounds of one.
    """
    engine = prepared(pair, sd(4))
    text = [1] * min(100, engine.context // 2)
    engine.open([text])
    session = engine.start(text, METHODS['via']())
    tokens = itertools.cycle(range(2, session.target.model.vocab))
    full = session.target.model.full
    times = {}
    for _ in range(ROUNDS if pair.is_embedded else FEW_ROUNDS):
        for n in range(1, MOST_POSITIONS + 1):
            for name, path in (('target/full', full), ('target/slim', session.slim_path)):
                times.setdefault((name, n), []).append(pass_seconds(session, path, text, next(tokens), n))
        for rows in range(1, MOST_ROWS + 1):
            seconds = draft_seconds(session, text, next(tokens), rows)
            times.setdefault(('draft/full', rows), []).append(seconds)
    found = {}
    for (name, _), seconds in times.items():
        found.setdefault(name, [0.0]).append(statistics.median(seconds))
    return found


def pass_seconds(session, path, text, token, n):
    """Seconds of a target pass over n positions after the text; token: one that the cache does not hold."""
    reader = session.target
    reader.read(text[:-1], path, 0)
    begin = moment()
    reader.read(text[:-1] + [token] + [1] * (n - 1), path, n)
    return moment() - begin


def draft_seconds(session, text, token, rows):
    """Seconds of a draft pass over one position of this many rows."""
    reader = session.drafter
    reader.read(text[:-1], reader.model.full, 0)
    fork = reader.fork(rows)
    ids = torch.full((rows,), token, device=reader.model.device)
    fork.append(ids, reader.model.full)                 # the first has just copied a cache
    begin = moment()
    fork.append(ids, reader.model.full)
    return moment() - begin


# ----------------------------------------------------------------------------------------------- stored rows

class Record(NamedTuple):
    """What is measured row by row, each row of one item, always in the same order."""
    items: Callable         # function (pair, n) -> list
    row: Callable           # function (pair, item) -> dict
    drafts: bool = True     # whether it needs a draft model
    only: str = ''          # why it is of the embedded pair alone, as words; '': of any pair


def on_prompts(families, row, **kind):
    """The Record of a row for each prompt of these families (or of a pair's files)."""
    return Record(lambda pair, n: pair.texts(families, n), row, **kind)


class Stored(NamedTuple):
    """A record as it was stored."""
    head: dict          # see Pair.head
    rows: list


def for_json(value):
    """The value with its floats cut to DIGITS significant digits; nan becomes None, which JSON has."""
    if isinstance(value, dict):
        return {str(key): for_json(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(x) for x in value]
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    return value


def as_line(row):
    return json.dumps(for_json(row), separators=(',', ':')) + '\n'


def file_of(paper, pair, name):
    """The file of a record; pair: the name of a Pair. Costs of passes are one record for all papers."""
    home = LAB if paper is None else LAB / paper
    return home / 'results' / pair / f'{name}.jsonl'


def dated(head):
    """The head with the versions and the date of today."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    return head | dict(versions=versions, date=datetime.date.today().isoformat())


def write_rows(where, head, items, row_of, resume=False):
    """Writes a head, then row_of(item) as each is measured; resume: goes on after rows of this head."""
    where.parent.mkdir(parents=True, exist_ok=True)
    there = kept_rows(where, head) if resume else 0
    with open(where, 'a' if there else 'w', encoding='utf-8') as file:
        if not there:
            file.write(as_line(dated(head)))
            file.flush()
        for item in items[max(0, there - 1):]:
            file.write(as_line(row_of(item)))
            file.flush()


def kept_rows(where, head):
    """Whole lines of a file that begins with this head, whatever its date; 0 where it is another's."""
    if not where.exists():
        return 0
    lines = where.read_text(encoding='utf-8').splitlines(keepends=True)
    whole = [line for line in lines if line.endswith('\n')]
    if not whole or not for_json(head).items() <= json.loads(whole[0]).items():
        return 0
    where.write_text(''.join(whole), encoding='utf-8')          # a line that was broken off goes
    return len(whole)


def read_stored(where):
    """The Stored record of a file; ValueError if it was not measured."""
    require_that(where.exists(), f'{where}: not measured yet; python -m lab.measure does')
    lines = where.read_text(encoding='utf-8').splitlines()
    require_that(lines, f'{where}: an empty file; python -m lab.measure records it')
    head, *rows = map(json.loads, lines)
    return Stored(head, rows)


# ----------------------------------------------------------------------------------------------- the program

def measure(paper, pair, n, resume=False, only=None):
    """Measures and stores the records of a paper, or the one named `only`; n: prompts of each family."""
    records = importlib.import_module(f'lab.{paper}.claims').RECORDS
    require_that(not only or only in records, f'--only {only}: {paper} has the records {", ".join(records)}')
    for name, record in records.items():
        if only and name != only:
            continue
        if record.drafts and not pair.draft:
            print(f'{paper} {name}: left out, it needs a draft model (--draft DIR)', file=sys.stderr)
        elif record.only and not pair.is_embedded:
            print(f'{paper} {name}: left out, it needs {record.only}', file=sys.stderr)
        else:
            where = file_of(paper, pair.name, name)
            row_of = functools.partial(record.row, pair)
            write_rows(where, pair.head(name, n), record.items(pair, n), row_of, resume)


def parse():
    parser = argparse.ArgumentParser(prog='python -m lab.measure', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('papers', nargs='+', metavar='PAPER', choices=(*PAPERS, 'costs'),
        help=f'of {", ".join(PAPERS)}, or costs: of the passes')
    add('--n', type=at_least(2), help='prompts of each family')
    add('--only', metavar='RECORD', help='this record of a paper alone')
    add('--resume', action='store_true', help='keep the rows that an interrupted run has stored')
    add('--target', metavar='DIR', help='a Hugging Face folder (default: the embedded pair)')
    add('--draft', metavar='DIR', help='a smaller model of the same vocabulary (default: none)')
    add('--prompts', metavar='FILE', nargs='+', help='JSON lines with a prompt, question or turns')
    add('--chat', action='store_true', help="put prompts into the target's chat template")
    add('--max-new', type=at_least(1), help='tokens that a text has at most (default: 256)')
    add('--longest', type=at_least(1), help='tokens of a prompt; longer ones are passed over (default: 1024)')
    add('--device', choices=('auto', 'cpu', 'cuda'), help='default: auto')
    add('--dtype', choices=('auto', *DTYPES), help='default: auto, as in specmini.py')
    return parser.parse_args()


def pair_of(args):
    """The Pair that the flags ask for; ValueError in one line where it is no pair."""
    given = {option.name: getattr(args, option.name) for option in fields(Pair)}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if not given.keys() - {'draft'}:
        return replace(EMBEDDED, **given)               # another draft for the embedded target
    require_that(args.target and args.prompts, 'another pair takes --target DIR and --prompts FILE, both')
    pair = Pair(**OTHERS | given | dict(prompts=tuple(args.prompts)))
    rows_by_family(pair.prompts)                        # a file that cannot be read is told before a minute
    pair = replace(pair, device=pair.engine().device)   # which refuses models that do not fit
    require_that(len(pair.texts((), 2)) > 1,
                 f'--prompts: fewer than 2 prompts of {pair.longest} tokens at most; expected 2 or more')
    return pair


def run():
    """Measures what the flags ask for; returns the exit status."""
    args = parse()
    pair = pair_of(args)
    take_threads(network(pair.target, pair.device, pair.dtype)[0])
    try:
        for paper in args.papers:
            if paper == 'costs':
                where = file_of(None, pair.name, 'costs')
                write_rows(where, pair.head('costs', 1), [pair], cost_row)
            else:
                n = args.n or (PAPERS[paper] if pair.is_embedded else ELSEWHERE)
                measure(paper, pair, n, args.resume, args.only)
    except KeyboardInterrupt:
        print('interrupted: the same command with --resume goes on', file=sys.stderr)
        return 130
    return 0


def main():
    """Runs the program; returns its exit status."""
    return exit_status('lab.measure', run)


if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    from lab import measure as module                   # so that records and this program share caches
    sys.exit(module.main())
