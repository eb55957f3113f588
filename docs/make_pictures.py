"""Refresh what README.md and the pages of docs/ show: the screens of commands, the picture and the comparison.

    python docs/make_pictures.py [--only screens|picture|comparison|shots] [PAGE ...]

A screen is the output below a line `$ oomguard ...` in a `console` block; the blocks of a page run in order in one
temporary directory. With the two searches of README.md and the quickstart this takes about ten minutes. The picture is
docs/segments.png, by arithmetic. The comparison of README.md is made from benchmarks/results/. Pictures of screens, in
docs/screens/, are taken by make_shots.py.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "segments.png"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
CURVE: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "budget": "6GiB"}
"""The model and the budget of the picture."""
BLOCK = re.compile(
    r"((?:^<!-- [^\n]* -->\n)*)^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


class Screen(NamedTuple):
    """One command of a console block, and the output that the page shows for it (empty: none)."""

    command: str
    output: str


class Block(NamedTuple):
    """One code block of a page, and the comments directly above it.

    Comments that the tests follow: `tested as: A => B; C => D` (text is replaced to make it small), `not run: REASON`,
    `shape only` (figures may differ) and `exit code 1`.
    """

    kind: str
    body: str
    notes: tuple[str, ...]
    line: int
    file: str = ""
    """The title of a block that is a file: the reader saves it under this name."""

    def note(self, name: str) -> str | None:
        """Return the text of a comment after its name, or None without such a comment."""
        return next((note.removeprefix(name).strip(": ") for note in self.notes if note.startswith(name)), None)

    @property
    def screens(self) -> list[Screen]:
        """Split a console block into its commands, each with the output below it."""
        parts = re.split(r"^\$ (.*)$", self.body, flags=re.MULTILINE)
        return [Screen(*pair) for pair in zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True)]


def blocks_of(text: str) -> list[Block]:
    """Find the code blocks of a page that name their language."""
    blocks = []
    for match in BLOCK.finditer(text):
        notes = tuple(line[5:-4].strip() for line in match[1].splitlines())
        line = text.count("\n", 0, match.start(4)) + 1
        blocks.append(Block(match[2], match[4], notes, line, match[3] or ""))
    return blocks


def refresh_screens(page: Path) -> None:
    """Run the blocks of a page in order, up to the last screen, and store what the commands print."""
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    last = max((i for i, block in enumerate(blocks) if _shows(block)), default=-1)
    names: dict[str, Any] = {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)
        try:
            for block in blocks[: last + 1]:
                if block.note("not run") is not None:
                    continue
                if block.file:
                    Path(block.file).write_text(block.body, encoding="utf-8")
                elif block.kind == "python":
                    exec(block.body, names)
                elif block.kind == "console":
                    text = text.replace(block.body, _run(block), 1)
        finally:
            os.chdir(here)
    page.write_text(text, encoding="utf-8")


def _shows(block: Block) -> bool:
    return block.kind == "console" and any(screen.output for screen in block.screens)


def _run(block: Block) -> str:
    """Run the commands of a block, and replace the output of those whose output is shown."""
    lines = []
    for screen in block.screens:
        done = run_command(screen.command)
        if done.returncode != int(block.note("exit code") or 0):
            sys.exit(f"{screen.command} ended with exit code {done.returncode}: {done.stderr}")
        output = screen_of(done)
        lines += [f"$ {screen.command}", *([output] if screen.output else [])]
    return "\n".join(lines) + "\n"


def run_command(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on a terminal of 80 columns, without anything that earlier searches have stored.

    Lines with more than a call of oomguard are run by the shell, which finds this Python and its programs first.
    """
    settings = {"COLUMNS": "80", "OOMGUARD_CACHE": ""}
    words = [sys.executable, "-m", "oomguard", *shlex.split(command)[1:]]
    if not command.startswith("oomguard ") or ">" in command:
        words = ["bash", "-c", command]
        settings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=False)


def screen_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed, without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


# ---- the picture


def curve() -> Any:
    """Compute the curve of the picture."""
    import oomguard

    return next(curve for curve in oomguard.curves(**CURVE) if curve.name == "segments")


def refresh_picture() -> None:
    """Draw the picture, and put its title where pages show it."""
    drawn = curve()
    drawn.save(PICTURE)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"!\[[^\]]*\](\([^)]*segments\.png\))", rf"![{drawn.title}]\1", text), encoding="utf-8")


# ---- the comparison


def comparison() -> str:
    """Make the table of README.md that compares oomguard with other tools, from the newest whole benchmark runs."""
    searches = newest("search_needs_few_probes")
    errors = newest("estimates_track_peaks")
    ours, lightning, accelerate = (
        _finder(searches, name) for name in ("oomguard", "lightning-binsearch", "accelerate")
    )
    by_hand = newest("segments_cost_little")["rows"]
    tracker = (
        f"{errors['memtracker']['median']:.0%} median error on the {errors['memtracker']['answers']} steps it can trace"
    )
    estimates = f"{errors['oomguard']['median']:.1%} on all {errors['oomguard']['answers']}"
    died = sum(case["lightning-binsearch"]["error"] is not None for case in searches["cases"])
    longest = [_cost(by_hand, way) for way in ("segments", "checkpoint", "reentrant")]
    rows = [
        ("oomguard", "the largest microbatch, or the fastest exact setting, for RNNs", ours),
        (
            "Lightning `BatchSizeFinder`",
            "the batch size, by trial",
            f"{lightning}; died in {died} of {len(searches['cases'])} cases",
        ),
        ("accelerate `find_executable_batch_size`", "the batch size, by trial", accelerate),
        ("Composer `auto`", "the microbatch, while training", "halves it on an error and never grows back; GPU only"),
        ("DeepSpeed autotuner", "settings of DeepSpeed", "does not vary the sequence length; assumes Adam"),
        (
            "torch `MemTracker`",
            "an estimate from a traced run",
            f"{tracker}, ours {estimates}; counts no cuDNN reserve",
        ),
        (
            "`torch.utils.checkpoint` by hand",
            "less memory for recomputation",
            f"2-layer LSTM, T = 10,000: {longest[1]}, reentrant {longest[2]}; our segments {longest[0]}",
        ),
    ]
    return "\n".join(["| tool | what it finds | measured or read in its code |", "|---|---|---|"]) + "".join(
        f"\n| {tool} | {what} | {finding} |" for tool, what, finding in rows
    )


def _finder(run: dict[str, Any], name: str) -> str:
    """Say how close a finder comes to the true maximum, and how often it runs out of memory."""
    cases = [case for case in run["cases"] if case[name]["found"]]
    shares = [case[name]["found"] / case["maximum"] for case in cases]
    answers = [case[name] for case in run["cases"] if case[name]["trials"] is not None]  # not stopped by the time limit
    ooms, trials = [answer["ooms"] for answer in answers], [answer["trials"] for answer in answers]
    return (
        f"{min(shares):.0%} to {max(shares):.0%} of the maximum, {_range(trials)} trials, "
        f"{_range(ooms)} of them out of memory"
    )


def _range(counts: list[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _cost(rows: list[dict[str, Any]], way: str) -> str:
    row = next(
        row
        for row in rows
        if (row["way"], row["spec"]["cell"], row["spec"]["seq"], row["spec"]["layers"]) == (way, "lstm", 10_000, 2)
    )
    return f"{row['memory']:.1%} of the memory at {row['time']:.2f} of the time"


def newest(name: str) -> dict[str, Any]:
    """Read the newest whole run of a benchmark."""
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text("utf-8").splitlines()
    run: dict[str, Any] = [run for run in map(json.loads, lines) if run["whole"]][-1]
    return run


def with_comparison(text: str) -> str:
    """Put the comparison between its marks."""
    marks = re.compile(r"(<!-- comparison -->\n).*?(<!-- end of comparison -->)", re.DOTALL)
    return marks.sub(lambda match: f"{match[1]}{comparison()}\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="pages whose screens are refreshed (default: all)"
    )
    parser.add_argument(
        "--only", choices=["screens", "picture", "comparison", "shots"], help="refresh only this (default: all)"
    )
    args = parser.parse_args()
    if args.only in (None, "picture"):
        refresh_picture()
    if args.only in (None, "comparison"):
        README.write_text(with_comparison(README.read_text(encoding="utf-8")), encoding="utf-8")
    if args.only in (None, "shots"):
        from make_shots import take_shots

        take_shots()
    if args.only in (None, "screens"):
        for page in [path.resolve() for path in args.pages] or PAGES:
            refresh_screens(page)


if __name__ == "__main__":
    main()
