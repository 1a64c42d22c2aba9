"""Draws the charts: `python -m lab.pictures` writes speedup.svg and cost.svg anew from stored rows.

What they show stands as JSON in each file's description. The other pictures are kept as files. The palette is
Okabe and Ito's, which colour-blind readers tell apart. Wants matplotlib (requirements-lab.txt).
"""
import json
from pathlib import Path as File

import matplotlib
import numpy
from matplotlib import pyplot

from lab.best.claims import COSTS, lossless
from lab.judge import CLOCK, MODELLED, Records, over
from lab.measure import for_json
from lab.times import speedup

HERE = File(__file__).parent
WIDTH = 7.3                 # inches of a canvas: 700 pixels on a page
BLACK, ORANGE, SKY, GREEN = '#000000', '#E69F00', '#56B4E9', '#009E73'
BLUE, VERMILLION, GREY = '#0072B2', '#D55E00', '#666666'
SETTINGS = {
    'svg.hashsalt': 'specmini', 'svg.fonttype': 'none', 'font.size': 8.5, 'figure.facecolor': 'white',
    'font.sans-serif': ['DejaVu Sans', 'Verdana', 'Arial', 'sans-serif'], 'axes.spines.top': False,
    'axes.spines.right': False, 'axes.linewidth': 0.6, 'axes.edgecolor': GREY, 'xtick.color': GREY,
    'ytick.color': GREY, 'axes.labelcolor': BLACK, 'xtick.major.width': 0.6, 'ytick.major.width': 0.6,
    'legend.frameon': False}
REAL = 'qwen-1.5b+0.5b'     # the pair of real models
COSTLY = 'qwen-1.5bx5+0.5b'         # the same, each layer of whose target runs five times
LONGEST = 12                # block that the formula is drawn for
GAMMAS = range(1, LONGEST + 1)
ALPHAS = {0.9: '-', 0.8: '--', 0.7: '-.', 0.5: ':'}     # acceptance rate: its line
CHEAP = 0.05                # of a plain step: a draft pass where drafting costs next to nothing
METHOD_COLORS = {'sd': BLACK, 'payoff': BLUE, 'cmasd': VERMILLION, 'via, without 4': ORANGE,
                 'ecsv-lite': GREEN}
PAPERS = 0.02, 0.1          # costs of a draft pass of the papers' pairs
CHEAPEST, DEAREST, STEPS = 0.02, 0.5, 41        # costs that are drawn, evenly spaced in their logarithms


# ---------------------------------------------------------------------------------------------- the formula

def real_speeds(pair):
    """What the timed texts of the real pair took and kept.

    c, v[n]: of its draft pass, and of its target's over n positions, in plain steps; alpha: the share of the
    draft tokens that `sd 3` kept; timed: {gamma: speed}.
    """
    costs = Records('cmasd', pair).costs
    v = [0.0] + [costs.of_pass('target/full', n) for n in range(1, LONGEST + 2)]
    runs = Records('best', pair).runs('compositions')
    timed = {int(name.removeprefix('sd ')): speed for name, speed in speeds_of(runs).items()
             if name.startswith('sd ')}
    alpha = float(runs.share('accepted', 'judged', 'sd 3', runs.every))
    return dict(c=costs.of_pass('draft/full', 1), v=v, alpha=alpha, timed=timed)


def speeds_of(runs):
    """{setting: its speed over plain decoding, by the clock}."""
    texts = runs.every
    plain = runs.starting('ar')
    return {name: float(over(runs, name, plain, CLOCK)(texts)) for name in runs.names}


def speedup_chart(shown):
    """Curves of the formula at a cheap draft, and at what the real pair's passes take, with its points."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, 3.5))
    figure.subplots_adjust(left=0.065, right=0.975, top=0.85, bottom=0.13, wspace=0.2)
    curves(left, CHEAP, [1.0] * (LONGEST + 2))
    title(left, f'c = {CHEAP:g}: a cheap draft', 'v = 0: five positions take as long as one')
    left.text(1.6, 0.58, '(1 − α^(γ+1)) / (1 − α) tokens a cycle')
    left.text(1.6, 0.2, 'in the time of 1 + γ (c + v) plain steps')
    curves(right, shown['c'], shown['v'])
    title(right, f'c = {shown["c"]:.2f}: the real pair on a CPU',
          f'v as measured: {(shown["v"][5] - 1) / 4:.2f} a position, of five')
    own = [speedup(shown['alpha'], gamma, shown['c'], shown['v'][gamma + 1]) for gamma in GAMMAS]
    right.plot(GAMMAS, own, color=BLACK, linewidth=1, label=f'α = {shown["alpha"]:.2f}, its own')
    timed = zip(*shown['timed'].items())
    right.plot(*timed, 'X', color=VERMILLION, markersize=7, label='its runs by the clock')
    right.legend(loc='lower left', handletextpad=0.2, borderaxespad=0.2)
    for axes in (left, right):
        axes.axhline(1, color=GREY, linewidth=0.6)
        axes.set(xlim=(0.5, 13.6), xticks=[1, 2, 4, 6, 8, 10, 12], xlabel='γ, tokens drafted a cycle')
    left.set(ylim=(0, 5), ylabel='times the speed of plain decoding')
    right.set(ylim=(0, 1.9))
    return figure


def title(axes, text, below):
    """Two lines above the axes, the second in grey."""
    axes.annotate(text, (0, 1), (0, 23), 'axes fraction', 'offset points', fontsize=9.5, fontweight='bold')
    axes.annotate(below, (0, 1), (0, 9), 'axes fraction', 'offset points', color=GREY)


def curves(axes, c, v):
    """The formula's curve for each of ALPHAS, with its name at its end."""
    for alpha, style in ALPHAS.items():
        speeds = [speedup(alpha, gamma, c, v[gamma + 1]) for gamma in GAMMAS]
        axes.plot(GAMMAS, speeds, color=SKY, linestyle=style, linewidth=1.4)
        name = f'α = {alpha:g}' if alpha == 0.5 else f'{alpha:g}'
        axes.annotate(name, (12.15, speeds[-1]), color=GREY, va='center_baseline')


# ---------------------------------------------------------------------------------- the cost of a draft pass

def speeds_by_cost(pair):
    """{method: dict(agreement, line, clock)} of a pair with counted runs.

    line: [(c, speed)] at the method's best length for each cost c of a draft pass; clock: what by_clock
    yields. agreement: the lowest of the line; None: it is lossless.
    """
    costs = numpy.geomspace(CHEAPEST, DEAREST, STEPS)
    found = {}
    for method in METHOD_COLORS:
        line, agreements = [], []
        for c in COSTS if method == 'payoff' else numpy.union1d(COSTS, costs):
            runs = Records('best', pair).counted(c)
            names = runs.starting('sd ') if method == 'sd' else at_any_length(runs.names, method, c)
            texts = runs.every
            paces = runs.pace(names, texts, MODELLED)
            line.append((float(c), float(paces.max())))
            agreements.append(float(runs.agreement(names[paces.argmax()], texts)))
        agreement = None if lossless([method]) else min(agreements)
        clock = [cross for timed in (pair, COSTLY) for cross in by_clock(timed, method)]
        found[method] = dict(agreement=agreement, line=line, clock=clock)
    return found


def at_any_length(names, method, cost):
    """The settings of a method in the counted runs; of payoff the one that was told this cost."""
    if method == 'payoff':
        method = f'payoff, c {cost:g}'
    return [name for name in names if name == method or name.startswith((f'{method} ', f'{method}, '))]


def by_clock(pair, method):
    """Yields (cost of a draft pass, speed of the method's fastest timed setting) of a pair, if it has one."""
    records = Records('best', pair)
    timed = speeds_of(records.runs('compositions'))
    speeds = [speed for name, speed in timed.items() if name.startswith(method)]
    if speeds:
        yield records.costs.of_pass('draft/full', 1), max(speeds)


def cost_chart(shown):
    """A line a method over the cost of a draft pass, dashed where it is lossy, with what the clock says."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4))
    figure.subplots_adjust(left=0.065, right=0.985, top=0.88, bottom=0.115)
    axes.axvspan(*PAPERS, color='#F2F2F2', linewidth=0)
    axes.axhline(1, color=GREY, linewidth=0.6)
    for method, what in shown.items():
        color = METHOD_COLORS[method]
        lossy = what['agreement'] is not None
        name = f'{method}: {what["agreement"]:.0%} agreement' if lossy else method
        axes.plot(*zip(*what['line']), '--' if lossy else '-', color=color, linewidth=1.4, label=name)
        if what['clock']:
            axes.plot(*zip(*what['clock']), 'X', color=color, markersize=6, markeredgecolor='white')
    ticks = 0.02, 0.05, 0.1, 0.2, 0.36, 0.5
    axes.set(xscale='log', xlim=(CHEAPEST, DEAREST), ylim=(0, None), xticks=ticks)
    axes.set_xticklabels(map(str, ticks))
    axes.minorticks_off()
    axes.set_xlabel("c, cost of a draft pass in the target's passes")
    axes.set_ylabel('times the speed of plain decoding')
    title(axes, "Qwen2.5-Coder 1.5B with 0.5B: each method at its best length for each c",
          "by counts of passes; crosses: by the clock; dashed: lossy; grey: the papers' pairs")
    axes.legend(loc='upper right')
    return figure


# ------------------------------------------------------------------------------------------------ the files

def save(figure, name, shown):
    """Writes NAME.svg, with what it shows as JSON in its description: so is it compared, and read again."""
    metadata = dict(Date=None, Creator='python -m lab.pictures', Title=name,
                    Description=json.dumps(for_json(shown), ensure_ascii=False))
    figure.savefig(HERE / f'{name}.svg', format='svg', metadata=metadata)
    pyplot.close(figure)


def main():
    matplotlib.use('svg')
    matplotlib.rcParams.update(SETTINGS)
    for name, draw, points in ('speedup', speedup_chart, real_speeds), ('cost', cost_chart, speeds_by_cost):
        shown = points(REAL)
        save(draw(shown), name, shown)
        print(HERE / f'{name}.svg')


if __name__ == '__main__':
    main()
