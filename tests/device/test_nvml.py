"""The cards by NVML: the messages without one, CUDA_VISIBLE_DEVICES, faults in NVML's answers, and a card itself."""

import os
import subprocess
import sys

import pynvml
import pytest
from device.cards import COUNT, no_driver, one_card, two_cards
from device.fake_nvml import KEPT_BYTES, answer, card, process

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device import limits, nvml
from oomguard._device.budget import Budget
from oomguard._device.cuda import Cuda

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


def budget(index: int = 0) -> Budget:
    return nvml.card_status(index).budget(f"cuda:{index}")


# without a driver


@no_driver
def test_without_a_driver_the_message_says_what_is_missing_and_what_to_do() -> None:
    with pytest.raises(MisuseError) as caught:
        budget()
    rule, _, advice = str(caught.value).partition("NVML could not be loaded ")
    assert rule == "--device cuda needs an NVIDIA driver and a card, but "
    assert (
        advice.partition("). ")[2]
        == "Use --device cpu, or name a card such as --device a100-80gb to plan for one that is not here."
    )


def test_without_the_binding_the_message_says_so(plain: pytest.MonkeyPatch) -> None:
    plain.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MisuseError, match="NVML's binding could not be imported"):
        nvml.card_status()


def test_importing_the_module_imports_neither_torch_nor_nvml() -> None:
    code = "import sys, oomguard._device.nvml; print(sorted({'torch', 'pynvml', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# which card


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, UUIDS),
        ("", []),
        ("2,0", [UUIDS[2], UUIDS[0]]),
        (" 1 , 2 ", [UUIDS[1], UUIDS[2]]),
        ("0,2,-1,1", [UUIDS[0], UUIDS[2]]),
        ("0,7,1", [UUIDS[0]]),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-cc33,GPU-aa11", [UUIDS[2], UUIDS[0]]),
        ("GPU-c", [UUIDS[2]]),
        ("GPU-a", []),
        ("GPU-cc33,0", [UUIDS[2]]),
        ("0,GPU-cc33", [UUIDS[0]]),
        ("MIG-dd44", ["MIG-dd44"]),
        ("MIG-dd44,0", ["MIG-dd44"]),
    ],
)
def test_cards_are_chosen_and_ordered_as_cuda_does(setting: str | None, shown: list[str]) -> None:
    assert nvml.visible(setting, UUIDS) == shown


def test_an_index_counts_among_the_visible_cards(plain: pytest.MonkeyPatch) -> None:
    answer(plain, *(card(uuid) for uuid in UUIDS))
    plain.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert (nvml.count(), nvml.card_status(0).uuid) == (2, UUIDS[2])


@pytest.mark.parametrize("index", [2, -1])
def test_an_index_beyond_the_cards_is_refused_with_those_there_are(plain: pytest.MonkeyPatch, index: int) -> None:
    answer(plain, *(card(uuid) for uuid in UUIDS))
    plain.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    with pytest.raises(
        MisuseError, match=r"it shows 2 under CUDA_VISIBLE_DEVICES='2,1'\. Use --device cuda:0 to cuda:1"
    ):
        budget(index)


def test_a_setting_that_hides_every_card_is_named(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    plain.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MisuseError, match="there is no card under CUDA_VISIBLE_DEVICES=''"):
        budget()


def test_cards_of_several_kinds_are_not_guessed_at(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(UUIDS[0], name="GTX 1080"), card(UUIDS[1], name="RTX 3090"))
    with pytest.raises(MisuseError, match=r"there are GTX 1080 and RTX 3090.*Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        budget()


@pytest.mark.parametrize(("name", "value"), [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "GPU-aa11")])
def test_cards_of_several_kinds_are_told_apart_by_slot_or_uuid(
    plain: pytest.MonkeyPatch, name: str, value: str
) -> None:
    answer(plain, card(UUIDS[0], name="GTX 1080"), card(UUIDS[1], name="RTX 3090"))
    plain.setenv(name, value)
    assert nvml.card_status().name == "GTX 1080"


# how much


def test_the_budget_is_the_card_less_what_the_driver_keeps_and_others_hold(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=12 * GIB, processes=[process(4711, 3 * GIB)]))
    assert budget().limit_bytes == 12 * GIB


def test_what_the_driver_keeps_is_no_part_of_the_card(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    assert budget().binding.limit_bytes == 16 * GIB - KEPT_BYTES


def test_what_this_process_holds_is_not_lost_to_it(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, processes=[process(os.getpid(), GIB), process(4711, 3 * GIB)]))
    limit = budget()
    assert (limit.limit_bytes, limit.left_bytes) == (11 * GIB, 10 * GIB)


def test_what_another_process_holds_is_told_by_its_number(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(processes=[process(4711, 3 * GIB), process(4712, GIB)]))
    assert [Cuda(0).held(pid) for pid in (4711, 4712, 1)] == [3 * GIB, GIB, 0]


def test_the_source_names_who_else_holds_memory(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, processes=[process(os.getpid(), GIB), process(4711, 3 * GIB)]))
    assert budget().binding.source == "NVML on A, where process (4711) holds 3.00 GiB"


def test_a_process_that_computes_and_draws_counts_once(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, processes=[process(os.getpid(), GIB)]))
    assert nvml.card_status().own_bytes == GIB


def test_where_processes_are_not_told_apart_all_that_is_used_counts_as_taken(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, processes=[process(os.getpid(), None)]))
    assert budget().limit_bytes == 10 * GIB


def test_where_processes_may_not_be_listed_all_that_is_used_counts_as_taken(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, faults={"processes": pynvml.NVML_ERROR_NO_PERMISSION}))
    assert budget().limit_bytes == 10 * GIB


def test_an_older_driver_answers_too(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, faults={"memory v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}))
    assert budget().limit_bytes == 10 * GIB


def test_a_card_without_memory_of_its_own_has_the_hosts_budget(plain: pytest.MonkeyPatch) -> None:
    missing = dict.fromkeys(("memory v1", "memory v2"), pynvml.NVML_ERROR_NOT_SUPPORTED)
    answer(plain, card(faults=missing))
    names = [limit.name for limit in budget().limits]
    assert names == [limit.name for limit in limits.budget().limits]


def test_a_card_that_is_lost_is_a_message_not_a_traceback_of_nvml(plain: pytest.MonkeyPatch) -> None:
    lost = dict.fromkeys(("memory v1", "memory v2"), pynvml.NVML_ERROR_GPU_IS_LOST)
    answer(plain, card(faults=lost))
    with pytest.raises(MisuseError, match=r"NVML failed \(GPU is lost"):
        budget()


@pytest.mark.parametrize("setting", [None, "MIG-dd44", "GPU-aa11"])
def test_of_a_divided_card_the_part_counts(plain: pytest.MonkeyPatch, setting: str | None) -> None:
    answer(plain, card(parts=[card("MIG-dd44", total=5 * GIB, free=4 * GIB)]))
    if setting is not None:
        plain.setenv("CUDA_VISIBLE_DEVICES", setting)
    status = nvml.card_status()
    assert (status.uuid, status.free_bytes, status.compute_capability) == ("MIG-dd44", 4 * GIB, (8, 0))


# on a card


@pytest.mark.gpu
@one_card
def test_the_name_is_the_one_torch_gives() -> None:
    import torch

    assert nvml.card_status().name == torch.cuda.get_device_name(0)


@pytest.mark.gpu
@one_card
def test_the_compute_capability_is_the_one_torch_gives() -> None:
    import torch

    assert nvml.card_status().compute_capability == torch.cuda.get_device_capability(0)


@pytest.mark.gpu
@one_card
def test_the_whole_card_is_what_torch_calls_its_total_memory() -> None:
    import torch

    total_bytes = torch.cuda.get_device_properties(0).total_memory
    assert budget().binding.limit_bytes == pytest.approx(total_bytes, rel=0.02)


@pytest.mark.gpu
@one_card
def test_what_is_left_is_what_torch_calls_free() -> None:
    import torch

    torch.ones(1, device="cuda")  # makes the context
    assert budget().left_bytes == pytest.approx(torch.cuda.mem_get_info(0)[0], abs=256 * MIB)


@pytest.mark.gpu
@one_card
def test_a_tensor_on_the_card_does_not_shrink_this_processs_budget() -> None:
    import torch

    torch.ones(1, device="cuda")  # makes the context
    before = budget().limit_bytes
    kept = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    if nvml.card_status().own_bytes == 0:
        pytest.skip("NVML does not say here what this process holds")
    assert budget().limit_bytes == pytest.approx(before, abs=256 * MIB)
    assert kept.is_cuda


@pytest.mark.gpu
@one_card
def test_there_are_as_many_cards_as_torch_shows() -> None:
    import torch

    assert torch.cuda.device_count() == COUNT


@pytest.mark.gpu
@two_cards
def test_cards_in_another_order_are_those_that_torch_shows() -> None:
    code = (
        "import torch; from oomguard._device import nvml; "
        "print(*(torch.cuda.get_device_properties(i).uuid for i in (0, 1))); "
        "print(*(nvml.card_status(i).uuid.removeprefix('GPU-') for i in (0, 1)))"
    )
    order = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | order, capture_output=True, text=True, check=True
    )
    torchs, ours = run.stdout.splitlines()
    assert torchs == ours
