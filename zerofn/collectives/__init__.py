"""Collectives as pure functions over a named axis of ranks, each of them differentiable to every order.

All ranks of the axis must call a collective, in the same order, with tensors of the same shape and dtype. Nothing is
written to an argument.

`axis` is the name of an axis, or an `Axis` (`mesh.axis(name)`). Without one, the ranks that have different parts of
the batch take part: those along `replicate`, `data`, `expert` and `context` together. Ranks along `tensor` have the
same part of the batch. In a step and in a loss function, names are those of the state's mesh. Elsewhere they are
those of the mesh that the process has made, or all ranks along `data` if it has made none. A process that has made
several meshes must pass an `Axis` if the same name means different ranks in them.

Terms:

- *linear map*: an object with a `transpose`, which is again a linear map (`maps.py`). `Linear.apply(map, *xs)` makes
  it differentiable under `torch.autograd.grad`, `torch.func.grad`/`vjp`/`jvp`/`vmap`, to every order, and under
  capture: forward mode applies the map, and the backward pass its transpose.
- `vary` and `psum`, JAX's `pvary` and `psum`: transposes of each other. `vary` sends nothing forward and sums
  gradients; `psum` sums forward and sends nothing backward. Layers that are sliced along `tensor` begin with `vary` and
  end with `psum`.

Transposes here are those of the plain sum over ranks. `zerofn.gather` and `zerofn.scatter` are each other's
transposes under another inner product; see `zerofn.sharding`.

Pipelines (`stages.py`): `zerofn::on_stage` sends a leaf from its stage to all ranks along `pipe` before its use, and
`zerofn::to_stage` leaves its gradient on the leaf's stage. So an unchanged step, eager or compiled, gives the right
result on a mesh with `pipe`, and a pipelined step can be compared with it.

Start reading: `maps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import tree
from ..comm.axes import in_batch
from ..comm.current_mesh import axis_of as _axis
from ..comm.current_mesh import present
from ..comm.mesh import Axis, Mesh
from ..util.arguments import checked
from ..util.names import of_package
from .averaged import check_psum
from .maps import AllGather, AllReduce, CheckedSame, Exchange, Linear, LinearMap, Permute, Psum, ReduceScatter, Vary

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "mean",
    "permute",
    "psum",
    "reduce_scatter",
    "same",
    "vary",
    "Linear",
    "LinearMap",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)


def _from_last(x: Tensor, dim: int, what: str) -> int:
    """Return which dim this is, counted from the last."""
    if x.dim() == 0:
        raise ValueError(f"{what}: expected a tensor with at least one dim, got a scalar; write x.view(1).")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{what}: dim must be from {-x.dim()} to {x.dim() - 1} for shape {list(x.shape)}, got {dim}.")
    return range(-x.dim(), 0)[dim]


@checked()
def all_gather(x: Tensor, axis: str | Axis | None = None, *, dim: int = 0) -> Tensor:
    """Concatenate every rank's `x` along `dim`, in rank order.

    `x` [..., s, ...]: any dtype, with the same shape and dtype on all ranks, at least one dim. `axis`: the ranks that
    take part, by default those that have different parts of the batch; see the module. `dim`: the dim to concatenate
    along; negative ones count from the last.

    -> [..., size * s, ...] in the dtype and on the device of `x`, the same on all ranks. With one rank, a view of `x`.
    Transpose: `reduce_scatter`, a sum. Raises `ValueError` for a scalar and for an axis that does not exist,
    `IndexError` for a dim that does not exist.

    >>> all_gather(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return Linear.apply(AllGather(_axis(axis), dim=_from_last(x, dim, "all_gather")), x)[0]


@checked()
def reduce_scatter(x: Tensor, axis: str | Axis | None = None, *, dim: int = 0) -> Tensor:
    """Sum `x` over ranks and keep this rank's equal part along `dim`.

    `x` [..., size * s, ...]: with the same shape and dtype on all ranks, at least one dim. `axis`: see `all_gather`.
    `dim`: the dim to cut; negative ones count from the last.

    -> [..., s, ...] in the dtype and on the device of `x`: rank r gets elements [r * s, (r + 1) * s) of the sum along
    `dim`. gloo adds in rank order. With one rank, a view of `x`. Transpose: `all_gather`. Raises `ValueError` for a
    scalar, if the size of `dim` is not a multiple of the number of ranks, and for an axis that does not exist;
    `IndexError` for a dim that does not exist.

    >>> reduce_scatter(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    where = _axis(axis)
    counted = _from_last(x, dim, "reduce_scatter")
    if x.shape[counted] % where.size:
        raise ValueError(
            f"reduce_scatter: dim {dim} has {x.shape[counted]} elements, which {where.size} ranks along {where.name!r} "
            f"cannot divide equally. Pad this dim to a multiple of {where.size}."
        )
    return Linear.apply(ReduceScatter(where, dim=counted), x)[0]


@checked()
def all_reduce(x: Tensor, axis: str | Axis | None = None) -> Tensor:
    """Sum `x` over ranks.

    `x` [...]: with the same shape and dtype on all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype and on the device of `x`, added in rank order, so that all ranks have the same bits. With one
    rank, a view of `x`. Each rank receives the values of all others: meant for losses and norms, not for gradients of a
    model, which `scatter` averages. For a mean, see `mean`. Transpose: itself. In `value_and_grad`, its gradient is
    right along axes over which gradients are averaged, and along `tensor` if each rank uses the sum in its own way;
    otherwise capture raises an error. Raises `ValueError` for an axis that does not exist.

    >>> all_reduce(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    where = _axis(axis)
    between = x.requires_grad and where.size > 1 and not in_batch(where.name)
    return Linear.apply(AllReduce(where, between), x)[0]


@checked()
def broadcast(x: Tensor, axis: str | Axis | None = None, *, source: int = 0) -> Tensor:
    """Return one rank's `x` on all ranks.

    `x` [...]: any dtype, with the same shape and dtype on all ranks. `axis`: see `all_gather`. `source`: the rank of
    the axis whose `x` is returned.

    -> [...] in the dtype and on the device of `x`, the same bits on all ranks. With one rank, a view of `x`. An
    all-to-all and an all-gather spread the work: each rank sends at most 2 / n of `x` to each other rank. Transpose:
    the sum on `source`, zero elsewhere. Meant for values that each rank computes from its own rows, of which one
    becomes part of the state, such as a queue of features. Raises `ValueError` for a source or an axis that does not
    exist.

    >>> broadcast(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    where = _axis(axis)
    if not 0 <= source < where.size:
        raise ValueError(
            f"broadcast: source must be a rank of axis {where.name!r}, from 0 to {where.size - 1}, got {source}."
        )
    flat = x.reshape(-1)
    missing = -flat.numel() % where.size
    rows = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(where.size, -1)
    part = all_to_all(rows, where)[source]  # rank r gets part r of the source's
    return all_gather(part, where)[: flat.numel()].view(x.shape)


@checked()
def mean(x: Tensor, like: Any = None) -> Tensor:
    """Return the mean of `x` over the ranks that have different parts of the batch, for metrics.

    `x` [...]: with the same shape and dtype on all ranks, such as the loss of this rank's rows. `like`: the state or
    the parameters with which it was computed, or their mesh; None is the current mesh, see the module.

    -> [...] in the dtype of `x`, integers in torch's default dtype. The mean is the same on all ranks, if ranks that
    share a part of the batch (along `tensor` and `pipe`) have the same `x`. Ranks count equally: if they have different
    numbers of tokens, divide the `all_reduce` of their sums by the `all_reduce` of their numbers of tokens.
    Differentiable in `value_and_grad`. All ranks must call it. Raises `ValueError` where it is not clear which mesh is
    meant, and for a `like` without a `Sharded`.

    >>> mean(torch.tensor(3.0))
    tensor(3.)
    """
    where = _axis(None, "collectives.mean", "like=state, or like=mesh") if like is None else _mesh_of(like).batch
    return all_reduce(x, where) / where.size


def _mesh_of(like: Any) -> Mesh:
    if isinstance(like, Mesh | DeviceMesh):
        return Mesh.of(like)
    nodes = tree.leaves(like, is_leaf=lambda x: hasattr(x, "spec"))
    found = next((x.spec.mesh for x in nodes if hasattr(x, "spec")), None)
    if found is None:
        raise ValueError(
            "collectives.mean: nothing in `like` is sharded, so `like` has no mesh. Pass a sharded state, or a mesh."
        )
    return found


@checked()
def vary(x: Tensor, axis: str | Axis) -> Tensor:
    """Let each rank use one value in its own way, as the input of a layer that is cut over an axis. JAX's `pvary`.

    `x` [...]: the same on all ranks. `axis`: see `all_gather`.

    -> a view of `x`. Its gradient is the sum of all ranks' gradients: the transpose is `psum`. All ranks must call it.
    Raises `ValueError` for an axis that does not exist.

    >>> vary(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    return Linear.apply(Vary(_axis(axis)), x)[0]


@checked()
def psum(x: Tensor, axis: str | Axis) -> Tensor:
    """Sum `x` over ranks into one value, as the output of a layer whose input is cut over an axis. JAX's `psum`.

    `x` [...]: with the same shape and dtype on all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype of `x`, added up in rank order, so that all ranks have the same bits. All ranks must use the
    sum in the same way; the gradient of `x` is then the gradient of the sum: the transpose is `vary`. (After
    `all_reduce`, each rank may use the sum in its own way, and gradients are summed.) All ranks must call it. Raises
    `ValueError` for an axis that does not exist, and in `value_and_grad` along an axis over which gradients are
    averaged, because they would be too small by a factor of n. There, use `mean` or `all_reduce`, or apply `vary` to
    all parameters from which `x` is computed.

    >>> psum(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    where = _axis(axis)
    if x.requires_grad and where.size > 1:
        check_psum(x, where)
    return Linear.apply(Psum(where, forward=x.requires_grad), x)[0]


@checked()
def all_to_all(x: Tensor, axis: str | Axis | None = None) -> Tensor:
    """Send row r of `x` to rank r.

    `x` [size, ...]: any dtype, with the same shape and dtype on all ranks, a row for each rank of the axis. `axis`: see
    `all_gather`.

    -> [size, ...] in the dtype and on the device of `x`: row r comes from rank r. With one rank, a view of `x`.
    Transpose: itself. Raises `ValueError` for a wrong number of rows and for an axis that does not exist.

    >>> all_to_all(torch.tensor([[1, 2]]))
    tensor([[1, 2]])
    """
    where = _axis(axis)
    if x.dim() == 0 or x.shape[0] != where.size:
        raise ValueError(
            f"all_to_all: expected a first dim of {where.size}, one row per rank of axis "
            f"{where.name!r}, got shape {tuple(x.shape)}."
        )
    return Linear.apply(Exchange(where), x.reshape(where.size, -1))[0].view(x.shape)


@checked()
def permute(x: Tensor, sources: Sequence[int], axis: str | Axis | None = None) -> Tensor:
    """Send each rank another rank's `x`: rank r receives the `x` of rank `sources[r]`.

    `x` [...]: any dtype, with the same shape and dtype on all ranks. `sources`: the ranks of the axis, each once, the
    same on all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype and on the device of `x`. With one rank, a view of `x`. Transpose: the inverse permutation.
    Raises `ValueError` unless `sources` names each rank once, and for an axis that does not exist.

    >>> permute(torch.tensor([1.0, 2.0]), sources=[0])
    tensor([1., 2.])
    """
    where = _axis(axis)
    if sorted(sources) != list(range(where.size)):
        raise ValueError(
            f"permute: sources must name each of the {where.size} ranks of axis {where.name!r} once, "
            f"got {list(sources)}."
        )
    return Linear.apply(Permute(where, tuple(sources)), x)[0]


@checked()
def same(x: Tensor, axis: str | Axis | None = None) -> Tensor:
    """Declare that `x` has the same value on every rank, and check it.

    `x` [...]: with the same shape and dtype on all ranks. `axis`: the ranks that compare it; by default all ranks of
    the mesh. In a compiled step, a value that depends on a rank's own batch, random key or rank number may not scale a
    shard or a gradient. If you know that the value is equal on all ranks (a temperature in the batch, a file that all
    ranks read), declare it with this function.

    -> a view of `x`. Checksums of its bits are compared in every step, before the first write to the state; on a device
    the host waits for them. Transpose: itself, without the check. Raises `RuntimeError` on every rank if values differ;
    the state stays unchanged.

    >>> same(torch.tensor(0.5))
    tensor(0.5000)
    """
    where = (
        present(lambda mesh: mesh.all, "same", "axis=mesh.all, where mesh is the one you made")
        if axis is None
        else _axis(axis)
    )
    return Linear.apply(CheckedSame(where, "the value given to zerofn.same"), x)[0]
