"""Patterns of a batch's rows: which tokens of a row are one document, and which are padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch_compat import is_functorch_tensor, plain_dispatch
from ..util.arguments import checked
from .patterns import Pattern, Sizes, Tiles, statuses


@dataclass(frozen=True, eq=False)
class Documents(Pattern):
    """The keys of a query's own document. `ends` int [documents + 1] or [rows, documents + 1]."""

    ends: Tensor

    def check_end(self, num: int) -> None:
        """Raise `ValueError` unless documents end in a row of `num` tokens, if it is known where they do."""
        if not _is_known(self.ends):
            return
        with plain_dispatch():
            last = int(self.ends[..., -1].max())
        if last > num:
            raise ValueError(f"sparse.documents: the last document ends at {last}, but a row has only {num} tokens.")

    def spans(self, num: int) -> Tensor:
        """Return each query's first key and the one behind its last, int32 [rows or 1, num, 2].

        Of a row whose ends turn out in a step to be none, both are -1, for which attention raises.
        """
        ends = self.ends if self.ends.dim() == 2 else self.ends[None]
        at = torch.arange(num, device=ends.device, dtype=ends.dtype).expand(len(ends), num).contiguous()
        number = torch.searchsorted(ends.contiguous(), at, right=True)  # of the end behind
        outside = (number == 0) | (number == ends.shape[1])
        first = ends.gather(1, (number - 1).clamp(min=0))
        last = ends.gather(1, number.clamp(max=ends.shape[1] - 1))
        spans = torch.stack([first, torch.where(outside, first, last)], -1).to(torch.int32)
        if _is_known(self.ends):
            return spans
        right = _increase(ends) & (ends[:, -1] <= num)
        return torch.where(right[:, None, None], spans, -1)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Of one document."""
        spans = self._of_all_rows(max(sizes.queries, sizes.keys))
        return (key >= spans[query.clamp(max=len(spans) - 1), 0]) & (key < spans[query.clamp(max=len(spans) - 1), 1])

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the spans of the first and last query: those between are in order."""
        spans = self._of_all_rows(sizes.queries).long()
        first, last = (spans[x[:, 0].clamp(max=len(spans) - 1)] for x in (tiles.q0, tiles.q1))
        full = (last[:, :1] <= tiles.k0) & (first[:, 1:] > tiles.k1)
        return statuses(full, (first[:, :1] > tiles.k1) | (last[:, 1:] <= tiles.k0))

    def _of_all_rows(self, num: int) -> Tensor:
        if self.ends.dim() == 2:
            raise ValueError(
                "sparse.documents: cu_seqlens [rows, documents + 1], with other documents in each row, can be combined "
                "with other patterns by & only. For |, pass cu_seqlens [documents + 1], the same for all rows."
            )
        if type(self.ends) is not Tensor:
            raise ValueError(
                "sparse.documents: documents from a step's batch can be combined with other patterns by & only. For |, "
                "make the pattern outside the step."
            )
        self.check_end(num)
        return self.spans(num)[0]


def _is_known(ends: Tensor) -> bool:
    """Return whether values are there, and looking at them stops no device."""
    return type(ends) is Tensor and ends.device.type == "cpu" and not is_functorch_tensor(ends)


def _increase(ends: Tensor) -> Tensor:
    """Return of each row whether its ends, [..., documents + 1], start at 0 and never decrease."""
    return (ends[..., 0] == 0) & (ends.diff(dim=-1) >= 0).all(-1)


def spans_of(numbers: Tensor) -> Tensor:
    """numbers [rows, tokens], or [tokens], that never decrease -> of each token the first one with its number and the
    one behind the last, int32 [rows, tokens, 2].
    """
    numbers = numbers[None] if numbers.dim() == 1 else numbers
    ends = [torch.searchsorted(numbers, numbers, right=right) for right in (False, True)]
    return torch.stack(ends, -1).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Spans(Pattern):
    """The keys of a query's own document, of a step's batch: `ends` int32 [rows or 1, queries, 2], of each query the
    first key and the one behind the last. It goes with other patterns by & alone.
    """

    ends: Tensor


@dataclass(frozen=True, eq=False)
class Padding(Pattern):
    """All keys but padding. `there` bool [rows or 1, keys]: False of padding."""

    there: Tensor

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Raise `ValueError`: it is known in a step alone."""
        raise ValueError(
            "sparse.padding: padding differs between rows, so it can be combined with other patterns by & only."
        )


@checked()
def documents(cu_seqlens: Tensor) -> Pattern:
    """Tokens attend only to tokens of their own document, if several documents are packed into a row.

    `cu_seqlens` int [documents + 1], the same for all rows of a batch, or [rows, documents + 1]: the positions where
    documents begin, the first 0, and where the last one ends; equal numbers are empty documents. It may be part of a
    step's batch. Tokens after the last end attend to nothing, and no token attends to them.

    Raises `TypeError` and `ValueError` for a wrong dtype or shape, and for numbers that do not start at 0 or that
    decrease. It raises at once, or, if the numbers are part of a step's batch, when the step runs.

    >>> from zerofn import sparse
    >>> packed = documents(torch.tensor([0, 3, 8])) & sparse.causal
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sparse.documents: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() not in (1, 2) or cu_seqlens.shape[-1] < 2:
        raise ValueError(
            "sparse.documents: cu_seqlens must be [documents + 1] or [rows, documents + 1], got "
            f"{list(cu_seqlens.shape)}."
        )
    if _is_known(cu_seqlens):
        with plain_dispatch():
            if not bool(_increase(cu_seqlens).all()):
                raise ValueError(
                    f"sparse.documents: cu_seqlens must start at 0 and never decrease, got {cu_seqlens.tolist()}."
                )
    # A layout is made of it once: what is written to the tensor later does not count.
    return Documents(cu_seqlens.clone() if type(cu_seqlens) is Tensor else cu_seqlens)


@checked()
def padding(mask: Tensor) -> Pattern:
    """All keys except padding: no token attends to padding.

    `mask` [rows or 1, keys], booleans or integers as tokenizers return them (`attention_mask`): false or 0 is padding,
    at either end of a row or between its tokens. It may be part of a step's batch, and can be combined with other
    patterns by `&`. A tile of keys that is all padding costs nothing. Padding tokens attend to tokens that are not
    padding.

    Raises `TypeError` and `ValueError` for numbers with a fraction, and for a wrong shape.

    >>> from zerofn import sparse
    >>> left = padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])) & sparse.causal
    """
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"sparse.padding: mask must be booleans or integers, got {mask.dtype}.")
    if mask.dim() != 2:
        raise ValueError(f"sparse.padding: mask must be [rows, keys], got {list(mask.shape)}.")
    return Padding(mask != 0)
