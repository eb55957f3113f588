"""optuna-dashboard shows the study that a search leaves in its ledger: asked over HTTP, as a browser would."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oomguard

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (the extra dashboard)")
PATIENCE_SECONDS = 60


def asked(address: str) -> Any:
    """The JSON behind an address, once somebody listens there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def plan(ledger: Path) -> oomguard.Plan:
    """What a small search found that has ended."""
    spec = oomguard.Spec(cell="gru", seq=30, features=4, hidden=8, batch=4)
    fixed: dict[str, Any] = {"threads": 1, "allocator": "tight"}
    return oomguard.find_feasible_config(spec, allow="none", max_probes=2, ledger=str(ledger), **fixed)


@pytest.fixture(scope="module")
def dashboard(ledger: Path, plan: oomguard.Plan) -> Iterator[str]:
    """The address of a dashboard of that ledger, on a port that was free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("optuna-dashboard"))
    words = [program, f"sqlite:///{ledger}/study.db", "--port", str(port), "--server", "wsgiref", "--quiet"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_it_shows_the_study_and_a_trial_for_every_probe(dashboard: str, plan: oomguard.Plan) -> None:
    studies = asked(f"{dashboard}/api/studies")["study_summaries"]
    assert [one["directions"] for one in studies] == [["maximize"]]
    study = asked(f"{dashboard}/api/studies/{studies[0]['study_id']}")
    assert study["name"].startswith("gru-30-")
    assert [trial["state"] for trial in study["trials"]] == ["Complete"] * plan.probes


def test_a_trial_has_the_knobs_and_what_came_of_them(dashboard: str, plan: oomguard.Plan) -> None:
    study = asked(f"{dashboard}/api/studies")["study_summaries"][0]["study_id"]
    trials = asked(f"{dashboard}/api/studies/{study}")["trials"]
    for trial, record in zip(trials, plan.records, strict=True):
        knobs = {one["name"]: one["param_external_value"] for one in trial["params"]}
        assert knobs["microbatch"] == str(record.candidate.microbatch)
        assert knobs["segments"] == str(record.candidate.segments)
        assert record.verdict.name in json.dumps(trial["user_attrs"])
        assert trial["values"][0] > 0
