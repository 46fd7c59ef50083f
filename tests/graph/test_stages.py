"""What cannot be cut into stages, and what of memory that is written can."""

import pytest
import torch

import zerofn
from tests.graph.test_cut import assert_pieces_are_the_body, cut_of, layers_of
from tests.support.staged import Pipeline, staged
from zerofn.graph import causes
from zerofn.graph.boundaries import holders
from zerofn.graph.cut import cut

D = torch.float64
ROUNDS = 3


def two(loss_fn, names="ab", **options):
    """A step of some matrices, and what `loss_fn` makes of them."""
    torch.manual_seed(0)
    params = {name: torch.randn(4, 4, dtype=D) for name in names}
    return staged(params, loss_fn, {"x": torch.randn(2 * ROUNDS, 4, dtype=D)}, ROUNDS, **options)


def halves(body):
    """`a` on the first stage, and `b` on the second."""
    region = body.region()
    return cut(region, holders(region, ["b"]), 2, range(2))


def assert_halves_are_the_body(body):
    return assert_pieces_are_the_body(body, 2, layer=r"^([ab])")


def test_a_leaf_that_is_used_before_its_stage_is_refused():
    region = layers_of().region()
    leaves = {name: (min(int(name[0]) // 3, 1),) for name in set(region.seams.leaves.values())}
    leaves["6.weight"] = (0,)
    message = r"'6.weight' is stored on stage 0, but is read after '3.\w+' of stage 1.*Put '6.weight' on stage 1, or"
    with pytest.raises(ValueError, match=message):
        cut(region, leaves, 2, range(2))


def penalised(params, batch):
    """A gradient penalty on the first matrix: its derivative reads all of them again, the last one first."""
    loss = (torch.tanh(batch["x"] @ params["a"]) @ params["c"] @ params["b"]).square().mean()
    (grad,) = torch.autograd.grad(loss, params["a"], create_graph=True)
    return loss + grad.square().sum()


def test_a_leaf_that_a_derivative_inside_the_loss_reads_again_is_refused_with_that_reason():
    region = two(penalised, "acb").region()
    with pytest.raises(ValueError, match=r"stage 0 stores and reads 'c', but 'c' is read again.*gradient penalty"):
        cut(region, {"a": (0,), "c": (0,), "b": (1,)}, 2, range(2))


class Clamped(torch.autograd.Function):
    """Whose derivative is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


@pytest.mark.parametrize(("made", "crossing"), [(torch.tanh, 1), (lambda c: c.t() * 2, 1), (Clamped.apply, 2)])
def test_what_is_made_of_a_leaf_for_two_stages_sends_no_gradient_if_its_derivative_is_linear(made, crossing):
    def loss_fn(params, batch):
        bias = made(params["c"]).sum(0)
        return (torch.tanh((batch["x"] + bias) @ params["a"]) @ params["b"] + bias).square().mean()

    body = two(loss_fn, "acb")
    region = body.region()
    leaves = holders(region, ["b"])
    assert leaves["c"] == (0, 1)
    found, here, there = cut(region, leaves, 2, range(2)), body.fresh(), body.fresh()
    for mine, other in zip(Pipeline([here] * 2, found.pieces, found.alike).run()[0], there.whole()[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert sum(e.kind == "I" for e in found.edges) == crossing


def test_a_leaf_between_its_stages_is_refused():
    region = layers_of().region()
    leaves = holders(region, ["3.weight", "9.weight"])
    leaves["3.bias"] = (0, 2)
    with pytest.raises(ValueError, match=r"'3.bias' is stored on stage 0, 2, but stage 1 reads it"):
        cut(region, leaves, 3, range(3))


def shifted():
    """Labels that are made by writes through views, as T5 makes them, and an activation that is written to."""

    def loss_fn(params, batch):
        x = batch["x"]
        shifted = torch.zeros_like(x)
        shifted[:, 1:].copy_(x[:, :-1])  # nobody uses its result
        shifted[:, 0].fill_(2.0)
        h = x @ params["a"]
        h[:, 1:].mul_(3.0)
        return ((torch.tanh(h) @ params["b"]) * shifted).square().mean()

    return two(loss_fn)


def test_writes_through_views_come_before_what_reads_them():
    found = assert_halves_are_the_body(shifted())
    assert [e.kind for e in found.edges] == ["F", "I"]


def test_without_writers_that_nobody_uses_bits_are_others(monkeypatch):
    monkeypatch.setattr(causes, "_with_writers", lambda graph, root: {x: x.all_input_nodes for x in graph.nodes})
    with pytest.raises(AssertionError, match=r"leaf '0\.\d' in \w+|elements differ"):
        assert_halves_are_the_body(shifted())


def test_memory_that_is_written_on_another_stage_is_refused():
    def loss_fn(params, batch):
        h = batch["x"] @ params["a"]
        h[:, 1:].add_(torch.tanh(batch["x"] @ params["b"])[:, 1:])
        return h.square().mean()

    with pytest.raises(ValueError, match=r"runs on stage 1, but overwrites a tensor that stage 0 made"):
        halves(two(loss_fn))


def running(behind):
    """A loss that writes a running mean on the first stage. `behind`: what the second one makes of it."""

    def loss_fn(params, batch, inside):
        h = batch["x"] @ params["a"]
        inside["mean"].mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        inside["count"].add_(1)
        h = torch.tanh(h - inside["mean"]) @ params["a"]
        return behind(torch.tanh(h) @ params["b"], inside["mean"]).square().mean()

    return two(loss_fn, buffers={"mean": torch.zeros(4, dtype=D), "count": torch.zeros((), dtype=torch.int64)})


def test_one_stage_may_have_running_values():
    found = assert_halves_are_the_body(running(lambda h, mean: h))
    assert sorted(found.buffers.values()) == [0, 0]


def test_running_values_of_two_stages_are_refused():
    with pytest.raises(ValueError, match=r"is read and written on stage 0 and 1, .*Freeze .* with eval\(\)"):
        halves(running(lambda h, mean: h + mean))


def test_running_values_that_a_gradient_reads_are_refused():
    with pytest.raises(ValueError, match=r"is read and written on stage 0 and 1 and in the backward pass"):
        halves(running(lambda h, mean: h * mean))


class Times(torch.autograd.Function):
    """Twice `h`, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, h, factor):
        ctx.save_for_backward(factor)
        return h * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def test_memory_that_is_written_before_the_backward_pass_reads_it_is_refused():
    def loss_fn(params, batch):
        x = batch["x"].clone()
        h = Times.apply(batch["x"] @ params["a"], torch.cos(x))  # what the gradient alone reads is computed there
        x[:, 1:].add_(1.0)
        return (torch.tanh(torch.tanh(h + x) @ params["a"]) @ params["b"]).square().mean()

    with pytest.raises(ValueError, match=r"overwrites a tensor whose old values the backward pass needs"):
        halves(two(loss_fn))


def test_an_eager_region_with_leaves_of_two_stages_is_refused():
    def loss_fn(params, batch):
        both = zerofn.eager_region(lambda x, a, b: x @ a @ b, like=lambda x, a, b: x.new_empty(x.shape))
        h = batch["x"] @ params["a"]
        return (both(h, params["a"], params["b"]) @ params["b"]).square().mean()

    region = two(loss_fn).region()
    with pytest.raises(ValueError, match=r"the eager_region or loop.* uses parameters of stages 0 and 1. Write one"):
        cut(region, {"a": (0,), "b": (1,)}, 2, range(2))


def test_a_loss_of_gradients_is_refused():
    def loss_fn(params, batch):
        inner = lambda p: (batch["x"] @ p["a"]).square().mean()  # noqa: E731
        _, grads = zerofn.value_and_grad(inner)({"a": params["a"].detach()})
        return (batch["x"] @ (params["a"] - 0.1 * grads["a"]) @ params["b"]).square().mean()

    with pytest.raises(ValueError, match=r"the loss is computed.* from gradients, but a pipeline has only one"):
        two(loss_fn).region()


def test_auxiliary_values_come_from_the_stage_that_makes_them():
    def loss_fn(params, batch):
        h = torch.tanh(batch["x"] @ params["a"])
        norm = params["a"].square().sum()
        return (h @ params["b"]).square().mean(), {"h": h.detach(), "rows": batch["x"] * 2, "norm": norm.detach()}

    found = assert_halves_are_the_body(two(loss_fn, has_aux=True))
    # Of h, norm and rows. Between equal positions the first is taken: before the tanh. Rows depend on no leaf.
    assert found.homes[-3:] == ((1,), (0,), (0, 1))


def test_a_loss_of_all_leaves_has_them_on_its_stage():
    def loss_fn(params, batch):
        h = torch.tanh(torch.tanh(batch["x"] @ params["a"]) @ params["b"]) @ params["c"]
        return h.square().mean() + 0.1 * params["a"].square().sum()

    body = two(loss_fn, "abc")
    region = body.region()
    leaves = holders(region, ["c"])
    assert leaves == {"a": (0, 1), "b": (0,), "c": (1,)}
    found = cut(region, leaves, 2, range(2))
    assert found.terms == {"a": (0, 1), "b": (0,), "c": (1,)}
    for ours, theirs in zip(Pipeline([body] * 2, found.pieces, found.alike).run()[0], body.whole()[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_stages_hand_over_no_more_than_one_activation():
    found, _ = cut_of(layers_of(), 4, layer=r"^(\d+)\.")
    assert [(e.source, e.target, e.kind) for e in found.edges] == [
        (0, 1, "F"), (1, 2, "F"), (2, 3, "F"), (3, 2, "I"), (2, 1, "I"), (1, 0, "I")
    ]  # fmt: skip
