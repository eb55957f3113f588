"""The verbs as functions: `oomguard.estimate` on one candidate and on many."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from device.fake_nvml import answer, card
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attempt, garbage_for, has_three_beats, knob_values, specs

import oomguard
from oomguard._core.units import GIB
from oomguard._device.find import find_budget, find_target
from oomguard._estimate import cards
from oomguard._estimate.breakdown import Estimate, split
from oomguard._estimate.margins import OFFSET_BYTES, bare
from oomguard._estimate.target import on_card, resident_within
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, make_candidate
from oomguard._spec.spec import Spec

SPEC = Spec(cell="lstm", seq=1000, batch=32)
CARD = "a100-80gb"
FIGURES = ("total_bytes", "margin_bytes", "allocated_bytes", "reserved_bytes", "host_bytes", "fits")


@st.composite
def many(draw: st.DrawFn, spec: Spec) -> Candidates:
    """From 1 to 20 candidates for a spec; each knob is one value for all, or an array."""
    rows = draw(st.integers(1, 20))

    def some(values: st.SearchStrategy[Any]) -> Any:
        return draw(values | st.lists(values, min_size=rows, max_size=rows))

    pieces = some(st.sampled_from([1, spec.steps]) | st.integers(1, spec.steps))
    windows = None if spec.bidirectional else some(st.none() | st.integers(1, spec.steps))
    if windows is not None:  # segments only where there is no window
        windows = windows if isinstance(windows, list) else [windows] * rows
        each = pieces if isinstance(pieces, list) else [pieces] * rows
        pieces = [1 if window else item for window, item in zip(windows, each, strict=True)]
    levels = 1 if spec.bidirectional else some(st.integers(1, 3))
    recompute = spec.bidirectional or some(st.booleans())
    others = {name: knob_values(name) for name, knob in KNOBS.items() if knob.role.group != "shape"}
    others["engine"] = st.sampled_from([None, "native"])  # that every cell has on every device
    return Candidates(
        microbatch=draw(st.lists(st.integers(1, spec.batch), min_size=rows, max_size=rows)),
        segments=pieces,
        window=windows,
        **draw(st.sampled_from([{"recompute": True, "levels": levels}, {"recompute": recompute}])),
        **{name: some(values) for name, values in others.items()},
    )


def figures(estimate: Estimate, row: int | None = None) -> dict[str, Any]:
    """Every figure of an estimate; of an array of them, those of one row."""
    named = {name: getattr(estimate, name) for name in (*FIGURES, "moment", "engine")}
    named |= {f"term {name}": value for name, value in estimate.terms.items()}
    named |= {f"moment {name}": value for name, value in estimate.moments.items()}
    return {name: value[row] if isinstance(value, np.ndarray) else value for name, value in named.items()}


@pytest.mark.parametrize("device", ["cpu", CARD])
@settings(max_examples=30)
@given(spec=specs(), training=st.booleans(), data=st.data())
def test_many_candidates_have_the_figures_they_have_one_at_a_time(
    device: str, spec: Spec, training: bool, data: st.DataObject
) -> None:
    candidates = data.draw(many(spec))
    where: dict[str, Any] = {"device": device, "budget_bytes": 8 * GIB, "training": training}
    together = oomguard.estimate(spec, candidates, **where)
    for row in range(len(candidates)):
        knobs = {name: getattr(candidates[row], name) for name in Candidate.__struct_fields__ if name != "accumulation"}
        alone = figures(oomguard.estimate(spec, make_candidate(spec, **knobs), **where))
        figures_of_row = figures(together, row)
        assert {name: figures_of_row.pop(name) for name in alone} == alone
        assert not any(figures_of_row.values())  # a moment that only other candidates have


def test_a_million_candidates_are_answered_at_once() -> None:
    random = np.random.default_rng(0)
    microbatch, segments = random.integers(1, 33, 10**6), random.integers(1, 1001, 10**6)
    estimate = oomguard.estimate(SPEC, microbatch=microbatch, segments=segments, budget_bytes=GIB)
    assert np.asarray(estimate.fits).shape == (10**6,)


def test_several_engines_are_told_apart_candidate_by_candidate() -> None:
    estimate = oomguard.estimate(SPEC, engine=[None, "native", "onednn"])
    assert np.asarray(estimate.engine).tolist() == ["onednn", "native", "onednn"]


def test_one_engine_of_all_candidates_is_one_word() -> None:
    assert oomguard.estimate(SPEC, microbatch=[1, 2]).engine == "onednn"


def test_bidirectional_candidates_plain_and_in_segments_go_together() -> None:
    spec = Spec(cell="gru", seq=1000, bidirectional=True)
    together = oomguard.estimate(spec, segments=[1, 10], device=CARD)
    alone = [oomguard.estimate(spec, segments=each, device=CARD).total_bytes for each in (1, 10)]
    assert np.asarray(together.total_bytes).tolist() == alone


@pytest.mark.parametrize(
    "knobs",
    [
        {"microbatch": [1, 0]},
        {"microbatch": [1.0, 2.0]},
        {"microbatch": []},
        {"microbatch": [[1, 2]]},
        {"microbatch": [[1], [1, 2]]},
        {"microbatch": [1, None]},
        {"microbatch": [10**30]},
        {"microbatch": ["a"]},
        {"microbatch": [True, False]},
        {"microbatch": [1, 2], "segments": [1, 2, 3]},
        {"microbatch": [1, 2], "accumulation": [32, 15]},
        {"segments": [1, 1001]},
        {"window": [None, 1001]},
        {"window": [None, 2.5]},
        {"window": [None, 10], "segments": 2},
        {"precision": ["fp32", "fp8"]},
        {"precision": ["fp32", None]},
        {"recompute": [1, 0]},
        {"engine": [None, "cuda"]},
        {"engine": [[], {}]},
    ],
    ids=str,
)
def test_arrays_that_cannot_be_candidates_are_refused_with_three_beats(knobs: dict[str, Any]) -> None:
    assert has_three_beats(attempt(oomguard.estimate, spec=SPEC, **knobs))


@given(fields=garbage_for((*Spec.__struct_fields__, *Candidate.__struct_fields__)))
def test_any_fields_and_knobs_give_an_estimate_or_misuse(fields: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"cell": "gru", "seq": 50}
    made = attempt(oomguard.estimate, **usual | fields)
    assert isinstance(made, Estimate) or has_three_beats(made)


@pytest.mark.parametrize(
    "asked",
    [
        {"spec": SPEC, "hidden": 5},
        {"spec": "lstm"},
        {"spec": SPEC, "candidate": Candidate(microbatch=32), "segments": 2},
        {"spec": SPEC, "candidate": "all"},
        {"spec": SPEC, "candidate": Candidate(microbatch=8)},
        {"spec": SPEC, "budget_bytes": -1},
        {"spec": SPEC, "budget_bytes": "6GiB"},
        {"spec": SPEC, "budget": "much"},
        {"spec": SPEC, "budget": 0},
        {"spec": SPEC, "budget": [1]},
        {"spec": SPEC, "budget": "6GiB", "budget_bytes": 6 * GIB},
        {"spec": SPEC, "segmens": 2},
        {"spec": SPEC, "device": "cuda:one"},
        {"spec": SPEC, "device": "gtx-9999"},
        {},
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_with_three_beats(asked: dict[str, Any]) -> None:
    assert has_three_beats(attempt(oomguard.estimate, **asked))


@pytest.mark.parametrize("budget", ["6GiB", 6 * GIB])
def test_a_budget_is_bytes_or_text(budget: int | str) -> None:
    assert oomguard.estimate(SPEC, budget=budget) == oomguard.estimate(SPEC, budget_bytes=6 * GIB)
    record = oomguard.probe(cell="gru", seq=9, hidden=8, batch=2, threads=1, budget=budget)
    assert record.budget_bytes == 6 * GIB


def test_an_unknown_argument_is_answered_by_the_nearest() -> None:
    with pytest.raises(oomguard.MisuseError) as caught:
        oomguard.estimate(cell="lstm", seq=10, hiden=5)  # type: ignore[call-arg]
    assert str(caught.value).startswith("Unknown argument 'hiden'. Did you mean 'hidden'")


def test_fields_by_name_mean_the_same_as_a_spec_and_a_candidate() -> None:
    by_name = oomguard.estimate(cell="lstm", seq=1000, microbatch=8, segments=4, budget_bytes=GIB)
    assert by_name == oomguard.estimate(SPEC, make_candidate(SPEC, microbatch=8, segments=4), budget_bytes=GIB)


def test_without_a_candidate_the_whole_batch_goes_in_one_pass() -> None:
    assert oomguard.estimate(SPEC).candidate == Candidate(microbatch=32)


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_it_fits_exactly_from_total_and_margin_on(device: str) -> None:
    estimate = oomguard.estimate(SPEC, device=device)
    need = int(estimate.total_bytes + estimate.margin_bytes)
    at = [oomguard.estimate(SPEC, device=device, budget_bytes=size).fits for size in (need - 1, need)]
    assert at == [False, True]


@pytest.mark.parametrize(
    ("device", "allocator", "kind"),
    [("cpu", "tight", ("cpu", "onednn")), ("cpu", "system", ("cpu", "onednn")), (CARD, "system", ("cuda", "cudnn"))],
)
def test_the_margin_is_a_share_of_what_is_not_known(device: str, allocator: Any, kind: tuple[str, str]) -> None:
    estimate = oomguard.estimate(SPEC, device=device, allocator=allocator)
    rest = float(split(estimate)[1][0]) + OFFSET_BYTES
    assert estimate.margin_bytes == pytest.approx(rest * bare(*kind, allocator, "fp32", False), rel=0.01)


def test_the_budget_of_a_named_card_is_what_cuda_shows_of_it() -> None:
    assert find_budget("rtx-4090").limit_bytes == cards.card("rtx-4090").usable_bytes


def test_the_budget_of_the_cpu_is_what_the_machine_leaves() -> None:
    assert find_budget("cpu").limits[0].name == "free RAM"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts and enforces RLIMIT_DATA")
def test_what_an_rlimit_would_not_let_run_does_not_fit() -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_DATA, ({3 * GIB}, {3 * GIB}))
import oomguard
found = oomguard.estimate(cell="lstm", seq=10_000)
print(found.fits, found.budget_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(resident_within(3 * GIB, find_target("cpu")))]


def test_a_card_that_is_here_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card(name="NVIDIA A100-SXM4-40GB"))
    assert find_target("cuda") == on_card(cards.card("a100-40gb"), "cuda")


def test_the_budget_of_a_card_that_is_here_is_what_is_free_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card(free=3 * GIB))
    assert oomguard.estimate(SPEC, device="cuda").budget_bytes == 3 * GIB


def test_a_card_that_is_here_but_unknown_is_estimated_by_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card(name="NVIDIA Z9000"))
    assert find_target("cuda:0").runtime_bytes == cards.CONTEXT_BYTES["sm 8"]


def test_the_second_card_is_asked_for_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, card("GPU-aa11"), card("GPU-bb22", free=GIB))
    assert oomguard.estimate(SPEC, device="cuda:1").budget_bytes == GIB
