"""Finds devices by name: to run on, their target and their budget; and all devices that are present."""

import re

import msgspec

from oomguard._core.errors import MisuseError, shown
from oomguard._core.units import format_bytes
from oomguard._device import nvml
from oomguard._device.budget import Budget, Limit
from oomguard._device.cpu import Cpu
from oomguard._device.cuda import Cuda, built_for_cards, count_cards
from oomguard._estimate import cards
from oomguard._estimate.target import CPU, CPU_OF_CUDA_BUILD, Target, on_card, resident_within

NO_CUDA = "The torch installed here is built without CUDA: cards can be planned for, not used."

Device = Cpu | Cuda  # A device that is present. Both have the same methods, which `Cpu` documents.


def open_device(name: str) -> Device:
    """Open a device that is present by its name: `cpu`, `cuda` or `cuda:1`."""
    if name == "cpu":
        return Cpu()
    index = card_index(name)
    if index is None:
        raise MisuseError(
            rule="A run needs a device that is here: cpu, cuda or cuda:1",
            got=f"got {shown(name)}",
            advice="For a card that is not here, oomguard estimate answers.",
        )
    if not built_for_cards():
        raise MisuseError(
            rule="--device cuda needs a CUDA build of torch",
            got="the torch installed here is built without CUDA",
            advice="Install one from pytorch.org, or use --device cpu.",
        )
    card = Cuda(index)
    card.status()  # raises if there is none
    return card


def card_index(name: str) -> int | None:
    """The number of a card that is here, from `cuda` or `cuda:1`; None if the name means something else."""
    meant = re.sub(r"^gpu(?=$|:)", "cuda", str(name).lower())
    if meant != name and re.fullmatch(r"cpu|cuda(:\d+)?", meant):
        rule = "A device is cpu, cuda, cuda:1 or the name of a card"
        raise MisuseError(rule=rule, got=f"got {shown(name)}", advice=f"Did you mean {meant}?")
    if name != "cuda" and not str(name).startswith("cuda:"):
        return None
    number = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if number is None:
        raise MisuseError(
            rule="--device cuda takes the card's number",
            got=f"got {shown(name)}",
            advice="Write it as cuda or cuda:1.",
        )
    return int(number[1] or 0)


def present_devices() -> tuple[list[Device], str | None]:
    """All devices that are present: the CPU, then the cards in CUDA's order. And why there is no card, or none that can
    be used; None if all is well. Neither imports torch (where NVML answers) nor makes a CUDA context.
    """
    try:
        cards_here = [Cuda(index) for index in range(count_cards())]
        nvml.check_index(0, len(cards_here))
        for card in cards_here:
            card.status()  # raises if it cannot be read
    except MisuseError as error:
        return [Cpu()], str(error)
    return [Cpu(), *cards_here], None if built_for_cards() else NO_CUDA


def find_target(device: str) -> Target:
    """Return the target of a device's name: the CPU, a card that is present, or one of cards.toml."""
    index = card_index(device)
    if index is not None:
        return on_card(Cuda(index).status().known, device)
    if device == "cpu":
        return CPU_OF_CUDA_BUILD if built_for_cards() else CPU
    return on_card(cards.card(device))


def find_budget(device: str) -> Budget:
    """Return the budget of this process on a device; for a card that is not present, all that CUDA would show."""
    index = card_index(device)
    if index is not None:
        return Cuda(index).budget()
    if device != "cpu":
        card = cards.card(device)
        memory = Limit.read("card memory", f"an empty {card.name}: {card.source}", card.usable_bytes)
        return Budget(device=card.name, limits=(memory,))
    budget = Cpu().budget()
    committed = budget.least("committed")
    if committed is None:
        return budget
    # estimates count resident bytes: a limit of committed ones (an rlimit) limits those too
    reach_bytes = committed.reach_bytes
    source = f"{committed.source}: {format_bytes(reach_bytes)} committed, up to 2.8 for each resident byte"
    same = Limit.read(f"{committed.name}, resident", source, resident_within(reach_bytes, find_target("cpu")))
    return msgspec.structs.replace(budget, limits=(*budget.limits, same))
