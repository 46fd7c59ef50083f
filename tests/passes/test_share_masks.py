import pytest
import torch

import zerofn
from tests.support.masked_attention import LENGTH, checkpointed, loss_with, masked_batch
from tests.support.same import assert_same_trees
from tests.support.small_steps import build, captured, results, state_of, step_with
from zerofn.graph.liveness import blocks
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.functionalize import functionalize
from zerofn.passes.share_masks import share_masks
from zerofn.util.nested_arguments import tensors_in

BEFORE = canonicalize, functionalize


def pairs(program):
    """How many values of floats a step has for each pair of tokens."""
    values = [n.meta["val"] for n in program.gm.graph.nodes if n.op == "call_function"]
    return sum(isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape[-2:] == (LENGTH,) * 2 for x in values)


def programs(loss_fn):
    step, state = step_with(loss_fn), state_of(build(), 3)
    return [captured(step, state, masked_batch(), *passes) for passes in (BEFORE, (*BEFORE, share_masks))]


def test_all_layers_have_one_mask_and_values_stay():
    before, after = programs(loss_with(lambda batch: [batch["mask"]]))
    assert (pairs(before), pairs(after)) == (4, 1)
    state, batch = state_of(build(), 3), masked_batch()
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def test_two_masks_stay_two_and_what_they_are_made_of_is_shared():
    def masks(batch):
        return [
            batch["mask"] & (batch["x"][:, None, None, :, 0] > -1),
            batch["mask"] & (batch["y"][:, None, None, :, 0] > -1),
        ]

    def twice(batch):
        return masks(batch) + masks(batch)

    before, after = programs(loss_with(twice))
    assert (pairs(before), pairs(after)) == (4, 2)
    compared = [sum(n.target is torch.ops.aten.gt.Scalar for n in x.gm.graph.nodes) for x in (before, after)]
    assert compared == [4, 2]


def test_a_mask_that_something_else_reads_or_writes_stays_its_own():
    def loss_fn(p, batch):
        first, second = (torch.where(batch["mask"], 0.0, float("-inf")) for _ in range(2))
        third, fourth = (torch.where(batch["mask"], 0.0, 1.0) for _ in range(2))
        fourth[0, 0].mul_(2)
        added = third.square().sum()
        return loss_with(lambda batch: [first, second, third, fourth])(p, batch) + added

    before, after = programs(loss_fn)
    assert pairs(before) - pairs(after) == 1
    state, batch = state_of(build(), 3), masked_batch()
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def test_masks_that_are_drawn_stay_apart():
    def masks(batch):
        return [torch.rand(LENGTH, LENGTH) for _ in range(4)]

    before, after = programs(loss_with(masks))
    assert pairs(before) == pairs(after) >= 4


def test_numbers_of_other_kinds_are_other_masks():
    def masks(batch):
        return [torch.full((LENGTH, LENGTH), x, dtype=torch.float32) for x in (1, True, 1.0, 1)]

    before, after = programs(loss_with(masks))
    assert (pairs(before), pairs(after)) == (4, 3)


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("layer", "remat"), [(None, None), (None, "full"), (checkpointed, None)])
def test_a_step_saves_one_mask_and_has_the_bits_of_the_eager_one(stage, layer, remat):
    step, batch = step_with(loss_with(lambda batch: [batch["mask"]], layer=layer)), masked_batch()
    compiled = zerofn.compile(step, remat=remat)
    graph = compiled.lower(state_of(build(), stage), batch).graph.graph
    saved = tensors_in([x.node.meta["val"] for x in blocks(graph) if x.kind == "activations"])
    assert sum(x.shape[-2:] == (LENGTH,) * 2 for x in saved) <= 1
    found, expected = state_of(build(), stage), state_of(build(), stage)
    for _ in range(2):
        (found, loss), (expected, eager) = compiled(found, batch), step(expected, batch)
    assert_same_trees((loss, zerofn.unshard(found.params)), (eager, zerofn.unshard(expected.params)))
