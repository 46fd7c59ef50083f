"""1-bit Adam beside plain torch in float64, which simulates its workers and its server after the paper."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support import onebit_by_torch
from tests.support.same import assert_same_trees
from tests.support.sent import planned_and_sent
from tests.support.small_steps import captures_of
from tests.support.some import some_of
from zerofn import optim

RATE, DECAY, FREEZE, STEPS = 0.01, 0.1, 3, 9


def model(dtype=torch.float32):
    """Odd sizes: leaves that cross the edges of shards, and a unit of less than a block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(23, 131), nn.GELU(), nn.Linear(131, 7), nn.Tanh(), nn.Linear(7, 23)).to(dtype)


def unit_of(name):
    return name.split(".")[0]


def rows(rank, step):
    return torch.randn(8, 23, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net, params, x):
    x = x.to(params["0.weight"].dtype)
    return (functional_call(net, params, (x,)) - x).float().square().mean()


def onebit(**options):
    return optim.onebit_adam(RATE, weight_decay=DECAY, **{"freeze_step": FREEZE, **options})


def started(stage, tx=None, num_microbatches=1, **options):
    """(state, step)"""
    net = model()

    def step(state, x):
        vg = state.value_and_grad(functools.partial(loss_of, net))
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches))(x)
        return state.apply_gradients(grads), loss

    create = {k: options.pop(k) for k in ("frozen", "loss_scale") if k in options}
    init = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=tx or onebit(), **create)
    return zerofn.shard(init, stage=stage, unit=unit_of, **options), step


def trained(state, step, first=0, steps=STEPS, batch=rows):
    """(losses, the state)"""
    losses = []
    for k in range(first, steps):
        state, loss = step(state, batch(zerofn.rank(), k))
        losses.append(loss)
    return losses, state


def by_torch(size, steps=STEPS, kind=onebit_by_torch.OneBitAdam, **options):
    """The same in float64: (losses, parameters)."""

    def gradients(net, k):
        found = []
        for rank in range(size):
            loss = (net(rows(rank, k).double()) - rows(rank, k).double()).square().mean()
            found.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
        return found

    def optimizer(place):
        given = {"rate": RATE, "decay": DECAY, "exact": lambda count: count < FREEZE, **options}
        return kind(place, size, **given)

    layout = started(3)[0].params.layout
    return onebit_by_torch.trained(model(torch.float64), layout, optimizer, gradients, steps)[:2]


def every_stage(tx, **options):
    size = zerofn.world_size()
    losses, params = by_torch(size, **options)
    reference = None
    ways = itertools.product(range(4), (True, False))
    for stage, captured in some_of(ways, (0, True), (3, True), (1, False)):
        state, step = started(stage, tx)
        found, state = trained(state, zerofn.compile(step) if captured else step)
        now = {"losses": torch.stack(found), "state": zerofn.unshard(state.opt_state), **zerofn.unshard(state.params)}
        reference = reference or now
        assert_same_trees(now, reference, f"stage {stage}, {'captured' if captured else 'as written'}")
    assert torch.allclose(reference.pop("losses").double(), torch.stack(losses), rtol=1e-5)
    reference.pop("state")
    for name, x in reference.items():
        assert torch.allclose(x.double(), params[name], atol=1e-5, rtol=1e-4), name


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_stage_has_the_bits_of_stage_0_and_the_values_of_the_paper(ranks, size):
    ranks(size, every_stage, None)


def zero_one():
    """With an exact step behind 0, 1, 2, 4 and 6 updates, and none from 6 on."""
    tx = optim.zero_one_adam(RATE, weight_decay=DECAY, var_freeze_step=6, var_update_scaler=2)
    every_stage(tx, exact=lambda count: count in (0, 1, 2, 4))


@pytest.mark.part(size=[1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_zero_one_adam_updates_its_variance_ever_more_rarely(ranks, size):
    ranks(size, zero_one)


def lamb():
    tx = optim.onebit_lamb(RATE, weight_decay=DECAY, freeze_step=FREEZE)
    every_stage(tx, kind=onebit_by_torch.OneBitLamb)


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_onebit_lamb_has_the_values_of_the_paper(ranks, size):
    ranks(size, lamb)


def warm_up():
    """Until its freeze step it is `adamw`."""
    for stage in some_of(range(4), 1, 3):
        both = [started(stage, tx) for tx in (onebit(freeze_step=STEPS), optim.adamw(RATE, weight_decay=DECAY))]
        found = [trained(state, zerofn.compile(step)) for state, step in both]
        (losses, state), (wanted, other) = found
        assert_same_trees(losses, wanted, f"stage {stage}")
        assert_same_trees(zerofn.unshard(state.params), zerofn.unshard(other.params), f"stage {stage}")


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_before_the_freeze_step_it_has_the_bits_of_adamw(ranks, size):
    ranks(size, warm_up)


def same_at_stages(stages=(0, 3, 1), steps=STEPS, **options):
    """What all stages agree on: (losses, the whole state)."""
    first = None
    for stage in some_of(stages, *stages[:2]):
        state, step = started(stage, **options)
        losses, state = trained(state, zerofn.compile(step), steps=steps)
        found = (losses, zerofn.unshard(state))
        first = first or found
        assert_same_trees(losses, first[0], f"stage {stage}")
        assert_same_trees(found[1].params, first[1].params, f"stage {stage}")
    return first


def with_other_options():
    """Stages agree; a frozen leaf, and one that no loss depends on, stay as they are."""
    losses, state = same_at_stages(frozen=lambda name: name.startswith("2."))
    assert_same_trees({k: state.params[k] for k in ("2.weight", "2.bias")}, dict(model()[2].named_parameters("2")))
    assert state.opt_state.mu["2.weight"] is None and losses[-1] < losses[0]
    for options in ({"precision": "bf16"}, {"precision": "fp16"}, {"wire": "int8"}):
        losses, state = same_at_stages(**options)
        assert losses[-1] < losses[0]
    tx = optim.inject_hyperparams(optim.onebit_adam)(RATE, weight_decay=DECAY, freeze_step=FREEZE)
    assert_same_trees(same_at_stages(stages=(3,), tx=tx)[0], same_at_stages(stages=(3,))[0])


@pytest.mark.whole
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stages_agree_with_frozen_leaves_and_other_dtypes(ranks, size):
    ranks(size, with_other_options)


def clipped(most):
    """By hand, in float64: the root of the mean of ranks' squared norms."""
    tx = optim.chain(optim.clip_by_global_norm(most), onebit())
    losses, state = same_at_stages(tx=tx)
    factors = []

    def gradients(net, k):
        found = []
        for rank in range(zerofn.world_size()):
            loss = (net(rows(rank, k).double()) - rows(rank, k).double()).square().mean()
            found.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
        each = [[g for _, gs in found[r : r + 1] for g in gs] for r in range(len(found))]
        if k < FREEZE:
            each = [[sum(gs) / len(each) for gs in zip(*each, strict=True)]]
        norm = (sum(sum(g.square().sum() for g in gs) for gs in each) / len(each)).sqrt()
        factors.append(min(1.0, float(most / (norm + 1e-6))))
        return [(loss, [g * factors[-1] for g in gs]) for loss, gs in found]

    def optimizer(place):
        return onebit_by_torch.OneBitAdam(place, zerofn.world_size(), RATE, lambda count: count < FREEZE, decay=DECAY)

    layout = started(3)[0].params.layout
    wanted, _, _ = onebit_by_torch.trained(model(torch.float64), layout, optimizer, gradients, STEPS)
    assert torch.allclose(torch.stack(losses).double(), torch.stack(wanted), rtol=1e-4)
    assert max(factors) < 1


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_clipped_by_the_norm_that_ranks_know(ranks, size):
    ranks(size, clipped, 0.05)


def skipped():
    for stage, captured in some_of(itertools.product((0, 3, 1), (True, False)), (0, False), (3, True)):
        state, step = started(stage)
        run = zerofn.compile(step) if captured else step
        _, state = trained(state, run, steps=6)
        before, x = zerofn.unshard(state), rows(zerofn.rank(), 6)
        if zerofn.rank() == zerofn.world_size() - 1:
            x[0, 0] = torch.nan
        state, _ = run(state, x)
        after = zerofn.unshard(state)
        assert int(after.skipped) == 1
        assert_same_trees((after.params, after.opt_state), (before.params, before.opt_state), f"stage {stage}")


@pytest.mark.parametrize("size", [2])
def test_a_step_that_is_skipped_on_one_rank_changes_nothing_on_any(ranks, size):
    ranks(size, skipped)


def in_microbatches():
    reduced = functools.partial(started, num_microbatches=2)
    for stage in (0, 3):
        (state, step), (other, once) = reduced(stage), started(stage)
        found, _ = trained(state, zerofn.compile(step))
        wanted, _ = trained(other, once)
        assert torch.allclose(torch.stack(found), torch.stack(wanted), rtol=1e-4), stage
    state, _ = started(3, tx=onebit(freeze_step=1))

    def wrong(state, x):
        vg = zerofn.accumulate(state.value_and_grad(functools.partial(loss_of, model())), 2, reduce="microbatch")
        return state.apply_gradients(vg(x)[1]), None

    state, _ = wrong(state, rows(zerofn.rank(), 0))
    with pytest.raises(ValueError, match=r"reduce='microbatch' sums gradients over ranks during the step"):
        wrong(state, rows(zerofn.rank(), 1))


@pytest.mark.parametrize("size", [2])
def test_microbatches_are_added_up_before_they_are_sent(ranks, size):
    ranks(size, in_microbatches)


def with_a_shorter_batch():
    """On rank 1, behind the freeze step: captured as eagerly."""

    def shorter(rank, step):
        return rows(rank, step)[: 5 if rank and step >= 6 else 8]

    for stage in (3, 0):
        eager, captured = (trained(*how(started(stage)), batch=shorter) for how in (lambda x: x, _compiled))
        assert_same_trees(captured[0], eager[0], f"stage {stage}")
        assert_same_trees(zerofn.unshard(captured[1]).params, zerofn.unshard(eager[1]).params, f"stage {stage}")


def _compiled(given):
    return given[0], zerofn.compile(given[1])


@pytest.mark.parametrize("size", [2])
def test_ranks_may_have_batches_of_other_lengths(ranks, size):
    ranks(size, with_a_shorter_batch)


def restarted(folder):
    """At another stage, and at the same number of ranks: bit for bit."""
    for stage in (3, 0):
        state, step = started(stage)
        run = zerofn.compile(step)
        _, state = trained(state, run, steps=6)
        zerofn.save(f"{folder}/{stage}", state)
        losses, end = trained(state, run, first=6)
        for like in (started(3 - stage)[0], started(stage)[0]):
            loaded = zerofn.load(f"{folder}/{stage}", like=like)
            again = zerofn.shard(zerofn.unshard(loaded), stage=stage, unit=unit_of)
            for each in (loaded, again):
                found, after = trained(each, run, first=6)
                assert_same_trees(found, losses, f"stage {stage}")
                assert_same_trees(zerofn.unshard(after).opt_state, zerofn.unshard(end).opt_state, f"stage {stage}")


@pytest.mark.parametrize("size", [2])
def test_a_checkpoint_goes_on_bit_for_bit(ranks, size, tmp_path):
    ranks(size, restarted, str(tmp_path))


def errors_of(folder):
    """The sums over ranks of what a checkpoint's ranks have left out, and the next loss."""
    state = zerofn.load(folder, like=started(3)[0])
    whole = zerofn.unshard(state.opt_state)
    sums = {k: x.sum(0) for k, x in whole.worker_error.items()}
    losses, _ = trained(state, zerofn.compile(started(3)[1]), first=6, steps=8, batch=lambda rank, k: rows(0, k))
    return len(next(iter(whole.worker_error.values()))), sums, whole.server_error, losses


def saved(folder):
    state, step = started(3)
    _, state = trained(state, zerofn.compile(step), steps=6)
    zerofn.save(folder, state)
    whole = zerofn.unshard(state.opt_state)
    return {k: x.sum(0) for k, x in whole.worker_error.items()}, whole.server_error


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size, others", [(2, (1, 3)), (3, (2,))])
def test_other_numbers_of_ranks_go_on_with_the_same_sum_of_errors(ranks, size, others, tmp_path):
    sums, server = ranks(size, saved, str(tmp_path / "saved"))[0]
    for other in others:
        num, found, kept, losses = ranks(other, errors_of, str(tmp_path / "saved"))[0]
        assert num == other and losses[-1].isfinite()
        for name, x in sums.items():
            assert torch.allclose(found[name], x, atol=1e-7), name
        assert_same_trees(kept, server)


def sent_by_a_step(stage, tx):
    """Bytes, planned and sent by this process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: functional_call(net, p, (x,)).square().mean())(x)
        return state.apply_gradients(grads), loss

    state = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=tx)
    state, run = zerofn.shard(state, stage=stage, unit=unit_of), zerofn.compile(step)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(zerofn.rank()))
    for _ in range(2):
        state, _ = run(state, x)
    return planned_and_sent(run, state, x)


def bytes_of_stages():
    found = {}
    for stage in some_of(range(4), 0, 3):
        (planned, sent), (exact, _) = (
            sent_by_a_step(stage, tx) for tx in (optim.onebit_adam(1e-3, freeze_step=1), optim.adamw(1e-3))
        )
        assert planned == sent, f"stage {stage}"
        found[stage] = planned, exact
    assert found[0][1] / found[0][0] > 24
    gathers = found[0][1] // 2  # of the parameters, in float32
    for stage in found.keys() - {0}:  # the reduction: signs are gathered before, and their sums are scattered
        assert found[0][1] / (found[stage][0] - gathers) > 24, stage


@pytest.mark.parametrize("size", [2])
def test_what_is_sent_is_planned_and_a_31st(ranks, size):
    ranks(size, bytes_of_stages)


def equal_after_50_steps():
    state, step = started(0)
    losses, state = trained(state, zerofn.compile(step), steps=50)
    assert losses[-1] < 0.9 * losses[0]
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu):
        mine = torch.cat(tree.shards)
        every = [torch.empty_like(mine) for _ in range(zerofn.world_size())]
        torch.distributed.all_gather(every, mine)
        assert all(torch.equal(x, every[0]) for x in every)


@pytest.mark.whole
@pytest.mark.parametrize("size", [2])
def test_ranks_are_equal_after_50_steps(ranks, size):
    ranks(size, equal_after_50_steps)


def refused():
    tx, loss_fn = onebit(freeze_step=1), functools.partial(loss_of, model())
    for captured in (True, False):
        state, step = started(3, tx=tx)

        def summed(state, x):
            loss, grads = zerofn.value_and_grad(loss_fn)(state.params, x)
            return state.apply_gradients(grads), loss

        with pytest.raises(ValueError, match="needs gradients from this state's value_and_grad"):
            (zerofn.compile(summed) if captured else summed)(state, rows(zerofn.rank(), 0))
    state, _ = step(state, rows(zerofn.rank(), 0))
    sums = zerofn.value_and_grad(loss_fn)(state.params, rows(zerofn.rank(), 1))[1]
    state.value_and_grad(loss_fn)
    with pytest.raises(ValueError, match="onebit_adam: after its freeze step, the optimizer needs each rank's"):
        state.apply_gradients(sums)
    mesh = zerofn.Mesh.make(replicate=zerofn.world_size(), data=1)
    with pytest.raises(NotImplementedError, match="signs, whose sums work only along the axes 'data' and 'context'"):
        started(3, tx=tx, mesh=mesh)


@pytest.mark.parametrize("size", [2])
def test_what_it_cannot_do_is_a_sentence(ranks, size):
    ranks(size, refused)


def test_where_it_may_stand_and_its_arguments():
    for make in (
        lambda tx: optim.masked(tx, lambda leaf: leaf.ndim > 1),
        lambda tx: optim.multi_transform({"a": tx}, lambda leaf: "a"),
        lambda tx: optim.lookahead(tx, 5, 0.5),
    ):
        with pytest.raises(
            ValueError, match=r"averages the gradients of all parameters over ranks itself.*the last of optim\.chain"
        ):
            make(onebit())
    with pytest.raises(ValueError, match="updates the parameters itself, so it must come last"):
        optim.chain(onebit(), optim.scale(0.5))
    with pytest.raises(ValueError, match="cannot come before onebit_adam"):
        optim.chain(optim.clip(1.0), onebit())
    with pytest.raises(ValueError, match=r"onebit_adam: b2 must lie in \[0, 1\)"):
        optim.onebit_adam(1e-3, b2=1.0, freeze_step=3)
    with pytest.raises(ValueError, match="freeze_step must be at least 1"):
        onebit(freeze_step=0)
    with pytest.raises(ValueError, match="freeze_step must be a number of updates, got inf. Write a whole number"):
        onebit(freeze_step=float("inf"))
    with pytest.raises(ValueError, match="min_coeff=5 must not be larger than max_coeff=1"):
        optim.onebit_lamb(1e-3, freeze_step=2, min_coeff=5, max_coeff=1)
    with pytest.raises(ValueError, match=r"freeze_step must be a number of updates, got 1\.5. Write 1"):
        onebit(freeze_step=1.5)


def with_slices(sizes):
    """In float64. Signs are those of a rank's slices, with scales of their own."""
    mesh, first = zerofn.Mesh.make(**sizes), None

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()

    def draw(_, k):
        rng = torch.Generator().manual_seed(10 * k + mesh.batch.rank)
        return torch.randn(6, 7, generator=rng, dtype=torch.float64)

    net = zerofn.skeleton(build)
    cuts = zerofn.parallel.tensor(net, mesh, {"0": "colwise", "2": "rowwise"}) if "tensor" in sizes else None

    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: functional_call(net, p, (x,)).square().mean())(x)
        return state.apply_gradients(grads), loss

    ways = ((0, True), (3, False), (3, True), (1, True))
    for stage, captured in some_of(ways, (0, True), (3, True)):
        init = zerofn.TrainState.create(params=dict(build().named_parameters()), tx=onebit())
        state = zerofn.shard(init, stage=stage, mesh=mesh, cuts=cuts)
        losses, state = trained(state, zerofn.compile(step) if captured else step, batch=draw)
        found = (losses, zerofn.unshard(state).params)
        first = first or found
        assert_same_trees(found, first, f"stage {stage}")
    assert first[0][-1] < first[0][0]


@pytest.mark.part(sizes=[{"data": 2, "context": 2}])
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"data": 2, "context": 2}], ids=str)
def test_stages_agree_on_other_meshes(ranks, sizes):
    ranks(4, with_slices, sizes)


def offloaded(folder):
    """State on drives."""
    drives = {"optimizer": "nvme", "path": folder}
    for tiers, stages in ((drives, (3, 0, 1)), ({**drives, "params": "nvme"}, (3, 0))):
        for tx in (onebit(), optim.onebit_lamb(RATE, freeze_step=FREEZE)):
            options = {"offload": zerofn.Offload(**tiers), "precision": "bf16"}
            for stage in stages:
                state, step = started(stage, tx, **options)
                losses, state = trained(state, zerofn.compile(step), steps=6)
                other, step = started(stage, tx, precision="bf16")
                wanted, other = trained(other, zerofn.compile(step), steps=6)
                assert_same_trees(losses, wanted, f"stage {stage}, {tiers}")
                assert_same_trees(zerofn.unshard(state).opt_state, zerofn.unshard(other).opt_state, f"stage {stage}")


@pytest.mark.whole
def test_offloading_changes_no_bit(ranks, tmp_path):
    ranks(2, offloaded, str(tmp_path))


def in_place():
    """The new state has the old one's memory, and a step has no memory for another momentum or other errors."""
    for stage in (0, 3):
        state, step = started(stage, onebit(freeze_step=1))
        run = zerofn.compile(step)
        _, state = trained(state, run, steps=3)
        kept = (state.params, state.opt_state.mu, state.opt_state.worker_error, state.opt_state.server_error)
        before = [x.data_ptr() for tree in kept for x in tree.shards]
        _, state = trained(state, run, first=3, steps=5)
        kept = (state.params, state.opt_state.mu, state.opt_state.worker_error, state.opt_state.server_error)
        assert [x.data_ptr() for tree in kept for x in tree.shards] == before
        names = [n.target for n in captures_of(run)[-1].program.gm.graph.nodes]
        ops = torch.ops.zerofn
        assert {ops.sign_send_.default, ops.sign_sum_.default, ops.frozen_adamw_.default} <= {*names}
        assert torch.ops.aten.copy_.default not in names


@pytest.mark.parametrize("size", [2])
def test_averages_and_errors_are_written_in_place(ranks, size):
    ranks(size, in_place)
