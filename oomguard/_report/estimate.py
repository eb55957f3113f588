"""`oomguard estimate`, `oomguard probe` and `oomguard devices`: estimates, records and memory as text and JSON."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.units import format_bytes, format_seconds
from oomguard._device.cuda import Cuda
from oomguard._estimate.breakdown import KNOWN, Estimate
from oomguard._estimate.target import CUDA_BUILD_RUNTIME_BYTES
from oomguard._probe.record import Probed, Record, TaskRecord
from oomguard._report.tables import Table, printer, show_table
from oomguard._report.words import candidate_words, peak_words, sentence, spec_words, times
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard._device.find import Device
    from oomguard._device.nvml import CardStatus
    from oomguard._estimate.cards import Card

WORDS = {
    "runtime": "Python and PyTorch themselves, or the CUDA context",
    "weights": "the weights of the model",
    "gradients": "the gradients of the weights",
    "optimizer": "the state of the optimizer",
    "activations": "results of the forward pass kept for the backward pass",
    "workspace": "memory that kernels need while they run",
    "logits": "the outputs of the head, and the loss",
    "input": "the microbatch and its targets",
    "loader": "microbatches that the loader prepares ahead",
}
"""The meaning of each term, for wide terminals."""
WIDE, BAR_WIDTH = 120, 30
"""The terminal width from which on terms are explained, and the width of the longest bar, in characters."""
PARTS = 8  # parts of a task that are shown, the largest first


def to_json(estimate: Estimate) -> dict[str, Any]:
    knobs = estimate.candidate
    names = ("fits", "runs", "total_bytes", "budget_bytes", "margin_bytes", "terms", "moment", "moments", "engine")
    document = _attrs(estimate, *names, "device")
    document["candidate"] = knobs if isinstance(knobs, Candidate) else knobs.knobs
    if estimate.parts:
        document |= _attrs(estimate, "parts", "notes", "steps")
    if estimate.allocated_bytes is not None:
        document |= _attrs(estimate, "allocated_bytes", "reserved_bytes", "host_bytes")
    return dict(msgspec.to_builtins(document, enc_hook=lambda value: value.tolist()))  # numbers and arrays of NumPy


def _attrs(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def record_json(record: Record | TaskRecord, estimate: Estimate) -> dict[str, Any]:
    """The estimate, and the fields of the record beside it. Those that both have are called measured_..."""
    same = ("spec", "candidate", "device", "engine", "budget_bytes")
    fields = {name: value for name, value in msgspec.to_builtins(record).items() if name not in same}
    in_both = ("terms", "allocated_bytes", "reserved_bytes")
    return to_json(estimate) | {f"measured_{name}" if name in in_both else name: fields[name] for name in fields}


def show_estimate(spec: Spec, estimate: Estimate, limit: str, advice: list[str], console: "Console") -> None:
    """Print an estimate: its terms, whether it fits, when memory peaks, and advice. `limit` names the budget."""
    say = printer(console)
    _show_title(spec, estimate, console)
    _show_fit(estimate, console)
    limited = f" The budget is set by {limit}." if estimate.budget_bytes is not None else ""
    say(f"All figures are by arithmetic: nothing was run.{limited}")
    show_advice(advice, console)


def show_advice(advice: list[str], console: "Console") -> None:
    """Print advice, if there is any."""
    say = printer(console)
    if advice:
        say("")
        say("Advice", "bold")
    for line in advice:
        say(line, indent="  ", hanging="    ")


def show_task_estimate(name: str, estimate: Estimate, limit: str, console: "Console") -> None:
    """Print the estimate of a task: as that of a spec, with the parts of the model at the peak."""
    assert isinstance(estimate.candidate, Candidate)
    say = printer(console)
    say(f"{name} on {estimate.device}", "bold")
    say(sentence(candidate_words(msgspec.structs.replace(estimate.candidate, engine=estimate.engine))))
    say("")
    _show_fit(estimate, console)
    rows = tuple((part, format_bytes(size)) for part, size in [*estimate.parts.items()][:PARTS])
    say("")
    show_table(Table(header=("parts at the peak", ""), rows=rows, align="lr"), console)
    say("")
    for note in (*estimate.notes, f"The budget is set by {limit}."):
        say(note)


def _show_fit(estimate: Estimate, console: "Console") -> None:
    """Print the terms, whether they fit, and when memory peaks."""
    say = printer(console)
    show_table(_terms(estimate, console.width), console)
    say("")
    if estimate.budget_bytes is not None:
        spare_bytes = int(estimate.budget_bytes - estimate.total_bytes - estimate.margin_bytes)
        if not estimate.runs:
            say(f"CANNOT RUN: {estimate.engine} cannot run {estimate.steps:,} steps at once.", "bold red")
        elif estimate.fits:
            say(f"FITS with {format_bytes(spare_bytes)} to spare.", "bold green")
        else:
            say(f"DOES NOT FIT by {format_bytes(-spare_bytes)}.", "bold red")
    build = ", in a build for CUDA" * (int(estimate.terms["runtime"]) >= CUDA_BUILD_RUNTIME_BYTES)
    runtime = f"PyTorch itself{build}" if estimate.device == "cpu" else "the CUDA context"
    explained = f" The runtime is {runtime}." if console.width < WIDE else ""  # a wide terminal has a column for it
    say(peak_words(str(estimate.moment)) + explained)
    if estimate.host_bytes:
        say(f"It also needs {format_bytes(int(estimate.host_bytes))} of host memory.")


def title(spec: Spec, estimate: Estimate) -> str:
    optimizer = spec.optimizer if "optimizer" in estimate.moments else "evaluation"
    return f"{spec_words(spec)}, T = {spec.steps:,}, batch {spec.batch:,}, {optimizer} on {estimate.device}"


def _show_title(spec: Spec, estimate: Estimate, console: "Console") -> None:
    assert isinstance(estimate.candidate, Candidate)
    say, candidate = printer(console), msgspec.structs.replace(estimate.candidate, engine=estimate.engine)
    say(title(spec, estimate), "bold")
    say(sentence(candidate_words(candidate)))
    say("")


def _terms(estimate: Estimate, width: int) -> Table:
    """The terms by size with their shares and bars, and their meaning where the terminal is wide; then the budget."""
    sizes = sorted(((int(size), name) for name, size in estimate.terms.items() if size), reverse=True)
    bar_width = max(0, min(BAR_WIDTH, width - 34))
    whole = max(1, int(estimate.total_bytes))
    rows = [
        (name, format_bytes(size), f"{size / whole:.1%}", _bar(bar_width * size / sizes[0][0])) for size, name in sizes
    ]
    totals = [("total", int(estimate.total_bytes))]
    if estimate.budget_bytes is not None:
        totals += [("margin", int(estimate.margin_bytes)), ("budget", estimate.budget_bytes)]
    rows += [(name, format_bytes(size), "", "since estimates err" * (name == "margin")) for name, size in totals]
    columns = 5 if width >= WIDE else 4
    return Table(
        header=("",) * columns,
        rows=tuple((*row, WORDS.get(row[0], ""))[:columns] for row in rows),
        align="lrrll"[:columns],
        sums=len(totals),
        styles=("", "", "", "cyan", "dim")[:columns],
    )


def _bar(width: float) -> str:
    """A bar, to half a character."""
    halves = round(2 * width)
    return "█" * (halves // 2) + "▌" * (halves % 2)


def show_record(record: Record | TaskRecord, estimate: Estimate, console: "Console") -> None:
    """Print the result of a probe: measured beside estimated memory, the verdict, and the speed."""
    say = printer(console)
    if isinstance(record, Record):
        _show_title(record.spec, estimate, console)
    else:
        length = "the longest samples" if record.seq is None else f"T = {record.seq:,}"
        say(f"{record.task}, {length}, batch {record.batch:,} on {record.device}", "bold")
        say(sentence(candidate_words(record.candidate)))
        say("")
    show_table(_comparison(record, estimate), console)
    say("")
    say(f"{record.verdict.name}: {record.message}", "bold green" if record.verdict.ran else "bold red")
    say(record.verdict.advice)
    if record.seconds_per_step is not None and record.tokens_per_second is not None:
        say(
            f"A step of the whole batch takes {format_seconds(record.seconds_per_step)}, "
            f"{record.tokens_per_second:,.0f} tokens/s (measured over {times(record.passes, 'pass', 'es')})."
        )
    if record.error is not None and record.verdict.value in ("BROKEN", "CRASHED"):
        say("")
        for line in record.error.splitlines():
            say(line, "dim")


def _comparison(record: Probed, estimate: Estimate) -> Table:
    """Estimated and measured terms, with the error of the estimate, then the limits."""
    measured = record.terms or {}
    rest = sum(int(size) for name, size in estimate.terms.items() if name not in KNOWN)  # a probe has no loader
    rows = [
        *(_pair(name, int(estimate.terms[name]), measured.get(name)) for name in KNOWN),
        _pair("the rest", rest, measured["rest"] + measured["gradients"] if measured else None),
    ]
    limits = [("budget", record.budget_bytes), ("committed", record.committed_bytes)]
    limits += [("may commit", record.committed_budget_bytes)]
    totals = [_pair("total", int(estimate.total_bytes), record.peak_bytes if measured else None)]
    totals += [(name, "", format_bytes(size), "") for name, size in limits if size is not None]
    if record.reserved_bytes is not None and record.allocated_bytes is not None:
        totals.append(_pair("allocated", int(estimate.allocated_bytes or 0), record.allocated_bytes))
        totals.append(_pair("reserved", int(estimate.reserved_bytes or 0), record.reserved_bytes))
    header = ("", "estimate", "measured", "error")
    return Table(header=header, rows=(*rows, *totals), align="lrrr", sums=len(totals))


def _pair(name: str, estimated_bytes: int, measured_bytes: int | None) -> tuple[str, str, str, str]:
    """A row: the name, the estimated and the measured size, and the error of the estimate."""
    if measured_bytes is None:
        return name, format_bytes(estimated_bytes), "", ""
    error = f"{estimated_bytes / measured_bytes - 1:+.1%}" if measured_bytes else ""
    return name, format_bytes(estimated_bytes), format_bytes(measured_bytes), error


def devices_json(devices: "list[Device]", note: str | None) -> dict[str, Any]:
    documents = []
    for device in devices:
        document: dict[str, object] = {"device": device.name, "name": device.title()}
        document |= _attrs(device.budget(), "limit_bytes", "left_bytes", "committed_bytes", "limits")
        document["precisions"] = device.precisions()
        if isinstance(device, Cuda):
            document |= _attrs(device.status(), "uuid", "compute_capability", "total_bytes", "free_bytes", "others")
        documents.append(document)
    return {"devices": msgspec.to_builtins(documents), "note": note}


def card_json(card: "Card") -> dict[str, Any]:
    return _attrs(card, "name", "memory_bytes", "usable_bytes", "compute_capability", "source")


def show_devices(devices: "list[Device]", note: str | None, console: "Console") -> None:
    """Print what this process may use of each device, every limit, and where it was read."""
    say = printer(console)
    for device in devices:
        budget = device.budget()
        say(f"{device.name}  {device.title()}", "bold")
        may = f"This process may use {format_bytes(budget.limit_bytes)}, limited by {budget.binding.name}."
        say(may, "green", indent="  ")
        if budget.committed_bytes is not None:
            say(f"It may allocate {format_bytes(budget.committed_bytes)}, used or not.", "green", indent="  ")
        rows = tuple(
            (limit.name, format_bytes(limit.reach_bytes), format_bytes(limit.limit_bytes), limit.source)
            for limit in budget.limits
        )
        header = ("limit", "available", "in all", "read from")
        show_table(Table(header=header, rows=rows, align="lrrl"), console, indent="  ")
        if isinstance(device, Cuda):
            say(_card_words(device.status()), indent="  ", hanging="    ")
        say(f"Precisions: {', '.join(device.precisions())}.", indent="  ")
        say("")
    if note is not None:
        say(note)
    if not any(isinstance(device, Cuda) for device in devices):
        say("oomguard devices --cards lists the cards that --device takes by name.")


def _card_words(card: "CardStatus") -> str:
    """The generation and the memory of a card. (Its limit names other processes that hold memory.)"""
    words = [f"Compute capability {'.'.join(map(str, card.compute_capability))}"]
    if card.total_bytes is not None and card.free_bytes is not None:
        words += [f"{format_bytes(card.total_bytes)} in all", f"{format_bytes(card.free_bytes)} free"]
    return ", ".join(words) + "."


def show_cards(cards: "Iterable[Card]", console: "Console") -> None:
    rows = tuple(
        (card.name, format_bytes(card.usable_bytes), ".".join(map(str, card.compute_capability))) for card in cards
    )
    header = ("card", "usable memory", "compute capability")
    show_table(Table(header=header, rows=rows, align="lrr"), console)
