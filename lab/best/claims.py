"""Which composition is the fastest at an agreement with the target, judged by stored runs."""
from collections import Counter
from dataclasses import replace

import numpy

from lab.best.record import lossless
from lab.judge import CLOCK, MODELLED, Claim, PageTable, Records, Runs, interval, over, tuned_over

LEVELS = {1.0: 1.25, 0.99: 1.5, 0.95: 1.5}      # agreement: the speed over tuned sd that is aimed at

COMPARED = {            # claims of other pages: setting by the clock, setting by counts of passes, rival
    'default (lossy) over plain decoding': ('cmasd', 'cmasd', 'ar'),
    'default over tuned exact sd': ('cmasd', 'cmasd', 'sd'),
    'default window over the best fixed gamma': ('cmasd, strict', None, 'sd'),
    'product over the best fixed gamma': ('product', 'product', 'sd'),
    'payoff over the best fixed gamma': (None, 'payoff', 'sd'),
    'over plain decoding': ('via', 'via, without 4', 'ar'),
    'over `sd`': ('via', 'via, without 4', 'sd'),
    'ecsv-lite over sd with a greedy draft': ('ecsv-lite', 'ecsv-lite', 'sd'),
    'the vote by prefix over sd with a greedy draft': ('ecsv-prefix', None, 'sd'),
    'hedge over sd with a greedy draft': ('hedge', None, 'sd')}
REPLAYED = range(1, 17)     # gammas of plain sd whose passes follow from where its guesses are right


def by_clock(claim, pair):
    """The Claim, by the clock where the pair was run here; `sd` is tuned over its four."""
    runs = Records('best', pair).runs_if('compositions')
    setting, _, rival = COMPARED.get(claim.text, (None, None, None))
    if not setting or not runs:
        return claim
    name = next(name for name in runs.names if name.startswith(setting))
    plain = rival == 'ar'
    figure = over_plain(runs, name) if plain else tuned_over(runs, [name], runs.starting('sd '), CLOCK)
    return replace(claim, texts=numpy.arange(runs.size), figure=figure, kind=CLOCK)


def by_counts(claim, pair, cost, position):
    """The Claim by counts of passes, where the pair has them: each side at its best length for this cost."""
    runs = counted(pair, cost, position)
    _, setting, rival = COMPARED.get(claim.text, (None, None, None))
    if not setting or not runs:
        return claim
    names = at_any_length(runs.names, setting, cost)
    rivals = ['ar'] if rival == 'ar' else runs.starting('sd ')
    if not names:
        return replace(claim, kind='')                  # payoff was not told this cost
    return replace(claim, texts=numpy.arange(runs.size), kind=MODELLED,
                   figure=tuned_over(runs, names, rivals, MODELLED))


def at_any_length(names, method, cost):
    """The settings of a method in the counted runs; of payoff the one that was told this cost."""
    if method == 'payoff':
        method = f'payoff, c {cost:g}'
    return [name for name in names if name == method or name.startswith((f'{method} ', f'{method}, '))]


def counted(pair, cost, position):
    """The Runs of the record `counts` at a cost of a draft pass, with plain decoding and sd; None without."""
    records = Records('best', pair, cost, position)
    if 'counts' not in records or not records['counts'].rows:
        return None
    rows = []
    for row in records['counts'].rows:
        runs = dict(row['runs'], ar=run_of(row['tokens'], {'target/full': {1: row['tokens']}}))
        for gamma in REPLAYED:
            runs[f'sd {gamma}'] = replayed(row['hit'], gamma)
        rows.append(row | dict(runs=runs))
    return Runs(rows, records.costs)


def run_of(tokens, passes):
    """A run of a lossless setting, from its passes {reader/path: {positions: passes}}."""
    return dict(tokens=tokens, wrong=0, passes=passes)


def replayed(hits, gamma):
    """The run of sd with greedy drafts of gamma tokens along a text.

    hits: of each token whether it is the draft's first choice; a guess is kept where all before it are right.
    The last block drafts a token more than a run that ends at its length, not at an end token.
    """
    drafts, targets = Counter(), Counter()
    place = 0
    while place < len(hits):
        n = min(gamma, len(hits) - place)
        kept = 0
        while kept < n and hits[place + kept]:
            kept += 1
        place += kept + 1
        drafts[1] += n
        targets[n + 1] += 1
    return run_of(len(hits), {'draft/full': drafts, 'target/full': targets})


def claims(records):
    """The Claims of one pair's Records."""
    runs = records.runs('compositions')
    for name in lossless(runs.names):                   # a tie in bf16 is no error
        runs.sums['wrong'][:, runs.number[name]] = 0
    everywhere = numpy.arange(runs.size)
    for level, line in LEVELS.items():
        names = lossless(runs.names) if level == 1 else runs.names
        figure = tuned_over(runs, names, runs.starting('sd '), CLOCK, level)
        yield Claim(f'fastest composition at {level:.0%} agreement over tuned sd', 'ours', line, everywhere,
                    figure, CLOCK)
    gamma = next(name for name in runs.names if name.startswith('look up ')).removeprefix('look up ')
    ahead = over(runs, f'look up, else {gamma}', f'sd {gamma}', CLOCK)
    yield Claim('look up first: share of texts on which it beats sd of the same gamma', 'ours', 0.75,
                everywhere, lambda texts: numpy.mean([ahead([i]) > 1 for i in texts]))


def over_plain(runs, name):
    """The figure: a setting's tokens a second over plain decoding's, of all its runs on the same texts."""
    plain = [one for one in runs.names if one.startswith('ar')]

    def figure(texts):
        tokens, seconds = (runs.total(what, plain, texts).sum() for what in ('tokens', 'seconds'))
        return runs.pace(name, texts, CLOCK) * seconds / tokens
    return figure


def by_family(runs, name):
    """The families in which a setting is slowest and fastest over plain decoding, as words."""
    speeds = {}
    for family in dict.fromkeys(runs.families):
        speeds[family] = over_plain(runs, name)(numpy.flatnonzero(runs.families == family))
    slowest, fastest = min(speeds, key=speeds.get), max(speeds, key=speeds.get)
    return f'{slowest} {speeds[slowest]:.2f}, {fastest} {speeds[fastest]:.2f}'


def sweeps(pairs):
    """Of each pair the settings by their speed over plain decoding; sampled, where they were run so."""
    rows = []
    for pair, records in pairs.items():
        runs, sampled = records.runs('compositions'), records.runs_if('sampled')
        texts = numpy.arange(runs.size)
        for name in sorted(runs.names, key=lambda name: -runs.pace(name, texts, CLOCK)):
            if name.startswith('ar'):
                continue
            agreement = 'lossless' if lossless([name]) else f'{runs.agreement(name, texts):.1%}'
            figure = over_plain(runs, name)
            low, high = interval(texts, figure)
            warm = None
            if sampled and name in sampled.names:
                warm = over_plain(sampled, name)(numpy.arange(sampled.size))
            rows.append((pair, name, figure(texts), f'{low:.2f} to {high:.2f}', by_family(runs, name),
                         runs.share('tokens', 'full', name, texts), agreement, warm))
    head = ('pair', 'setting', 'over plain', 'from, to', 'by family', 'tokens a full pass', 'agreement',
            'over plain, T = 0.8')
    return PageTable(head, rows)
