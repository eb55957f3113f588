"""Screens of every width: no line is longer than the terminal, and figures stay on one line."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from report.pages import plan_called
from rich.console import Console

import oomguard
from oomguard._device.find import present_devices
from oomguard._report.estimate import show_cards, show_devices, show_estimate
from oomguard._report.plan import explain, show_result
from oomguard._report.progress import show_training
from oomguard._report.subject import find_subject
from oomguard._report.tables import show_sections
from oomguard._report.tradeoffs import make_table, show_tradeoffs
from oomguard._train.loop import Result

Show = Callable[[Console], None]
SPEC = oomguard.Spec(cell="lstm", seq=10_000)


@cache
def screens() -> dict[str, Show]:
    from oomguard._data.open import Missing
    from oomguard._estimate.cards import card, names

    estimate = oomguard.estimate(SPEC, budget="700MiB")
    plan = plan_called("a processor")
    subject = find_subject(SPEC, budget="700MiB")
    table = make_table(subject)
    model: Any = None
    result = Result(
        run=Path("runs/lstm-10000"),
        steps=123_456,
        loss=0.123456,
        validation_loss=0.2345,
        ended="interrupted",
        rung=2,
        peak_bytes=1 << 30,
        model=model,
        missing=Missing(truncated=1200, dropped=1),
        scaled=True,
    )
    return {
        "estimate": lambda console: show_estimate(SPEC, estimate, "--budget", [], console),
        "plan": lambda console: show_result(plan, Path("plan.json"), console),
        "show": lambda console: show_sections(explain(plan), console),
        "tradeoffs": lambda console: show_tradeoffs(subject, table, None, console),
        "devices": lambda console: show_devices(*present_devices(), console),
        "cards": lambda console: show_cards([card(name) for name in names()], console),
        "train": lambda console: show_training(result, console),
    }


def shown(name: str, width: int) -> str:
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        screens()[name](console)
    return captured.get()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["estimate", "plan", "show", "tradeoffs", "devices", "cards", "train"])
def test_no_line_is_longer_than_the_terminal_and_nothing_is_cut_off(name: str, width: int) -> None:
    text = shown(name, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "..." not in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["show", "tradeoffs", "devices", "estimate"])
def test_a_size_stays_on_one_line_with_its_unit(name: str, width: int) -> None:
    rows = [line for line in shown(name, width).splitlines() if re.search(r"\d.*  +\S", line)]  # lines of tables
    assert rows
    for row in rows:
        assert not re.search(r"\d\.\d\d$", row), row
        assert not re.fullmatch(r"\s*[KMGT]iB.*", row), row


def test_a_narrow_table_leaves_out_what_it_can_do_without() -> None:
    assert "with margin" in " ".join(shown("tradeoffs", 80).split())
    assert "margin" not in shown("tradeoffs", 60)
