"""What a step draws from the host while it is captured would be a constant of its graph."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


class HostDraw(RuntimeError):
    """A generator of the host was drawn from; the message names it."""


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """Raise `HostDraw` if Python's or NumPy's global generator has moved at the end."""
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
