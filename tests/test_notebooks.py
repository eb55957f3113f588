"""The notebooks: executed from top to bottom without touching them, and stored as they should be."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomguard._cli.flags import CURVES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(home|root|tmp|Users|usr|var|opt)/|site-packages|0x[0-9a-f]{8,}")
"""What tells on the machine that a notebook was executed on."""


def cells_of(path: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return content


def outputs_of(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells_of(path) for output in cell.get("outputs", [])]


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_they_are_all_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1_estimate_by_hand",
        "2_tradeoff_curves",
        "3_plan_and_train",
        "4_your_own_model",
    ]


def test_every_curve_is_shown_in_the_notebook_about_curves() -> None:
    shown = {name for cell in cells_of(NOTEBOOKS[1]) for name in re.findall(r'\["(\w+)"\]$', source_of(cell))}
    assert shown == {*CURVES}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom_and_says_what_it_is_stored_with(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    words = [sys.executable, str(ROOT / "notebooks" / "run.py"), str(path), "--output", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before
    executed = tmp_path / path.name
    assert [source_of(cell) for cell in cells_of(executed)] == [source_of(cell) for cell in cells_of(path)]
    kinds = [[output["output_type"] for output in cell.get("outputs", [])] for cell in cells_of(executed)]
    assert kinds == [[output["output_type"] for output in cell.get("outputs", [])] for cell in cells_of(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_its_outputs(path: Path) -> None:
    code = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert sum("image/png" in output.get("data", {}) for output in outputs_of(path)) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_has_no_error_and_nothing_of_a_machine(path: Path) -> None:
    for output in outputs_of(path):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        shown = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
        assert not MACHINE.search(json.dumps([output.get("text", ""), shown]))
    assert path.stat().st_size < 1.5e6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_reads_like_an_article(path: Path) -> None:
    cells = cells_of(path)
    assert cells[0]["cell_type"] == "markdown"
    assert source_of(cells[0]).startswith("# ")
    for before, cell in itertools.pairwise(cells):
        if cell["cell_type"] == "code":
            assert len(source_of(cell).splitlines()) <= 30
            figures = sum("image/png" in output.get("data", {}) for output in before.get("outputs", []))
            assert not figures, "a figure is explained before the next cell of code"
