"""What a child keeps to itself: nothing of one probe may reach the next."""

from collections.abc import Iterator

import pytest
import torch
from probe.probing import TINY, one_thread

from oomguard.candidate import make_candidate
from oomguard.device import open_device
from oomguard.device.reading import Reading
from oomguard.probe.child import LEFT_BYTES, LEFT_COMMITTED_BYTES, Server
from oomguard.probe.record import Request
from oomguard.units import GIB, MIB


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_threads_that_a_candidate_does_not_set_are_not_those_of_the_last_one(threads: int) -> None:
    server, device = Server(), open_device("cpu")
    found = []
    for candidate in (make_candidate(TINY, threads=threads + 1), make_candidate(TINY)):
        server._warm_up(Request(spec=TINY, candidate=candidate, device="cpu", budget_bytes=GIB), device)
        found.append(torch.get_num_threads())
    assert found == [threads + 1, threads]


def test_each_kind_of_step_is_warmed_up_once() -> None:
    server, device = Server(), open_device("cpu")
    for knobs in ({}, {"microbatch": 2}, {"segments": 5}, {"segments": 2}):
        candidate = one_thread(TINY, **knobs)
        server._warm_up(Request(spec=TINY, candidate=candidate, device="cpu", budget_bytes=GIB), device)
    assert len(server.warmed) == 2  # whole, and in segments


@pytest.mark.parametrize(
    ("left_bytes", "left_committed_bytes", "as_new"),
    [
        (0, 0, True),
        (-MIB, -MIB, True),
        (LEFT_BYTES, LEFT_COMMITTED_BYTES, True),
        (LEFT_BYTES + 1, 0, False),
        (0, LEFT_COMMITTED_BYTES + 1, False),
    ],
)
def test_a_child_is_as_new_if_next_to_nothing_is_left(left_bytes: int, left_committed_bytes: int, as_new: bool) -> None:
    server = Server()
    server.base_bytes, server.committed_bytes = 100 * MIB, 200 * MIB
    now = Reading(
        peak_bytes=GIB,
        now_bytes=100 * MIB + left_bytes,
        runtime_bytes=0,
        committed_bytes=200 * MIB + left_committed_bytes,
    )
    assert server._is_as_new(now) is as_new
