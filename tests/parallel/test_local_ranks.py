"""Ranks that run one after the other in one process."""

import pytest
import torch

from zerofn.collectives.maps import AllGather, Concat, Exchange, Linear, Permute, Psum, ReduceScatter
from zerofn.parallel.local_ranks import mesh_of, on_ranks

X = torch.arange(12.0, dtype=torch.float64).view(3, 4)  # a row for each rank


def moved(rank, make):
    axis = mesh_of("tensor", 3, rank).axis("tensor")
    x = X[rank].clone().requires_grad_()
    (y,) = Linear.apply(make(axis), x)
    (grad,) = torch.autograd.grad((y * (rank + 1)).sum(), x)
    return y.detach(), grad


def test_transfers_and_their_gradients_are_those_of_ranks():
    gathered, whole = on_ranks(3, lambda r: moved(r, AllGather)), X.flatten()
    for r, (y, grad) in enumerate(gathered):
        assert torch.equal(y, whole) and torch.equal(grad, torch.full((4,), 6.0)), r
    for r, (y, grad) in enumerate(on_ranks(3, lambda r: moved(r, Psum))):
        assert torch.equal(y, X.sum(0)) and torch.equal(grad, torch.full((4,), r + 1.0)), r
    for r, (y, _) in enumerate(on_ranks(3, lambda r: moved(r, lambda axis: Permute(axis, (1, 2, 0))))):
        assert torch.equal(y, X[(r + 1) % 3]), r
    parts = on_ranks(3, lambda r: moved(r, lambda axis: Concat(axis, (4, 4, 4))))
    assert all(torch.equal(y, whole) for y, _ in parts)


def of_nine(rank):
    axis = mesh_of("tensor", 3, rank).axis("tensor")
    x = torch.arange(9.0) + 10 * rank
    return Linear.apply(ReduceScatter(axis), x)[0], Linear.apply(Exchange(axis), x.view(3, 3))[0]


def test_each_rank_gets_its_row_of_all():
    rows = torch.stack([torch.arange(9.0).view(3, 3) + 10 * r for r in range(3)])
    for r, (total, exchanged) in enumerate(on_ranks(3, of_nine)):
        assert torch.equal(total, rows[:, r].sum(0)) and torch.equal(exchanged, rows[:, r])


def test_the_error_of_one_rank_is_that_of_all():
    def call(rank):
        if rank == 1:
            raise ValueError("rank 1")
        return Linear.apply(Psum(mesh_of("tensor", 2, rank).axis("tensor")), torch.ones(2))

    with pytest.raises(ValueError, match="rank 1"):
        on_ranks(2, call)


def in_turn(rank, order):
    axis = mesh_of("tensor", 2, rank).axis("tensor")
    for kind in order[rank]:
        Linear.apply(kind(axis), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (([Exchange, Psum], [Psum, Exchange]), "call different collectives: zerofn.exchange.* and zerofn.reduce_scatt"),
        (([Psum], []), "wait for a collective that others do not call"),
    ],
)
def test_ranks_that_call_different_collectives_raise(order, message):
    with pytest.raises(RuntimeError, match=message):
        on_ranks(2, lambda rank: in_turn(rank, order))


def test_runs_repeat_their_draws():
    def call(rank):
        x = torch.rand(2)
        return x, Linear.apply(Psum(mesh_of("tensor", 2, rank).axis("tensor")), x)[0]

    before = torch.get_rng_state()
    for x, total in on_ranks(2, call):
        assert torch.equal(total, 2 * x)
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_of_the_caller_do_not_reach_ranks():
    with torch.no_grad(), torch.device("meta"):
        (x,) = on_ranks(1, lambda _: torch.ones(2, requires_grad=True) * 2)
    assert x.device.type == "cpu" and x.requires_grad
