"""Take the pictures of screens in docs/screens/: a terminal, a notebook and a report page, light and dark.

    python docs/make_pictures.py --only shots

Everything shown is arithmetic, so the pictures change only if the screens do. Chromium takes them.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCREENS = ROOT / "docs" / "screens"
COLUMNS = (60, 80, 120)
WIDTHS = {390: 1500, 800: 1500, 1400: 1150}
"""Widths of pages in pixels: a phone, half a screen and a screen; with their heights."""
MODEL: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "budget": "700MiB"}
CARD: dict[str, Any] = {"cell": "lstm", "seq": 100_000, "hidden": 512, "device": "rtx-4090"}
COLORS = 200  # colours of a picture: flat areas and text need few
PAPER = {"light": ("#ffffff", "#1b1f24", "#f3f4f6"), "dark": ("#111417", "#e8ebef", "#1f252c")}
"""Background, text and background of code of a notebook."""


def take_shots() -> None:
    """Take all pictures again."""
    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        page = Path(home) / "page.html"
        page.write_text(terminal_page(), encoding="utf-8")
        shoot(page, "terminal", 1010, 1480)
        for theme in PAPER:
            page.write_text(notebook_page(theme), encoding="utf-8")
            shoot(page, f"notebook-{theme}", 800, 900, theme)
        import oomguard

        oomguard.save_page(oomguard.find_feasible_config(**CARD), page)
        for width, height in WIDTHS.items():
            shoot(page, f"page-{width}", width, height)
        shoot(page, "page-1400-dark", 1400, WIDTHS[1400], "dark")


def shoot(page: Path, name: str, width: int, height: int, theme: str = "light") -> None:
    """Take a picture of the top of a page, and store it with few colours."""
    from PIL import Image

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Pictures of screens need Chromium (on Debian, apt-get install chromium).")
    shot, scheme = page.with_suffix(".png"), f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}"
    window = [f"--window-size={width},{height}", "--hide-scrollbars", scheme, f"--screenshot={shot}", page.as_uri()]
    words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", *window]
    subprocess.run(words, check=True, capture_output=True, timeout=100)
    buffer = io.BytesIO()
    Image.open(shot).convert("RGB").quantize(COLORS).save(buffer, "PNG", optimize=True)
    (SCREENS / f"{name}.png").write_bytes(buffer.getvalue())


def terminal_page() -> str:
    """`oomguard estimate` on terminals of all widths."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    command = "estimate --model lstm --seq 10000 --budget 700MiB"
    blocks = []
    for columns in COLUMNS:
        settings = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
        words = [sys.executable, "-m", "oomguard", *command.split()]
        done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=False)
        console = Console(record=True, width=columns, file=io.StringIO())
        console.print(Text(f"$ oomguard {command}\n"), Text.from_ansi(done.stdout), sep="", soft_wrap=True)
        code = console.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")
        blocks.append(f'<p>{columns} columns</p><pre style="width: {columns}ch">{code}</pre>')
    style = "body { margin: 16px; font: 14px sans-serif } p { margin: 4px 0; color: #59636e }"
    style += "pre { margin: 0 0 14px; padding: 10px 14px; border-radius: 6px; background: #14181d; color: #e8ebef;"
    style += " font: 13px/1.35 'DejaVu Sans Mono', monospace }"
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(blocks)}"


def notebook_page(theme: str) -> str:
    """Two cells of a notebook with what they show: an estimate and a plan."""
    import oomguard

    estimate, plan = oomguard.estimate(**MODEL), oomguard.find_feasible_config(**CARD)
    cells = (("estimate", MODEL, estimate), ("find_feasible_config", CARD, plan))
    paper, ink, code = PAPER[theme]
    style = f"body {{ margin: 16px; background: {paper}; color: {ink}; font: 14px sans-serif; color-scheme: {theme} }}"
    style += f"body > pre {{ padding: 8px 12px; background: {code}; font: 13px 'DejaVu Sans Mono', monospace }}"
    shown = "".join(
        f"<pre>oomguard.{name}({arguments(fields)})</pre>{value._repr_html_()}" for name, fields, value in cells
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{shown}"


def arguments(fields: dict[str, Any]) -> str:
    """Fields as they are written in a call."""
    shown = {name: f"{value:_}" if isinstance(value, int) else f'"{value}"' for name, value in fields.items()}
    return ", ".join(f"{name}={text}" for name, text in shown.items())
