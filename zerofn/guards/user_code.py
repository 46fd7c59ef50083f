"""The user's own code, and the names that it reads: of globals, of attributes, of modules."""

from __future__ import annotations

import dis
import functools
import operator
import re
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ..util.arguments import unchecked as unchecked
from ..util.user_line import OURS
from ..util.user_line import is_users as is_users

_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"), "attribute"),
    "IMPORT_NAME": "module",
}
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


def may_change(value: Any) -> bool:
    """Whether a library's object may hold something else later: an `itemgetter` or a private one of ZeroFn's may not.

    ZeroFn's optimizers hold private objects, of which a user can change nothing.
    """
    kind = type(value)
    private = kind.__name__.startswith("_") and _file_of(kind.__module__).startswith(OURS)
    return not private and kind is not operator.itemgetter


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
