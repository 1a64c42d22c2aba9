"""Which composition is fastest at an agreement with the target, judged by what lab/best/record.py stored.

A setting is chosen for each family on one half of its texts and judged on the other, both ways round; so is
the gamma of the `sd` that it is compared with. What is resampled are texts, and with them the choice.
"""
import functools
import math

import numpy

from lab.common import Claim, PageTable, mean

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
SD = 'sd'                           # a setting: sd 4, with its gamma
LOOKED_UP = 'looked up, else'       # likewise: what else drafts behind it
LEVELS = {1.0: 1.25, 0.99: 1.5, 0.95: 1.5}      # agreement: the speed over sd that is aimed at
SHOWN = 36                          # settings in a page's table
# agreement: the share of the tokens that the target would have written behind the same text


class Costs:
    """What the passes of stored runs take, in plain decoding's steps."""

    def __init__(self, row):
        self.step = row['target'][1]
        self.target = row['target']
        self.readers = dict(draft=row['draft'] / self.step, slim=row['slim'])
        self.lossless = set(row['lossless'])

    def passes(self, path, counts):
        """Steps that the passes of a path take; counts: {positions: passes}."""
        reader, name = path.split('/')
        share = self.readers['slim'] if 'slim' in name else self.readers.get(reader, 1.0)
        total = 0.0
        for positions, count in counts.items():
            total += count * share * self.of_positions(int(positions))
        return total

    def of_positions(self, n):
        """Steps that a target pass over n positions takes; the longest in proportion."""
        measured = min(n, len(self.target) - 1)
        return self.target[measured] * n / measured / self.step

    def run(self, run):
        """Steps that a run takes."""
        return sum(self.passes(path, counts) for path, counts in run['passes'].items())


class Runs:
    """All stored runs, figures of S settings and R texts in arrays [R, S].

    steps: that a run takes, of plain decoding. What is resampled are the numbers of texts.
    """

    def __init__(self, stored):
        costs = Costs(stored['costs'].rows[0])
        rows = stored['compositions'].rows
        self.size = len(rows)
        self.names = list(rows[0]['runs'])
        self.families = numpy.array([row['family'] for row in rows])
        self.places = numpy.array([row['place'] for row in rows])
        self.lossless = numpy.array([name in costs.lossless for name in self.names])
        self.usual = numpy.array([name.startswith(f'{SD} ') for name in self.names])    # plain sd, by gamma
        self.sums = {}                                          # figure: [R, S]
        for figure in ('tokens', 'wrong', 'seconds'):
            self.sums[figure] = numpy.array([[run[figure] for run in row['runs'].values()] for row in rows])
        self.sums['steps'] = numpy.array([[costs.run(run) for run in row['runs'].values()] for row in rows])

    def total(self, figure, texts):
        """[S] the sum of a figure over these texts, by their numbers."""
        return self.sums[figure][texts].sum(0)

    def pace(self, texts, clock='steps'):
        """[S] tokens a step, or a second."""
        return self.total('tokens', texts) / self.total(clock, texts)

    def agreement(self, texts):
        """[S] the share of the tokens that the target would have written."""
        return 1 - self.total('wrong', texts) / self.total('tokens', texts)

    def allowed(self, texts, level):
        """[S] whether a setting may be chosen: at level 1 the lossless ones, else those that agree so far."""
        if level == 1:
            return self.lossless
        return self.lossless | (self.agreement(texts) >= level)

    def fastest(self, texts, among):
        """The number of the setting, among these [S], that writes most tokens a step in these texts."""
        return int(numpy.where(among, self.pace(texts), 0).argmax())

    def of_families(self, texts):
        """{family: its texts, of these}."""
        texts = numpy.asarray(texts)
        return {name: texts[self.families[texts] == name] for name in dict.fromkeys(self.families)}

    def choices(self, level, texts):
        """(texts, fastest composition, fastest plain sd) of both halves of each family, chosen on the other.

        None where a resample has no two halves of a family.
        """
        for theirs in self.of_families(texts).values():
            odd = self.places[theirs] % 2 == 1
            if not odd.any() or odd.all():
                continue
            for chosen_on, judged_on in ((theirs[odd], theirs[~odd]), (theirs[~odd], theirs[odd])):
                best = self.fastest(chosen_on, self.allowed(chosen_on, level))
                yield judged_on, best, self.fastest(chosen_on, self.usual)

    def speed(self, level, clock, texts):
        """How much faster than tuned sd the fastest composition is: the geometric mean of `choices`."""
        found = []
        for judged_on, best, usual in self.choices(level, texts):
            pace = self.pace(judged_on, clock)
            found.append(math.log(pace[best] / pace[usual]))
        return math.exp(mean(found)) if found else math.nan

    def agreed(self, level):
        """The least agreement of a chosen setting on a half that it was judged on."""
        return min(self.agreement(texts)[best] for texts, best, _ in self.choices(level, range(self.size)))

    def over_tuned(self):
        """[S] the speed over each family's fastest plain sd, on all of its texts: the geometric mean."""
        logs = []
        for texts in self.of_families(range(self.size)).values():
            pace = self.pace(texts)
            logs.append(numpy.log(pace / pace[self.usual].max()))
        return numpy.exp(numpy.mean(logs, 0))


def runs_of(stored):
    """The Runs of these records; None where they were not measured."""
    there = {'costs', 'compositions'} <= stored.keys() and stored['compositions'].rows
    return Runs(stored) if there else None


def claims(stored):
    """The claims of these records; none where they were not measured."""
    runs = runs_of(stored)
    if not runs:
        return
    for level, line in LEVELS.items():
        for clock, told in (('steps', 'modelled'), ('seconds', 'measured')):
            text = f'the fastest composition at {level:.0%} agreement over tuned sd, {told}'
            yield Claim(text, 'ours', line, range(runs.size), functools.partial(runs.speed, level, clock),
                        'What one idea spares, another has spared already',
                        f'agreement where it was judged: {runs.agreed(level):.1%} or more; n = {runs.size}')


def chosen_rows(runs):
    """Cells: of each family and level the setting that is fastest on all its texts, and what it does."""
    for family, texts in runs.of_families(range(runs.size)).items():
        pace = runs.pace(texts)
        measured = runs.pace(texts, 'seconds')
        usual = runs.fastest(texts, runs.usual)
        for level in LEVELS:
            best = runs.fastest(texts, runs.allowed(texts, level))
            gains = float(pace[best] / pace[usual]), float(measured[best] / measured[usual])
            yield (family, f'{level:.0%}', runs.names[best], f'{runs.agreement(texts)[best]:.1%}',
                   float(pace[best]), *gains, runs.names[usual], float(pace[usual]))


def setting_rows(runs):
    """Cells: of the SHOWN fastest settings, and of plain sd, over tuned sd and over all texts."""
    texts = list(range(runs.size))
    pace = runs.pace(texts)
    over = runs.over_tuned()
    agreement = runs.agreement(texts)
    for place, i in enumerate(numpy.argsort(-over)):
        if place < SHOWN or runs.usual[i]:
            yield (runs.names[i], 'lossless' if runs.lossless[i] else f'{agreement[i]:.1%}', float(over[i]),
                   float(pace[i]))


def tables(stored):
    """The tables of these records."""
    runs = runs_of(stored)
    if not runs:
        return
    yield PageTable(('family (chosen on the texts that are shown)', 'agreement asked', 'fastest composition',
                     'it agrees', 'tokens a step',
                     'over tuned sd, modelled', 'measured', 'tuned sd', 'its tokens a step'),
                    list(chosen_rows(runs)))
    yield PageTable(('setting', 'agreement', "over each family's tuned sd, modelled; mean",
                     'tokens a step, all texts'), list(setting_rows(runs)))
