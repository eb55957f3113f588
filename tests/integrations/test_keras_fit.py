"""`model.fit` of Keras on PyTorch keeps within a budget, with the weights and metrics of the undisturbed training."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import oomguard
from oomguard import GuardError, MisuseError

os.environ["KERAS_BACKEND"] = "torch"
keras: Any = pytest.importorskip("keras", reason="keras is not installed (extra keras)")
from oomguard.integrations.keras import OomGuard, kernels  # noqa: E402

pytestmark = pytest.mark.timeout(300)
ROWS, STEPS = 12, 40
draw = np.random.default_rng(0)
INPUTS = draw.normal(size=(ROWS, STEPS, 5)).astype("float32")
INPUTS[:5, 25:] = 0  # padding, where a model masks it
TARGETS = draw.normal(size=(ROWS, STEPS, 2)).astype("float32")


def build(cell: str = "LSTM", *, masked: bool = False, loss: Any = "mse", more: tuple[Any, ...] = ()) -> Any:
    keras.utils.set_random_seed(0)
    la = keras.layers
    given = keras.Input((None, 5))
    x = la.Masking()(given) if masked else given
    x = getattr(la, cell)(8, return_sequences=True, kernel_regularizer="l2")(x)
    for layer in (la.Bidirectional(la.GRU(6, return_sequences=True)), *more, la.Dense(2)):
        x = layer(x)
    model = keras.Model(given, x)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["mae"])
    return model


def fitted(model: Any, *callbacks: Any, **options: Any) -> tuple[Any, dict[str, list[float]]]:
    usual: dict[str, Any] = {"batch_size": ROWS, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(INPUTS, TARGETS, callbacks=[*callbacks], **usual | options).history
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]), history


class Calls(TorchFunctionMode):
    """Counts calls of PyTorch's recurrent functions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.lstm, torch.gru)
        return function(*args, **(kwargs or {}))


# ---- what is the same


@pytest.mark.parametrize("knobs", [{"microbatch": 5}, {"segments": 4}, {"microbatch": 3, "segments": 7}], ids=str)
@pytest.mark.parametrize(("cell", "masked"), [("LSTM", False), ("LSTM", True), ("SimpleRNN", False)])
def test_pieces_and_segments_give_the_weights_and_metrics_of_keras(
    cell: str, masked: bool, knobs: dict[str, Any]
) -> None:
    weights, history = fitted(build(cell, masked=masked))
    guarded, logs = fitted(build(cell, masked=masked), OomGuard("64GiB", **knobs))
    assert np.allclose(guarded, weights, atol=1e-6)
    for name, values in history.items():
        assert logs[name] == pytest.approx(values, rel=1e-5), name
    assert logs["oomguard_microbatch"] == [knobs.get("microbatch", ROWS)] * 2
    assert logs["oomguard_peak_bytes"][-1] > 100 << 20


def test_sums_add_up_too() -> None:
    sums = keras.losses.MeanSquaredError(reduction="sum")
    plain, guarded = build(loss=sums), build(loss=sums)
    for model in (plain, guarded):
        model.layers[1].cell.kernel.regularizer = None
        model.optimizer.learning_rate = 1e-3
    assert np.allclose(fitted(plain)[0], fitted(guarded, OomGuard("64GiB", microbatch=5))[0], atol=1e-6)


def test_validation_and_several_batches_work_as_before() -> None:
    options = {"batch_size": 5, "validation_split": 0.25, "shuffle": False}
    plain, guarded = fitted(build(), **options), fitted(build(), OomGuard("64GiB", microbatch=2), **options)
    assert np.allclose(plain[0], guarded[0], atol=1e-6)
    assert guarded[1]["val_loss"] == pytest.approx(plain[1]["val_loss"], rel=1e-5)


def test_without_the_callback_fit_runs_as_before() -> None:
    model = build()
    before = model.make_train_function
    fitted(model, OomGuard("64GiB", microbatch=5))
    assert model.train_function.__qualname__.startswith("TorchTrainer")
    assert model.make_train_function == before


# ---- kernels and segments


def test_keras_runs_loops_on_the_cpu_and_kernels_are_reached_through_ours() -> None:
    model = build()
    with Calls() as plain:
        model(INPUTS)
    with Calls() as ours, kernels() as active:
        model(INPUTS)
    assert (plain.count, active, ours.count) == (0, True, 3)  # an LSTM, and a GRU for each direction


def test_kernels_leave_alone_what_pytorch_cannot_run() -> None:
    la = keras.layers
    odd = [la.LSTM(4, activation="relu"), la.GRU(4, reset_after=False), la.LSTM(4, use_bias=False), la.SimpleRNN(4)]
    with Calls() as calls, kernels():
        for layer in odd:
            layer(INPUTS)
    assert calls.count == 0


def test_segmented_serves_fit() -> None:
    weights, _ = fitted(build())
    with kernels(), oomguard.segmented(segments=5):
        assert np.allclose(fitted(build())[0], weights, atol=1e-6)


SCRIPT = """
import os, resource, sys, warnings
warnings.simplefilter("ignore")
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch
from oomguard.integrations.keras import OomGuard
torch.set_num_threads(1)
keras.utils.set_random_seed(0)
how, limit = sys.argv[1], int(sys.argv[2]) << 20
model = keras.Sequential([keras.Input((None, 4)), keras.layers.LSTM(48, return_sequences=True), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.random.default_rng(0).normal(size=(512, 75, 5)).astype("float32")[..., :4], np.ones((512, 75, 1), "float32")
model.fit(x[:2, :8], y[:2, :8], verbose=0)
data = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmData"))
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
callbacks = [OomGuard(segments=1, events=sys.argv[3])] if how == "guard" else []
history = model.fit(x, y, batch_size=512, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
print("DONE", history.history["loss"][-1], history.history.get("oomguard_microbatch", [512])[-1])
"""


def run_limited(how: str, mebibytes: int, events: Path) -> tuple[float, int] | None:
    """The last loss and the microbatch under a hard limit; None if the script fails."""
    command = [sys.executable, "-c", SCRIPT, how, str(mebibytes), str(events)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    if "DONE" not in done.stdout:
        assert any(words in done.stderr for words in ("alloc_cpu", "MemoryError", "bad_alloc")), done.stderr[-3000:]
        return None
    loss, rows = done.stdout.rpartition("DONE")[2].split()
    return float(loss), int(rows)


def test_fit_that_runs_out_of_memory_in_plain_keras_finishes_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "what happened.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "plain", "0"])
    unlimited: dict[str, Any] = {}
    exec(SCRIPT, unlimited)
    assert run_limited("plain", 110, events) is None
    guarded = run_limited("guard", 110, events)
    assert guarded is not None
    assert guarded[0] == pytest.approx(unlimited["history"].history["loss"][-1], rel=1e-5)
    assert guarded[1] < 512
    assert '"oom"' in events.read_text()


# ---- what is refused


def test_a_batch_that_can_get_no_smaller_ends_with_the_figures() -> None:
    model, guard = build(), OomGuard("64GiB", microbatch=1)
    guard.on_epoch_begin = lambda *_: setattr(model, "_compute_loss", _no_memory)
    with pytest.raises(GuardError, match="The last rung"):
        fitted(model, guard)
    assert model.train_function.__qualname__.startswith("TorchTrainer")


def _no_memory(**_: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def test_other_errors_are_raised_and_the_model_gets_its_own_step_back() -> None:
    model, guard = build(), OomGuard("64GiB")
    with pytest.raises(ValueError, match=r"incompatible|expected|shape"):
        model.fit(INPUTS[..., :3], TARGETS, verbose=0, callbacks=[guard])
    assert guard._guard is None


def test_a_step_of_the_users_own_runs_whole() -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            self.rows = len(data[0])
            return super().train_step(data)

    inside = build()
    model = Own(inside.inputs, inside.outputs)
    model.compile("sgd", "mse")
    fitted(model, OomGuard("64GiB", microbatch=2))
    assert model.rows == ROWS


def test_losses_that_do_not_add_up_are_refused_where_they_would_be_cut() -> None:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    fitted(build(loss=loss), OomGuard("64GiB"))
    with pytest.raises(MisuseError, match="other reductions than means"):
        fitted(build(loss=loss), OomGuard("64GiB", microbatch=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"budget": "6"}, "6GiB"), ({"budget": "1MiB"}, "more than this process"), ({"segments": 0}, "--segments")],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        fitted(build(), OomGuard(**options))


def test_a_compiled_step_is_refused() -> None:
    model = build()
    model.jit_compile = True
    with pytest.raises(MisuseError, match="jit_compile=False"):
        fitted(model, OomGuard("64GiB"))


def test_another_backend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(MisuseError, match=r"runs on tensorflow\. Set KERAS_BACKEND=torch before keras is imported"):
        OomGuard("6GiB")


@pytest.mark.parametrize(
    "before", ["import os; os.environ['KERAS_BACKEND'] = 'numpy'", "import sys; sys.modules['keras'] = None"]
)
def test_without_keras_or_without_its_backend_only_the_reader_works(before: str) -> None:
    """The backend numpy of Keras needs jax, which is not installed."""
    code = f"{before}\nfrom oomguard.integrations.keras import OomGuard, read_task\nOomGuard('6GiB')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Run `pip install 'oomguard[keras]'` and set KERAS_BACKEND=torch" in done.stderr.splitlines()[-1]
