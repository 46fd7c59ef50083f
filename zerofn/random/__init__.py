"""Randomness as a function of a key: `randomness(key)` replaces every random operation inside."""

from .draws import fold_in, key
from .mode import randomness

__all__ = ["fold_in", "key", "randomness"]


def __dir__() -> list[str]:
    return list(__all__)
