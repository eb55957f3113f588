"""Advice: what would make one candidate fit (`advise`), or any candidate of a search (`explain`), with its figures."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from oomguard._core.errors import MisuseError, flag
from oomguard._core.units import format_bytes
from oomguard._estimate.breakdown import Estimate, estimate_batch, estimate_step
from oomguard._estimate.engines import cudnn
from oomguard._estimate.passes import make_pass, piece_steps
from oomguard._estimate.target import Target
from oomguard._plan.buckets import padded_share, padded_tokens
from oomguard._plan.value import Shortfall, Way, figures
from oomguard._predict.calibration import Prediction
from oomguard._probe.record import Record
from oomguard._search.screen import screen
from oomguard._search.space import Problem, has_8bit, make_space
from oomguard._spec.candidate import ALLOWED, KNOBS, Candidate, Candidates, serve
from oomguard._spec.lengths import longest_that_fits, with_steps
from oomguard._spec.spec import Spec

WORTH = 0.05  # the least share of the peak that a change must save to be named, unless it makes the candidate fit
CLIFF = {"gru": 5.85, "lstm": 3.36}
"""How much slower a step becomes from hidden 128 to 129 on an A100: HanXuxx/RNN_kernel docs/a100_baseline_study.md."""
NEAR = 8  # a hidden size just above a cliff is at most one part in 8 above it
NATIVE_TIME = 1.3  # time of a native LSTM in units of oneDNN's, torch 2.13 on a 2-core CPU, T = 500, B = 16
FAMILIES = (("sgd-momentum", "sgd"), ("adam", "adamw", "rmsprop", "adagrad", "adafactor", "adam8bit"))
"""Optimizers that can replace one another."""
MOST = 0.9  # from this share of the budget on, the runtime alone is what does not fit
WORTH_STEPS = 16  # shorter sequences than this are not advised


class Cost(IntEnum):
    """The cost of a change, the lowest first. MUST: it cannot run without the change. TRAINING: results differ."""

    MUST, NOTHING, TIME, TRAINING = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change in one sentence, and the prediction after it."""

    text: str
    need: Prediction
    cost: Cost
    fields: dict[str, Any] = field(default_factory=dict)
    """The new fields of the spec and the new knobs. Without any, the change is named even if it saves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An estimated candidate that advice is asked for."""

    spec: Spec
    estimate: Estimate
    candidate: Candidate
    target: Target

    @property
    def training(self) -> bool:
        return "optimizer" in self.estimate.moments

    @property
    def now(self) -> Prediction:
        return _needs(self.estimate)[0]

    @property
    def tight(self) -> bool:
        """Whether it needs over half of the budget: below that, nothing that costs time or exactness is advised."""
        return 2 * self.now.safe_bytes > (self.estimate.budget_bytes or 0)

    @property
    def most_steps(self) -> int:
        """Steps that the engine takes in one call."""
        return cudnn.MAX_STEPS if self.estimate.engine == "cudnn" else self.spec.steps

    def needs(self, **fields: Any) -> list[Prediction]:
        """Predictions with other fields or knobs, one for each value of a list; empty if there is no such candidate."""
        knobs = msgspec.structs.asdict(self.candidate) | {"accumulation": None}
        knobs |= {name: value for name, value in fields.items() if name in KNOBS}
        try:
            spec = msgspec.structs.replace(self.spec, **{k: v for k, v in fields.items() if k not in KNOBS})
            candidates = serve(spec, Candidates(**knobs))
            return _needs(estimate_batch(spec, candidates, self.target, training=self.training))
        except MisuseError:
            return []

    def rescues(self, need: Prediction) -> bool:
        """Whether this fits, and the candidate as it is does not."""
        budget_bytes = self.estimate.budget_bytes
        return budget_bytes is not None and need.safe_bytes <= budget_bytes < self.now.safe_bytes

    def change(self, reason: str, cost: Cost, need: Prediction | None = None, **fields: Any) -> Iterator[Change]:
        """A change to some fields or knobs, with a reason and both figures after its flags, if it lowers the peak."""
        for less in [need] if need is not None else self.needs(**fields):
            if less.peak_bytes < self.now.peak_bytes:
                text = f"{in_flags(**fields)}{reason}: {self.compare(less)}."
                yield Change(text=text, need=less, cost=cost, fields=fields)

    def compare(self, need: Prediction) -> str:
        return f"{format_bytes(need.peak_bytes)} instead of {format_bytes(self.now.peak_bytes)}"


def _needs(estimate: Estimate) -> list[Prediction]:
    columns = np.atleast_1d(estimate.total_bytes), np.atleast_1d(estimate.margin_bytes)
    pairs = zip(*(column.tolist() for column in columns), strict=True)
    return [Prediction(peak_bytes=peak, margin_bytes=margin, seconds_per_step=None) for peak, margin in pairs]


def in_flags(**fields: Any) -> str:
    """Fields of a spec, knobs or options as the command line takes them."""
    words = {True: "", False: "no "}
    return " ".join(
        words[value] + flag(name)
        if isinstance(value, bool)
        else f"{flag(name)} {','.join(value) if isinstance(value, tuple) else value}"
        for name, value in fields.items()
        if value is not None
    )


def advise(spec: Spec, estimate: Estimate, target: Target) -> list[str]:
    """At most three changes: unavoidable ones, then those that make it fit (the cheapest first) or save most."""
    assert isinstance(estimate.candidate, Candidate)
    case = Case(spec=spec, estimate=estimate, candidate=estimate.candidate, target=target)

    def order(change: Change) -> tuple[object, ...]:
        rescues = case.rescues(change.need)
        return change.cost is not Cost.MUST, not rescues, change.cost, 0 if rescues else change.need.peak_bytes

    topics = [_too_long, _cliff, _wider, _padding, _other_specs, _settings, *([_pieces] if case.tight else [])]
    changes = sorted((change for topic in topics for change in topic(case)), key=order)
    worth = [change for change in changes if case.rescues(change.need)]
    if not worth:  # if something makes it fit, only that is worth reading
        worth = [change for change in changes if change.need.peak_bytes <= (1 - WORTH) * case.now.peak_bytes]
    return [change.text for change in changes if change in worth or not change.fields][:3]


def _too_long(case: Case) -> Iterator[Change]:
    """cuDNN's limit of time steps, whose error other tools take for an out-of-memory one."""
    steps = piece_steps(case.spec, case.candidate)
    if steps > case.most_steps:
        text = f"cuDNN takes at most {case.most_steps:,} steps at a time, not {steps:,}: this would fail. "
        fewest = in_flags(segments=-(-case.spec.steps // case.most_steps))
        curable = case.training or not case.spec.bidirectional
        text += f"{fewest} or more cures it." if curable else "Shorten the sequences."
        yield Change(text=text, need=case.now, cost=Cost.MUST)


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
    for need in case.needs(hidden=lower):
        text = f"{in_flags(hidden=lower)} instead of {hidden} lets cuDNN run its fast algorithm for small sizes "
        text += f"(on an A100, 129 was {CLIFF[case.spec.cell]} times slower than 128), at {case.compare(need)}."
        yield Change(text=text, need=need, cost=Cost.NOTHING)


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
        need = min(case.now, *case.needs(packed=True), key=lambda prediction: prediction.peak_bytes)
        text = f"{share:.0%} of the tokens are padding: batch sequences of similar length"
        text += ", or use --packed" if case.target.cuda else ""  # the CPU computes padding either way (model.py)
        text += f", {case.compare(need)}." if need.peak_bytes < case.now.peak_bytes else "."
        yield Change(text=text, need=need, cost=Cost.NOTHING)


def _other_specs(case: Case) -> Iterator[Change]:
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
    if not case.target.cuda and knobs.allocator in ("system", "fast"):
        yield from case.change(" gives freed memory back to the system", Cost.TIME, allocator="tight")
    if case.training and knobs.update == "foreach":
        yield from case.change(" makes no copies of the gradients", Cost.NOTHING, update="fused")
    if case.tight and case.estimate.engine == "onednn":
        yield from case.change(f", at about {NATIVE_TIME} times the time", Cost.TIME, engine="native")
    if case.tight and knobs.precision == "fp32" and bf16:
        yield from case.change(", not quite the same gradient", Cost.TRAINING, precision="bf16")


def _pieces(case: Case) -> Iterator[Change]:
    """A smaller microbatch; segments; both together if neither is enough."""
    counts = _segment_counts(case)
    changes = [*_microbatch(case), *_segments(case, counts)]
    yield from changes
    sizes = [2**power for power in reversed(range((case.candidate.microbatch - 1).bit_length()))]
    pairs = [(size, pieces) for size in sizes for pieces in counts]
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


def _segments(case: Case, counts: list[int]) -> Iterator[Change]:
    """The fewest segments that fit, or the fewest after which more save little."""
    needs = case.needs(segments=counts, recompute=True) if counts else []
    least_bytes = min((need.peak_bytes for need in needs), default=0)
    pairs = [*zip(counts, needs, strict=True)]
    near = [pair for pair in pairs if pair[1].peak_bytes <= (1 + WORTH) * least_bytes]
    for count, need in ([pair for pair in pairs if case.rescues(pair[1])] or near)[:1]:
        yield from case.change(", the same gradient for one more forward pass", Cost.TIME, need, segments=count)


def _segment_counts(case: Case) -> list[int]:
    """More segments than now, up to one for each step, each number about a fifth more than the one before."""
    steps = case.spec.steps
    if not case.training or case.candidate.window is not None:
        return []
    counts = {min(steps, round(2 ** (power / 4))) for power in range(math.ceil(4 * math.log2(steps)) + 1)}
    fewest = max(case.candidate.segments + 1, -(-steps // case.most_steps))
    return sorted(count for count in counts if count >= fewest)


def explain(problem: Problem, records: Sequence[Record]) -> Shortfall:
    """Why nothing fits: the least that is needed, the largest term of it, and what would lower it."""
    table = screen(problem, records)
    candidate, needed_bytes = table.candidates[table.smallest], int(table.expected.safe_bytes[table.smallest])
    estimate = estimate_step(problem.spec, candidate, problem.target)
    terms = figures(estimate).terms
    # the runtime is named only if it fills most of the budget by itself
    named = [name for name in terms if name != "runtime" or terms[name] > MOST * problem.budget_bytes]
    case = Case(spec=problem.spec, estimate=estimate, candidate=candidate, target=problem.target)
    ways = [way for way in _ways(problem, records, case) if way.needed_bytes < needed_bytes]
    return Shortfall(
        needed_bytes=needed_bytes,
        budget_bytes=problem.budget_bytes,
        candidate=candidate,
        terms=terms,
        term=max(named, key=lambda name: terms[name]),
        ways=tuple(sorted(ways, key=lambda way: not way.fits)),
        records=tuple(records),
    )


def _ways(problem: Problem, records: Sequence[Record], case: Case) -> Iterator[Way]:
    """Each lossy knob by itself and all of them; each fixed knob left to the search; another spec."""
    choices = problem.space.choices

    def way(change: str, spec: Spec = problem.spec, *, allowed: bool = False, **other: Any) -> Way:
        own = replace(choices, **other)
        space = make_space(spec, problem.target, problem.budget_bytes, own) if other else problem.space
        table = screen(replace(problem, spec=spec, space=space), records)
        least = int(table.expected.safe_bytes[table.smallest])
        return Way(change=change, needed_bytes=least, fits=least <= problem.budget_bytes, allowed=allowed)

    for words in [*((word,) for word in ALLOWED), ALLOWED]:
        if "8bit" not in words or has_8bit(problem.spec, problem.target):
            allow = tuple(dict.fromkeys([*choices.allow, *words]))
            yield way(in_flags(allow=",".join(allow)), allow=allow, allowed={*words} <= {*choices.allow})
    for name in choices.fixed:
        rest = {key: value for key, value in choices.fixed.items() if key != name}
        yield way(f"leaving {flag(name)} to the search", fixed=rest)

    def fits(steps: int) -> bool:
        return bool(screen(problem, records, with_steps(problem.spec, steps)).eligible.any())

    steps = longest_that_fits(fits, 0, problem.spec.steps, parts=100)
    if steps >= WORTH_STEPS:
        shorter = in_flags(seq=steps)
        if problem.spec.lengths is not None:  # --seq does not cut a histogram; data can be cut while it is read
            shorter = f"sequences cut to {steps:,} steps (of --data: {in_flags(seq=steps, truncate=True)})"
        yield way(shorter, with_steps(problem.spec, steps))
    for fields in [*(change.fields for change in _other_specs(case)), *_other_models(problem)]:
        with suppress(MisuseError):  # it does not suit the rest of the spec
            yield way(in_flags(**fields), msgspec.structs.replace(problem.spec, **fields))


def _other_models(problem: Problem) -> Iterator[dict[str, Any]]:
    """Fields of a spec that only the user can change, since another model or another training follows."""
    spec = problem.spec
    yield {"optimizer": "sgd"}  # the only one that keeps nothing
    if spec.vocab is not None:
        yield {"sparse_embedding": True, "optimizer": "sgd"}
        yield {"tied": True, "embedding": spec.width, "outputs": spec.vocab}
        yield {"frozen": (*spec.frozen, "embedding")}
        yield {"embedding": (spec.embedding or spec.hidden) // 4}
    yield {"projection": spec.hidden // 4}

    def fits(hidden: int) -> bool:
        narrower = msgspec.structs.replace(spec, hidden=hidden, projection=None)
        return bool(screen(replace(problem, spec=narrower), []).eligible.any())

    hidden = longest_that_fits(fits, 0, spec.hidden, parts=20)
    if hidden:
        yield {"hidden": hidden, "projection": None}
