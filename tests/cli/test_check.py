"""`oomguard check` compares a plan with the machine at hand, and names the rung that still fits."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
from device.fake_nvml import answer, card, process
from plans import plan_of
from surface.freeze import HERE, PLANS

import oomguard
from oomguard._cli.app import run
from oomguard._core.units import GIB, MIB
from oomguard._estimate import cards
from oomguard._plan.check import check_plan
from oomguard._plan.value import Plan

A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"
DRIVER, TORCH = "570.86.15", "2.13.0+cu129"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return oomguard.save_plan(plan_of(), tmp_path / "plan of mine.json")


def document(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = run(["check", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def differing(found: dict[str, Any]) -> list[str]:
    return [one["name"] for one in found["compared"] if one["same"] is False]


def changed(plan: Plan, **environment: Any) -> Plan:
    return msgspec.structs.replace(plan, environment=msgspec.structs.replace(plan.environment, **environment))


def card_plan() -> Plan:
    """A plan made on an A100 of a machine with this driver and this torch."""
    plan = oomguard.find_feasible_config(cell="lstm", seq=100_000, device="a100-80gb", progress=False)
    assert isinstance(plan, Plan)
    where = msgspec.structs.replace(plan.where, device="cuda")
    plan = changed(msgspec.structs.replace(plan, where=where), device="cuda", title=A100, driver=DRIVER, torch=TORCH)
    return changed(plan, library="cuDNN 9.10.2")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with that driver, torch and cuDNN, whose card is put in by `show`."""
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: DRIVER)
    monkeypatch.setattr("oomguard._plan.check.torch_version", lambda: TORCH)
    monkeypatch.setattr("oomguard._plan.check.built_for_cards", lambda: True)
    monkeypatch.setattr("oomguard._plan.check._cudnn", lambda: ["cuDNN 9.10.2"])
    return monkeypatch


def show(patch: pytest.MonkeyPatch, name: str, gib: int, processes: list[SimpleNamespace] | None = None) -> None:
    used = sum(one.usedGpuMemory for one in processes or [])
    total = gib * GIB
    kept = {"free": total - 400 * MIB - used, "processes": processes or []}
    answer(patch, card(name=name, total=total, capability=cards.card(name).compute_capability, **kept))


def test_a_plan_of_this_machine_ends_with_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(capsys, file)
    assert (code, found["ok"], differing(found), found["rung"]["number"]) == (0, True, [], 0)


def test_it_takes_the_directory_of_a_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.rename(tmp_path / "plan.json")
    assert document(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_0_1_is_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(capsys, HERE / name)  # it was made on "the processor of the golden files"
    assert (code, [one["name"] for one in found["compared"]]) == (1, ["processor", "free memory", "torch"])


def test_another_torch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = oomguard.save_plan(changed(plan_of(), torch="2.12.1"), tmp_path / "plan.json")
    code, found = document(capsys, plan)
    assert (code, differing(found)) == (1, ["torch"])
    assert run(["check", str(plan)]) == 1
    text = capsys.readouterr().out
    assert "2.12.1" in text
    assert "differs" in text


def test_the_rung_that_fits_less_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    sizes = [plan.peak_bytes + plan.margin_bytes, *(rung.expected.safe_bytes for rung in plan.fallbacks)]
    assert sizes[1] < sizes[0]
    budget = SimpleNamespace(limit_bytes=sizes[1])
    monkeypatch.setattr("oomguard._plan.check.find_budget", lambda _: budget)
    found = check_plan(plan)
    assert not found.ok
    assert found.rung is not None
    assert (found.rung.number, found.rung.candidate) == (1, plan.fallbacks[0].candidate)
    budget.limit_bytes = min(sizes) - 1
    assert check_plan(plan).rung is None


def test_the_plan_of_a_card_is_compared_through_nvml(here: pytest.MonkeyPatch) -> None:
    show(here, A100, 80)
    found = check_plan(card_plan())
    assert found.ok
    assert {one.name: one.same for one in found.compared} == dict.fromkeys(
        ("card", "free memory", "driver", "torch", "cuDNN"), True
    )


def test_a_neighbour_on_the_card_takes_from_its_free_memory(here: pytest.MonkeyPatch) -> None:
    plan = card_plan()
    show(here, A100, 80, [process(999_999, 80 * GIB - 400 * MIB - plan.peak_bytes // 2)])
    found = check_plan(plan)
    assert [one.name for one in found.compared if one.same is False] == ["free memory"]
    assert found.rung is not None
    assert found.rung.number > 0
    assert found.rung.needed_bytes <= (found.free_bytes or 0)


@pytest.mark.parametrize(
    ("name", "value", "function"),
    [
        ("driver", "580.1", "pynvml.nvmlSystemGetDriverVersion"),
        ("torch", "2.14.0+cu129", "oomguard._plan.check.torch_version"),
        ("cuDNN", ["cuDNN 9.12.0"], "oomguard._plan.check._cudnn"),
        ("torch", False, "oomguard._plan.check.built_for_cards"),
        ("torch", None, "oomguard._plan.check.torch_version"),
    ],
)
def test_each_difference_in_software_is_found(
    name: str, value: object, function: str, here: pytest.MonkeyPatch
) -> None:
    show(here, A100, 80)
    here.setattr(function, lambda: value)
    assert [one.name for one in check_plan(card_plan()).compared if one.same is False] == [name]


def test_what_is_not_known_is_no_difference(here: pytest.MonkeyPatch) -> None:
    show(here, A100, 80)
    here.setattr("oomguard._plan.check._cudnn", list)
    found = check_plan(card_plan())
    assert found.ok
    assert found.compared[-1].same is None


def test_on_another_card_the_rung_is_estimated_for_that_card(here: pytest.MonkeyPatch) -> None:
    plan = card_plan()
    candidate = msgspec.structs.replace(plan.candidate, precision="bf16")
    show(here, T4, 16)
    found = check_plan(msgspec.structs.replace(plan, candidate=candidate))
    assert [one.name for one in found.compared if one.same is False] == ["card", "free memory"]
    assert found.rung is not None
    assert found.rung.number > 0  # a T4 has no bf16
    need = oomguard.estimate(plan.spec, found.rung.candidate, device="t4")
    assert found.rung.needed_bytes == need.total_bytes + need.margin_bytes


def test_a_plan_for_a_named_card_is_for_every_card_of_that_name(here: pytest.MonkeyPatch) -> None:
    plan = oomguard.find_feasible_config(cell="lstm", seq=1000, device="a100-80gb", progress=False)
    plan = changed(plan, torch="2.13.0+cpu")  # made on a machine without cards
    show(here, A100, 80)
    found = check_plan(plan)
    assert found.ok
    assert found.named
    show(here, T4, 16)
    assert [one.name for one in check_plan(plan).compared if one.same is False] == ["card"]


def test_a_machine_without_a_card_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = oomguard.save_plan(card_plan(), tmp_path / "plan.json")
    code, found = document(capsys, plan)
    assert (code, found["rung"], differing(found)[0]) == (1, None, "card")


def test_the_plan_of_a_task_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    task = oomguard.Task(
        model=lambda: torch.nn.GRU(3, 4),
        loss=lambda model, batch: model(batch)[0].mean(),
        batch=lambda rows, steps: torch.randn(steps, rows, 3),
    )
    plan = oomguard.find_feasible_config(task, steps=5, batch=4, device="t4", progress=False)
    path = oomguard.save_plan(plan, tmp_path / "plan.json")
    code, found = document(capsys, path)
    assert (code, differing(found)[0]) == (1, "card")


@pytest.mark.parametrize("words", [["nowhere.json"], ["{file}", "--device", "cuda"], ["{file}", "--device", "t4"]])
def test_misuse_ends_with_2(words: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *(word.format(file=file) for word in words)]) == 2
    assert capsys.readouterr().err.startswith("oomguard: ")


def test_it_imports_nothing_heavy(file: Path) -> None:
    code = "import sys\nfrom oomguard._cli.app import run\n"
    code += "run(['check', sys.argv[1]])\nprint()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True, timeout=100)
    assert not {*done.stdout.splitlines()[-1].split()} & {"torch", "pandas", "optuna", "jinja2", "matplotlib"}
