"""The explorer of a task: a child process traces some steps, and all settings between them are answered at once."""

import time
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oomguard._core.errors import MisuseError, check_names, check_whole, flag, shown
from oomguard._core.progress import tell
from oomguard._core.units import format_bytes, read_budget
from oomguard._device.cpu import cpu_precisions
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.cards import card
from oomguard._estimate.target import CPU, Target, on_card
from oomguard._explore.answers import bars, control_of, exact_text, places, toml_value, verdict
from oomguard._explore.explorer import Explorer, Settings
from oomguard._explore.traces import Grid, Point, Tracer, Want
from oomguard._fleet.tasks import TRACED_ON
from oomguard._plan.advice import in_flags
from oomguard._plan.store import load_plan
from oomguard._plan.task import SEGMENTS
from oomguard._plan.task_advice import advice_words, changes_of
from oomguard._plan.task_curve import Shape
from oomguard._plan.task_value import TaskPlan
from oomguard._probe.record import TaskRecord
from oomguard._report.estimate import PARTS, to_json
from oomguard._report.words import candidate_words, peak_words, times
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import MAX_SEQ
from oomguard._task.estimate import to_estimate
from oomguard._task.task import Task, goes_by, name_of

if TYPE_CHECKING:
    from oomguard._task.child import Answer

TURNED = ("microbatch", "accumulation", "segments", "precision")  # the knobs that the page has a control for
CHECKED = ("segments", "microbatch")  # the knobs that may change the gradient of a task
LENGTHS = (0.25, 0.5, 1, 2, 4)  # of the region, in units of the length that is asked for
REST_SECONDS = 0.4  # settings that stay for so long are traced themselves
POLL_SECONDS = 0.05


class Setting(NamedTuple):
    """Settings of a task, checked."""

    candidate: Candidate
    target: Target
    steps: int | None
    budget_bytes: int

    @property
    def shape(self) -> Shape:
        """The knobs that a grid of traces depends on."""
        knobs = self.candidate
        return Shape(knobs.segments, knobs.accumulation > 1, str(knobs.precision), knobs.allocator)

    @property
    def point(self) -> Point:
        return Point(self.shape, self.target, self.candidate.microbatch, self.steps)


class TaskExplorer(Explorer):
    """Answers questions about a task by traces: exactly where a step was traced, on planes between traces elsewhere."""

    def __init__(
        self, task: Task | str, settings: Settings, records: Sequence[TaskRecord] = (), *, probes: bool = False
    ) -> None:
        super().__init__({}, probes=probes)
        self.task, self.records = task, [*records]
        tell(f"Tracing a first step of {name_of(task)}")
        first = _first(task, settings)
        self._tracer = Tracer(task, first)
        traced = self._tracer.first
        self._longest, rows = traced.longest, traced.rows
        steps = None if self._longest == 0 else first.steps or self._longest
        self._rows = sorted({max(1, rows // 4), rows, 4 * rows})
        self._lengths = [None] if steps is None else sorted({max(1, steps // 4), steps})
        self._grids: dict[Hashable, Grid] = {}
        self._asked: dict[Hashable, float] = {}  # when settings were first asked about
        usual = {name: KNOBS[name].field.default for name in TURNED} | {"microbatch": rows, "device": "cpu"}
        self.settings = usual | dict(settings) | ({} if steps is None else {"seq": steps})

    def close(self) -> None:
        self._tracer.close()

    def controls(self) -> list[dict[str, Any]]:
        steps = self._lengths[-1]
        seq = {"name": "seq", "kind": "number", "low": 1, "optional": False}
        longest = {"high": self._longest or 16 * (steps or 1), "most": self._longest or MAX_SEQ}
        knobs = {name: control_of(KNOBS[name].field) | {"optional": False} for name in TURNED}
        knobs["microbatch"]["high"], knobs["accumulation"]["high"] = 16 * self._tracer.first.rows, 64
        knobs["segments"] = {"name": "segments", "kind": "choice", "choices": [*self._counts()], "optional": False}
        return [*([] if steps is None else [seq | longest]), *knobs.values(), *places()]

    def _counts(self) -> tuple[int, ...]:
        """The numbers of segments that are traced."""
        longest = self._longest or max(self._tracer.first.step.steps, 1)
        return 1, *(count for count in SEGMENTS if 2 * count <= longest or self._longest is None)

    def answer(self, settings: Settings) -> dict[str, Any]:
        try:
            setting = self._read(settings)
            missing = self._want(setting)
            left = f"Tracing: {times(missing, 'step')} left." if missing else ""
            traced = self._tracer.answer(setting.point)
            grid = self._grid(setting.shape, setting.target)
        except MisuseError as error:
            return {"error": str(error), "tracing": ""}
        if traced is None and grid is None:
            return {"error": f"Tracing a step with {candidate_words(setting.candidate)}", "tracing": left}
        estimate = self._estimate(setting, self._traced(setting))
        known = "This step was traced." if traced is not None else "This is interpolated between traced steps."
        return {
            "fits": estimate.fits,
            "estimate": to_json(estimate),
            "title": self._title(setting),
            "verdict": verdict(estimate, int(estimate.total_bytes + estimate.margin_bytes)),
            "moment": f"{peak_words(str(estimate.moment))} {known}",
            "bars": bars(_parts(estimate), estimate),
            "advice": [*self._advice(setting, estimate)],
            "region": self._region(setting),
            "front": None,
            "measured": [*self._measured(setting)],
            "copies": self._copies(setting, settings),
            "tracing": left,
        }

    def whole_answer(self, settings: Settings) -> dict[str, Any]:
        while (found := self.answer(settings)).get("tracing"):
            time.sleep(POLL_SECONDS)
        return found

    def probe(self, settings: Settings) -> TaskRecord:
        from oomguard._probe.runner import Runner
        from oomguard._task.ask import send

        setting = self._read(settings)
        knobs = setting.candidate
        source = send(self.task, knobs.microbatch * knobs.accumulation, setting.steps)
        asked: dict[str, Any] = {"name": name_of(self.task), "content": source if isinstance(source, bytes) else None}
        asked |= {"candidate": knobs, "rows": None, "seq": setting.steps, "budget_bytes": setting.budget_bytes}
        with Runner(setting.target.device) as runner:
            record = runner.probe_task(**asked)
        self.records.append(record)
        return record

    # ---- what is traced

    def _read(self, settings: Settings) -> Setting:
        """Check settings. Empty values count as left out."""
        check_names("setting", settings, ["seq", *TURNED, "device", "budget"])
        given = {name: value for name, value in settings.items() if value not in (None, "")}
        device, budget = str(given.pop("device", "cpu")), given.pop("budget", None)
        steps = given.pop("seq", self._lengths[-1])
        check_whole("seq", steps, 1, MAX_SEQ)
        candidate, target = Candidate(**{"microbatch": self._tracer.first.rows} | given), find_target(device)
        here = target.card_precisions if target.cuda else cpu_precisions()
        if candidate.precision not in here:
            rule, advice = f"{target.device} trains in {', '.join(here)}", "Choose one of them."
            raise MisuseError(rule=rule, got=f"got {flag('precision')} {candidate.precision}", advice=advice)
        if candidate.segments not in self._counts():
            rule = f"The explorer of this task knows {', '.join(map(str, self._counts()))} segments"
            raise MisuseError(rule=rule, got=f"got {candidate.segments}", advice="Choose one of them.")
        limit_bytes = read_budget(budget) or find_budget(device).limit_bytes
        return Setting(candidate, target, None if self._lengths[-1] is None else steps, limit_bytes)

    def _want(self, setting: Setting) -> int:
        """Have traced what the answer needs, then what next moves may need; returns how much is missing."""
        shape, target = setting.shape, setting.target
        measured = [self._setting_of(record, target).point for record in self.records]
        counts = [shape._replace(segments=count) for count in self._counts() if count != shape.segments]
        others = [(shape._replace(accumulates=not shape.accumulates), target)]
        others += [(shape, CPU if target.cuda else on_card(card(TRACED_ON)))]
        # a slider that moves passes many settings: one is traced itself once it stays
        since = self._asked.setdefault(setting.point.key, time.monotonic())
        stays = self._grid(shape, target) is None or time.monotonic() - since > REST_SECONDS
        needed = [*([setting.point] if stays else []), *self._points(shape, target), *measured]
        useful: list[Want] = [point for other in counts for point in self._points(other, target)]
        useful += [*(CHECKED if self._tracer.first.step.cells else CHECKED[1:])]
        useful += [point for other in others for point in self._points(*other)]
        return self._tracer.want(needed, useful) + (not stays and not self._tracer.has(setting.point))

    def _points(self, shape: Shape, target: Target) -> list[Point]:
        return [Point(shape, target, rows, steps) for steps in self._lengths for rows in self._rows]

    def _grid(self, shape: Shape, target: Target) -> Grid | None:
        """The traces of a shape; None as long as one is missing."""
        points = self._points(shape, target)
        if (key := points[0].key) not in self._grids:
            answers = [(point, self._tracer.answer(point)) for point in points]
            made = {(answer.rows, point.steps or 0): answer for point, answer in answers if answer is not None}
            if len(made) < len(points):
                return None
            self._grids[key] = Grid(made)
        return self._grids[key]

    def _traced(self, setting: Setting) -> "Answer | None":
        """The step as it was traced, or as traces around it let expect; None as long as they are missing."""
        grid = self._grid(setting.shape, setting.target)
        found = self._tracer.answer(setting.point)
        if found is None and grid is not None:
            return grid.at(setting.candidate.microbatch, setting.steps or 0)
        return found

    def _estimate(self, setting: Setting, answer: "Answer | None") -> Estimate:
        assert answer is not None
        return replace(to_estimate(answer, setting.candidate, setting.target), budget_bytes=setting.budget_bytes)

    # ---- parts of an answer

    def _title(self, setting: Setting) -> str:
        length = [] if setting.steps is None else [f"T = {setting.steps:,}"]
        parts = [name_of(self.task), *length, candidate_words(setting.candidate)]
        return f"{', '.join(parts)} on {setting.target.device}"

    def _region(self, setting: Setting) -> dict[str, Any]:
        """For lengths and microbatches around those asked for: 2 fits as it is, 1 fits in segments, 0 does not fit.

        -1: it does not fit in the segments that were traced so far.
        """
        rows, steps = setting.candidate.microbatch, setting.steps
        most = 8 * max(rows, self._tracer.first.rows)
        sizes = sorted({*(1 << power for power in range(most.bit_length())), rows})
        own = [None] if steps is None else sorted({*_around(steps, self._longest or MAX_SEQ)})
        grids = {count: self._known(setting.shape._replace(segments=count), setting.target) for count in self._counts()}
        cells = [[0 if all(grids.values()) else -1] * len(sizes) for _ in own]
        for count, grid in grids.items():
            shape = setting.shape._replace(segments=count)
            for line, length in zip(cells, own, strict=True):
                if grid is not None and (count == 1 or length is None or count <= length):
                    fitting = self._fitting(grid, setting, shape, length, sizes)
                    line[:fitting] = [max(value, 2 if count == 1 else 1) for value in line[:fitting]]
        lengths = own if steps is not None else [self._tracer.first.step.steps]
        return {"microbatches": sizes, "lengths": lengths, "cells": cells, "fixed": steps is None}

    def _known(self, shape: Shape, target: Target) -> Grid | None:
        """The traces of a shape, if all of them were made and none failed."""
        try:
            return self._grid(shape, target)
        except MisuseError:
            return None

    def _fitting(self, grid: Grid, setting: Setting, shape: Shape, steps: int | None, sizes: list[int]) -> int:
        """How many of the microbatches fit, the smallest first."""

        def exceeds(rows: int) -> bool:
            knobs: dict[str, Any] = {
                "microbatch": rows,
                "segments": shape.segments,
                "precision": shape.precision,
            }
            estimate = to_estimate(grid.at(rows, steps or 0), Candidate(**knobs), setting.target)
            return bool(estimate.total_bytes + estimate.margin_bytes > setting.budget_bytes)

        return bisect_left(sizes, True, key=exceeds)

    def _advice(self, setting: Setting, estimate: Estimate) -> Iterator[str]:
        """Which knob helps, as far as it is known to keep the gradient."""
        knobs = {name: getattr(setting.candidate, name) for name in TURNED}
        exact = {name for name in CHECKED if (found := self._tracer.finding(name)) is not None and found.exact}
        tried = list[tuple[dict[str, Any], Estimate]]()
        steps = setting.steps or self._tracer.first.step.steps
        for change in changes_of(knobs, steps, splits=True):
            changed = setting._replace(candidate=Candidate(**knobs | change))
            grid = self._known(changed.shape, changed.target)
            if {*change} - {"accumulation"} <= exact and grid is not None:
                answer = grid.at(changed.candidate.microbatch, changed.steps or 0)
                tried.append((change, self._estimate(changed, answer)))
        yield from advice_words(estimate, tried)
        for name in CHECKED:
            found = self._tracer.finding(name)
            if found is not None and not found.exact:
                yield f"{'Segments' if name == 'segments' else 'Microbatches'} change the gradient. {found.reason}"

    def _setting_of(self, record: TaskRecord, target: Target) -> Setting:
        """What a record has run."""
        steps = self._lengths[-1] if record.seq is None else record.seq
        return Setting(record.candidate, target, steps, record.budget_bytes)

    def _measured(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """The records, beside the traces of what they ran."""
        for record in self.records:
            if record.peak_bytes is None or record.device != setting.target.device:
                continue
            own = self._setting_of(record, setting.target)
            traced = self._traced(own)
            yield {
                "microbatch": record.candidate.microbatch,
                "seq": own.steps or self._tracer.first.step.steps,
                "words": candidate_words(record.candidate),
                "verdict": record.verdict.name,
                "measured": format_bytes(record.peak_bytes),
                "estimated": "…" if traced is None else format_bytes(int(self._estimate(own, traced).total_bytes)),
            }

    def _copies(self, setting: Setting, settings: Settings) -> dict[str, str]:
        """The settings as a command, as Python and as a job of `oomguard fleet`; only a named task has all of them."""
        knobs = {name: getattr(setting.candidate, name) for name in TURNED}
        knobs = {name: value for name, value in knobs.items() if value != KNOBS[name].field.default}
        where = {name: settings[name] for name in ("device", "budget") if settings.get(name) not in (None, "", "cpu")}
        length = {} if setting.steps is None else {"seq": setting.steps}
        arguments = {"steps" if name == "seq" else name: value for name, value in (length | knobs | where).items()}
        subject = repr(self.task) if isinstance(self.task, str) else "task"
        python = f"oomguard.estimate({subject}, {', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        if not isinstance(self.task, str):
            return {"python": python}
        batch = setting.candidate.microbatch * setting.candidate.accumulation
        job = {"name": self.task.replace(":", "."), "task": self.task} | length | {"batch": batch}
        lines = ["[[job]]", *(f"{name} = {toml_value(value)}" for name, value in job.items())]
        command = f"oomguard estimate --model {self.task} {in_flags(**length, **knobs, **where)}"
        return {"command": command, "python": python, "jobs": "\n".join(lines)}


def task_settings(
    task: Task | str, measured: Any, given: Mapping[str, Any]
) -> tuple[dict[str, Any], Sequence[TaskRecord]]:
    """The settings that the explorer of a task begins with, and the records of its plan, if one is given."""
    settings = {"seq" if name == "steps" else name: value for name, value in given.items() if value is not None}
    check_names("setting", settings, ["seq", *TURNED, "device", "budget"])
    if measured is None:
        return settings, ()
    plan = load_plan(measured) if isinstance(measured, str | PathLike) else measured
    if not isinstance(plan, TaskPlan):
        rule, advice = "A task is explored with its own plan", "Give the plan that oomguard plan has made for the task."
        raise MisuseError(rule=rule, got=f"got {shown(measured)}", advice=advice)
    if plan.task != name_of(task) and not (isinstance(task, Task) and goes_by(task, plan.task)):
        got = f"the plan is of {plan.task}"
        raise MisuseError(rule=f"The plan must be one of {name_of(task)}", got=got, advice="Name the task of the plan.")
    knobs = {name: getattr(plan.candidate, name) for name in TURNED}
    where = {"device": plan.where.device, "budget": exact_text(plan.budget_bytes), "seq": plan.seq}
    return {name: value for name, value in (knobs | where | settings).items() if value is not None}, plan.records


def check_has_task(measured: Any) -> None:
    """Raise if this is the plan of a task, which does not contain the task."""
    plan = load_plan(measured) if isinstance(measured, str | PathLike) and Path(measured).is_file() else measured
    if isinstance(plan, TaskPlan):
        rule, got = "The plan of a task is explored with its task", f"got the plan of {plan.task} alone"
        raise MisuseError(rule=rule, got=got, advice=f"Add --model {plan.task}, or give the Task first.")


def _first(task: Task | str, settings: Settings) -> Point:
    """The step that is traced first. Without a microbatch, it has as many rows as the loader."""
    target, rows = find_target(str(settings.get("device") or "cpu")), settings.get("microbatch")
    check_whole("seq", settings.get("seq"), 1, MAX_SEQ)
    shape = Shape(precision=settings.get("precision", "fp32"), segments=settings.get("segments", 1))
    return Point(shape, target, rows, settings.get("seq"))


def _around(steps: int, longest: int) -> Iterator[int]:
    """Lengths around one, up to the longest."""
    yield from (min(longest, max(1, round(steps * share))) for share in LENGTHS)


def _parts(estimate: Estimate) -> dict[str, int]:
    """The runtime, the largest parts of the model, all others as one, and what the allocator keeps besides."""
    largest, others = [*estimate.parts.items()][:PARTS], [*estimate.parts.values()][PARTS:]
    found = {"runtime": int(estimate.terms["runtime"])} | dict(largest) | {"other parts": sum(others)}
    return found | {"allocator": int(estimate.total_bytes) - sum(found.values())}
