"""Phrases: a spec, a candidate, a speed and a moment in words. Every screen and every page has them from here."""

from collections.abc import Iterable

from oomguard.candidate import Candidate
from oomguard.spec import Spec

NONE = "–"
"""Where a table has no figure."""
_PER = (("s", 1), ("min", 60), ("h", 3600), ("day", 86_400))


def spec_words(spec: Spec) -> str:
    """The layers of a model.

    >>> spec_words(Spec(cell="lstm", seq=10, bidirectional=True)), spec_words(Spec(cell="gru", seq=10, vocab=5000))
    ('lstm 64 → 256 × 2 layers × 2 directions', 'gru 5,000 → 256 → 256 × 2 layers')
    """
    inputs = f"{spec.inputs}" if spec.vocab is None else f"{spec.vocab:,} → {spec.inputs}"
    hidden = f"{spec.hidden}" if spec.projection is None else f"{spec.hidden} → {spec.projection}"
    directions = " × 2 directions" if spec.bidirectional else ""
    return f"{spec.cell} {inputs} → {hidden} × {times(spec.layers, 'layer')}{directions}"


def times(count: int, word: str, plural: str = "s") -> str:
    """So many of something.

    >>> times(1, "pass", "es"), times(2000, "pass", "es")
    ('1 pass', '2,000 passes')
    """
    return f"{count:,} {word}{plural if count != 1 else ''}"


def rows_words(candidate: Candidate) -> str:
    """Microbatch and accumulation.

    >>> rows_words(Candidate(microbatch=8, accumulation=4))
    '8 × 4'
    """
    return f"{candidate.microbatch:,} × {candidate.accumulation:,}"


def pieces_words(candidate: Candidate) -> str:
    """How the sequence is gone through, for a column that is headed `segments`.

    >>> pieces_words(Candidate(microbatch=8, segments=512, levels=2)), pieces_words(Candidate(microbatch=8, window=50))
    ('512 in 2 levels', 'window 50')
    """
    if candidate.window is not None:
        return f"window {candidate.window:,}"
    kept = " kept" if candidate.segments > 1 and not candidate.recompute else ""
    levels = f" in {candidate.levels} levels" if candidate.levels > 1 else ""
    return f"{candidate.segments:,}{kept}{levels}"


def setting_words(candidate: Candidate) -> dict[str, str]:
    """All other knobs that say something.

    >>> list(setting_words(Candidate(microbatch=8, engine="onednn", threads=2, allocator="plain")).values())
    ['fp32', 'onednn', '2 threads', 'allocator plain']
    """
    words = {
        "precision": candidate.precision,
        "engine": candidate.engine or "",
        "threads": "" if candidate.threads is None else times(candidate.threads, "thread"),
        "allocator": "" if candidate.allocator is None else f"allocator {candidate.allocator}",
        "update": "" if candidate.update == "foreach" else f"update {candidate.update}",
        "keep": "" if candidate.keep == "device" else "microbatch and borders in host memory",
        "offload": "optimizer's state in host memory" if candidate.offload else "",
        "state_8bit": "optimizer's state in 8 bits" if candidate.state_8bit else "",
    }
    return {name: text for name, text in words.items() if text}


def candidate_words(candidate: Candidate) -> str:
    """A candidate.

    >>> candidate_words(Candidate(microbatch=32, segments=45, engine="onednn"))
    'microbatch 32 × 1, 45 segments, fp32, onednn'
    """
    pieces = pieces_words(candidate)
    if candidate.window is None:
        number, _, rest = pieces.partition(" ")
        pieces = "" if candidate.segments == 1 else " ".join(filter(None, (number, "segments", rest)))
    parts = [f"microbatch {rows_words(candidate)}", pieces, *setting_words(candidate).values()]
    return ", ".join(filter(None, parts))


def common(candidates: Iterable[Candidate]) -> dict[str, str]:
    """The settings that all of them have.

    >>> common([Candidate(microbatch=1, threads=1), Candidate(microbatch=2, threads=2)])
    {'precision': 'fp32'}
    """
    first, *others = [setting_words(one) for one in candidates]
    return {name: text for name, text in first.items() if all(one.get(name) == text for one in others)}


def speed_words(per_second: float, word: str) -> str:
    """A speed, in the unit of time that gives a figure one can read.

    >>> speed_words(1.4912, "sequences"), speed_words(14870.3, "tokens"), speed_words(0.002, "sequences")
    ('1.49 sequences/s', '14,870 tokens/s', '7.20 sequences/h')
    """
    unit, seconds = next((one for one in _PER if per_second * one[1] >= 0.5), _PER[-1])
    return f"{figure(per_second * seconds)} {word}/{unit}"


def figure(value: float) -> str:
    """Three digits, and all of those before the point.

    >>> figure(0.08766), figure(12.345), figure(14870.3)
    ('0.0877', '12.3', '14,870')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


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
