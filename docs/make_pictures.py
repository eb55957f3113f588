"""Make what the README shows: the screen of a plan, and the picture of a curve.

    python docs/make_pictures.py [--only plan|curve]

The plan's screen is text between two marks of README.md, as a real search prints it (a minute and
a half on a quiet machine of two cores); the curve is docs/segments.png, by arithmetic, with its title between marks.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "segments.png"
PLAN = "oomguard plan --model lstm --seq 10000 --budget 700MiB"
CURVE = "oomguard tradeoffs --model lstm --seq 10000 --budget 6GiB --curve segments --output segments.png"


def screen(command: str, home: Path) -> str:
    """What a command prints on a terminal of 80 columns, started in a directory."""
    settings = {"COLUMNS": "80", "OOMGUARD_CACHE": ""}  # nothing is known from earlier searches
    words = [sys.executable, "-m", "oomguard", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=home, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def plan_block() -> str:
    """The plan's screen."""
    with tempfile.TemporaryDirectory() as home:
        return f"```\n$ {PLAN}\n{screen(PLAN, Path(home))}\n```"


def curve_block() -> str:
    """The curve's picture is written; the block shows it."""
    with tempfile.TemporaryDirectory() as home:
        screen(CURVE, Path(home))
        PICTURE.write_bytes((Path(home) / "segments.png").read_bytes())
    return f"![{curve_title()}](docs/segments.png)"


def curve_title() -> str:
    """What the picture has found, for those who do not see it."""
    import oomguard

    curves = oomguard.curves(cell="lstm", seq=10_000, budget="6GiB")
    return next(one.title for one in curves if one.name == "segments")


BLOCKS = {"plan": plan_block, "curve": curve_block}


def marks(name: str) -> tuple[str, str]:
    """What stands before and after a block."""
    return f"<!-- {name}: by docs/make_pictures.py -->", f"<!-- end of {name} -->"


def block_in(text: str, name: str) -> str:
    """The block as it stands."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].strip()


def with_block(text: str, name: str, block: str) -> str:
    """The text with another block between the marks."""
    begin, end = marks(name)
    found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return found.sub(lambda _: f"{begin}\n{block}\n{end}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*BLOCKS], help="one of the two (both)")
    only = parser.parse_args().only
    for name in [only] if only else BLOCKS:
        block = BLOCKS[name]()
        README.write_text(with_block(README.read_text(encoding="utf-8"), name, block), encoding="utf-8")
        print(block)


if __name__ == "__main__":
    main()
