"""Loaders that have another number of batches on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import all_gather
from ..comm.mesh import Axis, Mesh
from ..job.step_order import meetings
from ..memory.turns import refuse_while_capturing
from ..util.arguments import checked

_END, _BATCH, _FAILED = range(3)
B = TypeVar("B")


@checked("loader")
def even(loader: Iterable[B], *, pad: str | None = None, mesh: Mesh | DeviceMesh | None = None) -> Iterator[B]:
    """Yield a loader's batches, the same number of them on every rank.

    All ranks stop at the end of the shortest loader, and drop remaining batches of other loaders. With `pad`, they
    continue until the longest loader ends: batches must be mappings, and each gets an entry whose name is `pad`, a
    float32 scalar. It is 1 for a batch of the loader. A rank whose loader has ended repeats its last batch, with 0.
    Multiply the loss by this weight, and divide by the sum of weights over ranks, not by the number of ranks.

    Ranks exchange one message for each batch. Every rank must iterate; if a rank leaves the loop early, the next step
    raises on all ranks. Raises `TypeError` for a batch that is not a mapping and `ValueError` for an empty loader, both
    only with `pad`; on all ranks `RuntimeError` if one rank's loader raises. Unlike PyTorch's `Join`, in which ranks
    that have ended shadow the collectives of others, all ranks run the same steps here, without hooks.

    >>> [x for x in even([1, 2, 3])]
    [1, 2, 3]
    >>> [x["weight"].item() for x in even([{"x": 1}, {"x": 2}], pad="weight")]
    [1.0, 1.0]
    """
    refuse_while_capturing("zerofn.even")
    axis = Mesh.of(mesh).all
    batches: Iterator[B] | None = None
    last: Any = None
    error: Exception | None = None
    while True:
        try:
            batches = iter(loader) if batches is None else batches
            batch, found = next(batches), _BATCH
            if pad is not None:
                _check(batch, pad)
        except StopIteration:
            batch, found = last, _END
            if pad is not None and last is None:
                error, found = (
                    ValueError("zerofn.even: the loader has no batches, so even cannot repeat the last one."),
                    _FAILED,
                )
        except Exception as raised:
            error, found = raised, _FAILED
        all_found = _of_all(found, axis)
        if error is not None:
            raise error
        if _FAILED in all_found:
            rank = all_found.index(_FAILED)
            raise RuntimeError(
                f"zerofn.even: stopped, because the loader of rank {rank} failed. That rank's own error says why."
            )
        if _BATCH not in all_found or (pad is None and _END in all_found):
            return
        last = batch
        yield batch if pad is None else cast(B, {**cast(Any, batch), pad: torch.tensor(float(found == _BATCH))})


def _check(batch: Any, pad: str) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"zerofn.even: with pad={pad!r}, a batch must be a mapping, such as a dict; got {type(batch).__name__}."
        )
    if pad in batch:
        raise ValueError(f'zerofn.even: the batch already has an entry {pad!r}. Choose another name: pad="is_real".')


def _of_all(found: int, axis: Axis) -> list[int]:
    """Return what every rank of the axis has found."""
    if axis.size == 1:
        return [found]
    with meetings().lasting([axis.group], "the next batch of zerofn.even", b""):
        return [int(x) for x in all_gather(torch.tensor([found]), axis)]
