import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
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
from zerofn.graph.alias import positions, writes
from zerofn.graph.node_kinds import wait_of
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


def bit_equal():
    module = build(6)
    batch = batch_of(torch.distributed.get_rank())
    for stage in range(4):
        state, step = state_of(module, stage), train_step_of(module)
        before = results(captured(step, state, batch), state, batch)
        after = results(captured(step, state, batch, canonicalize, raise_reduce_scatters), state, batch)
        assert_same_trees(after, before, f"stage {stage}")


def test_values_stay(ranks):
    ranks(2, bit_equal)
