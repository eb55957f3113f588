"""Specs, candidates, speeds and moments in words. Every screen and every page takes them from here."""

from oomguard._core.units import format_seconds
from oomguard._predict.speed import NOISY
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import Spec

NONE = "–"  # the cell of a table that has no figure
SHAPE = tuple(name for name, knob in KNOBS.items() if knob.role.group == "shape")
"""The knobs that cut a step into pieces. All other knobs are settings."""
_TIME_UNITS = (("s", 1), ("min", 60), ("h", 3600), ("day", 86_400))
ALLOCATORS = {"tight": "returns freed memory", "fast": "keeps freed memory"}  # what they do, in brief


def spec_words(spec: Spec) -> str:
    inputs = f"{spec.inputs}" if spec.vocab is None else f"{spec.vocab:,} → {spec.inputs}"
    hidden = f"{spec.hidden}" if spec.projection is None else f"{spec.hidden} → {spec.projection}"
    directions = " × 2 directions" if spec.bidirectional else ""
    return f"{spec.cell} {inputs} → {hidden} × {times(spec.layers, 'layer')}{directions}"


def task_words(spec: Spec, device: str) -> str:
    return f"{spec_words(spec)}, T = {spec.steps:,}, batch {spec.batch:,} on {device}"


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def times(count: int, word: str, plural: str = "s") -> str:
    return f"{count:,} {word}{plural if count != 1 else ''}"


def rows_words(candidate: Candidate) -> str:
    """Microbatch and accumulation, for a column titled `microbatch`."""
    return f"{candidate.microbatch:,} × {candidate.accumulation:,}"


def pieces_words(candidate: Candidate) -> str:
    """Segments or the window, for a column titled `segments`."""
    if candidate.window is not None:
        return f"window {candidate.window:,}"
    stored = " without recomputation" if candidate.segments > 1 and not candidate.recompute else ""
    levels = f" in {candidate.levels} levels" if candidate.levels > 1 else ""
    return f"{candidate.segments:,}{levels}{stored}"


def pieces_phrase(candidate: Candidate) -> str:
    """How the candidate divides the sequence, as the end of a phrase."""
    if candidate.window is not None:
        return f" with a window of {candidate.window:,} steps"
    kept = "" if candidate.recompute else " without recomputation"
    return f" with {candidate.segments:,} segments{kept}" if candidate.segments > 1 else ""


def setting_words(candidate: Candidate) -> dict[str, str]:
    """The precision, and every other setting that is not at its default, by the name of the knob."""
    words = {name: knob.in_words(getattr(candidate, name)) for name, knob in KNOBS.items() if name not in SHAPE}
    return {name: text for name, text in words.items() if text}


def candidate_words(candidate: Candidate) -> str:
    """A candidate in words: its microbatch, its segments or window, and every setting that is not the default."""
    parts = [f"microbatch {candidate.microbatch:,} × {times(candidate.accumulation, 'pass', 'es')}"]
    if candidate.window is not None:
        parts.append(pieces_words(candidate))
    elif candidate.segments > 1:
        parts.append(pieces_words(candidate).replace(f"{candidate.segments:,}", f"{candidate.segments:,} segments", 1))
    return ", ".join([*parts, *setting_words(candidate).values()])


def chosen_words(candidate: Candidate) -> str:
    """The candidate of a plan as a sentence, with the meaning of its allocator: a newcomer meets it here first."""
    words, brief = candidate_words(candidate), ALLOCATORS.get(candidate.allocator or "")
    setting = f"allocator {candidate.allocator}"
    return sentence(words if brief is None else words.replace(setting, f"{setting} ({brief})"))


def time_words(seconds: float, spread: float | None = None, *, about: bool = False) -> str:
    """A measured or predicted time; if it is noisy, with its standard deviation in percent."""
    noisy = spread is not None and spread >= NOISY
    return f"{'about ' if about or noisy else ''}{noisy_words(seconds, spread)}"


def noisy_words(seconds: float, spread: float | None) -> str:
    """A time as a table has it."""
    return format_seconds(seconds) + ("" if spread is None or spread < NOISY else f" ±{_percent(spread)}")


def noise_words(spread: float | None) -> tuple[str, ...]:
    """A sentence that explains the mark of a noisy time, if there is one."""
    if spread is None or spread < NOISY:
        return ()
    return (f"±{_percent(spread)} is how much repeated times of a step differ here (their standard deviation).",)


def _percent(spread: float) -> str:
    """A standard deviation of the logarithm of a time, which says little beyond 100 %."""
    return f"{100 * spread:.0f} %" if spread <= 1 else "100 % and more"


def speed_words(per_second: float, word: str) -> str:
    """A speed, per the unit of time that gives a readable figure."""
    unit, seconds = next((pair for pair in _TIME_UNITS if per_second * pair[1] >= 0.5), _TIME_UNITS[-1])
    return f"{figure(per_second * seconds)} {word}/{unit}"


def figure(value: float) -> str:
    """A number with three digits, or with all digits before the decimal point if there are more."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def peak_words(moment: str) -> str:
    words = {
        "forward": "at the end of the forward pass",
        "loss": "when the loss is computed",
        "optimizer": "in the optimizer step",
    }
    return f"Memory peaks {words.get(moment, 'in the ' + moment.replace(' of ', ' pass of '))}."
