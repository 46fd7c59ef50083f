"""A loop's cases inside of a test: `make test` runs some, and whoever runs whole products all of them.

A parametrized test says so with `part`. Cases that a rank runs one after the other, because a group of ranks is what
takes long to make, or because one is compared with the next, say it here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

FEW = "ZEROFN_FEW_CASES"  # set by conftest.py, for this process and those that it starts


def some_of(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases that `make test` keeps, or all of them.

    >>> [stage for stage in some_of(range(4), 0, 3)] in ([0, 3], [0, 1, 2, 3])
    True
    """
    every = list(cases)
    assert all(x in every for x in kept), f"{kept} are not all among {every}"
    return list(kept) if os.environ.get(FEW) else every
