"""Wire codecs: what arrives is what torch's casts give, decoded in the memory that it was received in."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.small_steps import SCHEDULE, batch_of, build, captured, fake_ranks, state_of, train_step_of
from zerofn.comm.mesh import Mesh
from zerofn.comm.transport import SentBytes
from zerofn.comm.wire import CODECS, SMALL, nbytes_on_wire, rounded
from zerofn.graph.node_kinds import is_start
from zerofn.job.in_flight import pending
from zerofn.util.process import the

ops = torch.ops.zerofn
BF16 = CODECS["bf16"]


@pytest.mark.parametrize("size", [0, 1, 2, 3, SMALL, SMALL + 1, 5 * SMALL + 7, 2**18 + 1])
def test_what_is_decoded_is_what_was_received(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e3
    whole = torch.full((size,), -1.0)
    BF16.encode(x, BF16.place_in(whole))
    BF16.decode_(whole)
    assert torch.equal(whole, x.bfloat16().float())
    assert torch.equal(rounded(x.view(1, -1), "bf16"), whole.view(1, -1))
    assert torch.equal(rounded(whole, "bf16"), whole)  # again: the same numbers


@pytest.mark.parametrize("shard", [0, 1, SMALL - 1, SMALL, 3 * SMALL + 5, 2**18 + 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_encoded_in_place_takes_no_memory(ranks, shard):
    """Of every rank's shard, also the last one, whose coded elements lie in the shard itself."""
    for rank in range(ranks):
        whole = torch.randn(ranks * shard, generator=torch.Generator().manual_seed(0)) * 1e3
        start, stop = rank * shard, (rank + 1) * shard
        want = whole[start:stop].bfloat16()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            coded = BF16.encode_(whole, start, stop)
        taken = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        assert torch.equal(coded, want) and coded.data_ptr() == BF16.place_in(whole)[start:].data_ptr()
        assert all(n <= 4 * SMALL + 64 for n in taken), f"rank {rank}"


def test_numbers_that_are_none_arrive():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38])
    assert torch.equal(rounded(x, "bf16").view(torch.int32), x.bfloat16().float().view(torch.int32))


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_sums_are_in_float32_and_in_order(num_rows):
    rows = [torch.randn(2**16 + 3).mul(100.0**k).bfloat16() for k in range(num_rows)]
    want, out = rows[0].float(), torch.full((2**16 + 3,), -1.0)
    for row in rows[1:]:
        want = want + row.float()
    BF16.sum_(out, rows)
    assert torch.equal(out, want)


def test_bytes():
    assert nbytes_on_wire(torch.ones(6), "") == 24 and nbytes_on_wire(torch.ones(6), "bf16") == 12


def on_ranks():
    """Each transfer beside torch's casts, with its bytes."""
    axis = Mesh.of(None).axis()
    size, to, part = axis.size, (axis.size, axis.group, "u", "bf16"), 10_003
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(size, size * part, generator=draw) * 10.0 ** torch.arange(size).view(-1, 1)
    mine, before = values[axis.rank].clone(), the(SentBytes).by_group[axis.group]
    shard = mine.chunk(size)[axis.rank].clone()
    started = ops.all_gather(shard, *to)
    shard.fill_(7.0)  # it was encoded already
    full = ops.wait(started)
    want = torch.cat([values[r].chunk(size)[r] for r in range(size)]).bfloat16().float()
    assert torch.equal(full, want) and full.untyped_storage().nbytes() == full.nbytes
    summed = ops.reduce_scatter(mine.clone(), *to)
    ops.wait(summed)
    total = values[0].bfloat16().float()
    for row in values[1:]:
        total = total + row.bfloat16().float()
    assert torch.equal(summed, total.chunk(size)[axis.rank])
    whole = torch.full((size * part,), -1.0)
    whole.chunk(size)[axis.rank].copy_(mine.chunk(size)[axis.rank])
    ops.all_gather_into_(whole, axis.rank, *to)
    ops.wait(whole)
    assert torch.equal(whole, want) and whole.data_ptr() not in pending().transfers
    assert the(SentBytes).by_group[axis.group] - before == 3 * (size - 1) * part * 2


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_is_rounded_once(ranks, size):
    ranks(size, on_ranks)


def starts(wire):
    """Names of what is sent at stage 3, and the codecs."""
    module = build()
    with fake_ranks(2):
        gm = captured(train_step_of(module), state_of(module, 3, wire=wire), batch_of(), *SCHEDULE).gm
    found = [n for n in gm.graph.nodes if is_start(n)]
    return len(gm.graph.nodes), [str(n.target) for n in found], {n.args[4:] for n in found if n.args[3:4] != ("",)}


def test_a_coded_transfer_is_one_start_and_one_wait():
    size, names, codecs = starts("bf16")
    plain, expected, none = starts(None)
    assert names == expected and size == plain
    assert codecs == {("bf16",)} and none == {()}
