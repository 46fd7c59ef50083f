"""Refuse draws from Python's and NumPy's generators during capture: they would be constants of the graph."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


class HostDraw(RuntimeError):
    """The step drew from one of these generators; the message is the generator's name."""


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """Raise `HostDraw` at the end if the code inside advanced Python's or NumPy's global generator."""
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
