"""One command for ten minutes of a graphics card: `python -m lab.bench cuda --minutes 9 --out rows.jsonl`.

It compares the forms of a pass in lab/forms.py with the eager one, times those that agree, and prints which
of them pay. Each line becomes a row of the file at once, and the same command goes on from there. No line
begins that would not end in time. `--device cpu` does the same with small shapes, without graphs.
"""
import functools
import itertools
import json
import math
import statistics
from typing import NamedTuple

import torch

from kernels import attend, causal_mask, mean_scores
from lab import read_bytes
from lab.forms import Burst, ByHand, compiled, flex_dense, recorded, sparse_layers
from lab.measure import MODELS, as_line, dated, held_out_rows, kept_rows, moment
from model import PAD, Config, Reader, Transformer, compile_forward, load, require_that
from specmini import DTYPES, Engine, check
from verify import (METHODS, Autoregressive, Blocks, Draft, Exact, Session, decode, draft_model, no_draft,
                    read_prompt, tokens_of)

BUILD = {'eager': 0, 'compiled': 45, 'by hand': 8, 'burst': 0, 'flex dense': 10, 'flex sparse': 15}     # s
CHANCES = 0.8, 0.87         # that a pretended draft token is right
PAYS = 1.03                 # times as fast, from which a form takes another's place
SLACK = 2                   # a form's rounding errors may be so many times the eager form's
GAMMA = 4
POSITIONS = 8               # of a compiled pass over GAMMA + 1
RUNS = 9                    # of which the median counts
PROMPT, WRITTEN = 512, 32   # tokens after which random targets write, and that each method writes
NAMES = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse'
STEPS = 5                   # of plain decoding that are watched
KERNELS = 8                 # that are named, those that take longest first
ANCHORS = 4                 # layers of a sparse pass that choose blocks
RULE = Blocks(rho=0.25, dense_below=128, block=64, sinks=1, locals=2, scores=mean_scores)
SHAPES = {      # V, C, F, layers, H, G, D
    'small': (1024, 128, 256, 4, 8, 2, 32),
    'smaller': (1024, 64, 128, 2, 4, 2, 16),
    'llama-3.1-8b': (128256, 4096, 14336, 32, 32, 8, 128),
    'llama-3.2-1b': (128256, 2048, 8192, 16, 32, 8, 64)}


class Sizes(NamedTuple):
    target: str         # of SHAPES, whose weights are random
    draft: str
    long: int           # tokens that the random target writes
    contexts: tuple     # keys of attention, powers of two; the last two also of whole passes
    cold: int           # bytes that no cache holds, and that take long enough to be timed


ON_CUDA = Sizes('llama-3.1-8b', 'llama-3.2-1b', 256, (1024, 8192, 32768), 2 ** 31)
ON_CPU = Sizes('small', 'smaller', 48, (1024, 2048), 2 ** 21)


# ------------------------------------------------------------------------------------------ what a line needs

def median_seconds(run):
    """Seconds of a call: the median of RUNS."""
    run()                                               # warms up
    marks = [moment()]
    for _ in range(RUNS):
        run()
        marks.append(moment())
    return statistics.median(end - begin for begin, end in itertools.pairwise(marks))


def figure(rows, name, key):
    """A figure of the row of this name, NaN where there is none."""
    return rows.get(name, {}).get(key, math.nan)


def counting_model(config, device, dtype):
    """A random network whose greedy text counts up, so that a draft that is right can be pretended.

    The head is the embedding moved by one row, and what the layers add is small beside the embedding: the
    next token is the last one plus 1, by a wide margin, whatever a pass rounds.
    """
    with torch.device('meta'):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for name, weight in model.named_parameters():
        spread = 0.0002 if name.endswith(('o_proj.weight', 'down_proj.weight')) else 0.02
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, spread)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(50)
    model.lm_head.weight.copy_(embedding.roll(1, 0))
    model.set_context(config.max_position_embeddings)
    return model


@functools.cache
def random_reader(shape, longest, device, dtype):
    """A Reader of a counting network of this shape."""
    config = Config('llama', *SHAPES[shape], longest)
    return Reader(counting_model(config, device, DTYPES[dtype]), longest - PAD, device == 'cuda')


@functools.cache
def runner(model, form, rule=RULE):
    """What runs a model's short passes in this form, as Reader.compiled has it."""
    L = model.config.num_hidden_layers
    if form == 'compiled':
        return compile_forward(model) if model.cos.is_cuda else compiled(model.forward, False)
    attends = {'flex dense': [flex_dense] * L, 'flex sparse': sparse_layers(L, ANCHORS, rule)}
    return None if form == 'eager' else ByHand(model, attends.get(form))


def dialled(right, session, n, method):
    """A Draft of the counting network's own text; right: of each position whether its token is right."""
    draft_model(session, n, method)                     # for the time that it takes
    tokens = []
    token = session.tokens[-1]
    for good in right[len(session.tokens):][:n]:
        token = (token + (1 if good else 2)) % session.target.model.vocab
        tokens.append(token)
    return Draft.points(tokens, session.target.model)


def through(attends, q, mask, layers, start):
    """Attention through several layers (k, v), by functions that are taken in turn."""
    carry = dict(start=start)
    for attend_by, (k, v) in zip(itertools.cycle(attends), layers):
        _, carry = attend_by(q, k, v, mask, carry)


def backend_of(run):
    """The names of the operations that a call's scaled_dot_product_attention becomes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    return sorted({event.name for event in seen.events() if '::_scaled_dot_product' in event.name})


def tuned_blocks():
    """{Triton kernel: its tuned XBLOCK}; at 1 each row computes anew what rows share."""
    tuned = {}
    for module in torch._inductor.codecache.PyCodeCache.modules:
        for name, kernel in vars(module).items():
            if getattr(kernel, 'launchers', []):
                tuned[name] = kernel.launchers[0].config.kwargs.get('XBLOCK')
    return tuned


# -------------------------------------------------------------------------------------------------- the lines

class Card:
    """What is measured: `lines`, and a function of figures for each kind."""

    def __init__(self, sizes, device, dtype, rows):
        """rows: {name: figures} of the lines so far; the caller adds to them."""
        self.sizes, self.device, self.dtype, self.rows = sizes, device, dtype, rows
        self.on_card = device == 'cuda'

    def lines(self):
        """Yields (name, seconds on a card of 3 TB/s, function, arguments); a form that failed has no more."""
        yield 'copy', 3, self.copy
        for form in list(BUILD)[1:]:
            yield f'parity, {form}', 5 + BUILD[form], self.parity, form
        forms = ['eager', *filter(self.agrees, BUILD)]
        for form in forms:
            if form != 'flex sparse':
                yield f'ar, {form}', 6 + BUILD[form], self.text, form
        yield 'profile', 5, self.profile
        for form, chance in itertools.product(forms, CHANCES):
            if form in ('eager', 'compiled', 'by hand'):
                graphs = 2 if chance == CHANCES[0] else 0   # the target's; the draft's two have half its size
                yield f'sd {chance}, {form}', 6 + graphs * BUILD[form], self.text, form, chance
        for keys in self.sizes.contexts:
            yield f'attention {keys}', 15, self.attention, keys
        for keys, form in itertools.product(self.sizes.contexts[-2:], forms):
            if form not in ('compiled', 'burst'):
                yield f'pass {keys}, {form}', 5 + BUILD[form], self.whole_pass, keys, form
        yield 'methods', 20, self.methods

    def agrees(self, form):
        """Whether a form has passed its check."""
        return figure(self.rows, f'parity, {form}', 'good') is True

    def copy(self):
        """GB that a copy reads and writes a second."""
        source = torch.zeros(self.sizes.cold, dtype=torch.uint8, device=self.device)
        run = recorded(functools.partial(torch.empty_like(source).copy_, source), self.on_card)
        return {'GB/s': 2e-9 * self.sizes.cold / median_seconds(run)}

    def parity(self, form):
        """Errors of the embedded target's logits in this form and in the eager one, both beside fp64."""
        row, = held_out_rows('math', 1, seed=7)
        target, tokenizer, _ = load(MODELS / 'target', self.device, DTYPES[self.dtype])
        exact, _, _ = load(MODELS / 'target', 'cpu', torch.float64)
        ids = tokenizer.encode(row['prompt'] + row['solution']).ids
        ways = (exact, 'eager'), (target, 'eager'), (target, form)
        wanted, eager, found = (self.logits(ids, model, way, form == 'flex sparse') for model, way in ways)
        own, theirs = (float((some - wanted).norm() / wanted.norm()) for some in (found, eager))
        return dict(error=own, eager=theirs, good=own <= SLACK * theirs)

    def logits(self, ids, model, form, sparse):
        """[12, V] of a text's last positions, in fp64: passes over 5, 1, 1 and 5, in bursts over one each.

        Sparse passes read a fixed choice of blocks, sinks and locals, because rounding can change another.
        """
        rule = Blocks(rho=0, dense_below=0, block=16, sinks=2, locals=2, scores=mean_scores)
        reader = Reader(model, 1024 - PAD, form == 'compiled' and self.on_card)
        reader.compiled = reader.compiled or runner(model, form, rule)
        n, L = len(ids), model.config.num_hidden_layers
        reader.read(ids[:n - 12], model.full, 0)
        path = model.full
        if sparse and form == 'eager':
            layers = enumerate(sparse_layers(L, ANCHORS, rule))
            how = [(i, layer.keywords['anchor'], rule) for i, layer in layers]
            path = path.sparsified(tuple((one, None, None) for one in how))
        if form == 'burst':
            rows = [reader.append(torch.tensor([token], device=self.device), path) for token in ids[-12:]]
        else:
            steps = (n - 7, 5), (n - 6, 1), (n - 5, 1), (n, 5)
            rows = [reader.read(ids[:end], path, last) for end, last in steps]
        return torch.cat(rows).cpu().double()

    def session(self, form, source=no_draft):
        """A Session of random networks in this form, after a prompt that counts up; source: of drafts."""
        how = self.sizes.contexts[-1], self.device, self.dtype
        target, draft = (random_reader(shape, *how) for shape in (self.sizes.target, self.sizes.draft))
        for reader in (target, draft):
            reader.compiled = runner(reader.model, form)
            reader.forget()
        session = Session(target, None if source is no_draft else draft, source, list(range(PROMPT)),
                          self.sizes.long, generator=torch.Generator().manual_seed(0))
        read_prompt(session)
        return session

    def text(self, form, chance=None):
        """Tokens a second of plain decoding, or of speculative with drafts that are right by this chance.

        The drafts take their real time, only their tokens are pretended. The second of two texts counts.
        """
        end = PROMPT + self.sizes.long
        method, source = Burst() if form == 'burst' else Autoregressive(), no_draft
        if chance:
            lots = torch.rand(end, generator=torch.Generator().manual_seed(0))
            method, source = Exact(GAMMA), functools.partial(dialled, (lots < chance).tolist())
        for _ in range(2):
            session = self.session(form, source)
            begin = moment()
            cycles = list(decode(session, method))
            speed = self.sizes.long / (moment() - begin)
        model = session.target.model
        counted = [i % model.vocab for i in range(PROMPT, end)]
        require_that(tokens_of(cycles) == counted, 'the random target does not count up')
        if chance:
            kept = statistics.fmean(verdict.kept for cycle in cycles for verdict in cycle.judged)
            plain = figure(self.rows, f'ar, {form}', 'tokens/s')
            return {'tokens/s': speed, 'over ar': speed / plain, 'acceptance': kept}
        rate = speed * read_bytes(model, model.full) / 1e9
        return {'tokens/s': speed, 'GB/s': rate, 'of copy': rate / figure(self.rows, 'copy', 'GB/s')}

    def profile(self):
        """Where plain decoding in the fastest form spends a step: {kernel: [ms, calls, XBLOCK]}."""
        speeds = {form: figure(self.rows, f'ar, {form}', 'tokens/s') for form in BUILD if form != 'burst'}
        best = max((form for form in speeds if speeds[form] > 0), key=speeds.get, default='eager')
        text = decode(self.session(best), Autoregressive())
        next(text)                                      # warms up
        with torch.profiler.profile() as seen:
            for _ in range(STEPS):
                next(text)
        tuned, taken = tuned_blocks(), {}
        for event in seen.key_averages():
            if event.device_type.name == self.device.upper():
                us = event.self_device_time_total if self.on_card else event.self_cpu_time_total
                taken[event.key] = us / 1000 / STEPS, event.count / STEPS, tuned.get(event.key)
        busy = speeds[best] * sum(ms for ms, *_ in taken.values()) / 1000
        longest = sorted(taken, key=taken.get, reverse=True)[:KERNELS]
        return dict(form=best, busy=busy, kernels={name[:60]: taken[name] for name in longest})

    @torch.inference_mode()
    def attention(self, keys):
        """Microseconds a layer over POSITIONS of so many keys, by a graph of more layers than caches hold."""
        config = Config('llama', *SHAPES[self.sizes.target], 1)
        H, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        random = functools.partial(torch.randn, device=self.device, dtype=DTYPES[self.dtype])
        count = max(8, self.sizes.cold // (4 * G * keys * D))
        layers = [random(1, 2 * G, keys, D).chunk(2, 1) for _ in range(count)]
        q = random(1, H, POSITIONS, D)
        start = torch.full((), keys - POSITIONS, device=self.device)
        forms = dict(flash=([attend], None), masked=([attend], causal_mask(POSITIONS, keys, q)))
        for form, attends in ('flex dense', [flex_dense]), ('flex sparse', sparse_layers(8, 1, RULE)):
            if self.agrees(form):
                once = {one: compiled(one, self.on_card) for one in attends}
                forms[form] = [once[one] for one in attends], None
        found = {}
        for form, (attends, mask) in forms.items():
            run = functools.partial(through, attends, q, mask, layers, start)
            found[form] = 1e6 * median_seconds(recorded(run, self.on_card)) / count
            found[f'{form} by'] = backend_of(run)
        return found

    def whole_pass(self, keys, form):
        """Milliseconds of a pass over GAMMA + 1 positions of the random target after so many random keys."""
        reader = self.session(form).target
        for store in reader.cache.stores:
            store.normal_()
        ids = torch.arange(GAMMA + 1, device=self.device)[None]
        run = functools.partial(reader.feed, ids, keys - POSITIONS, reader.model.full, GAMMA + 1)
        return dict(ms=1000 * median_seconds(run))

    def methods(self):
        """Each method on the embedded pair, sampled and greedily; a lossless one beside plain decoding."""
        pair = MODELS / 'target', MODELS / 'draft'
        engine = Engine(*pair, max_new=WRITTEN, device=self.device, dtype=self.dtype)
        row, = held_out_rows('math', 1, seed=7)
        ids = engine.tokenizer.encode(row['prompt']).ids
        engine.open([ids])
        found = {}
        for name in NAMES:
            method = METHODS[name]()
            engine.generate(ids, method, temperature=0.8)
            tokens = tokens_of(engine.write(ids, method))
            found[name] = check(engine, ids, tokens) if engine.lossless(method) else f'{len(tokens)} tokens'
        return found


# ------------------------------------------------------------------------------------------ what rows decide

def decision(what, times, least):
    """A line on ratios {label: times as fast}: all are `least` or more; or, by keys, from which keys on."""
    good = list(itertools.takewhile(lambda label: times[label] >= least, reversed(times)))
    answer = 'yes' if len(good) == len(times) else 'no'
    if isinstance(next(iter(times)), int):
        answer = f'from {good[-1]} keys on' if good else 'does not pay'
    if any(map(math.isnan, times.values())):
        answer = 'undecided'
    return f'{what}: {answer} ({", ".join(f"{label} {ratio:.3f}" for label, ratio in times.items())})'


def decisions(rows, contexts):
    """Lines of text: what the rows {name: figures} say of each form; contexts: see Sizes."""
    by_hand, attention, passes = {}, {}, {}
    for line in 'ar', *(f'sd {chance}' for chance in CHANCES):
        mine, theirs = (figure(rows, f'{line}, {form}', 'tokens/s') for form in ('by hand', 'compiled'))
        seen = figure(rows, f'{line}, by hand', 'acceptance')
        by_hand[line if line == 'ar' else f'{line} (acceptance {seen:.2f})'] = mine / theirs
    burst = figure(rows, 'ar, burst', 'tokens/s') / figure(rows, 'ar, by hand', 'tokens/s')
    for keys in contexts:
        masked, flex = (figure(rows, f'attention {keys}', form) for form in ('masked', 'flex dense'))
        attention[keys] = masked / flex
    for keys in contexts[-2:]:
        dense = [figure(rows, f'pass {keys}, {form}', 'ms') for form in ('eager', 'by hand', 'flex dense')]
        fastest = min((ms for ms in dense if ms > 0), default=math.nan)
        passes[keys] = fastest / figure(rows, f'pass {keys}, flex sparse', 'ms')
    yield decision('by hand for CUDA graph trees', by_hand, PAYS)
    yield decision('bursts', dict(ar=burst), PAYS)
    yield decision('flex dense for masked attention', attention, 1)
    yield decision('flex sparse for the fastest dense pass', passes, PAYS)


# ----------------------------------------------------------------------------------------------- the command

def stored(where, head):
    """{name: row} of a file's rows, but for those that failed; ValueError where it has another head."""
    if not where.exists():
        where.write_text(as_line(dated(head)), encoding='utf-8')
    require_that(kept_rows(where, head), f'--out {where}: rows of another machine or version; name another')
    _, *rows = map(json.loads, where.read_text(encoding='utf-8').splitlines())
    return {row['line']: row for row in rows if 'failed' not in row}


def measured(name, function, *args):
    """The row of a line; of a failure its first words, because other lines are still wanted."""
    begin = moment()
    try:
        figures = function(*args)
    except Exception as error:
        figures = dict(failed=f'{type(error).__name__}: {" ".join(str(error).split())[:200]}', good=False)
    return dict(line=name, seconds=moment() - begin, **figures)


def run_all(device, dtype, minutes, where):
    """Measures what the file has no row of; prints rows, then decisions. Exit status 1 if a check failed."""
    end = moment() + 60 * minutes
    torch._dynamo.config.recompile_limit = 256          # a graph for each shape
    machine = torch.cuda.get_device_name() if device == 'cuda' else 'cpu'
    sizes = ON_CUDA if device == 'cuda' else ON_CPU
    head = dict(device=machine, dtype=dtype, torch=torch.__version__, cuda=torch.version.cuda, sizes=sizes)
    rows = stored(where, head)
    print(as_line(dated(head)), end='', flush=True)
    for name, seconds, *work in Card(sizes, device, dtype, rows).lines():
        if name in rows:
            continue
        if moment() + seconds > end:
            print(f'{name}: left out, {seconds:.0f} s expected', flush=True)
            continue
        rows[name] = measured(name, *work)
        with open(where, 'a', encoding='utf-8') as file:
            file.write(as_line(rows[name]))
        print(as_line(rows[name]), end='', flush=True)
    print('\n'.join(decisions(rows, sizes.contexts)))
    return int(any(row.get('good') is False for row in rows.values()))
