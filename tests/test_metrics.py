"""Metrics and events: no row is torn, no step is there twice, and neither a kill nor a full disk loses a thing."""

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oomguard.candidate import Candidate
from oomguard.errors import MisuseError
from oomguard.metrics import Events, Metrics

ROOT = str(Path(__file__).parents[1])
WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from oomguard.metrics import Events, Metrics
metrics, events = Metrics(sys.argv[2], ["loss"]), Events(sys.argv[2] + "/events.jsonl")
for step in range(10**6):
    metrics.write(step, loss=step / 7)
    events.append(step, "fell-back", "Memory got tight.", free_bytes=step)
"""


def filled(directory: Path, steps: range = range(1, 6)) -> Metrics:
    metrics = Metrics(directory, ["loss", "norm"])
    for step in steps:
        metrics.write(step, loss=1 / step, norm=step)
    return metrics


def lines(directory: Path) -> list[str]:
    return (directory / "metrics.csv").read_text().splitlines()


def steps(directory: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in lines(directory)[1:]]


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "a" / "b", ["loss", "norm"])
    metrics.write(1, loss=0.1, norm=2)
    assert lines(tmp_path / "a" / "b") == ["step,loss,norm", "1,0.1,2"]


def test_without_columns_those_of_the_first_row_hold(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write(1, norm=2.0, loss=1.0)
    metrics.write(2, loss=3.0)
    assert lines(tmp_path) == ["step,norm,loss", "1,2.0,1.0", "2,,3.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf"), (None, ""), (True, "1"), (3, "3")],
        *[(torch.tensor(0.5), "0.5"), (torch.tensor(float("nan")), "nan"), (np.float32(0.5), "0.5"), (0.1, "0.1")],
    ],
    ids=str,
)
def test_every_number_has_its_text(tmp_path: Path, value: Any, text: str) -> None:
    Metrics(tmp_path, ["loss"]).write(7, loss=value)
    assert lines(tmp_path)[1] == f"7,{text}"


@pytest.mark.parametrize("value", ["high", torch.ones(2), [1.0], object()], ids=lambda v: type(v).__name__)
def test_what_is_not_a_number_is_refused(tmp_path: Path, value: object) -> None:
    metrics = filled(tmp_path)
    with pytest.raises(MisuseError, match="Metrics are numbers"):
        metrics.write(6, loss=value)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_column_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    metrics = filled(tmp_path)
    with pytest.raises(MisuseError, match="Did you mean loss"):
        metrics.write(6, los=1.0)


@pytest.mark.parametrize("columns", [["a,b"], ["step"], ["a", "a"], [], ["a\n"], [""]], ids=str)
def test_columns_that_a_csv_cannot_have_are_refused(tmp_path: Path, columns: list[str]) -> None:
    with pytest.raises(MisuseError, match="columns of metrics"):
        Metrics(tmp_path, columns)


@pytest.mark.parametrize("step", [5, 4, -1, 1.5, None], ids=str)
def test_a_step_that_does_not_come_after_the_last_is_refused(tmp_path: Path, step: Any) -> None:
    metrics = filled(tmp_path)
    with pytest.raises(MisuseError, match="step of a row"):
        metrics.write(step, loss=1.0)


def test_a_file_is_continued(tmp_path: Path) -> None:
    filled(tmp_path)
    filled(tmp_path, range(6, 8))
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert lines(tmp_path).count("step,loss,norm") == 1


def test_a_file_with_other_columns_is_not_continued(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(MisuseError, match=r"its columns \(loss, norm\), but got loss, speed"):
        Metrics(tmp_path, ["loss", "speed"])


@pytest.mark.parametrize("back", [0, 1, 3, 5, 100])
def test_after_going_back_no_step_is_there_twice(tmp_path: Path, back: int) -> None:
    filled(tmp_path)
    metrics = Metrics(tmp_path, ["loss", "norm"])
    metrics.rewind(back)
    metrics.write(back + 1, loss=9.0)
    assert steps(tmp_path) == [*range(1, min(back, 5) + 1), back + 1]
    assert lines(tmp_path)[-1] == f"{back + 1},9.0,"


def test_going_back_before_anything_was_written_changes_nothing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, ["loss"])
    metrics.rewind(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    filled(tmp_path)
    content = (tmp_path / "metrics.csv").read_bytes()  # the last line has 8 characters
    (tmp_path / "metrics.csv").write_bytes(content[:-cut])
    filled(tmp_path, range(6, 7))
    assert steps(tmp_path) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("left", [b"", b"st", b"step,loss,norm"])
def test_a_torn_header_is_written_again(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(left)
    filled(tmp_path)
    assert lines(tmp_path)[:2] == ["step,loss,norm", "1,1.0,1"]


@pytest.mark.parametrize("junk", [b"\x00\x00\x00", b"7", b"7,1.0,1.0,1.0", b"\xff,1,1"])
def test_a_damaged_row_is_dropped_and_told(tmp_path: Path, junk: bytes) -> None:
    filled(tmp_path)
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(junk + b"\n")
    with pytest.warns(UserWarning, match=r"metrics\.csv: 1 damaged rows"):
        Metrics(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_going_back_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metrics = filled(tmp_path)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(MisuseError, match="No space left"):
        metrics.rewind(2)
    monkeypatch.undo()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    Metrics(tmp_path).rewind(2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_disk_that_is_full_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def half(file: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content[:3])

    metrics = filled(tmp_path)
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(MisuseError, match="No space left"):
        metrics.write(6, loss=1.0, norm=1.0)
    monkeypatch.undo()
    metrics.write(6, loss=2.0)
    assert lines(tmp_path)[-2:] == ["5,0.2,5", "6,2.0,"]


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(MisuseError, match="cannot be"):
        Metrics("/proc/nobody/writes/here", ["loss"])
    with pytest.raises(MisuseError, match="cannot be"):
        Events("/proc/nobody/writes/here.jsonl").append(1, "kind", "reason")


def test_what_a_killed_writer_had_written_is_all_there(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", WRITE, ROOT, str(tmp_path)])
    while len(Events(tmp_path / "events.jsonl").read()) < 30:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    Metrics(tmp_path, ["loss"])
    found = steps(tmp_path)
    assert found == [*range(len(found))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the line that it was writing, if it was
        events = Events(tmp_path / "events.jsonl").read()
    assert [event.step for event in events] in (found, found[:-1])


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory))
    shown.Reload()
    return {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    with Metrics(tmp_path, ["loss", "valid"], tensorboard=True) as metrics:
        metrics.write(1, loss=0.5)
        metrics.write(2, loss=0.25, valid=float("inf"))
    assert scalars(tmp_path) == {"loss": {1: 0.5, 2: 0.25}, "valid": {2: float("inf")}}


def test_tensorboard_forgets_what_came_after_a_step_too(tmp_path: Path) -> None:
    with Metrics(tmp_path, ["loss"], tensorboard=True) as metrics:
        for step in range(1, 6):
            metrics.write(step, loss=step)
    with Metrics(tmp_path, ["loss"], tensorboard=True) as metrics:
        metrics.rewind(3)
        metrics.write(6, loss=60.0)
    assert scalars(tmp_path) == {"loss": {1: 1.0, 2: 2.0, 3: 3.0, 6: 60.0}}


def test_after_a_flush_tensorboard_shows_it_all(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, ["loss"], tensorboard=True)
    metrics.write(1, loss=0.5)
    metrics.flush()
    assert scalars(tmp_path) == {"loss": {1: 0.5}}
    metrics.close()


def test_without_the_package_the_command_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MisuseError, match=r'pip install "oomguard\[tensorboard\]"'):
        Metrics(tmp_path, ["loss"], tensorboard=True)
    Metrics(tmp_path, ["loss"]).write(1, loss=1.0)


def test_metrics_load_neither_torch_nor_tensorboard() -> None:
    code = f"import sys; sys.path.insert(0, {ROOT!r}); import oomguard.metrics; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert not {"torch", "tensorboard", "tensorflow"} & {*done.stdout.split()}


def test_events_come_back_in_their_order(tmp_path: Path) -> None:
    events = Events(tmp_path / "runs" / "events.jsonl")
    written = [events.append(step, "grew", "There was room.", free_bytes=step, of=["a", 1]) for step in range(3)]
    assert Events(events.path).read() == written
    assert written == sorted(written, key=lambda event: event.time)


@pytest.mark.parametrize(
    ("figure", "read"),
    [
        *[(float("nan"), "nan"), (-float("inf"), "-inf"), (torch.tensor(0.5), 0.5), (np.float32(0.5), 0.5)],
        *[(torch.tensor(float("inf")), "inf"), (None, None), (1 << 40, 1 << 40), ({1: (2, 3)}, {"1": [2, 3]})],
    ],
    ids=str,
)
def test_a_figure_of_an_event_is_what_json_has(tmp_path: Path, figure: Any, read: Any) -> None:
    Events(tmp_path / "events.jsonl").append(1, "kind", "reason", figure=figure)
    assert Events(tmp_path / "events.jsonl").read()[0].figures == {"figure": read}


def test_a_candidate_may_be_a_figure(tmp_path: Path) -> None:
    Events(tmp_path / "events.jsonl").append(1, "fell-back", "Tight.", candidate=Candidate(microbatch=3))
    assert Events(tmp_path / "events.jsonl").read()[0].figures["candidate"]["microbatch"] == 3


def test_events_go_on_after_a_torn_line(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.append(1, "first", "reason")
    with events.path.open("ab") as file:
        file.write(b'{"time": "20')
    events.append(3, "third", "reason")
    with pytest.warns(UserWarning, match=r"events\.jsonl, line 2"):
        found = events.read()
    assert [event.kind for event in found] == ["first", "third"]
