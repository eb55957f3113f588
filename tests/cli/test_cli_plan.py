"""`oomguard plan` and `oomguard show` on the command line: files, exit codes, screens, the live line and Ctrl-C."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plan.making import EVERY, measured, reckoned, shorter
from rich.console import Console

import oomguard
from oomguard._api import plan as api
from oomguard._cli import parsing
from oomguard._cli.app import run
from oomguard._cli.flags import FIXED, SEARCH
from oomguard._core.units import GIB, MIB
from oomguard._plan.find import AIMS
from oomguard._plan.store import decode_plan, load_spec_plan
from oomguard._plan.value import Plan
from oomguard._report.plan import explain
from oomguard._report.progress import search_status
from oomguard._report.screens import Moment, Terminal
from oomguard._report.tables import Section, Table, printer, show_sections, show_table
from oomguard._search.propose import Probe
from oomguard._search.run import MAX_PROBES, TIMEOUT_SECONDS, Progress
from oomguard._search.space import STEP_SECONDS
from oomguard._spec.candidate import ALLOWED, Candidate
from oomguard._spec.read import make_spec, preset_fields
from oomguard._spec.spec import Spec

Capture = pytest.CaptureFixture[str]
TINY = "plan --model gru --seq 30 --features 4 --hidden 8 --batch 4 --threads 1 --max-probes 2 --allow none"
CARD = "plan --model lstm --seq 10000 --device a100-80gb --allow none"
HOPELESS = "plan --model lstm --seq 100000 --hidden 2048 --device t4 --budget 700MiB"


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_CACHE", "")


@pytest.fixture(scope="module", name="searched")
def _searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """A real search with --json in a pipe, and its file."""
    path = tmp_path_factory.mktemp("made") / "new" / "plan.json"
    command = [sys.executable, "-m", "oomguard", *TINY.split(), "--json", "--output", str(path)]
    environment = os.environ | {"OOMGUARD_CACHE": ""}
    return path, subprocess.run(command, capture_output=True, check=False, timeout=100, env=environment)


def test_a_search_ends_with_0_and_prints_what_it_wrote(searched: Any) -> None:
    path, done = searched
    assert done.returncode == 0
    assert done.stdout == path.read_bytes()
    assert load_spec_plan(path).confirmed


def test_a_search_that_is_piped_writes_nothing_but_its_progress_to_stderr(searched: Any) -> None:
    lines = searched[1].stderr.decode().splitlines()  # none if it took no longer than a moment
    assert not [line for line in lines if not line.startswith(("Searching: ", "Starting", "Estimating"))]


def test_a_plan_that_was_searched_is_shown_with_its_evidence(searched: Any, capsys: Capture) -> None:
    path, _ = searched
    assert run(["show", str(path)]) == 0
    screen = capsys.readouterr().out
    assert "(measured, " in screen
    assert "FITS *" in screen


def test_showing_as_json_gives_the_file(searched: Any, capsys: Capture) -> None:
    path, _ = searched
    assert run(["show", str(path), "--json"]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_a_plan_for_a_card_is_made_by_arithmetic(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(CARD.split()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Plan for lstm 64 → 256 × 2 layers, T = 10,000, batch 32 on a100-80gb\n")
    assert "(by arithmetic alone)" in out
    assert out.endswith("Written to plan.json. Everything about it: oomguard show plan.json\n")
    assert "oomguard:" not in err  # progress alone
    assert load_spec_plan("plan.json") == reckoned()


def test_a_knob_that_is_given_is_fixed(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    knobs = "--microbatch 4 --segments 50 --recompute --no-offload --update fused --allow window,precision"
    assert run([*CARD.split(), *knobs.split(), "--output", str(path)]) == 0
    candidate = load_spec_plan(path).candidate
    assert (candidate.microbatch, candidate.segments, candidate.recompute, candidate.update) == (4, 50, True, "fused")


def test_every_knob_but_accumulation_can_be_fixed() -> None:
    names = {flag.name for flag in FIXED}
    assert names == {*Candidate.__struct_fields__} - {"accumulation", "workers", "prefetch"}


def test_what_the_flags_of_a_search_say_is_what_it_does() -> None:
    flags = {flag.name: flag for flag in SEARCH}
    assert {*flags["maximize"].choices} == {*AIMS, "batch"}
    assert flags["allow"].choices == (*ALLOWED, "none")
    assert f"(default: {MAX_PROBES})" in flags["max_probes"].text
    assert f"(default: {TIMEOUT_SECONDS:.0f}s)" in flags["timeout"].text
    assert f"(default: {STEP_SECONDS / 60:.0f}min)" in flags["step_time"].text


def test_every_flag_of_a_search_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def find(**words: Any) -> Any:
        asked.update(words)
        return reckoned()

    monkeypatch.setattr(api, "find_feasible_config", find)
    words = "--maximize seq,throughput --allow none --max-probes 7 --timeout 2m --ledger L --storage S --budget 1GiB"
    words += " --step-time 30s"
    assert run(f"plan --model gru --seq 9 --device cuda:0,cuda:1 {words} --output {tmp_path / 'p'}".split()) == 0
    spec = {name: asked.pop(name) for name in Spec.__struct_fields__ if name in asked}
    fields = msgspec.structs.asdict(Spec(cell="gru", seq=9))
    assert spec == {name: value for name, value in fields.items() if name != "batch"}
    assert asked == {
        "maximize": "seq,throughput",
        "allow": "none",
        "max_probes": 7,
        "timeout": "2m",
        "step_time": "30s",
        "ledger": "L",
        "storage": "S",
        "budget": "1GiB",
        "device": "cuda:0,cuda:1",
    }


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("--model gru --seq 9", None),
        ("--model gru --seq 9 --batch 7", 7),
        ("--model gru --seq 9 --microbatch 5", 5),
        ("--preset char-lm", make_spec(preset_fields("char-lm")).batch),
    ],
)
def test_the_batch_is_open_unless_something_says_what_it_is(
    words: str, batch: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(api, "find_feasible_config", lambda **words: asked.update(words) or reckoned())
    assert run(f"plan {words} --maximize batch --output {tmp_path / 'p'}".split()) == 0
    assert asked.get("batch") == batch


def test_a_plan_that_must_be_measured_and_is_not_ends_in_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    assert run([*CARD.split(), "--require-measured", "--output", str(path)]) == 1
    assert "--require-measured is not met. Nothing was run: the device is not here." in capsys.readouterr().err
    assert load_spec_plan(path).record is None  # it is written all the same


@pytest.mark.parametrize(("made", "code"), [(measured, 0), (shorter, 1)], ids=["measured", "shorter"])
def test_a_plan_must_have_run_at_full_length_to_be_measured(
    made: Callable[[], Plan], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "find_feasible_config", lambda **_: made())
    assert run(["plan", "--model", "gru", "--seq", "9", "--require-measured", "--output", str(tmp_path / "p")]) == code


@pytest.mark.parametrize("name", ["lengths.txt", "lengths.csv"])
def test_lengths_are_read_from_a_file(name: str, tmp_path: Path) -> None:
    source, path = tmp_path / name, tmp_path / "p.json"
    source.write_text("100:5000\n2000:40\n")
    assert run(f"plan --model gru --lengths {source} --device t4 --output {path}".split()) == 0
    assert load_spec_plan(path).spec.lengths == {100: 5000, 2000: 40}


SALES = "shop,price,open,sold\n" + "a,1,1,5\n" * 3 + "b,2,0,4\n" * 7 + "c,2,1,4\n" * 3
"""Three series, two of 3 steps and one of 7."""
OF_SALES = "--model gru --features 2 --id shop --target sold"


def test_lengths_are_those_of_the_data_as_train_would_cut_it(tmp_path: Path) -> None:
    source, path = tmp_path / "sales.csv", tmp_path / "p.json"
    source.write_text(SALES)
    assert run(f"plan {OF_SALES} --data {source} --device t4 --output {path}".split()) == 0
    spec = load_spec_plan(path).spec
    assert (spec.steps, spec.lengths) == (7, {3: 2, 7: 1})
    plan = oomguard.find_feasible_config(
        cell="gru", features=2, data=str(source), id="shop", target=("sold",), device="t4"
    )
    assert plan.spec == spec


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (f"{OF_SALES} --seq 20", {3: 2, 7: 1}),
        (f"{OF_SALES} --seq 5 --truncate", {3: 2, 5: 1}),
        (f"{OF_SALES} --seq 4 --stride 4", {3: 3, 4: 1}),
        ("--model gru --features 2 --columns price,open --target sold --seq 5", {3: 1, 5: 2}),
    ],
)
def test_a_length_that_is_given_cuts_the_data(words: str, lengths: dict[int, int], tmp_path: Path) -> None:
    source, path = tmp_path / "sales.csv", tmp_path / "p.json"
    source.write_text(SALES)
    assert run(f"plan {words} --data {source} --device t4 --output {path}".split()) == 0
    assert load_spec_plan(path).spec.lengths == lengths


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{OF_SALES} --data sales.csv --seq 5", "must not be longer than the spec says (5 steps)"),
        (f"{OF_SALES} --data sales.csv --lengths 5:1", "Leave --lengths or --data out."),
        ("--model gru --features 2 --columns price,open --target sold --data sales.csv", "windows of --seq steps"),
        (f"{OF_SALES} --data nowhere.csv", "nowhere.csv"),
        (f"{OF_SALES} --seq 9", "Add --data"),
        ("--model gru --lengths sales.csv", "give the data itself as --data"),
    ],
)
def test_data_that_gives_no_lengths_is_told(
    words: str, message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sales.csv").write_text(SALES)
    assert run(f"plan {words} --device t4".split()) == 2
    assert message in capsys.readouterr().err


def test_an_array_of_lengths_is_read_from_a_file(tmp_path: Path, capsys: Capture) -> None:
    import numpy as np

    np.save(tmp_path / "l.npy", np.array([5, 9, 9]))
    assert run(f"estimate --model gru --lengths {tmp_path / 'l.npy'} --packed --budget 1GiB --json".split()) == 0
    by_file = capsys.readouterr().out
    assert run(["estimate", "--model", "gru", "--lengths", "5:1,9:2", "--packed", "--budget", "1GiB", "--json"]) == 0
    assert capsys.readouterr().out == by_file


def test_nothing_that_fits_ends_with_1_and_leaves_an_old_plan_alone(tmp_path: Path, capsys: Capture) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    assert run([*HOPELESS.split(), "--output", str(old), "--force"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("NOTHING FITS: lstm 64 → 2048 × 2 layers, T = 100,000, batch 32 on t4\n")
    assert "The largest obstacle is the term " in out
    assert "What would help" in out
    assert "oomguard:" not in err  # progress alone
    assert (old.read_text(), [*tmp_path.iterdir()]) == ("old", [old])


def test_nothing_that_fits_is_one_json_document(tmp_path: Path, capsys: Capture) -> None:
    assert run([*HOPELESS.split(), "--json", "--output", str(tmp_path / "p.json")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["needed_bytes"] > document["budget_bytes"] == 700 * MIB
    assert document["term"] in document["terms"]
    assert {*document} >= {"message", "candidate", "ways", "records"}
    assert not [*tmp_path.iterdir()]


WRONG = [
    ("--maximize throughputt", "Did you mean throughput?"),
    ("--maximize bach", "Did you mean batch or microbatch?"),
    ("--maximize seq,seq", "several different ones"),
    ("--allow precison", "Did you mean precision?"),
    ("--max-probes 0", "--max-probes must be a whole number from 1 to 100,000"),
    ("--max-probes 100001", "--max-probes must be a whole number from 1 to 100,000"),
    ("--max-probes many", "--max-probes must be"),
    ("--timeout never", "--timeout must be"),
    ("--budget lots", "--budget must be"),
    ("--window 20 --allow none", "only if it is allowed"),
    ("--batch 32 --microbatch 99", "--microbatch must not be larger"),
    ("--segments 0", "--segments must be"),
    ("--accumulation 2", "Unknown option --accumulation"),
    ("--device nowhere", "--device must be"),
    ("--lengths nowhere.csv", "nowhere.csv is not"),
    ("--lengths 5", "--lengths"),
    ("--output /proc/nowhere/plan.json", "--output must be"),
    ("--output .", "(Is a directory)"),
    ("surplus", "takes options only"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_question_ends_with_2_and_one_message(words: str, message: str, capsys: Capture) -> None:
    code = run(f"plan --model lstm --seq 100 --device t4 {words}".split())
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert ", but " in err or "Unknown option" in err


def test_a_disk_that_fails_after_the_search_does_not_lose_the_plan(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "check_output", lambda *_: (tmp_path / "p").mkdir())
    assert run([*CARD.split(), "--output", str(tmp_path / "p"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert decode_plan(out.encode()) == reckoned()
    assert "cannot be written" in err


def on_terminal(line: str, until: str | None = None) -> tuple[int, str, str]:
    """Run a command line with its stderr on a terminal, send Ctrl-C once that is seen; exit code, stdout, stderr."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {"OOMGUARD_CACHE": "", "TERM": "xterm"}
    command = [sys.executable, "-m", "oomguard", *line.split()]
    with subprocess.Popen(
        command, stderr=theirs, stdout=subprocess.PIPE, start_new_session=True, env=environment
    ) as process:
        os.close(theirs)
        seen, ends = b"", time.monotonic() + 90
        while time.monotonic() < ends and (process.poll() is None or select.select([ours], [], [], 0)[0]):
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 1 << 16)
                except OSError:  # the other side is closed
                    break
            if until is not None and until.encode() in seen:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the children too
                until = None
        out = process.communicate(timeout=30)[0]
    os.close(ours)
    return process.returncode, out.decode(), seen.decode()


def test_on_a_terminal_a_live_line_follows_the_search(tmp_path: Path) -> None:
    code, out, err = on_terminal(f"{TINY} --output {tmp_path / 'p.json'}")
    assert code == 0
    shown = " ".join(err.split())
    assert re.search(r"0 probes done, at most \d+\.\d s left", shown)
    assert re.search(r"microbatch \d.*, 30 time steps: about [\d.]+ MiB of [\d.]+ [GM]iB", shown)
    assert re.search(r"1 probe done, fastest so far [\d,]+ tokens/s", shown)
    assert out.startswith("Plan for gru")


def test_ctrl_c_ends_the_search_with_the_best_plan_known(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    line = f"{TINY} --seq 200000 --batch 64 --max-probes 24 --output {path}"
    code, out, _ = on_terminal(line, until="time steps")
    assert code == 0
    assert "search was interrupted, and this is the best plan known" in " ".join(out.split())
    assert load_spec_plan(path).ended == "interrupted"


def screen(plan: oomguard.Plan, width: int = 80, encoding: str = "utf-8") -> str:
    """What is shown of a plan on a terminal of that width and encoding."""
    written = io.BytesIO()
    buffer = io.TextIOWrapper(written, encoding=encoding)
    show_sections(explain(plan), Console(file=buffer, width=width, highlight=False, markup=False))
    buffer.flush()
    return written.getvalue().decode(encoding)


@pytest.mark.parametrize("kind", EVERY)
def test_every_kind_of_plan_fits_80_columns(kind: str) -> None:
    lines = screen(EVERY[kind]()).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
def test_a_terminal_without_unicode_gets_letters_that_it_has(kind: str, encoding: str) -> None:
    assert screen(EVERY[kind](), 100, encoding).isascii()


@pytest.mark.parametrize("kind", EVERY)
def test_the_screen_has_every_word(kind: str) -> None:
    plan = EVERY[kind]()
    shown = screen(plan, 300)
    assert [
        line for part in explain(plan) for line in (part.title, *part.sentences, *part.lines) if line not in shown
    ] == []


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    buffer = io.StringIO()
    show_sections([Section(title="[bold]x[/bold]", lines=("[red]",))], Console(file=buffer))
    assert buffer.getvalue() == "[bold]x[/bold]\n[red]\n"


def test_words_that_are_too_long_go_on_in_their_column() -> None:
    table = Table(header=("words", "figure"), rows=(("one two three four five six", "1"),), align="lr")
    assert shown(table, 24) == ["words             figure", "one two three          1", "four five six"]


def test_a_terminal_that_is_too_narrow_for_figures_breaks_them_at_their_unit() -> None:
    table = Table(header=("peak", "margin"), rows=(("12.34 MiB", "1,000.00 GiB"),), align="rr")
    assert shown(table, 15) == [" peak    margin", "12.34  1,000.00", "  MiB       GiB"]


def shown(table: Table, width: int) -> list[str]:
    """The lines of a table on a terminal of that width."""
    console = Console(file=io.StringIO(), width=width, record=True)
    show_table(table, console)
    return console.export_text().splitlines()


def test_what_a_plan_says_does_not_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    plan = reckoned()
    named = msgspec.structs.replace(plan.environment, title="T4\x1b]0;owned\x07\x9b2J")
    path = oomguard.save_plan(msgspec.structs.replace(plan, environment=named), tmp_path / "p.json")
    assert run(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "T4\\x1b]0;owned\\x07\\x9b2J" in "".join(out.split())
    assert {each for each in out if not each.isprintable()} == {"\n"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is not one"),
        (lambda text: text[:500], "is not one"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2"),
        (lambda text: text.replace('"budget_bytes"', '"budget"', 1), "does not have the right form"),
        (lambda text: text.replace('"total_bytes": ', '"total_bytes": 1', 1), "estimate is not what the knobs give"),
    ],
    ids=["empty", "cut", "version", "field", "figure"],
)
def test_a_file_that_is_no_plan_is_refused(change: Any, message: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.json"
    oomguard.save_plan(reckoned(), path)
    path.write_text(change(path.read_text()))
    assert run(["show", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needs a plan file, but got none"),
        ("gone.json", "cannot be read"),
        ("a.json b.json", "takes one PLAN and options, but got 'b.json'"),
        ("a.json --sequences 0", "--sequences must be"),
        ("a.json --jsn", "Did you mean --json"),
    ],
)
def test_a_wrong_way_to_show_is_refused(words: str, message: str, capsys: Capture) -> None:
    assert run(["show", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_an_epoch_of_so_many_sequences_is_shown(tmp_path: Path, capsys: Capture) -> None:
    path = oomguard.save_plan(measured(), tmp_path / "p.json")
    assert run(["show", str(path), "--sequences", "64_000"]) == 0
    assert "An epoch of 64,000 sequences (2,000 steps)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "show"])
def test_the_help_has_three_examples_or_four(command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    assert len(re.findall(rf"- oomguard {command} ", capsys.readouterr().out)) in (3, 4)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("plan --maximize s", ["seq"]), ("plan --allow window,p", ["window,precision"]), ("pl", ["plan"])],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = f"oomguard {typed}"
    settings = {"COMP_WORDS": words, "COMP_CWORD": f"{len(words.split()) - 1}", "_OOMGUARD_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "oomguard"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == offered


def test_several_running_probes_have_a_line_each() -> None:
    spec = oomguard.Spec(cell="lstm", seq=10_000)
    probes = [
        Probe(
            spec=spec,
            candidate=Candidate(microbatch=each),
            role="explore",
            passes=1,
            peak_bytes=GIB,
            seconds_per_pass=1,
        )
        for each in (8, 16)
    ]
    progress = Progress(probes=3, running=tuple(probes), best=None, seconds_left=61, budget_bytes=2 * GIB)
    status = search_status(progress)
    assert Moment(status, 0.0).text == "Searching: 3 probes done, at most 1 min 1 s left"
    assert Moment(status, 58.0).text == "Searching: 3 probes done, at most 3.0 s left"
    assert status.lines == (
        "trying microbatch 8, 10,000 time steps: about 1.00 GiB of 2.00 GiB",
        "trying microbatch 16, 10,000 time steps: about 1.00 GiB of 2.00 GiB",
    )


def test_a_narrow_terminal_shows_all_of_a_probe() -> None:
    candidate = Candidate(microbatch=1024, segments=16_384, levels=3)
    spec = oomguard.Spec(cell="lstm", seq=10_000_000, batch=1024)
    probe = Probe(spec=spec, candidate=candidate, role="confirm", passes=1, peak_bytes=1000 * GIB, seconds_per_pass=1)
    progress = Progress(probes=3, running=(probe,), best=None, seconds_left=61, budget_bytes=2000 * GIB)
    buffer = io.StringIO()
    terminal = Terminal(Console(width=60, file=buffer))
    terminal.console.print(terminal.render(Moment(search_status(progress), 0.0)))
    shown = " ".join(buffer.getvalue().split())
    assert "microbatch 1,024 with 16,384 segments, 10,000,000 time steps: about 1,000.00 GiB of 1.95 TiB" in shown
    assert max(map(len, buffer.getvalue().splitlines())) <= 60


def test_a_path_that_is_wider_than_the_terminal_stays_whole() -> None:
    path = "/" + "long-" * 30 + "folder/plan.json"
    buffer = io.StringIO()
    printer(Console(file=buffer, width=40))(f"Written to {path}.")
    assert f"{path}." in buffer.getvalue().splitlines()


def test_a_plan_and_a_report_replace_a_file_only_by_force(tmp_path: Path, capsys: Capture) -> None:
    words = ["plan", "--model", "gru", "--seq", "50", "--device", "t4", "--output", str(tmp_path / "p.json")]
    assert run(words) == 0
    assert run(words) == 2
    assert "--output must be a new file" in capsys.readouterr().err
    assert run([*words, "--force"]) == 0
    page = ["show", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]
    (tmp_path / "p.html").write_text("mine")
    assert run(page) == 2
    assert "--html must be a new file" in capsys.readouterr().err
    assert run([*page, "--force"]) == 0


@pytest.mark.parametrize("seq", ["10k", "10,000", "10_000", "10K"])
def test_numbers_may_be_written_in_several_ways(seq: str, capsys: Capture) -> None:
    assert run(["estimate", "--model", "GRU", "--seq", seq, "--device", "t4", "--hidden", "8"]) in (0, 1)
    assert "T = 10,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--budget 6", "Did you mean 6GiB?"),
        ("--device gpu", "Did you mean cuda?"),
        ("--device GPU:1", "Did you mean cuda:1?"),
        ("--device CPU", "Did you mean cpu?"),
        ("--seq 1,00", "a whole number"),
    ],
)
def test_values_that_may_mean_another_are_asked_back(words: str, advice: str, capsys: Capture) -> None:
    assert run(["estimate", "--model", "gru", *([] if "--seq" in words else ["--seq", "9"]), *words.split()]) == 2
    assert advice in capsys.readouterr().err
