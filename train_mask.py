"""What is measured once on a model and kept in its calibration.json.

`python train_mask.py` searches which layers a slim pass of the embedded target can skip, in half a minute;
--target and --prompts take any other. The text is what the target itself writes after prompts. Masks that
need no search come first: evenly spaced layers, all contiguous blocks. Then random proposals take turns with
Bayesian ones (a Gaussian process over masks, expected improvement). Ctrl-C keeps the best so far. With a
draft model (the embedded target's own, or --draft) it ends with what the mask is worth: whether via pays.
--anchors measures instead which layers choose blocks under --sparse, and its thresholds. --signals measures
how confident and how grounded a draft's steps are, for specguard.

m layers that may be skipped, k of them skipped, n masks tried, W tokens of a window, V vocabulary.
"""
import argparse
import functools
import itertools
import math
import sys
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import torch
from tqdm import tqdm

import kernels
from model import Reader, find_folder, require_that, require_writable, write_calibration
from specmini import EMBEDDED, Engine, Parser, encoded, exit_status, lab_module, read_rows
from verify import Sparse, SpecGuard, ViaSd, tokens_of, violation


@dataclass(frozen=True)
class Settings:
    """What a measurement is asked for."""
    skip: float = 0.45              # share of the layers to leave out
    seed: int = 0
    texts: int = 28                 # calibration texts
    tokens: int = 32                # W, tokens scored of each; as the max_lag of via
    prompts: str = None             # file of prompts; None: training rows of the lab's tasks
    chat: bool = False              # whether these are put into the target's chat template
    evaluations: int = 60           # masks to try at most


PATIENCE = 30           # masks without a better one that end a search
PERIOD = 2              # every second proposal is a Bayesian one
WARM_UP = 8             # masks tried before the Gaussian process is asked
RANDOM = 500            # random masks among which a proposal is chosen
LENGTH = 8              # layers in which two masks differ, over which their costs lose likeness
NOISE = 1e-2            # unexplained variance of a cost's logarithm, over the explained
QUANTILES = 21          # 0 to 1 in steps of 0.05, of every table that --anchors writes
EVERY = 17              # of a pass's channel activations, every 17th is kept: enough for quantiles


# ---------------------------------------------------------------------------------------- calibration texts

def calibration_rows(settings):
    """Rows with a prompt, in the order in which they are used: of the file, or training rows task by task."""
    if settings.prompts:
        return read_rows(None, settings.prompts)
    tasks = lab_module('tasks')
    require_that(tasks, 'no laboratory with tasks beside this file: give --prompts FILE')
    sources = [tasks.rows(task, settings.seed, 'train') for task in tasks.TASKS]
    # ten times as many as are used, because some are passed over
    return list(itertools.chain(*itertools.islice(zip(*sources), 10 * settings.texts)))


def calibration_texts(engine, settings):
    """settings.texts texts as ids: prompts, each with the W tokens that the target writes after it.

    Rows after which it writes fewer, or whose prompt fills the context, are passed over. ValueError where
    they leave too few.
    """
    W = settings.tokens
    texts = []
    rows = calibration_rows(settings)
    bar = tqdm(total=settings.texts, desc='calibration texts', disable=None)
    for row in rows:
        (ids,) = encoded(engine, [row], settings.chat)
        if len(ids) + W <= engine.context:
            _, cycles = engine.generate(ids, 'ar', max_new=W)
            written = tokens_of(cycles)
            if len(written) == W:
                texts.append(ids + written)
                bar.update()
        if len(texts) == settings.texts:
            return texts
    raise ValueError(f'{len(texts)} of {len(rows)} prompts have answers of {W} tokens, expected '
                     f'{settings.texts}: give other --prompts, or a smaller --texts or --tokens')


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
        rows = [reader.read(ids, path, self.W) for reader, ids in zip(self.readers, self.texts)]
        return [logits.float().log_softmax(-1) for logits in rows]

    def cost(self, skip):
        """What the search for a mask minimises: R(p|s) in nats a token. Source: VIA-SD (2026), DIMR."""
        s = self.logps(self.model.full.without(skip))
        return fmean(float(violation(*both).mean()) for both in zip(self.p, s))

    def agreed(self, logps):
        """[positions] whether the first choice by these log-probabilities is the target's."""
        return torch.cat([p.argmax(-1) == one.argmax(-1) for p, one in zip(self.p, logps)]).tolist()


# ---------------------------------------------------------------------------------------------- the search

def likeness(masks, others):
    """[N, n] exp(-d / LENGTH), d the layers in which two masks differ, 0/1 rows [N, m] and [n, m].

    As a product over layers it is positive definite.
    """
    return (-torch.cdist(masks, others, p=1) / LENGTH).exp()


def expected_improvement(seen, costs, masks):
    """[N] how far each mask is expected to beat the best one, by a Gaussian process on the log of the costs.

    seen [n, m] and masks [N, m] are 0/1 rows.
    Source: Rasmussen and Williams 2006, algorithm 2.1; Jones et al. 1998 (expected improvement).
    """
    y = (costs + 1e-9).log()
    y = (y - y.mean()) / y.std().clamp(min=1e-9)
    covariance = likeness(seen, seen) + NOISE * torch.eye(len(y), dtype=y.dtype)
    root = torch.linalg.cholesky(covariance)
    near = likeness(masks, seen)                                                        # [N, n]
    mean = (near @ torch.cholesky_solve(y[:, None], root))[:, 0]
    known = torch.linalg.solve_triangular(root, near.T, upper=False).square().sum(0)    # [N]
    deviation = (1 - known).clamp(min=1e-12).sqrt()
    z = (y.min() - mean) / deviation
    normal = torch.distributions.Normal(0.0, 1.0)
    return deviation * (z * normal.cdf(z) + normal.log_prob(z).exp())


def propose(tried, m, k, seed):
    """k of m layers, a sorted tuple not in tried {mask: cost}: random, or of most expected improvement.

    The latter is chosen among RANDOM random ones and all swaps of one layer in the best 8. None where none of
    these is new.
    """
    i = len(tried)
    generator = torch.Generator().manual_seed(seed * 100_003 + i)
    many = []
    for _ in range(RANDOM):
        layers = torch.randperm(m, generator=generator)[:k]
        many.append(tuple(sorted(layers.tolist())))
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
    return torch.nn.functional.one_hot(torch.tensor(masks), m).sum(1).double()


def plain_masks(m, k):
    """Masks of k of m layers that need no search: the evenly spaced one, then every contiguous block."""
    yield tuple(int((i + 0.5) * m / k) for i in range(k))
    for begin in range(m - k + 1):
        yield tuple(range(begin, begin + k))


def search(cost, m, k, settings):
    """{mask: cost} of masks of k of m layers, in the order in which they were tried; Ctrl-C ends it early.

    cost: function of a mask. Source: VIA-SD (2026), DIMR.
    """
    tried = {}
    plain = plain_masks(m, k)
    bar = tqdm(total=settings.evaluations, disable=None, desc='masks')
    try:
        while len(tried) < settings.evaluations:
            mask = next(plain, None) or propose(tried, m, k, settings.seed)
            costs = list(tried.values())
            if mask is None or costs and len(costs) - costs.index(min(costs)) > PATIENCE:
                break
            if mask not in tried:
                tried[mask] = cost(mask)
                bar.update()
    except KeyboardInterrupt:
        if not tried:
            raise
        bar.write('interrupted: the best so far is kept', file=sys.stderr)
    return tried


def find_mask(model, windows, settings):
    """The section `mask` of the calibration file; plain: the least cost of the masks without search."""
    layers = model.config.num_hidden_layers
    m = layers - 2                                      # the first and the last layer always stay
    k = int(settings.skip * layers)
    require_that(0 < k <= m, f'--skip {settings.skip} of {layers} layers: {k} layers; expected 1 to {m}: the '
                 'first and the last always stay')

    def sublayers(mask):
        return [j for i in mask for j in (2 * i + 2, 2 * i + 3)]        # i = 0 is layer 1
    tried = search(lambda mask: windows.cost(sublayers(mask)), m, k, settings)
    skip = sublayers(min(tried, key=tried.get))
    plain = min(tried[mask] for mask in plain_masks(m, k) if mask in tried)     # it tries them first
    return dict(skip=skip, cost=min(tried.values()), plain=plain, masks=len(tried), settings=asdict(settings),
                work=model.read_bytes(model.full.without(skip)) / model.read_bytes(model.full))


# --------------------------------------------------------------------------------- what a mask is worth

def shortcut(p, q, s, alpha, beta, delta=1.0):
    """Delta(s | pi) [n] in nats: how much shorter the way from q to pi = (1 - delta) q + delta p is by s.

    p, q, s: log-probabilities [n, V]. alpha, beta: see violation; at 1/2 they forgive any delta up to 1/2.
    Source: VIA-SD (2026), Delta_KL; its p and q are our q and p.
    """
    R = functools.partial(violation, alpha=alpha, beta=beta)
    pi = torch.logaddexp(q + torch.tensor(1 - delta).log(), p + math.log(delta))
    return R(pi, q) - R(s, q) - R(pi, s)


def replayed(hits, ratios, rule):
    """(full passes, tokens) a cycle of a ViaSd along the target's text, by the draft's first choices [n].

    hits: whether each is the target's; ratios: r of each by slim, whose wrong tokens count as the text's.
    """
    cycles = full = lag = place = 0
    while place < len(hits):
        begin, late, escalated = place, lag > rule.max_lag, False
        for hit, ratio in zip(hits[begin:begin + rule.gamma], ratios[begin:]):
            escalated = escalated or ratio < rule.escalate
            if not (hit if escalated else ratio >= rule.keep):
                break
            place += 1
        place += 1                                      # the token that ends the cycle
        lag = 0 if escalated else place - begin + (0 if late else lag)
        full += escalated + late
        cycles += 1
    return full / cycles, place / cycles


def over_sd(hits, ratios, c, work):
    """(speed of via over sd's, via's full passes and tokens a cycle, sd's tokens), see replayed.

    c, work: what a block's draft passes and a slim pass take, in full passes.
    """
    full, tokens = replayed(hits, ratios, ViaSd())
    _, usual = replayed(hits, ratios, ViaSd(keep=2, escalate=2))                # the target decides all
    return tokens / (c + work + full) / (usual / (c + 1)), full, tokens, usual


def slim_ratios(q, s):
    """[n] r = s(x) / max s of the draft's first choices x, from log-probabilities q and s [n, V]."""
    return (s.gather(-1, q.argmax(-1, keepdim=True))[:, 0] - s.amax(-1)).exp()


def worth(draft, windows, slim, work):
    """Lines on Delta and on what a token costs via and sd; work: of a slim pass, in full ones."""
    written = Windows(draft, windows.texts, windows.W).p
    hits = windows.agreed(written)
    ratios = torch.cat([slim_ratios(*both) for both in zip(written, slim)]).tolist()
    deltas = [fmean(float(shortcut(*row, *asked).mean()) for row in zip(windows.p, written, slim))
              for asked in ((0.5, 0.5, 1.0), (0.0, 1.0, 1.0), (0.5, 0.5, 0.9), (0.0, 1.0, 0.9))]
    c = ViaSd.gamma * draft.read_bytes(draft.full) / windows.model.read_bytes(windows.model.full)
    gain, full, tokens, usual = over_sd(hits, ratios, c, work)
    return (f"the draft's at {fmean(hits):.1%}\nDelta (above 0 slim helps) at (1/2, 1/2) and (0, 1): " +
            '{:.2g} and {:.2g} to the target, {:.2g} and {:.2g} to 0.1 draft + 0.9 target'.format(*deltas) +
            f'\na cycle: via {c:.2f} + {work:.2f} + {full:.2f} target passes for {tokens:.2f} tokens, sd '
            f'{c:.2f} + 1 for {usual:.2f}\nslim {"pays" if gain > 1 else "does not pay"}: {gain:.2f} times '
            'sd (modelled by weight bytes)')


# ------------------------------------------------------------------- --anchors: what sparse passes choose by
# In dense verifying passes the sparse functions choose beside the dense ones, without effect.

def recorded(dense, sparse_form, log):
    """The dense function of a sublayer, which also appends to the log the carry of its sparse form."""
    def run(*args):
        log.append(sparse_form(*args)[1])
        return dense(*args)
    return run


def observed_experts(x, moe, carry, betas):
    """(None, the carry of sparse_moe_forward and silu(gate) of each token's chosen experts as `channels`)."""
    _, carry = kernels.sparse_moe_forward(x, moe, carry, betas, 0)
    _, chosen = kernels.route(x, moe)                                       # [N, k]
    gate, _ = (moe.gate_up_proj[chosen] @ x[:, None, :, None]).chunk(2, 2)  # [N, k, F, 1]
    return None, carry | dict(channels=torch.nn.functional.silu(gate))


def recording_path(model, rule, log):
    """The model's full path, on which every layer logs what its sparse attention and feed-forward choose.

    rule: verify.Blocks. Thresholds are 0, so the sparse forms leave no channel and no expert out.
    """
    betas = [0.0] * max(model.config.num_experts_per_tok - 1, 0)
    attends = []
    ffns = []
    for layer, E in enumerate(model.config.mixtures):
        choose = functools.partial(kernels.sparse_attend, how=(layer, True, rule))
        leave_out = functools.partial(kernels.sparse_swiglu, threshold=0.0)
        if E:
            leave_out = functools.partial(observed_experts, betas=betas)
        attends.append(recorded(kernels.attend, choose, log))
        ffns.append(recorded(kernels.feed_forward, leave_out, log))
    return replace(model.full, attends=tuple(attends), ffns=tuple(ffns), sparse=True, block=rule.block)


def sparsity(model, texts, T=5, **knobs):
    """The section 'sparse': what dense verifying passes over T positions of texts (ids) would choose.

    anchors: layer 0, then those whose blocks differ most from the layer before; jaccard: similarity of each
    with it; channels, experts: for each layer 21 quantiles, 0 to 1, of |silu(gate)|, in a mixture that of the
    chosen experts, and of the share of the weight that a token's m lowest experts have, m = 1, 2, ...
    Source: as verify.Sparse (anchor layers).
    """
    mixtures = model.config.mixtures
    similar = [[] for _ in mixtures]        # Jaccard similarities of a layer's blocks to the layer before's
    sizes = [[] for _ in mixtures]          # [n, 1] channels' sizes
    shares = [[] for _ in mixtures]         # [n, k - 1] of the lowest experts
    rule = Sparse(**dict(dense_below=32) | knobs).blocks
    for ids in tqdm(texts, desc='texts', disable=None):
        reader = Reader(model, len(ids))
        for end in range(T, len(ids) - T, T):
            reader.read(ids[:end], model.full, 0)
            log = []
            reader.read(ids[:end + T], recording_path(model, rule, log), T)
            before = []
            for layer, E in enumerate(mixtures):
                attention, feed_forward = log[2 * layer:2 * layer + 2]
                heads = []
                if 'blocks' in attention:                       # else the text is too short to choose from
                    heads = list(map(set, attention['blocks'][0].tolist()))
                similar[layer] += [len(a & b) / len(a | b) for a, b in zip(heads, before)]
                before = heads
                sizes[layer].append(feed_forward['channels'].reshape(-1, 1)[::EVERY].abs())
                if E:
                    shares[layer].append(feed_forward['lowest'])
    require_that(similar[-1],
                 f'calibration texts of {max(map(len, texts))} tokens at most: too short for blocks')
    jaccard = [round(fmean(values), 4) for values in similar[1:]]
    order = sorted(range(1, len(mixtures)), key=lambda layer: jaccard[layer - 1])
    channels = [quantiles(torch.cat(one))[0] for one in sizes]
    experts = [quantiles(torch.cat(one)) if one else [] for one in shares]
    return dict(anchors=[0, *order], jaccard=jaccard, channels=channels, experts=experts)


def quantiles(columns):
    """[[QUANTILES numbers] of each column] of columns [n, c], by the nearest rank."""
    ranked = columns.float().sort(0).values.T                               # [c, n]
    ranks = torch.linspace(0, 1, QUANTILES, dtype=torch.float64) * (ranked.shape[1] - 1)
    return [[round(value, 5) for value in column[ranks.round().long()].tolist()] for column in ranked]


# ------------------------------------------------------------------ --signals: what SpecGuard judges steps by

def signal_ranges(steps):
    """[[1st, 99th percentile] of L, the same of G] of steps (L, G, ...)."""
    found = []
    for values in list(zip(*steps))[:2]:
        ranked = sorted(values)
        found.append([ranked[round(share * (len(ranked) - 1))] for share in (0.01, 0.99)])
    return found


# --------------------------------------------------------------------------------------------- the program

def parse(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add('--target', metavar='DIR', default=EMBEDDED / 'target', help='default: the embedded one')
    add('--prompts', metavar='FILE', help='prompts (JSON lines; default: rows of the embedded tasks)')
    add('--chat', action='store_true', help="put them into the target's chat template")
    add('--texts', type=int, default=Settings.texts, help='texts that are used (default: 28)')
    add('--seed', type=int, default=Settings.seed)
    add('--skip', type=float, default=Settings.skip, help='share of the layers to leave out (default: 0.45)')
    add('--tokens', type=int, default=Settings.tokens, help='tokens scored of a text (default: 32)')
    add('--evaluations', type=int, default=Settings.evaluations, help='masks to try at most (default: 60)')
    instead = p.add_mutually_exclusive_group().add_argument
    instead('--anchors', action='store_true', help='measure what --sparse needs, instead of searching a mask')
    instead('--signals', action='store_true', help="measure a pair's signals for specguard instead of a mask")
    add('--draft', metavar='DIR', help="whose signals, or beside which a mask is judged (default: embedded)")
    args = p.parse_args(argv)
    args.draft = args.draft or (EMBEDDED / 'draft' if args.target == EMBEDDED / 'target' else 'none')
    for name, low, high in (('texts', 1, 1e6), ('tokens', 1, 1e6), ('evaluations', 1, 1e6), ('skip', 0, 1),
                            ('seed', 0, 2 ** 31 - 1)):
        value = getattr(args, name)
        require_that(low <= value <= high, f'--{name} {value}: expected {low} to {high:g}')
    require_that(args.prompts or not args.chat, '--chat puts --prompts into a template; give --prompts FILE')
    require_writable(find_folder(args.target), f'--target {args.target}')
    return args


def signal_texts(args, settings):
    """(an Engine of the pair, rows, their prompts as ids, the SpecGuard that is measured)."""
    engine = Engine(str(args.target), str(args.draft))
    method = SpecGuard(tau=math.inf, delimiter='sentence' if settings.prompts else r'\n')
    rows = calibration_rows(settings)[:settings.texts]
    return engine, rows, encoded(engine, rows, settings.chat), method


def measure_signals(args, settings):
    """Writes the section `signals` of a pair: ranges of L and G over the steps after prompts.

    At tau = inf the target writes all that the draft's steps go on from.
    """
    engine, _, prompts, method = signal_texts(args, settings)
    engine.open(prompts)
    steps = []
    for ids in tqdm(prompts, desc='signals', disable=None):
        for cycle in engine.write(ids, method):
            seen = [(row.logp, row.grounding) for row in cycle.judged]
            steps.append(list(map(min, zip(*seen))))
    logp, grounding = signal_ranges(steps)
    found = dict(draft_logp=logp, draft_grounding=grounding, steps=len(steps))
    write_calibration(args.target, 'signals', found, args.draft)
    print(f'{len(steps)} steps; weakest log-probability {logp}, weakest grounding {grounding} (1st and 99th '
          'percentile)')


def measure_anchors(engine, settings):
    """Writes the section `sparse` of a target, from its texts joined and cut anew."""
    joined = sum(calibration_texts(engine, settings), [])
    texts = [joined[begin:begin + 512] for begin in range(0, len(joined), 512)]
    found = sparsity(engine.models['target'], texts)
    print(f'anchors, those that differ most from the layer before first: {found["anchors"]}')
    write_calibration(engine.target, 'sparse', found)


def measure_mask(engine, settings):
    """Writes the section `mask` of a target and prints what was found."""
    model = engine.models['target']
    windows = Windows(model, calibration_texts(engine, settings), settings.tokens)
    found = find_mask(model, windows, settings)
    write_calibration(engine.target, 'mask', found)
    slim = windows.logps(model.full.without(found['skip']))
    print(f'skips {found["skip"]} of {2 * model.config.num_hidden_layers} sublayers: {found["work"]:.0%} of '
          f'the weights; R {found["cost"]:.2g} nats a token, of the best plain mask {found["plain"]:.2g}; '
          f"{found['masks']} masks\nslim's first choice is the target's at {fmean(windows.agreed(slim)):.1%}")
    if engine.has_draft:
        print(worth(engine.models['draft'], windows, slim, found['work']))
    else:
        print('give --draft DIR to learn whether it pays')


def settings_of(args):
    return Settings(**{name: getattr(args, name) for name in asdict(Settings())})


def run(args):
    settings = settings_of(args)
    if args.signals:
        measure_signals(args, settings)
    else:
        measure = measure_anchors if args.anchors else measure_mask
        measure(Engine(str(args.target), str(args.draft)), settings)


def main(argv=None):
    """Runs the program; returns its exit status, see specmini.exit_status."""
    return exit_status('train_mask', lambda: run(parse(argv)))


if __name__ == '__main__':
    sys.exit(main())
