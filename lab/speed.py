"""Where time goes on this machine: `python -m lab.speed`, ten minutes of a graphics card, or a CPU.

A copy's bandwidth; plain decoding, and speculative with a draft that is right by a given chance, transformers
beside them; dense and sparse passes after long texts; whether the methods write what they should; on a card
all of it compiled, too, of random networks in the shapes of Llama 3 8B and 1B. What is compared runs in turn,
and each line becomes a row of --out.
"""
import argparse
import functools
import itertools
import statistics
import sys

import torch

from lab import at_least, tasks
from lab.measure import MODELS, as_line, dated, moment
from model import EVEN, PAD, Calibration, Config, Reader, Transformer, checkpoint_views, require_that
from specmini import Engine, exit_status, ready, take_threads
from verify import (METHODS, Draft, Exact, Session, Sparse, decode, draft_model, no_draft, read_prompt,
                    tokens_of)

SHAPES = dict(          # V, C, F, layers, H, G, D
    target=(128256, 4096, 14336, 32, 32, 8, 128), draft=(128256, 2048, 8192, 16, 32, 8, 64))
CHANCES = 0.6, 0.8, 0.9     # that a pretended guess is right
GAMMA = 4
KEYS = 2048, 8192, 32768
PARTS = 'copy', 'texts', 'passes', 'methods'
PROMPT, WRITTEN = 512, 256  # tokens
RULE = Sparse(rho=0.25, block=64, dense_below=1024, moe_skip=0)     # of sparse passes


def counting(shape, context, device, dtype):
    """A random network that counts: the token after i is i + 1 by a wide margin, whatever a pass rounds.

    Its head is the embedding moved by one row, and what the layers add is small beside the embedding.
    """
    config = Config('llama', *SHAPES[shape], context)
    with torch.device('meta'):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for name, weight in model.named_parameters():
        spread = 0.0002 if name.endswith(('o_proj.weight', 'down_proj.weight')) else 0.02
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, spread)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(50)
    model.lm_head.weight.copy_(embedding.roll(1, 0))
    model.set_context(context)
    return model


def pretended(text, right, session, n, method):
    """A Draft of the text (ids) that plain decoding writes, wrong where right[position] is False."""
    draft_model(session, n, method)                     # for the time that it takes
    known = len(session.tokens)
    tokens = [token if good else (token + 1) % session.target.model.vocab
              for token, good in zip(text[known:known + n], right[known:])]
    return Draft.points(tokens, session.target.model)


# -------------------------------------------------------------------------------------------------- the lines

class Machine:
    """What is measured of one pair of networks; the functions of PARTS yield rows, dicts of numbers."""

    def __init__(self, args):
        self.device = args.device
        card = args.device == 'cuda'
        self.forms = {'': False} | ({', compiled': True} if card else {})   # a line's name: compiled or not
        self.prompt = list(range(PROMPT))
        self.home = None                                # the target's folder; None: random weights
        if args.pair == 'random':
            of = KEYS[-1] + EVEN + PAD, args.device, torch.bfloat16 if card else torch.float32
            self.models = {role: counting(role, *of) for role in SHAPES}
        else:
            homes = args.pair.split(',') if args.pair else [MODELS / 'target', MODELS / 'draft']
            require_that(len(homes) == 2, f'--pair {args.pair}: expected two folders DIR,DIR')
            loaded = [ready(home, args.device, 'auto') for home in homes]
            self.home = homes[0]
            self.models = {role: model for role, (model, _, _) in zip(SHAPES, loaded)}
            row = next(tasks.rows('math', 7))
            self.prompt = loaded[0][1].encode(row['prompt']).ids
        self.target = self.models['target']
        take_threads(self.target)
        self.readers = {(role, form): Reader(model, len(self.prompt) + WRITTEN, compiled)
                        for role, model in self.models.items() for form, compiled in self.forms.items()}

    def copy(self):
        """GB that a copy reads and writes a second; no cache holds as much."""
        size = 2 ** (31 if self.device == 'cuda' else 27)               # bytes
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        times, _ = in_turn(dict(copy=functools.partial(torch.empty_like(source).copy_, source)), 5)
        yield {'line': 'copy', 'GB/s': 2e-9 * size / statistics.median(times['copy'])}

    def text(self, form, chance=None):
        """Writes a text; returns its Cycles. chance: that a guess is right, None for plain decoding."""
        target, draft = (self.readers[role, form] for role in SHAPES)
        target.forget()
        draft.forget()
        method, source = METHODS['ar'](), no_draft
        if chance:
            lots = torch.rand(len(self.plain), generator=torch.Generator().manual_seed(0))
            method, source = Exact(GAMMA), functools.partial(pretended, self.plain, (lots < chance).tolist())
        session = Session(target, draft if chance else None, source, list(self.prompt), WRITTEN,
                          generator=torch.Generator().manual_seed(0))
        read_prompt(session)
        return list(decode(session, method))

    def texts(self):
        """Plain and speculative decoding in all forms, transformers beside them."""
        self.plain = self.prompt + tokens_of(self.text(''))
        runs = {(f'sd {chance}' if chance else 'ar') + form: functools.partial(self.text, form, chance)
                for chance, form in itertools.product((None, *CHANCES), self.forms)}
        runs |= theirs(self.home, self.target, self.prompt)
        times, made = in_turn(runs, 3)
        for name, (first, *seconds) in times.items():
            row = dict(line=name, first=first, over=over(times, name, 'ar'))
            row['tokens/s'] = WRITTEN / statistics.median(seconds)
            if 'transformers' not in name:
                row['a pass'] = WRITTEN / len(made[name])
                row['as plain'] = tokens_of(made[name]) == self.plain[len(self.prompt):]
            yield row

    def passes(self):
        """A pass over GAMMA + 1 positions after so many keys: dense and sparse, in all forms."""
        for keys in KEYS:
            if keys + PAD > self.target.config.max_position_embeddings:
                continue
            ids = [i % self.target.vocab for i in range(1, keys + 1)]
            runs = {}
            for form, compiled in self.forms.items():
                reader = Reader(self.target, keys, compiled)
                session = Session(reader, None, no_draft, ids, 1, calibration=Calibration())
                full = self.target.full
                reader.read(ids, full, 1)
                for name, path in dict(dense=full, sparse=RULE.sparse_path(full, session)).items():
                    runs[name + form] = functools.partial(reader.read, ids, path, GAMMA + 1)
            times, _ = in_turn(runs, 9)
            for name, (first, *seconds) in times.items():
                yield dict(line=f'pass {keys}, {name}', first=first, ms=1000 * statistics.median(seconds),
                           over=over(times, name, 'dense'))

    def methods(self):
        """Whether the embedded pair in fp32 writes by each method what it writes by plain decoding."""
        row = next(tasks.rows('math', 7))
        for form, compiled in self.forms.items():
            engine = Engine(device=self.device, dtype='fp32', compile=compiled, max_new=64)
            ids = engine.tokenizer.encode(row['prompt']).ids
            engine.open([ids])
            wanted = tokens_of(engine.write(ids, 'ar'))
            for name in ('sd', 'cmasd', 'ecsv', 'ecsv-spot', 'via', 'specguard'):
                found = tokens_of(engine.write(ids, name))
                yield dict(line=name + form, same=found == wanted, lossless=engine.lossless(METHODS[name]()))


def theirs(home, model, ids):
    """{name: function} of transformers' plain decoding of this folder or random model, if it is installed."""
    try:
        import transformers
    except ImportError:
        return {}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if home:
        network = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=model.dtype)
    else:
        sizes = {name: value for name, value in vars(model.config).items() if name not in ('rope', 'experts')}
        with torch.device('meta'):
            network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        network.load_state_dict(checkpoint_views(model), assign=True)
        network.model.rotary_emb = type(network.model.rotary_emb)(config=network.config)
    network = network.to(model.device).eval()
    line = torch.tensor([ids], device=model.device)
    return {'ar, transformers': functools.partial(
        network.generate, line, attention_mask=torch.ones_like(line), do_sample=False, pad_token_id=0,
        max_new_tokens=WRITTEN, min_new_tokens=WRITTEN)}


def in_turn(runs, rounds):
    """({name: seconds of its first call, then of each round}, {name: what its last call returned})."""
    times = {name: [] for name in runs}
    made = {}
    for _, (name, run) in itertools.product(range(rounds + 1), runs.items()):
        begin = moment()
        made[name] = run()
        times[name].append(moment() - begin)
    return times, made


def over(times, name, rival):
    """How many times as fast as a rival: the median of rounds, the lowest and the highest."""
    ratios = [theirs / mine for mine, theirs in zip(times[name][1:], times[rival][1:])]
    return [round(f(ratios), 3) for f in (statistics.median, min, max)]


# ------------------------------------------------------------------------------------------------ the command

def run():
    parser = argparse.ArgumentParser(prog='python -m lab.speed', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    there = torch.cuda.is_available()
    add('--device', choices=('cpu', 'cuda'), default='cuda' if there else 'cpu')
    add('--pair', metavar='DIR,DIR', default='random' if there else '',
        help='target and draft; random: as above (the default on a card); else the embedded pair')
    add('--only', nargs='+', choices=PARTS, default=PARTS)
    add('--minutes', type=at_least(0, float), default=9, help='after which nothing more is begun (9)')
    add('--out', metavar='FILE', default='rows.jsonl', help='to which rows are added (rows.jsonl)')
    args = parser.parse_args()
    end = moment() + 60 * args.minutes
    require_that(args.device == 'cpu' or torch.cuda.is_available(), 'no CUDA device; give --device cpu')
    machine = Machine(args)
    name = torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'
    head = dated(dict(device=name, dtype=str(machine.target.dtype), pair=args.pair,
                      threads=torch.get_num_threads()))
    with open(args.out, 'a', encoding='utf-8') as file:
        for row in itertools.chain([head], *(getattr(machine, part)() for part in args.only)):
            for where in file, sys.stdout:
                print(as_line(row), end='', file=where, flush=True)
            if moment() > end:
                print('the time is up: the rest is left out')
                break


def main():
    return exit_status('lab.speed', run)


if __name__ == '__main__':
    sys.exit(main())
