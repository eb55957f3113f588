"""The layers of Keras as modules of PyTorch, by class name. Shapes are those of Keras: rows, steps, features."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from oomguard._core.errors import visible
from oomguard._keras.cells import KINDS, bidirectional, recurrent
from oomguard._keras.settings import ACTIVATIONS, Function, Settings

Shapes = list[tuple[int, ...]]  # of the inputs, without the rows
Maker = Callable[[Settings, Shapes], nn.Module]
IDENTITIES = ("Masking", "ActivityRegularization", "InputLayer", "Identity")
DROPOUTS = ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "AlphaDropout", "GaussianDropout", "GaussianNoise")
RANDOM_IMAGES = ("RandomFlip", "RandomRotation", "RandomZoom", "RandomContrast", "RandomBrightness")
MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"Add": torch.add, "Subtract": torch.sub, "Multiply": torch.mul, "Average": torch.add},
    **{"Maximum": torch.maximum, "Minimum": torch.minimum},
}


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Call the function."""
        return self.function(*inputs)


class Dense(nn.Linear):
    """A linear layer with an activation."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Function) -> None:
        super().__init__(inputs, outputs, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


class Lookup(nn.Embedding):
    """An embedding that takes indices of any type, as Keras does."""

    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices.long())


class Convolution(nn.Module):
    """A convolution over 1 to 3 dimensions, with channels last as in Keras."""

    def __init__(self, settings: Settings, width: int, rank: int, *, depthwise: bool = False) -> None:
        super().__init__()
        size = settings.sizes("kernel_size", rank)
        self.stride = settings.sizes("strides", rank, 1)
        dilation = settings.sizes("dilation_rate", rank, 1)
        padding = settings.choice("padding", "valid", ("valid", "same", "causal"))
        reach = [(k - 1) * d for k, d in zip(size, dilation, strict=True)]
        before = [r if padding == "causal" else r // 2 if padding == "same" else 0 for r in reach]
        after = [r - b if padding == "same" else 0 for r, b in zip(reach, before, strict=True)]
        self.pad = [side for pair in reversed([*zip(before, after, strict=True)]) for side in pair]
        groups = width if depthwise else settings.whole("groups", 1)
        count = width * settings.whole("depth_multiplier", 1) if depthwise else settings.whole("filters")
        self.kernel = _CONVOLUTIONS[rank - 1](
            width, count, size, self.stride, dilation=dilation, groups=groups, bias=settings.switch("use_bias", True)
        )
        self.activation = settings.activation()

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        x = F.pad(x, self.pad) if any(self.pad) else x
        return self.activation(self.kernel(x)).movedim(1, -1)


_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAXIMA: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_MEANS: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


class TimeDistributed(nn.Module):
    """Runs a layer on every time step: rows and steps become one dimension."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.flatten(0, 1))
        return y.view(*x.shape[:2], *y.shape[1:])


class Normalisation(nn.Module):
    """Batch normalisation over the last dimension. Keras counts its running statistics as parameters."""

    def __init__(self, width: int, settings: Settings) -> None:
        super().__init__()
        affine = settings.switch("scale", True), settings.switch("center", True)
        self.norm = nn.BatchNorm1d(width, affine=any(affine))
        self.surplus = -2 * width + (width if sum(affine) == 1 else 0)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x)
        y: Tensor = self.norm(x.flatten(0, -2))
        return y.view_as(x)


class MultiHeadAttention(nn.Module):
    """Attention with several heads, as Keras's layer of that name."""

    def __init__(self, settings: Settings, shapes: Shapes) -> None:
        super().__init__()
        query, value = shapes[0][-1], shapes[min(1, len(shapes) - 1)][-1]
        self.heads, keys = settings.whole("num_heads"), settings.whole("key_dim")
        values = settings.layer.settings.get("value_dim") or keys
        bias = settings.switch("use_bias", True)
        self.query, self.key = (nn.Linear(size, self.heads * keys, bias) for size in (query, value))
        self.value = nn.Linear(value, self.heads * values, bias)
        self.out = nn.Linear(self.heads * values, query, bias)

    def forward(self, query: Tensor, value: Tensor, *key: Tensor) -> Tensor:
        parts = self.query(query), self.key(key[0] if key else value), self.value(value)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


def _attention(query: Tensor, value: Tensor, *key: Tensor) -> Tensor:
    return torch.softmax(query @ (key[0] if key else value).transpose(-1, -2), -1) @ value


class AdditiveAttention(nn.Module):
    """Attention by the tanh of sums of queries and keys, which needs steps x steps x features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, query: Tensor, value: Tensor, *key: Tensor) -> Tensor:
        sums = torch.tanh(query.unsqueeze(2) + (key[0] if key else value).unsqueeze(1))
        return torch.softmax(sums @ self.scale, -1) @ value


def _pool(settings: Settings, shapes: Shapes) -> nn.Module:
    kind = settings.layer.kind
    rank = int(kind[-2])
    size = settings.sizes("pool_size", rank, 2)
    strides = settings.sizes("strides", rank, [*size])
    same = settings.choice("padding", "valid", ("valid", "same")) == "same"
    function = (_MAXIMA if kind.startswith("Max") else _MEANS)[rank - 1]

    def run(x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        if same:
            needed = [max(0, (-(-n // s) - 1) * s + k - n) for n, s, k in zip(x.shape[2:], strides, size, strict=True)]
            x = F.pad(x, [side for most in reversed(needed) for side in (most // 2, most - most // 2)])
        y: Tensor = function(x, size, strides)
        return y.movedim(1, -1)

    return Apply(run)


def _global_pool(settings: Settings, shapes: Shapes) -> nn.Module:
    places, keep = [*range(1, len(shapes[0]))], settings.switch("keepdims", False)
    if "Max" in settings.layer.kind:
        return Apply(lambda x: x.amax(places, keepdim=keep))
    return Apply(lambda x: x.mean(places, keepdim=keep))


def _merge(settings: Settings, shapes: Shapes) -> nn.Module:
    function, share = MERGES[settings.layer.kind], 1.0
    if settings.layer.kind == "Average":
        share = 1 / len(shapes)

    def run(*inputs: Tensor) -> Tensor:
        if len(inputs) == 1:  # the other one is a number
            return inputs[0] + 1.0
        total = inputs[0]
        for other in inputs[1:]:
            total = function(total, other)
        return total * share if share != 1 else total

    return Apply(run)


def _concatenate(settings: Settings, shapes: Shapes) -> nn.Module:
    axis = settings.whole("axis", -1, low=-8)
    return Apply(lambda *inputs: torch.cat(inputs, axis))


def _reshape(settings: Settings, shapes: Shapes) -> nn.Module:
    wanted = settings.layer.settings.get("target_shape")
    if not isinstance(wanted, list) or not all(type(size) is int for size in wanted):
        raise settings.wrong("target_shape", "whole numbers", wanted)
    return Apply(lambda x: x.reshape(len(x), *wanted))


def _permute(settings: Settings, shapes: Shapes) -> nn.Module:
    order = settings.sizes("dims", len(shapes[0]))
    return Apply(lambda x: x.permute(0, *order))


def _repeat(settings: Settings, shapes: Shapes) -> nn.Module:
    count = settings.whole("n")
    return Apply(lambda x: x.unsqueeze(1).repeat(1, count, 1))


def _cropped(settings: Settings, shapes: Shapes) -> nn.Module:
    left, right = settings.sizes("cropping", 2, 1, low=0)
    return Apply(lambda x: x[:, left : x.shape[1] - right])


def _padded(settings: Settings, shapes: Shapes) -> nn.Module:
    left, right = settings.sizes("padding", 2, 1, low=0)
    return Apply(lambda x: F.pad(x, (0, 0, left, right)))


def _upsampled(settings: Settings, shapes: Shapes) -> nn.Module:
    count = settings.whole("size", 2)
    return Apply(lambda x: x.repeat_interleave(count, 1))


def _dropout(settings: Settings, shapes: Shapes) -> nn.Module:
    rate = settings.number("stddev" if settings.layer.kind == "GaussianNoise" else "rate", 0.0)
    if settings.layer.kind.startswith("Spatial"):  # one mask for all places
        ones = (1,) * (len(shapes[0]) - 1)
        return Apply(lambda x: x * F.dropout(x.new_ones(len(x), *ones, x.shape[-1]), rate))
    return nn.Dropout(rate)


def _activation(settings: Settings, shapes: Shapes) -> nn.Module:
    names = {"ReLU": "relu", "LeakyReLU": "leaky_relu", "ELU": "elu", "Softmax": "softmax"}
    kind = settings.layer.kind
    return Apply(ACTIVATIONS[names[kind]] if kind in names else settings.activation())


class PReLU(nn.Module):
    """A slope for negative numbers, one for each feature and each place that is not shared."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.slope)


def _prelu(settings: Settings, shapes: Shapes) -> nn.Module:
    shared = settings.layer.settings.get("shared_axes") or []
    shared = shared if isinstance(shared, list) else [shared]
    return PReLU(tuple(1 if place + 1 in shared else size for place, size in enumerate(shapes[0])))


def _embedding(settings: Settings, shapes: Shapes) -> nn.Module:
    return Lookup(settings.whole("input_dim"), settings.whole("output_dim"))


def _dense(settings: Settings, shapes: Shapes) -> nn.Module:
    return Dense(shapes[0][-1], settings.whole("units"), settings.switch("use_bias", True), settings.activation())


def _convolution(settings: Settings, shapes: Shapes) -> nn.Module:
    kind = settings.layer.kind
    return Convolution(settings, shapes[0][-1], int(kind[-2]), depthwise=kind.startswith("Depthwise"))


def _layer_norm(settings: Settings, shapes: Shapes) -> nn.Module:
    module = nn.LayerNorm(shapes[0][-1], bias=settings.switch("center", True))
    if not settings.switch("scale", True):
        module.weight = None  # type: ignore[assignment]
    return module


def _identity(settings: Settings, shapes: Shapes) -> nn.Module:
    return nn.Identity()


def _left_out(settings: Settings, shapes: Shapes) -> nn.Module:
    settings.note("it only changes images, and is left out")
    return nn.Identity()


def _rescaling(settings: Settings, shapes: Shapes) -> nn.Module:
    return Apply(lambda x: x * 0.5 + 0.5)


def _normalization(settings: Settings, shapes: Shapes) -> nn.Module:
    module = Apply(lambda x: (x - 0.5) / 0.5)
    if settings.layer.settings.get("mean") is None:  # it was adapted to data, and keeps what it has found
        module.surplus = -2 * shapes[0][-1] - 1  # type: ignore[assignment]
    return module


LAYERS: dict[str, Maker] = {
    **dict.fromkeys(IDENTITIES, _identity),
    **dict.fromkeys(RANDOM_IMAGES, _left_out),
    **dict.fromkeys(DROPOUTS, _dropout),
    **dict.fromkeys(MERGES, _merge),
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv1D", "DepthwiseConv2D"), _convolution),
    **dict.fromkeys([f"{what}Pooling{n}D" for what in ("Max", "Average") for n in (1, 2, 3)], _pool),
    **dict.fromkeys([f"Global{what}Pooling{n}D" for what in ("Max", "Average") for n in (1, 2, 3)], _global_pool),
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax"), _activation),
    **dict.fromkeys(
        (*(kind for kind in KINDS if not kind.endswith("Cell")), "RNN"),
        lambda settings, shapes: recurrent(settings, shapes[0][-1]),
    ),
    "Bidirectional": lambda settings, shapes: bidirectional(settings, shapes[0][-1]),
    "Embedding": _embedding,
    "Dense": _dense,
    "PReLU": _prelu,
    "Flatten": lambda settings, shapes: nn.Flatten(),
    "Reshape": _reshape,
    "Permute": _permute,
    "RepeatVector": _repeat,
    "Cropping1D": _cropped,
    "ZeroPadding1D": _padded,
    "UpSampling1D": _upsampled,
    "Concatenate": _concatenate,
    "BatchNormalization": lambda settings, shapes: Normalisation(shapes[0][-1], settings),
    "LayerNormalization": _layer_norm,
    "Rescaling": _rescaling,
    "Normalization": _normalization,
    "Attention": lambda settings, shapes: Apply(_attention),
    "AdditiveAttention": lambda settings, shapes: AdditiveAttention(shapes[0][-1]),
    "MultiHeadAttention": MultiHeadAttention,
}
"""What makes the module of a layer, by class name. A layer that is not here is refused, or left out by name."""


def make(settings: Settings, shapes: Shapes) -> nn.Module:
    """The module of a layer for inputs of these shapes."""
    layer = settings.layer
    try:
        return LAYERS[layer.kind](settings, shapes)
    except (RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
        if type(error).__module__.startswith("oomguard"):
            raise
        why = visible(" ".join(str(error).split())[:200])
        raise layer.wrong(f"it does not take inputs of shape {shapes} ({why})") from None
