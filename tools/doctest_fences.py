"""For the site: the examples in docstrings (`>>>`) become code blocks, which Markdown would take for quotations.

mkdocs.yml names this extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Return a docstring with a fence around each example: from its first `>>>` to the next empty line."""
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if not inside and line.lstrip().startswith(">>>"):
            inside = True
            lines += ["", "```pycon"]
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class DoctestFences(griffe.Extension):
    """Puts the fences in while the sources are read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
