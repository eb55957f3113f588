"""Sizes and durations, as people write and read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import attempt, has_three_beats

from oomguard._core.errors import MisuseError
from oomguard._core.units import (
    GIB,
    KIB,
    MAX_BYTES,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    format_span,
    parse_bytes,
    parse_seconds,
    read_budget,
)

NOT_SIZES = [
    "",
    " ",
    "GiB",
    "-1GiB",
    "+1",
    "nan",
    "inf",
    "1e9",
    "1,5GiB",
    "6 GiB 2",
    "6XB",
    "0x10",
    "١GiB",
    "½",
    "1.2.3",
]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("512B", 512),
        ("2k", 2 * KIB),
        ("2KiB", 2 * KIB),
        ("2kB", 2000),
        ("700MiB", 700 * MIB),
        ("6GiB", 6 * GIB),
        ("6GB", 6 * 10**9),
        ("  6  gib ", 6 * GIB),
        (".5TiB", TIB // 2),
        ("1.T", TIB),
    ],
)
def test_a_size_is_read_in_any_usual_unit(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@given(st.integers(1, 1 << 53))
def test_a_plain_number_is_that_many_bytes(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", [*NOT_SIZES, "0", "0GiB", "0.4B", "2000000TiB", "9" * 400])
def test_what_is_no_size_is_refused_with_three_beats(text: str) -> None:
    with pytest.raises(MisuseError) as caught:
        parse_bytes(text)
    assert has_three_beats(caught.value)


@given(st.text() | st.from_regex(r"[0-9.]{1,25} ?[kmgtKMGT]?(i?[bB])?", fullmatch=True))
def test_any_text_is_a_size_within_bounds_or_misuse(text: str) -> None:
    size_bytes = attempt(parse_bytes, text=text)
    assert has_three_beats(size_bytes) or (isinstance(size_bytes, int) and 1 <= size_bytes <= MAX_BYTES)


def test_a_size_without_a_unit_is_asked_back_with_the_likely_one() -> None:
    for text in ("6", "0.5"):
        with pytest.raises(MisuseError, match=rf"Did you mean {text}GiB\?"):
            read_budget(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3600, "1 h 0 min"), (86400, "1 day"), (129_600, "36 h 0 min"), (259_200, "3 days"), (216_000, "2.5 days")],
)
def test_the_time_between_dates_is_written_in_days(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


def test_a_refused_text_is_cut_in_the_message() -> None:
    with pytest.raises(MisuseError, match=r"\.\.\.") as caught:
        parse_bytes("x" * 10**6)
    assert len(str(caught.value)) < 200


@given(st.integers(1, MAX_BYTES))
def test_a_written_size_reads_back_to_its_three_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes).replace(",", "")) == pytest.approx(size_bytes, rel=0.0051)


@given(st.integers(0, MAX_BYTES))
def test_a_written_size_never_shows_1024_of_a_unit(size_bytes: int) -> None:
    text = format_bytes(size_bytes)
    assert text.endswith("TiB") or float(text.split()[0].replace(",", "")) < 1024


@given(st.integers(1, MAX_BYTES))
def test_a_negative_size_is_written_like_the_positive_one_with_a_sign(size_bytes: int) -> None:
    assert format_bytes(-size_bytes) == "-" + format_bytes(size_bytes)


@given(st.integers(0, MAX_BYTES), st.integers(0, MAX_BYTES))
def test_a_larger_size_is_never_written_smaller(size_bytes: int, other_bytes: int) -> None:
    units = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
    shown = [format_bytes(size).replace(",", "").split() for size in sorted((size_bytes, other_bytes))]
    values = [float(number) * units[unit] for number, unit in shown]
    assert values[0] <= values[1]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("2 min", 120), ("1.5H", 5400), (7, 7)]
)
def test_a_duration_is_read_in_any_usual_unit(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", [*NOT_SIZES, "0", "0h", "5 weeks", "9" * 400])
def test_what_is_no_duration_is_refused_with_three_beats(text: str) -> None:
    with pytest.raises(MisuseError) as caught:
        parse_seconds(text)
    assert has_three_beats(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 ms"),
        (0.0123, "12.3 ms"),
        (7.25, "7.2 s"),
        (90, "1 min 30 s"),
        (0.99999, "1.0 s"),
        (59.96, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599.7, "1 h 0 min"),
        (7199.9, "2 h 0 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_a_duration_is_written_in_the_unit_to_which_it_rounds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 1e9))
def test_a_written_duration_never_shows_60_of_a_unit(seconds: float) -> None:
    assert not re.search(r"\b60(\.0)? (s|min)\b|\b1000\.0 ms", format_seconds(seconds))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(13314398618, "12.40 GiB"), (8519680, "8.12 MiB"), (512, "512 B"), (-3 * MIB, "-3.00 MiB")],
)
def test_a_size_is_written_in_the_largest_unit_that_it_fills(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("budget", "budget_bytes"), [("6GiB", 6 * GIB), (1000, 1000), (None, None)])
def test_a_budget_is_text_or_a_number_or_not_given(budget: int | str | None, budget_bytes: int | None) -> None:
    assert read_budget(budget) == budget_bytes
