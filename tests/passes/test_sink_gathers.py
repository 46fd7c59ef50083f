import pytest
import torch

from tests.support.small_steps import (
    assert_results_stay,
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    state_of,
    train_step_of,
    users_of,
)
from zerofn.graph.alias import positions
from zerofn.graph.edit import weight_chain
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.sink_gathers import sink_gathers

aten = torch.ops.aten


def num_before_use(gm):
    """Per gather: how many nodes that compute stand between it and its first use."""
    nodes, where, chain = list(gm.graph.nodes), positions(gm.graph), set(weight_chain(gm.graph))
    return [sum(n not in chain for n in nodes[where[g] : where[users_of(g)[0]]]) for g in gathers(gm)]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_gather_stands_right_before_its_first_use(precision):
    module = build()
    with fake_ranks(2):
        state = state_of(module, 3, precision=precision)
        before = captured(train_step_of(module), state, batch_of(), canonicalize)
        after = captured(train_step_of(module), state, batch_of(), canonicalize, sink_gathers)
    assert len(gathers(after.gm)) == len(gathers(before.gm)) == 4
    assert max(num_before_use(before.gm)) > 1  # capture leaves them at the top
    assert num_before_use(after.gm) == [0, 0, 0, 0]


def test_values_stay(ranks):
    ranks(2, assert_results_stay, canonicalize, sink_gathers)
