"""Which entries of a batch, beside those that transformers knows, have a value for each token: weights, boxes, tags.

Such an entry, of shape (rows, length, ...), is as long as `input_ids` in every batch. One batch alone may be so by
chance; it takes two lengths to tell.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

import zerofn

_SOURCES = ("input_ids", "attention_mask")


def source_of(inputs: Mapping[str, Any]) -> str:
    """Return the name of the entry that says how long rows are; "" if there is none of shape (rows, length)."""
    return next((x for x in _SOURCES if isinstance(inputs.get(x), Tensor) and inputs[x].dim() == 2), "")


class PerToken:
    """What batches have shown about entries but those that are `known`. The same on all ranks."""

    def __init__(self, known: Set[str]) -> None:
        self._known = known
        self._names: dict[int, str] = {}
        self._seen: dict[int, set[tuple[int, int]]] = {}  # by entry: lengths of input_ids and of the entry
        self._longer: set[int] = set()  # entries that were padded
        self._last: list[int] = []  # entries of the last batch, of any rank

    def entries(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the entries of a batch that may have a value for each token."""
        if not (source := source_of(inputs)):
            return {}
        rows = len(inputs[source])
        return {
            name: x
            for name, x in sorted(inputs.items())
            if isinstance(x, Tensor) and x.dim() > 1 and len(x) == rows and name not in self._known
        }

    def agree(self, inputs: Mapping[str, Any], number: int, kinds: Sequence[int]) -> list[int]:
        """Learn from the batches of all ranks, which have `number` entries at most. Return the ranks' `kinds` with what
        their entries add, but for lengths that padding makes equal. All ranks must call it.
        """
        self._last = []
        if not number:
            return list(kinds)
        rows, found = [], self.entries(inputs)
        for name, x in found.items():
            key, rest = hashed(name), hashed((x.dtype, *x.shape[:1], *x.shape[2:]))
            self._names[key] = name
            rows.append([key, inputs[source_of(inputs)].shape[1], x.shape[1], rest])
        rows += [[0] * 4] * (number - len(rows))
        all_rows = zerofn.collectives.all_gather(torch.tensor([rows], device=device_of(inputs))).tolist()
        for key, length, width, _ in (x for of_rank in all_rows for x in of_rank if x[1]):
            self._seen.setdefault(key, set()).add((length, width))
            self._last.append(key)
        return [
            hashed((kind, *((key, rest, self._more(key) != {0} and width) for key, n, width, rest in of_rank if n)))
            for kind, of_rank in zip(kinds, all_rows, strict=True)
        ]

    def padded(self, inputs: Mapping[str, Any]) -> list[str]:
        """Return the names of the entries that are padded with `input_ids`."""
        return [name for name in self.entries(inputs) if self._is_per_token(hashed(name))]

    def check(self, inputs: Mapping[str, Any] | None = None) -> None:
        """Note that a batch, or the last one of any rank, is padded. Raises `ValueError` if it isn't clear whether an
        entry has a value for each token. On all ranks, or on none.
        """
        for key in self._last if inputs is None else map(hashed, self.entries(inputs)):
            more, lengths, widths = self._more(key), *map(set, zip(*self._seen[key], strict=True))
            name = self._names.get(key, "an entry")
            if self._is_per_token(key):
                self._longer.add(key)
            elif key in self._longer or len(more) == 1 and (more == {0} or len(lengths) > 1):
                raise ValueError(
                    f"Trainer: input_ids is padded, but it is unclear whether {name!r} has one value for each token "
                    f"and needs padding, too: with rows of {_listed(lengths)} tokens, its length was "
                    f"{_listed(widths)}. Write TrainingArguments(pad_to_multiple_of=1) to leave batches as the "
                    "collator makes them, or let the collator pad all batches to one length."
                )

    def _is_per_token(self, key: int) -> bool:
        return self._more(key) == {0} and len(self._seen[key]) > 1

    def _more(self, key: int) -> set[int]:
        """Return by how much an entry was longer than input_ids."""
        return {width - length for length, width in self._seen.get(key, ())}


def device_of(inputs: Mapping[str, Any]) -> torch.device | None:
    """Return where a batch lies."""
    return next((x.device for x in inputs.values() if isinstance(x, Tensor)), None)


def hashed(x: Any) -> int:
    """Return a number of what a value shows, the same on all ranks."""
    return zlib.crc32(repr(x).encode())


def _listed(numbers: Set[int]) -> str:
    *some, last = map(str, sorted(numbers))
    return f"{', '.join(some)} and {last}" if some else last
