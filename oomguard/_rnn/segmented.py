"""Segments for any model: `segmented` for all recurrent calls of a block of code, `segment` for those of one model."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from oomguard._core.errors import MisuseError, check_whole
from oomguard._core.units import read_budget
from oomguard._rnn.calls import CELLS, read_call, run_in_pieces
from oomguard._rnn.room import choose_segments, read_request

MAX_SEGMENTS = 1_000_000_000
SINGLE = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)  # functions for one step
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Rule:
    """How many segments a call gets: a fixed number, or as few as a budget allows."""

    segments: int | None
    budget_bytes: int | None
    recompute: bool


def _rule(segments: int | None, budget: int | str | None, recompute: bool) -> Rule:
    check_whole("segments", segments, 1, MAX_SEGMENTS)
    budget_bytes = read_budget(budget)
    if (segments is None) == (budget_bytes is None):
        got = "got neither" if segments is None else "got both"
        raise MisuseError(rule="Give either segments= or budget=", got=got, advice="For example segments=8.")
    if budget_bytes is not None and not recompute:
        got = "recompute=False keeps everything that a call needs"
        raise MisuseError(rule="A budget needs recomputation", got=got, advice="Leave recompute= out.")
    return Rule(segments, budget_bytes, recompute)


class _Segmented(TorchFunctionMode, ContextDecorator):
    """Runs the recurrent calls of this thread as a rule says, and everything else as it is."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in CELLS and torch.is_grad_enabled():
            call, rule = read_call(func, args, kwargs), self.rule
            if call.needs_gradient:
                segments = rule.segments
                if rule.budget_bytes is not None:
                    segments = choose_segments(read_request(call), rule.budget_bytes)
                if segments is not None and min(segments, len(call.sizes)) > 1:
                    return run_in_pieces(call, segments, recompute=rule.recompute)
        elif (
            func in SINGLE and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0
        ):  # not in a backward pass
            _warn_of(func.__name__)
        return func(*args, **kwargs)


@cache
def _warn_of(name: str) -> None:
    """Warn of a function for one step, the first time that it is called."""
    advice = "Write the body of the loop as a function for oomguard.scan."
    warnings.warn(f"A loop over torch.{name} does not run in segments. {advice}", stacklevel=3)


def is_segmented() -> bool:
    """Whether this thread is inside `segmented`, or inside a module that `segment` has changed."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, _Segmented) for mode in modes)


def segmented(segments: int | None = None, *, budget: int | str | None = None, recompute: bool = True) -> _Segmented:
    """Run every recurrent call inside a `with` block, or of a decorated function, in segments.

    This works for any model, because all recurrent layers of PyTorch call torch.lstm, gru, rnn_tanh or rnn_relu. The
    gradients are those of the plain calls. Put the forward pass inside; the backward pass may be inside or outside.

    `segments` is the number of segments of each call; 1 runs it as it is. With `budget`, the bytes that the process may
    use on the device of the call, as a number or as text such as "6GiB", a call that fits runs as it is, and any other
    in the least segments that fit, by arithmetic. Leave room in the budget for what comes after the calls, such as
    logits. With `recompute=False`, the pieces keep what their backward pass needs (chunks): nothing is computed twice,
    and only workspace of the kernel is saved. A warning names loops over cells, which run as they are.

    >>> import oomguard, torch
    >>> lstm = torch.nn.LSTM(3, 4)
    >>> with oomguard.segmented(segments=8):
    ...     outputs, state = lstm(torch.randn(100, 2, 3))
    >>> outputs.sum().backward()
    >>> lstm.weight_hh_l0.grad.shape
    torch.Size([16, 4])
    """
    return _Segmented(_rule(segments, budget, recompute))


class _InSegments(nn.Module):
    """A recurrent module whose calls run as its rule says. `_class_of` puts it in front of the class of a module."""

    oomguard_rule: Rule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Segmented(self.oomguard_rule):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the class that it was made from: the one that it has cannot be imported."""
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        function, args, *rest = reduced
        return (_revive, (function, _plain_class(type(self)), *args[1:]), *rest)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # the class that runs in segments, by the class it is made from


def _class_of(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _CLASSES:
        attributes = {"__module__": plain.__module__, "__doc__": plain.__doc__}
        _CLASSES[plain] = type(plain.__name__, (_InSegments, plain), attributes)
    return _CLASSES[plain]


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    return kind.__mro__[2] if issubclass(kind, _InSegments) else kind


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _revive(function: Callable[..., nn.Module], plain: type[nn.Module], *others: Any) -> nn.Module:
    return function(_class_of(plain), *others)


def segment(
    model: Model, segments: int | None = None, *, budget: int | str | None = None, recompute: bool = True
) -> Model:
    """Let the LSTM, GRU and RNN modules of a model run in segments from now on, as `segmented` does. Returns the model.

    The modules get a subclass of their class, so that copies, pickles and `torch.func.functional_call` work. A warning
    names the recurrent modules that cannot run in segments: those in TorchScript, and cells. `unsegment` undoes it.

    >>> import oomguard, torch
    >>> model = oomguard.segment(torch.nn.LSTM(3, 4), segments=8)
    >>> outputs, state = model(torch.randn(100, 2, 3))
    >>> type(oomguard.unsegment(model)) is torch.nn.LSTM
    True
    """
    rule, out_of_reach, found = _rule(segments, budget, recompute), list[str](), False
    inside: tuple[str, ...] = ()  # modules that are named already, and with them all of their parts
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            _set_class(module, _class_of(_plain_class(type(module))))
            module.oomguard_rule = rule
            found = True
        elif isinstance(module, nn.RNNCellBase | torch.jit.ScriptModule) and not name.startswith(inside):
            out_of_reach.append(name or type(module).__name__)
            inside = (*inside, f"{name}.")
    if out_of_reach:
        advice = "For a loop over cells, use oomguard.scan; TorchScript cannot be changed."
        warnings.warn(f"These modules do not run in segments: {', '.join(out_of_reach)}. {advice}", stacklevel=2)
    elif not found:
        advice = "If the model calls torch.lstm or the like itself, use oomguard.segmented."
        warnings.warn(f"The model has no LSTM, GRU or RNN module to run in segments. {advice}", stacklevel=2)
    return model


def unsegment(model: Model) -> Model:
    """Let the modules of a model run as they did before `segment`. Returns the model.

    >>> import oomguard, torch
    >>> type(oomguard.unsegment(oomguard.segment(torch.nn.GRU(3, 4), segments=8))) is torch.nn.GRU
    True
    """
    for module in model.modules():
        if isinstance(module, _InSegments):
            del module.oomguard_rule
            _set_class(module, _plain_class(type(module)))
    return model
