"""What a rank that fails tells the others, and what it lets go of."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zerofn
from benchmarks.common.processes import free_port
from zerofn import collectives
from zerofn.job import failures
from zerofn.job.failures import Signs, last_text
from zerofn.util.process import instead, the


def backends():
    sub = dist.new_group([0, 1])
    return [failures.backend_on(x) for x in (dist.group.WORLD, sub)] + [failures.backend_on(sub, "no such device")]


def test_the_backend_of_a_group_for_a_device(ranks):
    assert ranks(2, backends) == [["gloo", "gloo", ""]] * 2


def without_a_name(port):
    """A user's own `init_process_group()`, which names no backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return failures.backend_on(dist.group.WORLD), collectives.all_reduce(torch.tensor([1.0 + rank])).item()


def test_a_group_that_names_no_backend_is_gloo_on_the_host(ranks):
    port = free_port()
    try:
        assert ranks(2, without_a_name, port) == [("gloo", 3.0)] * 2
    finally:
        ranks.stop()  # its group was replaced


def leaving():
    dropped = []
    the(Signs).before_leaving.append(lambda: dropped.append(dist.is_initialized()))
    assert failures.is_there(dist.group.WORLD)
    group = dist.group.WORLD
    failures.abandon("it broke")
    assert dropped == [True] and not failures.is_there(group) and not dist.is_initialized()
    with pytest.raises(RuntimeError, match="destroyed, because rank"):
        failures.refuse_after_failure()
    return the(Signs).taken_down


def test_a_group_is_taken_down_once_nothing_refers_to_it(ranks):
    first, second = ranks(2, leaving)
    ranks.stop()
    assert first == second and first.startswith("rank ") and first.endswith("it broke")


def waiting():
    """Rank 1 gives up while the others wait for it in a transfer. Rank 2 comes late: it cannot tell its neighbour."""
    if dist.get_rank() == 1:
        zerofn.abort("the loader on this rank has no more shards")
        return ""
    time.sleep(0.3 if dist.get_rank() == 2 else 0)
    with pytest.raises(RuntimeError) as caught:
        collectives.all_reduce(torch.ones(3)).sum().item()
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_aborts_ends_what_others_wait_for(ranks, size):
    found = ranks(size, waiting, timeout=20.0)
    ranks.stop()
    said = "stopped, because another rank failed. rank 1: the loader on this rank has no more shards"
    assert [said in x for r, x in enumerate(found) if r != 1] == [True] * (size - 1)


def test_one_process_has_nothing_to_abort():
    zerofn.abort("nobody is there")
    assert zerofn.shard({"params": {"w": torch.ones(3)}})


def in_a_fork(folder):
    """What a forked process does that fails as a rank would, and says of what ranks do together."""
    sys.excepthook(ValueError, ValueError("in the child only"), None)
    failures.abandon("in the child only")
    zerofn.abort("in the child only")
    assert dist.is_initialized() and zerofn.rank() == 1
    for together in (
        lambda: collectives.all_gather(torch.ones(2)),
        lambda: zerofn.save(folder, {"w": torch.ones(2)}),
        lambda: zerofn.shard({"params": {"w": torch.ones(2)}}),
    ):
        with pytest.raises(RuntimeError, match="was forked from rank 1 and is not a rank itself"):
            together()


def forking(folder):
    collectives.all_reduce(torch.ones(2))
    zerofn.tree.leaves(zerofn.shard({"params": {"w": torch.ones(2)}}))  # agrees, which tells others of errors
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                in_a_fork(folder)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert failures.published_failure() is None
    return collectives.all_reduce(torch.ones(2)).tolist()


def test_how_a_forked_process_ends_is_no_matter_of_the_ranks(ranks, tmp_path):
    assert ranks(2, forking, tmp_path / "x", timeout=60) == [[2.0, 2.0]] * 2
    assert not list(tmp_path.iterdir())


ENDS = """
import os, sys, torch.distributed as dist, zerofn
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
zerofn.rank()
del store
child = os.fork()
if child == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_process_ends_with_its_own_status():
    """And does not destroy groups and stores, whose threads it does not have."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "3\n", done.stderr


def test_long_texts_are_shown_where_they_differ():
    assert failures.apart("a\nb\nc", "a\nx\nc") == "b"
    assert failures.apart("a", "a") == "a"
    first, second = "step: state.w: [2]\nbatch.m: [3]\nbatch.x: [4]", "step: state.w: [2]\nbatch.x: [5]\nplan: 1"
    assert failures.apart(first, second) == "batch.m: [3]" and failures.apart(second, first) == "no entry batch.m"
    assert failures.apart(first, "unshard: w") == "step: state.w: [2]\n    batch.m: [3]\n    batch.x: [4]"
    assert failures.apart("\n".join("abcde"), "") == "a\n    b\n    c\n    (and 2 lines more)"


def test_one_process_has_no_store():
    with instead(Signs()):
        assert failures.store_of_job() is None
        failures.publish_failure("nobody hears it")
        assert failures.published_failure() is None
        failures.abandon("nor this")
        assert the(Signs).taken_down is None


def test_an_error_of_torchs_own_transfer_says_which_rank_failed(monkeypatch):
    """Such as of a barrier: only ZeroFn's transfers are explained where they fail."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr(failures, "is_rank", lambda: True)
    monkeypatch.setattr(failures, "published_failure", lambda store=None: "rank 1: KeyError: 'a row'")
    monkeypatch.setattr(failures, "abandon", lambda message: None)
    monkeypatch.setattr(failures, "publish_failure", lambda message: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    failures.tell_others.__wrapped__(lambda: None)
    mine, gone = ValueError("of this rank"), RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    sys.excepthook(ValueError, mine, None)
    sys.excepthook(RuntimeError, gone, None)
    assert shown[:2] == [mine, gone] and len(shown) == 3
    assert str(shown[2]) == "stopped, because another rank failed. rank 1: KeyError: 'a row'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, "nothing yet"),
        ("zerofn.load\0step 3", "zerofn.load: step 3"),
        ("zerofn.load\0\1ValueError: no", "zerofn.load: failed with ValueError: no"),
        ("zerofn.load\0\1ValueError\1no", "zerofn.load: failed with ValueError: no"),
    ],
)
def test_what_a_rank_agreed_on_last_is_shown_without_its_marks(text, shown):
    assert last_text(SimpleNamespace(get=lambda key: text), 0) == shown
