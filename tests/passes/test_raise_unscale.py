import importlib

import pytest
import torch
import torch.distributed as dist

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, lowered, results, scatters, state_of, train_step_of
from zerofn import Precision
from zerofn.graph.alias import positions
from zerofn.graph.node_kinds import is_fetch, wait_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.raise_reduce_scatters import raise_reduce_scatters
from zerofn.passes.raise_unscale import raise_unscale

HALF = Precision(torch.float32, torch.float16, torch.float16)
mul = torch.ops.aten.mul.Tensor


def test_a_gradient_is_unscaled_right_behind_its_reduction():
    gm = lowered(canonicalize, raise_reduce_scatters, raise_unscale, precision="fp16")
    where, nodes = positions(gm.graph), list(gm.graph.nodes)
    assert len(scatters(gm)) > 1
    for start in scatters(gm):
        unscaled = next(user for user in wait_of(start).users if user.target is mul)
        between = nodes[where[wait_of(start)] + 1 : where[unscaled]]
        assert all(not x.meta["val"].dim() for x in between), between  # the number it is multiplied by


@pytest.mark.parametrize("goes", [False, True])
def test_a_cast_goes_with_it_where_the_gradient_leaves(monkeypatch, goes):
    module = importlib.import_module("zerofn.passes.raise_unscale")
    monkeypatch.setattr(module, "is_fetch", lambda node: goes or is_fetch(node))
    gm = lowered(canonicalize, raise_reduce_scatters, raise_unscale, precision=HALF)
    where = positions(gm.graph)
    casts = [user for start in scatters(gm) for user in wait_of(start).users]
    early = [where[cast] < where[scatters(gm)[-1]] for cast in casts]
    assert any(early) == goes


def stays(precision):
    step, batch = train_step_of(build(6)), batch_of(dist.get_rank())
    state = state_of(build(6), 3, precision=precision)
    schedules = (canonicalize,), (canonicalize, raise_reduce_scatters, raise_unscale)
    before, after = (results(captured(step, state, batch, *passes), state, batch) for passes in schedules)
    assert_same_trees(after, before, f"stage 3, {precision=}")


@pytest.mark.part(precision=["fp16"])
@pytest.mark.parametrize("precision", ["fp16", HALF])
def test_results_stay(ranks, precision):
    ranks(2, stays, precision)
