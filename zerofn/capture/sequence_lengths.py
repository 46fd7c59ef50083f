"""Lengths of sequences while a step is captured.

Torch's functions read lengths on the host. Lengths that are numbers are the same in every step, so what follows from
them is a constant of the graph. Lengths of CTC may also be tensors of the batch, see `ops/ctc.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._torch_compat import PACKING, FakeTensor, without_dispatch_modes
from ..util.errors import CaptureError
from ..util.patches import Patches
from .known_values import known_value


def _ctc_of_tensors(ctc_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.ctc_loss` with lists of lengths made tensors, which it computes with instead of reading them."""

    @functools.wraps(ctc_loss)
    def loss(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any, **options: Any) -> Tensor:
        return ctc_loss(log_probs, targets, torch.as_tensor(inputs), torch.as_tensor(lengths), *rest, **options)

    return loss


def _packed(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Return what packs padded sequences, [time, rows, ...], by lengths that are known."""

    @functools.wraps(pack)
    def packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        known = known_value(lengths) if isinstance(lengths, FakeTensor) else lengths
        if known is None:
            raise _unknown()
        by_time = x.transpose(0, 1) if batch_first else x
        with without_dispatch_modes():
            _, sizes = pack(torch.empty(by_time.shape[:2]), known, False)
            runs = list(_runs(sizes))
        return torch.cat([by_time[a:b, :n].flatten(0, 1) for a, b, n in runs]), sizes

    return packed


def _padded(pad: Callable[..., Any]) -> Callable[..., Any]:
    """Return what pads packed sequences again."""

    @functools.wraps(pad)
    def padded(x: Tensor, sizes: Tensor, batch_first: bool, value: float, length: int) -> tuple[Tensor, Tensor]:
        if isinstance(sizes, FakeTensor):
            raise _unknown()
        with without_dispatch_modes():
            _, lengths = pad(torch.empty(int(sizes.sum())), sizes, batch_first, 0.0, length)
            runs = list(_runs(sizes))
        out, first = x.new_full((length, len(lengths), *x.shape[1:]), value), 0
        for a, b, n in runs:
            out[a:b, :n] = x[first : first + (b - a) * n].unflatten(0, (b - a, n))
            first += (b - a) * n
        return out.transpose(0, 1) if batch_first else out, lengths

    return padded


def _of_numbers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent network's forward pass, which refuses packed sequences of the batch."""

    @functools.wraps(forward)
    def run(self: nn.Module, given: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(given, PackedSequence) and isinstance(given.batch_sizes, FakeTensor):
            raise _unknown()
        return forward(self, given, *rest, **options)

    return run


def _unknown() -> CaptureError:
    return CaptureError(
        "the lengths of packed sequences are tensors of the batch, but a captured step needs numbers. Pass padded "
        "rows, and the lengths as a list, and pack inside the step; each new list of lengths is then a new capture. Or "
        "pad and mask, or pack inside zerofn.eager_region."
    )


def _runs(sizes: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first step, stop, number of rows) of steps in a row that as many sequences have."""
    stop = 0
    for n, group in groupby(sizes.tolist()):
        first, stop = stop, stop + len(list(group))
        yield first, stop, n


known_lengths = Patches(
    lambda: [
        (torch, "ctc_loss", _ctc_of_tensors),
        (PACKING, "_pack_padded_sequence", _packed),
        (PACKING, "_pad_packed_sequence", _padded),
        *((kind, "forward", _of_numbers) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    ]
)
