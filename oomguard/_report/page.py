"""Pages: one HTML file about a plan or about several curves, which needs no other file and asks no server."""

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oomguard._core.errors import MisuseError
from oomguard._core.system import write_file
from oomguard._core.units import format_bytes, format_seconds
from oomguard._plan.value import Plan, epoch_of
from oomguard._report.curve import Curve
from oomguard._report.curves import redrawn_curves
from oomguard._report.draw import DARK, LIGHT, NARROW, WIDE, hover_points, to_png, to_svg
from oomguard._report.plan import explain, known_words, plain_words
from oomguard._report.tables import FOLDER, Section, macros
from oomguard._report.words import NONE, pieces_words, rows_words, setting_words, speed_words, times

STYLE, SCRIPT = FOLDER / "page.css", FOLDER / "page.js"
LONGEST_BAR = 2.5  # The longest bar in budgets. A longer one fades out at the edge.
PLAIN = "Plain PyTorch"
SCREENS = {"wide": WIDE, "narrow": NARROW}  # the size of a picture by the class that its screen has in the page


class Bar(NamedTuple):
    """A bar of peak and margin against the budget. Shares are CSS percentages of the longest bar."""

    name: str
    note: str
    size: str
    peak_share: str
    margin_share: str
    over: bool
    cut: bool


class Fact(NamedTuple):
    """A figure of the summary, its name, and a note below it."""

    name: str
    value: str
    note: str


def save_page(plan: Plan, path: str | os.PathLike[str], sequences: int | None = None) -> Path:
    """Write a page about the plan to an .html file. `sequences` is the number of sequences in an epoch.

    >>> import tempfile
    >>> from oomguard._api import find_feasible_config
    >>> plan = find_feasible_config(cell="gru", seq=100, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_page(plan, f"{directory}/report.html").name
    'report.html'
    """
    target = _checked(path, "A page", (".html", ".htm"), "report.html")
    return write_file(target, plan_page(plan, sequences).encode(), "A page")


def save_curves(curves: Sequence[Curve], path: str, heading: str = "Trade-offs", about: str = "") -> Path:
    """Write all curves to one .html page, or the first of them to a .png picture."""
    target = _checked(path, "A curve", (".png", ".html"), "curves.html")
    picture = target.suffix.lower() == ".png"
    return write_file(target, to_png(curves[0]) if picture else curves_page(curves, heading, about).encode(), "A curve")


def _checked(path: str | os.PathLike[str], what: str, suffixes: tuple[str, ...], example: str) -> Path:
    """The path, which must have one of the suffixes: by it, a browser or a viewer knows what the file is."""
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise MisuseError(
            rule=f"{what} is written as {' or '.join(suffixes)}",
            got=f"got {target.name!r}",
            advice=f"Give the file one of these endings, such as {example}.",
        )
    return target


def plan_page(plan: Plan, sequences: int | None = None) -> str:
    result, *sections = explain(plan, sequences)
    facts = [*_knob_facts(plan), *_time_facts(plan, sequences)]
    share = _percent(plan.budget_bytes, _scale_bytes(plan))
    budget = format_bytes(plan.budget_bytes)
    top = macros().result(*_verdict(plan), result.sentences[0], _bars(plan), budget, share, facts)
    return _page(result.title, top, sections, redrawn_curves(plan))


def curves_page(curves: Sequence[Curve], heading: str, about: str = "") -> str:
    return _page(heading, macros().about(about), [], [{"": curve} for curve in curves])


def _page(title: str, top: str, sections: Sequence[Section], curves: list[dict[str, Curve]]) -> str:
    """A document with its own style and script. Its policy lets a browser run that script alone and load nothing."""
    pairs = enumerate(zip(LIGHT.colors, DARK.colors, strict=True))
    colors = "; ".join(f"--slot{slot}: light-dark({light}, {dark})" for slot, (light, dark) in pairs)
    style = f"{STYLE.read_text(encoding='utf-8')}:root {{ {colors} }}"
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    figures = [macros().curve_figure([_choice(*choice) for choice in some.items()]) for some in curves]
    return str(macros().page(title, top, sections, figures, style, script, policy)).lstrip()


def _choice(words: str, curve: Curve) -> tuple[object, ...]:
    """A curve for the template: for each kind of screen the SVG element and the places of its panels."""
    pictures = [(kind, *to_svg(curve, size, f"{curve.name} {words} {kind}")) for kind, size in SCREENS.items()]
    return words, curve, pictures, hover_points(curve)


def _scale_bytes(plan: Plan) -> int:
    """Bytes of the longest possible bar."""
    plain = plan.plain.expected
    return max(plan.budget_bytes, min(plain.safe_bytes, int(LONGEST_BAR * plan.budget_bytes)))


def _bars(plan: Plan) -> list[Bar]:
    plain, scale_bytes = plan.plain.expected, _scale_bytes(plan)
    margin_bytes = 0 if plan.confirmed else plan.expected.margin_bytes
    rows = [
        ("This plan", known_words(plan), plan.peak_bytes, margin_bytes, True),
        (PLAIN, plain_words(plan).removeprefix(PLAIN).strip(), plain.peak_bytes, plain.margin_bytes, plan.plain.fits),
    ]
    bars = []
    for name, note, peak_bytes, margin_bytes, fits in rows:
        peak, margin = _percent(peak_bytes, scale_bytes), _percent(margin_bytes, scale_bytes)
        cut = peak_bytes + margin_bytes > scale_bytes
        bars.append(Bar(name, note, format_bytes(peak_bytes), peak, margin, over=not fits, cut=cut))
    return bars


def _verdict(plan: Plan) -> tuple[str, str]:
    """Whether the plan fits, and why. A measured peak may fill the budget; an expected one must leave its margin."""
    spare_bytes = plan.budget_bytes - plan.peak_bytes
    if plan.confirmed:
        return "It fits", f"with {format_bytes(spare_bytes)} to spare"
    if spare_bytes >= plan.expected.margin_bytes:
        spare = format_bytes(spare_bytes - plan.expected.margin_bytes)
        return "It is expected to fit", f"with {spare} to spare beside the margin"
    return "It is not sure to fit", "since its peak and margin exceed the budget"


def _percent(size_bytes: int, scale_bytes: int) -> str:
    return f"{100 * min(1.0, size_bytes / max(1, scale_bytes)):.2f}%"


def _knob_facts(plan: Plan) -> list[Fact]:
    candidate = plan.candidate
    settings = setting_words(candidate)
    precision = settings.pop("precision")
    gradient = Fact("Gradient", "exact", "that of plain PyTorch, up to rounding")
    if candidate.lossy:
        lossy = [f"{one.knob} {one.value}" for one in plan.bought] or [*candidate.lossy]
        gradient = Fact("Gradient", "lossy", ", ".join(lossy))
    return [
        Fact("Microbatch", rows_words(candidate), f"batch {plan.spec.batch:,}"),
        Fact("Segments", pieces_words(candidate), f"T = {plan.spec.steps:,}"),
        Fact("Precision", precision, ", ".join(settings.values())),
        gradient,
    ]


def _time_facts(plan: Plan, sequences: int | None) -> list[Fact]:
    seconds, throughput, epoch = plan.seconds_per_step, plan.throughput, epoch_of(plan, sequences)
    if seconds is None or throughput is None or epoch is None:
        return [Fact("A step", NONE, "nothing was timed"), Fact("An epoch", NONE, "nothing was timed")]
    size = f"{times(epoch.sequences, 'sequence')}, {times(epoch.steps, 'step')}"
    return [
        Fact("A step", format_seconds(seconds), speed_words(throughput, "sequences")),
        Fact("An epoch", format_seconds(epoch.seconds), size),
    ]
