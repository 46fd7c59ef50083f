"""Regions of convolutional models: batch norm, whose running values are written, and pooling."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import zerofn
from tests.lowering.test_outline_regions import may_be_fused, targets
from tests.support.outlined_steps import OUTLINED
from tests.support.same import assert_same_trees
from tests.support.small_steps import captures_of
from zerofn import optim
from zerofn.cost.op_cost import touched_bytes
from zerofn.graph.nested import REGION, calls, graphs_of, is_region

aten = torch.ops.aten
NORMS_AND_POOLS = {
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
}


class Net(nn.Module):
    """Its norm is applied twice to each batch; `frozen` has another one, which does not learn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.frozen = nn.BatchNorm2d(8), nn.BatchNorm2d(8).eval()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(x + self.frozen(self.norm(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def trained(stage=3, n=1, **options):
    """((losses, the state), the step's program) of three steps."""
    module = Net()
    state = zerofn.TrainState.create(
        params={k: p.detach().clone() for k, p in module.named_parameters()},
        tx=optim.sgd(0.1),
        extra={k: x.clone() for k, x in module.named_buffers()},
    )

    def step(state, batch):
        buffers = {k: x.clone() for k, x in state.extra.items()}

        def loss_fn(params, batch):
            return F.cross_entropy(functional_call(module, {**params, **buffers}, (batch["x"],)), batch["y"])

        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if n == 1 else zerofn.accumulate(vg, n, reduce="step"))(batch)
        return state.apply_gradients(grads, extra=buffers), loss

    run, state, losses = zerofn.compile(step, **options), zerofn.shard(state, stage=stage), []
    for k in range(3):
        draws = torch.Generator().manual_seed(k)
        state, loss = run(state, {"x": torch.randn(4, 3, 8, 8, generator=draws), "y": torch.arange(4)})
        losses.append(loss)
    (entry,) = captures_of(run)
    return (losses, zerofn.unshard(state)), entry.program


def regions_of(program):
    return [call.body for gm in graphs_of(program.gm) for _, call in calls(gm) if is_region(call.body)]


@pytest.mark.part(n=[2], options=[{}])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [{}, {"remat": "full"}], ids=str)
def test_bits_and_running_values_are_those_of_the_step_without_regions(n, options):
    found, program = trained(n=n, passes=OUTLINED, **options)
    assert_same_trees(found, trained(n=n, **options)[0])
    inside = {x for gm in regions_of(program) for x in targets(gm)}
    assert {aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default} <= inside


def test_nearly_all_memory_that_a_compiler_could_fuse_is_touched_in_regions():
    _, program = trained(passes=OUTLINED)
    inside = sum(touched_bytes(x) for gm in regions_of(program) for x in gm.graph.nodes if x.op == "call_function")
    outside = [x for x in program.gm.graph.nodes if may_be_fused(x) or x.target in NORMS_AND_POOLS]
    assert inside / (inside + sum(map(touched_bytes, outside))) >= 0.94


def names_on_rank():
    expected, program = trained(0, passes=OUTLINED)
    names = [gm.meta[REGION] for gm in regions_of(program)]
    for stage in (1, 3):
        found, program = trained(stage, passes=OUTLINED)
        assert_same_trees(found, expected, f"stage {stage}")
        assert [gm.meta[REGION] for gm in regions_of(program)] == names
    return names


def test_regions_are_the_same_at_every_stage(ranks):
    first, second = ranks(2, names_on_rank)
    assert first and first == second


@pytest.mark.whole  # Inductor compiles for half a minute
def test_compiled_bits_do_not_depend_on_stage_and_recomputation():
    near, _ = trained()
    expected, program = trained(0, backend="inductor")
    assert regions_of(program)
    for options in ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"remat": "full"}, {"remat": "auto"}):
        assert_same_trees(trained(backend="inductor", **options)[0], expected, str(options))
    for a, b in zip(zerofn.tree.leaves(expected), zerofn.tree.leaves(near), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
