"""A place in a store: its blocks, and the requests that are under way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Request(Protocol):
    """A read or a write under way."""

    writes: bool


@dataclass
class Block:
    """Bytes [start, start + nbytes) of a region: at `offset` in the file of one drive."""

    drive: int
    offset: int
    start: int
    nbytes: int
    check: int | None = None  # None: never written


class Region:
    """A place for `nbytes` in a `store`, on all its drives; zeros until it is written. From `Store.allocate`."""

    def __init__(self, store: Any, label: str, nbytes: int, blocks: list[Block]) -> None:
        self.store, self.label, self.nbytes, self.blocks = store, label, nbytes, blocks
        self._under_way: list[Any] = []  # in the order of calls

    def line_up(self, request: Request) -> list[Any]:
        """Take a request in; those that it has to wait for: of two on one region, one of them a write."""
        before = [earlier for earlier in self._under_way if earlier.writes or request.writes]
        self._under_way.append(request)
        return before

    def forget(self, request: Request) -> None:
        """A request is done."""
        self._under_way.remove(request)

    def __repr__(self) -> str:
        return f"Region({self.label!r}, {self.nbytes:,} bytes)"
