"""A peak of a task that is far below its trace is measured again."""

from typing import Any

import msgspec
import pytest
from task import sized

import oomguard
from oomguard._core.units import MIB
from oomguard._plan.task import _Search
from oomguard._probe.record import TaskRecord

ASKED: dict[str, Any] = {"batch": 300, "steps": 60, "threads": 1, "allocator": "tight", "allow": "none", "timeout": 300}


@pytest.mark.timeout(300)
def test_a_peak_far_below_its_trace_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, records = _Search._run, list[TaskRecord]()

    def first_ends_early(search: _Search, choice: Any) -> TaskRecord:
        record = run(search, choice)
        if not records:  # as if its child had not got far
            record = msgspec.structs.replace(record, peak_bytes=record.runtime_bytes)
            search.records[-1] = record
        records.append(record)
        return record

    monkeypatch.setattr(_Search, "_run", first_ends_early)
    plan = oomguard.find_feasible_config(sized.regression, budget=sized.runtime_bytes() + 400 * MIB, **ASKED)
    one, two = plan.records[:2]
    assert one.candidate == two.candidate
    assert (one.peak_bytes or 0) < (two.peak_bytes or 0)
    assert plan.record is not None
    assert plan.peak_bytes > (one.peak_bytes or 0)
