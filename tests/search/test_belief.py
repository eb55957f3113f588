"""A measured peak far below its estimate is measured again before it is believed."""

import msgspec
import pytest
from plan.searched import make
from search.machine import Machine, make_problem
from search.rig import Rig, make_search

from oomguard._core.units import MIB
from oomguard._predict.belief import believed, doubted
from oomguard._probe.record import Record
from oomguard._report.plan import summarize
from oomguard._search.propose import Probe, State, propose
from oomguard._spec.spec import Spec

PROBLEM = make_problem(Spec(cell="lstm", seq=10_000), 700 * MIB)


def following(*records: Record, left: float = 100.0) -> Probe:
    probe = propose(State(problem=PROBLEM, records=records, left=left))
    assert probe is not None
    return probe


def first() -> Record:
    """The record of the first probe, as expected."""
    return Machine().probe(following(), PROBLEM.budget_bytes)


def low(record: Record, share: float = 0.3) -> Record:
    """A record of the same probe that shows a part of what it should."""
    assert record.terms is not None
    assert record.peak_bytes is not None
    rest = round(share * record.terms["rest"])
    peak_bytes = record.peak_bytes - record.terms["rest"] + rest
    again = Machine().run(record.spec, record.candidate, record.budget_bytes, record.passes)
    return msgspec.structs.replace(again, peak_bytes=peak_bytes, terms=record.terms | {"rest": rest})


def test_a_peak_near_its_estimate_is_believed() -> None:
    record = first()
    assert believed([record], PROBLEM.target) == (record,)


def test_a_peak_far_below_its_estimate_is_measured_again_in_a_new_process() -> None:
    record = low(first())
    probe = following(record)
    assert (probe.spec, probe.candidate, probe.fresh) == (record.spec, record.candidate, True)
    assert believed([record], PROBLEM.target) == ()


def test_what_did_not_repeat_does_not_count() -> None:
    true = first()
    probe, usual = following(low(true), true), following(true)
    assert (probe.spec, probe.candidate, probe.peak_bytes) == (usual.spec, usual.candidate, usual.peak_bytes)
    assert believed([low(true), true], PROBLEM.target) == (true,)


def test_what_was_measured_twice_is_believed_for_all_of_its_kind() -> None:
    records = [low(first()), low(first())]
    assert doubted(records, PROBLEM.target) == []
    assert not following(*records).fresh
    other = msgspec.structs.replace(records[0].candidate, microbatch=1, accumulation=32)
    alike = low(Machine().run(records[0].spec, other, PROBLEM.budget_bytes))
    assert doubted([*records, alike], PROBLEM.target) == []


def test_a_peak_that_never_repeats_is_given_up() -> None:
    records = [low(first(), share) for share in (0.1, 0.3)]
    assert not following(*records).fresh


def test_without_time_nothing_is_measured_again() -> None:
    probe = propose(State(problem=PROBLEM, records=[low(first())], left=0.5))
    assert probe is None or not probe.fresh


def test_a_plan_says_that_a_peak_did_not_repeat_and_does_not_rest_on_it() -> None:
    plan = make(PROBLEM, [low(first())])
    assert plan is not None
    words = " ".join(" ".join(section.sentences) for section in summarize(plan))
    assert "1 measured peak far below the estimate did not repeat. It does not count." in words
    assert (plan.record, plan.probes, plan.calibration.records) == (None, 1, 0)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(machine=Machine()).install(monkeypatch)


def test_a_search_ends_its_child_before_it_measures_again(rig: Rig) -> None:
    begun: list[int] = []

    class Once(Machine):
        def run(self, *words: object, **more: object) -> Record:
            record = super().run(*words, **more)  # type: ignore[arg-type]
            begun.append(len(rig.closed))
            return low(record) if len(begun) == 1 else record

    rig.machine = Once()
    result = make_search(PROBLEM, max_probes=3).run(["cpu"])
    one, two = result.records[:2]
    assert (one.spec, one.candidate) == (two.spec, two.candidate)
    assert begun[0] == 0
    assert begun[1] == 1
    assert one not in result.evidence
    assert two in result.evidence
