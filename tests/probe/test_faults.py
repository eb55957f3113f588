"""Faults, injected for real: each ends in its verdict within its time, and the next probe works."""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from probe.probing import LONG, TINY, WIDE, ends_within, is_running, meanwhile, one_thread, warm_pid

from oomguard._core.units import GIB, MIB
from oomguard._device.cpu import Cpu
from oomguard._probe.record import Answer, Request
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(timeout=60, seconds=1) as runner:
        yield runner


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(signal.SIGKILL, Verdict.KILLED), (signal.SIGSEGV, Verdict.CRASHED)],
)
def test_a_signal_in_the_middle_of_a_probe_ends_in_its_verdict(
    runner: Runner, number: signal.Signals, verdict: Verdict
) -> None:
    pid = warm_pid(runner)
    with meanwhile(lambda: os.kill(pid, number)):
        record = runner.probe(LONG, one_thread(LONG), timeout=30)
    assert record.verdict is verdict
    assert number.name in record.message
    assert record.seconds < 5
    assert record.steps == 0
    if verdict is Verdict.CRASHED:
        assert "Fatal Python error" in (record.error or "")  # by faulthandler, with the stack
    assert not psutil.pid_exists(pid)
    assert warm_pid(runner) != pid


def test_a_child_that_hangs_is_ended_at_its_time_even_if_it_does_not_read_its_request(runner: Runner) -> None:
    pid = warm_pid(runner)
    spec = msgspec.structs.replace(TINY, seq=20_000, lengths=dict.fromkeys(range(1, 20_000), 1))  # overfills the pipe
    os.kill(pid, signal.SIGSTOP)
    record = runner.probe(spec, one_thread(spec), timeout=1)
    assert record.verdict is Verdict.TIMEOUT
    assert 1 <= record.seconds < 3
    assert not psutil.pid_exists(pid)
    assert warm_pid(runner) != pid


def test_a_child_that_died_between_two_probes_is_replaced(runner: Runner) -> None:
    pid = warm_pid(runner)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # with all of its threads, but not reaped
    assert warm_pid(runner) != pid


def test_memory_that_is_really_refused_is_an_oom(runner: Runner) -> None:
    warm_pid(runner)
    enough = runner.probe(WIDE, one_thread(WIDE))
    assert enough.committed_bytes is not None
    assert enough.peak_bytes is not None
    assert enough.runtime_bytes is not None
    pid, limit_bytes = runner.pid, enough.committed_bytes - (enough.peak_bytes - enough.runtime_bytes) // 2
    record = runner.probe(WIDE, one_thread(WIDE), committed_bytes=limit_bytes)
    assert record.verdict is Verdict.OOM
    assert "allocate" in record.message
    assert record.error is not None
    assert record.committed_budget_bytes == limit_bytes
    assert runner.pid is None  # a child that ran out of memory is not used again
    assert warm_pid(runner) != pid


def test_an_inherited_rlimit_is_an_oom_too(tmp_path: Path) -> None:
    script = f"""
import resource, sys
sys.path.insert(0, {ROOT!r}); sys.path.insert(0, {ROOT + "/tests"!r})
resource.setrlimit(resource.RLIMIT_DATA, (150 << 20, resource.RLIM_INFINITY))
from oomguard._probe.runner import Runner
from probe.probing import TINY, one_thread
with Runner() as runner:
    record = runner.probe(TINY, one_thread(TINY))
print(record.verdict.name, record.committed_budget_bytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["OOM", str(150 << 20)]


def test_steps_that_peak_over_the_budget_are_over(runner: Runner) -> None:
    warm_pid(runner)
    enough = runner.probe(WIDE, one_thread(WIDE))
    assert enough.peak_bytes is not None
    assert enough.runtime_bytes is not None
    record = runner.probe(WIDE, one_thread(WIDE), budget_bytes=(enough.peak_bytes + enough.runtime_bytes) // 2)
    assert record.verdict is Verdict.OVER
    assert record.peak_bytes is not None
    assert record.peak_bytes > record.budget_bytes
    assert record.steps <= 1  # it stops as soon as it knows


def test_a_child_that_grows_over_the_budget_is_ended_at_once(runner: Runner) -> None:
    pid = warm_pid(runner)
    record = runner.probe(LONG, one_thread(LONG), budget_bytes=100 * MIB)
    assert record.verdict is Verdict.OVER
    assert record.peak_bytes is not None
    assert record.peak_bytes > 100 * MIB
    assert record.seconds < 2
    assert not psutil.pid_exists(pid)


def test_a_child_that_cannot_even_start_is_broken_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is not one')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with Runner() as runner:
        record = runner.probe(TINY, one_thread(TINY))
        assert runner.pid is None
    assert record.verdict is Verdict.BROKEN
    assert "this torch is not one" in (record.error or "")
    assert "exit code 1" in record.message


def test_ctrl_c_ends_the_child_and_goes_on_up(runner: Runner) -> None:
    pid = warm_pid(runner)
    with meanwhile(lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        runner.probe(LONG, one_thread(LONG))
    assert not psutil.pid_exists(pid)
    assert runner.pid is None


PARENT = f"""
import os, sys, threading, time
sys.path.insert(0, {ROOT!r}); sys.path.insert(0, {ROOT + "/tests"!r})
from oomguard._probe.runner import Runner
from probe.probing import LONG, one_thread, warm_pid

def probe():
    runner = Runner()
    print(warm_pid(runner), flush=True)
    if sys.argv[1] == "forked" and os.fork() == 0:  # keeps a copy of every pipe open
        os.closerange(0, 3)
        time.sleep(20)
        os._exit(0)
    runner.probe(LONG, one_thread(LONG))

if sys.argv[1] == "main":
    probe()
else:
    thread = threading.Thread(target=probe)  # the kernel cannot tell a child when a thread's process ends
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("how", ["main", "forked"])
def test_a_child_does_not_outlive_a_parent_that_is_killed(how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    forked: list[psutil.Process] = []
    while how == "forked" and not forked:
        forked = [process for process in psutil.Process(parent.pid).children() if process.pid != child]
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends_within(child, 5)
    for process in forked:
        process.kill()


def test_a_request_that_cannot_be_read_is_answered_and_the_next_one_too() -> None:
    program = f"import os, sys; sys.path.insert(0, {ROOT!r}); from oomguard._probe.child import main; "
    request = Request(spec=TINY, candidate=one_thread(TINY), device="cpu", budget_bytes=4 * GIB)
    lines = [b"not JSON", b"\xff\xfe", b'{"spec": {"cell": "tree"}}', msgspec.json.encode(request)]
    child = subprocess.Popen(
        [sys.executable, "-c", program + "main(os.getppid(), True)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | Cpu().environment(request.candidate, request.engine),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"\n".join(lines) + b"\n")
    child.stdin.flush()
    answers = [msgspec.json.decode(child.stdout.readline(), type=Answer) for _ in lines]
    assert [answer.verdict for answer in answers] == [Verdict.BROKEN] * 3 + [Verdict.FITS]
    assert all("Traceback" in (answer.error or "") for answer in answers[:3])
    assert answers[3].fresh
    child.stdin.close()
    assert child.wait(5) == 0  # it ends with its input
    assert select.select([child.stdout], [], [], 0)[0]
    assert child.stdout.read() == b""
    child.stdout.close()


def test_a_child_that_cannot_be_started_at_all_is_a_record_too(runner: Runner) -> None:
    runner.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # it is a limit of numbers, not of how many are open: there may be gaps above
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        record = runner.probe(TINY, one_thread(TINY))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert record.verdict is Verdict.BROKEN
    assert "Too many open files" in record.message
    warm_pid(runner)


def test_a_child_that_talks_for_ever_does_not_fill_the_disk(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import sys\nwhile True: sys.stderr.write('word ' * 100_000)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner.close()
    seen, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            with contextlib.suppress(OSError):  # it has not begun, or has ended
                seen.append(said_bytes(runner))

    watch = threading.Thread(target=look)
    watch.start()
    record = runner.probe(TINY, one_thread(TINY), timeout=5)
    ended.set()
    watch.join()
    assert record.verdict is Verdict.TIMEOUT
    assert 0 < max(seen) < 200 * MIB
    monkeypatch.undo()
    warm_pid(runner)


def said_bytes(runner: Runner) -> int:
    """What the child's words take on the disk."""
    return os.stat(f"/proc/{runner.pid}/fd/2").st_blocks * 512


def test_a_budget_in_which_nothing_fits_says_so(runner: Runner) -> None:
    record = runner.probe(TINY, one_thread(TINY), budget_bytes=MIB)
    assert record.verdict is Verdict.OVER
    assert "Python and torch alone need about" in record.message
