"""What a compiled step is given: what of it a capture depends on, and copies that must be there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import tree
from ..offload.drive_tensor import Spilled
from ..sharding.allocate import lacks_copy, refill
from ..sharding.sharded import is_sharded


def params_among(state_def: tree.PyTreeSpec) -> list[int]:
    """The nodes of a state that are parameters: named so, or the whole of what was given."""
    return [k for k, name in enumerate(tree.field_names(state_def)) if name.split(".")[-1] in ("", "params")]


def refill_copies(leaves: list[Any], positions: Iterable[int]) -> None:
    """Gather the copies that an unflatten has dropped, so that the graph always finds what it was captured with."""
    for k in positions:
        if is_sharded(leaves[k]) and lacks_copy(leaves[k]):
            refill(leaves[k])


def drive_tickets(leaves: Iterable[Any]) -> dict[int, str]:
    """The tickets among the tensors of leaves, by identity -> what lies there."""
    return {
        id(part.ticket): part.region.label
        for x in leaves
        if is_sharded(x)
        for piece in x.stored
        for part in piece.parts
        if isinstance(part, Spilled)
    }


def signature_of_leaf(x: Any) -> Any:
    """What of a leaf a capture depends on."""
    if is_sharded(x):
        return x.spec.signature, x.kinds, tuple([t.device for t in x.parts])
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.stride()
    return type(x), x
