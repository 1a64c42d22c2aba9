"""ECSV's claims, judged by what lab/ecsv/record.py stored: E and N are the proposal's own, F are ours.

E: what it expects. N: when it is to be rejected, by its own words. F: grounds for that which we added.
All at the target positions a token of tuned sd, unless said: a vote runs at one depth for a share of the
texts, at the next for the rest. Prompts of at most 300 tokens; temperature 0 but for the real runs at 1.
"""
from functools import partial
from math import exp, nan
from statistics import median
from typing import NamedTuple

import numpy

from lab.common import Claim, PageTable, mean

FAMILIES = 'math', 'table', 'story'
LAWS = 'lite', 'ecsv', 'soft'           # votes whose law of the first token was measured
MORE = 1.005                            # a line for "better": a tie is none


# -------------------------------------------------------------------------------------- texts, and their sums

class Sums(NamedTuple):
    """What became of some texts: numbers, or arrays of one for each depth; nan where it was not measured."""
    kept: float         # draft tokens
    cycles: float
    tokens: float       # of the texts
    positions: float    # of the target
    passes: float       # of the target
    seconds: float
    judged: float       # draft tokens
    nats: float         # of the target for the texts

    @property
    def length(self):
        """Draft tokens kept a cycle."""
        return self.kept / self.cycles

    @property
    def spent(self):
        """Target positions a token."""
        return self.positions / self.tokens

    @property
    def yielded(self):
        """Tokens a target pass."""
        return self.tokens / self.passes


def text_of(row):
    """A stored row, ready to be summed: 'sums' {vote: array [a Sums, depths]}, 'depths' {vote: which}."""
    sums = {}
    depths = {}
    for key, table in row['votes'].items():
        depths[key] = table['depths']
        n = len(table['depths'])
        # stored once, or not at all: tokens, which are the text's own, and passes, where a cycle is one
        known = dict(tokens=[row.get('tokens')] * n, passes=table['cycles']) | table
        sums[key] = numpy.array([known.get(name, [nan] * n) for name in Sums._fields], dtype=float)
    return row | dict(sums=sums, depths=depths)


def texts_of(record):
    return [text_of(row) for row in record.rows]


def of(rows, family):
    return [row for row in rows if row['family'] == family]


def named(rows):
    """{(task, place): row}: records of the same texts are joined by it."""
    return {(row['family'], row['place']): row for row in rows}


def summed(texts, key):
    """The Sums of a vote over texts, arrays of one number for each depth."""
    return Sums(*numpy.sum([text['sums'][key] for text in texts], axis=0))


def at_depth(texts, key, depth):
    """The Sums of a vote at one depth."""
    i = texts[0]['depths'][key].index(depth)
    return Sums(*(numbers[i] for numbers in summed(texts, key)))


def at_budget(texts, key, spent):
    """The Sums of a vote at so many target positions a token, by mixing two depths.

    One depth for a share of the texts, the next for the rest; only the nearest where no mix meets the budget.
    """
    sums = summed(texts, key)
    excess = sums.positions - spent * sums.tokens                               # [depths]
    table = numpy.array(sums)                                                   # [a Sums, depths]
    for i in range(len(excess) - 1):
        below = -excess[i]
        above = excess[i + 1]
        if below >= 0 and above >= 0 and below + above > 0:
            deeper = below / (below + above)                                    # share of the next depth
            return Sums(*((1 - deeper) * table[:, i] + deeper * table[:, i + 1]))
    return Sums(*table[:, abs(excess).argmin()])


def tuned(texts, seconds):
    """(vote, depth) of the fastest speculative decoding with one branch; seconds: {depth: of a cycle}."""
    best = None
    least = numpy.inf
    for key in ('sd greedy', 'sd sampled'):
        for depth in texts[0]['depths'][key]:
            modelled = at_depth(texts, key, depth).cycles * seconds[depth]
            if modelled < least:
                best = key, depth
                least = modelled
    return best


# ---------------------------------------------------------------------------------------------------- figures

def gain(texts, key, other, base):
    """Draft tokens kept a cycle over another vote's, both at the target positions a token of base."""
    return best_gain(texts, [key], other, base)


def best_gain(texts, keys, other, base):
    """The gain of the best of these votes."""
    spent = at_depth(texts, *base).spent
    best = max(at_budget(texts, key, spent).length for key in keys)
    return best / at_budget(texts, other, spent).length


def gain_at_depth(texts, key, other, depth):
    """Draft tokens kept a cycle over another vote's, both at this depth, without a budget."""
    return at_depth(texts, key, depth).length / at_depth(texts, other, depth).length


def within(texts, keys, base):
    """1 - the largest difference of the keys' positions a token from those of base, as a share."""
    spent = at_depth(texts, *base).spent
    apart = [abs(at_budget(texts, key, spent).spent / spent - 1) for key in keys]
    return 1 - max(apart)


def passes_gain(texts, key, base):
    """Tokens a target pass over those of base, at its positions a token."""
    spent = at_depth(texts, *base).spent
    return at_budget(texts, key, spent).yielded / at_budget(texts, base[0], spent).yielded


def law(texts, key, what):
    """Of a law of the first token: the target's nats under it, or how often both have the same favourite.

    A text counts once, however many places it has.
    """
    return mean(text['laws'][key][what] / text['places'] for text in texts)


def families_won(texts, base):
    """On how many tasks both the length and the target's cross-entropy improve over tuned sd."""
    won = 0
    for family in FAMILIES:
        mine = of(texts, family)
        if not mine:                    # a resample without this task
            continue
        longer = gain(mine, 'ecsv', base[0], base) > 1
        surer = law(mine, 'ecsv', 'nats') < law(mine, 'q', 'nats')
        won += longer and surer
    return won


# ----------------------------------------------------------------------------------------------------- claims

def claims(stored):
    """All Claims of ECSV."""
    texts = texts_of(stored['votes'])
    base = base_of(stored, texts)
    temperatures = [run_claims(real_texts(stored, temperature), temperature) for temperature in (0, 1)]
    return [*vote_claims(texts, base), *noise_claims(stored, texts, base), *spot_claims(stored, texts, base),
            cost_claim(stored), *fit_claims(stored, texts, base), error_claim(stored), *temperatures[0],
            *temperatures[1], answer_claim(stored)]


def base_of(stored, texts):
    """(vote, depth) of tuned sd, whose budget all have."""
    seconds = {row['depth']: row['seconds'] for row in stored['passes'].rows}
    return tuned(texts, seconds)


NOISY_ARGMAX = 'At their first token all branches share one q: their vote is a noisy estimate of its argmax'


def vote_claims(texts, base):
    """Claims on votes alone."""
    note = f'kept a cycle at the positions a token of {base[0]}, gamma {base[1]}; n = {len(texts)}'
    keys = [key for key in texts[0]['sums'] if key not in ('sd greedy', 'oracle-top1')]
    yield Claim('budget: 1 - the largest difference in positions a token', 'paper', 0.99, texts,
                partial(within, keys=keys, base=base), note=note, sampled=False,
                why='No mix of two depths of 1 to 8 meets the budget')

    def over(text, whose, line, key, other, why):
        return Claim(text, whose, line, texts, partial(gain, key=key, other=other, base=base), why, note)
    yield over('E1 ecsv-lite over sd with a sampled draft', 'paper', 1.05, 'lite', 'sd sampled',
               'Branches of one draft share its errors')
    yield over('E1, F4 ecsv-lite over sd with a greedy draft', 'paper', 1.05, 'lite', 'sd greedy',
               NOISY_ARGMAX)
    yield Claim('F4 the best of ecsv, lite, soft over sd with a greedy draft', 'ours', MORE, texts,
                partial(best_gain, keys=LAWS, other='sd greedy', base=base), NOISY_ARGMAX, note)
    yield over('F4 ecsv over the argmax of mean q', 'ours', MORE, 'ecsv', 'mean-argmax',
               'A vote of samples estimates the argmax of mean q, which that control takes directly')
    yield Claim('N1 tasks where length and aligned cross-entropy improve over tuned sd', 'paper', 2, texts,
                partial(families_won, base=base), 'A few samples are a coarser law than the q that they come '
                "from, and tuned sd takes q's favourite", note)
    yield over('N2 ecsv over the unweighted vote', 'paper', MORE, 'ecsv', 'vote-unif', 'Branches that share '
               'their q are equally reliable, so that the weights seldom turn a majority')
    yield over('F6 positional over prefix alignment', 'ours', MORE, 'ecsv', 'prefix', 'Once branches have '
               'parted, a positional vote counts tokens that were written behind other words')
    yield Claim('N3 ecsv-lite with B = 2 over sd with a sampled draft', 'paper', MORE, texts,
                partial(gain, key='lite, B = 2', other='sd sampled', base=('sd sampled', 4)),
                'Two branches that disagree have no majority',
                f'kept a cycle at the positions a token of sd sampled, gamma 4; n = {len(texts)}')
    yield Claim('of what the best of four branches would keep, ecsv keeps', 'ours', 0.9, texts,
                partial(gain_at_depth, key='ecsv', other='oracle-top1', depth=4),
                'The one branch that is right has one vote',
                f'both at depth 4, without a budget; n = {len(texts)}')


def noise_claims(stored, texts, base):
    """E3: what noise in draft or target does to the gain over sd with an equally noisy sampled draft."""
    plain = named(texts)
    pairs = {}
    for text in texts_of(stored['noise']):
        pair = dict(plain=plain[text['family'], text['place']], noisy=text)
        pairs.setdefault(text['noise'], []).append(pair)

    def change(rows):
        noisy = gain([row['noisy'] for row in rows], 'ecsv', 'sd sampled', base)
        return noisy - gain([row['plain'] for row in rows], 'ecsv', 'sd sampled', base)

    def steady(rows):
        return -abs(change(rows))
    for name, rows in pairs.items():
        over_greedy = gain([row['noisy'] for row in rows], 'ecsv', 'sd greedy', base)
        note = f'n = {len(rows)}; over greedy sd {over_greedy:.3f}'
        if name == 'another seed':      # what chance alone does
            why = 'Chance alone changes the gain by more than that: read the rows above with it in mind'
            yield Claim('minus the change of the same gain by another seed', 'ours', -0.02, rows, steady, why,
                        note)
        else:
            yield Claim(f'E3 gain over equally noisy sampled sd grows with {name}', 'paper', 0.0, rows,
                        change, 'All branches come from one draft and go wrong together',
                        f'difference of ratios, {note}')


def checked_texts(stored, texts):
    """The texts with the spot checks' sums beside those of the votes."""
    checks = named(texts_of(stored['spots']))
    found = []
    for text in texts:
        check = checks[text['family'], text['place']]
        found.append(text | dict(sums=text['sums'] | check['sums'], depths=text['depths'] | check['depths']))
    return found


def spot_claims(stored, texts, base):
    """E2, F5: what it is worth to ask the target before the vote, by positions and by passes."""
    texts = checked_texts(stored, texts)
    note = f'at equal positions a token, n = {len(texts)}'
    yield Claim('E2 ecsv-spot over ecsv', 'paper', 1.02, texts,
                partial(gain, key='spot', other='ecsv', base=base),
                'A check that turns the vote has read positions that are read again', note)
    yield Claim('E2, F4 ecsv-spot over sd with a greedy draft', 'paper', MORE, texts,
                partial(gain, key='spot', other='sd greedy', base=base),
                'One checked position does not make up for a first token that is a noisy argmax', note)
    yield Claim('F5 ecsv-spot over tuned sd by tokens a target pass', 'ours', 1.0, texts,
                partial(passes_gain, key='spot', base=base), 'A check is a target pass of its own', note)
    depths = texts[0]['depths']['spot']
    yield Claim('budget of spot checks: 1 - the largest difference in positions a token', 'paper', 0.99,
                texts, partial(within, keys=('ecsv', 'spot'), base=base), note=note, sampled=False,
                why=f'No mix of two of the depths {depths} meets it')
    depth = max(base[1], depths[0])

    def drift(texts):
        return 2 - at_depth(texts, 'spot', depth).spent / at_depth(texts, *base).spent
    spent = [f'{base[0]} {at_depth(texts, *base).spent:.3f}']
    for key in ('sd sampled', 'ecsv', 'spot'):
        spent.append(f'{key} {at_depth(texts, key, depth).spent:.3f}')
    yield Claim('budget drift: 1 - what ecsv-spot spends more at the depth of tuned sd', 'paper', 0.99, texts,
                drift, 'A cap of positions a cycle is none a token: where less is kept, a token costs more',
                f'depth {depth}; positions a token: {", ".join(spent)}; n = {len(texts)}')


def cost_claim(stored):
    """What the vote itself costs beside a target pass."""
    rows = stored['vote_cost'].rows

    def spared(rows):
        return 1 - median(row['vote'] / row['target_pass'] for row in rows)
    return Claim('1 - cost of the vote of four branches of four over a target pass', 'ours', 0.95, rows,
                 spared, 'Some fifteen tensor operations beside the three hundred of so small a target',
                 f"the processor's own time; n = {len(rows)}")


def loss(lessons, name):
    """Mean nats of lessons under the odds of a fit."""
    nats = sum(row['nats'][name] for row in lessons)
    tokens = sum(4 * row['tokens'] for row in lessons)          # of four branches
    return nats / tokens


def loss_ratio(lessons, name, seen):
    """The loss of a fit where it was fitted, over that on these lessons."""
    return seen / loss(lessons, name)


def seen_by(fit, lessons):
    """The lessons that weights were fitted to."""
    return [row for row in lessons if row['family'] in fit['families'] and row['place'] < fit['texts']]


def unseen(fits, lessons):
    """As many lessons of each task as the largest fit saw, which none has seen."""
    half = fits['fitted']['texts']
    return [row for row in lessons if half <= row['place'] < 2 * half]


def fits_of(stored):
    """{name: stored row} of the fits, and of the default weights."""
    return {row['fit']: row for row in stored['fits'].rows}


FIT_LINES = [       # a fit, how much it has to keep over the default weights, why where it does not
    ('fitted', MORE, 'Branches of one draft have much the same r: new weights turn few votes'),
    ('fitted to 2 of math', 1.0, 'What is peculiar to two texts was taken for a rule')]


def fit_claims(stored, texts, base):
    """Fitted weights, on texts that no weight has seen."""
    fits = fits_of(stored)
    lessons = stored['lessons'].rows
    others = unseen(fits, lessons)
    for name, line, why in FIT_LINES:
        yield Claim(f'weights {name}, over the default ones', 'ours', line, texts,
                    partial(gain, key=name, other='ecsv', base=base), why,
                    f'kept a cycle at equal positions a token; n = {len(texts)}, unseen')
        seen = loss(seen_by(fits[name], lessons), name)
        yield Claim(f'no overfitting, weights {name}: log loss where fitted over that on unseen prompts',
                    'paper', 0.9, others, partial(loss_ratio, name=name, seen=seen),
                    'Few votes on one task tell little of what a wrong token looks like on another',
                    f'n = {len(others)} unseen, of three tasks')


def error_claim(stored):
    """How alike the errors of the branches are."""
    rows = stored['lessons'].rows
    tokens = sum(row['tokens'] for row in rows)
    one = mean(errors_together(rows).diagonal()) / tokens
    every = sum(row['all_wrong'] for row in rows) / tokens
    return Claim("1 - correlation of two branches' errors, of tokens that a vote decides", 'paper', 0.95,
                 rows, independence, 'They share the draft, and at first its very law',
                 f'a branch errs at {one:.1%} of them, all four at {every:.2%}, independent ones would at '
                 f'{one ** 4:.3%}; n = {len(rows)}')


def errors_together(rows):
    """[B, B]: at how many tokens two branches both err, and on the diagonal one."""
    return numpy.sum([row['wrong_together'] for row in rows], axis=0)


def independence(rows):
    return 1 - correlation(errors_together(rows), sum(row['tokens'] for row in rows))


def correlation(together, tokens):
    """The mean correlation of two branches' errors; that of a branch which never errs counts as 0."""
    shares = together / tokens
    rates = shares.diagonal()
    covariance = shares - numpy.outer(rates, rates)
    spread = numpy.sqrt(covariance.diagonal())
    found = []
    for i in range(len(rates)):
        for j in range(i):
            scale = spread[i] * spread[j]
            found.append(covariance[i, j] / scale if scale else 0.0)
    return mean(found)


def real_texts(stored, temperature):
    """The texts of real runs at this temperature."""
    return [text_of(row) for row in stored['runs'].rows if row['temperature'] == temperature]


REAL = 'sd', 4                          # whose budget the real runs have


def run_claims(texts, temperature):
    """Real runs beside sd with gamma 4, and those with a second draft beside ecsv."""
    for name in texts[0]['sums']:
        if name == 'sd':
            continue
        other = 'sd'
        why = NOISY_ARGMAX + ', and above temperature 0 a match is rarer than min(p, q)'
        if name in ('sd-multi', 'sd-tree'):
            why = 'The positions of another pass would have paid for a longer branch'
        elif name != 'ecsv':
            other = 'ecsv'
            why = 'What the second draft gets right the first gets right too'
        apart = 1 - within(texts, (name, other), REAL)
        yield Claim(f'{name}, over {other} at equal positions a token, temperature {temperature}', 'ours',
                    MORE, texts, partial(gain, key=name, other=other, base=REAL), why,
                    f'kept a cycle; positions within {apart:.1%}; n = {len(texts)}')


def answer_claim(stored):
    rows = stored['answers'].rows

    def won(rows):
        return mean(row['ecsv-lite'] - row['ar'] for row in rows)
    return Claim('E4 share of right answers more than plain decoding, math and table', 'paper', 0.01, rows,
                 won, 'ECSV is lossless: the text is the same', f'n = {len(rows)}')


# ----------------------------------------------------------------------------------------------------- tables

def tables(stored):
    """The numbers behind the claims."""
    texts = texts_of(stored['votes'])
    base = base_of(stored, texts)
    found = [vote_table(texts, base), branch_table(texts), spot_table(checked_texts(stored, texts), base),
             fit_table(stored, texts, base)]
    for temperature in (0, 1):
        runs = real_texts(stored, temperature)
        found += [run_table(runs, temperature), kept_table(runs, temperature)]
    return found


def vote_table(texts, base):
    """What every vote keeps at the budget, and the laws of the first token."""
    parts = [texts] + [of(texts, family) for family in FAMILIES]
    budgets = [at_depth(part, *base).spent for part in parts]
    rows = []
    for key in texts[0]['sums']:
        if key == 'oracle-top1':        # reads every branch: has no place at an equal budget
            continue
        lengths = []
        for part, spent in zip(parts, budgets):
            lengths.append(at_budget(part, key, spent).length)
        laws = ['', '']
        if key in LAWS:
            laws = [law(texts, key, 'nats'), law(texts, key, 'same')]
        rows.append((key, *lengths, *laws))
    rows.append(('q', *[''] * (1 + len(FAMILIES)), law(texts, 'q', 'nats'), law(texts, 'q', 'same')))
    head = ('at equal positions a token', 'kept a cycle', *FAMILIES, "the target's nats under the law",
            "the target's favourite first")
    return PageTable(head, rows)


def branch_table(texts):
    """Numbers of branches, depths."""
    rows = []
    for name, key in (('B = 2', 'lite, B = 2'), ('B = 4', 'lite'), ('B = 8', 'lite, B = 8')):
        rows.append((name, *(gain_at_depth(texts, key, 'sd greedy', depth) for depth in (2, 4, 8))))
    return PageTable(('ecsv-lite over greedy sd, same depth', 'k = 2', 'k = 4', 'k = 8'), rows)


def spot_table(texts, base):
    """The variants of spot checks, on the texts that have them all."""
    keys = [key for key in texts[0]['sums'] if key.startswith('spot')]
    few = [text for text in texts if all(key in text['sums'] for key in keys)]
    spent = at_depth(few, *base).spent
    rows = []
    for key in ('sd greedy', 'ecsv', *keys):
        sums = at_budget(few, key, spent)
        rows.append((key, sums.length, sums.yielded, sums.spent))
    head = f'real cycles, n = {len(few)}', 'kept a cycle', 'tokens a target pass', 'positions a token'
    return PageTable(head, rows)


def fit_table(stored, texts, base):
    """The fitted weights, and what became of them."""
    fits = fits_of(stored)
    lessons = stored['lessons'].rows
    rows = []
    for name, fit in fits.items():
        knobs = fit['weights']
        cells = [name, knobs['a_entropy'], knobs['a_agree'], knobs['a_self']]
        if name == 'default':           # no odds: they have no bias
            rows.append((*cells, '', '', 1.0))
            continue
        where_fitted = loss(seen_by(fit, lessons), name)
        elsewhere = loss(unseen(fits, lessons), name)
        rows.append((*cells, where_fitted, elsewhere, gain(texts, name, 'ecsv', base)))
    head = ('weights', 'a_entropy', 'a_agree', 'a_self', 'log loss where fitted', 'log loss unseen',
            'kept a cycle over default weights')
    return PageTable(head, rows)


def run_table(texts, temperature):
    """Lengths, passes, measured speed of real runs."""
    sd = at_depth(texts, *REAL)
    rows = []
    for name in texts[0]['sums']:
        sums = at_budget(texts, name, sd.spent)
        speed = (sums.tokens / sums.seconds) / (sd.tokens / sd.seconds)
        perplexity = exp(sums.nats / sums.tokens)
        rows.append((name, sums.length, sums.yielded, sums.spent, speed, perplexity))
    head = (f'real runs, temperature {temperature}', 'kept a cycle', 'tokens a target pass',
            'positions a token', 'tokens a second over sd, measured', "the target's perplexity of the text")
    return PageTable(head, rows)


def kept_table(texts, temperature):
    """How many cycles keep how much at depth 4, and how acceptance varies from text to text."""
    rows = []
    for name in texts[0]['sums']:
        counts = numpy.zeros(5)
        rates = []
        for text in texts:
            table = text['votes'][name]
            i = table['depths'].index(4)
            counts += table['by_kept'][i][:5]
            rates.append(table['kept'][i] / max(1, table['judged'][i]))
        rows.append((name, *(counts / counts.sum()), *numpy.quantile(rates, (0.1, 0.5, 0.9))))
    head = (f'depth 4, temperature {temperature}: share of cycles that keep', *map(str, range(5)),
            'acceptance rate of a text: 10 %', '50 %', '90 %')
    return PageTable(head, rows)
