"""Histograms of lengths for the planner (`Spec.lengths`): from data, or from a file. Nothing here needs torch."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oomguard.checks import shown
from oomguard.data.open import open_source
from oomguard.data.options import DataOptions
from oomguard.data.rows import Rows
from oomguard.data.source import Ints, Source, nothing_in, unreadable
from oomguard.errors import MisuseError
from oomguard.spec import MAX_SEQ, Spec, longest_seq

MOST = 256
"""Different lengths in a histogram: more would make the planner slow, and no plan better."""
UNKNOWN = {1: 1}
"""The histogram of a spec that is to have that of its data."""
CUTTING = (
    *("format", "columns", "target", "ahead", "id", "targets", "stride", "nan"),
    *("characters", "vocabulary", "truncate", "limit", "cache"),
)
"""Options of data that decide on what sequences it has."""
_LINE = re.compile(rb"\s*(\d{1,18})\s*(?:[:,;\t ]\s*(\d{1,18})\s*)?")
_LONGEST_LINE = 1000


def spec_for(spec: Spec, data: Any, options: DataOptions) -> Spec:
    """The spec with the lengths that the data has, as a training would cut it; `spec.lengths` is `UNKNOWN`.

    Without a length of its own (beyond that of `UNKNOWN`) its longest sequence is that of the data.

    >>> series = np.zeros((5, 40, 3), dtype=np.float32)
    >>> spec_for(Spec(cell="gru", features=2, lengths=UNKNOWN), series, DataOptions()).lengths
    {40: 5}
    """
    if spec.lengths != UNKNOWN:
        raise MisuseError(
            rule="The lengths of sequences come from a histogram or from data",
            got="got both",
            advice="Leave --lengths or --data out.",
        )
    known = spec.steps > max(UNKNOWN)
    seq = spec.steps if known else longest_seq(spec)
    source = open_source(data, msgspec.structs.replace(spec, seq=seq, lengths=None), options)
    if not known and isinstance(source, Rows) and (source.store.long or options.stride is not None):
        raise MisuseError(
            rule="One long series is cut into windows of --seq steps",
            got="there is no --seq",
            advice="Add it, or name the column that says which series a row belongs to as --id.",
        )
    lengths = lengths_histogram(source)
    return msgspec.structs.replace(spec, seq=spec.steps if known else max(lengths), lengths=lengths)


def lengths_histogram(source: Source, most: int = MOST) -> dict[int, int]:
    """How many sequences a source has of which length; of more than `most` lengths, rounded up."""
    return histogram(*np.unique(source.lengths, return_counts=True), most)


def histogram(lengths: Ints, counts: Ints, most: int = MOST) -> dict[int, int]:
    """At most so many different lengths: they are rounded up, never down, and never beyond the longest.

    >>> histogram(np.array([1, 2, 3, 10]), np.array([5, 1, 1, 2]), most=2)
    {5: 7, 10: 2}
    """
    if len(lengths) > most:
        longest = int(lengths.max())
        step = -(-longest // most)
        lengths = np.minimum(-(-lengths // step) * step, longest)
    found: Counter[int] = Counter()
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        found[length] += count
    return dict(sorted(found.items()))


def read_lengths(path: str | Path) -> dict[int, int]:
    """The histogram in a file: an array (`.npy`) of lengths, or lines with a length each, or `length:count` lines.

    The first line of text may be a header.
    """
    path = Path(path)
    try:
        found = _from_array(path) if path.suffix.lower() == ".npy" else _from_lines(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if not found:
        raise nothing_in(path)
    lengths = np.array(sorted(found), dtype=np.int64)
    return histogram(lengths, np.array([found[int(one)] for one in lengths], dtype=np.int64))


def _from_array(path: Path) -> dict[int, int]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise unreadable(path, error) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MisuseError(
            rule="An array of lengths must be one axis of whole numbers",
            got=f"{path} is {' x '.join(map(str, array.shape))} of {array.dtype}",
            advice="Save it with np.save(path, lengths.astype(np.int64)).",
        )
    bad = np.flatnonzero((array < 1) | (array > MAX_SEQ))
    if len(bad):
        raise _no_length(f"{path}, row {int(bad[0]):,}", int(array[bad[0]]))
    lengths, counts = np.unique(array, return_counts=True)
    return dict(zip(lengths.tolist(), counts.tolist(), strict=True))


def _from_lines(path: Path) -> dict[int, int]:
    found: Counter[int] = Counter()
    with path.open("rb") as file:
        # of a file without line ends no more than this is ever in memory
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            match = _LINE.fullmatch(line)
            if match is None:
                if line.strip() and not (number == 1 and _is_header(line)):
                    raise _no_length(f"{path}, row {number:,}", line.decode(errors="replace").strip())
                continue
            length, count = int(match[1]), int(match[2] or 1)
            if not 1 <= length <= MAX_SEQ or count < 1:
                raise _no_length(f"{path}, row {number:,}", line.decode(errors="replace").strip())
            found[length] += count
    return dict(found)


def _is_header(line: bytes) -> bool:
    return line.strip()[:1].isalpha() or line.strip()[:1] in (b'"', b"#", b"_")


def _no_length(place: str, value: Any) -> MisuseError:
    return MisuseError(
        rule=f"A length must be a whole number from 1 to {MAX_SEQ:,}, alone or as length:count",
        got=f"{place} is {shown(value)}",
        advice="Correct the file, or give data itself as --data.",
    )
