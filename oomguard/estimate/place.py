"""Where a step runs, as far as arithmetic cares: the CPU, or a card that may not be here."""

from dataclasses import dataclass

from oomguard.candidate import Candidate
from oomguard.errors import MisuseError
from oomguard.estimate.engines.cudnn import Platform
from oomguard.estimate.gpus import Card
from oomguard.spec import Spec
from oomguard.units import MIB

CPU_RUNTIME_BYTES = 318 * MIB
"""Resident bytes of a process that has imported torch and run a tiny step: interpreter, libraries, oneDNN's kernels.
Just above all rows of benchmarks/results/cpu_peaks.csv, which start from 305 to 317 MiB (torch 2.13.0, CPU build)."""
COMMITTED_TENTHS = 28
"""Tenths of a committed byte for each resident one of growth, at most: oneDNN asks for 17.2 outputs a layer and touches
6.1 of them until that layer's backward (measured: 1.36 for one LSTM layer, 1.85 for three, 2.10 for six)."""
CUBLAS_HANDLES = 2
"""cuBLAS workspaces alive: the backward pass runs in a thread with a handle of its own (CublasHandlePool.cpp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device of an estimate."""

    device: str
    """`cpu`, `cuda`, or a card's name."""
    cuda: bool
    """Whether it is a card."""
    runtime_bytes: int
    """What is there before any model: interpreter and libraries (CPU), the context (CUDA)."""
    cublas_bytes: int = 0
    """One cuBLAS workspace."""
    platform: Platform | None = None
    """What decides on cuDNN's algorithm."""


def resident_within(committed_bytes: int) -> int:
    """Resident bytes that a training process on the CPU surely reaches within so many committed ones (an rlimit).

    The runtime commits about what it has resident (295 of 315 MiB, one thread); growth commits up to 2.8 times.

    >>> resident_within(CPU_RUNTIME_BYTES + 280) - CPU_RUNTIME_BYTES
    100
    """
    growth_bytes = max(0, committed_bytes - CPU_RUNTIME_BYTES) * 10 // COMMITTED_TENTHS
    return min(committed_bytes, CPU_RUNTIME_BYTES) + growth_bytes


CPU = Place(device="cpu", cuda=False, runtime_bytes=CPU_RUNTIME_BYTES)


def on_card(card: Card, device: str | None = None) -> Place:
    """The place that a named card is."""
    return Place(
        device=device or card.name,
        cuda=True,
        runtime_bytes=card.context_bytes,
        cublas_bytes=card.cublas_workspace_bytes,
        platform=Platform(capability=card.compute_capability, multiprocessors=card.sms),
    )


def engine_for(spec: Spec, candidate: Candidate, place: Place) -> str:
    """The engine that runs the cell: the candidate's, or what PyTorch would take.

    On CUDA that is cuDNN; on the CPU oneDNN for LSTM without projection, otherwise PyTorch's own kernels.
    """
    onednn = spec.cell == "lstm" and spec.projection is None
    if place.cuda:
        possible = ["cudnn", "native"]
    else:
        possible = ["onednn", "native"] if onednn else ["native"]
    if candidate.engine is None:
        return possible[0]
    if candidate.engine not in possible:
        what = "projected " * bool(spec.projection) + spec.cell
        raise MisuseError(
            rule=f"On {place.device}, {what} runs on {' or '.join(possible)}",
            got=f"got --engine {candidate.engine}",
            advice="Leave --engine out, or change --device.",
        )
    return candidate.engine
