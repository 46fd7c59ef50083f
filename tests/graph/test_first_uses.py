"""Cut points, in the order of their use."""

from tests.graph.test_cut import layers_of
from zerofn.graph.first_uses import first_uses


def test_cut_points_come_in_the_order_of_use():
    region = layers_of().region()
    found = first_uses(region, lambda name: name.split(".")[0])
    assert [x.name for x in found] == ["0", "3", "6", "9"]
    assert all({name.split(".")[0] for name in x.leaves} == {x.name} and len(x.leaves) == 2 for x in found)
    assert [(x.sent, x.returned) for x in found] == [(0, 0)] + [(256, 256)] * 3
    assert [y for x in found for y in x.forward] == region.forward
    assert sorted((y for x in found for y in x.backward), key=region.where.get) == region.backward
    assert all(x.forward and x.backward for x in found)


def test_one_unit_is_one_cut_point():
    (only,) = first_uses(layers_of().region(), lambda name: "all")
    assert only.sent == only.returned == 0 and len(only.leaves) == 8
