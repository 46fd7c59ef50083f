"""Parts spread over stages: against all ways to do it where these are few, and figures of a large model."""

import itertools
import random
import time

import pytest

from zerofn.schedules import Part, Placement, balance, best, stage_costs

BLOCK, HEAD, EMBEDDING = Part(1.0, 1.1, 0.9, 0.05, saved=1.0, kept=1.0), Part(2.0, 2.0, 2.0, 0.05), Part(0.05, 0.0, 0.1)
SMALL = [Placement("line", 3), Placement("loop", 2, 2), Placement("v", 2, 2)]


def loads(parts, placement, sizes):
    """The work of each rank."""
    costs = stage_costs(parts, sizes, placement)
    stages = [placement.stages_of(r) for r in range(placement.ranks)]
    return [sum(costs.seconds(s, "F") + costs.seconds(s, "B") for s in mine) for mine in stages]


def every_way(parts, stages):
    for cuts in itertools.combinations(range(1, len(parts)), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(parts))))


@pytest.mark.parametrize("placement", SMALL, ids=str)
def test_no_way_to_spread_a_few_parts_has_a_less_loaded_rank(placement):
    rng = random.Random(0)
    for _ in range(3):
        parts = [Part(*(rng.uniform(0.3, 2.0) for _ in "fiw")) for _ in range(9)]
        sizes = balance(parts, placement, microbatches=10_000)  # so many that only the work counts
        least = min(max(loads(parts, placement, x)) for x in every_way(parts, placement.num_stages))
        assert max(loads(parts, placement, sizes)) <= least * 1.002


@pytest.mark.parametrize("placement", [*SMALL, Placement("v", 4, 2), Placement("loop", 4, 3)], ids=str)
def test_every_stage_has_a_part_and_every_part_a_stage(placement):
    for n in (placement.num_stages, placement.num_stages + 1, 40):
        for head in (1.0, 50.0):
            parts = [Part(1.0, 1.0, 1.0)] * (n - 1) + [Part(head, head, head)]
            sizes = balance(parts, placement, 8)
            assert len(sizes) == placement.num_stages and min(sizes) >= 1 and sum(sizes) == n


def test_ranks_are_balanced_and_not_stages():
    """In a V the last stage, with the head, and the first one are on rank 0: together they are as large as others."""
    placement, parts = Placement("v", 2, 2), [BLOCK] * 6 + [HEAD]
    sizes = balance(parts, placement, 8)
    assert loads(parts, placement, sizes) == pytest.approx([12.0, 12.0])
    assert sizes[0] + sizes[3] == 3  # blocks, of which one stands with the head, which counts for two


def test_of_equal_ways_the_boundary_that_is_cheap_to_cross_is_taken():
    """A norm of no work in the middle: the boundary is before or behind it."""
    one, norm = Part(1.0, 1.0, 1.0), Part(0.0, 0.0, 0.0)
    for before, behind, wanted in [(0.001, 0.002, (2, 3)), (0.002, 0.001, (3, 2))]:
        parts = [one, one, norm._replace(crossing=before), one._replace(crossing=behind), one]
        assert balance(parts, Placement("line", 2), 8) == wanted


def test_costs_of_stages_are_sums():
    parts = [Part(1, 2, 3, 0.0, 10, 20, 100), Part(2, 3, 4, 0.5, 11, 21, 101), Part(3, 4, 5, 0.7, 12, 22, 102)]
    costs = stage_costs(parts, (1, 2), Placement("line", 2))
    assert (costs.f, costs.i, costs.w) == ((1, 5), (2, 7), (3, 9))
    assert (costs.saved, costs.kept, costs.fixed) == ((10, 23), (20, 43), (100, 203))
    assert costs.down == costs.up == (0.5,)
    v = stage_costs([*parts, parts[0]], (1, 1, 1, 1), Placement("v", 2, 2))
    assert v.fixed == (200, 203)


@pytest.mark.parametrize("p, m, limit", [(4, 16, 1.10), (8, 32, 1.22)])
def test_a_model_with_a_head_of_two_layers_idles_little(p, m, limit):
    """All ranks would be busy at 1; layers dealt out equally take 1.18 and 1.42 with the best of schedules."""
    parts = [EMBEDDING, *[BLOCK] * 32, HEAD]
    work = m * sum(x.seconds for x in parts) / p
    costs = {}
    for placement in (Placement("loop", p, 2), Placement("v", p, 2)):
        costs[placement] = stage_costs(parts, balance(parts, placement, m), placement)
    line = best(costs, m, limit=1.5 * 32, effort=0)  # half as much again as p microbatches of 32 / p layers
    assert line.makespan / work <= limit


@pytest.mark.parametrize("placement", [Placement("v", 16, 2), Placement("loop", 16, 2)], ids=str)
def test_many_parts_take_little_time(placement):
    parts = [EMBEDDING, *[BLOCK] * 128, HEAD]
    begun = time.process_time()
    sizes = balance(parts, placement, 64)
    assert time.process_time() - begun < 2.0  # 0.3 where nothing else runs
    work = loads(parts, placement, sizes)
    assert max(work) <= sum(work) / 16 + BLOCK.seconds


def test_too_few_parts_are_refused():
    with pytest.raises(ValueError, match="a line of 4 ranks has 4 stages, but the model has only 3 parts"):
        balance([BLOCK] * 3, Placement("line", 4), 8)
