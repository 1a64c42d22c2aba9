"""All methods on the same texts: our claims on which is the fastest, and the tables that other papers read.

`clock.txt` and `sampled.txt` list the settings; other papers' claims of speeds on real models are judged on
these rows, too. Right answers of GSM8K are a record of their own, without a verdict.
"""
import pandas

from lab.judge import BEST_SD, mean, over, overview, plain_sd, settings

SOURCE = 'ours'
EXACT = 'sd', 'payoff', 'product', 'hf-confidence', 'ecsv'      # methods that write the target's text
FASTEST = {             # agreement: claim; of all settings but those of `sd` without look-ups
    1.0: 'the fastest exact setting', 0.99: 'the fastest at 99 % agreement',
    0.95: 'the fastest at 95 % agreement'}
LOOK_UP = 'look up first'
PLAIN_SD = '`sd` at its best gamma, over plain decoding'
EIGHT = '`sd`: its draft in 8 bits over one in 16'
SELF = '`sd`: the target in 8 bits as its draft, over plain decoding'
BLOCK = 'block verification, sampled: tokens a pass over `sd`'
BLIND = 'the answers cannot tell the draft alone from the target, see best'   # why there is no verdict
CLAIMS = {
    FASTEST[1.0]: ('ours', BEST_SD, 1.25),
    FASTEST[0.99]: ('ours', BEST_SD, 1.5),
    FASTEST[0.95]: ('ours', BEST_SD, 1.5),
    LOOK_UP: ('ours', '`sd` by the draft model alone, at the same gammas', 1.05),
    PLAIN_SD: ('ours', 'plain decoding', 1.5),
    EIGHT: ('ours', 'the same draft in 16 bits, at the same gammas', 1.1),
    SELF: ('ours', 'plain decoding', 1.3),
    BLOCK: ('Sun et al. 2024: 5 to 8 % more', '`sd`, the same gammas and seeds', 1.05)}


def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    if pair.has('block'):
        both = together(pair.frame('block'), lambda name: name.partition(' ')[0])
        yield BLOCK, over(both, 'block', 'sd', unit='full')
    frame = pair.frame('clock')
    if frame is None:
        return
    sd = settings(frame, 'sd')
    look_up = [name for name in sd if 'lookup=true' in name]
    others = [name for name in frame.setting.unique() if name in look_up or name not in ('ar', *sd)]
    for level, text in FASTEST.items():
        names = settings(frame[frame.setting.isin(others)], *EXACT) if level == 1 else others
        yield text, over(frame, names, plain_sd(frame), least=level)
    yield LOOK_UP, over(frame, look_up, [name.removesuffix(' lookup=true') for name in look_up])
    for record, by in ('clock', ''), ('vnni', 'AVX-512 and VNNI: '):
        if pair.has(record):
            yield from of_drafts(pair.frame(record), by)


def of_drafts(frame, by):
    """Yields the same of `sd`: its draft in 8 bits, in 16, the target itself."""
    yield PLAIN_SD, over(frame, plain_sd(frame), 'ar', by=by)
    by_itself, sixteen = ([name for name in settings(frame, 'sd') if word in name]
                          for word in ('draft=self', 'draft_bits=16'))
    if sixteen:
        eight = [name.removesuffix(' draft_bits=16') for name in sixteen]
        both = together(frame[frame.setting.isin(eight + sixteen)], lambda name: 8 + 8 * (name in sixteen))
        yield EIGHT, over(both, [8], [16], by=by)
    if by_itself:
        yield SELF, over(frame, by_itself, 'ar', by=by)


def together(frame, kind):
    """A frame of the sums of a text over all settings of a kind, a function of them and then the setting."""
    kinds = frame.setting.map(kind).rename('setting')
    columns = ['tokens', 'agreed', 'full', 'second']
    return frame.groupby(['text', kinds], sort=False)[columns].sum().reset_index()


def by_family(frame):
    """A function of a setting: the families in which it is slowest and fastest over plain decoding."""
    total = frame.groupby(['family', 'setting'], sort=False)[['tokens', 'second']].sum()
    pace = (total.tokens / total.second).unstack('setting')

    def words(name):
        speeds = pace[name] / pace['ar']
        return f'{speeds.idxmin()} {speeds.min():.2f}, {speeds.idxmax()} {speeds.max():.2f}'
    return words


def answered(pair):
    """A frame of right answers, 1 or 0, a row a question, a column a setting; nan where none was given."""
    rows = pandas.DataFrame(pair.rows('answers', 'best'), columns=['family', 'place', 'setting', 'right'])
    table = rows.pivot(index=['family', 'place'], columns='setting', values='right')
    return table[rows.setting.unique()]


def less_ar(table, setting, **more):
    """The Estimate of right answers less plain decoding's; no verdict if the draft alone may be as good."""
    alone = mean(table['the draft alone'] - table['ar'])
    return mean(table[setting] - table['ar'], of='questions', blind=BLIND * (alone.high >= 0), **more)


def answers(pairs):
    """A frame of right answers on GSM8K, each less the target's own; the draft alone is a row, too."""
    lines = []
    for pair in pairs:
        table, rows = answered(pair), pandas.DataFrame(pair.rows('answers', 'best'))
        for name, right in table.items():
            mine = rows[rows.setting == name]
            lines.append({
                'pair': pair.name, 'setting': name, 'right': f'{right.sum():g} of {right.count()}',
                'less those of ar': '' if name == 'ar' else str(less_ar(table, name)),
                'tokens an answer': mine.tokens.mean(), 'cut': (mine.end == 'length').mean()})
    return pandas.DataFrame(lines)


def tables(pairs):
    """Yields (title, frame): each pair's settings by the clock, sampled, right answers."""
    for record, plain, title in (('clock', 'ar', ''), ('vnni', 'ar', ', AVX-512 and VNNI'),
                                 ('sampled', 'ar temperature=0.8', ', temperature 0.8')):
        for pair in pairs:
            frame = pair.frame(record)
            if frame is not None:
                further = {'by family': by_family(frame)} if record == 'clock' else {}
                yield f'{pair.name}{title}: {frame.text.nunique()} texts', overview(frame, plain, **further)
    yield 'Right answers on GSM8K, at most 512 tokens', answers(pairs)
