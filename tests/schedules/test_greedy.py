"""Ranks that decide in simulated time: what they do can be done, and takes the time that they think."""

import dataclasses
import random

import pytest

from zerofn.schedules import Costs, Placement, Schedule, check, simulate
from zerofn.schedules.greedy import STYLES, Ranks, by_costs, in_order, one_at_a_time

PLACEMENTS = [("line", 1), ("loop", 2), ("loop", 3), ("v", 2), ("v", 3)]


def uneven(placement, rng, kept=1.0):
    """Costs of stages and transfers that are all different; a rank keeps about a byte of a microbatch."""
    n = placement.num_stages
    columns = [tuple(rng.uniform(0.5, 1.5) for _ in range(n)) for _ in "fiw"]
    sends = [tuple(rng.uniform(0.0, 0.3) for _ in range(n - 1)) for _ in "du"]
    saved = tuple(rng.uniform(0.7, 1.3) / placement.chunks for _ in range(n))
    after_i = tuple(kept * rng.uniform(0.9, 1.1) * x for x in saved)
    return Costs(*columns, *sends, saved, after_i, fixed=(10.0,) * placement.ranks)


def run(placement, m, costs, limit, policy):
    """A schedule that ranks make, checked against the simulator."""
    ranks = Ranks(placement, m, costs, limit)
    seconds = ranks.run(policy(ranks))
    assert seconds is not None
    schedule = Schedule("greedy", placement, m, tuple(map(tuple, ranks.orders)))
    check(schedule)
    line = simulate(schedule, costs)
    assert line.makespan <= seconds * (1 + 1e-9)  # some wait, by their patience, for what comes later
    assert line.peak_bytes == pytest.approx(tuple(ranks.peaks))
    assert all(peak <= most * (1 + 1e-9) for peak, most in zip(line.peak_bytes, limit, strict=True))
    return schedule, seconds


def never_stuck(ranks, microbatches, factors, parts_kept=(0.1, 1.0, 2.4)):
    rng = random.Random(0)
    for style, chunks in PLACEMENTS:
        for p in ranks:
            placement = Placement(style, p, chunks)
            for kept in parts_kept:
                costs = uneven(placement, rng, kept)
                least = one_at_a_time(placement, costs)
                for m in microbatches:
                    for factor in factors:
                        limit = [10 + (x - 10) * factor for x in least]
                        for each in STYLES:
                            run(placement, m, costs, limit, lambda r, each=each: by_costs(r, each))


def test_no_rank_gets_stuck_where_one_microbatch_fits():
    never_stuck((3,), (4,), (1.0, 1.6), parts_kept=(0.1, 2.4))


@pytest.mark.whole
def test_no_rank_gets_stuck_for_many_more_numbers():
    never_stuck((2, 4, 8), (1, 9), (1.0, 1.3))


def test_one_microbatch_at_a_time_is_the_least():
    placement = Placement("v", 2, 2)
    costs = dataclasses.replace(Costs.even(4), kept=(1.0, 1.0, 3.0, 1.0), fixed=(10.0, 20.0))
    assert one_at_a_time(placement, costs) == (12.0, 24.0)
    ranks = Ranks(placement, 4, costs, (12.0, 23.9))
    assert ranks.run(by_costs(ranks, STYLES[0])) is None


def test_a_weight_fills_the_time_in_which_its_rank_would_wait():
    placement = Placement("line", 2)
    order = [[("F", 0)] * 3, [("F", 1), ("I", 1)] * 3]
    schedule, seconds = run(placement, 3, Costs.even(2, send=1.0), [9.0, 9.0], lambda r: in_order(r, order, 0.0))
    assert str(schedule).splitlines()[1] == "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2"
    late = Costs((2.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0,), (0.0,), (1.0, 1.0), (1.0, 1.0))  # F come every 2 seconds
    schedule, _ = run(placement, 3, late, [9.0, 9.0], lambda r: in_order(r, order, 0.0))
    assert str(schedule).splitlines()[1] == "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2"


def test_a_weight_goes_first_where_memory_asks_for_it():
    order = [[("F", 0)] * 3, [("F", 1), ("I", 1)] * 3]
    schedule, _ = run(Placement("line", 2), 3, Costs.even(2), [9.0, 1.0], lambda r: in_order(r, order, 0.0))
    assert str(schedule).splitlines()[1] == "1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2"


def test_what_takes_too_long_is_left():
    placement = Placement("line", 2)
    times = []
    for bound in (13.9, 14.1):
        ranks = Ranks(placement, 4, Costs.even(2), (9.0, 9.0))
        gpipe = [[("F", 0)] * 4, [("F", 1)] * 4 + [("I", 1)] * 4]
        times.append(ranks.run(in_order(ranks, gpipe, 0.0), bound))
    assert times[0] is None and times[1] is not None
