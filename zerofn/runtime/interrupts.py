"""Ctrl-C during a step is delayed until the caller has the new state."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..util.process import the

SOON = 0.05  # seconds: long enough to return to the caller and assign the result, too short to notice


class HeldInterrupts(list[Callable[[], Any]]):
    """The handlers of interrupts that came during a step and were not run yet."""


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Delay Ctrl-C while the block runs: a step that stops halfway would leave half of the state written.

    An interrupt at the end of the block would still come before the caller assigns `state, aux = step(...)`, whose
    old state is donated. So it comes `SOON` after the block, or at the next `deliver`, whichever is first.
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
        if caught and before is not signal.SIG_IGN:
            number, frame = caught[0]
            # A handler that is not a function is the system's own, which ends the process.
            call = partial(before, number, frame) if callable(before) else partial(os.kill, os.getpid(), number)
            the(HeldInterrupts).append(call)
            timer = threading.Timer(SOON, _interrupt)
            timer.daemon = True
            timer.start()


def deliver() -> None:
    """Run the handler of a delayed interrupt, if there is one and this is the main thread."""
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
