import pytest

from small_steps import gathers, lowered, num_alive, results_stay, users_of
from zerofn.graph.alias import positions
from zerofn.graph.edit import loops, wait_of
from zerofn.passes import SCHEDULE


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_next_gather_starts_when_the_one_before_has_come(precision):
    gm = lowered(*SCHEDULE, precision=precision)
    where = positions(gm.graph)
    found = gathers(gm)
    for before, start in zip(found, found[1:], strict=False):
        assert where[wait_of(before)] < where[start] < where[users_of(before)[0]]
        assert where[start] - where[wait_of(before)] <= 2  # with its cast


def test_two_units_at_most_beside_the_one_in_use():
    for num_layers in (6, 12):
        assert num_alive(lowered(*SCHEDULE, num_layers=num_layers)) == 3


def test_inside_a_loop_as_well():
    gm = lowered(num_microbatches=2)
    ((_, body),) = loops(gm)
    for each in SCHEDULE:
        each(body)
    assert len(gathers(body)) == 9 and not gathers(gm)
    assert num_alive(body) == 3


def bit_equal():
    return results_stay(*SCHEDULE)


def test_values_stay_under_the_whole_schedule(ranks):
    assert all(ranks(2, bit_equal))
