import torch
from torch.func import functional_call

from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    batch_of,
    build,
    captured,
    loss_of,
    ops,
    results,
    state_of,
    step_with,
    train_step_of,
)
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.gradients_as_bucket_views import gradients_as_bucket_views
from zerofn.passes.raise_reduce_scatters import raise_reduce_scatters

aten = torch.ops.aten
BEFORE = (canonicalize, raise_reduce_scatters)


def targets(program, target):
    return [n for n in program.gm.graph.nodes if n.target is target]


def test_linear_layers_need_no_copy():
    module = build()
    state, batch = state_of(module, 3), batch_of()
    step = train_step_of(module)
    before = captured(step, state, batch, *BEFORE)
    after = captured(step, state, batch, *BEFORE, gradients_as_bucket_views)
    assert len(targets(before, ops.ravel.default)) == 4 and not targets(after, ops.ravel.default)
    assert len(targets(after, aten.mm.out)) == 4 and len(targets(after, aten.sum.IntList_out)) == 4
    for node in targets(after, ops.fill_.default):
        assert node.args[1] == [None, None] and node.args[4] == [True, True]  # nothing is copied
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def test_a_gradient_that_something_else_reads_is_copied():
    module = build(2)
    loss_fn = loss_of(module)

    def step(state, batch):
        with torch.enable_grad():
            leaves = {k: v.detach().requires_grad_() for k, v in batch["p"].items()}
            grads = torch.autograd.grad(loss_fn(leaves, batch), [leaves[k] for k in names])
        flat = ops.ravel(list(grads), [0, 32, 320, 352], 1024, torch.float32)
        return flat, grads[1].sum()

    weights = {k: v.detach() for k, v in module.named_parameters()}
    names = ["0.bias", "0.weight", "3.bias", "3.weight"]
    batch = {**batch_of(), "p": {k: weights[k] for k in names}}
    state = {"params": state_of(module, 3).params}
    before = captured(step, state, batch, *BEFORE)
    after = captured(step, state, batch, *BEFORE, gradients_as_bucket_views)
    (fill,) = targets(after, ops.fill_.default)
    assert fill.args[4] == [True, False, True, True] and fill.args[1][1] is not None
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def test_one_gradient_of_two_leaves_is_made_once_and_copied():
    def step(state, batch):
        g = batch["x"].t() @ batch["y"]
        return ops.ravel([g, batch["x"], g], [0, 256, 320], 1024, torch.float32)

    state, batch = {"params": torch.ones(2)}, batch_of()
    before = captured(step, state, batch, *BEFORE)
    after = captured(step, state, batch, *BEFORE, gradients_as_bucket_views)
    (made,), (fill,) = targets(after, aten.mm.out), targets(after, ops.fill_.default)
    assert fill.args[1] == [None, fill.args[1][1], made.kwargs["out"]] and fill.args[4] == [True, False, False]
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def test_what_is_cast_into_a_buffer_is_made_behind_it():
    """And freed there: a hole before it would be too small for the next one of its size."""

    def step(state, batch):
        g = (batch["x"].t() @ batch["y"]).bfloat16()
        return ops.ravel([g.t()], [0], 1024, torch.float32)

    state, batch = {"params": torch.ones(2)}, batch_of()
    before = captured(step, state, batch, *BEFORE)
    after = captured(step, state, batch, *BEFORE, gradients_as_bucket_views)
    (flat,), (cast,) = targets(after, ops.flat.default), targets(after, aten._to_copy.default)
    assert flat.next is cast and not targets(after, ops.ravel.default)
    assert_same_trees(results(after, state, batch), results(before, state, batch))


class Words(torch.nn.Module):
    """An embedding, a layer norm, a convolution and a tied output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(24, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.mix = torch.nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x @ self.table.weight.t()


def test_other_layers_keep_their_bits():
    module = Words()
    batch = {"ids": torch.randint(0, 24, (3, 8))}

    def loss_fn(params, b):
        return functional_call(module, params, (b["ids"],)).square().mean()

    step = step_with(loss_fn)

    for precision in (None, "bf16"):
        state = state_of(module, 3, precision=precision)
        before = captured(step, state, batch)
        after = captured(step, state, batch, *BEFORE, gradients_as_bucket_views)
        assert_same_trees(results(after, state, batch), results(before, state, batch))
