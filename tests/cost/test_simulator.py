"""A simulated run beside what is worked out by hand."""

import dataclasses

import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from zerofn.cost.machine import KNOWN
from zerofn.cost.simulator import COMPUTE, UPDATES, Timeline, roofline
from zerofn.dry_run.fake_machine import FakeMachine
from zerofn.graph.node_kinds import ASIDE

ops = torch.ops.zerofn
SLOW = zerofn.Machine("slow", "cpu", 4, 1e9, 1e3, {"float32": 1e3}, link=100.0, network=50.0, launch=0.0, latency=0.0)
SIZE = 10  # elements of a shard: 40 bytes


def graph_of(*, waits_late, again=False):
    """A gather of a shard, some work, a wait, and more work."""
    graph = Graph()
    shard, x = graph.placeholder("shard"), graph.placeholder("x")
    shard.meta["val"], x.meta["val"] = torch.zeros(SIZE), torch.zeros(1)
    start = graph.call_function(ops.all_gather.default, (shard, 2, "g", "unit"))
    start.meta["val"] = torch.zeros(2 * SIZE)

    def work():
        node = graph.call_function(torch.ops.aten.neg.default, (x,))
        node.meta["val"] = torch.zeros(1)
        return node

    before = [work()] if waits_late else []
    wait = graph.call_function(ops.wait.default, (start,))
    wait.meta["val"] = start.meta["val"]
    after = [] if waits_late else [work()]
    graph.output([wait, *before, *after])
    return GraphModule(torch.nn.Module(), graph)


def cost(node):
    return 1.0 if node.target is torch.ops.aten.neg.default else 0.0


@pytest.mark.parametrize(("waits_late", "seconds", "waited"), [(True, 1.0, 0.0), (False, 1.4, 0.4)])
def test_what_is_sent_meanwhile_takes_no_time(waits_late, seconds, waited):
    # 40 bytes at 100 bytes a second: 0.4 s.
    found = Timeline(graph_of(waits_late=waits_late), SLOW, 2, cost)
    assert found.seconds == pytest.approx(seconds)
    assert found.waited.get("sent", 0.0) == pytest.approx(waited)
    assert found.busy["sent"] == pytest.approx(0.4)
    assert found.bound == COMPUTE


@pytest.mark.parametrize(
    ("what", "elements", "encoded", "sent", "decoded", "device"),
    [
        ("all_gather", SIZE, 40 + 20, 20, 2 * (40 + 20), "cpu"),
        ("all_gather_into_", 2 * SIZE, 40 + 20, 20, 2 * (40 + 20), "cpu"),
        ("reduce_scatter", 2 * SIZE, 2 * (40 + 20), 20, 2 * 20 + 40, "cpu"),  # in one pass
        ("reduce_scatter", 2 * SIZE, 2 * (40 + 20), 20, 2 * 20 + 40 + 2 * 40, "meta"),  # the second row is added
    ],
)
def test_a_codec_takes_the_time_of_its_bytes(what, elements, encoded, sent, decoded, device):
    graph = Graph()
    x, rank = graph.placeholder("x"), [0] * (what == "all_gather_into_")
    x.meta["val"] = torch.zeros(elements, device=device)
    start = graph.call_function(getattr(ops, what).default, (x, *rank, 2, "g", "unit", "bf16"))
    start.meta["val"] = None if rank else torch.zeros(2 * SIZE if what == "all_gather" else SIZE, device=device)
    wait = graph.call_function(ops.wait.default, (x if rank else start,))
    wait.meta["val"] = (x if rank else start).meta["val"]
    graph.output([wait])
    found = Timeline(GraphModule(torch.nn.Module(), graph), SLOW, 2)
    assert found.busy["sent"] == pytest.approx(sent / 100)
    assert found.busy[COMPUTE] == pytest.approx((encoded + decoded) / 1e3)


def test_ranks_of_other_nodes_are_reached_by_the_network():
    assert SLOW.rank_link(4) == 100.0
    assert SLOW.rank_link(5) == 50.0


def test_what_is_sent_for_longest_bounds_the_step():
    slower = dataclasses.replace(SLOW, link=10.0)
    found = Timeline(graph_of(waits_late=True), slower, 2, cost)
    assert found.bound == "sent"
    assert found.seconds == pytest.approx(4.0)


def test_ranks_wait_for_the_slowest():
    uneven = dataclasses.replace(SLOW, slowest=1.5)
    assert [Timeline(graph_of(waits_late=False), uneven, world, cost).busy[COMPUTE] for world in (1, 2)] == [1.0, 1.5]


def test_latency_grows_with_the_logarithm_of_ranks():
    far = dataclasses.replace(SLOW, latency=1.0, network=1e12, link=1e12)
    assert Timeline(graph_of(waits_late=True), far, 1024, cost).busy["sent"] == pytest.approx(10.0)


def test_the_host_updates_meanwhile():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(1)
    for aside in (True, False):
        node = graph.call_function(torch.ops.aten.neg.default, (x,))
        node.meta["val"] = torch.zeros(1)
        if aside:
            node.meta[ASIDE] = True
    graph.output(node)
    found = Timeline(GraphModule(torch.nn.Module(), graph), SLOW, 1, cost)
    assert found.seconds == pytest.approx(1.0)
    assert dict(found.busy) == {UPDATES: 1.0, COMPUTE: 1.0}


def test_a_product_takes_its_arithmetic_and_a_sum_its_bytes():
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = b.meta["val"] = torch.zeros(1000, 1000)
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    total = graph.call_function(torch.ops.aten.add.Tensor, (a, product))
    product.meta["val"] = total.meta["val"] = torch.zeros(1000, 1000)
    machine = dataclasses.replace(KNOWN["H100-8"], launch=0.0)
    with FakeMachine(True, 1e9, 1e9)():
        assert roofline(machine)(product) == pytest.approx(2e9 / machine.flops["float32"])
        assert roofline(machine)(total) == pytest.approx(12e6 / machine.memory_rate)


def test_a_product_of_codes_takes_its_arithmetic_at_the_rate_of_float8():
    """Where a machine's is not known, at that of float32."""
    codes, scale = torch.zeros(1024, 2048, dtype=torch.uint8), torch.zeros(())
    graph = Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(4)]
    for node, value in zip(inputs, (codes, codes, scale, scale), strict=True):
        node.meta["val"] = value
    product = graph.call_function(torch.ops.zerofn.fp8_mm.default, (*inputs, None, False, torch.bfloat16))
    product.meta["val"] = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    machine = dataclasses.replace(KNOWN["H100-8"], launch=0.0, memory_rate=1e15)
    without = dataclasses.replace(machine, flops={"float32": 1e12})
    with FakeMachine(True, 1e9, 1e9)():
        assert roofline(machine)(product) == pytest.approx(2 * 2**31 / machine.flops["float8_e4m3fn"])
        assert roofline(without)(product) == pytest.approx(2 * 2**31 / 1e12)


def test_what_leaves_a_number_takes_as_long_as_what_it_reads():
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops.aten.sum.default, (x,))
    total.meta["val"] = torch.zeros(())
    machine = dataclasses.replace(KNOWN["H100-8"], launch=0.0)
    for device, rate in (("cpu", machine.memory_rate), ("meta", machine.host_rate / machine.ranks)):
        x.meta["val"] = torch.zeros(1000, 1000, device=device)
        with FakeMachine(True, 1e9, 1e9)():
            assert roofline(machine)(total) == pytest.approx(4e6 / rate, rel=1e-5)
