"""Sparse verification: the claims that its rows must show, and tables. What is measured: records.py."""
import re

import numpy
import pandas

from lab.judge import array, estimate, gap, number, over, settings, share, winner
from lab.sparse.records import RECORDS      # noqa: F401, of lab.measure
from lab.sparse.records import BY_LOT, CHOSEN, EXPERTS, LATEST, LOOK_UP, QUARTER, SHORT, keys_read

SOURCE = 'notes on the paper'
TENTH = f'sparse rho=0.1 {SHORT}'
NAMED = 'math', 'summary', 'qa'     # the kinds of tasks that the notes name
STABLE = 'notes: "stable performance across summarization, QA, and mathematical reasoning tasks"; line ours'
LOSS = 'notes: "minimal accuracy loss across multiple tasks"; line ours'
LENGTH = 'notes: "minimal impact on acceptance length"; line ours'
CLAIMS = {              # text: whose, rival, line; drafts are of the draft model, with SmolLM2 looked up
    'long contexts, rho 0.25: same first choice, share of tokens': (LOSS, 'dense', 0.95),
    'long contexts, rho 0.25: the same, less that of the latest keys': (
        'ours', 'as many of the latest keys', 0.01),
    'look-ups, rho 0.25: right answers, less dense': (LOSS, 'dense', -0.01),
    'long contexts, rho 0.25: tokens a pass, over dense': (LENGTH, 'dense', 0.95),
    'math, summaries, questions, rho 0.1 (L0 0, blocks of 4): right answers, less dense': (
        STABLE, 'dense', -0.01),
    'math, summaries, questions, rho 0.1 (L0 0, blocks of 4): tokens a pass, over dense': (
        LENGTH, 'dense', 0.95),
    'short tasks, rho 0.25: KL a token with layers by lot, less calibrated anchors': (
        'notes: "inter-layer retrieval reuse"; line ours', 'anchors as calibrated', 0),
    'mixture, an expert of four skipped by the median: perplexity of the corpus, dense over sparse': (
        'notes: "adaptive expert skipping"; line ours', 'dense', 0.98),
    'one pass after 8k keys: speed': ('notes: "2-3x speedup in verification stage"', 'dense', 2),
    'whole texts: speed over `sd` (embedded: the mixture on math, both at their best; SmolLM2: `long`)': (
        'ours', '`sd`, dense', 1)}


def figures(pair):
    """Yields (text of a claim, Estimate) of what the records of a pair allow."""
    same, latest, look_up_right, long_length, right, length, lot, experts, faster, whole = CLAIMS
    if pair.rows('long'):
        frame = pair.frame('long')
        texts = one_text(frame)
        alike, latest_alike = array(texts, 'alike', [CHOSEN, LATEST]).T
        read = array(texts, 'read', [CHOSEN])[:, 0]
        yield same, share(alike, read)
        yield latest, share(alike - latest_alike, read)
        look_ups = frame[frame.family.str.startswith(LOOK_UP)]
        if look_ups[look_ups.setting == 'sd'].right.any():          # else nothing can be lost
            yield look_up_right, gap(look_ups, CHOSEN, 'sd')
        yield long_length, over(texts, CHOSEN, 'sd', unit='cycles')
        at_8k = frame[frame.family.str.endswith(' 8192')]
        if len(at_8k):
            dense, sparse = array(at_8k, 'pass', ['sd', CHOSEN]).T
            yield faster, share(dense, sparse, unit='clock')
            yield whole, over(texts, CHOSEN, 'sd')
    if pair.has('tasks'):
        frame = pair.frame('tasks')
        frame = frame[frame.family.isin(NAMED)]
        yield right, gap(frame, TENTH, 'sd')
        yield length, over(frame, TENTH, 'sd', unit='cycles')
    if pair.has('reading'):
        frame = pair.frame('reading')
        by_lot, calibrated_kl = array(frame, 'kl', [BY_LOT, QUARTER]).T
        yield lot, share(by_lot - calibrated_kl, array(frame, 'read', [QUARTER])[:, 0])
    if pair.has('experts'):
        yield experts, perplexity(pair.frame('experts'), EXPERTS[1])
    if pair.has('mixture'):
        frame = pair.frame('mixture')
        yield whole, over(frame, settings(frame, 'sparse'), settings(frame, 'sd'))


def one_text(frame):
    """Sums over the lengths of a context: a prompt at three lengths is one text."""
    prompt = frame.family.str.rpartition(' ')[0] + ' ' + frame.place.astype(str)
    frame = frame.assign(text=prompt, agreed=frame.agreed.astype(float))
    return frame.groupby(['text', 'setting'], sort=False).sum(numeric_only=True).reset_index()


def perplexity(frame, setting):
    """The Estimate of the corpus's perplexity, dense over sparse."""
    dense, sparse = array(frame, 'nll', ['sd', setting]).T
    read = array(frame, 'read', ['sd'])[:, 0]
    return estimate(lambda texts: numpy.exp((dense - sparse)[texts].sum(-1) / read[texts].sum(-1)), len(read))


# --------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame) without verdicts."""
    for pair in pairs:
        for records, title, made in TABLES:
            if all(pair.rows(record) for record in records):
                n = ', '.join(f'{record} n {pair.frame(record).text.nunique()}' for record in records)
                yield f'{title} ({pair.name}, {n})', made(pair)
    yield 'Long contexts', pandas.DataFrame([row for pair in pairs for row in by_length(pair)])


def ratio(frame, setting, part, whole):
    mine = frame[frame.setting == setting]
    return mine[part].sum() / mine[whole].sum()


def rights(frame, setting, families):
    """The shares of right answers of each family, in one cell."""
    mine = frame[frame.setting == setting]
    return ', '.join(f'{mine[mine.family == family].right.mean():.0%}' for family in families)


def look_ups(pair):
    """A row a setting."""
    frame = pair.frame('look-ups')
    return pandas.DataFrame([
        {'setting': f'`{name}`', 'right': rights(frame, name, ['table-long']),
         'keys read of 1,000': f'{keys_read(name, 1000) / 1000:.0%}'} for name in frame.setting.unique()])


def short_tasks(pair):
    """What settings write, from the list, and what they read, from the record: one row each."""
    runs, reads, rows = pair.frame('tasks'), pair.frame('reading'), []
    families = [*reads.family.unique()]
    for setting in dict.fromkeys([*runs.setting[runs.setting != 'ar'], *reads.setting]):
        row = dict(setting=f'`{setting}`')
        row['keys read of 20, 50, 250'] = ', '.join(f'{keys_read(setting, n) / n:.0%}' for n in (20, 50, 250))
        if setting in runs.setting.values:
            row['right: math, table, summary, qa'] = rights(runs, setting, ('math', 'table', 'summary', 'qa'))
            row['tokens a pass: math'] = ratio(runs[runs.family == 'math'], setting, 'tokens', 'cycles')
            row['all'] = ratio(runs, setting, 'tokens', 'cycles')
        if setting in reads.setting.values:
            row[f'same choice: {", ".join(families)}'] = ', '.join(
                number(ratio(reads[reads.family == family], setting, 'alike', 'read')) for family in families)
            row['KL a token'] = ratio(reads, setting, 'kl', 'read')
        rows.append(row)
    return pandas.DataFrame(rows)


def mixture(pair):
    """Speed, answers and perplexity by what is left out; `sd` and the hybrid also at their best gamma."""
    runs, reads, rows = pair.frame('mixture'), pair.frame('experts'), []
    best = [winner(runs, settings(runs, method)) for method in ('sd', 'sparse')]
    usual = [setting for setting in runs.setting.unique() if 'gamma=4' in setting]
    for setting in dict.fromkeys([*best, *usual]):
        row = dict(setting=f'`{setting}`' + ' (fastest)' * (setting in best))
        row['over plain decoding, clock'] = over(runs, setting, 'ar').spread
        row['tokens a pass'] = ratio(runs, setting, 'tokens', 'cycles')
        row['right'] = rights(runs, setting, ['math'])
        read = re.sub(' gamma=.', '', setting)
        if read in reads.setting.values:
            row['perplexity over dense'] = 1 / perplexity(reads, read).figure
            row['same choice'] = ratio(reads, read, 'alike', 'read')
        rows.append(row)
    return pandas.DataFrame(rows)


def by_length(pair):
    """Yields a row for each length: what is read, first choices, tokens a pass, and times of passes."""
    frame = pair.frame('long') if pair.rows('long') else pandas.DataFrame(dict(family=[]))
    for length in sorted({int(family.rpartition(' ')[2]) for family in frame.family}):
        mine = frame[frame.family.str.endswith(f' {length}')]
        row = dict(pair=pair.name, tokens=str(length), contexts=str(sum(mine.setting == 'sd')))
        row['keys read'] = f'{ratio(mine, CHOSEN, "keys", "cached"):.0%}'
        for name, setting in (('chosen', CHOSEN), ('latest', LATEST)):
            row[f'same choice, {name}'] = ratio(mine, setting, 'alike', 'read')
        for name, setting in (('dense', 'sd'), ('chosen', CHOSEN)):
            row[f'tokens a pass, {name}'] = ratio(mine, setting, 'tokens', 'cycles')
        dense, sparse = array(mine, 'pass', ['sd', CHOSEN]).T
        row['pass, dense over sparse'] = dense.sum() / sparse.sum()
        yield row


TABLES = [              # records, title, function of the pair
    (['look-ups'], 'Look-ups in long tables', look_ups), (['tasks', 'reading'], 'Short tasks', short_tasks),
    (['mixture', 'experts'], 'The mixture on math', mixture)]
