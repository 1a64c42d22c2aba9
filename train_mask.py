"""What is measured once on a model and kept in its calibration.json: which sublayers a slim pass can skip.

`python train_mask.py` searches the mask of the embedded target in half a minute; --target and --text take
any other model. Random proposals take turns with Bayesian ones (a Gaussian process over masks, expected
improvement). Ctrl-C keeps the best so far, --resume goes on from it. How masks are used: verify.py.
--signals measures instead how sure and how grounded a draft's steps are, for specguard (lab/steps.py), and
--anchors what --sparse needs to choose layers and thresholds by (lab/passes.py).

m maskable units (layers or sublayers), k of them skipped, n masks tried, W tokens of a window, V vocabulary.
"""
import argparse
import itertools
import math
import sys
import time

import torch
from tqdm import tqdm

from lab.calibration import read_calibration, write_calibration
from model import Reader, expect, load
from specmini import EMBEDDED, Parser
from verify import violation

SETTINGS = 'unit', 'skip', 'objective', 'seed', 'windows', 'window', 'text'     # a resumed search's are equal


class Windows:
    """Texts, each of more than W ids, that the full path has read; what a slim path makes of their last W.

    As in decoding, slim starts from the full path's cache and reads the window like a lag, in one pass.
    """

    def __init__(self, model, texts, W):
        self.model, self.texts, self.W = model, texts, W
        self.readers = [Reader(model, len(ids)) for ids in texts]
        self.p = [self.law(reader, ids, model.full) for reader, ids in zip(self.readers, texts)]

    def law(self, reader, ids, path):
        """Log-probabilities [W, V]; whatever the cache holds, the window is read anew."""
        return reader.read(ids, [], path, self.W).float().log_softmax(-1)

    def cost(self, skip, objective='violation'):
        """What DIMR minimises: R(p|s) in nats a token; for 'argmax', how often the likeliest token differs.

        Source: VIA-SD (2026), DIMR; Xia et al. 2024 (SWIFT) for the match of argmaxes.
        """
        path, total = self.model.full.slim(set(skip)), 0.0
        for reader, ids, p in zip(self.readers, self.texts, self.p):
            s = self.law(reader, ids, path)
            apart = violation(p, s) if objective == 'violation' else (p.argmax(-1) != s.argmax(-1)).float()
            total += float(apart.mean())
        return total / len(self.texts)


# ------------------------------------------------------------------------------------------------- the search

def expected_improvement(seen, costs, masks):
    """[N] how far each mask is expected to beat the best one, by a Gaussian process on the log of the costs.

    seen [n, m] and masks [N, m] are 0/1 rows. The kernel exp(-d / l), d the units in which two masks differ,
    is a product over units, hence positive definite; l is the one of six that makes the costs likeliest.
    Source: Jones et al. 1998 (expected improvement); Rasmussen and Williams 2006, algorithm 2.1.
    """
    y = (costs + 1e-9).log()
    y, fits = (y - y.mean()) / y.std().clamp(min=1e-9), []
    for l in (1, 2, 4, 8, 16, 32):
        K = (-torch.cdist(seen, seen, p=1) / l).exp() + 1e-2 * torch.eye(len(y), dtype=y.dtype)
        root = torch.linalg.cholesky(K)                                                 # [n, n]
        weights = torch.cholesky_solve(y[:, None], root)                                # [n, 1]
        fits.append((float(-y @ weights[:, 0] / 2 - root.diagonal().log().sum()), l, root, weights))
    _, l, root, weights = max(fits, key=lambda fit: fit[0])
    near = (-torch.cdist(masks, seen, p=1) / l).exp()                                   # [N, n]
    known = torch.linalg.solve_triangular(root, near.T, upper=False).square().sum(0)    # [N]
    deviation = (1 - known).clamp(min=1e-12).sqrt()
    z, normal = (y.min() - (near @ weights)[:, 0]) / deviation, torch.distributions.Normal(0.0, 1.0)
    return deviation * (z * normal.cdf(z) + normal.log_prob(z).exp())


def propose(tried, m, k, generator, bayes):
    """k of m units, a sorted tuple not in tried {mask: cost}: random, or of most expected improvement.

    The latter of 500 random ones and all swaps of one unit in the best 8. None where none of these is new.
    """
    many = [tuple(sorted(torch.randperm(m, generator=generator)[:k].tolist())) for _ in range(500)]
    if bayes:
        for z in sorted(tried, key=tried.get)[:8]:
            swaps = itertools.product(z, set(range(m)) - set(z))
            many += [tuple(sorted(set(z) - {out} | {new})) for out, new in swaps]
    many = [z for z in dict.fromkeys(many) if z not in tried]
    if not bayes or not many:
        return many[0] if many else None
    rows = lambda masks: torch.nn.functional.one_hot(torch.tensor(masks), m).sum(1).double()
    costs = torch.tensor(list(tried.values()), dtype=torch.float64)
    return many[int(expected_improvement(rows(list(tried)), costs, rows(many)).argmax())]


def search(cost, m, k, args, tried, end=math.inf):
    """Adds to tried {mask: cost} up to the budget of args; Ctrl-C ends it early, and nothing is lost.

    cost: function of a mask; end: the perf_counter from which none is tried. A proposal depends on the seed
    and on tried alone: a resumed search goes the way of an uninterrupted one. Source: VIA-SD (2026), DIMR.
    """
    total = min(args.evaluations, math.comb(m, k))
    bar = tqdm(total=total, initial=len(tried), disable=None, desc='masks')
    try:
        while len(tried) < total and time.perf_counter() < end:
            i, costs = len(tried), list(tried.values())
            generator = torch.Generator().manual_seed(args.seed * 100_003 + i)
            mask = propose(tried, m, k, generator, args.period and i >= 8 and i % args.period == 0)
            if mask is None or i and i - costs.index(min(costs)) > args.patience:
                break
            tried[mask] = cost(mask)
            bar.update()
            bar.set_postfix(best=f'{min(tried.values()):.4f}')
    except KeyboardInterrupt:
        bar.write('interrupted: the best so far is kept', file=sys.stderr)


def find_mask(model, windows, args, tried):
    """The section `mask` of the calibration file, from tried {mask: cost} as the search leaves it.

    Its keys: see lab/calibration.py. nested: the best, then the half and the quarter of it that cost least.
    """
    L, generator = model.config.num_hidden_layers, torch.Generator().manual_seed(args.seed)
    units = [(j,) for j in range(2, 2 * L - 2)]             # the first and the last layer always stay
    units = units if args.unit == 'sublayer' else [(j, j + 1) for j in range(2, 2 * L - 2, 2)]
    m, k = len(units), int(args.skip * L * (2 if args.unit == 'sublayer' else 1))
    expect(0 < k <= m, f'--skip {args.skip}: {k} of {m} free {args.unit}s; expected 1 to {m}')
    flat = lambda mask: sorted(j for u in mask for j in units[u])
    cost = lambda mask: windows.cost(flat(mask), args.objective)
    evenly = cost([int((i + 0.5) * m / k) for i in range(k)])       # before the search: Ctrl-C loses nothing
    chance = sum(cost(propose({}, m, k, generator, False)) for _ in range(10)) / 10
    end = (begin := time.perf_counter()) + 60 * args.minutes        # of all searches together
    search(cost, m, k, args, tried, end)
    expect(tried, 'no mask was tried: give the search more --minutes')
    nested, seconds = [best := min(tried, key=tried.get)], round(time.perf_counter() - begin, 1)
    while len(nested) < 3 and len(nested[-1]) > 1:
        last, within = nested[-1], {}
        search(lambda z: cost([last[i] for i in z]), len(last), len(last) // 2, args, within, end)
        if not within:                                      # interrupted before the first, or too late
            break
        nested.append([last[i] for i in min(within, key=within.get)])
    work = model.read_bytes(model.full.slim(set(flat(best)))) / model.read_bytes(model.full)
    return dict(skip=flat(best), nested=[flat(z) for z in nested], cost=tried[best], evenly=evenly,
                random=chance, work=work, seconds=seconds, settings={x: getattr(args, x) for x in SETTINGS},
                tried={' '.join(map(str, z)): c for z, c in tried.items()})


# ------------------------------------------------------------------------------------------------ the program

def parse(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add('--target', metavar='DIR', default=EMBEDDED / 'target', help='default: the embedded one')
    add('--text', metavar='FILE', help='calibration text (default: training rows of the embedded tasks)')
    add('--skip', type=float, default=0.45, help='share of the layers to leave out (default: 0.45)')
    add('--unit', choices=('layer', 'sublayer'), default='layer', help='what a mask leaves out')
    add('--objective', choices=('violation', 'argmax'), default='violation', help="DIMR's R or SWIFT's match")
    add('--evaluations', type=int, default=60, help='masks to try at most (default: 60)')
    add('--minutes', type=float, default=60.0, help='time to search at most (default: 60)')
    add('--patience', type=int, default=30, help='masks without a better one that end it (default: 30)')
    add('--period', type=int, default=2, help='every so many proposals a Bayesian one; 0: never (default: 2)')
    add('--windows', type=int, default=28, help='calibration texts (default: 28)')
    add('--window', type=int, default=32, help='tokens scored of each (default: 32, as the max_lag of via)')
    add('--seed', type=int, default=0)
    add('--resume', action='store_true', help='go on from the masks that calibration.json has')
    add('--anchors', action='store_true', help='measure what --sparse needs, instead of searching a mask')
    add('--signals', action='store_true', help="measure a pair's signals for specguard instead of a mask")
    add('--draft', metavar='DIR', default=EMBEDDED / 'draft', help='whose signals')
    add('--rows', type=int, default=60, help='rows of each task for --signals (default: 60)')
    add('--accuracy', type=float, default=0.95, help='share of the kept steps that is to be right')
    add('--share', type=float, help='or instead: the largest share of steps for the target to write')
    args = p.parse_args(argv)
    for names, low, high in (('evaluations patience windows window rows', 1, math.inf),
                             ('accuracy share skip', 0, 1), ('seed', 0, 2 ** 31 - 1)):
        for name in names.split():
            value = getattr(args, name)
            expect(value is None or low <= value <= high, f'--{name} {value}: expected {low} to {high}')
    expect(not (args.signals and args.anchors), '--signals and --anchors are two measurements; give one')
    return args


def resumed(args):
    """tried {mask: cost} of the search that --resume goes on from."""
    old = read_calibration(args.target, None, ['mask'])['mask']
    same = old.get('settings') == {x: getattr(args, x) for x in SETTINGS} and 'tried' in old
    expect(same, f'--resume: the search before was of {old.get("settings")}; give this one the same')
    return {tuple(map(int, mask.split())): cost for mask, cost in old['tried'].items()}


def main(argv=None):
    """Runs the program; returns its exit status: 0, or 2 for bad input (one line on stderr)."""
    try:
        args = parse(argv)
        if args.signals:
            from lab.steps import find_signals
            write_calibration(args.target, 'signals', find_signals(args), args.draft)
            return 0
        from lab.prompts import calibration_texts
        model, tokenizer, _ = load(args.target, 'cuda' if torch.cuda.is_available() else 'cpu')
        texts = calibration_texts(tokenizer, args)
        if args.anchors:
            from lab.passes import find_anchors
            write_calibration(args.target, 'sparse', find_anchors(model, texts))
            return 0
        windows = Windows(model, texts, args.window)
        found = find_mask(model, windows, args, resumed(args) if args.resume else {})
        write_calibration(args.target, 'mask', found)
    except (ValueError, OSError) as error:
        print('train_mask:', ' '.join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:                                   # before the search, or a second one
        return 130
    print(f'skips {found["skip"]} of {2 * model.config.num_hidden_layers} sublayers: {found["work"]:.0%} of '
          f'the weights; {args.objective} a token {found["cost"]:.2g}, evenly spaced {found["evenly"]:.2g}, '
          f'random {found["random"]:.2g} (mean of 10); {len(found["tried"])} masks, {found["seconds"]} s')
    return 0


if __name__ == '__main__':
    sys.exit(main())
