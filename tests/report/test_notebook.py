"""Values as a notebook, `print` and `repr` show them."""

from html import unescape
from typing import Any

import pytest
from report.pages import plan_called

import oomguard
from oomguard._probe.record import TERMS, Probed, Record, TaskRecord
from oomguard._probe.verdict import Verdict
from oomguard._report.notebook import Bar, to_html
from oomguard._report.tables import Section
from oomguard._spec.candidate import Candidate

FIELDS: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "budget": "700MiB", "device": "cpu"}


def record(**changed: Any) -> Record:
    spec = oomguard.Spec(cell="gru", seq=20)
    usual: dict[str, Any] = {"spec": spec, "candidate": Candidate(microbatch=32), "device": "cpu", "engine": "native"}
    measured = {
        "peak_bytes": 320 << 20,
        "seconds_per_step": 0.5,
        "steps": 3,
        "passes": 3,
        "terms": dict.fromkeys(TERMS, 4 << 20) | {"runtime": 300 << 20},
    }
    about = {"message": "It ran.", "budget_bytes": 400 << 20, "started": "2026-01-31T12:00:00", "seconds": 1.5}
    return Record(**usual | about | measured | {"verdict": Verdict.FITS} | changed)


def values() -> dict[str, Any]:
    fields = {name: getattr(record(), name) for name in Probed.__struct_fields__}
    task = TaskRecord(**fields, task="own:task", batch=32, seq=None)
    return {
        "estimate": oomguard.estimate(**FIELDS),
        "plan": plan_called("a processor"),
        "plan by arithmetic": plan_called("a card, nothing measured"),
        "record": record(),
        "record of a task": task,
    }


@pytest.mark.parametrize("name", values())
def test_a_notebook_shows_bars_first_and_folds_the_rest(name: str) -> None:
    page = values()[name]._repr_html_()
    assert page.index('class="bars"') < page.index("<details>")
    assert "The line is the budget, " in page
    assert "<script" not in page
    assert "http" not in page


@pytest.mark.parametrize("name", values())
def test_a_repr_is_one_line(name: str) -> None:
    shown = repr(values()[name])
    assert shown.startswith("<")
    assert len(shown) < 250
    assert "\n" not in shown


@pytest.mark.parametrize("kind", ["a processor", "a card, nothing measured", "a processor, nothing measured"])
def test_a_printed_plan_is_five_lines(kind: str) -> None:
    lines = str(plan_called(kind)).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("Plan for")
    assert "Peak" in lines[2]
    assert "Plain PyTorch" in lines[3]


def test_many_estimates_are_counted() -> None:
    many = oomguard.estimate(**FIELDS, microbatch=[1, 32])
    assert repr(many).startswith("<Estimate 2 candidates on cpu, 1 fit: ")
    assert "2 candidates" in many._repr_html_()


def test_what_does_not_fit_is_marked_and_cut_off_before_it_fills_the_page() -> None:
    page = to_html([Bar("peak", 5000, 0, fits=False), Bar("small", 60)], 100, [Section(title="x")])
    assert page.count('class="over cut"') == 1
    assert "width: 100.0%" in page
    assert "width: 5.0%" in page


def test_a_record_without_a_peak_says_why() -> None:
    measured = dict.fromkeys(("peak_bytes", "seconds_per_step", "terms")) | {"steps": 0, "verdict": Verdict.OOM}
    failed = record(**measured, message="An allocation <was> refused.")
    assert "OOM: An allocation <was> refused." in unescape(failed._repr_html_())
    assert "<was>" not in failed._repr_html_()
    assert "OOM" in repr(failed)
