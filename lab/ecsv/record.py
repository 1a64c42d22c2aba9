"""What ECSV's claims rest on: `python -m lab.measure ecsv` stores it, lab/ecsv/claims.py judges it.

At temperature 0 every method here writes the target's own text, so its cycles and passes tell its speed.
"""
import itertools
from collections import Counter
from functools import partial

from lab.ecsv.baselines import EcsvPrefix, Hedge, OracleTop1, TiesByTarget
from lab.measure import SEED, Record, Setting, prepared
from verify import Ecsv, EcsvSpot, Exact, decode, token_logps

FAMILIES = 'math', 'table', 'story', 'qa', 'translate', 'summary'       # tasks of short prompts
DEPTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24   # tokens of a block; on another pair the first six
FEW_DEPTHS = 2, 4, 6, 8, 10, 12         # of the falsification test
GREEDY = 'sd, greedy draft'
SD = 'sd, sampled draft'                # the proposal's SD-1

BLOCKS = {              # Settings whose method takes a depth
    GREEDY: Setting(partial(Exact, draft_temperature=0)),
    SD: Setting(partial(Ecsv, branches=1)),
    'ecsv-lite': Setting(partial(Ecsv, a_self=0)),
    'ecsv': Setting(Ecsv),
    'unweighted': Setting(partial(Ecsv, gamma_r=0)),
    'prefix': Setting(EcsvPrefix),
    'best of four': Setting(OracleTop1),
    'ecsv-soft': Setting(partial(Ecsv, soft=0.5)),
    'ecsv-lite, B = 2': Setting(partial(Ecsv, a_self=0, branches=2)),
    'ecsv-lite, B = 8': Setting(partial(Ecsv, a_self=0, branches=8))}
HEDGES = {GREEDY: BLOCKS[GREEDY], 'hedge': Setting(Hedge)}
MATCHED = {             # of the falsification test
    **{name: BLOCKS[name] for name in (GREEDY, SD, 'ecsv-lite', 'ecsv', 'unweighted')},
    'ecsv, B = 2': Setting(partial(Ecsv, branches=2)),
    **{f'spot, R = {R}, by {by}': Setting(partial(EcsvSpot, spots=R, by=by))
       for by in ('disagreement', 'entropy') for R in (1, 2, 4)},
    'unweighted, ties by the target': Setting(partial(TiesByTarget, gamma_r=0, spots=4))}
PREFIX = {name: BLOCKS[name] for name in (SD, 'prefix')}
HELD_OUT = {            # of which the default of a_spot was chosen, on texts of another seed
    f'a_spot {a:g}': Setting(partial(EcsvSpot, a_spot=a)) for a in (0.25, 0.5, 1, 2)}


def counts(pair, prompt, setting, depth):
    """What the text of a setting came to, with blocks of this depth.

    tokens written; kept, drafted: draft tokens; nats: -log p of these by the target, each after those before
    it; positions, passes: the target's; drafts: draft passes, whatever their rows. Of the best of four
    branches the passes over the others count nothing.
    """
    method = setting.method(depth)
    engine = prepared(pair, setting)
    engine.open([prompt.ids])
    totals = Counter()
    accept = method.accept

    def noting(session, draft, score):
        totals['nats'] -= float(token_logps(score.logits[:len(draft.tokens)], draft.tokens).sum())
        return accept(session, draft, score)
    method.accept = noting
    for cycle in decode(engine.start(prompt.ids, method), method):
        drafts, _ = cycle.passes.get('draft/full', (0, 0))
        passes, positions = cycle.passes['target/full']
        if isinstance(method, OracleTop1):
            passes, positions = 1, len(cycle.drafted) + 1
        totals.update(tokens=len(cycle.tokens), kept=cycle.accepted, drafted=len(cycle.drafted), cycles=1,
                      positions=positions, passes=passes, drafts=drafts)
    return totals


def block_row(pair, prompt, settings, depths=DEPTHS, **more):
    """A row {family, place, tokens, depths, votes: {name: {count: a number a depth}}} of one prompt."""
    depths = depths if pair.is_embedded else depths[:6]
    votes = {name: {} for name in settings}
    for name, depth in itertools.product(settings, depths):
        totals = counts(pair, prompt, settings[name], depth)
        tokens = totals.pop('tokens')
        for count, value in totals.items():
            votes[name].setdefault(count, []).append(value)
    return prompt.name | more | dict(tokens=tokens, depths=depths, votes=votes)


def on_some(part, settings, seed=SEED, only='', **more):
    """The Record of one prompt in `part`, because every vote writes every text at every depth."""
    return Record(lambda pair, n: pair.texts(FAMILIES, max(2, n // part), seed),
                  partial(block_row, settings=settings, **more), only=only)


RECORDS = dict(
    blocks=on_some(5, BLOCKS),
    hedged=on_some(5, HEDGES),
    matched=on_some(4, MATCHED, depths=FEW_DEPTHS, only='cheap passes'),
    matched_prefix=on_some(4, PREFIX, depths=FEW_DEPTHS, only='cheap passes'),
    held_out=on_some(8, HELD_OUT, SEED + 1, depths=(4, 8), only='tasks', texts_of=f'seed {SEED + 1}'))
