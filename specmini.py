"""Speculative decoding from the command line: the loop, the figures of its trace, the program around them.

`python specmini.py --prompt "..."` runs on the embedded models; --help names every flag, --list every method.
"""
import argparse
import dataclasses
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path as File

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; nothing here needs it

import torch
from tqdm import tqdm

from model import Reader, load, read_json
from verify import METHODS, Cycle, Session, lookup, rollout, silence

EMBEDDED = File(__file__).parent / 'lab' / 'models'
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
SMALL = 50_000_000      # parameters below which one CPU thread beats several: too little work to share
PAINT = dict(draft='32', target='31', bonus='36', slim='33', dim='2', strike='9;2')


# ------------------------------------------------------------------------------ the loop and its figures

def decode(session, method):
    """Yields one Cycle after the other until the room is used or the text ends; their list is the trace."""
    while session.room and not session.ended:
        begin = time.perf_counter()
        draft = method.propose(session)
        score = method.score(session, draft)
        tokens, labels, judged = method.accept(session, draft, score)
        tokens = session.commit(tokens)
        passes, seconds = session.take(), time.perf_counter() - begin
        yield Cycle(draft.tokens, judged, tokens, labels[:len(tokens)], passes, seconds)


def statistics(cycles, prompt_seconds, weights):
    """The figures of a trace, each defined here once; a ratio without a denominator is None.

    weights: {reader/path: bytes that one pass streams}. acceptance_rate: draft tokens kept over judged.
    block_efficiency: tokens committed per full target pass, the extra token included. work: weight bytes read
    over those of one full target pass. Seconds, passes and positions exclude the prompt's.
    """
    ratio = lambda a, b: a / b if b else None
    passes, positions, labels = {}, {}, {}
    for cycle in cycles:
        for path, (n, T, _) in cycle.passes.items():
            passes[path], positions[path] = passes.get(path, 0) + n, positions.get(path, 0) + T
        for label in cycle.labels:
            labels[label] = labels.get(label, 0) + 1
    tokens, seconds = sum(labels.values()), sum(c.seconds for c in cycles)
    verdicts = [j['kept'] for c in cycles for j in c.judged]
    return dict(
        cycles=len(cycles), passes=passes, positions=positions, drafted=sum(len(c.drafted) for c in cycles),
        judged=len(verdicts), accepted=sum(c.accepted for c in cycles),
        acceptance_rate=ratio(sum(verdicts), len(verdicts)),
        rejection_rate=ratio(verdicts.count(False), len(verdicts)),
        block_efficiency=ratio(tokens, passes.get('target/full', 0)), labels=labels, seconds=seconds,
        prompt_seconds=prompt_seconds, tokens_per_second=ratio(tokens, seconds),
        work=sum(n * weights[path] for path, n in passes.items()) / weights['target/full'])


def break_even(cycles, decode_seconds):
    """In plain words, whether drafting pays here: measured costs, and the speed that they and alpha predict.

    decode_seconds: one target pass over one position.
    Source: Leviathan et al. 2023, theorem 3.8, with measured costs.
    """
    spent = dict(target=[0, 0.0], draft=[0, 0.0])       # role -> passes, seconds
    for cycle in cycles:
        for path, (n, _, seconds) in cycle.passes.items():
            role = spent[path.split('/')[0]]
            role[0], role[1] = role[0] + n, role[1] + seconds
    verdicts = [j['kept'] for c in cycles for j in c.judged]
    if not verdicts:
        return 'break-even: nothing was drafted, so there is nothing to compare.'
    c, v = (seconds / max(n, 1) / decode_seconds for n, seconds in (spent['draft'], spent['target']))
    a, lengths = sum(verdicts) / len(verdicts), [len(c.drafted) for c in cycles]
    gamma = sum(lengths) / len(lengths)
    tokens = sum(a ** k for n in lengths for k in range(n + 1)) / len(lengths)
    cost = gamma * c + v
    return (f'break-even: a draft pass costs {c:.2f} and a verifying pass {v:.2f} of a decoding pass; '
            f'{a:.0%} acceptance of {gamma:.1f} drafted tokens gives {tokens:.2f} a cycle for the time of '
            f'{cost:.2f} decoding passes: {tokens / cost:.2f} times plain decoding predicted'
            + (', not worth it here.' if tokens <= cost else '.'))


# ----------------------------------------------------------------------------------------- the engine room

class Engine:
    """The loaded models and the settings of a run; starts a Session for each text."""

    def __init__(self, args):
        self.args, self.device = args, pick_device(args.device)
        self.dtype = args.dtype if args.dtype != 'auto' else 'bf16' if self.device == 'cuda' else 'fp32'
        self.model, self.tokenizer, eos = load(args.target, self.device, DTYPES[self.dtype])
        self.eos, self.draft = frozenset() if args.ignore_eos else eos, None
        self.source = dict(lookup=lookup, none=silence).get(args.draft, rollout)
        if self.source is rollout and args.methods != ['ar']:
            self.draft, tokenizer, _ = load(args.draft, self.device, DTYPES[self.dtype])
            same_vocabulary(self.tokenizer, tokenizer, args.draft)
        self.context = min(m.config.max_position_embeddings for m in (self.model, self.draft) if m)
        threads = args.threads or (1 if sum(p.numel() for p in self.model.parameters()) < SMALL else None)
        if threads and self.device == 'cpu':
            torch.set_num_threads(threads)

    def open(self, prompts):
        """Caches for the longest of the prompts (lists of ids); ValueError where one does not fit."""
        for i, ids in enumerate(prompts, 1):
            if not 0 < len(ids) < self.context:
                raise ValueError(f'prompt {i} has {len(ids)} tokens; expected at least 1, and fewer than the '
                                 f'context of {self.context} (the smaller of target and draft)')
        capacity = min(self.context, max(map(len, prompts)) + self.args.max_new)
        self.target_reader = Reader(self.model, capacity, self.args.compile)
        self.draft_reader = Reader(self.draft, capacity, self.args.compile) if self.draft else None

    def start(self, ids, name, row=0):
        """(Session that has read this prompt, method); no position of an earlier text is trusted.

        Row r of a file is drawn with seed + r, so that equal prompts give different samples.
        """
        a, readers = self.args, (self.target_reader, None if name == 'ar' else self.draft_reader)
        for reader in filter(None, readers):
            reader.forget()
        generator = torch.Generator(self.device).manual_seed(a.seed + row)
        session = Session(*readers, self.source, list(ids), min(a.max_new, self.context - len(ids)), self.eos,
                          a.temperature, a.top_k, a.top_p, generator)
        session.read_prompt()
        return session, make_method(name, a)

    def weights(self):
        """{reader/path: bytes that one pass streams}, for the work of a trace."""
        models = [('target', self.model), ('draft', self.draft)]
        return {f'{role}/full': m.read_bytes(m.full) for role, m in models if m}

    def report(self, ids, session, method, cycles):
        """The JSON object of one text."""
        tokens, name = session.tokens[len(ids):], self.args.method
        knobs = {k: getattr(method, k) for k in knobs_of(name)}
        knobs = {k: 'inf' if v == math.inf else v for k, v in knobs.items()}        # JSON has no infinity
        return dict(text=self.tokenizer.decode(tokens), tokens=tokens, prompt_tokens=len(ids), method=name,
                    lossless=method.lossless, knobs=knobs, seed=session.generator.initial_seed(),
                    device=self.device, dtype=self.dtype, finish='eos' if session.ended else 'length',
                    stats=statistics(cycles, session.prompt_seconds, self.weights()))

    def decode_seconds(self, session):
        """Seconds of one target pass over one position, here and now: the median of five."""
        reader, times = session.target, []
        for _ in range(5):
            reader.read(session.tokens[:-1], [], reader.model.full, 1)
            times.append(reader.take()['full'][2])
        return sorted(times)[2]


def pick_device(name):
    """'cpu' or 'cuda'; ValueError if CUDA is asked for and absent."""
    if name == 'cuda' and not torch.cuda.is_available():
        raise ValueError('--device cuda: this machine or this torch has no CUDA device; use --device cpu')
    return ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name


def same_vocabulary(target, draft, folder):
    """ValueError naming the first token (lowest id) that the two tokenizers do not share by text and id."""
    a, b = ({i: text for text, i in t.get_vocab(with_added_tokens=True).items()} for t in (target, draft))
    differ = next((i for i in sorted(a.keys() | b.keys()) if a.get(i) != b.get(i)), None)
    if differ is not None:
        raise ValueError(f'--draft {folder}: token {differ} is {b.get(differ)!r} there and {a.get(differ)!r} '
                         'in the target; they must share their vocabulary (or use --draft lookup)')


def knobs_of(name):
    """{knob: dataclass field} of a method; plain decoding has none."""
    return {} if name == 'ar' else {f.name: f for f in dataclasses.fields(METHODS[name])}


def describe_knobs(name):
    return ', '.join(f'{k}={f.default}' for k, f in knobs_of(name).items())


def make_method(name, args):
    """The method with its knobs from --gamma and --set, each read by its dataclass type.

    Under --compare a method takes the knobs that it has; one that no method of the run has is refused.
    """
    knobs, values = knobs_of(name), {}
    for item in args.set + ([] if args.gamma is None else [f'gamma={args.gamma}']):
        knob, equals, text = item.partition('=')
        known = any(knob in knobs_of(m) for m in args.methods) or (knob, args.methods) == ('gamma', ['ar'])
        if not equals or not known:
            have = '; '.join(f'{m}: {describe_knobs(m) or "none"}' for m in args.methods)
            raise ValueError(f'--set {item}: expected knob=value with a knob of the method ({have})')
        if knob in knobs:
            kind = knobs[knob].type
            try:
                values[knob] = dict(true=True, false=False)[text.lower()] if kind is bool else kind(text)
            except (ValueError, KeyError):
                raise ValueError(f'--set {item}: {text!r} is not a value of type {kind.__name__}') from None
    return METHODS[name](**values)


# ------------------------------------------------------------------------------------------- what is shown

class Printer:
    """Shows a text as it is committed, each piece in the colour of who wrote it; never half a character."""

    def __init__(self, tokenizer, color, show):
        self.tokenizer, self.color, self.show = tokenizer, color, show
        self.ids, self.shown, self.cycles = [], '', 0

    def paint(self, text, kind):
        return f'\033[{PAINT.get(kind, "0")}m{text}\033[0m' if self.color and text else text

    def add(self, cycle):
        self.cycles += 1
        if self.show:
            return print(self.picture(cycle), flush=True)
        for token, label in zip(cycle.tokens, cycle.labels):
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids)
            if not text.endswith('\ufffd'):             # else a character whose bytes are not all there yet
                print(self.paint(text[len(self.shown):], label), end='', flush=True)
                self.shown = text

    def finish(self, text):
        """Prints what the stream held back: the bytes of a character that never became whole."""
        if not self.show:
            print(text[len(os.path.commonprefix([text, self.shown])):], flush=True)

    def picture(self, cycle):
        """One cycle as a line: kept tokens, the rejected one struck out, what replaced it, (not judged)."""
        word = lambda i: self.tokenizer.decode([i], skip_special_tokens=False).replace('\n', '\u23ce')
        parts = [self.paint(word(t), 'draft') for t in cycle.tokens[:cycle.accepted]]
        if cycle.judged and not cycle.judged[-1]['kept']:
            lost = word(cycle.judged[-1]['token'])
            parts.append(self.paint(lost, 'strike') if self.color else f'[-{lost}-]')
        parts += [self.paint(word(t), label) if self.color else f'[+{word(t)}+]'
                  for t, label in zip(cycle.tokens[cycle.accepted:], cycle.labels[cycle.accepted:])]
        parts += [self.paint(f'({word(t)})', 'dim') for t in cycle.drafted[len(cycle.judged):]]
        return f'{self.cycles:4d}  {cycle.accepted}/{len(cycle.drafted)}  ' + ' '.join(parts)


def figures(report):
    """One line: what the run was and what it measured."""
    s, show = report['stats'], lambda x, form: '-' if x is None else format(x, form)
    wrote = ', '.join(f'{n} {label}' for label, n in s['labels'].items())
    kind = 'lossless' if report['lossless'] else 'LOSSY'
    return (f'{report["method"]} ({kind}): {len(report["tokens"])} tokens ({wrote}) in {s["seconds"]:.2f} s, '
            f'{show(s["tokens_per_second"], ".1f")} tokens/s; acceptance '
            f'{show(s["acceptance_rate"], ".0%")}, block efficiency {show(s["block_efficiency"], ".2f")}, '
            f'{s["passes"].get("target/full", 0)} target passes, work {s["work"]:.1f}')


def trace_line(row, index, cycle, engine):
    """One cycle as a JSON line: ids, text, who wrote what, the judged tokens' scalars, passes, time."""
    passes = {path: dict(passes=n, positions=T, ms=round(seconds * 1000, 3))
              for path, (n, T, seconds) in cycle.passes.items()}
    return json.dumps(dict(
        prompt=row, cycle=index, drafted=cycle.drafted, judged=cycle.judged, tokens=cycle.tokens,
        labels=cycle.labels, text=engine.tokenizer.decode(cycle.tokens), passes=passes,
        ms=round(cycle.seconds * 1000, 3)))


def check(engine, ids, session):
    """Plain target decoding beside the text: a sentence that names the first token that differs, if any."""
    mine = session.tokens[len(ids):]
    plain, method = engine.start(ids, 'ar')
    wanted = sum((cycle.tokens for cycle in decode(plain, method)), [])
    i = next((i for i, (a, b) in enumerate(zip(mine, wanted)) if a != b), None)
    if i is None:
        return f'check: equal to plain decoding for all {min(len(mine), len(wanted))} tokens' + (
            '.' if len(mine) == len(wanted) else f', but {len(mine)} tokens long instead of {len(wanted)}.')
    logits = engine.target_reader.read(ids + wanted[:i], [], engine.model.full, 1)[0]
    word = lambda t: repr(engine.tokenizer.decode([t], skip_special_tokens=False))
    return (f'check: differs from plain decoding at token {i}: {word(mine[i])} ({mine[i]}) instead of '
            f'{word(wanted[i])} ({wanted[i]}); logit gap {float(logits[wanted[i]] - logits[mine[i]]):.2g}.')


def compare(engine, prompts, names):
    """Lines of a table of methods, run in turn on each of the prompts, so that noise falls on all alike."""
    texts, traces = {name: [] for name in names}, {name: [] for name in names}
    for i, ids in enumerate(tqdm([prompts[0]] + prompts, desc='compare', file=sys.stderr, disable=None)):
        for name in names:
            cycles = list(decode(*engine.start(ids, name)))
            if i:                                       # the first round only warms up
                texts[name].append(sum((c.tokens for c in cycles), []))
                traces[name] += cycles
    stats = {name: statistics(traces[name], 0, engine.weights()) for name in names}
    plain, cell = stats['ar'], lambda x, form: '-' if x is None else format(x, form)
    speedup = {name: s['tokens_per_second'] / plain['tokens_per_second'] for name, s in stats.items()}
    yield 'method          tokens/s   x ar  accepted block eff.  passes/token  like ar'
    for name, s in stats.items():
        pairs = zip(texts[name], texts['ar'])
        same = [sum(a == b for a, b in zip(x, y)) / max(len(x), len(y)) for x, y in pairs]
        like = sum(same) / len(same) if engine.args.temperature == 0 else None      # samples differ by chance
        passes = s['passes'].get('target/full', 0) / sum(s['labels'].values())
        yield (f'{name:14} {s["tokens_per_second"]:9.1f} {speedup[name]:6.2f} '
               f'{cell(s["acceptance_rate"], ".1%"):>9} {cell(s["block_efficiency"], ".2f"):>10} '
               f'{passes:13.3f} {cell(like, ".1%"):>8} '
               f'{"lossless" if make_method(name, engine.args).lossless else "LOSSY"}')
    decode_seconds = sum(c.passes['target/full'][2] for c in traces['ar']) / plain['cycles']
    for name in names[1:]:
        yield f'{name}: {break_even(traces[name], decode_seconds)} Seen: {speedup[name]:.2f}.'


# --------------------------------------------------------------------------------------------- the program

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f'{message}; --help lists the flags')


def parse(argv):
    """The flags, checked; ValueError in one line for what does not fit."""
    p = Parser(description='Speculative decoding on Llama and Qwen checkpoints.', allow_abbrev=False)
    add = p.add_argument
    add('--prompt', help='the text to continue')
    add('--prompts', metavar='FILE.jsonl', help='rows with prompt, question or turns (the first is used)')
    add('--target', metavar='DIR', help='Hugging Face folder (default: the embedded target)')
    add('--draft', metavar='DIR|lookup|none', help='default: the embedded one; with --target, lookup')
    add('--method', help='one of those that --list shows (default: sd)')
    add('--gamma', type=int, help='draft tokens a cycle (default: 4)')
    add('--temperature', type=float, default=0.0, help='0 (the default) is greedy')
    add('--top-k', type=int, default=0, help='sample from this many likeliest tokens; 0: from all')
    add('--top-p', type=float, default=1.0, help='sample from the likeliest tokens of this mass')
    add('--seed', type=int, default=0)
    add('--max-new', type=int, default=256, help='tokens to write at most (default: 256)')
    add('--ignore-eos', action='store_true', help='write on past the end of sequence')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', 'fp32', 'bf16', 'fp16'), default='auto', help='auto: fp32, on CUDA bf16')
    add('--compile', action='store_true', help='torch.compile the passes (on a CPU it needs a C++ compiler)')
    add('--threads', type=int, help='CPU threads (default: 1 for small models, else as many as cores)')
    add('--chat', action='store_true', help="render the checkpoint's own chat template around the prompt")
    add('--color', choices=('auto', 'always', 'never'), default='auto')
    add('--show', action='store_true', help='cycle by cycle: what was drafted, struck out, put in its place')
    add('--trace', metavar='FILE.jsonl', help='write one line for every cycle')
    add('--check', action='store_true', help='run plain decoding beside it and name the first difference')
    add('--compare', metavar='M1,M2,...', help='one table of these methods and ar')
    add('--list', action='store_true', help='the methods and their knobs')
    add('--json', action='store_true', help='one JSON object for each prompt, instead of the text')
    args = p.parse_args(argv)
    if not args.list:
        check_flags(args)
    return args


def check_flags(args):
    """Fills in the defaults that depend on other flags; ValueError for the first flag that does not fit."""
    compared = args.compare is not None
    names = ['ar'] + args.compare.split(',') if compared else [args.method or 'sd']
    args.methods = list(dict.fromkeys(names))
    unknown = [m for m in args.methods if m not in METHODS]
    alone = args.method or args.check or args.json or args.show or args.trace
    for wrong, message in [
            (unknown, f'method {unknown} is unknown; there are {", ".join(METHODS)}'),
            ((args.prompt is None) == (args.prompts is None), 'give --prompt TEXT or --prompts FILE.jsonl'),
            (not 0 <= args.temperature < math.inf, f'--temperature {args.temperature}: expected 0 or more'),
            (args.top_k < 0, f'--top-k {args.top_k}: expected 0 (all) or more'),
            (not 0 < args.top_p <= 1, f'--top-p {args.top_p}: expected above 0, at most 1'),
            (args.max_new < 1, f'--max-new {args.max_new}: expected 1 or more'),
            (args.threads not in [None, *range(1, 1025)], f'--threads {args.threads}: expected 1 to 1024'),
            (compared and alone, '--compare takes none of --method, --check, --json, --show, --trace'),
            (not 0 <= args.seed < 2 ** 62, f'--seed {args.seed}: expected 0 to 2^62 - 1'),
            (args.check and args.temperature > 0, '--check: texts agree only at --temperature 0')]:
        if wrong:
            raise ValueError(message)
    args.method = args.method or 'sd'
    args.draft = args.draft or ('lookup' if args.target else str(EMBEDDED / 'draft'))
    args.target = args.target or EMBEDDED / 'target'
    for name in args.methods:
        make_method(name, args)


def read_prompts(args):
    """The prompts as texts, from --prompt or from a file of JSON lines."""
    texts = [args.prompt]
    if args.prompts is not None:
        try:
            lines = File(args.prompts).read_text(encoding='utf-8').split('\n')
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f'--prompts {args.prompts}: cannot be read ({error})') from None
        rows = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
        texts = [prompt_of(line, f'{args.prompts} line {i}') for i, line in rows]
        if not texts:
            raise ValueError(f'--prompts {args.prompts}: the file has no rows')
    for i, text in enumerate(texts, 1):
        broken = any('\ud800' <= letter <= '\udfff' for letter in text)
        if broken or not text:
            raise ValueError(f'prompt {i} is {"not valid UTF-8" if broken else "empty"}; expected a text')
    return texts


def prompt_of(line, where):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where}: not a JSON object ({error})') from None
    found = [row[k] for k in ('prompt', 'question', 'turns') if k in row] if isinstance(row, dict) else []
    text = found[0][0] if found and isinstance(found[0], list) and found[0] else found[0] if found else None
    if not isinstance(text, str):
        raise ValueError(f'{where}: expected an object with a text under prompt, question or turns')
    return text


def chat(folder, text):
    """The text as the user's message in the checkpoint's own chat template, rendered in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    folder = File(folder)
    settings = read_json(path) if (path := folder / 'tokenizer_config.json').exists() else {}
    template = settings.get('chat_template')
    if (path := folder / 'chat_template.jinja').exists():
        template = path.read_text(encoding='utf-8')
    if isinstance(template, list):                      # several by name: [{name, template}]
        named = {item.get('name'): item.get('template') for item in template if isinstance(item, dict)}
        template = named.get('default')
    if not isinstance(template, str):
        raise ValueError(f'--chat: {folder} has no chat_template.jinja, nor one in tokenizer_config.json')

    def refuse(message):
        raise TemplateError(message)
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.add_extension('jinja2.ext.loopcontrols')
    world.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    world.globals.update({k: v.get('content') if isinstance(v, dict) else v
                          for k, v in settings.items() if k.endswith('_token') and v})
    world.filters['tojson'] = lambda x, **how: json.dumps(x, ensure_ascii=False, **how)
    try:
        message = dict(role='user', content=text)
        return world.from_string(template).render(messages=[message], add_generation_prompt=True)
    except Exception as error:                          # the template is foreign code: it may raise anything
        raise ValueError(f'--chat: the template of {folder} does not render ({error})') from None


def generate(engine, prompts, args):
    """Every prompt by one method: text, figures, trace, check, break-even. Returns the exit status."""
    trace = open(args.trace, 'w', encoding='utf-8') if args.trace else None
    color = args.color == 'always' or args.color == 'auto' and sys.stdout.isatty()
    everything = []
    for row, ids in enumerate(tqdm(prompts, disable=None if len(prompts) > 1 else True, file=sys.stderr)):
        printer, cycles, interrupted = Printer(engine.tokenizer, color, args.show), [], False
        session, method = engine.start(ids, args.method, row)
        try:
            for cycle in decode(session, method):
                cycles.append(cycle)
                if not args.json:
                    printer.add(cycle)
        except KeyboardInterrupt:
            interrupted = True
        report, everything = engine.report(ids, session, method, cycles), everything + cycles
        if args.json:
            print(json.dumps(report), flush=True)
        else:
            printer.finish(report['text'])
            print(figures(report), file=sys.stderr, flush=True)
        for i, cycle in enumerate(cycles):
            if trace:
                print(trace_line(row, i, cycle, engine), file=trace, flush=True)
        if interrupted:
            return 130
        if args.check:
            print(check(engine, ids, session), file=sys.stderr)
    if args.method != 'ar':
        print(break_even(everything, engine.decode_seconds(session)), file=sys.stderr)
    return 0


def main(argv=None):
    """Runs the program; returns its exit status: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    import lab.rivals                                   # noqa: F401, enters the baselines in METHODS
    try:
        args = parse(argv)
        if args.list:
            for name, method in METHODS.items():
                print(f'{name:9} {method.__doc__.splitlines()[0]}', describe_knobs(name))
            return 0
        texts = read_prompts(args)
        if args.chat:
            texts = [chat(args.target, text) for text in texts]
        engine = Engine(args)
        prompts = [engine.tokenizer.encode(text, add_special_tokens=not args.chat).ids for text in texts]
        engine.open(prompts)
        if args.compile:
            begin = time.perf_counter()
            for name in args.methods:
                list(decode(*engine.start(prompts[0], name)))
            print(f'compiled in {time.perf_counter() - begin:.1f} s, not counted below; later texts may need '
                  'passes of other lengths', file=sys.stderr)
        if args.compare is None:
            return generate(engine, prompts, args)
        for line in compare(engine, prompts, args.methods):
            print(line, flush=True)
        return 0
    except BrokenPipeError:
        return 0
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print('specmini:', ' '.join(str(error).split()), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if 'alloc' not in str(error):
            raise
        print('specmini: not enough memory;', str(error).splitlines()[0], file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == '__main__':
    sys.exit(main())
