"""Which frame of a call stack is the user's: the innermost that is neither a library's nor ours."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OURS = f"{Path(__file__).parent.parent}/"
# torch calls the user's functions through these; what was generated has names in angle brackets.
_THROUGH = ("torch", "optree", "tensordict")
_GENERATED = ("<frozen", "<eval_with_key", "<zerofn", "<string>", "<__")


class Line(NamedTuple):
    """A line of code, and the function it is in."""

    file: str
    number: int
    function: str


@functools.cache
def _folders(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in modules)


def library_prefixes() -> tuple[str, ...]:
    """What the file names of libraries' frames begin with."""
    return (*_folders(tuple(name for name in _THROUGH if name in sys.modules)), *_GENERATED)


def frames(frame: FrameType | None) -> Iterator[Line]:
    """A frame and those that called it, innermost first."""
    while frame is not None:
        yield Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def user_line() -> Line | None:
    """Where the user's code is now; None where all frames are libraries' or ours."""
    skipped = (OURS, *library_prefixes())
    return next((x for x in frames(sys._getframe(1)) if not x.file.startswith(skipped)), None)


def user_place() -> str:
    """'file:line' of `user_line`."""
    line = user_line()
    return "a line that is not the user's" if line is None else f"{line.file}:{line.number}"
