"""A rig: searches on a machine of formulas, through the very code that starts, watches and ends real ones."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
from search.machine import TITLE, Machine

from oomguard._core.units import GIB
from oomguard._probe.cache import Cache
from oomguard._probe.record import Ledger, Record
from oomguard._probe.runner import Free
from oomguard._search import run
from oomguard._search.run import Limits, Search
from oomguard._search.space import Problem
from oomguard._search.study import TrialStore
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec


@dataclass(kw_only=True)
class Rig:
    """Stands in for every runner. `records` has what was run, in the order of its beginning."""

    machine: Machine = field(default_factory=Machine)
    free_bytes: int = 8 * GIB
    committed_bytes: int | None = None
    before: Callable[[int], None] = lambda number: None
    """Called before the first probe with 0, before the second with 1 and so on."""
    records: list[Record] = field(default_factory=list)
    begun: int = 0
    closed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, patch: pytest.MonkeyPatch) -> "Rig":
        """From now on searches run here, on two cores."""
        for module in ("oomguard._search.run", "oomguard._plan.find"):
            patch.setattr(f"{module}.Runner", self.runner)
        patch.setattr("oomguard._device.cpu.cpu_name", lambda: TITLE)
        patch.setattr("oomguard._device.cpu.cpu_precisions", lambda: ("fp32",))
        for module in ("oomguard._plan.find", "oomguard._search.work"):
            patch.setattr(f"{module}.cores", lambda: 2)
        patch.setattr(run, "POLL_SECONDS", 0.005)
        return self

    def runner(self, name: str, **words: Any) -> "FakeRunner":
        return FakeRunner(self, name)


class FakeRunner:
    """What a search needs of a runner."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.device = rig, SimpleNamespace(name=name)

    def free(self) -> Free:
        rig = self.rig
        return Free(device_bytes=rig.free_bytes, host_bytes=rig.free_bytes, committed_bytes=rig.committed_bytes)

    def probe(
        self,
        spec: Spec,
        candidate: Candidate,
        *,
        budget_bytes: int,
        passes: int,
        rival: Candidate | None = None,
        **more: Any,
    ) -> Record:
        rig = self.rig
        with rig.lock:
            number, rig.begun = rig.begun, rig.begun + 1
        rig.before(number)
        with rig.lock:
            record = rig.machine.compared(rig.machine.run(spec, candidate, budget_bytes, passes), rival)
            record = msgspec.structs.replace(record, device=self.device.name)
            rig.records.append(record)
        return record

    def close(self) -> None:
        self.rig.closed.append(self.device.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


def make_search(problem: Problem, storage: str | None = None, **more: Any) -> Search:
    """A search for a problem; in a storage it goes on where another has ended."""
    limits = Limits(**{name: more.pop(name) for name in ("max_probes", "seconds") if name in more})
    ledger: Ledger | None = more.pop("ledger", None)
    cache: Cache = more.pop("cache", Cache(None, TITLE))
    sampler: str = more.pop("sampler", "auto")
    trials = more.pop("trials", None) or TrialStore("a study", problem, storage, sampler)
    return Search(problem=problem, trials=trials, ledger=ledger, cache=cache, limits=limits, **more)
