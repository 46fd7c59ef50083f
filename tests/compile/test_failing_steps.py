"""Steps that fail, or are interrupted, while they run."""

import os
import signal
import threading

import pytest
import torch

import zerofn
from tests.support.captured_steps import rank
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, fail_here, loss_of, state_of, train_step_of
from zerofn.runtime import interrupts


def fails_at_run_time(stage, late):
    module = build(3)
    loss_fn = loss_of(module)

    def step(state, batch):
        if not late:
            batch = {**batch, "x": fail_here(batch["x"], batch["fail"])}
        loss, grads = state.value_and_grad(loss_fn)(batch)
        new = state.apply_gradients(grads)
        return new, fail_here(zerofn.global_norm(new.params), batch["fail"]) if late else loss

    call, state = zerofn.compile(step), state_of(module, stage)
    state, _ = call(state, {**batch_of(rank()), "fail": torch.tensor(0)})
    for fail in (rank(), 0):  # where all was sent before the failure, the other rank comes as far as the next step
        before = state
        try:
            state, _ = call(state, {**batch_of(rank()), "fail": torch.tensor(fail)})
        except Exception as error:
            return type(error).__name__, str(error), repr(before.params)


@pytest.mark.part(stage=[3], late=[True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_on_one_rank_ends_on_all(ranks, stage, late):
    try:
        (kind, message, _), (own_kind, own, own_state) = ranks(2, fails_at_run_time, stage, late, timeout=60)
    finally:
        ranks(1, rank)  # the group of two is gone
    assert kind == "RuntimeError" and "rank 1: step failed: ValueError: the disk is full" in message
    assert own_kind == "ValueError" and own == "the disk is full"
    if late:
        assert "This state was lost when step failed: ValueError: the disk is full" in own_state
        assert "Load the last checkpoint" in own_state
    else:
        assert "rank 1 of 2 holds" in own_state  # nothing had been written


@torch.library.custom_op("small_steps::interrupt_here", mutates_args=())
def interrupt_here(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return x.clone()


@interrupt_here.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_interrupt_leaves_the_new_state(monkeypatch):
    """It comes before the next step, when the caller has what the interrupted one returned."""
    monkeypatch.setattr(interrupts, "SOON", 60.0)  # not before
    module = build()

    def step(state, batch):
        return train_step_of(module)(state, {**batch, "x": interrupt_here(batch["x"])})

    assert threading.current_thread() is threading.main_thread()
    call, state = zerofn.compile(step), state_of(module, 3)
    expected, _ = train_step_of(module)(state_of(module, 3), batch_of())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background inherits none
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(2):
                state, _ = call(state, batch_of())
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same_trees(zerofn.unshard(state), zerofn.unshard(expected))
