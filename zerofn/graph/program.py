"""The captured step: one FX graph of local operations, and the meaning of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import tree
from ..comm.mesh import Axis
from ..sharding.sharded import Sharded, Spec, is_sharded
from ..sharding.storage import StorageSpec, Stored
from .buffers import BufferSpec, DriveSpec


@dataclass(frozen=True)
class Cut:
    """The static part of a `Sharded`: its spec, and the storage of its shards."""

    spec: Spec
    storages: tuple[StorageSpec, ...]

    def shards(self, tensors: Iterator[Tensor]) -> list[Stored]:
        """Return its shards, made of the next tensors."""
        bounds = [self.spec.bounds(unit) for unit in self.spec.layout.units]
        return [storage.of(tensors, stop - start) for storage, (start, stop) in zip(self.storages, bounds, strict=True)]


@dataclass(frozen=True)
class Flat:
    """A tree as a flat list of tensors, with a `Sharded` as its stored parts. `spread` is the inverse.

    Leaves that are no tensors are stored here.
    """

    treedef: tree.PyTreeSpec
    nodes: tuple[Any, ...]  # for each node: a Cut, None for a tensor, or (value,) for another leaf
    names: tuple[str, ...]  # per tensor: its key path

    @staticmethod
    def of(value: Any) -> tuple[Flat, list[Tensor]]:
        """Return (structure, tensors in order)."""
        paths, leaves, treedef = tree.flatten_with_path(value, is_leaf=is_sharded)
        tensors: list[Tensor] = []
        nodes: list[Any] = []
        names: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            name = tree.name_of(path)
            if is_sharded(leaf):
                nodes.append(Cut(leaf.spec, tuple(x.storage for x in leaf.stored)))
                tensors.extend(leaf.parts)
                names.extend(
                    f"{name}[{u.name!r}]{part.suffix}"
                    for u, x in zip(leaf.layout.units, leaf.stored, strict=True)
                    for part in x.storage.codec.parts
                )
            elif isinstance(leaf, Tensor):
                nodes.append(None)
                tensors.append(leaf)
                names.append(name)
            else:
                nodes.append((leaf,))
        return Flat(treedef, tuple(nodes), tuple(names)), tensors

    def keep(self, value: Any, old: Any, decoded: dict[int, tuple[Tensor, Stored]]) -> Any:
        """Return a tree of this structure with shards stored as those of `old`, in their places on drives.

        `decoded`: id of a shard -> (the shard, what it was decoded from). A shard that the step returns
        unchanged, in its own place, is not encoded again. In another place it is: that place may have another
        storage, or both may be written later.
        """

        def kept(x: Any, before: Any) -> Any:
            if not is_sharded(x):
                return x
            return Sharded(before.spec, [shard_kept(*pair) for pair in zip(x.shards, before.stored, strict=True)])

        def shard_kept(shard: Tensor, was: Stored) -> Stored:
            source = decoded[id(shard)][1] if id(shard) in decoded else None
            return was if source is was else was.storage.keep(shard if source is None else shard.clone(), was)

        leaves, treedef = tree.flatten(value, is_leaf=is_sharded)
        before = tree.leaves(old, is_leaf=is_sharded)
        return tree.unflatten(treedef, [kept(x, was) for x, was in zip(leaves, before, strict=True)])

    @property
    def baked(self) -> dict[str, Any]:
        """Map key paths to the values of leaves that are no tensors: a graph is captured for these values."""
        paths = self.treedef.paths()
        return {tree.name_of(p): x[0] for p, x in zip(paths, self.nodes, strict=True) if isinstance(x, tuple)}

    def spread(self, tensors: Any, full: dict[int, list[Tensor]] | None = None, pending: bool = False) -> Any:
        """Return the tree. `full[k]`: the gathered copy of the k-th node, perhaps still `pending`."""
        fresh = iter(tensors)
        leaves: list[Any] = []
        for k, node in enumerate(self.nodes):
            if node is None:
                leaves.append(next(fresh))
            elif isinstance(node, tuple):
                leaves.append(node[0])
            else:
                leaves.append(Sharded(node.spec, node.shards(fresh), None if full is None else full.get(k)))
                if pending:
                    leaves[-1].expect_copies()
        return tree.unflatten(self.treedef, leaves)


def cached(value: Any) -> dict[int, list[Tensor]]:
    """Map node positions to gathered copies, perhaps still in flight, for the nodes of a tree that have one (stages 1
    and 2).
    """
    leaves = tree.leaves(value, is_leaf=is_sharded)
    return {k: list(x.copies) for k, x in enumerate(leaves) if is_sharded(x) and x.copies is not None}


@dataclass
class Program:
    """One captured step.

    Placeholders are, in order: the state's tensors, the gathered copies, the batch's tensors. Outputs are the new
    state's tensors (none in an evaluation step; after `donate` those in `kept`), then aux's.
    """

    gm: GraphModule
    state: Flat
    batch: Flat
    new_state: Flat | None
    aux: Flat
    num_state: int
    num_new: int
    # Position of a node of the state -> [first, stop) among the gathered copies.
    full: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: list[int] = field(
        default_factory=list
    )  # with donation: the new state tensors that it returns; the others are in place
    timings: dict[str, float] = field(default_factory=dict)
    name: str = "step"
    buffers: list[BufferSpec] = field(default_factory=list)  # nodes have places in these
    drive_space: list[DriveSpec] = field(default_factory=list)  # for gradients that wait on drives, by handles
    budget: int | None = None  # bytes that the step may take on the device

    def inside(self, body: GraphModule) -> Program:
        """Return the program with a loop's body in place of the step's graph. Only `gm` describes the body: its
        inputs and outputs are the loop's.
        """
        return replace(self, gm=body)

    @property
    def placeholders(self) -> list[Node]:
        """The graph's inputs."""
        return [n for n in self.gm.graph.nodes if n.op == "placeholder"]

    @property
    def batch_placeholders(self) -> list[Node]:
        """The last placeholders, for the batch's tensors."""
        nodes = self.placeholders
        return nodes[len(nodes) - len(self.batch.names) :]

    def describe(self) -> dict[str, str]:
        """Return entry -> shape and dtype, for every input."""
        pairs = [
            *zip(self.placeholders, self.state.names, strict=False),
            *zip(self.batch_placeholders, self.batch.names, strict=True),
        ]
        out = {
            f"{'batch' if k >= len(self.state.names) else 'state'}.{name}": _shape(node)
            for k, (node, name) in enumerate(pairs)
        }
        return {**out, **{f"batch.{name}": repr(value) for name, value in self.batch.baked.items()}}

    def copies(self) -> list[tuple[Node, Node, bool]]:
        """Return (shard, gathered copy, whether the shard is a view of it) for every unit that has a copy."""
        out, at = [], 0
        nodes = self.placeholders
        for k, cut in enumerate(self.state.nodes):
            first, _ = self.full.get(k, (None, None))
            for i, storage in enumerate(cut.storages if isinstance(cut, Cut) else ()):
                if first is not None:
                    whole = nodes[self.num_state + first + i]
                    out.append((nodes[at], whole, storage.lies_in(whole.meta["val"].dtype)))
                at += storage.num_parts
            at += cut is None
        return out

    @property
    def axis(self) -> Axis | None:
        """The axis that the state is sharded over, None for a plain state."""
        return next((x.spec.axis for x in self.state.nodes if isinstance(x, Cut)), None)

    @property
    def owners(self) -> list[tuple[Any, Any]]:
        """For each state placeholder: (spec, unit), or (None, None) for a replicated tensor."""
        return owners(self.state.nodes)

    @property
    def output(self) -> Node:
        """The graph's output node."""
        return next(iter(reversed(self.gm.graph.nodes)))


def owners(nodes: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """For each tensor of `Flat.nodes`: (spec, unit), or (None, None) if it is no shard."""
    out: list[tuple[Any, Any]] = []
    for cut in nodes:
        if cut is None:
            out.append((None, None))
        elif isinstance(cut, Cut):
            for unit, storage in zip(cut.spec.layout.units, cut.storages, strict=True):
                out += [(cut.spec, unit)] * storage.num_parts
    return out


def tensor_of(node: Node) -> torch.Tensor | None:
    """Return the fake tensor of a node's value: shape, dtype, device."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two values have equal shape, strides, dtype and device, so that one can replace the other."""
    return (
        a is not None
        and b is not None
        and ((a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device))
    )


def _shape(node: Node) -> str:
    value = tensor_of(node)
    return "?" if value is None else f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
