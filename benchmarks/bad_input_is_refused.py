"""Claim: no changed input makes a reader fail: it is read, or refused with an error of oomguard's own in a few lines.

    python benchmarks/bad_input_is_refused.py [--seconds S] [--readers A,B] [--seed N] [--smoke]

The readers are those of tests/fuzz: command lines, specs, plans, ledgers, events, data files, checkpoints behind right
checksums, settings and metrics of runs. Each gets good input of which a few bytes, values or words are missing, doubled
or something else. Input that fails is stored in tests/fuzz/corpus, which the tests try first. `make fuzz` takes an
hour.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from results import print_row, publish

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))
from fuzz.readers import READERS, Reader, fault_of  # noqa: E402

SECONDS, SMOKE_SECONDS = 60.0, 0.5
WIDTHS = (12, 12, 9, 14)


def try_out(name: str, reader: Reader, seconds: float, rng: Random) -> dict[str, Any]:
    """Try changed input for some time. Store what fails, and count it."""
    tried, faults, end = 0, list[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        while time.monotonic() < end:
            content = reader.change(rng)
            fault, tried = fault_of(reader, content, Path(directory)), tried + 1
            if fault is not None:
                keep(name, content)
                faults.append(fault)
    return {
        "reader": name,
        "tried": tried,
        "failed": len(faults),
        "per_minute": 60 * tried / seconds,
        "why": faults[:5],
    }


def keep(name: str, content: bytes) -> None:
    """Add input to the corpus."""
    home = TESTS / "fuzz" / "corpus" / name
    home.mkdir(parents=True, exist_ok=True)
    (home / f"{len([*home.iterdir()]):03d}").write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for each reader (default: {SECONDS:g})")
    parser.add_argument("--readers", default=",".join(READERS), help="names of readers (default: all)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the changes (default: another each time)"
    )
    parser.add_argument("--smoke", action="store_true", help=f"take {SMOKE_SECONDS:g} s for each reader")
    args = parser.parse_args()
    rng, rows = Random(args.seed), []
    print(f"Seed {args.seed}")
    print_row(("reader", "tried", "failed", "a minute"), WIDTHS)
    for name in args.readers.split(","):
        row = try_out(name, READERS[name], SMOKE_SECONDS if args.smoke else args.seconds, rng)
        print_row((name, f"{row['tried']:,}", f"{row['failed']:,}", f"{row['per_minute']:,.0f}"), WIDTHS)
        rows.append(row)
        for fault in row["why"]:
            print(f"  {fault}")
    tried, failed = (sum(row[name] for row in rows) for name in ("tried", "failed"))
    result = {"seed": args.seed, "tried": tried, "failed": failed, "rows": rows}
    whole = args.seconds >= SECONDS and {*args.readers.split(",")} == {*READERS}
    publish(
        "bad_input_is_refused", result, {f"none of {tried:,} changed inputs fails ({failed})": not failed}, whole=whole
    )


if __name__ == "__main__":
    main()
