"""Which cards are here, for tests that need some, or none, and how to hold memory of one."""

import pytest

from oomguard._core.units import MIB
from oomguard._device import nvml
from oomguard._device.cuda import built_for_cards


def _count() -> int | None:
    """The cards that NVML shows; None without a driver."""
    try:
        return nvml.count()
    except nvml.NoNvmlError:
        return None


DRIVER = _count() is not None
COUNT = _count() or 0
BUILT = built_for_cards()

no_driver = pytest.mark.skipif(DRIVER, reason="an NVIDIA driver is here, so NVML loads")
one_card = pytest.mark.skipif(COUNT < 1, reason="NVML shows no CUDA card here")
two_cards = pytest.mark.skipif(COUNT < 2, reason="NVML shows fewer than two CUDA cards here")
built = pytest.mark.skipif(not BUILT, reason="the torch installed here is built without CUDA")
not_built = pytest.mark.skipif(BUILT, reason="the torch installed here is built for CUDA")

NEAR_BYTES = 32 * MIB
"""Within so many bytes two readings of a card are the same: others may come and go, the context grows with kernels."""


def near(measured: int, wanted: int) -> bool:
    return abs(measured - wanted) < NEAR_BYTES


def hold(size_bytes: int, index: int = 0) -> object:
    """A tensor of so many bytes on a card."""
    import torch

    return torch.ones(size_bytes, dtype=torch.uint8, device=f"cuda:{index}")
