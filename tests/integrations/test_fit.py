"""What integrations that fit a model share: the plan of a process that holds memory already."""

from typing import Any

import pytest
from task import sized

from oomguard import MisuseError
from oomguard._device.cpu import Cpu
from oomguard.integrations._fit import plan_here

MIB = 1 << 20


@pytest.mark.timeout(200)
def test_a_process_that_holds_more_than_is_left_of_its_budget_is_told_so() -> None:
    held = bytearray(500 * MIB)
    budget_bytes = Cpu().reading().now_bytes + 64 * MIB
    question: dict[str, Any] = {"held_bytes": budget_bytes - 450 * MIB}
    question |= {"steps": 20, "batch": 2, "max_probes": 1, "timeout": 120, "progress": False, "allow": "none"}
    with pytest.raises(MisuseError, match=r"within 450\.00 MiB, but this process already holds .* beside PyTorch"):
        plan_here(sized.regression, "cpu", budget_bytes, module=sized.Regression(), **question)
    del held
