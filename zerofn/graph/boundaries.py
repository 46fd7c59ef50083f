"""Where the stages of a pipeline begin in the forward pass of a microbatch, and which parameters each one reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from .alias import is_given
from .nested import is_nested
from .node_kinds import traits
from .program import tensor_of
from .region import Region
from .source_lines import line_behind

NEVER = 1 << 60  # bytes of what cannot be sent


def boundaries(region: Region, spans: Mapping[str, Sequence[int]], count: int) -> list[int]:
    """Return for each of `count` stages but the first the number (`Region.order`) with which it begins. `spans`:
    parameter -> the stages where it lies, of which the first and the last count.

    A stage begins at a position in the order of the program, so no value can flow back. It lies behind the last read of
    a parameter that earlier stages alone have, and not behind the first of one that only it and later stages have.
    Between the two it is the first position that the fewest bytes cross: at the read itself, behind a norm's
    arithmetic, two tensors would cross instead of one. A parameter that lies on both sides, such as a tied embedding,
    holds the boundary at neither.

    Raises `ValueError` where parameters are not read in the order of their stages.
    """
    across, reads = bytes_across(region), reads_of(region)
    found = [0]
    first = [next((k for k, name in reads if min(spans[name]) >= stage), len(across) - 1) for stage in range(count)]
    for stage in range(1, count):
        late = [(k, name) for k, name in reads if min(spans[name]) >= stage]
        early = [(k, name) for k, name in reads if max(spans[name]) < stage]
        high = first[stage]
        low = max([found[-1], min(first[stage - 1] + 1, high), *(k + 1 for k, _ in early[-1:])])
        if low > high:
            raise ValueError(_out_of_order(region, spans, early[-1], late[0]))
        found.append(min(range(low, high + 1), key=lambda k: (across[k], k)))
    return found[1:]


def holders(region: Region, begins: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the stages that read each parameter, if each stage but the first begins with the first read of the
    parameter in `begins`, or before it where fewer bytes cross.
    """
    reads = reads_of(region)
    first = {name: k for k, name in reversed(reads)}
    starts = [first[name] for name in begins]
    spans: dict[str, list[int]] = {}
    for k, name in reads:
        spans.setdefault(name, []).append(bisect_right(starts, k))
    bounds = boundaries(region, spans, len(begins) + 1)
    found: dict[str, set[int]] = {}
    for k, name in reads:
        found.setdefault(name, set()).add(bisect_right(bounds, k))
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def reads_of(region: Region) -> list[tuple[int, str]]:
    """Return (number, parameter) of all that the forward pass reads, in order."""
    return sorted({(region.order[x], name) for x in region.forward for name in region.reads([x]).leaves})


def bytes_across(region: Region) -> list[int]:
    """Return the bytes of the activations that cross a boundary before each number of the forward pass."""
    step = [0] * (len({region.order[x] for x in region.forward}) + 2)
    last: dict[Node, int] = {}
    for node in region.forward:
        for value in region.reads([node]).values:
            last[value] = max(region.order[node], last.get(value, 0))
    spans = [(region.order[value], end, nbytes_of(value)) for value, end in last.items()]
    for first, end, nbytes in [*spans, *_written(region)]:
        if end > first:
            step[first + 1] += nbytes
            step[end + 1] -= nbytes
    found, now = [], 0
    for change in step[:-1]:
        now += change
        found.append(now)
    return found


def _written(region: Region) -> list[tuple[int, int, int]]:
    """Return between which numbers memory is written: one stage makes and writes it, and of inputs reads it, too."""
    root, touched = region.causes.root, dict[Node, list[int]]()
    for node in region.forward:
        writes = region.causes.written_by.get(node, ())
        used = {root[x] for x in node.all_input_nodes if is_given(root[x])} | set(writes)
        for memory in used | ({node} if root[node] is node else set()):
            touched.setdefault(memory, []).append(region.order[node])
    written = region.causes.written.keys() & touched.keys()
    return [(touched[x][0], touched[x][-1], NEVER) for x in written]


def nbytes_of(node: Node) -> int:
    """Return the bytes of a value that is sent; `NEVER` for what is not one tensor."""
    value = tensor_of(node)
    return NEVER if value is None else value.nbytes


def _out_of_order(
    region: Region, spans: Mapping[str, Sequence[int]], early: tuple[int, str], late: tuple[int, str]
) -> str:
    (at, name), (_, before) = early, late
    node = next(x for x in region.forward if region.order[x] == at)
    if at == late[0] and is_closed(node):
        return of_several(node, (name, before), spans)
    line = line_behind(node)
    stage = min(spans[before])
    if any(x == name and k < late[0] for k, x in reads_of(region)):
        return (
            f"pipe: stage {max(spans[name])} stores and reads {name!r}, but {name!r} is read again{line} after "
            f"{before!r} of stage {stage}: by a derivative inside the loss function (a gradient penalty, a product "
            "with the Hessian), or by a layer that is called twice. A microbatch goes through the stages once, so "
            f"stage {stage} must store {name!r}, too: write cuts=zerofn.parallel.pipe(model, mesh, loss_fn, batch). If "
            "most parameters are read twice, use a mesh without 'pipe'."
        )
    return (
        f"pipe: {name!r} is stored on stage {max(spans[name])}, but is read{line} after {before!r} of stage {stage}, "
        f"so a value would have to be sent back. Put {name!r} on stage {stage}, or on both (stages={{...}})."
    )


def is_closed(node: Node) -> bool:
    """Return whether a node does several things that no pass takes apart."""
    return is_nested(node) or traits(node).opaque


def of_several(node: Node, names: Iterable[str], spans: Mapping[str, Sequence[int]]) -> str:
    """Return what to do about a node that reads parameters of several stages."""
    stages = " and ".join(map(str, sorted({s for name in names for s in spans[name]})))
    return (
        f"pipe: the eager_region or loop{line_behind(node)} uses parameters of stages {stages}. Write one eager_region "
        "or loop for each stage."
    )
