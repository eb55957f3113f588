"""If nothing fits: the least that would be needed, what stands in the way, and which knob would make it fit."""

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from search.machine import Machine, find, make_problem, solve
from search.rig import Rig

import oomguard
from oomguard._core.units import GIB, MIB, format_bytes
from oomguard._plan.advice import MOST, explain
from oomguard._plan.value import NothingFitsError, Shortfall
from oomguard._probe.verdict import Verdict
from oomguard._search.screen import screen
from oomguard._search.space import Problem
from oomguard._spec.lengths import with_steps
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=20_000, hidden=512)
ONE_PIECE: dict[str, Any] = {"segments": 1, "threads": 1, "allocator": "tight", "engine": "onednn", "microbatch": 4}
HOPELESS: dict[str, Any] = {"cell": "lstm", "seq": 20_000, "hidden": 512, "device": "t4"}


def short(budget_bytes: int, spec: Spec = LSTM, allow: tuple[str, ...] = (), **fixed: Any) -> tuple[Problem, Shortfall]:
    problem = make_problem(spec, budget_bytes, allow=allow, fixed=fixed)
    return problem, explain(problem, [])


def least(problem: Problem) -> int:
    """What the smallest candidate needs that runs at all."""
    view = screen(problem, [])
    return int(view.expected.safe_bytes[np.broadcast_to(view.estimate.runs, len(view.fits))].min())


CASES: dict[str, dict[str, Any]] = {
    "searched": {"budget_bytes": 330 * MIB},
    "fixed": {"budget_bytes": 900 * MIB, **ONE_PIECE},
    "large weights": {"budget_bytes": 600 * MIB, "spec": Spec(cell="gru", seq=10, vocab=100_000, hidden=512)},
    "next to nothing": {"budget_bytes": MIB},
}
each = pytest.mark.parametrize("case", [*CASES])


@cache
def of(case: str) -> tuple[Problem, Shortfall]:
    return short(**CASES[case])


@each
def test_no_candidate_of_the_space_needs_less(case: str) -> None:
    problem, shortfall = of(case)
    assert shortfall.needed_bytes == least(problem)
    assert shortfall.needed_bytes > shortfall.budget_bytes == problem.budget_bytes


@each
def test_the_candidate_is_the_one_that_needs_least(case: str) -> None:
    problem, shortfall = of(case)
    view = screen(problem, [])
    assert int(view.expected.safe_bytes[find(view, shortfall.candidate)]) == shortfall.needed_bytes
    terms = {name: int(np.broadcast_to(size, len(view.fits))[find(view, shortfall.candidate)])
             for name, size in view.estimate.terms.items()}  # fmt: skip
    assert shortfall.terms == terms


@each
def test_what_stands_in_the_way_is_the_largest_term_that_is_not_the_runtime(case: str) -> None:
    _, shortfall = of(case)
    others = {name: size for name, size in shortfall.terms.items() if name != "runtime"}
    full = shortfall.terms["runtime"] > MOST * shortfall.budget_bytes
    assert shortfall.term == ("runtime" if full else max(others, key=lambda name: others[name]))


def test_weights_that_are_too_large_are_named() -> None:
    assert of("large weights")[1].term in ("weights", "optimizer", "gradients")


def test_a_budget_that_the_interpreter_fills_is_told_so() -> None:
    assert of("next to nothing")[1].term == "runtime"


# ways out


@each
def test_ways_that_fit_come_first_and_all_need_less(case: str) -> None:
    _, shortfall = of(case)
    assert [way.fits for way in shortfall.ways] == sorted((way.fits for way in shortfall.ways), reverse=True)
    assert all(way.needed_bytes < shortfall.needed_bytes for way in shortfall.ways)
    assert all(way.fits == (way.needed_bytes <= shortfall.budget_bytes) for way in shortfall.ways)


def test_allowing_a_window_needs_what_a_screen_of_that_space_says() -> None:
    _, shortfall = of("fixed")
    way = next(way for way in shortfall.ways if way.change == "--allow window")
    assert way.needed_bytes == least(make_problem(LSTM, 900 * MIB, allow=("window",), fixed=ONE_PIECE))
    assert not way.allowed


def test_leaving_a_knob_to_the_search_needs_what_a_screen_of_that_space_says() -> None:
    _, shortfall = of("fixed")
    rest = {name: value for name, value in ONE_PIECE.items() if name != "segments"}
    way = next(way for way in shortfall.ways if "--segments" in way.change)
    assert way.change == "leaving --segments to the search"
    assert way.needed_bytes == least(make_problem(LSTM, 900 * MIB, allow=(), fixed=rest))
    assert way.fits


def test_the_length_that_is_named_fits_and_a_little_more_does_not() -> None:
    problem, shortfall = of("fixed")
    way = next(way for way in shortfall.ways if way.change.startswith("--seq"))
    steps = int(way.change.split()[1])
    fits = [
        bool(screen(replace(problem, spec=with_steps(LSTM, length)), []).eligible.any())
        for length in (steps, steps + 1 + steps // 50)
    ]
    assert fits == [True, False]
    assert way.needed_bytes == least(replace(problem, spec=with_steps(LSTM, steps)))


def test_sequences_of_many_lengths_are_told_to_be_cut_since_seq_does_not_cut_them() -> None:
    spec = Spec(cell="lstm", hidden=512, lengths={1000: 9, 20_000: 1})
    problem, shortfall = short(900 * MIB, spec, **ONE_PIECE)
    way = next(way for way in shortfall.ways if "steps" in way.change)
    steps = int(way.change.split()[3].replace(",", ""))
    assert way.change == f"sequences cut to {steps:,} steps (of --data: --seq {steps} --truncate)"
    assert way.needed_bytes == least(replace(problem, spec=with_steps(spec, steps)))
    assert not any(way.change.startswith("--seq") for way in shortfall.ways)


def test_where_weights_stand_in_the_way_other_models_and_optimizers_are_tried() -> None:
    problem, shortfall = of("large weights")
    ways = {way.change: way.needed_bytes for way in shortfall.ways}
    tried: dict[str, dict[str, Any]] = {
        "--optimizer sgd": {"optimizer": "sgd"},
        "--sparse-embedding --optimizer sgd": {"optimizer": "sgd", "sparse_embedding": True},
        "--tied --embedding 512 --outputs 100000": {"tied": True, "embedding": 512, "outputs": 100_000},
        "--frozen embedding": {"frozen": ("embedding",)},
        "--embedding 128": {"embedding": 128},
    }
    for change, fields in tried.items():
        spec = msgspec.structs.replace(problem.spec, **fields)
        assert ways[change] == least(replace(problem, spec=spec))


def test_the_hidden_size_that_is_named_fits_and_a_little_more_does_not() -> None:
    problem, shortfall = short(500 * MIB, Spec(cell="lstm", seq=200, hidden=1500))
    way = next(way for way in shortfall.ways if way.change.startswith("--hidden"))
    hidden = int(way.change.split()[1])
    fits = [
        bool(screen(replace(problem, spec=msgspec.structs.replace(problem.spec, hidden=size)), []).eligible.any())
        for size in (hidden, hidden + 1 + hidden // 10)
    ]
    assert fits == [True, False]
    assert way.fits


def test_what_was_allowed_already_is_told_so() -> None:
    _, shortfall = short(700 * MIB, allow=("window",), **ONE_PIECE | {"microbatch": 32})
    assert {way.allowed for way in shortfall.ways if way.change == "--allow window"} <= {True}


@pytest.mark.parametrize(
    "fixed", [{"segments": 1000}, {"window": 5000}, {"segments": 4096, "recompute": False}], ids=str
)
def test_pieces_that_the_user_fixed_do_not_keep_shorter_sequences_from_being_looked_for(fixed: dict[str, Any]) -> None:
    _, shortfall = short(330 * MIB, allow=("window",), **fixed)
    assert shortfall.needed_bytes > shortfall.budget_bytes


def test_another_optimizer_is_a_way_if_the_search_cannot_save_enough() -> None:
    spec = Spec(cell="gru", seq=10, vocab=100_000, hidden=512, optimizer="adam")
    problem, shortfall = short(1000 * MIB, spec)
    way = next(way for way in shortfall.ways if way.change == "--optimizer adafactor")
    assert way.needed_bytes == least(replace(problem, spec=msgspec.structs.replace(spec, optimizer="adafactor")))
    assert way.needed_bytes < shortfall.needed_bytes


# words


def test_the_message_has_what_is_needed_what_stands_in_the_way_and_what_to_do() -> None:
    _, shortfall = of("fixed")
    rule, got, advice = (
        shortfall.message.partition(", but ")[0],
        shortfall.message,
        shortfall.message.partition("). ")[2],
    )
    assert rule == "The smallest candidate must fit the budget"
    assert f"needs {format_bytes(shortfall.needed_bytes)} of 900.00 MiB" in got
    assert f"of it {shortfall.term})" in got
    first = shortfall.ways[0]
    assert advice.startswith(f"{first.change} would need {format_bytes(first.needed_bytes)}.")


def test_if_no_knob_helps_the_message_asks_for_memory() -> None:
    _, shortfall = of("next to nothing")
    assert not any(way.fits for way in shortfall.ways)
    assert shortfall.message.endswith(f"raise the budget to {format_bytes(shortfall.needed_bytes)}.")


def test_what_was_run_is_kept() -> None:
    problem = make_problem(LSTM, 345 * MIB, allow=())
    records = solve(Machine(ratio=3.0), problem)
    shortfall = explain(problem, records)
    assert len(shortfall.records) >= 1


@pytest.mark.parametrize("verdict", [Verdict.BROKEN, Verdict.UNSUPPORTED])
def test_what_fits_but_never_ran_is_not_called_too_large(verdict: Verdict) -> None:
    problem = make_problem(LSTM, 4 * GIB, allow=())
    whole = explain(problem, [])
    failed = Machine().run(LSTM, whole.candidate, 1)
    failed = msgspec.structs.replace(failed, verdict=verdict, message="The driver is too old.", error="...")
    shortfall = msgspec.structs.replace(whole, records=(failed,))
    assert shortfall.message.startswith(
        f"A candidate must run before it is planned, but none did: {verdict.name}, The dri"
    )


# from the question on


def test_finding_raises_it_with_the_figures() -> None:
    with pytest.raises(NothingFitsError, match="The smallest candidate must fit the budget") as caught:
        oomguard.find_feasible_config(**HOPELESS, budget=450 * MIB)
    shortfall = caught.value.shortfall
    assert shortfall.budget_bytes == 450 * MIB
    assert str(caught.value) == shortfall.message


def test_every_way_that_fits_leads_to_a_plan() -> None:
    asked = HOPELESS | {"segments": 1, "allow": "none", "budget": GIB}
    with pytest.raises(NothingFitsError) as caught:
        oomguard.find_feasible_config(**asked)
    ways = [way.change for way in caught.value.shortfall.ways if way.fits]
    assert len(ways) >= 3
    for way in ways:
        other = dict(asked)
        if way.startswith("--allow"):
            other["allow"] = way.split()[1]
        elif way.startswith("--seq"):
            other["seq"] = int(way.split()[1])
        else:
            del other["segments"]
        assert oomguard.find_feasible_config(**other).peak_bytes <= GIB


def test_a_search_in_which_nothing_fits_ends_after_a_probe_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(machine=Machine(ratio=1.5)).install(monkeypatch)
    with pytest.raises(NothingFitsError) as caught:
        oomguard.find_feasible_config(cell="lstm", seq=20_000, hidden=512, budget=331 * MIB)
    assert len(rig.records) <= 2
    assert [*caught.value.shortfall.records] == rig.records
