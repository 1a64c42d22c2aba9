"""Texts recorded once, rules replayed over them: what the claims of CM-ASD and ECSV are computed from.

At temperature 0 what draft and target say behind a text follows from the text alone, so any rule's run can be
looked up instead of run. `python -m lab.replay "A prompt"` draws a cycle of each of the two methods.
"""
import copy
import functools
import itertools
import os
import sys
import time
from collections import namedtuple
from pathlib import Path as File
from types import SimpleNamespace

import torch

import specmini
from lab import tasks
from lab.quantise import linear, quantise
from lab.rivals import EcsvLite, EcsvSpot
from model import Reader, load
from verify import METHODS, Ballot, CmAsd, Draft, Ecsv, Exact, Score, Session, rollout, signals

HOME, ROOM, CHUNK = File(__file__).parent / 'models', 160, 8       # tokens: a text at most, looked at at once
LONGEST, DEPTHS = 300, range(1, 9)      # prompts of more tokens are passed over; tokens of an ECSV block
SMOOTH = 0.05                           # share of q in a vote's law, which else has no chance for most tokens

Place = namedtuple('Place', 'token signals ratio pick logits')     # draft's token, its p / max p, target's
Run = namedtuple('Run', 'text kept drafted')                        # kept, drafted: of each cycle


@functools.cache
def network(name, rounded=False):
    """(Transformer, tokenizer, end ids) of an embedded model; rounded: its linear layers to 4 bits."""
    loaded = load(HOME / name)
    for key, p in loaded[0].named_parameters():
        if rounded and linear(key, p):
            p.data = quantise(p.data)
    return loaded


def begin(ids, rounded=''):
    """A Session of the embedded pair that has read its prompt; rounded: the one of them that has 4 bits."""
    (target, _, eos), (draft, *_) = (network(name, name == rounded) for name in ('target', 'draft'))
    capacity = len(ids) + ROOM + 64
    s = Session(Reader(target, capacity), Reader(draft, capacity), rollout, list(ids), ROOM, eos)
    s.read_prompt()
    return s


def written(session, ids, method, temperature=0.0, seed=0):
    """The trace of a text from this prompt; what the caches hold of earlier texts is used where it fits."""
    s, s.tokens, s.room, s.ended = session, list(ids), ROOM, False
    s.temperature, s.generator = temperature, torch.Generator().manual_seed(seed)
    s.take()
    return list(specmini.decode(s, method))


def prompts(family, n, seed=11):
    """[(row, prompt ids)] of the first n held-out rows whose prompts have LONGEST tokens or fewer."""
    tokenizer = network('target')[1]
    pairs = ((row, tokenizer.encode(row['prompt']).ids) for row in tasks.rows(family, seed))
    return list(itertools.islice((pair for pair in pairs if len(pair[1]) <= LONGEST), n))


@functools.cache
def costs():
    """(seconds of a draft pass, [seconds of a target pass over T = 0, 1, 2, ... positions]), the least of 15,
    of the processor's own time: what other programs add to a pass is not its own.
    """
    s, line = begin([1] * 100), [1] * 130

    def least(reader, T):
        reader.read(line[:100], [], reader.model.full, 1)
        times = []
        for i in range(2, 17):                          # another token each time: nothing is trusted
            middle = time.process_time()
            reader.read(line[:99], [i] + line[:T - 1], reader.model.full, T)
            times.append(time.process_time() - middle)
        return min(times)
    return least(s.draft, 1), [0.0] + [least(s.target, T) for T in range(1, 28)]


def seconds(drafted):
    """Modelled seconds of cycles that drafted these numbers of tokens; longest passes in proportion."""
    draft, target = costs()
    most = len(target) - 1
    return sum(k * draft + target[min(k + 1, most)] * max(1, (k + 1) / most) for k in drafted)


class Record:
    """One prompt: what draft and target say behind every text that a rule at temperature 0 has come by."""

    def __init__(self, ids, rounded=''):
        self.ids, self.session, self.places = list(ids), begin(ids, rounded), {}
        self.text = self.replay(Exact()).text           # plain decoding's: the rule is exact

    def place(self, text):
        """The Place behind a text, a tuple of ids without the prompt."""
        if text not in self.places:
            s = self.session
            s.tokens = self.ids + list(text)
            d = rollout(s, Exact(draft_temperature=0), CHUNK)
            score = Score(s, d, s.target.model.full)
            picks = score.logits.argmax(-1).tolist()
            for i, found in enumerate(zip(d.tokens, signals(d.logits), score.ratios, picks, score.logits)):
                self.places.setdefault(text + tuple(d.tokens[:i]), Place(*found))
        return self.places[text]

    def block(self, text, method, most):
        """The Places of the block that the method, a CmAsd or Exact, drafts greedily behind a text."""
        online, block, sure = method.controller == 'online', [], 0.0
        while len(block) < (min(most, method.k_max) if online else min(most, method.gamma)):
            block.append(self.place(text))
            text += (block[-1].token,)
            if online:
                sure += confidence(method, block[-1])
                if len(block) >= method.window(sure / len(block)) or text[-1] in self.session.eos:
                    break
        return block

    def replay(self, method):
        """The Run of a CmAsd or Exact with its own `kept`, or strictly."""
        text, kept, drafted = (), [], []
        while len(text) < ROOM and not (text and text[-1] in self.session.eos):
            block = self.block(text, method, ROOM - len(text) - 1)
            score = SimpleNamespace(
                draft=Draft([x.token for x in block], None, notes=[dict(confidence=confidence(method, x))
                                                                   for x in block]),
                ratios=[x.ratio for x in block], logits=[x.logits for x in block],
                pq=[(float(x.token == x.pick), 1.0) for x in block],
                session=SimpleNamespace(temperature=0.0))
            n = next((i for i in range(len(block)) if not method.kept(score, i)), len(block))
            tokens = tuple(score.draft.tokens[:n])
            end = next((i for i, x in enumerate(tokens, 1) if x in self.session.eos), None)
            text, n = (text + tokens[:end], end) if end else (text + tokens, n)
            if not end:
                text += (self.place(text).pick,)
            kept, drafted = kept + [n], drafted + [len(block)]
        return Run(text, kept, drafted)


def confidence(method, place):
    """CM-ASD's C of a Place; 1 for a method that has none."""
    return sum(a * b for a, b in zip(method.lam, place.signals)) if isinstance(method, CmAsd) else 1.0


VOTES = {'sd sampled': Ecsv(branches=1), 'lite': EcsvLite(), 'ecsv': Ecsv(), 'soft': METHODS['ecsv-soft'](),
         'vote-unif': METHODS['vote-unif'](), 'mean-argmax': METHODS['mean-argmax'](),
         'prefix': Ecsv(align='prefix'), 'branch': Ecsv(granularity='branch'),
         **{f'window {n}': Ecsv(granularity='window', window=n) for n in (2, 4, 8)},
         'entropy alone': Ecsv(a_agree=0, a_self=0), 'agreement alone': Ecsv(a_entropy=0, a_self=0),
         'own q alone': Ecsv(a_entropy=0, a_agree=0),
         'lite, B = 2': EcsvLite(branches=2), 'lite, B = 8': EcsvLite(branches=8)}


class Branches(Record):
    """A Record with eight branches behind every place of the target's own text that a vote has come by.

    Whatever is proposed at temperature 0, the text is the target's: a vote is only as long as it agrees.
    """

    def __init__(self, ids, rounded='', seed=0, votes=VOTES, **knobs):
        """votes: {name: Ecsv} that may be asked for; knobs: of the drafter that samples the branches."""
        super().__init__(ids, rounded)
        self.drafter, self.votes = Ecsv(**dict(branches=8) | knobs), votes
        self.drawn, self.line = {}, list(self.text)
        self.session.generator = torch.Generator().manual_seed(seed)

    def branches(self, i):
        """(tokens [B, n], raw logits [B, n, V]) behind the text's first i tokens, n the longest depth."""
        if i not in self.drawn:
            self.session.tokens = self.ids + self.line[:i]
            self.drawn[i] = self.drafter.texts(self.session, DEPTHS[-1])[::2]
        return self.drawn[i]

    def ballot(self, i, B, top_m=4, k=DEPTHS[-1]):
        return Ballot.of(*(x[:B, :k] for x in self.branches(i)), top_m)

    def agreed(self, proposal, i):
        """How many tokens of the proposal the target would write behind the first i."""
        return len(os.path.commonprefix([proposal, self.line[i:]]))

    def proposal(self, key, i, k=DEPTHS[-1]):
        """The k tokens that a vote (or sd with a greedy draft, or the best or likeliest branch) proposes."""
        if key == 'sd greedy':
            chain = self.block(tuple(self.line[:i]), Exact(DEPTHS[-1]), DEPTHS[-1])
            return [x.token for x in chain]
        if key in self.votes:
            vote = self.votes[key]
            return vote.fuse(self.ballot(i, vote.branches, vote.top_m if vote.soft else 0, k))
        tokens = self.branches(i)[0][:4].tolist()       # oracle-top1: the branch that is right for longest
        return max(tokens, key=lambda row: self.agreed(row, i))

    def sums(self, key):
        """{depth: [kept, cycles, tokens, target positions, target passes]}: what one fused token is does not
        hang on those behind it, so that one proposal serves all depths; a mean over the branch does.
        """
        found, whole = {}, key in self.votes and self.votes[key].granularity == 'branch'
        right = functools.cache(lambda i, k: self.agreed(self.proposal(key, i, k), i))
        for k in DEPTHS:
            i, kept, cycles, positions = 0, 0, 0, 0
            while i < len(self.line):
                most = min(k, ROOM - i - 1)
                n = min(most, right(i, most if whole and most else DEPTHS[-1]))
                i, kept, cycles, positions = i + n + 1, kept + n, cycles + 1, positions + most + 1
            found[k] = [kept, cycles, len(self.line), positions, cycles]
        return found

    def checked(self, method, k):
        """The same list of real cycles of a method that asks the target before it votes, at depth k."""
        s, i, kept, cycles, spent = self.session, 0, 0, 0, [0, 0]

        def texts(session, n):
            tokens, logits = (x[:method.branches, :n] for x in self.branches(i))
            return tokens, None, logits
        method.texts = texts
        while i < len(self.line):
            s.tokens = self.ids + self.line[:i]
            s.target.read(s.tokens[:-1], [], s.target.model.full, 0), s.take()
            draft = method.draft(s, min(k, ROOM - i - 1))
            Score(s, draft, s.target.model.full).logits
            passes, positions, _ = s.take()['target/full']
            spent = [spent[0] + positions, spent[1] + passes]
            n = self.agreed(draft.tokens, i)
            i, kept, cycles = i + n + 1, kept + n, cycles + 1
        return [kept, cycles, len(self.line), *spent]

    def aligned(self, key):
        """(nats of the target's law under the law of the first fused token, how often both have the same
        favourite), means over the places drawn.

        A vote's law is its scores' shares, smoothed by SMOOTH of the draft's q; key 'q' is q itself.
        """
        found, s, full = [], self.session, self.session.target.model.full
        rows = s.target.read(self.ids + self.line[:-1], [], full, len(self.line))
        for i in self.drawn:
            q = self.branches(i)[1][0, 0].softmax(-1)
            if key != 'q':
                vote = self.votes[key]
                ballot = self.ballot(i, vote.branches)
                share = dict.fromkeys(ballot.names[0], 0.0)
                for k, x in enumerate(ballot.names[0]):
                    share[x] = sum(row[0][k] for row in vote.scores(ballot))
                law = torch.zeros_like(q)
                law[list(share)] = torch.tensor(list(share.values())) / sum(share.values())
                q = (1 - SMOOTH) * law + SMOOTH * q
            nats = -float(rows[i].softmax(-1) @ q.clamp(min=1e-30).log())
            found.append((nats, float(q.argmax() == rows[i].argmax())))
        return [sum(column) / len(found) for column in zip(*found)]


# ---------------------------------------------------------------------------------- weights fitted to votes

SIGNS = 'a_entropy', 'a_agree', 'a_self', 'a_spot'
ALONE = [Ecsv(**{sign: float(sign == one) for sign in SIGNS}) for one in SIGNS]     # r is one of its summands


def lessons(record):
    """(the summands of r before their weights [4, B, N], whether the target writes that token [B, N]).

    Of four branches at the positions that a vote decides: as far as it is right, and where it first is wrong.
    The last summand, the target's margin, is asked for where the branches disagree most.
    """
    s, line, i, x, y = record.session, record.line, 0, [], []
    rows = s.target.read(record.ids + line[:-1], [], s.target.model.full, len(line))
    while i < len(line):
        ballot = record.ballot(i, 4, 0)
        n = min(record.agreed(Ecsv().fuse(ballot), i) + 1, DEPTHS[-1], len(line) - i)
        ballot.ask(rows[i:], ballot.doubtful('disagreement', 1, n))
        x.append(torch.tensor([method.weights(ballot) for method in ALONE])[..., :n].log())
        y.append(torch.tensor([row[:n] for row in ballot.tokens]) == torch.tensor(line[i:i + n]))
        i += n
    return torch.cat(x, -1), torch.cat(y, -1)


def loss_of(a, x, y):
    """Mean nats of what the target writes [B, N] under the odds exp(r) = exp(a x + bias); x [4, B, N]."""
    r = torch.tensordot(a[:-1], x.double(), 1) + a[-1]
    return torch.nn.functional.binary_cross_entropy_with_logits(r, y.double())


def fit_weights(lessons, l2=1e-3, steps=500):
    """ECSV's four weights, as `SIGNS` has them, and a bias: [5], by logistic regression with an L2 penalty.

    With them exp(r) are the odds that a branch's token is the target's; the bias turns no vote. What the
    notes standardise the fit scales. None is below 0, which the knobs demand.
    """
    x, y = (torch.cat(column, -1) for column in zip(*lessons))
    a = torch.zeros(len(SIGNS) + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([a], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss_of(a, x, y) + l2 * a[:-1].square().sum()).backward()
        optimizer.step()
        a.data[:-1].clamp_(min=0)
    return a.detach()


# ----------------------------------------------------------------------------------------------- pictures

def table(rows):
    """Lines of rows (name, cells), the cells in columns."""
    rows = [(name, list(cells)) for name, cells in rows]
    width = max(len(x) for _, cells in rows for x in cells) + 1
    return [f'{name:12}' + ''.join(f'{x:{width}}' for x in cells) for name, cells in rows]


def confident_cycle(session, word):
    """Lines of a cycle of cmasd: one that keeps what the target would not write, else the least confident."""
    found = []
    for cycle in specmini.decode(session, CmAsd()):
        before = copy.copy(session)
        before.tokens = session.tokens[:len(session.tokens) - len(cycle.tokens)]
        score = Score(before, Draft(cycle.drafted, None), session.target.model.full)
        best, sure = score.logits.argmax(-1).tolist(), [j['confidence'] for j in cycle.judged]
        bent = any(j['kept'] and j['token'] != x for j, x in zip(cycle.judged, best))
        found.append((bent, -min(sure, default=1.0), cycle, best, score.ratios))
    *_, cycle, best, ratios = max(found, key=lambda row: row[:2])
    number = lambda xs: [f'{x:.2f}' for x in xs]
    return table([('drafted', map(word, cycle.drafted)), ('C', number(j['confidence'] for j in cycle.judged)),
                  ('tau', number(j['threshold'] for j in cycle.judged)), ('p / max p', number(ratios)),
                  ('the best', map(word, best)), ('', ['kept' if j['kept'] else 'out' for j in cycle.judged]),
                  ('committed', map(word, cycle.tokens))])


class Heard(EcsvSpot):
    """ecsv-spot that remembers every vote of a text: (ballot, weights, the fused tokens)."""

    def __post_init__(self):
        super().__post_init__()
        self.votes = []

    def fuse(self, ballot):
        fused = super().fuse(ballot)
        self.votes.append((ballot, self.weights(ballot), fused))
        return fused


def voted_cycle(session, word):
    """Lines of the first cycle of ecsv-spot in which the check turns the vote; if none does, the last."""
    method = Heard()
    for cycle in specmini.decode(session, method):
        ballot, weights, vote = method.votes[0]
        _, checked, fused = method.votes[-1]
        if vote != fused:
            break
        method.votes.clear()
    lines = table([*((f'branch {b}', map(word, row)) for b, row in enumerate(ballot.tokens, 1)),
                   ('vote', map(word, vote)), ('fused', map(word, fused)),
                   ('committed', map(word, cycle.tokens))])
    for j in ballot.verifier:
        numbers = [' '.join(f'{row[j]:.2f}' for row in rows) for rows in (weights, ballot.margins, checked)]
        lines += ['position {}: weights {}; margins {}; weights then {}'.format(j + 1, *numbers)]
    passes, positions, _ = cycle.passes['target/full']
    return lines + [f'{passes} target passes over {positions} positions']


def main(text='One evening Mia the fox went to the market with a map.'):
    tokenizer = network('target')[1]
    word = lambda x: tokenizer.decode([x], skip_special_tokens=False).strip() or '_'
    for draw in (confident_cycle, voted_cycle):
        session = begin(tokenizer.encode(text).ids)
        session.generator = torch.Generator().manual_seed(0)
        print(*draw(session, word), '', sep='\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
