"""Texts recorded once, rules replayed over them: what the claims of CM-ASD and ECSV are measured with.

At temperature 0 what draft and target say behind a text follows from the text alone. So a rule need not be
run: what it would have met can be looked up. A test holds replays to real runs, cycle by cycle.
"""
import functools
import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch

from lab.common import mean
from verify import CmAsd, Draft, Exact, Score, confidence_signals

CHUNK = 8               # places behind a text that are looked at together
MOST_POSITIONS = 27     # the longest target pass whose cost is measured
ROUNDS = 30             # in which every cost is measured once
GREEDY = Exact(draft_temperature=0)


class Place(NamedTuple):
    """What both models say behind a text."""
    token: int              # the draft's favourite
    signals: tuple          # the three signals of the draft's confidence in it
    ratio: float            # the target's p(token) / max p
    pick: int               # the target's favourite
    logits: torch.Tensor    # the target's, [V]


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

    The processor's own time (see clock), and the least of ROUNDS rounds through all sizes: what other
    programs add to a pass is not its own, and a busy moment spoils one round of each size, not all of one.
    """
    line = [1] * 100
    session = pair.session(line)
    tokens = itertools.count(2)                         # another each time: nothing is in the cache
    draft = []
    target = [[] for _ in range(MOST_POSITIONS)]
    for _ in range(ROUNDS):
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

def confidence(method, place):
    """CM-ASD's C of a Place; 1 for a method that has none."""
    if not isinstance(method, CmAsd):
        return 1.0
    return method.confidence_window.mean(place.signals)


def accepted(method, block):
    """How many of a block's Places, from the first, the method keeps at temperature 0."""
    notes = [dict(confidence=confidence(method, place)) for place in block]
    score = SimpleNamespace(                            # as much of a Score as the rules look at
        draft=Draft([place.token for place in block], None, notes=notes),
        ratios=[place.ratio for place in block],
        logits=[place.logits for place in block],
        pq=[(float(place.token == place.pick), 1.0) for place in block],
        session=SimpleNamespace(temperature=0.0))
    for i in range(len(block)):
        if not method.chance(score, i):
            return i
    return len(block)


class Replay:
    """One prompt: what draft and target say behind every text that a rule at temperature 0 has come by."""

    def __init__(self, pair, ids, rounded=''):
        """pair: a Pair; ids: the prompt's; rounded: which of the two models has 4 bits, if any."""
        self.ids = list(ids)
        self.room = pair.max_new
        self.session = pair.session(ids, rounded)
        self.places = {}                                # {text: Place}
        self.text = self.run(Exact()).text              # plain decoding's: the rule is exact

    def place(self, text):
        """The Place behind a text, a tuple of ids without the prompt."""
        if text not in self.places:
            self.look_behind(text)
        return self.places[text]

    def look_behind(self, text):
        """Notes the Places behind a text, as far as the draft's CHUNK greedy tokens lead."""
        session = self.session
        session.tokens = self.ids + list(text)
        draft = GREEDY.guess(session, CHUNK)
        score = Score(session, draft, session.target.model.full)
        signals = confidence_signals(draft.logits)
        picks = score.logits.argmax(-1).tolist()
        for i, token in enumerate(draft.tokens):
            found = Place(token, signals[i], score.ratios[i], picks[i], score.logits[i])
            self.places.setdefault(text, found)
            text += (token,)

    def is_over(self, text):
        """Whether a text ends with an end of sequence."""
        return bool(text) and text[-1] in self.session.eos

    def block(self, text, method, most):
        """The Places of the block, at most so many, that a CmAsd or Exact drafts greedily behind a text."""
        online = method.controller == 'online'
        longest = min(most, method.k_max if online else method.gamma)
        block = []
        confidences = []
        while len(block) < longest and not (block and self.is_over(text)):
            place = self.place(text)
            block.append(place)
            text += (place.token,)
            if online:
                confidences.append(confidence(method, place))
                if len(block) >= method.confidence_window.length(mean(confidences)):
                    break
        return block

    def run(self, method):
        """The Run of a CmAsd or Exact from this prompt, judged by its own rule."""
        text, kept, drafted = (), [], []
        while len(text) < self.room and not self.is_over(text):
            block = self.block(text, method, self.room - len(text) - 1)
            begin = len(text)
            for place in block[:accepted(method, block)]:
                text += (place.token,)
                if self.is_over(text):                  # what was drafted behind the end is dropped
                    break
            kept.append(len(text) - begin)
            drafted.append(len(block))
            if not self.is_over(text):
                text += (self.place(text).pick,)        # after a rejection, or the bonus
        return Run(text, kept, drafted)


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
