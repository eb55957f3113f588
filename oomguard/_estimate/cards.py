"""Named cards: the figures that a plan for a card needs when the card is not present.

The figures are in cards.toml; no driver is asked. A probe on the real card replaces each of them by a reading.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB

CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""`:4096:2:16:8` of `parseChosenWorkspaceSize`, aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13 (8,519,680 B)."""
CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
"""Same function. sm 9 since pytorch PR 91564; sm 10 and 12 since PR 175344 (2026-02), sm 11 since PR 189312 (2026-07).
An older torch takes the smaller one on sm 10 to 12, so there this is an estimate from above."""

CONTEXT_BYTES = {"before sm 8": 400 * MIB, "sm 8": 512 * MIB, "from sm 9": 640 * MIB}
"""CUDA context with lazy loading (CUDA >= 11.7), from above: a bare one was 256 MiB on an RTX 3090 (torch 2.7.1,
InvokeAI issue 9413), 426 MiB on an RTX 6000 Ada (torch 2.10, unsloth-zoo PR 1053), "300" and "400 MB" by pytorch issues
107667 and 109888; kernels loaded later add to it. No reading was found for sm 9 and later: that one is a guess."""

KEPT_BYTES = 384 * MIB
KEPT_SHARE = 64
"""Driver and firmware keep at most 384 MiB + 1/64 of the memory: bounds every figure published below (tested), from the
RTX 5070's 533 MiB of 12 GiB and the RTX 3070's 439 MiB of 8 GiB to the B200's 1.65 GiB of 180 GiB."""
ECC_SHARE = 16
"""ECC kept inside GDDR6 takes 1/16 more where it is on by default (nvidia-smi on a T4: 15360 of 16384 MiB, modal-client
PR 2797). HBM has room of its own for it. Switched on by hand on a workstation card (RTX A6000), it costs the same."""
SHARED_SHARE = 8
"""Carve-outs of shared memory keep at most 1/8 (Orin Nano: 7290 of 8192 MiB). The host's processes come on top."""

_NOISE = re.compile(r"nvidia|geforce|tesla|gpu|generation|edition|workstation|server|with|max|q|design|")


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One card. cards.toml explains its fields."""

    name: str
    memory_bytes: int
    """Memory as it is sold. CUDA shows less: `usable_bytes`."""
    compute_capability: tuple[int, int]
    sms: int
    """Streaming multiprocessors. cuDNN's choice of algorithm depends on them."""
    sms_seen: bool = False
    inline_ecc: bool = False
    shared_memory: bool = False
    seen_bytes: int | None = None
    seen_lately: bool = False
    source: str

    @property
    def usable_bytes(self) -> int:
        """The total memory that CUDA shows: the published figure if it is recent, else `least_bytes`."""
        return self.seen_bytes if self.seen_bytes is not None and self.seen_lately else self.least_bytes

    @property
    def least_bytes(self) -> int:
        """Memory less what driver, ECC and carve-outs keep at most: the rule where no late figure was found."""
        if self.shared_memory:
            return self.memory_bytes - self.memory_bytes // SHARED_SHARE
        ecc_bytes = self.memory_bytes // ECC_SHARE if self.inline_ecc else 0
        return self.memory_bytes - ecc_bytes - KEPT_BYTES - self.memory_bytes // KEPT_SHARE

    @property
    def context_bytes(self) -> int:
        """CUDA context of one process, from above, by generation; a probe's reading replaces it."""
        major = self.compute_capability[0]
        return CONTEXT_BYTES["before sm 8" if major < 8 else "sm 8" if major == 8 else "from sm 9"]

    @property
    def cublas_workspace_bytes(self) -> int:
        """Workspace of one (cuBLAS handle, stream), unless CUBLAS_WORKSPACE_CONFIG says otherwise."""
        return CUBLAS_WORKSPACE_HOPPER_BYTES if self.compute_capability[0] >= 9 else CUBLAS_WORKSPACE_BYTES


def card_precisions(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the precisions that a card of a compute capability trains in, `fp32` first.

    bf16 needs sm 8.0. fp16 is offered from sm 7.0 on, the first with tensor cores: older cards compute in it, but
    some of them (sm 6.1) much more slowly than in fp32.
    """
    return "fp32", *(name for name, least in (("bf16", (8, 0)), ("fp16", (7, 0))) if capability >= least)


@cache
def _index() -> tuple[dict[str, Card], dict[str, str]]:
    """Read cards and aliases on first use. A bare `a100` is the smallest: what fits it fits the larger ones."""
    content = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
    cards: dict[str, Card] = {}
    aliases: dict[str, str] = {}
    for row in content["table"]["cards"]:
        entry = _card(row, content["documents"][row["capability"]])
        cards[entry.name] = entry
        aliases |= dict.fromkeys(row.get("aliases", []), entry.name)
    for entry in sorted(cards.values(), key=lambda card: card.memory_bytes):
        aliases.setdefault(re.sub(r"-\d+gb$", "", entry.name), entry.name)
    return cards, {alias: name for alias, name in aliases.items() if alias not in cards}


def _card(row: dict[str, Any], documents: str) -> Card:
    """Make a card of its row in cards.toml."""
    major, minor = map(int, row["capability"].split("."))
    fields: dict[str, Any] = {"sms_seen": True, "seen_lately": "seen_mib" in row}
    fields |= {name: value for name, value in row.items() if name in Card.__struct_fields__}
    sms_text = "SMs as a card reports them" if fields["sms_seen"] else "SMs not checked on a card"
    return Card(
        **fields,
        memory_bytes=row["gib"] * GIB,
        compute_capability=(major, minor),
        seen_bytes=row["seen_mib"] * MIB if "seen_mib" in row else None,
        source=f"{documents}; {sms_text}; total memory: {row.get('seen_in', 'by rule, from below')}",
    )


def names() -> tuple[str, ...]:
    """Every card's name, as `--device` takes it."""
    return tuple(_index()[0])


def card(name: str) -> Card:
    """The card with this name: a key of cards.toml, CUDA's own name, or what people type."""
    cards, aliases = _index()
    key = _normal(name)
    plain = re.sub(r"-(sxm\d?|pcie|hbm\d?e?)(?=-|$)", "", key)
    for form in (key, plain, f"rtx-{plain}", f"gtx-{plain}", f"jetson-{plain}"):
        if form in cards or form in aliases:
            return cards[aliases.get(form, form)]
        stem, _, gib = form.removesuffix("gb").rpartition("-")  # rtx-4090-24gb: right, but more than the key says
        known = cards.get(aliases.get(stem, stem))
        if form.endswith("gb") and known is not None and gib == str(known.memory_bytes // GIB):
            return known
    import difflib  # only for the message

    near = difflib.get_close_matches(key, [*cards, *aliases], n=9, cutoff=0.0)
    first, second, third = list(dict.fromkeys(aliases.get(match, match) for match in near))[:3]
    raise MisuseError(
        rule="--device must be cpu, cuda or a card that oomguard knows",
        got=f"got {name!r}",
        advice=f"Did you mean {first}, {second} or {third}? For another card, take one of its generation and --budget.",
    )


def _normal(name: str) -> str:
    """Lower case with dashes, without the words that say nothing: `rtx-3080-ti`."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("mobile", "laptop").replace("tisuper", "ti-super"))
    text = re.sub(r"(?<![a-z])(rtx|gtx)(?=a?\d)", r"\1-", text)
    text = re.sub(r"(?<=\d)-?(ti|super)(?=-|$)", r"-\1", text)
    text = re.sub(r"(?<![a-z0-9])(\d+)-?(gib|gb|g)(?=-|$)", r"\1gb", text)
    return "-".join(word for word in text.split("-") if not _NOISE.fullmatch(word))
