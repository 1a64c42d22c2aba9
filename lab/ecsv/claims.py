"""ECSV's claims, judged by what lab/ecsv/record.py stored: E and N are the proposal's own, F are ours.

E: what it expects. N: when it is to be rejected, by its own words. F: grounds for that which we added.
Each task has a budget of its own, the target positions a token of its tuned sd; a vote has the best mix of
two depths that keeps to it. Temperature 0 but for the real runs at 1. On another pair than the lab's there
are fewer votes and records, and tasks are whatever its prompts' families are: claims are of what there is.
"""
from dataclasses import replace
from functools import partial
from math import exp, nan
from statistics import median
from typing import NamedTuple

import numpy

from lab.common import Claim, PageTable, judge, mean

LAWS = 'lite', 'ecsv', 'soft'           # votes whose law of the first token was measured
MORE = 1.005                            # a line for "better": a tie is none
COULD_WIN = 1.05                        # what choosing without an error has to gain, for a vote to win
GREEDY = 'sd greedy'


# -------------------------------------------------------------------------------------- texts, and their sums

class Sums(NamedTuple):
    """What became of some texts: numbers, or arrays [tasks, depths]; nan where it was not measured."""
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
        """Draft tokens kept a target pass: the proposal's "per verify step", where a check is a step too."""
        return self.kept / self.passes

    @property
    def block(self):
        """Draft tokens kept a cycle, however many passes it takes."""
        return self.kept / self.cycles

    @property
    def spent(self):
        """Target positions a token."""
        return self.positions / self.tokens

    @property
    def yielded(self):
        """Tokens a target pass."""
        return self.tokens / self.passes


class Texts:
    """Stored rows of texts, ready to be summed over some of them; a text is known by its place among them."""

    def __init__(self, rows):
        """rows: all with the same votes, each at the same depths."""
        self.rows = rows
        self.places = range(len(rows))
        self.families = {}      # task: the places of its texts
        for place, row in enumerate(rows):
            self.families.setdefault(row['family'], []).append(place)
        self.member = numpy.zeros((len(self.families), len(rows)))      # [tasks, texts] 1 for a task's own
        for one, places in zip(self.member, self.families.values()):
            one[places] = 1
        self.depths = {key: table['depths'] for key, table in rows[0]['votes'].items()}
        self.sums = {}          # vote: [texts, a Sums, depths]
        for key in self.depths:
            self.sums[key] = numpy.array([sums_of(row, key) for row in rows])

    def of(self, family):
        """The Texts of a task."""
        return Texts([self.rows[place] for place in self.families[family]])

    def summed(self, key, places):
        """The Sums of a vote over texts, any of them several times: arrays [tasks, depths]."""
        often = numpy.bincount(places, minlength=len(self.rows))                # [texts]
        found = numpy.tensordot(self.member * often, self.sums[key], 1)         # [tasks, a Sums, depths]
        return Sums(*found.swapaxes(0, 1))

    def at_depth(self, key, depth, places):
        """The Sums of a vote at one depth, of all tasks together."""
        i = self.depths[key].index(depth)
        return Sums(*(numbers[:, i].sum() for numbers in self.summed(key, places)))

    def at_budget(self, key, budget, places):
        """The Sums of a vote, of all tasks together, each with the best mix for its share of the Budget."""
        base = self.summed(budget.key, places)
        columns = [self.depths[budget.key].index(budget.depths[family]) for family in self.families]
        spent = base.spent[numpy.arange(len(columns)), columns]                 # [tasks]
        return Sums(*numpy.sum(best_mix(self.summed(key, places), spent), 1))


def sums_of(row, key):
    """[a Sums, depths] of a stored row's vote."""
    table = row['votes'][key]
    n = len(table['depths'])
    # stored once, or not at all: tokens, which are the text's own, and passes, where a cycle is one
    known = dict(tokens=[row.get('tokens')] * n, passes=table['cycles']) | table
    return numpy.array([known.get(name, [nan] * n) for name in Sums._fields], dtype=float)


def named(rows):
    """{(task, place): row}: records of the same texts are joined by it."""
    return {(row['family'], row['place']): row for row in rows}


# ------------------------------------------------------------------------------------------------ the budget

class Budget(NamedTuple):
    """The target positions a token that each task may spend: what a vote does there at a depth."""
    key: str            # the vote
    depths: dict        # task: the depth

    def of(self, family):
        """That of a task alone."""
        return Budget(self.key, {family: self.depths[family]})


def best_mix(sums, spent):
    """The Sums [tasks] of the mixes of two depths that keep most a pass, within so many positions a token.

    A share of the texts has one depth, the rest the other: sums add up, ratios do not. One depth alone is a
    mix, too. Where none is within the budget it is the depth that exceeds it least. sums: arrays
    [tasks, depths]; spent [tasks]. A task without any text has sums of 0, and adds nothing.
    """
    spent = numpy.maximum(spent, sums.spent.min(1))
    excess = sums.positions - spent[:, None] * sums.tokens                      # [tasks, depths]
    within = excess[:, :, None] <= 1e-6                                         # of the one depth
    beyond = excess[:, None] > 1e-6                                             # of the other
    mixed = within & beyond
    gap = numpy.where(mixed, excess[:, None] - excess[:, :, None], 1)
    share = numpy.where(mixed, -excess[:, :, None] / gap, 0)    # of the other depth: all is just used up
    kept = (1 - share) * sums.kept[:, :, None] + share * sums.kept[:, None]
    passes = (1 - share) * sums.passes[:, :, None] + share * sums.passes[:, None]
    length = numpy.where(within, kept / passes, -1)                             # [tasks, depths, depths]
    tasks = numpy.arange(len(spent))
    one, other = numpy.divmod(length.reshape(len(spent), -1).argmax(1), length.shape[-1])
    share = share[tasks, one, other]
    table = numpy.array(sums)                                                   # [a Sums, tasks, depths]
    return Sums(*((1 - share) * table[:, tasks, one] + share * table[:, tasks, other]))


class PassCost(NamedTuple):
    """Seconds of a cycle of sd, its blocks of many lengths: a line through what was measured."""
    cycle: float        # without a draft token: the target's pass
    token: float        # more for each draft token: the draft's pass, the target's further position

    def seconds(self, sums):
        drafted = sums.positions - sums.cycles
        return self.cycle * sums.cycles + self.token * drafted


def pass_cost(stored):
    """The PassCost of the stored pass times."""
    rows = stored['passes'].rows
    token, cycle = numpy.polyfit([row['depth'] for row in rows], [row['seconds'] for row in rows], 1)
    return PassCost(cycle, token)


def tuned(texts, cost):
    """The Budget of greedy sd at the depth at which, task by task, it is fastest."""
    seconds = cost.seconds(texts.summed(GREEDY, texts.places))                  # [tasks, depths]
    depths = {}
    for family, times in zip(texts.families, seconds):
        depths[family] = texts.depths[GREEDY][times.argmin()]
    return Budget(GREEDY, depths)


# ---------------------------------------------------------------------------------------------------- figures
# Each is a function of places: texts, any of them several times.

def gain(places, texts, key, other, budget):
    """Draft tokens kept a target pass over another vote's, both at the budget."""
    return best_gain(places, texts, [key], other, budget)


def best_gain(places, texts, keys, other, budget):
    """The gain of the best of these votes."""
    places = numpy.asarray(places)                      # once: summing over a list is as long as the rest
    best = max(texts.at_budget(key, budget, places).length for key in keys)
    return best / texts.at_budget(other, budget, places).length


def gain_at_depth(places, texts, key, other, depth):
    """Draft tokens kept a target pass over another vote's, both at this depth, without a budget."""
    return texts.at_depth(key, depth, places).length / texts.at_depth(other, depth, places).length


def yield_gain(places, texts, key, other, budget):
    """Tokens a target pass over another vote's, both at the budget."""
    best = texts.at_budget(key, budget, places).yielded
    return best / texts.at_budget(other, budget, places).yielded


def within(places, texts, keys, budget):
    """1 - the share by which a vote, on a task, exceeds its budget most; of all texts, not of places."""
    worst = 1.0
    for family in texts.families:
        part = texts.of(family)
        spent = part.at_depth(budget.key, budget.depths[family], part.places).spent
        for key in keys:
            worst = max(worst, part.at_budget(key, budget, part.places).spent / spent)
    return 2 - worst


# ----------------------------------------------------------------------------------------------------- claims

class Rivalry(NamedTuple):
    """What one vote is claimed to keep over another, at equal target positions a token."""
    text: str
    whose: str
    line: float
    key: str
    other: str
    why: str
    depth: int = None       # where both have this depth instead, whatever it costs

    def claim(self, texts, budget):
        """The Claim over all these texts, each task with its own budget."""
        figure = partial(gain, texts=texts, key=self.key, other=self.other, budget=budget)
        note = 'kept a target pass at the budget'
        if self.depth:
            figure = partial(gain_at_depth, texts=texts, key=self.key, other=self.other, depth=self.depth)
            note = f'kept a target pass, both at depth {self.depth}, without a budget'
        note = f'{note}; n = {len(texts.places)}'
        return Claim(self.text, self.whose, self.line, texts.places, figure, self.why, note)


NOISY_ARGMAX = 'At their first token all branches share one q: their vote is a noisy estimate of its argmax'
PARTED = 'Once branches have parted, a positional vote counts tokens that were written behind other words'
ALIKE = 'Branches that share their q are equally reliable: the weights seldom turn a majority'
FEW = 'Four samples of one q seldom hold a better text than its favourite'
A_PASS = 'A check is a target pass of its own, and keeps nothing by itself'
UNWEIGHTED = 'prefix, vote-unif'
BY_TASK = [             # judged over all tasks, and on each
    Rivalry('any selection: the best of four branches over sd with a greedy draft, depth 4', 'ours', MORE,
            'oracle-top1', GREEDY, FEW, 4),
    Rivalry('any selection: the best of four branches over sd with a greedy draft', 'ours', COULD_WIN,
            'oracle-top1', GREEDY, FEW),
    Rivalry('the prefix vote over sd with a greedy draft', 'ours', MORE, 'prefix', GREEDY, NOISY_ARGMAX),
    Rivalry('E1 ecsv-lite over sd with a sampled draft', 'paper', 1.05, 'lite', 'sd sampled',
            'Branches of one draft share its errors'),
    Rivalry('E1, F4 ecsv-lite over sd with a greedy draft', 'paper', 1.05, 'lite', GREEDY, NOISY_ARGMAX),
    Rivalry('F4 ecsv over the argmax of mean q', 'ours', MORE, 'ecsv', 'mean-argmax',
            'A vote of samples estimates the argmax of mean q, which that control takes directly'),
    Rivalry('N2 ecsv over the unweighted vote', 'paper', MORE, 'ecsv', 'vote-unif', ALIKE),
    Rivalry('N2 weights over none, by the mean over a branch', 'paper', MORE, 'branch', 'vote-unif', ALIKE),
    Rivalry('F6 none by prefix over none by position: who left the text has no vote', 'ours', MORE,
            UNWEIGHTED, 'vote-unif', 'Branches seldom part within what is kept'),
    Rivalry('N2 weights over none, both by prefix', 'paper', MORE, 'prefix', UNWEIGHTED, ALIKE)]
POOLED = [              # over all tasks alone
    Rivalry('N2 weights over none, both by prefix, weights by the mean over a branch', 'paper', MORE,
            'prefix, branch', UNWEIGHTED, 'The mean counts what a branch wrote behind the end of its vote'),
    Rivalry('N2 weights over none, both by prefix, features standardised', 'paper', MORE,
            'prefix, standardised', UNWEIGHTED, ALIKE),
    Rivalry('features standardised over raw ones', 'ours', 1.0, 'standardised', 'ecsv',
            'Certainty then weighs most, and a branch that has left the text may be certain'),
    Rivalry('F6 positional over prefix alignment', 'ours', MORE, 'ecsv', 'prefix', PARTED),
    Rivalry('of what the best of four branches would keep, ecsv keeps', 'ours', 0.9, 'ecsv', 'oracle-top1',
            'The one branch that is right has one vote', 4)]
AT_FOUR = [             # likewise, at the budget of a greedy draft of 4: the fastest may be one of 1 or 2
    Rivalry('any selection: the best of four branches over sd with a greedy draft, positions of gamma 4',
            'ours', COULD_WIN, 'oracle-top1', GREEDY, FEW),
    Rivalry('the prefix vote over sd with a greedy draft, positions of gamma 4',
            'ours', MORE, 'prefix', GREEDY, NOISY_ARGMAX)]
CHECKS = [              # where spot checks were run; judged over all tasks, and on each
    Rivalry('E2 ecsv-spot over ecsv', 'paper', 1.02, 'spot', 'ecsv', A_PASS),
    Rivalry('E2, F4 ecsv-spot over sd with a greedy draft', 'paper', MORE, 'spot', GREEDY, A_PASS)]


def claims(stored):
    """All Claims of ECSV, by what was recorded."""
    found = []
    if 'votes' in stored and 'passes' in stored:
        texts = Texts(stored['votes'].rows)
        budget = tuned(texts, pass_cost(stored))
        found += vote_claims(stored, texts, budget)
        if 'noise' in stored:
            found += noise_claims(stored, texts, budget)
        if 'spots' in stored:
            found += spot_claims(stored, budget)
        if 'vote_cost' in stored:
            found.append(cost_claim(stored))
        if 'fits' in stored:
            found += fit_claims(stored, texts, budget)
    if 'lessons' in stored:
        found.append(error_claim(stored))
    for temperature in temperatures(stored):
        found += run_claims(stored, temperature)
    if 'checked' in stored:
        found += checked_claims(stored['checked'].rows)
    if 'hedged' in stored and 'pass_costs' in stored:
        found += hedge_claims(stored)
        if 'trees' in stored:
            found += tree_claims(stored)
    return found


def temperatures(stored):
    """Those of the real runs."""
    rows = stored['runs'].rows if 'runs' in stored else []
    return sorted({int(row['temperature']) for row in rows})


def are_there(texts, *keys):
    """Whether all of these votes were asked."""
    return texts.depths.keys() >= set(keys)


def vote_claims(stored, texts, budget):
    """Claims on votes alone."""
    yield optimum_claim(stored, texts)
    note = f'positions a token of greedy sd at the depths {base_names(budget)}; n = {len(texts.places)}'
    yield Claim('budget: 1 - the most by which a vote exceeds that of a task', 'paper', 0.99, texts.places,
                partial(within, texts=texts, keys=list(texts.depths), budget=budget),
                'No mix of two depths is within the budget', note, sampled=False)
    for rivalry in BY_TASK + POOLED:
        if are_there(texts, rivalry.key, rivalry.other):
            yield rivalry.claim(texts, budget)
    for rivalry in AT_FOUR:
        yield rivalry.claim(texts, Budget(GREEDY, dict.fromkeys(texts.families, 4)))
    if are_there(texts, *LAWS):
        yield Claim('F4 the best of ecsv, lite, soft over sd with a greedy draft', 'ours', MORE, texts.places,
                    partial(best_gain, texts=texts, keys=LAWS, other=GREEDY, budget=budget), NOISY_ARGMAX,
                    note)
    if are_there(texts, 'lite, B = 2'):
        two = Rivalry('N3 ecsv-lite with B = 2 over sd with a sampled draft', 'paper', MORE, 'lite, B = 2',
                      'sd sampled', 'Two branches that disagree have no majority')
        claim = two.claim(texts, Budget('sd sampled', dict.fromkeys(texts.families, 4)))
        yield replace(claim, note=f'{claim.note}; the budget is that of sd sampled, gamma 4')


def base_names(budget):
    """The depths of a Budget, in words."""
    return ', '.join(f'{family} {depth}' for family, depth in budget.depths.items())


def optimum_claim(stored, texts):
    """Whether greedy drafting was tried beyond its optimum, so that no budget ends where the grid does."""
    depths = texts.depths[GREEDY]
    seconds = pass_cost(stored).seconds(texts.summed(GREEDY, texts.places))     # [tasks, depths]
    over = seconds[:, -1] / seconds.min(1)

    def least(places):
        return over.min()
    return Claim('greedy sd: modelled time at the greatest depth over the best, least of tasks', 'ours', MORE,
                 texts.places, least, 'Whole texts are drafted without an error',
                 f'depths 1 to {depths[-1]}; best: {base_names(tuned(texts, pass_cost(stored)))}', False)


def noise_claims(stored, texts, budget):
    """E3: what noise in draft or target does to the gain over sd with an equally noisy sampled draft."""
    plain_rows = named(texts.rows)
    kinds = {}
    for row in stored['noise'].rows:
        kinds.setdefault(row['noise'], []).append(row)
    for name, rows in kinds.items():
        noisy = Texts(rows)
        plain = Texts([plain_rows[row['family'], row['place']] for row in rows])
        change = partial(gain_change, noisy=noisy, plain=plain, budget=budget)
        over_greedy = gain(noisy.places, noisy, 'ecsv', GREEDY, budget)
        note = f'n = {len(rows)}; over greedy sd {over_greedy:.3f}'
        if name == 'another seed':      # what chance alone does
            why = 'Chance alone changes the gain by more than that: read the rows above with it in mind'
            yield Claim('minus the change of the same gain by another seed', 'ours', -0.02, noisy.places,
                        lambda places, change=change: -abs(change(places)), why, note)
        else:
            yield Claim(f'E3 gain over equally noisy sampled sd grows with {name}', 'paper', 0.0,
                        noisy.places, change, 'All branches come from one draft and go wrong together',
                        f'difference of ratios, {note}')


def gain_change(places, noisy, plain, budget):
    """By how much the gain of ecsv over a sampled draft grows with noise."""
    before = gain(places, plain, 'ecsv', 'sd sampled', budget)
    return gain(places, noisy, 'ecsv', 'sd sampled', budget) - before


def checked_texts(stored):
    """The Texts that ecsv-spot was run on, its sums beside those of the votes."""
    votes = named(stored['votes'].rows)
    rows = []
    for row in stored['spots'].rows:
        vote = votes[row['family'], row['place']]
        rows.append(vote | dict(votes=vote['votes'] | dict(spot=row['votes']['spot'])))
    return Texts(rows)


def spot_claims(stored, budget):
    """E2, F5: what it is worth to ask the target before the vote: a check is a pass, and counted as one."""
    texts = checked_texts(stored)
    for rivalry in CHECKS:
        claim = rivalry.claim(texts, budget)
        blocks = [texts.at_budget(key, budget, texts.places).block for key in (rivalry.key, rivalry.other)]
        yield replace(claim, note=f'{claim.note}; kept a cycle {blocks[0] / blocks[1]:.3f}')
    note = f'at equal positions a token, n = {len(texts.places)}'
    yield Claim('F5 ecsv-spot over tuned sd by tokens a target pass', 'ours', 1.0, texts.places,
                partial(yield_gain, texts=texts, key='spot', other=GREEDY, budget=budget),
                A_PASS, note)
    yield Claim('budget of spot checks: 1 - the most by which that of a task is exceeded', 'paper', 0.99,
                texts.places, partial(within, texts=texts, keys=['spot'], budget=budget), note=note,
                sampled=False, why=f"No mix of two of the depths {texts.depths['spot']} is within it")
    depth = 8

    def drift(places):
        spot = texts.at_depth('spot', depth, places).spent
        return 2 - spot / texts.at_depth(GREEDY, depth, places).spent
    spent = []
    for key in (GREEDY, 'sd sampled', 'ecsv', 'spot'):
        spent.append(f'{key} {texts.at_depth(key, depth, texts.places).spent:.3f}')
    yield Claim('budget drift: 1 - what ecsv-spot spends more than greedy sd at the same depth', 'paper',
                0.99, texts.places, drift,
                'A cap of positions a cycle is none a token: where less is kept, a token costs more',
                f'depth {depth}; positions a token: {", ".join(spent)}; n = {len(texts.places)}')


def cost_claim(stored):
    """What the vote itself costs beside a target pass."""
    head, rows = stored['vote_cost']

    def spared(rows):
        return 1 - median(row['vote'] / row['target_pass'] for row in rows)
    note = "the processor's own time" if 'prompts' not in head else f'seconds on {head["device"]}'
    return Claim('1 - cost of the vote of four branches of four over a target pass', 'ours', 0.95, rows,
                 spared, 'Some forty small tensor operations, where a small target has three hundred',
                 f'{note}; n = {len(rows)}')


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


def fit_claims(stored, texts, budget):
    """Fitted weights, on texts that no weight has seen."""
    fits = fits_of(stored)
    lessons = stored['lessons'].rows
    others = unseen(fits, lessons)
    for name, line, why in FIT_LINES:
        yield Rivalry(f'weights {name}, over the default ones', 'ours', line, name, 'ecsv',
                      why).claim(texts, budget)
        seen = loss(seen_by(fits[name], lessons), name)
        yield Claim(f'no overfitting, weights {name}: log loss where fitted over that on unseen prompts',
                    'paper', 0.9, others, partial(loss_ratio, name=name, seen=seen),
                    'Few votes on one task tell little of what a wrong token looks like on another',
                    f'n = {len(others)} unseen, of all tasks')


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
    """The Texts of real runs at this temperature."""
    return Texts([row for row in stored['runs'].rows if row['temperature'] == temperature])


def run_claims(stored, temperature):
    """Real runs beside sd with gamma 4, and those with a second draft beside ecsv."""
    texts = real_texts(stored, temperature)
    budget = Budget('sd', dict.fromkeys(texts.families, 4))
    rare = NOISY_ARGMAX + ', and above temperature 0 a match is rarer than min(p, q)'
    again = 'Another pass for another branch costs more than it keeps'
    pairs = [('sd greedy', 'sd', 'A greedy draft is kept with chance p(t), a sampled one with min(1, p / q)'),
             ('ecsv', 'sd', rare), ('ecsv', 'sd greedy', NOISY_ARGMAX), ('sd-multi', 'sd', again),
             ('sd-tree', 'sd', again), ('prefix', 'sd', rare), ('spot', 'ecsv', A_PASS),
             ('spot', 'sd', A_PASS)]
    for name in texts.depths:
        if 'second draft' in name:
            pairs.append((name, 'ecsv', 'What the second draft gets right the first gets right too'))
    for name, other, why in pairs:
        if are_there(texts, name, other):
            text = f'{name}, over {other} at the positions a token of sd, temperature {temperature}'
            rivalry = Rivalry(text, 'ours', MORE, name, other, why)
            spent = [texts.at_budget(key, budget, texts.places).spent for key in (name, other)]
            claim = rivalry.claim(texts, budget)
            yield replace(claim, note=f'{claim.note}; positions a token {spent[0]:.3f} and {spent[1]:.3f}')


# ------------------------------------------------------------------------------------ a check that verifies

CHECKED = 'ecsv-checked'
CHECKED_OVER = {        # what it is compared with: why it may lose
    'ecsv-spot': 'The first vote is right up to most of the places that are checked',
    'ecsv': A_PASS,
    GREEDY: A_PASS}


def counted(rows, name, depth):
    """{quantity: its total} of a method's runs at this depth."""
    found = {}
    for row in rows:
        table = row['votes'][name]
        i = table['depths'].index(depth)
        for quantity, numbers in table.items():
            found[quantity] = found.get(quantity, 0) + numbers[i]
    return found


def tokens_a_position(rows, name, depth):
    """Tokens a target position."""
    sums = counted(rows, name, depth)
    return sums['tokens'] / sums['positions']


def tokens_a_pass(rows, name, depth):
    """Tokens in the time of a target pass, by weight bytes: a draft pass has its share of one."""
    sums = counted(rows, name, depth)
    return sums['tokens'] / (sums['passes'] + rows[0]['bytes'] * sums['drafts'])


def over(rows, figure, other, depth):
    """A figure of the check that verifies over that of another method."""
    return figure(rows, CHECKED, depth) / figure(rows, other, depth)


def checked_claims(rows):
    """What it is worth that a check verifies, at each depth; temperature 0, where all write the same text."""
    for depth in rows[0]['votes'][CHECKED]['depths']:
        for other, why in CHECKED_OVER.items():
            for what, figure in (('tokens a target position', tokens_a_position),
                                 ('speed, modelled by weight bytes', tokens_a_pass)):
                yield Claim(f'a check that verifies, over {other} at depth {depth}: {what}', 'ours', MORE,
                            rows, partial(over, figure=figure, other=other, depth=depth), why,
                            f'real runs at temperature 0; n = {len(rows)}')


def checked_table(rows):
    """Of each method at each depth what its runs come to, and its speed by task over ecsv-spot's."""
    families = list(dict.fromkeys(row['family'] for row in rows))
    lines = []
    for name, table in rows[0]['votes'].items():
        for depth in table['depths']:
            sums = counted(rows, name, depth)
            cells = []
            for family in families:
                theirs = [row for row in rows if row['family'] == family]
                cells.append(tokens_a_pass(theirs, name, depth) / tokens_a_pass(theirs, 'ecsv-spot', depth))
            lines.append((f'{name}, depth {depth}', sums['tokens'] / sums['cycles'],
                          sums['passes'] / sums['cycles'], tokens_a_position(rows, name, depth),
                          tokens_a_pass(rows, name, depth), *cells))
    head = ('a check that verifies: real runs, temperature 0', 'tokens a cycle', 'target passes a cycle',
            'tokens a target position', 'x plain, by weight bytes',
            *(f'{family}: over ecsv-spot' for family in families))
    return PageTable(head, lines)


# ---------------------------------------------------------------------------------------------- side branches

class HedgeTexts:
    """Stored rows of one temperature, their passes modelled as seconds; a text is known by its place.

    A target pass costs as the line through the stored costs, a draft pass what is stored.
    """

    def __init__(self, stored, temperature, record='hedged'):
        self.rows = [row for row in stored[record].rows if row['temperature'] == temperature]
        self.places = range(len(self.rows))
        self.families = list(dict.fromkeys(row['family'] for row in self.rows))
        self.keys = list(self.rows[0]['votes']) if self.rows else []
        own = [self.families.index(row['family']) for row in self.rows]
        self.member = numpy.equal.outer(range(len(self.families)), own)         # [families, texts]
        costs, = stored['pass_costs'].rows
        self.costs = costs['draft'], *numpy.polyfit(range(1, len(costs['target'])), costs['target'][1:], 1)
        self.spent = {}         # setting: [texts, (tokens, modelled seconds), depths]
        for key in self.keys:
            self.spent[key] = numpy.array([self.tokens_and_seconds(row, key) for row in self.rows])

    def tokens_and_seconds(self, row, key):
        table = row['votes'][key]
        draft, each, once = self.costs
        cycles, positions, drafts = numpy.array([table[name] for name in ('cycles', 'positions', 'drafts')])
        tokens = table.get('tokens', [row.get('tokens')] * len(cycles))
        return tokens, once * cycles + each * positions + draft * drafts

    def rates(self, key, places):
        """[families, depths] tokens a modelled second of a setting; nan for a family without any text."""
        often = numpy.bincount(places, minlength=len(self.rows))                # [texts]
        sums = numpy.tensordot(self.member * often, self.spent[key], 1)         # [families, 2, depths]
        with numpy.errstate(invalid='ignore'):
            return sums[:, 0] / sums[:, 1]

    def broken(self, key, depth, places):
        """(failures, there, mended) of a setting at a depth, of all families."""
        i = self.rows[0]['votes'][key]['depths'].index(depth)
        counts = []
        for name in ('failures', 'there', 'mended'):
            counts.append(sum(self.rows[place]['votes'][key][name][i] for place in places))
        return counts


def hedge_speed(places, texts, key, other, depth=None):
    """Modelled speed of a setting over another, its geometric mean over families.

    depth: of both, its place in their list; None: each family's best, for either.
    """
    rates = texts.rates(key, places)
    base = texts.rates(other, places)
    if depth is None:
        rates, base = rates.max(1), base.max(1)
    else:
        rates, base = rates[:, depth], base[:, depth]
    return float(numpy.exp(numpy.nanmean(numpy.log(rates / base))))


def hedge_yield(places, texts, key, depth, other):
    """Tokens a target pass of a setting at a depth, over those of sd at another depth."""
    return texts.at_depth(key, depth, places).yielded / texts.at_depth('sd', other, places).yielded


def hedge_share(places, texts, key, depth, part, whole):
    """Blocks that `part` counts over those that `whole` counts; 0 failures, 1 those at a branch, 2 mended."""
    counts = texts.broken(key, depth, places)
    return counts[part] / counts[whole] if counts[whole] else nan


A_DRAFT_PASS = 'Blocks seldom fail, and each token of a branch but the first is a draft pass in every cycle'
FREE = 'What it mends is one token in few blocks, and each branch is a target position in most of them'
AT_BEST = 'modelled speed over greedy sd, each at its best gamma by task'
FAILED = 'The draft is wrong where it is sure'
HEDGE_SPEEDS = [        # setting, what it is called, why it may fail
    ('lowest, side 1', 'hedge where confidence is lowest, the second choice alone', FREE),
    ('lowest, side 2', 'hedge where confidence is lowest, two tokens', A_DRAFT_PASS),
    ('lowest, side 4', 'hedge where confidence is lowest, four tokens', A_DRAFT_PASS),
    ('side 1', 'hedge wherever the doubt is 0.1 or more, the second choice alone', FREE),
    ('side 2', 'hedge wherever the doubt is 0.1 or more, two tokens', A_DRAFT_PASS),
    ('side 1, everywhere', 'hedge at every place, the second choice alone', FREE)]


def hedge_claims(stored):
    """Second choices verified beside the draft: lines were stated before anything was measured."""
    texts = HedgeTexts(stored, 0)
    note = f'mean of tasks; n = {len(texts.places)}'
    for key, name, why in HEDGE_SPEEDS:
        yield Claim(f'{name}: {AT_BEST}', 'ours', 1.02, texts.places,
                    partial(hedge_speed, texts=texts, key=key, other='sd'), why, note)
    four = texts.rows[0]['votes']['sd']['depths'].index(4)
    for key, name, why in HEDGE_SPEEDS[0], HEDGE_SPEEDS[3]:
        yield Claim(f'{name}: modelled speed over greedy sd, both with gamma 4', 'ours', 1.0, texts.places,
                    partial(hedge_speed, texts=texts, key=key, other='sd', depth=four), why, note)
    summed = Texts(texts.rows)
    for key, depth, other in ('lowest, side 1', 3, 4), ('lowest, side 2', 4, 6):
        yield Claim(f'hedge, {key}, gamma {depth}: tokens a target pass over greedy sd with gamma {other}, '
                    'where both read as many positions', 'ours', 1.0, summed.places,
                    partial(hedge_yield, texts=summed, key=key, depth=depth, other=other),
                    'A draft that is mostly right is better made longer than wider',
                    f'n = {len(texts.places)}')
    yield from broken_claims(texts, 'lowest, side 1', 'temperature 0')
    sampled = HedgeTexts(stored, 1)
    if sampled.rows:
        for key, other in ('side 1', 'sd'), ('side 2', 'sd'), ('side 1 greedy', 'sd greedy'):
            yield Claim(f'hedge at temperature 1, {key}: modelled speed over {other}, each at its best gamma',
                        'ours', 1.02, sampled.places,
                        partial(hedge_speed, texts=sampled, key=key, other=other), FREE,
                        f'real runs, gamma 2, 4 and 8; n = {len(sampled.places)}')
        yield from broken_claims(sampled, 'side 1', 'temperature 1')


def tree_claims(stored):
    """Whole trees of sampled branches, read in one pass, and hedge beside them."""
    texts = HedgeTexts(stored, 1, 'trees')
    n = len(texts.places)
    note = f'real runs, gamma 2, 4 and 8; a draft pass costs the same for all its rows; n = {n}'
    for key, other in ('sd-tree, B = 2', 'sd'), ('sd-tree', 'sd'), ('side 1', 'sd-tree, B = 2'):
        text = f'trees in one pass, temperature 1: modelled speed of {key} over {other}, each at its best'
        yield Claim(text, 'ours', 1.02, texts.places,
                    partial(hedge_speed, texts=texts, key=key, other=other),
                    'Branches begin alike, and most blocks need one of them', note)


def broken_claims(texts, key, where):
    """What becomes of blocks of four that fail."""
    share = partial(hedge_share, texts=texts, key=key, depth=4)
    failures, there, mended = texts.broken(key, 4, texts.places)
    name = f'hedge, {key}, {where}'
    yield Claim(f'{name}: share of failing blocks that fail where a side branch stands', 'ours', 0.5,
                texts.places, partial(share, part=1, whole=0), FAILED, f'gamma 4; of {failures} blocks')
    yield Claim(f'{name}: share of these failures that the second choice mends', 'ours', 0.4, texts.places,
                partial(share, part=2, whole=1), 'The right token is no favourite of the draft',
                f'gamma 4; {mended} of {there} blocks')


def hedge_table(texts, title):
    """Modelled speeds over the first setting by task, each at its best depth."""
    base = texts.rates(texts.keys[0], texts.places).max(1)
    rows = []
    for key in texts.keys:
        cells = (texts.rates(key, texts.places).max(1) / base).tolist()
        rows.append((key, float(numpy.exp(mean(numpy.log(cells)))), *cells))
    return PageTable((title, 'mean', *texts.families), rows)


# ----------------------------------------------------------------------------------------------------- tables

def tables(stored):
    """The numbers behind the claims."""
    found = []
    if 'votes' in stored and 'passes' in stored:
        texts = Texts(stored['votes'].rows)
        budget = tuned(texts, pass_cost(stored))
        tried = [(BY_TASK, texts)]
        if 'spots' in stored:
            tried.append((CHECKS, checked_texts(stored)))
        found += [family_table(tried, budget), base_table(stored, texts, budget), vote_table(texts, budget),
                  law_table(texts), branch_table(texts)]
        if 'spots' in stored:
            found.append(spot_table(stored, budget))
        if 'fits' in stored:
            found.append(fit_table(stored, texts, budget))
    for temperature in temperatures(stored):
        runs = real_texts(stored, temperature)
        found += [run_table(runs, temperature), kept_table(runs, temperature)]
    if 'checked' in stored:
        found.append(checked_table(stored['checked'].rows))
    if 'hedged' in stored and 'pass_costs' in stored:
        for temperature in (0, 1):
            texts = HedgeTexts(stored, temperature)
            if texts.rows:
                title = f'modelled speed over sd, each at its best gamma, temperature {temperature}'
                found.append(hedge_table(texts, title))
    if 'trees' in stored:
        found.append(hedge_table(HedgeTexts(stored, 1, 'trees'), 'likewise, trees in one pass'))
    return found


def family_table(tried, budget):
    """The verdicts on each task, which one over all tasks hides; tried: (rivalries, Texts)."""
    rows = []
    for rivalries, texts in tried:
        parts = [texts.of(family) for family in texts.families]
        for rivalry in rivalries:
            cells = []
            if not are_there(texts, rivalry.key, rivalry.other):
                continue
            for part in parts:
                found = judge(rivalry.claim(part, budget))
                cells.append(f'{found.figure:.3f} ({found.low:.3f} to {found.high:.3f}) {found.verdict}')
            rows.append((rivalry.text, f'{rivalry.line:g}', *cells))
    return PageTable(('kept a target pass, by task', 'line', *texts.families), rows)


def base_table(stored, texts, budget):
    """Greedy sd, by task: its tuned depth and what it comes to; its modelled time at other depths."""
    depths = texts.depths[GREEDY]
    others = depths[3], depths[7], depths[11], *depths[-3:]
    sums = texts.summed(GREEDY, texts.places)
    seconds = pass_cost(stored).seconds(sums)                                   # [tasks, depths]
    rows = []
    for task, family in enumerate(texts.families):
        best = depths.index(budget.depths[family])
        cells = [seconds[task, depths.index(depth)] / seconds[task, best] for depth in others]
        rows.append((family, depths[best], sums.spent[task, best], sums.length[task, best], *cells))
    head = ('tuned greedy sd', 'depth', 'positions a token', 'kept a cycle',
            *(f'modelled time at {depth} over that' for depth in others))
    return PageTable(head, rows)


def vote_table(texts, budget):
    """What every vote keeps at the budgets."""
    parts = [texts] + [texts.of(family) for family in texts.families]
    rows = []
    for key in texts.depths:
        rows.append((key, *(part.at_budget(key, budget, part.places).length for part in parts)))
    return PageTable(('kept a target pass at the budget', 'all tasks', *texts.families), rows)


def law_table(texts):
    """The laws of the first token beside the target's; a text counts once, however many places it has."""
    rows = []
    for key in ('q', *LAWS):
        cells = []
        for what in ('nats', 'same'):
            cells.append(mean(row['laws'][key][what] / row['places'] for row in texts.rows))
        rows.append((key, *cells))
    return PageTable(('law of the first token', "the target's nats under it", 'with its favourite first'),
                     rows)


def branch_table(texts):
    """The best of four branches by task, and votes of other numbers of branches, by depth."""
    lines = []
    for family in texts.families:
        lines.append((f'the best of four branches, {family}', 'oracle-top1', texts.of(family)))
    for name, key in ('B = 2', 'lite, B = 2'), ('B = 4', 'lite'), ('B = 8', 'lite, B = 8'):
        lines.append((f'ecsv-lite, {name}', key, texts))
    rows = []
    for name, key, part in lines:
        if not are_there(part, key):
            continue
        rows.append((name, *(gain_at_depth(part.places, part, key, GREEDY, depth) for depth in (2, 4, 8))))
    return PageTable(('over greedy sd at the same depth', 'k = 2', 'k = 4', 'k = 8'), rows)


def spot_table(stored, budget):
    """The variants of spot checks, on the texts that have them all."""
    votes = named(stored['votes'].rows)
    most = max(len(row['votes']) for row in stored['spots'].rows)
    rows = []
    for row in stored['spots'].rows:
        if len(row['votes']) == most:
            vote = votes[row['family'], row['place']]
            rows.append(vote | dict(votes=vote['votes'] | row['votes']))
    texts = Texts(rows)
    checks = [key for key in texts.depths if key.startswith('spot')]
    lines = []
    for key in (GREEDY, 'vote-unif', 'ecsv', 'prefix', *checks):
        sums = texts.at_budget(key, budget, texts.places)
        lines.append((key, sums.block, sums.length, sums.yielded, sums.spent))
    head = (f'spot checks, n = {len(rows)}', 'kept a cycle', 'kept a target pass', 'tokens a target pass',
            'positions a token')
    return PageTable(head, lines)


def fit_table(stored, texts, budget):
    """The fitted weights, and what became of them."""
    fits = fits_of(stored)
    lessons = stored['lessons'].rows
    rows = []
    for name, fit in fits.items():
        knobs = fit['weights']
        cells = [name, knobs['a_entropy'], knobs['a_agree'], knobs['a_self']]
        over = gain(texts.places, texts, name, 'ecsv', budget) if name in texts.depths else 1.0
        if fit['bias'] is None:         # not fitted: exp(r) are no odds
            rows.append((*cells, '', '', over))
            continue
        where_fitted = loss(seen_by(fit, lessons), name)
        elsewhere = loss(unseen(fits, lessons), name)
        rows.append((*cells, where_fitted, elsewhere, over))
    head = ('weights', 'a_entropy', 'a_agree', 'a_self', 'log loss where fitted', 'log loss unseen',
            'kept a target pass over default weights')
    return PageTable(head, rows)


def run_table(texts, temperature):
    """Lengths, passes, measured speed of real runs."""
    budget = Budget('sd', dict.fromkeys(texts.families, 4))
    sd = texts.at_budget('sd', budget, texts.places)
    rows = []
    for name in texts.depths:
        sums = texts.at_budget(name, budget, texts.places)
        speed = (sums.tokens / sums.seconds) / (sd.tokens / sd.seconds)
        perplexity = exp(sums.nats / sums.tokens)
        rows.append((name, sums.block, sums.length, sums.yielded, sums.spent, speed, perplexity))
    head = (f'real runs, temperature {temperature}', 'kept a cycle', 'kept a target pass',
            'tokens a target pass', 'positions a token', 'tokens a second over sd, measured',
            "the target's perplexity of the text")
    return PageTable(head, rows)


def kept_table(texts, temperature):
    """How many cycles keep how much at depth 4, and how acceptance varies from text to text."""
    rows = []
    for name in texts.depths:
        counts = numpy.zeros(5)
        rates = []
        for text in texts.rows:
            table = text['votes'][name]
            i = table['depths'].index(4)
            counts += table['by_kept'][i][:5]
            rates.append(table['kept'][i] / max(1, table['judged'][i]))
        rows.append((name, *(counts / counts.sum()), *numpy.quantile(rates, (0.1, 0.5, 0.9))))
    head = (f'depth 4, temperature {temperature}: share of cycles that keep', *map(str, range(5)),
            'acceptance rate of a text: 10 %', '50 %', '90 %')
    return PageTable(head, rows)
