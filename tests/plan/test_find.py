"""From a question to a plan: what can be asked, what it is asked of, and how much memory that may use."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from device.child import child
from search.machine import TITLE, Machine
from search.rig import Rig
from strategies import attempt, has_three_beats

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.target import resident_within
from oomguard._plan import find
from oomguard._plan.find import Question
from oomguard._search.run import Limits
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

GRU = Spec(cell="gru", seq=1000, hidden=128, batch=64)
FIXED: dict[str, Any] = {"threads": 2, "allocator": "tight"}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(machine=Machine(ratio=1.02)).install(monkeypatch)


# questions


def test_a_fixed_allocator_of_version_0_1_has_its_present_name() -> None:
    assert Question(spec=GRU, fixed={"allocator": "roomy", "threads": 1}).fixed == {"allocator": "fast", "threads": 1}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"devices": ()}, "--device takes one device, or several that are here"),
        ({"devices": ("t4", "t4")}, "--device takes one device, or several that are here, but got 't4,t4'"),
        ({"devices": ("cpu", "t4")}, "Write it as cpu, cuda, a100-80gb or cuda:0,cuda:1."),
        ({"devices": ("cpu", "cuda:x")}, "takes the card's number"),
        ({"maximize": ()}, "--maximize takes one aim or several different ones, but got ''"),
        ({"maximize": ("seq", "seq")}, "but got 'seq,seq'. Write it as throughput or throughput,seq."),
        (
            {"maximize": ("sequence",)},
            "must be one of batch, throughput, microbatch, seq, but got 'sequence'. Did you mean seq?",
        ),
        ({"allow": ("bf16",)}, "--allow takes precision, window, 8bit, or none, but got 'bf16'"),
        ({"fixed": {"precision": "bf16"}, "allow": ()}, "A lossy knob is turned only if it is allowed"),
        ({"fixed": {"window": 10}}, "got --window and not --allow window"),
        ({"fixed": {"accumulation": 4}}, "the accumulation follows from the microbatch"),
        ({"fixed": {"segment": 4}}, "Did you mean segments"),
        ({"fixed": {"microbatch": 65}}, "--microbatch must not be larger than --batch, but got 65 of 64"),
        ({"fixed": {"microbatch": 0}}, "--microbatch must be a whole number from 1 to 1,048,576, but got 0"),
        ({"fixed": {"microbatch": "4"}}, "--microbatch must be a whole number"),
        ({"fixed": {"segments": 1001}}, "--segments must be a whole number from 1 to 1,000, but got 1,001"),
        ({"fixed": {"segments": 2, "window": 10}, "allow": ("window",)}, "either segments or a window"),
        ({"fixed": {"levels": 2, "recompute": False}}, "--levels is for segments"),
        ({"fixed": {"engine": "cublas"}}, "--engine must be one of"),
        ({"limits": Limits(max_probes=0)}, "--max-probes must be a whole number from 1"),
        ({"limits": Limits(seconds=0)}, "The time limit of a search must be more than 0"),
        ({"limits": Limits(seconds=float("nan"))}, "The time limit of a search must be more than 0"),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_answered_is_refused(asked: dict[str, Any], message: str) -> None:
    error = attempt(lambda: Question(spec=GRU, **asked) and None)
    assert has_three_beats(error)
    assert message in str(error)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, 1 << 61])
def test_a_budget_is_a_whole_number_of_bytes(budget: Any) -> None:
    error = attempt(lambda: oomguard.find_feasible_config(GRU, device="t4", budget=budget) and None)
    assert has_three_beats(error)
    assert "--budget must be a whole number from 1 to" in str(error)


@pytest.mark.parametrize("budget", ["6 parsecs", ""])
def test_a_budget_in_words_is_a_size(budget: str) -> None:
    assert has_three_beats(attempt(lambda: oomguard.find_feasible_config(GRU, device="t4", budget=budget) and None))


@pytest.mark.parametrize("engine", ["onednn", "cudnn"])
def test_an_engine_that_the_device_does_not_have_is_refused(engine: Any, rig: Rig) -> None:
    device = "t4" if engine == "onednn" else "cpu"
    error = attempt(lambda: oomguard.find_feasible_config(GRU, device=device, engine=engine) and None)
    assert has_three_beats(error)
    assert f"but got --engine {engine}" in str(error)
    assert rig.records == []


@pytest.mark.parametrize("name", ["device", "maximize", "allow"])
@pytest.mark.parametrize("value", [None, 3, [None], b"seq"], ids=str)
def test_what_is_no_word_is_told(name: str, value: Any) -> None:
    error = attempt(lambda: oomguard.find_feasible_config(GRU, **{name: value}) and None)
    assert has_three_beats(error)
    assert f"--{name} takes a name, or several, but got {value!r}" in str(error)


def test_a_time_limit_is_seconds_or_a_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(find, "find_plan", lambda question, *_: asked.append(question.limits.seconds))
    for timeout in (300.0, "5min", "300"):
        oomguard.find_feasible_config(GRU, timeout=timeout)
    assert asked == [300.0] * 3


@pytest.mark.parametrize("timeout", ["soon", None, 0])
def test_what_is_no_time_is_told(timeout: Any) -> None:
    assert has_three_beats(attempt(lambda: oomguard.find_feasible_config(GRU, timeout=timeout) and None))


def test_words_are_taken_as_a_list_or_with_commas() -> None:
    listed = oomguard.find_feasible_config(GRU, device="t4", maximize=["throughput", "seq"], allow=())
    written = oomguard.find_feasible_config(GRU, device="t4", maximize="throughput, seq", allow="none")
    assert listed == written


# a card by its name


@pytest.mark.parametrize("device", ["t4", "a100-80gb", "A100 80GB"])
def test_a_card_by_its_name_gives_a_plan_by_arithmetic(device: str) -> None:
    plan = oomguard.find_feasible_config(GRU, device=device)
    assert (plan.record, plan.records, plan.probes, plan.ended) == (None, (), 0, "estimate")
    assert plan.budget_bytes == find_budget(device).limit_bytes
    assert plan.expected.peak_bytes + plan.expected.margin_bytes <= plan.budget_bytes
    assert plan.environment.title == plan.where.device
    assert plan.environment.driver is None


@pytest.mark.parametrize(("device", "half"), [("t4", "fp16"), ("a100-80gb", "bf16"), ("p100", "fp32")])
def test_where_memory_is_short_a_card_computes_in_the_half_precision_that_it_has(device: str, half: str) -> None:
    plan = oomguard.find_feasible_config(Spec(cell="lstm", seq=5000), device=device, budget="650MiB")
    assert plan.candidate.precision == half


@pytest.mark.parametrize("device", ["t4", "a100-80gb"])
def test_the_longest_sequences_stay_in_fp32_unless_half_precision_allows_a_tenth_more(device: str) -> None:
    plan = oomguard.find_feasible_config(cell="lstm", device=device, maximize="seq", step_time="30s")
    assert plan.candidate.precision == "fp32"  # time ends them, not memory
    assert plan.reach is not None
    assert (plan.reach.bound, plan.reach.step_seconds, plan.reach.steps) == ("step-time", 30.0, plan.spec.steps)
    whole = oomguard.find_feasible_config(cell="lstm", device=device, maximize="seq", step_time="1h", segments=1)
    assert whole.reach is not None
    assert whole.reach.bound == "memory"


@pytest.mark.parametrize("device", ["t4", "a100-80gb"])
def test_where_fp32_fits_in_segments_nothing_is_lost_for_less_than_a_tenth_of_the_time(device: str) -> None:
    plan = oomguard.find_feasible_config(Spec(cell="lstm", seq=5000), device=device, budget="1GiB")
    assert (plan.plain.fits, plan.candidate.precision) == (False, "fp32")


@pytest.mark.parametrize("device", ["t4", "a100-80gb"])
def test_where_the_plain_step_fits_nothing_is_lost_for_an_advantage_that_nobody_measured(device: str) -> None:
    plan = oomguard.find_feasible_config(Spec(cell="lstm", seq=5000), device=device)
    assert plan.candidate.precision == "fp32"


def test_the_same_question_has_the_same_answer() -> None:
    assert oomguard.find_feasible_config(GRU, device="t4") == oomguard.find_feasible_config(GRU, device="t4")


# the budget


def test_without_a_budget_it_is_what_is_free(rig: Rig) -> None:
    rig.free_bytes = 500 * MIB
    plan = oomguard.find_feasible_config(GRU, **FIXED)
    assert (plan.budget_bytes, plan.asked_budget_bytes) == (500 * MIB, None)


def test_a_budget_that_is_free_is_taken(rig: Rig) -> None:
    plan = oomguard.find_feasible_config(GRU, budget="420MiB", **FIXED)
    assert (plan.budget_bytes, plan.asked_budget_bytes) == (420 * MIB, 420 * MIB)
    assert plan.peak_bytes <= 420 * MIB


def test_of_a_larger_budget_than_is_free_only_that_is_taken_and_both_are_told(rig: Rig) -> None:
    rig.free_bytes = 420 * MIB
    plan = oomguard.find_feasible_config(GRU, budget=64 * GIB, **FIXED)
    assert (plan.budget_bytes, plan.asked_budget_bytes) == (420 * MIB, 64 * GIB)
    assert all(record.budget_bytes <= 420 * MIB for record in plan.records)


def test_of_a_larger_budget_than_a_card_has_only_that_is_taken() -> None:
    plan = oomguard.find_feasible_config(GRU, device="t4", budget=64 * GIB)
    assert (plan.budget_bytes, plan.asked_budget_bytes) == (find_budget("t4").limit_bytes, 64 * GIB)


def test_committed_bytes_that_are_limited_lower_the_budget(rig: Rig) -> None:
    rig.committed_bytes = 700 * MIB
    plan = oomguard.find_feasible_config(GRU, **FIXED)
    assert plan.budget_bytes == resident_within(700 * MIB, find_target("cpu")) < 700 * MIB
    assert plan.ooms == 0


def test_an_inherited_rlimit_lowers_what_is_free() -> None:
    code = f"""
import resource
from oomguard._probe.runner import Runner
from oomguard._search.run import usable_bytes
before = usable_bytes(Runner("cpu").free())
resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {GIB}))
print(before, usable_bytes(Runner("cpu").free()))
"""
    before, after = map(int, child(code).split())
    assert after <= resident_within(GIB, find_target("cpu"))
    assert after <= before


# what is told


def test_a_plan_says_where_it_was_made(rig: Rig) -> None:
    plan = oomguard.find_feasible_config(GRU, **FIXED)
    environment = plan.environment
    assert (environment.oomguard, environment.title, environment.device, environment.cores) == (
        oomguard.__version__,
        TITLE,
        "cpu",
        2,
    )
    assert environment.library == "formulas 1.0"
    assert environment.limits
    assert plan.fixed == FIXED
    assert plan.exports["MALLOC_MMAP_THRESHOLD_"]


def test_the_search_is_limited_as_asked(rig: Rig) -> None:
    plan = oomguard.find_feasible_config(GRU, max_probes=1)
    assert (plan.probes, plan.ended) == (1, "max-probes")


def test_devices_of_two_kinds_do_not_search_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = iter(["one", "another"] * 9)
    monkeypatch.setattr("oomguard._device.cpu.cpu_name", lambda: next(titles))
    with pytest.raises(MisuseError, match="must be different ones of one kind"):
        oomguard.find_feasible_config(GRU, device="cpu,cpu")


@pytest.mark.parametrize("ledger", ["", "file/inside"])
def test_a_ledger_that_cannot_be_written_is_refused_before_anything_is_run(
    rig: Rig, ledger: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert has_three_beats(attempt(lambda: oomguard.find_feasible_config(GRU, ledger=ledger) and None))
    assert rig.records == []


def test_another_budget_is_another_search_in_the_same_ledger_but_its_records_count(rig: Rig, tmp_path: Any) -> None:
    asked = {"spec": GRU, "ledger": str(tmp_path), "max_probes": 3, **FIXED}
    first = oomguard.find_feasible_config(**asked, budget=500 * MIB)
    second = oomguard.find_feasible_config(**asked, budget=400 * MIB)
    assert all(record in second.records for record in first.records)
    assert second.peak_bytes <= 400 * MIB


# the largest batch

LARGEST: dict[str, Any] = {"cell": "gru", "seq": 200, "hidden": 128, "segments": 1, "budget": 900 * MIB, **FIXED}


def true_batch(rig: Rig, plan: oomguard.Plan) -> int:
    """The largest batch of the plan's model that stays within the budget, in one pass."""
    sizes = range(plan.spec.batch, 2 * plan.spec.batch)
    one_pass = ((msgspec.structs.replace(plan.spec, batch=size), size) for size in sizes)
    knobs = {name: getattr(plan.candidate, name) for name in ("segments", "threads", "allocator", "engine")}
    fits = [
        size
        for spec, size in one_pass
        if rig.machine.peak_bytes(spec, make_candidate(spec, **knobs)) <= plan.budget_bytes
    ]
    return max(fits, default=0)


@pytest.mark.parametrize("aim", ["batch", "microbatch"])
def test_without_a_batch_the_largest_one_has_no_bound(rig: Rig, aim: str) -> None:
    plan = oomguard.find_feasible_config(**LARGEST, maximize=aim)
    assert (plan.spec.batch, plan.candidate.accumulation) == (plan.candidate.microbatch, 1)
    assert plan.spec.batch >= 0.95 * true_batch(rig, plan) > 32
    assert plan.record is not None
    assert (plan.record.spec, plan.record.candidate) == (plan.spec, plan.candidate)
    assert plan.ooms == 0
    assert plan.probes <= 4


def test_beside_throughput_the_largest_batch_has_no_bound_either(rig: Rig) -> None:
    alone = oomguard.find_feasible_config(**LARGEST, maximize="batch")
    plan = oomguard.find_feasible_config(**LARGEST, maximize="throughput,batch")
    assert plan.spec.batch == alone.spec.batch > 32
    assert plan.maximize == ("throughput", "microbatch")
    assert max(point.candidate.microbatch for point in plan.front) >= 0.95 * plan.spec.batch
    assert plan.ooms == 0


def test_a_given_batch_bounds_the_microbatch(rig: Rig) -> None:
    questions: list[dict[str, Any]] = [{"batch": 48}, {"spec": Spec(cell="gru", seq=200, hidden=128)}]
    for asked in questions:
        fields = {name: value for name, value in LARGEST.items() if "spec" not in asked or name in ("budget", *FIXED)}
        plan = oomguard.find_feasible_config(**fields | asked, maximize="batch")
        assert plan.candidate.microbatch == plan.spec.batch == asked.get("batch", 32)


def test_a_search_for_the_largest_batch_that_was_cut_off_goes_on(rig: Rig, tmp_path: Path) -> None:
    oomguard.find_feasible_config(**LARGEST, maximize="batch", ledger=str(tmp_path), max_probes=1)
    again = oomguard.find_feasible_config(**LARGEST, maximize="batch", ledger=str(tmp_path))
    whole = oomguard.find_feasible_config(**LARGEST, maximize="batch")
    assert (again.spec, again.candidate, again.probes) == (whole.spec, whole.candidate, whole.probes)


def test_the_largest_batch_for_a_card_that_is_not_here_is_found_by_arithmetic() -> None:
    plan = oomguard.find_feasible_config(cell="lstm", seq=500, device="t4", maximize="batch", segments=1)
    assert oomguard.estimate(plan.spec, plan.candidate, device="t4").fits
    larger = msgspec.structs.replace(plan.spec, batch=round(1.05 * plan.spec.batch))
    knobs: dict[str, Any] = {"precision": plan.candidate.precision, "keep": plan.candidate.keep}
    assert not oomguard.estimate(larger, **knobs, device="t4").fits


def test_a_time_of_a_step_is_for_the_longest_sequences() -> None:
    error = attempt(lambda: oomguard.find_feasible_config(GRU, step_time="30s") and None)
    assert has_three_beats(error)
    assert "got --step-time and no --maximize seq" in str(error)
    with pytest.raises(MisuseError, match="The plan of a task does not take step_time"):
        oomguard.find_feasible_config("package.module:task", step_time="30s")


def test_the_longest_sequences_have_been_run(rig: Rig) -> None:
    plan = oomguard.find_feasible_config(cell="lstm", maximize="seq", step_time="20s", budget="8GiB")
    assert plan.confirmed
    assert plan.seconds_per_step is not None
    assert plan.seconds_per_step <= 20
    assert plan.reach is not None
    assert plan.reach.bound == "step-time"
    assert plan.reach.steps >= plan.spec.steps > 0.8 * plan.reach.steps


def test_the_longest_sequences_need_no_length_to_begin_with(rig: Rig) -> None:
    fields: dict[str, Any] = {"cell": "gru", "hidden": 128, "budget": 480 * MIB, "threads": 1}
    plan = oomguard.find_feasible_config(**fields, maximize="seq")
    assert plan.spec.steps > 10_000
    assert plan.ooms == 0
