"""Plans of tasks: what fits, what keeps the gradient, and what is stored."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from task import sized

import oomguard
from oomguard import MisuseError, NothingFitsError, Task, TaskPlan
from oomguard._core.units import MIB, format_bytes
from oomguard._report.plan import plan_json
from oomguard._report.task import explain_task, summarize_task
from oomguard._report.words import chosen_words, speed_words, time_words

pytestmark = pytest.mark.timeout(600)
FIXED: dict[str, Any] = {"threads": 1, "allocator": "tight", "allow": "none", "timeout": 300}
"""Knobs that are not searched, so that plans depend on memory alone."""


def plan_of(task: Task | str, growth_bytes: int, **how: Any) -> TaskPlan:
    return oomguard.find_feasible_config(task, budget=sized.runtime_bytes() + growth_bytes, **FIXED | how)


@pytest.fixture(scope="module")
def kept() -> TaskPlan:
    """A plan whose batch of 300 rows needs several microbatches."""
    return plan_of(sized.regression, 25 * MIB, batch=300, steps=60)


# ---- what fits


@pytest.mark.parametrize(("name", "steps"), [("words", 20), ("regression", 60), ("tagger", None)])
def test_the_largest_batch_is_found_in_three_probes_without_running_out(name: str, steps: int | None) -> None:
    task = getattr(sized, name)
    plan = plan_of(task, 60 * MIB, maximize="batch", segments=1, steps=steps)
    assert len(plan.records) <= 3
    assert plan.ooms == 0
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.candidate.accumulation == 1
    if name == "tagger":  # here it once had less than 96 %: task_batches_are_found.py measures larger ones
        return
    more = int(plan.batch / 0.96) + 1  # if that does not fit, the plan has at least 96 % of the largest batch
    above = oomguard.probe(task, microbatch=more, steps=steps, threads=1, allocator="tight", budget=plan.budget_bytes)
    assert not above.verdict.ran


def test_a_batch_that_does_not_fit_is_kept_and_run_in_microbatches(kept: TaskPlan) -> None:
    assert kept.batch == 300
    assert kept.candidate.accumulation > 1
    assert kept.candidate.microbatch * kept.candidate.accumulation >= 300
    assert kept.plain_bytes > kept.budget_bytes >= kept.peak_bytes
    assert (kept.candidate.segments, kept.lossy, kept.ooms) == (1, {}, 0)
    assert [rung.candidate.microbatch for rung in kept.fallbacks][-1] == 1
    assert kept.evaluation_rows is not None
    assert kept.evaluation_rows > kept.candidate.microbatch


def test_a_sample_that_does_not_fit_runs_in_segments() -> None:
    plan = plan_of(sized.long_sample, 40 * MIB)
    assert plan.plain_bytes > plan.budget_bytes
    assert plan.candidate.segments > 1
    assert plan.lossy == {}
    assert plan.peak_bytes <= plan.budget_bytes


def test_nothing_fits_in_less_than_the_libraries_need() -> None:
    with pytest.raises(NothingFitsError, match="must fit the budget"):
        plan_of(sized.regression, -100 * MIB, steps=60)


def test_faster_settings_are_tried_and_those_that_fail_are_left_out() -> None:
    how: dict[str, Any] = {"batch": 8, "steps": 20, "allocator": None, "allow": "precision"}
    plan = plan_of(sized.exacting, 200 * MIB, **how)
    assert [record.candidate.allocator for record in plan.records] == ["tight", "fast"]
    assert plan.record is not None
    assert plan.candidate == plan.record.candidate
    assert plan.candidate.precision == "fp32"


# ---- what keeps the gradient


def test_microbatches_that_change_the_gradient_are_refused_unless_they_are_allowed() -> None:
    how: dict[str, Any] = {"batch": 300, "steps": 60, "segments": 1}
    with pytest.raises(NothingFitsError) as caught:
        plan_of(sized.normed, 25 * MIB, **how)
    assert [(way.change, way.fits) for way in caught.value.shortfall.ways] == [("--allow microbatch", True)]
    plan = plan_of(sized.normed, 25 * MIB, allow="microbatch", **how)
    assert plan.candidate.accumulation > 1
    assert "BatchNorm" in plan.lossy["microbatch"]


def test_a_model_that_fails_on_pieces_of_a_batch_has_no_fallbacks() -> None:
    plan = plan_of(sized.trimmed, 60 * MIB)
    assert plan.fallbacks == ()
    assert (plan.batch, plan.candidate.accumulation) == (16, 1)
    note = "The knob microbatch is not used, since it is not known to keep the gradient. The loss does not run"
    assert any(one.startswith(note) for one in plan.notes)
    assert note in said(plan)


def test_a_lossy_precision_must_be_allowed() -> None:
    with pytest.raises(MisuseError, match="only if it is allowed"):
        plan_of(sized.regression, 25 * MIB, precision="bf16", allow="none", steps=60)


# ---- within the time limit


def test_a_plan_is_made_by_traces_if_no_probe_is_done_in_time() -> None:
    plan = plan_of(sized.hanging, 60 * MIB, batch=64, steps=60, timeout=20)
    assert plan.record is None
    assert [record.verdict.name for record in plan.records] == ["TIMEOUT"]
    assert plan.seconds < 60
    assert plan.expected.peak_bytes + plan.expected.margin_bytes <= plan.budget_bytes
    assert "was not run, and its peak is predicted. Raise --timeout" in said(plan)
    assert not any("device is not here" in text for text in words_of(plan))


def test_a_check_that_takes_too_long_is_told() -> None:
    how: dict[str, Any] = {"batch": 64, "steps": 2000, "segments": 1, "device": "t4", "budget": "500MiB"}
    with pytest.raises(MisuseError, match=r"the check of the gradient took too long .* or give --allow microbatch"):
        oomguard.find_feasible_config(sized.unchecked, timeout=30, allow="none", **how)


# ---- what is stored, and used


def test_a_stored_plan_is_read_back_and_names_its_task(kept: TaskPlan, tmp_path: Path) -> None:
    path = oomguard.save_plan(kept, tmp_path / "plan.json")
    assert oomguard.load_plan(path) == kept
    assert json.loads(path.read_text())["task"] == "task.sized:Regression"


def test_reading_a_plan_imports_nothing(kept: TaskPlan, tmp_path: Path) -> None:
    path = oomguard.save_plan(kept, tmp_path / "plan.json")
    path.write_text(path.read_text().replace("task.sized:Regression", "antigravity:task"))
    code = f"import sys, oomguard; oomguard.load_plan({str(path)!r}); print('antigravity' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 7}, "does not give the batch"),
        ({"budget_bytes": 1000}, "over budget_bytes"),
        ({"exports": {"PATH": "/"}}, "no setting of an allocator"),
        ({"code": "import os"}, "right form"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    kept: TaskPlan, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(kept.to_dict() | change))
    with pytest.raises(MisuseError, match=words):
        oomguard.load_plan(path)


def test_the_plan_of_a_task_cannot_be_trained_as_that_of_a_spec(kept: TaskPlan, tmp_path: Path) -> None:
    path = oomguard.save_plan(kept, tmp_path / "plan.json")
    with pytest.raises(MisuseError, match="The plan of a task is trained with the task"):
        oomguard.train(str(path), [])


def test_a_stepper_runs_the_microbatches_of_the_plan_with_the_gradient_of_the_whole_batch(kept: TaskPlan) -> None:
    torch.manual_seed(0)
    model, batch, sizes = sized.Regression(), sized.waves(300, 60), list[int]()

    def loss(model: torch.nn.Module, piece: torch.Tensor) -> Any:
        sizes.append(len(piece))
        return sized.squares(model, piece)

    roomy = msgspec.structs.replace(kept, budget_bytes=16 << 30)  # this process has run other tests
    with oomguard.stepper(roomy, model, loss, torch.optim.SGD(model.parameters(), lr=0.0), device="cpu") as step:
        mean = step(batch)
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    sized.squares(model, batch).backward()
    assert max(sizes) == kept.candidate.microbatch
    assert len(sizes) == kept.candidate.accumulation
    assert torch.allclose(mean, sized.squares(model, batch), rtol=1e-4)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-6)  # type: ignore[arg-type]


def test_a_guard_cuts_rows_that_are_longer_than_the_plans_into_smaller_pieces(kept: TaskPlan) -> None:
    guard = oomguard.guard(kept, device="cpu")
    assert len(next(iter(guard.split(sized.waves(300, 60))))) == kept.candidate.microbatch
    assert len(next(iter(guard.split(sized.waves(300, 240))))) < kept.candidate.microbatch


# ---- what it says


def words_of(plan: TaskPlan) -> tuple[str, str]:
    """The summary, and everything that is shown, in one line each."""
    shown = [*explain_task(plan)]
    cells = (cell for section in shown if section.table for row in section.table.rows for cell in row)
    sentences = (sentence for section in shown for sentence in (section.title, *section.sentences))
    return said(plan), " ".join([*sentences, *cells])


def said(plan: TaskPlan) -> str:
    """The summary in one line."""
    section = summarize_task(plan)
    return " ".join([section.title, *section.sentences])


def test_every_figure_of_a_plan_is_the_same_in_its_words_and_its_file(kept: TaskPlan) -> None:
    file: dict[str, Any] = json.loads(plan_json(kept))
    record = file["record"]
    assert (kept.peak_bytes, kept.seconds_per_step) == (record["peak_bytes"], record["seconds_per_step"])
    seconds, batch = kept.seconds_per_step or 0.0, f"batch {kept.batch:,} on"
    expected, margin = format_bytes(kept.expected.peak_bytes), format_bytes(kept.expected.margin_bytes)
    for text in words_of(kept):
        assert batch in text
        assert f"Peak {format_bytes(kept.peak_bytes)} of {format_bytes(kept.budget_bytes)} (measured," in text
        assert f"{time_words(seconds, kept.time_spread)} per step" in text
        assert speed_words(kept.batch / seconds, "rows") in text
        assert chosen_words(kept.candidate) in text
        assert f"Estimate {format_bytes(kept.estimate.total_bytes)} by a trace" in text
        assert f"predicted {expected} (margin {margin})" in text
        assert f"would need {format_bytes(kept.plain_bytes)}: it does not fit." in text
    assert file["time_spread"] == kept.time_spread
    assert file["plain_bytes"] == kept.plain_bytes


def test_a_plan_of_a_task_says_first_that_its_gradient_is_not_exact(kept: TaskPlan) -> None:
    half = msgspec.structs.replace(kept.candidate, precision="bf16")
    lossy = msgspec.structs.replace(kept, candidate=half, lossy={"precision": "The model runs in bf16."})
    assert explain_task(lossy)[0].sentences[0] == "The gradient is not exact: precision bf16."
    assert str(lossy).splitlines()[1].startswith("The gradient is not exact: precision bf16.")
    assert "not exact" not in " ".join(words_of(kept))


def test_a_noisy_time_of_a_task_is_marked_and_a_plan_that_did_not_run_says_so(kept: TaskPlan) -> None:
    noisy = msgspec.structs.replace(kept, time_spread=0.3)
    assert all("±30 % per step" in text and "±30 % is how much" in text for text in words_of(noisy))
    unrun = msgspec.structs.replace(kept, record=None, records=(), time_spread=None)
    assert all("(by a trace alone)" in text and "Nothing was run" in text for text in words_of(unrun))
    assert (kept.confirmed, unrun.confirmed) == (True, False)


# ---- the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(Path(sized.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "oomguard", *words], capture_output=True, text=True)


def test_the_command_line_plans_probes_and_shows_a_task(folder: Path) -> None:
    budget = f"{(sized.runtime_bytes() + 40 * MIB) // MIB}MiB"
    done = run(
        *("plan", "--model", "own:regression", "--seq", "60", "--batch", "64", "--budget", budget, "--threads", "1"),
        *("--allocator", "tight", "--allow", "none"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan for own:regression, T = 60, batch 64 on cpu")
    shown = run("show", "plan.json")
    assert shown.returncode == 0, shown.stderr
    assert "Evidence" in shown.stdout
    assert "oomguard.stepper(" in shown.stdout
    probed = run("probe", "--model", "own:regression", "--seq", "60", "--microbatch", "8", "--threads", "1", "--json")
    assert probed.returncode == 0, probed.stderr
    document = json.loads(probed.stdout)
    assert (document["verdict"], document["task"]) == ("FITS", "own:regression")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("probe", "--model", "own:mistaken", "--seq", "5"), r"own.py:"),
        (("plan", "--model", "own:nothing", "--seq", "5"), "own has no nothing"),
        (("plan", "--model", "own:regression", "--hidden", "5"), "--hidden describes a built-in model"),
        (("plan", "--model", "own:regression", "--seq", "5", "--maximize", "seq"), "--maximize must be one of"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_task_that_does_not_fit_ends_with_1(folder: Path) -> None:
    done = run("plan", "--model", "own:regression", "--seq", "60", "--budget", "100MiB")
    assert done.returncode == 1
    assert "NOTHING FITS: own:regression" in done.stdout
