"""What ECSV's claims rest on, measured: `python -m lab.claims ecsv` stores it, lab/ecsv/claims.py judges it.

At temperature 0 an exact method writes the target's own text, whatever it proposes. So branches are sampled
once behind the places of that text, and every vote is asked what it would propose there. On a pair with
--target passes are dear: there places are sampled together (see Foreseen), branches have 8 tokens and not
32, votes are fewer, and noise, spot checks by replay and fitted weights are left out.
`python -m lab.ecsv.record "A prompt"` draws a cycle of ecsv-spot.
"""
import functools
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as File
from typing import NamedTuple

import torch
from tqdm import tqdm

import kernels
from lab.common import MODELS, is_there
from lab.ecsv.rivals import (EcsvChecked, EcsvLite, EcsvSoft, EcsvSpot, Hedge, MeanArgmax, SdMulti, SdTree,
                             TwoDrafts, VoteUnif)
from lab.pairs import EMBEDDED, LabRecord, Record
from lab.quantise import write_copy
from lab.replay import MOST_POSITIONS, Replay, clock, columns, modelled_seconds, pass_costs
from model import fetch, send
from verify import Ballot, Branches, Ecsv, Exact, Score, decode, token_logps, tokens_of, until_end

FAMILIES = 'math', 'table', 'story', 'qa', 'translate', 'summary'       # tasks whose prompts are used
DEPTHS = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32     # tokens of a block that are tried
DEPTHS_ELSEWHERE = DEPTHS[:8]           # likewise, on a pair that is not the lab's
GREEDY_DEPTHS = *DEPTHS, 40, 48         # of sd's greedy draft: beyond its optimum on every task
PLACES = 24             # of a text whose branches are sampled together, elsewhere
LAW_EVERY = 8           # places to one whose laws are looked at, elsewhere
SMOOTH = 0.05                           # share of q in a vote's law, which else has no chance for most tokens
VOTES = {
    'sd sampled': Ecsv(branches=1),
    'lite': EcsvLite(),
    'ecsv': Ecsv(),
    'soft': EcsvSoft(),
    'vote-unif': VoteUnif(),
    'mean-argmax': MeanArgmax(),
    'branch': Ecsv(granularity='branch'),
    'window 4': Ecsv(granularity='window', window=4),
    'own q alone': Ecsv(a_entropy=0, a_agree=0),
    'prefix': Ecsv(align='prefix'),
    'prefix, vote-unif': VoteUnif(align='prefix'),
    'prefix, branch': Ecsv(align='prefix', granularity='branch'),
    'lite, B = 2': EcsvLite(branches=2),
    'lite, B = 8': EcsvLite(branches=8)}
VOTES_ELSEWHERE = 'sd sampled', 'lite', 'ecsv', 'vote-unif', 'mean-argmax', 'prefix', 'prefix, vote-unif'
LAWS = 'lite', 'ecsv', 'soft'           # votes whose law of the first token is measured


def by_depth(found):
    """{'depths': [...], quantity: [...]} of {depth: {quantity: number}}: columns are shorter to store."""
    table = dict(depths=list(found))
    for counts in found.values():
        for quantity, number in counts.items():
            table.setdefault(quantity, []).append(number)
    return table


# ---------------------------------------------------------------------- branches behind a text, votes on them

class BranchReplay(Replay):
    """A Replay with eight branches behind every place of the target's own text that a vote has come by.

    Place i is behind the text's first i tokens. All votes see the same branches there; which these are hangs
    on the order in which places are first asked for, since that is the order of the random numbers.
    """
    votes = VOTES               # {name: Ecsv} that may be asked

    def __init__(self, pair, ids, drafter=None, rounded='', seed=0):
        """drafter: the Ecsv that samples the branches; rounded: see Replay."""
        super().__init__(pair, ids, rounded)
        self.drafter = drafter or Ecsv(branches=8)
        self.depths = DEPTHS if pair.is_embedded else DEPTHS_ELSEWHERE
        self.longest = self.depths[-1]
        self.line = list(self.text)
        self.drawn = {}         # place: (tokens, logits) of the branches
        self.ballots = {}       # (place, branches, top_m, depth): see ballot
        self.outcomes = {}      # (vote, place, depth): see outcome
        self.session.generator = torch.Generator().manual_seed(seed)

    def branches(self, i, count=8, depth=None):
        """(tokens [B, n], raw logits [B, n, V]) of the first branches at place i, until all of them end."""
        if i not in self.drawn:
            self.session.tokens = self.ids + self.line[:i]
            found = self.drafter.texts(self.session, self.longest)
            self.drawn[i] = found.tokens, found.logits
        tokens, logits = self.drawn[i]
        tokens = tokens[:count, :depth]
        n = max(len(until_end(branch, self.session.eos)) for branch in tokens.tolist())
        return tokens[:, :n], logits[:count, :n]

    def ballot(self, i, branches, top_m=4, depth=None):
        """The Ballot of the first branches at place i, cut to this depth; remembered."""
        asked = i, branches, top_m, depth
        if asked not in self.ballots:
            tokens, logits = self.branches(i, branches, depth)
            self.ballots[asked] = Ballot.of(tokens, logits, top_m)
        return self.ballots[asked]

    def agreed(self, proposal, i):
        """How many tokens of the proposal, from the first, the target would write at place i."""
        return len(os.path.commonprefix([proposal, self.line[i:]]))

    def proposal(self, key, i, depth=None):
        """The tokens that are proposed at place i: by a vote, a greedy draft or the best of four branches."""
        if key == 'sd greedy':
            chain, _ = self.block(tuple(self.line[:i]), Exact(GREEDY_DEPTHS[-1]), GREEDY_DEPTHS[-1])
            return [place.token for place in chain]
        eos = self.session.eos
        if key in self.votes:
            vote = self.votes[key]
            top_m = vote.top_m if vote.soft else 0
            return until_end(vote.fuse(self.ballot(i, vote.branches, top_m, depth)), eos)
        # oracle-top1: the branch that is right for longest
        tokens, _ = self.branches(i, 4, depth)
        best = max(tokens.tolist(), key=lambda branch: self.agreed(branch, i))
        return until_end(best, eos)

    def outcome(self, key, i, depth):
        """(tokens proposed at place i, how many of them the target would write); remembered."""
        asked = key, i, depth
        if asked not in self.outcomes:
            proposal = self.proposal(key, i, depth)
            self.outcomes[asked] = len(proposal), self.agreed(proposal, i)
        return self.outcomes[asked]

    def voted(self, key, depth):
        """{kept: draft tokens, cycles, positions: of the target} of the whole text with blocks of this depth.

        A cycle is a target pass. What one fused token is does not hang on those behind it, so that the
        longest proposal serves every depth. Only where weights are means over the branch each depth votes
        anew.
        """
        whole_branch = key in self.votes and self.votes[key].granularity == 'branch'
        counts = dict(kept=0, cycles=0, positions=0)
        i = 0
        while i < len(self.line):
            most = min(depth, self.room - i - 1)
            asked = most if whole_branch and most else self.longest
            proposed, right = self.outcome(key, i, asked)
            drafted = min(most, proposed)
            kept = min(most, right)
            counts['kept'] += kept
            counts['cycles'] += 1
            counts['positions'] += drafted + 1
            i += kept + 1
        return counts

    def checked(self, method, depth):
        """voted, and passes, by real cycles: for a method that asks the target before it votes.

        The method reads its branches here instead of sampling them; it serves one call.
        """
        def texts(session, n):
            place = len(session.tokens) - len(self.ids)
            tokens, logits = self.branches(place, method.branches, n)
            return Branches(tokens, None, logits, [])
        method.texts = texts
        counts = dict(kept=0, cycles=0, positions=0, passes=0)
        i = 0
        while i < len(self.line):
            passes, positions, tokens = self.cycle(method, i, min(depth, self.room - i - 1))
            kept = self.agreed(tokens, i)
            counts['kept'] += kept
            counts['cycles'] += 1
            counts['positions'] += positions
            counts['passes'] += passes
            i += kept + 1
        return counts

    def cycle(self, method, i, n):
        """(target passes, positions, tokens proposed) of one real cycle of a method at place i."""
        session = self.session
        full = session.target.model.full
        session.tokens = self.ids + self.line[:i]
        session.target.read(session.tokens[:-1], [], full, 0)       # what an earlier cycle would have read
        mark = session.mark()
        draft = method.guess(session, n)
        rows = Score(session, draft, full).logits                   # is lazy: now the target reads
        assert len(rows) == len(draft.tokens) + 1
        passes, positions, _ = session.spent(mark)['target/full']
        return passes, positions, draft.tokens

    def target_rows(self):
        """The target's logits [n, V] at every place of the text."""
        target = self.session.target
        return target.read(self.ids + self.line[:-1], [], target.model.full, len(self.line))

    def laws(self, rows, places):
        """{'q' or a vote of LAWS: {nats, same}}: its law of the first token beside the target's.

        nats: of the target's law under it, a cross-entropy; same: whether both have the same favourite. Sums
        over these places, where branches are drawn; rows: see target_rows.
        """
        found = {}
        for key in ('q', *LAWS):
            nats = 0.0
            same = 0
            for i in places:
                law = self.law(key, i)
                nats -= float(rows[i].softmax(-1) @ law.clamp(min=1e-30).log())
                same += int(law.argmax() == rows[i].argmax())
            found[key] = dict(nats=nats, same=same)
        return found

    def law(self, key, i):
        """A law [V] of the token at place i: q, or a vote's scores as shares, smoothed by SMOOTH of q."""
        _, logits = self.drawn[i]
        q = logits[0, 0].softmax(-1)
        if key == 'q':
            return q
        vote = VOTES[key]
        ballot = self.ballot(i, vote.branches, depth=1)
        names = ballot.names[0].to(q.device)                            # [K], some of them twice
        scores = vote.scores(ballot)[:, 0].sum(0)                       # [K]
        law = torch.zeros_like(q)
        law[names] = scores.to(law)
        law /= law.sum()
        return (1 - SMOOTH) * law + SMOOTH * q


class Tree:
    """Branches behind many places of a Reader's text, which grow together: a token of each in one pass.

    A token sees the text up to its place and its own branch. So many places take no more passes than one.
    """

    def __init__(self, reader, ends):
        """ends [rows]: behind how many positions of what the reader has read each branch stands."""
        self.model = reader.model
        self.ends = ends
        self.grown = 0
        n = len(reader.cache.ids)
        hidden = torch.arange(n, device=ends.device) >= ends[:, None]               # [rows, n]
        self.mask = torch.zeros_like(hidden, dtype=self.model.cos.dtype).masked_fill(hidden, -torch.inf)
        self.own = torch.full((len(ends), len(ends)), -torch.inf).to(self.mask).fill_diagonal_(0)
        attends = []
        for keys, values in reader.cache.stores:
            attends.append(functools.partial(self.attend, [(keys[:, :, :n], values[:, :, :n])]))
        self.path = replace(self.model.full, name='tree', attends=tuple(attends))

    def attend(self, seen, q, k, v, mask, carry):
        """kernels.attend; seen: (keys, values) of a layer, the text's and those of all tokens so far."""
        seen.append((k, v))
        keys, values = zip(*seen)
        return kernels.attend(q, torch.cat(keys, 2), torch.cat(values, 2), self.mask, carry)

    @torch.inference_mode()
    def append(self, ids):
        """Logits [rows, V] after one more token a branch; ids [rows]."""
        self.mask = torch.cat([self.mask, self.own], 1)
        hidden = self.model(ids[None], self.ends + self.grown, self.path)           # [1, rows, C]
        self.grown += 1
        return self.model.logits(hidden)[0]


class Foreseen(BranchReplay):
    """A BranchReplay that asks fewer votes, each at every place of the text: for pairs whose passes are dear.

    Places are sampled PLACES at a time, and only what the votes came to is kept of them: the branches' logits
    at one place are 30 MB where V is 152,000. What sd drafts greedily is read off one pass over the text;
    behind its first wrong token no end of sequence is looked for.
    """

    def __init__(self, pair, ids):
        super().__init__(pair, ids, Ecsv())
        self.votes = {name: VOTES[name] for name in VOTES_ELSEWHERE}
        draft = self.session.draft
        read = self.ids + self.line[:-1]
        self.draft_rows = draft.read(read, [], draft.model.full, len(self.line))    # [n, V], of every place
        self.favourites = self.draft_rows.argmax(-1).tolist()

    def foresee(self):
        """(places, laws) that the laws of the first token are sums over; outcomes are known from here on."""
        rows = self.target_rows()
        looked_at = 0
        sums = {key: dict(nats=0.0, same=0) for key in ('q', *LAWS)}
        for begin in range(0, len(self.line), PLACES):
            places = range(begin, min(begin + PLACES, len(self.line)))
            self.drawn = self.sampled(places)
            for key, i in itertools.product((*self.votes, 'oracle-top1'), places):
                self.outcome(key, i, self.longest)
            some = places[::LAW_EVERY]
            looked_at += len(some)
            for key, found in self.laws(rows, some).items():
                for name, number in found.items():
                    sums[key][name] += number
            self.ballots = {}
        self.drawn = {}
        return looked_at, sums

    def sampled(self, places):
        """{place: (tokens [B, n], raw logits [B, n, V])} of a range of places, in the passes of one."""
        B = self.drafter.branches
        session = self.session
        law = self.drafter.plan(session, self.longest).law
        first = self.draft_rows[places.start:places.stop]                           # [places, V]
        ends = send([len(self.ids) + i for i in places], first.device)
        tree = Tree(session.draft, ends.repeat_interleave(B))
        logits = [first.repeat_interleave(B, 0)]                                    # of each step [rows, V]
        tokens = [session.draw(law(logits[-1]))]
        while len(tokens) < self.longest:
            logits.append(tree.append(tokens[-1]))
            tokens.append(session.draw(law(logits[-1])))
        tokens = torch.stack(tokens, 1).unflatten(0, (-1, B))                       # [places, B, n]
        logits = torch.stack(logits, 1).unflatten(0, (-1, B))
        return dict(zip(places, zip(tokens, logits)))

    def proposal(self, key, i, depth=None):
        if key != 'sd greedy':
            return super().proposal(key, i, depth)
        drafted = until_end(self.favourites[i:], self.session.eos)
        right = self.agreed(drafted, i)
        if right < len(drafted) and drafted[right] not in self.session.eos:
            unknown = GREEDY_DEPTHS[-1] - right - 1
            return drafted[:right + 1] + [-1] * unknown         # never right, and no end
        return drafted[:right + 1]


def kept_by(record, keys):
    """{vote: what it keeps at every depth} of a BranchReplay."""
    found = {}
    for key in keys:
        depths = GREEDY_DEPTHS if key == 'sd greedy' else record.depths
        found[key] = by_depth({depth: record.voted(key, depth) for depth in depths})
    return found


@functools.cache
def every_vote(n):
    """VOTES, and those whose weights were fitted to other prompts of the lab, see fits."""
    votes = dict(VOTES)
    for name, weights in fits(n).items():
        votes[name] = Ecsv(**knobs_of_weights(weights))
    scaled = standard_weights(n)
    votes['standardised'] = Ecsv(**scaled)
    votes['prefix, standardised'] = Ecsv(align='prefix', **scaled)
    return votes


def vote_items(pair, n):
    """(Prompt, n) of all prompts: fits hang on n."""
    return [(prompt, n) for prompt in pair.texts(FAMILIES, n)]


def vote_row(pair, item):
    """What every vote keeps of a text at every depth, and the laws of the first token.

    places: how many the laws are sums over.
    """
    prompt, n = item
    if pair.is_embedded:
        record = BranchReplay(pair, prompt.ids)
        record.votes = every_vote(n)
        found = kept_by(record, ('sd greedy', *record.votes, 'oracle-top1'))
        places = len(record.drawn)
        laws = record.laws(record.target_rows(), record.drawn)
    else:
        record = Foreseen(pair, prompt.ids)
        places, laws = record.foresee()
        found = kept_by(record, ('sd greedy', *record.votes, 'oracle-top1'))
    return prompt.name | dict(tokens=len(record.line), votes=found, places=places, laws=laws)


NOISES = {
    'a 4-bit draft': dict(drafter=Ecsv(), rounded='draft'),
    'a 4-bit target': dict(drafter=Ecsv(), rounded='target'),
    'draft temperature 1.2': dict(drafter=Ecsv(draft_temperature=1.2)),
    'another seed': dict(drafter=Ecsv(), seed=1)}


def noise_rows(n):
    """A row a text and kind of noise, on a fifth of the texts; a 4-bit target writes another text."""
    prompts = EMBEDDED.texts(FAMILIES, max(2, n // 5))
    for name, how in NOISES.items():
        for prompt in tqdm(prompts, desc=name):
            record = BranchReplay(EMBEDDED, prompt.ids, **how)
            found = kept_by(record, ('sd greedy', 'sd sampled', 'ecsv'))
            yield prompt.name | dict(noise=name, tokens=len(record.line), votes=found)


SPOTS = {
    'spot': dict(),
    'spot, R = 2': dict(spots=2),
    'spot, R = 4': dict(spots=4),
    'spot, entropy': dict(policy='entropy'),
    'spot, agree_entropy': dict(policy='agree_entropy'),
    'spot, prefix': dict(align='prefix'),
    'spot, for ties alone': dict(gamma_r=0),
    'spot alone': dict(a_entropy=0, a_agree=0, a_self=0)}
SPOT_DEPTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24          # on both sides of every task's budget


def spot_rows(n):
    """A row a text: real cycles of ecsv-spot on half of the texts, of its variants on fewer.

    The fitted weights are those of all lessons, the weight of the target's margin among them.
    """
    every_lesson = sum(taught(n).values(), [])
    variants = SPOTS | {'spot, fitted weights': knobs_of_weights(fit_weights(every_lesson))}
    for prompt in tqdm(EMBEDDED.texts(FAMILIES, max(2, n // 2)), desc='spot checks'):
        record = BranchReplay(EMBEDDED, prompt.ids, Ecsv())
        found = {}
        for key, knobs in variants.items():
            if key == 'spot' or prompt.place < max(2, n // 12):
                runs = {depth: record.checked(EcsvSpot(**knobs), depth) for depth in SPOT_DEPTHS}
                found[key] = by_depth(runs)
        yield prompt.name | dict(tokens=len(record.line), votes=found)


# ------------------------------------------------------------------------------------ weights fitted to votes

SIGNS = 'a_entropy', 'a_agree', 'a_self', 'a_spot'
FITTED = 12             # seed of the prompts that weights are fitted to


class Lesson(NamedTuple):
    """What a text teaches about votes: N tokens of B branches."""
    signs: torch.Tensor         # [4, B, N] the summands of r, before their weights
    right: torch.Tensor         # [B, N] whether the target writes this token


def lessons(record):
    """The Lesson of a BranchReplay: at the positions that a vote of four branches decides, each token once.

    So far as the vote is right, and where it first is wrong. The last summand, the target's margin, is asked
    for where the branches disagree most.
    """
    rows = record.target_rows()
    line = record.line
    parts = []
    i = 0
    while i < len(line):
        ballot = record.ballot(i, 4, top_m=0)
        decided = record.agreed(Ecsv().fuse(ballot), i) + 1
        n = min(decided, ballot.tokens.shape[1], len(line) - i)
        ballot.ask(rows[i:i + n], ballot.doubtful('disagreement', 1, n))
        tokens = ballot.tokens[:, :n]
        parts.append(Lesson(signs_of(ballot)[..., :n], tokens == torch.tensor(line[i:i + n])))
        i += n
    return gathered(parts)


def signs_of(ballot):
    """The summands of r [4, B, n] before their weights: r itself where one weight is 1 and the others 0."""
    found = []
    for sign in SIGNS:
        alone = dict.fromkeys(SIGNS, 0.0) | {sign: 1.0}
        found.append(Ecsv(**alone).weights(ballot).log())
    return torch.stack(found)


def gathered(parts):
    """One Lesson of several."""
    signs, right = zip(*parts)
    return Lesson(torch.cat(signs, -1), torch.cat(right, -1))


def loss_of(weights, lesson):
    """Mean nats of a Lesson under the odds exp(r) that a token is right; weights [5], the last a bias."""
    r = torch.tensordot(weights[:-1], lesson.signs.double(), 1) + weights[-1]
    return torch.nn.functional.binary_cross_entropy_with_logits(r, lesson.right.double())


def fit_weights(parts, l2=1e-3, steps=500):
    """ECSV's four weights, as SIGNS has them, and a bias: [5], by logistic regression with an L2 penalty.

    With them exp(r) are the odds that a branch's token is the target's; the bias turns no vote. What the
    reviews of the proposal standardise the fit scales. None is below 0, which the knobs demand.
    """
    lesson = gathered(parts)
    weights = torch.zeros(len(SIGNS) + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty = l2 * weights[:-1].square().sum()
        (loss_of(weights, lesson) + penalty).backward()
        optimizer.step()
        weights.data[:-1].clamp_(min=0)
    return weights.detach()


def knobs_of_weights(weights):
    """Ecsv's knobs of fitted weights [5]."""
    return dict(zip(SIGNS, weights.tolist()))


class Fit(NamedTuple):
    """What weights are fitted to: the first texts of these tasks."""
    families: tuple
    texts: int          # of each task; None: half of what there is
    l2: float


FITS = {
    'fitted': Fit(FAMILIES, None, 1e-3),
    'fitted to 2 of math': Fit(('math',), 2, 0.0),
    'fitted to 2 of math, L2': Fit(('math',), 2, 1e-3),
    'fitted to 2 of story': Fit(('story',), 2, 0.0)}


@functools.cache
def taught(n):
    """{task: its Lessons}, of a quarter as many prompts as the votes are tried on, and other ones."""
    found = {family: [] for family in FAMILIES}
    for prompt in tqdm(EMBEDDED.texts(FAMILIES, max(4, n // 4), FITTED), desc='lessons'):
        found[prompt.family].append(lessons(BranchReplay(EMBEDDED, prompt.ids, Ecsv())))
    return found


def texts_of(fit, n):
    """How many texts of a task a Fit sees."""
    return fit.texts or len(taught(n)['math']) // 2


@functools.cache
def fits(n):
    """{name in FITS: weights [5]}, without the target's margin: no vote of these asks the target first."""
    blind = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None, None]
    found = {}
    for name, fit in FITS.items():
        seen = []
        for family in fit.families:
            for lesson in taught(n)[family][:texts_of(fit, n)]:
                seen.append(Lesson(lesson.signs * blind, lesson.right))
        found[name] = fit_weights(seen, fit.l2)
    return found


def default_weights():
    """{knob: what it is unless set}."""
    return {sign: getattr(Ecsv, sign) for sign in SIGNS}


def standard_weights(n):
    """The default weights of standardised features, as knobs of raw ones, by the texts that 'fitted' sees.

    A weight over its feature's deviation: the means would add the same to every r, which turns no vote.
    """
    seen = []
    for family in FAMILIES:
        seen += taught(n)[family][:texts_of(FITS['fitted'], n)]
    deviations = gathered(seen).signs.flatten(1).double().std(1)                # [4]
    weights = default_weights()
    for sign, deviation in zip(SIGNS, deviations.tolist()):
        weights[sign] /= deviation
    return weights


def fit_rows(n):
    """The default weights, the same for standardised features, then a row a fit.

    texts: it was fitted to the first so many of these tasks.
    """
    for name, weights in ('default', default_weights()), ('standardised', standard_weights(n)):
        yield dict(fit=name, families=[], texts=0, l2=None, bias=None, weights=weights)
    for name, weights in fits(n).items():
        fit = FITS[name]
        yield dict(fit=name, families=fit.families, texts=texts_of(fit, n), l2=fit.l2,
                   weights=knobs_of_weights(weights), bias=float(weights[-1]))


def lesson_items(pair, n):
    """(Prompt, n) of the embedded pair's texts that weights are fitted to; elsewhere of a few texts."""
    if pair.is_embedded:
        prompts = pair.texts(FAMILIES, max(4, n // 4), FITTED)
    else:
        prompts = pair.texts(FAMILIES, max(2, n // 20))
    return [(prompt, n) for prompt in prompts]


def lesson_row(pair, item):
    """The errors of a text that weights are fitted to, or that none has seen; elsewhere there are no fits."""
    prompt, n = item
    if pair.is_embedded:
        return prompt.name | errors(taught(n)[prompt.family][prompt.place], fits(n))
    return prompt.name | errors(lessons(BranchReplay(pair, prompt.ids, Ecsv())), {})


def errors(lesson, found):
    """The errors of a Lesson's branches, and its log losses under the weights found, {fit: [5]}.

    tokens: of each branch; wrong_together [B, B]: where both branches err, on the diagonal where one does;
    nats: summed over the tokens of all branches.
    """
    wrong = (~lesson.right).double()
    nats = {}
    for name, weights in found.items():
        nats[name] = float(loss_of(weights, lesson)) * lesson.right.numel()
    return dict(tokens=lesson.right.shape[1], wrong_together=(wrong @ wrong.T).long().tolist(),
                all_wrong=int(wrong.prod(0).sum()), nats=nats)


# -------------------------------------------------------------------------------------------------- real runs

RUN_DEPTHS = 2, 4, 8    # so far apart that a mix of two meets the budget of sd at 4
RUNS_ELSEWHERE = {      # at temperature 0, where every draft of sd is greedy: (kind, depths)
    'sd': (Exact, (4,)),
    'ecsv': (Ecsv, (2, 4)),
    'prefix': (partial(Ecsv, align='prefix'), (2, 4)),
    'spot': (EcsvSpot, (2, 4))}


def run_items(pair, n):
    """(Prompt, temperature): a sixth of the texts at 0; on the embedded pair a third at 1, too."""
    found = [(prompt, 0.0) for prompt in pair.texts(FAMILIES, max(2, n // 6))]
    if pair.is_embedded:
        found += [(prompt, 1.0) for prompt in pair.texts(FAMILIES, max(2, n // 3))]
    return found


def run_row(pair, item):
    """Real runs of a text by kind and depth; at temperature 0 every draft of sd is greedy.

    For what needs them: the vote above temperature 0, branches verified in turn, a second draft, seconds. A
    text's runs are taken in turn, so that other work on the processor slows all of them.
    """
    prompt, temperature = item
    kinds = RUNS_ELSEWHERE
    if pair.is_embedded:
        kinds = embedded_runs()
        if temperature == 0:
            kinds.pop('sd greedy')
    session = pair.session(prompt.ids)
    found = {}
    for name, (kind, depths) in kinds.items():
        runs = {}
        for depth in depths:
            cycles = pair.written(session, prompt.ids, kind(depth), temperature, seed=prompt.place)
            runs[depth] = run_counts(session, prompt.ids, cycles)
        found[name] = by_depth(runs)
    return prompt.name | dict(temperature=temperature, votes=found)


def embedded_runs():
    """{name: (kind, depths)} of what is run on the embedded pair."""
    second = str(File(rounded_draft().name) / 'draft')
    kinds = {'sd': Exact, 'sd greedy': partial(Exact, draft_temperature=0), 'ecsv': Ecsv,
             'sd-multi': SdMulti, 'sd-tree': SdTree,
             'ecsv, 4-bit second draft': partial(TwoDrafts, second=second)}
    if is_there('mid'):
        kinds['ecsv, mid as second draft'] = partial(TwoDrafts, second=str(MODELS / 'mid'))
    return {name: (kind, RUN_DEPTHS) for name, kind in kinds.items()}


@functools.cache
def rounded_draft():
    """The temporary folder of a 4-bit copy of the embedded draft; it goes with the process."""
    home = tempfile.TemporaryDirectory()
    write_copy(MODELS / 'draft', File(home.name) / 'draft')
    return home


def run_counts(session, ids, cycles):
    """What a real run came to. nats: of its text under the target; seconds: measured.

    by_kept: in how many cycles 0, 1, ... draft tokens were kept.
    """
    tokens = tokens_of(cycles)
    counts = dict(kept=0, cycles=len(cycles), tokens=len(tokens), positions=0, passes=0, seconds=0.0,
                  judged=0)
    by_kept = [0] * (RUN_DEPTHS[-1] + 1)
    for cycle in cycles:
        passes, positions, _ = cycle.passes['target/full']
        counts['kept'] += cycle.accepted
        counts['positions'] += positions
        counts['passes'] += passes
        counts['seconds'] += cycle.seconds
        counts['judged'] += len(cycle.judged)
        by_kept[cycle.accepted] += 1
    target = session.target
    rows = target.read(ids + tokens[:-1], [], target.model.full, len(tokens))
    return counts | dict(nats=-float(token_logps(rows, tokens).sum()), by_kept=by_kept)


CHECKS = {              # at temperature 0
    'sd greedy': partial(Exact, draft_temperature=0),
    'ecsv': Ecsv,
    'ecsv-spot': EcsvSpot,
    'ecsv-checked': EcsvChecked}
CHECK_DEPTHS = 4, 8     # elsewhere the first alone


def checked_items(pair, n):
    return pair.texts(FAMILIES, n)


def checked_row(pair, prompt):
    """{method: {quantity: a number a depth}} of real runs at temperature 0.

    passes, positions: the target's; drafts, drafted: the draft's; bytes: of a draft pass, in the target's;
    texts: different ones that were written, 1 but for ties.
    """
    depths = CHECK_DEPTHS if pair.is_embedded else CHECK_DEPTHS[:1]
    session = pair.session(prompt.ids)
    written = set()
    found = {}
    for name, kind in CHECKS.items():
        runs = {}
        for depth in depths:
            cycles = pair.written(session, prompt.ids, kind(depth), seed=prompt.place)
            runs[depth] = check_counts(cycles)
            written.add(tuple(tokens_of(cycles)))
        found[name] = by_depth(runs)
    target, draft = (pair.network(role)[0] for role in pair.roles)
    share = draft.read_bytes(draft.full) / target.read_bytes(target.full)
    return prompt.name | dict(texts=len(written), bytes=share, votes=found)


def check_counts(cycles):
    """What a run came to, of both readers."""
    counts = dict(kept=0, cycles=len(cycles), tokens=len(tokens_of(cycles)), positions=0, passes=0, drafts=0,
                  drafted=0)
    for cycle in cycles:
        passes, positions, _ = cycle.passes.get('target/full', (0, 0, 0))
        drafts, drafted, _ = cycle.passes.get('draft/full', (0, 0, 0))
        counts['kept'] += cycle.accepted
        counts['passes'] += passes
        counts['positions'] += positions
        counts['drafts'] += drafts
        counts['drafted'] += drafted
    return counts


# ---------------------------------------------------------------------------------------------- side branches

GAMMAS = 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40       # draft tokens of a block
GAMMAS_ELSEWHERE = GAMMAS[:6]


class Chain(NamedTuple):
    """What the draft writes greedily behind a place of a text."""
    tokens: list
    confidence: list        # of each token the largest q at temperature 1
    seconds: list           # of each token the draft's second choice


def chains(session, ids, line, depth):
    """[n + 1] Chains of `depth` tokens, behind each place of a text (ids) that begins with a prompt (ids).

    A pass for each depth, over all places together. No end of sequence is looked for.
    """
    draft = session.draft
    rows = draft.read(ids + line, [], draft.model.full, len(line) + 1)                  # [n + 1, V]
    tree = Tree(draft, torch.arange(len(ids), len(ids) + len(line) + 1, device=rows.device))
    steps = []
    while True:
        q, names = rows.softmax(-1, torch.promote_types(rows.dtype, torch.float32)).topk(2)
        steps.append(fetch(names, q[:, 0]))
        if len(steps) == depth:
            break
        rows = tree.append(names[:, 0])
    names = torch.stack([names for names, _ in steps], 1)                               # [n + 1, depth, 2]
    confidence = torch.stack([confidence for _, confidence in steps], 1)
    return [Chain(*row) for row in zip(names[..., 0].tolist(), confidence.tolist(), names[..., 1].tolist())]


@dataclass
class Lowest(Hedge):
    """A single side branch, where confidence is lowest, if it is below a limit."""
    below: float = 1.0

    def doubtful(self, confidence):
        least = min(confidence)
        return [confidence.index(least)] if least < self.below else []


HEDGES = {
    'sd': Hedge(least=1),
    'lowest, side 1': Lowest(side=1),
    'lowest, side 2': Lowest(side=2),
    'lowest, side 4': Lowest(side=4),
    'lowest below 0.5, side 2': Lowest(side=2, below=0.5),
    'side 1': Hedge(),
    'side 2': Hedge(side=2),
    'side 4': Hedge(side=4),
    'side 1, from 0.03': Hedge(least=0.03),
    'side 2, from 0.3': Hedge(side=2, least=0.3),
    'side 1, everywhere': Hedge(least=0)}


class HedgeReplay:
    """What becomes of a text's blocks under a Hedge at temperature 0, where the text is the target's own.

    A side branch matters only where its second choice is what the text goes on with: what the draft writes
    behind it is then what it writes behind the text. So Chains behind all places say what becomes of any.
    """

    def __init__(self, pair, ids, line, gammas):
        self.session = pair.session(ids)
        self.line = line
        self.room = pair.max_new
        self.eos = self.session.eos
        self.chains = chains(self.session, ids, line, gammas[-1])

    def block(self, i, n):
        """At most n tokens that are drafted behind place i."""
        return until_end(self.chains[i].tokens[:n], self.eos)

    def agreed(self, tokens, i):
        """How many tokens, from the first, the target would write at place i."""
        return len(os.path.commonprefix([tokens, self.line[i:]]))

    def sides(self, method, i, n):
        """{place in a block of n tokens: (second choice, tokens behind it)} of the block behind place i."""
        chain = self.chains[i]
        found = {}
        places = method.doubtful(chain.confidence[:n]) if n else []
        for place in places:
            second = chain.seconds[place]
            most = min(method.side, self.room - i - place - 1) - 1
            found[place] = second, 0 if second in self.eos else most
        return found

    def run(self, method, gamma):
        """Counts of the whole text; gamma in the place of the method's own.

        As hedge_counts has them. An end of sequence in a side branch that is not taken is not foreseen: its
        rest counts whole.
        """
        counts = dict.fromkeys(HEDGE_COUNTS, 0)
        i = 0
        while i < len(self.line):
            block = self.block(i, min(gamma, self.room - i - 1))
            sides = self.sides(method, i, len(block))
            rests = sum(rest for _, rest in sides.values())
            kept = self.agreed(block, i)
            failed = kept < len(block)
            counts['cycles'] += 1
            counts['drafts'] += len(block) + rests
            counts['positions'] += 1 + len(block) + len(sides) + rests
            counts['failures'] += failed
            if failed and kept in sides:
                counts['there'] += 1
                second, rest = sides[kept]
                if second == self.line[i + kept]:
                    counts['mended'] += 1
                    kept += 1
                    kept += self.agreed(self.block(i + kept, rest), i + kept)
            counts['kept'] += kept
            i += kept + 1
        return counts


# kept: draft tokens; drafts: the draft's passes; positions: the target's, in a pass a cycle; failures: blocks
# with a rejected token; there: those with a side branch at its place; mended: those in which it was right
HEDGE_COUNTS = 'kept', 'cycles', 'drafts', 'positions', 'failures', 'there', 'mended'
SAMPLED = {             # run at temperature 1, at each of RUN_DEPTHS; where a draft is greedy, it says so
    'sd': Exact,
    'side 1': Hedge,
    'side 2': partial(Hedge, side=2),
    'sd greedy': partial(Exact, draft_temperature=0),
    'side 1 greedy': partial(Hedge, draft_temperature=0),
    'side 2 greedy': partial(Hedge, side=2, draft_temperature=0)}


def hedge_counts(cycles):
    """HEDGE_COUNTS of a real run."""
    counts = dict.fromkeys(HEDGE_COUNTS, 0)
    for cycle in cycles:
        rejected = [verdict for verdict in cycle.judged if not verdict['kept']]
        seconds = [verdict for verdict in cycle.judged if verdict.get('second')]
        counts['kept'] += cycle.accepted
        counts['cycles'] += 1
        counts['positions'] += cycle.passes['target/full'][1]
        if 'draft/full' in cycle.passes:
            counts['drafts'] += cycle.passes['draft/full'][0]
        counts['failures'] += bool(rejected)
        counts['there'] += len(seconds)
        counts['mended'] += sum(verdict['kept'] for verdict in seconds)
    return counts


def hedge_items(pair, n):
    """(Prompt, temperature): every text at 0; on the embedded pair a fifth at 1, too."""
    found = [(prompt, 0.0) for prompt in pair.texts(FAMILIES, n)]
    if pair.is_embedded:
        found += [(prompt, 1.0) for prompt in pair.texts(FAMILIES, max(2, n // 5))]
    return found


def hedge_row(pair, item):
    """HEDGE_COUNTS of a text by setting and depth: replayed at temperature 0, of real runs above it.

    tokens: of the text, there those of the run.
    """
    prompt, temperature = item
    found = {}
    if temperature == 0:
        gammas = GAMMAS if pair.is_embedded else GAMMAS_ELSEWHERE
        line = pair.own_text(prompt.ids)
        replay = HedgeReplay(pair, prompt.ids, line, gammas)
        for name, method in HEDGES.items():
            found[name] = by_depth({gamma: replay.run(method, gamma) for gamma in gammas})
        return prompt.name | dict(temperature=temperature, tokens=len(line), votes=found)
    return prompt.name | dict(temperature=temperature, votes=hedge_runs(pair, prompt, temperature, SAMPLED))


def hedge_runs(pair, prompt, temperature, kinds):
    """{kind: HEDGE_COUNTS, and tokens, at each of RUN_DEPTHS} of real runs from a prompt."""
    session = pair.session(prompt.ids)
    found = {}
    for name, kind in kinds.items():
        runs = {}
        for gamma in RUN_DEPTHS:
            cycles = pair.written(session, prompt.ids, kind(gamma), temperature, seed=prompt.place)
            runs[gamma] = dict(tokens=len(tokens_of(cycles))) | hedge_counts(cycles)
        found[name] = by_depth(runs)
    return found


TREES = {               # in one pass each, at temperature 1
    'sd': Exact,
    'side 1': Hedge,
    'sd-tree, B = 2': partial(SdTree, branches=2, draft_temperature=1.0, draft_top_p=1.0),
    'sd-tree': partial(SdTree, draft_temperature=1.0, draft_top_p=1.0)}


def tree_rows(n):
    """Real runs of a fifth of the texts whose blocks are trees that the target reads at once."""
    for prompt in tqdm(EMBEDDED.texts(FAMILIES, max(2, n // 5)), desc='trees'):
        yield prompt.name | dict(temperature=1.0, votes=hedge_runs(EMBEDDED, prompt, 1.0, TREES))


# ------------------------------------------------------------------------------------------------------ costs

def pass_items(pair, n):
    return list(range(1, MOST_POSITIONS))


def pass_row(pair, depth):
    """Modelled seconds of a cycle of sd with so many draft tokens."""
    return dict(depth=depth, seconds=modelled_seconds(pair, [depth]))


def one_row(pair, n):
    return [0]


def pass_cost_row(pair, _):
    """Seconds of a draft pass, and of target passes over 0, 1, 2, ... positions."""
    draft, target = pass_costs(pair)
    return dict(draft=draft, target=target)


def cost_items(pair, n):
    return list(range(50))


def cost_row(pair, item):
    """Seconds for a vote of four branches of four, and for a target pass.

    The draft reads before each vote, as in a cycle.
    """
    line = [1] * 100
    session = cost_session(pair)
    target = session.target
    generator = torch.Generator().manual_seed(item)
    logits = torch.randn(4, 4, target.model.vocab, generator=generator).to(target.model.cos)
    tokens = torch.arange(16).view(4, 4).to(logits.device)
    session.draft.read(line, [], session.draft.model.full, 1)
    begin = clock(target)
    Ecsv().fuse(Ballot.of(tokens, logits, 0))
    middle = clock(target)
    target.read(line, [], target.model.full, 1)
    return dict(vote=middle - begin, target_pass=clock(target) - middle)


@functools.cache
def cost_session(pair):
    return pair.session([1] * 100)


DEAR = 'models whose passes take a millisecond'
RECORDS = dict(
    votes=Record(vote_items, vote_row),
    noise=LabRecord(EMBEDDED.roles, noise_rows, DEAR),
    spots=LabRecord(EMBEDDED.roles, spot_rows, DEAR),
    fits=LabRecord(EMBEDDED.roles, fit_rows, DEAR),
    lessons=Record(lesson_items, lesson_row),
    runs=Record(run_items, run_row, lab_models=('mid',)),
    checked=Record(checked_items, checked_row),
    passes=Record(pass_items, pass_row),
    vote_cost=Record(cost_items, cost_row),
    hedged=Record(hedge_items, hedge_row),
    trees=LabRecord(EMBEDDED.roles, tree_rows, DEAR),
    pass_costs=Record(one_row, pass_cost_row))


# -------------------------------------------------------------------------------------------------- a picture

class Heard(EcsvSpot):
    """ecsv-spot that remembers the votes of a cycle: (Ballot, weights [B, n], the fused tokens)."""

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
    for cycle in decode(session, method):
        votes = list(method.votes)
        method.votes.clear()
        if not votes:                   # no room was left to draft
            continue
        lines = cycle_lines(cycle, votes, word)
        if votes[0][-1] != votes[-1][-1]:
            break
    return lines


def cycle_lines(cycle, votes, word):
    """Lines on a cycle: its branches, the vote before and after the check, what was committed, weights."""
    ballot, before, vote = votes[0]
    _, after, fused = votes[-1]
    texts = {}
    for b, tokens in enumerate(ballot.tokens.tolist(), 1):
        texts[f'branch {b}'] = tokens
    texts |= dict(vote=vote, fused=fused, committed=cycle.tokens)
    rows = []
    for name, tokens in texts.items():
        rows.append((name, [word(token) for token in tokens]))
    lines = columns(rows)
    for j in ballot.verifier:
        shown = []
        for numbers in (before, ballot.margins, after):
            shown.append(' '.join(f'{x:.2f}' for x in numbers[:, j].tolist()))
        lines.append('position {}: weights {}; margins {}; weights then {}'.format(j + 1, *shown))
    passes, positions, _ = cycle.passes['target/full']
    return lines + [f'{passes} target passes over {positions} positions']


def main(text='One day Max the bear went to the hill with a rope.'):
    tokenizer = EMBEDDED.tokenizer

    def word(token):
        return tokenizer.decode([token], skip_special_tokens=False).strip() or '_'
    session = EMBEDDED.session(tokenizer.encode(text).ids)
    session.generator = torch.Generator().manual_seed(0)
    print(*voted_cycle(session, word), sep='\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
