"""The charts: speed by the formula; over the cost of a draft pass; against agreement, and its front."""
from matplotlib import pyplot

from lab.pictures.points import CHEAPEST, DEAREST, LONGEST, front, speedup
from lab.pictures.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, WIDTH

GAMMAS = range(1, LONGEST + 1)
ALPHAS = {0.9: '-', 0.8: '--', 0.7: '-.', 0.5: ':'}     # acceptance rate: its line
CHEAP = 0.05                # of a plain step: a draft pass where drafting costs next to nothing
KINDS = dict(   # kind of a Point: (how it is called, marker, colour, its column among the lossless)
    sd=('sd', 'o', BLACK, 0), plain=('plain decoding', '*', GREY, 0),
    adaptive=('controllers, hedge, look-up', 'D', BLUE, 1), ecsv=('ecsv', 'v', GREEN, 1),
    cmasd=('cmasd, cascade, ratio', '^', VERMILLION, 0), via=('via', 's', ORANGE, 0),
    specguard=('specguard', 'P', SKY, 0))
HEIGHT = 6                  # of the front, inches
METHOD_COLORS = {'sd': BLACK, 'payoff': BLUE, 'cmasd': VERMILLION, 'via, without 4': ORANGE,
                 'ecsv-lite': GREEN, 'specguard, k = 1': SKY}
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
    axes.plot(GAMMAS, speeds, color=BLACK, linewidth=1)
    timed = shown['timed']
    axes.plot(timed.keys(), timed.values(), 'X', color=VERMILLION, markersize=7,
              label='its runs by the clock')
    end = 12.15, speeds[-1] + 0.02
    axes.annotate(f'{alpha:.2f}', end, va='center_baseline', fontweight='bold')
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


# ------------------------------------------------------------------------------------------------ the front

def front_chart(shown):
    """A panel for each pair, below it the names of its front, below both what the marks are."""
    figure, panels = pyplot.subplots(1, 2, figsize=(WIDTH / 10, HEIGHT))
    figure.subplots_adjust(left=0.085, right=0.985, top=0.9, bottom=0.37, wspace=0.16)
    for axes, (pair, points) in zip(panels, shown.items()):
        best = front(points)
        cloud(axes, points)
        mark_front(axes, best)
        title(axes, pair, f'{len(points)} settings; hollow: lossy')
        axes.set_xlabel('agreement with the target')
        for i, point in enumerate(best):
            left = axes.get_position().x0
            loss = 'lossless' if point.lossless else f'{point.agreement:.1%}'
            key = f'{i + 1}  {point.name}: {point.speed:.2f} ({point.low:.2f} to {point.high:.2f}), {loss}'
            figure.text(left, (1.6 - 0.165 * i) / HEIGHT, key)
    panels[0].set_ylabel('times the speed of plain decoding')
    handles = []
    for name, marker, color, _ in KINDS.values():
        handles += panels[0].plot([], [], marker, color=color, label=name)
    figure.legend(handles=handles, loc='lower left', ncols=3, bbox_to_anchor=(0.05, 0.0), handletextpad=0.2,
                  columnspacing=1.5)
    return figure


def cloud(axes, points):
    """All Points, pale: lossy ones hollow by their agreement, lossless ones in a band of their own."""
    lossy = [point.agreement for point in points if not point.lossless]
    span = 1 - min(lossy)
    begin = 1 + 0.04 * span
    end = 1 + 0.24 * span
    axes.axvspan(begin, end, color='#F2F2F2', linewidth=0)
    groups = {}                                         # (kind, lossless): [(x, y)]
    for point in points:
        places = groups.setdefault((point.kind, point.lossless), [])
        places.append((place(point, span), point.speed))
    for (kind, lossless), places in groups.items():
        _, marker, color, _ = KINDS[kind]
        ground = color if lossless else 'white'
        axes.plot(*zip(*places), marker, color=color, markerfacecolor=ground, markersize=5,
                  markeredgewidth=0.8, alpha=0.5)
    low = min(lossy)
    axes.locator_params('x', nbins=5)
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= 1]
    axes.set(xlim=(low - 0.04 * span, end), xticks=ticks)
    axes.set_xticklabels(f'{100 * tick:g}%' for tick in ticks)
    middle = (begin + end) / 2, 0.02
    axes.annotate('lossless', middle, xycoords=('data', 'axes fraction'), color=GREY, ha='center')


def place(point, span):
    """The x of a Point; span: of the agreements in its panel."""
    if not point.lossless:
        return point.agreement
    *_, column = KINDS[point.kind]
    return 1 + (0.08 + 0.06 * column) * span


def mark_front(axes, best):
    """The front's Points, numbered and joined, with their intervals."""
    low, _ = axes.get_xlim()
    span = (1 - low) / 1.04
    xs = [place(point, span) for point in best]
    ys = [point.speed for point in best]
    axes.plot(xs, ys, color=BLACK, linewidth=0.9, drawstyle='steps-post', zorder=1)
    for i, (point, x) in enumerate(zip(best, xs)):
        _, marker, color, _ = KINDS[point.kind]
        ground = color if point.lossless else 'white'
        axes.plot([x, x], [point.low, point.high], color=GREY, linewidth=0.6, zorder=0)
        axes.plot(x, point.speed, marker, color=color, markerfacecolor=ground, markersize=6)
        axes.annotate(str(i + 1), (x, point.speed), xytext=(6, 3), textcoords='offset points', ha='center',
                      fontweight='bold')
    axes.margins(y=0.08)


DRAWN = dict(speedup=speedup_chart, cost=cost_chart, front=front_chart)
