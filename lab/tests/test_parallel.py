"""A target that several processes share: its parts add up; two processes under torchrun write one's texts."""
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from lab.parallel import Shard
from lab.tests.helpers import (LEARNED_TWO, LINE, RANGES, case, needs_gloo, program, refuses, subprogram,
                               tiny, tiny_pair)
from lab.toys import apart, fresh
from model import load, write_calibration

TORCHRUN = '-m', 'torch.distributed.run', '--nproc-per-node', 2, '-m', 'lab.parallel'
BIASES = dict(sizes=dict(qkv_bias=True, o_bias=True, mlp_bias=True), attention_bias=True)
EXPERTS = dict(sizes=dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, qk_norm=True),
               model_type='qwen3_moe')


@pytest.mark.parametrize('options', [case('biases', BIASES), case('experts', EXPERTS)])
def test_shards_compute_what_the_network_does(options, tmp_path):
    """In two threads, which add up what their halves of each sublayer put out."""
    folder = tiny(tmp_path, **options)
    barrier, halves = Barrier(2, timeout=60), [None, None]

    def all_reduce(rank, y):
        halves[rank] = y
        barrier.wait()
        total = sum(halves)
        barrier.wait()
        return total

    def logits_of(rank):
        model, _, _ = load(folder, dtype=torch.float64, shard=Shard(rank, 2))
        for layer in model.model.layers:
            layer.all_reduce = partial(all_reduce, rank)
        return fresh(model, LINE)
    whole, _, _ = load(folder, dtype=torch.float64)
    with ThreadPoolExecutor(2) as pool:
        assert all(apart(logits, fresh(whole, LINE)) < 1e-9 for logits in pool.map(logits_of, range(2)))
    refuses('num_key_value_heads', partial(load, folder, shard=Shard(0, 4)))
    refuses('[9, 4]', Shard(0, 2).part, 'a.k_proj.weight', SimpleNamespace(get_shape=lambda: [9, 4]))


@needs_gloo
@pytest.mark.slow
def test_two_processes_write_the_texts_of_one_by_every_method(tmp_path, capsys):
    flags = [*tiny_pair(tmp_path), '--compare', 'sd', 'cmasd', 'ecsv', 'via', 'specguard',
             'sparse block=4 dense_below=4 ffn_quantile=0.4', '--temperature', 1, '--json', '--show']
    for name, section in dict(mask=dict(skip=[1]), signals=RANGES, sparse=LEARNED_TWO).items():
        write_calibration(tmp_path / 'target', name, section)
    alone = program(capsys, *flags)[1]
    status, out, err = subprogram(*TORCHRUN, *flags)
    assert status == 0 and err.count('\nspecguard ') == 1, err
    one, two = [[(made['method'], made['tokens'], [cycle['labels'] for cycle in made['cycles']])
                 for made in map(json.loads, re.findall('^{.*', printed, re.M))] for printed in (alone, out)]
    assert one == two and len(one) == 21
