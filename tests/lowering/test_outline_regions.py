"""Regions: the step with them has the bits of the step without them, and they are the same at every stage."""

import operator

import pytest
import torch
import torch.nn.functional as F

import zerofn
from tests.support.outlined_steps import OUTLINED, trained
from tests.support.same import assert_same_trees
from tests.support.tiny_models import BUILDERS
from zerofn import optim
from zerofn._torch_compat import OpOverload
from zerofn.cost.op_cost import touched_bytes
from zerofn.graph.alias import is_view, writes
from zerofn.graph.nested import REGION, calls
from zerofn.graph.phase import phase_of
from zerofn.ops.registry import EXACT, FUSIBLE

WAYS = {
    "alone": {},
    "bf16": {"precision": "bf16"},
    "microbatches": {"num_microbatches": 2},
    "recomputed": {"remat": "full"},
    "not donated": {"donate": False},
}


@pytest.mark.part(way=["alone"], name=["mixtral", "resnet"])
@pytest.mark.part(name=["llama"], way=["recomputed"])
@pytest.mark.parametrize(
    "name, way",
    [
        *((name, "alone") for name in BUILDERS),
        *(("llama", way) for way in WAYS if way != "alone"),
        ("t5", "recomputed"),
    ],
)
def test_bits_are_those_of_the_step_without_regions(name, way):
    plain, alone, none = trained(name, **WAYS[way])
    found, planned, regions = trained(name, passes=OUTLINED, **WAYS[way])
    assert_same_trees(found, plain)
    assert regions and not none
    assert (
        planned.memory().total <= 1.05 * alone.memory().total
    )  # results lie beside inputs that an operation alone would write over


def on_ranks(name, stages):
    found = {}
    for stage in stages:
        for n in (1, 2):
            results, _, regions = trained(name, stage, n, passes=OUTLINED)
            assert_same_trees(results, trained(name, stage, n)[0], f"stage {stage}")
            names = [call.body.meta[REGION] for call in regions]
            assert names and names == found.setdefault(n, names), f"stage {stage}: other regions than at {stages[0]}"
    return found


@pytest.mark.whole  # test_conv_regions.py has another model
@pytest.mark.part(stages=[(0, 3)])
@pytest.mark.parametrize(("name", "stages"), [("llama", (0, 3)), ("llama", (0, 1, 2)), ("gpt2", (0, 1, 2, 3))])
def test_regions_are_the_same_at_every_stage(ranks, name, stages):
    first, second = ranks(2, on_ranks, name, stages)
    assert first == second


def test_regions_compute_and_do_nothing_else():
    for call in trained("t5", passes=OUTLINED)[2]:
        nodes = [x for x in call.body.graph.nodes if x.op == "call_function"]
        assert nodes and not any(map(writes, nodes))
        assert all(phase_of(x) in ("forward", "backward") for x in nodes)
        made = [x for x in call.results if not is_view(x)]
        assert len(set(made)) == len(call.results)


def test_deeper_models_have_no_more_regions_to_compile():
    found = [
        [call.body.meta[REGION] for call in trained(name, passes=OUTLINED)[2]] for name in ("blocks", "deep blocks")
    ]
    assert len(found[0]) < len(found[1]) and set(found[0]) == set(found[1])


def test_a_lone_operation_is_a_region_where_compilers_round_in_other_ways():
    lone = [targets(call.body) for call in trained("blocks", passes=OUTLINED)[2]]
    found = {x for each in lone if len(each) == 1 for x in each}
    assert {torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default} <= found
    assert not found & EXACT


def targets(gm):
    """What a region computes."""
    return [
        x.target
        for x in gm.graph.nodes
        if x.op == "call_function" and not is_view(x) and x.target is not operator.getitem
    ]


@pytest.mark.part(name=["gpt2"])
@pytest.mark.parametrize("name, least", [("llama", 0.94), ("gpt2", 0.85), ("t5", 0.85)])
def test_most_of_the_memory_that_a_compiler_could_fuse_is_touched_in_regions(name, least):
    _, plan, found = trained(name, passes=OUTLINED)
    inside = sum(touched_bytes(x) for call in found for x in call.body.graph.nodes)
    outside = sum(touched_bytes(x) for x in plan.program.gm.graph.nodes if may_be_fused(x))
    assert inside / (inside + outside) >= least


def test_sizes_that_depend_on_data_stay_outside():
    def step(state, x):
        def loss_fn(p):
            y = (x * p["w"]).tanh().exp()
            return (y[x > 0].sin().sigmoid() * 2 + y.square().mean()).mean()

        loss, grads = state.value_and_grad(loss_fn)()
        return state.apply_gradients(grads), loss

    def after(passes):
        state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(4)}, tx=optim.sgd(0.1)))
        run = zerofn.compile(step, passes=passes)
        for k in range(3):
            state, loss = run(state, torch.randn(9, 4, generator=torch.Generator().manual_seed(k)))
        return loss, run.lower(state, torch.ones(9, 4)).program.gm

    (expected, _), (loss, gm) = after(None), after(OUTLINED)
    inside = {x for _, call in calls(gm) for x in targets(call.body)}
    assert torch.equal(loss, expected) and torch.ops.aten.exp.default in inside
    assert not inside & {torch.ops.aten.sin.default, torch.ops.aten.sigmoid.default}


def may_be_fused(node):
    """Also what writes its result to memory that is there."""
    if not isinstance(node.target, OpOverload) or not phase_of(node):
        return False
    packet = node.target.overloadpacket
    forms = {getattr(packet, x) for x in packet.overloads()}
    return bool(forms & FUSIBLE) or any({torch.Tag.pointwise, torch.Tag.reduction} & {*x.tags} for x in forms)


def statistics(p, x, state):
    """Batch norm writes to copies of its running values, which its backward pass reads."""
    mean, var = (state.extra[k].clone() for k in ("mean", "var"))
    y = F.batch_norm((x @ p["w"]).tanh() * 2, mean, var, training=True)
    return (y * x).square().mean(), {"mean": mean, "var": var}


def orthogonal(p, x, state):
    return (torch.linalg.qr(p["w"])[0] * x.mean()).exp().sum() + (x @ p["w"]).sin().mean(), dict(state.extra)


@pytest.mark.parametrize("loss", [statistics, orthogonal])
def test_operations_that_write_or_have_several_results(loss):
    torch.manual_seed(0)
    params, x = {"w": torch.randn(5, 5)}, torch.randn(6, 5)
    extra = {"mean": torch.zeros(5), "var": torch.ones(5)}
    found = []
    for passes in (None, OUTLINED):
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1), extra=extra), stage=3)

        def step(state, x):
            (value, extra), grads = state.value_and_grad(lambda p, x: loss(p, x, state), has_aux=True)(x)
            return state.apply_gradients(grads, extra=extra), value

        run, losses = zerofn.compile(step, passes=passes), []
        for _ in range(3):
            state, value = run(state, x)
            losses.append(value)
        found.append((losses, zerofn.unshard(state)))
    assert_same_trees(*found)
