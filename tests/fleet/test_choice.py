"""The cheapest and the fastest card of each job, by price and by measured times, and what fits nowhere."""

import json
from pathlib import Path

import pytest
from fleet.fleets import A100, LARGE, SMALL, T4, files, fleet_of, record_on

import oomguard
from oomguard._cli.app import run
from oomguard._estimate import cards

CARD_T4, CARD_A100 = "t4-16gb", "a100-80gb"


def ledger(folder: Path, **seconds: float) -> str:
    """A ledger in which the small job has been timed on some cards."""
    spec = oomguard.Spec(**{name: value for name, value in SMALL.items() if name != "name"})
    records = oomguard.Ledger(folder / "ledger" / "records.jsonl")
    for name, each in seconds.items():
        records.append(record_on({"t4": "Tesla T4", "a100": "NVIDIA A100-SXM4-80GB"}[name], spec, each))
    return str(folder / "ledger")


def test_without_times_the_cheapest_is_by_price_and_nothing_is_fastest() -> None:
    result = fleet_of(SMALL).result(0)
    assert result.fits == (CARD_T4, CARD_A100)
    assert result.cheapest is not None
    assert (result.cheapest.card, result.by, result.fastest, result.timed) == (CARD_T4, "price", None, 0)
    assert result.cheapest.seconds_per_step is result.cheapest.cost_per_epoch is None


def test_of_equal_prices_the_smallest_card_is_taken() -> None:
    result = fleet_of(SMALL, on=["a100-80gb", "t4"]).result(0)
    assert result.cheapest is not None
    assert result.cheapest.card == CARD_T4


def test_with_times_on_all_cards_the_cheapest_is_by_cost(tmp_path: Path) -> None:
    measured = ledger(tmp_path, t4=1.0, a100=0.1)  # the A100 costs five times as much, and is ten times as fast
    result = fleet_of(SMALL | {"measured": measured, "sequences": 8 * 3600}).result(0)
    assert result.by == "cost"
    assert result.cheapest == result.fastest
    assert result.cheapest is not None
    assert (result.cheapest.card, result.cheapest.measured, result.timed) == (CARD_A100, True, 2)
    assert result.cheapest.seconds_per_step == pytest.approx(0.1, rel=0.1)
    assert result.cheapest.seconds_per_epoch == pytest.approx(3600 * (result.cheapest.seconds_per_step or 0))
    assert result.cheapest.cost_per_epoch == pytest.approx(1.8 * (result.cheapest.seconds_per_epoch or 0) / 3600)


def test_with_a_time_on_one_card_of_two_costs_are_not_compared(tmp_path: Path) -> None:
    result = fleet_of(SMALL | {"measured": [ledger(tmp_path, a100=0.1)]}).result(0)
    assert result.cheapest is not None
    assert result.fastest is not None
    assert (result.by, result.cheapest.card, result.fastest.card, result.timed) == ("price", CARD_T4, CARD_A100, 1)


def test_records_of_other_cards_and_models_tell_nothing(tmp_path: Path) -> None:
    job = SMALL | {"measured": ledger(tmp_path, t4=1.0)}
    assert fleet_of(job, on=[A100]).result(0).timed == 0
    assert fleet_of(job | {"hidden": 300}).result(0).timed == 0


def test_sequences_of_an_epoch_come_from_a_histogram_of_lengths(tmp_path: Path) -> None:
    spec = oomguard.Spec(cell="gru", lengths={50: 100, 100: 60}, batch=8)
    records = oomguard.Ledger(tmp_path / "records.jsonl")
    records.append(record_on("Tesla T4", spec, 1.0))
    job = {"name": "a", "cell": "gru", "lengths": {50: 100, 100: 60}, "batch": 8, "measured": str(tmp_path)}
    option = fleet_of(job, on=[T4]).result(0).fastest
    assert option is not None
    assert option.seconds_per_epoch == pytest.approx(20 * (option.seconds_per_step or 0))


def test_a_job_that_fits_nowhere_is_told_what_it_needs() -> None:
    found = fleet_of({"name": "giant", "cell": "lstm", "seq": 1000, "hidden": 12_000}, on=[T4])
    result = found.result(0)
    assert not found.fits
    assert (result.fits, result.cheapest, result.fastest) == ((), None, None)
    assert result.needed_bytes > cards.card("t4").usable_bytes
    card, *changes = result.advice
    name = card.removesuffix(" has.").split()[-1]
    assert cards.card(name).usable_bytes >= result.needed_bytes
    assert changes
    assert all("would need" in change for change in changes)


def test_what_no_card_can_run_is_told_so() -> None:
    job = {"name": "a", "cell": "lstm", "seq": 100_000, "segments": 1}
    assert "65,535" in fleet_of(job).result(0).advice[0]


def test_small_jobs_share_a_card_up_to_its_memory() -> None:
    found = fleet_of(*(SMALL | {"name": f"small {n}"} for n in range(60)), LARGE, on=[T4])
    (packed,) = found.packed
    assert sorted(job for jobs in packed.bins for job in jobs) == [*range(61)]
    room = cards.card("t4").usable_bytes
    for jobs, used in zip(packed.bins, packed.used_bytes, strict=True):
        assert used == sum(found.result(job).needed_bytes for job in jobs) <= room
    assert 1 < len(packed.bins) < 61
    assert packed.bins[0][0] == 60  # the largest first
    smallest = found.result(0).needed_bytes
    assert all(used + smallest > room for used in packed.used_bytes[:-1])


def test_the_table_has_every_pair(tmp_path: Path) -> None:
    table = fleet_of(SMALL, LARGE).table()
    assert table[["job", "card"]].values.tolist() == [
        [job, card] for job in ("small", "large") for card in (CARD_T4, CARD_A100)
    ]
    assert table["choice"].tolist() == ["cheapest", "", "cheapest", ""]
    chosen = fleet_of(SMALL, LARGE).result(1).cheapest
    assert chosen is not None
    row = table.iloc[2]
    assert (row["peak_bytes"], row["segments"], row["precision"]) == (
        chosen.peak_bytes,
        chosen.candidate.segments,
        chosen.candidate.precision,
    )


# ---- the command


def test_the_command_writes_all_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, listed = files(tmp_path)
    table, page = tmp_path / "a b.csv", tmp_path / "fleet.html"
    assert run(["fleet", jobs, "--cards", listed, "--csv", str(table), "--html", str(page)]) == 0
    assert "All 3 jobs fit" in capsys.readouterr().out
    assert len(table.read_text().splitlines()) == 1 + 3 * 2
    assert "words-seq3000" in page.read_text()
    assert run(["fleet", jobs, "--cards", listed, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [job["name"] for job in document["jobs"]] == ["words-seq100", "words-seq3000", "long"]
    assert document["fits"]


def test_a_job_that_fits_nowhere_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, listed = files(tmp_path, '[[job]]\nname = "a"\ncell = "lstm"\nseq = 99\nhidden = 30_000\n')
    assert run(["fleet", jobs, "--cards", listed]) == 1
    assert "Jobs that fit no card" in capsys.readouterr().out


def test_it_fits_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    jobs, listed = files(tmp_path)
    assert run(["fleet", jobs, "--cards", listed]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_texts_of_a_file_are_escaped_on_the_page(tmp_path: Path) -> None:
    jobs, listed = files(tmp_path, '[[job]]\nname = "<script>alert(1)</script>"\ncell = "lstm"\nseq = 99\n')
    assert run(["fleet", jobs, "--cards", listed, "--html", str(tmp_path / "a.html")]) == 0
    assert "<script>alert" not in (tmp_path / "a.html").read_text()


def test_a_task_is_traced_once_for_all_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    task = oomguard.Task(
        model=lambda: torch.nn.LSTM(8, 64),
        loss=lambda model, batch: model(batch)[0].square().mean(),
        batch=lambda rows, steps: torch.randn(steps, rows, 8),
    )
    found = fleet_of({"name": "mine", "task": task, "seq": 200, "batch": 16}, on=[T4, A100, "h100-80gb"])
    result = found.result(0)
    assert result.fits == (CARD_T4, CARD_A100, "h100-80gb")
    for name, column in zip(result.fits, range(3), strict=True):
        option = found.option(0, column)
        traced = oomguard.estimate(task, steps=200, microbatch=16, device=name, progress=False)
        assert option.peak_bytes == traced.total_bytes
        assert option.candidate.microbatch == 16


def test_a_large_task_runs_in_microbatches_on_a_small_card() -> None:
    import torch

    task = oomguard.Task(
        model=lambda: torch.nn.LSTM(8, 128),
        loss=lambda model, batch: model(batch)[0].square().mean(),
        batch=lambda rows, steps: torch.randn(steps, rows, 8),
    )
    found = fleet_of({"name": "mine", "task": task, "seq": 100, "batch": 90_000}, on=[T4, "b200-180gb"])
    small, large = found.option(0, 0).candidate, found.option(0, 1).candidate
    assert small.microbatch < large.microbatch == 90_000
    assert small.microbatch * small.accumulation >= 90_000
    assert found.option(0, 0).peak_bytes + found.option(0, 0).margin_bytes <= cards.card("t4").usable_bytes
