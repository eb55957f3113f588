"""Claim: a search that is killed (kill -9) at 10 random moments loses no record, measures nothing twice, leaves neither
a process nor a trial running, and ends in the plan of a search that was never killed.

    python benchmarks/a_killed_search_goes_on.py [KILLS] [--seed S] [--smoke]

About 4 minutes. A search for the largest microbatch, with a ledger, is killed at a moment drawn from the time that an
undisturbed one takes, and started again, until it is done; then the next directory, until there were so many kills.
Started once more, it must add no record and tell the same plan. The undisturbed search measures for itself, and peaks
differ by some 50 pages from run to run: so the sequences are long, and one of them more or less is 4,000 pages. (Where
it was 400, two runs ended in a microbatch that was one off.)
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
ASKED: dict[str, Any] = {"budget": 900 * MIB, "maximize": "microbatch", "threads": 1, "allocator": "steady"}
ASKED |= {"segments": 1, "engine": "onednn"}
KILLS = 10
GONE_SECONDS = 10.0
"""By when the processes of a killed search must be gone."""
WIDTHS = (22, 9, 9, 9, 9, 9, 9)


def search(directory: str) -> None:
    """In the child: search, going on with what the directory has, and write the plan there."""
    plan = find_feasible_config(**SPEC, **ASKED, ledger=directory)
    save_plan(plan, Path(directory) / "plan.json")


def start(directory: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__)), "--search", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def lines_of(directory: Path) -> list[str]:
    """The whole lines of the ledger."""
    path = directory / RECORDS
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def kill_after(directory: Path, seconds: float) -> tuple[bool, int]:
    """Run the search until it ends or has run so long, then kill it. Whether it was killed; processes left over."""
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
    return True, len(psutil.wait_procs(children, timeout=GONE_SECONDS)[1])


def running_trials(directory: Path) -> int:
    """Trials that Optuna takes to be running."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = f"sqlite:///{directory / 'study.db'}"
    states = [
        trial.state
        for study in optuna.get_all_study_summaries(storage)
        for trial in optuna.load_study(study_name=study.study_name, storage=storage).get_trials(deepcopy=False)
    ]
    return sum(state is optuna.trial.TrialState.RUNNING for state in states)


def disturbed(directory: Path, dice: random.Random, most_kills: int, usual_seconds: float) -> dict[str, Any]:
    """A search that is killed up to so many times, until it is done."""
    kills = lost = left = 0
    alive, moments = True, list[dict[str, Any]]()
    while alive:
        before = lines_of(directory)
        seconds = dice.uniform(0, usual_seconds) if kills < most_kills else 600.0
        alive, remaining = kill_after(directory, seconds)
        kills, left = kills + alive, left + remaining
        if alive:
            moments.append({"seconds": round(seconds, 2), "records": len(lines_of(directory))})
        lost += lines_of(directory)[: len(before)] != before
    records = Ledger(directory / RECORDS).read()
    keys = Counter(msgspec.json.encode((one.spec, one.candidate)) for one in records)
    found = {"kills": kills, "records": len(records), "lost": lost, "twice": sum(keys.values()) - len(keys)}
    return found | {"running": running_trials(directory), "left": left, "moments": moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one kill")
    parser.add_argument("--search", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.search:
        search(given.search)
        return
    root = Path(tempfile.mkdtemp(prefix="oomguard-killed-"))
    try:
        run(root, 1 if given.smoke else given.kills, given.seed)
    finally:
        shutil.rmtree(root)


def run(root: Path, most_kills: int, seed: int) -> None:
    dice, rows = random.Random(seed), list[dict[str, Any]]()
    began = time.monotonic()
    killed, _ = kill_after(root / "undisturbed", 600)
    assert not killed, "The undisturbed search was not done in 10 minutes."
    usual_seconds = time.monotonic() - began
    wanted = load_plan(root / "undisturbed" / "plan.json")
    print_row(("", "kills", "records", "lost", "twice", "RUNNING", "left"), WIDTHS)
    print_row((f"undisturbed, {usual_seconds:.0f} s", 0, wanted.probes, "", "", "", ""), WIDTHS)
    while (kills := sum(row["kills"] for row in rows)) < most_kills:
        directory = root / f"disturbed{len(rows)}"
        row = disturbed(directory, dice, most_kills - kills, usual_seconds)
        plan = load_plan(directory / "plan.json")
        kill_after(directory, 600)
        settled = same(load_plan(directory / "plan.json"), plan) and len(lines_of(directory)) == row["records"]
        rows.append(row | {"same": same(plan, wanted), "settled": settled, "microbatch": plan.candidate.microbatch})
        print_row((f"disturbed, {len(rows)}", *[*row.values()][:6]), WIDTHS)
        killed_at = ", ".join(f"{one['seconds']:.1f} s ({one['records']} records)" for one in row["moments"])
        print(f"  killed after {killed_at or 'nothing: it was done before'}")
        verdict = "the same plan" if rows[-1]["same"] else "ANOTHER PLAN"
        chosen = plan.candidate.microbatch
        print(f"  {verdict}: microbatch {chosen}, undisturbed {wanted.candidate.microbatch}", flush=True)
    claims = {
        f"no record is lost in {kills} kills": not any(row["lost"] for row in rows),
        "nothing is measured twice": not any(row["twice"] for row in rows),
        "no trial is left RUNNING": not any(row["running"] for row in rows),
        "no process is left": not any(row["left"] for row in rows),
        "started once more, it adds no record and tells the same plan": all(row["settled"] for row in rows),
        "the plan is that of the undisturbed search": all(row["same"] for row in rows),
    }
    result = {"kills": kills, "spec": SPEC, "asked": ASKED, "usual_seconds": usual_seconds, "rows": rows}
    whole = most_kills >= KILLS
    publish("a_killed_search_goes_on", json.loads(json.dumps(result)), claims, whole=whole, packages=("optuna",))


def same(plan: Plan, other: Plan) -> bool:
    return plan.candidate == other.candidate and plan.spec == other.spec


if __name__ == "__main__":
    main()
