"""The charts: speed by the formula; over the cost of a draft pass."""
from matplotlib import pyplot

from lab.pictures.points import CHEAPEST, DEAREST, LONGEST, speedup
from lab.pictures.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, WIDTH

GAMMAS = range(1, LONGEST + 1)
ALPHAS = {0.9: '-', 0.8: '--', 0.7: '-.', 0.5: ':'}     # acceptance rate: its line
CHEAP = 0.05                # of a plain step: a draft pass where drafting costs next to nothing
METHOD_COLORS = {'sd': BLACK, 'payoff': BLUE, 'cmasd': VERMILLION, 'via, without 4': ORANGE,
                 'ecsv-lite': GREEN}
PAPERS = 0.02, 0.1          # costs of a draft pass of the papers' pairs


# ---------------------------------------------------------------------------------------------- the formula

def speedup_chart(shown):
    """Curves of the formula at a cheap draft, and at what the real pair's passes take, with its points."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH / 10, 3.5))
    figure.subplots_adjust(left=0.065, right=0.975, top=0.85, bottom=0.13, wspace=0.2)
    curves(left, CHEAP, [1.0] * (LONGEST + 2))
    title(left, f'c = {CHEAP:g}: a cheap draft', 'v = 1: five positions take as long as one')
    left.text(1.6, 0.58, '(1 − α^(γ+1)) / (1 − α) tokens a cycle')
    left.text(1.6, 0.2, 'in the time of γ c + v plain steps')
    curves(right, shown['c'], shown['v'])
    title(right, f'c = {shown["c"]:.2f}: the real pair on a CPU',
          f'v as measured: {shown["v"][5]:.2f} for five positions')
    measured_curve(right, shown)
    for axes in (left, right):
        axes.axhline(1, color=GREY, linewidth=0.6)
        axes.set(xlim=(0.5, 13.6), xticks=[1, 2, 4, 6, 8, 10, 12])
        axes.set_xlabel('γ, tokens drafted a cycle')
    left.set(ylim=(0, 5))
    left.set_ylabel('times the speed of plain decoding')
    right.set(ylim=(0, 1.9))
    return figure


def title(axes, text, below):
    """Two lines above the axes, the second in grey."""
    first = axes.annotate(text, (0, 1), (0, 23), 'axes fraction', 'offset points')
    first.set(fontsize=9.5, fontweight='bold')
    axes.annotate(below, (0, 1), (0, 9), 'axes fraction', 'offset points', color=GREY)


def curves(axes, c, v):
    """The formula's curve for each of ALPHAS, with its name at its end."""
    for alpha, style in ALPHAS.items():
        speeds = [speedup(alpha, gamma, c, v) for gamma in GAMMAS]
        axes.plot(GAMMAS, speeds, color=SKY, linestyle=style, linewidth=1.4)
        name = f'α = {alpha:g}' if alpha == 0.5 else f'{alpha:g}'
        axes.annotate(name, (12.15, speeds[-1]), color=GREY, va='center_baseline')


def measured_curve(axes, shown):
    """The curve at the pair's own acceptance, and what the clock says."""
    alpha = shown['alpha']
    speeds = [speedup(alpha, gamma, shown['c'], shown['v']) for gamma in GAMMAS]
    axes.plot(GAMMAS, speeds, color=BLACK, linewidth=1, label=f'α = {alpha:.2f}, its own')
    timed = shown['timed']
    axes.plot(timed.keys(), timed.values(), 'X', color=VERMILLION, markersize=7,
              label='its runs by the clock')
    axes.legend(loc='lower left', handletextpad=0.2, borderaxespad=0.2)


# ---------------------------------------------------------------------------------- the cost of a draft pass

def cost_chart(shown):
    """A line a method over the cost of a draft pass, dashed where it is lossy, with what the clock says."""
    figure, axes = pyplot.subplots(figsize=(WIDTH / 10, 4))
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
    axes.set(xscale='log', xlim=(CHEAPEST, DEAREST), ylim=(0, None), xticks=[0.02, 0.05, 0.1, 0.2, 0.36, 0.5])
    axes.set_xticklabels(['0.02', '0.05', '0.1', '0.2', '0.36', '0.5'])
    axes.minorticks_off()
    axes.set_xlabel("c, cost of a draft pass in the target's passes")
    axes.set_ylabel('times the speed of plain decoding')
    title(axes, "Qwen2.5-Coder 1.5B with 0.5B: each method at its best length for each c",
          "by counts of passes; crosses: by the clock; dashed: lossy; grey: the papers' pairs")
    axes.legend(loc='upper right')
    return figure


DRAWN = dict(speedup=speedup_chart, cost=cost_chart)
