"""VIA-SD: what `python -m lab.measure via` stores beside its lists of settings, and the claims it must show.

The target needs a mask in its calibration.json: python train_mask.py finds one.
"""
import pandas

import train_mask
from lab.best.claims import answered, less_ar
from lab.judge import (BEST_SD, PLAIN, array, gap, held_out, knob, over, over_best_sd, overview,
                       plain_sd, settings, share, winner)
from lab.measure import Record, started
from verify import Exact, ViaSd, decode, tokens_of

SOURCE = 'notes on the paper'
FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
WINDOW = 32                                     # tokens of a text that both judges read
AGREES = 0.99           # agreement that both sides need where lossy settings are rivals
RANDOM = [f'layers={layers}' for layers in ('0 2 6 9', '6 7 8 9', '4 5 7 9')]   # drawn with seed 0
CLAIMS = {              # text: whose, rival, line
    'speed over plain': (
        'notes: "reaching 2.5–3× acceleration relative to non-speculative decoding"', PLAIN, 2.5),
    'speed over sd': ('ours, of the notes\' table: 2.32 where `sd` has 1.55', BEST_SD, 1.5),
    'speed over strong baselines': (
        'notes: "additional 10–20% speedup over strong speculative decoding baselines"',
        'the fastest of `sd`, `cascade`, `ratio`; 99 % agreement on both sides', 1.1),
    'the same, if slim judges alone (escalate=0)': ('ours', 'as above', 1.1),
    'speed over random layers': (
        'ours, of the notes\' table: 2.32 where "Random Layer Skipping" has 1.62',
        'three draws of 4 layers, taken together', 1.43),
    'speed over a model of its own': (
        'ours, of the notes\' table: 2.32 where "Independent 13B Intermediate" has 2.08',
        '`via-model`: the middle judge is `mid`', 1.11),
    "sd's rejection rate less via's": (
        'notes: "reducing rejection rates by 0.10–0.22"', '`sd`, the same gammas', 0.1),
    "slim's agreement with the target, less the draft's": ('ours', 'the draft', 0.01),
    'right answers won or lost, a text': ('notes: "without losing accuracy"; the line is ours', PLAIN, -0.01),
    '`cascade-drafting`: speed over sd': ("ours, of the notes' table: 1.71 over 1.55", BEST_SD, 1.1)}


def judges_rows(pair, prompt):
    """[How many first choices of the draft, of slim are the target's, at its first WINDOW tokens]."""
    session = started(pair, 'sd', prompt)
    text = tokens_of(decode(session, Exact()))[:WINDOW]
    ids = prompt.ids + text[:-1]                        # whose last rows predict the text
    windows = train_mask.Windows(session.target.model, [ids], len(text))
    slim = windows.logps(session.slim_path)[0]
    q = train_mask.Windows(session.drafter.model, [ids], len(text)).p[0]
    draft_right, slim_right = (int((windows.p[0].argmax(-1) == one.argmax(-1)).sum()) for one in (q, slim))
    return [prompt.name | dict(positions=len(text), draft_right=draft_right, slim_right=slim_right)]


RECORDS = dict(judges=Record(lambda pair, n: pair.texts(FAMILIES, n), judges_rows, 20))


# ------------------------------------------------------------------------------------- what it must show

def middle(setting):
    """The knobs of a setting after its gamma, as `layers=3 4`: which middle judge it has."""
    return setting.partition('gamma=')[2].partition(' ')[2]


def spared(frame):
    """The Estimate of sd's rejection rate less via's, at the gammas that both methods have."""
    gammas = [name[3:] for name in settings(frame, 'via') if f'sd{name[3:]}' in plain_sd(frame)]
    columns = [array(frame, column, [method + gamma for gamma in gammas]).sum(1)
               for method in ('via', 'sd') for column in ('kept', 'judged')]

    def less(kept, judged, sd_kept, sd_judged):
        return kept / judged - sd_kept / sd_judged
    return held_out(lambda counts: columns, less, len(columns[0]), 'BCa',
                    ceiling=1 - columns[2].sum() / columns[3].sum())


def better_judge(rows):
    """The Estimate of slim's agreement less the draft's."""
    return share([row['slim_right'] - row['draft_right'] for row in rows], [row['positions'] for row in rows])


def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    frame = pair.clock
    if frame is not None and settings(frame, 'via'):
        names, sd = settings(frame, 'via', 'via-layers'), plain_sd(frame)
        alone = [name for name in names if knob(name, 'escalate', ViaSd.escalate) == 0]
        via = [name for name in names if name not in alone]
        highest = max(pair.ceiling(int(knob(name, 'gamma')), judge='target/slim') for name in names)
        yield 'speed over plain', over(frame, via, 'ar', ceiling=highest)
        yield 'speed over sd', over_best_sd(frame, via)
        yield "sd's rejection rate less via's", spared(frame)
        rivals = sd + settings(frame, 'cascade', 'ratio')
        if alone:
            yield 'speed over strong baselines', over(frame, via, rivals, least=AGREES)
            yield 'the same, if slim judges alone (escalate=0)', over(frame, alone, rivals, least=AGREES)
    if pair.has('middle'):
        frame = pair.frame('middle')
        via, drawn = settings(frame, 'via'), frame[frame.setting.map(middle).isin(RANDOM)]
        drawn = drawn.assign(setting=drawn.setting.str.extract('(gamma=.)')[0])
        drawn = drawn.groupby(['text', 'setting'], sort=False).sum(numeric_only=True).reset_index()
        yield 'speed over random layers', over(pandas.concat([frame, drawn]), via, [*drawn.setting.unique()])
        yield 'speed over a model of its own', over(frame, via, settings(frame, 'via-model'))
    if pair.has('judges'):
        yield "slim's agreement with the target, less the draft's", better_judge(pair.rows('judges'))
    answers = answered(pair)
    if pair.has('right'):
        yield 'right answers won or lost, a text', gap(pair.frame('right'), 'via', 'ar')
    elif 'via gamma=4' in answers:
        yield 'right answers won or lost, a text', less_ar(answers, 'via gamma=4')
    if pair.has('drafting'):
        frame = pair.frame('drafting')
        yield '`cascade-drafting`: speed over sd', over_best_sd(frame, settings(frame, 'cascade-drafting'))


# ------------------------------------------------------------------------------------- without verdicts

def of_each_method(pair):
    """An overview of the fastest setting of each method, and of via's with other knobs changed."""
    frame = pair.frame('clock')
    kinds = [plain_sd(frame)] + [settings(frame, one) for one in ('via', 'via-layers', 'cascade', 'ratio')]
    names = ['ar', *(winner(frame, kind) for kind in kinds)]
    names += [name for name in settings(frame, 'via') if '_' in name or name == 'via gamma=8']
    total = frame.groupby('setting')[['kept', 'judged']].sum()
    refused = (1 - total.kept / total.judged).dropna().map('{:.1%}'.format)
    return overview(frame[frame.setting.isin(names)], rejected=refused.get)


def with_passes(pair, record):
    """An overview of a record, and how often the target reads."""
    frame = pair.frame(record)
    total = frame.groupby('setting')[['full', 'cycles']].sum()
    return overview(frame, **{'full passes a cycle': (total.full / total.cycles).get})


def tables(pairs):
    """Yields (title, frame): methods at their best, gates, middle judges."""
    for pair in pairs:
        if pair.has('clock'):
            yield f'{pair.name}: the fastest of each method', of_each_method(pair)
        for record, title in (('gates', 'gates'), ('middle', f'middle judges; random: {", ".join(RANDOM)}'),
                              ('self', 'slim drafts'), ('drafting', 'slim drafts, and is drafted for')):
            if pair.has(record):
                yield f'{pair.name}: {title}', with_passes(pair, record)
