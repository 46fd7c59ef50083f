"""A tensor that lies in pieces of others, read by intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """A tensor whose raveled elements are `parts`, one after the other: flat tensors, which may be mapped files."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parts."""
        return self.parts[0].dtype if self.parts else torch.float32

    def lacking(self) -> int:
        """Return how many elements the parts have too few."""
        return numel(self.shape) - sum(part.numel() for part in self.parts)

    def read(self, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with elements from `start` on, cast to its dtype."""
        done = 0
        for part in self.parts:
            if start < part.numel() and done < into.numel():
                count = min(part.numel() - start, into.numel() - done)
                into[done : done + count].copy_(part[start : start + count])
                done, start = done + count, 0
            else:
                start -= part.numel()
        if done < into.numel():
            raise ValueError(f"{into.numel() - done} elements of a tensor of shape {self.shape} are missing.")


def cut(flats: Sequence[Tensor], start: int, count: int) -> tuple[Tensor, ...]:
    """Return elements [start, start + count) of tensors that follow each other, as views."""
    found, stop = [], start + count
    for flat in flats:
        a, b = max(start, 0), min(stop, flat.numel())
        if a < b:
            found.append(flat[a:b])
        start, stop = start - flat.numel(), stop - flat.numel()
    return tuple(found)


def first(parts: Iterable[Tensor], count: int) -> tuple[Tensor, ...]:
    """Return the first `count` elements: what comes after them is padding."""
    return cut(list(parts), 0, count)


def numel(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
