"""What users rely on stays: flags, JSON keys, exit codes, files and public names, and what oomguard 0.1.0 wrote.

An addition passes; a change or a removal fails. If a change is meant, it needs a line in CHANGELOG.md; the golden files
in tests/surface/ are then written again by `python tests/surface/freeze.py`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surface import freeze
from surface.freeze import HERE, PLANS, RECORDS, RUN, RUN_DATA, Session, adopt, golden, write_tokens, write_waves

import oomguard
from oomguard._spec.candidate import renew

pytestmark = pytest.mark.timeout(300)  # the session alone takes half a minute, and more beside other tests
MEANT = "\nIf this is meant: add a line to CHANGELOG.md, then run python tests/surface/freeze.py"
MAY_BE_NULL = {
    "note",  # devices: why there is no card
    "committed_bytes",  # a number where the system limits what is committed
    "committed_budget_bytes",
    "library",
    "window",  # knobs that a candidate may leave to the device
    "engine",
    "allocator",
    "threads",
}
"""Keys that are null on some machines or in some plans and not in others, whatever the golden files have."""
REFUSING = ("integer", "number", "size", "duration", "integer or duration", "choice", "device", "histogram", "values")
"""Types of flags that do not take any text."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(tmp_path_factory.mktemp("surface"))


def lost(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """What of a golden value the present one does not have."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            place = f"{where} > {key}".removeprefix(" > ")
            if key not in now:
                yield f"{place} is gone"
            elif key == "positional":
                if now[key][: len(value)] != value:
                    yield f"{place} was {value}, and is {now[key]}"
            else:
                yield from lost(value, now[key], place)
    elif isinstance(before, list) and isinstance(now, list):
        kept = [any(not [*lost(value, each)] for each in now) for value in before]
        yield from (f"{where} had {value!r}" for value, is_kept in zip(before, kept, strict=True) if not is_kept)
    elif before != now:
        yield f"{where} was {before!r}, and is {now!r}"


def lost_paths(before: dict[str, str], now: dict[str, str], where: str) -> Iterator[str]:
    """What of the golden paths of a JSON document the present one does not have."""
    for path, kinds in before.items():
        known = {*kinds.split("|")} - {"null"}
        if path not in now:
            yield f"{where} > {path} is gone"
            continue
        present = {*now[path].split("|")}
        if known and not present - {"null"} <= known:
            yield f"{where} > {path} was {kinds}, and is {now[path]}"
        key = path.rpartition(".")[2].rstrip("[]")
        if "null" in present and "null" not in kinds.split("|") and key not in MAY_BE_NULL:
            yield f"{where} > {path} was {kinds}, and is {now[path]}"


def check(messages: Iterator[str]) -> None:
    differences = [*messages]
    assert not differences, "\n".join(differences) + MEANT


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_every_command_has_its_flags_and_arguments() -> None:
    before, now = golden("flags"), freeze.flags()
    check(lost(before, now))
    for name, command in before.items():
        assert now[name]["arguments"][: len(command["arguments"])] == command["arguments"], name
        assert not any(added["required"] for added in now[name]["arguments"][len(command["arguments"]) :]), name


STARTS = {
    "train": "train {unlimited} --data {data} --run {home}/refused",
    "predict": "predict {run} --data {data}",
    "resume": "resume {run} --data {data}",
    "export": "export {run}",
    "shrink": "shrink {run}",
    "show": "show {plan}",
    "run": "run",
    "check": "check {plan}",
    "fleet": "fleet {jobs} --cards {cards}",
    "work": "work --storage sqlite:///{ledger}/study.db",
}


def test_flags_of_a_type_refuse_other_text(session: Session) -> None:
    """Each flag once, in the first command that has it: a flag is the same wherever it occurs."""
    first: dict[str, str] = {}
    for command, parameters in golden("flags").items():
        for flag, facts in parameters["flags"].items():
            if facts["type"] in REFUSING:
                first.setdefault(f"{flag} {facts['type']}", command)
    assert len(first) > 40
    for flag, command in ((key.split()[0], command) for key, command in first.items()):
        line = STARTS.get(command, f"{command} --model lstm --seq 100")
        ran = session(f"{line.replace(f' {flag} lstm', '').replace(f' {flag} 100', '')} {flag} no-such-value")
        assert (ran.code, ran.out) == (2, ""), f"{command} {flag} takes any text{MEANT}"
        assert flag in ran.err or "no-such-value" in ran.err, ran.err


WITH_CHOICES = [flag for flag, facts in golden("flags")["estimate"]["flags"].items() if "choices" in facts]
NEEDED = {
    "--nonlinearity": "--model rnn",
    "--loss cross-entropy": "--model lstm --vocab 9",
    "--engine onednn": "--model lstm",
    "--engine native": "--model gru",
    "--allocator tight": "--model lstm",
    "--allocator fast": "--model lstm",
    "--model": "",
    "--preset": "",
}
"""What a choice needs beside it. Others are taken for an lstm on a card."""


@pytest.mark.parametrize("flag", WITH_CHOICES)
def test_every_choice_of_a_flag_is_taken(flag: str) -> None:
    for choice in golden("flags")["estimate"]["flags"][flag]["choices"]:
        given = f"{flag} {choice}"
        needed = NEEDED.get(given, NEEDED.get(flag, "--model lstm --device t4"))
        ran = freeze.run(f"estimate --seq 9 {needed} {given}")
        assert ran.code in (0, 1), ran.err


# ---- documents, exit codes, files, names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(golden("json_keys")))
def test_a_json_document_has_its_keys(name: str, session: Session) -> None:
    check(lost_paths(golden("json_keys")[name], freeze.paths(session.document(name)), name))


def test_the_cards_are_known_by_their_names(session: Session) -> None:
    names = [card["name"] for card in session.document("devices --cards")["cards"]]
    check(lost(golden("cards"), names, "devices --cards"))


def test_files_have_their_names_and_columns(session: Session) -> None:
    before, now = golden("files"), freeze.files(session)
    for name, value in before.items():
        check(lost_paths(value, now[name], name) if isinstance(value, dict) else lost(value, now[name], name))


def test_public_names_keep_their_signatures_and_members(session: Session) -> None:
    before, now = golden("names"), freeze.names(session.home)
    check(lost(before, now))
    check(required(before, now))


def required(before: dict[str, Any], now: dict[str, Any], where: str = "") -> Iterator[str]:
    """Parameters that are new and have no default: whoever called without them no longer can."""
    for key, value in before.items():
        if key == "parameters":
            added = [name for name in now[key] if name not in value]
            yield from (f"{where} > {name} is new and has no default" for name in added if not now[key][name])
        elif isinstance(value, dict):
            yield from required(value, now[key], f"{where} > {key}".removeprefix(" > "))


def test_command_lines_keep_their_exit_codes(session: Session) -> None:
    freeze.small_training(session.home / "exit")
    check(lost(golden("exit_codes"), freeze.exit_codes(session)))


# ---- what 0.1.0 wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_0_1_is_read_and_explained(name: str, tmp_path: Path) -> None:
    plan = oomguard.load_plan(HERE / name)
    before = json.loads((HERE / name).read_text())
    check(lost_values(renewed(before), plan.to_dict()))
    shown = freeze.run("show {plan}", plan=HERE / name)
    assert shown.code == 0, shown.err
    assert "Fallbacks" in shown.out
    page = freeze.run("show {plan} --html {page}", plan=HERE / name, page=tmp_path / "page.html")
    assert page.code == 0, page.err
    assert "</html>" in (tmp_path / "page.html").read_text()
    table = freeze.run("tradeoffs --plan {plan} --json", plan=HERE / name)
    assert table.code == 0, table.err
    assert table.document["calibrated"]
    assert table.document["spec"] == before["spec"]


def renewed(value: Any) -> Any:
    """The JSON of an old plan with the present names of allocators."""
    if isinstance(value, dict):
        return {name: renew(name, renewed(item)) for name, item in value.items()}
    return [*map(renewed, value)] if isinstance(value, list) else value


def lost_values(before: Any, now: Any) -> Iterator[str]:
    """What of the JSON of an old plan is read otherwise than it was written."""
    return lost(before, json.loads(json.dumps(now)))


def test_a_plan_of_0_1_is_trained_by_the_command(session: Session) -> None:
    """In a process of its own, which starts again with the variables that the plan exports."""
    lines = session.ran["train"].err.splitlines()
    assert lines[0] == "Starting again with the heap settings of the plan"
    assert not [line for line in lines if line.startswith("oomguard:")]  # no warning
    assert oomguard.load_plan(session.unlimited).exports
    result = session.document("train")
    assert (result["steps"], result["ended"]) == (2, "done")


def test_a_plan_of_0_1_with_lengths_is_trained(tmp_path: Path) -> None:
    plan = adopt(HERE / PLANS[1], tmp_path / "plan.json", limited=False)
    data = write_tokens(tmp_path / "tokens.csv")
    line = "train {plan} --data {data} --columns token --id series --steps 2 --run {run} --json"
    result = freeze.run(line, plan=plan, data=data, run=tmp_path / "run").document
    assert (result["steps"], result["ended"]) == (2, "done")


def test_a_ledger_of_0_1_is_read_and_continued(session: Session) -> None:
    old = [json.loads(line) for line in (HERE / RECORDS).read_text().splitlines()]
    records = oomguard.Ledger(HERE / RECORDS).read()
    assert [(record.verdict.name, record.peak_bytes) for record in records] == [
        (r["verdict"], r["peak_bytes"]) for r in old
    ]
    known = [record["started"] for record in session.document("plan")["records"]]
    assert known[: len(old)] == [record["started"] for record in old]
    assert len(session.ledger.joinpath("records.jsonl").read_text().splitlines()) > len(old)
    table = session(f"tradeoffs {freeze.TINY} --ledger {{ledger}} --json").document
    assert table["calibrated"]
    assert any(row["measured_peak_bytes"] for row in table["rows"])


def test_a_run_of_0_1_was_resumed(session: Session) -> None:
    result = session.document("train --resume")
    assert (result["steps"], result["ended"]) == (4, "done")
    rows = (session.resumed / "metrics.csv").read_text().splitlines()
    assert rows[:4] == (HERE / RUN / "metrics.csv").read_text().splitlines()
    assert len(rows) == 5


def test_a_run_of_0_1_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(HERE / RUN, tmp_path / RUN)
    write_waves(tmp_path / RUN_DATA)
    monkeypatch.chdir(tmp_path)
    ran = freeze.run(f"predict {RUN} --data {RUN_DATA} --output p.npy")
    assert (ran.code, ran.out) == (0, "p.npy\n"), ran.err
    assert np.load("p.npy").shape == (20, 40, 1)
    assert np.isfinite(np.load("p.npy")).all()
