"""What ranks compute in other ways than others may not meet the state: they compare the numbers of their values.

`NumberedStep.told` is what a rank tells the others of its step, along each axis, and `of_rows` what it says of its own
rows. With the numbers that all ranks along an axis have told, `difference` finds what would make them go apart. See
`expressions` and `formulas` for the numbers, and `own_values` for how a difference goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Graph, Node

from .. import tree
from ..comm.axes import KINDS
from ..graph.alias import writes
from ..graph.local_value_numbers import formulas
from ..graph.names import input_names, line_of
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, only_moves, traits
from ..graph.node_text import text_of, written
from ..graph.own_values import Cause, Origins, axes_of_transfer, own_values
from ..graph.phase import BACKWARD, phase_of
from ..graph.program import Program
from ..graph.value_numbers import expressions
from ..ops.registry import OnShard
from ..sharding.replicated_values import Held, held_alike
from ..sharding.sharded import is_sharded
from .verify import _all_shards, ops

MEETS = "{what} must be the same on all ranks along {axis!r}, but differs{why}."
EXPECTED = {
    "psum": "psum over {axis!r}{line} sums a value that is the same on all ranks, so gradients would be too small by a "
    "factor of the number of ranks. Sum a value that differs between ranks, or leave psum out.",
    "all_reduce": "all_reduce over {axis!r}{line} is differentiated, but its input is the same on all ranks, or all "
    "ranks use the sum in the same way. So gradients would be too large by a factor of the number of "
    "ranks. Write psum(x, {axis!r}).",
    "vary": "the gradient of a sum over {axis!r} must be the same on all ranks, but differs{why}.",
    "loss": "the loss must be the same on all ranks along {axis!r}, but differs{why}.",
}
OF_ROWS = (
    "ranks along {axis!r} must run the same operations, each on its own part, but they differ: this rank has "
    "{text}{line}, and other ranks have a different operation."
)
# Of what is computed from the loss, the line is that of value_and_grad: what another rank says of the loss tells more.
BEHIND_LOSS = "after the loss, "
ADVICE = (
    "Let all ranks run the same operations, each on its own rows: use the same numbers, flags, constants and branches "
    "on all ranks, and put values that belong to a rank's rows into its batch. If each rank should compute a part of "
    "one result, write x = zerofn.collectives.vary(x, axis) before that computation, and zerofn.collectives.psum(y, "
    "axis) after it."
)


class NumberedStep:
    """A captured step, with the numbers of its values. It is used before passes change the graph. `expects`: whether
    something is to hold of its values that transfers along an axis rely on. `given`: the batch's shapes,
    dtypes and numbers. `held`: what other ranks hold, too, of the `state` that the step trains.
    """

    def __init__(self, program: Program, state: Any = None) -> None:
        self._program = program
        self.given = sorted((k, x) for k, x in program.describe().items() if k.startswith("batch"))
        self.held: list[Held] = []
        if state is not None and program.new_state is not None and program.num_ranks > 1:
            paths, leaves, _ = tree.flatten_with_path(state, is_leaf=is_sharded)
            self.held = held_alike([tree.name_of(x) for x in paths], leaves)
        nodes = written(program) if program.new_state is not None and program.num_ranks > 1 else {}
        self._numbers = expressions(program, nodes) if nodes else {}
        self._left_out = set(_for_shards_alone(program)) if self._numbers else set()
        own = own_values(program).results if self._numbers else {}
        self._kept = {axis: self._compared(axis, own) for axis in self._numbers}
        self._of_rows = formulas(program, nodes) if nodes else {}
        graphs = graphs_of(program.gm) if self._numbers else []
        self.expects = any(x.target is ops.expect.default for gm in graphs for x in gm.graph.nodes)

    def told(self) -> dict[str, set[int]]:
        """Return, for each axis of several ranks, the numbers of the values that are not a rank's own along it."""
        return {axis: set(kept.values()) for axis, kept in self._kept.items()}

    def of_rows(self) -> dict[str, set[int]]:
        """Return, for each axis of several ranks, the numbers of what a rank computes of its own rows."""
        return {axis: set(found.numbers.values()) for axis, found in self._of_rows.items()}

    def difference(self, common: Mapping[str, set[int]], of_rows: Mapping[str, set[int]]) -> str:
        """Return a sentence for the first value that makes ranks go apart, or "".

        `common`, `of_rows`: for each axis along which ranks have told different numbers, those that all have told.
        """
        apart: dict[Node, frozenset[str]] = {}
        for axis, known in common.items():
            for node, number in self._kept[axis].items():
                if number not in known:
                    apart[node] = apart.get(node, frozenset()) | {axis}
        return next(_Differences(self._program, apart).found(), "") or next(self._otherwise(of_rows), "")

    def _otherwise(self, of_rows: Mapping[str, set[int]]) -> Iterator[str]:
        """Yield a sentence for each value of a rank's own rows that others compute otherwise, the first ones first."""
        behind = {line_of(x) for x in self._program.gm.graph.nodes if phase_of(x) == BACKWARD}
        for axis, known in of_rows.items():
            numbers, compared = self._of_rows[axis]
            for node in (x for x in numbers if x in compared and x not in self._left_out and _computes(x)):
                if numbers[node] not in known:
                    told = OF_ROWS.format(axis=axis, text=text_of(node), line=line_of(node))
                    yield (BEHIND_LOSS if line_of(node) in behind else "") + told

    def _compared(self, axis: str, own: Mapping[Node, Origins]) -> dict[Node, int]:
        return {
            node: number
            for node, number in self._numbers[axis].items()
            if _computes(node) and node not in self._left_out and not any(name == axis for _, name in own.get(node, ()))
        }


def _for_shards_alone(program: Program) -> Iterator[Node]:
    """Yield values of which only this rank's shard is kept: a rule of whole leaves runs on those that are partly here,
    so that other ranks compute others.
    """
    for gm in graphs_of(program.gm):
        found: set[Node] = set()
        for node in reversed(gm.graph.nodes):
            if traits(node).cuts or (all(user in found for user in node.users) and _only_computes(node)):
                found.add(node)
        yield from found


def _computes(node: Node) -> bool:
    return node.op in ("call_function", "get_attr") and not only_moves(node)  # where a shard lies is a rank's own


def _only_computes(node: Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not writes(node))


class _Differences:
    """Finds where ranks go apart. `apart`: what other ranks compute otherwise, with the axes along which they are."""

    def __init__(self, program: Program, apart: Mapping[Node, frozenset[str]]) -> None:
        self._program, self._apart = program, apart
        self._own = own_values(program, apart=apart)
        self._names = input_names(program)
        self._graphs: list[Graph] = [gm.graph for gm in graphs_of(program.gm)]
        self._causes = [x for graph in self._graphs for x in graph.nodes if self._is_cause(x)]

    def found(self) -> Iterator[str]:
        """Yield a sentence for each place, the first ones first."""
        yield from self._expected(("psum", "all_reduce", "loss"))
        yield from self._meetings()
        yield from self._replicated()
        yield from self._expected(("vary",))

    def _is_cause(self, node: Node) -> bool:
        return any(cause is node for cause, _ in self._own.results.get(node, ()))

    def _meetings(self) -> Iterator[str]:
        shards = _all_shards(self._program, self._names)
        for graph in self._graphs:
            for node in graph.nodes:
                if not traits(node).cuts and (node not in shards or traits(node).on_shard is not OnShard.KEEPS):
                    continue
                read = self._own.read.get(node, {}).values()
                reduced = self._reduced(node)
                origins = {x for each in read for x in each if x[0] in self._apart and x[1] not in reduced}
                origins |= {(node, axis) for axis in self._apart.get(node, ()) if self._is_cause(node)}
                yield from self._met(f"a value that is combined with the state{line_of(node)}", origins)

    def _reduced(self, node: Node) -> frozenset[str]:
        """Return the axes along which a node makes a value equal, or, if it waits for a transfer, those that the next
        one may: shards of gradients are summed along `replicate` after those along `data`.
        """
        mesh, known = self._program.mesh, traits(node)
        if node.target is ops.wait.default:
            return frozenset(name for name, kind in KINDS.items() if kind.batch)
        return (
            axes_of_transfer(mesh, node)
            if mesh and (known.replicated or known.collective == "scatter")
            else frozenset()
        )

    def _replicated(self) -> Iterator[str]:
        outputs: Any = self._program.output.args[0]
        new = outputs[: self._program.num_new]
        for (spec, _), name, value in zip(self._program.owners, self._program.state.names, new, strict=False):
            origins = {x for x in self._own.results.get(value, ()) if spec is None and x[0] in self._apart}
            yield from self._met(f"the new value of state entry {name!r}", origins)

    def _met(self, what: str, origins: set[tuple[Cause, str]]) -> Iterator[str]:
        for axis in sorted({axis for _, axis in origins}):
            yield MEETS.format(what=what, axis=axis, why=self._why({x for x, name in origins if name == axis}))

    def _expected(self, kinds: tuple[str, ...]) -> Iterator[str]:
        mesh = self._program.mesh
        for node in (x for graph in self._graphs for x in graph.nodes if x.target is ops.expect.default):
            axis, what = str(argument(node, "axis")), argument(node, "what")
            if what not in kinds or mesh is None or mesh.size(axis) == 1:
                continue
            causes = {x for each in self._own.read.get(node, {}).values() for x, name in each if name == axis}
            if bool(causes) == (what in ("vary", "loss")):
                yield EXPECTED[what].format(axis=axis, line=line_of(node), why=self._why(causes))

    def _why(self, causes: set[Any]) -> str:
        """Return what a difference comes from: an operation that other ranks do otherwise, with the user's line."""
        node = next((x for x in self._causes if x in causes), None)
        if node is None:
            words = sorted(self._names.get(x, str(x)) for x in causes)
            return f": it depends on this rank's own {' and '.join(words)}" if words else ""
        # A backward pass has the line where it begins. The user's is that of the operation that it belongs to.
        name = _base_name(node)
        node = next((x for x in self._causes if name == f"{_base_name(x)}_backward"), node)
        return f": this rank has {text_of(node)}{line_of(node)}, and other ranks have a different operation"


def _base_name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]
