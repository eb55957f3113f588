"""Length buckets: where the borders lie, what padding costs, and how each bucket is run."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.machine import Machine, make_problem, solve

from oomguard._core.units import MIB
from oomguard._plan.buckets import MOST_BUCKETS, WORTH, Bucket, cut, make_buckets, padded_tokens
from oomguard._search.propose import choose
from oomguard._search.screen import SETTING, screen
from oomguard._spec.candidate import check_candidate
from oomguard._spec.lengths import with_steps
from oomguard._spec.spec import Spec

histograms = st.dictionaries(st.integers(1, 400), st.integers(1, 50), min_size=1, max_size=7)
DATA = {50: 4000, 200: 900, 600: 120, 2000: 30}
SPEC = Spec(cell="lstm", lengths=DATA, batch=32)


def tokens(parts: list[dict[int, int]]) -> int:
    """All sequences, each as long as the longest of its part."""
    return sum(max(part) * sum(part.values()) for part in parts)


def least_tokens(lengths: dict[int, int], count: int) -> int:
    """The same of the best of all ways to make so many parts."""
    values = sorted(lengths)
    ways = itertools.combinations(values[:-1], count - 1)
    costs = []
    for way in ways:
        ends = [*way, values[-1]]
        costs.append(sum(n * next(end for end in ends if length <= end) for length, n in lengths.items()))
    return min(costs)


@given(lengths=histograms)
def test_the_parts_have_every_sequence_once_the_shortest_first(lengths: dict[int, int]) -> None:
    parts = cut(lengths)
    together = [pair for part in parts for pair in part.items()]
    assert together == sorted(lengths.items())
    assert all(parts)


@given(lengths=histograms, most=st.integers(1, 4))
def test_no_other_borders_cost_less(lengths: dict[int, int], most: int) -> None:
    parts = cut(lengths, most)
    assert len(parts) <= most
    assert tokens(parts) == least_tokens(lengths, len(parts))


@given(lengths=histograms)
def test_a_bucket_is_made_only_if_it_saves_a_hundredth(lengths: dict[int, int]) -> None:
    count, whole = len(cut(lengths)), least_tokens(lengths, 1)
    costs = [least_tokens(lengths, one) for one in range(1, min(len(lengths), MOST_BUCKETS) + 1)]
    saved = [before - after for before, after in itertools.pairwise(costs)]
    assert all(one >= WORTH * whole for one in saved[: count - 1])
    assert count == len(costs) or saved[count - 1] < WORTH * whole


def test_thousands_of_lengths_are_cut_into_a_few_parts_with_the_longest() -> None:
    lengths = {length: 1 + 10_000 // length for length in range(1, 5001)}
    parts = cut(lengths)
    assert 2 <= len(parts) <= MOST_BUCKETS
    assert max(parts[-1]) == 5000
    assert sum(sum(part.values()) for part in parts) == sum(lengths.values())


@given(lengths=st.dictionaries(st.integers(1, 50), st.integers(1, 4), min_size=1, max_size=3), rows=st.integers(1, 3))
def test_padded_tokens_are_what_all_microbatches_have_on_average(lengths: dict[int, int], rows: int) -> None:
    each = [length for length, count in lengths.items() for _ in range(count)]
    drawn = [max(some) for some in itertools.product(each, repeat=rows)]
    assert padded_tokens(lengths, rows) == pytest.approx(len(each) * sum(drawn) / len(drawn))


@given(lengths=histograms, rows=st.integers(1, 64))
@settings(max_examples=50)
def test_sorting_by_length_never_pads_more(lengths: dict[int, int], rows: int) -> None:
    after = sum(padded_tokens(part, rows) for part in cut(lengths))
    assert after <= padded_tokens(lengths, rows) * (1 + 1e-9)


# how each is run


@pytest.fixture(scope="module", name="run", params=[450 * MIB, 900 * MIB], ids=["tight", "roomy"])
def _run(request: pytest.FixtureRequest) -> tuple[int, list[Bucket]]:
    """The buckets of a search on a machine of formulas, and its budget."""
    problem = make_problem(SPEC, request.param)
    records = solve(Machine(), problem)
    view = screen(problem, records)
    row = choose(view)
    assert row is not None
    return request.param, make_buckets(problem, records, view.candidates[row])


def test_each_bucket_fits_the_budget(run: tuple[int, list[Bucket]]) -> None:
    budget_bytes, found = run
    assert all(one.expected.safe_bytes <= budget_bytes for one in found)
    assert all(Machine().peak_bytes(with_steps(SPEC, one.longest), one.candidate) <= budget_bytes for one in found)


def test_each_bucket_gives_the_batch(run: tuple[int, list[Bucket]]) -> None:
    for one in run[1]:
        check_candidate(with_steps(SPEC, one.longest), one.candidate)


def test_no_bucket_changes_what_cannot_change_while_training(run: tuple[int, list[Bucket]]) -> None:
    names = [*SETTING, "threads", "window"]
    assert len({tuple(getattr(one.candidate, name) for name in names) for one in run[1]}) == 1


def test_the_bucket_of_the_longest_is_run_as_the_plan_says(run: tuple[int, list[Bucket]]) -> None:
    budget_bytes, found = run
    problem = make_problem(SPEC, budget_bytes)
    view = screen(problem, solve(Machine(), problem))
    row = choose(view)
    assert row is not None
    assert found[-1].candidate == view.candidates[row]


def test_short_sequences_run_in_microbatches_that_are_no_smaller_and_take_less_time(
    run: tuple[int, list[Bucket]],
) -> None:
    found = run[1]
    assert all(a.candidate.microbatch >= b.candidate.microbatch for a, b in itertools.pairwise(found))
    seconds = [one.expected.seconds_per_step or 0.0 for one in found]
    assert all(short < long for short, long in itertools.pairwise(seconds))


@pytest.mark.parametrize("fixed", [{"segments": 100}, {"segments": 64, "recompute": False}], ids=str)
def test_a_bucket_shorter_than_the_segments_that_the_user_fixed_is_run_all_the_same(fixed: dict[str, int]) -> None:
    problem = make_problem(SPEC, 900 * MIB, fixed=fixed)
    view = screen(problem, [])
    row = choose(view)
    assert row is not None
    found = make_buckets(problem, [], view.candidates[row])
    assert sum(one.sequences for one in found) == sum(DATA.values())


def test_a_bucket_shorter_than_the_window_that_the_user_fixed_is_run_all_the_same() -> None:
    problem = make_problem(SPEC, 900 * MIB, fixed={"window": 100}, allow=("window",))
    view = screen(problem, [])
    row = choose(view)
    assert row is not None
    found = make_buckets(problem, [], view.candidates[row])
    assert sum(one.sequences for one in found) == sum(DATA.values())


def test_a_state_in_8_bits_stays_so_in_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though short sequences would fit without it: it cannot change while training."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    spec = Spec(cell="lstm", hidden=1024, layers=1, batch=4, lengths={10: 100, 5000: 4})
    problem = make_problem(spec, 465 * MIB, allow=("8bit",), fixed={"engine": "native", "threads": 1})
    view = screen(problem, [])
    row = choose(view)
    assert row is not None
    assert view.candidates[row].state_8bit
    assert {one.candidate.state_8bit for one in make_buckets(problem, [], view.candidates[row])} == {True}
