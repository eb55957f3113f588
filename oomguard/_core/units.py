"""Parse and format bytes and durations. Inside the package, sizes are ints in bytes, named `_bytes`."""

import math
import re

from oomguard._core.errors import check_whole, wrong

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_BYTES = 1 << 60  # largest size: 1 EiB, more than any machine has and well within an int64

_UNIT_BYTES = {
    **{"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB},
    **{"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, name: str = "a size") -> int:
    """Read a size. Binary units (KiB, MiB, GiB, or k, m, g) count in 1024s, kB, MB and GB in 1000s."""
    size_bytes = int(_parse(text, _UNIT_BYTES, name, "such as 6GiB or 700MiB"))
    if not 1 <= size_bytes <= MAX_BYTES:
        small = size_bytes < 1 and text.strip()[-1:].isdigit()
        advice = f"Did you mean {text.strip()}GiB?" if small else "Write it as 6GiB."
        raise wrong(name, "from 1 B to 1 EiB", text, advice)
    return size_bytes


def parse_seconds(seconds: float | str, name: str = "a duration") -> float:
    """Read a duration, given as text or as a number of seconds."""
    return _parse(seconds, _UNIT_SECONDS, name, "such as 90s, 2m or 1h") if isinstance(seconds, str) else seconds


def read_budget(budget: int | str | None) -> int | None:
    """The bytes of a budget that is given as a number or as text; None stays None."""
    budget_bytes = parse_bytes(budget, "budget") if isinstance(budget, str) else budget
    if isinstance(budget, str) and budget[-1:].isdigit() and parse_bytes(budget) < MIB:  # 6 means 6 GiB, not 6 B
        raise wrong("budget", "a size with a unit", budget, f"Did you mean {budget}GiB?")
    check_whole("budget", budget_bytes, 1, MAX_BYTES)
    return budget_bytes


def format_bytes(size_bytes: float) -> str:
    """Format a size with two decimals, in the largest binary unit in which it is at least 1."""
    for unit_bytes, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # a size that would round to 1024.00 is written as 1.00 of the next unit
        if abs(size_bytes) >= unit_bytes * (1 - 0.5 / 102400):
            return f"{size_bytes / unit_bytes:,.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    # a duration that would round to 1000.0 ms or to 60 s is written as 1 of the next unit
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60} min"


def format_span(seconds: float) -> str:
    """Format the time between two dates: from two days on in days."""
    days = seconds / 86400
    if days < 2 and days != 1:
        return format_seconds(seconds)
    return "1 day" if days == 1 else f"{days:,.1f} days".replace(".0 ", " ")


def _parse(text: str, units: dict[str, int], name: str, example: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    unit = units.get(match[2].lower()) if match else None
    value = float(match[1]) * unit if match and unit else 0.0
    if value == 0 or not math.isfinite(value):
        raise wrong(name, "a positive number with a unit", text, f"Write it {example}.")
    return value
