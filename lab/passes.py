"""One verifying pass, dense against sparse, on a random model of a given shape: `python -m lab.bench pass`.

Times are CPU time of the process: the time of the pass where one thread computes and others share the core.
The forms are run in turn, the median is shown; `times` is against the dense one. MB and MFLOP are counted
from what the pass chose (see work). The ceilings are the speed-ups that they alone would allow, and (`parts`)
that the FLOPs would if those of each part of the pass took as long as they do in the dense one, run eagerly.
"""
import functools
import statistics
import time
from dataclasses import replace

import torch

import kernels
from lab.rivals import ledger, watched
from model import Config, Reader, Transformer, compile_forward
from verify import Session, Sparse

SHAPES = {      # layers, C, F, H, G, D, V, (experts, chosen, F of one)
    'embedded': (10, 128, 336, 4, 2, 32, 1024, ()),
    'small': (2, 1024, 2048, 32, 8, 64, 1024, ()),      # at 8k attention is more than half of the time
    'llama-3.1-8b': (32, 4096, 14336, 32, 8, 128, 128256, ()),
    'small-moe': (2, 512, 1024, 8, 4, 64, 1024, (32, 4, 256)),
    'qwen3-30b-a3b': (48, 2048, 6144, 32, 4, 128, 151936, (128, 8, 768))}
KNOBS = dict(attn=dict(rho=0.25), ffn=dict(ffn_share=0.4), moe=dict(moe_skip=3, moe_quantile=1.0))
OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=1, moe_quantile=0.0, dense_below=256, block=64)


def random_model(shape, layers, capacity, device, dtype):
    """A Transformer of this shape with random weights, made on the device."""
    L, C, F, H, G, D, V, moe = SHAPES[shape]
    L = layers or L
    config = Config('qwen3' if moe else 'llama', V, C, F, L, H, G, D, capacity, experts=moe[:1] * L,
                    **dict(zip(('num_experts_per_tok', 'moe_intermediate_size'), moe[1:])))
    with torch.device('meta'):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.02)
    model.set_context(capacity)
    for mlp in [m for m in model.modules() if hasattr(m, 'down_proj')]:     # same values, channel by channel
        mlp.down_proj.weight.data = mlp.down_proj.weight.data.t().contiguous().t()
    return model


def forms(model):
    """{name: Path}: the dense one, then every combination of the parts that this model can leave out.

    A dense mixture is a sparse one that skips nothing, so that the experts it reads are counted alike.
    """
    L, parts = model.config.num_hidden_layers, ['attn', 'moe' if any(model.config.mixtures) else 'ffn']
    betas = dict(experts=[[[0.0, 1.0]] * 3] * L)
    session = Session(Reader(model, 8), None, None, [], 0, calibration=dict(sparse=betas))
    view = lambda knobs: Sparse(**OFF | knobs).view(model.full, session)
    found = dict(dense=view({}))
    for names in (parts[:1], parts[1:], parts):
        found['+'.join(names)] = view({k: v for name in names for k, v in KNOBS[name].items()})
    return found


def choices(path, reader, T):
    """The ledger of one pass over T positions after the cached ones; the cache is left as it was."""
    log, n = [], reader.cache.length
    reader.read(reader.cache.ids, [*range(T)], watched(path, log), T)
    reader.cache.record(reader.cache.ids[:n], n, reader.model.full)
    return ledger(log, reader.model, n)


def work(model, rows, T):
    """{part: (bytes, FLOPs)} that a pass over T positions with this ledger has to read and to do.

    Bytes count what any position needs, once; FLOPs what each needs. attention is its products and the
    scores of blocks by their means; the projections and the head are the rest.
    """
    c = model.config
    kv, group = c.num_key_value_heads * c.head_dim, c.num_attention_heads // c.num_key_value_heads
    rest = c.hidden_size * (c.vocab_size + len(rows) * 2 * (group + 1) * kv)
    keys = macs = weights = products = 0
    for row in rows:
        keys += kv * (2 * row['keys'] + row['means'])
        macs += kv * (2 * row['seen'] * group * T + row['means'] * row['asked'])
        if 'experts' in row:
            each = 3 * c.moe_intermediate_size * c.hidden_size
            weights, products = weights + row['distinct'] * each, products + row['experts'] * each
        else:
            weights += c.hidden_size * (row['gate'] + row['spared'] * row['union'])
            products += c.hidden_size * (row['gate'] + row['spared'] * row['channels'])
    size = model.cos.element_size()
    found = dict(attention=(keys, macs), ffn=(weights, T * products), rest=(rest, T * rest))
    return {part: (size * n, 2 * m) for part, (n, m) in found.items()}


def cost(model, rows, T):
    """(bytes, FLOPs) of the whole pass."""
    return tuple(map(sum, zip(*work(model, rows, T).values())))


def profile(reader, ids, n, device):
    """{part: seconds} of a dense pass over ids [1, T] after the cached tokens, median of n."""
    spent, whole = dict(attention=[], ffn=[]), []
    def timed(f, part):
        def run(*args):
            begin = clock(device)
            out = f(*args)
            spent[part][-1] += clock(device) - begin
            return out
        return run
    full, S = reader.model.full, reader.cache.length
    path = replace(full, attends=tuple(timed(f, 'attention') for f in full.attends),
                   ffns=tuple(timed(f, 'ffn') for f in full.ffns))
    for _ in range(n):
        spent['attention'].append(0.0), spent['ffn'].append(0.0)
        begin = clock(device)
        reader.feed(ids, S, path, ids.shape[1])
        whole.append(clock(device) - begin)
    found = {part: statistics.median(times) for part, times in spent.items()}
    return found | dict(rest=statistics.median(whole) - sum(found.values()))


def picture(target, tokenizer, row, **knobs):
    """Lines: the blocks that one pass at the end of a row's prompt reads, for each key head of an anchor."""
    ids, draft = (tokenizer.encode(row[part]).ids for part in ('prompt', 'solution'))
    reader, log = Reader(target, len(ids) + 5), []
    path = Sparse(**knobs).view(target.full, Session(reader, None, None, ids, 5))
    reader.read(ids[:-1], [], target.full, 0)
    reader.read(ids, draft[:4], watched(path, log), 5)
    yield f'{len(ids) - 1} cached tokens; # a block that is read, . one that is not, + the partial one'
    for i, carry in log[::4]:
        for g, chosen in enumerate(carry['blocks'][0].tolist()):
            shown = ''.join('.#'[n in chosen] for n in range((len(ids) - 1) // carry['block']))
            yield f'layer {i // 2:2}  head {g}  {shown}+'


def attend_all(f, *args):
    """Dense attention that hands on what the sparse form f chooses."""
    return kernels.attend(*args[:4], f(*args)[1])


def sparsity(model, texts, T=5, **knobs):
    """The section 'sparse': what dense verifying passes over T positions of texts (ids) would choose.

    anchors: layer 0, then those whose blocks differ most from the layer before; jaccard: of each with it;
    channels, experts: for each layer 21 quantiles, 0 to 1, of |silu(gate)| and of the share of a token's m
    lowest experts, m = 1, 2, ... Source: as verify.Sparse (anchor layers).
    """
    L, k = len(model.config.mixtures), model.config.num_experts_per_tok
    all_on = dict(anchors=[*range(L)], channels=[[1e-30]] * L, experts=[[[0.0]] * (k - 1)] * L)
    method = Sparse(**dict(dense_below=32) | knobs, anchors=L, ffn_quantile=0.5, moe_skip=max(k - 1, 0))
    jaccard, seen = [[] for _ in range(L)], [[] for _ in range(L)]
    for ids in texts:
        reader = Reader(model, len(ids))
        path = method.view(model.full, Session(reader, None, None, [], 0, calibration=dict(sparse=all_on)))
        path = replace(path, attends=tuple(functools.partial(attend_all, f) for f in path.attends))
        for n in range(T, len(ids) - T, T):
            log, last = [], None
            reader.read(ids[:n], [], model.full, 0)
            reader.read(ids[:n], ids[n:n + T], watched(path, log), T)
            for i, ((_, a), (_, b)) in enumerate(zip(log[::2], log[1::2])):
                sets = [set(row) for row in a['blocks'][0].tolist()] if 'blocks' in a else []
                jaccard[i] += [len(x & y) / len(x | y) for x, y in zip(sets, last or [])]
                last = sets
                some = b['channels'].flatten()[::17] if 'channels' in b else None
                seen[i].append(b['lowest'] if model.config.mixtures[i] else some.abs()[:, None])
    if not jaccard[-1]:
        raise ValueError(f'calibration texts of {max(map(len, texts))} tokens at most: too short for blocks')
    at, places = [round(sum(x) / len(x), 4) for x in jaccard[1:]], torch.linspace(0, 1, 21)
    tables = [[[round(y, 5) for y in column[(places * (len(column) - 1)).long()].tolist()]
               for column in torch.cat(x).float().sort(0).values.T] for x in seen]
    mixed = [bool(E) for E in model.config.mixtures]
    return dict(anchors=[0] + sorted(range(1, L), key=lambda i: at[i - 1]), jaccard=at,
                channels=[[0.0] if m else t[0] for m, t in zip(mixed, tables)],
                experts=[t if m else [] for m, t in zip(mixed, tables)])


def find_anchors(model, texts):
    """The section 'sparse' from texts (ids) that are joined and cut anew; prints the order of the layers."""
    ids = sum(texts, [])
    found = sparsity(model, [ids[i:i + 512] for i in range(0, len(ids), 512)])
    print(f'anchors, those that differ most from the layer before first: {found["anchors"]}')
    return found


def clock(device):
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() if device == 'cuda' else time.process_time()


def median(runs, n, device):
    """[seconds] of each of the runs, taken in turn n times after one warm-up."""
    taken = [[] for _ in runs]
    for _ in range(n + 1):
        for run, times in zip(runs, taken):
            begin = clock(device)
            run()
            times.append(clock(device) - begin)
    return [statistics.median(times[1:]) for times in taken]


def machine(device, dtype):
    """(bytes a second, FLOPs a second), measured: the sum of 256 MB, a square product."""
    x, a = torch.ones(2 ** 28 // dtype.itemsize, device=device, dtype=dtype), torch.randn(
        2048, 2048, device=device).to(dtype)
    read, product = median([lambda: x.sum(), lambda: a @ a], 5, device)
    return 2 ** 28 / read, 2 * 2048 ** 3 / product


def table(shape, layers, contexts, positions, compiled, device):
    """Prints a line for each form, context and number of positions."""
    dtype = torch.bfloat16 if device == 'cuda' else torch.float32
    capacity = max(contexts) + 16
    model = random_model(shape, layers, capacity, device, dtype)
    bandwidth, flops = machine(device, dtype)
    how = 'compiled' if compiled else 'eager'
    print(f'{shape}, {model.config.num_hidden_layers} layers, {dtype}, {how}: {bandwidth / 1e9:.1f} GB/s and '
          f'{flops / 1e9:.0f} GFLOP/s measured')
    print('context  T  form            ms   times   MB  MFLOP  GB/s of max  ceiling: bytes FLOPs parts')
    for S in contexts:
        reader = Reader(model, S)
        for k, v in reader.cache.stores:
            k.normal_(), v.normal_()
        reader.cache.record([1] * S, 0, model.full)
        compiled_forward = compile_forward(model) if compiled else None
        for T in positions:
            paths, ids = forms(model), torch.arange(T, device=device)[None]
            reader.compiled = None
            ledgers = [choices(path, reader, T) for path in paths.values()]
            works = [work(model, rows, T) for rows in ledgers]
            costs = [cost(model, rows, T) for rows in ledgers]
            parts = profile(reader, ids, 9, device)
            for part, seconds in parts.items():
                size, done = (x / seconds for x in works[0][part])
                print(f'{S:7} {T:2}  {part:14} {seconds * 1e3:7.2f} of the dense pass, eager: '
                      f'{size / bandwidth:.0%} of the bytes a second, {done / flops:.0%} of the FLOPs')
            reader.compiled = compiled_forward
            times = median([lambda p=p: reader.feed(ids, S, p, T) for p in paths.values()], 9, device)
            for name, (size, done), each, seconds in zip(paths, costs, works, times):
                least = sum(parts[part] * each[part][1] / works[0][part][1] for part in parts)
                print(f'{S:7} {T:2}  {name:14} {seconds * 1e3:7.2f} {times[0] / seconds:6.2f} '
                      f'{size / 1e6:6.1f} {done / 1e6:6.0f} {size / seconds / bandwidth:10.0%} '
                      f'{costs[0][0] / size:15.2f} {costs[0][1] / done:5.2f} '
                      f'{sum(parts.values()) / least:5.2f}', flush=True)
