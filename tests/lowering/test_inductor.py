"""Regions that are compiled: to rounding of the eager step, with the same bits at every stage."""

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import optim
from zerofn.lowering import inductor, regions
from zerofn.util.process import instead

pytestmark = pytest.mark.slow  # Inductor compiles

NEAR = 1e-6


def small(stage=3, **options):
    """What two steps of a few layers leave."""
    module = build(2)
    state = state_of(module, stage, optim.sgd(0.1))
    step, losses = zerofn.compile(train_step_of(module), **options), []
    for k in range(2):
        state, aux = step(state, batch_of(rows=8, seed=k))
        losses.append(aux["loss"])
    return losses, zerofn.unshard(state.params)


@pytest.fixture(autouse=True)
def of_its_own():
    """A process that has compiled nothing."""
    with instead(regions.Compiled()):
        yield


def test_compiled_is_near_eager_and_the_same_at_every_stage(caplog):
    near, found = small(), [small(stage, backend="inductor") for stage in range(4)]
    assert "operation by operation" not in caplog.text
    for each in found[1:]:
        assert_same_trees(each, found[0])
    for a, b in zip(zerofn.tree.leaves(found[0]), zerofn.tree.leaves(near), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=NEAR)


def test_a_region_that_does_not_compile_runs_as_it_is(monkeypatch, caplog):
    def fails(*args):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(regions, "_read", lambda path: None)
    monkeypatch.setattr(regions, "compile_graph", fails)
    assert_same_trees(small(backend="inductor"), small())
    assert (
        "runs operation by operation: RuntimeError: no such instruction" in caplog.text
        and "and more" not in caplog.text
    )


def test_without_a_compiler_a_step_is_eager(monkeypatch, caplog):
    monkeypatch.setattr(inductor, "missing", lambda gm: "There is no compiler.")
    assert_same_trees(small(backend="inductor"), small())
    assert caplog.text.count("There is no compiler. Regions run operation by operation.") == 1


def test_shapes_that_change_at_every_step_are_compiled_a_few_times(monkeypatch, caplog):
    """As many as a step may have before it warns of its captures."""
    seen = []

    def compiled(gm):
        seen.append(gm)
        return regions.Region(lambda inputs: gm(*inputs), [])

    monkeypatch.setattr(inductor, "compiled", compiled)
    monkeypatch.setattr(inductor, "known", lambda gm: None)
    module = build(2)
    state = state_of(module, 3, optim.sgd(0.1))
    step = zerofn.compile(train_step_of(module), backend="inductor")
    for rows in range(1, 12):
        state, _ = step(state, batch_of(rows=rows))
        if rows == inductor.MANY:
            compiled_until_then = len(seen)
    assert len(seen) == compiled_until_then
    assert caplog.text.count("regions were compiled for each") == 1
