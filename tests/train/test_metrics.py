"""Metrics: no half row, no step twice, and neither a kill nor a full disk loses a row."""

import csv
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

from oomguard._core.errors import MisuseError
from oomguard._guard.events import Events
from oomguard._train.metrics import COLUMNS, Metrics

ROOT = str(Path(__file__).parents[2])
HEADER = "step,loss,lr,norm,tokens_per_second,peak_bytes,epoch,validation_loss"
WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from oomguard._guard.events import Events
from oomguard._train.metrics import Metrics
metrics, events = Metrics(sys.argv[2]), Events(sys.argv[2] + "/events.jsonl")
for step in range(1, 10**6):
    metrics.write(step, loss=step / 7)
    events.append(step, "fell-back", "Memory got tight.", free_bytes=step)
"""


def write_steps(directory: Path, steps: range = range(1, 6)) -> Metrics:
    metrics = Metrics(directory, steps[0] - 1)
    for step in steps:
        metrics.write(step, loss=1 / step, norm=step)
    return metrics


def lines(directory: Path) -> list[str]:
    return (directory / "metrics.csv").read_text().splitlines()


def rows(directory: Path) -> list[dict[str, str]]:
    with open(directory / "metrics.csv", newline="") as file:
        return [*csv.DictReader(file)]


def steps(directory: Path) -> list[int]:
    return [int(row["step"]) for row in rows(directory)]


def test_the_columns_are_those_of_the_documentation() -> None:
    assert ",".join(["step", *COLUMNS]) == HEADER


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "a" / "b")
    metrics.write(1, loss=0.1, norm=2)
    assert lines(tmp_path / "a" / "b") == [HEADER, "1,0.1,,2,,,,"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf"), (None, ""), (True, "1"), (3, "3")],
        *[(torch.tensor(0.5), "0.5"), (torch.tensor(float("nan")), "nan"), (np.float32(0.5), "0.5"), (0.1, "0.1")],
    ],
    ids=str,
)
def test_every_number_can_be_written(tmp_path: Path, value: Any, text: str) -> None:
    Metrics(tmp_path).write(7, loss=value)
    assert rows(tmp_path)[0]["loss"] == text


def test_an_unknown_column_is_not_written(tmp_path: Path) -> None:
    metrics = write_steps(tmp_path)
    with pytest.raises(AssertionError, match="los"):
        metrics.write(6, los=1.0)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [5, 4, -1])
def test_a_step_must_come_after_the_last(tmp_path: Path, step: int) -> None:
    metrics = write_steps(tmp_path)
    with pytest.raises(AssertionError, match="after 5"):
        metrics.write(step, loss=1.0)


def test_a_file_is_continued(tmp_path: Path) -> None:
    write_steps(tmp_path)
    write_steps(tmp_path, range(6, 8))
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert lines(tmp_path).count(HEADER) == 1


def test_a_file_with_other_columns_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,speed\n1,2,3\n")
    with pytest.raises(MisuseError, match=r"its own columns \(step,loss,speed\), but this version"):
        Metrics(tmp_path)


@pytest.mark.parametrize("last", [0, 1, 3, 5, 100])
def test_no_step_is_there_twice_after_a_resume(tmp_path: Path, last: int) -> None:
    write_steps(tmp_path)
    Metrics(tmp_path, last).write(last + 1, loss=9.0)
    assert steps(tmp_path) == [*range(1, min(last, 5) + 1), last + 1]
    assert lines(tmp_path)[-1] == f"{last + 1},9.0,,,,,,"


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    Metrics(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_half_written_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    write_steps(tmp_path)
    content = (tmp_path / "metrics.csv").read_bytes()  # the last line has 13 characters
    (tmp_path / "metrics.csv").write_bytes(content[:-cut])
    write_steps(tmp_path, range(6, 7))
    assert steps(tmp_path) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("left", [b"", b"st", HEADER.encode()])
def test_a_half_written_header_is_written_again(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(left)
    write_steps(tmp_path)
    assert lines(tmp_path)[:2] == [HEADER, "1,1.0,,1,,,,"]


@pytest.mark.parametrize("junk", [b"\x00\x00\x00", b"7", b"7,1,,,,,,,1", b"\xff,1,,,,,,"])
def test_a_damaged_row_is_dropped_with_a_warning(tmp_path: Path, junk: bytes) -> None:
    write_steps(tmp_path)
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(junk + b"\n")
    with pytest.warns(UserWarning, match=r"metrics\.csv: dropped 1 damaged rows"):
        Metrics(tmp_path, 100)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_rows_are_dropped_all_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_steps(tmp_path)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(MisuseError, match="No space left"):
        Metrics(tmp_path, 2)
    monkeypatch.undo()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    Metrics(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def half(file: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content[:3])

    metrics = write_steps(tmp_path)
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(MisuseError, match="No space left"):
        metrics.write(6, loss=1.0, norm=1.0)
    monkeypatch.undo()
    metrics.write(6, loss=2.0)
    assert lines(tmp_path)[-2:] == ["5,0.2,,5,,,,", "6,2.0,,,,,,"]


def test_a_directory_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(MisuseError, match="cannot be used"):
        Metrics("/proc/nobody/writes/here")


def test_a_killed_writer_loses_nothing_it_has_written(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", WRITE, ROOT, str(tmp_path)])
    while len(Events(tmp_path / "events.jsonl").read()) < 30:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    Metrics(tmp_path, 10**9)
    written = steps(tmp_path)
    assert written == [*range(1, len(written) + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a line that was being written, if there is one
        events = Events(tmp_path / "events.jsonl").read()
    assert [event.step for event in events] in (written, written[:-1])


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """The curves that TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory))
    shown.Reload()
    return {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, tensorboard=True)
    metrics.write(1, loss=0.5)
    metrics.write(2, loss=0.25, validation_loss=float("inf"))
    metrics.close()
    assert scalars(tmp_path) == {"loss": {1: 0.5, 2: 0.25}, "validation_loss": {2: float("inf")}}


def test_tensorboard_also_drops_the_steps_after_a_checkpoint(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, tensorboard=True)
    for step in range(1, 6):
        metrics.write(step, loss=step)
    metrics.close()
    resumed = Metrics(tmp_path, 3, tensorboard=True)
    resumed.write(6, loss=60.0)
    resumed.close()
    assert scalars(tmp_path) == {"loss": {1: 1.0, 2: 2.0, 3: 3.0, 6: 60.0}}


def test_tensorboard_shows_everything_after_a_flush(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, tensorboard=True)
    metrics.write(1, loss=0.5)
    metrics.flush()
    assert scalars(tmp_path) == {"loss": {1: 0.5}}
    metrics.close()


def test_without_the_package_the_message_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MisuseError, match=r'pip install "oomguard\[tensorboard\]"'):
        Metrics(tmp_path, tensorboard=True)
    Metrics(tmp_path).write(1, loss=1.0)


def test_metrics_import_neither_torch_nor_tensorboard() -> None:
    code = f"import sys; sys.path.insert(0, {ROOT!r}); import oomguard._train.metrics; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert not {"torch", "tensorboard", "tensorflow"} & {*done.stdout.split()}
