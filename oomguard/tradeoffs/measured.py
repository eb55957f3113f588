"""What was measured: where it is read from, and which of it is of a device."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oomguard.calibrate import same_model
from oomguard.candidate import KNOBS
from oomguard.checks import shown
from oomguard.errors import MisuseError
from oomguard.estimate import gpus
from oomguard.estimate.place import Place
from oomguard.plan.store import load_plan
from oomguard.plan.value import Plan
from oomguard.probe.ledger import RECORDS, Ledger
from oomguard.probe.record import Record
from oomguard.spec import Spec
from oomguard.tradeoffs.subject import SHAPE


class Evidence(NamedTuple):
    """What was measured."""

    records: tuple[Record, ...] = ()
    """All records."""
    plan: Plan | None = None
    """The plan that they are from, if they are from one."""


def read_measured(measured: Any) -> Evidence:
    """Records, and the plan they are from: a `Plan` or its file, a ledger or its directory, records, or None.

    >>> read_measured(None)
    Evidence(records=(), plan=None)
    """
    if measured is None:
        return Evidence()
    if isinstance(measured, Plan):
        return Evidence(measured.records, measured)
    if isinstance(measured, Ledger):
        return Evidence(tuple(measured.read()))
    if isinstance(measured, str | os.PathLike):
        return _from_path(Path(measured))
    if isinstance(measured, Iterable):
        records = tuple(measured)
        if all(isinstance(one, Record) for one in records):
            return Evidence(records)
    raise MisuseError(
        rule="What was measured is a plan, a ledger or records",
        got=f"got {shown(measured)}",
        advice="Give a Plan, the path of a plan.json, or the directory of a ledger.",
    )


def _from_path(path: Path) -> Evidence:
    source = path / RECORDS if path.is_dir() else path
    if not source.exists():
        raise MisuseError(
            rule="What was measured is in a plan's file or in a ledger's directory",
            got=f"there is no {source}",
            advice="Give the path of a plan.json, or the directory that --ledger named.",
        )
    if source.suffix == ".jsonl":
        return Evidence(tuple(Ledger(source).read()))
    plan = load_plan(source)
    return Evidence(plan.records, plan)


def of_device(records: Sequence[Record], place: Place) -> tuple[Record, ...]:
    """Those that were measured on such a device; raises if there are some, and none is.

    >>> from oomguard.estimate.place import CPU
    >>> of_device([], CPU)
    ()
    """
    found = tuple(one for one in records if _is_on(one, place))
    if records and not found:
        titles = sorted({one.title or one.device for one in records})
        raise MisuseError(
            rule="Measured figures are of the device that is asked about",
            got=f"got records of {', '.join(titles[:3])} for {place.device}",
            advice="Leave the device out, or the records.",
        )
    return found


def _is_on(record: Record, place: Place) -> bool:
    if not place.cuda or record.device == "cpu":
        return not place.cuda and record.device == "cpu"
    try:
        asked, own = gpus.card(place.device), gpus.card(record.title or "")
    except MisuseError:  # the card that is here, whatever it is called
        return True
    return asked.name == own.name


def usual_settings(records: Iterable[Record], spec: Spec) -> dict[str, Any]:
    """The settings (engine, threads, allocator, ...) that most records of a model have: what is not varied is like
    them, so that what was measured is in the table.

    >>> usual_settings([], Spec(cell="gru", seq=10))
    {}
    """
    own = [one.candidate for one in records if same_model(one.spec, spec)]
    if not own:
        return {}
    names = [name for name in KNOBS if name not in SHAPE]
    (settings, _), *_ = Counter(tuple(getattr(one, name) for name in names) for one in own).most_common(1)
    return dict(zip(names, settings, strict=True))
