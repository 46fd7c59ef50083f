"""Find the user's frame in a call stack: the innermost that belongs to no library."""

from __future__ import annotations

import csv
import functools
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OURS = f"{Path(__file__).parent.parent}/"
# Users call these, and torch calls the user's functions through them. Generated code has file names in angle brackets.
_THROUGH = ("torch", "numpy", "optree", "tensordict")
_GENERATED = ("<frozen", "<eval_with_key", "<zerofn", "<string>", "<__")

# Packages may be installed in several places: the environment's, the system's below it, the home folder's, or any
# folder on the path.
_INSTALLED = ("/site-packages/", "/dist-packages/")

_CELL = re.compile(r".*/ipykernel_\d+/\d+\.py|<ipython-input-.*>")
_MOST_OF_LINE = 100  # characters of it in a message


class CodeLine(NamedTuple):
    """A line of code, and its function."""

    file: str
    number: int
    function: str


@functools.cache
def _folders(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in modules)


def library_prefixes() -> tuple[str, ...]:
    """Return the path prefixes of libraries' files."""
    return (*_folders(tuple(name for name in _THROUGH if name in sys.modules)), *_GENERATED)


@functools.cache
def of_python(file: str) -> bool:
    """Whether a file is of Python's own library."""
    import sysconfig  # not with `import zerofn`, which brings nothing that torch has not brought

    folder = f"{sysconfig.get_paths()['stdlib']}/"
    return file.startswith(folder) and not file.startswith((f"{folder}site-packages/", f"{folder}dist-packages/"))


@functools.cache
def _libraries() -> tuple[str, ...]:
    import sysconfig

    paths = sysconfig.get_paths()
    folders = {f"{paths[name]}/" for name in ("stdlib", "platstdlib") if paths.get(name)}
    return (OURS, *sorted(folders), "<frozen", "<eval_with_key", "<zerofn", "<__")


@functools.cache
def is_users(file: str) -> bool:
    """Whether code of this file is the user's: neither the standard library's, an installed package's nor ours."""
    prefixes = tuple(x for x in library_prefixes() if x != "<string>")
    if file.startswith((*_libraries(), *prefixes)) or any(folder in file for folder in _INSTALLED):
        return False
    folders = (x.rstrip("/") for x in sys.path if x and file.startswith(f"{x.rstrip('/')}/"))
    return not any(file[len(x) + 1 :].partition("/")[0] in _installed_in(x) for x in folders)


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """The packages and modules that `pip install --target` put into a folder: what its records list."""
    found = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with record.open(newline="", encoding="utf-8", errors="replace") as lines:
            found |= {row[0].partition("/")[0] for row in csv.reader(lines) if row}
    return frozenset(found)


def place(file: str, number: int) -> str:
    """Return 'file:line', or the line of a notebook's cell: the names of their files say nothing.

    >>> place("train.py", 3), place("/tmp/ipykernel_4228/2221559953.py", 3)
    ('train.py:3', 'line 3 of the cell')
    """
    return f"line {number} of the cell" if _CELL.fullmatch(file) else f"{file}:{number}"


def at_line(file: str, number: int) -> str:
    """Return ' at file:line (code)', of a long line the begin."""
    code = linecache.getline(file, number).strip()
    return f" at {place(file, number)} ({code if len(code) <= _MOST_OF_LINE else f'{code[: _MOST_OF_LINE - 3]}...'})"


def frames(frame: FrameType | None) -> Iterator[CodeLine]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def user_line(frame: FrameType | None = None) -> CodeLine | None:
    """Return the user's line among those of a frame, or this one, and its callers; None if all are of libraries."""
    skipped = (OURS, *library_prefixes())
    return next((x for x in frames(frame or sys._getframe(1)) if not x.file.startswith(skipped)), None)


def user_place() -> str:
    """Return 'file:line' of `user_line`."""
    line = user_line()
    return "a line that is not the user's" if line is None else place(line.file, line.number)
