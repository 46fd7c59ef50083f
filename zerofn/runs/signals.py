"""The process's handlers of the signals on which runs stop, and what was there before them.

Several runs may listen to one signal, other libraries set handlers of their own before and after, and processes are
forked. So a signal has one handler, however many runs listen. What none of them listens for it passes on to the handler
before it, also where another library has kept this one and calls it, or puts it back, when no run listens any more.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet


class Listener(Protocol):
    """Whoever is told of a first signal."""

    def hear(self, number: signal.Signals) -> None:
        """A signal came, in the middle of anything that the main thread does."""


class Handlers:
    """The handlers. A listener hears one signal; the next does what it did before. One that is gone hears none."""

    def __init__(self) -> None:
        self._listeners: dict[signal.Signals, WeakSet[Listener]] = {}
        self._set: dict[signal.Signals, _Handler] = {}
        self._unanswered: signal.Signals | None = None

    def listen(self, listener: Listener, signals: Iterable[signal.Signals]) -> None:
        """Tell a listener of these signals, and at once of one that nobody has answered.

        Raises `ValueError` outside of the main thread, where handlers cannot be set.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "zerofn.Checkpoints: Python handles signals in the main thread only. Call restore_or in the main "
                "thread, or pass signals=()."
            )
        for number in signals:
            if number not in self._set or self._is_replaced(number):
                self._set[number] = handler = _Handler(self, signal.getsignal(number))
                signal.signal(number, handler)
            self._listeners.setdefault(number, WeakSet()).add(listener)
        if self._unanswered is not None:
            unanswered, self._unanswered = self._unanswered, None
            self.tell(unanswered, [listener])

    def leave_to_next(self, number: signal.Signals) -> None:
        """Tell the next one that listens of a signal that came before."""
        self._unanswered = number

    def leave(self, listener: Listener) -> None:
        """Tell a listener no more."""
        for listeners in self._listeners.values():
            listeners.discard(listener)
        self._put_back()

    def tell(self, number: signal.Signals, listeners: Iterable[Listener] | None = None) -> bool:
        """Tell those who listen to a signal, or `listeners`, and return whether there were any."""
        heard = list(self._listeners.get(number, ()) if listeners is None else listeners)
        for listener in heard:
            for each in self._listeners.values():
                each.discard(listener)
        self._put_back()  # a second signal may come while the system's own code runs, where no handler of Python's does
        for listener in heard:
            listener.hear(number)
        return bool(heard)

    def replaced_for(self, listener: Listener) -> list[signal.Signals]:
        """Return the signals to which it listens and for which somebody else has set a handler since."""
        return [n for n, each in self._listeners.items() if listener in each and self._is_replaced(n)]

    def forked(self) -> None:
        """No run of the parent's is this process's: a signal ends it, as one that ends workers must."""
        self._listeners.clear()
        self._put_back()

    def _is_replaced(self, number: signal.Signals) -> bool:
        return signal.getsignal(number) is not self._set[number]

    def _put_back(self) -> None:
        """Where nobody listens any more, set the handler from before, unless somebody else has set one since."""
        for number in [n for n in self._set if not self._listeners.get(n) and not self._is_replaced(n)]:
            with contextlib.suppress(ValueError):  # another thread's; then the handler passes on what comes
                before = self._set[number].before
                signal.signal(number, signal.SIG_DFL if before is None else before)
                del self._set[number]


class _Handler:
    """A handler, and the one `before` it: a function, SIG_DFL, SIG_IGN, or None for one that Python does not know."""

    def __init__(self, handlers: Handlers, before: Any) -> None:
        self._handlers, self.before = handlers, before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._handlers.tell(signal.Signals(number)):
            return
        if callable(self.before):
            self.before(number, frame)
        elif self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
