"""What the page shows and the loop does not need: a Session that notes it of each cycle.

Noting changes no text: it draws nothing, and writes to no cache. What a note holds: README.md.
"""
from collections import Counter

import torch

from lab.measure import moment
from model import Reader
from specmini import Engine
from verify import CmAsd, Ecsv, Score, Session, SpecGuard, is_greedy, readers_of

LIKELIEST = 8       # tokens of a position whose probabilities are noted


def rounded(x):
    """A number, or nested lists of numbers, to five decimals."""
    return list(map(rounded, x)) if isinstance(x, list) else round(x, 5)


class WatchedReader(Reader):
    """A Reader that times its passes, and remembers the latest one of a slim verifier."""

    def watch(self):
        """Begins a cycle: forgets the one before."""
        self.ms = Counter()     # {path: milliseconds of its passes}
        self.slim = [], []      # (ids, logits) of the latest pass of a slim verifier

    def feed(self, ids, start, path, last):
        begin = moment()
        rows = super().feed(ids, start, path, last)
        self.ms[path.name] += 1000 * (moment() - begin)
        return rows

    def read(self, ids, path, last):
        rows = super().read(ids, path, last)
        if path.skip:
            self.slim = ids, rows
        return rows


class TracedEngine(Engine):
    """An Engine whose sessions are Traced."""

    def open(self, prompts):
        super().open(prompts)
        for reader in self.readers.values():
            reader.__class__ = WatchedReader
            reader.watch()

    def start(self, ids, method, row=0):
        session = super().start(ids, method, row)
        session.__class__ = Traced
        session.watch(method)
        return session


class Traced(Session):
    """A Session that collects `notes`, a dict for each cycle of the method that it watches."""

    def flip(self, chance):
        """As decided; the number drawn is looked up in a twin of the generator; kept: it is <= chance."""
        twin = self.generator.clone_state()
        coin = 1 - float(torch.rand(1, generator=twin, dtype=torch.float64))
        self.coins.append(coin if 0 < chance < 1 else None)
        return super().flip(chance)

    def watch(self, method):
        """Replaces two hooks of this object: accept tells what was judged, learn when the cycle is over."""
        self.notes = []
        self.begin_cycle()
        accept, learn = method.accept, method.learn

        def accept_watched(session, draft, score):
            self.judged = draft, score
            return accept(session, draft, score)

        def learn_watched(cycle):
            self.notes.append(self.note(method, *self.judged, cycle))
            self.begin_cycle()
            learn(cycle)
        method.accept, method.learn = accept_watched, learn_watched

    def begin_cycle(self):
        self.coins = []         # of each verdict by chance the number drawn in 0..1; None of a certain one
        for reader in readers_of(self).values():
            reader.watch()

    def note(self, method, draft, score, cycle):
        """The dict of one cycle."""
        notes = dict(pass_ms={f'{role}/{path}': ms for role, reader in readers_of(self).items()
                              for path, ms in reader.ms.items()})
        path = self.target_path()
        if isinstance(score, Score):
            path = score.path
            notes['places'] = places(self, draft, score, cycle)
            if len(self.coins) == len(cycle.judged):
                for place, coin in zip(notes['places'], self.coins):
                    place['coin'] = coin
        notes['lag'] = len(self.tokens) - 1 - self.target.cache.valid_prefix(self.tokens[:-1], path)
        if cycle.signals:
            notes |= draft_notes(method, cycle)
        return notes


# ------------------------------------------------------------------- the distributions at judged positions

def places(session, draft, score, cycle):
    """What the models gave at each position of the block, a dict each: see place_of.

    A position for each judged token, and one more where the cycle's last token stands after them all.
    """
    laws = laws_of(session, draft, score)
    if not laws:
        return []
    n = len(draft.tokens)
    judged = cycle.judged[:n]
    count = max(min(len(cycle.tokens), n + 1), len(judged))
    found = []
    for i, row in zip(range(count), judged + [None] * count):
        here = {name: rows[i].cpu() for name, rows in laws.items() if i < len(rows)}        # {name: [V]}
        written = cycle.tokens[min(i, len(cycle.tokens) - 1)]
        guessed = draft.tokens[i] if i < n else written
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
    laws = {}
    logits = {}
    if 'logits' in vars(score):                         # its pass has run
        laws['p'], logits['p'] = score.p, score.logits
    ids, rows = session.target.slim
    if ids[len(ids) - n:] == draft.tokens and len(rows) == n + 1:
        laws['s'], logits['s'] = session.probs(rows), rows
    if laws and n:
        laws['q'] = draft.q
        if draft.logits is not None:
            logits['q'] = draft.logits
    if is_greedy(session.temperature):
        laws |= {f'raw_{name}': rows.float().softmax(-1) for name, rows in logits.items()}
    return laws


def place_of(laws, used):
    """One position: ids of the LIKELIEST tokens and the used ones, and their probabilities in each law."""
    raw = [row for name, row in laws.items() if name.startswith('raw_')]
    largest = torch.stack(raw or [laws[name] for name in 'pqs' if name in laws]).amax(0)
    ids = list(dict.fromkeys(largest.topk(min(LIKELIEST, len(largest))).indices.tolist() + used))
    return dict(ids=ids) | {name: rounded(row[ids].tolist()) for name, row in laws.items()}


# ------------------------------------------------------------------------------- what single methods note

def draft_notes(method, cycle):
    """Of CM-ASD confidences and windows, of ECSV the latest vote, of SpecGuard the candidates."""
    if isinstance(method, CmAsd):
        windows = [method.window(cycle.signals[:i]) for i in range(1, len(cycle.signals) + 1)]
        return dict(confidence=rounded([noted['confidence'] for noted in cycle.signals]), window=windows)
    if isinstance(method, Ecsv):
        return dict(branches=method.ballot.tokens.tolist(), weights=rounded(method.weights.tolist()))
    if isinstance(method, SpecGuard):
        candidates = cycle.signals[0]['candidates']
        return dict(candidates=candidates) if len(candidates) > 1 else {}
    return {}
