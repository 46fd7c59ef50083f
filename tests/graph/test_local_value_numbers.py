"""Ranks compute the same of their rows, or are refused; which rows each takes is its own business."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zerofn
from tests.capture.test_between_ranks import Net, X
from tests.support.small_steps import fake_ranks, step_with
from zerofn import optim
from zerofn.capture.between_ranks import NumberedStep
from zerofn.capture.checked_capture import captured

F = nn.functional


def outputs(params, x, r=0, **flags):
    """What the network makes of rows, with dropout and a buffer."""
    options = SimpleNamespace(**{"p": 0.25, "train": True, "shift": torch.zeros(8), "act": torch.relu} | flags)
    up = options.act(F.linear(x, params["up.weight"], params["up.bias"]))
    dropped = F.dropout(up, options.p, options.train)
    return F.linear(dropped, params["down.weight"], params["down.bias"]) + options.shift


# (params, rows, the rank) -> the loss; and what an error names, on each rank.
REFUSED = {
    "a dropout rate": (lambda p, x, r: outputs(p, x, p=0.25 * (1 + r)).mean(), "bernoulli"),
    "an activation": (lambda p, x, r: outputs(p, x, act=(torch.relu, torch.sigmoid)[r]).mean(), ("relu", "sigmoid")),
    "a buffer": (lambda p, x, r: outputs(p, x, shift=torch.full((8,), 1.0 + r)).mean(), ("[8], 1.0", "[8], 2.0")),
    "train and eval": (lambda p, x, r: outputs(p, x, train=r == 0).mean(), ""),
    "a factor": (lambda p, x, r: outputs(p, x).mean() * (0.5 + r), ("(x, 0.5)", "(x, 1.5)")),
    "a whole factor": (lambda p, x, r: outputs(p, x).mean() / (2 + r), ("(x, 2)", "(x, 3)")),
    "a branch": (lambda p, x, r: outputs(p, x).abs().mean() if r else outputs(p, x).exp().mean(), ("exp", "abs")),
    "a sum, not a mean": (lambda p, x, r: outputs(p, x).sum() if r else outputs(p, x).mean(), ("mean", "sum")),
    "a mean of the data": (lambda p, x, r: outputs(p, x - torch.full((8,), 0.5 + r)).mean(), ("[8], 0.5", "[8], 1.5")),
    "a whole constant": (lambda p, x, r: outputs(p, x).mean() * torch.tensor(1 + r), ""),
    "a whole filled constant": (lambda p, x, r: outputs(p, x).mean() * torch.full((), 1 + r), ""),
    "weights of whole numbers": (lambda p, x, r: (outputs(p, x) * torch.tensor([1] * 7 + [1 + r])).mean(), ""),
    "a dtype": (lambda p, x, r: outputs(p, x).to((torch.float32, torch.bfloat16)[r]).float().mean(), "aten."),
    "a number of groups": (lambda p, x, r: outputs(p, x).view(-1, 2 + 2 * r).amax(1).mean(), "aten.view"),
}
ACCEPTED = {
    "the same": lambda p, x, r: outputs(p, x).mean(),
    "its rows": lambda p, x, r: outputs(p, x[2 * r : 2 * r + 2]).mean(),
    "every second row": lambda p, x, r: outputs(p, x[r::2]).mean(),
    "one row": lambda p, x, r: outputs(p, x[r][None]).mean(),
    "a part": lambda p, x, r: outputs(p, x.chunk(2)[r]).mean(),
    "rows of a list": lambda p, x, r: outputs(p, x[torch.tensor([r, 3 - r])]).mean(),
    "rolled": lambda p, x, r: outputs(p, x.roll(r, 0)).mean(),
    "rows of the outputs": lambda p, x, r: outputs(p, x)[2 * r : 2 * r + 2].square().mean(),
    "indices of its own": lambda p, x, r: outputs(p, x.index_select(0, (torch.arange(2) + 2) % (3 + r))).mean(),
    "labels of its own": lambda p, x, r: F.cross_entropy(outputs(p, x), torch.arange(4) + r),
    "a mask of its own": lambda p, x, r: (outputs(p, x) * (torch.arange(8) == torch.arange(4)[:, None] + r)).mean(),
    "a mask by a number": lambda p, x, r: (outputs(p, x).mean(1) * (torch.arange(4) % 2 == r)).mean(),
    "chosen by a mask": lambda p, x, r: torch.where(torch.arange(4) // 2 == r, outputs(p, x).mean(1), 0.0).mean(),
    "a part of the outputs": lambda p, x, r: outputs(p, x).chunk(2)[r].square().mean(),
    "one of the outputs": lambda p, x, r: outputs(p, x).unbind()[r].square().mean(),
    "a part of the rest of the outputs": lambda p, x, r: outputs(p, x)[2 * r :][:2].square().mean(),
    "its own among those of others": lambda p, x, r: among(outputs(p, x), r).square().mean(),
    "a diagonal": lambda p, x, r: outputs(p, x).diagonal(2 * r)[:2].square().mean(),
    "a region": lambda p, x, r: zerofn.eager_region(torch.square, like=torch.empty_like)(outputs(p, x)).mean(),
    "noise of its own": lambda p, x, r: noisy(p, x, r),
}


def among(own, r):
    everyone = list(own.detach().sin().chunk(2))
    everyone[r] = own[:2]
    return torch.cat(everyone)


def noisy(params, x, r):
    with zerofn.random.randomness(zerofn.random.key(r)):
        return outputs(params, x).mean()


def differences(loss_of, axis="data", batches=(X, X), more=lambda state, loss, r: loss, n=1):
    """What two ranks say of a step, each captured as its rank does."""
    steps = []
    for rank in range(2):

        def step(state, batch, rank=rank):
            vg = state.value_and_grad(lambda p, b: loss_of(p, b, rank))
            loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
            return state.apply_gradients(grads), more(state, loss, rank)

        with fake_ranks(2, rank):
            torch.manual_seed(0)
            state = zerofn.TrainState.create(params=dict(Net().named_parameters()), tx=optim.sgd(0.1))
            state = zerofn.shard(state, mesh=zerofn.Mesh.make(**{axis: 2}))
            steps.append(NumberedStep(captured(step, state, batches[rank], traces=True)[0]))
    common = {axis: set.intersection(*(step.of_rows()[axis] for step in steps))}
    return [step.difference({}, common) for step in steps]


@pytest.mark.part(axis=["replicate"])
@pytest.mark.part(name=["a dropout rate", "train and eval", "a whole constant"])
@pytest.mark.parametrize(("axis", "name"), [("replicate", "a whole factor"), *(("data", name) for name in REFUSED)])
def test_another_computation_of_the_own_rows_is_named_on_every_rank(name, axis):
    loss_of, words = REFUSED[name]
    for rank, sentence in enumerate(differences(loss_of, axis)):
        assert (
            f"ranks along '{axis}' must run the same operations, each on its own part, but they differ: this rank has"
        ) in sentence
        assert (words if isinstance(words, str) else words[rank]) in sentence
        assert f" at {__file__}:" in sentence or name == "train and eval"


@pytest.mark.part(name=["the same", "one row", "chosen by a mask", "noise of its own"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_ranks_take_which_rows_they_want(name):
    assert differences(ACCEPTED[name]) == ["", ""]


@pytest.mark.whole
def test_a_loop_over_microbatches_is_followed():
    assert all("bernoulli" in x for x in differences(REFUSED["a dropout rate"][0], n=2))
    assert differences(ACCEPTED["the same"], n=2) == ["", ""]
    assert differences(ACCEPTED["the same"], more=lambda s, loss, r: loss * (1.5 + r), n=2) == ["", ""]


def test_entries_of_a_batch_count_as_one():
    def its_entry(p, batch, r):
        return outputs(p, batch[r]).mean()

    assert differences(its_entry, batches=((X, X + 1),) * 2) == ["", ""]


HYBRID = {
    "a number of its own": lambda p, x, r: outputs(p, x).square().sum() / (10 + r),
    "a count of its own": lambda p, x, r: (outputs(p, x).square().sum(), 10 + r),
    "noise of its own": ACCEPTED["noise of its own"],
    "labels of its own": ACCEPTED["labels of its own"],
}


@pytest.mark.part(name=["noise of its own"])
@pytest.mark.parametrize("name", HYBRID)
def test_shards_of_gradients_may_differ_along_replicate_until_they_are_summed(name):
    steps = []
    for rank in range(4):

        def step(state, batch, rank=rank):
            loss, grads = state.value_and_grad(lambda p, b: HYBRID[name](p, b, rank))(batch)
            return state.apply_gradients(grads), loss

        with fake_ranks(4, rank):
            mesh = zerofn.Mesh.make(replicate=2, data=2)
            state = zerofn.TrainState.create(params=dict(Net().named_parameters()), tx=optim.sgd(0.1))
            steps.append((NumberedStep(captured(step, zerofn.shard(state, mesh=mesh), X)[0]), mesh))
    for step, mesh in steps:
        told = {axis: [steps[k][0].told()[axis] for k in mesh.along(axis)] for axis in ("data", "replicate")}
        assert step.difference({axis: set.intersection(*each) for axis, each in told.items()}, {}) == ""


def test_what_is_only_reported_may_differ():
    def report(state, loss, r):
        return {"loss": loss} if r else {"loss": loss, "more": loss.square() * 0.5}

    assert differences(ACCEPTED["the same"], more=report) == ["", ""]


def test_an_evaluation_and_one_rank_have_no_numbers():
    step = step_with(lambda p, x: outputs(p, x).mean())

    def made():
        return zerofn.shard(zerofn.TrainState.create(params=dict(Net().named_parameters()), tx=optim.sgd(0.1)))

    assert NumberedStep(captured(step, made(), X)[0]).of_rows() == {}
    with fake_ranks(2):
        evaluate = lambda state, x: zerofn.gather(state.params)["up.bias"].sum() * x.mean()  # noqa: E731
        assert NumberedStep(captured(evaluate, made(), X)[0]).of_rows() == {}
        assert NumberedStep(captured(step, made(), X)[0]).of_rows()["data"]
