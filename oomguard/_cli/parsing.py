"""Turns the text of flags into specs, knobs and options."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._cli.flags import (
    CANDIDATE,
    CUT,
    DATA,
    FIXED,
    MODEL,
    PRESET,
    SPEC,
    SPEC_FIELDS,
    TASK_PLANNED,
    TRAINED,
    Flag,
)
from oomguard._core.errors import MisuseError, check_whole, conflict, flag, shown
from oomguard._core.system import check_regular
from oomguard._data.options import DataOptions, PlanData
from oomguard._keras.read import is_keras
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import load_fields, make_spec, preset_fields, with_batch
from oomguard._spec.spec import MAX_BATCH, MAX_SEQ, Spec
from oomguard._task.estimate import COUNTED
from oomguard._task.task import NAME, check_known

if TYPE_CHECKING:  # a plan is made or read by other commands only
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import Plan


def read(values: dict[str, Any]) -> tuple[Spec, Candidate]:
    """The spec and the candidate that the flags describe; flags override a spec file and a preset."""
    spec, knobs = _read(values, CANDIDATE)
    return spec, make_candidate(spec, **knobs)


def read_task(values: dict[str, Any], also: tuple[str, ...] = ()) -> tuple[str | None, dict[str, Any]]:
    """The name of a task and its options, `also` those of a spec that a task has too; None if --model names no task."""
    name = values.get("model")
    if name is None or not NAME.fullmatch(name):
        return None, {}
    check_known(name)
    knobs, fields = read_options(values, CANDIDATE), read_options(values, [PRESET, *SPEC_FIELDS])
    steps = {"steps": fields.pop("seq")} if "seq" in fields else {}
    shared = {name: fields.pop(name) for name in also if name in fields}
    for field in fields:
        raise MisuseError(
            rule=f"{flag(field)} describes a built-in model",
            got=f"got --model {name}, a task",
            advice=f"Leave it out; a task takes --seq and {', '.join(map(flag, COUNTED))}.",
        )
    return name, knobs | steps | shared


def read_keras(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path of a Keras model, and its options: knobs, `steps`, and a batch that becomes microbatches."""
    knobs, fields = read_options(values, CANDIDATE), read_options(values, [PRESET, *SPEC_FIELDS])
    steps = {"steps": fields.pop("seq")} if "seq" in fields else {}
    batch = fields.pop("batch", None)
    check_whole("seq", steps.get("steps"), 1, MAX_SEQ)
    check_whole("batch", batch, 1, MAX_BATCH)
    for field in fields:
        got, advice = f"got {values['model']}, a model of Keras", "Leave it out; the file has the layers."
        raise MisuseError(rule=f"{flag(field)} describes a built-in model", got=got, advice=advice)
    if batch is not None:
        knobs = {"microbatch": batch} | knobs
        check_whole("microbatch", knobs["microbatch"], 1, MAX_BATCH)
        knobs = {"accumulation": -(-batch // knobs["microbatch"])} | knobs
    return values["model"], knobs | steps


def read_training(values: dict[str, Any], plan: "Plan | TaskPlan | None") -> tuple[Any, dict[str, Any]]:
    """The data, or the name of the task, that a plan is trained with, and the options of the training."""
    from oomguard._plan.value import Plan

    options = read_options(values, [*DATA[1:], *TRAINED, *TASK_PLANNED])
    if isinstance(plan, Plan):
        for option in TASK_PLANNED:
            if option.name in values:
                raise conflict("The plan of a spec has its own " + option.name, "a plan", option.word)
        return values.get("data"), options
    name = options.pop("model", None)
    if name is None or not NAME.fullmatch(name):
        rule = (
            "oomguard train needs a plan file, or a task" if plan is None else f"The plan is for the task {plan.task}"
        )
        advice = "Write it as oomguard train plan.json, or as oomguard train --model package.module:task."
        advice = advice if plan is None else f"Add --model {plan.task}: no plan file imports code by itself."
        raise MisuseError(rule=rule, got="got none" if name is None else f"got --model {shown(name)}", advice=advice)
    if "data" in values:
        raise conflict("A task has its own data", f"--model {name}", "--data")
    check_known(name)
    return name, options


def read_planned(values: dict[str, Any]) -> tuple[Spec, dict[str, Any], PlanData | None]:
    """The spec, the fields (the batch if given) and knobs that a search keeps fixed, and the data that was read."""
    options, opened = read_options(values, CUT[1:]), list[PlanData]()
    if "data" in values:
        from oomguard._data.infer import spec_from_data

        def make(fields: dict[str, Any]) -> Spec:
            spec, data = spec_from_data(fields, values["data"], DataOptions(**options))
            opened.append(data)
            return spec

        # the lengths of the data replace those of a spec file
        spec, knobs = _read(values, FIXED, {"lengths": None}, make)
    elif options:
        rule = f"{flag(next(iter(options)))} says how data is read"
        raise MisuseError(rule=rule, got="there is no --data", advice="Add --data with a file.")
    else:
        usual = {"seq": 1} if values.get("maximize", "").split(",")[0].strip() == "seq" else {}
        spec, knobs = _read(values, FIXED, make=lambda fields: make_spec(usual | fields))
    fields = msgspec.structs.asdict(spec)
    if "batch" not in _spec_fields(values.get("model"), values.get("preset")) | values:
        del fields["batch"]
    return spec, with_batch(fields, knobs) | knobs, opened[0] if opened else None


def _read(
    values: dict[str, Any],
    flags: list[Flag],
    usual: Mapping[str, Any] = {},
    make: Callable[[dict[str, Any]], Spec] = make_spec,
) -> tuple[Spec, dict[str, Any]]:
    """The spec that `make` builds from its fields, and the knobs. `usual`: fields that apply unless flags are given."""
    fields, knobs = {**usual, **read_options(values, SPEC_FIELDS)}, read_options(values, flags)
    if "accumulation" in knobs:  # with the microbatch it gives the batch, and replaces that of a file
        fields = with_batch(fields, knobs)
    if "features" in fields and "vocab" not in fields:
        fields |= {"vocab": None, "embedding": fields.get("embedding")}
    elif "vocab" in fields and "features" not in fields:
        fields["features"] = None
    return make(with_batch(_spec_fields(values.get("model"), values.get("preset")) | fields, knobs)), knobs


def read_table(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `find_subject`: spec (None: that of the plan), records, what varies, device and knobs."""
    from oomguard._report.grid import check_own_spec, fields_for

    if "plan" in values and "ledger" in values:
        raise conflict("Measurements come from a plan or from a ledger", "--plan", "--ledger")
    over = read_varied(values)
    given = [name for option in SPEC for name in (option.name, f"no_{option.name}") if name in values]
    if "plan" in values:
        check_own_spec(given)
        spec, knobs = None, read_options(values, FIXED)
    else:
        described = values.get("preset") is not None or values.get("model") not in MODEL.choices
        spec, knobs = _read(values, FIXED, {} if described else fields_for(over, given))
    measured = values.get("plan") or values.get("ledger")
    return {"spec": spec, "over": over or None, "device": values.get("device"), "measured": measured} | knobs


def read_varied(values: dict[str, Any]) -> dict[str, list[Any]]:
    """The names and the values of --over."""
    from oomguard._report.grid import read_text

    pairs = [read_text(text) for text in values.get("over", ())]
    if len({name for name, _ in pairs}) < len(pairs):
        raise MisuseError(
            rule="--over takes each name once",
            got=f"got {shown([name for name, _ in pairs])}",
            advice="Put all values of a name into one, such as 1..8,16,32.",
        )
    return dict(pairs)


def read_options(values: dict[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    """The values of these flags by field, as far as they were given."""
    options: dict[str, Any] = {}
    for option in flags:
        on, off = option.name in values, f"no_{option.name}" in values
        if option.kind is bool and on and off:
            raise conflict(f"{flag(option.name)} is turned on or off", flag(option.name), flag(f"no_{option.name}"))
        if option.kind is bool and (on or off):
            options[option.name] = on
        elif on:
            options[option.name] = _value(option, values[option.name])
    return options


def check_output(text: str, values: dict[str, Any], usual: str = "plan.json", name: str = "output") -> None:
    """Raise unless the file can be written, before any work is done, and is new or may be replaced (--force).

    `usual` is the example in the message.
    """
    target = Path(text)
    if target.is_file() and not values.get("force"):
        advice = f"Add --force to replace it, or give another {flag(name)}."
        raise MisuseError(rule=f"{flag(name)} must be a new file", got=f"{text} exists", advice=advice)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    try:
        check_regular(target)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise MisuseError(
            rule=f"{flag(name)} must be a file that can be written",
            got=f"{shown(text)} cannot ({getattr(error, 'strerror', None) or error})",
            advice=f"Give another {flag(name)}, such as {usual}.",
        ) from None


def _spec_fields(model: str | None, name: str | None) -> dict[str, Any]:
    """The fields of a spec that --model and --preset stand for."""
    if model is not None and NAME.fullmatch(model):
        raise MisuseError(
            rule="This command takes a model that a spec describes",
            got=f"got {shown(model)}, a task",
            advice="Describe its layers by flags (--model lstm --hidden 256).",
        )
    if is_keras(model):
        advice = f"Write oomguard estimate --model {model}, or use oomguard.integrations.keras.read_task in Python."
        rule = "This command takes a model that a spec describes"
        raise MisuseError(rule=rule, got=f"got {shown(model)}, a model of Keras", advice=advice)
    if model is not None and model.lower() in MODEL.choices:
        model = model.lower()
    is_path = model and (any(sign in model for sign in "./\\") or os.path.exists(model))
    if model is None or model in MODEL.choices or not is_path:
        return ({} if name is None else preset_fields(name)) | ({} if model is None else {"cell": model})
    if name is not None:
        rule = "A spec comes from a file or from a preset"
        raise conflict(rule, f"--model {shown(model)}", f"--preset {shown(name)}")
    return load_fields(Path(model))


def _value(option: Flag, text: str) -> Any:
    """The text as the type of the field; unchanged if it is not of that type, so that the field refuses it."""
    if option.kind is int:
        return _whole(text)
    if option.kind is float:
        with suppress(ValueError):
            return float(text)
    if option.kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _histogram(text) if option.kind is dict else text


def _whole(text: str) -> int | str:
    """A whole number such as 10000, 10_000, 10,000 or 10k; unchanged if it is none."""
    if match := re.fullmatch(r"(\d{1,12})(?:\.(\d{1,3}))?k", text, re.ASCII | re.IGNORECASE):
        return int(match[1]) * 1000 + int((match[2] or "").ljust(3, "0"))
    if re.fullmatch(r"\d{1,3}(,\d{3}){1,5}", text, re.ASCII):
        text = text.replace(",", "")
    plain = text.replace("_", "")
    return int(plain) if re.fullmatch(r"-?\d{1,18}", plain, re.ASCII) else text


def _histogram(text: str) -> Any:
    """`100:5000,2000:40` as a dict, or the histogram in a file; the counts of a repeated length are added."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,18}:\d{1,18}\s*", part, re.ASCII) for part in parts):
        if not os.path.exists(text) and Path(text).suffix not in (".npy", ".csv", ".tsv", ".txt"):
            return text
        from oomguard._data.open import read_lengths

        return read_lengths(text)
    histogram: dict[int, int] = {}
    for length, count in (map(int, part.split(":")) for part in parts):
        histogram[length] = histogram.get(length, 0) + count
    return histogram
