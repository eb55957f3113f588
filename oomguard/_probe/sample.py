"""The steps of a probe: random microbatches of the largest size, and their times. Only the child imports this."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomguard._batch import leaves_of
from oomguard._device.find import Device
from oomguard._probe.record import Request
from oomguard._rnn import Microbatch
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec
from oomguard._step import Piece, Training, prepare, step

PASSES = 2  # passes of a step, at most
FEW = 4  # time steps of a tiny step


def run_tiny(request: Request, device: Device) -> None:
    """Run a tiny step that loads the kernels and libraries of the request's steps."""
    spec = tiny_spec(request.spec)
    training = prepare(spec, tiny_candidate(spec, request.candidate), device.name)
    generator = _seeded(request, device)
    for _ in range(2):  # the second finds the optimizer's state in place
        step(training, [random_microbatch(spec, 1, generator) for _ in range(PASSES)], targets=2)
    device.wait()


def tiny_spec(spec: Spec) -> Spec:
    """Shrink a spec so that it runs the same code."""
    hidden, projection = 8, None if spec.projection is None else 4
    width = spec.directions * (projection or hidden)
    small: dict[str, Any] = {"seq": FEW, "batch": 2, "hidden": hidden, "projection": projection, "outputs": 8}
    small |= {"features": None, "vocab": 8, "embedding": width} if spec.vocab else {"features": 4}
    small |= {"layers": min(spec.layers, 2), "frozen": (), "lengths": spec.lengths and {FEW: 1, FEW - 1: 1}}
    return msgspec.structs.replace(spec, **small)


def tiny_candidate(spec: Spec, candidate: Candidate) -> Candidate:
    """Adapt a candidate to a tiny spec, so that it runs the same code."""
    small: dict[str, Any] = msgspec.structs.asdict(candidate) | {"microbatch": 1, "accumulation": 2}
    small |= {"segments": min(candidate.segments, 2), "window": candidate.window and 2}
    return make_candidate(spec, **small)


def longest_lengths(spec: Spec, rows: int) -> list[int] | None:
    """Return the lengths of the longest sequences, which make the worst microbatch; None if all are of full length."""
    if spec.lengths is None:
        return [spec.steps] * rows if spec.packs else None
    lengths: list[int] = []
    for length in sorted(spec.lengths, reverse=True):
        lengths += [length] * min(spec.lengths[length], rows - len(lengths))
    shortest = min(spec.lengths)
    lengths += [shortest] * (rows - len(lengths))  # if there are too few, as in the estimate
    if not spec.packs and rows > 1:
        lengths[-1] = shortest  # padding costs nothing to leave out here, and the mask of the loss costs memory
    return lengths


def random_microbatch(spec: Spec, rows: int, generator: torch.Generator, steps: int | None = None) -> Microbatch:
    """Make a microbatch of random values (pages of zeros need no memory) on the generator's device."""
    steps = min(steps or spec.steps, spec.steps)
    shape = (rows, steps) if spec.batch_first else (steps, rows)
    wanted = shape if spec.head == "per-step" else (rows,)
    how: dict[str, Any] = {"generator": generator, "device": generator.device}
    if spec.vocab is None:
        inputs = torch.randn(*shape, spec.inputs, **how)
    else:
        inputs = torch.randint(spec.vocab, shape, **how)
    if spec.loss == "cross-entropy":
        targets = torch.randint(spec.classes, wanted, **how)
    else:
        targets = torch.randn(*wanted, spec.classes, **how)
    lengths = longest_lengths(spec, rows)
    return Microbatch(inputs, targets, None if lengths is None else torch.tensor(lengths).clamp(max=steps))


class Meter(ABC):
    """Keeps the times of steps and passes, and the sizes of tensors."""

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, candidate: Candidate, device: Device, batch: int, tokens: int, passes: int) -> None:
        self.candidate, self.device = candidate, device
        self.batch = batch  # rows of the whole batch
        self.tokens = tokens  # real time steps of a pass
        self.passes = min(passes, PASSES, candidate.accumulation)  # of a measured step
        self.pass_seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.skipped = 0
        self.sizes = {"weights": 0, "gradients": 0, "optimizer": 0, "input": 0}
        self._resumed = 0.0

    @abstractmethod
    def warm_up(self) -> None:
        """Run a step that is not timed, so that the first measured step finds the optimizer's state."""

    @abstractmethod
    def step(self) -> None:
        """Run one measured step."""

    def figures(self) -> dict[str, Any]:
        """Return the times of a record. An uneven last microbatch counts by its share."""
        passes = self.batch / self.candidate.microbatch
        seconds_per_pass, seconds_per_update = median(self.pass_seconds), median(self.update_seconds)
        seconds_per_step = passes * seconds_per_pass + seconds_per_update
        return {
            "seconds_per_step": seconds_per_step,
            "tokens_per_second": passes * self.tokens / seconds_per_step,
            "seconds_per_pass": seconds_per_pass,
            "fastest_pass_seconds": min(self.pass_seconds),
            "seconds_per_update": seconds_per_update,
            "passes": len(self.pass_seconds),
            "steps": len(self.update_seconds),
            "skipped": self.skipped,
        }

    def timed(self, makers: Iterable[Callable[[], Piece]]) -> Iterator[Piece]:
        """Yield microbatches. A pass lasts from when its microbatch is handed over until the next one is asked for."""
        for make in makers:
            made = [make()]
            self.sizes["input"] = self.bytes_of(leaves_of(made[0]).values())
            self.device.wait()
            began = perf_counter()
            yield made.pop()  # held by nobody here, so that it goes when its pass is over
            self.device.wait()
            self.pass_seconds.append(perf_counter() - began)
            self.sizes["gradients"] = self.bytes_of(p.grad for p in self.model.parameters())
            self._resumed = perf_counter()

    def end_step(self) -> None:
        """Note the time of the update, and the sizes of weights and state."""
        self.device.wait()
        self.update_seconds.append(perf_counter() - self._resumed)
        self.sizes["weights"] = self.bytes_of(self.model.parameters())
        states = self.optimizer.state.values()
        self.sizes["optimizer"] = self.bytes_of(value for state in states for value in state.values())

    def bytes_of(self, tensors: Iterable[object]) -> int:
        """Add up the bytes of the tensors on the device, each storage once (cuDNN shares one among weights)."""
        kind = torch.device(self.device.name).type
        sizes: dict[int, int] = {}
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == kind:
                parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
                sizes |= {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
        return sum(sizes.values())


class SpecMeter(Meter):
    """Runs the steps of a candidate of a spec."""

    def __init__(self, request: Request, device: Device) -> None:
        self.spec, rows = request.spec, request.candidate.microbatch
        tokens = sum(longest_lengths(request.spec, rows) or [rows * request.spec.steps])
        super().__init__(request.candidate, device, request.spec.batch, tokens, request.passes)
        torch.manual_seed(request.seed)
        self.training: Training = prepare(request.spec, request.candidate, device.name)
        self.model, self.optimizer = self.training.model, self.training.optimizer
        self.generator = _seeded(request, device)

    def warm_up(self) -> None:
        """Run a step that is not timed, so that the first measured step finds the optimizer's state.

        On the CPU a few time steps are enough. On a card it is a whole step, as in training: the state then lies in
        gaps of that step, and the next must reserve more (12 % more for an LSTM with 20,000 words).
        """
        rows, steps, passes = self.candidate.microbatch, self.spec.steps, self.passes
        if self.device.name == "cpu":
            rows, steps, passes = min(2, rows), FEW, 1
        feed = (random_microbatch(self.spec, rows, self.generator, steps) for _ in range(passes))
        step(self.training, feed, targets=rows)
        self.device.wait()

    def step(self) -> None:
        """Run one measured step: two full passes (if the batch has two) and an update.

        The second pass finds the gradients and the heap of the first, as all further ones would (with one pass, a GRU's
        growth was 11 % too low). If only one pass is measured, a short one before it leaves its gradients.
        """
        outcome = step(self.training, self._feed(), targets=self.passes * self.tokens)
        self.end_step()
        self.skipped += outcome.skipped

    def _feed(self) -> Iterator[Microbatch]:
        """Yield full microbatches, which are timed."""
        make = partial(random_microbatch, self.spec, self.candidate.microbatch, self.generator)
        if self.passes < min(PASSES, self.candidate.accumulation):
            yield make(FEW)
        yield from self.timed([make] * self.passes)


def _seeded(request: Request, device: Device) -> torch.Generator:
    """Return the source of microbatches: on the host if the candidate keeps them there, else on the device."""
    home = "cpu" if request.candidate.keep == "host" else device.name
    return torch.Generator(device=home).manual_seed(request.seed)
