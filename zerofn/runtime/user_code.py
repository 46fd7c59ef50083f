"""The user's own code, and the names that it reads: globals, closure cells, arguments, and attributes of these."""

from __future__ import annotations

import csv
import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ..util.user_line import OURS, library_prefixes

_SKIPPED = {"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "RESUME", "NOP", "NOT_TAKEN", "COPY", "DUP_TOP"}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_FREE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
# Packages may be installed in several places: the environment's, the system's below it, the home folder's, or any
# folder on the path.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_BY_STRING = {"getattr", "hasattr", "attrgetter", "methodcaller", "vars", "__dict__"}


class Read(NamedTuple):
    """A value that a function reads: `name.attributes[0].attributes[1]`...

    `kind`: "global", "free" (a closure cell), "local" or "module" (one imported inside the function). `stays`: the
    value only has an attribute set, so nothing else of it is read.
    """

    kind: str
    name: str
    attributes: tuple[str, ...] = ()
    stays: bool = False


class Reads(NamedTuple):
    """What a code object reads. `names`: every attribute name in it. `asks_super`: whether it calls `super()`."""

    reads: tuple[Read, ...]
    names: frozenset[str]
    asks_super: bool


@functools.cache
def _libraries() -> tuple[str, ...]:
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


@functools.cache
def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or "<interactive>"


def of_user(kind: Any) -> bool:
    """Whether a class or a Python module is the user's."""
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    if name == "__main__":
        return True
    if name in sys.builtin_module_names or name in ("builtins", "typing"):
        return False
    return is_users(_file_of(name))


@functools.lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """Return what a code object reads, without the functions that are defined in it."""
    steps = [x for x in dis.get_instructions(code) if x.opname not in _SKIPPED]
    names = {str(x.argval).split(" + ")[-1] for x in steps if x.opname in _ATTRIBUTE}
    read = {x.argval for x in steps if x.opname in _GLOBAL} | names
    if read & _BY_STRING:
        names |= {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    found = dict.fromkeys(_reads(code, steps))
    return Reads(tuple(found), frozenset(names), "super" in read)


def _reads(code: CodeType, steps: list[dis.Instruction]) -> Iterator[Read]:
    cells = {*code.co_cellvars, *code.co_freevars}
    imported = ""
    for k, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            imported = str(step.argval)
            yield Read("module", imported, stays=True)
        elif step.opname == "IMPORT_FROM":
            yield Read("module", imported, (str(step.argval),))
        elif step.opname in _GLOBAL:
            yield _followed("global", str(step.argval), steps, k)
        elif step.opname in _FREE:
            yield _followed("free", str(step.argval), steps, k)
        elif step.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")):
            several = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if not step.opname.startswith("STORE") and len(several) > 1 and several[0] not in cells:
                yield Read("local", str(several[0]))
            if several[-1] not in cells:  # else a cell is handed to a function that is defined here
                yield _followed("local", str(several[-1]), steps, k)


def _followed(kind: str, name: str, steps: list[dis.Instruction], k: int) -> Read:
    attributes: list[str] = []
    while (k := k + 1) < len(steps) and steps[k].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        attributes.append(str(steps[k].argval).split(" + ")[-1])
    stays = not attributes and k < len(steps) and steps[k].opname == "STORE_ATTR"
    return Read(kind, name, tuple(attributes), stays)
