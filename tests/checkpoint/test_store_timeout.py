"""A store that does not answer is told in a sentence, on every rank; one that is slow is waited for."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from upath import UPath

import zerofn
from tests.support import objects
from zerofn.checkpoint import CheckpointError, store_timeout


@pytest.fixture
def silent():
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def at(address, name="a", bucket="bucket"):
    """A path there. An answer may take a second."""
    options = {"client_kwargs": {"endpoint_url": address}, "config_kwargs": {"read_timeout": 1}}
    return UPath(f"s3://{bucket}/{name}", key="a", secret="b", **options)


def state():
    return {"params": {"w": torch.arange(8.0)}}


@pytest.mark.parametrize("work", [
    lambda path: zerofn.load(path, like=state()),
    lambda path: zerofn.save(path, state()),
    lambda path: zerofn.Checkpoints(path, signals=()).restore_or(state()),
    lambda path: pytest.fail(zerofn.verify(path)[0]),
])  # fmt: skip
def test_a_store_that_says_nothing(silent, monkeypatch, work):
    monkeypatch.setattr(store_timeout, "SILENCE", 0.2)
    start = time.monotonic()
    with pytest.raises(
        (CheckpointError, pytest.fail.Exception), match=f"manifest.json: {silent} does not answer. A req"
    ):
        work(at(silent))
    assert time.monotonic() - start < 5


def test_nothing_is_there(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(store_timeout, "SILENCE", 0.2)
    with pytest.raises(CheckpointError, match=f"{address} does not answer|cannot be reached: Could not connect to"):
        zerofn.load(at(address), like=state())


def one_rank_hears_nothing(address, folder):
    """Rank 0 reaches its checkpoint; the other's store is silent."""
    store_timeout.SILENCE = 0.2
    like = zerofn.shard(state(), stage=3)
    zerofn.save(folder, like)
    path = folder if dist.get_rank() == 0 else at(address)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(zerofn.checkpoint.loading, "same_everywhere", lambda *_: None)
        zerofn.load(path, like=like)
    return str(caught.value)


def test_the_other_ranks_hear_of_it(ranks, silent, tmp_path):
    first, second = ranks(2, one_rank_hears_nothing, silent, tmp_path / "a")
    assert second.endswith("and the network.") and silent in second
    assert first == f"zerofn.load: rank 1 failed: {second}"


@pytest.mark.whole
def test_a_slow_store_is_waited_for(monkeypatch):
    monkeypatch.setattr(store_timeout, "SILENCE", 0.1)
    monkeypatch.setattr(store_timeout, "_read_timeout", lambda fs: 10.0)  # of a busy machine, on which it is slow, too
    found, answer, look = [], DomainDispatcherApplication.__call__, store_timeout._answers
    monkeypatch.setattr(store_timeout, "_answers", lambda *args: found.append(look(*args)) or found[-1])
    with objects.s3_server() as bucket:
        zerofn.save(bucket / "slow", state())
        found.clear()
        monkeypatch.setattr(DomainDispatcherApplication, "__call__", lambda *args: time.sleep(0.3) or answer(*args))
        path = at(bucket.storage_options["client_kwargs"]["endpoint_url"], "slow")
        loaded = zerofn.load(path, like=state())
    assert torch.equal(loaded["params"]["w"], torch.arange(8.0)) and found and all(found)
