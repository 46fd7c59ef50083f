"""Randomness as a function of a key: `randomness(key)` replaces every random operation inside."""

from .draws import fold_in as fold_in
from .draws import key as key
from .mode import randomness as randomness
