"""States with experts of a rank's own, in global shapes: checkpoints, noise, rules that sum over dims."""

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.sharding.sharded import is_sharded


def init():
    torch.manual_seed(0)
    experts = {"up": torch.randn(4, 8, 16).double(), "down": torch.randn(4, 16, 8).double()}
    return {"moe": {"gate": torch.randn(4, 8).double(), "experts": experts}, "out": torch.randn(8, 1).double()}


def expert(p, rows):
    return torch.relu(rows @ p["up"]) @ p["down"]


def stepped(sizes, stage, tx):
    """A state after a step on the rows that follow from the rank's place."""
    mesh = Mesh.make(**sizes)
    experts = mesh.size("expert") > 1
    cuts = zerofn.moe.cuts(init(), mesh) if experts else None
    state = zerofn.shard(lambda: zerofn.TrainState.create(params=init(), tx=tx), stage=stage, mesh=mesh, cuts=cuts)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 8, generator=draw, dtype=torch.float64).chunk(mesh.rows.size)[mesh.rows.rank]

    def loss_fn(p, x):
        axis = "expert" if experts else None
        y, _ = zerofn.moe.layer(p["moe"], x, torch.vmap(expert), k=2, capacity=None, axis=axis)
        return (y @ p["out"]).square().mean()

    train_step = step_with(loss_fn)

    return train_step(state, rows)[0]


MESHES = [{"expert": 4}, {"data": 2, "expert": 2}, {"data": 4}]


def saved(folder, steps):
    """What each mesh has saved is loaded on those that stand so many places behind it."""
    for k, sizes in enumerate(MESHES):
        state = stepped(sizes, k, optim.adam(1e-2))
        zerofn.save(folder / str(k), state)
        whole = zerofn.unshard(state)
        for other in (MESHES[(k + step) % len(MESHES)] for step in steps):
            mesh = Mesh.make(**other)
            cuts = zerofn.moe.cuts(init(), mesh) if mesh.size("expert") > 1 else None
            like = zerofn.shard(
                lambda: zerofn.TrainState.create(params=init(), tx=optim.adam(1e-2)), stage=3 - k, mesh=mesh, cuts=cuts
            )
            assert_same_trees(zerofn.unshard(zerofn.load(folder / str(k), like=like)), whole)


@pytest.mark.part(steps=[(1,)])
@pytest.mark.parametrize("steps", [(1,), (2,)], ids=str)
def test_checkpoints_load_on_other_meshes(ranks, tmp_path, steps):
    ranks(4, saved, tmp_path, steps)


def held(sizes, stage):
    """For each unit: whether it is of experts, and the part of it that this rank has of the parameters and moments."""
    mesh = Mesh.make(**sizes)
    make = lambda: zerofn.TrainState.create(params=init(), tx=optim.adam(1e-2))  # noqa: E731
    state = zerofn.shard(make, stage=stage, mesh=mesh, cuts=zerofn.moe.cuts(init(), mesh))
    nodes = [x for x in zerofn.tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    assert len(nodes) == 3
    found = []
    for node in nodes:
        for unit, shard in zip(node.layout.units, node.shards, strict=True):
            found.append((unit.of_experts, unit.size // shard.numel()))
    return found


def test_dense_parts_lie_in_shards_over_all_ranks_and_experts_over_those_that_have_them(ranks):
    for sizes, dense, experts in (({"data": 2, "expert": 2}, 4, 2), ({"expert": 4}, 4, 1)):
        for stage in (1, 3):
            for found in ranks(4, held, sizes, stage):
                assert {share for of_experts, share in found if not of_experts} == {dense}
                assert {share for of_experts, share in found if of_experts} == {experts}


def by_mesh(sizes):
    state = stepped(sizes, 3, optim.adafactor(1e-2))
    return zerofn.unshard(state.params), zerofn.unshard(zerofn.normal_like(state.params, zerofn.random.key(3)))


def test_noise_and_sums_over_dims_are_those_of_whole_leaves(ranks):
    (params, noise), *_ = ranks(4, by_mesh, {"data": 4})
    for sizes in MESHES[:2]:
        for mine, ours in ranks(4, by_mesh, sizes):
            assert_same_trees(ours, noise)
            for a, b in zip(zerofn.tree.leaves(mine), zerofn.tree.leaves(params), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
