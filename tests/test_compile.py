"""Captured steps against the same steps run eagerly, bit for bit, and what a user may do wrong."""

import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.func import functional_call

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build, fail_here, loss_of, state_of, train_step_of
from zerofn import optim, tree
from zerofn.comm import agreement
from zerofn.graph.capture import CaptureError
from zerofn.runtime import interrupts

TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def run(step, state, batches, compiled=True, **options):
    """Every tensor that comes out of some steps: the final state, and all aux values."""
    call = zerofn.compile(step, **options) if compiled else step
    out = []
    for batch in batches:
        state, aux = call(state, batch)
        out.append(tree.tree_map(torch.clone, aux))
    return tree.leaves((zerofn.unshard(state), out))


def assert_captured_is_eager(step, make_state, batches):
    ours, theirs = run(step, make_state(), batches), run(step, make_state(), batches, compiled=False)
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True), f"value {k} of {len(ours)}"


# --- captured = eager -------------------------------------------------------------------------------------------


def masked_step(module, n):
    """Dropout, a mask, clipping, accumulation and a (sum, weight) loss."""

    def loss_fn(params, batch):
        x = batch["x"].to(params["0.weight"].dtype)
        gap = (functional_call(module, params, (x,)) - batch["y"]).square().mean(1)
        return (gap * batch["mask"]).sum(), batch["mask"].sum()

    def step(state, batch):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        return state.apply_gradients(grads), {"loss": loss, "norm": zerofn.global_norm(grads)}

    return step


def masked_batch(seed, rows=4):
    batch = batch_of(rank(), rows=rows, seed=seed)
    return {**batch, "mask": (batch["y"][:, 0] > -0.7).float() + 0.5}


def everything_at_once(precision):
    module = build(2, dropout=0.2)
    batches = [masked_batch(k) for k in range(3)]
    for stage in range(4):
        for n in (1, 2):
            assert_captured_is_eager(
                masked_step(module, n), lambda stage=stage: state_of(module, stage, TX, precision=precision), batches
            )


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_one_rank_captured_is_eager(precision):
    everything_at_once(precision)


@pytest.mark.parametrize(("num_ranks", "precision"), [(2, None), (3, "fp16")])
def test_several_ranks_captured_are_eager(ranks, num_ranks, precision):
    ranks(num_ranks, everything_at_once, precision)


def skipped_steps():
    """A gradient that is not finite on one rank."""
    module = build(2)
    batches = [masked_batch(k) for k in range(3)]
    if rank() == 0:
        batches[1]["x"][0, 0] = float("inf")
    for stage in range(4):
        for n in (1, 2):

            def make_state(stage=stage):
                return state_of(module, stage, TX, precision="fp16")

            assert_captured_is_eager(masked_step(module, n), make_state, batches)
            call, state = zerofn.compile(masked_step(module, n)), make_state()
            for batch in batches:
                state, _ = call(state, batch)
            assert state.skipped.item() == 1 and state.step.item() == 3


def test_steps_that_are_not_applied(ranks):
    ranks(2, skipped_steps)


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
    assert all(map(torch.equal, ours, theirs))


def tiny_gpt2():
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return hf.GPT2LMHeadModel(config).train()


def gpt2_step(module):
    def loss_fn(params, batch):
        return functional_call(module, params, (), {"input_ids": batch, "labels": batch}).loss

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    return step


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
    torch.testing.assert_close(recomputed, plain)  # gradients of tied weights are added in another order


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
    return torch.stack([(o[k] - expected[k]).abs().max() for o in ours for k in expected]).max().item()


def test_a_hessian_vector_product_through_shards(ranks):
    for stage in (0, 2, 3):
        assert max(ranks(2, hessian_vector_products, stage)) < 1e-12


# --- evaluation, and copies that were dropped -------------------------------------------------------------------


def evaluations(stage, precision):
    module = build(3)
    loss_fn = loss_of(module)
    of_state = zerofn.compile(lambda state, batch: loss_fn(zerofn.gather(state.params), batch))
    of_params = zerofn.compile(lambda params, batch: {"loss": loss_fn(zerofn.gather(params), batch)})
    of_pair = zerofn.compile(lambda pair, batch: loss_fn(zerofn.gather(pair[0]), batch) * pair[1])
    train = zerofn.compile(train_step_of(module))
    eager = train_step_of(module)
    state, other = (state_of(module, stage, precision=precision) for _ in range(2))
    for k in range(3):
        batch = batch_of(rank(), seed=k)
        expected = loss_fn(zerofn.gather(state.params), batch)
        state = tree.tree_map(lambda x: x, state) if k == 1 else state
        params = tree.tree_map(lambda x: x, state.params) if k == 2 else state.params
        assert params.full is None or k < 2
        for call, value in ((of_state, state), (of_params, params), (of_pair, (params, 2))):
            out = call(value, batch)
            out = out["loss"] if isinstance(out, dict) else out / (2 if call is of_pair else 1)
            assert torch.equal(out, expected)
        state, ours = train(tree.tree_map(lambda x: x, state) if k else state, batch)
        other, theirs = eager(other, batch)
        assert torch.equal(ours["loss"], theirs["loss"])
        assert (state.params.full is not None) == (stage in (1, 2))
        for piece, full, unit in zip(
            state.params.pieces, state.params.full or [], state.params.layout.units, strict=stage in (1, 2)
        ):
            first = full[state.params.spec.bounds(unit)[0] :].data_ptr()
            assert (piece.data_ptr() == first) == (piece.dtype == full.dtype)
    assert all(map(torch.equal, tree.leaves(state), tree.leaves(other)))
    return [len(step._entries) for step in (of_state, of_params, of_pair, train)]


@pytest.mark.parametrize("stage", range(4))
def test_evaluation_and_training_with_and_without_the_gathered_copy(ranks, stage):
    for precision in (None, "bf16"):
        assert ranks(2, evaluations, stage, precision) == [[1, 1, 1, 1]] * 2  # nothing is captured twice


def count_refills():
    """A copy that was dropped is gathered once, not at every evaluation."""
    module = build(3)
    evaluate = zerofn.compile(lambda state, batch: loss_of(module)(zerofn.gather(state.params), batch))
    state = tree.tree_map(lambda x: x, state_of(module, 2))
    pieces = [p.clone() for p in state.params.pieces]
    assert state.params.full is None
    evaluate(state, batch_of(rank()))
    full = state.params.full
    evaluate(state, batch_of(rank()))
    assert state.params.full is full and all(map(torch.equal, state.params.pieces, pieces))


def test_a_dropped_copy_is_made_once(ranks):
    ranks(2, count_refills)


def test_generating_from_a_state():
    module = tiny_gpt2().eval()
    state = zerofn.shard(zerofn.TrainState.create(params=dict(module.named_parameters()), tx=TX))

    def next_token(params, ids):
        return functional_call(module, zerofn.gather(params), (), {"input_ids": ids}).logits[:, -1].argmax(-1, True)

    step, ids = zerofn.compile(next_token), torch.tensor([[1, 2, 3, 4]])
    for _ in range(3):
        ids = torch.cat([ids, step(state.params, ids)], 1)
    with torch.no_grad():
        expected = torch.tensor([[1, 2, 3, 4]])
        for _ in range(3):
            expected = torch.cat([expected, module(input_ids=expected).logits[:, -1].argmax(-1, True)], 1)
    assert torch.equal(ids, expected) and len(step._entries) == 3


# --- signatures -------------------------------------------------------------------------------------------------


def messages(caplog):
    return [r.getMessage() for r in caplog.records if "captured (" in r.getMessage()]


def test_a_new_signature_is_captured_and_says_what_changed(caplog):
    module = build()

    def train(state, batch):
        new, aux = train_step_of(module)(state, {k: batch[k] for k in ("x", "y")})
        return new, aux["loss"] * batch.get("weight", 1)

    step, state = zerofn.compile(train), state_of(module, 3)
    weighted = [{**batch_of(), "weight": w} for w in (2, 2, 3, torch.tensor(2.0))]
    with caplog.at_level(logging.INFO, "zerofn"):
        for batch in (batch_of(), batch_of(seed=2), batch_of(rows=3), batch_of(), *weighted):
            state, _ = step(state, batch)
    first, rows, *weights = messages(caplog)
    assert "train: captured (first call): training step, state donated" in first
    assert "batch.x [4, 16] float32 -> [3, 16] float32; batch.y [4, 16] float32 -> [3, 16] float32)" in rows
    assert "batch.x [3, 16] float32 -> [4, 16] float32" in weights[0] and "batch.weight nothing -> 2" in weights[0]
    assert "captured (batch.weight 2 -> 3)" in weights[1]
    assert "captured (batch.weight 3 -> [] float32)" in weights[2]
    assert len(weights) == 3


def test_numbers_of_another_type_are_another_signature():
    """Where they are equal too: 1 == 1.0 == True."""
    call = zerofn.compile(lambda state, batch: batch["x"] * batch["by"])
    x = torch.arange(4)
    for by in (1, 1.0, True, 1):
        found, expected = call({"params": torch.ones(2)}, {"x": x, "by": by}), x * by
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert len(call._entries) == 3


def test_a_transposed_batch_of_the_same_shape_is_another_signature():
    call = zerofn.compile(lambda state, batch: batch["x"].reshape(-1) * 2)  # a view of the one, a copy of the other
    rows, columns = batch_of()["x"], batch_of()["x"].view(WIDTH, 4).t()
    for x in (rows, columns, rows):
        assert torch.equal(call({"params": torch.ones(2)}, {"x": x}), x.reshape(-1) * 2)
    assert len(call._entries) == 2


def test_evaluation_and_constants_are_named_in_the_log(caplog):
    table = torch.arange(16.0)
    with caplog.at_level(logging.INFO, "zerofn"):
        zerofn.compile(lambda s, b: (b["x"] * table).sum())({"params": torch.ones(2)}, batch_of())
        zerofn.compile(lambda s, b: (s, b["x"].sum()), donate=False)({"params": torch.ones(2)}, batch_of())
    first, second = messages(caplog)
    assert "evaluation step" in first and "1 closed-over tensors baked in, shapes [(16,)]" in first
    assert "training step," in second and "donated" not in second


def test_numbers_in_a_state_grow_without_a_new_capture():
    def step(state, batch):
        return {**state, "seen": state["seen"] + 4, "rate": state["rate"] * 0.5}, batch["x"].sum()

    call, state = zerofn.compile(step), {"params": torch.ones(32), "seen": 0, "rate": 1.0, "flag": True, "none": None}
    for _ in range(3):
        state, _ = call(state, batch_of())
    assert state["seen"].item() == 12 and state["rate"].item() == 0.125 and state["rate"].dtype == torch.float64
    assert state["flag"].item() is True and state["none"] is None and len(call._entries) == 1


def ragged_on_all():
    """The last batch has fewer rows on every rank, and not the same number."""
    module = build(3)
    rows = [4, 4, 2]
    step, state = zerofn.compile(masked_step(module, 1)), state_of(module, 3, TX)
    losses = []
    for k, n in enumerate(rows):
        state, aux = step(state, masked_batch(k, n))
        losses.append(aux["loss"].item())
    return losses


def test_a_ragged_last_batch_on_all_ranks(ranks):
    first, second = ranks(2, ragged_on_all)
    assert first == second
    module = build(3)
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for k, n in enumerate([4, 4, 2]):
        parts = [batch_of(r, rows=n, seed=k) for r in range(2)]
        masks = [(p["y"][:, 0] > -0.7).float() + 0.5 for p in parts]
        gaps = [(module(p["x"]) - p["y"]).square().mean(1) for p in parts]
        loss = sum((g * m).sum() for g, m in zip(gaps, masks, strict=True)) / sum(m.sum() for m in masks)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
        assert first[k] == pytest.approx(loss.item(), rel=1e-5)


def ragged_on_one():
    agreement.PATIENCE = 2.0
    module = build(3)
    step, state = zerofn.compile(train_step_of(module)), state_of(module, 3)
    state, _ = step(state, batch_of(rank()))
    step(state, batch_of(rank(), rows=4 if rank() == 0 else 3))


def test_a_ragged_last_batch_on_one_rank_is_an_error_on_all(ranks):
    began = time.monotonic()
    for told in ranks(2, ragged_on_one, expect_errors=True, timeout=60):
        assert told.type == "RuntimeError" and "did not come within 2 s" in told.message
        assert "batch.x: [3, 16] float32" in told.message
    assert time.monotonic() - began < 40


def different_first_batches():
    module = build(3)
    zerofn.compile(train_step_of(module))(state_of(module, 3), batch_of(rank(), rows=4 - rank()))


def test_ranks_that_begin_with_different_batches(ranks):
    for told in ranks(2, different_first_batches, expect_errors=True):
        assert told.type == "RuntimeError"
        assert "ranks differ" in told.message and "[4, 16]" in told.message and "[3, 16]" in told.message


# --- donation ---------------------------------------------------------------------------------------------------


def test_a_donated_state_says_so():
    module = build()
    step, state = zerofn.compile(train_step_of(module)), state_of(module, 3)
    new, _ = step(state, batch_of())
    for use in (
        lambda: step(state, batch_of()),
        lambda: train_step_of(module)(state, batch_of()),
        lambda: tree.tree_map(lambda p: p, state.params),
        lambda: zerofn.gather(state.params),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"given to train_step and its memory belongs to the state it returned; "
            r"use that one, or compile\(\.\.\., donate=False\)",
        ):
            use()
    assert "donated" in repr(state.params)
    step(new, batch_of())


def test_a_donated_plain_state_says_so():
    def step(state, batch):
        return {"params": state["params"] * 2}, batch["x"].sum()

    call, state = zerofn.compile(step), {"params": torch.ones(32)}
    new, _ = call(state, batch_of())
    with pytest.raises(RuntimeError, match="given to step"):
        call(state, batch_of())
    assert torch.equal(call(new, batch_of())[0]["params"], torch.full((32,), 4.0))


@pytest.mark.parametrize("stage", [0, 3])
def test_without_donation_the_old_state_can_be_used_again(stage):
    module = build()
    step, state = zerofn.compile(train_step_of(module), donate=False), state_of(module, stage)
    before = [x.clone() for x in tree.leaves(state)]
    first, _ = step(state, batch_of())
    assert all(map(torch.equal, tree.leaves(state), before))
    second, _ = step(state, batch_of())
    assert all(map(torch.equal, tree.leaves(first), tree.leaves(second)))
    eager, _ = train_step_of(module)(state, batch_of())
    assert all(map(torch.equal, tree.leaves(first), tree.leaves(eager)))


def not_donating(stage):
    module = build(3)
    step, state = zerofn.compile(train_step_of(module), donate=False), state_of(module, stage)
    donating = zerofn.compile(train_step_of(module))
    other = state_of(module, stage)
    for k in range(2):
        kept = zerofn.unshard(state.params)
        new, _ = step(state, batch_of(rank(), seed=k))
        after = zerofn.unshard(state.params)
        assert all(torch.equal(kept[name], after[name]) for name in kept)
        state = new
        other, _ = donating(other, batch_of(rank(), seed=k))
    return all(map(torch.equal, tree.leaves(state), tree.leaves(other)))


@pytest.mark.parametrize("stage", [1, 3])
def test_without_donation_on_several_ranks(ranks, stage):
    assert all(ranks(2, not_donating, stage))


# --- what a user may do wrong -----------------------------------------------------------------------------------


def impure(module):
    """What is no pure function: name -> (step, what is said of it)."""
    inner, table, learned = train_step_of(module), torch.ones(WIDTH), torch.ones(WIDTH, requires_grad=True)

    def writes_to_the_batch(state, batch):
        batch["x"].mul_(2)
        return inner(state, batch)

    def writes_to_the_state(state, batch):
        state.params.pieces[0].mul_(2)
        return inner(state, batch)

    def writes_to_what_it_closes_over(state, batch):
        table.add_(batch["x"].detach().sum(0))
        return inner(state, batch)

    def closes_over_what_learns(state, batch):
        return inner(state, {**batch, "x": batch["x"] * learned})

    def branches(state, batch):
        return inner(state, batch) if batch["x"].sum() > 0 else inner(state, {**batch, "x": -batch["x"]})

    def returns_another_structure(state, batch):
        new, aux = inner(state, batch)
        return new.replace(extra={"seen": new.step}), aux

    def adds_up_a_piece(state, batch):
        new, aux = inner(state, batch)
        return new, {**aux, "sum": sum(p.sum() for p in state.params.pieces)}

    return {
        writes_to_the_batch: "writes to batch entry 'x'",
        writes_to_the_state: 'writes to state entry "params',
        writes_to_what_it_closes_over: "writes to a tensor it closes over",
        closes_over_what_learns: "requires grad",
        branches: "cannot branch on data",
        returns_another_structure: "returns a state of another structure",
        adds_up_a_piece: "sum",
    }


def refused(stage):
    """Every impure step, refused on every rank; then the state is what it was, and a pure one takes it."""
    module = build()
    state, batch = state_of(module, stage), batch_of(rank())
    before = [x.clone() for x in tree.leaves((zerofn.unshard(state), batch))]
    for step, said in impure(module).items():
        with pytest.raises((CaptureError, RuntimeError)) as caught:
            zerofn.compile(step)(state, batch)
        assert type(caught.value) is CaptureError and said in str(caught.value), (step.__name__, str(caught.value))
        assert same_leaves((zerofn.unshard(state), batch), before)
    expected, _ = train_step_of(module)(state_of(module, stage), batch)
    ours, _ = zerofn.compile(train_step_of(module))(state, batch)
    assert same_leaves(zerofn.unshard(ours), zerofn.unshard(expected))


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_refused_step_leaves_the_state_as_it_was(ranks, size, stage):
    ranks(size, refused, stage)


def test_a_constant_that_changes_after_capture_is_noticed():
    module, table = build(), torch.ones(16)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] * table.sum()

    call, state = zerofn.compile(step), state_of(module, 3)
    state, _ = call(state, batch_of())
    state, _ = call(state, batch_of())
    table.mul_(2)
    with pytest.raises(RuntimeError, match=r"step: a tensor of shape \(16,\) that the step closes over was changed"):
        call(state, batch_of())
    assert zerofn.all_finite(state.params)  # and the state is still there


def test_options_that_are_not_there():
    with pytest.raises(ValueError, match="remat=1 is not known"):
        zerofn.compile(lambda s, b: s, remat=1)
    with pytest.raises(ValueError, match="backend='inductor'"):
        zerofn.compile(lambda s, b: s, backend="inductor")


def different_graphs():
    module = build(3)
    loss_fn = loss_of(module)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        if rank() == 1:
            grads = tree.tree_map(lambda g: g / zerofn.global_norm(grads), grads)
        return state.apply_gradients(grads), loss

    state = state_of(module, 3)
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        zerofn.compile(step)(state, batch_of(rank()))
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of(rank()))  # everyone can go on
    return str(caught.value)


def test_ranks_with_different_graphs_raise_on_all(ranks):
    for message in ranks(2, different_graphs):
        assert "ank 0" in message and "ank 1" in message and "zerofn::all_gather" in message


def refused_on_one():
    module = build(3)

    def step(state, batch):
        if rank() == 1:
            batch["x"].mul_(2)
        return train_step_of(module)(state, batch)

    with pytest.raises(RuntimeError, match="writes to batch entry 'x'") as caught:
        zerofn.compile(step)(state_of(module, 3), batch_of(rank()))
    return str(caught.value)


def test_a_step_refused_on_one_rank_raises_on_all(ranks):
    first, second = ranks(2, refused_on_one)
    assert first.startswith("zerofn.compile(step): stopped, because rank 1 failed") and "writes to" in second


def fails_at_run_time(stage, late):
    module = build(3)
    loss_fn = loss_of(module)

    def step(state, batch):
        if not late:
            batch = {**batch, "x": fail_here(batch["x"], batch["fail"])}
        loss, grads = state.value_and_grad(loss_fn)(batch)
        new = state.apply_gradients(grads)
        return new, fail_here(zerofn.global_norm(new.params), batch["fail"]) if late else loss

    call, state = zerofn.compile(step), state_of(module, stage)
    state, _ = call(state, {**batch_of(rank()), "fail": torch.tensor(0)})
    for fail in (rank(), 0):  # where all was sent before the failure, the other rank comes as far as the next step
        before = state
        try:
            state, _ = call(state, {**batch_of(rank()), "fail": torch.tensor(fail)})
        except Exception as error:
            return type(error).__name__, str(error), repr(before.params)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_on_one_rank_ends_on_all(ranks, stage, late):
    try:
        (kind, message, _), (own_kind, own, own_state) = ranks(2, fails_at_run_time, stage, late, timeout=60)
    finally:
        ranks(1, rank)  # the group of two is gone
    assert kind == "RuntimeError" and "rank 1: step failed: ValueError: the disk is full" in message
    assert own_kind == "ValueError" and own == "the disk is full"
    if late:
        assert "This state was lost when step failed: ValueError: the disk is full" in own_state
        assert "Load the last checkpoint" in own_state
    else:
        assert "rank 1 of 2 holds" in own_state  # nothing had been written


@torch.library.custom_op("small_steps::interrupt_here", mutates_args=())
def interrupt_here(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return x.clone()


@interrupt_here.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_interrupt_leaves_the_new_state(monkeypatch):
    """It comes before the next step, when the caller has what the interrupted one returned."""
    monkeypatch.setattr(interrupts, "SOON", 60.0)  # not before
    module = build()

    def step(state, batch):
        return train_step_of(module)(state, {**batch, "x": interrupt_here(batch["x"])})

    assert threading.current_thread() is threading.main_thread()
    call, state = zerofn.compile(step), state_of(module, 3)
    expected, _ = train_step_of(module)(state_of(module, 3), batch_of())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background inherits none
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(2):
                state, _ = call(state, batch_of())
    finally:
        signal.signal(signal.SIGINT, before)
    assert same_leaves(zerofn.unshard(state), zerofn.unshard(expected))


def same_leaves(a, b):
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def test_timings_are_kept():
    module = build()
    step = zerofn.compile(train_step_of(module))
    step(state_of(module, 3), batch_of())
    assert step.timings["nodes"] > 50 and step.timings["capture"] > 0 and "donate" in step.timings["passes"]
    assert step.__name__ == "train_step"


# --- what a signature is ----------------------------------------------------------------------------------------


def total_of(shape, stage, **options):
    """A state whose parameter has this shape, and what a step makes of it that depends on the shape."""
    params = {"w": torch.arange(24.0).reshape(shape) + 0.001}

    def step(state, batch):
        loss, grads = state.value_and_grad(lambda p, x: (p["w"].square().sum(0) * x).square().sum())(batch)
        return state.apply_gradients(grads), loss

    make = lambda: zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(1e-6)), stage=stage, **options)  # noqa: E731
    return step, make


@pytest.mark.parametrize("stage", [0, 3])
def test_another_layout_of_as_many_elements_is_another_signature(stage):
    step, first = total_of((4, 6), stage)
    _, second = total_of((6, 4), stage)
    call = zerofn.compile(step)
    for make in (first, second, first):
        ours, theirs = call(make(), torch.tensor(1.0)), step(make(), torch.tensor(1.0))
        assert same_leaves(zerofn.unshard(ours), zerofn.unshard(theirs))


def test_another_precision_is_another_signature():
    step, plain = total_of((4, 6), 3)
    _, half = total_of((4, 6), 3, precision="bf16")
    call = zerofn.compile(step)
    assert all(p.dtype == torch.float32 for make in (plain, half) for p in make().params.pieces)
    for make in (plain, half):
        ours, theirs = call(make(), torch.tensor(1.0)), step(make(), torch.tensor(1.0))
        assert same_leaves(zerofn.unshard(ours), zerofn.unshard(theirs))
        assert ours[0].params.spec.precision == make().params.spec.precision


def test_an_array_is_named():
    module = build()
    batch = {**batch_of(), "more": {"ids": batch_of()["x"].numpy()}}
    with pytest.raises(TypeError, match=r"batch entry 'more.ids' is a ndarray.*torch.as_tensor"):
        zerofn.compile(train_step_of(module))(state_of(module, 3), batch)


# --- who else holds what was given away -------------------------------------------------------------------------


def holders(stage):
    module = build()
    state = state_of(module, stage)
    kept, part = tree.tree_map(lambda x: x, state), state.params["0"]
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of(rank()))
    for use in (lambda: zerofn.unshard(kept), lambda: part.pieces, lambda: zerofn.gather(kept.params)):
        with pytest.raises(RuntimeError, match="given to train_step"):
            use()
    assert "donated: This state was given to train_step" in repr(kept.params) and "donated" in repr(kept)
    assert state.params.pieces[0].isfinite().all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_who_holds_the_same_pieces_hears_of_it(ranks, size, stage):
    ranks(size, holders, stage)


def test_another_step_is_told_too():
    module = build()
    plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(1e-2))
    state = tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, plain)
    zerofn.compile(train_step_of(module))(state, batch_of())
    with pytest.raises(RuntimeError, match="given to train_step"):
        zerofn.compile(lambda s, b: loss_of(module)(s.params, b))(state, batch_of())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_an_average_that_starts_as_the_parameters_themselves(ranks, stage, size):
    assert all(ranks(size, shared_memory, stage))


def shared_memory(stage):
    module = build()
    inner = train_step_of(module)

    def step(state, batch):
        average = tree.tree_map(lambda a, p: 0.9 * a + 0.1 * p, state.extra, state.params)
        state, aux = inner(state, batch)
        return state.replace(extra=average), aux

    def make():
        state = state_of(module, stage)
        return state.replace(extra=tree.tree_map(lambda x: x, state.params))

    ours, theirs, call = make(), make(), zerofn.compile(step)
    for k in range(3):
        ours, _ = call(ours, batch_of(rank(), seed=k))
        theirs, _ = step(theirs, batch_of(rank(), seed=k))
    return same_leaves(zerofn.unshard(ours), zerofn.unshard(theirs))
