"""Opening a device by name, what can be asked of a card without torch, and the overview of all devices."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from device.cards import BUILT, DRIVER, built, no_driver, not_built
from device.child import child
from device.fake_nvml import answer, card, fail, process

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device import cuda, find
from oomguard._device.cpu import Cpu
from oomguard._device.cuda import EXPANDABLE, SETTINGS, Cuda
from oomguard._device.find import NO_CUDA, card_index, find_target, open_device, present_devices
from oomguard._estimate import cards
from oomguard._spec.candidate import Candidate

# by name


def test_the_cpu_is_opened_by_its_name() -> None:
    assert open_device("cpu") == Cpu()


@pytest.mark.parametrize(("name", "meant"), [("gpu", "cuda"), ("CPU", "cpu")])
def test_a_device_that_is_nearly_named_is_asked_back(name: str, meant: str) -> None:
    with pytest.raises(MisuseError, match=f"Did you mean {meant}?"):
        open_device(name)


@pytest.mark.parametrize("name", ["a100-80gb", ""])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(MisuseError, match="A run needs a device that is here: cpu, cuda or cuda:1"):
        open_device(name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "cuda:1234"])
def test_a_card_without_a_number_is_refused(name: str) -> None:
    with pytest.raises(MisuseError, match="takes the card's number"):
        card_index(name)


@not_built
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_without_a_cuda_build_the_message_says_so(name: str) -> None:
    with pytest.raises(MisuseError, match="needs a CUDA build of torch, but the torch installed here is built without"):
        open_device(name)


@built
@no_driver
def test_without_a_driver_the_message_says_so() -> None:
    with pytest.raises(MisuseError, match="needs an NVIDIA driver and a card, but NVML could not be loaded"):
        open_device("cuda")


def test_the_build_is_known_without_importing_torch() -> None:
    code = "import sys; from oomguard._device.cuda import built_for_cards; before = built_for_cards(); "
    code += "print('torch' in sys.modules); import torch; print(before == (torch.backends.cuda.is_built()))"
    assert child(code).split() == ["False", "True"]


def test_opening_the_cpu_and_reading_it_imports_no_torch() -> None:
    code = "import sys; from oomguard._device.find import open_device; cpu = open_device('cpu'); cpu.reset(); "
    code += "cpu.reading(); cpu.budget(); cpu.enforce(1 << 40); cpu.release(); cpu.wait(); "
    code += "print('torch' in sys.modules)"
    assert child(code) == "False"


# a card without torch


def test_a_card_is_named_and_sized_through_nvml_alone(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(name="NVIDIA L4", free=10 * GIB, processes=[process(4711, 3 * GIB)]))
    device = Cuda(0)
    assert (device.name, device.title()) == ("cuda:0", "NVIDIA L4")
    assert device.budget().limit_bytes == 10 * GIB


def test_what_torch_reserved_is_not_lost_where_processes_are_not_listed(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB))
    assert Cuda(0).status().budget("cuda:0", 2 * GIB).limit_bytes == 12 * GIB


def test_what_nvml_lists_and_what_torch_reserved_are_not_added_up(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(free=10 * GIB, processes=[process(os.getpid(), 3 * GIB)]))
    assert Cuda(0).status().budget("cuda:0", 2 * GIB).limit_bytes == 13 * GIB


@pytest.mark.parametrize(
    ("capability", "precisions"),
    [((5, 2), ("fp32",)), ((7, 5), ("fp32", "fp16")), ((8, 0), ("fp32", "bf16", "fp16"))],
)
def test_the_capability_tells_what_a_card_computes_in(
    plain: pytest.MonkeyPatch, capability: tuple[int, int], precisions: tuple[str, ...]
) -> None:
    answer(plain, card(capability=capability))
    assert Cuda(0).precisions() == precisions


def test_a_card_is_known_by_its_name_but_for_its_capability(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card(name="NVIDIA A100-SXM4-40GB", capability=(9, 0)))
    known = Cuda(0).status().known
    assert (known.name, known.context_bytes) == ("a100-40gb", cards.CONTEXT_BYTES["from sm 9"])


def test_the_driver_is_the_one_that_nvml_names(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    plain.setattr("pynvml.nvmlSystemGetDriverVersion", lambda: "550.54.15")
    assert Cuda(0).driver() == "550.54.15"


def test_without_nvml_nobody_names_the_driver(plain: pytest.MonkeyPatch) -> None:
    plain.setitem(sys.modules, "pynvml", None)
    assert Cuda(0).driver() is None


def test_a_driver_that_does_not_tell_its_version_is_not_named(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    plain.setattr("pynvml.nvmlSystemGetDriverVersion", lambda: fail(pynvml.NVML_ERROR_UNKNOWN))
    assert Cuda(0).driver() is None


@pytest.mark.parametrize(
    ("number", "name"),
    [(7605, "cuDNN 7.6.5"), (8907, "cuDNN 8.9.7"), (90100, "cuDNN 9.1.0"), (91002, "cuDNN 9.10.2"), (None, None)],
)
def test_the_library_is_named_with_its_version(plain: pytest.MonkeyPatch, number: int | None, name: str | None) -> None:
    torch = SimpleNamespace(backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: number)))
    plain.setattr(cuda, "_torch", lambda: torch)
    assert Cuda(0).library() == name


# the environment


@pytest.mark.parametrize("allocator", [None, "system", "tight"])
def test_only_expandable_segments_need_an_environment(allocator: Any) -> None:
    assert Cuda(0).environment(Candidate(microbatch=1, allocator=allocator), "cudnn") == {}


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({}, EXPANDABLE),
        ({SETTINGS[0]: "max_split_size_mb:64"}, f"max_split_size_mb:64,{EXPANDABLE}"),
        ({SETTINGS[1]: "max_split_size_mb:64"}, f"max_split_size_mb:64,{EXPANDABLE}"),
        ({SETTINGS[0]: "a:1", SETTINGS[1]: "b:2"}, f"a:1,{EXPANDABLE}"),
        ({SETTINGS[0]: "", SETTINGS[1]: "b:2"}, f"b:2,{EXPANDABLE}"),
    ],
)
def test_expandable_segments_are_added_to_the_users_settings(
    plain: pytest.MonkeyPatch, own: dict[str, str], wanted: str
) -> None:
    for name in SETTINGS:
        plain.delenv(name, raising=False)
    for name, value in own.items():
        plain.setenv(name, value)
    environment = Cuda(0).environment(Candidate(microbatch=1, allocator="expandable"), "cudnn")
    assert environment == dict.fromkeys(SETTINGS, wanted)


# all of them


@no_driver
def test_without_a_driver_only_the_cpu_is_present_and_a_note_says_why() -> None:
    devices, note = present_devices()
    assert [device.name for device in devices] == ["cpu"]
    assert note is not None
    assert "NVML could not be loaded" in note


def test_the_note_on_hidden_cards_names_what_hides_them(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    plain.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "there is no card under CUDA_VISIBLE_DEVICES=''" in (present_devices()[1] or "")


def test_the_note_tells_whether_torch_can_use_the_cards(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card())
    assert present_devices()[1] == (None if BUILT else NO_CUDA)


def test_every_card_is_present_with_its_precisions(plain: pytest.MonkeyPatch) -> None:
    answer(plain, card("GPU-aa11"), card("GPU-bb22"))
    assert [device.precisions() for device in present_devices()[0][1:]] == [("fp32", "bf16", "fp16")] * 2


@pytest.mark.skipif(BUILT and not DRIVER, reason="without NVML, a CUDA build of torch is asked for the cards")
def test_finding_the_devices_imports_no_torch() -> None:
    code = "import sys; from oomguard._device.find import present_devices; present_devices(); "
    code += "print('torch' in sys.modules)"
    assert child(code) == "False"


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("A100 80GB", "a100-80gb")])
def test_a_target_is_found_by_any_spelling_of_its_name(name: str, device: str) -> None:
    assert find_target(name).device == device


@pytest.mark.parametrize(("built", "runtime_bytes"), [(False, 318 * MIB), (True, 682 * MIB)])
def test_a_build_for_cuda_needs_more_memory_on_the_cpu_too(
    monkeypatch: pytest.MonkeyPatch, built: bool, runtime_bytes: int
) -> None:
    monkeypatch.setattr(find, "built_for_cards", lambda: built)
    assert find_target("cpu").runtime_bytes == runtime_bytes
