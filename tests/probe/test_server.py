"""What a child keeps to itself: nothing of one probe may reach the next."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe.probing import TINY, one_thread

from oomguard._core.units import GIB, MIB
from oomguard._device.budget import Reading
from oomguard._device.find import open_device
from oomguard._probe.child import LEFT_BYTES, LEFT_COMMITTED_BYTES, Server
from oomguard._probe.record import Request
from oomguard._spec.candidate import make_candidate


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_threads_that_a_candidate_does_not_set_are_not_those_of_the_last_one(threads: int) -> None:
    server, device = Server(), open_device("cpu")
    answers = []
    for candidate in (make_candidate(TINY, threads=threads + 1), make_candidate(TINY)):
        server._warm_up(Request(spec=TINY, candidate=candidate, device="cpu", budget_bytes=GIB), device)
        answers.append(torch.get_num_threads())
    assert answers == [threads + 1, threads]


def test_each_kind_of_step_is_warmed_up_once() -> None:
    server, device = Server(), open_device("cpu")
    for knobs in ({}, {"microbatch": 2}, {"segments": 5}, {"segments": 2}):
        candidate = one_thread(TINY, **knobs)
        server._warm_up(Request(spec=TINY, candidate=candidate, device="cpu", budget_bytes=GIB), device)
    assert len(server.warmed) == 2  # whole, and in segments


@pytest.mark.parametrize(
    ("left_bytes", "left_committed_bytes", "allocator", "limited", "as_new"),
    [
        (0, 0, "tight", True, True),
        (-MIB, -MIB, "tight", True, True),
        (LEFT_BYTES, LEFT_COMMITTED_BYTES, "tight", True, True),
        (LEFT_BYTES + 1, 0, None, True, False),
        (LEFT_BYTES + 1, 0, "system", True, True),
        (2 * LEFT_BYTES + 1, 0, "system", True, False),
        (0, LEFT_COMMITTED_BYTES + 1, "tight", True, False),
        (0, LEFT_COMMITTED_BYTES + 1, "system", False, True),
    ],
)
def test_a_child_is_as_new_if_next_to_nothing_is_left(
    left_bytes: int, left_committed_bytes: int, allocator: Any, limited: bool, as_new: bool
) -> None:
    """Of committed bytes only where they are limited."""
    server = Server()
    server.base_bytes, server.committed_bytes = 300 * MIB, 400 * MIB
    now = Reading(
        peak_bytes=GIB,
        now_bytes=300 * MIB + left_bytes,
        runtime_bytes=0,
        committed_bytes=400 * MIB + left_committed_bytes,
    )
    request = Request(
        spec=TINY,
        candidate=one_thread(TINY, allocator=allocator),
        device="cpu",
        budget_bytes=GIB,
        committed_bytes=2 * GIB if limited else None,
    )
    assert server._is_as_new(now, request) is as_new
