"""What records correct, and how sure that makes a prediction."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from plan.searched import CARD
from search.machine import Machine

from oomguard._estimate.breakdown import MARGIN_PERCENT, estimate_batch, estimate_step
from oomguard._estimate.target import CPU
from oomguard._predict.calibration import Calibration, same_model
from oomguard._predict.fit import Data, Fit, Prior
from oomguard._predict.speed import drift
from oomguard._probe.record import Record
from oomguard._search.lengths import shorten
from oomguard._spec.candidate import Candidates, make_candidate, serve
from oomguard._spec.spec import Spec

SPEC = Spec(cell="lstm", seq=2000, hidden=128)


def records_of(machine: Machine, spec: Spec = SPEC, steps: tuple[int, ...] = (200, 400)) -> list[Record]:
    return [
        machine.run(short, make_candidate(short, microbatch=rows, allocator="tight"), 1 << 40)
        for short in (msgspec.structs.replace(spec, seq=count) for count in steps)
        for rows in (8, 32)
    ]


@pytest.mark.parametrize("ratio", [0.92, 1.0, 1.08])
def test_after_four_records_the_peak_is_predicted_to_two_percent_and_within_its_margin(ratio: float) -> None:
    machine = Machine(ratio=ratio)
    candidate = make_candidate(SPEC, allocator="tight")
    found = Calibration(SPEC, records_of(machine), CPU).predict(estimate_step(SPEC, candidate, CPU))[0]
    true = machine.peak_bytes(SPEC, candidate)
    assert abs(found.peak_bytes / true - 1) < 0.02
    assert true <= found.safe_bytes


def test_without_records_the_margin_is_that_of_the_bare_estimate() -> None:
    estimate = estimate_step(SPEC, make_candidate(SPEC, allocator="tight"), CPU)
    found = Calibration(SPEC, [], CPU).predict(estimate)[0]
    assert found.peak_bytes == pytest.approx(estimate.total_bytes, rel=1e-9)
    share = found.margin_bytes / estimate.growth_bytes
    assert MARGIN_PERCENT["tight"] / 100 == pytest.approx(share, abs=0.03)


def test_the_margin_shrinks_with_records_and_grows_with_the_distance_from_them() -> None:
    near, far = (msgspec.structs.replace(SPEC, seq=steps) for steps in (800, 200_000))
    share = {}
    for name, records in (("none", []), ("some", records_of(Machine()))):
        for spec in (near, far):
            estimate = estimate_step(spec, make_candidate(spec, allocator="tight"), CPU)
            found = Calibration(spec, records, CPU).predict(estimate)[0]
            share[name, spec.steps] = found.margin_bytes / estimate.growth_bytes
    assert share["some", 800] < 0.6 * share["none", 800]
    assert share["some", 800] < share["some", 200_000] <= 1.05 * share["none", 200_000]


def on_card_of(ratio: float, spec: Spec, **knobs: Any) -> Record:
    return Machine(ratio=ratio, target=CARD).run(spec, make_candidate(spec, allocator="system", **knobs), 1 << 40)


@pytest.mark.parametrize("ratio", [0.85, 1.6])
def test_on_a_card_two_segments_tell_what_five_of_their_length_reserve(ratio: float) -> None:
    """What the allocator reserves for a byte differs from model to model, most of all between pieces and chunks."""
    short, whole = (Spec(cell="rnn", seq=steps, hidden=256, batch=64) for steps in (2400, 6000))
    others = [on_card_of(1.0, Spec(cell="rnn", seq=1500, hidden=256, batch=64), segments=4, recompute=False)]
    records = [*others, on_card_of(ratio, short, segments=2)]
    candidate = make_candidate(whole, segments=5, allocator="system")
    found = Calibration(whole, records, CARD).predict(estimate_step(whole, candidate, CARD))[0]
    true = Machine(ratio=ratio, target=CARD).peak_bytes(whole, candidate)
    assert found.peak_bytes == pytest.approx(true, rel=0.03)
    assert true <= found.safe_bytes


def test_on_a_card_the_longer_of_two_records_tells_more() -> None:
    whole = Spec(cell="gru", seq=4000, hidden=512)
    records = [
        on_card_of(ratio, msgspec.structs.replace(whole, seq=steps)) for steps, ratio in ((2000, 1.3), (3500, 1.1))
    ]
    candidate = make_candidate(whole, allocator="system")
    found = Calibration(whole, records, CARD).predict(estimate_step(whole, candidate, CARD))[0]
    assert found.peak_bytes == pytest.approx(Machine(ratio=1.1, target=CARD).peak_bytes(whole, candidate), rel=0.05)


def test_on_a_card_another_model_corrects_hardly_and_does_not_widen_the_margin() -> None:
    spec, other = (Spec(cell="gru", seq=4000, hidden=hidden) for hidden in (512, 256))
    estimate = estimate_step(spec, make_candidate(spec, allocator="system"), CARD)
    none, others = (Calibration(spec, some, CARD).predict(estimate)[0] for some in ([], [on_card_of(1.6, other)]))
    assert none.peak_bytes <= others.peak_bytes < 1.15 * none.peak_bytes
    assert others.margin_bytes <= 1.15 * none.margin_bytes


def test_records_of_another_engine_do_not_correct() -> None:
    spec = msgspec.structs.replace(SPEC, seq=400)
    native = [Machine(ratio=1.5).run(spec, make_candidate(spec, engine="native", allocator="tight"), 1 << 40)]
    estimate = estimate_step(SPEC, make_candidate(SPEC, engine="onednn", allocator="tight"), CPU)
    assert Calibration(SPEC, native, CPU).predict(estimate)[0].peak_bytes == pytest.approx(
        estimate.total_bytes, rel=1e-3
    )


def test_records_of_another_model_correct_a_little() -> None:
    other = msgspec.structs.replace(SPEC, hidden=256)
    estimate = estimate_step(SPEC, make_candidate(SPEC, allocator="tight"), CPU)
    own, others, none = (
        Calibration(SPEC, records, CPU).predict(estimate)[0]
        for records in (records_of(Machine(ratio=1.1)), records_of(Machine(ratio=1.1), other), [])
    )
    assert none.peak_bytes < others.peak_bytes < 1.01 * own.peak_bytes
    assert own.margin_bytes < others.margin_bytes <= 1.05 * none.margin_bytes


def test_a_record_without_a_measured_step_counts_nothing() -> None:
    refused = Machine().run(SPEC, make_candidate(SPEC), 1)
    assert Calibration(SPEC, [refused], CPU).records == []


def ran_out(spec: Spec, reached_bytes: int) -> Record:
    refused = Machine().run(spec, make_candidate(spec, allocator="tight"), 1)
    return msgspec.structs.replace(refused, peak_bytes=reached_bytes)


def test_what_ran_out_needs_at_least_what_it_reached() -> None:
    candidate, records = make_candidate(SPEC, allocator="tight"), records_of(Machine())
    estimate = estimate_step(SPEC, candidate, CPU)
    before = Calibration(SPEC, records, CPU).predict(estimate)[0]
    reached_bytes = round(1.1 * before.peak_bytes)
    after = Calibration(SPEC, [*records, ran_out(SPEC, reached_bytes)], CPU).predict(estimate)[0]
    assert before.peak_bytes < after.peak_bytes
    assert after.safe_bytes >= reached_bytes


def test_what_ran_out_early_does_not_lower_a_prediction() -> None:
    candidate, records = make_candidate(SPEC, allocator="tight"), records_of(Machine())
    estimate = estimate_step(SPEC, candidate, CPU)
    before = Calibration(SPEC, records, CPU).predict(estimate)[0]
    early = ran_out(SPEC, round(0.6 * before.peak_bytes))
    assert Calibration(SPEC, [*records, early], CPU).predict(estimate)[0].peak_bytes == before.peak_bytes


def test_times_are_learned_from_short_sequences() -> None:
    machine = Machine(effects={0: 0.8, 6: -0.1})
    found = Calibration(SPEC, records_of(machine), CPU).predict(
        estimate_step(SPEC, make_candidate(SPEC, microbatch=16))
    )[0]
    true = 2 * machine.pass_seconds(SPEC, make_candidate(SPEC, microbatch=16))
    assert found.seconds_per_step == pytest.approx(true, rel=0.1)


def test_one_time_that_is_far_off_does_little() -> None:
    machine = Machine(effects={0: 0.5})
    records = records_of(machine, steps=(200, 300, 400))
    seconds = 20 * (records[0].seconds_per_pass or 1)
    slow = msgspec.structs.replace(records[0], seconds_per_pass=seconds, fastest_pass_seconds=seconds)
    estimate = estimate_step(SPEC, make_candidate(SPEC))
    honest = Calibration(SPEC, records, CPU).predict(estimate)[0].seconds_per_step
    assert Calibration(SPEC, [slow, *records[1:]], CPU).predict(estimate)[0].seconds_per_step == pytest.approx(
        honest, rel=0.15
    )


def test_arrays_of_candidates_get_the_figures_that_each_has_alone() -> None:
    calibration = Calibration(SPEC, records_of(Machine(ratio=1.1, effects={0: 0.3})), CPU)
    knobs = {"segments": np.array([1, 8, 8]), "engine": np.array(["onednn", "native", "onednn"]), "allocator": "tight"}
    many = serve(SPEC, Candidates(microbatch=np.array([32, 16, 4]), **knobs))
    together = calibration.predict(estimate_batch(SPEC, many, CPU))
    for index in range(3):
        alone = calibration.predict(estimate_step(SPEC, many[index], CPU))[0]
        assert together[index].peak_bytes == alone.peak_bytes
        assert together[index].margin_bytes == alone.margin_bytes
        assert together[index].seconds_per_step == pytest.approx(alone.seconds_per_step)


def test_models_are_the_same_whatever_the_length_and_number_of_their_sequences() -> None:
    assert same_model(SPEC, Spec(cell="lstm", hidden=128, lengths={5: 1, 10: 2}, batch=7))
    assert not same_model(SPEC, msgspec.structs.replace(SPEC, layers=3))


def test_what_rows_at_one_place_have_in_common_is_told_from_the_effects() -> None:
    features, places = np.ones((4, 1)), np.array([[1], [1], [2], [2]])
    data = Data(features, places, np.array([0.1, 0.1, -0.1, -0.1]), np.full(4, 0.01))
    mean, deviation = Fit(Prior([0.5], local=0.2), data).at(np.ones((3, 1)), np.array([[1], [2], [3]]))
    assert mean[0] == pytest.approx(0.1, abs=0.01)
    assert mean[1] == pytest.approx(-0.1, abs=0.01)
    assert abs(mean[2]) < 0.02
    assert deviation[2] > 5 * deviation[0]


def test_the_nearer_a_place_the_more_it_is_like_what_was_measured() -> None:
    data = Data(np.ones((1, 1)), np.array([[0.0, 0.0]]), np.array([0.3]), np.array([0.01]))
    away = np.array([[0.0, 0.0], [0.6, 0.8], [3.0, 0.0]])
    mean, deviation = Fit(Prior([0.01], local=0.2, reach=1.0), data).at(np.ones((3, 1)), away)
    assert mean == pytest.approx([0.3, 0.18, 0.0], abs=0.02)
    assert (np.diff(deviation) > 0).all()


@pytest.mark.parametrize("segments", [1, 2])
def test_where_the_heap_falls_to_pieces_the_margin_stays_wide_after_calibration(segments: int) -> None:
    """Of a vanilla RNN in 2 segments, a row of the benchmark peaked 13 % over what two shorter ones led to expect."""
    spec = Spec(cell="rnn", seq=10_000, hidden=32, layers=1, batch=4)
    candidate = make_candidate(spec, segments=segments, allocator="tight")
    records = [Machine().run(*shorten(spec, candidate, steps), 1 << 40) for steps in (2500, 5000)]
    expected = Calibration(spec, records, CPU).predict(estimate_step(spec, candidate))[0]
    growth_bytes = expected.peak_bytes - CPU.runtime_bytes
    assert (expected.margin_bytes > 0.13 * growth_bytes) == (segments > 1)


def test_in_a_heap_that_keeps_what_is_freed_chunks_err_less_than_what_is_computed_again() -> None:
    shares = []
    for recompute in (False, True):
        knobs = {"engine": "native", "allocator": "fast", "segments": 4, "recompute": recompute}
        short = msgspec.structs.replace(SPEC, seq=500)
        record = Machine().run(short, make_candidate(short, **knobs), 1 << 40)
        peak, margin = Calibration(SPEC, [record], CPU).predict_memory(
            estimate_step(SPEC, make_candidate(SPEC, **knobs), CPU)
        )
        shares.append(margin / (peak - CPU.runtime_bytes))
    assert 1.5 * shares[0] < shares[1]


def test_a_setting_of_cards_counts_as_tight_on_the_cpu() -> None:
    found = [
        Calibration(SPEC, [], CPU).predict_memory(estimate_step(SPEC, make_candidate(SPEC, allocator=one), CPU))
        for one in ("expandable", "tight", None)
    ]
    assert found[0] == found[1] == found[2]


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def timed(pieces: int, after_seconds: float, slower: float = 1.0, device: str = "cpu") -> Record:
    """Some pieces, at a moment at which all is so much slower."""
    record = Machine().run(SPEC, make_candidate(SPEC, segments=pieces, threads=1, allocator="tight"), 1 << 40)
    seconds = slower * (record.seconds_per_pass or 0.0)
    started = (NOON + timedelta(seconds=after_seconds)).isoformat()
    more: dict[str, Any] = {"seconds_per_pass": seconds, "fastest_pass_seconds": 0.97 * seconds, "passes": 9}
    return msgspec.structs.replace(record, started=started, device=device, **more)


def without_drift(records: list[Record]) -> list[float]:
    """The corrected time of each record over its true time."""
    found = Calibration(SPEC, records, CPU)
    return [
        found.seconds_without_drift(one) / (timed(one.candidate.segments, 0).seconds_per_pass or 1.0) for one in records
    ]


def test_what_is_measured_while_everything_is_slow_is_not_slow() -> None:
    """Ten segments are measured under high load only: twelve and eight, measured before and again, show the load."""
    before = [timed(pieces, 3 * n) for n, pieces in enumerate((8, 12, 8, 12))]
    after = [timed(pieces, 120 + 3 * n, slower=1.4) for n, pieces in enumerate((8, 12, 10, 8, 12))]
    found = without_drift([*before, *after])
    assert after[2].candidate.segments == 10
    assert found[6] / found[0] < 1.1


def test_what_alone_is_slow_is_slow() -> None:
    records = [timed(8, 0), timed(12, 3), timed(10, 6, slower=1.4), timed(8, 9), timed(12, 12)]
    found = without_drift(records)
    assert found[2] / found[0] > 1.35


def test_what_is_slower_than_others_and_never_run_again_is_slow() -> None:
    """Measured one after the other, all of them slower than expected: that alone is no drift."""
    records = [timed(8, 0), timed(12, 3), *(timed(pieces, 60 + 3 * pieces, slower=1.4) for pieces in (2, 3, 4))]
    found = without_drift(records)
    assert min(found[2:]) / max(found[:2]) > 1.3


def test_the_drift_of_one_device_is_not_that_of_another() -> None:
    before = [timed(8, 0), timed(12, 3)]
    after = [timed(8, 100, slower=1.4), timed(12, 103, slower=1.4)]
    there = [timed(10, 101, device="cuda:1"), timed(10, 104, device="cuda:1")]
    slower = drift([*before, *after, *there])
    assert slower[2] - slower[0] > 0.25
    assert abs(slower[4] - (slower[0] + slower[2]) / 2) < 0.05


def test_records_of_one_moment_differ_by_themselves() -> None:
    assert np.abs(drift([timed(pieces, 0) for pieces in (2, 4, 8)])).max() < 0.01


def test_a_record_that_does_not_say_when_it_was_made_is_no_error() -> None:
    lost = msgspec.structs.replace(timed(8, 0), started="some day")
    assert np.isfinite(without_drift([lost, timed(12, 0)])).all()
