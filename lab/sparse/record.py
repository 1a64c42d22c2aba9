"""What is measured for sparse verification: `python -m lab.claims sparse`. How it is judged is in claims.py.

Every prompt is read densely once; then each setting reads its solution, five tokens a pass, and writes one.
"""
import functools
import itertools
import random
import sys

import torch
from tqdm import tqdm

import kernels
from lab import tasks
from lab.common import MODELS, SEED, embedded, mean
from lab.distil import Lesson
from lab.sparse.distil import distil
from lab.sparse.lengths import long_contexts, stretched
from lab.sparse.passes import cost
from lab.sparse.rivals import SparseForms, ledger
from lab.sparse.settings import (BOTH, GRID, HARD, LENGTHS, LONG, MIXTURE, OFF, REFRESH, SEEDS, SELECTIONS,
                                 SWEEPS, USUAL, WHOLE_MIXTURE)
from model import Reader, read_calibration
from train_mask import sparsity, watched
from verify import Exact, Session, Sparse, chain, decode

TOKENS = 5          # of a reading pass


def contexts(task, n, split='held-out', seed=SEED):
    """n (row, prompt ids, solution ids) as the models know them; tables of LONG tokens or more.

    Other tasks' prompts are short. Filled up with solved rows they are unlike what the models learned: dense,
    the target then guesses worse than sparse, where it sees less of the filling.
    """
    _, tokenizer, _ = embedded('target')
    source = tasks.rows(task, seed, split)
    found = []
    while len(found) < n:
        row = next(source)
        ids = tokenizer.encode(row['prompt']).ids
        if task != 'table' or len(ids) >= LONG:
            found.append((row, ids, tokenizer.encode(row['solution']).ids))
    return found


def shown(found, name):
    """The same list, with a bar on stderr where that is a terminal."""
    return tqdm(found, desc=name, file=sys.stderr, disable=None)


@functools.cache
def calibrated(model, task, seed, is_usual=False):
    """The sparse section of a calibration on training rows of the task, others for each seed: 4 tables or 16.

    As the settings choose: in blocks of 4, without an L0; is_usual: as the method's defaults do.
    """
    texts = []
    for _, prompt, solution in contexts(task, 4 if task == 'table' else 16, 'train', SEED + seed):
        texts.append(prompt + solution)
    small = {knob: OFF[knob] for knob in USUAL}
    return sparsity(model, texts, **USUAL if is_usual else small)


def in_turn(model, task, found):
    """(context, calibration) of each context found: SEEDS calibrations on the task, in turn."""
    for i, context in enumerate(found):
        yield context, calibrated(model, task, i % SEEDS)


def pair_of(target):
    """(an embedded target, the embedded draft): networks."""
    return embedded(target)[0], embedded('draft')[0]


# ------------------------------------------------------------------------------------------------- one prompt

class Prompt:
    """A prompt that was read densely, once: what settings of Sparse make of its solution, and write on."""

    def __init__(self, context, found, pair=None, plain=None):
        """context: see contexts; found: see calibrated; pair: the target and the draft, default: embedded.

        plain: the knobs with which nothing is left out.
        """
        _, self.tokenizer, eos = embedded('target')
        self.row, self.ids, self.solution = context
        self.room = len(self.solution) + 12
        pair = pair or pair_of('target')
        readers = [Reader(network, len(self.ids) + self.room) for network in pair]
        self.session = Session(*readers, chain, list(self.ids), self.room, eos,
                               calibration=dict(sparse=found))
        self.session.read_prompt()
        self.dense_laws, self.dense_passes = self.passes(plain)

    def start(self, knobs):
        """The session behind its prompt again, sparse with these knobs; none: dense."""
        session = self.session
        session.tokens = list(self.ids)
        session.room = self.room
        session.ended = False
        session.cycles = 0
        session.sparse = None
        if knobs:
            kind = SparseForms if 'form' in knobs else Sparse
            session.sparse = kind(**OFF | knobs)
        full = session.target.model.full
        session.target.cache.record(self.ids[:-1], len(self.ids) - 1, full)
        return session

    def passes(self, knobs, fresh=False):
        """(log-probabilities [n, V] of a solution of n tokens, [dict of what a pass took]).

        As in decoding, on what the passes wrote themselves; fresh: each on a dense cache instead.
        """
        session = self.start(knobs)
        reader = session.target
        full = reader.model.full
        line = self.ids + self.solution
        laws = []
        taken = []
        for begin in range(len(self.ids), len(line), TOKENS):
            if fresh:
                reader.read(line[:begin - 1], [], full, 0)
            guesses = line[begin:begin + TOKENS - 1]
            log = []
            path = watched(session.view(full), log)
            mark = session.mark()
            laws.append(reader.read(line[:begin], guesses, path, len(guesses) + 1))
            [pass_taken] = session.spent(mark).values()
            _, positions, seconds = pass_taken
            taken.append(self.pass_of(log, begin - 1, positions, seconds))
            session.cycles += 1
        return torch.cat(laws)[:len(self.solution)].log_softmax(-1), taken

    def pass_of(self, log, cached, positions, seconds):
        """What one watched pass took, as a dict."""
        model = self.session.target.model
        rows = ledger(log, model, cached)
        found = cost(model, rows, positions)._asdict()
        keys = mean(row['keys'] for row in rows) / cached
        return dict(found, keys=keys, seconds=seconds, rows=rows, overlaps=overlaps(log))

    def read(self, knobs, fresh=False):
        """What a sparse reading of the solution is beside a dense one, means over its tokens.

        kl in nats, dense to sparse; alike: the same first choice; nll in nats a token; bytes, flops (that are
        needed), run (FLOPs that the code executes) and seconds over the dense passes'; shares of the cached
        keys that are read, of a layer's channels that a token (channels) and a pass (union) reads; overlap
        (see overlaps) only where rows chose for themselves.
        """
        laws, taken = self.passes(knobs, fresh)
        dense = self.dense_laws
        found = dict(
            kl=float((dense.exp() * (dense - laws)).sum(-1).mean()),
            alike=float((dense.argmax(-1) == laws.argmax(-1)).float().mean()),
            nll=self.nll(laws),
            keys=mean(each['keys'] for each in taken),
            channels=self.share(taken, 'channels'),
            union=self.share(taken, 'union'),
        )
        for key in ('bytes', 'flops', 'run', 'seconds'):
            found[key] = total(taken, key) / total(self.dense_passes, key)
        shares = []
        for each in taken:
            shares += each['overlaps']
        if shares:
            found['overlap'] = mean(shares)
        return found

    def nll(self, laws):
        """Nats a token of the solution under these log-probabilities [n, V]."""
        places = torch.tensor(self.solution)[:, None]
        return -float(laws.gather(1, places).mean())

    def share(self, taken, key):
        """The mean number under this key of all layers of all passes, as a share of a layer's channels."""
        width = self.session.target.model.config.intermediate_size
        counts = []
        for each in taken:
            for row in each['rows']:
                counts.append(row.get(key, width))      # a mixture has no such number
        return mean(counts) / width

    def write(self, knobs):
        """The greedy text of `sd`, gamma 4: right (1 or 0), tokens (ids), text, tokens_a_cycle, verifying.

        verifying is the target's share of the seconds.
        """
        session = self.start(knobs)
        cycles = list(decode(session, Exact()))
        tokens = session.tokens[len(self.ids):]
        text = self.tokenizer.decode(tokens)
        every = verifying = 0.0
        for cycle in cycles:
            for path, (_, _, seconds) in cycle.passes.items():
                every += seconds
                if path.startswith('target'):
                    verifying += seconds
        tokens_a_cycle = mean(len(cycle.tokens) for cycle in cycles)
        right = bool(tasks.grade(self.row, text))
        return dict(right=float(right), tokens=tokens, text=text, tokens_a_cycle=tokens_a_cycle,
                    verifying=verifying / every)


def total(taken, key):
    return sum(each[key] for each in taken)


def overlaps(log):
    """Of the blocks that the later rows of a pass would choose, the root's share, in each upper layer."""
    last = max(sublayer for sublayer, _ in log)
    shares = []
    for sublayer, carry in log:
        is_upper_attention = sublayer % 2 == 0 and sublayer >= last / 2
        if not is_upper_attention or 'chosen_mask' not in (carry or {}):
            continue
        chosen = carry['chosen_mask'][0].float()                        # [G, T, N]
        root = chosen[:, :1]
        later = chosen[:, 1:]
        if later.shape[1]:
            shares.append(float((root * later).sum() / later.sum()))
    return shares


# ------------------------------------------------------------------------------------------------ the records

def setting_rows(task, settings, n):
    """A row a prompt: its tokens, the dense nll, and under `settings` what each reads and writes.

    Calibrated on training rows of the task. Stories, which nobody can grade, are only read, and being long
    half as many. stress: the first line in which the dense text and the hardest setting's differ, where only
    the former is right.
    """
    model, _ = pair_of('target')
    if task == 'story':
        n = max(2, n // 2)
    for context, found in in_turn(model, task, shown(contexts(task, n), task)):
        prompt = Prompt(context, found)
        read = {name: prompt.read(knobs) for name, knobs in settings.items()}
        row = dict(tokens=len(prompt.ids), nll=prompt.nll(prompt.dense_laws), settings=read)
        if task != 'story':
            texts = add_written(prompt, settings, read)
            row['verifying'] = texts['dense']['verifying']
            row['stress'] = first_difference(texts['dense'], texts[HARD])
        yield row


def add_written(prompt, settings, read):
    """{setting: what it writes}, see Prompt.write; what is stored of it is added to read {setting: dict}."""
    texts = {}
    for name, knobs in settings.items():
        texts[name] = prompt.write(knobs)
        read[name] |= written(texts[name], texts['dense'])
    return texts


def written(text, dense):
    """What is stored of a written text: right, tokens_a_cycle, and whether it is the dense one."""
    same = text['tokens'] == dense['tokens']
    return dict(right=text['right'], tokens_a_cycle=text['tokens_a_cycle'], same=float(same))


def first_difference(dense, hard):
    """[line, line] where two written texts part; None unless the dense one alone is right."""
    if dense['right'] <= hard['right']:
        return None
    lines = itertools.zip_longest(dense['text'].split('\n'), hard['text'].split('\n'))
    for dense_line, hard_line in lines:
        if dense_line != hard_line:
            return [dense_line, hard_line]


def sweep_rows(n):
    """A row a table, n / 3 of them: under `settings` what each value of each swept knob reads and writes."""
    model, _ = pair_of('target')
    settings = {'dense': {}}
    for values in SWEEPS.values():
        settings |= values
    found = contexts('table', max(2, n // 3))
    for context, calibration in in_turn(model, 'table', shown(found, 'sweeps')):
        prompt = Prompt(context, calibration)
        read = {name: prompt.read(knobs) for name, knobs in settings.items()}
        add_written(prompt, settings, read)
        yield dict(tokens=len(prompt.ids), settings=read)


def anchors_rows(families, is_usual, n):
    """A row a prompt of these tasks: KL in nats at 75 %, by the layers that choose, as many each time.

    second: every second one. random: the mean over three draws, new ones for each prompt. file: as
    calibration.json has them. calibrated: of each seed, on training rows of the task, the list `layers`.
    is_usual: L0, blocks and locals as by default.
    """
    model, _ = pair_of('target')
    lots = random.Random(SEED)
    known = read_calibration(MODELS / 'target', sections=['sparse'])['sparse']
    L = model.config.num_hidden_layers
    count = -(-L // 2)
    knobs = dict(rho=0.25, anchors=count) | (USUAL if is_usual else {})
    for task in families:
        layers = [calibrated(model, task, seed, is_usual)['anchors'][:count] for seed in range(SEEDS)]
        for context in shown(contexts(task, n), f'{task} anchors'):
            prompt = Prompt(context, known)
            drawn = [[0, *lots.sample(range(1, L), count - 1)] for _ in range(3)]
            yield dict(
                task=task,
                layers=layers,
                file=kl_by_anchors(prompt, knobs, known['anchors'][:count]),
                second=kl_by_anchors(prompt, knobs, list(range(0, L, 2))),
                random=mean(kl_by_anchors(prompt, knobs, some) for some in drawn),
                calibrated=[kl_by_anchors(prompt, knobs, some) for some in layers])


def kl_by_anchors(prompt, knobs, layers):
    """The KL in nats of a prompt's reading in which these layers choose."""
    prompt.session.calibration = dict(sparse=dict(anchors=layers))
    return prompt.read(knobs)['kl']


def length_rows(n):
    """A row a long prompt of several tables, n / 5 of each length, n / 10 of the longest: see LENGTHS."""
    model, _ = pair_of('target')
    for tokens, share in ((2000, 5), (4000, 5), (8000, 10)):
        pair = [stretched(network, tokens + 200) for network in pair_of('target')]
        found = long_contexts(max(2, n // share), tokens)
        for i, (context, calibration) in enumerate(in_turn(model, 'table', shown(found, f'{tokens} tokens'))):
            prompt = Prompt(context, calibration, pair)
            read = {name: prompt.read(knobs) for name, knobs in LENGTHS.items()}
            add_written(prompt, LENGTHS, read)
            yield dict(length=tokens, tokens=len(prompt.ids), is_first=i % 2 == 0, settings=read)


def elsewhere_rows(n):
    """A row a table: what it is with anchors and thresholds of stories, and with those of tables."""
    model, _ = pair_of('target')
    knobs = dict(rho=0.25, ffn_quantile=0.6)
    for i, context in enumerate(shown(contexts('table', n), 'elsewhere')):
        row = {}
        for task in ('story', 'table'):
            prompt = Prompt(context, calibrated(model, task, i % SEEDS))
            right = prompt.write(knobs)['right']
            alike = prompt.read(knobs)['alike']
            row[task] = dict(right=right, alike=alike)
        yield row


def drift_rows(n):
    """A row a story: KL in nats on a cache that sparse passes wrote (own), and on a dense one (fresh)."""
    model, _ = pair_of('target')
    for context, found in in_turn(model, 'story', shown(contexts('story', n), 'drift')):
        prompt = Prompt(context, found)
        own = prompt.read(GRID[BOTH])['kl']
        fresh = prompt.read(GRID[BOTH], fresh=True)['kl']
        yield dict(own=own, fresh=fresh)


def mixture_rows(n):
    """A row a prompt of math: what settings of a mixture read, and what the whole one and a hybrid write.

    A table of shares gets one entry below all (0: never skips) and one above (2: always), 23 in all.
    """
    pair = pair_of('moe')
    for context, measured in in_turn(pair[0], 'math', shown(contexts('math', n), 'mixture')):
        experts = []
        for layer in measured['experts']:
            experts.append([[0.0, *shares, 2.0] for shares in layer])
        prompt = Prompt(context, measured | dict(experts=experts), pair, plain=WHOLE_MIXTURE)
        read = {name: prompt.read(knobs) for name, knobs in MIXTURE.items()}
        whole = prompt.write(WHOLE_MIXTURE)
        hybrid = prompt.write(MIXTURE['attn 75 %, experts, 1'])
        yield dict(nll=prompt.nll(prompt.dense_laws), settings=read,
                   written=dict(whole=written(whole, whole), hybrid=written(hybrid, whole)))


def halving_rows(n):
    """One row: the fewest cached tokens at which sparse attention halves FLOPs, and bytes, of a pass.

    Of the embedded target over 5 positions, with the method's default knobs. Nothing is run.
    """
    model, _ = pair_of('target')
    yield dict(flops=halving_length(model, 'flops'), bytes=halving_length(model, 'bytes'))


def halving_length(model, what):
    """Tokens, a multiple of 64; what: a field of passes.Cost, bytes or flops."""
    usual = Sparse()
    for cached in itertools.count(64, 64):
        keys = int(kernels.kept_blocks(cached, usual)) * usual.block
        dense = cost(model, counted_rows(model, cached, 0), TOKENS)
        sparse = cost(model, counted_rows(model, keys, cached // usual.block), TOKENS)
        if getattr(dense, what) >= 2 * getattr(sparse, what):
            return cached


def counted_rows(model, keys, means):
    """The ledger of a pass with so many keys in every layer; means: blocks that every second one scores."""
    width = model.config.intermediate_size
    rows = []
    for layer in range(model.config.num_hidden_layers):
        attention = dict(keys=keys, seen=keys, run=keys, means=means * (layer % 2), asked=1)
        rows.append(attention | dict(channels=width, union=width, width=width, gate=width, spared=2))
    return rows


def distilled_rows(n, seconds=60):
    """A row a prompt of math and tables: tokens a cycle at HARD, by the given draft and two that learned.

    The notes' first open question: is a draft that learned from the sparse target's laws accepted more? Two
    copies of the draft learn for so many seconds each from 2 n texts, one from dense laws, one from sparse.
    """
    drafts = taught_drafts(n, seconds)
    model, _ = pair_of('target')
    for task in ('math', 'table'):
        for context, found in in_turn(model, task, shown(contexts(task, n), f'{task} with drafts')):
            row = dict(task=task)
            for name, draft in drafts.items():
                row[name] = Prompt(context, found, (model, draft)).write(GRID[HARD])['tokens_a_cycle']
            yield row


def taught_drafts(n, seconds):
    """{name: network}: the embedded draft, and copies that had so many seconds of dense or sparse lessons."""
    lessons = dict(dense=[], sparse=[])
    model, given = pair_of('target')
    for task in ('math', 'table'):
        for context, found in in_turn(model, task, shown(contexts(task, n, 'train'), f'{task} lessons')):
            prompt = Prompt(context, found)
            sparse_laws, _ = prompt.passes(GRID[HARD])
            lessons['dense'].append(Lesson(prompt.ids, prompt.solution, prompt.dense_laws))
            lessons['sparse'].append(Lesson(prompt.ids, prompt.solution, sparse_laws))
    drafts = dict(given=given)
    for name, of_target in lessons.items():
        drafts[name] = distil(given, of_target, seconds)
    return drafts


PAIR = ('target', 'draft')

RECORDS = dict(     # name: (embedded models, function from n to rows)
    math=(PAIR, functools.partial(setting_rows, 'math', GRID)),
    table=(PAIR, functools.partial(setting_rows, 'table', GRID | SELECTIONS)),
    story=(PAIR, functools.partial(setting_rows, 'story', GRID | REFRESH)),
    anchors=(PAIR, functools.partial(anchors_rows, ('table', 'math'), False)),
    usual=(PAIR, functools.partial(anchors_rows, ('table',), True)),
    sweeps=(PAIR, sweep_rows),
    lengths=(PAIR, length_rows),
    elsewhere=(PAIR, elsewhere_rows),
    drift=(PAIR, drift_rows),
    mixture=(('moe', 'draft'), mixture_rows),
    halving=(('target',), halving_rows),
    distilled=(PAIR, distilled_rows),
)
