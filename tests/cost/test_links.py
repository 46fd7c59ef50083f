"""Links of axes, and what they share, beside what is worked out by hand."""

import dataclasses

import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from zerofn.comm.mesh import Mesh
from zerofn.cost.links import Links, axis_of, sends
from zerofn.cost.simulator import Lanes, Timeline

ops = torch.ops.zerofn
MESH = Mesh.planned({"data": 2, "tensor": 2})
NODE = zerofn.Machine("node", "cpu", 4, 1e9, 1e3, {"float32": 1e3}, link=100.0, network=50.0, launch=0.0, latency=0.0)
PAIR = dataclasses.replace(NODE, ranks=2)


def graph_of(*numbers_and_axes, mesh=MESH):
    """All-gathers of shards of some elements along axes, which start in this order; the waits come in reverse order."""
    graph, starts = Graph(), []
    for number, axis in numbers_and_axes:
        shard = graph.placeholder(f"shard{len(starts)}")
        shard.meta["val"] = torch.zeros(number)
        starts.append(graph.call_function(ops.all_gather.default, (shard, 2, mesh.axis(axis).group, "")))
        starts[-1].meta["val"] = torch.zeros(2 * number)
    waits = [graph.call_function(ops.wait.default, (x,)) for x in reversed(starts)]
    for x, start in zip(waits, reversed(starts), strict=True):
        x.meta["val"] = start.meta["val"]
    graph.output(waits)
    return GraphModule(torch.nn.Module(), graph), starts


def nothing(node):
    return 0.0


def ends(machine, *transfers, mesh=MESH):
    gm, starts = graph_of(*transfers, mesh=mesh)
    run = Lanes(machine, 4, nothing, mesh)
    run.run(gm)
    return [run.done(x) for x in starts], run


@pytest.mark.parametrize(("machine", "rates"), [(NODE, (100.0, 100.0)), (PAIR, (50.0, 100.0)),
                                                (dataclasses.replace(NODE, ranks=1), (50.0, 50.0))])  # fmt: skip
def test_an_axis_has_the_link_that_its_ranks_have(machine, rates):
    _, (data, tensor) = graph_of((10, "data"), (10, "tensor"))
    links = Links(machine, 4, MESH)
    assert (links.of(data).rate, links.of(tensor).rate) == rates
    assert (links.of(data).cable == links.of(tensor).cable) == (rates[0] == rates[1])
    assert links.of(data).lane == "sent along data" and links.of(data).size == 2


def test_along_one_axis_there_is_one_lane():
    line = Mesh.planned({"data": 2})
    _, (data,) = graph_of((10, "data"), mesh=line)
    assert Links(NODE, 2, line).of(data).lane == Links(NODE, 2).of(data).lane == "sent"


def test_latency_is_that_of_the_ranks_of_the_axis():
    mesh = Mesh.planned({"data": 512, "tensor": 2})
    _, (data, tensor) = graph_of((10, "data"), (10, "tensor"), mesh=mesh)
    graph = data.graph
    wide = graph.call_function(ops.all_gather.default, (data.args[0], 512, mesh.axis("data").group, ""))
    links = Links(dataclasses.replace(NODE, latency=1.0), 1024, mesh)
    assert links.of(wide).latency == pytest.approx(9.0) and links.of(tensor).latency == pytest.approx(1.0)
    assert sends(wide) and axis_of(wide, mesh) == "data" and axis_of(wide, None) == ""


def test_a_short_transfer_goes_before_what_is_left_of_a_long_one():
    # 400 bytes take 4 s and 40 bytes 0.4 s, at 100 bytes a second.
    (data, tensor), run = ends(NODE, (100, "data"), (10, "tensor"))
    assert (data, tensor) == pytest.approx((4.4, 0.4))
    assert dict(run.busy) == pytest.approx({"sent along data": 4.0, "sent along tensor": 0.4})
    assert {x.lane: (x.start, x.stop) for x in run.spans} == {
        "sent along data": pytest.approx((0.4, 4.4)),  # both begin at once: the short one first
        "sent along tensor": pytest.approx((0.0, 0.4)),
    }


def test_a_long_transfer_waits_for_what_is_left_of_a_short_one():
    (tensor, data), _ = ends(NODE, (10, "tensor"), (100, "data"))
    assert (data, tensor) == pytest.approx((4.4, 0.4))


def test_what_lies_between_nodes_is_not_in_the_way():
    (data, tensor), _ = ends(PAIR, (100, "data"), (10, "tensor"))
    assert (data, tensor) == pytest.approx((8.0, 0.4))


def test_a_cable_carries_no_more_than_it_can():
    """Whatever the order: all that is sent in a step takes at least its time at the link's rate."""
    many = [(10 + 7 * k % 40, ("data", "tensor")[k % 3 == 1]) for k in range(12)]
    (*found,), run = ends(NODE, *many)
    total = sum(4 * number for number, _ in many) / 100.0
    assert max(found) == pytest.approx(total) and sum(run.busy.values()) == pytest.approx(total)
    gm, _ = graph_of(*many)
    assert Timeline(gm, NODE, 4, nothing, MESH).seconds == pytest.approx(total)
    for lane in run.busy:
        spans = [(x.start, x.stop) for x in run.spans if x.lane == lane]
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
