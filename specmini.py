"""Speculative decoding from Python and from the command line.

The figures of a trace, the Engine around `verify.decode`, what is printed of a run, the program.
`python specmini.py --prompt "..."` runs on the embedded models; --help names every flag, --list every method.
"""
import argparse
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import InitVar, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path as File
from statistics import median
from typing import NamedTuple

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; nothing here needs it

import torch
from tokenizers import Tokenizer
from torch import distributed
from tqdm import tqdm

from model import (MLP, Reader, encode, expect, fingerprint, load, pack,
                   plain_file, ranks, read_calibration, read_config, read_json, read_tokenizer,
                   same_vocabulary, whole)
from verify import (METHODS, Autoregressive, CmAsd, Cycle, Exact, Session, Sparse, SpecGuard, ViaSd, chain,
                    decode, knobs_of, lookup, silence, tokens_of, whole_passes)

HERE = File(__file__).parent
EMBEDDED = HERE / 'lab' / 'models'
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
SOURCES = dict(lookup=lookup, none=silence)     # of drafts, beside a draft model's chain
CORES = torch.get_num_threads()  # as torch counts them
SMALL = 50_000_000      # parameters below which one CPU thread beats several: too little work to share
PARTS = dict(attn=dict(rho=1.0), ffn=dict(ffn_quantile=0.0),
             moe=dict(moe_skip=0))      # of --sparse, and the knobs that switch each off
PAINT = dict(draft='32', target='31', bonus='36', slim='33', dim='2', strike='9;2')     # terminal codes
BROKEN = '\ufffd'                                       # what a decoder writes for half a character
ROUNDS = 3              # of a comparison
MOST_TEXT = 2 ** 26     # characters of a file of prompts
BLOCKS = 0, 1, 2, 3, 4, 5, 7, 9, 11, 16     # draft tokens of the blocks whose passes a run times at its end
TIMING = 2.0            # seconds after which it begins no further round of them
SURE = 30                # judged draft tokens from which the share kept of them is taken at its word
POOL = 200              # from which it is carried over to places that were not seen
PATIENCE = timedelta(days=30)   # that processes wait for one that has more rows left, or longer ones


def lab_module(name):
    """The module of this name in the laboratory beside this file; None where the file stands alone."""
    return importlib.import_module(f'lab.{name}') if (HERE / 'lab').is_dir() else None


# ------------------------------------------------------------------------------- the figures of a trace

def statistics(cycles, prompt_seconds, weights):
    """The figures of a trace, each defined here once; a ratio without a denominator is None.

    weights: {reader/path: bytes that one pass streams}. acceptance_rate: draft tokens kept over judged;
    drafted_share: committed tokens that the draft wrote, over all: it is low, too, where little is drafted.
    block_efficiency: tokens committed per target pass, full or sparse, the extra token included. work: weight
    bytes read over those of one full target pass; compute: if every position read them anew, as where not
    memory but arithmetic takes the time. Seconds, passes and positions exclude the prompt's.
    """
    passes = Counter()
    positions = Counter()
    labels = Counter()
    kept = judged = drafted = accepted = 0
    seconds = 0.0
    for cycle in cycles:
        labels.update(cycle.labels)
        for path, (n, T, _) in cycle.passes.items():
            passes[path] += n
            positions[path] += T
        kept += sum(token['kept'] for token in cycle.judged)
        judged += len(cycle.judged)
        drafted += len(cycle.drafted)
        accepted += cycle.accepted
        seconds += cycle.seconds
    tokens = labels.total()
    full = weights['target/full']
    return dict(
        cycles=len(cycles), passes=passes, positions=positions, drafted=drafted, judged=judged,
        accepted=accepted, acceptance_rate=ratio(kept, judged), rejection_rate=ratio(judged - kept, judged),
        acceptance_by_place=acceptance_by_place(cycles), drafted_share=ratio(accepted, tokens),
        block_efficiency=ratio(tokens, whole_passes(passes)), labels=labels, seconds=seconds,
        prompt_seconds=prompt_seconds, tokens_per_second=ratio(tokens, seconds),
        work=bytes_read(passes, weights) / full, compute=bytes_read(positions, weights) / full,
        **audit(cycles))


def audit(cycles):
    """The figures of what the target said later of tokens that another had judged, see Session.hear.

    audited: their share of the committed tokens. audited_wrong: the share of them that the target would not
    have written; above temperature 0 the mean of 1 - p(x). audited_logp: their mean log p(x), nats.
    """
    heard = []
    wrong = sum(1 - p for p, _ in heard)
    logp = sum(logp for _, logp in heard)
    n = len(heard)
    return dict(audited=ratio(n, len(tokens_of(cycles))), audited_wrong=ratio(wrong, n),
                audited_logp=ratio(logp, n))


def acceptance_by_place(cycles):
    """[kept, judged] of the draft tokens at the first place of a block, at the second, ...

    A place is judged where what stands before it was kept, so its share does not hang on theirs. A method
    that tries several tokens at a place has them all there; one that judges whole steps has no places.
    """
    places = []
    for cycle in cycles:
        place = 0
        for verdict in cycle.judged:
            if 'score' in verdict:                      # of a step, which all its tokens share
                break
            if place == len(places):
                places.append([0, 0])
            places[place][0] += verdict['kept']
            places[place][1] += 1
            place += verdict['kept']
    return places


def ratio(a, b):
    """a / b, or None where b is 0."""
    return a / b if b else None


def bytes_read(counts, weights):
    """Weight bytes of so many passes of each path."""
    return sum(n * weights[path] for path, n in counts.items())


# --------------------------------------------------------------------------------------- the engine room

@dataclass
class Engine:
    """Loaded models and the settings of a run: `Engine(target=DIR, draft=DIR).generate(text, Exact())`.

    ValueError, one line, for a setting or a checkpoint that does not fit.
    """
    target: str                     # a Hugging Face folder
    draft: str = 'lookup'           # a folder; lookup: from the text itself; none; self: the slim target
    mid: str = None                 # folder of a third model, for methods that ask for one
    sparse: Sparse = None           # thins out the target's passes, under any method but plain decoding
    max_new: int = 256              # tokens to write at most
    temperature: float = 0.0        # 0 is greedy
    top_k: int = 0                  # sample from this many likeliest tokens; 0: from all
    top_p: float = 1.0              # sample from the likeliest tokens of this mass
    seed: int = 0
    ignore_eos: bool = False
    device: str = 'auto'            # cpu or cuda; auto: cuda where it is there
    dtype: str = 'auto'             # one of DTYPES; auto: fp32, on CUDA bf16
    compile: bool = False           # torch.compile the passes
    threads: int = None             # of the CPU; None: 1 for small models, else as many as cores
    parted: bool = False            # whether each process of a group has a part of the target
    read_before: InitVar[Tokenizer] = None      # the target's tokenizer; a copy reads its own
    readers: dict = field(default_factory=dict, init=False)         # {role: Reader}, see open
    calibration: dict = field(default_factory=dict, init=False)     # its sections of calibration.json
    session: type = field(default=Session, init=False)      # of a text; lab.page has one that notes more

    def __post_init__(self, read_before):
        check_settings(self)
        self.tokenizer = read_before
        self.device = pick_device(self.device)
        if self.dtype == 'auto':
            self.dtype = 'bf16' if self.device == 'cuda' else 'fp32'
        self.draft = str(self.draft or 'none')
        self.source = SOURCES.get(self.draft, chain)
        self.has_draft = self.source is chain and self.draft != 'self'
        self.read_sections = set()
        target, self.tokenizer, self.eos = self.network(self.target)
        if self.ignore_eos:
            self.eos = frozenset()
        self.models = dict(target=target)                               # by role
        if self.has_draft:
            self.models['draft'] = self.load_beside('draft', self.draft)
        if self.mid:
            self.models['mid'] = self.load_beside('mid', self.mid)
        contexts = {role: model.config.max_position_embeddings for role, model in self.models.items()}
        self.shortest = min(contexts, key=contexts.get)                 # the role that limits a text
        self.context = contexts[self.shortest]
        if self.device == 'cpu':
            for model in self.models.values():
                if self.dtype == 'fp32' and not self.compile:
                    pack(model)
            take_threads(target, self.threads, self.parted)

    def network(self, folder):
        """(Transformer, Tokenizer, end-of-sequence ids) of a folder, as this run needs it."""
        own = folder == self.target
        tokenizer = self.tokenizer if own else None
        return load(folder, self.device, DTYPES[self.dtype], self.parted and own, tokenizer)

    def load_beside(self, role, folder):
        """The network in the folder, which must share the target's vocabulary."""
        model, _, _ = self.network(folder)
        same_vocabulary(self.models['target'], model, f'--{role} {folder}')
        return model

    def open(self, prompts):
        """Makes caches for the longest of the prompts (lists of ids); ValueError where one does not fit."""
        V = self.models['target'].vocab
        for i, ids in enumerate(prompts, 1):
            highest = max(ids, default=0)
            expect(highest < V, f'prompt {i} has token {highest}, but the last one is {V - 1}')
            expect(0 < len(ids) < self.context,
                   f'prompt {i} has {len(ids)} tokens; expected at least 1, and fewer than the context of '
                   f'{self.context} (of the {self.shortest})')
        longest = max(len(ids) for ids in prompts)
        capacity = min(self.context, longest + self.max_new)
        self.readers = {}
        for role, model in self.models.items():
            self.readers[role] = Reader(model, capacity, self.compile)

    @functools.cached_property
    def measured_sections(self):
        return measured_sections(self.target)

    def calibrate(self, method):
        """Reads, once, what the method uses of calibration.json; ValueError if what it needs is not there."""
        config = self.models['target'].config
        needed = {'mask'} if self.draft == 'self' else set()
        draft = self.draft if self.has_draft else None
        self.calibration = read_calibration(self.target, draft)

    def start(self, ids, method, row=0):
        """A Session that has read this prompt (ids, opened before); nothing of an earlier text is trusted."""
        self.calibrate(method)
        plain = isinstance(method, Autoregressive)
        readers = dict(self.readers)
        if plain:
            readers = dict(target=readers['target'])
        for reader in readers.values():
            reader.forget()                                         # a text pays for its whole prompt
        generator = torch.Generator().manual_seed(self.seed + row)   # equal prompts, other samples
        session = self.session(
            target=readers['target'], draft=readers.get('draft'), source=self.source,
            tokens=list(ids), room=min(self.max_new, self.context - len(ids)), eos=self.eos,
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, generator=generator,
            text=self.tokenizer.decode, calibration=self.calibration, sparse=None if plain else self.sparse)
        session.read_prompt()
        return session

    def write(self, ids, method, row=0):
        """The Cycles of one whole text; the method itself is left as it is, for other texts."""
        method = replace(method)
        return list(decode(self.start(ids, method, row), method))

    def generate(self, text, method):
        """(the text that follows, its Cycles)."""
        (ids,) = encode(self.tokenizer, [text])
        self.open([ids])
        cycles = self.write(ids, method)
        return self.tokenizer.decode(tokens_of(cycles)), cycles

    def statistics(self, cycles, prompt_seconds=0.0):
        """The figures of these Cycles, see statistics."""
        return statistics(cycles, prompt_seconds, self.weights())

    def weights(self):
        """{reader/path: bytes that one pass streams} of the paths that were read on so far."""
        weights = {}
        for role, reader in self.readers.items():
            paths = dict(full=reader.model.full) | reader.paths
            for name, path in paths.items():
                weights[f'{role}/{name}'] = reader.model.read_bytes(path)
        return weights

    def lossless(self, method):
        """Whether this run keeps the target's law; `sparse` leaves plain decoding alone."""
        plain = isinstance(method, Autoregressive)
        return method.lossless and (plain or self.sparse is None or self.sparse.lossless)


def take_threads(target, asked=None, parted=False):
    """Sets how many CPU threads compute: as asked, else one where the target is small, else all cores.

    parted: whether several processes have a part of the target each, and not all of it.
    """
    _, count = ranks()                                  # which share the cores
    parts = count if parted else 1
    small = parts * sum(p.numel() for p in target.parameters()) < SMALL
    torch.set_num_threads(asked or (1 if small else max(1, CORES // count)))


def check_settings(s):
    """ValueError for the first setting of an Engine, or flag of the program, that is out of its range."""
    t = s.temperature
    expect(t == 0 or 1e-6 <= t < math.inf, f'--temperature {t}: expected 0, or 1e-6 or more')
    expect(s.top_k >= 0, f'--top-k {s.top_k}: expected 0 (all) or more')
    expect(0 < s.top_p <= 1, f'--top-p {s.top_p}: expected above 0, at most 1')
    expect(s.max_new >= 1, f'--max-new {s.max_new}: expected 1 or more')
    expect(s.threads is None or 1 <= s.threads <= 1024, f'--threads {s.threads}: expected 1 to 1024')
    expect(0 <= s.seed < 2 ** 62, f'--seed {s.seed}: expected 0 to 2^62 - 1')
    expect(s.dtype in ('auto', *DTYPES), f'--dtype {s.dtype}: expected auto, {", ".join(DTYPES)}')


def pick_device(name):
    """'cpu' or 'cuda'; ValueError if CUDA is asked for and absent."""
    expect(name in ('auto', 'cpu', 'cuda'), f'--device {name}: expected auto, cpu or cuda')
    there = torch.cuda.is_available()
    expect(there or name != 'cuda', '--device cuda: this machine, or torch, has none; use --device cpu')
    if name == 'auto':
        return 'cuda' if there else 'cpu'
    return name


# ------------------------------------------------------------------------------------ methods by their names

def describe_knobs(name):
    """The knobs of a method and their defaults."""
    return ', '.join(f'{knob}={option.default}' for knob, option in knobs_of(METHODS[name]).items())


def make_method(name, settings, names, parts=()):
    """The method with its knobs from --set, a list of 'knob=value', each read by its dataclass type.

    names: the methods of the run. Under --compare a method takes the knobs that it has; one that no method of
    the run has is refused. parts: of --sparse, whose others are switched off.
    """
    knobs = knobs_of(METHODS[name])
    values = {}
    for item in settings:
        knob, equals, text = item.partition('=')
        known = any(knob in knobs_of(METHODS[other]) for other in names)
        if not (equals and known):
            have = '; '.join(f'{other}: {describe_knobs(other) or "none"}' for other in names)
            raise ValueError(f'--set {item}: expected knob=value with a knob of the method ({have})')
        if knob in knobs:
            values[knobs[knob].name] = read_value(item, text, knobs[knob].type)
    if name == 'sparse' and parts:
        for part in PARTS.keys() - parts:
            values = PARTS[part] | values               # what is set by name is meant
    return METHODS[name](**values)


def read_value(item, text, kind):
    """The text of a knob's value as its type; item: the setting that it stands in."""
    try:
        if kind is bool:
            return dict(true=True, false=False)[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f'--set {item}: {text!r} is not a value of type {kind.__name__}') from None


# ----------------------------------------------------------------------------------------------- rows to run

def read_rows(prompt, file):
    """The rows to run, dicts with a text under `prompt`: one of this text, or those of a file of JSON lines.

    Of the two, one is None. ValueError for what is no prompt, with the file and line or the prompt's number.
    """
    rows = [dict(prompt=prompt)] if file is None else rows_of_file(file)
    for i, row in enumerate(rows, 1):
        text = row['prompt']
        broken = any('\ud800' <= letter <= '\udfff' for letter in text)     # how Python keeps a stray byte
        expect(not broken, f'prompt {i} is not valid UTF-8; expected a text')
        expect(text, f'prompt {i} is empty; expected a text')
    return rows


def rows_of_file(file):
    """The rows of a file of JSON lines; blank lines are passed over."""
    rows = []
    for number, line in enumerate(text_of_file('--prompts', file).split('\n'), 1):
        if line.strip():
            rows.append(row_of(line, f'{file} line {number}'))
    expect(rows, f'--prompts {file}: the file has no rows')
    return rows


def text_of_file(flag, file):
    """The text of a file that a flag names; ValueError where it cannot be read, or does not end."""
    try:
        with open(file, encoding='utf-8-sig') as opened:        # some editors begin a file with a mark
            text = opened.read(MOST_TEXT + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f'{flag} {file}: cannot be read ({error})') from None
    expect(len(text) <= MOST_TEXT, f'{flag} {file}: more than {MOST_TEXT} characters; give fewer')
    return text


def row_of(line, where):
    """The row of one line, its text under `prompt` whatever it was called. where: the line, for errors."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where}: not a JSON object ({error})') from None
    text = text_of(row)
    expect(isinstance(text, str), f'{where}: expected an object with a text under prompt, question or turns')
    return row | dict(prompt=text)


def text_of(row):
    """The text of a row: its prompt, question (GSM8K) or first of turns (Spec-Bench); None where none is."""
    if not isinstance(row, dict):
        return None
    for key in ('prompt', 'question', 'turns'):
        if key not in row:
            continue
        found = row[key]
        if isinstance(found, list) and found:
            return found[0]
        return found
    return None


# -------------------------------------------------------------------------------------------- chat templates

def chat(folder, text):
    """The text as the user's message in the checkpoint's own chat template, rendered in a sandbox.

    The template is foreign code: it may raise anything, never end, or take all memory. So it has a process of
    its own, with limits.
    """
    settings = tokenizer_settings(folder)
    template = chat_template(File(folder), settings)
    expect(isinstance(template, str),
           f'--chat: {folder} has no chat_template.jinja, nor one in tokenizer_config.json')
    message = dict(role='user', content=text)
    import jinja2.sandbox                               # noqa: F401, here: not anew in each process

    def render():
        return sandbox(settings).from_string(template).render(messages=[message], add_generation_prompt=True)
    rendered, fault = render(), ''
    expect(rendered is not None, f'--chat: the template of {folder} does not render ({fault})')
    return rendered


def tokenizer_settings(folder):
    """What tokenizer_config.json says; {} where there is none."""
    file = File(folder) / 'tokenizer_config.json'
    return read_json(file) if os.path.lexists(file) else {}


def chat_template(folder, settings):
    """The template, from its own file or else from the settings; no text where there is none."""
    file = plain_file(folder, 'chat_template.jinja')
    if file.exists():
        try:
            return file.read_text(encoding='utf-8')
        except ValueError as error:
            raise ValueError(f'{file}: expected text in UTF-8 ({error})') from None
    found = settings.get('chat_template')
    if not isinstance(found, list):
        return found
    by_name = {}
    for one in found:                                   # several: [{name, template}]
        if isinstance(one, dict):
            by_name[one.get('name')] = one.get('template')
    return by_name.get('default')


def sandbox(settings):
    """A jinja2 environment like the one that transformers gives to templates, special tokens included."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise TemplateError(message)

    def as_json(value, **how):
        return json.dumps(value, ensure_ascii=False, **how)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.add_extension('jinja2.ext.loopcontrols')
    world.filters['tojson'] = as_json
    world.globals['raise_exception'] = refuse
    world.globals['strftime_now'] = time.strftime
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
    number = without_commas(wanted)
    if not re.fullmatch(r'-?\d+(\.\d+)?', number):
        return text.strip() == wanted
    found = re.findall(r'(?:(?<![\w)])-)?\d+(?:\.\d+)?', without_commas(text))      # 10-20 has no -20
    return bool(found) and float(found[-1]) == float(number)


def without_commas(text):
    """The text with numbers such as 1,234 written as 1234."""
    return re.sub(r'(?<=\d),(?=\d{3})', '', text)


# ------------------------------------------------------------------------------------------- text in colours

class Printer:
    """Shows a text as it is committed, each piece in the colour of who wrote it; never half a character."""

    def __init__(self, tokenizer, color, show):
        """show: a line a cycle (cycle_line) instead of the bare text."""
        self.tokenizer = tokenizer
        self.color = color
        self.show = show
        self.ids = []
        self.shown = ''                                 # of the text of these ids
        self.cycles = 0

    def paint(self, text, kind):
        """The text in the colour of its kind, if there are colours."""
        if not (self.color and text):
            return text
        code = PAINT.get(kind, '0')
        return f'\033[{code}m{text}\033[0m'

    def word(self, token, kind, marks='{}'):
        """One token's text: in the colour of its kind, or without colours between marks."""
        text = self.tokenizer.decode([token], skip_special_tokens=False).replace('\n', '\u23ce')
        if self.color:
            return self.paint(text, kind)
        return marks.format(text)

    def add(self, cycle):
        """Prints what a cycle committed."""
        self.cycles += 1
        if self.show:
            print(cycle_line(self.cycles, cycle, self), flush=True)
            return
        for token, label in zip(cycle.tokens, cycle.labels):
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids)
            if text.endswith(BROKEN):                   # the bytes of a character are not all there yet
                continue
            new = text[len(self.shown):]
            print(self.paint(new, label), end='', flush=True)
            self.shown = text

    def finish(self, text):
        """Prints what was held back: the bytes of a character that never became whole. text: all of it."""
        if self.show:
            return
        same = os.path.commonprefix([text, self.shown])         # a decoder may take back what it wrote
        print(text[len(same):], flush=True)


def cycle_line(number, cycle, printer):
    """One cycle as a line: kept tokens, [-rejected-], [+its successor+] ([~by slim~]), (not judged)."""
    kept = cycle.accepted
    parts = []
    for token in cycle.tokens[:kept]:
        parts.append(printer.word(token, 'draft'))
    for verdict in cycle.judged:
        if not verdict['kept']:
            parts.append(printer.word(verdict['token'], 'strike', '[-{}-]'))
    for token, label in zip(cycle.tokens[kept:], cycle.labels[kept:]):
        marks = '[~{}~]' if label == 'slim' else '[+{}+]'
        parts.append(printer.word(token, label, marks))
    for token in cycle.drafted[len(cycle.judged):]:
        word = printer.word(token, '')
        parts.append(printer.paint(f'({word})', 'dim'))
    line = ' '.join(parts)
    return f'{number:4d}  {kept}/{len(cycle.drafted)}  {line}'


def wants_color(choice):
    """Whether to paint, of --color auto, always or never."""
    if choice == 'auto':
        return sys.stdout.isatty()
    return choice == 'always'


# ----------------------------------------------------------------------------------------- a run, as it goes

class JsonLines:
    """A trace as a file of JSON lines, one for each cycle; lab.page.Page is the other form."""

    def __init__(self, file):
        self.file = file
        self.texts = []                                 # ids of their prompts

    def add(self, prompt, found, lines):
        """Another text. prompt: ids; found: its report; lines: its cycles, see trace_line."""
        self.texts.append(prompt)
        for line in lines:
            self.file.write(json.dumps(line) + '\n')

    def conclude(self):
        """Nothing is left to write."""


@contextlib.contextmanager
def open_trace(where, engine):
    """What --trace writes, or None: JSON lines, or a page where the file's name ends in .html."""
    with trace_file(where) as file:
        if file is None:
            yield None
            return
        trace = lab_module('page').Page(file, engine) if is_page(where) else JsonLines(file)
        ended = False
        try:
            yield trace
            ended = True
        finally:
            if ended or trace.texts:
                trace.conclude()


@contextlib.contextmanager
def trace_file(where):
    """A file for --trace, or None without; it is in its place, whole, once the run has ended or broken off.

    Broken off before anything was written, it leaves an older file as it is. A link, pipe or device is
    written to as it is.
    """
    if where is None:
        yield None
        return
    stopped = None
    with contextlib.ExitStack() as stack:
        try:
            own = not os.path.lexists(where) or File(where).is_file() and not os.path.islink(where)
            growing = stack.enter_context(whole(where)) if own else where
            file = stack.enter_context(open(growing, 'w', buffering=1, encoding='utf-8'))
        except OSError as error:
            raise ValueError(f'--trace {where}: cannot be written ({error.strerror})') from None
        try:
            yield file
        except BaseException as error:                  # after the lines of what has been written so far
            if own and file.tell() == 0:
                raise
            stopped = error
    if stopped:
        raise stopped


def note_cycles(engine):
    """Sessions that the engine starts from now on note what a page shows, where the laboratory is there."""
    page = lab_module('page')
    if page:
        engine.session = page.Traced


def is_page(name):
    """Whether --trace of this name, which may be None, asks for a page."""
    return name is not None and name.lower().endswith('.html')


class Teller:
    """Tells a run by one method: each text or its JSON, figures, trace; at the end what they come to."""

    def __init__(self, engine, name, color=False, show=False, as_json=False, trace=None):
        """name: of the method; trace: what it is traced to, see open_trace, or None."""
        self.engine = engine
        self.name = name
        self.color = color
        self.show = show
        self.as_json = as_json
        self.trace = trace
        self.traces = []                                # the Cycles of each text
        self.reports = []                               # of the finished texts
        self.begin()

    def begin(self):
        """Another text."""
        self.printer = Printer(self.engine.tokenizer, self.color, self.show)
        self.cycles = []

    def add(self, cycle):
        """A cycle of the text has been committed."""
        self.cycles.append(cycle)
        if not self.as_json:
            self.printer.add(cycle)

    def finish(self, number, row, session, method):
        """The report of the text, which is written or interrupted. number: of its row, from 0."""
        found = report(self.engine, self.name, method, session, row, self.cycles)
        self.tell(number, session.tokens[:session.begin], found)
        return found

    def tell(self, number, prompt, found):
        """Tells what was found of the text behind a prompt (ids), after its last cycle."""
        if self.as_json:
            print(json.dumps(found), flush=True)
        else:
            self.printer.finish(found['text'])
            print(figures(found), file=sys.stderr, flush=True)
        if self.trace:
            lines = []
            for i, cycle in enumerate(self.cycles):
                lines.append(trace_line(number, i, cycle, self.engine.tokenizer))
            self.trace.add(prompt, found, lines)
            for cycle in self.cycles:
                cycle.notes = {}                        # for the trace alone, and many times the rest
        self.traces.append(self.cycles)
        self.reports.append(found)
        self.begin()

    def conclude(self, session, method):
        """Says what all texts come to."""
        one = Measured(self.name, method, self.traces, self.reports)
        for line in conclude(self.engine, session, one):
            print(line, file=sys.stderr)


def report(engine, name, method, session, row, cycles):
    """The JSON object of one text; `right` only where the row can be graded."""
    tokens = tokens_of(cycles)
    text = engine.tokenizer.decode(tokens)
    knobs = {}
    for knob, option in knobs_of(type(method)).items():
        knobs[knob] = json_value(getattr(method, option.name))
    found = dict(
        text=text,
        tokens=tokens,
        prompt_tokens=len(session.tokens) - len(tokens),
        method=name,
        lossless=engine.lossless(method),
        knobs=knobs,
        seed=session.generator.initial_seed(),
        device=engine.device,
        dtype=engine.dtype,
        finish=why_it_ended(session),
        stats=engine.statistics(cycles, session.prompt_seconds))
    right = grade(row, text)
    if right is not None:
        found['right'] = right
    return found


def why_it_ended(session):
    """'eos', 'length' (of --max-new or the context), or 'interrupted' where there was room for more."""
    if session.ended:
        return 'eos'
    return 'interrupted' if session.room else 'length'


def json_value(value):
    """The value, or its name where JSON has none: an infinite knob or threshold."""
    return str(value) if value in (math.inf, -math.inf) else value


def trace_line(row, index, cycle, tokenizer):
    """One cycle as a dict: ids, text, who wrote what, the judged tokens' scalars, passes, time, notes."""
    judged = []
    for verdict in cycle.judged:
        judged.append({key: json_value(value) for key, value in verdict.items()})
    passes = {}
    for path, (n, positions, seconds) in cycle.passes.items():
        passes[path] = dict(passes=n, positions=positions, ms=round(seconds * 1000, 3))
    line = dict(
        prompt=row,
        cycle=index,
        drafted=cycle.drafted,
        judged=judged,
        tokens=cycle.tokens,
        labels=cycle.labels,
        text=tokenizer.decode(cycle.tokens),
        passes=passes,
        ms=round(cycle.seconds * 1000, 3))
    return line | cycle.notes


def cell(value, form):
    """The value in this format; '-' for None."""
    return '-' if value is None else format(value, form)


def figures(found):
    """One line of a report: what the run was and what it measured."""
    stats = found['stats']
    law = 'lossless' if found['lossless'] else 'LOSSY'
    wrote = ', '.join(f'{n} {label}' for label, n in stats['labels'].items())
    speed = cell(stats['tokens_per_second'], '.1f')
    acceptance = cell(stats['acceptance_rate'], '.0%')
    drafted = cell(stats['drafted_share'], '.0%')
    efficiency = cell(stats['block_efficiency'], '.2f')
    passes = whole_passes(stats['passes'])
    return (f'{found["method"]} ({law}): {len(found["tokens"])} tokens ({wrote}) '
            f'in {stats["seconds"]:.2f} s, {speed} tokens/s; '
            f'acceptance {acceptance}, drafted share {drafted}, block efficiency {efficiency}, '
            f'{passes} target passes, work {stats["work"]:.1f}')


def conclude(engine, session, one):
    """Lines for the end of a run by one method, a Measured: what cut texts short, what pays, remarks, grades.

    session: of the last text, behind which passes are timed.
    """
    yield from cut_short(engine, one.reports)
    yield from unpacked(engine)
    if not isinstance(one.method, Autoregressive):
        plain = plain_steps(session)
        curves = time_paths(session, [one])
        forecast = forecast_of(engine, session, one, curves, plain)
        yield from places_table([one], curves, {one.name: forecast})
        yield from sentences(engine, one, plain, forecast)
    grades = [found.get('right') for found in one.reports]
    share = share_right(grades)
    if share is not None:
        graded = len(grades) - grades.count(None)
        yield f'right: {grades.count(True)} of {graded} graded texts ({share:.1%})'


def sentences(engine, one, plain, forecast, seen=None):
    """What there is to say of a method that drafts, a Measured. seen: its speed over plain decoding's."""
    yield break_even(one, plain, forecast, seen)
    if forecast:
        yield best_gamma(one, forecast)
    yield from chance_remarks(engine, one.cycles)
    yield from audit_remarks(one.cycles)
    yield from stage_remarks(one.method, one.cycles, pass_seconds(plain)['target'])
    yield from remarks(one.method, engine.sparse, one.cycles, one.reports)
    yield from choosing_layers(engine, one.method)


def share_right(grades):
    """The share of True among the grades that are not None; None if nothing was graded."""
    graded = len(grades) - grades.count(None)
    return grades.count(True) / graded if graded else None


def cut_short(engine, reports):
    """A sentence if texts were cut at --max-new, and one if some were cut by a full context before that."""
    limit = engine.context
    count = cut_at_max_new(engine, reports)
    if count:
        yield (f'{count} of {len(reports)} texts ({count / len(reports):.0%}) were cut at --max-new '
               f'{engine.max_new}')
    count = 0
    for found in reports:
        n = len(found['tokens'])
        full = found['prompt_tokens'] + n == limit
        if full and n < engine.max_new and found['tokens'][-1] not in engine.eos:
            count += 1
    if count:
        yield (f'{count} of {len(reports)} texts ended before --max-new {engine.max_new}: '
               f'the context of {limit} tokens (of the {engine.shortest}) was full')


def unpacked(engine):
    """A sentence if sparse channels have unpacked the target's feed-forwards, which holds for all methods."""
    for layer in ():
        if layer:
            yield ("the target's feed-forwards were unpacked, to read single channels: dense passes of this "
                   'run are slower, too')
            return


def cut_at_max_new(engine, reports):
    """How many texts --max-new cut; none where the end of sequence is ignored on purpose."""
    cut = 0
    for found in reports:
        full = len(found['tokens']) == engine.max_new
        cut += full and found['tokens'][-1] not in engine.eos and not engine.ignore_eos
    return cut


# ---------------------------------------------------------------------------------------- --check, --compare

def check(engine, ids, tokens):
    """A sentence that names the first of these tokens that plain decoding would not have written, if any.

    ids: of the prompt, tokens: of the text behind it.
    """
    wanted = tokens_of(engine.write(ids, Autoregressive()))
    same = os.path.commonprefix([tokens, wanted])
    i = len(same)
    shorter = min(len(tokens), len(wanted))
    if i < shorter:
        return difference(engine, ids + same, i, tokens[i], wanted[i])
    sentence = f'check: equal to plain decoding for all {shorter} tokens'
    if len(tokens) == len(wanted):
        return sentence + '.'
    return sentence + f', but {len(tokens)} tokens long instead of {len(wanted)}.'


def difference(engine, ids, place, found, wanted):
    """The sentence on a token found in place of the wanted one, behind these ids."""
    reader = engine.readers['target']
    logits = reader.read(ids, [], reader.model.full, 1)[0]
    gap = float(logits[wanted] - logits[found])
    here = engine.tokenizer.decode([found], skip_special_tokens=False)
    there = engine.tokenizer.decode([wanted], skip_special_tokens=False)
    return (f'check: differs from plain decoding at token {place}: {here!r} ({found}) instead of {there!r} '
            f'({wanted}); logit gap {gap:.2g}.')


@dataclass
class Measured:
    """What one method did with the prompts of a run, or of a task of a comparison."""
    name: str
    method: object
    traces: list            # the Cycles of each text
    reports: list           # of each text a dict: prompt_tokens, tokens, right
    stats: dict = None      # of all texts
    seconds: tuple = ()     # that all texts took, in each round of a comparison

    @property
    def cycles(self):
        """Those of all texts."""
        return [cycle for trace in self.traces for cycle in trace]


class Compared(NamedTuple):
    """One text of a comparison."""
    row: dict
    ids: list               # of its prompt
    traces: dict            # {method: its Cycles} of the first round; the other rounds' say the same
    seconds: dict           # {method: [seconds that the cycles took] in each round}


def compare(engine, rows, prompts, methods):
    """Lines of a table of the methods for each task, and one for the rows that name none.

    methods: {name: method}, plain decoding as `ar` before all others. They are run in turn on each prompt, so
    that noise falls on all alike, and all of it ROUNDS times. Ctrl-C ends the runs: the tables are of the
    prompts that all methods have finished, then the interrupt goes on its way.
    """
    for method in methods.values():                     # a warming round
        engine.write(prompts[0], method)
    texts = []
    stopped = None
    turns = list(itertools.product(range(ROUNDS), range(len(prompts))))
    try:
        for turn, i in tqdm(turns, 'compare', file=sys.stderr, disable=None):
            traces = {}
            for name, method in methods.items():
                traces[name] = engine.write(prompts[i], method, i)
            if turn == 0:
                texts.append(Compared(rows[i], prompts[i], traces, {}))
            for name, trace in traces.items():
                texts[i].seconds.setdefault(name, []).append(seconds_of(trace))
    except KeyboardInterrupt as error:
        stopped = error
    tasks = {}
    for text in texts:
        tasks.setdefault(str(text.row.get('task') or ''), []).append(text)
    for task, found in tasks.items():
        if task:
            yield f'{task}, {len(found)} prompts'
        yield from comparison(engine, methods, found)
    if stopped:
        raise stopped


def comparison(engine, methods, texts):
    """Lines on the texts (Compared) of one task: what each method measured, what pays, what else to say."""
    measured = []
    for name, method in methods.items():
        measured.append(measure(engine, name, method, texts))
    plain, *others = measured
    width = max(14, *map(len, methods))
    yield (f'{"method":{width}}  tokens/s   x ar   from, to     right  accepted   drafted block eff.  '
           'positions/token  like ar    cut')
    for one in measured:
        yield comparison_line(engine, one, plain, width)
    yield (f'x ar: the median of {len(plain.seconds)} rounds, their least and most; cut: at --max-new '
           f'{engine.max_new}')
    yield from unpacked(engine)
    if not others:
        return
    *_, last = texts
    session = engine.start(last.ids, others[0].method)
    session.tokens = session.tokens + tokens_of(last.traces[plain.name])
    curves = time_paths(session, others)
    forecasts = {}
    for one in others:
        forecasts[one.name] = forecast_of(engine, session, one, curves, plain.cycles)
    yield from places_table(others, curves, forecasts)
    for one in others:
        speed, _, _ = speedup(one, plain)
        for sentence in sentences(engine, one, plain.cycles, forecasts[one.name], speed):
            yield f'{one.name}: {sentence}'


def measure(engine, name, method, texts):
    """The Measured of one method."""
    found = Measured(name, method, [], [])
    seconds = []                                        # of each text, in each round
    for text in texts:
        tokens = tokens_of(text.traces[name])
        right = grade(text.row, engine.tokenizer.decode(tokens))
        found.traces.append(text.traces[name])
        found.reports.append(dict(prompt_tokens=len(text.ids), tokens=tokens, right=right))
        seconds.append(text.seconds[name])
    found.stats = engine.statistics(found.cycles)
    found.seconds = [sum(times) for times in zip(*seconds)]     # of the rounds that all texts have finished
    return found


def comparison_line(engine, one, plain, width):
    """One line of the table. plain: the Measured of plain decoding; width: of the methods' names."""
    stats = one.stats
    n = sum(stats['labels'].values())
    right = share_right([found['right'] for found in one.reports])
    like = None                                         # samples differ by chance: nothing to compare
    if engine.temperature == 0:
        like = agreement(one.traces, plain.traces)
    speed, least, most = speedup(one, plain)
    cells = [
        f'{one.name:{width}}',
        f'{n / median(one.seconds):9.1f}',
        f'{speed:6.2f}',
        f'{least:5.2f} {most:5.2f}',
        f'{cell(right, ".1%"):>8}',
        f'{cell(stats["acceptance_rate"], ".1%"):>9}',
        f'{cell(stats["drafted_share"], ".1%"):>9}',
        f'{cell(stats["block_efficiency"], ".2f"):>10}',
        f'{whole_passes(stats["positions"]) / n:15.2f}',
        f'{cell(like, ".1%"):>9}',
        f'{cut_at_max_new(engine, one.reports) / len(one.reports):6.0%} ',
        'lossless' if engine.lossless(one.method) else 'LOSSY']
    return ' '.join(cells)


def seconds_of(cycles):
    """The seconds that these Cycles took."""
    return sum(cycle.seconds for cycle in cycles)


def speedup(one, plain):
    """(median, least, most) over the rounds: how many times as fast as plain decoding in the same round."""
    tokens = sum(one.stats['labels'].values()) / sum(plain.stats['labels'].values())
    found = []
    for mine, theirs in zip(one.seconds, plain.seconds):
        found.append(tokens * theirs / mine)
    return median(found), min(found), max(found)


def agreement(texts, others):
    """The mean share of places at which two lists of texts (lists of Cycles) hold the same token."""
    shares = []
    for text, other in zip(texts, others):
        mine = tokens_of(text)
        theirs = tokens_of(other)
        same = sum(a == b for a, b in zip(mine, theirs))
        shares.append(same / max(len(mine), len(theirs)))
    return sum(shares) / len(shares)


# ------------------------------------------------------------------------------------- what passes cost here

ROLES = dict(draft='draft', slim='slim', mid='middle', target='verifying')      # and names of their passes


def pass_seconds(cycles):
    """{role: seconds of one of its passes}, and under `beside` what else a cycle takes, for each pass.

    Medians over the cycles: a machine that is busy for a moment changes nothing.
    """
    found = {}
    for cycle in cycles:
        passes = 0
        rest = cycle.seconds
        for path, (n, _, seconds) in cycle.passes.items():
            role = 'slim' if 'slim' in path else path.split('/')[0]
            found.setdefault(role, []).append(seconds / n)
            passes += n
            rest -= seconds
        if passes:
            found.setdefault('beside', []).append(rest / passes)
    return {role: median(each) for role, each in found.items()}


def plain_steps(session):
    """Cycles of plain decoding, which writes a text's last tokens anew: what a step costs here and now."""
    n = min(5, len(session.tokens) - 1)
    again = replace(session, tokens=session.tokens[:-n], room=n, eos=frozenset(), sparse=None)
    again.read_prompt()
    return list(decode(again, Autoregressive()))


def step_seconds(plain):
    """Seconds of a step of plain decoding, of whose Cycles this is the median."""
    return median(cycle.seconds for cycle in plain)


def time_paths(session, measured):
    """{path name: {n: seconds of a pass over n + 1 positions}} of the paths on which the methods verify.

    The lengths go up to the longest block of these Measured and beyond, as far as the text reaches. Of a
    compiled target only those that the run had: any other would have to be compiled first.
    """
    seen = {0}
    paths = {}
    for one in measured:
        if isinstance(one.method, Exact):               # others judge no blocks
            path = one.method.path(session)
            paths[path.name] = path
            seen.update(len(cycle.drafted) for cycle in one.cycles)
    longest = max(seen)
    blocks = seen
    if not session.target.compiled:
        every = range(min(longest, max(BLOCKS)) + 1)
        blocks = seen.union(BLOCKS, every)
    blocks = sorted(n for n in blocks if n < len(session.tokens))
    curves = {}
    for name, path in paths.items():
        curves[name] = time_passes(session, path, blocks)
    return curves


def time_passes(session, path, blocks):
    """{n: seconds of a target pass over the last n + 1 positions of the session's text} for each n of blocks.

    Medians of rounds in which each length has its turn: nine behind one that warms up, or as many as TIMING
    allows; where that is one, it counts. A longer pass is not always a slower one: on a CPU three positions
    may cost more than four.
    """
    reader = session.target
    times = {n: [] for n in blocks}
    begin = time.perf_counter()
    _, count = ranks()
    for turn in range(10 if count == 1 else 2):         # several ranks must make the same passes
        if turn > 0 and count == 1 and time.perf_counter() - begin > TIMING:
            break
        for n in blocks:
            mark = len(reader.log)
            reader.read(session.tokens, [], path, n + 1)
            _, _, seconds = reader.spent(mark)[path.name]
            times[n].append(seconds)
    curve = {}
    for n, each in times.items():
        curve[n] = median(each[1:] or each)
    return curve


# ------------------------------------------------------------------------------------------------- what pays

class Forecast(NamedTuple):
    """What blocks of some length are expected to bring."""
    tokens: float           # a cycle
    speed: float            # over plain decoding's


def forecast_of(engine, session, one, curves, plain):
    """{gamma: Forecast} for each length of block that was timed; none for cycles that it does not know.

    one: the Measured that has the acceptance; curves: see time_paths; plain: Cycles of plain decoding.
    """
    if engine.source is not chain or not drafts_blocks(one.method, one.cycles):
        return {}
    curve = curves[one.method.path(session).name]
    lengths = [len(found['tokens']) for found in one.reports]
    return forecast(acceptance_by_place(one.cycles), costs_of(one.cycles, curve), lengths, plain, curve)


def drafts_blocks(method, cycles):
    """Whether each cycle was a block of gamma tokens and one target pass over it and the root."""
    if not isinstance(method, Exact) or isinstance(method, ViaSd) or method.controller != 'fixed':
        return False
    for cycle in cycles:
        target = []
        for path, (n, positions, _) in cycle.passes.items():
            if path.startswith('target/') and 'slim' not in path:
                target.append((n, positions))
        if target != [(1, len(cycle.drafted) + 1)]:
            return False
    return True


def forecast(places, costs, lengths, plain, gammas):
    """{gamma: Forecast} of texts of these lengths; from few verdicts only as far as there are places.

    places: see acceptance_by_place; costs: see costs_of; plain: Cycles of plain decoding.
    """
    if not places:
        return {}
    if judged_at(places) < SURE:
        gammas = [gamma for gamma in gammas if gamma <= len(places)]
    chances = chances_of(places, len(costs) - 1)
    step = step_seconds(plain)
    tokens = sum(lengths)
    found = {}
    for gamma in gammas:
        cycles = expected(max(lengths), gamma, chances, [1] * len(costs))
        seconds = expected(max(lengths), gamma, chances, costs)
        count = total = 0.0
        for length in lengths:
            count += cycles[length]
            total += seconds[length]
        found[gamma] = Forecast(tokens / count, tokens * step / total)
    return found


def costs_of(cycles, curve):
    """[seconds of a cycle with 0, 1, 2, ... draft tokens], by the passes of these Cycles and the curve.

    A length that was not timed is taken as the next longer one that was.
    """
    seconds = pass_seconds(cycles)
    draft = seconds.get('draft', seconds.get('slim', 0.0))      # slim: of a target that drafts for itself
    costs = []
    for n in range(max(curve) + 1):
        timed = min(m for m in curve if m >= n)
        costs.append(n * draft + curve[timed] + (n + 1) * seconds['beside'])
    return costs


def chances_of(places, n):
    """The chance that the draft token at each of n places is kept, those before it being kept.

    A place that was judged less than SURE times, or never, has the share of the last places that make POOL.
    """
    kept, judged = last_places(places)
    found = []
    for place in range(n):
        own_kept, own = places[place] if place < len(places) else (0, 0)
        found.append(own_kept / own if own >= SURE else kept / judged)
    return found


def judged_at(places):
    """How many draft tokens were judged at these places together."""
    return sum(judged for _, judged in places)


def last_places(places):
    """[kept, judged] of the last places together, as many as it takes for POOL judged draft tokens."""
    total = [0, 0]
    for kept, judged in reversed(places):
        total[0] += kept
        total[1] += judged
        if total[1] >= POOL:
            break
    return total


def expected(longest, gamma, chances, costs):
    """What writing 0, 1, ..., `longest` tokens of a text in blocks of gamma is expected to cost.

    costs[n]: of a cycle with n draft tokens; all 1, cycles are counted. Far from the end of its text a cycle
    writes 1 + c0 + c0 c1 + ... tokens, c the chances; at the end a block is no longer than what is left.
    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, where every place has the same chance.
    """
    totals = [0.0]
    for left in range(1, longest + 1):
        n = min(gamma, left)
        total = costs[n]
        reached = 1.0                                   # the chance that all places before this one are kept
        for i in range(n):
            total += reached * (1 - chances[i]) * totals[left - i - 1]      # i are kept, one is replaced
            reached *= chances[i]
        total += reached * totals[max(0, left - n - 1)]
        totals.append(total)
    return totals


def break_even(one, plain, forecast, seen=None):
    """In plain words whether drafting pays: what passes cost here, and the speed that follows from it.

    Without a forecast it is that of a cycle's tokens and time. seen: over plain decoding, where it was timed.
    """
    cycles = one.cycles
    if not verdicts_of(cycles):
        return 'break-even: nothing was drafted, so there is nothing to compare.'
    step = step_seconds(plain)
    seconds = pass_seconds(cycles)
    costs = []
    for role, name in ROLES.items():
        if role in seconds:
            costs.append(f'a {name} pass {seconds[role] / step:.2f}')
    costs.append(f'what is beside each {seconds["beside"] / step:.2f}')
    gamma = getattr(one.method, 'gamma', None)
    if gamma in forecast:
        tokens, speed = forecast[gamma]
        said = f'gamma {gamma} gives {tokens:.2f} tokens a cycle, {speed:.2f} times plain decoding predicted'
        if seen:
            said += f', {seen:.2f} seen'
            speed = seen
    else:
        tokens = len(tokens_of(cycles)) / len(cycles)
        speed = seen or len(tokens_of(cycles)) * step / seconds_of(cycles)
        steps = tokens / speed
        said = f'{tokens:.2f} tokens a cycle in the time of {steps:.2f}, {speed:.2f} times plain decoding'
    ending = '.' if speed > 1 else ', not worth it here.'
    return f'break-even: in steps of plain decoding {", ".join(costs)}; {said}{ending}'


def best_gamma(one, forecast):
    """The sentence on the best block length: the shortest whose forecast is within 2 % of the highest."""
    places = acceptance_by_place(one.cycles)
    judged = judged_at(places)
    if judged < SURE:
        return f'best gamma: {judged} judged draft tokens are too few to tell.'
    highest = max(found.speed for found in forecast.values())
    best = min(gamma for gamma, found in forecast.items() if found.speed >= 0.98 * highest)
    speed = forecast[best].speed
    if best == 0 or speed <= 1:
        return f'best gamma by the same reckoning: none, up to {max(forecast)} drafting does not pay.'
    said = f'best gamma by the same reckoning: {best}, {speed:.2f} times plain decoding predicted'
    known = sum(n >= SURE for _, n in places)
    if best > known:
        kept, n = last_places(places)
        said += f'; from place {known + 1} on taken to be kept as the last {n} judged, {kept / n:.0%}'
    return said + '.'


def places_table(measured, curves, forecasts):
    """Lines of a table, a column for each n: the pass over n draft tokens and the root, acceptance, forecast.

    measured: Measured of methods; curves: see time_paths; forecasts: {method: see forecast_of}.
    """
    rows = []
    columns = {}
    for path, curve in curves.items():
        times = {}
        for n, seconds in curve.items():
            times[n] = milliseconds(seconds)
            columns[n] = str(n)
        rows.append((f'{path} pass over n + 1, ms', times))
    for one in measured:
        places = acceptance_by_place(one.cycles)
        if not places:
            continue
        shares = {}
        counts = {}
        for n, (kept, judged) in enumerate(places, 1):
            shares[n] = f'{kept / judged:.0%}'
            counts[n] = str(judged)
        rows.append((f'{one.name}: kept at place n', shares))
        rows.append(('  of so many judged', counts))
        if forecasts[one.name]:
            speeds = {}
            for gamma, found in forecasts[one.name].items():
                speeds[gamma] = f'{found.speed:.2f}'
            rows.append(('  times ar at gamma n', speeds))
    if len(rows) == len(curves):                        # nothing was judged
        return
    width = max(len(name) for name, _ in rows)
    for name, cells in [('n draft tokens', columns), *rows]:
        line = f'{name:{width}}'
        for n in sorted(columns):
            line += f'{cells.get(n, ""):>6}'
        yield line.rstrip()


def milliseconds(seconds):
    """The milliseconds in at most five letters below a minute."""
    ms = 1000 * seconds
    return f'{ms:.2f}' if ms < 10 else f'{ms:.1f}' if ms < 100 else f'{ms:.0f}'


def chance_remarks(engine, cycles):
    """[a warning] where a draft model is no better than chance.

    At chance: less than half is kept, and no more (by two standard deviations) than would match if each guess
    stood at another place of the text. Above temperature 0 the ratio rule keeps more than matches, so that a
    draft at chance may go unnoticed there.
    """
    places = acceptance_by_place(cycles)
    kept = sum(n for n, _ in places)
    judged = judged_at(places)
    if not engine.has_draft or judged < SURE:
        return []
    guesses = Counter()
    written = Counter()
    for cycle in cycles:
        guesses.update(verdict['token'] for verdict in cycle.judged)
        written.update(cycle.tokens)
    matches = sum(n * written[token] for token, n in guesses.items()) / written.total()
    if kept >= judged / 2 or kept > matches + 2 * math.sqrt(matches):
        return []
    return [f'warning: acceptance is at chance: of {judged} draft tokens {kept} were kept, and {matches:.1f} '
            'would be if each stood at another place. Typical causes: a draft trained with another tokenizer '
            'or chat template, broken draft weights, a draft of another family.']


def audit_remarks(cycles):
    """[what the target says of the tokens that another judged], if any were."""
    share, wrong, logp = audit(cycles).values()
    if share:
        return [f'audit: {share:.0%} of the tokens were judged by another and read by the target later; of '
                f'these it would not have written {wrong:.1%}, mean log-probability {logp:.2f}.']
    for verdict in verdicts_of(cycles):
        if verdict['kept'] and verdict['p'] is None:
            return ['audit: the target has read none of the tokens that another judged.']
    return []


def verdicts_of(cycles):
    """The judged tokens' scalars of all cycles, one list."""
    verdicts = []
    for cycle in cycles:
        verdicts += cycle.judged
    return verdicts


def mean_of(verdicts, key):
    """The mean of one scalar of the judged tokens, such as `kept`; 0 of none."""
    return sum(verdict[key] for verdict in verdicts) / max(1, len(verdicts))


def stage_remarks(method, cycles, one_pass):
    """In plain words whether the middle stages of a method that has any paid.

    As published: with them a cycle costs middle + escalated * full, without them one full pass. That takes
    the tokens of a cycle as equal; a block that a middle stage kept may lack the extra token of sd.
    one_pass: of a target pass over one position, which stands for a full one where none was needed.
    """
    if not isinstance(method, ViaSd):
        return []
    draft = middle = full = 0.0                         # seconds
    needed = 0                                          # full passes
    bare = 0                                            # cycles that lack sd's extra token, or end a text
    for cycle in cycles:
        bare += not method.slim_bonus and cycle.accepted == len(cycle.tokens)
        for path, (n, _, seconds) in cycle.passes.items():
            if path.startswith('draft/'):
                draft += seconds
            if 'slim' in path or path.startswith('mid/'):
                middle += seconds
            if path in ('target/full', 'target/sparse'):
                needed += n
                full += seconds
    if not draft:                                       # a target that drafts for itself does so as slim, too
        return []
    if not middle:
        return ['middle stage: never needed, so there are no costs to compare.']
    one = full / needed if needed else one_pass
    n = len(cycles)
    cost = middle / n / one
    escalated = needed / n
    tokens = len(tokens_of(cycles))
    limit = stage_limit(draft / n / one, tokens / n, bare / n)
    verdict = 'paid' if cost + escalated < limit else 'did not pay'
    return [f'middle stage: a cycle spends {cost:.2f} of a full pass on it, and {escalated:.2f} full passes '
            f'besides. As published it pays where the sum is below 1; {bare / n:.0%} of the cycles have no '
            f'extra token, so here below {limit:.2f}: it {verdict}.']


def stage_limit(draft, tokens, bare):
    """What middle and full passes of a cycle may cost, in full passes, for the pace of one without stages.

    draft: what drafting costs, likewise; tokens: of a cycle; bare: share of cycles to which sd, agreeing with
    the middle stage, would have added a token. Nothing bare: 1, the published form.
    """
    return (draft + 1) * tokens / (tokens + bare) - draft


# -------------------------------------------------------------------------- what a method's trace gives away

def remarks(method, sparse, cycles, reports):
    """Plain sentences on a method, and on the Sparse (or None) that thins it out, from a run's trace.

    reports: the JSON objects of its texts; of these, prompt_tokens, tokens and right are looked at.
    """
    found = []
    both = [method] if isinstance(method, Sparse) else [method, sparse]     # once, where they are one
    for one in both:
        for kind, say in REMARKS.items():
            if isinstance(one, kind):
                found += say(one, cycles, reports)
    return found


def window_remarks(method, cycles, reports):
    """The paper's failure signatures, as far as one run shows them: a sentence each."""
    verdicts = verdicts_of(cycles)
    if not verdicts:
        return []
    n = len(cycles)
    drafted = sum(len(cycle.drafted) for cycle in cycles) / n           # tokens a cycle
    seen = len(tokens_of(cycles)) / n
    alpha = mean_of(verdicts, 'kept')
    fixed = 0.0
    if alpha < 1:
        fixed = (1 - alpha ** (drafted + 1)) / (1 - alpha)              # Leviathan et al. 2023, equation 1
    rolled_back = sum(not verdict['kept'] for verdict in verdicts) / n
    excess = 0.0                                        # of the chance to be kept, over what exactness allows
    for verdict in verdicts:
        excess += verdict['chance'] - min(1, verdict['p'] / verdict['q'])
    excess /= len(verdicts)
    said = []
    if rolled_back > 0.5:
        said.append(f'{rolled_back:.0%} of the cycles were rolled back: does C predict acceptance here?')
    if excess > 0.05:
        said.append(f'{excess:.1%} of the judged tokens were kept although exactness forbids it: if quality '
                    'suffers, raise tau_base or gamma_tau')
    if seen < fixed:
        said.append(f'no gain over a fixed window: {fixed:.2f} tokens a cycle would be expected from '
                    f'gamma={drafted:.1f} at this acceptance rate, {seen:.2f} were seen')
    return said


def step_remarks(method, cycles, reports):
    """How many steps were kept, and whether the calibration is stale."""
    steps = [cycle.judged[0] for cycle in cycles]       # every token of a step has the step's verdict
    kept = mean_of(steps, 'kept')
    clipped = mean_of(steps, 'clipped')
    stale = ', above 20 %: run train_mask.py --signals on such texts' if clipped > 0.2 else ''
    return [f'{len(steps)} steps, {kept:.0%} kept; {clipped:.0%} had a signal clipped{stale}.']


def sparse_remarks(method, cycles, reports):
    """The failure signatures that the paper's readers name, where they are seen."""
    if method.lossless:                                 # none of them is then of its making
        return ['sparse: its knobs leave nothing out; --sparse ffn needs ffn_share, ffn_quantile or '
                'ffn_threshold']
    tokens = len(tokens_of(cycles)) / max(len(cycles), 1)       # a cycle
    short = 0                                           # texts that were read densely to their ends
    for found in reports:
        short += found['prompt_tokens'] + len(found['tokens']) <= method.dense_below
    grades = [found.get('right') for found in reports]
    wrong = grades.count(False)
    said = []
    if tokens < 2:
        said.append(f'sparse: only {tokens:.2f} tokens a cycle; the draft and the sparse target have parted')
    if short and method.rho < 1:
        said.append(f'sparse: {short} texts stayed below dense_below {method.dense_below}')
    if wrong > grades.count(True):
        said.append(f'sparse: {wrong} graded texts are wrong; compare with sd')
    return said


def choosing_layers(engine, method):
    """[a sentence] on the layers that choose blocks of keys where a run leaves some out, else nothing."""
    sparse = method if isinstance(method, Sparse) else engine.sparse
    if sparse is None or sparse.rho == 1 or isinstance(method, Autoregressive):
        return []
    layers = engine.models['target'].config.num_hidden_layers
    chosen = sparse.anchor_layers(engine.calibration.get('sparse', {}), layers)
    every_second = chosen == list(range(0, layers, 2))
    said_by = 'every second one' if every_second else 'by calibration.json'
    return [f'sparse: of {layers} layers {", ".join(map(str, chosen))} choose blocks ({said_by})']


REMARKS = {CmAsd: window_remarks, SpecGuard: step_remarks, Sparse: sparse_remarks}


# -------------------------------------------------------------------------- rows dealt to several processes
# Where one of its processes dies, torchrun ends the others: nobody is left to take over what was dealt to it.
# So each keeps its rows in a file of its own as soon as it has them, and the same command, given again, goes
# on from there, with as many processes as are then started.

def deal(name, run, items, row_of, resume=True):
    """[row_of(item) for each item] in the first process of a group; None in the others, which help with it.

    Rows that NAME.part0, NAME.part1, ... keep of this run are not computed again, unless resume is False; of
    the others each process takes every N-th. run: a text that names all that rows hang on; a row is read back
    from JSON, so its tuples are lists and its keys are texts.
    """
    rank, count = ranks()
    if not resume and rank == 0:
        drop_kept(name)
    wait()
    digest = hashlib.sha256(run.encode('utf-8', 'backslashreplace')).hexdigest()[:16]
    kept = kept_rows(name, digest)
    wait()                                              # all have seen the same
    if kept:
        print(f'{name}.part*: {len(kept)} of {len(items)} rows are there', file=sys.stderr)
    left = [i for i in range(len(items)) if i not in kept]
    with open(f'{name}.part{rank}', 'a', encoding='utf-8') as file:
        take(file)
        file.write('\n')                                # behind half a line, where a kill has left one
        for i in tqdm(left[rank::count], File(name).name, file=sys.stderr, disable=None):
            file.write(json.dumps([digest, i, row_of(items[i])]) + '\n')
            file.flush()
    wait()
    if rank > 0:
        return None
    kept = kept_rows(name, digest)
    absent = len(items) - len(kept)
    expect(absent == 0, f'{name}.part*: {absent} of {len(items)} rows are absent; expected a folder that all '
           'processes share')
    return [kept[i] for i in range(len(items))]


def kept_rows(name, digest):
    """{place: row} of what the files of this name keep; ValueError where they are not of this run."""
    begin = json.dumps([digest])[:-1]                   # of each line
    kept = {}
    for file in kept_files(name):
        for line in file.read_text(encoding='utf-8', errors='replace').split('\n'):
            own = line.startswith(begin) or begin.startswith(line)
            expect(own, f'{file} is not of this run: go on with the run that it is of, or take the file away')
            try:
                _, i, row = json.loads(line)
            except ValueError:                          # half a line, or a blank one
                continue
            kept[i] = row
    return kept


def kept_files(name):
    """The files that keep rows under this name."""
    wanted = re.escape(File(name).name) + r'\.part\d+'
    return [file for file in File(name).parent.iterdir() if re.fullmatch(wanted, file.name)]


def drop_kept(name):
    """Deletes the files that keep rows under this name, if nobody is at them."""
    for place in kept_files(name):
        with open(place, 'a') as file:
            take(file)
        place.unlink()


def take(file):
    """Keeps an open file from other processes until it is closed; ValueError where one of them has it."""
    expect(lock(file, wait=False), f'{file.name}: another process has this file; wait until it has ended')


def wait():
    """Waits until all processes of the group are here; ValueError where one has ended."""
    _, count = ranks()
    if count > 1:
        try:
            distributed.monitored_barrier(timeout=PATIENCE)
        except RuntimeError:
            raise ValueError('another process has ended; the same command goes on') from None


def settings_of(engine):
    """All that the texts of an engine hang on, beside method and prompts."""
    folders = [engine.target, engine.mid]
    if engine.has_draft:
        folders.append(engine.draft)
    models = [fingerprint(folder) for folder in folders if folder]
    settings = {option.name: getattr(engine, option.name) for option in fields(engine) if option.init}
    return models, settings, engine.calibration


# --------------------------------------------------------------------------------------------- the program

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f'{message}; --help lists the flags')


def parse(argv):
    """The flags, checked; ValueError in one line for what does not fit."""
    p = Parser(description='Speculative decoding on Llama and Qwen checkpoints.', allow_abbrev=False)
    add = p.add_argument
    add('--prompt', help='the text to continue')
    add('--prompts', metavar='FILE.jsonl', help='rows with prompt, question or turns (the first is used)')
    add('--target', metavar='DIR', help='Hugging Face folder (default: the embedded target)')
    add('--draft', metavar='DIR|lookup|self|none', help='default: the embedded one; with --target, lookup; '
        'self: the target without the sublayers that its calibration.json skips')
    add('--mid', metavar='DIR', help='a model between draft and target, for the methods that ask for one')
    add('--method', help='one of those that --list shows (default: sd)')
    add('--sparse', metavar='attn,ffn,moe', help='what the target leaves out, under any method')
    add('--gamma', type=int, help='draft tokens a cycle (default: 4)')
    add('--temperature', type=float, help='0 (the default; of a proof: 1) is greedy')
    add('--top-k', type=int, default=0, help='sample from this many likeliest tokens; 0: from all')
    add('--top-p', type=float, default=1.0, help='sample from the likeliest tokens of this mass')
    add('--seed', type=int, default=0)
    add('--max-new', type=int, default=256, help='tokens to write at most (default: 256)')
    add('--ignore-eos', action='store_true', help='write on past the end of sequence')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto', help='auto: fp32, on CUDA bf16')
    add('--compile', action='store_true', help='torch.compile the passes (on a CPU it needs a C++ compiler)')
    add('--threads', type=int, help='CPU threads (default: 1 for small models, else as many as cores)')
    add('--chat', action='store_true', help="render the checkpoint's own chat template around the prompt")
    add('--color', choices=('auto', 'always', 'never'), default='auto')
    add('--show', action='store_true', help='cycle by cycle: what was drafted, struck out, put in its place')
    add('--trace', metavar='FILE.jsonl|FILE.html', help='write one line for every cycle; .html: a page that '
        'shows the run, with --compare all of them on one clock')
    add('--check', action='store_true', help='run plain decoding beside it and name the first difference')
    add('--compare', metavar='M1,M2,...', help='one table of these methods and ar')
    add('--split', metavar='NAME', help='deal the rows of --prompts to the processes of torchrun; until all '
        'are told, NAME.part0, NAME.part1, ... keep the finished ones, and the same command goes on')
    add('--prove', metavar='METHOD', help="its law on tables that are counted out, beside the target's")
    add('--list', action='store_true', help='the methods and their knobs')
    add('--json', action='store_true', help='one JSON object for each prompt, instead of the text')
    args = p.parse_args(argv)
    given = {flag for flag, value in vars(args).items() if value != p.get_default(flag)}
    if args.temperature is None:
        args.temperature = 1.0 if args.prove else 0.0   # a greedy law is one text
    if args.prove:
        check_proof(args, given)
    elif not args.list:
        check_flags(args)
        fill_in(args)
    return args


def check_proof(args, given):
    """ValueError for the first flag that does not fit --prove; given: flags that are not at their default."""
    others = given - {'prove', 'set', 'gamma', 'temperature', 'top_k', 'top_p'}
    names = ', --'.join(sorted(others)).replace('_', '-')
    expect(not others, f'--prove takes --set, --gamma, --temperature, --top-k, --top-p; leave out --{names}')
    expect(args.prove in METHODS, f'--prove {args.prove}: there are {", ".join(METHODS)}')
    check_settings(args)


def check_flags(args):
    """ValueError for the first flag that does not fit."""
    empty = [flag for flag, value in vars(args).items() if value == '' and flag != 'prompt']
    expect(not empty, f'--{", --".join(empty)}: found an empty text, expected a value')
    unknown = [name for name in method_names(args) if name not in METHODS]
    expect(not unknown, f'method {unknown} is unknown; there are {", ".join(METHODS)}')
    parts = sparse_parts(args)
    expect(parts <= PARTS.keys(), f'--sparse {sorted(parts)}: expected some of attn,ffn,moe')
    given = (args.prompt is None) != (args.prompts is None)
    expect(given, 'give --prompt TEXT or --prompts FILE.jsonl')
    check_settings(args)
    alone = args.method or args.check or args.json or args.show or args.trace and not is_page(args.trace)
    expect(not (args.compare and alone), '--compare takes none of --method, --check, --json, --show, and '
           '--trace only of a page, FILE.html')
    expect(not is_page(args.trace) or lab_module('page'), f'--trace {args.trace}: pages are made by lab/, '
           'which is not beside this file; expected another ending than .html, which gives JSON lines')
    expect(not args.check or args.temperature == 0, '--check: texts agree only at --temperature 0')
    expect(args.split is None or args.prompts, '--split: one text cannot be split; give --prompts FILE.jsonl')
    for flag, where in (('trace', args.trace), ('split', args.split)):
        home = File(where or '').parent
        expect(home.is_dir(), f'--{flag} {where}: there is no folder {home}; make it first')
    name = os.path.basename(args.split or '')
    expect(File(args.split or '').name == name, f'--split {args.split}: a folder; expected the name of files')
    expect(not (args.split and args.compare), '--compare times methods in turn in one process: no --split')
    expect(not (args.split and is_page(args.trace)), '--split: a page is of one process; trace to JSON lines')


def method_names(args):
    """The methods of the run; plain decoding is in every comparison."""
    if args.compare:
        return list(dict.fromkeys(['ar', *args.compare.split(',')]))
    return [args.method or 'sd']


def sparse_parts(args):
    return set(args.sparse.split(',')) if args.sparse else set()


def fill_in(args):
    """Puts in the methods, and defaults that hang on other flags; ValueError for a knob that does not fit."""
    args.names = method_names(args)
    args.parts = sparse_parts(args)
    if args.names != ['ar']:
        set_gamma(args, args.names)
    if args.target is None:
        expect(EMBEDDED.is_dir(), 'no --target, and no embedded models beside this file: give a Hugging Face '
               'folder, say what hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir DIR puts into DIR')
        args.draft = args.draft or EMBEDDED / 'draft'
        args.target = EMBEDDED / 'target'
    if args.names == ['ar']:
        args.draft = 'none'                             # nothing is drafted: no draft model is loaded
    args.draft = args.draft or 'lookup'
    owners = [*args.names, 'sparse'] if args.parts else args.names
    args.methods = {name: make_method(name, args.set, owners, args.parts) for name in args.names}
    args.thinner = make_method('sparse', args.set, owners, args.parts) if args.parts else None


def set_gamma(args, names):
    """Takes --gamma, if it is given, for a knob; ValueError where none of these methods has it."""
    if args.gamma is not None:
        known = any('gamma' in knobs_of(METHODS[name]) for name in names)
        expect(known, f'--gamma {args.gamma}: no knob of {", ".join(names)}; leave it out')
        args.set.append(f'gamma={args.gamma}')


def open_engine(args, tokenizer):
    """The Engine that the flags ask for; tokenizer: the target's."""
    engine = Engine(
        target=args.target, draft=args.draft, mid=args.mid, sparse=args.thinner, max_new=args.max_new,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        ignore_eos=args.ignore_eos, device=args.device, dtype=args.dtype, compile=args.compile,
        threads=args.threads, parted=args.split is None, read_before=tokenizer)
    mixtures = engine.models['target'].config.mixtures
    there = dict(attn=True, ffn=not all(mixtures), moe=any(mixtures))
    for part in args.parts:
        expect(there[part], f'--sparse {part}: {args.target} has no layer of that kind')
    for name, method in args.methods.items():
        bound = getattr(method, 'most_wrong', 1)
        expect(bound == 1 or not args.thinner, f'{name}: most_wrong={bound} goes by what dense passes of the '
               'target say; leave out --sparse')
        engine.calibrate(method)
    return engine


def join_ranks(device, backend):
    """Makes this process one of those that torchrun has started, if it has; only the first of them tells."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return
    try:
        distributed.init_process_group(backend)
    except RuntimeError as error:
        raise ValueError(f'the processes do not find each other: start them again ({error})') from None
    rank, _ = ranks()
    if rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, 'w')
    if device == 'cuda':
        own = distributed.get_node_local_rank(rank)
        there = torch.cuda.device_count()
        expect(own < there, f'process {own + 1} of this machine has no CUDA device, of {there}; start fewer')
        torch.cuda.set_device(own)


def leave_ranks(failed=False):
    """Ends the group of processes; not NCCL's where one has failed: its end would wait for the others."""
    rank, _ = ranks()
    if rank > 0:
        sys.stderr = sys.__stderr__                     # a defect that ends it is told
    if distributed.is_available() and distributed.is_initialized():
        if not (failed and distributed.get_backend() == 'nccl'):
            distributed.destroy_process_group()


def refuse_parted(args):
    """ValueError for what a rank cannot do with its part of the target alone."""
    expect(not args.compile, '--compile: a sum over processes is no part of a graph; leave it out')
    expect(not is_page(args.trace), f'--trace {args.trace}: a page times passes that one process cannot make '
           'without the others; trace to JSON lines')
    for method in [*args.methods.values(), args.thinner]:
        for knob, needed in (('signals', 'draft'), ('select', 'head'), ('ffn_share', 1.0),
                             ('form', 'literal')):
            found = getattr(method, knob, needed)
            expect(found == needed, f"{knob}={found}: the target's heads and channels are in several "
                   f'processes; expected {needed}')


def prove(args):
    """Prints a method's law beside the target's; returns 1 where it promises what is not so, else 0."""
    prover = lab_module('prove')
    expect(prover, '--prove needs the tables of the laboratory: the folder lab, beside this file')
    set_gamma(args, [args.prove])
    method = make_method(args.prove, args.set, [args.prove])
    proof = prover.prove(args.prove, method, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    for line in proof.lines():
        print(line)
    return proof.status


def run(args):
    """All that the flags ask for; returns the exit status."""
    if args.prove:
        return prove(args)
    if args.list:
        for name, method in METHODS.items():
            print(f'{name:17} {method.__doc__.splitlines()[0]}', describe_knobs(name))
        return 0
    device = pick_device(args.device)
    join_ranks(device, 'gloo' if args.split or device == 'cpu' else 'nccl')
    rank, count = ranks()
    if count > 1 and not args.split:
        refuse_parted(args)
    if rank > 0 and not args.split:
        args.trace = None
    rows = read_rows(args.prompt, args.prompts)
    texts = [row['prompt'] for row in rows]
    if args.chat:
        texts = [chat(args.target, text) for text in texts]
    read_config(args.target)                            # a folder that is none is told first
    tokenizer = read_tokenizer(args.target)
    prompts = encode(tokenizer, texts, not args.chat)
    engine = open_engine(args, tokenizer)
    engine.open(prompts)
    if args.compile:
        warm_up(engine, prompts[0], args.methods)
    if args.split:
        return generate_dealt(engine, rows, prompts, args)
    if args.compare is None:
        with open_trace(args.trace, engine) as trace:
            return generate(engine, rows, prompts, args, trace)
    with open_trace(args.trace, engine) as page:
        for line in compare(engine, rows, prompts, args.methods):
            print(line, flush=True)
        if page:
            trace_comparison(engine, rows, prompts, args.methods, page)
    return 0


def trace_comparison(engine, rows, prompts, methods, page):
    """Writes every prompt by every method once more, on a page: the rounds are timed without its notes."""
    note_cycles(engine)
    steps = []
    for i, ids in enumerate(prompts):
        for name, method in methods.items():
            own = replace(method)
            session = engine.start(ids, own, i)
            cycles = list(decode(session, own))
            found = report(engine, name, own, session, rows[i], cycles)
            lines = []
            for n, cycle in enumerate(cycles):
                lines.append(trace_line(i, n, cycle, engine.tokenizer))
            page.add(ids, found, lines)
            if name == 'ar':
                steps += cycles
    page.step = step_seconds(steps)


def warm_up(engine, ids, methods):
    """Writes a text by each method, so that its passes are compiled; says how long that took."""
    begin = time.perf_counter()
    for method in methods.values():
        engine.write(ids, method)
    print(f'compiled in {time.perf_counter() - begin:.1f} s, not counted below; later texts may need '
          'passes of other lengths', file=sys.stderr)


def generate(engine, rows, prompts, args, trace):
    """Every prompt by one method, told as it is written; returns the exit status."""
    (name, method), = args.methods.items()
    teller = Teller(engine, name, wants_color(args.color), args.show, args.json, trace)
    if trace:
        note_cycles(engine)
    quiet = True if len(prompts) == 1 else None         # None: a bar on a terminal
    for i, ids in enumerate(tqdm(prompts, disable=quiet, file=sys.stderr)):
        own = replace(method)                           # a method object serves one text
        session = engine.start(ids, own, i)
        try:
            for cycle in decode(session, own):
                teller.add(cycle)
        except KeyboardInterrupt:
            teller.finish(i, rows[i], session, own)
            return 130
        found = teller.finish(i, rows[i], session, own)
        if args.check:
            print(check(engine, ids, found['tokens']), file=sys.stderr)
    if is_page(args.trace):
        trace.step = step_seconds(plain_steps(session))
    teller.conclude(session, own)
    return 0


def generate_dealt(engine, rows, prompts, args):
    """As generate, the rows dealt to a group of processes, whose first tells them when all are written."""
    (name, method), = args.methods.items()
    if args.trace:
        note_cycles(engine)

    def write(i):
        own = replace(method)
        session = engine.start(prompts[i], own, i)
        cycles = list(decode(session, own))
        found = report(engine, name, own, session, rows[i], cycles)
        checked = check(engine, prompts[i], found['tokens']) if args.check else ''
        return found, checked, [vars(cycle) for cycle in cycles]

    bound = [name, method, args.check, bool(args.trace), settings_of(engine), rows, prompts]
    try:
        dealt = deal(args.split, repr(bound), range(len(prompts)), write)
    except KeyboardInterrupt:
        print('interrupted: the same command goes on', file=sys.stderr)
        return 130
    leave_ranks()
    if dealt is None:
        return 0
    with open_trace(args.trace, engine) as trace:
        tell_dealt(engine, prompts, args, dealt, trace)
    sys.stdout.flush()
    drop_kept(args.split)
    return 0


def tell_dealt(engine, prompts, args, dealt, trace):
    """Tells texts that several processes have written. dealt: their reports, checks and cycles, in order."""
    (name, method), = args.methods.items()
    teller = Teller(engine, name, wants_color(args.color), args.show, args.json, trace)
    for i, (found, checked, cycles) in enumerate(dealt):
        for cycle in cycles:
            teller.add(Cycle(**cycle))
        teller.tell(i, prompts[i], found)
        if checked:
            print(checked, file=sys.stderr)
    own = replace(method)
    session = engine.start(prompts[-1], own)
    session.tokens = session.tokens + found['tokens']
    teller.conclude(session, own)


def main(argv=None):
    """Runs the program; returns its exit status, see exit_status; 1 for a method that --prove finds wrong."""
    lab_module('rivals')                                # enters the baselines in METHODS
    return exit_status('specmini', lambda: run(parse(argv)))


def exit_status(program, work):
    """What work() returns, 0 for None; 2 for bad input or a full disk (a line on stderr), 130 for Ctrl-C.

    0 also where whoever read our output has gone (a broken pipe, say of `| head`).
    """
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'w'))   # it was closed before we began: nobody listens
    failed = True
    try:
        status = work() or 0
        sys.stdout.flush()                              # a full disk is told here, and not at exit
        failed = status > 0
        return status
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        rank, count = ranks()
        if isinstance(error, RuntimeError) and 'alloc' not in str(error) and count == 1:
            raise                                       # not for want of memory: a defect, not bad input
        told = sys.__stderr__ if rank > 0 else sys.stderr       # what one rank alone has met is told, too
        with contextlib.suppress(OSError):              # it may be what is full
            print(f'{program}:', ' '.join(str(error).split()), file=told)
        return 2
    finally:
        leave_ranks(failed)


if __name__ == '__main__':
    sys.exit(main())
