"""Experts along an axis of the mesh: steps at every stage beside plain torch on the global batch, in float64."""

import re

import pytest
import torch

import zerofn
from tests.moe.test_compiled import ALL, OPTIONS, SOME, STEPS, TOKENS, WIDTH, named, over_rows, start
from tests.support.plain_moe import plain_layer
from tests.support.same import assert_same_trees
from tests.support.some import some_of
from zerofn import collectives, moe, optim
from zerofn.comm.current_mesh import axes_of
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal

EXPERTS = 6
MESHES = [{"expert": 2}, {"expert": 3}, {"data": 2, "expert": 2}, {"expert": 2, "replicate": 2}]
CLIP = 0.3


def batches(rank):
    draw = torch.Generator().manual_seed(50 + rank)
    return torch.randn(STEPS, 2, TOKENS, WIDTH, generator=draw, dtype=torch.float64)


def group_loss(params, batch):
    """Of one rank's rows, by a loop over them."""
    x, target = batch
    y, balance, z, *_ = plain_layer(params["moe"], torch.tanh(x @ params["into"]), **OPTIONS)
    return (y @ params["out"] - target).square().mean() + 0.1 * balance + 0.01 * z


def plain(size, halves=False):
    """The losses of the global batch, the norms of its gradients, and the parameters after all steps."""
    params, losses, norms = start(EXPERTS), [], []
    leaves = [x.requires_grad_() for x in zerofn.tree.leaves(params)]
    optimizer = torch.optim.SGD(leaves, 0.1, 0.9)
    for step in range(STEPS):
        parts = [half for rank in range(size) for half in microbatches(batches(rank)[step], halves)]
        loss = sum(group_loss(params, part) for part in parts) / len(parts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(leaves, CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, zerofn.tree_map(torch.detach, params)


def microbatches(batch, halves):
    return torch.stack(batch.chunk(2, 1)).unbind() if halves else [batch]


def loss_fn(params, x, target):
    y, aux = moe.layer(params["moe"], torch.tanh(x @ params["into"]), torch.vmap(over_rows), axis="expert", **OPTIONS)
    return (y @ params["out"] - target).square().mean() + 0.1 * aux.balance + 0.01 * aux.z


def trained(mesh, stage, captured, num_microbatches=1, **options):
    def init_state():
        tx = optim.chain(optim.clip_by_global_norm(CLIP), optim.sgd(0.1, 0.9))
        return zerofn.TrainState.create(params=start(EXPERTS), tx=tx)

    def train_step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(*batch)
        return state.apply_gradients(grads), (loss, zerofn.global_norm(grads))

    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=moe.cuts(start(EXPERTS), mesh), **options)
    step, told = zerofn.compile(train_step) if captured else train_step, []
    for batch in batches(mesh.batch.rank):
        state, aux = step(state, tuple(batch))
        told.append([x.item() for x in aux])
    return told, zerofn.unshard(state.params)


def trained_each(sizes, cases):
    mesh = Mesh.make(**sizes)
    return [trained(mesh, *case) for case in cases], [trained(mesh, *case, 2) for case in ((2, True), (3, False))]


def check(found, expected):
    losses, norms, params = expected
    for told, ours in found:
        assert [x[0] for x in told] == pytest.approx(losses, rel=1e-12)
        assert [x[1] for x in told] == pytest.approx(norms, rel=1e-12)
        for (name, x), y in zip(named(params).items(), zerofn.tree.leaves(ours), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.part(cases=[SOME])
@pytest.mark.parametrize("sizes, cases", [({"expert": 2}, SOME), *((sizes, ALL) for sizes in MESHES)])
def test_every_stage_is_plain_torch_and_has_the_bits_of_the_others(ranks, sizes, cases):
    size = torch.tensor(list(sizes.values())).prod().item()
    for whole, halves in ranks(size, trained_each, sizes, cases):
        check(whole, plain(size))
        check(halves, plain(size, halves=True))
        for _, ours in whole[1:]:
            assert_same_trees(ours, whole[0][1])


def over_all_ranks(sizes):
    mesh = Mesh.make(**sizes)
    return [trained(mesh, 3, captured, hpz=True) for captured in (True, False)], trained(mesh, 3, True, 2, hpz=True)


@pytest.mark.parametrize("sizes", [{"replicate": 2, "expert": 2}, {"replicate": 2, "data": 2, "expert": 2}], ids=str)
@pytest.mark.whole  # test_state.py has states over all ranks
def test_state_over_all_ranks_is_plain_torch_too(ranks, sizes):
    """Experts are gathered among the ranks that have the same ones, of which there may be one."""
    size = torch.tensor(list(sizes.values())).prod().item()
    for whole, halves in ranks(size, over_all_ranks, sizes):
        check(whole, plain(size))
        check([halves], plain(size, halves=True))


def product(sizes):
    """A Hessian-vector product through the axis, norms, and how much of the experts is here."""
    mesh = Mesh.make(**sizes)
    params = start(EXPERTS)
    sharded = zerofn.shard({"params": params}, stage=3, mesh=mesh, cuts=moe.cuts(params, mesh))["params"]
    x, target = batches(mesh.batch.rank)[0]
    with axes_of(mesh):  # as value_and_grad does
        gradient = torch.func.grad(lambda p: loss_fn(zerofn.gather(p), x, target))
        found = torch.func.jvp(gradient, (sharded,), (zerofn.tree_map(torch.ones_like, sharded),))[1]
    shape = tuple(sharded["moe.experts.up"].shape)
    return zerofn.unshard(found), zerofn.global_norm(found).item(), zerofn.leaf_norms(sharded), shape


@pytest.mark.parametrize("sizes", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_hessian_vector_products_and_norms_are_those_of_the_global_batch(ranks, sizes):
    size = torch.tensor(list(sizes.values())).prod().item()
    params = start(EXPERTS)
    leaves = [x.requires_grad_() for x in zerofn.tree.leaves(params)]
    loss = sum(group_loss(params, batches(rank)[0]) for rank in range(size)) / size
    along = sum(g.sum() for g in torch.autograd.grad(loss, leaves, create_graph=True))
    expected = torch.autograd.grad(along, leaves)
    norm = torch.nn.utils.get_total_norm(expected).item()
    for found, length, norms, shape in ranks(size, product, sizes):
        for name, x, y in zip(named(params), expected, zerofn.tree.leaves(found), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, msg=name)
        assert length == pytest.approx(norm, rel=1e-12)
        assert {k: v.item() for k, v in norms.items()} == pytest.approx(
            {k: v.detach().norm().item() for k, v in named(params).items()}, rel=1e-12
        )
        assert shape == (EXPERTS // sizes["expert"], WIDTH, 4)


def different_starts():
    """Ranks that initialise other values."""
    mesh = Mesh.make(data=2, expert=2)
    torch.manual_seed(torch.distributed.get_rank())
    params = zerofn.tree_map(lambda x: torch.randn(x.shape), start(4))
    found = []
    for stage in (0, 1, 3):
        found.append(
            zerofn.unshard(zerofn.shard({"params": params}, stage=stage, mesh=mesh, cuts=moe.cuts(params, mesh)))
        )
    return found


def test_copies_of_a_state_are_equal(ranks):
    first, *others = ranks(4, different_starts)
    for other in others:
        assert_same_trees(other, first)


def meeting_the_state(stage):
    """What is computed from a rank's rows, or its experts, differs along the axis, and may not meet the state."""
    mesh = Mesh.make(data=1, expert=2)

    def of_rows(params, batch):
        return batch[0].sum()

    def of_experts(params, batch):
        return zerofn.gather(params)["moe"]["experts"]["up"].square().sum()

    def of_all_experts(params, batch):
        return collectives.all_reduce(of_experts(params, batch), "expert")

    def of_others(params, batch):
        return zerofn.gather(params)["moe"]["gate"].square().sum()

    def run(number):
        def train_step(state, batch):
            _, grads = state.value_and_grad(loss_fn)(*batch)
            return state.apply_gradients(zerofn.tree_map(lambda g: g * number(state.params, batch), grads)), None

        def init_state():
            return zerofn.TrainState.create(params=start(EXPERTS), tx=optim.sgd(0.1))

        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=moe.cuts(start(EXPERTS), mesh))
        zerofn.compile(train_step)(state, tuple(batches(mesh.batch.rank)[0]))

    for number, cause in ((of_rows, "batch entry"), (of_experts, "own experts")):
        with pytest.raises(zerofn.CaptureError, match="combines a shard with a value that differs") as told:
            run(number)
        assert cause in str(told.value)
    for number in some_of((of_all_experts, of_others), of_all_experts):
        run(number)


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_ranks_own_values_may_not_meet_the_state(ranks, stage):
    ranks(2, meeting_the_state, stage)


def refusals():
    mesh = Mesh.make(expert=2)
    params = start(EXPERTS)
    bad = [
        (lambda: moe.cuts(params, Mesh.make(data=2)), "mesh has no axis 'expert'"),
        (lambda: moe.cuts({"w": torch.ones(2)}, mesh), "no leaf belongs to experts"),
        (
            lambda: moe.cuts(start(5), mesh),
            r"'moe.experts.bias' has shape \[5, 4\], and 2 ranks along 'expert' cannot divide",
        ),
        (lambda: moe.cuts({"experts": torch.ones(0, 4)}, mesh), r"'experts' has shape \[0, 4\], and 2 ranks"),
        (lambda: zerofn.shard({"params": params}, mesh=mesh), r"no leaf is cut over it. Pass cuts=zerofn.moe.cuts"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
    state = zerofn.shard({"params": params}, mesh=mesh, cuts=moe.cuts(params, mesh))
    with pytest.raises(NotImplementedError, match="scatter: some leaves are cut along 'expert'"):
        zerofn.scatter(zerofn.gather(state["params"]), like=state["params"])


def test_mistakes_are_sentences(ranks):
    ranks(2, refusals)


def test_one_rank_needs_no_cuts():
    assert moe.cuts(start(5), Mesh.make(expert=1)) == {}
    assert (
        moe.cuts({"w": torch.empty(4, 2, device="meta")}, Mesh.make(expert=1), experts=lambda name: name == "w") == {}
    )


WEIGHTS = (3.0, 0.0, 5.0, 1.0)  # one rank has nothing that counts, and still experts


def weighted_loss(params, x, target, weight):
    """The first rows of a rank count, as many as its weight."""
    y, _ = moe.layer(params["moe"], torch.tanh(x @ params["into"]), torch.vmap(over_rows), axis="expert", **OPTIONS)
    counts = torch.arange(len(x)) < weight
    return ((y @ params["out"] - target).square().mean(-1) * counts).sum(), weight


def weighted(sizes, stage, num_microbatches):
    mesh = Mesh.make(**sizes)
    params = start(EXPERTS)
    sharded = zerofn.shard({"params": params}, stage=stage, mesh=mesh, cuts=moe.cuts(params, mesh))["params"]
    x, target = batches(mesh.batch.rank)[0].repeat(1, num_microbatches, 1)
    weight = torch.tensor([WEIGHTS[(mesh.batch.rank + k) % 4] for k in range(num_microbatches)])

    def loss(p, x, target, weight):
        return weighted_loss(p, x, target, weight.sum())

    found, grads = zerofn.accumulate(zerofn.value_and_grad(loss), num_microbatches)(sharded, x, target, weight)
    return found, zerofn.unshard(grads)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_weights_of_ranks_are_those_of_their_own_losses(ranks, sizes, num_microbatches):
    """Gradients of experts come from the losses of all ranks, each of which has a weight of its own."""
    size = torch.tensor(list(sizes.values())).prod().item()
    params = start(EXPERTS)
    leaves = [x.requires_grad_() for x in zerofn.tree.leaves(params)]
    total = count = 0
    for rank in range(size):
        x, target = batches(rank)[0]
        y, *_ = plain_layer(params["moe"], torch.tanh(x @ params["into"]), **OPTIONS)
        rows = (y @ params["out"] - target).square().mean(-1)
        for k in range(num_microbatches):
            weight = WEIGHTS[(rank + k) % 4]
            total, count = total + rows[: int(weight)].sum(), count + weight
    expected = torch.autograd.grad(total / count, leaves)
    for stage in (0, 3):
        for loss, grads in ranks(size, weighted, sizes, stage, num_microbatches):
            torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-12, atol=0)
            for name, x, y in zip(named(params), expected, zerofn.tree.leaves(grads), strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, msg=name)


def variants(folder):
    """The same steps with activations made again, state on a drive, and a budget."""
    mesh = Mesh.make(expert=2)
    cuts = moe.cuts(start(EXPERTS), mesh)

    def run(loss, memory=None, **options):
        def train_step(state, batch):
            _, grads = state.value_and_grad(loss)(*batch)
            return state.apply_gradients(grads), ()

        def init_state():
            return zerofn.TrainState.create(params=start(EXPERTS), tx=optim.adamw(0.1))

        state = zerofn.shard(init_state, stage=3, mesh=mesh, cuts=cuts, **options)
        step = zerofn.compile(train_step, memory=memory)
        for batch in batches(mesh.batch.rank):
            state, _ = step(state, tuple(batch.repeat(1, 50, 1)))
        return zerofn.unshard(state.params)

    def remade(params, x, target):
        return zerofn.remat(loss_fn)(params, x, target)

    plain = run(loss_fn)
    assert_same_trees(run(remade), plain, "remat")
    on_drives = zerofn.Offload(optimizer="nvme", params="nvme", path=folder)
    assert_same_trees(run(loss_fn, offload=on_drives), plain, "offload")
    with pytest.raises(MemoryError) as told:
        run(loss_fn, memory=1)
    least = int(re.search("at least ([0-9,]+) bytes", str(told.value))[1].replace(",", ""))
    assert_same_trees(run(loss_fn, memory=least), plain, "the least budget")


@pytest.mark.whole
def test_remat_offload_and_budgets_keep_the_bits(ranks, tmp_path):
    ranks(2, variants, tmp_path)


def in_halves(p, rows):
    """Experts of which each rank of "tensor" has a part of the hidden units."""
    rows = collectives.vary(rows, "tensor")
    hidden = torch.tanh(rows @ p["up"] + p["bias"])
    return collectives.psum(hidden @ p["down"], "tensor")


def halved(sizes, stage):
    """Experts along one axis, and parts of each along another."""
    mesh = Mesh.make(**sizes)

    def cuts():
        found = moe.cuts(start(EXPERTS), mesh)
        dims = {"moe.experts.up": 2, "moe.experts.bias": 1, "moe.experts.down": 1}
        return {k: (found[k], equal("tensor", dim, 4, mesh.size("tensor"))) for k, dim in dims.items()}

    def loss_of(params, x, target):
        tokens = torch.tanh(x @ params["into"])
        whole = {k: v for k, v in params["moe"].items() if k in ("gate", "experts")}
        y, aux = moe.layer(whole, tokens, torch.vmap(in_halves), axis="expert", **OPTIONS)
        y = moe.residual(tokens, y, over_rows(params["moe"]["mlp"], tokens), params["moe"]["coefficient"])
        return (y @ params["out"] - target).square().mean() + 0.1 * aux.balance + 0.01 * aux.z

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_of)(*batch)
        return state.apply_gradients(grads), (loss, zerofn.global_norm(grads))

    def init_state():
        tx = optim.chain(optim.clip_by_global_norm(CLIP), optim.sgd(0.1, 0.9))
        return zerofn.TrainState.create(params=start(EXPERTS), tx=tx)

    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts())
    step, told = zerofn.compile(train_step), []
    for batch in batches(mesh.batch.rank):
        state, aux = step(state, tuple(batch))
        told.append([x.item() for x in aux])
    return told, zerofn.unshard(state.params)


@pytest.mark.whole  # test_experts.py and test_compiled.py have the axis
@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_may_be_cut_along_tensor_too(ranks, stage):
    for found in ranks(4, halved, {"expert": 2, "tensor": 2}, stage):
        check([found], plain(2))


def other_numbers_of_tokens():
    params, tokens = start(4)["moe"], torch.ones(5 + torch.distributed.get_rank(), WIDTH).double()
    params["experts"] = moe.own(params["experts"], "data")
    moe.layer(params, tokens, torch.vmap(over_rows), capacity=None, axis="data")


def test_ranks_with_other_numbers_of_tokens_are_told(ranks):
    for found in ranks(2, other_numbers_of_tokens, expect_errors=True):
        assert found.type == "RanksOutOfStep" and "ranks are out of step" in found.message
        assert "'all_to_all', for another signature" in found.message
