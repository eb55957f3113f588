"""Two candidates that run by turns in one child, and the ratio of their times."""

import pytest
from probe.probing import one_thread

from oomguard._core.errors import MisuseError
from oomguard._core.units import MIB
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict
from oomguard._spec.spec import Spec

GRU = Spec(cell="gru", seq=60, features=16, hidden=64, layers=1, batch=16)
ROWS = one_thread(GRU, microbatch=1)
WHOLE = one_thread(GRU)


def test_two_candidates_run_by_turns_in_one_child_and_their_times_are_compared() -> None:
    """Sixteen passes of one row take several times as long as one pass of sixteen."""
    with Runner("cpu", seconds=0.1) as runner:
        record = runner.probe(GRU, ROWS, rival=WHOLE)
        pid = runner.pid
        other = runner.probe(GRU, WHOLE, rival=ROWS)
        assert runner.pid == pid
    assert (record.candidate, record.rival, record.verdict) == (ROWS, WHOLE, Verdict.FITS)
    assert record.ratio is not None
    assert other.ratio is not None
    assert record.ratio > 2
    assert other.ratio < 0.5


def test_the_record_of_a_comparison_has_the_peak_of_its_candidate() -> None:
    with Runner("cpu", seconds=0.1) as runner:
        alone = runner.probe(GRU, ROWS)
        compared = runner.probe(GRU, ROWS, rival=WHOLE)
    assert (alone.rival, alone.ratio) == (None, None)
    assert compared.peak_bytes == pytest.approx(alone.peak_bytes, abs=3 * MIB)


def test_a_rival_that_does_not_fit_decides_on_the_verdict() -> None:
    spec = Spec(cell="gru", seq=400, features=16, hidden=64, layers=1, batch=64)
    small, large = one_thread(spec, microbatch=2), one_thread(spec)
    with Runner("cpu", seconds=0.1) as runner:
        alone = runner.probe(spec, small)
        assert alone.peak_bytes is not None
        record = runner.probe(spec, small, rival=large, budget_bytes=alone.peak_bytes + 10 * MIB)
    assert (record.verdict, record.rival, record.ratio) == (Verdict.OVER, large, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("allocator", "fast"), ("precision", "bf16"), ("engine", "native")],
    ids=lambda value: str(value),
)
def test_a_rival_that_needs_another_process_is_refused(name: str, value: str) -> None:
    with Runner("cpu") as runner, pytest.raises(MisuseError, match=f"so they need the same {name}, but got None|fp32"):
        runner.probe(GRU, WHOLE, rival=one_thread(GRU, **{name: value}))
