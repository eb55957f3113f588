"""Keras 3: a callback for `model.fit` on PyTorch, and models of Keras as tasks.

- `read_task` reads a model from a file, without Keras, as a task for `oomguard.estimate` and all that takes tasks.
- `OomGuard` is a callback: `model.fit(..., callbacks=[OomGuard("6GiB")])` with `KERAS_BACKEND=torch`.
- `kernels` lets LSTM and GRU layers of Keras run in PyTorch's kernels on the CPU, where Keras runs Python loops. Only
  calls of those kernels can run in segments.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, check_whole
from oomguard._keras.task import read_task

try:
    import keras
    from keras.callbacks import Callback

    missing = ""
except ImportError as error:  # `read_task` needs no Keras
    Callback, missing = object, str(error)

if TYPE_CHECKING:
    from torch import Tensor

    from oomguard._guard import Guard

__all__ = ["OomGuard", "kernels", "read_task"]

MEANS, SUMS = ("sum_over_batch_size", "mean"), ("sum",)
"""Reductions of losses of which pieces of a batch add up, by their share of the rows or as they are."""


def _check_backend(what: str) -> None:
    if missing:
        got = f"it cannot be imported ({missing})"
        advice = "Run `pip install 'oomguard[keras]'` and set KERAS_BACKEND=torch."
        raise MisuseError(rule=f"{what} needs Keras 3", got=got, advice=advice)
    if keras.backend.backend() != "torch":
        advice = "Set KERAS_BACKEND=torch before keras is imported, or read the model: oomguard estimate --model FILE."
        got = f"it runs on {keras.backend.backend()}"
        raise MisuseError(rule=f"{what} needs Keras on PyTorch", got=got, advice=advice)


@contextmanager
def kernels() -> Iterator[bool]:
    """Run LSTM and GRU layers of Keras in PyTorch's kernels, also on the CPU, inside a `with` block.

    The torch backend of Keras calls PyTorch's kernels on CUDA only, and runs a Python loop over the time steps on the
    CPU, or if the kernel fails for whatever reason, such as a lack of memory. The results are equal up to rounding. Not
    reached are layers with a mask, SimpleRNN, other activations than tanh and sigmoid, `recurrent_dropout` and
    `reset_after=False`: Keras has its loops for them on all devices.

    Yields whether it took effect: it does not in a version of Keras whose backend has other names.

    >>> import oomguard
    >>> with kernels() as active, oomguard.segmented(segments=4):
    ...     pass  # model.fit(...)
    >>> active
    True
    """
    _check_backend("kernels()")
    import torch
    from keras import activations, ops

    rnn: Any = import_module("keras.src.backend.torch.rnn")  # the package has a function of that name
    names = ("_fallback_lstm", "_fallback_gru", "_cudnn_lstm", "_cudnn_gru")
    if not all(hasattr(rnn, name) for name in names):
        yield False
        return
    loops = rnn._fallback_lstm, rnn._fallback_gru

    def usual(activation: Any, gates: Any, bias: "Tensor | None") -> bool:
        tanh = activation in (activations.tanh, torch.tanh, ops.tanh)
        return tanh and gates in (activations.sigmoid, torch.sigmoid, ops.sigmoid) and bias is not None

    def lstm(
        x: "Tensor", h: "Tensor", c: "Tensor", kernel: Any, recurrent: Any, bias: Any, activation: Any, gates: Any,
        return_sequences: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if x.is_meta or not batch_first or not usual(activation, gates, bias):
            return loops[0](x, h, c, kernel, recurrent, bias, activation, gates, return_sequences, batch_first)
        return rnn._cudnn_lstm(x, h, c, kernel, recurrent, bias, return_sequences=return_sequences, device=x.device)

    def gru(
        x: "Tensor", h: "Tensor", kernel: Any, recurrent: Any, bias: Any, activation: Any, gates: Any, sequences: bool
    ) -> Any:
        if x.is_meta or not usual(activation, gates, bias):
            return loops[1](x, h, kernel, recurrent, bias, activation, gates, sequences)
        return rnn._cudnn_gru(x, h, kernel, recurrent, bias, return_sequences=sequences, device=x.device)

    rnn._fallback_lstm, rnn._fallback_gru = lstm, gru
    try:
        yield True
    finally:
        rnn._fallback_lstm, rnn._fallback_gru = loops


class OomGuard(Callback):  # type: ignore[misc]
    """Keeps `model.fit` within a budget, with `KERAS_BACKEND=torch`.

    A batch that runs out of memory runs again in smaller pieces whose gradients add up to that of the batch; when
    memory is no longer tight, pieces grow again. Calls of LSTM and GRU that would not fit run in segments (`segments`
    fixes their number). `budget` is bytes or text such as "6GiB" (default: what is free); `microbatch` is the number of
    rows to begin with (default: the whole batch); `events` is a file for what happens.

    The logs of every epoch, and with them the history, get `oomguard_peak_bytes` and `oomguard_microbatch`.

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(4), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> inputs, targets = np.zeros((8, 20, 3), "float32"), np.zeros((8, 1), "float32")
    >>> guard = OomGuard("64GiB", microbatch=2)
    >>> history = model.fit(inputs, targets, batch_size=8, verbose=0, callbacks=[guard])
    >>> history.history["oomguard_microbatch"]
    [2]
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        microbatch: int | None = None,
        segments: int | None = None,
        events: str | None = None,
    ) -> None:
        _check_backend("OomGuard")
        from oomguard._core.units import read_budget
        from oomguard._rnn.segmented import MAX_SEGMENTS
        from oomguard._spec.spec import MAX_BATCH

        super().__init__()
        check_whole("segments", segments, 1, MAX_SEGMENTS)
        check_whole("microbatch", microbatch, 1, MAX_BATCH)
        self.budget, self.microbatch, self.segments, self.events = read_budget(budget), microbatch, segments, events
        self.peak_bytes = 0  # the most bytes that the process used, as far as the batches show
        self._guard: Guard | None = None
        self._plain: Any = None  # Keras's own function for a step
        self._weights: str | None = None  # how pieces add up; None: they do not

    def on_train_begin(self, logs: Any = None) -> None:
        """Put the guarded step in the place of Keras's."""
        from oomguard._guard import make_guard

        model = self.model
        if getattr(model, "jit_compile", False) is True:
            got, advice = "jit_compile is on", "Compile the model with jit_compile=False."
            raise MisuseError(rule="OomGuard runs the step itself", got=got, advice=advice)
        device = str(model.weights[0].value.device) if model.weights else "cpu"
        self._weights = self._find_weights()
        guard = make_guard(None, self.budget, self.microbatch, device, self.events)
        self._guard, self._plain = guard.__enter__(), model.train_function
        model.train_function = self._run

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read the memory that is used."""
        if self._guard is not None:
            self.peak_bytes = max(self.peak_bytes, self._guard.device.reading().peak_bytes)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell peak and pieces in the logs."""
        if logs is not None and self._guard is not None:
            logs["oomguard_peak_bytes"], logs["oomguard_microbatch"] = self.peak_bytes, self._guard.rows

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model its own step back, and lift the limit."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__()
            self.model.train_function = self._plain

    def _find_weights(self) -> str | None:
        """How the losses of pieces add up to that of the batch: by their shares, or as sums."""
        listed = keras.tree.flatten(self.model.loss)
        kinds = {getattr(loss, "reduction", MEANS[0]) for loss in listed if loss is not None}
        if kinds <= {*MEANS}:
            return "shares"
        return "sums" if kinds <= {*SUMS} and not self.model.losses else None

    def _run(self, data: Any) -> Any:
        """One step of `fit`. Keras tells callbacks of no error, so the end comes here then."""
        try:
            return self._step(data[0])
        except BaseException:
            self.on_train_end()
            raise

    def _step(self, data: Any) -> Any:
        import torch

        model, guard = self.model, self._guard
        assert guard is not None, "on_train_begin comes first"
        own = type(model).train_step is not keras.Model.train_step
        with self._way():
            if own:  # whatever it does, it is run whole
                return model.train_step(data)
            batch, done = keras.utils.unpack_x_y_sample_weight(data), list[Any]()
            for attempt in guard.attempts():
                done = []
                with attempt:
                    self._add_gradients(batch, done)
        variables = model.trainable_weights[:]
        with torch.no_grad():
            model.optimizer.apply([variable.value.grad for variable in variables], variables)
        rows, total = sum(one[0] for one in done), sum(one[1] for one in done)
        loss = sum(one[2] * (one[1] / total) for one in done) if self._weights == "shares" else sum(o[2] for o in done)
        model._loss_tracker.update_state(loss, sample_weight=rows)
        for _, _, _, piece, outputs in done:
            x, y, sample_weight = piece
            logs = model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        return logs

    def _add_gradients(self, batch: Any, done: list[Any]) -> None:
        """Run the pieces of a batch and add up their gradients. `done` gets rows, weight, loss, piece and outputs."""
        import torch

        model, guard = self.model, self._guard
        assert guard is not None
        model.zero_grad()
        for piece, share in guard.pieces(batch):
            if share < 1 and self._weights is None:
                rule, got = "Pieces of a batch must add up", "the losses of this model have other reductions than means"
                raise MisuseError(rule=rule, got=got, advice="Use smaller batches, or a loss that is a mean.")
            x, y, sample_weight = piece
            outputs = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
            weight = self._weight(share, outputs)
            scaled = loss if self._weights != "shares" else loss * weight
            model.optimizer.scale_loss(scaled).backward()
            rows = next(part for part in keras.tree.flatten(x) if part is not None).shape[0]
            done.append((rows, weight, loss.detach(), piece, keras.tree.map_structure(_detached, outputs)))
            del outputs, loss, scaled
        total = sum(one[1] for one in done)
        if self._weights == "shares" and len(done) > 1 and abs(total - 1) > 1e-9:  # masked steps were counted
            with torch.no_grad():
                for variable in model.trainable_weights:
                    if variable.value.grad is not None:
                        variable.value.grad /= total

    def _weight(self, share: float, outputs: Any) -> float:
        """The weight of a piece: its share of the rows or, if steps are masked, the number of those that count."""
        listed = keras.tree.flatten(outputs)
        masks = [mask for one in listed if (mask := getattr(one, "_keras_mask", None)) is not None]
        if not masks or share == 1:
            return share
        if len(listed) > 1:
            got, advice = "several outputs have masks of their own", "Use smaller batches."
            raise MisuseError(rule="Pieces of a batch must add up", got=got, advice=advice)
        return float(masks[0].sum())

    @contextmanager
    def _way(self) -> Iterator[None]:
        """Run recurrent layers in kernels and, where they would not fit, in segments."""
        from oomguard._rnn.segmented import segmented

        assert self._guard is not None
        with ExitStack() as stack:
            if stack.enter_context(kernels()) and self.segments != 1:
                how: Any = (
                    {"segments": self.segments} if self.segments else {"budget": self._guard.watch.available_bytes()}
                )
                stack.enter_context(segmented(**how))
            yield


def _detached(tensor: "Tensor") -> "Tensor":
    """The outputs without their graph. Metrics need their mask."""
    found = tensor.detach()
    if (mask := getattr(tensor, "_keras_mask", None)) is not None:
        found._keras_mask = mask  # type: ignore[attr-defined]
    return found
