"""Checkpoints: a training goes on bit for bit, and neither a kill, a full disk nor a bad byte loses what was saved."""

import errno
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oomguard.bptt import Microbatch
from oomguard.candidate import make_candidate
from oomguard.checkpoint import Checkpoint, load, load_weights, restore, save
from oomguard.checkpoint.tensors import packed, sum_of
from oomguard.errors import MisuseError
from oomguard.model import build
from oomguard.spec import Spec
from oomguard.step import Training, prepare, step

STEPS, ROWS = 5, 4
FILES = ("tensors.safetensors", "facts.json", "checksums.json")
OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
ROOT = str(Path(__file__).parents[1])


def spec_of(**more: Any) -> Spec:
    given: dict[str, Any] = {"cell": "gru", "seq": STEPS, "vocab": 7, "hidden": 4, "dropout": 0.3, "batch": ROWS}
    return Spec(**given | more)


PLAIN = spec_of()
SPECS = {
    **{name: spec_of(optimizer=name) for name in OPTIMIZERS},
    "features": spec_of(vocab=None, features=3, dropout=0.0),
    "frozen": spec_of(frozen=("embedding", "layer0")),
    "tied": spec_of(tied=True, cell="rnn"),
    "sparse sgd": spec_of(sparse_embedding=True, optimizer="sgd"),
    "sparse momentum": spec_of(sparse_embedding=True, optimizer="sgd-momentum"),
    "sparse adagrad": spec_of(sparse_embedding=True, optimizer="adagrad"),
    "normalised": spec_of(layer_norm=True),
    "projected both ways": spec_of(cell="lstm", projection=2, bidirectional=True),
    "lengths": spec_of(lengths={3: 10, STEPS: 4}),
}
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "segments": {"segments": 2},
    "fp16": {"precision": "fp16"},
    "fused": {"update": "fused"},
    "loop": {"update": "loop"},
    "offload": {"offload": True},
}


def train(training: Training, first: int, last: int) -> None:
    """Optimizer steps on data that depends on the number of the step alone."""
    spec = training.model.spec
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 7, (STEPS, ROWS), generator=generator)
        inputs = tokens if spec.vocab else torch.randn(STEPS, ROWS, 3, generator=generator)
        targets = tokens if spec.vocab else inputs[..., :1]
        batch = Microbatch(inputs.to(training.model.device), targets.to(training.model.device))
        step(training, [batch], tokens.numel(), clip=1.0)


def begun(spec: Spec = PLAIN, seed: int = 0, device: str = "cpu", **knobs: Any) -> Training:
    torch.manual_seed(seed)
    return prepare(spec, make_candidate(spec, **knobs), device, lr=1e-2)


def after(steps: int, spec: Spec = PLAIN, **knobs: Any) -> Training:
    training = begun(spec, **knobs)
    train(training, 0, steps)
    return training


def loaded(directory: Path) -> Checkpoint:
    found = load(directory)
    assert found is not None
    return found


def bits(training: Training) -> dict[str, bytes]:
    """Everything that a step changes, to compare to the last bit."""
    found: dict[str, Any] = {name: value.detach() for name, value in training.model.named_parameters()}
    for number, parameter in enumerate(training.model.parameters()):
        found |= {f"{number} {key}": value for key, value in training.optimizer.state.get(parameter, {}).items()}
    found["random"] = torch.get_rng_state()
    if training.model.device.type == "cuda":
        found["random of the card"] = torch.cuda.get_rng_state(training.model.device)
    dense = {k: v.to_dense() if isinstance(v, Tensor) else torch.tensor(v) for k, v in found.items()}
    return {key: str(value.dtype).encode() + value.cpu().numpy().tobytes() for key, value in dense.items()}


def goes_on_alike(directory: Path, spec: Spec, **knobs: Any) -> bool:
    """Whether a training that was interrupted ends like one that was not."""
    training = after(3, spec, **knobs)
    save(directory, training, {"step": 3})
    train(training, 3, 6)
    whole = bits(training)
    anew = begun(spec, seed=99, **knobs)  # other weights, and other random numbers
    restore(loaded(directory), anew)
    train(anew, 3, 6)
    return bits(anew) == whole


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", SPECS)
def test_a_restored_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    assert goes_on_alike(tmp_path, SPECS[name])


@pytest.mark.parametrize("name", KNOBS)
def test_a_restored_training_goes_on_bit_for_bit_however_it_is_run(tmp_path: Path, name: str) -> None:
    assert goes_on_alike(tmp_path, PLAIN, **KNOBS[name])


def test_another_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    training = after(2)
    save(tmp_path, training, {"step": 2})
    train(training, 2, 4)
    code = (
        f"import sys; sys.path[:0] = [{ROOT!r}, {ROOT + '/tests'!r}]\n"
        "import test_checkpoint as t; from pathlib import Path; directory = Path(sys.argv[1])\n"
        "training = t.begun(seed=5); t.restore(t.loaded(directory), training); t.train(training, 2, 4)\n"
        "t.save(directory, training, {'step': 4})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100)
    anew = begun(seed=7)
    restore(loaded(tmp_path), anew)
    assert bits(anew) == bits(training)


def test_a_restored_state_is_all_that_was_there_before_the_first_step_too(tmp_path: Path) -> None:
    save(tmp_path, begun(), {"step": 0})
    training = after(2)
    restore(loaded(tmp_path), training)
    assert not training.optimizer.state
    assert bits(training) == bits(begun())


def test_the_scaler_goes_on_with_its_scale(tmp_path: Path) -> None:
    training = after(2, precision="fp16")
    assert training.scaler is not None
    training.scaler.update(1024.0)
    save(tmp_path, training, {"step": 2})
    anew = begun(precision="fp16")
    restore(loaded(tmp_path), anew)
    assert anew.scaler is not None
    assert anew.scaler.state_dict() == training.scaler.state_dict()


def test_a_learning_rate_that_was_changed_comes_back(tmp_path: Path) -> None:
    training = after(1, spec_of(optimizer="adafactor"))
    training.optimizer.param_groups[0]["lr"] = 1 / 3
    save(tmp_path, training, {"step": 1})
    anew = begun(spec_of(optimizer="adafactor"))
    restore(loaded(tmp_path), anew)
    assert anew.optimizer.param_groups[0]["lr"] == 1 / 3
    assert anew.optimizer.param_groups[0]["eps"] == training.optimizer.param_groups[0]["eps"]


def test_a_training_goes_on_under_another_candidate(tmp_path: Path) -> None:
    save(tmp_path, after(2, update="foreach"), {"step": 2})
    training = begun(update="loop", microbatch=1)
    restore(loaded(tmp_path), training)
    assert training.optimizer.param_groups[0]["foreach"] is False
    train(training, 2, 3)


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_what_an_optimizer_keeps_comes_back_as_its_own_memory(tmp_path: Path, key: str) -> None:
    training = after(1)
    save(tmp_path, training, {"step": 1})
    restore(loaded(tmp_path), training)
    shutil.rmtree(tmp_path)
    train(training, 1, 2)
    first = training.optimizer.state[training.model.head.weight][key]
    assert first.device.type == "cpu"
    assert first.dtype is torch.float32


def test_the_facts_come_back_as_they_were(tmp_path: Path) -> None:
    generator = np.random.default_rng(3).bit_generator.state  # has an int of 128 bits
    facts = {"step": 7, "epoch": 2, "best": float("inf"), "data": generator, "schedule": {"last": [1e-3, None]}}
    save(tmp_path, begun(), facts)
    assert loaded(tmp_path).facts == facts


def test_facts_may_be_a_struct(tmp_path: Path) -> None:
    position = msgspec.defstruct("Position", [("step", int), ("row", int)])
    save(tmp_path, begun(), position(step=4, row=9))
    assert loaded(tmp_path).facts == {"step": 4, "row": 9}
    assert loaded(tmp_path).step == 4


def test_spec_and_candidate_come_back_equal(tmp_path: Path) -> None:
    training = begun(SPECS["lengths"], segments=2)
    save(tmp_path, training, {"step": 0})
    assert loaded(tmp_path).spec == training.model.spec
    assert loaded(tmp_path).candidate == training.candidate


@pytest.mark.parametrize("facts", [{"step": 1, "loss": torch.tensor(1.0)}, {"step": 1, "x": object()}])
def test_facts_that_json_cannot_hold_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match="what JSON can hold"):
        save(tmp_path, begun(), facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("facts", [{}, {"step": None}, {"step": -1}, {"step": 1.5}])
def test_facts_without_a_step_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match="step in a checkpoint's facts"):
        save(tmp_path, begun(), facts)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    training = after(1, SPECS["tied"])
    found = load_file(save(tmp_path, training, {"step": 1}) / "tensors.safetensors")
    for name, weight in training.model.named_parameters():
        assert torch.equal(found[f"model.{name}"], weight)
        assert torch.equal(found[f"optimizer.{name}.exp_avg"], training.optimizer.state[weight]["exp_avg"])


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    training = after(1, SPECS["tied"])
    path = save(tmp_path, training, {"step": 1})
    assert "model.head.weight" not in load_file(path / "tensors.safetensors")
    anew = begun(SPECS["tied"], seed=4)
    restore(loaded(tmp_path), anew)
    assert anew.model.embedding is not None
    assert anew.model.head.weight is anew.model.embedding.weight


def test_weights_that_are_pieces_of_one_block_are_saved(tmp_path: Path) -> None:
    training = begun()
    flat = torch.cat([p.detach().flatten() for p in training.model.parameters()])  # as cuDNN has them
    start = 0
    for p in training.model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    save(tmp_path, training, {"step": 0})
    anew = begun(seed=4)
    restore(loaded(tmp_path), anew)
    assert bits(anew) == bits(training)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    training = begun()
    for number in range(5):
        save(tmp_path, training, {"step": number * 10}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030-save-0004", "step-00000040-save-0005"]


def test_the_newest_is_the_one_saved_last_even_if_its_step_is_lower(tmp_path: Path) -> None:
    training = begun()
    for number in (10, 30, 20, 20):
        path = save(tmp_path, training, {"step": number}, keep=2)
    assert loaded(tmp_path).path == path
    assert loaded(tmp_path).step == 20


def test_where_nothing_was_saved_nothing_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert load(tmp_path) is None
    assert load(tmp_path / "nowhere") is None


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


@pytest.mark.parametrize(
    ("more", "told"),
    [({"hidden": 5, "embedding": 4}, "--hidden was 4 and is 5"), ({"batch": 8}, "--batch was 4 and is 8")],
)
def test_another_spec_is_refused_with_what_differs(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    save(tmp_path, begun(), {"step": 1})
    training = begun(spec_of(**more))
    before = bits(training)
    with pytest.raises(MisuseError, match=told):
        restore(loaded(tmp_path), training)
    assert bits(training) == before


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, begun(), {"step": 1})
    training = begun()
    training = replace(training, optimizer=torch.optim.NAdam(training.model.parameters()))
    with pytest.raises(MisuseError, match="that was Adam and this is NAdam"):
        restore(loaded(tmp_path), training)


def test_a_checkpoint_that_went_away_is_told(tmp_path: Path) -> None:
    found = loaded(save(tmp_path, begun(), {"step": 1}).parent)
    shutil.rmtree(found.path)
    with pytest.raises(MisuseError, match="cannot be read any more"):
        restore(found, begun())


def test_weights_alone_serve_another_batch_and_length(tmp_path: Path) -> None:
    training = after(2)
    save(tmp_path, training, {"step": 2, "normaliser": [0.5, 2.0]})
    model = build(spec_of(batch=1, seq=50, optimizer="sgd", dropout=0.1))
    found = load_weights(tmp_path, model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), training.model.parameters(), strict=True))
    assert found.facts["normaliser"] == [0.5, 2.0]


@pytest.mark.parametrize("more", [{"hidden": 5}, {"layers": 3}, {"layer_norm": True}], ids=str)
def test_weights_of_another_model_are_refused_with_what_differs(tmp_path: Path, more: dict[str, Any]) -> None:
    save(tmp_path, begun(), {"step": 1})
    with pytest.raises(MisuseError, match=f"--{next(iter(more)).replace('_', '-')} was"):
        load_weights(tmp_path, build(spec_of(**more)))


def test_only_what_shapes_the_weights_is_named_where_they_do_not_fit(tmp_path: Path) -> None:
    save(tmp_path, begun(), {"step": 1})
    with pytest.raises(MisuseError, match=r"but --embedding was 4 and is 5, --hidden was 4 and is 5\. "):
        load_weights(tmp_path, build(spec_of(hidden=5, seq=50, batch=1)))


def test_weights_from_where_there_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="there is none"):
        load_weights(tmp_path, build(PLAIN))


def test_a_tensor_in_host_memory_is_written_from_where_it_is() -> None:
    tensors = {name: torch.randn(100, 3) for name in ("first", "second")}
    _, *pieces = packed(tensors)
    assert [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces] == [
        tensor.data_ptr() for tensor in tensors.values()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KNOBS)
def test_on_a_card_everything_comes_back_where_the_optimizer_wants_it(tmp_path: Path, name: str) -> None:
    training = after(2, device="cuda", **KNOBS[name])
    save(tmp_path, training, {"step": 2})
    saved, places = bits(training), places_of(training)
    anew = after(1, device="cuda", **KNOBS[name])
    restore(loaded(tmp_path), anew)
    assert bits(anew) == saved
    assert places_of(anew) == places
    train(anew, 2, 3)


def places_of(training: Training) -> list[str]:
    """Where the optimizer keeps what it keeps."""
    return [f"{key} {value.device}" for kept in training.optimizer.state.values() for key, value in kept.items()]


@pytest.mark.gpu
def test_what_was_saved_on_a_card_goes_on_without_one(tmp_path: Path) -> None:
    save(tmp_path, after(2, device="cuda"), {"step": 2})
    training = begun()
    restore(loaded(tmp_path), training)
    train(training, 2, 3)
    assert {value.split()[1] for value in places_of(training)} == {"cpu"}
