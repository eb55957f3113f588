"""Measure the real peak of one candidate on the CPU with two optimizer steps in a new process.

    python benchmarks/peak.py '{"spec": {...}, "candidate": {...}}'

prints one JSON line: the resident bytes after a tiny step has loaded every library (`runtime_bytes`), the growth of the
peak over them, and the seconds per step. `measure()` starts this process with the candidate's heap setting.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomguard._device.cpu import Cpu
from oomguard._estimate.breakdown import estimate_step
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

STEPS = 2
"""Optimizer steps. The second one is the first that starts with the optimizer state in memory."""


def measure(spec: dict[str, Any], knobs: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    """Measure one candidate in a new process."""
    made = make_spec(spec)
    candidate = make_candidate(made, **{"allocator": "tight"} | knobs)
    engine = str(estimate_step(made, candidate).engine)
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), json.dumps({"spec": spec, "candidate": knobs})],
        capture_output=True, text=True, timeout=timeout, check=True,
        env=without_heap_settings() | Cpu().environment(candidate, engine),
    )  # fmt: skip
    return json.loads(done.stdout)


def without_heap_settings() -> dict[str, str]:
    """Return the environment of this process without the variables that glibc's heap reads."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


def tight() -> dict[str, str]:
    """Return the variables of the heap setting `tight`."""
    return Cpu().environment(make_candidate(Spec(cell="lstm", seq=1), allocator="tight"), engine="native")


def microbatch_rows(batch: int, microbatch: int) -> list[int]:
    """Split a batch into microbatches. An uneven one comes first, so that every full one finds the same heap."""
    full, rest = divmod(batch, microbatch)
    return [rest] * (rest > 0) + [microbatch] * full


def random_microbatches(spec: Spec, candidate: Candidate) -> Iterator[Any]:
    """Yield the batch in microbatches of random values. Each is made when it is needed, and no reference is kept."""
    import torch

    from oomguard._probe.sample import random_microbatch

    rng = torch.Generator().manual_seed(torch.initial_seed())
    for rows in microbatch_rows(spec.batch, candidate.microbatch):
        yield random_microbatch(spec, rows, rng)


def run(spec: Spec, candidate: Candidate, steps: int) -> None:
    """Run optimizer steps on random data."""
    import torch

    from oomguard._step import prepare, step

    torch._C._set_mkldnn_enabled(candidate.engine != "native")
    training = prepare(spec, candidate)
    targets = spec.batch * (spec.steps if spec.head == "per-step" else 1)
    for _ in range(steps):
        step(training, random_microbatches(spec, candidate), targets)


def status_bytes(field: str) -> int:
    """Read one field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def main() -> None:
    import torch

    from oomguard._probe.sample import tiny_spec

    request = json.loads(sys.argv[1])
    spec = make_spec(request["spec"])
    candidate = make_candidate(spec, **request["candidate"])
    if candidate.allocator != "system":  # which stands for an ordinary process
        torch.set_num_threads(1)
    small = tiny_spec(spec)
    run(small, make_candidate(small, engine=candidate.engine, update=candidate.update), STEPS)
    gc.collect()
    runtime_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    run(spec, candidate, STEPS)
    row = {
        "runtime_bytes": runtime_bytes,
        "growth_bytes": status_bytes("VmHWM") - runtime_bytes,
        "seconds_per_step": (time.monotonic() - began) / STEPS,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
