"""What ranks tell each other through the job's store is believed only with the job's signature."""

import os
import time

import pytest
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import train_state
from zerofn._torch_compat import default_store
from zerofn.job import agreement, failures
from zerofn.job.signed_store import PART, SignedStore


@pytest.fixture
def raw():
    return dist.HashStore()


def test_texts_come_back(raw):
    mine, theirs = SignedStore(raw), SignedStore(raw)
    assert mine.get("a") is None
    for text in ("", "x\0y", "ä\n" * 100):
        mine.set("a", text)
        assert theirs.get("a") == text
    theirs.delete("a")
    assert mine.get("a") is None
    mine.delete("a")  # again, and harmless


def test_long_texts_come_back(raw):
    """They lie in parts, which go with them."""
    mine, theirs = SignedStore(raw), SignedStore(raw)
    for text in ("ä" * (PART + 1), "\2" * (3 * PART), "x" * PART, "\0019"):
        mine.set("a", text)
        assert theirs.get("a") == text
        theirs.delete("a")
        assert raw.num_keys() == 1  # the secret
    mine.set("a", "y" * (2 * PART))
    raw.set("a/part 1", "z" * PART)
    assert theirs.get("a") is None and theirs.has_foreign("a")
    raw.set("a", raw.get("a")[:33] + b"999999999")
    assert theirs.get("a") is None


def exchange_long_texts():
    texts = agreement.exchange("zerofn.test", f"{dist.get_rank()}" * 9_000_000)
    return [(text[0], len(text)) for text in texts]


def test_ranks_exchange_more_than_the_store_takes_at_once(ranks):
    assert ranks(2, exchange_long_texts) == [[("0", 9_000_000), ("1", 9_000_000)]] * 2


@pytest.mark.parametrize("value", ["", "rank 1: stop", "0" * 32, "0" * 32 + "stop", b"\xff" * 40])
def test_what_others_write_is_not_there(raw, value):
    store = SignedStore(raw)
    raw.set("a", value)
    assert store.get("a") is None and store.has_foreign("a")
    store.set_first("a", "mine")
    assert store.get("a") == "mine" and not store.has_foreign("a")
    store.set_first("a", "another")
    assert store.get("a") == "mine"


def test_a_signature_is_of_its_key(raw):
    """A text that a rank has written elsewhere, and a shortened one, are foreign."""
    store = SignedStore(raw)
    store.set("a", "text")
    raw.set("b", raw.get("a"))
    raw.set("a", raw.get("a")[:-1])
    assert store.get("a") is None and store.get("b") is None


def test_a_secret_of_ones_own(raw, monkeypatch):
    monkeypatch.setenv("ZEROFN_SECRET", "known to the job")
    SignedStore(raw).set("a", "text")
    assert SignedStore(raw).get("a") == "text" and raw.num_keys() == 1  # nothing to read it from
    monkeypatch.setenv("ZEROFN_SECRET", "guessed")
    assert SignedStore(raw).get("a") is None
    monkeypatch.delenv("ZEROFN_SECRET")
    assert SignedStore(raw).get("a") is None


def trains_beside_a_stranger() -> int:
    """A stranger tells all ranks to stop, and which process to kill; and counts their rounds for them."""
    zerofn.shard(train_state(1), stage=3)  # the ranks have met
    rank, size = dist.get_rank(), dist.get_world_size()
    stranger = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", default_store())
    stranger.set(failures._FAILED, "rank 9: all must stop")
    stranger.set("zerofn/alive/0", '[1, {}, {"pid": 1}]')
    stranger.set(f"zerofn/rounds/{rank}", "77")
    assert failures.published_failure() is None
    for round_ in range(3):
        assert agreement.exchange("numbers", str(rank + round_)) == [str(r + round_) for r in range(size)]
    return rank


def test_a_stranger_stops_nobody(ranks):
    assert ranks(2, trains_beside_a_stranger) == [0, 1]


def keys_after_saves(path) -> list[int]:
    state, store, found = zerofn.shard(train_state(1), stage=3), default_store(), []
    for k in range(6):
        zerofn.save(path, state, wait=k % 2 == 0)
        zerofn.save(path, state)  # which waits for that one
        agreement.agree("all are here", "")
        time.sleep(0.2)  # others take away what they wrote as they leave
        found.append(store.num_keys())
    return found


@pytest.mark.whole
def test_the_store_does_not_grow(ranks, tmp_path):
    for counts in ranks(2, keys_after_saves, tmp_path / "checkpoint"):
        assert max(counts[1:]) - min(counts[1:]) <= 2, counts


def meets_with_another_secret() -> str:
    os.environ["ZEROFN_SECRET"] = f"secret {dist.get_rank()}"
    agreement.PATIENCE, agreement.FIRST_WORD = 2.0, 0.5
    try:
        agreement.agree("meet", "")
    finally:
        del os.environ["ZEROFN_SECRET"]


def test_ranks_with_different_secrets_do_not_meet(ranks):
    replies = ranks(2, meets_with_another_secret, expect_errors=True)
    assert all("did not arrive within 2 s" in reply.message for reply in replies)
