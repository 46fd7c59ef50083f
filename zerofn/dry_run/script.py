"""Run a script up to its first training step, to see what it would train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from .. import tree
from ..util.context import inside

NUM_RANKS = 8  # planned for, where nobody says how many

_current: ContextVar[DryRun | None] = ContextVar("dry_run", default=None)


class DryRun:
    """The dry run of a script.

    `zerofn.shard` records its arguments and makes a state without memory. The first call of the compiled step named
    `name`, or without a name the first one with such a state, ends the script. Other compiled functions return
    ones. `num_ranks`, `mesh`: what is planned for, sizes by axis; by default what the script itself makes, whose -1
    is what is left of 8 ranks.
    """

    def __init__(self, name: str = "", num_ranks: int | None = None, mesh: Mapping[str, int] | None = None) -> None:
        self.name, self._num_ranks, self._mesh = name, num_ranks, mesh
        self._sharded: list[tuple[Any, Any, dict[str, Any]]] = []
        self._passed: list[Callable[..., Any]] = []  # other functions that were called

    def __call__(self) -> contextlib.AbstractContextManager[DryRun]:
        """Inside, scripts run dry."""
        return inside(_current, self)

    def grid(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], int | None]:
        """Return the sizes of the mesh that a script gets where it asks for one of `sizes`, and the number of ranks.

        Axes that it asks for are there, of size 1 if the planned mesh has none of that name.
        """
        wanted = dict(sizes)
        if self._mesh is not None:
            wanted = {**self._mesh, **dict.fromkeys(sizes.keys() - self._mesh.keys(), 1)}
        return wanted, self._num_ranks or (NUM_RANKS if -1 in wanted.values() else None)

    def shards(self, state: Any, init: Any, options: dict[str, Any]) -> None:
        """Record a state without memory, and the arguments of `zerofn.shard`."""
        self._sharded.append((state, init, options))

    def come_to(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        """Raise `Reached` at the step that the dry run looks for."""
        same = [x for x in self._sharded if x[0] is state or _in_one_memory(x[0], state)]
        if self.name == getattr(step, "__name__", "") or not self.name and same:
            raise Reached(step, batch, *(same or self._alike(state))[-1][1:])
        if self._passed.count(step) and same:
            names = ", ".join(sorted({repr(getattr(x, "__name__", x)) for x in self._passed}))
            raise ValueError(f"the script calls no compiled step {self.name!r}; it calls {names}.")
        self._passed.append(step)

    def _alike(self, state: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
        """Return the recorded states with the structure of this one; the only recorded one if none matches."""
        if not self._sharded:
            raise ValueError("the script calls its step without zerofn.shard(init_state) before.")
        alike = [x for x in self._sharded if tree.structure(x[0]) == tree.structure(state)]
        if not alike and len(self._sharded) > 1:
            raise ValueError(
                f"the script calls its step with a state whose structure differs from all {len(self._sharded)} states "
                "that zerofn.shard made. Pass the step a state that zerofn.shard returned."
            )
        return alike or self._sharded


def _in_one_memory(a: Any, b: Any) -> bool:
    """Return whether two states have one structure, and the first tensor: one was made of the other."""
    return tree.structure(a) == tree.structure(b) and _first_tensor(a) is _first_tensor(b)


def _first_tensor(state: Any) -> Any:
    for x in tree.leaves(state, is_leaf=lambda x: hasattr(x, "stored")):
        for shard in getattr(x, "stored", ()):
            return next(iter(shard.tensors), None)
    return state


class Reached(BaseException):
    """The dry run has reached the step: `step` and its `batch`, and the arguments of `shard`."""

    def __init__(self, step: Callable[..., Any], batch: Any, init: Any, options: dict[str, Any]) -> None:
        super().__init__("the dry run has reached its step")
        self.step, self.batch, self.init, self.options = step, batch, init, options


def current_dry_run() -> DryRun | None:
    """Return the dry run in progress, or None."""
    return _current.get()
