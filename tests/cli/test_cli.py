"""The command line: flags, exit codes, and one message for everything that is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from device.fake_nvml import answer, card

from oomguard._cli import parsing
from oomguard._cli.app import app, run
from oomguard._cli.flags import CANDIDATE, SPEC, flags_of, flowing, help_of
from oomguard._core.units import GIB
from oomguard._spec.candidate import Candidate
from oomguard._spec.read import PRESETS
from oomguard._spec.spec import Spec

Capture = pytest.CaptureFixture[str]
LSTM = "estimate --model lstm --seq 100"


def document(capsys: Capture, line: str) -> dict[str, Any]:
    """The JSON document that a command line prints."""
    assert run([*line.split(), "--json"]) in (0, 1)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def process(line: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "oomguard", *line.split()]
    usual: dict[str, Any] = {"capture_output": True, "check": False, "timeout": 100}
    return subprocess.run(command, **usual | settings)


def test_a_command_ends_without_collecting_the_objects_of_pytorch() -> None:
    code = "import gc, sys; from oomguard._cli.app import main\ntry: main()\nfinally: print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) > 1000


def test_what_fits_ends_with_0() -> None:
    assert run(f"{LSTM} --budget 900GiB".split()) == 0


def test_what_does_not_fit_ends_with_1() -> None:
    assert run(f"{LSTM} --budget 10MiB".split()) == 1


def test_the_json_says_fits_as_the_exit_code_does(capsys: Capture) -> None:
    assert document(capsys, f"{LSTM} --budget 10MiB")["fits"] is False


WRONG = [
    "estimate",
    "estimate --seq 100",
    "estimate --model lstm",
    "estimate --model ltsm --seq 100",
    "estimate --model my.models:make --seq 100",
    "estimate --model . --seq 100",
    "estimate --model /dev/null",
    "estimate --model nowhere.toml",
    "estimate --preset char",
    f"{LSTM} --hidden abc",
    f"{LSTM} --hidden 1e3",
    f"{LSTM} --hidden 999999999999999999999999",
    f"{LSTM} --hidden -5",
    f"{LSTM} --hidden",
    f"{LSTM} --hiden 5",
    f"{LSTM} --zzz",
    f"{LSTM} -z",
    f"{LSTM} --dropout nan",
    f"{LSTM} --dropout high",
    f"{LSTM} --bidirectional=yes",
    f"{LSTM} --bidirectional --no-bidirectional",
    f"{LSTM} surplus",
    f"{LSTM} --batch 32 --microbatch 64",
    f"{LSTM} --microbatch 0",
    f"{LSTM} --batch 32 --microbatch 8 --accumulation 3",
    f"{LSTM} --segments 101",
    f"{LSTM} --segments 2 --window 5",
    f"{LSTM} --engine cudnn",
    f"{LSTM} --precision fp8",
    f"{LSTM} --lengths 100",
    f"{LSTM} --lengths 100:x",
    f"{LSTM} --frozen layer9",
    f"{LSTM} --budget lots",
    f"{LSTM} --budget 0",
    f"{LSTM} --device rtx-9999",
    f"{LSTM} --device cuda:x",
    "estimat --model lstm",
    "plan",
    "plan --model lstm",
    "show",
    "show nowhere.json",
    "--model lstm",
    "devices surplus",
    "devices --jsn",
]


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_gives_one_message_in_three_beats(line: str, capsys: Capture) -> None:
    code = run(line.split())
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("oomguard: ")
    assert ", but " in err or re.match(r"oomguard: Unknown (option -|command '|field of a spec: ')", err)
    assert err.rstrip()[-1] in ".?"


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        (f"{LSTM} --modle lstm", "--model"),
        (f"{LSTM} --segment 2", "--segments"),
        ("estimat", "estimate"),
        ("device", "devices"),
        ("plann", "plan"),
        ("estimate --preset chr-lm", "char-lm"),
        (f"{LSTM} --optimizer adm", "adam"),
    ],
)
def test_a_mistyped_word_is_answered_by_the_nearest(line: str, nearest: str, capsys: Capture) -> None:
    run(line.split())
    assert re.search(rf"Did you mean '?{nearest}\b", capsys.readouterr().err)


@pytest.mark.parametrize("content", [b"", b"cell = \n", b'cell = "lstm"\nsequ = 5\n', b"\x00\xff\xfe", b"seq = 10\n"])
def test_a_bad_spec_file_gives_one_message(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(content)
    assert run(["estimate", "--model", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_flags_override_a_spec_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('cell = "gru"\nseq = 100\nhidden = 64\npacked = true\n')
    by_file = document(capsys, f"estimate --model {path} --hidden 32 --no-packed --budget 1GiB")
    assert by_file == document(capsys, "estimate --model gru --seq 100 --hidden 32 --budget 1GiB")


def test_flags_override_a_preset(capsys: Capture) -> None:
    changed = document(capsys, "estimate --preset char-lm --model gru --seq 50 --budget 1GiB")
    gru = "estimate --model gru --vocab 256 --embedding 128 --hidden 512 --batch 64 --seq 50 --budget 1GiB"
    assert changed == document(capsys, gru)


def test_features_replace_the_vocabulary_of_a_preset(capsys: Capture) -> None:
    changed = document(capsys, "estimate --preset char-lm --features 8 --budget 1GiB")
    plain = "estimate --model lstm --features 8 --hidden 512 --batch 64 --seq 2000 --budget 1GiB"
    assert changed == document(capsys, plain)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_estimated(name: str) -> None:
    assert run(["estimate", "--preset", name, "--budget", "900GiB"]) == 0


def test_microbatch_and_accumulation_alone_give_the_batch(capsys: Capture) -> None:
    made = document(capsys, f"{LSTM} --budget 8GiB --microbatch 24 --accumulation 3")
    assert made == document(capsys, f"{LSTM} --budget 8GiB --batch 72 --microbatch 24")


def test_a_microbatch_alone_is_the_batch(capsys: Capture) -> None:
    made = document(capsys, f"{LSTM} --budget 8GiB --microbatch 64")
    assert made == document(capsys, f"{LSTM} --budget 8GiB --batch 64 --microbatch 64")


def test_the_batch_of_a_preset_stands_beside_a_microbatch(capsys: Capture) -> None:
    made = document(capsys, "estimate --preset char-lm --budget 8GiB --microbatch 4")
    assert made["candidate"]["accumulation"] > 1


def test_every_field_of_a_spec_has_a_flag() -> None:
    names = {flag.name for flag in SPEC}
    assert names == {*Spec.__struct_fields__} - {"cell"} | {"model", "preset"}


def test_every_knob_has_a_flag(capsys: Capture) -> None:
    names = {flag.name for flag in CANDIDATE}
    assert names == {*document(capsys, LSTM)["candidate"]}


def test_every_flag_reaches_its_field(capsys: Capture) -> None:
    knobs = "--microbatch 4 --accumulation 8 --precision bf16 --segments 3 --engine native --threads 2"
    more = "--levels 2 --keep host --offload --update fused --state-8bit --allocator system --workers 3 --prefetch 5"
    result = document(capsys, f"{LSTM} {knobs} {more} --shards 6")["candidate"]
    wanted = {"microbatch": 4, "accumulation": 8, "precision": "bf16", "segments": 3, "recompute": True}
    wanted |= {"engine": "native", "threads": 2, "offload": True, "update": "fused", "state_8bit": True}
    assert result == wanted | {
        "allocator": "system",
        "workers": 3,
        "prefetch": 5,
        "window": None,
        "levels": 2,
        "keep": "host",
        "shards": 6,
    }


def test_an_old_name_of_an_allocator_is_taken_and_not_shown(capsys: Capture) -> None:
    assert document(capsys, f"{LSTM} --allocator steady")["candidate"]["allocator"] == "tight"
    assert "steady" not in help_of(next(flag for flag in CANDIDATE if flag.name == "allocator"))


def test_the_flag_that_turns_a_default_off_reaches_its_field(capsys: Capture) -> None:
    assert document(capsys, f"{LSTM} --segments 3 --no-recompute")["candidate"]["recompute"] is False


def test_a_number_may_have_underscores(capsys: Capture) -> None:
    asked = "estimate --model gru --budget 8GiB --seq"
    assert document(capsys, f"{asked} 10_000") == document(capsys, f"{asked} 10000")


def test_a_length_that_comes_twice_counts_twice(capsys: Capture) -> None:
    twice = document(capsys, "estimate --model gru --packed --lengths 9:1,90:1,9:1 --batch 3 --budget 1GiB")
    assert twice == document(capsys, "estimate --model gru --packed --lengths 9:2,90:1 --batch 3 --budget 1GiB")


def test_an_evaluation_needs_less(capsys: Capture) -> None:
    line = "estimate --model lstm --seq 5000"
    assert document(capsys, f"{line} --evaluate")["total_bytes"] < document(capsys, line)["total_bytes"]


def test_a_named_card_brings_its_budget(capsys: Capture) -> None:
    result = document(capsys, f"{LSTM} --device rtx-4090")
    assert result["device"] == "rtx-4090"
    assert 23 * GIB < result["budget_bytes"] < 24 * GIB


def test_a_card_that_is_here_is_estimated(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card(free=3 * GIB))
    assert document(capsys, f"{LSTM} --device cuda")["budget_bytes"] == 3 * GIB


def test_devices_list_the_cards_that_are_here(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card("GPU-aa11"), card("GPU-bb22"))
    assert [device["device"] for device in document(capsys, "devices")["devices"]] == ["cpu", "cuda:0", "cuda:1"]


def test_devices_show_the_cpu_even_if_the_cards_cannot_be_counted(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    answer(monkeypatch, card("GPU-aa11"), card("GPU-bb22", name="B"))
    assert run(["devices"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cpu")
    assert "by slot" in out


@pytest.mark.parametrize("more", ["", "--json"])
def test_the_known_cards_can_be_listed(more: str, capsys: Capture) -> None:
    assert run(f"devices --cards {more}".split()) == 0
    assert "a100-80gb" in capsys.readouterr().out


def test_the_help_lists_every_preset_with_its_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["estimate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: {preset['description']}" in out for name, preset in PRESETS.items())


@pytest.mark.parametrize("panel", ["Spec", "Candidate", "Where", "Output"])
def test_the_help_has_panels(panel: str, capsys: Capture) -> None:
    run(["estimate", "--help"])
    assert f" {panel} " in capsys.readouterr().out


@pytest.mark.parametrize("name", [command.name for command in app.registered_commands])
def test_every_flag_has_a_help_text_that_is_a_sentence(name: str) -> None:
    (command,) = [command for command in app.registered_commands if command.name == name]
    texts = {flag.word: help_of(flag) for flag in command.callback.flags}  # type: ignore[union-attr]
    assert [word for word, text in texts.items() if not text.endswith(".") or re.search("`|None|  ", text)] == []
    assert max(map(len, texts.values())) < 200


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hidden", "Hidden size of one direction of a layer (default: 256)."),
        ("seq", "Time steps of the longest sequence (default: the longest of --lengths)."),
        ("loss", "Loss (default: cross-entropy with --vocab, otherwise mse). One of cross-entropy, mse."),
        ("recompute", "Do not recompute segments in the backward pass."),
        ("workers", "Processes that load data (default: 0)."),
    ],
)
def test_a_help_text_is_made_of_the_docstring_the_choices_and_the_default(name: str, text: str) -> None:
    assert [help_of(flag) for flag in (*SPEC, *CANDIDATE) if flag.name == name] == [text]


def test_without_a_command_the_help_is_shown(capsys: Capture) -> None:
    assert run([]) == 0
    assert "estimate" in capsys.readouterr().out


def test_the_version_is_shown(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("oomguard 0.")


def test_an_interruption_ends_quietly_with_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(values: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parsing, "read", interrupt)
    assert run(LSTM.split()) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = process(f"{LSTM} --json", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_said_in_one_message() -> None:
    with open("/dev/full", "wb") as full:
        done = process(LSTM, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_a_terminal_without_unicode_is_served() -> None:
    done = process("estimate --preset char-lm", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode in (0, 1), done.stderr, done.stdout.isascii()) == (True, b"", True)


def test_bytes_that_are_no_text_give_one_message() -> None:
    command = [sys.executable.encode(), b"-m", b"oomguard", b"estimate", b"--model", b"\xff\xfe"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_the_shell_completes_values() -> None:
    words = {"COMP_WORDS": "oomguard estimate --precision b", "COMP_CWORD": "3", "_OOMGUARD_COMPLETE": "complete_bash"}
    assert process("", env=os.environ | words).stdout.split() == [b"bf16"]


def test_an_estimate_does_not_wait_for_what_it_does_not_use() -> None:
    code = f"import sys\nfrom oomguard._cli.app import run\nrun({LSTM.split()} + ['--json'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=100, text=True)
    assert not {"rich", "pydantic", "torch", "pandas"} & {*done.stdout.splitlines()[-1].split()}


TINY = "probe --model gru --seq 30 --features 4 --hidden 8 --batch 4 --threads 1"


def test_a_probe_prints_its_record_beside_its_estimate(capsys: Capture, tmp_path: Path) -> None:
    result = document(capsys, f"{TINY} --ledger {tmp_path / 'new' / 'ledger'}")
    assert {"fits", "total_bytes", "terms", "moment", "engine", "device", "candidate"} <= {*result}
    assert result["verdict"] == "FITS"
    assert result["peak_bytes"] == sum(result["measured_terms"].values())
    assert result["committed_bytes"] > 0
    assert result["tokens_per_second"] == pytest.approx(4 * 30 / result["seconds_per_step"])
    (line,) = (tmp_path / "new/ledger/records.jsonl").read_text().splitlines()
    assert json.loads(line)["peak_bytes"] == result["peak_bytes"]


def test_a_probe_shows_estimate_and_measurement_side_by_side(capsys: Capture) -> None:
    code = run(TINY.split())
    screen = capsys.readouterr().out
    assert code == 0
    assert re.search(r"total +[\d.]+ MiB +[\d.]+ MiB +[+-][\d.]+%", screen)
    assert "FITS" in screen
    assert " tokens/s (measured over " in screen.replace("\n", " ")


def test_a_probe_over_its_budget_is_an_answer_and_no_crash(capsys: Capture) -> None:
    code = run([*TINY.split(), "--budget", "100MiB"])
    assert code == 1
    assert "OVER: It grew to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device a100-80gb", "needs a device that is here"),
        ("--timeout never", "--timeout must be"),
        ("--timeout 0", "--timeout must be"),
        ("--ledger /proc/nowhere", "A ledger must be"),
        ("--evaluate", "Unknown option --evaluate"),
    ],
)
def test_a_probe_that_cannot_be_is_refused(capsys: Capture, words: str, message: str) -> None:
    assert run([*TINY.split(), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_help_text_has_its_paragraphs_in_one_line_and_its_lists_in_several() -> None:
    assert flowing("One\nsentence.\n\n- a\n- b") == "One sentence.\n\n- a\n- b"


def test_the_flags_of_a_struct_are_those_of_its_fields() -> None:
    words = [flag.word for flag in flags_of(Candidate)]
    assert words[:5] == ["--microbatch", "--accumulation", "--precision", "--segments", "--no-recompute"]
