"""Array files (`.npy`) and arrays: N x T x F, or one long series T x F; tokens N x T, or T."""

import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from oomguard.data.columns import Columns, choose_columns, choose_inputs
from oomguard.data.options import DataOptions
from oomguard.data.rows import Store
from oomguard.data.source import Array, Mapped, fingerprint, nothing_in, unreadable
from oomguard.data.values import target_width
from oomguard.errors import MisuseError
from oomguard.spec import Spec


def open_array(data: str | Path | Array, spec: Spec, options: DataOptions) -> Store:
    """An array as a store; of a file only the header is read."""
    inputs = map_array(data)
    path = inputs.path
    own = data if isinstance(data, np.ndarray) else Path(data)
    about = {"kind": "npy", "path": path, "shape": list(inputs.shape), "bytes": _bytes(inputs)}
    inputs, long = _series(inputs, spec)
    if 0 in inputs.shape:
        raise nothing_in(path)
    series, steps = (1, inputs.shape[0]) if long else inputs.shape[:2]
    borders = np.arange(series + 1, dtype=np.int64) * steps
    if options.targets is not None:
        columns = _inputs_only(inputs, spec, options)
        targets, per_series = _target_file(options.targets, spec, inputs, long)
        return Store(
            inputs=inputs,
            targets=targets,
            borders=borders,
            long=long,
            input_columns=columns,
            ahead=options.ahead or 0,
            per_series=per_series,
            about=about | {"targets": options.targets, "content": fingerprint(own, Path(options.targets))},
        )
    chosen = _columns(inputs, spec, options)
    return Store(
        inputs=inputs,
        targets=inputs,
        borders=borders,
        long=long,
        input_columns=chosen.inputs or None,
        target_columns=chosen.targets or None,
        ahead=chosen.ahead,
        about=about | {"content": fingerprint(own)},
    )


def map_array(data: str | Path | Array) -> Mapped:
    """A `.npy` file by its header, or an array that is there."""
    if isinstance(data, np.ndarray):
        mapped = Mapped.held(data)
    else:
        try:
            with open(data, "rb") as file:
                version = _version(file, data)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(file)
                mapped = Mapped(str(data), dtype, shape, file.tell(), "F" if fortran else "C")
                needed = file.tell() + dtype.itemsize * math.prod(shape)
        except MisuseError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(data, error) from None
        size_bytes = Path(data).stat().st_size
        if size_bytes < needed:
            raise unreadable(data, ValueError(f"it has {size_bytes:,} of {needed:,} bytes"))
    if mapped.dtype.kind not in "fiub":
        raise MisuseError(
            rule="An array must hold numbers",
            got=f"{mapped.path} holds {mapped.dtype}",
            advice="Save it as float32, or int64 for tokens.",
        )
    return mapped


def _version(file: BinaryIO, path: str | Path) -> tuple[int, int]:
    """Of the format, by which such a file begins."""
    if not Path(path).stat().st_size:
        raise nothing_in(path)
    try:
        version: tuple[int, int] = np.lib.format.read_magic(file)
    except ValueError:
        raise MisuseError(
            rule="A .npy file is one that np.save has written",
            got=f"{path} does not begin as these do",
            advice="Save it with np.save, or say as --format what it is.",
        ) from None
    return version


def _bytes(mapped: Mapped) -> int:
    return int(mapped.dtype.itemsize) * math.prod(mapped.shape)


def _series(mapped: Mapped, spec: Spec) -> tuple[Mapped, bool]:
    """The array by series, and whether it is one long one."""
    axes = 1 if spec.vocab is not None else 2
    if len(mapped.shape) == 1 and axes == 2 and spec.features == 1:  # one number per step
        return mapped, True
    if len(mapped.shape) not in (axes, axes + 1):
        forms = "N x T x F, or T x F" if axes == 2 else "N x T, or T"
        raise MisuseError(
            rule=f"An array must be {forms}, N series of T steps",
            got=f"{mapped.path} is {' x '.join(map(str, mapped.shape)) or 'a single number'}",
            advice="Reshape it, or check --features and --vocab.",
        )
    long = len(mapped.shape) == axes
    return (mapped, True) if long else (mapped.grouped(), False)


def _columns(inputs: Mapped, spec: Spec, options: DataOptions) -> Columns:
    """Of one file for both inputs and targets."""
    if len(inputs.shape) == (2 if inputs.group is None else 3):
        names = [str(number) for number in range(inputs.shape[-1])]
        return choose_columns(names, spec, options, inputs.path)
    names = ["0"]  # tokens, or one number per step
    chosen = choose_columns(names, spec, options, inputs.path)
    return Columns((), (), chosen.ahead)


def _inputs_only(inputs: Mapped, spec: Spec, options: DataOptions) -> tuple[int, ...] | None:
    """With targets in a file of their own, all columns may be inputs."""
    if options.target is not None:
        raise MisuseError(
            rule="Targets are columns or a file of their own",
            got=f"got --target {','.join(options.target)} and --targets {options.targets}",
            advice="Leave one of the two out.",
        )
    if len(inputs.shape) != (2 if inputs.group is None else 3):
        return None
    return choose_inputs([str(number) for number in range(inputs.shape[-1])], spec, options, inputs.path)


def _target_file(path: str, spec: Spec, inputs: Mapped, long: bool) -> tuple[Mapped, bool]:
    """The targets, and whether there is one for each series instead of for each step."""
    targets, width = map_array(path), target_width(spec)
    lead = inputs.shape[:1] if long else inputs.shape[:2]
    shapes = [targets.shape, (*targets.shape, 1)]  # a single number needs no axis
    if not long and spec.head == "last-step" and (lead[0], width) in shapes:
        return targets, True
    if (*lead, width) in shapes:
        return targets if long else targets.grouped(), False
    wanted = " x ".join(map(str, (*lead, width)))
    if not long and spec.head == "last-step":
        wanted += f" (or {lead[0]} x {width}, one for each series)"
    raise MisuseError(
        rule=f"The targets of {inputs.path} must be {wanted}",
        got=f"{path} is {' x '.join(map(str, targets.shape))}",
        advice="Check --targets, --outputs and --head.",
    )
