"""ECSV's baselines and a variant of its vote, and `hedge`, our other use of a second branch."""
import copy
from collections import Counter
from dataclasses import dataclass, replace

import torch

from lab.tree import Tree
from model import to_host
from verify import (METHODS, Draft, Ecsv, EcsvSpot, Exact, Judged, check_finite, knob, no_draft, residual,
                    sums_of)


@dataclass
class EcsvPrefix(Ecsv):
    """ECSV in which only the branches that begin as the fused text does vote on its next token. Ours.

    Where no branch does, all of them vote.
    """
    def elected(self, tallies):
        ballot = self.ballot
        tokens = []
        for j in range(len(tallies)):
            agree = (ballot.tokens[:, :j] == torch.tensor(tokens, dtype=torch.long)).all(1)     # [B]
            voters = agree if agree.any() else ~agree
            q = ballot.q[voters, j:j + 1]                                           # [voters, 1, K]
            here = replace(ballot, tokens=ballot.tokens[voters, j:j + 1], q=q, tie_break=sums_of(q),
                           candidates=ballot.candidates[j:j + 1])
            tallies[j:j + 1] = here.tally(self.weights[voters, j:j + 1], self.soft)     # for the trace, too
            tokens += super().elected(tallies[j:j + 1])
        return tokens


class TiesByTarget(EcsvSpot):
    """ECSV-spot that checks ties alone: with gamma_r=0 the target breaks them. Weighted votes seldom tie."""
    def doubtful(self, ballot, count, reach):
        most = [Counter(ids).most_common(2) for ids in ballot.tokens.T[:reach].tolist()]
        return [j for j, votes in enumerate(most) if len(votes) == 2 and votes[0][1] == votes[1][1]][:count]


@dataclass
class OracleTop1(Ecsv):
    """Oracle-Top1: the target reads every branch, and the one expected to be kept longest is proposed.

    An upper bound for any choice between the branches. All B target passes are in the ledger.
    """

    def guess(self, session, n):
        best, most = None, -1.0                     # tokens that are expected to be kept
        branches = self.draft_branches(session, n)
        for tokens, logits in zip(branches.lines(session), branches.logits):
            draft = replace(Draft.points(tokens, session.target.model), logits=logits[:len(tokens)])
            score = self.score(session, draft)
            expected = float(torch.tensor([row.p for row in score.table]).double().cumprod(0).sum())
            draft.known = score.logits
            if expected > most:
                best, most = draft, expected
        return best


@dataclass
class SdMulti(Exact):
    """SD-multi: no vote; the first branch whose first token passes is verified to its end.

    First tokens are tried in turn, each against what the rejected ones have left of p. All of them share one
    row of the target, so a cycle takes at most two passes. Source: Miao et al. 2024 (SpecInfer), algorithm 2.
    """
    draft_temperature: float = knob(0.8, 'of the branches, as in ecsv', 0)
    draft_top_p: float = knob(0.95, 'top-p of the branches, as in ecsv', 1e-9, 1)
    branches: int = knob(4, 'branches that are tried in turn', 1, 64)
    lossless = True

    def guess(self, session, n):
        branches = Ecsv.draft_branches(self, session, n)
        self.options = []
        for tokens, q in zip(branches.lines(session), self.draft_probs(session, branches.logits)):
            self.options.append(Draft(tokens, q[:len(tokens)]))
        return replace(self.options[0], logits=branches.logits[0])

    def accept(self, session, draft, score):
        if not draft.tokens:
            return super().accept(session, draft, score)
        check_finite(score.logits.amax(), 'target', session)
        option, left, judged = first_kept(session, self.options, score.p[0])
        if option is None:
            draft.tokens = [row.tokens[0] for row in judged] + draft.tokens[1:]
            return [int(session.draw(left))], ['target'], judged
        first = option.tokens[:1]
        rest = Draft(option.tokens[1:], option.q[1:])
        if option is self.options[0]:
            rest.known = score.logits[1:]           # the first branch is read already; another takes a pass
        tokens, labels, verdicts = [], [], []
        if first[0] not in session.eos:
            longer = copy.copy(session)
            longer.tokens = session.tokens + first
            tokens, labels, verdicts = super().accept(session, rest, self.score(longer, rest))
            labels = labels if verdicts else ['bonus']
        judged += verdicts
        draft.tokens = [row.tokens[0] for row in judged] + rest.tokens[len(verdicts):]
        return first + tokens, ['draft'] + labels, judged


def first_kept(session, options, p):
    """(the first branch whose first token passes, or None; what is left of p [V]; the judged tokens)."""
    judged = []
    for option in options:
        token = option.tokens[0]
        q = option.q[0].to(p.dtype)
        own_p, own_q = to_host(torch.stack([p[token], q[token]]))[0].tolist()
        chance = min(1.0, own_p / own_q)
        kept = session.flip(chance)
        judged.append(Judged([token], own_p, own_q, chance=chance, kept=kept))
        if kept:
            return option, p, judged
        p = residual(p, q)
    return None, p, judged


def second_choices(draft):
    """([n] the largest q of each position at temperature 1, [n] the likeliest token that was not drafted)."""
    n = len(draft.tokens)
    precise = torch.promote_types(draft.logits.dtype, torch.float32)
    q, names = draft.logits[:n].softmax(-1, precise).topk(2)                    # [n, 2]
    q, names = to_host(q, names)
    pairs = zip(draft.tokens, names.tolist())
    return q[:, 0].tolist(), [second if token == first else first for token, (first, second) in pairs]


@dataclass
class Hedge(Exact):
    """sd whose draft has its second choice, too, where it doubts.

    All of it is verified in one pass over the tree. Where a draft token fails, the target draws another one;
    if it is the second choice there, the target's next token is known, too. That is sample-and-match, hence
    exact. A doubt is the chance, by the draft's own confidence, that the block breaks at this place. Ours.
    """
    least: float = knob(0.1, 'doubt from which a position has a second choice; 1: nowhere, as sd', 0, 1)
    lossless = True

    def propose(self, session):
        draft = super().propose(session)
        self.sides = {}                     # place: (second choice, its node in the Tree)
        if draft.tokens and draft.logits is not None:           # what was looked up has no second choice
            confidence, seconds = second_choices(draft)
            for node, place in enumerate(self.doubtful(confidence), len(draft.tokens) + 1):
                self.sides[place] = seconds[place], node
        return draft

    def doubtful(self, confidence):
        """The places that get a second choice, of a block whose tokens have these confidences."""
        places = []
        right = 1.0                         # the chance that all is right before this place
        for place, sure in enumerate(confidence):
            if right * (1 - sure) >= self.least:
                places.append(place)
            right *= sure
        return places

    def explain(self, cycle, word):
        sides = ', '.join(f'{place + 1} {word([token])}' for place, (token, _) in self.sides.items())
        return f'second choices: {sides}' if sides else ''

    def score(self, session, draft):
        score = super().score(session, draft)
        self.tree = None
        if self.sides:
            guesses = draft.tokens + [token for token, _ in self.sides.values()]
            parents = [*range(len(draft.tokens)), *self.sides]
            self.tree = Tree(session.target, session.tokens, guesses, parents)
            self.rows = self.tree.read(score.path)
            draft.known = self.rows[:len(draft.tokens) + 1]
        return score

    def accept(self, session, draft, score):
        tokens, labels, judged = super().accept(session, draft, score)
        kept = labels.count('draft')
        branch = list(range(1, kept + 1))                       # nodes of what is kept
        unjudged = draft.tokens[len(judged):]
        if labels[-1] == 'target' and kept in self.sides:
            second, node = self.sides[kept]
            left = residual(score.p[kept], draft.q[kept].to(score.p.dtype))
            chance = float(to_host(left[second])[0])
            mended = tokens[-1] == second
            signals = dict(second=True)
            judged.append(Judged([second], chance, 1.0, chance=chance, kept=mended, signals=signals))
            if mended:
                bonus = no_draft(session)
                bonus.known = self.rows[node:node + 1]
                later, _, _ = super().accept(session, bonus, super().score(session, bonus))
                tokens += later
                labels[-1:] = ['draft', 'bonus']
                branch.append(node)
                unjudged = []
        if self.tree:
            self.tree.keep(branch)
            draft.tokens = [row.tokens[0] for row in judged] + unjudged
        return tokens, labels, judged


METHODS.update({'ecsv-prefix': EcsvPrefix, 'oracle-top1': OracleTop1, 'sd-multi': SdMulti, 'hedge': Hedge})
