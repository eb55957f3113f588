"""A Keras model as one module of PyTorch, for a length of its sequences."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oomguard._core.errors import MisuseError, shown, visible
from oomguard._keras.graph import Call, Graph, Layer, Ref, as_layer, is_model, read_graph
from oomguard._keras.layers import LAYERS, Shapes, TimeDistributed, make
from oomguard._keras.settings import Settings

MAX_MODELS = 8  # models inside of one another


class Network(nn.Module):
    """A graph of layers. It is first run without values, on torch's device `meta`, to learn all shapes.

    In `torch.device("meta")` it needs no memory: that is how parameters are counted.
    """

    def __init__(self, graph: Graph, shapes: Shapes, notes: list[str], *, logits: bool = False, depth: int = 0) -> None:
        super().__init__()
        if depth > MAX_MODELS:
            rule, advice = "A Keras model may have models inside", "Write its layers into one model."
            raise MisuseError(rule=rule, got=f"they are nested more than {MAX_MODELS} deep", advice=advice)
        self.graph, self.notes, self.depth = graph, notes, depth
        self.logits = {ref.layer for ref in graph.outputs} if logits else set[str]()
        self.places = dict[str, str]()  # names of modules by layer
        with torch.device("meta"):
            tensors = {ref: torch.empty(2, *shape) for ref, shape in zip(graph.inputs, shapes, strict=True)}
        for call in graph.calls:
            self._add(call, tensors)
        for ref in graph.outputs:
            if ref not in tensors:
                raise graph.layers[ref.layer].wrong(f"it has no output number {ref.output}")
        self.shapes: Shapes = [tuple(tensors[ref].shape[1:]) for ref in graph.outputs]
        last = {ref: index for index, call in enumerate(graph.calls) for ref in call.inputs}
        self.frees = {index: [ref for ref, end in last.items() if end == index] for index in last.values()}

    def _add(self, call: Call, tensors: dict[Ref, Tensor]) -> None:
        """Make the module of a layer when it is first called, and the shapes of what it returns."""
        layer = self.graph.layers[call.layer]
        missing = [ref for ref in call.inputs if ref not in tensors]
        if missing:
            raise self.graph.layers[missing[0].layer].wrong(f"it has no output number {missing[0].output}")
        inputs = [tensors[ref] for ref in call.inputs]
        shapes: Shapes = [tuple(one.shape[1:]) for one in inputs]
        notes = list[str]() if call.layer in self.places else self.notes  # a shared layer has its notes already
        with torch.device("meta"):
            ghost = self._make(layer, shapes, notes)
        try:
            made = ghost(*inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, MisuseError):
                raise
            why = visible(" ".join(str(error).split())[:200])
            raise layer.wrong(f"it does not take inputs of shape {shapes} ({why})") from None
        for number, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
            tensors[Ref(call.layer, call.number, number)] = tensor
        if call.layer not in self.places:
            name = self.places[call.layer] = self._free_name(call.layer)
            is_ghost = torch.get_default_device().type == "meta"
            self.add_module(name, ghost if is_ghost else self._make(layer, shapes, []))

    def _free_name(self, layer: str) -> str:
        """A name for the module of a layer that no other attribute has."""
        name = visible(layer).replace(".", "_") or "layer"
        while hasattr(self, name):
            name += "_"
        return name

    def _make(self, layer: Layer, shapes: Shapes, notes: list[str]) -> nn.Module:
        if layer.name in self.logits:
            layer = _without_activation(layer)
        if is_model(layer):
            saved = {"class_name": layer.kind, "config": layer.settings, "name": layer.name}
            inner = read_graph(saved, self.depth)
            if len(inner.inputs) != len(shapes):
                raise layer.wrong(f"it takes {len(inner.inputs)} inputs and gets {len(shapes)}")
            return Network(inner, shapes, notes, logits=layer.name in self.logits, depth=self.depth + 1)
        if layer.kind == "TimeDistributed":
            inside = as_layer(layer.settings.get("layer"))
            if not shapes or len(shapes[0]) < 2:
                raise layer.wrong(f"it needs time steps, and its input has the shape {shapes}")
            own = replace(inside, name=layer.name)
            return TimeDistributed(self._make(own, [shapes[0][1:]], notes))
        if layer.kind not in LAYERS:
            return self._unknown(layer, shapes, notes)
        return make(Settings(layer, notes), shapes)

    def _unknown(self, layer: Layer, shapes: Shapes, notes: list[str]) -> nn.Module:
        """Leave a layer out if all that follow it were built for the shape of its input; otherwise refuse it."""
        users = self.graph.users(layer.name)
        sizes = {tuple(size for size in user.built if size is not None) for user in users if user.built}
        own = tuple(size for size in layer.built if size is not None) if layer.built else None
        if len(shapes) == 1 and users and sizes == {own} and all(user.built for user in users):
            notes.append(f"Layer {layer.label} is not known and is left out: what it needs comes on top.")
            return nn.Identity()
        raise MisuseError(
            rule=f"oomguard does not know layer {layer.label}",
            got="what it returns is not in the file",
            advice="Replace it by layers of Keras, or describe the model as an oomguard.Task.",
        )

    def forward(self, *inputs: Tensor) -> Any:
        """The output, or a tuple of them. What no later layer needs is freed."""
        tensors = dict(zip(self.graph.inputs, inputs, strict=True))
        del inputs
        for index, call in enumerate(self.graph.calls):
            made = getattr(self, self.places[call.layer])(*(tensors[ref] for ref in call.inputs))
            for number, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
                tensors[Ref(call.layer, call.number, number)] = tensor
            del made
            for ref in self.frees.get(index, ()):
                if ref not in self.graph.outputs:
                    del tensors[ref]
        found = tuple(tensors[ref] for ref in self.graph.outputs)
        return found[0] if len(found) == 1 else found

    @property
    def keras_parameters(self) -> int:
        """The number of parameters as `model.count_params()` of Keras counts them."""
        surplus = sum(int(getattr(module, "surplus", 0)) for module in self.modules())
        return self.own_parameters - surplus

    @property
    def own_parameters(self) -> int:
        """The number of parameters in PyTorch."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def normalises(self) -> bool:
        """Whether a layer looks at the whole batch, so that microbatches change the gradient."""
        return any(isinstance(module, nn.BatchNorm1d) for module in self.modules())


def _without_activation(layer: Layer) -> Layer:
    """The last layer without softmax or sigmoid: PyTorch's losses take logits."""
    settings = {**layer.settings}
    if layer.kind == "TimeDistributed" and isinstance(settings.get("layer"), dict):
        inner = as_layer(settings["layer"])
        settings["layer"] = settings["layer"] | {"config": _without_activation(inner).settings}
    elif layer.kind == "Softmax":
        return replace(layer, kind="Identity")
    elif settings.get("activation") in ("softmax", "sigmoid"):
        settings["activation"] = "linear"
    return replace(layer, settings=settings)


def first_shapes(graph: Graph, steps: int | None) -> Shapes:
    """The shapes of the inputs for so many time steps; None keeps those of the file."""
    own, found = own_steps(graph), Shapes()
    for ref in graph.inputs:
        sizes = [*graph.shapes[ref.layer]]
        if steps is not None and is_timed(graph, ref) and sizes[0] in (None, own):
            sizes[0] = steps
        if None in sizes:
            rule = f"Input {visible(shown(ref.layer))} must have a size in every dimension but the time steps"
            raise MisuseError(rule=rule, got=f"its shape is {graph.shapes[ref.layer]}", advice="Give it that size.")
        found.append(tuple(size for size in sizes if size is not None))
    return found


def is_timed(graph: Graph, ref: Ref) -> bool:
    """Whether the first dimension of an input counts time steps: tokens, or features of every step."""
    shape, users = graph.shapes[ref.layer], graph.users(ref.layer)
    return len(shape) > 1 or shape == (None,) or (len(shape) == 1 and any(user.kind == "Embedding" for user in users))


def own_steps(graph: Graph) -> int | None:
    """The time steps of the file; None if any number is taken."""
    sizes = [graph.shapes[ref.layer][0] for ref in graph.inputs if is_timed(graph, ref)]
    return None if not sizes or None in sizes else sizes[0]
