"""What a plan is made of: the chosen candidate, what was expected of it, and what it is compared with."""

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from plan.searched import GRU, LSTM, PROBLEMS, make, on_the_card, searched
from search.machine import Machine, find, make_problem, solve

from oomguard._core.units import GIB, MIB
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU
from oomguard._plan import make as made
from oomguard._plan.buckets import Bucket, cut, make_buckets
from oomguard._plan.make import BUCKETS_KEEP, differing, make_fallbacks
from oomguard._plan.store import decode_plan
from oomguard._plan.value import Plan, Point, figures
from oomguard._predict.calibration import Calibration
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.screen import SETTING, screen, turns_of
from oomguard._search.space import WORTH_LOSSY
from oomguard._spec.candidate import Candidate, check_candidate, make_candidate
from oomguard._spec.lengths import with_steps
from oomguard._spec.spec import Spec

each = pytest.mark.parametrize("name", [*PROBLEMS])
LENGTHS = {100: 500, 400: 90, 1000: 30}


@each
def test_the_candidate_ran_and_fits_and_gives_the_batch(name: str) -> None:
    problem, records, plan = searched(name)
    check_candidate(plan.spec, plan.candidate)
    assert plan.spec == problem.spec
    assert plan.record in records
    assert plan.peak_bytes <= problem.budget_bytes
    assert (plan.probes, plan.ooms, plan.records) == (len(records), 0, records)


@each
def test_what_was_expected_does_not_depend_on_the_plans_own_record(name: str) -> None:
    problem, records, plan = searched(name)
    assert plan.record is not None
    turns = turns_of(plan.record, records)  # all of them: of several turns, a plan has the one with the highest peak
    again = make(problem, [lowered(record) if record in turns else record for record in records])
    assert again is not None
    assert (again.candidate, again.record) == (plan.candidate, lowered(plan.record))
    assert again.expected == plan.expected


def lowered(record: Record) -> Record:
    """The record with a peak that is 1 MiB lower."""
    assert record.terms is not None
    assert record.peak_bytes is not None
    terms = record.terms | {"rest": record.terms["rest"] - MIB}
    return msgspec.structs.replace(record, peak_bytes=record.peak_bytes - MIB, terms=terms)


@each
def test_what_was_expected_came_true_within_its_margin(name: str) -> None:
    _, _, plan = searched(name)
    assert plan.confirmed
    assert plan.peak_bytes <= plan.expected.peak_bytes + plan.expected.margin_bytes
    assert plan.expected.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)


def test_a_fallback_that_is_expected_to_be_over_the_budget_is_left_out() -> None:
    problem, records, plan = searched("lstm in 600 MiB")
    table = screen(problem, records)
    row = find(table, plan.candidate)
    assert row is not None
    first, *rest = plan.fallbacks
    tighter = replace(problem, budget_bytes=first.expected.peak_bytes - 1)
    assert make_fallbacks(tighter, table, row, timed=True) == tuple(rest)


@each
def test_the_estimate_is_that_of_the_candidate(name: str) -> None:
    problem, _, plan = searched(name)
    assert plan.estimate == figures(estimate_step(plan.spec, plan.candidate, problem.target))
    assert plan.where == problem.target


@each
def test_plain_is_the_whole_batch_at_once_in_fp32(name: str) -> None:
    problem, _, plan = searched(name)
    usual = make_candidate(problem.spec, allocator="system")
    assert plan.plain.estimate == figures(estimate_step(problem.spec, usual, problem.target))
    safe_bytes = plan.plain.expected.peak_bytes + plan.plain.expected.margin_bytes
    assert plan.plain.fits == (safe_bytes <= problem.budget_bytes)


def test_plain_is_timed_with_all_cores_and_the_allocator_as_it_comes() -> None:
    problem, records, plan = searched("lstm in 20 GiB")
    usual = make_candidate(problem.spec, allocator="system", threads=2)
    estimate = Calibration(problem.spec, records, problem.target).predict(
        estimate_step(problem.spec, usual, problem.target)
    )
    assert plan.plain.expected.seconds_per_step == estimate[0].seconds_per_step


def test_plain_fits_where_there_is_room_and_does_not_where_there_is_not() -> None:
    assert searched("lstm in 20 GiB")[2].plain.fits
    assert not searched("lstm in 600 MiB")[2].plain.fits


@each
def test_the_exports_are_those_of_the_candidate(name: str) -> None:
    plan = searched(name)[2]
    assert plan.exports == {"MALLOC_OF_": f"{plan.candidate.allocator} {plan.estimate.engine}"}


# lossy knobs


def test_what_a_lossy_knob_bought_is_told_beside_the_best_without_it() -> None:
    _, _, plan = searched("on a card")
    (bought,) = plan.bought
    assert (bought.knob, bought.value) == ("precision", "fp16")
    assert bought.exact is not None
    assert bought.exact.precision == "fp32"
    assert bought.speedup is not None
    assert bought.speedup > WORTH_LOSSY


def test_an_exact_plan_bought_nothing() -> None:
    plan = searched("on a card in fp32")[2]
    assert (plan.candidate.lossy, plan.bought) == ((), ())


def test_a_window_without_which_nothing_fits_has_nothing_beside_it() -> None:
    spec = Spec(cell="lstm", seq=20_000, hidden=512, batch=1)
    fixed = {"threads": 1, "segments": 1, "engine": "onednn", "allocator": "tight"}
    problem = make_problem(spec, 430 * MIB, allow=("window",), fixed=fixed)
    plan = make(problem, [])
    assert plan is not None
    (bought,) = plan.bought
    assert (bought.knob, bought.exact, bought.saved_bytes) == ("window", None, None)


# speed


@each
def test_a_microbatch_that_is_enough_is_within_the_batch_and_nearly_as_fast(name: str) -> None:
    problem, records, plan = searched(name)
    rows = plan.enough_rows
    assert rows is not None
    assert rows <= problem.spec.batch
    view = screen(problem, records)
    alike = view.eligible & view.like(plan.candidate, *SETTING, "threads")
    sizes, seconds = np.broadcast_to(view.candidates.microbatch, len(alike)), view.prediction.seconds_per_step
    best = {int(size): float(seconds[alike & (sizes == size)].min()) for size in np.unique(sizes[alike])}
    assert rows == min(size for size, seconds in best.items() if 0.98 * seconds <= min(best.values()))


def test_without_records_nothing_is_said_about_time() -> None:
    plan = make(make_problem(LSTM, GIB), [])
    assert plan is not None
    assert (plan.record, plan.enough_rows, plan.expected.seconds_per_step) == (None, None, None)
    assert all(rung.expected.seconds_per_step is None for rung in plan.fallbacks)
    assert (plan.plain.expected.seconds_per_step, plan.ended) == (None, "done")


def test_if_nothing_fits_there_is_no_plan() -> None:
    assert make(make_problem(LSTM, 320 * MIB), []) is None


def test_what_ran_out_of_memory_is_counted() -> None:
    problem, records, _ = searched("gru in 420 MiB")
    out: list[Record] = [Machine().run(GRU, make_candidate(GRU, allocator="system"), 1)]
    plan = make(problem, [*records, *out])
    assert plan is not None
    assert out[0].verdict is Verdict.OOM
    assert (plan.probes, plan.ooms) == (len(records) + 1, 1)


# several aims


def worth(point: Point, aims: tuple[str, ...]) -> tuple[float, ...]:
    values = {"throughput": point.throughput, "seq": point.seq, "microbatch": point.candidate.microbatch}
    return tuple(float(values[aim]) for aim in aims)


@pytest.mark.parametrize("aims", [("throughput", "seq"), ("microbatch", "throughput")], ids=str)
def test_no_point_of_a_front_beats_another_and_all_fit(aims: tuple[str, ...]) -> None:
    problem = make_problem(GRU, 420 * MIB, maximize=aims, fixed={"threads": 2, "allocator": "tight"})
    plan = make(problem, [*searched("gru in 420 MiB")[1]])
    assert plan is not None
    assert len(plan.front) > ("seq" in aims)  # the largest microbatch may be the fastest too
    for point, other in itertools.permutations(plan.front, 2):
        ours, theirs = worth(point, aims), worth(other, aims)
        assert ours == theirs or any(a > b for a, b in zip(ours, theirs, strict=True))
    for each in plan.front:
        assert each.expected.peak_bytes + each.expected.margin_bytes <= problem.budget_bytes
        check_candidate(msgspec.structs.replace(GRU, seq=each.seq), each.candidate)


@pytest.mark.parametrize("aims", [("throughput", "seq"), ("throughput", "microbatch")], ids=",".join)
def test_the_chosen_candidate_has_one_time_in_the_plan_and_in_its_front(aims: tuple[str, ...]) -> None:
    problem = make_problem(GRU, 420 * MIB, maximize=aims)
    slower = [msgspec.structs.replace(record, seconds_per_step=(record.seconds_per_step or 0) * 1.04)
              for record in solve(Machine(), problem)]  # fmt: skip
    plan = make(problem, slower)
    assert plan is not None
    own = [point for point in plan.front if (point.seq, point.candidate) == (plan.spec.steps, plan.candidate)]
    assert [record.expected.seconds_per_step for record in own] == [pytest.approx(plan.seconds_per_step)]
    assert own[0].throughput == pytest.approx(plan.throughput)


def test_probes_that_told_no_time_give_none_to_anything() -> None:
    problem = make_problem(GRU, 420 * MIB, maximize=("throughput", "microbatch"))
    ran = Machine().run(GRU, make_candidate(GRU, threads=2, engine="native", allocator="tight"), 1)
    late = {"verdict": Verdict.TIMEOUT, "steps": 0, "seconds_per_step": None, "fastest_pass_seconds": None}
    plan = make(problem, [msgspec.structs.replace(ran, tokens_per_second=None, **late)])
    assert plan is not None
    predictions = [plan.expected, plan.plain.expected, *(point.expected for point in plan.front)]
    predictions += [fallback.expected for fallback in plan.fallbacks]
    assert {prediction.seconds_per_step for prediction in predictions} == {None}


def test_with_one_aim_there_is_no_front() -> None:
    assert all(searched(name)[2].front == () for name in PROBLEMS)


@pytest.mark.parametrize("aim", ["microbatch", "seq"])
def test_the_first_aim_names_the_plan(aim: str) -> None:
    problem = make_problem(GRU, 420 * MIB, maximize=(aim,), fixed={"threads": 1, "allocator": "tight"})
    plan = make(problem, solve(Machine(), problem))
    fastest = searched("gru in 420 MiB")[2]
    assert plan is not None
    if aim == "seq":
        assert plan.spec.steps > 5 * GRU.steps
    else:
        assert plan.candidate.microbatch >= fastest.candidate.microbatch
    assert plan.peak_bytes <= problem.budget_bytes


# lengths


@pytest.mark.parametrize("lengths", [None, {1000: 5}])
def test_without_a_histogram_there_are_no_buckets(lengths: dict[int, int] | None) -> None:
    spec = Spec(cell="gru", hidden=128, **{"seq": 1000} if lengths is None else {"lengths": lengths})
    plan = make(make_problem(spec, 420 * MIB), [])
    assert plan is not None
    assert (plan.buckets, plan.padding) == ((), None)


def bucketed(**more: Any) -> Plan:
    problem = make_problem(Spec(cell="gru", hidden=128, lengths=LENGTHS, batch=64), 420 * MIB, **more)
    plan = make(problem, solve(Machine(), problem))
    assert plan is not None
    return plan


def test_buckets_have_all_sequences_and_fit_and_pad_less() -> None:
    plan = bucketed()
    assert sum(bucket.sequences for bucket in plan.buckets) == sum(LENGTHS.values())
    assert plan.buckets[-1].longest == 1000
    assert plan.buckets[-1].candidate == plan.candidate
    assert plan.padding is not None
    assert 0 <= plan.padding.after <= plan.padding.before < 1
    for bucket in plan.buckets:
        check_candidate(with_steps(plan.spec, bucket.longest), bucket.candidate)
        assert bucket.expected.peak_bytes + bucket.expected.margin_bytes <= plan.budget_bytes


@pytest.mark.parametrize("wrong", [{"precision": "bf16"}, {"threads": 9}], ids=str)
def test_where_a_bucket_would_need_another_setting_there_are_none(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*asked: Any, **more: Any) -> list[Bucket]:
        first, *rest = make_buckets(*asked, **more)
        other = msgspec.structs.replace(first.candidate, **wrong)
        return [msgspec.structs.replace(first, candidate=other), *rest]

    monkeypatch.setattr(made, "make_buckets", changed)
    plan = bucketed()
    assert (plan.buckets, plan.padding) == ((), None)


def test_similar_lengths_share_a_bucket() -> None:
    assert [max(part) for part in cut({10: 100, 11: 100, 100: 10, 101: 1})] == [11, 101]


def test_the_knobs_in_which_candidates_differ_are_named() -> None:
    assert differing(Candidate(microbatch=8), Candidate(microbatch=8, threads=2), BUCKETS_KEEP) == ["threads"]


def test_sequences_of_two_lengths_that_are_never_mixed_have_no_padding() -> None:
    plan = make(make_problem(Spec(cell="gru", hidden=128, lengths={7: 3, 1000: 1}), 420 * MIB), [])
    assert plan is not None
    assert plan.padding is not None
    assert 0 <= plan.padding.after < 1e-9


def test_longer_sequences_than_there_are_have_no_buckets() -> None:
    assert bucketed(maximize=("seq",), fixed={"threads": 1, "allocator": "tight"}).buckets == ()


# cached records


def test_records_of_earlier_searches_are_counted_apart() -> None:
    _, records, _ = searched("gru in 420 MiB")
    plan = make(make_problem(GRU, 420 * MIB, cached=records[:2]), [*records])
    assert plan is not None
    assert (plan.calibration.cached, plan.calibration.records) == (2, len(records))


def test_a_card_that_has_less_host_memory_keeps_less_there() -> None:
    spec = Spec(cell="lstm", seq=20_000, features=512)
    plans = [make(on_the_card(spec, 2 * GIB, host_bytes=size), []) for size in (64 * GIB, GIB)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[1].estimate.host_bytes <= GIB


def test_a_tiny_model_on_a_runtime_smaller_than_assumed_has_a_plan_that_can_be_read() -> None:
    spec = Spec(cell="gru", seq=4, features=1, hidden=2, batch=2)
    small = Machine(target=msgspec.structs.replace(CPU, runtime_bytes=CPU.runtime_bytes - 50 * MIB))
    problem = make_problem(spec, GIB)
    plan = make(problem, solve(small, problem))
    assert plan is not None
    assert plan.expected.peak_bytes < CPU.runtime_bytes
    assert plan.calibration.ratio == 0
    assert decode_plan(msgspec.json.encode(plan)) == plan
