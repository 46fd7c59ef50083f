"""What the program is seen to wait for."""

import threading
import time
from types import SimpleNamespace

import torch

from zerofn.job.in_flight import pending
from zerofn.job.waiting import Waiting


def seen(wait):
    """What a thread beside it sees of a program that waits for 0.3 s, the first time and the last."""
    lock, found, waiting = threading.Lock(), [], Waiting()
    lock.acquire()

    def beside():
        for _ in range(3):
            time.sleep(0.1)
            found.append(waiting.look())
        lock.release()

    thread = threading.Thread(target=beside)
    thread.start()
    wait(lock)
    thread.join()
    return found[0], found[-1]


def in_a_transfer(lock):
    work = SimpleNamespace(wait=lock.acquire)  # blocks as a transfer's does, without a frame of Python
    pending().wait(pending().start(torch.ones(1), lambda: [work], ()))


def test_a_program_in_a_transfer_is_told_from_one_that_works():
    first, last = seen(in_a_transfer)
    assert first.seconds < 0.1 and 0.15 < last.seconds < 1
    assert last.where.startswith(f"a transfer at {__file__}:") and "pending().wait(" in last.where
    assert [x.seconds for x in seen(lambda lock: lock.acquire())] == [0, 0]
