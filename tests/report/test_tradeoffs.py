"""The table: the same figures as one estimate after the other, and measured ones in their rows."""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from plan.searched import searched
from report.subjects import on_a_card, plan, planned, segments
from rich.console import Console

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._estimate.moments import TERMS
from oomguard._plan.make import pareto_front
from oomguard._probe.record import RECORDS, Ledger, Record
from oomguard._probe.verdict import Verdict
from oomguard._report.subject import front_of
from oomguard._report.tradeoffs import default_curve, make_table, show_tradeoffs, values_words
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import Spec

WIDE: dict[str, Any] = {
    "microbatch": [1, 7, 16],
    "segments": [1, 3, 40],
    "recompute": [True, False],
    "window": [None, 50],
    "levels": [1, 2],
}


def candidate_of(row: Any) -> Candidate:
    knobs = {name: None if pd.isna(row[name]) else row[name] for name in KNOBS}
    return Candidate(**{name: getattr(value, "item", lambda value=value: value)() for name, value in knobs.items()})


@pytest.mark.parametrize("device", ["cpu", "a100-80gb", "t4"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_every_row_is_what_an_estimate_of_it_says(device: str, cell: Any) -> None:
    fields = {"hidden": [32, 96], "seq": [100, 333], "batch": [16, 20]}
    over = WIDE | fields | {"precision": ["fp32", "fp16"]}
    table = oomguard.tradeoffs(cell=cell, over=over, device=device, budget=700 << 20)
    assert len(table) > 500
    for _, row in table.sample(60, random_state=0).iterrows():
        spec = Spec(cell=cell, hidden=row["hidden"], seq=row["seq"], batch=row["batch"])
        estimate = oomguard.estimate(spec, candidate_of(row), device=device, budget_bytes=700 << 20)
        assert {term: row[f"{term}_bytes"] for term in TERMS} == estimate.terms
        assert (row["total_bytes"], row["margin_bytes"], row["fits"]) == (
            estimate.total_bytes,
            estimate.margin_bytes,
            estimate.fits,
        )
        assert row["peak_bytes"] == row["total_bytes"]


def test_the_terms_of_every_row_add_up_to_its_total() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=1000, device="t4")
    assert (table[[f"{term}_bytes" for term in TERMS]].sum(axis=1) == table["total_bytes"]).all()


def test_a_hundred_thousand_rows_take_less_than_two_seconds() -> None:
    over = {"microbatch": range(1, 501), "segments": range(1, 101), "precision": ["fp32", "bf16"]}
    oomguard.tradeoffs(cell="lstm", seq=10_000, over={"microbatch": [1]}, device="a100-80gb")  # imports
    seconds = []
    for _ in range(3):
        started = time.process_time()
        table = oomguard.tradeoffs(cell="lstm", seq=10_000, batch=500, over=over, device="a100-80gb")
        seconds.append(time.process_time() - started)
    assert len(table) == 100_000
    assert min(seconds) < 2


def test_combinations_that_cannot_be_are_left_out() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=100, over=WIDE | {"batch": [4, 16]})
    assert not ((table["segments"] > 1) & table["window"].notna()).any()
    assert not ((table["levels"] > 1) & ~table["recompute"]).any()
    assert (table["microbatch"] <= table["batch"]).all()
    assert {*table["batch"]} == {4, 16}


def test_an_engine_that_only_one_cell_has_is_in_the_rows_of_that_cell() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=50, over={"cell": ["lstm", "gru"], "engine": ["onednn", "native"]})
    assert sorted(zip(table["cell"], table["engine"], strict=True)) == [
        ("gru", "native"),
        ("lstm", "native"),
        ("lstm", "onednn"),
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"over": {"segments": [0]}}, "--segments must be a whole number from 1"),
        ({"over": {"segments": [4, 5000]}}, "--segments must be a whole number from 1 to 1,000"),
        ({"over": {"microbatch": [64]}, "batch": 32}, "--microbatch must not be larger than --batch"),
        ({"over": {"precision": ["fp64"]}}, "--precision must be one of"),
        ({"over": {"precision": [4]}}, "--precision must be one of"),
        ({"over": {"microbatch": ["many"]}}, "--microbatch must be a whole number"),
        ({"over": {"microbatch": [1.5]}}, "--microbatch must be a whole number"),
        ({"over": {"hidden": [64, -1]}}, "--hidden must be a whole number"),
        ({"over": {"engine": ["onednn"]}, "device": "t4"}, "runs on cudnn or native"),
        ({"over": {"window": [10]}, "segments": 4}, "--window 10 is possible with none"),
        ({"over": {"segments": [4]}, "segments": 4}, "either fixed or varied"),
        ({"over": {"seq": range(1, 3000)}}, "2,999"),
        ({"over": {"seq": range(1, 1500), "hidden": range(1, 1500)}}, "2,247,001"),
        ({"over": {"segments": range(1, 1001), "microbatch": range(1, 1100)}}, "1,099,000"),
        ({"measured": 7}, "a plan, a ledger or records"),
        ({"measured": "nowhere.json"}, "there is no nowhere.json"),
        ({"budget": 0}, "--budget"),
        ({"over": {"microbatch": [1]}, "colour": 1}, "Unknown argument 'colour'"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_was_got(asked: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"cell": "lstm", "seq": 1000, "device": "a100-80gb"}
    with pytest.raises(MisuseError) as error:
        oomguard.tradeoffs(**usual | asked)
    assert message in str(error.value)


def test_a_batch_that_nobody_gave_holds_the_largest_microbatch() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=100, over={"microbatch": "1..64"})
    assert (len(table), {*table["batch"]}) == (64, {64})


def test_sequences_that_nobody_gave_are_as_long_as_the_longest() -> None:
    assert {*oomguard.tradeoffs(cell="gru", over={"seq": [10, 20]})["seq"]} == {10, 20}


def test_what_was_measured_is_in_the_row_of_its_candidate_and_in_no_other() -> None:
    table = oomguard.tradeoffs(measured=plan())
    record = plan().record
    assert record is not None
    (row,) = [row for _, row in table.iterrows() if not pd.isna(row["verdict"])]
    assert candidate_of(row) == record.candidate
    assert (row["measured_peak_bytes"], row["verdict"]) == (record.peak_bytes, "FITS")
    assert row["measured_seconds_per_step"] == record.seconds_per_step
    assert row["measured_tokens_per_second"] == record.tokens_per_second


def test_of_a_plan_its_model_device_budget_and_knobs_are_taken() -> None:
    table = oomguard.tradeoffs(measured=plan())
    assert table.attrs == {"device": "cpu", "budget_bytes": plan().budget_bytes}
    assert {*table["threads"]} == {plan().candidate.threads}
    assert {*table["seq"]} == {plan().spec.seq}


def test_a_plan_beside_fields_of_another_spec_is_refused() -> None:
    with pytest.raises(MisuseError, match="A plan has its own spec, but got --hidden"):
        oomguard.tradeoffs(measured=plan(), hidden=512)
    assert {*oomguard.tradeoffs(measured=plan(), cell="lstm", seq=50)["seq"]} == {50}


def test_records_calibrate_what_is_predicted() -> None:
    subject, table = planned(), oomguard.tradeoffs(measured=plan())
    prediction = subject.predict(subject.vary(segments=[64]))
    (row,) = [row for _, row in table.iterrows() if (row["microbatch"], row["segments"]) == (32, 64)]
    assert (row["peak_bytes"], row["margin_bytes"]) == (prediction.peak_bytes[0], prediction.margin_bytes[0])
    assert row["peak_bytes"] > row["total_bytes"]  # the machine needs 3 % more than the estimate says
    record = plan().record
    assert record is not None
    own = table[table["verdict"].notna()].iloc[0]
    assert own["seconds_per_step"] == pytest.approx(record.seconds_per_step, rel=0.05)
    assert own["peak_bytes"] == pytest.approx(record.peak_bytes, rel=0.01)


def test_a_ledger_its_directory_its_records_and_a_plans_file_tell_the_same(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / RECORDS)
    for record in plan().records:
        ledger.append(record)
    path = str(oomguard.save_plan(plan(), tmp_path / "plan.json"))
    asked: dict[str, Any] = {"spec": plan().spec, "budget": plan().budget_bytes, "over": {"segments": [1, segments()]}}
    tables = [
        oomguard.tradeoffs(**asked, measured=measured)
        for measured in (plan(), path, ledger, tmp_path, str(tmp_path), plan().records)
    ]
    for table in tables:
        pd.testing.assert_frame_equal(table, tables[0])
    assert tables[0]["verdict"].tolist() == [pd.NA, "FITS"]


def test_the_latest_record_of_a_candidate_counts_and_what_did_not_run_has_no_figures() -> None:
    record = plan().record
    assert record is not None
    nothing: dict[str, Any] = {"peak_bytes": 1, "seconds_per_step": None, "steps": 0, "verdict": Verdict.OOM}
    late = msgspec.structs.replace(record, started="2027-01-01T00:00:00.000", **nothing)
    table = oomguard.tradeoffs(plan().spec, over={"segments": [segments()]}, measured=[late, record])
    assert table["verdict"].tolist() == ["OOM"]
    assert table["measured_peak_bytes"].isna().all()
    assert table[["measured_seconds_per_step", "measured_tokens_per_second"]].isna().all(axis=None)


def test_records_of_other_lengths_calibrate_but_are_in_no_row() -> None:
    table = oomguard.tradeoffs(measured=plan(), over={"seq": [1000, 2000], "segments": [segments()]}, microbatch=32)
    assert table["verdict"].isna().all()
    assert (table["time_factor"] < 2).all()


@pytest.mark.parametrize("device", ["t4", "a100-80gb"])
def test_records_of_another_device_are_refused(device: str) -> None:
    with pytest.raises(MisuseError, match="from the device that is asked about"):
        oomguard.tradeoffs(plan().spec, measured=plan(), device=device)


def test_records_of_a_card_are_taken_for_that_card_and_no_other() -> None:
    _, records, _ = searched("on a card")
    own = [msgspec.structs.replace(record, device="cuda:0", title="Tesla T4") for record in records]
    table = oomguard.tradeoffs(on_a_card().spec, measured=own, device="t4")
    assert (table["time_factor"] < 4).any()
    with pytest.raises(MisuseError, match="Tesla T4"):
        oomguard.tradeoffs(on_a_card().spec, measured=own, device="a100-80gb")


def test_the_front_is_what_nothing_beats_in_memory_and_speed() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=2000, budget=2 * GIB)
    front = front_of(table)
    fits = table[table["fits"]]
    assert front["fits"].all()
    for _, row in fits.iterrows():
        better = (fits["peak_bytes"] <= row["peak_bytes"]) & (fits["tokens_per_second"] > row["tokens_per_second"])
        better |= (fits["peak_bytes"] < row["peak_bytes"]) & (fits["tokens_per_second"] >= row["tokens_per_second"])
        assert (row.name in front.index) == (not better.any())


def test_the_front_of_nothing_is_empty() -> None:
    assert pareto_front(np.array([]), np.array([])).tolist() == []


def test_other_kinds_of_records_are_not_records() -> None:
    with pytest.raises(MisuseError, match="a plan, a ledger or records"):
        oomguard.tradeoffs(cell="lstm", seq=10, measured=[plan().record, "record"])
    assert isinstance(plan().record, Record)


@pytest.mark.parametrize(
    ("over", "curve"),
    [
        (["microbatch"], "microbatch"),
        (["seq", "microbatch"], "region"),
        (["segments", "precision"], "segments"),
        ([], "front"),
    ],
)
def test_the_curve_that_is_drawn_shows_most_of_what_varies(over: list[str], curve: str) -> None:
    assert default_curve(over) == curve


@pytest.mark.parametrize(
    ("values", "words"), [([512, 1024], "512 to 1,024"), ([7], "7"), (["adam", "sgd"], "adam or sgd")]
)
def test_values_that_vary_are_told_in_a_few_words(values: list[Any], words: str) -> None:
    assert values_words(values) == words


def test_a_table_has_a_row_for_each_value() -> None:
    table = oomguard.tradeoffs(cell="lstm", seq=1000, budget="1GiB", over={"microbatch": [8, 32]})
    rows = table[["microbatch", "accumulation", "fits"]].values.tolist()
    assert rows == [[8, 4, True], [32, 1, False]]


def test_noisy_times_are_marked_in_the_table() -> None:
    subject = planned()
    table = make_table(subject).assign(time_factor=1.2)
    with (console := Console(width=200)).capture() as captured:
        show_tradeoffs(subject, table, None, console)
    assert " s ±20 %" in captured.get()
    assert "± is the standard deviation of a time." in " ".join(captured.get().split())
    with console.capture() as captured:
        show_tradeoffs(subject, table.assign(time_factor=1.01), None, console)
    assert "±" not in captured.get()
