"""Ranks: several processes that train one model together, each on its share of every batch.

torchrun starts them and sets RANK, WORLD_SIZE and LOCAL_RANK. In each step they exchange three small numbers before the
gradients and one after the update. So they fall back together, and none waits for a result that another cannot compute.
Each may have a plan of its own (`plans.py`): a faster process takes more rows of every batch.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp

from oomguard._core.errors import GuardError, MisuseError, TornUpdateError, shown
from oomguard._data.source import Ints
from oomguard._guard import another_process_failed
from oomguard._rnn.model import trainable
from oomguard._train.pulse import Address, Pulse

WAIT = timedelta(seconds=1)  # for other processes, before the pulse is looked at
DONE, TORN, FAILED = 0, 1, 2  # outcome of work that all processes do; the largest counts
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The number of this process, that of all processes that train together, and the device of this one."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    pulse: Pulse | None = None  # None: alone, or with NCCL, which watches its processes itself
    speeds: tuple[float, ...] = ()  # how fast each process is, in any unit; empty: all are equally fast

    @property
    def first(self) -> bool:
        """Whether this process writes checkpoints, metrics and events."""
        return self.rank == 0

    def rows(self, count: int) -> Ints:
        """The rows of a batch of so many that this process takes, evenly spread over the batch."""
        return np.flatnonzero(deal(self.speeds or (1.0,) * self.world, count) == self.rank)

    def share(self, sequences: Ints) -> Ints:
        return sequences[self.rows(len(sequences))]

    def span(self, count: int) -> tuple[int, int]:
        """As many rows as `rows` has, as the start and the end of a run of neighbouring rows."""
        taken = np.bincount(deal(self.speeds or (1.0,) * self.world, count), minlength=self.world)
        end = int(taken[: self.rank + 1].sum())
        return end - int(taken[self.rank]), end

    def gather(self, given: Given) -> list[Given]:
        """What each process gives, by their numbers."""
        if self.world == 1:
            return [given]
        content = pickle.dumps(given)
        [size] = self.agree([len(content)])
        table = torch.zeros(self.world, size, dtype=torch.uint8, device=self.device)
        table[self.rank, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._reduce([table])
        return [pickle.loads(row.numpy()) for row in table.cpu()]

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Raise in all processes unless each has the same facts: flags, or what else names them, and their values."""
        for rank, other in enumerate(given := self.gather(facts)):
            for name in {**given[0], **other}:  # in their order
                values = given[0].get(name), other.get(name)
                if values[0] != values[1]:
                    raise MisuseError(
                        rule="All processes of a training do the same work",
                        got=f"{name} is {shown(values[0])} in process 0 and {shown(values[1])} in process {rank}",
                        advice="Start them with the same command and data, and make their plans with the same flags.",
                    )

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all processes."""
        if self.world == 1:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._reduce([tensor], ReduceOp.MAX)
        return [*map(int, tensor.tolist())]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        if self.world == 1:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self._reduce([tensor])
        return [*map(float, tensor.tolist())]

    def _reduce(
        self, tensors: Iterable[Tensor], how: distributed.ReduceOp.RedOpType = distributed.ReduceOp.SUM
    ) -> None:
        """Reduce tensors in place."""
        self._finish(partial(distributed.all_reduce, tensor, how, async_op=True) for tensor in tensors)

    def spread(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Give each tensor in place the values that it has in one process, whose number is beside it."""
        if self.world > 1:
            with torch.no_grad():
                self._finish(partial(distributed.broadcast, *pair, async_op=True) for pair in tensors)

    def _finish(self, begin: Iterable[Callable[[], distributed.Work]]) -> None:
        """Begin some work of all processes and wait for it. Raises if a process is lost, instead of waiting for it."""
        self._check()
        try:
            for work in [each() for each in begin]:
                while self.pulse is not None and not work.is_completed():
                    with suppress(RuntimeError):  # it takes longer, or it has failed
                        work.wait(WAIT)
                    self._check()
                work.wait()
        except RuntimeError as error:
            raise lost("its connection ended") from error

    def _check(self) -> None:
        if self.pulse is not None and self.pulse.lost is not None:
            raise lost(f"process {self.pulse.lost} does not answer")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Fail in all processes if one fails, so that none waits for it. A torn update is one in all of them."""
        try:
            yield
        except BaseException as error:
            self.agree([TORN if isinstance(error, TornUpdateError) else FAILED])
            raise
        worst = self.agree([DONE])[0]
        if worst != DONE:
            raise another_process_failed(TornUpdateError if worst == TORN else GuardError)

    def seed_step(self, seed: int, step: int) -> None:
        """Seed a step's random numbers: each process has its own dropout, and the same one again after a resume."""
        if self.world > 1:
            torch.manual_seed(int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1, np.uint64)[0]))

    def complete_gradients(self, model: nn.Module) -> None:
        """Give zeros to weights without a gradient: this process's share of the batch may be empty."""
        if self.world > 1:
            for parameter in trainable(model):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def sum_gradients(self, model: nn.Module, loss: Tensor) -> Tensor:
        """Sum gradients and loss over all processes. Each is a share of the mean over all targets.

        They are summed in place, all at once. Buckets, as in DDP, would be copies for which memory could run out here,
        where no process can fall back alone. So the exchange needs no memory beyond the gradients that a plan counts;
        gloo's own 3 MiB are within the margin.
        """
        if self.world > 1:
            loss = loss.double()  # it has the model's dtype, which a process without rows does not know
            tensors = [loss, *(parameter.grad for parameter in trainable(model) if parameter.grad is not None)]
            self._reduce(tensors)
        return loss

    def sum_shares(self, model: nn.Module, loss: Tensor, weight: float) -> Tensor:
        """Sum gradients and loss over all processes. Each is the mean over a share of the batch of that weight.

        A weight of the model that has a gradient in any process gets one in all of them, as in one process.
        """
        if self.world == 1:
            return loss
        share, parameters = weight / (self.sums([weight])[0] or 1.0), trainable(model)
        used = self.agree([parameter.grad is not None for parameter in parameters])
        for parameter, is_used in zip(parameters, used, strict=True):
            if parameter.grad is not None:
                parameter.grad *= share
            elif is_used:
                parameter.grad = torch.zeros_like(parameter)
        return self.sum_gradients(model, loss * share)


def lost(why: str) -> GuardError:
    """The error that ends a process because another one is stopped or gone."""
    return GuardError(
        rule="All processes of a training must live",
        got=f"one was lost ({why})",
        advice="Start all of them again with --resume: the training goes on from the last checkpoint.",
    )


def check_dense(*, sparse: bool) -> None:
    """Raise if several processes would have to exchange sparse gradients."""
    if sparse:
        raise MisuseError(
            rule="Several processes can only exchange dense gradients",
            got="got a sparse embedding",
            advice="Leave sparse out, or train in one process.",
        )


def deal(speeds: Sequence[float], rows: int) -> Ints:
    """The number of the process that takes each of so many rows: in proportion to the speeds, and evenly spread."""
    each = (rows + len(speeds)) / sum(speeds)
    most = [int(each * speed) + 2 for speed in speeds]  # rows that a process can come to have
    turns = [(np.arange(count) + 0.5) / speed for count, speed in zip(most, speeds, strict=True)]
    order = np.argsort(np.concatenate(turns), kind="stable")[:rows]
    return np.repeat(np.arange(len(speeds)), most)[order]


def _gather(own: Address) -> list[Address]:
    """The addresses of all processes, by their numbers."""
    addresses = [own] * distributed.get_world_size()
    distributed.all_gather_object(addresses, own)
    return addresses


@contextmanager
def join(device: str, *, sparse: bool) -> Iterator[Ranks]:
    """Join the processes that torchrun started; without torchrun, train alone. `sparse`: some gradients are sparse."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world == 1:
        yield Ranks(device=device)
        return
    check_dense(sparse=sparse)
    cuda = device.startswith("cuda")
    own_device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    is_ours = not distributed.is_initialized()
    if cuda:
        torch.cuda.set_device(own_device)
    if is_ours:
        distributed.init_process_group("nccl" if cuda else "gloo")
    pulse = None if cuda else Pulse(rank, _gather)
    try:
        yield Ranks(rank=rank, world=world, device=own_device, pulse=pulse)
    finally:
        if pulse is not None:
            pulse.end()
        if is_ours and (pulse is None or pulse.lost is None):
            distributed.destroy_process_group()
