"""`oomguard tradeoffs`: what it prints, what it writes, what it refuses."""

import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from report.subjects import plan, segments

import oomguard
from oomguard._cli.app import run
from oomguard._core.units import format_bytes
from oomguard._probe.record import RECORDS, Ledger
from oomguard._report import page
from oomguard._report.curve import Curve
from oomguard._report.curves import MAKERS
from oomguard._report.draw import to_png

MODEL = "tradeoffs --model lstm --seq 10000 --device a100-80gb"


def output(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """What a command that succeeds prints."""
    assert run([*command.split(), *words]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """What a command that is refused says."""
    assert run([*command.split(), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_the_screen_has_the_front_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, MODEL, "--over", "microbatch=1..64", "--over", "segments=1,4,16,64")
    assert "256 candidates, 256 fit." in text
    assert "Speeds are guesses" in text
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"\s+\d+ ", line)]
    figures = [row[-1].split() for row in rows]  # such as 1 min 2 s
    units = {"ms": 0.001, "s": 1, "min": 60}
    seconds = [sum(float(a) * units[b] for a, b in zip(each[::2], each[1::2], strict=True)) for each in figures]
    assert seconds == sorted(seconds)
    assert rows[0][:2] == ["64 × 1", "1"]
    assert len(rows) <= 14


@pytest.mark.parametrize("over", ["microbatch=1,32", "seq=1000,2000"])
def test_a_table_fits_60_columns_and_keeps_every_head_whole(
    over: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    varied = ("--over", over, "--over", "segments=1,100", "--over", "precision=fp32,bf16")
    lines = output(capsys, MODEL, *varied).splitlines()
    assert max(map(len, lines)) <= 60
    heads = "microbatch segments precision" if "micro" in over else "seq segments precision"
    assert any(heads in " ".join(line.split()) for line in lines)


def test_steps_of_unequal_size_are_compared_by_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, MODEL, "--over", "seq=1000,2000")
    assert "tokens/s" in text
    assert "step time" not in text


def test_the_json_is_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output(capsys, MODEL, "--over", "microbatch=1..8", "--json"))
    table = oomguard.tradeoffs(cell="lstm", seq=10_000, device="a100-80gb", over={"microbatch": range(1, 9)})
    assert document["over"] == {"microbatch": [*range(1, 9)]}
    assert [row["total_bytes"] for row in document["rows"]] == table["total_bytes"].tolist()
    assert document["rows"][0]["window"] is None
    assert document["spec"]["cell"] == "lstm"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_can_be_read_back(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"new folder/table{suffix}"
    text = output(capsys, MODEL, "--over", "microbatch=1..8", "--over", "window=none,500", "--output", str(path))
    assert f"Written to {path}." in text.replace("\n", " ")
    stored = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    over = {"microbatch": range(1, 9), "window": [None, 500]}
    table = oomguard.tradeoffs(cell="lstm", seq=10_000, device="a100-80gb", over=over)
    assert [*stored.columns] == [*table.columns]
    assert stored["total_bytes"].tolist() == table["total_bytes"].tolist()
    assert stored["window"].isna().tolist() == table["window"].isna().tolist()
    assert stored["precision"].tolist() == table["precision"].tolist()


@pytest.mark.parametrize(
    ("words", "title"),
    [(["--over", "segments=1,4,16"], "segments"), (["--curve", "terms"], "terms"), ([], "front")],
)
def test_a_picture_is_of_the_curve_that_tells_most_or_is_named(
    words: list[str], title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def noted(curve: Curve) -> bytes:
        drawn.append(curve.name)
        return to_png(curve)

    monkeypatch.setattr(page, "to_png", noted)
    path = tmp_path / "curve.PNG"
    output(capsys, MODEL, *words, "--output", str(path))
    assert drawn == [title]
    assert Image.open(io.BytesIO(path.read_bytes())).format == "PNG"


def test_a_page_has_all_curves_and_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    output(capsys, "tradeoffs --model gru --seq 200 --device t4 --output", str(path))
    text = path.read_text()
    assert all(f'data-curve="{name}"' in text for name in MAKERS)
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)", text)
    assert "http:" not in text
    assert "https:" not in text


def test_a_plan_gives_model_device_budget_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(oomguard.save_plan(plan(), tmp_path / "plan.json"))
    text = output(capsys, "tradeoffs", "--plan", path)
    assert f"T = 4,000, batch 32 on cpu, budget 600.00 MiB, {len(plan().records)} records." in text
    assert len([line for line in text.splitlines() if line.endswith(format_bytes(plan().peak_bytes))]) == 1
    assert "guess" not in text
    ledger = Ledger(tmp_path / RECORDS)
    for record in plan().records:
        ledger.append(record)
    words = f"tradeoffs --model lstm --seq 4000 --budget 600MiB --over segments=1,{segments()} --json --ledger"
    (_, row) = json.loads(output(capsys, words, str(tmp_path)))["rows"]
    assert (row["verdict"], row["measured_peak_bytes"]) == ("FITS", plan().peak_bytes)


def test_what_was_measured_is_on_the_screen_even_among_many_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(oomguard.save_plan(plan(), tmp_path / "plan.json"))
    text = output(capsys, "tradeoffs --over segments=1..64 --over microbatch=1..32 --budget 20GiB --plan", path)
    (line,) = [line for line in text.splitlines() if line.endswith(format_bytes(plan().peak_bytes))]
    assert line.split()[:4] == [str(segments()), "32", "×", "1"]
    assert "with all measured rows" in text.replace("\n", " ")


def test_nothing_that_fits_is_exit_code_1_and_says_what_is_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*MODEL.split(), "--budget", "500MiB"]) == 1
    text = capsys.readouterr().out
    assert "Nothing fits" in text
    assert "The smallest of them needs" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "x.txt"], "--output must end in one of .csv, .parquet, .png, .html"),
        (["--output", "x"], "--output must end in one of .csv, .parquet, .png, .html"),
        (["--output", "nowhere.png", "--curve", "fronts"], "Did you mean front"),
        (["--curve", "front"], "--curve chooses what a .png shows"),
        (["--curve", "front", "--output", "x.html"], "--curve chooses what a .png shows"),
        (["--over", "microbatch"], "--over microbatch=1..64"),
        (["--over", "micro=1"], "Did you mean microbatch"),
        (["--over", "microbatch=1", "--over", "microbatch=2"], "each name once"),
        (["--over", "microbatch=1..64", "--batch", "32"], "got 33 of 32"),
        (["--over", "segments=1,4", "--segments", "4"], "either fixed or varied"),
        (["--over", "seq=1..100000"], "got 100,000"),
        (["--plan", "a.json", "--ledger", "b"], "come from a plan or from a ledger"),
        (["--ledger", "nowhere"], "there is no nowhere"),
        (["--budget", "much"], "--budget"),
        (["--device", "a1000-gpu"], "--device"),
    ],
)
def test_a_wrong_question_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, MODEL, *words)


@pytest.mark.parametrize("suffix", [".png", ".html"])
@pytest.mark.parametrize("name", ["hidden", "batch", "model", "threads"])
def test_curves_of_several_models_are_refused(
    name: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"model": "lstm,gru"}.get(name, "8,16")
    words = f"tradeoffs --model lstm --seq 50 --over {name}={values} --over microbatch=1,2 --budget 1GiB --output"
    message = refusal(capsys, words, str(tmp_path / f"h{suffix}"))
    assert "Charts show one model" in message
    assert f"but got --over {name}. Write .csv, or give one --{name}." in message
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("hidden=512,1024", "Trade-offs of lstm, hidden 512 to 1,024"),
        ("hidden=512", "Trade-offs of lstm, hidden 512"),
        ("model=lstm,gru", "Trade-offs of lstm or gru"),
        ("layer-norm=true,false", "Trade-offs of lstm 64 → 256 × 2 layers, layer norm True or False"),
        ("seq=100,1000,200", "T = 100 to 1,000, batch 1 on t4-16gb"),
        ("batch=1..8*2", "T = 500, batch 1 to 8 on t4-16gb"),
    ],
)
def test_the_heading_names_no_single_value_of_what_varies(
    over: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(capsys, "tradeoffs --model lstm --seq 500 --device t4 --microbatch 1 --over", over).splitlines()
    assert any(line == message or line.startswith(f"{message}, budget") for line in lines[:2])


def test_a_page_over_lengths_says_so_and_is_of_the_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    words = "tradeoffs --model gru --seq 50 --device t4 --over seq=100..400*2 --output"
    output(capsys, words, str(path))
    text = path.read_text()
    assert "T = 100 to 400, batch 32" in text
    assert "At 400 steps" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--hidden 512", "got --hidden. Leave it out, or leave --plan out and give --model."),
        ("--model gru", "got --model. Leave it out, or leave --plan out."),
        ("--seq 10 --no-bidirectional", "got --seq and --no-bidirectional. Leave them out, or leave --plan out and"),
        ("--preset char-lm", "got --preset."),
    ],
)
def test_a_plan_takes_no_other_spec(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(oomguard.save_plan(plan(), tmp_path / "plan.json"))
    assert f"A plan has its own spec, but {message}" in refusal(capsys, f"tradeoffs {given} --plan", path)


def test_a_model_must_be_named_unless_there_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" in refusal(capsys, "tradeoffs")


def test_a_batch_of_a_preset_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "tradeoffs --preset char-lm --device t4 --over microbatch=4096"
    assert "--microbatch must not be larger than --batch" in refusal(capsys, words)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(capsys, MODEL, "--output", str(tmp_path / "file" / "x.csv"))
    assert "--output must be a file that can be written" in message
    assert "such as tradeoffs.csv." in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
