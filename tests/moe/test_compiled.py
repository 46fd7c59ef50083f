"""Steps with a mixture-of-experts layer, compiled and eager, at every stage: plain torch's on the global batch."""

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.plain_moe import expert, make_params, plain_layer
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.moe import layer, own

WIDTH, TOKENS, STEPS = 3, 6, 3
EXPERTS = {1: 5, 2: 6, 3: 6, 4: 4}  # by the number of ranks
OPTIONS = {"k": 2, "capacity": 0.75, "min_capacity": 1}


def start(num_experts):
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(2, WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    return {"into": wide[0], "moe": make_params(num_experts, WIDTH, residual=True), "out": wide[1]}


def batches(rank):
    draw = torch.Generator().manual_seed(30 + rank)
    return torch.randn(STEPS, 2, TOKENS, WIDTH, generator=draw, dtype=torch.float64)


def plain(size):
    """The losses of the global batch, and the parameters after all steps."""
    params, losses = start(EXPERTS[size]), []
    leaves = [x.requires_grad_() for x in zerofn.tree.leaves(params)]
    optimizer = torch.optim.SGD(leaves, 0.1, 0.9)
    for step in range(STEPS):
        loss = 0
        for x, target in (batches(rank)[step] for rank in range(size)):
            y, balance, z, *_ = plain_layer(params["moe"], torch.tanh(x @ params["into"]), **OPTIONS)
            loss = loss + ((y @ params["out"] - target).square().mean() + 0.1 * balance + 0.01 * z) / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, zerofn.tree_map(torch.detach, params)


def over_rows(p, rows):
    return torch.tanh(torch.addmm(p["bias"], rows, p["up"])) @ p["down"]


def loss_fn(params, batch):
    x, target = batch
    moe = {**params["moe"], "experts": own(params["moe"]["experts"], "data")}
    y, aux = layer(moe, torch.tanh(x @ params["into"]), torch.vmap(over_rows), axis="data", **OPTIONS)
    return (y @ params["out"] - target).square().mean() + 0.1 * aux.balance + 0.01 * aux.z


def trained(stage, captured):
    rank, size = dist.get_rank(), dist.get_world_size()

    def init_state():
        return zerofn.TrainState.create(params=start(EXPERTS[size]), tx=optim.sgd(0.1, 0.9))

    train_step = step_with(loss_fn)

    state = zerofn.shard(init_state, stage=stage)
    step, losses = zerofn.compile(train_step) if captured else train_step, []
    for batch in batches(rank):
        state, loss = step(state, batch)
        losses.append(loss.item())
    return losses, zerofn.unshard(state.params)


ALL = [(stage, captured) for stage in range(4) for captured in (False, True)]
SOME = [(0, True), (1, False), (3, True)]
FEW = [(0, True), (3, True)]


def trained_each(cases):
    return [trained(*case) for case in cases]


@pytest.mark.part(cases=[FEW])  # every stage on 2 ranks, with the axis expert: test_cuts.py
@pytest.mark.parametrize("size, cases", [(3, FEW), *((size, ALL) for size in (1, 2, 3, 4))])
def test_every_stage_is_plain_torch(ranks, size, cases):
    losses, params = plain(size)
    for found in ranks(size, trained_each, cases):
        for mine, ours in found:
            assert mine == pytest.approx(losses, rel=1e-12)
            for (name, x), y in zip(named(params).items(), zerofn.tree.leaves(ours), strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, msg=name)
        for _, ours in found[1:]:
            assert_same_trees(ours, found[0][1])


def named(params):
    paths, leaves, _ = zerofn.tree.flatten_with_path(params)
    return {zerofn.tree.name_of(p): x for p, x in zip(paths, leaves, strict=True)}


def noisy(captured):
    """Draws of the step's own key, and of one that is given: the same in both, other ones on each rank and step."""
    seen = []

    def noisy_loss(params, batch, key):
        x, _ = batch
        moe = {**params["moe"], "experts": own(params["moe"]["experts"], "data")}
        options = {"sample": "all", "priority": "random", "epsilon": 0.1, "capacity": 0.5, "min_capacity": 1}
        a, _ = layer(moe, x, torch.vmap(over_rows), axis="data", **options)
        b, _ = layer(moe, x, torch.vmap(over_rows), axis="data", key=key, **options)
        return a.square().mean() + b.square().mean(), (a.detach(), b.detach())

    def train_step(state, batch):
        (loss, aux), grads = state.value_and_grad(noisy_loss, has_aux=True)(batch, state.rng_at())
        return state.apply_gradients(grads), (loss, *aux)

    state = zerofn.shard(zerofn.TrainState.create(params=start(6), tx=optim.sgd(0.0)), stage=3)
    step = zerofn.compile(train_step) if captured else train_step
    for _ in range(2):
        state, aux = step(state, batches(0)[0])
        seen.append(aux)
    return seen


def test_noise_is_that_of_the_key_in_captured_steps_too(ranks):
    eager, captured = ranks(2, noisy, False), ranks(2, noisy, True)
    for mine, theirs in zip(eager, captured, strict=True):
        assert_same_trees(mine, theirs)
    for k in (1, 2):
        outputs = [run[step][k] for run in eager for step in range(2)]
        assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def single_expert():
    """`over_rows` is the expert of the plain layer, for many rows."""
    p = {k: v[0] for k, v in make_params(2, WIDTH)["experts"].items()}
    rows = torch.ones(4, WIDTH).double()
    return over_rows(p, rows), torch.stack([expert(p, row) for row in rows])


def test_the_expert_is_that_of_the_plain_layer():
    torch.testing.assert_close(*single_expert(), rtol=1e-13, atol=0)
