"""Speculative decoding from Python and from the command line: the Engine, a run; then flags and figures.

`python specmini.py --prompt "..."` runs on the embedded models; --help names every flag, --list every method.
These models have 1.9 M and 0.2 M parameters and were trained on nine kinds of generated tasks: other prompts
get nonsense. lab/README.md has a prompt for each kind.
"""
import argparse
import contextlib
import copy
import difflib
import importlib.util
import inspect
import itertools
import json
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path as File
from statistics import fmean, median

HOME = File(__file__).resolve().parent
sys.path.insert(0, str(HOME))       # before Hugging Face's package `kernels`, where that is installed
warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; nothing here needs it

import torch
from tqdm import tqdm

import kernels
from model import (MALFORMED, TYPES, BadInput, Reader, TextStream, as_number, chat, check_fields, encode,
                   find_folder, knob, knob_range, knobs_of, load, naming, read_calibration, read_json,
                   require_that, same_vocabulary, shared_length)
from verify import (METHODS, Autoregressive, Method, Session, Sparse, decode, draft_model, is_greedy,
                    lookup_then_draft, no_draft, prompt_lookup, read_prompt, tokens_of, whole_passes)

EMBEDDED = HOME / 'lab' / 'models'
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
SOURCES = dict(lookup=prompt_lookup, none=no_draft)     # what --draft may name instead of a folder
CORES = torch.get_num_threads()
SMALL = 50_000_000      # parameters below which one CPU thread beats several: too little work to share
PER_TEXT = {'temperature', 'top_k', 'top_p', 'max_new', 'seed'}     # settings that a text may have of its own
ROUNDS = 3              # of a comparison
AUDITED = 256           # positions whose logits an audit holds at once
HARMLESS = {            # of generation_config.json: read by load, flags here, or without effect on a text
    'eos_token_id', 'bos_token_id', 'pad_token_id', 'do_sample', 'temperature', 'top_k', 'top_p',
    'max_length', 'max_new_tokens', 'transformers_version', 'cache_implementation'}
MOVED = {               # what is said of flags of earlier versions
    '--set': 'now --method "via keep=0.7"', '--trace': 'now --json --show', '--check': 'now --compare'}


# --------------------------------------------------------------------------------------------- the Engine

@dataclass
class Engine:
    """Loaded models and the settings of a run: `Engine(target=DIR, draft=DIR).generate(text, Exact())`.

    Its knobs are flags, too. ValueError, one line, for a setting or a folder that does not fit.
    """
    target: str = knob(str(EMBEDDED / 'target'), 'a Hugging Face folder, or a repository owner/name')
    draft: str = knob(None, 'a folder; lookup: from the text; none; self: the target, in 8 bits; '
                      'None: the embedded one, or lookup')
    lookup: bool = knob(False, 'look up in the text first, else ask the draft model')
    max_new: int = knob(256, 'tokens to write at most', 1)
    temperature: float = knob(0.0, '0 is greedy', 0, 1e6)
    top_k: int = knob(0, 'sample from this many likeliest tokens; 0: from all', 0)
    top_p: float = knob(1.0, 'sample from the likeliest tokens of this mass', 1e-9, 1)
    seed: int = knob(0, 'of the random numbers', 0, 2 ** 62)
    ignore_eos: bool = knob(False, 'write on past the end of sequence')
    device: str = knob('auto', 'auto: cuda where it is there', words=('auto', 'cpu', 'cuda'))
    dtype: str = knob('auto', 'auto: bf16 on CUDA; on a CPU fp32, 16-bit matrices', words=('auto', *DTYPES))
    draft_bits: int = knob(None, 'of the draft on a CPU; None: 8 on x86 with AVX2, else 16', words=(8, 16))
    compile: bool = knob(False, 'torch.compile short passes: of a card')
    sparse: Sparse = None           # makes the target's passes sparse, but not plain decoding; True: Sparse()
    readers: dict = field(default_factory=dict, init=False)     # {role: Reader}, see open

    def __post_init__(self):
        with naming('target, draft', TypeError):
            self.target = os.fspath(self.target)
            self.draft = self.draft and os.fspath(self.draft)
        self.sparse = Sparse() if self.sparse is True else self.sparse or None
        require_that(self.sparse is None or isinstance(self.sparse, Sparse),
                     f'sparse is {self.sparse!r}; expected a Sparse, or True')
        check_fields(self)
        there = torch.cuda.is_available()
        require_that(there or self.device != 'cuda', '--device cuda: this machine, or torch, has none')
        self.device = 'cuda' if there and self.device != 'cpu' else 'cpu'
        require_that(self.device == 'cuda' or not self.compile,
                     '--compile is for a card: on a CPU products take the time, and sd was slower with it')
        if self.draft is None:
            embedded = File(self.target).resolve() == EMBEDDED / 'target'
            self.draft = str(EMBEDDED / 'draft') if embedded else 'lookup'
        if self.draft == 'none' and self.lookup:
            self.draft = 'lookup'
        self.proposer = SOURCES.get(self.draft, lookup_then_draft if self.lookup else draft_model)
        target, self.tokenizer, eos = self.network(self.target)
        self.eos = frozenset() if self.ignore_eos else eos
        self.models = dict(target=target)                               # by role
        drafts = self.target if self.draft == 'self' else self.draft
        if self.draft not in SOURCES:
            self.models['draft'], _, _ = self.network(drafts, self.bits())
            same_vocabulary(target, self.models['draft'], f'--draft {self.draft}')
        self.calibration = read_calibration(self.target, drafts if 'draft' in self.models else None)
        self.context = target.config.max_position_embeddings

    def bits(self):
        """In how many bits the draft model is held; BadInput for 8 where these cannot be multiplied."""
        can = self.device == 'cpu' and self.dtype in ('auto', 'fp32') and kernels.has_half()
        wanted = self.draft_bits or (8 if self.draft == 'self' else None)
        require_that(can or wanted != 8, '--draft self and --draft-bits 8: products in 8 bits need an '
                     'x86 CPU with AVX2, and --dtype fp32 or auto')
        return wanted or (8 if can else 16)

    def network(self, folder, bits=16):
        """(Transformer, Tokenizer, end-of-sequence ids) of a folder, as this run needs it."""
        return ready(folder, self.device, self.dtype, bits=bits)

    def open(self, prompts):
        """Makes caches for the longest of the prompts (lists of ids); ValueError where one does not fit."""
        vocab = range(self.models['target'].vocab)
        for i, ids in enumerate(prompts, 1):
            wrong = [ids]
            if isinstance(ids, list):
                wrong = [token for token in ids if type(token) is not int or token not in vocab]
            require_that(not wrong,
                         f'prompt {i}: expected a list of token ids 0 to {vocab[-1]}, found {wrong[:1]}')
            require_that(0 < len(ids) < self.context,
                         f'prompt {i} has {len(ids)} tokens; the target takes 1 to {self.context - 1}')
        capacity = min(self.context, max(map(len, prompts)) + self.max_new)
        self.readers = {role: Reader(model, capacity, self.compile) for role, model in self.models.items()}

    def start(self, ids, method, row=0):
        """A Session that has read this prompt (ids, opened before), without what earlier texts left."""
        for reader in self.readers.values():
            reader.forget()
        session = Session(
            target=self.readers['target'],
            drafter=None if isinstance(method, Autoregressive) else self.readers.get('draft'),
            proposer=self.proposer, tokens=list(ids),
            tokens_left=min(self.max_new, self.context - len(ids)),
            eos=self.eos, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            generator=torch.Generator().manual_seed(self.seed + row),       # equal prompts, other samples
            text=self.tokenizer.decode, calibration=self.calibration, sparse=self.sparse)
        read_prompt(session)
        return session

    def write(self, ids, method, row=0):
        """The Cycles of one whole text; the method itself is left as it is, for other texts."""
        method = method_for(method)
        return list(decode(self.start(ids, method, row), method))

    def ids_of(self, prompt, in_chat=False, **settings):
        """Ids of a prompt: a text, ids, or messages, [{role, content}, ...], in the target's chat template.

        in_chat: whether a text is put there, too; settings: of the template.
        """
        if in_chat or isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return encode(self.tokenizer, chat(self.target, prompt, **settings), special=False)
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        return list(map(as_number, prompt)) if isinstance(prompt, list) else prompt

    def stream(self, prompt, method='sd', **settings):
        """Yields (a piece of the text that follows, its Cycle) as it is written.

        prompt: as `ids_of` takes it; method: a Method or its name; settings: of this text, those in PER_TEXT.
        """
        engine = copy.copy(self)
        require_that(settings.keys() <= PER_TEXT, f'{", ".join(settings)}: expected some of {PER_TEXT}')
        vars(engine).update(settings)
        check_fields(engine)
        ids = self.ids_of(prompt)
        engine.open([ids])
        method = method_for(method)
        stream = TextStream(self.tokenizer, ids)
        for cycle in decode(engine.start(ids, method), method):
            yield ''.join(map(stream.add, cycle.tokens)), cycle

    def generate(self, prompt, method='sd', **settings):
        """(the text that follows, its Cycles): all that `stream` yields."""
        pieces, cycles = zip(*self.stream(prompt, method, **settings))
        return ''.join(pieces), list(cycles)

    def lossless(self, method):
        """Whether this run keeps the target's distribution; `sparse` leaves plain decoding alone."""
        plain = isinstance(method, Autoregressive)
        return method.lossless and (plain or self.sparse is None or self.sparse.lossless)


def method_for(method):
    """The Method of one text: a copy of this one, or by its name with its default knobs."""
    name = method
    if isinstance(method, str):
        require_that(method in METHODS, f'method {no_such(method, METHODS)}')
        method = METHODS[method]
    if isinstance(method, type):
        method = method()
    require_that(isinstance(method, Method), f'method {name!r} is {method!r}; expected a class of Method')
    require_that('__dataclass_fields__' in vars(type(method)) or not inspect.get_annotations(type(method)),
                 f'method {name!r} has knobs; expected @dataclass before its class')
    return replace(method)


def ready(folder, device, dtype, shard=None, bits=16):
    """model.load's three results, the network packed if that serves it; dtype: one of DTYPES, or auto.

    auto: bf16 on a card, or fp16 where that only emulates bf16 (say a T4); fp32 on a CPU, where matrices keep
    the 16 bits of their files, see kernels.Half.
    """
    packed = device == 'cpu' and dtype in ('auto', 'fp32')
    if dtype == 'auto' and device == 'cuda':
        dtype = 'bf16' if torch.cuda.get_device_capability() >= (8, 0) else 'fp16'
    loaded = load(folder, device, DTYPES.get(dtype), shard)
    if packed:
        kernels.pack(loaded[0], bits)
    return loaded


# ----------------------------------------------------------------------------------------------------- a run

@dataclass
class Text:
    """One text by one method: the record from which its figures and its JSON are computed."""
    engine: Engine
    row: dict                           # of the file of prompts
    number: int                         # of this row, from 0
    round: int                          # of a comparison, from 0
    name: str                           # of the method, with the knobs that a setting gives it
    method: Method
    session: Session
    cycles: list = field(default_factory=list)
    finish: str = 'interrupted'         # eos, length (of --max-new or the context), or interrupted
    text: str = ''                      # what follows the prompt
    audited: list = field(default_factory=list)     # of a lossy greedy text, see `audit`

    @property
    def tokens(self):
        """Ids after the prompt."""
        return tokens_of(self.cycles)


def write_texts(args, kind=Engine, rounds=1, show=None):
    """Yields the Text of every prompt by every method, in turn, so that noise falls on all alike.

    kind: the Engine's class; show: function (text, cycle), called with each Cycle. A text that Ctrl-C ends is
    the last one, and KeyboardInterrupt follows it.
    """
    engine, rows, prompts = set_up(args, kind)
    if args.compile or len(args.methods) > 1:           # a first text compiles, and warms up
        for method in args.methods.values():
            engine.write(prompts[0], method)
    work = list(itertools.product(range(rounds), range(len(rows)), args.methods))
    for turn, number, name in tqdm(work, disable=None if len(work) > 1 else True):
        method = method_for(args.methods[name])
        session = engine.start(prompts[number], method, number)
        text = Text(engine, rows[number], number, turn, name, method, session)
        with contextlib.suppress(KeyboardInterrupt):
            for cycle in decode(session, method):
                text.cycles.append(cycle)
                if show:
                    show(text, cycle)
            if is_greedy(engine.temperature) and not engine.lossless(method):
                text.audited = audit(session)
            text.finish = 'eos' if session.ended else 'length'
        text.method = args.methods[name]                # its knobs alone, without what it noted of the text
        stream = TextStream(engine.tokenizer, prompts[number])
        text.text = ''.join(map(stream.add, text.tokens))
        yield text
        if text.finish == 'interrupted':
            raise KeyboardInterrupt


def audit(session):
    """[p(x)] of each token x that was written, by dense passes of the target after it: 1 or 0 if greedy."""
    reader = session.target
    audited = []
    for begin in range(session.begin, len(session.tokens), AUDITED):        # so many a pass: memory
        tokens = session.tokens[begin:begin + AUDITED]
        p = session.probs(reader.read(session.tokens[:begin] + tokens[:-1], reader.model.full, len(tokens)))
        audited += p.gather(1, torch.tensor(tokens, device=p.device)[:, None])[:, 0].tolist()
    return audited


def run(args, kind=Engine):
    """Writes the texts that the flags ask for, and a table; the exit status. kind: the Engine's class."""
    if args.list is not None:
        return list_methods(args.list)
    compare = len(args.methods) > 1
    printer = Printer(args.show and not args.json, args.json or compare)
    texts = []
    status = 130
    with contextlib.suppress(KeyboardInterrupt):
        for text in write_texts(args, kind, ROUNDS if compare else 1, printer.add):
            printer.finish()
            if text.cycles and not (compare and text.finish == 'interrupted'):
                texts.append(text)
            if args.json:
                print(json_line(report(text, args.show)), flush=True)
        status = 0
    whole = len(texts) - len(texts) % len(args.methods)     # texts that every method has written
    if whole:
        for line in table(texts[:whole]):
            print(line, file=sys.stdout if compare and not args.json else sys.stderr)
    return status


def set_up(args, kind=Engine):
    """(an Engine of this class, rows, their prompts as ids) of a run; the engine has caches for them."""
    rows = read_rows(args.prompt, args.prompts)
    engine = kind(**{name: getattr(args, name) for name in knobs_of(kind)})
    take_threads(engine.models['target'])
    prompts = encoded(engine, rows, args.chat)
    engine.open(prompts)
    return engine, rows, prompts


def take_threads(target):
    """Sets how many CPU threads this process has, unless OMP_NUM_THREADS says: one for a small target."""
    torch.backends.cuda.enable_cudnn_sdp(False)         # it plans anew for every length of a text
    if 'OMP_NUM_THREADS' not in os.environ:
        small = sum(p.numel() for p in target.parameters()) < SMALL
        torch.set_num_threads(1 if small else CORES)


# You may stop here: what follows reads flags and prompts, prints, and computes figures.
# -------------------------------------------------------------------------------------------------- the flags

class Parser(argparse.ArgumentParser):
    def error(self, message):
        flags = self._option_string_actions
        unknown = [word for word in re.findall(r'(?<!\S)-[\w-]+', message) if word not in flags]
        told = '--help lists the flags'
        if 'expected one argument' in message:
            told = 'what begins with - is given after =, as --prompt="-..."'
        elif unknown:
            told = MOVED.get(unknown[0]) or no_such(unknown[0], flags)
        raise BadInput(f'{message}; {told}')


def add_flags(parser, kind):
    """A flag for every option of a dataclass."""
    for name, option in knobs_of(kind).items():
        if not option.metadata['meaning']:
            continue
        how = dict(action='store_true') if option.type is bool else dict(type=option.type, metavar='X')
        text = f'{option.metadata["meaning"]} (default: {option.default})'.replace('%', '%%')
        parser.add_argument('--' + name.replace('_', '-'), default=option.default, help=text, **how)


def parse(argv):
    """The flags, checked; BadInput in one line for what does not fit."""
    p = Parser(description=__doc__, allow_abbrev=False)
    add = p.add_argument_group('prompts').add_argument
    add('--prompt', help='the text to continue')
    add('--prompts', metavar='FILE.jsonl', help='rows with prompt, question, messages or turns; -: stdin')
    add('--chat', action='store_true', help="put texts into the target's own chat template, as messages are")
    add = p.add_argument_group('method').add_argument
    add('--method', default='sd', help='a method of --list, and knobs: "via keep=0.7" (default: sd)')
    add('--sparse', metavar='KNOBS', nargs='?', const='', help='sparse verification under any method')
    add('--gamma', metavar='N', help='the knob gamma of methods that have it, where a setting does not')
    add('--import', metavar='FILE.py', nargs='+', action='extend', default=[],
        help='run these files first, which enter methods')
    add('--compare', nargs='+', metavar='SETTING', help='in a table with ar: "sd gamma=2" "sd gamma=8" via')
    add('--list', metavar='NAME', nargs='?', const='', help='the methods; NAME: the knobs of one')
    add = p.add_argument_group('output').add_argument
    add('--show', action='store_true', help='cycle by cycle: what was drafted, rejected, put in its place')
    add('--json', action='store_true', help='a JSON object for each prompt; with --show it has the cycles')
    add_flags(p.add_argument_group('models and sampling'), Engine)
    args = p.parse_args(argv)
    for path in getattr(args, 'import'):
        import_file(path)
    if args.list is None:
        require_that((args.prompt is None) != (args.prompts is None),
                     'give one of --prompt TEXT, --prompts FILE')
        settings = ['ar', *args.compare] if args.compare else [args.method]
        settings = [setting.strip() for setting in settings]
        args.methods = make_methods(settings, args.gamma)
        if args.sparse is not None:
            (args.sparse,) = make_methods([f'sparse {args.sparse}']).values()
        if settings == ['ar']:
            args.draft = 'none'                         # so no draft model is loaded
    return args


def import_file(path):
    """Runs a Python file of the user's, which enters methods; its errors keep their traceback."""
    spec = importlib.util.spec_from_file_location(f'imported {File(path).resolve()}', path)
    require_that(spec, f'--import {path}: expected a Python file, .py')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                     # where dataclasses look for the types of fields
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = error.filename or path                  # none: it is no text
        if not os.path.isfile(where):                   # of a text that it evaluates
            raise
        raise BadInput(f'--import {path}: {where}, line {error.lineno}: {error.msg}') from None


def make_methods(settings, gamma=None):
    """{setting: Method} of settings, a method's name and its knobs, as in "via keep=0.7".

    gamma: that of the methods that have this knob, where their setting does not name it; a text.
    """
    made = {}
    for setting in settings:
        name, _, rest = setting.partition(' ')
        require_that(not {',', '='} & set(name),
                     f'{setting}: expected settings in quotes, as in --compare sd "via keep=0.7"')
        words = re.split(r'\s+(?=\S+=)', rest.strip()) if rest else []
        kind = type(method_for(name))
        options = knobs_of(kind)
        texts = split_knobs(words, name)
        if gamma is not None and 'gamma' in options:
            texts.setdefault('gamma', gamma)
        for wrong in texts.keys() - options.keys():
            flag = '--' + wrong.replace('_', '-')
            require_that(wrong not in PER_TEXT, f'{setting}: {wrong} is of the whole run: {flag}')
            raise BadInput(f'{setting}: knob {no_such(wrong, options)}')
        made[setting] = kind(**{one: read_value(text, options[one].type) for one, text in texts.items()})
    has_gamma = any('gamma' in knobs_of(type(method)) for method in made.values())
    require_that(gamma is None or has_gamma, f'--gamma: {", ".join(made)} has no such knob')
    return made


def split_knobs(words, where):
    """{knob: value} of words, each knob=value."""
    values = dict(word.split('=', 1) for word in words if '=' in word)
    require_that(len(values) == len(words), f'{where} {" ".join(words)}: expected knob=value, once each')
    return values


def read_value(value, kind):
    """A knob's value, a text, as its type; stays a text, which check_fields refuses, if it is none."""
    require_that(kind in TYPES, f'{value}: a knob of the type {kind} is set from Python alone')
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if kind is bool else kind(value)
    return value


def no_such(name, names):
    """A sentence on a name that is none of these: the nearest, else all."""
    near = [one for one in names if one.startswith(name)] or difflib.get_close_matches(name, names, 1)
    known = f'expected one of {", ".join(sorted(names)) or "none"}'
    return f'{name}: there is none of this name; ' + (f'did you mean {near[0]}?' if near else known)


def list_methods(name):
    """Prints the methods, or of one what it does and its knobs: default, range, meaning."""
    if not name:
        for one, kind in METHODS.items():
            print(f'  {one:15} {str(inspect.getdoc(kind)).partition(chr(10))[0]}')
        return
    method = method_for(name)
    kind = type(method)
    print(inspect.getdoc(kind))
    if method.lossless:
        print('Lossless by default: its class says so, and `python -m lab.prove` tests it.')
    for own, option in knobs_of(kind).items():
        print(f'  {own:18} {option.default!s:8} {knob_range(option):16}  {option.metadata["meaning"]}')


def main(argv=None):
    """Runs the program; returns its exit status."""
    return exit_status('specmini', lambda: run(parse(argv)))


def exit_status(program, work):
    """What work() returns, 0 for None; 2 for bad input or a full disk (a line on stderr), 130 for Ctrl-C."""
    sys.stdout = sys.stdout or open(os.devnull, 'w')    # closed (`>&-`)
    sys.stderr = sys.stderr or open(os.devnull, 'w')
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='replace')        # a character that a terminal lacks becomes a ?
    try:
        status = work() or 0
        print(end='', flush=True)                       # fails here if the disk is full, not at exit
        return status
    except BrokenPipeError:                             # whoever read our output has gone (`| head`)
        return 0
    except KeyboardInterrupt:
        return 130
    except (BadInput, OSError, RuntimeError, MemoryError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        users = any(str(frame.f_globals.get('__name__')).startswith('imported ') for frame in frames)
        defect = isinstance(error, RuntimeError) and 'alloc' not in str(error)      # and no lack of memory
        if defect or users and not isinstance(error, BadInput):
            raise
        print(f'{program}:', ' '.join(str(error).split())[:1000] or 'not enough memory', file=sys.stderr)
        return 2
    finally:
        try:
            sys.stdout.flush()
        except OSError:                                 # or Python tries once more at exit, and says so
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --------------------------------------------------------------------------------------------------- prompts

def read_rows(prompt, file):
    """The rows to run, one of this text or those of a JSON-lines file.

    They are dicts with a text, or a list of messages {role, content}, under `prompt`.
    """
    if file is None:
        return [dict(prompt=prompt)]
    rows = []
    with naming(f'--prompts {file}'), open(0 if file == '-' else file, encoding='utf-8-sig') as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with naming(f'line {number}', MALFORMED):
                    rows.append(read_row(line))
        require_that(rows, 'the file has no rows')
    return rows


def read_row(line):
    """The row, a dict, that a line of JSON holds."""
    with naming('expected one JSON object a line', (ValueError, RecursionError)):
        row = json.loads(line)
        require_that(isinstance(row, dict), f'found {line.strip()[:40]}')
    messages, turns = row.get('messages'), row.get('turns') or [None]
    if isinstance(messages, str):                       # as tables store them
        messages = json.loads(messages)
    texts = row.get('prompt'), row.get('question'), messages, turns[0]
    text = next((one for one in texts if one is not None), None)
    chats = isinstance(text, list) and all(isinstance(one, dict) for one in text)
    require_that(chats or isinstance(text, str),
                 'expected a text under prompt, question or turns, or a list under messages')
    return row | dict(prompt=text)


def encoded(engine, rows, in_chat):
    """The ids of these rows' prompts, of texts in the target's chat template where that is asked for."""
    prompts = []
    for number, row in enumerate(rows, 1):
        with naming(f'prompt {number}', (ValueError, TypeError)):
            settings = row.get('chat_template_kwargs') or {}        # as vLLM names them
            prompts.append(engine.ids_of(row['prompt'], in_chat, **settings))
    return prompts


def grade(row, text):
    """Whether the text ends in the row's `answer`, a number; None if the row has none.

    GSM8K writes the number after ####. An answer that is no number is compared word for word.
    """
    if not isinstance(row.get('answer'), (str, int, float)):
        return None
    wanted = str(row['answer']).rpartition('####')[2].strip()
    number, plain = (re.sub(r'(?<=\d),(?=\d{3})', '', one) for one in (wanted, text))   # 1,234 is 1234
    if not re.fullmatch(r'-?\d+(\.\d+)?', number):
        return text.strip() == wanted
    numbers = re.findall(r'(?:(?<![\w)])-)?\d+(?:\.\d+)?', plain)         # 10-20 has no -20
    return bool(numbers) and float(numbers[-1]) == float(number)


# ------------------------------------------------------------------------------------------- printing a text

STYLES = dict(          # terminal codes and marks, by who wrote a piece or what became of it
    draft=('33', '{}'),
    slim=('32', '[~{}~]'),
    target=('31', '[+{}+]'),
    bonus=('36', '[+{}+]'),
    rejected=('9;2', '[-{}-]'),
    dropped=('2', '({})'))


class Printer:
    """Shows texts as they are committed, each piece in the colour of who wrote it."""

    def __init__(self, show, silent):
        """show: a line a cycle instead of the bare text."""
        self.show = show
        self.silent = silent
        dumb = os.environ.get('NO_COLOR') or os.environ.get('TERM') == 'dumb'
        self.color = sys.stdout.isatty() and not dumb

    def paint(self, text, kind):
        return f'\033[{STYLES[kind][0]}m{text}\033[0m' if self.color and text else text

    def word(self, tokens):
        """The text of tokens in one line."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False).replace('\n', '\u23ce')

    def piece(self, tokens, kind):
        """The same between the marks and in the colour of its kind."""
        return self.paint(STYLES[kind][1].format(self.word(tokens)), kind)

    def add(self, text, cycle):
        """Prints what the latest Cycle of a Text committed, and under --show what decided it."""
        if len(text.cycles) == 1:
            self.tokenizer = text.engine.tokenizer
            self.stream = TextStream(self.tokenizer, text.session.tokens[:text.session.begin])
        if self.show:
            print(f'{len(text.cycles):4d}  {self.line(cycle)}', flush=True)
            why = text.method.explain(cycle, lambda tokens: self.word(tokens).strip())
            if why:
                print(self.paint(f'           {why}', 'dropped'), flush=True)
        elif not self.silent:
            for token, label in zip(cycle.tokens, cycle.labels):
                print(self.paint(self.stream.add(token), label), end='', flush=True)

    def line(self, cycle):
        """One cycle: kept tokens, [-rejected-], [+the next token+] ([~by slim~]), (not judged)."""
        kept = cycle.accepted
        parts = [self.piece(row.tokens, 'draft' if row.kept else 'rejected') for row in cycle.judged]
        if cycle.tokens[kept:]:                         # a token, or a step that the target wrote
            parts.append(self.piece(cycle.tokens[kept:], cycle.labels[kept]))
        judged = sum(len(row.tokens) for row in cycle.judged)
        parts += [self.piece([token], 'dropped') for token in cycle.drafted[judged:]]
        return f'{kept}/{len(cycle.drafted)}  {" ".join(parts)}'

    def finish(self):
        """Ends a text."""
        if not (self.show or self.silent):
            print()


def report(text, cycles=False):
    """The JSON object of a Text; cycles: with its trace."""
    knobs = {knob: getattr(text.method, knob) for knob in knobs_of(type(text.method))}
    stats = statistics(text.cycles) | dict(audited_wrong=audited_wrong([text]))
    return dict(
        text=text.text, tokens=text.tokens, prompt_tokens=text.session.begin,
        method=text.name, lossless=text.engine.lossless(text.method), knobs=knobs,
        seed=text.engine.seed + text.number, finish=text.finish,
        right=grade(text.row, text.text), stats=stats,
        **dict(cycles=list(map(asdict, text.cycles))) if cycles else {})


def json_line(made):
    """One line of JSON; infinite numbers, which JSON lacks, become texts."""
    return json.dumps(json.loads(json.dumps(made), parse_constant=str))


def difference(text, plain):
    """Where a greedy Text first differs from plain decoding's, in words; '' if it does not."""
    i = shared_length(text.tokens, plain.tokens)
    if i == min(len(text.tokens), len(plain.tokens)):
        return ''
    reader = text.engine.readers['target']
    logits = reader.read(text.session.tokens[:text.session.begin + i], reader.model.full, 1)[0]
    gap = float(logits[plain.tokens[i]] - logits[text.tokens[i]])
    return f'first another at token {i}, where the logit of ar is {gap:.2g} higher'


# ---------------------------------------------------------------------------------------------------- figures

def statistics(cycles):
    """The figures of a trace, each defined here once; a ratio without a denominator is None.

    acceptance_rate: draft tokens kept over judged, of SpecGuard steps; block_efficiency: tokens committed per
    target pass, full or sparse. All exclude the prompt.
    """
    passes = Counter()
    positions = Counter()
    labels = Counter(label for cycle in cycles for label in cycle.labels)
    for cycle in cycles:
        for path, (n, T) in cycle.passes.items():
            passes[path] += n
            positions[path] += T
    kept = [judged.kept for cycle in cycles for judged in cycle.judged]
    seconds = sum(cycle.seconds for cycle in cycles)
    tokens = labels.total()
    return dict(
        cycles=len(cycles), passes=passes, positions=positions, labels=labels, seconds=seconds,
        drafted=sum(len(cycle.drafted) for cycle in cycles),
        judged=len(kept),
        accepted=labels['draft'],
        acceptance_rate=ratio(sum(kept), len(kept)),
        block_efficiency=ratio(tokens, whole_passes(passes)),
        tokens_per_second=ratio(tokens, seconds))


def audited_wrong(texts):
    """The share of these texts' tokens that the target would not have written; None if none was audited."""
    audited = [p for text in texts for p in text.audited]
    return ratio(sum(1 - p for p in audited), len(audited))


def ratio(a, b):
    """a / b, or None where b is 0."""
    return a / b if b else None


def cell(value, form):
    """The value in this format; '' for None."""
    return '' if value is None else format(value, form)


def table(texts):
    """Lines of a table of Texts, a row for each method, and notes on the run."""
    methods = {}                                        # name: {round: its Texts}
    for text in texts:
        methods.setdefault(text.name, {}).setdefault(text.round, []).append(text)
    plain = methods['ar'] if len(methods) > 1 else None
    rows = [figures(rounds, plain) for rounds in methods.values()]
    heads = [head for head in rows[0] if any(row[head] for row in rows)]        # no empty columns
    rows.insert(0, {head: head for head in heads})
    widths = {head: max(len(row[head]) for row in rows) for head in heads}
    sides = dict.fromkeys(heads, '>') | dict(method='<')
    for row in rows:
        yield '  '.join(f'{row[head]:{sides[head]}{widths[head]}}' for head in heads).rstrip()
    yield from notes(texts[0].engine, methods)


def notes(engine, methods):
    """Sentences on a run that its table does not tell; methods: as in `table`."""
    asked = read_json(find_folder(engine.target) / 'generation_config.json', {})
    ignored = [name for name, value in asked.items()
               if name not in HARMLESS and value not in (None, 0, 1, [], {}, '')]
    endless = sorted(engine.eos - engine.models['target'].token_texts.keys())
    if endless:
        yield f'no token of the tokenizer has the end-of-sequence id {endless[0]}'
    if ignored:
        yield f'not applied, of generation_config.json: {", ".join(ignored)}'
    window = engine.models['target'].config.sliding_window
    if window and window == engine.context:
        yield f'the context is the sliding window of {window} tokens: up to there full attention is the same'
    if any(text.row.get('tools') for text in [*methods.values()][0][0]):
        yield 'the tools of rows are not used'
    for name, rounds in methods.items():
        written = rounds[0]
        cut = sum(text.finish == 'length' for text in written)
        if name != 'ar' and not any(cycle.drafted for cycle in cycles_of(written)):
            gamma = getattr(written[0].method, 'gamma', 0)
            yield f'{name}: nothing was drafted (gamma {gamma}, --draft {engine.draft})'
        if is_greedy(engine.temperature) and engine.lossless(written[0].method):
            told = next(filter(None, map(difference, written, methods.get('ar', rounds)[0])), '')
            if told:
                yield f'{name}: not the tokens of ar, {told}'
        if any(text.session.room < 0 for text in written):
            yield f"{name}: where the draft model's context ended, the target wrote on alone"
        if cut and not engine.ignore_eos:
            yield f'{name}: {cut} of {len(written)} texts cut at --max-new {engine.max_new} or the context'


def figures(rounds, plain):
    """{head: cell} of a method: counts of its first round; x ar: median, lowest and highest of all rounds.

    rounds: {round: its Texts}; plain: those of plain decoding in a comparison, else None.
    """
    written = rounds[0]
    engine = written[0].engine
    stats = statistics(cycles_of(written))
    right = [good for text in written if (good := grade(text.row, text.text)) is not None]
    speeds = rates(rounds)
    faster = alike = ''
    if plain:
        ratios = [mine / theirs for mine, theirs in zip(speeds, rates(plain))]
        faster = f'{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
        if is_greedy(engine.temperature):               # samples differ by chance
            shares = []
            for mine, theirs in zip(written, plain[0]):
                same = sum(a == b for a, b in zip(mine.tokens, theirs.tokens))
                shares.append(same / max(len(mine.tokens), len(theirs.tokens)))
            alike = f'{fmean(shares):.1%}'
    return {'method': f'{written[0].name:15}',
            'tokens': str(stats['labels'].total()),
            'passes': str(whole_passes(stats['passes'])),
            'slim': str(sum(n for path, n in stats['passes'].items() if 'slim' in path) or ''),
            'a pass': cell(stats['block_efficiency'], '.2f'),
            'kept': cell(stats['acceptance_rate'], '.1%'),
            'right': cell(ratio(sum(right), len(right)), '.1%'),
            'like ar': alike,
            'wrong': cell(audited_wrong(written), '.1%'),
            'tokens/s': f'{median(speeds):.1f}',
            'x ar': faster,
            ' ': 'lossless' if engine.lossless(written[0].method) else 'LOSSY'}


def rates(rounds):
    """Tokens a second in each round."""
    return [statistics(cycles_of(texts))['tokens_per_second'] for texts in rounds.values()]


def cycles_of(texts):
    """The Cycles of these Texts."""
    return [cycle for text in texts for cycle in text.cycles]


if __name__ == '__main__':
    sys.exit(main())
