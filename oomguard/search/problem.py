"""Problem: what is to be solved. Probe: what is to be run next."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from oomguard.candidate import Candidate
from oomguard.checks import nearest, shown
from oomguard.errors import MisuseError
from oomguard.estimate.place import Place
from oomguard.probe.record import Record
from oomguard.search.space import Space
from oomguard.spec import Spec

AIMS = ("throughput", "microbatch", "seq")
"""What can be made as large as possible."""
Role = Literal["calibrate", "explore", "confirm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be solved."""

    spec: Spec
    """What is to be trained."""
    place: Place
    """Where."""
    space: Space
    """What may be tried."""
    budget_bytes: int
    """What the training process may use there."""
    host_bytes: int | None = None
    """On a card: what it may use of the host's memory; None if nobody knows."""
    cached: tuple[Record, ...] = ()
    """What earlier searches measured of such models here."""
    maximize: tuple[str, ...] = ("throughput",)
    """What is best: the first names the plan, the others points of the front."""

    @property
    def finest(self) -> bool:
        """Whether every microbatch counts, not only those that divide the batch well."""
        return "microbatch" in self.maximize

    @property
    def timed(self) -> bool:
        """Whether seconds decide what is best."""
        return "throughput" in self.maximize


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run next, and why."""

    spec: Spec
    """The spec, perhaps with shorter sequences."""
    candidate: Candidate
    """The candidate, with as many pieces as such sequences have."""
    role: Role
    """To correct the estimates; to time a candidate; to see the chosen one run."""
    passes: int
    """How many passes to measure, at least."""
    steps: int = 1
    """How many steps to measure, at most."""
    peak_bytes: int
    """What it is expected to peak at."""
    seconds_per_pass: float
    """What a pass is expected to take."""

    def is_of(self, other: "Record | Probe") -> bool:
        """Whether a record, or another probe, is of the same."""
        return other.candidate == self.candidate and other.spec == self.spec


def check_maximize(maximize: tuple[str, ...]) -> None:
    """Raise unless these are aims, each once."""
    for name in maximize:
        if name not in AIMS:
            raise MisuseError(
                rule=f"--maximize takes {', '.join(AIMS)}", got=f"got {shown(name)}", advice=nearest(name, [*AIMS])
            )
    if not maximize or len({*maximize}) < len(maximize):
        raise MisuseError(
            rule="--maximize takes one aim or several different ones",
            got=f"got {shown(','.join(maximize))}",
            advice="Write it as throughput or throughput,seq.",
        )
