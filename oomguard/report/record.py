"""`oomguard probe`: a record beside its estimate."""

from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.estimate.breakdown import Estimate
from oomguard.plan.phrases import times
from oomguard.probe.record import Record
from oomguard.report.common import printer
from oomguard.report.estimate import title, to_json
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

MEASURED = ("runtime", "weights", "optimizer", "input")
"""Terms that a probe can tell apart; of the others (gradients come and go) it knows the sum."""


def record_json(record: Record, estimate: Estimate) -> dict[str, Any]:
    """A record beside its estimate: the keys of the estimate, and those of the record that stay."""
    told = msgspec.to_builtins(record)
    for name in ("spec", "candidate", "device", "engine", "budget_bytes"):
        del told[name]
    clash = ("terms", "allocated_bytes", "reserved_bytes")  # the estimate has these too
    return to_json(estimate) | {f"measured_{name}" if name in clash else name: one for name, one in told.items()}


def show_record(record: Record, estimate: Estimate, console: "Console") -> None:
    """Print what came of a probe, term by term beside the estimate, with the error of the estimate."""
    say = printer(console)
    say(title(record.spec, estimate), "bold")
    say("")
    say(f"{'':<11}  {'estimate':>11}  {'measured':>11}  {'error':>7}", "dim")
    measured = record.terms or {}
    for name in MEASURED:
        say(_pair(name, estimate.terms[name], measured.get(name)))
    rest = sum(size for name, size in estimate.terms.items() if name not in MEASURED)  # no loader: a probe has none
    say(_pair("the rest", rest, measured["rest"] + measured["gradients"] if measured else None))
    say(_pair("total", estimate.total_bytes, record.peak_bytes if measured else None), "bold")
    say(f"{'budget':<11}  {'':>11}  {format_bytes(record.budget_bytes):>11}")
    if record.committed_bytes is not None:
        most = record.committed_budget_bytes
        limit = "" if most is None else f"  of {format_bytes(most)}"
        say(f"{'committed':<11}  {'':>11}  {format_bytes(record.committed_bytes):>11}{limit}")
    if record.reserved_bytes is not None and record.allocated_bytes is not None:
        assert estimate.allocated_bytes is not None
        assert estimate.reserved_bytes is not None
        say(_pair("allocated", estimate.allocated_bytes, record.allocated_bytes))
        say(_pair("reserved", estimate.reserved_bytes, record.reserved_bytes))
    say("")
    say(f"{record.verdict.name}: {record.message}", "bold green" if record.verdict.ran else "bold red")
    say(record.verdict.advice)
    if record.seconds_per_step is not None and record.tokens_per_second is not None:
        say(
            f"{format_seconds(record.seconds_per_step)} for a step of the whole batch, "
            f"{record.tokens_per_second:,.0f} tokens per second ({times(record.passes, 'pass', 'es')} measured)."
        )
    if record.error is not None and record.verdict.value in ("BROKEN", "CRASHED"):
        say("")
        for line in record.error.splitlines():
            say(line, "dim")


def _pair(name: str, estimated_bytes: int, measured_bytes: int | None) -> str:
    """A name, what was estimated, what was measured, and by how much the estimate is off.

    >>> _pair("weights", 1100, 1000)
    'weights         1.07 KiB       1000 B   +10.0%'
    """
    line = f"{name:<11}  {format_bytes(estimated_bytes):>11}"
    if measured_bytes is None:
        return line
    error = f"{estimated_bytes / measured_bytes - 1:+.1%}" if measured_bytes else ""
    return f"{line}  {format_bytes(measured_bytes):>11}  {error:>7}".rstrip()
