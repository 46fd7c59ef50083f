"""Links between ranks: what a transfer along an axis of a mesh takes, within a node and between nodes."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from ..comm.axes import BETWEEN
from ..comm.mesh import Mesh
from ..comm.mesh_groups import axes_along, crosses
from ..graph.node_kinds import argument, arguments, traits
from ..ops.registry import Lane
from .machine import Machine, hops

SENT = "sent"
INNER, OUTER = "within a node", "between nodes"


class Link(NamedTuple):
    """What a transfer between ranks uses.

    `lane`: transfers of one lane follow each other; each axis has its own. `cable`: what lanes share. `size`: the ranks
    that take part. `rate`: bytes per second that each sends; `latency`: seconds before the first byte.
    """

    lane: str
    cable: str
    size: int
    rate: float
    latency: float


def sends(node: Node) -> bool:
    """Return whether a node sends to other ranks."""
    moves = traits(node).moves
    return moves is not None and moves.lane is Lane.LINK


def is_message(node: Node) -> bool:
    """Return whether a node sends to one other rank, or receives from it."""
    return traits(node).collective in ("send", "receive")


def axis_of(node: Node, mesh: Mesh | None) -> str:
    """Return the axis of a mesh, or the axes, that a node sends along; "" for other ranks, and if it sends nothing."""
    if mesh is None or not sends(node):
        return ""
    return BETWEEN.join(axes_along(mesh, argument(node, "group")))


class Links:
    """The links of `world` ranks of a machine, which are numbered node by node. `mesh`: their grid, if there is one.

    An axis whose lines lie within nodes uses the link there. Of one with lines that cross nodes, ranks wait for the
    slowest: it uses the network. A message uses the link between its two ranks, and each channel has a lane.
    """

    def __init__(self, machine: Machine, world: int, mesh: Mesh | None = None) -> None:
        self._machine, self._world, self._mesh = machine, world, mesh
        self._several = mesh is not None and sum(axis.size > 1 for axis in mesh.axes) > 1
        self._known: dict[tuple[str, int], Link] = {}
        self._channels: dict[tuple[str, int, int], Link] = {}

    def of(self, node: Node) -> Link:
        """Return the link of a node that sends."""
        given = arguments(node)
        if self._mesh is not None and is_message(node):
            (name,), peer = axes_along(self._mesh, given["group"]), given["peer"]
            own = self._mesh.axis(name).rank
            return self.between(name, (own, peer) if traits(node).collective == "send" else (peer, own))
        size = given["size"] if "size" in given else len(given["sources"]) if "sources" in given else 2
        key = given["group"], size
        if key not in self._known:
            self._known[key] = self._link(*key)
        return self._known[key]

    def along(self, name: str) -> Link:
        """Return the link of transfers over all ranks of an axis of the mesh."""
        assert self._mesh is not None
        return self._over((name,), self._mesh.size(name))

    def between(self, name: str, ends: tuple[int, int]) -> Link:
        """Return the link of messages between two places along an axis of the mesh."""
        assert self._mesh is not None
        key, m = (name, *ends), self._machine
        if key not in self._channels:
            far = crosses(self._mesh, (name,), self._mesh.size(name), m.ranks, ends)
            lane = f"{SENT} along {name}, {ends[0]} to {ends[1]}"
            rate = min(m.link, m.network) if far else m.link
            self._channels[key] = Link(lane, OUTER if far else INNER, 2, rate, m.latency)
        return self._channels[key]

    def _link(self, group: str, size: int) -> Link:
        return self._over(axes_along(self._mesh, group) if self._mesh is not None else (), size)

    def _over(self, names: tuple[str, ...], size: int) -> Link:
        m = self._machine
        if self._mesh is None or not names:  # of which ranks it is among is not known
            size, far = self._world, self._world > m.ranks
        else:
            far = crosses(self._mesh, names, size, m.ranks)
        lane = f"{SENT} along {BETWEEN.join(names)}" if self._several and names else SENT
        rate = min(m.link, m.network) if far else m.link
        return Link(lane, OUTER if far else INNER, size, rate, m.latency * hops(size))
