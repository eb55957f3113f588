"""Plans without a search: by arithmetic for a card, and with records that nobody measured."""

from collections.abc import Callable
from typing import Any

import msgspec

import oomguard
from oomguard._core.units import GIB, MIB
from oomguard._plan.value import LossyGain, Plan
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict

CARD = "a100-80gb"


def reckoned(**asked: Any) -> Plan:
    """By arithmetic alone, with the gradient of plain PyTorch."""
    usual: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "device": CARD, "allow": "none"}
    plan: Plan = oomguard.find_feasible_config(**usual | asked)
    return plan


def record(plan: Plan, **changes: Any) -> Record:
    """What a run of the chosen candidate might have told."""
    usual: dict[str, Any] = {
        "verdict": Verdict.FITS,
        "message": "It peaked.",
        "peak_bytes": 618 * MIB,
        "seconds_per_step": 21.5,
        "tokens_per_second": 14_870.0,
        "passes": 1,
        "steps": 1,
        "spec": plan.spec,
        "candidate": plan.candidate,
        "device": "cuda:0",
        "engine": "cudnn",
        "budget_bytes": plan.budget_bytes,
        "started": "2026-01-01T00:00:00.000+00:00",
        "seconds": 30.0,
    }
    return Record(**usual | changes)


def measured(plan: Plan | None = None, **changes: Any) -> Plan:
    """As if a search had run two probes: something that timed out, and the chosen candidate at full length."""
    plan = plan or reckoned()
    own = record(plan)
    late = record(
        plan, verdict=Verdict.TIMEOUT, peak_bytes=None, seconds_per_step=None, tokens_per_second=None, steps=0
    )
    calibration = msgspec.structs.replace(plan.calibration, records=1, ratio=0.9)
    usual = {"record": own, "records": (late, own), "probes": 2, "ended": "done", "seconds": 85.6, "enough_rows": 8}
    return msgspec.structs.replace(plan, **{**usual, "calibration": calibration} | changes)


def shorter(plan: Plan | None = None) -> Plan:
    """As if there had been no time for the full length."""
    plan = plan or reckoned()
    own = record(plan, spec=msgspec.structs.replace(plan.spec, seq=500), seconds_per_step=1.0)
    return measured(plan, record=own, records=(own,), probes=1, ended="timeout")


def bucketed(**changes: Any) -> Plan:
    """With a histogram, and times for its buckets."""
    plan = measured(reckoned(seq=None, lengths={100: 5000, 1000: 300, 8000: 20}), **changes)
    timed = [
        msgspec.structs.replace(
            bucket, expected=msgspec.structs.replace(bucket.expected, seconds_per_step=bucket.longest / 100)
        )
        for bucket in plan.buckets
    ]
    return msgspec.structs.replace(plan, buckets=tuple(timed))


def lossy(exact: bool = True, *, fits: bool = False) -> Plan:
    """With bf16, which bought something, or without which nothing fits, or was searched."""
    plan = measured(reckoned(precision="bf16", allow="precision"))
    other = msgspec.structs.replace(plan.candidate, precision="fp32", segments=7) if exact else None
    bought = LossyGain(
        knob="precision",
        value="bf16",
        exact=other,
        speedup=1.8 if exact else None,
        saved_bytes=2 * GIB if exact else None,
    )
    return msgspec.structs.replace(plan, bought=(bought,), plain=msgspec.structs.replace(plan.plain, fits=fits))


def fronted() -> Plan:
    """With a front."""
    return reckoned(device="t4", maximize="throughput,seq")


EVERY: dict[str, Callable[[], Plan]] = {
    "reckoned": reckoned,
    "measured": measured,
    "shorter": shorter,
    "bucketed": bucketed,
    "lossy": lambda: lossy(fits=True),
    "fronted": fronted,
    "interrupted": lambda: measured(ended="interrupted"),
    "unrun": lambda: measured(record=None),
    "exports": lambda: measured(exports={"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MALLOC_ODD_": "a b"}),
}
"""Each kind of plan."""
