import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    batch_of,
    build,
    fake_ranks,
    gathers,
    ops,
    same,
    scheduled,
    state_of,
    train_step_of,
)
from zerofn import tree
from zerofn.graph.alias import positions

CODED = zerofn.Precision(wire="bf16")


def graph_of(stage, **options):
    module = build()
    with fake_ranks(2):
        return scheduled(train_step_of(module), state_of(module, stage, **options), batch_of(), donating=True).gm


def test_every_unit_is_sent_once_right_after_its_update():
    for stage in (1, 2):
        gm = graph_of(stage)
        nodes, where = list(gm.graph.nodes), positions(gm.graph)
        starts = [n for n in nodes if n.target is ops.all_gather_into_.default]
        updates = [n for n in nodes if n.target is ops.adamw_.default]
        assert [s.args[4] for s in starts] == ["0", "3", "6", "9"] and not gathers(gm)
        assert [where[s] - where[u] for s, u in zip(starts, updates, strict=True)] == [1] * 4


def test_stages_0_and_3_gather_no_updated_parameters():
    for stage in (0, 3):
        assert all(n.target is not ops.all_gather_into_.default for n in graph_of(stage).graph.nodes)


def copies_after_steps(stage, precision):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = build()
    state, step = state_of(module, stage, precision=precision), zerofn.compile(train_step_of(module))
    places = [x.data_ptr() for x in state.params.full]
    for k in range(3):
        state, _ = step(state, batch_of(rank, seed=k))
        assert [x.data_ptr() for x in state.params.full] == places
        dropped = tree.tree_map(lambda p: p, state.params)
        assert dropped.full is None
        assert_same_trees(zerofn.gather(state.params), zerofn.gather(dropped))
        for unit, shard, full in zip(state.params.layout.units, state.params.shards, state.params.full, strict=True):
            a, b = state.params.layout.cut(unit, rank)
            arrived = shard.bfloat16().float() if precision == CODED else shard.to(full.dtype)
            assert torch.equal(full[a:b], arrived) and full.numel() == size * (b - a)
            assert (shard.data_ptr() == full[a:].data_ptr()) == (precision is None)
    return zerofn.unshard(state.params)


@pytest.mark.part(precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16", CODED])
def test_the_copy_is_what_a_gather_would_give(ranks, precision):
    found = [ranks(2, copies_after_steps, stage, precision) for stage in (1, 2)]
    full = [x for per_rank in found for x in per_rank]
    assert all(same(list(x.values()), list(full[0].values())) for x in full)
