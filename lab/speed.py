"""What a graphics card does in five minutes: `python -m lab.speed > rows.jsonl`.

A copy's bandwidth; plain decoding, and speculative with a draft that is right by a given chance, transformers
beside them; dense and sparse passes after long texts. All of it eager and compiled, of random networks in the
shapes of Llama 3 8B and 1B. What is compared runs in turn, and each line becomes a row of JSON.
"""
import argparse
import functools
import itertools
import statistics
import sys

import torch

from lab.measure import as_line, dated, moment
from lab.others import by_transformers
from model import EVEN, PAD, Calibration, Config, Reader, Transformer, checkpoint_views, require_that
from specmini import exit_status
from verify import (METHODS, Draft, Exact, Session, Sparse, decode, draft_model, no_draft, read_prompt,
                    tokens_of)

SHAPES = dict(          # V, C, F, layers, H, G, D
    target=(128256, 4096, 14336, 32, 32, 8, 128), draft=(128256, 2048, 8192, 16, 32, 8, 64))
FORMS = {'': False, ', compiled': True}     # a line's name: compiled or not
CHANCES = 0.6, 0.8, 0.9     # that a pretended guess is right
GAMMA = 4
KEYS = 2048, 8192, 32768
PROMPT, WRITTEN = 512, 256  # tokens
COPIED = 2 ** 31            # bytes
RULE = Sparse(rho=0.25, block=64, dense_below=1024, moe_skip=0)     # of sparse passes


def counting(shape, device):
    """A random network that counts: the token after i is i + 1 by a wide margin, whatever a pass rounds.

    Its head is the embedding moved by one row, and what the layers add is small beside the embedding.
    """
    torch.manual_seed(0)
    context = KEYS[-1] + EVEN + PAD
    with torch.device('meta'):
        model = Transformer(Config('llama', *SHAPES[shape], context))
    model = model.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    for name, weight in model.named_parameters():
        spread = 0.0002 if name.endswith(('o_proj.weight', 'down_proj.weight')) else 0.02
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, spread)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(50)
    model.lm_head.weight.copy_(embedding.roll(1, 0))
    model.set_context(context)
    return model


# -------------------------------------------------------------------------------------------------- the lines

def copy(device):
    """A row, as are the others, dicts: GB that a copy reads and writes a second; no cache holds as much."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    times, _ = in_turn(dict(copy=functools.partial(torch.empty_like(source).copy_, source)), 5)
    yield {'line': 'copy', 'GB/s': 2e-9 * COPIED / statistics.median(times['copy'])}


def pretended(right, session, n, method):
    """A Draft that counts on from the text, wrong where right[position] is False."""
    draft_model(session, n, method)                     # for the time that it takes
    known = len(session.tokens)
    tokens = [i if right[i] else i + 1 for i in range(known, known + n)]
    return Draft.points(tokens, session.target.model)


def write(target, draft, chance):
    """Writes a text by these Readers; returns its Cycles. chance: of a right guess; 0: plain decoding."""
    target.forget()
    draft.forget()
    method, source = METHODS['ar'](), no_draft
    if chance:
        lots = torch.rand(PROMPT + WRITTEN + GAMMA, generator=torch.Generator().manual_seed(0))
        method, source = Exact(GAMMA), functools.partial(pretended, (lots < chance).tolist())
    session = Session(target, draft if chance else None, source, list(range(PROMPT)), WRITTEN)
    read_prompt(session)
    return list(decode(session, method))


def texts(target, draft):
    """Plain and speculative decoding in all forms, transformers beside them."""
    readers = {form: [Reader(model, PROMPT + WRITTEN, compiled) for model in (target, draft)]
               for form, compiled in FORMS.items()}
    runs = {(f'sd {chance}' if chance else 'ar') + form: functools.partial(write, *readers[form], chance)
            for chance, form in itertools.product((0, *CHANCES), FORMS)}
    runs |= theirs(target)
    times, made = in_turn(runs, 3)
    for name, (first, *seconds) in times.items():
        row = dict(line=name, first=first, over=over(times, name, 'ar'))
        row['tokens/s'] = WRITTEN / statistics.median(seconds)
        if 'transformers' not in name:
            row['a pass'] = WRITTEN / len(made[name])
            row['counts'] = tokens_of(made[name]) == list(range(PROMPT, PROMPT + WRITTEN))
        yield row


def theirs(model):
    """{name: function} of transformers' plain decoding by a random model's tensors, if it is installed."""
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {}
    sizes = {name: value for name, value in vars(model.config).items() if name not in ('rope', 'experts')}
    with torch.device('meta'):
        network = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    network.load_state_dict(checkpoint_views(model), assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(config=network.config).to(model.device)
    network.generation_config = GenerationConfig(pad_token_id=0)
    run = functools.partial(by_transformers, network, network, None, list(range(PROMPT)), WRITTEN)
    return {'ar, transformers': run}


def passes(target):
    """A pass over GAMMA + 1 positions after so many keys: dense and sparse, in all forms."""
    for keys in KEYS:
        ids = [i % target.vocab for i in range(1, keys + 1)]
        runs = {}
        for form, compiled in FORMS.items():
            reader = Reader(target, keys, compiled)
            session = Session(reader, None, no_draft, ids, 1, calibration=Calibration())
            reader.read(ids, target.full, 1)
            for name, path in dict(dense=target.full, sparse=RULE.sparse_path(target.full, session)).items():
                runs[name + form] = functools.partial(reader.read, ids, path, GAMMA + 1)
        times, _ = in_turn(runs, 7)
        for name, (first, *seconds) in times.items():
            rival = 'dense, compiled' if 'compiled' in name else 'dense'
            yield dict(line=f'pass {keys}, {name}', first=first, ms=1000 * statistics.median(seconds),
                       over=over(times, name, rival))


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


def rows(device, only=None):
    """The rows of all lines, or those of one part."""
    target, draft = (counting(shape, device) for shape in SHAPES)
    parts = dict(copy=copy(device), texts=texts(target, draft), passes=passes(target))
    return itertools.chain(*([parts[only]] if only else parts.values()))


def run():
    parser = argparse.ArgumentParser(prog='python -m lab.speed', description=__doc__)
    parser.add_argument('--only', choices=('copy', 'texts', 'passes'), help='a part')
    args = parser.parse_args()
    require_that(torch.cuda.is_available(), 'no CUDA device here; on a CPU take lab.others and lab.times')
    head = dated(dict(models={}, made='random weights', dtype='bf16'))      # the card is named, too
    for row in itertools.chain([head], rows('cuda', args.only)):
        print(as_line(row), end='', flush=True)


if __name__ == '__main__':
    sys.exit(exit_status('lab.speed', run))
