import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import SCHEDULE, assert_results_stay, captured, fake_ranks, gathers, results
from zerofn import tree
from zerofn.graph.node_kinds import wait_of
from zerofn.passes.read_local_shards import read_local_shards

aten = torch.ops.aten
# One unit of 7,200 elements, in shards of 4,096 on two ranks: b lies across the cut.
PARAMS = {"a": torch.arange(2400.0), "b": torch.arange(2400.0) + 1, "c": torch.arange(2400.0) + 2}


def sums(state, batch):
    return [p.sin().sum() for p in zerofn.gather(state["params"]).values()]


def state(**options):
    return zerofn.shard({"params": PARAMS}, stage=3, **options)


def reads(gm):
    """(what is read of the shard, what of the gathered unit, what of the shard is copied into it), as intervals."""
    (start,) = gathers(gm)

    def of(node):
        return sorted(u.args[2:] for u in node.users if u.target is aten.slice.Tensor)

    return of(start.args[0]), of(wait_of(start)), start.kwargs.get("own")


def on_rank(rank, step=sums, **options):
    with fake_ranks(2, rank):
        return captured(step, state(**options), {}, read_local_shards).gm


def test_a_leaf_in_this_ranks_piece_is_read_there():
    assert reads(on_rank(0)) == ([(0, 2400)], [(2400, 4800), (4800, 7200)], [2400, 4096])
    assert reads(on_rank(1)) == ([(704, 3104)], [(0, 2400), (2400, 4800)], [0, 704])


def test_a_piece_without_edges_is_not_copied():
    halves = {"params": {"a": torch.ones(4096), "b": torch.ones(4096)}}
    with fake_ranks(2, 1):
        gm = captured(sums, zerofn.shard(halves, stage=3), {}, read_local_shards).gm
    assert reads(gm) == ([(0, 4096)], [(0, 4096)], [0, 0])


def test_what_others_need_is_gathered_still():
    small = {"params": {"a": torch.ones(10)}}  # all of it is rank 0's
    for rank in (0, 1):
        with fake_ranks(2, rank):
            gm = captured(sums, zerofn.shard(small, stage=3), {}, read_local_shards).gm
        assert len(gathers(gm)) == 1 and reads(gm)[0] == []


def test_a_piece_that_is_cast_for_the_gather_is_let_go():
    assert reads(on_rank(0, precision="bf16"))[0] == []


def test_a_piece_that_is_rounded_where_it_is_sent_is_read_as_it_arrives():
    assert reads(on_rank(0, wire="bf16")) == ([], [(0, 2400), (2400, 4800), (4800, 7200)], None)


def written_later(state, batch):
    moved = tree.tree_map(lambda p: p * 2, state["params"])
    full = zerofn.gather(moved)
    tree.tree_map(lambda p: p.mul_(0), moved)
    return [p.sin().sum() for p in full.values()]


def test_a_value_that_is_written_later_is_read_as_it_was_gathered():
    assert reads(on_rank(0, written_later))[0] == []


def updated(state, batch):
    full = zerofn.gather(state["params"])
    return {"params": tree.tree_map(lambda p: p - 1, state["params"])}, {k: p.sin() for k, p in full.items()}


def stay():
    plain, ours = (captured(written_later, state(), {}, *schedule) for schedule in ((), (read_local_shards,)))
    assert_same_trees(results(ours, state(), {}), results(plain, state(), {}))
    run, value = zerofn.compile(updated), state()
    for k in range(3):  # what is read of a shard is read before the shard is updated
        value, seen = run(value, {})
        assert all(torch.equal(seen[name], (x - k).sin()) for name, x in PARAMS.items())
    assert_results_stay(*SCHEDULE)


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", [2, 3])
def test_values_stay(ranks, size):
    ranks(size, stay)
