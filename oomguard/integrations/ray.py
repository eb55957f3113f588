"""Ray Tune trials that do not run out of memory.

`resources` tells Ray how much memory a trial will need, by arithmetic, so that Ray starts only as many trials at a time
as fit together. `feasible` gives the trial the knobs with which it fits.
"""

import math
from collections.abc import Callable
from typing import Any

from oomguard._core.errors import GuardError, MisuseError
from oomguard._core.units import read_budget
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.breakdown import Estimate
from oomguard._plan.fit import fit, needed_bytes, shortage
from oomguard._spec.spec import Spec
from oomguard._task.task import Task

try:
    from ray.tune import PlacementGroupFactory
except ImportError as error:
    raise ImportError(f"oomguard.integrations.ray needs Ray Tune: pip install 'oomguard[ray]' ({error})") from None

__all__ = ["feasible", "resources"]

Model = Spec | Task | str
"""What is trained: a spec, a task, or the name of a task."""
SHARES = 1000  # parts of a card that Ray can give to a trial


def feasible(
    model: Model, budget: int | str | None = None, *, device: str = "cpu", steps: int | None = None, **knobs: Any
) -> Estimate:
    """Whether a trial fits a budget, by arithmetic: the estimate of the candidate to run it with.

    Call it at the beginning of the trainable. It is the plain step if that fits, otherwise the fastest of smaller
    microbatches and segments. If none fits, `GuardError` ends this trial with the figures, and Ray goes on. Arguments
    are those of `oomguard.integrations.optuna.feasible`.

    >>> feasible(Spec(cell="lstm", seq=1000, batch=8), "6GiB", device="t4").candidate.microbatch
    8
    """
    found = fit(model, read_budget(budget), device, steps=steps, **knobs)
    if not found.fits:
        advice = "Narrow the search space, or give trials a larger budget."
        figures = {"needed_bytes": needed_bytes(found), "budget_bytes": int(found.budget_bytes or 0)}
        words = shortage(found).removeprefix("Nothing fits: ").rstrip(".")
        raise GuardError(rule="A trial must fit its budget", got=words, advice=advice, figures=figures)
    return found


def resources(
    model_of: Callable[[dict[str, Any]], Model],
    budget: int | str,
    *,
    device: str = "cpu",
    cpus: float = 1.0,
    steps: int | None = None,
    **knobs: Any,
) -> Callable[[dict[str, Any]], PlacementGroupFactory]:
    """What trials need, as a function of their configuration that `tune.with_resources` takes.

    `model_of` makes a spec or a task of the configuration of a trial, and `budget` is what one trial may use. On the
    CPU, Ray gets the bytes of the process as the resource `memory`; on a card, the share of the card as `GPU`. A trial
    of which no candidate fits asks for no memory: it is to call `feasible`, which ends it at once.

    >>> needs = resources(lambda config: Spec(cell="gru", seq=config["seq"], batch=8), "4GiB")
    >>> [(bundle["CPU"], bundle["memory"] > 2**28) for bundle in needs({"seq": 100}).bundles]
    [(1.0, True)]
    """
    budget_bytes, target = read_budget(budget), find_target(device)
    usable_bytes = find_budget(device).limit_bytes if target.cuda else 0

    def needs(config: dict[str, Any]) -> PlacementGroupFactory:
        bundle = {"CPU": float(cpus)}
        try:
            found = fit(model_of(config), budget_bytes, device, steps=steps, here=False, **knobs)
        except MisuseError:  # the trial itself will say what is wrong with its configuration
            return PlacementGroupFactory([bundle])
        if found.fits and target.cuda:
            bundle["GPU"] = min(1.0, math.ceil(SHARES * needed_bytes(found) / max(1, usable_bytes)) / SHARES)
        elif found.fits:
            bundle["memory"] = float(needed_bytes(found))
        return PlacementGroupFactory([bundle])

    return needs
