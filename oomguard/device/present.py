"""Present: a card that is here, as it is now, whoever was asked (NVML or torch). No torch, no NVML in this file."""

import os

import msgspec

from oomguard.device import limits
from oomguard.device.budget import Budget, Limit
from oomguard.errors import MisuseError
from oomguard.estimate import gpus
from oomguard.units import MAX_BYTES, format_bytes

UNKNOWN_SMS = 128
"""Multiprocessors of a card here that gpus.py does not know, from above: only from 98 on cuDNN takes its larger
workspace for fp16 (`cudnn._persistent`), and NVML does not tell."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    pid: int
    """Its process id, as NVML numbers it."""
    name: str | None
    """Its name; None where NVML may not say."""
    used_bytes: int | None
    """What it holds; None where NVML does not say (Windows)."""


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """A card that is here, as it is now. (`oomguard.estimate.gpus.Card` is one that need not be.)

    >>> trainer = Holder(pid=4711, name="python", used_bytes=3 << 30)
    >>> card = Present(name="NVIDIA L4", uuid="GPU-a", compute_capability=(8, 9), total_bytes=22 << 30,
    ...                free_bytes=18 << 30, holders=(trainer,), source="NVML")
    >>> card.precisions, card.known.name, card.budget("cuda:0").limit_bytes >> 30
    (('fp32', 'fp16', 'bf16'), 'l4-24gb', 18)
    >>> card.budget("cuda:0").binding.source
    'NVML on NVIDIA L4, where python (4711) holds 3.00 GiB'
    """

    name: str
    """As NVIDIA calls it: `NVIDIA A100-SXM4-80GB`. `gpus.card` finds it by that."""
    uuid: str
    """`GPU-…`, or `MIG-…` for a part of a card."""
    compute_capability: tuple[int, int]
    """Major and minor: (8, 0) is sm 8.0."""
    total_bytes: int | None
    """What CUDA shows as its memory; None if it has none of its own (DGX Spark): it uses the host's."""
    free_bytes: int | None
    """What nobody holds of it; None as above."""
    holders: tuple[Holder, ...]
    """Who holds memory of it, this process included, as far as is known."""
    source: str
    """Who says so."""

    @property
    def own_bytes(self) -> int:
        """What this process holds; 0 if it is not listed."""
        return sum(one.used_bytes or 0 for one in self.holders if one.pid == os.getpid())

    @property
    def others(self) -> tuple[Holder, ...]:
        """Who else holds memory."""
        return tuple(one for one in self.holders if one.pid != os.getpid())

    @property
    def precisions(self) -> tuple[str, ...]:
        """What its hardware computes in."""
        half = [("fp16", self.known.fp16), ("bf16", self.known.bf16)]
        return "fp32", *(name for name, has in half if has)

    @property
    def known(self) -> gpus.Card:
        """The card as estimates know it: by its name, else by its generation alone."""
        try:
            return msgspec.structs.replace(gpus.card(self.name), compute_capability=self.compute_capability)
        except MisuseError:  # too new, too rare, or a part of a card
            return gpus.Card(
                name=self.name,
                memory_bytes=self.total_bytes or MAX_BYTES,
                compute_capability=self.compute_capability,
                sms=UNKNOWN_SMS,
                sms_seen=False,
                inline_ecc=False,
                shared_memory=self.total_bytes is None,
                seen_bytes=None,
                seen_lately=False,
                source=self.source,
            )

    def budget(self, device: str, reserved_bytes: int = 0) -> Budget:
        """What this process may use of it, its own context included: the card less what others hold.

        `reserved_bytes` is what this process surely holds, for where processes are not listed (most containers). What
        it holds beyond that counts as taken there: the budget is then too small, never too large.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return Budget(device=device, limits=limits.budget().limits)
        used_bytes = max(0, self.total_bytes - self.free_bytes)
        memory = Limit(
            name="card memory",
            limit_bytes=self.total_bytes,
            used_bytes=used_bytes,
            held_bytes=min(max(self.own_bytes, reserved_bytes), used_bytes),
            unit="resident",
            source=f"{self.source} on {self.name}{self._others()}",
        )
        return Budget(device=device, limits=(memory,))

    def _others(self) -> str:
        """Who else holds memory, for people: `, where python (4711) holds 3.20 GiB`."""
        texts = [
            f"{one.name or 'process'} ({one.pid}) holds "
            + ("some" if one.used_bytes is None else format_bytes(one.used_bytes))
            for one in self.others
        ]
        return f", where {' and '.join(texts)}" if texts else ""
