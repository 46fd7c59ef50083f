"""What travels to other processes: optimizers, and functions that use torch's operators."""

import pytest
import torch

import zerofn
from tests.optim.test_transformations import FUSED, MORE
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.launch.payload import packed, unpacked

PARAMS = {"w": torch.linspace(-1, 1, 6).view(2, 3), "b": torch.ones(3)}


def three_updates(tx):
    params, state = PARAMS, tx.init(PARAMS)
    for k in range(3):
        updates, state = tx.update(zerofn.tree_map(lambda p, k=k: torch.sin(p + k), params), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", [*FUSED, *MORE])
def test_an_optimizer_travels(name):
    tx = {**FUSED, **MORE}[name]
    there = unpacked(packed(tx, "tx"))
    assert repr(there) == repr(tx)
    assert_same_trees(three_updates(there), three_updates(tx))


def test_a_users_own_optimizer_travels():
    rate = 0.5
    own = optim.GradientTransformation(
        lambda params: torch.ops.aten.zeros([]), lambda g, s, p=None: (zerofn.tree_map(lambda x: -rate * x, g), s + 1)
    )
    assert_same_trees(three_updates(unpacked(packed(own, "tx"))), three_updates(own))
