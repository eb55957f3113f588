"""Checkpoints survive a kill at any system call, a failing disk and damaged bytes."""

import errno
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import numbers, plan_of
from trainings import load_newest, new_training

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._step import Training
from oomguard._train.checkpoint import TrainState, checksum_of, load, save

FILES = ("tensors.safetensors", "facts.json", "checksums.json")


def save_two(directory: Path) -> list[Path]:
    return [save(directory, new_training(), TrainState(step=number)) for number in (1, 2)]


def flip_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << (place % 8)
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected_anywhere(tmp_path: Path, name: str) -> None:
    first, second = save_two(tmp_path)
    size = (second / name).stat().st_size
    for place in range(0, size, 1 + size // 100):
        flip_bit(second / name, place)
        with pytest.warns(UserWarning, match="step-00000002"):
            checkpoint = load_newest(tmp_path)
        assert Path(checkpoint.directory) == first
        flip_bit(second / name, place)
    assert Path(load_newest(tmp_path).directory) == second


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file_is_detected(tmp_path: Path, name: str, kept: int) -> None:
    first, second = save_two(tmp_path)
    (second / name).write_bytes((second / name).read_bytes()[:kept])
    with pytest.warns(UserWarning, match=r"save-0002/(facts|tensors|checksums)\..*Looking for an older"):
        checkpoint = load_newest(tmp_path)
    assert Path(checkpoint.directory) == first


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_in_the_warning(tmp_path: Path, name: str) -> None:
    first, second = save_two(tmp_path)
    (second / name).unlink()
    with pytest.warns(UserWarning, match=rf"{name}: it cannot be read \(No such file"):
        checkpoint = load_newest(tmp_path)
    assert Path(checkpoint.directory) == first


def test_another_format_version_is_named_in_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    monkeypatch.setattr("oomguard._train.checkpoint.VERSION", 2)
    path = save(tmp_path, new_training(), TrainState(step=2))
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=rf"{path.name}/facts\.json: its format is version 2"):
        assert load_newest(tmp_path).step == 1


def test_it_is_an_error_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for path in save_two(tmp_path):
        flip_bit(path / "tensors.safetensors", 1000)
    with pytest.warns(UserWarning, match="checksum"), pytest.raises(MisuseError, match=r"all 2 in .* are damaged"):
        load(tmp_path)


def test_a_damaged_checkpoint_does_not_stop_the_next_save(tmp_path: Path) -> None:
    _, second = save_two(tmp_path)
    flip_bit(second / "tensors.safetensors", 1000)
    third = save(tmp_path, new_training(), TrainState(step=2))
    assert Path(load_newest(tmp_path).directory) == third


forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
"""Newer versions of Python warn about a fork in a process with threads. The child here waits for none of them."""

CALLS = ("open", "write", "fsync", "close", "mkdir", "replace", "unlink", "rmdir")
"""The system calls that change the disk or synchronise it."""


def interrupt_call(monkeypatch: pytest.MonkeyPatch, at: int, stop: Callable[[], None]) -> list[str]:
    """Call `stop` in the at-th of those calls, after half of its bytes were written. Returns the list of calls."""
    calls_made: list[str] = []

    def patched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            calls_made.append(name)
            if len(calls_made) == at + 1:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                stop()
            return real(*args, **more)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, patched(name))
    return calls_made


def calls_of_save(directory: Path, training: Training) -> list[str]:
    """The system calls of one more save."""
    with pytest.MonkeyPatch.context() as patch:
        calls_made = interrupt_call(patch, 10**9, lambda: None)
        save(directory, training, TrainState(step=3), keep=2)
    return calls_made


def steps_saved_before_kill(directory: Path, training: Training, at: int, steps: range = range(3, 4)) -> list[int]:
    """The steps that a process had saved when it was killed at the at-th system call."""
    reading, writing = os.pipe()
    real_write, child = os.write, os.fork()
    if not child:
        try:
            interrupt_call(pytest.MonkeyPatch(), at, lambda: os._exit(0))
            for number in steps:
                save(directory, training, TrainState(step=number), keep=2)
                real_write(writing, bytes([number]))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        return [*pipe.read()]


@forks
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    training, saved = new_training(), tmp_path / "saved"
    for number in (1, 2):
        save(saved, training, TrainState(step=number), keep=2)
    calls = len(calls_of_save(shutil.copytree(saved, tmp_path / "counted"), training))
    steps, left = [], 0
    for at in range(calls + 1):
        here = shutil.copytree(saved, tmp_path / str(at))
        assert steps_saved_before_kill(here, training, at) == ([] if at < calls else [3])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # half a checkpoint never has a checkpoint's name
            steps.append(load_newest(here).step)
        left += any(path.name.startswith(".") for path in here.iterdir())
        save(here, training, TrainState(step=4), keep=2)
        assert load_newest(here).step == 4
        assert len(list(here.iterdir())) == 2  # leftovers of the kill are removed
    assert steps == sorted(steps)
    assert {*steps} == {2, 3}
    assert left > calls // 2


@forks
def test_a_kill_in_the_first_save_leaves_no_checkpoint_or_a_complete_one(tmp_path: Path) -> None:
    training, checkpoints = new_training(), []
    for at in range(len(calls_of_save(tmp_path / "counted", training))):
        assert steps_saved_before_kill(tmp_path / str(at), training, at) == []
        checkpoints.append(load(tmp_path / str(at)))
        save(tmp_path / str(at), training, TrainState(step=4))
        assert load_newest(tmp_path / str(at)).step == 4
    assert [checkpoint is not None for checkpoint in checkpoints] == sorted(
        checkpoint is not None for checkpoint in checkpoints
    )


@forks
def test_a_random_kill_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    training, chosen = new_training(), random.Random(5)
    first = len(calls_of_save(tmp_path / "counted", training))
    for number in range(20):
        here = tmp_path / str(number)
        done = steps_saved_before_kill(here, training, chosen.randrange(first, 6 * first), range(1, 9))
        assert load_newest(here).step in (done[-1], done[-1] + 1)


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    calls_made = [name for name in calls_of_save(tmp_path, new_training()) if name in ("write", "fsync", "replace")]
    text = " ".join(calls_made).replace("write " * (calls_made.index("fsync") - 1), "")
    assert text == "write fsync write fsync write fsync fsync replace fsync"  # 3 files, the directory, its name, home


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failing_disk_is_an_error_and_older_checkpoints_stay_intact(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    training, saved = new_training(), tmp_path / "saved"
    save(saved, training, TrainState(step=1))
    for at in range(calls_of_save(shutil.copytree(saved, tmp_path / "counted"), training).index("replace")):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_call(patch, at, fail)
            with pytest.raises(MisuseError, match=os.strerror(code)):
                save(saved, training, TrainState(step=2))
        assert load_newest(saved).step == 1
        assert len(list(saved.iterdir())) == 1


def test_the_error_on_a_full_disk_names_the_space_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(MisuseError, match=r"No space left.*with \d.*KiB free"):
        save(tmp_path, new_training(), TrainState(step=1))


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    training, saved = new_training(), tmp_path / "saved"
    for number in (1, 2):
        save(saved, training, TrainState(step=number))
    calls = calls_of_save(shutil.copytree(saved, tmp_path / "counted"), training)
    interrupt_call(monkeypatch, len(calls) - 1 - calls[::-1].index("replace"), fail)
    with pytest.warns(UserWarning, match="save-0001: an old checkpoint could not be removed"):
        save(saved, training, TrainState(step=3), keep=2)
    assert load_newest(saved).step == 3


@pytest.mark.parametrize("directory", ["/proc/nobody/writes/here", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_an_error(directory: str) -> None:
    with pytest.raises(MisuseError, match="cannot be"):
        save(directory, new_training(), TrainState(step=1))


def test_a_file_instead_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match="Not a directory"):
        load(tmp_path / "file")


def test_a_checkpoint_removed_while_it_is_read_is_replaced_by_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, real = new_training(), checksum_of
    save(tmp_path, training, TrainState(step=1), keep=1)

    def slow(path: Path) -> Any:
        monkeypatch.undo()
        save(tmp_path, training, TrainState(step=2), keep=1)
        return real(path)

    monkeypatch.setattr("oomguard._train.checkpoint.checksum_of", slow)
    assert load_newest(tmp_path).step == 2


DAMAGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no moment": (
        lambda facts: facts["state"]["kept"]["head.bias"].pop("exp_avg", None),
        "head.bias.exp_avg is missing",
    ),
    "a moment that is a number": (
        lambda facts: facts["state"]["kept"]["head.bias"].update(exp_avg={"type": "plain", "value": 1}),
        "head.bias.exp_avg is no tensor",
    ),
    "a stranger's weight": (lambda facts: facts["state"]["kept"].update(x={}), "state.kept has 'x'"),
    "a rate that is a word": (lambda facts: facts["state"]["groups"][0].update(lr="fast"), r"groups\[0\].lr is 'fast'"),
    "a rate below zero": (lambda facts: facts["state"]["groups"][0].update(lr=-1), "values that Adam refuses"),
}


def falsify(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """Change the facts of a checkpoint, and make its checksums agree."""
    facts = json.loads((checkpoint / "facts.json").read_text())
    change(facts)
    (checkpoint / "facts.json").write_text(json.dumps(facts))
    sums = json.loads((checkpoint / "checksums.json").read_text())
    sums["facts.json"] = msgspec.to_builtins(checksum_of(checkpoint / "facts.json"))
    (checkpoint / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("name", DAMAGES)
def test_an_optimizer_state_that_is_none_behind_a_right_checksum_leads_to_the_checkpoint_before(
    tmp_path: Path, name: str
) -> None:
    plan, data, (change, message) = plan_of(), numbers(), DAMAGES[name]
    options: dict[str, Any] = {"run": str(tmp_path), "validation": 0, "save_every": "1"}
    oomguard.train(plan, data, steps=2, **options)
    falsify(max((tmp_path / "checkpoints").iterdir()), change)
    with pytest.warns(UserWarning, match=message):
        result = oomguard.train(plan, data, steps=3, resume=True, **options)
    assert result.steps == 3
    for path in (tmp_path / "checkpoints").iterdir():
        falsify(path, change)
    with pytest.warns(UserWarning, match=message), pytest.raises(MisuseError, match=message):
        oomguard.train(plan, data, steps=4, resume=True, **options)
