"""One registry of operations: how each runs, what it makes of shards, what it moves, whose memory its result has.

Our operations declare this when they are defined, and cannot be defined without. For ATen's it follows from schema and
tags, and from the tables at the end of this file. Any other operation may work on gathered values; `graph.verify`
refuses it on a shard.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch_compat import OpOverload, schema_arguments

library = torch.library.Library("zerofn", "FRAGMENT")
aten = torch.ops.aten

_implementations: dict[str, Callable[..., Any]] = {}  # by name and overload
_aside: dict[str, Callable[..., Any]] = {}
REPLACED: dict[OpOverload, OpOverload] = {}  # ATen's -> the one of ours that a capture records in its place


class OnShard(enum.Enum):
    """What an operation makes of a shard among its inputs."""

    KEEPS = "keeps"  # element by element: the result is a shard, too
    MAKES = "makes"  # the result is a shard, whatever came in
    LEAVES = "leaves"  # the result is whole, or right over all ranks: no shard any more
    SHAPE = "shape"  # only the shape is read: nothing of the shard is in the result
    REFUSED = "refused"  # the result would be this rank's own


class Lane(enum.Enum):
    """What carries the bytes that an operation moves while the processor goes on."""

    LINK = "link"  # between ranks
    READ = "read"  # from a drive
    WRITE = "write"  # to a drive
    COPY = "copy"  # between host and device


@dataclass(frozen=True)
class Moves:
    """A transfer that an operation starts. `nbytes(given, result)`: how many bytes a rank moves, of the arguments by
    name and the result. `to`: the device it goes to, for copies."""

    lane: Lane
    nbytes: Callable[[Mapping[str, Any], Any], int]
    to: Callable[[Mapping[str, Any]], torch.device] | None = None


@dataclass(frozen=True)
class Traits:
    """What passes, checks and plans know of an operation.

    `on_shard`: see `OnShard`. `moves`: the transfer it starts, which `wait` ends. `collective`: "gather", "scatter",
    "gather in place", "exchange", "exchange of parts" or "permute", if it is one between ranks. `lends`: its result
    lies in an arena, which the next step uses again. `bucket`: its result is the flat buffer of a unit's gradient.
    `fills_bucket`: it writes one. `stores`: "new" if it writes a new value over the old one, "in place" if it only
    writes out what was changed there. `casts`: the same numbers in another dtype. `passes_on`: the result is the value
    that came in.
    `constant_fill`: one number everywhere, as of `zeros`. `replicated`: the result is the same on all ranks of its
    axis, as of an all-reduce. `rank_dependent`: it differs from rank to rank whatever came in, as of an own draw.
    `cuts`: the result is this rank's shard of a value that must be equal on all ranks.
    `checks`: it may raise, on all ranks, and then before the first write. `free`: it takes no time of its own.
    `opaque`: it runs a function of the user's, which values that no step has computed may not suit. `flops(given,
    result)`: its multiplications and additions, of the arguments by name and the result; by default torch's flop
    counter says so. `again`: which part of them computes once more what was computed before. `multiplies`: the dtype of
    the numbers that these multiply, or the argument that has it; by default the result's. `touches(given, result)`: the
    bytes of memory that it reads and writes; by default each element of its tensors once. `workspace(given, result)`:
    the bytes that it has beside its result while it runs, where they are too many to leave out.
    """

    on_shard: OnShard
    moves: Moves | None = None
    collective: str = ""
    lends: bool = False
    bucket: bool = False
    fills_bucket: bool = False
    stores: str = ""
    casts: bool = False
    passes_on: bool = False
    constant_fill: bool = False
    replicated: bool = False
    rank_dependent: bool = False
    cuts: bool = False
    checks: bool = False
    free: bool = False
    opaque: bool = False
    flops: Callable[[Mapping[str, Any], Any], int] | None = None
    again: float = 0.0
    multiplies: torch.dtype | str | None = None
    touches: Callable[[Mapping[str, Any], Any], int] | None = None
    workspace: Callable[[Mapping[str, Any], Any], int] | None = None


_traits: dict[str, Traits] = {}  # of ours, by name without an overload
UNKNOWN = Traits(OnShard.REFUSED)


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    traits: Traits,
    aside: Callable[..., Any] | None = None,
    replaces: OpOverload | None = None,
) -> None:
    """Register `zerofn::schema` with one implementation for every device, one for fake tensors, and its traits.
    `aside`: what does it on the thread that updates state on the host, where that is more than calling `run` there.
    `replaces`: an operation of ATen's with the same arguments, in whose place a capture records this one.

    No autograd formula: the operations run below autograd or under `no_grad`; see
    `differentiable` for one inside models. Raises `ValueError` for a second overload with other traits.
    """
    name = schema.split("(")[0]
    base = name.partition(".")[0]
    if _traits.setdefault(base, traits) != traits:
        raise ValueError(f"zerofn::{name}: the overloads of one operation have one set of traits.")
    _implementations[name] = run
    if aside is not None:
        _aside[name] = aside
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofn::{name}", fake, lib=library)
    if replaces is not None:
        REPLACED[replaces] = getattr(getattr(torch.ops.zerofn, base), name.partition(".")[2] or "default")


# By id, because an operation's hash is a call in Python: (it, what is known of it).
_known: dict[int, tuple[object, Traits]] = {}
_places: dict[int, tuple[object, dict[str, tuple[int, Any]]]] = {}


def traits_of(target: object) -> Traits:
    """The traits of an operation; `UNKNOWN`'s where nothing says what becomes of a shard."""
    known = _known.get(id(target))
    if known is None:
        if not isinstance(target, OpOverload):
            return UNKNOWN
        known = _known[id(target)] = target, _find_traits(target)
    return known[1]


def _find_traits(target: OpOverload) -> Traits:
    if target.namespace == "zerofn":
        return _traits[base_name(target)]
    if target in _ATEN:
        return _ATEN[target]
    return Traits(OnShard.KEEPS) if torch.Tag.pointwise in target.tags else UNKNOWN


def implementation_of(target: OpOverload) -> Callable[..., Any] | None:
    """What runs an operation of ours, without the dispatcher."""
    if target.namespace != "zerofn":
        return None
    overload = target._overloadname
    return _implementations[base_name(target) + ("" if overload == "default" else f".{overload}")]


def aside_of(target: OpOverload) -> Callable[..., Any] | None:
    """What does an operation on the updates' thread, if that is more than calling it there."""
    return _aside.get(base_name(target)) if target.namespace == "zerofn" else None


def base_name(target: OpOverload) -> str:
    """An operation's name without namespace and overload."""
    return target._schema.name.split("::")[1]


def argument_places(target: OpOverload) -> dict[str, tuple[int, Any]]:
    """Argument name -> (its position, its default value), from the schema."""
    known = _places.get(id(target))
    if known is None:
        places = {a.name: (k, a.default_value) for k, a in enumerate(schema_arguments(target))}
        known = _places[id(target)] = target, places
    return known[1]


# --- ATen, where schema and tags do not say it ---------------------------------------------------------------------

_SHAPE_ONLY = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
    # what forward-mode differentiation asks about a tangent
    aten.is_same_size.default,
    aten._has_same_storage_numel.default,
    aten._new_zeros_with_same_feature_meta.default,
)
_ELEMENTWISE = (aten.clone.default, aten.copy_.default, aten.lift_fresh_copy.default, aten.where.self, aten.fill.Scalar)
SAME = (aten.detach.default, aten.alias.default)  # the very same value
COPIES = (aten.clone.default, aten._to_copy.default)  # the same numbers in memory of their own
VIEWS = (aten.view.default, aten._unsafe_view.default)  # the same memory in another shape
# A shard where the shape stays; see `graph.verify`.
RESHAPES = (*VIEWS, aten.reshape.default, aten.expand.default)
MOVES = (  # each element of the result is one of the first argument
    *RESHAPES,
    *(aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default),
    *(aten.select.int, aten.slice.Tensor, aten.index.Tensor),
)
# Reductions over the dims in their argument `dim`.
OVER_DIMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
LINEAR = (  # in their first argument, beside views, casts and torch's derivatives
    *COPIES,
    aten.sum.dim_IntList,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.mm.default,
)
ASKS_METADATA = (aten.size.default, aten.stride.default, aten.storage_offset.default, aten.is_nonzero.default)
ASKS_VALUES = (aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default)  # results: Python's
EMPTY = (  # memory with whatever is in it
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
FILLS = (
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.copy_.default,
)  # write all of the first argument
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)  # constants into a trace
_ATEN: dict[OpOverload, Traits] = {
    **dict.fromkeys(_SHAPE_ONLY, Traits(OnShard.SHAPE, constant_fill=True)),
    **dict.fromkeys(
        (aten.zeros.default, aten.ones.default, aten.full.default), Traits(OnShard.REFUSED, constant_fill=True)
    ),
    **dict.fromkeys((*_ELEMENTWISE, *SAME), Traits(OnShard.KEEPS)),
    aten._to_copy.default: Traits(OnShard.KEEPS, casts=True),
}

# Results that share their first argument's memory, which their schemas do not say.
UNDECLARED_VIEWS = (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
# Arguments that are written in training, which their schemas do not say.
_UNDECLARED_WRITES = {
    packet.default: ("running_mean", "running_var")
    for packet in (
        aten.native_batch_norm,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
        aten.batch_norm_update_stats,
        aten.batch_norm_gather_stats,
        aten.batch_norm_gather_stats_with_counts,
    )
}


def may_write(target: OpOverload) -> bool:
    """Return whether an operation writes to an argument, whether its schema says so or not."""
    return target._schema.is_mutable or target in _UNDECLARED_WRITES


def written_arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that it writes to."""
    if not may_write(target):
        return []
    given = schema_arguments(target)
    named = {a.name: args[k] if k < len(args) else kwargs.get(a.name) for k, a in enumerate(given)}
    if target in _UNDECLARED_WRITES:
        return [named[name] for name in _UNDECLARED_WRITES[target]] if named.get("training", True) else []
    return [named[a.name] for a in given if a.alias_info is not None and a.alias_info.is_write]


# Operations that may write to the memory of an operand of their result's shape: (the form that does, its argument).
OUT_ELEMENTWISE = {
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.div.Tensor: (aten.div.out, "out"),
    aten.neg.default: (aten.neg.out, "out"),
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.silu.default: (aten.silu.out, "out"),
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.tanh.default: (aten.tanh.out, "out"),
    aten.sigmoid.default: (aten.sigmoid.out, "out"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
}
# Operations that make gradients and may write them to given memory, bit for bit the same.
OUT_GRADIENT = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
# What only moves values or rounds once: the same bits, whoever compiles it.
EXACT = frozenset((
    aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default, aten.full.default,
    aten.zeros.default, aten.ones.default, aten.empty_like.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default, aten.new_zeros.default, aten.new_full.default, aten.scalar_tensor.default,
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.tril.default, aten.triu.default,
    aten.slice_backward.default, aten.select_backward.default, aten.constant_pad_nd.default, aten.embedding.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.flip.default, aten.roll.default,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default,
))  # fmt: skip
# What a compiler may fuse, beside elementwise operations and reductions, which torch tags as such.
FUSIBLE = EXACT | frozenset((
    aten._softmax.default, aten._safe_softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten.native_group_norm.default, aten.native_group_norm_backward.default, aten.nll_loss_forward.default,
    aten.nll_loss_backward.default, aten.gelu.default, aten.gelu_backward.default, aten.silu_backward.default,
    aten.sigmoid_backward.default, aten.tanh_backward.default, aten.threshold_backward.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
    aten.hardswish_backward.default, aten.mean.default, aten.mean.dim, aten.sum.default, aten.sum.dim_IntList,
    aten.amax.default, aten.amin.default, aten.var.correction, aten.var_mean.correction,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default,
))  # fmt: skip
_T, _F = torch.Tensor, torch.nn.functional
# torch's own functions that call just this operation with these arguments, in less time than the dispatcher's entry for
# any operation takes, which converts arguments by the schema. Of those that make a tensor from none, `torch.full` and
# its kind would also ask for a default device.
TORCH_FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.addmm.default: torch.addmm,
    aten.addmm.out: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.bmm.out: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.copy_.default: _T.copy_,
    aten.cos.default: torch.cos,
    aten.div.Tensor: torch.div,
    aten.div.out: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.expand.default: _T.expand,
    aten.gelu.default: _F.gelu,
    aten.gelu.out: _F.gelu,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul.out: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.neg.out: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.pow.Tensor_Scalar_out: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sigmoid.out: torch.sigmoid,
    aten.sin.default: torch.sin,
    aten.squeeze.dim: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.sub.out: torch.sub,
    aten.sum.IntList_out: torch.sum,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.tanh.out: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: _T.view,
    aten.where.self: torch.where,
}
