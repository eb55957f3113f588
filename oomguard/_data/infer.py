"""Inference of a model from its data: features, outputs, vocabulary, head, loss and lengths.

All that is given stays as it is, and is checked when the data is opened.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oomguard._core.errors import MisuseError
from oomguard._core.system import run_elsewhere
from oomguard._core.units import format_span
from oomguard._data.columns import Inferred, listed, read_columns
from oomguard._data.files import BYTE_TOKENS, characters_of, map_array
from oomguard._data.frames import SERIES, frame_defaults, is_frame, table_errors, write_frame
from oomguard._data.open import Missing, histogram, is_dataset, kind_of, open_source
from oomguard._data.options import DataOptions, PlanData, check_used, from_the_end
from oomguard._data.rows import Source, as_array
from oomguard._data.source import Array
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec, longest_seq


def spec_from_data(fields: dict[str, Any], data: Any, options: DataOptions) -> tuple[Spec, PlanData]:
    """The spec with these fields and those of the data, and how the data is read."""
    if fields.get("lengths") is not None:
        raise MisuseError(
            rule="The lengths of sequences come from a histogram or from data",
            got="got both",
            advice="Leave --lengths or --data out.",
        )
    if is_frame(data):
        fields, options = frame_defaults(data, fields, options)
        table = write_frame(data)
        with table_errors(table):
            spec, found = _from_data(fields, table, options)
        return spec, msgspec.structs.replace(found, path=None)
    return _from_data(fields, data, options)


def _from_data(fields: dict[str, Any], data: Any, options: DataOptions) -> tuple[Spec, PlanData]:
    given = {name: value for name, value in fields.items() if value is not None}
    path = str(data) if isinstance(data, str | Path) else None
    inferred = _infer(Inferred(fields=given, options=options), data)
    given, options, seq = inferred.fields, inferred.options, fields.get("seq")
    spec = make_spec({"seq": 1} | given)
    if seq is None:
        spec = msgspec.structs.replace(spec, seq=longest_seq(spec))
    source = open_source(data, spec, options)
    if seq is None and (source.store.long or options.stride is not None):
        raise MisuseError(
            rule="One long series is cut into windows of --seq steps",
            got="there is no --seq",
            advice="Add --seq, or name the column that says which series a row belongs to as --id.",
        )
    lengths = histogram(*np.unique(source.lengths, return_counts=True))
    spec = msgspec.structs.replace(spec, seq=max(lengths) if seq is None else seq, lengths=lengths)
    notes = (_size(source, options), *inferred.notes, *_order(source, options), *_missing(source, options))
    return spec, PlanData(path=path, options=options, notes=notes)


def complete(data: Any, options: DataOptions) -> DataOptions:
    """The options with the columns of a table that has dates or text; the same for all other data."""
    if is_frame(data):
        _, options = frame_defaults(data, {}, options)
        data = write_frame(data)
    kind = kind_of(Path(data), options) if isinstance(data, str | Path) else None
    if kind not in ("csv", "parquet") or options.categories:
        return options
    columns = run_elsewhere("oomguard._data.survey", "survey", Path(data), kind, options.id, ())
    if all(column.kind == "number" for column in columns):
        return options
    return read_columns(Inferred(fields={}, options=options), columns, str(data)).options


def _infer(given: Inferred, data: Any) -> Inferred:
    if isinstance(data, str | Path):
        path, options = Path(data), given.options
        kind = kind_of(path, options)
        check_used(kind, options)
        if kind == "text":
            return _from_text(given, path)
        if kind == "npy":
            return _from_array(given, map_array(path).array)
        classes = options.target or () if given.fields.get("loss") == "cross-entropy" else ()
        columns = run_elsewhere("oomguard._data.survey", "survey", path, kind, options.id, classes)
        return read_columns(given, columns, str(data))
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        return _from_array(given, as_array(data))
    return _from_items(given, data) if is_dataset(data) else given


def _from_text(given: Inferred, path: Path) -> Inferred:
    """A token for each byte, or for each character that occurs."""
    options = given.options
    if not options.characters:
        found = given.with_fields(vocab=BYTE_TOKENS)
        return replace(found, notes=("Tokens are bytes; the target of each is the next one (--characters).",))
    vocabulary = options.vocabulary or characters_of(path)
    note = f"Tokens are the {len(vocabulary):,} different characters; the target of each is the next one."
    found = given.with_fields(vocab=max(2, len(vocabulary)))
    return replace(found, options=msgspec.structs.replace(options, vocabulary=vocabulary), notes=(note,))


def _from_array(given: Inferred, array: Array) -> Inferred:
    """The last axis has the features; the targets are columns of it, an array of their own, or the next inputs."""
    fields, options = given.fields, given.options
    if "vocab" in fields or array.ndim not in (1, 2, 3):
        return given
    width = array.shape[-1] if array.ndim > 1 else 1
    given = replace(given, options=(options := from_the_end(options, width)))
    if options.targets is not None:
        targets = map_array(Path(options.targets)).array
        per_series = array.ndim == 3 and targets.shape[:2] != array.shape[:2]
        return _with_classes(given.with_fields(features=width, **{"head": "last-step"} if per_series else {}), targets)
    if options.target is not None:
        count = len(options.target)
        inputs = len(options.columns or ()) or width - count or width
        others = options.columns or [str(n) for n in range(width) if str(n) not in options.target or count == width]
        notes = tuple(
            f"{what}: {listed(names)} (by number)."
            for what, names in (("Input columns", others), ("Target columns", options.target))
        )
        found = replace(given.with_fields(features=inputs), notes=(*given.notes, *notes))
        if fields.get("loss") == "cross-entropy":
            column = array[..., int(options.target[0])] if options.target[0].isdecimal() else array
            return found.with_fields(outputs=max(2, int(column.max()) + 1))
        return found.with_fields(outputs=count)
    if "features" in fields:
        return given
    inputs = len(options.columns or ()) or width
    note = "The targets are the inputs, one step ahead (--target names other columns)."
    return replace(given.with_fields(features=inputs, outputs=inputs), notes=(note,))


def _with_classes(given: Inferred, targets: Array) -> Inferred:
    """The loss and the outputs for targets in an array of their own: whole numbers are classes."""
    loss = given.fields.get("loss") or ("cross-entropy" if targets.dtype.kind in "iub" else "mse")
    if loss == "cross-entropy":
        classes = max(2, int(targets.max()) + 1)
        note = f"The targets are {classes:,} classes (--loss mse takes them for numbers)."
        return replace(given.with_fields(loss=loss, outputs=classes), notes=(*given.notes, note))
    lead = 1 if given.fields.get("head") == "last-step" else 2
    return given.with_fields(loss=loss, outputs=targets.shape[-1] if targets.ndim > lead else 1)


def _from_items(given: Inferred, dataset: Any) -> Inferred:
    """The pairs of a Dataset: whole numbers in one axis are tokens, whole numbers as targets are classes."""
    if {"features", "vocab"} & given.fields.keys() or not len(dataset):
        return given
    features, top, class_top, per_step = 0, -1, -1, True
    for number in range(len(dataset)):
        item = dataset[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            return given
        inputs, targets = map(as_array, item)
        if inputs.ndim == 1 and inputs.dtype.kind in "iu":
            top = max(top, int(inputs.max(initial=-1)))
        features = inputs.shape[1] if inputs.ndim == 2 else 1
        per_step = per_step and targets.ndim > 0 and len(targets) == len(inputs)
        if targets.dtype.kind in "iub":
            class_top = max(class_top, int(targets.max(initial=-1)))
    found = given.with_fields(head="per-step" if per_step else "last-step")
    found = found.with_fields(features=features) if top < 0 else found.with_fields(vocab=max(2, top + 1))
    if class_top >= 0:
        return found.with_fields(loss="cross-entropy", outputs=max(2, class_top + 1))
    lead = 1 if per_step else 0
    return found.with_fields(loss="mse", outputs=targets.shape[-1] if targets.ndim > lead else 1)


def _size(source: Source, options: DataOptions) -> str:
    """The number of sequences and their lengths, in a sentence."""
    lengths, store = source.lengths, source.store
    form = "windows" if store.long or options.stride is not None else "series"
    by = f" by {options.id}" if options.id not in (None, SERIES) else ""
    shortest, longest = int(lengths.min()), int(lengths.max())
    steps = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    whole = len(np.unique(source.cuts.pieces.series))
    if form == "series" and whole < len(lengths):  # they were cut around missing values
        return f"{whole:,} series{by}, in {len(lengths):,} sequences of {steps} steps."
    return f"{len(lengths):,} {form}{by} of {steps} steps."


def _missing(source: Source, options: DataOptions) -> list[str]:
    """Sentences on missing values and on what was left out for them."""
    notes = [] if options.fill is None else [f"Missing inputs are filled (--fill {options.fill})."]
    left_out = Missing(**source.missing).words()
    return [*notes, f"Of all sequences, {left_out}."] if left_out else notes


def _order(source: Source, options: DataOptions) -> list[str]:
    """Sentences on the order of the rows in time and on gaps."""
    times = source.store.about.get("times")
    if times is None:
        return []
    notes = [f"Rows are sorted by {options.time}" + ("." if times["sorted"] else "; in the file they are not.")]
    if times["gaps"]:
        gaps = "is 1 gap" if times["gaps"] == 1 else f"are {times['gaps']:,} gaps"
        usual, longest = format_span(times["interval"]), format_span(times["longest"])
        notes.append(f"There {gaps} of more than {usual}, the longest {longest}.")
    if times["repeated"]:
        which = "" if options.id is not None else " If they are several series, name their column as --id."
        notes.append(f"{times['repeated']:,} rows have the same {options.time} as the one before.{which}")
    return notes
