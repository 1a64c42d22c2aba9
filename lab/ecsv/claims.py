"""ECSV: the claims on votes, and tables of all settings.

Length is draft tokens kept a target pass; spot checks are passes. At temperature 0 every method here writes
the target's own text, so lengths compare where the target reads as many positions a token. `votes.txt` has
all settings, `tuned.txt` those near greedy drafts on more texts.
"""
import functools
import math
import re
from dataclasses import replace

import numpy
import pandas

from lab.judge import (BEST_SD, estimate, fastest, knob, number, over, overview, plain_sd, settings, sums,
                       winner)

SOURCE = 'a proposal that a model wrote, without code or experiments'
SD_1 = '`sd`, the best depth and draft temperature'
CLAIMS = {              # text: whose, rival, line
    'ecsv-lite: length over sd': (
        '"ECSV-lite > SD-1 in acceptance length by 5–15% with equal budget"', SD_1, 1.05),
    'ecsv: tasks with more length': ('"(ii) acceptance length over SD-1 on ≥2 datasets"', SD_1, 2),
    'weights: length over a vote without': (
        '"If Vote-unif matches ECSV"; line: ours', '`gamma_r=0`', 1.005),
    'spot checks: kept a cycle over none': (
        '"ECSV-spot adds further 2–5% acceptance gains with R=1–2"', '`ecsv`', 1.02),
    'spot checks: kept a target pass over none': ('ours', '`ecsv`', 1.02),
    'B = 2, blocks of 4: length over sd': (
        '"improvements vanish under low B"; line: ours', '`sd gamma=4`, the best draft temperature', 1.005),
    'gain over sd of the same draft, T_d 1.2 over 0.3': (
        '"Gains increase with noisier drafters (quantized or higher temperature)"', 'the gain at T_d 0.3', 1),
    'the best of four branches: length over sd': ('ours', SD_1, 1.05),
    'ecsv: speed over sd': ('ours', BEST_SD, 1.05)}
LENGTH, TASKS, WEIGHTS, SPOTS, SPOT_PASSES, LOW, NOISE, ORACLE, SPEED = CLAIMS
SHOWN = 2, 4, 8, 12     # depths in the tables


# ----------------------------------------------------------------------------------------- lines of settings

def frame_of(pair, record):
    """A frame of a list's rows; of the best of four branches the winner's passes alone count."""
    frame = pair.frame(record).copy()
    oracle = frame.setting.str.startswith('oracle')
    frame.loc[oracle, 'full'] = frame.cycles
    frame.loc[oracle, 'positions'] = frame.drafted + frame.cycles
    return frame


def lines_of(frame, *methods, **knobs):
    """{a setting without its depth: its settings} of methods; knobs: the number of each, or one of many."""
    found = {}
    for name in settings(frame, *methods):
        if all(knob(name, key) in numpy.ravel(value) for key, value in knobs.items()):
            found.setdefault(re.sub(r' gamma=\d+', '', name), []).append(name)
    return found


def sd_lines(frame):
    """Lines of SD-1, of the votes' depths: greedy drafts, and sampled ones, a vote of one branch.

    The depths are the same, because between two depths a line is a mixture, which is shorter.
    """
    depths = [knob(name, 'gamma') for name in settings(frame, 'ecsv')]
    return lines_of(frame, 'sd', gamma=depths) | lines_of(frame, 'ecsv', branches=1)


def vote_lines(frame, rule='ecsv'):
    """Lines of votes of two branches or more that match a regular expression from their beginning."""
    lines = lines_of(frame, 'ecsv', 'ecsv-spot')
    return {line: lines[line] for line in lines if knob(line, 'branches') != 1 and re.match(rule, line)}


# ----------------------------------------------------------------------------------- lengths at equal budgets

def gain(frame, mine, rivals, sd, per='full'):
    """A function of texts: what the best of my lines keeps a pass over the best rival, at equal positions.

    Both read as many target positions a token as the fastest setting of the lines sd. Blocks of two depths
    are mixed where no depth reads so many; if all read fewer, those of the most count; nan if all read more.
    The function's second argument, by default the same texts, are those on which settings are chosen.
    """
    made, took, read = (sums(frame, of, sum(sd.values(), [])) for of in ('tokens', 'second', 'positions'))
    sides = [[[sums(frame, of, names) for of in ('kept', per, 'positions', 'tokens')]
              for names in lines.values()] for lines in (mine, rivals)]

    def length(line, texts, budget):
        kept, passes, positions, tokens = (of(texts) for of in line)
        reads = positions / tokens
        order = reads.argsort()
        sums_at = [numpy.interp(budget, reads[order], of[order], left=math.nan) for of in (kept, passes)]
        return sums_at[0] / sums_at[1]

    def ratio(texts, seen=None):
        seen = texts if seen is None else seen
        fast = (made(seen) / took(seen)).round(9).argmax()
        budget, chosen_at = (read(part)[fast] / made(part)[fast] for part in (texts, seen))
        best, rival = (max(lines, key=lambda one: numpy.nan_to_num(length(one, seen, chosen_at)))
                       for lines in sides)
        return length(best, texts, budget) / length(rival, texts, budget)
    return ratio


def tasks_longer(frame):
    """A function of texts: in how many tasks the vote that is the longest on all texts is longer than sd."""
    sd, tasks = sd_lines(frame), [texts_of(frame, task) for task in frame.family.unique()]
    longer = gain(frame, vote_lines(frame), sd, sd)

    def count(texts):
        parts = [texts[numpy.isin(texts, task)] for task in tasks]
        return sum(longer(part, texts) > 1 for part in parts if len(part))
    return count


def same_draft(frame, T_d):
    """A function of texts: the gain of a vote over one branch, both of drafts of this temperature."""
    one, votes = (lines_of(frame, 'ecsv', branches=B, draft_temperature=T_d) for B in (1, (2, 4, 8)))
    return gain(frame, votes, one, one)


def texts_of(frame, task=''):
    """The numbers of the texts of a task, or of all."""
    family = frame.drop_duplicates('text').family
    return numpy.flatnonzero(family == task) if task else numpy.arange(len(family))


# ------------------------------------------------------------------------------------------------- the claims

def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    for record, figures_of in ('votes', on_votes), ('tuned', on_tuned):
        if pair.has(record):
            frame = frame_of(pair, record)
            for text, of in figures_of(frame, sd_lines(frame)):
                yield text, estimate(functools.partial(numpy.apply_along_axis, of, -1), frame.text.nunique())
    mine = [] if pair.clock is None else settings(pair.clock, 'ecsv', 'ecsv-spot')
    if mine:
        blind = 'one setting of ecsv' if len(mine) < 2 else ''
        yield SPEED, replace(over(pair.clock, mine, plain_sd(pair.clock)), blind=blind)


def on_votes(frame, sd):
    """Yields (text, function of texts) of the claims that need all settings."""
    plain = vote_lines(frame, r'ecsv draft_temperature=\S+$')
    spots = lines_of(frame, 'ecsv-spot', spots=(1, 2))
    noisy, mild = same_draft(frame, 1.2), same_draft(frame, 0.3)
    yield WEIGHTS, gain(frame, plain, vote_lines(frame, '.* gamma_r=0'), sd)
    yield SPOTS, gain(frame, spots, plain, sd, per='cycles')
    yield SPOT_PASSES, gain(frame, spots, plain, sd)
    yield ORACLE, gain(frame, lines_of(frame, 'oracle-top1'), sd, sd)
    yield NOISE, lambda texts: noisy(texts) / mild(texts)


def on_tuned(frame, sd):
    """The same of the claims on tuned votes over tuned sd."""
    fours = [name for name in settings(frame, 'sd', 'ecsv') if knob(name, 'gamma') == 4]
    best, rival = (fastest(frame, [name for name in fours if knob(name, 'branches', 1) == B],
                           unit='full', what='kept') for B in (2, 1))
    yield LENGTH, gain(frame, vote_lines(frame), sd, sd)
    yield TASKS, tasks_longer(frame)
    yield LOW, lambda texts: best(texts) / rival(texts)


# ----------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame) of the tables without verdicts."""
    for pair in pairs:
        for record, title, made in TABLES:
            if pair.has(record):
                frame = frame_of(pair, record)
                yield f'{title} ({pair.name}, {frame.text.nunique()} texts)', made(pair, frame)


def by_depth(_, frame):
    """A frame of greedy sd: draft tokens kept a pass, target positions a token, a column a depth."""
    names = settings(frame, 'sd')
    total = frame.groupby('setting')[['kept', 'full', 'positions', 'tokens']].sum().loc[names]
    total.index = [f'{knob(name, "gamma"):g}' for name in names]
    rows = {'kept a pass': total.kept / total.full, 'positions a token': total.positions / total.tokens}
    return pandas.DataFrame(rows).T.reset_index(names='gamma')


def by_branches(_, frame):
    """A frame of ecsv-lite: a row a draft temperature, a column a number of branches."""
    return crossed(frame, lines_of(frame, 'ecsv', branches=(1, 2, 4, 8)), 'T_d',
                   lambda line: (f'{knob(line, "draft_temperature"):g}', f'B = {knob(line, "branches"):g}'))


def by_setting(_, frame):
    """A frame of what `by_branches` leaves out: a row a setting, a column a draft temperature."""
    lines = lines_of(frame, 'ecsv', 'ecsv-spot', 'sd-multi', 'oracle-top1')
    shown = lines_of(frame, 'ecsv', branches=(1, 2, 4, 8), a_self=0)
    return crossed(frame, {line: lines[line] for line in lines if line not in shown}, 'setting',
                   lambda line: (f'`{re.sub(" draft_temperature=[0-9.]+", "", line)}`',
                                 f'T_d = {knob(line, "draft_temperature"):g}'))


def crossed(frame, lines, first, cell):
    """A frame of lines, each at the row and column that `cell` gives it."""
    rows = {}
    for line, names in lines.items():
        row, column = cell(line)
        rows.setdefault(row, {first: row})[column] = over_greedy(frame, names)
    return pandas.DataFrame(rows.values())


def over_greedy(frame, names):
    """As words: length over greedy sd's in blocks of SHOWN; and at tuned sd's positions over its."""
    total, sd = frame.groupby('setting')[['kept', 'full']].sum(), sd_lines(frame)
    length, greedy = total.kept / total.full, {knob(name, 'gamma'): name for name in settings(frame, 'sd')}
    words = ', '.join(number(length[name] / length[greedy[knob(name, 'gamma')]])
                      for name in names if knob(name, 'gamma') in SHOWN)
    if frame.second.isna().any():                       # the fastest sd is not known
        return words
    return f'{words}; {number(gain(frame, {"": names}, sd, sd)(texts_of(frame))) or "-"}'


def by_task(pair, frame):
    """A frame, a row a task: the gain of the vote that is the longest on all texts; perplexities of texts."""
    sd, sampled, rows = sd_lines(frame), pair.frame('sampled'), []
    longer = gain(frame, vote_lines(frame), sd, sd)
    for task in *frame.family.unique(), '':
        row = {'task': task or 'all', 'length': longer(texts_of(frame, task), texts_of(frame))}
        for of, T in (frame, '0'), (sampled, '0.8'):
            for method in 'sd', 'ecsv':
                mine = of[of.setting.isin(settings(of, method)) & (of.family.eq(task) | (not task))]
                perplexity = math.exp(mine.nats.sum() / mine.tokens.sum())
                row[f'perplexity, T = {T}: {method}'] = f'{perplexity:.3f}'
        rows.append(row)
    return pandas.DataFrame(rows)


def by_clock(_, frame):
    """The overview of the fastest depth of each line."""
    lines = lines_of(frame, *(name.partition(' ')[0] for name in frame.setting.unique()))
    return overview(frame[frame.setting.isin([winner(frame, names) for names in lines.values()])])


TABLES = [              # record, title, function of the pair and the record's frame
    ('votes', 'Greedy `sd`', by_depth),
    ('votes', 'ecsv-lite over greedy `sd`', by_branches),
    ('votes', 'The same of other settings, B = 4 if they do not say', by_setting),
    ('tuned', 'Tuned ecsv-lite over tuned `sd`', by_task),
    ('replayed', 'Replays over greedy `sd`', by_setting),
    ('clock', 'By the clock, each at its fastest depth', by_clock)]
