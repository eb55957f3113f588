"""Advice: what would lower the peak, and by how much. Every figure is the estimator's own answer to "what if?"."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from oomguard.candidate import Candidate, Candidates
from oomguard.errors import MisuseError
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.engines import cudnn
from oomguard.estimate.malloc import setting_of
from oomguard.estimate.passes import make_pass, piece_steps
from oomguard.estimate.place import Place
from oomguard.estimate.what_if import Need, WhatIf
from oomguard.spec import Spec
from oomguard.units import format_bytes

WORTH = 0.05
"""The least share of the peak that a line must save, unless it makes the candidate fit."""
CLIFF = {"gru": 5.85, "lstm": 3.36}
"""How much slower a step becomes from hidden 128 to 129 on an A100: HanXuxx/RNN_kernel docs/a100_baseline_study.md."""
NEAR = 8
"""A hidden size just above a cliff is at most 1/8 above it."""
NATIVE_TIME = 1.3
"""Time of a native LSTM in units of oneDNN's, torch 2.13 on a 2-core CPU, T = 500, B = 16."""
FAMILIES = (("sgd-momentum", "sgd"), ("adam", "adamw", "rmsprop", "adagrad", "adafactor", "adam8bit"))
"""Optimizers that stand in for one another."""


class Cost(IntEnum):
    """What it takes to follow a line: it must be; nothing; time; something else is trained, or not as exactly."""

    MUST, NOTHING, TIME, TRAINING = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One piece of advice."""

    text: str
    """For the user."""
    need: Need
    """If it is followed."""
    cost: Cost
    """What it takes."""
    sure: bool = False
    """Worth saying whatever it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What advice is asked for."""

    spec: Spec
    """What is trained."""
    found: Estimate
    """Its estimate."""
    candidate: Candidate
    """With which knobs."""
    place: Place
    """Where."""

    @property
    def what_if(self) -> WhatIf:
        """Asks the estimator for the need after a change."""
        return WhatIf(spec=self.spec, candidate=self.candidate, place=self.place, training=self.training)

    @property
    def training(self) -> bool:
        """Whether it is a training step, not an evaluation pass."""
        return "optimizer" in self.found.moments

    @property
    def need(self) -> Need:
        """As things are."""
        return Need(int(self.found.total_bytes), int(self.found.total_bytes + self.found.margin_bytes))

    @property
    def tight(self) -> bool:
        """Over half of the budget: below it, nobody wants to pay for memory."""
        return self.found.budget_bytes is None or 2 * self.need.safe_bytes > self.found.budget_bytes

    @property
    def longest(self) -> int:
        """Steps that the engine can take at a time."""
        return cudnn.MAX_STEPS if self.found.engine == "cudnn" else self.spec.steps

    def rescues(self, need: Need) -> bool:
        """Whether this fits, and what was asked for does not."""
        budget_bytes = self.found.budget_bytes
        return budget_bytes is not None and need.safe_bytes <= budget_bytes < self.need.safe_bytes

    def matters(self, line: Line) -> bool:
        """Whether a line saves enough to be read."""
        saved_bytes = self.need.peak_bytes - line.need.peak_bytes
        return line.sure or self.rescues(line.need) or saved_bytes >= WORTH * self.need.peak_bytes

    def order(self, line: Line) -> tuple[Any, ...]:
        """What must be done, then what makes it fit; of those the cheapest first, of others what saves most."""
        rescues = self.rescues(line.need)
        return line.cost is not Cost.MUST, not rescues, line.cost, 0 if rescues else line.need.peak_bytes

    def line(self, text: str, need: Need | None, cost: Cost) -> Iterator[Line]:
        """The advice with both figures at its end, if it lowers the peak."""
        if need is not None and need.peak_bytes < self.need.peak_bytes:
            yield Line(text=f"{text}: {self.change(need)}.", need=need, cost=cost)

    def change(self, need: Need) -> str:
        """Before and after, for people."""
        return f"{format_bytes(need.peak_bytes)} instead of {format_bytes(self.need.peak_bytes)}"


def advise(spec: Spec, estimate: Estimate, place: Place) -> list[str]:
    """At most three lines, the most valuable first.

    >>> from oomguard.estimate.breakdown import estimate_step
    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> advise(spec, estimate_step(spec, Candidate(microbatch=32)), CPU)[0].split(":")[0].split(", ")
    ['--segments 108', 'the same gradient for one more forward pass']
    """
    if isinstance(estimate.candidate, Candidates):
        raise MisuseError(
            rule="Advice is about one candidate", got="got an array of them", advice="Estimate one of them, [i], again."
        )
    case = Case(spec=spec, found=estimate, candidate=estimate.candidate, place=place)
    topics = [_too_long, _cliff, _wider, _copies, _heap, _padding, _updates]
    if case.tight:
        topics += [_pieces, _engine, _precision, _optimizer]
    lines = [line for topic in topics for line in topic(case) if case.matters(line)]
    if any(case.rescues(line.need) for line in lines):  # then what does not is not worth reading
        lines = [line for line in lines if line.sure or case.rescues(line.need)]
    return [line.text for line in sorted(lines, key=case.order)[:3]]


def _too_long(case: Case) -> Iterator[Line]:
    """cuDNN's limit of time steps, whose error other tools take for an out-of-memory one."""
    steps = piece_steps(case.spec, case.candidate)
    if steps > case.longest:
        text = f"cuDNN takes at most {case.longest:,} steps at a time, not {steps:,}: this would fail. "
        fewest = -(-case.spec.steps // case.longest)
        curable = case.training or not case.spec.bidirectional
        text += f"--segments {fewest} or more cures it." if curable else "Shorten the sequences."
        yield Line(text=text, need=case.need, cost=Cost.MUST, sure=True)


def _small(case: Case, hidden: int, *, backward: bool) -> bool:
    """Whether cuDNN would run its algorithm for small hidden sizes."""
    try:
        spec = msgspec.structs.replace(case.spec, hidden=hidden)
    except MisuseError:
        return False
    if case.found.engine != "cudnn" or case.place.platform is None:
        return False
    call = make_pass(spec, case.candidate, case.place, steps=piece_steps(spec, case.candidate)).calls[0]
    chosen = cudnn.algorithm(call, case.place.platform, half=False, backward=backward)
    return bool(chosen == cudnn.Algorithm.PERSIST_STATIC_SMALL_H)


def _cliff(case: Case) -> Iterator[Line]:
    """A hidden size just above one up to which cuDNN goes backward by a faster algorithm, where that was measured."""
    hidden = case.spec.hidden
    least = hidden - hidden // NEAR
    if case.spec.cell not in CLIFF or not _small(case, least, backward=True) or _small(case, hidden, backward=True):
        return
    lower = max(size for size in range(least, hidden) if _small(case, size, backward=True))
    need = case.what_if.need({"hidden": lower})
    if need is not None:
        text = f"--hidden {lower} instead of {hidden} lets cuDNN run its fast algorithm for small sizes "
        text += f"(on an A100, 129 was {CLIFF[case.spec.cell]} times slower than 128), at {case.change(need)}."
        yield Line(text=text, need=need, cost=Cost.NOTHING, sure=True)


def _wider(case: Case) -> Iterator[Line]:
    """A larger hidden size that needs less: cuDNN's algorithm for small ones has the larger workspace."""
    hidden = case.spec.hidden
    sizes = range(-(-(hidden + 1) // 32) * 32, 2 * hidden + 1, 32) if _small(case, hidden, backward=False) else ()
    needs = {size: need for size in sizes if (need := case.what_if.need({"hidden": size})) is not None}
    less = [size for size, need in needs.items() if need.peak_bytes < case.need.peak_bytes]
    if less:
        text = f"--hidden {max(less)} would need less than {hidden}, since cuDNN then takes another algorithm"
        yield from case.line(text, needs[max(less)], Cost.NOTHING)


def _copies(case: Case) -> Iterator[Line]:
    if case.spec.batch_first:
        need = case.what_if.need({"batch_first": False})
        yield from case.line("Time-first tensors (no --batch-first) save the layout's copies", need, Cost.NOTHING)


def _heap(case: Case) -> Iterator[Line]:
    if not case.place.cuda and setting_of(case.candidate.allocator) != "steady":
        need = case.what_if.need(allocator="steady")
        yield from case.line("--allocator steady gives freed memory back to the system", need, Cost.TIME)


def _padding(case: Case) -> Iterator[Line]:
    """Tokens that are only padding, where each microbatch is padded to the longest of its sequences."""
    if not case.spec.lengths or case.spec.packed:
        return
    share = padded_share(case.spec.lengths, case.candidate.microbatch)
    if share >= WORTH:
        need = min(case.what_if.need({"packed": True}) or case.need, case.need)
        text = f"{share:.0%} of the tokens are padding: batch sequences of similar length"
        text += ", or use --packed" if case.place.cuda else ""  # the CPU computes padding either way (model.py)
        text += f", {case.change(need)}." if need < case.need else "."
        yield Line(text=text, need=need, cost=Cost.NOTHING, sure=True)


def padded_share(lengths: dict[int, int], microbatch: int) -> float:
    """The expected share of padding in a microbatch of so many sequences drawn at random: `1 - mean / E[longest]`.

    >>> padded_share({100: 1, 300: 1}, 1), round(padded_share({100: 1, 300: 1}, 2), 3)
    (0.0, 0.2)
    """
    total, mean, longest, below = sum(lengths.values()), 0.0, 0.0, 0
    for length, count in sorted(lengths.items()):
        mean += length * (count / total)
        longest += length * (((below + count) / total) ** microbatch - (below / total) ** microbatch)
        below += count
    return max(0.0, 1 - mean / longest)


def _updates(case: Case) -> Iterator[Line]:
    if case.training and case.candidate.update == "foreach":
        text = "--update fused makes no copies of the gradients"
        yield from case.line(text, case.what_if.need(update="fused"), Cost.NOTHING)


def _pieces(case: Case) -> Iterator[Line]:
    """A smaller microbatch; segments; both together if neither is enough. The least that fits, or what saves most."""
    lines = [*_microbatch(case), *_segments(case)]
    yield from lines
    sizes = [2**power for power in reversed(range((case.candidate.microbatch - 1).bit_length()))]
    pairs = [(size, pieces) for size in sizes for pieces in _segment_counts(case)]
    if not pairs or case.found.fits or any(case.rescues(line.need) for line in lines):
        return
    needs = case.what_if.needs(microbatch=[m for m, _ in pairs], segments=[s for _, s in pairs], recompute=True)
    enough = [(pair, need) for pair, need in zip(pairs, needs, strict=True) if case.rescues(need)]
    for (size, pieces), need in enough[:1]:
        yield from case.line(f"--microbatch {size} --segments {pieces}, the same gradient", need, Cost.TIME)


def _microbatch(case: Case) -> Iterator[Line]:
    """The largest microbatch that fits, or a single sequence; with the same passes, all of one size."""
    sizes = [*range(1, min(case.candidate.microbatch, 4097))]
    if not sizes or case.found.fits or piece_steps(case.spec, case.candidate) > case.longest:
        return
    needs = case.what_if.needs(microbatch=sizes)
    most = max((size for size in sizes if case.rescues(needs[size - 1])), default=1)
    passes = -(-case.spec.batch // most)
    size = -(-case.spec.batch // passes)
    text = f"--microbatch {size} --accumulation {passes}, the same gradient in {passes} passes"
    yield from case.line(text, needs[size - 1], Cost.TIME)


def _segments(case: Case) -> Iterator[Line]:
    """The fewest segments that fit, or those after which more save little."""
    if not (counts := _segment_counts(case)):
        return
    needs = dict(zip(counts, case.what_if.needs(segments=counts, recompute=True), strict=True))
    least_bytes = min(need.peak_bytes for need in needs.values())
    enough = [one for one in counts if case.rescues(needs[one])]
    near = [one for one in counts if needs[one].peak_bytes <= (1 + WORTH) * least_bytes]
    chosen = (enough or near)[0]
    text = f"--segments {chosen}, the same gradient for one more forward pass"
    yield from case.line(text, needs[chosen], Cost.TIME)


def _segment_counts(case: Case) -> list[int]:
    """More segments than now, up to one for each step, each number about a fifth more than the one before."""
    steps = case.spec.steps
    if not case.training or case.candidate.window is not None:
        return []
    counts = {min(steps, round(2 ** (power / 4))) for power in range(math.ceil(4 * math.log2(steps)) + 1)}
    return sorted(one for one in counts if one > case.candidate.segments and -(-steps // one) <= case.longest)


def _engine(case: Case) -> Iterator[Line]:
    if case.found.engine == "onednn":
        text = f"--engine native, at about {NATIVE_TIME} times the time"
        yield from case.line(text, case.what_if.need(engine="native"), Cost.TIME)


def _precision(case: Case) -> Iterator[Line]:
    platform = case.place.platform
    if platform is not None and platform.capability >= (8, 0) and case.candidate.precision == "fp32":
        need = case.what_if.need(precision="bf16")
        yield from case.line("--precision bf16, not quite the same gradient", need, Cost.TRAINING)


def _optimizer(case: Case) -> Iterator[Line]:
    """The optimizer of the same family that needs least."""
    family = next(names for names in FAMILIES if case.spec.optimizer in names)
    others = [name for name in family if name != case.spec.optimizer and (name != "adam8bit" or case.place.cuda)]
    needs = {name: need for name in others if (need := case.what_if.need({"optimizer": name})) is not None}
    if needs and case.training:
        best = min(needs, key=lambda name: needs[name])
        text = f"--optimizer {best} instead of {case.spec.optimizer} keeps less"
        yield from case.line(text, needs[best], Cost.TRAINING)
