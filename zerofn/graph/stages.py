"""Which stage of a pipeline each value of a microbatch is computed on, and which values cross from stage to stage."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from .._torch_compat import OpOverload
from ..ops.registry import LINEAR, base_name
from .alias import is_given, is_view
from .boundaries import boundaries, is_closed, nbytes_of, of_several
from .node_kinds import casts
from .phase import phase_of
from .region import Region
from .source_lines import line_behind

aten = torch.ops.aten


class Crossing(NamedTuple):
    """A value that is computed on one stage and read on another. `backward`: it is sent with gradients."""

    value: Node
    source: int
    target: int
    backward: bool


class Addend(NamedTuple):
    """What a sum of gradients consists of: `chain(value)`, of linear operations in order. Sums may be taken of the
    values, or behind the chain.
    """

    value: Node
    chain: tuple[Node, ...] = ()


class Stages:
    """Where everything in a region is computed, in a pipeline of `count` stages. `stages`: where each parameter lies.

    *Forwards.* A stage computes what lies between two `boundaries`.

    *Backwards.* A gradient is computed on the last stage that has all that it reads of the forward pass, and not behind
    one that its inputs come from. Then it *sinks*: it moves down to the stage that reads it, where nothing more has to
    cross, so that a gradient of few bytes is not sent as many, and one of a parameter ends where that is.

    *Sums.* Where a parameter lies on several stages, the additions that join its gradients of these stages (`joins`)
    are dropped: each stage has its own term. So are those of what is made of the parameter once and read on several
    stages, such as a bias by distance: each stage takes its own sum back to the parameter, as that is linear.

    `begins`: for each stage but the first the number (`Region.order`) with which it begins. `at`: node -> stage.
    `crossings`: in order. `terms`: parameter -> stage -> what its gradient there is the sum of. `homes`: result of the
    body -> stages that have a term of it. `alike`: results that all stages have. `buffers`: input that the forward pass
    writes to -> the stage that does.

    Raises `ValueError` where parameters are not read in the order of their stages, or where memory that is written is
    of several stages.
    """

    def __init__(self, region: Region, stages: Mapping[str, Sequence[int]], count: int) -> None:
        self.region, self._count = region, count
        self._stages = stages
        self.begins = boundaries(region, self._stages, count)
        self.at = {x: bisect_right(self.begins, region.order[x]) for x in region.forward}
        self.at |= self._made_where_written()
        self._have: dict[int, set[Node]] = defaultdict(set)  # stage -> what is there of the forward pass
        self._crossings: dict[Crossing, None] = {}
        self._send_forwards()
        self.joins: set[Node] = set()
        self._addends = {name: self._addends_of(seam, name) for seam, name in region.seams.gradients.items()}
        self._groups = self._grouped()
        self._place_gradients()
        self._sink()
        self._send_gradients()
        self.terms = {name: self._terms_of(name, nodes) for name, nodes in self._addends.items()}
        self.alike: set[Node] = set()
        self.homes = [self._home(x) if isinstance(x, Node) else () for x in region.results]
        self.buffers = {x: self._buffer(x) for x in region.causes.written if is_given(x) and self._touching(x)}
        where = region.where
        self.crossings = sorted(self._crossings, key=lambda x: (x.backward, where[x.value], x.target))

    # forwards

    def _made_where_written(self) -> dict[Node, int]:
        """Return the stages of copies of the batch, or of buffers, that are written: each is made where it is used
        first. A loss function may make all of them before its first layer.
        """
        causes, used = self.region.causes, dict[Node, int]()
        for node in self.region.forward:
            for memory in {causes.root[x] for x in (node, *node.all_input_nodes)} - {node}:
                used.setdefault(memory, self.at[node])
        free = lambda x: not any(self.region.reads([x]))  # noqa: E731
        return {x: used[x] for x in self.region.forward if x in causes.written and x in used and free(x)}

    def _send_forwards(self) -> None:
        for node in self.region.forward:
            self._have[self.at[node]].add(node)
        for node in self.region.forward:
            stage, needs = self.at[node], self.region.reads([node])
            self._check_leaves(node, stage, needs.leaves)
            for value in needs.values:
                self._forward_to(value, stage)
            for memory in self.region.causes.written_by.get(node, ()):
                if self.at.get(memory, stage) != stage:
                    raise ValueError(
                        f"pipe: the line{line_behind(node)} runs on stage {stage}, but overwrites a tensor that stage "
                        f"{self.at[memory]} made. Make a new tensor instead: x = x + y."
                    )

    def _check_leaves(self, node: Node, stage: int, names: Collection[str]) -> None:
        missing = sorted(name for name in names if stage not in self._stages[name])
        if missing and is_closed(node):
            raise ValueError(of_several(node, names, self._stages))
        for name in missing:
            lies = ", ".join(map(str, self._stages[name]))
            raise ValueError(
                f"pipe: {name!r} is stored on stage {lies}, but stage {stage} reads it{line_behind(node)}. Put "
                f"{name!r} on stage {stage}, or on both (stages={{...}})."
            )

    def _forward_to(self, value: Node, stage: int) -> None:
        """Send a value of the forward pass to a stage, unless it is there."""
        if value not in self._have[stage]:
            self._have[stage].add(value)
            self._crossings[Crossing(value, self.at[value], stage, self.at[value] > stage)] = None

    # backwards

    def _grouped(self) -> dict[Node, list[Node]]:
        """Return the gradients by the first of those that stay together, without the additions that are dropped."""
        found: dict[Node, list[Node]] = {}
        for node in self.region.backward:
            if node not in self.joins:
                found.setdefault(self.region.together[node], []).append(node)
        return found

    def _addends_of(self, seam: Node, name: str) -> list[Addend]:
        """Return what the gradient of a parameter is the sum of: one, unless it lies on several stages."""
        whole = Addend(seam.all_input_nodes[0])
        if len(self._stages[name]) < 2:
            return [whole]
        found: list[Addend] = []
        todo = [whole]
        while todo:
            node, chain = addend = todo.pop()
            if self._is_addition(node):
                self.joins.add(node)
                todo += [Addend(x, chain) for x in reversed(node.args[:2]) if isinstance(x, Node)]
            elif (below := self._sum_below(node, name)) is not None:
                self.joins.update(below.chain)
                todo.append(Addend(below.value, (*below.chain, *chain)))
            else:
                found.append(addend)
        return found

    def _sum_below(self, node: Node, name: str) -> Addend | None:
        """Return the addition that a gradient is computed of by linear operations, with no value of the forward pass
        and of no other parameter; None if there is none.
        """
        chain: list[Node] = []
        while not self._is_addition(node):
            given = [x for x in node.all_input_nodes if x in self.region.gradients]
            others = [self.region.of(x) for x in node.all_input_nodes if x not in self.region.gradients]
            if len(given) != 1 or len(node.users) > 1 or not _is_linear(node, given[0]):
                return None
            if any(x.values or x.leaves - {name} for x in others):
                return None
            chain.insert(0, node)
            node = given[0]
        return Addend(node, tuple(chain))

    def _is_addition(self, node: Node) -> bool:
        is_sum = node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
        return is_sum and all(x in self.region.gradients for x in node.args[:2])

    def _place_gradients(self) -> None:
        for group in self._groups.values():
            needs = self.region.reads(group)
            top = min([self.at[x] for x in needs.values if x in self.region.gradients and x in self.at], default=None)
            top = self._count - 1 if top is None else top
            values = [x for x in needs.values if x not in self.region.gradients]
            stage = next((s for s in range(top, -1, -1) if self._fits(s, values, needs.leaves)), None)
            if stage is None:
                able = [s for s in range(top, -1, -1) if self._fits(s, (), needs.leaves)]
                if not able:
                    self._check_leaves(group[0], top, needs.leaves)
                stage = min(able, key=lambda s: sum(nbytes_of(x) for x in values if x not in self._have[s]))
                for x in values:
                    self._forward_to(x, stage)
            self.at.update(dict.fromkeys(group, stage))

    def _fits(self, stage: int, values: Iterable[Node], leaves: Iterable[str]) -> bool:
        """Return whether a stage has these values of the forward pass, and parameters."""
        have = self._have[stage]
        return all(x in have for x in values) and all(stage in self._stages[name] for name in leaves)

    def _sink(self) -> None:
        """Move gradients down to the stage that reads them, while no more bytes cross than before."""
        region = self.region
        needs = {first: region.reads(group) for first, group in self._groups.items()}
        readers: dict[Node, set[Node]] = defaultdict(set)  # gradient -> the groups that read it
        for first, need in needs.items():
            for x in need.values & region.gradients:
                readers[x].add(first)
        homes: dict[Node, set[int]] = defaultdict(set)
        for name, addends in self._addends.items():
            for x in {x for each in addends for x in region.of(each.value).values if len(self._stages[name]) == 1}:
                homes[x].update(self._stages[name])
        moved = True
        while moved:
            moved = False
            for first in reversed(self._groups):
                group, need = self._groups[first], needs[first]
                goals = {self.at[r] for x in group for r in readers[x]} | {s for x in group for s in homes[x]}
                stage = max(goals, default=self.at[first])
                values = [x for x in need.values if x not in region.gradients]
                if stage >= self.at[first] or not self._fits(stage, values, need.leaves):
                    continue
                more = sum(
                    nbytes_of(x)
                    for x in need.values & region.gradients
                    if self.at[x] > stage and not any(self.at[r] <= stage for r in readers[x] if r is not first)
                )
                ends = not any(readers[x] for x in group)
                if ends or more <= sum(map(nbytes_of, group)):
                    self.at.update(dict.fromkeys(group, stage))
                    moved = True

    def _send_gradients(self) -> None:
        for group in self._groups.values():
            for x in self.region.reads(group).values:
                if x in self.region.gradients:
                    self._back_to(x, self.at[group[0]])

    def _back_to(self, value: Node, stage: int) -> None:
        if self.at[value] != stage:
            assert self.at[value] > stage, (value, self.at[value], stage)
            self._crossings[Crossing(value, self.at[value], stage, True)] = None

    def _terms_of(self, name: str, addends: Iterable[Addend]) -> dict[int, list[Addend]]:
        """Return the addends of a parameter's gradient by the stage that sums them: where they are computed, or the
        nearest below that has the parameter.
        """
        found: dict[int, list[Addend]] = defaultdict(list)
        for addend in addends:
            values = self.region.of(addend.value).values
            made = min((self.at[x] for x in values), default=self._stages[name][-1])
            stage = max((s for s in self._stages[name] if s <= made), default=-1)
            assert stage >= 0, (name, made, self._stages[name])
            for x in values:
                self._back_to(x, stage) if x in self.region.gradients else self._forward_to(x, stage)
            found[stage].append(addend)
        return dict(sorted(found.items()))

    # memory that is written

    def _touching(self, memory: Node) -> list[Node]:
        """Return the nodes of both passes that read or write the memory of an input. Views do neither, and what the
        statistics of batch norm were is nothing to its gradient.
        """
        root = self.region.causes.root
        return [
            x
            for x in self.region.nodes
            if phase_of(x) and not is_view(x) and any(root[y] is memory for y in x.all_input_nodes)
            if not _is_gradient_of_statistics(x)
        ]

    def _buffer(self, memory: Node) -> int:
        """Return the stage that reads and writes an input."""
        where = [None if x in self.region.gradients else self.at.get(x) for x in self._touching(memory)]
        if len(set(where)) == 1 and where[0] is not None:
            return where[0]
        name = self.region.seams.names.get(memory) or repr(memory.name)
        stages = " and ".join(str(s) for s in sorted({s for s in where if s is not None}))
        also = " and in the backward pass" if None in where else ""
        raise ValueError(
            f"pipe: {name} is read and written on stage {stages}{also}, where a microbatch begins before the previous "
            f"one has ended. Freeze {name} with eval(), or read and write it on one stage only."
        )

    # results

    def _home(self, result: Node) -> tuple[int, ...]:
        """Return the stages that have a term of a result of the body, or the one that has it. All make for themselves
        what depends on no leaf: a weight, or zeros for a gradient, as many as a rank has elements of the leaf.
        """
        region = self.region
        if result in region.tail:
            seams = seams_behind(result, region)
            return tuple(sorted({s for seam in seams for s in self.terms[region.seams.gradients[seam]]}))
        needs = region.of(result)
        if not needs.values and not needs.leaves:
            self.alike.add(result)
            return tuple(range(self._count))
        late = [self.at[x] for x in needs.values if x in region.gradients]
        able = [s for s in range(self._count) if self._fits(s, (), needs.leaves)]
        stage = min(late) if late else max((self.at[x] for x in needs.values), default=max(able, default=-1))
        if stage not in able:
            names = ", ".join(map(repr, sorted(needs.leaves)))
            raise ValueError(
                f"pipe: a result{line_behind(result)} is computed from parameters of several stages ({names}). Return "
                "one result for each stage, computed from the parameters of that stage."
            )
        for x in needs.values:
            self._back_to(x, stage) if x in region.gradients else self._forward_to(x, stage)
        return (stage,)


def _is_linear(node: Node, gradient: Node) -> bool:
    """Return whether an operation is linear in a gradient, which it reads once, as far as rounding allows."""
    if not isinstance(node.target, OpOverload) or [k for k, x in enumerate(node.args) if x is gradient] != [0]:
        return False
    return is_view(node) or casts(node) or node.target in LINEAR or base_name(node.target).endswith("_backward")


def _is_gradient_of_statistics(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node.target).endswith("batch_norm_backward")


def seams_behind(result: Node, region: Region) -> list[Node]:
    """Return the gradients' seams that a result behind them is made of."""
    found: dict[Node, None] = {}
    todo = [result]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        todo += [] if node in region.seams.gradients else [x for x in region.inputs[node] if x in region.tail]
    return [x for x in found if x in region.seams.gradients]
