"""How the pictures look and are written: one palette, one font, white ground, the same bytes each time.

The palette is Okabe and Ito's, which colour-blind readers tell apart; no picture tells by colour alone.
Lengths on a canvas are tenths of an inch, from its lower left corner.
"""
import io
import json
import re
from pathlib import Path as File

import matplotlib
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

from lab.measure import for_json

HERE = File(__file__).parent
MARKS = r'(<g clip-path="[^"]*")>((?:\s*<use [^>]* style="([^"]*)"/>)+)'      # of one kind
WIDTH = 73                  # of a canvas: 700 pixels on a page
BLACK, ORANGE, SKY, GREEN = '#000000', '#E69F00', '#56B4E9', '#009E73'
BLUE, VERMILLION = '#0072B2', '#D55E00'
GREY, PALE = '#666666', '#DDDDDD'
LOOKS = dict(       # kind of a token: (ground, edge, style of the edge)
    draft=('#E2F3ED', GREEN, '-'),              # guessed and kept
    out=('#FBE8DD', VERMILLION, '-'),           # guessed and rejected: struck out, too
    target=('#DCEBF5', BLUE, '-'),              # of the target's own
    slim=('#FFF3D6', ORANGE, '-'),              # of the slim target's own
    idle=('#FFFFFF', '#999999', ':'))           # never looked at
SETTINGS = {
    'svg.hashsalt': 'specmini', 'svg.fonttype': 'none', 'font.size': 8.5, 'figure.facecolor': 'white',
    'font.sans-serif': ['DejaVu Sans', 'Verdana', 'Arial', 'sans-serif'], 'axes.spines.top': False,
    'axes.spines.right': False, 'axes.linewidth': 0.6, 'axes.edgecolor': GREY, 'xtick.color': GREY,
    'ytick.color': GREY, 'axes.labelcolor': BLACK, 'xtick.major.width': 0.6, 'ytick.major.width': 0.6,
    'legend.frameon': False}
matplotlib.use('svg')
matplotlib.rcParams.update(SETTINGS)


def canvas(height, width=WIDTH):
    """(figure, axes) of an empty drawing of this size."""
    figure = pyplot.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis('off')
    return figure, axes


def write(axes, x, y, text, color=BLACK, align='left'):
    """A line of text, centred on its height."""
    return axes.text(x, y, text, color=color, ha=align, va='center_baseline')


def headline(axes, text, below):
    """What the picture says, and in grey what it is of."""
    _, top = axes.get_ylim()
    write(axes, 1, top - 1.8, text).set(fontsize=10, fontweight='bold')
    write(axes, 1, top - 4.2, below, GREY)


def token(axes, middle, text, kind, width=5.4):
    """A token in its box around this point."""
    x, y = middle
    ground, edge, line = LOOKS[kind]
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 1), width, 2, boxstyle='round,pad=0,rounding_size=0.4',
                                  facecolor=ground, edgecolor=edge, linestyle=line, linewidth=1))
    write(axes, x, y, text, align='center')
    if kind == 'out':
        axes.plot([x - width / 2 + 0.5, x + width / 2 - 0.5], [y, y], color=VERMILLION, linewidth=1.2)


def rule(axes, x, y, color=GREY, style='-'):
    """A thin line; x, y: pairs of its ends."""
    axes.plot(x, y, color=color, linestyle=style, linewidth=0.8)


def bar(axes, corner, size, color):
    """A filled rectangle without an edge; corner: the lower left one, size: width and height."""
    width, height = size
    x, y = corner
    axes.fill([x, x + width, x + width, x], [y, y, y + height, y + height], color=color, linewidth=0)


def save(figure, name, shown):
    """Writes NAME.svg, with what it shows as JSON in its description: so is it compared, and read again."""
    metadata = dict(Date=None, Creator='python -m lab.pictures', Title=name,
                    Description=json.dumps(for_json(shown), ensure_ascii=False))
    written = io.StringIO()
    figure.savefig(written, format='svg', metadata=metadata)
    pyplot.close(figure)
    (HERE / f'{name}.svg').write_text(lean(written.getvalue()), encoding='utf-8')


def lean(svg):
    """The picture with the style of many equal marks on their group, where it is inherited, not on each."""
    return re.sub(MARKS, lambda m: f'{m[1]} style="{m[3]}">' + m[2].replace(f' style="{m[3]}"', ''), svg)
