"""Messages between two ranks: the n-th receive of a channel gets what the n-th send sent."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.support import late_runtime
from zerofn.comm import channels
from zerofn.comm.mesh import Mesh
from zerofn.comm.transport import SentBytes, wait_
from zerofn.job.step_order import meetings
from zerofn.util.process import the

SHAPES = [(3,), (2, 5), (1 << 17,), ()]


def value(source, number):
    shape = SHAPES[number % len(SHAPES)]
    found = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 10.0 * source + number
    return found.t().contiguous().t() if len(shape) == 2 else found


def ring(num_messages, late):
    """Each rank sends to the next two, and receives all before it waits for one of them, the last first."""
    axis = Mesh.make(pipe=-1).axis("pipe")
    sent = -the(SentBytes).by_group[axis.group]
    others = sorted({(axis.rank + k) % axis.size for k in (1, 2)} - {axis.rank})
    before = sorted({(axis.rank - k) % axis.size for k in (1, 2)} - {axis.rank})
    with late_runtime.late() if late else contextlib.nullcontext():
        with meetings().lasting([axis.group], "messages", b"same"):
            tokens, found = [], {}
            for number in range(num_messages):
                x = value(axis.rank, number)
                tokens += [channels.send_start(x, peer, axis.group, "x") for peer in others]
                for peer in before:
                    like = value(peer, number)
                    out = channels.receive_start(
                        like.shape, like.stride(), peer, axis.group, "x", dtype=x.dtype, device=x.device
                    )
                    found[peer, number] = out
            for out in reversed(found.values()):
                wait_(out)
            for token in tokens:
                wait_(token)
    assert all(torch.equal(out, value(*key)) for key, out in found.items())
    assert len(found) == num_messages * len(before)
    return sent + the(SentBytes).by_group[axis.group], dist.get_rank()


@pytest.mark.parametrize(("num_ranks", "late"), [(2, False), (3, False), (2, True)])
def test_messages_arrive_in_order(ranks, num_ranks, late):
    for sent, rank in ranks(num_ranks, ring, 4, late):
        peers = len({(rank + k) % num_ranks for k in (1, 2)} - {rank})
        assert sent == peers * sum(value(0, k).nbytes for k in range(4))
