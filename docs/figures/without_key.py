"""Figures on a page that no piece has a key for.

A decimal number outside code is a figure, and so is a whole number in a column of a table that holds results. A figure
has a key, or is one of the exceptions below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|<code>.*?</code>|\]\([^)\n]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
_DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?!\.?\d)")
_UNIT = r"(?:ms|s|KiB|[MGT]i?B|TFLOP|%)"
_CELL = re.compile(rf"[*~ ]*(\d[\d,]*)(?: {_UNIT})?[* ]*")  # all of a cell
# Words in the head of a column of results
_RESULTS = re.compile(rf"\b(?:{_UNIT}|seconds|minutes|time|memory|peak|sent|idle|bytes|tokens (?:a|per) second)\b")

# What is before and behind a figure that needs no key, and why it needs none
_EXCEPT = {
    r"(?:Python|torch|CUDA|NCCL|DeepSpeed|timm|diffusers|bitsandbytes)(?: from)? {}": "a program's version",
    r"Apache-{}": "the version of a licence",
    r"{} [MBGT] parameters": "the size of a model, which its configuration states",
}
# Pages that are written whole from tests, which compare them
WRITTEN = {"docs/together.md"}


class Found(NamedTuple):
    """A figure, and the number of its line."""

    line: int
    figure: str


def without_key(text: str, places: list[tuple[int, int]]) -> list[Found]:
    """Return the figures of a page outside `places`, those of figures with a key.

    >>> without_key("It takes 1.5 ms with torch 2.13, and `rate=0.1`.", [])
    [Found(line=1, figure='1.5')]
    """
    blank = _CODE.sub(lambda x: re.sub(r"[^\n]", " ", x[0]), text)
    spans = sorted({*_decimals(text, blank), *_in_tables(blank)})
    found = [(a, b) for a, b in spans if not any(c <= a and b <= d for c, d in places)]
    return [Found(text.count("\n", 0, a) + 1, text[a:b]) for a, b in found]


def _decimals(text: str, blank: str) -> Iterator[tuple[int, int]]:
    excepted = {x.span(1) for pattern in _EXCEPT for x in re.finditer(pattern.format(rf"({_DECIMAL.pattern})"), blank)}
    for x in _DECIMAL.finditer(blank):
        line = text[text.rfind("\n", 0, x.start()) + 1 : text.find("\n", x.end())]
        in_code = {y for code in re.findall(r"`[^`\n]*`", line) for y in _DECIMAL.findall(code)}
        if x.span() not in excepted and x[0] not in in_code:  # the value of an option that the line is about
            yield x.span()


def _in_tables(blank: str) -> Iterator[tuple[int, int]]:
    """Yield the whole numbers of columns with results. The first column names rows."""
    head: list[str] | None = None
    at = 0
    for line in blank.split("\n"):
        cells = line.strip().split("|")[1:-1]
        if not line.lstrip().startswith("|"):
            head = None
        elif head is None:
            head = cells
        else:
            begin = at + line.index("|") + 1
            for k, cell in enumerate(cells):
                number = _CELL.fullmatch(cell)
                if k and number and (k < len(head) and _RESULTS.search(head[k]) or re.search(_UNIT, cell)):
                    yield begin + number.start(1), begin + number.end(1)
                begin += len(cell) + 1
        at += len(line) + 1
