"""What is asked, as values: a spec or its fields, a candidate or its knobs, a device by its name, and its budget."""

from typing import Any

import msgspec
import numpy as np

from oomguard.candidate import KNOBS, Candidate, Candidates, check_candidate, make_candidate, serve
from oomguard.checks import nearest, shown
from oomguard.device import card_index, limits
from oomguard.device.budget import Budget, Limit
from oomguard.device.cuda import Cuda
from oomguard.errors import MisuseError
from oomguard.estimate import gpus
from oomguard.estimate.place import CPU, Place, on_card, resident_within
from oomguard.presets import make_spec
from oomguard.spec import Spec
from oomguard.units import format_bytes


def read_spec(spec: Spec | None, fields: dict[str, Any]) -> Spec:
    """A spec, or the fields of one.

    >>> read_spec(None, {"cell": "gru", "seq": 9}).seq
    9
    """
    for name in fields:
        if name not in Spec.__struct_fields__:
            raise MisuseError(
                rule="What is estimated consists of fields of a spec and knobs",
                got=f"got {shown(name)}",
                advice=nearest(name, [*Spec.__struct_fields__, *KNOBS]),
            )
    if spec is None:
        return make_spec(fields)
    if not isinstance(spec, Spec) or fields:
        raise MisuseError(
            rule="The spec is either a Spec or fields by name",
            got=f"got {type(spec).__name__}" + (f" and {', '.join(fields)}" if fields else ""),
            advice="Leave one of the two out.",
        )
    return spec


def read_candidate(
    spec: Spec, candidate: Candidate | Candidates | None, knobs: dict[str, Any]
) -> Candidate | Candidates:
    """A candidate, several, or the knobs of one or several (arrays); without any, the whole batch in one pass.

    >>> read_candidate(Spec(cell="gru", seq=9, batch=4), None, {"microbatch": 2}).accumulation
    2
    """
    if candidate is None:
        if any(isinstance(value, np.ndarray | list | tuple) for value in knobs.values()):
            return serve(spec, Candidates(**{"microbatch": spec.batch} | knobs))
        return make_candidate(spec, **knobs)
    if not isinstance(candidate, Candidate | Candidates) or knobs:
        raise MisuseError(
            rule="The candidate is either a Candidate, Candidates or knobs by name",
            got=f"got {type(candidate).__name__}" + (f" and {', '.join(knobs)}" if knobs else ""),
            advice="Leave one of them out.",
        )
    if isinstance(candidate, Candidates):
        return serve(spec, candidate)
    check_candidate(spec, candidate)
    return candidate


def find_place(device: str) -> Place:
    """Where a device's name points: the CPU, a card that is here, or one that gpus.py knows.

    >>> find_place("cpu").cuda, find_place("A100 80GB").device
    (False, 'a100-80gb')
    """
    index = card_index(device)
    if index is not None:
        return on_card(Cuda(index).present().known, device)
    return CPU if device == "cpu" else on_card(gpus.card(device))


def find_budget(device: str) -> Budget:
    """What this process may use there, and who says so; of a card that is not here, all that CUDA would show."""
    index = card_index(device)
    if index is not None:
        return Cuda(index).budget()
    if device == "cpu":
        return _resident_too(limits.budget())
    card = gpus.card(device)
    memory = Limit(
        name="card memory",
        limit_bytes=card.usable_bytes,
        used_bytes=0,
        held_bytes=0,
        unit="resident",
        source=f"an empty {card.name}: {card.source}",
    )
    return Budget(device=card.name, limits=(memory,))


def _resident_too(budget: Budget) -> Budget:
    """A limit of committed bytes (an rlimit) as one of resident bytes too, in which estimates count."""
    committed = budget.least("committed")
    if committed is None:
        return budget
    same = Limit(
        name=f"{committed.name}, resident",
        limit_bytes=resident_within(committed.reach_bytes),
        used_bytes=0,
        held_bytes=0,
        unit="resident",
        source=f"{committed.source}: {format_bytes(committed.reach_bytes)} committed, up to 2.8 for each resident byte",
    )
    return msgspec.structs.replace(budget, limits=(*budget.limits, same))
