"""A part of a store: its blocks, and the requests under way on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Pending(Protocol):
    """A read or write under way."""

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
    """`nbytes` in a `store`, spread over all its drives; zeros until it is written. Made by `Store.allocate`."""

    def __init__(self, store: Any, label: str, nbytes: int, blocks: list[Block]) -> None:
        self.store, self.label, self.nbytes, self.blocks = store, label, nbytes, blocks
        self._under_way: list[Any] = []  # in the order of calls

    def line_up(self, request: Pending) -> list[Any]:
        """Queue a request, and return those that it must wait for: of two requests on one region, one is a write."""
        before = [earlier for earlier in self._under_way if earlier.writes or request.writes]
        self._under_way.append(request)
        return before

    def forget(self, request: Pending) -> None:
        """Remove a request that is done."""
        self._under_way.remove(request)

    def __repr__(self) -> str:
        return f"Region({self.label!r}, {self.nbytes:,} bytes)"
