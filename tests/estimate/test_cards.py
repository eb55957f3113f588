"""Named cards: found by any name people type, plausible, and never shown larger than CUDA shows them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._estimate import cards
from oomguard._estimate.cards import Card, card, card_precisions, names

CARDS = [card(name) for name in names()]
each_card = pytest.mark.parametrize("entry", CARDS, ids=lambda entry: entry.name)


def test_there_are_at_least_forty_cards() -> None:
    assert len(CARDS) >= 40


@each_card
def test_every_number_of_a_card_is_plausible(entry: Card) -> None:
    assert 3 * GIB <= entry.memory_bytes <= 288 * GIB
    assert (5, 3) <= entry.compute_capability <= (12, 1)
    assert 1 <= entry.sms <= 192
    assert 256 * MIB <= entry.context_bytes <= 1 * GIB
    assert "fp16" in card_precisions(entry.compute_capability) or "bf16" not in card_precisions(
        entry.compute_capability
    )


@each_card
def test_every_card_says_where_its_numbers_are_from(entry: Card) -> None:
    assert "NVIDIA" in entry.source
    assert ("by rule" in entry.source) == (entry.seen_bytes is None)
    assert ("not checked" in entry.source) != entry.sms_seen


@each_card
def test_usable_memory_is_less_than_the_memory_but_most_of_it(entry: Card) -> None:
    assert 0.85 * entry.memory_bytes < entry.usable_bytes < entry.memory_bytes


@each_card
def test_the_rule_stays_below_every_published_figure(entry: Card) -> None:
    assert entry.usable_bytes >= entry.least_bytes
    if entry.seen_bytes is not None:
        assert entry.least_bytes < entry.seen_bytes < entry.memory_bytes


@each_card
def test_an_older_drivers_figure_is_not_trusted(entry: Card) -> None:
    assert entry.usable_bytes == (entry.seen_bytes if entry.seen_lately else entry.least_bytes)


@each_card
def test_a_name_is_a_lower_case_key_that_finds_its_card(entry: Card) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name)
    assert card(entry.name) is entry
    assert card(entry.name.upper().replace("-", " ")) is entry


def test_no_line_of_the_table_repeats_a_name_or_an_alias() -> None:
    rows = tomllib.loads(Path(cards.__file__).with_name("cards.toml").read_text())["table"]["cards"]
    keys = [key for row in rows for key in (row["name"], *row.get("aliases", []))]
    assert len(rows) == len(CARDS)
    assert sorted(set(keys)) == sorted(keys)


def test_every_alias_leads_to_a_card_and_hides_none() -> None:
    by_name, aliases = cards._index()
    assert set(aliases.values()) <= set(by_name)
    assert not set(aliases) & set(by_name)
    assert all(card(alias).name == name for alias, name in aliases.items())


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", "rtx-2070"),
        ("NVIDIA GeForce GTX 1060 6GB", "gtx-1060-6gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA A10G", "a10g-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("Tesla T4", "t4-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100S-PCIE-32GB", "v100-32gb"),
        ("Tesla P100-PCIE-16GB", "p100-16gb"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
        ("TITAN Xp", "titan-xp"),
        ("NVIDIA Tegra X1", "jetson-nano"),
    ],
)
def test_a_card_is_found_by_the_name_that_cuda_gives_it(typed: str, name: str) -> None:
    assert card(typed).name == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("rtx-4090-24GB", "rtx-4090"),
        ("1080ti", "gtx-1080-ti"),
        ("rtx4070tisuper", "rtx-4070-ti-super"),
        ("4060 ti 16 GB", "rtx-4060-ti-16gb"),
        ("a6000", "rtx-a6000"),
        ("t4", "t4-16gb"),
        ("h100", "h100-80gb"),
        ("orin nano", "jetson-orin-nano-8gb"),
        ("rtx 4060 mobile", "rtx-4060-laptop"),
    ],
)
def test_a_card_is_found_by_what_people_type(typed: str, name: str) -> None:
    assert card(typed).name == name


@pytest.mark.parametrize("typed", ["a100", "v100", "gtx-1060", "rtx-3080", "rtx-4060-ti", "agx orin"])
def test_a_name_that_leaves_the_memory_open_means_the_smallest(typed: str) -> None:
    stem = card(typed).name.rsplit("-", 1)[0]
    sisters = [entry for entry in CARDS if re.fullmatch(rf"{stem}-\d+gb", entry.name)]
    assert len(sisters) > 1
    assert card(typed) == min(sisters, key=lambda entry: entry.memory_bytes)


def test_an_unknown_name_gives_the_rule_what_was_got_and_the_three_nearest() -> None:
    with pytest.raises(MisuseError) as caught:
        card("rtx-9090")
    assert str(caught.value).startswith("--device must be cpu, cuda or a card that oomguard knows, but got 'rtx-9090'.")
    assert "rtx-5090, rtx-4090 or rtx-3090?" in str(caught.value)


@pytest.mark.parametrize("typed", ["", " ", "foo", "cuda:1", "rtx-4090-48gb", "a100-60gb", "-", "é" * 300])
def test_nothing_else_is_taken_for_a_card(typed: str) -> None:
    with pytest.raises(MisuseError, match="Did you mean"):
        card(typed)


@pytest.mark.parametrize(
    ("name", "workspace_bytes"),
    [
        ("p100", 8_519_680),
        ("t4", 8_519_680),
        ("a100-80gb", 8_519_680),
        ("rtx-4090", 8_519_680),
        ("h100", 32 * MIB),
        ("b200", 32 * MIB),
        ("rtx-5090", 32 * MIB),
    ],
)
def test_the_cublas_workspace_follows_the_generation(name: str, workspace_bytes: int) -> None:
    assert card(name).cublas_workspace_bytes == workspace_bytes


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    [
        ("v100-16gb", 15.75),
        ("t4", 14.56),
        ("a100-40gb", 39.38),
        ("a100-80gb", 79.14),
        ("h100", 79.19),
        ("rtx-3090", 23.56),
        ("rtx-4090", 23.52),
        ("rtx-5090", 31.36),
    ],
)
def test_a_published_total_is_kept_as_published(name: str, seen_gib: float) -> None:
    seen_bytes = card(name).seen_bytes
    assert seen_bytes is not None
    assert round(seen_bytes / GIB, 2) == seen_gib


def test_the_totals_published_in_bytes_are_kept_to_the_mebibyte() -> None:
    assert card("rtx-5090").seen_bytes == 33_677_180_928 // MIB * MIB  # aikitoria/open-gpu-kernel-modules issue 1
    assert card("rtx-6000-ada").seen_bytes == 50_865_307_648 // MIB * MIB  # unsloth-zoo PR 1053


@pytest.mark.parametrize(
    ("name", "sms", "capability"),
    [
        ("p100", 56, (6, 0)),
        ("v100", 80, (7, 0)),
        ("t4", 40, (7, 5)),
        ("a100", 108, (8, 0)),
        ("a10g", 80, (8, 6)),
        ("l4", 58, (8, 9)),
        ("rtx-2080-ti", 68, (7, 5)),
        ("rtx-3090", 82, (8, 6)),
        ("rtx-4090", 128, (8, 9)),
        ("h100", 132, (9, 0)),
        ("b200", 148, (10, 0)),
        ("rtx-5090", 170, (12, 0)),
    ],
)
def test_sms_and_capability_are_those_that_cuda_was_seen_to_report(
    name: str, sms: int, capability: tuple[int, int]
) -> None:
    assert card(name).sms_seen
    assert (card(name).sms, card(name).compute_capability) == (sms, capability)


@pytest.mark.parametrize(
    ("capability", "precisions"),
    [((8, 0), ("fp32", "bf16", "fp16")), ((7, 5), ("fp32", "fp16")), ((6, 1), ("fp32",))],
)
def test_half_precisions_need_tensor_cores(capability: tuple[int, int], precisions: tuple[str, ...]) -> None:
    assert card_precisions(capability) == precisions


def test_bf16_is_native_from_ampere_on() -> None:
    def native(name: str) -> bool:
        return "bf16" in card_precisions(card(name).compute_capability)

    assert not any(map(native, ("p100", "v100", "t4", "rtx-2080-ti")))
    assert all(map(native, ("a100", "rtx-3060", "h100", "rtx-5090")))


def test_jetsons_share_their_memory_with_the_host_and_cards_do_not() -> None:
    shared = {entry.name for entry in CARDS if entry.shared_memory}
    assert {entry.name for entry in CARDS if entry.name.startswith("jetson-")} == shared - {"dgx-spark"}
    assert not card("rtx-4090").shared_memory


def test_importing_the_table_reads_no_line_of_it_and_no_heavy_module() -> None:
    code = """
import sys
from oomguard._estimate import cards
print(cards._index.cache_info().currsize, *{"torch", "pandas"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
