"""What the page shows and a trace does not hold: `note` is called with each Cycle while its Score is there.

Noting changes no text: it draws nothing, and writes to no cache. What a note holds: README.md.
"""
from collections import Counter
from functools import partial

import torch

from lab.measure import moment
from model import Reader
from specmini import Engine
from verify import CmAsd, Ecsv, Session, SpecGuard, ViaSd, is_greedy, readers_of

LIKELIEST = 8       # tokens of a position whose probabilities are noted


def rounded(x):
    """A number, or nested lists of numbers, to five decimals."""
    return list(map(rounded, x)) if isinstance(x, list) else round(x, 5)


class TimedReader(Reader):
    """A Reader that times its passes: `ms` has {path: milliseconds}."""

    def feed(self, ids, start, path, last):
        begin = moment()
        rows = super().feed(ids, start, path, last)
        self.ms[path.name] += 1000 * (moment() - begin)
        return rows


class TracedEngine(Engine):
    """An Engine whose passes are timed, and whose sessions have `notes`, a dict for each cycle."""

    def open(self, prompts):
        super().open(prompts)
        for reader in self.readers.values():
            reader.__class__ = TimedReader
            reader.ms = Counter()

    def start(self, ids, method, row=0):
        session = super().start(ids, method, row)
        session.flip = partial(noted_flip, session)
        session.notes = []
        begin_cycle(session)
        return session


def noted_flip(session, chance):
    """Session.flip; `coins` has the number drawn, looked up in a twin of the generator; kept: <= chance."""
    twin = session.generator.clone_state()
    coin = 1 - float(torch.rand(1, generator=twin, dtype=torch.float64))
    session.coins.append(coin if 0 < chance < 1 else None)
    return Session.flip(session, chance)


def begin_cycle(session):
    session.coins = []          # of each verdict by chance the number drawn in 0..1; None of a certain one
    for reader in readers_of(session).values():
        reader.ms.clear()


def note(text, cycle):
    """Appends the dict of the latest Cycle of a specmini.Text to the notes of its session."""
    session = text.session
    notes = dict(pass_ms={f'{role}/{path}': ms for role, reader in readers_of(session).items()
                          for path, ms in reader.ms.items()})
    notes['places'] = places(session, text.method, cycle)
    if len(session.coins) == len(cycle.judged) == len(notes['places'][:len(cycle.judged)]):
        for place, coin in zip(notes['places'], session.coins):
            place['coin'] = coin
    committed = session.tokens[:-1]
    notes['lag'] = len(committed) - session.target.cache.valid_prefix(committed, session.target_path())
    if cycle.signals:
        notes |= draft_notes(text.method, cycle)
    session.notes.append(notes)
    begin_cycle(session)


# ------------------------------------------------------------------- the distributions at judged positions

def places(session, method, cycle):
    """What the models gave at each position of the block, a dict each: see place_of.

    A position for each judged token, and one more where the cycle's last token stands after them all. An
    empty list where steps are judged.
    """
    scores = dict(p=cycle.score, s=method.slim if isinstance(method, ViaSd) and cycle.judged else None)
    scores = {name: score for name, score in scores.items() if score}
    if not scores:
        return []
    block = list(scores.values())[0].block
    laws = laws_of(session, block, scores)
    n = len(block.tokens)
    judged = cycle.judged[:n]
    count = max(min(len(cycle.tokens), n + 1), len(judged))
    found = []
    for i, row in zip(range(count), judged + [None] * count):
        here = {name: rows[i].cpu() for name, rows in laws.items() if i < len(rows)}        # {name: [V]}
        written = cycle.tokens[min(i, len(cycle.tokens) - 1)]
        guessed = block.tokens[i] if i < n else written
        if row and not row.kept and row.p is not None:
            here['residual'] = cycle.score.recovery_distribution(here['p'], here['q'])
        place = place_of(here, [guessed, written])
        if row:
            judge = here.get('p', here.get('s'))
            place['overlap'] = rounded(float(torch.minimum(judge, here['q']).sum()))
        found.append(place)
    return found


def laws_of(session, block, scores):
    """{name: [n + 1, V]}: p, s, and q [n, V] as sampled; greedily raw_p, raw_s, raw_q at temperature 1."""
    laws = {name: score.p for name, score in scores.items()}
    logits = {name: score.logits for name, score in scores.items()}
    if block.tokens:
        laws['q'] = block.q
        if block.logits is not None:
            logits['q'] = block.logits
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
