"""Target: the device of an estimate or a plan, the CPU or a card that may not be present."""

from typing import Annotated

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import MIB
from oomguard._estimate.call import Knobs
from oomguard._estimate.cards import Card, card_precisions
from oomguard._spec.spec import Spec

CPU_RUNTIME_BYTES = 318 * MIB
"""Resident bytes of a process that has imported torch and run a tiny step: interpreter, libraries, oneDNN's kernels.
Just above all rows of benchmarks/results/cpu_peaks.csv, which start from 305 to 317 MiB (torch 2.13.0, CPU build)."""
CUDA_HOST_BYTES = 2048 * MIB
"""Resident bytes of a process that uses CUDA, from above: 1.96 GiB (pytorch issue 113326, torch 2.2 with lazy loading)
and 1.83 GiB (issue 12873) were published."""
COMMITTED_TENTHS = 28
"""Tenths of a committed byte for each resident one of growth, at most: oneDNN asks for 17.2 outputs a layer and touches
6.1 of them until that layer's backward (measured: 1.36 for one LSTM layer, 1.85 for three, 2.10 for six)."""
CUBLAS_HANDLES = 2
"""cuBLAS workspaces alive: the backward pass runs in a thread with a handle of its own (CublasHandlePool.cpp)."""


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that a plan or an estimate is for, present or only named, as far as the arithmetic needs it."""

    device: str
    """The device as `--device` takes it: `cpu`, `cuda:0`, or the name of a card."""
    cuda: bool
    """Whether it is a card."""
    runtime_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes in use before any model exists: interpreter and libraries (CPU), the context (CUDA)."""
    cublas_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of one cuBLAS workspace."""
    capability: tuple[int, int] | None = None
    """The card's compute capability."""
    multiprocessors: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The card's number of multiprocessors."""

    @property
    def card_precisions(self) -> tuple[str, ...]:
        """The precisions that a card trains in, `fp32` first; for the CPU, `_device.cpu` knows more."""
        return card_precisions(self.capability or (0, 0))


def resident_within(committed_bytes: int) -> int:
    """Resident bytes that a training process on the CPU can reach under a limit of committed bytes (an rlimit).

    The runtime commits about what it has resident (295 of 315 MiB, one thread); growth commits up to 2.8 times.
    """
    growth_bytes = max(0, committed_bytes - CPU_RUNTIME_BYTES) * 10 // COMMITTED_TENTHS
    return min(committed_bytes, CPU_RUNTIME_BYTES) + growth_bytes


CPU = Target(device="cpu", cuda=False, runtime_bytes=CPU_RUNTIME_BYTES)


def on_card(card: Card, device: str | None = None) -> Target:
    """The target that a card is."""
    return Target(
        device=device or card.name,
        cuda=True,
        runtime_bytes=card.context_bytes,
        cublas_bytes=card.cublas_workspace_bytes,
        capability=card.compute_capability,
        multiprocessors=card.sms,
    )


def engine_for(spec: Spec, candidate: Knobs, target: Target) -> str:
    """The engine that runs the cell: the candidate's, or what PyTorch would take.

    On CUDA that is cuDNN; on the CPU oneDNN for LSTM without projection, otherwise PyTorch's own kernels.
    """
    possible = ["cudnn" if target.cuda else "onednn", "native"]
    if not target.cuda and (spec.cell != "lstm" or spec.projection is not None):
        possible = ["native"]
    if candidate.engine is None:
        return possible[0]
    if candidate.engine not in possible:
        what = "projected " * bool(spec.projection) + spec.cell
        raise MisuseError(
            rule=f"On {target.device}, {what} runs on {' or '.join(possible)}",
            got=f"got --engine {candidate.engine}",
            advice="Leave --engine out, or change --device.",
        )
    return candidate.engine
