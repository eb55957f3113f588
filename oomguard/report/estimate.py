"""`oomguard estimate`: its JSON, and its screen with terms, verdict and advice."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.candidate import Candidate
from oomguard.estimate.breakdown import Estimate
from oomguard.plan.phrases import peak_words, spec_words
from oomguard.report.common import printer, row, safe
from oomguard.spec import Spec
from oomguard.units import format_bytes

if TYPE_CHECKING:
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
    say = printer(console)
    say(title(spec, estimate), "bold")
    say("")
    _show_terms(estimate, console)
    say(row("total", estimate.total_bytes), "bold")
    budget_bytes = estimate.budget_bytes
    if budget_bytes is not None:
        say(row("margin", estimate.margin_bytes))
        say(row("budget", budget_bytes) + f"  {limit}")
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
    parts = [spec_words(spec), f"T = {spec.steps:,}"]
    parts += [f"{knobs.segments:,} segments"] if knobs.segments > 1 else []
    parts += [f"window {knobs.window:,}"] if knobs.window is not None else []
    parts += [f"batch {spec.batch:,} = {knobs.microbatch:,} × {knobs.accumulation:,}", knobs.precision]
    parts += [spec.optimizer if "optimizer" in estimate.moments else "evaluation"]
    return ", ".join([*parts, f"{estimate.engine} on {estimate.device}"])


def _show_terms(estimate: Estimate, console: "Console") -> None:
    """The terms by size, with their share; a bar where there is room, words where there is more."""
    from rich.text import Text

    rows = sorted(((size, name) for name, size in estimate.terms.items() if size), reverse=True)
    columns = max(0, min(BAR_COLUMNS, console.width - len(row("", 1)) - 10))
    for size, name in rows:
        line = Text(f"{row(name, size)}  {size / max(1, estimate.total_bytes):>6.1%}  ")
        bar = _bar(columns * size / rows[0][0])
        line.append(safe(bar, console), style="cyan")
        if console.width >= WIDE:
            line.append(" " * (columns - len(bar)) + f"  {WORDS[name]}", style="dim")
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _bar(columns: float) -> str:
    """A bar of so many columns, to half a column.

    >>> _bar(2.6), _bar(0.1)
    ('██▌', '')
    """
    halves = round(2 * columns)
    return "█" * (halves // 2) + "▌" * (halves % 2)
