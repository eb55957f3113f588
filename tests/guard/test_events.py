"""Events: every line that was written can be read back, whatever happened to the writer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oomguard._core.errors import MisuseError
from oomguard._guard.events import Events
from oomguard._spec.candidate import Candidate


def test_a_file_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(MisuseError, match="cannot be used"):
        Events("/proc/nobody/writes/here.jsonl").append(1, "kind", "reason")


def test_new_events_are_taken_once(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    written = [events.append(step, "kind", "reason") for step in range(2)]
    assert events.take_new() == tuple(written)
    assert events.take_new() == ()


def test_events_are_read_in_their_order(tmp_path: Path) -> None:
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
def test_a_figure_is_written_as_json_can_hold_it(tmp_path: Path, figure: Any, read: Any) -> None:
    Events(tmp_path / "events.jsonl").append(1, "kind", "reason", figure=figure)
    assert Events(tmp_path / "events.jsonl").read()[0].figures == {"figure": read}


def test_a_candidate_can_be_a_figure(tmp_path: Path) -> None:
    Events(tmp_path / "events.jsonl").append(1, "fell-back", "Tight.", candidate=Candidate(microbatch=3))
    assert Events(tmp_path / "events.jsonl").read()[0].figures["candidate"]["microbatch"] == 3


def test_events_continue_after_a_half_written_line(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.append(1, "first", "reason")
    with events.path.open("ab") as file:
        file.write(b'{"time": "20')
    events.append(3, "third", "reason")
    with pytest.warns(UserWarning, match=r"events\.jsonl, line 2"):
        readable = events.read()
    assert [event.kind for event in readable] == ["first", "third"]
