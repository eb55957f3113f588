"""The plans that pages are tested with, each page made once."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from plan.making import bucketed, fronted, lossy, reckoned
from plan.searched import searched
from plans import plan_of

from oomguard._plan.value import Plan
from oomguard._report.curves import curves_of
from oomguard._report.page import curves_page, plan_page
from oomguard._report.subject import find_subject

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "\"><img src=x onerror='window.hacked = 1'>",
    "</script><svg onload=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "</style><b onclick=alert(1)>x</b>",
)
"""Texts that try to become a part of the page."""
FREE = {
    *("oomguard", "torch", "library", "driver", "python", "system", "device", "title", "name", "source"),
    *("message", "error", "moment", "engine", "value", "knob"),
}
"""Fields that may hold any text."""
CHECKED = {"candidate", "exact", "spec"}
"""Values whose texts are checked when a plan is read."""


def hostile() -> Plan:
    """With buckets, a front and a lossy knob, from somebody who means no good, as it would be read from a file."""
    half = lossy()
    plan = msgspec.structs.replace(bucketed(), front=fronted().front, bought=half.bought, candidate=half.candidate)
    return msgspec.json.decode(json.dumps(_spoil(plan.to_dict(), "", iter(ATTACKS * 100))), type=Plan)


def _spoil(value: Any, name: str, attacks: Any) -> Any:
    if isinstance(value, dict) and name == "exports":
        return {f"MALLOC_{next(attacks)}": next(attacks)}
    if isinstance(value, dict) and name == "terms":
        return {key + next(attacks): size for key, size in value.items()}
    if isinstance(value, dict):
        return {key: item if key in CHECKED else _spoil(item, key, attacks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spoil(item, name, attacks) for item in value]
    return next(attacks) if name in FREE and (isinstance(value, str) or value is None) else value


MAKERS: dict[str, Callable[[], Plan]] = {
    "a processor": lambda: searched("lstm in 600 MiB")[2],
    "a processor, nothing measured": plan_of,
    "a card, nothing measured": reckoned,
    "hostile": hostile,
}


@cache
def plan_called(kind: str) -> Plan:
    """A plan by its name."""
    return MAKERS[kind]()


TRADEOFFS = "trade-offs of a card"
"""A page that is about no plan."""


@cache
def page_of(kind: str) -> str:
    """Its page."""
    if kind == TRADEOFFS:
        return curves_page(curves_of(find_subject(cell="lstm", seq=10_000, device="t4")), "Trade-offs")
    return plan_page(plan_called(kind))
