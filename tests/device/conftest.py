"""What several tests of devices need: an environment that chooses no card, a card, and a neighbour on it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from device.cards import hold

from oomguard.device.cuda import Cuda

HOLD = """
import sys, torch
kept = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that chooses no card."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return monkeypatch


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """The first card, its context made, its cache empty; without a limit afterwards."""
    found = Cuda(0)
    hold(1)
    found.release()
    found.reset()
    yield found
    found.unlimit()
    found.release()


@pytest.fixture
def neighbour() -> Iterator[Callable[[int], None]]:
    """Lets another process take so many bytes of cuda:0 (0: give all back).

    Where a card cannot be shared for real, the command in OOMGUARD_TEST_NEIGHBOUR is run with the bytes instead.
    """
    import torch

    command = os.environ.get("OOMGUARD_TEST_NEIGHBOUR")
    others: list[subprocess.Popen[str]] = []

    def take(size_bytes: int) -> None:
        while others:
            others.pop().communicate()  # it ends with its stdin
        if command:
            subprocess.run([*shlex.split(command), str(size_bytes)], check=True)
        elif size_bytes:
            free_bytes = torch.cuda.mem_get_info(0)[0]
            words = [sys.executable, "-c", HOLD, str(size_bytes)]
            others.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stdout = others[0].stdout
            assert stdout is not None
            assert stdout.readline() == "held\n"
            if torch.cuda.mem_get_info(0)[0] > free_bytes - size_bytes // 2:
                take(0)
                pytest.skip("this card does not show one process what another holds of it")

    yield take
    take(0)
