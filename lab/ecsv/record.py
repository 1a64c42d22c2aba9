"""What ECSV's claims rest on: `python -m lab.measure ecsv` stores it, lab/ecsv/claims.py judges it.

At temperature 0 every method here writes the target's own text, so its cycles and passes tell its speed.
"""
import itertools
from functools import partial

import torch

from lab.ecsv.baselines import EcsvPrefix, Hedge, OracleTop1, SdMulti
from lab.measure import Record, Setting, prepared, run_row
from verify import Ecsv, EcsvSpot, Exact, decode, tokens_of

FAMILIES = 'math', 'table', 'story', 'qa', 'translate', 'summary'       # tasks of short prompts
DEPTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24   # tokens of a block; on another pair the first six
SAMPLED_DEPTHS = 2, 4, 8                # at temperature 1
GREEDY = 'sd, greedy draft'

BLOCKS = {              # Settings whose method takes a depth
    GREEDY: Setting(partial(Exact, draft_temperature=0)),
    'sd, sampled draft': Setting(partial(Ecsv, branches=1)),
    'ecsv-lite': Setting(partial(Ecsv, a_self=0)),
    'ecsv': Setting(Ecsv),
    'unweighted': Setting(partial(Ecsv, gamma_r=0)),
    'prefix': Setting(EcsvPrefix),
    'prefix, unweighted': Setting(partial(EcsvPrefix, gamma_r=0)),
    'best of four': Setting(OracleTop1)}
CHEAP = {               # asked of the embedded pair alone
    'ecsv-soft': Setting(partial(Ecsv, soft=0.5)),
    'ecsv-lite, B = 2': Setting(partial(Ecsv, a_self=0, branches=2)),
    'ecsv-lite, B = 8': Setting(partial(Ecsv, a_self=0, branches=8))}
FORMER = {              # stored, but measured no more; how they were made: README.md
    'hedge, two tokens': Setting(Hedge),
    'sd, 4-bit sampled draft': BLOCKS['sd, sampled draft'],
    'ecsv, 4-bit draft': BLOCKS['ecsv'],
    'sd, hotter sampled draft': Setting(partial(Ecsv, branches=1, draft_temperature=1.2)),
    'ecsv, hotter draft': Setting(partial(Ecsv, draft_temperature=1.2))}
HEDGES = {GREEDY: BLOCKS[GREEDY], 'hedge': Setting(Hedge)}
ABLATIONS = {
    **{name: BLOCKS[name] for name in (GREEDY, 'ecsv')},
    'spot, R = 1': Setting(partial(EcsvSpot, a_spot=1, spots=1)),
    'spot, R = 2': Setting(partial(EcsvSpot, a_spot=1, spots=2)),
    'spot, R = 4': Setting(partial(EcsvSpot, a_spot=1, spots=4)),
    'entropy alone': Setting(partial(Ecsv, a_agree=0, a_self=0)),
    'agreement alone': Setting(partial(Ecsv, a_entropy=0, a_self=0)),
    'own q alone': Setting(partial(Ecsv, a_entropy=0, a_agree=0))}
SAMPLED = {'sd': Exact, 'sd greedy': partial(Exact, draft_temperature=0), 'ecsv': Ecsv, 'sd-multi': SdMulti}
RUNS = {f'{name} {depth}': Setting(partial(kind, depth), temperature=1.0)
        for name, kind in SAMPLED.items() for depth in SAMPLED_DEPTHS}


def branches_of(name):
    """How many rows a draft pass of a vote has."""
    method = (BLOCKS | CHEAP | FORMER | HEDGES | ABLATIONS)[name].method()
    return getattr(method, 'branches', 1)


def cycles_of(pair, prompt, setting, method):
    """The Cycles of a text that the method writes as the setting says."""
    engine = prepared(pair, setting)
    engine.open([prompt.ids])
    return list(decode(engine.start(prompt.ids, method), method))


def counts(cycles, method):
    """What a text's cycles came to.

    kept: draft tokens; positions, passes: the target's; drafts: draft passes, whatever their rows. Of the
    best of four branches the passes over the others count nothing.
    """
    found = dict(kept=0, cycles=len(cycles), positions=0, passes=0, drafts=0)
    for cycle in cycles:
        drafts, _, _ = cycle.passes.get('draft/full', (0, 0, 0))
        passes, positions, _ = cycle.passes['target/full']
        if isinstance(method, OracleTop1):
            passes, positions = 1, len(cycle.drafted) + 1
        found['kept'] += cycle.accepted
        found['positions'] += positions
        found['passes'] += passes
        found['drafts'] += drafts
    return found


def block_row(pair, prompt, settings, depths=DEPTHS):
    """A row {family, place, tokens, depths, votes: {name: {count: a number a depth}}} of one prompt."""
    if not pair.is_embedded:
        settings = {name: setting for name, setting in settings.items() if name not in CHEAP}
        depths = depths[:6]
    votes = {name: {} for name in settings}
    for name, depth in itertools.product(settings, depths):
        method = settings[name].method(depth)
        cycles = cycles_of(pair, prompt, settings[name], method)
        for count, value in counts(cycles, method).items():
            votes[name].setdefault(count, []).append(value)
    return prompt.name | dict(tokens=len(tokens_of(cycles)), depths=depths, votes=votes)


def errors(pair, prompt):
    """How often the four branches err together, at the tokens that a vote decides: up to its first mistake.

    wrong_together [4, 4]: at how many of these tokens two branches both err, on the diagonal one.
    """
    wrong = []
    for cycle in cycles_of(pair, prompt, BLOCKS['ecsv'], Ecsv(DEPTHS[-1])):
        for verdict, right in zip(cycle.judged, cycle.tokens):
            wrong.append([token != right for token in verdict.signals['branches']])
    wrong = torch.tensor(wrong).double()                                        # [tokens, 4]
    return prompt.name | dict(tokens=len(wrong), wrong_together=(wrong.T @ wrong).int().tolist())


def on_some(part, row, **kind):
    """The Record of a row for one prompt in `part`, because every vote writes every text at every depth."""
    return Record(lambda pair, n: pair.texts(FAMILIES, max(2, n // part)), row, **kind)


RECORDS = dict(
    blocks=on_some(5, partial(block_row, settings=BLOCKS | CHEAP)),
    hedged=on_some(5, partial(block_row, settings=HEDGES)),
    ablations=on_some(4, partial(block_row, settings=ABLATIONS, depths=(4, 8)), only='cheap passes'),
    errors=on_some(4, errors),
    sampled=on_some(3, partial(run_row, RUNS)))
