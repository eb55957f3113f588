"""What installs and starts oomguard elsewhere: image, jobs, recipe, and the exit codes that they rely on."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import loaded, oomguard_calls, parsed

import oomguard
from oomguard import __main__ as start
from oomguard._cli import program
from oomguard._cli.app import run
from oomguard._cli.program import EXIT_CODES

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
JOB: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text())


# ---- exit codes


def test_every_exit_code_of_the_code_has_its_meaning() -> None:
    names = ("FITS", "DOES_NOT_FIT", "MISUSE", "BROKEN", "INTERRUPTED", "BROKEN_PIPE")
    assert [*EXIT_CODES] == [getattr(program, name) for name in names] == [0, 1, 2, 70, 130, 141]
    assert (start.INTERRUPTED, start.BROKEN) == (program.INTERRUPTED, program.BROKEN)


def test_the_help_and_the_reference_list_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    reference = loaded("hooks").cli_page()
    for code, meaning in EXIT_CODES.items():
        assert f"{code}: {meaning}" in shown
        assert f"| {code} | {meaning} |" in reference


# ---- jobs


def test_the_slurm_job_is_a_script_that_bash_can_parse() -> None:
    path = ROOT / "examples" / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    calls = [words for line in path.read_text().splitlines() if "srun" in line for words in oomguard_calls(line)]
    assert [words[1] for words in calls] == ["plan", "train"]
    assert all(parsed(words) for words in calls)


def test_the_slurm_job_asks_for_a_data_file() -> None:
    done = subprocess.run(["bash", "examples/slurm.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Give a data file" in done.stderr


def test_the_kubernetes_job_trains_and_knows_the_exit_codes() -> None:
    pod = JOB["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert parsed(["oomguard", *container["args"]]) >= {"plan", "epochs", "resume"}
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    fail, again = (rule["onExitCodes"] for rule in JOB["spec"]["podFailurePolicy"]["rules"])
    assert {*fail["values"], *again["values"]} == {*EXIT_CODES, 137} - {0, 141}
    assert {fail["containerName"], again["containerName"]} == {container["name"]}
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]


SEARCHES = ("search_slurm.sh", "search_sky.yaml", "search_kubernetes.yaml")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_job_of_several_workers_plans_once_and_works_elsewhere(name: str) -> None:
    path = ROOT / "examples" / name
    script = path.read_text()
    if name.endswith(".yaml"):
        job: dict[str, Any] = yaml.safe_load(script)
        script = job["run"] if "run" in job else job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    lines = [line for line in script.splitlines() if " oomguard " in line and not line.startswith("#")]
    calls = [words for line in lines for words in oomguard_calls(line)]
    assert [words[1] for words in calls] == ["plan", "work"]
    assert all("storage" in parsed(words) for words in calls)
    assert path.read_text() in (ROOT / "docs" / "guides" / "clusters.md").read_text()


@pytest.mark.parametrize(("task", "command"), [("0", "plan"), ("3", "work")])
def test_the_first_of_an_array_of_jobs_plans(task: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": task}
    words = ["bash", str(ROOT / "examples" / "search_slurm.sh"), "sqlite:///a b.db"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"oomguard {command} ")
    assert done.stdout.endswith("--storage sqlite:///a b.db\n")


# ---- the image and the recipe


def test_the_image_takes_its_base_from_a_build_argument() -> None:
    steps = re.findall(r"^([A-Z]+) (.*)", DOCKERFILE, re.MULTILINE)
    assert steps[:2] == [("ARG", "BASE=python:3.12-slim"), ("FROM", "${BASE}")]
    assert {name for name, _ in steps} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}


def test_the_image_copies_only_files_that_are_there_and_not_left_out() -> None:
    sources = [name for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {*sources} == kept
    assert all((ROOT / name).exists() for name in sources)


@pytest.mark.parametrize("script", re.findall(r"^RUN ((?:.*\\\n)*.*)", DOCKERFILE, re.MULTILINE))
def test_what_the_image_runs_is_a_script_that_the_shell_can_parse(script: str) -> None:
    subprocess.run(["sh", "-n", "-c", script], check=True)


def test_the_recipe_has_the_version_and_the_dependencies_of_the_project() -> None:
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == oomguard.__version__
    pairs = [re.fullmatch(r"([\w.-]+)(>=[\d.]+)", line) for line in PROJECT["project"]["dependencies"]]
    wanted = {f"{CONDA_NAMES.get(pair[1], pair[1])} {pair[2]}" for pair in pairs if pair is not None}
    assert len(wanted) == len(pairs)
    python = "python " + PROJECT["project"]["requires-python"]
    assert {*recipe["requirements"]["run"]} == wanted | {python}
    (build,) = PROJECT["build-system"]["requires"]
    assert {*recipe["requirements"]["host"]} == {"pip", python, build.replace(">=", " >=")}
    (entry,) = PROJECT["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{entry[0]} = {entry[1]}"]
    assert recipe["about"]["license"] == PROJECT["project"]["license"]


def test_no_file_names_a_registry() -> None:
    names = ["Dockerfile", "examples/slurm.sh", "examples/kubernetes.yaml", "packaging/conda/recipe.yaml"]
    names += [f"examples/{name}" for name in SEARCHES]
    assert not [name for name in names if "://" in (ROOT / name).read_text()]
