"""Runs lists of settings on texts, a row a run: `python -m lab.measure lab/cmasd/clock.txt`.

A list is a file: a head of `key: value` lines, an empty line, then settings, one a line, as `specmini.py
--compare` takes them; its first one runs beside all others. LAB PAPERS name their own lists and records. With
--target, --draft and --prompts the same rows are made of any other pair. `clock.real.txt` is `clock.txt` for
real models, `clock.deep.txt` for a target that lab.deepen made; their rows are named clock, too.
"""
import argparse
import datetime
import functools
import hashlib
import importlib
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import NamedTuple

import torch

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import at_least, tasks
from model import (check_fields, encode, fingerprint, knob, knobs_of, locked, naming, new_file,
                   read_calibration, require_that)
from specmini import (DTYPES, SOURCES, Engine, add_flags, chat, exit_status, grade, make_methods, read_rows,
                      read_value, ready, split_knobs, take_threads)
from train_mask import Settings, measure_signals
from verify import Autoregressive, decode, lookup_then_draft, token_logps, tokens_of

SEED = 11               # of the held-out rows that are measured on
LAB = File(__file__).parent
MODELS = LAB / 'models'
PAPERS = 'cmasd', 'ecsv', 'via', 'specguard', 'sparse', 'best'
DIGITS = 5              # significant digits of a stored number
COSTED = 33             # positions of the longest pass whose time is recorded: max_lag of via, and one
ROWS = 8                # the most draft rows whose pass is timed


# ------------------------------------------------------------------------------------------------- the models

@functools.cache
def network(folder, device, dtype, bits):
    """(Transformer, tokenizer, end ids) of a folder, held once."""
    return ready(folder, device, dtype, bits=bits)


class SharingEngine(Engine):
    """An Engine that takes networks which are loaded already, and reads a prompt once for all settings."""
    opened = None           # (prompts, max_new) of its caches

    def network(self, folder, bits=16):
        return network(folder, self.device, self.dtype, bits)

    def open(self, prompts):
        if self.opened != (prompts, self.max_new):
            super().open(prompts)
            self.opened = prompts, self.max_new
            for reader in self.readers.values():        # a cache knows itself what a text may build on
                reader.forget = functools.partial(setattr, reader.cache, 'averaged', 0)


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
    """Two models, how they run, and their prompts. The options are flags, too."""
    target: str = knob(str(MODELS / 'target'), 'a Hugging Face folder')
    draft: str = knob('', 'a smaller model of the same vocabulary; drafts are looked up without one')
    prompts: tuple = ()         # files of JSON lines; none: held-out rows of the lab's tasks
    chat: bool = knob(False, "put prompts into the target's chat template")
    max_new: int = knob(256, 'tokens that a text has at most', 1)
    longest: int = knob(1024, 'tokens of a prompt; longer ones are passed over', 1)
    ignore_eos: bool = knob(False, 'write on past the end of sequence')
    device: str = knob('cpu', 'or cuda', words=('cpu', 'cuda'))
    dtype: str = knob('auto', 'as in specmini.py', words=('auto', *DTYPES))
    compile: bool = knob(False, 'torch.compile short passes: of a card')
    made: str = knob('', 'how the weights were made, as words for the head of a record')

    def __post_init__(self):
        check_fields(self)

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
        shared = shared[:shared.rfind('-') + 1]             # whole words
        where = ' on cuda' * (self.device == 'cuda') + ' compiled' * self.compile
        return (shared + '+'.join(name[len(shared):] for name in names) + where).replace(' ', '-')

    @property
    def folders(self):
        return [folder for folder in (self.target, self.draft) if folder]

    @property
    def tokenizer(self):
        return network(self.target, self.device, self.dtype, 16)[1]

    def texts(self, usual, n):
        """The first n Prompts of each family that have `longest` tokens or fewer, the families in turn.

        usual: the embedded pair's families, tasks of the lab.
        """
        rows = rows_by_family(self.prompts)
        if self.is_embedded:
            rows = {family: tasks.rows(family, SEED) for family in usual}
        found = []
        for family, theirs in rows.items():
            encoded = ((row, self.encode(row['prompt'])) for row in theirs)
            short = itertools.islice(((row, ids) for row, ids in encoded if len(ids) <= self.longest), n)
            found += [Prompt(family, place, row, ids) for place, (row, ids) in enumerate(short)]
        return sorted(found, key=lambda prompt: prompt.place)       # what is interrupted has some of each

    def encode(self, text):
        """The ids of a prompt, in the chat template where that is wanted."""
        return encode(self.tokenizer, chat(self.target, text) if self.chat else text, not self.chat)

    def head(self, **more):
        """The first line of a record: what is measured, on what, where and when."""
        models = {File(folder).resolve().name: fingerprint(folder) for folder in self.folders}
        files = {File(file).name: hashlib.sha256(File(file).read_bytes()).hexdigest()[:16]
                 for file in self.prompts}
        mask = read_calibration(self.target, self.draft).get('mask', {})
        named = 'target', 'draft', 'prompts'                # by their hashes
        flags = {name: getattr(self, name) for name in knobs_of(Pair) if name not in named}
        return dated(more | dict(seed=SEED, models=models, skip=mask.get('skip'), prompts=files) | flags)


EMBEDDED = Pair(draft=str(MODELS / 'draft'), max_new=160, longest=300, dtype='fp32', made='lab.train')


@functools.cache
def rows_by_family(files):
    """{family: rows} of files; a row's family is its `category` or `task`, else the file's name."""
    found = {}
    for file in files:
        for row in read_rows(None, file):
            family = row.get('category') or row.get('task') or File(file).stem
            found.setdefault(str(family), []).append(row)
    return found


# ------------------------------------------------------------------------------------------------ one run

@dataclass
class Own:
    """What a setting may say of its Engine, beside the method's knobs."""
    temperature: float = knob(0.0, '0 is greedy', 0, 1e6)
    seed: int = knob(0, 'of the random numbers', 0, 2 ** 62)
    draft: str = knob('', "another folder, lookup, none, self; '': the pair's")
    draft_bits: int = knob(None, '8 or 16; None: as in specmini.py', words=(8, 16))
    lookup: bool = knob(False, 'look up in the text first, else ask the draft model')

    def __post_init__(self):
        check_fields(self)


@functools.cache
def cached_engine(pair, draft, bits):
    """An Engine of the pair that drafts as `draft` says: the pair's own model, lookup, none, self."""
    options = {name: getattr(pair, name) for name in ('max_new', 'ignore_eos', 'device', 'dtype', 'compile')}
    engine = SharingEngine(pair.target, draft, draft_bits=bits, **options)
    engine.usual = engine.proposer
    if pair.is_embedded and draft == pair.draft and 'signals' not in engine.calibration:
        engine.calibration['signals'] = measure_signals(engine, Settings())     # the lab's other draft
    return engine


def parts_of(setting):
    """(a Method, an Own) of `sd gamma=3 lookup=true seed=1`."""
    options = knobs_of(Own)
    words = re.split(r'\s+(?=\S+=)', setting)
    own = [word for word in words if word.partition('=')[0] in options]
    rest = ' '.join(word for word in words if word not in own)
    texts = split_knobs(own, setting)
    own = Own(**{name: read_value(text, options[name].type) for name, text in texts.items()})
    require_that(not own.lookup or own.draft not in SOURCES,
                 f'{setting}: lookup=true wants a draft model')
    return make_methods([rest])[rest], own


def prepared(pair, setting='sd'):
    """(an Engine of the pair, a Method of one text) as the setting says."""
    method, own = parts_of(setting)
    engine = cached_engine(pair, own.draft or pair.draft or 'lookup', own.draft_bits)
    engine.temperature = own.temperature
    engine.seed = own.seed
    engine.proposer = lookup_then_draft if own.lookup else engine.usual
    return engine, method


def started(pair, setting, prompt):
    """A Session of the pair that has read a prompt, drafted for as the setting says."""
    engine, method = prepared(pair, setting)
    engine.open([prompt.ids])
    return engine.start(prompt.ids, method)


def run_once(pair, setting, prompt):
    """(Session, Cycles, Engine, seconds, passes) of one run; the prompt is not timed."""
    engine, method = prepared(pair, setting)
    engine.open([prompt.ids])
    engine.calibration['checker'] = None                # of steps, which rsd asks
    if tasks.is_own(prompt.row):
        engine.calibration['checker'] = tasks.step_checker(prompt.row, engine.tokenizer, len(prompt.ids))
    session = engine.start(prompt.ids, method)
    marks = {role: len(reader.log) for role, reader in engine.readers.items()}
    begin = moment()
    cycles = list(decode(session, method))
    seconds = moment() - begin
    passes = {}
    for role, reader in engine.readers.items():
        for path, positions in reader.log[marks[role]:]:
            passes.setdefault(f'{role}/{path.name}', Counter())[positions] += 1
    return session, cycles, engine, seconds, passes


def run_row(pair, setting, prompt):
    """A row of one run.

    tokens written; end: eos or length; wrong: tokens that are not the target's first choice after the same
    text; nats: -log p of the text by the target at temperature 1; right: 1, 0, or None where nothing tells;
    cycles: {`drafted judged kept`: cycles} in tokens; passes: {reader/path: {positions of all rows: passes}};
    seconds: of each turn, without the prompt.
    """
    session, cycles, engine, seconds, passes = run_once(pair, setting, prompt)
    written = session.tokens[session.begin:]
    logits = session.target.read(session.tokens[:-1], session.target.model.full, len(written)).float()
    counts = Counter()
    for cycle in cycles:
        judged = sum(len(one.tokens) for one in cycle.judged)
        counts[f'{len(cycle.drafted)} {judged} {cycle.accepted}'] += 1
    return prompt.name | dict(
        setting=setting, temperature=engine.temperature, allowed=engine.max_new, tokens=len(written),
        end='eos' if session.ended else 'length',
        wrong=sum(pick != token for pick, token in zip(logits.argmax(-1).tolist(), written)),
        nats=-float(token_logps(logits, written).sum()),
        right=graded(prompt.row, engine.tokenizer.decode(tokens_of(cycles))),
        cycles=counts, passes=passes, seconds=[seconds])


def graded(row, text):
    """1 or 0: whether the text is right for its row; None where nothing tells. The lab grades its own."""
    right = tasks.grade(row, text) if tasks.is_own(row) else grade(row, text)
    return None if right is None else int(right)


def moment():
    """Seconds by the clock; on CUDA when all is done that was asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def text_rows(settings, turns, pair, prompt):
    """The rows of one text. A turn has an order of its own, and plain decoding, the first, three times.

    That is at its beginning, middle and end, because the same setting takes longer at another moment.
    """
    first, *others = settings
    rows = {}
    if pair.compile:                                    # a first run compiles
        for setting in settings:
            run_once(pair, setting, prompt)
    for turn in range(turns):
        random.Random(f'{prompt.family} {prompt.place} {turn}').shuffle(others)
        half = len(others) // 2
        for setting in (first, *others[:half], first, *others[half:], first):
            if setting in rows:
                rows[setting]['seconds'].append(run_once(pair, setting, prompt)[3])
            else:
                rows[setting] = run_row(pair, setting, prompt)
    return [rows[setting] for setting in settings]


# ------------------------------------------------------------------------------------ lists and other records

class Record(NamedTuple):
    """What is measured item by item, always in the same order."""
    items: Callable         # function (pair, n) -> list
    rows: Callable          # function (pair, item) -> list of dicts
    n: int = 2              # items of each family that the embedded pair has
    about: dict = {}        # for the head
    drafts: bool = True     # whether it needs a draft model
    only: str = ''          # why it is of the embedded pair alone, as words; '': of any pair


def read_list(where):
    """The Record of a list of settings."""
    with naming(where), open(where, encoding='utf-8-sig') as file:
        lines = [' '.join(line.split()) for line in file if line[:1] != '#']
        head, _, rest = '\n'.join(lines).strip().partition('\n\n')
        about = dict(line.partition(':')[::2] for line in head.splitlines())
        wrong = about.keys() - {'families', 'n', 'turns'}
        require_that(not wrong and len(about) == len(head.splitlines()),
                     f'found {", ".join(wrong) or "one twice"}; a head has families:, n:, turns:, each once')
        settings = [line for line in rest.splitlines() if line]
        require_that(len({*settings}) == len(settings) > 1,
                     'expected a head, an empty line, and two settings or more, each once')
        families = about.get('families', '').split()
        unknown = {*families} - tasks.TASKS.keys()
        known = ', '.join(tasks.TASKS)
        require_that(not unknown, f'families: found {", ".join(unknown)}; the lab has {known}')
        n, turns = (read_value(about.get(name, '1').strip(), int) for name in ('n', 'turns'))
        require_that(all(isinstance(x, int) and x > 0 for x in (n, turns)), 'n, turns: expected 1 or more')
        methods = [parts_of(setting) for setting in settings]   # a wrong one is told before it is measured
    drafts = any(not own.draft and not isinstance(method, Autoregressive) for method, own in methods)
    return Record(lambda pair, n: pair.texts(families, n), functools.partial(text_rows, settings, turns), n,
                  dict(families=families, settings=settings, turns=turns), drafts)


def cost_rows(pair, _):
    """[{reader/path: [0, seconds of a pass over 1, 2, ... positions]}]: of draft, target and slim passes.

    The draft's are over that many rows of one position. Medians over rounds through all sizes, because a
    busy moment then spoils one round of each size and not all rounds of one.
    """
    engine, method = prepared(pair, 'via')
    text = [1] * min(100, engine.context // 2)
    engine.open([text])
    session = engine.start(text, method)
    target, draft = session.target, session.drafter
    times = {}
    for _ in range(80 if pair.is_embedded else 7):              # where a pass takes a tenth of a second
        for name, path in (('target/full', target.model.full), ('target/slim', session.slim_path)):
            target.read(text, path, 0)                          # what another path wrote is read again
            for n in range(1, COSTED + 1):
                begin = moment()
                target.read(text, path, n)
                times.setdefault((name, n), []).append(moment() - begin)
        for rows in range(1, ROWS + 1):
            fork = draft.fork(rows)
            ids = torch.ones(rows, dtype=torch.long, device=draft.model.device)
            fork.append(ids, draft.model.full)                  # the first has just copied a cache
            begin = moment()
            fork.append(ids, draft.model.full)
            times.setdefault(('draft/full', rows), []).append(moment() - begin)
    found = {}
    for (name, _), seconds in times.items():
        found.setdefault(name, [0.0]).append(statistics.median(seconds))
    return [found]


COSTS = Record(lambda pair, n: [pair], cost_rows)


def records_of(paper):
    """{name: Record} of a paper: its lists, and what is no run."""
    lists = {where.stem: read_list(where) for where in sorted((LAB / paper).glob('*.txt'))
             if '.' not in where.stem}
    return lists | getattr(importlib.import_module(f'lab.{paper}.claims'), 'RECORDS', {})


# ----------------------------------------------------------------------------------------------- stored rows

class Stored(NamedTuple):
    """A record as it was stored."""
    head: dict          # see Pair.head
    rows: list


def for_json(value):
    """The value as JSON gives it back: floats cut to DIGITS significant digits; nan is None."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f'{float(text):.{DIGITS}g}'),
                      parse_constant=lambda _: None)


def as_line(row):
    return json.dumps(for_json(row), separators=(',', ':')) + '\n'


def dated(head):
    """The head with what may differ when it is measured again: versions, machine, commit, today's date."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    device = dict(card=torch.cuda.get_device_name()) if torch.cuda.is_available() else {}
    return head | dict(versions=versions, cpu=cpu(), threads=torch.get_num_threads(), commit=commit(),
                       date=datetime.date.today().isoformat()) | device


def cpu():
    """The name of this machine's CPU, and the widest vectors that torch uses on it."""
    about = File('/proc/cpuinfo')
    name = re.search(r'model name\s*: (.*)', about.read_text()) if about.exists() else None
    return f'{name[1] if name else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}'


def commit():
    """The last commit that changed code, with a + if code differs from it; '' where there is no git."""
    def git(*words):
        return subprocess.run(['git', *words, '--', '*.py'], cwd=LAB.parent, capture_output=True, text=True)
    try:
        last = git('log', '-1', '--format=%h').stdout.strip()
        return last + '+' if last and git('diff', '--quiet', 'HEAD').returncode else last
    except OSError:
        return ''


def begun(where):
    """The file in which a record grows until it is whole: an earlier one is kept till then."""
    home = File(os.path.realpath(where))                # of a link: what it leads to
    return home.with_name(home.name + '.part')


def write_rows(where, head, texts, there=()):
    """Writes a head, or the lines that are there, then the rows of each text as they are measured."""
    part = begun(where)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    with locked(part, wait=False):                      # or another run measures this record
        with new_file(part) as file:
            file.writelines(there or [as_line(head)])
        with locked(part), open(part, 'a', encoding='utf-8') as file:       # which is a new one
            for rows in texts:
                print(''.join(map(as_line, rows)), end='', file=file, flush=True)
        part.replace(os.path.realpath(where))


def whole_lines(where, head):
    """Those of a record of this head, begun or whole, whatever its date and versions; [] of another."""
    changing = dict.fromkeys(('versions', 'commit', 'date'))
    for file in begun(where), where:
        lines = file.read_text(encoding='utf-8').splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith('\n')]      # an interrupt may break one off
        with naming(f'--resume: {file}'):
            found, *_ = [json.loads(line) for line in whole] or [{}]
        if found | changing == for_json(head) | changing:
            return whole
    return []


def read_stored(where):
    """The Stored record of a file."""
    with naming(where):
        head, *rows = map(json.loads, where.read_text(encoding='utf-8').splitlines() or ['{}'])
    return Stored(head, rows)


# ----------------------------------------------------------------------------------------------- the program

def measure(record, where, pair, n, resume=False):
    """Measures and stores a Record in this file; n: prompts of each family."""
    head = pair.head(n=n, **record.about)
    items = record.items(pair, n)
    require_that(items, f'{where.stem}: no prompt to measure on; its families, or --prompts, have none')
    there = whole_lines(where, head) if resume else []
    if resume and not there and begun(where).exists():
        other = begun(where).with_suffix('.other')
        with locked(begun(where), wait=False):          # or a run at work would lose it
            begun(where).replace(other)
        print(f'{other} has the rows of another list, --n or pair: they are not resumed', file=sys.stderr)
    names = [(row.get('family'), row.get('place')) for row in map(json.loads, there[1:])]
    whole = [name for name in names if name != names[-1]]       # the last text may lack rows
    texts = (record.rows(pair, item) for item in items[len({*whole}):])
    write_rows(where, head, texts, there[:1 + len(whole)])


def pair_of(args):
    """The Pair that the flags ask for; ValueError in one line where it is no pair."""
    pair = Pair(**{name: getattr(args, name) for name in knobs_of(Pair)} | dict(prompts=tuple(args.prompts)))
    if not pair.prompts:
        require_that(pair == Pair(draft=pair.draft), 'another pair takes --target DIR and --prompts FILE')
        draft = pair.draft and str(File(pair.draft).resolve())
        return replace(EMBEDDED, draft=draft or EMBEDDED.draft)         # the embedded target, another draft
    cached_engine(pair, pair.draft or 'lookup', None)   # which refuses models that do not fit
    require_that(len(pair.texts((), 2)) > 1,
                 f'--prompts: fewer than 2 prompts of {pair.longest} tokens at most; expected 2 or more')
    return pair


def work_of(args):
    """Yields (Record, the folder of its results, its name) of all that is named."""
    for one in args.work:
        if one == 'costs':
            yield COSTS, LAB, one
        elif one in PAPERS:
            records = records_of(one)
            require_that(not args.only or args.only in records,
                         f'--only {args.only}: {one} has {", ".join(records)}')
            for name, record in records.items():
                if args.only in (None, name):
                    yield record, LAB / one, name
        else:
            name = re.sub(r'\.(real|deep)$', '', File(one).stem)
            require_that(name == File(one).stem or args.prompts,
                         f'{one} is for another pair; give --target, --draft and --prompts')
            yield read_list(one), File(one).resolve().parent, name


def run():
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(prog='python -m lab.measure', description=__doc__.split('\n')[0])
    parser.add_argument('work', nargs='+', metavar='LIST',
                        help=f'a list of settings, or one of {", ".join(PAPERS)}, or costs: of the passes')
    parser.add_argument('--n', type=at_least(2), help='prompts of each family')
    parser.add_argument('--only', metavar='RECORD', help='this record of a paper alone')
    parser.add_argument('--resume', action='store_true', help='keep the rows of an interrupted run')
    parser.add_argument('--prompts', metavar='FILE', nargs='+', default=(), help='JSON lines; another pair')
    add_flags(parser, Pair)
    args = parser.parse_args()
    work = list(work_of(args))
    pair = pair_of(args)
    take_threads(network(pair.target, pair.device, pair.dtype, 16)[0])
    for record, folder, name in work:
        lacking = 'a draft model (--draft DIR)' if record.drafts and not pair.draft else ''
        if lacking or record.only and not pair.is_embedded:
            print(f'{name}: left out, it needs {lacking or record.only}', file=sys.stderr)
        else:
            where = folder / 'results' / pair.name / f'{name}.jsonl'
            measure(record, where, pair, args.n or (record.n if pair.is_embedded else 2), args.resume)
            print(where)


main = functools.partial(exit_status, 'lab.measure', run)          # returns the exit status

if __name__ == '__main__':
    from lab import measure as module                   # so that records and this program share caches
    sys.exit(module.main())
