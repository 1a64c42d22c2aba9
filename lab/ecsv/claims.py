"""ECSV: the claims on votes, and tables of all settings.

Length is draft tokens kept a target pass; spot checks are passes. At temperature 0 every method here writes
the target's own text, so lengths compare where the target reads as many positions a token. `votes.txt` has
all settings, `tuned.txt` those near greedy drafts on more texts.
"""
import math
import re

import numpy
import pandas

from lab.judge import (BEST_SD, array, fastest, grid, held_out, knob, number, over, over_best_sd, overview,
                       settings, winner, without)

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

def length(lines, budget):
    """Tokens kept a pass where `budget` positions are read: lines [..., (kept, passes, positions), depths].

    Blocks of two depths are mixed where no depth reads so many; if all read fewer, those of the most count;
    nan if all read more.
    """
    order = lines[..., 2:, :].argsort(-1)
    lines = numpy.take_along_axis(lines, order, -1)
    deeper = (lines[..., 2, :] <= budget[..., None]).sum(-1).clip(1, lines.shape[-1] - 1)[..., None, None]
    low, high = (numpy.take_along_axis(lines, depth, -1)[..., 0] for depth in (deeper - 1, deeper))
    mixed = (budget - low[..., 2]) / numpy.maximum(high[..., 2] - low[..., 2], 1e-9)
    kept, passes, _ = numpy.moveaxis(low + mixed.clip(0, 1)[..., None] * (high - low), -1, 0)
    return numpy.where(budget < lines[..., 2, 0], math.nan, kept / passes)


def gain(frame, mine, rivals, sd, per='full'):
    """A function of counts of texts that yields numbers of each text, for `held_out` and `longer`.

    They are the positions that the fastest setting of the lines sd reads; then at each depth the kept tokens,
    passes (`per`) and positions of that line of mine, and of the rivals, which is the longest at as many
    positions. All are chosen on the other texts. Lines have the same depths and write the same texts.
    """
    names = sum(sd.values(), [])
    fast, reads = fastest(frame, names), array(frame, 'positions', names)
    each = numpy.arange(len(reads))
    sides = [numpy.moveaxis([[array(frame, column, line) for column in ('kept', per, 'positions')]
                             for line in lines.values()], 2, 0) for lines in (mine, rivals)]

    def parts(counts):
        best = fast(counts)
        budget = numpy.take_along_axis(without(reads, counts), best[..., None], -1)
        yield reads[each, best]
        for lines in sides:                             # [texts, lines, (kept, passes, positions), depths]
            others = without(lines.reshape(len(each), -1), counts).reshape(counts.shape + lines.shape[1:])
            longest = numpy.nan_to_num(length(others, budget)).argmax(-1)
            yield from numpy.moveaxis(lines[each, longest].reshape(*counts.shape, -1), -1, 0)
    return parts


def longer(budget, *sums):
    """The figure of a gain: the length of the best line of mine over the best rival's."""
    lines = numpy.stack(sums, -1).reshape(*numpy.shape(budget), 2, 3, -1)
    return length(lines[..., 0, :, :], budget) / length(lines[..., 1, :, :], budget)


def same_draft(frame, T_d):
    """The gain of a vote over one branch, both of drafts of this temperature."""
    one, votes = (lines_of(frame, 'ecsv', branches=B, draft_temperature=T_d) for B in (1, (2, 4, 8)))
    return gain(frame, votes, one, one)


# ------------------------------------------------------------------------------------------------- the claims

def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    for record, claims in ('votes', on_votes), ('tuned', on_tuned):
        if pair.has(record):
            frame = frame_of(pair, record)
            for text, parts, figure in claims(frame, sd_lines(frame)):
                yield text, held_out(parts, figure, frame.text.nunique())
    if pair.has('tuned'):
        four = [name for name in settings(frame, 'sd', 'ecsv') if knob(name, 'gamma') == 4]
        low, one = ([name for name in four if knob(name, 'branches', 1) == B] for B in (2, 1))
        yield LOW, over(frame, low, one, 'full', 'kept')
    if pair.clock is not None and settings(pair.clock, 'ecsv'):
        yield SPEED, over_best_sd(pair.clock, settings(pair.clock, 'ecsv', 'ecsv-spot'))


def on_votes(frame, sd):
    """Yields (text, parts and figure for `held_out`) of the claims that need all settings."""
    plain = vote_lines(frame, r'ecsv draft_temperature=\S+$')
    spots = lines_of(frame, 'ecsv-spot', spots=(1, 2))
    noisy, mild = same_draft(frame, 1.2), same_draft(frame, 0.3)
    yield WEIGHTS, gain(frame, plain, vote_lines(frame, '.* gamma_r=0'), sd), longer
    yield SPOTS, gain(frame, spots, plain, sd, per='cycles'), longer
    yield SPOT_PASSES, gain(frame, spots, plain, sd), longer
    yield ORACLE, gain(frame, lines_of(frame, 'oracle-top1'), sd, sd), longer
    yield (NOISE, lambda counts: [*noisy(counts), *mild(counts)],
           lambda *sums: longer(*sums[:len(sums) // 2]) / longer(*sums[len(sums) // 2:]))


def on_tuned(frame, sd):
    """The same of the claims on tuned votes over tuned sd."""
    votes, tasks = gain(frame, vote_lines(frame), sd, sd), frame.family.unique()
    family = frame.drop_duplicates('text').family.to_numpy()
    yield LENGTH, votes, longer
    yield (TASKS, lambda counts: (part * (family == task) for part in votes(counts) for task in tasks),
           lambda *sums: sum(longer(*sums[i::len(tasks)]) > 1 for i in range(len(tasks))))


# ----------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame) of the tables without verdicts."""
    for pair in pairs:
        for record, title, made in TABLES:
            if pair.has(record):
                frame = frame_of(pair, record)
                yield f'{title} ({pair.name}, {frame.text.nunique()} texts)', made(pair, frame)


def by_branches(_, frame):
    """A frame of ecsv-lite: a row a draft temperature, a column a number of branches."""
    lines = lines_of(frame, 'ecsv', branches=(1, 2, 4, 8))
    return grid(lines, lambda line: over_greedy(frame, lines[line]), 'draft_temperature', 'branches')


def by_setting(_, frame):
    """A frame of what `by_branches` leaves out: a row a setting."""
    lines = lines_of(frame, 'ecsv', 'ecsv-spot', 'sd-multi', 'oracle-top1')
    shown = lines_of(frame, 'ecsv', branches=(1, 2, 4, 8), a_self=0)
    return pandas.DataFrame([dict(setting=f'`{line}`', length=over_greedy(frame, names))
                             for line, names in lines.items() if line not in shown])


def over_greedy(frame, names):
    """As words: length over greedy sd's in blocks of SHOWN; and at the positions of the fastest greedy sd."""
    total, sd = frame.groupby('setting')[['kept', 'full']].sum(), lines_of(frame, 'sd', gamma=SHOWN)
    length, greedy = total.kept / total.full, {knob(name, 'gamma'): name for name in sum(sd.values(), [])}
    words = ', '.join(number(length[name] / length[greedy[knob(name, 'gamma')]]) for name in names
                      if knob(name, 'gamma') in greedy)
    if frame.second.isna().any():                       # the fastest sd is not known
        return words
    found = gain(frame, {'': names}, sd, sd)(numpy.ones(frame.text.nunique()))
    return f'{words}; {number(longer(*map(sum, found))) or "-"}'


def by_task(pair, frame):
    """A frame, a row a task: the gain of the votes that are the longest on other texts; perplexities."""
    sd, sampled, rows = sd_lines(frame), pair.frame('sampled'), []
    family = frame.drop_duplicates('text').family.to_numpy()
    votes = [*gain(frame, vote_lines(frame), sd, sd)(numpy.ones(len(family)))]
    for task in *frame.family.unique(), '':
        length = longer(*(part[(family == task) | (not task)].sum() for part in votes))
        row = {'task': task or 'all', 'length': length}
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
    ('votes', 'ecsv-lite over greedy `sd`', by_branches),
    ('votes', 'The same of other settings, B = 4 if they do not say', by_setting),
    ('tuned', 'Tuned ecsv-lite over tuned `sd`', by_task),
    ('replayed', 'Replays over greedy `sd`', by_setting),
    ('clock', 'By the clock, each at its fastest depth', by_clock)]
