"""A CUDA card as a device: its budget, the memory that this process uses there, and how a limit is enforced.

Figures that do not need torch (the budget, the name) are read through NVML, so that a process that only plans needs no
CUDA context. Where NVML does not answer, they are read from CUDA through torch, in this process.
"""

import gc
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from oomguard._device import nvml
from oomguard._device.budget import Budget, Reading
from oomguard._device.nvml import CardStatus
from oomguard._device.proc import read_text
from oomguard._estimate.cards import card_precisions
from oomguard._spec.candidate import Candidate

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The allocator's settings. torch up to 2.8 reads the first alone; later ones read the first and, if it is not set, the
second (CUDAAllocatorConfig.h, torch 2.13 and 2.15), or the other way round (2.9): so both are set, to the same."""
EXPANDABLE = "expandable_segments:True"
MOST_CONTEXTS = 3
"""Bytes that no listed process holds count as this process's context, unless they exceed this many usual contexts: then
another process holds them that NVML does not list (containers)."""


class Cuda(msgspec.Struct, frozen=True):
    """Card `cuda:index`. `Cpu` documents the methods."""

    index: int = 0  # its number, as CUDA counts for this process

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def status(self) -> CardStatus:
        """The card as it is now: by NVML or, where that does not answer, by CUDA (which makes a context)."""
        try:
            return nvml.card_status(self.index)
        except nvml.NoNvmlError:
            import torch

            if not torch.cuda.is_available():
                raise
        nvml.check_index(self.index, torch.cuda.device_count())
        about = torch.cuda.get_device_properties(self.index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        return CardStatus(
            name=about.name,
            uuid=str(getattr(about, "uuid", "")),
            compute_capability=(about.major, about.minor),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            holders=(),  # CUDA does not say who holds memory
            source="torch.cuda.mem_get_info",
        )

    def title(self) -> str:
        return self.status().name

    def precisions(self) -> tuple[str, ...]:
        return card_precisions(self.status().compute_capability)

    def library(self) -> str | None:
        number = _torch().backends.cudnn.version()
        if number is None:
            return None
        unit = 10_000 if number >= 90_000 else 1_000  # 8907 is 8.9.7, 91002 is 9.10.2
        return f"cuDNN {number // unit}.{number % unit // 100}.{number % 100}"

    def driver(self) -> str | None:
        return nvml.driver()

    def budget(self) -> Budget:
        torch, reserved_bytes = sys.modules.get("torch"), 0
        if torch is not None and torch.cuda.is_initialized():  # otherwise this process holds nothing
            reserved_bytes = torch.cuda.memory_reserved(self.index)
        return self.status().budget(self.name, reserved_bytes)

    def environment(self, candidate: Candidate, engine: str) -> dict[str, str]:
        """The variables that the process of the candidate must start with, the user's own settings kept."""
        if candidate.allocator != "expandable":
            return {}
        own = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
        return dict.fromkeys(SETTINGS, f"{own},{EXPANDABLE}" if own else EXPANDABLE)  # the last of a kind counts

    def settle(self, candidate: Candidate) -> None:
        torch = _torch()
        if candidate.threads is not None:
            torch.set_num_threads(candidate.threads)
        torch.backends.cudnn.enabled = candidate.engine != "native"

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        """Make PyTorch's allocator raise torch.OutOfMemoryError before this process takes more of the card.

        The context counts, as it does in every figure. `committed_bytes` is the host's and means nothing here.
        """
        torch = _torch()
        total_bytes = torch.cuda.get_device_properties(self.index).total_memory
        share = max(0, limit_bytes - self._context_bytes()) / total_bytes
        if self.index not in _inherited:
            ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.6 need not have it
            _inherited[self.index] = 1.0 if ask is None else ask(self.index)
        torch.cuda.set_per_process_memory_fraction(min(share, _inherited[self.index]), self.index)

    def unlimit(self) -> None:
        if self.index in _inherited:
            _torch().cuda.set_per_process_memory_fraction(_inherited[self.index], self.index)

    def reset(self) -> None:
        _torch().cuda.reset_peak_memory_stats(self.index)
        _retries[self.index] = self._all_retries()

    def reading(self) -> Reading:
        memory, context_bytes = _torch().cuda, self._context_bytes()
        reserved_bytes = memory.max_memory_reserved(self.index)
        return Reading(
            peak_bytes=reserved_bytes + context_bytes,
            now_bytes=memory.memory_reserved(self.index) + context_bytes,
            runtime_bytes=context_bytes,
            allocated_bytes=memory.max_memory_allocated(self.index),
            reserved_bytes=reserved_bytes,
            retries=self._all_retries() - _retries.get(self.index, 0),
        )

    def wait(self) -> None:
        _torch().cuda.synchronize(self.index)

    def release(self) -> None:
        gc.collect()
        _torch().cuda.empty_cache()

    def held(self, pid: int) -> int:
        return sum(holder.used_bytes or 0 for holder in self.status().holders if holder.pid == pid)

    def _all_retries(self) -> int:
        return int(_torch().cuda.memory_stats(self.index).get("num_alloc_retries", 0))

    def _context_bytes(self) -> int:
        """Bytes that this process holds besides those PyTorch reserved: by NVML, by subtraction, or the usual size."""
        torch, card = _torch(), self.status()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        reserved_bytes = torch.cuda.memory_reserved(self.index)
        if card.own_bytes:
            return max(0, card.own_bytes - int(reserved_bytes))
        others_bytes = sum(holder.used_bytes or 0 for holder in card.others)
        found_bytes = int(total_bytes - free_bytes - reserved_bytes - others_bytes)
        usual_bytes: int = card.known.context_bytes
        return found_bytes if 0 < found_bytes <= MOST_CONTEXTS * usual_bytes else usual_bytes


_retries: dict[int, int] = {}  # the allocator's retries at the last reset, by card
_inherited: dict[int, float] = {}
"""The share of the memory that this process was allowed before `enforce` first changed it, by card."""


def built_for_cards() -> bool:
    """Whether the torch installed here is built for CUDA (or ROCm, in its place). By its version file: no import."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return False
    version = read_text(Path(package.origin).with_name("version.py"))
    return not version or re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", version, re.MULTILINE) is not None


def _torch() -> Any:
    """torch, with CUDA started: its statistics cannot be read before."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch


def count_cards() -> int:
    """Count the cards by NVML or, where NVML does not answer, by CUDA; raise if neither knows of any."""
    try:
        return nvml.count()
    except nvml.NoNvmlError:
        if not built_for_cards():
            raise
        import torch

        if not torch.cuda.is_available():
            raise
        return torch.cuda.device_count()
