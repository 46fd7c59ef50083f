"""A state that was given to a step: who else holds it hears of it, and donate=False keeps it."""

import dataclasses

import pytest
import torch

import zerofn
from tests.support.captured_steps import rank
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, train_step_of
from zerofn import optim, tree
from zerofn.runtime import guarded_captures as guards


def test_a_donated_state_says_so():
    module = build()
    step, state = zerofn.compile(train_step_of(module)), state_of(module, 3)
    new, _ = step(state, batch_of())
    for use in (
        lambda: step(state, batch_of()),
        lambda: train_step_of(module)(state, batch_of()),
        lambda: tree.tree_map(lambda p: p, state.params),
        lambda: zerofn.gather(state.params),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"donated to train_step, and its memory belongs to the state that train_step returned. "
            r"Use the returned state, which the compiled step also has as `.state`\..*zerofn.copy\(state\), or write "
            r"compile\(\.\.\., donate=False\)",
        ):
            use()
    assert "donated" in repr(state.params)
    step(new, batch_of())


def test_a_donated_plain_state_says_so():
    def step(state, batch):
        return {"params": state["params"] * 2}, batch["x"].sum()

    call, state = zerofn.compile(step), {"params": torch.ones(32)}
    new, _ = call(state, batch_of())
    with pytest.raises(RuntimeError, match="donated to step"):
        call(state, batch_of())
    assert torch.equal(call(new, batch_of())[0]["params"], torch.full((32,), 4.0))


@pytest.mark.parametrize("stage", [0, 3])
def test_without_donation_the_old_state_can_be_used_again(stage):
    module = build()
    step, state = zerofn.compile(train_step_of(module), donate=False), state_of(module, stage)
    before = tree.tree_map(torch.clone, state)
    first, _ = step(state, batch_of())
    assert_same_trees(state, before)
    second, _ = step(state, batch_of())
    assert_same_trees(first, second)
    eager, _ = train_step_of(module)(state, batch_of())
    assert_same_trees(first, eager)


def not_donating(stage, check=0):
    """With `check`, every call is compared with a capture made anew, of a state whose gathered copy is gone."""
    guards.CHECK = check
    module = build(3)
    step, state = zerofn.compile(train_step_of(module), donate=False), state_of(module, stage)
    donating = zerofn.compile(train_step_of(module))
    other = state_of(module, stage)
    for k in range(2):
        kept = zerofn.unshard(state.params)
        new, _ = step(state, batch_of(rank(), seed=k))
        after = zerofn.unshard(state.params)
        assert_same_trees(after, kept, f"{stage=}, step {k}: the old state")
        state = new
        other, _ = donating(other, batch_of(rank(), seed=k))
    assert_same_trees(state, other, f"{stage=}")
    guards.CHECK = 0


@pytest.mark.part(stage=[1], check=[1])
@pytest.mark.parametrize(("stage", "check"), [(1, 0), (1, 1), (3, 0)])
def test_without_donation_on_several_ranks(ranks, stage, check):
    ranks(2, not_donating, stage, check)


def holders(stage):
    module = build()
    state = state_of(module, stage)
    kept, part = tree.tree_map(lambda x: x, state), state.params["0"]
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of(rank()))
    for use in (lambda: zerofn.unshard(kept), lambda: part.shards, lambda: zerofn.gather(kept.params)):
        with pytest.raises(RuntimeError, match="donated to train_step"):
            use()
    assert "donated: This state was donated to train_step" in repr(kept.params) and "donated" in repr(kept)
    assert state.params.shards[0].isfinite().all()


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_who_holds_the_same_pieces_hears_of_it(ranks, size, stage):
    ranks(size, holders, stage)


def test_another_step_is_told_too():
    module = build()
    plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(1e-2))
    state = tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, plain)
    zerofn.compile(train_step_of(module))(state, batch_of())
    with pytest.raises(RuntimeError, match="donated to train_step"):
        zerofn.compile(lambda s, b: loss_of(module)(s.params, b))(state, batch_of())


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_an_average_that_starts_as_the_parameters_themselves(ranks, stage, size):
    ranks(size, shared_memory, stage)


def shared_memory(stage):
    module = build()
    inner = train_step_of(module)

    def step(state, batch):
        average = tree.tree_map(lambda a, p: 0.9 * a + 0.1 * p, state.extra, state.params)
        state, aux = inner(state, batch)
        return dataclasses.replace(state, extra=average), aux

    def make():
        state = state_of(module, stage)
        return state.replace(extra=tree.tree_map(lambda x: x, state.params))

    ours, theirs, call = make(), make(), zerofn.compile(step)
    for k in range(3):
        ours, _ = call(ours, batch_of(rank(), seed=k))
        theirs, _ = step(theirs, batch_of(rank(), seed=k))
    assert_same_trees(zerofn.unshard(ours), zerofn.unshard(theirs), f"{stage=}")
