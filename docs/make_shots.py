"""Take the pictures of screens in docs/screens/: terminals, notebooks and report pages in three widths, light and dark.

    python docs/make_pictures.py --only shots

What is shown is arithmetic and a stored plan, so the pictures change only if the screens do. Chromium takes them.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
SCREENS = ROOT / "docs" / "screens"
PLAN = SCREENS / "plan.json"
COLUMNS = (60, 80, 120)
WIDTHS = (390, 800, 1400)
"""Widths of pages in pixels: a phone, half a screen and a screen."""
THEMES = ("light", "dark")
TOP = 1150  # height of the picture of the top of a page
COLORS = 128  # colours of a picture: flat areas and text need few
COMMANDS = ("estimate --model lstm --seq 10000 --budget 700MiB", f"tradeoffs --plan {PLAN.name}")
EXPLORE = "explore --model lstm --seq 10000 --budget 700MiB"
MODEL: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "budget": "700MiB"}
PAPER = {"light": ("#ffffff", "#1b1f24", "#f3f4f6"), "dark": ("#111417", "#e8ebef", "#1f252c")}
"""Background, text and background of code of a terminal and of a notebook."""
MONOSPACE = "font: 13px/1.35 'DejaVu Sans Mono', monospace"


def take_shots() -> None:
    """Take all pictures again."""
    from playwright.sync_api import sync_playwright

    import oomguard

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Pictures of screens need Chromium (on Debian, apt-get install chromium).")
    for old in SCREENS.glob("*.png"):
        old.unlink()
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        report = oomguard.save_page(oomguard.load_plan(PLAN), Path(home) / "report.html").read_text(encoding="utf-8")
        for theme in THEMES:
            for columns in COLUMNS:
                shoot(browser, terminal_page(columns, theme), f"terminal-{columns}-{theme}", 8 * columns + 60, theme)
            notebook = notebook_page(theme)
            for width in WIDTHS:
                shoot(browser, notebook, f"notebook-{width}-{theme}", width, theme)
                shoot(browser, report, f"page-{width}-{theme}", width, theme, height=TOP)
                shoot(browser, report, f"charts-{width}-{theme}", width, theme, part="section:has(figure)")
        shoot_explorer(browser)
        browser.close()


def shoot(
    browser: "Browser", page: str, name: str, width: int, theme: str, *, height: int | None = None, part: str = "body"
) -> None:
    """Take a picture of the top of a page, or of a whole part of it."""
    view = browser.new_page(viewport={"width": width, "height": height or TOP}, color_scheme=theme)  # type: ignore[arg-type]
    view.set_content(page)
    store(view.screenshot() if height else view.locator(part).screenshot(), name)
    view.close()


def shoot_explorer(browser: "Browser") -> None:
    """Take pictures of the explorer, which a server on this machine answers."""
    command = [sys.executable, "-m", "oomguard", *EXPLORE.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = server.stderr.readline().split()[2]
        for theme in THEMES:
            view = browser.new_page(viewport={"width": WIDTHS[-1], "height": TOP}, color_scheme=theme)  # type: ignore[arg-type]
            view.goto(address)
            view.locator("tr[data-term]").first.wait_for()
            store(view.screenshot(), f"explore-{theme}")
            view.close()
        server.send_signal(signal.SIGINT)


def store(shot: bytes, name: str) -> None:
    """Store a picture with few colours."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLORS).save(buffer, "PNG", optimize=True)
    (SCREENS / f"{name}.png").write_bytes(buffer.getvalue())


def terminal_page(columns: int, theme: str) -> str:
    """Commands on a terminal of some columns."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
    from rich.text import Text

    settings = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    console = Console(record=True, width=columns, file=io.StringIO())
    for command in COMMANDS:
        words = [sys.executable, "-m", "oomguard", *command.split()]
        where: dict[str, Any] = {"cwd": PLAN.parent, "env": os.environ | settings}
        done = subprocess.run(words, capture_output=True, text=True, check=False, **where)
        console.print(Text(f"$ oomguard {command}\n"), Text.from_ansi(done.stdout), sep="", soft_wrap=True)
    colors = MONOKAI if theme == "dark" else DEFAULT_TERMINAL_THEME
    code = console.export_html(theme=colors, inline_styles=True, code_format="{code}")
    paper, ink, _ = PAPER[theme]
    style = f"body {{ margin: 0; padding: 16px; background: {paper}; color: {ink} }}"
    style += f"pre {{ margin: 0; width: {columns}ch; border-right: 1px dotted #888; {MONOSPACE} }}"
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><pre>{code}</pre>"


def notebook_page(theme: str) -> str:
    """Cells of a notebook with what they show: an estimate, a plan and a curve."""
    import oomguard

    plan = oomguard.load_plan(PLAN)
    curve = next(curve for curve in oomguard.curves(plan) if curve.name == "segments")
    shown, size = curve._repr_mimebundle_()
    picture, wide = shown["image/png"], size["image/png"]["width"]
    cells = {
        'oomguard.estimate(cell="lstm", seq=10_000, budget="700MiB")': oomguard.estimate(**MODEL)._repr_html_(),
        'oomguard.load_plan("plan.json")': plan._repr_html_(),
        'curves["segments"]': f'<img src="data:image/png;base64,{picture}" style="width: {wide}px; max-width: 100%">',
    }
    paper, ink, code = PAPER[theme]
    style = f"body {{ margin: 0; padding: 16px; background: {paper}; color: {ink}; color-scheme: {theme} }}"
    style += f"body > pre {{ padding: 8px 12px; background: {code}; white-space: pre-wrap; {MONOSPACE} }}"
    outputs = "".join(f"<pre>{words}</pre>{output}" for words, output in cells.items())
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{outputs}"
