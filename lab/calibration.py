"""calibration.json, beside a target's weights: what train_mask.py measured on it, bound to those weights.

{"target": fingerprint, section: {...}, ...}. A section of one draft names it under "draft". The sections:
mask: "skip", the sublayers left out (2i: attention of layer i, 2i + 1: its feed-forward), "nested" masks
for more stages, "cost", and "settings" and "tried" {mask: cost}, to resume by; there is no draft in it.
signals: see lab.steps.find_signals. sparse: see lab.passes.sparsity.
"""
import hashlib
import json
import os
import re
from pathlib import Path as File

from model import expect, read_config, read_json, weight_files
from verify import Sparse

FLAGS = dict(signals='--signals ', sparse='--anchors ')     # of train_mask.py, for what is no mask


def fingerprint(folder):
    """16 hex digits that name a model: of its config.json and of 256 samples of each weight file.

    Whole files of 16 GB would take half a minute; retraining changes every sample.
    """
    digest = hashlib.sha256((File(folder) / 'config.json').read_bytes())
    for file in weight_files(File(folder)):
        with open(file, 'rb') as opened:
            for i in range(256):
                opened.seek(i * file.stat().st_size // 256)
                digest.update(opened.read(4096))
    return digest.hexdigest()[:16]


def read_calibration(target, draft=None, needs=()):
    """{section: dict} of a target; ValueError if a section in needs is absent, broken or of other models."""
    if not needs:
        return {}
    where = File(target) / 'calibration.json'
    found = read_json(where) if where.exists() else {}

    def check(holds, said, flag=''):
        expect(holds, f'{where}: {said}; make it with python train_mask.py {flag}--target {target}')
    own = found.get('target')
    check(not found or own == fingerprint(target), f'measured on another target, {own}')
    for name in needs:
        section, flag = found.get(name), FLAGS.get(name, '')
        check(isinstance(section, dict), f'no section {name!r}, which the method needs', flag)
        of = section.get('draft')
        expect(draft or not of, f'{where}: {name!r} is of a pair, there is no draft model; give --draft DIR')
        check(not of or of == fingerprint(draft), f'{name!r} was measured with another draft, {of}', flag)
        fault = FAULTS[name](section, read_config(target).num_hidden_layers)
        check(not fault, fault, flag)
    return found


def sections(methods, mixtures):
    """The names of the sections that these methods need of a target with so many experts a layer."""
    learned = any(m.anchors or m.ffn_quantile or m.moe_skip and any(mixtures)
                  for m in methods if isinstance(m, Sparse))
    return {name for method in methods for name in method.needs} | ({'sparse'} if learned else set())


def is_list(x, of):
    return isinstance(x, list) and all(map(of, x))


def is_numbers(x):
    return is_list(x, lambda y: type(y) in (int, float)) and x != []


def mask_fault(section, L):
    """What does not fit a target of L layers, or '': so for each section."""
    skip, nested = section.get('skip'), section.get('nested', [])
    some = lambda x: is_list(x, lambda y: type(y) is int) and {*x} < {*range(2 * L)}
    said = f'mask skips {skip!r}, nested {nested!r}; expected some, not all, of sublayers 0..{2 * L - 1}'
    return '' if some(skip) and is_list(nested, some) else said


def signals_fault(section, L):
    for name in ('draft_logp', 'draft_grounding', 'target_logp', 'target_grounding'):
        ends = section.get(name)
        if not (is_numbers(ends) and len(ends) == 2 and ends[0] <= ends[1]):
            return f'{name} is {ends!r}, expected two numbers, the smaller first'
    return ''


def sparse_fault(section, L):
    anchors, channels, experts = map(section.get, ('anchors', 'channels', 'experts'))
    good = is_numbers(anchors) and {*anchors} <= {*range(L)} and is_list(channels, is_numbers)
    good = good and is_list(experts, lambda x: is_list(x, is_numbers)) and len(channels) == len(experts) == L
    return '' if good else f'anchors, channels or experts do not fit {L} layers'


FAULTS = dict(mask=mask_fault, signals=signals_fault, sparse=sparse_fault)


def write_calibration(target, name, section, draft=None):
    """Puts one section into the target's calibration.json; those of the same target stay, others go."""
    where, own = File(target) / 'calibration.json', dict(target=fingerprint(target))
    old = read_json(where) if where.exists() else {}
    kept = old if old.get('target') == own['target'] else {}
    new = section | (dict(draft=fingerprint(draft)) if draft else {})
    text = json.dumps(own | kept | {name: new}, indent=1)
    text = re.sub(r'\[[^][{}"]*\]', lambda found: ' '.join(found[0].split()), text)   # numbers on one line
    where.with_suffix('.new').write_text(text + '\n', encoding='utf-8')
    os.replace(where.with_suffix('.new'), where)         # whole or not at all, if interrupted
