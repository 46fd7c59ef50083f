"""Write the new state into the old state's memory."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from .._torch_compat import schema_arguments
from ..graph.alias import is_given, is_lent, last_uses, positions, roots
from ..graph.edit import behind, clean, copy_of
from ..graph.node_kinds import (
    UPDATE,
    decoder_of,
    decodes,
    encodes,
    fetched,
    in_place_of,
    is_fetch,
    place_of_store,
    start_of,
    stores,
    wait_of,
)
from ..graph.program import Program, tensor_of

aten, ops = torch.ops.aten, torch.ops.zerofn
TINY = 4  # elements: below, copying costs more than returning a new tensor


def donate(program: Program) -> None:
    """Write every new state tensor into the memory of the old one.

    An update rule becomes its in-place form if no later node reads the old values. Any other new value is copied at the
    end of the step. Aux values that share donated memory are copied before it is written. The graph then returns the
    aux values and only those state tensors that it did not write in place; `program.kept` lists these.

    State on drives is updated in the buffer of its `UPDATE` read, which `split_state_reads` has made.
    """
    gm = program.gm
    graph = gm.graph
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    old, shared = program.placeholders, _shared(program)
    program.kept = [j for j in range(program.num_new) if not _fits(outputs[j], old[j])]
    mine = {j: old[j] for j in range(program.num_new) if j not in program.kept and outputs[j] is not old[j]}
    _save_aux(graph, program, outputs, shared)
    program.output.args = (outputs,)
    _read_first(graph)
    _update_in_place(graph, outputs, mine, shared)
    _copy_back(graph, program, outputs, mine, shared)
    kept = [outputs[j] for j in program.kept]
    program.output.args = ([*kept, *outputs[program.num_new :]],)
    clean(gm)


def _read_first(graph: Graph) -> None:
    """Move reads from a drive or the host above writes to the same place: with donation, old and new state share it."""
    where = positions(graph)
    for store in list(filter(stores, graph.nodes)):
        for start in list(filter(is_fetch, place_of_store(store).users)):
            for late in [x for x in (start, wait_of(start)) if where[x] > where[store]]:
                store.prepend(late)


def _fits(new: Node, old: Node) -> bool:
    """Return whether a new value may replace the old one in memory: it is large enough, and has the same shape and
    dtype.
    """
    a, b = tensor_of(new), tensor_of(old)
    worth = a is not None and (a.numel() > TINY or stores(new))
    return a is not None and b is not None and worth and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _shared(program: Program) -> dict[Node, Node]:
    """Map each shard to its gathered copy. A write to a shard that is a view of the copy writes the copy, too; any
    other copy is written right afterwards.
    """
    return {shard: whole for shard, whole, _ in program.copies()}


def _save_aux(graph: Graph, program: Program, outputs: list[Node], shared: dict[Node, Node]) -> None:
    """Copy outputs that would change later: aux and kept state values in memory that this step or the next one writes,
    and kept values in memory of the batch, a constant or another entry.
    """
    root = roots(graph)
    old = {*program.placeholders[: program.num_state], *shared.values()}
    taken = {x for x in outputs[: program.num_new] if _rule_of(x) is not None}
    for j, value in enumerate(outputs):
        is_aux, memory = j >= program.num_new, root[value]
        if not is_aux and j not in program.kept:
            continue
        if memory in old or is_lent(memory):  # before the write
            with graph.inserting_after(behind(value)):
                outputs[j] = copy_of(value)
        elif memory in taken or (not is_aux and is_given(memory)):  # after the step's last write there
            with graph.inserting_before(program.output):
                outputs[j] = copy_of(value)
        elif not is_aux:
            taken.add(memory)


def _results(rule: Node) -> list[Node | None]:
    """Return the node of each result of a rule: first its new values, then what else it makes."""
    num = len(rule.target._schema.returns)  # type: ignore[union-attr]
    if num == 1:
        return [rule]
    found = {x.args[1]: x for x in rule.users if x.target is operator.getitem}
    return [found.get(k) for k in range(num)]


def _kept_as(value: Node) -> list[Node]:
    """Return what a value is decoded from; the value itself if it has no codec."""
    return value.all_input_nodes if decodes(value) else [value]


def _ends_as(value: Node) -> list[Node]:
    """Return what a value is encoded to; the value itself if it has no codec."""
    encoder = next(filter(encodes, value.users), None)
    if encoder is None:
        return [value]
    return sorted(encoder.users, key=lambda x: x.args[1])  # type: ignore[arg-type,return-value]


def _read_for(value: Node) -> Node | None:
    """Return what was read from the drive place that only `value` is written to: it may be updated in place."""
    store = next(iter(value.users), None)
    if store is None or len(value.users) > 1 or not stores(store):
        return None
    reads = [wait for fetch in place_of_store(store).users for wait in fetch.users if fetched(wait)]
    return next((x for x in reads if start_of(x).meta.get(UPDATE)), None)  # type: ignore[union-attr]


def _decoded_again(rule: Node, result: Node, parts: list[Node]) -> Node | None:
    """Decode a new value from the memory where it is stored, for the nodes that read it. Return the decoded value, or
    None if no node reads it.
    """
    encode = next(filter(encodes, result.users))
    readers = [x for x in result.users if x is not encode]
    if not readers:
        return None
    with rule.graph.inserting_after(rule):
        value = rule.graph.call_function(decoder_of(encode), (*parts, *encode.args[1:]))
    value.meta["val"] = result.meta.get("val")
    for reader in readers:
        if reader.op != "output":
            reader.replace_input_with(result, value)
    return value


def _rule_of(value: Node) -> tuple[Node, int] | None:
    """Return (the update rule that made `value`, the number of its result), if that rule has an in-place form."""
    maker, index = (value.args[0], value.args[1]) if value.target is operator.getitem else (value, 0)
    return (maker, index) if in_place_of(maker.target) else None  # type: ignore[union-attr,return-value]


class _Outputs:
    """The values that a graph returns. `replace` changes every position that holds one."""

    def __init__(self, values: list[Node]) -> None:
        self.values = values
        self._places: dict[Node, list[int]] = defaultdict(list)
        for j, value in enumerate(values):
            self._places[value].append(j)

    def replace(self, old: Node, new: Node) -> None:
        places = self._places.pop(old, [])
        self._places[new] += places
        for j in places:
            self.values[j] = new


class _Written(NamedTuple):
    """A tensor that an update rule writes.

    `argument`: its position. `old`: the node, or the parts, that store it. `result`: its new value, None if no node
    reads it. `new`: the encoded parts of the new value.
    """

    argument: int
    old: list[Node]
    result: Node | None
    new: list[Node]


class _Places:
    """Where the values of a graph are stored before any rule is rewritten. `place`: new value -> the input whose
    memory it takes over. `shared`: see `_shared`.
    """

    def __init__(self, graph: Graph, place: dict[Node, Node], shared: dict[Node, Node]) -> None:
        self._where, self._root = positions(graph), roots(graph)
        self._last = last_uses(graph, self._where, self._root)
        self._place, self._shared = place, shared

    def match(self, rule: Node) -> list[_Written]:
        """Return what a rule would write in place; nothing if one of its new values may not take over the old
        one's memory.
        """
        written = _written_by(rule)
        meant = [[self._place.get(x, _read_for(x)) for x in each.new] for each in written]
        return written if meant == [each.old for each in written] else []

    def are_free(self, rule: Node, written: list[_Written]) -> bool:
        """Return whether nothing reads the old values later. The rule itself counts: it may write p before it
        reads g.
        """
        root = self._root
        places = {m for each in written for x in each.old for m in (root[x], self._shared.get(x, x))}
        arguments = {each.argument for each in written}
        read = [x for k, x in enumerate(rule.args) if isinstance(x, Node) and k not in arguments]
        late = any(self._last.get(m, -1) > self._where[rule] for m in places)
        return not late and not any(root.get(x, x) in places for x in read)


def _update_in_place(graph: Graph, outputs: list[Node], mine: dict[int, Node], shared: dict[Node, Node]) -> None:
    """Rewrite rules whose new values take over the old ones' memory. `mine`: output number -> the input whose memory
    it takes.
    """
    places = _Places(graph, {outputs[j]: old for j, old in mine.items()}, shared)
    returned = _Outputs(outputs)
    for rule in [node for node in graph.nodes if in_place_of(node.target) is not None]:
        written = places.match(rule)
        if written and places.are_free(rule, written):
            _rewrite(rule, written, returned)


def _written_by(rule: Node) -> list[_Written]:
    """Return what the in-place form of a rule writes."""
    arguments = schema_arguments(in_place_of(rule.target))  # type: ignore[arg-type]
    written = [k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return [
        _Written(k, _kept_as(rule.args[k]), result, _ends_as(result) if result is not None else [])  # type: ignore[arg-type]
        for k, result in zip(written, _results(rule), strict=False)
    ]


def _rewrite(rule: Node, written: list[_Written], returned: _Outputs) -> None:
    """Insert the in-place form before a rule. Readers of new values read the old ones' memory, and the rule is dead."""
    target = in_place_of(rule.target)
    assert target is not None
    arguments, args = schema_arguments(target), list(rule.args)
    for each in written:
        is_list = isinstance(arguments[each.argument].type, torch.ListType)
        args[each.argument] = each.old if is_list else each.old[0]
    with rule.graph.inserting_before(rule):
        made = rule.graph.call_function(target, tuple(args), rule.kwargs)
    for more in filter(None, _results(rule)[len(written) :]):  # one, which the in-place form returns
        made.meta["val"] = more.meta.get("val")
        returned.replace(more, made)
        more.replace_all_uses_with(made, lambda user: user.op != "output")
    for each in written:
        for x, memory in zip(each.new, each.old, strict=True):
            returned.replace(x, memory)
            # The output node is changed last and once: each change rebuilds all of it.
            x.replace_all_uses_with(memory, lambda user: user.op != "output")
        if decodes(rule.args[each.argument]) and each.result is not None:  # type: ignore[arg-type]
            again = _decoded_again(rule, each.result, each.old)
            if again is not None:
                returned.replace(each.result, again)


def _copy_back(
    graph: Graph, program: Program, outputs: list[Node], mine: dict[int, Node], shared: dict[Node, Node]
) -> None:
    """At the end of the step, copy into place what was not updated in place."""
    root = roots(graph)
    late = {j: place for j, place in mine.items() if outputs[j] is not place}
    targets = {x for place in late.values() for x in (place, shared.get(place, place))}
    with graph.inserting_before(program.output):
        for j in late:  # read a value before its memory is written here
            if root.get(outputs[j], outputs[j]) in targets:
                outputs[j] = copy_of(outputs[j])
        for j, place in late.items():
            graph.call_function(aten.copy_.default, (place, outputs[j]))
