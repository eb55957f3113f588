"""Plans of searches on machines of formulas."""

from dataclasses import replace
from functools import cache
from typing import Any

from search.machine import TITLE, Machine, make_problem, solve

from oomguard.candidate import Candidate
from oomguard.device.budget import Budget, Limit
from oomguard.estimate import gpus
from oomguard.estimate.place import on_card
from oomguard.plan.make import Facts, make_plan
from oomguard.plan.value import Plan
from oomguard.probe.record import Record
from oomguard.search.problem import Problem
from oomguard.search.run import Found
from oomguard.search.space import Here, make_space
from oomguard.spec import Spec
from oomguard.units import GIB, MIB

LSTM = Spec(cell="lstm", seq=4000)
GRU = Spec(cell="gru", seq=1000, hidden=128, batch=64)
CARD = on_card(gpus.card("t4"))


def on_the_card(spec: Spec, budget_bytes: int, **more: Any) -> Problem:
    """A problem on a card that computes in fp16 too."""
    here, allow = Here(precisions=("fp32", "fp16"), fixed=more.pop("fixed", {})), more.pop("allow", ("precision",))
    space = make_space(spec, CARD, budget_bytes, here, allow)
    return Problem(spec=spec, place=CARD, space=space, budget_bytes=budget_bytes, **more)


PROBLEMS: dict[str, Problem] = {
    "lstm in 600 MiB": make_problem(LSTM, 600 * MIB),
    "lstm in 20 GiB": make_problem(LSTM, 20 * GIB),
    "gru in 420 MiB": make_problem(GRU, 420 * MIB),
    "bidirectional": make_problem(Spec(cell="gru", seq=1000, bidirectional=True), 900 * MIB),
    "on a card": on_the_card(LSTM, GIB),
    "on a card in fp32": on_the_card(LSTM, GIB, allow=()),
}


def make(problem: Problem, records: list[Record], allow: tuple[str, ...] = ("precision",), **more: Any) -> Plan | None:
    """The plan of what was found."""
    memory = Limit(name="all", limit_bytes=64 * GIB, used_bytes=0, held_bytes=0, unit="resident", source="a test")
    facts = Facts(
        version="0",
        title=TITLE,
        driver=None,
        cores=2,
        budget=Budget(device="cpu", limits=(memory,)),
        asked_budget_bytes=None,
        allow=allow,
        fixed={},
    )
    found = Found(problem=problem, records=tuple(records), ended="done", seconds=1.0)
    return make_plan(replace(found, **more), facts, exports)


def exports(candidate: Candidate) -> dict[str, str]:
    return {"MALLOC_OF_": str(candidate.allocator)}


@cache
def searched(name: str) -> tuple[Problem, tuple[Record, ...], Plan]:
    """A problem, what was run for it, and its plan."""
    problem = PROBLEMS[name]
    records = solve(Machine(ratio=1.03, effects={0: 0.2}, place=problem.place), problem)
    plan = make(problem, records)
    assert plan is not None
    return problem, tuple(records), plan
