"""What is measured once on a model and kept in its calibration.json.

`python train_mask.py` searches which layers a slim pass of the embedded target can skip, in half a minute;
--target and --prompts take any other. The text is what the target itself writes after prompts. Masks that
need no search come first: evenly spaced layers, all contiguous blocks. Then random proposals take turns with
Bayesian ones (a Gaussian process over masks, expected improvement). Ctrl-C keeps the best so far. It ends
with how often slim and the draft model (the embedded one, or --draft) agree with the target.
--anchors measures instead which layers choose blocks under --sparse, and its thresholds. --signals measures
how confident and how grounded a draft's steps are, for specguard.

m layers that may be skipped, k of them skipped, n masks tried, W tokens of a window, V vocabulary.
"""
import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from functools import partial
from statistics import fmean

# first, because it silences a warning with which torch begins
from specmini import EMBEDDED, Engine, Parser, add_flags, encoded, exit_status, read_rows, take_threads
import torch
from torch.nn import functional
from tqdm import tqdm

import kernels
from model import (QUANTILES, BadInput, MoE, Reader, check_fields, check_writable, find_folder, fingerprint,
                   knob, require_that, write_calibration)
from verify import Sparse, SpecGuard, at_quantile, tokens_of


@dataclass
class Settings:
    """What a measurement is asked for: its flags."""
    target: str = knob(str(EMBEDDED / 'target'), 'a Hugging Face folder')
    draft: str = knob(None, 'its draft model; None: the embedded one, or none')
    prompts: str = knob(None, 'file of prompts (JSON lines); None: rows of the embedded tasks')
    chat: bool = knob(False, "put prompts into the target's chat template")
    texts: int = knob(28, 'calibration texts', 1)
    tokens: int = knob(32, 'W, tokens scored of each text', 1)      # as the max_lag of via
    skip: float = knob(0.45, 'share of the layers to leave out', 0, 1)
    evaluations: int = knob(60, 'masks to try at most', 1)

    def __post_init__(self):
        check_fields(self)


PROMPTS = EMBEDDED / 'prompts.jsonl'    # of the tasks that the embedded models were trained on
PATIENCE = 30           # searched masks without a better one that end a search
PERIOD = 2              # every second proposal is a Bayesian one
WARM_UP = 8             # masks tried before the Gaussian process is asked
RANDOM = 500            # random masks among which a proposal is chosen
LENGTH = 8              # layers in which two masks differ, over which their costs lose likeness
NOISE = 1e-2            # unexplained variance of a cost's logarithm, over the explained
EVERY = 17              # of a pass's channel activations, every 17th is kept: enough for quantiles


# ---------------------------------------------------------------------------------------- calibration texts

def calibration_texts(engine, settings):
    """settings.texts texts as ids: prompts, each with the W tokens that the target writes after it.

    Rows after which it writes fewer, or whose prompt is empty or fills the context, are passed over. BadInput
    if too few are left.
    """
    W = settings.tokens
    texts = []
    rows = read_rows(None, settings.prompts or PROMPTS)
    for ids in tqdm(encoded(engine, rows, settings.chat), desc='prompts', disable=None):
        if 0 < len(ids) <= engine.context - W:
            _, cycles = engine.generate(ids, 'ar', max_new=W)
            written = tokens_of(cycles)
            if len(written) == W:
                texts.append(ids + written)
        if len(texts) == settings.texts:
            return texts
    raise BadInput(f'{len(texts)} of {len(rows)} prompts have answers of {W} tokens, expected '
                   f'{settings.texts}: give other --prompts, or a smaller --texts or --tokens')


def violation(b, a, alpha=0.5, beta=0.5):
    """R(b|a) [...] in nats: the divergence of a draft a from a verifier b, beyond what b tolerates.

    a, b: log-probabilities [..., V] of the raw logits. The first term counts tokens that b accepts too
    rarely, the second tokens that its residual lacks. alpha 0, beta 1 tolerate nothing; 1/2 and 1/2 tolerate
    probabilities that differ by a factor of 2.
    Source: VIA-SD (2026), R_KL^{alpha,beta}, as its public reimplementations write it.
    """
    d = a - b
    refused = a.exp() * (d + math.log1p(-alpha)).clamp(min=0)
    starved = b.exp() * (d + math.log(beta)).clamp(min=0)
    return (refused + starved).sum(-1)


class Windows:
    """Texts, each of more than W ids, that the full path has read; what a slim path makes of their last W.

    As in decoding, slim starts from the full path's cache and reads the window like a lag, in one pass.
    """

    def __init__(self, model, texts, W):
        self.model = model
        self.texts = texts
        self.W = W
        self.readers = [Reader(model, len(ids)) for ids in texts]
        self.p = self.logps(model.full)                 # of each text the target's

    def logps(self, path):
        """Log-probabilities [W, V] of each text; whatever the cache holds, the window is read anew."""
        return [reader.read(ids, path, self.W).float().log_softmax(-1)
                for reader, ids in zip(self.readers, self.texts)]

    def agreement(self, logps):
        """The share of tokens at which the first choice by these log-probabilities is the target's."""
        same = [p.argmax(-1) == others.argmax(-1) for p, others in zip(self.p, logps)]
        return float(torch.cat(same).double().mean())

    def cost(self, skip):
        """What the search for a mask minimises: R(p|s) in nats a token. Source: VIA-SD (2026), DIMR."""
        s = self.logps(self.model.full.without(skip))
        return fmean(float(violation(*both).mean()) for both in zip(self.p, s))


# ---------------------------------------------------------------------------------------------- the search

def likeness(masks, others):
    """[N, n] exp(-d / LENGTH), d the layers in which two masks differ, 0/1 rows [N, m] and [n, m].

    As a product over layers it is positive definite.
    """
    return (-torch.cdist(masks, others, p=1) / LENGTH).exp()


def expected_improvement(tried, costs, masks):
    """[N] how far each mask is expected to beat the best one, by a Gaussian process on the log of the costs.

    tried [n, m] and masks [N, m] are 0/1 rows.
    Source: Rasmussen and Williams 2006, algorithm 2.1; Jones et al. 1998 (expected improvement).
    """
    y = (costs + 1e-9).log()
    y = (y - y.mean()) / y.std().clamp(min=1e-9)
    covariance = likeness(tried, tried) + NOISE * torch.eye(len(y), dtype=y.dtype)
    root = torch.linalg.cholesky(covariance)
    near = likeness(masks, tried)                                                       # [N, n]
    mean = (near @ torch.cholesky_solve(y[:, None], root))[:, 0]
    known = torch.linalg.solve_triangular(root, near.T, upper=False).square().sum(0)    # [N]
    deviation = (1 - known).clamp(min=1e-12).sqrt()
    z = (y.min() - mean) / deviation
    normal = torch.distributions.Normal(0.0, 1.0)
    return deviation * (z * normal.cdf(z) + normal.log_prob(z).exp())


def propose(tried, m, k):
    """k of m layers, a sorted tuple not in tried {mask: cost}: random, or of most expected improvement.

    The latter is chosen among RANDOM random ones and all swaps of one layer in the best 8. None where none of
    these is new.
    """
    i = len(tried)
    generator = torch.Generator().manual_seed(i)
    many = [tuple(sorted(torch.randperm(m, generator=generator)[:k].tolist())) for _ in range(RANDOM)]
    bayes = i >= WARM_UP and i % PERIOD == 0
    if bayes:
        for mask in sorted(tried, key=tried.get)[:8]:
            for out, new in itertools.product(mask, set(range(m)) - set(mask)):
                many.append(tuple(sorted(set(mask) - {out} | {new})))
    many = [mask for mask in dict.fromkeys(many) if mask not in tried]
    if not bayes or not many:
        return many[0] if many else None
    costs = torch.tensor(list(tried.values()), dtype=torch.float64)
    gain = expected_improvement(as_rows(list(tried), m), costs, as_rows(many, m))
    return many[int(gain.argmax())]


def as_rows(masks, m):
    """[N, m] 0/1 rows of masks, tuples of layers."""
    return functional.one_hot(torch.tensor(masks), m).sum(1).double()


def find_mask(model, windows, settings):
    """The section `mask` of the calibration file, by masks that are tried in turn; Ctrl-C ends it early.

    Source: VIA-SD (2026), DIMR.
    """
    layers = model.config.num_hidden_layers
    m = layers - 2                                      # the first and the last layer always stay
    k = int(settings.skip * layers)
    most = f'expected 1 to {m}' if m > 0 else 'none can be left out'
    require_that(0 < k <= m, f'--skip {settings.skip} of {layers} layers: {k} layers; {most}: the first and '
                 'the last always stay')

    def sublayers(mask):
        return [j for i in mask for j in (2 * i + 2, 2 * i + 3)]        # i = 0 is layer 1
    # masks that need no search: the evenly spaced one, then every contiguous block
    plain = [tuple(int((i + 0.5) * m / k) for i in range(k))]
    plain += [tuple(range(begin, begin + k)) for begin in range(m - k + 1)]
    tried = {}                                          # {mask: cost}
    best = 0                                            # number of the best mask
    try:
        for i in tqdm(range(settings.evaluations), desc='masks', disable=None):
            mask = plain[i] if i < len(plain) else propose(tried, m, k)
            if mask is None or i - max(best, len(plain)) > PATIENCE:
                break
            tried[mask] = windows.cost(sublayers(mask))
            best = list(tried.values()).index(min(tried.values()))
    except KeyboardInterrupt:
        if not tried:
            raise
        print('interrupted: the best so far is kept', file=sys.stderr)
    found = min(tried, key=tried.get)
    return dict(skip=sublayers(found), cost=tried[found], masks=len(tried))


# ------------------------------------------------------------------- --anchors: what sparse passes choose by
# A dense verifying pass is watched: every sublayer also logs what its sparse form would choose.

def watched_attend(q, k, v, mask, carry, log, rule):
    """kernels.attend, which logs the blocks that an anchor would choose here, a set for each key head."""
    _, added = kernels.sparse_attend(q, k, v, mask, carry, True, rule)
    blocks = added['blocks'][0].tolist() if added else []       # none where the text is too short to choose
    log.append([set(head) for head in blocks])
    return kernels.attend(q, k, v, mask, carry)


def watched_feed_forward(x, mlp, log):
    """kernels.feed_forward, which logs (silu(gate), the shares [N, k - 1] of the lowest experts or None).

    In a mixture the gates are those of each token's chosen experts.
    """
    lowest = None
    if isinstance(mlp, MoE):
        weights, chosen = kernels.route(x, mlp)                                 # [N, k] each
        gate, _ = (mlp.gate_up_proj[chosen] @ x[:, None, :, None]).chunk(2, 2)  # [N, k, F, 1]
        lowest = weights.flip(-1).cumsum(-1)[:, :-1] / weights.sum(-1, keepdim=True)
    else:
        gate, _ = mlp.gate_up_proj(x).chunk(2, -1)                              # [N, F]
    log.append((functional.silu(gate), lowest))
    return kernels.feed_forward(x, mlp)


def sparsity(model, texts, T=5, **knobs):
    """The section 'sparse': what dense verifying passes over T positions of texts (ids) would choose.

    anchors: layer 0, then those whose blocks differ most from the layer before; jaccard: similarity of each
    with it; channels, experts: for each layer 21 quantiles, 0 to 1, of |silu(gate)|, in a mixture that of the
    chosen experts, and of the share of the weight that a token's m lowest experts have, m = 1, 2, ...
    Source: as verify.Sparse (anchor layers).
    """
    L = model.config.num_hidden_layers
    similar = [[] for _ in range(L)]        # Jaccard similarities of a layer's blocks to the layer before's
    sizes = [[] for _ in range(L)]          # [n, 1] channels' sizes
    shares = [[] for _ in range(L)]         # [n, k - 1] of the lowest experts
    rule = Sparse(**dict(dense_below=32) | knobs)
    log = []                                # of a pass: two entries a layer
    attend = partial(watched_attend, log=log, rule=rule)
    ffn = partial(watched_feed_forward, log=log)
    path = model.full.sparsified((attend,) * L, (ffn,) * L, rule.block)
    for ids in tqdm(texts, desc='texts', disable=None):
        reader = Reader(model, len(ids))
        for end in range(T, len(ids) - T, T):
            reader.read(ids[:end], model.full, 0)
            log.clear()
            reader.read(ids[:end + T], path, T)
            before = []
            for layer in range(L):
                heads, (gates, lowest) = log[2 * layer:2 * layer + 2]
                similar[layer] += [len(a & b) / len(a | b) for a, b in zip(heads, before)]
                before = heads
                sizes[layer].append(gates.reshape(-1, 1)[::EVERY].abs())
                if lowest is not None:
                    shares[layer].append(lowest)
    require_that(similar[-1],
                 f'calibration texts of {max(map(len, texts))} tokens at most: too short for blocks')
    jaccard = [round(fmean(values), 4) for values in similar[1:]]
    order = sorted(range(1, L), key=lambda layer: jaccard[layer - 1])
    channels = [quantiles(torch.cat(one))[0] for one in sizes]
    experts = [quantiles(torch.cat(one)) if one else [] for one in shares]
    return dict(anchors=[0, *order], jaccard=jaccard, channels=channels, experts=experts)


def quantiles(columns):
    """[[QUANTILES numbers] of each column] of columns [n, c], by the nearest rank."""
    ranked = columns.float().sort(0).values.T                               # [c, n]
    ranks = torch.linspace(0, 1, QUANTILES, dtype=torch.float64) * (ranked.shape[1] - 1)
    return [[round(value, 5) for value in column[ranks.round().long()].tolist()]
            for column in ranked]


# ------------------------------------------------------------------ --signals: what SpecGuard judges steps by

def signal_ranges(steps):
    """[[1st, 99th percentile] of L, the same of G] of steps (L, G)."""
    return [[at_quantile(sorted(column), share) for share in (0.01, 0.99)]
            for column in zip(*steps)]


def measure_signals(engine, settings):
    """The section `signals` of a pair: ranges of L and G over the steps that the draft writes after prompts.

    The target writes all that the draft's steps go on from.
    """
    method = SpecGuard(delimiter='sentence' if settings.prompts else r'\n')
    rows = read_rows(None, settings.prompts or PROMPTS)
    prompts = encoded(engine, rows[:settings.texts], settings.chat)
    engine.open(prompts)
    steps = []
    for ids in tqdm(prompts, desc='signals', disable=None):
        session = engine.start(ids, method)
        while session.room > 0 and not session.ended:
            draft = method.propose(session)
            steps.append(list(map(min, zip(*method.score(session, draft)))))
            session.commit(method.write(session))
    require_that(steps, "no prompt leaves room for a step in the draft's context; give other --prompts")
    logp, grounding = signal_ranges(steps)
    draft = fingerprint(engine.target if engine.draft == 'self' else engine.draft)
    return dict(draft_logp=logp, draft_grounding=grounding, steps=len(steps), draft=draft)


# --------------------------------------------------------------------------------------------- the program

def measure_anchors(engine, settings):
    """The section `sparse` of a target, from its texts joined and cut anew."""
    joined = sum(calibration_texts(engine, settings), [])
    texts = [joined[begin:begin + 512] for begin in range(0, len(joined), 512)]
    return sparsity(engine.models['target'], texts)


def measure_mask(engine, settings):
    """The section `mask` of a target; prints what was found."""
    model = engine.models['target']
    windows = Windows(model, calibration_texts(engine, settings), settings.tokens)
    section = find_mask(model, windows, settings)
    slim = windows.agreement(windows.logps(model.full.without(section['skip'])))
    print(f'skips {section["skip"]} of {2 * model.config.num_hidden_layers} sublayers: R '
          f'{section["cost"]:.2g} nats a token, the lowest of {section["masks"]} masks\n'
          f"slim's first choice is the target's at {slim:.1%} of the tokens", end='')
    if 'draft' in engine.models:
        draft = windows.agreement(Windows(engine.models['draft'], windows.texts, windows.W).p)
        print(f", the draft's at {draft:.1%}", end='')
    print('\nslim can pay only where it agrees more often than the draft; '
          'python specmini.py --compare sd via measures whether it does')
    return section


SECTIONS = dict(mask=measure_mask, sparse=measure_anchors, signals=measure_signals)


def run(argv):
    """Measures what the flags ask for and stores it."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    instead = p.add_mutually_exclusive_group().add_argument
    instead('--anchors', action='store_const', dest='section', const='sparse', default='mask')
    instead('--signals', action='store_const', dest='section', const='signals')
    add_flags(p, Settings)
    flags = vars(p.parse_args(argv))
    section = flags.pop('section')
    settings = Settings(**flags)
    check_writable(find_folder(settings.target) / 'calibration.json')
    engine = Engine(settings.target, settings.draft)
    take_threads(engine.models['target'])
    measured = SECTIONS[section](engine, settings)
    write_calibration(settings.target, section, measured)
    print(f'the section {section!r} is in the calibration.json of {settings.target}')


def main(argv=None):
    """Runs the program; returns its exit status, see specmini.exit_status."""
    return exit_status('train_mask', lambda: run(argv))


if __name__ == '__main__':
    sys.exit(main())
