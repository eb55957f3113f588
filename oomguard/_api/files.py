"""Runs as files for other programs, and smaller runs. PyTorch is imported when it is needed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._report.progress import showing
from oomguard._train.results import Exported, Shrunk, check_export, check_shrink
from oomguard._train.settings import is_task_run

if TYPE_CHECKING:
    from oomguard._task.task import Task


def export(
    run: str | os.PathLike[str],
    to: str = "state_dict",
    *,
    output: str | None = None,
    force: bool = False,
    model: "Task | Callable[..., Any] | str | None" = None,
    progress: bool = True,
) -> Exported:
    """Write the model of a run, the best by validation or else the last, as a file for other programs.

    `to` is `state_dict` (weights for `load_state_dict`), `torchscript` or `onnx`; the last two include the scaling of
    the data and take any number of rows and steps. The file (default: model.pt, model.ts, model.onnx) is read again and
    compared with what `predict` computes; if it differs by more than rounding, nothing is written. For the run of a
    `Task`, `model` is the task or its name. `print` shows how the file was checked, and what goes in and comes out.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = oomguard.train(plan, numbers, steps=2, run=directory)
    ...     export(directory, "torchscript", output=f"{directory}/model.ts").difference < 1e-5
    True
    """
    path = check_export(Path(run), to, output, force=force)
    with showing(progress):
        tell("Starting PyTorch")
        if is_task_run(run):
            from oomguard._train.export_task import export_task_run

            return export_task_run(Path(run), to, path, model)  # type: ignore[arg-type]
        from oomguard._train.export import export_spec_run

        return export_spec_run(Path(run), to, path, model)  # type: ignore[arg-type]


def shrink(
    run: str | os.PathLike[str], hidden: float | str = 0.75, *, output: str | None = None, progress: bool = True
) -> Shrunk:
    """Write a run with a smaller model: the most used hidden units of every layer, as a share of them.

    A unit is used as much as the weights that read it are large, times its activity on the validation data. The new run
    (default: the name of the old one with the share) has its plan, by arithmetic, and is at its first step:
    `oomguard.resume(run, epochs=1)` fine-tunes it, with the data and the options of the old one.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = oomguard.train(plan, numbers, steps=2, run=f"{directory}/a")
    ...     shrink(f"{directory}/a", 0.5).hidden
    4
    """
    share, path = check_shrink(Path(run), hidden, output)
    if is_task_run(run):
        advice = "Train a smaller model of your own."
        raise MisuseError(rule="shrink takes the run of a spec", got=f"{run} is the run of a task", advice=advice)
    with showing(progress):
        tell("Starting PyTorch")
        from oomguard._train.shrink import shrink_run

        return shrink_run(Path(run), share, path)
