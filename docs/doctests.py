"""An extension of griffe, which reads docstrings for the reference: examples after `>>>` become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts every paragraph that begins with `>>>` into a fence: Markdown would take it for a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^>>> (?:.+\n?)+", lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
