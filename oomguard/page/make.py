"""The whole page. Nothing of a plan is executed: what comes from it is text."""

import os
from html import escape
from pathlib import Path

from oomguard.curves.drawing import section
from oomguard.curves.page import TOGGLE, document
from oomguard.errors import MisuseError
from oomguard.files import write_file
from oomguard.page.curves import curves
from oomguard.page.summary import summary
from oomguard.plan.html import inside
from oomguard.plan.section import Section
from oomguard.plan.value import Plan
from oomguard.plan.words import explain

SUFFIXES = (".html", ".htm")
"""What a page is written as."""


def save_page(plan: Plan, path: str | os.PathLike[str], sequences: int | None = None) -> Path:
    """Write a page about the plan, as .html: the file is there whole, or as it was before.

    An epoch has so many sequences.

    >>> import tempfile
    >>> from oomguard.api import find_feasible_config
    >>> plan = find_feasible_config(cell="gru", seq=100, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_page(plan, f"{directory}/report.html").name
    'report.html'
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:  # by which a browser knows what it is
        raise MisuseError(
            rule=f"A page is written as {' or '.join(SUFFIXES)}",
            got=f"got {target.name!r}",
            advice="Give the file one of these endings, such as report.html.",
        )
    return write_file(target, make_page(plan, sequences).encode(), "A page")


def make_page(plan: Plan, sequences: int | None = None) -> str:
    """The page as one document."""
    first, *others = explain(plan, sequences)
    body = [
        *_header(first, others),
        "<main>",
        *_result(first, plan, sequences),
        *(line for one in others for line in _section(one)),
        *section(curves(plan)),
        "</main>",
    ]
    return document(first.title, body)


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
