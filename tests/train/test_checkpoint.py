"""Checkpoints: a restored training continues bit for bit."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from trainings import PLAIN, STEPS, load_newest, new_training, spec_of, state_bits, train, trained_for

from oomguard._core.errors import MisuseError
from oomguard._data.options import DataOptions
from oomguard._data.order import Position
from oomguard._data.rows import Normaliser
from oomguard._guard.ladder import LadderPosition
from oomguard._rnn.model import build
from oomguard._spec.spec import Spec
from oomguard._step import Training
from oomguard._train.checkpoint import TrainState, load, load_weights, restore, save
from oomguard._train.tensors import file_pieces

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
ROOT = str(Path(__file__).parents[2])
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


def continues_bit_for_bit(directory: Path, spec: Spec, **knobs: Any) -> bool:
    """Whether a training that was restored in the middle ends like an uninterrupted one."""
    training = trained_for(3, spec, **knobs)
    save(directory, training, TrainState(step=3))
    train(training, 3, 6)
    whole = state_bits(training)
    other = new_training(spec, seed=99, **knobs)  # with other weights and random numbers
    restore(load_newest(directory), other)
    train(other, 3, 6)
    return state_bits(other) == whole


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", SPECS)
def test_a_restored_training_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    assert continues_bit_for_bit(tmp_path, SPECS[name])


@pytest.mark.parametrize("name", KNOBS)
def test_a_restored_training_continues_bit_for_bit_with_every_candidate(tmp_path: Path, name: str) -> None:
    assert continues_bit_for_bit(tmp_path, PLAIN, **KNOBS[name])


def test_reading_maps_one_tensor_of_the_file_at_a_time(tmp_path: Path) -> None:
    spec = spec_of(vocab=None, features=3, hidden=1024, layers=3)
    save(tmp_path, new_training(spec), TrainState(step=1))
    largest_bytes = max(weight.nbytes for weight in new_training(spec).model.parameters())
    file, process, grown = load_newest(tmp_path).tensors(), psutil.Process(), []
    assert sum(file.read(name).nbytes for name in file.names) > 5 * largest_bytes
    before_bytes = process.memory_info().rss
    for name in file.names:
        float(file.read(name).sum())
        grown.append(process.memory_info().rss - before_bytes)
    assert max(grown) < 2 * largest_bytes


def test_another_process_continues_bit_for_bit(tmp_path: Path) -> None:
    training = trained_for(2)
    save(tmp_path, training, TrainState(step=2))
    train(training, 2, 4)
    code = (
        f"import sys; sys.path[:0] = [{ROOT!r}, {ROOT + '/tests'!r}]\n"
        "import trainings as t; from pathlib import Path\n"
        "from oomguard._train.checkpoint import TrainState, restore, save\n"
        "directory, training = Path(sys.argv[1]), t.new_training(seed=5)\n"
        "restore(t.load_newest(directory), training); t.train(training, 2, 4)\n"
        "save(directory, training, TrainState(step=4))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100)
    other = new_training(seed=7)
    restore(load_newest(tmp_path), other)
    assert state_bits(other) == state_bits(training)


def test_a_checkpoint_from_before_the_first_step_restores_an_empty_optimizer(tmp_path: Path) -> None:
    save(tmp_path, new_training(), TrainState(step=0))
    training = trained_for(2)
    restore(load_newest(tmp_path), training)
    assert not training.optimizer.state
    assert state_bits(training) == state_bits(new_training())


def test_the_loss_scale_is_restored(tmp_path: Path) -> None:
    training = trained_for(2, precision="fp16")
    assert training.scaler is not None
    training.scaler.update(1024.0)
    save(tmp_path, training, TrainState(step=2))
    other = new_training(precision="fp16")
    restore(load_newest(tmp_path), other)
    assert other.scaler is not None
    assert other.scaler.state_dict() == training.scaler.state_dict()


def test_a_changed_learning_rate_is_restored(tmp_path: Path) -> None:
    training = trained_for(1, spec_of(optimizer="adafactor"))
    training.optimizer.param_groups[0]["lr"] = 1 / 3
    save(tmp_path, training, TrainState(step=1))
    other = new_training(spec_of(optimizer="adafactor"))
    restore(load_newest(tmp_path), other)
    assert other.optimizer.param_groups[0]["lr"] == 1 / 3
    assert other.optimizer.param_groups[0]["eps"] == training.optimizer.param_groups[0]["eps"]


def test_a_training_can_continue_with_another_candidate(tmp_path: Path) -> None:
    save(tmp_path, trained_for(2, update="foreach"), TrainState(step=2))
    training = new_training(update="loop", microbatch=1)
    restore(load_newest(tmp_path), training)
    assert training.optimizer.param_groups[0]["foreach"] is False
    train(training, 2, 3)


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_the_restored_optimizer_state_does_not_depend_on_the_file(tmp_path: Path, key: str) -> None:
    training = trained_for(1)
    save(tmp_path, training, TrainState(step=1))
    restore(load_newest(tmp_path), training)
    shutil.rmtree(tmp_path)
    train(training, 1, 2)
    first = training.optimizer.state[training.model.head.weight][key]
    assert first.device.type == "cpu"
    assert first.dtype is torch.float32


def test_the_training_state_is_restored(tmp_path: Path) -> None:
    state = TrainState(
        step=7,
        position=Position(epoch=2, done=5),
        ladder=LadderPosition(rung=3, quiet=8, wait=200, climbed=True),
        loss=float("inf"),
        best=1 / 3,
        worse=4,
        data={"kind": "npy", "shape": [40, 6, 3], "seed": 1 << 100},
        data_options=DataOptions(validation=0.25, columns=("a", "b")),
        normaliser=Normaliser(mean=(0.1, 0.2), std=(1 / 3, 2.0), steps=9),
        model="package.module:build",
    )
    save(tmp_path, new_training(), state)
    assert load_newest(tmp_path).state == state
    assert load_newest(tmp_path).step == 7


def test_the_names_in_the_file_stay_those_of_earlier_versions(tmp_path: Path) -> None:
    content = json.loads((save(tmp_path, trained_for(1), TrainState(step=1)) / "facts.json").read_bytes())
    assert [*content] == ["version", "step", "spec", "candidate", "state", "facts"]
    assert [*content["state"]] == ["optimizer", "groups", "kept", "scaler"]
    assert content["state"]["kept"]["head.bias"]["exp_avg"] == {"type": "dense"}
    names = ["step", "position", "standing", "loss", "best", "worse", "data", "data_options", "normaliser", "model"]
    assert [*content["facts"]] == names
    assert [*content["facts"]["standing"]] == ["rung", "quiet", "wait", "climbed"]


def test_a_loss_of_nan_is_restored(tmp_path: Path) -> None:
    save(tmp_path, new_training(), TrainState(loss=float("nan")))
    assert str(load_newest(tmp_path).state.loss) == "nan"


def test_spec_and_candidate_are_restored(tmp_path: Path) -> None:
    training = new_training(SPECS["lengths"], segments=2)
    save(tmp_path, training, TrainState(step=0))
    assert load_newest(tmp_path).spec == training.model.spec
    assert load_newest(tmp_path).candidate == training.candidate


def test_safetensors_can_read_the_file(tmp_path: Path) -> None:
    training = trained_for(1, SPECS["tied"])
    tensors = load_file(save(tmp_path, training, TrainState(step=1)) / "tensors.safetensors")
    for name, weight in training.model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], weight)
        assert torch.equal(tensors[f"optimizer.{name}.exp_avg"], training.optimizer.state[weight]["exp_avg"])


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    training = trained_for(1, SPECS["tied"])
    path = save(tmp_path, training, TrainState(step=1))
    assert "model.head.weight" not in load_file(path / "tensors.safetensors")
    other = new_training(SPECS["tied"], seed=4)
    restore(load_newest(tmp_path), other)
    assert other.model.embedding is not None
    assert other.model.head.weight is other.model.embedding.weight


def test_weights_that_are_views_of_one_block_are_saved(tmp_path: Path) -> None:
    training = new_training()
    flat = torch.cat([p.detach().flatten() for p in training.model.parameters()])  # cuDNN's layout
    start = 0
    for p in training.model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    save(tmp_path, training, TrainState(step=0))
    other = new_training(seed=4)
    restore(load_newest(tmp_path), other)
    assert state_bits(other) == state_bits(training)


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    training = new_training()
    for number in range(5):
        save(tmp_path, training, TrainState(step=number * 10), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030-save-0004", "step-00000040-save-0005"]


def test_the_newest_checkpoint_is_the_one_saved_last_even_at_a_lower_step(tmp_path: Path) -> None:
    training = new_training()
    for number in (10, 30, 20, 20):
        path = save(tmp_path, training, TrainState(step=number), keep=2)
    assert Path(load_newest(tmp_path).directory) == path
    assert load_newest(tmp_path).step == 20


def test_loading_from_a_directory_without_checkpoints_returns_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert load(tmp_path) is None
    assert load(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("more", "message"),
    [({"hidden": 5, "embedding": 4}, "--hidden was 4 and is 5"), ({"batch": 8}, "--batch was 4 and is 8")],
)
def test_restoring_with_another_spec_names_the_differences(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    training = new_training(spec_of(**more))
    before = state_bits(training)
    with pytest.raises(MisuseError, match=message):
        restore(load_newest(tmp_path), training)
    assert state_bits(training) == before


def test_restoring_with_another_optimizer_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    training = new_training()
    training = replace(training, optimizer=torch.optim.NAdam(training.model.parameters()))
    with pytest.raises(MisuseError, match="that was Adam and this is NAdam"):
        restore(load_newest(tmp_path), training)


def test_restoring_a_removed_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpoint = load_newest(save(tmp_path, new_training(), TrainState(step=1)).parent)
    shutil.rmtree(checkpoint.directory)
    with pytest.raises(MisuseError, match="cannot be read any more"):
        restore(checkpoint, new_training())


def test_weights_can_be_loaded_for_another_batch_and_length(tmp_path: Path) -> None:
    training = trained_for(2)
    save(tmp_path, training, TrainState(step=2))
    model = build(spec_of(batch=1, seq=50, optimizer="sgd", dropout=0.1))
    load_weights(load_newest(tmp_path), model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), training.model.parameters(), strict=True))


@pytest.mark.parametrize("more", [{"hidden": 5}, {"layers": 3}, {"layer_norm": True}], ids=str)
def test_loading_weights_of_another_model_names_the_differences(tmp_path: Path, more: dict[str, Any]) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    with pytest.raises(MisuseError, match=f"--{next(iter(more)).replace('_', '-')} was"):
        load_weights(load_newest(tmp_path), build(spec_of(**more)))


def test_the_error_names_only_fields_that_affect_the_weights(tmp_path: Path) -> None:
    save(tmp_path, new_training(), TrainState(step=1))
    with pytest.raises(MisuseError, match=r"but --embedding was 4 and is 5, --hidden was 4 and is 5\. "):
        load_weights(load_newest(tmp_path), build(spec_of(hidden=5, seq=50, batch=1)))


def test_a_tensor_in_host_memory_is_written_without_a_copy() -> None:
    tensors = {name: torch.randn(100, 3) for name in ("first", "second")}
    _, *pieces = file_pieces(tensors)
    assert [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces] == [
        tensor.data_ptr() for tensor in tensors.values()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KNOBS)
def test_on_a_card_the_optimizer_state_is_restored_to_its_devices(tmp_path: Path, name: str) -> None:
    training = trained_for(2, device="cuda", **KNOBS[name])
    save(tmp_path, training, TrainState(step=2))
    saved, places = state_bits(training), devices_of(training)
    other = trained_for(1, device="cuda", **KNOBS[name])
    restore(load_newest(tmp_path), other)
    assert state_bits(other) == saved
    assert devices_of(other) == places
    train(other, 2, 3)


def devices_of(training: Training) -> list[str]:
    """The device of each tensor in the optimizer's state."""
    return [f"{key} {value.device}" for kept in training.optimizer.state.values() for key, value in kept.items()]


@pytest.mark.gpu
def test_a_checkpoint_from_a_card_can_be_restored_without_one(tmp_path: Path) -> None:
    save(tmp_path, trained_for(2, device="cuda"), TrainState(step=2))
    training = new_training()
    restore(load_newest(tmp_path), training)
    train(training, 2, 3)
    assert {value.split()[1] for value in devices_of(training)} == {"cpu"}
