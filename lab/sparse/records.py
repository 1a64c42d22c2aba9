"""What is measured of sparse verification beside the lists of this folder.

A prompt is read densely once. From there a setting reads on in a given text, five tokens a pass (KL and first
choices beside dense), and writes a text of its own. The record `long` is of any target; the others are of the
lab's models.
"""
import functools
import itertools
import random
import re
import statistics
from dataclasses import replace

import torch

import kernels
from lab import tasks
from lab.measure import (LAB, MODELS, SEED, Prompt, Record, moment, network, parts_of, prepared, read_list,
                         rows_by_family, run_once, started, text_rows)
from model import encode
from train_mask import sparsity
from verify import Sparse

T = 5                               # positions of a reading pass
OWN = 64                            # tokens of the target's own text that are read on a long context
NEXT = '\n\nQuestion: '             # begins a question in a context
LENGTHS = 2048, 4096, 8192, 16384   # tokens of a long context, what is written included
LOOK_UP = 'look-up'                 # contexts whose answer stands far back
SEEDS = 2                           # calibrations, each on other training rows, that prompts take in turn

# On long contexts the method's defaults; on the lab's short tasks there is no L0 and blocks are small.
CHOSEN, LATEST = 'sparse moe_skip=0', 'sparse-recent moe_skip=0'
LONG = 'sd', CHOSEN, LATEST, 'sparse moe_skip=0 block=4'
SHORT = 'dense_below=0 block=4 locals=1'
QUARTER = f'sparse rho=0.25 {SHORT}'
READ = ('sd', f'sparse rho=0.5 {SHORT}', QUARTER, f'sparse rho=0.1 {SHORT}', f'{QUARTER} anchors=0',
        f'{QUARTER} anchors=10', f'sparse-recent rho=0.25 {SHORT}', f'sparse-random rho=0.25 {SHORT}',
        'sparse rho=1 ffn_quantile=0.6', f'{QUARTER} ffn_quantile=0.6')
BY_LOT, OF_STORIES = f'{QUARTER}, layers by lot', f'{QUARTER}, layers of stories'
ALL = f'{QUARTER} moe_skip=1 ffn_quantile=0.6'
EXPERTS = 'sd', *(f'sparse rho=1 moe_skip={m}' for m in (1, 2, 3)), f'{QUARTER} moe_skip=0', ALL


# ---------------------------------------------------------------------------------------------- reading on

def keys_read(setting, cached):
    """The cached keys that a pass reads in each layer: the kept blocks and the partial block after them."""
    rule, _ = parts_of(setting.partition(',')[0])
    if not isinstance(rule, Sparse) or rule.rho == 1:
        return cached
    blocks = min(cached // rule.block, int(kernels.kept_blocks(cached, rule)))
    return blocks * rule.block + cached % rule.block


def read_on(session, ids, text, setting):
    """(log-probabilities [n, V] of n tokens after a prompt's ids, a layer's keys of each pass, seconds)."""
    method, _ = parts_of(setting)
    session.sparse = method if isinstance(method, Sparse) else None
    session.target.cache.record(ids[:-1], len(ids) - 1, session.target.model.full)
    line, rows, keys, times = ids + text, [], [], []
    for begin in range(len(ids), len(line), T):
        session.tokens = line[:begin]
        guesses = line[begin:begin + T - 1]
        path = session.target_path()
        start = moment()
        rows.append(session.target.read(line[:begin] + guesses, path, len(guesses) + 1))
        times.append(moment() - start)
        keys.append((keys_read(setting, begin - 1), begin - 1))
    return torch.cat(rows)[:len(text)].float().log_softmax(-1), keys, times


def read_rows(pair, prompt, text, runs):
    """A row of what each setting reads of a text: runs {name: (setting, calibration or None)}, dense first.

    read: tokens; alike: those of which dense has the same first choice; kl, nll: their sums in nats; keys,
    cached: sums over passes of what a layer reads and of what there is; pass: seconds of the median one.
    """
    session = started(pair, 'sd', prompt)
    usual = session.calibration
    rows, dense = [], None
    for name, (setting, calibration) in runs.items():
        session.calibration = calibration or usual
        logp, keys, times = read_on(session, prompt.ids, text, setting)
        dense = logp if dense is None else dense
        picked = logp.gather(1, torch.tensor(text, device=logp.device)[:, None])
        kl = (dense.exp() * (dense - logp)).sum()
        alike = int((dense.argmax(-1) == logp.argmax(-1)).sum())
        read, cached = map(sum, zip(*keys))
        rows.append(prompt.name | dict(setting=name, read=len(text), alike=alike, kl=float(kl),
                                       nll=-float(picked.sum()), keys=read, cached=cached)
                    | {'pass': statistics.median(times)})
    return rows


@functools.cache
def calibrated(pair, task, seed):
    """The section `sparse` of a target, measured on 16 training rows of a task, of tables 4."""
    rows = itertools.islice(tasks.rows(task, SEED + seed, 'train'), 4 if task == 'table' else 16)
    texts = [pair.encode(row['prompt'] + row['solution']) for row in rows]
    model = network(pair.target, pair.device, pair.dtype, 16)[0]
    return sparsity(model, texts, dense_below=0, block=4, locals=1)


def task_rows(model, names, pair, prompt):
    """What settings read of a task's solution, calibrated on training rows of this task."""
    pair = replace(pair, target=str(MODELS / model))
    seed = prompt.place % SEEDS
    solution = encode(pair.tokenizer, prompt.row['solution'], special=False)
    own = dict(sparse=calibrated(pair, prompt.family, seed))
    runs = {name: (name, own) for name in names}
    if model == 'target':
        layers = network(pair.target, pair.device, pair.dtype, 16)[0].config.num_hidden_layers
        drawn = [0, *random.Random(f'{SEED} {prompt.place}').sample(range(1, layers), layers // 2)]
        runs[BY_LOT] = QUARTER, dict(sparse=own['sparse'] | dict(anchors=drawn))
        runs[OF_STORIES] = QUARTER, dict(sparse=calibrated(pair, 'story', seed))
    return read_rows(pair, prompt, solution, runs)


def of_tasks(model, names, n, *families):
    """The Record of task_rows for n prompts of each of these tasks."""
    return Record(lambda pair, n: pair.texts(families, n), functools.partial(task_rows, model, names), n,
                  dict(target=model, names=names), only="the lab's tasks and models")


def on(name, **changes):
    """A list of this folder, run on another target or longer prompts than the command says."""
    made = read_list(LAB / 'sparse' / f'{name}.txt')
    about = made.about | {key: str(value).rpartition('/')[2] for key, value in changes.items()}
    return made._replace(items=lambda pair, n: made.items(replace(pair, **changes), n), about=about,
                         rows=lambda pair, prompt: made.rows(replace(pair, **changes), prompt),
                         only="the lab's tasks and models")


# ---------------------------------------------------------------------------------------------- long contexts

def long_items(pair, n):
    """Prompts of each length that fits the context: n look-ups, `look-up 8192`, n of each family."""
    context = prepared(pair)[0].context
    found = []
    for length in [length for length in LENGTHS if length <= context]:
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
    sizes = (len(encode(pair.tokenizer, text, special=False)) for text in [first + last, *texts])
    _, *ends = itertools.accumulate(sizes)
    fitting = [text for text, end in zip(texts, ends) if end <= tokens]
    return pair.encode(''.join([first, *fitting, last]).lstrip())


def long_rows(pair, prompt):
    """The run of each setting on a long context, and what it reads of the dense text."""
    if prompt.family.startswith(LOOK_UP):
        pair = replace(pair, max_new=OWN)
    session, *_ = run_once(pair, 'sd', prompt)
    written = session.tokens[session.begin:][:OWN]
    runs = text_rows(LONG, 1, pair, prompt)
    reads = read_rows(pair, prompt, written, {name: (name, None) for name in LONG})
    return [run | read for run, read in zip(runs, reads)]


RECORDS = {
    'long': Record(long_items, long_rows, 50, dict(settings=LONG), drafts=False),
    'reading': of_tasks('target', READ, 36, 'math', 'table', 'summary', 'story'),
    'experts': of_tasks('moe', EXPERTS, 50, 'math'),
    'look-ups': on('look-ups', longest=1900),
    'mixture': on('mixture', target=str(MODELS / 'moe'))}
