"""A loop over microbatches that is one node of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# body(index, slices) -> (terms of the sums, rows to stack, static), the same static in every round
Body = Callable[[Tensor, list[Tensor]], tuple[list[Tensor], list[Any], Any]]


def loop(body: Body, n: int, sequences: list[Tensor]) -> tuple[list[Tensor], list[Any], Any]:
    """Run `body` for each of `n` rows of `sequences`: (sums over rounds, stacks over rounds, static).

    Sums start from the first round's terms, which later rounds are added to in place.
    """
    sums: list[Tensor] = []
    rows: list[list[Any]] = []
    static: Any = None
    for i in range(n):
        terms, row, static = body(torch.tensor(i), [s[i] for s in sequences])
        rows.append(row)
        if not sums:
            sums = [t.clone() for t in terms]
        else:
            for total, term in zip(sums, terms, strict=True):
                total.add_(term)
    stacked = [torch.stack(column) if isinstance(column[0], Tensor) else list(column)
               for column in zip(*rows, strict=True)]
    return sums, stacked, static
