"""Task: what is trained, as the user's own functions. This module does not import torch: a child process runs them."""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, OomguardError, shown

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

NAME = re.compile(r"[A-Za-z_][\w.]*:[\w.]+")
"""The form of a task's name on the command line: `package.module:task`."""
USUAL_ROWS = 32  # rows of a batch if neither the user nor a loader says
_FORMS = "loss(model, batch), or loss(model, batch, state) for a loss that is computed piece by piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model of your own with its loss and its data, for `oomguard.estimate`.

    `model` is a function that builds the module, or the module itself. `loss(model, batch)` returns the mean loss, or
    `(sum, weight)`, so that microbatches of unequal weight add up exactly. Batches come from `data`, a DataLoader, or
    from `batch`, a function of rows and time steps. `optimizer` is a function of the parameters; the default is Adam.
    `oomguard.train` also takes a `scheduler`, a function of the optimizer, and `validation`, more data of either kind.
    `oomguard.predict` takes `predict`, a function of model and batch.

    >>> def batch(rows, steps):
    ...     import torch
    ...     return torch.zeros(steps, rows, 4)
    >>> def build():
    ...     import torch
    ...     return torch.nn.LSTM(4, 8)
    >>> task = Task(model=build, loss=lambda model, batch: model(batch)[0].mean(), batch=batch)
    >>> task.piecewise
    False
    """

    model: "Callable[[], nn.Module] | nn.Module"
    """A function that builds the module, or the module itself."""
    loss: Callable[..., Any]
    """The loss of a batch. With a third parameter, the state, it returns `(sum, count, state)` of a piece."""
    data: "DataLoader[Any] | None" = None
    """A DataLoader of a dataset with indices. Batches are collated from chosen samples by its `collate_fn`."""
    batch: Callable[[int, int], Any] | None = None
    """A function of rows and time steps that returns a batch."""
    optimizer: "Callable[[Iterator[nn.Parameter]], Optimizer] | None" = None
    """A function of the parameters that returns the optimizer; None means `torch.optim.Adam`. If your own loop changes
    from one optimizer to another, plan with the one that keeps the most, such as ASGD after SGD."""
    scheduler: "Callable[[Optimizer], LRScheduler] | None" = None
    """A function of the optimizer that returns a scheduler of the learning rate, which steps after every update."""
    validation: "DataLoader[Any] | Callable[[int, int], Any] | None" = None
    """Data whose loss is computed after every epoch: a DataLoader, or a function like `batch`, for one batch."""
    predict: Callable[..., Any] | None = None
    """The predictions of a batch, `predict(model, batch)`: tensors, nested as you like."""

    def __post_init__(self) -> None:
        for name in ("model", "loss", "batch", "optimizer", "scheduler", "predict"):
            value = getattr(self, name)
            if not callable(value) and (name in ("model", "loss") or value is not None):
                advice = f"Write it as Task({name}=..., ...) with the function itself, not its result."
                raise MisuseError(rule=f"{name} must be a function", got=f"got {shown(value)}", advice=advice)
        if (self.data is None) == (self.batch is None):
            raise MisuseError(
                rule="A task has either data or batch",
                got="got neither" if self.data is None else "got both",
                advice="Give data=loader, or batch=a function of rows and time steps.",
            )
        if self.data is not None:
            _check_loader("data", self.data)
        if self.validation is not None and not callable(self.validation):
            _check_loader("validation", self.validation)
        if _required(self.loss) not in (2, 3):
            raise MisuseError(
                rule=f"The loss must be {_FORMS}",
                got=f"{line_of(self.loss)} takes {_required(self.loss)} required parameters",
                advice="Bind the others with functools.partial, or give them defaults.",
            )

    @property
    def piecewise(self) -> bool:
        """Whether the loss takes a state, so that a batch can be run piece by piece along time."""
        return is_piecewise(self.loss)


def is_piecewise(loss: Callable[..., Any]) -> bool:
    """Whether a loss takes a state as its third argument."""
    return _required(loss) == 3


def _required(function: Callable[..., Any]) -> int:
    """The number of positional parameters without a default; 2 for a function that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


def _check_loader(name: str, loader: Any) -> None:
    missing = [name for name in ("dataset", "collate_fn", "batch_size") if not hasattr(loader, name)]
    if missing:
        got, advice = f"got {shown(loader)}", "Wrap the dataset: torch.utils.data.DataLoader(dataset)."
    elif not _has_indices(loader.dataset):
        got = f"{type(loader.dataset).__name__} at {line_of(type(loader.dataset))} can only be iterated"
        advice = "Give the dataset __getitem__ and __len__, or give batch=, a function of rows and time steps."
    elif loader.batch_size is None and getattr(loader, "batch_sampler", None) is None:
        got, advice = "this loader has batch_size=None", "Let the loader collate (batch_size=8), or give batch=."
    else:
        return
    raise MisuseError(rule=f"{name} must be a DataLoader whose samples have indices", got=got, advice=advice)


def _has_indices(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset  # it has a __getitem__ that only raises an error

    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, IterableDataset)


def name_of(task: Task | str) -> str:
    """The name of a task as plans and records have it; for a task that has none, that of what builds its model."""
    if isinstance(task, str):
        return task
    if isinstance(file := getattr(task.model, "oomguard_source", None), str):  # a model that was read from a file
        return file
    made: Any = task.model if hasattr(task.model, "__qualname__") else type(task.model)
    return f"{made.__module__}:{made.__qualname__}"


def goes_by(task: Task, name: str) -> bool:
    """Whether a plan or a run of that name is one of the task. Nothing is imported, whatever it names."""
    module, _, path = name.partition(":")
    own_module, _, own_path = name_of(task).partition(":")
    main = sys.modules["__main__"]
    mains = {"__main__", Path(getattr(main, "__file__", None) or "__main__").stem}  # names of the script that runs
    if path == own_path and (module == own_module or "__main__" in (module, own_module)):
        return True
    found: Any = main if module in mains else sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return task.model in (found, getattr(found, "model", None))  # of a copy with other data, too


def line_of(function: Any) -> str:
    """The place of a function or class as `file:line`; its name where Python does not know."""
    while isinstance(function, partial):
        function = function.func
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(vars(type(plain)).get("__call__"), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    source: Any = plain if inspect.isclass(plain) or inspect.isroutine(plain) else type(plain)  # such as a module's
    try:
        return f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1]}"
    except (TypeError, OSError):
        return str(source.__qualname__)


@contextmanager
def user_code(rule: str, function: Any, advice: str) -> Iterator[None]:
    """Turn an error of the user's function into a message with the user's own line."""
    try:
        yield
    except (OomguardError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = _own_line(error) or line_of(function)
        raise MisuseError(rule=rule, got=_raised(place, error), advice=advice) from error


def _raised(place: str, error: BaseException) -> str:
    words = " ".join(str(error).split())[:300] or "no message"
    return f"{place} raised {type(error).__name__}: {words.rstrip('.')}"


def _own_line(error: BaseException) -> str | None:
    """The last line of a traceback that is neither in oomguard nor in an installed package, as `file:line`."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parents[1])
    libraries = (ours, sys.base_prefix + os.sep + "lib", f"{os.sep}site-packages{os.sep}", "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    own = [frame for frame in own if (frame.filename, frame.name) != ("<string>", "__init__")]  # of a dataclass
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def check_known(name: str) -> None:
    """Raise unless the module of a task, or the package that it is in, can be found. Nothing is imported."""
    if os.getcwd() not in sys.path:  # an installed command has its own folder there instead
        sys.path.insert(0, os.getcwd())
    package = name.partition(":")[0].partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise _no_module(name, package)


def _no_module(name: str, module: str | None) -> MisuseError:
    rule = f"--model {name} must name a Task, or a function that returns one"
    advice = f"Run the command in the folder that has {name.partition(':')[0].partition('.')[0]}, or set PYTHONPATH."
    return MisuseError(rule=rule, got=f"there is no module {module}", advice=advice)


def resolve(name: str) -> Task:
    """The task of that name: `package.module:task`, a Task or a function that returns one. Imports the module."""
    check_known(name)
    module_name, _, path = name.partition(":")
    rule = f"--model {name} must name a Task, or a function that returns one"
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise _failed_import(rule, module_name, error) from error
        raise _no_module(name, error.name) from None
    except (Exception, SystemExit) as error:
        raise _failed_import(rule, module_name, error) from error
    for part in path.split("."):
        if not hasattr(found, part):
            advice = f"Define {part} at the top level of {getattr(found, '__file__', None) or module_name}."
            raise MisuseError(rule=rule, got=f"{module_name} has no {path}", advice=advice)
        found = getattr(found, part)
    if not isinstance(found, Task) and callable(found):
        with user_code(rule, found, "Correct that line."):
            found = found()
    if not isinstance(found, Task):
        advice = "Write task = oomguard.Task(model=..., loss=..., data=...)."
        raise MisuseError(rule=rule, got=f"it is {shown(found)}", advice=advice)
    return found


def _failed_import(rule: str, module: str, error: BaseException) -> MisuseError:
    place = _own_line(error) or module
    if isinstance(error, MisuseError):  # of the Task itself
        return MisuseError(rule=error.rule, got=f"{error.got} ({place})", advice=error.advice)
    return MisuseError(rule=rule, got=_raised(place, error), advice="Correct that line.")


def packed(task: Task) -> bytes:
    """The task as bytes for a child process. Functions of scripts and notebooks are sent by value."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as error:  # pickling calls the user's code
        parts = ("model", "loss", "data", "batch", "optimizer")  # the others are not sent
        part = next((name for name in parts if not _can_be_sent(getattr(task, name))), "task")
        raise MisuseError(
            rule="A task is sent to a child process",
            got=f"its {part} at {line_of(_sent(task, part))} cannot be pickled ({str(error)[:200]})",
            advice="Build such objects inside the function, or name the task by --model package.module:task.",
        ) from None


def _sent(task: Task, part: str) -> Any:
    """The user's function in a part of a task: samples are sent with the function that collates them."""
    return getattr(task.data, "collate_fn", task.data) if part == "data" else getattr(task, part, task)


def _can_be_sent(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
