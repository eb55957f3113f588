"""Training in a process of its own, which starts with the settings of the heap that the plan was made for."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oomguard._core.errors import MisuseError
from oomguard._core.system import Elsewhere, send_news
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan


@contextmanager
def packed(*arguments: Any, required: bool) -> Iterator[Path | None]:
    """A file with what the process needs: functions and classes of scripts and notebooks are sent by value.

    None if that cannot be sent and is not required. (A file leaves no second copy of the data in either process.)
    """
    with tempfile.TemporaryDirectory(prefix="oomguard-") as folder:
        path = Path(folder) / "training"
        yield path if _is_written(path, arguments, required=required) else None


def _is_written(path: Path, arguments: tuple[Any, ...], *, required: bool) -> bool:
    import cloudpickle

    try:
        with path.open("wb") as file:
            cloudpickle.dump(arguments, file)
        return True
    except Exception as error:  # pickling calls the user's code
        if not required:
            return False
        raise MisuseError(
            rule="A training in a process of its own needs data and a model that can be sent there",
            got=f"they cannot be pickled ({str(error)[:200]})",
            advice="Give the path of a file, or train with isolate=False.",
        ) from None


def is_apart(plan: Plan | TaskPlan, isolate: bool | None, in_notebook: bool) -> bool:
    """Whether a training gets a process of its own: if asked for, or in a notebook that has another heap."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun has started the processes
        return False
    if isolate is not None:
        return isolate
    return in_notebook and any(os.environ.get(name) != value for name, value in plan.exports.items())


def train_apart(plan: Plan | TaskPlan, content: Path, progress: Callable[[Any], None] | None) -> Any:
    """Train in a new process; returns the result. Ctrl-C ends the training after its step, a second one at once."""
    import cloudpickle

    variables = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")} | plan.exports
    with Elsewhere(variables) as child, _stopping(child) as stops:
        try:
            return cloudpickle.loads(child.call(__name__, "_train_here", content, news=progress))
        except ChildProcessError as error:
            ended = str(error)
    if stops:  # before its first step
        raise KeyboardInterrupt
    raise MisuseError(
        rule="The process of a training must live until it ends",
        got=f"{ended}; exit code -9 means that the system was out of memory",
        advice="Go on with oomguard.resume(run), with a smaller budget if it was memory.",
    )


def _train_here(content: Path) -> bytes:
    """In the child: train, and return the result as bytes."""
    import cloudpickle

    from oomguard._train.task_start import start_training

    with content.open("rb") as file:
        plan, data, model, options = cloudpickle.load(file)
    content.unlink()
    return bytes(cloudpickle.dumps(start_training(plan, data, model, options, send_news)))


@contextmanager
def _stopping(child: Elsewhere) -> Iterator[list[int]]:
    """Pass Ctrl-C on to the child, whose result is still awaited; a second one interrupts this process too."""
    stops: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, _: object) -> None:
        stops.append(number)
        signal.signal(signal.SIGINT, before)
        child.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stops
    finally:
        signal.signal(signal.SIGINT, before)
