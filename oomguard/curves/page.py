"""Several curves on one page: interactive, light or dark as the reader has it, complete in itself."""

import json
from collections.abc import Sequence
from html import escape

from plotly.offline import get_plotlyjs

from oomguard.curves.draw_plotly import figure
from oomguard.curves.value import Curve

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --back: #f4f5f7; --ink: #1b1f24; --soft: #59636e; --rule: #e3e6ea; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --back: #0c0f12; --ink: #e8ebef; --soft: #a3adb8; --rule: #2b323a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; line-height: 1.25; }
header p { color: var(--soft); margin: 0 0 1.2rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1rem; }
section { background: var(--paper); border: 1px solid var(--rule); border-radius: 10px; padding: 1rem 1rem .4rem;
  display: flex; flex-direction: column; min-width: 0; }
h2 { font-size: 1.12rem; line-height: 1.3; margin: 0 0 .3rem; }
.question { color: var(--soft); font-size: .85rem; margin: 0 0 .15rem; }
.answer { font-size: .92rem; margin: 0 0 .5rem; color: var(--soft); }
.plot { height: 400px; margin-top: auto; }
@media print { .curves { display: block; } section { break-inside: avoid; margin-bottom: 1rem; } }
"""
SCRIPT = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function draw() {
  for (const [name, both] of Object.entries(curves)) {
    const one = structuredClone(dark.matches ? both.dark : both.light);
    if (window.innerWidth < 600) {
      one.layout.margin.l = 54;
      one.layout.margin.r = 8;
      one.layout.font.size = 12;
    }
    Plotly.react(name, one.data, one.layout, {responsive: true, displaylogo: false, displayModeBar: false});
  }
}
dark.addEventListener("change", draw);
draw();
"""


def page(curves: Sequence[Curve], heading: str, about: str = "") -> str:
    """The page. Nothing on it is fetched from anywhere.

    >>> page([], "Nothing").count("<section")
    0
    """
    both = {one.name: {mode: _json(one, dark=mode == "dark") for mode in ("light", "dark")} for one in curves}
    sections = "\n".join(map(_section, curves))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{escape(heading)}</h1><p>{escape(about)}</p></header>
<div class="curves">
{sections}
</div>
</main>
<script>{get_plotlyjs()}</script>
<script>const curves = {_inline(both)};{SCRIPT}</script>
</body>
</html>
"""


def _section(curve: Curve) -> str:
    return (
        f'<section><p class="question">{escape(curve.question)}</p><h2>{escape(curve.title)}</h2>'
        f'<p class="answer">{escape(curve.answer)}</p>'
        f'<div class="plot" id="{curve.name}" role="img" aria-label="{escape(curve.answer)}"></div></section>'
    )


def _json(curve: Curve, *, dark: bool) -> object:
    return json.loads(figure(curve, dark=dark, titled=False).to_json())


def _inline(value: object) -> str:
    """As a script can hold it: nothing in it can end the script."""
    return json.dumps(value).replace("</", "<\\/")
