"""Transfers: starts and waits, in any number and order of waits, with what is on the wire counted."""

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from benchmarks.common.processes import free_port
from tests.support.same import assert_same_trees
from tests.support.small_steps import trained
from zerofn import optim
from zerofn.comm import exchange_parts
from zerofn.comm import transport as _transport
from zerofn.comm.mesh import Mesh
from zerofn.job.in_flight import pending
from zerofn.job.step_order import meetings
from zerofn.sharding.transfers import of_first
from zerofn.util.process import the

ops = torch.ops.zerofn


def group():
    axis = Mesh.of(None).axis()
    return axis.rank, axis.size, axis.group


def many_at_once():
    rank, size, name = group()
    shards = [torch.full((5 + i,), float(10 * rank + i)) for i in range(6)]
    flats = [torch.arange(float(size * (3 + i))) * (rank + 1) for i in range(6)]
    gathers = [ops.all_gather(x, size, name, "u") for x in shards]
    scatters = [ops.reduce_scatter(x, size, name, "u") for x in flats]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(rank)).tolist()  # ranks wait as they like
    for i in order:
        ops.wait((gathers + scatters)[i])
    for i in range(6):
        rows = gathers[i].view(size, -1)
        assert all(torch.equal(rows[r], torch.full((5 + i,), float(10 * r + i))) for r in range(size))
        whole = torch.arange(float(size * (3 + i))) * sum(range(1, size + 1))
        assert torch.equal(scatters[i], whole.chunk(size)[rank])
    assert not pending().transfers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_transfers_under_way(ranks, size):
    ranks(size, many_at_once)


def of_nothing():
    """Tensors without elements, of which other ranks have none either."""
    _, size, name = group()
    before, empty = the(_transport.SentBytes).by_group[name], torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for gloo in (True, False):
            patch.setattr(_transport, "is_gloo", lambda *args, gloo=gloo: gloo)
            for start in ("point_to_point", "all_gather_single", "reduce_scatter_single"):
                patch.setattr(_transport, start, None)  # nothing is called
            assert ops.wait(ops.all_gather(empty, size, name, "u")).shape == (0,)
            assert ops.wait(ops.reduce_scatter(empty, size, name, "u")).shape == (0,)
            ops.all_gather_into_(empty, 0, size, name, "u")
    assert not pending().transfers and the(_transport.SentBytes).by_group[name] == before


def test_nothing_is_not_sent(ranks):
    ranks(2, of_nothing)


def in_rank_order():
    """float32 values whose sum depends on the order."""
    rank, size, name = group()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(size, 4 * size, generator=generator) * 10.0 ** torch.arange(size).view(-1, 1)
    shard = ops.wait(ops.reduce_scatter(rows[rank].clone(), size, name, "u"))
    expected = rows[0]
    for row in rows[1:]:
        expected = expected + row
    assert torch.equal(shard, expected.chunk(size)[rank])
    assert shard.untyped_storage().nbytes() == shard.nbytes  # what came from the others is gone
    full = torch.full((size * 3,), -1.0)
    full.view(size, -1)[rank] = float(rank)
    ops.all_gather_into_(full, rank, size, name, "u")
    ops.wait(full)
    assert torch.equal(full, torch.arange(float(size)).repeat_interleave(3))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_rank_order(ranks, size):
    ranks(size, in_rank_order)


def with_a_group_of_accelerators(port):
    """Tensors of the host go through a group that has no backend for them, as one of NCCL alone."""
    rank, size, _ = group()
    expected = trained(2, 8, optim.adamw(1e-2), 2)[1]
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(1))
    many_at_once()
    in_rank_order()
    name = group()[2]
    assert ops.wait(ops.exchange(torch.full((size, 1), float(rank)), size, name)).view(-1).tolist() == [0.0, 1.0]
    assert ops.wait(ops.permute(torch.tensor([float(rank)]), [1, 0], name)).item() == 1 - rank
    assert torch.equal(of_first(torch.tensor([rank]), [], Mesh.make(tensor=size)), torch.tensor([0]))
    assert list(zerofn.even([rank] * 3)) == [rank] * 3
    assert_same_trees(trained(2, 8, optim.adamw(1e-2), 2)[1], expected)


def test_a_group_for_accelerators_alone(ranks):
    try:
        ranks(2, with_a_group_of_accelerators, free_port())
    finally:
        ranks.stop()  # its group was replaced


def sent_bytes():
    """What a reduce-scatter and an all-gather post, per rank."""
    rank, size, name = group()
    sent = []
    send = vars(dist.ProcessGroup)["send"]
    send_it = dist.ProcessGroup.send

    def counted(self, tensors, *args):
        sent.append(sum(t.nbytes for t in tensors))
        return send_it(self, tensors, *args)

    with meetings().lasting([name], "a count", b""):
        meetings().settle()  # its own message is not counted
        dist.ProcessGroup.send = counted
        try:
            ops.wait(ops.reduce_scatter(torch.ones(size * 1000), size, name, "u"))
            scattered = sum(sent)
            ops.wait(ops.all_gather(torch.ones(1000), size, name, "u"))
        finally:
            dist.ProcessGroup.send = send
    return scattered, sum(sent) - scattered


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire(ranks, size):
    """(N - 1) / N of the buffer, each way: gloo's own reduce-scatter would send twice that."""
    assert ranks(size, sent_bytes) == [((size - 1) * 4000, (size - 1) * 4000)] * size


def waits():
    rank, size, name = group()
    x = torch.ones(3)
    waited = ops.wait(x)  # nothing under way
    assert waited.data_ptr() == x.data_ptr() and torch.equal(waited, torch.ones(3))
    out = ops.all_gather(x, size, name, "u")
    pending().wait_for_all()
    assert torch.equal(out, torch.ones(3 * size)) and not pending().transfers
    ops.wait(out)
    before = threading.active_count()
    empty = ops.wait(ops.all_gather(torch.zeros(0), size, name, "u"))
    assert empty.shape == (0,) and threading.active_count() == before
    first, second = (ops.all_gather(torch.zeros(0), size, name, "u") for _ in range(2))
    big = ops.all_gather(torch.full((4,), float(rank)), size, name, "u")
    for y in (first, second, big):
        ops.wait(y)
    assert big.view(size, 4)[:, 0].tolist() == list(range(size)) and not pending().transfers


def test_waits(ranks):
    ranks(2, waits)


def lost():
    rank, size, name = group()
    if rank == 1:
        dist.destroy_process_group()
        return time.sleep(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        ops.wait(ops.reduce_scatter(torch.ones(size * 10**6), size, name, "u"))
    assert time.monotonic() - start < 20
    return "raised"


def test_a_rank_that_left_ends_the_transfer(ranks):
    assert ranks(2, lost)[0] == "raised"
    ranks.stop()  # its group is gone


SIZES = [[1, 0, 4], [2, 3, 0], [0, 5, 1]]  # rank s to rank r


def parts_exchanged():
    rank, size, name = group()
    sizes, found = [n for row in SIZES for n in row], []
    for dtype in (torch.float64, torch.int16):
        sent = torch.cat([torch.full((n,), 10 * rank + r, dtype=dtype) for r, n in enumerate(SIZES[rank])])
        for of_gloo in (True, False):  # the other way is that of other backends
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange_parts, "is_gloo", lambda *_, of_gloo=of_gloo: of_gloo)
                before = the(_transport.SentBytes).by_group[name]
                out = ops.wait(ops.exchange_parts(sent, sizes, size, rank, name))
                nbytes = the(_transport.SentBytes).by_group[name] - before
                assert nbytes == (sum(SIZES[rank]) - SIZES[rank][rank]) * sent.itemsize
                assert out.dtype == dtype
                found.append(out.tolist())
    return found


def test_parts_have_sizes_of_their_own(ranks):
    for rank, found in enumerate(ranks(3, parts_exchanged)):
        expected = [10 * source + rank for source in range(3) for _ in range(SIZES[source][rank])]
        assert found == [expected] * 4


def test_fake_tensors_know_the_shapes():
    from zerofn._torch_compat import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6)
        assert ops.all_gather(x.view(-1), 3, "", "u").shape == (72,)
        assert ops.reduce_scatter(x.view(-1), 3, "", "u").shape == (8,)
        assert ops.exchange_parts(x.view(-1), [0, 24, 5, 0], 2, 0, "").shape == (5,)
        assert ops.exchange(x, 4, "").shape == (4, 6) and ops.permute(x, [0], "").shape == (4, 6)
        assert ops.wait(x).shape == (4, 6)


def after_a_permutation():
    """A rank that keeps its own has no part in the transfer; the ones that follow match all the same."""
    rank, size, name = group()
    out = ops.wait(ops.permute(torch.full((3,), float(rank)), [1, 0, 2], name))
    assert out.tolist() == [[1.0, 0.0, 2.0][rank]] * 3
    full = ops.wait(ops.all_gather(torch.full((2,), float(rank)), size, name, "u"))
    assert full.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_transfers_after_a_permutation_with_a_fixed_point(ranks):
    ranks(3, after_a_permutation)


def of_one_process(program):
    """Run `program` in a process of its own: rank 0 of a group of one, which sends itself nothing."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.whole
@pytest.mark.slow
def test_posting_when_the_main_thread_has_ended():
    assert of_one_process("""
import threading, time
from zerofn.job.in_flight import pending
from zerofn.util.process import the
def late():
    threading.main_thread().join()
    print(pending().post(lambda: "posted")())
threading.Thread(target=late).start()
""") == ["posted"]


@pytest.mark.whole
@pytest.mark.slow
def test_posting_in_a_forked_process():
    assert of_one_process("""
import os
from zerofn.job.in_flight import pending
from zerofn.util.process import the
print(pending().post(lambda: "parent")(), flush=True)
child = os.fork()
if child == 0:
    print(pending().post(lambda: "child")(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
""") == ["parent", "child"]


@pytest.mark.slow
def test_who_leaves_has_sent_what_it_started_to(tmp_path):
    """Of two processes that swap, the first ends at once and the other comes late. A fork has no part in it."""
    assert sorted(
        of_one_process(f"""
import os, time, torch, torch.distributed as dist
import zerofn.comm.transport
from zerofn.job.in_flight import pending
from zerofn.util.process import the
from zerofn.comm.mesh import Mesh
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
if rank == 1:
    time.sleep(1)
before = pending().generation
out = torch.ops.zerofn.permute(torch.full((1 << 20,), rank + 1.0), [1, 0], Mesh.of(None).axis().group)
if rank == 1:
    print(torch.ops.zerofn.wait(out).unique().tolist(), flush=True)
else:
    child = os.fork()
    if child == 0:
        print(f"{{len(pending().transfers)}}/{{pending().generation - before}}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
""")
    ) == ["0/1", "[1.0]"]


def test_an_error_reaches_who_asks():
    def task():
        raise OSError("no such peer")

    with pytest.raises(OSError, match="no such peer"):
        pending().post(task)()
