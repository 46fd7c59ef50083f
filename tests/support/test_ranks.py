import contextlib
import os
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankFailure


def where(*args):
    return dist.get_rank(), dist.get_world_size(), os.getpid(), args


def sum_of_ranks(offset):
    x = torch.full((3,), float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 2])
def test_all_reduce(ranks, num_ranks):
    results = ranks(num_ranks, sum_of_ranks, 1)
    assert len(results) == num_ranks
    for x in results:
        assert x.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3


def test_results_come_in_rank_order_from_workers_that_persist(ranks):
    first, second = ranks(3, where, "a"), ranks(3, where, "b")
    assert [r[:2] for r in first] == [(0, 3), (1, 3), (2, 3)]
    assert [r[2] for r in first] == [r[2] for r in second]
    assert os.getpid() not in [r[2] for r in first]
    assert second[0][3] == ("b",)


def group_identity():
    return id(dist.group.WORLD)


def test_the_group_is_kept_while_its_size_is(ranks):
    assert ranks(2, group_identity) == ranks(2, group_identity)


def various(module, x):
    grown = torch.arange(1000.0)[10:12]
    return {
        "weight": module.weight,
        "leaf": (x.requires_grad, isinstance(module.weight, torch.nn.Parameter)),
        "bf16": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "view": grown,
    }


def test_tensors_travel_as_plain_values(ranks):
    module = torch.nn.Linear(2, 3)
    (out,) = ranks(1, various, module, torch.ones(1, requires_grad=True))
    assert out["leaf"] == (True, True)
    assert type(out["weight"]) is torch.Tensor and torch.equal(out["weight"], module.weight)
    assert out["bf16"].dtype == torch.bfloat16 and out["bf16"].shape == (2, 2)
    assert out["scalar"].item() is True and out["scalar"].shape == ()
    assert out["empty"].shape == (0, 3)
    assert out["view"].untyped_storage().nbytes() == 8


def raise_while_the_other_receives():
    if dist.get_rank() == 1:
        raise ValueError("the batch is empty")
    dist.recv(torch.zeros(1), src=1)


def test_one_rank_raises_while_another_is_blocked(ranks):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2, raise_while_the_other_receives)
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert message.startswith("rank 1 of 2: raised ValueError")
    assert "the batch is empty" in message and "in raise_while_the_other_receives" in message
    assert "rank 0 of 2: had not finished when another had failed" in message
    assert ranks(2, sum_of_ranks, 1)[0][0] == 3


def sleep_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize("expect_errors", [False, True])
def test_a_rank_that_hangs_shows_its_stack(ranks, expect_errors):
    ranks(2, where)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2: had not finished in 1 s") as caught:
        ranks(2, sleep_on_rank_one, timeout=1.0, expect_errors=expect_errors)
    assert time.monotonic() - start < 10
    assert "in sleep_on_rank_one" in str(caught.value)


def exit_on_rank_zero():
    print("last words", flush=True)
    if dist.get_rank() == 0:
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_what_it_printed(ranks):
    with pytest.raises(RankError, match="exit code 7\nlast words"):
        ranks(2, exit_on_rank_zero)


def raise_on_odd_ranks():
    if dist.get_rank() % 2:
        raise KeyError("h.0.attn")
    return dist.get_rank()


def test_expected_errors_come_back_by_rank(ranks):
    results = ranks(3, raise_on_odd_ranks, expect_errors=True)
    assert results[0] == 0 and results[2] == 2
    assert isinstance(results[1], RankFailure)
    assert (results[1].rank, results[1].type, results[1].message) == (1, "KeyError", "'h.0.attn'")
    died, fine = ranks(2, exit_on_rank_zero, expect_errors=True)
    assert died.type == "Died" and fine is None


def warn():
    warnings.warn("something odd", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_ranks_too(ranks):
    (failure,) = ranks(1, warn, expect_errors=True)
    assert failure.type == "UserWarning"


def test_a_function_that_cannot_be_sent_is_refused_at_once(ranks):
    with pytest.raises(TypeError, match="at the top of the test module"):
        ranks(1, lambda: None)


def return_a_subclass():
    class Tagged(torch.Tensor):
        pass

    return torch.zeros(1).as_subclass(Tagged)


def test_a_result_that_is_no_plain_tensor_is_named(ranks):
    with pytest.raises(RankError, match="a Tagged cannot travel"):
        ranks(1, return_a_subclass)


def make_a_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return sum_of_ranks(1).tolist(), os.getpid()


def test_ranks_without_a_group_make_one_and_are_new_each_time(ranks):
    (pid,), again = ranks(1, own_pid), [ranks(2, make_a_group, group=False) for _ in range(2)]
    assert [x for each in again for x, _ in each] == [[3.0] * 3] * 4
    assert len({pid, *(x for each in again for _, x in each)}) == 5
    assert ranks(2, sum_of_ranks, 1)[0].tolist() == [3.0] * 3  # in a group of the fixture's


def own_pid():
    return os.getpid()


@pytest.mark.filterwarnings("ignore:something odd")
def test_warnings_that_a_test_ignores_are_ignored_on_ranks(ranks):
    assert ranks(1, warn) == [None]


LEFT = []  # what a test leaves in this process


def what_is_left():
    return LEFT, sys.stdin.read(), pipes()


def pipes():
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{handle}"))
    return {x for x in found if x.startswith("pipe")}


def test_ranks_begin_without_what_tests_leave_behind(ranks):
    LEFT.append(1)
    try:
        ranks.stop()
        ((left, text, theirs),) = ranks(1, what_is_left)
        assert (left, text) == ([], "")
        assert not theirs & pipes(), "somebody may wait for the end of one of pytest's"
    finally:
        LEFT.clear()
