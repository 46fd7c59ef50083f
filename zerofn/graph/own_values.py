"""Values of a step that differ from rank to rank: they depend on a rank's own batch, random key or place.

A loss and its gradients do, until they are reduced, and what layers that are cut over ranks compute with their slices.
Shards differ by design and count as parts of one whole, so what is computed from shards alone is not a rank's own. On a
mesh a value may differ along some axes and not along others: a transfer along an axis makes it equal along that one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..comm.axes import BETWEEN, kind_of
from ..comm.mesh import Mesh
from ..ops.registry import OnShard
from .alias import sources, writes
from .nested import Call, call_of
from .node_kinds import argument, makes_one, traits
from .program import Program, owners, tensor_of

ops = torch.ops.zerofn
# What a difference between ranks comes from (an input of the step, a value that other ranks compute in another way, or
# words for keys and places), and the axis along which ranks differ. Empty: no difference.
Origins = frozenset[tuple["Cause", str]]
_NONE: Origins = frozenset()
_NO_AXES: frozenset[str] = frozenset()
_WORDS = {
    "fold_in_rank": "random key",
    "exchange": "place in all_to_all",
    "exchange_parts": "place in all_to_all",
    "reduce_scatter": "part of a reduce_scatter",
}


class SliceOf(NamedTuple):
    """A cause of a difference: along `axis` a rank has its slice of something. `of`: the leaf or the module, or ""."""

    axis: str
    of: str

    def __str__(self) -> str:
        kind = kind_of(self.axis)
        return f"slice of {self.of}" if self.of and kind.partial else kind.slices or "use of what it was told to vary"


Cause = Node | str | SliceOf


class OwnValues(NamedTuple):
    """`results`: value -> its origins, at the end. `read`: node -> the inputs that were a rank's own when it read them,
    with their origins. Both leave out what is the same everywhere, and include bodies.
    """

    results: dict[Node, Origins]
    read: dict[Node, dict[Node, Origins]]


def own_values(
    program: Program, same: frozenset[Node] = frozenset(), apart: Mapping[Node, frozenset[str]] | None = None
) -> OwnValues:
    """Return the values of a step that differ from rank to rank. `same`: batch entries that do not. `apart`: values
    that other ranks compute in another way, with the axes along which these ranks are; see `expressions`.
    """
    mesh = program.mesh
    if mesh is None:
        return OwnValues({}, {})
    pairs = zip(program.batch_placeholders, owners(program.batch.nodes), strict=True)
    entries = [x for x, (spec, _) in pairs if spec is None and x not in same]
    entries += [x for x, (spec, _) in zip(program.placeholders, program.owners, strict=False) if spec and spec.of_ranks]
    given: dict[Node, Origins] = {x: frozenset((x, axis) for axis in _differing(mesh)) for x in entries}
    found = OwnValues({}, {})
    _Follower(mesh, found, apart or {}).follow(program.gm.graph, given)
    return found


def axes_of_transfer(mesh: Mesh, node: Node) -> frozenset[str]:
    """Return the axes of the mesh that a transfer or a mark goes over: none for a group of another mesh."""
    group = argument(node, "group") if traits(node).collective else None
    if group is None:
        named = frozenset(filter(None, str(argument(node, "axis")).split(BETWEEN)))
        # Axes of one rank have no transfers: what is equal along one is marked by the name of any of them.
        of_batch = any(kind_of(name).batch for name in named)
        return named.union(x.name for x in mesh.axes if of_batch and x.size == 1 and x.kind.batch)
    alone = frozenset(x.name for x in mesh.axes if x.size == 1 and x.kind.same_batch)
    return mesh.names_of_groups.get(group, _NO_AXES) - alone


def _differing(mesh: Mesh) -> frozenset[str]:
    """Return the axes along which ranks have batches of their own; on one rank, those along which others would."""
    several = frozenset(name for name in mesh.batch_names if mesh.size(name) > 1)
    return several or frozenset(mesh.batch_names)


def _drawn_by(node: Node) -> Any:
    """Return the key by which a transfer draws codes: in its sums they differ from rank to rank as their values do."""
    return argument(node, "key") if traits(node).collective == "scatter" else None


class _Follower:
    """Follows origins through the graphs of a step. `found`: gets what it finds. `apart`: see `own_values`."""

    def __init__(self, mesh: Mesh, found: OwnValues, apart: Mapping[Node, frozenset[str]]) -> None:
        self._mesh, self._found, self._apart = mesh, found, apart

    def follow(self, graph: Graph, given: dict[Node, Origins]) -> dict[Node, Origins]:
        """Add a graph's values. Return the origins of its memory at the end, which includes what was written."""
        memory, viewed = self._memory(graph)
        origins = dict(given)  # of memory, by the node that made it
        of_bodies: dict[Node, list[Origins]] = {}

        def of(x: Node) -> Origins:
            at: Node | None = memory[x]
            found = _NONE
            while at is not None:
                found, at = found | origins.get(at, _NONE), viewed.get(at)
            return found

        for node in graph.nodes:
            read = {x: mine for x in node.all_input_nodes if x is not _drawn_by(node) and (mine := of(x))}
            if read:
                self._found.read[node] = read
            if call := call_of(node):
                of_bodies[node] = self._through(call, origins, memory, of)
                continue
            if node.target is operator.getitem and node.args[0] in of_bodies:
                mine = _NONE if _is_empty(node) else of_bodies[node.args[0]][node.args[1]]
            else:
                mine = self._of_result(node, _NONE.union(*read.values()))
                if node in self._apart:
                    mine |= self._caused(node, self._apart[node] - self._own_before(node, read))
            if mine:
                origins[memory[node]] = origins.get(memory[node], _NONE) | mine
                for at in map(memory.get, writes(node)):
                    while at is not None:
                        origins[at], at = origins.get(at, _NONE) | mine, viewed.get(at)
        for node in graph.nodes:
            if mine := of(node):
                self._found.results[node] = mine
        return origins

    def _memory(self, graph: Graph) -> tuple[dict[Node, Node], dict[Node, Node]]:
        """Return (every node -> the node that made its memory, such a node -> the memory that it is a view of). What a
        transfer or a mark makes of a value counts as new, and so does a view that other ranks take in another way.
        """
        found: dict[Node, Node] = {}
        viewed: dict[Node, Node] = {}
        for node in graph.nodes:
            source = sources(node)
            known = traits(node)
            anew = known.replicated or known.rank_dependent or known.on_shard is OnShard.MAKES
            found[node] = found[source[0]] if source and not anew else node
            if source and not anew and node in self._apart:
                found[node], viewed[node] = node, found[source[0]]
        return found, viewed

    def _of_result(self, node: Node, read: Origins) -> Origins:
        """Return the origins of a node's result. `read`: those of its inputs."""
        known = traits(node)
        if known.on_shard is OnShard.SHAPE or _is_empty(node):
            return _NONE
        if makes_one(node):
            axes = self._axes(node)
            left = frozenset((cause, axis) for cause, axis in read if axis not in axes)
            cut = known.collective == "scatter" and not argument(node, "unit")
            return left | self._caused(_WORDS["reduce_scatter"], axes) if cut else left
        if known.on_shard is OnShard.MAKES and not known.cuts:
            return _NONE
        if known.rank_dependent:
            if node.target is ops.as_slice.default:
                cause = SliceOf(str(argument(node, "axis")), str(argument(node, "of")))
                return read | self._caused(cause, self._axes(node))
            word = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
            named = node.target is ops.fold_in_rank.default and argument(node, "axis")
            axes = self._axes(node) if known.collective or named else _differing(self._mesh)
            return read | self._caused(_WORDS[word], axes)
        return read

    @staticmethod
    def _own_before(node: Node, read: Mapping[Node, Origins]) -> frozenset[str]:
        """Return the axes along which what a node reads differs already."""
        shape = traits(node).on_shard is OnShard.SHAPE
        return _NO_AXES if shape else frozenset(axis for origins in read.values() for _, axis in origins)

    @staticmethod
    def _caused(cause: Cause, axes: Iterable[str]) -> Origins:
        return frozenset((cause, axis) for axis in axes)

    def _axes(self, node: Node) -> frozenset[str]:
        return axes_of_transfer(self._mesh, node)

    def _through(
        self, call: Call, origins: dict[Node, Origins], memory: dict[Node, Node], of: Callable[[Node], Origins]
    ) -> list[Origins]:
        """Return the origins of a body's results, and add those of what it writes to `origins`."""
        inside = {x: of(outer) for x, outer in call.given.items()}
        while True:  # the next round reads what a round writes
            after = self.follow(call.body.graph, inside)
            grown = {x: after.get(x, _NONE) for x in call.given}
            if grown == inside:
                break
            inside = grown
        for x, outer in call.given.items():
            if inside[x]:
                origins[memory[outer]] = origins.get(memory[outer], _NONE) | inside[x]
        return [self._found.results.get(x, _NONE) for x in call.results]


def _is_empty(node: Node) -> bool:
    """Return whether a value is a tensor without elements, which differs in none of them."""
    value = tensor_of(node)
    return value is not None and not value.numel()
