"""What threads of an initialisation do is not recorded: nothing of it may be lost without a word."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.same import assert_same_trees
from zerofn.deferred_init import record


def in_a_thread(work):
    """What `work` returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), name="of its own")
    thread.start()
    thread.join()
    return found[0]


def drawn():
    return {"w": in_a_thread(lambda: torch.randn(5)), "v": torch.randn(3)}


def drawn_often():
    return {"v": torch.randn(3), "w": in_a_thread(lambda: torch.rand(100_000))}


def of_a_pool():
    with ThreadPoolExecutor(1) as pool:
        return list(pool.map(lambda k: torch.nn.Linear(3, 3).weight.detach(), range(2)))


def filled():
    w = torch.empty(5)
    in_a_thread(lambda: torch.nn.init.normal_(w))
    return w


def written():
    w = torch.ones(5)
    in_a_thread(lambda: w.mul_(2))
    return w


@pytest.mark.parametrize("num_before", [0, 3, 624])
@pytest.mark.parametrize("init", [drawn, drawn_often, of_a_pool, filled, written])
def test_draws_and_writes_of_threads_are_refused(init, num_before):
    torch.manual_seed(3)
    torch.rand(num_before)
    before = torch.get_rng_state()
    in_thread = "in another thread, of its own," if init in (filled, written) else "most likely in a thread of its own"
    with pytest.raises(RuntimeError, match=f"{in_thread}.*pass `shard` the finished state"):
        record(init)
    assert torch.equal(torch.get_rng_state(), before)


def seeded_in_a_thread():
    in_a_thread(lambda: torch.manual_seed(7))
    return torch.randn(3)


def with_another_generator():
    return torch.randn(3) + in_a_thread(lambda: torch.ones(3) * 2)


@pytest.mark.parametrize("init", [seeded_in_a_thread, with_another_generator])
def test_what_threads_make_without_draws_is_as_it_is(init):
    torch.manual_seed(3)
    expected = init()
    torch.manual_seed(3)
    ((_, found),) = record(init).run()
    assert_same_trees(found, expected)
