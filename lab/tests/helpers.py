"""Shared by the tests: tiny checkpoints, stored rows, two runners of the program, and how a refusal looks."""
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path as File

import pytest
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import specmini
from kernels import has_half
from lab.toys import (SIZES, Table, enumerate_law, exact_law, network, session, slim_session,
                      variation)
from model import BadInput, Reader, checkpoint_views
from verify import METHODS

HOME = File(specmini.__file__).parent
EMBEDDED = HOME / 'lab/models'
torch.set_num_threads(1)        # the networks here are tiny

LINE = [i % 11 for i in range(50)]                  # a text of ids for networks of 11 tokens
MIXED = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=4)
MIXED_TWO = MIXED | dict(num_hidden_layers=2, norm_topk_prob=True)
SMALL = dict(dense_below=8, block=4, locals=1)      # knobs of sparse for texts of 64 tokens
LEARNED = dict(experts=[[[0.0] * 11 + [0.2] * 10, [0.0] * 11 + [0.5] * 10]] * 4,
               channels=[[0.0] * 11 + [0.4] * 10] * 4, anchors=[0, 2, 1, 3])
LEARNED_TWO = {name: tables[:2] for name, tables in LEARNED.items()} | dict(anchors=[0, 1])
RANGES = dict(draft_logp=[-4, 0], draft_grounding=[0, 1])

needs_gloo = pytest.mark.skipif(
    torch.cuda.is_available() or not torch.distributed.is_available()
    or not torch.distributed.is_gloo_available(), reason='there is a CUDA device, or no gloo')

needs_half = pytest.mark.skipif(not has_half(), reason='this CPU has no product of fp32 with fp16 weights')


def case(name, *values, slow=False):
    """One case of a parametrized test, under this id; slow: it takes more than about a second."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*values, id=name, marks=marks)


# ------------------------------------------------------------------------------------------ tiny checkpoints

def byte_network(seed=0, vocab=257, **sizes):
    """A random network in fp32 for the tokens of bytes_tokenizer."""
    return network(seed, vocab, torch.float32, **sizes)


def bytes_tokenizer(extra=()):
    """A byte-level tokenizer without merges: 256 bytes, <eos>, and whatever is extra."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ['<eos>', *extra]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<eos>'])
    return tokenizer


def template_of(word, i):
    """A tokenizer that puts a special token of this id before every text."""
    tokenizer = bytes_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=f'{word} $A', special_tokens=[(word, i)])
    return tokenizer


def tiny(folder, seed=0, sizes=None, weights=None, tokenizer=None, files=None, vocab=257, **config):
    """Makes the path `folder` a checkpoint of a small random network, and returns it.

    sizes: of the network, which config.json repeats. config: further values of config.json; None leaves one
    out. weights: function {name: tensor} -> those to store. tokenizer: one, or changes of bytes_tokenizer's
    JSON. files: {name: content}, see `put`.
    """
    sizes = sizes or {}
    views = checkpoint_views(byte_network(seed, vocab, **sizes))
    tensors = {name: view.contiguous() for name, view in views.items()}
    changes = tokenizer if isinstance(tokenizer, dict) else {}
    tokenizer = tokenizer if tokenizer and not changes else bytes_tokenizer()
    usual = dict(model_type='llama', vocab_size=vocab, eos_token_id=256)
    raw = usual | SIZES | sizes | config
    folder.mkdir(parents=True, exist_ok=True)
    put(folder, {'config.json': {name: value for name, value in raw.items() if value is not None},
                 'model.safetensors': save(weights(tensors) if weights else tensors),
                 'tokenizer.json': json.loads(tokenizer.to_str()) | changes})
    put(folder, files or {})
    return folder


def put(folder, files):
    """Writes files {name: content} into a folder; a content is bytes, a text or JSON; None deletes it."""
    for name, content in files.items():
        file = folder / name
        if content is None:
            file.unlink()
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            file.write_text(text, encoding='utf-8')


def tiny_pair(home):
    """The flags of a run on two tiny checkpoints: twenty tokens after a short prompt."""
    target = tiny(home / 'target', 0)
    draft = tiny(home / 'draft', 1)
    return '--target', target, '--draft', draft, '--prompt', 'hello', '--max-new', 20


# ------------------------------------------------------------------------------------------------- rows

def stored(where, head, rows):
    """Writes a file of stored rows, the header and then a row a line, and returns its path."""
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json_lines([head, *rows]), encoding='utf-8')
    return where


def json_lines(rows):
    """The text of a file of these rows."""
    return ''.join(json.dumps(row) + '\n' for row in rows)


# ------------------------------------------------------------------------------------------ the program

def program(capsys, *flags, main=specmini.main):
    """(exit status, stdout, stderr) of one run in this process; main: of specmini.py or of a lab program."""
    words = [str(flag) for flag in flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['program', *words])     # the programs of the lab read it themselves
        try:
            status = main(words) if main is specmini.main else main()
        except SystemExit as end:
            status = end.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def subprogram(*command, folder=HOME, timeout=100, **environment):
    """(exit status, stdout, stderr) of `python COMMAND` in a process of its own."""
    command = [sys.executable, *map(str, command)]
    settings = os.environ | dict(OMP_NUM_THREADS='1') | environment
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def refused(capsys, named, *flags, main=specmini.main):
    """The line of a run that ends with status 2 and this line on stderr, which names this; nothing else."""
    status, out, err = program(capsys, *flags, main=main)
    assert (status, out) == (2, '') and err.endswith('\n'), (flags, out, err)
    assert str(named) in err and err.count('\n') == 1, (flags, err)
    return err


def refuses(named, function, *args):
    """Asserts that a call raises a BadInput in one line, which names this."""
    with pytest.raises(BadInput) as refusal:
        function(*args)
    text = str(refusal.value)
    assert str(named) in text and '\n' not in text, text


def reported(capsys, *flags):
    """The JSON object of the last prompt of a run."""
    status, out, err = program(capsys, *flags, '--json')
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def interrupt(monkeypatch, where, name, n):
    """Presses Ctrl-C at the end of the n-th call of where.name; returns the list of the calls' results."""
    real = getattr(where, name)
    results = []

    def call(*args):
        results.append(real(*args))
        if len(results) == n:
            raise KeyboardInterrupt
        return results[-1]
    monkeypatch.setattr(where, name, call)
    return results


# ---------------------------------------------------------------------------------------- sparse paths, coins

def thin(model, name='sparse', **knobs):
    """The target's full path as a session of sparse verifying with these knobs reads it."""
    method = METHODS[name](**SMALL | knobs)
    learned = {name: tables[:len(model.full.attends)] for name, tables in LEARNED.items()}
    s = session(model, None, [0], 1, sparse=method, calibration=dict(sparse=learned))
    return s.target_path()


def law_gap(method, vocab=3, horizon=3, **settings):
    """The total variation between a method's law of texts and the target's, every draw enumerated."""
    settings = dict(temperature=1.0) | settings
    law = enumerate_law(Table(1, vocab), Table(2, vocab), method, horizon, **settings)
    for name in ('text', 'calibration'):                # of SpecGuard's steps
        settings.pop(name, None)
    return variation(law, exact_law(Table(1, vocab), horizon, **settings))


def letters(ids):
    """A text for ids in which every fourth id ends a line, and so a step."""
    return ''.join('a\nbc'[i % 4] for i in ids)


def full_session(tokens_left, eos=(), length=23, **settings):
    """A greedy Session of a random pair with every calibration, on a prompt of this length."""
    s = slim_session(3, tokens_left, text=letters, eos=frozenset(eos))
    s.calibration |= dict(signals=RANGES, sparse=LEARNED)
    s.tokens = [1, 2, 3, *LINE][:length]
    readers = dict(target=Reader(s.target.model, 64), drafter=Reader(s.drafter.model, 64))
    return replace(s, **readers | settings)


class Coin:
    """A uniform number that is not known yet: to compare it is to draw."""

    def __init__(self, draw):
        self.draw = draw

    def __lt__(self, chance):
        chance = min(1.0, float(chance))
        return bool(self.draw(torch.tensor([1 - chance, chance], dtype=torch.float64)))
