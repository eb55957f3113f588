"""Curves as files and as what a notebook shows."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomguard.curves.value import Curve
from oomguard.errors import MisuseError
from oomguard.files import write_file

SUFFIXES = (".png", ".html")
"""What curves are written as."""


def save_curves(curves: Sequence[Curve], path: str, heading: str = "Trade-offs", about: str = "") -> Path:
    """Write curves: all of them to one .html page, the first to a .png picture. The file is there whole, or not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_curves([], f"{directory}/curves.html").name
    'curves.html'
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise MisuseError(
            rule=f"Curves are written as {' or '.join(SUFFIXES)}",
            got=f"got {target.name!r}",
            advice="Give the file one of these endings.",
        )
    content = to_png(curves[0]) if suffix == ".png" else _page(curves, heading, about).encode()
    return write_file(target, content, "A curve")


def to_png(curve: Curve) -> bytes:
    """The curve as a picture.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> from oomguard.curves.terms import timeline
    >>> to_png(timeline(find_subject(cell="gru", seq=100, device="t4")[0]))[1:4]
    b'PNG'
    """
    from oomguard.curves.draw_matplotlib import figure

    buffer = io.BytesIO()
    figure(curve).savefig(buffer, format="png")
    return buffer.getvalue()


def to_mimebundle(curve: Curve) -> dict[str, Any]:
    """What a notebook chooses from: Plotly's figure, or the same as a picture. Nothing is fetched from anywhere.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> from oomguard.curves.terms import timeline
    >>> [*to_mimebundle(timeline(find_subject(cell="gru", seq=100, device="t4")[0]))]
    ['application/vnd.plotly.v1+json', 'image/png', 'text/plain']
    """
    return {
        "application/vnd.plotly.v1+json": json.loads(curve.figure().to_json()),
        "image/png": base64.b64encode(to_png(curve)).decode(),
        "text/plain": f"{curve.title}. {curve.answer}",
    }


def _page(curves: Sequence[Curve], heading: str, about: str) -> str:
    from oomguard.curves.page import page

    return page(curves, heading, about)
