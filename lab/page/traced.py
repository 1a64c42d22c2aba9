"""What a trace has beyond what decoding needs: a Session that watches fills Cycle.notes.

Nothing here changes a text: it reads, draws and commits as an ordinary Session does. The seconds of a cycle
include looking up its coins and logging sparse layers; the notes are made afterwards. Their names in a JSON
line: lab/page/README.md.
"""
import copy
from dataclasses import dataclass, replace
from statistics import fmean

import torch

import kernels
from model import Reader
from verify import CmAsd, Ecsv, Score, Session, SpecGuard, block_length

LIKELIEST = 8       # tokens of a place whose probabilities are noted
DECIMALS = 5        # of a noted number
SHARES = 24         # places of the text, at most, that a token is said to lean on
LEAST = 0.004       # the least share that is said
MOST_ROLLOUT = 1024     # tokens of a text up to which whole rows of the rollout are made


def rounded(x):
    """A number, or nested lists of numbers, to DECIMALS."""
    if isinstance(x, list):
        return [rounded(one) for one in x]
    return round(x, DECIMALS)


class WatchedReader(Reader):
    """The target's Reader, which remembers its latest slim and sparse passes."""
    middle = None           # (ids, logits) of the latest pass of a slim verifier
    chosen = None           # of the latest sparse pass: see `watched`

    def read(self, ids, path, last):
        log = []
        sparse = path.sparse and not self.compiled
        rows = super().read(ids, watched(path, log) if sparse else path, last)
        if sparse:
            self.paths[path.name] = path
            self.chosen = log
        if path.skip:
            self.middle = ids, rows
        return rows


def watched(path, log):
    """The same path, which appends (sublayer, carry) to the log after every sublayer: what a pass chose.

    Sublayer 2i is the attention of layer i, 2i + 1 its feed-forward.
    """
    def logged(sublayer, number):
        def run(*args):
            out, carry = sublayer(*args)
            log.append((number, carry))
            return out, carry
        return sublayer and run                         # None where it is skipped
    attends = tuple(logged(attend, 2 * i) for i, attend in enumerate(path.attends))
    ffns = tuple(logged(ffn, 2 * i + 1) for i, ffn in enumerate(path.ffns))
    return replace(path, attends=attends, ffns=ffns)


@dataclass
class Traced(Session):
    """A Session that notes in each Cycle what the page shows and the loop does not need."""

    def __post_init__(self):
        super().__post_init__()
        self.target = copy.copy(self.target)            # with the same cache and log
        self.target.__class__ = WatchedReader
        self.coins = []         # of each verdict by chance the number drawn in 0..1; None of a certain one

    def flip(self, chance):
        """As decided; the number drawn is looked up in a twin of the generator; kept: it is <= chance."""
        coin = None
        if 0 < chance < 1:
            twin = self.generator.clone_state()
            coin = 1 - float(torch.rand(1, generator=twin, dtype=torch.float64))
        self.coins.append(coin)
        return super().flip(chance)

    def observe(self, method, draft, score, cycle):
        notes = {}
        path = self.target_path()
        if isinstance(score, Score):
            path = score.path
            found = places(self, draft, score, cycle)
            if len(self.coins) == len(cycle.judged):
                for place, coin in zip(found, self.coins):
                    place['coin'] = coin
            notes['places'] = found
        notes['lag'] = len(self.tokens) - 1 - self.target.cache.valid_prefix(self.tokens[:-1], path)
        notes |= confidence_notes(method, draft)
        notes |= vote_notes(method, draft)
        if draft.options and len(draft.options) > 1:
            notes['candidates'] = draft.options
        if isinstance(method, SpecGuard) and cycle.judged:
            notes |= grounding_notes(self, method, draft, cycle)
        if self.target.chosen:
            notes |= block_notes(self.target.chosen)
        cycle.notes = notes
        self.target.middle = self.target.chosen = None
        self.coins = []


# --------------------------------------------------------------------------------- the laws at judged places

def places(session, draft, score, cycle):
    """What the verifiers said at each place of the block, a dict each: see place_of.

    A place for each judged token, and one more where the cycle's last token stands after them all. They end
    where what was judged is not the block that the Score has read, as with rules that try several branches.
    """
    laws = laws_of(session, draft, score)
    n = len(draft.tokens)
    if not laws or any(len(rows) != n + 1 for rows in laws.values()):
        return []
    count = max(min(len(cycle.tokens), n + 1), min(len(cycle.judged), n))
    found = []
    for i, verdict in zip(range(count), cycle.judged + [None] * count):
        here = {name: rows[i].cpu() for name, rows in laws.items()}                     # {name: [V]}
        written = cycle.tokens[min(i, len(cycle.tokens) - 1)]
        guessed = draft.tokens[i] if i < n else written
        if verdict and not same_row(verdict, guessed, here):
            break
        place = place_of(here, [guessed, written], i < n)
        if verdict:
            judge = here.get('p', here.get('s'))
            place['overlap'] = rounded(float(torch.minimum(judge, here.get('q', judge)).sum()))
        if not verdict or verdict.kept or verdict.p is None:
            place.pop('residual', None)                 # nothing was drawn from it
        found.append(place)
    return found


def laws_of(session, draft, score):
    """{name: [n + 1, V]}: p, q, s, residual as sampled; greedily raw_p, raw_q, raw_s at temperature 1."""
    n = len(draft.tokens)
    logits = {}
    if 'logits' in vars(score):                         # its pass has run
        logits['p'] = score.logits
    ids, rows = session.target.middle or ([], [])
    if ids[len(ids) - n:] == draft.tokens and len(rows) == n + 1:
        logits['s'] = rows
    if not logits:
        return {}
    laws = {}
    for name, rows in logits.items():
        laws[name] = session.probs(rows)
    if n:
        some = next(iter(laws.values()))
        laws['q'] = padded(draft.q.to(some), some)
        if 'p' in laws and len(laws['p']) == len(laws['q']):
            laws['residual'] = padded(score.recovery_distribution(laws['p'][:-1], laws['q'][:-1]), some)
    if session.temperature == 0:
        if draft.logits is not None and n:
            logits['q'] = padded(draft.logits, next(iter(logits.values())))
        for name, rows in logits.items():
            laws[f'raw_{name}'] = rows.float().softmax(-1)
    return laws


def padded(rows, like):
    """[n + 1, V]: these [n, V], and zeros after them, where the draft has no say."""
    return torch.cat([rows.to(like), torch.zeros_like(like[:1])])


def same_row(verdict, token, laws):
    """Whether a verdict is on this token of the block, by the p that the Score has at this place."""
    if verdict.token != token:
        return False
    if verdict.p is None or 'p' not in laws:
        return True
    return abs(float(laws['p'][token]) - verdict.p) < 1e-6


def place_of(laws, used, drafted):
    """One place: ids of the LIKELIEST tokens and the used ones, and of each law their probabilities.

    p target, q draft, s slim; residual: what a rejection draws from. drafted: whether the draft had a say.
    """
    raw = [row for name, row in laws.items() if name.startswith('raw_')]
    largest = torch.stack(raw or [laws[name] for name in 'pqs' if name in laws]).amax(0)
    ids = list(dict.fromkeys(largest.topk(min(LIKELIEST, len(largest))).indices.tolist() + used))
    place = dict(ids=ids)
    for name, row in laws.items():
        if drafted or name not in ('q', 'raw_q', 'residual'):
            place[name] = rounded(row[ids].tolist())
    return place


# ------------------------------------------------------------------------------------ what single methods say

def confidence_notes(method, draft):
    """CM-ASD: the confidence of each drafted token, and the window that the mean so far allowed."""
    confidence = [said['confidence'] for said in draft.signals or [] if 'confidence' in said]
    if not confidence:
        return {}
    knobs = method if isinstance(method, CmAsd) else CmAsd
    window = [block_length(fmean(confidence[:i + 1]), knobs) for i in range(len(confidence))]
    return dict(confidence=rounded(confidence), window=window)


def vote_notes(method, draft):
    """ECSV: the ids of each branch and the weight of each of its votes, as the last vote had them."""
    voted = isinstance(method, Ecsv) and draft.signals and 'branches' in draft.signals[0]
    if not voted:
        return {}
    ballot = method.ballot
    return dict(branches=ballot.tokens.tolist(), weights=rounded(method.weights(ballot).tolist()))


def grounding_notes(session, method, draft, cycle):
    """SpecGuard: for each token of the judged step the places that it leans on most, [place, share] each."""
    begin = len(session.tokens) - len(cycle.tokens)
    line = session.tokens[:begin] + draft.tokens
    if len(line) > MOST_ROLLOUT:
        return {}
    rows = rollout_rows(session.draft.model, line, method)
    found = []
    for row in rows[begin:, :begin]:
        shares, at = row.topk(min(SHARES, begin))
        leans = zip(at.tolist(), shares.tolist())
        found.append([[place, rounded(share)] for place, share in leans if share >= LEAST])
    return dict(grounded=found)


def rollout_rows(model, line, method):
    """[N, N] attention rollout over a text (ids): how far each token leans on each, its rows true in full.

    kernels.rollout_layer, by which steps are judged, gets the sums right alone and not their spread: here
    the layers' whole matrices are multiplied.
    """
    observed = model.full.grounded(method.n_roll, 0, method.sparsify)
    N = len(line)
    layers = []                             # of each layer that is looked at: [N, N], filled chunk by chunk

    def watch(q, k, v, mask, carry):
        T, S = q.shape[2], k.shape[2]
        rows = torch.zeros(T, N, dtype=torch.float64, device=q.device)
        rows[:, :S] = kernels.attention_rows(q, k, kernels.full_mask(mask, q, k), method.sparsify)[0]
        layers.append(rows)
        return kernels.attend(q, k, v, mask, carry)
    looked_at = [attend is kernels.grounded for attend in observed.attends]
    attends = [watch if look else attend for look, attend in zip(looked_at, model.full.attends)]
    Reader(model, N).read(line, replace(model.full, attends=tuple(attends)), 0)
    n = sum(looked_at)
    product = torch.eye(N, dtype=torch.float64, device=layers[0].device)
    for i in range(n):
        matrix = torch.cat(layers[i::n])                                                # [N, N]
        product = matrix @ product
    return product


def block_notes(log):
    """Sparse attention: `cached` keys, `block` keys to a block, and for each layer what it reads of them.

    For a layer that chose: the blocks of each key head; for one that reuses a choice: the layer that made it;
    None where all keys are read. log: of one pass, as `watched` makes it.
    """
    layers = []
    block = None
    latest = None           # (the choice that is handed on, the layer that made it)
    for sublayer, carry in log:
        if sublayer % 2:
            continue
        while len(layers) < sublayer // 2:
            layers.append(None)                         # skipped
        choice = carry.get('blocks')
        if choice is None:
            layers.append(None)
        elif latest and latest[0] is choice:
            layers.append(latest[1])
        else:
            latest = choice, sublayer // 2
            block = carry['block']
            heads = choice[0].sort().values
            layers.append(heads.tolist())
    if block is None:
        return {}
    _, carry = log[0]
    return dict(blocks=dict(cached=int(carry['start']), block=block, layers=layers))
