"""What is measured for VIA-SD: `python -m lab.measure via` stores it, lab/via/claims.py judges it.

The target needs a mask in its calibration.json: python train_mask.py finds one.
"""
import functools
import random
from dataclasses import dataclass, replace

import train_mask
from lab.measure import (MODELS, Pair, Prompt, Record, Setting, answer_row, held_out_rows, named, network,
                         prepared, run_row, sd)
from lab.via.baselines import MiddleSession, ViaMid, sublayers
from model import read_calibration
from specmini import Engine
from verify import Exact, Score, ViaSd, decode, tokens_of

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

@dataclass(frozen=True)
class WithMiddle(Pair):
    """The pair and a model in the middle."""
    middle: str = ''

    def engine(self, **settings):
        engine = super().engine(**settings)
        engine.models['mid'], _, _ = network(self.middle, self.device, self.dtype)

        def session(**fields):
            return MiddleSession(mid=engine.readers['mid'], **fields)
        engine.session = session
        return engine


def weighed_row(settings, pair, prompt):
    """A row of runs whose `steps` count weight bytes: these paths are not timed. memory: of all tensors."""
    runs = {}
    for name, setting in settings.items():
        run = run_row({name: setting}, pair, prompt)['runs'][name]
        run['full'] = sum(run['passes'].get('target/full', {}).values())
        engine = prepared(pair, setting)
        read = engine.weights()
        run['steps'] = 0.0
        for path, counts in run.pop('passes').items():
            run['steps'] += sum(counts.values()) * read[path] / read['target/full']
        tensors = []
        for reader in engine.readers.values():
            tensors += [*reader.model.parameters(), *reader.cache.stores]
        runs[name] = run | dict(memory=sum(tensor.nbytes for tensor in tensors))
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
        middle = WithMiddle(pair.target, pair.draft, middle=str(MODELS / role))
        row['runs'] |= weighed_row({role: Setting(ViaMid)}, middle, prompt)['runs']
    return row


def drafting_row(pair, prompt):
    """A target without a draft model, which drafts for itself on its slim path."""
    settings = {'plain': named('ar'), 'self 2': sd(2)}
    return weighed_row(settings, replace(pair, draft='self'), prompt)


def slim_row(pair, prompt):
    """Sums over drafted blocks after the target's own text: agreement of draft and slim with it, Delta.

    Slim reads after what the full path wrote, so its lag is 0 here. Delta is towards the target itself.
    """
    engine = prepared(pair, sd(GAMMA))
    engine.open([prompt.ids])
    text = tokens_of(decode(engine.start(prompt.ids, ViaSd()), Exact(GAMMA)))
    session = engine.start(prompt.ids, ViaSd())
    sums = dict(positions=0, draft_right=0, slim_right=0, delta=0.0)
    for i in range(0, len(text), GAMMA):
        session.tokens = prompt.ids + text[:i]
        draft = Exact().guess(session, min(GAMMA, len(text) - i))
        paths = session.target.model.full, session.slim_path
        p, s = [Score(session, draft, path).logits[:-1].log_softmax(-1) for path in paths]
        q = draft.logits.log_softmax(-1)
        sums['positions'] += len(q)
        best = p.argmax(-1)
        sums['draft_right'] += int((q.argmax(-1) == best).sum())
        sums['slim_right'] += int((s.argmax(-1) == best).sum())
        sums['delta'] += float(train_mask.shortcut(p, q, s, alpha=0.5, beta=0.5, delta=1).sum())
    return prompt.name | sums


def unseen_texts(pair, n):
    """Prompts that the search for the target's mask did not have."""
    asked = read_calibration(pair.target)['mask'].get('settings', {})
    searched = []
    if asked.get('prompts'):
        rows = train_mask.calibration_rows(train_mask.Settings(prompts=asked['prompts']))
        searched = [row['prompt'] for row in rows[:2 * asked['texts']]]         # some were passed over
    return [prompt for prompt in texts(pair, n) if prompt.row['prompt'] not in searched]


def unseen_row(pair, prompt):
    """R of the mask found, of evenly spaced layers and of all blocks, on the target's first WINDOW tokens."""
    engine = prepared(pair, sd(GAMMA))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, ViaSd())
    text = tokens_of(decode(session, Exact(GAMMA)))[:WINDOW]
    model = session.target.model
    scored = train_mask.Windows(model, [prompt.ids + text], len(text))
    found = session.calibration['mask']['skip']
    plain = train_mask.plain_masks(model.config.num_hidden_layers - 2, len(found) // 2)
    evenly, *blocks = [scored.cost(sublayers(i + 1 for i in mask)) for mask in plain]
    return prompt.name | dict(scored=len(text), found=scored.cost(found), evenly=evenly, blocks=blocks)


RECORDS = dict(
    usual=Record(texts, functools.partial(run_row, USUAL)),
    tuned=Record(few_texts, functools.partial(run_row, tuned_settings())),
    answers=Record(lambda pair, n: texts(pair, 5 * n),
                   functools.partial(answer_row, dict(plain=named('ar'), via=named('via')))),
    slim=Record(texts, slim_row),
    masks=Record(few_texts, mask_row, only='models of several sizes'),
    unseen=Record(unseen_texts, unseen_row, drafts=False),
    drafting=Record(texts, drafting_row, drafts=False))
