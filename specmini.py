"""Speculative decoding from Python and from the command line: the Engine, a run, its flags; then figures.

`python specmini.py --prompt "..."` runs on the embedded models; --help names every flag, --list every method.
"""
import argparse
import contextlib
import copy
import difflib
import importlib
import inspect
import json
import math
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path as File
from statistics import median

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; nothing here needs it

import torch
from torch import distributed
from tqdm import tqdm

from model import (Reader, encode, load, pack, plain_file, rank_and_world_size, read_calibration, read_json,
                   require_that, require_writable, same_vocabulary, shared_length)
from verify import (CONTROLLERS, METHODS, TYPES, Autoregressive, Exact, Method, Session, Sparse, SpecGuard,
                    decode, draft_model, has_knob, knob_range, knobs_of, lookup_then_draft, no_draft,
                    prompt_lookup, token_logps, tokens_of, whole_passes)

HERE = File(__file__).parent
EMBEDDED = HERE / 'lab' / 'models'
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
SOURCES = dict(lookup=prompt_lookup, none=no_draft)     # of drafts, beside a draft model's chain
CORES = torch.get_num_threads()
SMALL = 50_000_000      # parameters below which one CPU thread beats several: too little work to share
FOLDER = 'a Hugging Face folder or repository, say Qwen/Qwen2.5-0.5B-Instruct'
PER_TEXT = 'temperature', 'top_k', 'top_p', 'max_new', 'seed'       # settings that a text may have of its own
ROUNDS = 3              # of a comparison
AUDITED = 256           # positions whose logits an audit holds at once
STEPS = 8               # of plain decoding that a run times at its end
LONGEST = 1000          # characters of a line about bad input; a template's own message may be longer


def lab_module(name):
    """The module of this name in the laboratory beside this file; None where the file stands alone."""
    return importlib.import_module(f'lab.{name}') if (HERE / 'lab').is_dir() else None


# --------------------------------------------------------------------------------------------- the Engine

@dataclass
class Engine:
    """Loaded models and the settings of a run: `Engine(target=DIR, draft=DIR).generate(text, Exact())`.

    ValueError, one line, for a setting or a checkpoint that does not fit.
    """
    target: str                     # a Hugging Face folder, or a repository owner/name
    draft: str = 'lookup'           # a folder; lookup: from the text itself; none; self: the slim target
    lookup: bool = False            # look up in the text first, else ask the draft model
    sparse: Sparse = None           # makes the target's passes sparse, under any method but plain decoding
    max_new: int = 256              # tokens to write at most
    temperature: float = 0.0        # 0 is greedy
    top_k: int = 0                  # sample from this many likeliest tokens; 0: from all
    top_p: float = 1.0              # sample from the likeliest tokens of this mass
    seed: int = 0
    ignore_eos: bool = False
    device: str = 'auto'            # cpu or cuda; auto: cuda where it is there
    dtype: str = 'auto'             # one of DTYPES; auto: see `ready`
    compile: bool = False           # torch.compile the passes
    tensor_parallel: bool = False   # whether each process of a group has a shard of the target
    readers: dict = field(default_factory=dict, init=False)     # {role: Reader}, see open
    paths: dict = field(default_factory=dict, init=False)       # {role: Reader.paths of all texts so far}
    session: type = field(default=Session, init=False)          # of a text; lab.page has one that notes more

    def __post_init__(self):
        check_settings(self)
        self.device = pick_device(self.device)
        self.draft = str(self.draft or 'none')
        self.proposer = SOURCES.get(self.draft, lookup_then_draft if self.lookup else draft_model)
        self.has_draft = self.draft not in ('lookup', 'none', 'self')
        require_that(self.has_draft or not self.lookup,
                     f'--lookup with --draft {self.draft}: expected --draft DIR')
        target, self.tokenizer, eos = self.network(self.target)
        self.eos = frozenset() if self.ignore_eos else eos
        self.models = dict(target=target)                               # by role
        if self.has_draft:
            self.models['draft'], _, _ = self.network(self.draft)
            same_vocabulary(target, self.models['draft'], f'--draft {self.draft}')
        draft = self.draft if self.has_draft else None
        self.calibration = read_calibration(self.target, draft)
        contexts = {role: model.config.max_position_embeddings for role, model in self.models.items()}
        self.shortest = min(contexts, key=contexts.get)                 # the role that limits a text
        self.context = contexts[self.shortest]
        self.dtype = next(name for name, dtype in DTYPES.items() if dtype == target.dtype)
        if self.device == 'cpu':
            take_threads(target)

    def network(self, folder):
        """(Transformer, Tokenizer, end-of-sequence ids) of a folder, as this run needs it."""
        shard = self.tensor_parallel and folder == self.target
        return ready(folder, self.device, self.dtype, self.compile, shard)

    def open(self, prompts):
        """Makes caches for the longest of the prompts (lists of ids); ValueError where one does not fit."""
        V = self.models['target'].vocab
        for i, ids in enumerate(prompts, 1):
            highest = max(ids, default=0)
            require_that(highest < V, f'prompt {i} has token {highest}, but the last one is {V - 1}')
            require_that(0 < len(ids) < self.context, f'prompt {i} has {len(ids)} tokens; expected 1 to '
                         f'{self.context - 1}, by the context of the {self.shortest}')
        capacity = min(self.context, max(map(len, prompts)) + self.max_new)
        self.readers = {}
        for role, model in self.models.items():
            reader = self.readers[role] = Reader(model, capacity, self.compile)
            reader.paths = self.paths.setdefault(role, reader.paths)        # of earlier texts, too

    def start(self, ids, method, row=0):
        """A Session that has read this prompt (ids, opened before), without what earlier texts left."""
        plain = isinstance(method, Autoregressive)
        for reader in self.readers.values():
            reader.forget()
        session = self.session(
            target=self.readers['target'], draft=None if plain else self.readers.get('draft'),
            proposer=self.proposer, tokens=list(ids), tokens_left=min(self.max_new, self.context - len(ids)),
            eos=self.eos, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            generator=torch.Generator().manual_seed(self.seed + row),       # equal prompts, other samples
            text=self.tokenizer.decode, calibration=self.calibration, sparse=self.sparse)
        session.read_prompt()
        return session

    def write(self, ids, method, row=0):
        """The Cycles of one whole text; the method itself is left as it is, for other texts."""
        method = method_for(method)
        return list(decode(self.start(ids, method, row), method))

    def stream(self, text, method, **settings):
        """Yields (a piece of the text that follows, its Cycle) as it is written.

        text: or its ids; method: a Method or its name; settings: of this text, those in PER_TEXT.
        """
        unknown = settings.keys() - PER_TEXT
        require_that(not unknown, f'{", ".join(unknown)}: expected some of {", ".join(PER_TEXT)}')
        engine = copy.copy(self)
        vars(engine).update(settings)
        check_settings(engine)
        ids = encode(self.tokenizer, [text])[0] if isinstance(text, str) else list(text)
        engine.open([ids])
        method = method_for(method)
        session = engine.start(ids, method)
        growing = GrowingText(self.tokenizer)
        for cycle in decode(session, method):
            piece = ''.join(map(growing.add, cycle.tokens))
            last = session.ended or not session.tokens_left
            yield piece + growing.rest() if last else piece, cycle

    def generate(self, text, method, **settings):
        """(the text that follows, its Cycles): all that `stream` yields."""
        pieces, cycles = zip(*self.stream(text, method, **settings))
        return ''.join(pieces), list(cycles)

    def statistics(self, cycles):
        """The figures of these Cycles, see statistics."""
        return statistics(cycles, self.weights())

    def weights(self):
        """{reader/path: bytes that one pass streams} of the paths that were read on so far."""
        weights = {}
        for role, model in self.models.items():
            for name, path in (dict(full=model.full) | self.paths.get(role, {})).items():
                weights[f'{role}/{name}'] = model.read_bytes(path)
        return weights

    def lossless(self, method):
        """Whether this run keeps the target's distribution; `sparse` leaves plain decoding alone."""
        plain = isinstance(method, Autoregressive)
        return method.lossless and (plain or self.sparse is None or self.sparse.lossless)


def method_for(method):
    """The Method of one text: a copy of this one, or by its name with its default knobs."""
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    require_that(isinstance(method, Method), f'method {no_such(str(method), METHODS)}')
    return replace(method)


def take_threads(target):
    """Sets how many CPU threads compute, unless OMP_NUM_THREADS says: one for a small target, else all cores.

    Several processes share the cores, and have a shard of the target each.
    """
    _, count = rank_and_world_size()
    small = count * sum(p.numel() for p in target.parameters()) < SMALL
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1 if small else max(1, CORES // count))


def check_settings(s):
    """ValueError for the first setting of an Engine, or flag of the program, that is out of its range."""
    for name, kind, low, high in (
            ('temperature', float, 0, 1e6), ('top_k', int, 0, 2 ** 31), ('top_p', float, 1e-9, 1),
            ('max_new', int, 1, 2 ** 31), ('seed', int, 0, 2 ** 62)):
        value = getattr(s, name)
        fits = type(value) in (int, kind) and low <= value <= high
        require_that(fits, f'--{name.replace("_", "-")} {value}: expected {TYPES[kind]}, {low} to {high}')
    require_that(s.dtype in ('auto', *DTYPES), f'--dtype {s.dtype}: expected auto, {", ".join(DTYPES)}')


def pick_device(name):
    """'cpu' or 'cuda'; ValueError if CUDA is asked for and absent."""
    require_that(name in ('auto', 'cpu', 'cuda'), f'--device {name}: expected auto, cpu or cuda')
    there = torch.cuda.is_available()
    require_that(there or name != 'cuda', '--device cuda: this machine, or torch, has none; use --device cpu')
    return name if name != 'auto' else 'cuda' if there else 'cpu'


def ready(folder, device, dtype, compiled=False, shard=False):
    """model.load's three, the network packed where that serves it; dtype: one of DTYPES, or auto.

    auto: bf16 on a card, or fp16 where that only emulates bf16 (say a T4); fp32 on a CPU, where matrices keep
    the 16 bits of their files, see model.Half.
    """
    plain = device == 'cpu' and not compiled
    as_stored = plain and dtype == 'auto'
    if dtype == 'auto' and device == 'cuda':
        dtype = 'bf16' if torch.cuda.get_device_capability() >= (8, 0) else 'fp16'
    loaded = load(folder, device, DTYPES.get(dtype, torch.float32), shard, as_stored)
    if plain:
        pack(loaded[0])
    return loaded


# ------------------------------------------------------------------------------------ a text that was written

@dataclass
class Text:
    """One text by one method: the record from which its figures, rows and traces are computed."""
    row: dict               # of the file of prompts
    number: int             # of this row, from 0
    prompt: list            # ids
    name: str               # of the method
    method: object
    cycles: list = field(default_factory=list)
    finish: str = 'interrupted'         # eos, length (of --max-new or the context), or interrupted
    prompt_seconds: float = 0.0
    audited: list = field(default_factory=list)     # of a lossy text, see `audit`

    @property
    def tokens(self):
        """Ids after the prompt."""
        return tokens_of(self.cycles)


def write_text(engine, row, number, prompt, name, method, show=None):
    """(Text, its Session); Ctrl-C ends it early. show: called with each Cycle and the method."""
    method = method_for(method)
    session = engine.start(prompt, method, number)
    text = Text(row, number, prompt, name, method, prompt_seconds=session.prompt_seconds)
    with contextlib.suppress(KeyboardInterrupt):
        for cycle in decode(session, method):
            text.cycles.append(cycle)
            if show:
                show(cycle, method)
        text.finish = 'eos' if session.ended else 'length'
    if not engine.lossless(method):
        text.audited = audit(session)
    return text, session


def audit(session):
    """[[p(x), log p(x), sum p^2]] of each token x that was written, by dense passes of the target after it.

    p is what the run samples from, log p of the raw logits, in nats; sum p^2 is the mean of p(x) over samples
    of the target's own. AUDITED tokens a pass: memory.
    """
    reader = session.target
    audited = []
    for begin in range(session.begin, len(session.tokens), AUDITED):
        tokens = session.tokens[begin:begin + AUDITED]
        rows = reader.read(session.tokens[:begin] + tokens[:-1], reader.model.full, len(tokens))
        p = session.probs(rows)
        own = p.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
        audited += torch.stack([own, token_logps(rows, tokens), p.square().sum(1)], 1).tolist()
    return audited


def report(engine, text):
    """The JSON object of a Text; `right` only where its row can be graded."""
    stats = engine.statistics(text.cycles) | dict(prompt_seconds=text.prompt_seconds)
    result = dict(
        text=engine.tokenizer.decode(text.tokens),
        tokens=text.tokens,
        prompt_tokens=len(text.prompt),
        method=text.name,
        lossless=engine.lossless(text.method),
        knobs={knob: json_value(getattr(text.method, knob)) for knob in knobs_of(type(text.method))},
        seed=engine.seed + text.number,
        device=engine.device,
        dtype=engine.dtype,
        finish=text.finish,
        stats=stats | audit_figures([text]))
    right = grade(text.row, result['text'])
    return result if right is None else result | dict(right=right)


def json_value(value):
    """The value, or its name where JSON has none: an infinite knob or threshold."""
    return str(value) if value in (math.inf, -math.inf) else value


def trace_lines(text, tokenizer):
    """A dict for each cycle: ids, text, who wrote what, the judged tokens' scalars, passes, time, notes."""
    lines = []
    for i, cycle in enumerate(text.cycles):
        judged = [judged_row(row) for row in cycle.judged]
        passes = {}
        for path, (n, positions, seconds) in cycle.passes.items():
            passes[path] = dict(passes=n, positions=positions, ms=round(seconds * 1000, 3))
        lines.append(dict(
            prompt=text.number, cycle=i, drafted=cycle.drafted, judged=judged, tokens=cycle.tokens,
            labels=cycle.labels, text=tokenizer.decode(cycle.tokens), passes=passes,
            ms=round(cycle.seconds * 1000, 3), **cycle.notes))
    return lines


def judged_row(judged):
    """The JSON object of a Judged; its signals stand beside its other fields."""
    row = vars(judged) | judged.signals
    return {key: json_value(value) for key, value in row.items() if key != 'signals'}


# ----------------------------------------------------------------------------------------------------- a run

def run(args):
    """All that the flags ask for; returns the exit status."""
    if args.list is not None:
        return list_methods(args.list)
    device = pick_device(args.device)
    join_ranks(device)
    rank, count = rank_and_world_size()
    if count > 1:
        require_that(not args.compile, '--compile: a sum over processes is no part of a graph; leave it out')
        require_that(not is_page(args.trace),
                     f'--trace {args.trace}: a page is of one process, trace to .jsonl')
        args.trace = args.trace if rank == 0 else None
    rows = read_rows(args.prompt, args.prompts)
    given = {option.name: getattr(args, option.name) for option in fields(Engine)
             if hasattr(args, option.name)}
    engine = Engine(**given, tensor_parallel=True)
    prompts = encoded(engine, rows, args.chat)
    engine.open(prompts)
    if args.compile:
        print('compiling, which is not counted below; other texts may need other passes', file=sys.stderr)
        for method in args.methods.values():
            engine.write(prompts[0], method)
    work = list(zip(rows, range(len(rows)), prompts))
    if args.compare:
        return compare(engine, work, args.methods, args.trace)
    return write_all(engine, work, args)


def write_all(engine, work, args):
    """Writes every row by one method and prints it as it is written; returns the exit status."""
    (name, method), = args.methods.items()
    if args.trace and lab_module('page'):
        engine.session = lab_module('page').Traced
    texts = []
    bar = None if len(work) > 1 else True               # None: on a terminal
    for row, number, prompt in tqdm(work, disable=bar, file=sys.stderr):
        printer = Printer(engine.tokenizer, args.show)
        text, session = write_text(engine, row, number, prompt, name, method,
                                   None if args.json else printer.add)
        texts.append(text)
        if args.json:
            print(json.dumps(report(engine, text)), flush=True)
        else:
            printer.finish()
            if len(work) > 1:
                print(figures(engine, [text]), file=sys.stderr, flush=True)
        if args.check:
            print(check(engine, prompt, text.tokens), file=sys.stderr)
        if text.finish == 'interrupted':
            break
    step = None
    tables = []
    if text.finish != 'interrupted':
        with contextlib.suppress(KeyboardInterrupt):    # while passes are timed: all texts are there
            step = plain_step(session) if name != 'ar' else None
            if args.times:
                tables = list(lab_module('times').times(engine, session, texts, step))
    lines = [figures(engine, texts, step), *notes(engine, session, texts), *tables]
    print('\n'.join(lines), file=sys.stderr)
    if args.trace:
        write_trace(args.trace, engine, texts, step)
    return 130 if text.finish == 'interrupted' else 0


# You may stop here: what follows reads flags and prompts, grades, prints, compares and computes figures.
# -------------------------------------------------------------------------------------------------- the flags

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f'{message}; --help lists the flags')


def parse(argv):
    """The flags, checked; ValueError in one line for what does not fit."""
    p = Parser(description='Speculative decoding on Llama and Qwen checkpoints.', allow_abbrev=False)
    add = p.add_argument_group('prompts').add_argument
    add('--prompt', help='the text to continue')
    add('--prompts', metavar='FILE.jsonl', help='rows with prompt, question or turns (the first is used)')
    add('--chat', action='store_true', help="put prompts into the checkpoint's own chat template")
    add = p.add_argument_group('models').add_argument
    add('--target', metavar='DIR', help='a Hugging Face folder or repository (default: the embedded target)')
    add('--draft', metavar='DIR|lookup|self|none', help='default: the embedded one, or lookup with --target; '
        'self: the target without the layers that its calibration.json skips')
    add('--lookup', action='store_true', help='look up in the text first, else ask the draft model')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto',
        help='auto: bf16 on CUDA; on a CPU fp32, with matrices in the 16 bits of their files')
    add('--compile', action='store_true', help='torch.compile the passes: needs a C++ compiler')
    add = p.add_argument_group('method').add_argument
    add('--method', default='sd', help='one of those that --list shows (default: sd)')
    add('--sparse', action='store_true', help='sparse verification under any method; --set takes its knobs')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--gamma', metavar='N', type='gamma={}'.format, action='append', dest='set',
        help="as --set gamma=N: draft tokens a cycle (default: the method's, 4 for sd)")
    add('--import', metavar='FILE.py', help='run a file of yours first, which enters methods or controllers')
    add('--compare', metavar='M1,M2,...', help='these methods and ar, in a table for each task')
    add('--list', metavar='NAME', nargs='?', const='',
        help='the methods; all: the baselines, too; NAME: the knobs of one')
    add = p.add_argument_group('sampling').add_argument
    add('--temperature', type=float, default=0.0, help='0 (default) is greedy')
    add('--top-k', type=int, default=0, help='sample from this many likeliest tokens; 0: from all')
    add('--top-p', type=float, default=1.0, help='sample from the likeliest tokens of this mass')
    add('--seed', type=int, default=0)
    add('--max-new', type=int, default=256, help='tokens to write at most (default: 256)')
    add('--ignore-eos', action='store_true', help='write on past the end of sequence')
    add = p.add_argument_group('output').add_argument
    add('--show', action='store_true', help='cycle by cycle: what was drafted, rejected, put in its place')
    add('--json', action='store_true', help='one JSON object for each prompt, instead of the text')
    add('--trace', metavar='FILE.jsonl|FILE.html', help='a line for every cycle, or a page')
    add('--check', action='store_true', help='run plain decoding beside it and name the first difference')
    add('--times', action='store_true', help='pass times, acceptance by position, the best gamma, memory')
    args = p.parse_args(argv)
    import_file(getattr(args, 'import'))
    if args.list is None:
        check_flags(args)
        fill_in(args)
    return args


def import_file(path):
    """Runs a Python file of the user's, which enters methods or controllers; ValueError where it fails."""
    if not path:
        return
    try:
        exec(compile(File(path).read_bytes(), path, 'exec'), dict(__name__=File(path).stem, __file__=path))
    except Exception as error:                          # whatever the file raises
        raise ValueError(f'--import {error_line(error, path)}') from None


def error_line(error, path):
    """An exception in a line; before it the latest line of the file at path that it passed through."""
    what = f'{type(error).__name__}: {error}'           # of a SyntaxError the text has the line
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f'{path}, line {lines[-1]}: {what}' if lines else f'{path}: {what}'


def check_flags(args):
    """ValueError for the first flag that does not fit."""
    empty = [flag for flag, value in vars(args).items() if value == '' and flag != 'prompt']
    require_that(not empty, f'--{", --".join(empty)}: found an empty text, expected a value')
    args.names = [args.method]
    if args.compare:
        names = [name.strip() for name in args.compare.split(',')]
        args.names = list(dict.fromkeys(['ar', *filter(None, names)]))
    for name in args.names:
        method_for(name)
    require_that(not args.sparse or 'sparse' not in args.names,
                 '--sparse: the method sparse is sparse by itself; leave it out')
    require_that(not args.sparse or args.names != ['ar'],
                 '--sparse: --method ar verifies nothing, so there is nothing to make sparse; leave it out')
    knobs = [item.partition('=')[0] for item in args.set]
    require_that(len(set(knobs)) == len(knobs), f'--set {" ".join(args.set)}: give each knob one value')
    require_that((args.prompt is None) != (args.prompts is None), 'give one of --prompt TEXT, --prompts FILE')
    check_settings(args)
    page = is_page(args.trace)
    unsuited = args.check or args.json or args.show or args.times or args.trace and not page
    require_that(not (args.compare and unsuited),
                 '--compare takes no --check, --json, --show, --times, and --trace only to FILE.html')
    by_lab = f'--trace {args.trace}' if page else '--times'
    require_that(not (page or args.times) or lab_module('page'),
                 f'{by_lab}: the folder lab/, which does it, is not beside this file; leave it out')
    require_that(not args.check or args.temperature == 0, '--check: texts agree only at --temperature 0')
    if args.trace:
        home = File(args.trace).parent
        require_that(home.is_dir(), f'--trace {args.trace}: there is no folder {home}; make it first')
        require_that(not File(args.trace).is_dir(), f'--trace {args.trace}: is a folder; name a file')
        require_writable(home, f'--trace {args.trace}')


def fill_in(args):
    """Puts in the methods, and defaults that depend on other flags; ValueError for knobs that do not fit."""
    if args.target is None:
        require_that(EMBEDDED.is_dir(), f'no embedded models beside this file: give --target {FOLDER}')
        args.draft = args.draft or EMBEDDED / 'draft'
        args.target = EMBEDDED / 'target'
    if args.names == ['ar']:
        # nothing is drafted: no draft model is loaded
        args.draft, args.lookup = 'none', False
    args.draft = args.draft or 'lookup'
    more = knobs_of(Sparse).keys() - knobs_of(Exact) if args.sparse else ()
    args.methods = {name: make_method(name, args.set, args.names, more) for name in args.names}
    args.sparse = make_method('sparse', args.set, args.names, more) if args.sparse else None


def make_method(name, settings, names, more=()):
    """The method with its knobs from --set, a list of 'knob=value', each read by its dataclass type.

    names: the methods of the run. Under --compare a method takes the knobs that it has; one that no method of
    the run has is refused, except `more`, which --sparse takes.
    """
    knobs = knobs_of(METHODS[name])
    values = {}
    for item in settings:
        knob, equals, value = item.partition('=')
        require_that(equals, f'--set {item}: expected knob=value; --list METHOD shows the knobs')
        known = knob in more or any(has_knob(other, knob, settings) for other in names)
        require_that(known, f'--set {item}: no knob of {", ".join(names)}{who_has(knob, names)}')
        if has_knob(name, knob, settings):
            values[knob] = read_value(value, knobs[knob].type)
    return METHODS[name](**values)


def read_value(value, kind):
    """A knob's value, a text, as its type; what is no value of it stays a text, which check_knobs refuses."""
    with contextlib.suppress(ValueError):
        return dict(true=True, false=False).get(value.lower(), value) if kind is bool else kind(value)
    return value


def who_has(knob, names):
    """What to do where no method of these names has the knob."""
    if knob == 'gamma' and any(has_knob(name, 'controller') for name in names):
        return '; another controller ends its blocks: set controller=fixed, or k_max where there is one'
    others = [name for name in METHODS if has_knob(name, knob)]
    return f', but of {", ".join(others[:3])}' if others else f', see --list {names[-1]}'


def no_such(name, names):
    """A sentence for a name that is none of these: the nearest, if one is near."""
    near = difflib.get_close_matches(name, names, 1)
    meant = f'did you mean {near[0]}? ' if near else ''
    return f'{name}: there is none of this name; {meant}specmini.py --list all shows them'


def list_methods(name):
    """Prints the methods and controllers, or of one what it does and its knobs: default, range, meaning."""
    every = METHODS | CONTROLLERS
    if name in every:
        print(inspect.getdoc(every[name]))
        for knob, option in knobs_of(every[name]).items() if name in METHODS else ():
            meaning = option.metadata.get('meaning', '')
            print(f'  {knob:18} {option.default!s:8} {knob_range(option):16}  {meaning}')
        return
    require_that(name in ('', 'all'), f'--list {no_such(name, every)}')
    baselines = [one for one in METHODS if METHODS[one].__module__.startswith('lab.')]
    papers = [one for one in METHODS if one not in ('sd', 'ar', *baselines)]
    groups = {'methods of the papers (--method NAME; --list NAME shows the knobs)': papers,
              'exact and plain decoding': ('sd', 'ar'),
              'what ends a block (--set controller=NAME)': CONTROLLERS,
              'baselines of the papers': baselines if name else ()}
    for title, names in groups.items():
        print(title if names else f'{title}: --list all')
        for one in names:
            print(f'  {one:15}', inspect.getdoc(every[one]).partition('\n')[0])


def main(argv=None):
    """Runs the program; returns its exit status, see exit_status."""
    lab_module('baselines')                             # enters the baselines in METHODS
    return exit_status('specmini', lambda: run(parse(argv)))


def exit_status(program, work):
    """What work() returns, 0 for None; 2 for bad input or a full disk (a line on stderr), 130 for Ctrl-C.

    0 also where whoever read our output has gone (a broken pipe, say of `| head`).
    """
    failed = True
    repair_streams()
    try:
        status = work() or 0
        sys.stdout.flush()                              # fails here if the disk is full, not at exit
        failed = status > 0
        return status
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        rank, count = rank_and_world_size()
        if isinstance(error, RuntimeError) and 'alloc' not in str(error) and count == 1:
            raise                                       # not for want of memory: a defect, not bad input
        told = sys.__stderr__ if rank > 0 else sys.stderr       # also what one rank alone has met
        with contextlib.suppress(OSError):              # it may be what is full
            print(f'{program}:', ' '.join(str(error).split())[:LONGEST], file=told)
        return 2
    finally:
        leave_ranks(failed)


def repair_streams():
    """Discards what goes to a closed stream; a character that a terminal does not have becomes a ?."""
    for name in ('stdout', 'stderr'):
        setattr(sys, name, getattr(sys, name) or open(os.devnull, 'w'))
        if hasattr(getattr(sys, name), 'reconfigure'):
            getattr(sys, name).reconfigure(errors='replace')


def join_ranks(device):
    """Makes this process one of those that torchrun has started, if it has; only the first of them prints."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return
    try:
        distributed.init_process_group('nccl' if device == 'cuda' else 'gloo')
    except RuntimeError as error:
        raise ValueError(f'the processes do not find each other: start them again ({error})') from None
    rank, _ = rank_and_world_size()
    if rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, 'w')
    if device == 'cuda':
        device_index = distributed.get_node_local_rank(rank)
        there = torch.cuda.device_count()
        require_that(device_index < there,
                     f'process {device_index + 1} here has no CUDA device, of {there}; start fewer')
        torch.cuda.set_device(device_index)


def leave_ranks(failed):
    """Ends the group of processes; not NCCL's where one has failed: its end would wait for the others."""
    rank, _ = rank_and_world_size()
    if rank > 0:
        sys.stderr = sys.__stderr__                     # for the traceback of a defect
    if distributed.is_available() and distributed.is_initialized():
        if not (failed and distributed.get_backend() == 'nccl'):
            distributed.destroy_process_group()


# --------------------------------------------------------------------------------------- prompts and grades

def read_rows(prompt, file):
    """The rows to run, dicts with a text under `prompt`: one of this text, or those of a file of JSON lines.

    Of the two, one is None. ValueError for what is no prompt, with the file and line or the prompt's number.
    """
    rows = [dict(prompt=prompt)] if file is None else rows_of_file(file)
    for i, row in enumerate(rows, 1):
        require_that(row['prompt'], f'prompt {i} is empty; expected a text')
    return rows


def rows_of_file(file):
    """The rows of a file of JSON lines, the text of each under `prompt`; blank lines are passed over."""
    try:
        # a pipe may never end
        require_that(File(file).is_file(), 'no such file, or it is a folder or a pipe')
        lines = File(file).read_text(encoding='utf-8-sig').split('\n')      # some editors begin with a mark
    except (OSError, ValueError) as error:
        raise ValueError(f'--prompts {file}: cannot be read ({error})') from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{file} line {number}: not a JSON object ({error})') from None
        require_that(isinstance(row, dict), f'{file} line {number}: not a JSON object')
        prompt = row.get('prompt', row.get('question', row.get('turns')))       # turns: the first is used
        prompt = prompt[0] if isinstance(prompt, list) and prompt else prompt
        good = isinstance(prompt, str)
        require_that(good, f'{file} line {number}: expected a text under prompt, question or turns')
        rows.append(row | dict(prompt=prompt))
    require_that(rows, f'--prompts {file}: the file has no rows')
    return rows


def encoded(engine, rows, in_chat):
    """The ids of these rows' prompts, in the target's chat template where that is asked for."""
    texts = [chat(engine.target, row['prompt']) if in_chat else row['prompt'] for row in rows]
    return encode(engine.tokenizer, texts, not in_chat)


def chat(folder, text):
    """The text as the user's message in the checkpoint's own chat template, in jinja's immutable sandbox."""
    settings = read_json(folder, 'tokenizer_config.json', {})
    template = settings.get('chat_template')
    if isinstance(template, list):                      # several: [{name, template}]
        named = [one for one in template if isinstance(one, dict) and one.get('name') == 'default']
        template = named[0].get('template') if named else None
    file = plain_file(folder, 'chat_template.jinja')
    message = dict(role='user', content=text)
    try:
        if file.exists():
            template = file.read_text(encoding='utf-8')
        require_that(isinstance(template, str), 'no chat_template.jinja, nor one in tokenizer_config.json')
        return sandbox(settings).from_string(template).render(messages=[message], add_generation_prompt=True)
    except Exception as error:                          # whatever the template raises
        raise ValueError(f'--chat: the template of {folder} does not render ({error})') from None


def sandbox(settings):
    """A jinja2 environment like the one that transformers gives to templates, special tokens included."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise TemplateError(message)
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.add_extension('jinja2.ext.loopcontrols')
    world.filters['tojson'] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    world.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    for key, token in settings.items():
        if key.endswith('_token') and token:
            world.globals[key] = token.get('content') if isinstance(token, dict) else token
    return world


def grade(row, text):
    """Whether the text is right for its row; None where there is nothing to grade by.

    A row of the laboratory's tasks by that task's own grader, any other that has an `answer` by grade_answer.
    """
    answer = row.get('answer')
    if not isinstance(answer, (str, int, float)):
        return None
    tasks = lab_module('tasks')
    if tasks and tasks.is_own(row):
        return tasks.grade(row, text)
    return grade_answer(str(answer), text)


def grade_answer(answer, text):
    """Whether the text's last number is the answer; word for word where the answer is no number.

    GSM8K writes the number after ####.
    """
    wanted = answer.rpartition('####')[2].strip()
    number, plain = (re.sub(r'(?<=\d),(?=\d{3})', '', one) for one in (wanted, text))   # 1,234 is 1234
    if not re.fullmatch(r'-?\d+(\.\d+)?', number):
        return text.strip() == wanted
    numbers = re.findall(r'(?:(?<![\w)])-)?\d+(?:\.\d+)?', plain)         # 10-20 has no -20
    return bool(numbers) and float(numbers[-1]) == float(number)


# ------------------------------------------------------------------------------------------- printing a text

PAINT = dict(draft='32', target='31', bonus='36', slim='33', dim='2', strike='9;2')     # terminal codes


class GrowingText:
    """The text of tokens as they come, in pieces that never hold half a character."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids = []
        self.shown = ''                                 # of the text of these ids

    def add(self, token):
        """The piece of text that this token completes."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith('\ufffd'):                     # the bytes of a character are not all there yet
            return ''
        piece, self.shown = text[len(self.shown):], text
        return piece

    def rest(self):
        """What was held back: the bytes of a character that never became whole."""
        text = self.tokenizer.decode(self.ids)
        same = os.path.commonprefix([text, self.shown])         # a decoder may take back what it wrote
        return text[len(same):]


class Printer:
    """Shows a text as it is committed, each piece in the colour of who wrote it."""

    def __init__(self, tokenizer, show):
        """show: a line a cycle (cycle_line) instead of the bare text."""
        self.tokenizer = tokenizer
        self.color = sys.stdout.isatty()
        self.show = show
        self.growing = GrowingText(tokenizer)
        self.cycles = 0

    def paint(self, text, kind):
        return f'\033[{PAINT.get(kind, "0")}m{text}\033[0m' if self.color and text else text

    def word(self, tokens, kind='', marks='{}'):
        """The text of tokens: in the colour of its kind, or without colours between marks."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=False).replace('\n', '\u23ce')
        return self.paint(text, kind) if self.color and kind else marks.format(text)

    def add(self, cycle, method):
        """Prints what a cycle committed, and under --show what decided it."""
        self.cycles += 1
        if self.show:
            print(cycle_line(self.cycles, cycle, self), flush=True)
            why = method.explain(cycle, lambda token: self.word([token]).strip())
            if why:
                print(self.paint(f'           {why}', 'dim'), flush=True)
            return
        for token, label in zip(cycle.tokens, cycle.labels):
            print(self.paint(self.growing.add(token), label), end='', flush=True)

    def finish(self):
        """Ends the text."""
        if not self.show:
            print(self.growing.rest(), flush=True)


def cycle_line(number, cycle, printer):
    """One cycle as a line: kept tokens, [-rejected-], [+the next token+] ([~by slim~]), (not judged)."""
    kept = cycle.accepted
    step = cycle.judged and cycle.judged[0].of_step

    def pieces(tokens):
        return [tokens] if step and tokens else [[token] for token in tokens]
    parts = [printer.word(piece, 'draft') for piece in pieces(cycle.tokens[:kept])]
    rejected = [judged.token for judged in cycle.judged if not judged.kept]
    parts += [printer.word(piece, 'strike', '[-{}-]') for piece in pieces(rejected)]
    for label, piece in zip(cycle.labels[kept:], pieces(cycle.tokens[kept:])):
        parts.append(printer.word(piece, label, '[~{}~]' if label == 'slim' else '[+{}+]'))
    for token in cycle.drafted[len(cycle.judged):]:
        parts.append(printer.paint(f'({printer.word([token])})', 'dim'))
    return f'{number:4d}  {kept}/{len(cycle.drafted)}  {" ".join(parts)}'


def is_page(name):
    """Whether --trace of this name, which may be None, asks for a page."""
    return name is not None and name.lower().endswith('.html')


def write_trace(where, engine, texts, step):
    """Writes a line for each cycle of these Texts, or a page; step: seconds of a step of plain decoding."""
    try:
        with open(where, 'w', encoding='utf-8') as file:
            if is_page(where):
                lab_module('page').write_page(file, engine, texts, step)
                return
            for text in texts:
                for line in trace_lines(text, engine.tokenizer):
                    file.write(json.dumps(line) + '\n')
    except OSError as error:
        raise ValueError(f'--trace {where}: cannot be written ({error})') from None


# ---------------------------------------------------------------------------------------- --check, --compare

def check(engine, ids, tokens):
    """A sentence that names the first of these tokens that plain decoding would not have written, if any."""
    wanted = tokens_of(engine.write(ids, Autoregressive()))
    i = shared_length(tokens, wanted)
    if i == min(len(tokens), len(wanted)):
        return f'check: equal to plain decoding for all {i} tokens.'
    reader = engine.readers['target']
    logits = reader.read(ids + tokens[:i], reader.model.full, 1)[0]
    gap = float(logits[wanted[i]] - logits[tokens[i]])
    here, there = (engine.tokenizer.decode([one[i]], skip_special_tokens=False) for one in (tokens, wanted))
    return (f'check: differs from plain decoding at token {i}: {here!r} ({tokens[i]}) instead of {there!r} '
            f'({wanted[i]}); logit gap {gap:.2g}.')


def compare(engine, work, methods, trace):
    """Prints a table of the methods for each task, and one for the rows that name none; the exit status.

    They are run in turn on each prompt, so that noise falls on all alike, and all of it ROUNDS times. Ctrl-C
    ends the runs: the tables are of the prompts that all methods have finished. trace: of a page, or None.
    """
    for method in methods.values():                     # warms up
        engine.write(work[0][2], method)
    texts = {}                                          # {row: {method: the Texts of each round}}
    status = 0
    try:
        for row, number, prompt in tqdm(work * ROUNDS, 'compare', file=sys.stderr, disable=None):
            written = {}
            for name, method in methods.items():
                written[name], _ = write_text(engine, row, number, prompt, name, method)
                if written[name].finish == 'interrupted':
                    raise KeyboardInterrupt
            for name, text in written.items():
                texts.setdefault(number, {}).setdefault(name, []).append(text)
    except KeyboardInterrupt:
        status = 130
    tasks = {}
    for by_name in texts.values():
        tasks.setdefault(str(by_name['ar'][0].row.get('task') or ''), []).append(by_name)
    for task, written in tasks.items():
        if task:
            print(f'{task}, {len(written)} prompts')
        for line in table(engine, written):
            print(line, flush=True)
    if trace and not status:
        engine.session = lab_module('page').Traced      # whose notes would take time in the rounds
        again = []
        for row, number, prompt in work:
            for name, method in methods.items():
                again.append(write_text(engine, row, number, prompt, name, method)[0])
        step = median(cycle.seconds for by_name in texts.values() for cycle in by_name['ar'][0].cycles)
        write_trace(trace, engine, again, step)
    return status


def table(engine, by_prompt):
    """Lines of a comparison, without columns that are empty; by_prompt: see compared."""
    rows = [compared(engine, by_prompt, name) for name in by_prompt[0]]
    columns = []
    for head in rows[0]:
        cells = [row[head] for row in rows]
        if any(text != '-' for text in cells):
            width = max(map(len, [head, *cells]))
            columns.append([f'{text:{"<" if head == "method" else ">"}{width}}' for text in [head, *cells]])
    for cells in zip(*columns):
        yield '  '.join(cells).rstrip()
    yield 'x ar: median, lowest and highest of the rounds; kept: of the guesses; a pass: tokens that a target'
    yield f'pass brings; read: positions that it reads, a token; cut: texts, at --max-new {engine.max_new};'
    yield 'like ar: as plain decoding, place by place; audit: what the target itself would have written'


def compared(engine, by_prompt, name):
    """{head: cell} of a method; by_prompt: of each prompt {method: the Texts of each round}."""
    texts = [by_name[name][0] for by_name in by_prompt]
    stats = engine.statistics([cycle for text in texts for cycle in text.cycles])
    speeds = rates(by_prompt, name)
    faster = [mine / plain for mine, plain in zip(speeds, rates(by_prompt, 'ar'))]
    shares = [agreement(by_name[name][0].tokens, by_name['ar'][0].tokens) for by_name in by_prompt]
    alike = None if engine.temperature else sum(shares) / len(shares)       # samples differ by chance
    right = grades(engine, texts)
    wrong = audit_figures(texts)['audited_wrong']
    return {'method': name,
            'tokens/s': f'{median(speeds):.1f}',
            'x ar': f'{median(faster):.2f}',
            'from, to': f'{min(faster):.2f} {max(faster):.2f}',
            'right': cell(ratio(sum(right), len(right)), '.1%'),
            'kept': cell(stats['acceptance_rate'], '.1%'),
            'a pass': cell(stats['block_efficiency'], '.2f'),
            'read': f'{whole_passes(stats["positions"]) / stats["labels"].total():.2f}',
            'like ar': cell(alike, '.1%'),
            'audit': '-' if wrong is None else f'{1 - wrong:.1%}',
            'cut': cell(cut_at_max_new(engine, texts) / len(texts) or None, '.0%'),
            '': 'lossless' if engine.lossless(texts[0].method) else 'LOSSY'}


def rates(by_prompt, name):
    """Tokens a second of a method over all prompts, in each round that all of them have."""
    found = []
    for texts in zip(*(by_name[name] for by_name in by_prompt)):
        seconds = sum(cycle.seconds for text in texts for cycle in text.cycles)
        found.append(sum(len(text.tokens) for text in texts) / seconds)
    return found


def agreement(tokens, others):
    """The share of positions at which two texts hold the same token."""
    return sum(a == b for a, b in zip(tokens, others)) / max(len(tokens), len(others))


def grades(engine, texts):
    """Whether each text is right, of those that can be graded."""
    found = [grade(text.row, engine.tokenizer.decode(text.tokens)) for text in texts]
    return [right for right in found if right is not None]


# ---------------------------------------------------------------------------------------------------- figures

def statistics(cycles, weights):
    """The figures of a trace, each defined here once; a ratio without a denominator is None.

    weights: {reader/path: bytes that one pass streams}. acceptance_rate: draft tokens kept over judged, of
    SpecGuard steps; drafted_share: committed tokens that the draft wrote, over all. block_efficiency: tokens
    committed per target pass, full or sparse. bandwidth: GB of weights read a second. work: weight bytes
    read, over those of one full target pass. All exclude the prompt.
    """
    passes = Counter()
    positions = Counter()
    labels = Counter()
    for cycle in cycles:
        labels.update(cycle.labels)
        for path, (n, T, _) in cycle.passes.items():
            passes[path] += n
            positions[path] += T
    kept = [verdict.kept for cycle in cycles for verdict in cycle.verdicts]
    drafted = sum(len(cycle.drafted) for cycle in cycles)
    seconds = sum(cycle.seconds for cycle in cycles)
    tokens, accepted = labels.total(), labels['draft']
    read = sum(n * weights[path] for path, n in passes.items())
    return dict(
        cycles=len(cycles), passes=passes, positions=positions, drafted=drafted, judged=len(kept),
        accepted=accepted, acceptance_rate=ratio(sum(kept), len(kept)),
        acceptance_by_place=acceptance_by_place(cycles), drafted_share=ratio(accepted, tokens),
        block_efficiency=ratio(tokens, whole_passes(passes)), labels=labels, seconds=seconds,
        tokens_per_second=ratio(tokens, seconds), bandwidth=ratio(read / 1e9, seconds),
        work=read / weights['target/full'])


def audit_figures(texts):
    """What the target says of tokens that a lossy method wrote, see audit; None for a lossless one.

    audited: their share of all; audited_wrong: mean of 1 - p(x); audited_expected: the same of samples of the
    target's own; audited_logp: mean log p(x), nats.
    """
    audited = [row for text in texts for row in text.audited]
    n = len(audited)
    return dict(audited=ratio(n, sum(len(text.tokens) for text in texts)) if n else None,
                audited_wrong=ratio(sum(1 - p for p, _, _ in audited), n),
                audited_expected=ratio(sum(1 - squares for _, _, squares in audited), n),
                audited_logp=ratio(sum(logp for _, logp, _ in audited), n))


def acceptance_by_place(cycles):
    """[kept, judged] of the draft tokens at the first position of a block, at the second, ...

    Conditional acceptance: counts only blocks that reached this position. A method that tries several tokens
    at a position has them all there; one that judges whole steps has no positions.
    """
    places = []
    for cycle in cycles:
        place = 0
        for verdict in cycle.judged:
            if verdict.of_step:
                break
            if place == len(places):
                places.append([0, 0])
            places[place][0] += verdict.kept
            places[place][1] += 1
            place += verdict.kept
    return places


def ratio(a, b):
    """a / b, or None where b is 0."""
    return a / b if b else None


def cell(value, form):
    """The value in this format; '-' for None."""
    return '-' if value is None else format(value, form)


def figures(engine, texts, step=None):
    """One line on some texts of one method, and one on the audit of lossy ones; step: see plain_step."""
    cycles = [cycle for text in texts for cycle in text.cycles]
    stats = engine.statistics(cycles)
    passes = whole_passes(stats['passes'])
    speed = stats['tokens_per_second']
    kind = 'lossless' if engine.lossless(texts[0].method) else 'LOSSY'
    several = f'{len(texts)} texts, ' if len(texts) > 1 else ''
    line = f'{texts[0].name} ({kind}): {several}{stats["labels"].total()} tokens'
    if speed:
        line += f', {speed:.0f} a second' if speed > 99 else f', {speed:.1f} a second'
    if speed and step:
        line += f', {speed * step:.1f} times plain decoding'
    line += '; '
    judged, share = stats['judged'], stats['acceptance_rate']
    if judged and isinstance(texts[0].method, SpecGuard):
        line += f'{judged * share:.0f} of {judged} steps kept, '
    elif judged:
        line += f'{100 * share:.0f} % of the guesses kept, '
    line += f'{passes} target pass' + 'es' * (passes != 1)
    audited = audit_figures(texts)
    if audited['audited']:
        right, usual = (100 - 100 * audited[key] for key in ('audited_wrong', 'audited_expected'))
        line += f'\nLOSSY: the target itself would have written {right:.3g} % of these tokens'
        if engine.temperature:
            line += f' (of its own samples {usual:.3g} %)'
    return line


def notes(engine, session, texts):
    """Lines on what was not drafted, cut short or left out, and on graded answers."""
    if not any(cycle.drafted for text in texts for cycle in text.cycles) and texts[0].name != 'ar':
        yield f'nothing was drafted (--draft {engine.draft}); --draft DIR takes a draft model'
    count = cut_at_max_new(engine, texts)
    if count:
        yield f'cut at --max-new {engine.max_new}: {count} of {len(texts)} texts'
    full = [text for text in texts if text.finish == 'length' and len(text.tokens) < engine.max_new]
    if full:
        yield (f'cut at the context of {engine.context} tokens (of the {engine.shortest}): {len(full)} of '
               f'{len(texts)} texts')
    sparse = session.sparse
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    if sparse and sparse.rho < 1 and not sparse.left_out(longest):
        yield f'sparse attention left nothing out: {longest} tokens are too few, see dense_below'
    right = grades(engine, texts)
    if right:
        yield f'right: {sum(right)} of {len(right)} graded texts ({sum(right) / len(right):.1%})'


def cut_at_max_new(engine, texts):
    """How many texts --max-new cut; none where the end of sequence is ignored on purpose."""
    if engine.ignore_eos:
        return 0
    return sum(text.finish == 'length' and len(text.tokens) == engine.max_new for text in texts)


def plain_step(session):
    """Seconds of a step of plain decoding: the median of STEPS that end where the text does."""
    tokens = session.tokens
    begin = max(1, len(tokens) - STEPS)
    again = replace(session, tokens=tokens[:begin], tokens_left=len(tokens) - begin, eos=frozenset())
    return median(cycle.seconds for cycle in decode(again, Autoregressive()))


if __name__ == '__main__':
    sys.exit(main())
