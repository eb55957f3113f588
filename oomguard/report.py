"""What the screen and the JSON of an estimate, of a record and of the devices say."""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.candidate import Candidate
from oomguard.device.present import Present
from oomguard.device.survey import Seen, Survey
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.gpus import Card
from oomguard.probe.record import Record
from oomguard.spec import Spec
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:  # imported where it is used: with --json nobody waits for it
    from rich.console import Console

WORDS = {
    "runtime": "interpreter and libraries, or the CUDA context",
    "weights": "all weights",
    "gradients": "of the weights",
    "optimizer": "the optimizer's state",
    "activations": "what forward keeps for backward",
    "workspace": "what kernels need while they run",
    "logits": "the head's outputs and the loss",
    "input": "the microbatch and its targets",
    "loader": "microbatches prepared ahead",
}
"""What each term is, for wide screens."""
WIDE, BAR_COLUMNS = 100, 30
"""From so many columns on the terms are explained; the longest bar."""
ASCII = str.maketrans({"→": "->", "×": "x", "█": "#", "▌": "#", "–": "-", "…": "..."})
"""For encodings that have no more."""


def to_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate as one JSON object, with the keys that stay.

    >>> from oomguard.estimate.breakdown import estimate_step
    >>> list(to_json(estimate_step(Spec(cell="gru", seq=10), Candidate(microbatch=1))))[:4]
    ['fits', 'runs', 'total_bytes', 'budget_bytes']
    """
    knobs = estimate.candidate
    figures = ("fits", "runs", "total_bytes", "budget_bytes", "margin_bytes")
    found = {name: getattr(estimate, name) for name in (*figures, "terms", "moment", "moments", "engine", "device")}
    found["candidate"] = msgspec.structs.asdict(knobs) if isinstance(knobs, Candidate) else asdict(knobs)
    if estimate.allocated_bytes is not None:
        found |= {name: getattr(estimate, name) for name in ("allocated_bytes", "reserved_bytes", "host_bytes")}
    plain: dict[str, Any] = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def show_estimate(spec: Spec, estimate: Estimate, limit: str, advice: list[str], console: "Console") -> None:
    """Print one estimate: what, its terms, whether it fits, when the peak is, what to do. `limit` names the budget."""
    say = _printer(console)
    say(title(spec, estimate), "bold")
    say("")
    _show_terms(estimate, console)
    say(_row("total", estimate.total_bytes), "bold")
    budget_bytes = estimate.budget_bytes
    if budget_bytes is not None:
        say(_row("margin", estimate.margin_bytes))
        say(_row("budget", budget_bytes) + f"  {limit}")
        spare_bytes = budget_bytes - estimate.total_bytes - estimate.margin_bytes
        say("")
        if not estimate.runs:
            say(f"CANNOT RUN: {estimate.engine} does not take {estimate.steps:,} steps at once.", "bold red")
        elif estimate.fits:
            say(f"FITS with {format_bytes(spare_bytes)} to spare.", "bold green")
        else:
            say(f"DOES NOT FIT by {format_bytes(-spare_bytes)}.", "bold red")
    say(peak_words(estimate.moment))
    if estimate.host_bytes:
        say(f"Beside that, {format_bytes(estimate.host_bytes)} of the host's memory.")
    if advice:
        say("")
        say("Advice", "bold")
    for line in advice:
        say(line, indent="  ", hanging="    ")


def title(spec: Spec, estimate: Estimate) -> str:
    """What was estimated, in one line.

    >>> from oomguard.estimate.breakdown import estimate_step
    >>> title(Spec(cell="lstm", seq=10_000), estimate_step(Spec(cell="lstm", seq=10_000), Candidate(microbatch=32)))
    'lstm 64 → 256 × 2 layers, T = 10,000, batch 32 = 32 × 1, fp32, adam, onednn on cpu'
    """
    knobs = estimate.candidate
    inputs = f"{spec.inputs}" if spec.vocab is None else f"{spec.vocab:,} → {spec.inputs}"
    hidden = f"{spec.hidden}" if spec.projection is None else f"{spec.hidden} → {spec.projection}"
    layers = f"{spec.layers} layer{'s' if spec.layers > 1 else ''}" + (" × 2 directions" if spec.bidirectional else "")
    parts = [f"{spec.cell} {inputs} → {hidden} × {layers}", f"T = {spec.steps:,}"]
    parts += [f"{knobs.segments:,} segments"] if knobs.segments > 1 else []
    parts += [f"window {knobs.window:,}"] if knobs.window is not None else []
    parts += [f"batch {spec.batch:,} = {knobs.microbatch:,} × {knobs.accumulation:,}", knobs.precision]
    parts += [spec.optimizer if "optimizer" in estimate.moments else "evaluation"]
    return ", ".join([*parts, f"{estimate.engine} on {estimate.device}"])


def peak_words(moment: str) -> str:
    """When the peak is, as a sentence.

    >>> peak_words("forward"), peak_words("backward of layer 2")
    ('The peak comes at the end of the forward pass.', 'The peak comes in the backward pass of layer 2.')
    """
    words = {
        "forward": "at the end of the forward pass",
        "loss": "when the loss is computed",
        "optimizer": "in the optimizer's step",
    }
    return f"The peak comes {words.get(moment, 'in the ' + moment.replace(' of ', ' pass of '))}."


def _show_terms(estimate: Estimate, console: "Console") -> None:
    """The terms by size, with their share; a bar where there is room, words where there is more."""
    from rich.text import Text

    rows = sorted(((size, name) for name, size in estimate.terms.items() if size), reverse=True)
    columns = max(0, min(BAR_COLUMNS, console.width - len(_row("", 1)) - 10))
    for size, name in rows:
        line = Text(f"{_row(name, size)}  {size / max(1, estimate.total_bytes):>6.1%}  ")
        bar = _bar(columns * size / rows[0][0])
        line.append(_safe(bar, console), style="cyan")
        if console.width >= WIDE:
            line.append(" " * (columns - len(bar)) + f"  {WORDS[name]}", style="dim")
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


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
    say = _printer(console)
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
            f"{record.tokens_per_second:,.0f} tokens per second ({_times(record.passes, 'pass', 'es')} measured)."
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


def _times(count: int, word: str, plural: str = "s") -> str:
    return f"{count:,} {word}{plural if count != 1 else ''}"


def _row(name: str, size_bytes: int) -> str:
    """A name and a size in columns."""
    return f"{name:<11}  {format_bytes(size_bytes):>11}"


def _bar(columns: float) -> str:
    """A bar of so many columns, to half a column.

    >>> _bar(2.6), _bar(0.1)
    ('██▌', '')
    """
    halves = round(2 * columns)
    return "█" * (halves // 2) + "▌" * (halves % 2)


def devices_json(found: Survey) -> dict[str, Any]:
    """All devices as one JSON object: names, what may be used, every limit, and what there is to say of a card."""
    return {"devices": [_device_json(one) for one in found.devices], "note": found.note}


def _device_json(one: Seen) -> dict[str, Any]:
    figures = {name: getattr(one.budget, name) for name in ("limit_bytes", "left_bytes", "committed_bytes")}
    document = {"device": one.budget.device, "name": one.name, **figures}
    document["limits"] = [msgspec.structs.asdict(limit) for limit in one.budget.limits]
    document["precisions"] = list(one.precisions)
    if one.card is not None:
        names = ("uuid", "compute_capability", "total_bytes", "free_bytes")
        document |= {name: getattr(one.card, name) for name in names}
        document["others"] = [msgspec.structs.asdict(holder) for holder in one.card.others]
    return document


def card_json(card: Card) -> dict[str, Any]:
    """A card that `--device` takes by name."""
    names = ("name", "memory_bytes", "usable_bytes", "compute_capability", "source")
    return {name: getattr(card, name) for name in names}


def show_devices(found: Survey, console: "Console") -> None:
    """Print what this process may use, device by device, and who says so."""
    say = _printer(console)
    for place, one in enumerate(found.devices):
        budget = one.budget
        if place:
            say("")
        say(f"{budget.device}  {one.name}", "bold")
        say(f"may use {format_bytes(budget.limit_bytes)}, by {budget.binding.name}", "green", indent="  ")
        if budget.committed_bytes is not None:
            say(f"may ask for {format_bytes(budget.committed_bytes)}, used or not", "green", indent="  ")
        for limit in budget.limits:
            say(_row(limit.name, limit.reach_bytes) + f"  of {format_bytes(limit.limit_bytes)}", indent="  ")
            say(limit.source, "dim", indent="    ")
        if one.card is not None:
            say(_card_words(one.card), indent="  ", hanging="    ")
        say(f"computes in {', '.join(one.precisions)}", indent="  ")
    if found.note is not None:
        say("")
        say(found.note)
    if all(one.card is None for one in found.devices):
        say("oomguard devices --cards lists the cards that --device takes by name.")


def _card_words(card: Present) -> str:
    """What a card can and has. (Who else holds memory of it is said with its limit.)"""
    words = [f"compute capability {'.'.join(map(str, card.compute_capability))}"]
    if card.total_bytes is not None and card.free_bytes is not None:
        words += [f"{format_bytes(card.total_bytes)} in all", f"{format_bytes(card.free_bytes)} free"]
    return ", ".join(words)


def show_cards(cards: Iterable[Card], console: "Console") -> None:
    """Print the cards that `--device` takes by name."""
    say = _printer(console)
    for card in cards:
        generation = ".".join(map(str, card.compute_capability))
        say(f"{card.name:<24}  {format_bytes(card.usable_bytes):>10}  sm {generation}")


def _printer(console: "Console") -> Callable[..., None]:
    """Prints text in lines that fit the terminal and letters that it has, without reading markup into it."""
    from rich.text import Text

    def say(text: str, style: str = "", *, indent: str = "", hanging: str | None = None) -> None:
        fill = textwrap.TextWrapper(
            width=max(20, console.width),
            initial_indent=indent,
            subsequent_indent=indent if hanging is None else hanging,
            break_on_hyphens=False,  # a flag stays whole
        )
        for line in fill.wrap(_safe(text, console)) or [""]:
            console.print(Text(line, style=style), no_wrap=True, overflow="ignore", crop=False)

    return say


def _safe(text: str, console: "Console") -> str:
    return text if console.encoding.startswith("utf") else text.translate(ASCII)
