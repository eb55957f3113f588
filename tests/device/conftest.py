"""What several tests of devices need: an environment that chooses no card, and a card."""

from collections.abc import Iterator

import pytest
from device.cards import hold

from oomguard._device.cuda import Cuda


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that chooses no card."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return monkeypatch


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """The first card, its context made, its cache empty; without a limit afterwards."""
    device = Cuda(0)
    hold(1)
    device.release()
    device.reset()
    yield device
    device.unlimit()
    device.release()
