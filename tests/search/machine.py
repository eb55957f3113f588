"""A machine of which everything is known: it answers probes by formulas, so that a whole search takes milliseconds."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU, Target
from oomguard._predict import speed
from oomguard._probe.record import Record, torch_version
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import Probe, State, propose
from oomguard._search.screen import CandidateTable
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

TITLE = "a machine of formulas"


def features(spec: Spec, knobs: Any, engine: Any, *, cuda: bool) -> dict[str, Any]:
    """What makes a candidate faster or slower than the guess."""
    block = (
        np.asarray(knobs.microbatch) * 16 * spec.hidden * np.where(engine == "native", 1, speed.piece_of(spec, knobs))
    )
    return {
        "all": 1.0,
        "native": np.asarray(engine) == "native",
        "faults": np.asarray(False) if cuda else speed.faults(spec, knobs, engine),
        "threads": np.log2(speed.filled(knobs.threads, 1).astype(float)),
        "rows": np.log2(knobs.microbatch) - 4,
        "pieces": np.greater(knobs.segments, 1),
        "half": np.not_equal(knobs.precision, "fp32"),
        "cold": np.asarray(not cuda) & (block >= 32 * MIB),
    }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is true of it."""

    ratio: float = 1.0
    """Of the real peak without the runtime to the estimate."""
    effects: dict[str, float] = field(default_factory=dict)
    """Of the real time to the guess: the logarithm of each effect, by its name in `features`."""
    target: Target = CPU

    def peak_bytes(self, spec: Spec, candidate: Candidate) -> int:
        found = estimate_step(spec, candidate, self.target)
        known = sum(int(found.terms[name]) for name in ("runtime", "weights", "optimizer", "input"))
        return known + round(self.ratio * (int(found.total_bytes) - known))

    def pass_seconds(self, spec: Spec, candidate: Candidate) -> float:
        engine = estimate_step(spec, candidate, self.target).engine
        columns = features(spec, candidate, engine, cuda=self.target.cuda)
        effect = sum(value * np.atleast_1d(columns[name])[0] for name, value in self.effects.items())
        each = np.atleast_1d(speed.guess(spec, candidate, engine, cuda=self.target.cuda))[0] * np.exp(effect)
        return float(each) * spec.steps * candidate.microbatch

    def fastest(self, view: CandidateTable, budget_bytes: int) -> float:
        """Seconds of a step's passes for the fastest candidate of the whole space that fits."""
        found, spec = view.estimate, view.spec
        known = sum(np.asarray(found.terms[name]) for name in ("runtime", "weights", "optimizer", "input"))
        peaks = known + self.ratio * (found.total_bytes - known)
        columns = features(spec, view.candidates, found.engine, cuda=self.target.cuda)
        effect = sum(value * columns[name] for name, value in self.effects.items())
        each = speed.guess(spec, view.candidates, found.engine, cuda=self.target.cuda) * np.exp(effect)
        return float(np.where(peaks <= budget_bytes, each, np.inf).min()) * spec.steps * spec.batch

    def run(self, spec: Spec, candidate: Candidate, budget_bytes: int, passes: int = 2) -> Record:
        """The record of a probe there."""
        peak, seconds = self.peak_bytes(spec, candidate), self.pass_seconds(spec, candidate)
        fits, found = peak <= budget_bytes, estimate_step(spec, candidate, self.target)
        terms = {name: int(found.terms[name]) for name in ("runtime", "weights", "optimizer", "input")}
        terms["gradients"] = int(found.terms["gradients"])
        step = seconds * spec.batch / candidate.microbatch + 0.001
        measured: dict[str, Any] = {
            "terms": terms | {"rest": peak - sum(terms.values())},
            "peak_bytes": peak,
            "runtime_bytes": terms["runtime"],
            "seconds_per_step": step,
            "tokens_per_second": spec.batch * spec.steps / step,
            "seconds_per_pass": seconds,
            "fastest_pass_seconds": seconds,
            "seconds_per_update": 0.001,
            "passes": passes,
            "steps": 1,
            "library": "formulas 1.0",
        }
        return Record(
            verdict=Verdict.FITS if fits else Verdict.OOM,
            message="It ran." if fits else "It did not.",
            **(measured if fits else {}),
            spec=spec,
            candidate=candidate,
            device="cpu",
            title=TITLE,
            engine=str(found.engine),
            budget_bytes=budget_bytes,
            torch=torch_version(),
            started=(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=_next())).isoformat(
                timespec="milliseconds"
            ),
            seconds=1.0,
        )

    def probe(self, probe: Probe, budget_bytes: int) -> Record:
        record = self.run(probe.spec, probe.candidate, budget_bytes, probe.passes)
        return self.compared(record, probe.rival)

    def compared(self, record: Record, rival: Candidate | None) -> Record:
        """The record with the ratio of its time to that of a rival."""
        if rival is None or not record.verdict.ran:
            return record
        ratio = self.step_seconds(record.spec, record.candidate) / self.step_seconds(record.spec, rival)
        return msgspec.structs.replace(record, rival=rival, ratio=ratio)

    def step_seconds(self, spec: Spec, candidate: Candidate) -> float:
        return self.pass_seconds(spec, candidate) * spec.batch / candidate.microbatch + 0.001


_count = [0]


def _next() -> int:
    _count[0] += 1
    return _count[0]


def make_problem(spec: Spec, budget_bytes: int, **more: Any) -> Problem:
    """A problem, on two cores if nothing else is said."""
    own: dict[str, Any] = {name: more.pop(name) for name in ("cores", "fixed", "allow") if name in more}
    space = make_space(spec, CPU, budget_bytes, Choices(**{"cores": 2, "allow": ("precision",), **own}))
    return Problem(spec=spec, target=CPU, space=space, budget_bytes=budget_bytes, **more)


def solve(
    machine: Machine, problem: Problem, records: list[Record] | None = None, most: int = 60, seconds: float = 100
) -> list[Record]:
    """All records of a search of so many seconds, those of an earlier one first."""
    found = [*(records or [])]
    for _ in range(most):
        left = max(5.0, seconds - sum(map(_seconds, found)))
        probe = propose(State(problem=problem, records=found, left=left))
        if probe is None:
            return found
        found.append(machine.probe(probe, problem.budget_bytes))
    raise AssertionError(f"no end after {most} probes")


def _seconds(record: Record) -> float:
    """The seconds of a probe on a real machine."""
    return max(1.5, record.passes * (record.seconds_per_pass or 0.0)) + 3.0 * (record.spec.steps > 0)


def find(table: CandidateTable, candidate: Candidate) -> int | None:
    """The row of a candidate."""
    rows = np.flatnonzero(table.like(candidate, *Candidate.__struct_fields__))
    return int(rows[0]) if len(rows) else None


def without_time(record: Record) -> tuple[Any, ...]:
    """What two records of the same probe have in common."""
    return record.spec, record.candidate, record.peak_bytes, record.verdict


__all__ = ["MIB", "TITLE", "Machine", "find", "make_problem", "replace", "solve", "without_time"]
