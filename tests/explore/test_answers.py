"""What the explorer answers is what `oomguard estimate` says, and what can be copied says the same again."""

import json
import shlex
import tomllib
from typing import Any

import pytest
from plans import plan_of

import oomguard
from oomguard._cli.app import run
from oomguard._core.errors import MisuseError
from oomguard._core.units import format_bytes
from oomguard._explore.answers import answer, controls, read_question, settings_of
from oomguard._report.estimate import to_json
from oomguard._report.subject import find_subject
from oomguard._spec.candidate import KNOBS
from oomguard._spec.read import make_spec

SETTINGS: list[dict[str, Any]] = [
    {"cell": "lstm", "seq": 10_000, "budget": "700MiB"},
    {"cell": "gru", "seq": 500, "hidden": 512, "device": "a100-80gb", "batch": 64, "vocab": 30_000, "microbatch": 16},
    {"cell": "rnn", "seq": 4000, "segments": 25, "bidirectional": True, "optimizer": "sgd", "budget": "2GiB"},
    {"cell": "lstm", "seq": 300, "window": 100, "precision": "bf16", "device": "t4", "layers": 3},
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings["cell"]))


@each_setting
def test_the_estimate_is_that_of_the_public_function(settings: dict[str, Any]) -> None:
    assert answer(settings)["estimate"] == to_json(oomguard.estimate(**settings))


@each_setting
def test_the_command_line_that_can_be_copied_prints_the_same_estimate(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(settings)
    words = shlex.split(found["copies"]["command"])
    assert run([*words[1:], "--json"]) == (not found["estimate"]["fits"])
    assert json.loads(capsys.readouterr().out) == found["estimate"]


@each_setting
def test_the_python_and_the_file_that_can_be_copied_describe_the_same(settings: dict[str, Any]) -> None:
    found = answer(settings)
    copied: oomguard.Estimate = eval(found["copies"]["python"], {"oomguard": oomguard})
    assert to_json(copied) == found["estimate"]
    assert make_spec(tomllib.loads(found["copies"]["toml"])) == read_question(settings).spec


@each_setting
def test_a_cell_of_the_region_says_what_its_estimate_says(settings: dict[str, Any]) -> None:
    region = answer(settings)["region"]
    for steps, row in zip(region["lengths"], region["cells"], strict=True):
        for rows, fits in zip(region["microbatches"], row, strict=True):
            window = settings.get("window")
            own = {**settings, "seq": steps, "microbatch": rows, "segments": 1}
            own |= {} if window is None else {"window": min(window, steps)}
            assert (fits == 2) == oomguard.estimate(**own).fits


@each_setting
def test_nothing_on_the_front_is_beaten(settings: dict[str, Any]) -> None:
    points = answer(settings)["front"]["points"]
    assert [point["peak_bytes"] for point in points] == sorted(point["peak_bytes"] for point in points)
    assert [point["speed"] for point in points] == sorted(point["speed"] for point in points)
    for point in points[:3]:
        estimate = oomguard.estimate(**settings | point["knobs"])
        assert (estimate.total_bytes, estimate.fits) == (point["peak_bytes"], True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cell": "x"}, "--model must be one of"),
        ({"cell": "lstm", "seq": 0}, "--seq must be a whole number"),
        ({"cell": "lstm", "seq": 10, "hiden": 3}, "Did you mean 'hidden'"),
        ({"cell": "lstm", "seq": 10, "microbatch": 64}, "--microbatch must not be larger"),
        ({"cell": "lstm", "seq": 10, "budget": "much"}, "much"),
        ({"cell": "lstm", "seq": 10, "device": "card of mine"}, "--device must be"),
        ({}, "model"),
    ],
)
def test_settings_that_describe_nothing_are_told_as_elsewhere(settings: dict[str, Any], words: str) -> None:
    assert words in answer(settings)["error"]


def test_an_explorer_of_a_plan_begins_with_its_candidate_and_has_its_records() -> None:
    plan = plan_of()
    subject = find_subject(measured=plan)
    settings = settings_of(subject)
    question = read_question(settings)
    assert (question.spec, question.candidate, question.budget_bytes) == (plan.spec, plan.candidate, plan.budget_bytes)
    found = answer(settings, subject.records)
    assert len(found["measured"]) == len(plan.records)
    assert not answer(settings | {"device": "t4"}, subject.records)["measured"]


def test_measured_candidates_correct_the_verdict_and_stand_in_the_chart_of_speed() -> None:
    model: dict[str, Any] = {"cell": "gru", "seq": 50, "hidden": 32, "batch": 4, "threads": 1}
    record = oomguard.probe(**model)
    subject = find_subject(**model, measured=[record], budget="1GiB")
    settings = settings_of(subject, "1GiB")
    plain, found = answer(settings), answer(settings, subject.records)
    spare_bytes = subject.budget_bytes - int(subject.predict(subject.vary()).safe_bytes.iloc[0])
    assert found["estimate"] == plain["estimate"]
    assert found["verdict"] == f"Fits with {format_bytes(spare_bytes)} to spare, by 1 probe of this model"
    (point,) = found["front"]["ran"]
    assert point["peak_bytes"] == record.peak_bytes
    assert point["speed"] <= 1


def test_a_switch_that_is_off_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"cell": "gru", "seq": 400, "segments": 4, "recompute": False, "budget": "1GiB"}
    found = answer(settings)
    assert "--no-recompute" in found["copies"]["command"]
    run([*shlex.split(found["copies"]["command"])[1:], "--json"])
    assert json.loads(capsys.readouterr().out) == found["estimate"]
    assert to_json(eval(found["copies"]["python"], {"oomguard": oomguard})) == found["estimate"]


def test_every_control_is_a_setting() -> None:
    names = [control["name"] for control in controls()]
    assert len(names) == len({*names})
    for name in names:
        assert name in {*oomguard.Spec.__struct_fields__, *KNOBS, "device", "budget"}


def test_unknown_settings_raise_where_nobody_shows_the_error() -> None:
    with pytest.raises(MisuseError):
        read_question({"cell": "lstm"})
