"""A step runs completely or not at all."""

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
    """Interrupts that came during a step, until `deliver` runs their handlers."""


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Delay Ctrl-C: a step that stops halfway has written half of the state.

    Raised right at the end of the step, it would leave the caller with a donated state and without the new one. So
    it comes a moment later, or before the next step if that is earlier (`deliver`), when `state, aux = step(...)`
    has been assigned.
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
    """Run the handler of a delayed interrupt, in the main thread."""
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
