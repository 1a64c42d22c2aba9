"""What is measured for sparse verification: `python -m lab.claims sparse`. How it is judged is in claims.py.

Every prompt is read densely once; then each setting reads its solution, five tokens a pass, and writes one.
Any pair is measured on long contexts, and what is read there is the target's own dense text.
"""
import functools
import itertools
import random
import statistics
import sys
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm

import kernels
from lab import tasks
from lab.common import MODELS, SEED, embedded, mean
from lab.distil import Lesson
from lab.pairs import EMBEDDED, LabRecord, Record
from lab.replay import clock
from lab.sparse.distil import distil
from lab.sparse.lengths import NEXT, calibration_ids, can_fill, joined, long_contexts, stretched
from lab.sparse.passes import cost
from lab.sparse.rivals import Kept, KeptDraft, SparseForms, ledger
from lab.sparse.settings import (BOTH, GRID, HARD, KEPT, KEPT_ELSEWHERE, KEPT_SHARES, LENGTHS, LONG, MIXTURE,
                                 OFF, REFRESH, SEEDS, SELECTIONS, SWEEPS, USUAL, WHOLE_MIXTURE, WRITTEN,
                                 keeping)
from model import Reader, measured_sections, read_calibration, send
from train_mask import sparsity, watched
from verify import Exact, Session, Sparse, chain, decode, lookup, tokens_of

TOKENS = 5          # of a reading pass
LENGTHS_ELSEWHERE = 2048, 4096, 8192        # tokens of the long contexts of another pair
OWN = 64            # tokens of the target's own text that are read, where a context has no solution
KEPT_OWN = 40       # likewise, where kept keys are measured: each of its settings writes them anew


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


@functools.cache
def stretched_pair(tokens):
    """(target, draft), embedded, for contexts of so many tokens and what is written behind them."""
    return tuple(stretched(network, tokens + 200) for network in pair_of('target'))


# ------------------------------------------------------------------------------------------------- one prompt

class ReadPrompt:
    """A prompt that was read densely, once: what settings of Sparse make of its solution, and write on."""

    def __init__(self, pair, session, row, solution=None, plain=None):
        """pair: a Pair; session: a Session that has read the prompt of this row; solution: its ids.

        Without one the solution is what the target itself begins to write, OWN tokens at most; `dense` is
        all of that text, see write. plain: the knobs with which nothing is left out.
        """
        self.pair = pair
        self.session = session
        self.row = row
        self.ids = session.tokens
        self.room = session.room
        self.dense = None
        if solution is None:
            self.dense = self.write({})
            solution = self.dense['tokens'][:OWN]
        self.solution = solution
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
            session.sparse = method_of(knobs)
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
        return torch.cat(laws)[:len(self.solution)].float().log_softmax(-1), taken

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
        needed), run (FLOPs that the code executes) and seconds (the median pass's) over the dense passes';
        shares of the cached keys that are read, of a layer's channels that a token (channels) and a pass
        (union) reads; overlap (see overlaps) only where rows chose for themselves.
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
        for key in ('bytes', 'flops', 'run'):
            found[key] = total(taken, key) / total(self.dense_passes, key)
        found['seconds'] = median_seconds(taken) / median_seconds(self.dense_passes)
        shares = []
        for each in taken:
            shares += each['overlaps']
        if shares:
            found['overlap'] = mean(shares)
        return found

    def nll(self, laws):
        """Nats a token of the solution under these log-probabilities [n, V]."""
        places = send(self.solution, laws.device)
        return -float(laws.gather(1, places[:, None]).mean())

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

        It ends where a next question begins. right: None where nothing can be graded; verifying: the target's
        share of the seconds.
        """
        session = self.start(knobs)
        cycles = []
        for cycle in decode(session, Exact()):
            cycles.append(cycle)
            tokens = session.tokens[len(self.ids):]
            text, asks_on, _ = self.pair.text(tokens).partition(NEXT)
            if asks_on:
                break
        every = verifying = 0.0
        for cycle in cycles:
            for path, (_, _, seconds) in cycle.passes.items():
                every += seconds
                if path.startswith('target'):
                    verifying += seconds
        tokens_a_cycle = mean(len(cycle.tokens) for cycle in cycles)
        right = self.pair.grade(self.row, text)
        return dict(right=right, tokens=tokens, text=text, tokens_a_cycle=tokens_a_cycle,
                    verifying=verifying / every)


def method_of(knobs):
    """A Sparse with these knobs, of the kind that has them."""
    kind = Sparse
    if 'form' in knobs:
        kind = SparseForms
    if 'every' in knobs:
        kind = Kept
    return kind(**OFF | knobs)


def total(taken, key):
    return sum(each[key] for each in taken)


def median_seconds(taken):
    """Of a pass: the first one also averages blocks, or waits for a card that has just been given work."""
    return statistics.median(each['seconds'] for each in taken)


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


def lab_prompt(context, found, networks=None, plain=None):
    """The ReadPrompt of a context (see contexts) of the embedded pair, or of these (target, draft) instead.

    found: see calibrated; plain: see ReadPrompt.
    """
    row, ids, solution = context
    _, _, eos = embedded('target')
    room = len(solution) + 12
    readers = [Reader(network, len(ids) + room) for network in networks or pair_of('target')]
    session = Session(*readers, chain, list(ids), room, eos, calibration=dict(sparse=found))
    session.read_prompt()
    return ReadPrompt(EMBEDDED, session, row, solution, plain)


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
        prompt = lab_prompt(context, found)
        read = {name: prompt.read(knobs) for name, knobs in settings.items()}
        row = dict(tokens=len(prompt.ids), nll=prompt.nll(prompt.dense_laws), settings=read)
        if task != 'story':
            texts = add_written(prompt, settings, read)
            row['verifying'] = texts['dense']['verifying']
            row['stress'] = first_difference(texts['dense'], texts[HARD])
        yield row


def add_written(prompt, settings, read):
    """{setting: what it writes, see ReadPrompt.write}; what is stored of it goes to read {setting: dict}."""
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
        prompt = lab_prompt(context, calibration)
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
            prompt = lab_prompt(context, known)
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


class LongContext(NamedTuple):
    """A long prompt to be measured."""
    family: str
    length: int         # tokens
    place: int          # among those of this family and length


def length_items(pair, n):
    """The LongContexts of a pair: n of each family and length that can be filled; the shortest are first.

    Of the embedded pair: several tables, n / 5 of each length, n / 10 of the longest.
    """
    found = []
    if pair.is_embedded:
        for tokens, share in ((2000, 5), (4000, 5), (8000, 10)):
            found += [LongContext('table', tokens, i) for i in range(max(2, n // share))]
        return found
    for length in LENGTHS_ELSEWHERE:
        for family in pair.families(()):
            if can_fill(pair, family, length):
                found += [LongContext(family, length, i) for i in range(n)]
    return found


def length_row(pair, item):
    """What settings read of a LongContext, and write: see LENGTHS."""
    row_of = stretched_row if pair.is_embedded else joined_row
    return row_of(pair, item)


def stretched_row(pair, item):
    """The row of several tables, one of which is asked about, on networks that are stretched."""
    _, length, place = item
    context = long_contexts(place + 1, length)[place]
    calibration = calibrated(pair.network('target')[0], 'table', place % SEEDS)
    prompt = lab_prompt(context, calibration, stretched_pair(length))
    read = {name: prompt.read(knobs) for name, knobs in LENGTHS.items()}
    add_written(prompt, LENGTHS, read)
    return dict(length=length, tokens=len(prompt.ids), is_first=place % 2 == 0, settings=read)


def joined_row(pair, item):
    """The row of a context of joined rows, of which some settings write, where that can be graded.

    anchors: the layers that choose, calibrated on rows that no context has; seconds: of a dense pass.
    """
    family, length, place = item
    row, ids = joined(pair, family, length, place)
    found = calibrated_on(pair, family)
    session = pair.session(ids)
    session.calibration = dict(sparse=found)
    if not row:                                         # nothing to grade: no more than is read
        session.room = min(OWN, pair.max_new)
    prompt = ReadPrompt(pair, session, row)
    read = {name: prompt.read(knobs) for name, knobs in LENGTHS.items()}
    if prompt.dense['right'] is not None:
        for name in WRITTEN:
            read[name] |= graded(prompt.write(LENGTHS[name]))
        read['dense'] |= graded(prompt.dense)
    method = Sparse()
    anchors = method.anchor_layers(found, len(found['channels']))
    return dict(family=family, place=place, length=length, tokens=len(ids), read=len(prompt.solution),
                anchors=anchors, seconds=median_seconds(prompt.dense_passes), settings=read)


def graded(text):
    """What is stored of a text that a setting wrote."""
    return dict(right=text['right'], tokens_a_cycle=text['tokens_a_cycle'])


@functools.cache
def calibrated_on(pair, family):
    """The sparse section of a calibration, as the method's defaults choose, on joined rows of a family."""
    model, _, _ = pair.network('target')
    return sparsity(model, [calibration_ids(pair, family)], **USUAL)


def elsewhere_rows(n):
    """A row a table: what it is with anchors and thresholds of stories, and with those of tables."""
    model, _ = pair_of('target')
    knobs = dict(rho=0.25, ffn_quantile=0.6)
    for i, context in enumerate(shown(contexts('table', n), 'elsewhere')):
        row = {}
        for task in ('story', 'table'):
            prompt = lab_prompt(context, calibrated(model, task, i % SEEDS))
            right = prompt.write(knobs)['right']
            alike = prompt.read(knobs)['alike']
            row[task] = dict(right=right, alike=alike)
        yield row


def drift_rows(n):
    """A row a story: KL in nats on a cache that sparse passes wrote (own), and on a dense one (fresh)."""
    model, _ = pair_of('target')
    for context, found in in_turn(model, 'story', shown(contexts('story', n), 'drift')):
        prompt = lab_prompt(context, found)
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
        prompt = lab_prompt(context, measured | dict(experts=experts), pair, plain=WHOLE_MIXTURE)
        read = {name: prompt.read(knobs) for name, knobs in MIXTURE.items()}
        whole = prompt.write(WHOLE_MIXTURE)
        hybrid = prompt.write(MIXTURE['attn 75 %, experts, 1'])
        yield dict(nll=prompt.nll(prompt.dense_laws), settings=read,
                   written=dict(whole=written(whole, whole), hybrid=written(hybrid, whole)))


def halving_row(pair, model):
    """The fewest cached tokens at which sparse attention halves FLOPs, and bytes, of a pass: nothing is run.

    Over 5 positions, with the method's default knobs; model: a Transformer.
    """
    return dict(flops=halving_length(model, 'flops'), bytes=halving_length(model, 'bytes'))


def the_target(pair, n):
    """The one item: the network of the target."""
    model, _, _ = pair.network('target')
    return [model]


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
                row[name] = lab_prompt(context, found, (model, draft)).write(GRID[HARD])['tokens_a_cycle']
            yield row


def taught_drafts(n, seconds):
    """{name: network}: the embedded draft, and copies that had so many seconds of dense or sparse lessons."""
    lessons = dict(dense=[], sparse=[])
    model, given = pair_of('target')
    for task in ('math', 'table'):
        for context, found in in_turn(model, task, shown(contexts(task, n, 'train'), f'{task} lessons')):
            prompt = lab_prompt(context, found)
            sparse_laws, _ = prompt.passes(GRID[HARD])
            lessons['dense'].append(Lesson(prompt.ids, prompt.solution, prompt.dense_laws))
            lessons['sparse'].append(Lesson(prompt.ids, prompt.solution, sparse_laws))
    drafts = dict(given=given)
    for name, of_target in lessons.items():
        drafts[name] = distil(given, of_target, seconds)
    return drafts


# ------------------------------------------------------------------------------------ a cache of kept keys

def kept_prompt(pair, item):
    """The ReadPrompt of a LongContext, without a draft model; its solution is the target's own text."""
    family, length, place = item
    if pair.is_embedded:
        row, ids, _ = long_contexts(place + 1, length)[place]
        model, _ = stretched_pair(length)
        _, _, eos = embedded('target')
        reader = Reader(model, len(ids) + KEPT_OWN + TOKENS)
        session = Session(reader, None, lookup, list(ids), KEPT_OWN, eos)
        session.read_prompt()
    else:
        row, ids = joined(pair, family, length, place)
        session = replace(pair, draft='').session(ids)
        session.room = min(KEPT_OWN, pair.max_new)
    session.calibration = read_calibration(pair.target, sections={'mask'} & measured_sections(pair.target))
    return ReadPrompt(pair, session, row)


def kept_row(pair, item):
    """What kept keys are good for in a LongContext, as verifier and as drafter.

    read: of each setting, five tokens a pass, KL in nats to dense and the same first choice. written: what it
    took a drafter, by setting and gamma, see drafted; beside them `self`, which skips layers where there is a
    calibrated mask, and `lookup`. seconds: see kept_seconds.
    """
    prompt = kept_prompt(pair, item)
    read = {}
    written = {}
    settings = dict.fromkeys(KEPT, (2, 4)) if pair.is_embedded else KEPT_ELSEWHERE
    for name, gammas in settings.items():
        found = prompt.read(KEPT[name])
        read[name] = dict(kl=found['kl'], alike=found['alike'])
        written[name] = {gamma: drafted(prompt, KeptDraft(gamma, **OFF | KEPT[name])) for gamma in gammas}
    for name, source in dict(self=chain, lookup=lookup).items():
        prompt.session.source = source
        if name == 'lookup' or prompt.session.calibration:
            written[name] = {gamma: drafted(prompt, Exact(gamma)) for gamma in (2, 4)}
    return dict(family=item.family, place=item.place, length=item.length, tokens=len(prompt.ids), read=read,
                written=written, seconds=kept_seconds(prompt, 7 if pair.is_embedded else 3))


def drafted(prompt, method):
    """What it took to write the dense text anew, in counts.

    drafts: the target's passes over one position that drafted; choices: those of them that chose keys;
    target: its dense passes, by positions. judged, kept: draft tokens, by their place in a block. same: 0
    where a tie fell otherwise.
    """
    dense = prompt.dense['tokens']
    session = prompt.start({})
    session.room = len(dense)
    cycles = list(decode(session, method))
    judged = [0] * method.gamma
    kept = [0] * method.gamma
    passes = dict(drafts=0, choices=0, target={})
    for cycle in cycles:
        for place, verdict in enumerate(cycle.judged):
            judged[place] += 1
            kept[place] += verdict['kept']
        count_passes(cycle, passes)
    text = tokens_of(cycles)
    return dict(passes, tokens=len(text), cycles=len(cycles), judged=judged, kept=kept,
                same=int(text == dense))


def count_passes(cycle, counts):
    """Adds the passes of a Cycle to the counts, see drafted. A choice is a block's first pass."""
    for path, (passes, positions, _) in cycle.passes.items():
        if path == 'target/full':
            counts['target'][positions] = counts['target'].get(positions, 0) + passes
        else:
            counts['drafts'] += passes
            counts['choices'] += path == 'target/choosing'


def kept_seconds(prompt, rounds):
    """{pass: seconds} behind the prompt, of the processor's own: all in turn, the least of the rounds.

    A pass is named by what it reads and its positions. kept: keys that were chosen before; choosing: it
    chooses and copies them, too; sparse: every second layer chooses, each layer copies, in every pass.
    """
    methods = dict(dense=None)
    if prompt.session.calibration:
        methods['slim'] = None
    for share in KEPT_SHARES:
        methods[f'kept {share:.0%}'] = method_of(keeping(share, 2 ** 31))
        methods[f'choosing {share:.0%}'] = method_of(keeping(share, 1))
        methods[f'sparse {share:.0%}'] = method_of(dict(rho=share, anchors=0) | USUAL)
    taken = {}
    for _ in range(rounds + 1):
        for name, method in methods.items():
            for n in (1, 3, TOKENS) if name == 'dense' else (1, TOKENS):
                taken.setdefault(f'{name}, {n}', []).append(pass_seconds(prompt, name, method, n))
    return {name: min(times[1:]) for name, times in taken.items()}      # in the first round all choose


def pass_seconds(prompt, name, method, n):
    """Seconds of one pass over n positions behind the prompt."""
    session = prompt.start({})
    session.sparse = method
    if name.startswith('choosing'):
        method.keys = None                              # what an earlier round chose is of the same text
    reader = session.target
    begin = clock(reader)
    path = session.slim_path if name == 'slim' else session.view(reader.model.full)
    reader.read(prompt.ids, prompt.ids[:n - 1], path, n)
    return clock(reader) - begin


PAIR = ('target', 'draft')
TASKS = 'texts of the lab, whose solutions are read'

RECORDS = dict(
    math=LabRecord(PAIR, functools.partial(setting_rows, 'math', GRID), TASKS),
    table=LabRecord(PAIR, functools.partial(setting_rows, 'table', GRID | SELECTIONS), TASKS),
    story=LabRecord(PAIR, functools.partial(setting_rows, 'story', GRID | REFRESH), TASKS),
    anchors=LabRecord(PAIR, functools.partial(anchors_rows, ('table', 'math'), False), TASKS),
    usual=LabRecord(PAIR, functools.partial(anchors_rows, ('table',), True), TASKS),
    sweeps=LabRecord(PAIR, sweep_rows, TASKS),
    lengths=Record(length_items, length_row, drafts=False),
    elsewhere=LabRecord(PAIR, elsewhere_rows, TASKS),
    drift=LabRecord(PAIR, drift_rows, TASKS),
    mixture=LabRecord(('moe', 'draft'), mixture_rows, 'a mixture of experts'),
    kept=Record(length_items, kept_row, drafts=False, calibrated=True),
    halving=Record(the_target, halving_row, drafts=False),
    distilled=LabRecord(PAIR, distilled_rows, 'a draft that learns within minutes'),
)
