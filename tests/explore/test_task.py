"""The explorer of a task: what it answers is the estimate of a trace, or lies on planes between traces."""

import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser
from task import sized

import oomguard
from oomguard import MisuseError
from oomguard._api.measure import make_explorer
from oomguard._cli.app import run
from oomguard._core.units import format_bytes, read_budget
from oomguard._explore.explorer import Explorer
from oomguard._explore.task import TaskExplorer
from oomguard._explore.traces import Grid
from oomguard._fleet.read import read_jobs
from oomguard._report.estimate import to_json
from oomguard._task.child import Answer
from oomguard._task.trace import Trace

TESTS = Path(__file__).parents[1]
NAME = "task.sized:regression"
pytestmark = pytest.mark.timeout(300)  # every explorer starts a process with PyTorch
ON_CARD: dict[str, Any] = {"device": "t4", "steps": 60, "microbatch": 8, "budget": "1GiB"}


@pytest.fixture(scope="module")
def regression() -> Iterator[TaskExplorer]:
    explorer = make_explorer(NAME, **ON_CARD)
    assert isinstance(explorer, TaskExplorer)
    yield explorer
    explorer.close()


def traced(explorer: Explorer, settings: dict[str, Any]) -> dict[str, Any]:
    """The answer of settings that stay, once they are traced themselves."""
    while "This step was traced." not in (found := explorer.answer(settings)).get("moment", ""):
        assert found["tracing"]
        time.sleep(0.05)
    return found


def estimated(settings: dict[str, Any]) -> oomguard.Estimate:
    names = {"steps" if name == "seq" else name: value for name, value in settings.items()}
    return oomguard.estimate(NAME, **names)


@pytest.mark.parametrize("changes", [{"segments": 4}, {"microbatch": 3, "accumulation": 2, "device": "a100-80gb"}])
def test_the_answer_of_settings_that_stay_is_the_estimate(regression: TaskExplorer, changes: dict[str, Any]) -> None:
    settings = regression.settings | changes
    found, expected = traced(regression, settings), estimated(settings)
    assert found["estimate"] == to_json(expected)
    assert found["verdict"].startswith("Fits with")
    sizes = {bar["name"]: bar["bytes"] for bar in found["bars"]}
    figures = {name: sizes.pop(name) for name in ("margin", "total", "budget")}
    assert sum(sizes.values()) == figures["total"] == expected.total_bytes


def test_settings_between_traces_are_answered_at_once_and_closely(regression: TaskExplorer) -> None:
    regression.whole_answer(regression.settings)
    settings = regression.settings | {"seq": 41, "microbatch": 11}
    found = regression.answer(settings)
    assert "interpolated" in found["moment"]
    expected = traced(regression, settings)["estimate"]["total_bytes"]
    assert found["estimate"]["total_bytes"] == pytest.approx(expected, rel=0.02)


def test_two_explorers_do_not_keep_each_other_from_being_traced(regression: TaskExplorer) -> None:
    both = [regression.settings | {"microbatch": rows} for rows in (13, 14)]
    words = [""]
    while not all("This step was traced." in moment for moment in words):
        words = [str(regression.answer(settings).get("moment")) for settings in both]
        time.sleep(0.05)


def test_the_region_says_what_traces_say(regression: TaskExplorer) -> None:
    now = traced(regression, regression.settings)["estimate"]
    budget_bytes = now["total_bytes"] + now["margin_bytes"] + 2**20
    settings = regression.settings | {"budget": f"{budget_bytes}B"}
    region = regression.whole_answer(settings)["region"]
    known = dict[tuple[int, int], int]()
    for steps, line in zip(region["lengths"], region["cells"], strict=True):
        known |= {(steps, rows): fits for rows, fits in zip(region["microbatches"], line, strict=True)}
    assert {*known.values()} >= {0, 2}
    for steps, rows in ((30, 16), (60, 8), (60, 32), (240, 8)):
        fits = traced(regression, settings | {"seq": steps, "microbatch": rows})["fits"]
        assert (known[steps, rows] == 2) == fits


def test_what_can_be_copied_describes_the_same(regression: TaskExplorer, capsys: pytest.CaptureFixture[str]) -> None:
    settings = regression.settings | {"microbatch": 4, "accumulation": 2}
    found = traced(regression, settings)
    assert run([*shlex.split(found["copies"]["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found["estimate"]))
    assert to_json(eval(found["copies"]["python"], {"oomguard": oomguard})) == found["estimate"]
    (job,) = read_jobs(tomllib.loads(found["copies"]["jobs"])["job"])
    assert (job.task, job.seq, job.batch) == (NAME, 60, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 3}, "hidden"),
        ({"seq": 0}, "seq must be a whole number"),
        ({"microbatch": 0}, "microbatch must be a whole number"),
        ({"segments": 7}, "knows 1, 4, 16, 64, 256 segments"),
        ({"precision": "bf16"}, "trains in fp32, fp16"),
        ({"budget": "much"}, "much"),
    ],
)
def test_wrong_settings_are_told(regression: TaskExplorer, changes: dict[str, Any], words: str) -> None:
    assert words in regression.answer(regression.settings | changes)["error"]


@pytest.fixture
def explored() -> Iterator[Callable[..., Explorer]]:
    """Makes explorers, and ends their processes."""
    made = list[Explorer]()

    def make(*about: Any, **given: Any) -> Explorer:
        made.append(make_explorer(*about, **given))
        return made[-1]

    yield make
    for explorer in made:
        explorer.close()


def test_lengths_of_data_end_at_its_longest_samples(explored: Callable[..., Explorer]) -> None:
    explorer = explored(sized.tagger, device="t4")
    seq = next(control for control in explorer.controls() if control["name"] == "seq")
    assert seq["most"] == explorer.settings["seq"] == 80
    shorter = traced(explorer, explorer.settings | {"seq": 40})  # of a task that is sent, samples are sent again
    expected = oomguard.estimate(sized.tagger, steps=40, microbatch=16, device="t4")
    assert shorter["estimate"]["total_bytes"] == expected.total_bytes
    assert shorter["region"]["lengths"] == [10, 20, 40, 80]
    assert {*shorter["copies"]} == {"python"}  # it has no name that a command could take


def test_a_knob_that_changes_the_gradient_is_no_advice(explored: Callable[..., Explorer]) -> None:
    explorer = explored("task.sized:normed", device="t4", steps=400, microbatch=64, budget="170MiB")
    found = explorer.whole_answer(explorer.settings)
    assert found["verdict"].startswith("Does not fit")
    assert any(line.startswith("Microbatches change the gradient. BatchNorm") for line in found["advice"])
    assert not any("--microbatch" in line for line in found["advice"])
    assert any(line.startswith("--segments") for line in found["advice"])


@pytest.mark.parametrize(
    ("about", "given", "words"),
    [
        ("task.sized:mistaken", {"steps": 30}, "sized.py"),
        ("task.sized:regression", {}, "--seq"),
        ("task.sized:missing", {"steps": 30}, "has no missing"),
        ("task.sized:regression", {"steps": 30, "hidden": 8}, "hidden"),
        ("task.sized:regression", {"steps": 30, "measured": 3}, "explored with its own plan"),
    ],
)
def test_a_task_that_cannot_be_explored_says_why(about: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        make_explorer(about, **given)


def test_the_records_of_a_plan_stand_beside_their_traces(explored: Callable[..., Explorer], tmp_path: Path) -> None:
    asked: dict[str, Any] = {"steps": 60, "batch": 8, "precision": "fp32", "allocator": "tight", "threads": 1}
    plan = oomguard.find_feasible_config(NAME, **asked, budget="1GiB", max_probes=1, timeout=120)
    path = str(oomguard.save_plan(plan, tmp_path / "plan.json"))
    explorer = explored(NAME, measured=path)
    knobs = plan.candidate
    assert read_budget(explorer.settings["budget"]) == plan.budget_bytes
    assert (explorer.settings["seq"], explorer.settings["microbatch"]) == (60, knobs.microbatch)
    (record,) = explorer.whole_answer(explorer.settings)["measured"]
    assert record["measured"] == format_bytes(plan.records[0].peak_bytes or 0)
    assert record["estimated"].endswith("MiB")
    assert not explorer.answer(explorer.settings | {"device": "t4"})["measured"]
    other = msgspec.structs.replace(plan, task="task.sized:words")
    with pytest.raises(MisuseError, match=r"the plan is of task\.sized:words"):
        make_explorer(NAME, measured=other)
    with pytest.raises(MisuseError, match=rf"Add --model {NAME}"):
        make_explorer(measured=path)


def test_the_process_that_serves_never_imports_the_module_of_a_task() -> None:
    code = f"""
import sys
from oomguard._api.measure import make_explorer
explorer = make_explorer({NAME!r}, steps=30, device="t4")
explorer.answer(explorer.settings)
explorer.close()
print(*({{"task", "task.sized"}} & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_page_of_a_task_shows_what_the_command_prints(browser: Browser) -> None:
    words = ["--model", NAME, "--seq", "60", "--microbatch", "8", "--device", "t4"]
    command = [sys.executable, "-m", "oomguard"]
    with subprocess.Popen([*command, "explore", *words], cwd=TESTS, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        page = browser.new_page()
        page.goto(next(line.split()[2] for line in process.stderr if "Serving" in line))
        box = page.locator('.control:has(input[name="microbatch"]) input[type="range"]')
        box.focus()
        box.press("End")
        page.locator('.copied + pre:has-text("--microbatch 128")').first.wait_for()
        page.locator('.soft:has-text("This step was traced.")').wait_for(timeout=60_000)
        rows = page.input_value('input[name="microbatch"]')
        shown = page.inner_text('tr[data-term="total"] td.r')
        page.close()
        process.terminate()
    assert int(rows) == 128
    printed = subprocess.run(
        [*command, "estimate", *words, "--microbatch", rows, "--json"], cwd=TESTS, capture_output=True, text=True
    )
    assert shown == format_bytes(json.loads(printed.stdout)["total_bytes"])


def answer_of(rows: int, steps: int) -> Answer:
    moments = {("forward", "rnn"): (100 + 7 * rows * steps, {("activations", "rnn"): 7 * rows * steps})}
    moments |= {("optimizer", "optimizer"): (5000, {("optimizer", "optimizer"): 5000})}
    step = Trace(moments=moments, engine="native", cells=("gru",), steps=steps, logits="")
    return Answer(step=step, rows=rows, runtime_bytes=0, notes=(), row_bytes=1, layout={}, time={}, longest=None)


def test_moments_that_grow_with_rows_and_steps_are_exact_between_and_beyond_traces() -> None:
    grid = Grid({(rows, steps): answer_of(rows, steps) for rows in (2, 8) for steps in (10, 40)})
    for rows, steps in ((2, 10), (5, 23), (80, 400), (1, 1)):
        found, expected = grid.at(rows, steps), answer_of(rows, steps)
        assert {name: size for name, (size, _) in found.step.moments.items()} == pytest.approx(
            {name: size for name, (size, _) in expected.step.moments.items()}, abs=1
        )
        assert found.step.peak == expected.step.peak
        assert (found.rows, found.step.steps) == (rows, steps)
