"""`oomguard devices`: what may be used here, and who says so."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.device.present import Present
from oomguard.device.survey import Seen, Survey
from oomguard.estimate.gpus import Card
from oomguard.report.common import printer, row
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console


def devices_json(found: Survey) -> dict[str, Any]:
    """All devices as one JSON object: names, what may be used, every limit, and what there is to say of a card."""
    return {"devices": [_device_json(one) for one in found.devices], "note": found.note}


def _device_json(one: Seen) -> dict[str, Any]:
    figures = {name: getattr(one.budget, name) for name in ("limit_bytes", "left_bytes", "committed_bytes")}
    document = {"device": one.budget.device, "name": one.name, **figures}
    document["limits"] = [msgspec.structs.asdict(limit) for limit in one.budget.limits]
    document["precisions"] = list(one.precisions)
    if one.card is not None:
        names = ("uuid", "compute_capability", "total_bytes", "free_bytes")
        document |= {name: getattr(one.card, name) for name in names}
        document["others"] = [msgspec.structs.asdict(holder) for holder in one.card.others]
    return document


def card_json(card: Card) -> dict[str, Any]:
    """A card that `--device` takes by name."""
    names = ("name", "memory_bytes", "usable_bytes", "compute_capability", "source")
    return {name: getattr(card, name) for name in names}


def show_devices(found: Survey, console: "Console") -> None:
    """Print what this process may use, device by device, and who says so."""
    say = printer(console)
    for place, one in enumerate(found.devices):
        budget = one.budget
        if place:
            say("")
        say(f"{budget.device}  {one.name}", "bold")
        say(f"may use {format_bytes(budget.limit_bytes)}, by {budget.binding.name}", "green", indent="  ")
        if budget.committed_bytes is not None:
            say(f"may ask for {format_bytes(budget.committed_bytes)}, used or not", "green", indent="  ")
        for limit in budget.limits:
            say(row(limit.name, limit.reach_bytes) + f"  of {format_bytes(limit.limit_bytes)}", indent="  ")
            say(limit.source, "dim", indent="    ")
        if one.card is not None:
            say(_card_words(one.card), indent="  ", hanging="    ")
        say(f"computes in {', '.join(one.precisions)}", indent="  ")
    if found.note is not None:
        say("")
        say(found.note)
    if all(one.card is None for one in found.devices):
        say("oomguard devices --cards lists the cards that --device takes by name.")


def _card_words(card: Present) -> str:
    """What a card can and has. (Who else holds memory of it is said with its limit.)"""
    words = [f"compute capability {'.'.join(map(str, card.compute_capability))}"]
    if card.total_bytes is not None and card.free_bytes is not None:
        words += [f"{format_bytes(card.total_bytes)} in all", f"{format_bytes(card.free_bytes)} free"]
    return ", ".join(words)


def show_cards(cards: Iterable[Card], console: "Console") -> None:
    """Print the cards that `--device` takes by name."""
    say = printer(console)
    for card in cards:
        generation = ".".join(map(str, card.compute_capability))
        say(f"{card.name:<24}  {format_bytes(card.usable_bytes):>10}  sm {generation}")
