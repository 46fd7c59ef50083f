"""Steps on a mesh beside plain torch on the global batch, in float64."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.plain_sgd import trained_by_torch
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from tests.support.some import some_of
from zerofn import collectives, optim
from zerofn.comm.mesh import Mesh
from zerofn.parallel import tensor

STEPS = 4
PLAN = {"0": "colwise", "2": "rowwise"}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()


def batches():
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, 24, 12, generator=draw, dtype=torch.float64)
    return [{"x": each[:, :7], "y": each[:, 7:]} for each in x]


def plain():
    return trained_by_torch(build(), batches(), max_norm=0.3)


def trained(mesh, stage, captured, num_microbatches):
    model = zerofn.skeleton(build)
    cuts = tensor(model, mesh, PLAN) if mesh.size("tensor") > 1 else None

    def init_state():
        tx = optim.chain(optim.clip_by_global_norm(0.3), optim.sgd(0.1, 0.9))
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

    def loss_fn(params, batch):
        return (functional_call(model, params, (batch["x"],)) - batch["y"]).square().mean()

    def train_step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)
    step, losses = zerofn.compile(train_step) if captured else train_step, []
    for batch in batches():
        own = {k: x.chunk(mesh.batch.size)[mesh.batch.rank] for k, x in batch.items()}
        state, loss = step(state, own)
        losses.append(loss.item())
    return losses, zerofn.unshard(state).params


def trained_each(sizes, cases):
    mesh = Mesh.make(**sizes)
    return [trained(mesh, *case) for case in [*cases, *some_of([(2, True, 2), (3, False, 2)], (2, True, 2))]]


ALL = [(stage, captured, 1) for stage in range(4) for captured in (False, True)]
SOME = [(0, True, 1), (1, False, 1), (3, True, 1)]
MESHES = [
    {"replicate": 2, "data": 1},
    {"replicate": 3},
    {"replicate": 2, "data": 2},
    {"data": 2, "tensor": 2},
    {"tensor": 2, "replicate": 2},
    {"replicate": 2, "data": 2, "tensor": 2},
]


@pytest.mark.part(cases=[SOME])
@pytest.mark.parametrize(("sizes", "cases"), [({"data": 2, "tensor": 2}, SOME), *((x, ALL) for x in MESHES)], ids=str)
def test_every_stage_is_plain_torch_and_has_the_bits_of_the_others(ranks, sizes, cases):
    num_ranks = torch.tensor(list(sizes.values())).prod().item()
    losses, params = plain()
    for found in ranks(num_ranks, trained_each, sizes, cases):
        for mine, ours in found:
            assert mine == pytest.approx(losses, rel=1e-12)
            for key, x in params.items():
                torch.testing.assert_close(ours[key], x, rtol=1e-12, atol=1e-14)
        for _, ours in found[1:-2]:
            assert_same_trees(ours, found[0][1])


def different_starts():
    """Ranks that initialise other values: all copies take the first rank's."""
    mesh = Mesh.make(replicate=2, data=1, tensor=2)
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    cuts = tensor(zerofn.skeleton(build), mesh, PLAN)
    state = zerofn.shard({"params": dict(model.named_parameters())}, stage=3, mesh=mesh, cuts=cuts)
    return zerofn.unshard(state)


def test_copies_of_a_state_are_equal(ranks):
    first, *others = ranks(4, different_starts)
    for other in others:
        assert_same_trees(other, first)


def losses_that_meet_the_state(axis):
    """A step that scales its update by a value which is summed over `axis` alone."""
    mesh = Mesh.make(replicate=2, data=2)
    model = zerofn.skeleton(build)

    def train_step(state, batch):
        def loss_fn(params, batch):
            return functional_call(model, params, (batch["x"],)).square().mean()

        _, grads = state.value_and_grad(loss_fn)(batch)
        own = collectives.all_reduce(batch["x"].sum(), axis)
        return state.apply_gradients(zerofn.tree_map(lambda g: g * own, grads)), own

    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.sgd(0.1)), mesh=mesh
    )
    zerofn.compile(train_step)(state, {"x": torch.ones(4, 7, dtype=torch.float64) * mesh.batch.rank})


def refused():
    with pytest.raises(zerofn.CaptureError, match="combines a shard with a value that differs from rank to rank"):
        losses_that_meet_the_state("data")
    losses_that_meet_the_state(Mesh.make(replicate=2, data=2).all)


@pytest.mark.whole
def test_a_value_that_is_equal_along_one_axis_differs_along_the_other(ranks):
    ranks(4, refused)


def other_rows():
    mesh = Mesh.make(tensor=2)
    model = zerofn.skeleton(build)
    cuts = tensor(model, mesh, PLAN)
    train_step = step_with(lambda p, x: functional_call(model, p, (x,)).square().mean())

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.sgd(0.1))

    step = zerofn.compile(train_step)
    state = zerofn.shard(init_state, mesh=mesh, cuts=cuts)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ranks 0 and 1 must have the same rows, but their batches differ"):
            step(state, torch.ones(4, 7, dtype=torch.float64) * mesh.axis("tensor").rank)
    scaled = zerofn.compile(lambda state, batch: train_step(state, batch["x"] * batch["scale"]))
    with pytest.raises(RuntimeError, match="ranks 0 and 1 must have the same rows, but their batches differ"):
        scaled(state, {"x": torch.ones(4, 7, dtype=torch.float64), "scale": 1.0 + mesh.axis("tensor").rank})
    state, _ = step(state, torch.ones(4, 7, dtype=torch.float64))
    before = zerofn.unshard(state)
    with pytest.raises(RuntimeError, match="batch entry .* which ranks of 'tensor' share, must be the same"):
        step(state, torch.ones(4, 7, dtype=torch.float64) * mesh.axis("tensor").rank)
    assert_same_trees(zerofn.unshard(state), before)
    step(state, torch.zeros(4, 7, dtype=torch.float64))


def test_ranks_that_share_the_work_on_a_batch_need_the_same(ranks):
    ranks(2, other_rows)


def saved(folder):
    for sizes in ({"replicate": 2, "data": 2}, {"data": 4}):
        mesh = Mesh.make(**sizes)
        state = zerofn.shard({"params": dict(build().named_parameters())}, mesh=mesh)
        path = folder / "_".join(sizes)
        zerofn.save(path, state)
        like = zerofn.shard({"params": dict(build().named_parameters())}, mesh=Mesh.make(data=2, replicate=2))
        like = zerofn.tree_map(torch.zeros_like, like)
        assert_same_trees(zerofn.unshard(zerofn.load(path, like=like)), zerofn.unshard(state))


def test_checkpoints_of_replicas_load_on_other_meshes(ranks, tmp_path):
    ranks(4, saved, tmp_path)
