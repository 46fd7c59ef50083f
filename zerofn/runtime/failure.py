"""A step is done whole or not at all, and a rank that fails does not leave the others waiting."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ..agreement import publish_failure


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Ctrl-C inside waits for the end: a step that stops halfway has written half of the state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[0])


def abandon(message: str) -> None:
    """Tell the other ranks why this one stops."""
    publish_failure(message)
