"""Captured steps against the same steps run eagerly, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import zerofn
from tests.support.captured_steps import TX, assert_captured_is_eager, masked_batch, masked_step, rank, run, tiny_gpt2
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with
from zerofn import tree


def microbatches(stage):
    """One and two; on several ranks below stage 3 one of them, by turns."""
    return (1, 2) if stage == 3 or not dist.is_initialized() else (1 + stage % 2,)


def everything_at_once(precision, stage):
    module = build(2, dropout=0.2)
    batches = [masked_batch(k) for k in range(3)]
    for n in microbatches(stage):
        assert_captured_is_eager(
            masked_step(module, n),
            lambda: state_of(module, stage, TX, precision=precision),
            batches,
            f"{stage=}, {n=}, {precision=}",
        )


@pytest.mark.part(precision=["fp16"], stage=[2])
@pytest.mark.part(precision=[None], stage=[0])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_one_rank_captured_is_eager(precision, stage):
    everything_at_once(precision, stage)


@pytest.mark.part(num_ranks=[2], stage=[1])
@pytest.mark.part(num_ranks=[3], stage=[3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("num_ranks", "precision"), [(2, None), (3, "fp16")])
def test_several_ranks_captured_are_eager(ranks, num_ranks, precision, stage):
    ranks(num_ranks, everything_at_once, precision, stage)


def skipped_steps(stage):
    """A gradient that is not finite on one rank."""
    module = build(2)
    batches = [masked_batch(k) for k in range(3)]
    if rank() == 0:
        batches[1]["x"][0, 0] = float("inf")
    for n in microbatches(stage):

        def make_state():
            return state_of(module, stage, TX, precision="fp16")

        assert_captured_is_eager(masked_step(module, n), make_state, batches, f"{stage=}, {n=}")
        call, state = zerofn.compile(masked_step(module, n)), make_state()
        for batch in batches:
            state, _ = call(state, batch)
        assert state.skipped.item() == 1 and state.step.item() == 3


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", range(4))
def test_steps_that_are_not_applied(ranks, stage):
    ranks(2, skipped_steps, stage)


class Checkpointed(torch.nn.Module):
    """Layers with dropout, each recomputed in the backward pass by torch.utils.checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = build(4, dropout=0.3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for k in range(0, len(self.layers), 3):
            x = torch.utils.checkpoint.checkpoint(self.layers[k : k + 3], x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.part(n=[2])
@pytest.mark.parametrize("n", [1, 2])
def test_a_model_that_recomputes_with_dropout(n):
    module = Checkpointed(False)

    def step(state, batch):
        def loss_fn(params, batch):
            return (functional_call(module, params, (batch["x"],)) - batch["y"]).square().mean()

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), n)(batch)
        return state.apply_gradients(grads), loss

    def make_state():
        state = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=TX)
        return zerofn.shard(state, unit=lambda name: name.split(".")[1])

    batches = [batch_of(seed=k) for k in range(3)]
    assert_captured_is_eager(step, make_state, batches)

    # Recomputed with the mask it was computed with: the same as without recomputation.
    def plain(state, batch):
        def loss_fn(params, batch):
            inner = {k.removeprefix("layers."): v for k, v in params.items()}
            return (functional_call(module.layers, inner, (batch["x"],)) - batch["y"]).square().mean()

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), n)(batch)
        return state.apply_gradients(grads), loss

    ours, theirs = run(step, make_state(), batches), run(plain, make_state(), batches)
    assert_same_trees(ours, theirs)


def gpt2_step(module):
    def loss_fn(params, batch):
        return functional_call(module, params, (), {"input_ids": batch, "labels": batch}).loss

    return step_with(loss_fn)


def gpt2_with_checkpointing():
    module = tiny_gpt2()
    assert module.config.resid_pdrop > 0
    batches = [torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * k + rank())) for k in range(2)]

    def make_state():
        return zerofn.shard(zerofn.TrainState.create(params=dict(module.named_parameters()), tx=TX))

    plain = run(gpt2_step(module), make_state(), batches)
    getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
    assert_captured_is_eager(gpt2_step(module), make_state, batches)
    recomputed = run(gpt2_step(module), make_state(), batches)
    torch.testing.assert_close(
        tree.leaves(recomputed), tree.leaves(plain)
    )  # gradients of tied weights are added in another order


@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gpt2_with_gradient_checkpointing_and_dropout(ranks, num_ranks):
    ranks(num_ranks, gpt2_with_checkpointing)


def hvp_step(module):
    loss_fn = loss_of(module)

    def step(params, batch):
        def loss(p):
            return loss_fn(zerofn.gather(p), batch)

        vector = tree.tree_map(torch.ones_like, params)
        forward_over_reverse = torch.func.jvp(torch.func.grad(loss), (params,), (vector,))[1]
        (reverse_over_reverse,) = torch.func.vjp(torch.func.grad(loss), params)[1](vector)
        of_a_product = torch.func.grad(lambda p: zerofn.vdot(torch.func.grad(loss)(p), vector))(params)
        return [zerofn.gather(x) for x in (forward_over_reverse, reverse_over_reverse, of_a_product)]

    return step


def hessian_vector_products(stage):
    size = dist.get_world_size()
    module = build(2, dtype=torch.float64)
    params = state_of(module, stage).params
    ours = zerofn.compile(hvp_step(module))(params, batch_of(rank(), dtype=torch.float64))
    plain = {k: p.detach() for k, p in module.named_parameters()}
    loss_fn = loss_of(module)

    def loss(p):
        return sum(loss_fn(p, batch_of(r, dtype=torch.float64)) for r in range(size)) / size

    vector = tree.tree_map(torch.ones_like, plain)
    expected = torch.func.jvp(torch.func.grad(loss), (plain,), (vector,))[1]
    for name, value in expected.items():
        for k, product in enumerate(ours):
            assert (product[name] - value).abs().max() < 1e-12, f"rank {rank()}: {stage=}, product {k}, {name}"


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hessian_vector_product_through_shards(ranks, stage):
    ranks(2, hessian_vector_products, stage)
