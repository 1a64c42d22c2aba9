"""A checkpoint of several times the cost that writes the same text: `python -m lab.deepen FOLDER OUT 5`.

Each layer is followed by copies of it whose norms and biases are 0: a copy multiplies and attends as the
layer does, and adds 0. So any program that loads the folder computes a network of so many times the layers,
and writes the text of the one that it was made of.
"""
import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path as File

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lab import at_least, new_folder
from model import MALFORMED, naming, read_json, weight_files
from specmini import exit_status


def deepen(folder, out, times):
    """Writes the folder `out`, a file of weights for each layer."""
    with naming(folder, MALFORMED):
        config = read_json(folder / 'config.json')
        layers = config['num_hidden_layers'] * times
        opened = [safe_open(file, 'pt') for file in weight_files(folder)]
        source = {name: weights for weights in opened for name in weights.keys()}
    for file in folder.iterdir():
        own = file.name == 'calibration.json' or 'index' in file.name
        if file.suffix in ('.json', '.jinja') and not own:
            shutil.copy(file, out)
    if config.get('layer_types'):
        config['layer_types'] = [kind for kind in config['layer_types'] for _ in range(times)]
    config |= dict(num_hidden_layers=layers, max_window_layers=layers)
    (out / 'config.json').write_text(json.dumps(config, indent=1))
    files = [{name: name for name in source if '.layers.' not in name}]     # {name there: name in the source}
    for i in range(layers):
        own, deep = f'.layers.{i // times}.', f'.layers.{i}.'
        files.append({name.replace(own, deep): name for name in source if own in name})
    index = {}
    for i, names in enumerate(files, -1):
        tensors = {name: source[old].get_tensor(old) for name, old in names.items()}
        if i % times and i >= 0:                        # a copy: its norms and biases are 0
            tensors = {name: torch.zeros_like(x) if x.ndim == 1 else x for name, x in tensors.items()}
        file = f'model-{i + 1:05}.safetensors'
        with naming(out / file, SafetensorError):
            save_file(tensors, out / file, metadata=dict(format='pt'))
        index |= dict.fromkeys(names, file)
    (out / 'model.safetensors.index.json').write_text(json.dumps(dict(metadata={}, weight_map=index)))


def run():
    parser = argparse.ArgumentParser(prog='python -m lab.deepen', description=__doc__.split('\n')[0])
    parser.add_argument('folder', type=File, help='a Hugging Face folder')
    parser.add_argument('out', type=File, help='the folder to write')
    parser.add_argument('times', type=at_least(2), help='how many times as many layers')
    args = parser.parse_args()
    with new_folder(args.out) as begun:
        deepen(args.folder, begun, args.times)


main = partial(exit_status, 'lab.deepen', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
