"""Patterns of names of modules and parameters, as in transformers' `tp_plan`: `*` stands for any one component."""

from __future__ import annotations

import re


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern means the module or parameter `name`.

    >>> matches("layers.*.q_proj", "layers.3.q_proj")
    True
    """
    expression = "".join(r"[^.]+" if x == "*" else re.escape(x) for x in re.split(r"(\*)", pattern))
    return re.fullmatch(expression, name) is not None


def pattern_of(name: str) -> str:
    """Return a name with `*` for its numbers.

    >>> pattern_of("layers.3.q_proj")
    'layers.*.q_proj'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
