"""Transfers that never complete, and a shutdown that waits for them: kernels of NCCL whose other rank is gone."""

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import collectives
from zerofn.comm import transport
from zerofn.job import failures, heartbeat
from zerofn.job import in_flight as pending
from zerofn.util.process import the

FOR_EVER = 20.0  # seconds


class Kernels:
    """Transfers that run until they are aborted; on rank 1 one fails."""

    def __init__(self, patch):
        self.aborted, self.num_started = threading.Event(), 0
        abort, destroy = heartbeat.abort_groups, dist.destroy_process_group

        def ends():
            self.aborted.set()
            abort()

        def shuts_down(*args):
            assert self.aborted.is_set() or not self.num_started, "the shutdown waits for kernels"
            destroy(*args)

        for module in (failures, heartbeat):
            patch.setattr(module, "abort_groups", ends)
        patch.setattr(dist, "destroy_process_group", shuts_down)
        patch.setattr(transport, "is_gloo", lambda group, x: False)
        for module, name in (
            (transport, "all_gather_single"),
            (transport, "reduce_scatter_single"),
            (dist, "all_to_all_single"),
        ):
            patch.setattr(module, name, self.start)

    def start(self, *args, **kwargs):
        self.num_started += 1
        return self

    def wait(self, *timeout):
        if dist.get_rank() == 1:
            raise ValueError("it broke")
        assert self.aborted.wait(FOR_EVER), "nobody ended the transfer"


@contextlib.contextmanager
def kernels(backend):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_END_BY_THEMSELVES", ())
        patch.setattr(heartbeat, "SECONDS", 0.2)
        patch.setattr(failures, "backend_on", lambda group, device="cpu": backend)
        yield Kernels(patch)


def train():
    step, state = zerofn.compile(train_step_of(build(2))), state_of(build(2), 3)
    for _ in range(2):
        state, _ = step(state, batch_of(dist.get_rank()))


def reduce():
    try:
        collectives.all_reduce(torch.ones(3))
    except ValueError:
        failures.abandon("it broke")  # as a program does that has caught an error
        raise


def one_fails(works, backend):
    """What each rank raises, and after how long."""
    began = time.monotonic()
    with kernels(backend), pytest.raises((RuntimeError, ValueError, AssertionError)) as error:
        works()
    assert not the(pending.PendingTransfers).transfers
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("works", [reduce, train])
def test_ranks_end(ranks, works):
    (said, seconds), (broke, other) = ranks(2, one_fails, works, "nccl")
    ranks.stop()
    assert "because another rank failed. rank 1: " in said or "was destroyed, because rank 1: " in said
    assert "it broke" in said
    assert "it broke" in broke and max(seconds, other) < 5.0


@pytest.mark.part(works=[reduce])
@pytest.mark.parametrize("works", [reduce, train])
def test_a_shutdown_would_wait(ranks, works):
    """As it may for gloo, whose transfers end by themselves."""
    _, (said, _) = ranks(2, one_fails, works, "gloo")
    ranks.stop()
    assert said.startswith("the shutdown waits for kernels")
