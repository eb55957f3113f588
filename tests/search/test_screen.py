"""What fits by estimate and margin, and what records say of it."""

from typing import Any

import msgspec
import numpy as np
import pytest
from search.machine import Machine, find, make_problem, replace, solve

from oomguard._core.units import GIB, MIB
from oomguard._estimate import cards
from oomguard._estimate.target import on_card
from oomguard._predict.speed import NOISE
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.screen import SETTING, record_of, screen
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.lengths import shorten
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=2000)
PROBLEM = make_problem(LSTM, 700 * MIB)
FAILED: dict[str, Any] = dict.fromkeys(
    [
        *("terms", "peak_bytes", "runtime_bytes", "seconds_per_step", "tokens_per_second"),
        *("seconds_per_pass", "fastest_pass_seconds", "seconds_per_update"),
    ]
) | {"passes": 0, "steps": 0}


def knobs(**some: Any) -> Candidate:
    """A candidate of the problem's space."""
    usual = {"engine": "onednn", "threads": 2, "allocator": "tight", "microbatch": 8}
    return make_candidate(LSTM, **usual | some)


def failed(verdict: Verdict, candidate: Candidate, budget_bytes: int = 700 * MIB, spec: Spec = LSTM) -> Record:
    """A record without a measured step."""
    record = Machine().run(spec, candidate, 1 << 40)
    return msgspec.structs.replace(record, verdict=verdict, error="why", budget_bytes=budget_bytes, **FAILED)


def ran(candidate: Candidate, spec: Spec = LSTM, **changes: Any) -> Record:
    return msgspec.structs.replace(Machine().run(spec, candidate, 1 << 40), **changes)


def taking(seconds: float) -> dict[str, Any]:
    """The time of each pass."""
    return {"seconds_per_pass": seconds, "fastest_pass_seconds": seconds}


def fits(problem: Problem, records: list[Record], candidate: Candidate) -> bool:
    view = screen(problem, records)
    row = find(view, candidate)
    assert row is not None
    return bool(view.fits[row])


# estimate and margin


@pytest.mark.parametrize("budget_bytes", [400 * MIB, 3 * GIB])
@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_nothing_is_eligible_whose_peak_and_margin_exceed_the_budget(budget_bytes: int, ratio: float) -> None:
    problem = make_problem(LSTM, budget_bytes)
    for records in ([], solve(Machine(ratio=ratio), problem)):
        view = screen(problem, records)
        assert view.eligible.any()
        assert (view.expected.safe_bytes[view.eligible] <= budget_bytes).all()
        assert (view.expected.safe_bytes >= view.expected.peak_bytes).all()


def test_without_records_the_screen_is_the_estimate_and_nothing_has_run() -> None:
    view = screen(PROBLEM, [])
    assert (view.expected.peak_bytes >= view.estimate.total_bytes).all()
    assert (view.longest == 0).all()


def test_a_larger_budget_lets_all_fit_that_fitted_before() -> None:
    small, large = (screen(make_problem(LSTM, size), []) for size in (500 * MIB, 600 * MIB))
    assert (small.fits <= large.fits).all()
    assert small.fits.sum() < large.fits.sum()


def test_on_a_card_the_hosts_memory_counts_too() -> None:
    spec, target = Spec(cell="lstm", seq=20_000, features=512), on_card(cards.card("t4"))
    space = make_space(spec, target, 2 * GIB, Choices())
    problem = Problem(spec=spec, target=target, space=space, budget_bytes=2 * GIB)
    roomy, tight = (screen(replace(problem, host_bytes=size), []) for size in (1 << 40, GIB))
    assert tight.eligible.any()
    needs = np.broadcast_to(tight.estimate.host_bytes, len(tight.fits))
    assert (needs[tight.fits] <= GIB).all()
    assert roomy.fits.sum() > tight.fits.sum()


# what has run


def test_a_candidate_that_ran_goes_by_its_record() -> None:
    candidate = knobs(segments=4)
    record = ran(candidate, peak_bytes=600 * MIB)
    view = screen(PROBLEM, [record])
    row = find(view, candidate)
    assert view.expected.peak_bytes[row] == 600 * MIB
    assert 600 * MIB < view.expected.safe_bytes[row] < 610 * MIB
    assert view.longest[row] == LSTM.steps


def test_what_the_estimate_keeps_out_a_record_lets_in() -> None:
    candidate = knobs(microbatch=32)
    assert not fits(PROBLEM, [], candidate)
    assert fits(PROBLEM, [ran(candidate, peak_bytes=600 * MIB)], candidate)


def test_what_the_estimate_lets_in_a_record_keeps_out() -> None:
    candidate = knobs(segments=4)
    assert fits(PROBLEM, [], candidate)
    assert not fits(PROBLEM, [ran(candidate, peak_bytes=699 * MIB)], candidate)


def test_a_record_of_shorter_sequences_tells_the_time_and_not_the_peak() -> None:
    candidate = knobs(segments=16)
    short, cut = shorten(LSTM, candidate, 500)
    record = ran(cut, short, peak_bytes=600 * MIB)
    view = screen(PROBLEM, [record])
    row = find(view, candidate)
    assert view.longest[row] == 500
    assert view.expected.peak_bytes[row] == view.prediction.peak_bytes[row]
    assert record.seconds_per_pass is not None
    assert view.expected.seconds_per_step[row] == pytest.approx(4 * 4 * record.seconds_per_pass, rel=0.05)


def test_the_longest_of_several_records_has_the_last_word() -> None:
    candidate = knobs(segments=16)
    whole = ran(candidate, **taking(3.0))
    short, cut = shorten(LSTM, candidate, 500)
    records = [whole, ran(cut, short, **taking(100.0))]
    view = screen(PROBLEM, records)
    row = find(view, candidate)
    assert row is not None
    assert view.expected.seconds_per_step[row] == pytest.approx(12.0, rel=1.1 * NOISE)
    assert record_of(records, view, row) == whole


def test_a_record_of_longer_sequences_does_not_displace_that_of_the_asked_length() -> None:
    candidate, longer = knobs(), msgspec.structs.replace(LSTM, seq=3000)
    own, other = ran(candidate, **taking(3.0)), ran(candidate, longer, **taking(100.0))
    for records in ([own, other], [other, own]):
        view = screen(PROBLEM, records)
        row = find(view, candidate)
        assert row is not None
        assert view.expected.seconds_per_step[row] == pytest.approx(12.0, rel=1.1 * NOISE)
        assert view.longest[row] == 3000
        assert record_of(records, view, row) == own


def test_a_record_of_longer_sequences_tells_the_time_if_there_is_no_other() -> None:
    candidate, longer = knobs(), msgspec.structs.replace(LSTM, seq=3000)
    record = ran(candidate, longer, **taking(3.0))
    view = screen(PROBLEM, [record])
    row = find(view, candidate)
    assert row is not None
    assert view.expected.seconds_per_step[row] == pytest.approx(8.0, rel=1.1 * NOISE)
    assert record_of([record], view, row) == record


def test_of_several_turns_the_middle_one_tells_the_time_and_the_highest_the_peak() -> None:
    candidate = knobs()
    peaks = (500 * MIB, 560 * MIB, 520 * MIB)
    turns = zip((3.0, 30.0, 3.1), peaks, strict=True)
    records = [ran(candidate, peak_bytes=peak, **taking(seconds)) for seconds, peak in turns]
    view = screen(PROBLEM, records)
    row = find(view, candidate)
    assert row is not None
    assert view.expected.seconds_per_step[row] == pytest.approx(4 * 3.1, rel=1.1 * NOISE)
    assert view.expected.peak_bytes[row] == 560 * MIB
    assert record_of(records, view, row) == records[1]


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_of_two_that_ran_by_turns_the_ratio_decides_and_not_their_single_times(ratio: float) -> None:
    one, other = knobs(), knobs(microbatch=16)
    records = [ran(one, **taking(3.0)), ran(other, **taking(6.0)), ran(one, **taking(3.0), rival=other, ratio=ratio)]
    view = screen(PROBLEM, records)
    first, second = find(view, one), find(view, other)
    assert first is not None
    assert second is not None
    seconds = view.expected.seconds_per_step
    assert seconds[first] / seconds[second] == pytest.approx(ratio)


def test_of_two_that_ran_by_turns_and_went_over_neither_fits() -> None:
    one, other = knobs(), knobs(microbatch=16)
    records = [ran(one), ran(other)]
    records.append(msgspec.structs.replace(failed(Verdict.OVER, one), rival=other))
    assert not fits(PROBLEM, records, one)
    assert not fits(PROBLEM, records, other)


def test_one_lucky_moment_moves_a_time_by_no_more_than_its_passes_differ() -> None:
    candidate, others = knobs(), [knobs(microbatch=rows) for rows in (4, 16, 32)]
    usual = [ran(one) for one in (candidate, *others)]
    seconds = usual[0].seconds_per_pass or 0.0
    lucky = {"seconds_per_pass": 0.8 * seconds, "fastest_pass_seconds": 0.6 * seconds, "passes": 9}
    times = []
    for first in (usual[0], msgspec.structs.replace(usual[0], **lucky)):
        view = screen(PROBLEM, [first, *usual[1:]])
        times.append(view.expected.seconds_per_step[find(view, candidate)])
    assert 0.82 * times[0] < times[1] < 0.97 * times[0]


@pytest.mark.parametrize("verdict", [Verdict.OOM, Verdict.OVER, Verdict.TIMEOUT, Verdict.UNSUPPORTED])
def test_what_did_not_run_with_longer_sequences_may_run_with_shorter_ones(verdict: Verdict) -> None:
    problem, longer = make_problem(LSTM, 3 * GIB), msgspec.structs.replace(LSTM, seq=100_000)
    assert fits(problem, [], knobs())
    assert fits(problem, [failed(verdict, knobs(), 3 * GIB, longer)], knobs())


@pytest.mark.parametrize("segments", [2, 11, 23, 45, 91, 100])
def test_a_shortened_candidate_is_known_again_whatever_its_number_of_pieces(segments: int) -> None:
    """The last of them is shorter, unless their number divides the steps."""
    candidate = knobs(segments=segments, allocator="fast", engine="native")
    problem = make_problem(LSTM, 700 * MIB, fixed={"segments": segments})
    short, cut = shorten(LSTM, candidate, LSTM.steps // 2)
    view = screen(problem, [ran(cut, short)])
    assert view.longest[find(view, candidate)] == short.steps


def test_what_never_ran_has_no_record() -> None:
    view = screen(PROBLEM, [ran(knobs(segments=4))])
    row = find(view, knobs(segments=8))
    assert row is not None
    assert record_of([ran(knobs(segments=4))], view, row) is None


# what has not


@pytest.mark.parametrize("verdict", [Verdict.OOM, Verdict.KILLED, Verdict.OVER])
def test_what_ran_out_is_out_at_that_budget_and_any_smaller_but_not_at_a_larger(verdict: Verdict) -> None:
    candidate = knobs(segments=4)
    records = [failed(verdict, candidate)]
    found = [fits(make_problem(LSTM, size * MIB), records, candidate) for size in (650, 700, 750)]
    assert found == [False, False, True]


def test_what_ran_out_takes_nothing_smaller_and_no_other_setting_with_it() -> None:
    candidate = knobs(segments=4)
    before, after = screen(PROBLEM, []), screen(PROBLEM, [failed(Verdict.OOM, candidate)])
    out = before.fits & ~after.fits
    peaks, same = before.expected.peak_bytes, before.like(candidate, *SETTING)
    assert out[find(before, candidate)]
    assert (same[out] & (peaks[out] >= peaks[find(before, candidate)])).all()
    assert (after.fits <= before.fits).all()


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.CRASHED, Verdict.BROKEN])
def test_what_cannot_run_takes_its_whole_setting_out_and_nothing_else(verdict: Verdict) -> None:
    candidate = knobs(segments=4)
    before, after = screen(PROBLEM, []), screen(PROBLEM, [failed(verdict, candidate)])
    same = after.like(candidate, *SETTING)
    assert not after.fits[same].any()
    assert (after.fits[~same] == before.fits[~same]).all()
    assert after.eligible.any()


def test_what_took_too_long_is_out_unless_it_has_run() -> None:
    candidate = knobs(segments=4)
    late = failed(Verdict.TIMEOUT, candidate)
    assert not fits(PROBLEM, [late], candidate)
    assert fits(PROBLEM, [late, ran(candidate)], candidate)


def test_if_everything_took_too_long_it_stays_in_the_race() -> None:
    candidate = knobs(segments=4)
    fixed = {"microbatch": candidate.microbatch, "segments": 4, "engine": candidate.engine, "threads": 1}
    problem = make_problem(LSTM, 700 * MIB, allow=(), fixed=fixed | {"allocator": "tight"})
    before = screen(problem, [])
    late = [failed(Verdict.TIMEOUT, before.candidates[int(row)]) for row in np.flatnonzero(before.fits)]
    assert late
    assert (screen(problem, late).fits == before.fits).all()


def test_where_one_was_strained_others_of_its_setting_must_peak_lower() -> None:
    candidate = knobs(segments=4)
    strained = ran(candidate, verdict=Verdict.STRAINED, peak_bytes=600 * MIB)
    view = screen(PROBLEM, [strained])
    same = view.like(candidate, *SETTING)
    assert not fits(PROBLEM, [strained], candidate)
    assert (view.expected.safe_bytes[view.fits & same] <= 600 * MIB).all()
    assert (view.fits & same).any()
    assert (view.expected.safe_bytes[view.fits & ~same] > 600 * MIB).any()


# other models


@pytest.mark.parametrize("verdict", [Verdict.OOM, Verdict.UNSUPPORTED, Verdict.TIMEOUT])
def test_what_did_not_run_of_another_model_changes_nothing(verdict: Verdict) -> None:
    other = msgspec.structs.replace(LSTM, hidden=300)
    before, after = screen(PROBLEM, []), screen(PROBLEM, [failed(verdict, knobs(segments=4), spec=other)])
    assert (before.fits == after.fits).all()
    assert (before.expected.peak_bytes == after.expected.peak_bytes).all()


def test_what_ran_of_another_model_changes_predictions_alone() -> None:
    other = msgspec.structs.replace(LSTM, hidden=300)
    records = [ran(knobs(segments=4), other), ran(knobs(segments=1), other)]
    view = screen(PROBLEM, records)
    assert (view.longest == 0).all()
    assert (view.expected.peak_bytes == view.prediction.peak_bytes).all()
    assert (view.fits == (view.estimate.runs & (view.prediction.safe_bytes <= 700 * MIB))).all()


def test_cached_records_steer_predictions_and_count_as_run_nowhere() -> None:
    record = Machine(ratio=1.1).run(LSTM, knobs(segments=4), 1 << 40)
    view = screen(replace(PROBLEM, cached=(record,)), [])
    assert (view.longest == 0).all()
    row = find(view, knobs(segments=4))
    assert row is not None
    assert view.expected.peak_bytes[row] > screen(PROBLEM, []).expected.peak_bytes[row]
