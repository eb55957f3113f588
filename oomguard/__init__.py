"""oomguard: train LSTM, GRU and RNN models on long sequences without running out of memory.

Public names are imported when they are first used: `import oomguard` is fast and does not import torch.

>>> import oomguard
>>> oomguard.Spec(cell="lstm", seq=10_000).hidden
256
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oomguard._api.files import export, shrink
    from oomguard._api.fleet import fleet
    from oomguard._api.measure import curves, estimate, explore, probe, tradeoffs
    from oomguard._api.plan import find_feasible_config, sampler
    from oomguard._api.train import guard, load_weights, predict, resume, train
    from oomguard._core.errors import GuardError, MisuseError, OomguardError
    from oomguard._estimate.breakdown import Estimate
    from oomguard._guard.stepper import stepper
    from oomguard._plan.store import load_plan, save_plan
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import NothingFitsError, Plan
    from oomguard._probe.record import Ledger, Record, TaskRecord
    from oomguard._probe.runner import Runner
    from oomguard._probe.verdict import Verdict
    from oomguard._report.page import save_page
    from oomguard._report.runs import compare
    from oomguard._rnn.losses import chunked_loss, piecewise_loss
    from oomguard._rnn.model import Recurrent
    from oomguard._rnn.scan import scan
    from oomguard._rnn.segmented import segment, segmented, unsegment
    from oomguard._spec.candidate import Candidate, Candidates
    from oomguard._spec.spec import Spec
    from oomguard._task.task import Task

__all__ = [
    "Candidate",
    "Candidates",
    "Estimate",
    "GuardError",
    "Ledger",
    "MisuseError",
    "NothingFitsError",
    "OomguardError",
    "Plan",
    "Record",
    "Recurrent",
    "Runner",
    "Spec",
    "Task",
    "TaskPlan",
    "TaskRecord",
    "Verdict",
    "__version__",
    "chunked_loss",
    "compare",
    "curves",
    "estimate",
    "explore",
    "export",
    "find_feasible_config",
    "fleet",
    "guard",
    "load_plan",
    "load_weights",
    "piecewise_loss",
    "predict",
    "probe",
    "resume",
    "sampler",
    "save_page",
    "save_plan",
    "scan",
    "segment",
    "segmented",
    "shrink",
    "stepper",
    "tradeoffs",
    "train",
    "unsegment",
]

_MODULES = {
    "_api.files": "export shrink",
    "_api.fleet": "fleet",
    "_api.measure": "curves estimate explore probe tradeoffs",
    "_api.plan": "find_feasible_config sampler",
    "_api.train": "guard load_weights predict resume train",
    "_core.errors": "GuardError MisuseError OomguardError",
    "_estimate.breakdown": "Estimate",
    "_guard.stepper": "stepper",
    "_plan.store": "load_plan save_plan",
    "_plan.task_value": "TaskPlan",
    "_plan.value": "NothingFitsError Plan",
    "_probe.record": "Ledger Record TaskRecord",
    "_probe.runner": "Runner",
    "_probe.verdict": "Verdict",
    "_report.page": "save_page",
    "_report.runs": "compare",
    "_rnn.model": "Recurrent",
    "_rnn.losses": "chunked_loss piecewise_loss",
    "_rnn.scan": "scan",
    "_rnn.segmented": "segment segmented unsegment",
    "_spec.candidate": "Candidate Candidates",
    "_spec.spec": "Spec",
    "_task.task": "Task",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'oomguard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"oomguard.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
