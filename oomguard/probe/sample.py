"""The steps of a probe: random microbatches as full as they can come, and their time. Only the child imports this."""

from collections.abc import Iterable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from oomguard.bptt import Microbatch
from oomguard.candidate import Candidate, make_candidate
from oomguard.device import Device
from oomguard.probe.record import Request
from oomguard.spec import Spec
from oomguard.step import Training, prepare, step

PASSES = 2
"""Passes of a tiny step."""
FEW = 4
"""Time steps of a step that is to need next to nothing."""


def run_tiny(request: Request, device: Device) -> None:
    """A step that loads the kernels and libraries of the request's steps and needs next to nothing."""
    spec = tiny_spec(request.spec)
    training = prepare(spec, tiny_candidate(spec, request.candidate), device.torch_device)
    dice = torch.Generator(device=_home(request, device)).manual_seed(request.seed)
    for _ in range(2):  # the second finds the optimizer's state in place
        step(training, [random_microbatch(spec, 1, dice) for _ in range(PASSES)], targets=2)
    device.wait()


def tiny_spec(spec: Spec) -> Spec:
    """A spec that runs the same code.

    >>> tiny_spec(Spec(cell="lstm", seq=10_000, vocab=50_000, tied=True)).embedding
    8
    """
    hidden, projection = 8, None if spec.projection is None else 4
    width = spec.directions * (projection or hidden)
    small: dict[str, Any] = {"seq": FEW, "batch": 2, "hidden": hidden, "projection": projection, "outputs": 8}
    small |= {"features": None, "vocab": 8, "embedding": width} if spec.vocab else {"features": 4}
    small |= {"layers": min(spec.layers, 2), "frozen": (), "lengths": spec.lengths and {FEW: 1, FEW - 1: 1}}
    return msgspec.structs.replace(spec, **small)


def tiny_candidate(spec: Spec, candidate: Candidate) -> Candidate:
    """The candidate, made to serve a tiny spec: the same code again."""
    small: dict[str, Any] = msgspec.structs.asdict(candidate) | {"microbatch": 1, "accumulation": 2}
    small |= {"segments": min(candidate.segments, 2), "window": candidate.window and 2}
    return make_candidate(spec, **small)


def longest_lengths(spec: Spec, rows: int) -> list[int] | None:
    """Real steps of the sequences of the worst microbatch: the longest. None if all are as long as the spec says.

    >>> longest_lengths(Spec(cell="gru", lengths={10: 5, 100: 2}, packed=True), 4)
    [100, 100, 10, 10]
    """
    if spec.lengths is None:
        return [spec.steps] * rows if spec.packs else None
    found: list[int] = []
    for length in sorted(spec.lengths, reverse=True):
        found += [length] * min(spec.lengths[length], rows - len(found))
    shortest = min(spec.lengths)
    found += [shortest] * (rows - len(found))  # if there are not so many, as the estimate has it
    if not spec.packs and rows > 1:
        found[-1] = shortest  # padding costs nothing to leave out here, and the mask of the loss costs memory
    return found


def random_microbatch(spec: Spec, rows: int, dice: torch.Generator, steps: int | None = None) -> Microbatch:
    """Real values, since pages of zeros need no memory, where `dice` is; of fewer time steps, if told so."""
    steps = min(steps or spec.steps, spec.steps)
    shape = (rows, steps) if spec.batch_first else (steps, rows)
    wanted = shape if spec.head == "per-step" else (rows,)
    how: dict[str, Any] = {"generator": dice, "device": dice.device}
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


class Meter:
    """A candidate in training: runs steps, and keeps the time and the size of what it sees."""

    def __init__(self, request: Request, device: Device) -> None:
        self.request, self.device = request, device
        torch.manual_seed(request.seed)
        self.training: Training = prepare(request.spec, request.candidate, device.torch_device)
        self.dice = torch.Generator(device=_home(request, device)).manual_seed(request.seed)
        self.pass_seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.skipped = 0
        self.sizes = {"weights": 0, "gradients": 0, "optimizer": 0, "input": 0}
        self._resumed = 0.0

    def warm_up(self) -> None:
        """A step that is not timed: makes the optimizer's state, so that the first measured step finds it.

        On the CPU a few time steps do. On a card it is a whole one, as in training: the state then lies in the gaps
        that a whole step leaves, and more must be reserved for the next (12 % more for an LSTM with 20,000 words).
        """
        spec, rows = self.request.spec, self.request.candidate.microbatch
        steps, passes = spec.steps, self.passes
        if self.device.name == "cpu":
            rows, steps, passes = min(2, rows), FEW, 1
        feed = (random_microbatch(spec, rows, self.dice, steps) for _ in range(passes))
        step(self.training, feed, targets=rows)
        self.device.wait()

    def step(self) -> None:
        """One measured step: two full passes (if there are so many) and an update.

        The second meets the gradients of the first, as all further ones would, and the heap as the first left it (with
        one alone, a GRU's growth came out 11 % low). Where one must do, a short one before it leaves its gradients.
        """
        outcome = step(self.training, self._timed(), targets=self.passes * self.tokens)
        self.device.wait()
        self.update_seconds.append(perf_counter() - self._resumed)
        self.skipped += outcome.skipped
        self.sizes["weights"] = self._bytes(self.training.model.parameters())
        self.sizes["optimizer"] = self._bytes(
            value for state in self.training.optimizer.state.values() for value in state.values()
        )

    @property
    def passes(self) -> int:
        """Passes of a measured step."""
        return min(self.request.passes, self.request.candidate.accumulation)

    @property
    def tokens(self) -> int:
        """Real time steps of one full microbatch."""
        rows = self.request.candidate.microbatch
        return sum(longest_lengths(self.request.spec, rows) or [rows * self.request.spec.steps])

    @property
    def spent(self) -> float:
        """Seconds measured so far."""
        return sum(self.pass_seconds) + sum(self.update_seconds)

    def figures(self) -> dict[str, Any]:
        """The times, as a record has them. An uneven last microbatch counts by its share."""
        passes = self.request.spec.batch / self.request.candidate.microbatch
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

    def _timed(self) -> Iterator[Microbatch]:
        """Full microbatches. A pass is from when it is handed over until the next is asked for."""
        if self.passes < min(PASSES, self.request.candidate.accumulation):
            yield random_microbatch(self.request.spec, self.request.candidate.microbatch, self.dice, FEW)
        for _ in range(self.passes):
            made = [random_microbatch(self.request.spec, self.request.candidate.microbatch, self.dice)]
            self.sizes["input"] = self._bytes(made[0])
            self.device.wait()
            began = perf_counter()
            yield made.pop()  # held by nobody here, so that it goes when its pass is over
            self.device.wait()
            self.pass_seconds.append(perf_counter() - began)
            self.sizes["gradients"] = self._bytes(p.grad for p in self.training.model.parameters())
            self._resumed = perf_counter()

    def _bytes(self, tensors: Iterable[Any]) -> int:
        """What the tensors among these take on the device."""
        kind = torch.device(self.device.torch_device).type
        storages = [_storages(one) for one in tensors if isinstance(one, Tensor) and one.device.type == kind]
        return sum({address: size for each in storages for address, size in each}.values())


def _storages(tensor: Tensor) -> list[tuple[int, int]]:
    """Address and bytes of what a tensor lies in: cuDNN has all weights of a call in one storage."""
    if tensor.is_sparse:
        return _storages(tensor._indices()) + _storages(tensor._values())
    storage = tensor.untyped_storage()
    return [(storage.data_ptr(), storage.nbytes())]


def _home(request: Request, device: Device) -> str:
    """Where microbatches are made: on the device, unless the candidate keeps them in host memory."""
    return "cpu" if request.candidate.keep == "host" else device.torch_device
