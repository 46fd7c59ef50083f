"""Gradients whose codes are drawn: beside units that are encoded as a whole in one process, and on average."""

import functools

import pytest
import torch

import zerofn
from tests.equivalence import test_wire_products as products
from tests.equivalence.test_wire import _gradients, _sum, model, rows, started, trained
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from tests.support.some import some_of
from zerofn import optim
from zerofn.comm.block_wire import block_wire
from zerofn.random import fold_in
from zerofn.random.draws import seed_of_codes

LEARNING_RATE, STEPS = 0.05, 3
FORMS = {
    form: zerofn.Wire(reduce=form, block=128, smallest=smallest, rounding="stochastic")
    for form, smallest in (("int8", 0), ("fp8", 100))
}


def coded(units, codec_of, gradients, key):
    """Whole units as they arrive, of a rank that has them whole. `key`: of the rank and the step."""
    out = dict(gradients)
    for number, unit in enumerate(units):
        flat = torch.zeros(unit.size)
        for leaf in unit.leaves:
            flat[leaf.offset : leaf.stop] = gradients[leaf.name].reshape(-1)
        if codec := codec_of(unit):
            how = block_wire(codec)
            how.decode_rows(flat, how.encode_all(flat[None].clone(), 0, seed_of_codes(key, 2 * number)))
        out |= {leaf.name: flat[leaf.offset : leaf.stop].view(leaf.shape) for leaf in unit.leaves}
    return out


def by_torch(size, wire, num_microbatches, reduce):
    """The parameters after some steps by plain torch, whose ranks' gradients are coded one after the other."""
    net = model()
    spec = started(3, wire=wire)[0].params.spec
    axis = spec.within(spec.layout.units[0])
    code = functools.partial(coded, spec.layout.units, lambda u: spec.reduces_as(u, torch.float32, axis))
    names = [name for name, _ in net.named_parameters()]
    for step in range(STEPS):
        sums = []
        for index in range(num_microbatches):
            each = []
            for rank in range(size):
                key = fold_in(fold_in(torch.tensor(0), step), rank)
                parts = [_gradients(net, x, size)[1] for x in rows(rank, step).chunk(num_microbatches)]
                mine = [_sum(x) for x in zip(*parts, strict=True)] if reduce == "step" else parts[index]
                number = num_microbatches if reduce == "step" and num_microbatches > 1 else index
                each.append(code(dict(zip(names, mine, strict=True)), fold_in(key, number)))
            sums.append([_sum([x[name] for x in each]) for name in names])
            if reduce == "step":
                break
        for p, g in zip(net.parameters(), map(_sum, zip(*sums, strict=True)), strict=True):
            p.grad = g
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    return {k: p.detach() for k, p in net.named_parameters()}


def parameters(*args, **options):
    found = trained(*args, **options)
    del found["losses"]
    return found


def every_stage(form, num_microbatches, reduce):
    size, wire = zerofn.world_size(), FORMS[form]
    want = by_torch(size, wire, num_microbatches, reduce)
    for stage in some_of(range(4), 0, 3):
        found = parameters(*started(stage, num_microbatches, reduce=reduce, wire=wire))
        assert_same_trees(found, want, f"stage {stage}")
    state, step = started(3, num_microbatches, reduce=reduce, wire=wire)
    for k in range(STEPS):
        state, _ = step(state, rows(zerofn.rank(), k))
    assert_same_trees(zerofn.unshard(state.params), want, "not compiled")


@pytest.mark.part(size=[2], form=["fp8"], reduce=["microbatch"], num_microbatches=[4])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_microbatches", "reduce"), [(1, "step"), (4, "step"), (4, "microbatch")])
def test_every_stage_has_the_bits_of_units_coded_as_a_whole(ranks, form, size, num_microbatches, reduce):
    ranks(size, every_stage, form, num_microbatches, reduce)


def without_a_key():
    params = {"w": torch.ones(64, 300)}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), wire=FORMS["int8"])
    vg = zerofn.value_and_grad(lambda p, x: (p["w"] * x).square().sum())
    for step in (vg, zerofn.compile(vg)):
        with pytest.raises(ValueError, match="sharded with rounding='stochastic', .* but rng is None. Write state"):
            step(state.params, torch.ones(300))


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_key_it_says_so(ranks, size):
    ranks(size, without_a_key)


DRAWN = zerofn.Wire(gather="int4", reduce="int8", block=128, smallest=0, rounding="stochastic")


def product(kind):
    options = dict(products.KINDS[kind])
    options["compiles"] = {"backend": options.pop("backend")} if "backend" in options else {}
    options["wire"] = DRAWN
    module = build(4, dropout=0.1)
    want = products.trained(0, module, **options)
    for stage in some_of((1, 2, 3), 1):
        assert_same_trees(products.trained(stage, module, **options), want, f"stage {stage}")
    for more in some_of(({"remat": "full"}, {"remat": "auto"}), {"remat": "full"}):
        found = products.trained(3, module, **{**options, "compiles": {**options["compiles"], **more}})
        assert_same_trees(found, want, str(more))
    assert not products.same(want[1], products.trained(3, module, **{**options, "wire": products.WIRE})[1])


@pytest.mark.part(kind=["clipped"])
@pytest.mark.parametrize("kind", ["fp16", "frozen", "clipped", "compiled"])
def test_with_what_else_a_step_has_every_stage_has_the_same_bits(ranks, kind):
    ranks(2, product, kind)


def over_replicas():
    """Sums along `data` are drawn once more along `replicate`. All ranks have the same parameters."""
    mesh, found = zerofn.Mesh.make(replicate=2, data=2), {}
    module = build(4)
    for stage, hpz in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        state, step = state_of(module, stage, mesh=mesh, hpz=hpz, wire=DRAWN), zerofn.compile(train_step_of(module))
        for k in range(3):
            state, _ = step(state, batch_of(10 * k + zerofn.rank()))
        found[stage, hpz] = zerofn.unshard(state.params)
        assert_same_trees(found[stage, hpz], found[0, False], f"stage {stage}, hpz {hpz}")
    return {k: x.double().sum().item() for k, x in found[3, True].items()}


@pytest.mark.whole
def test_replicas_and_hpz(ranks):
    found = ranks(4, over_replicas)
    assert all(x == found[0] for x in found)


@pytest.mark.whole
def test_pipelines_have_the_bits_of_the_uncut_step(ranks):
    ranks(4, products.in_stages, DRAWN)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "sizes"), products.MESHES, ids=str)
def test_along_other_axes_every_stage_has_the_same_bits(ranks, name, sizes):
    ranks(4, products.on_mesh, name, sizes, DRAWN)
