"""`accumulate(reduce="round")`: as many microbatches as a pipeline has ranks are added up before ranks add theirs."""

import functools

import pytest
import torch

import zerofn
from tests.support.pipe_steps import batches as batches_of
from tests.support.pipe_steps import both, loss_fn, params
from zerofn import optim


def plain(num_microbatches, every, num_ranks):
    """By torch alone, with sums in that order: of a round, of ranks, of rounds."""
    leaves = {k: x.requires_grad_() for k, x in params().items()}
    update = torch.optim.SGD(leaves.values(), lr=0.1)
    add = functools.partial(functools.reduce, torch.add)
    for batch in batches_of():
        found = []
        for rank in range(num_ranks):
            parts = [x.chunk(num_ranks)[rank].chunk(num_microbatches) for x in (batch["ids"], batch["labels"])]
            losses = [loss_fn(leaves, {"ids": x, "labels": y}) for x, y in zip(*parts, strict=True)]
            seed = torch.tensor(1 / (num_ranks * num_microbatches), dtype=torch.float64)
            found.append([torch.autograd.grad(x, list(leaves.values()), seed) for x in losses])
        for i, x in enumerate(leaves.values()):
            rounds = range(0, num_microbatches, every)
            x.grad = add([add([add([g[i] for g in mine[k : k + every]]) for mine in found]) for k in rounds])
        update.step()
    return {k: x.detach() for k, x in leaves.items()}


def in_rounds(num_microbatches, stage, schedule, **sizes):
    return both(schedule, num_microbatches, stage, tx=optim.sgd(0.1), reduce="round", **sizes)


CASES = [
    ({"data": 2}, 3, 2, "1f1b"),
    pytest.param({}, 3, 0, "1f1b", marks=pytest.mark.whole),
    pytest.param({"data": 2}, 6, 3, "zb-h1", marks=pytest.mark.whole),
    pytest.param({"data": 2}, 2, 1, "gpipe", marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("sizes", "num_microbatches", "stage", "schedule"), CASES, ids=str)
def test_a_round_is_summed_before_ranks_add_it(ranks, sizes, num_microbatches, stage, schedule):
    found = ranks(2 * sizes.get("data", 1), functools.partial(in_rounds, **sizes), num_microbatches, stage, schedule)
    expected = plain(num_microbatches, 2, sizes.get("data", 1))
    for cut, whole in found:
        assert cut[0] == whole[0]
        for key, x in expected.items():
            assert torch.equal(cut[1][f"params.{key}"], x) and torch.equal(whole[1][f"params.{key}"], x), key


def without_pipe(reduce):
    net = torch.nn.Linear(3, 3)
    params = {k: torch.ones_like(x) for k, x in net.named_parameters()}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=1)
    loss_fn = lambda params, x: torch.func.functional_call(net, params, (x,)).square().mean()  # noqa: E731
    step = lambda state, x: zerofn.accumulate(state.value_and_grad(loss_fn), 3, reduce=reduce)(x)  # noqa: E731
    return zerofn.compile(step).lower(state, torch.ones(6, 3)).text()


def test_without_pipe_a_round_is_a_microbatch():
    assert without_pipe("round") == without_pipe("microbatch")
