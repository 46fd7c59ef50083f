"""What becomes of every leaf of a state, decided before anything is allocated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..comm.mesh import Mesh
from ..offload.policy import of_units
from ..util.errors import nearest
from .codecs import PLAIN, SIGNED, SPLIT, UNSIGNED, Away, Kind
from .layout import Layout, LeafInfo, make_layout
from .precision import Precision, resolve
from .sharded import Spec
from .state_tree import is_state, layout_like, params_of, signature_of, sublayouts

STAGES = (0, 1, 2, 3)


_ON_HOST = ("step", "rng")  # of a TrainState: they seed host-side draws, and would otherwise cost a device sync


def check_stage(stage: Any) -> None:
    """Raise `ValueError` for a stage that is not there."""
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
    kinds: list[Kind]  # of the pieces
    is_params: bool


@dataclass(frozen=True)
class ReplicatedPart:
    """A leaf to be replicated."""

    first: int
    value: Tensor
    on_host: bool


@dataclass(frozen=True)
class ShardOptions:
    """What `shard` was given, and what follows from it."""

    stage: int
    mesh: Mesh
    precision: Any  # a name or None until `checked`
    unit: Callable[[str], str] | None
    device: Any
    offload: Any = None  # as given until it is resolved
    home: Any = None  # where the model computes

    def checked(self) -> ShardOptions:
        """The same with precision and device resolved; raises for what is unknown."""
        check_stage(self.stage)
        return replace(self, precision=resolve(self.precision), device=self._numbered())

    def _numbered(self) -> torch.device | None:
        """The device with its number. Raises `ValueError` for one that is not there."""
        try:
            return None if self.device is None else torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"shard: device={self.device!r} cannot be had: {error}") from None

    def parts(self, state: Any) -> tuple[list[ShardedPart | ReplicatedPart], tree.PyTreeSpec]:
        """What becomes of every subtree, in the state's order."""
        layouts: list[tuple[Layout, bool]] = []
        states = [x for x in tree.leaves(state, is_leaf=is_state) if is_state(x)]
        for x in states:
            layout = self._layout(x)
            layouts.append((layout, True))
        known = {}
        masters = {x.dtype for s in states for x in tree.leaves(params_of(s)) if x.is_floating_point()}
        for layout, _ in layouts:
            known.update({signature_of(part): part for part in sublayouts(layout, self._spec(layout))})
        owners = {id(params_of(x)) for x in states}

        def layout_of(x: Any) -> Layout | None:
            return None if isinstance(x, Tensor) else layout_like(x, known)

        formats = _formats(state)
        nodes, treedef = tree.flatten(state, is_leaf=lambda x: layout_of(x) is not None)
        parts: list[ShardedPart | ReplicatedPart] = []
        first = 0
        for name, node in zip(tree.field_names(treedef), nodes, strict=True):
            like, last = layout_of(node), name.rpartition(".")[2]
            if like is None:
                parts.append(ReplicatedPart(first, node, last in _ON_HOST))
                first += 1
            else:
                is_params = id(node) in owners and last == "params"
                leaves = tree.leaves(node)
                dtypes = [self._dtype([leaves[x.index].dtype for x in u.leaves], masters) for u in like.units]
                kinds = [self._kind(name, dtype, is_params, formats.get(id(node))) for dtype in dtypes]
                kinds = self._offloaded(like, kinds, is_params)
                spec = replace(self._spec(like), halves=is_params)
                parts.append(ShardedPart(name, spec, first, leaves[0].device if leaves else None, kinds, is_params))
                first += len(leaves)
        return parts, treedef

    def _layout(self, state: Any) -> Layout:
        params = params_of(state)
        leaves = tree.leaves(params)
        if not leaves or isinstance(params, Tensor):
            raise ValueError(
                "shard: 'params' must be a container with at least one tensor, such as "
                f"dict(model.named_parameters()); got {type(params).__name__}."
            )
        frozen, label = getattr(state, "frozen", None), getattr(getattr(state, "tx", None), "label", None)
        return make_layout(
            params,
            self.mesh.axis().size,
            axis=self.mesh.axis().name,
            unit=self.unit,
            dtype=self.precision.param,
            trainable=(lambda name: not frozen(name)) if frozen else lambda name: True,
            label=(lambda name, leaf: label(LeafInfo(name, tuple(leaf.shape), leaf.dtype))) if label else lambda *_: (),
        )

    def _spec(self, layout: Layout) -> Spec:
        return Spec(layout, self.mesh.axis(), self.stage, self.precision)

    def _dtype(self, dtypes: list[torch.dtype], masters: set[torch.dtype]) -> torch.dtype:
        """The dtype of a piece: the master's for what has a dtype that parameters had, else its own."""
        own = functools.reduce(torch.promote_types, dtypes)
        return self.precision.param if self.precision.param is not None and own in masters else own

    def _kind(self, name: str, dtype: torch.dtype, is_params: bool, how: str | None) -> Kind:
        if how == "bf16":
            return Kind(PLAIN, torch.bfloat16)
        if how is not None and dtype != torch.float32:
            raise ValueError(
                f"shard: {name!r} is to be kept in 8-bit blocks, which hold float32, and the parameters "
                f"are {str(dtype).removeprefix('torch.')}; write precision='fp32', or leave moments out."
            )
        if how is not None:
            return Kind(SIGNED if how == "signed" else UNSIGNED, dtype)
        return Kind(SPLIT if is_params and self.precision.splits(dtype) else PLAIN, dtype)

    def _offloaded(self, layout: Layout, kinds: list[Kind], is_params: bool) -> list[Kind]:
        """The same with where each unit is to lie."""
        out = []
        for kind, offload in zip(kinds, of_units(self.offload, [u.size for u in layout.units]), strict=True):
            first = offload.params if is_params else offload.optimizer
            tiers = (first, *[offload.optimizer] * (kind.num_parts - 1))
            paths = tuple(offload.paths) if "nvme" in tiers else ()
            out.append(replace(kind, away=Away(tiers, paths, str(self.home), offload.update)) if any(tiers) else kind)
        return out


def _formats(state: Any) -> dict[int, str]:
    """How subtrees of optimizer states whose types say so are kept, by id."""
    found = tree.leaves(state, is_leaf=lambda x: hasattr(type(x), "kept"))
    return {id(getattr(x, name)): how for x in found for name, how in getattr(type(x), "kept", {}).items()}


def description(stage: int, precision: Precision, parts: list[ShardedPart | ReplicatedPart]) -> str:
    """What ranks must agree about, a line each, so that a difference can be shown."""
    lines = [f"stage {stage}, {precision}"]
    for part in parts:
        if isinstance(part, ReplicatedPart):
            lines.append(f"replicated {tuple(part.value.shape)} {part.value.dtype}")
        else:
            lines += [
                f"{leaf.name} {list(leaf.shape)} {leaf.dtype} in unit {u.name!r}, kept {kind.described}"
                for u, kind in zip(part.spec.layout.units, part.kinds, strict=True)
                for leaf in u.leaves
            ]
    return "\n".join(lines)
