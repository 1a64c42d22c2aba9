"""The laboratory: a folder for each paper, tasks, embedded models, tests; see README.md."""
import argparse
import contextlib
import shutil
import warnings

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')     # torch asks for it; see specmini.py


def read_bytes(model, path):
    """Weight bytes that a pass on this path streams: the kept sublayers, the last norm and the head.

    A mixture is counted whole; how many of its experts a pass really reads depends on the tokens. A
    toys.Table says itself what a pass reads.
    """
    if hasattr(model, 'pass_bytes'):
        return model.pass_bytes
    parts = [model.model.norm, model.lm_head]
    for layer, *functions in zip(model.model.layers, path.attends, path.ffns):
        sublayers = (layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)
        for modules, function in zip(sublayers, functions):
            parts += modules if function else ()
    return sum(p.numel() * p.element_size() for part in parts for p in part.parameters())


@contextlib.contextmanager
def new_folder(new):
    """A folder to fill; it becomes `new`, a Path, when it is whole. What a killed run left is replaced."""
    from model import require_that
    require_that(not new.exists(), f'{new} exists; give a new name')
    begun = new.with_name(f'.{new.name}.begun')
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    try:
        yield begun
        begun.rename(new)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


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
