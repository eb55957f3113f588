"""A CUDA card as a device: what this process may use and uses there, and how it is held to a limit.

What can be asked without torch (the budget, the name) is asked through NVML, so that a process that only plans needs no
CUDA context. Where NVML does not answer, CUDA itself is asked through torch, in this process.
"""

import gc
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from oomguard.candidate import Candidate
from oomguard.device import nvml
from oomguard.device.budget import Budget
from oomguard.device.cpu import watch
from oomguard.device.present import Present
from oomguard.device.proc import read_text
from oomguard.device.reading import Reading, Watched
from oomguard.errors import MisuseError

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The allocator's settings. torch up to 2.8 reads the first alone; later ones read the first and, if it is not set, the
second (CUDAAllocatorConfig.h, torch 2.13 and 2.15), or the other way round (2.9): so both are set, to the same."""
EXPANDABLE = "expandable_segments:True"
MOST_CONTEXTS = 3
"""What is used on a card by nobody known is this process's context, unless it is more than so many of the usual ones:
then it is a neighbour that NVML does not list (containers)."""


class Cuda(msgspec.Struct, frozen=True):
    """Card `cuda:index`."""

    index: int = 0
    """Its number, as CUDA counts for this process."""

    @property
    def name(self) -> str:
        """As `--device` takes it."""
        return f"cuda:{self.index}"

    @property
    def torch_device(self) -> str:
        """As torch takes it."""
        return self.name

    def present(self) -> Present:
        """The card as it is now: by NVML or, where that does not answer, by CUDA (which makes a context)."""
        try:
            return nvml.present(self.index)
        except nvml.NoNvmlError as error:
            missing = error
        return _present_by_torch(self.index, missing)

    def title(self) -> str:
        """The card's name."""
        return self.present().name

    def precisions(self) -> tuple[str, ...]:
        """What the card's hardware computes in."""
        return self.present().precisions

    def library(self) -> str | None:
        """cuDNN with its version, as it is loaded."""
        number = _torch().backends.cudnn.version()
        if number is None:
            return None
        unit = 10_000 if number >= 90_000 else 1_000  # 8907 is 8.9.7, 91002 is 9.10.2
        return f"cuDNN {number // unit}.{number % unit // 100}.{number % 100}"

    def driver(self) -> str | None:
        """The version of NVIDIA's driver, by NVML."""
        return nvml.driver()

    def budget(self) -> Budget:
        """What this process may use of the card, all it holds there already included."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():  # then this process holds nothing
            return self.present().budget(self.name)
        return self.present().budget(self.name, torch.cuda.memory_reserved(self.index))

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """What the process that runs the candidate must be started with, the user's own settings kept."""
        if candidate.allocator != "expandable":
            return {}
        own = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
        return dict.fromkeys(SETTINGS, f"{own},{EXPANDABLE}" if own else EXPANDABLE)  # the last of a kind counts

    def settle(self, candidate: Candidate) -> None:
        """Set what can be set in a running process: threads and engine."""
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
        torch.cuda.set_per_process_memory_fraction(min(share, _inherited_share(self.index)), self.index)

    def unlimit(self) -> None:
        """Take back what `enforce` set."""
        if self.index in _inherited:
            _torch().cuda.set_per_process_memory_fraction(_inherited[self.index], self.index)

    def reset(self) -> None:
        """Begin a new section: peaks start from what is reserved now."""
        torch = _torch()
        torch.cuda.reset_peak_memory_stats(self.index)
        _retries[self.index] = self._all_retries()

    def reading(self) -> Reading:
        """What this process uses, now and since the reset."""
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
        """Until all work issued to the card is done."""
        _torch().cuda.synchronize(self.index)

    def release(self) -> None:
        """Give back to the card what is free: Python's garbage, and what PyTorch's allocator keeps for later."""
        gc.collect()
        _torch().cuda.empty_cache()

    def watch(self, pid: int) -> Watched | None:
        """What another process uses of the host's memory now; None if it is gone or has ended."""
        return watch(pid)

    def held(self, pid: int) -> int:
        """The bytes that another process holds of the card now, by NVML; 0 where it does not say."""
        return sum(one.used_bytes or 0 for one in self.present().holders if one.pid == pid)

    def _all_retries(self) -> int:
        return int(_torch().cuda.memory_stats(self.index).get("num_alloc_retries", 0))

    def _context_bytes(self) -> int:
        """What this process holds besides what PyTorch reserved: by NVML, by what nobody else uses, or as is usual."""
        torch, card = _torch(), self.present()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        reserved_bytes = torch.cuda.memory_reserved(self.index)
        if card.own_bytes:
            return max(0, card.own_bytes - int(reserved_bytes))
        others_bytes = sum(one.used_bytes or 0 for one in card.others)
        found_bytes = int(total_bytes - free_bytes - reserved_bytes - others_bytes)
        usual_bytes: int = card.known.context_bytes
        return found_bytes if 0 < found_bytes <= MOST_CONTEXTS * usual_bytes else usual_bytes


_retries: dict[int, int] = {}
"""By card: the allocator's retries at the last reset."""
_inherited: dict[int, float] = {}
"""By card: the share of it that this process was allowed before `enforce` first changed that."""


def open_card(index: int) -> Cuda:
    """Card `cuda:index`, if this process can run on it."""
    if not built_for_cards():
        raise MisuseError(
            rule="--device cuda needs a CUDA build of torch",
            got="the torch installed here is built without CUDA",
            advice="Install one from pytorch.org, or use --device cpu.",
        )
    card = Cuda(index)
    card.present()  # raises if there is none
    return card


def built_for_cards() -> bool:
    """Whether the torch installed here is built for CUDA (or ROCm, in its place). By its version file: no import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = read_text(Path(found.origin).with_name("version.py"))
    return not version or re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", version, re.MULTILINE) is not None


def _torch() -> Any:
    """torch, with CUDA started: its statistics cannot be asked for before."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch


def count_cards() -> int:
    """How many cards there are, by NVML or, where that does not answer, by CUDA; raises if neither knows of any."""
    try:
        return nvml.count()
    except nvml.NoNvmlError as error:
        missing = error
    if built_for_cards():
        import torch

        if count := torch.cuda.device_count():
            return count
    raise missing


def _present_by_torch(index: int, missing: MisuseError) -> Present:
    """The card as CUDA shows it to this process; it does not say who else holds memory."""
    import torch

    if not torch.cuda.is_available():
        raise missing
    nvml.check_index(index, torch.cuda.device_count())
    about = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return Present(
        name=about.name,
        uuid=str(getattr(about, "uuid", "")),
        compute_capability=(about.major, about.minor),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        holders=(),
        source="torch.cuda.mem_get_info",
    )


def _inherited_share(index: int) -> float:
    """The share of the card that this process may use at most, if torch tells (2.6 need not)."""
    if index not in _inherited:
        ask = getattr(_torch().cuda, "get_per_process_memory_fraction", None)
        _inherited[index] = 1.0 if ask is None else ask(index)
    return _inherited[index]
