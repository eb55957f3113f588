"""The layers of a Keras model and how they are connected, from a configuration of Keras 2 or 3."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from oomguard._core.errors import MisuseError, shown, visible

MAX_CALLS = 10_000  # calls of layers in a model, at most
MAX_DEPTH = 40  # models inside of models, and nested arguments
ADVICE = "Save the model again: model.save('model.keras')."
Shape = tuple[int | None, ...]  # without the rows; None: any length


class Ref(NamedTuple):
    """A tensor of a model: the layer that makes it, the number of its call, and the number of the output."""

    layer: str
    call: int
    output: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its settings."""

    name: str
    kind: str  # class name, such as LSTM
    settings: dict[str, Any]
    built: Shape | None = None  # shape of its input when it was saved, if that is known

    def wrong(self, what: str, advice: str = ADVICE) -> MisuseError:
        """The error for a layer that cannot be read."""
        return MisuseError(rule=f"Layer {self.label} cannot be read", got=what, advice=advice)

    @property
    def label(self) -> str:
        """The layer in messages."""
        return f"{visible(shown(self.name))} ({visible(self.kind[:60])})"


class Call(NamedTuple):
    """One call of a layer."""

    layer: str
    number: int
    inputs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The layers of a model, its calls in an order in which they can run, its inputs and its outputs."""

    name: str
    layers: dict[str, Layer]
    calls: tuple[Call, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shapes: dict[str, Shape] = field(default_factory=dict)  # of the inputs, by layer

    def users(self, name: str) -> list[Layer]:
        """The layers that read what a layer makes."""
        return [self.layers[call.layer] for call in self.calls if any(ref.layer == name for ref in call.inputs)]


def read_graph(saved: Any, depth: int = 0) -> Graph:
    """The graph of a serialized model: Sequential, Functional or, in Keras 2, Model."""
    layer = as_layer(saved, "the model")
    if depth > MAX_DEPTH:
        raise layer.wrong(f"models are nested more than {MAX_DEPTH} deep")
    settings = saved.get("config")
    if layer.kind == "Sequential":
        listed = settings if isinstance(settings, list) else layer.settings.get("layers")
        return _sequential(layer, listed, saved)
    if layer.kind in ("Functional", "Model") and isinstance(layer.settings.get("layers"), list):
        return _functional(layer)
    raise layer.wrong(
        "it is neither a Sequential nor a Functional model, so its file does not say how layers are connected",
        "Rebuild it as one of the two, or describe it as an oomguard.Task.",
    )


def is_model(layer: Layer) -> bool:
    """Whether a layer is a model itself."""
    return layer.kind in ("Sequential", "Functional", "Model")


def as_layer(saved: Any, usual: str = "") -> Layer:
    """A layer from its serialized form."""
    if not isinstance(saved, dict) or not isinstance(saved.get("class_name"), str):
        rule = "The layers of a Keras model have a class_name and a config"
        raise MisuseError(rule=rule, got=f"got {visible(shown(saved))}", advice=ADVICE)
    settings = saved.get("config")
    settings = settings if isinstance(settings, dict) else {}
    name = saved.get("name", settings.get("name", usual or saved["class_name"]))
    built = saved.get("build_config")
    shape = _shape(built.get("input_shape")) if isinstance(built, dict) else None
    return Layer(str(name), saved["class_name"], settings, shape)


def _shape(value: Any) -> Shape | None:
    """A shape without its rows; None if it is none."""
    if not isinstance(value, list | tuple) or not value:
        return None
    sizes = tuple(value[1:])
    good = all(size is None or (type(size) is int and 0 < size < 1 << 40) for size in sizes)
    return sizes if good else None


def input_shape(layer: Layer) -> Shape | None:
    """The shape that a layer declares for its input."""
    for name in ("batch_shape", "batch_input_shape"):
        if (shape := _shape(layer.settings.get(name))) is not None:
            return shape
    plain = layer.settings.get("shape", layer.settings.get("input_shape"))
    return _shape([None, *plain]) if isinstance(plain, list) else None


def _sequential(model: Layer, listed: Any, saved: dict[str, Any]) -> Graph:
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_CALLS:
        raise model.wrong("it has no list of layers")
    layers = [as_layer(each) for each in listed]
    shape = input_shape(layers[0]) or _shape(model.settings.get("build_input_shape")) or model.built
    shape = shape or _shape(saved.get("build_input_shape")) or layers[0].built
    if shape is None:
        advice = "Begin it with keras.Input(shape), or call model.build(shape), before it is saved."
        raise model.wrong("it was saved before it was built, so its file has no input shape", advice)
    if layers[0].kind != "InputLayer":
        layers.insert(0, Layer("input of the model", "InputLayer", {"dtype": layers[0].settings.get("dtype")}))
    first, last = (Ref(layers[index].name, 0, 0) for index in (0, -1))
    names = {layer.name: layer for layer in layers}
    if len(names) < len(layers):
        raise model.wrong("two of its layers have the same name")
    calls = [Call(b.name, 0, (Ref(a.name, 0, 0),)) for a, b in pairwise(layers)]
    shapes = {first.layer: shape}
    return Graph(name=model.name, layers=names, calls=(*calls,), inputs=(first,), outputs=(last,), shapes=shapes)


def _functional(model: Layer) -> Graph:
    layers, calls = dict[str, Layer](), dict[tuple[str, int], Call]()
    for saved in model.settings["layers"]:
        layer = as_layer(saved)
        if layer.name in layers:
            raise model.wrong(f"two of its layers have the name {visible(shown(layer.name))}")
        layers[layer.name] = layer
        nodes = saved.get("inbound_nodes", [])
        for number, node in enumerate(nodes if isinstance(nodes, list) else []):
            calls[layer.name, number] = Call(layer.name, number, (*_refs(node),))
        if len(calls) > MAX_CALLS:
            raise model.wrong(f"it has more than {MAX_CALLS:,} calls of layers")
    inputs, outputs = ((*_refs(model.settings.get(name)),) for name in ("input_layers", "output_layers"))
    shapes = {}
    for ref in inputs:
        if (shape := input_shape(layers.get(ref.layer, model))) is None:
            raise model.wrong(f"its input {visible(shown(ref.layer))} has no shape")
        shapes[ref.layer] = shape
    if not inputs or not outputs:
        raise model.wrong("it has no input_layers or no output_layers")
    ordered = _ordered(model, calls, inputs, outputs)
    return Graph(name=model.name, layers=layers, calls=ordered, inputs=inputs, outputs=outputs, shapes=shapes)


def _refs(value: Any, depth: int = 0) -> Iterator[Ref]:
    """The tensors in the arguments of a call, as Keras 3 or Keras 2 writes them. Masks are left out."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            history = value.get("config", {}).get("keras_history") if isinstance(value.get("config"), dict) else None
            yield from _refs(history, depth + 1)
            return
        for key, part in value.items():
            if "mask" not in str(key):
                yield from _refs(part, depth + 1)
    elif isinstance(value, list):
        if len(value) in (3, 4) and isinstance(value[0], str) and type(value[1]) is type(value[2]) is int:
            yield Ref(value[0], value[1], value[2])
            yield from _refs(value[3:], depth + 1)  # in Keras 2 the arguments by name
        else:
            for part in value:
                yield from _refs(part, depth + 1)


def _ordered(
    model: Layer, calls: dict[tuple[str, int], Call], inputs: tuple[Ref, ...], outputs: tuple[Ref, ...]
) -> tuple[Call, ...]:
    """The calls that the outputs need, each after those that it needs."""
    given, done, found = {ref.layer for ref in inputs}, set[tuple[str, int]](), list[Call]()
    waiting = [(ref.layer, ref.call) for ref in reversed(outputs)]
    begun = set[tuple[str, int]]()
    while waiting:
        key = waiting[-1]
        if key in done or key[0] in given:
            waiting.pop()
            continue
        if key not in calls or not calls[key].inputs:
            raise model.wrong(f"nothing makes the output {key[1]} of its layer {visible(shown(key[0]))}")
        missing = [(ref.layer, ref.call) for ref in calls[key].inputs]
        missing = [other for other in missing if other not in done and other[0] not in given]
        if not missing:
            waiting.pop()
            done.add(key)
            found.append(calls[key])
        elif key in begun:
            raise model.wrong(f"its layer {visible(shown(key[0]))} needs its own output")
        else:
            begun.add(key)
            waiting += missing
    return (*found,)
