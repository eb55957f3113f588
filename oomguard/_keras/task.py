"""The task of a Keras model: the module, the loss and the optimizer that do in PyTorch what the file says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, check_whole, shown, visible
from oomguard._keras.graph import Graph, as_layer, read_graph
from oomguard._keras.read import Saved, read_saved
from oomguard._spec.spec import MAX_SEQ
from oomguard._task.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from oomguard._keras.network import Network

CLASSES = ("categorical_crossentropy", "categoricalcrossentropy", "categoricalfocal", "categorical_focal")
BINARY = ("binary_crossentropy", "binarycrossentropy", "binary_focal", "binaryfocal")
NUMBERS = ("error", "mse", "mae", "mape", "msle", "huber", "cosine", "log_cosh", "logcosh", "poisson", "hinge", "kl")
OPTIMIZERS = {
    **{"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"},
    **{"adadelta": "Adadelta", "adamax": "Adamax", "nadam": "NAdam", "adafactor": "Adafactor"},
}
"""PyTorch's optimizers by the name that Keras gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasModel:
    """A model that was read from a file, for sequences of some length. Calling it builds the module."""

    oomguard_source: str  # the path of the file
    graph: Graph
    loss: str  # cross-entropy, binary or mse
    optimizer: str  # name of PyTorch's optimizer
    momentum: float
    steps: int  # time steps, if its inputs have any
    flexible: bool  # whether the layers take any number of time steps
    parameters: int  # as Keras counts them
    own_parameters: int  # in PyTorch
    normalises: bool  # whether it looks at the whole batch
    notes: tuple[str, ...] = field(default=())

    def __call__(self) -> "nn.Module":
        """Build the module, with new weights."""
        return _network(self.graph, self.steps, self.loss)

    def batch(self, rows: int, steps: int) -> Any:
        """Random inputs and targets. A model with a layer that depends on the length gets that length."""
        return _make_batch(self.graph, self.loss, rows, steps if self.flexible else self.steps)

    def make_optimizer(self, parameters: "Iterator[nn.Parameter]") -> "Optimizer":
        """The optimizer with which the model was compiled."""
        import torch

        more: dict[str, Any] = {"lr": 0.01, "momentum": self.momentum} if self.optimizer == "SGD" else {}
        made: Optimizer = getattr(torch.optim, self.optimizer)(parameters, **more)
        return made


def read_task(path: str, steps: int | None = None) -> Task:
    """The task of a Keras model in a file, with `steps` time steps, or those that the file has."""
    check_whole("steps", steps, 1, MAX_SEQ)
    return as_task(read_model(path, steps))


def as_task(model: KerasModel) -> Task:
    """The task of a model."""
    return Task(model=model, loss=LOSSES[model.loss], batch=model.batch, optimizer=model.make_optimizer)


def read_model(path: str, steps: int | None = None) -> KerasModel:
    """The model in a file. Raises `MisuseError` with the name of the layer that cannot be read."""
    import torch

    from oomguard._keras.network import own_steps

    saved = read_saved(path)
    notes = list[str]()
    try:
        graph = read_graph(saved.model)
        given = own_steps(graph) if steps is None else steps
        if given is None and any(None in shape for shape in graph.shapes.values()):
            advice = "Give --seq 1000, or steps=1000 in Python."
            got = f"{visible(path)} takes any length"
            raise MisuseError(rule="The number of time steps must be known", got=got, advice=advice)
        loss, optimizer, momentum = _loss(saved, graph, notes), *_optimizer(saved, notes)
        with torch.device("meta"):
            network = _network(graph, given or 1, loss, notes)
            flexible = given is None or _sizes(network) == _longer(graph, given, loss)
    except RecursionError:
        rule, got = "A Keras model is read layer by layer", f"{visible(path)} is nested too deeply"
        raise MisuseError(rule=rule, got=got, advice="Write its layers into one model.") from None
    if steps is not None and not flexible and steps != (own_steps(graph) or steps):
        notes.append(f"With {steps:,} steps, layers that depend on the length have other numbers of parameters.")
    return KerasModel(
        oomguard_source=path, graph=graph, loss=loss, optimizer=optimizer, momentum=momentum, steps=given or 1,
        flexible=flexible, parameters=network.keras_parameters, own_parameters=network.own_parameters,
        normalises=network.normalises, notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _network(graph: Graph, steps: int, loss: str, notes: list[str] | None = None) -> "Network":
    from oomguard._keras.network import Network, first_shapes

    return Network(graph, first_shapes(graph, steps), [] if notes is None else notes, logits=loss != "mse")


def _sizes(network: "nn.Module") -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in network.parameters()]


def _longer(graph: Graph, steps: int, loss: str) -> list[tuple[int, ...]] | None:
    """The shapes of the parameters for twice the steps; None if such sequences are not taken."""
    try:
        return _sizes(_network(graph, 2 * steps, loss))
    except MisuseError:
        return None


def _loss(saved: Saved, graph: Graph, notes: list[str]) -> str:
    """The kind of loss: that of `compile` or, where the file has none, that of the last activation."""
    name = _name(saved.loss)
    for kind, words in (("cross-entropy", CLASSES), ("binary", BINARY), ("mse", NUMBERS)):
        if any(word in name for word in words):
            return kind
    last = _last_activation(graph)
    kind = {"softmax": "cross-entropy", "sigmoid": "binary"}.get(last, "mse")
    why = f"its loss {visible(shown(saved.loss))} is not known" if name else "it was not compiled"
    notes.append(f"Loss {kind}, by its last activation ({visible(last)}), since {why}.")
    return kind


def _name(value: Any) -> str:
    """The name of a loss or an optimizer; the first one of several."""
    for _ in range(8):
        if isinstance(value, dict):
            value = value.get("class_name") or next(iter(value.values()), None)
        elif isinstance(value, list):
            value = value[0] if value else None
    return value.lower() if isinstance(value, str) else ""


def _last_activation(graph: Graph) -> str:
    layer = graph.layers[graph.outputs[0].layer]
    if layer.kind == "TimeDistributed":
        layer = as_layer(layer.settings.get("layer"))
    value = "softmax" if layer.kind == "Softmax" else layer.settings.get("activation")
    return value if isinstance(value, str) else "linear"


def _optimizer(saved: Saved, notes: list[str]) -> tuple[str, float]:
    """The name of PyTorch's optimizer, and its momentum."""
    name = _name(saved.optimizer)
    config = saved.optimizer.get("config") if isinstance(saved.optimizer, dict) else None
    momentum = config.get("momentum") if isinstance(config, dict) else 0.0
    if name not in OPTIMIZERS:
        why = f"{visible(shown(name))} has no counterpart in PyTorch" if name else "the file has none"
        notes.append(f"Optimizer Adam, since {why}.")
    good = isinstance(momentum, int | float) and not isinstance(momentum, bool) and 0 <= momentum < 1
    return OPTIMIZERS.get(name, "Adam"), float(momentum) if good and momentum is not None else 0.0


def _make_batch(graph: Graph, loss: str, rows: int, steps: int) -> Any:
    import torch

    from oomguard._keras.network import first_shapes

    words = _words(graph)
    inputs = tuple(
        torch.randint(words, (rows, *shape)) if _is_whole(graph, ref.layer) else torch.rand(rows, *shape)
        for ref, shape in zip(graph.inputs, first_shapes(graph, steps), strict=True)
    )
    with torch.device("meta"):
        shapes = _network(graph, steps, loss).shapes
    if loss == "cross-entropy":
        return inputs, tuple(torch.randint(shape[-1], (rows, *shape[:-1])) for shape in shapes)
    return inputs, tuple(torch.rand(rows, *shape) for shape in shapes)


def _is_whole(graph: Graph, name: str) -> bool:
    """Whether an input has whole numbers, such as the indices of words."""
    dtype = graph.layers[name].settings.get("dtype")
    return (isinstance(dtype, str) and "int" in dtype) or any(user.kind == "Embedding" for user in graph.users(name))


def _words(graph: Graph) -> int:
    """An index below this one is in every embedding of the model."""
    sizes = [layer.settings.get("input_dim") for layer in graph.layers.values() if layer.kind == "Embedding"]
    return min((size for size in sizes if type(size) is int and size > 0), default=2)


def _mean(of: Callable[..., "Tensor"]) -> Callable[..., "Tensor"]:
    """The sum of a loss over the outputs of a model."""

    def loss(model: "nn.Module", batch: Any) -> "Tensor":
        inputs, targets = batch
        made = model(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        del made
        return sum(of(one, target) for one, target in zip(outputs, targets, strict=True))  # type: ignore[return-value]

    return loss


def _cross_entropy(logits: "Tensor", targets: "Tensor") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def _binary(logits: "Tensor", targets: "Tensor") -> "Tensor":
    from torch.nn.functional import binary_cross_entropy_with_logits

    return binary_cross_entropy_with_logits(logits, targets)


def _squares(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    from torch.nn.functional import mse_loss

    return mse_loss(outputs, targets)


LOSSES = {"cross-entropy": _mean(_cross_entropy), "binary": _mean(_binary), "mse": _mean(_squares)}
"""Losses of a model on a batch, by kind."""
