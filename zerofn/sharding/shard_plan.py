"""Decide what becomes of every leaf of a state: pure functions of it and a `Partition`. `allocate` carries it out."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..geometry.cuts import StageCut
from ..geometry.layout import Layout, Leaf, LeafInfo, Unit, make_layout
from ..geometry.overlaps import makes_up
from ..offload.policy import check_memory, of_units
from ..ops.codecs import MASTERS, PLAIN, Codec
from ..util.errors import nearest
from .coded_sums import check_ranks
from .partition import Partition
from .precision import Precision
from .rank_entries import in_shards, of_ranks
from .spec import Spec
from .state_tree import is_state, layout_like, params_of, signature_of, sublayouts
from .storage import Placement, StorageSpec

_ON_HOST = (
    "step",
    "rng",
)  # of a TrainState: they seed draws on the host; on a device each would cost a synchronisation


@dataclass(frozen=True)
class ShardedPart:
    """A subtree to become `Sharded`; its leaves are the state's leaves first, first + 1, ..."""

    name: str
    spec: Spec
    first: int
    device: torch.device | None
    storages: list[StorageSpec]  # by unit
    is_params: bool


@dataclass(frozen=True)
class ReplicatedPart:
    """A leaf to be replicated."""

    first: int
    value: Tensor
    on_host: bool


def plan_state(
    state: Any, partition: Partition, unit_of: Callable[[str], str] | None = None
) -> tuple[list[ShardedPart | ReplicatedPart], tree.PyTreeSpec]:
    """Return the plan of every subtree, in the state's order, and the treedef that puts them together again.
    `partition`: of the parameters. `unit_of`: leaf name -> unit name.

    Raises `ValueError` for parameters that are not a container, and for moments whose format cannot hold their dtype.
    """
    states = _nodes(state, is_state)
    check_cuts([params_of(x) for x in states.values()], partition)
    layouts = [params_layout(x, partition, unit_of) for x in states.values()]
    partition = _asked(partition, layouts)
    known = {signature_of(part): part for layout in layouts for part in sublayouts(layout)}
    masters = {x.dtype for s in states.values() for x in tree.leaves(params_of(s)) if x.is_floating_point()}
    formats, special = moment_storage(state), _stored_over(state)

    def layout_of(x: Any) -> Layout | None:
        return None if isinstance(x, Tensor) else layout_like(x, known, int(special.get(id(x)) is of_ranks))

    nodes, treedef = tree.flatten(state, is_leaf=lambda x: layout_of(x) is not None)
    parts: list[ShardedPart | ReplicatedPart] = []
    first = 0
    for path, name, node in zip(treedef.paths(), tree.field_names(treedef), nodes, strict=True):
        layout, last = layout_of(node), name.rpartition(".")[2]
        if layout is None:
            parts.append(ReplicatedPart(first, node, last in _ON_HOST))
            first += 1
            continue
        is_params = last == "params" and path[:-1] in states
        codec, asked = next((x for above, x in formats.items() if path[: len(above)] == above), (PLAIN, None))
        own, leaves = partition if is_params else partition.beside(codec), tree.leaves(node)
        of_leaves = [[leaves[x.index].dtype for x in unit.leaves] for unit in layout.units]
        dtypes = [asked or public_dtype(x, masters, partition.precision) for x in of_leaves]
        storages = storages_of(name, layout.units, dtypes, own)
        device = leaves[0].device if leaves else None
        spec = Spec(layout, own)
        if id(node) in special:
            if special[id(node)] is in_shards:  # what signs have left out of sums
                check_ranks(spec, "shard: this optimizer sends signs, whose")
            spec = special[id(node)](spec)
        parts.append(ShardedPart(name, spec, first, device, storages, is_params))
        first += len(leaves)
    return parts, treedef


def _asked(partition: Partition, layouts: Sequence[Layout]) -> Partition:
    """Return the partition in which `Fp8.where` was asked about every matrix."""
    rule = partition.precision.fp8
    if rule is None:
        return partition
    rule = rule.asked(x.name for layout in layouts for x in layout.leaves if len(x.shape) == 2)
    return replace(partition, precision=replace(partition.precision, fp8=rule))


def params_layout(state: Any, partition: Partition, unit_of: Callable[[str], str] | None) -> Layout:
    """Return the layout of the parameters of a container that `is_state`. Raises `ValueError` if there are none."""
    params = params_of(state)
    if isinstance(params, Tensor) or not tree.leaves(params):
        raise ValueError(
            "shard: 'params' must be a container with at least one tensor, such as "
            f"dict(model.named_parameters()); got {type(params).__name__}."
        )
    frozen, about = getattr(state, "frozen", None), getattr(getattr(state, "tx", None), "about", None)
    label = getattr(about, "label", None)
    axis, shared = partition.over(experts=False), partition.shared_over
    return make_layout(
        params,
        axis.size,
        axis=axis.name,
        of_experts=partition.over(experts=True).size,
        replicas=shared.size if shared else 1,
        unit=unit_of,
        dtype=partition.precision.param,
        slice_of=partition.slice_of,
        trainable=(lambda name: not frozen(name)) if frozen else lambda name: True,
        label=(lambda name, leaf: label(LeafInfo(name, tuple(leaf.shape), leaf.dtype))) if label else lambda *_: (),
    )


def check_offload(partition: Partition, cuts: Sequence[ShardedPart]) -> None:
    """Raise `ValueError` if there is nothing to offload, and `MemoryError` if it does not fit into host memory."""
    offload = partition.tier
    if not (offload.optimizer or offload.params):
        return
    if not any(storage.placement for cut in cuts for storage in cut.storages):
        raise ValueError(
            f"{offload} has no effect: the optimizer has no state per parameter. Leave it out, or offload the "
            "parameters: Offload(params=...)."
        )
    kept: Counter[str] = Counter()
    for cut in cuts:
        for unit, storage in zip(cut.spec.layout.units, cut.storages, strict=True):
            for k, (dtype, size, tier) in enumerate(storage.parts(unit.size // cut.spec.num_shards(unit))):
                what = "parameters" if cut.is_params and k == 0 else "optimizer"
                kept[f"{what} on {tier or partition.home.type}"] += size * dtype.itemsize
    check_memory(offload, kept, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def check_feedback(cuts: Sequence[ShardedPart]) -> None:
    """Raise `ValueError` if feedback is asked for, and no gradient is sent in codes that leave anything out."""
    for cut in (x for x in cuts if x.is_params and x.spec.precision.feeds_back):
        spec = cut.spec
        axes = [axis for axis in (spec.mesh.shards, spec.mesh.replicas) if axis.size > 1]
        coded = [
            spec.feeds_back(unit, spec.precision.computes(storage.dtype), axis)
            for unit, storage in zip(spec.layout.units, cut.storages, strict=True)
            for axis in axes
            if unit.trainable
        ]
        if coded and not any(coded):
            raise ValueError(
                "shard: feedback=True has no effect, since no gradient is sent in codes: the leaves have fewer "
                "elements than `smallest`, are float64, or are reduced along axes without a wire codec. Write "
                "zerofn.Wire(reduce='int8', smallest=0, feedback=True), or leave feedback out."
            )


def check_cuts(trees: Sequence[Any], partition: Partition) -> None:
    """Raise `ValueError` for a cut of a leaf that is not there or has another shape, for an axis that is not there, for
    slices that are not a partition, and for an axis of slices that no leaf is cut over.
    """
    shapes = {
        tree.name_of(p): tuple(x.shape) for t in trees for p, x in zip(*tree.flatten_with_path(t)[:2], strict=True)
    }
    for name, cuts in partition.cuts.items():
        if name not in shapes:
            near = nearest(name, shapes)
            raise ValueError(
                f"shard: cuts has {name!r}, but no parameter has this "
                f"name{f'; did you mean {near[0]!r}?' if near else '.'}"
            )
        for cut in cuts:
            axis, shape = partition.mesh.axis(cut.axis), shapes[name]
            if not 0 <= cut.dim < len(shape) or shape[cut.dim] != cut.size or len(cut.slices) != axis.size:
                raise ValueError(
                    f"shard: {name!r} has shape {list(shape)}, but its entry in cuts divides {cut.size} elements along "
                    f"dim {cut.dim} into {len(cut.slices)} slices, and {cut.axis!r} has {axis.size} ranks. Make cuts "
                    "for this model and this mesh."
                )
            if not makes_up(cut):
                raise ValueError(
                    f"shard: the slices {cut.slices} of {name!r} do not cover each of its {cut.size} elements along "
                    f"dim {cut.dim} once. Write zerofn.parallel.tensor(model, mesh), which returns slices that do."
                )
    used = {cut.axis for cuts in partition.cuts.values() for cut in cuts}
    idle = [axis for axis in partition.mesh.slices if axis.name not in used]
    if idle:
        kind = idle[0].kind
        how = f"{kind.own_cuts}, or {kind.cuts} for a model of transformers" if kind.own_cuts else kind.cuts
        raise ValueError(
            f"shard: the {idle[0].size} ranks of axis {idle[0].name!r} would all compute the same: no leaf is cut over "
            f"it. Pass cuts={how}, or leave the axis out of the mesh."
        )


def public_dtype(dtypes: Iterable[torch.dtype], masters: set[torch.dtype], precision: Precision) -> torch.dtype:
    """Return the public dtype of a shard of leaves in `dtypes`: the master's if these are the parameters' dtypes, else
    their own.
    """
    own = functools.reduce(torch.promote_types, dtypes)
    return precision.param if precision.param is not None and own in masters else own


def storages_of(
    name: str, units: Sequence[Unit], dtypes: Sequence[torch.dtype], partition: Partition
) -> list[StorageSpec]:
    """Return how the shards of units are stored, and in which tier each of their parts. `dtypes`: the public ones.

    What has no elements has no tier. Raises `ValueError` for a codec that cannot hold a dtype.
    """
    out, sizes = [], [u.size for u in units]
    for dtype, offload, size in zip(dtypes, of_units(partition.tier, sizes), sizes, strict=True):
        codec = _codec_of(name, dtype, partition.codec)
        tiers = (offload.params, *[offload.optimizer] * (len(codec.parts) - 1))
        paths = tuple(offload.paths) if "nvme" in tiers else ()
        placement = Placement(tiers, paths, str(partition.home), offload.update) if any(tiers) and size else None
        out.append(StorageSpec(codec, dtype, placement))
    return out


def _codec_of(name: str, dtype: torch.dtype, codec: Codec) -> Codec:
    """Return the codec of a shard: parameters that have no halves are stored plainly."""
    if codec.holds in (None, dtype):
        return codec
    if codec in MASTERS:
        return PLAIN
    held, given = (str(x).removeprefix("torch.") for x in (codec.holds, dtype))
    raise ValueError(
        f"shard: {name!r} cannot be stored{codec.note}: such moments hold {held}, but the parameters are {given}. "
        "Write precision='fp32', or leave moments out."
    )


def moment_storage(state: Any) -> dict[tree.Path, tuple[Codec, torch.dtype | None]]:
    """Map the path of a field to the codec and dtype that the type of an optimizer's state declares for it."""
    return {
        (*path, type(x)._fields.index(field)): how
        for path, x in _nodes(state, lambda x: hasattr(type(x), "moment_storage")).items()
        for field, how in type(x).moment_storage.items()
    }


def _stored_over(state: Any) -> dict[int, Callable[[Spec], Spec]]:
    """Map the id of a field of an optimizer's state to what its type declares of it, where that is no partition like
    that of moments: "ranks", an entry for each rank, or "shards", at every stage.
    """
    known = {"ranks": of_ranks, "shards": in_shards}
    nodes = _nodes(state, lambda x: hasattr(type(x), "stored_over")).values()
    return {id(getattr(x, field)): known[how] for x in nodes for field, how in type(x).stored_over.items()}


def _nodes(state: Any, wanted: Callable[[Any], bool]) -> dict[tree.Path, Any]:
    """Map paths to the outermost nodes that are `wanted`."""
    nodes, treedef = tree.flatten(state, is_leaf=wanted)
    return {path: x for path, x in zip(treedef.paths(), nodes, strict=True) if wanted(x)}


def description(partition: Partition, parts: list[ShardedPart | ReplicatedPart]) -> str:
    """Describe what ranks must agree about, one line each, so that a difference can be shown."""
    again = f", and over {partition.again.name}" if partition.again else ""
    precision = next(x.spec.precision for x in parts if isinstance(x, ShardedPart) and x.is_params)
    taken = precision.fp8.names if precision.fp8 else frozenset()
    # Of a unit that lies on another stage a rank has nothing to keep: where units are kept is said once for all.
    lines = [f"stage {partition.stage}{again}, {precision}, {replace(partition.tier, path=None)}"]
    for part in parts:
        if isinstance(part, ReplicatedPart):
            lines.append(f"replicated {tuple(part.value.shape)} {part.value.dtype}")
        else:
            lines += [
                f"{leaf.name} {list(leaf.whole)}{_of_cuts(leaf)} {leaf.dtype} in unit {u.name!r}, "
                f"kept {replace(storage, placement=None).described}{', in float8' * (leaf.name in taken)}"
                for u, storage in zip(part.spec.layout.units, part.storages, strict=True)
                for leaf in u.leaves
            ]
    return "\n".join(lines)


def _of_cuts(leaf: Leaf) -> str:
    """Return in words how a leaf is cut, which is the same on all ranks."""
    words = []
    for cut in leaf.cuts:
        if isinstance(cut, StageCut):
            words.append(f" on {'stages' if len(cut.stages) > 1 else 'stage'} {', '.join(map(str, cut.stages))} ")
            words.append(f"of {cut.pipeline.placement} by {cut.pipeline.schedule_in_words}" if cut.pipeline else "")
        else:
            words.append(f" cut over {cut.axis!r} along dim {cut.dim} into {cut.slices}")
    return "".join(words)
