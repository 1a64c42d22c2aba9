"""Tensor parallelism: processes that share a target, started by torchrun; the flags are specmini's.

`torchrun --nproc-per-node 2 -m lab.parallel --target DIR --prompt "..."`. The processes, the ranks, run the
same program with the same seeds. Each holds a shard of every target layer, by rows where it reads, by columns
where it writes; all else, and the draft, whole. Two sums over the ranks a layer make them agree. torchrun
gives each one CPU thread, unless OMP_NUM_THREADS says more. Source: Shoeybi et al. 2019 (Megatron-LM), 3.
"""
import os
import sys
from dataclasses import dataclass, replace

import torch
from torch import distributed

from model import require_that
from specmini import Engine, exit_status, parse, ready, run

AXIS = dict(q_proj=0, k_proj=0, v_proj=0, gate_proj=0, up_proj=0, o_proj=1, down_proj=1)    # that is shared
SHARED = 'num_attention_heads', 'num_key_value_heads', 'intermediate_size', 'moe_intermediate_size'


@dataclass(frozen=True)
class Shard:
    """What one process of several holds of a network, for model.load; BadInput if a size does not divide."""
    rank: int
    count: int

    def config(self, config):
        """The Config of the shard."""
        return replace(config, **{name: self.share(name, getattr(config, name)) for name in SHARED})

    def share(self, name, size):
        require_that(size % self.count == 0,
                     f'{name} is {size}, which {self.count} processes cannot share; start fewer')
        return size // self.count

    def part(self, name, stored):
        """This rank's part of a tensor of a file, an open slice, of which no more is read."""
        shape = stored.get_shape()
        axis = AXIS.get(name.split('.')[-2])
        if axis is None:
            return stored[:]
        if axis == len(shape):                          # of a sum: rank 0 holds the bias, the others zeros
            return stored[:] if self.rank == 0 else torch.zeros(shape)
        size = self.share(f'{name} {shape}', shape[axis])
        rows = slice(self.rank * size, (self.rank + 1) * size)
        return stored[rows] if axis == 0 else stored[:, rows]


class ParallelEngine(Engine):
    """An Engine whose target is shared by the processes that torchrun has started."""

    def network(self, folder, bits=16):
        require_that(not self.compile, '--compile: a sum over processes is no part of a graph; leave it out')
        if not distributed.is_initialized():
            join(self.device)
        shared = folder == self.target
        shard = Shard(distributed.get_rank(), distributed.get_world_size()) if shared else None
        loaded = ready(folder, self.device, self.dtype, shard, bits)
        for layer in loaded[0].model.layers if shared else ():
            layer.all_reduce = all_reduce
        return loaded


def all_reduce(y):
    """The sum of y over the ranks, in its place."""
    distributed.all_reduce(y)
    return y


def join(device):
    """Makes this process a member of the group, with a card of its own on CUDA."""
    if device == 'cuda':
        there, wanted = torch.cuda.device_count(), int(os.environ['LOCAL_WORLD_SIZE'])
        require_that(wanted <= there, f'{wanted} processes for {there} CUDA devices; start fewer')
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    distributed.init_process_group('nccl' if device == 'cuda' else 'gloo')


def main():
    """The exit status of a run. Ranks above 0 print nothing, except why they fail."""
    require_that(distributed.is_available() and distributed.is_torchelastic_launched(),
                 'start it with torchrun --nproc-per-node N -m lab.parallel')
    if int(os.environ['RANK']):
        sys.stdout = sys.stderr = open(os.devnull, 'w')
    try:
        status = run(parse(sys.argv[1:]), ParallelEngine)
    finally:
        sys.stderr = sys.__stderr__
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return status


if __name__ == '__main__':
    sys.exit(exit_status('lab.parallel', main))
