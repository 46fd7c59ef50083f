"""Regions that are not captured: the bits of the eager step, and a sentence for what they may not do."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import collectives, optim

WIDTH = 8


def of_some_rows(h, w):
    """Rows that data choose, a branch on data, and dropout."""
    rows = h[h.sum(-1) > 0] @ w
    if rows.numel() == 0:
        return h.new_zeros(()), torch.zeros((), dtype=torch.int64)
    return F.dropout(rows, 0.3).square().sum() / len(rows), torch.tensor(len(rows))


def like(h, w):
    return h.new_empty(()), torch.empty((), dtype=torch.int64)


REGION = zerofn.eager_region(of_some_rows, like=like)


def params():
    draw = torch.Generator().manual_seed(0)
    return {"0.a": torch.randn(WIDTH, WIDTH, generator=draw), "1.w": torch.randn(WIDTH, 5, generator=draw)}


def rows(rank=0, seed=0, num=12):
    return {"x": torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))}


def loss_fn(params, batch, region=REGION):
    h = torch.tanh(batch["x"].to(params["0.a"].dtype) @ params["0.a"])
    h = torch.tanh(2 * F.gelu(h)) + h
    value, count = region(h, params["1.w"])
    return value.float() + h.float().mean() + 0 * count


def state_of(stage, **options):
    plain = zerofn.TrainState.create(params=params(), tx=optim.adamw(1e-2))
    return zerofn.shard(plain, stage=stage, unit=lambda name: name.partition(".")[0], **options)


def trained(compiled, stage=3, num_microbatches=1, precision=None, loss_fn=loss_fn, **options):
    rank = dist.get_rank() if dist.is_initialized() else 0
    state, step, losses = state_of(stage, precision=precision), step_with(loss_fn, num_microbatches), []
    step = zerofn.compile(step, **options) if compiled else step
    for k in range(3):
        state, loss = step(state, rows(rank, k))
        losses.append(loss)
    return zerofn.unshard(state.params), losses


@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 3}, {"precision": "bf16"}, {"remat": "full"}, {"num_microbatches": 2, "remat": "full"}],
    ids=str,
)
def test_captured_is_eager(options):
    eager = {k: v for k, v in options.items() if k != "remat"}
    assert_same_trees(trained(True, **options), trained(False, **eager))


def on_ranks(stage):
    return trained(True, stage), trained(False, stage)


@pytest.mark.part(stage=[0])
@pytest.mark.part(size=[3])
@pytest.mark.parametrize(("size", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_captured_is_eager_on_ranks(ranks, size, stage):
    for captured, eager in ranks(size, on_ranks, stage):
        assert_same_trees(captured, eager)


def test_gradients_are_plain_torchs():
    def undropped(h, w):
        chosen = h[h.sum(-1) > 0] @ w
        return chosen.square().sum(), torch.tensor(len(chosen))

    region = zerofn.eager_region(undropped, like=like)
    plain = {name: p.requires_grad_() for name, p in params().items()}
    loss = loss_fn(plain, rows(), undropped)
    expected = torch.autograd.grad(loss, list(plain.values()))

    def step(state, batch):
        loss, grads = state.value_and_grad(lambda p, b: loss_fn(p, b, region))(batch)
        return state, (loss, zerofn.gather(grads))

    _, (found, grads) = zerofn.compile(step)(state_of(3), rows())
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(list(grads.values()), list(expected))


def test_in_a_skeletons_module():
    """A module's own part of the work, with its parameters as an argument."""
    route = torch.nn.Linear(WIDTH, WIDTH)
    region = zerofn.eager_region(
        lambda weights, h: functional_call(route, weights, (h[h.sum(-1) > 0],)).sum(0), like=lambda weights, h: h[0]
    )

    def loss(params, batch):
        return region({"weight": params["0.a"], "bias": params["0.a"][0]}, batch["x"]).square().sum()

    assert_same_trees(trained(True, loss_fn=loss), trained(False, loss_fn=loss))


def wrong(fn, like=like):
    region = zerofn.eager_region(fn, like=like)
    state = state_of(3)
    zerofn.compile(step_with(lambda p, b: loss_fn(p, b, region)))(state, rows())


def test_what_a_region_may_not_do():
    def of_another_shape(h, w):
        return h[h.sum(-1) > 0].sum(-1), torch.zeros((), dtype=torch.int64)

    def in_place(h, w):
        return h.detach().mul_(2).sum() + w.sum(), torch.zeros((), dtype=torch.int64)

    with pytest.raises(RuntimeError, match=r"of_another_shape returned \[\d+\] torch.float32.*announced \[\] torch"):
        wrong(of_another_shape)
    with pytest.raises(RuntimeError, match="in_place wrote to an argument, which an eager_region may not"):
        wrong(in_place)
    with pytest.raises(
        TypeError, match="of_some_rows: the function `like` of an eager_region must return a tree of tensors"
    ):
        wrong(of_some_rows, like=lambda h, w: 3)


def test_a_closure_over_the_step_is_refused():
    def loss(params, batch):
        region = zerofn.eager_region(lambda h: (h @ params["1.w"]).sum(), like=lambda h: h.new_empty(()))
        return region(torch.tanh(batch["x"] @ params["0.a"]))

    with pytest.raises(
        ValueError, match=r"closes over 'params', which holds tensors of the step. Pass it to the region as an argument"
    ):
        zerofn.compile(step_with(loss))(state_of(3), rows())


def communicating():
    def inside(h, w):
        return collectives.all_reduce(h).sum() + w.sum(), torch.zeros((), dtype=torch.int64)

    with pytest.raises(
        RuntimeError, match="inside communicates .*, which an eager_region may not do. Communicate outside"
    ):
        wrong(inside)


def test_a_region_may_not_communicate(ranks):
    ranks(2, communicating)
    ranks.stop()  # a step failed


FACTOR = 1.0


def test_a_redefined_region_is_captured_again():
    global FACTOR
    region = zerofn.eager_region(lambda h, w: ((h @ w).sum() * FACTOR, torch.tensor(1)), like=like)
    step, state = (
        zerofn.compile(lambda s, b: (s, loss_fn(zerofn.gather(s.params), b, region)), donate=False),
        state_of(3),
    )
    found = []
    for factor in (1.0, 3.0):
        FACTOR = factor
        found.append(step(state, rows())[1])
    plain = [loss_fn(params(), rows(), lambda h, w, f=f: ((h @ w).sum() * f, torch.tensor(1))) for f in (1.0, 3.0)]
    torch.testing.assert_close(found, plain)


def test_gradients_of_what_is_used_inside_and_outside_have_the_bits_of_the_eager_step():
    """Sums of three gradients depend on their order."""
    region = zerofn.eager_region(lambda h: torch.tanh(h).sum() * h.exp().sum(), like=lambda h: h.new_empty(()))

    def step(state, x):
        def loss_fn(p, x):
            h = x @ p["w"]
            return region(h) + h.sin().sum() + region(3 * h) * h.cos().mean()

        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads), (loss, grads)

    draw = torch.Generator().manual_seed(0)
    state = zerofn.TrainState.create(params={"w": torch.randn(9, 9, generator=draw) / 9}, tx=optim.sgd(0.1))
    x = torch.randn(7, 9, generator=draw)
    expected = step(state, x)
    assert_same_trees(zerofn.compile(step)(state, x), expected)


class Held:
    def __init__(self, x):
        self.x = x


def test_an_object_as_an_argument_of_a_region_is_refused():
    """Its tensors would be those of the capture, at every step."""
    region = zerofn.eager_region(lambda held: held.x.sum(), like=lambda held: held.x.new_empty(()))
    with pytest.raises(TypeError, match=r"<lambda>: an argument's entry '0' is a Held, but leaves must be tensors"):
        zerofn.compile(lambda state, x: region(Held(x)) + state["w"])({"w": torch.zeros(())}, torch.ones(2))
