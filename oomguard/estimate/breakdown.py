"""Estimate: the peak of one optimizer step, as the largest of its moments, with the terms of that moment.

A step is a sequence of moments: forward, the loss, the backward of each call, the optimizer. At each of them other
things are alive; the peak is the largest sum, never a sum of everything.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oomguard.candidate import Candidate, Candidates
from oomguard.estimate import terms
from oomguard.estimate.allocator import reserved_bytes
from oomguard.estimate.call import Count, maximum
from oomguard.estimate.engines import cudnn
from oomguard.estimate.moments import TERMS, Moments, Terms, evaluation_moments, training_moments
from oomguard.estimate.passes import Pass, border_bytes, by_layer_bytes, make_pass, piece_steps, stays_on_host
from oomguard.estimate.place import CPU, Place
from oomguard.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted peak of a candidate. Every figure is an int, or an array for an array of candidates.

    >>> import oomguard
    >>> found = oomguard.estimate(cell="lstm", seq=10_000, device="t4")
    >>> found.fits, found.moment, max(found.terms, key=found.terms.get)
    (True, 'backward of the layers', 'activations')
    >>> found.total_bytes == sum(found.terms.values())
    True
    """

    total_bytes: Count
    """The peak: resident bytes of the process (CPU), what the card would show for it (CUDA)."""
    terms: Terms
    """The summands of the peak."""
    moment: Any
    """When it happens, such as `forward` or `backward of layer 2`."""
    moments: dict[str, Count] = field(repr=False)
    """The total of every moment, in the unit of `total_bytes`."""
    engine: Any
    """The kernel that runs the cell."""
    device: str
    """Where."""
    candidate: Candidate | Candidates
    """What was estimated."""
    allocated_bytes: Count | None = None
    """CUDA: what `torch.cuda.max_memory_allocated` would say."""
    reserved_bytes: Count | None = None
    """CUDA: what `torch.cuda.max_memory_reserved` would say."""
    host_bytes: Count = 0
    """CUDA: host memory of the input pipeline, of an offloaded optimizer state, of a microbatch that stays there."""
    steps: Count = 0
    """Time steps that the kernel takes at once."""
    budget_bytes: int | None = None
    """What the process may use there; None if nobody asked whether it fits."""
    margin_bytes: Count = 0
    """What is added before the comparison with the budget, because estimates err."""

    @property
    def runs(self) -> Any:
        """Whether the engine takes so many steps at once: cuDNN refuses more than 65,535, whatever the memory."""
        too_long = (self.engine == "cudnn") & (self.steps > cudnn.MAX_STEPS)
        return ~too_long if isinstance(too_long, np.ndarray) else not too_long

    @property
    def fits(self) -> Any:
        """Whether it runs, with total and margin within the budget; None without a budget."""
        if self.budget_bytes is None:
            return None
        return self.runs & (self.total_bytes + self.margin_bytes <= self.budget_bytes)

    @property
    def growth_bytes(self) -> Count:
        """The peak over the runtime: what the model itself costs."""
        return self.total_bytes - self.terms["runtime"]


def estimate_step(spec: Spec, candidate: Candidate, place: Place = CPU, *, training: bool = True) -> Estimate:
    """The estimate of one optimizer step or, with `training=False`, of one evaluation pass without gradients.

    >>> estimate_step(Spec(cell="lstm", seq=1000), Candidate(microbatch=32)).moment
    'backward of layer 2'
    """
    return _assemble(*step_moments(spec, candidate, place, training=training))


def step_moments(
    spec: Spec, candidate: Candidate, place: Place = CPU, *, training: bool = True
) -> tuple[Pass, Moments]:
    """The pass that a step consists of, and its moments with what is alive at each, before an allocator rounds it."""
    step = make_pass(spec, candidate, place, steps=piece_steps(spec, candidate))
    if not training:
        return step, evaluation_moments(step)
    whole = not candidate.recompute and candidate.window is None
    kept = make_pass(spec, candidate, place, steps=spec.steps) if whole else step
    return step, training_moments(step, kept)


def _assemble(step: Pass, moments: Moments) -> Estimate:
    totals = {name: sum(parts[term] for term in TERMS) for name, parts in moments.items()}
    found, moment = _largest(moments, totals)
    cuda, runtime, expandable = step.place.cuda, step.place.runtime_bytes, step.candidate.allocator == "expandable"
    allocated = sum(found[term] for term in TERMS) - runtime if cuda else None
    if cuda:  # the rest of the segments that the blocks are cut from goes where the blocks are
        reserved = reserved_bytes(allocated, expandable=expandable)
        found = found | {"workspace": found["workspace"] + reserved - allocated}
        totals = {name: runtime + reserved_bytes(n - runtime, expandable=expandable) for name, n in totals.items()}
    return Estimate(
        total_bytes=sum(found[term] for term in TERMS),
        terms=found,
        moment=moment,
        moments=totals,
        engine=step.engine,
        device=step.place.device,
        candidate=step.candidate,
        allocated_bytes=allocated,
        reserved_bytes=reserved if cuda else None,
        host_bytes=_host_bytes(step) if cuda else 0,
        steps=step.calls[0].steps,
    )


def _largest(moments: Moments, totals: dict[str, Count]) -> tuple[Terms, Any]:
    """The terms and the name of the moment with the largest total, element by element."""
    peak = maximum(*totals.values())
    if not isinstance(peak, np.ndarray):
        latest = max(totals, key=lambda name: totals[name])
        return moments[latest], latest
    found: Terms = {term: np.zeros_like(peak) for term in TERMS}
    moment = np.empty(peak.shape, dtype=f"U{max(map(len, moments))}")
    for name, parts in reversed(moments.items()):  # the first of equal moments wins, as `max` has it
        here = totals[name] == peak
        moment[here] = name
        for term in TERMS:
            np.copyto(found[term], parts[term], where=here)
    return found, moment


def _host_bytes(step: Pass) -> Count:
    spec, candidate = step.spec, step.candidate
    host = terms.loader_bytes(spec, candidate, pinned=True)
    host = host + (terms.optimizer_bytes(spec, candidate) if candidate.offload else 0)
    stays = terms.input_bytes(spec, candidate) + border_bytes(step) + by_layer_bytes(step)
    return host + (stays if stays_on_host(step) else 0)
