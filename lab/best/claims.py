"""Which composition is the fastest at an agreement with the target, judged by stored runs."""
import numpy

from lab.judge import CLOCK, Claim, PageTable, interval, over, tuned_over

LEVELS = {1.0: 1.25, 0.99: 1.5, 0.95: 1.5}      # agreement: the speed over tuned sd that is aimed at
SHOWN = 9                   # settings in the page's table
LOSSY = 'ratio', 'cmasd', 'via', 'cascade', 'specguard'


def lossless(names):
    """Those of the settings that write the target's text."""
    return [name for name in names if not name.startswith(LOSSY) or name == 'cmasd, strict']


def usual(names):
    """The settings of plain sd, by gamma."""
    return [name for name in names if name.startswith('sd ')]


def claims(records):
    """The Claims of one pair's Records."""
    runs = records.runs('compositions')
    everywhere = numpy.arange(runs.size)
    for level, line in LEVELS.items():
        names = lossless(runs.names) if level == 1 else runs.names
        figure = tuned_over(runs, names, usual(runs.names), CLOCK, level)
        yield Claim(f'fastest composition at {level:.0%} agreement over tuned sd', 'ours', line, everywhere,
                    figure, CLOCK)
    ahead = 'look up, else 3'
    yield Claim(f'{ahead}: share of texts on which it beats sd 3', 'ours', 0.75, everywhere,
                lambda texts: numpy.mean([over(runs, ahead, 'sd 3', CLOCK)([i]) > 1 for i in texts]))


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
    """Of each pair the settings by their speed over plain decoding: of the embedded pair the fastest."""
    rows = []
    for pair, records in pairs.items():
        stored = records['compositions'].rows
        runs = records.runs('compositions')
        runs.sums['full'] = runs.array(stored, lambda run: sum(run['passes']['target/full'].values())
                                       if 'target/full' in run['passes'] else None)
        everywhere = numpy.arange(runs.size)
        ranked = sorted(runs.names, key=lambda name: -runs.pace(name, everywhere, CLOCK))
        best = max(usual(runs.names), key=lambda name: runs.pace(name, everywhere, CLOCK))
        shown = dict.fromkeys([*ranked[:SHOWN], best]) if pair == 'embedded' else ranked
        for name in shown:
            agreement = 'lossless' if name in lossless([name]) else f'{runs.agreement(name, everywhere):.1%}'
            figure = over_plain(runs, name)
            low, high = interval(everywhere, figure)
            rows.append((pair, name, figure(everywhere), f'{low:.2f} to {high:.2f}', by_family(runs, name),
                         runs.share('tokens', 'full', name, everywhere), agreement))
    head = 'pair', 'setting', 'over plain', 'from, to', 'by family', 'tokens a full pass', 'agreement'
    return PageTable(head, rows)
