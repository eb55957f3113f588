"""`oomguard estimate` of a Keras model: what the same model needs in PyTorch, and which knob helps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oomguard._estimate.breakdown import Estimate
from oomguard._keras.task import KerasModel
from oomguard._report.estimate import show_advice, show_task_estimate, to_json

if TYPE_CHECKING:
    from rich.console import Console


def keras_json(model: KerasModel, estimate: Estimate, advice: Sequence[str]) -> dict[str, Any]:
    """The estimate as a document, with the parameters and what differs from Keras."""
    names = {"parameters": model.parameters, "parameters_in_pytorch": model.own_parameters}
    own = names | {"loss": model.loss, "optimizer": model.optimizer, "notes": [*model.notes]}
    return to_json(estimate) | {"keras": own, "advice": [*advice]}


def show_keras(model: KerasModel, estimate: Estimate, limit: str, advice: list[str], console: "Console") -> None:
    """Print the estimate as that of a task, and advice."""
    show_task_estimate(model.oomguard_source, estimate, limit, console)
    show_advice(advice, console)


def notes_of(model: KerasModel) -> tuple[str, ...]:
    """What to know beside the figures: the parameters, and what differs from Keras."""
    count = f"The model has {model.parameters:,} parameters in Keras"
    if model.own_parameters != model.parameters:
        count += f" and {model.own_parameters:,} in PyTorch, which counts biases and statistics in another way"
    more = ["BatchNormalization looks at the whole batch: smaller microbatches change the gradient."]
    masked = [layer.label for layer in model.graph.layers.values() if layer.settings.get("mask_zero")]
    masked += [layer.label for layer in model.graph.layers.values() if layer.kind == "Masking"]
    ragged = [layer.label for layer in model.graph.layers.values() if layer.settings.get("ragged")]
    if masked or ragged:
        more.append(f"Padded steps count in full: {', '.join([*masked, *ragged][:3])}. Packed sequences need less.")
    return (f"{count}.", *model.notes, *more[not model.normalises :])
