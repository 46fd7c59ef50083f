"""The fastest schedule within a limit: never slower than those with names, and within the limit."""

import dataclasses
import random

import pytest

from tests.schedules.test_greedy import uneven
from tests.schedules.test_messages import edges_of
from tests.support.rendezvous import stuck
from zerofn.schedules import NAMES, Costs, Placement, best, check, fill, make, messages, simulate, usual_limit
from zerofn.schedules.greedy import one_at_a_time

QUICK = 5000  # actions simulated to improve on a schedule


def named_for(placement, m):
    return [
        make(name, placement.ranks, m, placement.chunks)
        for name, row in NAMES.items()
        if row.style == placement.style and (row.any_chunks or row.chunks == placement.chunks)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_filling_keeps_f_and_i(name):
    schedule = make(name, 4, 6)
    costs = uneven(schedule.placement, random.Random(1))
    for patience in (0.0, 0.5):
        filled = fill(schedule, costs, patience=patience)
        check(filled)
        for before, after in zip(schedule.orders, filled.orders, strict=True):
            kept = [[a.makes for a in order if a.stage and a.kind != "W" or a.kind == "F"] for order in (before, after)]
            assert kept[0] == kept[1]


def test_filling_makes_zb_h1_of_1f1b_and_better():
    """With W of zero-bubble schedules where ranks would wait, and no more memory."""
    costs = Costs.even(4)
    filled = simulate(fill(make("1f1b", 4, 8), costs, limit=4.0), costs)
    h1 = simulate(make("zb-h1", 4, 8), costs)
    assert filled.makespan <= h1.makespan and max(filled.peak_bytes) <= max(h1.peak_bytes)
    assert simulate(make("1f1b", 4, 8), costs).makespan > h1.makespan


def test_what_exceeds_the_limit_cannot_be_filled():
    assert fill(make("gpipe", 2, 4), Costs.even(2), limit=3.0) is None
    assert fill(make("gpipe", 2, 4), Costs.even(2), limit=4.0) is not None


@pytest.mark.parametrize("placement", [Placement("line", 3), Placement("loop", 3, 2), Placement("v", 3, 2)], ids=str)
def test_the_best_is_never_slower_than_a_named_one_within_the_limit(placement):
    rng = random.Random(2)
    for m in (1, 4, 7):
        costs = uneven(placement, rng)
        least = one_at_a_time(placement, costs)
        for factor in (1.0, 1.7, 3.0):
            limit = [10 + (x - 10) * factor for x in least]
            line = best({placement: costs}, m, limit, effort=QUICK)
            check(line.schedule)
            assert line.schedule.placement == placement and line.schedule.microbatches == m
            assert all(x <= y * (1 + 1e-9) for x, y in zip(line.peak_bytes, limit, strict=True))
            for schedule in named_for(placement, m):
                named = simulate(schedule, costs)
                if all(x <= y for x, y in zip(named.peak_bytes, limit, strict=True)):
                    assert line.makespan <= named.makespan * (1 + 1e-9)


def test_the_fastest_placement_is_taken():
    line, v = Placement("line", 4), Placement("v", 4, 2)
    halves = Costs.even(8, 0.5, 0.5, 0.5)
    assert best({line: Costs.even(4), v: halves}, 16, effort=0).schedule.placement == v
    slow = Costs.even(8, 0.5, 0.5, 0.5, send=4.0)
    assert best({line: Costs.even(4), v: slow}, 16, effort=0).schedule.placement == line


def test_of_equally_fast_schedules_that_with_less_memory_is_taken():
    assert best({Placement("line", 1): Costs.even(1)}, 6, effort=0).schedule.name == "1f1b"


def test_more_memory_makes_it_no_slower():
    placement = Placement("v", 4, 2)
    costs = Costs.even(8, 0.5, 0.7, 0.4, send=0.05)
    times = [best({placement: costs}, 8, limit, effort=QUICK).makespan for limit in (3, 4, 6, 8, 12, None)]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_no_schedule_that_is_found_gets_stuck():
    rng = random.Random(4)
    for placement in (Placement("line", 4), Placement("loop", 3, 2), Placement("v", 4, 2)):
        costs = uneven(placement, rng)
        limit = [10 + (x - 10) * 2 for x in one_at_a_time(placement, costs)]
        schedule = best({placement: costs}, 7, limit, effort=QUICK).schedule
        for skip in (False, True):
            assert stuck(messages(schedule, edges_of(placement.num_stages, skip), costs)) == []


def test_the_same_costs_give_the_same_schedule():
    placement = Placement("v", 3, 2)
    costs = uneven(placement, random.Random(3))
    found = {str(best({placement: costs}, 6, 16.0, effort=QUICK).schedule) for _ in range(3)}
    assert len(found) == 1


def test_small_changes_make_some_schedules_faster():
    """So that the search is of use: without them, the same costs give a slower one."""
    placement = Placement("v", 4, 2)
    costs = Costs.even(8, 0.5, 0.7, 0.4, send=0.05)
    first, improved = (best({placement: costs}, 4, 4.0, effort=effort).makespan for effort in (0, 60_000))
    assert improved < 0.99 * first


def test_a_limit_for_less_than_one_microbatch_is_refused():
    costs = {Placement("line", 2): Costs.even(2), Placement("v", 2, 2): Costs.even(4)}
    with pytest.raises(MemoryError) as error:
        best(costs, 4, 0.5)
    assert str(error.value) == (
        "no schedule fits: rank 0 of a line of 2 ranks holds 1 B with one microbatch, and its limit is 0.5 B; "
        "rank 0 of a V of 2 ranks with 2 stages each holds 2 B with one microbatch, and its limit is 0.5 B."
    )
    assert best(costs, 4, (1.0, 1.0), effort=0).schedule.placement == Placement("line", 2)
    with pytest.raises(ValueError, match="a line of 2 ranks needs 2 limits, got 3"):
        best(costs, 4, (1.0, 1.0, 1.0))


def test_the_usual_limit_is_what_a_named_schedule_of_each_placement_keeps():
    styles = [Placement("line", 4), Placement("loop", 4, 2), Placement("v", 4, 2)]
    costs = {x: uneven(x, random.Random(4)) for x in styles}
    limit = usual_limit(costs, 8)
    for placement, its in costs.items():
        assert min(max(simulate(x, its).peak_bytes) for x in named_for(placement, 8)) <= limit
        assert max(best({placement: its}, 8, limit, effort=0).peak_bytes) <= limit * (1 + 1e-9)


def test_the_fastest_schedule_without_a_limit_keeps_what_late_w_need():
    v = Placement("v", 4, 2)
    costs = {v: dataclasses.replace(uneven(v, random.Random(1)), saved=(1.0,) * 8, kept=(1.0,) * 8)}
    limit = usual_limit(costs, 8)
    kept, free = (max(best(costs, 8, each, effort=0).peak_bytes) for each in (limit, None))
    assert kept <= limit < free
