"""Jobs and cards are read strictly: what is wrong is named with its file and its field."""

from pathlib import Path
from typing import Any

import pytest
from fleet.fleets import A100, CARDS, JOBS, SMALL, files

import oomguard
from oomguard._cli.app import run
from oomguard._fleet.read import MOST_JOBS, read_cards, read_jobs

JOB = '[[job]]\nname = "a"\ncell = "lstm"\nseq = 9\n'
CARD = '[[card]]\nname = "t4"\nprice = 1\n'


def test_lists_are_grids_and_their_values_are_in_the_names() -> None:
    jobs = read_jobs([{"name": "a", "cell": ["lstm", "gru"], "seq": [10, 20], "precision": "fp32"}])
    assert [job.name for job in jobs] == [
        "a-celllstm-seq10",
        "a-celllstm-seq20",
        "a-cellgru-seq10",
        "a-cellgru-seq20",
    ]
    assert jobs[2].request is not None
    assert jobs[2].request.spec == oomguard.Spec(cell="gru", seq=10)
    assert jobs[2].request.fixed == {"precision": "fp32"}


def test_fields_that_are_lists_stay_lists_unless_they_are_nested() -> None:
    one = {"name": "a", "cell": "lstm", "seq": 9, "allow": ["precision", "window"]}
    assert [job.allow for job in read_jobs([one])] == [("precision", "window")]
    assert [job.allow for job in read_jobs([one | {"allow": [["precision"], ["none"]]}])] == [("precision",), ()]


def test_a_job_can_start_from_a_preset_and_give_its_batch_by_knobs() -> None:
    (job,) = read_jobs([{"name": "a", "preset": "char-lm", "microbatch": 4, "hidden": 640}])
    assert job.request is not None
    assert (job.request.spec.hidden, job.request.fixed) == (640, {"microbatch": 4})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    jobs, _ = files(tmp_path, JOB + 'measured = "plan.json"\n')
    assert read_jobs(jobs)[0].measured == (str(tmp_path / "plan.json"),)


def test_cards_are_read_from_a_file_and_from_names(tmp_path: Path) -> None:
    _, cards = files(tmp_path)
    assert [(card.name, card.count, card.price, card.label) for card in read_cards(cards)] == [
        ("t4-16gb", 4, 0.35, "Tesla-T4"),
        ("a100-80gb", 1, 1.8, None),
    ]
    assert [card.price for card in read_cards(["t4", A100])] == [0.0, 1.8]


WRONG_JOBS = {
    "": "needs at least one [[job]]",
    "cell = 1": "[[job]]",
    "job = 3": "[[job]]",
    '[job]\nname = "a"': "[[job]]",
    "[[job": "must be a TOML file",
    '[[job]]\ncell = "lstm"\nseq = 9': "name",
    JOB + "hiden = 3": "hiden",
    JOB + "hidden = 0": "hidden",
    JOB + "hidden = [64, 0]": "hidden",
    JOB + "hidden = []": "hidden is an empty list",
    JOB + "price = 3": "price",
    JOB + JOB: "'a' occurs twice",
    JOB + 'allow = ["everything"]': "everything",
    JOB + "epochs = -1": "epochs",
    JOB + 'time = "soon"': "time",
    JOB + "time = true": "time",
    JOB + "data = 3": "data",
    JOB + 'data = "a\\nb"': "data",
    JOB + 'measured = "nowhere.json"': "nowhere.json",
    JOB + 'task = "module:task"': "cell",
    JOB + "window = 3": "allow",
    '[[job]]\nname = "a\\u001b[2J"\ncell = "lstm"\nseq = 9': "name",
    '[[job]]\nname = "a"\ntask = "import os"': "task",
    '[[job]]\nname = "a"\ntask = "package.nowhere:task"': "package",
    '[[job]]\nname = "a"\ncell = "lstm"\nseq = 1000000\nbatch = 1000000\nhidden = 60000': "widest tensor",
}


@pytest.mark.parametrize(("text", "said"), WRONG_JOBS.items())
def test_a_wrong_job_is_named(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, cards = files(tmp_path, text)
    assert run(["fleet", jobs, "--cards", cards]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oomguard: ")
    assert said in err
    assert "\x1b" not in err


WRONG_CARDS = {
    "": "needs at least one [[card]]",
    '[[card]]\nname = "t4"': "price",
    '[[card]]\nname = "t5"\nprice = 1': "name must be a card",
    CARD + "count = 0": "count",
    CARD + 'count = "4"': "count",
    CARD + CARD: "occurs twice",
    CARD.replace("1", "-1"): "price",
    CARD.replace("1", "nan"): "price",
    CARD.replace("1", "true"): "price",
    CARD + 'label = "a b"': "label",
    CARD + "speed = 2": "speed",
}


@pytest.mark.parametrize(("text", "said"), WRONG_CARDS.items())
def test_a_wrong_card_is_named(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, cards = files(tmp_path, JOBS, text)
    assert run(["fleet", jobs, "--cards", cards]) == 2
    assert said in capsys.readouterr().err


def test_a_message_names_the_file_and_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, cards = files(tmp_path, JOB + JOB.replace("9", "0"))
    assert run(["fleet", jobs, "--cards", cards]) == 2
    assert f"{jobs} [[job]] 2: --seq must be" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--emit", "slurm"], ["--output", "a"], ["--emit", "pbs", "--output", "a"]])
def test_misuse_of_the_flags_ends_with_2(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, cards = files(tmp_path)
    assert run(["fleet", jobs, *(["--cards", cards] if words else []), *words]) == 2
    assert capsys.readouterr().err.startswith("oomguard: ")


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_not_there_is_named(which: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [*files(tmp_path)]
    paths[which] = "nowhere.toml"
    assert run(["fleet", paths[0], "--cards", paths[1]]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_a_grid_that_is_too_large_is_refused_before_it_is_written_out() -> None:
    numbers: dict[str, Any] = {name: [*range(1, 2001)] for name in ("seq", "batch", "hidden", "features")}
    with pytest.raises(oomguard.MisuseError, match=f"{MOST_JOBS:,} jobs at most"):
        read_jobs([{"name": "a", "cell": "lstm", **numbers}])


def test_an_existing_file_is_kept_unless_it_may_be_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, cards = files(tmp_path)
    assert run(["fleet", jobs, "--cards", cards, "--csv", cards]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "cards.toml").read_text() == CARDS


def test_in_python_wrong_values_raise() -> None:
    with pytest.raises(oomguard.MisuseError, match="table of fields"):
        oomguard.fleet([3], ["t4"])  # type: ignore[list-item]
    with pytest.raises(oomguard.MisuseError, match="at least one job"):
        oomguard.fleet([], ["t4"])
    with pytest.raises(oomguard.MisuseError, match="name must be a card"):
        oomguard.fleet([SMALL], ["nothing"])
