"""Advice: what would lower the peak of one candidate. Every figure is the estimate of the changed spec or candidate.

shortfall.py asks the same for a whole search. It tries the same changes of the spec (`change_spec`) and writes changes
in the same words (`in_flags`), but its figures are those of all candidates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, SupportsInt

import msgspec
import numpy as np

from oomguard._core.errors import MisuseError, flag
from oomguard._core.units import format_bytes
from oomguard._estimate.breakdown import Estimate, estimate_batch, estimate_step, margin_bytes
from oomguard._estimate.engines import cudnn
from oomguard._estimate.malloc import setting_of
from oomguard._estimate.passes import make_pass, piece_steps
from oomguard._estimate.target import Target
from oomguard._predict.calibration import Prediction
from oomguard._search.lengths import padded_share, padded_tokens
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, serve
from oomguard._spec.spec import Spec

WORTH = 0.05
"""The least share of the peak that a change must save to be named, unless it makes the candidate fit."""
CLIFF = {"gru": 5.85, "lstm": 3.36}
"""How much slower a step becomes from hidden 128 to 129 on an A100: HanXuxx/RNN_kernel docs/a100_baseline_study.md."""
NEAR = 8
"""A hidden size just above a cliff is at most one part in 8 above it."""
NATIVE_TIME = 1.3
"""Time of a native LSTM in units of oneDNN's, torch 2.13 on a 2-core CPU, T = 500, B = 16."""
FAMILIES = (("sgd-momentum", "sgd"), ("adam", "adamw", "rmsprop", "adagrad", "adafactor", "adam8bit"))
"""Optimizers that can replace one another."""


class Cost(IntEnum):
    """The cost of a change: none, since it is unavoidable; none; time; another or a less exact training."""

    MUST, NOTHING, TIME, TRAINING = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change, and what would then be needed."""

    text: str
    """The change in a sentence."""
    need: Prediction
    """The peak and its margin after the change."""
    cost: Cost
    fields: dict[str, Any] = field(default_factory=dict)
    """The new fields of the spec and the new knobs."""
    sure: bool = False
    """Whether it is worth naming whatever it saves."""


def in_flags(**fields: Any) -> str:
    """Fields of a spec, knobs or options as the command line takes them.

    >>> in_flags(microbatch=8, layer_norm=True, batch_first=False)
    '--microbatch 8 --layer-norm no --batch-first'
    """
    words = {True: "{}", False: "no {}"}
    return " ".join(
        (words[value] if isinstance(value, bool) else f"{{}} {value}").format(flag(name))
        for name, value in fields.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An estimated candidate that advice is asked for."""

    spec: Spec
    estimate: Estimate
    candidate: Candidate
    target: Target

    @property
    def training(self) -> bool:
        """Whether the estimate is of a training step, not of an evaluation pass."""
        return "optimizer" in self.estimate.moments

    @property
    def now(self) -> Prediction:
        """What is needed without any change."""
        return _need(self.estimate.total_bytes, self.estimate.margin_bytes)

    @property
    def tight(self) -> bool:
        """Whether it needs over half of the budget: below that, nothing that costs time or exactness is advised."""
        budget_bytes = self.estimate.budget_bytes
        return budget_bytes is None or 2 * self.now.safe_bytes > budget_bytes

    @property
    def most_steps(self) -> int:
        """Steps that the engine takes in one call."""
        return cudnn.MAX_STEPS if self.estimate.engine == "cudnn" else self.spec.steps

    def need(self, **fields: Any) -> Prediction | None:
        """What is needed with other fields of the spec or other knobs; None if they cannot be."""
        knobs = {name: value for name, value in fields.items() if name in KNOBS}
        try:
            spec = msgspec.structs.replace(self.spec, **{k: v for k, v in fields.items() if k not in KNOBS})
            candidate = msgspec.structs.replace(self.candidate, **knobs)
            estimate = estimate_step(spec, candidate, self.target, training=self.training)
        except MisuseError:
            return None
        return _need(estimate.total_bytes, margin_bytes(spec, estimate.growth_bytes, candidate, self.target))

    def needs(self, **arrays: Any) -> list[Prediction]:
        """What is needed with each value of some knobs; the accumulation follows the microbatch."""
        knobs = msgspec.structs.asdict(self.candidate) | {"accumulation": None} | arrays
        estimate = estimate_batch(self.spec, serve(self.spec, Candidates(**knobs)), self.target, training=self.training)
        return [*map(_need, np.asarray(estimate.total_bytes), np.asarray(estimate.margin_bytes))]

    def rescues(self, need: Prediction) -> bool:
        """Whether this fits, and the candidate as it is does not."""
        budget_bytes = self.estimate.budget_bytes
        return budget_bytes is not None and need.safe_bytes <= budget_bytes < self.now.safe_bytes

    def change(self, reason: str, cost: Cost, need: Prediction | None = None, **fields: Any) -> Iterator[Change]:
        """A change to some fields or knobs, with a reason and both figures after its flags, if it lowers the peak."""
        need = need or self.need(**fields)
        if need is not None and need.peak_bytes < self.now.peak_bytes:
            text = f"{in_flags(**fields)}{reason}: {self.compare(need)}."
            yield Change(text=text, need=need, cost=cost, fields=fields)

    def compare(self, need: Prediction) -> str:
        """The peak after and before a change."""
        return f"{format_bytes(need.peak_bytes)} instead of {format_bytes(self.now.peak_bytes)}"


def _need(peak_bytes: SupportsInt, margin: SupportsInt) -> Prediction:
    return Prediction(peak_bytes=int(peak_bytes), margin_bytes=int(margin), seconds_per_step=None)


def advise(spec: Spec, estimate: Estimate, target: Target) -> list[str]:
    """At most three changes that lower the peak, the most valuable first.

    Unavoidable ones come first, then those that make it fit, the cheapest first, then those that save most.

    >>> from oomguard._estimate.target import CPU
    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> advise(spec, estimate_step(spec, Candidate(microbatch=32)), CPU)[0].split(":")[0].split(", ")
    ['--segments 108', 'the same gradient for one more forward pass']
    """
    if isinstance(estimate.candidate, Candidates):
        raise MisuseError(
            rule="Advice is about one candidate", got="got an array of them", advice="Estimate one of them, [i], again."
        )
    case = Case(spec=spec, estimate=estimate, candidate=estimate.candidate, target=target)

    def order(change: Change) -> tuple[Any, ...]:
        rescues = case.rescues(change.need)
        return change.cost is not Cost.MUST, not rescues, change.cost, 0 if rescues else change.need.peak_bytes

    topics = [_too_long, _cliff, _wider, _padding, change_spec, _settings, *([_pieces] if case.tight else [])]
    changes = [change for topic in topics for change in topic(case)]
    most_bytes = (1 - WORTH) * case.now.peak_bytes
    if any(case.rescues(change.need) for change in changes):  # then only those that make it fit are worth reading
        most_bytes = -1
    worth = [change for change in changes
             if change.sure or case.rescues(change.need) or change.need.peak_bytes <= most_bytes]  # fmt: skip
    return [change.text for change in sorted(worth, key=order)[:3]]


def _too_long(case: Case) -> Iterator[Change]:
    """cuDNN's limit of time steps, whose error other tools take for an out-of-memory one."""
    steps = piece_steps(case.spec, case.candidate)
    if steps > case.most_steps:
        text = f"cuDNN takes at most {case.most_steps:,} steps at a time, not {steps:,}: this would fail. "
        fewest = in_flags(segments=-(-case.spec.steps // case.most_steps))
        curable = case.training or not case.spec.bidirectional
        text += f"{fewest} or more cures it." if curable else "Shorten the sequences."
        yield Change(text=text, need=case.now, cost=Cost.MUST, sure=True)


def _small_hidden(case: Case, hidden: int, *, backward: bool) -> bool:
    """Whether cuDNN would run its algorithm for small hidden sizes."""
    try:
        spec = msgspec.structs.replace(case.spec, hidden=hidden)
    except MisuseError:
        return False
    if case.estimate.engine != "cudnn":
        return False
    call = make_pass(spec, case.candidate, case.target, steps=piece_steps(spec, case.candidate)).calls[0]
    return bool(cudnn.is_persistent(call, case.target, half=False, backward=backward))


def _cliff(case: Case) -> Iterator[Change]:
    """A hidden size just above the largest one whose backward pass has a faster algorithm, where that was measured."""
    hidden = case.spec.hidden
    least = hidden - hidden // NEAR
    fast = [_small_hidden(case, size, backward=True) for size in (least, hidden)]
    if case.spec.cell not in CLIFF or fast != [True, False]:
        return
    lower = max(size for size in range(least, hidden) if _small_hidden(case, size, backward=True))
    if (need := case.need(hidden=lower)) is not None:
        text = f"{in_flags(hidden=lower)} instead of {hidden} lets cuDNN run its fast algorithm for small sizes "
        text += f"(on an A100, 129 was {CLIFF[case.spec.cell]} times slower than 128), at {case.compare(need)}."
        yield Change(text=text, need=need, cost=Cost.NOTHING, sure=True)


def _wider(case: Case) -> Iterator[Change]:
    """A larger hidden size that needs less: cuDNN's algorithm for small ones has the larger workspace."""
    hidden = case.spec.hidden
    wider = range(-(-(hidden + 1) // 32) * 32, 2 * hidden + 1, 32)
    reason = f" would need less than {hidden}, since cuDNN then takes another algorithm"
    sizes = wider if _small_hidden(case, hidden, backward=False) else ()
    yield from [change for size in sizes for change in case.change(reason, Cost.NOTHING, hidden=size)][-1:]


def _padding(case: Case) -> Iterator[Change]:
    """Padding, where each microbatch is padded to the longest of its sequences."""
    lengths = case.spec.lengths
    if not lengths or case.spec.packed:
        return
    share = padded_share(lengths, padded_tokens(lengths, case.candidate.microbatch))
    if share >= WORTH:
        need = min(case.need(packed=True) or case.now, case.now, key=lambda prediction: prediction.peak_bytes)
        text = f"{share:.0%} of the tokens are padding: batch sequences of similar length"
        text += ", or use --packed" if case.target.cuda else ""  # the CPU computes padding either way (model.py)
        text += f", {case.compare(need)}." if need.peak_bytes < case.now.peak_bytes else "."
        yield Change(text=text, need=need, cost=Cost.NOTHING, sure=True)


def change_spec(case: Case) -> Iterator[Change]:
    """Changes that no search makes by itself: time-first tensors, the optimizer of the same family that needs least."""
    if case.spec.batch_first:
        yield from case.change(", since time-first tensors need no copies", Cost.NOTHING, batch_first=False)
    if case.tight and case.training:
        old = case.spec.optimizer
        family = next(names for names in FAMILIES if old in names)
        others = [name for name in family if name != old and (name != "adam8bit" or case.target.cuda)]
        reason = f" instead of {old} keeps less"
        less = [change for name in others for change in case.change(reason, Cost.TRAINING, optimizer=name)]
        yield from sorted(less, key=lambda change: change.need.peak_bytes)[:1]


def _settings(case: Case) -> Iterator[Change]:
    """Single settings: some cost nothing, others time or exactness."""
    knobs, bf16 = case.candidate, "bf16" in case.target.card_precisions
    if not case.target.cuda and setting_of(knobs.allocator) != "steady":
        yield from case.change(" gives freed memory back to the system", Cost.TIME, allocator="steady")
    if case.training and knobs.update == "foreach":
        yield from case.change(" makes no copies of the gradients", Cost.NOTHING, update="fused")
    if case.tight and case.estimate.engine == "onednn":
        yield from case.change(f", at about {NATIVE_TIME} times the time", Cost.TIME, engine="native")
    if case.tight and knobs.precision == "fp32" and bf16:
        yield from case.change(", not quite the same gradient", Cost.TRAINING, precision="bf16")


def _pieces(case: Case) -> Iterator[Change]:
    """A smaller microbatch; segments; both together if neither is enough."""
    changes = [*_microbatch(case), *_segments(case)]
    yield from changes
    sizes = [2**power for power in reversed(range((case.candidate.microbatch - 1).bit_length()))]
    pairs = [(size, pieces) for size in sizes for pieces in _segment_counts(case)]
    if not pairs or case.estimate.fits or any(case.rescues(change.need) for change in changes):
        return
    needs = case.needs(microbatch=[m for m, _ in pairs], segments=[s for _, s in pairs], recompute=True)
    enough = [(pair, need) for pair, need in zip(pairs, needs, strict=True) if case.rescues(need)]
    for (size, pieces), need in enough[:1]:
        yield from case.change(", the same gradient", Cost.TIME, need, microbatch=size, segments=pieces)


def _microbatch(case: Case) -> Iterator[Change]:
    """The largest microbatch that fits, or a single sequence; of equally many passes the smallest."""
    sizes = [*range(1, min(case.candidate.microbatch, 4097))]
    if not sizes or case.estimate.fits or piece_steps(case.spec, case.candidate) > case.most_steps:
        return
    needs = case.needs(microbatch=sizes)
    most = max((size for size in sizes if case.rescues(needs[size - 1])), default=1)
    passes = -(-case.spec.batch // most)
    size = -(-case.spec.batch // passes)
    reason = f", the same gradient in {passes} passes"
    yield from case.change(reason, Cost.TIME, needs[size - 1], microbatch=size, accumulation=passes)


def _segments(case: Case) -> Iterator[Change]:
    """The fewest segments that fit, or the fewest after which more save little."""
    if not (counts := _segment_counts(case)):
        return
    needs = dict(zip(counts, case.needs(segments=counts, recompute=True), strict=True))
    least_bytes = min(need.peak_bytes for need in needs.values())
    enough = [count for count in counts if case.rescues(needs[count])]
    near = [count for count in counts if needs[count].peak_bytes <= (1 + WORTH) * least_bytes]
    chosen = (enough or near)[0]
    reason = ", the same gradient for one more forward pass"
    yield from case.change(reason, Cost.TIME, needs[chosen], segments=chosen)


def _segment_counts(case: Case) -> list[int]:
    """More segments than now, up to one for each step, each number about a fifth more than the one before."""
    steps = case.spec.steps
    if not case.training or case.candidate.window is not None:
        return []
    counts = {min(steps, round(2 ** (power / 4))) for power in range(math.ceil(4 * math.log2(steps)) + 1)}
    return sorted(
        count for count in counts if count > case.candidate.segments and -(-steps // count) <= case.most_steps
    )
