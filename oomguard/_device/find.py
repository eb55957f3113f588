"""Finds devices: the target and the budget of a device's name, and all devices that are present."""

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import format_bytes
from oomguard._device import Device, card_index, limits, nvml
from oomguard._device.budget import Budget, Limit
from oomguard._device.cpu import Cpu
from oomguard._device.cuda import Cuda, built_for_cards, count_cards
from oomguard._estimate import cards
from oomguard._estimate.target import CPU, Target, on_card, resident_within

NO_CUDA = "The torch installed here is built without CUDA: cards can be planned for, not used."


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
    """Return the target of a device's name: the CPU, a card that is present, or one of cards.toml.

    >>> find_target("cpu").cuda, find_target("A100 80GB").device
    (False, 'a100-80gb')
    """
    index = card_index(device)
    if index is not None:
        return on_card(Cuda(index).status().known, device)
    return CPU if device == "cpu" else on_card(cards.card(device))


def find_budget(device: str) -> Budget:
    """Return the budget of this process on a device; for a card that is not present, all that CUDA would show."""
    index = card_index(device)
    if index is not None:
        return Cuda(index).budget()
    if device == "cpu":
        return _resident_too(limits.budget())
    card = cards.card(device)
    memory = Limit(
        name="card memory",
        limit_bytes=card.usable_bytes,
        used_bytes=0,
        held_bytes=0,
        unit="resident",
        source=f"an empty {card.name}: {card.source}",
    )
    return Budget(device=card.name, limits=(memory,))


def _resident_too(budget: Budget) -> Budget:
    """Add a limit of resident bytes, which estimates count, for a limit of committed bytes (an rlimit)."""
    committed = budget.least("committed")
    if committed is None:
        return budget
    same = Limit(
        name=f"{committed.name}, resident",
        limit_bytes=resident_within(committed.reach_bytes),
        used_bytes=0,
        held_bytes=0,
        unit="resident",
        source=f"{committed.source}: {format_bytes(committed.reach_bytes)} committed, up to 2.8 for each resident byte",
    )
    return msgspec.structs.replace(budget, limits=(*budget.limits, same))
