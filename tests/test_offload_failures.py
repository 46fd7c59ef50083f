"""What fails beside a step, or after it: the state is whole or lost, and what is tried again begins anew."""

import importlib
import time

import pytest
import torch

import zerofn
from small_steps import batch_of, build, state_of, train_step_of
from zerofn import Offload, hosted, tree
from zerofn.ops import native

update_on_host = importlib.import_module("zerofn.passes.update_on_host")


@pytest.fixture
def apart(monkeypatch):
    """Host memory is not where the model computes, and the host updates all that lies there."""
    monkeypatch.setattr(zerofn.partition, "lies_there", lambda tier, device: False)
    monkeypatch.setattr(update_on_host, "share_of", lambda *args: 1.0)


def failing(at):
    """`native.update_` that fails at its `at`-th call, a while after it was asked for."""
    calls, update = iter(range(1000)), native.update_

    def run(*args, **kwargs):
        if next(calls) == at:
            time.sleep(0.1)
            raise ValueError("no more memory")
        update(*args, **kwargs)

    return run


def test_a_state_whose_update_fails_aside_is_lost(apart, monkeypatch):
    """The step has returned it, and the next one, or whoever looks at it, hears of the failure: once as it was."""
    for look in (zerofn.compile(train_step_of(build(4))), lambda state, batch: state.params.pieces):
        state = state_of(build(4), 3, offload=Offload(optimizer="cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(native, "update_", failing(1))
            state, _ = zerofn.compile(train_step_of(build(4)))(state, batch_of())
            with pytest.raises(ValueError, match="no more memory"):
                look(state, batch_of())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="lost when its update failed.*no more memory.*last checkpoint"):
                look(state, batch_of())
        assert state.opt_state.mu.lost


def test_a_step_that_fails_leaves_the_state_before_it_whole(apart, monkeypatch):
    """Updates of the step before, which wait for their turn, are done all the same."""
    def updated(then):
        state = state_of(build(4), 3, offload=Offload(optimizer="cpu"))
        with monkeypatch.context() as patch:
            update = native.update_
            patch.setattr(native, "update_", lambda *args, **kwargs: (time.sleep(0.03), update(*args, **kwargs)))
            state, _ = zerofn.compile(train_step_of(build(4)))(state, batch_of())
            then()
        return tree.leaves(zerofn.unshard(state))

    assert all(map(torch.equal, updated(hosted.end_updates), updated(hosted.finish)))
