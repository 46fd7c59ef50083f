"""Stages and schedule found together: never slower than one after the other, and within the limit."""

import random

import pytest

from zerofn.schedules import Part, Placement, arrange, balance, best, check, stage_costs

QUICK = 20_000  # actions simulated to improve on what balanced stages give
LOOP, V = Placement("loop", 3, 2), Placement("v", 3, 2)


def uneven_parts(n):
    """Blocks that differ by a tenth, and a head of two blocks."""
    rng = random.Random(0)
    blocks = [Part(rng.uniform(0.9, 1.1), 1.1, rng.uniform(0.8, 1.0), 0.05, 1.0, 1.0) for _ in range(n - 1)]
    return [*blocks, Part(2.0, 2.0, 2.0, 0.05)]


def test_it_is_never_slower_than_balanced_stages_and_their_best_schedule():
    parts, limit = uneven_parts(17), 1.5 * 16
    found = arrange(parts, [LOOP, V], 8, limit, effort=QUICK)
    check(found.line.schedule)
    placement = found.line.schedule.placement
    assert len(found.sizes) == placement.num_stages and sum(found.sizes) == 17 and min(found.sizes) >= 1
    assert found.costs == stage_costs(parts, found.sizes, placement)
    assert max(found.line.peak_bytes) <= limit
    alone = []
    for each in (LOOP, V):
        costs = stage_costs(parts, balance(parts, each, 8), each)
        alone.append(best({each: costs}, 8, limit, effort=0).makespan)
    assert found.line.makespan <= min(alone)


def test_it_is_faster_where_balanced_ranks_have_uneven_stages():
    parts, placement = uneven_parts(33), Placement("loop", 4, 2)
    costs = stage_costs(parts, balance(parts, placement, 16), placement)
    alone = best({placement: costs}, 16, 1.5 * 32, effort=QUICK).makespan
    assert arrange(parts, [placement], 16, 1.5 * 32, effort=QUICK).line.makespan < 0.97 * alone


def test_the_same_parts_give_the_same_arrangement():
    first, second = (arrange(uneven_parts(9), [V], 4, effort=QUICK) for _ in range(2))
    assert first.sizes == second.sizes and str(first.line.schedule) == str(second.line.schedule)


def test_placements_with_more_stages_than_parts_are_left_out():
    found = arrange(uneven_parts(6), [Placement("loop", 3, 4), V], 4, effort=0)
    assert found.line.schedule.placement == V and found.sizes == (1,) * 6
    with pytest.raises(
        ValueError, match="a loop of 3 ranks with 4 stages each has 12 stages, and the model has 6 parts"
    ):
        arrange(uneven_parts(6), [Placement("loop", 3, 4)], 4)


def test_a_limit_for_less_than_one_microbatch_is_refused():
    with pytest.raises(MemoryError, match="no schedule fits: rank . of a v of 3 ranks with 2 stages each holds"):
        arrange(uneven_parts(9), [V], 4, 1.0)


def test_one_stage_is_arranged():
    found = arrange(uneven_parts(3), [Placement("line", 1)], 2, effort=500)
    assert found.sizes == (3,) and found.line.idle == (0.0,)
