"""Claim: in their first hour a researcher, a notebook user, an operations engineer and a Keras user meet no failure,
and no command of theirs is silent for more than 5 s.

    python benchmarks/first_hour.py [USER ...] [--smoke]

The benchmark takes about ten minutes. It builds the wheel, installs it into a fresh environment with the versions of
constraints.txt, and does what the four quickstarts in docs/quickstart/ show, block by block, in a new folder outside of
the repository. The researcher and the Keras user sit at a terminal, the output of the operations engineer goes into a
log, and the cells of the notebook run in a kernel.

A failure is a command that ends with another exit code than its page says, or a cell with an error. Silence is the time
in which nothing is written to stdout and stderr while a command runs, or in which nothing appears below a cell. The
first answer is the end of the first command of oomguard, or the first output of a cell.

A smoke run takes the small sizes with which the tests run the pages, puts the wheel before the packages of this
environment, and measures no times.
"""

import argparse
import importlib.util
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from results import print_row, publish

ROOT = Path(__file__).parents[1]
USERS = ("researcher", "notebook", "operations", "keras")
MAX_SILENCE = 5.0
KILLED = 137  # the exit code of `timeout --signal KILL`
WIDTHS = (12, 9, 9, 9, 10, 9, 40)
RUN_CELLS = """
import sys
import nbformat
from nbclient import NotebookClient

VISIBLE = ("comm_msg", "display_data", "error", "execute_result", "status", "stream", "update_display_data")


class Told(NotebookClient):
    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] in VISIBLE:
            print(cell_index, msg["msg_type"], msg["content"].get("text", ""), flush=True)
        return super().process_message(msg, cell, cell_index)


Told(nbformat.read(sys.argv[1], as_version=4), timeout=600).execute()
"""
"""Executes a notebook and prints a line whenever something appears in it, also the number of a cell that is done."""


class Ran(NamedTuple):
    """The course of one command."""

    command: str
    failed: bool
    silence: float  # longest time without output, in seconds
    first: float | None  # seconds until the first result of a cell
    seconds: float
    output: str
    before: str = ""  # the last words before the longest silence

    def line(self) -> str:
        """What is printed when the command is done."""
        state = "FAILED" if self.failed else "done"
        words = f"  {state} in {self.seconds:.1f} s, silent for at most {self.silence:.1f} s"
        return words + (f" after {self.before!r}" if self.silence > MAX_SILENCE else "") + f": {self.command}"


def pictures() -> Any:
    """Load docs/make_pictures.py, which finds the blocks of a page."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(words: list[str], code: int, *, shown: str, terminal: bool, **where: Any) -> Ran:
    """Run a command, on a terminal or with its output in a pipe, and listen to its silence."""
    reading, writing = pty.openpty() if terminal else os.pipe()
    began = last = time.monotonic()
    first, silence, output, before = None, 0.0, b"", b""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, **where)
    os.close(writing)
    while True:
        select.select([reading], [], [])
        try:
            part = os.read(reading, 1 << 16)
        except OSError:  # a terminal that nobody writes to any more
            part = b""
        now = time.monotonic()
        if now - last > silence:
            silence, before = now - last, output[-80:]
        last, output = now, output + part
        if first is None and b" execute_result " in output:
            first = now - began
        if not part:
            break
    os.close(reading)
    ended = process.wait()
    failed = (128 - ended if ended < 0 else ended) != code  # a signal counts as in a shell
    text = output.decode(errors="replace")
    words = " ".join(before.decode(errors="replace").split())
    return Ran(shown, failed, silence, first, time.monotonic() - began, text, words)


def small(block: Any, text: str) -> str:
    """Apply the replacements that a page names for its tests."""
    for pair in filter(None, (block.note("tested as") or "").split("; ")):
        text = text.replace(*pair.split(" => "))
    return text


def notebook_of(cells: list[str], path: Path) -> Path:
    """Write the cells as a notebook."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(made, path)
    return path


def follow(user: str, home: Path, environment: dict[str, str], *, smoke: bool) -> Iterator[Ran]:
    """Do what the quickstart of a user shows, block by block."""
    terminal = user in ("researcher", "keras")
    where: dict[str, Any] = {"cwd": home, "env": environment, "terminal": terminal}
    page = (ROOT / "docs" / "quickstart" / f"{user}.md").read_text(encoding="utf-8")
    cells: list[str] = []
    for number, block in enumerate(pictures().blocks_of(page)):
        body = small(block, block.body) if smoke else block.body
        if block.file:
            (home / block.file).write_text(body, encoding="utf-8")
        elif user == "notebook":
            cells.append(body)
        elif block.kind == "python":
            script = home / f"block{number}.py"
            script.write_text(body, encoding="utf-8")
            yield run(["python", str(script)], 0, shown=script.name, **where)
        else:
            for screen in block.screens:
                command = small(block, screen.command) if smoke else screen.command
                code = KILLED if "--signal KILL" in command else int(block.note("exit code") or 0)
                yield run(["bash", "-c", command], code, shown=command, **where)
    if cells:
        script = home / "run_cells.py"
        script.write_text(RUN_CELLS, encoding="utf-8")
        path = notebook_of(cells, home / "waves.ipynb")
        yield run(["python", str(script), str(path)], 0, shown=f"the {len(cells)} cells", **where)


def wheel(home: Path, *, isolated: bool) -> Path:
    """Build the wheel from a copy of the sources, so that nothing is written into the repository."""
    source = home / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "oomguard", source / "oomguard", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), str(source)]
    subprocess.run([*words, *([] if isolated else ["--no-build-isolation"])], check=True, cwd=home)
    shutil.rmtree(source)
    return next(home.glob("oomguard-*.whl"))


def install(home: Path, *, smoke: bool) -> dict[str, str]:
    """Install the wheel, and return the variables with which its programs are found."""
    built = wheel(home, isolated=not smoke)
    own = {"HOME": str(home), "COLUMNS": "80", "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
    if smoke:
        folder, programs = home / "packages", Path(sys.executable).parent
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(built)]
        subprocess.run(words, check=True, cwd=home)
        own["PYTHONPATH"] = str(folder)
    else:
        programs = home / "environment" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(home / "environment")], check=True)
        words = [str(programs / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*words, str(built), "ipykernel", "nbclient"], check=True, cwd=home)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | own | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}


def check_origin(home: Path, environment: dict[str, str]) -> None:
    """Stop if the programs would import the source tree."""
    words = ["python", "-c", "import oomguard; print(oomguard.__file__)"]
    done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(home):
        sys.exit(f"The wheel is not what is imported, but {done.stdout.strip()}.")


def row_of(steps: list[Ran]) -> dict[str, Any]:
    """Sum up what a user has met."""
    seconds = 0.0
    answer: float | None = None
    for step in steps:
        if answer is None and step.first is not None:
            answer = seconds + step.first
        seconds += step.seconds
        if answer is None and "oomguard " in step.command and not step.failed:
            answer = seconds
    quietest = max(steps, key=lambda step: step.silence)
    return {
        "commands": len(steps),
        "failures": sum(step.failed for step in steps),
        "silence_seconds": quietest.silence,
        "answer_seconds": answer,
        "seconds": seconds,
        "most_silent": quietest.command[: WIDTHS[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("users", nargs="*", metavar="USER", help="users whose hour is run (default: all four)")
    parser.add_argument("--smoke", action="store_true", help="small sizes, no times, packages of this environment")
    args = parser.parse_args()
    users = args.users or USERS
    if unknown := {*users} - {*USERS}:
        parser.error(f"Unknown user: {', '.join(sorted(unknown))}. Choose from: {', '.join(USERS)}.")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        environment = install(Path(name), smoke=args.smoke)
        check_origin(Path(name), environment)
        print_row(("user", "commands", "failures", "silence", "answer", "all", "longest silence in"), WIDTHS)
        for user in users:
            home = Path(name) / user
            home.mkdir()
            steps = []
            for step in follow(user, home, environment, smoke=args.smoke):
                steps.append(step)
                print(step.line(), flush=True)
                if step.failed:
                    print(step.output[-2000:], flush=True)
            row = rows[user] = row_of(steps)
            answer = "none" if row["answer_seconds"] is None else f"{row['answer_seconds']:.1f} s"
            cells = (row["commands"], row["failures"], f"{row['silence_seconds']:.1f} s", answer)
            print_row((user, *cells, f"{row['seconds']:.0f} s", row["most_silent"]), WIDTHS)
    failures = sum(row["failures"] for row in rows.values())
    longest = max(row["silence_seconds"] for row in rows.values())
    claims = {f"no failure in {sum(row['commands'] for row in rows.values())} commands ({failures})": not failures}
    if not args.smoke:
        claims[f"no silence over {MAX_SILENCE:.0f} s (longest: {longest:.1f})"] = longest <= MAX_SILENCE
    priority = {"nice": os.nice(0)}  # below 0, other programs of a busy machine had to wait
    publish("first_hour", {"users": rows} | priority, claims, whole={*users} == {*USERS})


if __name__ == "__main__":
    main()
