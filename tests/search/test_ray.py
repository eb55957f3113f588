"""Searches on a Ray cluster of two nodes, which are processes on this machine."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device.budget import Budget, Limit
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.cards import card
from oomguard._estimate.target import CPU, CUDA_HOST_BYTES, Target, on_card
from oomguard._probe.runner import Free
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

pytest.importorskip("ray", reason="ray is not installed (extra ray)")
pytestmark = [
    pytest.mark.skipif(" " in sys.executable, reason="Ray cannot start workers with a Python whose path has a space"),
    pytest.mark.timeout(300),
]
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
size = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 1 << 30}
cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
second = cluster.add_node(**size)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=True)
    sys.stdin.read()
cluster.shutdown()
"""
PLAN = "plan --on ray --model gru --hidden 32 --batch 16 --budget 900MiB --allocator tight --timeout 4min --force"


@pytest.fixture(scope="module")
def cluster() -> "Iterator[subprocess.Popen[str]]":
    """A cluster that ends with its stdin; a line there takes its second node away. Its address is in RAY_ADDRESS."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # a path of a socket has at most 107 characters
        words = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        environment = os.environ | {"RAY_TMPDIR": short}
        process: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, **words)  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, "the cluster did not start"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAY_ADDRESS", address)
                yield process
        finally:
            process.communicate(timeout=60)


def start(home: Path, line: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "oomguard", *line.split()]
    return subprocess.Popen(words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def probing() -> set[int]:
    """The processes that run probes for workers of Ray."""
    found = set()
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = " ".join(process.info["cmdline"] or [])
        if "oomguard._probe.child" in words and psutil.pid_exists(process.info["ppid"]):
            parent = psutil.Process(process.info["ppid"])
            found |= {process.pid} if " ".join(parent.cmdline()).startswith("ray::") else set()
    return found


def wait_for_probe(before: set[int]) -> None:
    deadline = time.monotonic() + 120
    while not probing() - before:
        assert time.monotonic() < deadline, "no probe begins"
        time.sleep(0.1)


def plan_in(home: Path) -> oomguard.Plan:
    plan = oomguard.load_plan(home / "plan.json")
    assert isinstance(plan, oomguard.Plan)
    return plan


@pytest.mark.usefixtures("cluster")
def test_both_nodes_run_probes_at_the_same_time(tmp_path: Path) -> None:
    process = start(tmp_path, f"{PLAN} --seq 400 --max-probes 4")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    plan = plan_in(tmp_path)
    assert 2 <= plan.probes <= 4
    assert plan.ooms == 0
    assert plan.candidate.threads == 1  # a node gives away one processor
    assert re.search("(trying|confirming|measuring) .*; (trying|confirming|measuring) ", err)


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_gives_the_best_plan_and_leaves_nothing_running(tmp_path: Path) -> None:
    before = probing()
    process = start(tmp_path, f"{PLAN} --seq 4000")
    wait_for_probe(before)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert plan_in(tmp_path).ended == "interrupted"
    deadline = time.monotonic() + 20
    while probing() - before:
        assert time.monotonic() < deadline, "a probe is left"
        time.sleep(0.1)


def test_a_node_that_is_lost_ends_nothing(cluster: "subprocess.Popen[str]", tmp_path: Path) -> None:
    before = probing()
    process = start(tmp_path, f"{PLAN} --seq 400 --max-probes 3")
    wait_for_probe(before)
    assert cluster.stdin is not None
    cluster.stdin.write("remove\n")
    cluster.stdin.flush()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "A worker of the search is lost" in err
    assert plan_in(tmp_path).probes == 3


# ---- what is asked for


def runner_of(target: Target, memory: int) -> Any:
    from oomguard._probe.ray import Place, RayDevice, RayRunner

    budget = Budget(device="cpu", limits=(Limit.read("free RAM", "a test", 8 * GIB),))
    free = Free(device_bytes=8 * GIB, host_bytes=8 * GIB, committed_bytes=None)
    own: dict[str, Any] = {"title": "a processor", "torch": "2", "precisions": ("fp32",), "driver": None}
    place = Place(**own, cores=4, target=target, budget=budget, free=free)
    node = {"NodeID": "a", "Resources": {"memory": float(memory)}}
    return RayRunner(SimpleNamespace(), node, RayDevice(name="cpu 0 of a", place=place), 1.0)


def test_a_probe_asks_for_its_threads_and_the_memory_of_its_estimate() -> None:
    spec, runner = Spec(cell="gru", seq=400, hidden=32, batch=16), runner_of(CPU, 4 * GIB)
    needs = runner._needs(spec, Candidate(microbatch=16, threads=2))
    peak_bytes = int(estimate_step(spec, Candidate(microbatch=16, threads=2)).total_bytes)
    assert needs["num_cpus"] == 2
    assert peak_bytes < needs["memory"] < 1.5 * peak_bytes
    assert runner._needs(spec, Candidate(microbatch=16))["num_cpus"] == 4


def test_what_ray_gives_away_of_a_node_limits_the_budget() -> None:
    assert runner_of(CPU, 300 * MIB).free().device_bytes == 300 * MIB


def test_on_a_card_a_probe_asks_for_a_whole_one_and_for_host_memory() -> None:
    needs = runner_of(on_card(card("t4")), GIB)._needs(Spec(cell="gru", seq=400), Candidate(microbatch=16))
    assert needs == {"num_gpus": 1, "num_cpus": 1, "memory": CUDA_HOST_BYTES}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"on": "http://host"}, "--on takes ray or the address"),
        ({"on": "ray", "device": "cpu,cuda"}, "--device is cpu or cuda"),
        ({"on": "ray", "device": "t4"}, "--device"),
    ],
    ids=str,
)
def test_what_ray_cannot_do_is_a_misuse(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(MisuseError, match=match):
        oomguard.find_feasible_config(
            cell="gru", seq=9, progress=False, device=asked.get("device", "cpu"), on=asked["on"]
        )
