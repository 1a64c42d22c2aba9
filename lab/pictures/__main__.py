"""Draws the chart: `python -m lab.pictures` writes speedup.svg anew from stored rows.

What it shows stands as JSON in the file's description. The other pictures are kept as files. The palette is
Okabe and Ito's, which colour-blind readers tell apart. Wants matplotlib.
"""
import json
from pathlib import Path as File

import matplotlib
from matplotlib import pyplot

from lab.judge import Pair, at, knob, over, plain_sd
from lab.measure import for_json
from lab.times import speedup

HERE = File(__file__).parent
WIDTH = 7.3                 # inches of a canvas: 700 pixels on a page
BLACK, SKY, VERMILLION, GREY = '#000000', '#56B4E9', '#D55E00', '#666666'
SETTINGS = {
    'svg.hashsalt': 'specmini', 'svg.fonttype': 'none', 'font.size': 8.5, 'figure.facecolor': 'white',
    'font.sans-serif': ['DejaVu Sans', 'Verdana', 'Arial', 'sans-serif'], 'axes.spines.top': False,
    'axes.spines.right': False, 'axes.linewidth': 0.6, 'axes.edgecolor': GREY, 'xtick.color': GREY,
    'ytick.color': GREY, 'axes.labelcolor': BLACK, 'xtick.major.width': 0.6, 'ytick.major.width': 0.6,
    'legend.frameon': False}
REAL = 'qwen-1.5b+0.5b'     # the pair of real models
LONGEST = 12                # block that the formula is drawn for
GAMMAS = range(1, LONGEST + 1)
ALPHAS = {0.9: '-', 0.8: '--', 0.7: '-.', 0.5: ':'}     # acceptance rate: its line
CHEAP = 0.05                # of a plain step: a draft pass where drafting costs next to nothing


# ---------------------------------------------------------------------------------------------- the formula

def real_speeds(pair):
    """What the timed texts of the real pair took and kept.

    c, v[n]: of its draft pass, and of its target's over n positions, in plain steps; alpha: the share of the
    judged draft tokens that `sd gamma=3` kept; timed: {gamma: speed}.
    """
    costs = pair.costs
    v = [0.0] + [at(costs['target/full'], n) for n in range(1, LONGEST + 2)]
    frame = pair.frame('clock')
    timed = {int(knob(name, 'gamma')): over(frame, name, 'ar').figure for name in plain_sd(frame)}
    mine = frame[frame.setting == 'sd gamma=3']
    return dict(c=costs['draft/full'][1], v=v, alpha=float(mine.kept.sum() / mine.judged.sum()), timed=timed)


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
          f'v = {(shown["v"][5] - 1) / 4:.2f}, measured on a pass over five positions')
    own = [speedup(shown['alpha'], gamma, shown['c'], shown['v'][gamma + 1]) for gamma in GAMMAS]
    right.plot(GAMMAS, own, color=BLACK, linewidth=1, label=f'measured acceptance, {shown["alpha"]:.2f}')
    timed = zip(*shown['timed'].items())
    right.plot(*timed, 'X', color=VERMILLION, markersize=7, label='measured speed')
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
    shown = real_speeds(Pair('best', REAL))
    save(speedup_chart(shown), 'speedup', shown)
    print(HERE / 'speedup.svg')


if __name__ == '__main__':
    main()
