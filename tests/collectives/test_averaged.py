"""Sums over an axis of the batch inside of a loss function: refused where gradients would be 1/n, right elsewhere."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import collectives, optim
from zerofn.comm.mesh import Mesh

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def penalty(params, axis, rank):
    """Half of the rows of a matrix on each rank: all that is differentiated has come through `vary`."""
    own = collectives.vary(params["0.weight"], axis)[8 * rank : 8 * rank + 8]
    return collectives.psum(own.square().sum(), axis)


def gradients(axis, captured):
    mesh, model = Mesh.make(**{axis: 2}), zerofn.skeleton(build)
    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.sgd(0.1)), mesh=mesh
    )
    r = mesh.axis(axis).rank
    mine = X.chunk(2)[r]

    def of(loss_of):
        def step(state, batch):
            loss_fn = lambda p, b: loss_of(functional_call(model, p, (b,)), p)  # noqa: E731
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), loss

        run = zerofn.compile(step, donate=False) if captured else step
        new, loss = run(state, mine)
        return loss, zerofn.unshard(new.params)

    for wrong in (
        lambda y, p: collectives.psum(y.square().mean(), axis) / 2,
        lambda y, p: y.square().mean() + collectives.psum(p["0.weight"].square().sum(), axis),
        lambda y, p: collectives.psum(y.square().sum(), axis) / collectives.all_reduce(torch.tensor(float(y.numel()))),
    ):
        with pytest.raises(
            (ValueError, RuntimeError), match=f"psum over '{axis}' in a loss function.* 2 times too small"
        ):
            of(wrong)
    count = lambda y: collectives.psum(torch.tensor(float(y.numel())), axis)  # noqa: E731  (has no gradient)
    return [
        of(lambda y, p: y.square().mean()),
        of(lambda y, p: collectives.mean(y.square().mean())),
        of(lambda y, p: collectives.all_reduce(y.square().sum()) / count(y)),
        of(lambda y, p: y.square().mean() + 0 * collectives.psum(y.detach().sum(), axis)),
        of(lambda y, p: collectives.all_gather(y).square().mean()),
    ], of(lambda y, p: y.square().mean() + penalty(p, axis, r))


@pytest.mark.part(axis=["replicate", "context"])
@pytest.mark.parametrize(("axis", "captured"), [("data", True), ("context", False), ("replicate", True)])
def test_a_psum_over_the_batch_is_refused_and_what_is_right_is_plain_torch(ranks, axis, captured):
    for found, penalized in ranks(2, gradients, axis, captured):
        for extra, cases in ((0.0, found), (1.0, [penalized])):
            plain = build()
            loss = plain(X).square().mean() + extra * plain[0].weight.square().sum()
            loss.backward()
            expected = {name: (p - 0.1 * p.grad).detach() for name, p in plain.named_parameters()}
            for its_loss, params in cases:
                torch.testing.assert_close((its_loss, dict(params)), (loss.detach(), expected))
