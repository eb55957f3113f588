"""Claim: the costs of oomguard grow gently. An estimate takes the same time for any sequence length T. A search chooses
its next probe among a million candidates in seconds. The time of a step in sqrt(T) / 8 segments grows like T, and its
memory without the inputs grows like the square root of T.

    python benchmarks/cost_grows_gently.py [--longest T] [--smoke]

The benchmark takes about 6 minutes with sequences of up to 1,000,000 steps. Each line of its table varies one size. For
seconds and for bytes it shows the exponent of the growth (a least-squares fit to the logarithms) and the first and last
figure.

Estimates and searches run in this process. Their time is CPU time, the fastest of a few rounds, and their bytes are
those that Python and NumPy allocate. The search runs no probe: formulas produce its records. Each step runs in its own
process (see peak.py). Its bytes are the growth over the runtime without the inputs, because the inputs are in memory
and always grow with T.
"""

import argparse
import math
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from peak import measure
from results import print_row, publish

from oomguard._core.units import GIB, format_bytes, format_seconds
from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import Probe, State, propose
from oomguard._search.screen import screen
from oomguard._search.space import Problem, Space, grid
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

STEP: dict[str, Any] = {"cell": "lstm", "features": 1, "hidden": 64, "layers": 1, "batch": 8}
LENGTHS = (10_000, 31_623, 100_000, 316_228, 1_000_000)
SHORT_SEQ = 2_000
"""Sequence length in the lines that vary another size."""
HIDDEN, LAYERS = (32, 64, 128, 256, 512), (1, 2, 4, 8, 16)
SETTINGS = (1, 4, 16, 64, 240)
"""Numbers of settings in the search spaces. Each setting has about 4,300 candidates: all microbatches and pieces."""
SEARCH = Spec(cell="lstm", seq=1_000_000, features=1, hidden=64, layers=1, batch=4096)
BUDGET_BYTES = 4 * GIB
RECORDS, ROUNDS = 6, 3
MAX_SECONDS = 30.0
"""Time limit for choosing the next probe among a million candidates."""
WIDTHS = (34, 22, 8, 23, 8, 25)


class Line(NamedTuple):
    """One line of the table: how time and memory grow with one size."""

    name: str
    sizes: list[int]
    seconds: list[float]
    memory_bytes: list[int]

    @property
    def time(self) -> float:
        return exponent(self.sizes, self.seconds)

    @property
    def memory(self) -> float:
        return exponent(self.sizes, self.memory_bytes)

    def show(self) -> None:
        ends = (0, -1)
        sizes = " to ".join(f"{self.sizes[i]:,}" for i in ends)
        seconds = " to ".join(format_seconds(self.seconds[i]) for i in ends)
        used = " to ".join(format_bytes(self.memory_bytes[i]) for i in ends)
        print_row((self.name, sizes, f"{self.time:.2f}", seconds, f"{self.memory:.2f}", used), WIDTHS)

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {"time_exponent": self.time, "memory_exponent": self.memory}


def exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """Fit the slope of log(cost) over log(size)."""
    return float(np.polyfit(np.log([*sizes]), np.log([*costs]), 1)[0])


def timed(name: str, sizes: Iterable[int], run: Callable[[int], Any], times: int = 1) -> Line:
    """Measure calls in this process. `times` calls are timed together, for calls that are too short to time alone."""
    sizes, seconds, used = [*sizes], [], []
    for size in sizes:
        rounds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(times):
                run(size)
            rounds.append((time.process_time() - began) / times)
        tracemalloc.start()
        run(size)
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        seconds.append(min(rounds))
    return Line(name, sizes, seconds, used)


def estimate_of(**fields: Any) -> Any:
    """Make a spec and a candidate, and estimate them."""
    spec = make_spec(STEP | {"seq": SHORT_SEQ} | fields)
    return estimate_step(spec, make_candidate(spec, segments=segments_of(spec.steps)))


def problem_of(settings: int) -> Problem:
    """Make a search space with this number of settings. They differ in their threads, which may exceed any real CPU."""
    knobs = {"engine": "onednn", "precision": "fp32", "allocator": "tight"}
    space = Space(settings=tuple(knobs | {"threads": count + 1} for count in range(settings)))
    return Problem(spec=SEARCH, target=CPU, space=space, budget_bytes=BUDGET_BYTES)


def make_record(probe: Probe) -> Record:
    """Make a record by formulas: the peak equals the estimate, and a token takes 10 µs."""
    estimate = estimate_step(probe.spec, probe.candidate)
    parts = {name: int(estimate.terms[name]) for name in ("runtime", "weights", "optimizer", "input", "gradients")}
    seconds = 1e-5 * probe.spec.steps * probe.candidate.microbatch
    step = seconds * probe.spec.batch / probe.candidate.microbatch
    return Record(
        verdict=Verdict.FITS, message="It ran.", spec=probe.spec, candidate=probe.candidate, device="cpu",
        engine=str(estimate.engine), budget_bytes=BUDGET_BYTES, started="2026-01-01T00:00:00", seconds=1.0,
        terms=parts | {"rest": int(estimate.total_bytes) - sum(parts.values())}, peak_bytes=int(estimate.total_bytes),
        runtime_bytes=parts["runtime"], seconds_per_step=step, tokens_per_second=1e5, seconds_per_pass=seconds,
        fastest_pass_seconds=seconds, seconds_per_update=1e-3, passes=probe.passes, steps=1,
        rival=probe.rival, ratio=None if probe.rival is None else 1.0,
    )  # fmt: skip


def first_records() -> list[Record]:
    """Make the records of the first probes of a search."""
    problem, records = problem_of(2), list[Record]()
    while len(records) < RECORDS and (probe := propose(State(problem=problem, records=records))) is not None:
        records.append(make_record(probe))
    assert records, "The search proposes nothing."
    return records


def search_lines(settings: tuple[int, ...]) -> list[Line]:
    """Measure the screening and the choice of the next probe over the number of candidates."""
    records = first_records()
    problems = {len(grid(SEARCH, problem_of(count).space)): problem_of(count) for count in settings}
    return [
        timed("screen, by candidates", problems, lambda size: screen(problems[size], ())),
        timed(
            "next probe, by candidates",
            problems,
            lambda size: propose(State(problem=problems[size], records=records)),
        ),
    ]


def estimate_lines() -> list[Line]:
    lengths = [10**power for power in range(2, 7)]
    return [
        timed("estimate, by T", lengths, lambda size: estimate_of(seq=size), 50),
        timed("estimate, by hidden", HIDDEN, lambda size: estimate_of(hidden=size), 50),
        timed("estimate, by layers", LAYERS, lambda size: estimate_of(layers=size), 50),
    ]


def segments_of(steps: int) -> int:
    """Return sqrt(T) / 8. With so few segments, they need more memory than the parts that do not grow with T."""
    return max(1, math.isqrt(steps) // 8)


def step_line(name: str, field: str, sizes: Iterable[int]) -> Line:
    """Measure real steps, each size in its own process."""
    sizes, seconds, used = [*sizes], [], []
    for size in sizes:
        fields = STEP | {"seq": SHORT_SEQ, field: size}
        row = measure(fields, {"segments": segments_of(fields["seq"]), "threads": 1})
        spec = make_spec(fields)
        seconds.append(row["seconds_per_step"])
        used.append(row["growth_bytes"] - int(terms.input_bytes(spec, Candidate(microbatch=spec.batch))))
    return Line(name, sizes, seconds, used)


def claims_of(lines: dict[str, Line], *, smoke: bool) -> dict[str, bool]:
    """Check the statements of the claim. A smoke run checks only memory, because its sizes are too small for times."""
    estimate, step = lines["estimate, by T"], lines["step, by T"]
    claims = {
        f"an estimate's memory does not grow with T (exponent {estimate.memory:.2f})": abs(estimate.memory) < 0.1,
        f"a step's memory grows like the root of T (exponent {step.memory:.2f})": step.memory <= 0.65,
    }
    if smoke:
        return claims
    screened, proposed = lines["screen, by candidates"], lines["next probe, by candidates"]
    most, slowest = proposed.sizes[-1], proposed.seconds[-1]
    deep, wide = lines["step, by layers"], lines["step, by hidden"]
    return claims | {
        f"nor does its time (exponent {estimate.time:.2f})": estimate.time < 0.1,
        f"a step's time grows with T, not faster (exponent {step.time:.2f})": step.time <= 1.1,
        f"screening grows with the candidates, not faster ({screened.time:.2f})": screened.time <= 1.1,
        f"so does choosing the next probe ({proposed.time:.2f})": proposed.time <= 1.1,
        f"that takes at most {MAX_SECONDS:.0f} s of {most:,} ({slowest:.1f})": slowest <= MAX_SECONDS,
        f"layers: time {deep.time:.2f}, memory {deep.memory:.2f}": max(deep.time, deep.memory) <= 1.1,
        f"hidden: time {wide.time:.2f}, memory {wide.memory:.2f}, the weights 2": max(wide.time, wide.memory) <= 2.1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest sequences of the real steps")
    parser.add_argument("--smoke", action="store_true", help="use small sizes, and check only the growth of memory")
    args = parser.parse_args()
    lengths = (2_000, 20_000) if args.smoke else [length for length in LENGTHS if length <= args.longest]
    print_row(("", "size", "exponent", "seconds", "exponent", "bytes"), WIDTHS)
    lines: dict[str, Line] = {}

    def add(more: Iterable[Line]) -> None:
        for line in more:
            line.show()
            lines[line.name] = line

    add(estimate_lines())
    add(search_lines(SETTINGS[:2] if args.smoke else SETTINGS))
    add([step_line("step, by T", "seq", lengths)])
    if not args.smoke:
        add([step_line("step, by hidden", "hidden", HIDDEN)])
        add([step_line("step, by layers", "layers", LAYERS)])
    result = {"step": STEP, "lines": [line.as_dict() for line in lines.values()]}
    whole = not args.smoke and args.longest >= LENGTHS[-1]
    publish("cost_grows_gently", result, claims_of(lines, smoke=args.smoke), whole=whole)


if __name__ == "__main__":
    main()
