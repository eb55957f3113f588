"""Specs, candidates, speeds and moments in words. Every screen and every page takes them from here."""

from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import Spec

NONE = "–"
"""The cell of a table that has no figure."""
SHAPE = tuple(name for name, knob in KNOBS.items() if knob.role.group == "shape")
"""The knobs that cut a step into pieces. All other knobs are settings."""
_TIME_UNITS = (("s", 1), ("min", 60), ("h", 3600), ("day", 86_400))


def spec_words(spec: Spec) -> str:
    """The layers of a model.

    >>> spec_words(Spec(cell="lstm", seq=10, bidirectional=True)), spec_words(Spec(cell="gru", seq=10, vocab=5000))
    ('lstm 64 → 256 × 2 layers × 2 directions', 'gru 5,000 → 256 → 256 × 2 layers')
    """
    inputs = f"{spec.inputs}" if spec.vocab is None else f"{spec.vocab:,} → {spec.inputs}"
    hidden = f"{spec.hidden}" if spec.projection is None else f"{spec.hidden} → {spec.projection}"
    directions = " × 2 directions" if spec.bidirectional else ""
    return f"{spec.cell} {inputs} → {hidden} × {times(spec.layers, 'layer')}{directions}"


def task_words(spec: Spec, device: str) -> str:
    """The model, the length of its sequences, the batch and the device.

    >>> task_words(Spec(cell="gru", seq=1000), "cpu")
    'gru 64 → 256 × 2 layers, T = 1,000, batch 32 on cpu'
    """
    return f"{spec_words(spec)}, T = {spec.steps:,}, batch {spec.batch:,} on {device}"


def sentence(text: str) -> str:
    """The text as a sentence.

    >>> sentence("microbatch 8")
    'Microbatch 8.'
    """
    return f"{text[:1].upper()}{text[1:]}."


def times(count: int, word: str, plural: str = "s") -> str:
    """A count and its noun.

    >>> times(1, "pass", "es"), times(2000, "pass", "es")
    ('1 pass', '2,000 passes')
    """
    return f"{count:,} {word}{plural if count != 1 else ''}"


def rows_words(candidate: Candidate) -> str:
    """Microbatch and accumulation, for a column titled `microbatch`.

    >>> rows_words(Candidate(microbatch=8, accumulation=4))
    '8 × 4'
    """
    return f"{candidate.microbatch:,} × {candidate.accumulation:,}"


def pieces_words(candidate: Candidate) -> str:
    """Segments or the window, for a column titled `segments`.

    >>> pieces_words(Candidate(microbatch=8, segments=512, levels=2)), pieces_words(Candidate(microbatch=8, window=50))
    ('512 in 2 levels', 'window 50')
    """
    if candidate.window is not None:
        return f"window {candidate.window:,}"
    stored = " without recomputation" if candidate.segments > 1 and not candidate.recompute else ""
    levels = f" in {candidate.levels} levels" if candidate.levels > 1 else ""
    return f"{candidate.segments:,}{levels}{stored}"


def setting_words(candidate: Candidate) -> dict[str, str]:
    """The precision, and every other setting that is not at its default, by the name of the knob.

    >>> list(setting_words(Candidate(microbatch=8, engine="onednn", threads=2, allocator="system")).values())
    ['fp32', 'engine onednn', '2 threads', 'allocator system']
    """
    words = {name: knob.in_words(getattr(candidate, name)) for name, knob in KNOBS.items() if name not in SHAPE}
    return {name: text for name, text in words.items() if text}


def candidate_words(candidate: Candidate) -> str:
    """A candidate, with every knob that says something.

    >>> candidate_words(Candidate(microbatch=8, accumulation=4, segments=45, engine="onednn"))
    'microbatch 8 × 4 passes, 45 segments, fp32, engine onednn'
    """
    parts = [f"microbatch {candidate.microbatch:,} × {times(candidate.accumulation, 'pass', 'es')}"]
    if candidate.window is not None:
        parts.append(pieces_words(candidate))
    elif candidate.segments > 1:
        parts.append(pieces_words(candidate).replace(f"{candidate.segments:,}", f"{candidate.segments:,} segments", 1))
    return ", ".join([*parts, *setting_words(candidate).values()])


def speed_words(per_second: float, word: str) -> str:
    """A speed, per the unit of time that gives a readable figure.

    >>> speed_words(1.4912, "sequences"), speed_words(14870.3, "tokens"), speed_words(0.002, "sequences")
    ('1.49 sequences/s', '14,870 tokens/s', '7.20 sequences/h')
    """
    unit, seconds = next((one for one in _TIME_UNITS if per_second * one[1] >= 0.5), _TIME_UNITS[-1])
    return f"{figure(per_second * seconds)} {word}/{unit}"


def figure(value: float) -> str:
    """A number with three digits, or with all digits before the decimal point if there are more.

    >>> figure(0.08766), figure(12.345), figure(14870.3)
    ('0.0877', '12.3', '14,870')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def peak_words(moment: str) -> str:
    """A sentence about when in a step memory peaks.

    >>> peak_words("forward"), peak_words("backward of layer 2")
    ('Memory peaks at the end of the forward pass.', 'Memory peaks in the backward pass of layer 2.')
    """
    words = {
        "forward": "at the end of the forward pass",
        "loss": "when the loss is computed",
        "optimizer": "in the optimizer step",
    }
    return f"Memory peaks {words.get(moment, 'in the ' + moment.replace(' of ', ' pass of '))}."
