"""What is measured for VIA-SD: `python -m lab.measure via` stores it, lab/via/claims.py judges it.

The target needs a mask in its calibration.json: python train_mask.py finds one.
"""
import functools
import math
import random
from dataclasses import dataclass, replace

import torch

import train_mask
from lab import read_bytes
from lab.measure import (MODELS, Pair, Prompt, Record, Setting, SharingEngine, answer_row, held_out_rows,
                         named, network, prepared, run_row, sd)
from lab.via.baselines import ViaMid, sublayers
from specmini import Engine
from verify import Exact, ViaSd, decode, tokens_of, violation

GAMMA = ViaSd.gamma
FAMILIES = dict(math={}, table=dict(high=20, columns=(1, 4)), code={}, story={}, qa={}, translate={},
                summary={})
USUAL = dict(plain=named('ar'), sd=sd(GAMMA), via=named('via'), bare=named('via', slim_bonus=False))
GAMMAS = GAMMA, 16                              # among which each rule is given its best; 28 brings no more
THRESHOLDS = (0.1, 0.1), (0.3, 0.0), (0.3, 0.1), (0.5, 0.3), (0.8, 0.6)     # keep, escalate
LAMS = {'cascade': (0.02, 0.05, 0.1, 0.3), 'cascade-opt': (0.02, 0.05, 0.1, 0.3),
        'cascade-tokenv3': (0.3, 0.5, 0.7, 0.9)}        # the last is lenient sd
FEW = 8                                         # prompts of a family where many settings write each text
WINDOW = 32                                     # tokens that a mask's cost is of, as train_mask.py has it
FREE, FOUND = 8, 4                              # layers that a mask may skip, and that the one found skips


def texts(pair, n):
    """n prompts of each family; of the lab's tables short ones."""
    if not pair.is_embedded:
        return pair.texts((), n)
    found = []
    for family, knobs in FAMILIES.items():
        for place, row in enumerate(held_out_rows(family, n, **knobs)):
            found.append(Prompt(family, place, row, pair.encode(row['prompt'])))
    return found


def few_texts(pair, n):
    """Fewer of the embedded pair, where many settings write each."""
    return texts(pair, min(n, FEW) if pair.is_embedded else n)


def tuned_settings():
    """{name: Setting} of sd, via and the cascades, each with the same lengths of blocks."""
    found = {}
    for gamma in GAMMAS:
        found[f'sd {gamma}'] = sd(gamma)
        for keep, escalate in THRESHOLDS:
            knobs = dict(gamma=gamma, keep=keep, escalate=escalate)
            found[f'via {gamma}, {keep:g} {escalate:g}'] = named('via', **knobs)
        for rule, lams in LAMS.items():
            for lam in lams:
                found[f'{rule} {gamma}, {lam:g}'] = named(rule, gamma=gamma, lam=lam)
    return found


# ------------------------------------------------------------------------- masks, middle models, --draft self

class MiddleEngine(SharingEngine):
    """An Engine with a third model, whose Reader is `mid` of its Sessions."""

    def start(self, ids, method, row=0):
        session = super().start(ids, method, row)
        session.mid = self.readers['mid']
        session.mid.read(ids[:-1], session.mid.model.full, 0)
        return session


@dataclass(frozen=True)
class WithMiddle(Pair):
    """The pair and a model in the middle."""
    middle: str = ''

    def engine(self, kind=MiddleEngine):
        engine = super().engine(kind)
        engine.models['mid'], _, _ = network(self.middle, self.device, self.dtype)
        return engine


def weighed_row(settings, pair, prompt):
    """A row of runs whose `steps` count weight bytes: these paths are not timed. memory: of all tensors."""
    runs = {}
    for name, setting in settings.items():
        run = run_row({name: setting}, pair, prompt)['runs'][name]
        run['full'] = sum(run['passes'].get('target/full', {}).values())
        engine = prepared(pair, setting)
        read = {}                                       # {reader/path: bytes}
        tensors = []
        for role, reader in engine.readers.items():
            for path, *_ in reader.log:
                read[f'{role}/{path.name}'] = read_bytes(reader.model, path)
            tensors += [*reader.model.parameters(), *reader.cache.stores]
        passes = run.pop('passes').items()
        steps = sum(sum(counts.values()) * read[path] / read['target/full'] for path, counts in passes)
        runs[name] = run | dict(steps=steps, memory=sum(tensor.nbytes for tensor in tensors))
    return prompt.name | dict(runs=runs)


@functools.cache
def plain_layers(size):
    """The contiguous layers of the embedded target that cost least on its calibration texts, as a text."""
    engine = Engine(str(MODELS / 'target'), 'none')
    texts = train_mask.calibration_texts(engine, train_mask.Settings())
    windows = train_mask.Windows(engine.models['target'], texts, WINDOW)
    _, *blocks = train_mask.plain_masks(FREE, size)
    return layers_of(min(blocks, key=lambda block: windows.cost(sublayers(i + 1 for i in block))))


def layers_of(mask):
    """A mask as via-layers takes it; its unit 0 is layer 1, because the first layer always stays."""
    return ' '.join(str(i + 1) for i in sorted(mask))


def mask_row(pair, prompt):
    """via with the mask found, other layers, and other models in the middle."""
    by_lot = random.Random(prompt.place).sample(range(FREE), FOUND)
    settings = dict(found=named('via'), random=named('via-layers', layers=layers_of(by_lot)))
    for size in range(1, FREE + 1):
        settings[f'skip {size}'] = named('via-layers', layers=plain_layers(size))
    row = weighed_row(settings, pair, prompt)
    for role in ('mid', 'up'):                          # of its own, the upscaled drafter
        middle = WithMiddle(**vars(pair), middle=str(MODELS / role))
        row['runs'] |= weighed_row({role: Setting(ViaMid)}, middle, prompt)['runs']
    return row


def drafting_row(pair, prompt):
    """A target without a draft model, which drafts for itself on its slim path."""
    settings = {'plain': named('ar'), 'self 2': sd(2)}
    return weighed_row(settings, replace(pair, draft='self'), prompt)


def worth_row(pair, prompt):
    """How slim and the draft agree with the target on its first WINDOW tokens, which slim reads in one pass.

    draft_right, slim_right: at how many the first choice is the target's; delta, strict: sums of Delta at
    (1/2, 1/2) and (0, 1), to the target and, as delta_pi and strict_pi, to pi at 0.9.
    """
    engine = prepared(pair, sd(GAMMA))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, ViaSd())
    text = tokens_of(decode(session, Exact(GAMMA)))[:WINDOW]
    ids = prompt.ids + text[:-1]                        # whose last rows predict the text
    windows = train_mask.Windows(session.target.model, [ids], len(text))
    p, s = *windows.p, *windows.logps(session.slim_path)
    (q,) = train_mask.Windows(session.drafter.model, [ids], len(text)).p
    right = [int((p.argmax(-1) == one.argmax(-1)).sum()) for one in (q, s)]
    row = dict(positions=len(text), draft_right=right[0], slim_right=right[1])
    for end, delta in (('', 1.0), ('_pi', 0.9)):
        for name, *forgiven in (('delta', 0.5, 0.5), ('strict', 0.0, 1.0)):
            row[name + end] = float(shortcut(p, q, s, *forgiven, delta).sum())
    return prompt.name | row


def shortcut(p, q, s, alpha, beta, delta=1.0):
    """Delta(s | pi) [n] in nats: how much shorter the way from q to pi = (1 - delta) q + delta p is by s.

    p, q, s: log-probabilities [n, V]. alpha, beta: see violation; at 1/2 they forgive any delta up to 1/2.
    Source: VIA-SD (2026), Delta_KL; its p and q are our q and p.
    """
    R = functools.partial(violation, alpha=alpha, beta=beta)
    pi = torch.logaddexp(q + torch.tensor(1 - delta).log(), p + math.log(delta))
    return R(pi, q) - R(s, q) - R(pi, s)


RECORDS = dict(
    usual=Record(texts, functools.partial(run_row, USUAL)),
    tuned=Record(few_texts, functools.partial(run_row, tuned_settings())),
    answers=Record(lambda pair, n: texts(pair, 5 * n),
                   functools.partial(answer_row, dict(plain=named('ar'), via=named('via')))),
    worth=Record(texts, worth_row),
    masks=Record(few_texts, mask_row, only='models of several sizes'),
    drafting=Record(texts, drafting_row, drafts=False))
