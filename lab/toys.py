"""Models small enough to know all about: random networks, and tables whose text's law can be enumerated.

Whether a method is lossless can be counted out: `variation(enumerate_law(Table(1), Table(2), method, 3,
temperature=1.0), exact_law(Table(1), 3, temperature=1.0))` is 0 then, but for rounding. The tests use these.
"""
import json
from collections import Counter
from dataclasses import replace

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kernels
from model import Config, Path, Reader, Transformer
from specmini import decode
from verify import METHODS, Draft, Exact, Session, probs, rollout, silence

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, max_position_embeddings=64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------- random networks

def network(seed=0, vocab=11, dtype=torch.float64, **sizes):
    """A small random Transformer with large weights, so that a wrong position or norm shows."""
    torch.manual_seed(seed)
    model = Transformer(Config('llama', vocab, **SIZES | sizes)).requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.4)
    model = model.to(dtype)
    model.set_context(64)
    return model


def byte_network(seed=0, vocab=257, **sizes):
    """A random network in fp32 for the tokens of bytes_tokenizer."""
    return network(seed, vocab, torch.float32, **sizes)


def bytes_tokenizer(extra=()):
    """A byte-level tokenizer without merges: 256 bytes, <eos>, and whatever is extra."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ['<eos>', *extra]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<eos>'])
    return tokenizer


def checkpoint(folder, model=None, tokenizer=None, **changes):
    """A Hugging Face folder with a random network of ours; changes go into config.json, None leaves out."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model or byte_network()
    raw = dict(model_type='llama', vocab_size=model.config.vocab_size, eos_token_id=256) | SIZES | changes
    (folder / 'config.json').write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    save_file(dict(model.state_dict()), folder / 'model.safetensors')
    (tokenizer or bytes_tokenizer()).save(str(folder / 'tokenizer.json'))
    return folder


# -------------------------------------------------------------------------------------------------- texts

def fresh(model, line, last=None):
    """Logits [last, V], of all positions by default, by a reader that has read nothing before."""
    return Reader(model, len(line)).read(line, [], model.full, last or len(line))


def session(target, draft, prompt, room, source=rollout, seed=0, **settings):
    """A Session on a prompt (ids) with caches of its own; draft may be None."""
    readers = (model and Reader(model, len(prompt) + room) for model in (target, draft))
    return Session(*readers, source, list(prompt), room, generator=seeded(seed), **settings)


def write(s, method):
    """(tokens written, cycles), with what must hold of any trace checked on the way."""
    begin = len(s.tokens)
    s.read_prompt()
    cycles = list(decode(s, replace(method)))                               # a method serves one text
    emitted = sum((c.tokens for c in cycles), [])
    assert emitted == s.tokens[begin:], f'emitted {emitted}, committed {s.tokens[begin:]}'
    for c in cycles:
        assert len(c.labels) == len(c.tokens) >= 1, f'{c.labels} are the labels of {c.tokens}'
        assert c.accepted <= len(c.judged) <= len(c.drafted), f'{c.accepted} kept, {c.judged}, {c.drafted}'
    return s.tokens[begin:], cycles


def plain(target, prompt, room, **settings):
    """The tokens that plain decoding writes."""
    return write(session(target, None, prompt, room, silence, **settings), METHODS['ar']())[0]


# -------------------------------------------------------------------------------------------- tables and laws

class Table:
    """A language model that is a table: the next-token logits of every prefix are random and known.

    Inside the real Reader and KVCache it keeps the ids it was fed as keys and looks its logits up by what it
    finds there, so a wrong cache gives a wrong law. A slim path (no feed-forward) writes other keys.
    """

    def __init__(self, seed, vocab=4, scale=1.5):
        self.seed, self.vocab, self.scale, self.rows = seed, vocab, scale, {}
        self.config = Config('llama', vocab, 1, 1, 1, 1, 1, 1, 64)
        self.cos = torch.zeros(10_000, 1, dtype=torch.float64)
        self.lm_head = torch.nn.Linear(1, vocab, dtype=torch.float64)
        self.full = Path('full', (kernels.attend,), (kernels.swiglu,))

    def row(self, prefix):
        """The logits [V] behind a prefix, a tuple of ids."""
        if prefix not in self.rows:
            g = seeded(hash((self.seed, *prefix)) % 2 ** 40)
            self.rows[prefix] = self.scale * torch.randn(self.vocab, generator=g, dtype=torch.float64)
        return self.rows[prefix]

    def __call__(self, ids, positions, path, stores, span, carry=None):
        if path.carry:                                  # its attention, where observed, is flat
            flat, mask = torch.zeros(1, 1, span, 1), torch.arange(span) > positions[:, None]
            path.attends[0](flat[:, :, :len(positions)], flat, flat, mask * -1e9, path.carry)
        stores[0][0][:, 0, positions, 0] = ids.double() + (0.5 if None in path.ffns else 0.0)   # slim writes
        seen, places = map(tuple, stores[0][0][:, 0, :, 0].tolist()), positions.tolist()
        return torch.stack([torch.stack([self.row(line[:i + 1]) for i in places]) for line in seen])

    def logits(self, hidden):
        return hidden


def enumerate_law(target, draft, method, horizon, source=rollout, prompt=(0,), run=write, **settings):
    """{tokens: probability} of all that run, to (tokens, trace), can write: each branch of each draw."""
    found, todo = Counter(), [[]]
    while todo:
        script, taken, weight = todo.pop(), [], [1.0]
        s = session(target, draft, prompt, horizon, source, **settings)

        def draw(p):
            if p.ndim == 2:
                return torch.stack([draw(row) for row in p])
            i = len(taken)
            if i == len(script):
                options = p.nonzero()[:, 0].tolist()
                todo.extend(taken + [other] for other in options[1:])
                script.append(options[0])
            taken.append(script[i])
            weight[0] *= float(p[script[i]])
            return torch.tensor(script[i])
        s.draw = draw
        tokens, _ = run(s, method)
        found[tuple(tokens)] += weight[0]
    return found


def law_by_cycles(target, draft, method, horizon, prompt=(0,), **settings):
    """enumerate_law, one cycle at a time: for methods that keep nothing from one cycle to the next."""
    def once(s, method):
        s.read_prompt()
        return next(decode(s, method)).tokens, None
    found = Counter()
    first = enumerate_law(target, draft, method, horizon, prompt=prompt, run=once, **settings)
    for tokens, weight in first.items():
        left = horizon - len(tokens)
        rest = law_by_cycles(target, draft, method, left, prompt + tokens, **settings) if left else {(): 1.0}
        for later, chance in rest.items():
            found[tokens + later] += weight * chance
    return found


def exact_law(target, horizon, text=(), weight=1.0, eos=frozenset(), **settings):
    """{tokens: probability} under the target alone, of all that begins with this text."""
    if len(text) == horizon or eos & {*text}:
        return Counter({text: weight})
    row = enumerate(probs(target.row((0, *text)), **settings).tolist())
    each = (exact_law(target, horizon, (*text, x), weight * p, eos, **settings) for x, p in row if p)
    return sum(each, Counter())


def variation(a, b):
    """Total variation distance of two laws, each of them whole."""
    assert abs(sum(a.values()) - 1) < 1e-9 and abs(sum(b.values()) - 1) < 1e-9, (a, b)
    return sum(abs(a[x] - b[x]) for x in a.keys() | b.keys()) / 2


# ------------------------------------------------------------------------------------ rules wrong on purpose

class Wrong(Exact):
    """What the negative controls of the law test are: LOSSY on purpose."""
    lossless = False


class DropsUnverified(Wrong):
    """Drops a token that it has sampled, because its own q is low."""

    def propose(self, s):
        d = super().propose(s)
        n = next((i for i, x in enumerate(d.tokens) if d.q[i, x] < 0.3), len(d.tokens))
        return Draft(d.tokens[:n], d.q[:n])


class WrongResidual(Wrong):
    def settle(self, score, i):
        return score.p[i]


class JudgedByQ(Wrong, METHODS['ecsv']):
    """Judges the fused token as if it had been drawn from the branches' q."""

    def draft(self, session, n):
        d = super().draft(session, n)
        return replace(d, q=probs(d.logits)) if d.tokens else d
