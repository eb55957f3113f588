"""Claim: an hour of kills, stops, lost workers, full disks and hungry neighbours changes nothing and leaves nothing.

    python benchmarks/training_survives_an_hour.py [--minutes M] [--seed S] [--smoke]

The same training is run again and again, with two processes that load data. Every few seconds, something happens to it:
SIGKILL, SIGTERM or SIGINT; SIGSTOP and, some seconds later, SIGCONT; a process that loads data is killed; the disk of
the run fills up for a while; another process takes 1 GiB and gives it back. Whenever the training ends early, it is
resumed. Its last checkpoint must equal that of an undisturbed training bit for bit, and its metrics must have the same
rows. Nothing may be left: no process, no temporary file, no shared memory, no unfinished checkpoint, no open file.

The disk is a small tmpfs, which only root can mount. Elsewhere the disk does not fill up, and the line says so.

A sixth of the time is for probes in one Runner (2,000 at most), another sixth for updates in one process (10,000 at
most). The memory of the process must not grow with their number.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from recovers_without_loss import tensors
from results import print_row, publish

import oomguard
from oomguard._core.units import GIB, MIB
from oomguard._probe.runner import Runner
from oomguard._rnn import Microbatch
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec
from oomguard._step import prepare, step

SPEC: dict[str, Any] = {"cell": "gru", "seq": 60, "features": 4, "hidden": 64, "batch": 16, "outputs": 1}
SEQUENCES, STEPS, SMOKE_STEPS = 320, 400, 60
DISK_BYTES = 48 * MIB
MOST_PROBES, MOST_UPDATES, GROWTH_BYTES = 2000, 10_000, 20 * MIB
KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "stopped", "worker killed", "disk full", "neighbour")
WIDTHS = (28, 10)


@contextmanager
def small_disk(home: Path) -> Iterator[bool]:
    """Mount a small disk at a folder if that is allowed; gives whether it is."""
    home.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(home)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(home)], check=False)


def command(home: Path, run: Path, steps: int) -> list[str]:
    line = ["train", str(home / "plan.json"), "--data", str(home / "data.npy"), "--run", str(run), "--resume"]
    line += ["--steps", str(steps), "--save-every", "10", "--log-every", "1", "--workers", "2", "--quiet"]
    return [sys.executable, "-m", "oomguard", *line]


def private(home: Path) -> dict[str, str]:
    """The environment of a training, with a folder for temporary files that no other program uses."""
    (home / "tmp").mkdir(exist_ok=True)
    return os.environ | {"TMPDIR": str(home / "tmp")}


def disturb(process: subprocess.Popen[bytes], kind: str, disk: Path, rng: random.Random) -> None:
    """Let one thing happen to a training."""
    with suppress(ProcessLookupError, psutil.Error):
        if kind.startswith("SIG"):
            process.send_signal(signal.Signals[kind])
        elif kind == "stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, 4))
            process.send_signal(signal.SIGCONT)
        elif kind == "worker killed":
            for worker in psutil.Process(process.pid).children(recursive=True)[:1]:
                worker.kill()
        elif kind == "disk full":
            fill(disk, rng.uniform(0.5, 3))
        else:
            code = f"import time; taken = bytearray(b'x') * {GIB}; time.sleep({rng.uniform(0.5, 3)})"
            subprocess.run([sys.executable, "-c", code], check=False)


def fill(disk: Path, seconds: float) -> None:
    """Fill a disk up for some seconds."""
    path = disk / "filler"
    with path.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(MIB))
            file.flush()
    time.sleep(seconds)
    path.unlink()


def one_training(home: Path, run: Path, steps: int, kinds: list[str], rng: random.Random) -> Counter[str]:
    """Train to the end, whatever happens. Returns how often what happened."""
    happened = Counter[str]()
    while True:
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(command(home, run, steps), env=private(home), **pipes) as process:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(2, 9))
                    break
                kind = rng.choice(kinds)
                happened[kind] += 1
                disturb(process, kind, run.parent, rng)
            assert process.stderr is not None
            message = process.stderr.read().decode()
        happened["starts"] += 1
        if process.returncode == 0:
            return happened
        assert "Traceback" not in message, message
        assert happened["starts"] < 500, message


def state(run: Path) -> dict[str, bytes]:
    """The last checkpoint, without the generators of Python and NumPy: this training draws nothing from them."""
    return {name: content for name, content in tensors(run).items() if name not in ("random.python", "random.numpy")}


def metrics(run: Path) -> list[tuple[str, ...]]:
    """The rows of the metrics, without times and peaks."""
    with (run / "metrics.csv").open() as file:
        return [(row["step"], row["loss"], row["validation_loss"]) for row in csv.DictReader(file)]


def leftovers(home: Path, run: Path, before: dict[str, set[str]]) -> list[str]:
    """What was not there before. What a killed process leaves in the temporary folder is for `oomguard clean`."""
    clean = [sys.executable, "-m", "oomguard", "clean", str(run), "--yes"]
    subprocess.run(clean, env=private(home), check=True, capture_output=True)
    found = [f"{name} {entry}" for name, entries in present().items() for entry in entries - before[name]]
    # importing parts of torch makes an empty cache
    found += [f"temporary {path.name}" for path in (home / "tmp").iterdir() if "inductor" not in path.name]
    found += [str(path) for path in run.rglob("*") if ".unfinished" in path.name or path.name.endswith(".new")]
    return found


def present() -> dict[str, set[str]]:
    children = psutil.Process().children(recursive=True)
    shared = Path("/dev/shm")
    return {
        "process": {str(child.pid) for child in children},
        "shared memory": {entry.name for entry in shared.iterdir()} if shared.is_dir() else set(),
    }


def growth_of(call: Any, most: int, seconds: float) -> tuple[int, int]:
    """Call until the time is over. Returns how often, and the bytes by which this process grew after a tenth of it."""
    process, end, sizes = psutil.Process(), time.monotonic() + seconds, list[int]()
    while len(sizes) < most and (time.monotonic() < end or len(sizes) < 20):
        call()
        sizes.append(process.memory_info().rss)
    return len(sizes), max(sizes) - max(sizes[: max(1, len(sizes) // 10)])


def flat(seconds: float) -> dict[str, tuple[int, int]]:
    """The number of probes and of updates, and by how much this process grew."""
    spec = make_spec({"cell": "gru", "seq": 20, "hidden": 16, "batch": 4})
    candidate = make_candidate(spec, threads=1)
    with Runner("cpu") as runner:
        probes = growth_of(lambda: runner.probe(spec, candidate, budget_bytes=2 * GIB), MOST_PROBES, seconds)
    torch.set_num_threads(1)
    training, inputs = prepare(spec, candidate), torch.randn(20, 4, 64)
    batch = Microbatch(inputs, torch.randn(20, 4, 1))
    updates = growth_of(lambda: step(training, [batch], targets=80), MOST_UPDATES, seconds)
    return {"probes": probes, "updates": updates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="(default: another each time)")
    parser.add_argument("--smoke", action="store_true", help="take half a minute")
    args = parser.parse_args()
    steps, seconds = (SMOKE_STEPS, 30.0) if args.smoke else (STEPS, 60 * args.minutes)
    rng, happened, unequal, uneven, left, rounds = random.Random(args.seed), Counter[str](), 0, 0, list[str](), 0
    before, open_files = present(), psutil.Process().num_fds()
    with tempfile.TemporaryDirectory() as directory, small_disk(Path(directory, "disk")) as mounted:
        home, disk = Path(directory), Path(directory, "disk")
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", max_probes=1, progress=False)
        oomguard.save_plan(plan, home / "plan.json")
        data = np.random.default_rng(0).normal(size=(SEQUENCES, SPEC["seq"], 5)).astype(np.float32)
        np.save(home / "data.npy", data)
        subprocess.run(command(home, home / "whole", steps), check=True, capture_output=True)
        wanted, rows, end = state(home / "whole"), metrics(home / "whole"), time.monotonic() + seconds * 2 / 3
        kinds = [kind for kind in KINDS if mounted or kind != "disk full"]
        while time.monotonic() < end or not rounds:
            rounds += 1
            run = disk / f"run-{rounds}"
            happened += one_training(home, run, steps, kinds, rng)
            unequal += state(run) != wanted
            uneven += metrics(run) != rows
            left += leftovers(home, run, before)
            subprocess.run(["rm", "-rf", str(run)], check=True)
    grown = flat(seconds / 6)
    files = psutil.Process().num_fds() - open_files
    for entry in left[:20]:
        print(f"left: {entry}")
    for name, count in sorted(happened.items()):
        print_row((name, f"{count:,}"), WIDTHS)
    count = sum(number for name, number in happened.items() if name != "starts")
    result = {"seed": args.seed, "rounds": rounds, "happened": dict(happened), "disk": mounted, "left": left[:20]}
    result |= {"grown": {name: {"count": number, "bytes": size} for name, (number, size) in grown.items()}}
    claims = {
        f"{count} disturbances in {rounds} trainings: checkpoints equal bit for bit ({unequal} differ)": not unequal,
        f"metrics are complete ({uneven} differ)": not uneven,
        f"nothing is left after `oomguard clean` ({len(left)})": not left,
        f"no file stays open ({max(0, files)})": files <= 0,
    }
    for name, (number, size) in grown.items():
        claims[f"memory does not grow over {number:,} {name} ({size / MIB:.1f} MiB)"] = size <= GROWTH_BYTES
    publish("training_survives_an_hour", result, claims, whole=args.minutes >= 60 and mounted)


if __name__ == "__main__":
    main()
