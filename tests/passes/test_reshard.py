from collections import Counter

from tests.support.small_steps import assert_results_stay, gathers, lowered, num_alive, users_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.reshard import reshard
from zerofn.passes.sink_gathers import sink_gathers

BEFORE = (canonicalize, sink_gathers)


def test_forward_and_backward_have_a_gather_each_and_the_last_layers_one():
    gm = lowered(*BEFORE, reshard)
    num_gathers = Counter(g.args[3] for g in gathers(gm))
    # The first layer's weight has no use in the backward pass: its input needs no gradient. The last three
    # units are used again with fewer than three others in between.
    assert num_gathers == {"0": 1, "3": 2, "6": 2, "9": 1, "12": 1, "15": 1}


def test_few_units_are_held_from_forward_to_backward():
    assert num_alive(lowered(*BEFORE)) >= 5
    assert num_alive(lowered(*BEFORE, reshard)) == 3
    assert num_alive(lowered(*BEFORE, reshard, num_layers=12)) == 3


def test_users_are_split_among_the_copies():
    before, after = lowered(*BEFORE), lowered(*BEFORE, reshard)
    for unit in ("0", "3", "6", "9", "12", "15"):
        uses = [len(users_of(g)) for g in gathers(before) if g.args[3] == unit]
        assert sum(uses) == sum(len(users_of(g)) for g in gathers(after) if g.args[3] == unit)


def test_values_stay(ranks):
    ranks(2, assert_results_stay, *BEFORE, reshard)
