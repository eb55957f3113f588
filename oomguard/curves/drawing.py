"""Curves on a page: their places, and what is drawn there, as data that a script draws. One figure for both themes."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from plotly.graph_objects import Figure

from oomguard.curves.draw_plotly import figure
from oomguard.curves.value import Curve

Choices = dict[str, Curve]
"""A curve by the knobs that it is drawn for, the first of them shown first."""
Path = tuple[str | int, ...]


def section(found: list[Choices]) -> list[str]:
    """The curves' places on the page, and what is drawn there as data: the script draws it."""
    places = [line for one in found for line in _place(one)]
    drawn = [[{"words": _words(one), **drawing(one)} for one in choices.values()] for choices in found]
    data = {"template": json.loads(Figure().to_json())["layout"]["template"], "curves": drawn}
    absent = "<noscript><p>Curves are drawn by a script, and scripts are turned off here.</p></noscript>"
    written = f'<script type="application/json" id="drawings">{to_script(data)}</script>'
    title = '<h2 id="curves">Curves</h2>'
    return ['<section aria-labelledby="curves">', title, "<div>", absent, *places, "</div>", written, "</section>"]


def _words(curve: Curve) -> dict[str, str]:
    """What is said of a curve, by the part of its place that says it."""
    return {"h3": curve.title, ".question": curve.question, ".reply": curve.answer}


def _place(choices: Choices) -> list[str]:
    first = next(iter(choices.values()))
    options = "".join(f"<option>{escape(words)}</option>" for words in choices)
    menu = f'<label>Drawn for <select autocomplete="off">{options}</select></label>' if len(choices) > 1 else ""
    kind, question = "curve tall" if first.below is not None else "curve", escape(first.question)
    return [
        f'<figure class="{kind}" data-curve="{escape(first.name)}" aria-label="{question}">',
        f"<h3>{escape(first.title)}</h3>",
        f'<p class="question">{question}</p>',
        f'<p class="reply">{escape(first.answer)}</p>',
        menu,
        f'<div class="plot" role="img" aria-label="{question}"></div>',
        "</figure>",
    ]


def drawing(curve: Curve) -> dict[str, Any]:
    """A curve as Plotly draws it on a light page, and what is otherwise on a dark one."""
    light, dark = (_plain(curve, dark=one) for one in (False, True))
    return {"light": light, "dark": [[*one] for one in differences(light, dark)]}


def _plain(curve: Curve, *, dark: bool) -> Any:
    found = json.loads(figure(curve, dark=dark, titled=False).to_json())
    del found["layout"]["template"]  # the same for all of them: once is enough
    found["layout"] |= {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    return found


def differences(one: Any, other: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Where the other differs from the one, and what it has there.

    >>> [*differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]})]
    [(('a', 1, 'b'), 3)]
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs: list[tuple[str | int, Any, Any]] = [(name, one[name], other[name]) for name in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(place, *pair) for place, pair in enumerate(zip(one, other, strict=True))]
    else:
        if one != other:
            yield path, other
        return
    for name, ours, theirs in pairs:
        yield from differences(ours, theirs, (*path, name))


def to_script(value: Any) -> str:
    """JSON that no tag ends, whatever is in it.

    >>> to_script("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
