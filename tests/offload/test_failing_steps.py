"""What fails beside a step, or after it: the state is whole or lost, and what is tried again begins anew."""

import os
import time

import pytest
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import apart, batch_of, build, state_of, train_step_of
from zerofn import Offload, optim, tree
from zerofn.offload.disk import DiskError
from zerofn.offload.host_worker import worker
from zerofn.ops import cpu


@pytest.fixture
def on_host(monkeypatch):
    """The host updates all that lies there."""
    apart(monkeypatch, 1.0)


def failing(at):
    """`cpu.update_` that fails at its `at`-th call, a while after it was asked for."""
    calls, update = iter(range(1000)), cpu.update_

    def run(*args, **kwargs):
        if next(calls) == at:
            time.sleep(0.1)
            raise ValueError("no more memory")
        update(*args, **kwargs)

    return run


def test_a_state_whose_update_fails_aside_is_lost(on_host, monkeypatch):
    """The step has returned it, and the next one, or whoever looks at it, hears of the failure: once as it was."""
    for look in (zerofn.compile(train_step_of(build(4))), lambda state, batch: state.params.shards):
        state = state_of(build(4), 3, offload=Offload(optimizer="cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "update_", failing(1))
            state, _ = zerofn.compile(train_step_of(build(4)))(state, batch_of())
            with pytest.raises(ValueError, match="no more memory"):
                look(state, batch_of())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="lost when its update failed.*no more memory.*last checkpoint"):
                look(state, batch_of())
        assert state.opt_state.mu.lost


def test_a_step_that_fails_leaves_the_state_before_it_whole(on_host, monkeypatch):
    """Updates of the step before, which wait for their turn, are done all the same."""

    def updated(then):
        state = state_of(build(4), 3, offload=Offload(optimizer="cpu"))
        with monkeypatch.context() as patch:
            update = cpu.update_
            patch.setattr(cpu, "update_", lambda *args, **kwargs: (time.sleep(0.03), update(*args, **kwargs)))
            state, _ = zerofn.compile(train_step_of(build(4)))(state, batch_of())
            then()
        return tree.leaves(zerofn.unshard(state))

    assert_same_trees(updated(worker().end), updated(worker().finish))


def fail_to_write(monkeypatch, step, state):
    """Steps while drives take nothing; the error."""

    def broken(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(DiskError, match="Input/output error"):
            for _ in range(3):
                state, _ = step(state, batch_of())


@pytest.mark.parametrize("tx", [optim.adamw(1e-2), pytest.param(optim.lamb(1e-2), marks=pytest.mark.whole)])
def test_a_step_goes_on_with_another_state_once_a_drive_works_again(tmp_path, monkeypatch, tx):
    """Gradients get a place that works, and nobody waits for writes that failed."""
    module = build(6)
    step, make = zerofn.compile(train_step_of(module)), lambda **options: state_of(module, 3, tx, **options)
    offload = Offload(optimizer="nvme", path=tmp_path)
    state, other = make(offload=offload), make(offload=offload)
    state, _ = step(state, batch_of())
    zerofn.save(tmp_path / "saved", state)
    fail_to_write(monkeypatch, step, state)
    state = zerofn.load(tmp_path / "saved", like=make(offload=offload))
    expected = make()
    for _ in range(2):
        other, _ = step(other, batch_of())
        expected, _ = step(expected, batch_of())
    state, _ = step(state, batch_of())
    for ours in (other, state):
        assert_same_trees(zerofn.unshard(ours), zerofn.unshard(expected))


def on_one_machine_of_two(path):
    """The folder is on rank 0's machine alone."""
    own = path / f"drive{dist.get_rank()}"
    if dist.get_rank() == 0:
        own.mkdir()
    begin = time.monotonic()
    with pytest.raises((DiskError, RuntimeError), match="drive1 does not exist") as caught:
        state_of(build(2), 3, offload=Offload(optimizer="nvme", path=own))
    state_of(build(2), 3)  # nobody waits for anybody
    return caught.type, time.monotonic() - begin


def test_a_rank_without_its_drive_is_told_on_all(ranks, tmp_path):
    (there, first), (missing, second) = ranks(2, on_one_machine_of_two, tmp_path)
    assert (there, missing) == (RuntimeError, DiskError) and max(first, second) < 20
