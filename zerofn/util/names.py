"""Names that do not exist, answered with those that were meant: of packages and of objects."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any, NoReturn

from .errors import nearest

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def of_package(package: str, public: Collection[str]) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package with these public names.

    Both belong under `if not TYPE_CHECKING`: type checkers take every name of a module that has a `__getattr__`.

    >>> missing, _ = of_package("zerofn.optim", ["adam", "adamw"])
    >>> missing("AdamW")
    Traceback (most recent call last):
    AttributeError: module 'zerofn.optim' has no attribute 'AdamW'. Did you mean optim.adamw?
    """
    short = package.removeprefix("zerofn.")

    def missing(name: str) -> NoReturn:
        if _is_imported(sys._getframe(1)) and f"{package}.{name}" not in sys.modules:  # which Python takes next
            raise ImportError(f"cannot import name {name!r} from {package!r}{_hint(name, public, '')}", name=package)
        raise _missing(f"module {package!r}", name, public, f"{short}.")

    return missing, lambda: list(public)


def attribute_of(instance: Any, name: str) -> Any:
    """Raise `AttributeError` with the attribute that was meant: a `__getattr__`, under `if not TYPE_CHECKING`.

    >>> class State:
    ...     __getattr__ = attribute_of
    ...     def apply_gradients(self): ...
    >>> State().apply_gradient
    Traceback (most recent call last):
    AttributeError: 'State' object has no attribute 'apply_gradient'. Did you mean .apply_gradients?
    """
    kind = type(instance)
    if hasattr(kind, name):
        return object.__getattribute__(instance, name)  # a property that raised AttributeError raises it once more
    known = () if name.startswith("_") else [x for x in dir(instance) if not x.startswith("_")]
    raise _missing(f"{kind.__name__!r} object", name, known, ".")


def _is_imported(caller: FrameType | None) -> bool:
    """Whether a frame, or the one around it where a package has a `__getattr__` of its own, runs `from package import
    name`: Python would replace an `AttributeError` by its own words.
    """
    frames = [caller, caller and caller.f_back]
    return any(x is not None and x.f_code.co_code[x.f_lasti] == _IMPORT_FROM for x in frames)


def _hint(name: str, known: Iterable[str], before: str) -> str:
    """Return a sentence with the name that was meant, or nothing. `before`: what stands before a name."""
    near = [] if name.startswith("_") else nearest(name, known, 1)
    return f". Did you mean {before}{near[0]}?" if near else ""


def _missing(owner: str, name: str, known: Iterable[str], before: str) -> AttributeError:
    """Return the error, whose `obj` is None so that Python adds no hint of its own."""
    return AttributeError(f"{owner} has no attribute {name!r}{_hint(name, known, before)}", name=name, obj=None)
