"""Numbers that differ from rank to rank: equal ones pass, others are told on every rank, and the state stays."""

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with
from zerofn import optim, tree
from zerofn.ops.same import RanksDiffer
from zerofn.util.errors import said

MODULE = build(2)


def by_number(state, batch):
    """Gradients times a number of the batch."""
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    return state.apply_gradients(tree.tree_map(lambda g: g * batch["n"], grads)), loss


def declared_late(state, batch):
    """An update inside the backward pass, and a check after it, which nobody reads."""
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    new = state.apply_gradients(grads, on_nonfinite="ignore")
    zerofn.same(batch["n"])
    return new, loss


def with_number(n, seed=1):
    return {**batch_of(dist.get_rank(), seed=seed), "n": torch.tensor(n)}


def three_steps(step, stage, folder):
    """Two steps with equal numbers, each before one that fails, beside eager steps with the equal ones."""
    options = {"offload": zerofn.Offload(optimizer="nvme", path=folder)} if folder else {}
    state, eager = state_of(MODULE, stage, **options), state_of(MODULE, stage)
    run = zerofn.compile(step)
    for seed in (1, 2):
        state, _ = run(state, with_number(0.5, seed))
        eager, _ = step(eager, with_number(0.5, seed))
        what = "must be the same on all ranks.*rank 0 has 0.5, rank 1 has 1.5.*The state is as it was"
        with pytest.raises(RanksDiffer, match=what):
            run(state, with_number(0.5 + dist.get_rank(), seed))
    assert_same_trees(zerofn.unshard(state), zerofn.unshard(eager))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("step", [by_number, declared_late])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_number_that_differs_raises_on_all_ranks_and_changes_nothing(ranks, stage, step):
    ranks(2, three_steps, step, stage, None)


@pytest.mark.parametrize("step", [by_number, declared_late])
def test_nor_does_it_change_state_on_a_drive(ranks, step, tmp_path):
    ranks(2, three_steps, step, 3, tmp_path)


def rate(state, batch):
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    return state.apply_gradients(tree.tree_map(lambda g: g * (0.5 + dist.get_rank()), grads)), loss


def closed_over(state, batch):
    table = torch.tensor([1.0, 2.0 + dist.get_rank()])
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    return state.apply_gradients(tree.tree_map(lambda g: g * table.sum(), grads)), loss


def in_extra(state, batch):
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    return state.apply_gradients(grads, extra=state.extra * 0.9 + 0.1 * dist.get_rank()), loss


def from_batch(state, batch):
    return by_number(state, {**batch, "n": 0.5 + dist.get_rank()})


def other_optimizers(stage):
    state = state_of(MODULE, stage, optim.sgd(optim.cosine_decay_schedule(0.1 * (1 + dist.get_rank()), 10)))
    return raised(lambda s, b: by_number(s, {**b, "n": 1.0}), state)


def raised(step, state):
    before = zerofn.unshard(state)
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        zerofn.compile(step)(state, batch_of(dist.get_rank()))
    assert_same_trees(zerofn.unshard(state), before)
    return said(caught.value)


def lacks_a_key():
    batch = batch_of(dist.get_rank())
    if dist.get_rank() == 0:
        batch["mask"] = torch.ones(2)
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        zerofn.compile(by_number)(state_of(MODULE, 3), {**batch, "n": 1.0})
    return said(caught.value)


def test_a_batch_that_lacks_a_key_on_one_rank_is_told_by_the_key(ranks):
    for sentence in ranks(2, lacks_a_key):
        assert "rank 0: batch.mask: " in sentence and "rank 1: no entry of that name" in sentence


def smoothed():
    """Rank 0 smooths no labels, so what it computes otherwise comes from the loss alone."""

    def loss_fn(params, batch):
        labels = torch.zeros(len(batch["x"]), dtype=torch.int64)
        logits = functional_call(MODULE, params, (batch["x"],))
        return cross_entropy(logits, labels, label_smoothing=0.1 * dist.get_rank())

    step = step_with(loss_fn)

    return raised(step, state_of(MODULE, 3))


def test_a_loss_that_differs_is_told_by_its_own_line(ranks):
    for sentence in ranks(2, smoothed):
        assert "label_smoothing=0.1" in sentence and "value_and_grad(loss_fn)" not in sentence


def other_dtypes():
    batch = {
        **batch_of(dist.get_rank()),
        "n": 1.0,
        "mask": torch.ones(2, dtype=(torch.int32, torch.int64)[dist.get_rank()]),
    }
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        zerofn.compile(by_number)(state_of(MODULE, 3), batch)
    return said(caught.value)


def test_a_batch_of_another_dtype_on_one_rank_is_told_so(ranks):
    for sentence in ranks(2, other_dtypes):
        assert "batch.mask: [*] int32" in sentence and "must have the same dtypes: write x.to(dtype)" in sentence


def constants(step, stage):
    return raised(step, state_of(MODULE, stage, extra=torch.zeros(())))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("step", "told"),
    [
        (rate, ("aten.mul.Tensor(x, 0.5)", "aten.mul.Tensor(x, 1.5)")),
        (closed_over, ("[2] float32 (checksum", "rank 1: a value that is combined with the state")),
        (in_extra, ("aten.add.Tensor(x, 0.0)", "aten.add.Tensor(x, 0.1)")),
        (from_batch, ("aten.mul.Tensor(x, 0.5)", "aten.mul.Tensor(x, 1.5)")),
    ],
)
def test_a_constant_that_meets_the_state_is_the_same_on_all_ranks(ranks, step, told, stage):
    for message in ranks(2, constants, step, stage):
        assert all(x in message for x in told), message
        assert "must be the same on all ranks" in message
        assert f") at {__file__}:" in message


def test_another_optimizer_on_one_rank_is_told(ranks):
    for message in ranks(2, other_optimizers, 3):
        assert (
            "cosine_decay_schedule(init_value=0.1, decay_steps=10" in message
            and "cosine_decay_schedule(init_value=0.2, decay_steps=10" in message
        )


def free(stage):
    """Its own numbers in the loss, aux and what is scattered; its own Python number in the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor(1.0 + rank)

    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch) * (1 + rank) * mine * batch["k"], mine

    def step(state, batch):
        (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads), (loss, aux * rank)

    state, eager = state_of(MODULE, stage), state_of(MODULE, stage)
    batch = {**batch_of(rank), "k": 2.0 + rank}
    state, (loss, aux) = zerofn.compile(step)(state, batch)
    eager, (eager_loss, _) = step(eager, batch)
    assert_same_trees(zerofn.unshard(state), zerofn.unshard(eager))
    assert torch.equal(loss, eager_loss) and aux == (1.0 + rank) * rank and size > 1


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_loss_and_aux_may_have_a_ranks_own_numbers(ranks, size):
    for stage in (0, 3):
        ranks(size, free, stage)


def averaged(stage):
    """`extra` becomes what each rank draws, and an average of it."""

    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch), torch.rand(3)

    def step(state, batch):
        (loss, drawn), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads, extra=state.extra * 0.5 + drawn), drawn

    state, drawn = zerofn.compile(step)(state_of(MODULE, stage, extra=torch.ones(3)), batch_of(dist.get_rank()))
    return state.extra, drawn


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
def test_state_that_depends_on_a_ranks_own_draw_is_averaged(ranks, stage):
    (first, a), (second, b) = ranks(2, averaged, stage)
    assert not torch.equal(a, b)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 0.5 + (a + b) / 2)
