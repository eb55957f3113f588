"""The whole page: everything that is on it is in it. No address is ever asked, and nothing of a plan is executed."""

import base64
import hashlib
import os
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from oomguard.errors import MisuseError
from oomguard.files import replace_content
from oomguard.page.curves import curves, section
from oomguard.page.summary import summary
from oomguard.plan.html import inside
from oomguard.plan.section import Section
from oomguard.plan.value import Plan
from oomguard.plan.words import explain

STYLE, BEHAVIOUR = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))
TOGGLE = '<button id="theme" type="button" aria-pressed="false">Dark</button>'


def save_page(plan: Plan, path: str | os.PathLike[str], sequences: int | None = None) -> Path:
    """Write a page about the plan: the file is there whole, or as it was before. An epoch has so many sequences."""
    target = Path(path)
    content = make_page(plan, sequences).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_content(target, content)
    except OSError as error:
        raise MisuseError(
            rule="A page is written to a file of yours",
            got=f"{target} cannot be written ({error.strerror})",
            advice="Give another file.",
        ) from None
    return target


def make_page(plan: Plan, sequences: int | None = None) -> str:
    """The page as one document."""
    first, *others = explain(plan, sequences)
    scripts = [get_plotlyjs(), BEHAVIOUR.read_text(encoding="utf-8")]
    body = [
        *_header(first, others),
        "<main>",
        *_result(first, plan, sequences),
        *(line for one in others for line in _section(one)),
        *section(curves(plan)),
        "</main>",
        *(f"<script>{one}</script>" for one in scripts),
    ]
    return "\n".join([*_head(first.title, scripts), "<body>", *body, "</body>", "</html>", ""])


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


def _header(first: Section, others: list[Section]) -> list[str]:
    titles = [*(one.title for one in others), "Curves"]
    links = [f'<a href="#{_anchor(one)}">{escape(one)}</a>' for one in titles]
    return [
        "<header>",
        f"<div><p>oomguard</p>{TOGGLE}</div>",
        f"<h1>{escape(first.title)}</h1>",
        f'<nav aria-label="Sections">{" ".join(links)}</nav>',
        "</header>",
    ]


def _anchor(title: str) -> str:
    """Titles of sections are ours: one word each."""
    return escape(title.lower())


def _result(first: Section, plan: Plan, sequences: int | None) -> list[str]:
    words = f'<p class="chosen">{escape(first.sentences[0])}</p>'
    top, *rest = summary(plan, sequences)
    return ['<section class="result" aria-label="Result">', top, words, *rest, "</section>"]


def _section(section: Section) -> list[str]:
    name = _anchor(section.title)
    title = f'<h2 id="{name}">{escape(section.title)}</h2>'
    return [f'<section aria-labelledby="{name}">', title, "<div>", *inside(section), "</div>", "</section>"]
