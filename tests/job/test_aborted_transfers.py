"""Failures that a rank hears of while a transfer keeps it waiting."""

import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import collectives
from zerofn.job import agreement, failures, heartbeat
from zerofn.job import in_flight as pending
from zerofn.util.process import the


def as_if_for_ever(patch):
    """gloo counts as a backend whose transfers do not end when a rank is gone."""
    patch.setattr(failures, "_END_BY_THEMSELVES", ())
    patch.setattr(heartbeat, "SECONDS", 0.2)


def heard(fails, waits):
    """What rank 0 raises while it waits for rank 1, which has failed and keeps its connections; and after how long."""
    with pytest.MonkeyPatch.context() as patch:
        as_if_for_ever(patch)
        if dist.get_rank() == 1:
            reduce()
            fails()
            time.sleep(3.0)  # holds its connections
            return None
        began = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            reduce()  # which rank 1 has finished, perhaps before this rank
            waits()
        assert not dist.is_initialized() and not the(pending.PendingTransfers).transfers
        return str(error.value), time.monotonic() - began


def breaks():
    failures.publish_failure("it broke")


def reduce():
    collectives.all_reduce(torch.ones(3))


def evaluate():
    state = state_of(build(2), 3)
    zerofn.gather(state.params)


@pytest.mark.part(waits=[evaluate])
@pytest.mark.parametrize("waits", [reduce, evaluate])
def test_a_rank_that_waits_hears_of_a_failure(ranks, waits):
    (message, seconds), _ = ranks(2, heard, breaks, waits)
    ranks.stop()
    assert "it broke" in message  # of the transfer, or of the process group, which the heartbeat took down just before
    assert "another rank failed" in message or "was destroyed" in message
    assert seconds < 2.5


def taken_down_in(name):
    """What rank 0 raises if the group is taken down as an agreement comes to this function of its own."""
    with pytest.MonkeyPatch.context() as patch:
        once = getattr(agreement, name)

        def and_down(*args):
            found = once(*args)
            failures.abandon("rank 1: it broke")
            return found

        agreement.agree("before", "")
        agreement.heartbeat().stop()
        patch.setattr(agreement, name, and_down)
        with pytest.raises(RuntimeError) as error:
            agreement.agree("after", "")
        return str(error.value)


@pytest.mark.parametrize("name", ["store_of_job", "_raise_published", "channel_now"])
def test_the_group_is_taken_down_in_the_midst_of_an_agreement(ranks, name):
    messages = ranks(2, taken_down_in, name)
    ranks.stop()
    assert all("it broke" in x for x in messages)


def at_the_end_of_a_step():
    """The transfers have ended, as a kernel's do that was aborted: what they left is no result."""
    with pytest.MonkeyPatch.context() as patch:
        as_if_for_ever(patch)
        state, step = state_of(build(2), 3), zerofn.compile(train_step_of(build(2)))
        state, _ = step(state, batch_of(dist.get_rank()))
        agreement.agree("the first step is over", "")
        the(failures.Signs).aborted = "rank 1: it broke"
        with pytest.raises(RuntimeError, match=r"(?s)another rank failed\. .*it broke"):
            step(state, batch_of(dist.get_rank()))
        the(failures.Signs).aborted = None
        return True


def test_a_step_raises_what_was_heard(ranks):
    assert all(ranks(2, at_the_end_of_a_step))
    ranks.stop()
