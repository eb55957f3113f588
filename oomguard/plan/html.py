"""Sections as HTML: one piece without scripts or links, for a light or a dark notebook."""

from collections.abc import Sequence
from html import escape

from oomguard.plan.section import Section, Table

STYLE = """
.oomguard { font: 14px/1.45 system-ui, sans-serif; max-width: 60em; }
.oomguard h4 { margin: 0 0 .3em; font-size: 1.1em; }
.oomguard p { margin: .15em 0; }
.oomguard details { border-top: 1px solid rgba(128,128,128,.35); padding: .3em 0; }
.oomguard summary { cursor: pointer; font-weight: 600; }
.oomguard table { border-collapse: collapse; margin: .4em 0; font-size: inherit; font-variant-numeric: tabular-nums; }
.oomguard th, .oomguard td { padding: .1em .8em .1em 0; text-align: left; vertical-align: top; background: none; }
.oomguard th { opacity: .7; font-weight: 400; }
.oomguard .r { text-align: right; white-space: nowrap; }
.oomguard pre { margin: .4em 0; white-space: pre-wrap; }
"""
"""No colours: those of the notebook are taken, whatever they are."""


def to_html(sections: Sequence[Section]) -> str:
    """The first section is the answer and always seen; the others open with a click."""
    first, *others = sections
    parts = [f"<style>{STYLE}</style>", f"<h4>{escape(first.title)}</h4>", *_inside(first)]
    for one in others:
        parts += ["<details>", f"<summary>{escape(one.title)}</summary>", *_inside(one), "</details>"]
    return '<div class="oomguard">\n' + "\n".join(parts) + "\n</div>\n"


def _inside(section: Section) -> list[str]:
    found = [f"<p>{escape(sentence)}</p>" for sentence in section.sentences]
    found += [] if section.table is None else [_table(section.table)]
    code = escape("\n".join(section.lines))
    return [*found, f"<pre>{code}</pre>"] if code else found


def _table(table: Table) -> str:
    head = [_row(table.header, table.align, "th")] if any(table.header) else []
    return "\n".join(["<table>", *head, *(_row(row, table.align, "td") for row in table.rows), "</table>"])


def _row(cells: tuple[str, ...], align: str, tag: str) -> str:
    sides = [' class="r"' if side == "r" else "" for side in align]
    return "<tr>" + "".join(f"<{tag}{s}>{escape(c)}</{tag}>" for c, s in zip(cells, sides, strict=True)) + "</tr>"
