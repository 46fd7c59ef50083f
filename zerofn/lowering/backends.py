"""Backends by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..runtime.backend import Backend, Eager
from ..util.errors import nearest
from .auto import Auto
from .cuda_graphs import Graphs
from .inductor import Inductor

BackendWord = Literal["eager", "inductor", "auto", "graphs", "inductor+graphs"]
_NAMED: dict[str, Callable[[], Backend]] = {
    "eager": Eager,
    "inductor": Inductor,
    "auto": Auto,
    "graphs": lambda: Graphs(Eager()),
    "inductor+graphs": lambda: Graphs(Inductor()),
}
_CHOICE = f"write {', '.join(map(repr, _NAMED))}, or pass a Backend"


def backend_of(backend: str | Backend) -> Backend:
    """Return the backend with a name, or `backend` itself if it is one.

    Raises `ValueError` for an unknown name, `TypeError` for a class or an object without `bind`.
    """
    if isinstance(backend, str):
        if backend not in _NAMED:
            meant = "".join(f" Did you mean {word!r}?" for word in nearest(backend.lower(), _NAMED, 1))
            raise ValueError(f"compile: backend={backend!r} is not known; {_CHOICE}.{meant}")
        return _NAMED[backend]()
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise TypeError(
            f"compile: backend={backend!r} is not a backend; {_CHOICE}, an instance with bind(program) -> Runner."
        )
    return backend
