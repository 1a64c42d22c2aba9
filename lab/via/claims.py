"""VIA-SD: what `python -m lab.measure via` stores beside its lists of settings, and the claims it must show.

The target needs a mask in its calibration.json: python train_mask.py finds one.
"""
from functools import partial

import numpy
import pandas

import train_mask
from lab.best.claims import BLIND, answered
from lab.judge import (BEST_SD, PLAIN, estimate, fastest, gap, grid, knob, mean, number, over, overview,
                       plain_sd, settings, share, sums, winner)
from lab.measure import Record, prepared
from verify import Exact, ViaSd, decode, tokens_of

SOURCE = 'notes on the paper'
FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
WINDOW = 32                                     # tokens of a text that both judges read
AGREES = 0.99           # agreement that both sides need where lossy settings are rivals
RANDOM = [f'layers={layers}' for layers in ('0 2 6 9', '6 7 8 9', '4 5 7 9')]   # drawn with seed 0
CELL = 'times plain decoding; full passes a cycle; agreement'
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
        'the fastest of three draws of 4 layers', 1.43),
    'speed over a model of its own': (
        'ours, of the notes\' table: 2.32 where "Independent 13B Intermediate" has 2.08',
        '`via-model`: the middle judge is `mid`', 1.11),
    "sd's rejection rate less via's": (
        'notes: "reducing rejection rates by 0.10–0.22"', '`sd`, the same gammas', 0.1),
    "slim's agreement with the target, less the draft's": ('ours', 'the draft', 0.01),
    'right answers won or lost, a text': ('notes: "without losing accuracy"; the line is ours', PLAIN, -0.01),
    '`draft-verify`: speed over plain': ('ours', PLAIN, 1)}


def judges_rows(pair, prompt, setting='sd'):
    """[How many first choices of the draft, of slim are the target's, at its first WINDOW tokens].

    setting: who drafts. With draft-verify it is slim, so the two judges are one.
    """
    engine, method = prepared(pair, setting)
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, ViaSd())
    text = tokens_of(decode(session, Exact()))[:WINDOW]
    ids = prompt.ids + text[:-1]                        # whose last rows predict the text
    windows = train_mask.Windows(session.target.model, [ids], len(text))
    slim = windows.logps(session.slim_path)[0]
    q = slim
    if type(method) is Exact:
        q = train_mask.Windows(session.drafter.model, [ids], len(text)).p[0]
    draft_right, slim_right = (int((windows.p[0].argmax(-1) == one.argmax(-1)).sum()) for one in (q, slim))
    return [prompt.name | dict(positions=len(text), draft_right=draft_right, slim_right=slim_right)]


RECORDS = dict(judges=Record(lambda pair, n: pair.texts(FAMILIES, n), judges_rows, 20))


# ------------------------------------------------------------------------------------- what it must show

def clock(pair):
    """The frame of the pair's speeds; None if without via."""
    return pair.clock if pair.clock is not None and settings(pair.clock, 'via') else None


def middle(setting):
    """The knobs of a setting after its gamma, as `layers=3 4`: which middle judge it has."""
    return setting.partition('gamma=')[2].partition(' ')[2]


def even(frame, mine, rivals):
    """The Estimate of some settings over others, both with an agreement of AGREES or more."""
    best, rival = fastest(frame, mine, least=AGREES), fastest(frame, rivals, least=AGREES)
    return estimate(lambda texts: best(texts) / rival(texts), frame.text.nunique(), unit='clock')


def rejected(frame, names):
    """A function of texts: the share of all judged draft tokens that these settings reject."""
    kept, judged = sums(frame, 'kept', names), sums(frame, 'judged', names)
    return lambda texts: 1 - kept(texts).sum(-1) / judged(texts).sum(-1)


def spared(frame):
    """The Estimate of sd's rejection rate less via's, at the gammas that both methods have."""
    gammas = [name[3:] for name in settings(frame, 'via') if f'sd{name[3:]}' in plain_sd(frame)]
    via, sd = (rejected(frame, [method + gamma for gamma in gammas]) for method in ('via', 'sd'))
    n = frame.text.nunique()
    return estimate(lambda texts: sd(texts) - via(texts), n, ceiling=sd(numpy.arange(n)))


def better_judge(rows):
    """The Estimate of slim's agreement less the draft's."""
    return share([row['slim_right'] - row['draft_right'] for row in rows], [row['positions'] for row in rows])


def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    frame = clock(pair)
    if frame is not None:
        names, sd = settings(frame, 'via', 'via-layers'), plain_sd(frame)
        alone = [name for name in names if knob(name, 'escalate', ViaSd.escalate) == 0]
        via = [name for name in names if name not in alone]
        highest = max(pair.ceiling(int(knob(name, 'gamma')), judge='target/slim') for name in names)
        yield 'speed over plain', over(frame, via, 'ar', ceiling=highest)
        yield 'speed over sd', over(frame, via, sd)
        yield "sd's rejection rate less via's", spared(frame)
        rivals = sd + settings(frame, 'cascade', 'ratio')
        if alone:
            yield 'speed over strong baselines', even(frame, via, rivals)
            yield 'the same, if slim judges alone (escalate=0)', even(frame, alone, rivals)
    if pair.has('middle'):
        frame = pair.frame('middle')
        via, layers = settings(frame, 'via'), settings(frame, 'via-layers')
        draws = [name for name in layers if middle(name) in RANDOM]
        yield 'speed over random layers', over(frame, via, draws)
        yield 'speed over a model of its own', over(frame, via, settings(frame, 'via-model'))
    if pair.has('judges'):
        yield "slim's agreement with the target, less the draft's", better_judge(pair.rows('judges'))
    answers = answered(pair)
    if pair.has('right'):
        yield 'right answers won or lost, a text', gap(pair.frame('right'), 'via', 'ar')
    elif 'via gamma=4' in answers:
        lost = answers['via gamma=4'] - answers['ar']
        yield 'right answers won or lost, a text', mean(lost, of='questions', blind=BLIND)
    if pair.has('self'):
        frame = pair.frame('self')
        highest = max(pair.ceiling(gamma, draft='target/slim') for gamma in (1, 2, 3, 4, 6))
        drafted = settings(frame, 'draft-verify')
        yield '`draft-verify`: speed over plain', over(frame, drafted, 'ar', ceiling=highest)


# ------------------------------------------------------------------------------------- without verdicts

def fastest_of_each(pair):
    """An overview of the fastest setting of each method, and of via's with other knobs changed."""
    frame = clock(pair)
    kinds = [plain_sd(frame)] + [settings(frame, one) for one in ('via', 'via-layers', 'cascade', 'ratio')]
    names = ['ar'] + [winner(frame, kind) for kind in kinds if kind]
    names += [name for name in settings(frame, 'via') if '_' in name or name == 'via gamma=8']
    texts = numpy.arange(frame.text.nunique())

    def refused(name):
        return '' if name == 'ar' else f'{rejected(frame, [name])(texts):.1%}'
    found = overview(frame[frame.setting.isin(names)], rejected=refused)
    found.insert(0, 'pair', f'{pair.name}, {len(texts)}')
    return found.drop(columns='kept a cycle')[found.setting != '`ar`']


def cell(frame, name):
    """CELL of a setting."""
    total = frame[frame.setting == name][['full', 'cycles', 'agreed', 'tokens']].sum()
    speed = number(over(frame, name, 'ar').figure)
    return f'{speed}; {total.full / total.cycles:.2f}; {total.agreed / total.tokens:.1%}'


def by_middle(frame):
    """A frame: a row a middle judge, a column a gamma."""
    lines = {}
    for name in settings(frame, 'via', 'via-layers', 'via-model'):
        judge = middle(name) or "the search's: 3 4 5 6"
        line = lines.setdefault(judge, {'middle judge': judge + ' (random)' * (judge in RANDOM)})
        line[f'gamma {knob(name, "gamma"):g}'] = cell(frame, name)
    return pandas.DataFrame(lines.values())


def ceilings(pairs):
    """A frame of pairs: times plain decoding if every guess were kept, the first choices of slim and draft.

    The target of via reads each 16 tokens, or never.
    """
    lines = []
    for pair in pairs:
        rows = pandas.DataFrame(pair.rows('judges'), columns=['positions', 'slim_right', 'draft_right'])
        n, slim, draft = rows.sum()
        if pair.costs:
            lines.append(dict(
                pair=pair.name, sd=pair.ceiling(3), via=pair.ceiling(3, judge='target/slim', every=16),
                never=pair.ceiling(3, judge='target/slim'),
                slim=f'{slim} of {n}' * bool(n), draft=f'{draft} of {n}' * bool(n)))
    return pandas.DataFrame(lines)


def tables(pairs):
    """Yields (title, frame): methods at their best, gates, middle judges, ceilings, first choices."""
    found = [fastest_of_each(pair) for pair in pairs if clock(pair) is not None]
    yield 'The fastest of each method, and the number of texts', pandas.concat(found)
    for pair in pairs:
        gates, judges = pair.frame('gates'), pair.frame('middle')
        if gates is not None:
            shown = grid(gates[gates.setting != 'ar'], partial(cell, gates), 'keep', 'escalate')
            yield f'{pair.name}: gates at gamma 8, {gates.text.nunique()} texts: {CELL}', shown
        if judges is not None:
            yield f'{pair.name}: middle judges, {judges.text.nunique()} texts: {CELL}', by_middle(judges)
    yield "Ceilings with 3 guesses, all kept; the target's first choices by slim and draft", ceilings(pairs)
