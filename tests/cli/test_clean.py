"""`oomguard clean` removes what oomguard has stored or left, and nothing of anybody else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomguard._cli.app import run
from oomguard._core.system import new_temporary
from oomguard._data.source import cached
from oomguard._train.leftovers import IDLE_SECONDS

CALIBRATION = "14a4c0db10a524de-lstm-onednn-fp32-onednn-3.12.0.jsonl"
OLD = time.time() - IDLE_SECONDS - 60


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to clean, with a temporary folder and a cache of its own."""
    monkeypatch.setenv("OOMGUARD_CACHE", str(tmp_path / "cache"))
    for name in ("cache", "tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def make(path: Path, changed: float | None = None) -> Path:
    """Make a folder with a file in it, as old as is said."""
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"12345")
    for each in (path / "file", path):
        if changed is not None:
            os.utime(each, (changed, changed))
    return path


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def converted(folder: Path) -> Path:
    """Convert a file once, as tables and text are."""
    (folder / "sales.csv").write_text("a\n1\n")
    return cached(folder / "sales.csv", None, {}, lambda target: {"rows": 1})[0]


def paths(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The kind of each path that the command lists."""
    assert run(["clean", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == sum(leftover["bytes"] for leftover in document["leftovers"])
    return {str(Path(leftover["path"]).absolute()): leftover["kind"] for leftover in document["leftovers"]}


def test_everything_that_oomguard_leaves_is_listed_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        str(converted(home / "work")): "converted data",
        str(make(home / "tmp" / f"oomguard-{ended_process()}-ab12")): "temporary files",
        str(make(home / "work" / ".x1y2.oomguard", OLD)): "unfinished conversion",
        str(make(home / "work/runs/a/checkpoints/.unfinished-step-00000003-save-0001", OLD)): "unfinished checkpoint",
    }
    (home / "cache" / CALIBRATION).write_text("{}\n")
    wanted[str(home / "cache" / CALIBRATION)] = "calibration"
    assert paths(capsys) == wanted
    assert all(Path(path).exists() for path in wanted), "it only lists"
    assert run(["clean", "--yes"]) == 0
    assert "Removed 5 items" in capsys.readouterr().out
    assert not any(Path(path).exists() for path in wanted)
    assert (home / "work" / "sales.csv").exists()
    assert paths(capsys) == {}


def test_nothing_of_anybody_else_is_touched(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home / "work" / "sales.csv.0123456789abcdef.oomguard", OLD)  # without about.json
    make(home / "work" / ".unfinished-mine", OLD)  # not in a folder of checkpoints
    make(home / "tmp" / "pymp-ab12", OLD)
    make(home / "tmp" / "oomguard-notes", OLD)
    (home / "cache" / "notes.jsonl").write_text("mine")
    (home / "tmp" / f"oomguard-{ended_process()}-ab12").write_text("a file")
    assert paths(capsys) == {}
    assert run(["clean", "--yes"]) == 0
    assert "There is nothing to remove." in capsys.readouterr().out


def test_what_is_being_written_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_temporary()  # of this process, which is running
    make(home / "work" / ".x1y2.oomguard")
    make(home / "work" / "run" / "best" / ".unfinished-step-00000003-save-0001")
    assert paths(capsys) == {}


def test_a_link_is_not_followed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = converted(home / "tmp")
    (home / "work" / target.name).symlink_to(target)
    assert paths(capsys) == {}


def test_temporary_files_in_the_folder_of_cache_are_found_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = make(home / "work" / f"oomguard-{ended_process()}-ab12")
    assert paths(capsys, str(home / "work")) == {str(left): "temporary files"}


def test_a_folder_that_is_not_there_is_misuse(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", "nowhere"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


KILLS = """
import numpy as np, os, psutil, sys
from oomguard._data.loader import Loader
from oomguard._data.open import open_data
from oomguard._data.options import DataOptions
from oomguard._spec.spec import Spec

spec = Spec(cell="gru", seq=5, features=2, hidden=2, batch=2)
data = open_data(np.zeros((64, 5, 3), np.float32), spec, DataOptions(validation=0.0))
loader = Loader(source=data.train, spec=spec, buckets={5: 1}, workers=2)
for number, batch in enumerate(loader.batches()):
    for _ in batch.microbatches():
        pass
    if number == 3:
        [child.kill() for child in psutil.Process().children()] if sys.argv[2] == "workers" else psutil.Process().kill()
print(batch.lost is not None, len(os.listdir(sys.argv[1])))
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short path: that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_workers_that_are_killed_leave_nothing_behind(short: Path) -> None:
    """Sockets are in the folder of the process that started the workers, which outlives them."""
    environment = os.environ | {"TMPDIR": str(short)}
    words = [sys.executable, "-c", KILLS, str(short), "workers"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True 1\n", done.stderr
    assert [path.name for path in short.iterdir()] == []


def test_workers_remove_the_folder_of_a_process_that_was_killed(short: Path) -> None:
    words = [sys.executable, "-c", KILLS, str(short), "itself"]
    # the pipe of its output ends when the last worker has ended
    done = subprocess.run(words, env=os.environ | {"TMPDIR": str(short)}, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in short.iterdir()] == []


def test_pairs_and_tables_in_memory_are_in_folders_with_the_number_of_the_process(tmp_path: Path) -> None:
    call = "from oomguard._core.system import process_directory as d; print(d() == d(), d().name)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", call], env=environment, stdout=subprocess.PIPE, text=True)
    same, name = process.communicate()[0].split()
    assert same == "True"
    assert name.startswith(f"oomguard-{process.pid}-")
    assert not (tmp_path / name).exists()
