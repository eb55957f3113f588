"""A named pipe without a writer, or a device, in the place of a file is refused at once, and stays as it is."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import numbers, plan_of

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.system import read_lines, replace_content
from oomguard._spec.read import load_fields
from oomguard._train.checkpoint import CHECKSUMS, load

READERS: dict[str, Callable[[Path], object]] = {
    "plan": oomguard.load_plan,
    "spec": load_fields,
    "lines": read_lines,
    "data": lambda pipe: oomguard.train(plan_of(), pipe, run=str(pipe.parent / "run")),
    "replaced": lambda pipe: replace_content(pipe, b""),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    with pytest.raises((MisuseError, OSError), match="it is a pipe or a device, not a file"):
        READERS[name](pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="it is a pipe or a device, not a file"):
        oomguard.save_plan(plan_of(), "/dev/null")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", [CHECKSUMS, "facts.json", "tensors.safetensors"])
def test_a_pipe_in_a_checkpoint_leads_to_the_checkpoint_before_it(tmp_path: Path, name: str) -> None:
    oomguard.train(plan_of(), numbers(), run=str(tmp_path), validation=0, steps=2, save_every="1")
    newest, before = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)[:2]
    (newest / name).unlink()
    os.mkfifo(newest / name)
    with pytest.warns(UserWarning, match="it is a pipe or a device"):
        checkpoint = load(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert Path(checkpoint.directory) == before
