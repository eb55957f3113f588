"""Checkpoints under attack: neither a kill at any call, a failing disk nor a bad byte loses what was saved."""

import errno
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainings import begun, loaded

from oomguard.checkpoint import load, save
from oomguard.checkpoint.tensors import sum_of
from oomguard.errors import MisuseError
from oomguard.step import Training

FILES = ("tensors.safetensors", "facts.json", "checksums.json")


def two_saved(directory: Path) -> list[Path]:
    return [save(directory, begun(), {"step": number}) for number in (1, 2)]


def flipped(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << (place % 8)
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    first, second = two_saved(tmp_path)
    size = (second / name).stat().st_size
    for place in range(0, size, 1 + size // 100):
        flipped(second / name, place)
        with pytest.warns(UserWarning, match="step-00000002"):
            found = loaded(tmp_path)
        assert found.path == first
        flipped(second / name, place)
    assert loaded(tmp_path).path == second


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_file_that_was_cut_off_is_found(tmp_path: Path, name: str, kept: int) -> None:
    first, second = two_saved(tmp_path)
    (second / name).write_bytes((second / name).read_bytes()[:kept])
    with pytest.warns(UserWarning, match=r"save-0002/(facts|tensors|checksums)\..*look"):
        found = loaded(tmp_path)
    assert found.path == first


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    first, second = two_saved(tmp_path)
    (second / name).unlink()
    with pytest.warns(UserWarning, match=rf"{name}: it cannot be read \(No such file"):
        found = loaded(tmp_path)
    assert found.path == first


def test_a_format_of_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, begun(), {"step": 1})
    monkeypatch.setattr("oomguard.checkpoint.store.VERSION", 2)
    path = save(tmp_path, begun(), {"step": 2})
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=rf"{path.name}/facts\.json: its format is version 2"):
        assert loaded(tmp_path).step == 1


def test_if_all_are_damaged_it_is_told(tmp_path: Path) -> None:
    for path in two_saved(tmp_path):
        flipped(path / "tensors.safetensors", 1000)
    with pytest.warns(UserWarning, match="checksum"), pytest.raises(MisuseError, match=r"all 2 in .* are damaged"):
        load(tmp_path)


def test_saving_goes_on_after_a_damaged_one(tmp_path: Path) -> None:
    _, second = two_saved(tmp_path)
    flipped(second / "tensors.safetensors", 1000)
    third = save(tmp_path, begun(), {"step": 2})
    assert loaded(tmp_path).path == third


in_a_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
"""Later versions of Python warn of a fork beside threads; the child here neither waits for any nor lives long."""

CALLS = ("open", "write", "fsync", "close", "mkdir", "replace", "unlink", "rmdir")
"""All that changes a disk, or puts it there."""


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, stop: Callable[[], None]) -> list[str]:
    """From now on, the at-th of those calls stops (half of its bytes written); returns the calls so far."""
    made: list[str] = []

    def patched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            made.append(name)
            if len(made) == at + 1:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                stop()
            return real(*args, **more)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, patched(name))
    return made


def counted(directory: Path, training: Training) -> list[str]:
    """The calls that one more save makes."""
    with pytest.MonkeyPatch.context() as patch:
        made = interrupted(patch, 10**9, lambda: None)
        save(directory, training, {"step": 3}, keep=2)
    return made


def killed_while_saving(directory: Path, training: Training, at: int, steps: range = range(3, 4)) -> list[int]:
    """The steps that a process had saved when it was gone, without a chance to clean up, at the at-th such call."""
    told, tell = os.pipe()
    real_write, child = os.write, os.fork()
    if not child:
        try:
            interrupted(pytest.MonkeyPatch(), at, lambda: os._exit(0))
            for number in steps:
                save(directory, training, {"step": number}, keep=2)
                real_write(tell, bytes([number]))
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with open(told, "rb") as pipe:
        return [*pipe.read()]


@in_a_fork
def test_a_kill_at_any_call_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    training, saved = begun(), tmp_path / "saved"
    for number in (1, 2):
        save(saved, training, {"step": number}, keep=2)
    calls = len(counted(shutil.copytree(saved, tmp_path / "counted"), training))
    steps, left = [], 0
    for at in range(calls + 1):
        here = shutil.copytree(saved, tmp_path / str(at))
        assert killed_while_saving(here, training, at) == ([] if at < calls else [3])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no half checkpoint ever bears a name
            steps.append(loaded(here).step)
        left += any(path.name.startswith(".") for path in here.iterdir())
        save(here, training, {"step": 4}, keep=2)
        assert loaded(here).step == 4
        assert len(list(here.iterdir())) == 2  # what the kill left is gone
    assert steps == sorted(steps)
    assert {*steps} == {2, 3}
    assert left > calls // 2


@in_a_fork
def test_a_kill_in_the_first_save_of_all_leaves_nothing_or_the_new(tmp_path: Path) -> None:
    training, found = begun(), []
    for at in range(len(counted(tmp_path / "counted", training))):
        assert killed_while_saving(tmp_path / str(at), training, at) == []
        found.append(load(tmp_path / str(at)))
        save(tmp_path / str(at), training, {"step": 4})
        assert loaded(tmp_path / str(at)).step == 4
    assert [one is not None for one in found] == sorted(one is not None for one in found)


@in_a_fork
def test_a_kill_at_random_loses_no_save_that_had_ended(tmp_path: Path) -> None:
    training, chosen = begun(), random.Random(5)
    first = len(counted(tmp_path / "counted", training))
    for number in range(20):
        here = tmp_path / str(number)
        done = killed_while_saving(here, training, chosen.randrange(first, 6 * first), range(1, 9))
        assert loaded(here).step in (done[-1], done[-1] + 1)


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    save(tmp_path, begun(), {"step": 1})
    made = [name for name in counted(tmp_path, begun()) if name in ("write", "fsync", "replace")]
    text = " ".join(made).replace("write " * (made.index("fsync") - 1), "")
    assert text == "write fsync write fsync write fsync fsync replace fsync"  # 3 files, the directory, its name, home


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_is_told_and_costs_nothing_that_was_saved(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    training, saved = begun(), tmp_path / "saved"
    save(saved, training, {"step": 1})
    for at in range(counted(shutil.copytree(saved, tmp_path / "counted"), training).index("replace")):
        with pytest.MonkeyPatch.context() as patch:
            interrupted(patch, at, fail)
            with pytest.raises(MisuseError, match=os.strerror(code)):
                save(saved, training, {"step": 2})
        assert loaded(saved).step == 1
        assert len(list(saved.iterdir())) == 1


def test_a_full_disk_comes_with_the_room_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(MisuseError, match=r"No space left.*Make room for \d.*KiB"):
        save(tmp_path, begun(), {"step": 1})


def test_an_old_one_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    training, saved = begun(), tmp_path / "saved"
    for number in (1, 2):
        save(saved, training, {"step": number})
    calls = counted(shutil.copytree(saved, tmp_path / "counted"), training)
    interrupted(monkeypatch, len(calls) - 1 - calls[::-1].index("replace"), fail)
    with pytest.warns(UserWarning, match="save-0001: an old checkpoint could not be removed"):
        save(saved, training, {"step": 3}, keep=2)
    assert loaded(saved).step == 3


@pytest.mark.parametrize("directory", ["/proc/nobody/writes/here", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_refused(directory: str) -> None:
    with pytest.raises(MisuseError, match="cannot be"):
        save(directory, begun(), {"step": 1})


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match="Not a directory"):
        load(tmp_path / "file")


def test_one_that_is_removed_while_it_is_read_gives_way_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, real = begun(), sum_of
    save(tmp_path, training, {"step": 1}, keep=1)

    def slow(path: Path) -> Any:
        monkeypatch.undo()
        save(tmp_path, training, {"step": 2}, keep=1)
        return real(path)

    monkeypatch.setattr("oomguard.checkpoint.store.sum_of", slow)
    assert loaded(tmp_path).step == 2
