"""The options of a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ..schedules.own import as_given
from .backend import Backend

Remat = Literal["full", "auto"]


class Options(NamedTuple):
    """The arguments of `compile`. `memory`: bytes; `machine`: the cost model, or None."""

    donate: bool
    memory: int | None
    remat: str | None
    machine: Any
    backend: Backend
    passes: Callable[[list[Any]], list[Any]] | Sequence[Any] | None
    deterministic: bool
    broadcast_buffers: bool
    watch: Sequence[Any]
    schedule: Any = None

    def checked(self) -> Options:
        """Return these options. Raises for those that are unknown or contradict each other."""
        if self.remat not in (None, *get_args(Remat)):
            raise ValueError(f"compile: remat={self.remat!r} is not known; expected 'full', 'auto' or None.")
        if self.remat is not None and self.memory is not None:
            raise ValueError(
                f"compile(memory={self.memory!r}) chooses which activations are recomputed. Leave remat={self.remat!r} "
                "out."
            )
        edits = callable(self.passes) and not hasattr(self.passes, "scope")  # a single pass can be called, too
        listed = isinstance(self.passes, list | tuple) and all(hasattr(x, "scope") for x in self.passes)
        if self.passes is not None and not edits and not listed:
            raise TypeError(
                f"compile: passes={self.passes!r} must be a list of zerofn.Pass, or a function that takes the list of "
                'passes and returns one, such as zerofn.passes.before("donate", zerofn.Pass(mine)).'
            )
        if isinstance(self.watch, str) or not isinstance(self.watch, Sequence):
            raise TypeError(
                f"compile: watch must be a list, got {self.watch!r}. Write a list, for example "
                "watch=[settings, lambda: len(vocabulary)]."
            )
        return self if self.schedule is None else self._replace(schedule=as_given(self.schedule, "compile"))

    def plain(self) -> Options:
        """Return the options of a step beside the one that is meant: without a budget, passes and a schedule."""
        return self._replace(memory=None, remat=None, passes=None, schedule=None)

    def agreed(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        known = {"machine": self.machine, "deterministic": self.deterministic, "schedule": self.schedule}
        if self.machine is not None:  # whose repr is rounded
            known["machine in full"] = dataclasses.asdict(self.machine)
        return {**known, "broadcast_buffers": self.broadcast_buffers}

    @property
    def edits(self) -> list[Any]:
        """What changes the list of passes: the backend, then the user."""
        found = (getattr(self.backend, "passes", None), self.passes)
        return [x for x in found if x is not None]

    @property
    def search(self) -> dict[str, Any]:
        """What the search for a schedule is told."""
        return {"memory": self.memory, "remat": self.remat}
