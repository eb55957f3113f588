"""The table of knobs: a field that is added to `Candidate` is found everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oomguard
from oomguard._spec.candidate import KNOBS, Candidate, Candidates

ROW = '''    sparkle: Annotated[Literal["dull", "bright"], Role(tries=("dull", "bright"))] = "dull"
    """Shine of the gradients. It has no effect."""
    glitter: Annotated[int | None, Bounds(1, 9), Role(lossy="glitter")] = None
    """Grains of glitter (default: none)."""
'''
"""Two new rows: a choice that the search tries, and a lossy number."""
LSTM = "--model lstm --seq 50 --hidden 8 --batch 4 --device t4"


@pytest.fixture(scope="module", name="package")
def _package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose table has the new rows."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "oomguard"
    shutil.copytree(Path(oomguard.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    table = copy / "_spec/candidate.py"
    text = table.read_text()
    end = "\n    def __post_init__(self) -> None:\n"
    assert text.count(end) == 1
    table.write_text(text.replace(end, f"{ROW}{end}"))
    return folder


def command(package: Path, line: str, code: int = 0) -> str:
    """What a command line of the copied package prints."""
    return python(package, "-m", "oomguard", *line.split(), code=code)


def python(package: Path, *words: str, code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(package), "COLUMNS": "200", "OOMGUARD_CACHE": ""}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=package, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["estimate", "probe", "plan", "tradeoffs"])
def test_a_new_knob_is_a_flag_with_its_help(name: str, package: Path) -> None:
    words = " ".join(command(package, f"{name} --help").replace("│", " ").split())
    fixed = name in ("plan", "tradeoffs")
    default, none = ("", "") if fixed else (" (default)", " (default: none)")
    assert f"--sparkle NAME Shine of the gradients. One of dull{default}, bright." in words
    assert f"--glitter N Grains of glitter{none}." in words


def test_a_new_knob_is_in_the_json_and_its_values_are_checked(package: Path) -> None:
    made = json.loads(command(package, f"estimate {LSTM} --sparkle bright --json"))["candidate"]
    assert (made["sparkle"], made["glitter"]) == ("bright", None)
    command(package, f"estimate {LSTM} --sparkle brigt", code=2)
    command(package, f"estimate {LSTM} --glitter 10", code=2)


def test_a_new_knob_is_in_the_plan_and_in_its_words(package: Path) -> None:
    written = command(package, f"plan {LSTM} --sparkle bright --json")
    assert json.loads(written)["candidate"]["sparkle"] == "bright"
    assert json.loads(written)["fixed"] == {"sparkle": "bright"}
    assert "sparkle bright" in command(package, "show plan.json")


def test_a_new_lossy_knob_is_used_only_if_it_is_allowed(package: Path) -> None:
    assert "Any of precision, window, 8bit, glitter, none." in " ".join(
        command(package, "plan --help").replace("│", " ").split()
    )
    command(package, f"plan {LSTM} --glitter 3 --output lossy.json", code=2)
    made = json.loads(command(package, f"plan {LSTM} --glitter 3 --allow glitter --output lossy.json --json"))
    assert (made["candidate"]["glitter"], made["allow"]) == (3, ["glitter"])


def test_a_new_knob_is_a_column_of_the_tradeoffs(package: Path) -> None:
    line = f"tradeoffs {LSTM} --over sparkle=dull,bright --over glitter=none,3 --json"
    rows = json.loads(command(package, line))["rows"]
    assert [(row["sparkle"], row["glitter"]) for row in rows] == [
        *(("dull", None), ("dull", 3), ("bright", None), ("bright", 3)),
    ]
    lines = command(package, line.removesuffix(" --json")).splitlines()
    assert any({"sparkle", "glitter"} < {*line.split()} for line in lines)


def test_a_new_knob_is_tried_by_the_search_and_is_a_parameter_of_optuna(package: Path) -> None:
    code = """
from oomguard._estimate.target import CPU
from oomguard._search.sampler import distributions, parameters
from oomguard._search.propose import Probe
from oomguard._search.space import Choices, grid, make_space
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
spec = Spec(cell="gru", seq=50, hidden=8, batch=4)
tried = grid(spec, make_space(spec, CPU, 1 << 30, Choices()))
candidate = Candidate(microbatch=4, sparkle="bright", glitter=3)
probe = Probe(spec=spec, candidate=candidate, role="explore", passes=1, peak_bytes=1, seconds_per_pass=1.0)
print(sorted({tried[row].sparkle for row in range(len(tried))}))
print(parameters(probe)["sparkle"], parameters(probe)["glitter"])
print(distributions(probe)["sparkle"].choices, distributions(probe)["glitter"].high)
"""
    assert python(package, "-c", code).splitlines() == ["['bright', 'dull']", "bright 3", "('dull', 'bright') 9"]


# -- the rows themselves


def test_many_candidates_have_the_knobs_of_one() -> None:
    assert [*Candidates(microbatch=1).knobs] == [*KNOBS] == [*Candidate.__struct_fields__]


@pytest.mark.parametrize("name", KNOBS)
def test_the_first_value_that_a_search_tries_is_the_default(name: str) -> None:
    knob = KNOBS[name]
    assert not knob.role.tries or knob.role.tries[0] == knob.field.default


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"threads": 1}, {"threads": "1 thread"}),
        ({"threads": 2}, {"threads": "2 threads"}),
        ({"recompute": False}, {"recompute": "no recompute"}),
        ({"workers": 3}, {"workers": "workers 3"}),
        ({"keep": "host"}, {"keep": "microbatch and border states in host memory"}),
        ({}, {}),
    ],
)
def test_a_value_is_put_into_words_unless_it_is_the_default(knobs: dict[str, Any], words: dict[str, str]) -> None:
    candidate = Candidate(microbatch=1, **knobs)
    texts = {name: KNOBS[name].in_words(getattr(candidate, name)) for name in KNOBS if name != "microbatch"}
    assert {name: text for name, text in texts.items() if text} == {"precision": "fp32"} | words
