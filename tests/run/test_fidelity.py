"""A script that `oomguard run` starts behaves as if its shell had started it. None of these scripts imports torch."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from run.scripts import command, environment, run, write

from oomguard._device.cpu import cores
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._run import settings
from oomguard._run.settings import RunOptions

PYTHON = sys.executable
READY = "import signal, sys, time\nprint('ready', flush=True)\n"


def test_the_exit_code_is_that_of_the_script(tmp_path: Path) -> None:
    ran = run(tmp_path, PYTHON, "-c", "raise SystemExit(7)")
    assert (ran.code, ran.out, ran.report["exit_code"], ran.report["verdict"]) == (7, "", 7, None)


def test_input_and_output_are_those_of_the_script(tmp_path: Path) -> None:
    content = bytes(range(256)) * 300
    copy = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write('own')"
    words = command(tmp_path, PYTHON, "-c", copy, flags=("--quiet",))
    done = subprocess.run(words, input=content, capture_output=True, check=True, env=environment())
    assert (done.stdout, done.stderr) == (content, b"own")


ABOUT = """
import json, os, sys
modules = sorted(sys.modules)
print(json.dumps([sys.argv, sys.path, os.getcwd(), modules, sys.flags.interactive, __name__]))
"""


@pytest.mark.parametrize(
    "words",
    [["about.py", "--epochs", "3", "--", "-x", "a b"], ["-m", "about", "--json"], ["-c", ABOUT, "--budget", "1"]],
)
def test_a_script_sees_the_arguments_paths_and_modules_that_it_would_see_alone(
    tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    write(folder, ABOUT, "about.py")
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), "relative"]))
    plain = subprocess.run([PYTHON, *words], capture_output=True, text=True, check=True, cwd=folder, env=env)
    ran = run(folder, PYTHON, *words, cwd=folder, env=env)
    ours, theirs = json.loads(ran.out), json.loads(plain.stdout)
    assert set(ours.pop(3)) - set(theirs.pop(3)) <= {"sitecustomize"}
    assert ours == theirs


def test_the_sitecustomize_of_the_user_is_loaded_too(tmp_path: Path) -> None:
    write(tmp_path, "import sys\nsys.mine = 'loaded from ' + __file__\n", "sitecustomize.py")
    ran = run(tmp_path, PYTHON, "-c", "import sys; print(sys.mine)", env=environment(PYTHONPATH=str(tmp_path)))
    assert ran.out == f"loaded from {tmp_path / 'sitecustomize.py'}\n"


def test_an_error_in_the_sitecustomize_of_the_user_is_told_as_ever(tmp_path: Path) -> None:
    write(tmp_path, "raise ValueError('mine')\n", "sitecustomize.py")
    env = environment(PYTHONPATH=str(tmp_path))
    ran = run(tmp_path, PYTHON, "-c", "print('goes on')", flags=("--quiet",), env=env)
    plain = subprocess.run([PYTHON, "-c", "print('goes on')"], capture_output=True, text=True, check=True, env=env)
    assert "ValueError: mine" in plain.stderr
    assert (ran.out, ran.err) == (plain.stdout, 2 * plain.stderr), "once by oomguard itself, a program of Python too"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_reaches_the_script_once(tmp_path: Path, name: str) -> None:
    script = "signal.signal(signal.NAME, lambda *_: print('got it', flush=True))\n".replace("NAME", name)
    script = READY.replace("print", script + "print", 1) + "time.sleep(1.5)\nsys.exit(5)\n"
    with subprocess.Popen(
        command(tmp_path, PYTHON, "-c", script),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
        assert process.stdout.read() == "got it\n"
    assert process.returncode == 5


@pytest.mark.parametrize(("name", "verdict"), [("SIGTERM", None), ("SIGKILL", "KILLED")])
def test_the_end_by_a_signal_is_told_as_a_shell_does(tmp_path: Path, name: str, verdict: str | None) -> None:
    ran = run(tmp_path, PYTHON, "-c", f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert ran.code == 128 + getattr(signal, name)
    assert (ran.report["signal"], ran.report["verdict"]) == (name, verdict)
    assert name in ran.err


TERMINAL = """
import os, signal, sys, time
print(*(os.isatty(number) for number in range(3)), flush=True)
print("read", input(), flush=True)
came = []
signal.signal(signal.SIGINT, lambda *_: came.append(time.monotonic()))
print("waiting", flush=True)
end = time.monotonic() + 60
while time.monotonic() < min([end, *(first + 1 for first in came[:1])]):
    time.sleep(0.1)
print("interrupts", len(came), flush=True)
"""


def read_until(terminal: int, text: str) -> str:
    """Read from a terminal until some text has come, or the last process on it has ended."""
    content, end = "", time.monotonic() + 60
    with suppress(OSError):  # Linux tells the end of a terminal as an error
        while text not in content and time.monotonic() < end:
            content += os.read(terminal, 4096).decode()
    return content


def test_on_a_terminal_the_script_has_the_terminal_and_one_interrupt_for_each_key(tmp_path: Path) -> None:
    words = command(tmp_path, PYTHON, "-c", TERMINAL, flags=("--quiet",))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, environment())
    try:
        assert "True True True" in read_until(terminal, "True\r\n")
        os.write(terminal, b"a line\n")
        assert "read a line" in read_until(terminal, "waiting")
        os.write(terminal, b"\x03")
        assert "interrupts 1" in read_until(terminal, "interrupts 1")
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
    assert code == 0


def test_what_the_parent_ignores_the_script_ignores(tmp_path: Path) -> None:
    words = command(tmp_path, PYTHON, "-c", "import signal; print(signal.getsignal(signal.SIGHUP).name)")
    done = subprocess.run(["nohup", *words], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.endswith("SIG_IGN\n")


@pytest.mark.parametrize("allocator", ["tight", "fast", "system"])
def test_the_script_starts_with_the_heap_that_was_chosen(tmp_path: Path, allocator: str) -> None:
    show = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('MALLOC_')}))"
    ran = run(tmp_path, PYTHON, "-c", show, flags=("--allocator", allocator))
    assert json.loads(ran.out) == ENVIRONMENT["fast native" if allocator == "fast" else allocator]
    assert f"allocator {allocator}" in ran.err


def test_heap_settings_of_the_environment_are_kept(tmp_path: Path) -> None:
    show, env = (
        "import os; print([v for v in os.environ if v.startswith('MALLOC_')])",
        environment(MALLOC_ARENA_MAX="2"),
    )
    ran = run(tmp_path, PYTHON, "-c", show, env=env)
    assert ran.out == "['MALLOC_ARENA_MAX']\n"
    assert "heap settings of the environment" in ran.err
    refused = run(tmp_path, PYTHON, "-c", show, flags=("--allocator", "tight"), env=env)
    assert (refused.code, refused.out) == (2, "")
    assert "MALLOC_ARENA_MAX" in refused.err


def test_threads_reach_the_script(tmp_path: Path) -> None:
    ran = run(tmp_path, PYTHON, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])", flags=("--threads", "3"))
    assert (ran.out, ran.report["threads"]) == ("3\n", 3)


def test_threads_are_set_where_torch_would_see_more_processors_than_the_cgroup_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in settings.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert settings.make_start([PYTHON], RunOptions()).threads == (cores() if cores() < 4 else None)
    monkeypatch.setattr(settings, "cores", lambda: 2)
    assert settings.make_start([PYTHON], RunOptions()).threads == 2
    assert settings.make_start([str(Path(PYTHON).with_name("torchrun"))], RunOptions()).threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert settings.make_start([PYTHON], RunOptions()).threads is None


def test_a_program_other_than_python_runs(tmp_path: Path) -> None:
    ran = run(tmp_path, "sh", "-c", "read line; echo got $line; exit 3", input="it\n")
    assert (ran.code, ran.out) == (3, "got it\n")
    assert "No training with PyTorch was seen" in ran.err


MISUSES = {
    "no command": ([], [], "needs a command"),
    "a command that does not exist": ([], ["no-such-program"], "'no-such-program' is not on the PATH"),
    "a file of Python": ([], ["train.py"], "oomguard run -- python train.py"),
    "a file that is no program": ([], ["./notes"], "begins with a line such as"),
    "a budget without a unit": (["--budget", "6"], ["true"], "Did you mean 6GiB?"),
    "an unknown heap": (["--allocator", "jemalloc"], ["true"], "--allocator must be one of tight, fast, system"),
    "a dry run of nothing": (["--dry-run", "0"], ["true"], "--dry-run must be a whole number from 1"),
    "a page that is no page": (["--html", "run.txt"], ["true"], "such as run.html"),
    "a flag that does not exist": (["--bugdet", "1GiB"], ["true"], "Did you mean --budget"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_told_before_anything_runs(tmp_path: Path, case: str) -> None:
    flags, words, message = MISUSES[case]
    write(tmp_path, "print('ran')")
    (tmp_path / "notes").write_text("no program")
    (tmp_path / "notes").chmod(0o755)
    ran = run(tmp_path, *words, flags=(*flags,), cwd=tmp_path)
    assert (ran.code, ran.out, ran.report) == (2, "", {})
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_report_that_exists_is_not_replaced_unless_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    words = [word for word in command(tmp_path, "true") if word != "--force"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, (tmp_path / "run.json").read_text()) == (2, "mine")
    assert "--force" in done.stderr


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_no_temporary_files_are_left(tmp_path: Path, end: str) -> None:
    (tmp_path / "tmp").mkdir()
    env = environment(TMPDIR=str(tmp_path / "tmp"))
    run(tmp_path, PYTHON, "-c", f"import os, signal; os.kill(os.getpid(), signal.{end})", env=env)
    assert not [*(tmp_path / "tmp").iterdir()]
