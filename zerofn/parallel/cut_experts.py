"""Modules of experts in which each rank has a slice of every expert, called as transformers calls experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..collectives.maps import AllGather, Linear, Psum, ReduceScatter, Vary
from ..comm.mesh import Axis
from ..geometry.cuts import Cut
from ..random.mode import draw_by_place, places_kept


@dataclass(frozen=True)
class CutExperts:
    """The forward of a module of experts in which this rank has a slice of every expert.

    `forward`: the module's own forward; its results are partial sums over the ranks of `axis`. `cuts`: the model's
    cuts. `in_parts`: True if ranks have different tokens, False if all ranks have the same tokens.
    """

    forward: Callable[..., Any]
    axis: Axis
    cuts: Mapping[str, Cut]
    in_parts: bool = False

    def __call__(self, hidden: Tensor, *routing: Any) -> Tensor:
        """Compute as whole experts do: tokens [S, d], their experts and weights [S, k] -> [S, d]. Experts that are
        called with tokens alone, sorted by expert, leave as many.
        """
        before: Any
        behind: Any
        if self.in_parts:
            if len(routing) < 2:
                raise ValueError(
                    "these experts expect tokens sorted by expert, but in layers that are 'sequence_parallel' each "
                    "rank sorts only its own tokens. Leave the experts out of the plan."
                )
            before, behind = AllGather(self.axis, dim=-2), ReduceScatter(self.axis, dim=-2)
        else:
            before, behind = Vary(self.axis), Psum(self.axis)
        given = [Linear.apply(before, x)[0] if self._moves(x) else x for x in (hidden, *routing[:2])]
        with places_kept():
            draw_by_place((self.axis.rank, self.axis.name))
            y = self.forward(*given, *routing[2:])
        return Linear.apply(behind, y)[0]

    def _moves(self, x: Any) -> bool:
        return isinstance(x, Tensor) and (self.in_parts or x.is_floating_point())
