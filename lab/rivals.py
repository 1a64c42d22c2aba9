"""Baselines and controls, written on the methods' own seam and entered in the same METHODS."""
import copy
import functools
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp, inf, log
from statistics import fmean as mean

import torch
import torch.nn.functional as F

import kernels
from model import Reader, load, same_vocabulary
from verify import (CONTROLLERS, METHODS, SELECT, Ballot, CmAsd, Draft, Ecsv, Exact, Fixed, Online, Score,
                    Sparse, SpecGuard, Stepwise, ViaSd, branch, finite, knob, loglikes, overlap, probs,
                    require, residual, violation)


@dataclass
class Lenient(Exact):
    """Speculative decoding that keeps a draft token with min(1, p / (lenience q)); 1 is exact, less is LOSSY.

    The replacement is drawn from the exact residual. Source: Leviathan et al. 2023, appendix A.5.
    """
    lenience: float = knob(0.5, 1e-6, 1)

    @property
    def lossless(self):
        return super().lossless and self.lenience == 1

    def kept(self, score, i):
        p, q = score.pq[i]
        return min(1.0, p / (self.lenience * q))


@dataclass
class Typical(Exact):
    """Keeps a draft token that the target finds typical: p(x) > min(epsilon, delta exp(-H(p))). LOSSY.

    A rejected token is replaced by a fresh sample of p. With epsilon 1 and delta inf nothing is kept: plain
    decoding. The defaults are those of Medusa's evaluation; its functions' own defaults have the two numbers
    swapped. Source: Cai et al. 2024 (Medusa), section 2.3.1.
    """
    epsilon: float = knob(0.09, 0, 1)       # hard threshold, a probability
    delta: float = knob(0.3, 0, inf)        # scales the threshold that falls with entropy

    @property
    def lossless(self):
        return super().lossless and self.epsilon == 1 and self.delta == inf

    def threshold(self, score, i):
        p = score.p[i]
        return min(self.epsilon, self.delta * float(torch.special.entr(p).sum().neg().exp()))

    def kept(self, score, i):
        return float(score.pq[i][0] > self.threshold(score, i))

    def settle(self, score, i):
        return score.p[i]


METHODS.update(lenient=Lenient, typical=Typical)


# --------------------------------------------------------------- beside CM-ASD: controllers, acceptance rules

class Learner(Fixed):
    """A controller that looks back, which is always safe: before each block, at what became of the last."""

    def __init__(self, method):
        super().__init__(method)
        self.size, self.last = method.gamma, None

    def block(self, session, spare=1):
        if self.last:
            begin, draft = self.last
            self.learn(draft, len(os.path.commonprefix([draft.tokens, session.tokens[begin:]])))
        draft = super().block(session, spare)
        self.last = (len(session.tokens), copy.copy(draft)) if draft.tokens else None   # accept may extend it
        return draft

    def length(self, session):
        return self.size

    def learn(self, draft, kept):
        """Takes in the last draft and how many of its tokens, from the first, the text has kept."""


class Lagged(Learner):
    """CM-ASD's window from the mean confidence of the block before; the first block is the longest."""

    def __init__(self, method):
        super().__init__(method)
        self.rule = Online(method).rule
        self.size = self.rule.k_max

    def learn(self, draft, kept):
        if draft.logits is not None:
            self.size = self.rule.window(mean(self.rule.confidence(draft.logits)))


class ClosedLoop(Learner, Online):
    """CM-ASD's window, its alpha times a moving average of the blocks' acceptance rates.

    The paper speaks of a feedback-controlled loop and gives no feedback: this is ours.
    """
    rate = 1.0

    def length(self, session):
        return self.rule.k_max

    def learn(self, draft, kept):
        self.rate = 0.5 * self.rate + 0.5 * kept / len(draft.tokens)
        self.rule = copy.copy(Online(self.method).rule)
        self.rule.alpha *= self.rate


class Probe(Online):
    """CM-ASD read literally: drafts k_max, averages over all of them, then drops what exceeds the window.

    Biased when sampling: whether a token stays hangs on tokens that are dropped.
    """
    causal = False

    def more(self, session, tokens, logits):
        return True

    def block(self, session, spare=1):
        d = super().block(session, spare)
        if d.logits is None:
            return d
        n = self.rule.window(mean(self.rule.confidence(d.logits)))
        known = None if d.known is None else d.known[:n + 1]
        return replace(d, tokens=d.tokens[:n], q=d.q[:n], logits=d.logits[:n], known=known)


class Confident(Learner):
    """At most 20 tokens; stops behind one that the draft gives less than `limit`, 0.4.

    Source: Hugging Face transformers, ConfidenceCriteria with the default settings.
    """
    limit, most = 0.4, 20

    def length(self, session):
        return self.most

    def more(self, session, tokens, logits):
        q = logits[-1].softmax(-1).gather(-1, tokens[-1][..., None])
        return float(q.mean()) >= self.limit


class Heuristic(Learner):
    """Starts at gamma; 2 more after a block that was kept whole, else 1 less, but 1 at least.

    Source: Hugging Face transformers, num_assistant_tokens_schedule 'heuristic'.
    """

    def learn(self, draft, kept):
        self.size = self.size + 2 if kept == len(draft.tokens) else max(1, self.size - 1)


class Roc(Confident):
    """Confident, its limit fitted to what was judged so far: the one with the least fpr + 3 fnr on the ROC.

    Source: Hugging Face transformers, AssistedCandidateGenerator (there the curve is scikit-learn's).
    """

    def __init__(self, method):
        super().__init__(method)
        self.seen = []                      # (q of the token, whether it was kept) of every judged token

    def learn(self, draft, kept):
        if draft.logits is None:
            return
        q = draft.logits.softmax(-1).gather(-1, torch.tensor(draft.tokens, device=draft.q.device)[:, None])
        self.seen += [(x, i < kept) for i, x in enumerate(q[:kept + 1, 0].tolist())]
        good, bad = [x for x, k in self.seen if k], [x for x, k in self.seen if not k]
        if len(self.seen) > 5 and good and bad:
            cost = lambda t: sum(x >= t for x in bad) / len(bad) + 3 * sum(x < t for x in good) / len(good)
            self.limit = min(sorted({x for x, _ in self.seen}, reverse=True), key=cost)


class MovingAverage(Confident):
    """Confident, its limit steered so that the moving average of the acceptance rate comes to 0.9.

    The limit does not fall after a block of full length. Source: Zhang et al. 2023 (Draft & Verify), adaptive
    draft exiting, with the constants of its public code.
    """
    limit, most, rate = 0.6, 8, 0.0

    def learn(self, draft, kept):
        n = len(draft.tokens)
        self.rate = 0.5 * self.rate + 0.5 * kept / n
        step = 0.01 if self.rate < 0.9 else 0.0 if n == self.most else -0.01
        self.limit = min(1.0, max(0.0, self.limit + 0.1 * step))


class Oracle(Fixed):
    """Knows the target's greedy text and drafts until the first wrong token; its passes are not counted."""
    text = ()

    def length(self, session):
        require(session.temperature == 0, 'controller', 'oracle', 'another one above temperature 0')
        if list(self.text[:len(session.tokens)]) != session.tokens:
            reader = session.target.fork(1, session.room + 1)
            reader.log, self.text = [], list(session.tokens)
            for _ in range(session.room):
                self.text.append(int(reader.read(self.text, [], reader.model.full, 1)[0].argmax()))
        self.begin = len(session.tokens)
        return session.room

    def more(self, session, tokens, logits):
        return int(tokens[-1][0]) == self.text[self.begin + len(tokens) - 1]


CONTROLLERS.update({
    'lagged': Lagged, 'closed-loop': ClosedLoop, 'probe': Probe, 'hf-confidence': Confident,
    'hf-heuristic': Heuristic, 'hf-roc': Roc, 'moving-average': MovingAverage, 'oracle': Oracle})


@dataclass
class CmAsdProb(CmAsd):
    """CM-ASD that compares tau with p(x) itself: where the target is flat even its favourite fails. LOSSY."""

    @property
    def lossless(self):
        return False

    def kept(self, score, i):
        p = probs(score.logits[i])
        return float(p[score.draft.tokens[i]] >= self.threshold(score, i))

    def settle(self, score, i):
        return score.p[i]


@dataclass
class CmAsdSpecDec(CmAsdProb):
    """CM-ASD with SpecDec's rule: among the target's top_beta tokens and within tolerance of the best. LOSSY.

    The tolerance, in nats, takes tau's place: only the block length adapts. Source: Xia et al. 2023.
    """
    top_beta: int = knob(5, 1)
    tolerance: float = knob(3.0, 0, inf)    # nats

    def threshold(self, score, i):
        return exp(-self.tolerance)

    def kept(self, score, i):
        z, x = score.logits[i], score.draft.tokens[i]
        return float(int((z > z[x]).sum()) < self.top_beta and float(z.max() - z[x]) <= self.tolerance)


@dataclass
class CmAsdTypical(CmAsdProb):
    """CM-ASD with a typical threshold: p(x) > min(tau, delta exp(-H(p))), at temperature 1. LOSSY."""
    delta: float = knob(0.3, 0, inf)

    def kept(self, score, i):
        p = probs(score.logits[i])
        limit = self.delta * float(torch.special.entr(p).sum().neg().exp())
        return float(p[score.draft.tokens[i]] > min(self.threshold(score, i), limit))


def thinned_swiglu(x, mlp, carry, how):
    """The feed-forward with each row's channels dropped by lot, the same at all its positions.

    how: (share dropped, generator). A row is one network sampled; what is left is scaled up to the same mean.
    """
    share, generator = how
    h = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)                                       # [B, T, F]
    left = torch.empty_like(h[:, :1]).bernoulli_(1 - share, generator=generator)
    return mlp.down_proj(h * left / (1 - share)), carry


@dataclass
class CmAsdDropout(CmAsd):
    """CM-ASD whose tau hangs on how much thinned copies of the draft differ about each token. LOSSY.

    The block is drafted as usual, and C of one pass closes it. Then `rows` copies of the draft, each without
    other channels, read it once more: C = 1 - sd / mean of their q(x), over the most that this can be. The
    text before the block is not read so; and a draft that was trained without dropout, as the embedded one,
    does not give samples of a posterior. Source: Gal & Ghahramani 2016; Sen et al. 2025 leave it open.
    """
    rows: int = knob(8, 2, 256)             # samples; each reads one position for every draft token
    drop: float = knob(0.1, 0, 0.99)        # share of the channels of every feed-forward

    def propose(self, session):
        draft = super().propose(session)
        if draft.tokens:
            q = self.samples(session, draft.tokens)
            sd, average = q.std(0, correction=0), q.mean(0).clamp(min=1e-30)
            sure = 1 - sd / average / (self.rows - 1) ** 0.5    # that large if all but one sample give 0
            each = zip(sure.clamp(0, 1).tolist(), average.tolist())
            draft.notes = [dict(confidence=c, mean=m) for c, m in each]
        return draft

    def samples(self, session, tokens):
        """q(x) [rows, n] at temperature 1 of the tokens that were just drafted."""
        reader = session.draft or session.target
        path = reader.model.full if session.draft else session.slim
        dense = kernels.swiglu in path.ffns
        require(dense, 'drop', self.drop, 'a draft with a feed-forward that is no mixture of experts')
        thin = partial(thinned_swiglu, how=(self.drop, session.generator))
        path = replace(path, name=f'{path.name} dropout',
                       ffns=tuple(thin if f is kernels.swiglu else f for f in path.ffns))
        line = torch.tensor([session.tokens[-1:] + tokens[:-1]], device=reader.model.cos.device)
        logits = reader.fork(self.rows, 1).feed(line.expand(self.rows, -1), len(session.tokens) - 1, path,
                                                len(tokens))                            # [rows, n, V]
        ids = torch.tensor(tokens, device=logits.device).expand(self.rows, -1)[..., None]
        return probs(logits).gather(-1, ids)[..., 0]


METHODS.update({'cmasd-prob': CmAsdProb, 'cmasd-specdec': CmAsdSpecDec, 'cmasd-typical': CmAsdTypical,
                'cmasd-dropout': CmAsdDropout})


# ------------------------------------------------------------------ beside ECSV: variants, votes and branches

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
class EcsvSoft(Ecsv):
    """ECSV-soft: a branch votes with its whole distribution too."""
    soft: float = 0.5


@dataclass
class VoteUnif(Ecsv):
    """ECSV's control: every branch's vote counts the same."""
    gamma_r: float = 0.0


@dataclass
class MeanArgmax(Ecsv):
    """ECSV's control: the token that the branches' mean q likes best, whatever was sampled."""
    gamma_r: float = 0.0
    soft: float = 1.0

    def scores(self, ballot):
        return ballot.q


@dataclass
class MapVote(Ecsv):
    """ECSV with known error rates: branch b weighs log((1 - e_b)(V - 1) / e_b).

    Which is MAP if errors are independent and spread evenly over the V - 1 wrong tokens.
    """
    errors: str = '0.3'                     # e_b: one rate a branch, or one for all

    def __post_init__(self):
        super().__post_init__()
        try:
            self.rates = [float(x) for x in self.errors.split(',')]
        except ValueError:
            self.rates = []
        good = len(self.rates) in (1, self.branches) and all(0 < x < 1 for x in self.rates)
        require(good, 'errors', self.errors, 'a rate between 0 and 1 for each branch, with commas between')

    def draft(self, session, n):
        self.vocab = session.target.model.vocab
        return super().draft(session, n)

    def weights(self, ballot):
        w = map_weights(self.rates, self.vocab) * (len(ballot.tokens) // len(self.rates))
        return [[x] * len(ballot.names) for x in w]


def map_weights(rates, vocab):
    """The MAP weight of each branch's vote, below 0 where it is wrong more often than a blind guess."""
    return [log((1 - e) * (vocab - 1) / e) for e in rates]


@functools.cache
def second_draft(folder, device):
    """The network in the folder, loaded once."""
    return load(folder, device)[0]


@dataclass
class TwoDrafts(Ecsv):
    """ECSV whose branches come half from the draft, half from another checkpoint: errors less alike."""
    second: str = ''                        # folder of the other draft, same vocabulary

    def __post_init__(self):
        super().__post_init__()
        self.other = None                   # its Reader

    def texts(self, session, n):
        require(self.second, 'second', repr(self.second), 'the folder of another draft model')
        half = self.branches // 2
        if session.draft is None:
            return super().texts(session, n)            # which refuses
        if self.other is None:
            model = second_draft(self.second, str(session.target.model.cos.device))
            same_vocabulary(session.target.model, model, f'knob second, {self.second}')
            most, context = len(session.tokens) + session.room, model.config.max_position_embeddings
            require(most <= context, 'second', self.second, f'a context of {most} tokens, not of {context}')
            self.other = Reader(model, most)
            self.other.log = session.draft.log          # its passes are the draft's in the ledger
        both = [(session.draft, self.branches - half), (self.other, half)][:1 + (half > 0)]
        each = [branch(session, self, n, reader, reader.model.full, rows) for reader, rows in both]
        n = min(tokens.shape[1] for tokens, *_ in each)
        return [torch.cat([x[:, :n] for x in parts]) for parts in zip(*each)]


@dataclass
class OracleTop1(Ecsv):
    """Reads every branch with the target and proposes the one expected to be kept longest: an upper bound.

    B target passes a cycle, all in the ledger; lossless, since it looks at p and not at what p will draw.
    """

    def draft(self, session, n):
        best = None
        for tokens, _, logits in zip(*self.texts(session, n)):
            draft = replace(Draft.points(tokens.tolist(), session.target.model), logits=logits)
            score = self.score(session, draft)
            kept = torch.tensor([p for p, _ in score.pq]).double().cumprod(0).sum()
            best = max(best or (-1, None), (float(kept), draft), key=lambda pair: pair[0])
            draft.known = score.logits
        return best[1]


@dataclass
class SdMulti(Ecsv):
    """Several branches, no fusion: the first whose first token passes is verified to its end.

    First tokens are tried in turn against what the target still has to give (recursive rejection); its row
    there is shared by all, so a cycle takes two passes at most. At temperature 0 the likeliest branch is
    first; above it the order must not look at what was drawn. Source: Miao et al. 2024 (SpecInfer), alg. 2.
    """
    lossless = Exact.lossless               # its tokens are samples: none may be dropped unverified

    def draft(self, session, n):
        n = min(n, (self.budget or inf) - 1)
        tokens, q, logits = self.texts(session, n)
        order = range(self.branches)
        if session.temperature == 0:
            own = [sum(row) for row in Ballot.of(tokens, logits, 1).own]
            order = sorted(order, key=lambda b: -own[b])
        self.options = [Draft(tokens[b].tolist(), q[b], logits[b]) for b in order]
        return self.options[0]

    def follow(self, live, kept, i):
        """The branches that stay in play behind the i-th token of the one that was kept."""
        return [kept]

    def accept(self, session, draft, score):
        if not draft.tokens:
            return super().accept(session, draft, score)
        tokens, judged, extra, begin = [], [], [], 0
        path, live, left = draft.tokens, self.options, (self.budget or inf) - len(draft.tokens) - 1
        while (i := len(tokens)) < len(path):           # read; score's rows go from `begin` on
            option, p, rows = tried(session, live, i, score.p[i - begin])
            judged += rows
            if option is None:
                extra = [(int(session.draw(p)), 'target')]
                break
            tokens, live = tokens + [option.tokens[i]], self.follow(live, option, i)
            if tokens[-1] in session.eos:
                break
            if tokens != path[:i + 1]:                  # it goes on where nothing was read: another pass
                if left < 1:
                    break
                path, inner = option.tokens[:i + min(left, len(option.tokens))], copy.copy(session)
                inner.tokens, begin, left = session.tokens + tokens, i + 1, left - (len(path) - i)
                score = self.score(inner, Draft(path[begin:], option.q[begin:len(path)]))
        else:
            extra = [(int(session.draw(score.p[-1])), 'bonus')]
        rest = path[len(tokens) + (not judged[-1]['kept']):]
        draft.tokens = [j['token'] for j in judged] + rest      # all that was put to the target
        return tokens + [x for x, _ in extra], ['draft'] * len(tokens) + [who for _, who in extra], judged


def tried(session, options, i, p):
    """(the first branch whose i-th token passes, or None; what is left of the target's p [V]; the judged)."""
    judged = []
    for option in options:
        x, q = option.tokens[i], option.q[i]
        chance = min(1.0, float(p[x] / q[x]))
        judged.append(dict(token=x, p=float(p[x]), q=float(q[x]), threshold=None, chance=chance,
                           kept=session.flip(chance)))
        if judged[-1]['kept']:
            return option, p, judged
        p = residual(p, q)
    return None, p, judged


@dataclass
class SdTree(SdMulti):
    """SdMulti at every token: all branches that share the kept text are tried in turn, as in a tree.

    The tree is read path by path, each as far as it is needed: no more positions than a pass over the whole
    tree with a mask would read, but more passes. Source: Miao et al. 2024 (SpecInfer), algorithm 2.
    """

    def follow(self, live, kept, i):
        return [option for option in live if option.tokens[i] == kept.tokens[i]]


METHODS.update({'ecsv-lite': EcsvLite, 'ecsv-spot': EcsvSpot, 'ecsv-soft': EcsvSoft, 'ecsv-map': MapVote,
                'ecsv-two': TwoDrafts, 'sd-multi': SdMulti, 'sd-tree': SdTree, 'vote-unif': VoteUnif,
                'oracle-top1': OracleTop1, 'mean-argmax': MeanArgmax})


# --------------------------------------------------------------------- beside VIA-SD: cascades, tiers, self

class Blended(Score):
    """A Score of the law pi that a deferral rule makes of q and p; its last row, past the draft, is p."""

    def __init__(self, session, draft, path, defer):
        """defer: function (q, p of the raw logits [n, V], warped q, p [n, V]) -> pi [n, V]."""
        super().__init__(session, draft, path)
        self.defer = defer

    @cached_property
    def p(self):
        p, d = self.session.probs(self.logits), self.draft
        raw = d.q if d.logits is None else d.logits.to(p.dtype).softmax(-1)
        pi = self.defer(raw.to(p.dtype), self.logits[:-1].to(p.dtype).softmax(-1), d.q.to(p.dtype), p[:-1])
        return torch.cat([pi, p[-1:]])


@dataclass
class Cascade(Exact):
    """Speculative cascade by Chow's rule: where the draft is sure (max q >= 1 - lam), its own law. LOSSY.

    Exact speculative decoding towards pi: all rules cost the passes of sd and only accept more. Confidence is
    that of the raw logits. Source: Narasimhan et al. 2024 (Faster Cascades), SpecCascade [Chow].
    """
    lam: float = knob(0.3, 0, 1)            # how much doubt is forgiven

    @property
    def lossless(self):
        return False

    def score(self, session, draft):
        return Blended(session, draft, self.path(session), self.defer)

    def defer(self, q, p, own, target):
        return torch.where(q.amax(-1, keepdim=True) >= 1 - self.lam, own, target)


@dataclass
class CascadeOpt(Cascade):
    """Speculative cascade by the optimal rule: the draft's law where max q >= max p - lam TV(p, q). LOSSY.

    Source: Narasimhan et al. 2024, SpecCascade [OPT].
    """
    def defer(self, q, p, own, target):
        top = lambda x: x.amax(-1, keepdim=True)
        return torch.where(top(q) >= top(p) - self.lam * (1 - overlap(p, q)[:, None]), own, target)


@dataclass
class CascadeTokenV3(Cascade):
    """Speculative cascade by token: q on A = {v: p(v) >= (1 - lam) max p}, what q has elsewhere by p. LOSSY.

    At temperature 0 this is lenient verification: a draft token stays from that ratio on.
    Source: Narasimhan et al. 2024, SpecCascade [Token], third rule.
    """
    def defer(self, q, p, own, target):
        inside = own * (p >= (1 - self.lam) * p.amax(-1, keepdim=True))
        return inside + (1 - inside.sum(-1, keepdim=True)) * target


@dataclass
class Tiered(ViaSd):
    """VIA-SD with 2 to 5 stages: draft, up to three slim paths of nested masks, target. LOSSY above 2.

    Each slim path runs more layers than the one before; 2 stages are exact speculative decoding.
    """
    tiers: int = knob(4, 2, 5)

    @property
    def lossless(self):
        alone = self.tiers == 2 and self.gate != 'two_level_exact'
        return self.control.causal and alone or super().lossless

    def stages(self, session, draft, score):
        found, full = session.calibration['mask'].get('nested', []), session.target.model.full
        most, masks = len(found) + 2, found[:self.tiers - 2]
        require(self.tiers <= most, 'tiers', self.tiers, f'at most {most}: calibration.json has {len(found)} '
                'nested masks; train_mask.py seeks three where a mask skips four units or more')
        paths = [session.view(full.slim(set(skip), f'slim{i + 1}')) for i, skip in enumerate(masks)]
        first = super().stages(session, draft, score)
        return [Score(session, draft, path) for path in paths] + first[1:]


@dataclass
class ViaMid(ViaSd):
    """VIA-SD with a model of its own in the middle (--mid DIR): other weights, another cache. LOSSY.

    The control for the slim path, and with a bigger drafter the upscaled one.
    """
    needs = ()

    def slim(self, session, draft):
        if session.mid is None:
            raise ValueError('the method needs a model in the middle: give --mid DIR')
        return Score(session, draft, session.mid.model.full, session.mid)


def stage_gain(q, s, p, alpha=0.5, beta=0.5):
    """Delta [...] in nats, R(p|q) - R(s|q) - R(p|s): above 0, the way from q to p by s is the shorter one.

    It knows nothing of what a pass costs (see lab.compare). Source: VIA-SD (2026), Delta_KL^{alpha,beta}.
    """
    R = lambda b, a: violation(b, a, alpha, beta)
    return R(p, q) - R(s, q) - R(p, s)


def blend(q, s, p, early, late):
    """The law [..., V] of text whose share early went from q to s and late on to p. Source: VIA-SD (2026)."""
    return (1 - late) * ((1 - early) * q + early * s) + late * p


METHODS.update({'cascade': Cascade, 'cascade-opt': CascadeOpt, 'cascade-tokenv3': CascadeTokenV3,
                'via-tiers': Tiered, 'via-mid': ViaMid})


# ------------------------------------------------------------------- beside SpecGuard: gates, rewards, votes

def step_right(session, draft):
    """1.0 if the session's checker finds this step right, else 0.0; ValueError where the task has none."""
    if session.checker is None:
        raise ValueError('this control grades steps: it needs a task with a step checker (see lab.claims)')
    return float(session.checker(session.tokens + draft.tokens))


@dataclass
class Unseen(Stepwise):
    """Steps whose signals nobody looks at."""

    def score(self, session, draft):
        return [(None, None)] * len(draft.tokens)


@dataclass
class RewardGuided(Unseen):
    """RSD: a step stays if a reward model gives it tau or more, here the task's own step checker. LOSSY.

    The checker costs nothing in this run; lab.claims charges a pass of a 1 M-parameter model for each step.
    Source: Liao et al. 2025 (reward-guided speculative decoding), threshold 0.7, one candidate.
    """
    k: int = 1
    tau: float = 0.7                        # reward that a step needs

    def judge(self, session, draft, seen):
        return step_right(session, draft), False


@dataclass
class SpecReason(Stepwise):
    """The target reads each step and gives it 0 to 9; 7 keeps it. LOSSY.

    Theirs is asked for the digit in a prompt, which takes a model that follows instructions; here it is 9
    times the geometric mean of the target's own probabilities. Source: Pan et al. 2025 (SpecReason).
    """
    k: int = 1
    tau: float = 7.0                        # mark that a step needs, 0..9

    def score(self, session, draft):
        rows = session.target.read(session.tokens, draft.tokens, self.path(session), len(draft.tokens) + 1)
        return [(logp, None) for logp in loglikes(rows[:-1], draft.tokens).tolist()]

    def judge(self, session, draft, seen):
        logp = [x for x, _ in seen]
        return 9 * exp(sum(logp) / len(logp)), False


@dataclass
class RandomGate(Unseen):
    """Keeps a step by a coin: what a gate of this rate is worth that knows nothing. LOSSY."""
    rate: float = knob(0.5, 0, 1)           # chance that a step stays

    def judge(self, session, draft, seen):
        return float(session.flip(self.rate)), False


@dataclass
class OracleGate(SpecGuard):
    """Keeps a step if and only if the task's checker finds it right: the most that any gate can do. LOSSY.

    It reads the signals all the same: its trace is what train_mask.py --signals calibrates on.
    """
    needs = ()

    def judge(self, session, draft, seen):
        return step_right(session, draft), False


@dataclass
class Majority(Unseen):
    """The draft alone writes k whole texts; the commonest last line wins, of those the first text. LOSSY.

    Source: Wang et al. 2023 (self-consistency), section 2.
    """
    k: int = 8
    tau: float = -inf                       # the target writes nothing; inf: it writes all

    def __post_init__(self):
        super().__post_init__()
        require(abs(self.tau) == inf, 'tau', self.tau, '-inf or inf: there is no score to compare')

    def over(self, session, ids):
        return len(ids) >= session.room or ids[-1] in session.eos

    def choose(self, session, found):
        ends = [session.text(d.tokens).strip().split('\n')[-1] for d in found]
        return found[ends.index(Counter(ends).most_common(1)[0][0])]


@dataclass
class BestOfN(Majority):
    """The draft alone writes k whole texts; the one with the highest mean log-probability wins. LOSSY."""

    def choose(self, session, found):
        return max(found, key=lambda d: float(loglikes(d.logits, d.tokens).mean()))


@dataclass
class ProcessBestOfN(BestOfN):
    """Best of n by steps: a text that the task's checker finds right throughout wins, then the surer. LOSSY.

    With marks of 0 and 1 the product of the marks of all steps is that. Source: Lightman et al. 2023.
    """

    def choose(self, session, found):
        sure = lambda d: float(loglikes(d.logits, d.tokens).mean())
        return max(found, key=lambda d: (self.sound(session, d.tokens), sure(d)))

    def sound(self, session, tokens):
        """Whether each step of the text is right."""
        begin = 0
        for end in range(1, len(tokens) + 1):
            if end == len(tokens) or Stepwise.over(self, session, tokens[begin:end]):
                begin = end
                if not step_right(session, Draft(tokens[:end], None)):
                    return False
        return True


@dataclass
class Beam(Majority):
    """The draft alone, by beam search: of all ways to go on, the k likeliest texts stay. LOSSY.

    Of k texts that have ended, the one with the highest mean log-probability wins. Nothing is drawn.
    """

    def propose(self, session):
        if session.draft is None:
            raise ValueError('the beam is of the draft model: give --draft DIR')
        reader, path, n = session.draft, session.draft.model.full, len(session.tokens)
        logits = finite(reader.read(session.tokens, [], path, 1), 'draft', n)           # [rows, V]
        twin, texts, sums, ended = reader.fork(self.k, session.room), [[]], logits.new_zeros(1), []
        while texts and len(ended) < self.k:
            total = sums[:, None] + logits.log_softmax(-1)                              # [rows, V]
            best, places = total.flatten().topk(min(self.k, total.numel()))
            grown = [(texts[i // total.shape[1]] + [i % total.shape[1]], i // total.shape[1], z)
                     for i, z in zip(places.tolist(), best.tolist())]
            ended += [(z / len(ids), ids) for ids, _, z in grown if self.over(session, ids)]
            live = [g for g in grown if not self.over(session, g[0])]
            texts, sums = [ids for ids, *_ in live], logits.new_tensor([z for *_, z in live])
            logits = self.advance(twin, path, n, texts, [row for _, row, _ in live])
        return Draft.points(max(ended)[1], session.draft.model)

    def advance(self, twin, path, n, texts, rows):
        """Logits [rows, V] behind the texts, each of which goes on from a row; n: where they begin."""
        idle = [0] * (self.k - len(texts))                  # rows that are over idle along
        for x in (x for store in twin.cache.stores for x in store):
            x[:, :, n:] = x[rows + idle][:, :, n:]
        ids = torch.tensor([text[-1] for text in texts] + idle, device=twin.model.cos.device)
        return finite(twin.append(ids, path), 'draft', n)[:len(texts)]


@dataclass
class FirstStep(SpecGuard):
    """SpecGuard that takes the first candidate: no selector. LOSSY."""

    def choose(self, session, found):
        return found[0]


@dataclass
class RandomStep(SpecGuard):
    """SpecGuard that takes any candidate: a selector that knows nothing. LOSSY."""

    def choose(self, session, found):
        return found[int(session.draw(torch.full((len(found),), 1 / len(found), dtype=torch.float64)))]


@dataclass
class CommonStep(SpecGuard):
    """SpecGuard that takes the step that was written most often, letter by letter. LOSSY."""

    def choose(self, session, found):
        texts = [tuple(d.tokens) for d in found]
        return found[texts.index(Counter(texts).most_common(1)[0][0])]


@dataclass
class PooledStep(SpecGuard):
    """SpecGuard that compares candidates by the mean of the draft's last hidden states, as its paper. LOSSY.

    The row softmax of the cosines has the smallest diagonal where the sum of exp(cosine) is largest. The
    embedding costs a draft pass for each candidate.
    """

    def choose(self, session, found):
        means = torch.stack([self.embed(session, d.tokens) for d in found])
        unit = torch.nn.functional.normalize(means.double(), dim=-1)
        return found[int((unit @ unit.T).round(decimals=9).exp().sum(-1).argmax())]

    def embed(self, session, tokens):
        """The mean hidden state [C] of a step behind the committed text."""
        reader = session.draft
        line = torch.tensor([session.tokens + tokens], device=reader.model.cos.device)
        begin, places = reader.now(), torch.arange(line.shape[1], device=line.device)
        hidden = reader.model(line, places, reader.model.full)[0, -len(tokens):]
        reader.log.append(('full', line.shape[1], begin, reader.now()))
        return hidden.mean(0)


METHODS.update({
    'rsd': RewardGuided, 'specreason': SpecReason, 'majority': Majority, 'best-of-n': BestOfN,
    'process-best-of-n': ProcessBestOfN, 'beam': Beam,
    'random-gate': RandomGate, 'oracle-gate': OracleGate, 'specguard-first': FirstStep,
    'specguard-random': RandomStep, 'specguard-common': CommonStep, 'specguard-pooled': PooledStep})


# --------------------------------------------------------------- beside sparse verification: other selections

@torch.compiler.assume_constant_result      # a generator cannot be traced
def lots(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[-1]))


def random_scores(q, k, means, block):
    """Control: blocks by lot, the same for texts of equal length (compiled, for caches of equal capacity)."""
    return lots(*means.shape[:3]).to(means)


def recent_scores(q, k, means, block):
    """Control: sinks and the latest blocks, whatever was asked. Source: Xiao et al. 2024 (StreamingLLM)."""
    return torch.arange(means.shape[2], device=means.device).expand(means.shape[:3]).to(means)


def oracle_scores(q, k, means, block, start):
    """Control: the attention mass that the query really gives each block, mean over a group's heads.

    start: cached tokens; what lies behind in a compiled pass's cache has no mass.
    """
    blocks = k[:, :, :means.shape[2] * block]
    z = q.unflatten(1, (k.shape[1], -1)) @ blocks.mT * q.shape[-1] ** -0.5              # [B, G, H/G, S]
    z = z.masked_fill(torch.arange(z.shape[-1], device=z.device) >= start // block * block, -torch.inf)
    return z.softmax(-1).mean(2).unflatten(-1, (-1, block)).sum(-1)


def oracle_attend(q, k, v, mask, carry, how):
    """sparse_attend whose scores are told where the cached tokens end."""
    layer, anchor, rule = how
    rule = rule._replace(scores=partial(oracle_scores, start=carry['start']))
    return kernels.sparse_attend(q, k, v, mask, carry, (layer, anchor, rule))


def quest_scores(q, k, means, block):
    """Control: the most that keys within a block's extremes could score. Source: Tang et al. 2024 (Quest)."""
    blocks = k[:, :, :means.shape[2] * block].unflatten(2, (-1, block))                 # [B, G, N, block, D]
    root = q.unflatten(1, (k.shape[1], -1)).mean(2)[:, :, None]
    return torch.maximum(root * blocks.amax(3), root * blocks.amin(3)).sum(-1)


def quest_attend(q, k, v, mask, carry, how):
    """Quest leaves the first two layers dense, where attention is spread widely."""
    form = kernels.attend if how[0] < 2 else partial(kernels.sparse_attend, how=how)
    return form(q, k, v, mask, carry)


def attend_masked(q, k, v, seen):
    """Attention of q [B, H, T, D] over all of k, v [B, G, S, D]; seen [B, G, T, S] is 0 or -inf."""
    each = seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=each, enable_gqa=True)


def attend_chosen(q, k, v, mask, carry, how):
    """The form of sparse_attend for choices that differ in size or by row: all keys, under a mask.

    Blocks.scores is the pick: a function from scores [B, G, T, N], the largest number of blocks and the
    number for the tokens that are there (0-dim) to what is kept. Padding picks what the root does.
    """
    layer, anchor, rule = how
    whole, room, least = carry['start'] // rule.block, k.shape[2] - q.shape[2], rule.sinks + rule.locals
    blocks = torch.arange(room // rule.block, device=q.device)
    count = max(int(kernels.budget(room, rule)), least)
    if count >= len(blocks):
        return kernels.attend(q, k, v, mask, carry)
    if anchor or 'kept' not in carry:
        means, rows = carry['means'][layer][:, :, :len(blocks)], torch.arange(q.shape[2], device=q.device)
        scores = torch.stack([kernels.mean_scores(row, k, means, rule.block) for row in q.unbind(2)], 2)
        scores = torch.where((rows < carry['real'])[:, None], scores, scores[:, :, :1])
        always = (blocks < rule.sinks) | (blocks >= whole - rule.locals)
        scores = scores.masked_fill(always, torch.inf).masked_fill(blocks >= whole, -torch.inf)
        fewer = kernels.budget(carry['start'].double(), rule).clamp(min=least)
        carry = carry | dict(kept=rule.scores(scores, count, fewer) | (blocks >= whole), block=rule.block)
    kept = carry['kept'].repeat_interleave(rule.block, -1)
    kept = F.pad(kept, (0, k.shape[2] - kept.shape[-1]), value=True)
    return attend_masked(q, k, v, mask.expand(*kept.shape).masked_fill(~kept, -torch.inf)), carry


def best(scores, count, fewer):
    """bool like scores: the `fewer` best (a tensor, at most count) of the last axis."""
    alive = (torch.arange(count, device=scores.device) < fewer).expand(*scores.shape[:-1], -1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, alive)


def joint(scores, count, fewer):
    """One budget over all pairs of head and block, by the root's row: a head may keep more than another."""
    root, G = scores[:, :, 0], scores.shape[1]
    return best(root.flatten(1), count * G, fewer * G).view_as(root)[:, :, None].expand_as(scores)


def union(scores, count, fewer):
    """What any row of the pass would choose, for all rows: exact for each, and more is read."""
    return best(scores, count, fewer).any(2, keepdim=True).expand_as(scores)


SELECT.update(
    random=(kernels.sparse_attend, random_scores), recent=(kernels.sparse_attend, recent_scores),
    oracle=(oracle_attend, oracle_scores), quest=(quest_attend, quest_scores),
    token=(attend_chosen, best), joint=(attend_chosen, joint), union=(attend_chosen, union))


def literal_swiglu(x, mlp, carry, how):
    """The feed-forward as the paper writes it: |silu(gate) up| below the threshold; only `down` is spared."""
    h = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    h = h.masked_fill(h.abs() < how[0], 0)
    return mlp.down_proj(h), carry | dict(channels=h, gate=2 * h.shape[-1], spared=1)


def union_swiglu(x, mlp, carry, how):
    """Every token through all channels that any token of the pass, padding aside, would keep."""
    h = F.silu(mlp.gate_proj(x))
    real = torch.arange(x.shape[1], device=x.device) < carry['real']
    h = h * ((h.abs() >= how[0]) & real[:, None]).flatten(0, -2).any(0)
    return mlp.down_proj(h * mlp.up_proj(x)), carry | dict(channels=h)


def guessed_swiglu(x, mlp, carry, how):
    """The shared set of channels guessed from a quarter of the gate's columns, those where x is largest.

    Then the gate too is read at the chosen channels alone: 0.48 of the weights at a share of 0.4, not 0.6.
    After SparQ (Ribar et al. 2024), which guesses keys so; its first step, for channels.
    """
    real = torch.arange(x.shape[1], device=x.device) < carry['real']
    real, gate = x * real[:, None], mlp.gate_proj
    wide = real.abs().amax((0, 1)).topk(x.shape[-1] // 4).indices.sort().values
    guess = F.silu(real[..., wide] @ gate.weight[:, wide].T).abs().amax((0, 1))
    chosen = guess.topk(max(1, round(how[1] * len(guess)))).indices.sort().values
    h = torch.zeros(*x.shape[:2], len(guess), dtype=x.dtype, device=x.device)
    h[..., chosen] = F.silu(F.linear(x, gate.weight[chosen]))
    carry = carry | dict(channels=h, chosen=chosen, gate=len(guess) // 4 + len(chosen))
    return kernels.chosen_swiglu(x, h, mlp, chosen), carry


def static_mix(x, moe, carry, how):
    """Every token without its len(how) lowest experts, whatever they weigh."""
    return kernels.sparse_mix(x, moe, carry, (2.0,) * len(how))


@dataclass
class SparseForms(Sparse):
    """Sparse verification with another feed-forward, see lab/rivals.py: one of its forms. LOSSY."""
    form: str = knob('literal', 'union', 'guessed', 'static')

    def view(self, path, session):
        path = super().view(path, session)
        mine = (dict(literal=literal_swiglu, union=union_swiglu, guessed=guessed_swiglu),
                dict(static=static_mix))
        other = {kernels.sparse_swiglu: mine[0].get(self.form), kernels.sparse_mix: mine[1].get(self.form)}
        known = lambda f: isinstance(f, partial) and other[f.func]
        swap = lambda f: partial(known(f), **f.keywords) if known(f) else f
        return replace(path, ffns=tuple(map(swap, path.ffns)))


def watched(path, log):
    """The same path, which appends (sublayer, carry) to the log after every sublayer: what a pass chose."""
    def watch(f, i):
        def run(*args):
            y, carry = f(*args)
            log.append((i, carry))
            return y, carry
        return f and run
    both = lambda fs, odd: tuple(watch(f, 2 * i + odd) for i, f in enumerate(fs))
    return replace(path, attends=both(path.attends, 0), ffns=both(path.ffns, 1))


def ledger(log, model, cached):
    """What a watched pass chose, a dict for each layer that ran (read_keys, read_channels, or of a mixture).

    experts: of a token, mean; distinct: of all tokens of the pass. passes.work makes bytes and FLOPs of it.
    """
    c, rows, before = model.config, {}, None
    for i, carry in log:
        row, found = rows.setdefault(i // 2, {}), carry or {}
        chosen = found if carry is not before else {}       # a dense sublayer hands on what it was handed
        before = carry
        if i % 2 == 0:
            row.update(read_keys(found, chosen, cached))
        elif not c.mixtures[i // 2]:
            row.update(read_channels(chosen, c.intermediate_size))
        elif 'experts' in chosen:
            experts = chosen['experts']
            row.update(experts=float((experts >= 0).sum(-1).float().mean()),
                       distinct=len(set(experts.flatten().tolist()) - {-1}))
    return list(rows.values())


def read_keys(found, chosen, cached):
    """keys, of a key head (mean), that any row reads; seen, that one row sees (mean); means: blocks scored by
    one row, where the layer chooses itself (the rows that ask: asked).
    """
    row, block = dict(keys=cached, seen=cached, means=0, asked=1), found.get('block', 1)
    if 'blocks' in found:
        row['keys'] = row['seen'] = min(cached, found['blocks'].shape[-1] * block + cached % block)
    elif 'kept' in found:                                   # [B, G, T, N], by row
        for name, kept in (('keys', found['kept'].any(2)), ('seen', found['kept'])):
            row[name] = cached - block * float((~kept).sum(-1).float().mean())
        row['asked'] = found['kept'].shape[2]
    if 'blocks' in chosen or 'kept' in chosen:
        row['means'] = cached // block
    return row


def read_channels(chosen, F):
    """channels, of a token (mean), and union, of all, that the spared matrices are read at (2: up and down);
    gate: rows of weights that are read whatever is chosen.
    """
    if 'channels' not in chosen:
        return dict(channels=F, union=F, gate=F, spared=2)
    active = chosen['channels'] != 0
    if 'chosen' in chosen:
        active = active[..., chosen['chosen']]
    active = active.flatten(0, -2)
    return dict(channels=float(active.sum(-1).float().mean()), union=int(active.any(0).sum()),
                gate=chosen.get('gate', F), spared=chosen.get('spared', 2))


METHODS.update({'sparse-forms': SparseForms})
