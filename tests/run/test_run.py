"""What `oomguard run` does for a training, and what it says about it, however the training ends."""

import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch
from run.scripts import TRAIN, command, environment, run, write

from oomguard._run.notes import CallNotes, Settings
from oomguard._run.recorder import Recorder

PYTHON = sys.executable
MIB = 1 << 20


def start(words: list[str]) -> subprocess.Popen[str]:
    """Start a command away from any terminal, which would send signals of its own."""
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )


def test_a_training_that_does_not_fit_goes_in_segments_with_the_same_losses(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    plain = subprocess.run([PYTHON, script, "4000", "3"], capture_output=True, text=True, check=True, env=environment())
    flags = ("--budget", "330MiB", "--html", str(tmp_path / "run.html"))
    ran = run(tmp_path, PYTHON, script, "4000", "3", flags=flags)
    assert ran.code == 0, ran.err
    ours, theirs = ([float(line) for line in text.splitlines()] for text in (ran.out, plain.stdout))
    assert ours == pytest.approx(theirs, rel=1e-6)
    (process,) = ran.report["processes"]
    (call,) = process["calls"]
    assert (call["where"], call["calls"], call["in_segments"], process["updates"]) == ("train.py:10", 3, 3, 3)
    assert process["base_bytes"] < process["training_bytes"] < process["base_bytes"] + call["plain_bytes"]
    assert process["recomputed_seconds"] > 0
    assert "lstm 8 → 32 × 2 layers (train.py:10)" in ran.err
    assert "3 of 3 calls" in ran.err
    page = (tmp_path / "run.html").read_text()
    assert "train.py:10" in page
    assert "<svg" in page


def test_a_training_that_fits_is_left_as_it_is_and_a_dry_run_ends_it(tmp_path: Path) -> None:
    after = "print('after the training')\n"
    ran = run(tmp_path, PYTHON, write(tmp_path, TRAIN + after), "50", "9", flags=("--dry-run", "2"))
    assert (ran.code, len(ran.out.splitlines())) == (0, 1), "the second update ends it before its loss is printed"
    (process,) = ran.report["processes"]
    assert (process["updates"], process["dry"], process["calls"][0]["in_segments"]) == (2, True, 0)
    assert ran.report["verdict"] == "FITS"
    assert "The dry run ended" in ran.err
    assert "twice the rows would need about" in ran.err


def test_calls_leave_room_for_what_comes_after_them_once_it_was_seen(tmp_path: Path) -> None:
    """An update that went over the budget by some bytes takes as many from the calls of the next one."""
    recorder = Recorder(tmp_path, Settings(budget_bytes=1 << 40))
    notes = recorder.begin("cpu")
    notes.budget_bytes = notes.now_bytes - 10 * MIB
    recorder.settings = Settings(budget_bytes=notes.budget_bytes)
    notes.calls.append(CallNotes(where="", device="cpu", cell="gru", inputs=1, hidden=1, layers=1, directions=1))
    recorder.add_update(None)
    assert notes.room_bytes == pytest.approx(10 * MIB, abs=8 * MIB)
    assert recorder.spare_bytes < -notes.room_bytes
    recorder.forget()


LARGE = """
import torch
model = torch.nn.LSTM(8, 8)
model(torch.randn(5, 1, 8))[0].sum().backward()
kept = [torch.ones(1 << 40)]
"""


@pytest.mark.parametrize("text", [LARGE, "import torch\nkept = torch.ones(1 << 40)\n"], ids=["training", "before"])
def test_a_script_that_runs_out_of_memory_has_its_summary(tmp_path: Path, text: str) -> None:
    ran = run(tmp_path, PYTHON, write(tmp_path, text))
    assert (ran.code, ran.report["verdict"]) == (1, "OOM")
    assert "DefaultCPUAllocator" in ran.report["message"]
    assert "Traceback" in ran.err
    assert "The script ran out of memory" in ran.err


LIMITED = TRAIN.replace(
    "for _ in", "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (ALLOWED, -1))\nfor _ in"
)
STATUS = "int(open('/proc/self/status').read().partition('VmData:')[2].split()[0]) * 1024"


@pytest.mark.timeout(240)
def test_a_script_that_plain_python_cannot_finish_under_a_limit_finishes(tmp_path: Path) -> None:
    """By default, the budget is what the limit leaves. With a larger one, a call is repeated when it has failed."""
    script = write(tmp_path, LIMITED.replace("ALLOWED", f"{STATUS} + {150 * MIB}"))
    words = [PYTHON, script, "8000", "1"]
    plain = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    assert plain.returncode == 1, plain.stdout
    assert "DefaultCPUAllocator" in plain.stderr
    for flags, name, retried in (((), "RLIMIT_DATA, resident", 0), (("--budget", "1TiB"), "--budget", 1)):
        ran = run(tmp_path, *words, flags=flags)
        assert ran.code == 0, ran.err
        (process,) = ran.report["processes"]
        assert (process["budget_name"], process["retried"]) == (name, retried)
        assert process["calls"][0]["in_segments"] == 1


def test_a_training_that_is_killed_has_what_it_wrote_until_then(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN + "import os, time\ntime.sleep(3)\nos.kill(os.getpid(), 9)\n")
    ran = run(tmp_path, PYTHON, script, "50", "2")
    assert (ran.code, ran.report["verdict"]) == (137, "KILLED")
    (process,) = ran.report["processes"]
    assert (process["updates"], process["ended"]) == (2, False)
    assert process["peak_bytes"] > 100 * MIB
    assert "The script was killed" in ran.err


TABULATE = """
from contextlib import suppress
with suppress(ImportError):
    import tabulate
"""
"""PyTorch would import tabulate when the script ends. What that import executes lets Python forget the interrupt."""


def test_an_interrupt_ends_script_and_summary(tmp_path: Path) -> None:
    words = command(tmp_path, PYTHON, write(tmp_path, TABULATE + TRAIN), "50", "1000000")
    with start(words) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert "KeyboardInterrupt" in err
    assert process.returncode == 130
    assert json.loads((tmp_path / "run.json").read_text())["signal"] == "SIGINT"


RANKS = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.GRU(4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.randn(40, 2, 4))[0].square().mean().backward()
    optimizer.step()
"""


@pytest.mark.timeout(240)
def test_ranks_of_torchrun_are_watched_and_end_together(tmp_path: Path) -> None:
    torchrun = str(Path(PYTHON).with_name("torchrun"))
    words = (torchrun, "--standalone", "--nproc-per-node", "2", write(tmp_path, RANKS))
    ran = run(tmp_path, *words, flags=("--budget", "1MiB", "--dry-run", "3"))
    assert ran.code == 0, ran.err
    assert [(each["rank"], each["updates"]) for each in ran.report["processes"]] == [(0, 3), (1, 3)]
    assert all(call["in_segments"] == 3 for each in ran.report["processes"] for call in each["calls"])
    assert "rank 1" in ran.err


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("keras")  # as packages look for one another
import keras
import numpy as np
model = keras.Sequential([keras.layers.LSTM(4), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
model.fit(np.zeros((8, 5, 2), "float32"), np.zeros(8), batch_size=4, epochs=50, verbose=0)
"""


def test_updates_of_keras_count(tmp_path: Path) -> None:
    ran = run(tmp_path, PYTHON, write(tmp_path, KERAS), flags=("--dry-run", "3"))
    assert ran.code == 0, ran.err
    assert [process["updates"] for process in ran.report["processes"]] == [3]


def test_an_interpreter_that_cannot_load_oomguard_is_named(tmp_path: Path) -> None:
    """An environment with a torch of its own, and nothing else that oomguard needs."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "torch.py").write_text("here = True\n")
    ran = run(tmp_path, str(python), "-c", "import torch; print(torch.here)", cwd=tmp_path)
    assert (ran.code, ran.out) == (0, "True\n")
    assert list(ran.report["unwatched"]) == [str(python)]
    said = "".join(ran.err.split())  # a long path is wrapped
    assert f"oomguard cannot be imported by {python}".replace(" ", "") in said
    assert f"{python} -m pip install oomguard".replace(" ", "") in said


def test_an_environment_without_oomguard_takes_the_one_that_runs_it(tmp_path: Path) -> None:
    """An environment with the packages of this one, but without the hooks by which this one may find oomguard."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(str(Path(torch.__file__).parents[1]))
    python = str(tmp_path / "other" / "bin" / "python")
    ran = run(tmp_path, python, write(tmp_path, TRAIN), "50", "1", flags=("--budget", "1MiB"), cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert [process["python"] for process in ran.report["processes"]] == [python]
    assert ran.report["processes"][0]["calls"][0]["in_segments"] == 1


def test_a_script_with_torch_but_without_training_leaves_no_notes(tmp_path: Path) -> None:
    text = "import sys, threading, torch\ntorch.ones(3).sum()\nprint(threading.active_count())\n"
    ran = run(tmp_path, PYTHON, write(tmp_path, text))
    assert (ran.code, ran.out, ran.report["processes"]) == (0, "1\n", [])


def test_the_end_of_oomguard_run_is_the_end_of_the_script(tmp_path: Path) -> None:
    """With SIGTERM, which batch systems send. The script may take its time; oomguard waits for it."""
    text = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), exit(9)))\n"
    text += "print('ready', flush=True)\ntime.sleep(60)\n"
    words = command(tmp_path, PYTHON, "-c", text)
    with start(words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.communicate()
    assert (process.returncode, time.monotonic() - began < 40) == (9, True)
