"""What the screen and the JSON say."""

import io
import json
import re
from typing import Any

import pytest
from device.fake_nvml import answer, card, process
from rich.console import Console

import oomguard
from oomguard._core.units import GIB, format_bytes
from oomguard._device import limits
from oomguard._device.find import Device, present_devices
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.moments import TERMS
from oomguard._report.estimate import WORDS, _bar, _pair, devices_json, show_devices, show_estimate, title, to_json
from oomguard._report.words import peak_words
from oomguard._spec.spec import Spec

SPEC = Spec(cell="lstm", seq=10_000)
KEYS = {"fits", "runs", "total_bytes", "budget_bytes", "margin_bytes", "terms", "moment", "moments", "engine", "device"}


def screen(
    estimate: Estimate,
    width: int = 80,
    encoding: str = "utf-8",
    advice: list[str] | None = None,
    spec: Spec = SPEC,
) -> str:
    """What a terminal of that width and encoding shows of an estimate."""
    written = io.BytesIO()
    buffer = io.TextIOWrapper(written, encoding=encoding)
    console = Console(file=buffer, width=width, highlight=False, markup=False)
    show_estimate(spec, estimate, "free RAM", advice or [], console)
    buffer.flush()
    return written.getvalue().decode(encoding)


@pytest.fixture(name="estimate")
def _estimate() -> Estimate:
    return oomguard.estimate(SPEC, budget_bytes=4 * GIB)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_line_is_wider_than_the_terminal(estimate: Estimate, width: int) -> None:
    assert max(map(len, screen(estimate, width, advice=["--batch-first costs " * 9]).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 140])
def test_no_line_ends_in_blanks(estimate: Estimate, width: int) -> None:
    assert not [line for line in screen(estimate, width).splitlines() if line != line.rstrip()]


def test_nothing_is_coloured_in_a_pipe(estimate: Estimate) -> None:
    assert "\x1b" not in screen(estimate)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_a_terminal_without_unicode_gets_letters_that_it_has(estimate: Estimate, encoding: str) -> None:
    assert screen(estimate, 140, encoding).isascii()


def test_terms_come_by_size(estimate: Estimate) -> None:
    names = [line.split()[0] for line in screen(estimate).splitlines() if line.split() and line.split()[0] in TERMS]
    assert names == sorted(names, key=lambda name: -estimate.terms[name])


def test_terms_that_need_nothing_are_left_out(estimate: Estimate) -> None:
    assert estimate.terms["loader"] == 0
    assert "loader" not in screen(estimate)


def test_total_margin_and_budget_are_shown(estimate: Estimate) -> None:
    sizes = (int(estimate.total_bytes), int(estimate.margin_bytes), 4 * GIB)
    assert all(format_bytes(size) in screen(estimate) for size in sizes)


@pytest.mark.parametrize(("budget_bytes", "verdict"), [(4 * GIB, "DOES NOT FIT by"), (400 * GIB, "FITS with")])
def test_the_verdict_is_in_words(budget_bytes: int, verdict: str) -> None:
    assert verdict in screen(oomguard.estimate(SPEC, budget_bytes=budget_bytes))


def test_a_wide_terminal_explains_the_terms(estimate: Estimate) -> None:
    assert WORDS["activations"] in screen(estimate, 120)


def test_a_narrow_terminal_explains_the_runtime_and_the_margin(estimate: Estimate) -> None:
    assert "The runtime is PyTorch itself." in " ".join(screen(estimate, 60).split())
    assert re.search(r"margin +[\d.]+ .iB +since estimates err\n", screen(estimate, 60))


def test_every_term_has_its_words() -> None:
    assert WORDS.keys() == {*TERMS}


def test_markup_in_advice_is_printed_as_it_is(estimate: Estimate) -> None:
    assert "[bold]x[/bold]" in screen(estimate, advice=["[bold]x[/bold]"])


def test_flags_are_not_broken_at_their_hyphens(estimate: Estimate) -> None:
    text = screen(estimate, 40, advice=["leave out --sparse-embedding and --batch-first, --layer-norm"])
    assert all(flag in text for flag in ("--sparse-embedding", "--batch-first", "--layer-norm"))


@pytest.mark.parametrize(
    ("fields", "knobs", "part"),
    [
        ({"vocab": 30_000, "embedding": 100}, {}, "lstm 30,000 → 100 → 256 × 2 layers"),
        ({"layers": 1, "bidirectional": True}, {}, "64 → 256 × 1 layer × 2 directions"),
        ({"projection": 32}, {}, "64 → 256 → 32 × 2 layers"),
        ({}, {"segments": 100}, "T = 10,000, batch 32, adam on cpu Microbatch 32 × 1 pass, 100 segments, fp32,"),
        ({}, {"window": 50}, "window 50, fp32"),
        ({}, {"microbatch": 8}, "Microbatch 8 × 4 passes"),
        ({"optimizer": "sgd"}, {"engine": "native"}, "sgd on cpu Microbatch 32 × 1 pass, fp32, engine native."),
        ({}, {"workers": 2, "state_8bit": True}, "8-bit optimizer state, workers 2."),
    ],
    ids=str,
)
def test_the_heading_says_what_was_estimated(fields: dict[str, Any], knobs: dict[str, Any], part: str) -> None:
    spec = Spec(cell="lstm", seq=10_000, **fields)
    assert part in " ".join(screen(oomguard.estimate(spec, **knobs), spec=spec).split())


def test_an_evaluation_has_no_optimizer_in_its_title() -> None:
    assert title(SPEC, oomguard.estimate(SPEC, training=False)).endswith(", evaluation on cpu")


@pytest.mark.parametrize("device", ["cpu", "a100-80gb"])
@pytest.mark.parametrize("training", [True, False])
def test_every_moment_has_a_sentence(device: str, training: bool) -> None:
    spec = Spec(cell="lstm", seq=10, vocab=10)
    moments = oomguard.estimate(spec, device=device, training=training).moments
    assert all(any(word in peak_words(moment) for word in (" pass", " step", " loss ")) for moment in moments)


def test_the_json_of_the_cpu_has_the_keys_that_stay(estimate: Estimate) -> None:
    assert to_json(estimate).keys() == KEYS | {"candidate"}


def test_the_json_of_a_card_has_allocated_reserved_and_host_bytes_too() -> None:
    more = {"allocated_bytes", "reserved_bytes", "host_bytes"}
    assert to_json(oomguard.estimate(SPEC, device="t4")).keys() == KEYS | more | {"candidate"}


def test_the_json_of_a_packed_histogram_has_plain_numbers_only() -> None:
    spec = Spec(cell="gru", lengths={10: 3, 50: 2}, packed=True)
    assert json.loads(json.dumps(to_json(oomguard.estimate(spec, device="t4")))) == to_json(
        oomguard.estimate(spec, device="t4")
    )


def test_the_json_of_many_candidates_has_lists() -> None:
    estimate = to_json(oomguard.estimate(SPEC, microbatch=[1, 2], budget_bytes=GIB))
    assert len(json.loads(json.dumps(estimate))["terms"]["activations"]) == 2


def test_the_terms_of_the_json_add_up_to_its_total(estimate: Estimate) -> None:
    document = to_json(estimate)
    assert sum(document["terms"].values()) == document["total_bytes"]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The CPU, and a card of which another process holds a part."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answer(monkeypatch, card(free=10 * GIB, processes=[process(4711, 3 * GIB)]))
    budget = limits.budget()
    monkeypatch.setattr(limits, "budget", lambda: budget)
    return present_devices()[0]


def devices_screen(devices: list[Device], note: str | None = None) -> str:
    buffer = io.StringIO()
    show_devices(devices, note, Console(file=buffer, width=400))
    return buffer.getvalue()


def test_devices_name_every_limit_and_its_source(devices: list[Device]) -> None:
    sources = [limit.source for device in devices for limit in device.budget().limits]
    assert [source for source in sources if source not in devices_screen(devices)] == []


def test_devices_show_what_a_card_has_and_who_holds_it(devices: list[Device]) -> None:
    text = devices_screen(devices)
    assert "Compute capability 8.0, 15.61 GiB in all, 10.00 GiB free." in text
    assert "process (4711) holds 3.00 GiB" in text
    assert "Precisions: fp32, bf16, fp16." in text


def test_without_a_card_the_devices_tell_why_and_how_to_plan_for_one(devices: list[Device]) -> None:
    text = devices_screen(devices[:1], "There is none.")
    assert text.endswith("\nThere is none.\noomguard devices --cards lists the cards that --device takes by name.\n")


def test_the_json_of_devices_has_what_may_be_used(devices: list[Device]) -> None:
    devices_document = devices_json(devices, None)["devices"]
    assert [each["limit_bytes"] for each in devices_document] == [device.budget().limit_bytes for device in devices]


def test_the_json_of_a_card_has_what_it_has_and_who_holds_it(devices: list[Device]) -> None:
    devices_document = json.loads(json.dumps(devices_json(devices, None)))["devices"][1]
    assert (devices_document["free_bytes"], devices_document["compute_capability"]) == (10 * GIB, [8, 0])
    assert devices_document["others"] == [{"pid": 4711, "name": None, "used_bytes": 3 * GIB}]


@pytest.mark.parametrize(("width", "bar"), [(2.6, "██▌"), (0.1, "")])
def test_a_bar_is_drawn_to_half_a_character(width: float, bar: str) -> None:
    assert _bar(width) == bar


def test_a_measured_term_is_shown_with_the_error_of_its_estimate() -> None:
    assert _pair("weights", 1100, 1000) == ("weights", "1.07 KiB", "1000 B", "+10.0%")
