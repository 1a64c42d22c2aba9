"""Speculative decoding from the command line: the loop, the figures of its trace, the program around them.

`python specmini.py --prompt "..."` runs on the embedded models; --help names every flag, --list every method.
"""
import argparse
import math
import sys
import time
import warnings
from collections import Counter
from pathlib import Path as File

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; nothing here needs it

import torch
from tqdm import tqdm

from model import Reader, expect, load, same_vocabulary
from verify import METHODS, Cycle, Session, knobs_of, lookup, rollout, silence, whole_passes

EMBEDDED = File(__file__).parent / 'lab' / 'models'
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
SMALL = 50_000_000      # parameters below which one CPU thread beats several: too little work to share
PARTS = dict(attn=dict(rho=1.0), ffn=dict(ffn_threshold=0.0, ffn_quantile=0.0, ffn_share=1.0),
             moe=dict(moe_skip=0))      # of --sparse, and the knobs that switch each off


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
    block_efficiency: tokens committed per target pass, full or sparse, the extra token included. work: weight
    bytes read over those of one full target pass; compute: if every position read them anew, as where not
    memory but arithmetic takes the time. Seconds, passes and positions exclude the prompt's.
    """
    ratio = lambda a, b: a / b if b else None
    passes, positions, labels = Counter(), Counter(), Counter()
    for cycle in cycles:
        labels.update(cycle.labels)
        for path, (n, T, _) in cycle.passes.items():
            passes[path] += n
            positions[path] += T
    tokens, seconds = labels.total(), sum(c.seconds for c in cycles)
    verdicts = [j['kept'] for c in cycles for j in c.judged]
    read = lambda counts: sum(n * weights[path] for path, n in counts.items()) / weights['target/full']
    return dict(
        cycles=len(cycles), passes=passes, positions=positions, drafted=sum(len(c.drafted) for c in cycles),
        judged=len(verdicts), accepted=sum(c.accepted for c in cycles),
        acceptance_rate=ratio(sum(verdicts), len(verdicts)),
        rejection_rate=ratio(verdicts.count(False), len(verdicts)),
        block_efficiency=ratio(tokens, whole_passes(passes)), labels=labels, seconds=seconds,
        prompt_seconds=prompt_seconds, tokens_per_second=ratio(tokens, seconds), work=read(passes),
        compute=read(positions))


# ----------------------------------------------------------------------------------------- the engine room

class Engine:
    """The loaded models and the settings of a run; starts a Session for each text."""

    def __init__(self, args):
        from lab.calibration import read_calibration, sections
        self.args, self.device = args, pick_device(args.device)
        self.dtype = args.dtype if args.dtype != 'auto' else 'bf16' if self.device == 'cuda' else 'fp32'
        target, self.tokenizer, eos = load(args.target, self.device, DTYPES[self.dtype])
        self.models, self.readers = dict(target=target), {}             # both by role
        self.eos = frozenset() if args.ignore_eos else eos
        self.sparse = make_method('sparse', args) if args.sparse else None
        self.source = dict(lookup=lookup, none=silence).get(args.draft, rollout)
        drafts = self.source is rollout and args.draft != 'self' and args.methods != ['ar']
        for role, folder in (('draft', drafts and args.draft), ('mid', args.mid)):
            if folder:
                self.models[role], *_ = load(folder, self.device, DTYPES[self.dtype])
                same_vocabulary(target, self.models[role], f'--{role} {folder}')
        mixtures = target.config.mixtures
        there = dict(attn=True, ffn=not all(mixtures), moe=any(mixtures))
        for part in args.sparse:
            expect(there[part], f'--sparse {part}: {args.target} has no layer of that kind')
        methods = [make_method(name, args) for name in args.methods] + ([self.sparse] if self.sparse else [])
        needs = sections(methods, mixtures) | ({'mask'} if args.draft == 'self' else set())
        self.calibration = read_calibration(args.target, args.draft if drafts else None, sorted(needs))
        contexts = {role: m.config.max_position_embeddings for role, m in self.models.items()}
        self.shortest, self.context = min(contexts.items(), key=lambda pair: pair[1])
        threads = args.threads or (1 if sum(p.numel() for p in target.parameters()) < SMALL else None)
        if threads and self.device == 'cpu':
            torch.set_num_threads(threads)

    def open(self, prompts):
        """Caches for the longest of the prompts (lists of ids); ValueError where one does not fit."""
        for i, ids in enumerate(prompts, 1):
            expect(0 < len(ids) < self.context,
                   f'prompt {i} has {len(ids)} tokens; expected at least 1, and fewer than the context of '
                   f'{self.context} (of the {self.shortest})')
        capacity = min(self.context, max(map(len, prompts)) + self.args.max_new)
        self.readers = {role: Reader(m, capacity, self.args.compile) for role, m in self.models.items()}

    def start(self, ids, name, row=0):
        """(Session that has read this prompt, method); no position of an earlier text is trusted."""
        a, readers = self.args, {k: r for k, r in self.readers.items() if k == 'target' or name != 'ar'}
        for reader in readers.values():
            reader.cache.record([], 0, reader.model.full)       # forgets: a text pays for its whole prompt
        generator = torch.Generator(self.device).manual_seed(a.seed + row)  # equal prompts, other samples
        session = Session(readers['target'], readers.get('draft'), self.source, list(ids),
                          min(a.max_new, self.context - len(ids)), self.eos,
                          a.temperature, a.top_k, a.top_p, generator, mid=readers.get('mid'),
                          calibration=self.calibration, text=self.tokenizer.decode,
                          sparse=None if name == 'ar' else self.sparse)
        session.read_prompt()
        return session, make_method(name, a)

    def write(self, ids, name, row=0):
        """(method, list of its Cycles): one whole text, for whoever compares."""
        session, method = self.start(ids, name, row)
        return method, list(decode(session, method))

    def statistics(self, cycles, prompt_seconds=0.0):
        weights = {f'{role}/{name}': r.model.read_bytes(path) for role, r in self.readers.items()
                   for name, path in ({'full': r.model.full} | r.paths).items()}
        return statistics(cycles, prompt_seconds, weights)


def pick_device(name):
    """'cpu' or 'cuda'; ValueError if CUDA is asked for and absent."""
    there = torch.cuda.is_available()
    expect(there or name != 'cuda', '--device cuda: this machine, or torch, has none; use --device cpu')
    return ('cuda' if there else 'cpu') if name == 'auto' else name


def describe_knobs(name):
    return ', '.join(f'{k}={f.default}' for k, f in knobs_of(METHODS[name]).items())


def make_method(name, args):
    """The method with its knobs from --set, each read by its dataclass type.

    Under --compare a method takes the knobs that it has; one that no method of the run has is refused.
    """
    knobs, values, names = knobs_of(METHODS[name]), {}, args.methods + ['sparse'] * bool(args.sparse)
    for item in args.set:
        knob, equals, text = item.partition('=')
        if not equals or not any(knob in knobs_of(METHODS[m]) for m in names):
            have = '; '.join(f'{m}: {describe_knobs(m) or "none"}' for m in names)
            raise ValueError(f'--set {item}: expected knob=value with a knob of the method ({have})')
        if knob in knobs:
            kind, attribute = knobs[knob].type, knobs[knob].name
            try:
                values[attribute] = dict(true=True, false=False)[text.lower()] if kind is bool else kind(text)
            except (ValueError, KeyError):
                raise ValueError(f'--set {item}: {text!r} is not a value of type {kind.__name__}') from None
    for part in PARTS.keys() - args.sparse if name == 'sparse' and args.sparse else ():
        values = PARTS[part] | values                   # what is set by name is meant
    return METHODS[name](**values)


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
    add('--draft', metavar='DIR|lookup|self|none', help='default: the embedded one; with --target, lookup; '
        'self: the target without the sublayers that its calibration.json skips')
    add('--mid', metavar='DIR', help='a model between draft and target, for the methods that ask for one')
    add('--method', help='one of those that --list shows (default: sd)')
    add('--sparse', metavar='attn,ffn,moe', help='what the target leaves out, under any method')
    add('--gamma', type=int, help='draft tokens a cycle (default: 4)')
    add('--temperature', type=float, default=0.0, help='0 (the default) is greedy')
    add('--top-k', type=int, default=0, help='sample from this many likeliest tokens; 0: from all')
    add('--top-p', type=float, default=1.0, help='sample from the likeliest tokens of this mass')
    add('--seed', type=int, default=0)
    add('--max-new', type=int, default=256, help='tokens to write at most (default: 256)')
    add('--ignore-eos', action='store_true', help='write on past the end of sequence')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=('auto', *DTYPES), default='auto', help='auto: fp32, on CUDA bf16')
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
    return args if args.list else check_flags(args)


def check_flags(args):
    """The args, with defaults that hang on other flags; ValueError for the first flag that does not fit."""
    empty = [flag for flag, value in vars(args).items() if value == '' and flag != 'prompt']
    expect(not empty, f'--{", --".join(empty)}: found an empty text, expected a value')
    alone = args.method or args.check or args.json or args.show or args.trace
    args.method = args.method or 'sd'
    args.methods = [*dict.fromkeys(f'ar,{args.compare}'.split(','))] if args.compare else [args.method]
    unknown = [m for m in args.methods if m not in METHODS]
    args.sparse = set(args.sparse.split(',') if args.sparse else ())
    expect(not unknown, f'method {unknown} is unknown; there are {", ".join(METHODS)}')
    expect(args.sparse <= PARTS.keys(), f'--sparse {sorted(args.sparse)}: expected some of attn,ffn,moe')
    expect((args.prompt is None) != (args.prompts is None), 'give --prompt TEXT or --prompts FILE.jsonl')
    t = args.temperature
    expect(t == 0 or 1e-6 <= t < math.inf, f'--temperature {t}: expected 0, or 1e-6 or more')
    expect(args.top_k >= 0, f'--top-k {args.top_k}: expected 0 (all) or more')
    expect(0 < args.top_p <= 1, f'--top-p {args.top_p}: expected above 0, at most 1')
    expect(args.max_new >= 1, f'--max-new {args.max_new}: expected 1 or more')
    expect(args.threads in [None, *range(1, 1025)], f'--threads {args.threads}: expected 1 to 1024')
    expect(not (args.compare and alone), '--compare takes none of --method, --check, --json, --show, --trace')
    expect(0 <= args.seed < 2 ** 62, f'--seed {args.seed}: expected 0 to 2^62 - 1')
    expect(not args.check or t == 0, '--check: texts agree only at --temperature 0')
    if args.gamma is not None and args.methods != ['ar']:
        args.set.append(f'gamma={args.gamma}')
    args.draft = args.draft or ('lookup' if args.target else str(EMBEDDED / 'draft'))
    args.target = args.target or EMBEDDED / 'target'
    for name in args.methods:
        make_method(name, args)                         # refuses knobs before anything is loaded
    return args


def generate(engine, rows, prompts, args):
    """Every prompt by one method, told as it is written; returns the exit status."""
    from lab.compare import Teller
    teller = Teller(engine, args)
    for i, ids in enumerate(tqdm(prompts, disable=None if len(prompts) > 1 else True, file=sys.stderr)):
        session, method = engine.start(ids, args.method, i)
        try:
            for cycle in decode(session, method):
                teller.add(cycle)
        except KeyboardInterrupt:
            teller.finish(i, rows[i], session, method)
            return 130
        teller.finish(i, rows[i], session, method)
        teller.check(ids)
    teller.conclude(session, method)
    return 0


def run(args):
    """All that the flags ask for; returns the exit status."""
    if args.list:
        for name, method in METHODS.items():
            print(f'{name:17} {method.__doc__.splitlines()[0]}', describe_knobs(name))
        return 0
    from lab.prompts import chat, read_rows
    rows = read_rows(args)
    texts = [chat(args.target, row['prompt']) if args.chat else row['prompt'] for row in rows]
    engine = Engine(args)
    prompts = [engine.tokenizer.encode(text, add_special_tokens=not args.chat).ids for text in texts]
    engine.open(prompts)
    if args.compile:
        begin = time.perf_counter()
        for name in args.methods:
            engine.write(prompts[0], name)
        print(f'compiled in {time.perf_counter() - begin:.1f} s, not counted below; later texts may need '
              'passes of other lengths', file=sys.stderr)
    if args.compare is None:
        return generate(engine, rows, prompts, args)
    from lab.compare import compare
    for line in compare(engine, rows, prompts, args.methods):
        print(line, flush=True)
    return 0


def main(argv=None):
    """Runs the program; returns its exit status: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    import lab.rivals                                   # noqa: F401, enters the baselines in METHODS
    try:
        return run(parse(argv))
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and 'alloc' not in str(error):
            raise                                       # not for want of memory: a defect, not bad input
        print('specmini:', ' '.join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
