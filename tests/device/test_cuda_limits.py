"""A card held to a limit, on a card: an allocation beyond the limit raises torch.OutOfMemoryError."""

import pytest
from device.cards import NEAR_BYTES, hold, one_card
from device.child import BIG_BYTES, child

from oomguard._core.units import MIB
from oomguard._device.cuda import Cuda

pytestmark = [pytest.mark.gpu, one_card]


def test_beyond_the_limit_torch_raises_out_of_memory(cuda: Cuda) -> None:
    import torch

    cuda.enforce(cuda.reading().now_bytes + BIG_BYTES)
    with pytest.raises(torch.OutOfMemoryError):
        hold(BIG_BYTES + NEAR_BYTES)


def test_within_the_limit_all_can_be_had(cuda: Cuda) -> None:
    cuda.enforce(cuda.reading().now_bytes + BIG_BYTES + 2 * MIB)
    assert hold(BIG_BYTES) is not None


def test_the_limit_holds_the_context_too(cuda: Cuda) -> None:
    limit_bytes = cuda.reading().now_bytes + BIG_BYTES
    cuda.enforce(limit_bytes)
    kept = hold(BIG_BYTES - 4 * MIB)
    assert cuda.reading().peak_bytes <= limit_bytes
    del kept


def test_a_limit_below_what_is_there_lets_nothing_more_be_had(cuda: Cuda) -> None:
    import torch

    cuda.enforce(0)
    with pytest.raises(torch.OutOfMemoryError):
        hold(BIG_BYTES)


def test_a_limit_above_the_card_is_the_card(cuda: Cuda) -> None:
    cuda.enforce(1 << 50)
    assert hold(BIG_BYTES) is not None


def test_a_limit_can_be_taken_back(cuda: Cuda) -> None:
    cuda.enforce(0)
    cuda.unlimit()
    assert hold(2 * BIG_BYTES) is not None


def test_a_limit_can_be_raised_again(cuda: Cuda) -> None:
    now_bytes = cuda.reading().now_bytes
    cuda.enforce(0)
    cuda.enforce(now_bytes + 2 * BIG_BYTES)
    assert hold(BIG_BYTES) is not None


def test_an_inherited_share_is_never_raised() -> None:
    code = f"""
import torch
from oomguard._device.cuda import Cuda
total_bytes = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction({BIG_BYTES} / total_bytes, 0)
cuda = Cuda(0)
for turn in (lambda: cuda.enforce(total_bytes), cuda.unlimit):
    turn()
    try:
        torch.ones({2 * BIG_BYTES}, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("refused")
"""
    assert child(code).split() == ["refused"] * 2


def test_near_the_limit_retries_are_counted_since_the_reset(cuda: Cuda) -> None:
    cuda.enforce(cuda.reading().now_bytes + 2 * BIG_BYTES)
    small = [hold(BIG_BYTES // 2) for _ in range(3)]
    small.clear()  # the cache keeps three halves, none of which is large enough
    assert cuda.reading().retries == 0
    assert hold(BIG_BYTES + BIG_BYTES // 2) is not None
    assert cuda.reading().retries == 1
    cuda.reset()
    assert cuda.reading().retries == 0
