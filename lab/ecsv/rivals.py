"""Beside ECSV: its variants, its controls, other uses of several branches; all of them enter METHODS."""
import copy
import functools
import os
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import torch

from lab.tree import Tree
from model import Reader, fetch, load, same_vocabulary, send
from verify import (METHODS, Branches, Draft, Ecsv, Exact, Score, finite, in_range, require, residual,
                    sample_branches, silence, token_logps, until_end)


# -------------------------------------------------------------------------------------- variants and controls

@dataclass
class EcsvLite(Ecsv):
    """ECSV-lite: reliability from entropy and agreement alone."""
    a_self: float = 0.0


@dataclass
class EcsvSpot(Ecsv):
    """ECSV-spot: one position a cycle is checked with the target before the final vote."""
    a_spot: float = 1.0
    spots: int = 1


@dataclass
class EcsvChecked(Ecsv):
    """ecsv-spot whose check verifies: what the target says up to the checked place is not voted on again.

    The target draws its token at each place that it has read. As long as they are the first vote's, and the
    one behind these, they are its text. Only what follows is voted on, by the branches that begin so; where
    none does, the cycle ends there, without another pass. Exact at every temperature. Its acceptance is of
    what it proposes behind the check: the target's own tokens count as kept. Ours.
    """
    spots: int = 1
    lossless = Exact.lossless   # what the target has drawn must be committed

    def guess(self, session, n):
        self.certain = []       # the target's own tokens, with which the block begins
        self.voted = []         # the first vote's
        draft = super().guess(session, n)
        labels = ['draft' if own == voted else 'target' for own, voted in zip(self.certain, self.voted)]
        draft.labels = labels + ['draft'] * (len(draft.tokens) - len(labels))
        return draft

    def recheck(self, session, ballot, fused, chosen, cap):
        begun = fused[:chosen[-1]]
        rows = Score(session, Draft(begun, None), self.path(session)).logits        # [m, V]
        drawn, highest = fetch(session.draw(session.probs(rows)), rows.amax())
        finite(highest, 'target', len(session.tokens))
        drawn = drawn.tolist()
        same = len(os.path.commonprefix([begun, drawn]))
        self.voted = fused
        self.certain = drawn[:same + 1]
        rest = []
        if self.certain[-1] not in session.eos:
            rest = self.behind(ballot, self.certain)[:cap - len(rows) - 1]
        spent = len(rows) + (len(rest) + 1 if rest else 0)
        return until_end(self.certain + rest, session.eos), rows[:same + 1], spent

    def behind(self, ballot, begun):
        """What the branches that begin with these tokens elect behind them; nothing where there are none."""
        agreeing = (ballot.tokens[:, :len(begun)] == torch.tensor(begun)).all(1)            # [B]
        if not agreeing.any():
            return []
        names = ('tokens', 'entropy', 'own', 'q', 'margins')
        left = replace(ballot, **{name: getattr(ballot, name)[agreeing] for name in names})
        return self.fuse(left)[len(begun):]

    def chance(self, score, i):
        return 1.0 if i < len(self.certain) else super().chance(score, i)

    def accept(self, session, draft, score):
        if not draft.tokens or len(draft.tokens) > len(self.certain):
            return super().accept(session, draft, score)
        judged = []                         # all of it is the target's: no pass, and none behind it
        for token in draft.tokens:
            judged.append(dict(token=token, p=1.0, q=1.0, threshold=None, chance=1.0, kept=True))
        return draft.tokens, draft.labels, judged


@dataclass
class EcsvSoft(Ecsv):
    """ECSV-soft: a branch votes with its whole distribution too."""
    soft: float = 0.5


@dataclass
class VoteUnif(Ecsv):
    """ECSV's control: every branch's vote counts the same."""
    gamma_r: float = 0.0


@dataclass
class MeanArgmax(Ecsv):
    """ECSV's control: the token that the branches' mean q likes best, whatever was sampled.

    The vote of very many branches would come to it.
    """
    gamma_r: float = 0.0
    soft: float = 1.0           # above 0, so that the likeliest tokens are candidates

    def scores(self, ballot):
        return ballot.q


# ------------------------------------------------------------------------------------------- two draft models

@functools.cache
def second_draft(folder, device, dtype):
    """The network in the folder, loaded once."""
    return load(folder, device, dtype)[0]


@dataclass
class TwoDrafts(Ecsv):
    """ECSV whose branches come half from the draft, half from another checkpoint: errors less alike."""
    second: str = ''            # folder of the other draft, same vocabulary

    def __post_init__(self):
        super().__post_init__()
        self.other = None       # its Reader

    def texts(self, session, n):
        require(self.second, 'second', repr(self.second), 'the folder of another draft model')
        half = self.branches // 2
        if session.draft is None or half == 0:
            return super().texts(session, n)            # which refuses if there is no draft
        most = len(session.tokens) + session.room
        if self.other is None or self.other.capacity < most or self.other.log is not session.draft.log:
            self.other = self.reader_for(session, most)
        path = session.draft.model.full
        plan = self.plan(session, n)
        first = sample_branches(session, session.draft, path, self.branches - half, plan)
        second = sample_branches(session, self.other, self.other.model.full, half, plan)
        return joined(first, second)

    def reader_for(self, session, most):
        """A Reader of the other draft for `most` tokens; its passes are the draft's in the ledger."""
        like = session.target.model.lm_head.weight
        model = second_draft(self.second, str(like.device), like.dtype)
        same_vocabulary(session.target.model, model, f'knob second, {self.second}')
        context = model.config.max_position_embeddings
        require(most <= context, 'second', self.second, f'a context of {most} tokens, not of {context}')
        reader = Reader(model, most)
        reader.log = session.draft.log
        return reader


def joined(first, second):
    """The Branches of two drafts, one below the other.

    Either may have been stopped early, by a controller or where all its texts end; the shorter length is that
    of both.
    """
    n = min(first.tokens.shape[1], second.tokens.shape[1])
    tokens = torch.cat([first.tokens[:, :n], second.tokens[:, :n]])
    q = torch.cat([first.q[:, :n], second.q[:, :n]])
    logits = torch.cat([first.logits[:, :n], second.logits[:, :n]])
    return Branches(tokens, q, logits, first.notes[:n])


# -------------------------------------------------------------------------- several branches without any vote

@dataclass
class OracleTop1(Ecsv):
    """Reads every branch with the target and proposes the one expected to be kept longest: an upper bound.

    B target passes a cycle, all in the ledger; lossless, since it looks at p and not at what p will draw.
    """

    def guess(self, session, n):
        best = None
        most = -1.0
        texts = self.texts(session, n)
        for tokens, logits in zip(texts.lines(session), texts.logits):
            points = Draft.points(tokens, session.target.model)
            draft = replace(points, logits=logits[:len(tokens)])
            score = self.score(session, draft)
            chances = torch.tensor([p for p, _ in score.pq]).double()
            expected = float(chances.cumprod(0).sum())          # tokens kept
            draft.known = score.logits
            if expected > most:
                best = draft
                most = expected
        return best


@dataclass
class Walk:
    """How far a cycle of several branches has come: what is kept, and what the target has read of it."""
    live: list                  # Drafts whose next token may be tried
    path: list                  # ids of the block as far as the target has read it
    score: Score                # of the target's latest pass
    left: float                 # target positions that the budget still allows
    begin: int = 0              # place in the block that the score's first row judges
    tokens: list = field(default_factory=list)      # ids kept
    judged: list = field(default_factory=list)      # rows of the trace

    @property
    def place(self):
        """The place in the block of the token that is to be judged next."""
        return len(self.tokens)

    @property
    def law(self):
        """The target's distribution [V] at this place."""
        return self.score.p[self.place - self.begin]

    @property
    def read(self):
        """Whether the target has read what is kept, so that it can judge what follows."""
        return self.tokens == self.path[:self.place]

    def result(self, draft, token=None, label=None):
        """(tokens, labels, judged) of the cycle, which ends with this token of the target's, or with none.

        The draft's tokens become all that was put to the target: what was judged, then what was only read.
        """
        rejected = not self.judged[-1]['kept']
        unjudged = self.path[self.place + rejected:]
        draft.tokens = [row['token'] for row in self.judged] + unjudged
        labels = ['draft'] * len(self.tokens)
        if label is None:
            return self.tokens, labels, self.judged
        return self.tokens + [token], labels + [label], self.judged


def read_now(score):
    """The Score, whose pass has run; ValueError if its logits overflowed."""
    score.finite(*fetch(score.logits.amax()))
    return score


def tried(session, options, i, p):
    """(the first branch whose i-th token passes, or None; what is left of the target's p [V]; the judged).

    The first branch is judged by p. Each further one is judged by what the rejected ones have left of it.
    """
    judged = []
    for option in options:
        token = option.tokens[i]
        q = option.q[i].to(p.dtype)
        (own,) = fetch(torch.stack([p[token], q[token]]))
        own_p, own_q = own.tolist()
        chance = min(1.0, own_p / own_q)
        kept = session.flip(chance)
        judged.append(dict(token=token, p=own_p, q=own_q, threshold=None, chance=chance, kept=kept))
        if kept:
            return option, p, judged
        p = residual(p, q)
    return None, p, judged


@dataclass
class SdMulti(Ecsv):
    """Several branches, no fusion: the first whose first token passes is verified to its end.

    First tokens are tried in turn against what the target still has to give (recursive rejection); its row
    there is shared by all, so a cycle takes two passes at most. At temperature 0 the likeliest branch is
    first; above it the order must not look at what was drawn. Source: Miao et al. 2024 (SpecInfer), alg. 2.
    """
    lossless = Exact.lossless   # its tokens are samples: none may be dropped unverified

    def guess(self, session, n):
        if self.budget is not None:
            n = min(n, self.budget - 1)
        texts = self.texts(session, n)
        self.options = []
        for tokens, q, logits in zip(texts.lines(session), texts.q, texts.logits):
            self.options.append(Draft(tokens, q[:len(tokens)], logits[:len(tokens)]))
        if session.temperature == 0:
            self.options = likeliest_first(self.options)
        return self.options[0]

    def follow(self, live, kept, i):
        """The branches that stay in play behind the i-th token of the one that was kept."""
        return [kept]

    def accept(self, session, draft, score):
        if not draft.tokens:
            return super().accept(session, draft, score)
        left = (self.budget or inf) - len(draft.tokens) - 1
        walk = Walk(self.options, draft.tokens, read_now(score), left)
        while walk.place < len(walk.path):
            place = walk.place
            option, law, judged = tried(session, walk.live, place, walk.law)
            walk.judged += judged
            if option is None:
                return walk.result(draft, int(session.draw(law)), 'target')
            walk.tokens.append(option.tokens[place])
            walk.live = self.follow(walk.live, option, place)
            if option.tokens[place] in session.eos:
                return walk.result(draft)
            if not walk.read:
                if walk.left < 1:
                    return walk.result(draft)
                self.read_on(session, walk, option)
        return walk.result(draft, int(session.draw(walk.score.p[-1])), 'bonus')

    def read_on(self, session, walk, option):
        """Another target pass: over the token last kept and, within the budget, its branch behind it."""
        walk.begin = walk.place
        most = walk.begin - 1 + min(walk.left, len(option.tokens))
        walk.path = option.tokens[:most]
        walk.left -= len(walk.path) - walk.begin + 1
        behind = copy.copy(session)
        behind.tokens = session.tokens + walk.tokens
        rest = slice(walk.begin, len(walk.path))
        walk.score = read_now(self.score(behind, Draft(option.tokens[rest], option.q[rest])))


def likeliest_first(drafts):
    """The Drafts by the log-probability of their text at temperature 1, the highest first."""
    totals = [token_logps(draft.logits, draft.tokens).sum() for draft in drafts]
    (totals,) = fetch(torch.stack(totals))
    order = totals.sort(descending=True, stable=True).indices
    return [drafts[i] for i in order.tolist()]


@dataclass
class SdTree(SdMulti):
    """SdMulti at every token: all branches that share the kept text are tried in turn, as in a tree.

    The target has read all of them in one pass over that tree, whatever is kept of it. Source: Miao et al.
    2024 (SpecInfer), algorithm 2.
    """

    def __post_init__(self):
        super().__post_init__()
        least = self.branches + 1
        enough = self.budget is None or self.budget >= least
        require(enough, 'budget', self.budget, f'{least} positions or more: one of each branch, and the root')

    def propose(self, session):
        self.options = []
        self.tree = None
        return super().propose(session)

    def guess(self, session, n):
        if self.budget is not None:
            n = min(n, (self.budget - 1) // self.branches)
        return super().guess(session, n)

    def score(self, session, draft):
        """Of the draft, and of what follows another branch: each by rows of the cycle's one pass.

        A sparse path reads no tree: there each branch that is followed has a pass of its own.
        """
        score = super().score(session, draft)
        if self.options and not score.path.sparse:
            if self.tree is None:
                self.read_tree(session, score.path)
            begin = session.tokens[len(self.tree.text):]        # kept already
            lines = [tuple(begin + draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
            draft.known = self.rows[send([self.nodes[line] for line in lines], self.rows.device)]
        return score

    def read_tree(self, session, path):
        """The cycle's one pass; rows [T, V], and nodes, {tokens from the text on: the node of the last}."""
        self.nodes = {(): 0}
        guesses = []
        parents = []
        for option in self.options:
            for i, token in enumerate(option.tokens):
                line = tuple(option.tokens[:i + 1])
                if line not in self.nodes:
                    guesses.append(token)
                    parents.append(self.nodes[line[:-1]])
                    self.nodes[line] = len(guesses)
        self.tree = Tree(session.target, session.tokens, guesses, parents)
        self.rows = finite(self.tree.read(path), 'target', len(session.tokens))

    def accept(self, session, draft, score):
        tokens, labels, judged = super().accept(session, draft, score)
        if self.tree:
            kept = labels.count('draft')
            self.tree.keep([self.nodes[tuple(tokens[:i + 1])] for i in range(kept)])
        return tokens, labels, judged

    def follow(self, live, kept, i):
        return [option for option in live if option.tokens[i] == kept.tokens[i]]


# ----------------------------------------------------------------------------- a second choice where in doubt

class Side(NamedTuple):
    """A branch that leaves the draft with its second choice at one place."""
    token: int          # the second choice
    rest: Draft         # what the draft writes behind it, perhaps nothing
    node: int           # of the token in the Tree; those of the rest follow it


def second_choices(draft):
    """([n] the largest q at each place, at temperature 1, [n] the likeliest token that was not drafted)."""
    n = len(draft.tokens)
    precise = torch.promote_types(draft.logits.dtype, torch.float32)
    q, names = draft.logits[:n].softmax(-1, precise).topk(2)                    # [n, 2]
    q, names = fetch(q, names)
    seconds = []
    for token, (first, second) in zip(draft.tokens, names.tolist()):
        seconds.append(second if token == first else first)
    return q[:, 0].tolist(), seconds


@dataclass
class Hedge(Exact):
    """sd whose draft has side branches where it doubts: its second choice, and what it writes behind that.

    All of it is verified in one pass over the tree. Where a draft token fails, the target draws another, as
    ever; if that is the second choice there, the side branch is judged on. A second choice needs no rule of
    its own: to draw, and to look whether it is the same, is sample-and-match. A doubt is the chance, by the
    draft's own confidence, that the block breaks at this very place: in a block they sum to 1 at most.
    Source: ours, of CM-ASD's confidence and ECSV's redundancy.
    """
    side: int = in_range(1, 1)              # tokens of a side branch; each but the first is a draft pass
    least: float = in_range(0.1, 0, 1)      # doubt from which a place has a side branch; 1: nowhere, as sd

    def propose(self, session):
        draft = super().propose(session)
        self.sides = {}                     # place: Side
        if draft.tokens and draft.logits is not None:           # what was looked up has no second choice
            confidence, seconds = second_choices(draft)
            node = len(draft.tokens) + 1
            for place in self.doubtful(confidence):
                rest = self.behind(session, draft.tokens[:place] + [seconds[place]])
                self.sides[place] = Side(seconds[place], rest, node)
                node += 1 + len(rest.tokens)
        return draft

    def doubtful(self, confidence):
        """The places that get a side branch, of a block whose tokens have these confidences."""
        found = []
        right = 1.0                         # the chance that all is right before this place
        for place, sure in enumerate(confidence):
            if right * (1 - sure) >= self.least:
                found.append(place)
            right *= sure
        return found

    def behind(self, session, tokens):
        """The Draft of the rest of a side branch, behind these tokens of the block."""
        most = min(self.side, session.room - len(tokens)) - 1
        if most < 1 or tokens[-1] in session.eos:
            return silence(session)
        longer = copy.copy(session)
        longer.tokens = session.tokens + tokens
        return session.source(longer, self.plan(longer, most))

    def score(self, session, draft):
        score = super().score(session, draft)
        self.tree = None
        if self.sides:
            guesses = list(draft.tokens)
            parents = list(range(len(guesses)))
            for place, (token, rest, node) in self.sides.items():
                guesses += [token, *rest.tokens]
                parents += [place, *range(node, node + len(rest.tokens))]
            self.tree = Tree(session.target, session.tokens, guesses, parents)
            rows = finite(self.tree.read(score.path), 'target', len(session.tokens))
            draft.known = rows[:len(draft.tokens) + 1]
            for _, rest, node in self.sides.values():
                rest.known = rows[node:node + len(rest.tokens) + 1]
        return score

    def accept(self, session, draft, score):
        tokens, labels, judged = super().accept(session, draft, score)
        kept = labels.count('draft')
        self.trunk = replace(draft), kept, len(judged)
        branch = list(range(1, kept + 1))                       # nodes of what is kept
        unjudged = draft.tokens[len(judged):]
        if labels[-1] == 'target' and kept in self.sides:
            side = self.sides[kept]
            judged.append(second_verdict(score, kept, side.token, tokens[-1]))
            if tokens[-1] == side.token:
                later, wrote, verdicts = super().accept(session, side.rest, super().score(session, side.rest))
                tokens += later
                labels[-1:] = ['draft', *(wrote if verdicts else ['bonus'])]
                judged += verdicts
                branch += range(side.node, side.node + 1 + wrote.count('draft'))
                unjudged = side.rest.tokens[len(verdicts):]
        if self.tree:
            self.tree.keep(branch)
            draft.tokens = [row['token'] for row in judged] + unjudged
        return tokens, labels, judged

    def learn(self, draft, cycle):
        """The controller is told what became of the trunk."""
        trunk, kept, seen = self.trunk
        super().learn(trunk, replace(cycle, labels=cycle.labels[:kept], judged=cycle.judged[:seen]))


def second_verdict(score, place, token, drawn):
    """The row of the trace of a second choice, where the target has drawn a token in place of the first."""
    left = residual(score.p[place], score.draft.q[place].to(score.p.dtype))
    (chance,) = fetch(left[token])
    chance = float(chance)
    return dict(token=token, p=chance, q=1.0, threshold=None, chance=chance, kept=token == drawn, second=True)


METHODS.update({'ecsv-lite': EcsvLite, 'ecsv-spot': EcsvSpot, 'ecsv-checked': EcsvChecked,
                'ecsv-soft': EcsvSoft, 'ecsv-two': TwoDrafts, 'sd-multi': SdMulti, 'sd-tree': SdTree,
                'vote-unif': VoteUnif, 'mean-argmax': MeanArgmax, 'oracle-top1': OracleTop1, 'hedge': Hedge})
