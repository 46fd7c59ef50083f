"""Steps that are refused: on every rank, in a sentence, and the state is what it was."""

import collections
import dataclasses
import pickle
import types

import pytest
import torch
from torch.func import functional_call
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import zerofn
from tests.support.captured_steps import rank
from tests.support.same import assert_same_trees
from tests.support.small_steps import WIDTH, batch_of, build, loss_of, state_of, step_with, train_step_of
from tests.support.some import some_of
from zerofn import optim, tree
from zerofn.capture.capture import CaptureError


def impure(module):
    """What is no pure function: name -> (step, what is said of it)."""
    inner, table, learned = train_step_of(module), torch.ones(WIDTH), torch.ones(WIDTH, requires_grad=True)

    def writes_to_the_batch(state, batch):
        batch["x"].mul_(2)
        return inner(state, batch)

    def writes_to_the_state(state, batch):
        state.params.shards[0].mul_(2)
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
        return dataclasses.replace(new, extra={"seen": new.step}), aux

    def adds_up_a_shard(state, batch):
        new, aux = inner(state, batch)
        return new, {**aux, "sum": sum(p.sum() for p in state.params.shards)}

    return {
        writes_to_the_batch: "writes to batch entry 'x'",
        writes_to_the_state: 'writes to state entry "params',
        writes_to_what_it_closes_over: "writes to a tensor it closes over",
        closes_over_what_learns: "requires grad",
        branches: "cannot branch on data",
        returns_another_structure: "returns a state whose structure differs",
        adds_up_a_shard: "sum",
    }


def refused(stage):
    """Every impure step, refused on every rank; then the state is what it was, and a pure one takes it."""
    module = build()
    state, batch = state_of(module, stage), batch_of(rank())
    before = tree.tree_map(torch.clone, (zerofn.unshard(state), batch))
    steps = list(impure(module).items())
    for step, said in some_of(steps, *steps[::2]):
        with pytest.raises((CaptureError, RuntimeError)) as caught:
            zerofn.compile(step)(state, batch)
        assert type(caught.value) is CaptureError and said in str(caught.value), (step.__name__, str(caught.value))
        assert_same_trees((zerofn.unshard(state), batch), before, f"{stage=}, {step.__name__}")
    expected, _ = train_step_of(module)(state_of(module, stage), batch)
    ours, _ = zerofn.compile(train_step_of(module))(state, batch)
    assert_same_trees(zerofn.unshard(ours), zerofn.unshard(expected), f"{stage=}")


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_refused_step_leaves_the_state_as_it_was(ranks, size, stage):
    ranks(size, refused, stage)


def test_a_constant_that_changes_after_capture_is_followed():
    module, table = build(), torch.ones(16)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, aux["loss"] * table.sum()

    call = zerofn.compile(step, donate=False)
    state = state_of(module, 3)
    for _ in range(2):
        assert torch.equal(call(state, batch_of())[1], step(state, batch_of())[1])
        table.mul_(2)


def test_options_that_are_not_there():
    with pytest.raises(ValueError, match="remat=1 is not known"):
        zerofn.compile(lambda s, b: s, remat=1)
    with pytest.raises(ValueError, match="backend='xla'"):
        zerofn.compile(lambda s, b: s, backend="xla")


def test_an_array_is_named():
    module = build()
    batch = {**batch_of(), "more": {"ids": batch_of()["x"].numpy()}}
    with pytest.raises(TypeError, match=r"batch entry 'more.ids' is a ndarray.*torch.as_tensor"):
        zerofn.compile(train_step_of(module))(state_of(module, 3), batch)


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
        assert "ank 0" in message and "ank 1" in message and "combined with the state" in message


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


# --- mistakes of another kind than impurity


@pytest.mark.part(num_microbatches=[2])
@pytest.mark.parametrize("kind", [collections.UserDict, BatchEncoding])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_any_mapping_is_a_batch(kind, num_microbatches):
    module = build(2)
    seen = []

    def loss_fn(params, batch):
        seen.append(type(batch))
        return loss_of(module)(params, batch)

    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    for run in (step, zerofn.compile(step)):
        new, loss = run(state_of(module, 3), kind(batch_of()))
        plain, expected = run(state_of(module, 3), batch_of())
        assert torch.equal(loss, expected)
        assert_same_trees(zerofn.unshard(new.params), zerofn.unshard(plain.params))
    assert set(seen) == {kind, dict}


TWO = build(2)


def _of_output(params, batch):
    return CausalLMOutput(loss=loss_of(TWO)(params, batch), logits=batch["x"])


def _norm(state, batch):
    return state, torch.norm(state.params["0.weight"])


def _grad_of_gathered(state, batch):
    params = zerofn.gather(state.params)
    return state, torch.autograd.grad(loss_of(TWO)(params, batch), list(params.values()))


NORMED = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))


def _normed(state, batch):
    return step_with(lambda p, b: functional_call(NORMED, p, (b["x"],)).square().mean())(state, batch)


def _of_state_dict(state, batch):
    return _normed(zerofn.TrainState.create(params=NORMED.state_dict(), tx=optim.sgd(0.1)), batch)


def _another_optimizer(state, batch):
    return train_step_of(TWO)(state.replace(tx=optim.sgd(0.1, 0.9)), batch)


def _yielding(state, batch):
    yield step_with(loss_of(TWO))(state, batch)


async def _async(state, batch):
    yield step_with(loss_of(TWO))(state, batch)


@pytest.mark.parametrize(
    ("step", "kind"),
    [(_yielding, "generator"), (_async, "async_generator"), (lambda s, b: map(torch.neg, [b["x"]]), "map")],
    ids=["generator", "async", "map"],
)
def test_what_would_run_after_the_step_is_refused(step, kind):
    with pytest.raises(
        zerofn.CaptureError, match=f"the step returns a {kind}, whose code would run only after the step"
    ):
        zerofn.compile(step)(state_of(build(2), 3), batch_of())


@pytest.mark.parametrize(
    "returned",
    [lambda x: {x}, lambda x: types.SimpleNamespace(loss=x), lambda x: str(x.sum())],
    ids=["set", "namespace", "text"],
)
def test_a_tensor_inside_what_is_no_container_is_refused(returned):
    with pytest.raises(zerofn.CaptureError, match="'loss' as a .* that contains a tensor, which has no value"):
        zerofn.compile(lambda state, batch: {"loss": returned(batch["x"])})(state_of(build(2), 3), batch_of())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        (
            step_with(_of_output),
            ValueError,
            "got CausalLMOutput, the whole output of a model. Write `return output.loss`",
        ),
        (_norm, TypeError, r"torch.norm got params\['0.weight'\].*zerofn.global_norm\(params\)"),
        (_grad_of_gathered, RuntimeError, "does not require grad"),
        (_of_state_dict, ValueError, "state.params contain the model's buffers: write TrainState.create"),
        (
            _another_optimizer,
            TypeError,
            r"opt_state is AdamState, but sgd\(learning_rate=0.1, momentum=0.9.*needs SgdState.*tx.init",
        ),
    ],
    ids=["output", "norm", "gathered", "state_dict", "optimizer"],
)
def test_a_mistake_names_its_remedy(step, kind, said, compiled):
    with pytest.raises(kind, match=said) as caught:
        (zerofn.compile(step) if compiled else step)(state_of(build(2), 3), batch_of())
    if compiled and step is _grad_of_gathered:
        assert "gathered parameters require no grad: write loss, grads = state.value_and_grad" in str(caught.value)


def test_pickling_a_state_names_save():
    state = state_of(build(2), 3)
    with pytest.raises(TypeError, match=r"cannot be pickled. Write zerofn.save\(folder, state\)"):
        pickle.dumps(state)


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.lion, optim.muon, optim.rmsprop, optim.adafactor])
def test_torchs_names_of_arguments(make):
    with pytest.raises(TypeError, match=rf"optim.{make.__name__} has no argument 'lr'.*write learning_rate="):
        make(lr=0.1)
    with pytest.raises(TypeError, match="has no argument 'learnin_rate'. Did you mean 'learning_rate'"):
        make(learnin_rate=0.1)


def test_weights_of_torch_save_are_told(tmp_path):
    module = build(2)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(zerofn.CheckpointError, match=r"weights.pt holds pickled weights.*safetensors.torch.save_file"):
        zerofn.load_safetensors(tmp_path / "weights.pt", dict(module.named_parameters()))
