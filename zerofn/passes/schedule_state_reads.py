"""Schedule reads from drives for updates, and give all drive reads places in one buffer."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graph.alias import positions, roots, touches, written_before
from ..graph.buffers import add_buffer
from ..graph.edit import clean
from ..graph.nested import graphs_of
from ..graph.node_kinds import UPDATE, is_fetch, is_scatter, makes_bucket, wait_of
from ..graph.program import Program
from ..util.sizes import pages
from ._packing import Lifetime, pack

ops = torch.ops.zerofn
WRITING = 3  # gradients that may be in transfer to the drive while the next one is made


def schedule_state_reads(program: Program) -> None:
    """Move the drive reads for each update up to the previous update, and give all drive reads places in one buffer.

    While one unit is updated, drives then read the next unit's state and write the previous one's. The buffer is
    allocated once. `split_state_reads` has marked the reads for updates, and `raise_updates` has ordered the updates.
    """
    gm = program.gm
    for each in graphs_of(gm):
        _place(each.graph, program)
        clean(each)


def _place(graph: Graph, program: Program) -> None:
    fetches = list(filter(is_fetch, graph.nodes))
    groups = _start_updates(graph, [x for x in fetches if x.meta.get(UPDATE)])
    spans = _spans(graph, groups)
    if not spans:
        return
    places, nbytes = pack(spans)
    buffer = add_buffer(program.buffers, None, nbytes)
    for span, place in zip(spans, places, strict=True):
        span.node.args = tuple([[buffer, place] if x == [] else x for x in span.node.args])


def _start_updates(graph: Graph, fetches: list[Node]) -> list[list[Node]]:
    """Move waits down to the update that reads them, and start the reads of each update at the wait of the previous
    one. Return the reads, update by update.
    """
    where = positions(graph)
    writer = written_before(graph, where, roots(graph))
    groups: dict[Node, list[Node]] = {}
    for fetch in fetches:
        reader = min(wait_of(fetch).users, key=where.__getitem__)
        groups.setdefault(reader, []).append(fetch)
    readers = sorted(groups, key=where.__getitem__)
    before = next((n for n in graph.nodes if makes_bucket(n) or is_scatter(n)), None)  # the backward pass has begun
    if before and readers and where[readers[0]] < where[before]:  # the backward pass was in a loop, and is over
        before = None
    at = where[before] if before else 0
    for k, reader in enumerate(readers):
        for fetch in groups[reader]:
            reader.prepend(wait_of(fetch))
            if fetch in writer and at <= where[writer[fetch]]:  # it is written before it is read
                writer[fetch].append(fetch)
            else:
                (before or wait_of(fetch)).prepend(fetch)
        if k or not before:  # read two while the first gradients are computed
            before, at = wait_of(groups[reader][0]), where[reader]
    return [groups[reader] for reader in readers]


def _spans(graph: Graph, groups: list[list[Node]]) -> list[Lifetime]:
    where, touched = positions(graph), touches(graph, roots(graph))
    ends = [max(where[touched[fetch][-1]] for fetch in group) for group in groups]
    # The result of one update is written during the next one. Other readers may delay that write.
    ends = [max(pair) for pair in zip(ends, [*ends[1:], len(where)], strict=False)]
    written = {fetch: end for group, end in zip(groups, ends, strict=True) for fetch in group}
    out = []
    for fetch in [n for n in graph.nodes if n.target is ops.fetch.default]:
        _, size, dtype = fetch.args[:3]
        last = touched[fetch][-1]
        stop = max(where[last], written.get(fetch, 0) if last.target is ops.write_drive_.default else 0)
        out.append(Lifetime(fetch, where[fetch], stop, pages(size * dtype.itemsize)))
    buffers = [n for n in graph.nodes if n.target is ops.drive_buffer.default]
    for k, buffer in enumerate(buffers):
        size, dtype = buffer.args[:2]
        stop = max(where[buffers[min(k + WRITING, len(buffers) - 1)]], where[touched[buffer][-1]])
        out.append(Lifetime(buffer, where[buffer], stop, pages(size * dtype.itemsize)))
    return out
