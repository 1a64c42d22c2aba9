"""Which composition is fastest at an agreement with the target, judged by what lab/best/record.py stored.

A setting is chosen for each family on one half of its texts and judged on the other, both ways round; so is
the gamma of the `sd` that it is compared with. What is resampled are texts, and with them the choice.
"""
import functools
import math

from lab.common import Claim, PageTable, mean

FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
SD = 'sd'                           # a setting: sd 4, with its gamma
LOOKED_UP = 'looked up, else'       # likewise: what else drafts behind it
LEVELS = {1.0: 1.25, 0.99: 1.5, 0.95: 1.5}      # agreement: the speed over sd that is aimed at
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


def with_steps(stored):
    """The rows of `compositions`, each run with the steps that it takes and what it was compared with."""
    costs = Costs(stored['costs'].rows[0])
    rows = []
    for row in stored['compositions'].rows:
        runs = {}
        for name, run in row['runs'].items():
            exact = name in costs.lossless
            runs[name] = dict(run, steps=costs.run(run), lossless=exact)
        rows.append(dict(row, runs=runs))
    return rows


def total(rows, name, figure):
    """The sum of a figure of the runs of this setting."""
    return sum(row['runs'][name][figure] for row in rows)


def pace(rows, name, clock='steps'):
    """Tokens a step, or a second, of a setting."""
    return total(rows, name, 'tokens') / total(rows, name, clock)


def agreement(rows, name):
    """The share of a setting's tokens that the target would have written."""
    return 1 - total(rows, name, 'wrong') / total(rows, name, 'tokens')


def allowed(rows, level):
    """The settings that may be chosen: at level 1 the lossless ones, else those that agree so far."""
    found = []
    for name, run in rows[0]['runs'].items():
        if run['lossless'] or level < 1 and agreement(rows, name) >= level:
            found.append(name)
    return found


def fastest(rows, names):
    """The setting of these names that writes most tokens a step on these texts."""
    return max(names, key=functools.partial(pace, rows))


def plain_sd(rows):
    """The names of plain sd, a gamma each."""
    return [name for name in rows[0]['runs'] if name.startswith(f'{SD} ')]


def halves(rows):
    """[(texts to choose on, texts to judge on)]: the two halves, both ways round; none where one is empty."""
    even = [row for row in rows if row['place'] % 2 == 0]
    odd = [row for row in rows if row['place'] % 2]
    return [(even, odd), (odd, even)] if even and odd else []


def by_family(rows):
    """{family: its rows}."""
    found = {}
    for row in rows:
        found.setdefault(row['family'], []).append(row)
    return found


def speeds(rows, level, clock='steps'):
    """[speed of the fastest composition over tuned sd] of each half of each family."""
    found = []
    for theirs in by_family(rows).values():
        for chosen_on, judged_on in halves(theirs):
            best = fastest(chosen_on, allowed(chosen_on, level))
            usual = fastest(chosen_on, plain_sd(chosen_on))
            found.append(pace(judged_on, best, clock) / pace(judged_on, usual, clock))
    return found


def speed(level, clock, rows):
    """The geometric mean of `speeds`; nan where a resample has no two halves."""
    found = speeds(rows, level, clock)
    return math.exp(mean(math.log(x) for x in found)) if found else math.nan


def claims(stored):
    """The claims of these records; none where they were not measured."""
    if not {'costs', 'compositions'} <= stored.keys() or not stored['compositions'].rows:
        return []
    rows = with_steps(stored)
    found = []
    for level, line in LEVELS.items():
        for clock, told in (('steps', 'modelled'), ('seconds', 'measured')):
            text = f'the fastest composition at {level:.0%} agreement over tuned sd, {told}'
            found.append(Claim(text, 'ours', line, rows, functools.partial(speed, level, clock),
                               'No two ideas here spare the same pass twice', f'n = {len(rows)}'))
    return found


def chosen_rows(rows):
    """Cells: of each family and level the setting that is fastest on all its texts, and what it does."""
    for family, theirs in by_family(rows).items():
        usual = fastest(theirs, plain_sd(theirs))
        for level in LEVELS:
            best = fastest(theirs, allowed(theirs, level))
            yield (family, f'{level:.0%}', best, f'{agreement(theirs, best):.1%}',
                   pace(theirs, best), pace(theirs, best) / pace(theirs, usual),
                   pace(theirs, best, 'seconds') / pace(theirs, usual, 'seconds'), usual, pace(theirs, usual))


def setting_rows(rows):
    """Cells: of each setting over all texts, the fastest first."""
    names = sorted(rows[0]['runs'], key=functools.partial(pace, rows), reverse=True)
    plain = pace(rows, 'plain', 'seconds')
    for name in names:
        yield (name, f'{agreement(rows, name):.1%}', pace(rows, name), pace(rows, name, 'seconds') / plain)


def tables(stored):
    """The tables of these records."""
    if not claims(stored):
        return []
    rows = with_steps(stored)
    return [
        PageTable(('family', 'agreement asked', 'fastest composition', 'it agrees', 'tokens a step',
                   'over tuned sd, modelled', 'measured', 'tuned sd', 'its tokens a step'),
                  list(chosen_rows(rows))),
        PageTable(('setting', 'agreement', 'tokens a step of plain decoding, modelled',
                   'speed over plain decoding, measured'), list(setting_rows(rows)))]
