"""The files that the laboratory writes: each whole or not at all, whatever ends its writer."""
import contextlib
import json

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from model import whole


def write_text(where, text):
    with whole(where) as growing:
        growing.write_text(text, encoding='utf-8')


def write_json(where, value):
    write_text(where, json.dumps(value, indent=2) + '\n')


def save_weights(where, weights):
    """Writes a safetensors file of weights {name: tensor}."""
    with one_line(where), whole(where) as growing:
        save_file(weights, growing, metadata=dict(format='pt'))


def save_state(where, state):
    """Writes what torch.load reads."""
    with one_line(where), whole(where) as growing:
        torch.save(state, growing)


@contextlib.contextmanager
def one_line(where):
    """OSError for what these libraries raise where a disk is full."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f'{where}: cannot be written, is the disk full? ({error})') from None
