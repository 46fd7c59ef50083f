import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    SCHEDULE,
    aten,
    batch_of,
    build,
    captured,
    fake_ranks,
    lowered,
    ops,
    results,
    scatters,
    state_of,
    train_step_of,
)
from tests.support.some import some_of
from zerofn.comm.mesh import Mesh
from zerofn.graph.alias import positions, writes
from zerofn.graph.node_kinds import argument, is_gather, wait_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.raise_reduce_scatters import IN_FLIGHT, raise_reduce_scatters


def num_in_flight(gm):
    starts = set(scatters(gm))
    waits = {wait_of(s) for s in starts}
    most = now = 0
    for node in gm.graph.nodes:
        now += (node in starts) - (node in waits)
        most = max(most, now)
    return most


def test_a_scatter_starts_right_after_its_last_gradient():
    for precision in (None, "bf16"):
        gm = lowered(canonicalize, raise_reduce_scatters, precision=precision)
        nodes, where = list(gm.graph.nodes), positions(gm.graph)
        assert [s.args[3] for s in scatters(gm)] == ["15", "12", "9", "6", "3", "0"]
        for start in scatters(gm):
            ravel = start.args[0]
            assert ravel.target is ops.ravel.default
            last = max(ravel.all_input_nodes, key=where.__getitem__)
            between = nodes[where[last] + 1 : where[start]]
            assert set(between) <= {ravel, *(wait_of(s) for s in scatters(gm))}, between


def test_at_most_two_are_under_way():
    assert num_in_flight(lowered(canonicalize, raise_reduce_scatters)) == IN_FLIGHT == 2


def test_the_first_wait_comes_after_the_second_start():
    gm = lowered(canonicalize, raise_reduce_scatters)
    where = positions(gm.graph)
    starts = scatters(gm)
    for start, later in zip(starts, starts[2:], strict=False):
        assert where[starts[starts.index(start) + 1]] < where[wait_of(start)] < where[later]


def test_a_gradient_is_sent_after_what_writes_it_through_a_view():
    module = build(2)

    def step(state, batch):
        g = {k: torch.ones_like(p) * batch["x"].mean() for k, p in zerofn.gather(state.params).items()}
        for x in g.values():
            x[0] = 0
        return state.replace(params=zerofn.scatter(g, like=state.params)), batch["y"].sum()

    with fake_ranks(2):
        gm = captured(step, state_of(module, 3), batch_of(), canonicalize, raise_reduce_scatters).gm
    where = positions(gm.graph)
    writers = sorted(where[n] for n in gm.graph.nodes if writes(n))
    assert len(writers) == 4 and [where[s] > writers[2 * k + 1] for k, s in enumerate(scatters(gm))] == [True] * 2


def over_replicas(*schedule, hpz):
    """A step on replicate 2 x data 2 after some passes, and for each unit its transfers, by the axis."""
    module = build(6)
    with fake_ranks(4):
        mesh = Mesh.make(replicate=2, data=2)
        state = state_of(module, 3, mesh=mesh, hpz=hpz)
        program = captured(train_step_of(module), state, batch_of(), *schedule)
        found = {
            axis.name: [n for n in scatters(program.gm) if argument(n, "group") == axis.group] for axis in mesh.axes
        }
        gathers = [n for n in program.gm.graph.nodes if is_gather(n) and argument(n, "group") == mesh.replicas.group]
    return program.gm, found["data"], found["replicate"], gathers


@pytest.mark.parametrize("hpz", [False, True])
def test_what_is_reduced_across_replicas_starts_as_soon_as_it_is_reduced_within(hpz):
    """The last two units have nothing behind them that could hide it; all others do."""
    for schedule in ((canonicalize, raise_reduce_scatters), SCHEDULE):
        gm, within, across, back = over_replicas(*schedule, hpz=hpz)
        nodes, where = list(gm.graph.nodes), positions(gm.graph)
        assert len(within) == len(across) == 6 and len(back) == (0 if hpz else 6)
        last_gradient = where[within[-1]]
        assert [where[n] < last_gradient for n in across] == [True] * 4 + [False] * 2
        assert [where[n] < last_gradient for n in back] == ([] if hpz else [True] * 2 + [False] * 4)
        for start in across:
            (first,) = (n for n in within if argument(n, "unit") == argument(start, "unit"))
            between = nodes[where[wait_of(first)] + 1 : where[start]]
            assert not [n for n in between if n.target is aten.mm.default]  # nothing that takes long
        for starts in (within, across, back):
            for start, later in zip(starts[:-2], starts[1:-1], strict=True):
                assert where[wait_of(start)] > where[later]


def bit_equal():
    module = build(6)
    batch = batch_of(torch.distributed.get_rank())
    for stage in some_of(range(4), 1, 3):
        state, step = state_of(module, stage), train_step_of(module)
        before = results(captured(step, state, batch), state, batch)
        after = results(captured(step, state, batch, canonicalize, raise_reduce_scatters), state, batch)
        assert_same_trees(after, before, f"stage {stage}")


def test_values_stay(ranks):
    ranks(2, bit_equal)


def test_what_is_fed_back_moves_along():
    """The sum with what was left out before, and what is left out now, stand around their transfer."""
    gm = lowered(*SCHEDULE, num_layers=4, wire=zerofn.Wire(reduce="int8", smallest=0, feedback=True))
    nodes, where = list(gm.graph.nodes), positions(gm.graph)
    starts = scatters(gm)
    backward = max(where[n] for n in nodes if n.target in (aten.mm.default, aten.mm.out))
    assert len(starts) == 4 and sum(where[s] < backward for s in starts) >= 3
    for start in starts:
        sent = start.args[0]
        (rounded,) = [n for n in sent.users if n.target is ops.rounded.default]
        assert sent.target is aten.add.Tensor and where[rounded] == where[start] + 1
