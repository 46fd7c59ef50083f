"""Refuse draws from the host's generators during capture: they would be constants of the graph."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


class HostDraw(RuntimeError):
    """The step drew from a generator of the host; the message names it."""


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """Raise `HostDraw` if Python's or NumPy's global generator has advanced inside."""
    before = _generators()
    yield
    for name, state in _generators().items():
        if state != before[name]:
            raise HostDraw(name)


def _generators() -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)
    values = (*numpy["state"].values(), numpy["has_gauss"], numpy["gauss"])
    return {
        "Python's random": random.getstate(),
        "numpy.random": [x.tobytes() if isinstance(x, np.ndarray) else x for x in values],
    }
