"""What codes leave out of gradients is sent with the next ones: beside plain torch with workers in one process."""

import itertools

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.equivalence import test_wire_products as products
from tests.equivalence.test_wire import _gradients, _sum, in_blocks, model, rows
from tests.equivalence.test_wire_products import trained
from tests.support.same import assert_same_trees
from tests.support.small_steps import build
from tests.support.some import some_of
from zerofn import optim

LEARNING_RATE, STEPS = 0.05, 4
INT8 = zerofn.Wire(reduce="int8", block=128, smallest=100, feedback=True)
INT4 = zerofn.Wire(reduce="int4", block=256, smallest=0, feedback=True)
FP8 = zerofn.Wire(gather="int8", reduce="fp8", block=128, smallest=0, feedback=True)
FORMS = {"int8": INT8, "int4": INT4, "fp8": FP8}


def started(stage, wire, num_microbatches=1, weighted=False, tx=None, params=None, **options):
    net = model()

    def loss_fn(params, x):
        squares = functional_call(net, params, (x.to(params["0.weight"].dtype),)).float().square()
        return (squares.sum(), x.shape[0] * 23.0 * (1 + x[0, 0].abs().round())) if weighted else squares.mean()

    def step(state, x):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches))(x)
        return state.apply_gradients(grads), loss

    init = zerofn.TrainState.create(params=params or dict(net.named_parameters()), tx=tx or optim.sgd(LEARNING_RATE))
    return zerofn.shard(init, stage=stage, wire=wire, **options), step


def by_torch(size, wire, num_microbatches=1):
    """(parameters, errors [rank, *shape]) after some steps."""
    net = model()
    names = [name for name, _ in net.named_parameters()]
    code = in_blocks(wire.reduce, wire.block, wire.smallest)
    gathered = (lambda xs: xs) if wire.gather is None else in_blocks(wire.gather, wire.block, wire.smallest)
    errors = [[torch.zeros_like(p) for p in net.parameters()] for _ in range(size)]
    for step in range(STEPS):
        masters = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p, x in zip(net.parameters(), gathered(masters), strict=True):
                p.copy_(x)
        found = []
        for rank in range(size):
            parts = [_gradients(net, x, size)[1] for x in rows(rank, step).chunk(num_microbatches)]
            sent = [_sum(x) + e for x, e in zip(zip(*parts, strict=True), errors[rank], strict=True)]
            found.append(code(sent))
            errors[rank] = [x - y for x, y in zip(sent, found[-1], strict=True)]
        with torch.no_grad():
            for p, master, g in zip(net.parameters(), masters, map(_sum, zip(*found, strict=True)), strict=True):
                p.copy_(master)
                p.grad = g
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    kept = {name: torch.stack(x) for name, x in zip(names, zip(*errors, strict=True), strict=True)}
    return {k: p.detach() for k, p in net.named_parameters()}, kept


def every_stage(form, num_microbatches):
    size, wire = zerofn.world_size(), FORMS[form]
    want, errors = by_torch(size, wire, num_microbatches)
    ways = itertools.product(range(4), (True, False))
    for stage, compiled in some_of(ways, (0, True), (3, True), (2, False)):
        state, step = started(stage, wire, num_microbatches)
        run = zerofn.compile(step) if compiled else step
        for k in range(STEPS):
            state, _ = run(state, rows(zerofn.rank(), k))
        where = f"stage {stage}, compiled: {compiled}"
        assert_same_trees(zerofn.unshard(state.params), want, where)
        assert_same_trees(zerofn.unshard(state.feedback.errors), errors, where)
    assert any(x.abs().max() > 0 for x in errors.values())


@pytest.mark.part(size=[2], form=["int4"], num_microbatches=[4])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_every_stage_has_the_bits_of_torch_with_as_many_workers(ranks, form, size, num_microbatches):
    ranks(size, every_stage, form, num_microbatches)


def what_is_lost(precision, weighted):
    """Each mean gradient lacks what is kept behind it, and has what was kept before, whatever the loss's scale is and
    the ranks' weights are.
    """
    found = {}
    for stage in some_of(range(4), 0, 3):
        state, step = started(stage, FORMS["int8"], 2, weighted, precision=precision)
        if precision == "fp16":
            scale = zerofn.DynamicLossScale(2.0**10, period=1)  # another in each step
            state = state.replace(loss_scale=zerofn.shard({"params": {"w": torch.ones(1)}, "x": scale})["x"])
        run = zerofn.compile(step)
        for k in range(STEPS):
            before = kept(state)
            exact, exact_step = started(
                stage, None, 2, weighted, precision=precision, params=zerofn.unshard(state.params)
            )
            exact = exact.replace(loss_scale=state.loss_scale)
            state, _ = run(state, rows(zerofn.rank(), k))
            exact, _ = exact_step(exact, rows(zerofn.rank(), k))
            after, masters = kept(state), zerofn.unshard(exact.params)
            for name, x in zerofn.unshard(state.params).items():
                lacks = (x.double() - masters[name].double()) / LEARNING_RATE
                assert torch.allclose(lacks, after[name] - before[name], atol=2e-6 if precision is None else 2e-4), name
                assert after[name].abs().max() > 0 or x.numel() < 100
        found[stage] = {**zerofn.unshard(state.params), "errors": zerofn.unshard(state.feedback.errors)}
        assert_same_trees(found[stage], found[0], f"stage {stage}")


def kept(state):
    return {name: x.double().sum(0) for name, x in zerofn.unshard(state.feedback.errors).items()}


@pytest.mark.part(precision=["fp16"], weighted=[True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("precision", [None, "fp16", "bf16"])
def test_what_a_gradient_lacks_is_kept(ranks, precision, weighted):
    ranks(2, what_is_lost, precision, weighted)


def skipped():
    """An inf among a rank's rows: nothing is sent later than it was to be."""
    for stage in some_of(range(4), 1, 3):
        state, step = started(stage, FORMS["int8"])
        run = zerofn.compile(step)
        state, _ = run(state, rows(zerofn.rank()))
        before = zerofn.unshard((state.params, state.feedback))
        x = rows(zerofn.rank(), 1)
        state, _ = run(state, torch.full_like(x, torch.inf) if zerofn.rank() == 0 else x)
        assert state.skipped == 1 and state.step == 2
        assert_same_trees(zerofn.unshard((state.params, state.feedback)), before, f"stage {stage}")


def test_a_skipped_step_leaves_what_was_kept(ranks):
    ranks(2, skipped)


def small_loss(params, x):
    return (params["0.weight"] @ x.T).square().mean()


def refused():
    (state, _), x = started(3, FORMS["int8"]), rows(zerofn.rank())
    with pytest.raises(ValueError, match="sharded with feedback=True, .*Write state.value_and_grad"):
        zerofn.value_and_grad(small_loss)(state.params, x)
    for reduce in ("microbatch", "round"):
        with pytest.raises(ValueError, match=f"reduce='{reduce}' sends gradients several times in a step, but fee"):
            zerofn.accumulate(state.value_and_grad(small_loss), 2, reduce=reduce)(x)

    def twice(state, x):
        (_, grads), _ = (state.value_and_grad(small_loss)(part) for part in x.chunk(2))
        return state.apply_gradients(grads), None

    for step in (twice, zerofn.compile(twice)):
        with pytest.raises(
            ValueError, match="value_and_grad was called 2 times on this state, and with feedback=True each call"
        ):
            step(started(3, FORMS["int8"])[0], x)


def state_of(dtype):
    return zerofn.TrainState.create(params={"w": torch.ones(256, dtype=dtype)}, tx=optim.sgd(0.1))


def without_codes():
    for wire, dtype in (({"reduce": "int8"}, torch.float32), ({"reduce": "int8", "smallest": 0}, torch.float64)):
        with pytest.raises(ValueError, match="feedback=True has no effect, since no gradient is sent in codes"):
            zerofn.shard(state_of(dtype), wire=zerofn.Wire(**wire, feedback=True))


def test_feedback_of_nothing_says_so(ranks):
    ranks(2, without_codes)


@pytest.mark.parametrize("size", [1, 2])
def test_what_has_no_meaning_says_so(ranks, size):
    ranks(size, refused)


def looked_at():
    """A gradient that is not applied changes nothing."""
    look = zerofn.compile(lambda state, x: (state, state.value_and_grad(small_loss)(x)[0]))
    found = []
    for looks in (False, True):
        state, step = started(3, FORMS["int8"])
        for k in range(STEPS):
            state = look(state, rows(zerofn.rank(), k))[0] if looks else state
            state, _ = step(state, rows(zerofn.rank(), k))
        found.append(zerofn.unshard((state.params, state.feedback)))
    assert_same_trees(*found)


def test_a_gradient_that_is_not_applied_changes_nothing(ranks):
    ranks(2, looked_at)


def without():
    """Nothing of a state without feedback is another one: leaves, text."""
    state, _ = started(3, zerofn.Wire(reduce="int8"))
    assert state.feedback is None and "feedback" not in repr(state) and "feedback" in repr(started(3, FORMS["int8"])[0])
    again = zerofn.shard(zerofn.unshard(started(3, FORMS["int8"])[0]), wire="int8")
    assert again.feedback is None


def test_without_it_a_state_has_nothing_of_it(ranks):
    ranks(1, without)


def saved(folder, stage):
    state, step = started(stage, FORMS["int4"], tx=optim.adamw(1e-2))
    run = zerofn.compile(step)
    for k in range(STEPS):
        state, _ = run(state, rows(zerofn.rank(), k))
    zerofn.save(folder, state)
    loaded = zerofn.load(folder, like=started(stage, FORMS["int4"], tx=optim.adamw(1e-2))[0])
    assert_same_trees(zerofn.unshard(loaded), zerofn.unshard(state), f"stage {stage}")
    sums = kept(state)
    for k in range(2):
        state, _ = run(state, rows(zerofn.rank(), k))
        loaded, _ = run(loaded, rows(zerofn.rank(), k))
    assert_same_trees(zerofn.unshard(loaded), zerofn.unshard(state), f"stage {stage}")
    return sums


def loaded(folder, stage):
    """Also into a state without feedback, and from one."""
    plain, _ = started(stage, None, tx=optim.adamw(1e-2))
    without = zerofn.load(folder, like=plain)
    zerofn.save(f"{folder}.without", without)
    fresh = zerofn.load(f"{folder}.without", like=started(stage, FORMS["int4"], tx=optim.adamw(1e-2))[0])
    assert without.feedback is None and not any(x.any() for x in kept(fresh).values())
    assert_same_trees(zerofn.unshard(fresh.params), zerofn.unshard(without.params))
    return kept(zerofn.load(folder, like=started(stage, FORMS["int4"], tx=optim.adamw(1e-2))[0]))


def test_what_is_kept_is_saved(ranks, tmp_path):
    for stage in some_of((0, 2, 3), 0, 3):
        folder = str(tmp_path / str(stage))
        sums = ranks(3, saved, folder, stage)[0]
        for size in some_of((1, 2, 4), 2):
            for name, x in ranks(size, loaded, folder, 3 - stage)[0].items():
                assert torch.allclose(x, sums[name], rtol=1e-6, atol=1e-9), (stage, size, name)


WIRE = zerofn.Wire(gather="int4", reduce="int4", block=128, smallest=0, feedback=True)
KINDS = {
    "frozen": {"frozen": lambda name: name.startswith("3.")},
    "clipped": {"tx": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))},
    "8-bit moments": {"tx": optim.adamw(1e-2, moments="8bit")},
    "compiled": {"compiles": {"backend": "inductor"}},
    "fp16": {"precision": "fp16"},
    "microbatches": {"num_microbatches": 2},
}


def product(kind, folder):
    module, options = build(4, dropout=0.1), {"wire": WIRE, **KINDS[kind]}
    want = trained(0, module, **options)
    for stage in (1, 2, 3):
        assert_same_trees(trained(stage, module, **options), want, f"stage {stage}")
    compiles = options.pop("compiles", {})
    for remat in ("full", "auto"):
        found = trained(3, module, compiles={**compiles, "remat": remat}, **options)
        assert_same_trees(found, want, f"remat={remat!r}")
    if kind != "compiled":
        for stage, params in ((3, None), (3, "nvme"), (0, "nvme")):
            tiers = zerofn.Offload(optimizer="nvme", params=params, path=folder)
            found = trained(stage, module, offload=tiers, **options)
            assert_same_trees(found, want, f"stage {stage}, {tiers}")


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_with_what_else_a_step_has_every_stage_has_the_same_bits(ranks, tmp_path, kind):
    ranks(2, product, kind, str(tmp_path))


@pytest.mark.whole
def test_pipelines_have_the_bits_of_the_uncut_step(ranks):
    ranks(4, products.in_stages, WIRE)


@pytest.mark.whole
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_along_other_axes_every_stage_has_the_same_bits(ranks, axis):
    ranks(4, products.on_mesh, "llama", {axis: 2, "data": 2}, WIRE)


def over_replicas(axes):
    """Sums along `data` are coded once more along `replicate`: what that leaves out a rank keeps in its own part."""
    mesh, code = zerofn.Mesh.make(replicate=2, data=2), in_blocks("int8", 128, 100)
    wire = dict.fromkeys(axes, INT8) if axes else INT8
    net, spec = model(), started(3, INT8, mesh=mesh)[0].params.spec
    names = [name for name, _ in net.named_parameters()]
    parts = [part_of(spec, names, rank) for rank in range(2)]
    errors = [[torch.zeros_like(p) for p in net.parameters()] for _ in range(4)]
    for step in range(STEPS):
        sent = [
            [g + e for g, e in zip(_gradients(net, rows(rank, step), 4)[1], errors[rank], strict=True)]
            for rank in range(4)
        ]
        near = [code(xs) if not axes or "data" in axes else xs for xs in sent]
        errors = [[x - y for x, y in zip(*pair, strict=True)] for pair in zip(sent, near, strict=True)]
        along = [[_sum(x) for x in zip(*near[k : k + 2], strict=True)] for k in (0, 2)]
        far = [code(xs) if not axes or "replicate" in axes else xs for xs in along]
        for rank in range(4):
            lost = [x - y for x, y in zip(along[rank // 2], far[rank // 2], strict=True)]
            errors[rank] = [
                torch.where(mine, e + x, e) for mine, e, x in zip(parts[rank % 2], errors[rank], lost, strict=True)
            ]
        for p, g in zip(net.parameters(), [_sum(x) for x in zip(*far, strict=True)], strict=True):
            p.grad = g
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    want = {k: p.detach() for k, p in net.named_parameters()}
    left = {name: torch.stack(x) for name, x in zip(names, zip(*errors, strict=True), strict=True)}
    place = mesh.axis("replicate").rank * 2 + mesh.axis("data").rank
    for stage, hpz in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        state, step = started(stage, wire, mesh=mesh, hpz=hpz)
        run = zerofn.compile(step)
        for k in range(STEPS):
            state, _ = run(state, rows(place, k))
        assert_same_trees(zerofn.unshard(state.params), want, f"stage {stage}, hpz {hpz}")
        assert_same_trees(zerofn.unshard(state.feedback.errors), left, f"stage {stage}, hpz {hpz}")


def part_of(spec, names, rank):
    """Whether elements of the parameters are of the part that a rank along `data` adds: half of each unit."""
    found = {}
    for unit in spec.layout.units:
        mine = torch.arange(unit.size) // (unit.size // 2) == rank
        found |= {leaf.name: mine[leaf.offset : leaf.stop].view(leaf.whole) for leaf in unit.leaves}
    return [found[name] for name in names]


@pytest.mark.whole
@pytest.mark.parametrize("axes", [(), ("replicate",), ("data",)], ids=str)
def test_replicas_and_hpz(ranks, axes):
    ranks(4, over_replicas, axes)


def fitted(wire, most):
    """How far numbers are from those that they are fitted to, beside one whose gradient is noise, `most` times as large
    as theirs.
    """
    target = torch.linspace(-1.0, 1.0, 128)

    def loss_fn(params, noise):
        return (params["w"] - target).square().sum() / 2 + noise * params["w"][0]

    def step(state, noise):
        loss, grads = state.value_and_grad(loss_fn)(noise)
        return state.apply_gradients(grads), loss

    init = zerofn.TrainState.create(params={"w": torch.zeros(128)}, tx=optim.sgd(LEARNING_RATE))
    state, run = zerofn.shard(init, wire=wire), zerofn.compile(step)
    for k in range(200):
        state, _ = run(state, torch.tensor(most * (-1.0) ** k))
    return (zerofn.unshard(state.params)["w"] - target)[1:].abs().mean().item()


def learned():
    int8, int4 = ({"reduce": form, "block": 128, "smallest": 0} for form in ("int8", "int4"))
    wires = (None, zerofn.Wire(**int8), zerofn.Wire(**int8, rounding="stochastic"), zerofn.Wire(**int8, feedback=True))
    return [fitted(x, 500.0) for x in wires] + [fitted(zerofn.Wire(**int4, feedback=True), 28.0)]


@pytest.mark.whole
def test_what_codes_are_too_coarse_for_is_learned_with_feedback_or_by_drawn_codes(ranks):
    """500 / 127 is the step of int8: gradients of at most 1 never arrive as the nearest codes."""
    exact, nearest, drawn, fed_back, in_4_bits = ranks(2, learned)[0]
    assert exact < 1e-3 and nearest > 0.49
    assert drawn < 0.1 and fed_back < 0.1 and in_4_bits < 0.1


def long_run(wire):
    """What ranks compute with, and what they store together, after 50 steps: digests."""
    state, step = started(3, wire, 2, tx=optim.adamw(1e-3))
    run = zerofn.compile(step)
    for k in range(50):
        state, _ = run(state, rows(zerofn.rank(), k))
    trees = (zerofn.gather(state.params), zerofn.unshard(state.params), zerofn.unshard(state.feedback))
    return [x.view(torch.int32).double().sum().item() for x in zerofn.tree.leaves(trees)]


@pytest.mark.part(wire=[FORMS["fp8"]])
@pytest.mark.parametrize(
    "wire", [FORMS["fp8"], zerofn.Wire("int4", "int8", smallest=0, rounding="stochastic")], ids=str
)
def test_ranks_are_equal_after_50_steps(ranks, wire):
    found = ranks(3, long_run, wire)
    assert found[1:] == found[:1] * 2
