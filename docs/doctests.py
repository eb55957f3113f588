"""Let the Python reference show the doctests of docstrings as code. mkdocs.yml names this file as an extension."""

from typing import Any

import griffe


class FenceDoctests(griffe.Extension):
    """Put every doctest of a docstring into a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object as soon as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Fence the paragraphs that begin with a prompt, and keep all others."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        code = paragraph.lstrip().startswith(">>>")
        paragraphs.append(f"```pycon\n{paragraph}\n```" if code else paragraph)
    return "\n\n".join(paragraphs)
