"""Steps that write in place, look at one memory twice or meet one value twice: compiled is eager, bit for bit."""

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with
from zerofn import optim, tree

TX = optim.sgd(0.1)


def outcome(step, state, batches):
    """Every tensor that comes out of some steps, none copied before the last, and what they were given."""
    batches, out = [b.clone() for b in batches], []
    for batch in batches:
        state, aux = step(state, batch)
        out.append(aux)
    return tree.leaves((zerofn.unshard(state), out, batches))


def assert_compiled_is_eager(step, init, batches, **options):
    ours = outcome(zerofn.compile(step, **options), init(), batches)
    theirs = outcome(step, init(), batches)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def assert_trains_alike(loss_fn, params, batch, **options):
    """Two steps of `loss_fn`, at one rank."""
    step = step_with(loss_fn)

    def init():
        plain = {k: p.clone() for k, p in params.items()}
        return zerofn.shard(zerofn.TrainState.create(params=plain, tx=TX), **options)

    assert_compiled_is_eager(step, init, [batch, batch])


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# --- one memory, seen twice -------------------------------------------------------------------------------------

CUTS = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split(64, -1),
    "sizes": lambda h: h.split([64, 64], -1),
    "unbind": lambda h: h.view(128, 2, 64).unbind(1),
    "unsafe chunk": lambda h: torch.unsafe_chunk(h, 2, -1),
    "unsafe sizes": lambda h: torch.unsafe_split_with_sizes(h, [64, 64], -1),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_value_of_which_parts_are_read_later_is_not_written_over(cut):
    def loss_fn(params, batch):
        h = (batch @ params["w"]) * 1.5
        a, c = cut(h)
        return (h * 2.0).mean() + (a * c).square().mean()

    assert_trains_alike(loss_fn, {"w": random(64, 128)}, random(128, 64))


def test_a_cast_that_is_written_is_no_other_cast():
    def loss_fn(params, batch):
        u = batch.double()
        u.mul_(2)
        return (batch.double() @ params["w"] + u.mean()).square().mean()

    assert_trains_alike(loss_fn, {"w": random(64, 64, dtype=torch.float64)}, random(8, 64))


def test_a_transpose_of_a_number():
    assert_trains_alike(lambda p, b: (p["w"] * b.transpose(0, -1).transpose(0, -1)).sum(), {"w": random(64)}, random())


# --- gradients --------------------------------------------------------------------------------------------------


class _FirstRowFixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gw = x.t() @ g
        gw[0].zero_()
        return g @ w.t(), gw


def test_a_gradient_that_is_written_through_a_view():
    def loss_fn(params, batch):
        return _FirstRowFixed.apply(batch, params["w"]).square().mean()

    assert_trains_alike(loss_fn, {"w": random(64, 64)}, random(8, 64))


def test_a_value_that_is_written_through_a_view_before_it_is_scattered():
    def step(state, batch):
        g = torch.ones(64, 64) * batch
        g[0] = 0
        return state.apply_gradients(zerofn.scatter({"w": g}, like=state.params)), None

    def init():
        return zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(64, 64)}, tx=TX))

    assert_compiled_is_eager(step, init, [torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize("unit", [lambda name: "both", lambda name: name], ids=["one unit", "two units"])
@pytest.mark.parametrize("combine", [torch.matmul, torch.add])
def test_one_gradient_of_two_leaves(unit, combine):
    def loss_fn(params, batch):
        return combine(batch @ params["w"], params["a"] + params["b"]).square().mean()

    rows = (64,) if combine is torch.matmul else ()  # a weight, or a bias
    params = {"w": random(64, 64), "a": random(*rows, 64), "b": random(2, *rows, 64)[1]}
    assert_trains_alike(loss_fn, params, random(8, 64), unit=unit)


# --- what a step returns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tx", [optim.lion(0.1), optim.sgd(0.1, momentum=0.9), optim.adamw(0.1)])
def test_gradients_that_are_the_parameters(tx):
    def init():
        return zerofn.shard(zerofn.TrainState.create(params={"w": random(5000)}, tx=tx))

    assert_compiled_is_eager(lambda s, b: (s.apply_gradients(s.params), None), init, [torch.zeros(()), torch.ones(())])


def test_a_part_of_the_old_state_is_returned():
    def step(state, batch):
        grads = {"w": torch.ones(100)}
        return state.apply_gradients(grads), state.params["w"].chunk(2)[0]

    def init():
        return zerofn.TrainState.create(params={"w": torch.ones(100)}, tx=TX)

    assert_compiled_is_eager(step, init, [torch.zeros(())] * 2)


def test_a_part_of_the_new_state_is_returned_and_then_written():
    def step(state, batch):
        new = state.apply_gradients({"w": torch.ones(100)})
        first = new.params["w"][:50]
        new.params["w"][:2].mul_(batch)
        return new, first

    def init():
        return zerofn.TrainState.create(params={"w": torch.ones(100)}, tx=TX)

    assert_compiled_is_eager(step, init, [torch.tensor(2.0), torch.tensor(3.0)])


def test_an_entry_that_becomes_the_batch():
    """The batch is the caller's; here it has another dtype than the entry had, and so is returned as it is."""
    assert_compiled_is_eager(
        lambda s, b: ({"prev": b}, None),
        lambda: {"prev": torch.zeros(16)},
        [random(16, dtype=torch.float64), random(16, dtype=torch.float64) * 2, random(16)],
    )


def test_an_entry_that_becomes_a_constant():
    table = random(16, dtype=torch.float64)
    before = table.clone()

    def step(state, batch):
        return {"prev": table if state["prev"].dtype == torch.float32 else state["prev"] + batch}, None

    assert_compiled_is_eager(step, lambda: {"prev": torch.zeros(16)}, [random(16, dtype=torch.float64)] * 3)
    assert torch.equal(table, before)


def grow(state, batch):
    new = torch.cat([state["w"], state["w"]])
    return {"w": new, "same": new.view(-1)}, new[1:]


def scale(state, batch):
    return {k: x * batch for k, x in state.items()}, None


@pytest.mark.parametrize("donate", [True, False])
def test_a_value_that_is_returned_in_two_entries_and_beside_them(donate):
    """The second step may write to the state it is given, and to nothing else."""

    def both_steps(first, second):
        state, aux = first({"w": random(16), "same": random(16)}, torch.tensor(2.0))
        state, _ = second(state, torch.tensor(3.0))
        return [state["w"], state["same"], aux]

    ours = both_steps(zerofn.compile(grow, donate=donate), zerofn.compile(scale))
    assert_same_trees(ours, both_steps(grow, scale))


def test_norms_before_and_after_a_gradient_is_written():
    """Each is of what the gradient was where it was asked for."""
    module = build(2)

    def step(state, batch):
        _, grads = state.value_and_grad(loss_of(module))(batch)
        before = zerofn.global_norm(grads)
        grads = tree.tree_map(lambda g: g.mul_(0.5), grads)
        return state.apply_gradients(grads), {"before": before, "after": zerofn.global_norm(grads)}

    (state, aux), (expected, numbers) = (each(state_of(module, 3), batch_of()) for each in (zerofn.compile(step), step))
    assert_same_trees((aux, state.params), (numbers, expected.params))
    assert aux["before"] == 2 * aux["after"]
