"""What devices there are, at a glance: `oomguard devices`. Neither imports torch nor makes a CUDA context."""

import msgspec

from oomguard.device import nvml
from oomguard.device.budget import Budget
from oomguard.device.cpu import Cpu
from oomguard.device.cuda import Cuda, built_for_cards, count_cards
from oomguard.device.present import Present
from oomguard.errors import MisuseError

NO_CUDA = "The torch installed here is built without CUDA: cards can be planned for, not used."


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One device as it is now."""

    name: str
    """The processor's or the card's."""
    budget: Budget
    """What this process may use."""
    precisions: tuple[str, ...]
    """What its hardware computes in."""
    card: Present | None = None
    """More about a card; None for the CPU."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All devices that are here."""

    devices: tuple[Seen, ...]
    """The CPU first, then the cards in CUDA's order."""
    note: str | None
    """Why there is no card, or none that can be used; None if all is well."""


def survey() -> Survey:
    """All devices that are here. Whatever is wrong with the cards, the CPU is shown.

    >>> survey().devices[0].budget.device
    'cpu'
    """
    cpu = Cpu()
    here = Seen(name=cpu.title(), budget=cpu.budget(), precisions=cpu.precisions())
    try:
        cards = [_card(index) for index in range(count_cards())]
        nvml.check_index(0, len(cards))
    except MisuseError as error:
        return Survey(devices=(here,), note=str(error))
    return Survey(devices=(here, *cards), note=None if built_for_cards() else NO_CUDA)


def _card(index: int) -> Seen:
    card = Cuda(index).present()
    return Seen(name=card.name, budget=Cuda(index).budget(), precisions=card.precisions, card=card)
