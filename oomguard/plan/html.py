"""Sections as HTML: one piece without scripts or links, for a light or a dark notebook.

Everything that a section says is escaped here, for a page (page/) too: a plan is a file from anybody.
"""

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
.oomguard caption { position: absolute; clip-path: inset(50%); }
.oomguard th, .oomguard td { padding: .1em .8em .1em 0; text-align: left; vertical-align: top; background: none; }
.oomguard th { opacity: .7; font-weight: 400; }
.oomguard .r { text-align: right; white-space: nowrap; }
.oomguard pre { margin: .4em 0; white-space: pre-wrap; }
"""
"""No colours: those of the notebook are taken, whatever they are. A caption is for who has the table read out."""
WIDE = 4
"""Columns that a phone has room for."""


def to_html(sections: Sequence[Section]) -> str:
    """The first section is the answer and always seen; the others open with a click."""
    first, *others = sections
    parts = [f"<style>{STYLE}</style>", f"<h4>{escape(first.title)}</h4>", *inside(first)]
    for one in others:
        parts += ["<details>", f"<summary>{escape(one.title)}</summary>", *inside(one), "</details>"]
    return '<div class="oomguard">\n' + "\n".join(parts) + "\n</div>\n"


def inside(section: Section) -> list[str]:
    """What a section says below its title."""
    found = [f"<p>{escape(sentence)}</p>" for sentence in section.sentences]
    found += [] if section.table is None else [_table(section.table)]
    code = escape("\n".join(section.lines))
    return [*found, f"<pre>{code}</pre>"] if code else found


def _table(table: Table) -> str:
    """Words in the first column name their row. A table with many columns is marked, and so is a starred row."""
    parts = ['<table class="wide">' if len(table.header) > WIDE else "<table>"]
    parts += [f"<caption>{escape(table.caption)}</caption>"] if table.caption else []
    if any(table.header):
        cells = [_cell("th", cell, side, 'scope="col"') for cell, side in zip(table.header, table.align, strict=True)]
        parts.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    rows = [_row(table, row) for row in table.rows]
    own = len(rows) - table.sums
    parts += [f"<tbody>{''.join(some)}</tbody>" for some in (rows[:own], rows[own:]) if some]
    return "\n".join([*parts, "</table>"])


def _row(table: Table, row: tuple[str, ...]) -> str:
    cells = [
        _cell("th", cell, side, 'scope="row"')
        if not place and side == "l"
        else _cell("td", cell, side, f'data-head="{escape(head)}"' if head else "")
        for place, (head, cell, side) in enumerate(zip(table.header, row, table.align, strict=True))
    ]
    return f"<tr{' class=chosen' if row[-1].endswith(' *') else ''}>{''.join(cells)}</tr>"


def _cell(tag: str, text: str, side: str, more: str) -> str:
    words = [tag, *(['class="r"'] if side == "r" else []), *([more] if more else [])]
    return f"<{' '.join(words)}>{escape(text)}</{tag}>"
