"""Loaders of different lengths: all ranks stop together, or the short ones go on with weight 0."""

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of
from zerofn import collectives, optim

MODULE = build(2)


def weighted(params, batch):
    """The mean over all rows of all ranks: a rank's share of it, times the number of ranks."""
    loss = loss_of(MODULE)(params, {k: batch[k] for k in "xy"}) * batch["weight"]
    return loss / collectives.all_reduce(batch["weight"]) * dist.get_world_size()


def weighted_step(state, batch):
    loss, grads = state.value_and_grad(weighted)(batch)
    return state.apply_gradients(grads), loss


def rows(rank, k):
    return batch_of(rank, seed=10 * rank + k)


def trained_by_sgd(pad, lengths):
    rank = dist.get_rank()
    state, step, num = state_of(MODULE, 3, optim.sgd(0.1)), zerofn.compile(weighted_step), 0
    for batch in zerofn.even((rows(rank, k) for k in range(lengths[rank])), pad=pad):
        given = batch if pad else {**batch, "weight": torch.ones(())}
        state, _ = step(state, given)
        num += 1
    return zerofn.unshard(state.params), num


def plain(pad, lengths):
    params = {k: p.detach().clone().requires_grad_() for k, p in MODULE.named_parameters()}
    for k in range(max(lengths) if pad else min(lengths)):
        here = [rows(rank, k) for rank, n in enumerate(lengths) if k < n]
        loss = sum(loss_of(MODULE)(params, batch) for batch in here) / len(here)
        grads = torch.autograd.grad(loss, list(params.values()))
        for p, g in zip(params.values(), grads, strict=True):
            p.data -= 0.1 * g
    return params


@pytest.mark.part(lengths=[(3, 2)], pad=[None])
@pytest.mark.part(lengths=[(2, 4, 3)], pad=["weight"])
@pytest.mark.parametrize("pad", [None, "weight"])
@pytest.mark.parametrize("lengths", [(3, 2), (2, 4, 3)])
def test_ranks_take_the_same_number_of_steps(ranks, lengths, pad):
    expected = plain(pad, lengths)
    for params, num in ranks(len(lengths), trained_by_sgd, pad, lengths):
        assert num == (max if pad else min)(lengths)
        for name, p in params.items():
            torch.testing.assert_close(p, expected[name].detach(), rtol=1e-5, atol=1e-6)


def failing(where):
    def loader():
        yield 1
        if dist.get_rank() == 1:
            raise OSError("the file is gone")
        yield 2

    with pytest.raises((OSError, RuntimeError)) as caught:
        list(zerofn.even(loader()))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_loader_that_fails_stops_all(ranks):
    first, second = ranks(2, failing, None)
    assert first == (
        "RuntimeError: zerofn.even: stopped, because the loader of rank 1 failed. That rank's own error says why."
    )
    assert second == "OSError: the file is gone"


def test_one_process_gets_its_own_batches():
    assert list(zerofn.even([1, 2])) == [1, 2] and list(zerofn.even([])) == []
    assert [x["w"] for x in zerofn.even([{"a": 1}], pad="w")] == [1.0]
    with pytest.raises(TypeError, match="with pad='w', a batch must be a mapping, such as a dict; got int"):
        list(zerofn.even([1], pad="w"))
    with pytest.raises(ValueError, match="already has an entry 'w'"):
        list(zerofn.even([{"w": 1}], pad="w"))
    with pytest.raises(ValueError, match="the loader has no batches"):
        list(zerofn.even([], pad="w"))
