"""What `oomguard run` does inside a process of the script: it stands in for torch.lstm, gru, rnn_tanh and rnn_relu.

These four functions are replaced where modules look them up, in all threads. (A TorchFunctionMode would make every
function of torch slower, and serve one thread.) A call that fits, and every call outside of training, goes on to the
function that it meant.
"""

import atexit
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oomguard._probe.verdict import Verdict, judge
from oomguard._rnn.calls import CELLS, Kernel, RecurrentCall, read_call, run_in_pieces
from oomguard._rnn.rng import generators_of, remember
from oomguard._rnn.room import choose_segments, plain_bytes, read_request, segmented_bytes
from oomguard._rnn.segmented import is_segmented
from oomguard._run.notes import FOLDER, read_settings
from oomguard._run.recorder import Recorder

Plain = Callable[[], tuple[Tensor, ...]]  # the call as the script made it
SMALL = 8  # a call that needs less than this part of what is left is not compared with a new reading of the memory
NOT_THE_SCRIPT = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")

_recorder: Recorder | None = None


def start(module: str) -> None:
    """Begin, as soon as a module (`torch`, `torch._dynamo` or `keras`) is imported."""
    global _recorder
    if module == "torch" and _recorder is None:
        folder = Path(os.environ[FOLDER])
        _recorder = Recorder(folder, read_settings(folder))
        _replace_calls(_recorder)
        _follow_updates(_recorder)
        atexit.register(_recorder.end)
        os.register_at_fork(after_in_child=_recorder.forget)
    if module == "torch._dynamo":
        _hide_from_dynamo()
    if module == "keras" and _recorder is not None:
        _follow_keras(_recorder)


def _replace_calls(recorder: Recorder) -> None:
    """Put a function in the place of each of the four, everywhere where modules look it up.

    TorchScript knows functions of torch by their identity, so it is told that ours are the same.
    """
    from torch.jit import _builtins
    from torch.nn.modules import rnn

    for original in CELLS:
        ours = _instead_of(original, recorder)
        name = original.__name__
        setattr(torch, name, ours)
        setattr(torch._VF, name, ours)
        if _builtins._builtin_table is not None:  # otherwise it is made later, from the functions of torch as they are
            _builtins._builtin_table[id(ours)] = f"aten::{name}"
        impls: dict[str, Kernel] = getattr(rnn, "_rnn_impls", {})
        impls.update({key: ours for key, kernel in impls.items() if kernel is original})


def _instead_of(original: Kernel, recorder: Recorder) -> Kernel:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() or not _is_training(args):
            return original(*args, **kwargs)
        try:
            read = read_call(original, args, kwargs)
        except Exception:  # arguments that are wrong: torch says what is wrong with them
            return original(*args, **kwargs)
        if len(read.sizes) < 2 or not read.needs_gradient:
            return original(*args, **kwargs)
        return _run(read, recorder, functools.partial(original, *args, **kwargs), _caller())

    return call


def _is_training(args: tuple[Any, ...]) -> bool:
    """Whether a call has tensors that hold numbers, records a graph, and is left to us by the script."""
    return (
        torch.is_grad_enabled()
        and bool(args)
        and type(args[0]) in (Tensor, torch.nn.Parameter)
        and args[0].device.type in ("cpu", "cuda")
        and not torch._C._is_tracing()
        and not is_segmented()
    )


def _run(call: RecurrentCall, recorder: Recorder, plain: Plain, where: str) -> tuple[Tensor, ...]:
    """Run a call as it is if it fits or if segments are off, else in the least segments that fit."""
    request, shape = read_request(call), (len(call.sizes), call.sizes[0])
    notes, need_bytes, segments = recorder.begin(request.device), plain_bytes(request), 1
    if recorder.settings.segments and need_bytes > recorder.spare_bytes // SMALL:
        segments = min(choose_segments(request, notes.budget_bytes - notes.room_bytes), len(call.sizes))
    if segments == 1:
        outputs = _try_plain(call, recorder, plain)
        if outputs is not None:
            recorder.add_call(where, request, shape, need_bytes, need_bytes, 1)
            return outputs
        segments = min(choose_segments(request, 0), len(call.sizes))  # those that need least
    used_bytes = int(segmented_bytes(request, np.asarray([segments]))[0])
    recorder.add_call(where, request, shape, need_bytes, used_bytes, segments)
    return run_in_pieces(call, segments)


def _try_plain(call: RecurrentCall, recorder: Recorder, plain: Plain) -> tuple[Tensor, ...] | None:
    """Run a call as it is; None if memory ran out and segments may be used."""
    keeps = call.dropout > 0 and recorder.settings.segments
    restore = remember(*generators_of(call.inputs.device)) if keeps else None
    try:
        return plain()
    except (RuntimeError, MemoryError) as error:
        if not recorder.settings.segments or judge(error) is not Verdict.OOM:
            raise
    if restore is not None:
        restore()
    assert recorder.notes is not None
    recorder.notes.retried += 1
    return None


def _caller() -> str:
    """The line of the script that makes a call, such as `train.py:42`: the first one outside of torch and oomguard."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
        frame = frame.f_back
    return "torch" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _follow_updates(recorder: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.add_update(optimizer))


def _hide_from_dynamo() -> None:
    """Let torch.compile leave the code of oomguard as it is. It runs recurrent layers outside of its graphs anyway."""
    from torch._dynamo import trace_rules

    trace_rules.add("oomguard")


def _follow_keras(recorder: Recorder) -> None:
    """Note the updates of Keras, whose optimizers on torch are its own."""
    keras: Any = sys.modules["keras"]
    optimizer = keras.optimizers.Optimizer
    apply = getattr(optimizer, "apply", None)
    if apply is None:  # Keras 2, which never runs on torch
        return

    @functools.wraps(apply)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply(self, *args, **kwargs)
        recorder.add_update(None)
        return result

    optimizer.apply = noted
