"""A loop over microbatches becomes a rank's part of a pipeline: what its stages compute, send and receive, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..comm import channels  # noqa: F401  (defines zerofn::send and zerofn::receive)
from ..graph.cut import Edge, cut
from ..graph.edit import clean, raise_up, sums_of
from ..graph.liveness import complete_values
from ..graph.nested import NAMES, PIECE, insert_call, is_result, results_of
from ..graph.phase import BACKWARD, FORWARD
from ..graph.pipelines import Loop, pipelines
from ..graph.program import Program
from ..graph.running_sums import adding, summed_inside
from ..graph.stages import seams_behind
from ..schedules import Action, Compute, Message, Receive, Send, Sent, messages
from ..schedules import Edge as Between
from ..util.sizes import in_words
from ._context import Context

ops, aten = torch.ops.zerofn, torch.ops.aten
_PHASE = "phase"
_AUX_BYTES = 1 << 20


def cut_stages(program: Program, context: Context) -> None:
    """Cut each loop whose body reads parameters of several stages, and run this rank's pieces in the order of a
    schedule.

    Residuals, and what is received, are values of the step as others are. Sums over microbatches have the order of the
    loop's, so their bits; what several stages add to the gradient of one parameter is added once, in the order of
    stages. What the loop returns, and writes to memory from outside, is on every rank afterwards.
    """
    for number, loop in enumerate(pipelines(program)):
        _Pipelined(program, loop, number).replace()
    complete_values(program.gm.graph)
    clean(program.gm)


class _Pipelined:
    """Writes a rank's part of a pipeline in place of a loop. `number`: of the step's loops; a step has several where
    the last microbatches have other sizes.
    """

    def __init__(self, program: Program, loop: Loop, number: int) -> None:
        assert program.mesh is not None
        self._gm, self._node, self._call, self._number = program.gm, loop.node, loop.call, number
        self._axis, self._leaves, self._region = program.mesh.stages, loop.leaves, loop.region()
        placement, self._schedule = loop.pipeline.placement, loop.pipeline.of(loop.call.rounds)
        self._costs = loop.pipeline.costs
        split = any(action.kind == "W" for order in self._schedule.orders for action in order)
        mine = placement.stages_of(self._axis.rank)
        self._cut = cut(self._region, loop.leaves, placement.num_stages, mine, split)
        self._num_sums = loop.call.num_sums + loop.call.parts.number  # of the body's results, those that are summed
        self._check_rows()
        self._edges = {Between(e.source, e.target, e.kind, e.name): e for e in self._cut.edges}  # type: ignore[arg-type]
        self._outer = {x.name: outer for x, outer in loop.call.given.items()}
        self._index = next(iter(loop.call.body.graph.nodes)).name
        self._rows = {x.name for x in list(loop.call.given)[: loop.call.num_cut]}
        self._values: dict[tuple[int, int, str], Node] = {}  # (stage, microbatch, name) -> what a stage has
        self._sent: dict[tuple[Edge, int], Node] = {}
        self._sums: dict[tuple[int, int, int], Node] = {}  # (result of the body, part, stage) -> the sum so far
        self._inside: dict[tuple[int, str], list[int]] = {}  # piece -> which results it adds to their sums itself
        self._stacks: dict[tuple[int, int], list[Node]] = {}
        self._received: dict[Message, Node] = {}
        self._tokens: dict[Message, Node] = {}
        self._exchanged: list[Node] = []  # tokens of what the holders of a parameter send each other

    @property
    def _graph(self) -> Graph:
        return self._gm.graph

    def replace(self) -> None:
        """Write the actions, and what comes of them, before the loop's node, and erase that."""
        for (stage, kind), piece in self._cut.pieces.items():
            self._gm.add_submodule(self._name(stage, kind), piece.graph)
            if kind != "F" and (inside := summed_inside(piece, self._num_sums)) and self._call.rounds > 1:
                self._inside[stage, kind] = inside
                more = adding(piece.graph, [piece.results[k] for k in inside])
                self._gm.add_submodule(self._name(stage, kind, adds=True), more)
        with self._graph.inserting_before(self._node):
            for step in messages(self._schedule, list(self._edges), self._costs)[self._axis.rank]:
                if isinstance(step, Compute):
                    self._compute(step)
                elif isinstance(step, Send):
                    self._send(step.message)
                elif isinstance(step, Receive):
                    self._receive(step.message)
                elif isinstance(step, Sent):
                    self._call_op(ops.wait.default, self._tokens.pop(step.message))
            results = [self._result(j, *source) for j, source in enumerate(self._call.sources)]
            for name, stage in self._cut.buffers.items():
                self._share(self._outer[name], stage)
            for token in self._exchanged:
                self._call_op(ops.wait.default, token)
        for user in list(self._node.users):
            assert is_result(user)
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            self._graph.erase_node(user)
        self._graph.erase_node(self._node)
        if self._call.parts.number:  # which are added up as soon as they are there
            raise_up(self._graph, sums_of(self._graph, results))

    def _check_rows(self) -> None:
        """Raise `ValueError` for large aux of a step that trains. Without gradients, rows are what a step is for."""
        values = zip(self._node.meta["val"], self._call.sources, strict=True)
        rows = [x.nbytes for x, (k, _) in values if k >= self._num_sums]
        if not self._region.gradients or sum(rows) <= _AUX_BYTES:
            return
        k = max(range(len(rows)), key=rows.__getitem__)
        raise ValueError(
            f"pipe: aux{self._node.meta[NAMES][k]} is computed on stage {self._cut.homes[self._num_sums + k][0]}, and "
            f"would be sent to all ranks: {in_words(rows[k])} in every step. Return a metric of it, such as its mean."
        )

    # actions

    def _compute(self, step: Compute) -> None:
        for message in step.reads:
            edge = self._edges[message.edge]
            self._values[edge.target, message.microbatch, edge.name] = self._call_op(
                ops.wait.default, self._received.pop(message)
            )
        for kind in self._kinds(step.action):
            self._run(step.action.stage, kind, step.action.microbatch)

    def _kinds(self, action: Action) -> list[str]:
        """Return the pieces of an action. The first stage's backward pass is W, where others have I and W."""
        wanted = ("B", "I", "W") if action.kind == "B" else (action.kind,)
        return [kind for kind in wanted if (action.stage, kind) in self._cut.pieces]

    def _run(self, stage: int, kind: str, k: int) -> None:
        piece = self._cut.pieces[stage, kind]
        inputs = [self._given(name, k) for name in piece.given]
        inputs += [self._arrived(edge, k) for edge in piece.received]
        inputs += [self._values[stage, k, name] for name in piece.taken]
        inside = [x for x in self._inside.get((stage, kind), ()) if self._key(x, stage, k) in self._sums]
        inputs += [self._sums.pop(self._key(x, stage, k)) for x in inside]
        outputs = results_of(piece.graph)
        meta = {_PHASE: FORWARD if kind == "F" else BACKWARD, PIECE: self._number}
        made = insert_call(self._graph, self._name(stage, kind, bool(inside)), inputs, outputs, meta)
        for x, source in zip(made, outputs, strict=True):
            x.meta.update(meta, val=source.meta["val"])
        self._values.update({(stage, k, name): made[i] for name, i in piece.kept.items()})
        for edge, i in piece.sent.items():
            self._sent[edge, k] = made[i]
        for result, i in piece.results.items():
            self._add(result, stage, k, made[i])

    def _given(self, name: str, k: int) -> Node:
        """Return an input of the body in round `k`."""
        if name == self._index:
            return self._call_op(aten.full.default, [], k, dtype=torch.int64)
        outer = self._outer[name]
        return self._call_op(aten.select.int, outer, 0, k) if name in self._rows else outer

    def _arrived(self, edge: Edge, k: int) -> Node:
        """Return what a stage received; of a stage of the same rank, what that one has."""
        value = self._values.get((edge.target, k, edge.name)) or self._sent[edge, k]
        return self._values.setdefault((edge.target, k, edge.name), value)

    def _send(self, message: Message) -> None:
        edge = self._edges[message.edge]
        value = self._sent.pop((edge, message.microbatch))
        name = f"{edge.name}.{message.microbatch}"
        self._tokens[message] = self._call_op(ops.send.default, value, message.target, self._axis.group, name)

    def _receive(self, message: Message) -> None:
        edge = self._edges[message.edge]
        place = (message.source, self._axis.group, f"{edge.name}.{message.microbatch}")
        options = {"dtype": edge.dtype, "device": self._device}
        self._received[message] = self._call_op(
            ops.receive.default, list(edge.shape), list(edge.stride), *place, **options
        )

    @property
    def _device(self) -> torch.device:
        values = (x.meta.get("val") for x in self._call.body.graph.nodes)
        return next(x.device for x in values if isinstance(x, torch.Tensor) and x.dim())

    # results

    def _add(self, result: int, stage: int, k: int, term: Node) -> None:
        """Add a term of round `k` to a sum, or to the part of it, or put it on a stack."""
        key = self._key(result, stage, k)
        if result >= self._num_sums:
            self._stacks.setdefault((result, stage), []).append(term)
        elif key in self._sums:
            self._sums[key] = self._call_op(aten.add.Tensor, self._sums[key], term)
        else:
            self._sums[key] = term

    def _key(self, result: int, stage: int, k: int) -> tuple[int, int, int]:
        """Return of which sum a term of round `k` is."""
        return result, k // self._call.parts.every if result >= self._call.num_sums else 0, stage

    def _result(self, j: int, k: int, part: int) -> Node:
        """Return the loop's result `j`, which is the body's `k`, summed or stacked, on every rank that has any of it.
        `part`: of the sum.
        """
        like, rank_of = self._node.meta["val"][j], self._schedule.placement.rank_of
        own = {stage: self._total(k, part, stage) for stage in self._cut.homes[k] if rank_of(stage) == self._axis.rank}
        holders = {rank_of(stage) for name in self._summed(k) for stage in self._leaves[name]}
        if len(holders) > 1:
            return self._of_holders(j, self._cut.homes[k], sorted(holders), own)
        if holders:
            return self._sum(own.values()) if own else self._empty(like)
        if k in self._cut.alike:
            return next(iter(own.values()))
        (home,) = self._cut.homes[k]
        return self._from(rank_of(home), own.get(home), like, f"result {j}")

    def _summed(self, k: int) -> list[str]:
        """Return the parameters whose gradients a result of the body consists of."""
        result = self._region.results[k]
        seams = seams_behind(result, self._region) if result in self._region.tail else []
        return [self._region.seams.gradients[x] for x in seams]

    def _total(self, k: int, part: int, stage: int) -> Node:
        if (k, part, stage) in self._sums:
            return self._sums[k, part, stage]
        return self._call_op(aten.stack.default, self._stacks[k, stage])

    def _sum(self, terms: Any) -> Node:
        first, *others = terms
        for x in others:
            first = self._call_op(aten.add.Tensor, first, x)
        return first

    def _from(self, rank: int, value: Node | None, like: torch.Tensor, name: str) -> Node:
        """Return what one rank has, on all."""
        x = self._empty(like) if value is None else value
        place = ([rank], self._axis.rank, self._axis.size, self._axis.group, name)
        return self._call_op(ops.wait.default, self._call_op(ops.on_stage.default, x, list(like.shape), *place))

    def _share(self, memory: Node, stage: int) -> None:
        """Write what one stage has written to memory from outside, such as running statistics, to that of all ranks.
        The stage's own rank writes it, too: a transfer whose result nobody reads would be taken away there.
        """
        home = self._schedule.placement.rank_of(stage)
        new = self._from(home, memory if home == self._axis.rank else None, memory.meta["val"], "written")
        self._call_op(aten.copy_.default, memory, new)

    def _of_holders(self, j: int, homes: Sequence[int], holders: Sequence[int], own: dict[int, Node]) -> Node:
        """Return the sum of the terms of all stages, `homes`, in their order, on the ranks that hold the parameters:
        they send their terms to each other.
        """
        like, rank_of = self._node.meta["val"][j], self._schedule.placement.rank_of
        if self._axis.rank not in holders:
            return self._empty(like)
        others, group = [r for r in holders if r != self._axis.rank], self._axis.group
        for stage, term in own.items():
            for peer in others:
                self._exchanged.append(self._call_op(ops.send.default, term, peer, group, f"sum {j} of {stage}"))
        terms = []
        for stage in homes:
            if stage not in own:
                place = (list(like.shape), list(like.stride()), rank_of(stage), group, f"sum {j} of {stage}")
                start = self._call_op(ops.receive.default, *place, dtype=like.dtype, device=like.device)
                terms.append(self._call_op(ops.wait.default, start))
            else:
                terms.append(own[stage])
        return self._sum(terms)

    def _empty(self, like: torch.Tensor) -> Node:
        options = {"dtype": like.dtype, "device": like.device}
        return self._call_op(aten.empty.memory_format, [0, *like.shape[1:]] if like.dim() else [0], **options)

    def _call_op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._graph.call_function(target, args, kwargs)

    def _name(self, stage: int, kind: str, adds: bool = False) -> str:
        """Return the name of a piece, or of the one that `adds` to sums."""
        return f"stage_{stage}_{kind}" + "_adds" * adds + f"_{self._number}" * (self._number > 0)
