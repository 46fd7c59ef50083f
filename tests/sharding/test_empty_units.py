"""Units of which a rank has nothing: it stores, gathers and sends nothing of them."""

import math

import pytest
import torch

import zerofn
import zerofn.offload.policy
from tests.support.small_steps import apart, same, step_with, unit_of
from zerofn import collectives, optim, tree
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Cut
from zerofn.launch.payload import packed, unpacked
from zerofn.sharded_math.whole_leaves import map_whole
from zerofn.sharding.sharded import is_sharded

WIDTH, STEPS = 16, 3
NONE = {"void.one": (0, WIDTH), "void.other": (3, 0)}
STAGES = (0, 1, 2, 3)


def start(none=True):
    numbers = torch.Generator().manual_seed(0)
    names = {"first.w": (WIDTH, WIDTH), **(NONE if none else {}), "mine.w": (WIDTH, WIDTH), "last.w": (WIDTH, WIDTH)}
    return {name: torch.randn(shape, generator=numbers, dtype=torch.float64) for name, shape in names.items()}


def batch_of(rank, seed):
    numbers = torch.Generator().manual_seed(100 * seed + rank)
    return {k: torch.randn(4, WIDTH, generator=numbers, dtype=torch.float64) for k in ("x", "y")}


def loss_fn(params, batch, axis=None):
    """`axis`: along which ranks have rows of `mine.w` of their own, or none."""
    first = params["first.w"]
    x = torch.tanh(batch["x"].to(first.dtype) @ first.t())
    seen = x if axis is None else collectives.vary(x, axis)
    total = (seen @ params["mine.w"].t()).square().sum()
    total = total if axis is None else collectives.psum(total, axis)
    void = sum(params[name].sum() for name in NONE if name in params)
    return total / x.numel() + void + (x @ params["last.w"].t() - batch["y"]).square().mean()


def plain(rows):
    """Parameters and losses of plain torch after some steps, with the rows of `rows` ranks."""
    params = {name: x.requires_grad_() for name, x in start().items()}
    optimizer = torch.optim.AdamW(params.values(), 1e-2, weight_decay=0.1)
    losses = []
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_fn(params, batch_of(r, k)) for r in range(rows)) / rows
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [x.detach() for x in params.values()], losses


def state_on(mesh, stage, cuts=None, none=True, **options):
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1))
    plain = zerofn.TrainState.create(params=start(none), tx=tx)
    return zerofn.shard(plain, stage, mesh=mesh, cuts=cuts, unit=unit_of, **options)


def step_along(axis):
    return step_with(lambda p, b: loss_fn(p, b, axis))


def held(state, name):
    """Elements of a unit that a rank has, of parameters and moments."""
    nodes = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    return {x.shards[[u.name for u in x.layout.units].index(name)].numel() for x in nodes}


def cuts_of(sizes):
    """Of the leaf that the first rank along `tensor` or `pipe` has, and no other one."""
    axis = next((axis for axis in ("tensor", "pipe") if axis in sizes), None)
    return {"mine.w": Cut(axis, 0, WIDTH, (((0, WIDTH),), *[()] * (sizes[axis] - 1)))} if axis else None


def trained(folder, sizes, stages=STAGES, hpz=False):
    """For each stage: parameters and losses, and what is held of the units; then the last state without values."""
    mesh, found = Mesh.make(**sizes), []
    axis, cuts = "tensor" if "tensor" in sizes else None, cuts_of(sizes)
    for stage in stages:
        state = state_on(mesh, stage, cuts, hpz=hpz)
        assert zerofn.global_norm(state.params).item() == pytest.approx(norm_of(start().values()))
        doubled = zerofn.unshard(map_whole(lambda x: x + x.sum(), state.params))
        assert all(torch.equal(doubled[name], x + x.sum()) for name, x in start().items())
        step, losses = step_along(axis), []
        for k in range(STEPS):
            if k == 1:
                zerofn.save(f"{folder}/{stage}", state)
                state = zerofn.load(f"{folder}/{stage}", like=state if cuts else zerofn.abstract(state))
                step = zerofn.compile(step)
            state, loss = step(state, batch_of(mesh.batch.rank, k))
            losses.append(loss)
        whole, norms = zerofn.unshard(state.params), zerofn.leaf_norms(state.params)
        assert all(norms[name].item() == pytest.approx(norm_of([x])) for name, x in whole.items())
        assert "void" in repr(state.params)
        found.append((list(whole.values()), losses, held(state, "void"), held(state, "mine")))
    return found, packed(zerofn.abstract(state), "")


def norm_of(values):
    return torch.cat([x.flatten() for x in values]).norm().item()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        pytest.param({"data": 1}, (), marks=pytest.mark.whole),
        ({"data": 2}, ()),
        pytest.param({"data": 3}, (), marks=pytest.mark.whole),
        pytest.param({"replicate": 2, "data": 2}, ((3,), True), marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_leaves_without_elements(ranks, tmp_path, sizes, given):
    world = math.prod(sizes.values())
    expected = plain(world)
    for found, _ in ranks(world, trained, tmp_path, sizes, *given):
        for params, losses, void, mine in found:
            close([*params, *losses], [*expected[0], *expected[1]])
            assert void == {0} and 0 not in mine


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        *(
            pytest.param(x, marks=pytest.mark.whole)
            for x in ({"tensor": 3}, {"data": 2, "tensor": 2}, {"pipe": 3}, {"pipe": 2, "data": 2})
        ),
    ],
    ids=str,
)
def test_slices_of_the_first_rank_alone(ranks, tmp_path, sizes):
    """A unit lives on some ranks of an axis: the others have nothing of it. Any of them tells what it is as a whole."""
    expected = plain(sizes.get("data", 1))
    for rank, (found, told) in enumerate(ranks(math.prod(sizes.values()), trained, tmp_path, sizes)):
        for params, losses, void, mine in found:
            close([*params, *losses], [*expected[0], *expected[1]])
            assert void == {0} and (mine == {0}) == (place_of(rank, sizes) > 0)
        state = zerofn.load(f"{tmp_path}/{STAGES[-1]}", like=unpacked(told))
        for k in range(1, STEPS):
            state, _ = step_along(None)(state, joint(sizes.get("data", 1), k))
        close(list(zerofn.unshard(state.params).values()), expected[0])


def place_of(rank, sizes):
    """The rank's number along `tensor`, the last axis, or `pipe`, the first."""
    return rank % sizes["tensor"] if "tensor" in sizes else rank // sizes.get("data", 1)


def joint(rows, k):
    """The batches of several ranks as one."""
    each = [batch_of(r, k) for r in range(rows)]
    return {name: torch.cat([x[name] for x in each]) for name in each[0]}


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "options", [{"offload": "cpu"}, {"offload": "nvme"}, {"precision": "bf16"}, {"moments": "8bit"}], ids=str
)
def test_empty_units_change_no_bits_of_others(monkeypatch, options, stage, tmp_path):
    """Of one step in any storage: the bits are those without such leaves."""
    given, found = dict(options), []
    moments = given.pop("moments", None)
    if "offload" in given:
        apart(monkeypatch, 0.5)
        path = str(tmp_path) if given["offload"] == "nvme" else None
        given["offload"] = zerofn.Offload(optimizer=given["offload"], params=given["offload"], path=path)
    for none in (True, False):
        params = {name: x.float() for name, x in start(none).items()}
        tx = optim.adamw(1e-2, moments=moments) if moments else optim.adamw(1e-2)
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx), stage, unit=unit_of, **given)
        step = zerofn.compile(step_along(None))
        for k in range(2):
            state, loss = step(state, {name: x.float() for name, x in batch_of(0, k).items()})
        found.append([loss, *(x for x in zerofn.unshard(state.params).values() if x.numel())])
    assert same(*found)


@pytest.mark.part(stage=[1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_plans_do_without_empty_units(stage):
    def planned(none=True, mesh=None, cuts=None, axis=None):
        tx = optim.adamw(1e-2)
        init = lambda: zerofn.TrainState.create(params=start(none), tx=tx)  # noqa: E731
        return zerofn.plan(step_along(axis), init, batch_of(0, 0), mesh=mesh or Mesh.planned({"data": 4}), cuts=cuts,
                           unit=unit_of, stage=stage, offload=None, precision=None, remat=None)[0].plan  # fmt: skip

    with_them, without = planned(), planned(none=False)
    assert of_units(with_them) == of_units(without)
    kinds = [x.memory().peak for x in (with_them, without)]
    assert kinds[0] | {"other": 0} == kinds[1] | {"other": 0}  # a number of each leaf
    empty = {"mine.w": Cut("tensor", 0, WIDTH, ((), ((0, WIDTH),)))}  # the first rank has nothing
    there = planned(mesh=Mesh.planned({"data": 4, "tensor": 2}), cuts=empty, axis="tensor")
    assert {x.unit for x in of_units(with_them)} - {x.unit for x in of_units(there)} == {"mine"}


def of_units(plan):
    """Transfers, but for those of a number of each leaf."""
    return {x: n for x, n in plan.transfers().items() if x.unit}
