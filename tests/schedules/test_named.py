"""Named schedules, complete for any numbers, and equal to torch's where torch has them."""

import pytest

from benchmarks.pipe import torch_orders
from zerofn.schedules import NAMES, check, make

RANKS, MICROBATCHES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 16)


def cases(names, ranks, microbatches, chunks):
    """(name, ranks, microbatches, chunks), of a schedule with a fixed number of chunks that one."""
    for name in names:
        for p in ranks:
            for m in microbatches:
                yield from ((name, p, m, v) for v in (chunks if NAMES[name].any_chunks else [NAMES[name].chunks]))


def check_all(ranks, microbatches, chunks):
    for name, p, m, v in cases(NAMES, ranks, microbatches, chunks):
        schedule = make(name, p, m, v)
        check(schedule)
        assert (schedule.ranks, schedule.chunks, schedule.microbatches) == (p, v, m)


def test_every_schedule_can_run_for_any_numbers():
    check_all(RANKS, MICROBATCHES, (1, 2, 3))


@pytest.mark.whole
def test_every_schedule_can_run_for_many_more_numbers():
    check_all((1, 2, 3, 5, 8, 16), (*range(1, 13), 17, 33), (1, 2, 3, 5))


def torchs_agree(ranks, microbatches, chunks):
    same = 0
    for name, p, m, v in cases(torch_orders.CLASSES, ranks, microbatches, chunks):
        try:
            theirs = torch_orders.make(name, p, m, v)
        except ValueError as error:  # torch has rounds of one size alone
            assert "multiple of the number of rounds" in str(error)
            continue
        assert theirs.orders == make(name, p, m, v).orders, (name, p, m, v)
        same += 1
    return same


def test_orders_are_torchs():
    assert torchs_agree((2, 3, 4), (1, 2, 3, 4, 5, 8, 10), (2, 3)) > 80


@pytest.mark.whole
def test_orders_are_torchs_for_many_more_numbers():
    assert torchs_agree((2, 3, 5, 8, 16), (*range(1, 13), 16, 32), (2, 3, 5)) > 200


def test_only_schedules_that_split_have_w_and_none_at_stage_0():
    for name in NAMES:
        kinds = {(a.stage == 0, a.kind) for order in make(name, 4, 8).orders for a in order}
        split = name.startswith("zb") or name.endswith("zb")
        wanted = {(True, "F"), (True, "B"), (False, "F")}
        assert kinds == wanted | ({(False, "I"), (False, "W")} if split else {(False, "B")})


def test_1f1b_is_written_as_in_the_paper():
    assert str(make("1f1b", 3, 3)).splitlines() == [
        "0F0,0F1,0F2,0B0,0B1,0B2",
        "1F0,1F1,1B0,1F2,1B1,1B2",
        "2F0,2B0,2F1,2B1,2F2,2B2",
    ]


def test_rounds_differ_by_one_microbatch_at_most():
    """Eleven microbatches on four ranks go in two rounds, of six and five."""
    order = [a for a in make("interleaved", 4, 11).orders[3] if a.kind == "F"]
    assert [a.stage for a in order] == [3] * 6 + [7] * 6 + [3] * 5 + [7] * 5


@pytest.mark.parametrize("arguments, said", [
    (("1f1b2", 2, 2), "schedule '1f1b2' is not known; did you mean '1f1b'?"),
    (("best", 2, 2), "is not known; these are known: gpipe, 1f1b, zb-h1"),
    (("zbv", 2, 2, 3), "'zbv' needs chunks=2, got 3. For another number, write 'interleaved'"),
    (("1f1b", 2, 0), "needs at least 1 rank, microbatch and chunk, got 2, 0 and 1"),
    (("interleaved", 2, 2, 0), "got 2, 2 and 0"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused(arguments, said):
    with pytest.raises(ValueError) as error:
        make(*arguments)
    assert said in str(error.value)
