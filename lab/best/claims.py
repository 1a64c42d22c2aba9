"""Which composition is the fastest at an agreement with the target, judged by stored runs."""
import numpy

from lab.judge import CLOCK, MODELLED, Claim, PageTable, over, tuned_over

LEVELS = {1.0: 1.25, 0.99: 1.5, 0.95: 1.5}      # agreement: the speed over tuned sd that is aimed at
COPIED = 'summary'          # a family of eight tokens a text, copied from the prompt
SHOWN = 9                   # settings in the page's table
LOSSY = 'ratio', 'cmasd', 'via'


def lossless(names):
    """Those of the settings that write the target's text."""
    return [name for name in names if not name.startswith(LOSSY)]


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
                    figure, CLOCK, headline=level == 1)
    ahead = 'look up, else 3'
    yield Claim(f'{ahead}: share of texts on which it beats sd 3', 'ours', 0.75, everywhere,
                lambda texts: numpy.mean([over(runs, ahead, 'sd 3', CLOCK)([i]) > 1 for i in texts]))


def sweeps(pairs):
    """The fastest settings over all texts of each pair, beside plain sd."""
    rows = []
    for pair, records in pairs.items():
        runs = records.runs('compositions')
        everywhere = numpy.arange(runs.size)
        best = max(usual(runs.names), key=lambda name: runs.pace(name, everywhere, MODELLED))
        ranked = sorted(runs.names, key=lambda name: -runs.pace(name, everywhere, MODELLED))
        for name in dict.fromkeys([*ranked[:SHOWN], best]):
            agreement = 'lossless' if name in lossless([name]) else f'{runs.agreement(name, everywhere):.1%}'
            rows.append((pair, name, agreement, *(over(runs, name, best, kind)(everywhere)
                                                  for kind in (MODELLED, CLOCK))))
        if COPIED in runs.families:
            figure = tuned_over(runs, lossless(runs.names), usual(runs.names), CLOCK)
            rows.append((pair, f'fastest lossless of each family, without {COPIED}, over its own best sd',
                         'lossless', None, figure(numpy.flatnonzero(runs.families != COPIED))))
    return PageTable(('pair', 'setting', 'agreement', 'over the best sd, modelled', 'clock'), rows)
