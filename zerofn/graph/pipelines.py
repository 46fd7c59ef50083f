"""Loops of a step whose parameters lie on the stages of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..geometry.cuts import Pipeline, StageCut
from .names import input_behind, input_names
from .nested import Call, calls, repeat
from .program import Program, ShardedInput
from .region import Region, seams_of
from .stages import Stages

ops = torch.ops.zerofn


class Loop(NamedTuple):
    """A loop over microbatches that a pipeline runs. `leaves`: the stages of each parameter. `names`: what errors call
    the body's inputs.
    """

    node: Node
    call: Call
    pipeline: Pipeline
    leaves: dict[str, tuple[int, ...]]
    names: dict[Node, str]

    def region(self) -> Region:
        """Return the part of the loop's body that is cut."""
        index, *_ = self.call.body.graph.nodes
        rows = list(self.call.given)[: self.call.num_cut]
        seams = seams_of(self.call.body, ops.on_stage.default, ops.to_stage.default, {index, *rows})
        return Region(self.call.body, seams._replace(names=self.names))

    def received(self) -> set[Node]:
        """Return the values of the forward pass that are sent from stage to stage."""
        stages = Stages(self.region(), self.leaves, self.pipeline.placement.num_stages)
        return {x.value for x in stages.crossings if not x.backward}


def pipelines(program: Program) -> list[Loop]:
    """Return the loops of a step that a pipeline runs."""
    if program.mesh is None or program.mesh.stages.size == 1:
        return []
    pipeline, leaves = stages_of_leaves(program)
    if pipeline is None:
        return []
    if program.schedule is not None:
        pipeline = pipeline.by(program.schedule)
    found = [(node, call) for node, call in calls(program.gm) if node.target is repeat and _reads_stages(call.body)]
    known = input_names(program)
    names = [{x: known.get(input_behind(value), "") for x, value in call.given.items()} for _, call in found]
    return [Loop(node, call, pipeline, leaves, each) for (node, call), each in zip(found, names, strict=True)]


def stages_of_leaves(program: Program) -> tuple[Pipeline | None, dict[str, tuple[int, ...]]]:
    """Return the pipeline that a step's leaves are cut for, and the stages of each; None if there is none."""
    leaves: dict[str, tuple[int, ...]] = {}
    pipeline = None
    for node in program.state.nodes:
        for leaf in node.spec.layout.leaves if isinstance(node, ShardedInput) else ():
            for each in leaf.cuts:
                if isinstance(each, StageCut):
                    pipeline, leaves[leaf.name] = each.pipeline, each.stages
    return pipeline, leaves


def _reads_stages(body: GraphModule) -> bool:
    return any(x.target is ops.on_stage.default for x in body.graph.nodes)
