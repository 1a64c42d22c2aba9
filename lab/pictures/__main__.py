"""Draws the README's pictures: `python -m lab.pictures` writes lab/pictures/*.svg anew, in some ten seconds.

What they show comes from stored rows (points.py) and from real cycles (cycles.py) and stands as JSON in each
file's description. Wants matplotlib (requirements-lab.txt).
"""
import argparse
import sys

from lab.measure import embedded
from lab.pictures import cycles, points
from specmini import take_threads


def shown():
    """{picture: what it shows} of all."""
    found = dict(speedup=points.real_speeds(points.REAL), cost=points.speeds_by_cost(points.REAL),
                 front=points.both_pairs())
    for name, cycle in cycles.CYCLES.items():
        found[name] = cycle()
    return found


def main():
    """Runs the program; returns its exit status: 0, or 2 where matplotlib is missing."""
    argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        from lab.pictures import charts, methods, style
    except ImportError as error:
        print(f'lab.pictures: {error}; pip install -r requirements-lab.txt', file=sys.stderr)
        return 2
    take_threads(embedded('target')[0])         # of one, as everywhere: equal figures on any machine
    draw = charts.DRAWN | methods.DRAWN
    for name, figures in shown().items():
        said = points.fronts(figures) if name == 'front' else figures
        style.save(draw[name](figures), name, said)
        print(style.HERE / f'{name}.svg')
    return 0


if __name__ == '__main__':
    sys.exit(main())
