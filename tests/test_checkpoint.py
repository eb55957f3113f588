"""Checkpoints: a training goes on bit for bit, and what was saved with it comes back."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainings import PLAIN, STEPS, after, begun, bits, loaded, spec_of, train

from oomguard.checkpoint import load, load_weights, restore, save
from oomguard.checkpoint.tensors import packed
from oomguard.errors import MisuseError
from oomguard.model import build
from oomguard.spec import Spec
from oomguard.step import Training

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
ROOT = str(Path(__file__).parents[1])
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


def test_a_checkpoint_is_read_in_parts_if_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomguard.checkpoint.resume._MAPPED_BYTES", 100)
    assert goes_on_alike(tmp_path, PLAIN)


def test_another_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    training = after(2)
    save(tmp_path, training, {"step": 2})
    train(training, 2, 4)
    code = (
        f"import sys; sys.path[:0] = [{ROOT!r}, {ROOT + '/tests'!r}]\n"
        "import trainings as t; from oomguard.checkpoint import restore, save; from pathlib import Path\n"
        "directory, training = Path(sys.argv[1]), t.begun(seed=5)\n"
        "restore(t.loaded(directory), training); t.train(training, 2, 4)\n"
        "save(directory, training, {'step': 4})"
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
