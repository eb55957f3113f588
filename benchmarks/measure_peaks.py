"""Measure the peaks of random models and candidates with probes. The margins of predictions are computed from them.

    python benchmarks/measure_peaks.py --set tune --models 30                   # on the CPU, about 5 s a row
    python benchmarks/measure_peaks.py --set judge --models 9 --candidates 3 --seed 1
    python benchmarks/measure_peaks.py --set tune --device cuda --models 13     # on a card
    python benchmarks/measure_peaks.py --set tune --repeats 8 --models 24 --candidates 3 --seed 7

Every probe appends one row to results/probe_peaks.csv. The rows of the set `tune` are for computing margins, those of
the set `judge` for checking them. The two sets have no hidden size and therefore no model in common.

Each candidate is probed with shorter sequences and then with whole ones, as a search would do. Its length is chosen so
that the estimated growth over the runtime is in the range of `GROWTH_BYTES`. On the CPU, a third of the candidates are
probed again in a new process and with more optimizer steps (`turn` 1). Probes with the same allocator and engine follow
one another, because they can share a process. `--repeats 8` measures whole candidates alone in 8 passes, and each of
them again in 24 passes in a new process.
"""

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oomguard import Record, Runner
from oomguard._core.units import GIB, MIB
from oomguard._device.cpu import cpu_precisions
from oomguard._device.find import find_target
from oomguard._estimate.breakdown import estimate_step, split
from oomguard._estimate.target import Target
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.lengths import shorten
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

ROWS = Path(__file__).parent / "results" / "probe_peaks.csv"
COLUMNS = (
    *("set", "model", "turn", "device", "spec", "candidate", "engine", "passes"),
    *("runtime_bytes", "peak_bytes", "gradients_bytes", "rest_bytes"),
)
HIDDEN = {"tune": (32, 64, 96, 128, 256, 384), "judge": (48, 80, 112, 160, 200, 320, 512)}
CELLS = ("lstm", "gru", "rnn")
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
BATCH = 64
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PIECES = (2, 3, 4, 5, 8, 10, 16, 25, 50)
GROWTH_BYTES = {"cpu": (40 * MIB, 500 * MIB), "large": (150 * MIB, 900 * MIB), "cuda": (300 * MIB, 6 * GIB)}
REST_BYTES = 16 * MIB
"""Least estimated rest of a whole row, so that its ratio says more than the few pages that come and go."""
PARTS = {"cpu": (1 / 2,), "cuda": (1 / 2, 7 / 8)}
"""Shorter versions of a candidate, as shares of its sequence length."""
PASS_SECONDS = {False: 0.8, True: 2.5}
"""Estimated time of a forward and backward pass on one core, at most; more for large rows."""
MULTIPLICATIONS = {"fp32": 1.2e10, "bf16": 1.5e9}
"""Multiplications per second of one core without instructions for bf16."""
STEP_SECONDS = {"onednn": 2e-5, "native": 2.5e-4}
"""Time that an engine adds in each layer and time step."""
LEAST_STEPS = 32
"""Time steps of a row, at least, and of each of its pieces a quarter of that."""
CUDNN_STEPS = 60_000
"""Time steps of a row on a card. cuDNN takes at most 65,535 in one call."""
REPEATED = 1 / 3
TURNS: tuple[dict[str, Any], ...] = ({"steps": 3, "seconds": 0.5}, {"steps": 12, "seconds": 3.0})
"""How much is measured in each turn (see `Request`)."""
LONGER = 3
"""How many times the passes of the first turn the second one has with `--repeats`."""
TRIES = 400
"""Draws after which a candidate is given up."""
TOGETHER = 9
"""Models whose probes are sorted together."""


class Work(NamedTuple):
    """A candidate to probe."""

    model: int
    spec: Spec
    candidate: Candidate
    again: bool

    @property
    def order(self) -> tuple[str, str, str, int]:
        """Probes of equal kind together. The setting `system` needs the smallest blocks first."""
        knobs = self.candidate
        piece = -(-self.spec.steps // knobs.segments)
        kind = knobs.allocator or "", knobs.engine or "", knobs.precision
        return *kind, knobs.microbatch * piece * max(4 * self.spec.hidden, self.spec.inputs)


def random_model(rng: random.Random, cell: str, hidden: tuple[int, ...]) -> dict[str, Any]:
    """Draw the fields of a spec, except its length."""
    spec: dict[str, Any] = {
        "cell": cell,
        "hidden": rng.choice(hidden),
        "layers": rng.choice([1, 2, 3]),
        "bidirectional": rng.random() < 0.25,
        "head": rng.choice(["per-step", "last-step"]),
        "optimizer": "adam" if rng.random() < 0.7 else "sgd",
        "layer_norm": rng.random() < 0.1,
        "dropout": 0.2 if rng.random() < 0.1 else 0.0,
        "batch": BATCH,
    }
    if rng.random() < 0.4:
        return spec | {"vocab": rng.choice([256, 2000, 5000])}
    return spec | {"features": rng.choice([1, 16, 64])}


def random_setting(rng: random.Random, cell: str, device: str) -> dict[str, Any]:
    """Draw engine, allocator and precision."""
    if device != "cpu":
        precision = rng.choices(["fp32", "fp16", "bf16"], [2, 1, 1])[0]
        allocator = "expandable" if rng.random() < 0.1 else "system"
        return {"engine": "cudnn", "allocator": allocator, "precision": precision}
    engine = "onednn" if cell == "lstm" and rng.random() < 0.75 else "native"
    shares = [0.9, 0.0, 0.1] if cell == "rnn" else [0.4, 0.5, 0.1]
    half = rng.random() < 0.2 and (engine == "native" or "bf16" in cpu_precisions())
    return {
        "engine": engine,
        "allocator": rng.choices(["tight", "fast", "system"], shares)[0],
        "precision": "bf16" if half else "fp32",
        "threads": 1,
    }


def random_candidate(
    rng: random.Random, model: dict[str, Any], target: Target, large: bool
) -> tuple[Spec, Candidate] | None:
    """Draw a candidate of a model, and a length that suits it. Return None if none was found."""
    device = "cuda" if target.cuda else "cpu"
    setting = random_setting(rng, model["cell"], device)
    kind = rng.choices(["whole", "segments", "chunks"], [1, 1, 0 if model["bidirectional"] else 1])[0]
    for _ in range(TRIES):
        pieces = 1 if kind == "whole" else rng.choice(PIECES)
        knobs = setting | {"segments": pieces, "microbatch": rng.choice(MICROBATCHES), "recompute": kind != "chunks"}
        low, high = GROWTH_BYTES["large" if large else device]
        steps = _length(model, knobs, low * (high / low) ** rng.random(), target, large)
        spec = make_spec(model | {"seq": steps})
        candidate = make_candidate(spec, **knobs)
        estimate = estimate_step(spec, candidate, target)
        if low <= estimate.growth_bytes <= high and split(estimate)[1][0] >= (low // 2 if large else REST_BYTES):
            return spec, candidate
    return None


def _length(model: dict[str, Any], knobs: dict[str, Any], growth_bytes: float, target: Target, large: bool) -> int:
    """Return the length at which the estimated growth is about `growth_bytes`, or less if that would be slow."""
    least: int = max(LEAST_STEPS, LEAST_STEPS // 4 * knobs["segments"])
    low, high = least, CUDNN_STEPS if target.cuda else 100_000
    while high - low > low // 50 + 1:
        middle = (low + high) // 2
        spec = make_spec(model | {"seq": middle})
        grown = estimate_step(spec, make_candidate(spec, **knobs), target).growth_bytes
        low, high = (middle, high) if grown < growth_bytes else (low, middle)
    quick = low if target.cuda else int(PASS_SECONDS[large] / _seconds_per_time_step(model, knobs))
    return max(least, min(low, quick))


def _seconds_per_time_step(model: dict[str, Any], knobs: dict[str, Any]) -> float:
    """Estimate the time that one time step of a microbatch takes on one core, forward and backward."""
    spec = make_spec(model | {"seq": 1})
    inputs = spec.inputs + (spec.layers - 1) * spec.width
    products = spec.directions * GATES[spec.cell] * spec.hidden * (inputs + spec.layers * spec.hidden)
    products += spec.width * spec.classes if spec.head == "per-step" else 0
    again = 4 / 3 if knobs["segments"] > 1 and knobs["recompute"] else 1.0
    own = STEP_SECONDS[knobs["engine"]] * spec.layers * spec.directions
    seconds: float = again * (3 * knobs["microbatch"] * products / MULTIPLICATIONS[knobs["precision"]] + own)
    return seconds


def draw(args: argparse.Namespace, first: int, target: Target) -> Iterator[Work]:
    """Draw all models and their candidates."""
    rng = random.Random(args.seed)
    for number in range(args.models):
        model = random_model(rng, CELLS[number % len(CELLS)], HIDDEN[args.set])
        for _ in range(args.candidates):
            drawn = random_candidate(rng, model, target, args.large)
            again = rng.random() < REPEATED and not target.cuda
            if drawn is not None:
                yield Work(first + number, *drawn, again)


def shorter_versions(spec: Spec, candidate: Candidate, parts: tuple[float, ...]) -> list[tuple[Spec, Candidate]]:
    """Shorten a candidate. Chunks come with fewer of the same length, and with as many that are shorter."""
    found: list[tuple[Spec, Candidate]] = []
    for part in parts:
        for fewer in (True, False):
            version = shorten(spec, candidate, int(part * spec.steps), fewer=fewer)
            if version not in found and (fewer or not candidate.recompute):
                found.append(version)
    return found


def probe(runner: Runner, work: Work, repeats: int) -> Iterator[tuple[int, Record]]:
    """Probe the shorter versions of a candidate, then the whole, and that again if it is wanted, each with its turn."""
    spec, candidate = work.spec, work.candidate
    if repeats:
        for turn, passes in enumerate((repeats, LONGER * repeats)):
            yield turn, runner.probe(spec, candidate, steps=passes, passes=passes)
            runner.close()
        return
    for version in shorter_versions(spec, candidate, PARTS[runner.device.name.partition(":")[0]]):
        yield 0, runner.probe(*version, **TURNS[0])
    yield 0, runner.probe(spec, candidate, **TURNS[0])
    if work.again:
        runner.close()
        yield 1, runner.probe(spec, candidate, **TURNS[1])


def make_row(name: str, model: int, turn: int, record: Record) -> dict[str, Any]:
    """Make the row of a record. Fields and knobs with their default value are left out."""
    assert record.terms is not None
    return {
        "set": name,
        "model": model,
        "turn": turn,
        "device": record.device.partition(":")[0],
        "spec": json.dumps(_changed(record.spec)),
        "candidate": json.dumps(_changed(record.candidate)),
        "engine": record.engine,
        "passes": record.passes,
        "runtime_bytes": record.runtime_bytes,
        "peak_bytes": record.peak_bytes,
        "gradients_bytes": record.terms["gradients"],
        "rest_bytes": record.terms["rest"],
    }


def _changed(value: Spec | Candidate) -> dict[str, Any]:
    fields = msgspec.structs.fields(value)
    return {field.name: got for field in fields if (got := getattr(value, field.name)) != field.default}


def first_number() -> int:
    """Return the first number that no model of the stored rows has."""
    if not ROWS.exists():
        return 0
    with ROWS.open(newline="") as file:
        return 1 + max((int(row["model"]) for row in csv.DictReader(file)), default=-1)


def store(args: argparse.Namespace) -> None:
    """Measure the rows and append each as soon as it is known."""
    works = [*draw(args, first_number(), find_target(args.device))]
    start = works[0].model if works else 0
    works.sort(key=lambda work: ((work.model - start) // TOGETHER, work.order))
    new = not ROWS.exists()
    with ROWS.open("a", newline="") as file, Runner(args.device) as runner:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for number, work in enumerate(works, 1):
            for turn, record in probe(runner, work, args.repeats):
                what = f"{number}/{len(works)} turn {turn}, {record.seconds:.1f} s: {record.message}"
                if not record.verdict.ran:
                    print(what, record.error, work, file=sys.stderr, flush=True)
                    break
                print(what, flush=True)
                writer.writerow(make_row(args.set, work.model, turn, record))
                file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=[*HIDDEN], default="tune", help="set that the rows are for")
    parser.add_argument("--device", default="cpu", help="device to probe on: cpu, cuda or cuda:1")
    parser.add_argument("--models", type=int, default=27, help="number of models")
    parser.add_argument("--candidates", type=int, default=5, help="candidates of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models and candidates")
    parser.add_argument("--repeats", type=int, default=0, help="passes of whole candidates, each in two processes")
    parser.add_argument("--large", action="store_true", help="larger rows, on the CPU")
    store(parser.parse_args())


if __name__ == "__main__":
    main()
