"""The claims about sparse verification, from the rows that record.py stores, and a table of its sweeps."""
import numpy

from lab.judge import CLOCK, UNITS, Claim, PageTable, Runs, gap, number, over, ratio
from lab.sparse.record import LOOK_UP

KEYS, LATEST = 'keys 25 %', 'latest keys 25 %'
CHANNELS = 'channels 40 %'
ALL = f'{KEYS}, 3 experts, {CHANNELS}'
HYBRID, HARD = 'keys 25 %, channels 40 %', 'keys 10 %, channels 40 %'
LOOKED_UP = 'look-up 4'


# ----------------------------------------------------------------------------------------------------- claims

def column(runs, figure, name):
    """A setting's figure of each text."""
    return runs.sums[figure][:, runs.number[name]]


def less(runs, figure, name, other):
    """A setting's figure less another's, of each text; nan where one of them did not run."""
    return column(runs, figure, name) - column(runs, figure, other)


def cycles(runs, name):
    """The figure: a setting's tokens a cycle over those of dense passes."""
    def figure(texts):
        return runs.share('tokens', 'cycles', name, texts) / runs.share('tokens', 'cycles', 'dense', texts)
    return figure


def claims(records):
    """Yields every Claim that the records of a pair allow."""
    if 'long' in records and records['long'].rows:      # a short context has none
        yield from long_claims(records.runs('long'))
    if 'tasks' in records:
        yield from task_claims(Runs(records['tasks'].rows))
    if 'mixture' in records:
        runs = Runs(records['mixture'].rows)
        every = range(runs.size)
        yield Claim('mixture, all three: tokens a cycle over dense', 'paper', 0.95, every, cycles(runs, ALL))
        yield Claim('an expert of four skipped by the median: perplexity kept', 'paper', 0.98, every,
                    gap(numpy.exp(less(runs, 'nll', 'dense', '3 experts'))))
    if 'passes' in records:
        runs = Runs(records['passes'].rows)
        at_8k = [i for i in range(runs.size) if runs.families[i].startswith('8192')]
        if at_8k:
            faster = ratio(column(runs, 'pass', 'dense'), column(runs, 'pass', 'sparse'))
            yield Claim('16 bits: one pass after 8k tokens over dense', 'paper: 2 to 3x', 2, at_8k, faster,
                        CLOCK)


def long_claims(runs):
    """Of long contexts: a quarter of the keys beside dense, and beside the latest keys alone."""
    every = range(runs.size)
    at_8k = [i for i in every if runs.families[i].endswith('8192')]
    look_ups = [i for i in every if runs.families[i].startswith(LOOK_UP)]
    if 'pass' in runs.sums and at_8k:
        faster = ratio(column(runs, 'pass', 'dense'), column(runs, 'pass', KEYS))
        yield Claim('one pass after 8k tokens over dense', 'paper: 2 to 3x', 2, at_8k, faster, CLOCK)
    yield Claim('long: same choice as dense', 'paper', 0.95, every, gap(column(runs, 'alike', KEYS)))
    yield Claim('long: same choice less the latest keys', 'ours', 0, every,
                gap(less(runs, 'alike', KEYS, LATEST)))
    if look_ups and column(runs, 'right', 'dense')[look_ups].any():     # else nothing can be lost
        yield Claim('look-up: right less dense', 'paper', -0.01, look_ups,
                    gap(less(runs, 'right', KEYS, 'dense')))
        yield Claim('look-up: right less the latest keys', 'ours', 0.02, look_ups,
                    gap(less(runs, 'right', KEYS, LATEST)))
    yield Claim('long: tokens a cycle over dense', 'paper', 0.95, every, cycles(runs, KEYS))
    kind = runs.kind
    yield Claim('long: end to end over sd', 'ours', 1, every, over(runs, KEYS, 'dense', kind), kind)


def task_claims(runs):
    """Of the lab's tasks: which layers choose, channels, the hybrid."""
    every = range(runs.size)
    yield Claim('KL: random layers less calibrated anchors', 'paper', 0, every,
                gap(less(runs, 'kl', 'random layers', KEYS)))
    yield Claim('math: tokens a cycle over dense', 'paper', 0.95, numpy.flatnonzero(runs.families == 'math'),
                cycles(runs, KEYS))


# ----------------------------------------------------------------------------------------------------- sweeps

BUDGETS = 'keys 50 %', KEYS, 'keys 10 %'
BLOCKS = KEYS, 'blocks of 8', 'blocks of 16', 'blocks of 32', 'blocks of 64', 'blocks of 128'
LAYERS = KEYS, 'random layers', 'every second layer'
STORIES = 'anchors of stories'
QUEST = [f'quest, {blocks}' for blocks in ('blocks of 4', *BLOCKS[1:])]
LOOK_UPS = 'quest, blocks of 16', 'blocks of 4', 'quest, blocks of 4'
EXPERTS = '3 experts', '2 experts', '1 experts'
SIZES = [f'L0 {l0}, blocks of {block}' for l0 in (128, 2048) for block in (16, 64, 128, 256)]
MIXED = 'dense', KEYS, CHANNELS, '3 experts', f'{KEYS}, 3 experts', ALL
SWEEPS = [      # what, record, part of the families' names, figure, settings
    ("profile: the target's share of sd's passes", 'tasks', '', 'verifying', ['dense']),
    ('one pass over dense, 2k tokens', 'long', ' 2048', 'faster', [KEYS]),
    ('one pass over dense, 4k', 'long', ' 4096', 'faster', [KEYS]),
    ('one pass over dense, matrices in 16 bits: 8k', 'passes', '8192', 'faster', ['sparse']),
    ('the same, 4k', 'passes', '4096', 'faster', ['sparse']),
    ('the same, 2k', 'passes', '2048', 'faster', ['sparse']),
    ('same first choice, 8k: chosen, latest keys', 'long', ' 8192', 'alike', [KEYS, LATEST]),
    ('same first choice, 8k: blocks of 16, 64, 128, 256; with L0 2048', 'piecewise', '', 'alike', SIZES),
    ('tokens a cycle, 8k: dense; the same', 'piecewise', '', 'efficiency', ['dense', *SIZES]),
    ('look-up, right: dense, chosen, latest keys', 'long', LOOK_UP, 'right', ['dense', KEYS, LATEST]),
    ('look-up, right: Quest; in blocks of 4: chosen, Quest', 'long', LOOK_UP, 'right', LOOK_UPS),
    ('speed over look-up 4: plain, `--draft self`', 'drafts', '', 'speed', ['plain', 'self 2']),
    ('tables, right: dense, 50, 25, 10 % of keys', 'tasks', 'table', 'right', ['dense', *BUDGETS]),
    ('tables, tokens a cycle: the same', 'tasks', 'table', 'efficiency', ['dense', *BUDGETS]),
    ('tables, right: 25 %, blocks of 4, 8, ... 128', 'tasks', 'table', 'right', BLOCKS),
    ('tables, right: the same by bounds (Quest)', 'tasks', 'table', 'right', QUEST),
    ("tables: the root's share of later rows' blocks; paper: 0.8", 'tasks', 'table', 'overlap', [KEYS]),
    ('math, KL: calibrated, random, every second layer', 'tasks', 'math', 'kl', LAYERS),
    ('tables, same choice: anchors of tables, stories', 'tasks', 'table', 'alike', [HYBRID, STORIES]),
    ('reasoning, right: dense, 10 % of keys, hybrid', 'tasks', 'math', 'right', ['dense', 'keys 10 %', HARD]),
    ('same choice: 40 % of channels', 'tasks', '', 'alike', [CHANNELS]),
    ('perplexity: 3, 2, 1 of 4 experts', 'mixture', '', 'perplexity', EXPERTS),
    ('right: dense; keys, channels, 3 experts; keys and experts, all', 'mixture', '', 'right', MIXED),
    ('KL: the same', 'mixture', '', 'kl', MIXED),
    ('tokens a cycle: the same', 'mixture', '', 'efficiency', MIXED),
    ('one pass over dense: the same', 'mixture', '', 'faster', MIXED),
    ('tokens a second over dense: the same', 'mixture', '', 'speed', MIXED)]


def sweeps(pairs):
    """The PageTable of SWEEPS: means over texts, without verdicts."""
    lines = [[what] for what, *_ in SWEEPS]
    for records in pairs.values():
        runs = {name: with_ratios(stored.rows) for name, stored in records.items()}
        for line, (_, record, part, figure, settings) in zip(lines, SWEEPS):
            line.append(means(runs.get(record), part, figure, settings))
    return PageTable(('sweep, ablation or next check', *pairs), lines)


def with_ratios(rows):
    """The Runs of a record, with figures that are ratios: efficiency, speed, faster, perplexity."""
    runs = Runs(rows)
    sums = runs.sums
    if 'tokens' in sums:
        sums['efficiency'] = sums['tokens'] / sums['cycles']
    if UNITS[runs.kind] in sums:
        pace = sums['tokens'] / sums[UNITS[runs.kind]]
        rival = LOOKED_UP if LOOKED_UP in runs.number else 'dense'
        sums['speed'] = pace / pace[:, runs.number[rival]][:, None]
    if 'pass' in sums:
        sums['faster'] = column(runs, 'pass', 'dense')[:, None] / sums['pass']
    if 'nll' in sums:
        sums['perplexity'] = numpy.exp(sums['nll'] - column(runs, 'nll', 'dense')[:, None])
    return runs


def means(runs, part, figure, settings):
    """The means of a figure over texts, one for each setting, as a cell; None if it was not measured."""
    texts = [i for i, family in enumerate(runs.families) if part in family] if runs else []
    if not texts or figure not in runs.sums or not runs.number.keys() >= set(settings):
        return None
    return ', '.join(number(gap(column(runs, figure, name))(texts)) for name in settings)
