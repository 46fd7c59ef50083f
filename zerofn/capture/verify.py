"""Check that a captured step is a pure function, and that its results do not depend on how the state is sharded."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import FakeTensor, OpOverload
from ..comm.axes import kind_of
from ..graph.alias import sources, writes
from ..graph.names import input_behind, input_names, line_of, names_inside, operation_at, operation_name
from ..graph.nested import Call, call_of, foreign_graphs, graphs_of, is_result, is_unknown
from ..graph.node_kinds import argument, arguments, is_gather, is_ours, traits
from ..graph.own_values import Cause, OwnValues, SliceOf, own_values
from ..graph.program import Program, owners, tensor_of
from ..ops.registry import OVER_DIMS, RESHAPES, OnShard
from .capture import CaptureError
from .declare_same import declare_same
from .unsummed import unsummed

ops, aten = torch.ops.zerofn, torch.ops.aten
_CLOSED_OVER = "a tensor it closes over"  # a name beside those of state and batch entries


def check_purity(program: Program) -> list[Tensor]:
    """Return the tensors that the step closes over. Raises `CaptureError` unless the step is a pure function.

    It may not write to the state, the batch, gathered units or closed-over tensors, close over a tensor that requires
    grad, or draw from torch's global generator. To a shard it may apply only elementwise operations and ZeroFn's
    reductions, and with a shard it may combine only values that are the same on all ranks. A 0-d batch entry that meets
    a shard is declared equal: the step checks it each time, before the first write. With one rank, what would be
    refused on more is told in `program.warning`.
    """
    names = input_names(program)
    _check_writes(program.gm, names)
    _check_meetings(program, _all_shards(program, names), names)
    graphs = graphs_of(program.gm)
    for gm in graphs:
        _check_draws(gm)
        _check_foreign(gm)
    return [constant for gm in graphs for constant in _constants(program, gm)]


def _all_shards(program: Program, names: dict[Node, str]) -> set[Node]:
    """Return all shards, those in loops too. Raises `CaptureError` for what may not be done to one."""
    inputs = _shards(program)
    sizes = {x.numel() for x in map(tensor_of, inputs) if x is not None and x.dim() == 1}
    return _check_shards(program.gm, inputs, names, sizes)


def _shards(program: Program) -> set[Node]:
    """Return the inputs that are shards of a `Sharded`, in the state or the batch. What each rank has whole and of its
    own is none: see `own_values`.
    """
    ends = [(program.placeholders, program.state.nodes), (program.batch_placeholders, program.batch.nodes)]
    pairs = [pair for inputs, kinds in ends for pair in zip(inputs, owners(kinds), strict=False)]
    return {node for node, (spec, _) in pairs if spec is not None and not spec.of_ranks}


def _check_writes(gm: GraphModule, names: dict[Node, str]) -> None:
    """Raise at the first write to memory that is not the step's own, also in a body."""
    owner = dict(names)  # view of an input, a constant or a gathered unit -> that memory's name
    for node in gm.graph.nodes:
        source = sources(node)
        if node.op == "get_attr":
            owner[node] = _CLOSED_OVER
        elif is_gather(node) or (node.target is ops.as_whole.default and source[0] not in owner):
            # Passes may gather the unit again, for the backward pass for example. That copy would lack the write.
            owner[node] = f"the gathered tensors of {names.get(input_behind(node), 'the state')}"
        elif source and source[0] in owner and node.target is not ops.as_shard.default:  # stage 0 gathers gradients
            owner[node] = owner[source[0]]
        if call := call_of(node):
            _check_writes(call.body, names_inside(call, owner))
        else:
            for written in writes(node):
                _check_write(node, owner.get(written))


def _check_write(node: Node, name: str | None) -> None:
    if name is not None:
        advice = (
            "Pass it in the state, and return its new value in the new state. With Trainer or Lightning, make it a "
            "buffer of the model and read it as one (self.q, not from a list), or write to it in a callback or a hook."
            if name == _CLOSED_OVER
            else "A step is a pure function: write to a clone of it, and return the clone in the new state."
        )
        raise CaptureError(f"the step writes to {name} in place ({operation_at(node)}). {advice}")


def _check_meetings(program: Program, shards: set[Node], names: dict[Node, str]) -> None:
    """Raise at the first value of a rank's own that is combined with a shard, or with slices alone becomes the new
    state; see `own_values`.
    """
    if program.mesh is None:
        return
    own = own_values(program)
    if told := unsummed(program, own):
        raise CaptureError(told)
    _check_replicated(program, own)
    meetings = list(_meetings(own, shards))
    numbers = {x for _, origins in meetings for x in origins if isinstance(x, Node) and _is_number(x)}
    others = ((node, origins - numbers) for node, origins in meetings)
    node, origins = next(((node, origins) for node, origins in others if origins), (None, set[Cause]()))
    if node is not None:
        message = _own_value(node, origins, names)
        if program.num_ranks > 1:
            raise CaptureError(message)
        program.warning = f"with more than one rank this step is refused: {message}"
    elif program.num_ranks > 1:
        for number in [x for x in program.batch_placeholders if x in numbers]:
            declare_same(program, number, names[number])


def _check_replicated(program: Program, own: OwnValues) -> None:
    """Raise if ranks would have other values of a replicated state entry because of their slices of layers. What their
    batches make of it is averaged by `sync_replicated_state`.
    """
    outputs: Any = program.output.args[0]
    entries = zip(program.owners, program.state.names, outputs[: program.num_new], strict=False)
    for (spec, _), name, value in entries if program.new_state is not None else ():
        along = (axis for _, axis in own.results.get(value, ()) if spec is None and kind_of(axis).partial)
        if (axis := min(along, default=None)) is not None:
            raise CaptureError(
                f"state entry {name!r} is replicated, but its new value is computed from this rank's slices of layers "
                f"or its part of the tokens, so it differs along {axis!r}. Sum it first with "
                f"zerofn.collectives.psum(x, {axis!r}), or leave it out of the state."
            )


def _meetings(own: OwnValues, shards: set[Node]) -> Iterator[tuple[Node, set[Cause]]]:
    """Yield the operations that combine a shard, or cut one from, values of a rank's own, and what made them so.

    A shard is one itself if it was reduced of gradients of whole leaves that differ where they should not.
    """
    for node, read in own.read.items():
        if traits(node).cuts or (node in shards and traits(node).on_shard is OnShard.KEEPS):
            alone = all(x in read for x in node.all_input_nodes if x in shards)  # no other shard comes in
            origins = {cause for x, each in read.items() if not alone or x not in shards for cause, _ in each}
            if origins:
                yield node, origins


def _is_number(entry: Node) -> bool:
    value = tensor_of(entry)
    return value is not None and value.dim() == 0


def _own_value(node: Node, origins: set[Cause], names: dict[Node, str]) -> str:
    what = " and ".join(sorted({names.get(x, "batch") if isinstance(x, Node) else str(x) for x in origins}))
    partial = min((x.axis for x in origins if isinstance(x, SliceOf) and kind_of(x.axis).partial), default=None)
    advice = (
        f"zerofn.collectives.psum(x, {partial!r}) adds partial sums, and zerofn.collectives.all_gather(x, {partial!r}) "
        "joins slices. A sliced layer returns one of these if its word in the plan does not combine its output."
        if partial is not None
        else "zerofn.collectives.all_reduce(x) is the sum over ranks; or let the loss return (sum, weight). If it is "
        "equal on all ranks, write zerofn.same(x)."
    )
    return (
        f"{operation_at(node)} combines a shard with a value that differs from rank to rank: it depends on this rank's "
        f"own {what}. Each rank would update its part of the state differently. Combine the value over ranks first: "
        f"{advice}"
    )


def _check_shards(gm: GraphModule, shards: set[Node], names: dict[Node, str], sizes: set[int]) -> set[Node]:
    """Raise at the first operation that may not be applied to a shard; return all shards, those in loops too.

    `sizes`: of the inputs that are shards.
    """
    even: set[Node] = set()  # tensors whose elements are all equal
    for node in gm.graph.nodes:
        if _is_even(node, even):
            even.add(node)
        if node.op != "call_function":
            continue
        used = [x for x in node.all_input_nodes if x in shards]
        if call := call_of(node):
            node.meta["shards"], inside = _check_body(call, shards, names, sizes)
            shards |= inside
        elif is_result(node):
            shards.update([node] if node.args[1] in node.args[0].meta["shards"] else [])
        elif _makes_shard(node):
            shards.add(node)
        elif used and _stays_shard(node, used, shards, even, names, sizes):
            shards.add(node)
    return shards


def _makes_shard(node: Node) -> bool:
    """Return whether the result is a shard whatever the inputs are.

    A transfer of small values does not make one; its `unit` is empty.
    """
    if traits(node).on_shard is not OnShard.MAKES:
        return False
    return not traits(node).collective or bool(argument(node, "unit"))


def _is_even(node: Node, even: set[Node]) -> bool:
    """Return whether all elements of a value are equal.

    They are if there is one element, if the operation's traits say so, or if it is elementwise and its inputs are even.
    """
    value = tensor_of(node)
    if value is not None and isinstance(value.numel(), int) and value.numel() == 1:
        return True
    preserves = node.target in (operator.getitem, *RESHAPES) or (not is_ours(node) and _is_elementwise(node))
    return traits(node).constant_fill or (preserves and all(x in even for x in node.all_input_nodes))


def _check_body(call: Call, shards: set[Node], names: dict[Node, str], sizes: set[int]) -> tuple[set[int], set[Node]]:
    """Check a body, and return the positions of its results that are shards, and all its shards."""
    inside = {x for x, value in call.given.items() if value in shards}
    found = _check_shards(call.body, inside, names_inside(call, names), sizes)
    return {i for i, x in enumerate(call.results) if x in found}, found


def _stays_shard(
    node: Node, used: list[Node], shards: set[Node], even: set[Node], names: dict[Node, str], sizes: set[int]
) -> bool:
    """Return whether the result of an operation on shards is a shard. `used`: its inputs that are shards.

    Raises `CaptureError` if the result would depend on how the state is sharded, and for an unknown operation.
    """
    if traits(node).on_shard in (OnShard.SHAPE, OnShard.LEAVES, OnShard.MAKES):
        return False
    origin = names.get(input_behind(used[0]), "a value computed from it")
    keeps = node.target is operator.getitem or _is_elementwise(node) or _reshapes_nothing(node, used[0])
    if not (keeps or _moves_batches(node, used[0], sizes)):
        raise CaptureError(
            f"{operation_at(node)} is applied to this rank's shard of {origin}, so its result would differ from "
            "rank to rank. On shards use elementwise operations, or zerofn.global_norm, leaf_norms, vdot and "
            f"all_finite; for other operations, call zerofn.gather(tree) first.{_advice(node)}"
        )
    # The traits of ZeroFn's own operations say which arguments are shards, so they are not checked here.
    if not is_ours(node) and any(x not in shards and x not in even for x in node.all_input_nodes):
        raise CaptureError(
            f"{operation_at(node)} combines this rank's shard of {origin} with a tensor that is not sharded and has "
            "more than one value, so the result would depend on how the state is sharded. Put this tensor into the "
            "state, as a tree like the parameters, or call zerofn.scatter on it. For noise on shards, write "
            "zerofn.normal_like(tree, key)."
        )
    return True


def _is_elementwise(node: Node) -> bool:
    """Return whether an operation is elementwise."""
    return traits(node).on_shard is OnShard.KEEPS


def _reshapes_nothing(node: Node, shard: Node) -> bool:
    """Return whether a node is a reshape that keeps the shard's shape, or repeats a shard of one element."""
    if node.target not in RESHAPES:
        return False
    a, b = tensor_of(node), tensor_of(shard)
    return a is not None and b is not None and (a.shape == b.shape or b.numel() == 1)


def _moves_batches(node: Node, shard: Node, sizes: set[int]) -> bool:
    """Return whether an operation on a batch of shards [..., s], as `vmap` makes them, treats their elements alike: a
    reshape or a reduction of the other dims. A reduce-scatter of a batch returns it flat.
    """
    a, b = tensor_of(node), tensor_of(shard)
    if a is None or b is None or not a.dim() or not isinstance(a.shape[-1], int) or a.shape[-1] not in sizes:
        return False
    if node.target in RESHAPES:
        return a.shape[-1] == b.shape[-1] if b.dim() > 1 else b.numel() not in sizes
    if node.target not in OVER_DIMS or b.dim() < 2 or a.shape[-1] != b.shape[-1] or not argument(node, "dim"):
        return False
    return all(d % b.dim() != b.dim() - 1 for d in argument(node, "dim"))


def _advice(node: Node) -> str:
    """Return advice for a custom operation, or "" for other operations."""
    if not isinstance(node.target, OpOverload) or node.target.namespace in ("aten", "zerofn"):
        return ""
    return " If your own operation is elementwise, define it with torch.library's tags=torch.Tag.pointwise."


def _check_draws(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if _draws(node):
            raise CaptureError(
                f"{operation_at(node)} draws from torch's global generator, which is not part of the state: the same "
                "state and batch would give different results. Draw inside the loss function of state.value_and_grad, "
                "or under zerofn.random.randomness(state.rng_at()). To evaluate a model without dropout, call its "
                "eval() first."
            )


def _check_foreign(gm: GraphModule) -> None:
    """Raise for what no schema describes, and for graphs of other operations that do more than compute."""
    for node in gm.graph.nodes:
        if is_unknown(node):
            raise CaptureError(
                f"{operation_at(node)} has no schema, so its writes to memory are unknown. Wrap it in "
                "torch.library.custom_op, or call it inside zerofn.eager_region."
            )
        for each in foreign_graphs(node):
            _check_draws(each)
            _check_foreign(each)
            for inner in each.graph.nodes:
                if inner.op == "get_attr" and isinstance(getattr(each, str(inner.target)), Tensor):
                    raise CaptureError(
                        f"a function passed to {operation_at(node)} closes over a tensor. Pass this tensor to it as an "
                        "argument."
                    )
                if traits(inner).collective:
                    raise CaptureError(
                        f"{operation_name(inner)} communicates inside {operation_at(node)}, so ranks that take "
                        "different branches would wait for each other forever. Communicate outside."
                    )


def _draws(node: Node) -> bool:
    """Return whether an ATen operation draws from a generator. Dropout with probability 0 does not."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags or "_backward" in node.target.name():
        return False
    args = arguments(node)
    off = args.get("train", args.get("training", True)) is False
    return not off and args.get("dropout_p", args.get("dropout", True)) != 0


def _constants(program: Program, gm: GraphModule) -> list[Tensor]:
    """Return the tensors that a graph closes over. Raises `CaptureError` for one that learns, or has no value."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(gm)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, FakeTensor):
            raise CaptureError(
                f"the step uses a tensor of shape {tuple(value.shape)}{_use(program, node)} that a microbatch of "
                "`accumulate`, or an earlier capture, stored in a variable, a list or an attribute. Return values from "
                "a microbatch instead: `return loss, more` with has_aux=True. To pass a value to the next microbatch, "
                "write it in place into a clone made in the step: buffers[name].copy_(new)."
            )
        if value.requires_grad:
            raise CaptureError(
                f"the step closes over a tensor of shape {tuple(value.shape)} that requires "
                f"grad{line_of(next(iter(node.users), node))}. It would be a constant of the captured step and never "
                "trained. Pass it in state.params (functional_call(model, params, ...)). If it should not be trained, "
                "as the weights of a teacher, write teacher.requires_grad_(False) before."
            )
        if any(u.target is not aten.lift_fresh_copy.default for u in node.users):
            found.append(value)
    return found


def _use(program: Program, constant: Node) -> str:
    """Return where a constant is used: the user's line, or the name of the result that it is."""
    last = constant
    while program.output not in last.users and last.users:
        last = next(iter(last.users))
        if line := line_of(last):
            return line
    outputs: Any = program.output.args[0]
    names = [*(program.new_state.names if program.new_state is not None else ()), *program.aux.names]
    return f" as its result {names[outputs.index(last)]!r}" if last in outputs else ""
