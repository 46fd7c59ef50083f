"""Values as keys that only they themselves equal."""

from __future__ import annotations

from typing import Any


class ByIdentity:
    """A value compared by identity, and kept alive so that no other value gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
