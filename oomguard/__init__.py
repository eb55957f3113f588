"""oomguard: train LSTM, GRU and RNN models on long sequences without running out of memory.

Names are imported when they are first used: `import oomguard` costs nothing, and does not import torch.

>>> import oomguard
>>> oomguard.Spec(cell="lstm", seq=10_000).hidden
256
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Candidate",
    "Estimate",
    "GuardError",
    "Ledger",
    "MisuseError",
    "NothingFitsError",
    "OomguardError",
    "Plan",
    "Record",
    "Runner",
    "Spec",
    "Verdict",
    "__version__",
    "curves",
    "estimate",
    "find_feasible_config",
    "guard",
    "load_plan",
    "predict",
    "probe",
    "save_plan",
    "tradeoffs",
    "train",
]

if TYPE_CHECKING:
    from oomguard.api import curves, estimate, find_feasible_config, guard, predict, probe, tradeoffs, train
    from oomguard.candidate import Candidate
    from oomguard.errors import GuardError, MisuseError, OomguardError
    from oomguard.estimate.breakdown import Estimate
    from oomguard.plan.shortfall import NothingFitsError
    from oomguard.plan.store import load_plan, save_plan
    from oomguard.plan.value import Plan
    from oomguard.probe.ledger import Ledger
    from oomguard.probe.record import Record
    from oomguard.probe.runner import Runner
    from oomguard.probe.verdict import Verdict
    from oomguard.spec import Spec
else:
    _HOME = {
        "Candidate": "oomguard.candidate",
        "Estimate": "oomguard.estimate.breakdown",
        "GuardError": "oomguard.errors",
        "Ledger": "oomguard.probe.ledger",
        "MisuseError": "oomguard.errors",
        "NothingFitsError": "oomguard.plan.shortfall",
        "OomguardError": "oomguard.errors",
        "Plan": "oomguard.plan.value",
        "Record": "oomguard.probe.record",
        "Runner": "oomguard.probe.runner",
        "Spec": "oomguard.spec",
        "Verdict": "oomguard.probe.verdict",
        "curves": "oomguard.api",
        "estimate": "oomguard.api",
        "find_feasible_config": "oomguard.api",
        "guard": "oomguard.api",
        "load_plan": "oomguard.plan.store",
        "predict": "oomguard.api",
        "probe": "oomguard.api",
        "save_plan": "oomguard.plan.store",
        "tradeoffs": "oomguard.api",
        "train": "oomguard.api",
    }

    # `oomguard.estimate` is the function, yet a subpackage has that name too, and Python would bind the name to the
    # subpackage at its first import, whenever that is. So its first import is here, where the name is given back.
    for name in ("curves", "estimate", "guard", "probe", "tradeoffs", "train"):
        import_module(f"oomguard.{name}")
        del globals()[name]

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'oomguard' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
