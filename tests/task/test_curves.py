"""Curves of a task's peak by its rows, between traces."""

import pytest
from task import sized

from oomguard._device.find import find_target
from oomguard._plan import task_curve
from oomguard._plan.task_curve import Curves, Shape
from oomguard._task.ask import Asker


def test_no_line_joins_traces_of_two_engines_even_if_traces_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four longest sentences of the tagger are equally long, which oneDNN runs; more rows need PyTorch's kernel."""
    monkeypatch.setattr(task_curve, "PATIENCE_SECONDS", 0.0)
    target, shape, rows = find_target("cpu"), Shape(allocator="tight"), 8
    with Asker(sized.tagger, target, allocator=shape.allocator) as asker:
        exact = Curves(asker, target, shape, 0, rows)
        assert [point.engine for point in exact[shape].points] == ["onednn", "native"]
        peak_bytes = exact[shape].peak_bytes(rows)
        curves = Curves(asker, target, shape, peak_bytes, None)
        assert curves.largest(shape, 0.0) == rows
        assert curves[shape].peak_bytes(rows) == pytest.approx(peak_bytes, rel=0.001)
