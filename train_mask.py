"""What is measured once on a model and kept in its calibration.json: which sublayers a slim pass can skip.

`python train_mask.py` searches the mask of the embedded target in half a minute; --target and --text take
any other model, --prompts what the target itself writes behind prompts of yours. Masks that need no search
come first: evenly spaced units, all contiguous blocks; then random proposals take turns with Bayesian ones (a
Gaussian process over masks, expected improvement). Ctrl-C keeps the best so far, --resume goes on from it.
How masks are used: verify.py.
--anchors measures instead what --sparse needs to choose layers and thresholds by, and --signals how sure and
how grounded a draft's steps are, for specguard (steps of the laboratory's tasks, or of your own --prompts).

m maskable units (layers or sublayers), k of them skipped, n masks tried, W tokens of a window, V vocabulary.
"""
import argparse
import functools
import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File

import torch
from tqdm import tqdm

import kernels
from model import Reader, encode, expect, load, read_calibration, write_calibration
measured_sections = dict
from specmini import (EMBEDDED, Parser, chat, exit_status, lab_module, pick_device, read_rows, take_threads,
                      text_of_file)
from verify import Autoregressive, Session, Sparse, decode, silence, violation


@dataclass(frozen=True)
class Settings:
    """What a search is asked for; a resumed one must ask for the same texts, units and objective."""
    unit: str = 'layer'             # what a mask leaves out: layer or sublayer
    skip: float = 0.45              # share of the layers to leave out
    objective: str = 'violation'    # DIMR's R, or argmax: SWIFT's match
    seed: int = 0
    windows: int = 28               # calibration texts
    window: int = 32                # W, tokens scored of each; as the max_lag of via
    text: str = None                # file of calibration text
    prompts: str = None             # of prompts that it goes on from; neither: training rows of the lab
    chat: bool = False              # whether these are put into its chat template
    evaluations: int = 60           # masks to try at most
    minutes: float = 60.0           # time to search at most
    patience: int = 30              # masks without a better one that end it
    period: int = 2                 # every so many proposals a Bayesian one; 0: never

    def asked(self):
        """What a resumed search must have in common with the one before."""
        return {name: getattr(self, name) for name in RESUMED}


RESUMED = 'unit', 'skip', 'objective', 'seed', 'windows', 'window', 'text', 'prompts', 'chat'
WARM_UP = 8             # masks tried at random before the Gaussian process is asked
RANDOM = 500            # random masks among which a proposal is chosen
NOISE = 1e-2            # variance of a cost's logarithm that is not explained, over that which is
QUANTILES = 21          # 0 to 1 in steps of 0.05, of every table that --anchors writes
PART = 4                # a nested mask is sought among a 4th as many: few methods make use of one
EVERY = 17              # of a pass's channel activations, every 17th is kept: enough for quantiles


class Windows:
    """Texts, each of more than W ids, that the full path has read; what a slim path makes of their last W.

    As in decoding, slim starts from the full path's cache and reads the window like a lag, in one pass.
    """

    def __init__(self, model, texts, W):
        self.model = model
        self.texts = texts
        self.W = W
        self.readers = [Reader(model, len(ids)) for ids in texts]
        self.p = []                                     # of each text the target's log-probabilities [W, V]
        for reader, ids in zip(self.readers, texts):
            self.p.append(self.law(reader, ids, model.full))

    def law(self, reader, ids, path):
        """Log-probabilities [W, V]; whatever the cache holds, the window is read anew."""
        return reader.read(ids, [], path, self.W).float().log_softmax(-1)

    def cost(self, skip, objective='violation'):
        """What DIMR minimises: R(p|s) in nats a token; for 'argmax', how often the likeliest token differs.

        Source: VIA-SD (2026), DIMR; Xia et al. 2024 (SWIFT) for the match of argmaxes.
        """
        path = self.model.full.without(skip)
        total = 0.0
        for reader, ids, p in zip(self.readers, self.texts, self.p):
            s = self.law(reader, ids, path)
            if objective == 'violation':
                apart = violation(p, s)                                                 # [W]
            else:
                apart = (p.argmax(-1) != s.argmax(-1)).float()
            total += float(apart.mean())
        return total / len(self.texts)


# ---------------------------------------------------------------------------------------------- the search

def distances(masks, others):
    """[N, n]: the units in which two masks differ; masks [N, m] and others [n, m] are 0/1 rows."""
    return torch.cdist(masks, others, p=1)


def fit_process(seen, y):
    """(log-likelihood, l, root [n, n], weights [n, 1]) of the Gaussian process that makes y [n] likeliest.

    The kernel exp(-d / l), d the units in which two masks differ, is a product over units, hence positive
    definite; l is the best of six. root: the Cholesky factor of the costs' covariance.
    Source: Rasmussen and Williams 2006, algorithm 2.1.
    """
    fits = []
    for l in (1, 2, 4, 8, 16, 32):
        covariance = (-distances(seen, seen) / l).exp() + NOISE * torch.eye(len(y), dtype=y.dtype)
        root = torch.linalg.cholesky(covariance)
        weights = torch.cholesky_solve(y[:, None], root)
        likelihood = -y @ weights[:, 0] / 2 - root.diagonal().log().sum()
        fits.append((float(likelihood), l, root, weights))
    return max(fits, key=lambda fit: fit[0])


def expected_improvement(seen, costs, masks):
    """[N] how far each mask is expected to beat the best one, by a Gaussian process on the log of the costs.

    seen [n, m] and masks [N, m] are 0/1 rows. Source: Jones et al. 1998 (expected improvement).
    """
    y = (costs + 1e-9).log()
    y = (y - y.mean()) / y.std().clamp(min=1e-9)
    _, l, root, weights = fit_process(seen, y)
    near = (-distances(masks, seen) / l).exp()                                          # [N, n]
    known = torch.linalg.solve_triangular(root, near.T, upper=False).square().sum(0)    # [N]
    deviation = (1 - known).clamp(min=1e-12).sqrt()
    z = (y.min() - (near @ weights)[:, 0]) / deviation
    normal = torch.distributions.Normal(0.0, 1.0)
    return deviation * (z * normal.cdf(z) + normal.log_prob(z).exp())


def propose(tried, m, k, generator, bayes):
    """k of m units, a sorted tuple not in tried {mask: cost}: random, or of most expected improvement.

    The latter of RANDOM random ones and all swaps of one unit in the best 8. None where none of these is new.
    """
    many = []
    for _ in range(RANDOM):
        units = torch.randperm(m, generator=generator)[:k]
        many.append(tuple(sorted(units.tolist())))
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
    """[N, m] 0/1 rows of masks, tuples of units."""
    return torch.nn.functional.one_hot(torch.tensor(masks), m).sum(1).double()


def plain_masks(m, k):
    """Masks of k of m units that need no search: the evenly spaced one, then every contiguous block."""
    yield tuple(int((i + 0.5) * m / k) for i in range(k))
    for begin in range(m - k + 1):
        yield tuple(range(begin, begin + k))


def proposals(m, k, settings, tried):
    """Yields new masks of k of m units, as long as it finds any; after each it looks at tried {mask: cost}.

    A proposal depends on the seed and on tried alone: a resumed search goes the way of an uninterrupted one.
    """
    while True:
        i = len(tried)
        generator = torch.Generator().manual_seed(settings.seed * 100_003 + i)
        bayes = settings.period and i >= WARM_UP and i % settings.period == 0
        mask = propose(tried, m, k, generator, bayes)
        if mask is None:
            return
        yield mask


def search(cost, masks, settings, tried, end=math.inf):
    """Adds to tried {mask: cost} what the settings allow; Ctrl-C ends it early, and nothing is lost.

    cost: function of a mask; masks: those to try in turn; end: the perf_counter from which none is tried.
    Source: VIA-SD (2026), DIMR.
    """
    bar = tqdm(total=settings.evaluations, initial=len(tried), disable=None, desc='masks')
    try:
        for mask in masks:
            spent = len(tried) >= settings.evaluations or time.perf_counter() >= end
            if spent or since_best(tried) > settings.patience:
                break
            if mask not in tried:
                tried[mask] = cost(mask)
                bar.update()
                bar.set_postfix(best=f'{min(tried.values()):.4f}')
    except KeyboardInterrupt:
        bar.write('interrupted: the best so far is kept', file=sys.stderr)


def since_best(tried):
    """How many masks were tried from the best one on, itself included; 0 where none was."""
    costs = list(tried.values())
    return len(costs) - costs.index(min(costs)) if costs else 0


def maskable(settings, layers):
    """[tuple of sublayers of each unit]: the first and the last layer always stay."""
    units = []
    for i in range(1, layers - 1):
        if settings.unit == 'layer':
            units.append((2 * i, 2 * i + 1))
        else:
            units += [(2 * i,), (2 * i + 1,)]
    return units


def find_mask(model, windows, settings, tried):
    """The section `mask` of the calibration file, from tried {mask: cost} as the search leaves it.

    Its keys: see model.py. nested: the best, then the half and the quarter of it that cost least.
    """
    layers = model.config.num_hidden_layers
    units = maskable(settings, layers)
    m = len(units)
    every = layers if settings.unit == 'layer' else 2 * layers
    k = int(settings.skip * every)
    expect(0 < k <= m, f'--skip {settings.skip}: {k} of {m} free {settings.unit}s; expected 1 to {m}')

    def sublayers(mask):
        return sorted(j for unit in mask for j in units[unit])

    def cost(mask):
        return windows.cost(sublayers(mask), settings.objective)
    begin = time.perf_counter()
    end = begin + 60 * settings.minutes                             # of all searches together
    masks = itertools.chain(plain_masks(m, k), proposals(m, k, settings, tried))
    search(cost, masks, settings, tried, end)
    expect(tried, 'no mask was tried: give the search more --minutes')
    best = min(tried, key=tried.get)
    seconds = round(time.perf_counter() - begin, 1)
    nested = [best]
    while len(nested) < 3 and len(nested[-1]) > 1:
        inner = best_half(cost, nested[-1], settings, end)
        if inner is None:                               # interrupted before the first, or too late
            break
        nested.append(inner)
    slim = model.full.without(sublayers(best))
    plain = {}
    for name, mask in best_plain(m, k, tried).items():
        plain[name] = dict(skip=sublayers(mask), cost=tried[mask])
    return dict(skip=sublayers(best), nested=[sublayers(mask) for mask in nested], cost=tried[best],
                plain=plain, work=model.read_bytes(slim) / model.read_bytes(model.full), seconds=seconds,
                settings=settings.asked(),
                tried={' '.join(map(str, mask)): found for mask, found in tried.items()})


def best_plain(m, k, tried):
    """{evenly, contiguous: the mask of that kind that costs least}, of those that an ended search tried."""
    evenly, *blocks = plain_masks(m, k)
    found = {}
    for name, masks in dict(evenly=[evenly], contiguous=blocks).items():
        there = [mask for mask in masks if mask in tried]
        if there:
            found[name] = min(there, key=tried.get)
    return found


def best_half(cost, mask, settings, end):
    """The half of a mask's units that costs least, by a search of its own; None where none was tried."""
    def cost_within(places):
        return cost([mask[i] for i in places])
    within = {}
    fewer = replace(settings, evaluations=-(-settings.evaluations // PART))
    masks = proposals(len(mask), len(mask) // 2, settings, within)
    search(cost_within, masks, fewer, within, end)
    if not within:
        return None
    return [mask[i] for i in min(within, key=within.get)]


# ---------------------------------------------------------------------------------------- calibration texts

def calibration_texts(tokenizer, settings):
    """settings.windows texts as ids, each ending in the settings.window tokens that are scored.

    Of --text: evenly spaced pieces. Else the lab's training rows, task by task, as far into their solutions.
    Those of --prompts: see written_behind.
    """
    if settings.text:
        return pieces_of(tokenizer, settings)
    tasks = lab_module('tasks')
    expect(tasks, 'no laboratory with tasks beside this file: give --prompts FILE or --text FILE')
    W = settings.window
    texts = []
    sources = [tasks.rows(task, settings.seed, 'train') for task in tasks.TASKS]
    for source in sources * (10 * settings.windows):
        row = next(source)
        prompt, whole = encode(tokenizer, [row['prompt'], row['prompt'] + row['solution']])
        if len(whole) > W:
            texts.append(whole[:len(prompt) + W])
        if len(texts) == settings.windows:
            return texts
    raise ValueError(f'--window {W}: hardly a text of the tasks is that long; give a --text FILE or fewer')


def pieces_of(tokenizer, settings):
    """Evenly spaced pieces of a file, each of at most eight windows."""
    W = settings.window
    (ids,) = encode(tokenizer, [text_of_file('--text', settings.text)], special=False)
    expect(len(ids) >= 2 * W, f'--text {settings.text}: {len(ids)} tokens; expected at least {2 * W}')
    pieces = []
    for i in range(settings.windows):
        end = 2 * W + i * (len(ids) - 2 * W) // settings.windows
        pieces.append(ids[max(0, end - 8 * W):end])
    return pieces


def written_behind(prompts, model, eos, W):
    """Each prompt (ids) and what the target writes behind it, greedily: W tokens, or up to the end."""
    texts = []
    for i, ids in enumerate(tqdm(prompts, desc='calibration texts', disable=None), 1):
        context = model.config.max_position_embeddings
        expect(len(ids) + W <= context,
               f'--prompts: prompt {i} has {len(ids)} tokens; expected at most {context - W}')
        session = Session(Reader(model, len(ids) + W), None, silence, list(ids), W, eos)
        for _ in decode(session, Autoregressive()):
            pass
        expect(len(session.tokens) > W,
               f'--prompts: prompt {i} and its answer have {len(session.tokens)} tokens; expected above {W}')
        texts.append(session.tokens)
    return texts


def calibration_rows(settings):
    """settings.windows rows of the file of prompts, evenly spaced; ValueError where there are fewer."""
    rows = read_rows(None, settings.prompts)
    n = settings.windows
    expect(len(rows) >= n, f'--prompts {settings.prompts}: {len(rows)} prompts; give {n}, or --windows fewer')
    return [rows[i * len(rows) // n] for i in range(n)]


def calibration_prompts(target, tokenizer, settings):
    """The ids of these rows' prompts, in the chat template where that is asked for."""
    texts = []
    for row in calibration_rows(settings):
        texts.append(chat(target, row['prompt']) if settings.chat else row['prompt'])
    return encode(tokenizer, texts, not settings.chat)


# ------------------------------------------------------------------- --anchors: what sparse passes choose by
# Dense verifying passes are watched while the sparse kernels choose beside them; nothing that they choose is
# used.

def watched(path, log):
    """The same path, which appends (sublayer, carry) to the log after every sublayer: what a pass chose.

    Sublayer 2i is the attention of layer i, 2i + 1 its feed-forward.
    """
    attends = []
    ffns = []
    for layer, attend in enumerate(path.attends):
        attends.append(logged(attend, 2 * layer, log))
    for layer, ffn in enumerate(path.ffns):
        ffns.append(logged(ffn, 2 * layer + 1, log))
    return replace(path, attends=tuple(attends), ffns=tuple(ffns))


def logged(sublayer, number, log):
    """A sublayer's function that also appends (number, carry) to the log; None, where skipped, stays None."""
    if sublayer is None:
        return None

    def run(*args):
        out, carry = sublayer(*args)
        log.append((number, carry))
        return out, carry
    return run


def attend_all(sparse_form, q, k, v, mask, carry):
    """Dense attention that hands on what the sparse form of it chooses."""
    _, carry = sparse_form(q, k, v, mask, carry)
    return kernels.attend(q, k, v, mask, carry)


class Choices:
    """What watched passes chose, collected layer by layer."""

    def __init__(self, mixtures):
        """mixtures: for each layer its number of experts, 0 where the feed-forward is dense."""
        self.mixtures = mixtures
        self.similar = []       # of each layer: Jaccard similarities of its blocks to the layer before's
        self.sizes = []         # of each layer: [n, 1] channels' sizes, or [n, k - 1] lowest experts' shares
        for _ in mixtures:
            self.similar.append([])
            self.sizes.append([])

    def add(self, log):
        """Adds one pass, in which no sublayer was skipped."""
        before = []
        for layer, experts in enumerate(self.mixtures):
            _, attention = log[2 * layer]
            _, feed_forward = log[2 * layer + 1]
            heads = []
            if 'blocks' in attention:                           # else the text is too short to choose from
                heads = list(map(set, attention['blocks'][0].tolist()))
            for mine, theirs in zip(heads, before):
                self.similar[layer].append(len(mine & theirs) / len(mine | theirs))
            before = heads
            if experts:
                self.sizes[layer].append(feed_forward['lowest'])
            else:
                some = feed_forward['channels'].flatten()[::EVERY]
                self.sizes[layer].append(some.abs()[:, None])

    def likeness(self):
        """[L - 1] mean similarity of each layer but the first to the one before."""
        return [round(sum(values) / len(values), 4) for values in self.similar[1:]]

    def tables(self, layer):
        """Quantiles of a layer's sizes: one table, or one for each number of lowest experts."""
        columns = torch.cat(self.sizes[layer]).float().sort(0).values.T
        places = torch.linspace(0, 1, QUANTILES, dtype=torch.float64) * (columns.shape[1] - 1)
        found = []
        for column in columns:
            values = column[places.long()].tolist()
            found.append([round(value, 5) for value in values])
        return found


def choosing_path(model, reader, knobs):
    """The model's full path, densely attended, on which every layer chooses blocks, channels and experts.

    Thresholds are so low that nothing is left out.
    """
    L = len(model.config.mixtures)
    k = model.config.num_experts_per_tok
    low = dict(
        anchors=list(range(L)),
        channels=[[1e-30]] * L,
        experts=[[[0.0]] * (k - 1)] * L,
    )
    knobs = dict(dense_below=32) | knobs
    method = Sparse(**knobs, anchors=L, ffn_quantile=0.5, moe_skip=max(k - 1, 0))
    session = Session(reader, None, None, [], 0, calibration=dict(sparse=low))
    path = method.view(model.full, session)
    attends = []
    for attend in path.attends:
        attends.append(functools.partial(attend_all, attend))
    return replace(path, attends=tuple(attends))


def sparsity(model, texts, T=5, **knobs):
    """The section 'sparse': what dense verifying passes over T positions of texts (ids) would choose.

    anchors: layer 0, then those whose blocks differ most from the layer before; jaccard: of each with it;
    channels, experts: for each layer 21 quantiles, 0 to 1, of |silu(gate)| and of the share of the weight
    that a token's m lowest experts have, m = 1, 2, ... Source: as verify.Sparse (anchor layers).
    """
    mixtures = model.config.mixtures
    choices = Choices(mixtures)
    for ids in tqdm(texts, desc='texts', disable=None):
        reader = Reader(model, len(ids))
        path = choosing_path(model, reader, knobs)
        for end in range(T, len(ids) - T, T):
            reader.read(ids[:end], [], model.full, 0)
            log = []
            reader.read(ids[:end], ids[end:end + T], watched(path, log), T)
            choices.add(log)
    if not choices.similar[-1]:
        longest = max(map(len, texts))
        raise ValueError(f'calibration texts of {longest} tokens at most: too short for blocks')
    likeness = choices.likeness()
    order = sorted(range(1, len(mixtures)), key=lambda layer: likeness[layer - 1])
    channels = []
    shares = []
    for layer, experts in enumerate(mixtures):
        tables = choices.tables(layer)
        channels.append([0.0] if experts else tables[0])
        shares.append(tables if experts else [])
    return dict(anchors=[0, *order], jaccard=likeness, channels=channels, experts=shares)


def find_anchors(model, texts):
    """The section 'sparse' from texts (ids) that are joined and cut anew; prints the layers' order."""
    joined = sum(texts, [])
    pieces = []
    for begin in range(0, len(joined), 512):
        pieces.append(joined[begin:begin + 512])
    found = sparsity(model, pieces)
    print(f'anchors, those that differ most from the layer before first: {found["anchors"]}')
    return found


# --------------------------------------------------------------------------------------------- the program

def parse(argv):
    usual = Settings()
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add('--target', metavar='DIR', default=EMBEDDED / 'target', help='default: the embedded one')
    add('--text', metavar='FILE', help='calibration text (default: training rows of the embedded tasks)')
    add('--prompts', metavar='FILE',
        help='prompts (JSON lines) that the target goes on from: calibration text of your own')
    add('--chat', action='store_true', help="put them into the target's chat template")
    add('--skip', type=float, default=usual.skip, help='share of the layers to leave out (default: 0.45)')
    add('--unit', choices=('layer', 'sublayer'), default=usual.unit, help='what a mask leaves out')
    add('--objective', choices=('violation', 'argmax'), default=usual.objective,
        help="DIMR's R or SWIFT's match")
    add('--evaluations', type=int, default=usual.evaluations, help='masks to try at most (default: 60)')
    add('--minutes', type=float, default=usual.minutes, help='time to search at most (default: 60)')
    add('--patience', type=int, default=usual.patience,
        help='masks without a better one that end it (default: 30)')
    add('--period', type=int, default=usual.period,
        help='every so many proposals a Bayesian one; 0: never (default: 2)')
    add('--windows', type=int, default=usual.windows, help='calibration texts (default: 28)')
    add('--window', type=int, default=usual.window,
        help='tokens scored of each (default: 32, as the max_lag of via)')
    add('--seed', type=int, default=usual.seed)
    add('--resume', action='store_true', help='go on from the masks that calibration.json has')
    add('--anchors', action='store_true', help='measure what --sparse needs, instead of searching a mask')
    add('--signals', action='store_true', help="measure a pair's signals for specguard instead of a mask")
    add('--draft', metavar='DIR', default=EMBEDDED / 'draft', help='whose signals')
    add('--rows', type=int, default=60, help='rows of each task for --signals (default: 60)')
    add('--accuracy', type=float, default=0.95, help='share of the kept steps that is to be right')
    add('--share', type=float, help='or instead: the largest share of steps for the target to write')
    args = p.parse_args(argv)
    check_flags(args)
    return args


def check_flags(args):
    """ValueError for the first flag that is out of its range."""
    ranges = dict(evaluations=(1, math.inf), patience=(1, math.inf), windows=(1, math.inf),
                  window=(1, math.inf), rows=(1, math.inf), accuracy=(0, 1), share=(0, 1), skip=(0, 1),
                  seed=(0, 2 ** 31 - 1))
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        expect(value is None or low <= value <= high, f'--{name} {value}: expected {low} to {high}')
    expect(not (args.text and args.prompts), '--text and --prompts are two calibration texts; give one')
    expect(args.prompts or not args.chat, '--chat puts --prompts into a template; give --prompts FILE')
    expect(not (args.signals and args.text), '--signals takes --prompts FILE, not --text')
    expect(not (args.signals and args.anchors), '--signals and --anchors are two measurements; give one')
    expect(File(args.target).is_dir(), f'--target {args.target}: no such folder; give a Hugging Face folder, '
           'say what hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir DIR puts into DIR')


def settings_of(args):
    """The Settings that the flags ask for."""
    return Settings(**{name: getattr(args, name) for name in asdict(Settings())})


def resumed(target, settings):
    """tried {mask: cost} of the search that --resume goes on from."""
    old = read_calibration(target, None, ['mask'])['mask']
    asked = Settings().asked() | old.get('settings', {})        # what an older file does not name is as usual
    same = asked == settings.asked() and 'tried' in old
    expect(same, f'--resume: the search before was of {old.get("settings")}; give this one the same')
    tried = {}
    for mask, cost in old['tried'].items():
        tried[tuple(map(int, mask.split()))] = cost
    return tried


def measure_signals(args):
    """Writes the section `signals` of the pair that the flags name."""
    calibrate = lab_module('specguard.calibrate')
    expect(calibrate, '--signals takes graded steps, which the laboratory makes, and there is no lab/ here')
    pair = calibrate.pair_for(args.target, args.draft, args.prompts, args.chat)
    take_threads(pair.network('target')[0])
    found = calibrate.find_signals(pair, args.rows, args.seed, args.accuracy, args.share)
    write_calibration(args.target, 'signals', found, args.draft)


def load_with_texts(target, settings):
    """(the network of the folder, calibration texts as ids): in bf16 on CUDA where it is there, else fp32."""
    device = pick_device('auto')
    dtype = torch.bfloat16 if device == 'cuda' else torch.float32       # as a run loads it
    model, tokenizer, eos = load(target, device, dtype)
    if device == 'cpu':
        model.pack()
        take_threads(model)
    if settings.prompts is None:
        return model, calibration_texts(tokenizer, settings)
    prompts = calibration_prompts(target, tokenizer, settings)
    return model, written_behind(prompts, model, eos, settings.window)


def measure_anchors(target, settings):
    """Writes the section `sparse` of a target."""
    model, texts = load_with_texts(target, settings)
    write_calibration(target, 'sparse', find_anchors(model, texts))


def measure_mask(target, settings, resume=False):
    """Writes the section `mask` of a target and prints what was found."""
    model, texts = load_with_texts(target, settings)
    tried = resumed(target, settings) if resume else {}
    found = find_mask(model, Windows(model, texts, settings.window), settings, tried)
    write_calibration(target, 'mask', found)
    costs = dict(found=found['cost'])
    for name, mask in found['plain'].items():
        costs[name] = mask['cost']
    listed = ', '.join(f'{name} {cost:.2g}' for name, cost in costs.items())
    print(f'skips {found["skip"]} of {2 * model.config.num_hidden_layers} sublayers: {found["work"]:.0%} of '
          f'the weights; {settings.objective} a token: {listed}; {len(found["tried"])} masks, '
          f'{found["seconds"]} s')


def main(argv=None):
    """Runs the program; returns its exit status: 0, or 2 for bad input (one line on stderr)."""
    return exit_status('train_mask', lambda: run(parse(argv)))


def run(args):
    settings = settings_of(args)
    measured_sections(args.target)                      # a file that nothing can be put into is told now
    if args.signals:
        measure_signals(args)
    elif args.anchors:
        measure_anchors(args.target, settings)
    else:
        measure_mask(args.target, settings, args.resume)
    return 0


if __name__ == '__main__':
    sys.exit(main())
