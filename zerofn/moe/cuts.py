"""Which experts a rank of the mesh's axis "expert" has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # noqa: F401  (for the example)
from torch import Tensor

from .. import tree
from ..comm.axes import EXPERT
from ..comm.mesh import Mesh
from ..geometry.cuts import Cut, equal
from ..util.arguments import checked


def _of_experts(name: str) -> bool:
    return "experts" in name.split(".")


@checked()
def cuts(params: Any, mesh: Mesh, experts: Callable[[str], bool] = _of_experts) -> dict[str, Cut]:
    """Divide experts over the mesh's axis "expert"; return the cuts, for `shard`.

        mesh = zerofn.Mesh.make(data=-1, expert=2)
        state = zerofn.shard(init_state, mesh=mesh, cuts=zerofn.moe.cuts(params, mesh))

    `params`: the parameters; only their shapes are read, so they may be on "meta". `experts`: leaf name -> whether it
    has one row for each expert [E, ...]; by default leaves below an entry "experts". In a loss function, `layer(...,
    axis="expert")` then receives [E / size, ...].

    Raises `ValueError` for a mesh without the axis, if no leaf belongs to experts, and for a number of experts that the
    ranks do not divide.

    >>> params = {"experts": {"up": torch.zeros(4, 8, 8)}, "gate": torch.zeros(4, 8)}
    >>> cuts(params, Mesh.make(expert=1))
    {}
    """
    axis = mesh.axis(EXPERT)
    paths, leaves, _ = tree.flatten_with_path(params)
    found = {name: x for name, x in zip(map(tree.name_of, paths), leaves, strict=True) if experts(name)}
    if not found:
        raise ValueError(
            "moe.cuts: no leaf belongs to experts. Put the experts' leaves below an entry 'experts', or select them: "
            "experts=lambda name: ..."
        )
    for name, x in found.items():
        if not isinstance(x, Tensor) or not x.dim() or not x.shape[0] or x.shape[0] % axis.size:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"moe.cuts: {name!r} has shape {shape}, and {axis.size} ranks along {EXPERT!r} cannot divide its first "
                f"dim equally. Make the number of experts a multiple of {axis.size}."
            )
    if axis.size == 1:
        return {}
    return {name: equal(EXPERT, 0, x.shape[0], axis.size) for name, x in found.items()}
