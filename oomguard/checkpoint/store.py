"""Checkpoints on the disk: written whole or not at all, the last few kept, the newest whole one found."""

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from oomguard.candidate import Candidate
from oomguard.checkpoint.state import State, take
from oomguard.checkpoint.tensors import Sum, packed, sum_of, write_file
from oomguard.checks import check_whole, shown
from oomguard.errors import MisuseError
from oomguard.files import sync_directory
from oomguard.spec import Spec
from oomguard.step import Training
from oomguard.units import format_bytes

VERSION = 1
"""Of the format. One that this version does not know is not read."""
TENSORS, FACTS, SUMS = "tensors.safetensors", "facts.json", "checksums.json"
_UNFINISHED = ".unfinished-"
"""What is being written or removed begins with it. After a kill the next save removes it."""
_NAME = re.compile(r"step-(\d{8,})-save-(\d{4,})")


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in `facts.json`."""

    version: int
    step: int
    spec: Spec
    candidate: Candidate
    state: State
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found whole. Its tensors are still in its directory."""

    path: Path
    """The directory."""
    step: int
    """Optimizer steps made when it was saved."""
    spec: Spec
    """What was trained."""
    candidate: Candidate
    """How."""
    facts: dict[str, Any]
    """What the caller gave `save`, as JSON has it: tuples came back as lists, keys as text."""
    state: State
    """The optimizer's numbers and the scaler's."""


def save(
    directory: str | os.PathLike[str],
    training: Training,
    facts: Mapping[str, Any] | msgspec.Struct,
    keep: int = 3,
) -> Path:
    """Write a checkpoint, and once it is safe remove all but the last `keep`. Returns its directory.

    `facts` is what the caller needs to go on: at least the `step`, and whatever else JSON can hold.
    """
    check_whole("how many checkpoints are kept", keep, 1, 10**6, optional=False)
    state, tensors = take(training)
    given = _builtins(facts)
    step: Any = given.get("step") if isinstance(given, dict) else None
    check_whole("the step in a checkpoint's facts", step, 0, 10**15, optional=False)
    spec, candidate = training.model.spec, training.candidate
    content = _Content(version=VERSION, step=step, spec=spec, candidate=candidate, state=state, facts=given)
    text = json.dumps(_builtins(content), indent=1).encode()  # not msgspec: it has no infinity, nor ints over 64 bits
    try:
        path = _written(Path(directory), step, tensors, text)
    except OSError as error:
        raise _cannot(Path(directory), error, sum(t.nbytes for t in tensors.values())) from None
    _keep(Path(directory), keep)
    return path


def _builtins(value: object) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except TypeError as error:
        raise MisuseError(
            rule="The facts of a checkpoint must be what JSON can hold",
            got=f"in {shown(value)}: {error}",
            advice="Turn tensors and NumPy values into plain numbers, with float() or .tolist().",
        ) from None


def _written(home: Path, step: int, tensors: dict[str, Tensor], text: bytes) -> Path:
    """The new checkpoint, on the disk under its name."""
    if not home.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        sync_directory(home.parent)
    for rest in home.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(rest)
    serial = max((_serial(path) for path in _listed(home)), default=0) + 1
    # steps may come back (after a fall back to an older checkpoint), so it is the serial number that tells the newest
    name = f"step-{step:08d}-save-{serial:04d}"
    unfinished = home / f"{_UNFINISHED}{name}"
    try:
        unfinished.mkdir()
        sums = {TENSORS: write_file(unfinished / TENSORS, packed(tensors))}
        sums[FACTS] = write_file(unfinished / FACTS, [text])
        write_file(unfinished / SUMS, [msgspec.json.encode(sums)])
        sync_directory(unfinished)
        os.replace(unfinished, home / name)
        sync_directory(home)
    finally:  # of a save that failed; there is nothing left of one that did not
        shutil.rmtree(unfinished, ignore_errors=True)
    return home / name


def _keep(home: Path, count: int) -> None:
    """Remove all but the newest so many. What cannot be removed is told, since the new checkpoint is safe anyhow."""
    for path in _listed(home)[count:]:
        unfinished = path.with_name(f"{_UNFINISHED}{path.name}")
        try:
            os.replace(path, unfinished)  # at once: half a checkpoint never bears a checkpoint's name
            shutil.rmtree(unfinished)
        except OSError as error:
            warnings.warn(f"{path}: an old checkpoint could not be removed ({error.strerror}).", stacklevel=3)


def _listed(home: Path) -> list[Path]:
    """What bears a checkpoint's name, the newest first."""
    return sorted((path for path in home.iterdir() if _NAME.fullmatch(path.name)), key=_serial, reverse=True)


def _serial(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None  # only what is listed is asked
    return int(found[2])


def load(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there is not any.

    One that is damaged is passed over with a warning that names the file. If all are, it is an error.

    >>> load("/tmp/oomguard-has-never-been-here") is None
    True
    """
    home, seen = Path(directory), None
    try:
        while (listed := _listed(home)) != seen:  # a training that goes on may have removed what is being read
            seen = listed
            for path in listed:
                found = _opened(path)
                if isinstance(found, Checkpoint):
                    return found
                if path.is_dir():
                    warnings.warn(f"{path / found}; the checkpoint before it is looked for.", stacklevel=2)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot(home, error) from None
    if not seen:
        return None
    raise MisuseError(
        rule="To go on, at least one checkpoint must be whole",
        got=f"all {len(seen)} in {home} are damaged",
        advice="Bring one back from a backup, or give another directory to start anew.",
    )


def _opened(path: Path) -> Checkpoint | str:
    """A checkpoint, or the file that is not as it was written, and why."""
    name = SUMS
    try:
        sums = msgspec.json.decode((path / SUMS).read_bytes(), type=dict[str, Sum])
        for name in (FACTS, TENSORS):
            if name not in sums or sum_of(path / name) != sums[name]:
                return f"{name}: its checksum does not agree"
        name = FACTS
        raw = json.loads((path / FACTS).read_bytes())
        if raw["version"] != VERSION:
            return f"{name}: its format is version {shown(raw['version'])}, and only {VERSION} can be read"
        content = msgspec.convert(raw, type=_Content, str_keys=True)
    except OSError as error:
        return f"{name}: it cannot be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # not what one of ours has written
        return f"{name}: it cannot be understood ({error})"
    return Checkpoint(
        path=path,
        step=content.step,
        spec=content.spec,
        candidate=content.candidate,
        facts=content.facts,
        state=content.state,
    )


def _cannot(home: Path, error: OSError, size_bytes: int | None = None) -> MisuseError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    room = f"Make room for {format_bytes(size_bytes)}" if full and size_bytes else ""
    return MisuseError(
        rule="A directory of checkpoints must be one that can be read and written",
        got=f"{home} cannot be ({error.strerror})",
        advice=f"{room}, or give another directory; what was there before is still there."
        if room
        else "Give a directory of yours.",
    )
