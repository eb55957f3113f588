"""Ranks: several processes that train one model together, each on its share of every batch.

Started by torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK. Each step they exchange three small numbers before the
gradients, and one after the update: so they fall back together, and none waits for what another could not compute.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, distributed

from oomguard.data.source import Ints
from oomguard.errors import GuardError, MisuseError, TornUpdateError
from oomguard.model import Recurrent, trainable
from oomguard.spec import Spec

FINE, TORN, BROKEN = 0, 1, 2
"""What came of something that all processes do."""


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

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in one process fails in all, so that none waits for one that has gone. A torn update is one for
        all: they go back to the same checkpoint."""
        try:
            yield
        except BaseException as error:
            self.agree([TORN if isinstance(error, TornUpdateError) else BROKEN])
            raise
        worst = self.agree([FINE])[0]
        if worst != FINE:
            raise (TornUpdateError if worst == TORN else GuardError)(
                rule="All processes of a training go on together",
                got="another one failed",
                advice="Read what that one says.",
            )

    def roll(self, seed: int, step: int) -> None:
        """Random numbers for a step: each process draws dropout of its own, and the same again after a resume."""
        if self.world > 1:
            torch.manual_seed(int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1, np.uint64)[0]))

    def complete_gradients(self, model: Recurrent) -> None:
        """Zeros for the weights that had no part in this process's share, perhaps since it was empty."""
        if self.world > 1:
            for parameter in trainable(model):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def sum_gradients(self, model: Recurrent, loss: Tensor) -> Tensor:
        """Sum gradients and loss. Each is already a share of the mean over all targets, so sums are that mean.

        They are summed where they are, all on the way at once. Buckets, as DDP has them, would be copies, for which
        memory could run out here, where no process can fall back alone. So what a plan counts as gradients is all that
        there is, whatever the optimizer; gloo's own 3 MiB are within the margin.
        """
        if self.world > 1:
            summed = [loss, *(one.grad for one in trainable(model) if one.grad is not None)]
            for exchange in [distributed.all_reduce(one, async_op=True) for one in summed]:
                exchange.wait()
        return loss


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
