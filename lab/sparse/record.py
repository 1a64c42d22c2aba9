"""What is measured for sparse verification: `python -m lab.claims sparse`. How it is judged is in claims.py.

Every prompt is read densely once; then each setting reads its solution, five tokens a pass, and writes one.
"""
import functools
import itertools
import sys

import torch
from tqdm import tqdm

from lab import tasks
from lab.common import embedded, mean
from lab.sparse.distil import Lesson, distil
from lab.sparse.passes import cost
from lab.sparse.rivals import SparseForms, ledger
from lab.sparse.settings import (BOTH, GRID, HARD, LONG, MIXTURE, OFF, REFRESH, SELECTIONS, SIZES,
                                 WHOLE_MIXTURE)
from model import Reader
from train_mask import sparsity, watched
from verify import Exact, Session, Sparse, chain, decode

TOKENS = 5          # of a reading pass


def contexts(task, n, split='held-out'):
    """n (row, prompt ids, solution ids) as the models know them; tables of LONG tokens or more.

    Other tasks' prompts are short. Filled up with solved rows they are unlike what the models learned: dense,
    the target then guesses worse than sparse, where it sees less of the filling.
    """
    _, tokenizer, _ = embedded('target')
    source = tasks.rows(task, 11, split)
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
def calibrated(model, task):
    """The sparse section of a calibration on four training rows of the task."""
    texts = []
    for _, prompt, solution in contexts(task, 4, split='train'):
        texts.append(prompt + solution)
    return sparsity(model, texts, dense_below=16, block=4)


# ------------------------------------------------------------------------------------------------- one prompt

class Prompt:
    """A prompt that was read densely, once: what settings of Sparse make of its solution, and write on."""

    def __init__(self, context, found, model='target', draft=None, plain=None):
        """context: see contexts; found: see calibrated; draft: a network instead of the embedded one.

        plain: the knobs with which nothing is left out.
        """
        target, self.tokenizer, eos = embedded(model)
        draft = draft or embedded('draft')[0]
        self.row, self.ids, self.solution = context
        self.room = len(self.solution) + 12
        readers = [Reader(network, len(self.ids) + self.room) for network in (target, draft)]
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
        return dict(found, seconds=seconds, rows=rows, overlaps=overlaps(log))

    def read(self, knobs, fresh=False):
        """What a sparse reading of the solution is beside a dense one, means over its tokens.

        kl in nats, dense to sparse; alike: the same first choice; nll in nats a token; bytes, flops (that are
        needed), run (FLOPs that the code executes) and seconds over the dense passes'; channels (of a token) and union (of a pass) as shares of a layer's;
        overlap (see overlaps) only where rows chose for themselves.
        """
        laws, taken = self.passes(knobs, fresh)
        dense = self.dense_laws
        found = dict(
            kl=float((dense.exp() * (dense - laws)).sum(-1).mean()),
            alike=float((dense.argmax(-1) == laws.argmax(-1)).float().mean()),
            nll=self.nll(laws),
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

def setting_rows(task, settings, calibration, n):
    """A row a prompt: its tokens, the dense nll, and under `settings` what each reads and writes.

    calibration: the task whose training rows the thresholds are of. Stories, which nobody can grade, are only
    read. stress: the first line in which the dense text and the hardest setting's differ, where only the
    former is right.
    """
    found = calibrated(embedded('target')[0], calibration)
    for context in shown(contexts(task, n), task):
        prompt = Prompt(context, found)
        read = {name: prompt.read(knobs) for name, knobs in settings.items()}
        row = dict(tokens=len(prompt.ids), nll=prompt.nll(prompt.dense_laws), settings=read)
        if task != 'story':
            texts = {}
            for name, knobs in settings.items():
                texts[name] = prompt.write(knobs)
                read[name] |= written(texts[name], texts['dense'])
            row['verifying'] = texts['dense']['verifying']
            row['stress'] = first_difference(texts['dense'], texts[HARD])
        yield row


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


def elsewhere_rows(n):
    """A row a table: what it is with anchors and thresholds of stories, and with those of tables."""
    model, _, _ = embedded('target')
    found = dict(story=calibrated(model, 'story'), table=calibrated(model, 'table'))
    count = -(-len(found['table']['anchors']) // 2)             # half of the layers choose
    knobs = dict(rho=0.25, anchors=count, ffn_quantile=0.6)
    for context in shown(contexts('table', n), 'elsewhere'):
        row = {}
        for task, calibration in found.items():
            prompt = Prompt(context, calibration)
            right = prompt.write(knobs)['right']
            alike = prompt.read(knobs)['alike']
            row[task] = dict(right=right, alike=alike, anchors=calibration['anchors'][:count])
        yield row


def drift_rows(n):
    """A row a story: KL in nats on a cache that sparse passes wrote (own), and on a dense one (fresh)."""
    found = calibrated(embedded('target')[0], 'table')
    for context in shown(contexts('story', n), 'drift'):
        prompt = Prompt(context, found)
        own = prompt.read(GRID[BOTH])['kl']
        fresh = prompt.read(GRID[BOTH], fresh=True)['kl']
        yield dict(own=own, fresh=fresh)


def mixture_rows(n):
    """A row a prompt of math: what settings of a mixture read, and what the whole one and a hybrid write.

    A table of shares gets one entry below all (0: never skips) and one above (2: always), 23 in all.
    """
    measured = calibrated(embedded('moe')[0], 'math')
    experts = []
    for layer in measured['experts']:
        experts.append([[0.0, *shares, 2.0] for shares in layer])
    found = measured | dict(experts=experts)
    for context in shown(contexts('math', n), 'mixture'):
        prompt = Prompt(context, found, 'moe', plain=WHOLE_MIXTURE)
        read = {name: prompt.read(knobs) for name, knobs in MIXTURE.items()}
        whole = prompt.write(WHOLE_MIXTURE)
        hybrid = prompt.write(MIXTURE['attn 75 %, experts, 1'])
        yield dict(nll=prompt.nll(prompt.dense_laws), settings=read,
                   written=dict(whole=written(whole, whole), hybrid=written(hybrid, whole)))


def halving_rows(n):
    """One row: the fewest cached tokens at which 75 % fewer keys halve FLOPs, and bytes, of a pass.

    Of the embedded target over 5 positions; blocks of 16, which every second layer scores. Nothing is run.
    """
    model, _, _ = embedded('target')
    yield dict(flops=halving_length(model, 'flops'), bytes=halving_length(model, 'bytes'))


def halving_length(model, what):
    """Tokens, a multiple of 64; what: a field of passes.Cost, bytes or flops."""
    for cached in itertools.count(64, 64):
        dense = cost(model, counted_rows(model, cached, 0), TOKENS)
        sparse = cost(model, counted_rows(model, cached / 4, cached / 16), TOKENS)
        if getattr(dense, what) >= 2 * getattr(sparse, what):
            return cached


def counted_rows(model, keys, means):
    """The ledger of a pass with so many keys in every layer; means: blocks that every second one scores."""
    width = model.config.intermediate_size
    rows = []
    for layer in range(model.config.num_hidden_layers):
        attention = dict(keys=keys, seen=keys, means=means * (layer % 2), asked=1)
        rows.append(attention | dict(channels=width, union=width, gate=width, spared=2))
    return rows


def distilled_rows(n, seconds=60):
    """A row a prompt of math and tables: tokens a cycle at HARD, by the given draft and two that learned.

    The notes' first open question: is a draft that learned from the sparse target's laws accepted more? Two
    copies of the draft learn for so many seconds each from 2 n texts, one from dense laws, one from sparse.
    """
    drafts = taught_drafts(n, seconds)
    for task in ('math', 'table'):
        for context in shown(contexts(task, n), f'{task} with drafts'):
            row = dict(task=task)
            for name, draft in drafts.items():
                row[name] = Prompt(context, {}, draft=draft).write(GRID[HARD])['tokens_a_cycle']
            yield row


def taught_drafts(n, seconds):
    """{name: network}: the embedded draft, and copies that had so many seconds of dense or sparse lessons."""
    lessons = dict(dense=[], sparse=[])
    for task in ('math', 'table'):
        for context in shown(contexts(task, n, 'train'), f'{task} lessons'):
            prompt = Prompt(context, {})
            sparse_laws, _ = prompt.passes(GRID[HARD])
            lessons['dense'].append(Lesson(prompt.ids, prompt.solution, prompt.dense_laws))
            lessons['sparse'].append(Lesson(prompt.ids, prompt.solution, sparse_laws))
    given, _, _ = embedded('draft')
    drafts = dict(given=given)
    for name, of_target in lessons.items():
        drafts[name] = distil(given, of_target, seconds)
    return drafts


PAIR = ('target', 'draft')

RECORDS = dict(     # name: (embedded models, function from n to rows)
    math=(PAIR, functools.partial(setting_rows, 'math', GRID, 'table')),
    table=(PAIR, functools.partial(setting_rows, 'table', GRID | SELECTIONS | SIZES, 'table')),
    story=(PAIR, functools.partial(setting_rows, 'story', GRID | REFRESH, 'table')),
    elsewhere=(PAIR, elsewhere_rows),
    drift=(PAIR, drift_rows),
    mixture=(('moe', 'draft'), mixture_rows),
    halving=(('target',), halving_rows),
    distilled=(PAIR, distilled_rows),
)
