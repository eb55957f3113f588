"""The process that feeds trackers: it reads the metrics and events that a training writes, until the training ends.

Everything stays in local files: MLflow writes to a database, Weights & Biases is offline. Rows that a tracker has
already are not shown again, so a resumed run goes on where it was.
"""

import os
import select
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from oomguard._core.system import write_file
from oomguard._plan.store import load_plan
from oomguard._train.metrics import COLUMNS, CSV
from oomguard._train.runs import read_run
from oomguard._train.trackers import STATE, TrackerState, mlflow_uri, read_state

POLL_SECONDS = 1.0
PROJECT = "oomguard"
EVENTS = "events.jsonl"
MOST_METRICS, MOST_CHARACTERS = 1000, 5000  # MLflow 3.17: metrics of one call, characters of a tag

Row = tuple[int, dict[str, float]]  # a step and its numbers


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the guard, as its line has it (`_guard/events.py`, which would import PyTorch)."""

    step: int
    kind: str
    reason: str
    figures: dict[str, Any] = {}


class Tracker(ABC):
    """One tracker of a run. `state` says what it has already."""

    def __init__(self, run: Path, state: TrackerState | None) -> None:
        self.run = run
        self.plan = str(load_plan(run / "plan.json"))
        self.params = {name: value for name, value in read_run(run).settings.items() if value is not None}
        self.state = self.begin(state)

    @abstractmethod
    def begin(self, state: TrackerState | None) -> TrackerState:
        """Open a new run, or go on with that of the state."""

    @abstractmethod
    def write(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        """Show rows and events."""

    @abstractmethod
    def close(self, ended: str, events: Sequence[Event]) -> None:
        """End the run. `events` are all of the run."""

    def take(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        """Show what is new."""
        new = [row for row in rows if row[0] > self.state.step]
        if new or len(events) > self.state.events:
            self.write(new, events[self.state.events :])
        self.state.step = max([self.state.step, *(step for step, _ in new)])
        self.state.events = len(events)

    def conclude(self, last: str, events: Sequence[Event]) -> None:
        """End the run with the last words of the training: why it ended, and its peak."""
        ended, _, peak = last.partition(" ")
        if int(peak or 0):  # a short training may end before the first reading of its memory
            self.write([(self.state.step, {"peak_bytes": float(peak)})], [])
        self.close(ended, events)


class Mlflow(Tracker):
    """A run in MLflow's database: parameters, metrics, the plan and the events as files, and a description."""

    def begin(self, state: TrackerState | None) -> TrackerState:
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=mlflow_uri(self.run))
        if state is not None:
            try:
                self.client.update_run(state.id, status="RUNNING")
                return state
            except MlflowException:  # its database was removed, or is another one now
                pass
        experiment = self.client.get_experiment_by_name(PROJECT)
        place = (self.run / "mlflow").as_uri()
        number = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT, place)
        made = self.client.create_run(number, run_name=self.run.name)
        params = [Param(name, str(value)[:MOST_CHARACTERS]) for name, value in self.params.items()]
        self.client.log_batch(made.info.run_id, params=params)
        self.client.set_tag(made.info.run_id, "mlflow.note.content", self.plan[:MOST_CHARACTERS])
        self.client.log_artifact(made.info.run_id, str(self.run / "plan.json"))
        return TrackerState(id=made.info.run_id)

    def write(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, row in rows for name, value in row.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.state.id, metrics=metrics[start : start + MOST_METRICS])
        if events:
            last = events[-1]
            text = f"Step {last.step:,}, {last.kind}: {last.reason}"
            self.client.set_tag(self.state.id, "last event", text[:MOST_CHARACTERS])

    def close(self, ended: str, events: Sequence[Event]) -> None:
        self.client.set_tag(self.state.id, "ended", ended)
        if events:
            self.client.log_artifact(self.state.id, str(self.run / EVENTS))
        self.client.set_terminated(self.state.id, "FINISHED" if ended in ("done", "patience") else "KILLED")


class Wandb(Tracker):
    """A run of Weights & Biases in an offline folder: configuration, metrics, the plan and the events."""

    def begin(self, state: TrackerState | None) -> TrackerState:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        import wandb

        state = state or TrackerState(id=uuid4().hex[:8])
        self.wandb = wandb
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        settings.x_disable_stats = True
        self.wandb_run = wandb.init(
            project=PROJECT,
            name=self.run.name,
            id=state.id,
            dir=self.run,
            config=self.params,
            notes=self.plan,
            mode="offline",
            settings=settings,
        )
        self.wandb_run.save(self.run / "plan.json", base_path=self.run, policy="now")
        return state

    def write(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        for step, row in rows:
            self.wandb_run.log(row, step=step)
        if events:
            self.wandb_run.summary["last event"] = f"Step {events[-1].step:,}, {events[-1].kind}: {events[-1].reason}"

    def close(self, ended: str, events: Sequence[Event]) -> None:
        if events:
            rows = [[event.step, event.kind, event.reason] for event in events]
            self.wandb_run.log({"events": self.wandb.Table(columns=["step", "kind", "reason"], data=rows)})
        self.wandb_run.summary["ended"] = ended
        self.wandb_run.finish(exit_code=0 if ended in ("done", "patience") else 1)
        self.wandb.teardown()  # ends the service that wandb has started


KINDS: dict[str, type[Tracker]] = {"mlflow": Mlflow, "wandb": Wandb}


def serve(directory: str, names: Sequence[str], parent: int) -> None:
    """Feed trackers until the training says on stdin why it ended, or has been killed.

    A fault of one tracker spares the others. Exits with 1 if there was one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training decides
    run, failed = Path(directory), False
    saved, trackers = read_state(run), dict[str, Tracker]()
    for name in names:
        try:
            trackers[name] = KINDS[name](run, saved.get(name))
        except Exception:  # whatever their libraries raise
            failed = _report(name)
    reader, last = _Reader(run), None
    while last is None and trackers:
        _save(run, saved, trackers)
        last = _last_words(parent)
        rows = reader.rows()
        for name, tracker in [*trackers.items()]:
            try:
                tracker.take(rows, reader.events)
                if last is not None:
                    tracker.conclude(last, reader.events)
            except Exception:
                failed = _report(name)
                del trackers[name]
    _save(run, saved, trackers)
    sys.exit(1 if failed else 0)


def _last_words(parent: int) -> str | None:
    """What the training says at its end; None if it goes on. A process that it forked may keep stdin open."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    if ready:
        return sys.stdin.readline().strip() or "killed"
    return None if os.getppid() == parent else "killed"


def _report(name: str) -> bool:
    traceback.print_exc()
    print(f"{name}: {sys.exc_info()[1]}".partition("\n")[0], file=sys.stderr, flush=True)  # noqa: T201
    return True


def _save(run: Path, saved: dict[str, TrackerState], trackers: dict[str, Tracker]) -> None:
    """Store how far the trackers are, if that has changed."""
    before = msgspec.json.encode(saved)
    saved |= {name: TrackerState(**msgspec.structs.asdict(tracker.state)) for name, tracker in trackers.items()}
    content = msgspec.json.encode(saved)
    if content != before:
        write_file(run / STATE, content, "The state of trackers")


class _Lines:
    """The lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path, self._begun = path, 0

    def new(self) -> list[bytes]:
        """The complete lines since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._begun)
                *lines, rest = file.read().split(b"\n")
                self._begun = file.tell() - len(rest)
        except FileNotFoundError:
            return []
        return lines


class _Reader:
    """Reads the metrics and the events of a run as they are written."""

    def __init__(self, run: Path) -> None:
        self._metrics, self._log = _Lines(run / CSV), _Lines(run / EVENTS)
        self.events: list[Event] = []  # all so far
        self._rungs: list[tuple[int, float]] = []  # the step before each change of the rung, and the new rung

    def rows(self) -> list[Row]:
        """The rows since the last call, each with the rung of the plan that the step ran on."""
        lines = self._metrics.new()  # first, so that all events before a row are read
        for line in self._log.new():
            event = msgspec.json.decode(line, type=Event)
            self.events.append(event)
            if "rung" in event.figures:
                self._rungs.append((event.step, float(event.figures["rung"])))
        return [self._row(line.decode().split(",")) for line in lines if line[:1].isdigit()]

    def _row(self, cells: list[str]) -> Row:
        step = int(cells[0])
        numbers = {name: float(cell) for name, cell in zip(COLUMNS, cells[1:], strict=True) if cell}
        numbers["rung"] = next((rung for before, rung in reversed(self._rungs) if before < step), 0.0)
        return step, numbers
