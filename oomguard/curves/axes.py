"""Axes: where they begin and end, and what is written along them."""

import math
from collections.abc import Iterable

from oomguard.curves.value import Axis
from oomguard.units import GIB

MOST_TICKS = 9
"""Words along an axis, at most: more would touch on a phone."""
FAR = 5
"""If the budget is so many times what is drawn, or the reverse, memory is drawn on a logarithmic axis."""


def gib(size_bytes: Iterable[float]) -> tuple[float, ...]:
    """Bytes as an axis has them.

    >>> gib([GIB, GIB // 2])
    (1.0, 0.5)
    """
    return tuple(float(one) / GIB for one in size_bytes)


def linear(label: str, unit: str, values: Iterable[float]) -> Axis:
    """From 0 to a little over the largest, with words at round numbers.

    >>> [word for _, word in linear("Throughput", "tokens/s", [7000]).ticks]
    ['0', '2,000', '4,000', '6,000']
    """
    high = max(1.12 * max(values), 1e-9)
    step = _step(high)
    ticks = tuple((count * step, f"{count * step:,.6g}") for count in range(int(high / step) + 1))
    return Axis(label=label, unit=unit, low=0.0, high=high, ticks=ticks)


def _step(span: float) -> float:
    """A round number of which four to six make up the span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= 6)


def logarithmic(label: str, unit: str, values: Iterable[float], *, base: int = 10, pad: float = 1.08) -> Axis:
    """From a little under the least to a little over the largest; words at powers of two, or at 1, 2 and 5.

    >>> [word for _, word in logarithmic("Microbatch", "", [1, 32], base=2).ticks]
    ['1', '2', '4', '8', '16', '32']
    >>> [word for _, word in logarithmic("Sequence length", "steps", [1000, 20_000]).ticks]
    ['1k', '2k', '5k', '10k', '20k']
    >>> [word for _, word in logarithmic("Peak", "GiB", [0.33, 0.46]).ticks]
    ['0.35', '0.4', '0.45']
    """
    some = [*values]
    low, high = min(some) / pad, max(some) * pad
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks = [factor * float(base) ** power for power in powers for factor in ((1,) if base == 2 else (1, 2, 5))]
    inside = [one for one in ticks if low <= one <= high]
    if len(inside) > MOST_TICKS and base == 10:
        inside = [one for one in inside if math.isclose(math.log10(one) % 1, 0, abs_tol=1e-9)]
    if len(inside) < 2 and base == 10:  # a narrow range, which hardly bends
        step = _step(high - low)
        inside = [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    inside = inside[:: math.ceil(len(inside) / MOST_TICKS) or 1]
    words = tuple((one, f"{one:,.0f}" if base == 2 and one >= 1 else short(one)) for one in inside)
    return Axis(label=label, unit=unit, low=low, high=high, log=True, ticks=words)


def memory(label: str, values: Iterable[float], budget: float) -> Axis:
    """GiB, with the budget in sight: logarithmic if what is drawn is far from it.

    >>> memory("Peak", [1, 7], 6).log, memory("Peak", [1, 7], 80).log
    (False, True)
    """
    some = [one for one in values if one > 0]
    if max(some) * FAR < budget or max(some) > FAR * budget:
        return logarithmic(label, "GiB", [*some, budget], pad=1.25)
    return linear(label, "GiB", [*some, budget])


def short(value: float) -> str:
    """A number in a few letters.

    >>> short(0.25), short(64), short(10_000), short(2_500_000)
    ('0.25', '64', '10k', '2.5M')
    """
    unit, letter = next((one for one in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= one[0]), (1, ""))
    return f"{value / unit:.3g}{letter}"
