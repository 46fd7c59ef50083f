import pytest

import zerofn
from small_steps import (
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    lowered,
    num_alive,
    results_stay,
    state_of,
    users_of,
)
from zerofn import tree
from zerofn.graph.alias import positions, roots, writes
from zerofn.graph.edit import is_gather, loops, wait_of
from zerofn.passes import SCHEDULE
from zerofn.passes.prefetch import prefetch


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gathers_start_ahead(precision):
    gm = lowered(*SCHEDULE, precision=precision)
    where = positions(gm.graph)
    found = gathers(gm)
    starts, waits = [where[g] for g in found], [where[wait_of(g)] for g in found]
    assert starts == sorted(starts) and starts[2] < waits[0]  # two under way beside the first one
    used = [where[u] for g in found for u in users_of(g)]
    assert all(any(start < u < wait for u in used) for start, wait in list(zip(starts, waits, strict=True))[1:])
    assert num_alive(gm) == 3


def test_two_units_at_most_beside_the_one_in_use():
    for num_layers in (6, 12):
        assert num_alive(lowered(*SCHEDULE, num_layers=num_layers)) == 3


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
    ((_, body),) = loops(gm)
    with fake_ranks(2):
        for each in SCHEDULE:
            each(body)
    assert len(gathers(body)) == 8 and not gathers(gm)
    assert num_alive(body) == 3


def test_values_stay_under_the_whole_schedule(ranks):
    assert all(ranks(2, results_stay, *SCHEDULE))
