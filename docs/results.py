"""Figures by their keys in files of `benchmarks/results`, and pages that have them. `docs/figures` has the keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MB, GB = 1e6, 1e9


@cache
def results(file: str) -> Any:
    """Return a result file."""
    return json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())


class Key(NamedTuple):
    """Where a figure is. `path`: in the file; several values there, one a round, stand for their median. `over`: the
    path of a second figure of the same file, which this one is divided by in each round of both. `unit`: in which it is
    shown.
    """

    file: str
    path: tuple[str, ...]
    over: tuple[str, ...] = ()
    unit: float = 1.0

    @property
    def value(self) -> float:
        """The figure, in the unit in which it is shown."""
        found = self._at(self.path)
        if self.over:
            found = [a / b for a, b in zip(found, self._at(self.over), strict=False)]
        return median(found) / self.unit

    def _at(self, path: tuple[str, ...]) -> list[float]:
        found: Any = results(self.file)
        for k, name in enumerate(path):
            if isinstance(found, list):  # a round each, whose fields have names
                return [self._field(x, path[k:]) for x in found]
            found = found[name]
        return found if isinstance(found, list) else [found]

    @staticmethod
    def _field(found: Any, path: tuple[str, ...]) -> float:
        for name in path:
            found = found[name]
        return float(found)


def of(file: str, *path: str, unit: float = 1.0) -> Key:
    """Return the key of a figure, or of the median of several rounds.

    >>> of("attention_gpu", "zerofn", "ms").value > 0
    True
    """
    return Key(file, path, (), unit)


class Held(NamedTuple):
    """The figure that a benchmark compares with a limit, named by what it measures. `field`: "limit" for the limit."""

    file: str
    what: str
    field: str = "measured"

    @property
    def value(self) -> float:
        """The figure."""
        return next(float(x[self.field]) for x in results(self.file)["must_hold"] if x["what"] == self.what)


class Made(NamedTuple):
    """A figure that a function makes of a whole file."""

    file: str
    make: Callable[[Any], float]

    @property
    def value(self) -> float:
        """The figure."""
        return self.make(results(self.file))


class Worked(NamedTuple):
    """A figure that the project's own code works out, such as the idle time of a schedule. No file has it."""

    make: Callable[[], float]

    @property
    def value(self) -> float:
        """The figure."""
        return self.make()


Figure = Key | Held | Made | Worked
Piece = tuple[str, list[Figure]]


def filled(text: str, pieces: list[Piece]) -> str:
    """Return a page with the figures of the result files. Raises `ValueError` for a piece that is not there once.

    >>> filled("It takes 1 ms.", [("It takes {:.0f} ms", [of("attention_gpu", "zerofn", "ms")])])
    'It takes 90 ms.'
    """
    for piece, keys in pieces:
        old = _only(piece, text)
        new = piece.format(*(key.value for key in keys))
        text = text[: old.start()] + new + text[old.end() :]
    return text


def places(text: str, pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return where on a page the figures of its pieces are, as (start, stop).

    >>> places("It takes 1 ms.", [("It takes {:.0f} ms", [of("attention_gpu", "zerofn", "ms")])])
    [(9, 10)]
    """
    found = (_only(piece, text) for piece, _ in pieces)
    return [x.span(k) for x in found for k in range(1, x.re.groups + 1)]


def _only(piece: str, text: str) -> re.Match[str]:
    """Return where a piece is on the page, with a group for each of its figures."""
    parts = re.split(r"(\{[^}]*\})", piece)
    pattern = "".join(f"({_number(x)})" if x.startswith("{") else re.escape(x) for x in parts)
    if len(found := list(re.finditer(pattern, text))) != 1:
        raise ValueError(f"docs/figures: {piece!r} is {len(found)} times on the page; it must be there once.")
    return found[0]


def _number(gap: str) -> str:
    """Return the pattern of the numbers that a gap such as `{:.2f}` may hold."""
    digits = int(gap[gap.index(".") + 1 : -2])
    return r"-?\d[\d,]*" + (rf"\.\d{{{digits}}}" if digits else "")
