"""What if? The need of a candidate after a change of some fields or knobs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from oomguard.candidate import Candidate, Candidates, serve
from oomguard.errors import MisuseError
from oomguard.estimate.batch import estimate_batch
from oomguard.estimate.breakdown import estimate_step
from oomguard.estimate.margin import margin_bytes
from oomguard.estimate.place import Place
from oomguard.spec import Spec


class Need(NamedTuple):
    """What a candidate needs."""

    peak_bytes: int
    """The estimate."""
    safe_bytes: int
    """The estimate and its margin: what must fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What is to be changed.

    >>> from oomguard.estimate.place import CPU
    >>> if_ = WhatIf(spec=Spec(cell="lstm", seq=1000), candidate=Candidate(microbatch=32), place=CPU)
    >>> if_.need({"hidden": 512}).peak_bytes > if_.need(segments=10).peak_bytes
    True
    """

    spec: Spec
    """What is trained."""
    candidate: Candidate
    """The knobs as they are."""
    place: Place
    """Where."""
    training: bool = True
    """A training step, or an evaluation pass."""

    def need(self, fields: dict[str, Any] | None = None, **knobs: Any) -> Need | None:
        """With other fields or knobs; None if that cannot be."""
        try:
            spec = msgspec.structs.replace(self.spec, **fields or {})
            candidate = msgspec.structs.replace(self.candidate, **knobs)
            found = estimate_step(spec, candidate, self.place, training=self.training)
        except MisuseError:
            return None
        margin = margin_bytes(spec, found.growth_bytes, candidate, self.place)
        return Need(int(found.total_bytes), int(found.total_bytes + margin))

    def needs(self, **arrays: Any) -> list[Need]:
        """With each value of some knobs; the accumulation follows the microbatch."""
        knobs = {name: getattr(self.candidate, name) for name in Candidate.__struct_fields__} | {"accumulation": None}
        candidates = serve(self.spec, Candidates(**knobs | arrays))
        found = estimate_batch(self.spec, candidates, self.place, training=self.training)
        safe_bytes = found.total_bytes + found.margin_bytes
        return [Need(*both) for both in zip(found.total_bytes.tolist(), safe_bytes.tolist(), strict=True)]
