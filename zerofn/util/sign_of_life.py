"""A line on a terminal that says what a long call does, and for how many seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from .context import inside

SOON = 2.0  # seconds until a call is long
_AGAIN = 0.5

_current: ContextVar[_Line | None] = ContextVar("sign_of_life", default=None)


class _Line:
    """The text of the line, and what is on the screen of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._over, self._began, self._stream = threading.Event(), time.monotonic(), sys.stderr
        self._thread = threading.Thread(target=self._show, name="zerofn-sign-of-life", daemon=True)
        self._thread.start()

    def _show(self) -> None:
        pause, width = SOON, 0
        while not self._over.wait(pause):
            text = f"{self.text}: {time.monotonic() - self._began:.0f} s"
            pause, width = _AGAIN, max(width, len(text))
            self._stream.write(f"\r{text.ljust(width)}")
            self._stream.flush()
        if width:
            self._stream.write(f"\r{' ' * width}\r")
            self._stream.flush()

    def end(self) -> None:
        """Clear the line."""
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def sign_of_life(text: str) -> Iterator[None]:
    """Show `text` and the seconds so far while the body runs, if standard error is a terminal, on rank 0.

    The line comes after `SOON` seconds, and is cleared at the end. Inside another sign of life, only the text changes.
    """
    outer = _current.get()
    if outer is not None:
        before, outer.text = outer.text, text
        try:
            yield
        finally:
            outer.text = before
        return
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    line = _Line(text)
    try:
        with inside(_current, line):
            yield
    finally:
        line.end()


def doing(text: str) -> None:
    """Change the text of the sign of life, if there is one."""
    line = _current.get()
    if line is not None:
        line.text = text
