"""The laboratory: a folder for each paper, tasks, embedded models, tests; see README.md."""
import argparse
import warnings

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; see specmini.py


def at_least(lowest, kind=int):
    """The argparse type of a number that is at least `lowest`."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value < 1e9:
            raise argparse.ArgumentTypeError(f'{text} found, {lowest:g} or more expected')
        return value
    return read
