"""A plan from somebody who means no good: every text in it that is not checked tries to become a part of the page."""

import json
from typing import Any

import msgspec
from plan.making import lossy

from oomguard.plan.value import Plan

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "\"><img src=x onerror='window.hacked = 1'>",
    "</script><svg onload=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "</style><b onclick=alert(1)>x</b>",
)
FREE = ("oomguard", "torch", "library", "driver", "python", "system", "device", "title", "name", "source", "message")
FREE += ("error", "moment", "engine", "ended", "value", "knob")
"""Fields that may hold any text."""
CHECKED = ("candidate", "exact", "spec")
"""Values whose texts are checked when a plan is read."""


def hostile() -> Plan:
    """As it would be read from a file."""
    plan = lossy()
    attacks = iter(ATTACKS * 100)

    def spoil(value: Any, name: str = "") -> Any:
        if isinstance(value, dict) and name == "exports":
            return {f"MALLOC_{next(attacks)}": next(attacks)}
        if isinstance(value, dict) and name == "terms":
            return {key + next(attacks): size for key, size in value.items()}
        if isinstance(value, dict):
            return {key: one if key in CHECKED else spoil(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [spoil(one, name) for one in value]
        return next(attacks) if name in FREE and (isinstance(value, str) or value is None) else value

    return msgspec.json.decode(json.dumps(spoil(plan.to_dict())), type=Plan)
