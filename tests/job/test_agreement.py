"""Ranks agree through the store; a rank that differs, fails or stays away makes all raise, in time."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from zerofn.job import agreement, failures, heartbeat


def agreeing():
    for i in range(3):
        agreement.agree("a step", f"round {i}\nline")
    assert agreement.agree_on("value", lambda: (dist.get_rank(), "same")) == dist.get_rank()
    return agreement.exchange("names", f"rank {dist.get_rank()}")


@pytest.mark.parametrize("size", [1, 3])
def test_agreement(ranks, size):
    assert ranks(size, agreeing) == [[f"rank {r}" for r in range(size)]] * size


def differing():
    rank = dist.get_rank()
    messages = []
    for what, text in [("step", f"w [2]\nb [{3 + (rank == 2)}]"), (f"step {rank}", "x"), ("step", "a\n" * (1 + rank))]:
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            agreement.agree(what, text)
        assert time.monotonic() - start < 5
        messages.append(str(caught.value))
    agreement.agree("and it goes on", "")
    return messages


def test_a_difference_is_shown_on_every_rank(ranks):
    found = ranks(3, differing)
    for rank, (shapes, places, lengths) in enumerate(found):
        assert "ranks differ" in shapes and "b [4]" in shapes and "b [3]" in shapes and f"rank {rank}: b" in shapes
        assert "w [2]" not in shapes
        assert "is at a different point in the program, 'step" in places
        assert "ranks differ" in lengths


def failing():
    def make():
        if dist.get_rank() == 1:
            raise KeyError("h.0.attn")
        return 1, "text"

    start = time.monotonic()
    with pytest.raises((KeyError, RuntimeError)) as caught:
        agreement.agree_on("zerofn.shard", make)
    assert time.monotonic() - start < 5
    assert agreement.agree_on("zerofn.shard", lambda: (2, "text")) == 2
    return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_fails_makes_all_raise_its_message(ranks):
    said = ("RuntimeError", "zerofn.shard: stopped, because rank 1 failed. KeyError: 'h.0.attn'")
    assert ranks(3, failing) == [said, ("KeyError", "'h.0.attn'"), said]


def absent(late):
    agreement.PATIENCE = 1.0
    rank = dist.get_rank()
    agreement.agree("first", "x")
    if rank == 2:
        time.sleep(3 if late else 6)
        if not late:
            return "elsewhere"
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        agreement.agree("second", "y")
    assert time.monotonic() - start < 15 * agreement.PATIENCE
    return str(caught.value)


@pytest.mark.part(late=[True])
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_does_not_come_is_named(ranks, late):
    found = ranks(3, absent, late, expect_errors=True)
    ranks.stop()
    assert sum("rank 2 did not arrive within 1 s" in message for message in found[:2]) >= 1
    assert all("rank 2 did not arrive" in message or "another rank failed" in message for message in found[:2])
    assert any("rank 2 last had: first: x" in message for message in found[:2])
    if late:
        assert "rank 2 did not arrive" in found[2], "the one that comes late learns it too"


def slow_at_work():
    agreement.PATIENCE = 1.0
    agreement.agree("both are here", "")
    if dist.get_rank() == 1:
        agreement.together("a long save", lambda: time.sleep(3))  # as one fsync may take
    else:
        agreement.together("a long save", lambda: None)


def test_ranks_at_work_are_waited_for(ranks):
    ranks(2, slow_at_work)
    ranks.stop()


class OfANetwork(Exception):
    """As libraries of object stores raise: neither `OSError` nor anything else of Python's."""


FAILURES = {
    "disk": OSError(28, "No space left on device", "a file"),
    "network": OfANetwork("403 Forbidden"),
    "memory": MemoryError(),
    "allocator": RuntimeError("can't allocate memory"),
    "key": KeyError("w"),
    "call": ValueError("two leaves have the name 'w'"),
    "type": TypeError("no tensor"),
    "library": ImportError("pip install s3fs"),
}


def fails_as(failures):
    """What this rank raises of each: its type, its text, and the error that it comes from."""
    out = []
    for own in failures:

        def work(own=own):
            if own[dist.get_rank()]:
                raise FAILURES[own[dist.get_rank()]]

        with pytest.raises(Exception) as caught:
            agreement.together("a save", work)
        out.append((type(caught.value).__name__, str(caught.value), repr(caught.value.__cause__)))
    return out


def test_all_ranks_raise_errors_of_one_type(ranks):
    cases = [("", name) for name in FAILURES] + [("network", "call"), ("call", "network")]
    first, second = ranks(2, fails_as, cases)
    own = {"call": "ValueError", "type": "TypeError", "library": "ImportError"}
    for case, here, there in zip(cases, first, second, strict=True):
        assert here[0] == there[0] == own.get(case[0] or case[1], "CheckpointError"), (case, here, there)
    told = dict(zip(FAILURES, first, strict=False))
    assert told["network"][1] == "a save: rank 1 failed: OfANetwork: 403 Forbidden"
    assert told["memory"][1] == "a save: rank 1 failed: out of memory"
    assert second[1][2] == "OfANetwork('403 Forbidden')", "the rank where it happened has the error itself, too"


def frozen():
    """What the others raise, and after how long, while rank 1 is stopped, as by SIGSTOP."""
    agreement.agree("all are here", "")
    if dist.get_rank() == 1:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    agreement.SILENCE, start = 1.5, time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        agreement.agree("a step", "x")
    return str(caught.value), time.monotonic() - start


def test_a_frozen_rank_is_named(ranks):
    found = ranks(3, frozen)
    ranks.stop()
    messages = [message for message, _ in found]
    assert all("rank 1 gave no sign of life for 1.5 s. It is frozen" in message for message in messages)
    assert all(seconds < 4 for _, seconds in found)


def waiting_aloud():
    agreement.FIRST_WORD, said = 0.2, io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("zerofn").addHandler(handler)
    agreement.together("zerofn.save", lambda: time.sleep(2 * dist.get_rank()))
    logging.getLogger("zerofn").removeHandler(handler)
    return said.getvalue()


def test_a_rank_that_waits_says_for_which(ranks):
    said, nothing = ranks(2, waiting_aloud)
    ranks.stop()
    assert "zerofn.save: waited" in said and "for rank 1, which is at zerofn.save." in said, said
    assert not nothing


def one_rank_shards():
    agreement.PATIENCE = 1.0
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="zerofn.shard: rank 1 did not arrive within 1 s.*w"):
            zerofn.shard({"params": {"w": torch.zeros(3)}})
    else:
        time.sleep(4)


def test_shard_on_one_rank_alone_raises(ranks):
    ranks(2, one_rank_shards)
    ranks.stop()


def test_one_process_agrees_with_itself():
    agreement.agree("x", "y")
    assert agreement.exchange("x", "y") == ["y"]
    assert failures.published_failure() is None


def test_fingerprint():
    assert agreement.fingerprint("a") == "ca978112ca1bbdca"  # sha256


def test_patience_is_two_minutes_or_what_the_environment_says():
    assert heartbeat._patience("120") == agreement.PATIENCE == 120.0 or os.environ.get("ZEROFN_PATIENCE")
    assert heartbeat._patience("0.5") == 0.5
    for wrong in ("", "soon", "0", "-1", "nan"):
        with pytest.raises(ValueError, match=f"ZEROFN_PATIENCE: expected a number of seconds above 0, got '{wrong}'"):
            heartbeat._patience(wrong)


def ended(told):
    x = torch.ones(4)
    agreement.agree("both are here", "")
    if dist.get_rank() == 1:
        if told:  # as Python does with an error that nobody catches
            with contextlib.redirect_stderr(io.StringIO()):
                sys.excepthook(IndexError, IndexError("no more batches"), None)
        os._exit(1)
    zerofn.collectives.all_reduce(x)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (True, "stopped, because another rank failed. rank 1: IndexError: no more batches"),
        (False, "stopped, because another rank has ended: its program finished"),
    ],
)
def test_who_waits_for_a_rank_that_has_ended_hears_why(ranks, told, message):
    failures = {f.rank: f for f in ranks(2, ended, told, expect_errors=True)}
    assert failures[0].type == "RuntimeError" and message in failures[0].message
    assert failures[1].type == "Died"
