"""Sparse verification: what `python -m lab.measure sparse` stores, and the claims that it must show.

A prompt is read densely once. From there each setting reads on, five tokens a pass, and writes a text. The
record `long` is of any target, on look-ups and on the rows of its files; the others are of the lab's models.
"""
import functools
import itertools
import random
import re
import statistics
from dataclasses import replace

import numpy
import torch

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.judge import CLOCK, gap, number, over, ratio
from lab.measure import (EMBEDDED, MODELS, SEED, Prompt, Record, Setting, graded, moment, network, prepared,
                         rows_by_family)
from model import Reader, encode, read_calibration
from specmini import ready
from train_mask import sparsity
from verify import METHODS, Exact, Session, Sparse, decode, no_draft, tokens_of

SOURCE = 'notes on the paper'
T = 5                               # positions of a reading pass
OWN = 64                            # tokens of the target's own text that are read on a long context
NEXT = '\n\nQuestion: '             # begins a question in a context; in an answer it begins another one
LENGTHS = 2048, 4096, 8192, 16384   # tokens of a long context, what is written included
LOOK_UP = 'look-up'                 # contexts whose answer stands far back
SEEDS = 5                           # calibrations, each on other training rows, that prompts take in turn

# Settings are named by what a pass reads. The lab's texts are short, so blocks are small and there is no L0.
DENSE = dict(rho=1.0, moe_skip=0)
OFF = DENSE | dict(dense_below=0, block=4, locals=1)
HYBRID = dict(rho=0.25, ffn_quantile=0.6)
GRID = {
    'dense': {},
    'keys 50 %': dict(rho=0.5),
    'keys 25 %': dict(rho=0.25),
    'keys 10 %': dict(rho=0.1),
    'every second layer': dict(rho=0.25, anchors=0),
    'latest keys 25 %': dict(rho=0.25, method='sparse-recent'),
    'channels 40 %': dict(ffn_quantile=0.6),                # each token its own
    'keys 25 %, channels 40 %': HYBRID,
    'keys 10 %, channels 40 %': HYBRID | dict(rho=0.1)}
GRID |= {f'blocks of {block}': dict(rho=0.25, block=block) for block in (8, 16, 32, 64, 128)}
MIXTURE = {'dense': {}, 'keys 25 %': dict(rho=0.25), 'channels 40 %': dict(ffn_quantile=0.6),
           'keys 25 %, 3 experts': dict(rho=0.25, moe_skip=1),
           'keys 25 %, 3 experts, channels 40 %': HYBRID | dict(moe_skip=1)}
MIXTURE |= {f'{4 - m} experts': dict(moe_skip=m) for m in (1, 2, 3)}    # of 4, where the median rule skips
USUAL = {'dense': DENSE, 'keys 25 %': dict(moe_skip=0),     # the method's defaults, on long contexts
         'latest keys 25 %': dict(moe_skip=0, method='sparse-recent'),
         'blocks of 4': dict(moe_skip=0, block=4)}
PIECEWISE = {'dense': DENSE}        # as the paper and our notes on it have L0 and blocks
for l0, block in itertools.product((128, 2048), (16, 64, 128, 256)):
    PIECEWISE[f'L0 {l0}, blocks of {block}'] = dict(moe_skip=0, dense_below=l0, block=block)
FORMS = {'dense': DENSE, 'sparse': dict(moe_skip=0)}


# ------------------------------------------------------------------------------------------------- one prompt

class Prompted:
    """A session that has read its prompt; each setting goes on from there, as if there were no other."""

    def __init__(self, pair, prompt, tokens_left, solution=None):
        """tokens_left: tokens to write; solution: ids that settings read, by default what dense writes."""
        engine = prepared(replace(pair, max_new=tokens_left), Setting(Exact))
        engine.open([prompt.ids])
        self.session = engine.start(prompt.ids, Sparse())
        self.tokenizer, self.row, self.ids = engine.tokenizer, prompt.row, prompt.ids
        self.tokens_left = tokens_left
        self.solution = solution or self.write(DENSE)[0][:OWN]
        self.dense, _ = self.log_probs(DENSE)

    def start(self, knobs):
        """The session after its prompt again, sparse with these knobs."""
        session = self.session
        session.tokens, session.tokens_left = list(self.ids), self.tokens_left
        knobs = dict(knobs)
        session.sparse = METHODS[knobs.pop('method', 'sparse')](**knobs)
        session.target.cache.record(self.ids[:-1], len(self.ids) - 1, session.target.model.full)
        return session

    def log_probs(self, knobs):
        """(log-probabilities [n, V] of the solution's tokens, seconds of the median pass of T of them)."""
        session = self.start(knobs)
        line = self.ids + self.solution
        rows, times = [], []
        for begin in range(len(self.ids), len(line), T):
            guesses = line[begin:begin + T - 1]
            path = session.target_path()
            start = moment()
            rows.append(session.target.read(line[:begin] + guesses, path, len(guesses) + 1))
            times.append(moment() - start)
        return torch.cat(rows)[:len(self.solution)].float().log_softmax(-1), statistics.median(times)

    def read(self, knobs):
        """kl in nats, dense to sparse; alike: share of the same first choice; nll in nats; pass: seconds."""
        dense = self.dense
        sparse, seconds = self.log_probs(knobs)
        tokens = torch.tensor(self.solution, device=sparse.device)[:, None]
        kl = (dense.exp() * (dense - sparse)).sum(-1).mean()
        alike = (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
        nll = -sparse.gather(1, tokens).mean()
        return {'kl': float(kl), 'alike': float(alike), 'nll': float(nll), 'pass': seconds}

    def write(self, knobs):
        """(ids of the greedy text of `sd`, its counts); a next question ends the answer."""
        session = self.start(knobs)
        begin = moment()
        cycles = list(decode(session, Exact()))
        seconds = moment() - begin
        tokens = tokens_of(cycles)
        right = graded(self.row, self.tokenizer.decode(tokens).partition(NEXT)[0])
        return tokens, dict(tokens=len(tokens), cycles=len(cycles), seconds=seconds, right=right)

    def run(self, knobs, timed=False):
        """What a setting reads and writes, as a dict; its times only if they are wanted."""
        run = self.read(knobs) | self.write(knobs)[1]
        return run if timed else {key: value for key, value in run.items() if key not in ('pass', 'seconds')}


# ---------------------------------------------------------------------------------------------- long contexts

def long_items(pair, n, lengths=LENGTHS):
    """Prompts of each length that fits the context: n look-ups, `look-up 8192`, n of each family."""
    context = prepared(pair, Setting(Exact)).context
    found = []
    for length in [length for length in lengths if length <= context]:
        makers = {LOOK_UP: functools.partial(look_up, pair, length - OWN)}
        for family, rows in rows_by_family(pair.prompts).items():
            makers[family] = functools.partial(joined, pair, rows, length - pair.max_new)
        for family, make in makers.items():
            contexts = [Prompt(f'{family} {length}', place, *make(place)) for place in range(n)]
            found += [prompt for prompt in contexts if len(prompt.ids) > length / 2]    # else rows are few
    return found


def look_up(pair, tokens, place):
    """(row, ids): a table whose first half is asked about, and after it as many others as fit.

    The embedded models know questions of the task; any other model is asked for a single cell.
    """
    rows = tasks.rows('table-long', f'{SEED} {place}')
    for row in rows:
        *lines, question = row['prompt'].split('\n')
        cells = re.findall(r'\| (\w+) of (\w+) (\d+)', row['solution'])
        asked = tuple(f'| {item}:' for _, item, _ in cells)
        if not any(line.startswith(asked) for line in lines[len(lines) // 2:]):
            break
    if not pair.is_embedded:
        column, item, value = cells[0]
        question = f'{NEXT}What is the {column} of {item}?\nAnswer:'
        row = dict(answer=value)
    others = []
    for other in itertools.islice(rows, tokens // 500):     # no table is shorter, in any vocabulary
        *more, _ = other['prompt'].split('\n')
        others.append('\n'.join(line for line in more if not line.startswith(asked)))
    return row, filled(pair, '\n'.join(lines), others, '\n' + question, '\n', tokens)


def joined(pair, rows, tokens, place):
    """(row, ids): rows in an order of their own, worked where they have an answer; the last one's is open."""
    row, *others = random.Random(f'{SEED} {place}').sample(rows, len(rows))
    worked = []
    for other in others:
        worked.append(f'{other["prompt"]}\nAnswer: {other.get("solution") or other.get("answer", "")}')
    return row, filled(pair, '', worked, f'{NEXT}{row["prompt"]}\nAnswer:', NEXT, tokens)


def filled(pair, first, texts, last, between, tokens):
    """The ids of first and last, and between them as many texts as have so many tokens together."""
    texts = [between + text for text in texts]
    sizes = map(len, encode(pair.tokenizer, [first + last, *texts], special=False))
    _, *ends = itertools.accumulate(sizes)
    fitting = [text for text, end in zip(texts, ends) if end <= tokens]
    return pair.encode(''.join([first, *fitting, last]).lstrip())


def long_row(settings, pair, prompt):
    """What settings read and write of a long context, by the clock."""
    there = Prompted(pair, prompt, OWN if prompt.family.startswith(LOOK_UP) else pair.max_new)
    runs = {name: there.run(knobs, timed=True) for name, knobs in settings.items()}
    return prompt.name | dict(tokens=len(prompt.ids), runs=runs)


# ------------------------------------------------------------------------------------ passes over random keys

def pass_items(pair, n):
    """(tokens in view, round): n rounds of each length that fits the context, the longest first."""
    context = prepared(pair, Setting(Exact)).context
    return [(length, place) for length in (8192, 4096, 2048) if length <= context for place in range(n)]


@functools.cache
def random_keys(pair):
    """A Session whose cache holds random keys and values, on which the time of a pass does not depend."""
    model, _, _ = ready(pair.target, pair.device, pair.dtype)
    reader = Reader(model, min(8192, model.config.max_position_embeddings))
    for store in reader.cache.stores:
        store.normal_()
    return Session(reader, None, no_draft, [], 0, calibration=read_calibration(pair.target))


def pass_row(pair, item):
    """Seconds of a pass over T positions by each form, the median of three; a round has its own order."""
    length, place = item
    line = [1] * length
    runs = {}
    for name in random.Random(f'{SEED} {place}').sample(list(FORMS), len(FORMS)):
        session = random_keys(pair)
        session.sparse = Sparse(**FORMS[name])
        session.target.cache.record(line, 0, session.target.model.full)
        times = []
        for _ in range(4):                  # the first one averages the keys
            start = moment()
            session.target.read(line, session.target_path(), T)
            times.append(moment() - start)
        runs[name] = {'pass': statistics.median(times[1:])}
    return dict(family=f'{length} tokens', place=place, runs=runs)


# --------------------------------------------------------------------------------- the lab's tasks and models

def prompts(task, n, split='held-out', seed=SEED):
    """n Prompts of a task of the lab; of tables those of 256 tokens or more, which have many blocks."""
    found = []
    for row in tasks.rows(task, seed, split):
        ids = EMBEDDED.encode(row['prompt'])
        if task != 'table' or len(ids) >= 256:
            found.append(Prompt(task, len(found), row, ids))
        if len(found) == n:
            return found


@functools.cache
def calibrated(model, task, seed):
    """The section `sparse` of a model of the lab, measured on 4 tables or 16 other training rows."""
    found = prompts(task, 4 if task == 'table' else 16, 'train', SEED + seed)
    texts = [EMBEDDED.encode(row['prompt'] + row['solution']) for _, _, row, _ in found]
    net, _, _ = network(str(MODELS / model), EMBEDDED.device, EMBEDDED.dtype)
    return sparsity(net, texts, dense_below=0, block=4, locals=1)


def task_row(model, settings, pair, prompt):
    """What settings read and write, calibrated on training rows of the task.

    Then, for comparison, a hybrid that is calibrated on stories, and layers that choose drawn by lot.
    """
    (solution,) = encode(pair.tokenizer, [prompt.row['solution']], special=False)
    there = Prompted(replace(pair, target=str(MODELS / model)), prompt, pair.max_new, solution)

    def run(knobs, task=prompt.family, **others):
        measured = calibrated(model, task, prompt.place % SEEDS)
        there.session.calibration = dict(sparse=measured | others)
        return there.run(OFF | knobs)
    runs = {name: run(knobs) for name, knobs in settings.items()}
    if model == 'target':
        runs['anchors of stories'] = run(HYBRID, 'story')
        layers = range(1, there.session.target.model.config.num_hidden_layers)
        drawn = [0, *random.Random(f'{SEED} {prompt.place}').sample(layers, len(layers) // 2)]
        runs['random layers'] = run(dict(rho=0.25), anchors=drawn)
    return prompt.name | dict(runs=runs)


def of_tasks(model, settings, *families):
    """The Record of task_row for each prompt of these tasks."""
    return Record(lambda pair, n: [prompt for task in families for prompt in prompts(task, n)],
                  functools.partial(task_row, model, settings), only="the lab's tasks and models")


RECORDS = dict(long=Record(long_items, functools.partial(long_row, USUAL), drafts=False, by='clock'),
               piecewise=Record(lambda pair, n: long_items(pair, n, (8192,)),
                                functools.partial(long_row, PIECEWISE), drafts=False, by='clock'),
               passes=Record(pass_items, pass_row, drafts=False, by='clock'),
               tasks=of_tasks('target', GRID, 'math', 'table', 'story'),
               mixture=of_tasks('moe', MIXTURE, 'math'))


# ------------------------------------------------------------------------------------------ what it must show

KEYS, LATEST = 'keys 25 %', 'latest keys 25 %'
CHANNELS = 'channels 40 %'
ALL = f'{KEYS}, 3 experts, {CHANNELS}'
STABLE = 'notes: "stable performance across summarization, QA, and mathematical reasoning tasks"'
TWICE = 'notes: "Sparse verification techniques achieve 2-3x efficiency gains"'
CLAIMS = {              # text: whose, rival, line; drafts are of the draft model, on long contexts looked up
    'long: same choice': ('notes: "minimal accuracy loss across multiple tasks"', 'dense', 0.95),
    'long: same choice less the latest keys': ('ours', 'the latest quarter of the keys', 0.01),
    'look-up: right answers': (STABLE, 'dense', -0.01),
    'look-up: right answers less the latest keys': ('ours', 'the latest quarter of the keys', 0.02),
    'long contexts: tokens a cycle': (STABLE, 'dense', 0.95),
    'long: whole texts, speed over sd': ('ours', '`sd`, dense', 1),
    'one pass after 8k tokens: speed': (TWICE, 'dense', 2),
    'one pass after 8k random keys, weights in 16 bits: speed': (TWICE, 'dense', 2),
    'KL to dense by random layers, less by anchors (tasks; L0 0, blocks of 4)': (
        'notes: "inter-layer retrieval reuse"', 'anchors as calibrated', 0),
    'math: tokens a cycle (L0 0, blocks of 4)': (STABLE, 'dense', 0.95),
    'mixture, all three: tokens a cycle (math; L0 0, blocks of 4)': (STABLE, 'dense', 0.95),
    'an expert of four skipped by the median: perplexity kept': (
        'notes: "adaptive expert skipping"', 'dense', 0.98)}


def column(runs, figure, name):
    """A setting's figure of each text."""
    return runs.sums[figure][:, runs.number[name]]


def less(runs, figure, name, other):
    """A setting's figure less another's, of each text; nan where one of them did not run."""
    return column(runs, figure, name) - column(runs, figure, other)


def figures(records):
    """Yields (text of a claim, its texts, its figure, its kind) of what the records of a pair allow."""
    if 'long' in records and records['long'].rows:      # a short context has none
        yield from long_figures(records.runs('long'))
    if 'tasks' in records:
        runs = records.runs('tasks')
        yield ('KL to dense by random layers, less by anchors (tasks; L0 0, blocks of 4)', runs.every,
               gap(less(runs, 'kl', 'random layers', KEYS)), '')
        yield ('math: tokens a cycle (L0 0, blocks of 4)', numpy.flatnonzero(runs.families == 'math'),
               over(runs, KEYS, 'dense', 'cycles'), '')
    if 'mixture' in records:
        runs = records.runs('mixture')
        yield ('mixture, all three: tokens a cycle (math; L0 0, blocks of 4)', runs.every,
               over(runs, ALL, 'dense', 'cycles'), '')
        yield ('an expert of four skipped by the median: perplexity kept', runs.every,
               gap(numpy.exp(less(runs, 'nll', 'dense', '3 experts'))), '')
    if 'passes' in records and records['passes'].rows:
        runs = records.runs('passes')
        at_8k = numpy.flatnonzero(numpy.char.startswith(runs.families, '8192'))
        if len(at_8k):
            faster = ratio(column(runs, 'pass', 'dense'), column(runs, 'pass', 'sparse'))
            yield 'one pass after 8k random keys, weights in 16 bits: speed', at_8k, faster, CLOCK


def long_figures(runs):
    """Of long contexts: a quarter of the keys beside dense, and beside the latest keys alone."""
    at_8k = numpy.flatnonzero(numpy.char.endswith(runs.families, '8192'))
    look_ups = numpy.flatnonzero(numpy.char.startswith(runs.families, LOOK_UP))
    if 'pass' in runs.sums and len(at_8k):
        faster = ratio(column(runs, 'pass', 'dense'), column(runs, 'pass', KEYS))
        yield 'one pass after 8k tokens: speed', at_8k, faster, CLOCK
    yield 'long: same choice', runs.every, gap(column(runs, 'alike', KEYS)), ''
    yield 'long: same choice less the latest keys', runs.every, gap(less(runs, 'alike', KEYS, LATEST)), ''
    if len(look_ups) and column(runs, 'right', 'dense')[look_ups].any():        # else nothing can be lost
        yield 'look-up: right answers', look_ups, gap(less(runs, 'right', KEYS, 'dense')), ''
        yield ('look-up: right answers less the latest keys', look_ups,
               gap(less(runs, 'right', KEYS, LATEST)), '')
    yield 'long contexts: tokens a cycle', runs.every, over(runs, KEYS, 'dense', 'cycles'), ''
    if 'seconds' in runs.sums:
        yield 'long: whole texts, speed over sd', runs.every, over(runs, KEYS, 'dense', CLOCK), CLOCK


# ----------------------------------------------------------------------------------------------------- sweeps

SIZES = [f'L0 {l0}, blocks of {block}' for l0 in (128, 2048) for block in (16, 64, 128, 256)]
MIXED = 'dense', KEYS, CHANNELS, '3 experts', f'{KEYS}, 3 experts', ALL
SWEEPS = [      # what, record, part of the families' names, figure, settings
    ('one pass over dense, 2k tokens (median)', 'long', ' 2048', 'faster', [KEYS]),
    ('the same, 4k', 'long', ' 4096', 'faster', [KEYS]),
    ('one pass over dense, weights in 16 bits, 8k (median)', 'passes', '8192', 'faster', ['sparse']),
    ('the same, 4k', 'passes', '4096', 'faster', ['sparse']),
    ('the same, 2k', 'passes', '2048', 'faster', ['sparse']),
    ('same first choice, 8k: chosen, latest keys', 'long', ' 8192', 'alike', [KEYS, LATEST]),
    ('same first choice, 8k: blocks of 16, 64, 128, 256; with L0 2048', 'piecewise', '', 'alike', SIZES),
    ('tokens a cycle, 8k: dense; the same', 'piecewise', '', 'efficiency', ['dense', *SIZES]),
    ('look-up, right: dense, chosen, latest keys; in blocks of 4', 'long', LOOK_UP, 'right',
     ['dense', KEYS, LATEST, 'blocks of 4']),
    ('tables, right: dense, 50, 25, 10 % of keys (L0 0, blocks of 4)', 'tasks', 'table', 'right',
     ['dense', 'keys 50 %', KEYS, 'keys 10 %']),
    ('tables, right: 25 %, blocks of 4, 8, ... 128', 'tasks', 'table', 'right',
     [KEYS, *(f'blocks of {block}' for block in (8, 16, 32, 64, 128))]),
    ('math, KL: calibrated, random, every second layer', 'tasks', 'math', 'kl',
     [KEYS, 'random layers', 'every second layer']),
    ('tables, same choice: anchors of tables, stories', 'tasks', 'table', 'alike',
     [f'{KEYS}, {CHANNELS}', 'anchors of stories']),
    ('math, right: dense, 10 % of keys, hybrid', 'tasks', 'math', 'right',
     ['dense', 'keys 10 %', f'keys 10 %, {CHANNELS}']),
    ('same choice: 40 % of channels', 'tasks', '', 'alike', [CHANNELS]),
    ('perplexity: 3, 2, 1 of 4 experts', 'mixture', '', 'perplexity',
     ['3 experts', '2 experts', '1 experts']),
    ('right: dense; keys, channels, 3 experts; keys and experts, all', 'mixture', '', 'right', MIXED),
    ('KL: the same', 'mixture', '', 'kl', MIXED),
    ('tokens a cycle: the same', 'mixture', '', 'efficiency', MIXED)]


def sweeps(pairs):
    """The table of SWEEPS: means over texts (medians of times), without verdicts."""
    lines = [[what] for what, *_ in SWEEPS]
    for records in pairs.values():
        runs = {name: with_ratios(records.runs(name)) for name in records}
        for line, (_, record, part, figure, settings) in zip(lines, SWEEPS):
            line.append(means(runs.get(record), part, figure, settings))
    return [(('sweep, ablation or next check', *pairs), lines)]


def with_ratios(runs):
    """Runs with figures that are ratios: efficiency, faster, perplexity."""
    sums = runs.sums
    if 'tokens' in sums:
        sums['efficiency'] = sums['tokens'] / sums['cycles']
    if 'pass' in sums:
        sums['faster'] = column(runs, 'pass', 'dense')[:, None] / sums['pass']
    if 'nll' in sums:
        sums['perplexity'] = numpy.exp(sums['nll'] - column(runs, 'nll', 'dense')[:, None])
    return runs


def means(runs, part, figure, settings):
    """The figure of each setting over texts, as a cell; None if it was not measured."""
    texts = [i for i, family in enumerate(runs.families) if part in family] if runs else []
    if not texts or figure not in runs.sums or not runs.number.keys() >= set(settings):
        return None
    middle = numpy.nanmedian if figure == 'faster' else numpy.nanmean
    return ', '.join(number(float(middle(column(runs, figure, name)[texts]))) for name in settings)
