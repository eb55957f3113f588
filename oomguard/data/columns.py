"""Which columns of a table or an array are inputs, which are targets, and how far ahead these lie."""

from collections.abc import Iterable
from typing import NamedTuple

from oomguard.checks import nearest
from oomguard.data.options import DataOptions
from oomguard.data.values import target_width
from oomguard.errors import MisuseError
from oomguard.spec import Spec


class Columns(NamedTuple):
    """Columns by their number in the file."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    ahead: int
    """Steps that a target lies ahead of its inputs."""


def choose_columns(names: list[str], spec: Spec, options: DataOptions, path: object) -> Columns:
    """The columns that are inputs and those that are targets, from those that may be either.

    >>> spec = Spec(cell="gru", seq=5, features=2)
    >>> choose_columns(["a", "b", "y"], spec, DataOptions(), "x.csv")
    Columns(inputs=(0, 1), targets=(2,), ahead=0)
    >>> choose_columns(["a", "b"], spec, DataOptions(target=("b",)), "x.csv")
    Columns(inputs=(0, 1), targets=(1,), ahead=1)
    """
    if options.inputs_only:
        return _aimless(names, spec, options, path)
    _check_there(names, (*(options.columns or ()), *(options.target or ())), path)
    width = 1 if spec.vocab is not None else spec.inputs
    inputs = list(options.columns) if options.columns else _free(names, width, spec, options)
    if len(inputs) != width:
        raise _wrong_width(inputs, width, path)
    targets = list(options.target) if options.target else _implied(names, inputs, spec, path)
    if len(targets) != target_width(spec):
        raise MisuseError(
            rule=f"There must be as many target columns as the head gives ({target_width(spec)})",
            got=f"{path} has {len(targets)}: {_listed(targets)}",
            advice="Change --target or --outputs.",
        )
    ahead = options.ahead if options.ahead is not None else int(bool(set(inputs) & set(targets)))
    return Columns(_places(names, inputs), _places(names, targets), ahead)


def _aimless(names: list[str], spec: Spec, options: DataOptions, path: object) -> Columns:
    """The inputs alone: those that were named, or what is no target, or the first ones."""
    width = 1 if spec.vocab is not None else spec.inputs
    rest = _without(names, options.target or ())
    inputs = list(options.columns or (rest if len(rest) >= width else names)[:width])
    _check_there(names, tuple(inputs), path)
    if len(inputs) != width:
        raise _wrong_width(inputs, width, path)
    return Columns(_places(names, inputs), _places(names, inputs), 0)


def choose_inputs(names: list[str], spec: Spec, options: DataOptions, path: object) -> tuple[int, ...]:
    """The columns that are inputs, where the targets are elsewhere."""
    inputs = list(options.columns or names)
    _check_there(names, tuple(inputs), path)
    if len(inputs) != spec.inputs:
        raise _wrong_width(inputs, spec.inputs, path)
    return _places(names, inputs)


def _free(names: list[str], width: int, spec: Spec, options: DataOptions) -> list[str]:
    """The inputs, if nobody named them: what is no target; or all, if only then there are enough."""
    if options.target:
        rest = _without(names, options.target)
        return names if len(rest) != width and len(names) == width else rest
    return names[:width] if len(names) == width + target_width(spec) else names


def _implied(names: list[str], inputs: list[str], spec: Spec, path: object) -> list[str]:
    """The targets, if nobody named them: the columns after the inputs, or what comes next."""
    rest = _without(names, inputs)
    if len(rest) == target_width(spec):
        return rest
    if forecasts(spec):
        return inputs
    raise MisuseError(
        rule="Without --target the head must give as much as there is in the input, to predict the next step",
        got=f"{path} has {len(inputs)} input columns, and the head gives {spec.classes}",
        advice=f"Name a column as --target, or set --outputs {spec.vocab or spec.inputs}.",
    )


def forecasts(spec: Spec) -> bool:
    """Whether the head gives what the input holds, so that the targets can be the next inputs."""
    if spec.vocab is not None:
        return spec.loss == "cross-entropy" and spec.classes == spec.vocab
    return spec.loss == "mse" and spec.classes == spec.inputs


def _check_there(names: list[str], wanted: tuple[str, ...], path: object) -> None:
    known = set(names)
    for name in wanted:
        if name not in known:
            raise missing_column(name, names, path)


def _places(names: list[str], some: list[str]) -> tuple[int, ...]:
    known = {name: place for place, name in enumerate(names)}  # there may be a million
    return tuple(known[name] for name in some)


def _without(names: list[str], some: Iterable[str]) -> list[str]:
    left_out = set(some)
    return [name for name in names if name not in left_out]


def missing_column(name: str, names: list[str], path: object) -> MisuseError:
    """The error for a column that the file does not have."""
    return MisuseError(
        rule="A column that is named must be in the file",
        got=f"{path} has no column {name!r}",
        advice=nearest(name, names[:50]),
    )


def _wrong_width(inputs: list[str], width: int, path: object) -> MisuseError:
    return MisuseError(
        rule=f"There must be as many input columns as the spec has features ({width})",
        got=f"{path} has {len(inputs)}: {_listed(inputs)}",
        advice=f"Set --features {len(inputs)}, or name the inputs as --columns.",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
