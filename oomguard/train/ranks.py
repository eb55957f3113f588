"""Ranks: several processes that train one model together, each on its share of every batch.

Started by torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK. Each step they exchange three small numbers before the
gradients: so they fall back together, and none waits for gradients that another could not compute.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from oomguard.data.source import Ints
from oomguard.errors import MisuseError
from oomguard.model import Recurrent, trainable
from oomguard.spec import Spec
from oomguard.units import MIB

CHUNK_BYTES = 32 * MIB
"""Gradients that are summed at once: together, since each exchange costs time, but not all, since they are copied.

The copies are there when the activations are gone, and are no larger than this or the largest weight: no more than what
a plan counts for the update of Adam, which comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of the processes that train together."""

    rank: int = 0
    """Its number; 0 writes what is written."""
    world: int = 1
    """How many there are."""
    device: str = "cpu"
    """Where tensors are that are exchanged."""

    @property
    def first(self) -> bool:
        """Whether this one writes checkpoints and metrics."""
        return self.rank == 0

    def share(self, sequences: Ints) -> Ints:
        """The sequences of a batch (or of all data) that are this process's."""
        return sequences[self.rank :: self.world]

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all processes."""
        if self.world == 1:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return [int(one) for one in tensor.tolist()]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all processes."""
        if self.world == 1:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor)
        return [float(one) for one in tensor.tolist()]

    def sum_gradients(self, model: Recurrent, loss: Tensor) -> Tensor:
        """Sum gradients and loss. Each is already a share of the mean over all targets, so sums are that mean."""
        if self.world == 1:
            return loss
        for chunk in _chunks(model):
            flat = torch.cat([gradient.flatten() for gradient in chunk])
            distributed.all_reduce(flat)
            for gradient, summed in zip(chunk, torch.split(flat, [one.numel() for one in chunk]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        total = loss.clone()
        distributed.all_reduce(total)
        return total


def _chunks(model: Recurrent) -> Iterator[list[Tensor]]:
    """All gradients, some at a time; who had no sequence has zeros."""
    chunk: list[Tensor] = []
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if chunk and sum(one.nbytes for one in chunk) + parameter.grad.nbytes > CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(parameter.grad)
    if chunk:
        yield chunk


@contextmanager
def join(device: str, spec: Spec) -> Iterator[Ranks]:
    """The part of this process among those that torchrun started; alone if it did not."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world == 1:
        yield Ranks(device=device)
        return
    if spec.sparse_embedding:
        raise MisuseError(
            rule="Processes that train together exchange dense gradients",
            got="got --sparse-embedding",
            advice="Leave it out of the plan, or train in one process.",
        )
    cuda = device.startswith("cuda")
    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    begun = not distributed.is_initialized()
    if cuda:
        torch.cuda.set_device(own)
    if begun:
        distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Ranks(rank=rank, world=world, device=own)
    finally:
        if begun:
            distributed.destroy_process_group()
