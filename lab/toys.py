"""Models small enough to know all about: random networks, and tables whose text's law can be enumerated.

Whether a method is lossless can be counted out. The law of its texts is
`enumerate_law(Table(1), Table(2), method, 3, temperature=1.0)`, the target's own is
`exact_law(Table(1), 3, temperature=1.0)`: if it is lossless, their `variation` is 0, but for rounding.
lab/prove.py goes further than such beginnings.
"""
from collections import Counter
from dataclasses import replace
from itertools import islice

import torch

import kernels
from model import Config, Path, Reader, Transformer, require_that, to_device
from verify import (METHODS, Session, decode, draft_model, no_draft, probs, read_prompt,
                    tokens_of)

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, max_position_embeddings=64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------- random networks

def network(seed=0, vocab=11, dtype=torch.float64, **sizes):
    """A small random Transformer with large weights, so that a wrong position or norm shows."""
    torch.manual_seed(seed)
    config = Config('llama', vocab, **SIZES | sizes)
    model = Transformer(config).requires_grad_(False)
    for weight in model.parameters():
        mean = 1.0 if weight.ndim == 1 else 0.0         # of a norm, of a matrix
        torch.nn.init.normal_(weight, mean, 0.4)
    model = model.to(dtype)
    model.set_context(64)
    return model


# -------------------------------------------------------------------------------------------------- texts

def fresh(model, line, last=None):
    """Logits [last, V], of all positions by default, by a reader that has read nothing before."""
    reader = Reader(model, len(line))
    return reader.read(line, model.full, last or len(line))


def apart(a, b):
    """The largest difference between two tensors of one shape."""
    assert a.shape == b.shape
    return float((a - b).abs().max())


def session(target, draft, prompt, tokens_left, proposer=draft_model, seed=0, **settings):
    """A Session on a prompt (ids) with caches of its own; draft may be None."""
    capacity = len(prompt) + tokens_left
    readers = [Reader(model, capacity) if model else None for model in (target, draft)]
    return Session(*readers, proposer, list(prompt), tokens_left, generator=seeded(seed), **settings)


def write(s, method, most=None):
    """(tokens written, cycles) of a Session; checks what must hold of any trace. most: cycles, None: all."""
    begin = len(s.tokens)
    read_prompt(s)
    # a copy, because a method serves one text
    cycles = [checked(cycle) for cycle in islice(decode(s, replace(method)), most)]
    require_that(tokens_of(cycles) == s.tokens[begin:], f'accept returned {tokens_of(cycles)}, the text has '
                 f'{s.tokens[begin:]}; expected the same, because decode alone writes the text')
    return s.tokens[begin:], cycles


def checked(cycle):
    """The Cycle; BadInput where the values that its method's `accept` returned contradict each other."""
    drafted = len(cycle.drafted)
    judged = sum(len(row.tokens) for row in cycle.judged)
    require_that(cycle.accepted <= judged <= drafted, f'accept kept {cycle.accepted} guesses and judged '
                 f'{judged} of {drafted}; expected accepted <= judged <= drafted')
    require_that(all(type(token) is int for token in cycle.tokens),
                 f'accept returned the tokens {cycle.tokens}; expected whole numbers')
    for row in cycle.judged:
        known = row.chance is None or 0 <= float(row.chance) <= 1       # a bool or a tensor [] is a number
        require_that(known, f'the chance of a guess to be kept is {row.chance}; expected 0 to 1')
    return cycle


def slim_session(seed=0, tokens_left=24, skip=(2, 3, 4), **settings):
    """A Session of a random pair whose target of four layers has a calibrated mask."""
    target, draft = network(seed, num_hidden_layers=4), network(seed + 10)
    calibration = dict(mask=dict(skip=list(skip)))
    return session(target, draft, [1, 2, 3], tokens_left, calibration=calibration, **settings)


def read_tree(reader, text, candidates):
    """Logits [1 + K, V] after a text (ids), and after it with each of K candidates: one pass, a tree.

    Each candidate is a row of its own, behind what the cache does not hold of the text: so none sees another.
    Tree attention has them in one row, under a mask, and reads the rest of the text once.
    """
    path, cache = reader.model.full, reader.cache
    start = min(cache.valid_prefix(text, path), len(text) - 1)
    cache.record(text[:start], start, path)
    twin = reader.fork(len(candidates))
    rows = to_device([text[start:] + [token] for token in candidates], reader.model.device)  # [K, T + 1]
    logits = twin.feed(rows, start, path, 2)                                        # [K, 2, V]
    for mine, theirs in zip(cache.stores, twin.cache.stores):                       # the text's keys are kept
        mine[:, :, start:len(text)] = theirs[:1, :, start:len(text)]
    cache.record(text, start, path)
    return torch.cat([logits[:1, 0], logits[:, 1]])


def plain(target, prompt, tokens_left, **settings):
    """The tokens that plain decoding writes."""
    alone = session(target, None, prompt, tokens_left, no_draft, **settings)
    tokens, _ = write(alone, METHODS['ar']())
    return tokens


# -------------------------------------------------------------------------------------------- tables and laws

class Table:
    """A language model that is a table: the next-token logits of every prefix are random and known.

    Inside the real Reader and KVCache it keeps the ids it was fed as keys and looks its logits up by what it
    finds there, so a wrong cache gives a wrong law. Slim (no feed-forward) and sparse paths write other keys.
    """

    shape = staticmethod(lambda logits: logits)     # what else is done to random logits, as to let them tie
    seen = slice(None)                              # of a prefix, what counts

    def __init__(self, seed, vocab=4, weight=1.0, dtype=torch.float64, context=64):
        self.seed, self.vocab = seed, vocab
        self.pass_bytes = weight    # that a pass is said to read, for methods that compare passes
        self.rows = {}              # prefix -> logits
        self.config = Config('llama', vocab, 1, 1, 1, 1, 1, 1, context)
        self.cos = torch.zeros(10_000, 1, dtype=dtype)
        self.device, self.dtype = self.cos.device, self.cos.dtype
        self.lm_head = torch.nn.Linear(1, vocab, dtype=torch.float64)
        self.full = Path('full', (kernels.attend,), (kernels.feed_forward,))

    def row(self, prefix):
        """The logits [V] after a prefix, a tuple of ids: those of this dtype, in fp64."""
        prefix = prefix[self.seen]
        if prefix not in self.rows:
            self.rows[prefix] = self.shape(self.raw(prefix)).to(self.dtype).double()
        return self.rows[prefix]

    def raw(self, prefix):
        generator = seeded(hash((self.seed, *prefix)) % 2 ** 40)
        return 1.5 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)

    def __call__(self, ids, positions, path, stores=None, kv_len=None, means=None, carry=None):
        """ids [B, T] at positions [T] -> logits [B, T, V], which stand in for hidden states."""
        if path.observes:                               # Path.grounded: attention is flat over all in view
            flat = torch.zeros(1, 1, kv_len, 1)
            hidden = torch.arange(kv_len) > positions[:, None]                          # [T, kv_len]
            _, added = path.attends[0](flat[:, :, :len(positions)], flat, flat, hidden * -1e9, carry)
            carry.update(added)
        keys = stores[0][:, 0, :, 0]                    # [B, S], in the cache
        mark = 0.5 * (None in path.ffns) + 0.25 * path.sparse       # what these write is no token
        keys[:, positions] = (ids + mark).to(keys)
        logits = [torch.stack([self.row(tuple(line[:place + 1])) for place in positions.tolist()])
                  for line in keys.tolist()]
        return torch.stack(logits).to(self.dtype)

    def logits(self, hidden):
        return hidden


class Near(Table):
    """A draft that is near its target: blocks are kept whole. noise: of its logits; sharp: how sure it is."""

    def __init__(self, seed, target, noise, sharp, context=64):
        super().__init__(seed, target.vocab, 1.0, target.dtype, context)
        self.target, self.noise, self.sharp = target, noise, sharp

    def raw(self, prefix):
        return self.sharp * (self.target.row(prefix) + self.noise * super().raw(prefix))


class Branch:
    """One way that all draws of a text can go; its `draw` replaces a Session's.

    It repeats the draws of its script; after them it takes the first token that is possible and notes what
    else could have been drawn there.
    """

    def __init__(self, script):
        self.script = script    # draws to repeat first, (token, chance) each
        self.taken = []         # draws so far
        self.chance = 1.0       # of all of them together
        self.others = []        # scripts of the branches that leave this one after its script

    def draw(self, p):
        """A token (0-dim) from p [V], or one from each row of p [n, V]."""
        if p.ndim == 2:
            return torch.stack([self.draw(row) for row in p])
        possible = {token: chance for token, chance in enumerate(p.tolist()) if chance}
        if len(self.taken) < len(self.script):
            token, chance = self.script[len(self.taken)]
            require_that(abs(possible.get(token, 0) - chance) < 1e-9, 'the same draws lead to other chances; '
                         'expected no draws that do not go through session.draw, and no memory of texts')
        else:
            (token, chance), *rest = possible.items()
            self.others += [self.taken + [other] for other in rest]
        self.taken.append((token, chance))
        self.chance *= chance
        return torch.tensor(token)


def enumerate_law(target, draft, method, horizon, prompt=(0,), run=write, **settings):
    """{tokens: probability} of all texts that a method can write: each outcome of each draw is followed.

    run: function (session, method) -> (tokens, anything). settings: of `session`.
    """
    found = Counter()
    scripts = [[]]              # of branches to follow yet
    while scripts:
        branch = Branch(scripts.pop())
        s = session(target, draft, prompt, horizon, **settings)
        s.draw = branch.draw
        s.generator = None      # so whoever draws from it does not draw the same numbers in each text
        tokens, _ = run(s, method)
        found[tuple(tokens)] += branch.chance
        scripts += branch.others
    return found


def exact_law(target, horizon, prefix=(), chance=1.0, eos=frozenset(), prompt=(0,), **settings):
    """{tokens: probability} under the target alone, of all that begins with this prefix after the prompt.

    settings: of a session; those that change the target's distribution count.
    """
    if len(prefix) >= horizon or eos.intersection(prefix):
        return Counter({prefix[:horizon]: chance})
    found = Counter()
    sampling = {name: settings[name] for name in ('temperature', 'top_k', 'top_p') if name in settings}
    for token, p in enumerate(probs(target.row((*prompt, *prefix)), **sampling).tolist()):
        if p > 0:
            found.update(exact_law(target, horizon, (*prefix, token), chance * p, eos, prompt, **settings))
    return found


def variation(a, b):
    """Total variation distance of two laws, each of them whole."""
    for law in (a, b):
        total = sum(law.values())
        require_that(abs(total - 1) < 1e-6, f'the chances of its texts sum to {total:.6g}; expected 1 by '
                     'draws of session.draw from distributions that sum to 1')
    texts = a.keys() | b.keys()
    return sum(abs(a[text] - b[text]) for text in texts) / 2
