"""A card as a device, on a card: any one that CUDA shows. Sizes are small beside a card of 4 GiB."""

import sys
from collections.abc import Callable

import pytest
from device.cards import COUNT, NEAR_BYTES, hold, near, one_card, two_cards
from device.child import BIG_BYTES, child

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._device.cuda import EXPANDABLE, MOST_CONTEXTS, Cuda
from oomguard._device.find import open_device
from oomguard._spec.candidate import Candidate

pytestmark = [pytest.mark.gpu, one_card]


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which NVML's binding cannot be imported."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return monkeypatch


# opening


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_card_is_opened_by_its_name(name: str) -> None:
    assert open_device(name) == Cuda(0)


@pytest.mark.parametrize("blind", [False, True])
def test_a_card_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch, blind: bool) -> None:
    if blind:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MisuseError, match=f"cuda:{COUNT} must be a card that CUDA shows, but it shows {COUNT}"):
        open_device(f"cuda:{COUNT}")


def test_opening_a_card_and_asking_its_budget_imports_no_torch() -> None:
    code = "import sys; from oomguard._device.find import open_device; card = open_device('cuda'); card.budget(); "
    code += "card.title(); card.precisions(); print('torch' in sys.modules)"
    assert child(code) == "False"


# the budget


def test_the_budget_is_no_more_than_the_card(cuda: Cuda) -> None:
    budget = cuda.budget()
    assert (budget.device, budget.binding.name) == ("cuda:0", "card memory")
    assert GIB < budget.limit_bytes <= budget.binding.limit_bytes


def test_what_this_process_holds_is_not_lost_to_it(cuda: Cuda) -> None:
    before = cuda.budget()
    kept = hold(BIG_BYTES)
    after = cuda.budget()
    assert near(after.limit_bytes, before.limit_bytes)
    assert near(before.left_bytes - after.left_bytes, BIG_BYTES)
    del kept


def test_what_a_neighbour_takes_is_lost(cuda: Cuda, neighbour: Callable[[int], None]) -> None:
    before = cuda.budget()
    neighbour(BIG_BYTES)
    after = cuda.budget()
    lost_bytes = before.limit_bytes - after.limit_bytes
    assert BIG_BYTES - NEAR_BYTES < lost_bytes < BIG_BYTES + MOST_CONTEXTS * cuda.status().known.context_bytes


def test_a_neighbour_that_leaves_gives_the_budget_back(cuda: Cuda, neighbour: Callable[[int], None]) -> None:
    before = cuda.budget()
    neighbour(BIG_BYTES)
    neighbour(0)
    assert near(cuda.budget().limit_bytes, before.limit_bytes)


def test_a_neighbour_is_no_part_of_what_this_process_uses(cuda: Cuda, neighbour: Callable[[int], None]) -> None:
    before = cuda.reading()
    neighbour(BIG_BYTES)
    assert near(cuda.reading().now_bytes, before.now_bytes)


def test_without_nvml_the_budget_is_what_cuda_shows(cuda: Cuda, no_nvml: pytest.MonkeyPatch) -> None:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    budget = cuda.budget()
    assert budget.binding.source.startswith("torch.cuda.mem_get_info on ")
    assert budget.binding.limit_bytes == total_bytes
    assert near(budget.left_bytes, free_bytes)
    no_nvml.undo()
    assert cuda.budget().binding.source.startswith("NVML on ")


def test_without_nvml_what_this_process_holds_is_not_lost_to_it(cuda: Cuda, no_nvml: pytest.MonkeyPatch) -> None:
    before = cuda.budget()
    kept = hold(BIG_BYTES)
    assert near(cuda.budget().limit_bytes, before.limit_bytes)
    del kept
    no_nvml.undo()


@pytest.mark.parametrize("blind", [False, True])
def test_the_card_is_the_one_torch_shows(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, blind: bool) -> None:
    import torch

    if blind:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    about = torch.cuda.get_device_properties(0)
    assert (cuda.title(), cuda.status().compute_capability) == (about.name, (about.major, about.minor))
    assert ("bf16" in cuda.precisions()) == (about.major >= 8)


# readings


def test_the_peak_is_the_largest_even_if_it_is_given_back(cuda: Cuda) -> None:
    hold(BIG_BYTES)
    cuda.release()
    reading = cuda.reading()
    assert near(reading.peak_bytes - reading.now_bytes, BIG_BYTES)
    assert reading.allocated_bytes is not None
    assert reading.reserved_bytes is not None
    assert BIG_BYTES <= reading.allocated_bytes <= reading.reserved_bytes <= reading.peak_bytes


def test_a_reset_forgets_the_peak_before_it(cuda: Cuda) -> None:
    hold(BIG_BYTES)
    cuda.release()
    cuda.reset()
    reading = cuda.reading()
    assert reading.peak_bytes == reading.now_bytes
    assert reading.allocated_bytes is not None
    assert reading.allocated_bytes < NEAR_BYTES


def test_the_peak_counts_the_context_as_the_card_does(cuda: Cuda) -> None:
    kept = hold(BIG_BYTES)
    reading, own_bytes = cuda.reading(), cuda.status().own_bytes
    if not own_bytes:
        pytest.skip("NVML does not say here what this process holds")
    assert near(reading.now_bytes, own_bytes)
    assert reading.runtime_bytes > 0
    del kept


def test_without_nvml_the_context_is_what_nobody_else_uses_or_the_usual(
    cuda: Cuda, no_nvml: pytest.MonkeyPatch
) -> None:
    runtime_bytes = cuda.reading().runtime_bytes
    no_nvml.undo()
    assert 0 < runtime_bytes <= MOST_CONTEXTS * cuda.status().known.context_bytes


def test_where_nvml_lists_no_process_the_context_is_what_nobody_else_uses_or_the_usual(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("Compute", "Graphics"):
        monkeypatch.setattr(f"pynvml.nvmlDeviceGet{kind}RunningProcesses", lambda handle: [])
    runtime_bytes = cuda.reading().runtime_bytes
    assert cuda.status().holders == ()
    assert 0 < runtime_bytes <= MOST_CONTEXTS * cuda.status().known.context_bytes


def test_without_nvml_a_neighbour_that_is_not_listed_is_not_taken_for_the_context(
    cuda: Cuda, neighbour: Callable[[int], None], no_nvml: pytest.MonkeyPatch
) -> None:
    usual_bytes = cuda.status().known.context_bytes
    neighbour(MOST_CONTEXTS * usual_bytes)
    assert cuda.reading().runtime_bytes == usual_bytes
    no_nvml.undo()


def test_committed_bytes_are_the_hosts(cuda: Cuda) -> None:
    reading = cuda.reading()
    assert (reading.committed_bytes, reading.committed_peak_bytes, reading.swapped_bytes) == (None, None, 0)


# the rest


def test_releasing_empties_the_cache(cuda: Cuda) -> None:
    before = cuda.reading().now_bytes
    hold(BIG_BYTES)
    kept_bytes = cuda.reading().now_bytes - before
    cuda.release()
    assert near(kept_bytes, BIG_BYTES)
    assert near(cuda.reading().now_bytes, before)


def test_after_waiting_nothing_is_left_to_do(cuda: Cuda) -> None:
    import torch

    hold(BIG_BYTES)
    cuda.wait()
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize(("engine", "enabled"), [(None, True), ("cudnn", True), ("native", False)])
def test_the_engine_is_switched_in_the_running_process(cuda: Cuda, engine: str | None, enabled: bool) -> None:
    import torch

    cuda.settle(Candidate(microbatch=1, engine=engine, threads=1))  # type: ignore[arg-type]
    is_enabled = torch.backends.cudnn.enabled
    cuda.settle(Candidate(microbatch=1))
    assert (is_enabled, torch.get_num_threads()) == (enabled, 1)


def test_the_users_settings_reach_the_allocator_with_ours() -> None:
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    code = "from oomguard._device.cuda import Cuda; from oomguard._spec.candidate import Candidate; "
    code += "candidate = Candidate(microbatch=1, allocator='expandable'); "
    code += "print(Cuda(0).environment(candidate, 'cudnn')['PYTORCH_CUDA_ALLOC_CONF'])"
    settings = child(code, **own)
    both = dict.fromkeys(own, settings)
    effective = child("import torch; print(torch._C._accelerator_getAllocatorSettings())", **both)
    assert effective == f"max_split_size_mb:64,{EXPANDABLE}"


@two_cards
def test_two_cards_are_two_devices(cuda: Cuda) -> None:
    other = Cuda(1)
    hold(1, 1)
    other.reset()
    before = other.reading()
    other.enforce(0)
    kept = hold(BIG_BYTES)
    other.unlimit()
    assert other.reading().peak_bytes == before.peak_bytes
    assert cuda.reading().peak_bytes - other.reading().peak_bytes > BIG_BYTES // 2
    assert cuda.status().uuid != other.status().uuid
    del kept
