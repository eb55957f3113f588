"""Which probe comes next, on machines of which everything is known."""

import msgspec
import numpy as np
import pytest
from plan.searched import CARD, on_the_card
from search.machine import Machine, make_problem, replace, solve, without_time

from oomguard._core.units import GIB, MIB
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.largest import largest, longest_run
from oomguard._search.propose import State, choose, propose
from oomguard._search.screen import screen
from oomguard._search.space import Problem
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=10_000)
SMALL = Spec(cell="lstm", seq=400, features=16, hidden=128, layers=1)
GRU = Spec(cell="gru", seq=2000, hidden=128, batch=64)
each_machine = pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(ratio=1.08, effects={"all": 0.5, "native": 0.4}),
        Machine(ratio=0.9, effects={"all": -0.7, "faults": 0.35, "threads": -0.6}),
        Machine(ratio=1.05, effects={"native": -0.4, "threads": 0.3, "rows": 0.1}),
        Machine(effects={"all": 1.0, "faults": 0.3, "threads": -0.5, "pieces": -0.1, "cold": 0.3}),
    ],
    ids=["as guessed", "native is slow", "faults cost", "one thread is best", "cold memory is slow"],
)
each_problem = pytest.mark.parametrize(
    "problem",
    [make_problem(LSTM, 700 * MIB), make_problem(LSTM, 20 * GIB), make_problem(GRU, 500 * MIB)],
    ids=["lstm in 700 MiB", "lstm in 20 GiB", "gru in 500 MiB"],
)


@each_machine
@each_problem
def test_no_probe_runs_out_and_few_are_needed(machine: Machine, problem: Problem) -> None:
    records = solve(machine, problem)
    assert {one.verdict for one in records} == {Verdict.FITS}
    assert len(records) <= 16


@each_machine
@each_problem
def test_the_chosen_candidate_is_nearly_the_fastest(machine: Machine, problem: Problem) -> None:
    view = screen(problem, solve(machine, problem))
    row = choose(view)
    assert row is not None
    candidate = view.candidates[row]
    seconds = problem.spec.batch / candidate.microbatch * machine.pass_seconds(problem.spec, candidate)
    assert machine.fastest(view, problem.budget_bytes) >= 0.9 * seconds


@each_machine
@pytest.mark.parametrize("spec", [LSTM, GRU], ids=["lstm", "gru"])
def test_the_largest_microbatch_is_found_in_four_probes(machine: Machine, spec: Spec) -> None:
    spec = Spec(cell=spec.cell, seq=200, hidden=128, batch=4096)
    fixed = {
        "segments": 1,
        "threads": 1,
        "allocator": "tight",
        "engine": "onednn" if spec.cell == "lstm" else "native",
    }
    problem = make_problem(spec, 900 * MIB, maximize=("microbatch",), fixed=fixed)
    records = solve(machine, problem)
    found = max(one.candidate.microbatch for one in records)
    true = max(
        size
        for size in range(found, 2 * found)
        if machine.peak_bytes(spec, _with(records[-1].candidate, size, spec)) <= problem.budget_bytes
    )
    assert len(records) <= 4
    assert {one.verdict for one in records} == {Verdict.FITS}
    assert found >= 0.95 * true


def replace_seq(spec: Spec, steps: int) -> Spec:
    return msgspec.structs.replace(spec, seq=steps)


def _with(candidate: Candidate, size: int, spec: Spec) -> Candidate:
    return msgspec.structs.replace(candidate, microbatch=size, accumulation=-(-spec.batch // size))


@each_machine
def test_the_longest_sequences_that_fit_are_found(machine: Machine) -> None:
    problem = make_problem(GRU, 480 * MIB, maximize=("seq",), fixed={"threads": 1}, step_seconds=3600.0)
    records = solve(machine, problem)
    view, row = largest(problem, records, "seq")
    assert row is not None
    assert {one.verdict for one in records} == {Verdict.FITS}
    assert view.spec.steps > 20 * GRU.steps
    assert machine.peak_bytes(view.spec, view.candidates[row]) <= problem.budget_bytes


@pytest.mark.parametrize(("gain", "precision"), [(-0.05, "fp32"), (-0.2, "fp16")], ids=["by 5 %", "by 22 %"])
def test_half_precision_must_be_faster_by_a_tenth(gain: float, precision: str) -> None:
    machine, problem = Machine(effects={"half": gain}, target=CARD), on_the_card(SMALL, 8 * GIB)
    view = screen(problem, solve(machine, problem))
    row = choose(view)
    assert row is not None
    assert view.candidates[row].precision == precision


@each_machine
def test_the_longest_sequences_have_run_whole_and_a_step_of_them_takes_no_longer_than_it_may(machine: Machine) -> None:
    problem = make_problem(replace_seq(GRU, 1), 20 * GIB, maximize=("seq",), step_seconds=10.0)
    records = solve(machine, problem)
    steps, (view, _) = longest_run(problem, records), largest(problem, records, "seq")
    assert steps >= 0.9 * view.spec.steps
    run = max(records, key=lambda one: one.spec.steps)
    assert run.spec.steps == steps
    assert 5.0 < (run.seconds_per_step or 0.0) <= 10.0


def test_without_a_short_probe_first_nobody_knows_how_long_a_step_takes() -> None:
    problem = make_problem(replace_seq(GRU, 1), 20 * GIB, maximize=("seq",))
    first, *others = solve(Machine(effects={"all": 2.0}), problem, seconds=55)
    assert (first.seconds_per_pass or 0.0) < 10
    assert max((one.seconds_per_pass or 0.0) for one in others) <= 55


@each_problem
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not_been(problem: Problem, kept: int) -> None:
    machine = Machine(ratio=1.04, effects={"all": 0.3, "threads": -0.4})
    whole = solve(machine, problem)
    again = solve(machine, problem, whole[:kept])
    assert [without_time(one) for one in again] == [without_time(one) for one in whole]


@each_problem
def test_no_probe_is_run_twice(problem: Problem) -> None:
    records = solve(Machine(), problem)
    assert len({(one.spec, one.candidate) for one in records}) == len(records)


def test_what_is_fastest_by_luck_is_run_again_before_it_is_chosen() -> None:
    """Where a probe takes a second: the first of two times is a fifth too short."""
    machine, problem = Machine(), make_problem(SMALL, 900 * MIB)
    records: list[Record] = []
    while (probe := propose(State(problem=problem, records=records))) is not None:
        record = machine.probe(probe, problem.budget_bytes)
        first = not any(probe.is_of(one) for one in records)
        seconds = (record.seconds_per_pass or 0.0) * (0.8 if first and len(records) == 3 else 1.0)
        record = msgspec.structs.replace(record, seconds_per_pass=seconds, fastest_pass_seconds=0.9 * seconds, passes=9)
        records.append(record)
    view = screen(problem, records)
    row = choose(view)
    assert row is not None
    assert len(records) <= 40
    assert sum(view.candidates[row] in (one.candidate, one.rival) for one in records) >= 2
    seconds = SMALL.batch / view.candidates[row].microbatch * machine.pass_seconds(SMALL, view.candidates[row])
    assert machine.fastest(view, problem.budget_bytes) >= 0.95 * seconds


def test_the_two_best_run_by_turns_once_and_have_both_run_alone_before() -> None:
    problem = make_problem(SMALL, 900 * MIB)
    records = solve(Machine(), problem)
    (turns,) = [record for record in records if record.rival is not None]
    alone = [record.candidate for record in records[: records.index(turns)] if record.spec == SMALL]
    assert {turns.candidate, turns.rival} <= {*alone}
    assert turns.spec == SMALL


def test_nothing_is_run_whole_while_others_run_half_of_it() -> None:
    """Two workers on a card, near its border: the second would run out of memory before the first has told it so."""
    problem, machine = on_the_card(Spec(cell="lstm", seq=4000), 3 * GIB), Machine(target=CARD)
    records: list[Record] = []
    while (probe := propose(State(problem=problem, records=records))) is not None:
        other = propose(State(problem=problem, records=records, pending=[probe]))
        assert other is None or other.spec.steps <= probe.spec.steps or other.candidate != probe.candidate
        records.append(machine.probe(probe, problem.budget_bytes))
    assert any(record.spec == problem.spec for record in records)


@pytest.mark.parametrize("ratio", [1.0, 1.4])
def test_on_a_card_a_candidate_is_run_with_half_of_its_length_before_it_is_run_whole(ratio: float) -> None:
    problem, machine = on_the_card(Spec(cell="lstm", seq=4000), 3 * GIB), Machine(target=CARD, ratio=ratio)
    records = solve(machine, problem)
    view = screen(problem, records)
    row = choose(view)
    assert row is not None
    own = [one.spec.steps for one in records if one.candidate.microbatch == view.candidates[row].microbatch]
    first = own.index(problem.spec.steps)
    assert max(own[:first]) >= 0.5 * problem.spec.steps


def test_microbatches_that_differ_by_a_row_are_not_timed_one_after_the_other() -> None:
    """If the largest is wanted too, every microbatch counts; but the fastest is looked for among those that differ."""
    spec = Spec(cell="gru", seq=100, hidden=64, batch=100)
    alone, together = (
        len(solve(Machine(), make_problem(spec, 400 * MIB, maximize=aims, fixed={"threads": 1})))
        for aims in (("throughput",), ("throughput", "microbatch"))
    )
    assert together <= alone + 4


def test_what_others_are_running_is_not_proposed_again() -> None:
    problem = make_problem(LSTM, 20 * GIB)
    machine = Machine()
    first = propose(State(problem=problem, records=[]))
    assert first is not None
    records = [machine.probe(first, problem.budget_bytes)]
    second = propose(State(problem=problem, records=records))
    assert second is not None
    third = propose(State(problem=problem, records=records, pending=[second]))
    assert third is not None
    assert (third.spec, third.candidate) != (second.spec, second.candidate)


def test_the_first_probe_is_of_what_arithmetic_takes_for_the_best_and_is_short() -> None:
    problem = make_problem(LSTM, 20 * GIB)
    first = propose(State(problem=problem, records=[]))
    assert first is not None
    assert first.candidate.microbatch == 32
    assert first.spec.steps < 1000


class Forgetful(Machine):
    """Where whole sequences that keep all they computed take three times as long as short ones promise."""

    def pass_seconds(self, spec: Spec, candidate: Candidate) -> float:
        keeps = candidate.segments == 1 or not candidate.recompute
        return super().pass_seconds(spec, candidate) * (3 if keeps and spec.steps > LSTM.steps // 2 else 1)


def test_after_what_keeps_all_was_slower_than_it_promised_what_recomputes_is_tried() -> None:
    problem, machine = make_problem(LSTM, 20 * GIB), Forgetful()
    records = solve(machine, problem, seconds=300)
    view = screen(problem, records)
    row = choose(view)
    assert row is not None
    whole = [one.candidate for one in records if one.spec == LSTM]
    assert not whole[0].recompute or whole[0].segments == 1
    assert view.candidates[row].recompute
    assert view.candidates[row].segments > 1
    assert view.candidates[row] in whole


def test_without_time_to_look_further_the_best_known_is_confirmed() -> None:
    problem, machine = make_problem(LSTM, 700 * MIB), Machine()
    first = propose(State(problem=problem, records=[]))
    assert first is not None
    records = [machine.probe(first, problem.budget_bytes)]
    probe = propose(State(problem=problem, records=records, explore=False))
    assert probe is not None
    assert probe.role == "confirm"
    assert 2 * probe.spec.steps >= LSTM.steps


def test_a_confirmation_that_takes_too_long_is_made_with_shorter_sequences() -> None:
    slow = Machine(effects={"all": 4.0})
    records = solve(slow, make_problem(LSTM, 700 * MIB))
    assert max(one.spec.steps for one in records) < LSTM.steps
    assert all(slow.pass_seconds(one.spec, one.candidate) < 60 for one in records[1:])


def test_if_nothing_fits_the_smallest_is_measured_once_and_then_it_ends() -> None:
    problem = make_problem(LSTM, 331 * MIB)
    records = solve(Machine(ratio=1.5), problem)
    assert len(records) <= 2
    assert not screen(problem, records).eligible.any()


def test_a_window_is_taken_only_if_it_is_allowed_and_nothing_exact_fits() -> None:
    spec = Spec(cell="lstm", seq=20_000, hidden=512, batch=1)
    tight, roomy = 430 * MIB, 2 * GIB
    fixed = {"threads": 1, "segments": 1, "engine": "onednn", "allocator": "tight"}
    allowed = {"allow": ("precision", "window"), "fixed": fixed}
    assert not screen(make_problem(spec, tight, fixed=fixed), []).eligible.any()
    view = screen(make_problem(spec, tight, **allowed), [])
    assert view.eligible.any()
    assert all(view.candidates[int(row)].window is not None for row in np.flatnonzero(view.eligible))
    view = screen(make_problem(spec, roomy, **allowed), [])
    assert all(view.candidates[int(row)].window is None for row in np.flatnonzero(view.eligible))


def test_less_memory_in_the_middle_of_a_search_costs_nothing_but_room() -> None:
    machine, problem = Machine(ratio=1.03), make_problem(LSTM, 4 * GIB)
    first = solve(machine, problem)[:3]
    less = replace(problem, budget_bytes=600 * MIB)
    records = solve(machine, less, first)
    assert all(one.verdict is Verdict.FITS for one in records)
    row = choose(screen(less, records))
    assert row is not None
    assert machine.peak_bytes(LSTM, screen(less, records).candidates[row]) <= 600 * MIB


@pytest.mark.parametrize("cores", [2, 8, 64])
def test_before_anything_has_run_all_cores_are_taken(cores: int) -> None:
    view = screen(make_problem(LSTM, 20 * GIB, cores=cores), [])
    row = choose(view)
    assert row is not None
    assert view.candidates[row].threads == cores


@pytest.mark.parametrize("busy", [3.3, 2.5])
def test_where_many_threads_are_many_times_slower_one_is_taken(busy: float) -> None:
    """As on a machine of two cores of which another process uses one. (A first probe that was thought to be short, and
    is not, does not end the search.)"""
    machine = Machine(effects={"threads": busy})
    problem = make_problem(SMALL, 900 * MIB)
    view = screen(problem, solve(machine, problem))
    row = choose(view)
    assert row is not None
    assert view.candidates[row].threads == 1


def test_what_is_first_run_in_a_heap_that_keeps_large_blocks_may_need_four_times_its_estimate() -> None:
    """An LSTM with many logits, in chunks, needed 3.5 times as much."""
    spec = Spec(cell="lstm", seq=202, hidden=100, layers=1, batch=37, vocab=1000)
    problem = make_problem(spec, 392 * MIB)
    first = next(one for one in solve(Machine(), problem) if one.candidate.allocator == "fast")
    runtime_bytes = problem.target.runtime_bytes
    assert first.peak_bytes is not None
    assert runtime_bytes + 3.5 * (first.peak_bytes - runtime_bytes) <= problem.budget_bytes


EDGE = Spec(cell="gru", seq=500, features=16, hidden=128, layers=1, batch=32)
CHUNKS = make_candidate(EDGE, segments=16, recompute=False, engine="native", threads=1, allocator="fast")
"""Keeps all it computed, and so takes no time to compute it again."""


def at_the_edge(machine: Machine, more_bytes: int) -> Problem:
    """The chunks fit, but for a part of their margin."""
    return make_problem(EDGE, machine.peak_bytes(EDGE, CHUNKS) + more_bytes, fixed={"threads": 1}, cores=1)


def test_what_would_not_fit_if_it_crept_is_not_chosen() -> None:
    machine = Machine()
    problem = at_the_edge(machine, MIB)
    records = solve(machine, problem)
    view = screen(problem, records)
    row = choose(view)
    assert row is not None
    assert view.candidates[row] != CHUNKS
    assert {one.verdict for one in records} == {Verdict.FITS}
