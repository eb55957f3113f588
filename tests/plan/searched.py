"""Plans of searches on machines of formulas."""

from dataclasses import replace
from functools import cache
from typing import Any

from search.machine import TITLE, Machine, make_problem, solve

from oomguard._core.units import GIB, MIB
from oomguard._device.budget import Limit
from oomguard._estimate import cards
from oomguard._estimate.target import on_card
from oomguard._plan.make import make_plan
from oomguard._plan.value import Environment, Plan
from oomguard._probe.record import Record, torch_version
from oomguard._search.run import SearchResult
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=4000)
GRU = Spec(cell="gru", seq=1000, hidden=128, batch=64)
CARD = on_card(cards.card("t4"))


def on_the_card(spec: Spec, budget_bytes: int, **more: Any) -> Problem:
    """A problem on a card that computes in fp16 too."""
    usual: dict[str, Any] = {"precisions": ("fp32", "fp16"), "allow": ("precision",)}
    own = {name: more.pop(name) for name in ("fixed", "allow") if name in more}
    space = make_space(spec, CARD, budget_bytes, Choices(**usual | own))
    return Problem(spec=spec, target=CARD, space=space, budget_bytes=budget_bytes, **more)


PROBLEMS: dict[str, Problem] = {
    "lstm in 600 MiB": make_problem(LSTM, 600 * MIB),
    "lstm in 20 GiB": make_problem(LSTM, 20 * GIB),
    "gru in 420 MiB": make_problem(GRU, 420 * MIB),
    "bidirectional": make_problem(Spec(cell="gru", seq=1000, bidirectional=True), 900 * MIB),
    "on a card": on_the_card(LSTM, GIB),
    "on a card in fp32": on_the_card(LSTM, GIB, allow=()),
}


def make(problem: Problem, records: list[Record], **more: Any) -> Plan | None:
    """The plan of a search's records."""
    memory = Limit(name="all", limit_bytes=64 * GIB, used_bytes=0, held_bytes=0, unit="resident", source="a test")
    libraries = [record.library for record in records if record.library is not None]
    environment = Environment(
        oomguard="0",
        torch=torch_version(),
        library=libraries[-1] if libraries else None,
        driver=None,
        python="3",
        system="a test",
        device=problem.target.device,
        title=TITLE,
        cores=2,
        limits=(memory,),
    )
    result = SearchResult(problem=problem, records=tuple(records), ended="done", seconds=1.0)
    return make_plan(replace(result, **more), environment, exports)


def exports(candidate: Candidate, engine: str) -> dict[str, str]:
    return {"MALLOC_OF_": f"{candidate.allocator} {engine}"}


@cache
def searched(name: str) -> tuple[Problem, tuple[Record, ...], Plan]:
    """A problem, what was run for it, and its plan."""
    problem = PROBLEMS[name]
    records = solve(Machine(ratio=1.03, effects={"all": 0.2, "half": -0.4}, target=problem.target), problem)
    plan = make(problem, records)
    assert plan is not None
    return problem, tuple(records), plan
