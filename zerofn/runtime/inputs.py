"""The inputs of a compiled step: the signature that a capture depends on, and the tensors that its graph takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from .._torch_compat import storage_key
from ..memory import donation
from ..offload.drive_tensor import DriveTensor
from ..sharding.allocate import lacks_copy, refill
from ..sharding.sharded import is_sharded
from ..util.constants import PLAIN_TENSORS, NotConstant, constant_attributes, key_of


class Inputs(NamedTuple):
    """A graph's inputs: the state's tensors, the gathered copies of its parameters, the batch's tensors."""

    state: list[Tensor]
    copies: list[Tensor]
    batch: list[Tensor]

    def flat(self) -> list[Tensor]:
        """Return all of them, in the order of the graph's placeholders."""
        return [*self.state, *self.copies, *self.batch]


def collect(
    name: str, state_leaves: list[Any], batch_leaves: list[Any], copied: Iterable[int], donating: bool
) -> Inputs:
    """Return the tensors of a step's arguments. `copied`: positions of the state's leaves with gathered copies.

    With `donating` the step writes to the state's memory. Of entries of the state that share memory all but one are
    cloned, and so are batch entries that share memory with the state. Raises `RuntimeError` if an entry to clone is on
    a drive, or if an earlier step took over a tensor's memory.
    """
    state, in_copies = _state_tensors(state_leaves)
    donation.check(state)
    copies = [t for k in copied for t in state_leaves[k].copies]
    in_batch = [x for x in batch_leaves if is_sharded(x) or isinstance(x, Tensor)]
    batch = [t for x in in_batch for t in (x.parts if is_sharded(x) else (x,))]
    if donating:
        storages = list(map(storage_key, state))
        if len(set(storages)) < len(storages):
            _clone_shared_entries(name, state, storages, in_copies, state_leaves)
        batch = _clone_donated(name, batch, {*storages, *map(storage_key, copies)}, batch_leaves)
    return Inputs(state, copies, batch)


def _state_tensors(leaves: list[Any]) -> tuple[list[Tensor], list[int]]:
    """Return the state's tensors, and the positions of shards that are views of a gathered copy and must stay so."""
    out: list[Tensor] = []
    fixed: list[int] = []
    for x in leaves:
        if is_sharded(x):
            parts = x.parts
            if x.copies is not None:
                fixed += range(len(out), len(out) + len(parts))
            out += parts
        elif isinstance(x, Tensor):
            out.append(x)
    return out, fixed


def _clone_shared_entries(
    name: str, tensors: list[Tensor], storages: list[Any], fixed: list[int], leaves: list[Any]
) -> None:
    """Replace tensors that share memory with an earlier entry of the state, or with a `fixed` one, by clones."""
    seen = {storages[j] for j in fixed}
    handles = drive_handles(leaves)
    for j in sorted(set(range(len(tensors))) - set(fixed)):
        if storages[j] in seen:
            _refuse_drive(name, tensors[j], handles, "two entries of the state")
            tensors[j] = tensors[j].clone()
        seen.add(storages[j])


def _clone_donated(name: str, tensors: list[Tensor], donated: set[Any], leaves: list[Any]) -> list[Tensor]:
    """Return the batch's tensors, with clones of those in donated memory: the step may write there before it reads."""
    shared = [storage_key(x) in donated for x in tensors]
    if not any(shared):
        return tensors
    handles = drive_handles(leaves)
    for x in [x for x, is_shared in zip(tensors, shared, strict=True) if is_shared]:
        _refuse_drive(name, x, handles, "the state and the batch")
    return [x.clone() if is_shared else x for x, is_shared in zip(tensors, shared, strict=True)]


def _refuse_drive(name: str, x: Tensor, handles: dict[int, str], who: str) -> None:
    if id(x) in handles:
        raise RuntimeError(
            f"{name}: {who} share one region on a drive, {handles[id(x)]}, so an update of one would change both. Make "
            "a separate copy of one, by a compiled step that returns state.replace(extra=state.params)."
        )


def params_among(state_def: tree.PyTreeSpec) -> list[int]:
    """Return the positions of a state's parameters: the nodes that are named "params", or the state as a whole."""
    return [k for k, name in enumerate(tree.field_names(state_def)) if name.split(".")[-1] in ("", "params")]


def refill_copies(leaves: list[Any], positions: Iterable[int]) -> None:
    """Gather again the copies that an unflatten has dropped: the captured graph takes them as inputs."""
    for k in positions:
        if is_sharded(leaves[k]) and lacks_copy(leaves[k]):
            refill(leaves[k])


def drive_handles(leaves: Iterable[Any]) -> dict[int, str]:
    """Map the id of each drive handle among the leaves' tensors to the label of its region."""
    return {
        id(part.handle): part.region.label
        for x in leaves
        if is_sharded(x)
        for shard in x.stored
        for part in shard.parts
        if isinstance(part, DriveTensor)
    }


def resolved(batch: Any, leaves: list[Any], batch_def: tree.PyTreeSpec) -> tuple[Any, list[Any]]:
    """Return (a batch, its leaves) without conjugate and negative views, of which a capture sees the bits in some
    forms only. Raises `NotConstant` for a nested tensor, which has no shape.
    """
    special = [x for x in leaves if isinstance(x, Tensor) and (x.is_conj() or x.is_neg() or x.is_nested)]
    if not special:
        return batch, leaves
    if any(x.is_nested for x in special):
        raise NotConstant("a nested tensor")
    leaves = [x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x for x in leaves]
    return tree.unflatten(batch_def, leaves), leaves


def signature_of(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """Return the properties of leaves that a capture depends on. Raises `NotConstant` for anything but a leaf."""
    return tuple(map(_signature_of_leaf, leaves))


def seen_of(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """Return what Python sees of the batch's tensors besides. Those of the state are plain ones in every step."""
    return tuple(
        [
            (type(x), x.requires_grad, (constant_attributes(x), tuple(x.__dict__)) if x.__dict__ else ())
            for x in leaves
            if isinstance(x, Tensor)
        ]
    )


def _signature_of_leaf(x: Any) -> Any:
    if is_sharded(x):
        return x.spec.signature, x.storages, tuple([t.device for t in x.parts])
    if type(x) in PLAIN_TENSORS:
        layout = x.layout
        return x.shape, x.dtype, x.device, x.stride() if layout is torch.strided else layout, x.is_conj()
    return key_of(x)
