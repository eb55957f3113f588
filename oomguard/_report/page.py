"""Pages: one HTML file about a plan or about several curves, which needs no other file and asks no server."""

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from oomguard._core.progress import tell
from oomguard._core.system import write_file
from oomguard._core.units import format_bytes, format_seconds
from oomguard._plan.value import Plan, epoch_of
from oomguard._report.curve import Curve
from oomguard._report.curves import redrawn_curves
from oomguard._report.draw import DARK, LIGHT, NARROW, WIDE, hover_points, to_png, to_svg
from oomguard._report.plan import explain, known_words, plain_words, train_command
from oomguard._report.tables import FOLDER, Section, check_ending, macros
from oomguard._report.words import NONE, pieces_words, rows_words, setting_words, speed_words, time_words, times

STYLE, SCRIPT = FOLDER / "page.css", FOLDER / "page.js"
LONGEST_BAR = 2.5  # The longest bar in budgets. A longer one fades out at the edge.
PLAIN = "Plain PyTorch"
SCREENS = {"wide": WIDE, "narrow": NARROW}  # the size of a picture by the class that its screen has in the page


def save_page(plan: Plan, path: str | os.PathLike[str], sequences: int | None = None) -> Path:
    """Write a page about the plan to an .html file. `sequences` is the number of sequences in an epoch.

    >>> import tempfile
    >>> from oomguard._api.plan import find_feasible_config
    >>> plan = find_feasible_config(cell="gru", seq=100, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_page(plan, f"{directory}/report.html").name
    'report.html'
    """
    target = check_ending(path, "A page", (".html", ".htm"), "report.html")
    return write_file(target, plan_page(plan, sequences).encode(), "A page")


def save_curves(curves: Sequence[Curve], path: str, heading: str = "Trade-offs", about: str = "") -> Path:
    """Write all curves to one .html page, or the first of them to a .png picture."""
    target = check_ending(path, "A curve", (".png", ".html"), "curves.html")
    picture = target.suffix.lower() == ".png"
    return write_file(target, to_png(curves[0]) if picture else curves_page(curves, heading, about).encode(), "A curve")


def plan_page(plan: Plan, sequences: int | None = None) -> str:
    tell("Estimating what the charts show")
    result, *sections = explain(plan, sequences)
    start = train_command(plan, "plan.json")
    top = macros().result(
        *_verdict(plan), start, " ".join(result.sentences[:-2]), *_bars(plan), _facts(plan, sequences)
    )
    return make_page(result.title, top, sections, redrawn_curves(plan))


def curves_page(curves: Sequence[Curve], heading: str, about: str = "") -> str:
    return make_page(heading, macros().about(about), [], [{"": curve} for curve in curves])


def text_page(title: str, summary: Section, sections: Sequence[Section]) -> str:
    """A page of text and tables, without charts."""
    return make_page(title, macros().about(" ".join([summary.title, *summary.sentences])), sections, [])


def make_page(title: str, top: str, sections: Sequence[Section], curves: list[dict[str, Curve]]) -> str:
    """A document with its own style and script. Its policy lets a browser run that script alone and load nothing."""
    pairs = enumerate(zip(LIGHT.colors, DARK.colors, strict=True))
    colors = "; ".join(f"--slot{slot}: light-dark({light}, {dark})" for slot, (light, dark) in pairs)
    style = f"{STYLE.read_text(encoding='utf-8')}:root {{ {colors} }}"
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the image is a picture of the page on its way to a PNG file
    policy = f"default-src 'none'; img-src data:; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    figures = []
    for number, choices in enumerate(curves):
        tell(f"Drawing chart {number + 1} of {len(curves)}", number / len(curves))
        figures.append(macros().curve_figure([_choice(*choice) for choice in choices.items()]))
    return str(macros().page(title, top, sections, figures, style, script, policy)).lstrip()


def _choice(words: str, curve: Curve) -> tuple[object, ...]:
    """A curve for the template: for each kind of screen the SVG element and the places of its panels."""
    pictures = [(kind, *to_svg(curve, size, f"{curve.name} {words} {kind}")) for kind, size in SCREENS.items()]
    return words, curve, pictures, hover_points(curve)


def _bars(plan: Plan) -> tuple[list[tuple[object, ...]], str, str]:
    """Bars of peak and margin (name, note, size, both shares, too large, cut off), the budget, and its share."""
    plain, budget_bytes = plan.plain.expected, plan.budget_bytes
    scale_bytes = max(budget_bytes, min(plain.safe_bytes, int(LONGEST_BAR * budget_bytes)))
    rows = [
        ("This plan", known_words(plan), plan.peak_bytes, plan.margin_bytes, True),
        (PLAIN, plain_words(plan).removeprefix(PLAIN).strip(), plain.peak_bytes, plain.margin_bytes, plan.plain.fits),
    ]
    bars: list[tuple[object, ...]] = []
    for name, note, peak_bytes, margin_bytes, fits in rows:
        room_bytes = max(0, scale_bytes - peak_bytes)
        shares = _percent(peak_bytes, scale_bytes), _percent(min(margin_bytes, room_bytes), scale_bytes)
        bars.append((name, note, format_bytes(peak_bytes), *shares, not fits, peak_bytes + margin_bytes > scale_bytes))
    return bars, format_bytes(budget_bytes), _percent(budget_bytes, scale_bytes)


def _verdict(plan: Plan) -> tuple[str, str]:
    """Whether the plan fits, and why. A measured peak may fill the budget; an expected one must leave its margin."""
    spare_bytes = plan.budget_bytes - plan.peak_bytes
    if plan.confirmed:
        return "It fits", f"with {format_bytes(spare_bytes)} to spare"
    if spare_bytes >= plan.margin_bytes:
        spare = format_bytes(spare_bytes - plan.margin_bytes)
        return "It is expected to fit", f"with {spare} to spare beside the margin"
    return "It is not sure to fit", "since its peak and margin exceed the budget"


def _percent(size_bytes: int, scale_bytes: int) -> str:
    return f"{100 * min(1.0, size_bytes / max(1, scale_bytes)):.2f}%"


def _facts(plan: Plan, sequences: int | None) -> list[tuple[str, str, str]]:
    """The figures of the summary: name, value, and a note below it."""
    candidate, settings = plan.candidate, setting_words(plan.candidate)
    precision = settings.pop("precision")
    gradient = ("exact", "that of plain PyTorch, up to rounding")
    if candidate.lossy:
        gradient = ("lossy", ", ".join([f"{gain.knob} {gain.value}" for gain in plan.bought] or candidate.lossy))
    step, last = (NONE, "nothing was timed"), ("Speed", NONE, "nothing was timed")
    seconds, throughput, whole = plan.seconds_per_step, plan.throughput, epoch_of(plan, sequences)
    if seconds is not None and throughput is not None and whole is not None:
        step = (time_words(seconds, plan.time_spread), speed_words(throughput, "sequences"))
        size = f"{times(whole.sequences, 'sequence')}, {times(whole.steps, 'step')}"
        last = ("Speed", speed_words(throughput, "sequences"), "a whole optimizer step, with its update")
        if whole.known:  # otherwise nobody knows how long an epoch is
            last = ("An epoch", format_seconds(whole.seconds), size)
    return [
        ("Microbatch", rows_words(candidate), f"batch {plan.spec.batch:,}"),
        ("Segments", pieces_words(candidate), f"T = {plan.spec.steps:,}"),
        ("Precision", precision, ", ".join(settings.values())),
        ("Gradient", *gradient),
        ("A step", *step),
        last,
    ]
