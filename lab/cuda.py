"""All that wants a graphics card, in one command and one table: `python -m lab.bench cuda`.

Networks beside transformers', the methods end to end, an 8B shape at full size. A check that fails is a line
of the table, and the others go on. `--device cpu` runs the same list with small shapes. Sparse passes over
long contexts there: `python -m lab.bench pass --shape llama-3.1-8b --contexts 8192 32768`.
"""
import functools
import statistics
import tempfile
from pathlib import Path as File
from typing import NamedTuple

import torch

from lab.measure import MODELS, held_out_rows
from lab.sparse import passes
from lab.speed import moment, quiet_transformers
from model import Reader, load
from specmini import DTYPES, Engine
from verify import METHODS, Autoregressive, Draft, Exact, Session, decode, no_draft, shared_length, tokens_of

KINDS = dict(llama='Llama', mistral='Mistral', qwen2='Qwen2', qwen3='Qwen3', qwen3_moe='Qwen3Moe')
NAMES = 'ar', 'sd', 'cmasd', 'ecsv', 'via', 'specguard', 'sparse'
SLACK = 2           # our rounding errors may be so many times theirs: the order of sums differs
TIES = 8            # likewise of two logits, in units of the larger one's last digit
GAMMA = 4


class Sizes(NamedTuple):
    target: str         # of passes.SHAPES, whose weights are random
    tokens: int         # written by each method
    long: int           # written by the random target, behind
    prompt: int         # so many


ON_CUDA = Sizes('llama-3.1-8b', 64, 256, 512)
ON_CPU = Sizes('embedded', 12, 64, 32)


class Result(NamedTuple):
    said: str
    good: bool = True


# -------------------------------------------------------------------------- networks beside transformers'

def random_network(kind):
    """transformers' network of this model type, small, fp32, with weights so large that each part shows."""
    transformers = quiet_transformers()
    shape = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
                 tie_word_embeddings=False)
    if kind == 'mistral':
        shape.update(sliding_window=None)
    if kind == 'qwen3_moe':
        shape.update(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    config = getattr(transformers, f'{KINDS[kind]}Config')(**shape)
    torch.manual_seed(0)
    network = getattr(transformers, f'{KINDS[kind]}ForCausalLM')(config)
    for key, weight in network.named_parameters():
        if weight.ndim > 1:
            router = key.endswith('mlp.gate.weight')    # sure of itself: a near tie is no error of ours
            torch.nn.init.normal_(weight, std=1.0 if router else 0.08)
    return network.eval()


@torch.inference_mode()
def parity(kind, dtype, device):
    """Our logits and transformers', each against the same weights computed in fp32: errors of rounding.

    What rounding does to transformers is what it may do to us, SLACK times; a wrong position, norm or mask
    moves logits tens of times as far. We read a prompt, then five positions, one at a time, three.
    """
    transformers = quiet_transformers()
    network = random_network(kind).to(DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        tokenizer = (MODELS / 'target' / 'tokenizer.json').read_text()
        (File(folder) / 'tokenizer.json').write_text(tokenizer)
        model, _, _ = load(folder, device, DTYPES[dtype])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    line = torch.randint(0, 1000, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([line])
    exact = network.float()(ids).logits[0]
    error = rms(theirs.to(device)(ids.to(device)).logits[0], exact)
    reader = Reader(model, len(line))
    rows = []
    for begin, end in ((0, 30), (30, 35), (35, 36), (36, 37), (37, 40)):
        rows.append(reader.read(line[:end], [], model.full, end - begin))
    own = rms(torch.cat(rows), exact)
    size = rms(exact, 0)
    return Result(f'error {own / size:.2%} of the logits, transformers {error / size:.2%}',
                  own <= SLACK * error)


def rms(found, wanted):
    """The root mean square of a difference, as a float; the wanted one is on the CPU."""
    return float((found.cpu().float() - wanted).square().mean().sqrt())


# --------------------------------------------------------------------------------------------- the methods

@functools.cache
def embedded_engine(sizes, device, dtype, compiled):
    """(an Engine of the embedded pair, the ids of its prompt)."""
    engine = Engine(MODELS / 'target', MODELS / 'draft', max_new=sizes.tokens, device=device, dtype=dtype,
                    compile=compiled)
    row, = held_out_rows('math', 1, seed=7)
    ids = engine.tokenizer.encode(row['prompt']).ids
    engine.open([ids])
    return engine, ids


def end_to_end(engine_and_ids, name):
    """A method writes greedily and at temperature 0.8; where it is lossless, plain decoding's text.

    A greedy text may part from it where the target's two best logits are a near tie, see TIES.
    """
    engine, ids = engine_and_ids()
    texts = []
    for method, temperature in ((name, 0.0), (name, 0.8), ('ar', 0.0)):
        engine.temperature = temperature
        texts.append(tokens_of(engine.write(ids, METHODS[method]())))
    tokens, sampled, wanted = texts
    said = f'{len(tokens)} tokens, {len(sampled)} sampled'
    if not tokens or not sampled or not engine.lossless(METHODS[name]()):
        return Result(f'{said}; lossy', bool(tokens and sampled))
    if tokens == wanted:
        return Result(f'{said}; text of `ar`')
    same = shared_length(tokens, wanted)
    reader = engine.readers['target']
    logits = reader.read(ids + wanted[:same], [], reader.model.full, 1)[0]
    gap = float(logits.max() - logits[tokens[same]])
    tie = TIES * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return Result(f'{said}; parts from `ar` at token {same}, logit gap {gap:.2g}, a tie up to {tie:.2g}',
                  gap <= tie)


# ------------------------------------------------------------------------------------ a large random target

class Counting:
    """A random network whose greedy text counts up, so that a draft that is right can be pretended.

    The head is the embedding moved by one row, and what the layers add is small beside the embedding: the
    next token is the last one plus 1, by a wide margin, whatever a pass rounds.
    """

    def __init__(self, sizes, device, dtype):
        self.sizes = sizes
        self.capacity = sizes.prompt + sizes.long
        config = passes.config_of(sizes.target, None, self.capacity + 64)
        self.model = passes.random_model(config, device, dtype)
        for key, weight in self.model.named_parameters():
            if key.endswith(('o_proj.weight', 'down_proj.weight')):
                weight.mul_(0.01)
        embedding = self.model.model.embed_tokens.weight
        embedding.mul_(50)
        self.model.lm_head.weight.copy_(embedding.roll(1, 0))
        self.readers = {}       # compiled or not: a Reader
        self.plain = {}         # likewise: tokens a second of plain decoding

    def timed(self, source, method, compiled):
        """(Cycles, tokens a second) of a text, the second of two because the first warms up."""
        if compiled not in self.readers:
            self.readers[compiled] = Reader(self.model, self.capacity, compiled)
        reader = self.readers[compiled]
        first = self.sizes.prompt
        for _ in range(2):
            reader.forget()
            session = Session(reader, None, source, list(range(first)), self.sizes.long,
                              generator=torch.Generator().manual_seed(0))
            session.read_prompt()
            begin = moment(self.model.cos.device.type)
            cycles = list(decode(session, method))
            seconds = moment(self.model.cos.device.type) - begin
        wanted = [(first + i) % self.model.vocab for i in range(self.sizes.long)]
        assert tokens_of(cycles) == wanted, 'the random target does not count up: no draft can be dialled'
        return cycles, self.sizes.long / seconds

    def ar(self, compiled):
        """Plain decoding: tokens a second, and bytes of weights that it reads a second."""
        _, speed = self.timed(no_draft, Autoregressive(), compiled)
        self.plain[compiled] = speed
        size = self.model.read_bytes(self.model.full)
        return Result(f'{speed:.1f} tokens/s, {speed * size / 1e9:.0f} GB/s of weights')

    def sd(self, chance, compiled):
        """Speculative decoding with a pretended draft that is right so often and costs nothing."""
        lots = torch.rand(self.capacity, generator=torch.Generator().manual_seed(0))
        source = functools.partial(dialled, (lots < chance).tolist())
        cycles, speed = self.timed(source, Exact(GAMMA), compiled)
        kept = statistics.fmean(verdict['kept'] for cycle in cycles for verdict in cycle.judged)
        return Result(f'acceptance {kept:.2f}, {speed:.1f} tokens/s, '
                      f'{speed / self.plain[compiled]:.2f} times `ar`', abs(kept - chance) < 0.2)


def dialled(right, session, plan):
    """A Draft of the counting network's own text; right: of each position whether its token is right."""
    V = session.target.model.vocab
    tokens = []
    token = session.tokens[-1]
    begin = len(session.tokens)
    for good in right[begin:begin + plan.n]:
        token = (token + (1 if good else 2)) % V
        tokens.append(token)
    return Draft.points(tokens, session.target.model)


# --------------------------------------------------------------------------------------------------- the list

def checks(sizes, device, dtype):
    """Yields (what is checked, a function without arguments that returns its Result)."""
    for kind in KINDS:
        for few in ('bf16', 'fp16'):
            yield f'logits of {kind}, {few}', functools.partial(parity, kind, few, device)
    for compiled in (False, True):
        how = ' --compile' if compiled else ''
        for name in NAMES[:2] if compiled and device == 'cpu' else NAMES:
            engine_and_ids = functools.partial(embedded_engine, sizes, device, dtype, compiled)
            yield f'`{name}{how}`', functools.partial(end_to_end, engine_and_ids, name)
    large = Counting(sizes, device, DTYPES[dtype])
    for compiled in (False, True):
        how = f'{sizes.target}{" --compile" if compiled else ""}'
        yield f'{how}: `ar`', functools.partial(large.ar, compiled)
        for chance in (0.6, 0.8, 1.0):                  # that a pretended draft token is right
            yield f'{how}: `sd`, dialled {chance}', functools.partial(large.sd, chance, compiled)


def run_all(device, dtype):
    """Prints the table, a line a check; returns the exit status: 1 if one of them failed."""
    sizes = ON_CUDA if device == 'cuda' else ON_CPU
    name = torch.cuda.get_device_name() if device == 'cuda' else 'CPU'
    print(f'{name}, {dtype}, torch {torch.__version__}\n\n| check | found | |\n|---|---|---|', flush=True)
    failures = 0
    for what, check in checks(sizes, device, dtype):
        try:
            found = check()
        except Exception as error:                      # whatever it is, the other checks are still wanted
            said = ' '.join(str(error).split())[:200].replace('|', '/')
            found = Result(f'{type(error).__name__}: {said}', False)
        failures += not found.good
        print(f'| {what} | {found.said} | {"ok" if found.good else "FAILED"} |', flush=True)
    return int(failures > 0)
