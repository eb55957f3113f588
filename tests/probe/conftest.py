"""One runner for all tests that leave its child as good as new, and what they probe with it."""

from collections.abc import Iterator

import pytest

from oomguard._probe.runner import Runner


@pytest.fixture(scope="session")
def shared() -> Iterator[Runner]:
    """A runner whose child serves one test after the other."""
    with Runner(timeout=60, seconds=1) as runner:
        yield runner
