"""A page: everything that is on it is in it. No address is ever asked, and only our two scripts run.

page.css is how it looks, page.js how it behaves; drawing.py puts curves on it.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from oomguard.curves.drawing import section
from oomguard.curves.value import Curve

STYLE, BEHAVIOUR = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))
TOGGLE = '<button id="theme" type="button" aria-pressed="false">Dark</button>'


def page(curves: Sequence[Curve], heading: str, about: str = "") -> str:
    """Several curves on one page, interactive, light or dark.

    >>> page([], "Nothing").count("<figure")
    0
    """
    header = ["<header>", f"<div><p>oomguard</p>{TOGGLE}</div>", f"<h1>{escape(heading)}</h1>", "</header>"]
    words = ['<section class="result" aria-label="What it is about">', f"<p>{escape(about)}</p>", "</section>"]
    return document(heading, [*header, "<main>", *words, *section([{"": one} for one in curves]), "</main>"])


def document(title: str, body: Sequence[str]) -> str:
    """The lines of a body as one document that needs nothing else."""
    scripts = [get_plotlyjs(), BEHAVIOUR.read_text(encoding="utf-8")]
    ours = (f"<script>{one}</script>" for one in scripts)
    return "\n".join([*_head(title, scripts), "<body>", *body, *ours, "</body>", "</html>", ""])


def _head(title: str, scripts: list[str]) -> list[str]:
    """The policy lets the browser run our scripts and no others, and ask nobody for anything."""
    hashes = " ".join(f"'sha256-{_digest(one)}'" for one in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE.read_text(encoding='utf-8')}</style>",
        "</head>",
    ]


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
