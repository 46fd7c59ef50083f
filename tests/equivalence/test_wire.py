"""Coded transfers, in bfloat16 and in blocks of 8 and 4 bits, beside plain torch that rounds where they do."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.sent import planned_and_sent
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from tests.support.some import some_of
from zerofn import optim
from zerofn.comm.mesh import Mesh

LEARNING_RATE, STEPS = 0.05, 3


def model():
    """Odd sizes: leaves that cross the edges of shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(23, 131), nn.GELU(), nn.Linear(131, 7), nn.Tanh(), nn.Linear(7, 23))


def rows(rank, step=0, num_rows=8):
    return torch.randn(num_rows, 23, generator=torch.Generator().manual_seed(10 * step + rank))


def started(stage, num_microbatches=1, tx=None, reduce=None, **options):
    """(state, step)"""
    net = model()

    def loss_fn(params, x):
        return functional_call(net, params, (x,)).square().mean()

    def step(state, x):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches, reduce=reduce))(x)
        return state.apply_gradients(grads), loss

    init = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=tx or optim.sgd(LEARNING_RATE))
    return zerofn.shard(init, stage=stage, **{"wire": "bf16", **options}), step


def trained(state, step, **options):
    """The losses of some steps, and the masters."""
    run, losses = zerofn.compile(step, **options), []
    for k in range(STEPS):
        state, loss = run(state, rows(zerofn.rank(), k))
        losses.append(loss)
    return {"losses": torch.stack(losses), **zerofn.unshard(state.params)}


def rounded(x):
    return x.bfloat16().float()


def in_bf16(xs):
    """Each leaf, as it arrives."""
    return list(map(rounded, xs))


def as_it_is(xs):
    return [x.clone() for x in xs]


INT4 = zerofn.Wire(gather="int4", reduce="int8", block=128, smallest=0)
FP8 = zerofn.Wire(gather="fp8", reduce="fp8", block=128, smallest=0)
INT8 = zerofn.Wire(gather="int8", reduce="int8", block=256, smallest=100)
MIXED = zerofn.Wire(gather="bf16", reduce="int8", block=512, smallest=0)
BLOCKS = {"int4": INT4, "fp8": FP8, "int8": INT8, "mixed": MIXED}


def in_blocks(form, block, smallest):
    """By torch: blocks of a unit without small leaves are of integers or in float8."""

    def code(xs):
        units = started(3, wire=None)[0].params.layout.units
        names = [name for name, _ in model().named_parameters()]
        flats = {unit.name: torch.zeros(unit.size) for unit in units}
        known = {leaf.name: (leaf, flats[unit.name]) for unit in units for leaf in unit.leaves}
        for name, x in zip(names, xs, strict=True):
            leaf, flat = known[name]
            flat[leaf.offset : leaf.stop] = x.detach().reshape(-1)
        for flat in flats.values():
            here = [x for x, of in known.values() if of is flat]
            coded = torch.ones(len(flat), dtype=torch.bool)
            for leaf in here:
                coded[leaf.offset : leaf.stop] = leaf.numel >= smallest
            blocks = coded.view(-1, block).all(1) & any(leaf.numel >= smallest for leaf in here)
            flat.view(-1, block)[blocks] = _coded(flat.view(-1, block)[blocks], form)
        places = [known[name] for name in names]
        return [flat[leaf.offset : leaf.stop].view(leaf.shape).clone() for leaf, flat in places]

    return code


def _coded(blocks, form):
    top = blocks.abs().amax(1, keepdim=True)
    if form == "fp8":
        scale = torch.exp2(torch.ceil(torch.log2(top / 448)).clamp(min=-100))
        return (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    scale = (top / {"int8": 127, "int4": 7}[form]).bfloat16().float()
    return torch.where(scale < 2.0**-100, 0.0, (blocks * (1 / scale)).round() * scale)


def codes_of(name):
    """The argument of `shard` that has a name, and what torch does for it: to parameters, and to gradients."""
    if name not in BLOCKS:
        return name, in_bf16, in_bf16
    wire = BLOCKS[name]
    both = (wire.gather, wire.reduce)
    return wire, *(in_bf16 if form == "bf16" else in_blocks(form, wire.block, wire.smallest) for form in both)


def by_torch(size, num_microbatches=1, reduce="step", code=in_bf16, code_gradients=None):
    """The same by plain torch: what is sent is rounded, and summed by rank."""
    code_gradients = code_gradients or code
    net, losses = model(), []
    for step in range(STEPS):
        masters = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p, arrived in zip(net.parameters(), code(masters), strict=True):
                p.copy_(arrived)
        found, each = [], []
        for rank in range(size):
            parts = [_gradients(net, x, size) for x in rows(rank, step).chunk(num_microbatches)]
            each.append(sum(loss for loss, _ in parts) / num_microbatches)
            mine = [gradients for _, gradients in parts]
            found.append([_sum(x) for x in zip(*mine, strict=True)] if reduce == "step" else mine)
        losses.append(_sum(each) / size)
        if reduce == "step":
            sums = [_sum(x) for x in zip(*map(code_gradients, found), strict=True)]
        else:
            microbatches = [map(code_gradients, ranks) for ranks in zip(*found, strict=True)]
            reduced = [[_sum(x) for x in zip(*ranks, strict=True)] for ranks in microbatches]
            sums = [_sum(x) for x in zip(*reduced, strict=True)]
        with torch.no_grad():
            for p, master, g in zip(net.parameters(), masters, sums, strict=True):
                p.copy_(master)
                p.grad = g
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    return {"losses": torch.stack(losses), **{k: p.detach() for k, p in net.named_parameters()}}


def _sum(xs):
    return functools.reduce(torch.add, xs)


def _gradients(net, x, size):
    loss = net(x).square().mean()
    parts = size * (8 // len(x))
    return loss.detach(), torch.autograd.grad(loss, list(net.parameters()), torch.tensor(1.0 / parts))


def every_stage():
    size = zerofn.world_size()
    want = by_torch(size, code=in_bf16 if size > 1 else as_it_is)
    for stage in some_of(range(4), 0, 3):
        assert_same_trees(trained(*started(stage)), want, f"stage {stage}")
        (state, step), losses = started(stage), []
        for k in range(STEPS):
            state, loss = step(state, rows(zerofn.rank(), k))
            losses.append(loss)
        found = {"losses": torch.stack(losses), **zerofn.unshard(state.params)}
        assert_same_trees(found, want, f"stage {stage}, not compiled")
    if size > 1:
        assert not torch.equal(want["0.weight"], by_torch(size, code=as_it_is)["0.weight"])


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_stage_gives_the_bits_of_torch_that_rounds_what_is_sent(ranks, size):
    ranks(size, every_stage)


def every_stage_in_blocks(name):
    """Each stage, compiled and not, has the bits of torch with the same codes."""
    size, (wire, code, code_gradients) = zerofn.world_size(), codes_of(name)
    if size == 1:
        code = code_gradients = as_it_is
    want = by_torch(size, code=code, code_gradients=code_gradients)
    for stage in some_of(range(4), 1, 3):
        assert_same_trees(trained(*started(stage, wire=wire)), want, f"stage {stage}")
        state, _ = started(stage, wire=wire)
        seen = zerofn.gather(state.params)
        masters = zerofn.unshard(state.params)
        assert_same_trees(seen, dict(zip(masters, code(list(masters.values())), strict=True)), f"stage {stage}")
    (state, step), losses = started(3, wire=wire), []
    for k in range(STEPS):
        state, loss = step(state, rows(zerofn.rank(), k))
        losses.append(loss)
    found = {"losses": torch.stack(losses), **zerofn.unshard(state.params)}
    assert_same_trees(found, want, "not compiled")


@pytest.mark.part(size=[2], name=["int4"])
@pytest.mark.part(size=[3], name=["mixed"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_stage_gives_the_bits_of_torch_with_blocks_of_codes(ranks, size, name):
    ranks(size, every_stage_in_blocks, name)


def with_microbatches(reduce, name):
    wire, code, code_gradients = codes_of(name)
    want = by_torch(zerofn.world_size(), 4, reduce, code, code_gradients)
    for stage in some_of(range(4), 2, 3):
        assert_same_trees(trained(*started(stage, 4, reduce=reduce, wire=wire)), want, f"stage {stage}")


@pytest.mark.part(size=[2], reduce=["microbatch"], name=["int8"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reduce, name", [("step", "bf16"), ("microbatch", "bf16"), ("microbatch", "int8")])
def test_microbatches_are_rounded_as_often_as_they_are_sent(ranks, size, reduce, name):
    ranks(size, with_microbatches, reduce, name)


def sent_by_a_step(stage, **options):
    """Bytes, planned and sent by this process."""
    state, step = started(stage, tx=optim.adamw(1e-2), **options)
    run, x = zerofn.compile(step), rows(zerofn.rank())
    state, _ = run(state, x)
    return planned_and_sent(run, state, x)


def planned_elsewhere(stage, **options):
    """Bytes that `zerofn.plan` says a rank sends."""
    _, step = started(stage, tx=optim.adamw(1e-2))
    init = zerofn.TrainState.create(params=dict(model().named_parameters()), tx=optim.adamw(1e-2))
    machine = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e9)
    options |= {"stage": stage, "precision": None, "offload": None, "remat": None}
    return zerofn.plan(step, init, rows(0), world=Mesh.of(None).num_ranks, machine=machine, **options).best.plan.sent


def bytes_of_stages():
    for stage in some_of(range(4), 0, 3):
        (planned, sent), (without, sent_without) = (sent_by_a_step(stage, wire=wire) for wire in ("bf16", None))
        assert planned == sent and without == sent_without, f"stage {stage}"
        assert [planned_elsewhere(stage, wire=x) for x in ("bf16", None)] == [planned, without], f"stage {stage}"
        # Gradients that ranks gather, so that all have the sum, are not rounded again: half of what stage 0 sends.
        assert planned / without < (0.77 if stage == 0 else 0.52), f"stage {stage}"


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_is_planned_and_half(ranks, size):
    ranks(size, bytes_of_stages)


def within_budgets():
    """At stage 3, with as little memory as possible and half-way: units are gathered again, in the same form."""
    module, found = build(6, dropout=0.1), {}
    run = functools.partial(zerofn.compile, train_step_of(module))
    state = lambda: state_of(module, 3, optim.adamw(1e-2), wire="bf16")  # noqa: E731
    batch = batch_of(zerofn.rank(), rows=256)
    with pytest.raises(MemoryError, match="cannot be scheduled within 10 bytes") as error:
        run(memory=10).lower(state(), batch)
    low = int(re.findall(r"[\d,]{4,}", str(error.value))[-1].replace(",", ""))
    most = run(memory="1TB").lower(state(), batch).memory().total
    for memory in ("1TB", (low + most) // 2, low):
        step, value = run(memory=memory), state()
        plan = step.lower(value, batch)
        for _ in range(STEPS):
            value, _ = step(value, batch)
        found[memory] = zerofn.unshard(value.params)
        assert memory == "1TB" or plan.memory().total <= memory < most
        assert_same_trees(found[memory], found["1TB"], f"within {memory}")


@pytest.mark.whole
def test_a_budget_changes_no_bit(ranks):
    ranks(2, within_budgets)


def saved_and_loaded(folder, stage):
    """Checkpoints hold exact masters: with `wire` and without, each loads what the other saved, and goes on."""
    found = {}
    for wire, other in (("bf16", None), (None, "bf16")):
        state, step = started(stage, tx=optim.adamw(1e-2), wire=wire)
        for k in range(STEPS):
            state, _ = step(state, rows(zerofn.rank(), k))
        zerofn.save(f"{folder}/{wire}", state)
        like, _ = started(stage, tx=optim.adamw(1e-2), wire=other)
        loaded = zerofn.load(f"{folder}/{wire}", like=like)
        assert_same_trees(zerofn.unshard(loaded.params), zerofn.unshard(state.params))
        seen = zerofn.gather(loaded.params)
        assert_same_trees(seen, {k: rounded(x) if other else x for k, x in zerofn.unshard(loaded.params).items()})
        assert not torch.equal(seen["0.weight"], zerofn.gather(state.params)["0.weight"])
        found[wire] = loaded.params.spec.precision.wire
    assert found == {"bf16": None, None: zerofn.Wire("bf16", "bf16")}


@pytest.mark.part(stage=[1])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_are_exact_where_they_are_saved(ranks, tmp_path, stage):
    ranks(2, saved_and_loaded, str(tmp_path), stage)


def over_replicas(name):
    """Two by two ranks: sums along `data` are coded once more before they are added along `replicate`."""
    mesh, (wire, code, code_gradients) = zerofn.Mesh.make(replicate=2, data=2), codes_of(name)
    net, arrived = model(), model()
    with torch.no_grad():
        for p, x in zip(arrived.parameters(), code([p.detach() for p in net.parameters()]), strict=True):
            p.copy_(x)
    found = [_gradients(arrived, rows(rank), 4)[1] for rank in range(4)]
    along = [[_sum(x) for x in zip(*map(code_gradients, found[k : k + 2]), strict=True)] for k in (0, 2)]
    sums = [_sum(x) for x in zip(*map(code_gradients, along), strict=True)]
    for p, g in zip(net.parameters(), sums, strict=True):
        p.grad = g
    torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    want = {k: p.detach() for k, p in net.named_parameters()}
    seen = dict(zip(want, code(list(want.values())), strict=True))
    ways = [(0, False), (1, False), (2, False), (3, False), (3, True)]
    for stage, hpz in some_of(ways, (0, False), (3, True)):
        state, step = started(stage, mesh=mesh, hpz=hpz, wire=wire)
        run = zerofn.compile(step)
        place = mesh.axis("replicate").rank * 2 + mesh.axis("data").rank
        state, _ = run(state, rows(place))
        assert_same_trees(zerofn.unshard(state.params), want, f"stage {stage}, hpz {hpz}")
        assert_same_trees(zerofn.gather(state.params), seen, f"stage {stage}, hpz {hpz}")
        if stage == 3:
            (planned, sent), whole = (sent_by_a_step(3, mesh=mesh, hpz=hpz, wire=x) for x in (wire, None))
            assert planned == sent and whole[0] == whole[1]
            assert planned / whole[0] < (0.52 if hpz else 0.65)


@pytest.mark.part(name=["int4"])
@pytest.mark.parametrize("name", ["bf16", *BLOCKS])
def test_replicas_and_hpz(ranks, name):
    ranks(4, over_replicas, name)


def between_nodes_alone():
    """Along `replicate` in 8 bits, along `data` as it is: gradients twice, and with hpZ the copies of parameters."""
    mesh = zerofn.Mesh.make(replicate=2, data=2)
    for hpz in some_of((False, True), True):
        sent = {}
        for wire in (None, {"replicate": INT8}, {"data": INT8}, INT8):
            state, step = started(3, mesh=mesh, hpz=hpz, tx=optim.adamw(1e-2), wire=wire)
            run = zerofn.compile(step)
            place = mesh.axis("replicate").rank * 2 + mesh.axis("data").rank
            state, _ = run(state, rows(place))
            sent[str(wire)] = run.lower(state, rows(place)).sent_along
            planned, measured = sent_by_a_step(3, mesh=mesh, hpz=hpz, wire=wire)
            assert planned == measured, f"{wire}, hpz {hpz}"
        whole, far, near, both = sent.values()
        assert far["data"] == whole["data"] and far["replicate"] < (0.4 if hpz else 0.7) * whole["replicate"]
        assert near["replicate"] == whole["replicate"] and near["data"] < 0.4 * whole["data"]
        assert both["replicate"] == far["replicate"] and both["data"] == near["data"]


def test_an_axis_has_a_form_of_its_own(ranks):
    ranks(4, between_nodes_alone)


def half_precision_in_blocks():
    """What is computed in bfloat16 is coded, too: a step sends a little more than half, and all stages are alike."""
    module, found, sent = build(3), {}, {}
    batch = {k: x.bfloat16() for k, x in batch_of(zerofn.rank()).items()}
    for stage in range(4):
        state = state_of(module, stage, precision="bf16", wire=zerofn.Wire("int8", "int8", block=128, smallest=100))
        step = zerofn.compile(train_step_of(module))
        plain = zerofn.compile(train_step_of(module)).lower(state_of(module, stage, precision="bf16"), batch)
        sent[stage] = step.lower(state, batch).sent / plain.sent
        for _ in range(STEPS):
            state, _ = step(state, batch)
        found[stage] = zerofn.unshard(state.params)
        assert_same_trees(found[stage], found[0], f"stage {stage}")
    assert max(sent[k] for k in (1, 2, 3)) < 0.45


@pytest.mark.whole  # test_gradients_of_a_model_in_half_precision_are_sent_so
def test_units_in_half_precision_are_sent_in_blocks(ranks):
    ranks(2, half_precision_in_blocks)


def beside_half_precision():
    """Gradients of a model in bfloat16 are numbers of bfloat16: where they are sent as such, not a bit changes."""
    module = build(3)
    batch = {k: x.bfloat16() for k, x in batch_of(zerofn.rank()).items()}
    for stage in some_of(range(4), 0, 2):
        found, sent = [], []
        for wire in ("bf16", None):
            state, step = state_of(module, stage, precision="bf16", wire=wire), zerofn.compile(train_step_of(module))
            sent.append(step.lower(state, batch).sent)
            for _ in range(STEPS):
                state, _ = step(state, batch)
            found.append(zerofn.unshard(state.params))
        assert_same_trees(*found, f"stage {stage}")
        assert sent[0] < sent[1]


def test_gradients_of_a_model_in_half_precision_are_sent_so(ranks):
    ranks(2, beside_half_precision)


def offloaded(folder, name):
    wire = BLOCKS.get(name, name)
    want = trained(*started(3, tx=optim.adamw(1e-2), wire=wire))
    drives = {"optimizer": "nvme", "path": folder}
    both = {**drives, "params": "nvme"}
    for stage, tiers in some_of([(3, drives), (3, both), (0, both), (1, drives)], (3, both), (1, drives)):
        found = trained(*started(stage, tx=optim.adamw(1e-2), offload=zerofn.Offload(**tiers), wire=wire))
        assert_same_trees(found, want, f"stage {stage}, {tiers}")


@pytest.mark.part(name=["int4"])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_offloading_changes_no_bit(ranks, tmp_path, name):
    ranks(2, offloaded, str(tmp_path), name)


def second_derivatives(name):
    """A Hessian-vector product, beside plain torch's at the rounded point, along the rounded direction."""
    wire, code, code_gradients = codes_of(name)
    net, size = model(), zerofn.world_size()
    draw = torch.Generator().manual_seed(5)
    params = {k: p.detach() for k, p in net.named_parameters()}
    along = {k: torch.randn(p.shape, generator=draw) for k, p in params.items()}

    def product(gather, rank, params, along):
        gradient = torch.func.grad(lambda p: functional_call(net, gather(p), (rows(rank),)).square().mean())
        return torch.func.jvp(gradient, (params,), (along,))[1]

    at, direction = (dict(zip(xs, code(list(xs.values())), strict=True)) for xs in (params, along))
    each = [code_gradients(list(product(dict, rank, at, direction).values())) for rank in range(size)]
    want = {k: _sum(x) / size for k, x in zip(params, zip(*each, strict=True), strict=True)}
    for stage in some_of(range(4), 1, 3):
        state = zerofn.shard({"params": params, "along": along}, stage=stage, wire=wire)
        found = product(zerofn.gather, zerofn.rank(), state["params"], state["along"])
        assert_same_trees(zerofn.unshard(found), want, f"stage {stage}")


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_higher_derivatives_are_those_at_the_rounded_point(ranks, name):
    ranks(2, second_derivatives, name)


def different():
    with pytest.raises(RuntimeError, match="wire"):
        zerofn.shard({"params": {"w": torch.ones(3)}}, wire="bf16" if zerofn.rank() else None)


def test_ranks_that_disagree_say_so(ranks):
    ranks(2, different)
