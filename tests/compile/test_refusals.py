"""Steps that are refused: on every rank, in a sentence, and the state is what it was."""

import pytest
import torch

import zerofn
from tests.support.captured_steps import rank
from tests.support.same import assert_same_trees
from tests.support.small_steps import WIDTH, batch_of, build, loss_of, state_of, train_step_of
from zerofn import tree
from zerofn.graph.capture import CaptureError


def impure(module):
    """What is no pure function: name -> (step, what is said of it)."""
    inner, table, learned = train_step_of(module), torch.ones(WIDTH), torch.ones(WIDTH, requires_grad=True)

    def writes_to_the_batch(state, batch):
        batch["x"].mul_(2)
        return inner(state, batch)

    def writes_to_the_state(state, batch):
        state.params.shards[0].mul_(2)
        return inner(state, batch)

    def writes_to_what_it_closes_over(state, batch):
        table.add_(batch["x"].detach().sum(0))
        return inner(state, batch)

    def closes_over_what_learns(state, batch):
        return inner(state, {**batch, "x": batch["x"] * learned})

    def branches(state, batch):
        return inner(state, batch) if batch["x"].sum() > 0 else inner(state, {**batch, "x": -batch["x"]})

    def returns_another_structure(state, batch):
        new, aux = inner(state, batch)
        return new.replace(extra={"seen": new.step}), aux

    def adds_up_a_shard(state, batch):
        new, aux = inner(state, batch)
        return new, {**aux, "sum": sum(p.sum() for p in state.params.shards)}

    return {
        writes_to_the_batch: "writes to batch entry 'x'",
        writes_to_the_state: 'writes to state entry "params',
        writes_to_what_it_closes_over: "writes to a tensor it closes over",
        closes_over_what_learns: "requires grad",
        branches: "cannot branch on data",
        returns_another_structure: "returns a state of another structure",
        adds_up_a_shard: "sum",
    }


def refused(stage):
    """Every impure step, refused on every rank; then the state is what it was, and a pure one takes it."""
    module = build()
    state, batch = state_of(module, stage), batch_of(rank())
    before = tree.tree_map(torch.clone, (zerofn.unshard(state), batch))
    for step, said in impure(module).items():
        with pytest.raises((CaptureError, RuntimeError)) as caught:
            zerofn.compile(step)(state, batch)
        assert type(caught.value) is CaptureError and said in str(caught.value), (step.__name__, str(caught.value))
        assert_same_trees((zerofn.unshard(state), batch), before, f"{stage=}, {step.__name__}")
    expected, _ = train_step_of(module)(state_of(module, stage), batch)
    ours, _ = zerofn.compile(train_step_of(module))(state, batch)
    assert_same_trees(zerofn.unshard(ours), zerofn.unshard(expected), f"{stage=}")


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_refused_step_leaves_the_state_as_it_was(ranks, size, stage):
    ranks(size, refused, stage)


def test_a_constant_that_changes_after_capture_is_followed():
    module, table = build(), torch.ones(16)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] * table.sum()

    call = zerofn.compile(step, donate=False)
    state = state_of(module, 3)
    for _ in range(2):
        assert torch.equal(call(state, batch_of())[1], step(state, batch_of())[1])
        table.mul_(2)


def test_options_that_are_not_there():
    with pytest.raises(ValueError, match="remat=1 is not known"):
        zerofn.compile(lambda s, b: s, remat=1)
    with pytest.raises(ValueError, match="backend='inductor'"):
        zerofn.compile(lambda s, b: s, backend="inductor")


def test_an_array_is_named():
    module = build()
    batch = {**batch_of(), "more": {"ids": batch_of()["x"].numpy()}}
    with pytest.raises(TypeError, match=r"batch entry 'more.ids' is a ndarray.*torch.as_tensor"):
        zerofn.compile(train_step_of(module))(state_of(module, 3), batch)


def different_graphs():
    module = build(3)
    loss_fn = loss_of(module)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        if rank() == 1:
            grads = tree.tree_map(lambda g: g / zerofn.global_norm(grads), grads)
        return state.apply_gradients(grads), loss

    state = state_of(module, 3)
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        zerofn.compile(step)(state, batch_of(rank()))
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of(rank()))  # everyone can go on
    return str(caught.value)


def test_ranks_with_different_graphs_raise_on_all(ranks):
    for message in ranks(2, different_graphs):
        assert "ank 0" in message and "ank 1" in message and "meets the state" in message


def refused_on_one():
    module = build(3)

    def step(state, batch):
        if rank() == 1:
            batch["x"].mul_(2)
        return train_step_of(module)(state, batch)

    with pytest.raises(RuntimeError, match="writes to batch entry 'x'") as caught:
        zerofn.compile(step)(state_of(module, 3), batch_of(rank()))
    return str(caught.value)


def test_a_step_refused_on_one_rank_raises_on_all(ranks):
    first, second = ranks(2, refused_on_one)
    assert first.startswith("zerofn.compile(step): stopped, because rank 1 failed") and "writes to" in second
