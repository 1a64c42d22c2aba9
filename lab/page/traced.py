"""What the page shows and the loop does not need: a Session that notes it of each cycle.

Noting changes no text: it draws nothing, and the readers' caches stay as they are. The seconds of a cycle
include looking up its random numbers and logging sparse layers; the notes are made afterwards. What a note
holds: README.md.
"""
import copy
import time
from collections import Counter
from dataclasses import replace

import torch

import kernels
from model import Reader, on_gpu
from specmini import Engine
from verify import CmAsd, Ecsv, Score, Session, SpecGuard, is_greedy, log_marks, readers_of

LIKELIEST = 8       # tokens of a position whose probabilities are noted
DECIMALS = 5        # of a noted number
SHARES = 24         # positions of the text, at most, that a token is said to lean on
LOWEST = 0.004      # the lowest share that is noted
MOST_ROLLOUT = 1024     # tokens of a text up to which whole rows of the rollout are computed


def rounded(x):
    """A number, or nested lists of numbers, to DECIMALS."""
    return list(map(rounded, x)) if isinstance(x, list) else round(x, DECIMALS)


class TimedReader(Reader):
    """A Reader that times its passes: `seconds` by their number in the log. It waits for a GPU."""
    seconds = {}            # see timed

    def feed(self, *args):
        begin = time.perf_counter()
        rows = super().feed(*args)
        if on_gpu(self.model):
            torch.cuda.synchronize()
        self.seconds[len(self.log) - 1] = time.perf_counter() - begin
        return rows


def timed(reader, kind=TimedReader):
    """The same reader, with the same cache and log, as one of this class."""
    reader = copy.copy(reader)
    reader.__class__ = kind
    reader.seconds = {}
    return reader


class WatchedReader(TimedReader):
    """The target's Reader, which remembers its latest slim and sparse passes."""
    slim = [], []           # (ids, logits) of the latest pass of a slim verifier
    chosen = []             # of the latest sparse pass, see `watched`
    block = 0               # its keys to a block

    def read(self, ids, path, last):
        if path.sparse and not self.compiled:
            self.chosen = []
            self.block = path.block
            path = watched(path, self.chosen)
        rows = super().read(ids, path, last)
        if path.skip:
            self.slim = ids, rows
        return rows


def watched(path, log):
    """The same path, which appends (sublayer, carry) to the log after every sublayer: what a pass chose.

    Sublayer 2i is the attention of layer i, 2i + 1 its feed-forward.
    """
    def logged(sublayer, number):
        def run(*args):
            out, added = sublayer(*args)
            log.append((number, args[-1] | added))
            return out, added
        return sublayer and run                         # None where it is skipped
    attends = tuple(logged(attend, 2 * i) for i, attend in enumerate(path.attends))
    ffns = tuple(logged(ffn, 2 * i + 1) for i, ffn in enumerate(path.ffns))
    return replace(path, attends=attends, ffns=ffns)


class TracedEngine(Engine):
    """An Engine whose sessions are Traced."""

    def start(self, ids, method, row=0):
        session = super().start(ids, method, row)
        session.__class__ = Traced
        session.watch(method)
        return session


class Traced(Session):
    """A Session that collects `notes`, a dict for each cycle of the method that it watches."""

    def flip(self, chance):
        """As decided; the number drawn is looked up in a twin of the generator; kept: it is <= chance."""
        coin = None
        if 0 < chance < 1:
            twin = self.generator.clone_state()
            coin = 1 - float(torch.rand(1, generator=twin, dtype=torch.float64))
        self.coins.append(coin)
        return super().flip(chance)

    def watch(self, method):
        """Replaces two hooks of this object: accept tells what was judged, learn when the cycle is over."""
        self.target = timed(self.target, WatchedReader)
        self.drafter = self.drafter and timed(self.drafter)
        self.notes = []
        self.marks = log_marks(self)
        self.coins = []         # of each verdict by chance the number drawn in 0..1; None of a certain one
        accept, learn = method.accept, method.learn

        def accept_watched(session, draft, score):
            self.judged = draft, score
            return accept(session, draft, score)

        def learn_watched(cycle):
            self.notes.append(self.note(method, *self.judged, cycle))
            learn(cycle)
        method.accept, method.learn = accept_watched, learn_watched

    def note(self, method, draft, score, cycle):
        """The dict of one cycle."""
        ms = Counter()                                  # {reader/path: of its passes in this cycle}
        for role, reader in readers_of(self).items():
            for number in range(self.marks[role], len(reader.log)):
                path, _ = reader.log[number]
                ms[f'{role}/{path.name}'] += 1000 * reader.seconds.get(number, 0.0)
        self.marks = log_marks(self)
        notes = dict(pass_ms=ms)
        path = self.target_path()
        if isinstance(score, Score):
            path = score.path
            notes['places'] = places(self, draft, score, cycle)
            if len(self.coins) == len(cycle.judged):
                for place, coin in zip(notes['places'], self.coins):
                    place['coin'] = coin
        notes['lag'] = len(self.tokens) - 1 - self.target.cache.valid_prefix(self.tokens[:-1], path)
        if cycle.signals:
            notes |= draft_notes(self, method, cycle)
        notes |= block_notes(self.target.chosen, self.target.block)
        self.target.slim, self.target.chosen, self.coins = ([], []), [], []
        return notes


# ------------------------------------------------------------------- the distributions at judged positions

def places(session, draft, score, cycle):
    """What the models gave at each position of the block, a dict each: see place_of.

    A position for each judged token, and one more where the cycle's last token stands after them all. They
    end where what was judged is not the block that the Score has read, as with rules that try branches.
    """
    laws = laws_of(session, draft, score)
    n = len(draft.tokens)
    if not laws or any(len(rows) != (n if name.endswith('q') else n + 1) for name, rows in laws.items()):
        return []
    count = max(min(len(cycle.tokens), n + 1), min(len(cycle.judged), n))
    found = []
    for i, row in zip(range(count), cycle.judged + [None] * count):
        here = {name: rows[i].cpu() for name, rows in laws.items() if i < len(rows)}        # {name: [V]}
        written = cycle.tokens[min(i, len(cycle.tokens) - 1)]
        guessed = draft.tokens[i] if i < n else written
        if row and not same_row(row, guessed, here):
            break
        if row and not row.kept and row.p is not None:
            here['residual'] = score.recovery_distribution(here['p'], here['q'])
        place = place_of(here, [guessed, written])
        if row:
            judge = here.get('p', here.get('s'))
            place['overlap'] = rounded(float(torch.minimum(judge, here['q']).sum()))
        found.append(place)
    return found


def laws_of(session, draft, score):
    """{name: [n + 1, V]}: p, s, and q [n, V] as sampled; greedily raw_p, raw_s, raw_q at temperature 1."""
    n = len(draft.tokens)
    logits = {}
    if 'logits' in vars(score):                         # its pass has run
        logits['p'] = score.logits
    ids, rows = session.target.slim
    if ids[len(ids) - n:] == draft.tokens and len(rows) == n + 1:
        logits['s'] = rows
    laws = {name: session.probs(rows) for name, rows in logits.items()}
    if laws and n:
        laws['q'] = draft.q
        if draft.logits is not None:
            logits['q'] = draft.logits
    if is_greedy(session.temperature):
        laws |= {f'raw_{name}': rows.float().softmax(-1) for name, rows in logits.items()}
    return laws


def same_row(row, token, laws):
    """Whether a Judged is on this token of the block, by the p that the Score has at this position."""
    if row.tokens != [token]:
        return False
    return row.p is None or 'p' not in laws or abs(float(laws['p'][token]) - row.p) < 1e-6


def place_of(laws, used):
    """One position: ids of the LIKELIEST tokens and the used ones, and their probabilities in each law.

    p target, q draft, s slim; residual: what a rejected token is replaced from.
    """
    raw = [row for name, row in laws.items() if name.startswith('raw_')]
    largest = torch.stack(raw or [laws[name] for name in 'pqs' if name in laws]).amax(0)
    ids = list(dict.fromkeys(largest.topk(min(LIKELIEST, len(largest))).indices.tolist() + used))
    return dict(ids=ids) | {name: rounded(row[ids].tolist()) for name, row in laws.items()}


# ------------------------------------------------------------------------------- what single methods note

def draft_notes(session, method, cycle):
    """Of CM-ASD confidences and windows, of ECSV the latest vote, of SpecGuard candidates and attention."""
    if isinstance(method, CmAsd):
        windows = [method.window(cycle.signals[:i]) for i in range(1, len(cycle.signals) + 1)]
        return dict(confidence=rounded([noted['confidence'] for noted in cycle.signals]), window=windows)
    if isinstance(method, Ecsv):
        return dict(branches=method.ballot.tokens.tolist(), weights=rounded(method.weights.tolist()))
    if isinstance(method, SpecGuard):
        candidates = cycle.signals[0]['candidates']
        notes = dict(candidates=candidates) if len(candidates) > 1 else {}
        return notes | grounding_notes(session, method, cycle)
    return {}


def grounding_notes(session, method, cycle):
    """For each token of the judged step the positions that it leans on most, [position, share] each."""
    begin = len(session.tokens) - len(cycle.tokens)
    line = session.tokens[:begin] + cycle.drafted
    if len(line) > MOST_ROLLOUT:
        return {}
    rows = rollout_rows(session.drafter.model, line, method)[begin:, :begin]
    shares, positions = rows.topk(min(SHARES, begin))
    return dict(grounded=[[[position, rounded(share)] for position, share in zip(*row) if share >= LOWEST]
                          for row in zip(positions.tolist(), shares.tolist())])


def rollout_rows(model, line, method):
    """[N, N] attention rollout over a text (ids): how far each token leans on each, its rows true in full.

    kernels.rollout_layer, by which steps are judged, gets the sums right and not their spread: here the
    layers' whole matrices are multiplied.
    """
    N = len(line)
    product = torch.eye(N, dtype=torch.float64, device=model.device)

    def watch(q, k, v, mask, carry):
        nonlocal product
        matrix = kernels.attention_rows(q, k, kernels.full_mask(mask, q, k), method.sparsify)[0]
        product = matrix.double() @ product
        return kernels.attend(q, k, v, mask, carry)
    observed = model.full.grounded(method.n_roll, 0, method.sparsify).attends
    attends = [watch if attend is kernels.grounded else attend for attend in observed]
    Reader(model, N).read(line, replace(model.full, attends=tuple(attends)), 0)
    return product


def block_notes(log, block):
    """Sparse attention: `cached` keys, `block` keys to a block, and for each layer what it reads of them.

    For a layer that chose: the blocks of each key head; for one that reuses a choice: the layer that made it;
    None where all keys are read. log: of one pass, as `watched` makes it.
    """
    carries = {sublayer // 2: carry for sublayer, carry in log if sublayer % 2 == 0}
    layers = []
    anchor = latest = None      # the layer whose choice is handed on, and its carry
    for layer in range(max(carries, default=-1) + 1):
        carry = carries.get(layer, {})                  # a skipped layer has none
        if 'blocks' not in carry:
            layers.append(None)
        elif latest and carry['blocks'] is latest['blocks']:
            layers.append(anchor)
        else:
            anchor, latest = layer, carry
            layers.append(carry['blocks'][0].sort().values.tolist())
    if not latest:
        return {}
    return dict(blocks=dict(cached=int(latest['start']), block=block, layers=layers))
