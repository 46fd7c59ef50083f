"""`gather(only=)`: the chosen leaves, and no communication for units without one."""

import pytest
import torch

import zerofn

PARAMS = {f"h.{k}.w": torch.arange(70_000.0) + k for k in range(3)} | {"head": torch.ones(5)}


def sharded():
    return zerofn.shard({"params": PARAMS}, stage=3)["params"]


@pytest.mark.parametrize(
    "only, names", [("h.1.w", {"h.1.w"}), ("h", {"h.0.w", "h.1.w", "h.2.w"}), (lambda name: name == "head", {"head"})]
)
def test_the_chosen_leaves(only, names):
    found = zerofn.gather(sharded(), only=only)
    assert {k for k, x in found.items() if x is not None} == names
    assert all(torch.equal(found[k], PARAMS[k]) for k in names)


def on_ranks():
    params = sharded()
    alone = zerofn.compile(lambda p, _: zerofn.gather(p, only="h.1.w")["h.1.w"])
    assert torch.equal(alone(params, None), PARAMS["h.1.w"])
    return alone.lower(params, None).sent, params.layout.units[1].size


def test_one_unit_is_sent(ranks):
    (sent, size), _ = ranks(2, on_ranks)
    assert sent == size * 4 // 2


def test_a_name_that_is_not_there():
    with pytest.raises(KeyError, match="only='h.9' selects no leaf"):
        zerofn.gather(sharded(), only="h.9")
