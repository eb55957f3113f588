"""Reads jobs and cards: from TOML files, or from the same fields in Python. A list of values is a grid.

Nothing in a file is executed: a task is only named, and paths are only read.
"""

import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError, check_names, check_whole, shown, visible
from oomguard._core.system import file_errors, read_file
from oomguard._core.units import parse_seconds
from oomguard._estimate import cards
from oomguard._fleet.fit import Request
from oomguard._spec.candidate import KNOBS, check_allow, check_fixed, make_candidate
from oomguard._spec.read import make_spec, preset_fields, with_batch
from oomguard._spec.spec import Spec
from oomguard._task.task import NAME, Task, check_known

MAX_FILE_BYTES = 1 << 26
MOST_JOBS = 1_000_000
MOST_LETTERS = 200  # of a name
FIXED = tuple(name for name, knob in KNOBS.items() if knob.searched)  # knobs that a job can fix
OWN = ("name", "preset", "task", "allow", "measured", "sequences", "epochs", "time", "data")
TASK_FIELDS = ("seq", "batch")
LISTS = ("allow", "measured", "frozen")  # fields whose value is a list; a grid of them is a list of lists

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

Source = str | os.PathLike[str] | Sequence[Any]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job: what it trains, and what is known of it."""

    name: str
    request: Request | None = None  # the model and the rules of its search; None for a task
    task: Any = None  # a Task, or its name `package.module:task`
    seq: int | None = None  # time steps of a task; None: its longest samples
    batch: int | None = None  # rows of a batch of a task; None: those of its loader
    allow: tuple[str, ...] = ("precision",)
    measured: tuple[str, ...] = ()  # paths of plans and ledgers
    sequences: int | None = None  # sequences of an epoch
    epochs: int | None = None
    seconds: float | None = None  # the time that the job may take, as the user says
    data: str | None = None  # the data that an emitted job trains on


class FleetCard(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of card: how many there are, and the price of one for an hour."""

    card: cards.Card
    count: int
    price: float
    label: str | None = None  # how a scheduler names it: Slurm's GRES type, Ray's accelerator type, a node's label

    @property
    def name(self) -> str:
        return self.card.name


def read_jobs(source: Source) -> list[Job]:
    """All jobs of a file, or of a list of dicts with the same fields; grids are written out."""
    rows, where, folder = _rows(source, "job")
    jobs: list[Job] = []
    for number, row in enumerate(rows, 1):
        place = f"{where}[[job]] {number}"
        for fields in _grid(row, place, MOST_JOBS - len(jobs)):
            with _In(place):
                jobs.append(_job(fields, folder))
    names = [job.name for job in jobs]
    for name in _repeated(names):
        rule = f"In {where}every job has a name of its own" if where else "Every job has a name of its own"
        raise MisuseError(rule=rule, got=f"{shown(name)} occurs twice", advice="Rename one of them.")
    return jobs


def read_cards(source: Source) -> list[FleetCard]:
    """All cards of a file, or of a list of names or of dicts with the same fields."""
    rows, where, _ = _rows(source, "card")
    found: list[FleetCard] = []
    for number, row in enumerate(rows, 1):
        with _In(f"{where}[[card]] {number}"):
            found.append(_card({"name": row, "price": 0.0} if isinstance(row, str) else row))
    for name in _repeated([card.name for card in found]):
        raise MisuseError(rule="Every card is listed once", got=f"{name} occurs twice", advice="Add up their counts.")
    return found


class _In:
    """Adds the place in the file to an error."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, MisuseError):
            rule = f"{visible(self.place)}: {error.rule}"
            raise MisuseError(rule=rule, got=error.got, advice=error.advice) from None


def _rows(source: Source, kind: str) -> tuple[Sequence[Any], str, Path]:
    """The tables of a file, its name for messages, and the folder that its paths are relative to."""
    if not isinstance(source, str | os.PathLike):
        rows, where, folder = source, "", Path()
    else:
        path = Path(source)
        rule, advice = f"{shown(str(path))} must be a TOML file with [[{kind}]] tables", _EXAMPLES[kind]
        with file_errors(rule, path, advice, use="read"):
            content = read_file(path, MAX_FILE_BYTES)
        try:
            tables = tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise MisuseError(rule=rule, got=f"it is not ({error})", advice="Correct that line.") from None
        for name in tables:
            if name != kind:
                raise MisuseError(rule=rule, got=f"it has {shown(name)}", advice=advice)
        rows, where, folder = tables.get(kind, []), f"{path} ", path.parent
        if not isinstance(rows, list):
            raise MisuseError(rule=rule, got=f"{kind} is a single [{kind}]", advice=f"Write it as [[{kind}]].")
    if not rows:
        rule = f"{where}needs at least one [[{kind}]]" if where else f"A fleet needs at least one {kind}"
        raise MisuseError(rule=rule, got="it has none", advice=_EXAMPLES[kind])
    for row in rows:
        if not isinstance(row, Mapping) and not (kind == "card" and isinstance(row, str)):
            raise MisuseError(rule=f"A {kind} is a table of fields", got=f"got {shown(row)}", advice=_EXAMPLES[kind])
    return rows, where, folder


_EXAMPLES = {
    "job": 'Write [[job]], and below it name = "words", cell = "lstm" and seq = 10000.',
    "card": 'Write [[card]], and below it name = "t4", count = 4 and price = 0.35 (per hour).',
}


def _grid(row: Mapping[str, Any], place: str, room: int) -> Iterator[dict[str, Any]]:
    """One dict for each combination of listed values, with the values in its name."""
    lists = {
        name: value
        for name, value in row.items()
        if isinstance(value, list | tuple | range)
        and (name not in LISTS or any(isinstance(one, list | tuple) for one in value))
    }
    for name, values in lists.items():
        if not len(values):
            got = f"{name} is an empty list"
            raise MisuseError(rule=f"{place}: a grid needs values", got=got, advice="Write at least one value.")
    if (size := math.prod(map(len, lists.values()))) > room:
        rule = f"{place}: there may be {MOST_JOBS:,} jobs at most"
        raise MisuseError(rule=rule, got=f"its grid alone has {size:,}", advice="Shorten the lists.")
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        suffix = "".join(f"-{name}{_short(value)}" for name, value in chosen.items())
        yield {**row, **chosen, "name": f"{row.get('name', '')}{suffix}"} if lists else dict(row)


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _job(fields: dict[str, Any], folder: Path) -> Job:
    name = _name(fields)
    is_task = "task" in fields
    check_names("field of a job:", fields, [*OWN, *(TASK_FIELDS if is_task else (*Spec.__struct_fields__, *FIXED))])
    allow = tuple(one for one in _texts("allow", fields.get("allow", ["precision"])) if one != "none")
    check_allow(allow)
    for count in ("sequences", "epochs", "seq", "batch"):
        check_whole(count, fields.get(count), 1, 10**15 if count == "sequences" else 10**9)
    common: dict[str, Any] = {
        "name": name,
        "allow": allow,
        "measured": tuple(str(folder / path) for path in _texts("measured", fields.get("measured", []))),
        "sequences": fields.get("sequences"),
        "epochs": fields.get("epochs"),
        "seconds": _seconds(fields.get("time")),
        "data": fields.get("data"),
    }
    _texts("data", [] if common["data"] is None else common["data"])
    if is_task:
        task = fields["task"]
        if not isinstance(task, Task) and not (isinstance(task, str) and NAME.fullmatch(task)):
            advice = 'Write it as task = "package.module:task".'
            raise MisuseError(rule="task must be the name of a task", got=f"got {shown(task)}", advice=advice)
        if isinstance(task, str):
            check_known(task)
        return Job(**common, task=task, seq=fields.get("seq"), batch=fields.get("batch"))
    return Job(**common, request=_request(fields, allow))


def _request(fields: dict[str, Any], allow: tuple[str, ...]) -> Request:
    fixed = {name: fields[name] for name in FIXED if name in fields}
    own = {name: value for name, value in fields.items() if name in Spec.__struct_fields__}
    preset = preset_fields(fields["preset"]) if "preset" in fields else {}
    spec = make_spec(with_batch(preset | own, fixed))
    make_candidate(spec, **{"microbatch": 1} | fixed)
    check_fixed(fixed, allow)
    return Request(spec=spec, allow=allow, fixed=fixed)


def _card(fields: Mapping[str, Any]) -> FleetCard:
    check_names("field of a card:", fields, ("name", "count", "price", "label"))
    label = fields.get("label")
    if label is not None and not (isinstance(label, str) and _LABEL.fullmatch(label)):
        advice = 'Write label = "a100", as the scheduler names the card.'
        rule = "label must be up to 63 letters, digits, dashes, dots and underscores"
        raise MisuseError(rule=rule, got=f"got {shown(label)}", advice=advice)
    if "price" not in fields:
        advice = "Add price = 0.35 (for an hour, in any currency), or 0 for a card of your own."
        raise MisuseError(rule="A card needs a price", got="it has none", advice=advice)
    price, count = fields["price"], fields.get("count", 1)
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e9:
        advice = "Write price = 0.35, for an hour."
        raise MisuseError(rule="price must be a number from 0 on", got=f"got {shown(price)}", advice=advice)
    if type(count) is not int or not 1 <= count <= 10**6:
        got, advice = f"got {shown(count)}", "Write count = 4."
        raise MisuseError(rule="count must be a whole number from 1 to 1,000,000", got=got, advice=advice)
    try:
        return FleetCard(card=cards.card(_name(fields)), count=count, price=float(price), label=label)
    except MisuseError as error:
        if not error.rule.startswith("--device"):
            raise
        advice = error.advice.partition(" For another")[0] + " All names: oomguard devices --cards."
        raise MisuseError(rule="name must be a card that oomguard knows", got=error.got, advice=advice) from None


def _name(fields: Mapping[str, Any]) -> str:
    """The name, which must be printable on one line: it ends up in tables and files."""
    name = fields.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_LETTERS or not name.isprintable():
        rule = f"name must be a text of 1 to {MOST_LETTERS} characters on one line"
        raise MisuseError(rule=rule, got="it has none" if name is None else f"got {shown(name)}", advice="Name it.")
    return name


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(one, str) and one.isprintable() for one in values):
        got, advice = f"got {shown(value)}", f'Write it as {name} = "…".'
        raise MisuseError(rule=f"{name} must be text, or a list of texts", got=got, advice=advice)
    return tuple(values)


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if (
        not isinstance(value, str | int | float)
        or isinstance(value, bool)
        or (not isinstance(value, str) and value <= 0)
    ):
        got, advice = f"got {shown(value)}", 'Write it as time = "4h".'
        raise MisuseError(rule="time must be a duration", got=got, advice=advice)
    return float(parse_seconds(value, "time"))


def _repeated(names: Sequence[str]) -> list[str]:
    seen = set[str]()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
