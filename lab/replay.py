"""Texts recorded once, rules replayed over them: what the claims of CM-ASD and ECSV are measured with.

At temperature 0 what draft and target say behind a text follows from the text alone. So a rule need not be
run: what it would have met can be looked up. A test holds replays to real runs, cycle by cycle.
"""
import copy
import functools
import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch

from model import fetch, send
from verify import CmAsd, Cycle, Draft, Exact, confidence_signals, decode, finite, lookup, tokens_of

AHEAD = 16              # places behind a text that are looked at together, at most
MOST_POSITIONS = 27     # the longest target pass whose cost is measured
ROUNDS = 30             # in which every cost is measured once
FEW_ROUNDS = 5          # likewise, of another pair, whose passes are hundreds of times as dear


class Guess(NamedTuple):
    """What the draft says behind a text."""
    token: int              # its favourite
    signals: tuple          # the three signals of its confidence in it
    largest: float          # its probability


class Place(NamedTuple):
    """What both models say behind a text."""
    token: int              # as in a Guess
    signals: tuple
    largest: float
    ratio: float            # the target's p(token) / max p
    pick: int               # the target's favourite


class Run(NamedTuple):
    """What a rule writes."""
    text: tuple             # of ids, without the prompt
    kept: list              # draft tokens kept, of each cycle
    drafted: list           # draft tokens, of each cycle


# ------------------------------------------------------------------------------------------- modelled seconds

def pass_seconds(reader, line, token, n):
    """Seconds for a pass over n positions behind the line; token: one that is not cached."""
    known, draft = line[:-1], [token] + [1] * (n - 1)
    reader.read(known, [], reader.model.full, 0)
    begin = clock(reader)
    reader.read(known, draft, reader.model.full, n)
    return clock(reader) - begin


def clock(reader):
    """The processor's own seconds so far; those of the wall where more than one thread or a card works."""
    device = reader.model.cos.device
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


@functools.cache
def pass_costs(pair):
    """(seconds of a draft pass, [seconds of a target pass over 0, 1, 2, ... positions]).

    The processor's own time (see clock), and the least of all rounds through all sizes: what other
    programs add to a pass is not its own, and a busy moment spoils one round of each size, not all of one.
    """
    line = [1] * 100
    session = pair.session(line)
    tokens = itertools.cycle(range(2, session.target.model.vocab))      # another than the one in the cache
    draft = []
    target = [[] for _ in range(MOST_POSITIONS)]
    for _ in range(ROUNDS if pair.is_embedded else FEW_ROUNDS):
        for _ in range(4):                              # in a row, as in a cycle: its weights stay at hand
            draft.append(pass_seconds(session.draft, line, next(tokens), 1))
        for i, times in enumerate(target):
            times.append(pass_seconds(session.target, line, next(tokens), i + 1))
    return min(draft), [0.0] + [min(times) for times in target]


def modelled_seconds(pair, drafted):
    """Seconds of cycles that drafted these numbers of tokens, by pass_costs; longest passes in proportion."""
    draft, target = pass_costs(pair)
    total = 0.0
    for n in drafted:
        positions = n + 1
        measured = min(positions, MOST_POSITIONS)
        total += n * draft + target[measured] * positions / measured
    return total


# -------------------------------------------------------------------------------------------------- replays

def confidence(method, guess):
    """CM-ASD's C of a Guess; 1 for a method that has none."""
    if not isinstance(method, CmAsd):
        return 1.0
    return method.confidence_window.mean(guess.signals)


class View:
    """As much of the Score of one draft token, the favourite behind a text, as rules at temperature 0 ask."""
    session = SimpleNamespace(temperature=0.0)

    def __init__(self, replay, text, method):
        place = replay.place(text)
        self.draft = Draft([place.token], None, notes=[dict(confidence=confidence(method, place))])
        self.ratios = [place.ratio]
        self.pq = [(float(place.token == place.pick), 1.0)]
        self.replay = replay
        self.text = text

    @property
    def logits(self):
        """[1, V], read anew: of a large vocabulary they are too many to be kept for every text."""
        return self.replay.read('target', self.text, ())


class Replay:
    """One prompt: what draft and target say behind every text that a rule at temperature 0 has come by.

    Behind the target's own text one pass of each model says it for every place. Elsewhere it takes passes:
    the draft's where a block is drafted, the target's where a rule looks.
    """

    def __init__(self, pair, ids, rounded=''):
        """pair: a Pair; ids: the prompt's; rounded: which of the two models has 4 bits, if any."""
        self.ids = list(ids)
        self.room = pair.max_new
        self.session = pair.session(ids, rounded)
        self.text = tuple(self.plain() if pair.is_embedded else pair.own_text(ids))     # plain decoding's
        self.after = {}                                 # {two tokens of it: the place behind them}
        for i in range(2, len(self.text)):
            self.after[self.text[i - 2:i]] = i
        self.guesses = {}                               # {text: Guess}
        self.verdicts = {}                              # {text: (ratio, pick), as in a Place}
        self.look_ahead((), self.text[:-1])
        self.judge((), self.text[:-1])

    def plain(self):
        """The target's own text; a block looked up in it spares passes and, verified, changes nothing."""
        session = copy.copy(self.session)
        session.source = lookup
        return tokens_of(decode(session, Exact(AHEAD)))

    def read(self, role, text, ahead):
        """A model's logits [1 + ahead, V] behind a text and behind each token that follows it, one pass."""
        reader = getattr(self.session, role)
        line = self.ids + list(text)
        return finite(reader.read(line, list(ahead), reader.model.full, 1 + len(ahead)), role, len(line))

    def look_ahead(self, text, ahead):
        """Notes the Guesses behind a text and behind each token of `ahead`."""
        logits = self.read('draft', text, ahead)
        q = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))
        largest, tokens = q.max(-1)
        largest, tokens = fetch(largest, tokens)
        found = zip(tokens.tolist(), confidence_signals(logits), largest.tolist())
        for i, guess in enumerate(found):
            self.guesses.setdefault(text + ahead[:i], Guess(*guess))

    def judge(self, text, ahead):
        """Notes the target's verdicts behind a text and behind each token of `ahead`: all have a Guess."""
        logits = self.read('target', text, ahead)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        texts = [text + ahead[:i] for i in range(1 + len(ahead))]
        ids = send([self.guesses[known].token for known in texts], logits.device)[:, None]
        highest, picks = logits.max(-1, keepdim=True)                                   # [1 + ahead, 1]
        ratios, picks = fetch((logits.gather(1, ids) - highest).exp(), picks)
        for known, ratio, pick in zip(texts, ratios[:, 0].tolist(), picks[:, 0].tolist()):
            self.verdicts.setdefault(known, (ratio, pick))

    def guess(self, text):
        """The Guess behind a text, a tuple of ids without the prompt."""
        if text not in self.guesses:
            place = self.after.get(text[-2:])           # where its end stands in plain decoding's text,
            ahead = self.text[place:place + AHEAD] if place else ()     # what follows there is likely here
            self.look_ahead(text, ahead)
        return self.guesses[text]

    def place(self, text):
        """The Place behind a text, a tuple of ids without the prompt."""
        guess = self.guess(text)
        if text not in self.verdicts:
            self.judge(text, self.drafted(text))
        return Place(*guess, *self.verdicts[text])

    def drafted(self, text):
        """The tokens that the draft is known to go on with behind a text: each leads to another Guess."""
        ahead = ()
        while len(ahead) < AHEAD:
            longer = ahead + (self.guesses[text + ahead].token,)
            if text + longer not in self.guesses:
                break
            ahead = longer
        return ahead

    def is_over(self, text):
        """Whether a text ends with an end of sequence."""
        return bool(text) and text[-1] in self.session.eos

    def block(self, text, method, most):
        """(Guesses of the block, at most so many, that a method drafts greedily behind a text, its notes).

        As in sample_branches: whoever decides by the notes alone is asked behind each token but the last.
        """
        longest = min(most, method.control.length(self.session))
        block = []
        notes = []
        while len(block) < longest and not (block and self.is_over(text)):
            guess = self.guess(text)
            block.append(guess)
            text += (guess.token,)
            notes.append({})
            if len(block) < longest:
                notes[-1] = dict(confidence=confidence(method, guess), own=guess.largest,
                                 largest=guess.largest)         # greedily drafted: it is its own
                if not method.control.goes_on(self.session, notes):
                    break
        return block, notes

    def run(self, method):
        """The Run of a CmAsd or Exact from this prompt, judged by its own rule; one that learns has one."""
        text, kept, drafted = (), [], []
        while len(text) < self.room and not self.is_over(text):
            block, notes = self.block(text, method, self.room - len(text) - 1)
            begin = len(text)
            for guess in block:
                if not method.chance(View(self, text, method), 0):
                    break
                text += (guess.token,)
                if self.is_over(text):                  # what was drafted behind the end is dropped
                    break
            kept.append(len(text) - begin)
            drafted.append(len(block))
            if not self.is_over(text):
                text += (self.place(text).pick,)        # after a rejection, or the bonus
            method.learn(*finished(block, notes, kept[-1], text[begin:]))
        return Run(text, kept, drafted)


def finished(block, notes, kept, committed):
    """(Draft, Cycle) of a replayed cycle, as far as controllers that learn look at them."""
    tokens = [guess.token for guess in block]
    verdicts = [True] * kept + [False] * (len(committed) > kept and len(block) > kept)
    judged = [dict(token=token, kept=verdict) for token, verdict in zip(tokens, verdicts)]
    labels = ['draft'] * kept + ['target'] * (len(committed) - kept)
    return Draft(tokens, None, notes=notes), Cycle(tokens, judged, list(committed), labels, {}, 0.0)


# ------------------------------------------------------------------------------------------------- drawings

def columns(rows):
    """Lines of rows (name, cells), the cells one below the other."""
    width = 0
    for _, cells in rows:
        width = max(width, *map(len, cells), 0)
    lines = []
    for name, cells in rows:
        padded = [cell.ljust(width + 1) for cell in cells]
        lines.append(f'{name:12}' + ''.join(padded))
    return lines
