"""Several ranks in one process and one thread, one after the other: nothing is sent.

A rank runs until it needs a value that another rank has not sent yet. Then it is stopped, and later run again from the
beginning, with all values sent so far. So the code must give the same results each time. We run only small computations
on the CPU in this way: a few numbers that show whether a model in parts computes the same as the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch_compat import (
    TorchDispatchMode,
    function_modes,
    without_autocast,
    without_dispatch_modes,
    without_last_function_mode,
)
from ..comm import exchange_parts, transport  # noqa: F401  (define the operations)
from ..comm.mesh import Axis, Mesh

T = TypeVar("T")
LOCAL = "ranks in this process"  # the name of their group
_OPS = torch.ops.zerofn


def mesh_of(name: str, size: int, rank: int) -> Mesh:
    """Return the mesh that one of `size` ranks of one axis has, inside of `on_ranks`."""
    return Mesh((Axis(name, size, rank, LOCAL),))


def on_ranks(size: int, call: Callable[[int], T]) -> list[T]:
    """Return the results of `call(rank)` for each of `size` ranks. Each rank's call is repeated several times, always
    as in a new process: with one seed, and without modes of torch.

    `call` may use collectives only over the axes of `mesh_of(..., size, rank)`, the same ones on all ranks. Raises what
    a rank raises, and `RuntimeError` if ranks call different collectives.
    """
    sent: list[list[tuple[str, Tensor]]] = [[] for _ in range(size)]
    found: dict[int, T] = {}
    before = -1
    while len(found) < size:
        steps = len(found) + sum(map(len, sent))
        if steps == before:
            raise RuntimeError("some ranks wait for a collective that others do not call.")
        before = steps
        for rank in set(range(size)).difference(found):
            with contextlib.suppress(_NotSentYet), without_modes(), torch.random.fork_rng(()):
                torch.manual_seed(0)
                with _Transfers(rank, sent):
                    found[rank] = call(rank)
    return [found[rank] for rank in range(size)]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Autograd records the operations inside, and no mode of torch from outside applies to them."""
    with contextlib.ExitStack() as left:
        for _ in function_modes():
            left.enter_context(without_last_function_mode())
        for one in (without_dispatch_modes(), without_autocast(), torch.inference_mode(False), torch.enable_grad()):
            left.enter_context(one)
        yield


class _NotSentYet(BaseException):
    """Stops a rank that needs a value that another rank has not sent yet. It is not an `Exception`, which models may
    catch.
    """


class _Transfers(TorchDispatchMode):
    """Answers the transfers of one rank. `sent`: for each rank, its operations with their sizes, and the tensors."""

    def __init__(self, rank: int, sent: list[list[tuple[str, Tensor]]]) -> None:
        super().__init__()
        self._rank, self._sent, self._next = rank, sent, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _OPS.wait.default:
            return args[0]
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **kwargs or {})
        k, self._next = self._next, self._next + 1
        if k == len(self._sent[self._rank]):
            sizes = args[1] if func is _OPS.exchange_parts.default else list(args[0].shape)
            self._sent[self._rank].append((f"{func} {sizes}", args[0].clone(memory_format=torch.contiguous_format)))
        found = [each[k] for each in self._sent if k < len(each)]
        if len(names := {name for name, _ in found}) > 1:
            raise RuntimeError(f"ranks call different collectives: {' and '.join(sorted(names))}.")
        if len(found) < len(self._sent):
            raise _NotSentYet
        return answer([x for _, x in found], self._rank, args)


def _gathered(rows: Sequence[Tensor], rank: int, args: Any) -> Tensor:
    return torch.cat([x.view(-1) for x in rows])


def _summed(rows: Sequence[Tensor], rank: int, args: Any) -> Tensor:
    parts = [x.view(len(rows), -1)[rank] for x in rows]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _exchanged(rows: Sequence[Tensor], rank: int, args: Any) -> Tensor:
    return torch.stack([x.view(len(rows), -1)[rank] for x in rows]).view(args[0].shape)


def _parts_exchanged(rows: Sequence[Tensor], rank: int, args: Any) -> Tensor:
    size = len(rows)
    sizes = [list(args[1][source * size : (source + 1) * size]) for source in range(size)]
    return torch.cat([x.split(of_rank)[rank] for x, of_rank in zip(rows, sizes, strict=True)])


def _permuted(rows: Sequence[Tensor], rank: int, args: Any) -> Tensor:
    return rows[args[1][rank]].clone()


_ANSWERS: dict[Any, Callable[[Sequence[Tensor], int, Any], Tensor]] = {
    _OPS.all_gather.default: _gathered,
    _OPS.reduce_scatter.default: _summed,
    _OPS.exchange.default: _exchanged,
    _OPS.exchange_parts.default: _parts_exchanged,
    _OPS.permute.default: _permuted,
}
