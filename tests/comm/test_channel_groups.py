"""Channels of devices: a group of two ranks for each direction, made by all ranks in the same rounds."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.mesh.training import assert_same_training, plain, trained
from zerofn._torch_compat import groups_of_process
from zerofn.comm import channel_groups, channels
from zerofn.comm.channel_groups import ChannelGroups
from zerofn.comm.mesh import Mesh
from zerofn.comm.transport import wait_
from zerofn.runtime import captured_step
from zerofn.util.process import instead


@contextlib.contextmanager
def as_on_devices():
    """gloo stands in for a backend without tags."""
    with pytest.MonkeyPatch.context() as patch, instead(ChannelGroups()) as groups:
        for module in (channels, captured_step):
            patch.setattr(module, "is_gloo", lambda group, x: False)
        yield groups


def test_no_rank_is_twice_in_a_round():
    for size in range(2, 7):
        every = sorted(itertools.permutations(range(size), 2))
        found = list(channel_groups.rounds(every))
        assert sorted(itertools.chain(*found)) == every
        for together in found:
            ends = list(itertools.chain(*together))
            assert len(set(ends)) == len(ends)
        line = [x for k in range(size - 1) for x in ((k, k + 1), (k + 1, k))]
        assert len(list(channel_groups.rounds(sorted(line)))) <= 4


def opened():
    """A line of stages, then one more channel; afterwards ranks can still make groups that others make."""
    rank, device = dist.get_rank(), torch.device("cpu")
    with as_on_devices() as groups:
        groups.open([(0, 1), (1, 0), (1, 2)], device)
        before = len(groups_of_process())
        groups.open([(1, 0), (0, 1)], device)
        assert len(groups_of_process()) == before
        groups.open([(0, 2)], device)
        own = {x: groups.of(*x) for x in [(0, 1), (1, 0), (1, 2), (0, 2)] if rank in x}
        assert len({id(group) for group in own.values()}) == len(own)
        for ends, group in own.items():
            assert dist.get_process_group_ranks(group) == sorted(ends)
        # All messages to a rank are under way before any is received, in the other order.
        works = [dist.isend(torch.tensor([float(10 * a + b)]), b, group=g) for (a, b), g in own.items() if a == rank]
        for (a, b), group in reversed(own.items()):
            if b == rank:
                x = torch.zeros(1)
                dist.recv(x, a, group=group)
                assert x.item() == 10 * a + b
        for work in works:
            work.wait()
        assert len({x.size() for x in groups_of_process()}) == 3 and len(groups_of_process()) == before + 1
        last = dist.new_group([0, 1, 2], use_local_synchronization=True)  # which has one name on all ranks
        dist.barrier(group=last)


def test_channels_have_groups_of_their_own(ranks):
    ranks(3, opened)
    ranks.stop()


def crossing():
    """Messages of both directions at once, several of each, that are not received in the order of all sends."""
    axis, rank = Mesh.make(pipe=2).axis("pipe"), dist.get_rank()
    with as_on_devices() as groups:
        groups.open([(0, 1), (1, 0)], torch.device("cpu"))
        tokens = [channels.send_start(torch.full((k + 1,), k), 1 - rank, axis.group, "x") for k in range(3)]
        found = [
            channels.receive_start((k + 1,), (1,), 1 - rank, axis.group, "x", dtype=torch.int64, device=token.device)
            for k, token in enumerate(tokens)
        ]
        for k, x in enumerate(found):
            assert torch.equal(wait_(x), torch.full((k + 1,), k))
        for token in tokens:
            wait_(token)


def test_messages_go_over_them(ranks):
    ranks(2, crossing)
    ranks.stop()


def over_them(name, sizes, schedule):
    with as_on_devices() as groups:
        found = trained(name, sizes, 1, num_microbatches=3, pipe={"schedule": schedule})
    return found, sorted(groups._names)


WHOLE = [
    ("llama, 4 layers", {"pipe": 2}, "zbv", [(0, 1), (1, 0)]),
    ("llama, 4 layers", {"pipe": 2, "data": 2}, "1f1b", [(0, 2), (1, 3), (2, 0), (3, 1)]),
    ("llama, 4 layers", {"pipe": 3}, "interleaved", [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "sizes", "schedule", "pairs"),
    [
        ("llama", {"pipe": 2}, "1f1b", [(0, 1), (1, 0)]),
        *(pytest.param(*case, marks=pytest.mark.whole) for case in WHOLE),
    ],
    ids=str,
)
def test_a_pipeline_runs_over_them(ranks, name, sizes, schedule, pairs):
    found = ranks(math.prod(sizes.values()), over_them, name, sizes, schedule)
    ranks.stop()
    assert_same_training([each for each, _ in found], plain(name))
    assert all(channels == pairs for _, channels in found)
