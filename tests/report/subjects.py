"""Subjects of tables and curves: on the CPU, on a card, and with what a machine of formulas measured."""

from functools import cache
from typing import Any

from plan.searched import searched

from oomguard._core.units import GIB
from oomguard._plan.value import Plan
from oomguard._report.subject import Subject, find_subject, subject_of

BUDGET_BYTES = 6 * GIB


def subject(**asked: Any) -> Subject:
    """An LSTM on long sequences, on the CPU unless something else is asked for."""
    usual: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "budget": BUDGET_BYTES}
    return find_subject(**usual | asked)


@cache
def plan() -> Plan:
    """A plan of a search, with ten records."""
    return searched("lstm in 600 MiB")[2]


def segments() -> int:
    """Those that it chose."""
    return plan().candidate.segments


@cache
def on_a_card() -> Plan:
    """The same on a card."""
    return searched("on a card")[2]


def planned() -> Subject:
    """What that plan is about."""
    return subject_of(plan())


EVERY: dict[str, Any] = {
    "cpu": subject,
    "a100": lambda: subject(device="a100-80gb", budget=None),
    "t4, nothing fits": lambda: subject(device="t4", budget="600MiB", hidden=4096, seq=100_000),
    "planned": planned,
    "planned on a card": lambda: subject_of(on_a_card()),
    "one step": lambda: subject(seq=1, batch=1, hidden=4),
    "bidirectional": lambda: subject(bidirectional=True, seq=500, batch=8),
    "window": lambda: subject(window=100),
    "tokens": lambda: subject(cell="gru", vocab=500, seq=200, frozen=("layer0",), layers=3),
    "a million steps": lambda: subject(seq=1_000_000, device="h100", budget=None),
    "lengths": lambda: subject(seq=None, lengths={10: 50, 300: 4}, packed=True, device="t4", batch=7),
}
"""Each kind of subject."""
