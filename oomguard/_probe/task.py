"""The steps of a probe of a task: microbatches of its worst batch, and their times. Only the child imports this."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from torch import nn

from oomguard._device.find import Device
from oomguard._probe.record import TaskRequest
from oomguard._probe.sample import Meter
from oomguard._step import accumulate_pieces, apply_gradient, check_optimizer, loss_on, make_scaler
from oomguard._task.child import batches_of, seed, try_task
from oomguard._task.layout import mapped, tensors_of
from oomguard._task.task import user_code
from oomguard._task.times import in_segments, time_of
from oomguard._task.trace import build, make_optimizer


def run_tiny_task(request: TaskRequest, device: Device) -> None:
    """Import the user's code and run a tiny step, which finds its errors and loads its kernels and libraries."""
    seed(request.seed)
    try_task(request.content or request.name, request.seq, device.name)


class TaskMeter(Meter):
    """Runs the steps of a candidate of a task."""

    def __init__(self, request: TaskRequest, device: Device) -> None:
        knobs, self.seq = request.candidate, request.seq
        self.batches = batches_of(request.content or request.name)
        self.task, segments = in_segments(self.batches.task, knobs.segments, time_of(self.batches))
        self.way = msgspec.structs.replace(knobs, segments=segments)
        super().__init__(knobs, device, request.rows or knobs.microbatch * knobs.accumulation, 0, request.passes)
        seed(request.seed)
        self.model: nn.Module = build(self.task, device.name).train()
        self.optimizer = make_optimizer(self.task, self.model)
        check_optimizer(self.optimizer)
        self.scaler = make_scaler(knobs, device.name)

    def warm_up(self) -> None:
        """Run a step that is not timed. On the CPU a tiny batch is enough to make the optimizer's state."""
        batch = self.batches.tiny(2, self.seq) if self.device.name == "cpu" else self._batch()
        self._update(iter([self._on_device(batch)]))
        self.device.wait()

    def step(self) -> None:
        """Run one measured step: two passes (if the batch has two) of the worst batch, and an update."""
        whole = self._on_device(self._batch())
        pieces, rows = [whole], self.candidate.microbatch
        if rows < self.batch:
            pieces = self.batches.split(whole, rows, self.seq)[: self.passes]
        self.tokens = self.tokens or rows * max(1, self.batches.steps_of(whole))
        self._update(self.timed([partial(self._on_device, piece) for piece in pieces]))
        self.end_step()
        self.sizes["input"] = self.bytes_of(tensors_of(whole))

    def _batch(self) -> Any:
        return self.batches.make(self.batch, self.seq)

    def _on_device(self, batch: Any) -> Any:
        return mapped(lambda tensor: tensor.to(self.device.name), batch)

    def _update(self, pieces: Iterator[Any]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss_of = partial(loss_on, self.task, self.model, self.way, self.device.name)
        with user_code("A step of the task must run", self.task.loss, "Correct that line."):
            accumulate_pieces(((piece, 1 / self.passes) for piece in pieces), loss_of, self.optimizer, self.scaler)
        apply_gradient(self.optimizer, self.optimizer.step, self.scaler, None)
