"""Compositions of all that is here, on the same texts: what `python -m lab.measure best` stores, its claims.

Every method once, each with the same gamma where it has one; plain sd with four. The claims: which
composition is the fastest at an agreement with the target.
"""
from collections import Counter
from dataclasses import dataclass, replace

import numpy

from lab import read_bytes
from lab.baselines import Payoff, Ratio, sublayers
from lab.judge import CLOCK, MODELLED, Claim, PageTable, Records, Runs, interval, over, tuned_over
from lab.measure import Record, Setting, named, network, run_row, sd, token_row
from model import read_calibration
from verify import prompt_lookup, lookup_then_draft

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
GAMMAS = 3, (2, 3, 4, 5)            # of all methods but plain sd; of plain sd
EMBEDDED_GAMMAS = 8, (4, 6, 8, 12)  # where a draft pass is cheap
LOSSY = 'ratio', 'cmasd', 'via', 'cascade', 'specguard', 'lenient'      # settings, by their first word
LOOK_UP = 'look up, else'           # a setting: the look-up comes first, the draft model where it has nothing
COSTS = 0.02, 0.05, 0.1, 0.2, 0.36  # of a draft pass, in target passes, that payoff is told
LENGTHS = 2, 4, 8, 12               # of blocks whose passes are counted
BLOCKS = 4, 8, 12                   # layers in a row that slim leaves out, after the first sixth of all


def lossless(names):
    """Those of the settings that write the target's text."""
    return [name for name in names if not name.startswith(LOSSY) or name == 'cmasd, strict']


@dataclass
class RatioPayoff(Payoff, Ratio):
    """`ratio` whose blocks end as those of `payoff`. LOSSY."""


def every_method(gamma, gammas, layers, calibration):
    """{name: Setting} of what the target is calibrated for; gammas: of plain sd, gamma: of the others."""
    settings = {name: named('ar') for name in ('ar', 'ar, again', 'ar, third')}
    for length in gammas:
        settings[f'sd {length}'] = sd(length)
    settings |= {
        f'look up {gamma}': sd(gamma, prompt_lookup),
        f'{LOOK_UP} {gamma}': sd(gamma, lookup_then_draft),
        'payoff': named('payoff'),
        'product': named('product'),
        'cmasd': named('cmasd'),
        'cmasd, tau 0.5': named('cmasd', tau_base=0.5, gamma_tau=0.0),
        'cmasd, strict': named('cmasd', tau_base=1.0),
        f'ratio 0.5, {gamma}': named('ratio', gamma=gamma),
        'cascade': named('cascade', gamma=gamma),
        'ecsv-prefix': named('ecsv-prefix', gamma=gamma, branches=3),
        'ecsv-lite': named('ecsv', gamma=gamma, branches=3, a_self=0)}
    if 'mask' in calibration:
        settings['via'] = named('via', gamma=gamma)
    for count in BLOCKS:
        if layers // 6 + count < layers:
            settings[f'via, without {count}'] = via_without(count, layers, gamma)
    for k in 1, 4:
        if 'signals' in calibration:
            settings[f'specguard 4, k = {k}'] = named('specguard', k=k, gamma=4, delimiter='sentence')
    return settings


NOT_ELSEWHERE = 'ar, third', 'sd 5', 'cmasd, tau 0.5', 'cascade', 'via, without 12'


def via_without(count, layers, gamma):
    """The Setting of via without the layers left_out."""
    return named('via-layers', gamma=gamma, layers=' '.join(map(str, left_out(count, layers))))


def left_out(count, layers):
    """So many layers in a row, after the first sixth of all."""
    return range(layers // 6, layers // 6 + count)


COMPOSITIONS = {        # Settings of payoff with a second idea, and with a third
    f'{LOOK_UP} payoff': Setting(Payoff, lookup_then_draft),
    'ratio 0.5, payoff': Setting(RatioPayoff),
    f'ratio 0.5, {LOOK_UP} payoff': Setting(RatioPayoff, lookup_then_draft)}


def methods_of(pair):
    """every_method for the models of a pair."""
    model, _, _ = network(pair.target, pair.device, pair.dtype)
    gamma, gammas = EMBEDDED_GAMMAS if pair.is_embedded else GAMMAS
    calibration = read_calibration(pair.target, pair.draft)
    settings = every_method(gamma, gammas, model.config.num_hidden_layers, calibration)
    if not pair.is_embedded:                            # a text takes ten seconds there
        settings = {name: setting for name, setting in settings.items() if name not in NOT_ELSEWHERE}
    return settings


def composition_row(pair, prompt):
    """The runs of every method; of the embedded pair, of the compositions too."""
    more = COMPOSITIONS if pair.is_embedded else {}
    return run_row(methods_of(pair) | more, pair, prompt)


def sampled_row(pair, prompt):
    """The runs at temperature 0.8 of the methods that are lossless, and of two that are not."""
    gamma, gammas = EMBEDDED_GAMMAS if pair.is_embedded else GAMMAS
    settings = methods_of(pair) | dict(lenient=named('lenient', gamma=gamma))
    for length in gammas:
        settings[f'sd {length}'] = named('sd', gamma=length)        # its drafts are sampled too
    settings = {name: setting._replace(temperature=0.8) for name, setting in settings.items()
                if lossless([name]) or name in ('via', 'lenient')}
    return run_row(settings, pair, prompt)


def counted_settings(layers):
    """{name: Setting} of methods at several lengths but sd, of which counted_row tells every length."""
    settings = {'product': named('product')}
    for cost in COSTS:
        settings[f'payoff, c {cost:g}'] = named('payoff', cost=cost)
    for length in LENGTHS:
        settings[f'cmasd {length}'] = named('cmasd', gamma=length)
        settings[f'ratio 0.5, {length}'] = named('ratio', gamma=length)
    for length in LENGTHS[:-1]:
        settings[f'via, without 4, {length}'] = via_without(4, layers, length)
        settings[f'ecsv-lite {length}'] = named('ecsv', gamma=length, a_self=0)
    return settings


def counted_row(pair, prompt):
    """The runs of counted_settings, and of the target's own text where the draft's first choice is its token.

    Without seconds, so a busy machine may record it. slim: the share of the weights that a slim pass reads.
    """
    model, _, _ = network(pair.target, pair.device, pair.dtype)
    layers = model.config.num_hidden_layers
    slim = model.full.without(sublayers(left_out(4, layers)))
    row = run_row(counted_settings(layers), pair, prompt)
    for name, run in row['runs'].items():
        del run['seconds']
        if name.startswith('via'):
            run['slim'] = read_bytes(model, slim) / read_bytes(model, model.full)
    tokens = token_row(pair, prompt)
    return row | dict(tokens=tokens['tokens'], hit=tokens['hit'])


def in_turn(pair, n):
    """The prompts of all families in turn, so that what is interrupted has some of each."""
    return sorted(pair.texts(FAMILIES, n), key=lambda prompt: prompt.place)


RECORDS = dict(compositions=Record(in_turn, composition_row), sampled=Record(in_turn, sampled_row),
               counts=Record(in_turn, counted_row))


# ------------------------------------------------------------------------------------------ what it must show

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
