"""Cut layers of one module: one sum of the gradients of what they share, and draws for slices between them."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn.comm.mesh import Mesh
from zerofn.parallel import tensor


class Gated(nn.Module):
    """Two layers take x, and a third takes another tensor."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.other = (nn.Linear(6, 8) for _ in range(3))
        self.down, self.dropout = nn.Linear(8, 6), nn.Dropout(0.5)

    def forward(self, x):
        inner = torch.tanh(self.gate(x)) * self.up(x) + self.other(x.sin())
        self.inside = self.dropout(torch.ones_like(inner))
        y = self.down(inner)
        self.behind = self.dropout(torch.ones_like(y))
        return y * self.behind.detach()


def gated():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Gated()).double()


PLAN = {"1.gate": "colwise", "1.up": "colwise", "1.other": "colwise", "1.down": "rowwise"}
X = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)


def of_slices(evaluating):
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(gated).train(not evaluating)
    params = zerofn.shard(
        {"params": dict(gated().named_parameters())}, mesh=mesh, cuts=tensor(model, mesh, PLAN), stage=0
    )["params"]

    def loss_fn(params, x):
        return functional_call(model, params, (x,)).pow(3).mean()

    rng = None if evaluating else zerofn.random.key(3)
    loss, grads = zerofn.value_and_grad(loss_fn, rng=rng)(params, X)

    drawn = model[1].inside, model[1].behind

    def step(params, x):
        return zerofn.value_and_grad(loss_fn)(params, x)

    sent = None if rng is not None else zerofn.compile(step).lower(params, X).sent_along["tensor"]
    return loss, zerofn.unshard(grads), *drawn, sent


def test_layers_send_one_sum_for_each_tensor_that_they_take(ranks):
    model = gated().eval()
    model(X).pow(3).mean().backward()
    for _, grads, _, _, sent in ranks(2, of_slices, True):
        for name, x in model.named_parameters():
            torch.testing.assert_close(grads[name], x.grad, rtol=1e-12, atol=1e-14)
        # y, and the gradients of x and of x.sin(): each half to be summed, and half of the sum
        assert 3 * X.nbytes <= sent < 4 * X.nbytes


def test_ranks_draw_for_slices_each_their_own_and_for_sums_alike(ranks):
    found = ranks(3, of_slices, False)
    inside, behind = [x[2] for x in found], [x[3] for x in found]
    assert all(torch.equal(behind[0], x) for x in behind)
    assert not any(torch.equal(a[:, :2], b[:, :2]) for a, b in zip(inside, inside[1:], strict=False))


def in_other_transforms():
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(gated).eval()
    params = zerofn.shard(
        {"params": dict(gated().named_parameters())}, mesh=mesh, cuts=tensor(model, mesh, PLAN), stage=0
    )["params"]

    def loss(x):
        return functional_call(model, zerofn.gather(params), (x,)).pow(3).mean()

    grad = torch.func.grad(loss)
    return torch.func.jvp(grad, (X,), (torch.ones_like(X),))[1], torch.func.vmap(grad)(torch.stack([X, X + 1]))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_result_is_used_again_only_in_the_transform_that_made_it(ranks, num_ranks):
    model = gated().eval()

    def loss(x):
        return functional_call(model, {k: v.detach() for k, v in model.named_parameters()}, (x,)).pow(3).mean()

    grad = torch.func.grad(loss)
    product = torch.func.jvp(grad, (X,), (torch.ones_like(X),))[1]
    for found, rows in ranks(num_ranks, in_other_transforms):
        torch.testing.assert_close(found, product, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(rows, torch.stack([grad(X), grad(X + 1)]), rtol=1e-12, atol=1e-14)
