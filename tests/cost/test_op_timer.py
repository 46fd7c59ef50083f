"""How far back an operation's inputs are when it is timed."""

import time

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from tests.lowering.test_plans import a_region_of_two
from zerofn.cost import op_timer
from zerofn.cost.machine import usual
from zerofn.cost.op_timer import FAR
from zerofn.graph.nested import REGION, calls
from zerofn.runtime.executor import CompiledRegions
from zerofn.training import eager_region  # noqa: F401  (defines the operation)
from zerofn.util.process import instead

neg, add = torch.ops.aten.neg.default, torch.ops.aten.add.Tensor
SMALL, LARGE = 4, 1 << 18  # elements: 1 MiB


@pytest.fixture
def timed(monkeypatch):
    """What was timed: the bytes that were touched since each of an operation's inputs was."""
    told = []
    monkeypatch.setattr(op_timer, "_known", {})
    monkeypatch.setattr(op_timer, "_seconds", lambda node, ago: told.append(ago) or 1.0)
    return told


def run(*, between=()):
    """An input is negated, others are too, and the input is added to the first result."""
    graph = Graph()
    x, *others = [graph.placeholder(name) for name in "xabc"[: 1 + len(between)]]
    for node, size in zip([x, *others], [SMALL, *between], strict=True):
        node.meta["val"] = torch.zeros(size)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.zeros_like(args[0].meta["val"])
        return node

    first = call(neg, x)
    rest = [call(neg, other) for other in others]
    graph.output([call(add, x, first), *rest])
    gm = GraphModule(torch.nn.Module(), graph)
    return op_timer.measured([gm], usual(accelerated=False)), gm


def test_an_input_is_far_the_first_time_and_near_the_second(timed):
    run()
    assert timed == [[FAR], [0, 0]]


def test_what_is_touched_between_drives_inputs_out(timed):
    run(between=(LARGE,))
    assert timed == [[FAR], [FAR], [1 << 21, 1 << 21]]  # 1 MiB is read, and as much written
    timed.clear()
    op_timer.forget()
    run(between=(LARGE, 40 * LARGE))
    assert timed[-1] == [FAR, FAR]


def test_memory_is_near_as_far_as_it_was_touched(timed):
    graph = Graph()
    bucket, other = graph.placeholder("bucket"), graph.placeholder("other")
    bucket.meta["val"], other.meta["val"] = torch.zeros(4 * LARGE), torch.zeros(LARGE)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(x.meta["val"] if isinstance(x, Node) else x for x in args))
        return node

    parts = [call(torch.ops.aten.slice.Tensor, bucket, 0, k * LARGE, (k + 1) * LARGE) for k in range(4)]
    graph.output([call(neg, x) for x in (*parts, parts[3], parts[0], other, bucket)])
    op_timer.measured([GraphModule(torch.nn.Module(), graph)], usual(accelerated=False))
    # Views touch nothing: each part is far the first time. The last one is near then, and the first 8 MiB back. At the
    # end half of the bucket, its first and last part, was touched within 4 MiB.
    assert timed[4:] == [[FAR], [0], [1 << 23], [1 << 22]] and timed[:4] == [[0]] * 4


def test_the_same_at_the_same_distance_is_timed_once(timed):
    cost, gm = run(between=(SMALL,))
    assert timed == [[FAR], [0, 0]]
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [cost(node) for node in calls] == [1.0, 1.0, 1.0]


def test_what_operations_take_is_measured():
    op_timer.forget()
    gm = GraphModule(torch.nn.Module(), Graph())
    sizes = {}
    for size in (64, 512):
        x = gm.graph.placeholder(f"x{size}")
        x.meta["val"] = torch.zeros(size, size)
        sizes[size] = gm.graph.call_function(torch.ops.aten.mm.default, (x, x))
        sizes[size].meta["val"] = torch.zeros(size, size)
    gm.graph.output(list(sizes.values()))
    cost = op_timer.measured([gm], usual(accelerated=False))
    assert 0 < 10 * cost(sizes[64]) < cost(sizes[512])  # 512 times the arithmetic


def test_operations_that_invented_values_might_not_suit_take_their_time_by_rates(timed):
    """A workspace that no forward kernel has filled, or a function of the user's, which may divide by what it gets."""
    graph = Graph()
    x, rest = graph.placeholder("x"), graph.placeholder("rest")
    x.meta["val"], rest.meta["val"] = torch.zeros(4), torch.zeros(4, dtype=torch.uint8)
    region = graph.call_function(torch.ops.zerofn.eager_region.default, ([x], 0, None))
    region.meta["val"] = [torch.zeros(())]
    total = graph.call_function(torch.ops.aten.sum.default, (rest,))
    total.meta["val"] = torch.zeros(())
    graph.output([region, total])
    seconds = op_timer.measured([GraphModule(torch.nn.Module(), graph)], usual(accelerated=False))
    assert timed == []
    assert seconds(total) > 0


def test_a_region_takes_the_time_that_it_was_measured_to_take_where_a_step_runs_it_compiled():
    class Slow:
        def run(self, inputs):
            time.sleep(0.01)
            return [inputs.pop() + 1.0]

    gm = a_region_of_two()
    (node,) = (x for x, _ in calls(gm))
    machine, slow = usual(accelerated=False), Slow()
    rates = op_timer.measured([gm], machine)(node)
    with instead(CompiledRegions()) as found:
        found.by_name[gm.body.meta[REGION]] = slow
        op_timer.forget()
        assert op_timer.measured([gm], machine)(node) > 0.01 > 10 * rates
    assert op_timer.measured([gm], machine)(node) == rates
