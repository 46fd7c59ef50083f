"""Steps cut into segments: between transfers, offloading and questions, in loops, on one rank and on two."""

import contextlib
import gc
import logging
import operator
import weakref

import pytest
import torch

from tests.lowering.test_cuda_graphs import recorded, runner_of, same, started, trained
from tests.support.captured_steps import rank
from tests.support.replayed import replayed
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, fake_ranks, scheduled, state_of, train_step_of
from tests.support.tiered_steps import CASES, steps
from zerofn.graph.nested import call_of, is_nested
from zerofn.graph.program import tensor_of
from zerofn.lowering import cuda_graphs, segments
from zerofn.lowering.cuda_graphs import Graphs
from zerofn.lowering.segments import SEGMENT, cut
from zerofn.runtime.backend import Eager


def both(folder, *cases):
    for case in cases:
        found = [steps(**case, folder=folder, inside=inside) for inside in (replayed, contextlib.nullcontext)]
        assert_same_trees(*found, f"{case}, rank {rank()}", equal_nan=True)


@pytest.mark.part(case=CASES[4:5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_segments_have_the_bits_of_the_step(tmp_path, case):
    both(tmp_path, case)


@pytest.mark.part(num_ranks=[2], cases=[CASES[12:24:11]])
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES[12:24:11]), (2, CASES[::5]), (3, CASES[2::11])], ids=str)
def test_replayed_segments_have_the_bits_of_the_step_on_ranks(ranks, tmp_path, num_ranks, cases):
    ranks(num_ranks, both, tmp_path, *cases)


def forgets(patch, what):
    """Leave out one of the things that a replay between transfers, or in a loop, needs."""
    if what == "copies of what transfers make":
        patch.setattr(cuda_graphs._Recording, "replay", lambda self, inputs: self._again() or self._out)
    elif what == "clones of what a loop adds":
        patch.setattr(segments._Cutter, "_leaves", lambda self, node: False)
    elif what == "seeds":
        patch.setattr(cuda_graphs.Draws, "seed", lambda self: None)


def is_right(what):
    """Whether microbatches with dropout have the bits of the step, in several segments."""
    _, expected = trained(*started(dropout=0.3, n=2), 4)
    with pytest.MonkeyPatch.context() as patch:
        forgets(patch, what)
        state, step = started(dropout=0.3, n=2, backend=recorded())
        _, ours = trained(state, step, 4)
    assert len(runner_of(step)._segments) > 1 and runner_of(step)._recordings == 1
    return same(ours, expected)


MISSED = ["copies of what transfers make", "clones of what a loop adds", "seeds"]


@pytest.mark.part(what=MISSED[:1])
@pytest.mark.parametrize("what", MISSED)
def test_what_a_replay_needs_is_missed_between_transfers_and_in_loops(ranks, what):
    assert not all(ranks(2, is_right, what))


def in_order(gm):
    """(operation, whether in a segment) of a graph, those of segments in their place. Scalars and clones of results,
    which are computed first and last, are left out."""
    for node in gm.graph.nodes:
        body = call_of(node).body if is_nested(node) else None
        if body is not None and SEGMENT in body.meta:
            yield from ((name, True) for name, _ in in_order(body))
        elif node.op == "call_function" and not is_of_segment(node):
            yield str(node.target), False


def is_of_segment(node):
    return node.target is operator.getitem or tensor_of(node) is not None and not tensor_of(node).dim()


def test_operations_keep_their_order_and_transfers_stand_between_segments():
    module = build(3)
    with fake_ranks(2):
        program = scheduled(train_step_of(module), state_of(module, 3), batch_of())
        found = cut(program.gm, torch.device("cpu"), [])
        before = [name for name, _ in in_order(program.gm)]
    after = list(in_order(found.gm))
    assert [name for name, _ in after][: len(before)] == before and found.segments > 3
    assert not any(inside for name, inside in after if "all_gather" in name or "wait" in name)


def adds_through_a_view(fixed):
    """The operations in segments of a graph that adds to a part of its first input."""
    graph = torch.fx.Graph()
    total, x = (graph.placeholder(name) for name in ("total", "x"))
    total.meta["val"], x.meta["val"] = torch.empty(8), torch.empty(4)
    y = x
    for _ in range(segments.FEW):
        y = graph.call_function(torch.ops.aten.tanh.default, (y,))
        y.meta["val"] = torch.empty(4)
    part = graph.call_function(torch.ops.aten.slice.Tensor, (total, 0, 0, 4))
    part.meta["val"] = torch.empty(8)[:4]
    added = graph.call_function(torch.ops.aten.add_.Tensor, (part, y))
    added.meta["val"] = part.meta["val"]
    graph.output((added,))
    found = cut(torch.fx.GraphModule({}, graph), torch.device("cpu"), fixed)
    bodies = [call_of(n).body for n in found.gm.graph.nodes if is_nested(n)]
    return {str(n.target) for body in bodies for n in body.graph.nodes if n.op == "call_function"}


def test_what_is_written_through_a_view_is_not_a_copy():
    """A segment has a copy of an input whose address changes. A view of the copy would take the write."""
    assert adds_through_a_view(fixed=[]) == {"aten.tanh.default"}
    assert adds_through_a_view(fixed=[0]) == {"aten.tanh.default", "aten.slice.Tensor", "aten.add_.Tensor"}


class Recorded:
    """A recorder that computes, and knows what of a recording lives on."""

    def __init__(self):
        self.results, self._alive = [], []

    def __call__(self, gm, run, given, allocate, draws):
        inputs = allocate(given)
        self._alive.append(list(inputs))
        for x, value in zip(inputs, given, strict=True):
            cuda_graphs.once(x).copy_(cuda_graphs.once(value))
        with torch.no_grad():
            out = run(inputs)
        self.results += map(weakref.ref, out)
        return out, lambda: None


def test_a_recording_leaves_the_memory_of_its_results_to_those_after_it():
    recorder = Recorded()
    state, step = started(backend=Graphs(Eager(), recorder, "cpu"))
    trained(state, step, cuda_graphs.WARM_UP + 1)
    gc.collect()
    assert recorder.results and not any(x() is not None for x in recorder.results)


def told():
    lines, log = [], logging.getLogger("zerofn")
    before, seen = log.level, logging.Handler()
    seen.emit = lambda line: lines.append(line.getMessage())
    log.addHandler(seen)
    log.setLevel("INFO")
    try:
        found = trained(*started(backend=recorded()), 4)[1]
    finally:
        log.removeHandler(seen)
        log.setLevel(before)
    assert_same_trees(found, trained(*started(), 4)[1])
    return [x for x in lines if "CUDA graphs run" in x]


def test_several_ranks_run_segments_and_the_log_says_what_runs_between(ranks):
    for lines in ranks(2, told):
        assert len(lines) == 1 and "is done by the host" in lines[0]
