import dataclasses

import numpy as np
import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from tests.support.small_steps import (
    SCHEDULE,
    assert_results_stay,
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    lowered,
    num_alive,
    state_of,
    take_seconds,
    users_of,
)
from zerofn import tree
from zerofn.cost import simulator
from zerofn.graph.alias import positions, roots, writes
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import UPDATE, is_fetch, is_gather, wait_of
from zerofn.passes import Context
from zerofn.passes.budget.decision import Choice, order_of
from zerofn.passes.prefetch import Bound, early, prefetch, sources_in

ops = torch.ops.zerofn


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gathers_start_ahead(precision):
    gm = lowered(*SCHEDULE, precision=precision)
    where = positions(gm.graph)
    found = gathers(gm)
    starts, waits = [where[g] for g in found], [where[wait_of(g)] for g in found]
    assert starts == sorted(starts) and starts[1] < waits[0]  # one follows the first one at once
    used = [where[u] for g in found for u in users_of(g)]
    assert all(any(start < u < wait for u in used) for start, wait in list(zip(starts, waits, strict=True))[1:])
    assert num_alive(gm) == 3


def test_two_units_at_most_beside_the_one_in_use():
    for num_layers in (6, 12):
        assert num_alive(lowered(*SCHEDULE, num_layers=num_layers)) == 3


def test_transfers_start_in_the_order_that_another_rank_has():
    """Ranks whose batches have other sizes would start gathers at other places among their reduce-scatters."""

    def order(choice, wanted=None):
        gm = lowered(*SCHEDULE[: SCHEDULE.index(prefetch)], num_layers=6)
        prefetch(gm, Context(simulator.usual_for(gm), choice=choice, order=wanted))
        return order_of(gm)

    late = Choice(starts=frozenset())
    assert order(Choice()) != order(late)
    assert order(Choice(), order(late)) == order(late)
    assert order(late, order(Choice())) == order(Choice())


# --- by time -----------------------------------------------------------------------------------------------------

# Each operation takes a second, and so does a transfer; numbers and views take nothing.
EVEN = zerofn.Machine("even", "cpu", 2, 1e12, 1.0, {"float32": 1.0}, link=1e30, network=1e30, launch=0.0, latency=1.0)


@pytest.fixture
def seconds(monkeypatch):
    """Seconds by node, to be filled; 1 for others that compute."""
    known = {}
    take_seconds(monkeypatch, lambda node: known.get(node.name, 1.0))
    return known


def layered(sizes, *, num_ops=4):
    """A graph of layers with a unit of so many elements each, gathered where it is used, and operations between."""
    graph = Graph()
    shards = [graph.placeholder(f"shard{k}") for k in range(len(sizes))]
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(1)
    for k, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        shard.meta["val"] = torch.zeros(size // 2)
        start = graph.call_function(ops.all_gather.default, (shard, 2, "g", f"unit{k}"), name=f"gather{k}")
        wait = graph.call_function(ops.wait.default, (start,), name=f"wait{k}")
        start.meta["val"] = wait.meta["val"] = torch.zeros(size)
        for _ in range(num_ops):
            x = graph.call_function(torch.ops.aten.add.Tensor, (x, wait))
            x.meta["val"] = torch.zeros(1)
    graph.output(x)
    return GraphModule(torch.nn.Module(), graph)


def order(gm):
    """Gathers and waits, in order, in short: g0 w0 g1 ..., and a dot for an operation between."""
    names = {"gather": "g", "wait": "w"}
    return [
        names[n.name.rstrip("0123456789")] + n.name[-1] if n.name[:4] in ("gath", "wait") else "."
        for n in gm.graph.nodes
        if n.op == "call_function"
    ]


def scheduled(gm, machine=EVEN, **decided):
    prefetch(gm, Context(machine, 2, **decided))
    return gm


def placed(gm, machine=EVEN, **decided):
    return " ".join(order(scheduled(gm, machine, **decided)))


def test_a_gather_starts_as_soon_as_its_link_is_free_and_three_units_at_most_are_there(seconds):
    assert placed(layered([100] * 5, num_ops=2)) == "g0 g1 w0 g2 . . g3 w1 . . g4 w2 . . w3 . . w4 . ."


def test_units_are_weighed_and_not_counted(seconds):
    """A large one beside small ones: while it is away there is room for more than two."""
    found = placed(layered([10, 10, 10, 10, 100, 10], num_ops=1)).split()
    where = {name: k for k, name in enumerate(found)}
    assert where["g3"] < where["w1"]  # with the link of one second and three units of the largest kind


def test_a_slow_link_is_never_left_idle(seconds):
    slow = dataclasses.replace(EVEN, latency=10.0)
    gm = layered([100] * 6, num_ops=2)
    placed(gm, slow)
    run = simulator.Lanes(slow, 2)
    run.run(gm)
    spans = [x for x in run.spans if x.lane == "sent"]
    assert len(spans) == 6 and spans[0].start == 0
    assert all(b.start == a.stop for a, b in zip(spans, spans[1:], strict=False))


def test_gathers_that_computing_can_hide_are_hidden(seconds):
    gm = layered([100] * 6, num_ops=2)
    on_demand = simulator.Lanes(EVEN, 2)
    on_demand.run(gm)
    run = simulator.Lanes(EVEN, 2)
    run.run(scheduled(gm))
    assert on_demand.waited["sent"] == 6 and run.waited["sent"] == 1  # for the first one


def test_starts_that_were_chosen(seconds):
    gm = layered([100] * 4, num_ops=2)
    choice = Choice(starts=frozenset({("gather2", "wait1"), ("gather3", "nowhere")}))
    assert placed(gm, choice=choice) == "g0 w0 . . g1 g2 w1 . . w2 . . g3 w3 . ."


@pytest.mark.parametrize("limit", [100, 199, 200, 299, 300, 10**9])
def test_a_limit_is_kept(seconds, limit):
    """A simulated run fills what is free, and nothing else."""
    gm = layered([25] * 5, num_ops=2)  # 100 bytes each
    nodes, where = list(gm.graph.nodes), positions(gm.graph)
    level = np.zeros(len(nodes), dtype=np.int64)
    for gather in gathers(gm):
        level[where[gather] : where[users_of(gather)[-1]] + 1] += 100
    found = early(gm, simulator.Lanes(EVEN, 2), sources_in(gm.graph), Bound(level, limit))
    for start, at in found.starts.items():
        level[at : where[start]] += 100
    assert level.max() <= max(100, limit) and (limit < 200 or level.max() > 100)
    assert found.seconds == 10 + {100: 5, 199: 5}.get(limit, 1)


def test_reads_start_ahead_too(tmp_path):
    """Shards that lie on drives are read, and then gathered, ahead of their use."""
    offload = zerofn.Offload(params="nvme", path=tmp_path)
    gm = lowered(*SCHEDULE, num_layers=6, offload=offload)
    where = positions(gm.graph)
    reads = [n for n in gm.graph.nodes if is_fetch(n) and not n.meta.get(UPDATE)]
    assert len(reads) == len(gathers(gm))
    ahead = [sum(where[n] < where[wait_of(x)] for n in reads) - k for k, x in enumerate(gathers(gm))]
    assert min(ahead[:-1]) >= 2, ahead  # while one is gathered the next one is read
    assert num_alive(gm) <= 3


def test_what_is_written_before_it_is_gathered_is_gathered_after():
    module = build(2)

    def step(state, batch):
        moved = tree.tree_map(lambda p: p * 2, state.params)
        first = zerofn.gather(state.params)
        tree.tree_map(lambda p: p.view(p.shape).mul_(3), moved)  # not the node that is gathered
        return first, zerofn.gather(moved)

    with fake_ranks(2):
        graph = captured(step, state_of(module, 3), batch_of(), prefetch).gm.graph
    where, root = positions(graph), roots(graph)
    written = {root[n]: where[n] for n in graph.nodes if writes(n)}
    late = [n for n in graph.nodes if is_gather(n) and root[n.args[0]] in written]
    assert len(late) == 2 and all(where[n] > written[root[n.args[0]]] for n in late)


def test_inside_a_loop_as_well():
    gm = lowered(num_microbatches=2)
    _, body = graphs_of(gm)
    with fake_ranks(2):
        for each in SCHEDULE:
            each(body, Context(EVEN, 2))
    assert len(gathers(body)) == 8 and not gathers(gm)
    assert num_alive(body) == 3


def test_values_stay_under_the_whole_schedule(ranks):
    ranks(2, assert_results_stay, *SCHEDULE)
