"""Names that do not exist, answered with those that were meant: of packages and of objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from .errors import nearest


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


def _missing(owner: str, name: str, known: Iterable[str], before: str) -> AttributeError:
    """Return the error. `before`: what stands before a name. `obj` is None so that Python adds no hint of its own."""
    near = [] if name.startswith("_") else nearest(name, known, 1)
    hint = f". Did you mean {before}{near[0]}?" if near else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name, obj=None)
