import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import (
    WIDTH,
    Normed,
    batch_of,
    build,
    captured,
    fake_ranks,
    loss_of,
    state_of,
    train_step_of,
)
from zerofn import tree
from zerofn.capture.capture import CaptureError, capture
from zerofn.capture.verify import check_purity
from zerofn.graph.fingerprint import fingerprint

HERE = __file__


def checked(step, state, batch):
    """Purity of a step captured with lines; -> its baked constants."""
    return check_purity(capture(step, state, batch, traces=True))


def refused(step, state, batch, match):
    with pytest.raises(CaptureError, match=match) as caught:
        checked(step, state, batch)
    return str(caught.value)


# --- writing ----------------------------------------------------------------------------------------------------


def writers():
    def counter(state, batch):
        state.step.add_(1)

    def shard(state, batch):
        tree.tree_map(lambda p: p.mul_(0.5), state.params)

    def gathered(state, batch):
        zerofn.gather(state.params)["0.weight"].zero_()

    def input(state, batch):
        batch["x"].mul_(2)

    def view(state, batch):
        batch["x"][0, 1:].zero_()

    def part(state, batch):
        batch["x"].chunk(2)[1].mul_(2)

    def out(state, batch):
        torch.add(batch["y"], 1, out=batch["x"])

    return [counter, shard, gathered, input, view, part, out]


ENTRIES = {
    "counter": "state entry 'step'",
    "shard": r"state entry \"params\['0'\]\"",
    "gathered": r"state entry \"params\['0'\]\"",
    "input": "batch entry 'x'",
    "view": "batch entry 'x'",
    "part": "batch entry 'x'",
    "out": "batch entry 'x'",
}


@pytest.mark.parametrize("write", writers(), ids=lambda f: f.__name__)
def test_writing_to_an_input_is_refused(write):
    module = build()

    def step(state, batch):
        write(state, batch)
        return train_step_of(module)(state, batch)

    message = refused(step, state_of(module, 3), batch_of(), f"writes to {ENTRIES[write.__name__]} in place.*clone")
    assert f" at {HERE}:{write.__code__.co_firstlineno + 1} (" in message


def test_writing_to_a_gathered_copy_is_refused():
    module = build()

    def step(state, batch):
        zerofn.gather(state.params)["0.weight"].zero_()
        return train_step_of(module)(state, batch)

    with fake_ranks(2):
        for stage in (1, 2):
            refused(step, state_of(module, stage), batch_of(), "writes to the gathered copy of a parameter unit")


def table_step(num_microbatches):
    """An embedding that brings the rows it reads to a norm of 1, in place, with its table used again."""
    table = torch.nn.Embedding(24, WIDTH, max_norm=1.0)

    def loss_fn(params, batch):
        x = functional_call(table, {"weight": params["0.weight"]}, (batch["ids"],))
        return (x @ params["0.weight"].t()).square().mean()

    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    return torch.nn.Sequential(table), step


@pytest.mark.part(world=[2], n=[1], precision=[None])
@pytest.mark.part(precision=["bf16"], n=[2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("world", "precision"), [(2, None), (2, "bf16"), (1, "bf16")])
def test_writing_to_what_was_gathered_is_refused(world, precision, n):
    """The next gather, in the backward pass or for the tied output, would not have what was written."""
    module, step = table_step(n)
    match = (
        r"writes to the gathered tensors of state entry \"params\['0'\](\.hi)?\" in place "
        r"\(aten::embedding_renorm_ at .*write to a clone of it"
    )
    with fake_ranks(world):
        refused(step, state_of(module, 3, precision=precision), {"ids": torch.arange(8)}, match)


@pytest.mark.part(world=[2], stage=[0, 3])
@pytest.mark.part(world=[1], stage=[1])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_may_be_written(stage, world):
    """At stage 0 they come out of a gather."""
    module = build(2)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(module))(batch)
        tree.tree_map(lambda g: g.mul_(0.5), grads)
        return state.apply_gradients(grads), loss

    with fake_ranks(world):
        assert checked(step, state_of(module, stage), batch_of()) == []


def written_in_a_loop():
    table = torch.zeros(WIDTH)
    return {
        "batch entry 'x'": lambda state, batch: batch["x"].mul_(2),
        r"state entry 'extra\.seen'": lambda state, batch: state.extra["seen"].add_(batch["x"].sum(0)),
        "a tensor it closes over": lambda state, batch: table.add_(batch["x"].sum(0)),
    }


@pytest.mark.parametrize("what", written_in_a_loop())
def test_writing_in_a_loop_is_refused(what):
    module, write = build(2), written_in_a_loop()[what]

    def step(state, batch):
        def loss_fn(params, rows):
            write(state, rows)
            return loss_of(module)(params, rows)

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads), loss

    state = state_of(module, 3, extra={"seen": torch.zeros(WIDTH)})
    message = refused(step, state, batch_of(), f"writes to {what} in place")
    assert f"(aten::{'mul' if 'batch' in what else 'add'}_.Tensor at {HERE}:" in message


def test_buffers_that_a_model_writes_are_seen():
    """Batch norm writes its running values without its schema saying so."""
    module = Normed()
    buffers = {"norm.running_mean": torch.zeros(WIDTH), "norm.running_var": torch.ones(WIDTH)}

    def step(state, batch):
        def loss_fn(params, batch):
            inside = {**state.extra, "norm.num_batches_tracked": torch.tensor(0)}
            return functional_call(module, (params, inside), (batch["x"],)).square().mean()

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    refused(step, state_of(module, 3, extra=buffers), batch_of(), r"writes to state entry 'extra\.norm\.running_mean'")


# --- closing over -----------------------------------------------------------------------------------------------


def test_a_closed_over_tensor_that_requires_grad_is_refused():
    module, weight = build(), torch.ones(WIDTH, requires_grad=True)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] + (weight * batch["x"]).sum()

    message = refused(step, state_of(module, 3), batch_of(), r"of shape \(16,\) that requires grad.*never trained")
    assert f" at {HERE}:" in message and "weight * batch" in message


def test_a_module_with_its_own_parameters_is_refused():
    module = build()

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] + module(batch["x"]).sum()

    refused(step, state_of(module, 3), batch_of(), "requires grad.*functional_call.*requires_grad_")


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_in_a_loop_as_well(num_microbatches):
    module, weight = build(), torch.ones(WIDTH, requires_grad=True)
    loss_fn = loss_of(module)

    def step(state, batch):
        vg = state.value_and_grad(lambda p, b: loss_fn(p, b) + (weight * b["x"]).sum())
        loss, grads = zerofn.accumulate(vg, num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    refused(step, state_of(module, 3), batch_of(), "requires grad")


def test_a_closed_over_tensor_that_is_written_is_refused():
    module, total = build(), torch.zeros(WIDTH)

    def step(state, batch):
        total.add_(batch["x"].sum(0))
        return train_step_of(module)(state, batch)

    message = refused(step, state_of(module, 3), batch_of(), "writes to a tensor it closes over.*in the state")
    assert "total.add_" in message and total.eq(0).all()


def test_other_closed_over_tensors_are_constants():
    module, table = build(), torch.arange(16.0)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] * table.sum() + torch.tensor(2.0)

    (found,) = checked(step, state_of(module, 3), batch_of())
    assert torch.equal(found, table)  # a literal is none


# --- drawing ----------------------------------------------------------------------------------------------------


def test_draws_from_the_global_generator_are_refused():
    module = build()

    def step(state, batch):
        noisy = {"x": batch["x"] + torch.randn(4, WIDTH), "y": batch["y"]}
        return train_step_of(module)(state, noisy)

    message = refused(step, state_of(module, 3), batch_of(), "aten::randn.*global generator.*randomness")
    assert "noisy = " in message
    evaluate = lambda state, batch: torch.nn.functional.dropout(batch["x"], 0.5)  # noqa: E731
    refused(evaluate, state_of(module, 3), batch_of(), r"aten::bernoulli_.*call its eval\(\) first")

    def keyed(state, batch):
        with zerofn.random.randomness(state.rng_at()):
            new, loss = step(state, batch)
            return new, (loss, evaluate(state, batch))

    assert checked(keyed, state_of(module, 3), batch_of()) == []


def test_dropout_of_nothing_draws_nothing():
    def step(state, batch):
        x = batch["x"].view(1, 2, 2, 16)
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        out = out + torch.native_dropout(out, 0.5, False)[0] + torch.nn.functional.rrelu(out, training=False)
        return state, out.sum()

    assert checked(step, {"params": torch.ones(2)}, batch_of()) == []


def test_an_evaluation_step_samples_under_a_key():
    def sample(state, batch):
        with zerofn.random.randomness(batch["key"]):
            return torch.multinomial(batch["x"].softmax(1), 1)

    batch = {**batch_of(), "key": zerofn.random.key(0)}
    assert checked(sample, {"params": torch.ones(2)}, batch) == []
    assert torch.equal(sample(None, batch), zerofn.compile(sample)({"params": torch.ones(2)}, batch))


# --- shards -----------------------------------------------------------------------------------------------------

LOCAL = {
    "mean": lambda p: p.mean(),
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "max": lambda p: p.max(),
    "sort": lambda p: p.sort()[0],
    "topk": lambda p: p.topk(2)[0],
    "cumsum": lambda p: p.cumsum(0),
    "product": lambda p: p @ p,
    "dot": lambda p: torch.dot(p, p),
    "slice": lambda p: p[:3],
    "index": lambda p: p[0],
    "mask": lambda p: p[p > 0],
    "flip": lambda p: p.flip(0),
    "roll": lambda p: p.roll(1),
    "any": lambda p: p.gt(0).any(),
    "view": lambda p: p.view(2, -1),
    "expand": lambda p: p.expand(2, -1),
    "outer": lambda p: p[:, None] * p,
    "softmax": lambda p: p.softmax(0),
    "std": lambda p: p.std(),
    "cat": lambda p: torch.cat([p, p]),
    "write": lambda p: p.clone()[1:].zero_(),
    "later": lambda p: (p.abs() + 1).sqrt().sum(),
}
POINTWISE = {
    "scale": lambda p: p * 2,
    "sum": lambda p: p + p.sign(),
    "where": lambda p: torch.where(p > 0, p, -p),
    "cast": lambda p: p.double().float(),
    "clamp": lambda p: p.clamp(-1, 1),
    "lerp": lambda p: torch.lerp(p, -p, 0.5),
    "addcmul": lambda p: torch.addcmul(p, p, p),
    "finite": lambda p: p.isfinite(),
    "zeros": lambda p: p + torch.zeros_like(p),
    "in place": lambda p: p.clone().mul_(2),
    "scalar": lambda p: p * torch.tensor(2.0),
    "max": lambda p: torch.maximum(p, -p),
}


UNEVEN = {
    "arange": lambda p: p * torch.arange(p.numel()),
    "noise": lambda p: p + torch.linspace(0, 1, p.numel()),
    "mask": lambda p: torch.where(torch.arange(p.numel()) > 3, p, 0.0),
    "view": lambda p: p + torch.ones(1, p.numel()).cumsum(1).view(-1),
}
EVEN = {
    "zeros": lambda p: p + torch.zeros(p.shape),
    "full": lambda p: p * torch.full(p.shape, 2.0).sqrt(),
    "expanded": lambda p: p - torch.tensor(2.0).expand(p.shape),
    "like": lambda p: torch.ones_like(p) * 2 + p,
}


def on_shards(f):
    return lambda state, batch: (state, [f(p) for p in state.params.shards])


def refused_and_let_through(state, bad, message, good):
    """On shards of the state every function of `bad` is refused with `message`, every one of `good` is not."""
    for name, f in bad.items():
        with pytest.raises(CaptureError, match=message):
            check_purity(captured(on_shards(f), state, batch_of()))
            pytest.fail(f"{name} was let through")
    for f in good.values():
        check_purity(captured(on_shards(f), state, batch_of()))


@pytest.mark.part(world=[2], stage=[3])
@pytest.mark.part(world=[1], stage=[1])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_local_is_refused_on_pieces_at_every_stage(stage, world):
    module = build(2)
    with fake_ranks(world):
        message = r"this rank's shard of state entry \"params.*zerofn\.global_norm"
        refused_and_let_through(state_of(module, stage), LOCAL, message, POINTWISE)


def test_a_piece_meets_only_what_is_cut_like_it():
    module = build(2)
    for world in (1, 2):
        with fake_ranks(world):
            message = "is not sharded and has more than one value.*how the state is sharded"
            refused_and_let_through(state_of(module, 3), UNEVEN, message, EVEN)


def test_a_sharded_batch_entry_is_cut_too():
    module = build(2)
    state = state_of(module, 3)

    def step(state, batch):
        return state, tree.tree_map(lambda p, q: p - q, state.params, batch["before"])

    def local(state, batch):
        return state, tree.tree_map(lambda p: p.mean(), batch["before"])

    batch = {**batch_of(), "before": state.params}
    check_purity(captured(step, state, batch))
    refused(local, state, batch, "this rank's shard of batch entry")


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.part(n=[1], stage=[0, 1])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_pieces_too(stage, n):
    module = build(2)

    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_of(module)), n)(batch)
        clipped = tree.tree_map(lambda g: g / g.norm(), grads)
        return state.apply_gradients(clipped), loss

    for world in (1, 2):
        with fake_ranks(world):
            message = refused(step, state_of(module, stage), batch_of(), "this rank's shard")
            assert "g / g.norm()" in message


def test_reductions_of_ours_are_let_through():
    module = build(2)

    def step(state, batch):
        norm = zerofn.global_norm(state.params)
        params = tree.tree_map(lambda p: p / norm, state.params)
        return state.replace(params=params), [
            zerofn.leaf_norms(params),
            zerofn.vdot(params, params),
            zerofn.all_finite(params),
            zerofn.gather(params)["0.weight"].mean(),
        ]

    for stage in range(4):
        with fake_ranks(2):
            check_purity(capture(step, state_of(module, stage), batch_of()))


# --- fingerprints -----------------------------------------------------------------------------------------------


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.part(n=[1], stage=[1])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [1, 2])
def test_ranks_have_one_fingerprint(stage, n):
    module = build()
    found = []
    for rank in range(2):
        with fake_ranks(2, rank):
            found.append(fingerprint(captured(train_step_of(module, n), state_of(module, stage), batch_of(rank))))
    assert found[0] == found[1] and "reduce_scatter" in found[0]


def test_another_entry_has_another():
    module = build()

    def step(entry):
        return lambda state, batch: zerofn.gather(state.params if entry == "params" else state.extra)["0.weight"].sum()

    with fake_ranks(2):
        state = state_of(module, 3, extra={k: p.detach() for k, p in module.named_parameters()})
        texts = {fingerprint(captured(step(entry), state, batch_of())) for entry in ("params", "extra")}
    assert len(texts) == 2


def test_another_order_has_another():
    module = build()

    def step(order):
        return lambda state, batch: [zerofn.gather(state.params[unit])[f"{unit}.weight"].sum() for unit in order]

    with fake_ranks(2):
        state = state_of(module, 3)
        texts = {fingerprint(captured(step(order), state, batch_of())) for order in (["0", "3"], ["3", "0"])}
    assert len(texts) == 2
