"""The memory that this process may use and uses, each figure with its source. Only this package reads /proc, cgroups,
rlimits, torch's memory statistics and NVML.

limits.py reads free RAM, cgroups and rlimits; proc.py the memory of a process; nvml.py the cards, through NVML; cuda.py
the cards, through torch; find.py finds devices. None of them imports torch before it is needed.
"""

from typing import TYPE_CHECKING

from oomguard._device.budget import Reading

if TYPE_CHECKING:
    from oomguard._device.find import Device, card_index, open_device

__all__ = ["Device", "Reading", "card_index", "open_device"]


def __getattr__(name: str) -> object:
    """Import find.py when one of its names is asked for: it needs NumPy, which the readers of memory do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oomguard._device import find

    return getattr(find, name)
