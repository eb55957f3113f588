"""Trace: one training step of a task with all of its allocations, on fake tensors, which have sizes and no content."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from oomguard._core.errors import MisuseError, shown
from oomguard._estimate.target import Target
from oomguard._rnn.run import autocast
from oomguard._task.kernels import Kernels
from oomguard._task.layout import mapped
from oomguard._task.live import REAL_FRACTIONS, Label, Live, Moment
from oomguard._task.task import Task, line_of, user_code

NODE_BYTES = 575
"""Bytes of an autograd node with what it holds beside tensors: 15,400 bytes of the 24 operations of a step of PyTorch's
own LSTM (engines/native.py), less those of the tensors that it keeps."""
MAX_STEPS = 5  # optimizer steps of a trace


@dataclass(frozen=True, slots=True)
class Trace:
    """The peaks of a traced step, as plain values."""

    moments: dict[Moment, tuple[int, dict[Label, int]]]  # the largest total of every moment, and its bytes by label
    engine: str  # of the recurrent calls that keep the most; empty if there are none
    cells: tuple[str, ...]
    steps: int  # time steps of the longest recurrent call
    logits: str  # the last linear layer that ran, which makes the logits

    @property
    def peak(self) -> Moment:
        """The moment with the largest total."""
        return max(self.moments, key=lambda moment: self.moments[moment][0])


def build(task: Task, device: str = "cpu") -> nn.Module:
    """The module of a task, on a device."""
    made: Any = task.model
    if not isinstance(made, nn.Module):
        with user_code("model() must build a module", made, "Correct that line."):
            made = made()
    if not isinstance(made, nn.Module):
        got = f"{line_of(task.model)} returned {shown(made)}"
        raise MisuseError(rule="model() must return a torch.nn.Module", got=got, advice="Return the module.")
    with user_code(f"The model must move to {device}", task.model, "Give its tensors values when it is built."):
        return made.to(device)


def copied(model: nn.Module, mode: FakeTensorMode | None = None) -> nn.Module:
    """A copy of a model, with fake tensors if there is a mode for them.

    Modules in TorchScript copy themselves, and their parameters become results of a graph. Here they are leaves again.
    """
    with _WithoutGraph() if mode is None else FakeCopyMode(mode):
        model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                leaf = tensor.detach() if mode is None else mode.from_tensor(tensor.detach())
                module._c.setattr(name, leaf.requires_grad_(tensor.requires_grad))
    return model


class _WithoutGraph(TorchFunctionMode):
    """Copies results of a graph too, such as attention weights that a model has kept, but not the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a task for a module."""
    make: Callable[..., Any] = task.optimizer or torch.optim.Adam
    with user_code("optimizer(parameters) must make an optimizer", make, "Correct that line."):
        made: Any = make(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        got = f"{line_of(make)} returned {shown(made)}"
        rule, advice = "optimizer(parameters) must return a torch.optim.Optimizer", "Return the optimizer."
        raise MisuseError(rule=rule, got=got, advice=advice)
    if isinstance(made, torch.optim.LBFGS):  # it would call the loss again and again
        advice = "Use an optimizer that takes one step for each gradient."
        raise MisuseError(rule="An optimizer must step without a closure", got="got LBFGS", advice=advice)
    optimizer: torch.optim.Optimizer = made
    return optimizer


def call_loss(task: Task, model: nn.Module, batch: Any) -> Any:
    """Whatever the loss of a batch returns."""
    state = (None,) if task.piecewise else ()
    advice = "Correct that line; model and batch are on the same device when it is called."
    if task.batch is not None:
        advice += " A task is first tried on a few short rows: if the model needs more steps, let batch() make more."
    with user_code("The loss must run on a batch", task.loss, advice):
        return task.loss(model, batch, *state)


def evaluate(task: Task, model: nn.Module, batch: Any, *, training: bool = True) -> tuple[Tensor, Any]:
    """The loss of a batch as a sum and its weight; the weight of a mean is None."""
    result = call_loss(task, model, batch)
    total, weight = result[:2] if isinstance(result, tuple | list) and len(result) >= 2 else (result, None)
    if not _is_number(total) or not isinstance(total, Tensor):
        rule, advice = "The loss must be one number", "Return the mean over the batch as a tensor, or (sum, weight)."
        raise _wrong_loss(task, rule, _form(total), advice)
    if not _is_number(weight):
        advice = "Return the mean over the batch alone, or (sum, weight)."
        raise _wrong_loss(task, "The weight of a loss must be one number", f"{_form(weight)} beside it", advice)
    if training and total.grad_fn is None:
        fixed = not any(parameter.requires_grad for parameter in model.parameters())
        advice = "Compute it from the model's output, without detach, item or torch.no_grad."
        advice = "Build a model with parameters that require a gradient." if fixed else advice
        raise _wrong_loss(task, "The loss must depend on the parameters", "a loss without a gradient", advice)
    return total.reshape(()), weight


def _wrong_loss(task: Task, rule: str, what: str, advice: str) -> MisuseError:
    return MisuseError(rule=rule, got=f"{line_of(task.loss)} returned {what}", advice=advice)


def _is_number(value: Any) -> bool:
    """Whether a loss or a weight is one number with a value; None, the weight of a mean, counts as 1."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type != "meta"
    return value is None or (hasattr(value, "__float__") and getattr(value, "shape", ()) == ())


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    return f"a tensor of shape {tuple(value.shape)}" + " on meta, without values" * (value.device.type == "meta")


def mean_of(total: Tensor, weight: Any) -> Tensor:
    """The loss per unit of weight."""
    return total if weight is None else total / weight


def trace(
    task: Task, model: nn.Module, batch: Any, target: Target, *, heap: str, segments: int = 1, passes: int = 1,
    precision: str = "fp32", fake: bool = True, training: bool = True,
) -> Trace:  # fmt: skip
    """Count the bytes of two training steps. The second has the optimizer's state from the beginning.

    More steps follow as long as the state grows, since an optimizer may make a part of it in a later step. With
    `training=False`, count those of the loss alone, computed without gradients as in an evaluation. Forward passes in
    half precision run under autocast. With `fake=False` everything but recurrent calls is computed: for models that
    fake tensors cannot run.
    """
    live = Live("cuda" if target.cuda else heap)
    kernels = Kernels(live, target, segments)
    with ExitStack() as stack:
        if fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            model = copied(model, mode)
            batch = mapped(lambda one: mode.from_tensor(one) if _is_content(one) else one, batch)
            stack.enter_context(mode)
        stack.enter_context(live)
        stack.enter_context(kernels)
        stack.enter_context(_named(model, live))
        _count(live, model, batch)
        if training:
            optimizer = make_optimizer(task, model)
            _label_state(optimizer, live)
            if target.cuda:
                _take_foreach(optimizer)
            held = [-1]  # bytes of the optimizer's state after each step
            while len(held) < 3 or (held[-1] > held[-2] and len(held) <= MAX_STEPS):
                _step(task, model, mapped(_fresh, batch), optimizer, live, passes, precision)
                held.append(sum(size for (term, _), size in live.sizes.items() if term == "optimizer"))
        else:
            live.begin("forward")
            live.part = "loss"
            with torch.no_grad(), autocast(precision, "cpu"):
                call_loss(task, model.eval(), batch)
    engines = kernels.engines
    return Trace(
        moments=live.moments,
        engine=max(engines, key=engines.__getitem__) if engines else "",
        cells=tuple(sorted(kernels.cells)),
        steps=kernels.steps,
        logits=live.logits[0],
    )


def _is_content(tensor: Tensor) -> bool:
    """Whether the values of a part of a batch do not matter. Whole numbers do, and so do relative lengths."""
    return tensor.is_floating_point() and (tensor.dim() > 1 or tensor.numel() > REAL_FRACTIONS)


def _fresh(tensor: Tensor) -> Tensor:
    """A copy of relative lengths, since a loss may scale them in place; other parts as they are."""
    return tensor.clone() if tensor.is_floating_point() and not _is_content(tensor) else tensor


def _count(live: Live, model: nn.Module, batch: Any) -> None:
    """Count what exists before the step: weights and the batch. Gradients are told apart as they arrive."""
    with live.counting("weights"):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            live.part = name.rpartition(".")[0] or "model"
            live.track(tensor)
    with live.counting("input"):
        mapped(lambda one: live.track(one), batch)
    for parameter in model.parameters():
        if parameter.requires_grad:
            hook: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
            hook(lambda one: live.label(one.grad, "gradients"))


def _step(task: Task, model: nn.Module, batch: Any, optimizer: Any, live: Live, passes: int, precision: str) -> None:
    model.train()
    for _ in range(passes):
        live.begin("forward")
        live.part = "loss"
        with autocast(precision, "cpu"):
            loss = mean_of(*evaluate(task, model, batch))
        kept = _graph(loss, live)
        live.begin("backward")
        live.part = "loss"
        loss.backward()  # type: ignore[no-untyped-call]
        del loss, kept
    live.begin("optimizer")
    live.part = "optimizer"
    optimizer.step()
    _label_state(optimizer, live)
    optimizer.zero_grad(set_to_none=True)


def _label_state(optimizer: torch.optim.Optimizer, live: Live) -> None:
    for state in optimizer.state.values():
        mapped(lambda one: live.label(one, "optimizer"), state)


def _graph(loss: Tensor, live: Live) -> Tensor | None:
    """A stand-in for the nodes of the graph, which live in the C heap; None on a card."""
    if live.heap == "cuda":
        return None
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
    with live.counting("activations", small=True):
        return torch.empty(NODE_BYTES * len(seen), dtype=torch.uint8)


def _take_foreach(optimizer: torch.optim.Optimizer) -> None:
    """On a card, PyTorch's optimizers update all parameters at once unless they are told otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


@contextmanager
def _named(model: nn.Module, live: Live) -> Iterator[None]:
    """Tell which part of the model runs, in forward and in backward."""
    names = {id(module): name or "model" for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(live.part)
        live.part = names.get(id(module), live.part)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        part, live.part = live.part, stack.pop()
        if isinstance(module, nn.Linear):
            live.logits = part, module.out_features

        def arrive(*_: Any) -> None:
            live.part = part

        def mark(tensor: Tensor) -> Tensor:
            if tensor.grad_fn is not None and id(module) in names:
                tensor.grad_fn.register_prehook(arrive)
            return tensor

        mapped(mark, output)

    with ExitStack() as handles:
        handles.callback(hooks.register_module_forward_pre_hook(enter).remove)
        handles.callback(hooks.register_module_forward_hook(leave).remove)
        yield
