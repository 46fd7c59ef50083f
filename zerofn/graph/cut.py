"""A microbatch, cut into pieces for the stages of a pipeline.

The body of a loop over microbatches (forward pass, seed, backward pass, flat gradients) becomes up to three pieces a
stage: F, the forward pass; I, the gradients that earlier stages need; and W, those of parameters, which may wait.
Without a split, B is I and W together. The first stage has no I, as nothing is sent from there: its W receives. A body
without a backward pass has pieces F alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from .pieces import Edge, Piece, Plan, Writer, as_sent, edge_name
from .region import Region
from .stages import Crossing, Stages


class Cut(NamedTuple):
    """A body in pieces. `pieces`: by stage and kind. `edges`: of all stages, in the order in which a stage sends them.
    `homes`: for each result of the body the stages that have it, or a term of it. `alike`: which of the results all
    stages have. `terms`: for each trained parameter the stages that have a term of its gradient. `buffers`: for each
    input that the body writes to, the stage that does.
    """

    pieces: dict[tuple[int, str], Piece]
    edges: tuple[Edge, ...]
    homes: tuple[tuple[int, ...], ...]
    alike: tuple[int, ...]
    terms: dict[str, tuple[int, ...]]
    buffers: dict[str, int]


def cut(
    region: Region, leaves: Mapping[str, Sequence[int]], count: int, mine: Collection[int], split: bool = True
) -> Cut:
    """Cut a body for `count` stages, and make the pieces of the stages `mine`. `leaves`: the stages where each
    parameter lies. `split`: into I and W, not B.

    Raises `ValueError` where the body cannot be cut so; see `Stages`.
    """
    stages = Stages(region, leaves, count)
    edges = {(x.value, x.target): _edge(stages, x) for x in stages.crossings}
    pieces: dict[tuple[int, str], Piece] = {}
    for stage in sorted(mine):
        plan = Plan(stages, stage, _kinds(stages, stage, split))
        pieces.update({(stage, kind): Writer(plan, kind, edges).piece() for kind in plan.parts})
    terms = {name: tuple(by_stage) for name, by_stage in stages.terms.items()}
    written = sorted(stages.buffers, key=region.where.__getitem__)  # ranks send them in this order
    buffers = {memory.name: stages.buffers[memory] for memory in written}
    alike = tuple(k for k, x in enumerate(region.results) if x in stages.alike)
    return Cut(pieces, tuple(edges.values()), tuple(stages.homes), alike, terms, buffers)


def _edge(stages: Stages, crossing: Crossing) -> Edge:
    value: torch.Tensor = as_sent(crossing.value)
    kind = "I" if crossing.backward else "F"
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    name = edge_name(stages, crossing.value)
    return Edge(name, crossing.source, crossing.target, kind, shape, stride, value.dtype, value.nbytes)


def _kinds(stages: Stages, stage: int, split: bool) -> dict[str, set[Node]]:
    """Return the nodes with a stage of each piece of a stage."""
    region = stages.region
    own = [x for x, s in stages.at.items() if s == stage]
    found: dict[str, set[Node]] = {"F": {x for x in own if x not in region.gradients}}
    gradients = {x for x in own if x in region.gradients}
    sent = _made_of(region, gradients, {x.value for x in stages.crossings if x.backward and x.source == stage})
    returns = any(
        isinstance(x, Node) and stage in s and _is_late(region, x)
        for x, s in zip(region.results, stages.homes, strict=True)
    )
    if not split:
        found.update({"B": gradients} if gradients or returns else {})
        return found
    found.update({"I": sent} if sent else {})
    found.update({"W": gradients - sent} if gradients - sent or returns else {})
    return found


def _is_late(region: Region, result: Node) -> bool:
    return result in region.tail or not region.gradients.isdisjoint(region.of(result).values)


def _made_of(region: Region, own: Collection[Node], wanted: Collection[Node]) -> set[Node]:
    """Return what is computed of the nodes `own` for those that are `wanted`."""
    first = region.together
    needed = {first[x] for x in wanted if x in own}
    found: set[Node] = set()
    for x in sorted(own, key=region.where.__getitem__, reverse=True):
        if first[x] in needed:
            found.add(x)
            needed.update(first[y] for y in region.reads([x]).values if y in own)
    return {x for x in own if first[x] in needed}
