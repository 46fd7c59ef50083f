"""A step is done whole or not at all."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..util.process import the

SOON = 0.05  # seconds


class HeldInterrupts(list[Callable[[], Any]]):
    """What interrupts that came during a step ask for, until `deliver` does it."""


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Ctrl-C inside waits: a step that stops halfway has written half of the state.

    Raised at once at the end, it would leave the caller without the new state while the old one is given away. So it
    comes a moment later, or before the next step, whichever is first (`deliver`), when `state, aux = step(...)` holds.
    """
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
            number, frame = caught[0]
            the(HeldInterrupts).append(lambda: before(number, frame))
            timer = threading.Timer(SOON, _interrupt)
            timer.daemon = True
            timer.start()


def deliver() -> None:
    """Do what an interrupt that was held back asks for, in the main thread."""
    held = the(HeldInterrupts)
    if held and threading.current_thread() is threading.main_thread():
        interrupt = held.pop()
        held.clear()
        interrupt()


def _interrupt() -> None:
    held = the(HeldInterrupts)
    if held:
        held.clear()
        _thread.interrupt_main()
