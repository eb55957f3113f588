"""How a script is started: its command, and the variables that its process starts with."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from oomguard._core.errors import Bounds, MisuseError, check_fields, conflict, shown
from oomguard._device.cpu import cores
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._run.notes import FOLDER

HOOK = Path(__file__).parent / "hook"
HEAPS = {"tight": "tight", "fast": "fast native", "system": "system"}
"""The heap of each allocator setting. A script can run both engines; of the two fast heaps this is the smaller one."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `oomguard run` was asked for. None: not given."""

    budget: int | str | None = None
    """Memory that each process may use (default: what is free)."""
    allocator: Literal["tight", "fast", "system"] | None = None
    """Heap of the processes (default: fast, unless the environment has settings of its own)."""
    threads: Annotated[int | None, Bounds(1, 4096)] = None
    """CPU threads (default: PyTorch's own, at most the processors that the cgroup allows)."""
    dry_run: Annotated[int | None, Bounds(1, 10**9)] = None
    """End after so many updates, and say what they needed."""
    only_watch: bool = False
    """Run no call in segments: only watch."""

    def __post_init__(self) -> None:
        check_fields(self)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The command of a script and the settings that it starts with."""

    words: tuple[str, ...]
    allocator: str | None  # None: the environment has settings of its own, which are kept
    exports: dict[str, str]  # the variables that are set
    threads: int | None  # None: as PyTorch decides


def make_start(words: Sequence[str], options: RunOptions) -> Start:
    """Decide how a command starts. Raises if there is no such command."""
    _check_command(words)
    own = sorted(name for name in os.environ if name.startswith("MALLOC_"))
    allocator: str | None = options.allocator
    if own and allocator is not None:
        raise conflict("The environment has settings of the heap", ", ".join(own), f"--allocator {allocator}")
    if allocator is None and not own:
        allocator = "fast"
    exports = {} if allocator is None else dict(ENVIRONMENT[HEAPS[allocator]])
    threads = options.threads or _allowed_threads(words)
    exports |= {} if threads is None else dict.fromkeys(THREADS, str(threads))
    return Start(words=tuple(words), allocator=allocator, exports=exports, threads=threads)


def _check_command(words: Sequence[str]) -> None:
    example = "Write it as oomguard run -- python train.py."
    if not words:
        raise MisuseError(rule="oomguard run needs a command", got="got none", advice=example)
    if shutil.which(words[0]) is not None:
        return
    got = f"{shown(words[0])} is none"
    if words[0].endswith(".py") and Path(words[0]).is_file():
        got, example = f"{shown(words[0])} is a file of Python", f"Write it as oomguard run -- python {words[0]}."
    elif Path(words[0]).is_file():
        got, example = f"{shown(words[0])} is a file that may not be executed", "Make it executable (chmod +x)."
    elif os.sep not in words[0]:
        got, example = f"{shown(words[0])} is not on the PATH", f"Give its path. {example}"
    raise MisuseError(rule="oomguard run needs a command that can be started", got=got, advice=example)


def _allowed_threads(words: Sequence[str]) -> int | None:
    """The processors that the cgroup allows, if those are fewer than PyTorch would see; None if it sees them itself."""
    decided = any(os.environ.get(name) for name in THREADS) or Path(words[0]).name == "torchrun"
    ask = getattr(os, "sched_getaffinity", None)
    seen = len(ask(0)) if ask is not None else os.cpu_count() or 1
    return None if decided or cores() >= seen else cores()


def environment(start: Start, folder: Path) -> dict[str, str]:
    """The variables of the script's process: those of this one, the heap, threads, and where to find the hook."""
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | start.exports | {FOLDER: str(folder), "PYTHONPATH": path}
