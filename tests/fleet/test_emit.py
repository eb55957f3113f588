"""Files for schedulers ask for what a job needs, are valid, and keep every text of a user one quoted word."""

import ast
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fleet.fleets import A100, SMALL, T4, files, fleet_of

import oomguard
from oomguard._cli import flags
from oomguard._cli.app import run
from oomguard._core.units import MIB
from oomguard._estimate.target import CUDA_HOST_BYTES
from oomguard._fleet.command import Work, make_work, slugs
from oomguard._fleet.emit import EMITTERS, emit, to_yaml
from oomguard._fleet.value import Fleet

LABELLED = T4 | {"label": "Tesla-T4"}
HOSTILE = [
    "a; touch {out}",
    "$(touch {out})",
    "`touch {out}`",
    "a' ; touch {out} ; '",
    'a" ; touch {out} ; "',
    "a && touch {out} #",
    "--force",
    "a: b # c",
    "- item",
    "{{a: b}}",
    "%s \\n \\x41 \\\\",
    "''' + __import__('os').system('touch {out}') + '''",
    "${{HOME}} $$ $HOME",
    "ünïcödé 名前",
]
COMMANDS = ("plan", "check", "train")


def hostile_fleet(text: str) -> Fleet:
    return fleet_of(SMALL | {"name": text, "data": text, "epochs": 2, "time": "90min"}, on=[LABELLED])


def work_of(fleet: Fleet, job: int = 0, *, shared: bool = False) -> Work:
    option, label = fleet.option(job, 0), fleet.cards[0].label
    return make_work(fleet.jobs[job], option, slugs([one.name for one in fleet.jobs])[job], label, shared=shared)


def emitted(fleet: Fleet, scheduler: str, folder: Path) -> str:
    (path,) = emit(fleet, scheduler, str(folder))
    return Path(path).read_text(encoding="utf-8")


def strict(text: str) -> Any:
    """The document in YAML, without a key that occurs twice."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len({*keys}) == len(keys), keys
        found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return yaml.load(text, Loader)


def literals(text: str) -> dict[str, Any]:
    """The literals that a program assigns at its top level."""
    assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    return {
        node.targets[0].id: ast.literal_eval(node.value) for node in assigned if isinstance(node.targets[0], ast.Name)
    }


def script_in(scheduler: str, text: str) -> str:
    """The lines for bash in the file of a scheduler."""
    if scheduler == "slurm":
        return text
    if scheduler == "sky":
        return str(strict(text)["run"])
    if scheduler in ("k8s", "kai"):
        command = strict(text)["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[:2] == ["bash", "-c"]
        return str(command[2]).replace("$$(", "$(")  # as Kubernetes reads it
    if scheduler == "ray":
        words = shlex.split(literals(text)["ENTRYPOINT"])
    else:
        words = literals(text)["COMMAND"]
    assert words[:2] == ["bash", "-c"]
    assert len(words) == 3
    return str(words[2])


def run_script(script: str, folder: Path) -> list[list[str]]:
    """Run lines for bash with a program in the place of oomguard, which notes its words and makes its plan."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "oomguard"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$0.py" "$@"\n')  # the path of Python may have a space
    program.with_name("oomguard.py").write_text(
        "import json, pathlib, sys\n"
        "with open('words.jsonl', 'a') as file:\n    print(json.dumps(sys.argv[1:]), file=file)\n"
        "if sys.argv[1] == 'plan':\n    pathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_text('')\n"
    )
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], cwd=folder, env=path, check=True, timeout=60)
    return [msgspec.json.decode(line) for line in (folder / "words.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("scheduler", EMITTERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_jobs_file_leaves_its_quotes(text: str, scheduler: str, tmp_path: Path) -> None:
    marker = tmp_path / "injected"
    text = text.format(out=marker)
    script = script_in(scheduler, emitted(hostile_fleet(text), scheduler, tmp_path / "out"))
    words = run_script(script, tmp_path)
    assert not marker.exists()
    assert [line[0] for line in words] == [*COMMANDS]
    assert words[2].count(f"--data={text}") == 1
    assert {one.name for one in tmp_path.iterdir()} == {"bin", "out", "runs", "words.jsonl"}


@pytest.mark.parametrize("scheduler", ["k8s", "kai"])
def test_kubernetes_does_not_put_variables_into_the_script(scheduler: str, tmp_path: Path) -> None:
    document = strict(emitted(hostile_fleet("$(SECRET).npy"), scheduler, tmp_path))
    command = document["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert command.count("$$(SECRET)") == command.count("$(SECRET)") == 1


@pytest.mark.parametrize("scheduler", ["sky", "k8s", "kai"])
@pytest.mark.parametrize("text", HOSTILE)
def test_documents_are_strict_yaml_with_the_name_as_it_is(text: str, scheduler: str, tmp_path: Path) -> None:
    document = strict(emitted(hostile_fleet(text), scheduler, tmp_path))
    if scheduler != "sky":
        assert document["metadata"]["annotations"] == {"oomguard/name": text}


def test_yaml_keeps_texts_that_look_like_something_else() -> None:
    for text in (
        "yes",
        "1",
        "null",
        "a: b",
        "- a",
        "#",
        " x",
        "x ",
        "a\nb",
        "a\nb\n",
        "\n",
        " a\nb\n",
        "é\n",
        "|",
        "\t",
    ):
        assert yaml.safe_load(to_yaml({"key": text, "list": [text, [text], {"a": text}]})) == {
            "key": text,
            "list": [text, [text], {"a": text}],
        }


def test_names_of_files_are_plain_and_each_occurs_once() -> None:
    names = ["A b", "a_b", "a-b", "../../etc/passwd", "名前", "", "x" * 99, "x" * 98]
    found = slugs(names)
    assert found[:4] == ["a-b", "a-b-2", "a-b-3", "etc-passwd"]
    assert len({*found}) == len(names)
    assert all(len(slug) <= 48 and slug.replace("-", "").isalnum() and slug.isascii() for slug in found)


def test_the_script_plans_once_and_goes_on_afterwards(tmp_path: Path) -> None:
    script = work_of(hostile_fleet("waves")).script
    assert [words[0] for words in run_script(script, tmp_path)] == [*COMMANDS]
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=path, check=True, timeout=60)
    words = [msgspec.json.decode(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert [line[0] for line in words] == [*COMMANDS, "check", "train"]


def test_the_planned_model_is_that_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line of the script, without its files, describes the same spec and the same fixed knobs."""
    job = {
        "name": "all", "cell": "lstm", "lengths": {50: 90, 400: 9}, "vocab": 300, "hidden": 96, "layers": 3,
        "dropout": 0.2, "layer_norm": True, "head": "last-step", "outputs": 7, "optimizer": "sgd", "packed": True,
        "frozen": ["embedding", "layer0"], "batch": 48, "segments": 5, "allow": ["none"], "data": "a.npy",
    }  # fmt: skip
    fleet = fleet_of(job, on=[T4])
    line = next(line for line in work_of(fleet).script.splitlines() if "oomguard plan" in line)
    words = shlex.split(line.partition("then ")[2].removesuffix("; fi"))[1:]
    words[words.index("--device") + 1] = "t4"
    words[words.index("--output") + 1] = str(tmp_path / "plan.json")
    assert run(words) == 0
    plan = oomguard.load_plan(tmp_path / "plan.json")
    assert isinstance(plan, oomguard.Plan)
    request = fleet.jobs[0].request
    assert request is not None
    assert (plan.spec, plan.fixed, plan.allow) == (request.spec, request.fixed, request.allow)


def test_resources_are_those_of_the_option(tmp_path: Path) -> None:
    fleet = hostile_fleet("waves")
    option, need = fleet.option(0, 0), work_of(fleet).resources
    assert need.card_bytes == option.peak_bytes + option.margin_bytes
    assert need.host_bytes > CUDA_HOST_BYTES + option.host_bytes
    assert need.seconds == 90 * 60
    mib, host = -(-need.card_bytes // MIB), need.host_bytes // MIB
    slurm = emitted(fleet, "slurm", tmp_path)
    for option_line in ("--gres=gpu:Tesla-T4:1", f"--mem={host}M", "--time=90"):
        assert f"#SBATCH {option_line}\n" in slurm
    pod = strict(emitted(fleet, "k8s", tmp_path / "k8s"))["spec"]
    container = pod["template"]["spec"]["containers"][0]
    assert pod["activeDeadlineSeconds"] == 90 * 60
    assert container["resources"]["limits"] == {"memory": f"{host}Mi", "nvidia.com/gpu": "1"}
    assert str(mib) in str(pod["template"]["spec"]["affinity"])
    kai = strict(emitted(fleet, "kai", tmp_path / "kai"))["spec"]["template"]
    assert kai["metadata"]["annotations"] == {"gpu-memory": str(mib)}
    assert "nvidia.com/gpu" not in str(kai["spec"]["containers"][0]["resources"])
    assert literals(emitted(fleet, "ray", tmp_path / "ray"))["JOB"]["entrypoint_memory"] == need.host_bytes
    assert literals(emitted(fleet, "submitit", tmp_path / "submitit"))["PARAMETERS"]["timeout_min"] == 90


def test_a_job_that_shares_its_card_keeps_to_what_it_asks_for() -> None:
    fleet = hostile_fleet("waves")
    shared, alone = (work_of(fleet, shared=flag) for flag in (True, False))
    assert f"--budget {shared.resources.card_bytes // MIB}MiB" in shared.script
    assert "--budget" not in alone.script


def test_without_a_known_time_there_is_no_limit(tmp_path: Path) -> None:
    fleet = fleet_of(SMALL | {"data": "a.npy", "epochs": 3})
    assert "--time" not in emitted(fleet, "slurm", tmp_path)
    assert "--gres=gpu:1\n" in emitted(fleet, "slurm", tmp_path / "again")


def test_sbatch_options_come_before_the_first_command(tmp_path: Path) -> None:
    """Slurm stops reading options at the first line that is neither a comment nor empty (man sbatch)."""
    text = emitted(hostile_fleet("waves"), "slurm", tmp_path)
    head = text[: text.index("set -euo")]
    assert text.count("#SBATCH") == head.count("#SBATCH") > 4
    assert all(line.startswith("#") for line in head.splitlines())
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("scheduler", ["k8s", "kai"])
def test_jobs_are_valid_by_the_schema_of_kubernetes(scheduler: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate (100 MB of schemas) is not installed")
    import kubernetes_validate

    document = strict(emitted(hostile_fleet("a: b"), scheduler, tmp_path))
    kubernetes_validate.validate(document, "1.30", strict=True)


def test_submitit_runs_the_job(tmp_path: Path) -> None:
    """The program as it is, on this machine, with a script in the place of the training."""
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed (extra `dev`)")
    (path,) = emit(hostile_fleet("a'; b"), "submitit", str(tmp_path))
    text = Path(path).read_text()
    words = literals(text)["COMMAND"]
    Path(path).write_text(text.replace(repr(words), repr([*words[:2], "echo it ran > done.txt"])))
    done = subprocess.run(
        [sys.executable, path, "debug"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done.txt").read_text() == "it ran\n"


def test_the_command_writes_files_and_keeps_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, cards = files(tmp_path)
    folder = tmp_path / "my jobs"
    words = ["fleet", jobs, "--cards", cards, "--emit", "slurm", "--output", str(folder)]
    assert run(words) == 0
    assert "words-seq100.sbatch" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "long.sbatch",
        "words-seq100.sbatch",
        "words-seq3000.sbatch",
    ]
    assert run(words) == 2
    assert "--force" in capsys.readouterr().err
    assert run([*words, "--force"]) == 0


def test_a_job_without_data_cannot_be_emitted(tmp_path: Path) -> None:
    with pytest.raises(oomguard.MisuseError, match="needs data"):
        emit(fleet_of(SMALL, on=[A100]), "slurm", str(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_the_flag_offers_every_scheduler() -> None:
    assert tuple(EMITTERS) == flags.SCHEDULERS
