"""Amounts of memory, rates and times, as numbers and in words."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    **{f"{x}b": 1000**k for k, x in enumerate(("", "k", "m", "g", "t"))},
    **{f"{x}ib": 1024**k for k, x in enumerate(("", "k", "m", "g", "t")) if x},
}


def num_bytes(given: int | str, caller: str) -> int:
    """Bytes, of a number of them or of a string such as "24GiB" or "500 MB".

    Raises `ValueError`/`TypeError` for anything else. `caller`: the function whose argument `memory` it is.

    >>> num_bytes("1.5KiB", "plan"), num_bytes("2 GB", "plan")
    (1536, 2000000000)
    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"{caller}: memory={given!r} must be a whole number of bytes above 0, or a string such as '24GiB'."
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", given)
    if not found or found[2].lower() not in _UNITS or not float(found[1]):
        raise ValueError(
            f"{caller}: memory={given!r} is not an amount of memory. Write '24GiB' (1024^3 bytes), '24GB' (1000^3), or "
            "a number of bytes."
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])


def in_words(amount: float, unit: str = "B") -> str:
    """Three digits of an amount, by default of bytes.

    >>> in_words(1536), in_words(2.5e10), in_words(4e14, "FLOP/s")
    ('1.54 kB', '25 GB', '400 TFLOP/s')
    """
    prefixes = ("", "k", "M", "G", "T", "P")
    k = 0
    while abs(amount) >= 1000 and k + 1 < len(prefixes):
        amount, k = amount / 1000, k + 1
    return f"{amount:.3g} {prefixes[k]}{unit}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things. `plural`: of nouns to which it is not enough to add an s.

    >>> counted(1, "rank"), counted(2, "rank"), counted(3, "leaf", "leaves")
    ('1 rank', '2 ranks', '3 leaves')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def time_in_words(seconds: float) -> str:
    """Three digits of a time.

    >>> time_in_words(0.0836), time_in_words(1.889)
    ('83.6 ms', '1.89 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


PAGE = 4096  # bytes: where direct transfers begin and end, in memory and on the drive


def pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold `nbytes`: what a region of that many takes of a store.

    >>> pages(1), pages(4096), pages(4097)
    (4096, 4096, 8192)
    """
    return -(-nbytes // PAGE) * PAGE
