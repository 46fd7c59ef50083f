"""What `check` refuses in schedules that people write, and in what words."""

import dataclasses

import pytest

from zerofn.schedules import Action, Placement, Schedule, check, make

LINE = Placement("line", 2)


def hand_written(*rows, placement=LINE, microbatches=2):
    orders = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("mine", placement, microbatches, orders)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1")


def test_a_schedule_may_split_some_backward_passes():
    check(hand_written(*GOOD))


@pytest.mark.parametrize("rows, said", [
    ((GOOD[0],), "a line of 2 ranks has 2 lists of actions, got 1"),
    (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), r"rank 0, entry 4 \(1F0\): in a line of 2 ranks, stage 1 is on rank 1"),
    ((GOOD[0], GOOD[1] + " 2F0"), r"rank 1, entry 5 \(2F0\): a line of 2 ranks has stages 0 to 1"),
    ((GOOD[0] + " 0F2", GOOD[1]), r"rank 0, entry 4 \(0F2\): microbatches are 0 to 1"),
    (("0F0 0F1 0I0 0W0 0B1", GOOD[1]), r"rank 0, entry 2 \(0I0\): stage 0 has no input .* write 0B0"),
    ((GOOD[0] + " 0F1", GOOD[1]), r"rank 0, entry 4 \(0F1\): entry 1 \(0F1\) has already done this work"),
    ((GOOD[0], "1F0 1B0 1F1 1I1 1W1 1B1"), r"rank 1, entry 5 \(1B1\): entry 3 \(1I1\) has already done this work"),
    ((GOOD[0], "1F0 1B0 1W0 1F1 1B1"), r"rank 1, entry 2 \(1W0\): entry 1 \(1B0\) has already done this work"),
    (("0F0 0B0 0B1", GOOD[1]), "stage 0 has no F of microbatch 1; add 0F1 to rank 0"),
    (("0F0 0F1 0B0", GOOD[1]), "stage 0 has no B of microbatch 1; add 0B1 to rank 0"),
    ((GOOD[0], "1F0 1F1 1B0"), "stage 1 has no B of microbatch 1; add 1B1, or 1I1 and 1W1, to rank 1"),
    ((GOOD[0], "1F0 1B0 1F1 1I1"), "stage 1 has 1I1 but no 1W1; add 1W1 to rank 1, or write 1B1"),
    (("0F1 0F0 0B0 0B1", GOOD[1]), r"rank 0, entry 1 \(0F0\) comes after 0F1, but forward passes of a stage must"),
    ((GOOD[0], "1F0 1F1 1B1 1B0"), r"rank 1, entry 3 \(1B0\) comes after 1B1, but gradients of weights of a stage"),
    (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
     r"no rank can continue; these wait: rank 0 at entry 1 \(0B0\) for 1I0 of rank 1; rank 1 at entry 1 \(1F1\)"),
    ((GOOD[0], "1F0 1B0 1F1 1W1 1I1"), r"rank 1 at entry 3 \(1W1\) for 1I1 of rank 1"),
])  # fmt: skip
def test_what_cannot_run_is_refused(rows, said):
    with pytest.raises(ValueError, match=f"schedule 'mine': .*{said}"):
        check(hand_written(*rows))


def test_the_gradient_of_a_later_microbatch_may_go_first():
    check(hand_written(GOOD[0], "1F0 1F1 1I1 1I0 1W0 1W1"))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-zb", "zbv"])
def test_no_action_may_be_missing(name):
    """Without any one action, every schedule is refused."""
    schedule = make(name, ranks=2, microbatches=3)
    for rank, order in enumerate(schedule.orders):
        for i in range(len(order)):
            orders = list(schedule.orders)
            orders[rank] = order[:i] + order[i + 1 :]
            with pytest.raises(ValueError, match="add "):
                check(dataclasses.replace(schedule, orders=tuple(orders)))
