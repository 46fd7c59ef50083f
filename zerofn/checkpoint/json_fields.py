"""What the JSON of others says, field by field: every value has a type and a range before anything is done with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = (1 << 63) - 1  # torch's sizes are of 64 bits
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has none: see `as_number`


class Field:
    """A value of a JSON document, and where it is there. Its methods raise `ValueError`, which says what was expected.

    >>> Field({"sizes": [3, -1]})["sizes"].each()[1].count()
    Traceback (most recent call last):
    ValueError: sizes[1]: expected a whole number of 0 or more, got -1
    """

    __slots__ = ("_at", "_value")

    def __init__(self, value: Any, at: str = "") -> None:
        self._value, self._at = value, at

    def __getitem__(self, name: str) -> Field:
        """A field of an object. Raises `ValueError` if it is not there."""
        if name not in self.object():
            raise ValueError(f"{self._at or 'the JSON object'} has no {name!r}")
        return Field(self._value[name], f"{self._at}.{name}" if self._at else name)

    def get(self, name: str, default: Any) -> Field:
        """A field of an object; one with the default if it is not there."""
        return self[name] if name in self.object() else Field(default, name)

    def object(self) -> Mapping[str, Any]:
        """An object, as it is."""
        return self._of(dict, "an object")

    def items(self) -> Iterable[tuple[str, Field]]:
        """The fields of an object."""
        return [(name, self[name]) for name in self.object()]

    def each(self) -> list[Field]:
        """The fields of a list."""
        return [Field(x, f"{self._at}[{k}]") for k, x in enumerate(self._of(list, "a list"))]

    def several(self, number: int) -> list[Field]:
        """The fields of a list of this length."""
        found = self.each()
        if len(found) != number:
            raise self._error(f"a list of {number}")
        return found

    def is_null(self) -> bool:
        """Whether it is JSON's null."""
        return self._value is None

    def text(self) -> str:
        """A text."""
        return self._of(str, "a string")

    def flag(self) -> bool:
        """True or false."""
        return self._of(bool, "true or false")

    def count(self, least: int = 0, most: int = _MOST) -> int:
        """A whole number in a range."""
        if type(self._value) is not int or not least <= self._value <= most:
            upper = "" if most == _MOST else f", and {most} at most"
            raise self._error(f"a whole number of {least} or more{upper}")
        return self._value

    def number(self) -> float:
        """A number, or what `as_number` has made of one."""
        value = _NUMBERS.get(self._value, self._value) if isinstance(self._value, str) else self._value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error("a number")
        return value

    def word(self, known: Mapping[str, T]) -> T:
        """What one of the known words stands for."""
        if not isinstance(self._value, str) or self._value not in known:
            raise self._error(f"one of {', '.join(known)}")
        return known[self._value]

    def _of(self, kind: type[T], words: str) -> T:
        if not isinstance(self._value, kind):
            raise self._error(words)
        return self._value

    def _error(self, expected: str) -> ValueError:
        got = repr(self._value)
        got = got if len(got) <= 80 else f"{got[:77]}..."
        return ValueError(f"{self._at or 'the JSON text'}: expected {expected}, got {got}")


def as_number(value: Any) -> Any:
    """Return a value as JSON has it: it has no NaN and no infinities, which are texts, as in protobuf's JSON.

    >>> as_number(float("nan")), as_number(-float("inf")), as_number(0.5)
    ('NaN', '-Infinity', 0.5)
    """
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
