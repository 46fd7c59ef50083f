"""Parameters that get no gradient in a captured step. torch's optimizers leave such a parameter alone; here, as in JAX,
its gradient is zero, and weight decay and old moments still move it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

from ..util.context import inside

_seen: ContextVar[dict[str, bool] | None] = ContextVar("gradients", default=None)


def noted_gradients() -> contextlib.AbstractContextManager[dict[str, bool]]:
    """Inside, `note_gradients` adds to the dict: name of a parameter -> whether a loss uses it."""
    return inside(_seen, {})


def note_gradients(pairs: Callable[[], Iterable[tuple[str, bool]]]) -> None:
    """Note which parameters one loss uses, during a capture."""
    seen = _seen.get()
    if seen is not None:
        for name, used in pairs():
            seen[name] = used or seen.get(name, False)


def unused(seen: dict[str, bool]) -> list[str]:
    """Return the parameters that no loss uses. One under a prefix that another loss leaves out, as those of a part of
    the parameters do, counts as used.

    >>> unused({"gen.w": False, "gen.b": False, "w": True, "disc.w": True})
    ['gen.b']
    """
    parts = {name for name, used in seen.items() if used}
    return [name for name, used in seen.items() if not used and not parts.intersection(_ends(name))]


def _ends(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]
