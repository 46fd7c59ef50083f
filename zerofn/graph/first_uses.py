"""The cut points of a model in the order of their use, with what the stages of a pipeline can be balanced by."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch.fx import Node

from .boundaries import holders, reads_of
from .region import Region
from .stages import Stages


class CutPoint(NamedTuple):
    """Parameters that a stage of a pipeline may begin with, and all that follows up to the next. `name`: of the unit.
    `leaves`: those whose first use is here. `forward`, `backward`: the operations; what is computed on every stage that
    reads it is not among them. `sent`, `returned`: the bytes that cross the boundary before it, and back.
    """

    name: str
    leaves: tuple[str, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    sent: int
    returned: int


def first_uses(region: Region, unit_of: Callable[[str], str]) -> list[CutPoint]:
    """Return the cut points of a body in the order of their first use. `unit_of`: the unit of a parameter."""
    units: dict[str, list[str]] = {}
    for _, name in reads_of(region):
        unit = units.setdefault(unit_of(name), [])
        unit += [name] if name not in unit else []
    stages = Stages(region, holders(region, [leaves[0] for leaves in [*units.values()][1:]]), len(units))
    found = []
    for s, (name, leaves) in enumerate(units.items()):
        across = [x for x in stages.crossings if min(x.source, x.target) < s <= max(x.source, x.target)]
        sent, returned = ({x.value for x in across if x.backward == back} for back in (False, True))
        forward, backward = (
            tuple(x for x in each if stages.at.get(x) == s) for each in (region.forward, region.backward)
        )
        bytes_sent, bytes_returned = (sum(x.meta["val"].nbytes for x in values) for values in (sent, returned))
        found.append(CutPoint(name, tuple(leaves), forward, backward, bytes_sent, bytes_returned))
    return found
