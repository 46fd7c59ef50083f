"""Decide what becomes of every leaf of a state: pure functions of the state and a policy. `allocate` carries it out."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..comm.mesh import Mesh
from ..geometry.cuts import Cut, local_shape
from ..geometry.layout import Layout, LeafInfo, make_layout
from ..geometry.overlaps import makes_up
from ..offload.policy import Offload, check_memory, of_units
from ..ops.codecs import PLAIN, SPLIT, Codec
from ..util.arguments import told
from ..util.errors import nearest
from .partition import Partition
from .precision import Precision
from .spec import Spec
from .state_tree import is_state, layout_like, params_of, signature_of, sublayouts
from .storage import Placement, StorageSpec

STAGES = (0, 1, 2, 3)


_ON_HOST = (
    "step",
    "rng",
)  # of a TrainState: they seed draws on the host; on a device each would cost a synchronisation


def check_stage(stage: Any) -> None:
    """Raise `ValueError` for an unknown stage."""
    if stage not in STAGES or isinstance(stage, bool):
        near = nearest(stage, STAGES, 1, 0.0)
        raise ValueError(
            f"stage={stage!r} is not known: stages are 0 (replicated), 1, 2 and 3"
            f"{f'; did you mean {near[0]}?' if near else '.'}"
        )


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


@dataclass(frozen=True)
class ShardPolicy:
    """The arguments of `shard`, resolved.

    `partition`: over which ranks units are cut. `unit`: leaf name -> unit name. `device`: where shards are
    stored, None for where the parameters are. `home`: where the model computes. `cuts`: of leaves, by name.
    """

    stage: int
    partition: Partition
    precision: Precision
    unit: Callable[[str], str] | None
    device: torch.device | None
    offload: Offload
    home: torch.device
    cuts: Mapping[str, tuple[Cut, ...]]

    @property
    def mesh(self) -> Mesh:
        """The ranks, and what each axis of them shares."""
        return self.partition.mesh

    def slice_of(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Cut, ...]]:
        """Return the shape of this rank's slice of a leaf, and its cuts."""
        cuts = self.cuts.get(name, ())
        return local_shape(shape, cuts, self.mesh), cuts

    def spec(self, layout: Layout, halves: bool = False) -> Spec:
        """Return the spec of a `Sharded` with this layout."""
        return Spec(layout, self.partition, self.stage, self.precision, halves)


def plan_state(state: Any, policy: ShardPolicy) -> tuple[list[ShardedPart | ReplicatedPart], tree.PyTreeSpec]:
    """Return the plan of every subtree, in the state's order, and the treedef that puts them together again.

    Raises `ValueError` for parameters that are no container, and for moments whose format cannot hold their dtype.
    """
    states = _nodes(state, is_state)
    check_cuts([params_of(x) for x in states.values()], policy)
    layouts = [params_layout(x, policy) for x in states.values()]
    known = {signature_of(part): part for layout in layouts for part in sublayouts(layout, policy.spec(layout))}
    masters = {x.dtype for s in states.values() for x in tree.leaves(params_of(s)) if x.is_floating_point()}
    formats = moment_storage(state)

    def layout_of(x: Any) -> Layout | None:
        return None if isinstance(x, Tensor) else layout_like(x, known)

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
        how = next((found for above, found in formats.items() if path[: len(above)] == above), None)
        leaves = tree.leaves(node)
        storages = []
        for unit in layout.units:
            dtype = public_dtype([leaves[x.index].dtype for x in unit.leaves], masters, policy.precision)
            storages.append(storage_of(name, dtype, is_params, how, policy.precision))
        storages = place(layout, storages, is_params, policy)
        device = leaves[0].device if leaves else None
        parts.append(ShardedPart(name, policy.spec(layout, is_params), first, device, storages, is_params))
        first += len(leaves)
    return parts, treedef


def params_layout(state: Any, policy: ShardPolicy) -> Layout:
    """Return the layout of the parameters of a container that `is_state`. Raises `ValueError` if there are none."""
    params = params_of(state)
    if isinstance(params, Tensor) or not tree.leaves(params):
        raise ValueError(
            "shard: 'params' must be a container with at least one tensor, such as "
            f"dict(model.named_parameters()); got {type(params).__name__}."
        )
    frozen, about = getattr(state, "frozen", None), getattr(getattr(state, "tx", None), "about", None)
    label = getattr(about, "label", None)
    axis, shared = policy.partition.over(experts=False), policy.partition.shared_over
    return make_layout(
        params,
        axis.size,
        axis=axis.name,
        of_experts=policy.partition.over(experts=True).size,
        replicas=shared.size if shared else 1,
        unit=policy.unit,
        dtype=policy.precision.param,
        slice_of=policy.slice_of,
        trainable=(lambda name: not frozen(name)) if frozen else lambda name: True,
        label=(lambda name, leaf: label(LeafInfo(name, tuple(leaf.shape), leaf.dtype))) if label else lambda *_: (),
    )


def check_offload(offload: Offload, cuts: Sequence[ShardedPart], home: torch.device) -> None:
    """Raise `ValueError` if there is nothing to offload, and `MemoryError` if it does not fit into host memory."""
    if not any(storage.placement for cut in cuts for storage in cut.storages):
        raise ValueError(
            f"{offload} has no effect: the optimizer keeps nothing per parameter. Leave it out, or "
            "offload the parameters: Offload(params=...)."
        )
    kept: Counter[str] = Counter()
    for cut in cuts:
        for unit, storage in zip(cut.spec.layout.units, cut.storages, strict=True):
            for k, (dtype, size, tier) in enumerate(storage.parts(unit.size // cut.spec.num_shards(unit))):
                what = "parameters" if cut.is_params and k == 0 else "optimizer"
                kept[f"{what} on {tier or home.type}"] += size * dtype.itemsize
    check_memory(offload, kept, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def given_cuts(cuts: Mapping[str, Cut | Sequence[Cut]] | None) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of every leaf, by name."""
    found = {name: (x,) if isinstance(x, Cut) else x for name, x in (cuts or {}).items()}
    for name, x in found.items():
        if not isinstance(name, str) or not isinstance(x, list | tuple) or not all(isinstance(y, Cut) for y in x):
            raise TypeError(f"shard: cuts must be as zerofn.parallel.tensor returns them, got {told(x)} for {name!r}.")
    return {name: tuple(x) for name, x in found.items()}


def check_cuts(trees: Sequence[Any], policy: ShardPolicy) -> None:
    """Raise `ValueError` for a cut of a leaf that is not there or has another shape, for an axis that is not there, for
    slices that are not a partition, and for an axis of slices that no leaf is cut over.
    """
    shapes = {
        tree.name_of(p): tuple(x.shape) for t in trees for p, x in zip(*tree.flatten_with_path(t)[:2], strict=True)
    }
    for name, cuts in policy.cuts.items():
        if name not in shapes:
            near = nearest(name, shapes)
            raise ValueError(
                f"shard: cuts has {name!r}, and no parameter is called so{f'; {near[0]!r} is' if near else ''}."
            )
        for cut in cuts:
            axis, shape = policy.mesh.axis(cut.axis), shapes[name]
            if not 0 <= cut.dim < len(shape) or shape[cut.dim] != cut.size or len(cut.slices) != axis.size:
                raise ValueError(
                    f"shard: {name!r} has shape {list(shape)}, and its cut is of {cut.size} elements along dim "
                    f"{cut.dim} into {len(cut.slices)} slices, for the {axis.size} ranks of {cut.axis!r}."
                )
            if not makes_up(cut):
                raise ValueError(
                    f"shard: the slices {cut.slices} of {name!r} do not make up its {cut.size} elements along dim "
                    f"{cut.dim}, each in one of them; write zerofn.parallel.tensor(model, mesh) for cuts that do."
                )
    used = {cut.axis for cuts in policy.cuts.values() for cut in cuts}
    idle = [axis for axis in policy.mesh.slices if axis.name not in used]
    if idle:
        kind = idle[0].kind
        how = f"{kind.own_cuts}, or {kind.cuts} for a model of transformers" if kind.own_cuts else kind.cuts
        raise ValueError(
            f"shard: the {idle[0].size} ranks of axis {idle[0].name!r} would all do the same: no leaf is cut over it. "
            f"Give cuts={how}, or leave the axis out of the mesh."
        )


def public_dtype(dtypes: Iterable[torch.dtype], masters: set[torch.dtype], precision: Precision) -> torch.dtype:
    """Return the public dtype of a shard of leaves in `dtypes`: the master's if these are the parameters' dtypes, else
    their own.
    """
    own = functools.reduce(torch.promote_types, dtypes)
    return precision.param if precision.param is not None and own in masters else own


def storage_of(
    name: str, dtype: torch.dtype, is_params: bool, how: tuple[Codec, torch.dtype | None] | None, precision: Precision
) -> StorageSpec:
    """Return how a shard is stored, in any tier. `how`: the codec and dtype that a moment format asks for.

    Raises `ValueError` for a codec that cannot hold `dtype`.
    """
    if how is None:
        return StorageSpec(SPLIT if is_params and precision.splits(dtype) else PLAIN, dtype)
    codec, asked = how
    dtype = asked or dtype
    if codec.holds not in (None, dtype):
        held, given = (str(x).removeprefix("torch.") for x in (codec.holds, dtype))
        raise ValueError(
            f"shard: {name!r} is to be kept{codec.note}, which hold {held}, and the parameters are {given}; write "
            "precision='fp32', or leave moments out."
        )
    return StorageSpec(codec, dtype)


def place(layout: Layout, storages: list[StorageSpec], is_params: bool, policy: ShardPolicy) -> list[StorageSpec]:
    """Return the storages with the tier of each part: the first part of parameters in the parameters' tier, all else
    in the optimizer's. Nothing has no tier.
    """
    out, sizes = [], [u.size for u in layout.units]
    for storage, offload, size in zip(storages, of_units(policy.offload, sizes), sizes, strict=True):
        first = offload.params if is_params else offload.optimizer
        tiers = (first, *[offload.optimizer] * (storage.num_parts - 1))
        paths = tuple(offload.paths) if "nvme" in tiers else ()
        placement = Placement(tiers, paths, str(policy.home), offload.update) if any(tiers) and size else None
        out.append(replace(storage, placement=placement))
    return out


def moment_storage(state: Any) -> dict[tree.Path, tuple[Codec, torch.dtype | None]]:
    """Map the path of a field to the codec and dtype that the type of an optimizer's state declares for it."""
    return {
        (*path, type(x)._fields.index(field)): how
        for path, x in _nodes(state, lambda x: hasattr(type(x), "moment_storage")).items()
        for field, how in type(x).moment_storage.items()
    }


def _nodes(state: Any, wanted: Callable[[Any], bool]) -> dict[tree.Path, Any]:
    """Map paths to the outermost nodes that are `wanted`."""
    nodes, treedef = tree.flatten(state, is_leaf=wanted)
    return {path: x for path, x in zip(treedef.paths(), nodes, strict=True) if wanted(x)}


def description(
    stage: int, precision: Precision, partition: Partition, parts: list[ShardedPart | ReplicatedPart]
) -> str:
    """Describe what ranks must agree about, one line each, so that a difference can be shown."""
    lines = [f"stage {stage}{f', and over {partition.again.name}' if partition.again else ''}, {precision}"]
    for part in parts:
        if isinstance(part, ReplicatedPart):
            lines.append(f"replicated {tuple(part.value.shape)} {part.value.dtype}")
        else:
            lines += [
                f"{leaf.name} {list(leaf.whole)}{' cut' * bool(leaf.cuts)} {leaf.dtype} in unit {u.name!r}, "
                f"kept {storage.described}"
                for u, storage in zip(part.spec.layout.units, part.storages, strict=True)
                for leaf in u.leaves
            ]
    return "\n".join(lines)
