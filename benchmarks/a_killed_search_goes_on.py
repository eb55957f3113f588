"""Claim: a search that is killed (kill -9) at 10 random moments loses no record, measures nothing twice, leaves neither
a process nor a trial running, and ends in the plan of a search that was never killed.

    python benchmarks/a_killed_search_goes_on.py [KILLS] [--seed S] [--smoke]

The benchmark takes about 4 minutes. It runs a search for the largest microbatch once without a kill and measures how
long it takes. Then it runs the same search with a new ledger, kills it at a random moment within that time, and
restarts it until it completes. It repeats this with new ledgers until there were KILLS kills. Every completed search is
started once more, and must then add no record and return the same plan.

The search without a kill makes its own measurements, and the same peak differs by about 50 pages from run to run. The
sequences are so long that one sequence changes the peak by 4,000 pages. (With 400 pages per sequence, two runs ended in
a microbatch that was off by one.)
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
from results import print_row, publish

from oomguard import Ledger, Plan, find_feasible_config, load_plan, save_plan
from oomguard._core.units import MIB
from oomguard._probe.record import RECORDS

SPEC: dict[str, Any] = {"cell": "lstm", "seq": 1000, "features": 16, "hidden": 256, "layers": 1, "batch": 256}
SEARCH: dict[str, Any] = {"budget": 900 * MIB, "maximize": "microbatch", "threads": 1, "allocator": "tight"}
SEARCH |= {"segments": 1, "engine": "onednn"}
KILLS = 10
EXIT_SECONDS = 10.0
"""Time within which all processes of a killed search must exit."""
WIDTHS = (22, 9, 9, 9, 9, 9, 9)


def search(directory: str) -> None:
    """Search in this child process, continue from the ledger in the directory, and write the plan there."""
    plan = find_feasible_config(**SPEC, **SEARCH, ledger=directory)
    save_plan(plan, Path(directory) / "plan.json")


def start(directory: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__)), "--search", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def complete_lines(directory: Path) -> list[str]:
    """Read the complete lines of the ledger. The last line may be cut off by a kill."""
    path = directory / RECORDS
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def kill_after(directory: Path, seconds: float) -> tuple[bool, int]:
    """Run the search, and kill it if it takes longer than `seconds`.

    Returns whether it was killed, and how many of its child processes did not exit.
    """
    with start(directory) as process:
        try:
            process.wait(seconds)
            assert process.stderr is not None
            assert process.returncode == 0, process.stderr.read()
            return False, 0
        except subprocess.TimeoutExpired:
            pass
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    return True, len(psutil.wait_procs(children, timeout=EXIT_SECONDS)[1])


def running_trials(directory: Path) -> int:
    """Count the trials that Optuna's storage lists as running."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = f"sqlite:///{directory / 'study.db'}"
    states = [
        trial.state
        for study in optuna.get_all_study_summaries(storage)
        for trial in optuna.load_study(study_name=study.study_name, storage=storage).get_trials(deepcopy=False)
    ]
    return sum(state is optuna.trial.TrialState.RUNNING for state in states)


def run_with_kills(directory: Path, rng: random.Random, max_kills: int, usual_seconds: float) -> dict[str, Any]:
    """Run a search until it completes, and kill it at most `max_kills` times on the way."""
    kills = lost = left = 0
    killed, moments = True, list[dict[str, Any]]()
    while killed:
        before = complete_lines(directory)
        seconds = rng.uniform(0, usual_seconds) if kills < max_kills else 600.0
        killed, remaining = kill_after(directory, seconds)
        kills, left = kills + killed, left + remaining
        if killed:
            moments.append({"seconds": round(seconds, 2), "records": len(complete_lines(directory))})
        lost += complete_lines(directory)[: len(before)] != before
    records = Ledger(directory / RECORDS).read()
    keys = Counter(msgspec.json.encode((record.spec, record.candidate)) for record in records)
    row = {"kills": kills, "records": len(records), "lost": lost, "twice": sum(keys.values()) - len(keys)}
    return row | {"running": running_trials(directory), "left": left, "moments": moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="kill the search once")
    parser.add_argument("--search", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.search:
        search(args.search)
        return
    root = Path(tempfile.mkdtemp(prefix="oomguard-killed-"))
    try:
        run(root, 1 if args.smoke else args.kills, args.seed)
    finally:
        shutil.rmtree(root)


def run(root: Path, max_kills: int, seed: int) -> None:
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    began = time.monotonic()
    killed, _ = kill_after(root / "undisturbed", 600)
    assert not killed, "The undisturbed search did not end within 10 minutes."
    usual_seconds = time.monotonic() - began
    expected_plan = load_plan(root / "undisturbed" / "plan.json")
    print_row(("search", "kills", "records", "lost", "twice", "RUNNING", "left"), WIDTHS)
    print_row((f"undisturbed, {usual_seconds:.0f} s", 0, expected_plan.probes, "", "", "", ""), WIDTHS)
    while (kills := sum(row["kills"] for row in rows)) < max_kills:
        directory = root / f"disturbed{len(rows)}"
        row = run_with_kills(directory, rng, max_kills - kills, usual_seconds)
        plan = load_plan(directory / "plan.json")
        kill_after(directory, 600)
        settled = same(load_plan(directory / "plan.json"), plan) and len(complete_lines(directory)) == row["records"]
        rows.append(
            row | {"same": same(plan, expected_plan), "settled": settled, "microbatch": plan.candidate.microbatch}
        )
        print_row((f"disturbed, {len(rows)}", *[*row.values()][:6]), WIDTHS)
        killed_at = ", ".join(f"{kill['seconds']:.1f} s ({kill['records']} records)" for kill in row["moments"])
        print(f"  killed after {killed_at}" if killed_at else "  not killed: the search ended before the first kill")
        verdict = "same plan" if rows[-1]["same"] else "DIFFERENT PLAN"
        chosen, expected = plan.candidate.microbatch, expected_plan.candidate.microbatch
        print(f"  {verdict}: microbatch {chosen}, undisturbed {expected}", flush=True)
    claims = {
        f"no record is lost in {kills} kills": not any(row["lost"] for row in rows),
        "nothing is measured twice": not any(row["twice"] for row in rows),
        "no trial is left RUNNING": not any(row["running"] for row in rows),
        "no process is left": not any(row["left"] for row in rows),
        "started once more, it adds no record and tells the same plan": all(row["settled"] for row in rows),
        "the plan is that of the undisturbed search": all(row["same"] for row in rows),
    }
    result = {"kills": kills, "spec": SPEC, "asked": SEARCH, "usual_seconds": usual_seconds, "rows": rows}
    whole = max_kills >= KILLS
    publish("a_killed_search_goes_on", json.loads(json.dumps(result)), claims, whole=whole, packages=("optuna",))


def same(plan: Plan, other: Plan) -> bool:
    return plan.candidate == other.candidate and plan.spec == other.spec


if __name__ == "__main__":
    main()
