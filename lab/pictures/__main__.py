"""Draws the README's pictures: `python -m lab.pictures` writes lab/pictures/*.svg anew, in some ten seconds.

What they show comes from stored rows (points.py) and from real cycles (cycles.py) and stands as JSON in each
file's description. flow.svg and cache.svg are by hand. Wants matplotlib (requirements-lab.txt).
"""
from lab.measure import embedded
from lab.pictures import charts, cycles, methods, points, style
from specmini import take_threads


def main():
    take_threads(embedded('target')[0])         # of one, as everywhere: equal figures on any machine
    draw = charts.DRAWN | methods.DRAWN
    shown = dict(speedup=points.real_speeds(points.REAL), cost=points.speeds_by_cost(points.REAL))
    shown |= {name: cycle() for name, cycle in cycles.CYCLES.items()}
    for name, figures in shown.items():
        style.save(draw[name](figures), name, figures)
        print(style.HERE / f'{name}.svg')


if __name__ == '__main__':
    main()
