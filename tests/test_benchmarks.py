"""The benchmarks: what is fitted to some models must not know the judged ones, and users are followed as they work."""

import ast
import importlib
import importlib.util
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oomguard._estimate.breakdown import estimate_step
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec

ROOT = Path(__file__).parents[1]
FITTED = [path for name in ("_search", "_predict", "_estimate") for path in (ROOT / "oomguard" / name).rglob("*.py")]
"""The files with constants that are fitted to measurements."""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models", ROOT / "benchmarks" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models: Any = loaded()
JUDGED = {(cell, size) for cell in ("lstm", "gru", "rnn") for size in models.JUDGE_HIDDEN} | {
    (model.fields["cell"], model.fields["hidden"]) for model in models.JUDGE
}
"""Cells with hidden sizes that are judged: of the listed models, and of those that are drawn at random."""

# ---- judged models in what is written about constants

CELL = r"\b(?P<cell>lstm|gru|rnn)s?\b"
UNIT = r"(?:%|[KMG]i?B\b|[munµ]?s\b|seconds|steps|time|rows|words|tokens|probes|layers)"
SIZE = rf"(?P<size>\d+)(?!\d|[.,]\d|\s*{UNIT})"
BETWEEN = (
    r"(?:of|with|a|an|the|in|and|one|two|three|hidden|sizes?|widths?|units?|states?|layers?|bidirectional|\d+ layers)"
)
NAMES = (
    re.compile(rf"{CELL}[\s(:,=-]*(?:{BETWEEN}[\s(:,=-]+)*{SIZE}", re.IGNORECASE),  # "LSTM 160", "GRU with 112 units"
    re.compile(rf"{CELL}[^.;]{{0,60}}?\bhidden(?:[\s_-]*size)?[\s(:=]*(?:of\s)?{SIZE}", re.IGNORECASE),
    re.compile(rf"\b(?P<size>\d+)[\s-]*(?:units?|wide|hidden)?[\s-]*{CELL}", re.IGNORECASE),  # "a 112-unit GRU"
)


def judged_names(text: str) -> list[str]:
    """Find the judged models that a text names: a cell together with a judged hidden size."""
    matches = [match for name in NAMES for match in name.finditer(" ".join(text.split()))]
    return [match[0] for match in matches if (match["cell"].lower(), int(match["size"])) in JUDGED]


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a program. Those on consecutive lines are one."""
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    text, last = "", -1
    for token in tokens:
        if token.start[0] > last + 1:
            yield text
            text = ""
        text, last = f"{text} {token.string.lstrip('# ')}", token.start[0]
    yield text


def constant_docstrings(source: str) -> Iterator[str]:
    """Yield the strings that stand below an assignment, in modules and in classes."""
    for node in ast.walk(ast.parse(source)):
        for above, below in pairwise(getattr(node, "body", []) if isinstance(node, ast.Module | ast.ClassDef) else []):
            if isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                value = below.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


@pytest.mark.parametrize("path", FITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_comment_on_a_constant_names_a_judged_model(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert [name for text in (*comments(source), *constant_docstrings(source)) for name in judged_names(text)] == []


def test_the_files_with_constants_are_found() -> None:
    assert {"space.py", "memory.py", "speed.py", "breakdown.py", "malloc.py"} <= {path.name for path in FITTED}


@pytest.mark.parametrize(
    "text",
    [
        "An LSTM 160 took 63 ms a step.",
        "LSTM 160 × 2, T = 100",
        "measured with a GRU of hidden\nsize 112, T = 400",
        "a vanilla RNN with 200 units crept up",
        "two GRUs (80) were slower",
        "LSTM, hidden 320",
        'Spec(cell="lstm", seq=112, hidden=512)',
        "a bidirectional LSTM of two layers of 160",
        "LSTM 64 with a vocabulary of 5,000",
        "the 112-unit GRU",
        "fitted to a GRU 80.",
    ],
)
def test_a_judged_model_is_found_in_a_text(text: str) -> None:
    assert judged_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "LSTM 128, T = 400, 2 threads: 63 ms a step in chunks",
        "GRU 128, T = 500",
        "an LSTM of three layers peaked at 1.0 to 2.0 of the estimate",
        "an LSTM with 20,000 words",
        "LSTM: 200 MiB; GRU: 160 ms; an RNN of 512 steps",
        "a GRU of T = 320",
        "RNN 64",
        "512 bytes, 320 rows",
    ],
)
def test_other_models_and_figures_are_not_taken_for_judged_ones(text: str) -> None:
    assert judged_names(text) == []


def test_comments_and_docstrings_of_constants_are_read() -> None:
    constants = '# fitted to a GRU\n# 112 wide\nA = 1\n"""Fitted to an LSTM 160."""\nB = 2  # RNN 200\n'
    source = f'{constants}\n\ndef f():\n    """GRU 80"""\n'
    texts = [*comments(source), *constant_docstrings(source)]
    assert [name for text in texts for name in judged_names(text)] == ["GRU 112", "RNN 200", "LSTM 160"]


# ---- the two sets


def test_no_model_is_in_both_sets() -> None:
    assert not {*models.TUNE_HIDDEN} & {*models.JUDGE_HIDDEN}
    assert not {model.name for model in models.TUNE} & {model.name for model in models.JUDGE}
    assert {model.fields["hidden"] for model in models.TUNE} <= {*models.TUNE_HIDDEN}
    assert {model.fields["hidden"] for model in models.JUDGE} <= {64, *models.JUDGE_HIDDEN}
    assert all(models.is_judged(model.fields) for model in models.JUDGE)
    assert not any(models.is_judged(model.fields) for model in models.TUNE)


def test_the_judged_models_span_what_people_train() -> None:
    judged = [model.fields for model in models.JUDGE]
    assert len(judged) >= 6
    assert {fields["cell"] for fields in judged} == {"lstm", "gru", "rnn"}
    assert {fields["cell"] for fields in (model.fields for model in models.TUNE)} == {"lstm", "gru", "rnn"}
    assert {fields["layers"] for fields in judged} == {1, 2, 3}
    assert {64, 512} <= {fields["hidden"] for fields in judged}
    assert sum(fields.get("vocab", 0) >= 2000 for fields in judged) >= 2
    assert any(fields.get("bidirectional") for fields in judged)
    assert len(models.BATCH_SEQ) == 6
    assert {*models.BATCH_SEQ} <= {model.name for model in models.JUDGE}


def test_the_plain_step_does_not_fit_in_at_least_half_of_the_judged_budgets_and_fits_in_some() -> None:
    fits = [model.plain_fits for model in models.JUDGE]
    assert 0 < sum(fits) <= len(fits) / 2


@pytest.mark.parametrize("model", [*models.TUNE, *models.JUDGE], ids=lambda model: model.name)
def test_by_the_estimate_too_the_plain_step_fits_where_it_should(model: Any) -> None:
    spec = make_spec(model.fields)
    assert (estimate_step(spec, make_candidate(spec)).total_bytes <= model.budget_bytes) == model.plain_fits


def test_random_models_have_the_hidden_sizes_that_are_asked_for() -> None:
    rng = random.Random(0)
    rows = [models.draw_row(rng, models.JUDGE_HIDDEN, 3e10)[0] for _ in range(20)]
    cases = [models.draw_case(rng, models.JUDGE_HIDDEN)[0] for _ in range(20)]
    assert all(models.is_judged(fields) for fields in rows + cases)
    assert {fields["cell"] for fields in rows} == {fields["cell"] for fields in cases} == {"lstm", "gru", "rnn"}
    assert not models.is_judged(models.draw_row(rng, models.TUNE_HIDDEN, 3e10)[0])


def test_the_stored_errors_are_those_of_the_measured_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the estimate changes, `python benchmarks/residuals.py` writes them again."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("residuals")
    module.write(module.residuals(module.read_rows()), tmp_path / "residuals.csv")
    assert (tmp_path / "residuals.csv").read_text() == module.RESIDUALS.read_text()


# ---- the first hour of a user


@pytest.fixture
def first_hour(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OOMGUARD_CACHE", "")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("first_hour")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_is_listened_to(first_hour: Any, terminal: bool, tmp_path: Path) -> None:
    where: dict[str, Any] = {"shown": "echo", "terminal": terminal, "cwd": tmp_path}
    ran = first_hour.run(["bash", "-c", "test -t 1 && echo seen; echo told >&2; exit 3"], 3, **where)
    assert (ran.failed, ran.first) == (False, None)
    assert ran.output.split() == ["seen", "told"][not terminal :]
    assert 0 < ran.silence <= ran.seconds
    assert first_hour.run(["bash", "-c", "exit 3"], 0, **where).failed


def test_what_a_user_met_is_summed_up(first_hour: Any) -> None:
    steps = [
        first_hour.Ran("block1.py", False, 0.5, None, 1.0, ""),
        first_hour.Ran("oomguard plan --model lstm", True, 7.0, None, 20.0, ""),
        first_hour.Ran("oomguard estimate --model lstm", False, 0.5, None, 2.0, ""),
    ]
    row = first_hour.row_of(steps)
    assert (row["commands"], row["failures"], row["seconds"], row["answer_seconds"]) == (3, 1, 23.0, 23.0)
    assert (row["silence_seconds"], row["most_silent"]) == (7.0, "oomguard plan --model lstm")
    assert first_hour.row_of([*steps[:1], first_hour.Ran("cells", False, 0.5, 3.0, 9.0, "")])["answer_seconds"] == 4.0


@pytest.mark.timeout(300)
def test_the_first_hour_of_the_keras_user_has_no_failure(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "first_hour.py"), "keras", "--smoke"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  no failure in 5 commands (0)" in done.stdout
