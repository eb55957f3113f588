"""Child processes that run this package."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard._core.errors import MisuseError
from oomguard._core.system import Elsewhere, command, run_elsewhere, thread_variables


def test_a_child_has_this_package() -> None:
    done = subprocess.run(command("print(oomguard.__name__)"), capture_output=True, text=True, check=True)
    assert done.stdout == "oomguard\n"


def test_a_function_that_runs_in_a_child_returns_its_result() -> None:
    assert run_elsewhere("math", "sqrt", 16.0) == 4.0


def test_a_function_that_fails_in_a_child_raises_its_error_here() -> None:
    with pytest.raises(MisuseError, match="Write it as 6GiB"):
        run_elsewhere("oomguard._core.units", "parse_bytes", "2000000TiB")


def test_threads_that_wait_sleep_where_others_keep_all_cores_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.1 * cores, 0.0, 0.0))  # such as a training of this user alone
    assert thread_variables() == {}
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * cores, 0.0, 0.0))
    assert run_elsewhere("os", "getenv", "OMP_WAIT_POLICY") == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert run_elsewhere("os", "getenv", "OMP_WAIT_POLICY") == "active"


def test_one_child_answers_several_calls() -> None:
    with Elsewhere() as child:
        pids = {child.call("os", "getpid") for _ in range(2)}
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_a_call_that_takes_too_long_ends_its_child() -> None:
    with Elsewhere() as child, pytest.raises(TimeoutError, match=r"time\.sleep took more than 0\.5 seconds"):
        child.call("time", "sleep", 60.0, seconds=0.5)


def test_a_child_that_ends_early_is_an_error() -> None:
    with Elsewhere() as child, pytest.raises(ChildProcessError, match="ended with exit code 7"):
        child.call("os", "_exit", 7)


def test_code_that_reads_from_the_terminal_takes_no_calls() -> None:
    with Elsewhere() as child:
        assert child.call("os", "read", 0, 10) == b""
        assert child.call("math", "sqrt", 16.0) == 4.0


PARENT = """
from oomguard._core.system import Elsewhere
with Elsewhere() as child:
    print(child.call("os", "getpid"), flush=True)
    child.call("time", "sleep", 60.0)
"""


def test_a_child_at_work_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        status = Path(f"/proc/{int(parent.stdout.readline())}/status")
        assert status.exists()
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()
