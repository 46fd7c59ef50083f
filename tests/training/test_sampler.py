"""Ranks that share rows read the same, and the others theirs."""

import pytest

import zerofn
from zerofn.comm.mesh import Mesh


def rows(sizes, options=None):
    mesh = Mesh.make(**sizes)
    sampler = zerofn.sampler(range(11), mesh, **(options or {}))
    sampler.set_epoch(3)
    return mesh.rows.rank, list(sampler)


@pytest.mark.parametrize("sizes", [{"data": 2, "context": 2}, {"replicate": 2, "data": 2}, {"tensor": 4}], ids=str)
def test_ranks_with_rows_of_their_own_have_each_once(ranks, sizes):
    found = {}
    for place, mine in ranks(4, rows, sizes):
        assert found.setdefault(place, mine) == mine
    size = len(found)
    assert len({len(x) for x in found.values()}) == 1 and len(found[0]) == 11 // size
    assert len({k for x in found.values() for k in x}) == 11 // size * size


def test_the_order_follows_from_the_seed_and_can_be_left(ranks):
    options = ({"seed": 1}, {"seed": 2}, {"shuffle": False})
    a, b, plain = (ranks(1, rows, {"data": 1}, x)[0][1] for x in options)
    assert a != b and sorted(a) == sorted(b) == plain == list(range(11))


def few():
    with pytest.raises(ValueError, match="2 ranks need different rows, but the dataset has only 1"):
        zerofn.sampler([0], Mesh.make(data=2))


def test_too_few_rows(ranks):
    ranks(2, few)
