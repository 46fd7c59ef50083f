"""The user's own code, and the names that it reads: of globals, of attributes, of modules."""

from __future__ import annotations

import csv
import dis
import functools
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ..util.user_line import OURS, library_prefixes

_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"), "attribute"),
    "IMPORT_NAME": "module",
}
# Packages may be installed in several places: the environment's, the system's below it, the home folder's, or any
# folder on the path.
_INSTALLED = ("/site-packages/", "/dist-packages/")
# What looks names up by strings: those that stand in a function count as its names.
_OF_OBJECTS = {"getattr", "hasattr", "attrgetter", "methodcaller", "vars", "__dict__", "__getattribute__"}
_OF_MODULES, _OF_GLOBALS = {"modules", "import_module", "__import__"}, {"globals", "eval", "exec"}
BY_STRING = _OF_OBJECTS | _OF_MODULES | _OF_GLOBALS


class Reads(NamedTuple):
    """The names that a code object reads: of globals, of attributes, and of modules that it imports."""

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


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
    """Return what a code object reads, and what the functions and classes read that are defined in it."""
    reads: dict[str, set[str]] = {"global": set(), "attribute": set(), "module": set()}
    for x in dis.get_instructions(code):
        kind = _KINDS.get(x.opname)
        if kind is not None:
            reads[kind].add(str(x.argval).split(" + ")[-1])
        if x.opname == "MATCH_CLASS" or (kind is not None and x.argval in BY_STRING):
            texts = set(_texts(code.co_consts))
            names = {name for text in texts for name in re.findall(r"\w+", text)}
            reads["attribute"] |= names
            reads["module"] |= texts if x.argval in _OF_MODULES else set()
            reads["global"] |= names if x.argval in _OF_GLOBALS else set()
    inner = [reads_of(x) for x in code.co_consts if isinstance(x, CodeType)]
    return Reads(
        frozenset(reads["global"]).union(*(x.globals for x in inner)),
        frozenset(reads["attribute"]).union(*(x.attributes for x in inner)),
        frozenset(reads["module"]).union(*(x.modules for x in inner)),
    )


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    """Yield the constants that may be names of attributes: `getattr(x, "a")`, `case C(a=1)`."""
    for x in constants:
        if isinstance(x, tuple):
            yield from _texts(x)
        elif isinstance(x, str):
            yield x
