"""The examples of own models: at most five lines differ from plain PyTorch, the losses are the same, the peak falls."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard._estimate.malloc import ENVIRONMENT

FOLDER = Path(__file__).parents[1] / "examples"
LARGER = {
    "language_model": "--window 500 --words 5000 --updates 1 --segments 10 --chunks 10",
    "tagger": "--longest 300 --rows 64 --budget {base}",
    "speech": "--longest 6000 --hidden 64 --budget {base}",
    "translation": "--steps 200 --updates 1 --segments 14",
    "hand_loop": "--steps 1500 --sensors 48 --rows 48 --epochs 2 --budget {base}",
    "forecast": "--hours 2000 --hidden 64 --updates 1 --segments 20",
    "lightning_callback": "--steps 1000 --rows 64 --hidden 48 --epochs 2 --budget {base}",
    "skorch_callback": "--steps 1000 --rows 64 --hidden 48 --epochs 2 --budget {base}",
    "keras_fit": "--steps 50 --rows 320 --hidden 64 --epochs 1 --segments 5",
    "optuna_study": "--longest 12000 --trials 2 --budget 650MiB",
}
"""The flags with which an example needs more memory than its default, and saves much of it."""
GROWTH_BYTES = 60 << 20  # what a budget of an example allows beside the bytes of the process
CHILD = """
import json, runpy, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
module = runpy.run_path(sys.argv[1])
def peak():  # of this process alone: the peak that getrusage tells may be that of the process which started it
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
module["main"]([])
before = peak()
words = [str(before + int(sys.argv[2])) if word == "{base}" else word for word in sys.argv[3:]]
print(json.dumps([module["main"](words), peak() - before]))
"""


def plain(source: str) -> str:
    """An example without its lines of oomguard, and with the lines that they replaced."""
    lines = [line for line in source.splitlines() if not line.endswith("# oomguard")]
    return "\n".join(re.sub(r"# plain: ", "", line) for line in lines) + "\n"


def run(name: str, folder: Path, words: str = "", *, plainly: bool = False) -> tuple[list[float], int]:
    """The losses of an example, and by how many bytes its peak grows over that with the default flags."""
    script = folder / f"{name}.py"
    source = (FOLDER / script.name).read_text()
    script.write_text(plain(source) if plainly else source)
    command = [sys.executable, "-c", CHILD, str(script), str(GROWTH_BYTES), *shlex.split(words)]
    environment = os.environ | ENVIRONMENT["tight"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    losses, growth_bytes = json.loads(done.stdout.splitlines()[-1])
    return losses, growth_bytes


@pytest.mark.parametrize("name", LARGER)
def test_an_example_is_a_plain_script_with_at_most_five_lines_changed(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert 2 <= sum(line.endswith("# oomguard") for line in source.splitlines()) <= 5
    docstring, code = plain(source).split('"""\n', 1)
    assert "oomguard" not in code
    compile(docstring + '"""\n' + code, name, "exec")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGER)
def test_an_example_has_the_losses_of_the_plain_script_with_less_memory(name: str, tmp_path: Path) -> None:
    flags = LARGER[name]
    ours, ours_bytes = run(name, tmp_path, flags)
    theirs, theirs_bytes = run(name, tmp_path, flags, plainly=True)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours[-1] < ours[0] or len(ours) == 1
    assert ours_bytes < 0.7 * theirs_bytes, (ours_bytes >> 20, theirs_bytes >> 20)


@pytest.mark.timeout(600)
def test_the_plan_of_an_example_trains_it(tmp_path: Path) -> None:
    script = (FOLDER / "tagger.py").read_text()
    (tmp_path / "tagger.py").write_text(script)
    for name, words in (("oomguard", "plan --model tagger:task --threads 1"), ("tagger", "--plan plan.json")):
        command = [sys.executable, "-m", name, *shlex.split(words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4
