"""What ranks compute in ways of their own is refused where it makes whole leaves go apart, and accepted elsewhere."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import fake_ranks
from zerofn import collectives, optim, tree
from zerofn.capture.between_ranks import NumberedStep
from zerofn.capture.capture import CaptureError
from zerofn.capture.checked_capture import captured
from zerofn.geometry.cuts import equal
from zerofn.util.errors import said

ROWS, WIDTH = 4, 8
psum, vary = collectives.psum, collectives.vary


class Net(nn.Module):
    """Two cut layers, a residual stream, and a norm whose leaves are whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def build():
    torch.manual_seed(0)
    return Net()


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def each_line(y, r, axis):
    """Half of the rows on each rank, and their sum."""
    return psum(vary(y, axis)[2 * r : 2 * r + 2].square().sum(), axis) / y.numel()


# (outputs, the number of the rank, the axis) -> the loss; and the operation that an error names.
REFUSED = {
    "a row": (lambda y, r, a: y[r].square().mean(), "select.int(x, 0, {r})"),
    "a part": (lambda y, r, a: y.chunk(2)[r].square().mean(), "ranks differ"),
    "a slice and a sum without vary": (lambda y, r, a: psum(y[2 * r : 2 * r + 2].square().sum(), a), "aten.slice"),
    "split, narrow": (lambda y, r, a: y.narrow(0, r, 2).square().mean(), "aten.slice"),
    "sizes of a split": (lambda y, r, a: y.split([1 + r, 3 - r])[0].square().sum(), "aten.split_with_sizes"),
    "rolled": (lambda y, r, a: (y.roll(r, 0) * X).square().mean(), "aten.roll(x, [{r}], [0])"),
    "a list of indices": (lambda y, r, a: y[[r, 2]].square().mean(), "constant"),
    "positions": (lambda y, r, a: (y * torch.arange(r, r + WIDTH)).square().mean(), "aten.arange.start"),
    "a dim": (lambda y, r, a: y.square().mean(r).sum(), "aten.mean.dim(x, [{r}])"),
    "an order of dims": (lambda y, r, a: (y[:, :4].permute(r, 1 - r) @ X[:, :4]).mean(), "aten.permute"),
    "a bound": (lambda y, r, a: y.clamp(max=r).mean(), "aten.clamp"),
    "what is filled in": (lambda y, r, a: y.masked_fill(y > 0, r).square().mean(), "masked_fill"),
    "padding": (lambda y, r, a: (nn.functional.pad(y, (r, 1 - r)) ** 2 * torch.arange(9)).mean(), "pad"),
    "how often": (lambda y, r, a: (y.repeat(r + 1, 1)).sum(), "aten.repeat"),
    "eps": (lambda y, r, a: nn.functional.layer_norm(y, (WIDTH,), eps=1e-5 + r).square().mean(), "native_layer_norm"),
    "a size": (lambda y, r, a: y.sum() * torch.ones(r + 1).sum(), "ones"),
    "a power": (lambda y, r, a: y.pow(2 + 2 * r).mean(), "aten.pow"),
    "a number of classes": (
        lambda y, r, a: y.sum() * nn.functional.one_hot(torch.tensor([0]), 2 + r).numel(),
        "aten.mul",
    ),
    "another branch": (lambda y, r, a: y.square().mean() if r else y.abs().mean(), "ranks differ"),
    "written in place": (lambda y, r, a: y.clone().index_fill_(0, torch.tensor([r]), 0.0).square().mean(), "constant"),
    "how much is dropped": (lambda y, r, a: nn.functional.dropout(y, 0.1 * (1 + r)).square().mean(), "bernoulli"),
    "how far it is repeated": (lambda y, r, a: y[:1].expand(1 + r, -1).sum(), "aten.expand"),
    "a flipped dim": (lambda y, r, a: (y[:, :4].flip(r) * X[:, :4]).sum(), "aten.flip"),
    "where to start": (lambda y, r, a: (y.diagonal(r)).sum(), "aten.diagonal"),
    "its part of two": (lambda y, r, a: (y[:2].mean(), y[2:].square().mean())[r], "aten."),
    "a sum of what is the same": (lambda y, r, a: psum(y.square().mean(), a) / 2, "psum over 'tensor'"),
    "all_reduce for psum": (
        lambda y, r, a: collectives.all_reduce(vary(y, a)[2 * r : 2 * r + 2].square().sum(), a),
        "Write psum(x, 'tensor')",
    ),
}
# One of each way to differ: in numbers, lists, factories, operations, constants, drawn numbers and sums.
SOME = ["a bound", "positions", "how much is dropped", "another branch"]
SOME += ["a sum of what is the same", "all_reduce for psum"]
ACCEPTED = {
    "the same on all": lambda y, r, a: y.square().mean(),
    "each its rows, varied and summed": each_line,
    "a sum for each rank's use": lambda y, r, a: psum(vary(y.square().mean(1), a)[r] * (1 + r), a),
}


def outputs(model, params, batch):
    return functional_call(model, {name: x for name, x in params.items() if name != "more"}, (batch,))


def step_of(model, loss_of, rank):
    def step(state, batch):
        loss, grads = state.value_and_grad(lambda p, b: loss_of(outputs(model, p, b), rank, "tensor"))(batch)
        return state.apply_gradients(grads), loss

    return step


def sharded(**sizes):
    """A skeleton, cut where the mesh has `tensor`, and its state."""
    mesh, model = zerofn.Mesh.make(**sizes), zerofn.skeleton(build)
    params = dict(build().named_parameters())
    if "tensor" in sizes:
        cuts = zerofn.parallel.tensor(model, mesh, {"up": "colwise", "down": "rowwise"})
    else:  # a leaf that nobody uses
        params["more"] = torch.zeros(2, WIDTH)
        cuts = {"more": equal("expert", 0, 2, 2)} if "expert" in sizes else None
    make = lambda: zerofn.TrainState.create(params=params, tx=optim.sgd(0.1), extra=torch.tensor([0.5, 0.25]))  # noqa: E731
    return mesh, model, zerofn.shard(make, mesh=mesh, cuts=cuts)


def told(loss_of):
    """What each of two ranks along `tensor` says of its step."""
    steps = []
    for rank in range(2):
        with fake_ranks(2, rank):
            _, model, state = sharded(tensor=2)
            steps.append(NumberedStep(captured(step_of(model, loss_of, rank), state, X, traces=True)[0]))
    common = {"tensor": set.intersection(*(step.told()["tensor"] for step in steps))}
    return [step.difference(common, {}) for step in steps]


@pytest.mark.part(name=SOME)
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_no_tensors_may_not_differ(name):
    loss_of, named = REFUSED[name]
    for rank, sentence in enumerate(told(loss_of)):
        assert sentence, f"rank {rank} accepts it"
        assert named == "ranks differ" or named.format(r=rank) in sentence
        assert f" at {__file__}:" in sentence


def test_a_rank_alone_sees_that_what_varies_is_not_summed():
    with pytest.raises(CaptureError, match="the loss differs along 'tensor': .* without a sum over ranks"):
        told(lambda y, r, a: vary(y, a)[r].square().mean())


@pytest.mark.part(name=["each its rows, varied and summed", "a sum for each rank's use"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_the_same_or_summed_is_accepted(name):
    assert told(ACCEPTED[name]) == ["", ""]


def on_a_mesh(sizes, rank_along):
    """The errors of steps that ranks along an axis compute differently, and what an accepted step makes of the norm."""
    mesh, model, state = sharded(**sizes)
    r = mesh.axis(rank_along).rank
    mine = X if "tensor" in sizes else X.chunk(2)[r]

    def by_table(state, batch):
        loss, grads = state.value_and_grad(lambda p, b: outputs(model, p, b).square().mean())(batch)
        return state.apply_gradients(tree.tree_map(lambda g: g * state.extra[r], grads)), loss

    def new_extra(state, batch):
        return state.replace(extra=state.extra.roll(r)), batch.sum()

    wrong = [by_table, new_extra]
    if rank_along == "tensor":
        wrong += [step_of(model, REFUSED[name][0], r) for name in ("a row", "a slice and a sum without vary")]
    before, found = zerofn.unshard(state), []
    for step in wrong:
        with pytest.raises(CaptureError, match=f"(?s)ranks differ.*all ranks along '{rank_along}'") as caught:
            zerofn.compile(step)(state, mine)
        found.append(said(caught.value))
    assert_same_trees(zerofn.unshard(state), before)
    right = each_line if rank_along == "tensor" else ACCEPTED["the same on all"]
    state, loss = zerofn.compile(step_of(model, right, r))(state, mine)
    after = zerofn.unshard(state).params
    return found, loss, {name: after[name] for name, _ in build().named_parameters()}


@pytest.mark.part(num_ranks=[2], axis=["replicate"])
@pytest.mark.parametrize(
    ("num_ranks", "sizes", "axis"),
    [
        (2, {"tensor": 2}, "tensor"),
        (4, {"data": 2, "tensor": 2}, "tensor"),
        (4, {"data": 2, "tensor": 2}, "data"),
        (2, {"expert": 2}, "expert"),
        (2, {"context": 2}, "context"),
        (2, {"replicate": 2}, "replicate"),
    ],
)
def test_ranks_of_every_axis_are_told_and_the_rest_is_plain_torch(ranks, num_ranks, sizes, axis):
    plain = build()
    loss = plain(X).square().mean()
    loss.backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in plain.named_parameters()}
    for messages, its_loss, params in ranks(num_ranks, on_a_mesh, sizes, axis):
        torch.testing.assert_close((its_loss, params), (loss.detach(), expected))
        assert all(f" at {__file__}:" in message for message in messages)
        assert (
            "rank 0: a value that is combined with the state" in messages[0]
            and "aten.select.int(x, 0, 1)" in messages[0]
        )
        assert "state entry 'extra'" in messages[1]
