"""Named cards: enough about a GPU to plan for one that is not here.

Numbers only, nothing asks a driver. Every figure stands for a reading that a probe on the real card replaces.
"""

import re
from functools import cache

import msgspec

from oomguard.errors import MisuseError
from oomguard.units import GIB, MIB

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

_DOCUMENTS = {
    **dict.fromkeys([(5, 3), (7, 2), (8, 7), (11, 0)], "NVIDIA Jetson datasheets"),
    (6, 0): "NVIDIA Tesla P100 whitepaper",
    (6, 1): "NVIDIA GeForce GTX 1080 whitepaper, product pages",
    (7, 0): "NVIDIA Tesla V100 architecture whitepaper",
    (7, 5): "NVIDIA Turing architecture whitepaper, product pages",
    (8, 0): "NVIDIA A100 architecture whitepaper, datasheets",
    (8, 6): "NVIDIA Ampere GA102 architecture whitepaper, product pages",
    (8, 9): "NVIDIA Ada architecture whitepaper, product pages",
    (9, 0): "NVIDIA H100 architecture whitepaper, datasheets",
    (10, 0): "NVIDIA Blackwell architecture brief, DGX B200 datasheet",
    (12, 0): "NVIDIA RTX Blackwell architecture whitepaper, product pages",
    (12, 1): "NVIDIA DGX Spark datasheet",
}
"""Where memory and SMs of a generation are published; the capability is that of developer.nvidia.com/cuda-gpus."""

_TABLE = """
# name (aliases after |)        GiB   sm   SMs  kind  seen MiB  where it was seen
# SMs?: NVIDIA's documents only; without it CUDA was also seen to report the count on such a card
# kind: g own memory; e own memory with ECC inside it; s shared with the host
# seen: the least total_memory published for it on Linux; ~ by a driver before late 2024: newer ones keep 130-200 more
#   banner: Ultralytics' `CUDA:0 (name, MiB)`; properties: torch.cuda.get_device_properties; hashcat: its device line
p100-16gb                        16   6.0   56  g      16269  banner, torch 2.11.0
v100-16gb                        16   7.0   80  g     ~16130  banner, torch 1.7.0 (15.75 GiB)
v100-32gb|v100s                  32   7.0   80  g      32494  banner, torch 2.6.0
t4-16gb                          16   7.5   40  e      14912  banner, Ultralytics 8.4.41 (14913 with torch 2.14.1)
a10-24gb                         24   8.6   72? e          -
a10g-24gb                        24   8.6   80  e      22587  properties, torch 2.15.0.dev
a16-16gb                         16   8.6   10? e          -
a30-24gb                         24   8.0   56? g      24164  banner, torch 2.8.0
a40-48gb                         48   8.6   84  e     ~45416  properties
a100-40gb                        40   8.0  108  g      40326  properties (40337: AdaptiveCpp issue 1258)
a100-80gb|a800-80gb              80   8.0  108  g      81038  banner, torch 2.3.1 (81049: mixbench issue 47)
l4-24gb                          24   8.9   58  e      22518  hashcat, CUDA 12.0 (22563: banner, torch 2.11.0)
l40-48gb                         48   8.9  142? e          -
l40s-48gb                        48   8.9  142  e     ~45494  hashcat, CUDA 12.5
h100-80gb|h100-sxm               80   9.0  132  g      81089  properties, torch 2.7.0
h100-pcie-80gb                   80   9.0  114? g          -
h100-nvl-94gb|h100-94gb          94   9.0  132? g          -
h200-141gb|h200-nvl             141   9.0  132? g     143156  banner, torch 2.11.0
gh200-96gb|gh200-480gb           96   9.0  132? g          -
gh200-144gb                     144   9.0  132? g          -
b200-180gb|b200-192gb           180  10.0  148  g     182631  properties
rtx-6000-ada                     48   8.9  142? g      48508  unsloth-zoo PR 1053, torch 2.10.0 (50,865,307,648 B)
rtx-a4000                        16   8.6   48? g     ~16117  banner, torch 1.12.1
rtx-a5000                        24   8.6   64  g      24138  properties
rtx-a6000                        48   8.6   84  g      48537  public log of 2026-01 (47.40 GiB)
rtx-pro-6000|rtx-pro-6000-blackwell 96 12.0 188 g      97250  properties, torch 2.7.1
quadro-rtx-6000                  24   7.5   72? g          -
quadro-rtx-8000                  48   7.5   72  g     ~48380  banner
titan-xp                         12   6.1   30? g          -
titan-v                          12   7.0   80? g     ~12064  banner, torch 1.12.0
titan-rtx                        24   7.5   72? g          -
gtx-1060-3gb                      3   6.1    9  g      ~3003  hashcat
gtx-1060-6gb                      6   6.1   10  g      ~6075  hashcat, CUDA 11.6
gtx-1070                          8   6.1   15  g      ~8118  hashcat
gtx-1080                          8   6.1   20  g      ~8116  properties
gtx-1080-ti                      11   6.1   28  g      11165  hashcat (11172: ethminer issue 536)
gtx-1650                          4   7.5   14  g      ~3902  properties
gtx-1660-ti                       6   7.5   24  g      ~5914  banner, torch 1.8.1
rtx-2060                          6   7.5   30  g       5738  hashcat, CUDA 12.9
rtx-2070                          8   7.5   36? g      ~7949  properties
rtx-2070-super                    8   7.5   40  g          -
rtx-2080                          8   7.5   46? g          -
rtx-2080-super                    8   7.5   48  g      ~7969  hashcat, CUDA 12.2
rtx-2080-ti                      11   7.5   68  g     ~11019  properties, torch 1.8.1
rtx-3050-8gb                      8   8.6   20? g          -
rtx-3060-12gb                    12   8.6   28  g      11910  banner, torch 2.10.0
rtx-3060-ti                       8   8.6   38  g       7833  banner, torch 2.11.0
rtx-3070                          8   8.6   46  g       7753  banner, torch 2.6.0
rtx-3070-ti                       8   8.6   48  g          -
rtx-3080-10gb                    10   8.6   68  g     ~10009  banner, torch 1.13.1
rtx-3080-12gb                    12   8.6   70? g     ~12117  banner
rtx-3080-ti                      12   8.6   80  g      11910  banner
rtx-3090                         24   8.6   82  g      24124  banner, torch 2.13.0 (24260: ultralytics issue 5359)
rtx-3090-ti                      24   8.6   84  g     ~24240  hashcat
rtx-4060                          8   8.9   24  g      ~7905  TSGS issue 6 (7.72 GiB)
rtx-4060-ti-8gb                   8   8.9   34? g       7806  banner, torch 2.12.1
rtx-4060-ti-16gb                 16   8.9   34? g          -
rtx-4070                         12   8.9   46  g      11850  hashcat
rtx-4070-super                   12   8.9   56? g          -
rtx-4070-ti                      12   8.9   60  g          -
rtx-4070-ti-super                16   8.9   66  g      15934  properties, log of 2026-01
rtx-4080                         16   8.9   76  g      15945  hashcat, CUDA 13.1
rtx-4080-super                   16   8.9   80? g      15944  banner, torch 2.12.1
rtx-4090                         24   8.9  128  g      24081  banner, Ultralytics 8.4.101 (24176: flux-webui issue 11)
rtx-5060                          8  12.0   30? g          -
rtx-5060-ti-8gb                   8  12.0   36? g          -
rtx-5060-ti-16gb                 16  12.0   36? g      15841  properties
rtx-5070                         12  12.0   48  g      11755  hashcat, CUDA 12.9
rtx-5070-ti                      16  12.0   70  g      15847  hashcat, CUDA 12.8
rtx-5080                         16  12.0   84  g      15840  banner
rtx-5090                         32  12.0  170  g      32117  aikitoria/open-gpu-kernel-modules issue 1, CUDA 12.8
rtx-3060-laptop                   6   8.6   30  g       5806  public log of 2026
rtx-3070-laptop                   8   8.6   40  g          -
rtx-3080-laptop-8gb               8   8.6   48  g          -
rtx-3080-laptop-16gb             16   8.6   48  g     ~16110  banner, torch 2.3.0
rtx-4050-laptop                   6   8.9   20  g      ~5898  hashcat, CUDA 12.4
rtx-4060-laptop                   8   8.9   24  g       7806  banner, torch 2.9.0
rtx-4070-laptop                   8   8.9   36  g       7805  hashcat, CUDA 13.0
rtx-4080-laptop                  12   8.9   58? g          -
rtx-4090-laptop                  16   8.9   76? g          -
rtx-5090-laptop                  24  12.0   82? g          -
jetson-nano|tegra-x1              4   5.3    1  s       3956  banner, JetPack 4.6.3
jetson-xavier-nx                  8   7.2    6? s      ~7771  properties
jetson-agx-xavier                32   7.2    8? s     ~32508  gpu-burn PR 116
jetson-orin-nano-8gb              8   8.7    8? s       7290  banner, torch 2.5.0a0
jetson-orin-nx-16gb              16   8.7    8? s      15523  banner, torch 2.1.0a0 (15655 with torch 2.8.0)
jetson-agx-orin-32gb             32   8.7   14? s      30622  properties
jetson-agx-orin-64gb             64   8.7   16  s          -
jetson-thor                     128  11.0   20? s          -
dgx-spark|gb10                  128  12.1   48  s          -
"""

_NOISE = re.compile(r"nvidia|geforce|tesla|gpu|generation|edition|workstation|server|with|max|q|design|")


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One card. Checked at birth.

    >>> v100 = card("Tesla V100-SXM2-16GB")
    >>> v100.name, v100.sms, v100.bf16, v100.usable_bytes / v100.memory_bytes > 0.95
    ('v100-16gb', 80, False, True)
    """

    name: str
    """Key, lower case with dashes: `a100-80gb`."""
    memory_bytes: int
    """Memory as it is sold, read as GiB. CUDA shows less: `usable_bytes`."""
    compute_capability: tuple[int, int]
    """Major and minor: (8, 0) is sm 8.0."""
    sms: int
    """Streaming multiprocessors. cuDNN's choice of algorithm depends on them."""
    sms_seen: bool
    """CUDA was seen to report this count on such a card; otherwise it is NVIDIA's documents' word only."""
    inline_ecc: bool
    """ECC is on by default and lives in the card's own memory."""
    shared_memory: bool
    """The memory is the host's RAM too (Jetson, DGX Spark): the host's processes take from the same bytes."""
    seen_bytes: int | None
    """Least `total_memory` that was published for it; None if none was found."""
    seen_lately: bool
    """`seen_bytes` is of a driver of late 2024 or newer (they keep 130 to 200 MiB more), or no newer figure is less."""
    source: str
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        if min(self.memory_bytes, self.sms, self.seen_bytes or 1) < 1 or (self.seen_bytes or 0) >= self.memory_bytes:
            raise MisuseError(
                rule="A card's numbers must be positive and CUDA shows less than its memory",
                got=f"got {self}",
                advice="Correct its line.",
            )

    @property
    def usable_bytes(self) -> int:
        """What CUDA shows as the card's total: as published if lately, else `least_bytes`."""
        if self.seen_bytes is not None and self.seen_lately:
            return self.seen_bytes
        return self.least_bytes

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

    @property
    def fp16(self) -> bool:
        """Computes in fp16 natively: sm 5.3 and later. (On sm 6.1 much slower than in fp32.)"""
        return self.compute_capability >= (5, 3)

    @property
    def bf16(self) -> bool:
        """Computes in bf16 natively: sm 8.0 and later."""
        return self.compute_capability >= (8, 0)


@cache
def _index() -> tuple[dict[str, Card], dict[str, str]]:
    """Cards and aliases, read on first use. A bare `a100` means the smallest: what fits it fits its larger sisters."""
    cards: dict[str, Card] = {}
    aliases: dict[str, str] = {}
    for line in _TABLE.splitlines():
        if not line or line.startswith("#"):
            continue
        keys, gib, capability, sms, kind, seen, *where = line.split(maxsplit=6)
        name, *others = keys.split("|")
        major, minor = map(int, capability.split("."))
        seen_text = f"total memory: {where[0]}" if where else "total memory: by rule, from below"
        sms_text = "SMs as a card reports them" if not sms.endswith("?") else "SMs not checked on a card"
        cards[name] = Card(
            name=name,
            memory_bytes=int(gib) * GIB,
            compute_capability=(major, minor),
            sms=int(sms.rstrip("?")),
            sms_seen=not sms.endswith("?"),
            inline_ecc=kind == "e",
            shared_memory=kind == "s",
            seen_bytes=None if seen == "-" else int(seen.lstrip("~")) * MIB,
            seen_lately=seen[0] not in "~-",
            source=f"{_DOCUMENTS[major, minor]}; {sms_text}; {seen_text}",
        )
        aliases |= dict.fromkeys(others, name)
    for found in sorted(cards.values(), key=lambda one: one.memory_bytes):
        aliases.setdefault(re.sub(r"-\d+gb$", "", found.name), found.name)
    return cards, {alias: name for alias, name in aliases.items() if alias not in cards}


def names() -> tuple[str, ...]:
    """Every card's name, as `--device` takes it."""
    return tuple(_index()[0])


def card(name: str) -> Card:
    """The card of that name: our key, CUDA's own name, or what people type.

    >>> card("NVIDIA GeForce RTX 4090").name, card("a100").name, card("A100-SXM4-80GB").name, card("3080ti").name
    ('rtx-4090', 'a100-40gb', 'a100-80gb', 'rtx-3080-ti')
    """
    cards, aliases = _index()
    key = _normal(name)
    plain = re.sub(r"-(sxm\d?|pcie|hbm\d?e?)(?=-|$)", "", key)
    for form in (key, plain, f"rtx-{plain}", f"gtx-{plain}", f"jetson-{plain}"):
        if form in cards or form in aliases:
            return cards[aliases.get(form, form)]
        stem, _, gib = form.removesuffix("gb").rpartition("-")  # rtx-4090-24gb: right, but more than the key says
        found = cards.get(aliases.get(stem, stem))
        if form.endswith("gb") and found is not None and gib == str(found.memory_bytes // GIB):
            return found
    import difflib  # only for the message

    near = difflib.get_close_matches(key, [*cards, *aliases], n=9, cutoff=0.0)
    first, second, third = list(dict.fromkeys(aliases.get(one, one) for one in near))[:3]
    raise MisuseError(
        rule="--device must be cpu, cuda or a card that oomguard knows",
        got=f"got {name!r}",
        advice=f"Did you mean {first}, {second} or {third}? For another card, take one of its generation and --budget.",
    )


def _normal(name: str) -> str:
    """Lower case with dashes, without the words that say nothing.

    >>> _normal("NVIDIA GeForce RTX 3060 Laptop GPU"), _normal("rtx3080Ti"), _normal("RTX A6000")
    ('rtx-3060-laptop', 'rtx-3080-ti', 'rtx-a6000')
    """
    text = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("mobile", "laptop").replace("tisuper", "ti-super"))
    text = re.sub(r"(?<![a-z])(rtx|gtx)(?=a?\d)", r"\1-", text)
    text = re.sub(r"(?<=\d)-?(ti|super)(?=-|$)", r"-\1", text)
    text = re.sub(r"(?<![a-z0-9])(\d+)-?(gib|gb|g)(?=-|$)", r"\1gb", text)
    return "-".join(word for word in text.split("-") if not _NOISE.fullmatch(word))
