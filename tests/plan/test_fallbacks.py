"""The fallbacks: ever smaller peaks with the same gradient, down to the smallest there is."""

import itertools

import numpy as np
import pytest
from plan.searched import PROBLEMS, searched
from search.machine import find

from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.make import LEAST_BYTES, SMALLER, make_fallbacks
from oomguard._plan.value import figures
from oomguard._search.screen import SETTING, screen
from oomguard._spec.candidate import check_candidate

each = pytest.mark.parametrize("name", [*PROBLEMS])


@each
def test_every_rung_is_smaller_than_the_one_above_it(name: str) -> None:
    problem, records, plan = searched(name)
    view = screen(problem, records)
    row = find(view, plan.candidate)
    assert row is not None
    peaks = [int(view.prediction.peak_bytes[row]), *(rung.expected.peak_bytes for rung in plan.fallbacks)]
    assert all(above > below for above, below in itertools.pairwise(peaks))


@each
def test_every_rung_but_the_last_is_a_quarter_smaller_without_the_runtime(name: str) -> None:
    _, _, plan = searched(name)
    runtime_bytes = plan.estimate.terms["runtime"]
    peaks = [rung.expected.peak_bytes for rung in plan.fallbacks]
    for above, below in itertools.pairwise(peaks[:-1]):
        assert below <= above - LEAST_BYTES
        assert below - runtime_bytes <= (SMALLER + 0.02) * (above - runtime_bytes)


@each
def test_the_last_rung_is_the_smallest_in_the_setting_of_the_chosen(name: str) -> None:
    problem, records, plan = searched(name)
    view = screen(problem, records)
    alike = view.like(plan.candidate, *SETTING, "threads", "window")
    alike &= np.broadcast_to(view.estimate.runs, len(alike))
    assert plan.fallbacks[-1].expected.peak_bytes == int(view.prediction.peak_bytes[alike].min())


@each
def test_no_rung_changes_the_gradient_the_batch_or_what_a_running_process_cannot_change(name: str) -> None:
    _, _, plan = searched(name)
    fixed = [*SETTING, "threads", "window"]
    for rung in plan.fallbacks:
        check_candidate(plan.spec, rung.candidate)
        assert rung.candidate.lossy == plan.candidate.lossy
        assert [getattr(rung.candidate, knob) for knob in fixed] == [getattr(plan.candidate, knob) for knob in fixed]


@each
def test_every_rung_has_its_own_estimate_and_time(name: str) -> None:
    problem, _, plan = searched(name)
    for rung in plan.fallbacks:
        assert rung.estimate == figures(estimate_step(plan.spec, rung.candidate, problem.target))
        assert rung.expected.seconds_per_step is not None


@each
def test_every_rung_is_the_fastest_that_is_small_enough(name: str) -> None:
    problem, records, plan = searched(name)
    view = screen(problem, records)
    alike = view.like(plan.candidate, *SETTING, "threads", "window")
    alike &= np.broadcast_to(view.estimate.runs, len(alike))
    for rung in plan.fallbacks[:-1]:
        rows = alike & (view.prediction.peak_bytes <= rung.expected.peak_bytes)
        assert rung.expected.seconds_per_step == pytest.approx(float(view.prediction.seconds_per_step[rows].min()))


def test_below_the_smallest_there_is_no_rung() -> None:
    problem, records, plan = searched("gru in 420 MiB")
    view = screen(problem, records)
    row = find(view, plan.fallbacks[-1].candidate)
    assert row is not None
    assert make_fallbacks(problem, view, row, timed=True) == ()
