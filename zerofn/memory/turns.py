"""Turns: the steps of a process run one after the other, and so does what reads or makes a state beside them.

A step writes the new state into the old one's memory, and all steps share their arenas. So a thread that saves waits
for the step of another thread, and steps, captures and saves of several threads take turns. Inside its own turn a
thread may go on to whatever reads; a step inside a step would write to memory that is in use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from .._torch_compat import current_trace, num_dispatch_modes
from ..util.errors import CaptureError
from ..util.process import the

F = TypeVar("F", bound=Callable[..., Any])


class Turns:
    """The process's turns. `step`: the name of the step that runs now, "" if none does, and the `frame` that called it.
    `plain`: the thread that runs plain Python as a part of that step (`plain_python`), 0 if none does.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.step, self.plain = "", 0
        self.frame: FrameType | None = None

    def running(self) -> str:
        """Return the step that runs in this thread, which has the lock. A step whose turn an interrupt has ended
        before it could be given back does not run any more.
        """
        if self.step:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame is not self.frame:
                frame = frame.f_back
            if frame is None:
                self.end()
        return self.step

    def end(self) -> None:
        """Give the turn of a step back."""
        self.step, self.frame = "", None
        self.lock.release()

    def forked(self) -> None:
        """The thread that had the turn is the parent's."""
        self.__init__()  # type: ignore[misc]


class StepTurn:
    """A context: the turn of a step. Raises `RuntimeError` inside a step of the same thread."""

    def __init__(self, name: str) -> None:
        self._name, self._turns = name, the(Turns)

    def __enter__(self) -> None:
        self._turns.lock.acquire()
        if running := self._turns.running():
            self._turns.lock.release()
            raise RuntimeError(_inside(f"the step {self._name}", running))
        self._turns.step, self._turns.frame = self._name, sys._getframe(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._turns.end()


def outside_steps(what: str, *, capturable: bool = False) -> Callable[[F], F]:
    """Wrap a function that reads or makes a state, or meets other ranks: it waits for the step that runs.

    `what`: its name for people. The function raises `CaptureError` while its thread captures a step, unless
    `capturable`, and `RuntimeError` inside a step that its thread runs.
    """

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            if _captures():
                if not capturable:
                    refuse_while_capturing(what)
                return function(*args, **kwargs)
            turns = the(Turns)
            with turns.lock:
                if running := turns.running():
                    raise RuntimeError(_inside(what, running))
                return function(*args, **kwargs)

        return in_turn  # type: ignore[return-value]

    return wrap


def refuse_while_capturing(what: str) -> None:
    """Raise `CaptureError` if this thread captures a step."""
    if _captures():
        raise CaptureError(
            f"{what} is called inside a step that is being captured. Its tensors have no values now, and later steps "
            "would not repeat the call. Call it outside the step, and pass its result in the state or the batch."
        )


def is_inside_step() -> bool:
    """Return whether a compiled step that is called here is part of another one: of one that this thread captures, or
    of what it runs as plain Python.
    """
    return _captures() or the(Turns).plain == threading.get_ident()


def _captures() -> bool:
    return bool(num_dispatch_modes()) and current_trace() is not None  # the first alone is quick


@contextlib.contextmanager
def plain_python() -> Iterator[None]:
    """Inside, a compiled step is its function: an operation of the step that runs calls a function of the user's."""
    turns = the(Turns)
    before, turns.plain = turns.plain, threading.get_ident()
    try:
        yield
    finally:
        turns.plain = before


def _inside(what: str, step: str) -> str:
    return (
        f"{what} was called while the step {step} runs in the same thread, from a signal handler or an eager_region. "
        "The step is writing to the state at this time. Call it after the step."
    )
