"""Records what the papers' claims rest on: `python -m lab.measure via` stores rows that lab/judge.py judges.

Each paper has a module `claims` with RECORDS {name: Record}. A record is a file of JSON lines: a head that
says what it was measured on (Pair.head), then one row for each item, written as it is measured. With
--target, --draft and --prompts the same records are made of any other pair.
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

from kernels import Half, pack_children
from lab import at_least, tasks
from model import (Block, check_fields, encode, fingerprint, knob, knobs_of, new_file, read_calibration,
                   require_that)
from specmini import DTYPES, Engine, add_flags, chat, exit_status, grade, read_rows, ready, take_threads
from verify import (METHODS, Exact, confidence_signals, decode, draft_model, prompt_lookup, token_logps,
                    tokens_of)

SEED = 11               # of the held-out rows that are measured on
LAB = File(__file__).parent
MODELS = LAB / 'models'
PAPERS = dict(cmasd=60, ecsv=50, via=20, specguard=50, sparse=50, best=8)      # prompts of each task
ELSEWHERE = 12          # prompts of each family, of any other pair
DIGITS = 5              # significant digits of a stored number
MOST_POSITIONS = 32     # the longest pass whose cost is measured; over a costly target a fourth of that
MOST_ROWS = 6           # the most draft rows whose pass is measured


# ------------------------------------------------------------------------------------------------- the models

@functools.cache
def network(folder, device, dtype):
    """(Transformer, tokenizer, end ids) of a folder, held once."""
    return ready(folder, device, dtype)


class Costly(torch.nn.Module):
    """A sublayer's last product, and after it the products of others like it, of which nothing is kept.

    So a pass reads the weights of a larger model and writes the same text, bit for bit. Left out are the
    others' attention, norms and activations, on a CPU 8 % of a layer's time.
    """

    def __init__(self, last, others):
        """others: pairs of a sublayer's first and last product."""
        super().__init__()
        self.last = last
        self.others = torch.nn.ModuleList(map(torch.nn.ModuleList, others))

    def forward(self, x):
        y = self.last(x)
        for first, last in self.others:
            y = y + 0 * last(first(y)[:, :x.shape[1]])
        return y


def make_costly(model, layers):
    """Lets each layer of a packed network run so many others. They are as many sets of random weights.

    All layers share the sets, each of which has left a CPU's caches when its turn comes again.
    """
    torch.manual_seed(0)
    others = [Block(model.config, 0).requires_grad_(False) for _ in range(layers)]
    for block in others:
        for weight in block.parameters():
            weight.data = 0.02 * torch.randn_like(weight)
            if weight.ndim == 2 and isinstance(model.lm_head, Half):
                weight.data = weight.data.bfloat16()
        pack_children(block.self_attn)
        pack_children(block.mlp)
    for layer in model.model.layers:
        attention = [(block.self_attn.qkv_proj, block.self_attn.o_proj) for block in others]
        layer.self_attn.o_proj = Costly(layer.self_attn.o_proj, attention)
        channels = [(block.mlp.gate_up_proj, block.mlp.down_proj) for block in others]
        layer.mlp.down_proj = Costly(layer.mlp.down_proj, channels)


class SharingEngine(Engine):
    """An Engine that takes networks which are loaded already, and reads a prompt once for all settings."""
    opened = None           # (prompts, max_new) of its caches

    def network(self, folder):
        return network(folder, self.device, self.dtype)

    def open(self, prompts):
        if self.opened != (prompts, self.max_new):
            super().open(prompts)
            self.opened = prompts, self.max_new
            for reader in self.readers.values():
                reader.forget = lambda: None            # a cache knows itself what a text may build on


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
    device: str = knob('cpu', 'or cuda', words=('cpu', 'cuda'))
    dtype: str = knob('auto', 'as in specmini.py', words=('auto', *DTYPES))
    made: str = knob('', 'how the weights were made, as words for the head of a record')
    costly: int = knob(0, 'layers that each layer of the target runs besides, for nothing', 0, 16)

    def __post_init__(self):
        check_fields(self)

    @property
    def is_embedded(self):
        return not self.prompts

    @property
    def name(self):
        """The folder of its results: `embedded`, or of the models' names, as `qwen-1.5b+0.5b`."""
        names = [File(folder).resolve().name for folder in self.folders]
        names[0] += f'x{1 + self.costly}' if self.costly else ''
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
        rows = rows_by_family(self.prompts)
        if self.is_embedded:
            rows = {family: tasks.rows(family, seed) for family in usual}
        found = []
        for family, theirs in rows.items():
            encoded = ((row, self.encode(row['prompt'])) for row in theirs)
            short = itertools.islice(((row, ids) for row, ids in encoded if len(ids) <= self.longest), n)
            found += [Prompt(family, place, row, ids) for place, (row, ids) in enumerate(short)]
        return found

    def encode(self, text):
        """The ids of a prompt, in the chat template where that is wanted."""
        (ids,) = encode(self.tokenizer, [chat(self.target, text) if self.chat else text], not self.chat)
        return ids

    def head(self, record, n, by):
        """The first line of a record: what is measured, on what, by clock or counts, where and when."""
        models = {File(folder).resolve().name: fingerprint(folder) for folder in self.folders}
        files = {File(file).name: hashlib.sha256(File(file).read_bytes()).hexdigest()[:16]
                 for file in self.prompts}
        mask = read_calibration(self.target, self.draft).get('mask', {})
        return dated(dict(record=record, n=n, seed=SEED, models=models, made=self.made, skip=mask.get('skip'),
                          costly=self.costly, device=self.device, dtype=self.dtype, prompts=files,
                          chat=self.chat, max_new=self.max_new, longest=self.longest, by=by))


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


def run_row(settings, pair, prompt, timed=False):
    """A row {family, place, runs: {name: counts}} of one prompt; settings: {name: Setting}, or of a pair.

    Only rows that are `timed`, of a machine that does nothing else, keep the seconds.

    Settings are run in turn, in another order for each text, because the same setting took 8 % longer at
    another place of a fixed order.
    """
    settings = settings(pair) if callable(settings) else settings
    order = random.Random(f'{prompt.family} {prompt.place}').sample(list(settings), len(settings))
    runs = {name: counts_of(pair, settings[name], prompt) for name in order}
    for run in runs.values():
        if not timed:
            del run['seconds']
    return prompt.name | dict(runs={name: runs[name] for name in settings})


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


def counts_of(pair, setting, prompt):
    """What one Setting does with one text: the counts of a run.

    tokens written; drafted, judged and accepted draft tokens; cycles; wrong: tokens that are not the target's
    first choice after the same text; nats: -log p of the text by the target; right: 1, 0, or None where the
    row has no answer; seconds by the clock, without the prompt; passes {reader/path: {positions: passes}}.
    """
    engine = prepared(pair, setting)
    engine.open([prompt.ids])
    method = setting.method()
    session = engine.start(prompt.ids, method)
    marks = {role: len(reader.log) for role, reader in engine.readers.items()}
    begin = moment()
    cycles = list(decode(session, method))
    seconds = moment() - begin
    passes = {}                                         # positions count all rows
    for role, reader in engine.readers.items():
        for path, positions in reader.log[marks[role]:]:
            passes.setdefault(f'{role}/{path.name}', Counter())[positions] += 1
    judged = [verdict for cycle in cycles for verdict in cycle.judged]
    written = session.tokens[session.begin:]
    logits = session.target.read(session.tokens[:-1], session.target.model.full, len(written)).float()
    return dict(
        tokens=len(written), drafted=sum(len(cycle.drafted) for cycle in cycles),
        judged=sum(len(one.tokens) for one in judged),
        accepted=sum(len(one.tokens) for one in judged if one.kept), cycles=len(cycles),
        wrong=sum(pick != token for pick, token in zip(logits.argmax(-1).tolist(), written)),
        nats=-float(token_logps(logits, written).sum()),
        right=graded(prompt.row, engine.tokenizer.decode(tokens_of(cycles))), seconds=seconds, passes=passes)


def graded(row, text):
    """1 or 0: whether the text is right for its row; None where nothing tells. The lab grades its own."""
    right = tasks.grade(row, text) if tasks.is_own(row) else grade(row, text)
    return None if right is None else int(right)


def moment():
    """Seconds by the clock; on CUDA when all is done that was asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


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

def cost_row(pair, _):
    """{reader/path: [0, seconds of a pass over 1, 2, ... positions]}: of draft, target and slim passes.

    The draft's are over that many rows of one position. Medians over rounds through all sizes, because a
    busy moment then spoils one round of each size and not all rounds of one.
    """
    engine = prepared(pair, sd(4))
    text = [1] * min(100, engine.context // 2)
    engine.open([text])
    session = engine.start(text, METHODS['via']())
    target, draft = session.target, session.drafter
    tokens = itertools.cycle(range(2, target.model.vocab))      # each pass reads one that no cache holds
    times = {}
    for _ in range(80 if pair.is_embedded else 7):              # where a pass takes a tenth of a second
        for n in range(1, MOST_POSITIONS // (4 if pair.costly else 1) + 1):
            for name, path in (('target/full', target.model.full), ('target/slim', session.slim_path)):
                target.read(text[:-1], path, 0)
                begin = moment()
                target.read(text[:-1] + [next(tokens)] + [1] * (n - 1), path, n)
                times.setdefault((name, n), []).append(moment() - begin)
        for rows in range(1, MOST_ROWS + 1):
            draft.read(text[:-1], draft.model.full, 0)
            fork = draft.fork(rows)
            ids = torch.full((rows,), next(tokens), device=draft.model.device)
            fork.append(ids, draft.model.full)                  # the first has just copied a cache
            begin = moment()
            fork.append(ids, draft.model.full)
            times.setdefault(('draft/full', rows), []).append(moment() - begin)
    found = {}
    for (name, _), seconds in times.items():
        found.setdefault(name, [0.0]).append(statistics.median(seconds))
    return found


# ----------------------------------------------------------------------------------------------- stored rows

class Record(NamedTuple):
    """What is measured row by row, each row of one item, always in the same order."""
    items: Callable         # function (pair, n) -> list
    row: Callable           # function (pair, item) -> dict
    drafts: bool = True     # whether it needs a draft model
    only: str = ''          # why it is of the embedded pair alone, as words; '': of any pair
    by: str = 'counts'      # of passes, tokens, answers; or the clock, which wants an idle machine


def on_prompts(families, row, **kind):
    """The Record of a row for each prompt of these families (or of a pair's files)."""
    return Record(lambda pair, n: pair.texts(families, n), row, **kind)


COSTS = dict(costs=Record(lambda pair, n: [pair], cost_row, by='clock'))        # one record for all papers


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


def file_of(paper, pair, name):
    """The file of a record; pair: the name of a Pair; paper: '' for the costs of passes."""
    return LAB / paper / 'results' / pair / f'{name}.jsonl'


def dated(head):
    """The head with what may differ when it is measured again: versions, machine, commit, today's date."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    return head | dict(versions=versions, cpu=cpu(), threads=torch.get_num_threads(), commit=commit(),
                       date=datetime.date.today().isoformat())


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
    return where.with_name(where.name + '.part')


def write_rows(where, head, rows, there=()):
    """Writes a head, or the lines that are there, then each row as it is measured."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with new_file(begun(where)) as file:
        file.writelines(there or [as_line(head)])
    with open(begun(where), 'a', encoding='utf-8') as file:
        for row in rows:
            print(as_line(row), end='', file=file, flush=True)
    begun(where).replace(where)


def whole_lines(where, head):
    """Those of a record of this head, begun or whole, whatever its date and versions; [] of another."""
    changing = dict.fromkeys(dated({}))
    for file in begun(where), where:
        lines = file.read_text(encoding='utf-8').splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith('\n')]      # an interrupt may break one off
        if whole and json.loads(whole[0]) | changing == for_json(head) | changing:
            return whole
    return []


def read_stored(where):
    """The Stored record of a file."""
    head, *rows = map(json.loads, where.read_text(encoding='utf-8').splitlines())
    return Stored(head, rows)


# ----------------------------------------------------------------------------------------------- the program

def measure(paper, pair, n, only=None, resume=False):
    """Measures and stores the records of a paper, or the one named `only`; n: prompts of each family."""
    records = COSTS if paper == 'costs' else importlib.import_module(f'lab.{paper}.claims').RECORDS
    require_that(not only or only in records, f'--only {only}: {paper} has the records {", ".join(records)}')
    for name, record in records.items():
        if only and name != only:
            continue
        lacking = 'a draft model (--draft DIR)' if record.drafts and not pair.draft else ''
        if lacking or record.only and not pair.is_embedded:
            print(f'{paper} {name}: left out, it needs {lacking or record.only}', file=sys.stderr)
        else:
            where = file_of('' if paper == 'costs' else paper, pair.name, name)
            head = pair.head(name, n, record.by)
            there = whole_lines(where, head) if resume else []
            items = itertools.islice(record.items(pair, n), max(0, len(there) - 1), None)
            write_rows(where, head, (record.row(pair, item) for item in items), there)


def pair_of(args):
    """The Pair that the flags ask for; ValueError in one line where it is no pair."""
    pair = Pair(**{name: getattr(args, name) for name in knobs_of(Pair)} | dict(prompts=tuple(args.prompts)))
    if not pair.prompts:
        require_that(pair == Pair(draft=pair.draft), 'another pair takes --target DIR and --prompts FILE')
        return replace(EMBEDDED, draft=pair.draft or EMBEDDED.draft)    # the embedded target, another draft
    pair.engine()                                       # which refuses models that do not fit
    require_that(len(pair.texts((), 2)) > 1,
                 f'--prompts: fewer than 2 prompts of {pair.longest} tokens at most; expected 2 or more')
    if pair.costly:
        target, _, _ = network(pair.target, pair.device, pair.dtype)
        require_that(pair.device == 'cpu' and not any(target.config.mixtures),
                     '--costly: expected --device cpu and a target without mixtures')
        make_costly(target, pair.costly)
    return pair


def run():
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(prog='python -m lab.measure', description=__doc__.split('\n')[0])
    parser.add_argument('papers', nargs='+', metavar='PAPER', choices=(*PAPERS, 'costs'),
                        help=f'of {", ".join(PAPERS)}, or costs: of the passes')
    parser.add_argument('--n', type=at_least(2), help='prompts of each family')
    parser.add_argument('--only', metavar='RECORD', help='this record of a paper alone')
    parser.add_argument('--resume', action='store_true', help='keep the rows of an interrupted run')
    parser.add_argument('--prompts', metavar='FILE', nargs='+', default=(), help='JSON lines; another pair')
    add_flags(parser, Pair)
    args = parser.parse_args()
    pair = pair_of(args)
    take_threads(network(pair.target, pair.device, pair.dtype)[0])
    for paper in args.papers:
        n = PAPERS.get(paper, 1) if pair.is_embedded else ELSEWHERE
        measure(paper, pair, args.n or n, args.only, args.resume)


def main():
    """Runs the program; returns its exit status."""
    return exit_status('lab.measure', run)


if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    from lab import measure as module                   # so that records and this program share caches
    sys.exit(module.main())
