"""The captured step: one FX graph of local operations, and the meaning of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import tree
from ..comm.mesh import Mesh
from ..schedules import Schedule
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.spec import Spec
from ..sharding.storage import StorageSpec, Stored
from .buffers import BufferSpec, DriveSpec
from .same_graph import Outline


@dataclass(frozen=True)
class ShardedInput:
    """What a graph is captured for in a `Sharded`: its spec, and how its shards are stored."""

    spec: Spec
    storages: tuple[StorageSpec, ...]

    def shards(self, tensors: Iterator[Tensor]) -> list[Stored]:
        """Return this rank's stored shards, made of the next of `tensors`."""
        bounds = [self.spec.bounds(unit) for unit in self.spec.layout.units]
        return [storage.of(tensors, stop - start) for storage, (start, stop) in zip(self.storages, bounds, strict=True)]


@dataclass(frozen=True)
class FlatTree:
    """The structure of a tree whose tensors are in a flat list: `of` makes both, and `spread` is the inverse.

    A `Sharded` is one node; its tensors are the parts that store its shards.
    """

    treedef: tree.PyTreeSpec
    nodes: tuple[Any, ...]  # for each node: a `ShardedInput`, None for a tensor, (value,) for another leaf
    names: tuple[str, ...]  # for each tensor: its key path

    @staticmethod
    def of(value: Any) -> tuple[FlatTree, list[Tensor]]:
        """Return a tree's structure and its tensors, in order."""
        paths, leaves, treedef = tree.flatten_with_path(value, is_leaf=is_sharded)
        tensors: list[Tensor] = []
        nodes: list[Any] = []
        names: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            name = tree.name_of(path)
            if is_sharded(leaf):
                nodes.append(ShardedInput(leaf.spec, tuple(x.storage for x in leaf.stored)))
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
        return FlatTree(treedef, tuple(nodes), tuple(names)), tensors

    def encode(self, value: Any, old: Any, decoded: dict[int, tuple[Tensor, Stored]]) -> Any:
        """Return the tree `value` with its shards encoded as those of `old` are, in the same places on drives.

        `decoded`: id of a shard -> (the shard, its stored form). A shard that the step returns unchanged in the same
        entry is not encoded again. In another entry a copy of it is encoded: that entry may be stored differently, and
        passes may write to both.
        """

        def encode_node(x: Any, before: Any) -> Any:
            if not is_sharded(x):
                return x
            return Sharded(before.spec, [encode_shard(*pair) for pair in zip(x.shards, before.stored, strict=True)])

        def encode_shard(shard: Tensor, before: Stored) -> Stored:
            source = decoded[id(shard)][1] if id(shard) in decoded else None
            return (
                before if source is before else before.storage.keep(shard if source is None else shard.clone(), before)
            )

        leaves, treedef = tree.flatten(value, is_leaf=is_sharded)
        old_leaves = tree.leaves(old, is_leaf=is_sharded)
        return tree.unflatten(treedef, [encode_node(x, before) for x, before in zip(leaves, old_leaves, strict=True)])

    @property
    def baked(self) -> dict[str, Any]:
        """Map key paths to the leaves that are not tensors. A graph is captured for their values."""
        paths = self.treedef.paths()
        return {tree.name_of(p): x[0] for p, x in zip(paths, self.nodes, strict=True) if isinstance(x, tuple)}

    def spread(self, tensors: Any, full: dict[int, list[Tensor]] | None = None, pending: bool = False) -> Any:
        """Return the tree with these tensors.

        `full`: position of a node -> its gathered copy. `pending`: the all-gathers into these copies may not have
        finished.
        """
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
    """Map the positions of a tree's `Sharded` nodes to their gathered copies; nodes without one are left out.

    At stages 1 and 2, and with hpZ, parameters have a gathered copy. Its all-gather may not have finished.
    """
    leaves = tree.leaves(value, is_leaf=is_sharded)
    return {k: list(x.copies) for k, x in enumerate(leaves) if is_sharded(x) and x.copies is not None}


@dataclass
class Program:
    """One captured step.

    The graph's placeholders are, in order: the state's tensors, the gathered copies, the batch's tensors. Its outputs
    are the new state's tensors, then those of aux. An evaluation step has no new state. After the pass `donate`, only
    the new state's tensors in `kept` are outputs.
    """

    gm: GraphModule
    state: FlatTree
    batch: FlatTree
    new_state: FlatTree | None
    aux: FlatTree
    num_state: int
    num_new: int
    # Position of a node of the state -> [first, stop) among the gathered copies.
    full: dict[int, tuple[int, int]] = field(default_factory=dict)
    # With donation: the new state's tensors that the graph returns. The others are written over the old ones.
    kept: list[int] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    name: str = "step"
    schedule: str | Schedule | None = None  # of a pipeline, instead of the one that goes with the cuts
    broadcasts: bool = False  # replicated state that ranks have computed apart becomes rank 0's, instead of their mean
    buffers: list[BufferSpec] = field(default_factory=list)  # static buffers, in which nodes have places
    drive_space: list[DriveSpec] = field(default_factory=list)  # for gradients that are offloaded to drives
    budget: int | None = None  # bytes that the step may take on the device
    context: Any = None  # `passes.Context`: where the step will run, and what was decided about memory
    flops: Any = None  # `cost.op_cost.Flops`, once they were counted
    outline: Outline | None = None  # as it was captured, to compare with another capture
    warning: str = ""  # what is refused as soon as there is more than one rank
    unused: list[str] = field(default_factory=list)  # parameters without a gradient
    # With precision="fp8": each matrix of the parameters -> "" if its products are float8, or why they are not.
    float8: dict[str, str] | None = None

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
        """Map every entry of the state and the batch to its shape and dtype, or to its value if it is not a tensor."""
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
            if not isinstance(cut, ShardedInput):
                at += cut is None  # a plain tensor is one placeholder, another leaf is none
                continue
            for i, (unit, storage) in enumerate(zip(cut.spec.layout.units, cut.storages, strict=True)):
                if first is not None:
                    whole = nodes[self.num_state + first + i]
                    out.append((nodes[at], whole, cut.spec.lies_in_copy(unit, storage)))
                at += storage.num_parts
        return out

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the state is sharded over, or None for a state without a `Sharded`."""
        return next((x.spec.mesh for x in self.state.nodes if isinstance(x, ShardedInput)), None)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that run this step."""
        return 1 if self.mesh is None else self.mesh.num_ranks

    @property
    def owners(self) -> list[tuple[Any, Any]]:
        """For each state placeholder: (spec, unit) of a shard's part, (None, None) for a replicated tensor."""
        return owners(self.state.nodes)

    @property
    def output(self) -> Node:
        """The graph's output node."""
        return next(iter(reversed(self.gm.graph.nodes)))


def owners(nodes: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Return, for each tensor of `FlatTree.nodes`: (spec, unit) of a shard's part, (None, None) for another tensor."""
    out: list[tuple[Any, Any]] = []
    for cut in nodes:
        if cut is None:
            out.append((None, None))
        elif isinstance(cut, ShardedInput):
            for unit, storage in zip(cut.spec.layout.units, cut.storages, strict=True):
                out += [(cut.spec, unit)] * storage.num_parts
    return out


def tensor_of(node: Node) -> torch.Tensor | None:
    """Return the fake tensor that a node's value is, or None if the value is not one tensor."""
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
