"""Texts and tables for notebooks: plain HTML that looks the same in light and dark ones."""

from __future__ import annotations

import html
from collections.abc import Sequence

_CELL = "padding:2px 8px;white-space:nowrap;text-align:"
_BLOCK = "white-space:pre;overflow-x:auto"


def paragraph(text: str) -> str:
    """Return HTML of a text whose lines are wrapped."""
    return f'<p style="font-weight:bold;margin:8px 0">{html.escape(text)}</p>'


def preformatted(text: str) -> str:
    """Return HTML of a text whose lines are not wrapped."""
    return f'<pre style="{_BLOCK}">{html.escape(text)}</pre>'


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int], marked: int | None = None
) -> str:
    """Return HTML of a table: the columns `left` to the left and numbers to the right; the row `marked` in bold."""

    def line(cells: Sequence[str], tag: str, style: str = "") -> str:
        inner = "".join(
            f'<{tag} style="{_CELL}{"left" if k in left else "right"}">{html.escape(x)}</{tag}>'
            for k, x in enumerate(cells)
        )
        return f"<tr{style}>{inner}</tr>"

    body = [line(row, "td", ' style="font-weight:bold"' if k == marked else "") for k, row in enumerate(rows)]
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse"><caption style="text-align:left">'
        f"{html.escape(title)}</caption><thead>{line(head, 'th')}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )
